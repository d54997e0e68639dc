//! Starting, using and stopping a node.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam::channel::{Sender, bounded, unbounded};

use super::conductor::{Ask, Conductor, Device, Reads, Signal};
use super::gpus::{self, Closed, DeviceFacts, GpuRegion, Gpus, RegisterError};
use super::host::{self, Kept};
use super::inbox::Inbox;
use super::pool::{Job, Pool, PoolSender, Shared};
use super::{NodeConfig, NodeReport, NvmeConfig, NvmeReport, RetireNamespace};
use crate::block::{GpuOrder, NamespaceId};
use crate::catalog::{
    Catalog, CatalogConfig, DeviceShape, Event, GpuId, Limit, Limits, NamespaceInfo, NvmeShape,
    OpError, OpId, Outcome, RegionId, Reply, Request, SessionId, TenantId, TicketId,
    WRITE_BYTES_IN_FLIGHT,
};
use crate::io::fault::{FaultCounters, FaultDevice};
use crate::io::{Arena, BlockDevice, OpenDevice, Region, RingStatus, open_device};
use crate::segment::{OpenStore, SegmentStore, StoreError, StoreWant};
use crate::tier::device::OpenRegion;
use crate::tier::nvme::{NvmeDone, NvmeError, NvmeOptions, NvmeWorker};

/// Requests that wait for the catalog at most; more are answered `Busy` at once.
const REQUESTS_MAX: usize = 4096;

/// Copies that come and go in one event and are told of at most.
const RESIDENCY_MAX: usize = 65_536;

/// How long a stop waits for a GPU.
const GPU_STOP: Duration = Duration::from_secs(5);

/// Called once for each ticket that ends, from any thread. Must not block, nor ask the node.
pub type Notify = Arc<dyn Fn(TicketId, Vec<Outcome>) + Send + Sync>;

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Host RAM is too small for one slab, or the arena could not be made.
    #[error("cannot get {bytes} bytes of host RAM: {source}; lower `host.bytes`")]
    Arena {
        /// How many.
        bytes: u64,
        /// Why.
        source: io::Error,
    },
    /// The store is too small for four segments, or its segment size is out of bounds.
    #[error(
        "a store of {bytes} bytes cannot be cut into four segments; raise `nvme.bytes`, \
         or set `nvme.segment_bytes` to a multiple of 1 MiB between 1 MiB and 1 GiB"
    )]
    Geometry {
        /// Bytes of the store.
        bytes: u64,
    },
    /// An nvme tier smaller than host RAM would only be written in circles.
    #[error(
        "the nvme tier has {nvme_bytes} bytes, less than host RAM with {host_bytes}; \
         raise `nvme.bytes`, lower `host.bytes`, or set `nvme.enabled = false`"
    )]
    NvmeBelowHost {
        /// Bytes of the store.
        nvme_bytes: u64,
        /// Bytes of the arena.
        host_bytes: u64,
    },
    /// The store could not be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The device could not be opened, or a thread could not be started.
    #[error("cannot start the {what}: {source}")]
    Io {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// What a stop achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopReport {
    /// Whether the store was marked as cleanly closed.
    pub clean: bool,
}

/// A running node. Dropping it without [`Node::stop`] is like a crash, but for the memory.
pub struct Node {
    handle: NodeHandle,
    conductor: JoinHandle<Option<(Option<Device>, Gpus)>>,
    pool: Pool,
    shared: Arc<Shared>,
}

/// What the parts of a daemon use a node by.
#[derive(Clone)]
pub struct NodeHandle(Arc<Handle>);

struct Handle {
    inbox: Arc<Inbox>,
    limits: Limits,
    next_session: AtomicU64,
    next_region: AtomicU64,
    /// Regions of each session.
    sessions: Mutex<HashMap<SessionId, HashMap<RegionId, Registration>>>,
    arena: Arc<Arena>,
    kept: Kept,
    copy_threads: usize,
    nvme: Option<NvmeFacts>,
    devices: Vec<DeviceFacts>,
    devices_off: Option<String>,
}

/// A region of a session.
#[derive(Clone)]
enum Registration {
    Host(Arc<Region>),
    /// Held by the GPU's worker.
    Gpu,
}

struct NvmeFacts {
    report: NvmeReport,
    status: Arc<RingStatus>,
    faults: Option<Arc<FaultCounters>>,
}

