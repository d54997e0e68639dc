//! The daemon is killed, stopped or hangs under an engine: the engine computes what it cannot
//! reload, comes to the same bits, and reloads again when the daemon is back.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_client::Tier;
use kvtide_tests::inference::assert_same_bits;
use kvtide_tests::{Setup, poll_until};
use rustix::process::Signal;
use smallengine::process::{EngineArgs, EngineProcess};
use smallengine::random_tokens;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(60);
const PROMPT_TOKENS: usize = 200;
const ANSWER_TOKENS: usize = 5;
/// Full blocks of 16 tokens before the prompt's last token.
const RELOADED: usize = 192;

fn engine_args() -> EngineArgs {
    EngineArgs { seed: 21, ..EngineArgs::default() }
}

fn wait_connected(engine: &mut EngineProcess) {
    let connected = || engine.connection().unwrap().connected.then_some(());
    assert!(poll_until(PATIENCE, connected).is_some(), "the engine does not come back");
}

#[test]
fn after_a_kill_and_a_restart_it_reloads_from_nvme() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let prompt = random_tokens(1, PROMPT_TOKENS, 512);
    let alone = setup.inference_alone(&engine_args()).turn(1, &prompt, ANSWER_TOKENS).unwrap();
    let mut engine = setup.inference(&engine_args());
    let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
    assert_same_bits(&done, &alone, "the first turn");
    daemon.wait_written_down();
    for round in 0..2 {
        daemon.kill9();
        let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
        assert_eq!(done.turn.reuse.tokens(), 0, "from a daemon that is dead");
        assert_same_bits(&done, &alone, "without the daemon");
        daemon.restart();

        // Another process, and the one that was there before.
        let mut fresh = setup.inference(&engine_args());
        wait_connected(&mut engine);
        for engine in [&mut fresh, &mut engine] {
            let found = engine.find(&prompt).unwrap();
            assert!(!found.is_empty(), "nothing is left in round {round}");
            let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
            assert_eq!(done.turn.reuse.tokens(), RELOADED);
            assert_same_bits(&done, &alone, "after the restart");
            if found.iter().all(|run| run.tier == Tier::Nvme) {
                assert_eq!(done.turn.reuse.nvme_tokens, RELOADED);
            }
        }
        daemon.assert_healthy();
    }
}

#[test]
fn after_a_restart_the_first_reload_is_from_nvme() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let prompt = random_tokens(2, PROMPT_TOKENS, 512);
    let stored = setup.inference(&engine_args()).turn(1, &prompt, ANSWER_TOKENS).unwrap();
    daemon.wait_written_down();
    daemon.kill9();
    daemon.restart();
    let done = setup.inference(&engine_args()).turn(1, &prompt, ANSWER_TOKENS).unwrap();
    assert_eq!(done.turn.reuse.nvme_tokens, RELOADED);
    assert_same_bits(&done, &stored, "from nvme after a restart");
    daemon.assert_healthy();
}

#[test]
fn a_daemon_that_is_stopped_costs_a_recompute_and_no_error() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let prompt = random_tokens(3, PROMPT_TOKENS, 512);
    let mut engine = setup.inference(&engine_args());
    let stored = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
    assert_eq!(daemon.stop_gracefully().code(), Some(0));
    let before = engine.connection().unwrap();
    for _ in 0..5 {
        let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
        assert_eq!(done.turn.recomputed_tokens, PROMPT_TOKENS);
        assert_same_bits(&done, &stored, "without the daemon");
        println!("stopped: {} us until the engine knew", done.turn.reuse.load_us);
    }
    let after = engine.connection().unwrap();
    assert!(!after.connected);
    assert_eq!(after.calls_answered, before.calls_answered, "nobody could answer");
}

#[test]
fn a_daemon_that_hangs_is_not_waited_for_once_the_breaker_is_open() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let prompt = random_tokens(4, PROMPT_TOKENS, 512);
    // Gives up on a call early; a store in doubt keeps its places, of which there are enough.
    let args = EngineArgs { wait_ms: 300, places: 256, ..engine_args() };
    let mut engine = setup.inference(&args);
    let stored = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
    daemon.freeze();
    for turn in 0..12 {
        let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
        assert_eq!(done.turn.recomputed_tokens, PROMPT_TOKENS);
        assert_same_bits(&done, &stored, "with a daemon that hangs");
        let open = engine.connection().unwrap().breaker_opened > 0;
        println!(
            "turn {turn}: {} us until the engine knew{}",
            done.turn.reuse.load_us,
            if open { ", breaker open" } else { "" }
        );
    }
    let connection = engine.connection().unwrap();
    assert!(connection.breaker_opened > 0 && connection.calls_skipped > 0, "{connection:?}");
    daemon.signal(Signal::CONT);
    let back = poll_until(PATIENCE, || {
        let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
        assert_same_bits(&done, &stored, "while the daemon comes back");
        (done.turn.reuse.tokens() == RELOADED).then_some(())
    });
    assert!(back.is_some(), "nothing is reloaded: {:?}", engine.connection().unwrap());
    daemon.assert_healthy();
}
