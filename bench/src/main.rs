//! `kvtide-bench`: replays traces through a real daemon, simulates them through the pure core, sets
//! the daemon beside `memcpy` and a raw ring, and the GPU's kernels beside its copies.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kvtide_bench::{device, peers, quality, replay, scale, sim, simulate, tiers, ttft};

#[derive(Parser)]
#[command(version, about = "Trace replay, simulation and yardsticks of kvtide")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay a trace through a real daemon from several client processes; every byte is checked.
    Replay(replay::ReplayArgs),
    /// Replay a trace through the pure core alone: no I/O, exact counts.
    Sim(sim::SimArgs),
    /// Simulate the pure core with faults, deaths and restarts, by seeds: what must hold, holds.
    Simulate(simulate::SimulateArgs),
    /// Store and load through a real daemon, beside memcpy and a raw O_DIRECT ring.
    Tiers(tiers::TiersArgs),
    /// Store and load through a real daemon, beside files, foyer, Redis and memcached.
    Peers(peers::PeersArgs),
    /// What keeping KV in 8 bits costs: divergence, perplexity, room and speed, on a real model.
    Quality(quality::QualityArgs),
    /// Gather, scatter, checksum and copies on a GPU, beside the largest copies of the same card.
    Device(device::DeviceArgs),
    /// The catalog alone at 10^4 to 10^7 blocks, recovery by store size, lookups by clients.
    Scale(scale::ScaleArgs),
    /// The time to the first token: reload from host RAM and nvme, beside recompute.
    Ttft(ttft::TtftArgs),
    /// Tokens that conversations prefill which wander over processes, beside no reuse.
    Chats(ttft::ChatsArgs),
    /// One measurement of `scale`, in a process of its own.
    #[command(name = "__scale", hide = true)]
    ScalePart(scale::PartArgs),
    /// A client process of `replay`.
    #[command(name = "__worker", hide = true)]
    Worker(replay::WorkerArgs),
    /// The other process of `tiers`' ping-pong.
    #[command(name = "__pong", hide = true)]
    Pong,
    /// The other process of `device`.
    #[command(name = "__gpu-peer", hide = true)]
    Peer(device::PeerArgs),
}

fn main() -> ExitCode {
    // Daemons, servers and engines are started by running this program again.
    let mut args = std::env::args_os().skip(1);
    let first = args.next().unwrap_or_default();
    if first == "__daemon" {
        kvtide_bench::daemon::end_with_parent();
        return kvtide_daemon::run_daemon(args);
    }
    if first == "__inference" {
        kvtide_bench::daemon::end_with_parent();
        return smallengine::process::run(args);
    }
    if first == "__exec" {
        eprintln!("kvtide-bench: {:#}", kvtide_bench::daemon::become_program(args));
        return ExitCode::from(2);
    }
    let result = match Cli::parse().command {
        Command::Replay(args) => replay::run(&args),
        Command::Quality(args) => quality::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Tiers(args) => tiers::run(&args),
        Command::Pong => tiers::run_pong(),
        Command::Peers(args) => peers::run(&args),
        Command::Scale(args) => scale::run(&args),
        Command::Ttft(args) => ttft::run(&args),
        Command::Chats(args) => ttft::run_chats(&args),
        Command::ScalePart(args) => scale::run_part(&args),
        Command::Device(args) => device::run(&args),
        Command::Peer(args) => device::run_peer(&args),
        Command::Worker(args) => replay::run_worker(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("kvtide-bench: {error:#}");
        ExitCode::from(2)
    })
}
