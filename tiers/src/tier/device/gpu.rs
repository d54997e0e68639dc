//! What a GPU can be asked for: the edge that the real one and the one in memory share.
//!
//! Every method is called on the owner thread. Copies are queued, and are over when
//! [`Gpu::finished`] says so; until then a batch owns the guards of the host slots it uses, because
//! the GPU may still write to them.
//!
//! Invariants that an implementation keeps:
//! 1. A checksum is computed over our own copy in GPU memory, never over a client's memory, which
//!    may change at any time.
//! 2. Nothing is scattered into a region before the checksum of exactly those bytes was compared.
//! 3. A move that does not lie within its region, pool or slot touches nothing.

use std::os::fd::OwnedFd;

use crate::block::{
    GPU_BLOCK_BYTES_UNSUPPORTED, GPU_EVENTS_MAX, GpuUuid, IpcHandle, RegionLayout, Sum128,
};
use crate::catalog::SlotId;
use crate::io::{SharedMemory, SlotRead, SlotWrite};

/// Most blocks that one batch moves.
pub const BATCH_MOVES_MAX: usize = 64;

/// What is known of a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GpuInfo {
    /// Its name in every process.
    pub uuid: GpuUuid,
    /// Its name for people.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Version of the driver's interface, major and minor; (0, 0) where there is no driver.
    pub driver: (u32, u32),
    /// Bytes of the pool that the tier's slots lie in.
    pub pool_bytes: u64,
    /// Most bytes that one batch moves, and so the largest block.
    pub staging_bytes: u64,
    /// Most batches under way at a time.
    pub batches_max: usize,
}

/// Number of an opened region within one GPU. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GpuRegion(pub u64);

/// Number of a started batch within one GPU. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BatchId(pub u64);

/// What a region's memory is. Consumed by opening it.
#[derive(Debug)]
pub enum OpenMemory {
    /// An allocation of cuMemAlloc of another process.
    Ipc {
        /// The handle of the whole allocation.
        handle: IpcHandle,
        /// Where the region starts in it, bytes.
        offset: u64,
    },
    /// An allocation of cuMemCreate of another process.
    Vmm {
        /// The exported allocation.
        fd: OwnedFd,
        /// Bytes of the whole allocation, as its owner says.
        allocation_bytes: u64,
        /// Where the region starts in it, bytes.
        offset: u64,
    },
    /// Shared host memory; only the GPU in memory takes it.
    Shared(SharedMemory),
}

/// A region to be opened.
#[derive(Debug)]
pub struct OpenRegion {
    /// Its memory.
    pub memory: OpenMemory,
    /// Its bytes.
    pub bytes: u64,
    /// How blocks lie in it.
    pub layout: RegionLayout,
    /// The ring of events that the engine records; may be empty.
    pub events: Vec<IpcHandle>,
}

impl OpenRegion {
    /// Checks what can be checked without the GPU, and says what a move must fit.
    ///
    /// # Errors
    /// [`GpuError::Region`] with what is wrong.
    pub fn check(&self, info: &GpuInfo) -> Result<RegionShape, GpuError> {
        let refuse = |why: String| Err(GpuError::Region(why));
        if let Err(error) = self.layout.check(self.bytes) {
            return refuse(format!("its layout: {error}"));
        }
        let block_bytes = self.layout.block_bytes();
        if block_bytes <= GPU_BLOCK_BYTES_UNSUPPORTED {
            return refuse(format!(
                "its blocks have {block_bytes} bytes; a GPU region needs blocks of more than \
                 {GPU_BLOCK_BYTES_UNSUPPORTED}"
            ));
        }
        if block_bytes > info.staging_bytes {
            return refuse(format!(
                "its blocks have {block_bytes} bytes, but the staging buffers of {} have {}; \
                 give the device tier more memory or use fewer tokens per block",
                info.uuid, info.staging_bytes
            ));
        }
        let events = self.events.len();
        if events > GPU_EVENTS_MAX {
            return refuse(format!("it has {events} events; at most {GPU_EVENTS_MAX} are allowed"));
        }
        let end = match &self.memory {
            OpenMemory::Ipc { offset, .. } => offset.checked_add(self.bytes).map(|end| (end, end)),
            OpenMemory::Vmm { allocation_bytes, offset, .. } => {
                offset.checked_add(self.bytes).map(|end| (end, *allocation_bytes))
            }
            OpenMemory::Shared(memory) => Some((self.bytes, memory.bytes())),
        };
        match end {
            Some((end, have)) if end <= have => {}
            Some((end, have)) => {
                return refuse(format!("it ends at byte {end} of an allocation of {have}"));
            }
            None => return refuse("its offset overflows".to_owned()),
        }
        Ok(RegionShape { block_bytes, places: self.layout.blocks, events: events as u32 })
    }
}

