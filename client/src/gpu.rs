//! GPU memory as a region, for engines that have bindings of CUDA of their own: what the daemon is
//! told about it, the ring of events, and when the memory may be freed. Nothing here calls CUDA;
//! with feature `cuda`, `crate::cuda` does, on top of this.
//!
//! Invariants: what keeps the memory alive is dropped only after the daemon has let go of it: it
//! has said so for each registration, or it has closed the connection. Time ends no registration;
//! where nobody can wait any longer, the memory is leaked. A registration of which nobody heard
//! what became ends with its connection. An event of the ring is not given out again while an
//! operation that waits for it may be under way.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvtide_tiers::block::{
    GPU_BLOCK_BYTES_UNSUPPORTED, GPU_EVENTS_MAX, GpuMemory, GpuOrder, GpuRegionSpec, GpuUuid,
    IpcHandle, RegionLayout,
};
use kvtide_tiers::catalog::RegionId;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::connection::{Link, LinkOf, Shared};
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

/// Holds what keeps the memory alive. Where nobody can wait for the daemon any longer, the memory
/// is leaked: by CUDA's rules it must not be freed while another process has it imported.
struct Kept {
    // Taken when it is freed.
    keep: Option<Keep>,
    bytes: u64,
}

impl Kept {
    /// The daemon has let go of the memory.
    fn free(mut self) {
        drop(self.keep.take());
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            std::mem::forget(keep);
            tracing::warn!(
                bytes = self.bytes,
                "the client's runtime ended before the daemon had let go of GPU memory; it stays \
                 allocated until this process ends"
            );
        }
    }
}

/// On which connections the daemon may have it imported.
#[derive(Default)]
struct Imports {
    /// Unregistered on purpose: not to be registered again.
    ended: bool,
    list: Vec<Import>,
}

/// One connection.
struct Import {
    generation: u64,
    end: Arc<LinkEnd>,
    /// Registrations that are under way, or were made and are not let go of.
    open: u32,
    /// Of one more, nobody heard what became; only the end of the connection tells.
    unheard: bool,
}

impl Imports {
    /// The end of a connection on which it may be imported, if there is any.
    fn first_end(&mut self) -> Option<Arc<LinkEnd>> {
        self.list.retain(|import| !import.end.is_reached());
        self.list.first().map(|import| Arc::clone(&import.end))
    }

    /// One registration is no more, or nobody heard what became of it.
    fn less(&mut self, generation: u64, unheard: bool) {
        for import in self.list.iter_mut().filter(|import| import.generation == generation) {
            import.open = import.open.saturating_sub(1);
            import.unheard |= unheard;
        }
        self.list.retain(|import| import.open > 0 || import.unheard);
    }
}

/// A registration under way. Dropped before the daemon was asked, it never was; dropped before
/// [`Importing::imported`] or [`Importing::refused`], nobody knows what became of it.
pub(crate) struct Importing<'a> {
    memory: &'a Imported,
    generation: u64,
    asked: bool,
    heard: bool,
}

impl Importing<'_> {
    /// The daemon is asked now.
    pub(crate) fn asked(&mut self) {
        self.asked = true;
    }

    /// It is registered, until [`Imported::let_go`].
    pub(crate) fn imported(mut self) {
        self.heard = true;
    }

    /// The daemon did not import it.
    pub(crate) fn refused(mut self) {
        self.asked = false;
    }
}

impl Drop for Importing<'_> {
    fn drop(&mut self) {
        if !self.heard {
            self.memory.imports().less(self.generation, self.asked);
            self.memory.changed.notify_waiters();
        }
    }
}

/// GPU memory that is registered, or about to be.
pub(crate) struct Imported {
    export: GpuExport,
    ring: Ring,
    imports: Mutex<Imports>,
    /// Something in `imports` ended, other than a connection.
    changed: Notify,
    keep: Mutex<Option<Keep>>,
    /// Where what keeps the memory alive waits for the daemon at the end.
    runtime: Handle,
    /// After this, a wait for the daemon is worth a word.
    patience: Duration,
}

