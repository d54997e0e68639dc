//! What leaves first, and what may be written to nvme.

use super::super::slot_tier::Home;
use super::*;

/// A request as engines make it: lookup with a lease, release, store of what was missing.
fn request(edge: &mut Edge, keys: &[BlockKey], hints: Hints) -> u32 {
    let prefix = PrefixQuery { namespace: NAMESPACE, keys: keys.to_vec() };
    let lookup = Request::Lookup { prefixes: vec![prefix], lease_ms: 1000, hints };
    let Some(Reply::Lookup(found)) = edge.ask(lookup) else { panic!("a lookup failed") };
    if let Some(lease) = found.lease {
        edge.ask(Request::Release { lease });
    }
    let rest: Vec<BlockKey> = keys.iter().skip(found.blocks as usize).copied().collect();
    if !rest.is_empty() {
        edge.store(keys, found.blocks as usize);
    }
    found.blocks
}

fn with_policy(policy: PolicyChoice) -> CatalogConfig {
    CatalogConfig { host_policy: policy, ..config(64, false) }
}

#[test]
fn what_returns_is_kept_and_what_never_does_leaves_first() {
    let mut hits = [0, 0];
    for (policy, hits) in [PolicyChoice::Lru, PolicyChoice::Pre].into_iter().zip(&mut hits) {
        let mut edge = Edge::new(with_policy(policy));
        // Short chats come back every 30 seconds, ever with one more block; long documents, enough
        // to flush everything in between, are read once.
        for turn in 0..1500u32 {
            edge.now += 3_000_000;
            let document = chain(100_000 + turn, 40);
            request(&mut edge, &document, Hints::default());
            let (chat, turns) = (turn % 10, turn / 10 % 4);
            let number = chat + turn / 40 * 100;
            *hits += request(&mut edge, &chain(number, 2 + turns), Hints::default());
            edge.catalog.check();
        }
    }
    let [lru, pre] = hits;
    assert!(pre > 1000 && pre > 3 * lru, "LRU {lru} hits, predicted reuse {pre}");
}

/// No block is there without those before it, as long as there is only host RAM.
#[test]
fn no_block_lies_behind_a_hole() {
    for policy in [PolicyChoice::Lru, PolicyChoice::Arc, PolicyChoice::Pre] {
        let mut edge = Edge::new(with_policy(policy));
        for step in 0..3000u32 {
            edge.now += 500_000;
            let number = step.wrapping_mul(2_654_435_761) >> 27;
            let length = 1 + step.wrapping_mul(40_503) % 13;
            let path: Vec<BlockKey> = chain(number % 3, 3 + number % 2)
                .into_iter()
                .chain((0..length).map(|at| key(number, 50 + at)))
                .collect();
            request(&mut edge, &path, Hints::default());
        }
        let table = &edge.catalog.table;
        for index in 0..table.index_end() {
            if let Some(block) = table.live(index) {
                assert!(block.is_ghost() || !block.orphan, "{policy:?}: a hole before {index}");
            }
        }
    }
}

#[test]
fn a_write_budget_is_never_exceeded_in_any_hour() {
    let per_day = 24 * 64 * u64::from(BLOCK);
    let mut config = config(40, true);
    if let Some(nvme) = &mut config.nvme {
        nvme.write_bytes_per_day = Some(per_day);
    }
    let mut edge = Edge::new(config);
    let mut written = vec![0];
    for minute in 0..240u32 {
        for part in 0..4 {
            edge.now += 15_000_000;
            edge.event(Event::Tick);
            request(&mut edge, &chain(minute * 4 + part, 3), Hints::default());
            edge.catalog.check();
        }
        written.push(edge.stats().nvme.bytes_in);
    }
    for (from, to) in written.iter().zip(&written[60..]) {
        assert!(to - from <= per_day / 24, "{} bytes in an hour", to - from);
    }
    let stats = edge.stats();
    assert!(stats.nvme.bytes_in > per_day / 24 * 2, "{} bytes in four hours", stats.nvme.bytes_in);
    assert!(stats.write_refused > 0 && stats.store_busy == 0);
}

/// Conversations that are continued once, after four seconds, until reuse is predicted from them.
fn warm_up(edge: &mut Edge) {
    for number in 0..400u32 {
        edge.now += 2_000_000;
        request(edge, &chain(1_000_000 + number, 3), Hints::default());
        request(edge, &chain(999_998 + number, 4), Hints::default());
    }
    edge.now += 1_000_000;
}

