//! The daemon goes away and comes back: clients get misses in time, find their way back by
//! themselves, and find what was written down.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtide_client::blocking::Client;
use kvtide_client::{BlockKey, ClientConfig, Inspect, Outcome, Tier};
use kvtide_tests::{Daemon, KvPool, Setup, poll_until};
use rustix::process::Signal;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const BLOCKS: u32 = 32;
const BLOCK_BYTES: u32 = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(30);
/// The client's deadline where the daemon does not answer.
const CALL: Duration = Duration::from_millis(400);

fn impatient(daemon: &Daemon) -> Client {
    Client::connect(ClientConfig { call_timeout: CALL, ..daemon.client_config() }).unwrap()
}

fn store_all(pool: &KvPool, keys: &[BlockKey]) {
    let stored = pool.store(keys, keys.len(), PATIENCE);
    assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
}

fn wait_written_down(daemon: &Daemon, blocks: u64) {
    let written = poll_until(PATIENCE, || {
        let (stats, _) = daemon.stats();
        (stats.nvme.blocks >= blocks && stats.dirty_blocks == 0).then_some(())
    });
    assert!(written.is_some(), "not written down: {:?}", daemon.stats().0);
    // Descriptors are committed at the latest 100 ms after their blocks.
    std::thread::sleep(Duration::from_millis(400));
}

/// A miss, and soon enough.
fn assert_misses_in_time(pool: &KvPool, keys: &[BlockKey]) {
    let start = Instant::now();
    assert_eq!(pool.found(keys), 0);
    assert!(pool.load(keys, Duration::from_millis(100)).is_empty());
    let stored = pool.store(keys, 1, Duration::from_millis(100));
    assert!(stored.iter().all(|each| !matches!(each, Outcome::Stored | Outcome::Present)));
    let took = start.elapsed();
    // Three calls; the rest is for a loaded machine.
    assert!(took < 3 * CALL + Duration::from_secs(5), "{took:?} for three calls");
}

#[test]
fn clients_miss_reconnect_and_find_what_was_written_down() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let pool = KvPool::open(impatient(&daemon), "restart", BLOCKS, BLOCK_BYTES).unwrap();
    let keys = pool.keys(1, BLOCKS);
    store_all(&pool, &keys);
    wait_written_down(&daemon, BLOCKS.into());
    for round in 1..=3 {
        daemon.kill9();
        for _ in 0..5 {
            assert_misses_in_time(&pool, &keys);
        }
        assert!(!pool.client.is_connected());
        daemon.restart();
        let back = poll_until(PATIENCE, || pool.client.is_connected().then_some(()));
        assert!(back.is_some(), "the client does not reconnect");
        assert_eq!(pool.found(&keys), keys.len(), "round {round}");
        let loaded = pool.load(&keys, PATIENCE);
        assert_eq!(loaded, vec![Outcome::Loaded(Tier::Nvme); keys.len()], "round {round}");
        assert_eq!(pool.client.counters().connections, round + 1);
    }
    daemon.assert_healthy();
}

#[test]
fn a_daemon_that_hangs_opens_the_breaker_and_closes_it_when_it_answers() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let pool = KvPool::open(impatient(&daemon), "hang", BLOCKS, BLOCK_BYTES).unwrap();
    let keys = pool.keys(1, BLOCKS);
    store_all(&pool, &keys);
    daemon.freeze();
    for _ in 0..3 {
        assert_misses_in_time(&pool, &keys);
    }
    let counters = pool.client.counters();
    assert!(counters.breaker_opened >= 1 && counters.calls_late >= 3, "{counters:?}");
    assert!(counters.calls_skipped >= 1, "the breaker was open for nobody: {counters:?}");
    daemon.signal(Signal::CONT);
    let found = poll_until(PATIENCE, || (pool.found(&keys) == keys.len()).then_some(()));
    assert!(found.is_some(), "the breaker stays open: {:?}", pool.client.counters());
    assert_eq!(pool.client.counters().connections, 1, "the connection was kept");
    daemon.assert_healthy();
}

#[test]
fn a_stop_as_asked_loses_nothing() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let pool = KvPool::open(daemon.client(), "drain", BLOCKS, BLOCK_BYTES).unwrap();
    let chains: Vec<_> = (1..=6).map(|seed| pool.keys(seed, BLOCKS)).collect();
    for keys in &chains {
        store_all(&pool, keys);
    }
    let status = daemon.stop_gracefully();
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
    assert!(daemon.log().contains("drained") && daemon.log().contains("clean=true"));
    assert!(!setup.socket().exists(), "the socket is removed");
    daemon.restart();
    let back = poll_until(PATIENCE, || pool.client.is_connected().then_some(()));
    assert!(back.is_some(), "the client does not reconnect");
    for keys in &chains {
        assert_eq!(pool.found(keys), keys.len());
        let loaded = pool.load(keys, PATIENCE);
        assert_eq!(loaded, vec![Outcome::Loaded(Tier::Nvme); keys.len()]);
    }
    daemon.assert_healthy();
}

