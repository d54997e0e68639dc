//! A turn that lands on another process reloads the KV of its prompt, from host RAM or from nvme,
//! and comes to the same bits as one that computes all of it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use kvtide_client::Tier;
use kvtide_tests::Setup;
use kvtide_tests::inference::assert_same_bits;
use smallengine::process::{EngineArgs, EngineProcess, Found};
use smallengine::random_tokens;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
/// Tokens of the small random model.
const VOCABULARY: u32 = 512;
const PROMPT_TOKENS: usize = 301;
const ANSWER_TOKENS: usize = 8;

fn engine_args(tokens_per_block: u32, chunk: usize) -> EngineArgs {
    let places = 320u32.div_ceil(tokens_per_block) + 4;
    EngineArgs { tokens_per_block, places, chunk, seed: 11, ..EngineArgs::default() }
}

/// Blocks of a prompt that can be reloaded: the full ones before its last token.
fn reloadable(tokens: usize, tokens_per_block: u32) -> usize {
    (tokens - 1) / tokens_per_block as usize
}

fn all_on(found: &[Found], tier: Tier, blocks: usize) -> bool {
    let there: u32 = found.iter().map(|run| run.blocks).sum();
    there as usize == blocks && found.iter().all(|run| run.tier == tier)
}

#[test]
fn another_process_comes_to_the_same_bits_from_host_ram_and_from_nvme() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    // Tokens of a block; chunks of the storing, of the loading and of the recomputing process.
    let cases = [(4, [256, 64, 301]), (16, [256, 1, 97]), (64, [50, 256, 128])];
    for (tokens_per_block, chunks) in cases {
        let [stores, loads, computes] = chunks.map(|chunk| engine_args(tokens_per_block, chunk));
        let prompt = random_tokens(tokens_per_block.into(), PROMPT_TOKENS, VOCABULARY);
        let blocks = reloadable(PROMPT_TOKENS, tokens_per_block);
        let reloaded = blocks * tokens_per_block as usize;

        let alone = setup.inference_alone(&computes).turn(1, &prompt, ANSWER_TOKENS).unwrap();
        let mut first = setup.inference(&stores);
        let done = first.turn(1, &prompt, ANSWER_TOKENS).unwrap();
        assert_same_bits(&done, &alone, "the process that stores");
        assert_eq!(done.turn.reuse.tokens(), 0);
        assert_eq!(done.turn.recomputed_tokens, PROMPT_TOKENS);
        // The last token of the answer was not computed.
        let whole = (PROMPT_TOKENS + ANSWER_TOKENS - 1) / tokens_per_block as usize;
        assert_eq!((done.turn.blocks_stored, done.turn.blocks_not_stored), (whole, 0));
        drop(first);

        let mut from_host = setup.inference(&loads);
        assert!(all_on(&from_host.find(&prompt).unwrap(), Tier::Host, blocks));
        let done = from_host.turn(1, &prompt, ANSWER_TOKENS).unwrap();
        assert_eq!(done.turn.reuse.host_tokens, reloaded);
        assert_eq!(done.turn.recomputed_tokens, PROMPT_TOKENS - reloaded);
        assert_same_bits(&done, &alone, "from host RAM");
        drop(from_host);

        daemon.wait_written_down();
        let mut from_nvme = setup.inference(&loads);
        daemon.push_out(|| all_on(&from_nvme.find(&prompt).unwrap(), Tier::Nvme, blocks));
        let done = from_nvme.turn(1, &prompt, ANSWER_TOKENS).unwrap();
        assert_eq!(done.turn.reuse.nvme_tokens, reloaded);
        assert_same_bits(&done, &alone, "from nvme");
        println!("blocks of {tokens_per_block} tokens: {reloaded} of {PROMPT_TOKENS} reloaded");
    }
    daemon.assert_healthy();
}

fn turn_pair(
    cached: &mut EngineProcess,
    alone: &mut EngineProcess,
    prompt: &[u32],
    what: &str,
) -> usize {
    let done = cached.turn(2, prompt, 4).unwrap();
    assert_same_bits(&done, &alone.turn(2, prompt, 4).unwrap(), what);
    assert_eq!(done.turn.reuse.tokens() + done.turn.recomputed_tokens, prompt.len());
    done.turn.reuse.tokens()
}

#[test]
fn a_prompt_that_begins_alike_reloads_what_is_alike() {
    const TOKENS_PER_BLOCK: u32 = 16;
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let mut first = setup.inference(&engine_args(TOKENS_PER_BLOCK, 256));
    let mut second = setup.inference(&engine_args(TOKENS_PER_BLOCK, 33));
    let mut alone = setup.inference_alone(&engine_args(TOKENS_PER_BLOCK, 256));
    let common = random_tokens(1, 160, VOCABULARY);
    assert_eq!(turn_pair(&mut first, &mut alone, &common, "the first"), 0);
    for (seed, alike) in (2..).zip([0, 1, 15, 16, 17, 95, 96, 144, 159, 160]) {
        let mut branched = common[..alike].to_vec();
        branched.extend(random_tokens(seed, 61, VOCABULARY));
        let reused = turn_pair(&mut second, &mut alone, &branched, "a branch");
        // Where the tails happen to begin alike, more is.
        assert_eq!(reused, alike / 16 * 16, "{alike} tokens are alike");
    }
    // As long as what is there, or shorter: the last token is computed all the same.
    for tokens in [160, 128, 113, 17, 16, 1] {
        let reused = turn_pair(&mut second, &mut alone, &common[..tokens], "a shorter one");
        assert_eq!(reused, reloadable(tokens, TOKENS_PER_BLOCK) * 16);
    }
    daemon.assert_healthy();
}

#[test]
fn other_weights_and_other_block_sizes_share_nothing() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let prompt = random_tokens(5, 100, VOCABULARY);
    let args = engine_args(16, 256);
    assert_eq!(setup.inference(&args).turn(1, &prompt, 2).unwrap().turn.reuse.tokens(), 0);
    for other in [EngineArgs { seed: 12, ..args.clone() }, engine_args(32, 256)] {
        let done = setup.inference(&other).turn(1, &prompt, 2).unwrap();
        assert_eq!(done.turn.reuse.tokens(), 0);
        assert_same_bits(&done, &setup.inference_alone(&other).turn(1, &prompt, 2).unwrap(), "");
    }
    assert_eq!(setup.inference(&args).turn(1, &prompt, 2).unwrap().turn.reuse.tokens(), 96);
    daemon.assert_healthy();
}
