//! `scale`: how the catalog, recovery and calls do as their number grows.
//!
//! Three parts. The catalog alone (the pure core, with an edge on which everything succeeds at
//! once) at 10^4 to 10^7 blocks: time of a lookup of a prefix of 1,000 blocks, of a store, of a
//! store that evicts, and memory per block. Opening a store of 10^4 to 10^6 descriptors, and one
//! with as many segments as 1 TiB, until its blocks are in the catalog. Lookups by 1 to 64 clients
//! through a real daemon, beside a raw socket in the same run. Every part runs in a process of its
//! own, so that its memory and its reads can be told from those of the others; every answer is
//! checked.

mod catalog;
mod clients;
mod recovery;

use std::{
    path::PathBuf,
    process::{ExitCode, Stdio},
};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::{
    daemon::this_program,
    report::{Progress, Table, say, say_json},
    scratch::Scratch,
    units::show_count,
};

/// Most blocks that are put into host RAM as well: 2 TiB of RAM, if they had 2 MiB each.
const HOST_BLOCKS_MAX: u64 = 1_000_000;

/// Arguments of `scale`.
#[derive(Args, Clone, Debug)]
pub struct ScaleArgs {
    /// Blocks in the catalog. Default: 10^4, 10^5, 10^6 and 10^7 (a hundredth with `--quick`).
    #[arg(long, value_delimiter = ',', value_name = "LIST",
          value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub blocks: Vec<u64>,
    /// Descriptors in the store that is opened. Default: 10^4, 10^5 and 10^6 (a hundredth with
    /// `--quick`).
    #[arg(long, value_delimiter = ',', value_name = "LIST",
          value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub descriptors: Vec<u64>,
    /// Clients. Default: 1, 2, 4, 8, 16, 32 and 64 (1 and 2 with `--quick`).
    #[arg(long, value_delimiter = ',', value_name = "LIST",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub clients: Vec<u32>,
    /// Folder for stores and the daemon, on a disk; kept afterwards. Default: a temporary one.
    #[arg(long)]
    pub store: Option<PathBuf>,
    /// A small run that shows that everything works; its figures mean little.
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of one measurement, which ends with one line of JSON.
#[derive(Args, Clone, Debug)]
pub struct PartArgs {
    #[command(subcommand)]
    part: Part,
}

#[derive(Subcommand, Clone, Debug)]
enum Part {
    /// The catalog alone.
    Catalog(catalog::CatalogArgs),
    /// Opening a store.
    Recovery(recovery::RecoveryArgs),
    /// Lookups through the daemon.
    Clients(clients::ClientsArgs),
}

impl Part {
    fn args(&self) -> Vec<String> {
        let mut args = vec!["__scale".to_owned()];
        args.extend(match self {
            Part::Catalog(part) => part.args(),
            Part::Recovery(part) => part.args(),
            Part::Clients(part) => part.args(),
        });
        args
    }
}

/// Runs one measurement and prints its result.
///
/// # Errors
/// It failed, or an answer was wrong.
pub fn run_part(args: &PartArgs) -> anyhow::Result<ExitCode> {
    crate::daemon::end_with_parent();
    let result = match &args.part {
        Part::Catalog(part) => catalog::measure(part)?,
        Part::Recovery(part) => recovery::measure(part)?,
        Part::Clients(part) => clients::measure(part)?,
    };
    say_json(&result)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `scale`.
///
/// # Errors
/// A part failed, or the folder for its files cannot be had.
pub fn run(args: &ScaleArgs) -> anyhow::Result<ExitCode> {
    let scratch = Scratch::make(args.store.as_deref())?;
    let parts = parts(args, &scratch);
    let progress = Progress::new(parts.len() as u64);
    let (mut catalog, mut recovery, mut clients) = (Vec::new(), Vec::new(), Vec::new());
    for (at, part) in parts.iter().enumerate() {
        progress.note(part.args().join(" "));
        let result = measure(part).with_context(|| part.args().join(" "))?;
        match part {
            Part::Catalog(_) => catalog.push(result),
            Part::Recovery(_) => recovery.push(result),
            Part::Clients(_) => clients.push(result),
        }
        progress.set(at as u64 + 1);
    }
    progress.end();
    if args.json {
        say_json(&json!({
            "folder": scratch.path(),
            "file_system": scratch.kind(),
            "quick": args.quick,
            "catalog": catalog,
            "recovery": recovery,
            "clients": clients,
        }))?;
    } else {
        say(&format!("{} on {}", scratch.path().display(), scratch.kind()));
        show(&catalog, &recovery, &clients);
    }
    Ok(ExitCode::SUCCESS)
}

fn parts(args: &ScaleArgs, scratch: &Scratch) -> Vec<Part> {
    let scale = if args.quick { 100 } else { 1 };
    let pick = |chosen: &[u64], powers: std::ops::RangeInclusive<u32>| match chosen {
        [] => powers.map(|power| 10u64.pow(power) / scale).collect(),
        chosen => chosen.to_vec(),
    };
    let clients = match (&args.clients[..], args.quick) {
        ([], true) => vec![1, 2],
        ([], false) => vec![1, 2, 4, 8, 16, 32, 64],
        (chosen, _) => chosen.to_vec(),
    };
    let mut parts = Vec::new();
    for blocks in pick(&args.blocks, 4..=7) {
        parts.push(Part::Catalog(catalog::CatalogArgs { blocks, host: false }));
        if blocks <= HOST_BLOCKS_MAX {
            parts.push(Part::Catalog(catalog::CatalogArgs { blocks, host: true }));
        }
    }
    let folder = scratch.path().to_owned();
    for descriptors in pick(&args.descriptors, 4..=6) {
        let folder = folder.clone();
        parts.push(Part::Recovery(recovery::RecoveryArgs { descriptors, large: false, folder }));
    }
    let (large, descriptors) = (true, recovery::BLOCKS_PER_TIB / scale);
    let tib = recovery::RecoveryArgs { descriptors, large, folder: folder.clone() };
    parts.push(Part::Recovery(tib));
    let millis = if args.quick { 50 } else { 2000 };
    for clients in clients {
        let folder = folder.join("daemon");
        parts.push(Part::Clients(clients::ClientsArgs { clients, millis, folder }));
    }
    parts
}

/// Runs one part in a process of its own.
fn measure(part: &Part) -> anyhow::Result<Value> {
    let [program, rest @ ..] = &part.args()[..] else { bail!("a part has a name") };
    let mut command = this_program(program)?;
    command.args(rest).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().context("cannot start a process of this program")?;
    if !output.status.success() {
        bail!("it ended with {}", output.status);
    }
    serde_json::from_slice(&output.stdout).context("it did not print JSON")
}

/// Prints the fields of all rows, each under its title and with so many digits.
fn say_table(head: &[(&str, &str, usize)], rows: &[Value]) {
    let mut table = Table::default();
    table.row(head.iter().map(|(title, ..)| *title));
    for row in rows {
        let cell = |(_, field, digits): &(&str, &str, usize)| {
            let digits = *digits;
            match row.get(*field) {
                Some(Value::String(text)) => text.clone(),
                Some(value) => match (value.as_u64(), value.as_f64()) {
                    (Some(whole), _) => show_count(whole),
                    (_, Some(number)) => format!("{number:.digits$}"),
                    _ => "-".to_owned(),
                },
                None => "-".to_owned(),
            }
        };
        table.row(head.iter().map(cell));
    }
    say("");
    table.say();
}

fn show(catalog: &[Value], recovery: &[Value], clients: &[Value]) {
    say_table(
        &[
            ("catalog, blocks on", "tiers", 0),
            ("blocks", "blocks", 0),
            ("B/block", "bytes_per_block", 1),
            ("lookup 1,000: p50 us", "lookup_us_p50", 1),
            ("p99", "lookup_us_p99", 1),
            ("lease: p50 us", "lease_us_p50", 1),
            ("p99", "lease_us_p99", 1),
            ("release: p50 us", "release_us_p50", 1),
            ("store ns", "store_ns", 0),
            ("write-down ns", "write_down_ns", 0),
            ("store full ns", "store_full_ns", 0),
            ("evict ns", "evict_ns", 0),
            ("slowest event us", "slowest_event_us", 0),
        ],
        catalog,
    );
    say_table(
        &[
            ("recovery of", "store", 0),
            ("descriptors", "descriptors", 0),
            ("segments", "segments", 0),
            ("read ms", "open_ms", 1),
            ("catalog ms", "catalog_ms", 1),
            ("ready ms", "ready_ms", 1),
            ("CPU: read ms", "open_cpu_ms", 1),
            ("catalog ms", "catalog_cpu_ms", 1),
            ("descriptors/s", "descriptors_per_s", 0),
            ("MB read", "read_mb", 1),
            ("GB/s", "read_gb_s", 2),
            ("at 1 GB/s ms", "ready_at_1_gb_s_ms", 0),
        ],
        recovery,
    );
    say_table(
        &[
            ("clients", "clients", 0),
            ("lookups/s", "blocking_calls_per_s", 0),
            ("p50 us", "blocking_us_p50", 1),
            ("p99", "blocking_us_p99", 1),
            ("pipelined/s", "pipelined_calls_per_s", 0),
            ("p50 us", "pipelined_us_p50", 1),
            ("p99", "pipelined_us_p99", 1),
            ("raw/s", "raw_calls_per_s", 0),
            ("p50 us", "raw_us_p50", 1),
            ("p99", "raw_us_p99", 1),
            ("p50 / raw", "blocking_to_raw", 2),
            ("daemon CPU us/call", "daemon_cpu_us_per_call", 1),
        ],
        clients,
    );
}

/// The value at `percent` of sorted numbers.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let at = (sorted.len().saturating_sub(1)) * percent / 100;
    sorted.get(at).copied().unwrap_or(0.0)
}
