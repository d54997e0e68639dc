//! `sim`: a trace through the pure core alone.
//!
//! The same `Catalog` that the daemon runs is driven with a made-up clock; every action it decides
//! on succeeds at once. What comes out is exact and the same on every machine. Two modes: one tier
//! of a number of blocks under a policy, in the order of touches that published figures use, and
//! the tiers of a real daemon, in the order of calls that `replay` makes.

pub(crate) mod core;
mod flood;
mod future;
mod optimum;

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use kvtide_tiers::{
    block::BlockKey,
    catalog::{CatalogStats, Hints, PolicyChoice},
};
use serde_json::json;

use self::core::{Core, Loaded as LoadedBlocks, TierBytes};
use self::flood::Flooding;
pub use self::flood::{Flood, FloodArgs};
use self::future::Future;
pub use self::future::SimHints;
use self::optimum::Paths;
use crate::{
    report::{Progress, Summary, Table, say_json},
    trace::{TraceReader, TraceRequest},
    units::{parse_bytes, show_bytes, show_count, show_ratio},
};

/// Time from one request to the next in the tiers mode, microseconds: about what `replay` needs
/// with small blocks. It decides when idle write-down happens and little else.
const REQUEST_US: u64 = 5_000;

/// Arguments of `sim`.
#[derive(Args, Clone, Debug)]
pub struct SimArgs {
    /// The trace: Mooncake JSON lines or kvtrace CSV, plain or zstd.
    #[arg(long)]
    pub trace: PathBuf,
    /// Eviction policy of the host tier.
    #[arg(long, default_value = "pre", value_parser = PolicyChoice::ALL.map(PolicyChoice::name))]
    pub policy: String,
    /// One tier of so many blocks, instead of tiers of bytes.
    #[arg(long, conflicts_with_all = ["device_bytes", "host_bytes", "nvme_bytes"],
          value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    pub capacity_blocks: Option<u64>,
    /// Bytes of a block.
    #[arg(long, default_value = "64KiB", value_parser = parse_bytes)]
    pub block_bytes: u64,
    /// Capacity of the pool of one GPU, on which the clients' memory is then. Default: no GPU.
    #[arg(long, value_parser = parse_bytes)]
    pub device_bytes: Option<u64>,
    /// Capacity of the host tier.
    #[arg(long, default_value = "1GiB", value_parser = parse_bytes)]
    pub host_bytes: u64,
    /// Capacity of the nvme tier. Default: none.
    #[arg(long, value_parser = parse_bytes)]
    pub nvme_bytes: Option<u64>,
    /// Bytes of a segment of the nvme tier. Default: what a daemon chooses for the tier's size.
    #[arg(long, value_parser = parse_bytes, requires = "nvme_bytes")]
    pub nvme_segment_bytes: Option<u64>,
    /// Bytes that may be written to nvme in a day. Default: no limit.
    #[arg(long, value_parser = parse_bytes)]
    pub nvme_write_bytes_per_day: Option<u64>,
    /// Requests under way at a time, as with so many clients of `replay` that take turns: a request
    /// stores what it lacked after the next ones, one fewer than there are clients, have loaded.
    #[arg(long, default_value_t = 1, conflicts_with = "capacity_blocks",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub clients: u32,
    /// What the engine would tell: nothing, or whether each request's path will be continued.
    #[arg(long, default_value = "none")]
    pub hints: SimHints,
    /// Time passes as the trace says, instead of 5 ms from one request to the next.
    #[arg(long)]
    pub trace_time: bool,
    /// Weight predicted reuse by what computing a block again would take.
    #[arg(long)]
    pub weigh_cost: bool,
    /// Print the hits of every policy and of the offline optimum, with one tier of
    /// `--capacity-blocks`, or of 1, 3, 10 and 30 % of the trace's distinct blocks.
    #[arg(long)]
    pub compare: bool,
    /// Tokens of a block. Default: what fits the trace.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub block_tokens: Option<u32>,
    /// End after so many requests.
    #[arg(long)]
    pub requests: Option<u64>,
    /// A second tenant.
    #[command(flatten)]
    pub flood: FloodArgs,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// What a simulation counted.
#[derive(Clone, Debug, Default)]
pub struct SimResult {
    /// The agreed fields.
    pub summary: Summary,
    /// Stores that found no room (none, unless capacities are tiny).
    pub not_stored: u64,
    /// What was saved of the time to first tokens, by the tiers mode.
    pub prefill: Prefill,
    /// What the second tenant did, if there is one.
    pub flood: Option<Flood>,
    /// The core's own counters at the end.
    pub stats: CatalogStats,
}

/// Runs `sim`.
///
/// # Errors
/// The trace cannot be read, or the capacities fit no block.
pub fn run(args: &SimArgs) -> anyhow::Result<ExitCode> {
    if args.compare {
        return compare(args);
    }
    let result = simulate(args)?;
    if args.json {
        say_json(&json(args, &result))?;
    } else {
        table(&result).say();
    }
    Ok(ExitCode::SUCCESS)
}

/// Every policy and the optimum.
fn compare(args: &SimArgs) -> anyhow::Result<ExitCode> {
    let mut paths = Paths::default();
    for request in TraceReader::open(&args.trace)? {
        paths.add(&request?)?;
    }
    let part = |percent: usize| ((paths.unique() * percent + 50) / 100) as u64;
    let capacities = match args.capacity_blocks {
        Some(blocks) => vec![blocks],
        None => [1, 3, 10, 30].map(part).to_vec(),
    };
    let mut table = Table::default();
    let heads = capacities.iter().map(|blocks| format!("{} blocks", show_count(*blocks)));
    table.row(std::iter::once("hits".to_owned()).chain(heads));
    let mut rows = Vec::new();
    for policy in PolicyChoice::ALL.map(PolicyChoice::name) {
        let mut row = Vec::new();
        for blocks in &capacities {
            let (policy, capacity_blocks) = (policy.to_owned(), Some(*blocks));
            let args = SimArgs { policy, capacity_blocks, compare: false, ..args.clone() };
            row.push(simulate(&args)?.summary.blocks_hit_host);
        }
        rows.push((policy, row));
    }
    let best = capacities.iter().map(|blocks| paths.optimum(*blocks as usize)).collect();
    rows.push(("optimum", best));
    for (name, row) in &rows {
        let cells = row.iter().map(|hits| show_count(*hits));
        table.row(std::iter::once((*name).to_owned()).chain(cells));
    }
    if args.json {
        let rows: serde_json::Map<String, serde_json::Value> =
            rows.iter().map(|(name, row)| ((*name).to_owned(), json!(row))).collect();
        say_json(&json!({ "capacity_blocks": capacities, "hits": rows }))?;
    } else {
        table.say();
    }
    Ok(ExitCode::SUCCESS)
}

/// The hits of the offline optimum with one tier of `blocks` blocks.
///
/// # Errors
/// The trace cannot be read.
pub fn optimum(trace: &Path, blocks: usize) -> anyhow::Result<u64> {
    let mut paths = Paths::default();
    for request in TraceReader::open(trace)? {
        paths.add(&request?)?;
    }
    Ok(paths.optimum(blocks))
}

/// Simulates, and returns what was counted.
///
/// # Errors
/// As for [`run`].
pub fn simulate(args: &SimArgs) -> anyhow::Result<SimResult> {
    let total = TraceReader::count(&args.trace)?.min(args.requests.unwrap_or(u64::MAX));
    let mut reader = TraceReader::open(&args.trace)?;
    let mut core = match args.capacity_blocks {
        Some(blocks) => Core::one_tier(&args.policy, blocks, args.weigh_cost)?,
        None => {
            let sizes = TierBytes {
                device: args.device_bytes,
                host: args.host_bytes,
                nvme: args.nvme_bytes,
                segment: args.nvme_segment_bytes.map(u32::try_from).transpose()?,
                block: args.block_bytes,
                write_bytes_per_day: args.nvme_write_bytes_per_day,
                second: args.flood.quotas(),
            };
            Core::tiers(&args.policy, &sizes)?
        }
    };
    let future = Future::read(args)?;
    core.block_tokens = future.block_tokens;
    let progress = Progress::new(total);
    let started = Instant::now();
    let mut shown = started;
    let mut result = SimResult::default();
    let mut under_way = VecDeque::new();
    let mut flooding = Flooding::start(&args.flood, &mut core);
    while result.summary.requests < total {
        let Some(request) = reader.next_request()? else { break };
        let hints = future.hints(request.index);
        if args.capacity_blocks.is_some() {
            core.advance_to(request.at_ms * 1000);
            one_tier(&mut core, &request, hints, &mut result)?;
        } else {
            match args.trace_time {
                true => core.advance_to(request.at_ms * 1000),
                false => core.advance(REQUEST_US),
            }
            under_way.push_back(load(&mut core, &request, hints, &mut result)?);
            if under_way.len() >= args.clients as usize {
                store(&mut core, under_way.pop_front(), &mut result)?;
            }
        }
        if let Some(flooding) = &mut flooding {
            flooding.store(&mut core)?;
        }
        result.summary.requests += 1;
        if shown.elapsed() > Duration::from_millis(200) {
            shown = Instant::now();
            progress.set(result.summary.requests);
        }
    }
    while !under_way.is_empty() {
        store(&mut core, under_way.pop_front(), &mut result)?;
    }
    progress.end();
    result.summary.seconds = started.elapsed().as_secs_f64();
    result.stats = core.stats()?;
    result.flood = flooding.map(|flooding| flooding.flood);
    Ok(result)
}

/// The keys of a path. A block's number already stands for its whole prefix, so it is the key.
fn keys(request: &TraceRequest) -> Vec<BlockKey> {
    let key = |id: &u64| {
        let mut bytes = [0; 32];
        // Not the root's key, and with some spread in the first bytes.
        let spread = id.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes.iter_mut().zip(spread.to_le_bytes()).for_each(|(to, from)| *to = from);
        bytes.iter_mut().skip(8).zip((id + 1).to_le_bytes()).for_each(|(to, from)| *to = from);
        BlockKey(bytes)
    };
    request.path.iter().map(key).collect()
}

/// Hits are counted before anything is inserted; then the path is touched or stored, leaf
/// to root.
fn one_tier(
    core: &mut Core,
    request: &TraceRequest,
    hints: Hints,
    result: &mut SimResult,
) -> anyhow::Result<()> {
    let keys = keys(request);
    core.path_tokens = request.input_tokens;
    let hits = core.begin(&keys, hints)?;
    result.summary.blocks_hit_host += hits as u64;
    result.summary.blocks_missed += (keys.len() - hits) as u64;
    // Stores go one block a call: a store of a block that is there pins it until the call has
    // ended, but in the published figures a request may evict its own blocks. What is still there
    // of the prefix then is touched in one call, in which nothing is evicted.
    let mut open = keys.len();
    let mut resident = hits;
    while resident < open {
        for position in (resident..open).rev() {
            let parent = position.checked_sub(1).and_then(|at| keys.get(at));
            let key = keys.get(position).unwrap_or(&BlockKey::ROOT);
            if !core.store_one(key, parent.unwrap_or(&BlockKey::ROOT), position)? {
                result.not_stored += 1;
            }
        }
        open = resident;
        resident = core.peek(keys.get(..open).unwrap_or(&[]))?;
    }
    core.touch(keys.get(..open).unwrap_or(&[]))
}

/// What a request has loaded: its keys, its tokens, and which of the blocks came.
type Loaded = (Vec<BlockKey>, u64, Vec<bool>);

/// The calls of a client: look up with a lease, load what is there, release; then [`store`].
fn load(
    core: &mut Core,
    request: &TraceRequest,
    hints: Hints,
    result: &mut SimResult,
) -> anyhow::Result<Loaded> {
    let keys = keys(request);
    let loaded = core.load(&keys, hints)?;
    result.prefill.count(request.input_tokens, u64::from(core.block_tokens), &loaded);
    let summary = &mut result.summary;
    summary.blocks_hit_device += loaded.device;
    summary.blocks_hit_host += loaded.host;
    summary.blocks_hit_nvme += loaded.nvme;
    summary.blocks_missed += keys.len() as u64 - loaded.blocks();
    Ok((keys, request.input_tokens, loaded.came))
}

/// Stores what a request lacked.
fn store(core: &mut Core, done: Option<Loaded>, result: &mut SimResult) -> anyhow::Result<()> {
    if let Some((keys, tokens, came)) = done {
        core.path_tokens = tokens;
        result.not_stored += core.store_rest(&keys, &came)?;
    }
    Ok(())
}

/// A model of the time to first tokens: what computing all prompts would take, and what of that was
/// saved by loading.
///
/// A token takes 50 us and as much again for every 30,500 tokens before it; to load one, 2.62 us
/// from host RAM and 21.8 us from nvme (128 KiB per token at 50 and 6 GB/s).
#[derive(Clone, Copy, Debug, Default)]
pub struct Prefill {
    /// Seconds without a cache.
    pub all_s: f64,
    /// Seconds less.
    pub saved_s: f64,
}

impl Prefill {
    fn count(&mut self, tokens: u64, block_tokens: u64, loaded: &LoadedBlocks) {
        let seconds = |tokens: u64| {
            let tokens = tokens as f64;
            50e-6 * (tokens + tokens * tokens / (2.0 * 30_500.0))
        };
        let hit = (loaded.blocks() * block_tokens).min(tokens);
        let load = |blocks: u64, us: f64| (blocks * block_tokens) as f64 * us * 1e-6;
        self.all_s += seconds(tokens);
        self.saved_s += seconds(hit) - load(loaded.host, 2.62) - load(loaded.nvme, 21.8);
    }

