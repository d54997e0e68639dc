//! A node that is told to stop, or to drain, above a slow disk: what is written in the time that
//! there is is the hottest part, and what is said of it is true after the restart.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_client::{BlockKey, Outcome};
use kvtide_tests::{Daemon, KvPool, Setup, poll_until};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(60);
const CHAIN: u32 = 16;
const CHAINS: u32 = 48;
const BLOCK_BYTES: u32 = 64 << 10;

/// A daemon whose disk needs 200 ms for an operation on average.
fn above_a_slow_disk(ram: &str, drain_ms: u64) -> Setup {
    Setup::new(NODE)
        .config(&format!("[daemon]\ndrain_ms = {drain_ms}\n"))
        .option("--host-bytes", ram)
        .option("--nvme-bytes", "4GiB")
        .option("--segment-bytes", "64MiB")
        .option("--fault-delay-ms", "400")
}

/// Stores chains, then uses each once more: the last ones are the hottest. Hottest first, the root
/// of each chain before what follows it.
fn fill(pool: &KvPool, chains: u32) -> Vec<Vec<BlockKey>> {
    let all: Vec<Vec<BlockKey>> = (1..=chains).map(|seed| pool.keys(seed, CHAIN)).collect();
    for keys in &all {
        let stored = pool.store(keys, keys.len(), PATIENCE);
        assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
    }
    for keys in &all {
        assert_eq!(pool.client.touch(&pool.space, keys).unwrap(), u64::from(CHAIN));
    }
    all.into_iter().rev().collect()
}

/// The number behind `name=` in the last line of the log that has `message`.
fn logged(daemon: &Daemon, message: &str, name: &str) -> u64 {
    let log = daemon.log();
    let line = log.lines().rev().find(|line| line.contains(message)).unwrap_or_else(|| {
        panic!("{message} is not in\n{log}");
    });
    // Without colors, if there are any.
    let plain: String = line.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').collect();
    let (_, rest) = plain.split_once(&format!("{name}=")).unwrap_or_else(|| panic!("{line}"));
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

/// Blocks found after the restart, which must be as many as were announced, chain by chain: all of
/// the hottest, then none, and perhaps some of the coldest, which left RAM by themselves before.
fn check_after_restart(
    daemon: &mut Daemon,
    pool: &KvPool,
    hottest_first: &[Vec<BlockKey>],
    announced: u64,
    written: u64,
) {
    daemon.restart();
    let back = poll_until(PATIENCE, || pool.client.is_connected().then_some(()));
    assert!(back.is_some(), "the client does not reconnect");
    let (stats, _) = daemon.stats();
    assert_eq!(stats.nvme.blocks, announced, "blocks found after the restart");
    let found: Vec<usize> = hottest_first.iter().map(|keys| pool.found(keys)).collect();
    println!("found, hottest first: {found:?}");
    let whole = found.iter().take_while(|blocks| **blocks == CHAIN as usize).count();
    let hot = whole * CHAIN as usize + found.get(whole).copied().unwrap_or(0);
    // Up to 8 MiB of cold blocks may have been on their way when the drain began.
    assert!(hot as u64 + 160 >= written, "{hot} of the hottest, {written} written");
    assert!(hot > 0, "the hottest blocks are there");
    for keys in hottest_first.iter().take(whole.min(4)) {
        let loaded = pool.load(keys, PATIENCE);
        assert!(loaded.iter().all(|each| matches!(each, Outcome::Loaded(_))), "{loaded:?}");
    }
    daemon.assert_healthy();
}

#[test]
fn a_stop_above_a_slow_disk_writes_the_hottest_and_says_how_much() {
    let mut daemon = above_a_slow_disk("64MiB", 2000).start();
    let pool = KvPool::open(daemon.client(), "drain", CHAIN, BLOCK_BYTES).unwrap();
    let hottest_first = fill(&pool, CHAINS);
    let status = daemon.stop_gracefully();
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
    let announced = logged(&daemon, " drained", "blocks_on_nvme");
    let written = logged(&daemon, " drained", "blocks_written");
    let lost = logged(&daemon, " drained", "blocks_lost");
    assert!(logged(&daemon, "so much is only in RAM", "blocks") > 0);
    assert!(lost > 0 && written > 0, "{written} written, {lost} lost");
    assert_eq!(announced + lost, u64::from(CHAINS * CHAIN), "each is written or lost");
    check_after_restart(&mut daemon, &pool, &hottest_first, announced, written);
}

#[test]
fn an_operators_drain_tells_the_truth_even_when_the_daemon_is_killed_then() {
    let mut daemon = above_a_slow_disk("64MiB", 2000).start();
    let pool = KvPool::open(daemon.client(), "drain", CHAIN, BLOCK_BYTES).unwrap();
    let hottest_first = fill(&pool, CHAINS);
    let text = daemon.setup().inspector(&["drain", "--deadline", "2s", "--json"]);
    let drained: kvtide_client::Drained = serde_json::from_str(&text).unwrap();
    println!("{drained:?}");
    assert!(drained.blocks_lost > 0 && drained.blocks_written > 0, "{drained:?}");
    assert_eq!(drained.blocks_on_nvme + drained.blocks_lost, u64::from(CHAINS * CHAIN));
    // What is there is served, and nothing new is stored.
    assert_eq!(pool.found(&hottest_first[0]), CHAIN as usize);
    let stored = pool.store(&pool.keys(1000, CHAIN), CHAIN as usize, PATIENCE);
    assert!(stored.iter().all(|each| *each == Outcome::Busy), "{stored:?}");
    let status = daemon.setup().inspector(&["status"]);
    assert!(status.contains("send new conversations to other nodes"), "{status}");
    daemon.kill9();
    let (announced, written) = (drained.blocks_on_nvme, drained.blocks_written);
    check_after_restart(&mut daemon, &pool, &hottest_first, announced, written);
}

/// As much RAM as a small node has, 1.4 GiB of it hot and dirty, which is less than what presses
/// cold blocks out.
#[test]
#[ignore = "needs 2 GiB of RAM"]
fn two_gib_of_hot_ram_and_five_seconds() {
    let mut daemon = above_a_slow_disk("2GiB", 5000).start();
    let pool = KvPool::open(daemon.client(), "drain", CHAIN, BLOCK_BYTES).unwrap();
    let hottest_first = fill(&pool, 1400);
    assert_eq!(daemon.stop_gracefully().code(), Some(0), "{}", daemon.log());
    let announced = logged(&daemon, " drained", "blocks_on_nvme");
    let written = logged(&daemon, " drained", "blocks_written");
    check_after_restart(&mut daemon, &pool, &hottest_first, announced, written);
}
