//! What tenants and conversations hold, may hold, and lose.

use super::*;
use crate::block::{Descriptor, page_ceil};
use crate::catalog::quota::*;

const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Nvme];

/// Bytes of so many blocks.
fn of_blocks(blocks: u64) -> u64 {
    blocks * u64::from(BLOCK)
}

fn hard(blocks: u64) -> Quota {
    Quota { soft: None, hard: Some(of_blocks(blocks)) }
}

fn soft(blocks: u64) -> Quota {
    Quota { soft: Some(of_blocks(blocks)), hard: None }
}

fn host(quota: Quota) -> TierQuotas {
    TierQuotas { host: quota, ..TierQuotas::default() }
}

impl Catalog {
    /// What is charged is what is there, and nobody has more than the hard quota.
    pub(super) fn check_quotas(&mut self) {
        let mut held: HashMap<(NamespaceId, Option<u64>, usize), u64> = HashMap::new();
        for index in 0..self.table.index_end() {
            let Some(block) = self.table.live(index) else { continue };
            let bytes = super::super::copies::slot_bytes(block);
            let stored = self.table.location(index).map(|found| found.stored_bytes);
            let there = [
                (block.device != DeviceCopy::Absent).then_some(bytes),
                (block.host != HostCopy::Absent).then_some(bytes),
                stored.map(|stored| page_ceil(u64::from(stored))),
            ];
            for (tier, bytes) in there.into_iter().enumerate() {
                for number in [None, Some(block.conversation)] {
                    *held.entry((block.namespace, number, tier)).or_default() += bytes.unwrap_or(0);
                }
            }
        }
        let limited = self.config.quotas.iter().any(|(_, each)| each.conversation.is_limited());
        for ((namespace, number, tier), bytes) in &held {
            if number.is_some() && (!limited || *number == Some(0)) {
                continue;
            }
            let used = self.quotas.used(*namespace, *number, TIERS[*tier]);
            assert_eq!(*bytes, used, "{namespace:?} {number:?} {:?}", TIERS[*tier]);
        }
        for (at, tier) in TIERS.into_iter().enumerate() {
            let all = held.iter().filter(|((_, number, on), _)| number.is_none() && *on == at);
            let all: u64 = all.map(|(_, bytes)| *bytes).sum();
            let uses = self.quotas.uses();
            let uses = uses.iter().flat_map(|each| &each.tiers).filter(|each| each.tier == tier);
            assert_eq!(all, uses.clone().map(|each| each.used_bytes).sum::<u64>(), "{tier:?}");
            for found in uses {
                assert!(found.quota.hard.is_none_or(|most| found.used_bytes <= most), "{found:?}");
            }
        }
        assert_eq!(self.quotas.owners_over_hard(), 0, "somebody is over a hard quota");
    }
}

/// A second tenant, with a namespace and a connection of its own.
fn with_two_tenants(config: CatalogConfig) -> Edge {
    let mut edge = Edge::new(config);
    edge.event(Event::Namespace(NamespaceInfo {
        id: NamespaceId(2),
        generation: 1,
        tenant: TenantId(2),
        codec: CodecChoice::Raw,
        element: ElementType::Bf16,
        narrow: None,
    }));
    edge.tenant = TenantId(2);
    edge.connect();
    be(&mut edge, 1);
    edge
}

fn be(edge: &mut Edge, tenant: u32) {
    edge.tenant = TenantId(tenant);
    edge.namespace = NamespaceId(tenant);
    edge.connection = u64::from(tenant);
}

fn quotas(all: TierQuotas, conversation: TierQuotas) -> Vec<(TenantId, OwnerQuotas)> {
    vec![(TenantId(1), OwnerQuotas { all, conversation })]
}

/// Looks up, releases, and stores what was missing. Blocks found, and what was dropped.
fn turn(edge: &mut Edge, keys: &[BlockKey]) -> (u32, Option<Dropped>) {
    let found = edge.lookup(keys.to_vec(), 1000);
    if let Some(lease) = found.lease {
        edge.ask(Request::Release { lease });
    }
    for part in (found.blocks as usize..keys.len()).step_by(48) {
        let end = keys.len().min(part + 48);
        edge.store(&keys[..end], part);
    }
    (found.blocks, found.dropped.map(|dropped| *dropped))
}

