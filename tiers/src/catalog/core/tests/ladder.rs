//! What each step of the degradation ladder does, with pressure made by what causes it.

use super::*;
use crate::catalog::ladder::{Signal, Step};

/// Ticks every 100 ms for so long.
fn pass(edge: &mut Edge, ms: u64) {
    for _ in 0..ms / 100 {
        edge.now += 100_000;
        edge.event(Event::Tick);
    }
}

/// Store tickets under way that no gather ends: all of the blocks that may be.
fn with_full_queues() -> Edge {
    let mut config = config(256, false);
    config.limits.blocks_in_flight = 60;
    config.limits.ticket_ms = 10_000_000;
    let mut edge = Edge::new(config);
    edge.store(&chain(1, 8), 0);
    edge.delay = true;
    edge.store(&chain(2, 60), 0);
    edge
}

#[test]
fn full_queues_lead_to_bypass_and_back() {
    let mut edge = with_full_queues();
    let prefetch = |edge: &mut Edge| {
        let prefix = PrefixQuery { namespace: NAMESPACE, keys: chain(1, 1) };
        edge.ask(Request::Prefetch { prefix, hints: Hints::default() })
    };
    pass(&mut edge, 2_500);
    assert_eq!(edge.stats().ladder.step, Step::NoPrefetch);
    assert!(matches!(prefetch(&mut edge), Some(Reply::Busy(Limit::Pressure))));
    assert_eq!(edge.lookup(chain(1, 8), 0).blocks, 8, "lookups go on");
    pass(&mut edge, 10_000);
    let report = edge.stats().ladder;
    assert_eq!(
        (report.step, report.why, report.pressure.queues),
        (Step::Bypass, Signal::Queues, 100)
    );
    assert_eq!(edge.lookup(chain(1, 8), 0).blocks, 0, "nothing is found");
    assert!(edge.store(&chain(3, 1), 0).is_none(), "nothing is stored");
    edge.delay = false;
    edge.event(Event::Tick);
    pass(&mut edge, 60_000);
    let report = edge.stats().ladder;
    assert_eq!((report.step, report.raised, report.lowered), (Step::Normal, 5, 5));
    assert_eq!(edge.lookup(chain(1, 8), 0).blocks, 8, "what is there is found again");
    edge.catalog.check();
}

#[test]
fn a_drive_that_answers_late_is_not_given_what_nobody_asked_for() {
    let mut edge = late_drive();
    pass(&mut edge, 12_000);
    let report = edge.stats().ladder;
    assert_eq!((report.step, report.why), (Step::NoColdSpill, Signal::Nvme), "{report:?}");
    let before = edge.stats();
    edge.store(&chain(50, 8), 0);
    while let Some(at) = edge.waiting.iter().position(|e| matches!(e, Event::Gathered { .. })) {
        edge.complete(at);
    }
    pass(&mut edge, 500);
    let stats = edge.stats();
    assert!(stats.not_spilled_bytes > before.not_spilled_bytes, "{stats:?}");
    edge.catalog.check();
}

/// A drive with a write under way that does not end, and no more dirty blocks than usual.
fn late_drive() -> Edge {
    let mut config = config(64, true);
    config.limits.device_ms = 60_000;
    let mut edge = Edge::new(config);
    edge.delay = true;
    for number in 0..13 {
        edge.store(&chain(number, 4), 0);
        while let Some(at) = edge.waiting.iter().position(|e| matches!(e, Event::Gathered { .. })) {
            edge.complete(at);
        }
    }
    assert!(edge.waiting.iter().any(|event| matches!(event, Event::Written { .. })));
    edge
}

#[test]
fn ram_full_of_what_cannot_leave_drops_the_ends_of_cold_paths_and_keeps_shared_prefixes() {
    let mut config = config(64, true);
    config.limits.device_ms = 1_000_000;
    let mut edge = Edge::new(config);
    // A prefix that many use, each with an end of its own. The drive ends no write.
    let path = |number: u32| -> Vec<BlockKey> {
        chain(0, 8).into_iter().chain((0..4).map(|at| key(number, 100 + at))).collect()
    };
    edge.delay = true;
    for number in 1..=14 {
        let found = edge.lookup(path(number), 1000);
        edge.store(&path(number), found.blocks as usize);
        while let Some(at) = edge.waiting.iter().position(|e| matches!(e, Event::Gathered { .. })) {
            edge.complete(at);
        }
        if let Some(lease) = found.lease {
            edge.ask(Request::Release { lease });
        }
        // Each is asked for once more, so that none is cold.
        if let Some(lease) = edge.lookup(path(number), 1000).lease {
            edge.ask(Request::Release { lease });
        }
    }
    assert!(edge.stats().ladder.pressure.occupancy == 0, "nothing was measured yet");
    pass(&mut edge, 20_000);
    let stats = edge.stats();
    assert!(stats.ladder.raised >= 3, "{:?}", stats.ladder);
    assert!(stats.dropped_under_pressure > 0, "{stats:?}");
    assert!(stats.host.blocks > 40, "no more than needed is dropped: {stats:?}");
    assert_eq!(edge.lookup(chain(0, 8), 0).blocks, 8, "the shared prefix is there");
    edge.catalog.check();
}
