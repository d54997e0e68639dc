//! The asynchronous client: every verb, with a deadline, and without errors on the paths that an
//! engine takes.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvtide_tiers::block::{BlockKey, NamespaceId, RegionLayout};
use kvtide_tiers::catalog::{
    Advice, ConversationUse, Drained, Hints, InspectPage, KeepRule, LoadBlock, MissReason, Outcome,
    PinId, StoreBlock, TicketId,
};
use kvtide_tiers::io::SharedMemory;
use serde_bytes::ByteBuf;
use tarpc::client::RpcError;
use tarpc::context::Context;

use crate::config::ClientConfig;
use crate::connection::{ClientCounters, Link, Shared, supervise};
use crate::doubt::Claim;
use crate::error::ClientError;
use crate::gpu::{GpuExport, GpuRegion};
use crate::handles::{
    Hit, Lease, Lookup, NamespaceHandle, NamespaceInner, Ticket, TicketKind, TicketState, bind,
    bound_on,
};
use crate::hello::SessionLimits;
use crate::protocol::{
    CallError, Digest, KvtideClient, NamespaceRow, NamespaceSpec, Pinned, StatsReply, StatusReport,
    TicketReply, VersionInfo, WireForget, WireInspect, WireKeep, WireLoad, WirePrefix, WireStore,
    pack_keys,
};
use crate::region::{AsRegion, RegionHandle, RegionInner, RegionRef};

mod prefill;

pub use prefill::{Admission, Grant, Prefill};
/// What a slow drive may need to commit what a drain has written.
const DRAIN_COMMIT: Duration = Duration::from_secs(10);

/// Pause before a busy daemon is asked again for the end of tickets.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// A connection to kvtided that mends itself. Cheap to clone; closed with the last clone.
///
/// Lookups, loads and stores never fail and never hang: with the daemon slow, gone or refusing, a
/// lookup is [`Lookup::Miss`], and a ticket ends with a miss or a rejection. Other calls say why
/// they failed. Must be used inside a tokio runtime; [`crate::blocking::Client`] brings its own.
#[derive(Clone)]
pub struct Client {
    guard: Arc<Guard>,
    hints: Hints,
}

struct Guard {
    shared: Arc<Shared>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// Which namespace to forget from, and what. For operators and owners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForgetWhat {
    /// These blocks, and all that follow them in their chains.
    Keys(NamespaceId, Vec<BlockKey>),
    /// What one conversation stored.
    Conversation(NamespaceId, u64),
    /// All blocks of a namespace, for good.
    Namespace(NamespaceId),
}

/// Which part of the block table to show. The default is the first page of all that the caller
/// may see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspect {
    /// Only these namespaces.
    pub namespaces: Option<Vec<NamespaceId>>,
    /// Only this tier.
    pub tier: Option<kvtide_tiers::catalog::Tier>,
    /// Only keys that start with these bytes.
    pub key_prefix: Vec<u8>,
    /// Where the last page ended, 0 at first.
    pub cursor: u32,
    /// Most rows; 0 for as many as the daemon gives.
    pub limit: u32,
}

/// What [`Client::load_prefix`] brought.
#[derive(Debug)]
pub struct LoadedPrefix {
    /// Blocks from the root on that are in the region now, verified.
    pub blocks: usize,
    /// One outcome per block that was to be loaded.
    pub outcomes: Vec<Outcome>,
    /// What the lookup advised, which was followed.
    pub advice: Advice,
    /// Loads that had not ended in time. Their places may still be written to; wait for them, or
    /// drop them and leave the places alone ([`RegionHandle::places_in_doubt`]).
    pub late: Vec<Ticket>,
}

impl Client {
    /// Connects. From then on the client reconnects by itself.
    ///
    /// # Errors
    /// When the daemon is not there, refuses, or does not answer within the configured time.
    pub async fn connect(config: ClientConfig) -> Result<Client, ClientError> {
        let shared = Shared::new(config);
        shared.connect().await?;
        tokio::spawn(supervise(Arc::clone(&shared)));
        Ok(Client { guard: Arc::new(Guard { shared }), hints: Hints::default() })
    }

