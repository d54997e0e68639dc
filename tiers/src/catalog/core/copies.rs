//! Copies of blocks: how they come into a tier, are used, pinned, and dropped.
//!
//! Dirty means: in host RAM and not on nvme. `HostTier::dirty` lists the dirty blocks that are not
//! being written, coldest at the back; `dirty_bytes` counts those being written too.

use super::admission::Admission;
use super::codecs::ReadClock;
use super::dirty::Dirty;
use super::event::{Action, CatalogConfig, NvmeShape, SlotPlace};
use super::exclusive::GoesDown;
use super::flow::Waiter;
use super::planted::Planted;
use super::policy::OrderList;
use super::request::{MissReason, OfflineReason, Outcome, Tier, Timestamp};
use super::reuse::RequestId;
use super::segments::Segments;
use super::slot_tier::{Home, Leave, SlotTier, View, use_of};
use super::slots::{ClassId, SlotId};
use super::table::{Block, BlockRef, DeviceCopy, FillSource, HostCopy, NIL, NvmeCopy, step_of};
use super::{Catalog, SessionId};
use crate::block::page_ceil;

/// The host tier.
pub(crate) struct HostTier {
    pub(crate) tier: SlotTier,
    pub(crate) dirty: Dirty,
    pub(crate) dirty_bytes: u64,
    /// Dirty blocks that a search for a victim passed over, when it found none or they were many,
    /// less those written or gone since. They must be written whatever the watermark says.
    pub(crate) in_the_way: usize,
    /// When somebody found no slot last.
    pub(crate) no_slot: Option<Timestamp>,
    /// Blocks that came to be in a GPU's pool and on nvme too, the last one first. As long as they
    /// are there, they are the first to leave host RAM.
    pub(crate) doubled: OrderList,
    pub(crate) hits: u64,
    pub(crate) evicted: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

/// So many dirty blocks that a search for a victim passed over are in the way: searches are
/// bounded, and soon one would find nothing else.
const IN_THE_WAY: usize = 512;

impl HostTier {
    pub(crate) fn new(config: &CatalogConfig) -> HostTier {
        HostTier {
            tier: SlotTier::new(config.host_bytes, config.slab_bytes, config.host_policy),
            dirty: Dirty::new(config.host_policy),
            dirty_bytes: 0,
            in_the_way: 0,
            no_slot: None,
            doubled: OrderList::default(),
            hits: 0,
            evicted: 0,
            bytes_in: 0,
            bytes_out: 0,
        }
    }
}

/// The nvme tier.
pub(crate) struct NvmeTier {
    pub(crate) segments: Segments,
    pub(crate) shape: NvmeShape,
    /// The write budget, if there is one.
    pub(crate) admission: Option<Admission>,
    pub(crate) reading: ReadClock,
    pub(crate) offline: Option<OfflineReason>,
    /// Segments that failed since the last write that succeeded.
    pub(crate) failed_in_a_row: u32,
    pub(crate) blocks: u64,
    pub(crate) blocks_written: u64,
    pub(crate) hits: u64,
    pub(crate) evicted: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

impl NvmeTier {
    pub(crate) fn new(shape: &NvmeShape) -> NvmeTier {
        NvmeTier {
            segments: Segments::new(shape),
            shape: shape.clone(),
            admission: shape.write_bytes_per_day.map(Admission::new),
            reading: ReadClock::default(),
            offline: None,
            failed_in_a_row: 0,
            blocks: 0,
            blocks_written: 0,
            hits: 0,
            evicted: 0,
            bytes_in: 0,
            bytes_out: 0,
        }
    }
}

/// Slot bytes of a block.
pub(crate) fn slot_bytes(block: &Block) -> u64 {
    page_ceil(u64::from(block.raw_bytes))
}

impl Catalog {
    /// The nvme tier, if it can be written and read.
    pub(crate) fn nvme_usable(&self) -> bool {
        self.nvme.as_ref().is_some_and(|nvme| nvme.offline.is_none())
    }

    /// Marks the block as used now.
    pub(crate) fn touch(&mut self, index: u32) {
        let request = self.table.get(index).request();
        self.touch_for(index, request, false);
    }

