//! `ttft`: the time to the first token of a turn whose prompt's start another process computed, by
//! reload from host RAM, by reload from nvme and by computing all of it; and `chats`: how many
//! tokens conversations prefill in all that wander over processes.
//!
//! The engine is the small one of the tests (`tests/smallengine`), on the CPU: its times say how
//! reload and recompute compare here, and nothing about fast engines. In every round each prefix is
//! computed by an engine without a daemon, then reloaded from nvme (after other prompts pushed it
//! out of host RAM; the lookup before and the load itself have to say so), then from host RAM, all
//! in the same run. Every turn's logits, and the KV of every block, are compared to the bit with
//! those of the first recompute. Beside the times stands the arithmetic: bytes by the bandwidth of
//! `memcpy` and of a raw ring, and tokens by the cost of a token, measured in the same rounds.

mod chats;
mod plot;
mod report;
mod stage;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, ensure};
use clap::Args;
use smallengine::{
    process::{EngineProcess, RandomShape, TurnDone},
    random_tokens,
};

pub use self::chats::{ChatsArgs, run as run_chats};
use self::{
    report::{Cell, Measured, Way},
    stage::{ModelArgs, ModelFacts, Stage},
};
use crate::{
    report::{Progress, say, say_json},
    scratch::Scratch,
    tiers::{Loaded, Yardsticks},
};

/// Seeds of the prompts.
const SEED: u64 = 0x7474_6674;

/// Arguments of `ttft`.
#[derive(Args, Clone, Debug)]
pub struct TtftArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Lengths of the prefixes, in tokens: multiples of the tokens of a block. Default: 256, 1024
    /// and 4096 (64 and 128 with `--quick`).
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    prefixes: Vec<usize>,
    /// Tokens of the prompt behind the prefix, which are new in any case: less than a block, so
    /// that no turn stores any. Default: half a block.
    #[arg(long)]
    new_tokens: Option<usize>,
    /// Rounds; medians are reported. Default: 3 (2 with `--quick`).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Folder for daemon and store, on a disk; kept afterwards. Default: a temporary one.
    #[arg(long)]
    store: Option<PathBuf>,
    /// Also draw the result: an SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// A small run with a small model that shows that everything works; its figures mean little.
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
}

/// A prefix and the prompt that begins with it.
struct Prompt {
    prefix: usize,
    tokens: Vec<u32>,
    /// What a recompute came to.
    right: Option<TurnDone>,
}

