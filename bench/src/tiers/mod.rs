//! `tiers`: what the daemon moves per second, beside what the machine can do.
//!
//! Store and load go through a real daemon and regions of this process. In the same rounds stand
//! plain `memcpy` between memory of the same kinds, by as many threads as the daemon copies with,
//! and a raw ring with direct I/O and fixed buffers on a file in the same folder; calls that move
//! nothing stand beside a ping-pong of two processes over a unix socket. The order changes from
//! round to round, so that a slow moment of the machine hits all of them.
//!
//! Every block is new and every loaded byte is compared; payloads are made before what is timed
//! and compared after it. The sets for nvme are larger than the host tier, and are loaded in the
//! order in which they left it. Everything passes the page cache by. What was measured is
//! forgotten before the next measure, so that none waits for the reclaim of another's blocks.

mod calls;
mod client;
mod fio;
mod judge;
mod measure;
mod memcpy;
mod raw;
mod set;
mod yardstick;

use std::{path::PathBuf, process::ExitCode};

use anyhow::ensure;
use clap::Args;
use serde_json::{Value, json};

pub use self::calls::run_pong;
pub(crate) use self::measure::median;
pub(crate) use self::yardstick::{Loaded, Yardsticks};
use self::{
    calls::Calls,
    client::Fleet,
    fio::Fio,
    measure::{Direction, How, Measures},
    memcpy::Copies,
    raw::Raw,
};
use crate::{
    daemon::{Daemon, DaemonSpec},
    report::{Progress, Summary, say, say_json},
    scratch::Scratch,
    units::{parse_bytes, show_bytes},
};

/// The smallest block that the daemon has room for: its default, so that what a lookup needs can be
/// stored beside blocks of any size.
const BLOCK_BYTES_MIN: u64 = 64 << 10;

/// Longest chain: what one lease covers.
const CHAIN_MAX: usize = 64;

/// Arguments of `tiers`.
#[derive(Args, Clone, Debug)]
pub struct TiersArgs {
    /// Bytes of a block; several with commas between. Default: 2 MiB (256 KiB with `--quick`).
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes)]
    pub block_bytes: Vec<u64>,
    /// Clients at the same time; several numbers with commas between. Default: 1.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64))]
    pub clients: Vec<u32>,
    /// All of 256 KiB, 2 MiB and 8 MiB, each with 1 and 4 clients.
    #[arg(long, conflicts_with_all = ["block_bytes", "clients"])]
    pub full: bool,
    /// Capacity of the host tier. Default: 1 GiB (32 MiB with `--quick`).
    #[arg(long, value_parser = parse_bytes)]
    pub host_bytes: Option<u64>,
    /// Capacity of the nvme tier. Default: 4 times the host tier.
    #[arg(long, value_parser = parse_bytes)]
    pub nvme_bytes: Option<u64>,
    /// Rounds; medians are reported. Default: 7 (2 with `--quick`).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Blocks in one call, beside calls of one block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=512))]
    pub batch: u32,
    /// Calls that a client has under way at once.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub calls: Vec<u32>,
    /// Transfers that the raw ring has under way at once.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8, 16, 32],
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depths: Vec<u32>,
    /// Folder for daemon, store and the raw file, on a disk; kept afterwards. Default: a temporary
    /// one.
    #[arg(long)]
    pub store: Option<PathBuf>,
    /// A small run that shows that everything works; its figures mean little.
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// Sizes of one configuration.
#[derive(Clone, Debug, Default)]
struct Setup {
    block_bytes: u64,
    clients: usize,
    host_bytes: u64,
    nvme_bytes: u64,
    batch: usize,
    calls: Vec<usize>,
    depths: Vec<u32>,
    /// Blocks that each client stores and loads within the host tier.
    host_blocks: usize,
    /// Blocks that each client stores to and loads from nvme, and places of its region. All clients
    /// together: half as many again as the host tier holds.
    nvme_blocks: usize,
    chain: usize,
}

impl Setup {
    fn of(args: &TiersArgs, block_bytes: u64, clients: usize) -> anyhow::Result<Setup> {
        let host_bytes = args.host_bytes.unwrap_or(if args.quick { 32 << 20 } else { 1 << 30 });
        let nvme_bytes = args.nvme_bytes.unwrap_or(host_bytes.saturating_mul(4));
        ensure!(block_bytes.is_multiple_of(4096), "--block-bytes must be a multiple of 4096");
        ensure!(
            nvme_bytes >= host_bytes.saturating_mul(3),
            "the nvme tier must be at least three times the host tier"
        );
        let batch = args.batch as usize;
        let each = |bytes: u64| usize::try_from(bytes / block_bytes / clients as u64);
        let host_blocks = (each(host_bytes / 2)? / batch * batch).max(batch);
        let nvme_blocks = each(host_bytes + host_bytes / 2)?.div_ceil(batch) * batch;
        ensure!(
            (host_blocks * clients) as u64 * block_bytes <= host_bytes / 2,
            "a host tier of {} is too small for {clients} clients with calls of {batch} blocks of \
             {}",
            show_bytes(host_bytes),
            show_bytes(block_bytes)
        );
        // Leases of all clients together keep at most a quarter of the host tier, or a call each.
        let chain = each(host_bytes / 4)?.clamp(batch, CHAIN_MAX.max(batch)) / batch * batch;
        let fits = |calls: &usize| calls * batch <= host_blocks;
        Ok(Setup {
            block_bytes,
            clients,
            host_bytes,
            nvme_bytes,
            batch,
            calls: args.calls.iter().map(|calls| *calls as usize).filter(fits).collect(),
            depths: args.depths.clone(),
            host_blocks,
            nvme_blocks,
            chain,
        })
    }