#[test]
fn a_store_over_the_quota_takes_the_place_of_the_tenants_own_blocks() {
    let mut config = config(64, false);
    config.quotas = quotas(host(hard(16)), TierQuotas::default());
    let mut edge = with_two_tenants(config);
    be(&mut edge, 2);
    turn(&mut edge, &chain(100, 20));
    be(&mut edge, 1);
    for number in 0..40 {
        let ticket = edge.store(&chain(number, 8), 0);
        assert!(edge.outcomes(ticket).iter().all(|each| *each == Outcome::Stored), "{number}");
        edge.catalog.check();
    }
    let stats = edge.stats();
    let own = &stats.owners[0].tiers[1];
    assert_eq!((own.used_bytes, own.evicted), (of_blocks(16), 40 * 8 - 16), "{own:?}");
    assert_eq!(edge.lookup(chain(39, 8), 0).blocks, 8, "the last ones are there");
    be(&mut edge, 2);
    assert_eq!(edge.lookup(chain(100, 20), 0).blocks, 20, "the other tenant lost nothing");
    assert!(stats.host.used_bytes < stats.host.capacity_bytes, "there was room for others");
}

#[test]
fn what_is_leased_or_pinned_does_not_leave_for_a_quota() {
    for pinned in [false, true] {
        let mut config = config(64, false);
        config.quotas = quotas(host(hard(16)), TierQuotas::default());
        let mut edge = Edge::new(config);
        turn(&mut edge, &chain(1, 16));
        let held = match pinned {
            true => {
                let prefix = PrefixQuery { namespace: NAMESPACE, keys: chain(1, 16) };
                matches!(
                    edge.ask(Request::Pin { prefix, ttl_ms: 1000 }),
                    Some(Reply::Pinned { .. })
                )
            }
            false => edge.lookup(chain(1, 16), 1000).lease.is_some(),
        };
        assert!(held);
        let ticket = edge.store(&chain(2, 4), 0);
        let refused = Outcome::Rejected(RejectReason::TenantQuota);
        assert_eq!(edge.outcomes(ticket), [refused; 4]);
        assert_eq!(edge.lookup(chain(1, 16), 0).blocks, 16);
        assert_eq!(edge.stats().owners[0].refused, 4);
        edge.catalog.check();
    }
}

#[test]
fn one_prompt_larger_than_the_quota_keeps_its_beginning() {
    let mut config = config(64, false);
    config.quotas = quotas(host(hard(10)), TierQuotas::default());
    let mut edge = Edge::new(config);
    for _ in 0..3 {
        turn(&mut edge, &chain(1, 24));
        assert_eq!(edge.lookup(chain(1, 24), 0).blocks, 10);
        edge.catalog.check();
    }
}

#[test]
fn who_is_over_the_soft_quota_loses_first() {
    let mut config = config(64, false);
    config.quotas = quotas(host(soft(16)), TierQuotas::default());
    let mut edge = with_two_tenants(config);
    be(&mut edge, 2);
    turn(&mut edge, &chain(100, 24));
    be(&mut edge, 1);
    // The first tenant's blocks are the more recent ones, but there are more of them than agreed.
    turn(&mut edge, &chain(1, 20));
    turn(&mut edge, &chain(2, 20));
    assert_eq!(edge.stats().owners[0].tiers[1].used_bytes, of_blocks(40), "room is not wasted");
    be(&mut edge, 2);
    turn(&mut edge, &chain(101, 20));
    assert_eq!(edge.lookup(chain(100, 24), 0).blocks, 24);
    let own = edge.stats().owners[0].tiers[1];
    assert_eq!((own.used_bytes, own.evicted), (of_blocks(20), 20), "{own:?}");
    // Who is below the soft quota is like all others.
    turn(&mut edge, &chain(102, 8));
    assert_eq!(edge.stats().owners[0].tiers[1].used_bytes, of_blocks(16));
    edge.catalog.check();
}

