//! Which copy leaves a tier first. One policy object serves the copies of one tier and size class;
//! it knows blocks by number only and holds no other state than its order.

/// The order in which copies leave a tier. Blocks are named by their number in the block table;
/// callers touch a request's blocks leaf first, root last, so that leaves are colder than roots.
pub trait Policy: Send {
    /// The name by which configurations choose it.
    fn name(&self) -> &'static str;
    /// A copy enters the tier. The block must not be in it.
    fn insert(&mut self, block: u32);
    /// A copy was used.
    fn touch(&mut self, block: u32);
    /// A copy leaves, for whatever reason. No effect when it is not there.
    fn remove(&mut self, block: u32);
    /// The first block, coldest first, for which `may_leave` is true. Looks at 4,096 blocks at
    /// most, so that a tier full of pinned copies costs bounded time. The block stays inserted.
    fn victim(&mut self, may_leave: &mut dyn FnMut(u32) -> bool) -> Option<u32>;
}

/// Most blocks that one search for a victim looks at.
const SCAN_MAX: usize = 4096;

/// Makes a policy by name.
pub fn policy_by_name(name: &str) -> Option<Box<dyn Policy>> {
    match name {
        "lru" => Some(Box::new(Lru::default())),
        "fifo" => Some(Box::new(Fifo::default())),
        "sieve" => Some(Box::new(Sieve::default())),
        _ => None,
    }
}

/// The names that [`policy_by_name`] knows.
pub const POLICY_NAMES: [&str; 3] = ["lru", "fifo", "sieve"];

const NIL: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    /// Towards the front (warmer); `GONE` when the block is not in the list.
    prev: u32,
    /// Towards the back (colder).
    next: u32,
}

/// Not in the list. No block has this number, which is not `NIL`.
const GONE: u32 = u32::MAX - 1;

const UNLINKED: Link = Link { prev: GONE, next: GONE };

/// Links in one piece of memory.
const PIECE_LINKS: usize = 64;

/// Links of blocks whose numbers are neighbours. There as long as one of them is in the list.
struct Piece {
    links: [Link; PIECE_LINKS],
    linked: usize,
}

/// A doubly linked list of block numbers. Its memory follows the blocks that are in it, not those
/// that exist: few of all blocks are in host RAM, and fewer are dirty there.
pub(crate) struct OrderList {
    pieces: Vec<Option<Box<Piece>>>,
    front: u32,
    back: u32,
    count: usize,
}

impl Default for OrderList {
    fn default() -> OrderList {
        OrderList { pieces: Vec::new(), front: NIL, back: NIL, count: 0 }
    }
}

impl OrderList {
    /// The link of a block that is in the list.
    fn link(&mut self, block: u32) -> &mut Link {
        let at = block as usize;
        let piece = self.pieces.get_mut(at / PIECE_LINKS).and_then(Option::as_mut);
        let link = piece.and_then(|piece| piece.links.get_mut(at % PIECE_LINKS));
        link.expect("what is in the list has a link")
    }

    fn get(&self, block: u32) -> Link {
        let at = block as usize;
        let piece = self.pieces.get(at / PIECE_LINKS).and_then(Option::as_ref);
        let link = piece.and_then(|piece| piece.links.get(at % PIECE_LINKS));
        link.copied().unwrap_or(UNLINKED)
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.get(block).prev != GONE
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// The warmest block.
    pub(crate) fn front(&self) -> Option<u32> {
        (self.front != NIL).then_some(self.front)
    }

    /// The coldest block.
    pub(crate) fn back(&self) -> Option<u32> {
        (self.back != NIL).then_some(self.back)
    }

    /// The next warmer block.
    pub(crate) fn warmer(&self, block: u32) -> Option<u32> {
        let prev = self.get(block).prev;
        (prev != GONE && prev != NIL).then_some(prev)
    }

    pub(crate) fn push_front(&mut self, block: u32) {
        assert!(!self.contains(block), "block {block} is in the list already");
        let at = block as usize / PIECE_LINKS;
        if self.pieces.len() <= at {
            self.pieces.resize_with(at + 1, || None);
        }
        if let Some(piece) = self.pieces.get_mut(at) {
            let new = || Box::new(Piece { links: [UNLINKED; PIECE_LINKS], linked: 0 });
            piece.get_or_insert_with(new).linked += 1;
        }
        self.attach_front(block);
        self.count += 1;
    }

    fn attach_front(&mut self, block: u32) {
        let front = self.front;
        *self.link(block) = Link { prev: NIL, next: front };
        if front == NIL {
            self.back = block;
        } else {
            self.link(front).prev = block;
        }
        self.front = block;
    }

    fn detach(&mut self, Link { prev, next }: Link) {
        match prev {
            NIL => self.front = next,
            prev => self.link(prev).next = next,
        }
        match next {
            NIL => self.back = prev,
            next => self.link(next).prev = prev,
        }
    }

    pub(crate) fn remove(&mut self, block: u32) -> bool {
        let link = self.get(block);
        if link.prev == GONE {
            return false;
        }
        self.detach(link);
        *self.link(block) = UNLINKED;
        self.count -= 1;
        if let Some(piece) = self.pieces.get_mut(block as usize / PIECE_LINKS)
            && let Some(found) = piece
        {
            found.linked -= 1;
            if found.linked == 0 {
                *piece = None;
            }
        }
        true
    }

    pub(crate) fn move_front(&mut self, block: u32) {
        let link = self.get(block);
        // What is at the front already stays.
        if link.prev != GONE && link.prev != NIL {
            self.detach(link);
            self.attach_front(block);
        }
    }

    fn victim(&self, may_leave: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let mut at = self.back();
        for _ in 0..SCAN_MAX {
            let block = at?;
            if may_leave(block) {
                return Some(block);
            }
            at = self.warmer(block);
        }
        None
    }
}

/// Least recently used; leaf-first by the order of touches.
#[derive(Default)]
pub struct Lru(OrderList);

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn insert(&mut self, block: u32) {
        self.0.push_front(block);
    }

