//! Loads that are worth it and loads that are not, through the whole catalog, with time that the
//! test makes pass.

use super::super::advice::*;
use super::*;

/// Tokens of a block in these tests.
const TOKENS: u64 = 16;

/// A catalog over a drive of which a read takes `read_us`.
struct Bench {
    edge: Edge,
    read_us: u64,
}

impl Bench {
    fn new(arbiter: ArbiterConfig) -> Bench {
        let mut config = CatalogConfig { arbiter, ..config(16, true) };
        if let Some(nvme) = &mut config.nvme {
            // Room for all that is pushed through, so that nothing is reclaimed.
            nvme.geometry =
                StoreGeometry { segment_bytes: 16 << 20, segments: 8, descriptor_pages: 256 };
        }
        let mut edge = Edge::new(config);
        edge.delay = true;
        Bench { edge, read_us: 1000 }
    }

    /// Lets everything under way end, of which each read takes its time.
    fn settle(&mut self) {
        while let Some(event) = self.edge.waiting.pop_front() {
            if matches!(event, Event::Read { .. }) {
                self.edge.now += self.read_us;
            }
            self.edge.event(event);
        }
    }

    /// An engine that takes so long for a token reports some prefills.
    fn report(&mut self, us_per_token: u64) {
        for (tokens, context) in [(64, 0), (128, 256), (512, 0), (256, 512)] {
            let took_us = us_per_token * u64::from(tokens);
            self.report_one(tokens, context, took_us);
        }
    }

    fn report_one(&mut self, tokens: u32, context: u32, took_us: u64) -> bool {
        let namespace = NAMESPACE;
        let report = PrefillReport { namespace, tokens, context, took_us, grant: None };
        match self.edge.ask(Request::ReportPrefill(report)) {
            Some(Reply::Count(count)) => count > 0,
            other => panic!("{other:?}"),
        }
    }

    /// Stores so many blocks and pushes them out of RAM.
    fn on_nvme(&mut self, number: u32, blocks: u32) -> Vec<BlockKey> {
        let keys = chain(number, blocks);
        self.edge.store(&keys, 0);
        self.settle();
        for filler in 0..8 {
            self.edge.store(&chain(1000 + number * 8 + filler, 8), 0);
            self.settle();
        }
        let found = self.edge.lookup(keys.clone(), 0);
        assert!(found.runs.iter().all(|run| run.tier == Tier::Nvme), "{found:?}");
        keys
    }

    /// Looks up, loads what is advised, and pushes it out of RAM again.
    fn turn(&mut self, keys: &[BlockKey], number: u32) -> LookupReply {
        let found = self.edge.lookup(keys.to_vec(), 60_000);
        if let Some(lease) = found.lease {
            if found.advice.load > 0 {
                let ticket = self.edge.load(&keys[..found.advice.load as usize], lease);
                self.settle();
                let good = |outcome: &Outcome| matches!(outcome, Outcome::Loaded(_));
                assert!(self.edge.outcomes(ticket).iter().all(good));
            }
            self.edge.ask(Request::Release { lease });
        }
        self.push_out(number);
        found
    }

    /// As a turn, but the client is gone before anything has come.
    fn go_away(&mut self, keys: &[BlockKey], number: u32) {
        let lease = self.edge.lookup(keys.to_vec(), 60_000).lease.unwrap();
        self.edge.load(keys, lease);
        self.edge.now += keys.len() as u64 * self.read_us;
        let session = self.edge.session();
        self.edge.event(Event::SessionClosed { session });
        self.settle();
        self.edge.connect();
        self.push_out(number);
    }

    /// As a turn, but the engine gives up before anything has come.
    fn give_up(&mut self, keys: &[BlockKey], number: u32) {
        let lease = self.edge.lookup(keys.to_vec(), 60_000).lease.unwrap();
        let ticket = self.edge.load(keys, lease);
        self.edge.ask(Request::Release { lease });
        self.settle();
        let missed = |outcome: &Outcome| *outcome == Outcome::Missed(MissReason::LeaseExpired);
        assert!(self.edge.outcomes(ticket).iter().all(missed));
        self.push_out(number);
    }

    fn push_out(&mut self, number: u32) {
        self.edge.now += 50_000;
        for filler in 0..4 {
            self.edge.store(&chain(100_000 + number * 4 + filler, 8), 0);
            self.settle();
        }
        self.edge.catalog.check();
    }

    fn worth(&mut self, tier: Tier) -> TierWorth {
        let stats = self.edge.stats();
        *stats.worth.iter().find(|row| row.tier == tier).unwrap()
    }
}

#[test]
fn with_nothing_known_everything_is_to_be_loaded() {
    let mut bench = Bench::new(ArbiterConfig::default());
    let keys = bench.on_nvme(1, 8);
    bench.read_us = 1_000_000;
    for number in 0..8 {
        let found = bench.turn(&keys, number);
        assert_eq!((found.blocks, found.advice), (8, Advice::load_all(8)));
    }
    assert_eq!(bench.worth(Tier::Nvme).loads, 0);
}

