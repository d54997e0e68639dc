//! The pools of GPUs: promotion, demotion, eviction, loss.

use super::*;
use crate::catalog::{OwnerQuotas, Quota, TierQuotas};

/// A catalog with GPUs whose pools have so many blocks, and a client on the first one.
fn on_gpu(host_blocks: u64, pool_blocks: u64, gpus: usize) -> Edge {
    let mut config = config(host_blocks, true);
    config.devices = vec![pool(pool_blocks); gpus];
    let mut edge = Edge::new(config);
    edge.gpu = Some(GpuId(0));
    edge.connect();
    edge
}

#[test]
fn a_block_from_a_gpu_stays_there_and_is_copied_down() {
    let mut edge = on_gpu(64, 16, 1);
    let keys = chain(1, 10);
    let ticket = edge.store(&keys, 0);
    assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 10]);
    let stats = edge.stats();
    assert_eq!((stats.device[0].blocks, stats.host.blocks), (10, 10));
    let found = edge.lookup(keys.clone(), 1000);
    assert_eq!(found.runs, [Run { blocks: 10, tier: Tier::Device, state: RunState::Ready }]);
    let ticket = edge.load(&keys, found.lease.unwrap());
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Device); 10]);
    assert_eq!(edge.stats().device[0].hits, 10);
    edge.catalog.check();
}

#[test]
fn a_block_is_kept_on_its_way_up_once_it_was_hit_twice() {
    let mut edge = on_gpu(64, 16, 1);
    edge.gpu = None;
    edge.connect();
    let keys = chain(1, 4);
    edge.store(&keys, 0);
    edge.gpu = Some(GpuId(0));
    edge.connect();
    let mut tiers = vec![];
    for _ in 0..3 {
        let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
        let ticket = edge.load(&keys, lease);
        tiers.push(edge.outcomes(ticket)[0]);
    }
    let (host, device) = (Outcome::Loaded(Tier::Host), Outcome::Loaded(Tier::Device));
    assert_eq!(tiers, [host, host, device]);
    edge.catalog.check();
}

#[test]
fn what_lies_on_one_gpu_reaches_another_and_host_memory_by_way_of_host_ram() {
    for to in [Some(GpuId(1)), None] {
        let mut edge = on_gpu(64, 16, 2);
        let keys = chain(1, 4);
        edge.store(&keys, 0);
        // Nothing is left in host RAM: only the pool and nvme have it.
        edge.ask(Request::Drain { deadline_ms: None });
        edge.catalog.drain = None;
        for key in &keys {
            let index = edge.catalog.table.find(NAMESPACE, key).unwrap();
            edge.catalog.drop_host(index);
            edge.catalog.drop_nvme(index, false);
            edge.catalog.after_loss(index);
            assert!(edge.catalog.table.get(index).device_slot().is_some());
        }
        edge.gpu = to;
        edge.connect();
        let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
        let ticket = edge.load(&keys, lease);
        let outcomes = edge.outcomes(ticket);
        assert!(outcomes.iter().all(|o| matches!(o, Outcome::Loaded(_))), "{outcomes:?}");
        edge.catalog.check();
    }
}

#[test]
fn a_full_pool_drops_clean_copies_and_never_the_only_one() {
    let mut edge = on_gpu(200, 16, 1);
    for number in 0..8 {
        let ticket = edge.store(&chain(number, 8), 0);
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 8]);
        edge.catalog.check();
    }
    for number in 0..8 {
        assert_eq!(edge.lookup(chain(number, 8), 0).blocks, 8, "chain {number}");
    }
    assert_eq!(edge.stats().device[0].evicted, 48);
}

#[test]
fn a_lost_gpu_leaves_the_other_tiers_as_they_are() {
    let mut edge = on_gpu(64, 16, 1);
    let keys = chain(1, 8);
    edge.store(&keys, 0);
    edge.event(Event::DeviceLost { gpu: GpuId(0), reason: OfflineReason::DeviceGone });
    edge.catalog.check();
    assert_eq!(edge.stats().device[0].offline, Some(OfflineReason::DeviceGone));
    assert_eq!(edge.stats().device[0].used_bytes, 0);
    // Its regions are of no use any more; those in host memory are.
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    let ticket = edge.load(&keys, lease);
    assert_eq!(edge.outcomes(ticket), [Outcome::Missed(MissReason::Device); 8]);
    let ticket = edge.store(&chain(2, 2), 0);
    assert_eq!(edge.outcomes(ticket), [Outcome::Busy; 2]);
    edge.gpu = None;
    edge.connect();
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    let ticket = edge.load(&keys, lease);
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Host); 8]);
    edge.catalog.check();
}

