//! Looks at a store without changing it, and decodes what it can of a damaged one.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::pages::Pages;
use super::recover::{Found, Refusal, Source, drop_overlaps, scan_pages};
use super::store::read_superblocks;
use super::{
    DESCRIPTORS_PER_PAGE, FormatError, SUPERBLOCK_AREA_BYTES, SUPERBLOCK_OFFSETS, SegmentHeader,
    StoreGeometry,
};
use crate::block::{DESCRIPTOR_BYTES, Descriptor, NamespaceId, PAGE_BYTES, Sum128};
use crate::{codec, folder};

/// What to check.
#[derive(Clone, Debug)]
pub struct FsckOptions {
    /// Whether to read every payload, compare its checksum and decode it. Default: true.
    pub verify_payloads: bool,
    /// Most problems listed; all are counted. Default: 1,000.
    pub problems_max: usize,
}

impl Default for FsckOptions {
    fn default() -> FsckOptions {
        FsckOptions { verify_payloads: true, problems_max: 1000 }
    }
}

/// Why nothing could be checked at all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsckError {
    /// The folder or file cannot be read.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
    /// There is nothing of kvtide at this path.
    #[error("{}: neither a store file nor a store folder", path.display())]
    NotAStore {
        /// The path.
        path: PathBuf,
    },
}

/// What a problem is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProblemKind {
    /// A superblock copy.
    Superblock,
    /// A segment's header page.
    SegmentHeader,
    /// A descriptor.
    Descriptor,
    /// A payload.
    Payload,
    /// The file is shorter than the store.
    Truncation,
    /// A segment lies where another one belongs.
    SwappedSegment,
    /// The namespace table.
    NamespaceTable,
    /// The tenants' secrets.
    Secrets,
    /// Something could not be read.
    Unreadable,
}

/// One problem and where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// What it is about.
    pub kind: ProblemKind,
    /// Number of the segment, where it is about one.
    pub segment: Option<u32>,
    /// Index in the segment's descriptor area, where it is about one descriptor or its payload.
    pub index: Option<u32>,
    /// Offset in the store file, bytes, where it is about a place in it.
    pub offset: Option<u64>,
    /// What is wrong, and what it means for the blocks there.
    pub text: String,
}

/// What a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SegmentState {
    /// Never written.
    Empty,
    /// Has a whole header.
    Used,
    /// Its header is damaged: its blocks are lost.
    HeaderDamaged,
    /// Holds another segment: both are refused.
    Swapped,
    /// Holds a segment of another store.
    Foreign,
    /// Written by a newer version.
    Newer,
    /// Another segment has the same sequence: both are refused.
    SameSequence,
    /// Beyond the end of the file.
    Truncated,
    /// Could not be read.
    Unreadable,
    /// Out of use for earlier errors.
    Quarantined,
}

/// One segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SegmentSummary {
    /// Its number.
    pub segment: u32,
    /// What it is.
    pub state: SegmentState,
    /// Its sequence, where the header is whole.
    pub sequence: Option<u64>,
    /// Descriptors that pass every check.
    pub valid: u32,
    /// Descriptors that are damaged or cannot be.
    pub damaged: u32,
    /// Descriptors of an earlier life: harmless.
    pub stale: u32,
    /// Whole descriptors behind a damaged header: lost with it.
    pub orphaned: u32,
    /// Payload bytes of the valid descriptors, as stored.
    pub stored_bytes: u64,
    /// Payloads whose bytes match their checksum and decode.
    pub payloads_verified: u32,
    /// Payloads that do not.
    pub payloads_damaged: u32,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FsckReport {
    /// The store file.
    pub store_file: PathBuf,
    /// Its length, bytes.
    pub file_bytes: u64,
    /// The store's shape; none when it could neither be read nor guessed.
    pub geometry: Option<StoreGeometry>,
    /// Whether the shape was guessed from segment headers, both superblocks being unusable.
    pub geometry_guessed: bool,
    /// Open epoch of the superblock in force.
    pub epoch: Option<u32>,
    /// Whether the last run ended by a clean stop.
    pub clean: Option<bool>,
    /// The process that uses the store, where one does (0: not known which). What it is writing may
    /// show up as damage.
    pub locked_by: Option<u32>,
    /// Number of namespaces in the table, where there is one to read.
    pub namespaces: Option<usize>,
    /// Every segment, by number.
    pub segments: Vec<SegmentSummary>,
    /// Descriptors that pass every check.
    pub descriptors_valid: u64,
    /// Those of them whose namespace or its generation is gone: recovery leaves them out. 0 without
    /// a namespace table.
    pub descriptors_dead: u64,
    /// Descriptors that are damaged or cannot be.
    pub descriptors_damaged: u64,
    /// Descriptors of earlier lives of their segments.
    pub descriptors_stale: u64,
    /// Payloads verified.
    pub payloads_verified: u64,
    /// Payloads that do not match.
    pub payloads_damaged: u64,
    /// The first problems found.
    pub problems: Vec<Problem>,
    /// Number of all problems found.
    pub problems_total: u64,
}

