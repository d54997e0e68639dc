//! A worker's region: in shared host memory, or in GPU memory of the worker's own.

use std::{fmt, path::PathBuf, sync::Arc};

use anyhow::Context;
use clap::{Args, ValueEnum};
use kvtide_client::{
    AsRegion, ExportedMemory, GpuExport, GpuOrder, GpuRegion, RegionHandle, RegionLayout,
    RegionRef, blocking::Client,
};
use kvtide_tiers::tier::device::{
    OpenMemory,
    cuda::{EngineMemory, EngineMemoryKind, GpuChoice, use_driver_library},
};

/// Which driver, and how GPU memory is shared. Daemon and workers are given the same.
#[derive(Args, Clone, Debug)]
pub struct DriverArgs {
    /// The CUDA driver's library. Default: the machine's.
    #[arg(long, requires = "device_bytes")]
    pub device_library: Option<PathBuf>,
    /// How the workers' GPU memory is allocated and shared.
    #[arg(long, value_enum, default_value_t = Share::Legacy)]
    pub device_share: Share,
}

/// How GPU memory is allocated and shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Share {
    /// cuMemAlloc, shared by a legacy handle.
    Legacy,
    /// cuMemCreate, shared as a file descriptor.
    Vmm,
}

impl Share {
    /// As the command line says it.
    pub fn name(self) -> &'static str {
        match self {
            Share::Legacy => "legacy",
            Share::Vmm => "vmm",
        }
    }
}

/// Where a worker's blocks lie.
pub(super) enum Region {
    Host(RegionHandle),
    Gpu { memory: Arc<EngineMemory>, region: GpuRegion },
}

impl Region {
    /// Takes memory for `layout` and tells the daemon about it; on the first GPU when `share` says
    /// so. The driver's library must have been chosen before.
    pub(super) fn make(
        client: &Client,
        layout: &RegionLayout,
        share: Option<Share>,
    ) -> anyhow::Result<Region> {
        let Some(share) = share else {
            return Ok(Region::Host(client.create_region(layout.clone())?));
        };
        let kind = match share {
            Share::Legacy => EngineMemoryKind::Ipc,
            Share::Vmm => EngineMemoryKind::Vmm,
        };
        let bytes = u64::from(layout.blocks) * layout.block_bytes();
        let memory = EngineMemory::create(GpuChoice::Ordinal(0), bytes, kind, 0)
            .context("cannot take GPU memory for a region")?;
        let memory = Arc::new(memory);
        let exported = match memory.share().context("cannot share GPU memory")? {
            OpenMemory::Ipc { handle, offset } => ExportedMemory::Ipc { handle, offset },
            OpenMemory::Vmm { fd, allocation_bytes, offset } => {
                ExportedMemory::Vmm { fd: Arc::new(fd), allocation_bytes, offset }
            }
            OpenMemory::Shared(_) => anyhow::bail!("GPU memory turned out to be host memory"),
        };
        // Every copy here is waited for before the daemon is asked for anything.
        let order = GpuOrder::EngineSynchronizes;
        let export = GpuExport { gpu: memory.gpu(), memory: exported, bytes, order };
        let region = client.register_gpu_region(export, layout.clone(), Arc::clone(&memory))?;
        Ok(Region::Gpu { memory, region })
    }

    /// Writes one block; blocks of these regions are contiguous.
    pub(super) fn write_block(&self, place: u32, bytes: &[u8]) -> anyhow::Result<()> {
        match self {
            Region::Host(region) => Ok(region.write_block(place, bytes)?),
            Region::Gpu { memory, region } => {
                Ok(memory.write_at(u64::from(place) * region.block_bytes(), bytes)?)
            }
        }
    }

    /// Reads one block.
    pub(super) fn read_block(&self, place: u32, out: &mut [u8]) -> anyhow::Result<()> {
        match self {
            Region::Host(region) => Ok(region.read_block(place, out)?),
            Region::Gpu { memory, region } => {
                Ok(memory.read_at(u64::from(place) * region.block_bytes(), out)?)
            }
        }
    }

    /// Whether the daemon may still copy from or to some place although nobody waits for it.
    pub(super) fn in_doubt(&self) -> bool {
        let places = match self {
            Region::Host(region) => region.places_in_doubt(),
            Region::Gpu { region, .. } => region.places_in_doubt(),
        };
        !places.is_empty()
    }
}

impl AsRegion for Region {
    fn as_region(&self) -> RegionRef<'_> {
        match self {
            Region::Host(region) => region.as_region(),
            Region::Gpu { region, .. } => region.as_region(),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Region::Host(region) => region.fmt(out),
            Region::Gpu { region, .. } => region.fmt(out),
        }
    }
}

/// Chooses the driver's library for this process, before anything else uses a GPU.
pub(super) fn choose_driver(library: Option<&std::path::Path>) -> anyhow::Result<()> {
    if let Some(library) = library {
        use_driver_library(library).context("the driver's library cannot be used")?;
    }
    Ok(())
}
