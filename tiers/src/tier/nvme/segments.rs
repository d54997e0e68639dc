//! A segment that is being written: its descriptor pages, and when they are due. No I/O.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::worker::WriteJob;
use super::{NvmeError, NvmeOptions};
use crate::block::{DESCRIPTOR_BYTES, PAGE_BYTES};
use crate::io::AlignedBuf;
use crate::segment::{DESCRIPTORS_PER_PAGE, ERASED_DESCRIPTOR};

/// The encoded header page of a segment.
pub(super) type HeaderPage = Box<[u8; PAGE_BYTES as usize]>;

/// Most descriptor pages in one write.
const RUN_PAGES_MAX: usize = 8;

/// Pages that wait behind the one in flight, from which on no more payloads are written: what a
/// crash loses stays within a few hundred blocks also when the device is slow.
const PAGES_WAITING_MAX: usize = 4;

/// Descriptor pages, one behind the other, that are ready to be written.
pub(super) struct ReadyPages {
    /// Number of the first page in the descriptor area.
    pub(super) first: u32,
    /// Their bytes.
    pub(super) bytes: AlignedBuf,
    /// Descriptors whose erasure is done when these pages are written.
    pub(super) erased: Vec<u32>,
}

/// A segment from `Open` to `Seal`.
pub(super) struct OpenSegment {
    /// The life's sequence.
    pub(super) sequence: u64,
    /// The header, until it is given to the device.
    pub(super) header: Option<HeaderPage>,
    /// The header is on the device.
    pub(super) opened: bool,
    /// Writes that wait for that.
    pub(super) waiting: VecDeque<WriteJob>,
    /// Writes taken and not yet over, waiting ones included.
    pub(super) writes: usize,
    /// Erasures of an earlier life, done when the header is on the device.
    pub(super) erased_by_header: Vec<(u64, u32)>,
    /// `Seal` was asked for.
    pub(super) sealing: bool,
    /// Pages are in flight.
    pub(super) pages_in_flight: bool,
    /// The first page write that failed.
    pub(super) failure: Option<NvmeError>,
    /// All pages of this life, whether written or not.
    pages: BTreeMap<u32, AlignedBuf>,
    /// Pages changed since they were last picked for writing.
    dirty: BTreeSet<u32>,
    /// Pages picked for writing.
    picked: BTreeSet<u32>,
    /// Descriptors added since pages were last picked, and when the first of them was.
    added: u32,
    added_first: Option<Instant>,
    /// Erasures that wait for their page to be written.
    erasing: BTreeMap<u32, Vec<u32>>,
    /// Descriptors that must not be added any more.
    erased: HashSet<u32>,
}

impl OpenSegment {
    pub(super) fn new(sequence: u64, header: HeaderPage) -> OpenSegment {
        OpenSegment {
            sequence,
            header: Some(header),
            opened: false,
            waiting: VecDeque::new(),
            writes: 0,
            erased_by_header: Vec::new(),
            sealing: false,
            pages_in_flight: false,
            failure: None,
            pages: BTreeMap::new(),
            dirty: BTreeSet::new(),
            picked: BTreeSet::new(),
            added: 0,
            added_first: None,
            erasing: BTreeMap::new(),
            erased: HashSet::new(),
        }
    }

    /// Adds the descriptor of a payload that is on the device, unless it was erased meanwhile.
    pub(super) fn add(&mut self, index: u32, descriptor: &[u8; DESCRIPTOR_BYTES], now: Instant) {
        if self.erased.contains(&index) {
            return;
        }
        self.put(index, descriptor);
        self.added += 1;
        self.added_first.get_or_insert(now);
    }

    /// Zeroes a descriptor; the page is due at once.
    pub(super) fn erase(&mut self, index: u32) {
        self.erased.insert(index);
        let page = self.put(index, &ERASED_DESCRIPTOR);
        self.dirty.remove(&page);
        self.picked.insert(page);
        self.erasing.entry(page).or_default().push(index);
    }

    fn put(&mut self, index: u32, bytes: &[u8; DESCRIPTOR_BYTES]) -> u32 {
        let page = index / DESCRIPTORS_PER_PAGE;
        let start = (index % DESCRIPTORS_PER_PAGE) as usize * DESCRIPTOR_BYTES;
        let buffer =
            self.pages.entry(page).or_insert_with(|| AlignedBuf::zeroed(PAGE_BYTES as usize));
        if let Some(place) = buffer.get_mut(start..start + DESCRIPTOR_BYTES) {
            place.copy_from_slice(bytes);
        }
        self.dirty.insert(page);
        page
    }

    /// Picks the changed pages for writing if they are due, or if `now_all` says so.
    pub(super) fn pick(&mut self, now: Instant, options: &NvmeOptions, now_all: bool) {
        let full = self.added >= options.commit_descriptors.max(1);
        let late = self.deadline(options.commit_delay).is_some_and(|due| due <= now);
        // A seal waits for its writes, so that it does not write a page for each of them.
        let sealed = self.sealing && self.writes == 0;
        if full || late || sealed || now_all {
            self.picked.append(&mut self.dirty);
            self.added = 0;
            self.added_first = None;
        }
    }

    /// When the changed pages are due at the latest.
    pub(super) fn deadline(&self, delay: Duration) -> Option<Instant> {
        self.added_first.map(|first| first + delay)
    }

    /// The next pages to write, if none are in flight and the header is written. They count as in
    /// flight from here on. Pages side by side go in one write: a page each at a time would be
    /// slower than the payloads that they describe.
    pub(super) fn next_pages(&mut self) -> Option<ReadyPages> {
        if self.pages_in_flight || !self.opened {
            return None;
        }
        let first = self.picked.pop_first()?;
        let mut bytes = self.pages.get(&first)?.to_vec();
        let mut erased = self.erasing.remove(&first).unwrap_or_default();
        for page in (first + 1..).take(RUN_PAGES_MAX - 1) {
            if !self.picked.remove(&page) {
                break;
            }
            bytes.extend_from_slice(self.pages.get(&page)?);
            erased.extend(self.erasing.remove(&page).unwrap_or_default());
        }
        self.pages_in_flight = true;
        Some(ReadyPages { first, bytes: AlignedBuf::of(&bytes), erased })
    }

    /// Whether descriptors wait for so long that no more payloads should be written.
    pub(super) fn lags(&self) -> bool {
        self.opened && self.picked.len() >= PAGES_WAITING_MAX
    }

    /// Nothing is changed and not written.
    pub(super) fn is_clean(&self) -> bool {
        self.dirty.is_empty() && self.picked.is_empty() && !self.pages_in_flight
    }

    /// Nothing more will come, and all that came is written.
    pub(super) fn is_sealed(&self) -> bool {
        self.sealing && self.opened && self.writes == 0 && self.is_clean()
    }

    /// Erasures that were not begun.
    pub(super) fn take_erasing(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.erasing).into_values().flatten().collect()
    }
}
