//! What every block device is to the rest: whole buffers in, completions out.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{AlignedBuf, SlotRead, SlotWrite};

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
    #[expect(dead_code, reason = "for the devices, which follow")]
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
