//! Where a block's bytes go in the host arena: slabs cut into equal slots, by size class.
//!
//! Pure bookkeeping. Invariants: a slab belongs to one class at most; a slot is free or owned by
//! one block; an empty slab belongs to no class. A slot is its block's bytes rounded up to whole
//! pages, so nothing is lost beyond that rounding and the tail of each slab.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::table::BLOCKS_MAX;
use crate::block::{PAGE_BYTES, page_ceil};

/// A slot of the host arena: offset of its first byte divided by 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SlotId(pub u32);

impl SlotId {
    /// Offset in the arena of the slot's first byte.
    pub fn offset(self) -> u64 {
        u64::from(self.0) * PAGE_BYTES
    }
}

/// The index of a size class.
pub(crate) type ClassId = usize;

#[derive(Clone, Default)]
struct Slab {
    class: Option<ClassId>,
    /// Owner of each slot: a block number, or `FREE` with the index of the next free slot.
    owners: Vec<u32>,
    /// The slot that is handed out next, `NONE` when none is free.
    free: u32,
    free_count: u32,
    /// The latest touch of any of its blocks, as counted by the caller.
    used_at: u64,
}

/// Marks a free slot. Block numbers are below it.
const FREE: u32 = BLOCKS_MAX;

/// No slot.
const NONE: u32 = FREE - 1;

/// Block sizes that may be in host RAM at the same time.
const CLASSES_MAX: usize = 32;

struct Class {
    slot_bytes: u32,
    slots_per_slab: u32,
    /// Slabs of this class that have a free slot.
    open: BTreeSet<u32>,
    /// Slabs of this class.
    slabs: u32,
}

/// A slot was handed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Allocated {
    pub(crate) slot: SlotId,
    /// The slab was just given to this class: it must be cut before use.
    pub(crate) bind: Option<(u32, u32)>,
}

/// The allocator of one arena.
pub(crate) struct Slots {
    slab_bytes: u32,
    slabs: Vec<Slab>,
    free_slabs: BTreeSet<u32>,
    classes: Vec<Class>,
    used_bytes: u64,
    used_slots: u64,
}

