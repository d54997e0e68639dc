//! A small inference engine for the tests and benches of kvtide, and an example for engine authors.
//!
//! It runs Llama models on the CPU, in a few hundred lines: [`Weights`] are read from a GGUF file
//! or made from a seed, an [`Engine`] prefills prompts and decodes greedily. It is no fast engine
//! and has no batching: one sequence at a time.
//!
//! What it has to do with kvtide is in `cache.rs`, and is all of it:
//!
//! 1. its KV cache ([`Pool`]) lies in a region, in blocks of
//!    `[layer][k or v][kv head][token][value]` bf16, so what the daemon loads into it needs no
//!    import, and what it computed needs no export;
//! 2. before it prefills a prompt it loads what kvtide has of it (`load_prefix`), and prefills the
//!    rest;
//! 3. after the turn it stores the blocks that are new (`store_prefix`).
//!
//! Only full blocks are stored and loaded, and the last token of a prompt is always computed,
//! because its logits are wanted: of a prompt of n tokens at most (n - 1) / tokens per block blocks
//! are loaded.
//!
//! **Same bits under any split.** A token's KV and logits do not depend on how its prompt was cut
//! into chunks, on the number of threads, or on where the KV before it came from: attention reads
//! what lies in the pool, also for the tokens of the chunk that is being computed, and every sum is
//! taken in an order that depends on the token's position only. So a reload gives the same bits as
//! a recompute, and tests compare bits.

#![forbid(unsafe_code)]

mod cache;
mod chat;
mod engine;
mod gguf;
mod math;
mod model;
mod pool;
pub mod process;
mod tokenizer;
mod weights;

pub use cache::{Cache, namespace};
pub use chat::{Role, chat_tokens, end_of_turn};
pub use engine::{Engine, EngineError, Reuse, Turn, best_token, decode_greedily};
pub use gguf::{Gguf, GgufError};
pub use pool::{Pool, PoolError};
pub use tokenizer::Tokenizer;
pub use weights::{Shape, Weights, WeightsError, find_weights, random_tokens};
