//! Block identity, the pure core, and the tiers of kvtide.
//!
//! Start reading at [`block`] (what a block is), then `catalog` (what is decided, with no I/O),
//! then `movement` (what carries decisions out). With default features off only [`block`] and the
//! words of requests and answers in [`catalog`] are built, which is all that a client needs.

#![deny(unsafe_code)]

pub mod block;
pub mod catalog;
#[cfg(feature = "store")]
pub mod codec;
#[cfg(feature = "store")]
pub mod folder;
#[cfg(feature = "memory")]
pub mod io;
#[cfg(feature = "store")]
pub mod movement;
#[cfg(feature = "store")]
pub mod narrow;
#[cfg(feature = "store")]
pub mod segment;
#[cfg(feature = "store")]
pub mod tier;
