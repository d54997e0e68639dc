//! Tiers that hold tags in place of bytes, and complain about every wrong use of a place.
//!
//! A place is used from the action that names it to the completion of that action. Nothing here
//! knows how the catalog works: only what actions mean.

use std::collections::BTreeMap;

use super::scenario::{Id, decoded, sum_of};
use crate::block::{Codec, Descriptor, NamespaceId, Sum128, page_ceil};
use crate::catalog::{GpuId, SlotId, SlotPlace};
use crate::segment::StoreGeometry;

/// What is wrong.
pub(super) type Complaint = String;

/// What a slot of host RAM has in the table that a next daemon reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Entry {
    /// The block's descriptor: a next daemon takes it over.
    Whole,
    /// The block's descriptor, for those who read the slot already and for nobody else.
    Disowned,
    /// Nothing.
    Void,
}

/// How a block is disowned. All but the first are bugs, which tests plant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Disowning {
    /// By a mark in its descriptor.
    #[default]
    Marks,
    /// Its descriptor goes.
    #[cfg(test)]
    Voids,
    /// Not at all.
    #[cfg(test)]
    Skips,
    /// Not if its slot is still being filled.
    #[cfg(test)]
    SkipsFills,
}

/// A block in a slot.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) block: Id,
    /// What the bytes are now; `descriptor` says what they should be.
    pub(super) tag: u64,
    pub(super) descriptor: Descriptor,
    pub(super) entry: Entry,
    /// It was forgotten or reported bad while it was here.
    pub(super) forgotten: bool,
    /// The catalog gave it up: the slot is only still read, or its fill's end is still to be told.
    pub(super) disowned: bool,
}

impl Held {
    /// A block that was just copied here, and its descriptor.
    pub(super) fn new(block: Id, tag: u64, descriptor: Descriptor, forgotten: bool) -> Held {
        Held { block, tag, descriptor, entry: Entry::Whole, forgotten, disowned: false }
    }

    /// `filled`: while its slot was still being filled.
    fn disown(&mut self, disowning: Disowning, filled: bool) {
        self.disowned = true;
        match (disowning, filled) {
            #[cfg(test)]
            (Disowning::Voids, false) => self.entry = Entry::Void,
            #[cfg(test)]
            (Disowning::Skips, _) | (Disowning::SkipsFills, true) => {}
            #[cfg(test)]
            (Disowning::Voids, true) | (Disowning::SkipsFills, false) => {
                self.entry = Entry::Disowned;
            }
            (Disowning::Marks, _) => self.entry = Entry::Disowned,
        }
    }

    /// Whether it has the descriptor of this block, as everybody compares it who copies from a
    /// slot of host RAM.
    fn is_described_as(&self, block: Id, sum: Option<Sum128>) -> bool {
        let Descriptor { namespace, key, raw_sum, .. } = &self.descriptor;
        self.entry != Entry::Void
            && Id::of(*namespace, key) == Some(block)
            && sum.is_none_or(|sum| sum == *raw_sum)
    }
}

/// A slot of host RAM or of a pool.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    pub(super) held: Option<Held>,
    pub(super) filling: bool,
    /// The catalog gave up what it is filled with.
    pub(super) disowned: bool,
    pub(super) readers: u32,
}

impl Slot {
    pub(super) fn in_use(&self) -> bool {
        self.held.is_some() || self.filling || self.disowned || self.readers > 0
    }
}

/// A payload on nvme, with its descriptor.
#[derive(Clone, Debug)]
pub(super) struct Payload {
    pub(super) block: Id,
    pub(super) index: u32,
    /// What the stored bytes are now.
    pub(super) tag: u64,
    pub(super) descriptor: Descriptor,
    /// The descriptor is on the device, not only in the memory of its writer.
    pub(super) committed: bool,
    pub(super) forgotten: bool,
}

/// A segment.
#[derive(Clone, Debug, Default)]
pub(super) struct FakeSegment {
    /// The life that the catalog has begun last.
    pub(super) sequence: u64,
    /// The life that the header on the device names; 0: none.
    pub(super) header: u64,
    /// By life and offset.
    pub(super) payloads: BTreeMap<(u64, u32), Payload>,
    /// Places that this life's writes were given: offset and end.
    given: BTreeMap<u32, u32>,
    indices: Vec<u32>,
    sealed: bool,
    pub(super) readers: u32,
    pub(super) writers: u32,
}

