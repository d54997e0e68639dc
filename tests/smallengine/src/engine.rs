//! The engine: one sequence at a time, prefilled in chunks and decoded greedily.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use kvtide_client::{Outcome, Tier};
use ndarray::Array2;
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::math::rows;
use crate::model::Model;
use crate::pool::{Pool, PoolError};
use crate::weights::Weights;

/// Tokens that are computed at once, unless set otherwise.
const CHUNK_TOKENS: usize = 256;
/// Threads of a computation, unless set otherwise.
const THREADS: usize = 2;

/// Why a sequence cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// It does not fit into the pool.
    #[error(
        "{tokens} tokens do not fit into the pool: {places} of its places, with \
         {tokens_per_block} tokens each, can be used now"
    )]
    PoolFull {
        /// Tokens of the sequence.
        tokens: usize,
        /// Places that can be used.
        places: usize,
        /// Tokens of a block.
        tokens_per_block: usize,
    },
    /// A token that the model does not have.
    #[error("token {token} is not one of the model's {vocabulary}")]
    NoSuchToken {
        /// The token.
        token: u32,
        /// Number of tokens.
        vocabulary: usize,
    },
    /// A prompt without tokens, of which there are no logits.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The pool could not be read or written.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// What was reloaded of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reuse {
    /// Tokens whose KV came from GPU memory.
    pub device_tokens: usize,
    /// Tokens whose KV came from host RAM.
    pub host_tokens: usize,
    /// Tokens whose KV came from nvme.
    pub nvme_tokens: usize,
    /// Bytes of KV that were loaded.
    pub bytes: u64,
    /// How long asking and loading took, microseconds.
    pub load_us: u64,
}

impl Reuse {
    /// Tokens whose KV was reloaded.
    pub fn tokens(&self) -> usize {
        self.device_tokens + self.host_tokens + self.nvme_tokens
    }
}

/// What became of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were reloaded.
    pub reuse: Reuse,
    /// Those of them that were computed.
    pub recomputed_tokens: usize,
    /// From the prompt to the logits of the first token of the answer, microseconds.
    pub first_token_us: u64,
    /// Blocks that were given to kvtide, which has them now.
    pub blocks_stored: usize,
    /// Blocks that kvtide did not take.
    pub blocks_not_stored: usize,
}

/// An engine, with or without a daemon.
pub struct Engine {
    weights: Arc<Weights>,
    pool: Pool,
    cache: Option<Cache>,
    chunk: usize,
    threads: usize,
    /// Whether the daemon is told how long prefills take.
    reports: bool,
    /// The sequence: tokens whose KV is in the pool.
    tokens: Vec<u32>,
    /// Place of each of its blocks.
    places: Vec<u32>,
    /// Its first blocks that kvtide has.
    known: usize,
}

impl Engine {
    /// An engine whose KV lies in this pool, which is one of [`Cache::pool`] when there is a cache.
    pub fn new(weights: Arc<Weights>, pool: Pool, cache: Option<Cache>) -> Engine {
        let (tokens, places) = (Vec::new(), Vec::new());
        let (chunk, threads) = (CHUNK_TOKENS, THREADS);
        let reports = false;
        Engine { weights, pool, cache, chunk, threads, reports, tokens, places, known: 0 }
    }

    /// Tells the daemon how long prefills take. It then advises to compute what is faster computed
    /// than loaded, which is followed.
    #[must_use]
    pub fn with_reports(mut self) -> Engine {
        self.reports = true;
        self
    }

