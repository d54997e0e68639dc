//! Admission of prefills, through the whole catalog.

use std::collections::{BTreeMap, HashSet};

use super::super::advice::*;
use super::*;

fn with(prefill: PrefillConfig) -> CatalogConfig {
    CatalogConfig { prefill, ..config(16, false) }
}

fn ask(tokens: u32) -> PrefillAsk {
    PrefillAsk { tokens, context: 0, conversation: 0, turns: None, prefix: None }
}

/// A catalog, with sessions of tenants that ask.
struct Wave {
    catalog: Catalog,
    now: u64,
    asks: u64,
}

impl Wave {
    /// Session `i` is of tenant `tenants[i]`.
    fn new(prefill: PrefillConfig, tenants: &[u32]) -> Wave {
        let mut wave = Wave { catalog: Catalog::new(with(prefill)), now: 0, asks: 0 };
        for (session, tenant) in tenants.iter().enumerate() {
            let session = SessionId(session as u64);
            wave.event(Event::SessionOpened { session, tenant: TenantId(*tenant) });
        }
        wave
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        self.catalog.apply(Timestamp(self.now), event)
    }

    fn pass(&mut self, ms: u64) {
        self.now += ms * 1000;
        self.event(Event::Tick);
    }

    fn request(&mut self, session: usize, request: Request) -> Reply {
        self.asks += 1;
        let (ask, session) = (AskId(self.asks), SessionId(session as u64));
        match self.event(Event::Asked { ask, session, request }).pop() {
            Some(Action::Answer { reply, .. }) => reply,
            other => panic!("{other:?}"),
        }
    }

    fn ask(&mut self, session: usize, ask: PrefillAsk) -> PrefillAnswer {
        match self.request(session, Request::AdmitPrefill(ask)) {
            Reply::Prefill(answer) => answer,
            other => panic!("{other:?}"),
        }
    }

    fn done(&mut self, session: usize, grant: GrantId) -> bool {
        let reply = self.request(session, Request::PrefillDone { grant });
        matches!(reply, Reply::Count(1))
    }

    fn stats(&self) -> PrefillStats {
        self.catalog.stats().prefill
    }
}

fn granted(answer: PrefillAnswer) -> GrantId {
    match answer {
        PrefillAnswer::Admit { grant: Some(grant) } => grant,
        other => panic!("{other:?}"),
    }
}

fn waits(answer: PrefillAnswer, reason: WaitReason) -> bool {
    matches!(answer, PrefillAnswer::Wait { why, .. } if why == reason)
}

fn in_flight(tokens: u64) -> PrefillConfig {
    PrefillConfig { tokens_in_flight: Some(tokens), ramp_ms: 0, ..PrefillConfig::default() }
}

#[test]
fn without_a_limit_everything_is_admitted_and_nothing_kept() {
    let mut wave = Wave::new(PrefillConfig::default(), &[1; 50]);
    for session in 0..50 {
        let answer = wave.ask(session, ask(1 << 20));
        assert_eq!(answer, PrefillAnswer::Admit { grant: None });
    }
    let stats = wave.stats();
    assert_eq!((stats.rationed, stats.grants, stats.queued), (false, 0, 0));
}

#[test]
fn a_grant_ends_with_its_end_its_report_its_session_and_its_time() {
    let mut wave = Wave::new(in_flight(100), &[1, 1, 1]);
    let other_session = |wave: &mut Wave, grant| assert!(!wave.done(1, grant));
    let first = granted(wave.ask(0, ask(100)));
    other_session(&mut wave, first);
    assert!(waits(wave.ask(1, ask(100)), WaitReason::Turn));
    assert!(wave.done(0, first));
    assert!(!wave.done(0, first), "it ends once");
    let second = granted(wave.ask(1, ask(100)));
    assert!(waits(wave.ask(2, ask(100)), WaitReason::Turn));
    let (namespace, grant) = (NAMESPACE, Some(second));
    let report = PrefillReport { namespace, tokens: 100, context: 0, took_us: 5000, grant };
    wave.request(1, Request::ReportPrefill(report));
    granted(wave.ask(2, ask(100)));
    assert!(waits(wave.ask(0, ask(100)), WaitReason::Turn));
    wave.event(Event::SessionClosed { session: SessionId(2) });
    granted(wave.ask(0, ask(100)));
    assert!(waits(wave.ask(1, ask(100)), WaitReason::Turn));
    for _ in 0..120 {
        wave.pass(1000);
        wave.ask(1, ask(100));
    }
    let stats = wave.stats();
    assert_eq!((stats.lapsed, stats.grants, stats.tokens_in_flight), (1, 1, 100));
}

