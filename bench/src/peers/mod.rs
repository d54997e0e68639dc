//! `peers`: kvtide beside what else keeps blocks on one machine.
//!
//! Every peer is driven by the same loop (`drive`) with blocks of the same kind, in the same
//! folder, in the same rounds, one after the other in an order that turns from round to round.
//! Each says what it is about: RAM or disk, what it verifies, how many threads and blocks a call.
//! The disk's rows store and load many times what kvtide and foyer may keep in memory. Peers that
//! were not asked for, or are not there, are named with a reason; nothing is installed or fetched.

mod drive;
mod files;
#[cfg(feature = "foyer")]
mod foyer;
mod kvtide;
mod peer;
mod results;
mod servers;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::ensure;
use clap::Args;
use serde_json::{Value, json};

use self::{
    files::{Files, Through},
    kvtide::{Kvtide, Shared},
    peer::{Peer, Pool},
    results::{Results, Skipped},
    servers::{Kind, Server, ServerPeer},
};
use crate::{
    report::{Progress, say, say_json},
    scratch::Scratch,
    units::{parse_bytes, show_bytes},
};

/// Arguments of `peers`.
#[derive(Args, Clone, Debug)]
pub struct PeersArgs {
    /// One file per block: through the page cache, and past it.
    #[arg(long)]
    pub files: bool,
    /// foyer, with both of its I/O engines. Needs a build with the feature `foyer`.
    #[arg(long)]
    pub foyer: bool,
    /// Redis: this program is started on a socket of its own, without persistence.
    #[arg(long, value_name = "PROGRAM", conflicts_with = "redis_socket")]
    pub redis_server: Option<PathBuf>,
    /// Redis: the one that listens on this unix socket. It should be one without persistence.
    #[arg(long, value_name = "SOCKET")]
    pub redis_socket: Option<PathBuf>,
    /// memcached: this program is started on a socket of its own.
    #[arg(long, value_name = "PROGRAM", conflicts_with = "memcached_socket")]
    pub memcached_server: Option<PathBuf>,
    /// memcached: the one that listens on this unix socket. It must take items as large as a
    /// block.
    #[arg(long, value_name = "SOCKET")]
    pub memcached_socket: Option<PathBuf>,
    /// All of these; `redis-server` and `memcached` are looked for where programs are.
    #[arg(long)]
    pub all: bool,
    /// Bytes of a block. Default: 2 MiB (256 KiB with `--quick`).
    #[arg(long, value_parser = parse_bytes)]
    pub block_bytes: Option<u64>,
    /// Memory that kvtide's host tier and foyer have in the disk's rows. Default: 256 MiB (32 MiB
    /// with `--quick`).
    #[arg(long, value_parser = parse_bytes)]
    pub memory_bytes: Option<u64>,
    /// Bytes stored and loaded in each turn of a disk's row. Default: 1 GiB (64 MiB with
    /// `--quick`). Three times as much memory is used for the blocks themselves.
    #[arg(long, value_parser = parse_bytes)]
    pub set_bytes: Option<u64>,
    /// Bytes stored and loaded in each turn of a RAM row. Default: 256 MiB (16 MiB with
    /// `--quick`).
    #[arg(long, value_parser = parse_bytes)]
    pub ram_set_bytes: Option<u64>,
    /// Blocks in one call to kvtide, from two threads, beside calls of one block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub batch: u32,
    /// Threads with one block a call each: of every peer, and of kvtide's other row.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Rounds; medians are reported. Default: 7 (1 with `--quick`).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Folder for everything that is written, on a disk; kept afterwards. Default: a temporary
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

/// Threads that make calls of many blocks to kvtide: while the answer to one is on its way, the
/// other's blocks keep the drive busy.
const CALLERS: usize = 2;

/// Sizes of one run.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    block_bytes: u64,
    memory_bytes: u64,
    disk_blocks: usize,
    ram_blocks: usize,
    batch: usize,
    threads: usize,
    rounds: u32,
}

