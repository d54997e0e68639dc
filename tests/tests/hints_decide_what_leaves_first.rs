//! What an engine says of its conversations decides which of them leave host RAM first, over the
//! real socket; and whatever it says, no byte is wrong and no limit is passed.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_client::{BlockKey, Conversation, Hints, Outcome, Priority};
use kvtide_tests::{Daemon, KvPool, Setup, poll_until};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(60);
const BLOCK_BYTES: u32 = 64 << 10;

/// Blocks of a conversation. Four of them fill host RAM.
const BLOCKS: u32 = 16;

/// A daemon with room for 64 blocks in RAM, and no nvme.
fn start() -> Daemon {
    Setup::new(NODE)
        .option("--host-bytes", "4MiB")
        .option("--nvme-bytes", "0")
        .without("--segment-bytes")
        .without("--block-bytes-min")
        .config("[host]\npolicy = \"pre\"\n")
        .start()
}

/// A client that says this of all its conversations.
fn engine(daemon: &Daemon, hints: Hints) -> KvPool {
    KvPool::open(daemon.client().with_hints(hints), "r1", BLOCKS, BLOCK_BYTES).unwrap()
}

/// A turn of the conversation `seed`: what is there is looked up, what is not is stored.
fn turn(engine: &KvPool, seed: u32) {
    let keys = engine.keys(seed, BLOCKS);
    let lease = engine.client.lookup(&[(&engine.space, &keys)], PATIENCE);
    let missing = keys.len() - lease.blocks();
    drop(lease);
    // Slots of loads that have just ended may still be in use.
    let stored = poll_until(PATIENCE, || {
        let stored = engine.store(&keys, missing, PATIENCE);
        stored.iter().all(|each| *each != Outcome::Busy).then_some(())
    });
    assert!(stored.is_some(), "no room for conversation {seed}");
}

fn touch(engine: &KvPool, keys: &[BlockKey], hints: Hints) -> u64 {
    engine.client.with_hints(hints).touch(&engine.space, keys).unwrap()
}

fn found(engine: &KvPool, seed: u32) -> usize {
    engine.found(&engine.keys(seed, BLOCKS))
}

#[test]
fn a_finished_conversation_leaves_before_an_open_one() {
    let mut daemon = start();
    let says = [Hints::open(), Hints::finished(), Hints::default()];
    let [open, finished, silent] = says.map(|hints| engine(&daemon, hints));
    // The open one is the oldest: without hints it would go first.
    turn(&open, 1);
    turn(&finished, 2);
    for seed in 3..=5 {
        turn(&silent, seed);
    }
    let left: Vec<usize> = (1..=5).map(|seed| found(&silent, seed)).collect();
    assert_eq!(left, [16, 0, 16, 16, 16]);

    // It is said afterwards that another one is over; the oldest one is still open.
    assert_eq!(touch(&silent, &silent.keys(4, BLOCKS), Hints::finished()), 16);
    turn(&silent, 6);
    let left: Vec<usize> = (1..=6).map(|seed| found(&silent, seed)).collect();
    assert_eq!(left, [16, 0, 16, 0, 16, 16]);
    daemon.assert_healthy();
}

#[test]
fn blocks_of_high_priority_stay_and_dropped_ones_go_at_once() {
    let mut daemon = start();
    let [high, low] = [Priority::High, Priority::Low]
        .map(|priority| engine(&daemon, Hints::default().priority(priority)));
    turn(&high, 1);
    turn(&low, 2);
    for seed in 3..=5 {
        turn(&low, seed);
    }
    let left: Vec<usize> = (1..=5).map(|seed| found(&low, seed)).collect();
    assert_eq!(left, [16, 0, 16, 16, 16]);
    assert_eq!(touch(&low, &low.keys(3, BLOCKS), Hints::drop()), 16);
    assert_eq!(found(&low, 3), 0);
    assert_eq!(touch(&low, &low.keys(3, BLOCKS), Hints::drop()), 0);
    daemon.assert_healthy();
}

#[test]
fn what_is_retained_stays_and_only_as_long_as_asked_for() {
    let mut daemon = start();
    let silent = engine(&daemon, Hints::default());
    let retained = engine(&daemon, Hints::default().retain(PATIENCE));
    turn(&retained, 1);
    // A quarter of RAM may be retained, which this is.
    turn(&retained, 2);
    for seed in 3..=12 {
        turn(&silent, seed);
    }
    assert_eq!((found(&silent, 1), found(&silent, 2)), (16, 0));
    assert_eq!(daemon.stats().0.pins, 1);

    assert_eq!(touch(&silent, &silent.keys(1, BLOCKS), Hints::finished()), 16);
    assert_eq!(daemon.stats().0.pins, 0);
    turn(&engine(&daemon, Hints::default().retain(Duration::from_millis(1))), 20);
    let ended = poll_until(PATIENCE, || (daemon.stats().0.pins == 0).then_some(()));
    assert!(ended.is_some(), "what was retained for a millisecond stays");
    for seed in 30..=36 {
        turn(&silent, seed);
    }
    assert_eq!((found(&silent, 1), found(&silent, 20)), (0, 0));
    daemon.assert_healthy();
}

#[test]
fn wrong_hints_make_nothing_wrong() {
    let mut daemon = start();
    let mut engine = engine(&daemon, Hints::default());
    let states = [
        Conversation::Unknown,
        Conversation::Open,
        Conversation::WaitingForTool,
        Conversation::Finished,
        Conversation::Drop,
    ];
    let priorities = [Priority::Normal, Priority::Low, Priority::High];
    let mut state = 7u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let mut loaded = 0;
    for _ in 0..600 {
        let hints = Hints {
            conversation: states[next(states.len())],
            returns_in_ms: [None, Some(0), Some(u32::MAX), Some(30_000)][next(4)],
            priority: priorities[next(priorities.len())],
            retain_ms: [None, Some(0), Some(50), Some(u64::MAX)][next(4)],
        };
        engine.client = engine.client.with_hints(hints);
        let seed = next(8) as u32;
        let keys = engine.keys(seed, BLOCKS);
        match next(4) {
            0 => {
                engine.client.touch(&engine.space, &keys).unwrap();
            }
            1 => {
                let ticket = engine.client.prefetch(&engine.space, &keys, PATIENCE);
                assert!(engine.client.wait(ticket, PATIENCE).is_ok());
            }
            _ => {
                // Every byte that comes is compared.
                let came = engine.load(&keys, PATIENCE);
                let there = came.iter().take_while(|each| matches!(each, Outcome::Loaded(_)));
                let there = there.count();
                loaded += there;
                engine.store(&keys, keys.len() - there, PATIENCE);
            }
        }
    }
    assert!(loaded > 100, "only {loaded} blocks were loaded");
    let (stats, _) = daemon.stats();
    assert_eq!(stats.corrupt, 0);
    // A quarter of RAM at most is retained, each block of it once.
    assert!(stats.pins <= 16, "{} pins", stats.pins);
    daemon.assert_healthy();
}
