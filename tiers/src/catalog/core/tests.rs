//! The catalog against a small edge that carries actions out late, out of order, and with faults.

mod arbiter;
mod device;
mod ladder;
mod policy;
mod prefill;
mod quota;
mod reclaim;
mod stories;

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::table::{DeviceCopy, HostCopy, NvmeCopy};
use super::*;
use crate::block::{ElementType, Sum128};
use crate::segment::StoreGeometry;

const BLOCK: u32 = 4096;
const NAMESPACE: NamespaceId = NamespaceId(1);

fn geometry() -> StoreGeometry {
    StoreGeometry { segment_bytes: 1 << 20, segments: 8, descriptor_pages: 1 }
}

fn config(host_blocks: u64, nvme: bool) -> CatalogConfig {
    CatalogConfig {
        host_bytes: host_blocks * u64::from(BLOCK),
        slab_bytes: BLOCK * 4,
        host_policy: PolicyChoice::Lru,
        device_policy: PolicyChoice::Lru,
        weigh_cost: false,
        devices: vec![],
        nvme: nvme.then(|| NvmeShape {
            geometry: geometry(),
            epoch: 1,
            quarantined: vec![],
            write_bytes_in_flight: 4 * u64::from(BLOCK),
            reads_in_flight: 4,
            clean_segments: 2,
            reinsert_percent: 25,
            write_bytes_per_day: None,
        }),
        quotas: vec![],
        limits: Limits::default(),
        arbiter: ArbiterConfig::default(),
        prefill: PrefillConfig::default(),
        copy_threads: 1,
        clean_percent: 25,
        idle_ms: 0,
        trace_order: false,
        epoch_s: 1000,
        hash_seed: 1,
    }
}

fn key(chain: u32, position: u32) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[0] = 1;
    bytes[1..5].copy_from_slice(&chain.to_le_bytes());
    bytes[5..9].copy_from_slice(&position.to_le_bytes());
    BlockKey(bytes)
}

fn chain(chain: u32, blocks: u32) -> Vec<BlockKey> {
    (0..blocks).map(|at| key(chain, at)).collect()
}

fn sum(key: &BlockKey) -> Sum128 {
    Sum128::of(&key.0)
}

/// Carries actions out. `delay`: completions wait until [`Edge::complete`] picks them.
struct Edge {
    catalog: Catalog,
    now: u64,
    waiting: VecDeque<Event>,
    answers: HashMap<AskId, Reply>,
    ended: HashMap<TicketId, Vec<Outcome>>,
    next_ask: u64,
    /// Number of the session and of its region.
    connection: u64,
    tenant: TenantId,
    /// What stores, loads and lookups are about.
    namespace: NamespaceId,
    conversation: u64,
    /// Contents of the region, by place.
    region: HashMap<u32, BlockKey>,
    /// The GPU that the region is on.
    gpu: Option<GpuId>,
    /// Contents of the slots.
    slots: HashMap<SlotPlace, BlockKey>,
    delay: bool,
    fail: Option<OpError>,
    writes: u64,
    /// Blocks that were encoded for trial.
    trials: u64,
}

impl Edge {
    fn new(config: CatalogConfig) -> Edge {
        let mut edge = Edge {
            catalog: Catalog::new(config),
            now: 0,
            waiting: VecDeque::new(),
            answers: HashMap::new(),
            ended: HashMap::new(),
            next_ask: 0,
            connection: 0,
            tenant: TenantId(1),
            namespace: NAMESPACE,
            conversation: 7,
            region: HashMap::new(),
            gpu: None,
            slots: HashMap::new(),
            delay: false,
            fail: None,
            writes: 0,
            trials: 0,
        };
        let info = NamespaceInfo {
            id: NAMESPACE,
            generation: 1,
            tenant: TenantId(1),
            codec: CodecChoice::Raw,
            element: ElementType::Bf16,
            narrow: None,
        };
        edge.event(Event::Namespace(info));
        edge.connect();
        edge
    }

    fn connect(&mut self) {
        self.connection += 1;
        let (session, region, gpu) = (self.session(), self.region_id(), self.gpu);
        self.event(Event::SessionOpened { session, tenant: self.tenant });
        self.event(Event::RegionOpened { session, region, places: 64, block_bytes: BLOCK, gpu });
    }

    fn session(&self) -> SessionId {
        SessionId(self.connection)
    }

    fn region_id(&self) -> RegionId {
        RegionId(self.connection)
    }

    fn event(&mut self, event: Event) {
        self.apply(event);
        while !self.delay && !self.waiting.is_empty() {
            let Some(event) = self.waiting.pop_front() else { return };
            self.apply(event);
        }
    }

