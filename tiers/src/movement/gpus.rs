//! The GPUs at the edge: which regions are on them, and the catalog's actions as their jobs.
//!
//! Invariants: a region takes jobs from when its opening succeeded until its close; a host slot
//! that a GPU filled gets its descriptor before the catalog hears of it; jobs wait in a queue for
//! each region, in order, as many as the catalog lets be under way, and regions take turns, so that
//! one engine with much to do, or whose events are never reached, does not hold up the others.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::ops::Bound;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam::channel::Sender;
use serde::{Deserialize, Serialize};

use super::conductor::Signal;
use super::pool::{Expect, Shared, check_slot, seal};
use crate::block::{Descriptor, GpuOrder, GpuUuid, RegionLayout, Sum128};
use crate::catalog::{
    Event, GpuId, Limit, OfflineReason, OpError, OpId, RegionId, SessionId, SlotId, SlotPlace,
};
use crate::io::Arena;
use crate::tier::device::{
    DeviceDone, DeviceHealth, DeviceJob, DeviceOptions, DeviceWorker, GatherTo, Gpu, GpuError,
    GpuInfo, OpenMemory, OpenRegion, ScatterFrom, probe,
};

/// Staging memory of a lane on a GPU, bytes: a quarter of the pool within these bounds, and at
/// least a slab of host RAM.
#[cfg(feature = "cuda")]
const STAGING_BYTES_MIN: u64 = 16 << 20;
#[cfg(feature = "cuda")]
const STAGING_BYTES_MAX: u64 = 64 << 20;

/// GPUs of one node at most; their numbers have 8 bits.
const GPUS_MAX: usize = 64;

/// One GPU to be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Which.
    pub gpu: GpuChoice,
    /// Bytes of its memory that hold blocks; rounded down to whole slabs. 0: none is kept there,
    /// and blocks pass through.
    pub pool_bytes: u64,
    /// The driver's library, when it is not to be found by name. For tests.
    pub library: Option<PathBuf>,
}

/// How a GPU is named in a configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GpuChoice {
    /// All that the driver shows.
    All,
    /// By the name that is the same in every process.
    Uuid(GpuUuid),
    /// Made by the caller, for tests.
    #[doc(hidden)]
    Made(GpuMaker),
}

/// Makes a GPU whose pool has so many bytes, and to which the arena's slots can be copied.
#[doc(hidden)]
#[derive(Clone)]
pub struct GpuMaker(pub Arc<MakeGpu>);

/// See [`GpuMaker`].
#[doc(hidden)]
pub type MakeGpu = dyn Fn(u64, &Arc<Arena>) -> Result<Box<dyn Gpu>, GpuError> + Send + Sync;

impl PartialEq for GpuMaker {
    fn eq(&self, other: &GpuMaker) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for GpuMaker {}

impl fmt::Debug for GpuMaker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("GpuMaker")
    }
}

/// A region in GPU memory, to be registered.
#[derive(Debug)]
pub struct GpuRegion {
    /// The GPU that it is on.
    pub gpu: GpuUuid,
    /// Its memory.
    pub memory: OpenMemory,
    /// Its bytes.
    pub bytes: u64,
    /// How blocks lie in it.
    pub layout: RegionLayout,
    /// How our copies are ordered behind the engine's work.
    pub order: GpuOrder,
}

/// Why a region in GPU memory is not registered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// A limit of the session, or the session is gone.
    #[error("a limit is reached: {0:?}")]
    Limit(Limit),
    /// The node does not use this GPU.
    #[error("no such GPU here; the daemon uses {}", list(known))]
    NoSuchGpu {
        /// Those that it uses.
        known: Vec<GpuUuid>,
    },
    /// The GPU is not used, or was lost.
    #[error("the device tier is off: {0}")]
    TierOff(String),
    /// There is no room for it now.
    #[error("{0}")]
    Busy(String),
    /// The memory or the layout cannot be used.
    #[error("{0}")]
    Refused(String),
}

