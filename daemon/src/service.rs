//! Wire to domain and back: each verb checks what its caller may do, keeps the service's limits,
//! and asks the catalog. Nothing is decided about blocks here.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtide_client::protocol::{
    CallError, Digest, Kvtide, KvtideRequest, NamespaceRow, NamespaceSpec, OpenedNamespace,
    PROTOCOL_VERSION, Pinned, StatsReply, StatusReport, TicketEnd, TicketReply, VersionInfo,
    WireForget, WireInspect, WireKeep, WireLoad, WirePrefix, WireStore, unpack_keys,
};
use kvtide_tiers::block::{BlockKey, GpuRegionSpec, NamespaceId, RegionLayout};
use kvtide_tiers::catalog::{
    CodecReport, ConversationUse, Drained, Forget, GrantId, Hints, InspectPage, InspectQuery,
    LeaseId, LoadBlock, LookupReply, PinId, PrefillAnswer, PrefillAsk, PrefillReport, PrefixQuery,
    Refusal, RegionId, Reply, Request, StoreBlock, TicketId,
};
use kvtide_tiers::io::{Region, SharedMemory};
use tarpc::context::Context;

use crate::app::App;
use crate::counters::ServiceCounters;
use crate::drain;
use crate::gpu;
use crate::session::{RegionKind, Session};
use crate::touches::Touch;

mod prefill;

/// Most namespaces whose codec `status` shows.
const CODECS_MAX: usize = 256;

/// Longest time that a call may wait for tickets.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// The service for one session.
#[derive(Clone)]
pub struct Service {
    app: Arc<App>,
    session: Arc<Session>,
    touch: Option<Arc<Touch>>,
}

/// Removes the ticket's entry when the call that made it is given up.
struct Waited<'a> {
    session: &'a Session,
    ticket: Option<TicketId>,
}

impl Drop for Waited<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.session.tickets.abandon(ticket);
        }
    }
}

impl Service {
    /// The service for `session`.
    pub fn new(app: Arc<App>, session: Arc<Session>) -> Service {
        Service { app, session, touch: None }
    }

    /// The service for one call, made in the order in which the calls are received: from now on
    /// the region that it names is touched.
    pub fn for_call(&self, call: &KvtideRequest) -> Service {
        let region = match call {
            KvtideRequest::Load { load, .. } => Some(load.region),
            KvtideRequest::Store { store, .. } => Some(store.region),
            _ => None,
        };
        let touch = region.map(|region| Arc::new(self.session.touches.begin(region)));
        Service { touch, ..self.clone() }
    }

    fn called(&self, verb: &'static str) {
        self.app.counters.called(verb);
    }

    /// Counts what a call came to.
    fn done<T>(&self, result: Result<T, CallError>) -> Result<T, CallError> {
        match &result {
            Ok(_) => {}
            Err(CallError::Busy(_)) => ServiceCounters::count(&self.app.counters.calls_busy),
            Err(_) => ServiceCounters::count(&self.app.counters.calls_refused),
        }
        result
    }

    async fn ask(&self, request: Request) -> Result<Reply, CallError> {
        answered(self.app.ask(self.session.id, request).await?)
    }

    async fn count(&self, request: Request) -> Result<u64, CallError> {
        match self.ask(request).await? {
            Reply::Count(count) => Ok(count),
            _ => Err(odd_reply()),
        }
    }

    /// The namespace, if the session opened it.
    fn opened(&self, id: NamespaceId) -> Result<NamespaceId, CallError> {
        if self.session.has_open(id) {
            return Ok(id);
        }
        Err(CallError::NotAllowed(format!("namespace {} is not opened by this session", id.0)))
    }

    /// The namespace, if the caller opened it, owns it, or is an operator. Others learn nothing,
    /// not even whether it exists. `owner` excludes those who only share it.
    fn managed(&self, id: NamespaceId, owner_only: bool) -> Result<NamespaceId, CallError> {
        let caller = &self.session.caller;
        let unknown = || CallError::NotFound(format!("namespace {}", id.0));
        let owner = self.app.owner_seen(caller, id).ok_or_else(unknown)?;
        let owns = caller.tenant.as_ref().is_some_and(|tenant| tenant.name == owner);
        if owner_only && !owns && !caller.operator {
            let text = format!("namespace {} is shared; only operators may do this", id.0);
            return Err(CallError::NotAllowed(text));
        }
        Ok(id)
    }

