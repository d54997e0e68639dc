//! The pools of the GPUs: how copies get into GPU memory, and from there down to host RAM.
//!
//! A block that a client stores from GPU memory is gathered into the pool; a block that was hit
//! more than once is kept there on its way up. `dirty` lists the blocks that lie in the pool only,
//! coldest at the back. They are copied down to host RAM at once as long as that has free room.
//! From there on, what leaves the pool next is copied down ahead (`cold`), so that eviction is
//! dropping, and the rest is in the pool alone and takes nobody's place in host RAM.

use std::collections::VecDeque;

use super::Catalog;
use super::event::{Action, DeviceShape, OpError, OpId, SlotPlace};
use super::flow::Op;
use super::policy::{OrderList, PolicyChoice};
use super::request::{GpuId, MissReason, OfflineReason, Tier, Timestamp};
use super::slot_tier::{Home, Leave, SlotTier, View};
use super::slots::{ClassId, SlotId};
use super::table::{BlockRef, DeviceCopy, FillSource, HostCopy, NvmeCopy, step_of};

/// Lookups that found a block before it is kept in the pool on its way up.
const PROMOTE_HITS: u16 = 2;

/// Copies from one pool to host RAM under way at most.
const DEMOTES_MAX: usize = 64;

/// Blocks that somebody waits for that are looked at in one go: a GPU that has all its copies under
/// way may have thousands of them, and this is done after every event.
const DEMOTE_LOOKS_MAX: usize = 64;

/// Part of a pool, from its coldest block on, that is copied down ahead of the evictions; and how
/// many blocks at most.
const READY_PART: usize = 4;
const READY_MAX: usize = 1024;

/// Part of host RAM that is free, percent, above which all that lies in a pool only is copied down.
const HOST_FREE_PERCENT: usize = 12;

/// The pool of one GPU.
pub(crate) struct DeviceTier {
    pub(crate) tier: SlotTier,
    pub(crate) dirty: OrderList,
    /// Those of them that leave the pool next, coldest first, as far as they were looked for.
    cold: VecDeque<BlockRef>,
    /// Searches for a victim since then.
    pub(crate) searches: usize,
    /// Blocks to copy down whatever leaves the pool next, because somebody found no slot.
    starved: usize,
    /// When a block of this class found no slot last. Forgotten when one may have become free.
    no_slot: Option<(Timestamp, ClassId)>,
    /// Copies to host RAM under way.
    pub(crate) demotes: usize,
    pub(crate) offline: Option<OfflineReason>,
    pub(crate) hits: u64,
    pub(crate) evicted: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

impl DeviceTier {
    pub(crate) fn new(shape: &DeviceShape, policy: PolicyChoice) -> DeviceTier {
        DeviceTier {
            tier: SlotTier::new(shape.pool_bytes, shape.slab_bytes, policy),
            dirty: OrderList::default(),
            cold: VecDeque::new(),
            searches: 0,
            starved: 0,
            no_slot: None,
            demotes: 0,
            offline: None,
            hits: 0,
            evicted: 0,
            bytes_in: 0,
            bytes_out: 0,
        }
    }
}

impl DeviceTier {
    fn may_demote(&self) -> bool {
        self.offline.is_none() && self.demotes < DEMOTES_MAX
    }

    /// Blocks that are copied down ahead.
    fn ready(&self) -> usize {
        (self.tier.slots.used_slots() as usize / READY_PART).clamp(1, READY_MAX)
    }

    /// No block may leave for one of this class.
    pub(super) fn note_no_slot(&mut self, now: Timestamp, class: ClassId) {
        self.no_slot = Some((now, class));
        // What leaves next is looked for at once.
        self.searches = READY_MAX;
    }
}

impl Catalog {
    pub(super) fn device_mut(&mut self, gpu: GpuId) -> Option<&mut DeviceTier> {
        self.devices.get_mut(usize::from(gpu.0))
    }

    pub(super) fn device_usable(&self, gpu: GpuId) -> bool {
        self.devices.get(usize::from(gpu.0)).is_some_and(|found| found.offline.is_none())
    }

    /// A slot in a GPU's pool, if something may leave for the block.
    pub(super) fn take_device_slot(&mut self, gpu: GpuId, index: u32) -> Option<SlotId> {
        if !self.device_usable(gpu) {
            return None;
        }
        let (now, bytes) = (self.now, self.table.get(index).raw_bytes);
        let found = self.device_mut(gpu)?;
        let class = found.tier.class_of(bytes)?;
        // A search that finds nothing is long, and a call may bring thousands of blocks.
        if found.no_slot == Some((now, class)) {
            return None;
        }
        let slot = self.take_slot(Home::Device(gpu), index);
        if slot.is_none() {
            let found = self.device_mut(gpu)?;
            found.starved = found.ready();
        }
        slot
    }

