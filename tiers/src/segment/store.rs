//! The store file: making it, opening it, and its superblocks.
//!
//! Invariants: an open that returns has written and synced a new epoch to both superblocks, so no
//! segment sequence is ever given twice even if one superblock is lost later. Nothing is written to
//! a file that is not whole and ours, and a file that could not be made does not stay behind.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FallocateFlags, OFlags, fallocate, fstatvfs};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::pages::Pages;
use super::recover::{Recovered, Source, recover};
use super::{
    FORMAT_VERSION, FormatError, PAGE, QUARANTINED_MAX, RecoveredSegment, RecoveryReport,
    SUPERBLOCK_OFFSETS, SegmentHeader, StoreGeometry, Superblock, geometry_is_sound,
};
use crate::block::NamespaceId;

/// What the caller wants of a store.
#[derive(Clone, Debug)]
pub struct StoreWant {
    /// The shape of the store. An existing one must have the same.
    pub geometry: StoreGeometry,
    /// Whether to ask for direct I/O. Default: true. Where the file system refuses it, the page
    /// cache is used and the log says so.
    pub direct: bool,
    /// Whether to make a new store where a foreign, damaged or differently shaped file lies, which
    /// is then lost. Default: false.
    pub reset_foreign: bool,
}

impl StoreWant {
    /// A store of this shape, with the defaults.
    pub fn new(geometry: StoreGeometry) -> StoreWant {
        StoreWant { geometry, direct: true, reset_foreign: false }
    }
}

/// Why a store could not be made or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// An operation of the operating system failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file system lacks the room.
    #[error(
        "{}: a store of {want_bytes} bytes needs {missing_bytes} bytes more than the file system \
         has free; free them, name a smaller size, or put the store elsewhere", path.display()
    )]
    NoSpace {
        /// The store file.
        path: PathBuf,
        /// Bytes that the store needs.
        want_bytes: u64,
        /// Bytes of them that are missing.
        missing_bytes: u64,
    },
    /// The file system or a limit of the process does not allow a file this large.
    #[error(
        "{}: a file of {want_bytes} bytes is larger than the file system or the process's file \
         size limit (ulimit -f) allows; name a smaller size", path.display()
    )]
    TooLarge {
        /// The store file.
        path: PathBuf,
        /// Bytes that the store needs.
        want_bytes: u64,
    },
    /// The path is not a regular file.
    #[error("{}: not a regular file; name a file, or move this away", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The shape asked for is not one a store can have.
    #[error("{}: a store cannot have the shape {}", path.display(), shape(geometry))]
    Unsound {
        /// The store file.
        path: PathBuf,
        /// The shape asked for.
        geometry: StoreGeometry,
    },
    /// The file is something else.
    #[error(
        "{}: not a kvtide store, so it is left alone; move it away, or name another path",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// Written by a newer version.
    #[error(
        "{}: the store has format {version} and this program reads up to {FORMAT_VERSION}; use the \
         newer program, or move the file away to start with an empty store", path.display()
    )]
    Newer {
        /// The store file.
        path: PathBuf,
        /// Its format version.
        version: u32,
    },
    /// The store has another shape.
    #[error(
        "{}: the store has {}, the configuration asks for {}; the shape of a store is fixed when \
         it is made: put the old size back, or move the file away to start with an empty store",
        path.display(), shape(found), shape(want)
    )]
    Geometry {
        /// The store file.
        path: PathBuf,
        /// The store's shape.
        found: StoreGeometry,
        /// The shape asked for.
        want: StoreGeometry,
    },
    /// Neither superblock can be used.
    #[error(
        "{}: both superblocks are damaged (A: {a}; B: {b}) and nothing was changed; `kvtide fsck` \
         says what is left, and moving the file away starts with an empty store", path.display()
    )]
    Superblocks {
        /// The store file.
        path: PathBuf,
        /// What is wrong with the first.
        a: FormatError,
        /// What is wrong with the second.
        b: FormatError,
    },
    /// The store was opened 2^32 - 1 times.
    #[error("{}: the store's open epoch is used up; move the file away", path.display())]
    Epochs {
        /// The store file.
        path: PathBuf,
    },
    /// More segments are quarantined than the superblock can list.
    #[error(
        "{}: {count} segments are quarantined and at most {} can be; replace the drive and move \
         the file away", path.display(), super::QUARANTINED_MAX
    )]
    Quarantined {
        /// The store file.
        path: PathBuf,
        /// Number of segments.
        count: usize,
    },
}