impl Sizes {
    fn of(args: &PeersArgs) -> anyhow::Result<Sizes> {
        let pick = |given: Option<u64>, full: u64, quick: u64| {
            given.unwrap_or(if args.quick { quick } else { full })
        };
        let block_bytes = pick(args.block_bytes, 2 << 20, 256 << 10);
        let (batch, threads) = (args.batch as usize, args.threads as usize);
        // So that every row has whole calls and equal shares.
        let whole = |bytes: u64| -> anyhow::Result<usize> {
            let blocks = usize::try_from(bytes / block_bytes)?.max(1);
            Ok(blocks.next_multiple_of(batch * threads))
        };
        let sizes = Sizes {
            block_bytes,
            memory_bytes: pick(args.memory_bytes, 256 << 20, 32 << 20),
            disk_blocks: whole(pick(args.set_bytes, 1 << 30, 64 << 20))?,
            ram_blocks: whole(pick(args.ram_set_bytes, 256 << 20, 16 << 20))?,
            batch,
            threads,
            rounds: args.rounds.unwrap_or(if args.quick { 1 } else { 7 }),
        };
        ensure!(block_bytes.is_multiple_of(4096), "--block-bytes must be a multiple of 4096");
        ensure!(block_bytes <= 64 << 20, "--block-bytes may be 64 MiB at most");
        ensure!(
            sizes.memory_bytes >= 2 * block_bytes * batch as u64,
            "--memory-bytes must hold two calls of {batch} blocks of {}",
            show_bytes(block_bytes)
        );
        ensure!(
            sizes.disk_bytes() >= 2 * sizes.memory_bytes,
            "--set-bytes must be at least twice --memory-bytes, or memory is measured"
        );
        Ok(sizes)
    }

    fn disk_bytes(&self) -> u64 {
        self.disk_blocks as u64 * self.block_bytes
    }

    fn ram_bytes(&self) -> u64 {
        self.ram_blocks as u64 * self.block_bytes
    }

    /// Room on disk for kvtide and for foyer: some turns, so that both reclaim.
    fn room_bytes(&self) -> u64 {
        (4 * self.disk_bytes()).next_multiple_of(256 << 20).max(1 << 30)
    }
}

/// Everything that takes part.
struct Field {
    peers: Vec<Box<dyn Peer>>,
    skipped: Vec<Skipped>,
    pool: Arc<Pool>,
    ram: Arc<Shared>,
    disk: Arc<Shared>,
}

impl Field {
    fn gather(args: &PeersArgs, sizes: &Sizes, folder: &Path) -> anyhow::Result<Field> {
        let pool = Pool::make(sizes.disk_blocks.max(sizes.ram_blocks), sizes.block_bytes)?;
        let ram_bytes = 4 * sizes.ram_bytes();
        let ram = Shared::start(folder, ram_bytes, 0, sizes.block_bytes)?;
        let room = sizes.room_bytes();
        let disk = Shared::start(folder, sizes.memory_bytes, room, sizes.block_bytes)?;
        let mut field = Field { peers: Vec::new(), skipped: Vec::new(), pool, ram, disk };
        for (shared, blocks) in [(&field.ram, sizes.ram_blocks), (&field.disk, sizes.disk_blocks)] {
            let many = Kvtide::make(shared, CALLERS, sizes.batch, blocks)?;
            let one = Kvtide::make(shared, sizes.threads, 1, blocks)?;
            field.peers.extend([Box::new(many) as Box<dyn Peer>, Box::new(one)]);
        }
        field.add_files(args, sizes, folder);
        field.add_server(args, sizes, folder, Kind::Redis);
        field.add_server(args, sizes, folder, Kind::Memcached);
        field.add_foyer(args, sizes, folder);
        field.peers.sort_by_key(|peer| peer.about().group == peer::Group::Disk);
        Ok(field)
    }

    fn skip(&mut self, peer: &'static str, why: impl Into<String>) {
        self.skipped.push(Skipped { peer, why: why.into() });
    }

    fn add_files(&mut self, args: &PeersArgs, sizes: &Sizes, folder: &Path) {
        if !args.files && !args.all {
            return self.skip("files", "not asked for; name it with --files");
        }
        for through in [Through::PageCache, Through::PageCacheEmptied, Through::Direct] {
            let blocks = match through {
                Through::PageCache => sizes.ram_blocks,
                Through::PageCacheEmptied | Through::Direct => sizes.disk_blocks,
            };
            match Files::make(folder, through, sizes.threads, &self.pool, blocks) {
                Ok(files) => self.peers.push(Box::new(files)),
                Err(error) => self.skip(
                    "files",
                    format!("{through:?}: {error:#}; name a folder on a disk with --store"),
                ),
            }
        }
    }

