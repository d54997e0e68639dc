//! What clients and operators ask of the catalog, and what it answers.

use serde::{Deserialize, Serialize};

use super::advice::{
    Advice, GrantId, PrefillAnswer, PrefillAsk, PrefillReport, PrefillStats, TierWorth, Withheld,
};
pub use super::hints::{Conversation, Hints, Priority};
use super::ladder::LadderReport;
use super::quota::*;
use crate::block::{BlockKey, Codec, NamespaceId};

/// Monotonic time of the caller, microseconds from an arbitrary start.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash, Serialize, Deserialize,
)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// This time plus `ms` milliseconds, saturating.
    pub fn plus_ms(self, ms: u64) -> Timestamp {
        Timestamp(self.0.saturating_add(ms.saturating_mul(1000)))
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        #[derive(Serialize, Deserialize)]
        pub struct $name(pub $inner);
    };
}

number!(/// One connection of a client. Never reused within a run of the daemon.
    SessionId, u64);
number!(/// A tenant's number within one run of the daemon.
    TenantId, u32);
number!(/// Registered memory of a client.
    RegionId, u64);
number!(/// A client's expiring pin on the blocks of one lookup.
    LeaseId, u64);
number!(/// An operator's or client's pin with a time limit, which outlives its session.
    PinId, u64);
number!(/// A load, store or prefetch under way.
    TicketId, u64);
number!(/// One GPU of the node, in the order of the daemon's configuration.
    GpuId, u8);
number!(/// One question asked of the catalog; its answer carries the same number.
    AskId, u64);

/// Where a copy of a block lies, fastest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Tier {
    /// GPU memory.
    Device,
    /// Host RAM.
    Host,
    /// Segments on NVMe.
    Nvme,
}

impl Tier {
    /// The tier's name as operators see it.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Nvme => "nvme",
        }
    }
}

/// A prefix of one namespace: keys root first, starting with the first block of the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixQuery {
    /// The namespace.
    pub namespace: NamespaceId,
    /// Its keys.
    pub keys: Vec<BlockKey>,
}

/// One block to load: the key and the place in the region that receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBlock {
    /// The key.
    pub key: BlockKey,
    /// Number of the block's place in the region.
    pub place: u32,
}

/// One block to store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreBlock {
    /// The key.
    pub key: BlockKey,
    /// The key before it, [`BlockKey::ROOT`] for a first block.
    pub parent: BlockKey,
    /// Position in the chain, from 0.
    pub position: u32,
    /// Tokens in the block.
    pub tokens: u32,
    /// Number of the block's place in the region.
    pub place: u32,
}

/// What a client or operator asks. The service has already resolved names to numbers and checked
/// that the session may use them.
#[derive(Clone, Debug)]
pub enum Request {
    /// The longest run that all of the prefixes have, with a lease on it.
    Lookup {
        /// One per rank or group of the model; all with the same number of keys.
        prefixes: Vec<PrefixQuery>,
        /// How long the lease lives, milliseconds; 0 for none. Clamped to the configured maximum.
        /// A lookup with a lease begins a request, from which reuse is learned.
        lease_ms: u32,
        /// What the engine knows.
        hints: Hints,
    },
    /// Copy blocks into a region. Answered with a ticket.
    Load {
        /// The lease of the lookup; blocks it does not cover are missed.
        lease: LeaseId,
        /// The namespace.
        namespace: NamespaceId,
        /// The receiving region.
        region: RegionId,
        /// For a region in GPU memory: the event of its ring that is waited for first.
        after_event: Option<u32>,
        /// The blocks.
        blocks: Vec<LoadBlock>,
        /// What the engine knows.
        hints: Hints,
    },
    /// Copy blocks out of a region into the cache. Answered with a ticket.
    Store {
        /// The namespace.
        namespace: NamespaceId,
        /// The client's own number for its conversation, for `Forget`; 0 for none.
        conversation: u64,
        /// The giving region.
        region: RegionId,
        /// For a region in GPU memory: the event of its ring that is waited for first.
        after_event: Option<u32>,
        /// The blocks.
        blocks: Vec<StoreBlock>,
        /// What the engine knows.
        hints: Hints,
    },
    /// Marks blocks as used now, the last key first.
    Touch {
        /// The prefix.
        prefix: PrefixQuery,
        /// What the engine knows. With [`Conversation::Finished`] blocks do not count as used, and
        /// with [`Conversation::Drop`] those that only this path has leave all tiers now.
        hints: Hints,
    },
    /// Brings blocks of nvme into host RAM. Answered with a ticket.
    Prefetch {
        /// The prefix.
        prefix: PrefixQuery,
        /// What the engine knows.
        hints: Hints,
    },
    /// Keeps blocks from being evicted, for a time.
    Pin {
        /// The prefix.
        prefix: PrefixQuery,
        /// How long, milliseconds. Clamped to the configured maximum.
        ttl_ms: u64,
    },
    /// Ends a pin of the same tenant.
    Unpin {
        /// The pin.
        pin: PinId,
    },
    /// Ends a lease.
    Release {
        /// The lease.
        lease: LeaseId,
    },
    /// Drops blocks from all tiers.
    Forget(Forget),
    /// The client found these blocks to be wrong: drop them and refuse them until restart.
    ReportBad {
        /// The namespace.
        namespace: NamespaceId,
        /// The keys.
        keys: Vec<BlockKey>,
    },
    /// A page of the block table.
    Inspect(InspectQuery),
    /// Which blocks a conversation loses first when it is over its quota.
    Keep {
        /// The namespace.
        namespace: NamespaceId,
        /// The number given at `Store`.
        conversation: u64,
        /// The rule.
        rule: KeepRule,
    },
    /// Counters and gauges.
    Stats,
    /// The codecs of namespaces that are not simply written raw.
    Codecs,
    /// Stop admitting, write all dirty blocks down, hottest first; answered when that is done, or
    /// when no more can be written in time.
    Drain {
        /// How long it may take, milliseconds; `None` for as long as it takes.
        deadline_ms: Option<u64>,
    },
    /// A prefill was done. Answered with 1 if it was learned from, otherwise 0.
    ReportPrefill(PrefillReport),
    /// May a prefill begin?
    AdmitPrefill(PrefillAsk),
    /// An admitted prefill ended, or will not be done. Answered with 1 if it was under way.
    PrefillDone {
        /// The grant.
        grant: GrantId,
    },
}

