//! Copies of blocks: how they come into a tier, are used, pinned, and dropped.
//!
//! Dirty means: in host RAM and not on nvme. `HostTier::dirty` lists the dirty blocks that are not
//! being written, coldest at the back; `dirty_bytes` counts those being written too.

use super::event::{Action, NvmeShape};
use super::flow::Waiter;
use super::policy::{OrderList, Policy};
use super::request::{MissReason, OfflineReason, Outcome};
use super::segments::Segments;
use super::slots::{ClassId, SlotId, Slots};
use super::table::{Block, BlockRef, HostCopy, NvmeCopy};
use super::{Catalog, SessionId};
use crate::block::page_ceil;

/// Searches for one victim at most, each past thousands of pinned blocks.
const SEARCHES_MAX: usize = 64;

/// The host tier.
pub(crate) struct HostTier {
    pub(crate) slots: Slots,
    /// One per size class.
    policies: Vec<Box<dyn Policy>>,
    pub(crate) dirty: OrderList,
    pub(crate) dirty_bytes: u64,
    /// Somebody found no slot since one was last taken: dirty blocks must be written whatever the
    /// watermark says.
    pub(crate) starved: bool,
    pub(crate) hits: u64,
    pub(crate) evicted: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

impl HostTier {
    pub(crate) fn new(bytes: u64, slab_bytes: u32) -> HostTier {
        HostTier {
            slots: Slots::new(bytes, slab_bytes),
            policies: Vec::new(),
            dirty: OrderList::default(),
            dirty_bytes: 0,
            starved: false,
            hits: 0,
            evicted: 0,
            bytes_in: 0,
            bytes_out: 0,
        }
    }
}

#[cfg(test)]
impl HostTier {
    /// Whether any policy holds the block.
    pub(crate) fn listed(&mut self, index: u32) -> bool {
        self.policies.iter_mut().any(|policy| policy.victim(&mut |at| at == index).is_some())
    }
}

/// The nvme tier.
pub(crate) struct NvmeTier {
    pub(crate) segments: Segments,
    pub(crate) shape: NvmeShape,
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

    pub(crate) fn class_of(&mut self, bytes: u32) -> Option<ClassId> {
        let class = self.host.slots.class_of(bytes)?;
        while self.host.policies.len() <= class {
            self.host.policies.push((self.config.host_policy)());
        }
        Some(class)
    }

    fn policy_of(&mut self, index: u32) -> Option<&mut Box<dyn Policy>> {
        let bytes = self.table.get(index).raw_bytes;
        let class = self.class_of(bytes)?;
        self.host.policies.get_mut(class)
    }

    /// Marks the block as used now.
    pub(crate) fn touch(&mut self, index: u32) {
        self.tick += 1;
        let (now, tick) = (self.now, self.tick);
        let block = self.table.get_mut(index);
        block.used_at = now;
        block.used_tick = tick;
        let slot = match block.host {
            HostCopy::Filling { slot, .. } | HostCopy::Resident { slot, .. } => slot,
            HostCopy::Absent | HostCopy::Draining { .. } => return,
        };
        self.host.slots.touch(slot, tick);
        self.host.dirty.move_front(index);
        if let Some(policy) = self.policy_of(index) {
            policy.touch(index);
        }
    }

    /// A slot for the block, evicting what must leave for it. `None`: nothing may leave now.
    pub(crate) fn take_slot(&mut self, index: u32) -> Option<SlotId> {
        let bytes = self.table.get(index).raw_bytes;
        let class = self.class_of(bytes)?;
        loop {
            if let Some(new) = self.host.slots.allocate(class, index) {
                if let Some((slab, slot_bytes)) = new.bind {
                    self.actions.push(Action::BindSlab { slab, slot_bytes });
                }
                self.host.policies.get_mut(class)?.insert(index);
                self.host.starved = false;
                return Some(new.slot);
            }
            let victim = self.host_victim(class);
            let before = victim.map_or(u64::MAX, |victim| self.table.get(victim).used_tick);
            if self.empty_other_slab(class, before) {
                continue;
            }
            match victim {
                Some(victim) => self.evict_host(victim),
                None => {
                    self.host.starved = true;
                    return None;
                }
            }
        }
    }

    fn host_victim(&mut self, class: ClassId) -> Option<u32> {
        let usable = self.nvme_usable();
        let table = &self.table;
        let policy = self.host.policies.get_mut(class)?;
        for _ in 0..SEARCHES_MAX {
            let mut pinned = Vec::new();
            let victim = policy.victim(&mut |index| {
                let block = table.get(index);
                let leaves = may_leave(block, usable);
                if !leaves && block.pins > 0 {
                    pinned.push(index);
                }
                leaves
            });
            // What is pinned is in use: it must not be in the way of the next search.
            for index in &pinned {
                policy.touch(*index);
            }
            if victim.is_some() || pinned.is_empty() {
                return victim;
            }
        }
        None
    }

