//! The device tier's worker: one thread that owns one GPU and carries out copies between regions,
//! the GPU's pool and host slots; one that closes mappings, which can hang; and one that watches
//! whether the first is stuck in the driver.
//!
//! The worker knows how to move bytes and how to verify them; which block lies in which slot is the
//! catalog's business.
//!
//! Invariants:
//! 1. Every job taken is answered exactly once, also when the GPU is lost, a thread panics, or a
//!    call of the driver never returns: past [`DeviceOptions::call_timeout`] the GPU is taken for
//!    lost. Until then [`DeviceWorker::health`] says so, and the owner's calls return at once.
//!    There are two exceptions. Closing a mapping may take as long as the driver likes. And:
//! 2. A batch under way when the GPU is lost without proof is never answered, nor is a `Close` of
//!    its region: the GPU may still be writing to the places and slots of the batch, and an answer
//!    would let somebody reuse them. The only proof that it has stopped is the driver's own word
//!    that the context is dead; a batch that does not end, a call that does not return, a panic,
//!    and a stop that runs out of time are none. With proof everything is answered.
//! 3. A region's mapping is closed after the last batch that uses it has ended, and no job of it
//!    starts once [`DeviceJob::Close`] was taken.
//! 4. A host slot's guard is let go of only after the batch that uses it has ended, or after the
//!    driver has said that the whole context is dead; and always in front of the job's answer. When
//!    neither is ever seen, the guard is leaked, and there is no answer: the slot cannot be
//!    borrowed again until a restart.
//! 5. Jobs taken and not yet answered, batches under way, and regions are bounded by
//!    [`DeviceOptions`].
//! 6. Regions take turns, so that a client with much to do does not hold up the others.
//!
//! The states of a region:
//! ```text
//! Open -> opened -> Close -> (its jobs end) -> closing (reaper) -> Closed
//!     \-> refused, forgotten
//! ```

mod answers;
#[cfg(feature = "cuda")]
pub mod cuda;
mod gpu;
mod memory;
mod reaper;
mod watch;
mod work;
mod worker;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, Sender};

pub use gpu::{
    BATCH_MOVES_MAX, Batch, BatchDone, BatchId, Closing, DemoteMove, GatherMove, Gpu, GpuError,
    GpuInfo, GpuRegion, MoveTo, OpenMemory, OpenRegion, RegionShape, ScatterFrom, ScatterMove,
    Surrendered, check_lent, check_slot,
};
pub use memory::{MemoryGpu, MemoryGpuControl, MemoryGpuOptions};

use answers::{Answers, Ticket};
use watch::{Farewell, Watch};

use crate::block::Sum128;
use crate::catalog::{RegionId, SlotId};
use crate::io::SlotWrite;

/// How much longer than the threads the owner waits, so that it hears what they decided.
const STOP_GRACE: Duration = Duration::from_millis(200);

/// The limits of a worker.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Most jobs taken and not yet answered. Default: 4096.
    pub jobs_max: usize,
    /// Most batches under way; the GPU may allow fewer. Default: 4.
    pub batches_max: usize,
    /// Most regions, those being closed included. Default: 1024.
    pub regions_max: usize,
    /// How long a job waits for the engine's event before it fails. Default: 5 s.
    pub event_timeout: Duration,
    /// How long a batch may take before the GPU is taken for lost. Default: 30 s.
    pub batch_timeout: Duration,
    /// How long one call of the driver may take before the GPU is taken for lost. Default: 30 s.
    pub call_timeout: Duration,
    /// How long the start waits for the GPU to be opened. Default: 180 s; better
    /// [`open_timeout_of`](DeviceOptions::open_timeout_of) the arena.
    pub open_timeout: Duration,
    /// How long dropping the worker waits for its threads. Default: 5 s.
    pub stop_timeout: Duration,
}

impl DeviceOptions {
    /// How long opening a GPU may take with so large an arena: 60 s, and 1 s per GiB. Registering
    /// takes about 0.1 s per GiB, and pages that were never touched are faulted in.
    pub fn open_timeout_of(arena_bytes: u64) -> Duration {
        Duration::from_secs(60 + arena_bytes.div_ceil(1 << 30))
    }
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions {
            jobs_max: 4096,
            batches_max: 4,
            regions_max: 1024,
            event_timeout: Duration::from_secs(5),
            batch_timeout: Duration::from_secs(30),
            call_timeout: Duration::from_secs(30),
            open_timeout: Duration::from_secs(180),
            stop_timeout: Duration::from_secs(5),
        }
    }
}

