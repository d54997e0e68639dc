//! Memory and devices: what carries bytes, and never decides which.
//!
//! * [`SharedMemory`] and [`Region`]: a client's memory, seen through copies only.
//! * [`Arena`]: the host tier's memory, lent slot by slot.
//! * [`BlockDevice`]: a file or drive that transfers whole buffers; by io_uring, by pread and
//!   pwrite, in memory for tests, and with faults injected.
//!
//! A buffer in flight is owned by its operation until the completion was seen, whatever became of
//! whoever asked for it.

mod buffer;
mod region;

#[cfg(feature = "store")]
mod blocking;
#[cfg(feature = "store")]
mod device;
#[cfg(feature = "store")]
pub mod fault;
#[cfg(feature = "store")]
pub mod memory_device;
#[cfg(feature = "uring")]
mod ring;
#[cfg(test)]
#[cfg(feature = "store")]
mod tests;

#[cfg(feature = "store")]
pub use blocking::BlockingDevice;
pub use buffer::SharedMemory;
#[cfg(feature = "store")]
pub use buffer::{
    AlignedBuf, Arena, ArenaFiles, KeptSlab, PageKind, SLAB_BYTES_MAX, SlotError, SlotRead,
    SlotWrite,
};
#[cfg(feature = "store")]
pub use device::{
    BlockDevice, IoBuffer, IoDone, IoFailure, IoOp, OpenDevice, QUEUE_DEPTH_MAX, RingChoice,
    RingKind, RingReport, RingStatus, Waker, open_device,
};
pub use region::{Region, RegionError};
#[cfg(feature = "uring")]
pub use ring::RingDevice;