    /// A slot of the pool by way of which a block goes up, when it is worth keeping there.
    pub(super) fn promotion(&mut self, gpu: GpuId, index: u32) -> Option<SlotId> {
        let block = self.table.get(index);
        if block.device != DeviceCopy::Absent || block.hits < PROMOTE_HITS {
            return None;
        }
        let slot = self.take_device_slot(gpu, index)?;
        self.begin_fill(index, SlotPlace::Device(gpu, slot), FillSource::Device);
        Some(slot)
    }

    /// A fill of the pool ended with verified bytes there.
    pub(super) fn device_filled(&mut self, index: u32) {
        let DeviceCopy::Filling { gpu, slot, doomed } = self.table.get(index).device else {
            return;
        };
        if doomed || !self.device_usable(gpu) {
            return self.abort_device_fill(index);
        }
        let bytes = u64::from(self.table.get(index).raw_bytes);
        self.table.get_mut(index).device = DeviceCopy::Resident { gpu, slot, users: 0 };
        if let Some(found) = self.device_mut(gpu) {
            found.bytes_in += bytes;
        }
        self.note_copy(index, Tier::Device, true);
        self.note_device_only(index);
        self.note_doubled(index);
    }

    /// A fill of the pool ended without a usable copy.
    pub(super) fn abort_device_fill(&mut self, index: u32) {
        if let DeviceCopy::Filling { gpu, slot, .. } = self.table.get(index).device {
            self.free_device_slot(index, gpu, slot, true);
        }
    }

    fn free_device_slot(&mut self, index: u32, gpu: GpuId, slot: SlotId, listed: bool) {
        let bytes = self.table.get(index).raw_bytes;
        self.discharge(index, Tier::Device);
        self.table.get_mut(index).device = DeviceCopy::Absent;
        if let Some(found) = self.device_mut(gpu) {
            if listed {
                found.tier.remove(index, bytes);
            }
            found.no_slot = None;
            found.tier.slots.release(slot);
        }
    }

    /// The copy in GPU memory must go: now, or when its last user is done.
    pub(super) fn drop_device(&mut self, index: u32) {
        match self.table.get(index).device {
            DeviceCopy::Absent | DeviceCopy::Draining { .. } => {}
            DeviceCopy::Filling { gpu, slot, .. } => {
                let doomed = DeviceCopy::Filling { gpu, slot, doomed: true };
                self.table.get_mut(index).device = doomed;
            }
            DeviceCopy::Resident { gpu, slot, users } => {
                self.note_copy(index, Tier::Device, false);
                let bytes = self.table.get(index).raw_bytes;
                if let Some(found) = self.device_mut(gpu) {
                    found.dirty.remove(index);
                    found.tier.remove(index, bytes);
                }
                if users > 0 {
                    let draining = DeviceCopy::Draining { gpu, slot, users };
                    self.table.get_mut(index).device = draining;
                } else {
                    self.free_device_slot(index, gpu, slot, false);
                }
            }
        }
    }

    pub(super) fn add_device_user(&mut self, index: u32) {
        if let DeviceCopy::Resident { users, .. } = &mut self.table.get_mut(index).device {
            *users += 1;
        }
    }

    pub(super) fn remove_device_user(&mut self, index: u32) {
        match &mut self.table.get_mut(index).device {
            DeviceCopy::Resident { users, .. } => *users -= 1,
            DeviceCopy::Draining { gpu, slot, users } => {
                *users -= 1;
                if *users == 0 {
                    let (gpu, slot) = (*gpu, *slot);
                    self.free_device_slot(index, gpu, slot, false);
                    self.after_loss(index);
                }
            }
            DeviceCopy::Absent | DeviceCopy::Filling { .. } => {}
        }
    }

    /// Lists the block for a copy to host RAM if it lies in a pool and nowhere else.
    pub(super) fn note_device_only(&mut self, index: u32) {
        let block = self.table.get(index);
        let below = block.host != HostCopy::Absent || block.nvme != NvmeCopy::Absent;
        let parent = block.parent;
        let Some((gpu, _)) = block.device_slot().filter(|_| !below) else {
            return;
        };
        if let Some(found) = self.device_mut(gpu)
            && found.offline.is_none()
            && !found.dirty.contains(index)
        {
            // What follows is copied down first, so that it is colder there.
            found.dirty.push_behind(parent, index);
        }
    }