    fn add_server(&mut self, args: &PeersArgs, sizes: &Sizes, folder: &Path, kind: Kind) {
        let (program, socket, default) = match kind {
            Kind::Redis => (&args.redis_server, &args.redis_socket, "redis-server"),
            Kind::Memcached => (&args.memcached_server, &args.memcached_socket, "memcached"),
        };
        let name = kind.name();
        let program = program.clone().or(args.all.then(|| default.into()));
        // What is stored, the values that replace it, and what the server needs for itself.
        let memory_bytes = 2 * sizes.ram_bytes() + (256 << 20);
        let item_bytes = sizes.block_bytes + (1 << 20);
        let server = match (socket, program) {
            (Some(socket), _) => Server::at(kind, socket),
            (None, Some(program)) => {
                Server::start(kind, &program, folder, memory_bytes, item_bytes)
            }
            (None, None) => {
                let how = format!("--{name}-server PROGRAM or --{name}-socket SOCKET");
                return self.skip(name, format!("not asked for; name it with {how}"));
            }
        };
        let peer = server.and_then(|server| {
            ServerPeer::make(server, sizes.threads, &self.pool, sizes.ram_blocks)
        });
        match peer {
            Ok(peer) => self.peers.push(Box::new(peer)),
            Err(error) => {
                let how = format!(
                    "install {default} and name it with --{name}-server PROGRAM, or name the \
                     socket of one that runs with --{name}-socket SOCKET"
                );
                self.skip(name, format!("{error:#}; {how}"));
            }
        }
    }

    #[cfg(feature = "foyer")]
    fn add_foyer(&mut self, args: &PeersArgs, sizes: &Sizes, folder: &Path) {
        if !args.foyer && !args.all {
            return self.skip("foyer", "not asked for; name it with --foyer");
        }
        let setup = foyer::Setup {
            folder: folder.to_owned(),
            memory_bytes: sizes.memory_bytes,
            disk_bytes: sizes.room_bytes(),
            block_bytes: sizes.block_bytes,
            blocks: sizes.disk_blocks,
            threads: sizes.threads,
        };
        for engine in [foyer::Engine::Psync, foyer::Engine::Uring] {
            self.peers.push(Box::new(foyer::Foyer::make(engine, setup.clone(), &self.pool)));
        }
    }

    #[cfg(not(feature = "foyer"))]
    fn add_foyer(&mut self, _args: &PeersArgs, _sizes: &Sizes, _folder: &Path) {
        self.skip(
            "foyer",
            "this program was built without it; build with `cargo build --release -p kvtide-bench \
             --features foyer`",
        );
    }

    fn machine(&self, scratch: &Scratch) -> Value {
        let first_line = |path: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.lines().next().unwrap_or("unknown").to_owned()
        };
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        json!({
            "cpu": cpu.map_or("unknown", |(_, name)| name.trim()),
            "cpus": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            "kernel": first_line("/proc/sys/kernel/osrelease"),
            "huge_pages": first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
            "load_average": first_line("/proc/loadavg"),
            "folder": scratch.path(),
            "file_system": scratch.kind(),
            "regions": format!(
                "memory shared with the daemon, shmem_enabled: {}",
                first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
            ),
            "kvtide_pages": self.disk.status().host_pages,
            "kvtide_io": self.disk.status().nvme_io,
            "pool_pages": self.pool.pages(),
        })
    }
}