/// What the worker is to do. Each is answered by one [`DeviceDone`], but for those that may be
/// under way on a GPU that was lost without proof: see the invariants of this module.
#[derive(Debug)]
pub enum DeviceJob {
    /// Make a client's GPU memory usable.
    Open {
        /// Its number, which is not open already.
        region: RegionId,
        /// What it is.
        open: Box<OpenRegion>,
    },
    /// Refuse further jobs of a region, and close its mapping when those taken have ended.
    Close {
        /// The region. One that is not open is answered at once.
        region: RegionId,
    },
    /// Copy a block out of a region.
    Gather {
        /// The caller's number.
        op: u64,
        /// The region.
        region: RegionId,
        /// The block's place in it.
        place: u32,
        /// The event of the region's ring to wait for.
        after_event: Option<u32>,
        /// Where the block goes.
        to: GatherTo,
        /// Its bytes.
        bytes: u32,
    },
    /// Compute the checksum of a block of a region, without keeping a copy.
    Compare {
        /// The caller's number.
        op: u64,
        /// The region.
        region: RegionId,
        /// The block's place in it.
        place: u32,
        /// The event of the region's ring to wait for.
        after_event: Option<u32>,
        /// Its bytes.
        bytes: u32,
    },
    /// Verify a block and copy it into a region.
    Scatter {
        /// The caller's number.
        op: u64,
        /// The region.
        region: RegionId,
        /// The place that receives the block.
        place: u32,
        /// The event of the region's ring to wait for.
        after_event: Option<u32>,
        /// Where the block comes from.
        from: ScatterFrom,
        /// What the checksum of its bytes must be.
        expected: Sum128,
        /// Its bytes.
        bytes: u32,
    },
    /// Copy a block from the pool to a host slot. Its checksum is checked whenever it leaves that.
    Demote {
        /// The caller's number.
        op: u64,
        /// The slot of the pool.
        slot: SlotId,
        /// The host slot, which lends exactly `bytes`.
        to: SlotWrite,
        /// The block's bytes.
        bytes: u32,
    },
}

/// Where a gathered block goes.
#[derive(Debug)]
pub enum GatherTo {
    /// A slot of the GPU's pool.
    Pool(SlotId),
    /// A host slot, which lends exactly the block's bytes.
    Host(SlotWrite),
}

/// What became of a job. The guards of host slots that the job had are gone (see invariant 4).
#[derive(Debug)]
pub enum DeviceDone {
    /// Of `Open`.
    Opened {
        /// The region.
        region: RegionId,
        /// Whether it can be used.
        result: Result<(), GpuError>,
    },
    /// Of `Close`: the mapping is closed, or was given up with the GPU, and nothing of ours touches
    /// the memory any more. While the driver hangs in closing it, there is no answer, but for that
    /// of a worker that is stopped.
    Closed {
        /// The region.
        region: RegionId,
    },
    /// Of `Gather`.
    Gathered {
        /// The caller's number.
        op: u64,
        /// The checksum of the copy.
        result: Result<Sum128, GpuError>,
    },
    /// Of `Compare`.
    Compared {
        /// The caller's number.
        op: u64,
        /// The checksum of the block as it was.
        result: Result<Sum128, GpuError>,
    },
    /// Of `Scatter`.
    Scattered {
        /// The caller's number.
        op: u64,
        /// Whether the block was verified and is in its place.
        result: Result<(), GpuError>,
    },
    /// Of `Demote`.
    Demoted {
        /// The caller's number.
        op: u64,
        /// Whether the host slot has the bytes.
        result: Result<(), GpuError>,
    },
    /// The GPU can no longer be used, or the worker died. Every job, taken or to come, fails, but
    /// for those that may still be under way, which are not answered.
    /// Belongs to no job, and comes once, in front of the failures.
    Lost {
        /// Why.
        error: GpuError,
    },
}