/// The store's superblocks, held while the store is open.
#[derive(Debug)]
pub struct SegmentStore {
    path: PathBuf,
    file: File,
    superblock: Superblock,
}

/// An opened store.
#[derive(Debug)]
pub struct OpenStore {
    /// For [`SegmentStore::mark_clean`] and [`SegmentStore::set_quarantined`].
    pub store: SegmentStore,
    /// The file, open for reading and writing.
    pub file: File,
    /// Whether `file` does direct I/O: transfers must be 4 KiB aligned in memory and on disk.
    pub direct: bool,
    /// The store's shape.
    pub geometry: StoreGeometry,
    /// Seeds the checksums of headers and descriptors.
    pub salt: u128,
    /// This run's epoch: segment sequences are `epoch << 32 | counter`.
    pub epoch: u32,
    /// Segments out of use, ascending. None of them is in `recovered`.
    pub quarantined: Vec<u32>,
    /// Segments with a whole header, by ascending sequence.
    pub recovered: Vec<RecoveredSegment>,
    /// What was found, by reason.
    pub report: RecoveryReport,
}

/// The header page of a segment whose life begins now.
pub fn header_page(
    geometry: &StoreGeometry,
    salt: u128,
    segment: u32,
    sequence: u64,
) -> Box<[u8; PAGE]> {
    let header = SegmentHeader { segment, sequence, created_s: unix_time_s(), geometry: *geometry };
    Box::new(header.encode(salt))
}

fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn shape(geometry: &StoreGeometry) -> String {
    format!(
        "{} segments of {} bytes with {} descriptor pages",
        geometry.segments, geometry.segment_bytes, geometry.descriptor_pages
    )
}

