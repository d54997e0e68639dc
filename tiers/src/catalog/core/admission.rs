//! What may be written to nvme: a budget of bytes, spent on what is likeliest to be read again.
//!
//! The budget is a token bucket that is filled at a steady rate and never holds more than a
//! sixteenth of an hour's share, so that within any hour no more than an hour's share is written
//! (a drain excepted, which is paid back later). What is offered gets a score, and the bar is set
//! where the part of the offered bytes above it fits the rate. One verdict holds for all blocks
//! that one request used last, and the budget for all of them is set aside with it: half a prefix
//! is of no use.

use super::Catalog;
use super::copies::slot_bytes;
use super::request::Timestamp;
use super::reuse::RequestId;
use super::table::{NvmeCopy, step_of};

/// What is offered is remembered with this time constant, seconds.
const MEMORY_S: f64 = 600.0;

/// Steps of a score, which lies between 0 and 1.
const BINS: usize = 64;

/// Part of an hour's share that the bucket holds: so much less is filled in within an hour.
const BURST: f64 = 1.0 / 16.0;

/// Weights of the chance of a return, and of having been used more than once.
const CHANCE_WEIGHT: f32 = 0.7;
const AGAIN_WEIGHT: f32 = 0.3;

/// The budget of one store.
pub(crate) struct Admission {
    /// Bytes that may be written per second, the burst deducted.
    rate: f64,
    burst: f64,
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
            rate: (hour - burst) / 3600.0,
            burst,
            tokens: burst,
            at: Timestamp(0),
            offered: vec![0.0; BINS],
            seconds: 0.0,
            refused: 0,
        }
    }

    fn advance(&mut self, now: Timestamp) {
        let seconds = now.0.saturating_sub(self.at.0) as f64 / 1e6;
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
        let mut room = self.rate * self.seconds + self.tokens.max(0.0);
        let own = bin(score);
        for (at, bytes) in self.offered.iter().enumerate().rev() {
            if room < *bytes {
                // The bar lies in this bin: of those in it, as many as leave half of the bucket.
                return own > at || (own == at && self.tokens > self.burst / 2.0);
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

    fn take(&mut self, bytes: u64) -> bool {
        let enough = self.tokens >= bytes as f64;
        if enough {
            self.tokens -= bytes as f64;
        }
        enough
    }
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
        let block = self.table.get(index);
        let (bytes, request, pinned) = (slot_bytes(block), block.request(), block.pins > 0);
        let age = step_of(self.now).saturating_sub(block.used_step());
        let again = if block.hits > 0 { AGAIN_WEIGHT } else { 0.0 };
        let score = (CHANCE_WEIGHT * self.reuse.chance(request, age) + again).min(1.0);
        let draining = self.drain.is_some();
        let known = self.reuse.verdict(request).filter(|_| request != RequestId::default());
        let all = if known.is_none() { self.bytes_to_write(index, request) } else { bytes };
        let Some(admission) = self.nvme.as_mut().and_then(|nvme| nvme.admission.as_mut()) else {
            return true;
        };
        admission.advance(self.now);
        if draining {
            admission.tokens -= bytes as f64;
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
        admission.offer(score, bytes);
        // What is pinned must not be lost, as far as the budget allows.
        let admitted = admitted || (pinned && admission.take(bytes));
        if !admitted {
            admission.refused += 1;
            self.refuse_write(index);
        }
        admitted
    }

    /// Bytes of this block and of those before it that the same request used last and that are
    /// still to be written.
    fn bytes_to_write(&self, index: u32, request: RequestId) -> u64 {
        let path = self.table.ancestors(index).map(|at| self.table.get(at));
        let own = path.take_while(|block| block.request() == request);
        let dirty = own.filter(|block| {
            block.host_slot().is_some() && block.nvme == NvmeCopy::Absent && !block.is_refused()
        });
        let bytes = slot_bytes(self.table.get(index));
        if request == RequestId::default() { bytes } else { dirty.map(slot_bytes).sum() }
    }

    /// A block that the budget was set aside for will not be written on behalf of this request: it
    /// is used by another one now, or is gone.
    pub(super) fn give_budget_back(&mut self, index: u32, request: RequestId) {
        let block = self.table.get(index);
        let bytes = slot_bytes(block);
        let waits =
            block.host_slot().is_some() && block.nvme == NvmeCopy::Absent && !block.is_refused();
        if let Some(admission) = self.nvme.as_mut().and_then(|nvme| nvme.admission.as_mut())
            && waits
            && self.reuse.spend(request, bytes)
        {
            // What does not fit the bucket was for an hour that is over.
            admission.tokens = (admission.tokens + bytes as f64).min(admission.burst);
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

    #[test]
    fn what_fits_is_all_written() {
        for [worse, better] in hours(24_000_000_000, 100_000) {
            assert_eq!(worse + better, 360_000_000);
        }
    }
}