impl Imported {
    fn imports(&self) -> MutexGuard<'_, Imports> {
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
        self.imports().ended
    }

    /// From now on the daemon may have it imported on `link`. `None` when it was unregistered.
    pub(crate) fn importing(&self, link: &Link) -> Option<Importing<'_>> {
        let mut imports = self.imports();
        if imports.ended {
            return None;
        }
        let generation = link.generation;
        let list = &mut imports.list;
        list.retain(|import| !import.end.is_reached());
        match list.iter_mut().find(|import| import.generation == generation) {
            Some(import) => import.open += 1,
            None => {
                let end = Arc::clone(&link.end);
                list.push(Import { generation, end, open: 1, unheard: false });
            }
        }
        Some(Importing { memory: self, generation, asked: false, heard: false })
    }

    /// The daemon has let go of one registration.
    fn let_go(&self, generation: u64) {
        self.imports().less(generation, false);
        self.changed.notify_waiters();
    }

    /// Waits until the daemon has let go of it everywhere.
    async fn off(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let Some(end) = self.imports().first_end() else { return };
            tokio::select! {
                () = changed => {}
                () = end.reached() => {}
            }
        }
    }

    /// Asks the daemon to let go of one registration until it says that it has, or until the
    /// connection is no more.
    async fn unregister(&self, shared: &Weak<Shared>, generation: u64, region: RegionId) {
        let mut pause = Duration::ZERO;
        loop {
            tokio::time::sleep(pause).await;
            // Neither the client nor the connection is kept by one that waits.
            let Some(shared) = shared.upgrade() else { return };
            let config = &shared.config;
            pause = (pause * 2).clamp(config.backoff, config.backoff_max.max(config.backoff));
            let link = match shared.link_of(generation) {
                LinkOf::Now(link) => link,
                LinkOf::NotYet => continue,
                LinkOf::Over => return,
            };
            let ask = |stub: KvtideClient, context| async move {
                stub.unregister_region(context, region).await
            };
            if let Ok(Ok(())) = shared.call(&link, config.call_timeout, ask).await {
                return self.let_go(generation);
            }
        }
    }

    /// As [`Imported::unregister`], without waiting.
    pub(crate) fn unregister_soon(
        self: &Arc<Self>,
        (generation, region): (u64, RegionId),
        shared: Weak<Shared>,
    ) {
        let memory = Arc::clone(self);
        self.runtime.spawn(async move { memory.unregister(&shared, generation, region).await });
    }

    /// The last handle is gone: what keeps the memory alive waits for the daemon, and is dropped.
    pub(crate) fn part(self: &Arc<Self>, bound: Option<(u64, RegionId)>, shared: Weak<Shared>) {
        let keep = self.keep.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.imports().first_end().is_none() {
            return;
        }
        let bytes = self.export.bytes;
        let (memory, kept) = (Arc::clone(self), Kept { keep, bytes });
        self.runtime.spawn(async move {
            let off = async {
                if let Some((generation, region)) = bound {
                    memory.unregister(&shared, generation, region).await;
                }
                memory.off().await;
            };
            let mut off = std::pin::pin!(off);
            if tokio::time::timeout(memory.patience, off.as_mut()).await.is_err() {
                let waited_ms = u64::try_from(memory.patience.as_millis()).unwrap_or(u64::MAX);
                tracing::warn!(
                    bytes,
                    waited_ms,
                    "the daemon has not let go of GPU memory yet; it stays allocated until then"
                );
                off.await;
            }
            // The driver may wait for the GPU before it frees memory.
            tokio::task::spawn_blocking(move || kept.free());
        });
    }
}

/// GPU memory that the daemon has imported: a pool of places for blocks. Unregistered when the
/// last handle is dropped; what was given to keep the memory alive is dropped when the daemon has
/// let go of it, however long that takes, and leaked when the client's runtime ends before.
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
            imports: Mutex::default(),
            changed: Notify::new(),
            keep: Mutex::new(Some(keep)),
            runtime: Handle::current(),
            patience: shared.config.call_timeout,
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

    /// Ends the registration for good, and waits until the daemon has let go of the memory, also
    /// where it was being imported just now. `false` when it has not within `limit`.
    pub(crate) async fn end(&self, shared: &Arc<Shared>, limit: Duration) -> bool {
        self.memory.imports().ended = true;
        let bound = self.inner.bound.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(bound) = bound {
            self.memory.unregister_soon(bound, Arc::downgrade(shared));
        }
        tokio::time::timeout(limit, self.memory.off()).await.is_ok()
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