    /// Empties a slab of another class whose blocks are all colder than `before`, if there is one.
    fn empty_other_slab(&mut self, class: ClassId, before: u64) -> bool {
        if self.host.slots.classes() < 2 {
            return false;
        }
        let usable = self.nvme_usable();
        let Some(blocks) = self.host.slots.coldest_other_slab(class, before) else {
            return false;
        };
        let all = blocks.iter().all(|index| may_leave(self.table.get(*index), usable));
        if all {
            for index in &blocks {
                self.evict_host(*index);
            }
        }
        all && !blocks.is_empty()
    }

    fn evict_host(&mut self, index: u32) {
        self.host.evicted += 1;
        self.drop_host(index);
        self.after_loss(index);
    }

    /// The block gets a copy in this slot once it is filled. A ghost's descendants can be reached
    /// again.
    pub(crate) fn begin_fill(&mut self, index: u32, slot: SlotId, gathered: bool) {
        let was_ghost = self.table.get(index).is_ghost();
        self.table.get_mut(index).host = HostCopy::Filling { slot, gathered, doomed: false };
        if was_ghost && !self.table.get(index).orphan {
            self.mark_below(index, false);
        }
    }

    /// A fill ended without a usable copy.
    pub(crate) fn abort_fill(&mut self, index: u32) {
        if let HostCopy::Filling { slot, .. } = self.table.get(index).host {
            if let Some(policy) = self.policy_of(index) {
                policy.remove(index);
            }
            self.host.slots.release(slot);
            self.table.get_mut(index).host = HostCopy::Absent;
        }
    }

    /// The host copy must go: now, or when its last user is done.
    pub(crate) fn drop_host(&mut self, index: u32) {
        match self.table.get(index).host {
            HostCopy::Absent | HostCopy::Draining { .. } => {}
            HostCopy::Filling { slot, gathered, .. } => {
                let doomed = HostCopy::Filling { slot, gathered, doomed: true };
                self.table.get_mut(index).host = doomed;
            }
            HostCopy::Resident { slot, users } => {
                self.forget_dirty(index);
                if let Some(policy) = self.policy_of(index) {
                    policy.remove(index);
                }
                if users > 0 {
                    self.table.get_mut(index).host = HostCopy::Draining { slot, users };
                } else {
                    self.host.slots.release(slot);
                    self.table.get_mut(index).host = HostCopy::Absent;
                }
            }
        }
    }

    fn forget_dirty(&mut self, index: u32) {
        let block = self.table.get_mut(index);
        let bytes = slot_bytes(block);
        match block.nvme {
            NvmeCopy::Resident(_) | NvmeCopy::Writing { doomed: true } => return,
            NvmeCopy::Writing { doomed: false } => {
                block.nvme = NvmeCopy::Writing { doomed: true };
            }
            NvmeCopy::Absent => {}
        }
        self.host.dirty.remove(index);
        self.host.dirty_bytes -= bytes;
    }

    /// The host copy has no copy on nvme (any more).
    pub(crate) fn become_dirty(&mut self, index: u32) {
        self.host.dirty_bytes += slot_bytes(self.table.get(index));
        self.host.dirty.push_front(index);
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
                    self.host.slots.release(slot);
                    self.after_loss(index);
                }
            }
            HostCopy::Absent | HostCopy::Filling { .. } => {}
        }
    }

    /// The copy on nvme must go. `erase`: it must not come back at a restart either.
    pub(crate) fn drop_nvme(&mut self, index: u32, erase: bool) {
        let block = self.table.get_mut(index);
        let location = match block.nvme {
            NvmeCopy::Absent | NvmeCopy::Writing { doomed: true } => return,
            NvmeCopy::Writing { doomed: false } => {
                block.nvme = NvmeCopy::Writing { doomed: true };
                let bytes = slot_bytes(block);
                self.host.dirty_bytes -= bytes;
                return;
            }
            NvmeCopy::Resident(location) => location,
        };
        block.nvme = NvmeCopy::Absent;
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
        if !self.table.live(index).is_some_and(Block::is_ghost) {
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
        self.after_loss(index);
    }

    pub(crate) fn mark_below(&mut self, index: u32, orphan: bool) {
        let nvme = &mut self.nvme;
        self.table.mark_below(index, orphan, |block| {
            if let (Some(location), Some(nvme)) = (block.location(), nvme.as_mut()) {
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
                    self.drop_nvme(index, true);
                    self.drop_host(index);
                    self.after_loss(index);
                }
            }
        }
    }

    pub(crate) fn pin(&mut self, index: u32) -> BlockRef {
        let block = self.table.get_mut(index);
        block.pins += 1;
        if block.pins == 1 {
            self.counters.pinned_bytes += u64::from(block.raw_bytes);
            if let (Some(location), Some(nvme)) = (block.location(), &mut self.nvme) {
                nvme.segments.get_mut(location.segment).pinned += 1;
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
            if let (Some(location), Some(nvme)) = (block.location(), &mut self.nvme) {
                nvme.segments.get_mut(location.segment).pinned -= 1;
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
fn may_leave(block: &Block, nvme_usable: bool) -> bool {
    let clean = matches!(block.nvme, NvmeCopy::Resident(_));
    matches!(block.host, HostCopy::Resident { users: 0, .. })
        && (clean || (!nvme_usable && block.pins == 0))
}
