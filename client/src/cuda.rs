//! GPU regions for Rust engines (feature `cuda`): memory that this process allocated or that the
//! engine's own allocator made, and the ring of events that orders the daemon's copies behind the
//! engine's streams.
//!
//! Invariants: the events, and memory that was allocated here, live until the daemon has let go of
//! them (see [`crate::GpuRegion`]); whether the daemon or the memory is reached by a legacy handle
//! or by a descriptor is settled once, when the pool is made.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvtide_kernels::driver::{
    Context, CudaError, DeviceBuffer, Event, Stream, VmmBuffer, address_range, export_fd_of,
    ipc_handle_of, legacy_ipc_capable,
};
use kvtide_tiers::block::{GPU_EVENTS_MAX, GpuOrder, GpuUuid, IpcHandle, RegionLayout};

use crate::client::Client;
use crate::error::ClientError;
use crate::gpu::{EventMark, ExportedMemory, GpuExport, GpuRegion};
use crate::region::{AsRegion, RegionRef};

/// The driver's types that appear here.
pub use kvtide_kernels::driver;

/// Events of a ring, unless the caller wants another number.
pub const EVENTS_DEFAULT: u32 = 16;

/// How device memory is allocated, and so how it is shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolKind {
    /// By `cuMemAlloc`, shared by a legacy handle.
    Legacy,
    /// By `cuMemCreate`, shared as a file descriptor; in whole units of 2 MiB.
    Vmm,
}

/// How the daemon's copies are ordered behind the engine's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CudaOrder {
    /// The engine synchronizes its streams before it asks for anything.
    EngineSynchronizes,
    /// A ring of so many events, 1 to [`GPU_EVENTS_MAX`]; [`EVENTS_DEFAULT`] fit most engines. As
    /// many loads and stores can be under way behind an event of their own.
    Events(u32),
}

/// Device memory of this process that the daemon can import: the pool of an engine, or a part of
/// it.
pub struct CudaPool {
    context: Context,
    memory: PoolMemory,
    address: u64,
    bytes: u64,
}

enum PoolMemory {
    Legacy(DeviceBuffer),
    Vmm(VmmBuffer, Arc<OwnedFd>),
    Adopted(ExportedMemory),
}

impl CudaPool {
    /// Allocates `bytes` of device memory. Freed when the pool and all regions of it are gone.
    ///
    /// # Errors
    /// When the GPU has not that much left, or the driver does not export it.
    pub fn allocate(
        context: &Context,
        bytes: u64,
        kind: PoolKind,
    ) -> Result<CudaPool, ClientError> {
        let (memory, address) = match kind {
            PoolKind::Legacy => {
                let buffer =
                    DeviceBuffer::alloc(context, bytes).map_err(gpu("allocate device memory"))?;
                let address = buffer.address();
                (PoolMemory::Legacy(buffer), address)
            }
            PoolKind::Vmm => {
                let buffer =
                    VmmBuffer::create(context, bytes).map_err(gpu("allocate device memory"))?;
                let fd = buffer.export_fd().map_err(gpu("export device memory"))?;
                let address = buffer.address();
                (PoolMemory::Vmm(buffer, Arc::new(fd)), address)
            }
        };
        Ok(CudaPool { context: context.clone(), memory, address, bytes })
    }

    /// Takes over the name of `bytes` at a device address of this process, whoever allocated them.
    /// They stay the caller's: they have to live until the regions of this pool are unregistered
    /// ([`Client::unregister_cuda_region`]).
    ///
    /// Memory of `cuMemAlloc` (PyTorch's default) is shared by a legacy handle, memory of
    /// `cuMemCreate` that was made exportable as a file descriptor; memory of stream-ordered
    /// pools (`cudaMallocAsync`) cannot be shared.
    ///
    /// # Errors
    /// Memory that is not one allocation, or that cannot be shared in either way.
    pub fn adopt(context: &Context, address: u64, bytes: u64) -> Result<CudaPool, ClientError> {
        context
            .within(|| Self::adopt_within(context, address, bytes))
            .map_err(gpu("use the context"))?
    }

