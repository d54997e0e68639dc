//! Predicted reuse: the copy leaves first that promises the fewest hits for the room it takes.
//!
//! A block stands in the queue of what the last request that used it was like; within a queue the
//! least recently used comes last, leaves before roots. What a queue's last block promises at its
//! age is learned elsewhere ([`Outlook`]); the lowest of these promises is the victim. As long as
//! too little is known, the least recently used of all goes first.
//!
//! Invariant: a block does not leave before what follows it in the same tier, as far as that is
//! seen within bounds: whoever comes back for the latter comes for both.

use super::lists::Queues;
use super::{About, Outlook, Policy, QUEUES, SCAN_MAX, Use};

/// A block that may be the victim: the last one of its queue that was not passed over.
struct Candidate {
    queue: u8,
    block: u32,
    score: f32,
    about: About,
}

/// See the head of this file.
pub struct Pre {
    queues: Queues,
    /// The last block of each queue and what is known of it, as far as that was asked for.
    tails: Vec<Option<(u32, About)>>,
    /// Reused from search to search.
    candidates: Vec<Candidate>,
}

impl Default for Pre {
    fn default() -> Pre {
        Pre {
            queues: Queues::new(QUEUES),
            tails: vec![None; QUEUES],
            candidates: Vec::with_capacity(QUEUES),
        }
    }
}

impl Pre {
    fn forget_tail(&mut self, queue: u8, block: u32) {
        if let Some(tail) = self.tails.get_mut(usize::from(queue))
            && tail.as_ref().is_some_and(|(known, _)| *known == block)
        {
            *tail = None;
        }
    }

    fn tail(&mut self, queue: u8, outlook: &dyn Outlook) -> Option<Candidate> {
        let block = self.queues.back(queue)?;
        let tail = self.tails.get_mut(usize::from(queue))?;
        let about = match tail {
            Some((known, about)) if *known == block => *about,
            _ => {
                let about = outlook.about(block);
                *tail = Some((block, about));
                about
            }
        };
        let score = outlook.score(queue, &about);
        Some(Candidate { queue, block, score, about })
    }
}

impl Policy for Pre {
    fn contains(&self, block: u32) -> bool {
        self.queues.queue_of(block).is_some()
    }

    fn insert(&mut self, block: u32, how: Use) {
        self.queues.push_front(how.queue, block);
    }

    fn touch(&mut self, block: u32, how: Use) {
        if let Some(from) = self.queues.move_front(how.queue, block) {
            self.forget_tail(from, block);
            self.forget_tail(how.queue, block);
        }
    }

    fn remove(&mut self, block: u32) {
        if let Some(from) = self.queues.remove(block) {
            self.forget_tail(from, block);
        }
    }

    fn victim(
        &mut self,
        outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32> {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        candidates.extend((0..QUEUES as u8).filter_map(|queue| self.tail(queue, outlook)));
        let found = self.search(&mut candidates, outlook, may_leave);
        self.candidates = candidates;
        found
    }
}

impl Pre {
    fn search(
        &mut self,
        candidates: &mut Vec<Candidate>,
        outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32> {
        // Every block comes by twice at most, and those that were moved to a front once more.
        for _ in 0..SCAN_MAX.min(4 * (self.queues.len() + 1)) {
            let order = |one: &&mut Candidate, other: &&mut Candidate| {
                let scores = one.score.total_cmp(&other.score);
                scores.then(one.about.tick.cmp(&other.about.tick))
            };
            let lowest = candidates.iter_mut().min_by(order)?;
            let (queue, block) = (lowest.queue, lowest.block);
            let next = if !may_leave(block) {
                self.queues.warmer(block)
            } else if let Some(beside) = self.beside_child(block, outlook) {
                let next = self.queues.warmer(block);
                self.queues.move_front(beside, block);
                self.forget_tail(queue, block);
                // It went to the front of a queue, where this search must not meet it again for
                // ever: the number of steps ends that.
                next
            } else {
                return Some(block);
            };
            match next {
                Some(block) => {
                    let about = outlook.about(block);
                    let score = outlook.score(queue, &about);
                    *lowest = Candidate { queue, block, score, about };
                }
                None => candidates.retain(|candidate| candidate.queue != queue),
            }
        }
        None
    }

    /// The queue of a block that follows this one and is here too.
    fn beside_child(&self, block: u32, outlook: &dyn Outlook) -> Option<u8> {
        self.queues.queue_of(outlook.child(block)?)
    }
}