pub(super) struct OpenedNvme {
    shape: NvmeShape,
    open: OpenStore,
    status: Arc<RingStatus>,
    started: Instant,
}

impl Node {
    /// Starts a node: makes the arena, opens and recovers the store, starts the threads.
    /// `generation` says which generation of a namespace is alive; blocks of others are left out.
    ///
    /// # Errors
    /// Memory, the store or a thread could not be had.
    pub fn start(
        config: NodeConfig,
        generation: impl Fn(NamespaceId) -> Option<u32>,
    ) -> Result<Node, StartError> {
        check_sizes(&config)?;
        let (chosen, devices_off) = gpus::choose(&config.devices);
        let mut config = NodeConfig { devices: chosen, ..config };
        let (arena, kept) = host::open_arena(&mut config.host)?;
        let open = |nvme| open_store(nvme, &generation);
        let mut opened = config.nvme.as_ref().map(open).transpose()?;
        let mut catalog = Catalog::new(catalog_config(&config, arena.bytes(), opened.as_ref()));
        let recovered_blocks = recover(&mut catalog, opened.as_mut());
        let kept = host::adopt(&mut catalog, &arena, kept, &generation);
        if config.follow.is_some() {
            catalog.follow_residency(RESIDENCY_MAX);
        }

        let shared = shared_by_all(&arena, config.retire.clone());
        let (asks, ask_source) = bounded(REQUESTS_MAX);
        // As many signals as operations, sessions and regions may be under way: all are limited.
        let (signals, signal_source) = unbounded();
        let jobs_max = config.limits.blocks_in_flight + REQUESTS_MAX;
        let inbox = Arc::new(Inbox::new(asks, signals.clone()));
        let to_catalog = Arc::clone(&inbox);
        let done = move |event| to_catalog.completed(event);
        let pool = Pool::start(config.copy_threads, jobs_max, &shared, done)
            .map_err(|source| StartError::Io { what: "copy threads", source })?;
        let wiring = Wiring { arena: &arena, signals: &signals, pool: pool.sender() };
        let start = |(opened, nvme)| start_device(opened, nvme, recovered_blocks, wiring, &shared);
        let (device, facts) = opened.zip(config.nvme.as_ref()).map(start).transpose()?.unzip();
        let (gpus, devices) = gpus::start(&config.devices, &shared, &signals);
        let reaper = start_reaper()?;
        let conductor = Conductor {
            catalog,
            started: Instant::now(),
            asks: ask_source.clone(),
            signals: signal_source.clone(),
            refused: Vec::new(),
            pool: pool.sender(),
            shared: Arc::clone(&shared),
            device,
            gpus,
            answers: HashMap::new(),
            next_ask: 0,
            sessions: HashMap::new(),
            regions: HashMap::new(),
            backlog: VecDeque::new(),
            follow: config.follow.clone(),
            reaper,
            last_tick: Instant::now(),
            stopping: false,
        };
        let theirs = Arc::clone(&inbox);
        let conductor = start_catalog(move || theirs.run(conductor, &ask_source, &signal_source))?;
        let handle = NodeHandle(Arc::new(Handle {
            inbox,
            limits: config.limits,
            next_session: AtomicU64::new(0),
            next_region: AtomicU64::new(0),
            sessions: Mutex::default(),
            arena,
            kept,
            copy_threads: config.copy_threads.max(1),
            nvme: facts,
            devices,
            devices_off,
        }));
        Ok(Node { handle, conductor, pool, shared })
    }

    /// A handle for the parts that use the node.
    pub fn handle(&self) -> NodeHandle {
        self.handle.clone()
    }

    /// Stops: what is under way ends, descriptors are committed, the store is marked clean. Dirty
    /// blocks are lost unless a drain came first. Blocks.
    pub fn stop(self) -> StopReport {
        self.handle.0.inbox.signal(Signal::Stop);
        let (device, gpus) = match self.conductor.join() {
            Ok(Some((device, gpus))) => (device, gpus.into_workers()),
            Ok(None) | Err(_) => {
                tracing::error!("the catalog's thread panicked");
                (None, Vec::new())
            }
        };
        for worker in gpus {
            // A report that is being made may hold it for a moment; then its last holder stops it.
            if let Some(worker) = Arc::into_inner(worker) {
                worker.stop(GPU_STOP);
            }
        }
        let had_device = device.is_some();
        if let Some(device) = device {
            device.worker.stop();
        }
        self.pool.stop();
        let mut store = self.shared.store.lock().unwrap_or_else(PoisonError::into_inner);
        let clean = match store.as_mut().filter(|_| had_device).map(SegmentStore::mark_clean) {
            None => !had_device,
            Some(Ok(())) => true,
            Some(Err(error)) => {
                tracing::error!(%error, "cannot mark the store as cleanly closed");
                false
            }
        };
        StopReport { clean }
    }
}

