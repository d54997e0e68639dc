//! Regions: memory that the daemon copies blocks from and to. Host memory that both sides map
//! ([`RegionHandle`]), or GPU memory that the daemon imports ([`crate::GpuRegion`]).
//!
//! Regions stay valid across a restart of the daemon: the connection registers them again.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvtide_tiers::block::RegionLayout;
use kvtide_tiers::catalog::RegionId;
use kvtide_tiers::io::SharedMemory;

use crate::connection::Shared;
use crate::doubt::{Doubt, Doubts};
use crate::error::ClientError;
use crate::gpu::{EventMark, Imported};
use crate::handles::Bound;

/// What a region is made of.
pub(crate) enum Source {
    Host(Arc<SharedMemory>),
    Gpu(Arc<Imported>),
}

/// One region, whatever it is made of.
pub(crate) struct RegionInner {
    pub(crate) source: Source,
    pub(crate) layout: RegionLayout,
    pub(crate) bound: Bound<RegionId>,
    doubts: Mutex<Doubts>,
    shared: Weak<Shared>,
}

impl RegionInner {
    pub(crate) fn new(source: Source, layout: RegionLayout, shared: Weak<Shared>) -> RegionInner {
        RegionInner { source, layout, bound: Mutex::new(None), doubts: Mutex::default(), shared }
    }

    pub(crate) fn doubts(&self) -> MutexGuard<'_, Doubts> {
        self.doubts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn leave_in_doubt(&self, doubt: Doubt) {
        let added = self.doubts().add(doubt);
        if let (true, Some(shared)) = (added, self.shared.upgrade()) {
            shared.wake();
        }
    }

    /// Refuses places in doubt.
    pub(crate) fn check_places(&self, places: &[u32]) -> Result<(), ClientError> {
        let in_doubt = self.doubts().first_of(places);
        in_doubt.map_or(Ok(()), |place| Err(ClientError::PlaceInDoubt { place }))
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        let bound = self.bound.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Source::Gpu(memory) = &self.source {
            memory.part(bound, Weak::clone(&self.shared));
        } else if let (Some((generation, region)), Some(shared)) = (bound, self.shared.upgrade()) {
            shared.unregister_later(generation, region);
        }
    }
}

/// What loads and stores take for a region: a [`RegionHandle`], a [`crate::GpuRegion`], or a
/// [`RegionRef`].
pub trait AsRegion: Sync {
    /// The region as they name it.
    fn as_region(&self) -> RegionRef<'_>;
}

/// A region as loads and stores name it: with the event that they wait for, if any
/// ([`crate::GpuRegion::after`]).
#[derive(Clone)]
pub struct RegionRef<'a> {
    pub(crate) inner: &'a Arc<RegionInner>,
    pub(crate) after: Option<EventMark>,
}

impl RegionRef<'_> {
    /// The number of the event that the daemon's copies wait for.
    pub(crate) fn after_event(&self) -> Option<u32> {
        self.after.as_ref().map(EventMark::number)
    }
}

impl AsRegion for RegionRef<'_> {
    fn as_region(&self) -> RegionRef<'_> {
        self.clone()
    }
}

impl AsRegion for RegionHandle {
    fn as_region(&self) -> RegionRef<'_> {
        RegionRef { inner: &self.inner, after: None }
    }
}

impl fmt::Debug for RegionRef<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RegionRef").field("after", &self.after).finish_non_exhaustive()
    }
}

/// Memory shared with the daemon: a pool of places for blocks. Unregistered when the last handle
/// is dropped.
#[derive(Clone)]
pub struct RegionHandle {
    pub(crate) inner: Arc<RegionInner>,
    memory: Arc<SharedMemory>,
}

impl RegionHandle {
    pub(crate) fn new(
        memory: SharedMemory,
        layout: RegionLayout,
        shared: Weak<Shared>,
    ) -> RegionHandle {
        let memory = Arc::new(memory);
        let inner = RegionInner::new(Source::Host(Arc::clone(&memory)), layout, shared);
        RegionHandle { inner: Arc::new(inner), memory }
    }

    /// The memory itself.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
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

    /// Places from or to which the daemon may still copy, because a load or store of them was
    /// given up before it was known to have ended: its deadline passed, its future or ticket was
    /// dropped, or the connection was lost. Until the daemon has ended it, or has closed the
    /// connection, loads, stores and [`RegionHandle::write_block`] refuse these places. Whoever
    /// writes to the memory by other means has to leave them alone too: what is written there may
    /// be stored under the old key.
    pub fn places_in_doubt(&self) -> Vec<u32> {
        self.inner.doubts().places()
    }

    /// Writes one block's bytes, plane by plane as its payload lies.
    ///
    /// # Errors
    /// [`ClientError::OutOfRegion`] for a place or length that is not the region's, and
    /// [`ClientError::PlaceInDoubt`].
    pub fn write_block(&self, place: u32, bytes: &[u8]) -> Result<(), ClientError> {
        self.check(place, bytes.len())?;
        self.inner.check_places(&[place])?;
        let mut rest = bytes;
        self.runs(place, |offset, run| {
            let (head, tail) = rest.split_at_checked(run)?;
            rest = tail;
            self.memory.write_at(offset, head).ok()
        })
    }

    /// Reads one block's bytes, plane by plane as its payload lies.
    ///
    /// # Errors
    /// [`ClientError::OutOfRegion`] for a place or length that is not the region's.
    pub fn read_block(&self, place: u32, out: &mut [u8]) -> Result<(), ClientError> {
        self.check(place, out.len())?;
        let mut at = 0;
        self.runs(place, |offset, run| {
            let part = out.get_mut(at..at + run)?;
            at += run;
            self.memory.read_at(offset, part).ok()
        })
    }

    fn check(&self, place: u32, bytes: usize) -> Result<(), ClientError> {
        let fits = place < self.places() && bytes as u64 == self.block_bytes();
        fits.then_some(()).ok_or_else(|| self.out_of_region(u64::from(place), bytes as u64))
    }

    fn runs(
        &self,
        place: u32,
        mut copy: impl FnMut(u64, usize) -> Option<()>,
    ) -> Result<(), ClientError> {
        for plane in &self.inner.layout.planes {
            for row in 0..plane.rows {
                let offset = plane.run_offset(place, row);
                let run = usize::try_from(plane.row_bytes).unwrap_or(usize::MAX);
                copy(offset, run).ok_or_else(|| self.out_of_region(offset, plane.row_bytes))?;
            }
        }
        Ok(())
    }

    fn out_of_region(&self, offset: u64, bytes: u64) -> ClientError {
        let end = offset.saturating_add(bytes);
        ClientError::OutOfRegion { offset, end, bytes: self.memory.bytes() }
    }
}

impl fmt::Debug for RegionHandle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RegionHandle")
            .field("places", &self.places())
            .field("block_bytes", &self.block_bytes())
            .finish_non_exhaustive()
    }
}