#[test]
fn odd_reports_are_not_learned_from() {
    let mut bench = Bench::new(ArbiterConfig::default());
    for (tokens, context, took_us) in [
        (0, 0, 1000),
        (8, 0, 1000),
        (64, 0, 0),
        (1 << 20, 0, 1),
        (64, u32::MAX, 1000),
        (u32::MAX, 0, 1_000_000),
        (64, 0, u64::MAX),
        (64, 0, 1_000_000_000),
    ] {
        assert!(!bench.report_one(tokens, context, took_us), "{tokens} {context} {took_us}");
    }
    let stats = bench.edge.stats().prefill;
    assert_eq!((stats.reports, stats.reports_unused, stats.namespaces_known), (0, 8, 0));
    bench.report(10);
    let stats = bench.edge.stats().prefill;
    assert_eq!((stats.reports, stats.namespaces_known), (4, 1));
}

#[test]
fn a_lookup_says_what_loading_and_computing_take() {
    let mut bench = Bench::new(ArbiterConfig::default());
    let keys = bench.on_nvme(1, 8);
    // A token takes 1 ms, a block 16 ms, and to read one 1 ms.
    bench.report(1000);
    for number in 0..8 {
        bench.turn(&keys[..4 + number as usize % 5], number);
    }
    let found = bench.turn(&keys, 9);
    let advice = found.advice;
    assert_eq!((advice.load, advice.withheld), (8, 0));
    assert_eq!(advice.compute_us, Some(0));
    let close = |us: Option<u64>, real: u64| us.unwrap().abs_diff(real) <= real / 10;
    assert!(close(advice.compute_all_us, 8 * TOKENS * 1000), "{advice:?}");
    assert!(close(advice.load_us, 8000), "{advice:?}");
    let worth = bench.worth(Tier::Nvme);
    assert_eq!((worth.loads, worth.lost_us), (9, 0));
    assert!(worth.saved_us > 8 * 60_000, "{worth:?}");
    let rate = u64::from(BLOCK) * 1000;
    assert!(worth.bytes_per_second.abs_diff(rate) < rate / 10, "{worth:?}");
}

#[test]
fn a_drive_that_becomes_slow_is_withheld_then_tried_and_offered_again() {
    let config = ArbiterConfig { window_ms: 2000, probe_every: 4, ..ArbiterConfig::default() };
    let mut bench = Bench::new(config);
    let keys = bench.on_nvme(1, 8);
    bench.report(1000);
    for number in 0..6 {
        assert_eq!(bench.turn(&keys, number).advice.load, 8);
    }
    let healthy = bench.worth(Tier::Nvme);
    assert!(healthy.saved_us > 0 && healthy.lost_us == 0, "{healthy:?}");
    // A block takes 16 ms to compute and now 100 ms to read.
    bench.read_us = 100_000;
    let began = bench.edge.now;
    let mut number = 6;
    while bench.worth(Tier::Nvme).namespaces_withheld == 0 {
        bench.turn(&keys, number);
        number += 1;
        assert!(number < 100, "{:?}", bench.worth(Tier::Nvme));
    }
    assert!(bench.edge.now - began < 60_000_000, "within a minute");
    let row = bench.edge.stats().withheld[0];
    assert_eq!((row.namespace, row.tier, row.probes_net_us), (NAMESPACE, Tier::Nvme, None));
    // The run ends before it, and its blocks stay.
    let found = bench.edge.lookup(keys.clone(), 0);
    assert_eq!((found.blocks, found.advice.withheld), (0, 8));
    let (mut tried, mut not) = (0, 0);
    for at in 0..16 {
        let found = bench.turn(&keys, number + at);
        assert!(found.blocks == 0 || found.advice.load == 8, "{found:?}");
        if found.blocks > 0 { tried += 1 } else { not += 1 }
    }
    assert_eq!((tried, not), (4, 12), "one in four is tried");
    let row = bench.edge.stats().withheld[0];
    assert!(row.probes_net_us.unwrap() < 0, "{row:?}");
    // It is well again.
    bench.read_us = 1000;
    number += 16;
    let began = number;
    while bench.worth(Tier::Nvme).namespaces_withheld > 0 {
        bench.turn(&keys, number);
        number += 1;
        assert!(number - began <= 4 * 4, "{:?}", bench.edge.stats().withheld);
    }
    for at in 0..8 {
        let found = bench.turn(&keys, number + at);
        assert_eq!((found.blocks, found.advice.load), (8, 8), "{found:?}");
    }
    let worth = bench.worth(Tier::Nvme);
    assert!(worth.saved_us > healthy.saved_us && worth.lost_us > 0, "{worth:?}");
}

#[test]
fn loads_that_take_longer_than_the_window_are_judged_all_the_same() {
    let config = ArbiterConfig { window_ms: 500, probe_every: 1000, ..ArbiterConfig::default() };
    let mut bench = Bench::new(config);
    let keys = bench.on_nvme(1, 8);
    bench.report(1000);
    for number in 0..3 {
        bench.turn(&keys, number);
    }
    bench.read_us = 300_000;
    let slow = (3..20).take_while(|number| {
        bench.turn(&keys, *number);
        bench.worth(Tier::Nvme).namespaces_withheld == 0
    });
    assert!(slow.count() < 4, "{:?}", bench.worth(Tier::Nvme));
}

