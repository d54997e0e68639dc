//! What the bytes of a block depend on, measured: the claims of `identity` and of README.md.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;

use std::sync::Arc;

use common::{Daemon, alone, long_text, weights};
use kvtide_llama_cpp::cache::CacheOptions;
use kvtide_llama_cpp::{ContextOptions, KvType, Model, Session, SessionOptions, Token, identity};

/// What is compared: the two settings that are exact, and llama.cpp's usual one.
const SETTINGS: [(KvType, bool); 3] =
    [(KvType::Bf16, true), (KvType::F16, false), (KvType::F16, true)];

fn open(model: &Arc<Model>, context: ContextOptions, daemon: Option<&Daemon>) -> Session {
    let cache = daemon.map(|daemon| {
        let mut options = CacheOptions { advised: false, ..CacheOptions::default() };
        options.client.socket = daemon.socket();
        options.client.call_timeout = common::PATIENCE;
        options.load_timeout = common::PATIENCE;
        options.store_timeout = common::PATIENCE;
        options
    });
    let options = SessionOptions { context, block_tokens: 64, cache };
    let (session, without) = Session::open(model, "blake3:test", options).unwrap();
    assert!(without.is_none(), "{without:?}");
    session
}

fn prompt(model: &Model, tokens: usize) -> Vec<Token> {
    let mut prompt = model.tokenize(&long_text()).unwrap();
    prompt.truncate(tokens);
    assert_eq!(prompt.len(), tokens, "the text is too short");
    prompt
}

/// The bytes of all full blocks.
fn blocks(session: &mut Session) -> Vec<Vec<u8>> {
    let blocks: Vec<Vec<u8>> =
        (0..session.tokens().len() / 64).map(|block| session.export(block)).collect();
    assert!(blocks.iter().all(|block| block.len() == session.block_bytes()), "not exported");
    blocks
}

fn differing(one: &[Vec<u8>], other: &[Vec<u8>]) -> usize {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).filter(|(one, other)| one != other).count()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn bytes_depend_on_what_the_namespace_names_and_on_nothing_else() {
    let Some(path) = weights() else { return };
    let _alone = alone();
    let model = Model::load(&path).unwrap();
    let prompt = prompt(&model, 200);
    for (kv, flash_attention) in SETTINGS {
        let usual = ContextOptions { ctx: 1024, batch: 512, threads: 2, kv, flash_attention };
        let name = format!("{} with flash attention {flash_attention}", kv.name());
        let mut session = open(&model, usual, None);
        session.prefill(&prompt).unwrap();
        let expected = blocks(&mut session);
        println!("{name}: {} bytes a block", session.block_bytes());
        let space = session.namespace().clone();
        let others = [
            (
                "context 2048, batch 50, 3 threads",
                ContextOptions { ctx: 2048, batch: 50, threads: 3, ..usual },
            ),
            ("batch 128, 1 thread", ContextOptions { batch: 128, threads: 1, ..usual }),
        ];
        for (what, options) in others {
            let mut session = open(&model, options, None);
            session.prefill(&prompt).unwrap();
            let wrong = differing(&expected, &blocks(&mut session));
            let shared = *session.namespace() == space;
            let blocks = expected.len();
            println!("{name}, {what}: {wrong} of {blocks} blocks differ; shared: {shared}");
            assert!(wrong == 0 || !shared, "{name}, {what}: {wrong} blocks differ, and are shared");
        }
    }
}

#[test]
fn tokens_that_were_drawn_one_by_one_have_the_bytes_of_a_prompt() {
    let Some(path) = weights() else { return };
    let _alone = alone();
    let model = Model::load(&path).unwrap();
    let prompt = prompt(&model, 260);
    for (kv, flash_attention) in SETTINGS {
        let options = ContextOptions { ctx: 1024, batch: 512, threads: 2, kv, flash_attention };
        let name = format!("{} with flash attention {flash_attention}", kv.name());
        let mut whole = open(&model, options, None);
        whole.prefill(&prompt).unwrap();
        let mut drawn = open(&model, options, None);
        drawn.prefill(&prompt[..200]).unwrap();
        for token in &prompt[200..] {
            drawn.append(*token).unwrap();
        }
        let wrong = differing(&blocks(&mut whole), &blocks(&mut drawn));
        let logits = bits(whole.context().logits()) == bits(drawn.context().logits());
        println!(
            "{name}, one by one from 200 on: {wrong} of 4 blocks differ; same logits: {logits}"
        );
        if kv == KvType::Bf16 {
            assert_eq!(wrong, 0, "{name}");
        }
    }
}

#[test]
fn loaded_blocks_are_the_bytes_that_were_computed_and_give_the_same_logits() {
    let Some(path) = weights() else { return };
    let _alone = alone();
    let daemon = Daemon::start("64MiB");
    let model = Model::load(&path).unwrap();
    let digest = identity::digest(&path).unwrap();
    assert!(digest.starts_with("blake3:"));
    let prompt = prompt(&model, 200);
    for (kv, flash_attention) in SETTINGS {
        let options = ContextOptions { ctx: 1024, batch: 512, threads: 2, kv, flash_attention };
        let name = format!("{} with flash attention {flash_attention}", kv.name());
        let mut first = open(&model, options, Some(&daemon));
        let prefill = first.prefill(&prompt[..196]).unwrap();
        assert_eq!(prefill.loaded.blocks(), 0, "{name}: another setting's blocks");
        let stored = first.store(0);
        assert_eq!((stored.stored, stored.refused), (3, 0), "{name}");
        assert_eq!(first.store(0).stored, 0, "{name}: nothing is stored twice");

        let mut whole = open(&model, options, None);
        whole.prefill(&prompt).unwrap();
        let mut second = open(&model, options, Some(&daemon));
        let prefill = second.prefill(&prompt).unwrap();
        assert_eq!((prefill.loaded.host, prefill.computed), (3, 200 - 192), "{name}");
        assert_eq!(differing(&blocks(&mut whole), &blocks(&mut second)), 0, "{name}");
        let same = bits(whole.context().logits()) == bits(second.context().logits());
        println!("{name}: reloaded logits are the same bits: {same}");
        assert!(same, "{name}");

        // Another prompt with the same start: a shorter hit.
        let mut other = prompt.clone();
        other[100] += 1;
        let prefill = second.prefill(&other).unwrap();
        assert_eq!((prefill.own, prefill.computed), (100, 100), "{name}");
        let mut third = open(&model, options, Some(&daemon));
        let prefill = third.prefill(&other).unwrap();
        assert_eq!((prefill.loaded.host, prefill.computed), (1, 200 - 64), "{name}");
        let wrong = differing(&blocks(&mut second), &blocks(&mut third));
        println!("{name}: a shorter hit, computed in other batches: {wrong} of 3 blocks differ");
    }
}