    /// A client that connects in the background as soon as the daemon is there. Until then lookups
    /// miss, and opening namespaces and regions fails.
    pub fn connect_later(config: ClientConfig) -> Client {
        let shared = Shared::new(config);
        tokio::spawn(supervise(Arc::clone(&shared)));
        Client { guard: Arc::new(Guard { shared }), hints: Hints::default() }
    }

    /// The same client, whose lookups, loads, stores, prefetches and touches say this of the
    /// conversation that they are for. Wrong hints make the cache less useful and nothing else; in
    /// a shared namespace they count only where they cannot harm others.
    pub fn with_hints(&self, hints: Hints) -> Client {
        Client { hints, ..self.clone() }
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.guard.shared
    }

    /// Whether there is a connection just now.
    pub fn is_connected(&self) -> bool {
        self.shared().link().is_some()
    }

    /// Counters since the client was made.
    pub fn counters(&self) -> ClientCounters {
        self.shared().counters()
    }

    /// The daemon's limits for this session, when connected.
    pub fn limits(&self) -> Option<SessionLimits> {
        self.shared().link().map(|link| link.welcome.limits)
    }

    /// The session's number, when connected; another one after each reconnection.
    pub fn session(&self) -> Option<u64> {
        self.shared().link().map(|link| link.welcome.session)
    }

    /// A duplicate of the reading end of a pipe, not blocking, that becomes readable when tickets
    /// of this connection end: for an engine's event loop. The daemon writes a byte for each end,
    /// and none while the pipe is full, so it is a hint and no count: read it empty, then ask with
    /// [`Client::wait`]. At its end of file the connection is gone; take a new one after the
    /// reconnection.
    ///
    /// # Errors
    /// When not connected, or out of file descriptors.
    pub fn notify_fd(&self) -> Result<OwnedFd, ClientError> {
        let link = self.shared().gate()?;
        link.notify_fd().map_err(|error| ClientError::Memory(error.to_string()))
    }

    async fn ask<T, F>(
        &self,
        limit: Duration,
        ask: impl FnOnce(KvtideClient, Context) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        let link = self.shared().gate()?;
        self.shared().call(&link, limit, ask).await
    }

    async fn try_ask<T, F>(
        &self,
        limit: Duration,
        ask: impl FnOnce(KvtideClient, Context) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<Result<T, CallError>, RpcError>>,
    {
        Ok(self.ask(limit, ask).await??)
    }

    fn limit(&self) -> Duration {
        self.shared().config.call_timeout
    }

    /// Versions of daemon and protocol.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn version(&self) -> Result<VersionInfo, ClientError> {
        self.ask(self.limit(), |stub, context| async move { stub.version(context).await }).await
    }