#[test]
fn what_was_set_aside_for_one_that_does_not_come_back_goes_to_the_next() {
    let mut wave = Wave::new(in_flight(100), &[1, 1, 1]);
    let first = granted(wave.ask(0, ask(100)));
    assert!(waits(wave.ask(1, ask(100)), WaitReason::Turn));
    assert!(waits(wave.ask(2, ask(100)), WaitReason::Turn));
    wave.done(0, first);
    assert_eq!(wave.stats().tokens_in_flight, 100, "set aside for the second");
    let mut seconds = 0;
    while waits(wave.ask(2, ask(100)), WaitReason::Turn) {
        wave.pass(1000);
        seconds += 1;
        assert!(seconds < 8, "{:?}", wave.stats());
    }
    let stats = wave.stats();
    assert_eq!((stats.lapsed, stats.queued, stats.grants), (1, 0, 1));
}

#[test]
fn a_prefill_costs_by_what_it_looks_at() {
    let config = PrefillConfig { quadratic_tokens: 1000, ..in_flight(1 << 40) };
    let mut wave = Wave::new(config, &[1]);
    let grant = granted(wave.ask(0, PrefillAsk { context: 3000, conversation: 1, ..ask(2000) }));
    assert_eq!(wave.stats().admitted_tokens, 2000 + 2000 * 4);
    wave.done(0, grant);
    granted(wave.ask(0, PrefillAsk { context: u32::MAX, conversation: 2, ..ask(u32::MAX) }));
    assert!(wave.stats().admitted_tokens > 1 << 50);
}

#[test]
fn one_that_is_larger_than_the_budget_is_admitted_alone() {
    let mut wave = Wave::new(in_flight(100), &[1, 1, 2]);
    let small = granted(wave.ask(0, ask(10)));
    assert!(waits(wave.ask(1, ask(1000)), WaitReason::Turn));
    // Who comes behind it does not go before it.
    for _ in 0..20 {
        assert!(waits(wave.ask(0, ask(10)), WaitReason::Turn));
        assert!(waits(wave.ask(1, ask(1000)), WaitReason::Turn));
        wave.pass(100);
    }
    wave.done(0, small);
    let large = granted(wave.ask(1, ask(1000)));
    assert!(waits(wave.ask(2, ask(10)), WaitReason::Turn));
    wave.done(1, large);
    granted(wave.ask(0, ask(10)));
}

#[test]
fn identical_misses_wait_for_the_first() {
    let mut wave = Wave::new(in_flight(1 << 20), &[1, 2, 3]);
    let prefix = Some((NAMESPACE, key(1, 7)));
    let same = PrefillAsk { prefix, ..ask(100) };
    let first = granted(wave.ask(0, same));
    for _ in 0..5 {
        assert!(waits(wave.ask(1, same), WaitReason::SamePrefix));
        wave.pass(50);
    }
    // Another prefix does not.
    granted(wave.ask(2, PrefillAsk { prefix: Some((NAMESPACE, key(2, 7))), ..ask(100) }));
    wave.done(0, first);
    // It is to be stored now.
    assert!(waits(wave.ask(1, same), WaitReason::SamePrefix));
    wave.pass(2100);
    // It was not, so another one computes it, and the third waits for that one.
    let second = granted(wave.ask(1, same));
    assert!(waits(wave.ask(2, same), WaitReason::SamePrefix));
    wave.event(Event::SessionClosed { session: SessionId(1) });
    let third = granted(wave.ask(2, same));
    assert!(third > second);
    assert_eq!(wave.stats().tokens_in_flight, 200);
}