fn list(known: &[GpuUuid]) -> String {
    match known {
        [] => "none".to_owned(),
        some => some.iter().map(GpuUuid::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// One GPU as it is now.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Its name in every process; zeros when it could not be asked.
    pub gpu: GpuUuid,
    /// Its name for people.
    pub name: String,
    /// The driver's version.
    pub driver: String,
    /// Bytes of its memory that hold blocks.
    pub pool_bytes: u64,
    /// How it does, in words.
    pub health: String,
    /// Whether a call of the driver has been under way for long, or a mapping cannot be closed.
    pub stuck: bool,
    /// Why it is off, if it is.
    pub off: Option<String>,
}

/// Calls of the driver that take longer than this are worth a word, seconds.
const LONG_S: u64 = 5;

/// The owner's view of one GPU, from any thread.
pub(super) struct DeviceFacts {
    info: Option<GpuInfo>,
    off: Option<String>,
    worker: Option<std::sync::Weak<DeviceWorker>>,
}

impl DeviceFacts {
    pub(super) fn uuid(&self) -> Option<GpuUuid> {
        self.info.as_ref().map(|info| info.uuid)
    }

    pub(super) fn off(&self) -> Option<String> {
        let lost = self.health().and_then(|health| health.lost);
        self.off.clone().or(lost)
    }

    /// What keeps it from taking new regions now: a call of the driver that hangs. A mapping that
    /// cannot be closed does not.
    pub(super) fn stuck(&self) -> Option<String> {
        let busy = self.health()?.busy_since?.elapsed().as_secs();
        (busy >= LONG_S).then(|| format!("the GPU is stuck in a call of the driver for {busy} s"))
    }

    fn health(&self) -> Option<DeviceHealth> {
        self.worker.as_ref()?.upgrade().map(|worker| worker.health())
    }

    pub(super) fn report(&self) -> DeviceReport {
        let info = self.info.as_ref();
        let (stuck, health) = self.health().map_or((false, "off".to_owned()), describe);
        DeviceReport {
            gpu: info.map_or(GpuUuid([0; 16]), |info| info.uuid),
            name: info.map_or_else(String::new, |info| info.name.clone()),
            driver: info
                .map_or_else(String::new, |info| format!("{}.{}", info.driver.0, info.driver.1)),
            pool_bytes: info.map_or(0, |info| info.pool_bytes),
            health,
            stuck,
            off: self.off(),
        }
    }
}

/// Whether a GPU is stuck, and its state in words.
fn describe(health: DeviceHealth) -> (bool, String) {
    let age = |since: Option<Instant>| since.map_or(0, |since| since.elapsed().as_secs());
    let (call, batch) = (age(health.busy_since), age(health.batch_since));
    let closing = age(health.closing_since);
    if let Some(why) = &health.lost {
        return (false, format!("lost: {why}"));
    }
    let mut words = Vec::new();
    if call >= LONG_S {
        words.push(format!("stuck in a call of the driver for {call} s"));
    }
    if batch >= LONG_S {
        words.push(format!("a copy has been under way for {batch} s"));
    }
    if closing >= LONG_S {
        let count = health.closing;
        let mappings = if count == 1 { "mapping" } else { "mappings" };
        words.push(format!("{count} {mappings} cannot be closed, the oldest for {closing} s"));
    }
    match words.is_empty() {
        true => (false, "ok".to_owned()),
        false => (true, words.join("; ")),
    }
}

/// A registration's answer; called once.
pub(super) type Registered = Box<dyn FnOnce(Result<RegionId, RegisterError>) + Send>;

/// Called once a region's memory is let go of.
pub(super) type Closed = Box<dyn FnOnce() + Send>;

/// What a job that ends in a host slot still needs then.
pub(super) struct Landing {
    pub(super) slot: SlotId,
    pub(super) descriptor: Box<Descriptor>,
}

pub(super) type Landings = Arc<Mutex<HashMap<u64, Landing>>>;

/// Jobs of one region that its worker has at most; the rest waits here. A worker takes 4,096.
const REGION_JOBS_MAX: usize = 512;

/// Jobs of the pool itself (copies down to host RAM) wait under this number, which no region has.
const POOL: RegionId = RegionId(0);

struct Edge {
    worker: Option<Arc<DeviceWorker>>,
    /// Jobs that wait, by region.
    queues: BTreeMap<RegionId, VecDeque<DeviceJob>>,
    /// The region whose turn it was last.
    last: RegionId,
    /// Operations that the worker has, and how many of each region.
    ops: HashMap<OpId, RegionId>,
    taken: HashMap<RegionId, usize>,
    landings: Landings,
}

impl Edge {
    fn new(worker: Option<Arc<DeviceWorker>>, landings: Landings) -> Edge {
        Edge {
            worker,
            queues: BTreeMap::new(),
            last: POOL,
            ops: HashMap::new(),
            taken: HashMap::new(),
            landings,
        }
    }

    /// Hands the worker what it takes: one job of each region in turn.
    fn flush(&mut self) {
        while let Some((region, job)) = self.next_job() {
            let op = op_of(&job);
            let taken = self.worker.as_ref().map(|worker| worker.try_send(job));
            match taken {
                Some(Ok(())) => {
                    self.last = region;
                    if let Some(op) = op {
                        self.ops.insert(op, region);
                        *self.taken.entry(region).or_default() += 1;
                    }
                }
                Some(Err(job)) => {
                    self.queues.entry(region).or_default().push_front(job);
                    return;
                }
                None => return,
            }
        }
    }

    /// The first job of the next region that may have one more with the worker.
    fn next_job(&mut self) -> Option<(RegionId, DeviceJob)> {
        let free =
            |region: &RegionId| self.taken.get(region).is_none_or(|taken| *taken < REGION_JOBS_MAX);
        let after = (Bound::Excluded(self.last), Bound::Unbounded);
        let next = self.queues.range(after).chain(self.queues.range(..=self.last));
        let region = next.map(|(region, _)| *region).find(free)?;
        let queue = self.queues.get_mut(&region)?;
        let job = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&region);
        }
        Some((region, job))
    }

    fn ended(&mut self, op: OpId) {
        let Some(region) = self.ops.remove(&op) else {
            return;
        };
        if let Some(taken) = self.taken.get_mut(&region) {
            *taken -= 1;
            if *taken == 0 {
                self.taken.remove(&region);
            }
        }
    }
}