    /// Marks the block as used now for a request; `fresh`: for the first time.
    pub(crate) fn touch_for(&mut self, index: u32, request: RequestId, fresh: bool) {
        self.tick += 1;
        let (now, tick) = (self.now, self.tick);
        let before = self.table.get(index).request();
        if before != request {
            self.give_budget_back(index, before);
        }
        let block = self.table.get_mut(index);
        block.use_at(now, tick);
        block.set_request(request);
        if block.host_slot().is_some() {
            // It came to be written again, and stays because it is used.
            block.set_reinserted(false);
        }
        self.offer_again(index);
        if self.nvme_usable() {
            self.note_device_only(index);
        }
        self.touch_quota(index);
        let how = use_of(&self.table, &self.reuse, index, fresh);
        let block = self.table.get(index);
        let (bytes, host, device) = (block.raw_bytes, block.host, block.device);
        if let HostCopy::Filling { slot, .. } | HostCopy::Resident { slot, .. } = host {
            self.host.dirty.touch(index, how);
            self.host.tier.touch(index, bytes, slot, tick, how);
        }
        if let DeviceCopy::Filling { gpu, slot, .. } | DeviceCopy::Resident { gpu, slot, .. } =
            device
            && let Some(found) = self.device_mut(gpu)
        {
            found.dirty.move_front(index);
            found.tier.touch(index, bytes, slot, tick, how);
        }
    }

    fn slot_tier(&mut self, home: Home) -> Option<&mut SlotTier> {
        match home {
            Home::Host => Some(&mut self.host.tier),
            Home::Device(gpu) => self.device_mut(gpu).map(|found| &mut found.tier),
        }
    }

    /// Whether dirty blocks must be written for others to find a slot.
    pub(crate) fn is_pressed(&self) -> bool {
        self.host.in_the_way > 0
    }

    /// A slot for the block, evicting what must leave for it. `None`: nothing may leave now.
    pub(crate) fn take_slot(&mut self, home: Home, index: u32) -> Option<SlotId> {
        let bytes = self.table.get(index).raw_bytes;
        let class = self.slot_tier(home)?.class_of(bytes)?;
        if !self.quota_room(home.tier(), index) {
            return None;
        }
        let how = use_of(&self.table, &self.reuse, index, true);
        // Copies of one path come from the root on and leave from its end.
        let before = self.before_for_same_request(index);
        loop {
            if let Some(new) = self.slot_tier(home)?.allocate(class, index, before, how) {
                if let (Home::Host, Some((slab, slot_bytes))) = (home, new.bind) {
                    self.actions.push(Action::BindSlab { slab, slot_bytes });
                }
                return Some(new.slot);
            }
            if let Some(victim) = self.doubled_victim(home, class) {
                self.evict(home, victim);
                continue;
            }
            let soft = self.soft_victim(home, slot_bytes(self.table.get(index)));
            let victim = soft.or_else(|| self.victim(home, class));
            let before = victim.map_or(u64::MAX, |victim| self.table.get(victim).used_tick());
            if self.empty_other_slab(home, class, before) {
                continue;
            }
            let Some(victim) = victim else {
                self.note_no_slot(home, class);
                return None;
            };
            match self.must_go_down(home, victim) {
                GoesDown::Begun => {}
                // It would be lost to both for what is in one of them.
                GoesDown::Cannot if self.table.get(index).host_slot().is_some() => return None,
                GoesDown::NeedNot | GoesDown::Cannot => self.evict(home, victim),
            }
        }
    }

    /// Nothing may leave for a block of this size. Slabs of other sizes can be emptied once what is
    /// dirty there is written.
    fn note_no_slot(&mut self, home: Home, class: ClassId) {
        let now = self.now;
        if let Some(found) = home.gpu().and_then(|gpu| self.device_mut(gpu)) {
            return found.note_no_slot(now, class);
        }
        self.host.no_slot = Some(now);
        if self.host.tier.slots.classes() >= 2 {
            self.host.in_the_way = self.host.dirty.len();
        }
    }

