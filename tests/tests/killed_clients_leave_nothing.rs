//! A client killed in the middle of a load or a store leaves nothing behind: no lease, region,
//! session or ticket, no memory, no descriptor. 200 times, or as `KVTIDE_KILLS` says.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{MissReason, Outcome};
use kvtide_tests::{Daemon, Footprint, KvPool, Setup};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const BLOCKS: u32 = 16;
const BLOCK_BYTES: u32 = 128 << 10;
/// Clients that run, and die, at the same time.
const AT_ONCE: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(30);

/// Groups of clients that load take turns with groups that store.
fn work(number: u32) -> &'static str {
    if (number / AT_ONCE).is_multiple_of(2) { "load" } else { "store" }
}

/// Starts a client and waits until several of its tickets are under way.
fn busy_client(setup: &Setup, number: u32) -> Child {
    let work = work(number);
    let seed = if work == "load" { 1 } else { 1000 * number };
    let args = [work.into(), seed.to_string(), BLOCKS.to_string(), BLOCK_BYTES.to_string()];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = setup.client(&args).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "busy\n", "client {number} ({work}) ended early");
    child
}

/// Kills one client after the other; the tickets under way just before the last one's end.
fn kill_clients(setup: &Setup, asker: &Client, first: u32) -> u64 {
    let mut clients: Vec<Child> =
        (first..first + AT_ONCE).map(|number| busy_client(setup, number)).collect();
    let mut under_way = 0;
    for (at, client) in clients.iter_mut().enumerate() {
        // Another moment each time, without any randomness.
        let us = (u64::from(first) * 131 + at as u64 * 977) % 4000;
        std::thread::sleep(Duration::from_micros(us));
        assert!(client.try_wait().unwrap().is_none(), "the client ended before it was killed");
        under_way = asker.stats().unwrap().catalog.unwrap().tickets;
        client.kill().unwrap();
        client.wait().unwrap();
    }
    under_way
}

fn footprint(daemon: &Daemon, others: u64) -> Footprint {
    daemon.wait_idle(others, PATIENCE).unwrap_or_else(|held| panic!("still held: {held}"));
    // Descriptors and mappings are closed a moment after the catalog has forgotten them.
    std::thread::sleep(Duration::from_millis(300));
    Footprint::of(daemon.pid())
}

#[test]
fn killed_in_mid_load_and_mid_store() {
    let kills: u32 = std::env::var("KVTIDE_KILLS").map_or(200, |text| text.parse().unwrap());
    let setup = Setup::new(NODE).option("--host-bytes", "48MiB").option("--log-level", "info");
    let mut daemon = setup.start();
    let pool = KvPool::open(daemon.client(), "churn", BLOCKS, BLOCK_BYTES).unwrap();
    let keys = pool.keys(1, BLOCKS);
    let stored = pool.store(&keys, keys.len(), PATIENCE);
    assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
    // Kept through all that the storing clients do.
    let pin = pool.client.pin(pool.space.id().unwrap(), &keys, Duration::from_secs(3600));
    assert_eq!(pin.unwrap().blocks, BLOCKS);
    drop(pool);

    let asker = daemon.client();
    let warm = kills / 4;
    let mut killed = 0;
    // Groups that had tickets under way when their last client was killed.
    let mut cut = HashMap::from([("load", 0), ("store", 0)]);
    let mut round = |killed: &mut u32, until: u32| {
        while *killed < until {
            let under_way = kill_clients(&setup, &asker, *killed);
            *cut.get_mut(work(*killed)).unwrap() += u32::from(under_way > 0);
            *killed += AT_ONCE;
        }
    };
    round(&mut killed, warm);
    let early = footprint(&daemon, 1);
    round(&mut killed, kills);
    let late = footprint(&daemon, 1);
    println!("after {warm} kills {early:?}\nafter {killed} kills {late:?}");
    let groups = killed / AT_ONCE / 2;
    println!("of {groups} groups each, with tickets under way at the end: {cut:?}");
    assert!(cut.values().all(|cut| *cut > groups / 4), "too few kills were in mid-transfer");
    let (stats, _) = daemon.stats();
    let expired = stats.missed.iter().find(|(why, _)| *why == MissReason::LeaseExpired);
    println!("loads that outlived their clients' leases: {expired:?}");

    assert!(late.anon_kib < early.anon_kib + (8 << 10), "memory grew");
    assert!(late.shmem_kib < early.shmem_kib + (4 << 10), "shared memory grew");
    assert!(late.descriptors <= early.descriptors + 4, "descriptors are left open");
    assert!(late.mappings <= early.mappings + 24, "mappings are left");

    // And the daemon is as good as before.
    let pool = KvPool::open(daemon.client(), "churn", BLOCKS, BLOCK_BYTES).unwrap();
    let loaded = pool.load(&keys, PATIENCE);
    assert_eq!(loaded.len(), keys.len());
    assert!(loaded.iter().all(|each| matches!(each, Outcome::Loaded(_))), "{loaded:?}");
    daemon.assert_healthy();
}
