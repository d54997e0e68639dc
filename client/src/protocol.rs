//! What goes over the socket: the service, its messages, and how keys travel.
//!
//! A connection starts with a hello (see [`crate::hello`]); what follows is tarpc over frames of at
//! most [`FRAME_BYTES_MAX`], encoded with bincode. Bytes of blocks never travel here: they lie in
//! regions that both sides map, or in GPU memory that the daemon imports. Keys travel as one byte
//! string, 32 bytes each.
//!
//! Any change of a message's shape is a new [`PROTOCOL_VERSION`]; both sides refuse another one.

// The service macro writes items of its own that carry no documentation.
#![allow(missing_docs, clippy::too_many_arguments)]

mod digest;
mod policy;
mod quota;

use kvtide_tiers::block::{
    BlockKey, GpuRegionSpec, Namespace, NamespaceId, NamespaceKey, RegionLayout,
};
use kvtide_tiers::catalog::{
    CatalogStats, CodecChoice, CodecReport, ConversationUse, Drained, GrantId, Hints, InspectPage,
    LeaseId, Limit, LookupReply, Outcome, PinId, PrefillAnswer, PrefillAsk, PrefillReport, Refusal,
    RegionId, TicketId, Tier,
};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

pub use digest::{DIGEST_BYTES_MAX, Digest, TierDigest, block_hash};
pub use policy::{DriveStatus, PolicyStatus};
pub use quota::{OwnerRow, WireKeep};

/// The version of hello and messages that this library speaks.
pub const PROTOCOL_VERSION: u16 = 5;

/// Bytes of the largest frame that either side accepts.
pub const FRAME_BYTES_MAX: usize = 4 << 20;

/// Longest time that a request may stay open; longer deadlines are shortened to it.
pub const DEADLINE_MAX: std::time::Duration = std::time::Duration::from_secs(3600);

/// The service of kvtided.
#[tarpc::service]
pub trait Kvtide {
    /// Versions of daemon and protocol.
    async fn version() -> VersionInfo;
    /// Opens a namespace of the caller's tenant, or a shared one.
    async fn open_namespace(spec: NamespaceSpec) -> Result<OpenedNamespace, CallError>;
    /// Registers memory sent before over an attach connection.
    async fn register_region(fd: u64, layout: RegionLayout) -> Result<RegionId, CallError>;
    /// Registers GPU memory of the caller, which the daemon imports. A VMM allocation's descriptor
    /// was sent before over an attach connection. An import that takes longer than the call's
    /// deadline is undone when it ends.
    async fn register_gpu_region(spec: GpuRegionSpec) -> Result<RegionId, CallError>;
    /// Ends a registration; loads and stores under way on it end as gone. Answered when the
    /// memory may be freed.
    async fn unregister_region(region: RegionId) -> Result<(), CallError>;
    /// The longest run that all of the prefixes have.
    async fn lookup(
        prefixes: Vec<WirePrefix>,
        lease_ms: u32,
        hints: Hints,
    ) -> Result<LookupReply, CallError>;
    /// Copies blocks into a region.
    async fn load(load: WireLoad, wait_ms: u32) -> Result<TicketReply, CallError>;
    /// Copies blocks out of a region.
    async fn store(store: WireStore, wait_ms: u32) -> Result<TicketReply, CallError>;
    /// Brings blocks of nvme into host RAM.
    async fn prefetch(
        prefix: WirePrefix,
        wait_ms: u32,
        hints: Hints,
    ) -> Result<TicketReply, CallError>;
    /// Waits until one of the tickets has ended, and returns all that have.
    async fn wait(tickets: Vec<TicketId>, wait_ms: u32) -> Result<Vec<TicketEnd>, CallError>;
    /// Ends leases; answers the number that were alive.
    async fn release(leases: Vec<LeaseId>) -> Result<u64, CallError>;
    /// Marks blocks as used now, or as hints say; answers how many were there, or were dropped.
    async fn touch(prefix: WirePrefix, hints: Hints) -> Result<u64, CallError>;
    /// Keeps blocks for a time.
    async fn pin(prefix: WirePrefix, ttl_ms: u64) -> Result<Pinned, CallError>;
    /// Ends a pin.
    async fn unpin(pin: PinId) -> Result<u64, CallError>;
    /// Drops blocks from all tiers.
    async fn forget(what: WireForget) -> Result<u64, CallError>;
    /// Drops blocks that the client found to be wrong, and refuses them until restart. In a shared
    /// namespace for operators only.
    async fn report_bad(prefix: WirePrefix) -> Result<u64, CallError>;
    /// A page of the block table, of the caller's tenant or, for operators, of all.
    async fn inspect(query: WireInspect) -> Result<InspectPage, CallError>;
    /// Counters.
    async fn stats() -> Result<StatsReply, CallError>;
    /// How the daemon runs.
    async fn status() -> Result<StatusReport, CallError>;
    /// The namespaces that the caller may see.
    async fn namespaces() -> Result<Vec<NamespaceRow>, CallError>;
    /// Stops admission and writes all dirty blocks down, hottest first, in so many milliseconds.
    /// Operators only.
    async fn drain(deadline_ms: u64) -> Result<Drained, CallError>;
    /// What of a namespace lies here, in filters of so many bytes together at most: for routers.
    async fn digest(namespace: NamespaceId, bytes_max: u32) -> Result<Digest, CallError>;
    /// Waits until every load and store of the region that was sent before has ended, whether or
    /// not anybody waits for its ticket; `false` when the time was over first.
    async fn quiesce(region: RegionId, wait_ms: u32) -> Result<bool, CallError>;
    /// How long a prefill took; its grant ends. Answers whether it was learned from.
    async fn report_prefill(report: PrefillReport) -> Result<bool, CallError>;
    /// Whether a prefill may begin.
    async fn admit_prefill(ask: PrefillAsk) -> Result<PrefillAnswer, CallError>;
    /// A prefill ended that is not reported; answers whether it was under way.
    async fn prefill_done(grant: GrantId) -> Result<bool, CallError>;
    /// Declares which blocks a conversation loses first when it is over its quota, until the daemon
    /// ends; answers what it holds.
    async fn keep(keep: WireKeep) -> Result<ConversationUse, CallError>;
}