/// Runs `ttft`.
///
/// # Errors
/// The daemon, an engine, the weights or the file system failed.
pub fn run(args: &TtftArgs) -> anyhow::Result<ExitCode> {
    let usual = if args.quick { RandomShape::Small } else { RandomShape::Smollm2 };
    let facts = args.model.facts(usual)?;
    let per_block = facts.engine.tokens_per_block as usize;
    let new_tokens = args.new_tokens.unwrap_or(per_block.div_ceil(2).min(per_block - 1));
    ensure!(
        (1..per_block).contains(&new_tokens),
        "--new-tokens is {new_tokens}; it must be at least 1 and less than the {per_block} tokens \
         of a block"
    );
    let mut prompts = prompts(args, &facts, new_tokens)?;
    let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
    let blocks = prompts.iter().map(|prompt| prompt.prefix / per_block).sum();
    let scratch = Scratch::make(args.store.as_deref())?;
    let bytes = blocks as u64 * facts.block_bytes();
    let mut stage = Stage::start(&scratch.path().join("daemon"), &facts, bytes)?;
    if !args.json {
        say(&format!("model: {}", facts.words));
    }
    let rounds = args.rounds.unwrap_or(if args.quick { 2 } else { 3 });
    let steps = u64::from(rounds) * prompts.len() as u64 * 3;
    let mut bench = Bench {
        measured: Measured::new(&prompts.iter().map(|prompt| prompt.prefix).collect::<Vec<_>>()),
        yardsticks: yardsticks(scratch.path(), &stage, &facts, blocks)?,
        alone: stage.engine(longest, false)?,
        cached: stage.engine(longest, true)?,
        progress: Progress::new(steps),
        done: 0,
    };
    bench.fill(&stage, &facts, &prompts, longest)?;
    for round in 0..rounds {
        bench.round(round, &mut stage, &mut prompts)?;
        stage.daemon.check_alive()?;
    }
    bench.progress.end();
    let Bench { measured, yardsticks, .. } = bench;
    let status = stage.status()?;
    let about = report::About {
        model: facts.words.clone(),
        engine: "smallengine, on the CPU",
        tokens_per_block: facts.engine.tokens_per_block,
        block_bytes: facts.block_bytes(),
        new_tokens,
        rounds,
        folder: scratch.path().display().to_string(),
        file_system: scratch.kind().to_owned(),
        host_pages: status.host_pages,
        nvme_io: status.nvme_io,
        raw_io: yardsticks.as_ref().map(Yardsticks::ring),
    };
    if let Some(path) = &args.plot {
        write_plot(path, &measured.chart(&about).svg())?;
    }
    if args.json {
        say_json(&measured.json(&about))?;
    } else {
        measured.say(&about);
    }
    stage.daemon.stop()?;
    Ok(if measured.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write_plot(path: &Path, svg: &str) -> anyhow::Result<()> {
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

fn prompts(args: &TtftArgs, facts: &ModelFacts, new_tokens: usize) -> anyhow::Result<Vec<Prompt>> {
    let prefixes = match (args.prefixes.as_slice(), args.quick) {
        ([], false) => vec![256, 1024, 4096],
        ([], true) => vec![64, 128],
        (prefixes, _) => prefixes.to_vec(),
    };
    let per_block = facts.engine.tokens_per_block as usize;
    let mut prompts = Vec::new();
    for prefix in prefixes {
        ensure!(
            (per_block..=1 << 17).contains(&prefix) && prefix.is_multiple_of(per_block),
            "--prefixes: {prefix} is not a multiple of {per_block}, the tokens of a block, or too \
             long"
        );
        let tokens = prefix + new_tokens;
        let tokens = random_tokens(SEED + prefix as u64, tokens, facts.vocabulary());
        prompts.push(Prompt { prefix, tokens, right: None });
    }
    prompts.sort_by_key(|prompt| prompt.prefix);
    Ok(prompts)
}

/// None where blocks cannot be read past the page cache.
fn yardsticks(
    folder: &Path,
    stage: &Stage,
    facts: &ModelFacts,
    blocks: usize,
) -> anyhow::Result<Option<Yardsticks>> {
    if !facts.block_bytes().is_multiple_of(4096) {
        return Ok(None);
    }
    let (pid, bytes) = (stage.daemon.pid(), facts.block_bytes());
    Yardsticks::prepare(folder, pid, bytes, blocks.clamp(8, 256)).map(Some)
}

/// What takes part in the rounds.
struct Bench {
    measured: Measured,
    yardsticks: Option<Yardsticks>,
    /// Computes everything.
    alone: EngineProcess,
    /// Reloads what it can.
    cached: EngineProcess,
    progress: Progress,
    done: u64,
}

impl Bench {
    /// Has all prefixes computed and stored by a third engine, which then ends: what is reloaded is
    /// what another process left.
    fn fill(
        &mut self,
        stage: &Stage,
        facts: &ModelFacts,
        prompts: &[Prompt],
        longest: usize,
    ) -> anyhow::Result<()> {
        let mut first = stage.engine(longest, true)?;
        for prompt in prompts {
            self.progress.note(format!("storing {} tokens", prompt.prefix));
            self.progress.set(0);
            let prefix = prompt.tokens.get(..prompt.prefix).unwrap_or_default();
            let done = first.turn(1, prefix, 1)?;
            let blocks = prompt.prefix / facts.engine.tokens_per_block as usize;
            ensure!(done.turn.blocks_stored == blocks, "not stored: {:?}", done.turn);
        }
        Ok(())
    }

    fn round(
        &mut self,
        round: u32,
        stage: &mut Stage,
        prompts: &mut [Prompt],
    ) -> anyhow::Result<()> {
        if let Some(yardsticks) = &mut self.yardsticks {
            let loaded: Loaded = yardsticks.round(round)?;
            self.measured.add_bandwidth(loaded);
        }
        // Another order in each round, so that a slow moment of the machine hits all of them.
        let turn = round as usize % prompts.len().max(1);
        prompts.rotate_left(turn);
        for prompt in prompts.iter_mut() {
            self.turn(Way::Recompute, prompt)?;
            stage.push_out(&mut self.cached, &prompt.tokens)?;
            self.turn(Way::Nvme, prompt)?;
            self.turn(Way::Host, prompt)?;
        }
        Ok(())
    }

    fn turn(&mut self, way: Way, prompt: &mut Prompt) -> anyhow::Result<()> {
        self.progress.note(format!("{} tokens, {}", prompt.prefix, way.name()));
        self.progress.set(self.done);
        self.done += 1;
        let engine = if way == Way::Recompute { &mut self.alone } else { &mut self.cached };
        let mut done = engine.turn(2, &prompt.tokens, 1)?;
        // Some loads from nvme leave a block there alone.
        for _ in 0..4 {
            if way != Way::Host || done.turn.reuse.host_tokens == prompt.prefix {
                break;
            }
            done = engine.turn(2, &prompt.tokens, 1)?;
        }
        let reuse = done.turn.reuse;
        let from = match way {
            Way::Recompute => done.turn.recomputed_tokens - (prompt.tokens.len() - prompt.prefix),
            Way::Nvme => reuse.nvme_tokens,
            Way::Host => reuse.host_tokens,
        };
        ensure!(
            from == prompt.prefix,
            "{} tokens were to come from {}: {:?}",
            prompt.prefix,
            way.name(),
            done.turn
        );
        let right = prompt.right.get_or_insert_with(|| done.clone());
        self.measured.add(prompt.prefix, way, Cell::of(&done, right));
        Ok(())
    }
}
