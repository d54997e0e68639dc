//! The way of a block to a client: from GPU memory or host RAM at once, from nvme through a slot.

use super::Catalog;
use super::clients::RegionShape;
use super::event::{Action, OpError, OpId, SlotPlace};
use super::flow::{Op, Part, Scatter, Target, TicketKind, Waiter};
use super::request::{
    GpuId, Hints, LeaseId, LoadBlock, MissReason, Outcome, PrefixQuery, Refusal, RegionId, Reply,
    SessionId, Tier,
};
use super::segments::SegmentState;
use super::slot_tier::Home;
use super::slots::SlotId;
use super::table::{DeviceCopy, FillSource, HostCopy, NvmeCopy, USERS_MAX};
use crate::block::{Descriptor, ElementType, NamespaceId, NarrowShape};

/// Queued reads that may be passed over for want of a slot in one go.
const DEFERRED_MAX: usize = 64;

/// Failed reads in a segment after which it is not used again.
const READ_FAILURES_MAX: u32 = 3;

impl Catalog {
    pub(super) fn load(
        &mut self,
        session: SessionId,
        lease: LeaseId,
        namespace: NamespaceId,
        target: Target,
        blocks: &[LoadBlock],
        hints: &Hints,
    ) -> Reply {
        let Some(shape) = self.clients.region_of(session, target.region) else {
            return Reply::Refused(Refusal::UnknownRegion);
        };
        if blocks.iter().any(|block| block.place >= shape.places) {
            return Reply::Refused(Refusal::PlaceOutOfRange);
        }
        let kept_bytes = match self.kept_bytes(namespace, &shape) {
            Ok(bytes) => bytes,
            Err(refusal) => return Reply::Refused(refusal),
        };
        let measured = self.measure(namespace, blocks.iter().map(|block| block.key));
        let ticket = match self.open_ticket(session, TicketKind::Load, blocks.len()) {
            Ok(ticket) => ticket,
            Err(reply) => return reply,
        };
        if let Some(open) = self.flow.tickets.get_mut(&ticket) {
            (open.lease, open.region) = (Some(lease), Some(target.region));
            open.measured = measured;
        }
        let tenant = self.tenant_of(session);
        self.take_hints_of_keys(session, namespace, blocks.iter().map(|block| &block.key), hints);
        for (at, block) in blocks.iter().enumerate() {
            let part = Part { ticket, at };
            let covered = self.table.find(namespace, &block.key).filter(|index| {
                let held = self.clients.leases.get(&lease);
                held.is_some_and(|held| {
                    Some(held.tenant) == tenant && held.covers(self.table.reference(*index))
                })
            });
            match covered {
                None => self.finish(part, Outcome::Missed(MissReason::Lease)),
                Some(index) if Some(self.table.get(index).raw_bytes) != kept_bytes => {
                    self.finish(part, Outcome::Missed(MissReason::Layout));
                }
                Some(index) => self.load_block(index, part, target, block.place),
            }
        }
        self.end_if_complete(ticket);
        Reply::Ticket(ticket)
    }

    /// Starts the way of one block into a region, from the fastest tier that has it.
    fn load_block(&mut self, index: u32, part: Part, target: Target, place: u32) {
        let gpu = self.gpu_of(target.region);
        if gpu.is_some_and(|gpu| !self.device_usable(gpu)) {
            return self.finish(part, Outcome::Missed(MissReason::Device));
        }
        let block = self.table.get(index);
        if self.copy_for(index, gpu).is_some() {
            return self.start_scatter(index, part, target, place, Tier::Host, false);
        }
        match (block.device, block.host, block.nvme) {
            (DeviceCopy::Filling { doomed: false, .. }, HostCopy::Absent, NvmeCopy::Absent) => {
                self.flow.wait(index, Waiter::Load { part, target, place, tier: Tier::Device });
            }
            (_, HostCopy::Filling { doomed: false, source, .. }, _) => {
                let tier = match source {
                    FillSource::Client => Tier::Host,
                    FillSource::Device => Tier::Device,
                    FillSource::Nvme => Tier::Nvme,
                };
                self.flow.wait(index, Waiter::Load { part, target, place, tier });
            }
            // A slot that still drains is waited for: see `drained_slot`.
            (DeviceCopy::Resident { .. }, HostCopy::Absent | HostCopy::Draining { .. }, _) => {
                self.flow.wait(index, Waiter::Load { part, target, place, tier: Tier::Device });
                self.queue_demote(index);
            }
            (_, HostCopy::Absent | HostCopy::Draining { .. }, NvmeCopy::Resident(_))
                if self.nvme_usable() =>
            {
                self.flow.wait(index, Waiter::Load { part, target, place, tier: Tier::Nvme });
                self.queue_fetch(index, true);
            }
            _ => self.finish(part, Outcome::Missed(MissReason::Absent)),
        }
    }