/// A path of 12 blocks, of which the first four belong to others too.
fn shared_path(number: u32) -> Vec<BlockKey> {
    chain(7, 4).into_iter().chain((0..8).map(|at| key(number, 100 + at))).collect()
}

/// The hint comes with the lookup, and what is stored afterwards says nothing.
#[test]
fn a_conversation_hinted_as_finished_leaves_before_an_open_one() {
    for warm in [false, true] {
        let mut edge = Edge::new(with_policy(PolicyChoice::Pre));
        if warm {
            warm_up(&mut edge);
        }
        // The open one is used first, so that it would leave first without hints.
        request(&mut edge, &shared_path(8), Hints::open());
        edge.now += 1_000_000;
        request(&mut edge, &shared_path(9), Hints::finished());
        edge.now += 1_000_000;
        // All that was there before has to leave for it, and six more blocks.
        let more = 44 + 6;
        request(&mut edge, &chain(50, more), Hints::default());
        edge.catalog.check();
        let [open, finished] = [8, 9].map(|number| edge.lookup(shared_path(number), 0).blocks);
        // Nothing of the open one goes before the other has lost all that only it uses.
        assert!(finished <= 6 && (open == 12 || finished == 4), "{warm}: {open}, {finished}");
        assert!(open > 10, "{warm}: {open}, {finished}");
        assert_eq!(edge.lookup(chain(50, more), 0).blocks, more);
    }
}

#[test]
fn what_is_hinted_as_finished_and_is_used_nevertheless_is_kept_like_the_rest() {
    let mut edge = Edge::new(with_policy(PolicyChoice::Pre));
    let (mut hits, mut asked) = (0, 0);
    for turn in 0..2000u32 {
        edge.now += 1_000_000;
        // Eight conversations of 5 blocks go on all the time and are said to be over.
        let found = request(&mut edge, &chain(turn % 8, 5), Hints::finished());
        if turn > 1000 {
            (hits, asked) = (hits + found, asked + 5);
        }
        request(&mut edge, &chain(100 + turn, 6), Hints::default());
    }
    assert!(hits * 10 > asked * 9, "{hits} of {asked}");
}

#[test]
fn a_dropped_conversation_goes_at_once_but_not_what_others_use() {
    for (policy, nvme) in [(PolicyChoice::Pre, false), (PolicyChoice::Lru, true)] {
        let mut edge = Edge::new(CatalogConfig { host_policy: policy, ..config(32, nvme) });
        for number in 8..=10 {
            request(&mut edge, &shared_path(number), Hints::default());
        }
        let prefix = PrefixQuery { namespace: NAMESPACE, keys: shared_path(10) };
        let lease = edge.lookup(shared_path(10), 1000).lease.unwrap();
        let touch = Request::Touch { prefix, hints: Hints::drop() };
        assert!(matches!(edge.ask(touch.clone()), Some(Reply::Count(0))), "it is leased");
        edge.ask(Request::Release { lease });
        assert!(matches!(edge.ask(touch.clone()), Some(Reply::Count(8))));
        assert!(matches!(edge.ask(touch), Some(Reply::Count(0))));
        edge.catalog.check();
        assert_eq!(edge.lookup(shared_path(10), 0).blocks, 4);
        assert_eq!(edge.lookup(shared_path(9), 0).blocks, 12);
    }
}

