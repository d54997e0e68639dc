//! A small store written by hand, byte by byte, without the code that writes stores.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use kvtide_tiers::block::{
    BlockKey, Codec, DESCRIPTOR_BYTES, Descriptor, NamespaceId, PAGE_BYTES, Place, Sum128,
};
use kvtide_tiers::segment::{
    OpenStore, PAGE, SegmentHeader, SegmentStore, StoreError, StoreGeometry, StoreWant,
};

/// Four segments of 1 MiB with 20 descriptor pages each: two chunks of recovery.
pub(crate) const GEOMETRY: StoreGeometry =
    StoreGeometry { segment_bytes: 1 << 20, segments: 4, descriptor_pages: 20 };

pub(crate) const NAMESPACE: NamespaceId = NamespaceId(1);
pub(crate) const GENERATION: u32 = 5;

/// A folder in memory where there is one, so that syncs cost nothing.
pub(crate) fn folder() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    tempfile::tempdir_in(shm).unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

pub(crate) fn current(id: NamespaceId) -> Option<u32> {
    (id == NAMESPACE).then_some(GENERATION)
}

pub(crate) fn open(path: &Path) -> Result<OpenStore, StoreError> {
    SegmentStore::open(path, &StoreWant::new(GEOMETRY), current)
}

/// A store's bytes, and every descriptor that was ever written to it.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) salt: u128,
    pub(crate) epoch: u32,
    /// By segment, segment sequence and index.
    pub(crate) written: HashMap<(u32, u64, u32), Descriptor>,
    next: u64,
}

impl Image {
    /// A new store's bytes.
    pub(crate) fn create(path: &Path) -> Image {
        let store = open(path).unwrap();
        assert!(store.report.created);
        let (salt, epoch) = (store.salt, store.epoch);
        let bytes = std::fs::read(path).unwrap();
        Image { path: path.to_owned(), bytes, salt, epoch, written: HashMap::new(), next: 1 }
    }

    pub(crate) fn sequence(&self, counter: u32) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(counter)
    }

    /// Begins a new life of a segment. What lies behind the header stays.
    pub(crate) fn begin(&mut self, segment: u32, sequence: u64) {
        let header = SegmentHeader { segment, sequence, created_s: 1, geometry: GEOMETRY };
        self.put(GEOMETRY.segment_offset(segment), &header.encode(self.salt));
    }

    /// The next block for a place in a segment: 4 KiB, payload and key made from its number.
    pub(crate) fn block(
        &mut self,
        segment: u32,
        sequence: u64,
        index: u32,
    ) -> (Descriptor, Vec<u8>) {
        let number = self.next;
        self.next += 1;
        let payload: Vec<u8> = (0..PAGE).map(|at| (number as usize * 31 + at) as u8).collect();
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        key[31] = 1;
        let descriptor = Descriptor {
            codec: Codec::Raw,
            narrow: None,
            namespace: NAMESPACE,
            generation: GENERATION,
            key: BlockKey(key),
            parent: BlockKey::ROOT,
            position: 0,
            tokens: 16,
            raw_bytes: PAGE as u32,
            stored_bytes: PAGE as u32,
            raw_sum: Sum128::of(&payload),
            stored_sum: Sum128::of(&payload),
            sequence: number,
            segment,
            segment_sequence: sequence,
            offset: GEOMETRY.payload_start() + index * PAGE_BYTES as u32,
            created_s: 1,
            session: 0,
        };
        (descriptor, payload)
    }

    pub(crate) fn write(&mut self, index: u32, descriptor: &Descriptor, payload: &[u8]) {
        let Descriptor { segment, segment_sequence: sequence, offset, .. } = *descriptor;
        self.put(GEOMETRY.segment_offset(segment) + u64::from(offset), payload);
        let place = Place::Segment { salt: self.salt, segment, sequence };
        self.put(descriptor_offset(segment, index), &descriptor.encode(place));
        self.written.insert((segment, sequence, index), descriptor.clone());
    }

    /// Writes blocks to the first places of a segment's life.
    pub(crate) fn fill(&mut self, segment: u32, sequence: u64, blocks: u32) {
        self.begin(segment, sequence);
        for index in 0..blocks {
            let (descriptor, payload) = self.block(segment, sequence, index);
            self.write(index, &descriptor, &payload);
        }
    }

    pub(crate) fn put(&mut self, offset: u64, bytes: &[u8]) {
        let offset = offset as usize;
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn save(&self) {
        std::fs::write(&self.path, &self.bytes).unwrap();
    }

    /// Opens what was saved. Every descriptor it gives is one that was written at that place in
    /// that life; or elsewhere in that segment and life, where a page was `misplaced`.
    pub(crate) fn reopen_after(&self, misplaced: bool) -> Result<OpenStore, StoreError> {
        let store = open(&self.path)?;
        for segment in &store.recovered {
            for (index, descriptor) in &segment.descriptors {
                let place = (segment.segment, segment.sequence, *index);
                let mut same_life = self.written.iter().filter(|((number, sequence, _), _)| {
                    (*number, *sequence) == (segment.segment, segment.sequence)
                });
                let there = self.written.get(&place) == Some(descriptor);
                let moved = misplaced && same_life.any(|(_, written)| written == descriptor);
                assert!(there || moved, "at {place:?}: {descriptor:?}");
            }
        }
        Ok(store)
    }

    pub(crate) fn reopen(&self) -> Result<OpenStore, StoreError> {
        self.reopen_after(false)
    }
}

pub(crate) fn descriptor_offset(segment: u32, index: u32) -> u64 {
    GEOMETRY.descriptor_page_offset(segment, index)
        + u64::from(index % 16) * DESCRIPTOR_BYTES as u64
}

/// Number of blocks found again.
pub(crate) fn blocks(store: &OpenStore) -> usize {
    store.recovered.iter().map(|segment| segment.descriptors.len()).sum()
}