    /// The last reader of a bad slot is done: whoever waits for another copy of the block gets it.
    pub(super) fn drained_slot(&mut self, index: u32) {
        if self.table.live(index).is_none() || !self.flow.is_awaited(index) {
            return;
        }
        let block = self.table.get(index);
        if block.device_slot().is_some() {
            self.queue_demote(index);
        } else if matches!(block.nvme, NvmeCopy::Resident(_)) && self.nvme_usable() {
            self.queue_fetch(index, true);
        } else if block.device == DeviceCopy::Absent {
            self.fail_waiters(index, MissReason::Absent);
        }
    }

    /// How the namespace's blocks are kept, if narrower than the engine has them.
    pub(super) fn narrow_shape(&self, namespace: NamespaceId) -> Option<NarrowShape> {
        self.namespaces.get(&namespace).and_then(|info| info.narrow)
    }

    /// Bytes that a block of such a region has here; `None` when the region's blocks are not those
    /// of the namespace.
    pub(super) fn kept_bytes(
        &self,
        namespace: NamespaceId,
        region: &RegionShape,
    ) -> Result<Option<u32>, Refusal> {
        match self.narrow_shape(namespace) {
            None => Ok(Some(region.block_bytes)),
            Some(_) if region.gpu.is_some() => Err(Refusal::NarrowedOnGpu),
            Some(shape) => {
                Ok((region.block_bytes == shape.raw_bytes()).then(|| shape.kept_bytes()))
            }
        }
    }

    /// The GPU that a region is on.
    pub(super) fn gpu_of(&self, region: RegionId) -> Option<GpuId> {
        self.clients.regions.get(&region).and_then(|shape| shape.gpu)
    }

    /// The slot from which the block can be scattered to a region on `gpu`, or in host memory.
    fn copy_for(&self, index: u32, gpu: Option<GpuId>) -> Option<SlotPlace> {
        let block = self.table.get(index);
        // As many readers as can be counted: the next one is told that there is no copy.
        let full = |users: u16| users >= USERS_MAX;
        match (block.device, block.host) {
            (DeviceCopy::Resident { users, .. }, _) | (_, HostCopy::Resident { users, .. })
                if full(users) =>
            {
                return None;
            }
            _ => {}
        }
        let near = block.device_slot().filter(|(on, _)| Some(*on) == gpu);
        let near = near.map(|(on, slot)| SlotPlace::Device(on, slot));
        near.or_else(|| block.host_slot().map(SlotPlace::Host))
    }

    /// `verified`: the completion that is being answered said that the host slot's bytes are right.
    fn start_scatter(
        &mut self,
        index: u32,
        part: Part,
        target: Target,
        place: u32,
        tier: Tier,
        verified: bool,
    ) {
        let gpu = self.gpu_of(target.region);
        let Some(from) = self.copy_for(index, gpu) else {
            return self.load_block(index, part, target, place);
        };
        let (tier, through) = match from {
            SlotPlace::Device(..) => {
                self.add_device_user(index);
                (Tier::Device, None)
            }
            SlotPlace::Host(_) => {
                self.add_user(index);
                self.host.doubled.move_front(index);
                (tier, gpu.and_then(|gpu| self.promotion(gpu, index)))
            }
        };
        if let Some(ticket) = self.flow.tickets.get_mut(&part.ticket) {
            ticket.set_active(part.at);
        }
        let to = Scatter { target, place, tier, promotes: through.is_some() };
        let op = self.flow.start(self.now, Op::Scatter { block: index, from, part, to });
        let block = self.table.get(index);
        self.actions.push(Action::Scatter {
            op,
            from,
            through,
            verified,
            namespace: block.namespace,
            key: block.key,
            raw_sum: block.raw_sum,
            raw_bytes: block.raw_bytes,
            narrow: self.narrow_shape(block.namespace),
            region: target.region,
            place,
            after_event: target.after_event,
        });
    }