    fn touch(&mut self, block: u32) {
        self.0.move_front(block);
    }

    fn remove(&mut self, block: u32) {
        self.0.remove(block);
    }

    fn victim(&mut self, may_leave: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.0.victim(may_leave)
    }
}

/// First in, first out.
#[derive(Default)]
pub struct Fifo(OrderList);

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn insert(&mut self, block: u32) {
        self.0.push_front(block);
    }

    fn touch(&mut self, _block: u32) {}

    fn remove(&mut self, block: u32) {
        self.0.remove(block);
    }

    fn victim(&mut self, may_leave: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.0.victim(may_leave)
    }
}

/// SIEVE (Zhang et al., NSDI '24): a FIFO whose hand spares blocks that were used since it last
/// came by.
pub struct Sieve {
    order: OrderList,
    used: Vec<bool>,
    hand: u32,
}

impl Default for Sieve {
    fn default() -> Sieve {
        Sieve { order: OrderList::default(), used: Vec::new(), hand: NIL }
    }
}

impl Sieve {
    fn mark(&mut self, block: u32, used: bool) {
        let at = block as usize;
        if at >= self.used.len() {
            self.used.resize(at + 1, false);
        }
        if let Some(mark) = self.used.get_mut(at) {
            *mark = used;
        }
    }
}

impl Policy for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    fn insert(&mut self, block: u32) {
        self.mark(block, false);
        self.order.push_front(block);
    }

    fn touch(&mut self, block: u32) {
        if self.order.contains(block) {
            self.mark(block, true);
        }
    }

    fn remove(&mut self, block: u32) {
        if self.hand == block {
            self.hand = self.order.warmer(block).unwrap_or(NIL);
        }
        self.order.remove(block);
    }

    fn victim(&mut self, may_leave: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        // Two rounds: the first may spare every block.
        for _ in 0..SCAN_MAX.max(2 * self.order.len() + 1) {
            let block = if self.hand == NIL { self.order.back()? } else { self.hand };
            self.hand = self.order.warmer(block).unwrap_or(NIL);
            if self.used.get(block as usize).copied().unwrap_or(false) {
                self.mark(block, false);
            } else if may_leave(block) {
                return Some(block);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// LRU agrees with a plain deque under any operations.
        #[test]
        fn lru_agrees_with_a_plain_deque(ops in prop::collection::vec((0u8..4, 0u32..16), 0..200)) {
            let mut lru = Lru::default();
            let mut plain: VecDeque<u32> = VecDeque::new();
            for (op, block) in ops {
                let at = plain.iter().position(|other| *other == block);
                match (op, at) {
                    (0, None) => {
                        lru.insert(block);
                        plain.push_front(block);
                    }
                    (1, _) => {
                        lru.touch(block);
                        if let Some(at) = at {
                            plain.remove(at);
                            plain.push_front(block);
                        }
                    }
                    (2, _) => {
                        lru.remove(block);
                        if let Some(at) = at {
                            plain.remove(at);
                        }
                    }
                    _ => {
                        let odd = |block: u32| block % 2 == 1;
                        let expected = plain.iter().rev().copied().find(|block| odd(*block));
                        prop_assert_eq!(lru.victim(&mut |block| odd(block)), expected);
                    }
                }
                prop_assert_eq!(lru.0.len(), plain.len());
            }
        }
    }

    #[test]
    fn sieve_spares_what_was_used() {
        let mut sieve = Sieve::default();
        for block in 0..3 {
            sieve.insert(block);
        }
        sieve.touch(0);
        assert_eq!(sieve.victim(&mut |_| true), Some(1));
        sieve.remove(1);
        assert_eq!(sieve.victim(&mut |_| true), Some(2));
    }
}