impl FakeSegment {
    /// A daemon ended: whatever used the segment is gone.
    pub(super) fn settle(&mut self) {
        (self.sequence, self.sealed) = (self.header, true);
        (self.readers, self.writers) = (0, 0);
        self.given.clear();
        self.indices.clear();
    }
}

/// All places.
#[derive(Debug, Default)]
pub(super) struct Media {
    pub(super) host: BTreeMap<SlotId, Slot>,
    pub(super) device: BTreeMap<(GpuId, SlotId), Slot>,
    /// How slabs are cut.
    pub(super) slabs: BTreeMap<u32, u32>,
    pub(super) slab_bytes: u32,
    pub(super) segments: BTreeMap<u32, FakeSegment>,
    /// Results of encoding that wait to be written: what the bytes are, by number of the operation.
    pub(super) encoded: BTreeMap<u64, u64>,
    pub(super) disowning: Disowning,
}

impl Media {
    pub(super) fn slot(&mut self, place: SlotPlace) -> &mut Slot {
        match place {
            SlotPlace::Host(slot) => self.host.entry(slot).or_default(),
            SlotPlace::Device(gpu, slot) => self.device.entry((gpu, slot)).or_default(),
        }
    }

    /// A slab is cut anew.
    pub(super) fn bind(&mut self, slab: u32, slot_bytes: u32) -> Result<(), Complaint> {
        self.slabs.insert(slab, slot_bytes);
        let bytes = u64::from(self.slab_bytes);
        let inside = |slot: &SlotId| slot.offset() / bytes == u64::from(slab);
        match self.host.iter().find(|(slot, state)| inside(slot) && state.in_use()) {
            Some((slot, state)) => {
                Err(format!("slab {slab} is cut anew while {slot:?} of it is in use: {state:?}"))
            }
            None => Ok(()),
        }
    }

    /// A fill of a slot begins.
    pub(super) fn begin_fill(&mut self, place: SlotPlace, bytes: u32) -> Result<(), Complaint> {
        if let SlotPlace::Host(slot) = place {
            self.check_cut(slot, bytes)?;
        }
        let is_device = matches!(place, SlotPlace::Device(..));
        let slot = self.slot(place);
        // A pool's slots are not cleared when they become free.
        if is_device {
            slot.held = None;
        }
        if slot.in_use() {
            return Err(format!("{place:?} is filled while it is in use: {slot:?}"));
        }
        slot.filling = true;
        Ok(())
    }

    fn check_cut(&self, slot: SlotId, bytes: u32) -> Result<(), Complaint> {
        let slab_bytes = u64::from(self.slab_bytes);
        let slab = u32::try_from(slot.offset() / slab_bytes).unwrap_or(u32::MAX);
        let Some(cut) = self.slabs.get(&slab).copied() else {
            return Err(format!("{slot:?} lies in slab {slab}, which was never cut"));
        };
        let within = slot.offset() % slab_bytes;
        let fits = within.is_multiple_of(cut.into()) && within + u64::from(cut) <= slab_bytes;
        if !fits || bytes > cut {
            return Err(format!("{bytes} bytes at {slot:?} of a slab cut into {cut}"));
        }
        Ok(())
    }

    /// A fill ended; `held`: what is there now.
    pub(super) fn end_fill(&mut self, place: SlotPlace, held: Option<Held>) {
        let disowning = self.disowning;
        let slot = self.slot(place);
        slot.filling = false;
        slot.held = held;
        if let Some(held) = slot.held.as_mut().filter(|_| slot.disowned) {
            held.disown(disowning, true);
        }
    }

    /// Somebody begins to read a slot, which must hold this block.
    pub(super) fn begin_read(&mut self, place: SlotPlace, block: Id) -> Result<(), Complaint> {
        let slot = self.slot(place);
        slot.readers += 1;
        match &slot.held {
            Some(held) if held.block == block && !slot.filling => Ok(()),
            _ => Err(format!("{block:?} is read from {place:?}, which is {slot:?}")),
        }
    }

    /// Somebody is done reading a slot. What it holds.
    pub(super) fn end_read(&mut self, place: SlotPlace) -> Option<Held> {
        let slot = self.slot(place);
        slot.readers = slot.readers.saturating_sub(1);
        slot.held.clone()
    }

