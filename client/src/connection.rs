//! One connection at a time, and the task that keeps it: connects, opens namespaces and registers
//! regions again, probes while the circuit breaker is open, ends leases that were dropped, and asks
//! what became of loads and stores that were given up.
//!
//! Lock order: `Shared::state` is taken for moments only, and never while a handle's lock is held.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvtide_tiers::block::RegionLayout;
use kvtide_tiers::catalog::{LeaseId, Limit, RegionId, TicketId};
use tarpc::client::RpcError;
use tarpc::context::Context;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;

use crate::breaker::Breaker;
use crate::config::ClientConfig;
use crate::doubt::LinkEnd;
use crate::error::ClientError;
use crate::gpu::Imported;
use crate::handles::{NamespaceInner, bind, bind_newer, bound_on, unbind_on};
use crate::hello::{Answer, Hello, HelloKind, Welcome, recv_answer, send_hello};
use crate::protocol::{CallError, DEADLINE_MAX, KvtideClient};
use crate::region::{RegionInner, Source};
use crate::transport::client_transport;

/// Leases and regions whose end waits to be told; more are left to their expiry and to the end of
/// the connection.
const CHORES_MAX: usize = 4096;

/// After this, a connection that has ended on this side and that the daemon does not close is worth
/// a word.
const CLOSE_PATIENCE: Duration = Duration::from_secs(60);

/// How long the daemon is asked to wait for the end of what is in doubt, milliseconds.
const SETTLE_MS: u32 = 500;

/// One connection to the daemon.
pub(crate) struct Link {
    pub(crate) generation: u64,
    pub(crate) stub: KvtideClient,
    pub(crate) welcome: Welcome,
    pub(crate) notify: OwnedFd,
    pub(crate) end: Arc<LinkEnd>,
}

/// Where a connection stands.
pub(crate) enum LinkOf {
    /// It is the current one.
    Now(Arc<Link>),
    /// It is being made.
    NotYet,
    /// It is no more, or about to end.
    Over,
}

/// Counters of a client since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ClientCounters {
    /// Connections made.
    pub connections: u64,
    /// Calls that were answered.
    pub calls_answered: u64,
    /// Calls whose deadline passed.
    pub calls_late: u64,
    /// Calls that failed because the connection was lost or absent.
    pub calls_disconnected: u64,
    /// Calls that were answered at once because the breaker was open.
    pub calls_skipped: u64,
    /// Times that the breaker opened.
    pub breaker_opened: u64,
}

#[derive(Default)]
struct Counters {
    connections: AtomicU64,
    answered: AtomicU64,
    late: AtomicU64,
    disconnected: AtomicU64,
    skipped: AtomicU64,
    opened: AtomicU64,
}

struct State {
    link: Option<Arc<Link>>,
    breaker: Breaker,
    namespaces: Vec<Weak<NamespaceInner>>,
    regions: Vec<Weak<RegionInner>>,
    releases: Vec<(u64, LeaseId)>,
    unregisters: Vec<(u64, RegionId)>,
    generation: u64,
    settling: bool,
    closed: bool,
}

/// What a client, its handles and its task share.
pub(crate) struct Shared {
    pub(crate) config: ClientConfig,
    state: Mutex<State>,
    wake: Notify,
    counters: Counters,
}