/// What to forget.
#[derive(Clone, Debug)]
pub enum Forget {
    /// These blocks and all that follow them in their chains.
    Keys {
        /// The namespace.
        namespace: NamespaceId,
        /// The keys.
        keys: Vec<BlockKey>,
    },
    /// What one conversation stored.
    Conversation {
        /// The namespace.
        namespace: NamespaceId,
        /// The number given at `Store`.
        conversation: u64,
    },
    /// All blocks of a namespace.
    Namespace {
        /// The namespace.
        namespace: NamespaceId,
    },
}

/// Which part of the block table to show.
#[derive(Clone, Debug, Default)]
pub struct InspectQuery {
    /// Only these namespaces (`None`: all).
    pub namespaces: Option<Vec<NamespaceId>>,
    /// Only this tier.
    pub tier: Option<Tier>,
    /// Only keys that start with these bytes.
    pub key_prefix: Vec<u8>,
    /// Where the last page ended, 0 at first.
    pub cursor: u32,
    /// Most rows to return; clamped to 4,096.
    pub limit: u32,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug)]
pub enum Reply {
    /// To `Lookup`.
    Lookup(LookupReply),
    /// To `Load`, `Store` and `Prefetch`.
    Ticket(TicketId),
    /// To `Pin`.
    Pinned {
        /// The pin.
        pin: PinId,
        /// How many blocks of the prefix are now pinned, from the root on.
        blocks: u32,
    },
    /// To `Touch`, `Unpin`, `Release`, `Forget`, `ReportBad`: how many blocks were affected; to
    /// `ReportPrefill` and `PrefillDone`: see there.
    Count(u64),
    /// To `Inspect`.
    Inspect(InspectPage),
    /// To `Keep`: what the conversation holds.
    Conversation(ConversationUse),
    /// To `Stats`.
    Stats(Box<CatalogStats>),
    /// To `Codecs`, by number.
    Codecs(Vec<CodecReport>),
    /// To `Drain`, once it is done.
    Drained(Drained),
    /// To `AdmitPrefill`.
    Prefill(PrefillAnswer),
    /// A limit is reached; ask again later.
    Busy(Limit),
    /// The request cannot be done, whoever asks and whenever.
    Refused(Refusal),
}

/// What a drain came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Drained {
    /// Blocks that were in memory only when it began.
    pub blocks_before: u64,
    /// Their bytes.
    pub bytes_before: u64,
    /// Blocks written to nvme since.
    pub blocks_written: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Blocks that are in memory only now: lost, unless the next daemon takes the memory over.
    pub blocks_lost: u64,
    /// Their bytes.
    pub bytes_lost: u64,
    /// Blocks on nvme: what the next start finds there.
    pub blocks_on_nvme: u64,
    /// Their bytes.
    pub bytes_on_nvme: u64,
}

