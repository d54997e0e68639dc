//! Orders of the blocks of many owners. A block is in the chain of one owner at most, so all chains
//! share their links, whose memory follows the blocks that are in one.

const NIL: u32 = u32::MAX;

/// In no chain. No block has this number.
const GONE: u32 = u32::MAX - 1;

#[derive(Clone, Copy)]
struct Link {
    /// Towards the front; `GONE` when the block is in no chain.
    prev: u32,
    /// Towards the back.
    next: u32,
}

const UNLINKED: Link = Link { prev: GONE, next: GONE };

/// Links in one piece of memory.
const PIECE_LINKS: usize = 64;

struct Piece {
    links: [Link; PIECE_LINKS],
    linked: usize,
}

/// The ends of one owner's chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chain {
    front: u32,
    back: u32,
}

impl Default for Chain {
    fn default() -> Chain {
        Chain { front: NIL, back: NIL }
    }
}

impl Chain {
    /// The block that was put first, or used, longest ago.
    pub(super) fn back(&self) -> Option<u32> {
        (self.back != NIL).then_some(self.back)
    }
}

/// The links of all chains.
#[derive(Default)]
pub(super) struct Links {
    pieces: Vec<Option<Box<Piece>>>,
}

impl Links {
    fn get(&self, block: u32) -> Link {
        let at = block as usize;
        let piece = self.pieces.get(at / PIECE_LINKS).and_then(Option::as_deref);
        piece.and_then(|piece| piece.links.get(at % PIECE_LINKS)).copied().unwrap_or(UNLINKED)
    }

    /// The link of a block that is in a chain.
    fn link(&mut self, block: u32) -> &mut Link {
        let at = block as usize;
        let piece = self.pieces.get_mut(at / PIECE_LINKS).and_then(Option::as_mut);
        let link = piece.and_then(|piece| piece.links.get_mut(at % PIECE_LINKS));
        link.expect("what is in a chain has a link")
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.get(block).prev != GONE
    }

    /// The next block towards the front.
    pub(super) fn before(&self, block: u32) -> Option<u32> {
        let prev = self.get(block).prev;
        (prev != GONE && prev != NIL).then_some(prev)
    }

    /// Puts a block, which is in no chain, at the front of one.
    pub(super) fn push_front(&mut self, chain: &mut Chain, block: u32) {
        assert!(!self.contains(block), "block {block} is in a chain already");
        let at = block as usize / PIECE_LINKS;
        if self.pieces.len() <= at {
            self.pieces.resize_with(at + 1, || None);
        }
        if let Some(piece) = self.pieces.get_mut(at) {
            let new = || Box::new(Piece { links: [UNLINKED; PIECE_LINKS], linked: 0 });
            piece.get_or_insert_with(new).linked += 1;
        }
        self.attach(chain, block);
    }

    fn attach(&mut self, chain: &mut Chain, block: u32) {
        *self.link(block) = Link { prev: NIL, next: chain.front };
        match chain.front {
            NIL => chain.back = block,
            front => self.link(front).prev = block,
        }
        chain.front = block;
    }

    fn detach(&mut self, chain: &mut Chain, block: u32) {
        let Link { prev, next } = self.get(block);
        match prev {
            NIL => chain.front = next,
            prev => self.link(prev).next = next,
        }
        match next {
            NIL => chain.back = prev,
            next => self.link(next).prev = prev,
        }
    }

    /// Takes a block out of its chain, which is this one. No effect when it is in none.
    pub(super) fn remove(&mut self, chain: &mut Chain, block: u32) {
        if !self.contains(block) {
            return;
        }
        self.detach(chain, block);
        *self.link(block) = UNLINKED;
        if let Some(piece) = self.pieces.get_mut(block as usize / PIECE_LINKS)
            && let Some(found) = piece
        {
            found.linked -= 1;
            if found.linked == 0 {
                *piece = None;
            }
        }
    }

    /// Moves a block to the front of its chain, which is this one. No effect when it is in none.
    pub(super) fn move_front(&mut self, chain: &mut Chain, block: u32) {
        if self.contains(block) && chain.front != block {
            self.detach(chain, block);
            self.attach(chain, block);
        }
    }

    /// Puts all of another chain behind the back of this one.
    pub(super) fn append(&mut self, chain: &mut Chain, other: Chain) {
        match (chain.back, other.front) {
            (_, NIL) => {}
            (NIL, _) => *chain = other,
            (back, front) => {
                self.link(back).next = front;
                self.link(front).prev = back;
                chain.back = other.back;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn blocks(links: &Links, chain: &Chain) -> Vec<u32> {
        std::iter::successors(chain.back(), |block| links.before(*block)).collect()
    }

    proptest! {
        /// Chains agree with plain deques under any operations.
        #[test]
        fn chains_agree_with_plain_deques(
            ops in prop::collection::vec((0u8..5, 0usize..3, 0u32..200), 0..300),
        ) {
            let mut links = Links::default();
            let mut chains = [Chain::default(); 3];
            let mut plain: [VecDeque<u32>; 3] = Default::default();
            for (op, owner, block) in ops {
                let home = plain.iter().position(|blocks| blocks.contains(&block));
                prop_assert_eq!(links.contains(block), home.is_some());
                match (op, home) {
                    (0 | 1, None) => {
                        links.push_front(&mut chains[owner], block);
                        plain[owner].push_front(block);
                    }
                    (2, Some(home)) => {
                        links.remove(&mut chains[home], block);
                        plain[home].retain(|other| *other != block);
                    }
                    (3, Some(home)) => {
                        links.move_front(&mut chains[home], block);
                        plain[home].retain(|other| *other != block);
                        plain[home].push_front(block);
                    }
                    (4, _) if owner != 0 && block < 4 => {
                        let other = std::mem::take(&mut chains[owner]);
                        links.append(&mut chains[0], other);
                        let moved = std::mem::take(&mut plain[owner]);
                        plain[0].extend(moved);
                    }
                    _ => {}
                }
                for (chain, plain) in chains.iter().zip(&plain) {
                    let expected: Vec<u32> = plain.iter().rev().copied().collect();
                    prop_assert_eq!(blocks(&links, chain), expected);
                }
            }
        }
    }
}
