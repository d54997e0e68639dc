//! Which segments are reclaimed, and what of them is written again.
//!
//! What leaves a segment is what promises the least, as in the other tiers; but it leaves by the
//! segment, and staying costs a write. So the segment goes whose room promises the least, and of
//! its blocks those are written again that were hit there, or that others need, and promise about
//! as much as what stays. Promises are looked at for a few segments each time, from samples: the
//! ones that were lowest, since their blocks may have been used meanwhile, and some in turn, since
//! promises fade.

use super::Catalog;
use super::copies::slot_bytes;
use super::event::Action;
use super::policy::Outlook;
use super::segments::{Segment, SegmentState};
use super::slot_tier::{Home, View};
use super::table::{FillSource, HostCopy, NvmeCopy, step_of};
use crate::block::page_ceil;

/// Segments with the lowest promises that are looked at again before one is chosen.
const LOWEST: usize = 64;

/// Segments that are looked at in turn each time.
const IN_TURN: usize = 32;

/// Blocks of a segment that stand for all of them.
const SAMPLE: usize = 64;

/// Part of what the room on nvme promises on average that a block must promise to be written again.
/// Measured on traces: with less, most of what is written is written again, and hits are no more.
const WORTH_A_WRITE: f32 = 0.5;

/// What a block that is in host RAM too counts of what it promises: nothing is lost for now with
/// its copy on nvme, but that it has to be written again. Measured on traces, as above.
const IN_HOST_TOO: f32 = 0.3;

/// When no segment was worth reclaiming, or could be, none is looked for again for so long,
/// milliseconds.
const RETRY_MS: u64 = 100;

impl Catalog {
    /// Keeps a few clean segments ahead of the writes.
    pub(super) fn pump_reclaim(&mut self) {
        while self.nvme_usable() && self.nvme.as_ref().is_some_and(|n| n.segments.wants_clean()) {
            let pressed = self.is_pressed();
            if self.now < self.reclaim_at && (!pressed || self.reclaim_blocked) {
                return;
            }
            self.reclaim_blocked = false;
            self.drop_over_soft();
            let Some((victim, whole)) = self.segment_to_reclaim(pressed) else {
                return;
            };
            if !self.worth_reclaiming(victim) {
                self.reclaim_at = self.now.plus_ms(RETRY_MS);
                return;
            }
            if self.is_last_of_pinned(victim) {
                self.reclaim_blocked = true;
                self.reclaim_at = self.now.plus_ms(RETRY_MS);
                return;
            }
            if let Some(nvme) = &mut self.nvme {
                nvme.segments.begin_reclaim(victim);
            }
            self.reclaim(victim, whole);
            self.pump_fetches();
        }
    }

    /// The segment to reclaim next, and whether all that can be reached in it is to be written
    /// again: it is little, and a path's root may be in it, without which all that follows
    /// elsewhere is of no use. Where host RAM has no room for that, only a segment in which nothing
    /// can be reached is taken for being nearly empty.
    fn segment_to_reclaim(&mut self, pressed: bool) -> Option<(u32, bool)> {
        let segments = &mut self.nvme.as_mut()?.segments;
        if let Some(victim) = segments.of_long_log().or_else(|| segments.nearly_empty(!pressed)) {
            let whole = segments.is_nearly_empty(victim, !pressed);
            return Some((victim, whole));
        }
        for segment in segments.pick_to_look_at(LOWEST, IN_TURN) {
            let promise = self.promise_of_segment(segment);
            if let Some(nvme) = &mut self.nvme {
                nvme.segments.get_mut(segment).promise = promise;
            }
        }
        let victim = self.nvme.as_ref()?.segments.least_promising(!pressed)?;
        Some((victim, false))
    }

    /// What a hit less or more on the block is worth for the room it takes, by its last use.
    fn promise(&self, index: u32) -> f32 {
        if self.table.get(index).orphan {
            return 0.0;
        }
        let (now, table, reuse) = (step_of(self.now), &self.table, &self.reuse);
        let (home, weigh_cost) = (Home::Host, self.config.weigh_cost);
        let view = View { table, reuse, home, now, weigh_cost, unwritten_hold: true };
        let queue = view.how(index).queue;
        match reuse.has_learned() {
            true => view.score(queue, &view.about(index)),
            // By the order of uses, which is finer than the time.
            false => {
                let later = self.tick - table.get(index).used_tick();
                reuse.score_of_hints(queue, u32::try_from(later).unwrap_or(u32::MAX))
            }
        }
    }

    /// What the segment's room promises on average.
    fn promise_of_segment(&self, segment: u32) -> f32 {
        let Some(nvme) = &self.nvme else { return 0.0 };
        let Segment { blocks, .. } = nvme.segments.get(segment);
        let payload = f64::from(nvme.segments.payload_bytes_max().max(1));
        let step = blocks.len().div_ceil(SAMPLE).max(1);
        // A sample that starts elsewhere each time.
        let start = nvme.segments.turn() % step;
        let sampled = blocks.iter().skip(start).step_by(step);
        let live = sampled.filter(|index| **index != super::table::NIL);
        let promised = |index: &u32| {
            let stored = self.table.location(*index).map_or(0, |found| found.stored_bytes);
            let in_host = matches!(self.table.get(*index).host, HostCopy::Resident { .. });
            let part = if in_host { IN_HOST_TOO } else { 1.0 };
            f64::from(self.promise(*index) * part) * page_ceil(u64::from(stored)) as f64
        };
        (live.map(promised).sum::<f64>() * step as f64 / payload) as f32
    }

