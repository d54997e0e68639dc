//! Write-down of dirty blocks to nvme.

use super::Catalog;
use super::admission::is_hardly_worth_a_write;
use super::codecs::CodecTrial;
use super::copies::slot_bytes;
use super::event::{Action, OpError, OpId};
use super::flow::Op;
use super::request::{OfflineReason, Tier};
use super::segments::{SegmentState, Space};
use super::table::{BATCH, HostCopy, Location, NIL, NvmeCopy};
use crate::block::{Codec, Sum128, page_ceil};

/// Segments that may fail one after the other, with no write in between that succeeds, before the
/// tier is taken to be broken. A dead device gets there within a few writes; with two, one faulty
/// operation in 500 was enough to lose a tier that could still be used.
const FAILED_IN_A_ROW_MAX: u32 = 4;

/// Dirty blocks are all written down within this time, also while clients never pause.
const TRICKLE_S: u64 = 60;

/// Most bytes that are written down in a second for no other reason than their age.
const TRICKLE_BYTES_MAX: u64 = 256 << 20;

/// Most bytes of writes under way when half of host RAM is dirty and the drive is free: enough to
/// keep it busy, and few enough for a read that comes to wait for little. A burst of less than half
/// of host RAM goes on without sharing the memory's bandwidth with the drive.
const EAGER_BYTES_MAX: u64 = 8 << 20;

/// Part of nvme that is live, percent, up to which blocks are written there as soon as nobody asks
/// for anything. From there on, a copy of what is in host RAM takes the room of what is not.
const EARLY_PERCENT: u64 = 87;

impl Catalog {
    /// Once a second: allows some blocks to be written though there is room and demand, so that a
    /// crash loses little of host RAM that is older than a minute.
    pub(super) fn refill_trickle(&mut self) {
        if self.config.idle_ms > 0 && self.now >= self.trickle_at {
            self.trickle_at = self.now.plus_ms(1000);
            let part = self.host.tier.slots.capacity_bytes() / TRICKLE_S;
            self.trickle_bytes = part.clamp(1, TRICKLE_BYTES_MAX);
        }
    }

    /// Starts writes as far as the bytes in flight allow.
    pub(super) fn pump_writes(&mut self) {
        if self.nvme_usable() {
            self.give_up_cold();
        }
        while self.nvme_usable() {
            let tight = self.next_tight();
            let (limit, eager) = match tight {
                Some(_) => (self.write_bytes_max(), false),
                None => self.write_bytes_allowed(),
            };
            if limit == 0 || self.flow.write_bytes >= limit {
                return;
            }
            let next = match self.drain {
                Some(_) => self.host.dirty.hottest(),
                None => tight.or_else(|| self.next_dirty()),
            };
            let Some(index) = next else {
                self.host.in_the_way = 0;
                return;
            };
            let block = self.table.get(index);
            let bytes = slot_bytes(block);
            let full = self.flow.write_bytes > 0 && self.flow.write_bytes + bytes > limit;
            // Encoding takes the threads that copy for clients.
            if full || !self.drain_allows(bytes) || (eager && self.may_be_encoded(block.namespace))
            {
                return;
            }
            if self.stays_unwritten(index) {
                return;
            }
            if self.drain.is_none() && is_hardly_worth_a_write(self.table.get(index)) {
                self.host.in_the_way = self.host.in_the_way.saturating_sub(1);
                self.refuse_write(index);
                continue;
            }
            // First: what is admitted costs a part of the budget.
            if !self.has_space_for(index) {
                return;
            }
            if self.write_within_quota(index) && self.admit_write(index) && !self.start_write(index)
            {
                return;
            }
        }
    }

    fn write_bytes_max(&self) -> u64 {
        self.nvme.as_ref().map_or(0, |nvme| nvme.shape.write_bytes_in_flight)
    }

    /// Whether the segments have room for the block, as it is.
    fn has_space_for(&mut self, index: u32) -> bool {
        let (log, bytes) = (self.log_of(index), self.table.get(index).raw_bytes);
        self.nvme.as_mut().is_some_and(|nvme| nvme.segments.has_space(log, bytes))
    }

    /// Whether the quotas of the block's owners let it be written. Otherwise it stays in host RAM
    /// alone, and is no longer counted as dirty.
    fn write_within_quota(&mut self, index: u32) -> bool {
        let fits = self.quota_room(Tier::Nvme, index);
        if !fits {
            self.count_refused(self.table.get(index).namespace);
            self.refuse_write(index);
        }
        fits
    }