impl SegmentStore {
    /// Makes or opens the store at `path`, recovers what it holds, and begins a new epoch, which is
    /// on disk before this returns. `current_generation` says which generation of a namespace is
    /// alive; blocks of others, and of namespaces it does not know, are left out. Blocks for as
    /// long as the descriptor areas take to read.
    ///
    /// # Errors
    /// [`StoreError`]. A file that is refused is left as it was; damage inside a store is not an
    /// error but counted in the report.
    pub fn open(
        path: &Path,
        want: &StoreWant,
        current_generation: impl Fn(NamespaceId) -> Option<u32>,
    ) -> Result<OpenStore, StoreError> {
        if !geometry_is_sound(&want.geometry) {
            return Err(StoreError::Unsound { path: path.to_owned(), geometry: want.geometry });
        }
        let created = match std::fs::metadata(path) {
            // An empty file has nothing to lose.
            Ok(meta) if meta.is_file() && meta.len() == 0 => true,
            Ok(meta) if meta.is_file() => false,
            Ok(_) => return Err(StoreError::NotAFile { path: path.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => return Err(failed(path, "look at it", error)),
        };
        if created {
            create(path, &want.geometry)?;
        }
        let existing = match Existing::read(path, want) {
            Err(
                error @ (StoreError::Foreign { .. }
                | StoreError::Newer { .. }
                | StoreError::Geometry { .. }
                | StoreError::Superblocks { .. }),
            ) if want.reset_foreign => {
                tracing::warn!(%error, "making a new store in its place, as configured");
                create(path, &want.geometry)?;
                Existing::read(path, want)?
            }
            other => other?,
        };
        existing.open(path, created, current_generation)
    }

    /// The superblock in force.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The header page of a segment whose life begins now.
    pub fn header_page(&self, segment: u32, sequence: u64) -> Box<[u8; PAGE]> {
        header_page(&self.superblock.geometry, self.superblock.salt, segment, sequence)
    }

    /// Notes that everything was written and synced: the last thing a clean stop does. Blocks for
    /// an `fdatasync`.
    ///
    /// # Errors
    /// The superblock could not be written; the one before stays in force.
    pub fn mark_clean(&mut self) -> Result<(), StoreError> {
        self.write(Superblock { clean: true, ..self.superblock.clone() })
    }

    /// Sets the segments that are out of use, durably. Blocks for an `fdatasync`.
    ///
    /// # Errors
    /// More than [`QUARANTINED_MAX`], or the superblock could not be written; the one before stays
    /// in force.
    pub fn set_quarantined(&mut self, segments: &[u32]) -> Result<(), StoreError> {
        let mut quarantined = segments.to_vec();
        quarantined.sort_unstable();
        quarantined.dedup();
        quarantined.retain(|segment| *segment < self.superblock.geometry.segments);
        if quarantined.len() > QUARANTINED_MAX {
            let count = quarantined.len();
            return Err(StoreError::Quarantined { path: self.path.clone(), count });
        }
        self.write(Superblock { quarantined, ..self.superblock.clone() })
    }

    fn write(&mut self, mut next: Superblock) -> Result<(), StoreError> {
        next.write = self.superblock.write.wrapping_add(1);
        write_superblock(&self.file, &next)
            .map_err(|error| failed(&self.path, "write a superblock to it", error))?;
        self.superblock = next;
        Ok(())
    }
}

/// A store that was found, read and believed, but not yet changed.
struct Existing {
    file: File,
    file_bytes: u64,
    direct: bool,
    superblock: Superblock,
    superblocks_damaged: u32,
}

impl Existing {
    fn read(path: &Path, want: &StoreWant) -> Result<Existing, StoreError> {
        let (file, direct) =
            open_file(path, want.direct).map_err(|error| failed(path, "open it", error))?;
        let meta = file.metadata().map_err(|error| failed(path, "look at it", error))?;
        let copies =
            read_superblocks(&file).map_err(|error| failed(path, "read its superblocks", error))?;
        let superblocks_damaged = copies.iter().map(|copy| u32::from(copy.is_err())).sum();
        let superblock = choose(path, copies)?;
        if superblock.geometry != want.geometry {
            return Err(StoreError::Geometry {
                path: path.to_owned(),
                found: superblock.geometry,
                want: want.geometry,
            });
        }
        Ok(Existing { file, file_bytes: meta.len(), direct, superblock, superblocks_damaged })
    }

    fn open(
        self,
        path: &Path,
        created: bool,
        current_generation: impl Fn(NamespaceId) -> Option<u32>,
    ) -> Result<OpenStore, StoreError> {
        let Existing { file, file_bytes, direct, superblock, superblocks_damaged } = self;
        let geometry = superblock.geometry;
        let source = Source { file: &file, geometry, salt: superblock.salt, file_bytes };
        let Recovered { segments, mut report, epoch_max } =
            recover(&source, &superblock.quarantined, current_generation);
        report.created = created;
        report.clean = superblock.clean && !created;
        report.superblocks_damaged = superblocks_damaged;
        report.truncated_bytes = geometry.store_bytes().saturating_sub(file_bytes);
        if report.truncated_bytes > 0 {
            allocate(path, &file, geometry.store_bytes())?;
            file.sync_all().map_err(|error| failed(path, "sync it", error))?;
        }
        let epoch = superblock.epoch.max(epoch_max).checked_add(1);
        let epoch = epoch.ok_or_else(|| StoreError::Epochs { path: path.to_owned() })?;
        let salt = superblock.salt;
        let device = file.try_clone().map_err(|error| failed(path, "duplicate it", error))?;
        let next = Superblock { epoch, clean: false, ..superblock.clone() };
        let mut store = SegmentStore { path: path.to_owned(), file, superblock };
        // Both copies, so that the loss of either one never brings an old epoch back.
        store.write(next.clone())?;
        store.write(next)?;
        Ok(OpenStore {
            quarantined: store.superblock.quarantined.clone(),
            store,
            file: device,
            direct,
            geometry,
            salt,
            epoch,
            recovered: segments,
            report,
        })
    }
}

/// Makes a store file beside `path` and moves it there when it is whole, replacing what was there.
fn create(path: &Path, geometry: &StoreGeometry) -> Result<(), StoreError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let beside = PathBuf::from(name);
    let made = create_at(path, &beside, geometry);
    if made.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    made
}

fn create_at(path: &Path, beside: &Path, geometry: &StoreGeometry) -> Result<(), StoreError> {
    match std::fs::remove_file(beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed(beside, "remove what an earlier try left", error));
        }
        _ => {}
    }
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(beside);
    let file = file.map_err(|error| failed(path, "make it", error))?;
    allocate(path, &file, geometry.store_bytes())?;
    let mut random = [0; 32];
    getrandom::fill(&mut random)
        .map_err(|error| failed(path, "draw random bytes for it", io::Error::other(error)))?;
    let (uuid, salt) = random.split_at(16);
    let mut superblock = Superblock {
        write: 1,
        uuid: uuid.try_into().expect("16 of 32 bytes"),
        salt: u128::from_le_bytes(salt.try_into().expect("16 of 32 bytes")),
        geometry: *geometry,
        epoch: 0,
        clean: true,
        created_s: unix_time_s(),
        quarantined: Vec::new(),
    };
    let mut write = || {
        write_superblock(&file, &superblock)?;
        superblock.write += 1;
        write_superblock(&file, &superblock)?;
        file.sync_all()?;
        std::fs::rename(beside, path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    };
    write().map_err(|error| failed(path, "make it", error))
}