    fn apply(&mut self, event: Event) {
        self.now += 1;
        for action in self.catalog.apply(Timestamp(self.now), event) {
            self.carry_out(action);
        }
    }

    fn complete(&mut self, pick: usize) {
        if !self.waiting.is_empty() {
            let picked = self.waiting.remove(pick % self.waiting.len());
            self.event(picked.expect("an index below the length"));
        }
    }

    fn carry_out(&mut self, action: Action) {
        let failed = self.fail;
        let result = move || failed.map_or(Ok(()), Err);
        let event = match action {
            Action::Answer { ask, reply } => {
                assert!(self.answers.insert(ask, reply).is_none(), "answered twice");
                return;
            }
            Action::EndTicket { ticket, outcomes, .. } => {
                assert!(self.ended.insert(ticket, outcomes).is_none(), "ended twice");
                return;
            }
            Action::Gather { op, to, descriptor, .. } => {
                self.slots.insert(to, descriptor.key);
                Event::Gathered { op, result: result().map(|()| sum(&descriptor.key)) }
            }
            Action::Compare { op, place, .. } => {
                let held = self.region.get(&place).copied().unwrap_or_default();
                Event::Compared { op, result: result().map(|()| sum(&held)) }
            }
            Action::Scatter { op, from, through, key, raw_sum, .. } => {
                assert_eq!(self.slots.get(&from), Some(&key), "the slot holds another block");
                if let (Some(slot), Some(gpu)) = (through, self.gpu) {
                    self.slots.insert(SlotPlace::Device(gpu, slot), key);
                }
                assert_eq!(raw_sum, sum(&key), "the checksum of another block");
                Event::Scattered { op, result: result() }
            }
            Action::Demote { op, gpu, from, to, descriptor } => {
                let held = self.slots.get(&SlotPlace::Device(gpu, from));
                assert_eq!(held, Some(&descriptor.key), "the pool's slot holds another block");
                self.slots.insert(SlotPlace::Host(to), descriptor.key);
                Event::Demoted { op, result: result() }
            }
            Action::Read { op, slot, descriptor, .. } => {
                self.slots.insert(SlotPlace::Host(slot), descriptor.key);
                assert_eq!(descriptor.stored_sum, sum(&descriptor.key));
                Event::Read { op, result: result() }
            }
            Action::Write { op, .. } => {
                self.writes += 1;
                Event::Written { op, result: result() }
            }
            Action::OpenSegment { segment, .. } => Event::SegmentOpened { segment, result: Ok(()) },
            Action::Sync { op } => Event::Synced { op, result: result() },
            Action::Encode { op, raw_bytes, trial, .. } => {
                let none = CodecTrial { raw_bytes, stored_bytes: raw_bytes, decode_us: 0 };
                self.trials += u64::from(trial);
                Event::Encoded { op, result: None, trial: trial.then_some(none) }
            }
            Action::EraseDescriptor { segment, sequence, index } => {
                Event::Erased { segment, sequence, index, result: result() }
            }
            _ => return,
        };
        self.waiting.push_back(event);
    }

    fn ask(&mut self, request: Request) -> Option<Reply> {
        self.next_ask += 1;
        let ask = AskId(self.next_ask);
        self.event(Event::Asked { ask, session: self.session(), request });
        self.answers.get(&ask).cloned()
    }

    fn lookup(&mut self, keys: Vec<BlockKey>, lease_ms: u32) -> LookupReply {
        let prefixes = vec![PrefixQuery { namespace: self.namespace, keys }];
        match self.ask(Request::Lookup { prefixes, lease_ms, hints: Hints::default() }) {
            Some(Reply::Lookup(reply)) => reply,
            Some(Reply::Busy(_)) => LookupReply::default(),
            other => panic!("{other:?}"),
        }
    }

    fn store(&mut self, keys: &[BlockKey], from: usize) -> Option<TicketId> {
        self.store_cut(keys, from, 16)
    }

    /// The last block has so many tokens; the others have 16.
    fn store_cut(&mut self, keys: &[BlockKey], from: usize, last: u32) -> Option<TicketId> {
        let mut blocks = vec![];
        for (at, key) in keys.iter().enumerate().skip(from) {
            let place = (at % 64) as u32;
            self.region.insert(place, *key);
            let parent = if at == 0 { BlockKey::ROOT } else { keys[at - 1] };
            let tokens = if at + 1 == keys.len() { last } else { 16 };
            blocks.push(StoreBlock { key: *key, parent, position: at as u32, tokens, place });
        }
        let request = Request::Store {
            namespace: self.namespace,
            conversation: self.conversation,
            region: self.region_id(),
            after_event: None,
            blocks,
            hints: Hints::default(),
        };
        match self.ask(request) {
            Some(Reply::Ticket(ticket)) => Some(ticket),
            _ => None,
        }
    }