/// Why a call was not done. A miss is not among them: it is a value.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// A limit is reached; ask again later.
    #[error("busy: {}", limit_text(*.0))]
    Busy(Limit),
    /// The request cannot be done.
    #[error("refused: {0:?}")]
    Refused(Refusal),
    /// The caller may not do this.
    #[error("not allowed: {0}")]
    NotAllowed(String),
    /// Something in the request is wrong; the text says what and what is allowed.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// Something that the request names is not there (any more).
    #[error("not found: {0}")]
    NotFound(String),
    /// The daemon could not do it for a reason of its own.
    #[error("the daemon failed: {0}")]
    Internal(String),
}

/// Which limit is reached, and what to do.
fn limit_text(limit: Limit) -> &'static str {
    match limit {
        Limit::Tickets => "this session has all of its tickets under way; wait for some of them",
        Limit::Leases => "this session holds all of its leases; release some",
        Limit::Pins => "all pins, or all bytes that may be pinned, are taken; unpin some",
        Limit::Requests => "too many requests wait; ask again later",
        Limit::Sessions => "all sessions are taken, or this one has ended; connect again later",
        Limit::Regions => {
            "this session has all of its regions, or the GPU has no room for another; unregister \
             some, or ask again later"
        }
        Limit::Draining => {
            "the daemon is draining and stores nothing new; store on another node (lookups and \
             loads go on here until it stops)"
        }
        Limit::Pressure => {
            "the cache is under pressure and does not do this now; go on without it, and ask again \
             later"
        }
        _ => "a limit is reached; ask again later",
    }
}

/// Versions of daemon and protocol.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VersionInfo {
    /// The daemon's version.
    pub daemon: String,
    /// The protocol's version.
    pub protocol: u16,
    /// The session of this connection.
    pub session: u64,
}

/// A namespace to open.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamespaceSpec {
    /// What must be equal before bytes may be shared.
    pub namespace: Namespace,
    /// Name of a shared namespace that the operator declared; `None` for the tenant's own.
    pub shared: Option<String>,
}

impl NamespaceSpec {
    /// A namespace of the caller's own tenant.
    pub fn own(namespace: Namespace) -> NamespaceSpec {
        NamespaceSpec { namespace, shared: None }
    }