/// Checks a store folder or a store file, which stays as it is. `progress` gets the segments done
/// and their number.
///
/// # Errors
/// Only when nothing could be looked at; damage is in the report.
pub fn fsck(
    path: &Path,
    options: &FsckOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<FsckReport, FsckError> {
    let mut check = Check { report: FsckReport::default(), options, generations: None };
    let meta = std::fs::metadata(path).map_err(|source| failed(path, "look at it", source))?;
    check.report.store_file = if meta.is_dir() {
        check.folder(path)?
    } else if meta.is_file() {
        path.to_owned()
    } else {
        return Err(FsckError::NotAStore { path: path.to_owned() });
    };
    let store_file = check.report.store_file.clone();
    if meta.is_dir() && !store_file.exists() {
        // A folder whose store was moved away, or never made: there is nothing more to check.
        return Ok(check.report);
    }
    let file = File::open(&store_file).map_err(|source| failed(&store_file, "open it", source))?;
    let meta = file.metadata().map_err(|source| failed(&store_file, "look at it", source))?;
    check.report.file_bytes = meta.len();
    check.store(&file, progress)?;
    Ok(check.report)
}

fn failed(path: &Path, action: &'static str, source: io::Error) -> FsckError {
    FsckError::Io { path: path.to_owned(), action, source }
}

struct Check<'a> {
    report: FsckReport,
    options: &'a FsckOptions,
    generations: Option<HashMap<NamespaceId, u32>>,
}

/// Where a problem is.
#[derive(Clone, Copy, Default)]
struct At {
    segment: Option<u32>,
    index: Option<u32>,
    offset: Option<u64>,
}

