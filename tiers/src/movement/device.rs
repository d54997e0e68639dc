//! A stub.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::block::{GpuOrder, GpuUuid, IpcHandle, RegionLayout};
use crate::catalog::{Limit, RegionId, SessionId};

use super::NodeHandle;

/// Which GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GpuChoice {
    /// All that the driver shows.
    All,
    /// This one.
    Uuid(GpuUuid),
    /// This one.
    Ordinal(u32),
}

/// A GPU to use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Which.
    pub gpu: GpuChoice,
    /// Bytes of its pool.
    pub pool_bytes: u64,
    /// Another driver library, for tests.
    pub library: Option<PathBuf>,
}

/// A GPU in use.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Which.
    pub gpu: GpuUuid,
    /// Its name.
    pub name: String,
    /// The driver's version.
    pub driver: String,
    /// Bytes of its pool.
    pub pool_bytes: u64,
    /// "ok", or what is wrong with it now.
    pub health: String,
    /// Why it is off.
    pub off: Option<String>,
}

/// Memory to import.
#[derive(Debug)]
pub enum RegionMemory {
    /// A legacy allocation.
    Ipc {
        /// Its handle.
        handle: IpcHandle,
        /// Where the region starts in it.
        offset: u64,
    },
    /// A VMM allocation.
    Vmm {
        /// The allocation.
        fd: OwnedFd,
        /// Its size.
        allocation_bytes: u64,
        /// Where the region starts in it.
        offset: u64,
    },
}

/// A region to import.
#[derive(Debug)]
pub struct GpuRegion {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The memory.
    pub memory: RegionMemory,
    /// Bytes of the region.
    pub bytes: u64,
    /// How blocks lie in it.
    pub layout: RegionLayout,
    /// The order.
    pub order: GpuOrder,
}

/// Why a region is not registered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegisterError {
    /// A limit.
    #[error("a limit is reached: {0:?}")]
    Limit(Limit),
    /// Not this GPU.
    #[error("no such GPU; there are {known:?}")]
    NoSuchGpu {
        /// Those that there are.
        known: Vec<GpuUuid>,
    },
    /// No GPU.
    #[error("the device tier is off: {0}")]
    TierOff(String),
    /// Refused.
    #[error("refused: {0}")]
    Refused(String),
}

impl NodeHandle {
    /// Registers GPU memory.
    pub fn register_gpu_region(
        &self,
        _session: SessionId,
        _region: GpuRegion,
        answer: impl FnOnce(Result<RegionId, RegisterError>) + Send + 'static,
    ) {
        answer(Err(RegisterError::TierOff("no CUDA driver".to_owned())));
    }

    /// Ends a region of GPU memory. `closed` is called exactly once, maybe late: when the memory
    /// is imported no more, or at once when the session has no such region.
    pub fn unregister_gpu_region(
        &self,
        _session: SessionId,
        _region: RegionId,
        closed: impl FnOnce() + Send + 'static,
    ) {
        closed();
    }
}