pub(super) fn shared_by_all(arena: &Arc<Arena>, retire: Option<RetireNamespace>) -> Arc<Shared> {
    Arc::new(Shared {
        arena: Arc::clone(arena),
        salt: arena.salt(),
        encoded: Mutex::default(),
        store: Mutex::new(None),
        retire,
    })
}

/// Tells the catalog what the store holds; answers how many blocks that is.
fn recover(catalog: &mut Catalog, opened: Option<&mut OpenedNvme>) -> u64 {
    let recovered = opened.into_iter().flat_map(|opened| opened.open.recovered.drain(..));
    recovered
        .map(|segment| {
            catalog.recover(segment.segment, segment.sequence, &segment.descriptors);
            segment.descriptors.len() as u64
        })
        .sum()
}

fn check_sizes(config: &NodeConfig) -> Result<(), StartError> {
    match &config.nvme {
        Some(nvme) if nvme.bytes < config.host.bytes => {
            let (nvme_bytes, host_bytes) = (nvme.bytes, config.host.bytes);
            Err(StartError::NvmeBelowHost { nvme_bytes, host_bytes })
        }
        _ => Ok(()),
    }
}

fn start_catalog<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, StartError> {
    let thread = std::thread::Builder::new().name("kvtide-catalog".into()).spawn(run);
    thread.map_err(|source| StartError::Io { what: "catalog thread", source })
}

/// Starts the thread that unmaps regions. As many wait as there are regions.
fn start_reaper() -> Result<Sender<Arc<Region>>, StartError> {
    let (reaper, dead) = unbounded::<Arc<Region>>();
    std::thread::Builder::new()
        .name("kvtide-reaper".into())
        .spawn(move || dead.into_iter().for_each(drop))
        .map_err(|source| StartError::Io { what: "reaper thread", source })?;
    Ok(reaper)
}

fn open_store(
    nvme: &NvmeConfig,
    generation: impl Fn(NamespaceId) -> Option<u32>,
) -> Result<OpenedNvme, StartError> {
    let started = Instant::now();
    let geometry = nvme.geometry().ok_or(StartError::Geometry { bytes: nvme.bytes })?;
    let open = SegmentStore::open(&nvme.file, &StoreWant::new(geometry), generation)?;
    let shape = NvmeShape {
        geometry: open.geometry,
        epoch: open.epoch,
        quarantined: open.quarantined.clone(),
        write_bytes_in_flight: WRITE_BYTES_IN_FLIGHT,
        reads_in_flight: 64,
        clean_segments: 4,
        reinsert_percent: 25,
        write_bytes_per_day: nvme.write_bytes_per_day,
    };
    Ok(OpenedNvme { shape, open, status: RingStatus::new(), started })
}

pub(super) fn catalog_config(
    config: &NodeConfig,
    bytes: u64,
    nvme: Option<&OpenedNvme>,
) -> CatalogConfig {
    CatalogConfig {
        host_bytes: bytes,
        slab_bytes: config.host.slab(),
        host_policy: config.host.policy,
        device_policy: config.device_policy,
        weigh_cost: config.weigh_cost,
        devices: config
            .devices
            .iter()
            .map(|device| DeviceShape::of(device.pool_bytes, config.host.slab()))
            .collect(),
        nvme: nvme.map(|opened| opened.shape.clone()),
        quotas: config.quotas.clone(),
        limits: config.limits,
        arbiter: config.arbiter,
        prefill: config.prefill.clone(),
        copy_threads: u32::try_from(config.copy_threads).unwrap_or(u32::MAX),
        clean_percent: config.clean_percent,
        idle_ms: config.idle_ms,
        trace_order: false,
        epoch_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        hash_seed: random_u64(),
    }
}

/// What is to be opened of a region in GPU memory.
fn opening(region: GpuRegion) -> OpenRegion {
    let events = match region.order {
        GpuOrder::EngineSynchronizes => Vec::new(),
        GpuOrder::Events { handles } => handles,
    };
    OpenRegion { memory: region.memory, bytes: region.bytes, layout: region.layout, events }
}