impl Check<'_> {
    fn problem(&mut self, kind: ProblemKind, at: At, text: String) {
        self.report.problems_total += 1;
        if self.report.problems.len() < self.options.problems_max {
            let At { segment, index, offset } = at;
            self.report.problems.push(Problem { kind, segment, index, offset, text });
        }
    }

    /// Looks at what lies beside the store file. Returns where that one should be.
    fn folder(&mut self, path: &Path) -> Result<PathBuf, FsckError> {
        let view = folder::inspect(path).map_err(|error| {
            failed(path, "look at the folder", io::Error::other(error.to_string()))
        })?;
        let nothing = matches!(&view.namespaces, Ok(entries) if entries.is_empty());
        if nothing && view.store_file.is_none() && matches!(view.tenants, Ok(None)) {
            return Err(FsckError::NotAStore { path: path.to_owned() });
        }
        self.report.locked_by = view.locked_by;
        match &view.namespaces {
            Ok(entries) => {
                self.report.namespaces = Some(entries.len());
                let pairs = entries.iter().map(|entry| (entry.id, entry.generation));
                self.generations = Some(pairs.collect());
            }
            Err(error) => {
                self.problem(ProblemKind::NamespaceTable, At::default(), error.to_string());
            }
        }
        match &view.tenants {
            Ok(None) if !nothing => {
                let text = "there are namespaces but no secrets: their blocks cannot be named, \
                            and are forgotten when their tenants come back";
                self.problem(ProblemKind::Secrets, At::default(), text.to_owned());
            }
            Ok(None) => {}
            Ok(Some(tenants)) => self.missing_secrets(&view.namespaces, tenants),
            Err(error) => self.problem(ProblemKind::Secrets, At::default(), error.to_string()),
        }
        Ok(view.store_file.unwrap_or_else(|| path.join(folder::STORE_FILE_NAME)))
    }

    fn missing_secrets(
        &mut self,
        namespaces: &Result<Vec<folder::NamespaceEntry>, folder::FolderError>,
        tenants: &[String],
    ) {
        let entries = namespaces.as_deref().unwrap_or_default();
        let mut missing: Vec<&String> = entries
            .iter()
            .map(|entry| &entry.tenant)
            .filter(|tenant| !tenants.contains(tenant))
            .collect();
        missing.sort_unstable();
        missing.dedup();
        for tenant in missing {
            let text = format!("tenant {tenant:?} has namespaces but no secret");
            self.problem(ProblemKind::Secrets, At::default(), text);
        }
    }

    fn store(&mut self, file: &File, progress: &mut dyn FnMut(u64, u64)) -> Result<(), FsckError> {
        let path = self.report.store_file.clone();
        let copies = read_superblocks(file)
            .map_err(|source| failed(&path, "read its superblocks", source))?;
        let mut force = None;
        for ((copy, offset), name) in copies.into_iter().zip(SUPERBLOCK_OFFSETS).zip(["A", "B"]) {
            match copy {
                Ok(one)
                    if force
                        .as_ref()
                        .is_some_and(|two: &super::Superblock| two.write > one.write) => {}
                Ok(one) => force = Some(one),
                Err(error) => {
                    let at = At { offset: Some(offset), ..At::default() };
                    let text = format!("superblock {name}: {error}");
                    self.problem(ProblemKind::Superblock, at, text);
                }
            }
        }
        let file_bytes = self.report.file_bytes;
        let (geometry, salt, quarantined) = match force {
            Some(found) => {
                self.report.epoch = Some(found.epoch);
                self.report.clean = Some(found.clean);
                (found.geometry, found.salt, found.quarantined)
            }
            None => match guess(file, file_bytes) {
                Some((geometry, salt)) => {
                    self.report.geometry_guessed = true;
                    (geometry, salt, Vec::new())
                }
                None => return Ok(()),
            },
        };
        self.report.geometry = Some(geometry);
        if file_bytes < geometry.store_bytes() {
            let at = At { offset: Some(file_bytes), ..At::default() };
            let text = format!(
                "the file has {file_bytes} bytes and the store {}: blocks behind the end are lost",
                geometry.store_bytes()
            );
            self.problem(ProblemKind::Truncation, at, text);
        }
        let source = Source { file, geometry, salt, file_bytes };
        let mut pages = scan_pages();
        let total = u64::from(geometry.segments);
        for segment in 0..geometry.segments {
            // Nothing lies behind the end, and a damaged shape may claim very many segments.
            if geometry.segment_offset(segment) >= file_bytes {
                break;
            }
            progress(u64::from(segment), total);
            self.segment(&source, segment, quarantined.binary_search(&segment).is_ok(), &mut pages);
        }
        progress(total, total);
        self.same_sequences(&geometry);
        Ok(())
    }

    fn segment(&mut self, source: &Source<'_>, segment: u32, quarantined: bool, pages: &mut Pages) {
        let start = source.geometry.segment_offset(segment);
        let place = At { segment: Some(segment), index: None, offset: Some(start) };
        let mut places = Vec::new();
        let (found, unreadable) = source.scan(segment, true, pages, &mut |index, judged| {
            if judged != Err(Refusal::Empty) {
                places.push((index, judged));
            }
        });
        let mut summary = SegmentSummary::new(segment, state(&found, quarantined));
        if let Found::Used(header) = &found {
            summary.sequence = Some(header.sequence);
        }
        match &found {
            Found::Empty | Found::Used(_) => {}
            Found::Damaged(error) => {
                summary.orphaned = source.orphans(segment, pages);
                let text = format!(
                    "segment {segment}: header: {error}; {} whole descriptors behind it are lost",
                    summary.orphaned
                );
                self.problem(ProblemKind::SegmentHeader, place, text);
            }
            Found::Swapped(header) => {
                let text = format!(
                    "segment {segment}: holds segment {} (sequence {:#x}); its blocks are refused",
                    header.segment, header.sequence
                );
                self.problem(ProblemKind::SwappedSegment, place, text);
            }
            Found::Foreign => {
                let text = format!("segment {segment}: header of another store");
                self.problem(ProblemKind::SegmentHeader, place, text);
            }
            Found::Truncated => {
                let text = format!("segment {segment}: its header is cut off");
                self.problem(ProblemKind::Truncation, place, text);
            }
            Found::Unreadable(error) => {
                let text = format!("segment {segment}: header: {error}");
                self.problem(ProblemKind::Unreadable, place, text);
            }
        }
        if unreadable > 0 {
            let text = format!("segment {segment}: {unreadable} descriptor pages unreadable");
            self.problem(ProblemKind::Unreadable, place, text);
        }
        self.descriptors(source, &mut summary, places);
        self.add(summary);
    }

    fn descriptors(
        &mut self,
        source: &Source<'_>,
        summary: &mut SegmentSummary,
        places: Vec<(u32, Result<Descriptor, Refusal>)>,
    ) {
        let segment = summary.segment;
        let mut valid = Vec::new();
        for (index, judged) in places {
            let why = match judged {
                Ok(descriptor) => {
                    valid.push((index, descriptor));
                    continue;
                }
                Err(Refusal::Empty | Refusal::Erased) => continue,
                Err(Refusal::Stale) => {
                    summary.stale += 1;
                    continue;
                }
                Err(Refusal::Damaged(error)) => error.to_string(),
                Err(Refusal::Invalid(field)) => format!("its {field} cannot be"),
                Err(Refusal::Truncated) => "its payload is behind the end of the file".to_owned(),
            };
            self.descriptor_problem(source, summary, index, &why);
        }
        let mut dropped: Vec<u32> = drop_overlaps(&mut valid).into_iter().collect();
        dropped.sort_unstable();
        for index in dropped {
            self.descriptor_problem(source, summary, index, "a later payload overlaps its own");
        }
        for (index, descriptor) in valid {
            summary.valid += 1;
            summary.stored_bytes += u64::from(descriptor.stored_bytes);
            if let Some(generations) = &self.generations {
                let alive = generations.get(&descriptor.namespace) == Some(&descriptor.generation);
                self.report.descriptors_dead += u64::from(!alive);
            }
            if !self.options.verify_payloads {
                continue;
            }
            match verify(source, &descriptor) {
                Ok(()) => summary.payloads_verified += 1,
                Err(why) => {
                    summary.payloads_damaged += 1;
                    let start = source.geometry.segment_offset(segment);
                    let offset = Some(start + u64::from(descriptor.offset));
                    let at = At { segment: Some(segment), index: Some(index), offset };
                    let text = format!(
                        "segment {segment}: payload of descriptor {index} (block {}): {why}",
                        descriptor.key
                    );
                    self.problem(ProblemKind::Payload, at, text);
                }
            }
        }
    }

    fn descriptor_problem(
        &mut self,
        source: &Source<'_>,
        summary: &mut SegmentSummary,
        index: u32,
        why: &str,
    ) {
        summary.damaged += 1;
        let page = source.geometry.descriptor_page_offset(summary.segment, index);
        let within = u64::from(index % DESCRIPTORS_PER_PAGE) * DESCRIPTOR_BYTES as u64;
        let offset = Some(page + within);
        let at = At { segment: Some(summary.segment), index: Some(index), offset };
        let text = format!("segment {}: descriptor {index}: {why}", summary.segment);
        self.problem(ProblemKind::Descriptor, at, text);
    }

    fn same_sequences(&mut self, geometry: &StoreGeometry) {
        let mut times: HashMap<u64, u32> = HashMap::new();
        for sequence in self.report.segments.iter().filter_map(|segment| segment.sequence) {
            *times.entry(sequence).or_default() += 1;
        }
        times.retain(|_, times| *times > 1);
        let mut refused = Vec::new();
        for summary in &mut self.report.segments {
            if summary.sequence.is_some_and(|sequence| times.contains_key(&sequence)) {
                summary.state = SegmentState::SameSequence;
                refused.push(summary.segment);
            }
        }
        for segment in refused {
            let offset = Some(geometry.segment_offset(segment));
            let at = At { segment: Some(segment), index: None, offset };
            let text = format!("segment {segment}: another segment has the same sequence");
            self.problem(ProblemKind::SegmentHeader, at, text);
        }
    }

    fn add(&mut self, summary: SegmentSummary) {
        self.report.descriptors_valid += u64::from(summary.valid);
        self.report.descriptors_damaged += u64::from(summary.damaged);
        self.report.descriptors_stale += u64::from(summary.stale);
        self.report.payloads_verified += u64::from(summary.payloads_verified);
        self.report.payloads_damaged += u64::from(summary.payloads_damaged);
        self.report.segments.push(summary);
    }
}

