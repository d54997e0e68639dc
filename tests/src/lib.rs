//! The harness of the whole-system tests: the real daemon as a process of its own, clients over its
//! real socket, some of them in processes that are killed, and bytes that every test can check.
//!
//! The daemon is this package's program `kvtide-test-node` with the first argument `__daemon`; it
//! is found through `env!("CARGO_BIN_EXE_kvtide-test-node")`, which cargo sets for the tests only.

#![forbid(unsafe_code)]

pub mod booted;
pub mod churn;
mod daemon;
mod engine;
pub mod gpu;
pub mod inference;
mod manager;
mod payload;
mod peer;
mod proc;
mod subscriber;

pub use daemon::{Daemon, Ended, Setup, UNUSED_USER, is_root};
pub use engine::{FaultFile, GpuEngine, gpu_state};
pub use manager::ServiceManager;
pub use payload::{KvPool, namespace, payload, tokens};
pub use peer::{Door, Peer, context};
pub use proc::{Footprint, device_mapped_bytes, open_descriptors, poll_until};
pub use subscriber::{Message, Subscriber, Value};
