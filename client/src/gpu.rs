//! GPU memory as a region, for engines that have bindings of CUDA of their own: what the daemon is
//! told about it, the ring of events, and when the memory may be freed. Nothing here calls CUDA;
//! with feature `cuda`, `crate::cuda` does, on top of this.
//!
//! Invariants: what keeps the memory alive is dropped only after the daemon has let go of it on
//! every connection on which it may have imported it, or when it has not said so in time; an event
//! of the ring is not given out again while an operation that waits for it may be under way.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvtide_tiers::block::{
    GPU_BLOCK_BYTES_UNSUPPORTED, GPU_EVENTS_MAX, GpuMemory, GpuOrder, GpuRegionSpec, GpuUuid,
    IpcHandle, RegionLayout,
};
use kvtide_tiers::catalog::RegionId;
use tokio::runtime::Handle;

use crate::connection::{Link, Shared};
use crate::doubt::LinkEnd;
use crate::error::ClientError;
use crate::protocol::KvtideClient;
use crate::region::{AsRegion, RegionInner, RegionRef, Source};

/// GPU memory of this process, as the daemon can import it.
#[derive(Clone, Debug)]
pub struct GpuExport {
    /// The GPU. Named by UUID, because ordinals differ between processes.
    pub gpu: GpuUuid,
    /// Where the memory is.
    pub memory: ExportedMemory,
    /// Bytes of the region.
    pub bytes: u64,
    /// How the daemon's copies are ordered behind the work of this process.
    pub order: GpuOrder,
}

/// An allocation, and where a region starts in it.
#[derive(Clone, Debug)]
pub enum ExportedMemory {
    /// Memory of `cuMemAlloc`.
    Ipc {
        /// What `cuIpcGetMemHandle` gave for the allocation.
        handle: IpcHandle,
        /// Bytes from the start of the allocation.
        offset: u64,
    },
    /// Memory of `cuMemCreate`.
    Vmm {
        /// What `cuMemExportToShareableHandle` gave for the allocation.
        fd: Arc<OwnedFd>,
        /// Bytes of the allocation.
        allocation_bytes: u64,
        /// Bytes from the start of the allocation.
        offset: u64,
    },
}

impl GpuExport {
    fn check(&self, layout: &RegionLayout) -> Result<(), ClientError> {
        layout.check(self.bytes)?;
        let block_bytes = layout.block_bytes();
        if block_bytes <= GPU_BLOCK_BYTES_UNSUPPORTED {
            return Err(ClientError::Gpu(format!(
                "blocks of {block_bytes} bytes; more than {GPU_BLOCK_BYTES_UNSUPPORTED} are allowed"
            )));
        }
        if let ExportedMemory::Vmm { allocation_bytes, offset, .. } = self.memory {
            let end = offset.saturating_add(self.bytes);
            if end > allocation_bytes {
                return Err(ClientError::OutOfRegion { offset, end, bytes: allocation_bytes });
            }
        }
        let events = self.events();
        if matches!(self.order, GpuOrder::Events { .. }) && !(1..=GPU_EVENTS_MAX).contains(&events)
        {
            return Err(ClientError::Gpu(format!(
                "a ring of {events} events; 1 to {GPU_EVENTS_MAX} are allowed"
            )));
        }
        Ok(())
    }

    fn events(&self) -> usize {
        match &self.order {
            GpuOrder::Events { handles } => handles.len(),
            GpuOrder::EngineSynchronizes => 0,
        }
    }
}

/// Something that lives for as long as the daemon may have the memory imported.
pub(crate) type Keep = Box<dyn Any + Send + Sync>;

/// GPU memory that is registered, or about to be.
pub(crate) struct Imported {
    export: GpuExport,
    ring: Ring,
    /// Unregistered on purpose: not to be registered again.
    ended: AtomicBool,
    /// Connections on which the daemon may have imported it, as (generation, end).
    imports: Mutex<Vec<(u64, Arc<LinkEnd>)>>,
    keep: Mutex<Option<Keep>>,
    /// Where what keeps the memory alive waits for the daemon at the end.
    runtime: Handle,
    call_timeout: Duration,
}

impl Imported {
    fn imports(&self) -> MutexGuard<'_, Vec<(u64, Arc<LinkEnd>)>> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor that has to be sent before, for VMM memory.
    pub(crate) fn descriptor(&self) -> Option<&OwnedFd> {
        match &self.export.memory {
            ExportedMemory::Vmm { fd, .. } => Some(fd),
            ExportedMemory::Ipc { .. } => None,
        }
    }