impl Slots {
    /// An arena of `bytes`, cut into slabs of `slab_bytes` (a multiple of 4 KiB).
    pub(crate) fn new(bytes: u64, slab_bytes: u32) -> Slots {
        let count = u32::try_from(bytes / u64::from(slab_bytes)).unwrap_or(u32::MAX - 1);
        Slots {
            slab_bytes,
            slabs: vec![Slab::default(); count as usize],
            free_slabs: (0..count).collect(),
            classes: Vec::new(),
            used_bytes: 0,
            used_slots: 0,
        }
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.slabs.len() as u64 * u64::from(self.slab_bytes)
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(crate) fn used_slots(&self) -> u64 {
        self.used_slots
    }

    /// Slabs that no class has, and all.
    pub(crate) fn free_slabs(&self) -> (usize, usize) {
        (self.free_slabs.len(), self.slabs.len())
    }

    pub(crate) fn classes(&self) -> usize {
        self.classes.len()
    }

    /// Whether a slab can hold a block of `bytes`.
    pub(crate) fn fits(&self, bytes: u32) -> bool {
        bytes > 0 && page_ceil(u64::from(bytes)) <= u64::from(self.slab_bytes)
    }

    /// The class for blocks of `bytes`. `None` when no slab can hold one, or when blocks of
    /// `CLASSES_MAX` other sizes are held.
    pub(crate) fn class_of(&mut self, bytes: u32) -> Option<ClassId> {
        let slot_bytes = u32::try_from(page_ceil(u64::from(bytes))).ok()?;
        if slot_bytes == 0 || slot_bytes > self.slab_bytes {
            return None;
        }
        if let Some(at) = self.classes.iter().position(|class| class.slot_bytes == slot_bytes) {
            return Some(at);
        }
        let slots_per_slab = self.slab_bytes / slot_bytes;
        let new = Class { slot_bytes, slots_per_slab, open: BTreeSet::new(), slabs: 0 };
        if self.classes.len() < CLASSES_MAX {
            self.classes.push(new);
            return Some(self.classes.len() - 1);
        }
        // A class without slabs has no blocks: it can become another one.
        let unused = self.classes.iter().position(|class| class.slabs == 0)?;
        *self.classes.get_mut(unused)? = new;
        Some(unused)
    }

    #[cfg(test)]
    pub(crate) fn slot_bytes(&self, class: ClassId) -> u32 {
        self.classes.get(class).map_or(0, |class| class.slot_bytes)
    }

    /// Takes a free slot of the class, or a free slab for it. `None`: something must leave first.
    pub(crate) fn allocate(&mut self, class_id: ClassId, owner: u32) -> Option<Allocated> {
        let class = self.classes.get_mut(class_id)?;
        let mut bind = None;
        let slab_id = match class.open.first() {
            Some(slab) => *slab,
            None => {
                let slab_id = self.free_slabs.pop_first()?;
                let slab = self.slabs.get_mut(slab_id as usize)?;
                slab.class = Some(class_id);
                // Each is followed by the next one, the last one by none.
                let next = |index: u32| if index < class.slots_per_slab { index } else { NONE };
                slab.owners = (1..=class.slots_per_slab).map(|at| FREE | next(at)).collect();
                (slab.free, slab.free_count) = (0, class.slots_per_slab);
                class.open.insert(slab_id);
                class.slabs += 1;
                bind = Some((slab_id, class.slot_bytes));
                slab_id
            }
        };
        let slab = self.slabs.get_mut(slab_id as usize)?;
        let index = slab.free;
        let place = slab.owners.get_mut(index as usize).expect("an open slab has a free slot");
        slab.free = std::mem::replace(place, owner) & !FREE;
        slab.free_count -= 1;
        if slab.free_count == 0 {
            class.open.remove(&slab_id);
        }
        self.used_bytes += u64::from(class.slot_bytes);
        self.used_slots += 1;
        let bytes =
            u64::from(slab_id) * u64::from(self.slab_bytes) + u64::from(index * class.slot_bytes);
        let slot = SlotId(u32::try_from(bytes / PAGE_BYTES).expect("arenas are below 16 TiB"));
        Some(Allocated { slot, bind })
    }

    /// Gives a slab that was never used to the class of `slot_bytes`, with these slots in use.
    /// `false` when that is not possible.
    pub(crate) fn adopt(
        &mut self,
        slab_id: u32,
        slot_bytes: u32,
        owners: &[(SlotId, u32)],
    ) -> bool {
        let Some(class_id) = self.class_of(slot_bytes) else { return false };
        if owners.is_empty() {
            return true;
        }
        if !self.free_slabs.remove(&slab_id) {
            return false;
        }
        let class = self.classes.get_mut(class_id).expect("it was just found");
        let slab = self.slabs.get_mut(slab_id as usize).expect("it was free");
        slab.class = Some(class_id);
        slab.owners = vec![FREE | NONE; class.slots_per_slab as usize];
        class.slabs += 1;
        let start = u64::from(slab_id) * u64::from(self.slab_bytes);
        for (slot, owner) in owners {
            let index = (slot.offset() - start) / u64::from(slot_bytes);
            let place = slab.owners.get_mut(index as usize).expect("the slot is in this slab");
            assert!(*place >= FREE, "slot {slot:?} has two owners");
            *place = *owner;
        }
        slab.free = NONE;
        for (index, owner) in slab.owners.iter_mut().enumerate().rev() {
            if *owner >= FREE {
                *owner = FREE | slab.free;
                slab.free = index as u32;
                slab.free_count += 1;
            }
        }
        if slab.free_count > 0 {
            class.open.insert(slab_id);
        }
        self.used_slots += owners.len() as u64;
        self.used_bytes += owners.len() as u64 * u64::from(slot_bytes);
        true
    }

    /// Gives a slot back; an empty slab leaves its class.
    pub(crate) fn release(&mut self, slot: SlotId) {
        let (slab_id, index, class_id) = self.locate(slot).expect("the slot is allocated");
        let class = self.classes.get_mut(class_id).expect("the class exists");
        let slab = self.slabs.get_mut(slab_id as usize).expect("the slab exists");
        let owner = slab.owners.get_mut(index as usize).expect("the slot exists");
        assert!(*owner < FREE, "slot {slot:?} is freed twice");
        *owner = FREE | slab.free;
        slab.free = index;
        slab.free_count += 1;
        self.used_bytes -= u64::from(class.slot_bytes);
        self.used_slots -= 1;
        if slab.free_count as usize == slab.owners.len() {
            class.open.remove(&slab_id);
            class.slabs -= 1;
            *slab = Slab::default();
            self.free_slabs.insert(slab_id);
        } else {
            class.open.insert(slab_id);
        }
    }

    /// Notes that the slot's block was used at `tick` (a counter that only grows).
    pub(crate) fn touch(&mut self, slot: SlotId, tick: u64) {
        if let Some((slab, _, _)) = self.locate(slot)
            && let Some(slab) = self.slabs.get_mut(slab as usize)
        {
            slab.used_at = slab.used_at.max(tick);
        }
    }

    /// The slab of another class that was touched least recently, if that was before `before`, and
    /// the blocks in it. Emptying it makes room for this class.
    pub(crate) fn coldest_other_slab(&self, class: ClassId, before: u64) -> Option<Vec<u32>> {
        self.slabs
            .iter()
            .filter(|slab| slab.class.is_some_and(|other| other != class) && slab.used_at < before)
            .min_by_key(|slab| slab.used_at)
            .map(|slab| slab.owners.iter().copied().filter(|owner| *owner < FREE).collect())
    }

    fn locate(&self, slot: SlotId) -> Option<(u32, u32, ClassId)> {
        let bytes = u64::from(slot.0) * PAGE_BYTES;
        let slab_id = u32::try_from(bytes / u64::from(self.slab_bytes)).ok()?;
        let class_id = self.slabs.get(slab_id as usize)?.class?;
        let slot_bytes = u64::from(self.classes.get(class_id)?.slot_bytes);
        let within = bytes % u64::from(self.slab_bytes);
        Some((slab_id, u32::try_from(within / slot_bytes).ok()?, class_id))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// No two live slots share a byte, nothing lies outside, and all comes back.
        #[test]
        fn slots_never_overlap(
            ops in prop::collection::vec((0u8..3, 0usize..5, 0usize..64), 0..300),
        ) {
            let sizes = [4096u32, 5000, 8192, 65536, 1 << 20];
            let mut slots = Slots::new(8 << 20, 1 << 20);
            let mut live: HashMap<SlotId, u32> = HashMap::new();
            for (op, size, pick) in ops {
                if op < 2 {
                    let class = slots.class_of(sizes[size]).unwrap();
                    if let Some(new) = slots.allocate(class, 7) {
                        let start = u64::from(new.slot.0) * 4096;
                        let end = start + u64::from(slots.slot_bytes(class));
                        prop_assert!(end <= 8 << 20);
                        for (slot, bytes) in &live {
                            let other = u64::from(slot.0) * 4096;
                            prop_assert!(end <= other || other + u64::from(*bytes) <= start);
                        }
                        live.insert(new.slot, slots.slot_bytes(class));
                    } else {
                        prop_assert!(!live.is_empty());
                    }
                } else if !live.is_empty() {
                    let mut ids: Vec<SlotId> = live.keys().copied().collect();
                    ids.sort();
                    let slot = ids[pick % ids.len()];
                    live.remove(&slot);
                    slots.release(slot);
                }
                prop_assert_eq!(slots.used_slots(), live.len() as u64);
            }
            for slot in live.keys() {
                slots.release(*slot);
            }
            prop_assert_eq!(slots.used_bytes(), 0);
            prop_assert_eq!(slots.free_slabs.len(), 8);
        }
    }

    #[test]
    fn a_class_gives_empty_slabs_back() {
        let mut slots = Slots::new(1 << 20, 1 << 20);
        let small = slots.class_of(4096).unwrap();
        let large = slots.class_of(1 << 20).unwrap();
        let first = slots.allocate(small, 1).unwrap();
        assert_eq!(first.bind, Some((0, 4096)));
        assert_eq!(slots.allocate(large, 2), None);
        assert_eq!(slots.coldest_other_slab(large, u64::MAX), Some(vec![1]));
        slots.release(first.slot);
        assert!(slots.allocate(large, 2).is_some());
        assert_eq!(slots.class_of((1 << 20) + 1), None);
    }
}
