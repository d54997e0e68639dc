//! What every block device is to the rest: whole buffers in, completions out.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{AlignedBuf, Arena, BlockingDevice, SlotRead, SlotWrite};
use crate::block::PAGE_BYTES;

/// A file or drive that transfers whole buffers. One thread owns it.
///
/// Operations are started at the latest by the next [`BlockDevice::reap`]; they complete in any
/// order. Transient errors and short transfers are retried for the rest inside, at most 3 times
/// each; what is then reported is final.
pub trait BlockDevice: Send {
    /// Bytes of the device.
    fn capacity_bytes(&self) -> u64;

    /// Most operations in flight.
    fn queue_depth(&self) -> usize;

    /// Operations taken whose completion was not yet handed out.
    fn in_flight(&self) -> usize;

    /// Takes an operation. Never blocks.
    ///
    /// # Errors
    /// Gives the operation back when the queue is full.
    fn submit(&mut self, op: IoOp) -> Result<(), IoOp>;

    /// Waits for at least one completion, a wake-up or the timeout (`None`: without limit), and
    /// appends the completions to `done`.
    ///
    /// # Errors
    /// When the device can no longer be driven at all; operations in flight then stay where they
    /// are, and dropping the device settles them.
    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()>;

    /// Makes completed writes durable (`fdatasync`). Blocks.
    ///
    /// # Errors
    /// What the operating system says; the data must then be taken as lost.
    fn sync(&mut self) -> io::Result<()>;

    /// Lets other threads end a [`BlockDevice::reap`].
    fn waker(&self) -> Waker;
}

/// Makes a blocked `reap` return, from any thread. A wake-up that comes before the `reap` counts
/// for it.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// A waker that calls `wake`, which must not block.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Waker {
        Waker(Arc::new(wake))
    }

    /// Wakes.
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Waker")
    }
}

/// One transfer: the whole buffer, from or to `offset`.
#[derive(Debug)]
pub struct IoOp {
    /// The caller's own number, given back with the completion.
    pub user: u64,
    /// Offset on the device, bytes; a multiple of 4 KiB.
    pub offset: u64,
    /// The memory. Its length should be a multiple of 4 KiB: a device opened with `O_DIRECT`
    /// refuses others.
    pub buffer: IoBuffer,
}

/// Memory of an operation, owned by it until its completion is handed out.
#[derive(Debug)]
pub enum IoBuffer {
    /// From the device into a slot.
    Fill(SlotWrite),
    /// From a slot to the device.
    Drain(SlotRead),
    /// From the device into heap pages.
    FillPages(AlignedBuf),
    /// From heap pages to the device.
    DrainPages(AlignedBuf),
}

impl IoBuffer {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            IoBuffer::Fill(slot) => slot,
            IoBuffer::Drain(slot) => slot,
            IoBuffer::FillPages(pages) | IoBuffer::DrainPages(pages) => pages,
        }
    }

    /// Whether the device is read and the memory written.
    pub fn is_read(&self) -> bool {
        matches!(self, IoBuffer::Fill(_) | IoBuffer::FillPages(_))
    }

    /// The bytes to fill; `None` for a write.
    pub(crate) fn fill(&mut self) -> Option<&mut [u8]> {
        match self {
            IoBuffer::Fill(slot) => Some(slot),
            IoBuffer::FillPages(pages) => Some(pages),
            IoBuffer::Drain(_) | IoBuffer::DrainPages(_) => None,
        }
    }
}

/// A completion.
#[derive(Debug)]
pub struct IoDone {
    /// The number given with the operation.
    pub user: u64,
    /// Its memory. After a failed read its bytes are of no use.
    pub buffer: IoBuffer,
    /// `Ok` means the full length.
    pub result: Result<(), IoFailure>,
}

/// Why a transfer failed. Final: retries are already used up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoFailure {
    /// Fewer bytes than asked for.
    #[error("short transfer: {done} of {wanted} bytes")]
    Short {
        /// Bytes that were transferred.
        done: u64,
        /// Bytes that were asked for.
        wanted: u64,
    },
    /// The operating system's error number.
    #[error("{}", io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// The range is not on the device (or is empty).
    #[error("the range is not on the device")]
    OutOfRange,
    /// The device was given up before the transfer ended.
    #[error("the device was closed before the transfer ended")]
    Closed,
}