    /// Somebody waits for the block, which is in a pool, to be in host RAM.
    pub(super) fn queue_demote(&mut self, index: u32) {
        let block = self.table.reference(index);
        self.flow.demote_first.push_back(block);
    }

    /// Starts copies from the pools to host RAM, as far as their number and the slots allow.
    pub(super) fn pump_demotes(&mut self) {
        self.find_cold();
        while let Some((index, waiting)) = self.next_demote() {
            let Some(to) = self.take_slot(Home::Host, index) else {
                let over_quota = self.quotas.refusal().is_some();
                match waiting {
                    Some(block) if over_quota => self.flow.demote_first.push_back(block),
                    Some(block) => self.flow.demote_first.push_front(block),
                    // The next one may be another tenant's.
                    None if over_quota => self.pass_over_dirty(index),
                    None => {}
                }
                return;
            };
            self.start_demote(index, to);
        }
    }

    /// A block that is to be copied down has to wait for others.
    fn pass_over_dirty(&mut self, index: u32) {
        let block = self.table.reference(index);
        let draining = self.drain.is_some();
        if let Some((gpu, _)) = self.table.get(index).device_slot()
            && let Some(found) = self.device_mut(gpu)
        {
            found.cold.retain(|cold| *cold != block);
            match found.dirty.back().filter(|back| draining && *back != index) {
                Some(back) => {
                    found.dirty.remove(index);
                    found.dirty.push_behind(back, index);
                }
                None => found.dirty.move_front(index),
            }
        }
    }

    /// The next block to copy down: one that somebody waits for, or else the coldest.
    fn next_demote(&mut self) -> Option<(u32, Option<BlockRef>)> {
        for _ in 0..self.flow.demote_first.len().min(DEMOTE_LOOKS_MAX) {
            let block = self.flow.demote_first.pop_front()?;
            let Some(index) = self.table.resolve(block) else {
                continue;
            };
            let found = self.table.get(index);
            if found.host != HostCopy::Absent || !self.flow.is_awaited(index) {
                continue;
            }
            match found.device_slot() {
                Some((gpu, _)) if self.may_demote(gpu) => return Some((index, Some(block))),
                Some(_) => self.flow.demote_first.push_back(block),
                // Its copy went meanwhile, to make room or with its GPU.
                None => self.reach_without_pool(index),
            }
        }
        let sieve = self.config.device_policy == PolicyChoice::Sieve;
        let (draining, everything) = (self.drain.is_some(), sieve || self.host_has_free_room());
        let Catalog { devices, table, .. } = self;
        devices.iter_mut().filter(|found| found.may_demote()).find_map(|found| {
            if draining {
                return found.dirty.front().map(|index| (index, None));
            }
            while let Some(cold) = found.cold.front() {
                match table.resolve(*cold).filter(|index| found.dirty.contains(*index)) {
                    Some(index) => return Some((index, None)),
                    None => found.cold.pop_front(),
                };
            }
            if everything || found.starved > 0 {
                found.starved = found.starved.saturating_sub(1);
                return found.dirty.back().map(|index| (index, None));
            }
            None
        })
    }

    /// Whether a copy in host RAM takes no other block's place.
    fn host_has_free_room(&self) -> bool {
        let (free, all) = self.host.tier.slots.free_slabs();
        free * 100 > all * HOST_FREE_PERCENT
    }

    /// Looks now and then for what will leave the pools next, so that it is copied down before.
    fn find_cold(&mut self) {
        // A look would be a turn of its hand.
        if self.config.device_policy == PolicyChoice::Sieve {
            return;
        }
        let (now, weigh_cost) = (step_of(self.now), self.config.weigh_cost);
        let Catalog { devices, table, reuse, .. } = self;
        for (gpu, found) in (0..).map(GpuId).zip(devices.iter_mut()) {
            let ready = found.ready();
            if found.searches * 2 < ready || found.offline.is_some() {
                continue;
            }
            found.searches = 0;
            found.cold.clear();
            let home = Home::Device(gpu);
            let view = View { table, reuse, home, now, weigh_cost, unwritten_hold: true };
            let DeviceTier { tier, dirty, cold, .. } = found;
            for class in 0..tier.slots.classes() {
                let mut left = ready;
                let victim = tier.victim(class, &view, |index| {
                    if left > 0 && dirty.contains(index) {
                        cold.push_back(table.reference(index));
                    }
                    left = left.saturating_sub(1);
                    Leave::No
                });
                debug_assert!(victim.is_none());
            }
        }
    }

