//! What may be written to nvme: a budget of bytes, spent on what is likeliest to be read again.
//!
//! The budget is a token bucket that is filled at a steady rate and holds a quarter of an hour's
//! share, for bursts; and within any hour no more than an hour's share is spent (a drain excepted,
//! which is paid back later). What is offered gets a score, and the bar is set where the part of
//! the offered bytes above it fits the rate, and lower as the bucket fills: what does not fit it is
//! lost. One verdict holds for all blocks that one request used last, and the budget for all of
//! them is set aside with it: half a prefix is of no use.

use super::Catalog;
use super::copies::slot_bytes;
use super::request::Timestamp;
use super::reuse::RequestId;
use super::table::{Block, NIL, NvmeCopy, step_of};

/// What is offered is remembered with this time constant, seconds.
const MEMORY_S: f64 = 600.0;

/// Steps of a score, which lies between 0 and 1.
const BINS: usize = 64;

/// Part of an hour's share that the bucket holds.
const BURST: f64 = 1.0 / 4.0;

/// What was spent is remembered by the minute, for an hour and the minute under way.
const MINUTE_US: u64 = 60_000_000;
const MINUTES: usize = 61;

/// Weights of the chance of a return, and of having been used more than once.
const CHANCE_WEIGHT: f32 = 0.7;
const AGAIN_WEIGHT: f32 = 0.3;

/// The budget of one store.
pub(crate) struct Admission {
    /// Bytes that may be written per second.
    rate: f64,
    burst: f64,
    /// Bytes spent in each of the last minutes, and which minute is under way.
    spent: [f64; MINUTES],
    minute: u64,
    /// Bytes that may be written now. Below 0 after a drain.
    tokens: f64,
    at: Timestamp,
    /// Bytes offered lately, by score, and over how many seconds.
    offered: Vec<f64>,
    seconds: f64,
    /// Blocks that were not written for want of budget.
    pub(crate) refused: u64,
}

impl Admission {
    pub(crate) fn new(bytes_per_day: u64) -> Admission {
        let hour = bytes_per_day as f64 / 24.0;
        let burst = hour * BURST;
        Admission {
            rate: hour / 3600.0,
            burst,
            spent: [0.0; MINUTES],
            minute: 0,
            tokens: burst / 4.0,
            at: Timestamp(0),
            offered: vec![0.0; BINS],
            seconds: 0.0,
            refused: 0,
        }
    }

    fn advance(&mut self, now: Timestamp) {
        let seconds = now.0.saturating_sub(self.at.0) as f64 / 1e6;
        self.forget_minutes(now);
        // Once a second is often enough for what is remembered, and exact for the tokens.
        if seconds < 1.0 {
            return;
        }
        self.at = now;
        self.tokens = (self.tokens + self.rate * seconds).min(self.burst);
        let left = (-seconds / MEMORY_S).exp();
        self.offered.iter_mut().for_each(|bytes| *bytes *= left);
        self.seconds = self.seconds * left + MEMORY_S * (1.0 - left);
    }

    /// Whether what is offered with this score lies above the bar.
    fn decide(&self, score: f32) -> bool {
        let left = self.left().max(0.0);
        let full = (self.burst * 0.75 / (self.burst - left).max(1.0)).max(1.0);
        let mut room = self.rate * self.seconds * full;
        let own = bin(score);
        for (at, bytes) in self.offered.iter().enumerate().rev() {
            if room < *bytes {
                // The bar lies in this bin: of those in it, as many as leave half of the bucket.
                return own > at || (own == at && left > self.burst / 2.0);
            }
            room -= bytes;
        }
        true
    }

    fn offer(&mut self, score: f32, bytes: u64) {
        if let Some(offered) = self.offered.get_mut(bin(score)) {
            *offered += bytes as f64;
        }
    }

    /// Bytes that may be spent now.
    fn left(&self) -> f64 {
        self.tokens.min(self.rate * 3600.0 - self.spent.iter().sum::<f64>())
    }

    fn spend(&mut self, bytes: f64) {
        self.tokens -= bytes;
        if let Some(spent) = self.spent.get_mut(self.minute as usize % MINUTES) {
            *spent += bytes;
        }
    }

    /// Gives back what was spent and is not written.
    fn give_back(&mut self, bytes: f64) {
        // What does not fit the bucket was for a time that is over.
        self.tokens = (self.tokens + bytes).min(self.burst);
        // When it was spent is not known: what is forgotten first must not allow more later on.
        let mut left = bytes;
        for at in self.minute + 1..=self.minute + MINUTES as u64 {
            if let Some(spent) = self.spent.get_mut(at as usize % MINUTES) {
                let part = left.min(*spent);
                *spent -= part;
                left -= part;
            }
        }
    }