    fn keys(&self, bytes: &[u8]) -> Result<Vec<BlockKey>, CallError> {
        let keys = unpack_keys(bytes).ok_or_else(|| {
            let text = format!("keys have {} bytes; a multiple of 32 is allowed", bytes.len());
            CallError::Invalid(text)
        })?;
        if keys.len() > self.app.limits().catalog.keys_per_call {
            return Err(CallError::Refused(Refusal::TooManyKeys));
        }
        Ok(keys)
    }

    fn prefix(&self, prefix: &WirePrefix) -> Result<PrefixQuery, CallError> {
        let namespace = self.opened(prefix.namespace)?;
        Ok(PrefixQuery { namespace, keys: self.keys(&prefix.keys)? })
    }

    /// Asks for a ticket, and waits for its end up to `wait_ms`.
    async fn ticket(&self, request: Request, wait_ms: u32) -> Result<TicketReply, CallError> {
        let max = self.app.limits().catalog.tickets_per_session;
        let room = self.session.tickets.reserve(max).map_err(CallError::Busy)?;
        let (tickets, touch) = (Arc::clone(&self.session.tickets), self.touch.clone());
        let (answer, answered_by) = tokio::sync::oneshot::channel();
        self.app.node().ask(self.session.id, request, move |reply| {
            let ticket = match &reply {
                Reply::Ticket(ticket) => Some(*ticket),
                _ => None,
            };
            if let Some(ticket) = ticket {
                tickets.admit(ticket, !answer.is_closed(), room, touch);
            }
            if answer.send(reply).is_err()
                && let Some(ticket) = ticket
            {
                tickets.abandon(ticket);
            }
        });
        let stopping = |_| CallError::Internal("the daemon is stopping".to_owned());
        let Reply::Ticket(ticket) = answered(answered_by.await.map_err(stopping)?)? else {
            return Err(odd_reply());
        };
        if wait_ms == 0 {
            return Ok(TicketReply::Pending(ticket));
        }
        let mut waited = Waited { session: &self.session, ticket: Some(ticket) };
        let limit = Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
        let mut ends = self.session.tickets.wait(&[ticket], limit).await;
        waited.ticket = None;
        match ends.pop() {
            Some(TicketEnd { outcomes: Some(outcomes), .. }) => Ok(TicketReply::Ended(outcomes)),
            _ => Ok(TicketReply::Pending(ticket)),
        }
    }

    /// What the caller may say of blocks of the namespace: in one that is only shared with it,
    /// nothing by which others lose blocks.
    fn hints(&self, namespace: NamespaceId, hints: Hints) -> Hints {
        let own = hints.says_nothing() || self.managed(namespace, true).is_ok();
        if own { hints } else { hints.harmless() }
    }

    async fn do_lookup(
        &self,
        prefixes: Vec<WirePrefix>,
        lease_ms: u32,
        hints: Hints,
    ) -> Result<LookupReply, CallError> {
        let prefixes: Vec<PrefixQuery> =
            prefixes.iter().map(|prefix| self.prefix(prefix)).collect::<Result<_, _>>()?;
        let namespaces = prefixes.iter().map(|prefix| prefix.namespace);
        let hints = namespaces.fold(hints, |hints, namespace| self.hints(namespace, hints));
        let limits = self.app.limits();
        let keys: usize = prefixes.iter().map(|prefix| prefix.keys.len()).sum();
        if keys > limits.catalog.keys_per_call {
            return Err(CallError::Refused(Refusal::TooManyKeys));
        }
        let asked = prefixes.first().map_or(0, |prefix| prefix.keys.len());
        let lease_ms = lease_ms.min(limits.catalog.lease_ms_max);
        match self.ask(Request::Lookup { prefixes, lease_ms, hints }).await? {
            Reply::Lookup(reply) => {
                let counters = &self.session.counters;
                counters.lookups.fetch_add(1, Ordering::Relaxed);
                counters.lookup_keys.fetch_add(asked as u64, Ordering::Relaxed);
                counters.lookup_hits.fetch_add(reply.blocks.into(), Ordering::Relaxed);
                Ok(reply)
            }
            _ => Err(odd_reply()),
        }
    }