#[test]
fn identical_misses_wait_for_one_that_waits_itself() {
    let mut wave = Wave::new(in_flight(100), &[1, 1, 1]);
    let same = PrefillAsk { prefix: Some((NAMESPACE, key(1, 7))), ..ask(100) };
    let other = granted(wave.ask(0, ask(100)));
    assert!(waits(wave.ask(1, same), WaitReason::Turn));
    assert!(waits(wave.ask(2, same), WaitReason::SamePrefix));
    assert_eq!(wave.stats().queued, 1);
    wave.done(0, other);
    granted(wave.ask(1, same));
    assert!(waits(wave.ask(2, same), WaitReason::SamePrefix));
}

#[test]
fn a_full_queue_says_so_and_takes_none_from_another_tenant() {
    let config = PrefillConfig { queue: 3, ..in_flight(100) };
    let mut wave = Wave::new(config, &[1, 1, 1, 1, 1, 2]);
    granted(wave.ask(0, ask(100)));
    for session in 1..4 {
        assert!(waits(wave.ask(session, ask(100)), WaitReason::Turn));
    }
    assert!(waits(wave.ask(4, ask(100)), WaitReason::QueueFull));
    assert!(waits(wave.ask(5, ask(100)), WaitReason::Turn));
    assert!(waits(wave.ask(3, ask(100)), WaitReason::Turn), "its place is kept");
    let stats = wave.stats();
    assert_eq!((stats.queued, stats.queue_full), (4, 1));
}

#[test]
fn who_would_wait_for_long_keeps_fewer_turns() {
    let config = PrefillConfig {
        tokens_per_second: Some(1000),
        ramp_ms: 0,
        degrade_ms: 2000,
        quadratic_tokens: 1 << 40,
        ..PrefillConfig::default()
    };
    let mut wave = Wave::new(config, &[1, 1]);
    granted(wave.ask(0, ask(1000)));
    let PrefillAnswer::Degrade { keep_turns } =
        wave.ask(1, PrefillAsk { turns: Some(10), ..ask(8000) })
    else {
        panic!("it would wait for eight seconds");
    };
    assert_eq!(keep_turns, 2);
    assert_eq!(wave.stats().queued, 0);
    // Who cannot, waits.
    assert!(waits(wave.ask(1, ask(8000)), WaitReason::Turn));
    assert_eq!(wave.stats().degraded, 1);
}

/// What one session of a wave does.
struct Client {
    tenant: u32,
    tokens: u32,
    /// When it asks next; `None`: it was admitted.
    next_ms: Option<u64>,
}

/// What a second admits at a time, with the ramp, summed up to then.
fn budget_until(config: &PrefillConfig, ms: u64) -> f64 {
    let (rate, ramp) = (config.tokens_per_second.unwrap() as f64 / 1000.0, config.ramp_ms as f64);
    let ms = ms as f64;
    let ramped = ms.min(ramp);
    let part = 0.1 + 0.9 * ramped / ramp.max(1.0);
    rate * (ramped * (0.1 + part) / 2.0 + (ms - ramped))
}

/// What the largest prefill of the wave costs.
const LARGEST: u64 = 11_000 + 11_000 * 5_500 / 32_768;

/// Weights of the wave's tenants.
const WEIGHTS: [(u32, u32); 3] = [(1, 1), (2, 2), (3, 5)];