impl Shared {
    pub(crate) fn new(config: ClientConfig) -> Arc<Shared> {
        let breaker = Breaker::new(config.breaker_failures, config.backoff, config.backoff_max);
        Arc::new(Shared {
            config,
            state: Mutex::new(State {
                link: None,
                breaker,
                namespaces: Vec::new(),
                regions: Vec::new(),
                releases: Vec::new(),
                unregisters: Vec::new(),
                generation: 0,
                settling: false,
                closed: false,
            }),
            wake: Notify::new(),
            counters: Counters::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.state().link.clone()
    }

    /// The connection of `generation`.
    pub(crate) fn link_of(&self, generation: u64) -> LinkOf {
        let state = self.state();
        match &state.link {
            Some(link) if link.generation == generation => LinkOf::Now(Arc::clone(link)),
            None if state.generation == generation && !state.closed => LinkOf::NotYet,
            _ => LinkOf::Over,
        }
    }

    /// Makes the task look for something to do.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.link = None;
        drop(state);
        self.wake.notify_one();
    }

    pub(crate) fn counters(&self) -> ClientCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ClientCounters {
            connections: read(&self.counters.connections),
            calls_answered: read(&self.counters.answered),
            calls_late: read(&self.counters.late),
            calls_disconnected: read(&self.counters.disconnected),
            calls_skipped: read(&self.counters.skipped),
            breaker_opened: read(&self.counters.opened),
        }
    }

    /// Keeps a namespace open from now on, across reconnections. `false` when the connection on
    /// which it was opened is not the current one any more: the next one may not know of it.
    pub(crate) fn adopt_namespace(&self, namespace: &Arc<NamespaceInner>, generation: u64) -> bool {
        let mut state = self.state();
        state.namespaces.retain(|each| each.strong_count() > 0);
        let current = state.link.as_ref().is_some_and(|link| link.generation == generation);
        if current {
            state.namespaces.push(Arc::downgrade(namespace));
        }
        current
    }

    /// As [`Shared::adopt_namespace`], for a region.
    pub(crate) fn adopt_region(&self, region: &Arc<RegionInner>, generation: u64) -> bool {
        let mut state = self.state();
        state.regions.retain(|each| each.strong_count() > 0);
        let current = state.link.as_ref().is_some_and(|link| link.generation == generation);
        if current {
            state.regions.push(Arc::downgrade(region));
        }
        current
    }

    pub(crate) fn release_later(&self, generation: u64, lease: LeaseId) {
        let mut state = self.state();
        if state.releases.len() < CHORES_MAX {
            state.releases.push((generation, lease));
        }
        drop(state);
        self.wake.notify_one();
    }

    pub(crate) fn unregister_later(&self, generation: u64, region: RegionId) {
        let mut state = self.state();
        if state.unregisters.len() < CHORES_MAX {
            state.unregisters.push((generation, region));
        }
        drop(state);
        self.wake.notify_one();
    }

    /// The connection, unless there is none or the breaker is open. Takes microseconds.
    pub(crate) fn gate(&self) -> Result<Arc<Link>, ClientError> {
        let state = self.state();
        if let Some(probe_at) = state.breaker.probe_at() {
            self.counters.skipped.fetch_add(1, Ordering::Relaxed);
            let wait = probe_at.saturating_duration_since(Instant::now());
            let failures = state.breaker.failures();
            let retry_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            return Err(ClientError::BreakerOpen { failures, retry_ms });
        }
        state.link.clone().ok_or_else(|| {
            self.counters.disconnected.fetch_add(1, Ordering::Relaxed);
            ClientError::Disconnected
        })
    }

    /// Makes one call on `link`, within `limit`.
    pub(crate) async fn call<T, F>(
        &self,
        link: &Arc<Link>,
        limit: Duration,
        ask: impl FnOnce(KvtideClient, Context) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        let limit = limit.min(DEADLINE_MAX);
        let mut context = tarpc::context::current();
        context.deadline = Instant::now() + limit;
        let answer = tokio::time::timeout(limit, ask(link.stub.clone(), context)).await;
        match answer.unwrap_or(Err(RpcError::DeadlineExceeded)) {
            Ok(answer) => {
                self.counters.answered.fetch_add(1, Ordering::Relaxed);
                self.state().breaker.succeeded();
                Ok(answer)
            }
            Err(RpcError::DeadlineExceeded) => {
                self.counters.late.fetch_add(1, Ordering::Relaxed);
                self.count_failure();
                let after_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
                Err(ClientError::Deadline { after_ms })
            }
            Err(RpcError::Server(error)) if error.kind == io::ErrorKind::WouldBlock => {
                Err(ClientError::Call(CallError::Busy(Limit::Requests)))
            }
            Err(RpcError::Server(error)) => {
                Err(ClientError::Call(CallError::Internal(error.detail)))
            }
            Err(RpcError::Send(error)) => {
                // Too large for a frame, most likely: the connection lives.
                Err(ClientError::Call(CallError::Invalid(error.to_string())))
            }
            Err(RpcError::Shutdown | RpcError::Channel(_)) => {
                self.counters.disconnected.fetch_add(1, Ordering::Relaxed);
                self.lost(link.generation);
                Err(ClientError::Disconnected)
            }
        }
    }

