//! `tiers`: what the daemon moves per second, beside what the machine can do.
//!
//! Store and load go through a real daemon and a region of this process. In the same rounds, one
//! after the other, stand plain `memcpy` (with and without a checksum) of as many bytes and a raw
//! ring with direct I/O and fixed buffers on a file in the same folder, so that a slow moment of
//! the machine hits all of them. Every block is new, every loaded byte is compared, and the loads
//! from nvme cycle through more than the host tier holds. Making and comparing payloads is not
//! timed, except for the raw ring, where it happens while other transfers are under way.

mod daemon;
mod measure;
mod raw;

use std::{path::PathBuf, process::ExitCode};

use anyhow::ensure;
use clap::Args;
use serde_json::json;

use self::measure::Measures;
use crate::{
    daemon::{Daemon, DaemonSpec},
    report::{Progress, say, say_json},
    scratch::Scratch,
    units::{parse_bytes, show_bytes},
};

/// Arguments of `tiers`.
#[derive(Args, Clone, Debug)]
pub struct TiersArgs {
    /// Bytes of a block. Default: 2 MiB (256 KiB with `--quick`).
    #[arg(long, value_parser = parse_bytes)]
    pub block_bytes: Option<u64>,
    /// Capacity of the host tier. Default: 1 GiB (32 MiB with `--quick`).
    #[arg(long, value_parser = parse_bytes)]
    pub host_bytes: Option<u64>,
    /// Capacity of the nvme tier. Default: 8 times the host tier.
    #[arg(long, value_parser = parse_bytes)]
    pub nvme_bytes: Option<u64>,
    /// Rounds; medians are reported.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Blocks in one call, beside calls of one block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=512))]
    pub batch: u32,
    /// Folder for daemon, store and the raw file, on a disk; kept afterwards. Default: a temporary
    /// one.
    #[arg(long)]
    pub store: Option<PathBuf>,
    /// A small run that shows that everything works; its figures mean little.
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Sizes of one run.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    block_bytes: u64,
    host_bytes: u64,
    nvme_bytes: u64,
    batch: usize,
    /// Blocks stored and loaded within the host tier.
    host_blocks: usize,
    /// Blocks stored to and loaded from nvme: half as many again as the host tier holds.
    nvme_blocks: usize,
    rounds: u32,
}

impl Sizes {
    fn of(args: &TiersArgs) -> anyhow::Result<Sizes> {
        let pick = |full: u64, quick: u64| if args.quick { quick } else { full };
        let block_bytes = args.block_bytes.unwrap_or(pick(2 << 20, 256 << 10));
        let host_bytes = args.host_bytes.unwrap_or(pick(1 << 30, 32 << 20));
        let nvme_bytes = args.nvme_bytes.unwrap_or(host_bytes.saturating_mul(8));
        let batch = args.batch as usize;
        let blocks = |bytes: u64| usize::try_from(bytes / block_bytes);
        let whole = |blocks: usize| blocks.div_ceil(batch) * batch;
        let sizes = Sizes {
            block_bytes,
            host_bytes,
            nvme_bytes,
            batch,
            host_blocks: whole(blocks(host_bytes / 4)?),
            nvme_blocks: whole(blocks(host_bytes + host_bytes / 2)?),
            rounds: args.rounds,
        };
        ensure!(block_bytes.is_multiple_of(4096), "--block-bytes must be a multiple of 4096");
        ensure!(
            sizes.host_blocks as u64 * 2 * block_bytes <= host_bytes,
            "a host tier of {} is too small for calls of {batch} blocks of {}",
            show_bytes(host_bytes),
            show_bytes(block_bytes)
        );
        ensure!(
            nvme_bytes >= host_bytes * 3,
            "the nvme tier must be at least three times the host tier"
        );
        Ok(sizes)
    }
}

/// Runs `tiers`.
///
/// # Errors
/// The daemon, the raw ring or the file system failed.
pub fn run(args: &TiersArgs) -> anyhow::Result<ExitCode> {
    let sizes = Sizes::of(args)?;
    let scratch = Scratch::make(args.store.as_deref())?;
    let spec = DaemonSpec {
        folder: scratch.path().to_owned(),
        store: scratch.path().join("store"),
        host_bytes: sizes.host_bytes,
        nvme_bytes: sizes.nvme_bytes,
        block_bytes_min: sizes.block_bytes,
        device: None,
        fault: None,
    };
    let (mut daemon, _) = Daemon::start(spec)?;
    let mut measures = Measures::new(sizes.block_bytes);
    let mut client = daemon::Client::connect(&daemon, &sizes)?;
    let mut raw = raw::Raw::prepare(scratch.path(), &sizes)?;
    let mut copies = measure::Copies::new(&sizes)?;
    let machine = json!({
        "folder": scratch.path(),
        "file_system": scratch.kind(),
        "daemon_pages": client.status().host_pages,
        "daemon_io": client.status().nvme_io,
        "raw_pages": raw.pages(),
        "raw_io": raw.ring(),
    });
    if !args.json {
        say(&format!(
            "{} on {}; host {}, nvme {}, blocks of {}; daemon: {}; {}",
            scratch.path().display(),
            scratch.kind(),
            show_bytes(sizes.host_bytes),
            show_bytes(sizes.nvme_bytes),
            show_bytes(sizes.block_bytes),
            client.status().host_pages,
            client.status().nvme_io,
        ));
        say(&format!("raw ring: {}; {}", raw.pages(), raw.ring()));
    }
    let progress = Progress::new(u64::from(sizes.rounds));
    for round in 0..sizes.rounds {
        copies.round(round, &mut measures);
        client.round(round, &mut measures)?;
        raw.round(round, &mut measures)?;
        progress.set(u64::from(round) + 1);
    }
    progress.end();
    drop(client);
    daemon.stop()?;
    if args.json {
        say_json(&measures.json(machine))?;
    } else {
        measures.table().say();
    }
    let clean = measures.wrong_bytes() == 0 && measures.failures() == 0;
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