    fn forget_minutes(&mut self, now: Timestamp) {
        let minute = now.0 / MINUTE_US;
        for over in (self.minute + 1..=minute).take(MINUTES) {
            if let Some(spent) = self.spent.get_mut(over as usize % MINUTES) {
                *spent = 0.0;
            }
        }
        self.minute = minute;
    }

    fn take(&mut self, bytes: u64) -> bool {
        let enough = self.left() >= bytes as f64;
        if enough {
            self.spend(bytes as f64);
        }
        enough
    }
}

/// Whether only the very same prompt would find the block, and none has: it is shorter than others,
/// so that no path goes on behind it. Where conversations go on, that is one block a turn.
pub(super) fn is_hardly_worth_a_write(block: &Block) -> bool {
    block.is_short() && block.hits == 0 && block.pins == 0 && !block.has_children()
}

/// Whether the block is in host RAM only and counts as dirty, and a write is worth it.
fn waits_for_a_write(block: &Block) -> bool {
    block.host_slot().is_some()
        && block.nvme == NvmeCopy::Absent
        && !block.is_refused()
        && !is_hardly_worth_a_write(block)
}

/// Bytes of the block, if it is offered for the first time.
fn first_offer(block: &mut Block) -> u64 {
    let bytes = if block.is_offered() { 0 } else { slot_bytes(block) };
    block.set_offered(true);
    bytes
}

fn bin(score: f32) -> usize {
    ((score * BINS as f32) as usize).min(BINS - 1)
}

impl Catalog {
    /// Whether writes to nvme are rationed.
    pub(super) fn has_write_budget(&self) -> bool {
        self.nvme.as_ref().is_some_and(|nvme| nvme.admission.is_some())
    }

    /// Whether a dirty block may be written now. What may not is no longer counted as dirty.
    pub(super) fn admit_write(&mut self, index: u32) -> bool {
        if !self.has_write_budget() {
            return true;
        }
        let block = self.table.get(index);
        let (bytes, request, pinned) = (slot_bytes(block), block.request(), block.pins > 0);
        let age = step_of(self.now).saturating_sub(block.used_step());
        let again = if block.hits > 0 { AGAIN_WEIGHT } else { 0.0 };
        let score = (CHANCE_WEIGHT * self.reuse.chance(request, age) + again).min(1.0);
        let draining = self.drain.is_some();
        let known = self.reuse.verdict(request).filter(|_| request != RequestId::default());
        let (all, new) = match known {
            Some(_) => (bytes, first_offer(self.table.get_mut(index))),
            None => self.bytes_to_write(index, request),
        };
        let Some(admission) = self.nvme.as_mut().and_then(|nvme| nvme.admission.as_mut()) else {
            return true;
        };
        admission.advance(self.now);
        if draining {
            admission.spend(bytes as f64);
            return true;
        }
        let admitted = match known {
            Some(true) => self.reuse.spend(request, bytes) || admission.take(bytes),
            Some(false) => false,
            None => {
                let admitted = admission.decide(score) && admission.take(all);
                self.reuse.set_verdict(request, admitted, all.saturating_sub(bytes));
                admitted
            }
        };
        admission.offer(score, new);
        // What is pinned must not be lost, as far as the budget allows.
        let admitted = admitted || (pinned && admission.take(bytes));
        if !admitted {
            admission.refused += 1;
            self.refuse_write(index);
        }
        admitted
    }

    /// Bytes of this block and of those before it that the same request used last and that are
    /// still to be written; and how many of them are offered for the first time. What was refused
    /// is offered again at each use: counted each time, the bar was too high for all of it.
    fn bytes_to_write(&mut self, index: u32, request: RequestId) -> (u64, u64) {
        let (mut all, mut new) = (0, 0);
        let mut at = index;
        while at != NIL && self.table.get(at).request() == request {
            let block = self.table.get_mut(at);
            if at == index || waits_for_a_write(block) {
                all += slot_bytes(block);
                new += first_offer(block);
            }
            // Blocks that no request is known of have nothing to do with each other.
            at = if request == RequestId::default() { NIL } else { block.parent };
        }
        (all, new)
    }