    /// Bytes of a set of all clients for nvme.
    fn set_bytes(&self) -> u64 {
        (self.nvme_blocks * self.clients) as u64 * self.block_bytes
    }

    /// The ways of calling, in the order of a round.
    fn ways(&self, round: u32) -> Vec<How> {
        let batches = self.calls.iter().map(|calls| How { batch: self.batch, calls: *calls });
        let mut ways: Vec<How> = batches.chain([How { batch: 1, calls: 1 }]).collect();
        let turn = round as usize % ways.len();
        ways.rotate_left(turn);
        ways
    }

    fn name(&self) -> String {
        let clients = match self.clients {
            1 => "1 client".to_owned(),
            many => format!("{many} clients"),
        };
        format!("blocks of {}, {clients}", show_bytes(self.block_bytes))
    }
}

/// Runs `tiers`.
///
/// # Errors
/// The daemon, the raw ring or the file system failed.
pub fn run(args: &TiersArgs) -> anyhow::Result<ExitCode> {
    let scratch = Scratch::make(args.store.as_deref())?;
    let (sizes, clients) = match (args.full, args.quick) {
        (true, _) => (vec![256 << 10, 2 << 20, 8 << 20], vec![1, 4]),
        (false, quick) => {
            let size = if quick { 256 << 10 } else { 2 << 20 };
            let or = |list: &[u64], default| match list {
                [] => vec![default],
                list => list.to_vec(),
            };
            let clients: Vec<u64> = args.clients.iter().map(|count| u64::from(*count)).collect();
            (or(&args.block_bytes, size), or(&clients, 1))
        }
    };
    let mut setups = Vec::new();
    for block_bytes in sizes {
        for clients in &clients {
            setups.push(Setup::of(args, block_bytes, usize::try_from(*clients)?)?);
        }
    }
    let mut total = Summary::default();
    let mut configurations = Vec::new();
    for (number, setup) in setups.iter().enumerate() {
        let (summary, object) = run_one(args, setup, &scratch, number)?;
        total.requests += summary.requests;
        total.blocks_hit_host += summary.blocks_hit_host;
        total.blocks_hit_nvme += summary.blocks_hit_nvme;
        total.blocks_missed += summary.blocks_missed;
        total.blocks_verified += summary.blocks_verified;
        total.wrong_bytes += summary.wrong_bytes;
        total.client_failures += summary.client_failures;
        total.seconds += summary.seconds;
        configurations.push(object);
    }
    if args.json {
        let mut object = json!(total);
        if let Some(object) = object.as_object_mut() {
            object.insert("configurations".into(), configurations.into());
        }
        say_json(&object)?;
    }
    let clean = total.wrong_bytes == 0 && total.client_failures == 0;
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One configuration with a daemon of its own. Prints its tables, or returns its object.
fn run_one(
    args: &TiersArgs,
    setup: &Setup,
    scratch: &Scratch,
    number: usize,
) -> anyhow::Result<(Summary, Value)> {
    let folder = scratch.path().join(format!("run-{number}"));
    let spec = DaemonSpec {
        store: folder.join("store"),
        folder: folder.clone(),
        host_bytes: setup.host_bytes,
        nvme_bytes: setup.nvme_bytes,
        block_bytes_min: setup.block_bytes.min(BLOCK_BYTES_MIN),
        device: None,
        fault: None,
    };
    let (mut daemon, _) = Daemon::start(spec)?;
    let mut measures = Measures::new();
    let mut bench = Bench::prepare(setup, &daemon, &folder, args.quick)?;
    let rounds = args.rounds.unwrap_or(if args.quick { 2 } else { 7 });
    let progress = Progress::new(u64::from(rounds) * 3);
    progress.set(0);
    bench.fleet.warm(|words| progress.note(words))?;
    for round in 0..rounds {
        bench.round(round, &mut measures, &progress)?;
        daemon.check_alive()?;
    }
    bench.calls.idle(args.quick)?;
    progress.end();
    measures.end();
    let machine = bench.machine(scratch)?;
    let targets = judge::judge(setup, &measures, Some(&bench.calls));
    if !args.json {
        say(&format!("{}: {rounds} rounds; {}", setup.name(), machine_words(&machine)));
        measures.table().say();
        measures.remarks().iter().for_each(|line| say(line));
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if load_average().is_some_and(|load| load > 2.0 * cores as f64) {
            say("The machine was BUSY (see the load average): compare nothing of this.");
        }
        bench.calls.table().say();
        say("");
        judge::lines(&targets).iter().for_each(|line| say(line));
        say("");
    }
    let object = json!({
        "block_bytes": setup.block_bytes,
        "clients": setup.clients,
        "rounds": rounds,
        "machine": machine,
        "moved": measures.json(),
        "called": bench.calls.json(),
        "targets": judge::json(&targets),
    });
    drop(bench);
    daemon.stop()?;
    drop(daemon);
    if args.store.is_none() {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok((measures.summary, object))
}

/// Threads that ran or wanted to, over the last minute. Some two of them are this run's own.
fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

fn machine_words(machine: &Value) -> String {
    let pairs = machine.as_object().into_iter().flatten();
    let words = pairs.map(|(name, value)| match value.as_str() {
        Some(text) => format!("{}: {text}", name.replace('_', " ")),
        None => format!("{}: {value}", name.replace('_', " ")),
    });
    words.collect::<Vec<_>>().join("\n  ")
}

/// Everything that takes part in the rounds.
struct Bench {
    copies: Copies,
    threads: (usize, &'static str),
    fleet: Fleet,
    raw: Raw,
    fio: Fio,
    calls: Calls,
}

impl Bench {
    fn prepare(
        setup: &Setup,
        daemon: &Daemon,
        folder: &std::path::Path,
        quick: bool,
    ) -> anyhow::Result<Bench> {
        let threads = memcpy::copy_threads(daemon.pid())?;
        Ok(Bench {
            copies: Copies::new(setup, threads.0)?,
            threads,
            fleet: Fleet::connect(daemon, setup)?,
            raw: Raw::prepare(folder, setup)?,
            fio: Fio::find(folder, setup),
            calls: Calls::new(daemon, quick)?,
        })
    }

    fn machine(&self, scratch: &Scratch) -> anyhow::Result<Value> {
        let status = self.fleet.status()?;
        Ok(json!({
            "folder": scratch.path(),
            "file_system": scratch.kind(),
            "host_bytes": status.host_bytes,
            "nvme_bytes": status.nvme_bytes,
            "daemon_pages": status.host_pages,
            "daemon_io": status.nvme_io,
            "raw_pages": self.raw.pages(),
            "raw_io": self.raw.ring(),
            "fio": self.fio.words(),
            "memcpy_pages": self.copies.pages(),
            "memcpy_threads": self.threads.0,
            "memcpy_threads_why": self.threads.1,
            "load_average": load_average(),
            "clients_are": "threads of this process, each with a connection and a region",
        }))
    }

    /// Everything once, in an order that changes from round to round.
    fn round(
        &mut self,
        round: u32,
        measures: &mut Measures,
        progress: &Progress,
    ) -> anyhow::Result<()> {
        let mut order = ["memory", "disk", "calls"];
        let turn = round as usize % order.len();
        order.rotate_left(turn);
        for (number, part) in order.into_iter().enumerate() {
            progress.note(format!("round {}, {part}", round + 1));
            progress.set(u64::from(round) * order.len() as u64 + number as u64);
            match part {
                "memory" => {
                    let copies = &self.copies;
                    self.fleet.host_round(round, measures, |first, measures| {
                        copies.round(round, first, measures)
                    })?;
                }
                "disk" => self.disk(round, measures)?,
                _ => self.calls.round(round)?,
            }
            self.fleet.settle()?;
        }
        Ok(())
    }

    /// Raw ring and nvme tier, each direction of one beside that of the other; who is first changes
    /// from round to round.
    fn disk(&mut self, round: u32, measures: &mut Measures) -> anyhow::Result<()> {
        let raw_first = round.is_multiple_of(2);
        let mut raw = |direction, first, measures: &mut Measures| match first == raw_first {
            true => self.raw.round(round, direction, measures),
            false => Ok(()),
        };
        raw(Direction::Store, true, measures)?;
        let sets = self.fleet.nvme_stores(round, measures)?;
        raw(Direction::Store, false, measures)?;
        raw(Direction::Load, true, measures)?;
        self.fleet.nvme_loads(round, &sets, measures)?;
        raw(Direction::Load, false, measures)?;
        self.fio.round(round, measures);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TiersArgs,
    }

    #[test]
    fn sizes_fit_the_tiers() {
        let args = Line::parse_from(["tiers"]).args;
        for block_bytes in [256 << 10, 2 << 20, 8 << 20] {
            for clients in [1, 4] {
                let setup = Setup::of(&args, block_bytes, clients).unwrap();
                assert!(setup.set_bytes() >= setup.host_bytes / 2 * 3, "{setup:?}");
                assert!(setup.nvme_blocks >= 2 * setup.host_blocks, "{setup:?}");
                assert!(setup.ways(0).len() >= 2 && setup.ways(5).len() >= 2, "{setup:?}");
                let pinned = (2 * setup.chain * clients) as u64 * block_bytes;
                assert!(pinned <= setup.host_bytes, "{setup:?}");
            }
        }
        let small = Line::parse_from(["tiers", "--host-bytes", "8MiB"]).args;
        assert!(Setup::of(&small, 2 << 20, 4).is_err());
    }
}