    /// As [`CudaPool::adopt`], while the context is current.
    fn adopt_within(context: &Context, address: u64, bytes: u64) -> Result<CudaPool, ClientError> {
        let (base, allocation_bytes) =
            address_range(address).map_err(gpu("find the allocation of the address"))?;
        let offset = address.saturating_sub(base);
        let end = offset.saturating_add(bytes);
        if end > allocation_bytes {
            return Err(ClientError::OutOfRegion { offset, end, bytes: allocation_bytes });
        }
        let legacy =
            legacy_ipc_capable(address).map_err(gpu("find out how the memory may be shared"))?;
        let memory = if legacy {
            let handle = ipc_handle_of(context, base).map_err(gpu("export device memory"))?;
            ExportedMemory::Ipc { handle: IpcHandle(handle), offset }
        } else {
            let fd = export_fd_of(address).map_err(|error| {
                let what = "neither a legacy handle nor a descriptor can be had for";
                ClientError::Gpu(format!(
                    "{what} the memory at {address:#x} ({error}); allocate it by cuMemAlloc, or by \
                     cuMemCreate with handles of type POSIX_FILE_DESCRIPTOR"
                ))
            })?;
            ExportedMemory::Vmm { fd: Arc::new(fd), allocation_bytes, offset }
        };
        let memory = PoolMemory::Adopted(memory);
        Ok(CudaPool { context: context.clone(), memory, address, bytes })
    }

    /// Where it starts, in this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    fn export(&self) -> Result<ExportedMemory, ClientError> {
        Ok(match &self.memory {
            PoolMemory::Legacy(buffer) => {
                let handle = buffer.ipc_handle().map_err(gpu("export device memory"))?;
                ExportedMemory::Ipc { handle: IpcHandle(handle), offset: 0 }
            }
            PoolMemory::Vmm(buffer, fd) => ExportedMemory::Vmm {
                fd: Arc::clone(fd),
                allocation_bytes: buffer.bytes(),
                offset: 0,
            },
            PoolMemory::Adopted(export) => export.clone(),
        })
    }
}

impl fmt::Debug for CudaPool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("CudaPool")
            .field("address", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A pool that is registered with the daemon. Loads and stores take it as it is (when the engine
/// has synchronized its stream), or as [`CudaRegion::behind`] makes it.
///
/// When the last clone is dropped, the registration ends; what the pool allocated is freed after
/// the daemon has let go of it, without anybody waiting for that.
#[derive(Clone)]
pub struct CudaRegion {
    region: GpuRegion,
    pool: Arc<CudaPool>,
    events: Arc<[Event]>,
}

impl CudaRegion {
    /// The pool.
    pub fn pool(&self) -> &Arc<CudaPool> {
        &self.pool
    }

    /// The region without its CUDA side.
    pub fn as_gpu_region(&self) -> &GpuRegion {
        &self.region
    }

    /// Records the next free event of the ring behind what is queued in `stream` now. `None` when
    /// all of them are taken, or when there is no ring: then the stream has to be synchronized
    /// instead.
    ///
    /// # Errors
    /// When `stream` is being captured into a graph: an event that is recorded then becomes a node
    /// of the graph and orders nothing. Or when the driver fails. Nothing may be asked of the
    /// daemon on the strength of what was queued.
    pub fn record(&self, stream: &Stream) -> Result<Option<EventMark>, ClientError> {
        refuse_capture(stream.is_capturing())?;
        let Some(mark) = self.region.next_event() else { return Ok(None) };
        let event = usize::try_from(mark.number()).ok().and_then(|at| self.events.get(at));
        let Some(event) = event else { return Ok(None) };
        event.record(stream).map_err(gpu("record an event of the ring"))?;
        Ok(Some(mark))
    }

    /// The region behind an event that was recorded.
    pub fn after(&self, event: EventMark) -> RegionRef<'_> {
        self.region.after(event)
    }

    /// The region behind what is queued in `stream` now: by an event of the ring, or, when none is
    /// free, by synchronizing the stream, which blocks.
    ///
    /// # Errors
    /// As [`CudaRegion::record`], also for a region without a ring: synchronizing breaks a capture.
    /// Or when work of the stream failed.
    pub fn behind(&self, stream: &Stream) -> Result<RegionRef<'_>, ClientError> {
        if let Some(event) = self.record(stream)? {
            return Ok(self.after(event));
        }
        stream.synchronize().map_err(gpu("wait for the work of the stream"))?;
        Ok(self.as_region())
    }
}

impl AsRegion for CudaRegion {
    fn as_region(&self) -> RegionRef<'_> {
        self.region.as_region()
    }
}

impl fmt::Debug for CudaRegion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("CudaRegion").field("region", &self.region).finish_non_exhaustive()
    }
}