/// Which limit a `Busy` names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Limit {
    /// Tickets under way, of this session.
    Tickets,
    /// Leases held by this session.
    Leases,
    /// Pinned bytes.
    Pins,
    /// The catalog's inbox.
    Requests,
    /// Sessions.
    Sessions,
    /// Regions of this session.
    Regions,
    /// The daemon is draining.
    Draining,
    /// Service is given up in steps, and this one is not given now: see `kvtide status`.
    Pressure,
}

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// The region is not registered by this session.
    UnknownRegion,
    /// A place number is outside the region.
    PlaceOutOfRange,
    /// More keys in one call than are allowed.
    TooManyKeys,
    /// The prefixes of one lookup have different lengths.
    UnequalPrefixes,
    /// No such pin of this tenant.
    UnknownPin,
    /// The session is gone.
    UnknownSession,
    /// Blocks that are kept in 8 bits come from and go to host memory only.
    NarrowedOnGpu,
}

/// The answer to a lookup. No blocks is a miss, which is a value and not an error.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LookupReply {
    /// The lease on the blocks found, unless none was asked for or nothing was found.
    pub lease: Option<LeaseId>,
    /// How long the lease lives, milliseconds.
    pub lease_ms: u32,
    /// Blocks of the longest run that all prefixes have.
    pub blocks: u32,
    /// The run cut by tier; the counts add up to `blocks`.
    pub runs: Vec<Run>,
    /// What to load of it.
    pub advice: Advice,
    /// What the conversation lost to its quota, when the run ends where that was.
    pub dropped: Option<Box<Dropped>>,
}

/// Consecutive blocks in the same tier and state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// How many.
    pub blocks: u32,
    /// The slowest tier that any of the prefixes needs here.
    pub tier: Tier,
    /// Whether they are there.
    pub state: RunState,
}

/// Whether a block can be loaded at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RunState {
    /// Yes.
    Ready,
    /// It is on its way into this tier; a load waits for it.
    Pending,
}

/// What became of one block of a ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// Load: verified bytes are in the region; they came from this tier.
    Loaded(Tier),
    /// Load: no bytes, for this reason. The place in the region holds nothing of use.
    Missed(MissReason),
    /// Store: the block is in host RAM or in GPU memory.
    Stored,
    /// Store: the block was there already, with the same bytes.
    Present,
    /// Store: no room now.
    Busy,
    /// Store: refused, for this reason.
    Rejected(RejectReason),
    /// Prefetch: the block is in host RAM.
    Fetched,
}

/// Why a load is a miss. Each is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MissReason {
    /// Not in the cache (any more).
    Absent,
    /// The lease is unknown, ended, or does not cover the block.
    Lease,
    /// The lease ended while the load was under way.
    LeaseExpired,
    /// The stored checksum did not match.
    Checksum,
    /// The device failed, or gave fewer bytes than asked.
    Device,
    /// The block's size is not that of the region's places.
    Layout,
    /// No slot could be freed in time.
    NoRoom,
    /// It took too long.
    Deadline,
    /// The region or session went away.
    Gone,
}

/// Why a store is refused. Each is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RejectReason {
    /// The key is there with other bytes. The first writer wins.
    Mismatch,
    /// The key was reported bad.
    Quarantined,
    /// The block is larger than a slab.
    TooLarge,
    /// The copy out of the region failed, or the region went away.
    Gone,
    /// An element is infinite or not a number, and the block was to be kept in 8 bits.
    NotFinite,
    /// The tenant is at its hard quota, and none of its own blocks may leave for this one.
    TenantQuota,
    /// The same for the conversation, by the rule that the client declared.
    ConversationQuota,
}

/// What the operator wants blocks to be written to nvme as.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
pub enum CodecChoice {
    /// As they are.
    #[default]
    Raw,
    /// Encoded by [`Codec::Lz4`], where that saves 5 % at least: for room and write budget.
    Lz4,
    /// Encoded where that makes reloads faster, by measurement.
    Auto,
}

impl CodecChoice {
    /// The choice as the configuration names it.
    pub fn name(self) -> &'static str {
        match self {
            CodecChoice::Raw => "raw",
            CodecChoice::Lz4 => "lz4",
            CodecChoice::Auto => "auto",
        }
    }
}

/// What blocks of a namespace are written to nvme as, and why.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CodecReport {
    /// The namespace.
    pub namespace: NamespaceId,
    /// What the operator wants.
    pub choice: CodecChoice,
    /// What is done.
    pub codec: Codec,
    /// Why.
    pub why: CodecWhy,
}

/// Why blocks are written as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum CodecWhy {
    /// The configuration says so.
    Configured,
    /// The elements have no exponent plane that shrinks.
    Element,
    /// There is no nvme tier.
    NoNvme,
    /// Too few blocks were encoded for trial.
    NoTrial,
    /// Too little was read from nvme to know how fast it is.
    NoReads,
    /// By measurement on some blocks.
    Measured {
        /// Bytes of those blocks.
        raw_bytes: u64,
        /// By how much they shrink, bytes.
        saved_bytes: u64,
        /// Time that reading them takes less, microseconds.
        saved_us: u64,
        /// Time that decoding them takes, by all threads that copy, microseconds.
        cost_us: u64,
    },
}