/// What the device's completions go to.
struct Wiring<'a> {
    arena: &'a Arc<Arena>,
    signals: &'a Sender<Signal>,
    pool: PoolSender,
}

fn start_device(
    opened: OpenedNvme,
    nvme: &NvmeConfig,
    recovered_blocks: u64,
    wiring: Wiring<'_>,
    shared: &Shared,
) -> Result<(Device, NvmeFacts), StartError> {
    let OpenedNvme { open, status, started, .. } = opened;
    let faults = nvme.fault.as_ref().map(|_| Arc::new(FaultCounters::default()));
    let reads: Reads = Arc::default();
    let open_it = {
        let what = OpenDevice {
            file: open.file,
            arena: Some(Arc::clone(wiring.arena)),
            choice: nvme.ring,
            queue_depth: nvme.queue_depth,
        };
        let (status, fault) = (Arc::clone(&status), nvme.fault.clone().zip(faults.clone()));
        let wrap = nvme.wrap.clone();
        move || -> io::Result<Box<dyn BlockDevice>> {
            let mut device = open_device(what, &status)?;
            if let Some(wrap) = wrap {
                device = (wrap.0)(device);
            }
            Ok(match fault {
                Some((config, counters)) => Box::new(FaultDevice::new(device, config, counters)),
                None => device,
            })
        }
    };
    let done = {
        let (signals, reads, pool) = (wiring.signals.clone(), Arc::clone(&reads), wiring.pool);
        Box::new(move |done| device_done(done, &signals, &reads, &pool))
    };
    let options = NvmeOptions { jobs_max: 16_384, ..NvmeOptions::default() };
    let worker = NvmeWorker::start(open_it, open.geometry, open.salt, options, done)
        .map_err(|source| StartError::Io { what: "nvme worker", source })?;
    let report = NvmeReport {
        file: nvme.file.clone(),
        geometry: open.geometry,
        epoch: open.epoch,
        direct: open.direct,
        ring: status.report(),
        recovery: super::describe(&open.report),
        recovered_blocks,
        recovery_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        faults: None,
    };
    *shared.store.lock().unwrap_or_else(PoisonError::into_inner) = Some(open.store);
    let device = Device { worker, geometry: open.geometry, salt: open.salt, reads };
    Ok((device, NvmeFacts { report, status, faults }))
}

/// Takes a completion of the nvme worker, on its thread.
fn device_done(done: NvmeDone, signals: &Sender<Signal>, reads: &Reads, pool: &PoolSender) {
    let event = match done {
        NvmeDone::Read { op, buffer, result } => {
            let context = reads.lock().unwrap_or_else(PoisonError::into_inner).remove(&op);
            let failed = |error| Event::Read { op: OpId(op), result: Err(error) };
            match (result, context, buffer) {
                (Ok(()), Some(read), Some(buffer)) => {
                    let job = Job::Verify { op: OpId(op), read, buffer };
                    match pool.send(job) {
                        Ok(()) => return,
                        Err(_) => failed(OpError::Device),
                    }
                }
                (Err(error), ..) => failed(op_error(error)),
                _ => failed(OpError::Device),
            }
        }
        NvmeDone::Written { op, result } => {
            if let Err(error) = &result {
                tracing::debug!(op, %error, "a write to nvme failed");
            }
            Event::Written { op: OpId(op), result: result.map_err(op_error) }
        }
        // A segment that was voided, not opened. It is tried again when it is opened.
        NvmeDone::Opened { segment, sequence: 0, result } => {
            if let Err(error) = result {
                tracing::warn!(segment, %error, "cannot void the header of an empty segment");
            }
            return;
        }
        NvmeDone::Opened { segment, result, .. } => {
            if let Err(error) = &result {
                tracing::warn!(segment, %error, "cannot write a segment's header");
            }
            Event::SegmentOpened { segment, result: result.map_err(op_error) }
        }
        NvmeDone::CommitFailed { segment, failure } => {
            tracing::warn!(segment, %failure, "cannot commit descriptors: a restart may miss some");
            let error = op_error(NvmeError::Device(failure));
            Event::CommitFailed { segment, error }
        }
        NvmeDone::Erased { segment, sequence, index, result } => {
            if let Err(error) = &result {
                tracing::warn!(segment, index, %error, "cannot erase a descriptor");
            }
            Event::Erased { segment, sequence, index, result: result.map_err(op_error) }
        }
        NvmeDone::Gone { why } => {
            tracing::error!(why, "the nvme device is gone");
            Event::CommitFailed { segment: 0, error: OpError::DeviceGone }
        }
        NvmeDone::Synced { op, result } => {
            if let Err(error) = &result {
                tracing::warn!(%error, "cannot make all that was written to nvme durable");
            }
            Event::Synced { op: OpId(op), result: result.map_err(op_error) }
        }
        NvmeDone::Sealed { .. } => return,
    };
    drop(signals.send(Signal::Event(event)));
}