impl Client {
    /// Registers a pool, or a part of one that `layout` describes; at most the call timeout. The
    /// region stays valid across reconnections.
    ///
    /// # Errors
    /// As [`Client::register_gpu_region`]; or the driver makes no events, or does not share them.
    pub async fn register_cuda_region(
        &self,
        pool: impl Into<Arc<CudaPool>>,
        layout: RegionLayout,
        order: CudaOrder,
    ) -> Result<CudaRegion, ClientError> {
        let (pool, export, events) = prepare(pool.into(), order)?;
        let keep = (Arc::clone(&pool), Arc::clone(&events));
        let region = self.register_gpu_region(export, layout, keep).await?;
        Ok(CudaRegion { region, pool, events })
    }

    /// Ends a region's registration now, also for its other clones. When this returns `Ok`, the
    /// memory may be freed.
    ///
    /// # Errors
    /// As [`Client::unregister_gpu_region`].
    pub async fn unregister_cuda_region(&self, region: &CudaRegion) -> Result<(), ClientError> {
        self.unregister_gpu_region(&region.region).await
    }
}

impl crate::blocking::Client {
    /// See [`Client::register_cuda_region`].
    ///
    /// # Errors
    /// As there.
    pub fn register_cuda_region(
        &self,
        pool: impl Into<Arc<CudaPool>>,
        layout: RegionLayout,
        order: CudaOrder,
    ) -> Result<CudaRegion, ClientError> {
        let (pool, export, events) = prepare(pool.into(), order)?;
        let keep = (Arc::clone(&pool), Arc::clone(&events));
        let region = self.register_gpu_region(export, layout, keep)?;
        Ok(CudaRegion { region, pool, events })
    }

    /// See [`Client::unregister_cuda_region`].
    ///
    /// # Errors
    /// As there.
    pub fn unregister_cuda_region(&self, region: &CudaRegion) -> Result<(), ClientError> {
        self.unregister_gpu_region(&region.region)
    }
}

type Prepared = (Arc<CudaPool>, GpuExport, Arc<[Event]>);

/// What the daemon is told of a pool, and the ring.
fn prepare(pool: Arc<CudaPool>, order: CudaOrder) -> Result<Prepared, ClientError> {
    let count = match order {
        CudaOrder::EngineSynchronizes => 0,
        CudaOrder::Events(count) => usize::try_from(count).unwrap_or(usize::MAX),
    };
    if order == CudaOrder::Events(0) || count > GPU_EVENTS_MAX {
        let what = format!("a ring of {count} events; 1 to {GPU_EVENTS_MAX} are allowed");
        return Err(ClientError::Gpu(what));
    }
    let events = (0..count).map(|_| Event::interprocess(&pool.context));
    let events: Vec<Event> =
        events.collect::<Result<_, _>>().map_err(gpu("make interprocess events"))?;
    let handles = events.iter().map(|event| event.ipc_handle().map(IpcHandle));
    let handles: Vec<IpcHandle> =
        handles.collect::<Result<_, _>>().map_err(gpu("share interprocess events"))?;
    let order = match handles.is_empty() {
        true => GpuOrder::EngineSynchronizes,
        false => GpuOrder::Events { handles },
    };
    let export = GpuExport {
        gpu: GpuUuid(pool.context.info().uuid),
        memory: pool.export()?,
        bytes: pool.bytes,
        order,
    };
    Ok((pool, export, events.into()))
}

fn refuse_capture(capturing: Result<bool, CudaError>) -> Result<(), ClientError> {
    match capturing.map_err(gpu("find out whether the stream is being captured"))? {
        false => Ok(()),
        true => Err(ClientError::Gpu(
            "the stream is being captured into a CUDA graph, where an event orders nothing; load \
             and store before or after the capture, or behind a stream that does not capture"
                .to_owned(),
        )),
    }
}

fn gpu(what: &str) -> impl FnOnce(CudaError) -> ClientError {
    move |error| ClientError::Gpu(format!("cannot {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_captured_into_a_graph_is_refused() {
        refuse_capture(Ok(false)).unwrap();
        let captured = refuse_capture(Ok(true)).unwrap_err().to_string();
        assert!(captured.contains("captured into a CUDA graph"), "{captured}");
        // The legacy default stream, while another stream captures.
        let implicit = CudaError { code: 906, call: "cuStreamIsCapturing" };
        let implicit = refuse_capture(Err(implicit)).unwrap_err().to_string();
        assert!(implicit.contains("being captured"), "{implicit}");
    }
}
