//! Lookups by several clients through a real daemon, beside a raw socket.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::Barrier,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use clap::Args;
use futures::{StreamExt, stream::FuturesUnordered};
use kvtide_client::{
    BlockKey, Client, ClientConfig, NamespaceHandle, Outcome, RegionLayout, blocking,
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::{catalog::key, percentile};
use crate::{
    daemon::{Daemon, DaemonSpec},
    payload::Payload,
    process::cpu_seconds,
    replay::bench_namespace,
};

/// Blocks of the prefix that is looked up.
const PREFIX_BLOCKS: u32 = 256;

/// Different prefixes.
const PREFIXES: u64 = 16;

const BLOCK_BYTES: u64 = 4096;

/// Lookups of one client under way in the pipelined variant.
const PIPELINE: usize = 16;

/// Bytes of the raw socket's answer.
const ANSWER_BYTES: usize = 64;

/// Longest time that one call may take.
const CALL_MAX: Duration = Duration::from_secs(20);

/// Arguments of this part.
#[derive(Args, Clone, Debug)]
pub(super) struct ClientsArgs {
    /// Clients, each with a thread and a connection of its own.
    #[arg(long)]
    pub(super) clients: u32,
    /// How long each variant goes on, milliseconds.
    #[arg(long)]
    pub(super) millis: u64,
    /// Folder of the daemon.
    #[arg(long)]
    pub(super) folder: PathBuf,
}

impl ClientsArgs {
    pub(super) fn args(&self) -> Vec<String> {
        vec![
            "clients".to_owned(),
            format!("--clients={}", self.clients),
            format!("--millis={}", self.millis),
            format!("--folder={}", self.folder.display()),
        ]
    }
}

/// Calls that were made, by all clients.
#[derive(Default)]
struct Calls {
    /// Of each, microseconds.
    micros: Vec<f64>,
    took: Duration,
}

impl Calls {
    fn per_s(&self) -> f64 {
        self.micros.len() as f64 / self.took.as_secs_f64().max(1e-9)
    }
}

/// One client's connections: one blocking, and one on a runtime of its own thread.
struct Looker {
    client: blocking::Client,
    namespace: NamespaceHandle,
    runtime: Runtime,
    pipelined: Client,
    opened: NamespaceHandle,
}

/// The keys of the prefixes.
fn prefixes() -> Vec<Vec<BlockKey>> {
    let prefix = |chain| (0..u64::from(PREFIX_BLOCKS)).map(|at| key(chain, at)).collect();
    (0..PREFIXES).map(prefix).collect()
}

impl Looker {
    fn connect(daemon: &Daemon) -> anyhow::Result<Looker> {
        let mut config = ClientConfig::new(daemon.spec().socket());
        config.call_timeout = CALL_MAX;
        config.connect_timeout = CALL_MAX;
        let client = blocking::Client::connect(config.clone())?;
        let namespace = client.open_namespace(&bench_namespace(BLOCK_BYTES))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (pipelined, opened) = runtime.block_on(async {
            let pipelined = Client::connect(config).await?;
            let opened = pipelined.open_namespace(&bench_namespace(BLOCK_BYTES)).await?;
            anyhow::Ok((pipelined, opened))
        })?;
        Ok(Looker { client, namespace, runtime, pipelined, opened })
    }

    /// Stores all prefixes.
    fn store(&self, prefixes: &[Vec<BlockKey>]) -> anyhow::Result<()> {
        let region = self.client.create_region(RegionLayout::opaque(PREFIX_BLOCKS, BLOCK_BYTES))?;
        let mut block = vec![0; BLOCK_BYTES as usize];
        let places: Vec<u32> = (0..PREFIX_BLOCKS).collect();
        for (chain, keys) in prefixes.iter().enumerate() {
            for (key, place) in keys.iter().zip(&places) {
                Payload::new().fill(key, &mut block);
                region.write_block(*place, &block)?;
            }
            let chain = chain as u64;
            let stored =
                self.client.store_prefix(&self.namespace, chain, &region, keys, &places, CALL_MAX);
            // In a folder that is kept, the daemon before has left them.
            let there = |outcome: &&Outcome| matches!(outcome, Outcome::Stored | Outcome::Present);
            let stored = stored.iter().filter(there).count();
            ensure!(stored == keys.len(), "{stored} of {} blocks were stored", keys.len());
        }
        Ok(())
    }

    /// One call after the other until `end`.
    fn blocking(&self, prefixes: &[Vec<BlockKey>], end: Instant) -> anyhow::Result<Vec<f64>> {
        let mut micros = Vec::new();
        for keys in prefixes.iter().cycle() {
            let started = Instant::now();
            if started >= end {
                break;
            }
            let asked = [(&self.namespace, &keys[..])];
            let found = self.client.try_lookup(&asked, Duration::ZERO)?;
            micros.push(started.elapsed().as_nanos() as f64 / 1e3);
            ensure!(found.blocks() == keys.len(), "{} blocks were found", found.blocks());
        }
        Ok(micros)
    }

    /// As many calls under way as [`PIPELINE`], until `end`.
    async fn pipelined(
        &self,
        prefixes: &[Vec<BlockKey>],
        end: Instant,
    ) -> anyhow::Result<Vec<f64>> {
        let mut micros = Vec::new();
        let mut under_way = FuturesUnordered::new();
        let mut next = prefixes.iter().cycle();
        loop {
            while under_way.len() < PIPELINE && Instant::now() < end {
                let keys = next.next().context("there are prefixes")?;
                under_way.push(async move {
                    let started = Instant::now();
                    let asked = [(&self.opened, &keys[..])];
                    let found = self.pipelined.try_lookup(&asked, Duration::ZERO).await;
                    (found, started.elapsed())
                });
            }
            let Some((found, took)) = under_way.next().await else { return Ok(micros) };
            let blocks = found?.blocks();
            ensure!(blocks == PREFIX_BLOCKS as usize, "{blocks} blocks were found");
            micros.push(took.as_nanos() as f64 / 1e3);
        }
    }
}

/// As many bytes as the keys have over a raw socket, and a short answer.
fn raw(end: Instant) -> anyhow::Result<Vec<f64>> {
    let (mut here, mut there) = UnixStream::pair()?;
    let request = vec![1; PREFIX_BLOCKS as usize * 32];
    let mut micros = Vec::new();
    std::thread::scope(|scope| {
        let bytes = request.len();
        scope.spawn(move || {
            let (mut buffer, answer) = (vec![0; bytes], [2; ANSWER_BYTES]);
            // Ends when the other end is closed.
            while there.read_exact(&mut buffer).is_ok() && there.write_all(&answer).is_ok() {}
        });
        let mut answer = [0; ANSWER_BYTES];
        let mut call = || {
            here.write_all(&request)?;
            here.read_exact(&mut answer)
        };
        let result = loop {
            let started = Instant::now();
            if started >= end {
                break Ok(());
            }
            if let Err(error) = call() {
                break Err(error);
            }
            micros.push(started.elapsed().as_nanos() as f64 / 1e3);
        };
        drop(here);
        result
    })?;
    Ok(micros)
}

/// Lets every client do `work` at the same time.
fn all<T: Sync>(
    clients: &[T],
    length: Duration,
    work: impl Fn(&T, Instant) -> anyhow::Result<Vec<f64>> + Sync,
) -> anyhow::Result<Calls> {
    let ready = Barrier::new(clients.len());
    let started = Instant::now();
    let mut calls = Calls::default();
    std::thread::scope(|scope| {
        let one = |client| {
            let (ready, work) = (&ready, &work);
            scope.spawn(move || {
                ready.wait();
                work(client, Instant::now() + length)
            })
        };
        for client in clients.iter().map(one).collect::<Vec<_>>() {
            match client.join() {
                Ok(micros) => calls.micros.extend(micros?),
                Err(_) => bail!("a client's thread panicked"),
            }
        }
        Ok(())
    })?;
    calls.took = started.elapsed();
    calls.micros.sort_by(f64::total_cmp);
    Ok(calls)
}

/// Measures.
///
/// # Errors
/// The daemon failed, or a lookup did not find what was stored.
pub(super) fn measure(args: &ClientsArgs) -> anyhow::Result<Value> {
    let (mut daemon, _) = Daemon::start(DaemonSpec {
        folder: args.folder.clone(),
        store: args.folder.join("store"),
        host_bytes: 128 << 20,
        nvme_bytes: 256 << 20,
        block_bytes_min: BLOCK_BYTES,
        device: None,
        fault: None,
    })?;
    let prefixes = prefixes();
    let connect = |_| Looker::connect(&daemon);
    let lookers = (0..args.clients).map(connect).collect::<anyhow::Result<Vec<_>>>()?;
    lookers.first().context("there must be a client")?.store(&prefixes)?;
    // In turns, so that a slow moment of the machine hits all of them.
    const ROUNDS: u32 = 3;
    let length = Duration::from_millis(args.millis) / ROUNDS;
    let mut sums = [Calls::default(), Calls::default(), Calls::default()];
    let mut daemon_cpu_s = 0.0;
    for _ in 0..ROUNDS {
        let cpu = || cpu_seconds(daemon.pid()).unwrap_or(0.0);
        let before = cpu();
        let blocking = all(&lookers, length, |looker, end| looker.blocking(&prefixes, end))?;
        daemon_cpu_s += cpu() - before;
        let pipelined = all(&lookers, length, |looker, end| {
            looker.runtime.block_on(looker.pipelined(&prefixes, end))
        })?;
        let raw = all(&lookers, length, |_, end| raw(end))?;
        for (sum, calls) in sums.iter_mut().zip([blocking, pipelined, raw]) {
            sum.micros.extend(calls.micros);
            sum.took += calls.took;
        }
    }
    sums.iter_mut().for_each(|sum| sum.micros.sort_by(f64::total_cmp));
    drop(lookers);
    daemon.stop()?;
    let [blocking, pipelined, raw] = &sums;
    let to_raw = percentile(&blocking.micros, 50) / percentile(&raw.micros, 50).max(1e-9);
    Ok(json!({
        "clients": args.clients,
        "prefix_blocks": PREFIX_BLOCKS,
        "blocking_calls": blocking.micros.len(),
        "blocking_calls_per_s": blocking.per_s(),
        "blocking_us_p50": percentile(&blocking.micros, 50),
        "blocking_us_p99": percentile(&blocking.micros, 99),
        "pipeline": PIPELINE,
        "pipelined_calls_per_s": pipelined.per_s(),
        "pipelined_us_p50": percentile(&pipelined.micros, 50),
        "pipelined_us_p99": percentile(&pipelined.micros, 99),
        "raw_calls_per_s": raw.per_s(),
        "raw_us_p50": percentile(&raw.micros, 50),
        "raw_us_p99": percentile(&raw.micros, 99),
        "blocking_to_raw": to_raw,
        "daemon_cpu_us_per_call": daemon_cpu_s * 1e6 / blocking.micros.len().max(1) as f64,
    }))
}