    fn may_demote(&self, gpu: GpuId) -> bool {
        self.devices.get(usize::from(gpu.0)).is_some_and(DeviceTier::may_demote)
    }

    /// Somebody waits for a block that is in no pool any more.
    fn reach_without_pool(&mut self, index: u32) {
        let block = self.table.get(index);
        if matches!(block.nvme, NvmeCopy::Resident(_)) && self.nvme_usable() {
            self.flow.will_come_from(index, Tier::Nvme);
            return self.queue_fetch(index, true);
        }
        if block.device == DeviceCopy::Absent {
            self.fail_waiters(index, MissReason::Absent);
        }
    }

    pub(super) fn start_demote(&mut self, index: u32, to: SlotId) {
        let Some((gpu, from)) = self.table.get(index).device_slot() else {
            return;
        };
        if let Some(found) = self.device_mut(gpu) {
            found.dirty.remove(index);
            found.demotes += 1;
        }
        self.begin_fill(index, SlotPlace::Host(to), FillSource::Device);
        self.add_device_user(index);
        let op = self.flow.start(self.now, Op::Demote { block: index, gpu });
        let descriptor = Box::new(self.descriptor(index));
        self.actions.push(Action::Demote { op, gpu, from, to, descriptor });
    }

    pub(super) fn demoted(&mut self, op: OpId, result: Result<(), OpError>) {
        let Some(Op::Demote { block: index, gpu }) = self.take_op(op) else {
            return;
        };
        if let Some(found) = self.device_mut(gpu) {
            found.demotes -= 1;
            found.no_slot = None;
        }
        let HostCopy::Filling { doomed, .. } = self.table.get(index).host else {
            return self.remove_device_user(index);
        };
        match result {
            Ok(()) if !doomed => {
                let bytes = u64::from(self.table.get(index).raw_bytes);
                if let Some(found) = self.device_mut(gpu) {
                    found.bytes_out += bytes;
                }
                self.host_filled(index);
                self.remove_device_user(index);
            }
            Ok(()) => {
                self.abort_fill(index);
                self.remove_device_user(index);
                self.after_loss(index);
            }
            Err(_) => {
                // What cannot be read is of no use, and is not tried for ever.
                self.abort_fill(index);
                self.drop_device(index);
                let stays = matches!(self.table.get(index).nvme, NvmeCopy::Resident(_));
                match stays && self.flow.is_awaited(index) {
                    true => self.reach_without_pool(index),
                    false => self.fail_waiters(index, MissReason::Device),
                }
                self.remove_device_user(index);
                self.after_loss(index);
            }
        }
    }

    /// A copy down from a lost GPU may never end. Nobody waits for it, and the block is lost until
    /// a restart finds it on nvme.
    fn give_up_demote(&mut self, index: u32, gpu: GpuId) {
        let Some(block) = self.table.live(index) else {
            return;
        };
        let leaves = matches!(block.device, DeviceCopy::Draining { gpu: on, .. } if on == gpu);
        if leaves && matches!(block.host, HostCopy::Filling { source: FillSource::Device, .. }) {
            self.fail_waiters(index, MissReason::Device);
            // Nor could it be read back, as long as its slot of host RAM may be written to.
            self.drop_copies(index, false);
        }
    }

    /// A GPU is off until the next start. Its copies are out of reach; the other tiers go on. What
    /// it may still be doing never ends here: its slots and the places of its clients stay taken.
    pub(super) fn take_device_offline(&mut self, gpu: GpuId, reason: OfflineReason) {
        let Some(found) = self.device_mut(gpu).filter(|found| found.offline.is_none()) else {
            return;
        };
        found.offline = Some(reason);
        self.prefills.ramp(self.now);
        self.actions.push(Action::TierOffline { tier: Tier::Device, gpu: Some(gpu), reason });
        for index in 0..self.table.index_end() {
            let here = |device| match device {
                DeviceCopy::Resident { gpu: on, .. } | DeviceCopy::Filling { gpu: on, .. } => {
                    on == gpu
                }
                DeviceCopy::Absent | DeviceCopy::Draining { .. } => false,
            };
            if self.table.live(index).is_some_and(|block| here(block.device)) {
                self.drop_device(index);
                self.after_loss(index);
            }
            self.give_up_demote(index, gpu);
        }
    }
}
