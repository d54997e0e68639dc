//! One conversation: its tokens, their KV, and where that comes from.
//!
//! A prompt's KV comes from the session itself as far as the last prompt was the same, then from
//! the daemon in whole blocks, and the rest is computed. At least one token is always computed,
//! since logits are not stored. A batch always ends at the prompt's last full block: with that, a
//! recomputed and a reloaded prompt end in a batch of the same tokens, and their logits are equal
//! even where llama.cpp computes batches of different sizes differently.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtide_client::{ClientError, Namespace, NamespaceSpec};

use crate::cache::{BlockCache, CacheOptions, Loaded, Stored};
use crate::error::EngineError;
use crate::frame::is_block;
use crate::identity;
use crate::llama::{Context, ContextOptions, Model, Token};

/// How a session works.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// How llama.cpp computes.
    pub context: ContextOptions,
    /// Tokens per block.
    pub block_tokens: u32,
    /// The daemon, or none.
    pub cache: Option<CacheOptions>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        let cache = Some(CacheOptions::default());
        SessionOptions { context: ContextOptions::default(), block_tokens: 64, cache }
    }
}

/// Why a session works without the daemon.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoCache {
    /// Nobody answered, this first time; the client keeps trying.
    #[error(transparent)]
    Daemon(ClientError),
    /// The model cannot be cut into blocks.
    #[error("this model's KV cannot be cut into blocks of {block_tokens} tokens: {why}")]
    Model {
        /// What stands against it.
        why: &'static str,
        /// Tokens per block that were asked for.
        block_tokens: u32,
    },
}

/// Where the KV of a prompt came from, and how long that took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prefill {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens whose KV the session still had.
    pub own: usize,
    /// Blocks from the daemon.
    pub loaded: Loaded,
    /// Tokens that were computed.
    pub computed: usize,
    /// Time until all that the daemon has was in the context, or a miss was clear.
    pub load: Duration,
    /// Time for computing the rest.
    pub compute: Duration,
}

/// A context of llama.cpp, with the daemon behind it.
pub struct Session {
    context: Context,
    cache: Option<BlockCache>,
    namespace: Namespace,
    block_tokens: usize,
    block_bytes: usize,
    /// The tokens whose KV is in the context.
    tokens: Vec<Token>,
    #[cfg(feature = "test-faults")]
    flip: Option<usize>,
}

impl Session {
    /// Makes a context, and connects to the daemon if one is named. `digest` is the one of the
    /// model's file ([`identity::digest`]). The second value says why there is no cache, if so.
    ///
    /// # Errors
    /// When llama.cpp cannot make the context.
    pub fn open(
        model: &Arc<Model>,
        digest: &str,
        options: SessionOptions,
    ) -> Result<(Session, Option<NoCache>), EngineError> {
        let mut context = Context::new(model, options.context)?;
        let block_tokens = options.block_tokens.max(1);
        let namespace = identity::namespace(model, digest, &options.context, block_tokens);
        let tokens_usize = usize::try_from(block_tokens).unwrap_or(usize::MAX);
        let measured = block_bytes(&mut context, tokens_usize)?;
        let (mut cache, mut without) = (None, None);
        match (options.cache, measured) {
            (None, _) => {}
            (_, Err(why)) => without = Some(NoCache::Model { why, block_tokens }),
            (Some(options), Ok(bytes)) => {
                let spec = NamespaceSpec::own(namespace.clone());
                match BlockCache::open(options, spec, bytes as u64) {
                    Ok((opened, first)) => {
                        cache = Some(opened);
                        without = first.map(NoCache::Daemon);
                    }
                    Err(error) => without = Some(NoCache::Daemon(error)),
                }
            }
        }
        let session = Session {
            context,
            cache,
            namespace,
            block_tokens: tokens_usize,
            block_bytes: measured.unwrap_or(0),
            tokens: Vec::new(),
            #[cfg(feature = "test-faults")]
            flip: None,
        };
        Ok((session, without))
    }

    /// The context.
    pub fn context(&mut self) -> &mut Context {
        &mut self.context
    }

    /// The daemon's side, if there is one.
    pub fn cache(&self) -> Option<&BlockCache> {
        self.cache.as_ref()
    }

    /// Whose KV the session computes.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The tokens whose KV is in the context.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Bytes of one block; 0 when the model cannot be cut into blocks.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Forgets the KV in the context. What the daemon has stays.
    pub fn clear(&mut self) {
        self.context.truncate(0);
        self.tokens.clear();
    }

    /// Flips a bit of this block when it is next imported: the first exponent bit of the first
    /// element of K in the first layer, of 16-bit types and models without extended cells. What a
    /// lesser bit changes often vanishes, since llama.cpp quantizes what it multiplies.
    #[cfg(feature = "test-faults")]
    pub fn flip_a_bit_of(&mut self, block: usize) {
        self.flip = Some(block);
    }

    /// Makes the KV of exactly these tokens be in the context, and computes the last one, so that
    /// the context has its logits.
    ///
    /// # Errors
    /// A prompt that is empty or too long, or a decode that failed.
    pub fn prefill(&mut self, prompt: &[Token]) -> Result<Prefill, EngineError> {
        let room = usize::try_from(self.context.options().ctx).unwrap_or(usize::MAX);
        let (Some(last), true) = (prompt.len().checked_sub(1), prompt.len() <= room) else {
            return Err(EngineError::NoRoom { tokens: prompt.len(), room });
        };
        let start = Instant::now();
        let same = self.tokens.iter().zip(prompt).take_while(|(own, new)| own == new).count();
        let mut have = same.min(last);
        let full = last / self.block_tokens * self.block_tokens;
        let (mut own, mut loaded) = (have, Loaded::default());
        if have < full {
            loaded = self.load(prompt.get(..full).unwrap_or(&[]), &mut have);
            own = have - loaded.blocks() * self.block_tokens;
        }
        if !self.context.truncate(have) {
            self.context.truncate(0);
            (have, own, loaded) = (0, 0, Loaded::default());
        }
        self.tokens.clear();
        self.tokens.extend(prompt.get(..have).unwrap_or(&[]));
        let load = start.elapsed();
        self.compute(prompt.get(have..).unwrap_or(&[]), full)?;
        let computed = prompt.len() - have;
        let compute = start.elapsed() - load;
        if let Some(cache) = &self.cache {
            cache.report_prefill(computed, have, compute);
        }
        Ok(Prefill { prompt: prompt.len(), own, loaded, computed, load, compute })
    }