    pub(super) fn scattered(&mut self, op: OpId, result: Result<(), OpError>) {
        let Some(Op::Scatter { block: index, from, part, to }) = self.take_op(op) else {
            return;
        };
        if to.promotes {
            match result {
                Ok(()) => self.device_filled(index),
                Err(_) => self.abort_device_fill(index),
            }
            // Somebody may have met the fill while the host copy was going.
            self.wake(index, false);
        }
        self.count_scattered(index, from, result.is_ok());
        match result {
            Ok(()) => {
                self.release_copy(index, from);
                self.finish(part, Outcome::Loaded(to.tier));
            }
            Err(OpError::Checksum) => self.scatter_of_bad_bytes(index, from, part, to),
            Err(OpError::Region) => {
                self.release_copy(index, from);
                self.finish(part, Outcome::Missed(MissReason::Gone));
            }
            Err(OpError::Device | OpError::DeviceGone | OpError::NotFinite) => {
                self.release_copy(index, from);
                self.finish(part, Outcome::Missed(MissReason::Device));
            }
        }
    }

    fn count_scattered(&mut self, index: u32, from: SlotPlace, hit: bool) {
        let bytes = u64::from(self.table.get(index).raw_bytes);
        match from {
            SlotPlace::Host(_) => self.host.bytes_out += bytes,
            SlotPlace::Device(gpu, _) => {
                if let Some(found) = self.device_mut(gpu) {
                    found.bytes_out += bytes;
                    found.hits += u64::from(hit);
                }
            }
        }
    }

    fn release_copy(&mut self, index: u32, from: SlotPlace) {
        match from {
            SlotPlace::Host(_) => self.remove_user(index),
            SlotPlace::Device(..) => self.remove_device_user(index),
        }
    }

    /// The slot is bad. A copy in another tier may still be good.
    fn scatter_of_bad_bytes(&mut self, index: u32, from: SlotPlace, part: Part, to: Scatter) {
        let block = self.table.get(index);
        let (host, device) = (block.host_slot(), block.device_slot());
        match from {
            SlotPlace::Host(slot) if host == Some(slot) => {
                self.counters.corrupt += 1;
                self.drop_host(index);
            }
            SlotPlace::Device(gpu, slot) if device == Some((gpu, slot)) => {
                self.counters.corrupt += 1;
                self.drop_device(index);
            }
            _ => {}
        }
        let block = self.table.get(index);
        let again = block.host_slot().is_some()
            || block.device_slot().is_some()
            || (matches!(block.nvme, NvmeCopy::Resident(_)) && self.nvme_usable());
        if !again {
            self.finish(part, Outcome::Missed(MissReason::Checksum));
            return self.release_copy(index, from);
        }
        self.release_copy(index, from);
        if let Some(ticket) = self.flow.tickets.get_mut(&part.ticket) {
            ticket.set_waiting(part.at);
        }
        self.load_block(index, part, to.target, to.place);
    }

    pub(super) fn prefetch(
        &mut self,
        session: SessionId,
        prefix: &PrefixQuery,
        hints: &Hints,
    ) -> Reply {
        let count = prefix.keys.len();
        let ticket = match self.open_ticket(session, TicketKind::Prefetch, count) {
            Ok(ticket) => ticket,
            Err(reply) => return reply,
        };
        self.take_hints_of_keys(session, prefix.namespace, prefix.keys.iter(), hints);
        for (at, key) in prefix.keys.iter().enumerate() {
            let part = Part { ticket, at };
            let found = self.table.find(prefix.namespace, key);
            match found.map(|index| (index, self.table.get(index))) {
                Some((index, block)) => match (block.host, block.nvme) {
                    _ if block.device_slot().is_some() => self.finish(part, Outcome::Fetched),
                    (HostCopy::Resident { .. }, _) => self.finish(part, Outcome::Fetched),
                    (HostCopy::Filling { doomed: false, .. }, _) => {
                        self.flow.wait(index, Waiter::Prefetch { part });
                    }
                    (HostCopy::Absent, NvmeCopy::Resident(_)) if self.nvme_usable() => {
                        self.flow.wait(index, Waiter::Prefetch { part });
                        self.queue_fetch(index, false);
                    }
                    _ => self.finish(part, Outcome::Missed(MissReason::Absent)),
                },
                None => self.finish(part, Outcome::Missed(MissReason::Absent)),
            }
        }
        self.end_if_complete(ticket);
        Reply::Ticket(ticket)
    }