#[test]
fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let pool = KvPool::open(daemon.client(), "second", BLOCKS, BLOCK_BYTES).unwrap();
    let keys = pool.keys(1, BLOCKS);
    store_all(&pool, &keys);

    let same_socket = setup.clone().option("--store", setup.path("other")).run_to_end();
    assert_eq!(same_socket.code, Some(3), "{}", same_socket.text);
    let socket = setup.socket().display().to_string();
    for part in [&socket, "another daemon listens there", "--socket"] {
        assert!(same_socket.text.contains(part), "{part} is not in: {}", same_socket.text);
    }
    let same_store = setup.clone().option("--socket", setup.path("other.sock")).run_to_end();
    assert_eq!(same_store.code, Some(3), "{}", same_store.text);
    let (store, pid) = (setup.store().display().to_string(), daemon.pid().to_string());
    for part in [&store, "in use by process", &pid, "stop that one first"] {
        assert!(same_store.text.contains(part), "{part} is not in: {}", same_store.text);
    }
    assert!(!setup.path("other.sock").exists(), "the refused daemon leaves no socket");

    let loaded = pool.load(&keys, PATIENCE);
    assert_eq!(loaded, vec![Outcome::Loaded(Tier::Host); keys.len()]);
    daemon.assert_healthy();
}

/// Keys of blocks that lie on nvme, as an operator sees them.
fn on_nvme(client: &Client) -> HashSet<BlockKey> {
    let query = Inspect { tier: Some(Tier::Nvme), ..Inspect::default() };
    let page = client.inspect(&query).unwrap();
    assert_eq!(page.cursor, None, "one page holds them all");
    page.rows.into_iter().map(|row| row.key).collect()
}

#[test]
fn killed_while_storing_it_loses_only_what_was_not_written_down() {
    const CHAIN: u32 = 16;
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let operator = daemon.client();
    let mut chains: Vec<Vec<BlockKey>> = Vec::new();
    for round in 0..4u32 {
        let stop = AtomicBool::new(false);
        let client = Client::connect(daemon.client_config()).unwrap();
        let pool = KvPool::open(client, "crash", CHAIN, BLOCK_BYTES).unwrap();
        let promised = std::thread::scope(|scope| {
            let stored = scope.spawn(|| {
                let mut stored = Vec::new();
                // Less than the store holds, so that nothing is reclaimed.
                for seed in 0..15 {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let keys = pool.keys(1 + round * 100 + seed, CHAIN);
                    let _ = pool.store(&keys, keys.len(), Duration::from_secs(2));
                    stored.push(keys);
                    std::thread::sleep(Duration::from_millis(30));
                }
                stored
            });
            std::thread::sleep(Duration::from_millis(150));
            let some = poll_until(PATIENCE, || {
                let promised = on_nvme(&operator);
                (promised.len() >= (round as usize + 1) * 32).then_some(promised)
            });
            // What was on nvme now is committed by then; more is being stored meanwhile.
            std::thread::sleep(Duration::from_millis(200));
            daemon.kill9();
            stop.store(true, Ordering::Relaxed);
            chains.extend(stored.join().unwrap());
            some.expect("blocks are written down")
        });
        daemon.restart();
        let back = poll_until(PATIENCE, || operator.is_connected().then_some(()));
        assert!(back.is_some(), "the operator's client does not reconnect");
        let found = on_nvme(&operator);
        let lost = promised.difference(&found).count();
        println!(
            "round {round}: {} on nvme before, {} after, {lost} lost",
            promised.len(),
            found.len()
        );
        assert_eq!(lost, 0, "of {} blocks", promised.len());
        // Every byte that it still gives out is right; `load` checks.
        let client = Client::connect(daemon.client_config()).unwrap();
        let pool = KvPool::open(client, "crash", CHAIN, BLOCK_BYTES).unwrap();
        let mut loaded = 0;
        for keys in &chains {
            let outcomes = pool.load(keys, PATIENCE);
            loaded += outcomes.iter().filter(|each| matches!(each, Outcome::Loaded(_))).count();
        }
        assert!(loaded >= promised.len(), "{loaded} of {} loaded", promised.len());
    }
    daemon.assert_healthy();
}