    /// The block that precedes this one, if the same request used it last.
    fn before_for_same_request(&self, index: u32) -> u32 {
        let block = self.table.get(index);
        if block.parent == NIL || self.config.trace_order {
            return NIL;
        }
        let same = self.table.get(block.parent).request() == block.request();
        if same { block.parent } else { NIL }
    }

    /// The dirty block that leaves host RAM first.
    pub(crate) fn next_dirty(&mut self) -> Option<u32> {
        let (now, weigh_cost) = (step_of(self.now), self.config.weigh_cost);
        let (table, reuse) = (&self.table, &self.reuse);
        let (home, unwritten_hold) = (Home::Host, true);
        self.host.dirty.next(&View { table, reuse, home, now, weigh_cost, unwritten_hold })
    }

    fn victim(&mut self, home: Home, class: ClassId) -> Option<u32> {
        let usable = self.nvme_usable();
        let (now, weigh_cost) = (step_of(self.now), self.config.weigh_cost);
        let evicts_leased = self.has_planted(Planted::LeasedBlockEvicted);
        let table = &self.table;
        let (reuse, unwritten_hold) = (&self.reuse, !usable);
        let view = View { table, reuse, home, now, weigh_cost, unwritten_hold };
        match home {
            Home::Host => {
                let idle =
                    |index| matches!(table.get(index).host, HostCopy::Resident { users: 0, .. });
                let leave = |index| match host_may_leave(table.get(index), usable) {
                    Leave::Pinned if evicts_leased && idle(index) => Leave::Yes,
                    leave => leave,
                };
                let (dirty, mut passed) = (&self.host.dirty, 0);
                let found = self.host.tier.victim(class, &view, |index| {
                    let leave = leave(index);
                    passed += usize::from(leave != Leave::Yes && dirty.contains(index));
                    leave
                });
                if found.is_none() || passed >= IN_THE_WAY {
                    self.host.in_the_way = self.host.in_the_way.max(passed.min(dirty.len()));
                }
                found
            }
            Home::Device(gpu) => {
                let found = self.devices.get_mut(usize::from(gpu.0))?;
                found.searches += 1;
                let dirty = &found.dirty;
                let leave = |index| device_may_leave(table.get(index), dirty.contains(index));
                found.tier.victim(class, &view, leave)
            }
        }
    }

    /// Empties a slab of another class whose blocks are all colder than `before`, if there is one.
    fn empty_other_slab(&mut self, home: Home, class: ClassId, before: u64) -> bool {
        let Some(tier) = self.slot_tier(home).filter(|tier| tier.slots.classes() >= 2) else {
            return false;
        };
        let Some(blocks) = tier.slots.coldest_other_slab(class, before) else {
            return false;
        };
        let all = blocks.iter().all(|index| self.leaves(home, *index) == Leave::Yes);
        if all {
            for index in &blocks {
                self.evict(home, *index);
            }
        }
        all && !blocks.is_empty()
    }

    /// Whether a copy may be dropped.
    pub(super) fn leaves(&self, home: Home, index: u32) -> Leave {
        let block = self.table.get(index);
        match home {
            Home::Host => host_may_leave(block, self.nvme_usable()),
            Home::Device(gpu) => {
                let found = self.devices.get(usize::from(gpu.0));
                device_may_leave(block, found.is_some_and(|d| d.dirty.contains(index)))
            }
        }
    }

    pub(super) fn evict(&mut self, home: Home, index: u32) {
        match home {
            Home::Host => {
                self.host.evicted += 1;
                self.drop_host(index);
                // What is left of it in a pool is not copied down again: nothing here was worth
                // less, so it would leave again at once, and come again.
                if self.table.get(index).device_slot().is_some() {
                    return;
                }
            }
            Home::Device(gpu) => {
                if let Some(found) = self.device_mut(gpu) {
                    found.evicted += 1;
                }
                self.drop_device(index);
            }
        }
        self.after_loss(index);
    }

