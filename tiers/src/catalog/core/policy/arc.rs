//! ARC (Megiddo and Modha, FAST '03), leaf-first: two lists, of blocks used once and of blocks used
//! again, whose shares follow from which of the two lately lost blocks that were asked for again.
//!
//! Invariant: no more keys of blocks that left are remembered than there are blocks.

use std::collections::{HashMap, VecDeque};

use super::lists::Queues;
use super::{Outlook, Policy, SCAN_MAX, Use};

const ONCE: u8 = 0;
const AGAIN: u8 = 1;

/// Keys of blocks that left one of the lists, oldest first. Those asked for again since stay in
/// line until their turn, but count no more.
#[derive(Default)]
struct Ghosts {
    line: VecDeque<(u64, u64)>,
    live: usize,
}

/// See the head of this file.
pub struct Arc {
    queues: Queues,
    /// Blocks in each of the lists.
    counts: [usize; 2],
    /// How many blocks of the list `ONCE` are aimed at.
    target: usize,
    ghosts: [Ghosts; 2],
    /// By key: which list the block left, and its number in line.
    left: HashMap<u64, (u8, u64)>,
    next_in_line: u64,
    /// The victim that was named last, and its key.
    chosen: Option<(u32, u64)>,
}

impl Default for Arc {
    fn default() -> Arc {
        Arc {
            queues: Queues::new(2),
            counts: [0; 2],
            target: 0,
            ghosts: Default::default(),
            left: HashMap::new(),
            next_in_line: 0,
            chosen: None,
        }
    }
}

impl Arc {
    fn count(&mut self, queue: u8) -> &mut usize {
        let [once, again] = &mut self.counts;
        if queue == ONCE { once } else { again }
    }

    fn ghosts(&mut self, queue: u8) -> &mut Ghosts {
        let [once, again] = &mut self.ghosts;
        if queue == ONCE { once } else { again }
    }

    /// Remembers the key of a block that left `queue`.
    fn remember(&mut self, queue: u8, key: u64) {
        self.next_in_line += 1;
        let number = self.next_in_line;
        if let Some((old, _)) = self.left.insert(key, (queue, number)) {
            self.ghosts(old).live -= 1;
        }
        let ghosts = self.ghosts(queue);
        ghosts.line.push_back((key, number));
        ghosts.live += 1;
        let resident = self.queues.len() + 1;
        // As in the original: with the resident ones, `ONCE` names at most as many blocks as there
        // are, and both lists at most twice as many.
        let once_max = resident.saturating_sub(*self.count(ONCE));
        self.shrink(ONCE, once_max);
        let once = self.ghosts(ONCE).live;
        self.shrink(AGAIN, resident.saturating_sub(once));
    }

    fn shrink(&mut self, queue: u8, most: usize) {
        loop {
            let ghosts = self.ghosts(queue);
            // What counts no more must not pile up either.
            if ghosts.live <= most && ghosts.line.len() <= 2 * most + 64 {
                return;
            }
            let Some((key, number)) = ghosts.line.pop_front() else {
                return;
            };
            if self.left.get(&key) == Some(&(queue, number)) {
                self.left.remove(&key);
                self.ghosts(queue).live -= 1;
            }
        }
    }
}

impl Policy for Arc {
    fn contains(&self, block: u32) -> bool {
        self.queues.queue_of(block).is_some()
    }

    fn len(&self) -> usize {
        self.queues.len()
    }

    fn insert(&mut self, block: u32, how: Use) {
        let mut to = ONCE;
        if let Some((from, _)) = self.left.remove(&how.key) {
            to = AGAIN;
            let (once, again) = (self.ghosts(ONCE).live.max(1), self.ghosts(AGAIN).live.max(1));
            self.ghosts(from).live -= 1;
            self.target = match from {
                ONCE => (self.target + (again / once).max(1)).min(self.queues.len()),
                _ => self.target.saturating_sub((once / again).max(1)),
            };
        }
        self.queues.push_front(to, block);
        *self.count(to) += 1;
    }

    fn touch(&mut self, block: u32, how: Use) {
        let Some(from) = self.queues.queue_of(block) else {
            return;
        };
        let to = if how.fresh { AGAIN } else { from };
        self.queues.move_front(to, block);
        *self.count(from) -= 1;
        *self.count(to) += 1;
    }

    fn remove(&mut self, block: u32) {
        if let Some(from) = self.queues.remove(block) {
            *self.count(from) -= 1;
            if let Some((chosen, key)) = self.chosen.take()
                && chosen == block
            {
                self.remember(from, key);
            }
        }
    }

    fn victim(
        &mut self,
        outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32> {
        let mut queue = if *self.count(ONCE) > self.target { ONCE } else { AGAIN };
        let mut at = self.queues.back(queue);
        let mut ends = 0;
        // Every block comes by twice at most, and those that were moved to a front once more.
        for _ in 0..SCAN_MAX.min(4 * (self.queues.len() + 1)) {
            let Some(block) = at else {
                ends += 1;
                if ends == 2 {
                    return None;
                }
                queue = 1 - queue;
                at = self.queues.back(queue);
                continue;
            };
            at = self.queues.warmer(block);
            if !may_leave(block) {
                continue;
            }
            let Some(child) = outlook.child(block) else {
                self.chosen = Some((block, outlook.key(block)));
                return Some(block);
            };
            // What follows it goes first: it is in line there, or in the other list.
            let of_child = self.queues.queue_of(child).unwrap_or(queue);
            let to = of_child.max(queue);
            self.queues.move_front(to, block);
            *self.count(queue) -= 1;
            *self.count(to) += 1;
            if of_child < queue {
                queue = of_child;
                at = self.queues.back(queue);
            }
        }
        None
    }
}