/// Gives the file its length and its blocks, so that no later write can find the disk full.
fn allocate(path: &Path, file: &File, want_bytes: u64) -> Result<(), StoreError> {
    let no_space =
        |missing_bytes| StoreError::NoSpace { path: path.to_owned(), want_bytes, missing_bytes };
    // A file system without a size of its own (tmpfs, at times) says it has no blocks at all.
    let free = || match fstatvfs(file) {
        Ok(fs) if fs.f_blocks > 0 => fs.f_bavail.saturating_mul(fs.f_frsize),
        _ => u64::MAX,
    };
    let has = file.metadata().map_or(0, |meta| meta.blocks().saturating_mul(512));
    // Asked first, because passing the limit is a deadly signal before it is an error.
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < want_bytes) {
        return Err(StoreError::TooLarge { path: path.to_owned(), want_bytes });
    }
    // Asked first, because a failing fallocate may fill the disk before it fails.
    let missing = want_bytes.saturating_sub(has).saturating_sub(free());
    if missing > 0 {
        return Err(no_space(missing));
    }
    loop {
        return match fallocate(file, FallocateFlags::empty(), 0, want_bytes) {
            Ok(()) => Ok(()),
            Err(Errno::INTR) => continue,
            Err(Errno::NOSPC | Errno::DQUOT) => {
                let has = file.metadata().map_or(0, |meta| meta.blocks().saturating_mul(512));
                Err(no_space(want_bytes.saturating_sub(has).saturating_sub(free()).max(1)))
            }
            Err(Errno::FBIG) => Err(StoreError::TooLarge { path: path.to_owned(), want_bytes }),
            Err(Errno::OPNOTSUPP) => write_zeros(file, want_bytes)
                .map_err(|error| failed(path, "fill it with zeros", error)),
            Err(errno) => Err(failed(path, "allocate it", errno.into())),
        };
    }
}