/// How a worker is, readable while its threads are stuck.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceHealth {
    /// Since when the owner thread has been inside one call of the driver; `None` between calls.
    pub busy_since: Option<Instant>,
    /// Mappings handed to the reaper thread and not yet closed.
    pub closing: usize,
    /// Since when the oldest of them is.
    pub closing_since: Option<Instant>,
    /// Why the GPU was given up, if it was.
    pub lost: Option<String>,
    /// Regions open or being closed.
    pub regions: usize,
    /// Batches under way.
    pub batches: usize,
    /// Since when the oldest of them is.
    pub batch_since: Option<Instant>,
}

/// What the worker's owner and its threads share.
#[derive(Debug)]
struct Shared {
    answers: Answers,
    state: Mutex<State>,
}

/// Held for a few instructions at a time, never during a call of the driver.
#[derive(Debug, Default)]
struct State {
    health: DeviceHealth,
    /// Why the GPU was given up, by whichever thread did so first.
    lost: Option<GpuError>,
    /// When each mapping was handed to the reaper thread, in that order.
    closing: VecDeque<Instant>,
    /// Until when a stop waits.
    stop_by: Option<Instant>,
    /// The stop was orderly: every mapping is closed and the pool is freed.
    stopped: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why there is no device tier, in one line that says what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceOff {
    /// Built without the feature `cuda`.
    #[error("this build has no CUDA support; build with the feature `cuda`")]
    NotBuilt,
    /// No driver, one that is too old, a stub, or no GPU.
    #[error("{0}")]
    Unavailable(String),
    /// The driver is there and fails.
    #[error("the CUDA driver does not say what GPUs there are: {0}")]
    Driver(String),
}

/// The GPUs that this process can use; pools and staging memory are 0 bytes. `library` is the
/// driver's library where it is not to be searched for. Starts the driver, so it may take seconds.
///
/// # Errors
/// Why there is none.
pub fn probe(library: Option<&Path>) -> Result<Vec<GpuInfo>, DeviceOff> {
    #[cfg(feature = "cuda")]
    return cuda::probe(library);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = library;
        Err(DeviceOff::NotBuilt)
    }
}

/// The owner's end of a worker. Dropping it stops the worker.
pub struct DeviceWorker {
    info: GpuInfo,
    /// `None` only while stopping.
    jobs: Option<Sender<(Ticket, DeviceJob)>>,
    jobs_max: usize,
    shared: Arc<Shared>,
    watch: Sender<Farewell>,
    /// Disconnected when the watch's thread has ended.
    watched: Receiver<()>,
    stop_timeout: Duration,
    /// Disconnected when the owner thread has ended.
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for DeviceWorker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "DeviceWorker({}, {})", self.info.uuid, self.info.name)
    }
}