    /// The part that was saved.
    pub fn saved_ratio(&self) -> f64 {
        if self.all_s > 0.0 { self.saved_s / self.all_s } else { 0.0 }
    }
}

fn table(result: &SimResult) -> Table {
    let (summary, stats) = (&result.summary, &result.stats);
    let mut table = Table::default();
    let blocks = summary.blocks();
    let rows = [
        ("requests", summary.requests, format!("{:.2} s", summary.seconds)),
        ("block references", blocks, String::new()),
        (
            "  hit in GPU memory",
            summary.blocks_hit_device,
            show_ratio(summary.blocks_hit_device, blocks),
        ),
        ("  hit in host RAM", summary.blocks_hit_host, show_ratio(summary.blocks_hit_host, blocks)),
        ("  hit on nvme", summary.blocks_hit_nvme, show_ratio(summary.blocks_hit_nvme, blocks)),
        ("  hit in all", summary.blocks_hit(), show_ratio(summary.blocks_hit(), blocks)),
        ("  missed", summary.blocks_missed, show_ratio(summary.blocks_missed, blocks)),
        ("not stored for want of room", result.not_stored, String::new()),
        (
            "seconds to first tokens, without a cache",
            result.prefill.all_s as u64,
            format!("{:.2} % saved", result.prefill.saved_ratio() * 100.0),
        ),
        ("evicted from host RAM", stats.host.evicted, String::new()),
        ("evicted from nvme", stats.nvme.evicted, String::new()),
        ("written to nvme", stats.nvme.bytes_in, show_bytes(stats.nvme.bytes_in)),
        ("  not written for want of budget", stats.write_refused, String::new()),
        ("segments reclaimed", stats.segments_reclaimed, String::new()),
        ("  blocks written again", stats.reinserted, String::new()),
    ];
    for (name, count, note) in rows {
        table.row([name.to_owned(), show_count(count), note]);
    }
    if let Some(flood) = &result.flood {
        flood::rows(flood, &mut table);
    }
    table
}

fn json(args: &SimArgs, result: &SimResult) -> serde_json::Value {
    let blocks = result.summary.blocks().max(1) as f64;
    let mut object = json!(result.summary);
    let more = json!({
        "policy": args.policy,
        "clients": args.clients,
        "capacity_blocks": args.capacity_blocks,
        "block_references": result.summary.blocks(),
        "blocks_hit": result.summary.blocks_hit(),
        "hit_ratio": result.summary.blocks_hit() as f64 / blocks,
        "not_stored": result.not_stored,
        "nvme_bytes_written": result.stats.nvme.bytes_in,
        "ttft_saved": result.prefill.saved_ratio(),
        "host_evicted": result.stats.host.evicted,
        "nvme_evicted": result.stats.nvme.evicted,
        "write_refused": result.stats.write_refused,
        "segments_reclaimed": result.stats.segments_reclaimed,
        "reinserted": result.stats.reinserted,
        "flood": result.flood.as_ref().map(flood::json),
    });
    if let (Some(object), serde_json::Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}
