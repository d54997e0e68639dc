//! Opening a store, until its blocks are in the catalog.
//!
//! The store is written by the format's own encoders: headers and descriptor areas, but no
//! payloads, which recovery does not read. Behind the descriptors lie written zeros for as far as
//! recovery looks, because a hole of the file would be read from nowhere.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, ensure};
use clap::Args;
use kvtide_tiers::{
    block::{
        BlockKey, Codec, DESCRIPTOR_BYTES, Descriptor, NamespaceId, PAGE_BYTES, Place, Sum128,
    },
    catalog::Catalog,
    segment::{SegmentHeader, SegmentStore, StoreGeometry, StoreWant, Superblock},
};
use serde_json::{Value, json};

use super::catalog::key;
use crate::{
    process::{memory, own_seconds},
    report::Progress,
    sim::core::Core,
};

/// Blocks of 2 MiB in 1 TiB, less those that the descriptor areas displace.
pub(super) const BLOCKS_PER_TIB: u64 = SEGMENTS_PER_TIB * 127;

const SEGMENTS_PER_TIB: u64 = 4096;

const SEGMENT_BYTES: u32 = 256 << 20;

/// Bytes of the smaller blocks.
const BLOCK_BYTES: u32 = 64 << 10;

/// Bytes of the larger blocks.
const LARGE_BYTES: u32 = 2 << 20;

/// Pages that recovery reads at a time: it reads one time more than there is something.
const READ_PAGES: usize = 16;

const SALT: u128 = 0x6b76_7469_6465;

/// Arguments of this part.
#[derive(Args, Clone, Debug)]
pub(super) struct RecoveryArgs {
    /// Descriptors.
    #[arg(long)]
    pub(super) descriptors: u64,
    /// Blocks of 2 MiB, 127 in a segment, instead of 64 KiB.
    #[arg(long)]
    pub(super) large: bool,
    /// Folder for the store.
    #[arg(long)]
    pub(super) folder: PathBuf,
}

impl RecoveryArgs {
    pub(super) fn args(&self) -> Vec<String> {
        let mut args = vec!["recovery".to_owned(), format!("--descriptors={}", self.descriptors)];
        args.extend(self.large.then(|| "--large".to_owned()));
        args.push(format!("--folder={}", self.folder.display()));
        args
    }
}

/// The shape of the store and what lies in it.
struct Shape {
    geometry: StoreGeometry,
    block_bytes: u32,
    per_segment: u32,
    descriptors: u64,
}

impl Shape {
    fn of(args: &RecoveryArgs) -> anyhow::Result<Shape> {
        let block_bytes = if args.large { LARGE_BYTES } else { BLOCK_BYTES };
        let any = StoreGeometry::fit(1 << 40, SEGMENT_BYTES, BLOCK_BYTES);
        let any = any.context("a segment has a shape")?;
        let per_segment = any.payload_bytes() / block_bytes;
        let segments = args.descriptors.div_ceil(u64::from(per_segment)).max(4);
        let geometry = StoreGeometry { segments: u32::try_from(segments)?, ..any };
        Ok(Shape { geometry, block_bytes, per_segment, descriptors: args.descriptors })
    }

    /// The block that was stored as number `at`, in its segment.
    fn descriptor(&self, at: u64) -> Descriptor {
        let segment = (at / u64::from(self.per_segment)) as u32;
        let index = (at % u64::from(self.per_segment)) as u32;
        // 250 conversations with turns of 10 blocks, as long as a thousand.
        let (turn, within) = (at / 10, at % 10);
        let (chain, position) = (turn / 25_000 * 250 + turn % 250, turn / 250 % 100 * 10 + within);
        let parent = position.checked_sub(1).map_or(BlockKey::ROOT, |before| key(chain, before));
        let this = key(chain, position);
        let sum = Sum128::of(&this.0);
        Descriptor {
            codec: Codec::Raw,
            narrow: None,
            namespace: NamespaceId(1),
            generation: 0,
            key: this,
            parent,
            position: position as u32,
            tokens: 16,
            raw_bytes: self.block_bytes,
            stored_bytes: self.block_bytes,
            raw_sum: sum,
            stored_sum: sum,
            sequence: at + 1,
            segment,
            segment_sequence: sequence(segment),
            offset: self.geometry.payload_start() + index * self.block_bytes,
            created_s: 1_700_000_000,
            session: chain,
        }
    }
}

/// Segments were filled one after the other, in the first epoch.
fn sequence(segment: u32) -> u64 {
    1 << 32 | u64::from(segment)
}

