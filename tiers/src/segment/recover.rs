//! Finds again what a store holds: reads headers and descriptor areas, never payloads.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::Serialize;

use super::pages::Pages;
use super::{
    DESCRIPTORS_PER_PAGE, ERASED_DESCRIPTOR, FormatError, PAGE, SegmentHeader, StoreGeometry,
};
use crate::block::{
    BlockKey, DESCRIPTOR_BYTES, Descriptor, DescriptorError, NamespaceId, PAGE_BYTES, Place,
    page_ceil,
};

/// Pages of the descriptor area read at a time. A chunk without a valid or an erased descriptor
/// ends the area.
const CHUNK_PAGES: usize = 16;

/// Threads that read segments side by side: enough to keep a drive busy. They wait for it most of
/// the time, so that their number does not follow that of the processors.
const THREADS: usize = 8;

/// Offset of the segment's sequence in an encoded descriptor.
const SEGMENT_SEQUENCE_AT: usize = 136;

/// One segment that holds blocks, or could.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredSegment {
    /// Number of the segment.
    pub segment: u32,
    /// Its sequence.
    pub sequence: u64,
    /// Index in the descriptor area and descriptor, by index; only those that passed every check.
    pub descriptors: Vec<(u32, Descriptor)>,
}

/// What recovery found, by reason. Counts are of segments or of descriptors, as named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecoveryReport {
    /// Whether the store was made by this open.
    pub created: bool,
    /// Whether the run before ended by a clean stop.
    pub clean: bool,
    /// Superblock copies that were damaged (the other one was used).
    pub superblocks_damaged: u32,
    /// Bytes by which the file was shorter than the store, extended again.
    pub truncated_bytes: u64,
    /// Segments with a whole header.
    pub segments_recovered: u32,
    /// Segments never written.
    pub segments_empty: u32,
    /// Segments whose header page is damaged.
    pub segments_damaged: u32,
    /// Segments that hold the header of another segment.
    pub segments_swapped: u32,
    /// Segments that hold the header of another store.
    pub segments_foreign: u32,
    /// Segments whose sequence another one has too; all of them are refused.
    pub segments_same_sequence: u32,
    /// Segments that lay beyond the end of the file.
    pub segments_truncated: u32,
    /// Segments out of use for earlier errors.
    pub segments_quarantined: u32,
    /// Segments that could not be read.
    pub segments_unreadable: u32,
    /// Descriptors accepted.
    pub descriptors_recovered: u64,
    /// Places whose descriptor was erased.
    pub descriptors_erased: u64,
    /// Descriptors of an earlier life of their segment.
    pub descriptors_stale: u64,
    /// Descriptors whose checksum does not match.
    pub descriptors_damaged: u64,
    /// Descriptors whose checksum holds but whose fields cannot be.
    pub descriptors_invalid: u64,
    /// Descriptors whose payload lay beyond the end of the file.
    pub descriptors_truncated: u64,
    /// Descriptors whose payload another, later one overlaps.
    pub descriptors_overlapping: u64,
    /// Descriptors of an older generation of their namespace.
    pub descriptors_old_generation: u64,
    /// Descriptors of a namespace that the table does not have.
    pub descriptors_unknown_namespace: u64,
    /// Descriptors whose key a later descriptor has too.
    pub descriptors_duplicate: u64,
    /// Descriptor areas that could not be read to their end.
    pub descriptor_areas_unreadable: u32,
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.created {
            return out.write_str("new store");
        }
        write!(
            out,
            "{} blocks in {} segments ({} never written)",
            self.descriptors_recovered, self.segments_recovered, self.segments_empty
        )?;
        let refused = [
            (u64::from(self.superblocks_damaged), "damaged superblocks"),
            (self.truncated_bytes, "bytes missing at the end of the file"),
            (u64::from(self.segments_damaged), "segments with a damaged header"),
            (u64::from(self.segments_swapped), "swapped segments"),
            (u64::from(self.segments_foreign), "segments of another store"),
            (u64::from(self.segments_same_sequence), "segments with the same sequence"),
            (u64::from(self.segments_truncated), "segments beyond the end of the file"),
            (u64::from(self.segments_quarantined), "quarantined segments"),
            (u64::from(self.segments_unreadable), "unreadable segments"),
            (u64::from(self.descriptor_areas_unreadable), "descriptor areas read in part"),
            (self.descriptors_damaged, "damaged descriptors"),
            (self.descriptors_invalid, "descriptors that cannot be"),
            (self.descriptors_truncated, "blocks beyond the end of the file"),
            (self.descriptors_overlapping, "blocks overwritten by later ones"),
            (self.descriptors_old_generation, "blocks of forgotten generations"),
            (self.descriptors_unknown_namespace, "blocks of unknown namespaces"),
            (self.descriptors_duplicate, "blocks stored again later"),
        ];
        let mut lead = "; left out: ";
        for (count, what) in refused.into_iter().filter(|(count, _)| *count > 0) {
            write!(out, "{lead}{count} {what}")?;
            lead = ", ";
        }
        Ok(())
    }
}

