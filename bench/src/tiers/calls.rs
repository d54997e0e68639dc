//! What a call costs beside the least that two processes can do: a 64-byte ping-pong over a unix
//! socket with another process. No block is moved here.

use std::{
    io::{Read, Write},
    os::{fd::AsFd, fd::OwnedFd, unix::net::UnixStream},
    process::{Child, ExitCode, Stdio},
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use hdrhistogram::Histogram;
use kvtide_client::{
    BlockKey, Client, ClientConfig, ForgetWhat, NamespaceHandle, Outcome, RegionLayout, blocking,
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::{measure::median, set::Set};
use crate::{
    daemon::{Daemon, this_program},
    payload::Payload,
    process::{own_seconds, thread_seconds},
    replay::bench_namespace,
    report::Table,
};

/// Bytes of a ping.
const PING_BYTES: usize = 64;

/// Keys of a lookup.
const KEYS: usize = 256;

/// Keys of a short lookup.
const KEYS_FEW: usize = 32;

/// Clients that look up at the same time.
const CLIENTS: usize = 8;

/// Bytes of the blocks that are looked up; they are never moved while calls are timed.
const BLOCK_BYTES: u64 = 64 << 10;

/// Longest time of a call that is told from longer ones, nanoseconds.
const NS_MAX: u64 = 60_000_000_000;

/// Longest time of a call.
const WAIT: Duration = Duration::from_secs(20);

/// One kind of call.
#[derive(Debug)]
struct Row {
    name: &'static str,
    /// Nanoseconds of each call, by round.
    rounds: Vec<Histogram<u64>>,
}

impl Row {
    fn quantile_us(&self, round: usize, quantile: f64) -> Option<f64> {
        let histogram = self.rounds.get(round)?;
        Some(histogram.value_at_quantile(quantile) as f64 / 1e3)
    }

    /// The median over the rounds of a quantile within each.
    fn median_us(&self, quantile: f64) -> Option<f64> {
        median((0..self.rounds.len()).filter_map(|round| self.quantile_us(round, quantile)))
    }
}

/// Lookups of several clients at once.
#[derive(Debug)]
struct Rate {
    keys: usize,
    threads: usize,
    rounds: Vec<f64>,
    daemon_us: Vec<f64>,
    client_us: Vec<f64>,
}

impl Rate {
    fn per_s(&self) -> Option<f64> {
        median(self.rounds.iter().copied())
    }

    fn name(&self) -> String {
        let threads = if self.threads == 1 { "thread" } else { "threads" };
        format!("lookups of {} keys, {} {threads}", self.keys, self.threads)
    }
}

/// What the lookups of several clients came to.
#[derive(Clone, Copy, Debug)]
struct Used {
    per_s: f64,
    /// CPU of one lookup, microseconds.
    daemon_us: f64,
    client_us: f64,
}

/// The calls and their figures.
pub(super) struct Calls {
    pong: Child,
    ping: UnixStream,
    clients: Vec<(blocking::Client, NamespaceHandle)>,
    /// Other clients, whose connections are all driven by the thread that waits for them.
    together: Vec<(Client, NamespaceHandle)>,
    runtime: Runtime,
    daemon_pid: u32,
    count: usize,
    rows: Vec<Row>,
    rates: Vec<Rate>,
    idle_percent: Option<f64>,
}

impl Calls {
    pub(super) fn new(daemon: &Daemon, quick: bool) -> anyhow::Result<Calls> {
        let (ping, other) = UnixStream::pair()?;
        let mut command = this_program("__pong")?;
        let pong =
            command.stdin(Stdio::from(OwnedFd::from(other))).stdout(Stdio::null()).spawn()?;
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let mut config = ClientConfig::new(daemon.spec().socket());
            config.call_timeout = WAIT;
            let client = blocking::Client::connect(config)?;
            let namespace = client.open_namespace(&bench_namespace(BLOCK_BYTES))?;
            clients.push((client, namespace));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let together = runtime.block_on(connect_all(daemon))?;
        let row = |name| Row { name, rounds: Vec::new() };
        let rate = |keys, threads| Rate {
            keys,
            threads,
            rounds: Vec::new(),
            daemon_us: Vec::new(),
            client_us: Vec::new(),
        };
        Ok(Calls {
            pong,
            ping,
            clients,
            together,
            runtime,
            daemon_pid: daemon.pid(),
            count: if quick { 50 } else { 2_000 },
            rows: vec![
                row("ping-pong, 64 bytes"),
                row("version"),
                row("lookup of 32 keys"),
                row("lookup of 256 keys"),
            ],
            rates: [KEYS_FEW, KEYS]
                .into_iter()
                .flat_map(|keys| [rate(keys, CLIENTS), rate(keys, 1)])
                .collect(),
            idle_percent: None,
        })
    }

    /// Stores a prefix and times pings, versions and lookups of it.
    pub(super) fn round(&mut self, round: u32) -> anyhow::Result<()> {
        let keys = self.store(round)?;
        let count = self.count;
        let mut ping = self.ping.try_clone()?;
        let (client, namespace) = self.clients.first().context("there is a client")?;
        let mut buffer = [7; PING_BYTES];
        let few = keys.get(..KEYS_FEW).unwrap_or(&keys);
        let measured = [
            timed(count, || {
                ping.write_all(&buffer)?;
                Ok(ping.read_exact(&mut buffer)?)
            })?,
            timed(count, || Ok(client.version().map(drop)?))?,
            timed(count, || look_up(client, namespace, few))?,
            timed(count, || look_up(client, namespace, &keys))?,
        ];
        for (row, measured) in self.rows.iter_mut().zip(measured) {
            row.rounds.push(measured);
        }
        for number in 0..self.rates.len() {
            let Some(Rate { keys: count, threads, .. }) = self.rates.get(number) else { continue };
            let keys = keys.get(..*count).unwrap_or(&keys);
            let used = match threads {
                1 => self.rate_together(keys)?,
                _ => self.rate(keys)?,
            };
            if let Some(rate) = self.rates.get_mut(number) {
                rate.rounds.push(used.per_s);
                rate.daemon_us.push(used.daemon_us);
                rate.client_us.push(used.client_us);
            }
        }
        let (client, namespace) = self.clients.first().context("there is a client")?;
        let id = namespace.id().context("the namespace is open")?;
        client.forget(&ForgetWhat::Namespace(id))?;
        Ok(())
    }

    /// CPU of a daemon that nobody asks anything, percent of a core.
    pub(super) fn idle(&mut self, quick: bool) -> anyhow::Result<()> {
        let pause = Duration::from_millis(if quick { 200 } else { 5_000 });
        // What was asked last has come to its end.
        std::thread::sleep(pause / 5);
        let before = thread_seconds(self.daemon_pid).context("the daemon is gone")?;
        let started = Instant::now();
        std::thread::sleep(pause);
        let used = thread_seconds(self.daemon_pid).context("the daemon is gone")? - before;
        self.idle_percent = Some(used.max(0.0) * 100.0 / started.elapsed().as_secs_f64());
        Ok(())
    }

    fn store(&self, round: u32) -> anyhow::Result<Vec<BlockKey>> {
        let (client, namespace) = self.clients.first().context("there is a client")?;
        let set = Set::new(3, round, 0, KEYS, KEYS);
        let layout = RegionLayout::opaque(u32::try_from(KEYS)?, BLOCK_BYTES);
        let region = client.create_region(layout)?;
        let mut buffer = vec![0; usize::try_from(BLOCK_BYTES)?];
        for block in set.blocks() {
            Payload::new().fill(&block.key, &mut buffer);
            region.write_block(block.place, &buffer)?;
        }
        let ticket = client.store(namespace, 2, &region, set.blocks(), WAIT);
        let Ok(outcomes) = client.wait(ticket, WAIT) else { bail!("a store did not end") };
        let stored = outcomes.iter().all(|outcome| *outcome == Outcome::Stored);
        ensure!(stored, "the prefix that is to be looked up was not stored");
        Ok(set.blocks().iter().map(|block| block.key).collect())
    }

    /// Lookups of all clients, each in a thread of this process.
    fn rate(&self, keys: &[BlockKey]) -> anyhow::Result<Used> {
        let start = Barrier::new(self.clients.len() + 1);
        let each = self.count;
        std::thread::scope(|scope| {
            let start = &start;
            let threads: Vec<_> = self
                .clients
                .iter()
                .map(|(client, namespace)| {
                    scope.spawn(move || {
                        start.wait();
                        let began = Instant::now();
                        (0..each).try_for_each(|_| look_up(client, namespace, keys))?;
                        anyhow::Ok((began, Instant::now()))
                    })
                })
                .collect();
            let before = self.cpu();
            start.wait();
            let mut span: Option<(Instant, Instant)> = None;
            for thread in threads {
                let Ok(done) = thread.join() else { bail!("a client's thread panicked") };
                let (began, ended) = done?;
                let (first, last) = span.unwrap_or((began, ended));
                span = Some((first.min(began), last.max(ended)));
            }
            let (began, ended) = span.context("there is a client")?;
            Ok(self.used(before, ended - began))
        })
    }

    /// Lookups of as many clients, all in this thread: what is left is mostly the daemon's share.
    fn rate_together(&self, keys: &[BlockKey]) -> anyhow::Result<Used> {
        let each = self.count;
        let keys: Arc<[BlockKey]> = keys.into();
        self.runtime.block_on(async {
            let (before, began) = (self.cpu(), Instant::now());
            let mut tasks = tokio::task::JoinSet::new();
            for (client, namespace) in &self.together {
                let (client, namespace) = (client.clone(), namespace.clone());
                let keys = Arc::clone(&keys);
                tasks.spawn(async move {
                    for _ in 0..each {
                        let asked = [(&namespace, &*keys)];
                        let found = client.try_lookup(&asked, Duration::ZERO).await?.blocks();
                        ensure!(found == keys.len(), "a lookup found {found} blocks");
                    }
                    anyhow::Ok(())
                });
            }
            while let Some(done) = tasks.join_next().await {
                done??;
            }
            Ok(self.used(before, began.elapsed()))
        })
    }

    /// CPU seconds of daemon and of this process.
    fn cpu(&self) -> (f64, f64) {
        (thread_seconds(self.daemon_pid).unwrap_or(0.0), own_seconds())
    }

    fn used(&self, before: (f64, f64), took: Duration) -> Used {
        let calls = (self.count * CLIENTS) as f64;
        let (daemon, own) = self.cpu();
        Used {
            per_s: calls / took.as_secs_f64().max(1e-9),
            daemon_us: (daemon - before.0).max(0.0) * 1e6 / calls,
            client_us: (own - before.1) * 1e6 / calls,
        }
    }

    fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Half of the round trips of the ping-pong are faster, microseconds.
    pub(super) fn ping_pong_us(&self) -> Option<f64> {
        self.rows.first()?.median_us(0.5)
    }

    /// Median, microseconds, and ratio to the ping-pong of a lookup of 256 keys.
    pub(super) fn lookup(&self) -> Option<(f64, f64)> {
        let row = self.row("lookup of 256 keys")?;
        Some((row.median_us(0.5)?, self.ratio(row)?))
    }

    /// Lookups of 256 keys a second with several clients, the better way of driving them, and in
    /// how many threads that was.
    pub(super) fn lookups_per_s(&self) -> Option<(f64, usize)> {
        let same = self.rates.iter().filter(|rate| rate.keys == KEYS);
        let rated = same.filter_map(|rate| Some((rate.per_s()?, rate.threads)));
        rated.max_by(|one, two| one.0.total_cmp(&two.0))
    }

    /// CPU of an idle daemon, percent of a core.
    pub(super) fn idle_percent(&self) -> Option<f64> {
        self.idle_percent
    }

    fn ratio(&self, row: &Row) -> Option<f64> {
        let ping = self.rows.first()?;
        let of =
            |round| Some(row.quantile_us(round, 0.5)? / ping.quantile_us(round, 0.5)?.max(0.1));
        median((0..row.rounds.len()).filter_map(of))
    }

    pub(super) fn table(&self) -> Table {
        let mut table = Table::default();
        table.row(["1 client", "p50 us", "p99 us", "x ping-pong"]);
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |us| format!("{us:.1}"));
        for row in &self.rows {
            let (p50, p99) = (row.median_us(0.5), row.median_us(0.99));
            let cells = [number(p50), number(p99), number(self.ratio(row))];
            table.row(std::iter::once(row.name.to_owned()).chain(cells));
        }
        table.row(["8 clients", "calls/s", "daemon CPU us", "clients' CPU us"]);
        for rate in &self.rates {
            let middle = |values: &[f64]| median(values.iter().copied());
            let per_s = rate.per_s().map_or("-".to_owned(), |rate| format!("{rate:.0}"));
            let cpu = [number(middle(&rate.daemon_us)), number(middle(&rate.client_us))];
            table.row([rate.name(), per_s].into_iter().chain(cpu));
        }
        table
    }

    pub(super) fn json(&self) -> Value {
        let calls = self.rows.iter().map(|row| {
            let rounds = 0..row.rounds.len();
            json!({
                "name": row.name,
                "p50_us": row.median_us(0.5),
                "p99_us": row.median_us(0.99),
                "ratio": self.ratio(row),
                "p50_us_rounds": rounds.map(|r| row.quantile_us(r, 0.5)).collect::<Vec<_>>(),
            })
        });
        let rates = self.rates.iter().map(|rate| {
            json!({
                "name": rate.name(),
                "clients": CLIENTS,
                "threads": rate.threads,
                "keys": rate.keys,
                "per_s": rate.per_s(),
                "per_s_rounds": rate.rounds,
                "daemon_cpu_us": median(rate.daemon_us.iter().copied()),
                "client_cpu_us": median(rate.client_us.iter().copied()),
            })
        });
        json!({
            "calls": calls.collect::<Vec<_>>(),
            "rates": rates.collect::<Vec<_>>(),
            "idle_daemon_percent": self.idle_percent,
        })
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        // It ends by itself with the socket; this is for when it does not.
        let _ = self.pong.kill();
        let _ = self.pong.wait();
    }
}

async fn connect_all(daemon: &Daemon) -> anyhow::Result<Vec<(Client, NamespaceHandle)>> {
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut config = ClientConfig::new(daemon.spec().socket());
        config.call_timeout = WAIT;
        let client = Client::connect(config).await?;
        let namespace = client.open_namespace(&bench_namespace(BLOCK_BYTES)).await?;
        clients.push((client, namespace));
    }
    Ok(clients)
}

/// Times `count` calls, after some that are not.
fn timed(
    count: usize,
    mut call: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Histogram<u64>> {
    let mut histogram = Histogram::new_with_bounds(1, NS_MAX, 3)?;
    for _ in 0..count / 20 {
        call()?;
    }
    for _ in 0..count {
        let begun = Instant::now();
        call()?;
        let ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        histogram.saturating_record(ns);
    }
    Ok(histogram)
}

fn look_up(
    client: &blocking::Client,
    namespace: &NamespaceHandle,
    keys: &[BlockKey],
) -> anyhow::Result<()> {
    let found = client.try_lookup(&[(namespace, keys)], Duration::ZERO)?.blocks();
    ensure!(found == keys.len(), "a lookup of {} keys found {found}", keys.len());
    Ok(())
}

/// The other process of the ping-pong: sends back what comes in at its standard input, which is a
/// socket, until that ends.
///
/// # Errors
/// Standard input is no socket.
pub fn run_pong() -> anyhow::Result<ExitCode> {
    crate::daemon::end_with_parent();
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut buffer = [0; PING_BYTES];
    while socket.read_exact(&mut buffer).is_ok() {
        socket.write_all(&buffer)?;
    }
    Ok(ExitCode::SUCCESS)
}