    /// Opens a namespace. The handle stays valid across reconnections.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn open_namespace(
        &self,
        spec: &NamespaceSpec,
    ) -> Result<NamespaceHandle, ClientError> {
        loop {
            let link = self.shared().gate()?;
            let wire = spec.clone();
            let opened = self
                .shared()
                .call(&link, self.limit(), |stub, context| async move {
                    stub.open_namespace(context, wire).await
                })
                .await??;
            let inner = Arc::new(NamespaceInner {
                spec: spec.clone(),
                key: opened.key,
                bound: Mutex::new(Some((link.generation, opened.id))),
                key_changed: AtomicBool::new(false),
            });
            // A reconnection in between did not restore it.
            if self.shared().adopt_namespace(&inner, link.generation) {
                return Ok(NamespaceHandle { inner });
            }
        }
    }

    /// Makes shared memory for `layout` and registers it. The handle stays valid across
    /// reconnections.
    ///
    /// # Errors
    /// A layout that breaks a rule, no memory, or see [`ClientError`].
    pub async fn create_region(&self, layout: RegionLayout) -> Result<RegionHandle, ClientError> {
        layout.check(u64::MAX)?;
        let memory = SharedMemory::create("kvtide-region", layout.region_bytes())
            .map_err(|error| ClientError::Memory(error.to_string()))?;
        self.register_region(memory, layout).await
    }

    /// Registers memory that the caller has made already (a memfd sealed against shrinking).
    ///
    /// # Errors
    /// A layout that does not fit the memory, or see [`ClientError`].
    pub async fn register_region(
        &self,
        memory: SharedMemory,
        layout: RegionLayout,
    ) -> Result<RegionHandle, ClientError> {
        layout.check(memory.bytes())?;
        let region = RegionHandle::new(memory, layout, Arc::downgrade(self.shared()));
        self.adopt(&region.inner).await?;
        Ok(region)
    }

    /// Registers GPU memory of this process, which the daemon imports; at most the call timeout.
    /// The region stays valid across reconnections; until the daemon has imported it again, what
    /// names it misses. `keep` is dropped when the daemon has let go of the memory: whatever frees
    /// the memory on drop (as memory must not be freed while it is imported elsewhere), or `()`.
    ///
    /// # Errors
    /// A layout or ring that breaks a rule, a GPU that the daemon does not use, memory that it
    /// cannot import, or see [`ClientError`].
    pub async fn register_gpu_region(
        &self,
        export: GpuExport,
        layout: RegionLayout,
        keep: impl Send + Sync + 'static,
    ) -> Result<GpuRegion, ClientError> {
        let region = GpuRegion::new(export, layout, Box::new(keep), self.shared())?;
        self.adopt(&region.inner).await?;
        Ok(region)
    }

    /// Ends a region's registration now, also for its other handles, rather than when the last of
    /// them is dropped. When this returns `Ok`, the memory may be freed.
    ///
    /// # Errors
    /// [`ClientError::Deadline`] when the daemon has not let go of the memory within the call
    /// timeout. It may still have it imported.
    pub async fn unregister_gpu_region(&self, region: &GpuRegion) -> Result<(), ClientError> {
        let limit = self.limit();
        if region.end(self.shared(), limit).await {
            return Ok(());
        }
        let after_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        Err(ClientError::Deadline { after_ms })
    }

    /// Registers a region on the current connection, and keeps it from now on.
    async fn adopt(&self, region: &Arc<RegionInner>) -> Result<(), ClientError> {
        loop {
            let link = self.shared().gate()?;
            let id = self.shared().register(&link, region).await?;
            bind(&region.bound, Some((link.generation, id)));
            // A reconnection in between did not register it.
            if self.shared().adopt_region(region, link.generation) {
                return Ok(());
            }
        }
    }

    /// The longest run of blocks that all of the prefixes have, with a lease of `lease` on it
    /// (none for zero). Several prefixes are those of the ranks or groups of one model, all with
    /// the same number of keys. Keys beyond the daemon's limit per call are not asked for.
    pub async fn lookup(
        &self,
        prefixes: &[(&NamespaceHandle, &[BlockKey])],
        lease: Duration,
    ) -> Lookup {
        match self.try_lookup(prefixes, lease).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "a lookup failed; taken as a miss");
                Lookup::Miss
            }
        }
    }

    /// As [`Client::lookup`], but says why nothing could be asked.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn try_lookup(
        &self,
        prefixes: &[(&NamespaceHandle, &[BlockKey])],
        lease: Duration,
    ) -> Result<Lookup, ClientError> {
        let link = self.shared().gate()?;
        let keys_max = keys_per_call(&link) / prefixes.len().max(1);
        let mut wire = Vec::with_capacity(prefixes.len());
        for (namespace, keys) in prefixes {
            let keys = keys.get(..keys_max).unwrap_or(keys);
            wire.push(WirePrefix {
                namespace: namespace_on(&link, namespace)?,
                keys: pack_keys(keys),
            });
        }
        let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let hints = self.hints;
        let reply = self
            .shared()
            .call(&link, self.limit(), |stub, context| async move {
                stub.lookup(context, wire, lease_ms, hints).await
            })
            .await??;
        let lease = reply.lease.map(|id| Lease {
            id,
            generation: link.generation,
            lease_ms: reply.lease_ms,
            shared: Arc::downgrade(self.shared()),
        });
        if reply.blocks == 0 && reply.dropped.is_none() {
            return Ok(Lookup::Miss);
        }
        let blocks = usize::try_from(reply.blocks).unwrap_or(usize::MAX);
        let (runs, advice, dropped) =
            (reply.runs, reply.advice, reply.dropped.map(|dropped| *dropped));
        Ok(Lookup::Hit(Hit { blocks, runs, advice, lease, dropped }))
    }

    /// Copies blocks into a region, waiting up to `wait` for the end (zero: not at all).
    pub async fn load(
        &self,
        lease: &Lease,
        namespace: &NamespaceHandle,
        region: &impl AsRegion,
        blocks: &[LoadBlock],
        wait: Duration,
    ) -> Ticket {
        let region = region.as_region();
        let places: Vec<u32> = blocks.iter().map(|block| block.place).collect();
        let keys = pack_keys(blocks.iter().map(|block| &block.key));
        let touched = Some((region.clone(), places.clone()));
        let prepare = |link: &Link| {
            if lease.generation != link.generation {
                return Err(ClientError::Call(CallError::NotFound("the lease".into())));
            }
            Ok(WireLoad {
                lease: lease.id,
                namespace: namespace_on(link, namespace)?,
                region: region_on(link, &region)?,
                after_event: region.after_event(),
                keys,
                places,
                hints: self.hints,
            })
        };
        let ask = |stub: KvtideClient, context, load, wait_ms| async move {
            stub.load(context, load, wait_ms).await
        };
        self.ticket(TicketKind::Load, blocks.len(), touched, wait, prepare, ask).await
    }

    /// Copies blocks out of a region into the cache, waiting up to `wait` for the end (zero: not
    /// at all). The places may be written to again when the ticket has ended, and not before: what
    /// is written there meanwhile may be stored under the blocks' keys.
    pub async fn store(
        &self,
        namespace: &NamespaceHandle,
        conversation: u64,
        region: &impl AsRegion,
        blocks: &[StoreBlock],
        wait: Duration,
    ) -> Ticket {
        let region = region.as_region();
        let touched = Some((region.clone(), blocks.iter().map(|block| block.place).collect()));
        let prepare = |link: &Link| {
            Ok(WireStore {
                namespace: namespace_on(link, namespace)?,
                conversation,
                region: region_on(link, &region)?,
                after_event: region.after_event(),
                keys: pack_keys(blocks.iter().map(|block| &block.key)),
                parents: pack_keys(blocks.iter().map(|block| &block.parent)),
                blocks: blocks
                    .iter()
                    .map(|each| (each.position, each.tokens, each.place))
                    .collect(),
                hints: self.hints,
            })
        };
        let ask = |stub: KvtideClient, context, store, wait_ms| async move {
            stub.store(context, store, wait_ms).await
        };
        self.ticket(TicketKind::Store, blocks.len(), touched, wait, prepare, ask).await
    }

    /// Brings blocks of nvme into host RAM ahead of a load.
    pub async fn prefetch(
        &self,
        namespace: &NamespaceHandle,
        keys: &[BlockKey],
        wait: Duration,
    ) -> Ticket {
        let prepare = |link: &Link| prefix_on(link, namespace, keys);
        let hints = self.hints;
        let ask = |stub: KvtideClient, context, prefix, wait_ms| async move {
            stub.prefetch(context, prefix, wait_ms, hints).await
        };
        self.ticket(TicketKind::Prefetch, keys.len(), None, wait, prepare, ask).await
    }

    async fn ticket<W, F>(
        &self,
        kind: TicketKind,
        blocks: usize,
        touched: Option<(RegionRef<'_>, Vec<u32>)>,
        wait: Duration,
        prepare: impl FnOnce(&Link) -> Result<W, ClientError>,
        ask: impl FnOnce(KvtideClient, Context, W, u32) -> F,
    ) -> Ticket
    where
        F: Future<Output = Result<Result<TicketReply, CallError>, RpcError>>,
    {
        let prepared = self.shared().gate().and_then(|link| {
            if let Some((region, places)) = &touched {
                region.inner.check_places(places)?;
            }
            prepare(&link).map(|wire| (link, wire))
        });
        let (link, wire) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return failed_ticket(kind, blocks, error),
        };
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let limit = self.limit().saturating_add(Duration::from_millis(u64::from(wait_ms)));
        // Leaves the places in doubt when this future is dropped, and on every way out of it but
        // those on which the daemon has said that it will not touch them (any more).
        let mut claim = touched.map(|(region, places)| Claim::new(&region, places, &link));
        let call =
            self.shared().call(&link, limit, |stub, context| ask(stub, context, wire, wait_ms));
        let reply = call.await.and_then(|answer| answer.map_err(ClientError::Call));
        let over = match &reply {
            Ok(TicketReply::Pending(id)) => {
                if let Some(claim) = &mut claim {
                    claim.set_ticket(*id);
                }
                false
            }
            Ok(TicketReply::Ended(_)) => true,
            Err(ClientError::Call(error)) => !matches!(error, CallError::Internal(_)),
            Err(_) => false,
        };
        if let Some(claim) = claim.take_if(|_| over) {
            claim.end();
        }
        match reply {
            Ok(TicketReply::Pending(id)) => {
                let state = TicketState::Pending { generation: link.generation, id };
                Ticket { kind, blocks, state, claim }
            }
            Ok(TicketReply::Ended(outcomes)) if outcomes.len() == blocks => {
                let state = TicketState::Ended { outcomes, failure: None };
                Ticket { kind, blocks, state, claim: None }
            }
            Ok(TicketReply::Ended(_)) => {
                let what = "a ticket ended with another number of blocks";
                failed_ticket(kind, blocks, ClientError::NotKvtide { what })
            }
            Err(error) => {
                tracing::debug!(%error, ?kind, "a call failed; taken as a miss");
                failed_ticket(kind, blocks, error)
            }
        }
    }

    /// Waits for a ticket's end: one outcome per block, in the order of the request.
    ///
    /// # Errors
    /// The ticket itself, when it has not ended within `timeout`. A ticket whose connection is
    /// gone ends with misses.
    pub async fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<Vec<Outcome>, Ticket> {
        let mut all = self.wait_all(vec![ticket], timeout).await;
        all.pop().unwrap_or_else(|| Ok(Vec::new()))
    }

    /// Waits for several tickets; the results are in the order of the tickets.
    ///
    /// # Errors
    /// Each ticket that has not ended within `timeout`.
    pub async fn wait_all(
        &self,
        mut tickets: Vec<Ticket>,
        timeout: Duration,
    ) -> Vec<Result<Vec<Outcome>, Ticket>> {
        let until = Instant::now() + timeout.min(crate::protocol::DEADLINE_MAX);
        loop {
            let generation = self.shared().link().map(|link| link.generation);
            let mut pending: Vec<TicketId> = Vec::new();
            for ticket in &mut tickets {
                if let TicketState::Pending { generation: on, id } = ticket.state {
                    if Some(on) == generation {
                        pending.push(id);
                    } else {
                        ticket.lose();
                    }
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if pending.is_empty() {
                break;
            }
            match self.wait_round(pending, left).await {
                Ok(ends) => settle(&mut tickets, ends),
                Err(ClientError::Disconnected) => continue,
                Err(error) => {
                    tracing::debug!(%error, "a wait failed");
                    if left.is_zero() || !matches!(error, ClientError::Call(CallError::Busy(_))) {
                        break;
                    }
                    tokio::time::sleep(BUSY_PAUSE.min(left)).await;
                }
            }
            if left.is_zero() {
                break;
            }
        }
        tickets.into_iter().map(Ticket::into_outcomes).collect()
    }

    async fn wait_round(
        &self,
        pending: Vec<TicketId>,
        left: Duration,
    ) -> Result<Vec<crate::protocol::TicketEnd>, ClientError> {
        let wait_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        self.try_ask(self.limit().saturating_add(left), |stub, context| async move {
            stub.wait(context, pending, wait_ms).await
        })
        .await
    }

    /// Ends a lease now, rather than soon after it is dropped.
    ///
    /// # Errors
    /// See [`ClientError`]; the lease then ends by its expiry.
    pub async fn release(&self, lease: Lease) -> Result<(), ClientError> {
        let mut lease = lease;
        lease.shared = std::sync::Weak::new();
        let link = self.shared().gate()?;
        if link.generation == lease.generation {
            let leases = vec![lease.id];
            let ask =
                |stub: KvtideClient, context| async move { stub.release(context, leases).await };
            self.shared().call(&link, self.limit(), ask).await??;
        }
        Ok(())
    }

    /// Marks blocks as used now; answers how many there were. With hints ([`Client::with_hints`])
    /// it tells of a conversation without asking for anything: that it is over, or, by
    /// [`Hints::drop`], that its blocks can go now; then it answers how many went.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn touch(
        &self,
        namespace: &NamespaceHandle,
        keys: &[BlockKey],
    ) -> Result<u64, ClientError> {
        let link = self.shared().gate()?;
        let prefix = prefix_on(&link, namespace, keys)?;
        let hints = self.hints;
        self.try_ask(self.limit(), |stub, context| async move {
            stub.touch(context, prefix, hints).await
        })
        .await
    }

    /// Tells the daemon that these blocks' bytes are wrong: they are dropped and refused. In a
    /// shared namespace for operators only.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn report_bad(
        &self,
        namespace: &NamespaceHandle,
        keys: &[BlockKey],
    ) -> Result<u64, ClientError> {
        let link = self.shared().gate()?;
        let prefix = prefix_on(&link, namespace, keys)?;
        self.try_ask(
            self.limit(),
            |stub, context| async move { stub.report_bad(context, prefix).await },
        )
        .await
    }

    /// Looks up a prefix and loads of it what the daemon advises to load, which is all that is
    /// there unless computing is faster: block `i` into `places[i]`. At most `timeout`.
    pub async fn load_prefix(
        &self,
        namespace: &NamespaceHandle,
        region: &impl AsRegion,
        keys: &[BlockKey],
        places: &[u32],
        timeout: Duration,
    ) -> LoadedPrefix {
        let advice = Advice::default();
        let mut loaded = LoadedPrefix { blocks: 0, outcomes: Vec::new(), advice, late: Vec::new() };
        let timeout = timeout.min(crate::protocol::DEADLINE_MAX);
        let until = Instant::now() + timeout;
        let keys = keys.get(..places.len()).unwrap_or(keys);
        let found = self.lookup(&[(namespace, keys)], timeout.saturating_add(self.limit())).await;
        let Lookup::Hit(Hit { advice, lease: Some(lease), .. }) = found else { return loaded };
        loaded.advice = advice;
        if advice.load == 0 {
            return loaded;
        }
        let blocks: Vec<LoadBlock> = keys
            .iter()
            .zip(places)
            .take(usize::try_from(advice.load).unwrap_or(usize::MAX))
            .map(|(key, place)| LoadBlock { key: *key, place: *place })
            .collect();
        let left = until.saturating_duration_since(Instant::now());
        let ticket = self.load(&lease, namespace, region, &blocks, left).await;
        let left = until.saturating_duration_since(Instant::now());
        match self.wait(ticket, left).await {
            Ok(outcomes) => loaded.outcomes = outcomes,
            Err(late) => {
                loaded.outcomes = vec![Outcome::Missed(MissReason::Deadline); blocks.len()];
                loaded.late.push(late);
            }
        }
        let good = |outcome: &&Outcome| matches!(outcome, Outcome::Loaded(_));
        loaded.blocks = loaded.outcomes.iter().take_while(good).count();
        loaded
    }

    /// Stores the last `places.len()` blocks of a prefix, each of the namespace's tokens per block;
    /// `keys` are those of the whole prefix, root first. At most `timeout`; one outcome per stored
    /// block, [`Outcome::Busy`] for those that had not ended in time; their places are in doubt
    /// then ([`RegionHandle::places_in_doubt`]).
    pub async fn store_prefix(
        &self,
        namespace: &NamespaceHandle,
        conversation: u64,
        region: &impl AsRegion,
        keys: &[BlockKey],
        places: &[u32],
        timeout: Duration,
    ) -> Vec<Outcome> {
        let first = keys.len().saturating_sub(places.len());
        let tokens = namespace.inner.spec.namespace.layout.tokens_per_block;
        let parents = std::iter::once(&BlockKey::ROOT).chain(keys);
        let blocks: Vec<StoreBlock> = keys
            .iter()
            .zip(parents)
            .zip(0u32..)
            .skip(first)
            .zip(places)
            .map(|(((key, parent), position), place)| StoreBlock {
                key: *key,
                parent: *parent,
                position,
                tokens,
                place: *place,
            })
            .collect();
        let until = Instant::now() + timeout.min(crate::protocol::DEADLINE_MAX);
        let per_call = self.shared().link().map_or(usize::MAX, |link| keys_per_call(&link));
        let mut outcomes = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(per_call.max(1)) {
            let left = until.saturating_duration_since(Instant::now());
            let ticket = self.store(namespace, conversation, region, part, left).await;
            let left = until.saturating_duration_since(Instant::now());
            let ended = self.wait(ticket, left).await;
            outcomes.extend(ended.unwrap_or_else(|late| vec![late.kind.busy(); late.blocks]));
        }
        outcomes
    }

    /// Declares which blocks a conversation loses first when it is over its quota, and says what it
    /// holds. The rule is forgotten when the daemon ends, and by 65,536 other conversations that
    /// hold nothing.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn keep(
        &self,
        namespace: &NamespaceHandle,
        conversation: u64,
        rule: KeepRule,
    ) -> Result<ConversationUse, ClientError> {
        let link = self.shared().gate()?;
        let namespace = namespace_on(&link, namespace)?;
        let keep = WireKeep { namespace, conversation, rule };
        let ask = |stub: KvtideClient, context| async move { stub.keep(context, keep).await };
        Ok(self.shared().call(&link, self.limit(), ask).await??)
    }

    /// Keeps blocks from being evicted for `ttl`, beyond the session's end.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
        ttl: Duration,
    ) -> Result<Pinned, ClientError> {
        let prefix = WirePrefix { namespace, keys: pack_keys(keys) };
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        self.try_ask(self.limit(), |stub, context| async move {
            stub.pin(context, prefix, ttl_ms).await
        })
        .await
    }

    /// Ends a pin.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn unpin(&self, pin: PinId) -> Result<u64, ClientError> {
        self.try_ask(self.limit(), |stub, context| async move { stub.unpin(context, pin).await })
            .await
    }

    /// Drops blocks from all tiers; answers how many.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn forget(&self, what: &ForgetWhat) -> Result<u64, ClientError> {
        let wire = match what {
            ForgetWhat::Keys(namespace, keys) => {
                WireForget::Keys(WirePrefix { namespace: *namespace, keys: pack_keys(keys) })
            }
            ForgetWhat::Conversation(namespace, number) => {
                WireForget::Conversation(*namespace, *number)
            }
            ForgetWhat::Namespace(namespace) => WireForget::Namespace(*namespace),
        };
        self.try_ask(self.limit(), |stub, context| async move { stub.forget(context, wire).await })
            .await
    }

    /// A page of the block table.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn inspect(&self, query: &Inspect) -> Result<InspectPage, ClientError> {
        let wire = WireInspect {
            namespaces: query.namespaces.clone(),
            tier: query.tier,
            key_prefix: ByteBuf::from(query.key_prefix.clone()),
            cursor: query.cursor,
            limit: query.limit,
        };
        self.try_ask(self.limit(), |stub, context| async move { stub.inspect(context, wire).await })
            .await
    }

    /// Counters.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn stats(&self) -> Result<StatsReply, ClientError> {
        self.try_ask(self.limit(), |stub, context| async move { stub.stats(context).await }).await
    }

    /// How the daemon runs.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn status(&self) -> Result<StatusReport, ClientError> {
        self.try_ask(self.limit(), |stub, context| async move { stub.status(context).await }).await
    }

    /// The namespaces that the caller may see.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn namespaces(&self) -> Result<Vec<NamespaceRow>, ClientError> {
        self.try_ask(self.limit(), |stub, context| async move { stub.namespaces(context).await })
            .await
    }

    /// What of a namespace lies in the node, in filters of `bytes_max` bytes together at most: for
    /// routers, which ask every node now and then.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn digest(
        &self,
        namespace: NamespaceId,
        bytes_max: u32,
    ) -> Result<Digest, ClientError> {
        let limit = self.limit();
        self.try_ask(limit, |stub, context| async move {
            stub.digest(context, namespace, bytes_max).await
        })
        .await
    }

    /// Stops admission and writes down what is only in memory, hottest first, as far as the drive
    /// gets within `deadline`. Answered a moment later at the latest, when that is on the device.
    /// Operators only.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drain(&self, deadline: Duration) -> Result<Drained, ClientError> {
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let limit = deadline.saturating_add(self.limit()).saturating_add(DRAIN_COMMIT);
        self.try_ask(limit, |stub, context| async move { stub.drain(context, deadline_ms).await })
            .await
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Client")
            .field("socket", &self.shared().config.socket)
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}

