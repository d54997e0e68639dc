//! The real GPU, by the CUDA driver.
//!
//! A GPU has a pool (one allocation), and lanes: each has a stream, staging memory, tables and
//! scratch of its own, and carries one batch at a time. No lane ever waits for another one or for a
//! client; so what a lane has queued ends.
//!
//! Invariants:
//! 1. A lane owns its batch, and with it the guards of the host slots, before anything of it is
//!    queued, and until its event was reached, its stream was seen to be done, or the driver has
//!    said that the whole context is dead. Otherwise it keeps it for ever.
//! 2. A region's mapping is given up only after its last batch has ended, by the worker's order.
//! 3. Everything that a kernel is given lies in the pool, in the lane's own memory, or in a region
//!    whose layout was checked against the size of its mapping; `start` checks each move again.
//! 4. Memory is freed by the last owner of it: pool and lanes by [`CudaGpu`], mappings by the
//!    closing that the reaper runs, the arena's registration by the last GPU that uses the arena.

#![expect(unsafe_code, reason = "one of the homes of unsafe code: what the GPU is told to touch")]

mod engine;
mod lane;
mod plan;
mod registered;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvtide_kernels::abi::{self, PlaneEntry};
use kvtide_kernels::driver::{
    ComputeMode, Context, CudaError, DeviceBuffer, DeviceInfo, Driver, Event, ImportedIpc,
    ImportedVmm, Stream, Unavailable, address_range, use_library,
};
use kvtide_kernels::launch::{Kernels, Pool};

pub use engine::{EngineMemory, EngineMemoryKind};
use lane::Lane;
use registered::Registered;

use super::DeviceOff;
use super::gpu::{
    Batch, BatchDone, BatchId, Closing, Gpu, GpuError, GpuInfo, GpuRegion, OpenMemory, OpenRegion,
    RegionShape, Surrendered,
};
use crate::block::{GpuUuid, RegionLayout, page_ceil};
use crate::io::Arena;

/// The largest staging memory of a lane that is taken without being asked for.
const STAGING_BYTES_MAX: u64 = 64 << 20;

/// Failed openings that are being undone at most; more are leaked.
const DISCARDS_MAX: usize = 16;

/// Which GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GpuChoice {
    /// By its name.
    Uuid(GpuUuid),
    /// By its number in this process.
    Ordinal(i32),
}

/// How a GPU is used.
#[derive(Clone, Debug)]
pub struct CudaGpuOptions {
    /// Bytes of staging memory of each lane, and so the largest block. Default: 64 MiB, or a
    /// quarter of a pool that is smaller than 256 MiB.
    pub staging_bytes: Option<u64>,
    /// Lanes: batches under way at a time. Default: 4. Minimum: 1.
    pub lanes: usize,
    /// Whether many copies are queued by one call of the batch-copy API (CUDA 13). Off by default:
    /// some drivers were seen to crash in it.
    pub batch_copies: bool,
}

impl Default for CudaGpuOptions {
    fn default() -> CudaGpuOptions {
        CudaGpuOptions { staging_bytes: None, lanes: 4, batch_copies: false }
    }
}

/// What the driver says, in the tier's words.
fn error_of(error: CudaError) -> GpuError {
    if error.is_sticky() {
        GpuError::Lost(error.to_string())
    } else if error.is_out_of_memory() {
        GpuError::OutOfMemory
    } else {
        GpuError::Failed(error.to_string())
    }
}

/// The GPUs that this process can use. `library` is the driver's library, where it is not to be
/// searched for.
///
/// # Errors
/// The one line that says why there is none.
pub(super) fn probe(library: Option<&Path>) -> Result<Vec<GpuInfo>, DeviceOff> {
    let driver = driver(library)?;
    let devices = driver.devices().map_err(|error| DeviceOff::Driver(error.to_string()))?;
    if devices.is_empty() {
        return Err(DeviceOff::Unavailable(Unavailable::NoDevice.to_string()));
    }
    let mut off = None;
    let mut usable = Vec::new();
    for device in &devices {
        match unusable(device) {
            None => usable.push(info_of(&driver, device)),
            Some(why) => {
                tracing::warn!("a GPU is left out: {why}");
                off.get_or_insert(why);
            }
        }
    }
    match off {
        Some(why) if usable.is_empty() => Err(DeviceOff::Unavailable(why)),
        _ => Ok(usable),
    }
}