    /// Sets how many tokens are computed at once, and by how many threads. Changes no result.
    #[must_use]
    pub fn with_chunk(mut self, tokens: usize, threads: usize) -> Engine {
        self.chunk = tokens.max(1);
        self.threads = threads.max(1);
        self
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The cache.
    pub fn cache(&self) -> Option<&Cache> {
        self.cache.as_ref()
    }

    /// Place of each block of the sequence, the last of which may be partly filled.
    pub fn places(&self) -> &[u32] {
        &self.places
    }

    /// One turn: reloads what there is of the prompt, computes the rest, decodes `answer` tokens
    /// greedily, and stores the blocks that are new. Answers the logits of the first token of the
    /// answer, and the answer.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing that the daemon does is one.
    pub fn turn(
        &mut self,
        conversation: u64,
        prompt: &[u32],
        answer: usize,
    ) -> Result<(Turn, Vec<f32>, Vec<u32>), EngineError> {
        let start = Instant::now();
        let reuse = self.reload(prompt)?;
        let rest = prompt.get(reuse.tokens()..).unwrap_or_default();
        let computing = Instant::now();
        let logits = self.prefill(rest)?;
        let took = computing.elapsed();
        let first_token_us = micros(start);
        if let Some(cache) = self.cache.as_ref().filter(|_| self.reports) {
            cache.report_prefill(rest.len(), reuse.tokens(), took);
        }
        let answer = decode_greedily(self, logits.clone(), answer)?;
        let outcomes = self.keep(conversation);
        let stored = |outcome: &&Outcome| matches!(outcome, Outcome::Stored | Outcome::Present);
        let blocks_stored = outcomes.iter().filter(stored).count();
        let turn = Turn {
            prompt_tokens: prompt.len(),
            reuse,
            recomputed_tokens: rest.len(),
            first_token_us,
            blocks_stored,
            blocks_not_stored: outcomes.len() - blocks_stored,
        };
        Ok((turn, logits, answer))
    }

    /// Starts a sequence with what kvtide has of this prompt.
    ///
    /// # Errors
    /// The prompt does not fit into the pool.
    pub fn reload(&mut self, prompt: &[u32]) -> Result<Reuse, EngineError> {
        let start = Instant::now();
        self.tokens.clear();
        self.places.clear();
        self.known = 0;
        let (Some(cache), Some(region)) = (&self.cache, self.pool.as_region()) else {
            return Ok(Reuse::default());
        };
        self.places = self.places_for(prompt.len())?;
        let loaded = cache.load(region, prompt, &self.places);
        let per_block = self.pool.tokens_per_block();
        let mut reuse = Reuse::default();
        for outcome in loaded.outcomes.iter().take(loaded.blocks) {
            match outcome {
                Outcome::Loaded(Tier::Device) => reuse.device_tokens += per_block,
                Outcome::Loaded(Tier::Host) => reuse.host_tokens += per_block,
                _ => reuse.nvme_tokens += per_block,
            }
        }
        reuse.bytes = loaded.blocks as u64 * self.pool.block_bytes() as u64;
        // Into the places of a load that was given up the daemon may still write.
        self.places.truncate(loaded.blocks);
        self.known = loaded.blocks;
        self.tokens.extend(prompt.iter().take(reuse.tokens()));
        reuse.load_us = micros(start);
        Ok(reuse)
    }

    /// Computes the tokens that follow in the sequence; the logits of the last.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let mut last = None;
        self.compute(tokens, |model, hidden| {
            last = Some(model.logits(rows(hidden, hidden.nrows() - 1..hidden.nrows())));
        })?;
        last.map(|logits| logits.iter().copied().collect()).ok_or(EngineError::EmptyPrompt)
    }

    /// As [`Engine::prefill`]; the logits of each of the tokens, in order, are given to `each`.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn prefill_each(
        &mut self,
        tokens: &[u32],
        mut each: impl FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        self.compute(tokens, |model, hidden| {
            for row in model.logits(hidden.view()).rows() {
                each(row.as_slice().unwrap_or_default());
            }
        })
    }

    fn compute(
        &mut self,
        tokens: &[u32],
        mut each_chunk: impl FnMut(&Model<'_>, &Array2<f32>),
    ) -> Result<(), EngineError> {
        let vocabulary = self.weights.shape().vocabulary;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(EngineError::NoSuchToken { token: *token, vocabulary });
        }
        self.places = self.places_for(self.tokens.len() + tokens.len())?;
        for chunk in tokens.chunks(self.chunk) {
            let model = Model {
                weights: &self.weights,
                pool: &self.pool,
                places: &self.places,
                threads: self.threads,
            };
            let hidden = model.forward(self.tokens.len(), chunk)?;
            each_chunk(&model, &hidden);
            self.tokens.extend(chunk);
        }
        Ok(())
    }

    /// Stores the full blocks of the sequence that kvtide does not have yet. What it does not take
    /// is only a later miss.
    pub fn keep(&mut self, conversation: u64) -> Vec<Outcome> {
        let (Some(cache), Some(region)) = (&self.cache, self.pool.as_region()) else {
            return Vec::new();
        };
        let outcomes = cache.store(region, conversation, &self.tokens, &self.places, self.known);
        let has = |outcome: &&Outcome| matches!(outcome, Outcome::Stored | Outcome::Present);
        self.known += outcomes.iter().take_while(has).count();
        outcomes
    }

    /// The sequence's places, and as many more as `tokens` tokens need.
    fn places_for(&self, tokens: usize) -> Result<Vec<u32>, EngineError> {
        let tokens_per_block = self.pool.tokens_per_block();
        let wanted = tokens.div_ceil(tokens_per_block);
        let doubt = self.pool.as_region().map(|region| region.places_in_doubt());
        let mut taken: HashSet<u32> = doubt.unwrap_or_default().into_iter().collect();
        taken.extend(&self.places);
        let mut places = self.places.clone();
        let free = (0..self.pool.places()).filter(|place| !taken.contains(place));
        places.extend(free.take(wanted.saturating_sub(places.len())));
        if places.len() < wanted {
            let places = places.len();
            return Err(EngineError::PoolFull { tokens, places, tokens_per_block });
        }
        Ok(places)
    }
}

/// Goes on from the logits of a sequence's last token by `count` of the likeliest tokens.
///
/// # Errors
/// See [`EngineError`].
pub fn decode_greedily(
    engine: &mut Engine,
    mut logits: Vec<f32>,
    count: usize,
) -> Result<Vec<u32>, EngineError> {
    let mut answer = Vec::new();
    while answer.len() < count {
        let token = best_token(&logits);
        answer.push(token);
        // The last one is not computed: nobody asks for what follows it.
        if answer.len() < count {
            logits = engine.prefill(&[token])?;
        }
    }
    Ok(answer)
}