#[test]
fn what_a_lost_gpu_may_still_be_doing_never_ends_and_holds_up_nothing_else() {
    let mut edge = on_gpu(64, 16, 1);
    edge.store(&chain(1, 4), 0);
    edge.delay = true;
    let ticket = edge.store(&chain(2, 4), 0);
    let lost = edge.waiting.len();
    edge.event(Event::DeviceLost { gpu: GpuId(0), reason: OfflineReason::DeviceStuck });
    edge.waiting.drain(..lost);
    edge.delay = false;
    edge.now += 40_000_000;
    edge.event(Event::Tick);
    assert!(!edge.ended.contains_key(&ticket.unwrap()), "the GPU may still read the region");
    assert_eq!(edge.stats().device[0].blocks, 4, "its slots are not used again");
    // A known block is not compared on a GPU that will not answer.
    let again = edge.store(&chain(1, 4), 0);
    assert_eq!(edge.outcomes(again), [Outcome::Busy; 4]);
    edge.ask(Request::Drain { deadline_ms: None });
    let drained = &edge.answers[&AskId(edge.next_ask)];
    assert!(matches!(drained, Reply::Drained(Drained { blocks_lost: 0, .. })), "{drained:?}");
    edge.catalog.check();
}

/// The waiter was forgotten when the copy in the pool made room for another block first.
#[test]
fn a_block_that_leaves_the_pool_while_somebody_waits_comes_from_nvme() {
    let mut edge = on_gpu(64, 16, 1);
    let keys = chain(1, 1);
    edge.store(&keys, 0);
    edge.ask(Request::Drain { deadline_ms: None });
    edge.catalog.drain = None;
    let index = edge.catalog.table.find(NAMESPACE, &keys[0]).unwrap();
    edge.catalog.drop_host(index);
    edge.gpu = None;
    edge.connect();
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    edge.catalog.devices[0].demotes = 64;
    let ticket = edge.load(&keys, lease);
    assert!(!edge.ended.contains_key(&ticket.unwrap()), "it waits for its turn");
    edge.catalog.drop_device(index);
    edge.catalog.devices[0].demotes = 0;
    edge.event(Event::Tick);
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Nvme)]);
    edge.catalog.check();
}

#[test]
fn bad_bytes_in_a_pool_are_dropped_and_the_copy_below_is_loaded() {
    let mut edge = on_gpu(64, 16, 1);
    let keys = chain(1, 1);
    edge.store(&keys, 0);
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    edge.delay = true;
    edge.fail = Some(OpError::Checksum);
    let ticket = edge.load(&keys, lease);
    edge.fail = None;
    edge.delay = false;
    edge.event(Event::Tick);
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Host)]);
    assert_eq!(edge.stats().corrupt, 1);
    edge.catalog.check();
}

/// Seen in a simulation with a write budget: what was not worth writing left host RAM, was copied
/// down again from the pool as that was its only copy, and was worth least there still.
#[test]
fn what_left_host_ram_is_not_copied_down_again_from_the_pool() {
    let mut config = config(16, true);
    config.devices = vec![pool(24)];
    config.nvme.as_mut().unwrap().write_bytes_per_day = Some(24);
    let mut edge = Edge::new(config);
    edge.gpu = Some(GpuId(0));
    edge.connect();
    let mut demotes = 0;
    for number in 0..12 {
        let keys = chain(number, 4);
        edge.delay = true;
        let ticket = edge.store(&keys, 0);
        for _ in 0..400 {
            let demote = |event: &Event| matches!(event, Event::Demoted { .. });
            demotes += usize::from(edge.waiting.front().is_some_and(demote));
            edge.complete(0);
        }
        assert!(edge.waiting.is_empty(), "copies go on and on");
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 4]);
        edge.catalog.check();
    }
    assert!(demotes <= 2 * 12 * 4, "{demotes} copies for {} blocks", 12 * 4);
}

