//! Which segments are reclaimed, and what of them is kept.

use super::*;

/// Blocks of a set, in four chains that are stored side by side.
const CHAINS: u32 = 4;
const CHAIN: u32 = 32;

/// A store of four sets, and host RAM for a quarter of one.
fn small_segments() -> CatalogConfig {
    let mut config = config(32, true);
    let nvme = config.nvme.as_mut().unwrap();
    nvme.geometry = StoreGeometry { segment_bytes: 10 * BLOCK, segments: 64, descriptor_pages: 1 };
    nvme.clean_segments = 4;
    config
}

/// Stores one block, again and again while there is no room, with completions in any order.
fn store_one(edge: &mut Edge, keys: &[BlockKey], at: usize, picks: &mut impl FnMut() -> usize) {
    loop {
        let ticket = edge.store(&keys[..=at], at);
        let ticket = ticket.expect("a ticket");
        while !edge.ended.contains_key(&ticket) {
            edge.complete(picks());
        }
        match edge.ended[&ticket][..] {
            [Outcome::Stored] => return,
            [Outcome::Busy] => edge.complete(picks()),
            ref other => panic!("{other:?}"),
        }
    }
}

/// Seen with a slow drive: a segment held little but blocks whose chain had lost its root, and was
/// reclaimed out of turn, with the roots of new chains that were in it too. All that followed those
/// could not be reached any more, so that its segments were next: a set that had just been stored
/// was gone.
#[test]
fn a_segment_reclaimed_out_of_turn_keeps_what_can_be_reached() {
    let mut edge = Edge::new(small_segments());
    edge.catalog.config.clean_percent = 100;
    let write = |edge: &mut Edge, keys: &[BlockKey], from: usize| {
        let ticket = edge.store(keys, from);
        assert!(edge.outcomes(ticket).iter().all(|each| *each == Outcome::Stored));
        assert_eq!(edge.stats().dirty_blocks, 0, "it is written at once");
    };
    let [rootless, old, new] = [1, 2, 3].map(|number| chain(number, 8));
    write(&mut edge, &rootless[..1], 0);
    write(&mut edge, &chain(4, 7), 0);
    write(&mut edge, &old, 0);
    write(&mut edge, &rootless, 1);
    write(&mut edge, &new[..1], 0);
    write(&mut edge, &new, 1);
    let mut lost = 0;
    for number in 10..240 {
        write(&mut edge, &chain(number, 8), 0);
        edge.catalog.check();
        lost += u32::from(edge.lookup(rootless.clone(), 0).blocks == 0);
        if edge.lookup(old.clone(), 0).blocks == 8 {
            assert_eq!(edge.lookup(new.clone(), 0).blocks, 8, "what is newer is there as well");
        }
    }
    assert!(lost > 0, "nothing was reclaimed");
    assert_eq!(edge.lookup(old, 0).blocks, 0, "the oldest go in the end");
}

/// What was stored last is whole, however late the drive is.
#[test]
fn the_newest_set_is_there() {
    for seed in 0..20u64 {
        let mut edge = Edge::new(small_segments());
        edge.delay = true;
        let mut state = seed;
        let mut picks = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % 4
        };
        for set in 0..12 {
            let chains: Vec<_> = (0..CHAINS).map(|one| chain(set * CHAINS + one, CHAIN)).collect();
            for at in 0..CHAIN as usize {
                for keys in &chains {
                    store_one(&mut edge, keys, at, &mut picks);
                }
            }
            while !edge.waiting.is_empty() {
                edge.complete(0);
            }
            for keys in &chains {
                let found = edge.lookup(keys.clone(), 1000);
                assert_eq!(found.blocks, CHAIN, "set {set}, the newest, with seed {seed}");
                let ticket = edge.load(keys, found.lease.unwrap()).unwrap();
                while !edge.ended.contains_key(&ticket) {
                    edge.complete(0);
                }
                edge.ask(Request::Release { lease: found.lease.unwrap() });
            }
            edge.catalog.check();
        }
    }
}

/// Seen with a million blocks in host RAM and on nvme: dirty blocks were left there, below the
/// watermark, until the coldest 4,096 were all dirty. No search saw a clean block behind them, and
/// stores found no room though most of host RAM was clean. And while one had found none, segments
/// were reclaimed whose blocks became dirty in host RAM and were written again, without end.
#[test]
fn dirty_blocks_do_not_hide_the_clean_ones() {
    const CHAIN: u32 = 60;
    let mut config = config(6_000, true);
    config.idle_ms = 10;
    let nvme = config.nvme.as_mut().unwrap();
    nvme.geometry = StoreGeometry { segment_bytes: 1 << 20, segments: 64, descriptor_pages: 4 };
    let mut edge = Edge::new(config);
    let store = |edge: &mut Edge, number: u32| {
        let ticket = edge.store(&chain(number, CHAIN), 0);
        edge.outcomes(ticket).iter().filter(|outcome| **outcome != Outcome::Stored).count()
    };
    let stored: usize = (0..25).map(|number| store(&mut edge, number)).sum();
    edge.now += 1_000_000;
    edge.event(Event::Tick);
    assert_eq!((stored, edge.stats().dirty_blocks), (0, 0));
    // Trickling has to do with time.
    edge.catalog.config.idle_ms = 0;
    let dirty: usize = (100..173).map(|number| store(&mut edge, number)).sum();
    for number in 0..25 {
        assert_eq!(edge.lookup(chain(number, CHAIN), 1).blocks, CHAIN);
    }
    edge.now += 1_000_000;
    edge.event(Event::Tick);
    assert_eq!((dirty, edge.stats().dirty_blocks), (0, 4_380));
    let refused: usize = (200..220).map(|number| store(&mut edge, number)).sum();
    assert!(refused <= CHAIN as usize, "{refused} blocks of 1,200 found no room");
    assert!(edge.writes < 20_000, "{} writes", edge.writes);
    edge.catalog.check();
}

/// Host RAM is full of blocks of one size, half of them dirty. A block of another size needs a slab
/// of theirs, which has to be written first; no search for a block of its own size passes over
/// them.
#[test]
fn blocks_of_another_size_are_written_for_a_slab() {
    let mut edge = Edge::new(config(16, true));
    edge.catalog.config.idle_ms = 10;
    let small = |edge: &mut Edge, number: u32| {
        let ticket = edge.store(&chain(number, 8), 0);
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 8]);
    };
    small(&mut edge, 1);
    edge.now += 1_000_000;
    edge.event(Event::Tick);
    edge.catalog.config.idle_ms = 0;
    small(&mut edge, 2);
    for key in chain(1, 8) {
        let index = edge.catalog.table.find(NAMESPACE, &key).unwrap();
        edge.catalog.touch(index);
    }
    assert_eq!(edge.stats().dirty_blocks, 8);
    edge.connection += 1;
    let (session, region) = (edge.session(), edge.region_id());
    edge.event(Event::SessionOpened { session, tenant: edge.tenant });
    let block_bytes = 2 * BLOCK;
    edge.event(Event::RegionOpened { session, region, places: 64, block_bytes, gpu: None });
    for attempt in 0..2 {
        let ticket = edge.store(&chain(3, 2), 0);
        match edge.outcomes(ticket) {
            [Outcome::Stored, Outcome::Stored] => return,
            other => assert_eq!(attempt, 0, "{other:?}"),
        }
    }
    panic!("no slab was emptied");
}