/// A store as recovery and `fsck` read it.
pub(super) struct Source<'a> {
    pub(super) file: &'a File,
    pub(super) geometry: StoreGeometry,
    pub(super) salt: u128,
    /// Length of the file as it was found.
    pub(super) file_bytes: u64,
}

/// What is found where a segment's header should be.
#[derive(Debug)]
pub(super) enum Found {
    Empty,
    Used(SegmentHeader),
    Damaged(FormatError),
    Swapped(SegmentHeader),
    Foreign,
    Truncated,
    Unreadable(io::Error),
}

/// Why a place of the descriptor area gives no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    Empty,
    Erased,
    Stale,
    Damaged(DescriptorError),
    Invalid(&'static str),
    Truncated,
}

/// Memory for one scanning thread.
pub(super) fn scan_pages() -> Pages {
    Pages::new(1 + CHUNK_PAGES)
}

impl Source<'_> {
    /// Reads one segment's header and descriptor area and shows `visit` each place of the area up
    /// to the first chunk without a valid or erased descriptor, or all places when `whole`. Returns
    /// what the header is and the number of pages that could not be read.
    pub(super) fn scan(
        &self,
        segment: u32,
        whole: bool,
        pages: &mut Pages,
        visit: &mut dyn FnMut(u32, Result<Descriptor, Refusal>),
    ) -> (Found, u32) {
        let start = self.geometry.segment_offset(segment);
        if start + PAGE_BYTES > self.file_bytes {
            return (Found::Truncated, 0);
        }
        let area = self.geometry.descriptor_pages as usize;
        let mut count = CHUNK_PAGES.min(area);
        let (mut got, mut failed) = self.read(pages, start, 1 + count);
        let header = match self.header(segment, pages, got, &failed) {
            Found::Used(header) => header,
            other => return (other, 0),
        };
        let (mut first, mut skip, mut unreadable) = (0, 1, 0);
        loop {
            unreadable += failed.iter().filter(|(at, _)| *at >= skip).count() as u32;
            let mut valid = 0;
            for page in skip..got.min(skip + count) {
                if failed.iter().any(|(at, _)| *at == page) {
                    continue;
                }
                let index = (first + page - skip) as u32 * DESCRIPTORS_PER_PAGE;
                let places = pages.page(page).map_or(&[][..], |page| page.as_chunks().0);
                for (place, index) in places.iter().zip(index..) {
                    let judged = self.judge(place, segment, header.sequence);
                    valid += u32::from(matches!(judged, Ok(_) | Err(Refusal::Erased)));
                    visit(index, judged);
                }
            }
            first += count;
            count = CHUNK_PAGES.min(area - first);
            if count == 0 || got < skip || (valid == 0 && !whole) {
                return (Found::Used(header), unreadable);
            }
            skip = 0;
            let offset = start + (1 + first as u64) * PAGE_BYTES;
            (got, failed) = self.read(pages, offset, count);
        }
    }

    /// Number of whole descriptors in a segment whose header is lost: they name their own sequence,
    /// which nothing vouches for, so they are only counted.
    pub(super) fn orphans(&self, segment: u32, pages: &mut Pages) -> u32 {
        let mut count = 0;
        let start = self.geometry.segment_offset(segment) + PAGE_BYTES;
        for first in (0..self.geometry.descriptor_pages as usize).step_by(CHUNK_PAGES) {
            let chunk = CHUNK_PAGES.min(self.geometry.descriptor_pages as usize - first);
            let (got, failed) = self.read(pages, start + first as u64 * PAGE_BYTES, chunk);
            for page in (0..got).filter(|page| failed.iter().all(|(at, _)| at != page)) {
                let places = pages.page(page).map_or(&[][..], |page| page.as_chunks().0);
                count +=
                    places.iter().filter(|place| self.claims(place, segment).is_some()).count();
            }
        }
        count as u32
    }

    /// Reads pages, one by one where they cannot be read together.
    fn read(
        &self,
        pages: &mut Pages,
        offset: u64,
        count: usize,
    ) -> (usize, Vec<(usize, io::Error)>) {
        if let Ok(got) = pages.read(self.file, offset, 0, count) {
            return (got, Vec::new());
        }
        let mut failed = Vec::new();
        for at in 0..count {
            match pages.read(self.file, offset + at as u64 * PAGE_BYTES, at, 1) {
                Ok(0) => return (at, failed),
                Ok(_) => {}
                Err(error) => failed.push((at, error)),
            }
        }
        (count, failed)
    }

    fn header(
        &self,
        segment: u32,
        pages: &Pages,
        got: usize,
        failed: &[(usize, io::Error)],
    ) -> Found {
        if let Some((0, error)) = failed.first() {
            return Found::Unreadable(io::Error::new(error.kind(), error.to_string()));
        }
        let Some(page) = pages.page(0).filter(|_| got > 0) else { return Found::Truncated };
        match SegmentHeader::decode(page, self.salt) {
            Ok(header) if header.segment != segment => Found::Swapped(header),
            Ok(header) if header.geometry != self.geometry => {
                Found::Damaged(FormatError::Field("geometry"))
            }
            Ok(header) => Found::Used(header),
            Err(FormatError::Empty) => Found::Empty,
            Err(FormatError::Foreign) => Found::Foreign,
            Err(error) => Found::Damaged(error),
        }
    }

    fn judge(
        &self,
        bytes: &[u8; DESCRIPTOR_BYTES],
        segment: u32,
        sequence: u64,
    ) -> Result<Descriptor, Refusal> {
        let place = Place::Segment { salt: self.salt, segment, sequence };
        match Descriptor::decode(bytes, place) {
            Ok(descriptor) => self.check(segment, sequence, &descriptor).map(|()| descriptor),
            Err(DescriptorError::Empty) => Err(Refusal::Empty),
            Err(DescriptorError::Magic) if *bytes == ERASED_DESCRIPTOR => Err(Refusal::Erased),
            Err(DescriptorError::Checksum) if self.claims(bytes, segment).is_some() => {
                Err(Refusal::Stale)
            }
            Err(error) => Err(Refusal::Damaged(error)),
        }
    }

    /// The sequence of the segment's life whose whole descriptor these bytes are.
    fn claims(&self, bytes: &[u8; DESCRIPTOR_BYTES], segment: u32) -> Option<u64> {
        let claimed = bytes.get(SEGMENT_SEQUENCE_AT..SEGMENT_SEQUENCE_AT + 8)?;
        let sequence = u64::from_le_bytes(claimed.try_into().ok()?);
        let place = Place::Segment { salt: self.salt, segment, sequence };
        Descriptor::decode(bytes, place).ok().map(|_| sequence)
    }

    fn check(&self, segment: u32, sequence: u64, found: &Descriptor) -> Result<(), Refusal> {
        let stored = page_ceil(u64::from(found.stored_bytes));
        let end = u64::from(found.offset) + stored;
        let invalid = if found.segment != segment || found.segment_sequence != sequence {
            "segment"
        } else if found.tokens == 0 {
            "tokens"
        } else if found.raw_bytes == 0 {
            "raw length"
        } else if found.stored_bytes == 0 || stored > page_ceil(u64::from(found.raw_bytes)) {
            "stored length"
        } else if !found.offset.is_multiple_of(PAGE as u32)
            || found.offset < self.geometry.payload_start()
            || end > u64::from(self.geometry.segment_bytes)
        {
            "payload offset"
        } else if self.geometry.segment_offset(segment) + end > self.file_bytes {
            return Err(Refusal::Truncated);
        } else {
            return Ok(());
        };
        Err(Refusal::Invalid(invalid))
    }
}