#[test]
fn nvme_holds_no_more_of_a_tenant_than_its_quota() {
    let mut config = config(16, true);
    let nvme = TierQuotas { nvme: hard(40), ..TierQuotas::default() };
    config.quotas = quotas(nvme, TierQuotas::default());
    let mut edge = Edge::new(config);
    for number in 0..60 {
        turn(&mut edge, &chain(number, 8));
        edge.event(Event::Tick);
        edge.catalog.check();
    }
    let stats = edge.stats();
    let own = &stats.owners[0].tiers[2];
    assert!(own.used_bytes > of_blocks(24) && own.evicted > 100, "{own:?}");
    assert!(edge.lookup(chain(59, 8), 0).blocks >= 7, "what was stored last is there");
}

#[test]
fn what_a_restart_finds_is_charged_and_brought_below_a_lower_quota() {
    let mut before = Edge::new(config(64, true));
    turn(&mut before, &chain(1, 40));
    before.ask(Request::Drain { deadline_ms: None });
    let found: Vec<(u32, Descriptor)> = (0..before.catalog.table.index_end())
        .filter(|index| before.catalog.table.live(*index).is_some())
        .map(|index| {
            (before.catalog.table.location(index).unwrap().index, before.catalog.descriptor(index))
        })
        .collect();
    let (segment, sequence) = (found[0].1.segment, found[0].1.segment_sequence);
    let mut found = found;
    found.sort_by_key(|(at, _)| *at);
    let mut config = config(64, true);
    let nvme = TierQuotas { nvme: hard(25), ..TierQuotas::default() };
    config.quotas = quotas(nvme, TierQuotas::default());
    let mut catalog = Catalog::new(config);
    catalog.recover(segment, sequence, &found);
    let info = *before.catalog.namespaces.get(&NAMESPACE).unwrap();
    catalog.apply(Timestamp(1), Event::Namespace(info));
    assert_eq!(catalog.quotas.uses()[0].tiers[2].used_bytes, of_blocks(40));
    catalog.apply(Timestamp(2), Event::Tick);
    assert_eq!(catalog.quotas.uses()[0].tiers[2].used_bytes, of_blocks(25));
    catalog.check_quotas();
}

/// Tokens of the unbounded conversation, and of one of its blocks.
const TOKENS: usize = 1_000_000;
const BLOCK_TOKENS: usize = 16;

fn for_one_conversation(rule: KeepRule, blocks: u64) -> Edge {
    let mut config = config(512, false);
    config.limits.keys_per_call = 1 << 20;
    config.quotas = quotas(TierQuotas::default(), host(hard(blocks)));
    let mut edge = Edge::new(config);
    let namespace = NAMESPACE;
    edge.ask(Request::Keep { namespace, conversation: edge.conversation, rule });
    edge
}

#[test]
fn an_unbounded_conversation_stays_within_its_quota_without_its_tail() {
    let mut edge = for_one_conversation(KeepRule::DropTail, 200);
    let all = chain(1, (TOKENS / BLOCK_TOKENS) as u32);
    let mut told = None;
    for end in (0..all.len()).step_by(250).skip(1).chain([all.len()]) {
        let (found, dropped) = turn(&mut edge, &all[..end]);
        told = told.or(dropped);
        let used = edge.catalog.quotas.used(NAMESPACE, Some(7), Tier::Host);
        assert!(used <= of_blocks(200), "{used}");
        assert!(end == 250 || found == 200, "the beginning stays: {found} at {end}");
    }
    edge.catalog.check();
    let told = told.expect("a lookup says what is not there");
    assert_eq!((told.rule, told.first), (KeepRule::DropTail, 200), "{told:?}");
    assert_eq!(edge.stats().owners[0].conversations, 1);
}

