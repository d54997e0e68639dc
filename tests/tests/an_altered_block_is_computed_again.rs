//! Bytes that were altered behind the daemon's back never reach an engine; and bits that are
//! altered behind the engine's back do change its logits, so what is reloaded is used.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use kvtide_tests::Setup;
use kvtide_tests::inference::assert_same_bits;
use smallengine::process::EngineArgs;
use smallengine::{Engine, Weights, best_token, random_tokens};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PROMPT_TOKENS: usize = 250;
const TOKENS_PER_BLOCK: usize = 16;
const RELOADED: usize = 240;

fn engine_args() -> EngineArgs {
    EngineArgs { seed: 31, ..EngineArgs::default() }
}

/// Flips a bit of every copy of these bytes in a file; answers how many there were.
fn flip(file: &Path, bytes: &[u8], at: usize) -> usize {
    let file = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut all = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut all, 0).unwrap();
    let mut copies = 0;
    // Payloads start at pages.
    for offset in (0..all.len()).step_by(4096) {
        if all[offset..].starts_with(bytes) {
            let place = offset + at;
            file.write_all_at(&[all[place] ^ 1], place as u64).unwrap();
            copies += 1;
        }
    }
    file.sync_all().unwrap();
    copies
}

#[test]
fn a_block_altered_on_nvme_is_refused_and_the_turn_is_right() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let prompt = random_tokens(1, PROMPT_TOKENS, 512);
    // Its blocks, to find one of them on nvme.
    let weights = Arc::new(engine_args().weights().unwrap());
    let mut own = engine_args().open(Arc::clone(&weights)).unwrap();
    own.prefill(&prompt).unwrap();
    let stored = setup.inference(&engine_args()).turn(1, &prompt, 6).unwrap();
    assert_eq!(daemon.stop_gracefully().code(), Some(0));
    let altered = 7;
    let block = own.pool().block(own.places()[altered]).unwrap();
    let copies = flip(&setup.store().join("segments.kvt"), &block, 1234);
    assert_eq!(copies, 1, "the block is not on nvme as it lies in the pool");

    daemon.restart();
    let mut engine = setup.inference(&engine_args());
    let done = engine.turn(1, &prompt, 6).unwrap();
    assert_same_bits(&done, &stored, "with an altered block on nvme");
    assert_eq!(done.turn.reuse.tokens(), altered * TOKENS_PER_BLOCK, "up to the altered block");
    let (stats, _) = daemon.stats();
    assert_eq!(stats.corrupt, 1, "the daemon has seen it");
    // It was stored anew by then.
    let done = setup.inference(&engine_args()).turn(1, &prompt, 6).unwrap();
    assert_eq!(done.turn.reuse.tokens(), RELOADED);
    assert_same_bits(&done, &stored, "stored anew");
    daemon.assert_healthy();
}

/// The logits of a prompt, where one bit of a block is flipped between its reload and its use: what
/// an engine would compute with if nobody verified. The daemon cannot be told not to.
fn logits_with(engine: &mut Engine, prompt: &[u32], flipped: Option<(usize, usize)>) -> Vec<u32> {
    let reuse = engine.reload(prompt).unwrap();
    assert_eq!(reuse.tokens(), RELOADED, "all is reloaded");
    if let Some((block, byte)) = flipped {
        let place = engine.places()[block];
        let mut bytes = engine.pool().block(place).unwrap();
        bytes[byte] ^= 1 << 2;
        engine.pool().write_block(place, &bytes).unwrap();
    }
    let logits = engine.prefill(&prompt[reuse.tokens()..]).unwrap();
    println!("flipped: {flipped:?}; likeliest token: {}", best_token(&logits));
    logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn one_flipped_bit_of_a_reloaded_block_changes_the_logits() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let prompt = random_tokens(2, PROMPT_TOKENS, 512);
    let stored = setup.inference(&engine_args()).turn(1, &prompt, 1).unwrap();
    let args = EngineArgs { socket: Some(setup.socket()), ..engine_args() };
    let weights: Arc<Weights> = Arc::new(args.weights().unwrap());
    let mut engine = args.open(weights).unwrap();
    assert!(engine.cache().is_some(), "the daemon is there");
    assert!(logits_with(&mut engine, &prompt, None) == stored.logits, "reloaded");
    for flipped in [(0, 0), (7, 4321), (14, 24_575)] {
        let logits = logits_with(&mut engine, &prompt, Some(flipped));
        assert!(logits != stored.logits, "the bit in {flipped:?} was not used");
    }
    assert!(logits_with(&mut engine, &prompt, None) == stored.logits, "loaded over the flips");
    daemon.assert_healthy();
}
