//! What carries the catalog's decisions out: the catalog with its inbox and a thread of its own, a
//! small pool that copies and checks host bytes, and the nvme worker.
//!
//! Invariants: one thread at a time is at the catalog; the pool verifies every block
//! between a tier and a client; a guard on a slot is dropped before its completion is sent, so that
//! the catalog never frees memory in use; every queue is bounded by what the catalog lets be under
//! way.

mod conductor;
mod gpus;
mod host;
mod inbox;
mod node;
mod pool;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::block::NamespaceId;
use crate::catalog::{
    ArbiterConfig, Limits, OwnerQuotas, PolicyChoice, PrefillConfig, Residency, TenantId,
    slab_bytes_for,
};
use crate::io::fault::{FaultConfig, FaultCounts};
use crate::io::{ArenaFiles, BlockDevice, PageKind, RingChoice, RingReport};
use crate::segment::{RecoveryReport, StoreGeometry};

pub use gpus::{
    DeviceConfig, DeviceReport, GpuChoice, GpuMaker, GpuRegion, MakeGpu, RegisterError,
};
pub use host::Kept;
pub use node::{Node, NodeHandle, Notify, StartError, StopReport};

/// How a node is set up.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Host RAM.
    pub host: HostConfig,
    /// GPUs, if there are any.
    pub devices: Vec<DeviceConfig>,
    /// Which copy leaves the pool of a GPU first. Default: by predicted reuse.
    pub device_policy: PolicyChoice,
    /// Whether predicted reuse is weighted by what computing a block again would take. Default:
    /// false.
    pub weigh_cost: bool,
    /// Segments, if wanted.
    pub nvme: Option<NvmeConfig>,
    /// Threads that copy and check host bytes. Default: half of the cores, at least 1, at most 8.
    pub copy_threads: usize,
    /// What tenants and their conversations may hold. Default: no limits.
    pub quotas: Vec<(TenantId, OwnerQuotas)>,
    /// What clients may hold.
    pub limits: Limits,
    /// Which tiers are worth it.
    pub arbiter: ArbiterConfig,
    /// How much may be computed at a time. Default: not limited.
    pub prefill: PrefillConfig,
    /// Dirty blocks are written down while less than this part of host RAM is free or clean,
    /// percent. Default: 25.
    pub clean_percent: u32,
    /// They are also written when no client asked anything for this long, milliseconds, as long as
    /// nvme has room, and a few at a time once half of host RAM is dirty, while nothing is read
    /// from nvme. Default: 10: a burst of calls is not disturbed, and the steps of a decoding
    /// engine leave longer gaps.
    pub idle_ms: u64,
    /// Raises the generation of a namespace of which something could not be erased from the
    /// device. Default: none; then such a block may come back at a restart.
    pub retire: Option<RetireNamespace>,
    /// Is told which copies come and go after the start. Default: nobody.
    pub follow: Option<FollowResidency>,
}

/// Is told which copies came and went during one event; `false`: and that there were more. Called
/// on any thread, and must not block.
#[derive(Clone)]
pub struct FollowResidency(pub Arc<Follow>);

/// See [`FollowResidency`].
pub type Follow = dyn Fn(Vec<Residency>, bool) + Send + Sync;

impl fmt::Debug for FollowResidency {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("FollowResidency")
    }
}

/// Makes all blocks that a namespace has on the device void at the next start, durably; returns
/// its new generation. Called on a thread that may block.
#[derive(Clone)]
pub struct RetireNamespace(pub Arc<Retire>);

/// See [`RetireNamespace`].
pub type Retire = dyn Fn(NamespaceId) -> Option<u32> + Send + Sync;

impl fmt::Debug for RetireNamespace {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("RetireNamespace")
    }
}

impl NodeConfig {
    /// A node with this much host RAM and no nvme; the rest by default.
    pub fn new(host_bytes: u64) -> NodeConfig {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        NodeConfig {
            host: HostConfig::new(host_bytes),
            devices: Vec::new(),
            device_policy: PolicyChoice::default(),
            weigh_cost: false,
            nvme: None,
            copy_threads: (cores / 2).clamp(1, 8),
            quotas: Vec::new(),
            limits: Limits::default(),
            arbiter: ArbiterConfig::default(),
            prefill: PrefillConfig::default(),
            clean_percent: 25,
            idle_ms: 10,
            retire: None,
            follow: None,
        }
    }
}