/// Runs `peers`.
///
/// # Errors
/// kvtide could not be started, or there is no folder on a disk. A peer that fails is named, and
/// the others go on.
pub fn run(args: &PeersArgs) -> anyhow::Result<ExitCode> {
    let sizes = Sizes::of(args)?;
    let scratch = Scratch::make(args.store.as_deref())?;
    let mut field = Field::gather(args, &sizes, scratch.path())?;
    for Skipped { peer, why } in &field.skipped {
        eprintln!("SKIPPED: {peer}: {why}");
    }
    let machine = field.machine(&scratch);
    if !args.json {
        say_setup(&sizes, &machine);
    }
    let abouts = field.peers.iter().map(|peer| peer.about().clone()).collect();
    let mut results = Results::new(abouts, field.skipped.clone());
    drive_all(&sizes, &mut field.peers, &mut results)?;
    // The daemons and servers end before the folder does.
    drop(field);
    if args.json {
        say_json(&results.json(sizes.block_bytes, machine))?;
    } else {
        results.table().say();
        say("");
        say(NOTES);
    }
    Ok(if results.clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the table cannot say in a column.
const NOTES: &str = "\
in flight: threads x blocks a call. kvtide/it: kvtide with many blocks a call, over the row; medians
of the ratios of each round. p50 / p99: of each block, until the call that moved it had ended. CPU:
this process and the server. from memory: loads of a disk's row that memory answered. page cache >
disk: the files were written out and dropped from the page cache between storing and loading, which
is not timed.";

fn say_setup(sizes: &Sizes, machine: &Value) {
    let fact = |name: &str| machine.get(name).and_then(Value::as_str).unwrap_or("").to_owned();
    say(&format!(
        "{}, {}, Linux {}; {} on {}; load average {}",
        fact("cpu"),
        machine.get("cpus").unwrap_or(&Value::Null),
        fact("kernel"),
        fact("folder"),
        fact("file_system"),
        fact("load_average"),
    ));
    say(&format!(
        "blocks of {}; disk rows {} with {} of memory, RAM rows {}; {} rounds",
        show_bytes(sizes.block_bytes),
        show_bytes(sizes.disk_bytes()),
        show_bytes(sizes.memory_bytes),
        show_bytes(sizes.ram_bytes()),
        sizes.rounds,
    ));
    say(&format!("kvtide: {}; {}", fact("kvtide_pages"), fact("kvtide_io")));
    say(&format!("kvtide's buffers: {}", fact("regions")));
    say(&format!("the peers' buffers: {}", fact("pool_pages")));
}

/// All turns of all rounds. The first peer of a round is another one in the next. A peer that has
/// failed is not asked again.
fn drive_all(
    sizes: &Sizes,
    peers: &mut [Box<dyn Peer>],
    results: &mut Results,
) -> anyhow::Result<()> {
    let progress = Progress::new(u64::from(sizes.rounds) * peers.len() as u64);
    let mut failed = vec![false; peers.len()];
    let mut done = 0;
    for round in 0..sizes.rounds {
        for step in 0..peers.len() {
            let row = (step + round as usize) % peers.len();
            let (Some(peer), Some(failed)) = (peers.get_mut(row), failed.get_mut(row)) else {
                continue;
            };
            done += 1;
            if *failed {
                continue;
            }
            progress.note(peer.about().name.clone());
            let blocks = match peer.about().group {
                peer::Group::Ram => sizes.ram_blocks,
                peer::Group::Disk => sizes.disk_blocks,
            };
            let shares = drive::shares(peer.about(), row, round, blocks);
            let block_bytes = usize::try_from(sizes.block_bytes)?;
            match drive::turn(&mut **peer, &shares, block_bytes) {
                Ok(turn) => results.add(row, round, turn),
                Err(error) => {
                    *failed = true;
                    // It may be half done; what it still does would disturb the others.
                    let _ = peer.close(&shares);
                    results.failed(format!("{}: {error:#}", peer.about().name));
                }
            }
            progress.set(done);
        }
    }
    progress.end();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> PeersArgs {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: PeersArgs,
        }
        let words = std::iter::once(&"peers").chain(words);
        <Cli as clap::Parser>::parse_from(words).args
    }

    #[test]
    fn sizes_that_would_measure_memory_are_refused() {
        let sizes = Sizes::of(&args(&[])).unwrap();
        assert_eq!((sizes.disk_blocks, sizes.ram_blocks, sizes.rounds), (512, 128, 7));
        assert_eq!(Sizes::of(&args(&["--quick", "--threads", "3"])).unwrap().disk_blocks % 48, 0);
        for bad in [
            ["--set-bytes", "64MiB"],
            ["--memory-bytes", "32MiB"],
            ["--memory-bytes", "1GiB"],
            ["--block-bytes", "5000"],
            ["--block-bytes", "128MiB"],
        ] {
            let mut words = bad.to_vec();
            words.extend(["--threads", "1"]);
            assert!(Sizes::of(&args(&words)).is_err(), "{bad:?}");
        }
    }
}