/// Writes the store, to the disk and not to the page cache only.
fn write(path: &Path, shape: &Shape) -> anyhow::Result<()> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(shape.geometry.store_bytes())?;
    let mut superblock = Superblock {
        write: 1,
        uuid: [1; 16],
        salt: SALT,
        geometry: shape.geometry,
        epoch: 1,
        clean: false,
        created_s: 1_700_000_000,
        quarantined: Vec::new(),
    };
    for write in 1..=2 {
        superblock.write = write;
        file.write_all_at(&superblock.encode(), superblock.offset())?;
    }
    let progress = Progress::new(shape.descriptors);
    let mut at = 0;
    for segment in 0..shape.geometry.segments {
        let sequence = sequence(segment);
        let geometry = shape.geometry;
        let header = SegmentHeader { segment, sequence, created_s: 1_700_000_000, geometry };
        let mut area = header.encode(SALT).to_vec();
        let end = (at + u64::from(shape.per_segment)).min(shape.descriptors);
        let place = Place::Segment { salt: SALT, segment, sequence };
        for at in at..end {
            area.extend(shape.descriptor(at).encode(place));
        }
        at = end;
        let page = PAGE_BYTES as usize;
        let used = (area.len() - page).div_ceil(READ_PAGES * page) + 1;
        let pages = (used * READ_PAGES).min(geometry.descriptor_pages as usize);
        area.resize((1 + pages) * page, 0);
        file.write_all_at(&area, geometry.segment_offset(segment))?;
        progress.set(at);
    }
    progress.end();
    file.sync_all()?;
    // A daemon that starts after the machine did finds nothing in the page cache.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

/// Bytes that this process has had read from block devices.
fn read_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
}

/// Writes a store and measures how long it takes to be open, its blocks in the catalog.
///
/// # Errors
/// The store cannot be written or opened, or is not found as it was written.
pub(super) fn measure(args: &RecoveryArgs) -> anyhow::Result<Value> {
    std::fs::create_dir_all(&args.folder)?;
    let path = args.folder.join("recovery.kvtide");
    let shape = Shape::of(args)?;
    let result = write(&path, &shape).and_then(|()| open(&path, &shape));
    let removed = std::fs::remove_file(&path);
    let result = result?;
    removed.with_context(|| format!("cannot remove {}", path.display()))?;
    Ok(result)
}

fn open(path: &Path, shape: &Shape) -> anyhow::Result<Value> {
    let geometry = shape.geometry;
    let before = read_bytes().context("no /proc to read I/O from")?;
    let resident_before = memory(std::process::id()).unwrap_or_default().rss_bytes;
    let (started, cpu_before) = (Instant::now(), own_seconds());
    let mut open = SegmentStore::open(path, &StoreWant::new(geometry), |_| Some(0))?;
    let (opened, cpu_opened) = (started.elapsed(), own_seconds());
    let mut catalog = Catalog::new(Core::recovering(&open)?);
    for segment in open.recovered.drain(..) {
        catalog.recover(segment.segment, segment.sequence, &segment.descriptors);
    }
    let (ready, cpu_ready) = (started.elapsed(), own_seconds());
    let read = read_bytes().unwrap_or(0).saturating_sub(before);
    let resident = memory(std::process::id()).unwrap_or_default();
    ensure!(
        open.report.descriptors_recovered == shape.descriptors,
        "the store has {} blocks; found: {}",
        shape.descriptors,
        open.report
    );
    let blocks = Core::blocks_of(&mut catalog)?;
    ensure!(blocks == shape.descriptors, "the catalog has {blocks} of {}", shape.descriptors);
    ensure!(read >= shape.descriptors * DESCRIPTOR_BYTES as u64, "{read} bytes were read only");
    let ms = |took: std::time::Duration| took.as_nanos() as f64 / 1e6;
    // What the reads would have taken at 1 GB/s, in the place of what they took.
    let read_ms_at_1_gb_s = read as f64 / 1e6;
    Ok(json!({
        "store": if shape.block_bytes == LARGE_BYTES { "2 MiB blocks" } else { "64 KiB blocks" },
        "descriptors": blocks,
        "segments": geometry.segments,
        "store_bytes": geometry.store_bytes(),
        "direct": open.direct,
        "open_ms": ms(opened),
        "catalog_ms": ms(ready - opened),
        "ready_ms": ms(ready),
        "open_cpu_ms": (cpu_opened - cpu_before) * 1e3,
        "catalog_cpu_ms": (cpu_ready - cpu_opened) * 1e3,
        "descriptors_per_s": blocks as f64 / ready.as_secs_f64(),
        "read_mb": read as f64 / 1e6,
        "read_gb_s": read as f64 / opened.as_secs_f64() / 1e9,
        "ready_at_1_gb_s_ms": read_ms_at_1_gb_s.max(ms(opened)) + ms(ready - opened),
        "bytes_resident": resident.rss_bytes.saturating_sub(resident_before),
        "bytes_resident_max": resident.rss_max_bytes.saturating_sub(resident_before),
    }))
}