    /// What the daemon is told; `fd` is the number that it gave the descriptor.
    pub(crate) fn spec(&self, fd: u64, layout: &RegionLayout) -> GpuRegionSpec {
        let memory = match &self.export.memory {
            ExportedMemory::Ipc { handle, offset } => {
                GpuMemory::Ipc { handle: *handle, offset: *offset }
            }
            ExportedMemory::Vmm { allocation_bytes, offset, .. } => {
                GpuMemory::Vmm { fd, allocation_bytes: *allocation_bytes, offset: *offset }
            }
        };
        GpuRegionSpec {
            gpu: self.export.gpu,
            memory,
            bytes: self.export.bytes,
            layout: layout.clone(),
            order: self.export.order.clone(),
        }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// From now on the daemon may have it imported on `link`.
    pub(crate) fn importing(&self, link: &Link) {
        let mut imports = self.imports();
        imports.retain(|(_, end)| !end.is_reached());
        if imports.iter().all(|(generation, _)| *generation != link.generation) {
            imports.push((link.generation, Arc::clone(&link.end)));
        }
    }

    /// The daemon has said that it has it imported no more on this connection.
    pub(crate) fn let_go(&self, generation: u64) {
        self.imports().retain(|(each, _)| *each != generation);
    }

    /// The last handle is gone: what keeps the memory alive waits for the daemon, and is dropped.
    pub(crate) fn part(&self, bound: Option<(u64, RegionId)>, shared: Weak<Shared>) {
        let imports = std::mem::take(&mut *self.imports());
        let keep = self.keep.lock().unwrap_or_else(PoisonError::into_inner).take();
        if imports.iter().all(|(_, end)| end.is_reached()) {
            return;
        }
        let limit = self.call_timeout;
        self.runtime.spawn(async move {
            if !let_go(bound, imports, &shared, limit).await {
                tracing::warn!(
                    limit_ms = limit.as_millis(),
                    "the daemon has not said that it let go of GPU memory; it is given up anyway"
                );
            }
            drop(keep);
        });
    }
}

/// Ends the registration, and waits until the daemon has let go of the memory on every connection.
/// `false` when it has not within `limit`.
async fn let_go(
    bound: Option<(u64, RegionId)>,
    mut imports: Vec<(u64, Arc<LinkEnd>)>,
    shared: &Weak<Shared>,
    limit: Duration,
) -> bool {
    let until = tokio::time::Instant::now() + limit;
    if let Some((generation, region)) = bound
        && let Some(shared) = shared.upgrade()
        && let Some(link) = shared.link().filter(|link| link.generation == generation)
    {
        let ask = |stub: KvtideClient, context| async move {
            stub.unregister_region(context, region).await
        };
        if let Ok(Ok(())) = shared.call(&link, limit, ask).await {
            imports.retain(|(each, _)| *each != generation);
        }
    }
    let ends = async {
        for (_, end) in &imports {
            end.reached().await;
        }
    };
    tokio::time::timeout_at(until, ends).await.is_ok()
}

/// GPU memory that the daemon has imported: a pool of places for blocks. Unregistered when the
/// last handle is dropped; what was given to keep the memory alive is dropped when the daemon has
/// let go of it, or when it has not said so within the client's call timeout.
#[derive(Clone)]
pub struct GpuRegion {
    pub(crate) inner: Arc<RegionInner>,
    memory: Arc<Imported>,
}

impl GpuRegion {
    pub(crate) fn new(
        export: GpuExport,
        layout: RegionLayout,
        keep: Keep,
        shared: &Arc<Shared>,
    ) -> Result<GpuRegion, ClientError> {
        export.check(&layout)?;
        let ring = Ring::new(export.events());
        let memory = Imported {
            export,
            ring,
            ended: AtomicBool::new(false),
            imports: Mutex::default(),
            keep: Mutex::new(Some(keep)),
            runtime: Handle::current(),
            call_timeout: shared.config.call_timeout,
        };
        let memory = Arc::new(memory);
        let source = Source::Gpu(Arc::clone(&memory));
        let inner = Arc::new(RegionInner::new(source, layout, Arc::downgrade(shared)));
        Ok(GpuRegion { inner, memory })
    }

    /// What the daemon was told of the memory.
    pub fn export(&self) -> &GpuExport {
        &self.memory.export
    }

    /// How blocks lie in it.
    pub fn layout(&self) -> &RegionLayout {
        &self.inner.layout
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u64 {
        self.inner.layout.block_bytes()
    }

    /// Number of places.
    pub fn places(&self) -> u32 {
        self.inner.layout.blocks
    }

    /// Places from or to which the daemon may still copy although nobody waits for it; see
    /// [`crate::RegionHandle::places_in_doubt`]. Loads and stores refuse them; kernels of this
    /// process must not write to them.
    pub fn places_in_doubt(&self) -> Vec<u32> {
        self.inner.doubts().places()
    }

    /// Takes the next event of the ring that no operation waits for. Record it on the stream
    /// whose work has to come first, then give it to [`GpuRegion::after`]. `None` when all of
    /// them are taken, or when there is no ring: then synchronize the stream instead. An event
    /// that is recorded in a stream that is being captured into a CUDA graph orders nothing.
    pub fn next_event(&self) -> Option<EventMark> {
        self.memory.ring.take()
    }

    /// The region behind an event: the daemon's copies wait for it.
    pub fn after(&self, event: EventMark) -> RegionRef<'_> {
        RegionRef { inner: &self.inner, after: Some(event) }
    }