    /// Queues a read of the block. A block that waits in the lazy queue is moved by queueing it
    /// again: the second turn finds nothing to do.
    pub(super) fn queue_fetch(&mut self, index: u32, urgent: bool) {
        self.table.get_mut(index).set_queued(true);
        if urgent {
            self.flow.urgent.push_back(index);
        } else {
            self.flow.lazy.push_back(index);
        }
    }

    /// Starts queued reads as far as the limit on reads and the slots allow, urgent ones first.
    pub(super) fn pump_fetches(&mut self) {
        let limit = self.nvme.as_ref().map_or(0, |nvme| nvme.shape.reads_in_flight);
        let (mut deferred, mut over) = (Vec::new(), Vec::new());
        // Sizes of blocks that found no slot: the next one of that size finds none either.
        let mut full: Vec<u32> = Vec::new();
        while self.flow.reads < limit && deferred.len() + over.len() < DEFERRED_MAX {
            let Some((index, urgent)) = self.next_fetch() else {
                break;
            };
            let block = self.table.get(index);
            let NvmeCopy::Resident(location) = block.nvme else {
                continue;
            };
            let raw_bytes = block.raw_bytes;
            let tried = full.contains(&raw_bytes);
            let slot = if tried { None } else { self.take_slot(Home::Host, index) };
            let Some(slot) = slot else {
                let over_quota = !tried && self.quotas.refusal().is_some();
                if !tried && !over_quota {
                    full.push(raw_bytes);
                }
                if self.no_room(index, urgent) {
                    match over_quota {
                        true => over.push((index, urgent)),
                        false => deferred.push((index, urgent)),
                    }
                }
                continue;
            };
            self.begin_fill(index, SlotPlace::Host(slot), FillSource::Nvme);
            // To be written again is no use of it.
            if self.flow.is_awaited(index) {
                self.touch(index);
            }
            self.start_read(index, slot, location.segment, false);
        }
        self.give_up_reinsertions(&full);
        // Whose owner is over its quota waits behind the others.
        for (index, urgent) in over {
            self.queue_fetch(index, urgent);
        }
        // What found no slot goes back to where it was. Blocks of another size may have found one.
        for (index, urgent) in deferred.into_iter().rev() {
            self.table.get_mut(index).set_queued(true);
            let queue = if urgent { &mut self.flow.urgent } else { &mut self.flow.lazy };
            queue.push_front(index);
        }
    }

    /// There is no room for blocks of these sizes, and those that clients wait for come first: the
    /// next ones that would only be written again are given up now, or the segments that they are
    /// in might never be clean, and nothing be written to make room.
    fn give_up_reinsertions(&mut self, full: &[u32]) {
        for _ in 0..self.flow.lazy.len().min(DEFERRED_MAX) {
            let Some(index) = self.flow.lazy.pop_front() else { return };
            let Some(block) = self.table.live(index) else { continue };
            let alone = block.is_reinserted()
                && block.pins == 0
                && block.host == HostCopy::Absent
                && !self.flow.is_awaited(index);
            if alone && full.contains(&block.raw_bytes) && self.is_under_reclaim(index) {
                self.table.get_mut(index).set_queued(false);
                self.no_room(index, false);
            } else {
                self.flow.lazy.push_back(index);
            }
        }
    }

    /// The next block whose read somebody still wants.
    fn next_fetch(&mut self) -> Option<(u32, bool)> {
        loop {
            let (index, mut urgent) = match self.flow.urgent.pop_front() {
                Some(index) => (index, true),
                None => (self.flow.lazy.pop_front()?, false),
            };
            if self.table.live(index).is_none() {
                continue;
            }
            let awaited = self.flow.is_awaited(index);
            // Who queued it may wait no longer.
            urgent &= awaited;
            let wanted = awaited || self.table.get(index).is_reinserted();
            self.table.get_mut(index).set_queued(false);
            let block = self.table.get(index);
            let readable = matches!(block.nvme, NvmeCopy::Resident(_)) && self.nvme_usable();
            if wanted && readable && block.host == HostCopy::Absent {
                return Some((index, urgent));
            }
            if block.host == HostCopy::Absent {
                self.fail_waiters(index, MissReason::Absent);
            }
            self.table.remove_bare(index);
        }
    }

