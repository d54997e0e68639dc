//! What the catalog is told and what it decides: a closed set of events and actions.

use super::arbiter::ArbiterConfig;
use super::codecs::CodecTrial;
use super::policy::PolicyChoice;
use super::prefill::PrefillConfig;
use super::request::{
    AskId, CodecChoice, GpuId, OfflineReason, Outcome, RegionId, Reply, Request, SessionId,
    TenantId, TicketId, Tier,
};
use super::residency::Residency;
use super::slots::SlotId;
use crate::block::{
    BlockKey, Codec, Descriptor, ElementType, NamespaceId, NarrowShape, PAGE_BYTES, Sum128,
};
use crate::catalog::ladder::{Pressure, Signal, Step};
use crate::catalog::quota::OwnerQuotas;
use crate::segment::StoreGeometry;

/// One operation under way at the edge. Its completion carries the same number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);

/// What the catalog must know of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamespaceInfo {
    /// Its number in the store's table.
    pub id: NamespaceId,
    /// Its current generation.
    pub generation: u32,
    /// Who pays for its blocks.
    pub tenant: TenantId,
    /// How its blocks are written to nvme.
    pub codec: CodecChoice,
    /// The element type, which the codec needs.
    pub element: ElementType,
    /// How its blocks are kept, if narrower than the engine has them.
    pub narrow: Option<NarrowShape>,
}

/// A slot of one of the tiers that are cut into slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SlotPlace {
    /// In the host arena.
    Host(SlotId),
    /// In the pool of a GPU.
    Device(GpuId, SlotId),
}

/// Why an operation at the edge failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpError {
    /// The bytes do not match their checksum, or are not those that were asked for.
    Checksum,
    /// The device failed or transferred fewer bytes than asked.
    Device,
    /// The device is gone or read-only: nothing that follows can work.
    DeviceGone,
    /// The region is gone, or the copy would leave it.
    Region,
    /// An element is infinite or not a number, and cannot be narrowed.
    NotFinite,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A namespace was opened (again), or its generation was raised.
    Namespace(NamespaceInfo),
    /// A client connected.
    SessionOpened {
        /// Its number, chosen by the caller, never reused.
        session: SessionId,
        /// Its tenant.
        tenant: TenantId,
    },
    /// A client is gone: its leases, regions and tickets end.
    SessionClosed {
        /// Which.
        session: SessionId,
    },
    /// A region was registered.
    RegionOpened {
        /// By whom.
        session: SessionId,
        /// Its number, chosen by the caller, never reused.
        region: RegionId,
        /// Places for blocks.
        places: u32,
        /// Bytes of one block.
        block_bytes: u32,
        /// The GPU in whose memory it is; `None`: host memory.
        gpu: Option<GpuId>,
    },
    /// A region is gone.
    RegionClosed {
        /// Whose.
        session: SessionId,
        /// Which.
        region: RegionId,
    },
    /// Somebody asks something; exactly one [`Action::Answer`] with this number follows.
    Asked {
        /// The number.
        ask: AskId,
        /// By whom.
        session: SessionId,
        /// What.
        request: Request,
    },
    /// [`Action::Gather`] ended; the slot holds bytes with this checksum.
    Gathered {
        /// Which.
        op: OpId,
        /// The checksum of the slot's bytes.
        result: Result<Sum128, OpError>,
    },
    /// [`Action::Compare`] ended; the region's bytes have this checksum.
    Compared {
        /// Which.
        op: OpId,
        /// The checksum.
        result: Result<Sum128, OpError>,
    },
    /// [`Action::Scatter`] ended; verified bytes are in the region.
    Scattered {
        /// Which.
        op: OpId,
        /// Whether.
        result: Result<(), OpError>,
    },
    /// [`Action::Demote`] ended; the host slot holds the bytes, with their host descriptor.
    Demoted {
        /// Which.
        op: OpId,
        /// Whether.
        result: Result<(), OpError>,
    },
    /// A GPU is lost: nothing that follows on it can work.
    DeviceLost {
        /// Which.
        gpu: GpuId,
        /// Why.
        reason: OfflineReason,
    },
    /// [`Action::Read`] ended; the slot holds verified, decoded bytes.
    Read {
        /// Which.
        op: OpId,
        /// Whether.
        result: Result<(), OpError>,
    },
    /// [`Action::Encode`] ended.
    Encoded {
        /// Which.
        op: OpId,
        /// Stored bytes and their checksum; `None` when the block does not shrink enough.
        result: Option<(u32, Sum128)>,
        /// What the trial came to, if it was one.
        trial: Option<CodecTrial>,
    },
    /// [`Action::Write`] ended: all of the payload is on the device.
    Written {
        /// Which.
        op: OpId,
        /// Whether.
        result: Result<(), OpError>,
    },
    /// [`Action::OpenSegment`] ended: the header is on the device.
    SegmentOpened {
        /// Which.
        segment: u32,
        /// Whether.
        result: Result<(), OpError>,
    },
    /// [`Action::Sync`] ended.
    Synced {
        /// Which.
        op: OpId,
        /// Whether all that was written is durable.
        result: Result<(), OpError>,
    },
    /// A page of the segment's descriptors could not be written.
    CommitFailed {
        /// Which.
        segment: u32,
        /// Why.
        error: OpError,
    },
    /// [`Action::EraseDescriptor`] ended.
    Erased {
        /// Which segment.
        segment: u32,
        /// In which life of it.
        sequence: u64,
        /// Which descriptor.
        index: u32,
        /// Whether the descriptor is gone from the device.
        result: Result<(), OpError>,
    },
    /// [`Action::RetireNamespace`] ended.
    NamespaceRetired {
        /// Which.
        namespace: NamespaceId,
        /// Its new generation; `None` when it could not be raised.
        generation: Option<u32>,
    },
    /// Time passed. Expects to be sent every 50 to 100 ms.
    Tick,
}