/// Why a GPU must be left alone, if so: a context of ours on a GPU that takes only one process
/// would keep the engine from starting.
fn unusable(device: &DeviceInfo) -> Option<String> {
    let mode = match device.compute_mode {
        ComputeMode::Default => return None,
        ComputeMode::Exclusive => "EXCLUSIVE_PROCESS",
        ComputeMode::Prohibited => "PROHIBITED",
    };
    Some(format!(
        "{} is in compute mode {mode}, in which the daemon and an engine cannot both use it; run \
         nvidia-smi -i {} -c DEFAULT",
        GpuUuid(device.uuid),
        device.pci
    ))
}

fn driver(library: Option<&Path>) -> Result<Driver, DeviceOff> {
    let off = |why: Unavailable| DeviceOff::Unavailable(why.to_string());
    if let Some(library) = library {
        use_library(library).map_err(off)?;
    }
    Driver::open().map_err(off)
}

fn info_of(driver: &Driver, device: &DeviceInfo) -> GpuInfo {
    GpuInfo {
        uuid: GpuUuid(device.uuid),
        name: device.name.clone(),
        memory_bytes: device.memory_bytes,
        driver: driver.version(),
        pool_bytes: 0,
        staging_bytes: 0,
        batches_max: 0,
    }
}

/// Takes the driver's library from an absolute path instead of searching for it. Before the first
/// other use of a GPU in this process.
///
/// # Errors
/// When it cannot be opened, or another one is in use.
pub fn use_driver_library(path: &Path) -> Result<(), DeviceOff> {
    use_library(path).map_err(|why| DeviceOff::Unavailable(why.to_string()))
}

/// A mapping of an engine's memory, kept only to be dropped.
type Mapping = Box<dyn Send>;

/// An open region. Dropping it can hang in the driver.
struct OpenedRegion {
    shape: RegionShape,
    pool: Pool,
    parts: Opening,
}

/// What there is of a region that is being opened. Dropping it can hang in the driver, so that of
/// an opening that fails is discarded on a thread made for that.
#[derive(Default)]
struct Opening {
    events: Vec<Event>,
    planes: Option<DeviceBuffer>,
    /// Also what is left of an import that failed.
    mapping: Option<Mapping>,
}

impl Opening {
    fn is_empty(&self) -> bool {
        self.events.is_empty() && self.planes.is_none() && self.mapping.is_none()
    }
}

/// A GPU with a pool.
pub struct CudaGpu {
    info: GpuInfo,
    // Lanes end what they have under way before anything else is freed.
    lanes: Vec<Lane>,
    regions: BTreeMap<GpuRegion, OpenedRegion>,
    kernels: Kernels,
    control: Stream,
    pool: DeviceBuffer,
    host: Arc<Registered>,
    slab_bytes: u64,
    context: Context,
    batch_copies: bool,
    next: u64,
    lost: Option<GpuError>,
    discards: Arc<AtomicUsize>,
}

