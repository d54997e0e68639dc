//! The nvme tier's worker: one thread that owns one device and carries out jobs on segments.
//!
//! The worker knows where segments, descriptor pages and payloads lie, and in which order they must
//! reach the device; what is in which segment is the catalog's business.
//!
//! Invariants:
//! 1. A segment's descriptors are written only after its header was, so that a descriptor can never
//!    be taken for one of an earlier life.
//! 2. A descriptor is written only after its payload's full length was, and is reported so.
//! 3. One write of a descriptor page is in flight per segment, so an older page never lands on a
//!    newer one.
//! 4. Every job taken is answered exactly once, also when the device or the thread dies.
//! 5. Jobs taken and not yet answered are bounded by [`NvmeOptions::jobs_max`].
//!
//! Order of work: urgent reads, other reads, then headers, descriptor pages and payloads; reads
//! leave one place of the queue to writes. The worker sleeps in the device when it has nothing to
//! do.

mod erase;
mod segments;
#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{self, Sender, TrySendError};

use crate::block::{Descriptor, PAGE_BYTES};
use crate::io::{AlignedBuf, BlockDevice, IoFailure, SlotRead, SlotWrite, Waker};
use crate::segment::StoreGeometry;

/// The limits of a worker.
#[derive(Clone, Debug)]
pub struct NvmeOptions {
    /// Most jobs taken and not yet answered. Default: 4096.
    pub jobs_max: usize,
    /// Most bytes of reads in flight. Default: 8 MiB. One read is always let through. A drive that
    /// is given many at once ends them all late; with few, the first ones are verified and copied
    /// while the next are read.
    pub read_bytes_max: u64,
    /// Most bytes of writes in flight. Default: 16 MiB. One write is always let through.
    pub write_bytes_max: u64,
    /// The same while reads are in flight, so that a read waits for few writes only. Default:
    /// 4 MiB.
    pub write_bytes_beside_reads: u64,
    /// Descriptors of one segment that are committed at the latest. Default: 32.
    pub commit_descriptors: u32,
    /// How long a descriptor waits for others before it is committed. Default: 100 ms.
    pub commit_delay: Duration,
    /// How long a stop waits for the device. Default: 10 s.
    pub stop_timeout: Duration,
}

impl Default for NvmeOptions {
    fn default() -> NvmeOptions {
        NvmeOptions {
            jobs_max: 4096,
            read_bytes_max: 8 << 20,
            write_bytes_max: 16 << 20,
            write_bytes_beside_reads: 4 << 20,
            commit_descriptors: 32,
            commit_delay: Duration::from_millis(100),
            stop_timeout: Duration::from_secs(10),
        }
    }
}

/// What the worker is to do. Each is answered by one [`NvmeDone`].
#[derive(Debug)]
pub enum NvmeJob {
    /// Start a segment's next life: write its header page. Writes to it wait behind that, and it
    /// waits behind the seal of the life before, if one was asked for.
    Open {
        /// Number of the segment.
        segment: u32,
        /// The life's sequence.
        sequence: u64,
        /// The encoded header.
        header: Box<[u8; PAGE_BYTES as usize]>,
    },
    /// Write a payload to `descriptor.offset` of the segment; its descriptor joins the next commit.
    Write {
        /// The caller's number.
        op: u64,
        /// Number of the segment.
        segment: u32,
        /// The life's sequence.
        sequence: u64,
        /// Number of the descriptor in the segment; each is used once per life.
        index: u32,
        /// What is written.
        descriptor: Descriptor,
        /// The payload; `descriptor.stored_bytes` of it, padded to whole pages.
        buffer: WriteBuffer,
    },
    /// Read a payload.
    Read {
        /// The caller's number.
        op: u64,
        /// Number of the segment.
        segment: u32,
        /// Offset of the payload in the segment, bytes.
        offset: u32,
        /// Bytes of the payload as stored.
        stored_bytes: u32,
        /// Where it goes.
        buffer: ReadBuffer,
        /// Whether somebody waits for it.
        urgent: bool,
    },
    /// Commit the segment's descriptors after the writes to it are over, and forget the segment.
    Seal {
        /// Number of the segment.
        segment: u32,
    },
    /// Zero a descriptor on the device, so that its block is not found again after a restart.
    Erase {
        /// Number of the segment.
        segment: u32,
        /// The life's sequence; a descriptor of another life is left alone.
        sequence: u64,
        /// Number of the descriptor.
        index: u32,
    },
    /// Commit all descriptors of the payloads written so far, then make everything durable.
    /// Payload writes wait meanwhile.
    Sync {
        /// The caller's number.
        op: u64,
    },
}

