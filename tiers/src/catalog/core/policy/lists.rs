//! Doubly linked lists of block numbers. Their memory follows the blocks that are in them, not
//! those that exist: few of all blocks are in host RAM, and fewer are dirty there.

use super::SCAN_MAX;

const NIL: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    /// Towards the front (warmer); `GONE` when the block is in no list.
    prev: u32,
    /// Towards the back (colder).
    next: u32,
}

/// In no list. No block has this number, which is not `NIL`.
const GONE: u32 = u32::MAX - 1;

const UNLINKED: Link = Link { prev: GONE, next: GONE };

/// Links in one piece of memory.
const PIECE_LINKS: usize = 64;

/// Links of blocks whose numbers are neighbours. There as long as one of them is in a list.
struct Piece {
    links: [Link; PIECE_LINKS],
    queues: [u8; PIECE_LINKS],
    linked: usize,
}

#[derive(Clone, Copy)]
struct Ends {
    front: u32,
    back: u32,
}

/// Several lists that share their links: a block is in one of them at most.
pub(crate) struct Queues {
    pieces: Vec<Option<Box<Piece>>>,
    ends: Vec<Ends>,
    count: usize,
}

impl Queues {
    pub(crate) fn new(queues: usize) -> Queues {
        let empty = Ends { front: NIL, back: NIL };
        Queues { pieces: Vec::new(), ends: vec![empty; queues], count: 0 }
    }

    /// The link of a block that is in a list.
    fn link(&mut self, block: u32) -> &mut Link {
        let at = block as usize;
        let piece = self.pieces.get_mut(at / PIECE_LINKS).and_then(Option::as_mut);
        let link = piece.and_then(|piece| piece.links.get_mut(at % PIECE_LINKS));
        link.expect("what is in a list has a link")
    }

    fn piece(&self, block: u32) -> Option<&Piece> {
        self.pieces.get(block as usize / PIECE_LINKS)?.as_deref()
    }

    fn get(&self, block: u32) -> Link {
        let at = block as usize % PIECE_LINKS;
        let link = self.piece(block).and_then(|piece| piece.links.get(at));
        link.copied().unwrap_or(UNLINKED)
    }

    /// The list that the block is in.
    pub(crate) fn queue_of(&self, block: u32) -> Option<u8> {
        let (piece, at) = (self.piece(block)?, block as usize % PIECE_LINKS);
        piece.links.get(at).filter(|link| link.prev != GONE)?;
        piece.queues.get(at).copied()
    }

    fn ends(&self, queue: u8) -> Ends {
        self.ends.get(usize::from(queue)).copied().unwrap_or(Ends { front: NIL, back: NIL })
    }

