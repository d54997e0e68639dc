//! llama.cpp that reloads what it has already computed: an adapter between llama.cpp and kvtide.
//!
//! A [`Session`] is one conversation in a context of llama.cpp. [`Session::prefill`] makes the KV
//! of a prompt be there: what the session has, then the longest run of whole blocks that the
//! daemon has, verified, then what must be computed. [`Session::store`] gives the daemon the blocks
//! that it lacks. Any other process with the same model file, build and settings ([`identity`])
//! then finds them.
//!
//! ```no_run
//! use kvtide_llama_cpp::{Model, Session, SessionOptions, identity};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = std::path::Path::new("model.gguf");
//! let model = Model::load(path)?;
//! let digest = identity::digest(path)?;
//! let (mut session, _) = Session::open(&model, &digest, SessionOptions::default())?;
//! let prompt = model.tokenize("The capital of France is")?;
//! let prefill = session.prefill(&prompt)?;
//! println!("{} tokens computed, {} blocks loaded", prefill.computed, prefill.loaded.blocks());
//! println!("{} logits", session.context().logits().len());
//! session.store(0);
//! # Ok(())
//! # }
//! ```
//!
//! **When bytes are comparable.** With bfloat16 and flash attention, the default, the KV of a block
//! is a function of the tokens up to its end and of what [`identity::namespace`] names; the tests
//! measure that it is not one of the context's size, of how tokens were cut into batches (or drawn
//! one by one), nor of the number of threads. README.md has what differs with other settings.

#![deny(unsafe_code)]

pub mod cache;
pub mod chat;
mod error;
mod frame;
pub mod identity;
#[expect(unsafe_code, reason = "llama.cpp is C++; this module makes it safe")]
mod llama;
mod session;

pub use cache::CacheOptions;
pub use error::EngineError;
pub use llama::{Context, ContextOptions, KvType, Model, Sampler, Token, build};
pub use session::{NoCache, Prefill, Session, SessionOptions};
