//! A tier that is cut into slots: the allocator and, per size class, the order in which copies
//! leave. Host RAM is one, and the pool of each GPU.
//!
//! Invariant: a block is in the order of its size class as long as it has a slot that is being
//! filled or that holds a usable copy.

use super::policy::Policy;
use super::request::GpuId;
use super::slots::{Allocated, ClassId, SlotId, Slots};

/// Searches for one victim at most, each past thousands of pinned blocks.
const SEARCHES_MAX: usize = 64;

/// Which of the tiers with slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Home {
    Host,
    Device(GpuId),
}

/// Whether a copy may be dropped without I/O and without breaking a promise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leave {
    Yes,
    No,
    /// It may not because it is leased or pinned.
    Pinned,
}

/// The slots and their order.
pub(crate) struct SlotTier {
    pub(crate) slots: Slots,
    /// One per size class.
    policies: Vec<Box<dyn Policy>>,
    policy: fn() -> Box<dyn Policy>,
}

impl SlotTier {
    pub(crate) fn new(bytes: u64, slab_bytes: u32, policy: fn() -> Box<dyn Policy>) -> SlotTier {
        SlotTier { slots: Slots::new(bytes, slab_bytes), policies: Vec::new(), policy }
    }

    pub(crate) fn class_of(&mut self, bytes: u32) -> Option<ClassId> {
        let class = self.slots.class_of(bytes)?;
        while self.policies.len() <= class {
            self.policies.push((self.policy)());
        }
        Some(class)
    }

    fn policy_of(&mut self, bytes: u32) -> Option<&mut Box<dyn Policy>> {
        let class = self.class_of(bytes)?;
        self.policies.get_mut(class)
    }

    /// A free slot for the block, which is the warmest of its class then.
    pub(crate) fn allocate(&mut self, class: ClassId, index: u32) -> Option<Allocated> {
        let new = self.slots.allocate(class, index)?;
        self.policies.get_mut(class)?.insert(index);
        Some(new)
    }

    /// The block has a slot that it was not allocated here.
    pub(crate) fn insert(&mut self, index: u32, bytes: u32) {
        if let Some(policy) = self.policy_of(bytes) {
            policy.insert(index);
        }
    }

    /// The block was used at `tick`.
    pub(crate) fn touch(&mut self, index: u32, bytes: u32, slot: SlotId, tick: u64) {
        self.slots.touch(slot, tick);
        if let Some(policy) = self.policy_of(bytes) {
            policy.touch(index);
        }
    }

    /// The block's copy is not to be used any more; its slot may still be.
    pub(crate) fn remove(&mut self, index: u32, bytes: u32) {
        if let Some(policy) = self.policy_of(bytes) {
            policy.remove(index);
        }
    }

    /// The block that leaves next.
    pub(crate) fn victim(&mut self, class: ClassId, leave: impl Fn(u32) -> Leave) -> Option<u32> {
        let policy = self.policies.get_mut(class)?;
        for _ in 0..SEARCHES_MAX {
            let mut pinned = Vec::new();
            let victim = policy.victim(&mut |index| match leave(index) {
                Leave::Yes => true,
                Leave::No => false,
                Leave::Pinned => {
                    pinned.push(index);
                    false
                }
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

    /// Whether any order holds the block.
    #[cfg(test)]
    pub(crate) fn listed(&mut self, index: u32) -> bool {
        self.policies.iter_mut().any(|policy| policy.victim(&mut |at| at == index).is_some())
    }
}