/// Fails unless every tenant has its share, within 5 % or one prefill.
fn assert_shares(by_tenant: &BTreeMap<u32, u64>) {
    let all: u32 = WEIGHTS.iter().map(|(_, weight)| weight).sum();
    let sum: u64 = by_tenant.values().sum();
    for (tenant, weight) in WEIGHTS {
        let due = sum as f64 * f64::from(weight) / f64::from(all);
        let off = (by_tenant.get(&tenant).copied().unwrap_or(0) as f64 - due).abs();
        assert!(off <= (0.05 * due).max(LARGEST as f64), "{due}: {by_tenant:?}");
    }
}

/// A wave: what its sessions want, and what they got.
struct Miss {
    wave: Wave,
    clients: Vec<Client>,
    under_way: BTreeMap<u64, Vec<(usize, GrantId)>>,
    by_tenant: BTreeMap<u32, u64>,
}

impl Miss {
    fn new(config: &PrefillConfig, sessions: usize) -> Miss {
        // By weight, so that all tenants want for as long.
        let tenant_of = |at: usize| [1, 2, 2, 3, 3, 3, 3, 3][at % 8];
        let tenants: Vec<u32> = (0..sessions).map(tenant_of).collect();
        let client = |(at, tenant): (usize, &u32)| Client {
            tenant: *tenant,
            tokens: 2000 + (at as u32).wrapping_mul(2_654_435_761) % 9000,
            next_ms: Some(0),
        };
        let clients = tenants.iter().enumerate().map(client).collect();
        let wave = Wave::new(config.clone(), &tenants);
        Miss { wave, clients, under_way: BTreeMap::new(), by_tenant: BTreeMap::new() }
    }

    fn waits(&self, tenant: u32) -> bool {
        self.clients.iter().any(|client| client.tenant == tenant && client.next_ms.is_some())
    }

    /// Ends what ends now, and asks for those who are to ask now.
    fn step(&mut self, ms: u64) {
        for (at, grant) in self.under_way.remove(&ms).unwrap_or_default() {
            assert!(self.wave.done(at, grant));
        }
        for (at, client) in self.clients.iter_mut().enumerate() {
            if client.next_ms != Some(ms) {
                continue;
            }
            let before = self.wave.stats().admitted_tokens;
            match self.wave.ask(at, ask(client.tokens)) {
                PrefillAnswer::Admit { grant } => {
                    client.next_ms = None;
                    let cost = self.wave.stats().admitted_tokens - before;
                    *self.by_tenant.entry(client.tenant).or_default() += cost;
                    // It computes faster than the budget, so that it is the budget that limits.
                    let end = ms + cost / 100 + 1;
                    self.under_way.entry(end).or_default().push((at, grant.unwrap()));
                }
                PrefillAnswer::Wait { ms: wait, why } => {
                    assert_eq!(why, WaitReason::Turn);
                    client.next_ms = Some(ms + u64::from(wait));
                }
                PrefillAnswer::Degrade { .. } => panic!("no turns were offered"),
            }
        }
    }
}

#[test]
fn a_wave_after_a_cold_start_keeps_the_budget_the_shares_and_everybody() {
    const SESSIONS: usize = 200;
    let config = PrefillConfig {
        tokens_per_second: Some(50_000),
        tokens_in_flight: Some(120_000),
        ramp_ms: 20_000,
        weights: WEIGHTS.map(|(tenant, weight)| (TenantId(tenant), weight)).to_vec(),
        ..PrefillConfig::default()
    };
    let mut miss = Miss::new(&config, SESSIONS);
    let (mut shares_seen, mut ms) = (0, 0);
    while WEIGHTS.iter().any(|(tenant, _)| miss.waits(*tenant)) {
        miss.step(ms);
        let stats = miss.wave.stats();
        let allowed = budget_until(&config, ms) + 50_000.0;
        assert!(stats.admitted_tokens as f64 <= allowed, "{ms} ms: {stats:?}, not {allowed}");
        assert!(stats.tokens_in_flight <= 120_000, "{ms} ms: {stats:?}");
        assert!(stats.queued as usize <= SESSIONS);
        // While all of them want more.
        if WEIGHTS.iter().all(|(tenant, _)| miss.waits(*tenant)) {
            assert_shares(&miss.by_tenant);
            shares_seen += 1;
        }
        ms += 1;
        miss.wave.now = ms * 1000;
        if ms.is_multiple_of(50) {
            miss.wave.event(Event::Tick);
        }
        assert!(ms < 120_000, "somebody starves: {:?}", miss.wave.stats());
    }
    assert!(shares_seen > 1000, "seen for {shares_seen} ms only");
    // It took as long as the budget says, not longer.
    let all: u64 = miss.by_tenant.values().sum();
    let used = all as f64 / budget_until(&config, ms);
    assert!(used > 0.9, "only {used} of the budget was used");
    assert_eq!(miss.wave.stats().lapsed, 0);
}

