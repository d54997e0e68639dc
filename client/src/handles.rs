//! What a client holds on to: namespaces, regions, leases and tickets.
//!
//! Namespaces and regions stay valid across a restart of the daemon: the connection opens and
//! registers them again. Leases and tickets belong to one connection and end with it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvtide_tiers::block::{BlockKey, NamespaceId, NamespaceKey, RegionLayout};
use kvtide_tiers::catalog::{LeaseId, MissReason, Outcome, RegionId, RejectReason, Run, TicketId};
use kvtide_tiers::io::SharedMemory;

use crate::connection::Shared;
use crate::doubt::{Claim, Doubt, Doubts};
use crate::error::ClientError;
use crate::protocol::NamespaceSpec;

/// A number of the daemon's, valid on one connection.
pub(crate) type Bound<T> = Mutex<Option<(u64, T)>>;

pub(crate) fn bound_on<T: Copy>(bound: &Bound<T>, generation: u64) -> Option<T> {
    let bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
    bound.filter(|(on, _)| *on == generation).map(|(_, id)| id)
}

pub(crate) fn bind<T>(bound: &Bound<T>, value: Option<(u64, T)>) {
    *bound.lock().unwrap_or_else(PoisonError::into_inner) = value;
}

pub(crate) struct NamespaceInner {
    pub(crate) spec: NamespaceSpec,
    pub(crate) key: NamespaceKey,
    pub(crate) bound: Bound<NamespaceId>,
    pub(crate) key_changed: AtomicBool,
}

/// An opened namespace.
#[derive(Clone)]
pub struct NamespaceHandle {
    pub(crate) inner: Arc<NamespaceInner>,
}

impl NamespaceHandle {
    /// The key under which the namespace's blocks are named.
    pub fn key(&self) -> &NamespaceKey {
        &self.inner.key
    }

    /// What was opened.
    pub fn spec(&self) -> &NamespaceSpec {
        &self.inner.spec
    }

    /// The keys of all full blocks of `tokens`, root first.
    pub fn chain(&self, tokens: &[u32]) -> Vec<BlockKey> {
        let per_block = self.inner.spec.namespace.layout.tokens_per_block;
        self.inner.key.chain(tokens, usize::try_from(per_block).unwrap_or(usize::MAX))
    }

    /// The namespace's number in the store; `None` before the first connection of a lazy client.
    pub fn id(&self) -> Option<NamespaceId> {
        let bound = self.inner.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.as_ref().map(|(_, id)| *id)
    }

    /// Whether the tenant's secret changed while the client was away. All lookups miss then; open
    /// the namespace anew and compute the keys again.
    pub fn key_changed(&self) -> bool {
        self.inner.key_changed.load(Ordering::Acquire)
    }
}

impl fmt::Debug for NamespaceHandle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("NamespaceHandle").field("id", &self.id()).finish_non_exhaustive()
    }
}

pub(crate) struct RegionInner {
    pub(crate) memory: SharedMemory,
    pub(crate) layout: RegionLayout,
    pub(crate) bound: Bound<RegionId>,
    doubts: Mutex<Doubts>,
    shared: Weak<Shared>,
}

impl RegionInner {
    pub(crate) fn new(
        memory: SharedMemory,
        layout: RegionLayout,
        shared: Weak<Shared>,
    ) -> RegionInner {
        RegionInner { memory, layout, bound: Mutex::new(None), doubts: Mutex::default(), shared }
    }

    pub(crate) fn doubts(&self) -> std::sync::MutexGuard<'_, Doubts> {
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
        if let (Some((generation, region)), Some(shared)) = (bound, self.shared.upgrade()) {
            shared.unregister_later(generation, region);
        }
    }
}

/// Memory shared with the daemon: a pool of places for blocks. Unregistered when the last handle
/// is dropped.
#[derive(Clone)]
pub struct RegionHandle {
    pub(crate) inner: Arc<RegionInner>,
}