    fn ends_mut(&mut self, queue: u8) -> &mut Ends {
        self.ends.get_mut(usize::from(queue)).expect("callers name queues that exist")
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// The warmest block of a list.
    pub(crate) fn front(&self, queue: u8) -> Option<u32> {
        Some(self.ends(queue).front).filter(|block| *block != NIL)
    }

    /// The coldest block of a list.
    pub(crate) fn back(&self, queue: u8) -> Option<u32> {
        Some(self.ends(queue).back).filter(|block| *block != NIL)
    }

    /// The next warmer block of the same list.
    pub(crate) fn warmer(&self, block: u32) -> Option<u32> {
        let prev = self.get(block).prev;
        (prev != GONE && prev != NIL).then_some(prev)
    }

    pub(crate) fn push_front(&mut self, queue: u8, block: u32) {
        assert!(self.get(block).prev == GONE, "block {block} is in a list already");
        let at = block as usize / PIECE_LINKS;
        if self.pieces.len() <= at {
            self.pieces.resize_with(at + 1, || None);
        }
        if let Some(piece) = self.pieces.get_mut(at) {
            let new = || {
                let (links, queues) = ([UNLINKED; PIECE_LINKS], [0; PIECE_LINKS]);
                Box::new(Piece { links, queues, linked: 0 })
            };
            piece.get_or_insert_with(new).linked += 1;
        }
        self.attach_front(queue, block);
        self.count += 1;
    }

    /// Puts a block into the list that `other` is in, next to it on the colder side.
    pub(crate) fn push_behind(&mut self, other: u32, block: u32) {
        let Some(queue) = self.queue_of(other) else {
            return;
        };
        self.push_front(queue, block);
        self.detach(queue, self.get(block));
        let next = self.get(other).next;
        *self.link(block) = Link { prev: other, next };
        self.link(other).next = block;
        match next {
            NIL => self.ends_mut(queue).back = block,
            next => self.link(next).prev = block,
        }
    }

    fn attach_front(&mut self, queue: u8, block: u32) {
        let front = self.ends(queue).front;
        *self.link(block) = Link { prev: NIL, next: front };
        let piece = self.pieces.get_mut(block as usize / PIECE_LINKS).and_then(Option::as_mut);
        if let Some(tag) = piece.and_then(|p| p.queues.get_mut(block as usize % PIECE_LINKS)) {
            *tag = queue;
        }
        if front == NIL {
            self.ends_mut(queue).back = block;
        } else {
            self.link(front).prev = block;
        }
        self.ends_mut(queue).front = block;
    }

    fn detach(&mut self, queue: u8, Link { prev, next }: Link) {
        match prev {
            NIL => self.ends_mut(queue).front = next,
            prev => self.link(prev).next = next,
        }
        match next {
            NIL => self.ends_mut(queue).back = prev,
            next => self.link(next).prev = prev,
        }
    }

    /// Takes a block out of its list, which is returned.
    pub(crate) fn remove(&mut self, block: u32) -> Option<u8> {
        let queue = self.queue_of(block)?;
        let link = self.get(block);
        self.detach(queue, link);
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
        Some(queue)
    }

    /// Moves a block to the front of a list, from whichever it is in, which is returned. No effect
    /// when it is in none.
    pub(crate) fn move_front(&mut self, queue: u8, block: u32) -> Option<u8> {
        let from = self.queue_of(block)?;
        let link = self.get(block);
        // What is there already stays.
        if from != queue || link.prev != NIL {
            self.detach(from, link);
            self.attach_front(queue, block);
        }
        Some(from)
    }
}

/// One list.
pub(crate) struct OrderList(Queues);

impl Default for OrderList {
    fn default() -> OrderList {
        OrderList(Queues::new(1))
    }
}

impl OrderList {
    pub(crate) fn contains(&self, block: u32) -> bool {
        self.0.queue_of(block).is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The warmest block.
    pub(crate) fn front(&self) -> Option<u32> {
        self.0.front(0)
    }

    /// The coldest block.
    pub(crate) fn back(&self) -> Option<u32> {
        self.0.back(0)
    }

    /// The next warmer block.
    pub(crate) fn warmer(&self, block: u32) -> Option<u32> {
        self.0.warmer(block)
    }

    pub(crate) fn push_front(&mut self, block: u32) {
        self.0.push_front(0, block);
    }

    /// As the coldest but for what is colder than `before`, the block that precedes it, or as the
    /// warmest where that is not in the list.
    pub(crate) fn push_behind(&mut self, before: u32, block: u32) {
        match self.contains(before) {
            true => self.0.push_behind(before, block),
            false => self.0.push_front(0, block),
        }
    }

    pub(crate) fn remove(&mut self, block: u32) -> bool {
        self.0.remove(block).is_some()
    }

    pub(crate) fn move_front(&mut self, block: u32) {
        self.0.move_front(0, block);
    }

    /// The coldest block that may leave, of the 4,096 coldest.
    pub(super) fn victim(&self, may_leave: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn coldest_first(list: &OrderList) -> Vec<u32> {
        std::iter::successors(list.back(), |block| list.warmer(*block)).collect()
    }

    #[test]
    fn a_path_that_comes_root_first_is_colder_towards_its_end() {
        let mut list = OrderList::default();
        list.push_front(100);
        for (before, block) in [(NIL, 1), (1, 2), (2, 3), (1, 4), (77, 200)] {
            list.push_behind(before, block);
        }
        assert_eq!(coldest_first(&list), [100, 3, 2, 4, 1, 200]);
        assert_eq!((list.len(), list.front()), (6, Some(200)));
        for block in [3, 1, 200, 100] {
            assert!(list.remove(block));
        }
        list.push_behind(2, 5);
        assert_eq!(coldest_first(&list), [5, 2, 4]);
    }
}