    fn load(&mut self, keys: &[BlockKey], lease: LeaseId) -> Option<TicketId> {
        let place = |at: usize| (at % 64) as u32;
        let blocks =
            keys.iter().enumerate().map(|(at, key)| LoadBlock { key: *key, place: place(at) });
        let blocks = blocks.collect();
        let (namespace, region) = (self.namespace, self.region_id());
        let (after_event, hints) = (None, Hints::default());
        let request = Request::Load { lease, namespace, region, after_event, blocks, hints };
        match self.ask(request) {
            Some(Reply::Ticket(ticket)) => Some(ticket),
            _ => None,
        }
    }

    fn outcomes(&self, ticket: Option<TicketId>) -> &[Outcome] {
        &self.ended[&ticket.expect("a ticket")]
    }

    fn stats(&mut self) -> CatalogStats {
        self.catalog.stats()
    }
}

impl Catalog {
    /// What must hold between any two events.
    fn check(&mut self) {
        for index in 0..self.table.index_end() {
            let host = self.table.get(index).host;
            let held = matches!(host, HostCopy::Filling { .. } | HostCopy::Resident { .. })
                && self.table.live(index).is_some();
            let listed = self.host.tier.listed(index);
            assert_eq!(held, listed, "policy and table disagree on block {index}: {host:?}");
        }
        self.check_devices();
        self.check_quotas();
        let (mut slots, mut nvme, mut dirty) = (0, 0, 0);
        let mut live = vec![0u64; self.nvme.as_ref().map_or(0, |n| n.segments.count() as usize)];
        let mut pinned = vec![0u32; live.len()];
        let mut orphans = vec![0u64; live.len()];
        let mut in_host = vec![(0u32, 0u64); live.len()];
        for index in 0..self.table.index_end() {
            let Some(block) = self.table.live(index) else {
                continue;
            };
            slots += u64::from(block.host != HostCopy::Absent);
            if let Some(location) = self.table.location(index) {
                nvme += 1;
                let at = location.segment as usize;
                live[at] += u64::from(location.stored_bytes);
                pinned[at] += u32::from(block.pins > 0);
                if block.host_slot().is_some() {
                    in_host[at] =
                        (in_host[at].0 + 1, in_host[at].1 + super::copies::slot_bytes(block));
                }
                orphans[at] += if block.orphan { u64::from(location.stored_bytes) } else { 0 };
            } else if matches!(block.host, HostCopy::Resident { .. }) && !block.is_refused() {
                dirty += super::copies::slot_bytes(block);
            }
            let parent = block.parent;
            if parent != super::table::NIL {
                let above = self.table.get(parent);
                assert_eq!(block.orphan, above.orphan || above.is_ghost(), "orphan mark");
            }
            if block.is_ghost() {
                let why = self.table.has_children(index) || block.pins > 0 || block.is_queued();
                assert!(why, "a bare ghost stays");
            }
        }
        assert_eq!(slots, self.host.tier.slots.used_slots(), "slots leak");
        assert_eq!(dirty, self.host.dirty_bytes, "dirty bytes");
        if let Some(tier) = &self.nvme {
            assert_eq!(nvme, tier.blocks, "nvme blocks");
            assert_eq!(live.iter().sum::<u64>(), tier.segments.live_bytes(), "live bytes");
            tier.segments.check_logs();
            assert_eq!(self.stuck_under_reclaim(), None, "a segment waits for ever");
            for (at, bytes) in live.iter().enumerate() {
                let segment = tier.segments.get(at as u32);
                assert_eq!(*bytes, segment.live_bytes, "live bytes of segment {at}");
                assert_eq!(pinned[at], segment.pinned, "pinned blocks of segment {at}");
                assert_eq!(orphans[at], segment.orphan_bytes, "orphans of segment {at}");
                let counted = (segment.in_host, segment.in_host_bytes);
                assert_eq!(in_host[at], counted, "blocks of segment {at} in host RAM");
            }
        }
    }

    fn check_devices(&mut self) {
        for at in 0..self.devices.len() {
            let (gpu, mut slots) = (GpuId(at as u8), 0);
            for index in 0..self.table.index_end() {
                let live = self.table.live(index).is_some();
                let block = self.table.get(index);
                let (held, usable) = match block.device {
                    DeviceCopy::Absent => (false, false),
                    DeviceCopy::Draining { gpu: on, .. } => (on == gpu, false),
                    DeviceCopy::Filling { gpu: on, .. } | DeviceCopy::Resident { gpu: on, .. } => {
                        (on == gpu, on == gpu)
                    }
                };
                let below = block.host != HostCopy::Absent || block.nvme != NvmeCopy::Absent;
                let only = block.device_slot().is_some_and(|(on, _)| on == gpu) && !below;
                slots += u64::from(held && live);
                let device = self.devices.get_mut(at).unwrap();
                let listed = device.tier.listed(index);
                assert_eq!(usable && live, listed, "policy of {gpu:?}, block {index}");
                let dirty = device.dirty.contains(index);
                assert!(!dirty || only, "block {index} is listed though it has a copy below");
            }
            assert_eq!(slots, self.devices[at].tier.slots.used_slots(), "slots of {gpu:?} leak");
        }
    }
}