/// Slots of host RAM are not spent on what is in a pool and on nvme; and what leaves the pool is in
/// host RAM then, not on nvme alone.
#[test]
fn host_ram_and_the_pool_hold_different_blocks() {
    let mut edge = on_gpu(8, 4, 1);
    edge.catalog.config.idle_ms = 1;
    let write = |edge: &mut Edge| {
        edge.now += 10_000;
        edge.event(Event::Tick);
        edge.catalog.check();
    };
    let in_tier = |edge: &mut Edge, number: u32, tier: Tier| {
        let runs = edge.lookup(chain(number, 4), 0).runs;
        runs.iter().filter(|run| run.tier == tier).map(|run| run.blocks).sum::<u32>()
    };
    let ticket = edge.store(&chain(1, 4), 0);
    assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 4]);
    write(&mut edge);
    edge.gpu = None;
    edge.connect();
    for number in [2, 3] {
        let ticket = edge.store(&chain(number, 4), 0);
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 4]);
        write(&mut edge);
    }
    assert_eq!(in_tier(&mut edge, 1, Tier::Device), 4);
    assert_eq!([2, 3].map(|number| in_tier(&mut edge, number, Tier::Host)), [4, 4]);
    edge.gpu = Some(GpuId(0));
    edge.connect();
    // Kept in the pool now, one by one as slots get free there.
    for _ in 0..6 {
        let lease = edge.lookup(chain(2, 4), 1000).lease.unwrap();
        let ticket = edge.load(&chain(2, 4), lease);
        assert!(edge.outcomes(ticket).iter().all(|each| matches!(each, Outcome::Loaded(_))));
        edge.ask(Request::Release { lease });
        edge.catalog.check();
    }
    assert_eq!(in_tier(&mut edge, 2, Tier::Device), 4);
    assert_eq!(in_tier(&mut edge, 1, Tier::Host), 4);
    edge.gpu = None;
    edge.connect();
    edge.store(&chain(4, 4), 0);
    let held = [1, 2, 4].map(|number| {
        (in_tier(&mut edge, number, Tier::Device), in_tier(&mut edge, number, Tier::Host))
    });
    assert_eq!(held, [(0, 4), (4, 0), (0, 4)]);
    assert_eq!(edge.stats().nvme.hits, 0);
}

/// The first chain fills the pool and is on nvme, and no more in host RAM. Completions wait.
fn in_pool_and_on_nvme() -> Edge {
    let mut edge = on_gpu(8, 4, 1);
    edge.catalog.config.idle_ms = 1;
    edge.store(&chain(1, 4), 0);
    edge.now += 10_000;
    edge.event(Event::Tick);
    for key in chain(1, 4) {
        let index = edge.catalog.table.find(NAMESPACE, &key).unwrap();
        edge.catalog.drop_host(index);
    }
    edge.delay = true;
    edge
}

/// A copy that could not be made as its block left the pool is read from nvme instead.
#[test]
fn what_could_not_be_copied_down_comes_from_nvme() {
    let mut edge = in_pool_and_on_nvme();
    edge.fail = Some(OpError::Device);
    edge.store(&chain(2, 4), 0);
    while edge.waiting.iter().any(|event| !matches!(event, Event::Demoted { .. })) {
        let at = edge.waiting.iter().position(|event| !matches!(event, Event::Demoted { .. }));
        edge.complete(at.unwrap());
    }
    assert!(!edge.waiting.is_empty(), "nothing is on its way down");
    edge.fail = None;
    edge.gpu = None;
    edge.connect();
    let lease = edge.lookup(chain(1, 4), 1000).lease.unwrap();
    let ticket = edge.load(&chain(1, 4), lease);
    while !edge.waiting.is_empty() {
        edge.complete(0);
    }
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Nvme); 4]);
    edge.catalog.check();
}

/// Blocks were on their way out of the pool when the GPU was lost: that copy may never end, and
/// nobody waits for it.
#[test]
fn nobody_waits_for_what_a_lost_gpu_was_copying_down() {
    let mut edge = in_pool_and_on_nvme();
    edge.store(&chain(2, 4), 0);
    edge.gpu = None;
    edge.connect();
    let lease = edge.lookup(chain(1, 4), 1000).lease.unwrap();
    let ticket = edge.load(&chain(1, 4), lease);
    edge.event(Event::DeviceLost { gpu: GpuId(0), reason: OfflineReason::DeviceStuck });
    edge.waiting.clear();
    assert_eq!(edge.outcomes(ticket), [Outcome::Missed(MissReason::Device); 4]);
    assert_eq!(edge.lookup(chain(1, 4), 1000).blocks, 0);
    edge.catalog.check();
}