/// What is to be done. The edge carries actions out in the order in which they are given.
#[derive(Debug)]
pub enum Action {
    /// The answer to an [`Event::Asked`].
    Answer {
        /// Its number.
        ask: AskId,
        /// The answer.
        reply: Reply,
    },
    /// A ticket ended; sent exactly once for each.
    EndTicket {
        /// Whose.
        session: SessionId,
        /// Which.
        ticket: TicketId,
        /// One per block, in the order of the request.
        outcomes: Vec<Outcome>,
    },
    /// Cut a slab into slots of this size. No slot of the slab is in use.
    BindSlab {
        /// Which.
        slab: u32,
        /// Slot size, bytes.
        slot_bytes: u32,
    },
    /// Void a slot's host descriptor: the slot is free. No slab was bound anew since.
    ClearSlot {
        /// Which.
        slot: SlotId,
    },
    /// Mark a slot's host descriptor, so that no next daemon takes the block over: its copy was
    /// given up while operations still read the slot, or while one still fills it. For those who
    /// read it stays valid, also if they have not begun to copy; the one that fills the slot writes
    /// a descriptor that has the mark. The slot is free ([`Action::ClearSlot`]) when they end.
    DisownSlot {
        /// Which.
        slot: SlotId,
    },
    /// Copy a block from a region into a slot, narrow it if it is to be, checksum our copy, write
    /// its host descriptor.
    Gather {
        /// Number of the completion.
        op: OpId,
        /// From here,
        region: RegionId,
        /// this place,
        place: u32,
        /// after this event of the region's ring,
        after_event: Option<u32>,
        /// to there: a slot of host RAM, or of the GPU that the region is on.
        to: SlotPlace,
        /// How it is narrowed, if at all.
        narrow: Option<NarrowShape>,
        /// The block, with its checksums still to be filled in.
        descriptor: Box<Descriptor>,
    },
    /// Checksum a block in a region.
    Compare {
        /// Number of the completion.
        op: OpId,
        /// Where.
        region: RegionId,
        /// Which place.
        place: u32,
        /// After which event of the region's ring.
        after_event: Option<u32>,
        /// Bytes of the block.
        raw_bytes: u32,
    },
    /// Verify a slot against its host descriptor and this identity, then copy it into a region.
    ///
    /// The bytes of a block that was just read from nvme were hashed for that read's completion,
    /// which this action answers, and the slot was not free for anybody since: they are not hashed
    /// a second time.
    Scatter {
        /// Number of the completion.
        op: OpId,
        /// From here: a slot of host RAM, or of the GPU that the region is on.
        from: SlotPlace,
        /// For a region on a GPU: by way of this slot of the GPU's pool, which keeps the block.
        through: Option<SlotId>,
        /// The completion that this answers said that the host slot's bytes match `raw_sum`.
        verified: bool,
        /// What must be there.
        namespace: NamespaceId,
        /// What must be there.
        key: BlockKey,
        /// What must be there.
        raw_sum: Sum128,
        /// Bytes of the block.
        raw_bytes: u32,
        /// How it was narrowed, if at all: it is widened on its way.
        narrow: Option<NarrowShape>,
        /// To there,
        region: RegionId,
        /// this place,
        place: u32,
        /// after this event of the region's ring.
        after_event: Option<u32>,
    },
    /// Copy a block from a GPU's pool into a slot of host RAM, and write its host descriptor.
    Demote {
        /// Number of the completion.
        op: OpId,
        /// Which GPU.
        gpu: GpuId,
        /// From this slot of its pool,
        from: SlotId,
        /// to this slot of host RAM.
        to: SlotId,
        /// The block, complete.
        descriptor: Box<Descriptor>,
    },
    /// Read a block from nvme into a slot: length and checksum compared, decoded, host descriptor
    /// written.
    Read {
        /// Number of the completion.
        op: OpId,
        /// To there.
        slot: SlotId,
        /// What must be read, and from where.
        descriptor: Box<Descriptor>,
        /// The element type, for the codec.
        element: ElementType,
        /// A client waits for it.
        urgent: bool,
    },
    /// Encode a slot's block for nvme and keep the result until the `Write` of the same op.
    Encode {
        /// Number of the completion, and of the `Write` to come.
        op: OpId,
        /// From here.
        slot: SlotId,
        /// Bytes of the block.
        raw_bytes: u32,
        /// How.
        codec: Codec,
        /// The element type.
        element: ElementType,
        /// Decode the result too, and say how long that took.
        trial: bool,
    },
    /// Forget the result of an `Encode` that will not be written.
    DropEncoded {
        /// Which.
        op: OpId,
    },
    /// Write a block to nvme and, once it is there, its descriptor.
    Write {
        /// Number of the completion.
        op: OpId,
        /// The slot with the bytes; `None`: those of the `Encode` of the same op.
        slot: Option<SlotId>,
        /// Index of the descriptor in its segment.
        index: u32,
        /// The descriptor, complete.
        descriptor: Box<Descriptor>,
    },
    /// Write a fresh header: whatever the segment held is void.
    OpenSegment {
        /// Which.
        segment: u32,
        /// Its new sequence.
        sequence: u64,
    },
    /// Commit the segment's descriptors now: nothing more will be written to it.
    SealSegment {
        /// Which.
        segment: u32,
    },
    /// Commit the descriptors of all that was written, and make it durable.
    Sync {
        /// Number of the completion.
        op: OpId,
    },
    /// Void the header of a segment that holds nothing any more.
    VoidSegment {
        /// Which.
        segment: u32,
    },
    /// Void one descriptor on the device, so that the block does not come back at a restart.
    EraseDescriptor {
        /// Which segment.
        segment: u32,
        /// In which life of it.
        sequence: u64,
        /// Which.
        index: u32,
    },
    /// Raise the namespace's generation, durably: something of it that must not come back at a
    /// restart cannot be erased from the device.
    RetireNamespace {
        /// Which.
        namespace: NamespaceId,
    },
    /// Remember on the device that the segment failed.
    QuarantineSegment {
        /// Which.
        segment: u32,
    },
    /// A step of the degradation ladder was entered or left. For the log.
    Degraded {
        /// The step before,
        from: Step,
        /// and the one from now on.
        to: Step,
        /// What led to the step.
        why: Signal,
        /// What was measured.
        pressure: Pressure,
    },
    /// Copies came and went; only where somebody follows ([`super::Catalog::follow_residency`]).
    Residency {
        /// Which, in order.
        changes: Vec<Residency>,
        /// These are all. Otherwise there were more, and whoever follows has to look anew.
        whole: bool,
    },
    /// A tier went off. For the log.
    TierOffline {
        /// Which: nvme, or a GPU's pool.
        tier: Tier,
        /// Which GPU.
        gpu: Option<GpuId>,
        /// Why.
        reason: OfflineReason,
    },
}

