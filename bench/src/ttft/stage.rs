//! A daemon, engines in processes of their own, and other prompts that push an engine's blocks out
//! of host RAM.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use clap::Args;
use kvtide_client::{
    ClientConfig, ForgetWhat, RegionHandle, RegionLayout, StatusReport, Tier, blocking::Client,
};
use smallengine::{
    Shape, Weights,
    process::{EngineArgs, EngineProcess, RandomShape},
};

use crate::{
    daemon::{Daemon, DaemonSpec, this_program},
    payload::Payload,
    replay::bench_namespace,
};

/// Longest wait for the daemon to have written everything down.
const SETTLE_MAX: Duration = Duration::from_secs(120);
/// Longest time of a call.
const WAIT: Duration = Duration::from_secs(60);
/// Bytes of the blocks that push others out, and how many go in one call.
const FILLER_BYTES: u64 = 1 << 20;
const FILLER_BLOCKS: u32 = 16;

/// Which model.
#[derive(Args, Clone, Debug)]
pub(super) struct ModelArgs {
    /// Weights, a GGUF file of a Llama model (`tests/smallengine/fetch_weights` fetches one).
    /// Default: random ones, which take as long.
    #[arg(long, value_name = "FILE")]
    pub(super) weights: Option<PathBuf>,
    /// Shape of random weights: of SmolLM2-135M, or a small one for tests.
    #[arg(long, value_enum, conflicts_with = "weights")]
    pub(super) shape: Option<RandomShape>,
    /// Tokens of a block.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) tokens_per_block: Option<u32>,
}

/// A model as the bench needs it: what it is, but not its values.
#[derive(Clone, Debug)]
pub(super) struct ModelFacts {
    pub(super) shape: Shape,
    /// What it is, in words.
    pub(super) words: String,
    pub(super) engine: EngineArgs,
}

impl ModelArgs {
    /// Reads the weights' file, if there is one. `usual` is what is taken otherwise.
    pub(super) fn facts(&self, usual: RandomShape) -> anyhow::Result<ModelFacts> {
        let random = self.shape.unwrap_or(usual);
        let engine = EngineArgs {
            weights: self.weights.clone(),
            shape: random,
            tokens_per_block: self.tokens_per_block.unwrap_or(match random {
                RandomShape::Small if self.weights.is_none() => 16,
                _ => 64,
            }),
            ..EngineArgs::default()
        };
        let (shape, words) = match &self.weights {
            None => (random.shape(), "RANDOM WEIGHTS (name real ones with --weights)".to_owned()),
            Some(path) => {
                let weights = Weights::open(path)
                    .with_context(|| format!("cannot use {}", path.display()))?;
                (weights.shape().clone(), path.display().to_string())
            }
        };
        let words = format!(
            "{words}; {} layers, {} kv heads of {}",
            shape.layers, shape.kv_heads, shape.head_dim
        );
        Ok(ModelFacts { shape, words, engine })
    }
}

impl ModelFacts {
    /// Bytes of a block.
    pub(super) fn block_bytes(&self) -> u64 {
        let values = self.shape.layers * 2 * self.shape.kv_heads * self.shape.head_dim;
        values as u64 * 2 * u64::from(self.engine.tokens_per_block)
    }

    /// Number of tokens in the vocabulary.
    pub(super) fn vocabulary(&self) -> u32 {
        u32::try_from(self.shape.vocabulary).unwrap_or(u32::MAX)
    }
}

/// The daemon and what belongs to it.
pub(super) struct Stage {
    pub(super) daemon: Daemon,
    client: Client,
    region: RegionHandle,
    facts: ModelFacts,
    fillers: u64,
}