    /// Loads what follows the blocks that the session has. `have` is then how many tokens of the
    /// prompt are in the context.
    fn load(&mut self, prompt: &[Token], have: &mut usize) -> Loaded {
        let Some(cache) = &mut self.cache else { return Loaded::default() };
        let (context, tokens) = (&mut self.context, self.block_tokens);
        #[cfg(feature = "test-faults")]
        let flip = self.flip.take();
        let own = *have / tokens;
        cache.load(prompt, own, |block, bytes| {
            let first = block * tokens;
            if block == own {
                // From here on the context has no more than this.
                *have = first;
                if !context.truncate(first) {
                    *have = 0;
                    return false;
                }
            }
            #[cfg(feature = "test-faults")]
            let flipped = flipped(bytes, tokens, flip == Some(block));
            #[cfg(feature = "test-faults")]
            let bytes = flipped.as_slice();
            let good = is_block(bytes, first, tokens) && context.import(bytes, first, tokens);
            if good {
                *have = first + tokens;
            }
            good
        })
    }

    /// Computes `tokens`, which follow those in the context, in batches of which one ends at
    /// position `full`.
    fn compute(&mut self, tokens: &[Token], full: usize) -> Result<(), EngineError> {
        let batch = usize::try_from(self.context.options().batch.max(1)).unwrap_or(1);
        let before = full.saturating_sub(self.tokens.len()).min(tokens.len());
        let (before, behind) = tokens.split_at_checked(before).unwrap_or((tokens, &[]));
        for part in before.chunks(batch).chain(behind.chunks(batch)) {
            let position = self.tokens.len();
            if let Err(error) = self.context.decode(part, position) {
                self.context.truncate(position);
                return Err(error);
            }
            self.tokens.extend(part);
        }
        Ok(())
    }

    /// Adds one token, so that the context has its logits.
    ///
    /// # Errors
    /// When the context is full, or the decode failed.
    pub fn append(&mut self, token: Token) -> Result<(), EngineError> {
        let room = usize::try_from(self.context.options().ctx).unwrap_or(usize::MAX);
        if self.tokens.len() >= room {
            return Err(EngineError::NoRoom { tokens: self.tokens.len() + 1, room });
        }
        self.compute(&[token], 0)
    }

    /// The bytes of a full block in the context, as they are stored; empty when it is not there.
    pub fn export(&mut self, block: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        if (block + 1).saturating_mul(self.block_tokens) <= self.tokens.len() {
            export(&mut self.context, block, self.block_tokens, self.block_bytes, &mut bytes);
        }
        bytes
    }

    /// Stores the full blocks that the daemon does not have yet.
    pub fn store(&mut self, conversation: u64) -> Stored {
        let Some(cache) = &mut self.cache else { return Stored::default() };
        let full = self.tokens.len() / self.block_tokens * self.block_tokens;
        let tokens = self.tokens.get(..full).unwrap_or(&[]);
        let (context, block_tokens, size) =
            (&mut self.context, self.block_tokens, self.block_bytes);
        cache.store(tokens, conversation, |block, out| {
            export(context, block, block_tokens, size, out);
        })
    }
}

fn export(context: &mut Context, block: usize, tokens: usize, size: usize, out: &mut Vec<u8>) {
    context.export(block * tokens, tokens, out);
    if out.len() != size || !is_block(out, block * tokens, tokens) {
        out.clear();
    }
}

/// Bytes of a block, or why there are none. Two tokens are decoded to find out, which warms
/// llama.cpp up as well: the first is what any block begins with, the second what each token adds.
fn block_bytes(
    context: &mut Context,
    tokens: usize,
) -> Result<Result<usize, &'static str>, EngineError> {
    context.decode(&[0], 0)?;
    context.decode(&[0], 1)?;
    let mut sizes = [0, 0];
    let mut bytes = Vec::new();
    for (size, count) in sizes.iter_mut().zip([1, 2]) {
        context.export(0, count, &mut bytes);
        if is_block(&bytes, 0, count) {
            *size = bytes.len();
        }
    }
    context.truncate(0);
    let model = context.model();
    let window = usize::try_from(model.window()).unwrap_or(usize::MAX);
    let [one, two] = sizes;
    Ok(if !model.is_plain_decoder() {
        Err("it has an encoder, or a recurrent state")
    } else if window > 0 && tokens > window {
        Err("a block is longer than its sliding window")
    } else if one == 0 || two <= one {
        Err("llama.cpp's state of a sequence looks otherwise than expected")
    } else {
        Ok(one + (tokens - 1) * (two - one))
    })
}

#[cfg(feature = "test-faults")]
fn flipped(bytes: &[u8], tokens: usize, flip: bool) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    // Behind four words, three a cell, four of all layers and three of this one.
    let element = 4 * (4 + 3 * tokens + 4 + 3);
    if let Some(byte) = bytes.get_mut(element + 1).filter(|_| flip) {
        *byte ^= 0x40;
    }
    bytes
}
