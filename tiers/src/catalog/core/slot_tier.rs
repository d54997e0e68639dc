//! A tier that is cut into slots: the allocator and, per size class, the order in which copies
//! leave. Host RAM is one, and the pool of each GPU.
//!
//! Invariant: a block is in the order of its size class as long as it has a slot that is being
//! filled or that holds a usable copy.

use super::policy::{About, Outlook, Policy, PolicyChoice, Use};
use super::request::{GpuId, Tier};
use super::reuse::{Reuse, short_key};
use super::slots::{Allocated, ClassId, SlotId, Slots};
use super::survival::SHORT;
use super::table::{BlockTable, DeviceCopy, HostCopy};

/// Searches for one victim at most, each past thousands of pinned blocks.
const SEARCHES_MAX: usize = 64;

/// Which of the tiers with slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Home {
    Host,
    Device(GpuId),
}

impl Home {
    /// The tier.
    pub(crate) fn tier(self) -> Tier {
        match self {
            Home::Host => Tier::Host,
            Home::Device(_) => Tier::Device,
        }
    }

    /// The GPU.
    pub(crate) fn gpu(self) -> Option<GpuId> {
        match self {
            Home::Host => None,
            Home::Device(gpu) => Some(gpu),
        }
    }
}

/// Whether a copy may be dropped without I/O and without breaking a promise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leave {
    Yes,
    No,
    /// It may not because it is leased or pinned.
    Pinned,
}

/// What policies see of the blocks of a tier.
pub(crate) struct View<'a> {
    pub(crate) table: &'a BlockTable,
    pub(crate) reuse: &'a Reuse,
    pub(crate) home: Home,
    /// In steps of the table's coarse time.
    pub(crate) now: u32,
    /// Hits are worth what computing the block again would take.
    pub(crate) weigh_cost: bool,
    /// What is still to be written to nvme holds back the blocks before it. Not where room is
    /// needed: most paths in host RAM may end in blocks that wait for a write, which may itself
    /// wait for room.
    pub(crate) unwritten_hold: bool,
}

impl View<'_> {
    /// How the block was used last.
    pub(crate) fn how(&self, index: u32) -> Use {
        use_of(self.table, self.reuse, index, false)
    }
}

/// How a block was used last. `fresh`: a request begins to use it.
pub(crate) fn use_of(table: &BlockTable, reuse: &Reuse, index: u32, fresh: bool) -> Use {
    let block = table.get(index);
    let queue = match block.is_short() {
        true => SHORT,
        false => reuse.queue(block.request(), || table.branches(index)),
    };
    Use { queue, fresh, key: short_key(block.namespace, &block.key) }
}

/// Tokens of context at which computing a token takes twice as long as at the start of a prompt.
const CONTEXT_TOKENS: f32 = 30_500.0;

impl Outlook for View<'_> {
    fn about(&self, block: u32) -> About {
        let found = self.table.get(block);
        let before = found.position as f32 * found.tokens as f32;
        let weight = if self.weigh_cost { 1.0 + before / CONTEXT_TOKENS } else { 1.0 };
        About { tick: found.used_tick(), used_at: found.used_step(), weight }
    }

    fn score(&self, queue: u8, about: &About) -> f32 {
        let age = self.now.saturating_sub(about.used_at);
        match self.reuse.has_learned() {
            true => self.reuse.score(queue, age) * about.weight,
            false => self.reuse.score_of_hints(queue, age),
        }
    }

    fn child(&self, block: u32) -> Option<u32> {
        self.table.child(block, |child| match self.home {
            Home::Host => {
                let here = matches!(
                    child.host,
                    HostCopy::Filling { doomed: false, .. } | HostCopy::Resident { .. }
                );
                here && (self.unwritten_hold || !child.is_unwritten())
            }
            Home::Device(home) => match child.device {
                DeviceCopy::Filling { gpu, .. } | DeviceCopy::Resident { gpu, .. } => gpu == home,
                DeviceCopy::Absent | DeviceCopy::Draining { .. } => false,
            },
        })
    }

    fn key(&self, block: u32) -> u64 {
        let found = self.table.get(block);
        short_key(found.namespace, &found.key)
    }
}

/// The slots and their order.
pub(crate) struct SlotTier {
    pub(crate) slots: Slots,
    /// One per size class.
    policies: Vec<Box<dyn Policy>>,
    policy: PolicyChoice,
}

impl SlotTier {
    pub(crate) fn new(bytes: u64, slab_bytes: u32, policy: PolicyChoice) -> SlotTier {
        SlotTier { slots: Slots::new(bytes, slab_bytes), policies: Vec::new(), policy }
    }

    pub(crate) fn class_of(&mut self, bytes: u32) -> Option<ClassId> {
        let class = self.slots.class_of(bytes)?;
        while self.policies.len() <= class {
            self.policies.push(self.policy.make());
        }
        Some(class)
    }

    fn policy_of(&mut self, bytes: u32) -> Option<&mut Box<dyn Policy>> {
        let class = self.class_of(bytes)?;
        self.policies.get_mut(class)
    }

    /// A free slot for the block, which is the warmest of its class then; or which goes behind
    /// `before`, if that is there.
    pub(crate) fn allocate(
        &mut self,
        class: ClassId,
        index: u32,
        before: u32,
        how: Use,
    ) -> Option<Allocated> {
        let new = self.slots.allocate(class, index)?;
        self.policies.get_mut(class)?.insert_behind(before, index, how);
        Some(new)
    }

    /// The block has a slot that it was not allocated here.
    pub(crate) fn insert(&mut self, index: u32, bytes: u32, how: Use) {
        if let Some(policy) = self.policy_of(bytes) {
            policy.insert(index, how);
        }
    }

    /// The block was used at `tick`.
    pub(crate) fn touch(&mut self, index: u32, bytes: u32, slot: SlotId, tick: u64, how: Use) {
        self.slots.touch(slot, tick);
        if let Some(policy) = self.policy_of(bytes) {
            policy.touch(index, how);
        }
    }

    /// The block's copy is not to be used any more; its slot may still be.
    pub(crate) fn remove(&mut self, index: u32, bytes: u32) {
        if let Some(policy) = self.policy_of(bytes) {
            policy.remove(index);
        }
    }

    /// The block that leaves next.
    pub(crate) fn victim(
        &mut self,
        class: ClassId,
        outlook: &View<'_>,
        mut leave: impl FnMut(u32) -> Leave,
    ) -> Option<u32> {
        let policy = self.policies.get_mut(class)?;
        let mut all_pinned = 0;
        for _ in 0..SEARCHES_MAX {
            let (mut pinned, mut others) = (Vec::new(), 0);
            let victim = policy.victim(outlook, &mut |index| match leave(index) {
                Leave::Pinned => {
                    pinned.push(index);
                    false
                }
                other => {
                    others += 1;
                    other == Leave::Yes
                }
            });
            // What is pinned is in use: it must not be in the way of the next search.
            for index in &pinned {
                policy.touch(*index, outlook.how(*index));
            }
            all_pinned += pinned.len();
            // Those that were in the way are met again, the pinned ones are not: once there are as
            // many of both as copies, all were seen.
            let all_seen = all_pinned + others >= policy.len();
            if victim.is_some() || pinned.is_empty() || all_seen {
                return victim;
            }
        }
        None
    }

    /// Whether any order holds the block.
    #[cfg(test)]
    pub(crate) fn listed(&self, index: u32) -> bool {
        self.policies.iter().any(|policy| policy.contains(index))
    }
}
