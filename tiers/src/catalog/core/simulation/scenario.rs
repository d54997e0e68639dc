//! What a seed decides before the first step: sizes, limits, policies, and how much goes wrong.

use super::dice::{Dice, mix};
use crate::block::{BlockKey, ElementType, NamespaceId, PAGE_BYTES, Sum128};
use crate::catalog::{
    ArbiterConfig, CatalogConfig, CodecChoice, DeviceShape, GpuId, Limits, NamespaceInfo,
    NvmeShape, PolicyChoice, PrefillConfig, TenantId,
};
use crate::segment::StoreGeometry;

const PAGE: u32 = PAGE_BYTES as u32;

/// Chains of a namespace. Those in the upper half begin with blocks of one in the lower half.
const CHAINS: u64 = 12;

/// Blocks of the longest chain.
pub(super) const CHAIN_BLOCKS: u64 = 12;

/// Blocks that a forked chain shares.
const FORK: u64 = 4;

/// One block that can be stored: a namespace, and a place in its tree of chains.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Id {
    pub(super) namespace: NamespaceId,
    chain: u8,
    position: u8,
}

impl Id {
    /// Block `position` of a chain. The same for all chains that share it.
    pub(super) fn new(namespace: NamespaceId, chain: u64, position: u64) -> Id {
        let shared = chain >= CHAINS / 2 && position < FORK;
        let chain = if shared { chain - CHAINS / 2 } else { chain };
        Id { namespace, chain: chain as u8, position: position as u8 }
    }

    /// The block with this key. Keys are the same in all namespaces.
    pub(super) fn of(namespace: NamespaceId, key: &BlockKey) -> Option<Id> {
        let [1, chain, position, ..] = key.0 else { return None };
        Some(Id { namespace, chain, position })
    }

    pub(super) fn key(self) -> BlockKey {
        let mut bytes = [0; 32];
        let [kind, chain, position, ..] = &mut bytes;
        (*kind, *chain, *position) = (1, self.chain, self.position);
        BlockKey(bytes)
    }

    /// The same block of another rank.
    pub(super) fn of_rank(self, namespace: NamespaceId) -> Id {
        Id { namespace, ..self }
    }

    pub(super) fn position(self) -> u32 {
        u32::from(self.position)
    }

    pub(super) fn parent(self) -> Option<Id> {
        let before = u64::from(self.position).checked_sub(1)?;
        Some(Id::new(self.namespace, u64::from(self.chain), before))
    }

    pub(super) fn parent_key(self) -> BlockKey {
        self.parent().map_or(BlockKey::ROOT, Id::key)
    }

    /// What the right bytes of the block are.
    pub(super) fn tag(self) -> u64 {
        let place = u64::from(self.namespace.0) << 16
            | u64::from(self.chain) << 8
            | u64::from(self.position);
        mix(place + 1) | 1
    }
}

/// The checksum of bytes with this tag.
pub(super) fn sum_of(tag: u64) -> Sum128 {
    let mut bytes = [0; 16];
    let (left, right) = bytes.split_at_mut(8);
    left.copy_from_slice(&tag.to_le_bytes());
    right.copy_from_slice(&mix(tag).to_le_bytes());
    Sum128(bytes)
}

/// What bytes with this tag are when they are encoded.
pub(super) fn encoded(tag: u64) -> u64 {
    mix(tag ^ 0x6c7a_3400)
}

/// The tag of the bytes with this checksum.
pub(super) fn tag_of(sum: &Sum128) -> u64 {
    sum.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The tag that was encoded, if the checksum is that of its bytes.
pub(super) fn decoded(stored: u64, raw_sum: &Sum128) -> Option<u64> {
    let raw = tag_of(raw_sum);
    (encoded(raw) == stored).then_some(raw)
}

/// What goes wrong, in percent of operations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// Copies between regions and slots.
    pub(super) copies: u64,
    /// Reads of nvme, short ones included.
    pub(super) reads: u64,
    /// Writes of payloads.
    pub(super) writes: u64,
    /// Headers, descriptor pages and erasures.
    pub(super) control: u64,
    /// Steps in which some stored bytes change.
    pub(super) damage: u64,
}

