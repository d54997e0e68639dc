//! A GPU made of host memory: regions are shared memory, the pool is a buffer. It keeps the rules
//! of the real one (see [`Gpu`]) and fails where a test says so. No clock but for delays.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::gpu::{
    Batch, BatchDone, BatchId, Closing, DemoteMove, GatherMove, Gpu, GpuError, GpuInfo, GpuRegion,
    MoveTo, OpenMemory, OpenRegion, RegionShape, ScatterFrom, ScatterMove, Surrendered,
};
use crate::block::{GpuUuid, Sum128};
use crate::catalog::SlotId;
use crate::io::{AlignedBuf, Region};

/// What the GPU in memory is like.
#[derive(Clone, Debug)]
pub struct MemoryGpuOptions {
    /// Its name. Default: bytes of 0xfa.
    pub uuid: GpuUuid,
    /// Bytes of the pool. Default: 64 MiB.
    pub pool_bytes: u64,
    /// Most bytes of a batch, and the largest block. Default: 8 MiB.
    pub staging_bytes: u64,
    /// How long a batch takes. Default: none.
    pub delay: Duration,
}

impl Default for MemoryGpuOptions {
    fn default() -> MemoryGpuOptions {
        MemoryGpuOptions {
            uuid: GpuUuid([0xfa; 16]),
            pool_bytes: 64 << 20,
            staging_bytes: 8 << 20,
            delay: Duration::ZERO,
        }
    }
}

/// What goes wrong, and when. Shared with [`MemoryGpuControl`].
#[derive(Debug, Default)]
struct Faults {
    delay: Duration,
    /// Countdown to the batch that fails when it ends, and how.
    end: Option<(u32, GpuError)>,
    /// Countdown to the batch that is refused when it starts, and how.
    start: Option<(u32, GpuError)>,
    open: Option<GpuError>,
    panics: bool,
    stalled: bool,
    closes_hang: bool,
    never_ready: bool,
}

#[derive(Debug, Default)]
struct Inner {
    faults: Mutex<Faults>,
    changed: Condvar,
    mapped: AtomicUsize,
    batches: AtomicUsize,
}

impl Inner {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.faults());
        self.changed.notify_all();
    }

    /// Blocks for as long as `holds`.
    fn wait_while(&self, holds: impl Fn(&Faults) -> bool) {
        let wait = self.changed.wait_while(self.faults(), |faults| holds(faults));
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }
}

/// The other end of a GPU in memory: makes it fail, and counts what it holds.
#[derive(Clone, Debug)]
pub struct MemoryGpuControl {
    inner: Arc<Inner>,
}

impl MemoryGpuControl {
    /// The batch that ends after `others` more have ended fails as a whole, and has moved nothing.
    /// With [`GpuError::Lost`] everything after it fails as well.
    pub fn fail_end(&self, others: u32, error: GpuError) {
        self.inner.change(|faults| faults.end = Some((others, error)));
    }

    /// The batch that starts after `others` more were started is refused.
    pub fn fail_start(&self, others: u32, error: GpuError) {
        self.inner.change(|faults| faults.start = Some((others, error)));
    }

    /// The next region that is opened is refused.
    pub fn fail_open(&self, error: GpuError) {
        self.inner.change(|faults| faults.open = Some(error));
    }

    /// The next batch that is started panics.
    pub fn panic_at_start(&self) {
        self.inner.change(|faults| faults.panics = true);
    }

    /// How long each batch takes from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.inner.change(|faults| faults.delay = delay);
    }

    /// While set, starting a batch hangs, as a driver's call can.
    pub fn set_stalled(&self, stalled: bool) {
        self.inner.change(|faults| faults.stalled = stalled);
    }

    /// While set, closing a mapping hangs.
    pub fn set_closes_hang(&self, hang: bool) {
        self.inner.change(|faults| faults.closes_hang = hang);
    }

    /// While set, no engine's event is ever reached.
    pub fn set_never_ready(&self, never: bool) {
        self.inner.change(|faults| faults.never_ready = never);
    }

    /// Regions whose memory is mapped.
    pub fn mapped(&self) -> usize {
        self.inner.mapped.load(Ordering::SeqCst)
    }

    /// Batches started so far.
    pub fn batches(&self) -> usize {
        self.inner.batches.load(Ordering::SeqCst)
    }
}

