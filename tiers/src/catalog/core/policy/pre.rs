//! Predicted reuse: the copy leaves first that promises the fewest hits for the room it takes.
//!
//! A block stands in the queue of what the last request that used it was like; within a queue the
//! least recently used comes last, leaves before roots. What a queue's last block promises at its
//! age is learned elsewhere ([`Outlook`]); the lowest of these promises is the victim. As long as
//! too little is known, the least recently used of all goes first, but for what hints say.
//!
//! Invariant: a block does not leave before what follows it in the same tier, as far as that is
//! seen within bounds: whoever comes back for the latter comes for both.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use super::lists::Queues;
use super::{About, Outlook, Policy, QUEUES, SCAN_MAX, Use};

/// Blocks of one queue that a search passes over before it looks at the others. A path that is
/// being loaded may be all that its queue holds, long, and the lowest of all, and none of it may
/// leave.
const PASSED_MAX: u16 = 512;

/// A block that may be the victim: the last one of its queue that was not passed over. The greatest
/// one leaves first.
struct Candidate {
    queue: u8,
    block: u32,
    score: f32,
    about: About,
    /// Blocks of the queue that were passed over.
    passed: u16,
}

impl Ord for Candidate {
    /// The lowest score leaves first, and of equal ones the block that was used first.
    fn cmp(&self, other: &Candidate) -> Ordering {
        let scores = other.score.total_cmp(&self.score);
        let ticks = || other.about.tick.cmp(&self.about.tick);
        scores.then_with(ticks).then_with(|| other.queue.cmp(&self.queue))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// See the head of this file.
pub struct Pre {
    queues: Queues,
    /// The last block of each queue and what is known of it, as far as that was asked for.
    tails: Vec<Option<(u32, About)>>,
    /// Memory that one search leaves to the next.
    candidates: Vec<Candidate>,
    aside: Vec<Candidate>,
    moved: Vec<(u8, u32)>,
}

impl Default for Pre {
    fn default() -> Pre {
        Pre {
            queues: Queues::new(QUEUES),
            tails: vec![None; QUEUES],
            candidates: Vec::with_capacity(QUEUES),
            aside: Vec::new(),
            moved: Vec::new(),
        }
    }
}

impl Policy for Pre {
    fn contains(&self, block: u32) -> bool {
        self.queues.queue_of(block).is_some()
    }

    fn len(&self) -> usize {
        self.queues.len()
    }

    fn insert(&mut self, block: u32, how: Use) {
        self.queues.push_front(how.queue, block);
    }

    fn insert_behind(&mut self, before: u32, block: u32, how: Use) {
        // What was used otherwise stands elsewhere.
        match self.queues.queue_of(before) == Some(how.queue) {
            true => self.queues.push_behind(before, block),
            false => self.queues.push_front(how.queue, block),
        }
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
        candidates.extend((0..QUEUES as u8).filter_map(|queue| self.tail(queue, outlook)));
        let mut heap = BinaryHeap::from(candidates);
        let found = self.search(&mut heap, outlook, may_leave);
        heap.clear();
        self.aside.clear();
        self.moved.clear();
        self.candidates = heap.into_vec();
        found
    }
}

impl Pre {
    /// The least recently used block of a queue.
    pub(crate) fn coldest(&self, queue: u8) -> Option<u32> {
        self.queues.back(queue)
    }

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
        Some(Candidate { queue, block, score, about, passed: 0 })
    }

    /// Merges the queues, coldest first, until a block may leave. One look costs a step down a heap
    /// of queues, not a look at all of them.
    fn search(
        &mut self,
        candidates: &mut BinaryHeap<Candidate>,
        outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32> {
        for _ in 0..SCAN_MAX {
            if candidates.is_empty() {
                candidates.extend(self.aside.drain(..));
            }
            let mut lowest = candidates.peek_mut()?;
            let Candidate { queue, block, passed, .. } = *lowest;
            let next = self.queues.warmer(block).filter(|next| !self.is_moved(queue, *next));
            if may_leave(block) {
                let Some(beside) = self.beside_child(block, outlook) else {
                    return Some(block);
                };
                self.queues.move_front(beside, block);
                self.forget_tail(queue, block);
                if self.moved.iter().all(|(moved, _)| *moved != beside) {
                    self.moved.push((beside, block));
                }
            }
            let Some(block) = next else {
                PeekMut::pop(lowest);
                continue;
            };
            let about = outlook.about(block);
            let score = outlook.score(queue, &about);
            *lowest = Candidate { queue, block, score, about, passed: passed + 1 };
            if passed + 1 == PASSED_MAX {
                let candidate = PeekMut::pop(lowest);
                self.aside.push(Candidate { passed: 0, ..candidate });
            }
        }
        None
    }

    /// Whether the block is the first that this search moved to the front of the queue: what
    /// follows it here cannot leave, and from here on all was moved.
    fn is_moved(&self, queue: u8, block: u32) -> bool {
        self.moved.contains(&(queue, block))
    }

    /// The queue of a block that follows this one and is here too.
    fn beside_child(&self, block: u32, outlook: &dyn Outlook) -> Option<u8> {
        self.queues.queue_of(outlook.child(block)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    const KINDS: u8 = 5;

    /// Ticks are told, scores follow from queue and time, and each odd block follows the even one
    /// before it.
    struct Told {
        ticks: HashMap<u32, u64>,
        scores: [f32; KINDS as usize],
        chains: bool,
        here: Vec<u32>,
    }

    impl Outlook for Told {
        fn about(&self, block: u32) -> About {
            let tick = self.ticks[&block];
            About { tick, used_at: tick as u32 / 4, weight: 1.0 }
        }

        fn score(&self, queue: u8, about: &About) -> f32 {
            // Steps, so that there are ties, and no order between queues that holds for all ages.
            let age = 1000 - about.used_at;
            (self.scores[usize::from(queue)] * (1 + age % 7) as f32).floor()
        }

        fn child(&self, block: u32) -> Option<u32> {
            let child = block + 1;
            (self.chains && block.is_multiple_of(2) && self.here.contains(&child)).then_some(child)
        }

        fn key(&self, block: u32) -> u64 {
            u64::from(block)
        }
    }

    /// The same as plain deques, front first, that are all looked at for each step.
    #[derive(Default)]
    struct Plain {
        queues: [VecDeque<u32>; KINDS as usize],
    }

    impl Plain {
        fn take(&mut self, block: u32) -> Option<u8> {
            for (queue, number) in self.queues.iter_mut().zip(0..) {
                if let Some(at) = queue.iter().position(|other| *other == block) {
                    queue.remove(at);
                    return Some(number);
                }
            }
            None
        }

        fn victim(&mut self, told: &Told, may_leave: impl Fn(u32) -> bool) -> Option<u32> {
            // The next one to look at of each queue.
            let mut at: Vec<Option<u32>> =
                self.queues.iter().map(|queue| queue.back().copied()).collect();
            let mut moved = Vec::new();
            for _ in 0..SCAN_MAX {
                let heads = at.iter().zip(0u8..).filter_map(|(block, queue)| {
                    let about = told.about((*block)?);
                    Some((told.score(queue, &about), about.tick, queue, (*block)?))
                });
                let least = heads.min_by(|one, other| {
                    one.0.total_cmp(&other.0).then((one.1, one.2).cmp(&(other.1, other.2)))
                });
                let (_, _, queue, block) = least?;
                let list = &self.queues[usize::from(queue)];
                let place = list.iter().position(|other| *other == block)?;
                let next = place.checked_sub(1).map(|warmer| list[warmer]);
                // What has moved is not met again.
                let next = next.filter(|next| !moved.contains(next));
                if may_leave(block) {
                    let of_child = told.child(block).and_then(|child| {
                        let held = |list: &VecDeque<u32>| list.contains(&child);
                        self.queues.iter().position(held)
                    });
                    let Some(beside) = of_child else {
                        return Some(block);
                    };
                    // What is at the front of that queue already stays.
                    if beside != usize::from(queue) || place > 0 {
                        self.take(block);
                        self.queues[beside].push_front(block);
                    }
                    moved.push(block);
                }
                at[usize::from(queue)] = next;
            }
            None
        }
    }

    /// Seen on a trace of coding agents: the lowest queue held nothing but paths being loaded.
    /// Their ends could not leave, the rest went to the front of that queue again and again, and
    /// the search ended without a look at the others.
    #[test]
    fn paths_that_cannot_leave_do_not_hide_other_queues() {
        let (mut pre, here) = (Pre::default(), vec![1, 0, 3, 2, 5]);
        let ticks = here.iter().copied().zip(1..).collect();
        let told = Told { ticks, scores: [1.0, 2.0, 0.0, 0.0, 0.0], chains: true, here };
        for block in [1, 0, 3, 2] {
            pre.insert(block, Use::default());
        }
        pre.insert(5, Use { queue: 1, ..Use::default() });
        assert_eq!(pre.victim(&told, &mut |block| block != 1 && block != 3), Some(5));
    }

    proptest! {
        /// The victim is the one that a look at all queues for every step finds.
        #[test]
        fn the_victim_is_that_of_an_exhaustive_search(
            ops in prop::collection::vec((0u8..5, 0u32..40, 0u8..KINDS), 0..300),
            scores in prop::array::uniform5(0.0f32..3.0),
            mask in any::<u64>(),
            chains in any::<bool>(),
        ) {
            let (mut pre, mut plain) = (Pre::default(), Plain::default());
            let (ticks, here) = (HashMap::new(), Vec::new());
            let mut told = Told { ticks, scores, chains, here };
            for (tick, (op, block, queue)) in (1u64..).zip(ops) {
                let how = Use { queue, ..Use::default() };
                match op {
                    0 | 1 if !pre.contains(block) => {
                        told.ticks.insert(block, tick);
                        told.here.push(block);
                        pre.insert(block, how);
                        plain.queues[usize::from(queue)].push_front(block);
                    }
                    0..=2 => {
                        if plain.take(block).is_some() {
                            told.ticks.insert(block, tick);
                            plain.queues[usize::from(queue)].push_front(block);
                        }
                        pre.touch(block, how);
                    }
                    3 => {
                        pre.remove(block);
                        plain.take(block);
                        told.here.retain(|other| *other != block);
                    }
                    _ => {
                        let may_leave = |block: u32| (mask >> block) & 1 == 1;
                        let found = pre.victim(&told, &mut |block| may_leave(block));
                        prop_assert_eq!(found, plain.victim(&told, may_leave));
                        if let Some(victim) = found.filter(|_| block % 2 == 0) {
                            pre.remove(victim);
                            plain.take(victim);
                            told.here.retain(|other| *other != victim);
                        }
                    }
                }
                prop_assert_eq!(pre.len(), told.here.len());
            }
        }
    }
}
