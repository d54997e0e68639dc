//! The block table: every block that has a copy somewhere, by key, as a prefix tree.
//!
//! Invariants: a block is in the map as long as it has a copy or children; a block without a copy
//! (a ghost) stands in for a parent that is gone, so that its children are found again when it
//! is stored again; `orphan` says that some ancestor is a ghost, so that no lookup reaches the
//! block.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher};

use twox_hash::XxHash3_64;

use super::request::{GpuId, Timestamp};
use super::slots::SlotId;
use crate::block::{BlockKey, Codec, NamespaceId, Sum128};

/// No block.
pub(crate) const NIL: u32 = u32::MAX;

/// Where the bytes of a host slot that is being filled come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FillSource {
    /// A client's store.
    Client,
    /// The block's copy in GPU memory.
    Device,
    /// The block's copy on nvme.
    Nvme,
}

/// The copy of a block in the memory of a GPU. A block has one on one GPU at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeviceCopy {
    /// None.
    Absent,
    /// A slot that is being filled; `doomed`: it is to be freed when that ends.
    Filling { gpu: GpuId, slot: SlotId, doomed: bool },
    /// There. `users` operations read the slot now.
    Resident { gpu: GpuId, slot: SlotId, users: u32 },
    /// Not to be used any more; freed when the last user is done.
    Draining { gpu: GpuId, slot: SlotId, users: u32 },
}

/// The copy of a block in host RAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostCopy {
    /// None.
    Absent,
    /// A slot that is being filled; `doomed`: it is to be freed when that ends.
    Filling { slot: SlotId, source: FillSource, doomed: bool },
    /// Verified bytes when they were published. `users` operations read the slot now.
    Resident { slot: SlotId, users: u32 },
    /// Not to be used any more; freed when the last user is done.
    Draining { slot: SlotId, users: u32 },
}

/// The copy of a block on nvme.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NvmeCopy {
    /// None.
    Absent,
    /// Being encoded or written; `doomed`: it is void when that ends.
    Writing { doomed: bool },
    /// There.
    Resident(Location),
}

/// Where a copy lies on nvme.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub(crate) segment: u32,
    pub(crate) index: u32,
    pub(crate) offset: u32,
    pub(crate) stored_bytes: u32,
    pub(crate) codec: Codec,
    pub(crate) stored_sum: Sum128,
}

/// One block.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) namespace: NamespaceId,
    pub(crate) key: BlockKey,
    pub(crate) generation: u32,
    /// Distinguishes the lives of this table entry.
    pub(crate) life: u32,
    pub(crate) parent: u32,
    first_child: u32,
    next_sibling: u32,
    prev_sibling: u32,
    pub(crate) position: u32,
    pub(crate) tokens: u32,
    pub(crate) raw_bytes: u32,
    pub(crate) raw_sum: Sum128,
    pub(crate) device: DeviceCopy,
    pub(crate) host: HostCopy,
    pub(crate) nvme: NvmeCopy,
    pub(crate) pins: u32,
    pub(crate) hits: u32,
    /// Hits when it was last written to nvme.
    pub(crate) hits_written: u32,
    pub(crate) used_at: Timestamp,
    pub(crate) used_tick: u64,
    pub(crate) created_s: u64,
    pub(crate) conversation: u64,
    pub(crate) sequence: u64,
    pub(crate) orphan: bool,
    /// Waits in one of the fetch queues.
    pub(crate) queued: bool,
    /// Is read back so that its segment can be reclaimed.
    pub(crate) reinsert: bool,
}

impl Block {
    pub(crate) fn is_filling(&self) -> bool {
        matches!(self.host, HostCopy::Filling { .. })
            || matches!(self.device, DeviceCopy::Filling { .. })
    }

    pub(crate) fn is_ghost(&self) -> bool {
        self.device == DeviceCopy::Absent
            && self.host == HostCopy::Absent
            && self.nvme == NvmeCopy::Absent
    }

    /// The GPU that holds a copy, and where.
    pub(crate) fn device_slot(&self) -> Option<(GpuId, SlotId)> {
        match self.device {
            DeviceCopy::Resident { gpu, slot, .. } => Some((gpu, slot)),
            _ => None,
        }
    }

    pub(crate) fn host_slot(&self) -> Option<SlotId> {
        match self.host {
            HostCopy::Resident { slot, .. } => Some(slot),
            _ => None,
        }
    }

    pub(crate) fn location(&self) -> Option<Location> {
        match self.nvme {
            NvmeCopy::Resident(location) => Some(location),
            _ => None,
        }
    }
}

/// A block in one life of its table entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct BlockRef {
    pub(crate) index: u32,
    pub(crate) life: u32,
}