/// Counts as mapped until it is dropped.
struct Mapped {
    region: Region,
    inner: Arc<Inner>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.inner.mapped.fetch_sub(1, Ordering::SeqCst);
    }
}

struct OpenedRegion {
    mapped: Mapped,
    shape: RegionShape,
}

impl OpenedRegion {
    fn closing(self) -> Closing {
        Box::new(move || {
            self.mapped.inner.wait_while(|faults| faults.closes_hang);
            drop(self);
        })
    }
}

/// The GPU in memory.
pub struct MemoryGpu {
    info: GpuInfo,
    inner: Arc<Inner>,
    pool: AlignedBuf,
    staging: AlignedBuf,
    regions: BTreeMap<GpuRegion, OpenedRegion>,
    under_way: VecDeque<(BatchId, Instant, Batch)>,
    next: u64,
    lost: Option<GpuError>,
}

impl MemoryGpu {
    /// A GPU with an empty pool, and what controls it.
    pub fn new(options: MemoryGpuOptions) -> (MemoryGpu, MemoryGpuControl) {
        let MemoryGpuOptions { uuid, pool_bytes, staging_bytes, delay } = options;
        let faults = Mutex::new(Faults { delay, ..Faults::default() });
        let inner = Arc::new(Inner { faults, ..Inner::default() });
        let info = GpuInfo {
            uuid,
            name: "Fake GPU in memory".to_owned(),
            memory_bytes: pool_bytes + staging_bytes,
            driver: (0, 0),
            pool_bytes,
            staging_bytes,
            batches_max: 4,
        };
        let gpu = MemoryGpu {
            info,
            inner: Arc::clone(&inner),
            pool: AlignedBuf::zeroed(pool_bytes as usize),
            staging: AlignedBuf::zeroed(staging_bytes as usize),
            regions: BTreeMap::new(),
            under_way: VecDeque::new(),
            next: 0,
            lost: None,
        };
        (gpu, MemoryGpuControl { inner })
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

    /// Counts down to a fault of this batch.
    fn planned(fault: &mut Option<(u32, GpuError)>) -> Option<GpuError> {
        let (others, _) = fault.as_mut()?;
        if *others > 0 {
            *others -= 1;
            return None;
        }
        fault.take().map(|(_, error)| error)
    }

    fn execute(&mut self, batch: &mut Batch) -> Vec<Result<Sum128, GpuError>> {
        let region = batch.region().and_then(|region| self.regions.get(&region));
        let (pool, staging) = (&mut self.pool, &mut self.staging);
        match (batch, region) {
            (Batch::Gather { moves, .. }, Some(opened)) => {
                let region = &opened.mapped.region;
                moves.iter_mut().map(|one| gather(region, one, pool, staging)).collect()
            }
            (Batch::Scatter { moves, .. }, Some(opened)) => {
                let region = &opened.mapped.region;
                moves.iter().map(|one| scatter(region, one, pool, staging)).collect()
            }
            (Batch::Demote { moves }, _) => moves.iter_mut().map(|one| demote(one, pool)).collect(),
            (other, None) => vec![Err(GpuError::Closed); other.len()],
        }
    }
}

fn slot_of(pool: &mut [u8], slot: SlotId, bytes: u32) -> Result<&mut [u8], GpuError> {
    let start = slot.offset() as usize;
    pool.get_mut(start..start + bytes as usize).ok_or(GpuError::Place)
}

fn staging_of(staging: &mut [u8], bytes: u32) -> Result<&mut [u8], GpuError> {
    staging.get_mut(..bytes as usize).ok_or(GpuError::Place)
}

fn failed(error: crate::io::RegionError) -> GpuError {
    GpuError::Failed(error.to_string())
}

fn gather(
    region: &Region,
    one: &mut GatherMove,
    pool: &mut [u8],
    staging: &mut [u8],
) -> Result<Sum128, GpuError> {
    let ours = match &one.to {
        MoveTo::Pool(slot) => slot_of(pool, *slot, one.bytes)?,
        MoveTo::Host(_) | MoveTo::Nowhere => staging_of(staging, one.bytes)?,
    };
    let sum = region.gather(one.place, ours).map_err(failed)?;
    if let MoveTo::Host(slot) = &mut one.to {
        slot.copy_from_slice(ours);
    }
    Ok(sum)
}

fn scatter(
    region: &Region,
    one: &ScatterMove,
    pool: &mut [u8],
    staging: &mut [u8],
) -> Result<Sum128, GpuError> {
    let ours = match &one.from {
        ScatterFrom::Pool(slot) => slot_of(pool, *slot, one.bytes)?,
        ScatterFrom::Host { slot, through } => {
            let ours = match through {
                Some(through) => slot_of(pool, *through, one.bytes)?,
                None => staging_of(staging, one.bytes)?,
            };
            ours.copy_from_slice(slot);
            ours
        }
    };
    let found = Sum128::of(ours);
    if found != one.expected {
        return Err(GpuError::Checksum);
    }
    region.scatter(one.place, ours).map_err(failed)?;
    Ok(found)
}

fn demote(one: &mut DemoteMove, pool: &mut [u8]) -> Result<Sum128, GpuError> {
    one.to.copy_from_slice(slot_of(pool, one.slot, one.bytes)?);
    Ok(Sum128::default())
}

impl Gpu for MemoryGpu {
    fn info(&self) -> &GpuInfo {
        &self.info
    }