/// See the head of this file.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) steps: u64,
    pub(super) slab_bytes: u32,
    pub(super) host_slabs: u64,
    pub(super) geometry: Option<StoreGeometry>,
    pub(super) pools: Vec<u64>,
    pub(super) policy: PolicyChoice,
    pub(super) write_budget: Option<u64>,
    pub(super) idle_ms: u64,
    pub(super) clean_percent: u32,
    pub(super) limits: Limits,
    pub(super) namespaces: Vec<NamespaceInfo>,
    /// Bytes of a block, by namespace.
    pub(super) block_bytes: Vec<u32>,
    pub(super) faults: Faults,
    /// Completions for each step of a client, in percent.
    pub(super) completions: u64,
    /// Whether clients ask for blocks to be kept, so that nobody knows all pins.
    pub(super) retains: bool,
    /// Whether GPUs get lost and the drive vanishes.
    pub(super) losses: bool,
    /// Changes of one event that those who follow are told.
    pub(super) follows: usize,
}

impl Scenario {
    pub(super) fn of(dice: &mut Dice) -> Scenario {
        let tenants = dice.between(1, 2);
        let sizes = [PAGE, PAGE, 2 * PAGE, 3 * PAGE - 100];
        let several_sizes = dice.percent(30);
        let codecs = [CodecChoice::Raw, CodecChoice::Raw, CodecChoice::Lz4, CodecChoice::Auto];
        let mut namespaces = Vec::new();
        let mut block_bytes = Vec::new();
        for number in 1..=dice.between(1, 3) {
            namespaces.push(NamespaceInfo {
                id: NamespaceId(number as u32),
                generation: 1,
                tenant: TenantId((number % tenants) as u32),
                codec: dice.pick(&codecs).unwrap_or_default(),
                element: ElementType::Bf16,
                narrow: None,
            });
            let bytes = if several_sizes { dice.pick(&sizes) } else { None };
            block_bytes.push(bytes.unwrap_or(PAGE));
        }
        let slab_pages = dice.between(3, 6) as u32;
        Scenario {
            steps: dice.between(300, 1500),
            slab_bytes: slab_pages * PAGE,
            host_slabs: dice.between(2, 10),
            geometry: dice.percent(80).then(|| geometry(dice)),
            pools: (0..dice.below(3)).map(|_| dice.below(16) * PAGE_BYTES).collect(),
            policy: dice.pick(&PolicyChoice::ALL).unwrap_or_default(),
            write_budget: dice.percent(15).then(|| dice.between(1 << 20, 1 << 32)),
            idle_ms: if dice.percent(50) { dice.between(1, 300) } else { 0 },
            clean_percent: dice.between(0, 60) as u32,
            limits: limits(dice),
            namespaces,
            block_bytes,
            faults: faults(dice),
            completions: dice.between(30, 400),
            retains: dice.percent(20),
            losses: dice.percent(30),
            follows: dice.between(1, 64) as usize,
        }
    }

    pub(super) fn bytes_of(&self, namespace: NamespaceId) -> u32 {
        let at = self.namespaces.iter().position(|info| info.id == namespace);
        at.and_then(|at| self.block_bytes.get(at)).copied().unwrap_or(PAGE)
    }

    pub(super) fn host_bytes(&self) -> u64 {
        self.host_slabs * u64::from(self.slab_bytes)
    }

