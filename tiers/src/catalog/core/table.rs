//! The block table: every block that has a copy somewhere, by key, as a prefix tree.
//!
//! Invariants: a block is in the map as long as it has a copy or children; a block without a copy
//! (a ghost) stands in for a parent that is gone, so that its children are found again when it
//! is stored again; `orphan` says that some ancestor is a ghost, so that no lookup reaches the
//! block.
//!
//! There may be tens of millions of blocks, so a row has 160 bytes and no allocation of its own,
//! and rows lie in large pieces of memory that never move. What few blocks have lies aside.

use std::collections::{HashMap, HashSet, VecDeque};

use twox_hash::XxHash3_64;

use super::index::KeyIndex;
use super::request::{GpuId, Timestamp};
use super::reuse::RequestId;
use super::slots::SlotId;
use crate::block::{BlockKey, Codec, Descriptor, NamespaceId, Sum128};

/// No block.
pub(crate) const NIL: u32 = u32::MAX;

/// Blocks at most. The numbers above are free for marks.
pub(crate) const BLOCKS_MAX: u32 = 1 << 31;

/// Rows in one piece of memory, 2.5 MiB: growing copies nothing and leaves little idle.
const PIECE_ROWS: usize = 1 << 14;

/// Blocks right behind another one that are looked at for one that is in some tier.
const CHILDREN_LOOKED_AT: usize = 32;

/// Ghosts that are kept however few blocks there are.
pub(crate) const GHOSTS_MIN: usize = 1024;

/// Keys that are searched side by side, so that waits for memory overlap.
pub(crate) const BATCH: usize = 64;

/// Microseconds in one step of the coarse time in a row: 65 ms, so that it lasts nine years.
const USED_STEP_US: u64 = 1 << 16;

/// Bits of the count of uses: enough for nine years of a million a second.
const TICK_BITS: u32 = 48;

const TICK_MASK: u64 = (1 << TICK_BITS) - 1;

/// The coarse time of a row.
pub(crate) fn step_of(now: Timestamp) -> u32 {
    u32::try_from(now.0 / USED_STEP_US).unwrap_or(u32::MAX)
}

/// Operations that may read one copy at the same time, with some room to the type's limit for
/// those that a client does not ask for.
pub(crate) const USERS_MAX: u16 = u16::MAX - 1024;

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
    Resident { gpu: GpuId, slot: SlotId, users: u16 },
    /// Not to be used any more; freed when the last user is done.
    Draining { gpu: GpuId, slot: SlotId, users: u16 },
}

/// The copy of a block in host RAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostCopy {
    /// None.
    Absent,
    /// A slot that is being filled; `doomed`: it is to be freed when that ends.
    Filling { slot: SlotId, source: FillSource, doomed: bool },
    /// Verified bytes when they were published. `users` operations read the slot now.
    Resident { slot: SlotId, users: u16 },
    /// Not to be used any more; freed when the last user is done.
    Draining { slot: SlotId, users: u16 },
}

/// The copy of a block on nvme.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NvmeCopy {
    /// None.
    Absent,
    /// Being encoded or written; `doomed`: it is void when that ends.
    Writing { doomed: bool },
    /// There.
    Resident(Spot),
}

/// Where a copy lies on nvme, as a row knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    pub(crate) segment: u32,
    pub(crate) index: u32,
    pub(crate) offset: u32,
    /// The bytes there are those of the block itself; otherwise what they are lies aside.
    plain: bool,
    /// A lookup found the block since it was written.
    pub(crate) hit: bool,
}

/// What is stored for a block that is not stored as it is.
#[derive(Clone, Copy)]
struct Encoded {
    stored_bytes: u32,
    codec: Codec,
    stored_sum: Sum128,
}

/// Where a copy lies on nvme, and what it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub(crate) segment: u32,
    pub(crate) index: u32,
    pub(crate) offset: u32,
    pub(crate) stored_bytes: u32,
    pub(crate) codec: Codec,
    pub(crate) stored_sum: Sum128,
}