    /// Most bytes of writes that may be under way now; and whether only because much is dirty and
    /// the drive is free, not because too little of the arena is free or clean, nobody asks for
    /// anything, blocks have waited long, or a drain is under way.
    fn write_bytes_allowed(&self) -> (u64, bool) {
        let most = self.write_bytes_max();
        if self.must_write_down() {
            return (most, false);
        }
        // What is not urgent must not be in the way of a drain for long, on a slow drive.
        if self.may_write_early() {
            return (most.min(EAGER_BYTES_MAX), false);
        }
        let half = self.host.dirty_bytes > self.host.tier.slots.capacity_bytes() / 2;
        // What a budget is spent on is decided as late as can be.
        let eager =
            half && self.config.idle_ms > 0 && self.flow.reads == 0 && !self.has_write_budget();
        (if eager { most.min(EAGER_BYTES_MAX) } else { 0 }, true)
    }

    pub(super) fn must_write_down(&self) -> bool {
        let capacity = self.host.tier.slots.capacity_bytes();
        let dirty_max = capacity - capacity / 100 * u64::from(self.config.clean_percent);
        let pressed = self.is_pressed() || self.host.dirty_bytes > dirty_max;
        self.drain.is_some() || pressed
    }

    /// Whether nobody asks for anything and nvme has room, or blocks have waited long.
    fn may_write_early(&self) -> bool {
        let idle_us = self.config.idle_ms * 1000;
        let idle = idle_us > 0 && self.now.0.saturating_sub(self.last_demand.0) >= idle_us;
        ((idle && self.has_spare_room()) || self.trickle_bytes > 0) && !self.has_write_budget()
    }

    fn has_spare_room(&self) -> bool {
        self.nvme.as_ref().is_some_and(|nvme| {
            let below = |used: u64, all: u64| used * 100 < all * EARLY_PERCENT;
            let places = nvme.shape.geometry.descriptors_per_segment();
            below(nvme.segments.live_bytes(), nvme.segments.live_bytes_max())
                && below(nvme.blocks, u64::from(nvme.segments.count()) * u64::from(places))
        })
    }

    fn start_write(&mut self, index: u32) -> bool {
        let block = self.table.get(index);
        let HostCopy::Resident { slot, .. } = block.host else {
            return false;
        };
        let (raw_bytes, raw_sum) = (block.raw_bytes, block.raw_sum);
        let bytes = slot_bytes(block);
        let namespace = block.namespace;
        let element = self.element_of(namespace);
        let (codec, trial) = self.codec_for(namespace);
        if codec != Codec::Raw {
            self.begin_writing(index, bytes);
            let op = self.flow.start(self.now, Op::Encode { block: index, bytes });
            self.actions.push(Action::Encode { op, slot, raw_bytes, codec, element, trial });
            return true;
        }
        let Some(space) = self.take_space(index, raw_bytes) else {
            return false;
        };
        self.begin_writing(index, bytes);
        let location = location(space, raw_bytes, Codec::Raw, raw_sum);
        self.send_write(index, location, space.sequence, bytes, None);
        true
    }

    fn begin_writing(&mut self, index: u32, bytes: u64) {
        self.trickle_bytes = self.trickle_bytes.saturating_sub(bytes);
        self.host.in_the_way = self.host.in_the_way.saturating_sub(1);
        self.host.dirty.remove(index);
        self.table.get_mut(index).nvme = NvmeCopy::Writing { doomed: false };
        self.add_user(index);
        self.charge_write(index, bytes, true);
        self.flow.write_bytes += bytes;
    }

    fn take_space(&mut self, index: u32, stored_bytes: u32) -> Option<Space> {
        let log = self.log_of(index);
        let (space, rolled) = self.nvme.as_mut()?.segments.allocate(log, stored_bytes);
        if let Some(segment) = rolled.sealed {
            self.actions.push(Action::SealSegment { segment });
        }
        if let Some((segment, sequence)) = rolled.opened {
            self.actions.push(Action::OpenSegment { segment, sequence });
        }
        space
    }

    /// `encoded`: the operation whose encoded bytes are to be written instead of the slot's.
    fn send_write(
        &mut self,
        index: u32,
        location: Location,
        sequence: u64,
        bytes: u64,
        encoded: Option<OpId>,
    ) {
        let write = Op::Write { block: index, location, bytes };
        let op = match encoded {
            Some(op) => {
                self.flow.start_as(self.now, op, write);
                op
            }
            None => self.flow.start(self.now, write),
        };
        if let Some(nvme) = &mut self.nvme {
            nvme.segments.get_mut(location.segment).writers += 1;
        }
        let mut descriptor = Box::new(self.descriptor(index));
        descriptor.codec = location.codec;
        descriptor.stored_bytes = location.stored_bytes;
        descriptor.stored_sum = location.stored_sum;
        descriptor.segment = location.segment;
        descriptor.segment_sequence = sequence;
        descriptor.offset = location.offset;
        let slot = match self.table.get(index).host {
            HostCopy::Resident { slot, .. } | HostCopy::Draining { slot, .. } => Some(slot),
            HostCopy::Absent | HostCopy::Filling { .. } => None,
        };
        let slot = slot.filter(|_| encoded.is_none());
        self.actions.push(Action::Write { op, slot, index: location.index, descriptor });
    }