    pub(super) fn config(&self, epoch: u32, quarantined: Vec<u32>) -> CatalogConfig {
        CatalogConfig {
            host_bytes: self.host_bytes(),
            slab_bytes: self.slab_bytes,
            host_policy: self.policy,
            device_policy: self.policy,
            weigh_cost: false,
            devices: self
                .pools
                .iter()
                .map(|bytes| DeviceShape::of(*bytes, self.slab_bytes))
                .collect(),
            nvme: self.geometry.map(|geometry| NvmeShape {
                geometry,
                epoch,
                quarantined,
                write_bytes_in_flight: 4 * PAGE_BYTES,
                reads_in_flight: 4,
                clean_segments: 2,
                reinsert_percent: 25,
                write_bytes_per_day: self.write_budget,
            }),
            quotas: vec![],
            limits: self.limits,
            arbiter: ArbiterConfig::default(),
            prefill: PrefillConfig::default(),
            copy_threads: 1,
            clean_percent: self.clean_percent,
            idle_ms: self.idle_ms,
            trace_order: false,
            epoch_s: 1_000 + u64::from(epoch),
            hash_seed: 1,
        }
    }

    /// Most bytes that leases and pins may hold.
    pub(super) fn pinned_bytes_max(&self, nvme_usable: bool) -> u64 {
        let bytes = match self.geometry {
            Some(geometry) if nvme_usable && self.write_budget.is_none() => {
                u64::from(geometry.payload_bytes()) * u64::from(geometry.segments)
            }
            _ => self.host_bytes(),
        };
        bytes * u64::from(self.limits.pinned_percent) / 100
    }

    pub(super) fn gpus(&self) -> Vec<GpuId> {
        (0..self.pools.len()).map(|at| GpuId(at as u8)).collect()
    }

    /// The first blocks of a random chain of a namespace.
    pub(super) fn path(&self, namespace: NamespaceId, dice: &mut Dice) -> Vec<Id> {
        let (chain, blocks) = (dice.below(CHAINS), dice.between(1, CHAIN_BLOCKS));
        (0..blocks).map(|at| Id::new(namespace, chain, at)).collect()
    }

    /// All blocks that there can be.
    pub(super) fn all(&self) -> impl Iterator<Item = Id> + '_ {
        let names = self.namespaces.iter().map(|info| info.id);
        names.flat_map(|name| {
            let chains = (0..CHAINS).flat_map(|chain| (0..CHAIN_BLOCKS).map(move |at| (chain, at)));
            chains
                .filter(|(chain, at)| *chain < CHAINS / 2 || *at >= FORK)
                .map(move |(chain, at)| Id::new(name, chain, at))
        })
    }
}

fn geometry(dice: &mut Dice) -> StoreGeometry {
    let payload_pages = dice.between(6, 24) as u32;
    StoreGeometry {
        segment_bytes: (2 + payload_pages) * PAGE,
        segments: dice.between(4, 12) as u32,
        descriptor_pages: 1,
    }
}

fn limits(dice: &mut Dice) -> Limits {
    Limits {
        sessions: 8,
        regions_per_session: 8,
        tickets_per_session: dice.between(2, 16) as usize,
        blocks_in_flight: dice.between(16, 128) as usize,
        leases_per_session: dice.between(2, 16) as usize,
        keys_per_call: dice.between(12, 48) as usize,
        lease_ms_max: dice.between(50, 20_000) as u32,
        pins: dice.between(1, 12) as usize,
        pin_ms_max: dice.between(50, 20_000),
        pinned_percent: dice.between(5, 80) as u32,
        ticket_ms: dice.between(100, 10_000),
        leased_blocks: dice.between(16, 256) as usize,
        device_ms: dice.between(5_000, 60_000),
        retain_ms_max: dice.between(50, 20_000),
        bad_keys: dice.between(1, 64) as usize,
    }
}

fn faults(dice: &mut Dice) -> Faults {
    if dice.percent(40) {
        return Faults::default();
    }
    let mut rate = |most| if dice.percent(50) { dice.between(1, most) } else { 0 };
    Faults {
        copies: rate(20),
        reads: rate(30),
        writes: rate(30),
        control: rate(20),
        damage: rate(5),
    }
}