#[test]
fn an_unbounded_conversation_goes_on_with_its_system_prefix_and_its_last_turns() {
    let rule = KeepRule::KeepTurns { prefix_blocks: 8, turns: 3 };
    let mut edge = for_one_conversation(rule, 200);
    let turn_blocks = 20;
    let (mut epoch, mut turns, mut restarts) = (1, 0, 0u32);
    for _ in 0..TOKENS / BLOCK_TOKENS / turn_blocks {
        turns += 1;
        // The system prefix, and what followed it in this epoch.
        let path = |epoch: u32, turns: usize| -> Vec<BlockKey> {
            let rest = (0..turns * turn_blocks).map(|at| key(epoch, 1000 + at as u32));
            chain(0, 8).into_iter().chain(rest).collect()
        };
        let found = edge.lookup(path(epoch, turns), 0);
        if let Some(dropped) = found.dropped {
            // Told so, the client goes on with the prefix and the last turns alone.
            assert_eq!((dropped.rule, dropped.first, found.blocks), (rule, 8, 8), "{dropped:?}");
            (epoch, turns, restarts) = (epoch + 1, 3, restarts + 1);
        }
        turn(&mut edge, &path(epoch, turns));
        let used = edge.catalog.quotas.used(NAMESPACE, Some(7), Tier::Host);
        assert!(used <= of_blocks(200), "{used}");
        assert_eq!(edge.lookup(chain(0, 8), 0).blocks, 8, "the system prefix stays");
    }
    edge.catalog.check();
    assert!(restarts > 100, "{restarts}");
}

#[test]
fn a_conversation_does_not_lose_what_others_begin_with() {
    let mut config = config(128, false);
    config.quotas = quotas(TierQuotas::default(), host(hard(20)));
    let mut edge = Edge::new(config);
    let path = |number: u32, blocks: u32| -> Vec<BlockKey> {
        chain(0, 8).into_iter().chain((0..blocks).map(|at| key(number, 100 + at))).collect()
    };
    edge.conversation = 1;
    turn(&mut edge, &path(1, 12));
    edge.conversation = 2;
    turn(&mut edge, &path(2, 12));
    // The first conversation pays for the common blocks, the second only for its own.
    let used = |edge: &Edge, number| edge.catalog.quotas.used(NAMESPACE, Some(number), Tier::Host);
    assert_eq!((used(&edge, 1), used(&edge, 2)), (of_blocks(20), of_blocks(12)));
    edge.conversation = 1;
    for number in 10..20 {
        turn(&mut edge, &path(number, 12));
        edge.catalog.check();
    }
    assert_eq!(edge.lookup(path(2, 12), 0).blocks, 20, "the second conversation is whole");
}

#[test]
fn conversations_that_hold_nothing_are_remembered_in_a_bounded_number() {
    let mut config = config(64, false);
    config.quotas = quotas(TierQuotas::default(), host(hard(20)));
    let mut edge = Edge::new(config);
    let rule = KeepRule::KeepTurns { prefix_blocks: 1, turns: 2 };
    for conversation in 1..200_000u64 {
        edge.ask(Request::Keep { namespace: NAMESPACE, conversation, rule });
        edge.answers.clear();
    }
    assert!(edge.catalog.quotas.talks_known() <= 65_537);
}

/// A tenant whose chats come back beside one that stores without end. `quotas`: of that one.
fn hits_beside(config: CatalogConfig, quota: TierQuotas, chats: u32, storm: bool) -> (u64, u64) {
    let config = CatalogConfig { quotas: quotas(quota, TierQuotas::default()), ..config };
    let nvme = config.nvme.is_some();
    let mut edge = with_two_tenants(config);
    let (mut hits, mut asked, mut random) = (0, 0, 1u64);
    for step in 0..6000u32 {
        edge.now += 100_000;
        if storm {
            be(&mut edge, 1);
            turn(&mut edge, &chain(1_000_000 + step, 12));
        }
        be(&mut edge, 2);
        // Some chats are asked for far more often than others, each with a turn more every time.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
        let number = (random >> 33) as u32 % (chats * chats);
        let number = chats - 1 - (f64::from(number).sqrt() as u32).min(chats - 1);
        let keys = chain(number + step / 1500 * 1000, 4 + step % 1500 / 300);
        let (found, _) = turn(&mut edge, &keys);
        (hits, asked) = (hits + u64::from(found), asked + keys.len() as u64);
        if nvme {
            edge.event(Event::Tick);
        }
        if step % 500 == 0 {
            edge.catalog.check();
        }
    }
    edge.catalog.check();
    (hits, asked)
}