    async fn do_load(&self, load: WireLoad, wait_ms: u32) -> Result<TicketReply, CallError> {
        let namespace = self.opened(load.namespace)?;
        let keys = self.keys(&load.keys)?;
        if keys.len() != load.places.len() {
            return Err(CallError::Invalid("one place per key is allowed".to_owned()));
        }
        let blocks = keys.into_iter().zip(load.places);
        let blocks = blocks.map(|(key, place)| LoadBlock { key, place }).collect();
        let (lease, region, after_event) = (load.lease, load.region, load.after_event);
        gpu::check_event(&self.session, region, after_event)?;
        let hints = self.hints(namespace, load.hints);
        let request = Request::Load { lease, namespace, region, after_event, blocks, hints };
        self.ticket(request, wait_ms).await
    }

    async fn do_store(&self, store: WireStore, wait_ms: u32) -> Result<TicketReply, CallError> {
        let namespace = self.opened(store.namespace)?;
        let (keys, parents) = (self.keys(&store.keys)?, self.keys(&store.parents)?);
        if keys.len() != store.blocks.len() || keys.len() != parents.len() {
            return Err(CallError::Invalid("one parent and place per key is allowed".to_owned()));
        }
        if let Some((position, ..)) = store.blocks.iter().find(|(_, tokens, _)| *tokens == 0) {
            let text =
                format!("the block at position {position} has 0 tokens; at least 1 is allowed");
            return Err(CallError::Invalid(text));
        }
        let blocks = keys
            .into_iter()
            .zip(parents)
            .zip(store.blocks)
            .map(|((key, parent), (position, tokens, place))| StoreBlock {
                key,
                parent,
                position,
                tokens,
                place,
            })
            .collect();
        let WireStore { conversation, region, after_event, .. } = store;
        gpu::check_event(&self.session, region, after_event)?;
        let hints = self.hints(namespace, store.hints);
        let request =
            Request::Store { namespace, conversation, region, after_event, blocks, hints };
        self.ticket(request, wait_ms).await
    }

    async fn do_register(&self, fd: u64, layout: RegionLayout) -> Result<RegionId, CallError> {
        let fd = self.session.take_descriptor(fd, Instant::now()).ok_or_else(|| {
            CallError::NotFound(format!("descriptor {fd}; it was used, expired, or never sent"))
        })?;
        // Mapping is quick, but checking a finely interleaved layout may take a second.
        let (app, session) = (Arc::clone(&self.app), Arc::clone(&self.session));
        let registered = tokio::task::spawn_blocking(move || {
            let invalid =
                |error: kvtide_tiers::io::RegionError| CallError::Invalid(error.to_string());
            let memory = SharedMemory::from_fd(fd).map_err(invalid)?;
            let bytes = memory.bytes();
            let room = session.region_room(bytes, app.limits().region_bytes_per_session);
            let room = room.map_err(CallError::Invalid)?;
            let region = Region::new(memory, layout).map_err(invalid)?;
            let id = app.node().register_region(session.id, region).map_err(CallError::Busy)?;
            room.keep(id, RegionKind::Host);
            Ok(id)
        });
        registered.await.unwrap_or_else(|_| Err(odd_reply()))
    }

    async fn do_forget(&self, what: WireForget) -> Result<u64, CallError> {
        let forget = match what {
            WireForget::Keys(prefix) => Forget::Keys {
                namespace: self.managed(prefix.namespace, true)?,
                keys: self.keys(&prefix.keys)?,
            },
            WireForget::Conversation(namespace, conversation) => {
                Forget::Conversation { namespace: self.managed(namespace, true)?, conversation }
            }
            WireForget::Namespace(namespace) => {
                let namespace = self.managed(namespace, true)?;
                let app = Arc::clone(&self.app);
                let turn = Arc::clone(&self.app.opening).lock_owned().await;
                let retired = tokio::task::spawn_blocking(move || {
                    let retired = app.retire_namespace(namespace);
                    drop(turn);
                    retired
                });
                retired.await.map_err(|_| odd_reply())??;
                Forget::Namespace { namespace }
            }
        };
        self.count(Request::Forget(forget)).await
    }

