//! The daemon is restarted, upgraded or killed under a service manager that keeps files: what was
//! in RAM is in RAM afterwards, for clients that find their way back by themselves.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{BlockKey, ClientConfig, ForgetWhat, Outcome, Tier};
use kvtide_tests::{Daemon, KvPool, ServiceManager, Setup, poll_until};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const BLOCKS: u32 = 96;
const BLOCK_BYTES: u32 = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(30);
const NAMES: [&str; 2] = ["kvtide-arena", "kvtide-table"];

fn managed() -> (ServiceManager, Setup) {
    ServiceManager::of(Setup::new(NODE).config("[host]\nkeep = \"always\"\n"))
}

fn pool(daemon: &Daemon) -> (KvPool, Vec<BlockKey>) {
    let config = ClientConfig { call_timeout: PATIENCE, ..daemon.client_config() };
    let client = Client::connect(config).unwrap();
    let pool = KvPool::open(client, "restart", BLOCKS, BLOCK_BYTES).unwrap();
    let keys = pool.keys(1, BLOCKS);
    (pool, keys)
}

fn store_all(pool: &KvPool, keys: &[BlockKey]) {
    let stored = pool.store(keys, keys.len(), PATIENCE);
    assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
}

fn wait_back(pool: &KvPool) {
    let back = poll_until(PATIENCE, || pool.client.is_connected().then_some(()));
    assert!(back.is_some(), "the client does not reconnect");
}

/// Loads all, checks every byte; how many came from each tier.
fn hits(pool: &KvPool, keys: &[BlockKey]) -> [usize; 2] {
    let outcomes = pool.load(keys, PATIENCE);
    assert_eq!(outcomes.len(), keys.len(), "{outcomes:?}");
    [Tier::Host, Tier::Nvme]
        .map(|tier| outcomes.iter().filter(|each| **each == Outcome::Loaded(tier)).count())
}

#[test]
fn ram_hits_are_the_same_after_a_restart_and_after_a_kill() {
    let (manager, setup) = managed();
    let mut daemon = setup.start();
    assert_eq!(manager.names(), NAMES);
    let (pool, keys) = pool(&daemon);
    store_all(&pool, &keys);
    let before = hits(&pool, &keys);
    assert_eq!(before, [keys.len(), 0]);
    for graceful in [true, false, true, false] {
        if graceful {
            assert!(daemon.stop_gracefully().success());
        } else {
            daemon.kill9();
        }
        daemon.restart();
        wait_back(&pool);
        assert_eq!(hits(&pool, &keys), before, "graceful: {graceful}");
        assert_eq!(manager.names(), NAMES, "nothing is kept twice");
        let status = daemon.client().status().unwrap();
        assert!(status.host_kept.starts_with("kept"), "{}", status.host_kept);
        let note = "96 blocks (6 MiB) taken over, 0 slots dropped";
        assert!(status.notes.iter().any(|each| each.contains(note)), "{:?}", status.notes);
        daemon.assert_healthy();
    }
}

#[test]
fn a_stop_gives_the_memory_back_and_the_next_start_reads_from_nvme() {
    let (manager, setup) = managed();
    let mut daemon = setup.start();
    let (pool, keys) = pool(&daemon);
    store_all(&pool, &keys);
    assert!(daemon.stop_gracefully().success());
    manager.forget();
    daemon.restart();
    wait_back(&pool);
    assert_eq!(hits(&pool, &keys), [0, keys.len()]);
    assert_eq!(manager.names(), NAMES);
    daemon.assert_healthy();
}

#[test]
fn another_size_starts_empty_says_so_and_is_kept_instead() {
    let (manager, setup) = managed();
    let mut daemon = setup.start();
    let (pool, keys) = pool(&daemon);
    store_all(&pool, &keys);
    assert!(daemon.stop_gracefully().success());
    let larger = setup.clone().option("--host-bytes", "48MiB");
    let mut daemon = larger.start();
    wait_back(&pool);
    let status = daemon.client().status().unwrap();
    let said = |text: &str| status.notes.iter().any(|note| note.contains(text));
    assert!(said("is not used: it has 33554432 bytes"), "{:?}", status.notes);
    assert_eq!(status.host_bytes, 48 << 20);
    assert_eq!(hits(&pool, &keys), [0, keys.len()]);
    assert_eq!(manager.names(), NAMES, "the old memory was let go");
    daemon.kill9();
    daemon.restart();
    wait_back(&pool);
    assert_eq!(hits(&pool, &keys), [keys.len(), 0]);
    daemon.assert_healthy();
}

#[test]
fn one_of_the_two_files_alone_is_let_go_and_both_are_kept_anew() {
    for lost in NAMES {
        let (manager, setup) = managed();
        let mut daemon = setup.start();
        let (pool, keys) = pool(&daemon);
        store_all(&pool, &keys);
        assert!(daemon.stop_gracefully().success());
        manager.lose(lost);
        daemon.restart();
        wait_back(&pool);
        assert_eq!(hits(&pool, &keys), [0, keys.len()]);
        assert_eq!(manager.names(), NAMES, "without {lost}");
        daemon.assert_healthy();
    }
}

#[test]
fn a_forgotten_conversation_does_not_come_back() {
    let (_manager, setup) = managed();
    let mut daemon = setup.start();
    let (pool, keys) = pool(&daemon);
    store_all(&pool, &keys);
    let id = pool.space.id().unwrap();
    let forgotten = pool.client.forget(&ForgetWhat::Keys(id, keys[64..].to_vec()));
    assert_eq!(forgotten.unwrap(), 32);
    daemon.kill9();
    daemon.restart();
    wait_back(&pool);
    assert_eq!(pool.found(&keys), 64);
    daemon.assert_healthy();
}

#[test]
fn without_a_service_manager_the_status_says_what_a_restart_costs() {
    let mut daemon = Setup::new(NODE).config("[host]\nkeep = \"always\"\n").start();
    let status = daemon.client().status().unwrap();
    assert!(status.host_kept.contains("no service manager"), "{}", status.host_kept);
    daemon.assert_healthy();
}