#[test]
fn a_load_that_was_given_up_counts_against_a_slow_tier_and_not_for_one_that_is_well() {
    for end in [Bench::give_up, Bench::go_away] {
        let mut bench = Bench::new(ArbiterConfig::default());
        let keys = bench.on_nvme(1, 8);
        bench.report(1000);
        for number in 0..4 {
            end(&mut bench, &keys, number);
        }
        let well = bench.worth(Tier::Nvme);
        assert_eq!((well.loads, well.saved_us, well.lost_us), (0, 0, 0));
        bench.read_us = 100_000;
        let slow = (4..20).take_while(|number| {
            end(&mut bench, &keys, *number);
            bench.worth(Tier::Nvme).namespaces_withheld == 0
        });
        assert!(slow.count() < 4, "{:?}", bench.worth(Tier::Nvme));
        assert!(bench.worth(Tier::Nvme).lost_us > 0);
    }
}

#[test]
fn only_the_namespace_that_loses_is_not_offered_the_tier() {
    let mut bench = Bench::new(ArbiterConfig::default());
    let keys = bench.on_nvme(1, 8);
    // An engine that computes a block in 160 us.
    bench.report(10);
    let mut number = 0;
    while bench.worth(Tier::Nvme).namespaces_withheld == 0 {
        bench.turn(&keys, number);
        number += 1;
        assert!(number < 100);
    }
    let other = NamespaceId(2);
    let info = NamespaceInfo {
        id: other,
        generation: 1,
        tenant: TenantId(1),
        codec: CodecChoice::Raw,
        element: ElementType::Bf16,
        narrow: None,
    };
    bench.edge.event(Event::Namespace(info));
    assert!(!bench.edge.catalog.arbiter_is_out(other, Tier::Nvme));
    assert!(bench.edge.catalog.arbiter_is_out(NAMESPACE, Tier::Nvme));
}

#[test]
fn a_tail_on_a_slow_tier_is_computed_and_the_prefix_is_loaded() {
    let mut bench = Bench::new(ArbiterConfig::default());
    let keys = bench.on_nvme(1, 8);
    bench.report(1000);
    for number in 0..4 {
        bench.turn(&keys, number);
    }
    // The first half comes into RAM.
    let found = bench.edge.lookup(keys.clone(), 60_000);
    bench.edge.load(&keys[..4], found.lease.unwrap());
    bench.settle();
    bench.edge.ask(Request::Release { lease: found.lease.unwrap() });
    for _ in 0..6 {
        let found = bench.edge.lookup(keys[..4].to_vec(), 60_000);
        assert_eq!(found.runs.len(), 1, "{found:?}");
        bench.edge.load(&keys[..4], found.lease.unwrap());
        bench.settle();
        bench.edge.ask(Request::Release { lease: found.lease.unwrap() });
    }
    let tiers = |found: &LookupReply| -> Vec<(Tier, u32)> {
        found.runs.iter().map(|run| (run.tier, run.blocks)).collect()
    };
    let found = bench.edge.lookup(keys.clone(), 0);
    assert_eq!(tiers(&found), [(Tier::Host, 4), (Tier::Nvme, 4)]);
    assert_eq!(found.advice.load, 8, "{found:?}");
    // Now the engine is faster than the drive and slower than RAM.
    for _ in 0..20 {
        bench.report(20);
    }
    let found = bench.edge.lookup(keys.clone(), 0);
    assert_eq!((found.blocks, found.advice.load), (8, 4), "{found:?}");
    let advice = found.advice;
    assert!(advice.compute_us.unwrap().abs_diff(4 * TOKENS * 20) < 200, "{advice:?}");
}

proptest! {
    #[test]
    fn whatever_is_reported_no_advice_goes_beyond_what_is_there(
        reports in proptest::collection::vec((0u32..5000, 0u32..100_000, 0u64..10_000_000), 0..40),
        turns in proptest::collection::vec((1usize..9, 0u64..200_000), 1..30),
        probe_every in 1u32..5,
    ) {
        let window_ms = 1000;
        let config = ArbiterConfig { window_ms, probe_every, ..ArbiterConfig::default() };
        let mut bench = Bench::new(config);
        let keys = bench.on_nvme(1, 8);
        for (tokens, context, took_us) in reports {
            bench.report_one(tokens, context, took_us);
        }
        for (number, (blocks, read_us)) in turns.into_iter().enumerate() {
            bench.read_us = read_us;
            let found = bench.turn(&keys[..blocks], number as u32);
            prop_assert!(found.advice.load <= found.blocks);
            prop_assert_eq!((found.blocks + found.advice.withheld) as usize, blocks);
            let runs: u32 = found.runs.iter().map(|run| run.blocks).sum();
            prop_assert_eq!(runs, found.blocks);
        }
    }
}