    async fn do_inspect(&self, query: WireInspect) -> Result<InspectPage, CallError> {
        let caller = &self.session.caller;
        let namespaces = match (caller.operator, query.namespaces) {
            (true, asked) => asked,
            (false, asked) => {
                let visible = self.app.visible(caller).into_iter().map(|row| row.id);
                let asked = asked.as_deref();
                Some(visible.filter(|id| asked.is_none_or(|asked| asked.contains(id))).collect())
            }
        };
        if query.key_prefix.len() > 32 {
            return Err(CallError::Invalid("a key has 32 bytes".to_owned()));
        }
        let limit = if query.limit == 0 { 4096 } else { query.limit.min(4096) };
        let request = Request::Inspect(InspectQuery {
            namespaces,
            tier: query.tier,
            key_prefix: query.key_prefix.into_vec(),
            cursor: query.cursor,
            limit,
        });
        match self.ask(request).await? {
            Reply::Inspect(page) => Ok(page),
            _ => Err(odd_reply()),
        }
    }

    async fn do_stats(&self) -> Result<StatsReply, CallError> {
        let caller = &self.session.caller;
        let mut sessions = std::collections::HashMap::<_, u64>::new();
        for session in self.app.sessions().values() {
            *sessions.entry(session.tenant()).or_default() += 1;
        }
        let own = self.session.tenant();
        let shown = self
            .app
            .tenants()
            .list
            .iter()
            .filter(|tenant| caller.operator || Some(tenant.id) == own);
        let tenants = shown
            .map(|tenant| {
                let id = Some(tenant.id);
                let count = sessions.get(&id).copied().unwrap_or(0);
                self.app.tenant_counters(id).stats(&tenant.name, count)
            })
            .collect();
        match self.ask(Request::Stats).await? {
            Reply::Stats(mut stats) => {
                stats.sessions = stats.sessions.saturating_sub(1);
                let owners = self.app.owners(Some(caller), &stats.owners);
                let service = caller.operator.then(|| self.app.counters.stats());
                let catalog = caller.operator.then_some(*stats);
                Ok(StatsReply { catalog, tenants, service, owners })
            }
            _ => Err(odd_reply()),
        }
    }

    async fn do_keep(&self, keep: WireKeep) -> Result<ConversationUse, CallError> {
        let namespace = self.opened(keep.namespace)?;
        let WireKeep { conversation, rule, .. } = keep;
        match self.ask(Request::Keep { namespace, conversation, rule }).await? {
            Reply::Conversation(held) => Ok(held),
            _ => Err(odd_reply()),
        }
    }

    /// What the caller may see of them; nothing while the catalog is too busy to say.
    async fn codecs(&self) -> Vec<CodecReport> {
        let Ok(Reply::Codecs(mut codecs)) = self.ask(Request::Codecs).await else {
            return Vec::new();
        };
        let visible = self.app.visible(&self.session.caller);
        codecs.retain(|codec| visible.iter().any(|row| row.id == codec.namespace));
        codecs.truncate(CODECS_MAX);
        codecs
    }

    async fn do_drain(&self, deadline_ms: u64) -> Result<Drained, CallError> {
        let caller = &self.session.caller;
        if !caller.operator {
            let text = format!("only operators may drain; add {} to `admin.uids`", caller.uid);
            return Err(CallError::NotAllowed(text));
        }
        self.app.set_draining();
        tracing::info!(client = %self.session.name, "an operator asked for a drain");
        match self.ask(Request::Drain { deadline_ms: Some(deadline_ms) }).await? {
            Reply::Drained(drained) => {
                drain::report(&drained);
                Ok(drained)
            }
            _ => Err(odd_reply()),
        }
    }
}

/// Busy and refused replies become errors of the call.
fn answered(reply: Reply) -> Result<Reply, CallError> {
    match reply {
        Reply::Busy(limit) => Err(CallError::Busy(limit)),
        Reply::Refused(refusal) => Err(CallError::Refused(refusal)),
        reply => Ok(reply),
    }
}

fn odd_reply() -> CallError {
    CallError::Internal("an answer of the wrong kind".to_owned())
}

impl Kvtide for Service {
    async fn version(self, _: Context) -> VersionInfo {
        self.called("version");
        VersionInfo {
            daemon: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL_VERSION,
            session: self.session.id.0,
        }
    }

