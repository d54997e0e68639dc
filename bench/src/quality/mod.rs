//! `quality`: what keeping KV in fewer bits costs, on a real model and a fixed text.
//!
//! The start of the text is computed and stored through a real daemon, once for each way of keeping
//! it; another engine reloads it and is then given the text's next tokens one after the other
//! (teacher forcing). Its logits for each of them stand against those after an exact reload:
//! Kullback-Leibler divergence, whether the likeliest token is the same, and perplexity. What is
//! reloaded exactly has to give the very bits of a recompute. Beside it: bytes kept for each byte
//! of KV, and how fast blocks are stored and loaded.
//!
//! The lossless codec is measured on the same blocks, as nvme would have them, without a drive.

mod compare;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use clap::Args;
use kvtide_client::{
    ClientConfig, ElementType, Narrow, Narrowed, Outcome, PlaneOrder, Wide, blocking::Client,
};
use kvtide_tiers::{block::Codec, codec};
use serde_json::{Value, json};
use smallengine::{Cache, Engine, Gguf, Pool, Shape, Tokenizer, Weights, namespace, random_tokens};

use self::compare::{Against, Logits};
use crate::{
    daemon::{Daemon, DaemonSpec},
    report::{Progress, Table, say, say_json},
    scratch::Scratch,
};

/// The text, unless another one is named: prose that the model has not seen.
const TEXT: &str = include_str!("../../../ARCHITECTURE.md");
/// Longest time of a call.
const WAIT: Duration = Duration::from_secs(60);
/// Times that blocks are stored and loaded, for the figures of speed.
const REPEATS: usize = 5;

/// Arguments of `quality`.
#[derive(Args, Clone, Debug)]
pub struct QualityArgs {
    /// Weights, a GGUF file of a Llama model (`tests/smallengine/fetch_weights` fetches one).
    /// Without them the model is random, and only the run itself is of interest.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// A text. Default: this project's ARCHITECTURE.md.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of the text that are stored and reloaded: whole blocks. Default: 1024 (64 with
    /// `--quick`).
    #[arg(long)]
    context: Option<usize>,
    /// Tokens behind them whose logits are compared. Default: 256 (16 with `--quick`).
    #[arg(long)]
    scored: Option<usize>,
    /// Tokens of a block. Default: 64 (16 with `--quick`).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    tokens_per_block: Option<u32>,
    /// Folder for daemon and store, on a disk; kept afterwards. Default: a temporary one.
    #[arg(long)]
    store: Option<PathBuf>,
    /// A small run that shows that everything works; its figures mean little.
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// A model and the tokens that it is given.
struct Subject {
    weights: Arc<Weights>,
    words: String,
    context: Vec<u32>,
    scored: Vec<u32>,
    tokens_per_block: u32,
}

/// One way of keeping KV.
struct Row {
    name: &'static str,
    /// Bytes kept for each byte of KV.
    ratio: f64,
    against: Option<Against>,
    store_gb_s: f64,
    load_gb_s: f64,
}

/// Runs `quality`.
///
/// # Errors
/// The daemon, the engine, the weights or the file system failed; a reload that is to be exact was
/// not.
pub fn run(args: &QualityArgs) -> anyhow::Result<ExitCode> {
    let subject = subject(args)?;
    let scratch = Scratch::make(args.store.as_deref())?;
    let mut daemon = start(scratch.path(), &subject)?;
    let progress = Progress::new(5);
    progress.note("computing the text".to_owned());
    let (right, blocks) = recompute(&subject)?;
    let mut rows = Vec::new();
    let ways = [("raw", None), ("int8", Some(Narrow::Int8)), ("fp8", Some(Narrow::Fp8))];
    for (at, (name, narrow)) in (1..).zip(ways) {
        progress.note(format!("{name}: store, reload, compare"));
        progress.set(at);
        rows.push(reload(&daemon, &subject, name, narrow, &right)?);
    }
    progress.note("lz4".to_owned());
    progress.set(4);
    rows.insert(1, lz4(&blocks)?);
    progress.end();
    report(args, &subject, &right, &rows)?;
    daemon.stop()?;
    Ok(ExitCode::SUCCESS)
}

fn subject(args: &QualityArgs) -> anyhow::Result<Subject> {
    let pick = |value: Option<usize>, usual, quick| {
        value.unwrap_or(if args.quick { quick } else { usual })
    };
    let (context, scored) = (pick(args.context, 1024, 64), pick(args.scored, 256, 16));
    let usual = if args.quick { 16 } else { 64 };
    let tokens_per_block = args.tokens_per_block.unwrap_or(usual);
    ensure!(
        context > 0 && context.is_multiple_of(tokens_per_block as usize) && scored > 0,
        "--context is {context}; it must be a multiple of the {tokens_per_block} tokens of a block"
    );
    let (weights, tokens, words) = match &args.weights {
        None => {
            let shape = Shape::small();
            let tokens = random_tokens(1, context + scored, shape.vocabulary as u32);
            (Weights::random(&shape, 1), tokens, "RANDOM WEIGHTS: the figures mean nothing".into())
        }
        Some(path) => {
            let file =
                Gguf::open(path).with_context(|| format!("cannot use {}", path.display()))?;
            let text = match &args.text {
                None => TEXT.to_owned(),
                Some(path) => std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?,
            };
            let tokens = Tokenizer::from_gguf(&file)?.encode(&text);
            (Weights::from_gguf(&file)?, tokens, path.display().to_string())
        }
    };
    ensure!(
        tokens.len() >= context + scored,
        "the text has {} tokens; {context} and {scored} are needed: give a longer one, or lower \
         --context or --scored",
        tokens.len()
    );
    let (context, rest) = tokens.split_at(context);
    Ok(Subject {
        weights: Arc::new(weights),
        words,
        context: context.to_vec(),
        scored: rest.get(..scored).unwrap_or(rest).to_vec(),
        tokens_per_block,
    })
}

impl Subject {
    fn blocks(&self) -> usize {
        self.context.len() / self.tokens_per_block as usize
    }