/// What a move of a region must fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionShape {
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Number of places.
    pub places: u32,
    /// Number of events in its ring.
    pub events: u32,
}

impl RegionShape {
    /// Whether there is such a place and `bytes` are one block.
    ///
    /// # Errors
    /// [`GpuError::Place`] or [`GpuError::Length`].
    pub fn check(&self, place: u32, bytes: u32) -> Result<(), GpuError> {
        if place >= self.places {
            return Err(GpuError::Place);
        }
        if u64::from(bytes) != self.block_bytes {
            return Err(GpuError::Length {
                bytes: u64::from(bytes),
                block_bytes: self.block_bytes,
            });
        }
        Ok(())
    }
}

/// Whether `bytes` from a slot on lie in the pool.
///
/// # Errors
/// [`GpuError::Place`].
pub fn check_slot(slot: SlotId, bytes: u32, pool_bytes: u64) -> Result<(), GpuError> {
    let fits = slot.offset() + u64::from(bytes) <= pool_bytes;
    if fits { Ok(()) } else { Err(GpuError::Place) }
}

/// Whether a host slot lends exactly `bytes`.
///
/// # Errors
/// [`GpuError::Length`].
pub fn check_lent(lent: usize, bytes: u32) -> Result<(), GpuError> {
    if lent == bytes as usize {
        return Ok(());
    }
    Err(GpuError::Length { bytes: lent as u64, block_bytes: u64::from(bytes) })
}

/// Where a gathered block goes.
#[derive(Debug)]
pub enum MoveTo {
    /// A slot of the pool.
    Pool(SlotId),
    /// A host slot, through staging memory.
    Host(SlotWrite),
    /// Nowhere: only its checksum is wanted.
    Nowhere,
}

/// One block to gather.
#[derive(Debug)]
pub struct GatherMove {
    /// Its place in the region.
    pub place: u32,
    /// Its bytes.
    pub bytes: u32,
    /// Where it goes.
    pub to: MoveTo,
}

/// Where a block to be scattered comes from.
#[derive(Debug)]
pub enum ScatterFrom {
    /// A slot of the pool.
    Pool(SlotId),
    /// A host slot.
    Host {
        /// The slot.
        slot: SlotRead,
        /// A slot of the pool that keeps a copy (which is of no use when the checksum differs);
        /// `None` to go through staging memory.
        through: Option<SlotId>,
    },
}

/// One block to scatter.
#[derive(Debug)]
pub struct ScatterMove {
    /// Its place in the region.
    pub place: u32,
    /// Its bytes.
    pub bytes: u32,
    /// Where it comes from.
    pub from: ScatterFrom,
    /// What its checksum must be.
    pub expected: Sum128,
}

/// One block to copy from the pool to a host slot.
#[derive(Debug)]
pub struct DemoteMove {
    /// Its slot of the pool.
    pub slot: SlotId,
    /// Its bytes.
    pub bytes: u32,
    /// Where it goes.
    pub to: SlotWrite,
}

/// Moves of one kind, at most [`BATCH_MOVES_MAX`] and at most [`GpuInfo::staging_bytes`] in all.
/// Moves of a batch run at the same time: no place of the region is written by two of them.
#[derive(Debug)]
pub enum Batch {
    /// Out of a region.
    Gather {
        /// The region.
        region: GpuRegion,
        /// The blocks.
        moves: Vec<GatherMove>,
    },
    /// Into a region.
    Scatter {
        /// The region.
        region: GpuRegion,
        /// The blocks.
        moves: Vec<ScatterMove>,
    },
    /// Out of the pool.
    Demote {
        /// The blocks.
        moves: Vec<DemoteMove>,
    },
}