    async fn open_namespace(
        self,
        _: Context,
        spec: NamespaceSpec,
    ) -> Result<OpenedNamespace, CallError> {
        self.called("open_namespace");
        let (app, session) = (Arc::clone(&self.app), Arc::clone(&self.session));
        let turn = Arc::clone(&self.app.opening).lock_owned().await;
        let opened = tokio::task::spawn_blocking(move || {
            let opened = app.open_namespace(&session, &spec);
            drop(turn);
            opened
        });
        self.done(opened.await.unwrap_or_else(|_| Err(odd_reply())))
    }

    async fn register_region(
        self,
        _: Context,
        fd: u64,
        layout: RegionLayout,
    ) -> Result<RegionId, CallError> {
        self.called("register_region");
        self.done(self.do_register(fd, layout).await)
    }

    async fn register_gpu_region(
        self,
        context: Context,
        spec: GpuRegionSpec,
    ) -> Result<RegionId, CallError> {
        self.called("register_gpu_region");
        self.done(gpu::register(&self.app, &self.session, spec, context.deadline).await)
    }

    async fn unregister_region(self, context: Context, region: RegionId) -> Result<(), CallError> {
        self.called("unregister_region");
        if matches!(self.session.region_kind(region), Some(RegionKind::Gpu { .. })) {
            let ended = gpu::unregister(&self.app, &self.session, region, context.deadline).await;
            return self.done(ended);
        }
        let (app, session) = (Arc::clone(&self.app), Arc::clone(&self.session));
        let ended = tokio::task::spawn_blocking(move || {
            // Waits for copies that are under way.
            app.node().unregister_region(session.id, region);
            session.region_ended(region);
        });
        ended.await.map_err(|_| odd_reply())
    }

    async fn quiesce(self, _: Context, region: RegionId, wait_ms: u32) -> Result<bool, CallError> {
        self.called("quiesce");
        let limit = Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
        Ok(self.session.touches.quiesce(region, limit).await)
    }

    async fn lookup(
        self,
        _: Context,
        prefixes: Vec<WirePrefix>,
        lease_ms: u32,
        hints: Hints,
    ) -> Result<LookupReply, CallError> {
        self.called("lookup");
        self.done(self.do_lookup(prefixes, lease_ms, hints).await)
    }

    async fn report_prefill(self, _: Context, report: PrefillReport) -> Result<bool, CallError> {
        self.called("report_prefill");
        self.done(self.do_report_prefill(report).await)
    }

    async fn admit_prefill(self, _: Context, ask: PrefillAsk) -> Result<PrefillAnswer, CallError> {
        self.called("admit_prefill");
        self.done(self.do_admit_prefill(ask).await)
    }

    async fn prefill_done(self, _: Context, grant: GrantId) -> Result<bool, CallError> {
        self.called("prefill_done");
        let ended = self.count(Request::PrefillDone { grant }).await;
        self.done(ended.map(|count| count > 0))
    }

    async fn load(
        self,
        _: Context,
        load: WireLoad,
        wait_ms: u32,
    ) -> Result<TicketReply, CallError> {
        self.called("load");
        self.done(self.do_load(load, wait_ms).await)
    }

    async fn store(
        self,
        _: Context,
        store: WireStore,
        wait_ms: u32,
    ) -> Result<TicketReply, CallError> {
        self.called("store");
        self.done(self.do_store(store, wait_ms).await)
    }

    async fn prefetch(
        self,
        _: Context,
        prefix: WirePrefix,
        wait_ms: u32,
        hints: Hints,
    ) -> Result<TicketReply, CallError> {
        self.called("prefetch");
        let hints = self.hints(prefix.namespace, hints);
        let result = match self.prefix(&prefix) {
            Ok(prefix) => self.ticket(Request::Prefetch { prefix, hints }, wait_ms).await,
            Err(error) => Err(error),
        };
        self.done(result)
    }

    async fn wait(
        self,
        _: Context,
        tickets: Vec<TicketId>,
        wait_ms: u32,
    ) -> Result<Vec<TicketEnd>, CallError> {
        self.called("wait");
        let limit = Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
        if tickets.len() > self.app.limits().catalog.tickets_per_session {
            let text = "more tickets than a session may have".to_owned();
            return self.done(Err(CallError::Invalid(text)));
        }
        Ok(self.session.tickets.wait(&tickets, limit).await)
    }