    /// A slot of host RAM is free.
    pub(super) fn clear(&mut self, slot: SlotId) -> Result<(), Complaint> {
        let state = self.host.entry(slot).or_default();
        (state.held, state.disowned) = (None, false);
        if state.in_use() {
            return Err(format!("{slot:?} is given back while it is in use: {state:?}"));
        }
        Ok(())
    }

    /// The block in a slot of host RAM is given up, and the slot is still read or filled.
    pub(super) fn disown(&mut self, slot: SlotId) -> Result<(), Complaint> {
        let disowning = self.disowning;
        let state = self.host.entry(slot).or_default();
        if state.filling && !state.disowned {
            state.disowned = true;
            return Ok(());
        }
        let Some(held) = state.held.as_mut().filter(|held| !held.disowned) else {
            return Err(format!("{slot:?} is disowned and has no block that is owned: {state:?}"));
        };
        held.disown(disowning, false);
        Ok(())
    }

    /// An operation copies from a slot, which must have the descriptor of the block that the
    /// operation was begun for. Pools of GPUs have none.
    pub(super) fn check_slot(
        &self,
        place: SlotPlace,
        block: Id,
        sum: Option<Sum128>,
    ) -> Result<(), Complaint> {
        let SlotPlace::Host(slot) = place else { return Ok(()) };
        let state = self.host.get(&slot);
        let held = state.and_then(|state| state.held.as_ref());
        if held.is_some_and(|held| held.is_described_as(block, sum)) {
            return Ok(());
        }
        Err(format!("{slot:?} is read for {block:?}, and lacks its descriptor: {state:?}"))
    }

    pub(super) fn segment(&mut self, segment: u32) -> &mut FakeSegment {
        self.segments.entry(segment).or_default()
    }

    /// A segment begins a new life, or (0) ends the last one.
    pub(super) fn begin_life(&mut self, segment: u32, sequence: u64) -> Result<(), Complaint> {
        let newest = self.segments.values().map(|found| found.sequence).max().unwrap_or(0);
        let found = self.segment(segment);
        if found.readers > 0 || found.writers > 0 {
            return Err(format!("segment {segment} is emptied while it is in use: {found:?}"));
        }
        if sequence > 0 && sequence <= newest {
            return Err(format!("segment {segment} begins life {sequence} after {newest}"));
        }
        (found.sequence, found.sealed) = (sequence.max(found.sequence), sequence == 0);
        found.given.clear();
        found.indices.clear();
        Ok(())
    }

    pub(super) fn seal(&mut self, segment: u32) {
        self.segment(segment).sealed = true;
        self.commit(segment, false);
    }

    /// Descriptors are written: all of them in a sealed segment without writes, or if `early`.
    pub(super) fn commit(&mut self, segment: u32, early: bool) {
        let found = self.segment(segment);
        if early || (found.sealed && found.writers == 0) {
            found.payloads.values_mut().for_each(|payload| payload.committed = true);
        }
    }

    /// A write of a payload ended; `written`: it is there.
    pub(super) fn end_write(&mut self, to: &Descriptor, written: Option<Payload>) {
        let found = self.segment(to.segment);
        found.writers = found.writers.saturating_sub(1);
        if let Some(payload) = written {
            found.payloads.insert((to.segment_sequence, to.offset), payload);
        }
        self.commit(to.segment, false);
    }

    /// A header was written: earlier lives are over. 0: the last one is too.
    pub(super) fn write_header(&mut self, segment: u32, sequence: u64) {
        let found = self.segment(segment);
        found.header = sequence;
        found.payloads.retain(|(life, _), _| *life == sequence);
    }

    /// A descriptor was erased.
    pub(super) fn erase(&mut self, segment: u32, sequence: u64, index: u32) {
        let found = self.segment(segment);
        let there = |life: u64, payload: &Payload| life == sequence && payload.index == index;
        found.payloads.retain(|(life, _), payload| !there(*life, payload));
    }