/// One row of the block table.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InspectRow {
    /// The key.
    pub key: BlockKey,
    /// Its parent.
    pub parent: BlockKey,
    /// Its namespace.
    pub namespace: NamespaceId,
    /// Position in the chain.
    pub position: u32,
    /// Tokens.
    pub tokens: u32,
    /// Bytes of the block.
    pub raw_bytes: u32,
    /// In the memory of this GPU.
    pub device: Option<GpuId>,
    /// In host RAM.
    pub host: bool,
    /// On nvme: segment, its sequence, and stored bytes.
    pub nvme: Option<(u32, u64, u32)>,
    /// Leases and pins held on it.
    pub pins: u32,
    /// Times it was looked up since it was stored.
    pub hits: u32,
    /// Microseconds since it was last used.
    pub idle_us: u64,
    /// When it was stored, seconds since the Unix epoch.
    pub created_s: u64,
}

/// A page of the block table.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct InspectPage {
    /// The rows.
    pub rows: Vec<InspectRow>,
    /// Where the next page starts; `None` at the end.
    pub cursor: Option<u32>,
}

/// Occupation of one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TierUse {
    /// Bytes it may hold.
    pub capacity_bytes: u64,
    /// Bytes of slots, or of segments' payloads, that hold a live copy.
    pub used_bytes: u64,
    /// Live copies.
    pub blocks: u64,
    /// Bytes moved into it since start.
    pub bytes_in: u64,
    /// Bytes moved out of it since start.
    pub bytes_out: u64,
    /// Copies evicted since start.
    pub evicted: u64,
    /// Blocks that loads found here since start.
    pub hits: u64,
    /// Why the tier is off, if it is.
    pub offline: Option<OfflineReason>,
}

/// Why a tier is off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OfflineReason {
    /// The configuration turns it off.
    Configured,
    /// Several segments in a row failed.
    TooManyFailures,
    /// The device vanished or became read-only.
    DeviceGone,
    /// An operation did not end in time.
    DeviceStuck,
}

/// Counters (since start) and gauges of the catalog.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CatalogStats {
    /// The memory of each GPU.
    pub device: Vec<TierUse>,
    /// Host RAM.
    pub host: TierUse,
    /// Segments.
    pub nvme: TierUse,
    /// Blocks known, in any tier.
    pub blocks: u64,
    /// Blocks in GPU memory or host RAM that have no copy on nvme.
    pub dirty_blocks: u64,
    /// Bytes of those in host RAM.
    pub dirty_bytes: u64,
    /// Sessions connected.
    pub sessions: u64,
    /// Regions registered.
    pub regions: u64,
    /// Leases alive.
    pub leases: u64,
    /// Pins alive.
    pub pins: u64,
    /// Tickets under way.
    pub tickets: u64,
    /// Lookups asked.
    pub lookups: u64,
    /// Keys in all lookups.
    pub lookup_keys: u64,
    /// Keys found by lookups.
    pub lookup_hits: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Stores that found the same bytes present.
    pub present: u64,
    /// Stores refused for want of room.
    pub store_busy: u64,
    /// Stores rejected, by reason.
    pub rejected: Vec<(RejectReason, u64)>,
    /// Loads missed, by reason.
    pub missed: Vec<(MissReason, u64)>,
    /// Blocks dropped because their bytes did not match their checksum.
    pub corrupt: u64,
    /// Writes to nvme that failed.
    pub write_failures: u64,
    /// Reads of nvme that failed.
    pub read_failures: u64,
    /// Segments emptied for reuse.
    pub segments_reclaimed: u64,
    /// Segments that are no longer used because of failures.
    pub segments_quarantined: u64,
    /// Blocks written again when their segment was reclaimed.
    pub reinserted: u64,
    /// Blocks not written to nvme because the write budget is spent on others.
    pub write_refused: u64,
    /// Whether the catalog is draining.
    pub draining: bool,
    /// What each tier is worth, fastest first.
    pub worth: Vec<TierWorth>,
    /// Tiers that are not offered, for which namespaces; the first 256.
    pub withheld: Vec<Withheld>,
    /// Prefills.
    pub prefill: PrefillStats,
    /// What each tenant and shared namespace holds, by number.
    pub owners: Vec<OwnerUse>,
    /// How far service is given up under pressure, and why.
    pub ladder: LadderReport,
    /// Bytes of cold blocks that were not written to nvme under pressure.
    pub not_spilled_bytes: u64,
    /// Blocks dropped from host RAM under pressure.
    pub dropped_under_pressure: u64,
    /// Copies that came or went, since start: the version of what a digest describes.
    pub residency_version: u64,
}
