//! What a simulation must know of a trace before it begins.

use std::collections::HashMap;

use kvtide_tiers::catalog::{Conversation, Hints};

use super::SimArgs;
use crate::trace::TraceReader;

/// Requests that tell how many tokens a block has.
const SAMPLE: usize = 256;

/// What the simulated engine tells the core.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum SimHints {
    /// Nothing.
    #[default]
    None,
    /// Whether a later request of the trace continues the path.
    Perfect,
}

/// See the head of this file.
pub(super) struct Future {
    pub(super) block_tokens: u32,
    /// For each request, whether its path is continued. Empty when nobody is to be told.
    continued: Vec<bool>,
}

impl Future {
    pub(super) fn read(args: &SimArgs) -> anyhow::Result<Future> {
        let block_tokens = match args.block_tokens {
            Some(tokens) => tokens,
            None => block_tokens(args)?,
        };
        let continued = match args.hints {
            SimHints::None => Vec::new(),
            SimHints::Perfect => continued(args, block_tokens)?,
        };
        Ok(Future { block_tokens, continued })
    }

    /// What the engine tells of a request.
    pub(super) fn hints(&self, request: u64) -> Hints {
        let conversation = match self.continued.get(request as usize) {
            None => Conversation::Unknown,
            Some(true) => Conversation::Open,
            Some(false) => Conversation::Finished,
        };
        Hints { conversation, ..Hints::default() }
    }
}

/// The power of two that explains most lengths of paths, rounded up or down.
fn block_tokens(args: &SimArgs) -> anyhow::Result<u32> {
    let mut votes: HashMap<u32, usize> = HashMap::new();
    for request in TraceReader::open(&args.trace)?.take(SAMPLE) {
        let request = request?;
        let blocks = request.path.len() as u64;
        for tokens in (0..16).map(|bits| 1u32 << bits) {
            let (whole, rest) = (
                request.input_tokens / u64::from(tokens),
                request.input_tokens % u64::from(tokens),
            );
            if blocks > 1 && (blocks == whole || (rest > 0 && blocks == whole + 1)) {
                *votes.entry(tokens).or_default() += 1;
            }
        }
    }
    let best = votes.into_iter().max_by_key(|(tokens, votes)| (*votes, *tokens));
    Ok(best.map_or(16, |(tokens, _)| tokens))
}

/// Whether a later request goes through each request's last full block.
fn continued(args: &SimArgs, block_tokens: u32) -> anyhow::Result<Vec<bool>> {
    let mut continued = Vec::new();
    let mut ends: HashMap<u64, usize> = HashMap::new();
    for request in TraceReader::open(&args.trace)? {
        let request = request?;
        for id in &request.path {
            if let Some(at) = ends.remove(id)
                && let Some(continued) = continued.get_mut(at)
            {
                *continued = true;
            }
        }
        let full = (request.input_tokens / u64::from(block_tokens)) as usize;
        let end = full.clamp(1, request.path.len().max(1)) - 1;
        if let Some(id) = request.path.get(end) {
            ends.insert(*id, continued.len());
        }
        continued.push(false);
    }
    Ok(continued)
}
