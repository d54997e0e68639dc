//! What a client holds on to beside its regions: namespaces, leases and tickets.
//!
//! Namespaces stay valid across a restart of the daemon: the connection opens them again. Leases
//! and tickets belong to one connection and end with it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvtide_tiers::block::{BlockKey, NamespaceId, NamespaceKey};
use kvtide_tiers::catalog::{
    Advice, Dropped, LeaseId, MissReason, Outcome, RejectReason, Run, TicketId,
};

use crate::connection::Shared;
use crate::doubt::Claim;
use crate::error::ClientError;
use crate::protocol::NamespaceSpec;

/// A number of the daemon's, valid on one connection.
pub(crate) type Bound<T> = Mutex<Option<(u64, T)>>;

pub(crate) fn bound_on<T: Copy>(bound: &Bound<T>, generation: u64) -> Option<T> {
    let bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
    bound.filter(|(on, _)| *on == generation).map(|(_, id)| id)
}

/// The number on this connection, which is then bound no more.
pub(crate) fn unbind_on<T>(bound: &Bound<T>, generation: u64) -> Option<T> {
    let mut bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
    bound.take_if(|(on, _)| *on == generation).map(|(_, id)| id)
}

/// Binds, unless a newer connection has bound already.
pub(crate) fn bind_newer<T>(bound: &Bound<T>, generation: u64, id: T) {
    let mut bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
    if bound.as_ref().is_none_or(|(on, _)| *on <= generation) {
        *bound = Some((generation, id));
    }
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
    /// How many, at least 1, unless `dropped` says why there are none.
    pub blocks: usize,
    /// The run cut by tier.
    pub runs: Vec<Run>,
    /// How much of it to load, so that the first token comes soonest.
    pub advice: Advice,
    /// Keeps the blocks from being evicted; `None` when none was asked for.
    pub lease: Option<Lease>,
    /// What the conversation lost to its quota, when the run ends where that was.
    pub dropped: Option<Dropped>,
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
/// ticket before that puts the places in doubt ([`crate::RegionHandle::places_in_doubt`]).
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