/// What a new block is made of.
pub(crate) struct NewBlock {
    pub(crate) namespace: NamespaceId,
    pub(crate) generation: u32,
    pub(crate) key: BlockKey,
    pub(crate) parent: BlockKey,
    pub(crate) position: u32,
    pub(crate) tokens: u32,
    pub(crate) raw_bytes: u32,
}

#[derive(Clone, Copy)]
struct SeededHash(u64);

struct KeyHasher(u64);

impl BuildHasher for SeededHash {
    type Hasher = KeyHasher;

    fn build_hasher(&self) -> KeyHasher {
        KeyHasher(self.0)
    }
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = XxHash3_64::oneshot_with_seed(self.0, bytes);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// All blocks.
pub(crate) struct BlockTable {
    blocks: Vec<Block>,
    free: Vec<u32>,
    map: HashMap<(NamespaceId, BlockKey), u32, SeededHash>,
    /// Blocks that became ghosts, oldest first; some may be ghosts no more.
    ghosts: VecDeque<BlockRef>,
}

impl BlockTable {
    pub(crate) fn new(hash_seed: u64) -> BlockTable {
        BlockTable {
            blocks: Vec::new(),
            free: Vec::new(),
            map: HashMap::with_hasher(SeededHash(hash_seed)),
            ghosts: VecDeque::new(),
        }
    }