impl SegmentSummary {
    fn new(segment: u32, state: SegmentState) -> SegmentSummary {
        SegmentSummary {
            segment,
            state,
            sequence: None,
            valid: 0,
            damaged: 0,
            stale: 0,
            orphaned: 0,
            stored_bytes: 0,
            payloads_verified: 0,
            payloads_damaged: 0,
        }
    }
}

fn state(found: &Found, quarantined: bool) -> SegmentState {
    match found {
        _ if quarantined => SegmentState::Quarantined,
        Found::Empty => SegmentState::Empty,
        Found::Used(_) => SegmentState::Used,
        Found::Damaged(FormatError::Version(_)) => SegmentState::Newer,
        Found::Damaged(_) => SegmentState::HeaderDamaged,
        Found::Swapped(_) => SegmentState::Swapped,
        Found::Foreign => SegmentState::Foreign,
        Found::Truncated => SegmentState::Truncated,
        Found::Unreadable(_) => SegmentState::Unreadable,
    }
}

/// Reads a payload and checks it as a load would. The descriptor's lengths were checked already.
fn verify(source: &Source<'_>, descriptor: &Descriptor) -> Result<(), String> {
    let start = source.geometry.segment_offset(descriptor.segment);
    let mut stored = vec![0; descriptor.stored_bytes as usize];
    source
        .file
        .read_exact_at(&mut stored, start + u64::from(descriptor.offset))
        .map_err(|error| error.to_string())?;
    if Sum128::of(&stored) != descriptor.stored_sum {
        return Err("its bytes do not match their checksum".to_owned());
    }
    let raw = codec::verify(descriptor.codec, &stored, descriptor.raw_bytes as usize)
        .map_err(|error| error.to_string())?;
    if Sum128::of(&raw) != descriptor.raw_sum {
        return Err("the decoded bytes do not match the block's checksum".to_owned());
    }
    Ok(())
}