proptest! {
    /// Clients that ask, change their minds, vanish and end what they were granted, in any order.
    #[test]
    fn the_books_balance(
        per_second in proptest::option::of(100u64..5000),
        flight in 100u64..5000,
        ramp_ms in 0u64..3000,
        steps in proptest::collection::vec(
            (0usize..8, 0u32..6, 1u32..2000, 0u64..400, proptest::option::of(0u32..3)), 1..200),
    ) {
        let config = PrefillConfig {
            tokens_per_second: per_second,
            tokens_in_flight: Some(flight),
            queue: 2,
            grant_ms: 1000,
            ramp_ms,
            degrade_ms: 500,
            store_ms: 100,
            weights: vec![(TenantId(1), 3), (TenantId(2), 1)],
            ..PrefillConfig::default()
        };
        let tenants = [1, 1, 1, 2, 2, 3, 3, 3];
        let mut wave = Wave::new(config, &tenants);
        let mut open: HashSet<usize> = (0..8).collect();
        let mut held: Vec<(usize, GrantId, u64)> = vec![];
        for (session, what, tokens, ms, prefix) in steps {
            wave.pass(ms);
            if !open.contains(&session) {
                wave.event(Event::SessionOpened {
                    session: SessionId(session as u64), tenant: TenantId(tenants[session]) });
                open.insert(session);
            }
            match what {
                0 => {
                    wave.event(Event::SessionClosed { session: SessionId(session as u64) });
                    open.remove(&session);
                    held.retain(|(at, ..)| *at != session);
                }
                1 => if let Some((at, grant, _)) = held.pop() {
                    wave.done(at, grant);
                },
                _ => {
                    let prefix = prefix.map(|at| (NAMESPACE, key(at, 0)));
                    let turns = (tokens % 2 == 0).then_some(tokens % 7);
                    let before = wave.stats().admitted_tokens;
                    let wanted = PrefillAsk { turns, prefix, ..ask(tokens) };
                    match wave.ask(session, wanted) {
                        PrefillAnswer::Admit { grant } => {
                            let cost = wave.stats().admitted_tokens - before;
                            held.push((session, grant.unwrap(), cost));
                        }
                        PrefillAnswer::Wait { ms, .. } => prop_assert!((1..=1000).contains(&ms)),
                        PrefillAnswer::Degrade { keep_turns } => {
                            prop_assert!(keep_turns >= 1 && Some(keep_turns) < turns);
                        }
                    }
                }
            }
            let stats = wave.stats();
            // Two of each tenant, and those that had something set aside and now want more.
            prop_assert!(stats.queued <= 12, "{stats:?}");
            let one = stats.grants <= 1;
            prop_assert!(one || stats.tokens_in_flight <= flight, "{stats:?}");
            prop_assert_eq!(stats.grants == 0, stats.tokens_in_flight == 0);
        }
        // With everybody gone nothing is left.
        for session in open {
            wave.event(Event::SessionClosed { session: SessionId(session as u64) });
        }
        wave.pass(10_000);
        let stats = wave.stats();
        prop_assert_eq!((stats.queued, stats.grants, stats.tokens_in_flight), (0, 0, 0));
        prop_assert!(wave.catalog.prefills.is_empty(), "something is kept");
    }
}