impl Stage {
    /// Starts a daemon that holds `bytes` of KV in host RAM without having to evict any of it.
    pub(super) fn start(folder: &Path, facts: &ModelFacts, bytes: u64) -> anyhow::Result<Stage> {
        let host_bytes = (bytes + bytes / 2).next_multiple_of(4 << 20).max(32 << 20);
        let spec = DaemonSpec {
            folder: folder.to_owned(),
            store: folder.join("store"),
            host_bytes,
            // Room for what pushes the rest out, several times over: nothing of it is reclaimed.
            nvme_bytes: bytes + host_bytes.saturating_mul(6).max(1 << 30),
            block_bytes_min: facts.block_bytes().min(64 << 10),
            device: None,
            fault: None,
        };
        let (daemon, _) = Daemon::start(spec)?;
        let config =
            ClientConfig { call_timeout: WAIT, ..ClientConfig::new(daemon.spec().socket()) };
        let client = Client::connect(config)?;
        let region = client.create_region(RegionLayout::opaque(FILLER_BLOCKS, FILLER_BYTES))?;
        Ok(Stage { daemon, client, region, facts: facts.clone(), fillers: 0 })
    }

    /// How the daemon runs.
    pub(super) fn status(&self) -> anyhow::Result<StatusReport> {
        Ok(self.client.status()?)
    }

    /// Starts an engine for prompts of up to so many tokens, with or without the daemon.
    pub(super) fn engine(&self, tokens: usize, cached: bool) -> anyhow::Result<EngineProcess> {
        let blocks = u32::try_from(tokens)?.div_ceil(self.facts.engine.tokens_per_block);
        let args = EngineArgs {
            socket: cached.then(|| self.daemon.spec().socket()),
            places: blocks + 4,
            wait_ms: u64::try_from(WAIT.as_millis())?,
            ..self.facts.engine.clone()
        };
        let engine = EngineProcess::start(this_program("__inference")?, &args)?;
        ensure!(engine.is_cached() == cached, "the engine does not find the daemon");
        Ok(engine)
    }

    /// Waits until everything is written down.
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        let until = Instant::now() + SETTLE_MAX;
        loop {
            let catalog = self.client.stats()?.catalog.context("this user is an operator")?;
            if catalog.dirty_blocks == 0 {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("{} blocks were not written down", catalog.dirty_blocks);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stores blocks of other prompts until all of `prompt`'s are on nvme only, and forgets them.
    pub(super) fn push_out(
        &mut self,
        engine: &mut EngineProcess,
        prompt: &[u32],
    ) -> anyhow::Result<()> {
        self.settle()?;
        self.fillers += 1;
        let mut spec = bench_namespace(FILLER_BYTES);
        spec.namespace.model.revision = format!("filler {}", self.fillers);
        let space = self.client.open_namespace(&spec)?;
        let tokens_per_chain = spec.namespace.layout.tokens_per_block * FILLER_BLOCKS;
        let places: Vec<u32> = (0..FILLER_BLOCKS).collect();
        let payload = Payload::new();
        let mut block = vec![0; usize::try_from(FILLER_BYTES)?];
        let most = 8 * self.daemon.spec().host_bytes / (FILLER_BYTES * u64::from(FILLER_BLOCKS));
        for chain in 0..=most {
            if on_nvme(engine, prompt)? {
                if let Some(id) = space.id() {
                    self.client.forget(&ForgetWhat::Namespace(id))?;
                }
                return self.settle();
            }
            let first = u32::try_from(chain)?.wrapping_mul(1 << 20);
            let tokens: Vec<u32> = (first..first + tokens_per_chain).collect();
            let keys = space.chain(&tokens);
            for (place, key) in places.iter().zip(&keys) {
                payload.fill(key, &mut block);
                self.region.write_block(*place, &block)?;
            }
            self.client.store_prefix(&space, 1, &self.region, &keys, &places, WAIT);
            self.settle()?;
        }
        bail!("other prompts did not push the prompt out of host RAM")
    }
}

/// Whether all blocks of a prompt that can be reloaded are there, and on nvme only.
fn on_nvme(engine: &mut EngineProcess, prompt: &[u32]) -> anyhow::Result<bool> {
    let found = engine.find(prompt)?;
    ensure!(!found.is_empty(), "the prompt is not in the cache any more");
    Ok(found.iter().all(|run| run.tier == Tier::Nvme))
}