impl Batch {
    /// Number of moves.
    pub fn len(&self) -> usize {
        match self {
            Batch::Gather { moves, .. } => moves.len(),
            Batch::Scatter { moves, .. } => moves.len(),
            Batch::Demote { moves } => moves.len(),
        }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all moves.
    pub fn bytes(&self) -> u64 {
        match self {
            Batch::Gather { moves, .. } => moves.iter().map(|one| u64::from(one.bytes)).sum(),
            Batch::Scatter { moves, .. } => moves.iter().map(|one| u64::from(one.bytes)).sum(),
            Batch::Demote { moves } => moves.iter().map(|one| u64::from(one.bytes)).sum(),
        }
    }

    /// The region, if there is one.
    pub fn region(&self) -> Option<GpuRegion> {
        match self {
            Batch::Gather { region, .. } | Batch::Scatter { region, .. } => Some(*region),
            Batch::Demote { .. } => None,
        }
    }

    /// Checks every move against its region, the pool, and the host slots.
    ///
    /// # Errors
    /// What is wrong with the first one that is; [`GpuError::Failed`] for a batch over its limits.
    pub fn check(&self, shape: Option<&RegionShape>, info: &GpuInfo) -> Result<(), GpuError> {
        if self.len() > BATCH_MOVES_MAX || self.bytes() > info.staging_bytes {
            return Err(GpuError::Failed(format!(
                "a batch of {} moves and {} bytes; at most {BATCH_MOVES_MAX} and {} are allowed",
                self.len(),
                self.bytes(),
                info.staging_bytes
            )));
        }
        match self {
            Batch::Gather { moves, .. } => {
                let shape = shape.ok_or(GpuError::Closed)?;
                moves.iter().try_for_each(|one| one.check(shape, info))
            }
            Batch::Scatter { moves, .. } => {
                let shape = shape.ok_or(GpuError::Closed)?;
                let mut places: Vec<u32> = moves.iter().map(|one| one.place).collect();
                places.sort_unstable();
                if places.windows(2).any(|pair| matches!(pair, [one, next] if one == next)) {
                    return Err(GpuError::Failed("a batch names a place twice".to_owned()));
                }
                moves.iter().try_for_each(|one| one.check(shape, info))
            }
            Batch::Demote { moves } => moves.iter().try_for_each(|one| one.check(info)),
        }
    }
}

impl GatherMove {
    /// Whether the move fits.
    ///
    /// # Errors
    /// [`GpuError::Place`] or [`GpuError::Length`].
    pub fn check(&self, shape: &RegionShape, info: &GpuInfo) -> Result<(), GpuError> {
        shape.check(self.place, self.bytes)?;
        match &self.to {
            MoveTo::Pool(slot) => check_slot(*slot, self.bytes, info.pool_bytes),
            MoveTo::Host(slot) => check_lent(slot.len(), self.bytes),
            MoveTo::Nowhere => Ok(()),
        }
    }
}

impl ScatterMove {
    /// Whether the move fits.
    ///
    /// # Errors
    /// [`GpuError::Place`] or [`GpuError::Length`].
    pub fn check(&self, shape: &RegionShape, info: &GpuInfo) -> Result<(), GpuError> {
        shape.check(self.place, self.bytes)?;
        match &self.from {
            ScatterFrom::Pool(slot) => check_slot(*slot, self.bytes, info.pool_bytes),
            ScatterFrom::Host { slot, through } => {
                check_lent(slot.len(), self.bytes)?;
                through.map_or(Ok(()), |slot| check_slot(slot, self.bytes, info.pool_bytes))
            }
        }
    }
}

impl DemoteMove {
    /// Whether the move fits.
    ///
    /// # Errors
    /// [`GpuError::Place`] or [`GpuError::Length`].
    pub fn check(&self, info: &GpuInfo) -> Result<(), GpuError> {
        if u64::from(self.bytes) > info.staging_bytes {
            let (bytes, block_bytes) = (u64::from(self.bytes), info.staging_bytes);
            return Err(GpuError::Length { bytes, block_bytes });
        }
        check_slot(self.slot, self.bytes, info.pool_bytes)?;
        check_lent(self.to.len(), self.bytes)
    }
}

/// What became of a batch.
#[derive(Debug)]
pub struct BatchDone {
    /// Which one.
    pub id: BatchId,
    /// Its moves; the GPU no longer touches their host slots.
    pub batch: Batch,
    /// One result per move, in order. `Ok` has the checksum of the copy in GPU memory (zeroes for
    /// a demotion, which computes none).
    pub results: Vec<Result<Sum128, GpuError>>,
}

/// What closes a mapping. It may hang, so only the reaper thread runs it.
pub type Closing = Box<dyn FnOnce() + Send>;

/// A GPU with a pool. Dropping it waits for what is under way; a lost one is not dropped.
///
/// There are two ways to be lost. With proof, the driver itself says that the context is dead, and
/// nothing writes to memory any more. Without, it may still: a batch that does not end, a call that
/// does not return, a panic, or an error after which nobody knows.
pub trait Gpu: Send {
    /// What is known of it.
    fn info(&self) -> &GpuInfo;