/// Where a payload comes from.
#[derive(Debug)]
pub enum WriteBuffer {
    /// A slot that lends at least the stored bytes.
    Slot(SlotRead),
    /// Heap pages: exactly the stored bytes, rounded up to whole pages.
    Pages(AlignedBuf),
}

/// Where a payload goes. The whole pages around it are overwritten.
#[derive(Debug)]
pub enum ReadBuffer {
    /// A slot of at least the stored bytes. Comes back lending exactly those.
    Slot(SlotWrite),
    /// Heap pages: exactly the stored bytes, rounded up to whole pages.
    Pages(AlignedBuf),
}

impl ReadBuffer {
    /// The bytes; the payload comes first, then padding, if any.
    pub fn bytes(&self) -> &[u8] {
        match self {
            ReadBuffer::Slot(slot) => slot,
            ReadBuffer::Pages(pages) => pages,
        }
    }
}

/// What became of a job.
#[derive(Debug)]
pub enum NvmeDone {
    /// Of `Open`.
    Opened {
        /// Number of the segment.
        segment: u32,
        /// The life's sequence.
        sequence: u64,
        /// Whether the header was written.
        result: Result<(), NvmeError>,
    },
    /// Of `Write`. The buffer has been let go of.
    Written {
        /// The caller's number.
        op: u64,
        /// Whether the full length was written.
        result: Result<(), NvmeError>,
    },
    /// Of `Read`.
    Read {
        /// The caller's number.
        op: u64,
        /// The memory; unverified bytes, of no use at all after a failure. `None` when the device
        /// died with it.
        buffer: Option<ReadBuffer>,
        /// Whether the full length was read.
        result: Result<(), NvmeError>,
    },
    /// Of `Seal`.
    Sealed {
        /// Number of the segment.
        segment: u32,
        /// Whether all of its descriptors are written.
        result: Result<(), NvmeError>,
    },
    /// Of `Erase`.
    Erased {
        /// Number of the segment.
        segment: u32,
        /// The life's sequence.
        sequence: u64,
        /// Number of the descriptor.
        index: u32,
        /// Whether the device holds no such descriptor of this life.
        result: Result<(), NvmeError>,
    },
    /// Of `Sync`.
    Synced {
        /// The caller's number.
        op: u64,
        /// Whether all that was written is durable.
        result: Result<(), NvmeError>,
    },
    /// A descriptor page could not be written: blocks of the segment may be forgotten by a restart.
    /// Belongs to no job.
    CommitFailed {
        /// Number of the segment.
        segment: u32,
        /// Why.
        failure: IoFailure,
    },
    /// The device can no longer be driven, or the worker died. Every job, taken or to come, fails.
    /// Belongs to no job.
    Gone {
        /// Why.
        why: String,
    },
}

/// Why a job failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvmeError {
    /// The device did.
    #[error("{0}")]
    Device(#[from] IoFailure),
    /// A range, buffer or index that does not fit the store's geometry.
    #[error("the job does not fit the store's geometry")]
    Geometry,
    /// The segment is not in this life, or has one under way already.
    #[error("the segment is not in the life that the job names")]
    Life,
    /// The worker stops, or is dead.
    #[error("the worker has ended")]
    Ended,
}