/// A GPU's pool as the catalog sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceShape {
    /// Bytes of the pool; 0: blocks pass through the GPU and none is kept there.
    pub pool_bytes: u64,
    /// Bytes of a slab.
    pub slab_bytes: u32,
}

impl DeviceShape {
    /// A pool of so many bytes, with slabs of the usual size, but able to hold every block that
    /// host RAM can hold, as far as the pool is large enough.
    pub fn of(pool_bytes: u64, host_slab_bytes: u32) -> DeviceShape {
        let whole = pool_bytes / PAGE_BYTES * PAGE_BYTES;
        let slab_bytes = u64::from(slab_bytes_for(pool_bytes).max(host_slab_bytes));
        let slab_bytes = slab_bytes.min(whole).max(PAGE_BYTES);
        DeviceShape { pool_bytes, slab_bytes: slab_bytes as u32 }
    }
}

/// Bytes of a slab of an arena or a pool: a 64th, 4 MiB to 64 MiB, whole huge pages.
pub fn slab_bytes_for(bytes: u64) -> u32 {
    let unit = 2 << 20;
    (bytes / 64 / unit * unit).clamp(4 << 20, 64 << 20) as u32
}

/// Bytes of writes under way that keep a drive busy: what it is given at a time, and as much again
/// that waits for it.
pub const WRITE_BYTES_IN_FLIGHT: u64 = 32 << 20;