impl DeviceWorker {
    /// Starts the threads, opens the GPU on the owner thread with `gpu`, and returns once that is
    /// done, or at the latest after [`DeviceOptions::open_timeout`]. `done` is called on one of the
    /// worker's threads at a time (or on the one that stops it) and must not block.
    ///
    /// # Errors
    /// Those of `gpu`, and [`GpuError::Failed`] when no thread can be started or the GPU is not
    /// open in time.
    pub fn start(
        gpu: impl FnOnce() -> Result<Box<dyn Gpu>, GpuError> + Send + 'static,
        options: DeviceOptions,
        done: impl FnMut(DeviceDone) + Send + 'static,
    ) -> Result<DeviceWorker, GpuError> {
        let jobs_max = options.jobs_max.max(1);
        let (jobs, job_source) = channel::bounded(jobs_max);
        let (started, start) = channel::bounded(1);
        let (alive, ended) = channel::bounded::<()>(0);
        let answers = Answers::new(Box::new(done));
        let shared = Arc::new(Shared { answers, state: Mutex::default() });
        let watch = Watch {
            shared: Arc::clone(&shared),
            jobs: job_source.clone(),
            call_timeout: options.call_timeout,
        };
        let (farewell, farewells) = channel::bounded(1);
        let (watching, watched) = channel::bounded::<()>(0);
        let theirs = Arc::clone(&shared);
        let (open_timeout, stop_timeout) = (options.open_timeout, options.stop_timeout);
        let work = move || {
            let _alive = alive;
            let gpu = match gpu() {
                Ok(gpu) => gpu,
                Err(error) => return drop(started.send(Err(error))),
            };
            let reaper = match reaper::Reaper::start(&theirs, options.regions_max) {
                Ok(reaper) => reaper,
                Err(error) => return drop(started.send(Err(no_thread(&error)))),
            };
            if started.send(Ok(gpu.info().clone())).is_ok() {
                worker::run(gpu, reaper, options, job_source, theirs);
            }
        };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let builder = std::thread::Builder::new().name(name.to_owned());
            builder.spawn(work).map_err(|error| no_thread(&error))
        };
        let thread = spawn("kvtide-gpu", Box::new(work))?;
        let info = wait_for_start(&start, open_timeout)?;
        let look = move || {
            let _watching = watching;
            watch.run(&farewells);
        };
        spawn("kvtide-gpu-watch", Box::new(look))?;
        let (jobs, thread, watch) = (Some(jobs), Some(thread), farewell);
        Ok(DeviceWorker {
            info,
            jobs,
            jobs_max,
            shared,
            watch,
            watched,
            stop_timeout,
            ended,
            thread,
        })
    }

    /// What is known of the GPU.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// Takes a job. Never blocks, whatever the GPU does.
    ///
    /// # Errors
    /// Gives the job back when [`DeviceOptions::jobs_max`] are not yet answered.
    pub fn try_send(&self, job: DeviceJob) -> Result<(), DeviceJob> {
        let Some(jobs) = &self.jobs else { return Err(job) };
        let Some(ticket) = self.shared.answers.owe(&job, self.jobs_max) else { return Err(job) };
        match jobs.try_send((ticket, job)) {
            Ok(()) => Ok(()),
            Err(refused) if self.shared.answers.forget(ticket) => Err(refused.into_inner().1),
            // The watch has answered it in between.
            Err(_) => Ok(()),
        }
    }

    /// Jobs taken and not yet answered. A `Close` counts until its mapping goes to the reaper.
    pub fn jobs(&self) -> usize {
        self.shared.answers.counted()
    }

    /// How the worker is. Returns at once, also while its threads are stuck.
    pub fn health(&self) -> DeviceHealth {
        let state = self.shared.state();
        let mut health = state.health.clone();
        health.closing = state.closing.len();
        health.closing_since = state.closing.front().copied();
        health.lost = state.lost.as_ref().map(GpuError::to_string);
        health
    }

    /// Ends the worker: jobs not begun fail, batches under way end, all mappings are closed, the
    /// pool is freed. Blocks until then, at most `timeout`; past it the threads are left to
    /// themselves, and what was not begun is answered. Whether all ended in time.
    pub fn stop(mut self, timeout: Duration) -> bool {
        self.end(timeout)
    }

    fn end(&mut self, timeout: Duration) -> bool {
        let Some(thread) = self.thread.take() else { return true };
        self.shared.state().stop_by = Some(Instant::now() + timeout);
        // The thread takes the closed channel for the order to stop.
        self.jobs = None;
        let ended = self.ended.recv_timeout(timeout + STOP_GRACE);
        let farewell = if matches!(ended, Err(channel::RecvTimeoutError::Timeout)) {
            Farewell::Stuck
        } else {
            // A panic was caught and reported on the thread itself.
            drop(thread.join());
            Farewell::Ended
        };
        // The watch answers what is left, on its own thread, because a listener may be stuck, too.
        drop(self.watch.try_send(farewell));
        let _ = self.watched.recv_timeout(STOP_GRACE);
        let stopped = self.shared.state().stopped;
        if !stopped {
            let gpu = self.info.uuid;
            tracing::error!(%gpu, "the GPU could not be closed; it goes with the process");
        }
        stopped
    }
}

impl Drop for DeviceWorker {
    fn drop(&mut self) {
        self.end(self.stop_timeout);
    }
}

/// What the owner thread says of the GPU.
fn wait_for_start(
    start: &Receiver<Result<GpuInfo, GpuError>>,
    timeout: Duration,
) -> Result<GpuInfo, GpuError> {
    match start.recv_timeout(timeout) {
        Ok(result) => result,
        Err(channel::RecvTimeoutError::Timeout) => {
            let ms = timeout.as_millis();
            Err(GpuError::Failed(format!("the driver did not open the GPU within {ms} ms")))
        }
        Err(channel::RecvTimeoutError::Disconnected) => {
            Err(GpuError::Failed("the thread that opens the GPU died".to_owned()))
        }
    }
}

fn no_thread(error: &io::Error) -> GpuError {
    GpuError::Failed(format!("no thread can be started for it: {error}"))
}
