//! The client library of kvtide: for inference engines, and for the inspector.
//!
//! [`Client`] (asynchronous) and [`blocking::Client`] open namespaces, share regions of memory with
//! the daemon, look up prefixes, load what is there and store what was computed. The engine never
//! waits for a sick daemon: every call has a deadline, a circuit breaker answers at once after some
//! failures, and the connection mends itself. See `examples/story.rs` for the whole of it in forty
//! lines.
//!
//! [`protocol`], [`hello`] and [`transport`] are the wire, which the daemon uses as well.

#![forbid(unsafe_code)]

pub mod blocking;
mod breaker;
mod client;
mod config;
mod connection;
#[cfg(feature = "cuda")]
pub mod cuda;
mod doubt;
mod error;
mod gpu;
mod handles;
pub mod hello;
mod own_runtime;
pub mod protocol;
mod region;
pub mod transport;

pub use client::{Admission, Client, ForgetWhat, Grant, Inspect, LoadedPrefix, Prefill};
pub use config::{ClientConfig, default_socket, runtime_folder};
pub use connection::ClientCounters;
pub use error::ClientError;
pub use gpu::{EventMark, ExportedMemory, GpuExport, GpuRegion};
pub use handles::{Hit, Lease, Lookup, NamespaceHandle, Ticket};
pub use hello::SessionLimits;
pub use kvtide_tiers::block::{
    BlockKey, Codec, ElementType, GPU_EVENTS_MAX, GpuOrder, GpuUuid, IpcHandle, KvLayout, Model,
    Namespace, NamespaceId, NamespaceKey, Narrow, NarrowShape, Narrowed, Plane, PlaneOrder,
    RankScope, RegionLayout, Wide,
};
pub use kvtide_tiers::catalog::{
    Advice, CatalogStats, Conversation, ConversationUse, Drained, Dropped, Hints, InspectPage,
    InspectRow, KeepRule, LeaseId, LoadBlock, MissReason, Outcome, OwnerUse, PinId, PrefillStats,
    Priority, Quota, QuotaUse, RejectReason, Run, RunState, StoreBlock, Tier, TierQuotas, TierUse,
    TierWorth, Withheld,
};
pub use kvtide_tiers::io::SharedMemory;
pub use protocol::{
    CallError, Digest, DriveStatus, GpuStatus, NamespaceRow, NamespaceSpec, OwnerRow, Pinned,
    PolicyStatus, ServiceStats, StatsReply, StatusReport, TenantStats, TierDigest, VersionInfo,
    block_hash,
};
pub use region::{AsRegion, RegionHandle, RegionRef};
