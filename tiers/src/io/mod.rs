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
#[cfg(feature = "store")]
mod device;
mod region;

pub use buffer::SharedMemory;
#[cfg(feature = "store")]
pub use buffer::{
    AlignedBuf, Arena, PageKind, SLAB_BYTES_MAX, SlotError, SlotId, SlotRead, SlotWrite,
};
#[cfg(feature = "store")]
pub use device::{BlockDevice, IoBuffer, IoDone, IoFailure, IoOp, RingChoice, Waker};
pub use region::{Region, RegionError};