    pub(super) fn encoded(
        &mut self,
        op: OpId,
        result: Option<(u32, Sum128)>,
        trial: Option<CodecTrial>,
    ) {
        let Some(Op::Encode { block: index, bytes }) = self.take_op(op) else {
            return;
        };
        if let Some(trial) = trial {
            self.note_codec_trial(self.table.get(index).namespace, trial);
        }
        let block = self.table.get(index);
        let (raw_bytes, raw_sum) = (block.raw_bytes, block.raw_sum);
        let wanted = block.nvme == NvmeCopy::Writing { doomed: false } && self.nvme_usable();
        let space = match result {
            _ if !wanted => None,
            Some((stored_bytes, _)) => self.take_space(index, stored_bytes),
            None => self.take_space(index, raw_bytes),
        };
        match (space, result) {
            (Some(space), Some((stored_bytes, stored_sum))) => {
                let location = location(space, stored_bytes, Codec::Lz4, stored_sum);
                self.send_write(index, location, space.sequence, bytes, Some(op));
            }
            (Some(space), None) => {
                let location = location(space, raw_bytes, Codec::Raw, raw_sum);
                self.send_write(index, location, space.sequence, bytes, None);
            }
            (None, encoded) => {
                if encoded.is_some() {
                    self.actions.push(Action::DropEncoded { op });
                }
                self.writing_ended(index, bytes, None);
            }
        }
    }

    pub(super) fn written(&mut self, op: OpId, result: Result<(), OpError>) {
        let Some(Op::Write { block: index, location, bytes }) = self.take_op(op) else {
            return;
        };
        let doomed = self.table.get(index).nvme == NvmeCopy::Writing { doomed: true };
        let mut sequence = 0;
        if let Some(nvme) = &mut self.nvme {
            nvme.segments.get_mut(location.segment).writers -= 1;
            sequence = nvme.segments.get(location.segment).sequence;
            if result.is_ok() {
                nvme.failed_in_a_row = 0;
                nvme.bytes_in += u64::from(location.stored_bytes);
                nvme.blocks_written += 1;
            }
        }
        match result {
            Ok(()) if doomed || !self.nvme_usable() => {
                let Location { segment, index: at, .. } = location;
                let namespace = self.table.get(index).namespace;
                self.erase(namespace, segment, sequence, at);
                self.writing_ended(index, bytes, None);
            }
            Ok(()) => self.writing_ended(index, bytes, Some(location)),
            Err(error) => {
                self.counters.write_failures += 1;
                self.writing_ended(index, bytes, None);
                self.segment_failed(location.segment, error);
            }
        }
        self.settle_segment(location.segment);
    }

    /// A write ended: the block has a copy there, or is dirty as before (unless it is gone).
    fn writing_ended(&mut self, index: u32, bytes: u64, location: Option<Location>) {
        self.flow.write_bytes -= bytes;
        self.charge_write(index, bytes, false);
        let block = self.table.get_mut(index);
        let doomed = block.nvme == NvmeCopy::Writing { doomed: true };
        block.nvme = NvmeCopy::Absent;
        let mut written_again = false;
        match location {
            Some(location) => {
                let (pinned, orphan) = (block.pins > 0, block.orphan);
                self.table.set_on_nvme(index, location);
                self.host.dirty_bytes -= bytes;
                self.list_on_nvme(index, location, pinned, orphan);
                written_again = self.table.get(index).is_reinserted();
            }
            None if !doomed => {
                // Not as the coldest one, which would be tried again at once.
                self.list_dirty(index, false);
            }
            None => {}
        }
        self.remove_user(index);
        if written_again {
            self.leave_again(index);
        }
        self.after_loss(index);
    }

    fn list_on_nvme(&mut self, index: u32, location: Location, pinned: bool, orphan: bool) {
        self.charge(index, Tier::Nvme);
        if let Some(nvme) = &mut self.nvme {
            nvme.blocks += 1;
            nvme.segments.list(location.segment, location.index, index, location.stored_bytes);
            let segment = nvme.segments.get_mut(location.segment);
            segment.pinned += u32::from(pinned);
            if orphan {
                segment.orphan_bytes += page_ceil(u64::from(location.stored_bytes));
            }
        }
        self.note_copy(index, Tier::Nvme, true);
        self.count_in_host(index, true);
        self.note_doubled(index);
    }