    /// There is no slot for a read now. Waiting clients wait on; a prefetch is given up, and so is
    /// a block that would only be written again, because reclaim must not wait for room; unless it
    /// is leased or pinned. Says whether the block is to be tried again later.
    fn no_room(&mut self, index: u32, urgent: bool) -> bool {
        let block = self.table.get_mut(index);
        if urgent || (block.is_reinserted() && block.pins > 0) {
            return true;
        }
        let reinsert = block.is_reinserted();
        block.set_reinserted(false);
        // A client that waits for the block too has queued it for itself.
        for part in self.flow.take_prefetches(index) {
            self.finish(part, Outcome::Missed(MissReason::NoRoom));
        }
        if reinsert {
            self.drop_nvme(index, false);
            self.after_loss(index);
        }
        false
    }

    fn start_read(&mut self, index: u32, slot: SlotId, segment: u32, retry: bool) {
        self.flow.reads += 1;
        if let Some(nvme) = &mut self.nvme {
            nvme.segments.get_mut(segment).readers += 1;
            nvme.reading.begin(self.now);
        }
        let op = self.flow.start(self.now, Op::Read { block: index, segment, retry });
        let descriptor = Box::new(self.descriptor(index));
        let element = self.element_of(descriptor.namespace);
        let urgent = self.flow.waiters.contains_key(&index);
        self.actions.push(Action::Read { op, slot, descriptor, element, urgent });
    }

    pub(super) fn element_of(&self, namespace: NamespaceId) -> ElementType {
        self.namespaces.get(&namespace).map_or(ElementType::Opaque, |info| info.element)
    }

    /// The descriptor of a block as it lies on nvme, or as it will lie in a slot.
    pub(super) fn descriptor(&self, index: u32) -> Descriptor {
        let block = self.table.get(index);
        let parent = match block.parent {
            super::table::NIL => crate::block::BlockKey::ROOT,
            parent => self.table.get(parent).key,
        };
        let location = self.table.location(index);
        let segment = location.map_or(0, |location| location.segment);
        let sequence = match (&self.nvme, location) {
            (Some(nvme), Some(_)) => nvme.segments.get(segment).sequence,
            _ => 0,
        };
        Descriptor {
            codec: location.map(|location| location.codec).unwrap_or_default(),
            narrow: self.narrow_shape(block.namespace).map(|shape| shape.form.narrow),
            namespace: block.namespace,
            generation: block.generation,
            key: block.key,
            parent,
            position: block.position,
            tokens: block.tokens,
            raw_bytes: block.raw_bytes,
            stored_bytes: location.map_or(block.raw_bytes, |location| location.stored_bytes),
            raw_sum: block.raw_sum,
            stored_sum: location.map_or(block.raw_sum, |location| location.stored_sum),
            sequence: block.sequence,
            segment,
            segment_sequence: sequence,
            offset: location.map_or(0, |location| location.offset),
            created_s: block.created_s(),
            session: block.conversation,
        }
    }

    pub(super) fn read_done(&mut self, op: OpId, result: Result<(), OpError>) {
        let Some(Op::Read { block: index, segment, retry }) = self.take_op(op) else {
            return;
        };
        self.flow.reads -= 1;
        let location = self.table.location(index);
        if let Some(nvme) = &mut self.nvme {
            nvme.segments.get_mut(segment).readers -= 1;
            let stored = location.map_or(0, |location| u64::from(location.stored_bytes));
            let read = if result.is_ok() { stored } else { 0 };
            nvme.reading.end(self.now, read, self.flow.reads > 0);
        }
        let HostCopy::Filling { doomed, .. } = self.table.get(index).host else {
            return;
        };
        match result {
            Ok(()) if !doomed => self.read_succeeded(index),
            Ok(()) => {
                self.abort_fill(index);
                self.after_loss(index);
            }
            Err(error) => self.read_failed(index, segment, retry || doomed, error),
        }
        self.settle_segment(segment);
    }