/// The shape and salt of a store whose superblocks are gone: what most of its segments' headers
/// say. A page counts only where its own shape puts it, or everything inside payloads would vote.
fn guess(file: &File, file_bytes: u64) -> Option<(StoreGeometry, u128)> {
    const STEP: u64 = 1 << 20;
    let mut votes: HashMap<(u128, u32, u32, u32), u32> = HashMap::new();
    let mut pages = Pages::new(1);
    let mut offset = SUPERBLOCK_AREA_BYTES;
    while offset + PAGE_BYTES <= file_bytes {
        if let Ok(1) = pages.read(file, offset, 0, 1)
            && let Some(page) = pages.page(0)
            && let Ok((header, salt)) = SegmentHeader::decode_any(page)
            && header.segment < header.geometry.segments
            && header.geometry.segment_offset(header.segment) == offset
        {
            let StoreGeometry { segment_bytes, segments, descriptor_pages } = header.geometry;
            *votes.entry((salt, segment_bytes, segments, descriptor_pages)).or_default() += 1;
        }
        offset += STEP;
    }
    let ((salt, segment_bytes, segments, descriptor_pages), _) =
        votes.into_iter().max_by_key(|(shape, votes)| (*votes, *shape))?;
    Some((StoreGeometry { segment_bytes, segments, descriptor_pages }, salt))
}