fn op_error(error: NvmeError) -> OpError {
    if error.is_device_gone() { OpError::DeviceGone } else { OpError::Device }
}

fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    if let Err(error) = getrandom::fill(&mut bytes) {
        tracing::warn!(%error, "no randomness from the kernel; the clock seeds instead");
        return SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64);
    }
    u64::from_le_bytes(bytes)
}

impl NodeHandle {
    /// Makes a namespace known, or raises its generation.
    pub fn add_namespace(&self, info: NamespaceInfo) {
        self.signal(Signal::Event(Event::Namespace(info)));
    }

    /// A client connected. `notify` is called once for each of its tickets that ends.
    ///
    /// # Errors
    /// Too many sessions.
    pub fn open_session(&self, tenant: TenantId, notify: Notify) -> Result<SessionId, Limit> {
        let session = SessionId(1 + self.0.next_session.fetch_add(1, Ordering::Relaxed));
        let mut sessions = self.sessions();
        if sessions.len() >= self.0.limits.sessions {
            return Err(Limit::Sessions);
        }
        sessions.insert(session, HashMap::new());
        // Under the lock, so that the catalog hears of things in the order in which they were done.
        self.signal(Signal::OpenSession { session, tenant, notify });
        Ok(session)
    }

    /// A client is gone: leases, regions and tickets end. When this returns, nothing copies from
    /// or to its regions any more. Blocks for the copy of a block at most.
    pub fn close_session(&self, session: SessionId) {
        let regions = {
            let mut sessions = self.sessions();
            let Some(regions) = sessions.remove(&session) else {
                return;
            };
            self.signal(Signal::CloseSession { session });
            regions
        };
        for region in regions.into_values() {
            if let Registration::Host(region) = region {
                region.close();
            }
        }
    }

    /// Registers a region of a session.
    ///
    /// # Errors
    /// Too many regions, or the session is gone.
    pub fn register_region(&self, session: SessionId, memory: Region) -> Result<RegionId, Limit> {
        let mut sessions = self.sessions();
        let regions = sessions.get_mut(&session).ok_or(Limit::Sessions)?;
        if regions.len() >= self.0.limits.regions_per_session {
            return Err(Limit::Regions);
        }
        let region = RegionId(1 + self.0.next_region.fetch_add(1, Ordering::Relaxed));
        let memory = Arc::new(memory);
        regions.insert(region, Registration::Host(Arc::clone(&memory)));
        self.signal(Signal::OpenRegion { session, region, memory });
        Ok(region)
    }

    /// Registers a region in GPU memory, whose layout the caller has checked (it is checked again
    /// by the GPU's worker). `answer` is called exactly once, from any thread, when the
    /// GPU has opened it; that can take as long as its driver likes.
    pub fn register_gpu_region(
        &self,
        session: SessionId,
        region: GpuRegion,
        answer: impl FnOnce(Result<RegionId, RegisterError>) + Send + 'static,
    ) {
        match self.admit_gpu_region(session, &region) {
            Ok((gpu, id)) => {
                let handle = self.clone();
                let answer = Box::new(move |result: Result<RegionId, RegisterError>| {
                    if result.is_err() {
                        handle.sessions().get_mut(&session).map(|all| all.remove(&id));
                    }
                    answer(result);
                });
                let open = Box::new(opening(region));
                self.signal(Signal::OpenGpuRegion { session, region: id, gpu, open, answer });
            }
            Err(error) => answer(Err(error)),
        }
    }