impl CudaGpu {
    /// Opens a GPU: makes its context, takes `pool_bytes` (rounded up to pages) and the lanes'
    /// memory, loads the kernels, and registers the arena, which takes about 0.1 s per GiB.
    ///
    /// To be called on the thread that will own the GPU: its context stays current there, and the
    /// thread must not call the driver for anything else after the GPU was dropped.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] when pool or lanes do not fit; [`GpuError::Failed`] with one line
    /// when there is no such GPU, no driver, or one that is too old.
    pub fn open(
        choice: GpuChoice,
        pool_bytes: u64,
        arena: &Arc<Arena>,
        options: &CudaGpuOptions,
    ) -> Result<CudaGpu, GpuError> {
        let driver = driver(None).map_err(|off| GpuError::Failed(off.to_string()))?;
        let devices = driver.devices().map_err(error_of)?;
        let chosen = devices.iter().find(|device| match choice {
            GpuChoice::Uuid(uuid) => device.uuid == uuid.0,
            GpuChoice::Ordinal(ordinal) => device.ordinal == ordinal,
        });
        let Some(device) = chosen else {
            let why = match choice {
                GpuChoice::Uuid(uuid) => format!("this machine has no {uuid}; see nvidia-smi -L"),
                GpuChoice::Ordinal(ordinal) => format!("this machine has no GPU {ordinal}"),
            };
            return Err(GpuError::Failed(why));
        };
        if let Some(why) = unusable(device) {
            return Err(GpuError::Failed(why));
        }
        let context = Context::new(&driver, device.ordinal).map_err(error_of)?;
        context.bind().map_err(error_of)?;
        let kernels = Kernels::load(&context).map_err(error_of)?;
        let pool_bytes = page_ceil(pool_bytes.max(1));
        let staging_bytes =
            options.staging_bytes.unwrap_or((pool_bytes / 4).min(STAGING_BYTES_MAX));
        let staging_bytes = page_ceil(staging_bytes.max(1));
        let pool = DeviceBuffer::alloc(&context, pool_bytes).map_err(error_of)?;
        let lanes = (0..options.lanes.max(1))
            .map(|_| Lane::new(&context, staging_bytes))
            .collect::<Result<Vec<Lane>, CudaError>>()
            .map_err(error_of)?;
        let host = Registered::of(&context, arena)?;
        let control = Stream::new(&context).map_err(error_of)?;
        let mut info = info_of(&driver, device);
        (info.pool_bytes, info.staging_bytes) = (pool_bytes, staging_bytes);
        info.batches_max = lanes.len();
        Ok(CudaGpu {
            info,
            lanes,
            regions: BTreeMap::new(),
            kernels,
            control,
            pool,
            host,
            slab_bytes: u64::from(arena.slab_bytes()),
            context,
            batch_copies: options.batch_copies,
            next: 0,
            lost: None,
            discards: Arc::default(),
        })
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn check_lost(&self) -> Result<(), GpuError> {
        self.lost.clone().map_or(Ok(()), Err)
    }

    fn check(&self, batch: &Batch) -> Result<(), GpuError> {
        self.check_lost()?;
        let opened = batch.region().and_then(|region| self.regions.get(&region));
        batch.check(opened.map(|opened| &opened.shape), &self.info)
    }

    /// Makes all of a region, and says what a batch needs of it. Also on failure `parts` has what
    /// was made.
    fn open_parts(&self, region: OpenRegion, parts: &mut Opening) -> Result<Pool, GpuError> {
        let payload_bytes = region.layout.block_bytes();
        let (planes, plane_count) = self.upload(&region.layout, parts).map_err(error_of)?;
        for handle in &region.events {
            parts.events.push(Event::open(&self.context, handle.0).map_err(refusal_of)?);
        }
        let region = self.import(region.memory, region.bytes, parts)?;
        Ok(Pool { region, planes, plane_count, payload_bytes })
    }

    /// Puts a layout into device memory, and says where and how many planes it has.
    fn upload(&self, layout: &RegionLayout, parts: &mut Opening) -> Result<(u64, u32), CudaError> {
        let mut planes: Vec<PlaneEntry> = layout
            .planes
            .iter()
            .map(|plane| PlaneEntry {
                offset: plane.offset,
                block_stride: plane.block_stride,
                row_stride: plane.row_stride,
                row_bytes: plane.row_bytes,
                rows: plane.rows,
                ..PlaneEntry::default()
            })
            .collect();
        // The layout was checked: a block fits the staging memory, which is less than 4 GiB.
        abi::lay_out(&mut planes);
        let bytes = abi::as_bytes(&planes);
        let buffer = DeviceBuffer::alloc(&self.context, bytes.len() as u64)?;
        let address = parts.planes.insert(buffer).address();
        // SAFETY: both ranges are `bytes.len()` long and live until the stream was seen to be done
        // below; nobody else has their addresses.
        let copied =
            unsafe { self.control.copy_to_device(address, bytes.as_ptr(), bytes.len() as u64) };
        self.control.synchronize()?;
        copied?;
        Ok((address, planes.len() as u32))
    }

    /// Maps a region's memory, and says where the region starts.
    fn import(&self, memory: OpenMemory, bytes: u64, parts: &mut Opening) -> Result<u64, GpuError> {
        match memory {
            OpenMemory::Ipc { handle, offset } => {
                let import = ImportedIpc::open(&self.context, handle.0).map_err(refusal_of)?;
                let start = import.address();
                parts.mapping = Some(Box::new(import));
                check_range(start, offset, bytes)
            }
            OpenMemory::Vmm { fd, allocation_bytes, offset } => {
                // The driver maps exactly the allocation; `OpenRegion::check` has compared the
                // region with `allocation_bytes`.
                match ImportedVmm::import(&self.context, fd, allocation_bytes) {
                    Ok(import) => {
                        let address = import.address() + offset;
                        parts.mapping = Some(Box::new(import));
                        Ok(address)
                    }
                    Err(failed) => {
                        let error = failed.error;
                        parts.mapping = Some(Box::new(failed));
                        Err(refusal_of(error))
                    }
                }
            }
            OpenMemory::Shared(_) => {
                let why = "host memory is not registered as a GPU region".to_owned();
                Err(GpuError::Region(why))
            }
        }
    }

    /// Undoes an opening that has failed, on a thread made for it.
    fn discard(&self, parts: Opening) {
        if parts.is_empty() {
            return;
        }
        let discards = Arc::clone(&self.discards);
        if discards.fetch_add(1, Ordering::Relaxed) >= DISCARDS_MAX {
            discards.fetch_sub(1, Ordering::Relaxed);
            tracing::error!(gpu = %self.info.uuid, "a refused GPU mapping is leaked");
            return std::mem::forget(parts);
        }
        let parts = std::mem::ManuallyDrop::new(parts);
        let close = move || {
            drop(std::mem::ManuallyDrop::into_inner(parts));
            discards.fetch_sub(1, Ordering::Relaxed);
        };
        let thread = std::thread::Builder::new().name("kvtide-gpu-drop".into()).spawn(close);
        if let Err(error) = thread {
            tracing::error!(%error, "no thread can be started; a refused GPU mapping is leaked");
        }
    }

    fn lose(&mut self, error: &GpuError) {
        if error.is_lost() {
            self.lost.get_or_insert_with(|| error.clone());
        }
    }
}

/// What the driver says of memory that a client named: its fault, unless the GPU is at fault.
fn refusal_of(error: CudaError) -> GpuError {
    match error_of(error) {
        GpuError::Failed(why) => GpuError::Region(format!(
            "{why}; the handle must be of a live allocation of another process on this GPU"
        )),
        other => other,
    }
}

/// Checks a region against the allocation that the driver has at `start`.
fn check_range(start: u64, offset: u64, bytes: u64) -> Result<u64, GpuError> {
    let (base, have) = address_range(start).map_err(error_of)?;
    let end = offset.checked_add(bytes).and_then(|end| end.checked_add(start - base.min(start)));
    if base > start || end.is_none_or(|end| end > have) {
        let why = format!("it has {bytes} bytes at {offset} of an allocation of {have}");
        return Err(GpuError::Region(why));
    }
    Ok(start + offset)
}

impl Gpu for CudaGpu {
    fn info(&self) -> &GpuInfo {
        &self.info
    }