fn check_hits_beside(alone: (u64, u64), beside: (u64, u64), unlimited: (u64, u64)) {
    let ((alone, asked), (beside, _), (unlimited, _)) = (alone, beside, unlimited);
    println!("of {asked}: {alone} alone, {beside} beside one at its quota, {unlimited} without");
    assert!(alone > asked / 3, "there is something to lose: {alone} of {asked}");
    assert!(beside * 100 >= alone * 99, "alone {alone}, beside a tenant at its quota {beside}");
    assert!(unlimited * 100 < alone * 90, "without a quota it would: {unlimited}");
}

#[test]
fn a_tenant_at_its_hard_quota_does_not_lower_the_hits_of_another() {
    let none = TierQuotas::default();
    let alone = hits_beside(config(96, false), none, 40, false);
    let beside = hits_beside(config(128, false), host(hard(32)), 40, true);
    check_hits_beside(alone, beside, hits_beside(config(128, false), none, 40, true));
}

/// Segments are written one behind the other, whoever writes: a tenant that replaces its own blocks
/// there must not use up the room of others with what it has replaced.
#[test]
fn a_tenant_at_its_hard_quota_does_not_lower_the_hits_of_another_on_nvme() {
    // A segment has a page for its header, one for descriptors, and as many blocks as it can name.
    let (segment_bytes, in_segment) = (18 * BLOCK, 16);
    let sized = |host: u64, segments: u32| {
        let mut config = config(host, true);
        if let Some(nvme) = &mut config.nvme {
            nvme.geometry = StoreGeometry { segment_bytes, segments, descriptor_pages: 1 };
        }
        config
    };
    let none = TierQuotas::default();
    let quota = TierQuotas { host: hard(32), nvme: hard(16 * in_segment), ..none };
    let alone = hits_beside(sized(96, 48), none, 200, false);
    let beside = hits_beside(sized(128, 64), quota, 200, true);
    check_hits_beside(alone, beside, hits_beside(sized(128, 64), none, 200, true));
}

fn quota_of(blocks: Option<u64>, percent: u64) -> Quota {
    let hard = blocks.map(of_blocks);
    Quota { soft: hard.map(|hard| hard * percent / 100), hard }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever happens, each owner is charged for what is there, and nobody is over a hard quota.
    #[test]
    fn accounts_agree_with_the_table_and_quotas_hold(
        steps in steps(),
        nvme in any::<bool>(),
        gpus in 0usize..2,
        limits in prop::collection::vec(prop::option::of(1u64..30), 6),
        percent in 10u64..100,
        rules in prop::collection::vec(prop::option::of((0u32..4, 1u32..4)), 4),
    ) {
        let mut config = config(24, nvme);
        let of = |from: usize| TierQuotas {
            device: quota_of(limits[from], percent),
            host: quota_of(limits[from + 1], percent),
            nvme: quota_of(limits[from + 2], percent),
        };
        config.quotas = quotas(of(0), of(3));
        config.devices = vec![pool(8); gpus];
        config.limits.pin_ms_max = 1000;
        let mut edge = Edge::new(config);
        edge.event(Event::SessionClosed { session: edge.session() });
        edge.gpu = (gpus > 0).then_some(GpuId(0));
        edge.connect();
        for (conversation, rule) in (0..).zip(rules) {
            let rule = rule.map_or(KeepRule::DropTail, |(prefix_blocks, turns)| {
                KeepRule::KeepTurns { prefix_blocks, turns }
            });
            edge.ask(Request::Keep { namespace: NAMESPACE, conversation, rule });
        }
        let mut leases = vec![];
        for step in steps {
            edge.delay = true;
            if let Step::Store(number, _) = step {
                edge.conversation = u64::from(number % 4);
            }
            take_step(&mut edge, &mut leases, step);
            edge.catalog.check();
        }
        edge.fail = None;
        edge.delay = false;
        edge.event(Event::SessionClosed { session: edge.session() });
        edge.now += 100_000_000;
        edge.event(Event::Tick);
        edge.catalog.check();
        edge.ask(Request::Forget(Forget::Namespace { namespace: NAMESPACE }));
        edge.event(Event::Tick);
        let stats = edge.stats();
        let left = stats.owners.iter().flat_map(|each| &each.tiers);
        let left: u64 = left.map(|tier| tier.used_bytes).sum();
        prop_assert_eq!(left, 0);
        prop_assert_eq!(stats.owners[0].conversations, 0);
    }
}
