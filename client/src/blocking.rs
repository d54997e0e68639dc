//! The client for callers without an asynchronous runtime. It has a runtime of its own, which the
//! calling thread drives while it waits; while nobody calls, a thread keeps the connection. Safe to
//! use from any number of threads, and from within another runtime (where it blocks the calling
//! thread, as the name says).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvtide_tiers::block::{BlockKey, NamespaceId, RegionLayout};
use kvtide_tiers::catalog::{
    ConversationUse, Drained, Hints, InspectPage, KeepRule, LoadBlock, Outcome, PinId, StoreBlock,
};
use kvtide_tiers::io::SharedMemory;

use crate::client::{self, Admission, ForgetWhat, Grant, Inspect, LoadedPrefix, Prefill};
use crate::config::ClientConfig;
use crate::connection::ClientCounters;
use crate::error::ClientError;
use crate::gpu::{GpuExport, GpuRegion};
use crate::handles::{Lease, Lookup, NamespaceHandle, Ticket};
use crate::hello::SessionLimits;
use crate::own_runtime::OwnRuntime;
use crate::protocol::{
    Digest, NamespaceRow, NamespaceSpec, Pinned, StatsReply, StatusReport, VersionInfo,
};
use crate::region::{AsRegion, RegionHandle};

/// As [`crate::Client`], blocking.
#[derive(Clone, Debug)]
pub struct Client {
    // Dropped before the runtime, which closes the connection.
    inner: client::Client,
    runtime: Arc<OwnRuntime>,
}

macro_rules! forward {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        $($(#[$doc])*
        pub fn $name(&self, $($arg: $type),*) -> $out {
            self.runtime.run(self.inner.$name($($arg),*))
        })*
    };
}

impl Client {
    /// See [`crate::Client::connect`].
    ///
    /// # Errors
    /// When the daemon is not there, refuses, or does not answer within the configured time.
    pub fn connect(config: ClientConfig) -> Result<Client, ClientError> {
        let runtime = OwnRuntime::start()?;
        let inner = runtime.run(client::Client::connect(config))?;
        Ok(Client { inner, runtime: Arc::new(runtime) })
    }

    /// See [`crate::Client::connect_later`].
    ///
    /// # Errors
    /// When the runtime's thread cannot be started.
    pub fn connect_later(config: ClientConfig) -> Result<Client, ClientError> {
        let runtime = OwnRuntime::start()?;
        let inner = runtime.run(async { client::Client::connect_later(config) });
        Ok(Client { inner, runtime: Arc::new(runtime) })
    }

    /// The asynchronous client below. Its futures must run inside a tokio runtime.
    pub fn as_async(&self) -> &client::Client {
        &self.inner
    }

    /// See [`crate::Client::with_hints`].
    pub fn with_hints(&self, hints: Hints) -> Client {
        Client { inner: self.inner.with_hints(hints), runtime: Arc::clone(&self.runtime) }
    }

    /// See [`crate::Client::is_connected`].
    pub fn is_connected(&self) -> bool {
        self.inner.is_connected()
    }

    /// See [`crate::Client::counters`].
    pub fn counters(&self) -> ClientCounters {
        self.inner.counters()
    }

    /// See [`crate::Client::limits`].
    pub fn limits(&self) -> Option<SessionLimits> {
        self.inner.limits()
    }

    /// See [`crate::Client::session`].
    pub fn session(&self) -> Option<u64> {
        self.inner.session()
    }

    /// See [`crate::Client::notify_fd`].
    ///
    /// # Errors
    /// When not connected, or out of file descriptors.
    pub fn notify_fd(&self) -> Result<OwnedFd, ClientError> {
        self.inner.notify_fd()
    }

    /// See [`crate::Client::register_gpu_region`]. The client's thread lives for as long as the
    /// region, to wait for the daemon at its end.
    ///
    /// # Errors
    /// As there.
    pub fn register_gpu_region(
        &self,
        export: GpuExport,
        layout: RegionLayout,
        keep: impl Send + Sync + 'static,
    ) -> Result<GpuRegion, ClientError> {
        let keep = (keep, Arc::clone(&self.runtime));
        self.runtime.run(self.inner.register_gpu_region(export, layout, keep))
    }

    /// See [`crate::Client::report_prefill`].
    pub fn report_prefill(
        &self,
        namespace: &NamespaceHandle,
        tokens: u32,
        context: u32,
        took: Duration,
        grant: Option<Grant>,
    ) {
        self.runtime.run(self.inner.report_prefill(namespace, tokens, context, took, grant));
    }

