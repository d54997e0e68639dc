//! What an earlier daemon left in host RAM, taken over before any event.

use super::Catalog;
use super::request::Tier;
use super::slot_tier::use_of;
use super::slots::SlotId;
use super::table::{HostCopy, NewBlock};
use crate::block::{Codec, Descriptor, page_ceil};

/// Blocks that an earlier daemon left in one slab.
pub struct AdoptedSlab {
    /// Which slab.
    pub slab: u32,
    /// How it is cut.
    pub slot_bytes: u32,
    /// What the slots hold by their descriptors, which were found whole.
    pub blocks: Vec<(SlotId, Descriptor)>,
}

impl Catalog {
    /// Takes over what an earlier daemon left in host RAM. Called after [`Catalog::recover`] and
    /// before any event. Answers the slots that are in use from now on; all others are free.
    ///
    /// A block that is on nvme with the same bytes is clean; every other one is dirty. Left out are
    /// a second copy of a block, one whose copy on nvme has other bytes or is another
    /// conversation's (forgetting the one would leave the other), and what does not fit the way its
    /// slab is cut.
    pub fn adopt(&mut self, slabs: &[AdoptedSlab]) -> Vec<SlotId> {
        let mut adopted = Vec::new();
        for found in slabs {
            if self.host.tier.class_of(found.slot_bytes).is_none() {
                continue;
            }
            let mut owners = Vec::new();
            for (slot, descriptor) in &found.blocks {
                let fits = page_ceil(descriptor.raw_bytes.into()) == u64::from(found.slot_bytes)
                    && descriptor.codec == Codec::Raw;
                if let Some(index) = fits.then(|| self.adopt_block(descriptor)).flatten() {
                    self.table.get_mut(index).host = HostCopy::Resident { slot: *slot, users: 0 };
                    self.charge(index, Tier::Host);
                    owners.push((*slot, index));
                }
            }
            let taken = self.host.tier.slots.adopt(found.slab, found.slot_bytes, &owners);
            assert!(taken, "a slab that was never used can be given to any class");
            adopted.extend(owners);
        }
        // What was stored last is taken for the warmest.
        adopted.sort_unstable_by_key(|(slot, index)| (self.table.get(*index).sequence, *slot));
        for (_, index) in &adopted {
            let how = use_of(&self.table, &self.reuse, *index, true);
            self.host.tier.insert(*index, self.table.get(*index).raw_bytes, how);
            self.touch(*index);
            self.note_copy(*index, Tier::Host, true);
            match self.table.get(*index).spot() {
                Some(_) => self.count_in_host(*index, true),
                None => self.become_dirty(*index),
            }
        }
        adopted.into_iter().map(|(slot, _)| slot).collect()
    }

    /// The entry of a block that is in host RAM from now on.
    fn adopt_block(&mut self, found: &Descriptor) -> Option<u32> {
        let new = NewBlock::of(found);
        let index = self.table.find_or_insert(&new);
        let block = self.table.get(index);
        if !block.is_ghost() {
            let same = block.host == HostCopy::Absent
                && (block.raw_bytes, block.raw_sum) == (found.raw_bytes, found.raw_sum)
                && block.conversation == found.session;
            return same.then_some(index);
        }
        self.learn(index, &new, found);
        if !self.table.get(index).orphan {
            self.mark_below(index, false);
        }
        Some(index)
    }

    /// Writes what a descriptor says of a block that had no copy into its entry.
    pub(super) fn learn(&mut self, index: u32, new: &NewBlock, found: &Descriptor) {
        self.table.learn_parent(index, new);
        let short = self.reuse.note_tokens(new.namespace, new.tokens);
        self.table.get_mut(index).set_short(short);
        let block = self.table.get_mut(index);
        block.raw_bytes = found.raw_bytes;
        block.generation = found.generation;
        block.position = found.position;
        block.tokens = found.tokens;
        block.raw_sum = found.raw_sum;
        block.set_created_s(found.created_s);
        block.conversation = found.session;
        block.sequence = found.sequence;
        self.counters.next_sequence = self.counters.next_sequence.max(found.sequence);
    }
}