impl IoFailure {
    /// Whether the whole device is gone or refuses writing, so that going on is of no use.
    pub fn is_device_gone(self) -> bool {
        const GONE: [rustix::io::Errno; 4] = [
            rustix::io::Errno::NODEV,
            rustix::io::Errno::NXIO,
            rustix::io::Errno::ROFS,
            rustix::io::Errno::SHUTDOWN,
        ];
        match self {
            IoFailure::Os(errno) => GONE.iter().any(|gone| gone.raw_os_error() == errno),
            IoFailure::Closed => true,
            IoFailure::Short { .. } | IoFailure::OutOfRange => false,
        }
    }
}

/// Which device the operator wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RingChoice {
    /// io_uring where it works, else pread and pwrite.
    #[default]
    Auto,
    /// io_uring, or fail.
    Uring,
    /// pread and pwrite.
    Blocking,
}

/// What carries the transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RingKind {
    /// Nothing is open.
    #[default]
    Closed,
    /// io_uring.
    Uring,
    /// pread and pwrite on a few threads.
    Blocking,
}

/// What a device got from the kernel, for the log and for `status`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RingReport {
    /// What carries the transfers.
    pub kind: RingKind,
    /// Why that, in words.
    pub why: String,
    /// How the ring was set up.
    pub setup: String,
    /// Whether the file is registered with the ring.
    pub file_registered: bool,
    /// Bytes of the arena that are registered with the ring so far. Grows as the arena's pages
    /// are touched; transfers of other memory go by plain operations.
    pub fixed_bytes: u64,
    /// Why no more of it is registered; empty while nothing stands in the way.
    pub fixed_why: String,
    /// Transfers that were tried again for the rest, or after a transient error.
    pub retries: u64,
    /// Completions that belong to no operation. They are ignored; any is a bug, here or below.
    pub stale_completions: u64,
}

/// A [`RingReport`] that the device keeps up to date and others read.
#[derive(Debug, Default)]
pub struct RingStatus(Mutex<RingReport>);

impl RingStatus {
    /// One that says `Closed`.
    pub fn new() -> Arc<RingStatus> {
        Arc::default()
    }

    /// The present state.
    pub fn report(&self) -> RingReport {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut RingReport)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// What to open.
#[derive(Debug)]
pub struct OpenDevice {
    /// The store file or drive; best opened with `O_DIRECT`.
    pub file: File,
    /// Memory to register with the ring, if any.
    pub arena: Option<Arc<Arena>>,
    /// Which device.
    pub choice: RingChoice,
    /// Most operations in flight; clamped to 1 ..= [`QUEUE_DEPTH_MAX`].
    pub queue_depth: u32,
}

/// The deepest queue.
pub const QUEUE_DEPTH_MAX: u32 = 1024;

/// How long the probe at start waits for its one read.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a device with one probing read, and says in the log and in `status` which one it is and
/// why. To be called on the thread that will drive the device: a ring belongs to one thread.
///
/// # Errors
/// When neither device reads the file's first page, or io_uring was demanded and is refused.
pub fn open_device(open: OpenDevice, status: &Arc<RingStatus>) -> io::Result<Box<dyn BlockDevice>> {
    let OpenDevice { file, arena, choice, queue_depth } = open;
    let queue_depth = queue_depth.clamp(1, QUEUE_DEPTH_MAX);
    let why = match choice {
        RingChoice::Blocking => "the configuration asks for it".to_owned(),
        RingChoice::Auto | RingChoice::Uring => {
            match open_ring(file.try_clone()?, arena, queue_depth, status) {
                Ok(device) => {
                    let report = status.report();
                    tracing::info!(
                        setup = report.setup,
                        file_registered = report.file_registered,
                        queue_depth,
                        "io_uring carries the transfers"
                    );
                    return Ok(device);
                }
                Err(error) if choice == RingChoice::Uring => {
                    return Err(io::Error::new(
                        error.kind(),
                        format!("io_uring is refused ({error}); allow it, or choose `auto`"),
                    ));
                }
                Err(error) => format!("io_uring is refused: {error}"),
            }
        }
    };
    let mut device: Box<dyn BlockDevice> = Box::new(BlockingDevice::new(file, queue_depth)?);
    probe(device.as_mut())?;
    tracing::info!(why, queue_depth, "pread and pwrite carry the transfers");
    status.update(|report| {
        *report = RingReport { kind: RingKind::Blocking, why, ..RingReport::default() };
    });
    Ok(device)
}

#[cfg(feature = "uring")]
fn open_ring(
    file: File,
    arena: Option<Arc<Arena>>,
    queue_depth: u32,
    status: &Arc<RingStatus>,
) -> io::Result<Box<dyn BlockDevice>> {
    let mut device: Box<dyn BlockDevice> =
        Box::new(super::RingDevice::new(file, arena, queue_depth, Arc::clone(status))?);
    probe(device.as_mut())?;
    Ok(device)
}

#[cfg(not(feature = "uring"))]
fn open_ring(
    _file: File,
    _arena: Option<Arc<Arena>>,
    _queue_depth: u32,
    _status: &Arc<RingStatus>,
) -> io::Result<Box<dyn BlockDevice>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this program was built without it"))
}