impl RegionHandle {
    /// The memory itself.
    pub fn memory(&self) -> &SharedMemory {
        &self.inner.memory
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
            self.inner.memory.write_at(offset, head).ok()
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
            self.inner.memory.read_at(offset, part).ok()
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
        ClientError::OutOfRegion { offset, end, bytes: self.inner.memory.bytes() }
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

/// What a lookup found.
#[derive(Debug)]
#[must_use = "dropping a hit ends its lease"]
pub enum Lookup {
    /// The start of the prefix is there.
    Hit(Hit),
    /// Nothing is there, or nobody could say: go on without.
    Miss,
}

impl Lookup {
    /// Blocks found, 0 for a miss.
    pub fn blocks(&self) -> usize {
        match self {
            Lookup::Hit(hit) => hit.blocks,
            Lookup::Miss => 0,
        }
    }
}

/// A run of blocks that all of the asked prefixes have.
#[derive(Debug)]
pub struct Hit {
    /// How many, at least 1.
    pub blocks: usize,
    /// The run cut by tier.
    pub runs: Vec<Run>,
    /// Keeps the blocks from being evicted; `None` when none was asked for.
    pub lease: Option<Lease>,
}

/// A client's expiring pin. Ended when dropped.
pub struct Lease {
    pub(crate) id: LeaseId,
    pub(crate) generation: u64,
    /// How long it lives from the lookup on, milliseconds.
    pub lease_ms: u32,
    pub(crate) shared: Weak<Shared>,
}

impl Lease {
    /// The daemon's number.
    pub fn id(&self) -> LeaseId {
        self.id
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.release_later(self.generation, self.id);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Lease({}, {} ms)", self.id.0, self.lease_ms)
    }
}

/// What a ticket is for; decides what is answered when nobody can say how it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TicketKind {
    Load,
    Store,
    Prefetch,
}

impl TicketKind {
    /// The outcome when the daemon is gone.
    pub(crate) fn gone(self) -> Outcome {
        match self {
            TicketKind::Load | TicketKind::Prefetch => Outcome::Missed(MissReason::Gone),
            TicketKind::Store => Outcome::Rejected(RejectReason::Gone),
        }
    }

    /// The outcome when the daemon is busy.
    pub(crate) fn busy(self) -> Outcome {
        match self {
            TicketKind::Load | TicketKind::Prefetch => Outcome::Missed(MissReason::NoRoom),
            TicketKind::Store => Outcome::Busy,
        }
    }
}

#[derive(Debug)]
pub(crate) enum TicketState {
    Pending { generation: u64, id: TicketId },
    Ended { outcomes: Vec<Outcome>, failure: Option<ClientError> },
}

/// A load, store or prefetch under way, or its outcome.
///
/// Until it has ended, the daemon may copy into a load's places, and out of a store's. Dropping the
/// ticket before that puts the places in doubt ([`RegionHandle::places_in_doubt`]).
#[must_use = "a ticket has to be waited for; its places belong to the daemon until then"]
pub struct Ticket {
    pub(crate) kind: TicketKind,
    pub(crate) blocks: usize,
    pub(crate) state: TicketState,
    pub(crate) claim: Option<Claim>,
}

impl Ticket {
    /// Blocks in the request.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// One outcome per block, when it has ended.
    pub fn outcomes(&self) -> Option<&[Outcome]> {
        match &self.state {
            TicketState::Ended { outcomes, .. } => Some(outcomes),
            TicketState::Pending { .. } => None,
        }
    }

    /// Why the call itself failed, where the outcomes (all of them misses) do not say it.
    pub fn failure(&self) -> Option<&ClientError> {
        match &self.state {
            TicketState::Ended { failure, .. } => failure.as_ref(),
            TicketState::Pending { .. } => None,
        }
    }

    /// The daemon's number, while it has not ended.
    pub fn id(&self) -> Option<TicketId> {
        match self.state {
            TicketState::Pending { id, .. } => Some(id),
            TicketState::Ended { .. } => None,
        }
    }

    /// The daemon said that it has ended.
    pub(crate) fn end(&mut self, outcomes: Vec<Outcome>) {
        if let Some(claim) = self.claim.take() {
            claim.end();
        }
        self.state = TicketState::Ended { outcomes, failure: None };
    }

    /// Its connection was lost: it has ended for the caller, but its places are in doubt until
    /// the daemon has closed the connection.
    pub(crate) fn lose(&mut self) {
        self.claim = None;
        let outcomes = vec![self.kind.gone(); self.blocks];
        self.state = TicketState::Ended { outcomes, failure: None };
    }

    pub(crate) fn into_outcomes(mut self) -> Result<Vec<Outcome>, Ticket> {
        match &mut self.state {
            TicketState::Ended { outcomes, .. } => Ok(std::mem::take(outcomes)),
            TicketState::Pending { .. } => Err(self),
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Ticket")
            .field("kind", &self.kind)
            .field("blocks", &self.blocks)
            .field("state", &self.state)
            .finish()
    }
}