    fn places(&self) -> u32 {
        let tokens = (self.context.len() + self.scored.len()) as u32;
        tokens.div_ceil(self.tokens_per_block)
    }

    /// The token that follows each of those scored, but the last.
    fn following(&self) -> &[u32] {
        self.scored.get(1..).unwrap_or_default()
    }
}

fn start(folder: &Path, subject: &Subject) -> anyhow::Result<Daemon> {
    let folder = folder.join("daemon");
    let spec = DaemonSpec {
        store: folder.join("store"),
        folder,
        host_bytes: 1 << 30,
        nvme_bytes: 2 << 30,
        block_bytes_min: 4096,
        device: None,
        fault: None,
    };
    ensure!(
        subject.blocks() < 4096,
        "a context of {} blocks does not fit into the host tier of this run",
        subject.blocks()
    );
    Ok(Daemon::start(spec)?.0)
}

/// The logits that all others are compared with, and the blocks that they stand on.
fn recompute(subject: &Subject) -> anyhow::Result<(Logits, Vec<Vec<u8>>)> {
    let layout = namespace(&subject.weights, subject.tokens_per_block).layout;
    let pool = Pool::own(&layout, subject.places())?;
    let mut engine = Engine::new(Arc::clone(&subject.weights), pool, None);
    engine.prefill(&subject.context)?;
    let logits = score(&mut engine, subject)?;
    let places = engine.places().iter().take(subject.blocks());
    let blocks = places.map(|place| engine.pool().block(*place)).collect::<Result<_, _>>()?;
    Ok((logits, blocks))
}

fn score(engine: &mut Engine, subject: &Subject) -> anyhow::Result<Logits> {
    let mut logits = Logits::default();
    engine.prefill_each(&subject.scored, |each| logits.push(each))?;
    Ok(logits)
}

/// An engine whose blocks the daemon keeps in this way.
fn engine(daemon: &Daemon, subject: &Subject, narrow: Option<Narrow>) -> anyhow::Result<Engine> {
    let mut namespace = namespace(&subject.weights, subject.tokens_per_block);
    if let Some(narrow) = narrow {
        let order = PlaneOrder::HeadsFirst;
        namespace.layout.element =
            ElementType::Narrowed(Narrowed { wide: Wide::Bf16, narrow, order });
    }
    let config = ClientConfig::new(daemon.spec().socket());
    let cache = Cache::open(config, namespace, WAIT)?;
    let pool = cache.pool(subject.places())?;
    Ok(Engine::new(Arc::clone(&subject.weights), pool, Some(cache)))
}

fn reload(
    daemon: &Daemon,
    subject: &Subject,
    name: &'static str,
    narrow: Option<Narrow>,
    right: &Logits,
) -> anyhow::Result<Row> {
    let raw_bytes = {
        let first = engine(daemon, subject, narrow)?;
        subject.blocks() as f64 * first.pool().block_bytes() as f64
    };
    let asker = Client::connect(ClientConfig::new(daemon.spec().socket()))?;
    let bytes_in = || -> anyhow::Result<u64> {
        let stats = asker.stats()?.catalog.context("this user is an operator of its own daemon")?;
        Ok(stats.host.bytes_in)
    };
    // The sequence is longer than the context by what is scored, none of which is stored.
    let mut first = engine(daemon, subject, narrow)?;
    first.prefill(&subject.context)?;
    let before = bytes_in()?;
    let start = Instant::now();
    let stored = first.keep(1);
    let store = start.elapsed().as_secs_f64();
    ensure!(
        stored.len() == subject.blocks() && stored.iter().all(|each| *each == Outcome::Stored),
        "{name}: not all blocks were stored: {stored:?}"
    );
    let kept = (bytes_in()? - before) as f64;
    let mut prompt = subject.context.clone();
    prompt.extend(subject.scored.first());
    let mut second = engine(daemon, subject, narrow)?;
    let mut times = Vec::new();
    for _ in 0..REPEATS {
        let reuse = second.reload(&prompt)?;
        ensure!(
            reuse.tokens() == subject.context.len(),
            "{name}: {} of {} tokens were reloaded",
            reuse.tokens(),
            subject.context.len()
        );
        times.push(reuse.load_us as f64 / 1e6);
    }
    times.sort_by(f64::total_cmp);
    let load = times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY);
    let logits = score(&mut second, subject)?;
    let against = Against::of(right, &logits, subject.following());
    ensure!(
        narrow.is_some() || against.equal_bits,
        "the logits after an exact reload are not those of a recompute: please report this"
    );
    Ok(Row {
        name,
        ratio: kept / raw_bytes,
        against: Some(against),
        store_gb_s: raw_bytes / store / 1e9,
        load_gb_s: raw_bytes / load / 1e9,
    })
}