    fn open(&mut self, region: OpenRegion) -> Result<GpuRegion, GpuError> {
        self.check_lost()?;
        let shape = region.check(&self.info)?;
        let mut parts = Opening::default();
        let pool = match self.open_parts(region, &mut parts) {
            Ok(pool) => pool,
            Err(error) => {
                self.discard(parts);
                self.lose(&error);
                return Err(error);
            }
        };
        let opened = OpenedRegion { shape, pool, parts };
        let id = GpuRegion(self.next());
        self.regions.insert(id, opened);
        Ok(id)
    }

    fn close(&mut self, region: GpuRegion) -> Option<Closing> {
        self.regions.remove(&region).map(closing_of)
    }

    fn is_ready(&mut self, region: GpuRegion, event: u32) -> Result<bool, GpuError> {
        self.check_lost()?;
        let opened = self.regions.get(&region).ok_or(GpuError::Closed)?;
        let event = opened.parts.events.get(event as usize).ok_or(GpuError::Event)?;
        let ready = event.is_done().map_err(error_of);
        ready.inspect_err(|error| self.lose(error))
    }

    fn start(&mut self, batch: Batch) -> Result<BatchId, (GpuError, Option<Batch>)> {
        if let Err(error) = self.check(&batch) {
            return Err((error, Some(batch)));
        }
        let region = batch.region().and_then(|region| self.regions.get(&region));
        let region = region.map(|opened| opened.pool);
        let id = BatchId(self.next());
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.is_free()) else {
            let why = "every lane has a batch under way".to_owned();
            return Err((GpuError::Failed(why), Some(batch)));
        };
        let places = plan::Places {
            pool: self.pool.address(),
            staging: lane.staging(),
            host: self.host.base(),
            slab_bytes: self.slab_bytes,
        };
        match lane.start(id, batch, &places, region, &self.kernels, self.batch_copies) {
            Ok(()) => Ok(id),
            Err((error, batch)) => {
                self.lose(&error);
                Err((error, batch))
            }
        }
    }

    fn finished(&mut self, done: &mut Vec<BatchDone>) -> Result<(), GpuError> {
        for lane in &mut self.lanes {
            let Some((ended, error)) = lane.finished()? else { continue };
            done.push(ended);
            if let Some(error) = error.filter(GpuError::is_lost) {
                self.lost.get_or_insert(error);
            }
        }
        Ok(())
    }

    fn surrender(&mut self) -> Surrendered {
        let regions = std::mem::take(&mut self.regions).into_iter();
        Surrendered {
            batches: self.lanes.iter_mut().filter_map(Lane::surrender).collect(),
            regions: regions.map(|(id, opened)| (id, closing_of(opened))).collect(),
        }
    }
}

fn closing_of(opened: OpenedRegion) -> Closing {
    Box::new(move || drop(opened))
}