    /// The block gets a copy in this slot once it is filled. A ghost's descendants can be reached
    /// again.
    pub(crate) fn begin_fill(&mut self, index: u32, place: SlotPlace, source: FillSource) {
        let was_ghost = self.table.get(index).is_ghost();
        let block = self.table.get_mut(index);
        if source == FillSource::Client {
            block.set_reinserted(false);
        }
        match place {
            SlotPlace::Host(slot) => {
                block.host = HostCopy::Filling { slot, source, doomed: false };
            }
            SlotPlace::Device(gpu, slot) => {
                block.device = DeviceCopy::Filling { gpu, slot, doomed: false };
            }
        }
        match place {
            SlotPlace::Host(_) => self.charge(index, Tier::Host),
            SlotPlace::Device(..) => self.charge(index, Tier::Device),
        }
        if was_ghost && !self.table.get(index).orphan {
            self.mark_below(index, false);
        }
    }

    /// A fill ended without a usable copy.
    pub(crate) fn abort_fill(&mut self, index: u32) {
        if let HostCopy::Filling { slot, .. } = self.table.get(index).host {
            let bytes = self.table.get(index).raw_bytes;
            self.host.tier.remove(index, bytes);
            self.release_host(index, slot);
            self.table.get_mut(index).host = HostCopy::Absent;
            if self.is_under_reclaim(index) {
                // Its segment waits for it.
                self.table.get_mut(index).set_reinserted(true);
                self.queue_fetch(index, false);
            }
        }
    }

    /// Gives a slot of host RAM back. Its descriptor goes, so that a next daemon does not take the
    /// block over: it may have left because it was forgotten or reported bad.
    fn release_host(&mut self, index: u32, slot: SlotId) {
        self.discharge(index, Tier::Host);
        self.host.tier.slots.release(slot);
        self.actions.push(Action::ClearSlot { slot });
    }

    /// The host copy must go: now, or when its last user is done.
    pub(crate) fn drop_host(&mut self, index: u32) {
        match self.table.get(index).host {
            HostCopy::Absent | HostCopy::Draining { .. } => {}
            HostCopy::Filling { doomed: true, .. } => {}
            HostCopy::Filling { slot, source, doomed: false } => {
                let doomed = HostCopy::Filling { slot, source, doomed: true };
                self.table.get_mut(index).host = doomed;
                self.actions.push(Action::DisownSlot { slot });
            }
            HostCopy::Resident { slot, users } => {
                self.note_copy(index, Tier::Host, false);
                self.count_in_host(index, false);
                self.host.doubled.remove(index);
                self.forget_dirty(index);
                let bytes = self.table.get(index).raw_bytes;
                self.host.tier.remove(index, bytes);
                if users > 0 && !self.has_planted(Planted::SlotUsedTwice) {
                    self.table.get_mut(index).host = HostCopy::Draining { slot, users };
                    self.actions.push(Action::DisownSlot { slot });
                } else {
                    self.release_host(index, slot);
                    self.table.get_mut(index).host = HostCopy::Absent;
                }
            }
        }
    }

    /// A block that is in host RAM and on nvme came to be so, or is about to be so no more: its
    /// segment counts it. No effect for any other block.
    pub(crate) fn count_in_host(&mut self, index: u32, both: bool) {
        let block = self.table.get(index);
        let (Some(spot), Some(_)) = (block.spot(), block.host_slot()) else {
            return;
        };
        let bytes = slot_bytes(block);
        let Some(nvme) = &mut self.nvme else {
            return;
        };
        let segment = nvme.segments.get_mut(spot.segment);
        if both {
            segment.in_host += 1;
            segment.in_host_bytes += bytes;
        } else {
            segment.in_host -= 1;
            segment.in_host_bytes -= bytes;
        }
    }

    fn forget_dirty(&mut self, index: u32) {
        let block = self.table.get_mut(index);
        if block.is_refused() {
            return block.set_refused(false);
        }
        let bytes = slot_bytes(block);
        match block.nvme {
            NvmeCopy::Resident(_) | NvmeCopy::Writing { doomed: true } => return,
            NvmeCopy::Writing { doomed: false } => {
                block.nvme = NvmeCopy::Writing { doomed: true };
            }
            NvmeCopy::Absent => {
                let request = block.request();
                self.give_budget_back(index, request);
                self.host.in_the_way = self.host.in_the_way.saturating_sub(1);
            }
        }
        self.host.dirty.remove(index);
        self.host.dirty_bytes -= bytes;
    }