/// Which region a job is for.
fn region_of(job: &DeviceJob) -> RegionId {
    match job {
        DeviceJob::Open { region, .. }
        | DeviceJob::Close { region }
        | DeviceJob::Gather { region, .. }
        | DeviceJob::Compare { region, .. }
        | DeviceJob::Scatter { region, .. } => *region,
        DeviceJob::Demote { .. } => POOL,
    }
}

fn op_of(job: &DeviceJob) -> Option<OpId> {
    match job {
        DeviceJob::Open { .. } | DeviceJob::Close { .. } => None,
        DeviceJob::Gather { op, .. }
        | DeviceJob::Compare { op, .. }
        | DeviceJob::Scatter { op, .. }
        | DeviceJob::Demote { op, .. } => Some(OpId(*op)),
    }
}

struct OpenedRegion {
    session: SessionId,
    gpu: GpuId,
}

struct Opening {
    session: SessionId,
    gpu: GpuId,
    places: u32,
    block_bytes: u32,
    /// Its session went away meanwhile.
    gone: bool,
    answer: Registered,
}

/// All GPUs, as the catalog's thread drives them.
pub(super) struct Gpus {
    edges: Vec<Edge>,
    regions: HashMap<RegionId, OpenedRegion>,
    opening: HashMap<RegionId, Opening>,
    /// Regions being closed: whose, and who waits for it (at most one per call of the session).
    dying: HashMap<RegionId, (SessionId, Vec<Closed>)>,
    shared: Arc<Shared>,
}