/// What [`recover`] gives back.
pub(super) struct Recovered {
    pub(super) segments: Vec<RecoveredSegment>,
    pub(super) report: RecoveryReport,
    /// The largest open epoch of any header of this store.
    pub(super) epoch_max: u32,
}

/// Reads what a store holds. Never fails: what cannot be read or believed is left out and counted.
pub(super) fn recover(
    source: &Source<'_>,
    quarantined: &[u32],
    current_generation: impl Fn(NamespaceId) -> Option<u32>,
) -> Recovered {
    let next = AtomicU32::new(0);
    let work = || {
        let mut part = Part::default();
        let mut pages = scan_pages();
        loop {
            let segment = next.fetch_add(1, Ordering::Relaxed);
            // Bounded by the number of threads, so the counter cannot wrap.
            if segment >= source.geometry.segments {
                return part;
            }
            part.take(source, segment, quarantined, &mut pages);
        }
    };
    let parts: Vec<Part> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..THREADS).map(|_| scope.spawn(work)).collect();
        let mut parts = vec![work()];
        parts.extend(others.into_iter().map(|other| other.join().expect("a scan cannot panic")));
        parts
    });
    let mut whole = Part::default();
    for part in parts {
        whole.add(part);
    }
    let Part { mut segments, mut report, epoch_max } = whole;
    segments.sort_by_key(|segment| (segment.sequence, segment.segment));
    refuse_same_sequences(&mut segments, &mut report);
    for segment in &mut segments {
        report.descriptors_overlapping += drop_overlaps(&mut segment.descriptors).len() as u64;
        segment.descriptors.retain(|(_, found)| match current_generation(found.namespace) {
            Some(generation) if generation == found.generation => true,
            Some(_) => {
                report.descriptors_old_generation += 1;
                false
            }
            None => {
                report.descriptors_unknown_namespace += 1;
                false
            }
        });
    }
    drop_duplicates(&mut segments, &mut report);
    report.segments_recovered = segments.len() as u32;
    report.descriptors_recovered =
        segments.iter().map(|segment| segment.descriptors.len() as u64).sum();
    Recovered { segments, report, epoch_max }
}