/// The host tier.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Bytes of the arena; rounded down to whole slabs.
    pub bytes: u64,
    /// Bytes of a slab, a multiple of 2 MiB; the largest block. Default: a 64th of the arena,
    /// 4 MiB to 64 MiB.
    pub slab_bytes: Option<u32>,
    /// Whether the arena is to be memory that a next daemon can take over, even if only small
    /// pages can be had for it. Default: no.
    pub always_shared: bool,
    /// The arena of the daemon before. Default: none.
    pub handed_over: Option<Arc<ArenaFiles>>,
    /// Which copy leaves first. Default: by predicted reuse.
    pub policy: PolicyChoice,
}

impl HostConfig {
    /// An arena of so many bytes; the rest by default.
    pub fn new(bytes: u64) -> HostConfig {
        HostConfig {
            bytes,
            slab_bytes: None,
            always_shared: false,
            handed_over: None,
            policy: PolicyChoice::default(),
        }
    }

    /// Bytes of a slab, chosen or by default.
    pub fn slab(&self) -> u32 {
        self.slab_bytes.unwrap_or_else(|| slab_bytes_for(self.bytes))
    }
}

/// The nvme tier.
#[derive(Clone, Debug)]
pub struct NvmeConfig {
    /// The store file.
    pub file: PathBuf,
    /// Bytes it may have. Fixed when the store is made.
    pub bytes: u64,
    /// Bytes of a segment. Default: 256 MiB, less for small stores.
    pub segment_bytes: Option<u32>,
    /// The smallest block for which the descriptor areas have room. Default: 64 KiB.
    pub block_bytes_min: u32,
    /// Most operations in flight. Default: 32.
    pub queue_depth: u32,
    /// Bytes that may be written in a day, an hour's share at most in any hour. Default: no limit.
    pub write_bytes_per_day: Option<u64>,
    /// io_uring or pread and pwrite. Default: what works.
    pub ring: RingChoice,
    /// Faults to inject, for tests.
    pub fault: Option<FaultConfig>,
    /// Something to put around the device, for tests.
    #[doc(hidden)]
    pub wrap: Option<DeviceWrap>,
}

/// Puts something around a device.
#[doc(hidden)]
#[derive(Clone)]
pub struct DeviceWrap(pub Arc<WrapDevice>);

/// See [`DeviceWrap`].
#[doc(hidden)]
pub type WrapDevice = dyn Fn(Box<dyn BlockDevice>) -> Box<dyn BlockDevice> + Send + Sync;

impl fmt::Debug for DeviceWrap {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("DeviceWrap")
    }
}

impl NvmeConfig {
    /// The defaults for a store file of `bytes`.
    pub fn new(file: PathBuf, bytes: u64) -> NvmeConfig {
        NvmeConfig {
            file,
            bytes,
            segment_bytes: None,
            block_bytes_min: crate::segment::BLOCK_BYTES_MIN_DEFAULT,
            queue_depth: 32,
            write_bytes_per_day: None,
            ring: RingChoice::Auto,
            fault: None,
            wrap: None,
        }
    }

    /// The shape of the store. `None` when fewer than four segments fit.
    pub fn geometry(&self) -> Option<StoreGeometry> {
        let segment =
            self.segment_bytes.unwrap_or_else(|| StoreGeometry::segment_bytes_for(self.bytes));
        StoreGeometry::fit(self.bytes, segment, self.block_bytes_min)
    }
}

/// What a node got from the machine and found in its store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeReport {
    /// Bytes of the arena.
    pub host_bytes: u64,
    /// Bytes of a slab.
    pub slab_bytes: u32,
    /// What the arena is made of.
    pub pages: PageKind,
    /// Why that.
    pub pages_why: String,
    /// Bytes of the arena that were touched so far.
    pub touched_bytes: u64,
    /// Whether a next daemon can take the arena over.
    pub can_be_kept: bool,
    /// What was taken over from the daemon before.
    pub kept: Kept,
    /// Threads that copy.
    pub copy_threads: usize,
    /// The store, if there is one.
    pub nvme: Option<NvmeReport>,
    /// The GPUs that were to be used.
    pub devices: Vec<DeviceReport>,
    /// Why there are none, although some were to be used.
    pub devices_off: Option<String>,
}

/// What the nvme tier got and found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NvmeReport {
    /// The store file.
    pub file: PathBuf,
    /// Its shape.
    pub geometry: StoreGeometry,
    /// This opening's epoch.
    pub epoch: u32,
    /// Whether transfers bypass the page cache.
    pub direct: bool,
    /// The device.
    pub ring: RingReport,
    /// What recovery found, in words.
    pub recovery: String,
    /// Blocks that recovery found.
    pub recovered_blocks: u64,
    /// How long opening and recovery took, milliseconds.
    pub recovery_ms: u64,
    /// Faults injected so far, in tests.
    pub faults: Option<FaultCounts>,
}

fn describe(report: &RecoveryReport) -> String {
    report.to_string()
}