    /// A namespace under a name that the operator declared as shared.
    pub fn shared(namespace: Namespace, name: impl Into<String>) -> NamespaceSpec {
        NamespaceSpec { namespace, shared: Some(name.into()) }
    }
}

/// An opened namespace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OpenedNamespace {
    /// Its number.
    pub id: NamespaceId,
    /// The key under which its blocks are named.
    pub key: NamespaceKey,
}

/// Keys of one namespace, root first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WirePrefix {
    /// The namespace.
    pub namespace: NamespaceId,
    /// 32 bytes per key.
    pub keys: ByteBuf,
}

/// Blocks to load.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WireLoad {
    /// The lookup's lease.
    pub lease: LeaseId,
    /// The namespace.
    pub namespace: NamespaceId,
    /// The receiving region.
    pub region: RegionId,
    /// The event of the region's ring that the copies wait for, if any.
    pub after_event: Option<u32>,
    /// 32 bytes per key.
    pub keys: ByteBuf,
    /// One place per key.
    pub places: Vec<u32>,
    /// What the engine knows of the conversation.
    pub hints: Hints,
}

/// Blocks to store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WireStore {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The client's number for its conversation, 0 for none.
    pub conversation: u64,
    /// The giving region.
    pub region: RegionId,
    /// The event of the region's ring that the copies wait for, if any.
    pub after_event: Option<u32>,
    /// 32 bytes per key.
    pub keys: ByteBuf,
    /// 32 bytes per parent.
    pub parents: ByteBuf,
    /// Position, tokens and place of each block.
    pub blocks: Vec<(u32, u32, u32)>,
    /// What the engine knows of the conversation.
    pub hints: Hints,
}

/// What to forget.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WireForget {
    /// These blocks and all that follow them.
    Keys(WirePrefix),
    /// What one conversation stored.
    Conversation(NamespaceId, u64),
    /// All blocks of a namespace, on disk as well; for good.
    Namespace(NamespaceId),
}

/// Which part of the block table to show.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct WireInspect {
    /// Only these namespaces.
    pub namespaces: Option<Vec<NamespaceId>>,
    /// Only this tier.
    pub tier: Option<Tier>,
    /// Only keys that start with these bytes.
    pub key_prefix: ByteBuf,
    /// Where the last page ended, 0 at first.
    pub cursor: u32,
    /// Most rows to return.
    pub limit: u32,
}

/// The answer to load, store and prefetch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum TicketReply {
    /// Under way; ask for the outcome with `wait`.
    Pending(TicketId),
    /// It ended within `wait_ms`; the ticket is spent.
    Ended(Vec<Outcome>),
}

/// A ticket that has ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TicketEnd {
    /// The ticket.
    pub ticket: TicketId,
    /// One outcome per block, in the order of the request; `None` when the daemon knows no such
    /// ticket of this session (it was waited for before, or never was).
    pub outcomes: Option<Vec<Outcome>>,
}

/// The answer to a pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pinned {
    /// The pin.
    pub pin: PinId,
    /// Blocks of the prefix that are pinned, from the root on.
    pub blocks: u32,
}

/// One namespace, as its owner and operators see it. Keys and secrets are not shown.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamespaceRow {
    /// Its number.
    pub id: NamespaceId,
    /// The tenant that it belongs to, or `shared/NAME`.
    pub tenant: String,
    /// Its fields.
    pub namespace: Namespace,
    /// Increases whenever the namespace is forgotten.
    pub generation: u32,
    /// A public name for its key.
    pub fingerprint: [u8; 16],
}

/// Counters of one tenant since the daemon started.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TenantStats {
    /// The tenant.
    pub tenant: String,
    /// Sessions connected now.
    pub sessions: u64,
    /// Lookups asked.
    pub lookups: u64,
    /// Keys in all lookups.
    pub lookup_keys: u64,
    /// Keys found.
    pub lookup_hits: u64,
    /// Blocks loaded from GPU memory.
    pub loaded_device: u64,
    /// Blocks loaded from host RAM.
    pub loaded_host: u64,
    /// Blocks loaded from nvme.
    pub loaded_nvme: u64,
    /// Blocks that loads missed.
    pub missed: u64,
    /// Blocks stored, or found present.
    pub stored: u64,
    /// Blocks whose store was refused or had no room.
    pub not_stored: u64,
}