/// Starts the workers. A GPU that cannot be used is left out, with the reason.
pub(super) fn start(
    devices: &[DeviceConfig],
    shared: &Arc<Shared>,
    signals: &Sender<Signal>,
) -> (Gpus, Vec<DeviceFacts>) {
    let mut gpus = Gpus {
        edges: Vec::new(),
        regions: HashMap::new(),
        opening: HashMap::new(),
        dying: HashMap::new(),
        shared: Arc::clone(shared),
    };
    let open_timeout = DeviceOptions::open_timeout_of(shared.arena.bytes());
    let options = DeviceOptions { open_timeout, ..DeviceOptions::default() };
    let mut facts = Vec::new();
    for (at, device) in devices.iter().enumerate() {
        let gpu = GpuId(u8::try_from(at).unwrap_or(u8::MAX));
        let landings: Landings = Arc::default();
        let done = {
            let (landings, shared) = (Arc::clone(&landings), Arc::clone(shared));
            let signals = signals.clone();
            move |done| device_done(gpu, done, &landings, &shared, &signals)
        };
        let (open, arena) = (device.clone(), Arc::clone(&shared.arena));
        let open = move || open_gpu(&open, &arena);
        let (worker, found) = match DeviceWorker::start(open, options.clone(), done) {
            Ok(worker) => {
                let (info, worker) = (Some(worker.info().clone()), Arc::new(worker));
                let weak = Some(Arc::downgrade(&worker));
                (Some(worker), DeviceFacts { info, off: None, worker: weak })
            }
            Err(error) => {
                tracing::warn!(gpu = ?device.gpu, %error, "this GPU is not used");
                (None, DeviceFacts { info: None, off: Some(error.to_string()), worker: None })
            }
        };
        gpus.edges.push(Edge::new(worker, landings));
        facts.push(found);
    }
    (gpus, facts)
}

/// The GPUs that are meant, each by its own name; and why there is none, if that is so.
pub(super) fn choose(devices: &[DeviceConfig]) -> (Vec<DeviceConfig>, Option<String>) {
    let (mut chosen, mut off) = (Vec::new(), None);
    for device in devices {
        if matches!(device.gpu, GpuChoice::Made(_)) {
            chosen.push(device.clone());
            continue;
        }
        // Also where one GPU is named: this is what loads the driver.
        match (probe(device.library.as_deref()), &device.gpu) {
            (Err(why), _) => off = Some(why.to_string()),
            (Ok(found), GpuChoice::All) => chosen.extend(
                found
                    .iter()
                    .map(|info| DeviceConfig { gpu: GpuChoice::Uuid(info.uuid), ..device.clone() }),
            ),
            (Ok(_), _) => chosen.push(device.clone()),
        }
    }
    chosen.truncate(GPUS_MAX);
    (chosen, off)
}

fn open_gpu(device: &DeviceConfig, arena: &Arc<Arena>) -> Result<Box<dyn Gpu>, GpuError> {
    match &device.gpu {
        GpuChoice::Made(maker) => (maker.0)(device.pool_bytes, arena),
        #[cfg(feature = "cuda")]
        GpuChoice::Uuid(uuid) => {
            use crate::tier::device::cuda::{CudaGpu, CudaGpuOptions, GpuChoice as Which};
            // Every block that host RAM can hold must pass, also without a pool.
            let (least, most) = (STAGING_BYTES_MIN, STAGING_BYTES_MAX);
            let block = u64::from(arena.slab_bytes());
            let staging_bytes = (device.pool_bytes / 4).clamp(least.max(block), most.max(block));
            let options =
                CudaGpuOptions { staging_bytes: Some(staging_bytes), ..CudaGpuOptions::default() };
            let gpu = CudaGpu::open(Which::Uuid(*uuid), device.pool_bytes, arena, &options)?;
            Ok(Box::new(gpu))
        }
        _ => Err(GpuError::Failed("this build has no CUDA".to_owned())),
    }
}