    /// Whether the segment has the last good copy of a pinned block whose slot of host RAM was
    /// given up, but is still read. It is reclaimed when that ends, because then it can be read
    /// back.
    fn is_last_of_pinned(&self, segment: u32) -> bool {
        let pinned = self.nvme.as_ref().is_some_and(|nvme| nvme.segments.get(segment).pinned > 0);
        let waits = |index: &u32| {
            let block = self.table.get(*index);
            block.pins > 0 && matches!(block.host, HostCopy::Draining { .. })
        };
        pinned && self.blocks_in(segment).iter().any(waits)
    }

    /// A segment half of which would be written again, because its blocks are in host RAM too,
    /// gains little. Only when there is no other way to make room is that done.
    fn worth_reclaiming(&self, victim: u32) -> bool {
        let Some(nvme) = &self.nvme else {
            return false;
        };
        self.is_pressed() || nvme.segments.gains(nvme.segments.get(victim))
    }

    /// Empties a segment. What is in host RAM too becomes dirty there; what is worth a write is
    /// read back and written again, up to a part of the segment (`whole`: all that can be reached);
    /// the rest is evicted.
    fn reclaim(&mut self, victim: u32, whole: bool) {
        let Some(nvme) = &self.nvme else {
            return;
        };
        let payload = u64::from(nvme.segments.payload_bytes_max());
        let percent = if whole { 100 } else { nvme.shape.reinsert_percent };
        let mut budget = payload / 100 * u64::from(percent);
        let bar = nvme.segments.mean_promise() * WORTH_A_WRITE;
        let blocks = self.blocks_in(victim);
        // Blocks of a path lie from its end on: what a block is needed for is known when it comes.
        for index in &blocks {
            let needed = whole || self.is_hit_or_needed(victim, *index);
            let worth = needed && !self.table.get(*index).orphan;
            let worth = worth && (whole || self.promise(*index) >= bar);
            let block = self.table.get_mut(*index);
            if block.host == HostCopy::Absent {
                block.set_reinserted(worth || block.pins > 0);
            }
        }
        // The roots come last, and without them the rest is of no use.
        for index in blocks.iter().rev() {
            let block = self.table.get_mut(*index);
            let bytes = slot_bytes(block);
            if block.host != HostCopy::Absent || !block.is_reinserted() {
                continue;
            }
            if bytes <= budget || block.pins > 0 {
                budget = budget.saturating_sub(bytes);
            } else {
                block.set_reinserted(false);
            }
        }
        let stays = |index: &u32| matches!(self.table.get(*index).host, HostCopy::Resident { .. });
        let (in_host, rest): (Vec<u32>, Vec<u32>) = blocks.into_iter().partition(stays);
        // Those become dirty, as the coldest ones: the warmest first.
        for index in in_host.into_iter().rev() {
            self.evict_nvme(index);
        }
        for index in rest {
            let block = self.table.get_mut(index);
            match block.host {
                HostCopy::Filling { source: FillSource::Nvme, .. } => block.set_reinserted(true),
                HostCopy::Absent if block.is_reinserted() => self.queue_fetch(index, false),
                _ => self.evict_nvme(index),
            }
        }
        self.settle_segment(victim);
    }

    fn evict_nvme(&mut self, index: u32) {
        if let Some(nvme) = &mut self.nvme {
            nvme.evicted += 1;
        }
        self.drop_nvme(index, false);
        self.after_loss(index);
    }

    /// Whether the block has its copy on nvme in a segment that is being emptied.
    pub(super) fn is_under_reclaim(&self, index: u32) -> bool {
        let spot = self.table.get(index).spot();
        let segments = self.nvme.as_ref().map(|nvme| &nvme.segments);
        let state = spot.zip(segments).map(|(spot, all)| all.get(spot.segment).state);
        state == Some(SegmentState::Reclaiming)
    }

    /// A block that a segment under reclaim waits for though nothing is to happen to it.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn stuck_under_reclaim(&self) -> Option<u32> {
        let reclaiming = self.nvme.as_ref().map(|nvme| &nvme.segments.reclaiming);
        let blocks = reclaiming.into_iter().flatten().flat_map(|segment| self.blocks_in(*segment));
        let mut stuck = blocks.filter(|index| {
            let block = self.table.get(*index);
            match block.host {
                HostCopy::Filling { .. } => false,
                HostCopy::Absent => !(block.is_queued() && block.is_reinserted()),
                HostCopy::Resident { .. } | HostCopy::Draining { .. } => true,
            }
        });
        stuck.next()
    }

    /// Whether the block was hit since it was written, or something behind it stays that is of no
    /// use without it: in another segment, or in this one to be written again.
    fn is_hit_or_needed(&self, segment: u32, index: u32) -> bool {
        let hit = self.table.get(index).spot().is_some_and(|spot| spot.hit);
        let stays = |child: &super::table::Block| match child.spot() {
            Some(spot) => spot.segment != segment || child.is_reinserted(),
            None => child.host_slot().is_some(),
        };
        hit || self.table.child(index, stays).is_some()
    }

    /// A block that was read only to be written again has been: it leaves host RAM.
    pub(super) fn leave_again(&mut self, index: u32) {
        let block = self.table.get_mut(index);
        block.set_reinserted(false);
        let idle = matches!(block.host, HostCopy::Resident { users: 0, .. });
        if idle && matches!(block.nvme, NvmeCopy::Resident(_)) {
            self.drop_host(index);
        }
    }

    /// Makes a segment clean once nothing names it, and voids it on the device: what was evicted,
    /// forgotten or reported bad since must not come back at a restart.
    pub(super) fn settle_segment(&mut self, segment: u32) {
        if self.nvme.as_mut().is_some_and(|nvme| nvme.segments.settle(segment)) {
            self.counters.segments_reclaimed += 1;
            self.actions.push(Action::VoidSegment { segment });
        }
    }
}