#[test]
fn what_was_stored_is_found_and_loaded() {
    let mut edge = Edge::new(config(64, true));
    let keys = chain(1, 10);
    assert_eq!(edge.lookup(keys.clone(), 1000), LookupReply::default());
    let ticket = edge.store(&keys, 0);
    assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 10]);
    let found = edge.lookup(keys.clone(), 1000);
    let run = Run { blocks: 10, tier: Tier::Host, state: RunState::Ready };
    assert_eq!((found.blocks, found.runs.as_slice()), (10, [run].as_slice()));
    let ticket = edge.load(&keys, found.lease.unwrap());
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Host); 10]);
    edge.catalog.check();
}

#[test]
fn a_full_arena_spills_and_loads_come_back_from_nvme() {
    let mut edge = Edge::new(config(40, true));
    for number in 0..8 {
        let ticket = edge.store(&chain(number, 10), 0);
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 10], "chain {number}");
        edge.catalog.check();
    }
    let keys = chain(0, 10);
    let found = edge.lookup(keys.clone(), 1000);
    assert_eq!(found.runs, [Run { blocks: 10, tier: Tier::Nvme, state: RunState::Ready }]);
    let writes = edge.writes;
    let ticket = edge.load(&keys, found.lease.unwrap());
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Nvme); 10]);
    assert!(edge.writes - writes <= 10, "clean copies are not written again");
    edge.catalog.check();
}

#[test]
fn a_codec_is_tried_on_a_few_blocks_before_it_is_chosen() {
    let mut edge = Edge::new(config(40, true));
    let info = NamespaceInfo {
        id: NAMESPACE,
        generation: 1,
        tenant: TenantId(1),
        codec: CodecChoice::Auto,
        element: ElementType::Bf16,
        narrow: None,
    };
    edge.event(Event::Namespace(info));
    for number in 0..8 {
        edge.store(&chain(number, 8), 0);
    }
    assert!(edge.writes > 8);
    assert_eq!(edge.trials, 8, "then nothing is known of reads, and blocks stay raw");
    let Some(Reply::Codecs(codecs)) = edge.ask(Request::Codecs) else { panic!() };
    let raw = CodecReport {
        namespace: NAMESPACE,
        choice: CodecChoice::Auto,
        codec: crate::block::Codec::Raw,
        why: CodecWhy::NoReads,
    };
    assert_eq!(codecs, [raw]);
}

#[test]
fn the_first_writer_wins_and_a_mismatch_is_counted() {
    let mut edge = Edge::new(config(16, false));
    let keys = chain(1, 1);
    edge.store(&keys, 0);
    let ticket = edge.store(&keys, 0);
    assert_eq!(edge.outcomes(ticket), [Outcome::Present]);
    // Other bytes under the same key.
    edge.region.insert(5, key(9, 9));
    let block =
        StoreBlock { key: keys[0], parent: BlockKey::ROOT, position: 0, tokens: 1, place: 5 };
    let request = Request::Store {
        namespace: NAMESPACE,
        conversation: 0,
        region: edge.region_id(),
        after_event: None,
        blocks: vec![block],
        hints: Hints::default(),
    };
    let Some(Reply::Ticket(ticket)) = edge.ask(request) else { panic!("no ticket") };
    assert_eq!(edge.outcomes(Some(ticket)), [Outcome::Rejected(RejectReason::Mismatch)]);
    assert_eq!(edge.stats().rejected, [(RejectReason::Mismatch, 1)]);
}

#[test]
fn a_key_reported_bad_is_gone_and_refused() {
    let mut edge = Edge::new(config(16, false));
    let keys = chain(1, 3);
    edge.store(&keys, 0);
    edge.ask(Request::ReportBad { namespace: NAMESPACE, keys: vec![keys[1]] });
    assert_eq!(edge.lookup(keys.clone(), 0).blocks, 1);
    let ticket = edge.store(&keys, 1);
    let expected = [Outcome::Rejected(RejectReason::Quarantined), Outcome::Present];
    assert_eq!(edge.outcomes(ticket), expected);
    edge.catalog.check();
}