    /// The host copy has no copy on nvme (any more).
    pub(crate) fn become_dirty(&mut self, index: u32) {
        self.host.dirty_bytes += slot_bytes(self.table.get(index));
        self.list_dirty(index, true);
    }

    /// Lists a dirty block that is not being written. `by_age`: as the coldest one, if it is.
    pub(crate) fn list_dirty(&mut self, index: u32, by_age: bool) {
        let how = use_of(&self.table, &self.reuse, index, false);
        let (parent, tick) = (self.table.get(index).parent, self.table.get(index).used_tick());
        let is_older = |other| by_age && tick < self.table.get(other).used_tick();
        self.host.dirty.push(parent, index, how, is_older);
    }

    /// One more operation reads the block's slot.
    pub(crate) fn add_user(&mut self, index: u32) {
        if let HostCopy::Resident { users, .. } = &mut self.table.get_mut(index).host {
            *users += 1;
        }
    }

    /// One operation less reads the block's slot.
    pub(crate) fn remove_user(&mut self, index: u32) {
        match &mut self.table.get_mut(index).host {
            HostCopy::Resident { users, .. } => *users -= 1,
            HostCopy::Draining { slot, users } => {
                *users -= 1;
                if *users == 0 {
                    let slot = *slot;
                    self.table.get_mut(index).host = HostCopy::Absent;
                    self.release_host(index, slot);
                    self.after_loss(index);
                    self.drained_slot(index);
                }
            }
            HostCopy::Absent | HostCopy::Filling { .. } => {}
        }
    }

    /// The copy on nvme must go. `erase`: it must not come back at a restart either.
    pub(crate) fn drop_nvme(&mut self, index: u32, erase: bool) {
        let block = self.table.get_mut(index);
        if block.nvme == (NvmeCopy::Writing { doomed: false }) {
            block.nvme = NvmeCopy::Writing { doomed: true };
            let bytes = slot_bytes(block);
            self.host.dirty_bytes -= bytes;
            return;
        }
        self.count_in_host(index, false);
        if self.table.get(index).spot().is_some() {
            self.discharge(index, Tier::Nvme);
        }
        let Some(location) = self.table.take_off_nvme(index) else {
            return;
        };
        self.note_copy(index, Tier::Nvme, false);
        let block = self.table.get(index);
        let (pinned, orphan) = (block.pins > 0, block.orphan);
        let resident = matches!(block.host, HostCopy::Resident { .. });
        if let Some(nvme) = &mut self.nvme {
            nvme.blocks -= 1;
            nvme.segments.unlist(location.segment, location.index, location.stored_bytes);
            let segment = nvme.segments.get_mut(location.segment);
            segment.pinned -= u32::from(pinned);
            if orphan {
                segment.orphan_bytes -= page_ceil(u64::from(location.stored_bytes));
            }
            let sequence = segment.sequence;
            if erase {
                let namespace = self.table.get(index).namespace;
                self.erase(namespace, location.segment, sequence, location.index);
            }
        }
        self.settle_segment(location.segment);
        if resident {
            self.become_dirty(index);
        }
    }

    /// Cleans up after a copy was dropped: a block without copies becomes a ghost or goes.
    pub(crate) fn after_loss(&mut self, index: u32) {
        let Some(block) = self.table.live(index) else {
            return;
        };
        if !block.is_ghost() {
            // What is in a GPU's pool only can be lost with the next eviction there.
            if self.nvme_usable() {
                self.note_device_only(index);
            }
            return;
        }
        self.fail_waiters(index, MissReason::Absent);
        if self.table.has_children(index) {
            self.table.note_ghost(index);
            self.mark_below(index, true);
        } else {
            self.table.remove_bare(index);
        }
    }

    /// All copies of the block go. `erase`: from the device too.
    pub(crate) fn drop_copies(&mut self, index: u32, erase: bool) {
        self.drop_nvme(index, erase);
        self.drop_host(index);
        self.drop_device(index);
        self.after_loss(index);
    }