impl Gpus {
    /// The workers, to be stopped.
    pub(super) fn into_workers(self) -> Vec<Arc<DeviceWorker>> {
        for (_, opening) in self.opening {
            (opening.answer)(Err(RegisterError::TierOff("the node is stopping".to_owned())));
        }
        self.edges.into_iter().filter_map(|edge| edge.worker).collect()
    }

    /// The GPU that an open region is on.
    pub(super) fn gpu_of(&self, region: RegionId) -> Option<GpuId> {
        self.regions.get(&region).map(|found| found.gpu)
    }

    /// Begins to make a region usable. The answer comes with [`Gpus::opened`].
    pub(super) fn open(
        &mut self,
        session: SessionId,
        region: RegionId,
        gpu: GpuId,
        open: Box<OpenRegion>,
        answer: Registered,
    ) {
        let places = open.layout.blocks;
        let block_bytes = u32::try_from(open.layout.block_bytes()).unwrap_or(u32::MAX);
        let opening = Opening { session, gpu, places, block_bytes, gone: false, answer };
        self.opening.insert(region, opening);
        if let Err(DeviceJob::Open { region, .. }) =
            self.send(gpu, DeviceJob::Open { region, open })
            && let Some(opening) = self.opening.remove(&region)
        {
            (opening.answer)(Err(RegisterError::TierOff("the GPU is not in use".to_owned())));
        }
    }

    /// A region's opening ended. Returns what the catalog is to hear.
    pub(super) fn opened(
        &mut self,
        region: RegionId,
        result: Result<(), GpuError>,
    ) -> Option<Event> {
        let opening = self.opening.remove(&region)?;
        let Opening { session, gpu, places, block_bytes, gone, answer } = opening;
        match result {
            Ok(()) if gone => {
                // Not before the memory is let go of: whoever hears of it may free it.
                let answer = move || answer(Err(RegisterError::Limit(Limit::Sessions)));
                let dying = self.dying.entry(region).or_insert_with(|| (session, Vec::new()));
                dying.1.push(Box::new(answer));
                self.close_on(gpu, region);
                None
            }
            Ok(()) => {
                self.regions.insert(region, OpenedRegion { session, gpu });
                answer(Ok(region));
                Some(Event::RegionOpened { session, region, places, block_bytes, gpu: Some(gpu) })
            }
            Err(error) => {
                self.closed(region);
                answer(Err(match error {
                    GpuError::Lost(why) => RegisterError::TierOff(why),
                    busy @ (GpuError::OutOfMemory | GpuError::TooManyRegions(_)) => {
                        RegisterError::Busy(busy.to_string())
                    }
                    error => RegisterError::Refused(error.to_string()),
                }));
                None
            }
        }
    }