    async fn release(self, _: Context, leases: Vec<LeaseId>) -> Result<u64, CallError> {
        self.called("release");
        let mut ended = 0;
        for lease in leases {
            match self.count(Request::Release { lease }).await {
                Ok(count) => ended += count,
                Err(error @ CallError::Busy(_)) => return self.done(Err(error)),
                Err(_) => {}
            }
        }
        Ok(ended)
    }

    async fn touch(self, _: Context, prefix: WirePrefix, hints: Hints) -> Result<u64, CallError> {
        self.called("touch");
        let hints = self.hints(prefix.namespace, hints);
        let result = match self.prefix(&prefix) {
            Ok(prefix) => self.count(Request::Touch { prefix, hints }).await,
            Err(error) => Err(error),
        };
        self.done(result)
    }

    async fn pin(self, _: Context, prefix: WirePrefix, ttl_ms: u64) -> Result<Pinned, CallError> {
        self.called("pin");
        let ask = async {
            let namespace = self.managed(prefix.namespace, false)?;
            let prefix = PrefixQuery { namespace, keys: self.keys(&prefix.keys)? };
            if prefix.keys.is_empty() {
                return Err(CallError::Invalid("a pin of no keys; at least 1 is allowed".into()));
            }
            let ttl_ms = ttl_ms.min(self.app.limits().catalog.pin_ms_max);
            match self.ask(Request::Pin { prefix, ttl_ms }).await? {
                Reply::Pinned { pin, blocks } => Ok(Pinned { pin, blocks }),
                _ => Err(odd_reply()),
            }
        };
        let result = ask.await;
        self.done(result)
    }

    async fn unpin(self, _: Context, pin: PinId) -> Result<u64, CallError> {
        self.called("unpin");
        let result = self.count(Request::Unpin { pin }).await;
        self.done(result)
    }

    async fn forget(self, _: Context, what: WireForget) -> Result<u64, CallError> {
        self.called("forget");
        self.done(self.do_forget(what).await)
    }

    async fn report_bad(self, _: Context, prefix: WirePrefix) -> Result<u64, CallError> {
        self.called("report_bad");
        // Whoever only shares a namespace must not take its blocks from the others.
        let own = self.prefix(&prefix).and_then(|prefix| {
            self.managed(prefix.namespace, true)?;
            Ok(prefix)
        });
        let result = match own {
            Ok(PrefixQuery { namespace, keys }) => {
                let (client, blocks) = (&self.session.name, keys.len());
                tracing::warn!(%client, blocks, "a client reported bad blocks");
                self.count(Request::ReportBad { namespace, keys }).await
            }
            Err(error) => Err(error),
        };
        self.done(result)
    }

    async fn keep(self, _: Context, keep: WireKeep) -> Result<ConversationUse, CallError> {
        self.called("keep");
        self.done(self.do_keep(keep).await)
    }

    async fn inspect(self, _: Context, query: WireInspect) -> Result<InspectPage, CallError> {
        self.called("inspect");
        self.done(self.do_inspect(query).await)
    }

    async fn stats(self, _: Context) -> Result<StatsReply, CallError> {
        self.called("stats");
        self.done(self.do_stats().await)
    }

    async fn status(self, _: Context) -> Result<StatusReport, CallError> {
        self.called("status");
        let codecs = self.codecs().await;
        let stats = self.app.stats().await;
        Ok(crate::status::report(&self.app, &self.session, codecs, stats.as_deref()))
    }

    async fn namespaces(self, _: Context) -> Result<Vec<NamespaceRow>, CallError> {
        self.called("namespaces");
        Ok(self.app.visible(&self.session.caller))
    }

    async fn digest(
        self,
        _: Context,
        namespace: NamespaceId,
        bytes_max: u32,
    ) -> Result<Digest, CallError> {
        self.called("digest");
        let make = async {
            self.managed(namespace, false)?;
            let unknown = || CallError::NotFound(format!("namespace {}", namespace.0));
            let row = self.app.namespace_row(namespace).ok_or_else(unknown)?;
            self.app.digests.digest(&self.app, &row, bytes_max).await
        };
        let result = make.await;
        self.done(result)
    }

    async fn drain(self, _: Context, deadline_ms: u64) -> Result<Drained, CallError> {
        self.called("drain");
        self.done(self.do_drain(deadline_ms).await)
    }
}