#[test]
fn what_is_retained_stays_for_its_time_and_within_its_limits() {
    let mut edge = Edge::new(with_policy(PolicyChoice::Pre));
    let flood = |edge: &mut Edge| {
        for number in 0..10 {
            request(edge, &chain(1000 + number, 20), Hints::default());
        }
    };
    let retain = |ms| Hints::default().retain(std::time::Duration::from_millis(ms));
    // A quarter of RAM may be retained: 16 blocks. Each turn replaces what the one before retained.
    for blocks in [6, 9, 12] {
        request(&mut edge, &chain(1, blocks), retain(5_000));
        let prefix = PrefixQuery { namespace: NAMESPACE, keys: chain(1, blocks) };
        edge.ask(Request::Touch { prefix, hints: retain(5_000) });
        assert_eq!(edge.catalog.clients.retained.len(), 1, "{blocks} blocks");
    }
    request(&mut edge, &chain(2, 20), Hints::default());
    let prefix = PrefixQuery { namespace: NAMESPACE, keys: chain(2, 20) };
    edge.ask(Request::Touch { prefix, hints: retain(5_000) });
    flood(&mut edge);
    edge.catalog.check();
    assert_eq!(edge.lookup(chain(1, 12), 0).blocks, 12);
    assert_eq!(edge.lookup(chain(2, 20), 0).blocks, 0, "it was more than may be retained");
    edge.now += 6_000_000;
    edge.event(Event::Tick);
    assert_eq!(edge.stats().pins, 0);
    flood(&mut edge);
    assert_eq!(edge.lookup(chain(1, 12), 0).blocks, 0);
    // Whoever says that it is over, or 0, retains no longer.
    for hints in [Hints::finished(), retain(0)] {
        request(&mut edge, &chain(3, 5), Hints::default());
        let prefix = PrefixQuery { namespace: NAMESPACE, keys: chain(3, 5) };
        edge.ask(Request::Touch { prefix: prefix.clone(), hints: retain(u64::MAX) });
        assert_eq!(edge.stats().pins, 1);
        edge.ask(Request::Touch { prefix, hints });
        assert_eq!(edge.stats().pins, 0);
    }
    assert!(edge.catalog.clients.retained.is_empty());
}

/// A search that finds nothing looks at each copy a few times at most, however many are pinned.
#[test]
fn a_search_past_pinned_copies_ends_when_all_were_seen() {
    use super::super::slot_tier::{Home, Leave, SlotTier, View};

    let (mut edge, blocks) = (Edge::new(config(1, false)), 10_000u32);
    let mut tier = SlotTier::new(u64::from(blocks * BLOCK), BLOCK, PolicyChoice::Pre);
    let class = tier.class_of(BLOCK).unwrap();
    for number in 0..blocks {
        let new = super::super::table::NewBlock {
            namespace: NAMESPACE,
            generation: 1,
            key: key(number, 0),
            parent: BlockKey::ROOT,
            position: 0,
            tokens: 16,
            raw_bytes: BLOCK,
        };
        let index = edge.catalog.table.find_or_insert(&new);
        let how = Use { queue: (number % 7) as u8, ..Use::default() };
        tier.allocate(class, index, u32::MAX, how).unwrap();
    }
    let (table, reuse) = (&edge.catalog.table, &edge.catalog.reuse);
    let view =
        View { table, reuse, home: Home::Host, now: 0, weigh_cost: false, unwritten_hold: true };
    for free in [None, Some(9_999), Some(5)] {
        let looks = std::cell::Cell::new(0);
        let victim = tier.victim(class, &view, |index| {
            looks.set(looks.get() + 1);
            if Some(index) == free { Leave::Yes } else { Leave::Pinned }
        });
        assert_eq!(victim, free);
        assert!(looks.get() <= 2 * blocks, "{} looks", looks.get());
    }
}

/// Half a path on nvme would be of no use: the budget for all of it is set aside with the verdict.
#[test]
fn what_a_budget_admits_is_written_from_the_root_on() {
    let mut config = config(40, true);
    if let Some(nvme) = &mut config.nvme {
        // An hour's share is 64 blocks, of which the bucket holds four.
        nvme.write_bytes_per_day = Some(24 * 64 * u64::from(BLOCK));
    }
    let mut edge = Edge::new(config);
    for number in 0..600u32 {
        edge.now += 20_000_000;
        edge.event(Event::Tick);
        request(&mut edge, &chain(number, 1 + number % 6), Hints::default());
        edge.catalog.check();
    }
    let table = &edge.catalog.table;
    let blocks = (0..table.index_end()).filter_map(|index| table.live(index));
    let on_nvme: Vec<_> = blocks.filter(|block| block.spot().is_some()).collect();
    let behind_holes = on_nvme.iter().filter(|block| block.orphan).count();
    assert!(on_nvme.len() > 100, "{} blocks on nvme", on_nvme.len());
    assert_eq!(behind_holes, 0, "of {} blocks", on_nvme.len());
}