    /// The regions of a session are not to be used any more.
    pub(super) fn close_all(&mut self, session: SessionId) {
        for opening in self.opening.values_mut() {
            opening.gone |= opening.session == session;
        }
        let own = self.regions.iter().filter(|(_, found)| found.session == session);
        for id in own.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.close(session, id, None);
        }
    }

    /// A region is not to be used any more. `closed` is called when its memory is let go of, which
    /// can take as long as the driver likes; at once when the session has no such region.
    pub(super) fn close(&mut self, session: SessionId, region: RegionId, closed: Option<Closed>) {
        let opening = self.opening.get_mut(&region).filter(|opening| opening.session == session);
        let open = self.regions.get(&region).filter(|found| found.session == session);
        let open = open.map(|found| found.gpu);
        let dying = self.dying.get(&region).is_some_and(|(owner, _)| *owner == session);
        match (opening, open) {
            (Some(opening), _) => {
                opening.gone = true;
                self.dying.insert(region, (session, closed.into_iter().collect()));
            }
            (None, Some(gpu)) => {
                self.regions.remove(&region);
                self.dying.insert(region, (session, closed.into_iter().collect()));
                self.close_on(gpu, region);
            }
            (None, None) if dying => {
                if let Some((_, waiting)) = self.dying.get_mut(&region) {
                    waiting.extend(closed);
                }
            }
            (None, None) => closed.into_iter().for_each(|closed| closed()),
        }
    }

    fn close_on(&mut self, gpu: GpuId, region: RegionId) {
        if self.send(gpu, DeviceJob::Close { region }).is_err() {
            self.closed(region);
        }
    }

    /// A region's memory was let go of.
    pub(super) fn closed(&mut self, region: RegionId) {
        let waiting = self.dying.remove(&region).map(|(_, waiting)| waiting);
        for closed in waiting.unwrap_or_default() {
            closed();
        }
    }

    fn send(&mut self, gpu: GpuId, job: DeviceJob) -> Result<(), DeviceJob> {
        match self.edges.get_mut(usize::from(gpu.0)) {
            Some(edge) if edge.worker.is_some() => {
                edge.queues.entry(region_of(&job)).or_default().push_back(job);
                edge.flush();
                Ok(())
            }
            _ => Err(job),
        }
    }

    /// Hands the workers what they take.
    pub(super) fn flush(&mut self) {
        self.edges.iter_mut().for_each(Edge::flush);
    }

    /// An operation ended; if a GPU had it, its region may have another one there.
    pub(super) fn ended(&mut self, op: OpId) {
        for edge in &mut self.edges {
            edge.ended(op);
        }
    }

    /// Gathers a block from a region on a GPU.
    ///
    /// # Errors
    /// The operation's failure, when it cannot be begun.
    pub(super) fn gather(
        &mut self,
        op: OpId,
        from: Place,
        to: SlotPlace,
        descriptor: Box<Descriptor>,
    ) -> Result<(), OpError> {
        let bytes = descriptor.raw_bytes;
        let Place { gpu, region, place, after_event } = from;
        let to = match to {
            SlotPlace::Device(_, slot) => GatherTo::Pool(slot),
            SlotPlace::Host(slot) => {
                let guard = self.shared.writer(slot, bytes)?;
                self.land(gpu, op, Landing { slot, descriptor });
                GatherTo::Host(guard)
            }
        };
        let op = op.0;
        self.begin(gpu, DeviceJob::Gather { op, region, place, after_event, to, bytes })
    }

    /// Checksums a block in a region on a GPU.
    ///
    /// # Errors
    /// The operation's failure, when it cannot be begun.
    pub(super) fn compare(&mut self, op: OpId, at: Place, bytes: u32) -> Result<(), OpError> {
        let Place { gpu, region, place, after_event } = at;
        let op = op.0;
        self.begin(gpu, DeviceJob::Compare { op, region, place, after_event, bytes })
    }

    /// Verifies a block and scatters it into a region on a GPU.
    ///
    /// # Errors
    /// The operation's failure, when it cannot be begun; a host slot that does not hold the block.
    pub(super) fn scatter(
        &mut self,
        op: OpId,
        from: SlotPlace,
        through: Option<SlotId>,
        expect: &Expect,
        to: Place,
    ) -> Result<(), OpError> {
        let Place { gpu, region, place, after_event } = to;
        let bytes = expect.raw_bytes;
        let from = match from {
            SlotPlace::Device(_, slot) => ScatterFrom::Pool(slot),
            SlotPlace::Host(slot) => {
                check_slot(&self.shared, slot, expect)?;
                ScatterFrom::Host { slot: self.shared.reader(slot, bytes)?, through }
            }
        };
        let (op, expected) = (op.0, expect.raw_sum);
        let job = DeviceJob::Scatter { op, region, place, after_event, from, expected, bytes };
        self.begin(gpu, job)
    }

    /// Copies a block from a pool to a host slot.
    ///
    /// # Errors
    /// The operation's failure, when it cannot be begun.
    pub(super) fn demote(
        &mut self,
        op: OpId,
        gpu: GpuId,
        slot: SlotId,
        to: SlotId,
        descriptor: Box<Descriptor>,
    ) -> Result<(), OpError> {
        let bytes = descriptor.raw_bytes;
        let guard = self.shared.writer(to, bytes)?;
        self.land(gpu, op, Landing { slot: to, descriptor });
        self.begin(gpu, DeviceJob::Demote { op: op.0, slot, to: guard, bytes })
    }

    fn land(&self, gpu: GpuId, op: OpId, landing: Landing) {
        if let Some(edge) = self.edges.get(usize::from(gpu.0)) {
            let mut all = edge.landings.lock().unwrap_or_else(PoisonError::into_inner);
            all.insert(op.0, landing);
        }
    }

    fn begin(&mut self, gpu: GpuId, job: DeviceJob) -> Result<(), OpError> {
        self.send(gpu, job).map_err(|_| OpError::DeviceGone)
    }
}