#[test]
fn a_block_of_another_namespace_is_absent() {
    let mut edge = Edge::new(config(16, false));
    let keys = chain(1, 3);
    edge.store(&keys, 0);
    let prefixes = vec![PrefixQuery { namespace: NamespaceId(2), keys }];
    let reply = edge.ask(Request::Lookup { prefixes, lease_ms: 1000, hints: Hints::default() });
    assert!(matches!(reply, Some(Reply::Lookup(found)) if found == LookupReply::default()));
}

#[test]
fn the_run_is_what_all_prefixes_have() {
    let mut edge = Edge::new(config(32, false));
    edge.store(&chain(1, 8), 0);
    edge.store(&chain(2, 5), 0);
    let prefix = |number| PrefixQuery { namespace: NAMESPACE, keys: chain(number, 8) };
    let request = Request::Lookup {
        prefixes: vec![prefix(1), prefix(2)],
        lease_ms: 0,
        hints: Hints::default(),
    };
    assert!(matches!(edge.ask(request), Some(Reply::Lookup(found)) if found.blocks == 5));
}

#[test]
fn a_lease_that_ends_in_mid_load_makes_it_a_miss() {
    let mut edge = Edge::new(config(16, false));
    let keys = chain(1, 2);
    edge.store(&keys, 0);
    let lease = edge.lookup(keys.clone(), 1).lease.unwrap();
    edge.delay = true;
    let ticket = edge.load(&keys, lease);
    edge.now += 5000;
    edge.event(Event::Tick);
    edge.complete(0);
    edge.complete(0);
    assert_eq!(edge.outcomes(ticket), [Outcome::Missed(MissReason::LeaseExpired); 2]);
    edge.catalog.check();
}

#[test]
fn leases_keep_blocks_from_being_evicted() {
    let mut edge = Edge::new(config(16, false));
    let keys = chain(1, 8);
    edge.store(&keys, 0);
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    for number in 2..6 {
        edge.store(&chain(number, 8), 0);
    }
    let ticket = edge.load(&keys, lease);
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Host); 8]);
    edge.ask(Request::Release { lease });
    edge.store(&chain(7, 16), 0);
    assert_eq!(edge.lookup(keys, 0).blocks, 0);
    edge.catalog.check();
}

#[test]
fn loads_of_one_block_share_one_read() {
    let mut edge = Edge::new(config(40, true));
    for number in 0..8 {
        edge.store(&chain(number, 10), 0);
    }
    let keys = chain(0, 1);
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    edge.delay = true;
    let tickets = [edge.load(&keys, lease), edge.load(&keys, lease)];
    let reads = edge.waiting.iter().filter(|event| matches!(event, Event::Read { .. })).count();
    assert_eq!(reads, 1);
    edge.delay = false;
    edge.event(Event::Tick);
    for ticket in tickets {
        assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Nvme)]);
    }
}

#[test]
fn a_bad_read_is_tried_once_more_then_the_block_is_dropped() {
    let mut edge = Edge::new(config(40, true));
    for number in 0..8 {
        edge.store(&chain(number, 10), 0);
    }
    let keys = chain(0, 1);
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    edge.fail = Some(OpError::Checksum);
    let ticket = edge.load(&keys, lease);
    assert_eq!(edge.outcomes(ticket), [Outcome::Missed(MissReason::Checksum)]);
    assert_eq!(edge.stats().read_failures, 2);
    edge.fail = None;
    assert_eq!(edge.lookup(keys, 0).blocks, 0);
    edge.catalog.check();
}

#[test]
fn a_damaged_slot_is_replaced_by_the_copy_on_nvme() {
    let mut edge = Edge::new(config(40, true));
    for number in 0..8 {
        edge.store(&chain(number, 10), 0);
    }
    let keys = chain(0, 1);
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    edge.load(&keys, lease);
    edge.delay = true;
    let ticket = edge.load(&keys, lease);
    let Some(Event::Scattered { op, .. }) = edge.waiting.pop_back() else { panic!("no scatter") };
    edge.delay = false;
    edge.event(Event::Scattered { op, result: Err(OpError::Checksum) });
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Nvme)]);
    assert_eq!(edge.stats().corrupt, 1);
    edge.catalog.check();
}

#[test]
fn failing_writes_take_the_tier_off_and_host_ram_goes_on() {
    let mut edge = Edge::new(config(16, true));
    edge.fail = Some(OpError::Device);
    edge.catalog.config.clean_percent = 100;
    edge.delay = true;
    edge.store(&chain(0, 8), 0);
    // The stores succeed, every write fails.
    for _ in 0..200 {
        if let Some(at) = edge.waiting.iter().position(|e| matches!(e, Event::Gathered { .. })) {
            let Some(Event::Gathered { op, .. }) = edge.waiting.remove(at) else { unreachable!() };
            edge.event(Event::Gathered { op, result: Ok(Sum128([1; 16])) });
        } else {
            edge.complete(0);
        }
    }
    assert_eq!(edge.stats().nvme.offline, Some(OfflineReason::TooManyFailures));
    assert_eq!(edge.lookup(chain(0, 8), 0).blocks, 8);
    edge.catalog.check();
}

