//! `sim`: a trace through the pure core alone.
//!
//! The same `Catalog` that the daemon runs is driven with a made-up clock; every action it decides
//! on succeeds at once. What comes out is exact and the same on every machine. Two modes: one tier
//! of a number of blocks under a policy, in the order of touches that published figures use, and
//! the tiers of a real daemon, in the order of calls that `replay` makes.

pub(crate) mod core;

use std::{
    collections::VecDeque,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use kvtide_tiers::{
    block::BlockKey,
    catalog::{CatalogStats, POLICY_NAMES},
};
use serde_json::json;

use self::core::{Core, TierBytes};
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
    #[arg(long, default_value = "lru", value_parser = POLICY_NAMES)]
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
    /// Requests under way at a time, as with so many clients of `replay` that take turns: a request
    /// stores what it lacked after the next ones, one fewer than there are clients, have loaded.
    #[arg(long, default_value_t = 1, conflicts_with = "capacity_blocks",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub clients: u32,
    /// End after so many requests.
    #[arg(long)]
    pub requests: Option<u64>,
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
    /// The core's own counters at the end.
    pub stats: CatalogStats,
}

/// Runs `sim`.
///
/// # Errors
/// The trace cannot be read, or the capacities fit no block.
pub fn run(args: &SimArgs) -> anyhow::Result<ExitCode> {
    let result = simulate(args)?;
    if args.json {
        say_json(&json(args, &result))?;
    } else {
        table(&result).say();
    }
    Ok(ExitCode::SUCCESS)
}

/// Simulates, and returns what was counted.
///
/// # Errors
/// As for [`run`].
pub fn simulate(args: &SimArgs) -> anyhow::Result<SimResult> {
    let total = TraceReader::count(&args.trace)?.min(args.requests.unwrap_or(u64::MAX));
    let mut reader = TraceReader::open(&args.trace)?;
    let mut core = match args.capacity_blocks {
        Some(blocks) => Core::one_tier(&args.policy, blocks)?,
        None => {
            let sizes = TierBytes {
                device: args.device_bytes,
                host: args.host_bytes,
                nvme: args.nvme_bytes,
                block: args.block_bytes,
            };
            Core::tiers(&args.policy, &sizes)?
        }
    };
    let progress = Progress::new(total);
    let started = Instant::now();
    let mut shown = started;
    let mut result = SimResult::default();
    let mut under_way = VecDeque::new();
    while result.summary.requests < total {
        let Some(request) = reader.next_request()? else { break };
        if args.capacity_blocks.is_some() {
            one_tier(&mut core, &request, &mut result)?;
        } else {
            core.advance(REQUEST_US);
            under_way.push_back(load(&mut core, &request, &mut result)?);
            if under_way.len() >= args.clients as usize {
                store(&mut core, under_way.pop_front(), &mut result)?;
            }
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
fn one_tier(core: &mut Core, request: &TraceRequest, result: &mut SimResult) -> anyhow::Result<()> {
    let keys = keys(request);
    let hits = core.peek(&keys)?;
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

/// What a request has loaded: its keys, and which of them came.
type Loaded = (Vec<BlockKey>, Vec<bool>);

/// The calls of a client: look up with a lease, load what is there, release; then [`store`].
fn load(core: &mut Core, request: &TraceRequest, result: &mut SimResult) -> anyhow::Result<Loaded> {
    let keys = keys(request);
    let loaded = core.load(&keys)?;
    let summary = &mut result.summary;
    summary.blocks_hit_device += loaded.device;
    summary.blocks_hit_host += loaded.host;
    summary.blocks_hit_nvme += loaded.nvme;
    summary.blocks_missed += keys.len() as u64 - loaded.blocks();
    Ok((keys, loaded.came))
}

/// Stores what a request lacked.
fn store(core: &mut Core, done: Option<Loaded>, result: &mut SimResult) -> anyhow::Result<()> {
    if let Some((keys, came)) = done {
        result.not_stored += core.store_rest(&keys, &came)?;
    }
    Ok(())
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
        ("evicted from host RAM", stats.host.evicted, String::new()),
        ("evicted from nvme", stats.nvme.evicted, String::new()),
        ("written to nvme", stats.nvme.bytes_in, show_bytes(stats.nvme.bytes_in)),
        ("segments reclaimed", stats.segments_reclaimed, String::new()),
        ("  blocks written again", stats.reinserted, String::new()),
    ];
    for (name, count, note) in rows {
        table.row([name.to_owned(), show_count(count), note]);
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
        "host_evicted": result.stats.host.evicted,
        "nvme_evicted": result.stats.nvme.evicted,
        "segments_reclaimed": result.stats.segments_reclaimed,
        "reinserted": result.stats.reinserted,
    });
    if let (Some(object), serde_json::Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}