/// One block. What a lookup reads comes first, within 64 bytes.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct Block {
    pub(crate) key: BlockKey,
    pub(crate) namespace: NamespaceId,
    pub(crate) nvme: NvmeCopy,
    pub(crate) host: HostCopy,
    pub(crate) device: DeviceCopy,
    pub(crate) raw_bytes: u32,
    pub(crate) pins: u32,
    /// When it was last used, in steps of `USED_STEP_US`.
    used_at: u32,
    /// Counts uses, in the lower 48 bits; above them the number of the request that used it last.
    used: u64,
    /// Lookups that found it. Counts to 65,535.
    pub(crate) hits: u16,
    pub(crate) orphan: bool,
    marks: u8,
    /// Distinguishes the lives of this row.
    pub(crate) life: u32,
    pub(crate) parent: u32,
    first_child: u32,
    next_sibling: u32,
    prev_sibling: u32,
    pub(crate) generation: u32,
    pub(crate) position: u32,
    pub(crate) tokens: u32,
    created_s: u32,
    pub(crate) conversation: u64,
    pub(crate) sequence: u64,
    pub(crate) raw_sum: Sum128,
}

const _: () = assert!(size_of::<Block>() == 160);

/// The row is in use.
const LIVE: u8 = 1;
/// The block waits in one of the fetch queues.
const QUEUED: u8 = 2;
/// The block is read back so that its segment can be reclaimed.
const REINSERT: u8 = 4;
/// It is in host RAM and was not worth a write to nvme.
const REFUSED: u8 = 8;
/// It has fewer tokens than others: nothing follows it.
const SHORT: u8 = 16;
/// It counts among what was offered to nvme.
const OFFERED: u8 = 32;

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

    pub(crate) fn spot(&self) -> Option<Spot> {
        match self.nvme {
            NvmeCopy::Resident(spot) => Some(spot),
            _ => None,
        }
    }

    /// Whether it waits in one of the fetch queues.
    pub(crate) fn is_queued(&self) -> bool {
        self.marks & QUEUED != 0
    }

    pub(crate) fn set_queued(&mut self, queued: bool) {
        self.mark(QUEUED, queued);
    }

    /// Whether it is read back so that its segment can be reclaimed.
    pub(crate) fn is_reinserted(&self) -> bool {
        self.marks & REINSERT != 0
    }

    pub(crate) fn set_reinserted(&mut self, reinserted: bool) {
        self.mark(REINSERT, reinserted);
    }

    /// Whether it is in host RAM and was not worth a write to nvme.
    pub(crate) fn is_refused(&self) -> bool {
        self.marks & REFUSED != 0
    }

    pub(crate) fn set_refused(&mut self, refused: bool) {
        self.mark(REFUSED, refused);
    }

    /// Whether it has fewer tokens than others of its namespace, so that nothing follows it.
    pub(crate) fn is_short(&self) -> bool {
        self.marks & SHORT != 0
    }

    pub(crate) fn set_short(&mut self, short: bool) {
        self.mark(SHORT, short);
    }

    pub(crate) fn has_children(&self) -> bool {
        self.first_child != NIL
    }

    /// Whether it counts among what was offered to nvme since it was stored or was there.
    pub(crate) fn is_offered(&self) -> bool {
        self.marks & OFFERED != 0
    }

    pub(crate) fn set_offered(&mut self, offered: bool) {
        self.mark(OFFERED, offered);
    }

    fn mark(&mut self, bit: u8, on: bool) {
        self.marks = if on { self.marks | bit } else { self.marks & !bit };
    }

    /// A lookup found it.
    pub(crate) fn count_hit(&mut self) {
        self.hits = self.hits.saturating_add(1);
        if let NvmeCopy::Resident(spot) = &mut self.nvme {
            spot.hit = true;
        }
    }

    /// When it was last used, to 65 ms.
    pub(crate) fn used_at(&self) -> Timestamp {
        Timestamp(u64::from(self.used_at) * USED_STEP_US)
    }

    /// The same in steps of 65 ms.
    pub(crate) fn used_step(&self) -> u32 {
        self.used_at
    }

    /// The number of its last use, among those of all blocks.
    pub(crate) fn used_tick(&self) -> u64 {
        self.used & TICK_MASK
    }

    /// The request that used it last.
    pub(crate) fn request(&self) -> RequestId {
        RequestId((self.used >> TICK_BITS) as u16)
    }

    pub(crate) fn set_request(&mut self, request: RequestId) {
        self.used = self.used_tick() | u64::from(request.0) << TICK_BITS;
    }

    pub(crate) fn use_at(&mut self, now: Timestamp, tick: u64) {
        self.used_at = step_of(now);
        self.used = (self.used & !TICK_MASK) | (tick & TICK_MASK);
    }

    /// Whether it is meant to be written to nvme and is not there.
    pub(crate) fn is_unwritten(&self) -> bool {
        !matches!(self.nvme, NvmeCopy::Resident(_)) && !self.is_refused()
    }

    /// When it was stored, seconds since the Unix epoch.
    pub(crate) fn created_s(&self) -> u64 {
        u64::from(self.created_s)
    }

    /// Kept up to the year 2106.
    pub(crate) fn set_created_s(&mut self, seconds: u64) {
        self.created_s = u32::try_from(seconds).unwrap_or(u32::MAX);
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

impl NewBlock {
    /// The block that a descriptor names.
    pub(crate) fn of(found: &Descriptor) -> NewBlock {
        NewBlock {
            namespace: found.namespace,
            generation: found.generation,
            key: found.key,
            parent: found.parent,
            position: found.position,
            tokens: found.tokens,
            raw_bytes: found.raw_bytes,
        }
    }
}

/// All rows, in pieces.
#[derive(Default)]
struct Rows {
    pieces: Vec<Vec<Block>>,
    count: u32,
}

impl Rows {
    fn get(&self, index: u32) -> Option<&Block> {
        let at = index as usize;
        self.pieces.get(at / PIECE_ROWS)?.get(at % PIECE_ROWS)
    }

    fn get_mut(&mut self, index: u32) -> Option<&mut Block> {
        let at = index as usize;
        self.pieces.get_mut(at / PIECE_ROWS)?.get_mut(at % PIECE_ROWS)
    }

    fn push(&mut self, block: Block) -> u32 {
        assert!(self.count < BLOCKS_MAX, "the table holds {BLOCKS_MAX} blocks at most");
        match self.pieces.last_mut().filter(|piece| piece.len() < PIECE_ROWS) {
            Some(piece) => piece.push(block),
            None => {
                let mut piece = Vec::with_capacity(PIECE_ROWS);
                piece.push(block);
                self.pieces.push(piece);
            }
        }
        self.count += 1;
        self.count - 1
    }
}

/// All blocks.
pub(crate) struct BlockTable {
    rows: Rows,
    free: Vec<u32>,
    index: KeyIndex,
    hash_seed: u64,
    /// Of the blocks on nvme that are not `plain` there.
    encoded: HashMap<u32, Encoded>,
    /// Blocks that became ghosts, oldest first; some may be ghosts no more.
    ghosts: VecDeque<BlockRef>,
    /// How many of them, from the oldest on, are too many.
    ghosts_surplus: usize,
}

impl BlockTable {
    pub(crate) fn new(hash_seed: u64) -> BlockTable {
        BlockTable {
            rows: Rows::default(),
            free: Vec::new(),
            index: KeyIndex::new(),
            hash_seed,
            encoded: HashMap::new(),
            ghosts: VecDeque::new(),
            ghosts_surplus: 0,
        }
    }

    /// Entries in use, ghosts included.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// Entries ever used: indexes are below this.
    pub(crate) fn index_end(&self) -> u32 {
        self.rows.count
    }

    fn hash(&self, namespace: NamespaceId, key: &BlockKey) -> u64 {
        let mut bytes = [0; 36];
        let (left, right) = bytes.split_at_mut(4);
        left.copy_from_slice(&namespace.0.to_le_bytes());
        right.copy_from_slice(&key.0);
        XxHash3_64::oneshot_with_seed(self.hash_seed, &bytes)
    }

    fn find_hashed(&self, hash: u64, namespace: NamespaceId, key: &BlockKey) -> Option<u32> {
        self.index.find(hash, |index| {
            let found = self.get(index);
            found.key == *key && found.namespace == namespace
        })
    }

    /// Key and namespace together decide, so that a key of another namespace is as absent as any.
    pub(crate) fn find(&self, namespace: NamespaceId, key: &BlockKey) -> Option<u32> {
        self.find_hashed(self.hash(namespace, key), namespace, key)
    }

    /// As [`BlockTable::find`] for up to [`BATCH`] keys. In a large table nearly every step is a
    /// wait for memory: each is taken for all keys before the next one, so that they overlap.
    pub(crate) fn find_batch(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> [Option<u32>; BATCH] {
        let mut hashes = [0; BATCH];
        let mut read = 0;
        for (hash, key) in hashes.iter_mut().zip(keys) {
            *hash = self.hash(namespace, key);
        }
        // Apart from the hashing, so that a processor sees many of these reads at a time.
        for hash in hashes.iter().take(keys.len()) {
            read ^= self.index.warm(*hash);
        }
        std::hint::black_box(read);
        let mut likely = [None; BATCH];
        for (likely, hash) in likely.iter_mut().zip(hashes).take(keys.len()) {
            *likely = self.index.find(hash, |_| true);
        }
        for row in likely.iter().flatten().filter_map(|index| self.rows.get(*index)) {
            let both_ends = (row.key == BlockKey::ROOT, row.device == DeviceCopy::Absent);
            read ^= u64::from(both_ends.0 ^ both_ends.1);
        }
        std::hint::black_box(read);
        let mut found = [None; BATCH];
        for ((found, hash), key) in found.iter_mut().zip(hashes).zip(keys) {
            *found = self.find_hashed(hash, namespace, key);
        }
        found
    }

    /// Fetches what a search for each of these keys reads first, all at the same time.
    pub(crate) fn warm<'a>(&self, keys: impl Iterator<Item = (NamespaceId, &'a BlockKey)>) {
        let read = keys.map(|(namespace, key)| self.index.warm(self.hash(namespace, key)));
        std::hint::black_box(read.fold(0, |sum, entry| sum ^ entry));
    }

    pub(crate) fn get(&self, index: u32) -> &Block {
        self.rows.get(index).expect("block numbers come from the table")
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut Block {
        self.rows.get_mut(index).expect("block numbers come from the table")
    }

    /// The entry, if it is in use.
    pub(crate) fn live(&self, index: u32) -> Option<&Block> {
        self.rows.get(index).filter(|block| block.marks & LIVE != 0)
    }

    /// Where the block lies on nvme.
    pub(crate) fn location(&self, index: u32) -> Option<Location> {
        let block = self.get(index);
        let spot = block.spot()?;
        let plain =
            Encoded { stored_bytes: block.raw_bytes, codec: Codec::Raw, stored_sum: block.raw_sum };
        let aside = (!spot.plain).then(|| self.encoded.get(&index)).flatten();
        let Encoded { stored_bytes, codec, stored_sum } = aside.copied().unwrap_or(plain);
        let Spot { segment, index, offset, .. } = spot;
        Some(Location { segment, index, offset, stored_bytes, codec, stored_sum })
    }

    /// The block lies there on nvme from now on.
    pub(crate) fn set_on_nvme(&mut self, index: u32, location: Location) {
        let Location { segment, index: at, offset, stored_bytes, codec, stored_sum } = location;
        let block = self.get_mut(index);
        let plain =
            codec == Codec::Raw && stored_bytes == block.raw_bytes && stored_sum == block.raw_sum;
        let spot = Spot { segment, index: at, offset, plain, hit: false };
        block.nvme = NvmeCopy::Resident(spot);
        block.set_offered(false);
        if plain {
            return;
        }
        self.encoded.insert(index, Encoded { stored_bytes, codec, stored_sum });
    }

    /// The block lies on nvme no more. Returns where it lay.
    pub(crate) fn take_off_nvme(&mut self, index: u32) -> Option<Location> {
        let location = self.location(index)?;
        if self.get(index).spot().is_some_and(|spot| !spot.plain) {
            self.encoded.remove(&index);
        }
        self.get_mut(index).nvme = NvmeCopy::Absent;
        Some(location)
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
        let hash = self.hash(new.namespace, &new.key);
        if let Some(index) = self.find_hashed(hash, new.namespace, &new.key) {
            return index;
        }
        let parent = self.parent_of(new);
        let index = self.entry(new, hash);
        self.adopt(parent, index);
        index
    }

    fn parent_of(&mut self, new: &NewBlock) -> u32 {
        if new.parent == BlockKey::ROOT || new.parent == new.key {
            return NIL;
        }
        let hash = self.hash(new.namespace, &new.parent);
        if let Some(parent) = self.find_hashed(hash, new.namespace, &new.parent) {
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
        let index = self.entry(&ghost, hash);
        self.note_ghost(index);
        index
    }

    fn entry(&mut self, new: &NewBlock, hash: u64) -> u32 {
        let mut block = Block {
            key: new.key,
            namespace: new.namespace,
            nvme: NvmeCopy::Absent,
            host: HostCopy::Absent,
            device: DeviceCopy::Absent,
            raw_bytes: new.raw_bytes,
            pins: 0,
            used_at: 0,
            used: 0,
            hits: 0,
            orphan: false,
            marks: LIVE,
            life: 0,
            parent: NIL,
            first_child: NIL,
            next_sibling: NIL,
            prev_sibling: NIL,
            generation: new.generation,
            position: new.position,
            tokens: new.tokens,
            created_s: 0,
            conversation: 0,
            sequence: 0,
            raw_sum: Sum128::default(),
        };
        let index = match self.free.pop() {
            Some(index) => {
                block.life = self.get(index).life.wrapping_add(1);
                *self.get_mut(index) = block;
                index
            }
            None => self.rows.push(block),
        };
        self.index.insert(hash, index);
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
        self.get(index).has_children()
    }

    fn children(&self, index: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.get(index).first_child;
        std::iter::successors((first != NIL).then_some(first), |at| {
            let next = self.get(*at).next_sibling;
            (next != NIL).then_some(next)
        })
    }

    /// The first of the blocks right behind this one for which `wanted` is true, among a few.
    pub(crate) fn child(&self, index: u32, wanted: impl Fn(&Block) -> bool) -> Option<u32> {
        self.children(index).take(CHILDREN_LOOKED_AT).find(|at| wanted(self.get(*at)))
    }

    /// Whether several paths go on from the block.
    pub(crate) fn branches(&self, index: u32) -> bool {
        self.children(index).nth(1).is_some()
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
    pub(crate) fn mark_below(
        &mut self,
        index: u32,
        orphan: bool,
        mut changed: impl FnMut(&BlockTable, u32),
    ) {
        let mut todo: Vec<u32> = self.children(index).collect();
        while let Some(at) = todo.pop() {
            if self.get(at).orphan == orphan {
                continue;
            }
            self.get_mut(at).orphan = orphan;
            changed(self, at);
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
            if !block.is_ghost() || block.has_children() || block.pins > 0 || block.is_queued() {
                break;
            }
            let parent = block.parent;
            self.unlink(at);
            let block = self.get_mut(at);
            block.mark(LIVE, false);
            let (namespace, key) = (block.namespace, block.key);
            let removed = self.index.remove(self.hash(namespace, &key), at);
            assert!(removed, "block {at} was in use and not in the index");
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

    /// The oldest ghost, when there are more ghosts than half of all entries (and 1,024).
    pub(crate) fn surplus_ghost(&mut self) -> Option<u32> {
        let most = GHOSTS_MIN.max(self.index.len() / 2);
        // Counted exactly only now and then: most of those noted may be ghosts no more. After a
        // restart that is nearly every block, because the end of a path is recovered first.
        if self.ghosts_surplus == 0 && self.ghosts.len() > most + most / 8 {
            let mut seen = HashSet::new();
            let mut noted = std::mem::take(&mut self.ghosts);
            // Of those noted twice, the later time counts.
            noted.make_contiguous().reverse();
            noted.retain(|ghost| {
                self.resolve(*ghost).is_some_and(|at| self.get(at).is_ghost() && seen.insert(at))
            });
            noted.make_contiguous().reverse();
            self.ghosts = noted;
            self.ghosts_surplus = self.ghosts.len().saturating_sub(most);
        }
        while self.ghosts_surplus > 0 {
            self.ghosts_surplus -= 1;
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