#[test]
fn drain_writes_everything_down_and_refuses_stores() {
    let mut edge = Edge::new(config(32, true));
    edge.store(&chain(0, 8), 0);
    let reply = edge.ask(Request::Drain { deadline_ms: None });
    assert!(reply.is_none() || matches!(reply, Some(Reply::Drained(_))));
    let ask = AskId(edge.next_ask);
    let drained = &edge.answers[&ask];
    assert!(
        matches!(drained, Reply::Drained(Drained { blocks_written: 8, blocks_lost: 0, .. })),
        "{drained:?}"
    );
    assert!(edge.store(&chain(1, 1), 0).is_none());
}

#[test]
fn parents_that_form_a_ring_do_no_harm() {
    // a's parent is b and b's parent is a: no loop, both are found.
    let mut edge = Edge::new(config(16, false));
    let (a, b) = (key(1, 0), key(2, 0));
    for (key, parent, place) in [(a, b, 0), (b, a, 1)] {
        edge.region.insert(place, key);
        let block = StoreBlock { key, parent, position: 1, tokens: 1, place };
        let request = Request::Store {
            namespace: NAMESPACE,
            conversation: 0,
            region: edge.region_id(),
            after_event: None,
            blocks: vec![block],
            hints: Hints::default(),
        };
        edge.ask(request);
    }
    assert_eq!(edge.lookup(vec![a], 0).blocks + edge.lookup(vec![b], 0).blocks, 2);
    edge.catalog.check();
}

/// A tier whose coldest blocks were all dirty stood still: no victim, and too few dirty blocks for
/// the watermark.
#[test]
fn a_burst_of_stores_and_then_reads_of_nvme_do_not_wedge_the_host_tier() {
    let mut config = config(6000, true);
    if let Some(nvme) = &mut config.nvme {
        nvme.geometry =
            StoreGeometry { segment_bytes: 8 << 20, segments: 32, descriptor_pages: 128 };
    }
    let mut edge = Edge::new(config);
    let old = chain(1, 1700);
    edge.store(&old, 0);
    edge.ask(Request::Drain { deadline_ms: None });
    edge.catalog.drain = None;
    for number in 0..43 {
        edge.store(&chain(100 + number, 100), 0);
    }
    // The clean blocks are used again, so that the coldest 4,096 and more are dirty.
    edge.lookup(old, 10);
    edge.now += 20_000;
    edge.event(Event::Tick);
    let keys = chain(7, 100);
    for _ in 0..100 {
        let ticket = edge.store(&keys, 0);
        if edge.outcomes(ticket).iter().all(|o| matches!(o, Outcome::Stored | Outcome::Present)) {
            return;
        }
    }
    panic!("stores find no room for ever");
}

#[test]
fn thousands_of_cold_pins_do_not_stop_eviction() {
    let mut config = config(6000, false);
    config.limits.pinned_percent = 90;
    let mut edge = Edge::new(config);
    let pinned = chain(1, 5000);
    edge.store(&pinned, 0);
    let prefix = PrefixQuery { namespace: NAMESPACE, keys: pinned.clone() };
    edge.ask(Request::Pin { prefix, ttl_ms: 1_000_000 });
    for number in 2..40 {
        let ticket = edge.store(&chain(number, 100), 0);
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 100], "chain {number}");
    }
    assert_eq!(edge.lookup(pinned, 0).blocks, 5000);
}

#[test]
fn half_of_ram_is_kept_clean_while_nothing_is_read() {
    let mut config = config(40, true);
    config.idle_ms = 200;
    let mut edge = Edge::new(config);
    for number in 0..8 {
        edge.store(&chain(number, 8), 0);
        // Up to four writes were under way when there was less than half again.
        let (dirty, all) = (edge.stats().dirty_blocks, 8 * (u64::from(number) + 1));
        assert!(dirty == all || (17..=20).contains(&dirty), "chain {number}: {dirty}");
    }
    // The first chain is on nvme only. While it is read, nothing is written.
    edge.delay = true;
    let keys = chain(0, 8);
    let found = edge.lookup(keys.clone(), 1000);
    edge.load(&keys, found.lease.unwrap());
    let (writes, dirty) = (edge.writes, edge.stats().dirty_blocks);
    edge.store(&chain(9, 4), 0);
    while edge.catalog.flow.gathers > 0 {
        let at = edge.waiting.iter().position(|event| matches!(event, Event::Gathered { .. }));
        let event = edge.waiting.remove(at.unwrap()).unwrap();
        edge.apply(event);
    }
    assert_eq!(edge.stats().dirty_blocks, dirty + 4);
    assert_eq!(edge.writes, writes);
    edge.delay = false;
    edge.event(Event::Tick);
    assert!(edge.stats().dirty_blocks <= 20);
}