    /// Maps a region's memory, opens its events and uploads its layout.
    ///
    /// # Errors
    /// [`GpuError::Region`] for what will never work; else what the GPU says.
    fn open(&mut self, region: OpenRegion) -> Result<GpuRegion, GpuError>;

    /// Forgets a region, none of whose batches is under way, and returns what closes its mapping.
    fn close(&mut self, region: GpuRegion) -> Option<Closing>;

    /// Whether all work that the engine put in front of the event is done. Never waits, so that
    /// one client's stuck kernel holds up nobody else.
    ///
    /// # Errors
    /// [`GpuError::Event`] for an event that the region has not; else what the GPU says.
    fn is_ready(&mut self, region: GpuRegion, event: u32) -> Result<bool, GpuError>;

    /// Queues a batch.
    ///
    /// # Errors
    /// The batch comes back, and nothing of it is under way. Without it the batch stays with the
    /// GPU, which may be carrying it out, or do so for ever; the GPU is lost.
    fn start(&mut self, batch: Batch) -> Result<BatchId, (GpuError, Option<Batch>)>;

    /// Collects the batches that have ended. Never waits.
    ///
    /// # Errors
    /// When it cannot be told whether a batch has ended. It stays with the GPU, which is lost.
    fn finished(&mut self, done: &mut Vec<BatchDone>) -> Result<(), GpuError>;

    /// Gives back all that it has. Asked once, after one of the other methods has said
    /// [`GpuError::Lost`] as the result of a job, which is the proof that nothing of this GPU runs
    /// any more. Asks the driver nothing.
    fn surrender(&mut self) -> Surrendered;
}

/// What a lost GPU gives back.
#[derive(Default)]
pub struct Surrendered {
    /// All batches, ended or not.
    pub batches: Vec<Batch>,
    /// What closes the mapping of each region. The driver may refuse, or hang.
    pub regions: Vec<(GpuRegion, Closing)>,
}

/// Why a job failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// Our copy of the block is not what was stored. Nothing was scattered.
    #[error("the bytes in GPU memory do not match the block's checksum")]
    Checksum,
    /// The region cannot be used at all.
    #[error("the GPU region is refused: {0}")]
    Region(String),
    /// The region has no such event, or the engine's work in front of it did not end in time.
    #[error("the engine's event does not exist or was not reached in time")]
    Event,
    /// The region was closed, or never opened.
    #[error("the GPU region is closed")]
    Closed,
    /// The GPU has no memory left for this.
    #[error("out of GPU memory; lower the device tier's size or the engine's share")]
    OutOfMemory,
    /// The GPU can no longer be used by this process. From a [`Gpu`], as the result of a job: the
    /// driver has said so, and nothing that was queued there runs any more.
    #[error("the GPU is lost: {0}; restart the daemon to use it again")]
    Lost(String),
    /// This job failed; others may succeed.
    #[error("the GPU failed: {0}")]
    Failed(String),
    /// A place outside of the region, or a slot outside of the pool.
    #[error("a place outside of the region, or a slot outside of the pool")]
    Place,
    /// Not one block long.
    #[error("{bytes} bytes given for a block of {block_bytes}")]
    Length {
        /// Bytes given.
        bytes: u64,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// The worker already has as many regions as it may, closing ones included.
    #[error("the GPU has {0} regions already, closing ones included; unregister some")]
    TooManyRegions(usize),
    /// The worker stops.
    #[error("the GPU's worker has ended")]
    Ended,
}

impl GpuError {
    /// Whether the whole GPU is gone for this process.
    pub fn is_lost(&self) -> bool {
        matches!(self, GpuError::Lost(_))
    }
}