/// What one thread found.
#[derive(Default)]
struct Part {
    segments: Vec<RecoveredSegment>,
    report: RecoveryReport,
    epoch_max: u32,
}

impl Part {
    fn take(&mut self, source: &Source<'_>, segment: u32, quarantined: &[u32], pages: &mut Pages) {
        let report = &mut self.report;
        let mut descriptors = Vec::new();
        let mut visit = |index, judged| match judged {
            Ok(descriptor) => descriptors.push((index, descriptor)),
            Err(Refusal::Empty) => {}
            Err(Refusal::Erased) => report.descriptors_erased += 1,
            Err(Refusal::Stale) => report.descriptors_stale += 1,
            Err(Refusal::Damaged(_)) => report.descriptors_damaged += 1,
            Err(Refusal::Invalid(_)) => report.descriptors_invalid += 1,
            Err(Refusal::Truncated) => report.descriptors_truncated += 1,
        };
        let (found, unreadable) = source.scan(segment, false, pages, &mut visit);
        report.descriptor_areas_unreadable += u32::from(unreadable > 0);
        if let Found::Used(header) | Found::Swapped(header) = &found {
            self.epoch_max = self.epoch_max.max(header.epoch());
        }
        if quarantined.binary_search(&segment).is_ok() {
            report.segments_quarantined += 1;
            return;
        }
        match found {
            Found::Used(SegmentHeader { sequence, .. }) => {
                self.segments.push(RecoveredSegment { segment, sequence, descriptors });
            }
            Found::Empty => report.segments_empty += 1,
            Found::Damaged(_) => report.segments_damaged += 1,
            Found::Swapped(_) => report.segments_swapped += 1,
            Found::Foreign => report.segments_foreign += 1,
            Found::Truncated => report.segments_truncated += 1,
            Found::Unreadable(_) => report.segments_unreadable += 1,
        }
    }