    /// Ends the registration for good, and waits until the daemon has let go of the memory.
    /// `false` when it has not within `limit`.
    pub(crate) async fn end(&self, shared: &Arc<Shared>, limit: Duration) -> bool {
        self.memory.ended.store(true, Ordering::Release);
        let bound = self.inner.bound.lock().unwrap_or_else(PoisonError::into_inner).take();
        let imports = self.memory.imports().clone();
        let over = let_go(bound, imports, &Arc::downgrade(shared), limit).await;
        if over {
            self.memory.imports().clear();
        }
        over
    }
}

impl AsRegion for GpuRegion {
    fn as_region(&self) -> RegionRef<'_> {
        RegionRef { inner: &self.inner, after: None }
    }
}

impl fmt::Debug for GpuRegion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("GpuRegion")
            .field("gpu", &self.export().gpu)
            .field("places", &self.places())
            .field("block_bytes", &self.block_bytes())
            .finish_non_exhaustive()
    }
}

/// An event of a region's ring. Taken until its last clone is dropped, and until no operation that
/// waits for it can be under way any more.
#[derive(Clone, PartialEq, Eq)]
pub struct EventMark(Arc<u32>);

impl EventMark {
    /// Its number in the ring.
    pub fn number(&self) -> u32 {
        *self.0
    }
}

impl fmt::Debug for EventMark {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "EventMark({})", self.number())
    }
}

/// Which events of a region are taken: those of whose marks somebody has a clone.
struct Ring(Mutex<Slots>);

struct Slots {
    next: usize,
    marks: Vec<EventMark>,
}

impl Ring {
    fn new(events: usize) -> Ring {
        let events = u32::try_from(events).unwrap_or(u32::MAX);
        let marks = (0..events).map(|number| EventMark(Arc::new(number))).collect();
        Ring(Mutex::new(Slots { next: 0, marks }))
    }

    fn take(&self) -> Option<EventMark> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let order = (slots.next..slots.marks.len()).chain(0..slots.next);
        // Only under this lock can a mark get its first clone.
        let free = |at: &usize| slots.marks.get(*at).is_some_and(|m| Arc::strong_count(&m.0) == 1);
        let at = order.into_iter().find(free)?;
        let mark = slots.marks.get(at).cloned();
        slots.next = (at + 1) % slots.marks.len();
        mark
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(bytes: u64) -> GpuExport {
        let memory = ExportedMemory::Ipc { handle: IpcHandle([1; 64]), offset: 0 };
        let (gpu, order) = (GpuUuid([7; 16]), GpuOrder::EngineSynchronizes);
        GpuExport { gpu, memory, bytes, order }
    }

    #[test]
    fn an_event_is_not_given_out_while_somebody_waits_for_it() {
        let ring = Ring::new(3);
        let (first, second) = (ring.take().unwrap(), ring.take().unwrap());
        assert_eq!((first.number(), second.number()), (0, 1));
        let waits = first.clone();
        drop((first, second));
        assert_eq!(ring.take().unwrap().number(), 2, "in turn");
        let other = ring.take().unwrap();
        assert_eq!(other.number(), 1, "0 is waited for");
        let last = ring.take().unwrap();
        assert_eq!(last.number(), 2);
        assert_eq!(ring.take(), None);
        drop(waits);
        assert_eq!(ring.take().unwrap().number(), 0);
        assert_eq!(Ring::new(0).take(), None);
    }

    #[test]
    fn memory_and_ring_are_checked_before_the_daemon_is_asked() {
        let layout = RegionLayout::opaque(4, 4096);
        export(4 * 4096).check(&layout).unwrap();
        let tiny = export(4 * 240).check(&RegionLayout::opaque(4, 240)).unwrap_err().to_string();
        assert!(tiny.contains("blocks of 240 bytes"), "{tiny}");
        assert!(matches!(export(4 * 4096 - 1).check(&layout), Err(ClientError::Layout(_))));
        let fd = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let vmm = |offset| {
            let memory =
                ExportedMemory::Vmm { fd: Arc::clone(&fd), allocation_bytes: 32768, offset };
            GpuExport { memory, ..export(4 * 4096) }
        };
        vmm(4 * 4096).check(&layout).unwrap();
        for offset in [4 * 4096 + 1, u64::MAX] {
            let refused = vmm(offset).check(&layout).unwrap_err().to_string();
            assert!(refused.contains("32768"), "{refused}");
        }
        for count in [0, GPU_EVENTS_MAX + 1] {
            let order = GpuOrder::Events { handles: vec![IpcHandle([2; 64]); count] };
            let refused = GpuExport { order, ..export(4 * 4096) }.check(&layout).unwrap_err();
            assert!(refused.to_string().contains("1 to 64"), "{refused}");
        }
    }
}
