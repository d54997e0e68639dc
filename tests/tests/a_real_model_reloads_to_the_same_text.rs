//! SmolLM2-135M in two processes: the second goes on from the KV of the first, from host RAM and
//! from nvme, with the same logits to the bit and the same text as a full recompute.
//!
//! Needs the weights of `tests/smallengine/fetch_weights`, else it is skipped, and says so.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use kvtide_client::Tier;
use kvtide_tests::Setup;
use kvtide_tests::inference::assert_same_bits;
use smallengine::process::EngineArgs;
use smallengine::{Gguf, Role, Tokenizer, chat_tokens, find_weights};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
/// A document to talk about: this repository's README.
const DOCUMENT: &str = include_str!("../../README.md");
const QUESTION: &str = "\n\nIn one sentence: what does kvtide do?";
const PREFIX_TOKENS: usize = 1024;
const TOKENS_PER_BLOCK: u32 = 64;
const ANSWER_TOKENS: usize = 12;

/// A prompt of a document and a question, of which the first `tokens` are the same for all
/// questions.
fn ask(tokenizer: &Tokenizer, tokens: usize, question: &str) -> Vec<u32> {
    let system = "You answer questions about a document.";
    let text = format!("{DOCUMENT}{}", include_str!("../../ARCHITECTURE.md"));
    let mut prompt = chat_tokens(tokenizer, &[(Role::System, system), (Role::User, &text)]);
    assert!(prompt.len() > tokens, "the document has {} tokens", prompt.len());
    prompt.truncate(tokens);
    prompt.extend(tokenizer.encode(question));
    prompt.extend(tokenizer.control("<|im_end|>"));
    prompt.extend(tokenizer.encode("\n"));
    prompt.extend(chat_tokens(tokenizer, &[]));
    prompt
}

#[test]
fn the_same_text_from_host_ram_and_from_nvme() {
    let Some(weights) = find_weights() else {
        eprintln!(
            "SKIPPED: there are no weights for a real model; tests/smallengine/fetch_weights \
             fetches them, or name a GGUF file in KVTIDE_WEIGHTS"
        );
        return;
    };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&weights).unwrap()).unwrap();
    let setup = Setup::new(NODE).option("--host-bytes", "64MiB").option("--nvme-bytes", "512MiB");
    let mut daemon = setup.start();
    let args = EngineArgs {
        weights: Some(weights),
        tokens_per_block: TOKENS_PER_BLOCK,
        places: 20,
        ..EngineArgs::default()
    };
    let prompt = ask(&tokenizer, PREFIX_TOKENS, QUESTION);
    let first = ask(&tokenizer, PREFIX_TOKENS, "\n\nWho is this for?");
    println!("{} tokens, {PREFIX_TOKENS} of them in common", prompt.len());

    let alone = setup.inference_alone(&args).turn(1, &prompt, ANSWER_TOKENS).unwrap();
    println!("recompute: {:?}", alone.turn);
    println!("answer: {}", tokenizer.decode(&alone.answer));
    let done = setup.inference(&args).turn(1, &first, 1).unwrap();
    assert_eq!(done.turn.blocks_stored, PREFIX_TOKENS / TOKENS_PER_BLOCK as usize);

    let mut engine = setup.inference(&args);
    let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
    println!("from host RAM: {:?}", done.turn);
    assert_eq!(done.turn.reuse.host_tokens, PREFIX_TOKENS);
    assert_same_bits(&done, &alone, "from host RAM");
    assert_eq!(tokenizer.decode(&done.answer), tokenizer.decode(&alone.answer));

    daemon.wait_written_down();
    daemon.push_out(|| {
        let found = engine.find(&prompt).unwrap();
        !found.is_empty() && found.iter().all(|run| run.tier == Tier::Nvme)
    });
    let done = engine.turn(1, &prompt, ANSWER_TOKENS).unwrap();
    println!("from nvme: {:?}", done.turn);
    assert_eq!(done.turn.reuse.nvme_tokens, PREFIX_TOKENS);
    assert_same_bits(&done, &alone, "from nvme");
    daemon.assert_healthy();
}

#[test]
fn the_tokenizer_takes_text_apart_and_puts_it_together() {
    let Some(weights) = find_weights() else {
        eprintln!("SKIPPED: there are no weights for a real model");
        return;
    };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&weights).unwrap()).unwrap();
    for text in [DOCUMENT, "", " ", "Grüße, 世界! \u{1f600}\t\r\n  1234 it's", "<|im_end|>"] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text)), text);
    }
    let tokens = tokenizer.encode("The capital of France is");
    assert_eq!(tokens.len(), 5, "{tokens:?}");
    let chat = chat_tokens(&tokenizer, &[(Role::User, "Hi")]);
    assert_eq!(tokenizer.decode(&chat), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(chat[0], tokenizer.control("<|im_start|>").unwrap());
}
