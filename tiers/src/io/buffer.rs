//! Memory: shared with clients, owned by the arena, or plain pages. The only places of this crate,
//! beside the ring, where raw memory is touched.
//!
//! * `mapping` holds one mapping and copies in and out of it.
//! * [`SharedMemory`] is a mapping that another process writes to: copies only, no references.
//! * [`Arena`] is the host tier's memory: nobody else maps it, so its guards give references.
//! * `source` is where that memory comes from, `kept` how it outlives its daemon.
//! * `stream` copies what nobody reads again soon, past the caches.
//! * [`AlignedBuf`] is heap memory for what does not fit a slot: descriptor pages, probes.

#![expect(unsafe_code, reason = "one of the four homes of unsafe code: raw memory and the ring")]

#[cfg(feature = "store")]
mod aligned;
#[cfg(feature = "store")]
mod arena;
#[cfg(feature = "store")]
mod kept;
mod mapping;
mod shared;
#[cfg(feature = "store")]
mod source;
mod stream;

#[cfg(feature = "store")]
pub use aligned::AlignedBuf;
#[cfg(feature = "store")]
pub use arena::{Arena, SLAB_BYTES_MAX, SlotError, SlotRead, SlotWrite};
#[cfg(feature = "store")]
pub use kept::{ArenaFiles, KeptSlab};
pub use shared::SharedMemory;
#[cfg(feature = "store")]
pub use source::PageKind;
pub(super) use stream::stream_copy;