fn keys_per_call(link: &Link) -> usize {
    usize::try_from(link.welcome.limits.keys_per_call.max(1)).unwrap_or(usize::MAX)
}

fn namespace_on(link: &Link, namespace: &NamespaceHandle) -> Result<NamespaceId, ClientError> {
    if namespace.key_changed() {
        return Err(ClientError::KeyChanged);
    }
    bound_on(&namespace.inner.bound, link.generation)
        .ok_or_else(|| ClientError::Call(CallError::NotFound("the namespace".into())))
}

fn region_on(
    link: &Link,
    region: &RegionRef<'_>,
) -> Result<kvtide_tiers::catalog::RegionId, ClientError> {
    bound_on(&region.inner.bound, link.generation)
        .ok_or_else(|| ClientError::Call(CallError::NotFound("the region".into())))
}

fn prefix_on(
    link: &Link,
    namespace: &NamespaceHandle,
    keys: &[BlockKey],
) -> Result<WirePrefix, ClientError> {
    Ok(WirePrefix { namespace: namespace_on(link, namespace)?, keys: pack_keys(keys) })
}

fn failed_ticket(kind: TicketKind, blocks: usize, failure: ClientError) -> Ticket {
    let outcome = match &failure {
        ClientError::Call(CallError::Busy(_)) => kind.busy(),
        ClientError::Deadline { .. } if kind != TicketKind::Store => {
            Outcome::Missed(MissReason::Deadline)
        }
        _ => kind.gone(),
    };
    let state = TicketState::Ended { outcomes: vec![outcome; blocks], failure: Some(failure) };
    Ticket { kind, blocks, state, claim: None }
}

/// Ends the tickets that the daemon says have ended.
fn settle(tickets: &mut [Ticket], ends: Vec<crate::protocol::TicketEnd>) {
    for end in ends {
        let mut matching = tickets.iter_mut().filter(|ticket| ticket.id() == Some(end.ticket));
        let Some(ticket) = matching.next() else { continue };
        let outcomes = end.outcomes.filter(|outcomes| outcomes.len() == ticket.blocks);
        let gone = vec![ticket.kind.gone(); ticket.blocks];
        ticket.end(outcomes.unwrap_or(gone));
    }
}