    fn count_failure(&self) {
        let opened = self.state().breaker.failed(Instant::now());
        if opened {
            self.counters.opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                socket = %self.config.socket.display(),
                "the cache daemon does not answer; going on without it until it does"
            );
            self.wake.notify_one();
        }
    }

    /// The connection of `generation` is no more.
    fn lost(&self, generation: u64) {
        let mut state = self.state();
        if state.link.as_ref().is_some_and(|link| link.generation == generation) {
            state.link = None;
            let namespaces = std::mem::take(&mut state.namespaces);
            let regions = std::mem::take(&mut state.regions);
            state.namespaces.extend(namespaces.into_iter().filter(|each| each.strong_count() > 0));
            state.regions.extend(regions.into_iter().filter(|each| each.strong_count() > 0));
            drop(state);
            tracing::warn!(socket = %self.config.socket.display(), "connection lost; reconnecting");
            self.wake.notify_one();
        }
    }

    /// Connects, restores namespaces and regions, and makes the connection the current one.
    pub(crate) async fn connect(self: &Arc<Self>) -> Result<Arc<Link>, ClientError> {
        let generation = {
            let mut state = self.state();
            state.generation += 1;
            state.generation
        };
        let link = Arc::new(self.dial(generation).await?);
        self.restore(&link).await?;
        let mut state = self.state();
        if state.closed {
            return Err(ClientError::Disconnected);
        }
        state.breaker.succeeded();
        state.link = Some(Arc::clone(&link));
        drop(state);
        self.counters.connections.fetch_add(1, Ordering::Relaxed);
        Ok(link)
    }

    async fn dial(self: &Arc<Self>, generation: u64) -> Result<Link, ClientError> {
        let (stream, welcome, notify) = self.hello(HelloKind::Session, None).await?;
        let notify = notify.ok_or(ClientError::NotKvtide { what: "no pipe in the answer" })?;
        let mut config = tarpc::client::Config::default();
        config.max_in_flight_requests =
            usize::try_from(welcome.limits.calls_in_flight.max(1)).unwrap_or(1);
        let held = stream.as_fd().try_clone_to_owned().map_err(|source| ClientError::Connect {
            socket: self.config.socket.clone(),
            source,
        })?;
        let client = KvtideClient::new(config, client_transport(stream));
        let (stub, dispatch) = (client.client, client.dispatch);
        let (shared, end) = (Arc::downgrade(self), Arc::new(LinkEnd::default()));
        let reached = Arc::clone(&end);
        tokio::spawn(async move {
            let ended = dispatch.await;
            tracing::debug!(?ended, "connection ended");
            // Most often it is the daemon that is gone, and nothing is left in doubt.
            let closed = rustix::net::shutdown(&held, rustix::net::Shutdown::Write).is_ok()
                && at_end(&held).unwrap_or(false);
            if closed {
                reached.reach();
            }
            if let Some(shared) = shared.upgrade() {
                shared.lost(generation);
            }
            if !closed {
                read_to_end(held, &reached, CLOSE_PATIENCE).await;
            }
        });
        Ok(Link { generation, stub, welcome, notify, end })
    }

    async fn hello(
        &self,
        kind: HelloKind,
        fd: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<(UnixStream, Welcome, Option<OwnedFd>), ClientError> {
        let socket = &self.config.socket;
        let fail = |source| ClientError::Connect { socket: socket.clone(), source };
        let talk = async {
            let stream = UnixStream::connect(socket).await.map_err(fail)?;
            // A user that may not connect is answered, and hung up on, before the hello is read.
            let sent = send_hello(&stream, &Hello::new(kind, &self.config.name), fd).await;
            let (answer, fd) = recv_answer(&stream).await.map_err(|error| {
                let error = sent.err().unwrap_or(error);
                if error.kind() == io::ErrorKind::InvalidData {
                    return ClientError::NotKvtide { what: "the answer to the hello" };
                }
                fail(error)
            })?;
            match answer {
                Answer::Welcome(welcome) => Ok((stream, welcome, fd)),
                Answer::Refused { reason, message, .. } => {
                    Err(ClientError::Refused { reason, message })
                }
            }
        };
        let limit = self.config.connect_timeout;
        let after_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        tokio::time::timeout(limit, talk).await.unwrap_or(Err(ClientError::Deadline { after_ms }))
    }

    /// Sends a region's memory and registers it; the number is valid on `link`.
    pub(crate) async fn register(
        &self,
        link: &Arc<Link>,
        region: &RegionInner,
    ) -> Result<RegionId, ClientError> {
        let limit = self.config.call_timeout;
        let memory = match &region.source {
            Source::Host(memory) => {
                let (fd, layout) = (self.attach(link, memory.fd()).await?, region.layout.clone());
                let ask = |stub: KvtideClient, context| async move {
                    stub.register_region(context, fd, layout).await
                };
                return Ok(self.call(link, limit, ask).await??);
            }
            Source::Gpu(memory) => memory,
        };
        self.import(link, memory, &region.layout).await
    }

    /// Registers GPU memory.
    async fn import(
        &self,
        link: &Arc<Link>,
        memory: &Imported,
        layout: &RegionLayout,
    ) -> Result<RegionId, ClientError> {
        let unregistered = || ClientError::Gpu("the region was unregistered".to_owned());
        let mut importing = memory.importing(link).ok_or_else(unregistered)?;
        let fd = match memory.descriptor() {
            Some(fd) => self.attach(link, fd.as_fd()).await?,
            None => 0,
        };
        if memory.is_ended() {
            return Err(unregistered());
        }
        let spec = memory.spec(fd, layout);
        importing.asked();
        let ask = |stub: KvtideClient, context| async move {
            stub.register_gpu_region(context, spec).await
        };
        let answer = self.call(link, self.config.call_timeout, ask).await;
        let answer = answer.and_then(|answer| Ok(answer?));
        match &answer {
            Ok(_) => importing.imported(),
            // The daemon may still be about it, and undoes it when it is done.
            Err(ClientError::Call(CallError::Internal(_))) => {}
            Err(ClientError::Call(_)) => importing.refused(),
            Err(_) => {}
        }
        answer
    }

    /// Sends a descriptor; answers the number that the daemon gave it.
    async fn attach(
        &self,
        link: &Link,
        fd: std::os::fd::BorrowedFd<'_>,
    ) -> Result<u64, ClientError> {
        let (session, token) = (link.welcome.session, link.welcome.token);
        let attach = HelloKind::Attach { session, token };
        let (_stream, welcome, _) = self.hello(attach, Some(fd)).await?;
        Ok(welcome.fd)
    }

    async fn restore(self: &Arc<Self>, link: &Arc<Link>) -> Result<(), ClientError> {
        let (namespaces, regions) = {
            let state = self.state();
            let namespaces: Vec<_> = state.namespaces.iter().filter_map(Weak::upgrade).collect();
            let regions: Vec<_> = state.regions.iter().filter_map(Weak::upgrade).collect();
            (namespaces, regions)
        };
        for namespace in namespaces {
            self.restore_namespace(link, &namespace).await?;
        }
        for region in regions {
            bind(&region.bound, None);
            if matches!(region.source, Source::Gpu(_)) {
                let (shared, link) = (Arc::clone(self), Arc::clone(link));
                let region = Arc::downgrade(&region);
                tokio::spawn(async move { shared.import_again(&link, &region).await });
                continue;
            }
            match self.register(link, &region).await {
                Ok(id) => bind(&region.bound, Some((link.generation, id))),
                Err(ClientError::Call(error)) => {
                    tracing::warn!(%error, "a region could not be registered again; it misses");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Registers GPU memory on a new connection. A GPU that is slow or stuck keeps neither the
    /// connection nor other regions waiting; until this has succeeded, what names the region
    /// misses. A refusal may be of the moment, such as a GPU without room, and is not the last.
    async fn import_again(self: &Arc<Self>, link: &Arc<Link>, region: &Weak<RegionInner>) {
        let (mut pause, mut told) = (self.config.backoff, false);
        loop {
            let Some(region) = region.upgrade() else { return };
            let Source::Gpu(memory) = &region.source else { return };
            let old = {
                let state = self.state();
                state.closed || state.generation != link.generation
            };
            if memory.is_ended() || old {
                return;
            }
            match self.register(link, &region).await {
                Ok(id) => return self.bind_again(link, &region, memory, id),
                Err(ClientError::Disconnected) => return,
                Err(error) if told => tracing::debug!(%error, "GPU memory is still refused"),
                Err(error) => tracing::warn!(
                    %error,
                    "GPU memory could not be registered again; it misses until it can"
                ),
            }
            told = true;
            drop(region);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(self.config.backoff_max);
        }
    }

    /// Binds a region, unless it was unregistered meanwhile: then the daemon is told, and whoever
    /// waits for that hears of its answer.
    fn bind_again(
        self: &Arc<Self>,
        link: &Link,
        region: &RegionInner,
        memory: &Arc<Imported>,
        id: RegionId,
    ) {
        let generation = link.generation;
        bind_newer(&region.bound, generation, id);
        if memory.is_ended()
            && let Some(id) = unbind_on(&region.bound, generation)
        {
            memory.unregister_soon((generation, id), Arc::downgrade(self));
        }
    }

    async fn restore_namespace(
        &self,
        link: &Arc<Link>,
        namespace: &NamespaceInner,
    ) -> Result<(), ClientError> {
        let spec = namespace.spec.clone();
        let limit = self.config.call_timeout;
        let answer =
            self.call(link, limit, |stub, context| async move {
                stub.open_namespace(context, spec).await
            })
            .await?;
        let changed = match answer {
            Ok(opened) if opened.key == namespace.key => {
                bind(&namespace.bound, Some((link.generation, opened.id)));
                false
            }
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(%error, "a namespace could not be opened again; it misses");
                bind(&namespace.bound, None);
                return Ok(());
            }
        };
        if changed {
            tracing::warn!("the key of a namespace changed; its blocks are unreachable");
            bind(&namespace.bound, None);
        }
        namespace.key_changed.store(changed, Ordering::Release);
        Ok(())
    }
}

/// Reads what is left and throws it away. `true` at the end: the daemon has closed the connection,
/// after its last copy from or to the regions of this session.
fn at_end(stream: impl AsFd) -> io::Result<bool> {
    let mut waste = [0; 4096];
    loop {
        match rustix::io::read(&stream, &mut waste) {
            // Reset: it was closed before the daemon had read everything.
            Ok(0) | Err(rustix::io::Errno::CONNRESET) => return Ok(true),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits until the daemon has closed a connection on which this side sends no more, however long
/// that takes: what is in doubt on it stays so until then. Given up only when nobody asks for the
/// end any more, which is looked at after each `patience`.
async fn read_to_end(held: OwnedFd, end: &Arc<LinkEnd>, patience: Duration) {
    let wait = async {
        let stream = UnixStream::from_std(held.into())?;
        let read = || match at_end(&stream)? {
            true => Ok(()),
            false => Err(io::Error::from(io::ErrorKind::WouldBlock)),
        };
        stream.async_io(Interest::READABLE, read).await
    };
    let mut wait = std::pin::pin!(wait);
    let mut told = false;
    loop {
        match tokio::time::timeout(patience, wait.as_mut()).await {
            Ok(Ok(())) => return end.reach(),
            Ok(Err(error)) => {
                tracing::warn!(
                    %error,
                    "the end of a connection cannot be seen; places in doubt on it stay so"
                );
                return;
            }
            Err(_) if Arc::strong_count(end) == 1 => return,
            Err(_) if told => {}
            Err(_) => {
                told = true;
                tracing::warn!(
                    waited_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
                    "the daemon has not closed a connection that has ended; places in doubt on it \
                     stay so until it does"
                );
            }
        }
    }
}

/// Keeps the connection until the client is closed.
pub(crate) async fn supervise(shared: Arc<Shared>) {
    let mut pause = shared.config.backoff;
    loop {
        let (closed, link, probe_at) = {
            let state = shared.state();
            (state.closed, state.link.clone(), state.breaker.probe_at())
        };
        if closed {
            return;
        }
        match (link, probe_at) {
            (Some(link), None) => {
                pause = shared.config.backoff;
                chores(&shared, &link).await;
                start_settling(&shared, &link);
                idle(&shared).await;
            }
            (Some(link), Some(at)) => {
                let pause = at.saturating_duration_since(Instant::now());
                wait_or_closed(&shared, pause).await;
                // A connection is kept until the daemon closes it, however long it is silent: only
                // then is it certain that nothing copies into this client's regions any more.
                probe(&shared, &link).await;
            }
            (None, _) => match shared.connect().await {
                Ok(_) => tracing::info!(socket = %shared.config.socket.display(), "connected"),
                Err(error) => {
                    tracing::debug!(%error, "cannot connect yet");
                    wait_or_closed(&shared, pause).await;
                    pause = (pause * 2).min(shared.config.backoff_max);
                }
            },
        }
    }
}

/// Waits until something is to be done.
async fn idle(shared: &Shared) {
    let waiting = {
        let state = shared.state();
        state.releases.is_empty() && state.unregisters.is_empty() && !state.closed
    };
    if waiting {
        shared.wake.notified().await;
    }
}

async fn wait_or_closed(shared: &Shared, pause: Duration) {
    let until = tokio::time::Instant::now() + pause;
    while !shared.state().closed {
        if tokio::time::timeout_at(until, shared.wake.notified()).await.is_err() {
            return;
        }
    }
}

/// Asks for the version; an answer closes the breaker.
async fn probe(shared: &Arc<Shared>, link: &Arc<Link>) {
    let limit = shared.config.call_timeout.min(Duration::from_millis(500));
    let answer =
        shared.call(link, limit, |stub, context| async move { stub.version(context).await });
    if answer.await.is_err() {
        shared.state().breaker.probe_failed(Instant::now());
    }
}

/// Tells the daemon about leases and regions that were dropped.
async fn chores(shared: &Arc<Shared>, link: &Arc<Link>) {
    let (releases, unregisters) = {
        let mut state = shared.state();
        (std::mem::take(&mut state.releases), std::mem::take(&mut state.unregisters))
    };
    let generation = link.generation;
    let leases: Vec<LeaseId> =
        releases.into_iter().filter(|(on, _)| *on == generation).map(|(_, id)| id).collect();
    let limit = shared.config.call_timeout;
    if !leases.is_empty() {
        let ask = |stub: KvtideClient, context| async move { stub.release(context, leases).await };
        let _ = shared.call(link, limit, ask).await;
    }
    for (_, region) in unregisters.into_iter().filter(|(on, _)| *on == generation) {
        let ask = |stub: KvtideClient, context| async move {
            stub.unregister_region(context, region).await
        };
        let _ = shared.call(link, limit, ask).await;
    }
}

/// A region with places in doubt on one connection.
struct InDoubt {
    region: Arc<RegionInner>,
    id: RegionId,
    newest: u64,
    tickets: Vec<TicketId>,
}

fn in_doubt(shared: &Shared, link: &Link) -> Vec<InDoubt> {
    let regions: Vec<_> = shared.state().regions.iter().filter_map(Weak::upgrade).collect();
    let found = regions.into_iter().filter_map(|region| {
        let id = bound_on(&region.bound, link.generation)?;
        let (newest, tickets) = region.doubts().on(link.generation)?;
        Some(InDoubt { region, id, newest, tickets })
    });
    found.collect()
}

/// Starts the task that settles doubts, if there are any and it does not run yet.
fn start_settling(shared: &Arc<Shared>, link: &Arc<Link>) {
    if in_doubt(shared, link).is_empty() || std::mem::replace(&mut shared.state().settling, true) {
        return;
    }
    let (shared, link) = (Arc::clone(shared), Arc::clone(link));
    tokio::spawn(async move {
        settle(&shared, &link).await;
        shared.state().settling = false;
        // A doubt that came up meanwhile starts the next round.
        shared.wake();
    });
}

/// Asks the daemon until nothing on this connection is in doubt.
async fn settle(shared: &Arc<Shared>, link: &Arc<Link>) {
    loop {
        let (current, well) = {
            let state = shared.state();
            let generation = state.link.as_ref().map(|link| link.generation);
            (generation == Some(link.generation), state.breaker.probe_at().is_none())
        };
        let doubts = in_doubt(shared, link);
        if !current || doubts.is_empty() {
            return;
        }
        let mut answered = false;
        for InDoubt { region, id, newest, tickets } in doubts.into_iter().take_while(|_| well) {
            let limit = Duration::from_millis(SETTLE_MS.into());
            let limit = shared.config.call_timeout.saturating_add(limit);
            let ask = |stub: KvtideClient, context| async move {
                stub.quiesce(context, id, SETTLE_MS).await
            };
            let Ok(Ok(quiet)) = shared.call(link, limit, ask).await else { continue };
            answered = true;
            if quiet {
                region.doubts().settle(link.generation, newest);
                // Nobody else will take their outcomes, which take room in the daemon.
                let ask = |stub: KvtideClient, context| async move {
                    stub.wait(context, tickets, 0).await
                };
                let _ = shared.call(link, shared.config.call_timeout, ask).await;
            }
        }
        if !answered {
            tokio::time::sleep(shared.config.backoff).await;
        }
    }
}

impl Link {
    /// A duplicate of the pipe's end that says that tickets have ended.
    pub(crate) fn notify_fd(&self) -> io::Result<OwnedFd> {
        self.notify.as_fd().try_clone_to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_has_ended_only_when_the_daemon_has_closed_it() {
        let (ours, daemons) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let end = Arc::new(LinkEnd::default());
        let short = Duration::from_millis(5);
        rustix::net::shutdown(&ours, rustix::net::Shutdown::Write).unwrap();
        // Nobody asks for this end.
        read_to_end(ours.try_clone().unwrap().into(), &end, short).await;
        assert!(!end.is_reached(), "the daemon did not close it yet");
        let asked = Arc::clone(&end);
        // Answers that were on their way are not the end, nor is a reset a failure.
        std::io::Write::write_all(&mut &daemons, &[7; 10_000]).unwrap();
        assert!(!at_end(&ours).unwrap());
        let close = async {
            // Many times what is worth a word.
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(!asked.is_reached());
            drop(daemons);
        };
        tokio::join!(close, read_to_end(ours.into(), &end, short));
        assert!(asked.is_reached());
    }
}