    /// A segment that cannot be written is sealed; several in a row and the tier is off.
    pub(super) fn segment_failed(&mut self, segment: u32, error: OpError) {
        if !self.nvme_usable() {
            return;
        }
        if error == OpError::DeviceGone {
            return self.take_nvme_offline(OfflineReason::DeviceGone);
        }
        let Some(nvme) = &mut self.nvme else {
            return;
        };
        let found = nvme.segments.get_mut(segment);
        if !std::mem::replace(&mut found.write_failed, true) {
            nvme.failed_in_a_row += 1;
        }
        if nvme.segments.seal(segment).is_some() {
            self.actions.push(Action::SealSegment { segment });
        }
        if nvme.failed_in_a_row >= FAILED_IN_A_ROW_MAX {
            self.take_nvme_offline(OfflineReason::TooManyFailures);
        }
    }

    /// The tier is off until the next start. Its copies are out of reach now; host RAM goes on.
    pub(super) fn take_nvme_offline(&mut self, reason: OfflineReason) {
        let Some(nvme) = &mut self.nvme else {
            return;
        };
        if nvme.offline.is_some() {
            return;
        }
        nvme.offline = Some(reason);
        self.prefills.ramp(self.now);
        self.actions.push(Action::TierOffline { tier: Tier::Nvme, gpu: None, reason });
        for segment in 0..self.nvme.as_ref().map_or(0, |nvme| nvme.segments.count()) {
            for index in self.blocks_in(segment) {
                self.drop_nvme(index, false);
                self.after_loss(index);
                // It may have given its slot of host RAM up for the copy that is gone.
                if self.table.live(index).is_some() {
                    self.note_device_only(index);
                }
            }
        }
    }

    pub(super) fn blocks_in(&self, segment: u32) -> Vec<u32> {
        let blocks = self.nvme.as_ref().map(|nvme| &nvme.segments.get(segment).blocks);
        blocks.into_iter().flatten().copied().filter(|index| *index != NIL).collect()
    }

    /// Whether something is on its way into host RAM or a pool. What a lost GPU was doing is not:
    /// it may never end.
    pub(super) fn is_coming_down(&self) -> bool {
        let usable = self.devices.iter().filter(|found| found.offline.is_none());
        let above = usable.map(|found| found.demotes + found.dirty.len()).sum::<usize>() > 0;
        let gathered = |op: &Op| match op {
            Op::Gather { gpu, .. } => gpu.is_none_or(|gpu| self.device_usable(gpu)),
            _ => false,
        };
        above || (self.flow.gathers > 0 && self.flow.ops.values().any(gathered))
    }

    /// Takes over what recovery found in one segment. Called before any event.
    pub fn recover(
        &mut self,
        segment: u32,
        sequence: u64,
        descriptors: &[(u32, crate::block::Descriptor)],
    ) {
        let Some(nvme) = &mut self.nvme else {
            return;
        };
        let places = descriptors.last().map_or(0, |(at, _)| *at + 1);
        nvme.segments.recover(segment, sequence, places);
        if nvme.segments.get(segment).state == SegmentState::Clean {
            return;
        }
        for batch in descriptors.chunks(BATCH) {
            self.table.warm(batch.iter().map(|(_, found)| (found.namespace, &found.key)));
            for (at, found) in batch {
                self.recover_block(segment, *at, found);
            }
        }
    }

    fn recover_block(&mut self, segment: u32, at: u32, found: &crate::block::Descriptor) {
        let new = super::table::NewBlock::of(found);
        let index = self.table.find_or_insert(&new);
        if !self.table.get(index).is_ghost() {
            return;
        }
        self.learn(index, &new, found);
        let location = Location {
            segment,
            index: at,
            offset: found.offset,
            stored_bytes: found.stored_bytes,
            codec: found.codec,
            stored_sum: found.stored_sum,
        };
        let orphan = self.table.get(index).orphan;
        self.table.set_on_nvme(index, location);
        self.list_on_nvme(index, location, false, orphan);
        if !orphan {
            self.mark_below(index, false);
        }
    }
}

fn location(space: Space, stored_bytes: u32, codec: Codec, stored_sum: Sum128) -> Location {
    let Space { segment, index, offset, .. } = space;
    Location { segment, index, offset, stored_bytes, codec, stored_sum }
}