/// Blocks below the watermark stayed in RAM for as long as clients never paused. Those that may be
/// encoded are not written just because the drive is free.
#[test]
fn dirty_blocks_are_written_within_a_minute_of_steady_demand() {
    let mut config = config(64, true);
    config.idle_ms = 200;
    let mut edge = Edge::new(config);
    let info = NamespaceInfo {
        id: NAMESPACE,
        generation: 1,
        tenant: TenantId(1),
        codec: CodecChoice::Lz4,
        element: ElementType::Bf16,
        narrow: None,
    };
    edge.event(Event::Namespace(info));
    edge.store(&chain(1, 20), 0);
    assert_eq!(edge.stats().dirty_blocks, 20);
    for _ in 0..600 {
        edge.now += 100_000;
        edge.lookup(chain(1, 20), 0);
        edge.event(Event::Tick);
    }
    assert_eq!(edge.stats().dirty_blocks, 0);
    assert_eq!(edge.writes, 20);
}

/// A segment that failed early holds a few recent blocks, all of them in RAM too. It was the first
/// choice of reclaim and not thought worth it, so that a drain waited for a clean segment for ever.
#[test]
fn a_drain_makes_room_from_segments_that_failed_early() {
    let mut edge = Edge::new(config(64, true));
    for segment in 0..8 {
        edge.store(&chain(segment, 4), 0);
        edge.ask(Request::Drain { deadline_ms: None });
        edge.catalog.drain = None;
        if let Some(nvme) = &mut edge.catalog.nvme {
            nvme.segments.seal(segment);
        }
    }
    edge.store(&chain(100, 20), 0);
    edge.ask(Request::Drain { deadline_ms: None });
    let drained = &edge.answers[&AskId(edge.next_ask)];
    assert!(matches!(drained, Reply::Drained(Drained { blocks_lost: 0, .. })), "{drained:?}");
    edge.catalog.check();
}

#[test]
fn a_restart_alone_reclaims_nothing() {
    let mut edge = Edge::new(config(16, true));
    for segment in 0..8 {
        edge.catalog.recover(segment, u64::from(segment) + 1, &[]);
    }
    edge.event(Event::Tick);
    edge.now += 1_000_000;
    edge.event(Event::Tick);
    assert_eq!(edge.stats().segments_reclaimed, 0);
}

#[test]
fn a_forgotten_chain_is_visited_once_however_often_it_is_named() {
    let mut edge = Edge::new(config(4096, false));
    let keys = chain(1, 3000);
    edge.store(&keys, 0);
    let many: Vec<BlockKey> = keys.iter().cycle().take(12_000).copied().collect();
    let forget = Forget::Keys { namespace: NAMESPACE, keys: many };
    assert!(matches!(edge.ask(Request::Forget(forget)), Some(Reply::Count(3000))));
    edge.catalog.check();
}

#[derive(Clone, Debug)]
enum Step {
    Store(u32, u32),
    Lookup(u32, u32),
    Load(u32, u32),
    Release(usize),
    Complete(usize),
    Fail(Option<u8>),
    Forget(u32, u32),
    Bad(u32, u32),
    Prefetch(u32, u32),
    Pin(u32, u32),
    Reconnect(u8),
    LoseGpu(u8),
    Late,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = || (0u32..12, 1u32..12);
    let step = prop_oneof![
        4 => at().prop_map(|(a, b)| Step::Store(a, b)),
        2 => at().prop_map(|(a, b)| Step::Lookup(a, b)),
        3 => at().prop_map(|(a, b)| Step::Load(a, b)),
        2 => any::<usize>().prop_map(Step::Release),
        12 => any::<usize>().prop_map(Step::Complete),
        1 => prop::option::weighted(0.3, 0u8..3).prop_map(Step::Fail),
        1 => at().prop_map(|(a, b)| Step::Forget(a, b)),
        1 => at().prop_map(|(a, b)| Step::Bad(a, b)),
        1 => at().prop_map(|(a, b)| Step::Prefetch(a, b)),
        1 => at().prop_map(|(a, b)| Step::Pin(a, b)),
        2 => (0u8..4).prop_map(Step::Reconnect),
        1 => prop::option::weighted(0.05, 0u8..2)
            .prop_map(|gpu| gpu.map_or(Step::Late, Step::LoseGpu)),
        1 => Just(Step::Late),
    ];
    prop::collection::vec(step, 1..300)
}