/// Reads the first page, if the device has one.
fn probe(device: &mut dyn BlockDevice) -> io::Result<()> {
    if device.capacity_bytes() < PAGE_BYTES {
        return Ok(());
    }
    let buffer = IoBuffer::FillPages(AlignedBuf::zeroed(PAGE_BYTES as usize));
    if device.submit(IoOp { user: 0, offset: 0, buffer }).is_err() {
        return Err(io::Error::other("the device takes no operation"));
    }
    let mut done = Vec::new();
    let until = Instant::now() + PROBE_TIMEOUT;
    while done.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        device.reap(Some(left), &mut done)?;
    }
    match done.pop().map(|done| done.result) {
        Some(Ok(())) | None => Ok(()),
        Some(Err(IoFailure::Os(errno))) => Err(io::Error::from_raw_os_error(errno)),
        Some(Err(failure)) => Err(io::Error::other(failure)),
    }
}

/// Bytes of a file or of a drive.
pub(super) fn capacity_of(file: &File) -> io::Result<u64> {
    let mut file = file;
    file.seek(io::SeekFrom::End(0))
}

/// Most retries of one transfer after a transient error, and most after a short one.
const RETRIES_MAX: u8 = 3;

/// How far one transfer has come, and what its next result means. Both devices count with this.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// Bytes wanted.
    wanted: u64,
    /// Bytes done, whole pages unless all are.
    done: u64,
    transients: u8,
    shorts: u8,
}

/// What to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Try again from [`Progress::done`] on.
    Again,
    /// It is over.
    Over(Result<(), IoFailure>),
}

impl Progress {
    /// Of a transfer of `wanted` bytes.
    pub(super) fn new(wanted: u64) -> Progress {
        Progress { wanted, done: 0, transients: 0, shorts: 0 }
    }

    /// Bytes that need not be transferred again.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// Takes the bytes transferred by the last try, or its error number.
    pub(super) fn after(&mut self, result: Result<u64, i32>) -> Next {
        let transferred = match result {
            Ok(transferred) => transferred,
            Err(errno) => {
                let transient = [
                    rustix::io::Errno::AGAIN,
                    rustix::io::Errno::INTR,
                    rustix::io::Errno::CANCELED,
                ];
                let transient = transient.iter().any(|one| one.raw_os_error() == errno);
                if !transient || self.transients == RETRIES_MAX {
                    return Next::Over(Err(IoFailure::Os(errno)));
                }
                self.transients += 1;
                return Next::Again;
            }
        };
        let done = self.done.saturating_add(transferred);
        if done == self.wanted {
            return Next::Over(Ok(()));
        }
        // Nothing more comes, or more came than was asked for, or it dribbles.
        if transferred == 0 || done > self.wanted || self.shorts == RETRIES_MAX {
            return Next::Over(Err(IoFailure::Short { done, wanted: self.wanted }));
        }
        self.shorts += 1;
        // The rest must start at a page for a device opened with O_DIRECT.
        self.done = done / PAGE_BYTES * PAGE_BYTES;
        Next::Again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted_and_retried_three_times_each() {
        let short = |done| Next::Over(Err(IoFailure::Short { done, wanted: 16384 }));
        let eagain = rustix::io::Errno::AGAIN.raw_os_error();
        let mut progress = Progress::new(16384);
        for _ in 0..3 {
            assert_eq!(progress.after(Err(eagain)), Next::Again);
        }
        assert_eq!(progress.clone().after(Err(eagain)), Next::Over(Err(IoFailure::Os(eagain))));
        assert_eq!(progress.after(Ok(5000)), Next::Again);
        assert_eq!(progress.done(), 4096);
        assert_eq!(progress.clone().after(Ok(0)), short(4096));
        assert_eq!(progress.clone().after(Ok(99_999)), short(4096 + 99_999));
        assert_eq!(progress.clone().after(Err(5)), Next::Over(Err(IoFailure::Os(5))));
        assert_eq!(progress.clone().after(Ok(12288)), Next::Over(Ok(())));
        assert_eq!(progress.after(Ok(100)), Next::Again);
        assert_eq!(progress.after(Ok(100)), Next::Again);
        assert_eq!(progress.after(Ok(100)), short(4196));
    }
}