    fn add(&mut self, other: Part) {
        self.segments.extend(other.segments);
        self.epoch_max = self.epoch_max.max(other.epoch_max);
        let (to, from) = (&mut self.report, other.report);
        to.segments_empty += from.segments_empty;
        to.segments_damaged += from.segments_damaged;
        to.segments_swapped += from.segments_swapped;
        to.segments_foreign += from.segments_foreign;
        to.segments_truncated += from.segments_truncated;
        to.segments_quarantined += from.segments_quarantined;
        to.segments_unreadable += from.segments_unreadable;
        to.descriptor_areas_unreadable += from.descriptor_areas_unreadable;
        to.descriptors_erased += from.descriptors_erased;
        to.descriptors_stale += from.descriptors_stale;
        to.descriptors_damaged += from.descriptors_damaged;
        to.descriptors_invalid += from.descriptors_invalid;
        to.descriptors_truncated += from.descriptors_truncated;
    }
}

/// A sequence is given once. Two segments that have the same one cannot both be right, and nothing
/// says which is.
fn refuse_same_sequences(segments: &mut Vec<RecoveredSegment>, report: &mut RecoveryReport) {
    let mut times = HashMap::new();
    for segment in &*segments {
        *times.entry(segment.sequence).or_insert(0u32) += 1;
    }
    segments.retain(|segment| {
        let alone = times.get(&segment.sequence) == Some(&1);
        report.segments_same_sequence += u32::from(!alone);
        alone
    });
}

/// Of two payloads that overlap, the one written later is there. Returns the dropped indices.
pub(super) fn drop_overlaps(descriptors: &mut Vec<(u32, Descriptor)>) -> HashSet<u32> {
    let range = |found: &Descriptor| {
        let end = u64::from(found.offset) + page_ceil(u64::from(found.stored_bytes));
        (u64::from(found.offset), end)
    };
    let mut order: Vec<(u64, u64)> = descriptors.iter().map(|(_, found)| range(found)).collect();
    order.sort_unstable();
    let mut dropped = HashSet::new();
    if order.iter().zip(order.iter().skip(1)).all(|(one, next)| one.1 <= next.0) {
        return dropped;
    }
    let mut latest: Vec<&(u32, Descriptor)> = descriptors.iter().collect();
    latest.sort_by_key(|(index, found)| (Reverse(found.sequence), *index));
    let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
    for (index, found) in latest {
        let (start, end) = range(found);
        // Taken ranges are apart, so only the last one that starts before `end` can reach `start`.
        let before = taken.range(..end).next_back();
        if before.is_some_and(|(_, before_end)| *before_end > start) {
            dropped.insert(*index);
        } else {
            taken.insert(start, end);
        }
    }
    descriptors.retain(|(index, _)| !dropped.contains(index));
    dropped
}

/// Of two descriptors of one block, the one written later stays.
fn drop_duplicates(segments: &mut [RecoveredSegment], report: &mut RecoveryReport) {
    // Sorted by the keys' first bytes: three times as fast as a map of all keys, and nearly all
    // keys are alone with theirs.
    let mut order: Vec<(u64, usize, usize)> = Vec::new();
    for (at, segment) in segments.iter().enumerate() {
        let places = segment.descriptors.iter().enumerate();
        order.extend(places.map(|(place, (_, found))| (first_bytes(&found.key), at, place)));
    }
    order.sort_unstable();
    let mut dropped = HashSet::new();
    for group in order.chunk_by(|one, next| one.0 == next.0).filter(|group| group.len() > 1) {
        let mut newest: HashMap<(NamespaceId, BlockKey), (u64, usize, usize)> = HashMap::new();
        for (_, at, place) in group {
            let segment = segments.get(*at).and_then(|segment| segment.descriptors.get(*place));
            let Some((_, found)) = segment else { continue };
            // Segments are in order of their sequences.
            let this = (found.sequence, *at, *place);
            let newest = newest.entry((found.namespace, found.key)).or_insert(this);
            if *newest != this {
                let older = this.min(*newest);
                dropped.insert((older.1, older.2));
                *newest = this.max(*newest);
            }
        }
    }
    if dropped.is_empty() {
        return;
    }
    report.descriptors_duplicate += dropped.len() as u64;
    for (at, segment) in segments.iter_mut().enumerate() {
        let mut place = 0..;
        segment.descriptors.retain(|_| !dropped.contains(&(at, place.next().unwrap_or(0))));
    }
}

fn first_bytes(key: &BlockKey) -> u64 {
    key.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