/// The nvme tier as the catalog sees it.
#[derive(Clone, Debug)]
pub struct NvmeShape {
    /// Its geometry.
    pub geometry: StoreGeometry,
    /// Epoch of this opening, the upper half of all new segment sequences.
    pub epoch: u32,
    /// Segments that failed in earlier runs.
    pub quarantined: Vec<u32>,
    /// Most bytes of writes under way. Default: [`WRITE_BYTES_IN_FLIGHT`].
    pub write_bytes_in_flight: u64,
    /// Most reads under way. Default: 64.
    pub reads_in_flight: usize,
    /// Empty segments kept ready. Default: 4, at most an eighth of all.
    pub clean_segments: u32,
    /// Largest part of a segment that reclaim writes again, percent. Default: 25.
    pub reinsert_percent: u32,
    /// Bytes that may be written in a day; an hour gets a 24th of it at most. Default: none, so
    /// that all blocks are written.
    pub write_bytes_per_day: Option<u64>,
}

/// How the catalog is set up. Every limit is a number of the configuration.
pub struct CatalogConfig {
    /// Bytes of the host arena.
    pub host_bytes: u64,
    /// Bytes of a slab.
    pub slab_bytes: u32,
    /// Which copy leaves host RAM first.
    pub host_policy: PolicyChoice,
    /// The same for the pool of each GPU.
    pub device_policy: PolicyChoice,
    /// Whether predicted reuse is weighted by what computing a block again would take. It saves
    /// seconds and costs hits. Default: false.
    pub weigh_cost: bool,
    /// The pool of each GPU, if there are any.
    pub devices: Vec<DeviceShape>,
    /// The nvme tier, if there is one.
    pub nvme: Option<NvmeShape>,
    /// What tenants and their conversations may hold, by number. Default: no limits.
    pub quotas: Vec<(TenantId, OwnerQuotas)>,
    /// Limits on what clients may hold.
    pub limits: Limits,
    /// Which tiers are worth it.
    pub arbiter: ArbiterConfig,
    /// How much may be computed at a time. Default: not limited.
    pub prefill: PrefillConfig,
    /// Threads that copy, check and decode.
    pub copy_threads: u32,
    /// Dirty blocks are written down while less than this part of the arena is free or clean,
    /// percent. Default: 25.
    pub clean_percent: u32,
    /// They are also written when no client asked anything for this long, milliseconds, and nvme
    /// has room; a few at a time once half of the arena is dirty, while nothing is read from nvme;
    /// and for their age. Default: 10. 0: for none of these reasons.
    pub idle_ms: u64,
    /// Whether blocks are used in the order in which a trace names them and in no other: a store
    /// does not make the blocks before it more recent, a block just stored does not count as used,
    /// and unreachable blocks do not go early. Only for simulators of published figures, which
    /// store every block of a path in a call of its own. Default: false.
    pub trace_order: bool,
    /// Seconds since the Unix epoch at timestamp 0.
    pub epoch_s: u64,
    /// Seed of the block table's hash, so that clients cannot choose keys that collide.
    pub hash_seed: u64,
}

/// What clients may hold at most. A full limit answers `Busy` at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Sessions. Default: 1,024.
    pub sessions: usize,
    /// Regions of one session. Default: 64.
    pub regions_per_session: usize,
    /// Tickets under way of one session. Default: 256.
    pub tickets_per_session: usize,
    /// Blocks of all tickets under way. Default: 65,536.
    pub blocks_in_flight: usize,
    /// Leases of one session. Default: 1,024.
    pub leases_per_session: usize,
    /// Keys in one call. Default: 16,384.
    pub keys_per_call: usize,
    /// Longest lease, milliseconds. Default: 300,000.
    pub lease_ms_max: u32,
    /// Pins. Default: 1,024.
    pub pins: usize,
    /// Longest pin, milliseconds. Default: 24 hours.
    pub pin_ms_max: u64,
    /// Longest time for which a hint retains blocks, milliseconds. Default: 10 minutes.
    pub retain_ms_max: u64,
    /// Largest part of the slowest tier that leases and pins may hold, percent. Default: 50.
    pub pinned_percent: u32,
    /// A ticket ends after this long at the latest, milliseconds. Default: 10,000.
    pub ticket_ms: u64,
    /// Entries of all leases together. Default: 4,194,304.
    pub leased_blocks: usize,
    /// Device operations older than this take the tier off, milliseconds. Default: 30,000.
    pub device_ms: u64,
    /// Keys reported bad that are remembered. Default: 65,536.
    pub bad_keys: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            sessions: 1024,
            regions_per_session: 64,
            tickets_per_session: 256,
            blocks_in_flight: 65_536,
            leases_per_session: 1024,
            keys_per_call: 16_384,
            lease_ms_max: 300_000,
            pins: 1024,
            pin_ms_max: 24 * 3600 * 1000,
            retain_ms_max: 600_000,
            pinned_percent: 50,
            ticket_ms: 10_000,
            leased_blocks: 4 << 20,
            device_ms: 30_000,
            bad_keys: 65_536,
        }
    }
}