/// Seen in a simulation: paths in host RAM ended in blocks that waited for a write, writes waited
/// for a clean segment, and the segments under reclaim for a slot for what was leased in them.
#[test]
fn what_is_clean_makes_room_though_what_follows_it_is_not() {
    let mut config = config(8, true);
    config.host_policy = PolicyChoice::Pre;
    config.clean_percent = 0;
    config.idle_ms = 1;
    let mut edge = Edge::new(config);
    let tick = |edge: &mut Edge| {
        edge.now += 10_000;
        edge.event(Event::Tick);
    };
    let (roots, other) = ([1, 2, 3].map(|number| chain(number, 2)), chain(4, 2));
    edge.store(&other, 0);
    tick(&mut edge);
    for keys in &roots {
        edge.store(&keys[..1], 0);
    }
    tick(&mut edge);
    assert_eq!(edge.stats().dirty_blocks, 0);
    // Everything else leaves host RAM, and the ends are written for ever.
    for key in &other {
        let index = edge.catalog.table.find(NAMESPACE, key).unwrap();
        edge.catalog.evict(Home::Host, index);
    }
    edge.delay = true;
    let all_but_writes = |edge: &mut Edge| {
        let written = |event: &Event| matches!(event, Event::Written { .. });
        while let Some(at) = edge.waiting.iter().position(|event| !written(event)) {
            edge.complete(at);
        }
    };
    for keys in &roots {
        edge.store(keys, 1);
        all_but_writes(&mut edge);
    }
    edge.store(&chain(5, 2), 0);
    all_but_writes(&mut edge);
    let stats = edge.stats();
    assert_eq!(stats.host.blocks, 8, "host RAM is full");
    assert_eq!(stats.dirty_blocks, 1, "besides four that are being written");
    let lease = edge.lookup(other.clone(), 1000).lease.unwrap();
    let ticket = edge.load(&other, lease).unwrap();
    all_but_writes(&mut edge);
    assert_eq!(edge.ended[&ticket], [Outcome::Loaded(Tier::Nvme); 2], "clean roots made room");
    edge.catalog.check();
}

/// Where a prompt ends within a block, the next turn stores that block anew, as another one. Such
/// ends were a sixteenth of all that was written on a trace of chats, and hardly ever read.
#[test]
fn the_cut_off_end_of_a_prompt_is_written_once_it_was_of_use() {
    let mut config = config(16, true);
    config.host_policy = PolicyChoice::Pre;
    config.clean_percent = 100;
    let mut edge = Edge::new(config);
    let keys = chain(1, 3);
    let ticket = edge.store_cut(&keys, 0, 5);
    assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 3]);
    let stats = edge.stats();
    assert_eq!((stats.nvme.blocks, stats.host.blocks, stats.dirty_blocks), (2, 3, 0));
    edge.lookup(keys, 1000);
    edge.event(Event::Tick);
    assert_eq!(edge.stats().nvme.blocks, 3);
    edge.store_cut(&chain(2, 3), 0, 5);
    assert_eq!(edge.stats().nvme.blocks, 5);
    edge.ask(Request::Drain { deadline_ms: None });
    assert_eq!(edge.stats().nvme.blocks, 6, "a drain leaves nothing behind");
    edge.catalog.check();
}

/// A copy on nvme of what is in host RAM takes the room of what is nowhere else.
#[test]
fn what_is_in_host_ram_is_written_early_as_long_as_nvme_has_room() {
    let mut config = config(128, true);
    config.idle_ms = 10;
    let mut edge = Edge::new(config);
    let pause = |edge: &mut Edge| {
        edge.now += 20_000;
        edge.event(Event::Tick);
        edge.stats()
    };
    edge.store(&chain(0, 8), 0);
    assert_eq!(pause(&mut edge).dirty_blocks, 0);
    let full = (1..100).find(|number| {
        edge.store(&chain(*number, 8), 0);
        pause(&mut edge).dirty_blocks > 0
    });
    let nvme = edge.stats().nvme;
    // Its descriptors are what limits it: 16 in each of 8 segments.
    assert!(full.is_some() && (104..=120).contains(&nvme.blocks), "{nvme:?}");
    edge.ask(Request::Forget(Forget::Keys { namespace: NAMESPACE, keys: chain(0, 1) }));
    edge.ask(Request::Forget(Forget::Keys { namespace: NAMESPACE, keys: chain(1, 1) }));
    assert_eq!(pause(&mut edge).dirty_blocks, 0, "there is room again");
    edge.catalog.check();
}
