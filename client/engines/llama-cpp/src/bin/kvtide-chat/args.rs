//! The command line of `kvtide-chat`, and nothing else: no I/O here.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use kvtide_llama_cpp::{CacheOptions, ContextOptions, KvType, SessionOptions};

const AFTER: &str = "\
Exit codes:
  0  done
  1  it failed
  2  the command line is wrong, or no model is named";

/// A chat with a model of llama.cpp that reloads from kvtided what was computed before, in this
/// process or another one. Without a daemon it computes.
#[derive(Parser, Debug)]
#[command(name = "kvtide-chat", version, after_help = AFTER, max_term_width = 100)]
pub(crate) struct Args {
    /// The model: any GGUF decoder
    #[arg(long, value_name = "FILE")]
    pub(crate) model: Option<PathBuf>,
    /// The daemon's socket [default: $KVTIDE_SOCKET, else the user's own daemon, else
    /// /run/kvtide/kvtide.sock]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// User's messages, one a line, in place of standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) turns: Option<PathBuf>,
    /// The messages so far, as JSON: read at start, written after each turn
    #[arg(long, value_name = "FILE")]
    pub(crate) conversation: Option<PathBuf>,
    /// The system's message, with which a new conversation begins
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Longest answer, tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: usize,
    /// Tokens per block; processes share blocks when it is the same
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_tokens: u32,
    /// Most tokens of the conversation
    #[arg(long, value_name = "N", default_value_t = 4096,
          value_parser = clap::value_parser!(u32).range(16..))]
    pub(crate) ctx: u32,
    /// Most tokens computed at once
    #[arg(long, value_name = "N", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch: u32,
    /// Threads that compute [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    pub(crate) threads: Option<i32>,
    /// Elements of K and V
    #[arg(long, value_enum, default_value_t = Elements::Bf16)]
    pub(crate) kv: Elements,
    /// Flash attention
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) flash_attention: Switch,
    /// Draw the answer at random from this seed, rather than take the likeliest token
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u32>,
    /// How freely it is drawn
    #[arg(long, value_name = "T", default_value_t = 0.8, requires = "seed")]
    pub(crate) temperature: f32,
    /// Neither load nor store, and compute every prompt whole
    #[arg(long)]
    pub(crate) no_cache: bool,
    /// Load all that the daemon has, even what is faster computed
    #[arg(long)]
    pub(crate) load_all: bool,
    /// Write the logits of each answer's first token here, 32-bit floats one behind the other
    #[arg(long, value_name = "FILE")]
    pub(crate) dump_logits: Option<PathBuf>,
    /// Print a JSON value a turn, for programs
    #[arg(long)]
    pub(crate) json: bool,
    /// Flip a bit of this block when it is first imported
    #[cfg(feature = "test-faults")]
    #[arg(long, value_name = "BLOCK")]
    pub(crate) flip_bit: Option<usize>,
}

/// What K and V are kept as.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Elements {
    Bf16,
    F16,
    F32,
}

/// On or off.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Switch {
    On,
    Off,
}

impl Args {
    /// How the session works.
    pub(crate) fn session(&self) -> SessionOptions {
        let defaults = ContextOptions::default();
        let context = ContextOptions {
            ctx: self.ctx,
            batch: self.batch,
            threads: self.threads.unwrap_or(defaults.threads),
            kv: match self.kv {
                Elements::Bf16 => KvType::Bf16,
                Elements::F16 => KvType::F16,
                Elements::F32 => KvType::F32,
            },
            flash_attention: self.flash_attention == Switch::On,
        };
        let cache = (!self.no_cache).then(|| {
            let mut cache = CacheOptions::default();
            if let Some(socket) = &self.socket {
                cache.client.socket.clone_from(socket);
            }
            cache.advised = !self.load_all;
            cache
        });
        SessionOptions { context, block_tokens: self.block_tokens, cache }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
        let args = Args::parse_from(["kvtide-chat", "--no-cache", "--kv", "f16"]);
        assert!(args.session().cache.is_none());
        assert_eq!(args.session().context.kv, KvType::F16);
    }
}
