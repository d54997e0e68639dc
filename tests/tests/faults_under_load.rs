//! A device that fails, delays, shortens, loses, misdirects and flips: never a wrong byte, and the
//! daemon lives.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use kvtide_client::{Outcome, Tier};
use kvtide_tests::{Daemon, KvPool, Setup};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const BLOCKS: u32 = 16;
const BLOCK_BYTES: u32 = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
struct Tally {
    stored: usize,
    host: usize,
    nvme: usize,
    missed: usize,
}

/// Stores and loads until `until`; loads check every byte.
fn converse(daemon: &Daemon, first: u32, prompts: u32, until: Instant) -> Tally {
    let pool = KvPool::open(daemon.client(), "faults", BLOCKS, BLOCK_BYTES).unwrap();
    let mut tally = Tally::default();
    let mut round = 0;
    while Instant::now() < until {
        let keys = pool.keys(first + round % prompts, BLOCKS);
        let loaded = pool.load(&keys, PATIENCE);
        tally.host += loaded.iter().filter(|each| **each == Outcome::Loaded(Tier::Host)).count();
        tally.nvme += loaded.iter().filter(|each| **each == Outcome::Loaded(Tier::Nvme)).count();
        tally.missed += loaded.iter().filter(|each| matches!(each, Outcome::Missed(_))).count();
        let good = loaded.iter().take_while(|each| matches!(each, Outcome::Loaded(_))).count();
        if good < keys.len() {
            let stored = pool.store(&keys, keys.len() - good, PATIENCE);
            tally.stored += stored.iter().filter(|each| **each == Outcome::Stored).count();
        }
        // A stride that visits all prompts, whatever their number here.
        round += 5;
    }
    tally
}

/// Two clients for some seconds. Every byte is checked where it is loaded.
fn under_faults(
    rate: &str,
    seed: u32,
    prompts: u32,
    seconds: u64,
) -> (Tally, kvtide_client::CatalogStats) {
    let setup = Setup::new(NODE)
        .option("--host-bytes", "16MiB")
        .option("--fault-rate", rate)
        .option("--segment-bytes", "16MiB")
        .option("--fault-seed", seed.to_string());
    let mut daemon = setup.start();
    let until = Instant::now() + Duration::from_secs(seconds);
    let (left, right) = std::thread::scope(|scope| {
        let other = scope.spawn(|| converse(&daemon, 1000, prompts, until));
        (converse(&daemon, 1, prompts, until), other.join().unwrap())
    });
    let all = Tally {
        stored: left.stored + right.stored,
        host: left.host + right.host,
        nvme: left.nvme + right.nvme,
        missed: left.missed + right.missed,
    };
    let (stats, _) = daemon.stats();
    println!("rate {rate}, seed {seed}: {all:?}\n{stats:?}");
    daemon.assert_healthy();
    assert!(daemon.log().contains("FAULTS ARE MADE ON PURPOSE"), "the log says so");
    daemon.wait_idle(0, PATIENCE).unwrap_or_else(|held| panic!("still held: {held}"));
    assert_eq!(daemon.stop_gracefully().code(), Some(0));
    (all, stats)
}

#[test]
fn no_wrong_byte_comes_out_of_a_bad_device() {
    // Two segments that fail in a row turn the tier off, as they should, but then there is not
    // much to see. It seldom happens before anything was read.
    let tries = (7..12).map(|seed| under_faults("0.02", seed, 24, 8));
    let shown = tries.into_iter().find(|(tally, _)| tally.nvme > 0);
    let (tally, stats) = shown.expect("nothing came from nvme, so nothing was shown");
    println!("{} blocks came from nvme", tally.nvme);
    let seen = stats.corrupt + stats.read_failures + stats.write_failures;
    assert!(seen > 0, "no fault was noticed: {stats:?}");
}

#[test]
fn host_ram_goes_on_above_a_device_that_mostly_fails() {
    // Host RAM holds them all, but so nearly that they have to be written down.
    let (tally, stats) = under_faults("0.5", 7, 7, 3);
    assert!(tally.host > 0, "nothing came from host RAM");
    assert!(stats.write_failures > 0, "no fault was noticed: {stats:?}");
}