    /// A block that the budget was set aside for will not be written on behalf of this request: it
    /// is used by another one now, or is gone.
    pub(super) fn give_budget_back(&mut self, index: u32, request: RequestId) {
        let block = self.table.get(index);
        let bytes = slot_bytes(block);
        let waits = waits_for_a_write(block);
        if let Some(admission) = self.nvme.as_mut().and_then(|nvme| nvme.admission.as_mut())
            && waits
            && self.reuse.spend(request, bytes)
        {
            admission.give_back(bytes as f64);
        }
    }

    pub(super) fn refuse_write(&mut self, index: u32) {
        let block = self.table.get_mut(index);
        block.set_refused(true);
        let bytes = slot_bytes(block);
        self.host.dirty.remove(index);
        self.host.dirty_bytes -= bytes;
    }

    /// A block that was not worth writing is used again: it may be now.
    pub(super) fn offer_again(&mut self, index: u32) {
        let block = self.table.get_mut(index);
        if block.is_refused() {
            block.set_refused(false);
            self.become_dirty(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offers more than fits, of two kinds, for some hours; returns the bytes of each that were
    /// admitted in every hour.
    fn hours(per_day: u64, offered_per_s: u64) -> Vec<[u64; 2]> {
        let mut admission = Admission::new(per_day);
        let mut hours = vec![[0; 2]; 4];
        for second in 0..4 * 3600u64 {
            admission.advance(Timestamp(second * 1_000_000));
            for (kind, score) in [(0, 0.2), (1, 0.8)] {
                let bytes = offered_per_s / 2;
                let admitted = admission.decide(score) && admission.take(bytes);
                admission.offer(score, bytes);
                hours[(second / 3600) as usize][kind] += if admitted { bytes } else { 0 };
            }
        }
        hours
    }

    #[test]
    fn no_hour_gets_more_than_its_share_and_the_better_half_gets_it() {
        let per_day = 24_000_000_000;
        for (at, [worse, better]) in hours(per_day, 1_000_000).into_iter().enumerate() {
            assert!(worse + better <= per_day / 24, "hour {at}: {worse} + {better}");
            assert!(better > per_day / 24 * 8 / 10, "hour {at}: {worse} + {better}");
            assert!(worse < better / 4, "hour {at}: {worse} + {better}");
        }
    }

    /// Seen on a trace of coding agents: what was refused is offered again at each of its uses.
    /// The bar was set for all that was offered, and most of the budget was not spent.
    #[test]
    fn what_is_offered_again_and_again_does_not_keep_the_budget_from_being_spent() {
        let (per_day, block) = (24_000_000_000, 100_000);
        let mut admission = Admission::new(per_day);
        let (mut left, mut written) = (Vec::new(), 0);
        for second in 0..4 * 3600u64 {
            admission.advance(Timestamp(second * 1_000_000));
            // Half of the budget is new, of two kinds; each is used every minute until written.
            left.extend(
                [0.2, 0.3]
                    .into_iter()
                    .filter(|_| second % 60 == 0)
                    .flat_map(|score| vec![score; 42]),
            );
            if second % 60 == 30 {
                left.retain(|score| {
                    let admitted = admission.decide(*score) && admission.take(block);
                    admission.offer(*score, block);
                    written += u64::from(admitted) * block;
                    !admitted
                });
            }
        }
        assert!(left.len() < 4 * 84, "{} blocks are not written, {written} bytes are", left.len());
    }

    /// Bursts of any length, with any pause between them.
    #[test]
    fn no_sixty_minutes_get_more_than_an_hours_share() {
        let (per_day, block) = (24_000_000_000u64, 1_000_000);
        for pause in [1, 7, 20, 50, 90, 200] {
            let mut admission = Admission::new(per_day);
            let mut minutes = vec![0u64; 600];
            for second in 0..600 * 60u64 {
                admission.advance(Timestamp(second * 1_000_000));
                let offered = if (second / 60) % (2 * pause) < pause { 40 } else { 0 };
                let taken = (0..offered).filter(|_| admission.take(block)).count() as u64;
                minutes[second as usize / 60] += taken * block;
            }
            let most = minutes.windows(60).map(|hour| hour.iter().sum::<u64>()).max().unwrap();
            assert!(most <= per_day / 24, "{most} bytes within an hour, pauses of {pause} minutes");
            assert!(most > per_day / 24 * 9 / 10, "{most} bytes, pauses of {pause} minutes");
        }
    }

    #[test]
    fn what_fits_is_all_written() {
        for [worse, better] in hours(24_000_000_000, 100_000) {
            assert_eq!(worse + better, 360_000_000);
        }
    }
}