/// For file systems without fallocate. Only what is behind the end is written.
fn write_zeros(file: &File, want_bytes: u64) -> io::Result<()> {
    const STEP_PAGES: usize = 256;
    let zeros = Pages::new(STEP_PAGES);
    let mut at = file.metadata()?.len() / PAGE as u64 * PAGE as u64;
    while at < want_bytes {
        let bytes = (want_bytes - at).min((STEP_PAGES * PAGE) as u64) as usize;
        file.write_all_at(zeros.bytes().get(..bytes).unwrap_or_default(), at)?;
        at += bytes as u64;
    }
    Ok(())
}

/// Opens the file, directly where the file system takes it.
fn open_file(path: &Path, direct: bool) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if direct {
        let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0);
        let opened = options.clone().custom_flags(flags).open(path);
        let probed = opened.and_then(|file| {
            Pages::new(1).read(&file, 0, 0, 1)?;
            Ok(file)
        });
        match probed {
            Ok(file) => return Ok((file, true)),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                tracing::info!(
                    path = %path.display(),
                    "the file system refuses direct I/O; the page cache is used"
                );
            }
            Err(error) => return Err(error),
        }
    }
    options.open(path).map(|file| (file, false))
}

/// Both superblocks. A page that cannot be read, or lies beyond the end, is a damaged one.
pub(super) fn read_superblocks(file: &File) -> io::Result<[Result<Superblock, FormatError>; 2]> {
    let mut pages = Pages::new(2);
    let mut failure = None;
    let [a, b] = SUPERBLOCK_OFFSETS;
    let mut copies = [(a, 0), (b, 1)].map(|(offset, at)| match pages.read(file, offset, at, 1) {
        Ok(0) => Err(FormatError::Empty),
        Ok(_) => pages.page(at).map_or(Err(FormatError::Empty), Superblock::decode),
        Err(error) => {
            failure = Some(error);
            Err(FormatError::Checksum)
        }
    });
    // A copy at the other one's place was written there by something else.
    for (copy, place) in copies.iter_mut().zip(SUPERBLOCK_OFFSETS) {
        if copy.as_ref().is_ok_and(|found| found.offset() != place) {
            *copy = Err(FormatError::Field("copy"));
        }
    }
    match failure {
        Some(error) if copies.iter().all(Result::is_err) => Err(error),
        _ => Ok(copies),
    }
}

/// The superblock in force: the newest whole one.
fn choose(
    path: &Path,
    copies: [Result<Superblock, FormatError>; 2],
) -> Result<Superblock, StoreError> {
    for copy in &copies {
        if let Err(FormatError::Version(version)) = copy {
            return Err(StoreError::Newer { path: path.to_owned(), version: *version });
        }
    }
    match copies {
        [Ok(a), Ok(b)] => Ok(if a.write > b.write { a } else { b }),
        [Ok(one), Err(error)] | [Err(error), Ok(one)] => {
            tracing::warn!(path = %path.display(), %error, "one superblock is damaged");
            Ok(one)
        }
        [Err(a), Err(b)] => {
            let strange = |error| matches!(error, FormatError::Magic | FormatError::Empty);
            if strange(a) && strange(b) && (a, b) != (FormatError::Empty, FormatError::Empty) {
                return Err(StoreError::Foreign { path: path.to_owned() });
            }
            Err(StoreError::Superblocks { path: path.to_owned(), a, b })
        }
    }
}

fn write_superblock(file: &File, superblock: &Superblock) -> io::Result<()> {
    let mut page = Pages::new(1);
    page.bytes_mut().copy_from_slice(&superblock.encode());
    file.write_all_at(page.bytes(), superblock.offset())?;
    file.sync_data()
}

fn failed(path: &Path, action: &'static str, source: io::Error) -> StoreError {
    StoreError::Io { path: path.to_owned(), action, source }
}
