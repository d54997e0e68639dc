//! What the simulation found, each made small.

use std::cell::Cell;

use super::super::slot_tier::{Home, Leave, View};
use super::super::table::GHOSTS_MIN;
use super::*;
use crate::block::Descriptor;

/// Loads waited for a slot; then somebody asked for a prefetch of the same blocks, and as there was
/// no room for it, the loads were told that there is none, although they could wait.
#[test]
fn a_prefetch_that_finds_no_room_does_not_end_the_loads_that_wait() {
    let mut edge = Edge::new(config(16, true));
    let keys = chain(0, 4);
    edge.store(&keys, 0);
    edge.ask(Request::Drain { deadline_ms: None });
    edge.catalog.drain = None;
    for key in &keys {
        let index = edge.catalog.table.find(NAMESPACE, key).unwrap();
        edge.catalog.drop_host(index);
    }
    // All of host RAM is being filled, and stays so.
    edge.delay = true;
    edge.store(&chain(1, 16), 0);
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    let ticket = edge.load(&keys, lease);
    let prefix = PrefixQuery { namespace: NAMESPACE, keys: keys.clone() };
    let reply = edge.ask(Request::Prefetch { prefix, hints: Hints::default() });
    let Some(Reply::Ticket(prefetch)) = reply else { panic!("{reply:?}") };
    edge.event(Event::Tick);
    assert_eq!(edge.outcomes(Some(prefetch)), [Outcome::Missed(MissReason::NoRoom); 4]);
    assert!(!edge.ended.contains_key(&ticket.unwrap()), "the load waits on");
    edge.delay = false;
    edge.event(Event::Tick);
    assert_eq!(edge.outcomes(ticket), [Outcome::Loaded(Tier::Nvme); 4]);
    edge.catalog.check();
}

/// One load found bad bytes in a slot that another one still read; every load from then on was told
/// that the block is in no tier, although nvme has it.
#[test]
fn a_bad_slot_that_is_still_read_hides_no_copy_on_nvme() {
    let mut edge = Edge::new(config(40, true));
    let keys = chain(0, 1);
    edge.store(&keys, 0);
    edge.ask(Request::Drain { deadline_ms: None });
    edge.catalog.drain = None;
    let lease = edge.lookup(keys.clone(), 1000).lease.unwrap();
    edge.delay = true;
    let tickets = [edge.load(&keys, lease), edge.load(&keys, lease)];
    let Some(Event::Scattered { op, .. }) = edge.waiting.pop_back() else { panic!("no scatter") };
    edge.apply(Event::Scattered { op, result: Err(OpError::Checksum) });
    let third = edge.load(&keys, lease);
    edge.delay = false;
    edge.event(Event::Tick);
    assert_eq!(edge.outcomes(tickets[0]), [Outcome::Loaded(Tier::Host)]);
    assert_eq!(edge.outcomes(tickets[1]), [Outcome::Loaded(Tier::Nvme)]);
    assert_eq!(edge.outcomes(third), [Outcome::Loaded(Tier::Nvme)]);
    edge.catalog.check();
}

/// A search for a victim looked at four thousand blocks of a tier that had eight, as often as it
/// could be repeated, so that an event took a tenth of a second once all of them were pinned.
#[test]
fn a_small_tier_that_is_all_pinned_is_searched_once() {
    for policy in PolicyChoice::ALL {
        let mut config = config(8, false);
        config.host_policy = policy;
        let mut edge = Edge::new(config);
        edge.store(&chain(1, 8), 0);
        let looks = Cell::new(0);
        let Catalog { host, table, reuse, .. } = &mut edge.catalog;
        let view = View {
            table,
            reuse,
            home: Home::Host,
            now: 0,
            weigh_cost: false,
            unwritten_hold: true,
        };
        let pinned = |_| {
            looks.set(looks.get() + 1);
            Leave::Pinned
        };
        assert_eq!(host.tier.victim(0, &view, pinned), None);
        assert!((8..=16).contains(&looks.get()), "{policy:?}: {} looks", looks.get());
    }
}

/// A restart recovers a path from its end on, so each of its blocks was noted as missing before it
/// was found. All these counted as ghosts, and so the one block that really was missing went as a
/// surplus one, with all that follows it, from nvme too.
#[test]
fn what_a_restart_finds_behind_a_missing_block_stays() {
    let mut before = Edge::new(config(64, true));
    before.store(&chain(1, 1), 0);
    before.ask(Request::Drain { deadline_ms: None });
    let stored = before.catalog.table.find(NAMESPACE, &key(1, 0)).unwrap();
    let one = before.catalog.descriptor(stored);
    let at = |chain, position| {
        let (key, parent) = (key(chain, position), key(chain, position - 1));
        Descriptor { key, parent, position, ..one }
    };
    let long = (1..4 * GHOSTS_MIN as u32).rev().map(|position| at(2, position));
    let found: Vec<_> = (0..).zip(std::iter::once(at(1, 1)).chain(long)).collect();
    let mut catalog = Catalog::new(config(64, true));
    catalog.recover(one.segment, one.segment_sequence, &found);
    let info = *before.catalog.namespaces.get(&NAMESPACE).unwrap();
    catalog.apply(Timestamp(0), Event::Namespace(info));
    for tick in 1..=10 {
        catalog.apply(Timestamp(tick), Event::Tick);
    }
    let on_nvme = catalog.stats().nvme.blocks;
    assert_eq!(on_nvme, found.len() as u64);
    catalog.check();
}