fn take_step(edge: &mut Edge, leases: &mut Vec<LeaseId>, step: Step) {
    match step {
        Step::Store(number, blocks) => {
            edge.store(&chain(number, blocks), 0);
        }
        Step::Lookup(number, blocks) => {
            edge.lookup(chain(number, blocks), 0);
        }
        Step::Load(number, blocks) => {
            let found = edge.lookup(chain(number, blocks), 1000);
            if let Some(lease) = found.lease {
                leases.push(lease);
                edge.load(&chain(number, blocks), lease);
            }
        }
        Step::Release(pick) if !leases.is_empty() => {
            let lease = leases.swap_remove(pick % leases.len());
            edge.ask(Request::Release { lease });
        }
        Step::Release(_) => {}
        Step::Complete(pick) => edge.complete(pick),
        Step::Fail(kind) => {
            let kinds = [OpError::Checksum, OpError::Device, OpError::Region];
            edge.fail = kind.map(|kind| kinds[kind as usize]);
        }
        Step::Forget(number, at) => {
            let keys = vec![key(number, at / 2)];
            edge.ask(Request::Forget(Forget::Keys { namespace: NAMESPACE, keys }));
        }
        Step::Bad(number, at) => {
            edge.ask(Request::ReportBad { namespace: NAMESPACE, keys: vec![key(number, at)] });
        }
        Step::Prefetch(number, blocks) => {
            let prefix = PrefixQuery { namespace: NAMESPACE, keys: chain(number, blocks) };
            edge.ask(Request::Prefetch { prefix, hints: Hints::default() });
        }
        Step::Pin(number, blocks) => {
            let prefix = PrefixQuery { namespace: NAMESPACE, keys: chain(number, blocks) };
            edge.ask(Request::Pin { prefix, ttl_ms: 20 });
        }
        Step::LoseGpu(gpu) => {
            let gpu = GpuId(gpu);
            edge.event(Event::DeviceLost { gpu, reason: OfflineReason::DeviceGone });
        }
        Step::Reconnect(where_to) => {
            let gpu = GpuId(where_to);
            edge.gpu = edge.catalog.device_mut(gpu).map(|_| gpu);
            edge.event(Event::SessionClosed { session: edge.session() });
            leases.clear();
            edge.connect();
        }
        Step::Late => {
            edge.now += 20_000;
            edge.event(Event::Tick);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any order of requests, completions, faults and losses keeps the invariants; in the end every
    /// ticket has ended once and nothing is left behind.
    #[test]
    fn nothing_leaks_whatever_happens(
        steps in steps(),
        nvme in any::<bool>(),
        gpus in 0usize..3,
        pool_blocks in 0u64..16,
        policy in 0usize..5,
        budget in prop::option::of(1u64 << 20..1 << 32),
    ) {
        let mut config = config(24, nvme);
        config.host_policy = PolicyChoice::ALL[policy];
        config.device_policy = config.host_policy;
        if let Some(nvme) = &mut config.nvme {
            nvme.write_bytes_per_day = budget;
        }
        config.devices = vec![pool(pool_blocks); gpus];
        config.limits.pin_ms_max = 1000;
        let mut edge = Edge::new(config);
        edge.event(Event::SessionClosed { session: edge.session() });
        edge.gpu = (gpus > 0).then_some(GpuId(0));
        edge.connect();
        let mut leases = vec![];
        for step in steps {
            edge.delay = true;
            take_step(&mut edge, &mut leases, step);
            edge.catalog.check();
        }
        edge.fail = None;
        edge.delay = false;
        edge.event(Event::SessionClosed { session: edge.session() });
        edge.now += 100_000_000;
        edge.event(Event::Tick);
        edge.catalog.check();
        let stats = edge.stats();
        prop_assert_eq!((stats.tickets, stats.leases, stats.pins, stats.regions), (0, 0, 0, 0));
        prop_assert_eq!(edge.catalog.flow.ops.len(), 0);
        prop_assert_eq!(edge.catalog.flow.blocks_open, 0);
        prop_assert_eq!(edge.catalog.counters.pinned_bytes, 0);
        edge.ask(Request::Forget(Forget::Namespace { namespace: NAMESPACE }));
        edge.event(Event::Tick);
        edge.catalog.check();
        for device in &edge.catalog.devices {
            prop_assert_eq!(device.tier.slots.used_slots(), 0);
        }
        prop_assert_eq!(edge.catalog.host.tier.slots.used_slots(), 0);
        prop_assert_eq!(edge.catalog.table.len(), 0);
    }
}

fn pool(blocks: u64) -> DeviceShape {
    DeviceShape { pool_bytes: blocks * u64::from(BLOCK), slab_bytes: BLOCK * 4 }
}