/// A block's place in a region on a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) gpu: GpuId,
    pub(super) region: RegionId,
    pub(super) place: u32,
    pub(super) after_event: Option<u32>,
}

/// Takes a completion of a worker, on its thread.
pub(super) fn device_done(
    gpu: GpuId,
    done: DeviceDone,
    landings: &Landings,
    shared: &Shared,
    signals: &Sender<Signal>,
) {
    let landing = |op: u64| landings.lock().unwrap_or_else(PoisonError::into_inner).remove(&op);
    let signal = match done {
        DeviceDone::Opened { region, result } => Signal::GpuOpened { region, result },
        DeviceDone::Closed { region } => Signal::GpuClosed { region },
        DeviceDone::Gathered { op, result } => {
            let result = result.map_err(|error| op_error(&error));
            let result = match landing(op) {
                Some(Landing { slot, descriptor }) => result.and_then(|sum| {
                    let whole = Descriptor { raw_sum: sum, stored_sum: sum, ..*descriptor };
                    seal(shared, slot, whole).map(|()| sum)
                }),
                None => result,
            };
            Signal::Event(Event::Gathered { op: OpId(op), result })
        }
        DeviceDone::Compared { op, result } => {
            let result: Result<Sum128, OpError> = result.map_err(|error| op_error(&error));
            Signal::Event(Event::Compared { op: OpId(op), result })
        }
        DeviceDone::Scattered { op, result } => {
            let result = result.map_err(|error| op_error(&error));
            Signal::Event(Event::Scattered { op: OpId(op), result })
        }
        DeviceDone::Demoted { op, result } => {
            let result = result.map_err(|error| op_error(&error));
            let result = match landing(op) {
                Some(Landing { slot, descriptor }) => {
                    result.and_then(|()| seal(shared, slot, *descriptor))
                }
                None => Err(OpError::Device),
            };
            Signal::Event(Event::Demoted { op: OpId(op), result })
        }
        DeviceDone::Lost { error } => {
            tracing::error!(gpu = gpu.0, %error, "a GPU is lost; host RAM and nvme go on");
            Signal::Event(Event::DeviceLost { gpu, reason: OfflineReason::DeviceGone })
        }
    };
    drop(signals.send(signal));
}

fn op_error(error: &GpuError) -> OpError {
    match error {
        GpuError::Checksum => OpError::Checksum,
        GpuError::Lost(_) | GpuError::Ended => OpError::DeviceGone,
        GpuError::OutOfMemory | GpuError::Failed(_) => {
            tracing::warn!(%error, "a copy on a GPU failed");
            OpError::Device
        }
        GpuError::Region(_)
        | GpuError::Event
        | GpuError::Closed
        | GpuError::Place
        | GpuError::Length { .. }
        | GpuError::TooManyRegions(_) => OpError::Region,
    }
}