/// A client on a GPU with a pool of 32 blocks; host RAM is full of 60 others.
fn above_a_full_host_ram() -> Edge {
    let mut edge = on_gpu(64, 32, 1);
    edge.gpu = None;
    edge.connect();
    edge.store(&chain(1, 60), 0);
    edge.gpu = Some(GpuId(0));
    edge.connect();
    edge
}

/// Host RAM had a copy of all that lay in a pool, and so less room for everything else.
#[test]
fn a_pool_shares_with_a_full_host_ram_only_what_leaves_it_next() {
    let mut edge = above_a_full_host_ram();
    let in_both = |edge: &Edge| {
        let table = &edge.catalog.table;
        let all = (0..table.index_end()).filter_map(|index| table.live(index));
        all.filter(|block| block.device_slot().is_some() && block.host_slot().is_some()).count()
    };
    for number in 10..40 {
        let ticket = edge.store(&chain(number, 4), 0);
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 4]);
        edge.catalog.check();
        let found = (10..=number).filter(|number| edge.lookup(chain(*number, 4), 0).blocks == 4);
        assert_eq!(found.count(), number as usize - 9, "what left the pool is below");
    }
    assert_eq!(edge.stats().device[0].blocks, 32);
    assert!(in_both(&edge) <= 16, "{} of 32 blocks are in host RAM too", in_both(&edge));
    edge.ask(Request::Drain { deadline_ms: None });
    let drained = &edge.answers[&AskId(edge.next_ask)];
    assert!(matches!(drained, Reply::Drained(Drained { blocks_lost: 0, .. })), "{drained:?}");
}

/// Nothing of what a tenant had in a pool could leave, since nothing of it was copied down, and
/// nothing was because no search for a victim came that far. Nor did a block leave of which others
/// follow that are elsewhere, though there was nothing else.
#[test]
fn a_tenant_at_its_quota_of_a_pool_goes_on_storing_there() {
    let mut config = config(64, true);
    config.devices = vec![pool(32)];
    let hard = Quota { hard: Some(8 * u64::from(BLOCK)), ..Quota::default() };
    let all = TierQuotas { device: hard, ..TierQuotas::default() };
    config.quotas = vec![(TenantId(1), OwnerQuotas { all, ..OwnerQuotas::default() })];
    let mut edge = Edge::new(config);
    edge.store(&chain(1, 60), 0);
    edge.gpu = Some(GpuId(0));
    edge.connect();
    for number in 10..30 {
        let ticket = edge.store(&chain(number, 4), 0);
        assert_eq!(edge.outcomes(ticket), [Outcome::Stored; 4]);
        edge.event(Event::Tick);
        edge.catalog.check();
    }
    let found = edge.lookup(chain(29, 4), 0);
    assert!(found.runs.iter().any(|run| run.tier == Tier::Device), "{found:?}");
    assert_eq!(edge.stats().device[0].blocks, 8);
}

/// A pool was full of blocks of one size, and those of another one never got a slab there.
#[test]
fn blocks_of_another_size_get_into_a_pool_that_is_full() {
    let mut edge = above_a_full_host_ram();
    for number in 10..18 {
        edge.store(&chain(number, 4), 0);
    }
    assert_eq!(edge.stats().device[0].blocks, 32);
    edge.connection += 1;
    let (session, region, gpu) = (edge.session(), edge.region_id(), Some(GpuId(0)));
    edge.event(Event::SessionOpened { session, tenant: edge.tenant });
    let block_bytes = 2 * BLOCK;
    edge.event(Event::RegionOpened { session, region, places: 64, block_bytes, gpu });
    let in_pool = (20..60).find(|number| {
        edge.store(&chain(*number, 2), 0);
        edge.event(Event::Tick);
        edge.catalog.check();
        let found = edge.lookup(chain(*number, 2), 0);
        found.runs.first().is_some_and(|run| run.tier == Tier::Device)
    });
    assert!(in_pool.is_some(), "{:?}", edge.stats().device);
}
