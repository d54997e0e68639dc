//! Why the engine failed. The cache itself never fails: what goes wrong there is a miss.

use std::io;
use std::path::PathBuf;

/// Why a call of this crate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model's file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// llama.cpp does not take the file as a model.
    #[error("llama.cpp cannot load {}: its message is above; is it a GGUF model?", path.display())]
    Load {
        /// The file.
        path: PathBuf,
    },
    /// llama.cpp could not make a context.
    #[error("llama.cpp cannot make a context of {ctx} tokens: is there enough memory?")]
    Context {
        /// Tokens that were asked for.
        ctx: u32,
    },
    /// Text that llama.cpp cannot take.
    #[error("llama.cpp cannot take this text: {what}")]
    Text {
        /// Why.
        what: &'static str,
    },
    /// A decode failed.
    #[error("llama.cpp could not decode {tokens} tokens at position {position} (code {code})")]
    Decode {
        /// Where the batch began.
        position: usize,
        /// Tokens in it.
        tokens: usize,
        /// What `llama_decode` answered.
        code: i32,
    },
    /// The prompt has no tokens, or more than the context has room for.
    #[error("the prompt has {tokens} tokens, and the context has room for {room}; see --ctx")]
    NoRoom {
        /// Tokens of the prompt.
        tokens: usize,
        /// Room for them.
        room: usize,
    },
    /// A file of messages that is none.
    #[error("{} is no conversation: {source}", path.display())]
    Conversation {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}