    forward! {
        /// See [`crate::Client::version`].
        fn version() -> Result<VersionInfo, ClientError>;
        /// See [`crate::Client::open_namespace`].
        fn open_namespace(spec: &NamespaceSpec) -> Result<NamespaceHandle, ClientError>;
        /// See [`crate::Client::create_region`].
        fn create_region(layout: RegionLayout) -> Result<RegionHandle, ClientError>;
        /// See [`crate::Client::register_region`].
        fn register_region(memory: SharedMemory, layout: RegionLayout)
            -> Result<RegionHandle, ClientError>;
        /// See [`crate::Client::unregister_gpu_region`].
        fn unregister_gpu_region(region: &GpuRegion) -> Result<(), ClientError>;
        /// See [`crate::Client::lookup`].
        fn lookup(prefixes: &[(&NamespaceHandle, &[BlockKey])], lease: Duration) -> Lookup;
        /// See [`crate::Client::try_lookup`].
        fn try_lookup(prefixes: &[(&NamespaceHandle, &[BlockKey])], lease: Duration)
            -> Result<Lookup, ClientError>;
        /// See [`crate::Client::load`].
        fn load(lease: &Lease, namespace: &NamespaceHandle, region: &impl AsRegion,
            blocks: &[LoadBlock], wait: Duration) -> Ticket;
        /// See [`crate::Client::store`].
        fn store(namespace: &NamespaceHandle, conversation: u64, region: &impl AsRegion,
            blocks: &[StoreBlock], wait: Duration) -> Ticket;
        /// See [`crate::Client::prefetch`].
        fn prefetch(namespace: &NamespaceHandle, keys: &[BlockKey], wait: Duration) -> Ticket;
        /// See [`crate::Client::wait`].
        fn wait(ticket: Ticket, timeout: Duration) -> Result<Vec<Outcome>, Ticket>;
        /// See [`crate::Client::wait_all`].
        fn wait_all(tickets: Vec<Ticket>, timeout: Duration) -> Vec<Result<Vec<Outcome>, Ticket>>;
        /// See [`crate::Client::release`].
        fn release(lease: Lease) -> Result<(), ClientError>;
        /// See [`crate::Client::touch`].
        fn touch(namespace: &NamespaceHandle, keys: &[BlockKey]) -> Result<u64, ClientError>;
        /// See [`crate::Client::report_bad`].
        fn report_bad(namespace: &NamespaceHandle, keys: &[BlockKey]) -> Result<u64, ClientError>;
        /// See [`crate::Client::load_prefix`].
        fn load_prefix(namespace: &NamespaceHandle, region: &impl AsRegion, keys: &[BlockKey],
            places: &[u32], timeout: Duration) -> LoadedPrefix;
        /// See [`crate::Client::store_prefix`].
        fn store_prefix(namespace: &NamespaceHandle, conversation: u64, region: &impl AsRegion,
            keys: &[BlockKey], places: &[u32], timeout: Duration) -> Vec<Outcome>;
        /// See [`crate::Client::admit_prefill`].
        fn admit_prefill(wanted: &Prefill<'_>) -> Admission;
        /// See [`crate::Client::prefill_done`].
        fn prefill_done(grant: Grant) -> Result<(), ClientError>;
        /// See [`crate::Client::keep`].
        fn keep(namespace: &NamespaceHandle, conversation: u64, rule: KeepRule)
            -> Result<ConversationUse, ClientError>;
        /// See [`crate::Client::pin`].
        fn pin(namespace: NamespaceId, keys: &[BlockKey], ttl: Duration)
            -> Result<Pinned, ClientError>;
        /// See [`crate::Client::unpin`].
        fn unpin(pin: PinId) -> Result<u64, ClientError>;
        /// See [`crate::Client::forget`].
        fn forget(what: &ForgetWhat) -> Result<u64, ClientError>;
        /// See [`crate::Client::inspect`].
        fn inspect(query: &Inspect) -> Result<InspectPage, ClientError>;
        /// See [`crate::Client::stats`].
        fn stats() -> Result<StatsReply, ClientError>;
        /// See [`crate::Client::status`].
        fn status() -> Result<StatusReport, ClientError>;
        /// See [`crate::Client::namespaces`].
        fn namespaces() -> Result<Vec<NamespaceRow>, ClientError>;
        /// See [`crate::Client::digest`].
        fn digest(namespace: NamespaceId, bytes_max: u32) -> Result<Digest, ClientError>;
        /// See [`crate::Client::drain`].
        fn drain(deadline: Duration) -> Result<Drained, ClientError>;
    }
}