    fn open(&mut self, region: OpenRegion) -> Result<GpuRegion, GpuError> {
        self.check_lost()?;
        let shape = region.check(&self.info)?;
        if let Some(error) = self.inner.faults().open.take() {
            return Err(error);
        }
        let OpenMemory::Shared(memory) = region.memory else {
            let why = "this GPU is host memory; it cannot open memory of a real one".to_owned();
            return Err(GpuError::Region(why));
        };
        let opened = Region::new(memory, region.layout);
        let region = opened.map_err(|error| GpuError::Region(error.to_string()))?;
        self.inner.mapped.fetch_add(1, Ordering::SeqCst);
        let mapped = Mapped { region, inner: Arc::clone(&self.inner) };
        let id = GpuRegion(self.next());
        self.regions.insert(id, OpenedRegion { mapped, shape });
        Ok(id)
    }

    fn close(&mut self, region: GpuRegion) -> Option<Closing> {
        self.regions.remove(&region).map(OpenedRegion::closing)
    }

    fn is_ready(&mut self, region: GpuRegion, event: u32) -> Result<bool, GpuError> {
        self.check_lost()?;
        let opened = self.regions.get(&region).ok_or(GpuError::Closed)?;
        if event >= opened.shape.events {
            return Err(GpuError::Event);
        }
        Ok(!self.inner.faults().never_ready)
    }

    fn start(&mut self, batch: Batch) -> Result<BatchId, (GpuError, Option<Batch>)> {
        self.inner.wait_while(|faults| faults.stalled);
        if let Err(error) = self.check(&batch) {
            return Err((error, Some(batch)));
        }
        let mut faults = self.inner.faults();
        let panics = std::mem::take(&mut faults.panics);
        let refused = MemoryGpu::planned(&mut faults.start);
        let ends = Instant::now() + faults.delay;
        drop(faults);
        assert!(!panics, "a planned panic");
        if let Some(error) = refused {
            return Err((error, Some(batch)));
        }
        let id = BatchId(self.next());
        self.inner.batches.fetch_add(1, Ordering::SeqCst);
        self.under_way.push_back((id, ends, batch));
        Ok(id)
    }

    fn finished(&mut self, done: &mut Vec<BatchDone>) -> Result<(), GpuError> {
        while let Some((_, ends, _)) = self.under_way.front()
            && *ends <= Instant::now()
            && let Some((id, _, mut batch)) = self.under_way.pop_front()
        {
            let planned = MemoryGpu::planned(&mut self.inner.faults().end);
            if let Some(GpuError::Lost(why)) = &planned {
                self.lost = Some(GpuError::Lost(why.clone()));
            }
            let results = match self.lost.clone().or(planned) {
                Some(error) => vec![Err(error); batch.len()],
                None => self.execute(&mut batch),
            };
            done.push(BatchDone { id, batch, results });
        }
        Ok(())
    }

    fn surrender(&mut self) -> Surrendered {
        let regions = std::mem::take(&mut self.regions).into_iter();
        Surrendered {
            batches: self.under_way.drain(..).map(|(_, _, batch)| batch).collect(),
            regions: regions.map(|(id, opened)| (id, opened.closing())).collect(),
        }
    }
}