    fn read_succeeded(&mut self, index: u32) {
        let bytes = u64::from(self.table.get(index).raw_bytes);
        if let Some(nvme) = &mut self.nvme {
            nvme.bytes_out += bytes;
        }
        self.host_filled(index);
    }

    /// A slot of host RAM was filled from another tier: whoever waited goes on.
    pub(super) fn host_filled(&mut self, index: u32) {
        let HostCopy::Filling { slot, source, .. } = self.table.get(index).host else {
            return;
        };
        let block = self.table.get_mut(index);
        block.host = HostCopy::Resident { slot, users: 0 };
        self.host.bytes_in += u64::from(block.raw_bytes);
        let alone = block.is_reinserted() && !self.flow.is_awaited(index);
        block.set_reinserted(alone && source == FillSource::Nvme);
        self.note_copy(index, Tier::Host, true);
        self.count_in_host(index, true);
        // Wherever it came from: its segment waits for its copy there to go.
        if self.is_under_reclaim(index) {
            self.counters.reinserted += 1;
            self.drop_nvme(index, false);
        } else if !matches!(self.table.get(index).nvme, NvmeCopy::Resident(_)) {
            // It comes from a GPU, or its copy on nvme went while it was read (the tier was
            // latched offline).
            self.become_dirty(index);
        }
        self.note_doubled(index);
        // What comes from a GPU was checked there, not here.
        self.wake(index, source == FillSource::Nvme);
    }

    /// A bad read is retried once, into another slot; then the copy is given up.
    fn read_failed(&mut self, index: u32, segment: u32, last: bool, error: OpError) {
        self.counters.read_failures += 1;
        let readable = matches!(self.table.get(index).nvme, NvmeCopy::Resident(_));
        if error == OpError::DeviceGone {
            self.abort_fill(index);
            self.take_nvme_offline(super::OfflineReason::DeviceGone);
        } else if !last && readable {
            let HostCopy::Filling { slot: old, .. } = self.table.get(index).host else {
                return;
            };
            let slots = &mut self.host.tier.slots;
            let class = slots.class_of(self.table.get(index).raw_bytes);
            let other = class.and_then(|class| slots.allocate(class, index));
            let slot = match other {
                Some(new) => {
                    if let Some((slab, slot_bytes)) = new.bind {
                        self.actions.push(Action::BindSlab { slab, slot_bytes });
                    }
                    self.host.tier.slots.release(old);
                    new.slot
                }
                None => old,
            };
            let filling = HostCopy::Filling { slot, source: FillSource::Nvme, doomed: false };
            self.table.get_mut(index).host = filling;
            self.start_read(index, slot, segment, true);
            return;
        } else {
            self.abort_fill(index);
            if error == OpError::Checksum {
                self.counters.corrupt += 1;
            }
            self.table.get_mut(index).set_reinserted(false);
            self.drop_nvme(index, true);
            self.count_read_failure(segment);
        }
        let reason = match error {
            OpError::Checksum => MissReason::Checksum,
            _ => MissReason::Device,
        };
        self.fail_waiters(index, reason);
        self.after_loss(index);
    }

    fn count_read_failure(&mut self, segment: u32) {
        let Some(nvme) = &mut self.nvme else {
            return;
        };
        let found = nvme.segments.get_mut(segment);
        found.read_failures += 1;
        if found.read_failures >= READ_FAILURES_MAX && found.state != SegmentState::Quarantined {
            nvme.segments.quarantine(segment);
            self.actions.push(Action::QuarantineSegment { segment });
        }
    }

    /// The block is in a faster tier now: whoever waited goes on. `verified`: its bytes in host RAM
    /// were checked just now.
    pub(super) fn wake(&mut self, index: u32, verified: bool) {
        for waiter in self.flow.waiters.remove(&index).unwrap_or_default() {
            let part = waiter.part();
            let waiting = self.flow.tickets.get(&part.ticket);
            if !waiting.is_some_and(|ticket| ticket.is_waiting(part.at)) {
                continue;
            }
            match waiter {
                Waiter::Load { target, place, tier, .. } => {
                    self.start_scatter(index, part, target, place, tier, verified);
                }
                Waiter::Store { target, place, .. } => {
                    self.start_compare(index, part, target, place);
                }
                Waiter::Prefetch { .. } => self.finish(part, Outcome::Fetched),
            }
        }
    }
}