    /// A write of a payload begins.
    pub(super) fn begin_write(
        &mut self,
        geometry: &StoreGeometry,
        index: u32,
        to: &Descriptor,
    ) -> Result<(), Complaint> {
        let found = self.segments.entry(to.segment).or_default();
        found.writers += 1;
        let end = u64::from(to.offset) + page_ceil(to.stored_bytes.into());
        let inside = to.offset >= geometry.payload_start()
            && end <= u64::from(geometry.segment_bytes)
            && index < geometry.descriptors_per_segment();
        let before = found.given.range(..u32::try_from(end).unwrap_or(u32::MAX)).next_back();
        let overlaps = before.is_some_and(|(_, before_end)| *before_end > to.offset);
        let alive = found.sequence == to.segment_sequence && !found.sealed;
        if !inside || overlaps || !alive || found.indices.contains(&index) {
            return Err(format!("descriptor {index} may not be written there: {to:?} {found:?}"));
        }
        found.given.insert(to.offset, u32::try_from(end).unwrap_or(u32::MAX));
        found.indices.push(index);
        Ok(())
    }

    /// A read of a payload begins, which must be that of the descriptor.
    pub(super) fn begin_load(&mut self, from: &Descriptor, block: Id) -> Result<(), Complaint> {
        let found = self.segment(from.segment);
        found.readers += 1;
        let there = found.payloads.get(&(from.segment_sequence, from.offset));
        let same = |payload: &Payload| {
            payload.block == block
                && payload.descriptor.stored_sum == from.stored_sum
                && payload.descriptor.raw_sum == from.raw_sum
                && payload.descriptor.codec == from.codec
        };
        if found.sequence != from.segment_sequence || !there.is_some_and(same) {
            return Err(format!("{block:?} is not at {from:?}: {there:?}"));
        }
        Ok(())
    }

    /// What a descriptor's place holds: the block's own bytes, if they match their checksum.
    pub(super) fn load(&self, from: &Descriptor) -> Option<u64> {
        let segment = self.segments.get(&from.segment)?;
        let payload = segment.payloads.get(&(from.segment_sequence, from.offset))?;
        if sum_of(payload.tag) != from.stored_sum {
            return None;
        }
        let raw = match from.codec {
            Codec::Raw => Some(payload.tag),
            Codec::Lz4 => decoded(payload.tag, &from.raw_sum),
        };
        raw.filter(|raw| sum_of(*raw) == from.raw_sum)
    }

    /// The blocks that were chosen are forgotten: in host RAM, and those on nvme that are `known`.
    pub(super) fn mark_forgotten(
        &mut self,
        chosen: impl Fn(Id, &Descriptor) -> bool,
        known: impl Fn(&Payload) -> bool,
    ) {
        for held in self.host.values_mut().filter_map(|slot| slot.held.as_mut()) {
            held.forgotten |= chosen(held.block, &held.descriptor);
        }
        let segments = self.segments.values_mut();
        for payload in segments.flat_map(|segment| segment.payloads.values_mut()) {
            let hit = chosen(payload.block, &payload.descriptor);
            payload.forgotten |= hit && known(payload);
        }
    }

    /// Whether a slot of host RAM holds the block for anybody to read.
    pub(super) fn in_host(&self, block: Id) -> bool {
        let mut held = self.host.values().filter_map(|slot| slot.held.as_ref());
        held.any(|held| held.block == block)
    }

    /// The same, and is not being given up.
    pub(super) fn stays_in_host(&self, block: Id) -> bool {
        let mut held = self.host.values().filter_map(|slot| slot.held.as_ref());
        held.any(|held| held.block == block && !held.disowned)
    }

    /// Whether there is a copy of the block, in whatever place.
    pub(super) fn anywhere(&self, block: Id) -> bool {
        let mut held = self.device.values().filter_map(|slot| slot.held.as_ref());
        let lives = self.segments.values();
        let mut payloads = lives.flat_map(|segment| {
            let alive = segment.payloads.iter();
            alive.filter(|((life, _), _)| *life == segment.sequence).map(|(_, payload)| payload)
        });
        self.in_host(block)
            || held.any(|held| held.block == block)
            || payloads.any(|payload| payload.block == block)
    }

    /// Nobody can say any more that forgotten blocks of the namespace stay away.
    pub(super) fn excuse(&mut self, namespace: NamespaceId) {
        let segments = self.segments.values_mut();
        for payload in segments.flat_map(|segment| segment.payloads.values_mut()) {
            payload.forgotten &= payload.block.namespace != namespace;
        }
    }
}