impl NvmeError {
    /// Whether the whole device is gone or refuses writing.
    pub fn is_device_gone(self) -> bool {
        match self {
            NvmeError::Device(failure) => failure.is_device_gone(),
            NvmeError::Ended => true,
            NvmeError::Geometry | NvmeError::Life => false,
        }
    }
}

/// What the worker's owner and its thread share.
#[derive(Debug, Default)]
struct Shared {
    /// Jobs taken and not yet answered.
    jobs: AtomicUsize,
    /// The thread is about to block in the device, or does.
    sleeps: AtomicBool,
}

/// The owner's end of a worker. Dropping it stops the worker.
#[derive(Debug)]
pub struct NvmeWorker {
    /// `None` only while dropping.
    jobs: Option<Sender<NvmeJob>>,
    jobs_max: usize,
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl NvmeWorker {
    /// Starts a thread, opens the device on it with `open`, and returns once that is done. `done`
    /// is called on that thread and must not block.
    ///
    /// # Errors
    /// Those of `open`, and when no thread can be started.
    pub fn start(
        open: impl FnOnce() -> io::Result<Box<dyn BlockDevice>> + Send + 'static,
        geometry: StoreGeometry,
        salt: u128,
        options: NvmeOptions,
        done: Box<dyn FnMut(NvmeDone) + Send>,
    ) -> io::Result<NvmeWorker> {
        let jobs_max = options.jobs_max.max(1);
        let (jobs, job_source) = channel::bounded(jobs_max);
        let (started, start) = channel::bounded(1);
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let work = move || {
            let device = match open() {
                Ok(device) => device,
                Err(error) => return drop(started.send(Err(error))),
            };
            if started.send(Ok(device.waker())).is_ok() {
                worker::run(device, geometry, salt, options, job_source, theirs, done);
            }
        };
        let thread = std::thread::Builder::new().name("kvtide-nvme".into()).spawn(work)?;
        match start.recv() {
            Ok(Ok(waker)) => {
                Ok(NvmeWorker { jobs: Some(jobs), jobs_max, shared, waker, thread: Some(thread) })
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::Error::other("the nvme worker died while it opened its device")),
        }
    }

    /// Takes a job. Never blocks.
    ///
    /// # Errors
    /// Gives the job back when [`NvmeOptions::jobs_max`] are not yet answered.
    #[expect(clippy::result_large_err, reason = "the job comes back as it was; no allocation each")]
    pub fn try_send(&self, job: NvmeJob) -> Result<(), NvmeJob> {
        let Some(jobs) = &self.jobs else { return Err(job) };
        let before = self.shared.jobs.fetch_add(1, Ordering::Relaxed);
        let sent = if before < self.jobs_max { jobs.try_send(job) } else { Err(full(job)) };
        if let Err(refused) = sent {
            self.shared.jobs.fetch_sub(1, Ordering::Relaxed);
            return Err(refused.into_inner());
        }
        if self.shared.sleeps.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
        Ok(())
    }

    /// Jobs taken and not yet answered.
    pub fn jobs(&self) -> usize {
        self.shared.jobs.load(Ordering::Relaxed)
    }

    /// Ends the worker: what the device has not begun fails, what it has begun ends, descriptors
    /// are committed, everything is made durable. Blocks until then, at most
    /// [`NvmeOptions::stop_timeout`] and what the device needs to be closed.
    pub fn stop(self) {
        drop(self);
    }
}

fn full(job: NvmeJob) -> TrySendError<NvmeJob> {
    TrySendError::Full(job)
}

impl Drop for NvmeWorker {
    fn drop(&mut self) {
        // The thread takes the closed channel for the order to stop.
        self.jobs = None;
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic was caught and reported on the thread itself.
            drop(thread.join());
        }
    }
}