/// The codec that nvme may use, on the same blocks.
fn lz4(blocks: &[Vec<u8>]) -> anyhow::Result<Row> {
    let raw_bytes: usize = blocks.iter().map(Vec::len).sum();
    let (mut kept, mut encoding, mut decoding) = (0, 0.0, 0.0);
    for block in blocks {
        let start = Instant::now();
        let encoded = codec::encode(Codec::Lz4, ElementType::Bf16, block);
        encoding += start.elapsed().as_secs_f64();
        let Some(encoded) = encoded else {
            kept += block.len();
            continue;
        };
        kept += encoded.len();
        let mut again = vec![0; block.len()];
        let start = Instant::now();
        codec::decode(Codec::Lz4, ElementType::Bf16, &encoded, &mut again)?;
        decoding += start.elapsed().as_secs_f64();
        ensure!(again == *block, "lz4 changed a block: please report this");
    }
    Ok(Row {
        name: "lz4",
        ratio: kept as f64 / raw_bytes as f64,
        against: None,
        store_gb_s: raw_bytes as f64 / encoding / 1e9,
        load_gb_s: raw_bytes as f64 / decoding / 1e9,
    })
}

fn report(
    args: &QualityArgs,
    subject: &Subject,
    right: &Logits,
    rows: &[Row],
) -> anyhow::Result<()> {
    let perplexity = right.perplexity(subject.following());
    if args.json {
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        return Ok(say_json(&json!({
            "model": subject.words,
            "engine": "smallengine",
            "context_tokens": subject.context.len(),
            "scored_tokens": subject.scored.len(),
            "tokens_per_block": subject.tokens_per_block,
            "perplexity": perplexity,
            "rows": rows,
        }))?);
    }
    say(&format!("model: {}; engine: smallengine, on the CPU", subject.words));
    say(&format!(
        "{} tokens reloaded in blocks of {}, {} compared; perplexity after a recompute {:.3}",
        subject.context.len(),
        subject.tokens_per_block,
        subject.scored.len(),
        perplexity
    ));
    let mut table = Table::default();
    table.row([
        "kept as",
        "bytes / raw",
        "KL mean",
        "KL p99",
        "top-1 %",
        "perplexity %",
        "store GB/s",
        "load GB/s",
    ]);
    for row in rows {
        table.row(row.cells());
    }
    table.say();
    say("");
    say("KL: of the next token's distribution after an exact reload from that after this one,\n\
         nats. raw and lz4 lose nothing; lz4's speeds are those of the codec alone, as nvme uses\n\
         it. int8 and fp8 are kept so in host RAM and on nvme; speeds are of the KV as the engine\n\
         has it, through the daemon, one call for all blocks, host RAM.");
    Ok(())
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let mut cells = vec![self.name.to_owned(), format!("{:.3}", self.ratio)];
        match &self.against {
            Some(against) => cells.extend([
                format!("{:.1e}", against.kl_mean),
                format!("{:.1e}", against.kl_p99),
                format!("{:.1}", against.same_top_percent),
                format!("{:+.2}", against.perplexity_percent),
            ]),
            None => cells.extend(["0".into(), "0".into(), "100.0".into(), "+0.00".into()]),
        }
        cells.extend([self.store_gb_s, self.load_gb_s].map(|speed| format!("{speed:.2}")));
        cells
    }

    fn json(&self) -> Value {
        let against = self.against.clone().unwrap_or_else(Against::equal);
        json!({
            "kept_as": self.name,
            "bytes_to_raw": self.ratio,
            "equal_bits": against.equal_bits,
            "kl_mean": against.kl_mean,
            "kl_p99": against.kl_p99,
            "same_top_percent": against.same_top_percent,
            "perplexity_percent": against.perplexity_percent,
            "store_gb_s": self.store_gb_s,
            "load_gb_s": self.load_gb_s,
        })
    }
}
