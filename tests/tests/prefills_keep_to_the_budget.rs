//! Engines that ask before they compute: so much is under way and no more, the next comes when one
//! ends, also by being killed, and who wants the same waits for the first to store it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::thread;
use std::time::{Duration, Instant};

use kvtide_client::blocking::Client;
use kvtide_client::{Admission, BlockKey, ClientConfig, Grant, Prefill, PrefillStats};
use kvtide_tests::{Daemon, KvPool, Setup};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(30);
const CONFIG: &str = "[prefill]\ntokens_in_flight = 1000\nramp_ms = 0\nstore_ms = 30000\n";

fn open(daemon: &Daemon) -> KvPool {
    KvPool::open(daemon.client(), "budget", 16, 4096).unwrap()
}

fn ask(pool: &KvPool, tokens: u32, last: Option<BlockKey>) -> Admission {
    let namespace = &pool.space;
    let wanted = Prefill { namespace, tokens, context: 0, conversation: 7, turns: None, last };
    pool.client.admit_prefill(&wanted)
}

/// Asks as the daemon says, until it is admitted.
fn ask_until_admitted(pool: &KvPool, tokens: u32, last: Option<BlockKey>) -> Option<Grant> {
    let until = Instant::now() + PATIENCE;
    loop {
        match ask(pool, tokens, last) {
            Admission::Admitted(grant) => return grant,
            Admission::Wait(pause) => thread::sleep(pause),
            Admission::Degrade { .. } => panic!("no turns were offered"),
        }
        assert!(Instant::now() < until, "not admitted");
    }
}

fn prefill(daemon: &Daemon) -> PrefillStats {
    daemon.stats().0.prefill
}

#[test]
fn the_next_is_admitted_when_one_ends_or_is_killed() {
    let setup = Setup::new(NODE).config(CONFIG);
    let mut daemon = setup.start();
    let (first, second) = (open(&daemon), open(&daemon));
    let grant = ask_until_admitted(&first, 900, None).expect("prefills are rationed");
    assert!(matches!(ask(&second, 900, None), Admission::Wait(_)));
    let stats = prefill(&daemon);
    assert_eq!((stats.rationed, stats.grants, stats.queued), (true, 1, 1));
    assert!(stats.tokens_in_flight >= 900, "{stats:?}");
    assert!(setup.inspector(&["status"]).contains("prefills: 1 under way"));
    let took = Duration::from_millis(90);
    first.client.report_prefill(&first.space, 900, 0, took, Some(grant));
    assert_eq!(prefill(&daemon).reports, 1);
    let grant = ask_until_admitted(&second, 900, None);
    assert!(grant.is_some());
    // Its connection ends, and with it what it was granted.
    assert!(matches!(ask(&first, 900, None), Admission::Wait(_)));
    drop(second);
    assert!(ask_until_admitted(&first, 900, None).is_some());
    daemon.assert_healthy();
}

#[test]
fn who_wants_the_same_waits_for_the_first_and_then_finds_it() {
    let setup = Setup::new(NODE).config(CONFIG);
    let mut daemon = setup.start();
    let (first, second) = (open(&daemon), open(&daemon));
    let keys = first.keys(1, 8);
    let last = keys.last().copied();
    let grant = ask_until_admitted(&first, 32, last).expect("prefills are rationed");
    assert!(matches!(ask(&second, 32, last), Admission::Wait(_)));
    first.client.report_prefill(&first.space, 32, 0, Duration::from_millis(5), Some(grant));
    // Computed, not stored yet.
    assert!(matches!(ask(&second, 32, last), Admission::Wait(_)));
    assert_eq!(second.found(&keys), 0);
    first.store(&keys, keys.len(), PATIENCE);
    assert_eq!(second.found(&keys), keys.len());
    let stats = prefill(&daemon);
    assert_eq!((stats.admitted, stats.coalesced), (1, 2));
    daemon.assert_healthy();
}

#[test]
fn without_a_budget_or_without_a_daemon_nobody_waits() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let pool = open(&daemon);
    assert!(matches!(ask(&pool, u32::MAX, None), Admission::Admitted(None)));
    daemon.kill9();
    let config = ClientConfig { call_timeout: Duration::from_secs(2), ..daemon.client_config() };
    assert!(Client::connect(config).is_err());
    assert!(matches!(ask(&pool, u32::MAX, None), Admission::Admitted(None)));
}