    /// Entries in use, ghosts included.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Entries ever used: indexes are below this.
    pub(crate) fn index_end(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Key and namespace together decide, so that a key of another namespace is as absent as any.
    pub(crate) fn find(&self, namespace: NamespaceId, key: &BlockKey) -> Option<u32> {
        self.map.get(&(namespace, *key)).copied()
    }

    pub(crate) fn get(&self, index: u32) -> &Block {
        self.blocks.get(index as usize).expect("block numbers come from the table")
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut Block {
        self.blocks.get_mut(index as usize).expect("block numbers come from the table")
    }

    /// The entry, if it is in use.
    pub(crate) fn live(&self, index: u32) -> Option<&Block> {
        let block = self.blocks.get(index as usize)?;
        (self.map.get(&(block.namespace, block.key)) == Some(&index)).then_some(block)
    }

    pub(crate) fn reference(&self, index: u32) -> BlockRef {
        BlockRef { index, life: self.get(index).life }
    }

    /// The entry, if it is still the block that was meant.
    pub(crate) fn resolve(&self, block: BlockRef) -> Option<u32> {
        let found = self.live(block.index)?;
        (found.life == block.life).then_some(block.index)
    }

    /// The entry of a key, made when there is none, with its parent (a ghost when unknown).
    pub(crate) fn find_or_insert(&mut self, new: &NewBlock) -> u32 {
        if let Some(index) = self.find(new.namespace, &new.key) {
            return index;
        }
        let parent = self.parent_of(new);
        let index = self.entry(new);
        self.adopt(parent, index);
        index
    }

    fn parent_of(&mut self, new: &NewBlock) -> u32 {
        if new.parent == BlockKey::ROOT || new.parent == new.key {
            return NIL;
        }
        if let Some(parent) = self.find(new.namespace, &new.parent) {
            return parent;
        }
        let ghost = NewBlock {
            namespace: new.namespace,
            generation: new.generation,
            key: new.parent,
            parent: BlockKey::ROOT,
            position: new.position.saturating_sub(1),
            tokens: new.tokens,
            raw_bytes: new.raw_bytes,
        };
        let index = self.entry(&ghost);
        self.note_ghost(index);
        index
    }

    fn entry(&mut self, new: &NewBlock) -> u32 {
        let mut block = Block {
            namespace: new.namespace,
            key: new.key,
            generation: new.generation,
            life: 0,
            parent: NIL,
            first_child: NIL,
            next_sibling: NIL,
            prev_sibling: NIL,
            position: new.position,
            tokens: new.tokens,
            raw_bytes: new.raw_bytes,
            raw_sum: Sum128::default(),
            device: DeviceCopy::Absent,
            host: HostCopy::Absent,
            nvme: NvmeCopy::Absent,
            pins: 0,
            hits: 0,
            hits_written: 0,
            used_at: Timestamp(0),
            used_tick: 0,
            created_s: 0,
            conversation: 0,
            sequence: 0,
            orphan: false,
            queued: false,
            reinsert: false,
        };
        let index = match self.free.pop() {
            Some(index) => {
                block.life = self.get(index).life.wrapping_add(1);
                *self.get_mut(index) = block;
                index
            }
            None => {
                let index = self.index_end();
                assert_ne!(index, NIL, "the table holds fewer than 2^32 blocks");
                self.blocks.push(block);
                index
            }
        };
        self.map.insert((new.namespace, new.key), index);
        index
    }

    /// Hangs an entry that has no parent yet under one. A chain that would become a ring stays
    /// apart.
    pub(crate) fn adopt(&mut self, parent: u32, index: u32) {
        let ring = || self.has_children(index) && self.ancestors(parent).any(|at| at == index);
        if parent == NIL || ring() {
            return;
        }
        let sibling = self.get(parent).first_child;
        let orphan = self.get(parent).is_ghost() || self.get(parent).orphan;
        let block = self.get_mut(index);
        block.parent = parent;
        block.next_sibling = sibling;
        block.prev_sibling = NIL;
        block.orphan = orphan;
        if sibling != NIL {
            self.get_mut(sibling).prev_sibling = index;
        }
        self.get_mut(parent).first_child = index;
    }

    /// Gives a former ghost the parent that its new store names.
    pub(crate) fn learn_parent(&mut self, index: u32, new: &NewBlock) {
        if self.get(index).parent == NIL && new.parent != BlockKey::ROOT {
            let parent = self.parent_of(new);
            self.adopt(parent, index);
        }
    }

    /// The block itself, then its parents up to the root.
    pub(crate) fn ancestors(&self, index: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((index != NIL).then_some(index), |at| {
            let parent = self.get(*at).parent;
            (parent != NIL).then_some(parent)
        })
    }

    pub(crate) fn has_children(&self, index: u32) -> bool {
        self.get(index).first_child != NIL
    }

    fn children(&self, index: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.get(index).first_child;
        std::iter::successors((first != NIL).then_some(first), |at| {
            let next = self.get(*at).next_sibling;
            (next != NIL).then_some(next)
        })
    }

    /// The blocks and all that follow them, each once, parents before children within a chain.
    pub(crate) fn subtrees(&self, roots: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut seen = HashSet::new();
        let mut all: Vec<u32> = roots.filter(|root| seen.insert(*root)).collect();
        let mut at = 0;
        while let Some(next) = all.get(at).copied() {
            all.extend(self.children(next).filter(|child| seen.insert(*child)));
            at += 1;
        }
        all
    }

    /// Sets or clears `orphan` below a block, as far as it changes; calls back for each change.
    /// Below a ghost nothing is cleared.
    pub(crate) fn mark_below(&mut self, index: u32, orphan: bool, mut changed: impl FnMut(&Block)) {
        let mut todo: Vec<u32> = self.children(index).collect();
        while let Some(at) = todo.pop() {
            if self.get(at).orphan == orphan {
                continue;
            }
            self.get_mut(at).orphan = orphan;
            changed(self.get(at));
            if orphan || !self.get(at).is_ghost() {
                todo.extend(self.children(at));
            }
        }
    }

    /// Removes a ghost without children, and then its parents for as long as they are the same.
    pub(crate) fn remove_bare(&mut self, index: u32) {
        let mut at = index;
        while at != NIL {
            // Whoever gave up the last copy may have removed the entry already.
            let Some(block) = self.live(at) else {
                break;
            };
            if !block.is_ghost() || block.first_child != NIL || block.pins > 0 || block.queued {
                break;
            }
            let parent = block.parent;
            self.unlink(at);
            let block = self.get(at);
            let key = (block.namespace, block.key);
            self.map.remove(&key);
            self.free.push(at);
            at = parent;
        }
    }

    fn unlink(&mut self, index: u32) {
        let Block { parent, next_sibling, prev_sibling, .. } = *self.get(index);
        if parent == NIL {
            return;
        }
        match prev_sibling {
            NIL => self.get_mut(parent).first_child = next_sibling,
            prev => self.get_mut(prev).next_sibling = next_sibling,
        }
        if next_sibling != NIL {
            self.get_mut(next_sibling).prev_sibling = prev_sibling;
        }
        let block = self.get_mut(index);
        (block.parent, block.next_sibling, block.prev_sibling) = (NIL, NIL, NIL);
    }

    pub(crate) fn note_ghost(&mut self, index: u32) {
        let ghost = self.reference(index);
        self.ghosts.push_back(ghost);
    }

    /// The oldest ghost, when there are more noted ghosts than half of all entries (and 1,024).
    pub(crate) fn surplus_ghost(&mut self) -> Option<u32> {
        while self.ghosts.len() > 1024.max(self.map.len() / 2) {
            let ghost = self.ghosts.pop_front()?;
            if let Some(index) = self.resolve(ghost)
                && self.get(index).is_ghost()
            {
                return Some(index);
            }
        }
        None
    }
}