    fn admit_gpu_region(
        &self,
        session: SessionId,
        region: &GpuRegion,
    ) -> Result<(GpuId, RegionId), RegisterError> {
        let devices = &self.0.devices;
        let at = devices.iter().position(|found| found.uuid() == Some(region.gpu));
        let Some((at, facts)) = at.and_then(|at| Some((at, devices.get(at)?))) else {
            let known = devices.iter().filter_map(DeviceFacts::uuid).collect();
            return Err(RegisterError::NoSuchGpu { known });
        };
        if let Some(why) = facts.off() {
            return Err(RegisterError::TierOff(why));
        }
        // What an engine in a restart loop sends must not pile up behind a call that hangs.
        if let Some(why) = facts.stuck() {
            return Err(RegisterError::Busy(why));
        }
        let mut sessions = self.sessions();
        let regions = sessions.get_mut(&session).ok_or(RegisterError::Limit(Limit::Sessions))?;
        if regions.len() >= self.0.limits.regions_per_session {
            return Err(RegisterError::Limit(Limit::Regions));
        }
        let id = RegionId(1 + self.0.next_region.fetch_add(1, Ordering::Relaxed));
        regions.insert(id, Registration::Gpu);
        Ok((GpuId(u8::try_from(at).unwrap_or(u8::MAX)), id))
    }

    /// Ends a region of a session. When this returns, nothing copies from or to it any more, if it
    /// is in host memory. Blocks for the copy of a block at most.
    pub fn unregister_region(&self, session: SessionId, region: RegionId) {
        if let Some(Registration::Host(memory)) = self.close_region(session, region, None) {
            memory.close();
        }
    }

    /// Ends a region in GPU memory. `closed` is called exactly once, from any thread, when the GPU
    /// has let go of the memory and its owner may free it; at once when there is no such region.
    /// While the driver hangs in that, it is not called.
    pub fn unregister_gpu_region(
        &self,
        session: SessionId,
        region: RegionId,
        closed: impl FnOnce() + Send + 'static,
    ) {
        self.close_region(session, region, Some(Box::new(closed)));
    }

    fn close_region(
        &self,
        session: SessionId,
        region: RegionId,
        closed: Option<Closed>,
    ) -> Option<Registration> {
        let mut sessions = self.sessions();
        let found = sessions.get_mut(&session).and_then(|all| all.remove(&region));
        // Under the lock, so that the catalog hears of things in the order in which they were done.
        // One that is not there (any more) may be on its way out: its end is waited for as well.
        self.signal(Signal::CloseRegion { session, region, closed });
        found
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<SessionId, HashMap<RegionId, Registration>>> {
        self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the catalog's thread lives. Once it does not, all is answered `Busy`, and the
    /// process had better be started anew.
    pub fn is_alive(&self) -> bool {
        self.0.inbox.is_alive()
    }

    /// Asks the catalog. `answer` is called exactly once, on this or another thread, where it must
    /// not block, nor ask; with `Busy` when too many requests wait.
    pub fn ask(
        &self,
        session: SessionId,
        request: Request,
        answer: impl FnOnce(Reply) + Send + 'static,
    ) {
        self.0.inbox.ask(Ask { session, request, answer: Box::new(answer) });
    }

    /// What a next daemon needs to take the arena over; `None` when it is private memory.
    pub fn arena_files(&self) -> Option<(BorrowedFd<'_>, BorrowedFd<'_>)> {
        self.0.arena.files()
    }

    /// What the node got from the machine and found in its store.
    pub fn report(&self) -> NodeReport {
        let arena = &self.0.arena;
        NodeReport {
            host_bytes: arena.bytes(),
            slab_bytes: arena.slab_bytes(),
            pages: arena.pages(),
            pages_why: arena.pages_why().to_owned(),
            touched_bytes: arena.touched_bytes(),
            can_be_kept: arena.files().is_some(),
            kept: self.0.kept.clone(),
            copy_threads: self.0.copy_threads,
            nvme: self.0.nvme.as_ref().map(|facts| NvmeReport {
                ring: facts.status.report(),
                faults: facts.faults.as_ref().map(|faults| faults.counts()),
                ..facts.report.clone()
            }),
            devices: self.0.devices.iter().map(DeviceFacts::report).collect(),
            devices_off: self.0.devices_off.clone(),
        }
    }

    /// The host arena, for tests that damage it behind the catalog's back.
    #[doc(hidden)]
    pub fn arena_for_tests(&self) -> &Arc<Arena> {
        &self.0.arena
    }

    fn signal(&self, signal: Signal) {
        self.0.inbox.signal(signal);
    }
}