    pub(crate) fn mark_below(&mut self, index: u32, orphan: bool) {
        let nvme = &mut self.nvme;
        self.table.mark_below(index, orphan, |table, at| {
            if let (Some(location), Some(nvme)) = (table.location(at), nvme.as_mut()) {
                let bytes = page_ceil(u64::from(location.stored_bytes));
                let segment = nvme.segments.get_mut(location.segment);
                if orphan {
                    segment.orphan_bytes += bytes;
                } else {
                    segment.orphan_bytes -= bytes;
                }
            }
        });
    }

    /// Keeps the number of ghosts within bounds: the oldest one goes with all that follows it.
    pub(crate) fn drop_surplus_ghosts(&mut self) {
        // One a time: a ghost above a pinned block stays, and must not be tried for ever.
        if let Some(ghost) = self.table.surplus_ghost() {
            for index in self.table.subtrees(std::iter::once(ghost)).into_iter().rev() {
                if self.table.live(index).is_some_and(|block| block.pins == 0) {
                    self.drop_copies(index, true);
                }
            }
        }
    }

    pub(crate) fn pin(&mut self, index: u32) -> BlockRef {
        let block = self.table.get_mut(index);
        block.pins += 1;
        if block.pins == 1 {
            self.counters.pinned_bytes += u64::from(block.raw_bytes);
            if let (Some(spot), Some(nvme)) = (block.spot(), &mut self.nvme) {
                nvme.segments.get_mut(spot.segment).pinned += 1;
            }
        }
        self.table.reference(index)
    }

    pub(crate) fn unpin_block(&mut self, block: BlockRef) {
        let Some(index) = self.table.resolve(block) else {
            return;
        };
        let block = self.table.get_mut(index);
        block.pins -= 1;
        if block.pins == 0 {
            self.counters.pinned_bytes -= u64::from(block.raw_bytes);
            if let (Some(spot), Some(nvme)) = (block.spot(), &mut self.nvme) {
                nvme.segments.get_mut(spot.segment).pinned -= 1;
            }
            self.table.remove_bare(index);
        }
    }

    /// Whoever waits for the block gets a miss (or `Busy`, for a store).
    pub(crate) fn fail_waiters(&mut self, index: u32, reason: MissReason) {
        for waiter in self.flow.waiters.remove(&index).unwrap_or_default() {
            let (part, outcome) = match waiter {
                Waiter::Load { part, .. } | Waiter::Prefetch { part } => {
                    (part, Outcome::Missed(reason))
                }
                Waiter::Store { part, .. } => (part, Outcome::Busy),
            };
            self.finish(part, outcome);
        }
    }

    /// The tenant of a session.
    pub(crate) fn tenant_of(&self, session: SessionId) -> Option<super::TenantId> {
        self.clients.sessions.get(&session).map(|session| session.tenant)
    }
}

/// Whether a block's host copy may be dropped without I/O and without breaking a promise. A leased
/// or pinned block that is on nvme too keeps that copy.
fn host_may_leave(block: &Block, nvme_usable: bool) -> Leave {
    let clean = matches!(block.nvme, NvmeCopy::Resident(_));
    match block.host {
        HostCopy::Resident { users: 0, .. } if clean => Leave::Yes,
        _ if block.pins > 0 => Leave::Pinned,
        HostCopy::Resident { users: 0, .. } if !nvme_usable || block.is_refused() => Leave::Yes,
        _ => Leave::No,
    }
}

/// The same for a copy in a GPU's pool. `dirty`: it is still to be copied to host RAM.
fn device_may_leave(block: &Block, dirty: bool) -> Leave {
    let below = matches!(block.host, HostCopy::Resident { .. })
        || matches!(block.nvme, NvmeCopy::Resident(_));
    match block.device {
        DeviceCopy::Resident { users: 0, .. } if below => Leave::Yes,
        _ if block.pins > 0 => Leave::Pinned,
        DeviceCopy::Resident { users: 0, .. } if !dirty => Leave::Yes,
        _ => Leave::No,
    }
}