/// The answer to `stats`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct StatsReply {
    /// The whole daemon's counters; operators only.
    pub catalog: Option<CatalogStats>,
    /// Per tenant: all for operators, otherwise the caller's own.
    pub tenants: Vec<TenantStats>,
    /// Counters of the service; operators only.
    pub service: Option<ServiceStats>,
    /// What tenants and shared namespaces hold: all for operators, otherwise the caller's own and
    /// those that it may open.
    pub owners: Vec<OwnerRow>,
}

/// Counters of connections and calls since the daemon started.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ServiceStats {
    /// Connections accepted.
    pub connections: u64,
    /// Connections refused at the hello, by reason.
    pub hellos_refused: Vec<(String, u64)>,
    /// Connections closed because of a frame that could not be read.
    pub frames_bad: u64,
    /// Connections closed because of a panic.
    pub panics: u64,
    /// Calls, by verb.
    pub calls: Vec<(String, u64)>,
    /// Calls answered busy.
    pub calls_busy: u64,
    /// Calls refused as invalid or not allowed.
    pub calls_refused: u64,
}

/// How the daemon runs.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct StatusReport {
    /// The daemon's version.
    pub version: String,
    /// The protocol's version.
    pub protocol: u16,
    /// The daemon's process.
    pub pid: u32,
    /// Seconds since start.
    pub uptime_s: u64,
    /// The tenant of the caller.
    pub tenant: String,
    /// Whether the caller may see all tenants, drain, and forget what is another's.
    pub operator: bool,
    /// The socket.
    pub socket: String,
    /// The store folder.
    pub store: String,
    /// Whether a drain is under way or done.
    pub draining: bool,
    /// Capacity of the host tier, bytes.
    pub host_bytes: u64,
    /// What memory the host tier got, in words.
    pub host_pages: String,
    /// Whether the host tier outlives the daemon, in words.
    pub host_kept: String,
    /// Capacity of the nvme tier, bytes; 0 when it is off.
    pub nvme_bytes: u64,
    /// How nvme is read and written, in words.
    pub nvme_io: String,
    /// The device tier, in words; why it is off, when it is.
    pub device: String,
    /// Its GPUs, in the order of the counters.
    pub devices: Vec<GpuStatus>,
    /// Facts stated at start (limits taken from the machine, recovery, what is off and why).
    pub notes: Vec<String>,
    /// Sessions connected, of all tenants for operators, otherwise of the caller's.
    pub sessions: u64,
    /// Names of the tenants that the caller may see.
    pub tenants: Vec<String>,
    /// Names of the shared namespaces that the caller may open.
    pub shared: Vec<String>,
    /// What the caller's tenant wants blocks to be written to nvme as.
    pub codec: CodecChoice,
    /// What that comes to for the namespaces that the caller may see, where it is not simply raw.
    pub codecs: Vec<CodecReport>,
    /// Which blocks leave first, and what may be written to nvme.
    pub policy: PolicyStatus,
}

/// One GPU of the device tier.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GpuStatus {
    /// Its UUID, as `nvidia-smi -L` shows it.
    pub uuid: String,
    /// What the driver calls it.
    pub name: String,
    /// The driver's version.
    pub driver: String,
    /// Bytes of its memory in which the daemon keeps blocks.
    pub pool_bytes: u64,
    /// "ok", or what is wrong with it now, in words.
    pub health: String,
    /// Whether the driver is stuck on it.
    pub stuck: bool,
    /// Why it is off, if it is.
    pub off: Option<String>,
}

/// Packs keys into one byte string.
pub fn pack_keys<'a>(keys: impl IntoIterator<Item = &'a BlockKey>) -> ByteBuf {
    let keys = keys.into_iter();
    let mut out = Vec::with_capacity(keys.size_hint().0.saturating_mul(32));
    for key in keys {
        out.extend_from_slice(&key.0);
    }
    ByteBuf::from(out)
}

/// Reads keys from one byte string. `None` unless its length is a multiple of 32.
pub fn unpack_keys(bytes: &[u8]) -> Option<Vec<BlockKey>> {
    let (keys, rest) = bytes.as_chunks::<32>();
    rest.is_empty().then(|| keys.iter().map(|key| BlockKey(*key)).collect())
}