/// The likeliest token; the first of several.
pub fn best_token(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, logit) in (0u32..).zip(logits) {
        if *logit > best.1 {
            best = (token, *logit);
        }
    }
    best.0
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::namespace;
    use crate::weights::Shape;

    fn engine(weights: &Arc<Weights>, tokens_per_block: u32, places: u32) -> Engine {
        let layout = namespace(weights, tokens_per_block).layout;
        Engine::new(Arc::clone(weights), Pool::own(&layout, places).unwrap(), None)
    }

    fn prompt(tokens: usize) -> Vec<u32> {
        (0..tokens as u32).map(|at| at.wrapping_mul(2_654_435_761) >> 23).collect()
    }

    fn bits(logits: &[f32]) -> Vec<u32> {
        logits.iter().map(|logit| logit.to_bits()).collect()
    }

    #[test]
    fn logits_and_blocks_are_the_same_bits_under_any_split() {
        let weights = Arc::new(Weights::random(&Shape::small(), 7));
        let prompt = prompt(301);
        let mut whole = engine(&weights, 16, 20).with_chunk(1000, 1);
        let logits = whole.prefill(&prompt).unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()));
        assert!(logits.iter().any(|logit| logit.to_bits() != logits[0].to_bits()));
        let mut all = Vec::new();
        whole.reload(&[]).unwrap();
        whole.prefill_each(&prompt, |row| all.push(bits(row))).unwrap();
        assert_eq!(all.len(), prompt.len());
        for (chunk, threads) in [(1, 1), (7, 2), (64, 2), (128, 3), (300, 2)] {
            let mut split = engine(&weights, 16, 19).with_chunk(chunk, threads);
            let mut at = 0;
            split
                .prefill_each(&prompt, |row| {
                    assert!(all[at] == bits(row), "token {at}, chunks of {chunk}");
                    at += 1;
                })
                .unwrap();
            for place in split.places().to_vec() {
                let same = split.pool().block(place).unwrap() == whole.pool().block(place).unwrap();
                assert!(same, "block {place}, chunks of {chunk}");
            }
        }
        for tokens_per_block in [1, 4, 5, 64] {
            let mut other = engine(&weights, tokens_per_block, 302).with_chunk(50, 2);
            assert!(bits(&other.prefill(&prompt).unwrap()) == bits(&logits));
        }
    }

    #[test]
    fn every_block_before_a_token_counts() {
        let weights = Arc::new(Weights::random(&Shape::small(), 7));
        let prompt = prompt(100);
        let mut engine = engine(&weights, 16, 8);
        engine.prefill(&prompt[..99]).unwrap();
        let logits = engine.prefill(&prompt[99..]).unwrap();
        for place in 0..6 {
            let mut engine = Engine::new(
                Arc::clone(&weights),
                Pool::own(&namespace(&weights, 16).layout, 8).unwrap(),
                None,
            );
            engine.prefill(&prompt[..99]).unwrap();
            let mut block = engine.pool().block(place).unwrap();
            block[777] ^= 0x40;
            engine.pool().write_block(place, &block).unwrap();
            let other = engine.prefill(&prompt[99..]).unwrap();
            assert!(bits(&other) != bits(&logits), "block {place} is not read");
        }
    }

    #[test]
    fn greedy_answers_do_not_depend_on_how_they_were_reached() {
        let weights = Arc::new(Weights::random(&Shape::small(), 3));
        let prompt = prompt(40);
        let mut one = engine(&weights, 8, 16);
        let (turn, _, answer) = one.turn(1, &prompt, 12).unwrap();
        assert_eq!((turn.recomputed_tokens, turn.reuse), (40, Reuse::default()));
        let whole: Vec<u32> = prompt.iter().chain(&answer).copied().collect();
        for at in 0..answer.len() {
            let mut other = engine(&weights, 8, 16);
            let logits = other.prefill(&whole[..40 + at]).unwrap();
            assert_eq!(best_token(&logits), answer[at]);
        }
        let distinct: HashSet<&u32> = answer.iter().collect();
        assert!(distinct.len() > 3, "an answer that could not show much: {answer:?}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let weights = Arc::new(Weights::random(&Shape::small(), 3));
        let mut engine = engine(&weights, 8, 2);
        assert!(matches!(engine.prefill(&[1; 17]), Err(EngineError::PoolFull { .. })));
        assert!(matches!(engine.prefill(&[512]), Err(EngineError::NoSuchToken { .. })));
        assert!(matches!(engine.prefill(&[]), Err(EngineError::EmptyPrompt)));
        assert!(engine.prefill(&[1; 16]).is_ok());
        assert!(matches!(engine.turn(1, &[], 0), Err(EngineError::EmptyPrompt)));
    }
}
