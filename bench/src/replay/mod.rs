//! `replay`: a trace through a real daemon, from several client processes.
//!
//! The coordinator (this module) starts the daemon and the workers, hands out requests in the order
//! of the trace (a worker gets the next one when it is done, so at most as many are out of order as
//! there are workers), kills the daemon when asked to, and adds up. A worker does what an engine
//! does: look up, load what is there, store the rest. It compares every byte it gets.

mod gate;
mod kill;
mod region;
mod source;
mod totals;
mod wire;
mod worker;

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, ExitCode, Stdio},
    sync::{Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use kvtide_client::{ClientConfig, blocking::Client};

pub use kill::Kill;
pub use region::{DriverArgs, Share};
pub use totals::Totals;
pub(crate) use totals::histogram;
pub(crate) use worker::bench_namespace;
pub use worker::{WorkerArgs, run_worker};

use self::{gate::Gate, source::Source, wire::Done};
use crate::{
    daemon::{Daemon, DaemonSpec, this_program},
    report::{Progress, say, say_json},
    scratch::Scratch,
    units::{parse_bytes, parse_duration, show_bytes},
};

/// Arguments of `replay`.
#[derive(Args, Clone, Debug)]
pub struct ReplayArgs {
    /// The trace: Mooncake JSON lines or kvtrace CSV, plain or zstd.
    #[arg(long)]
    pub trace: PathBuf,
    /// Bytes of a block.
    #[arg(long, default_value = "64KiB", value_parser = parse_bytes)]
    pub block_bytes: u64,
    /// Capacity of the pool of each GPU. The clients' regions lie in memory of the first GPU then.
    /// Default: no GPU, and regions in host memory.
    #[arg(long, value_parser = parse_bytes)]
    pub device_bytes: Option<u64>,
    /// How the GPU is reached.
    #[command(flatten)]
    pub driver: DriverArgs,
    /// Capacity of the host tier.
    #[arg(long, default_value = "1GiB", value_parser = parse_bytes)]
    pub host_bytes: u64,
    /// Capacity of the nvme tier.
    #[arg(long, default_value = "6GiB", value_parser = parse_bytes)]
    pub nvme_bytes: u64,
    /// Client processes.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub clients: u32,
    /// Folder for daemon and store, on a disk; kept afterwards. Default: a temporary one.
    #[arg(long)]
    pub store: Option<PathBuf>,
    /// End after so many requests.
    #[arg(long)]
    pub requests: Option<u64>,
    /// Kill the daemon this often (SIGKILL), alternately at rest and in mid-flight, and check what
    /// it finds again.
    #[arg(long, value_parser = parse_duration)]
    pub kill_every: Option<Duration>,
    /// Let this part of all device operations fail (EIO, short, delayed, flipped bits).
    #[arg(long, value_parser = parse_rate)]
    pub fault_rate: Option<f64>,
    /// Seed of the failures.
    #[arg(long, default_value_t = 1)]
    pub fault_seed: u64,
    /// Replay for this long; the trace starts over, with other keys, when it ends before.
    #[arg(long, value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// Keep to the trace's times, this many times as fast. Default: as fast as possible.
    #[arg(long, value_parser = parse_rate)]
    pub speed: Option<f64>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err(format!("`{text}` is not a number above 0")),
    }
}

/// Runs `replay`.
///
/// # Errors
/// The trace, the daemon or a worker failed; failures of calls are counted and not errors.
pub fn run(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    if args.fault_rate.is_some_and(|rate| rate > 1.0) {
        bail!("--fault-rate is a part of all operations: at most 1");
    }
    let totals = replay(args)?;
    if args.json {
        say_json(&totals.json())?;
    } else {
        totals.table().say();
    }
    let clean = totals.summary().wrong_bytes == 0 && totals.summary().client_failures == 0;
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Replays, and returns what was counted.
///
/// # Errors
/// As for [`run`].
pub fn replay(args: &ReplayArgs) -> anyhow::Result<Totals> {
    let source = Source::open(args)?;
    let scratch = Scratch::make(args.store.as_deref())?;
    let spec = DaemonSpec {
        folder: scratch.path().to_owned(),
        store: scratch.path().join("store"),
        host_bytes: args.host_bytes,
        nvme_bytes: args.nvme_bytes,
        block_bytes_min: args.block_bytes,
        device: args.device_bytes.map(|bytes| (bytes, args.driver.device_library.clone())),
        fault: args.fault_rate.map(|rate| (rate, args.fault_seed)),
    };
    let (mut daemon, start) = Daemon::start(spec)?;
    let gpu = args.device_bytes.map(|bytes| gpu_in_use(&daemon, bytes)).transpose()?;
    if !args.json {
        say(&format!(
            "daemon in {} ({}), ready after {} ms; {}host {}, nvme {}, blocks of {}, {} clients",
            scratch.path().display(),
            scratch.kind(),
            start.as_millis(),
            gpu.as_ref().map_or(String::new(), |gpu| format!("pool on {gpu}, ")),
            show_bytes(args.host_bytes),
            show_bytes(args.nvme_bytes),
            show_bytes(args.block_bytes),
            args.clients,
        ));
    }
    let workers: Vec<Worker> =
        (0..args.clients).map(|at| Worker::start(args, &daemon, at)).collect::<Result<_, _>>()?;
    let mut totals = Totals::new(args.block_bytes, start, scratch.kind());
    totals.gpu = gpu;
    coordinate(args, &mut daemon, source, workers, &mut totals)?;
    totals.daemon_memory = crate::process::memory(daemon.pid()).unwrap_or_default();
    totals.ask_daemon(&daemon);
    totals.stop_ms = u64::try_from(daemon.stop()?.as_millis()).unwrap_or(u64::MAX);
    totals.daemon_cpu_s = daemon.cpu_seconds();
    Ok(totals)
}

/// What the daemon says of its GPUs.
///
/// # Errors
/// It has none in use, or one without the pool: then a replay would count other things.
fn gpu_in_use(daemon: &Daemon, pool_bytes: u64) -> anyhow::Result<String> {
    let status = Client::connect(ClientConfig::new(daemon.spec().socket()))?.status()?;
    if status.devices.is_empty() {
        bail!("the daemon uses no GPU: {}", status.device);
    }
    let words = status.devices.iter().map(|gpu| match &gpu.off {
        Some(why) => bail!("the daemon does not use {} ({}): {why}", gpu.name, gpu.uuid),
        None if gpu.pool_bytes < pool_bytes => {
            bail!("the pool on {} has {}", gpu.name, show_bytes(gpu.pool_bytes))
        }
        None => Ok(format!("{} ({}, driver {})", gpu.name, show_bytes(gpu.pool_bytes), gpu.driver)),
    });
    Ok(words.collect::<anyhow::Result<Vec<_>>>()?.join(" and "))
}

/// What a pump tells the coordinator.
enum News {
    Done(Instant, Instant, Box<Done>),
    Ended(f64),
    Broken(anyhow::Error),
}

fn coordinate(
    args: &ReplayArgs,
    daemon: &mut Daemon,
    source: Source,
    workers: Vec<Worker>,
    totals: &mut Totals,
) -> anyhow::Result<()> {
    let started = Instant::now();
    let progress = Progress::new(source.requests_expected());
    let (gate, source) = (Gate::default(), Mutex::new(source));
    let (tell, news) = mpsc::channel();
    let mut running = workers.len();
    let result = std::thread::scope(|scope| {
        for worker in workers {
            let (tell, gate, source) = (tell.clone(), &gate, &source);
            scope.spawn(move || pump(worker, gate, source, started, &tell));
        }
        let mut next_kill = args.kill_every.map(|every| started + every);
        let mut result = Ok(());
        while running > 0 {
            match news.recv_timeout(Duration::from_millis(100)) {
                Ok(News::Done(from, to, done)) => totals.add(from, to, *done),
                Ok(News::Ended(cpu_s)) => {
                    running -= 1;
                    totals.client_cpu_s += cpu_s;
                }
                Ok(News::Broken(error)) => {
                    running -= 1;
                    result = result.and(Err(error));
                }
                Err(_) => {}
            }
            progress.set(totals.summary().requests);
            progress.note(totals.short());
            if result.is_ok() && running > 0 {
                result = daemon.check_alive();
            }
            if let (Some(at), Some(every), true) = (next_kill, args.kill_every, result.is_ok())
                && Instant::now() >= at
                && running > 0
            {
                match kill::kill_once(
                    daemon,
                    &gate,
                    started,
                    totals.kills().len().is_multiple_of(2),
                ) {
                    Ok((kill, stats)) => totals.add_kill(kill, stats),
                    Err(error) => result = Err(error),
                }
                next_kill = Some(Instant::now() + every);
            }
            if result.is_err() {
                // Nothing more is handed out; the pumps end, and with them this loop.
                source.lock().unwrap_or_else(PoisonError::into_inner).end();
                gate.open();
            }
        }
        result
    });
    progress.end();
    totals.set_seconds(started.elapsed());
    result
}

/// Gives one worker request after request.
fn pump(
    mut worker: Worker,
    gate: &Gate,
    source: &Mutex<Source>,
    started: Instant,
    tell: &mpsc::Sender<News>,
) {
    let result = loop {
        let _pass = gate.enter();
        let next = source.lock().unwrap_or_else(PoisonError::into_inner).next(started);
        let job = match next {
            Ok(Some(job)) => job,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        let from = Instant::now();
        match worker.run(&job) {
            Ok(done) => {
                // The coordinator outlives the pumps.
                let _ = tell.send(News::Done(from, Instant::now(), Box::new(done)));
            }
            Err(error) => break Err(error),
        }
    };
    let cpu = crate::process::cpu_seconds(worker.child.id()).unwrap_or(0.0);
    let _ = tell.send(match result.and(worker.end()) {
        Ok(()) => News::Ended(cpu),
        Err(error) => News::Broken(error),
    });
}

/// A client process. Killed when dropped.
struct Worker {
    child: Child,
    jobs: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    fn start(args: &ReplayArgs, daemon: &Daemon, number: u32) -> anyhow::Result<Worker> {
        let mut command = this_program("__worker")?;
        if args.device_bytes.is_some() {
            command.args(["--gpu", args.driver.device_share.name()]);
            if let Some(library) = &args.driver.device_library {
                command.arg("--device-library").arg(library);
            }
        }
        let mut child = command
            .arg("--socket")
            .arg(daemon.spec().socket())
            .args(["--block-bytes", &args.block_bytes.to_string()])
            .args(["--number", &number.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a client process")?;
        let (Some(jobs), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("a client process has no pipes");
        };
        Ok(Worker { child, jobs: Some(jobs), answers: BufReader::new(answers) })
    }

    fn run(&mut self, job: &wire::Job) -> anyhow::Result<Done> {
        let mut line = serde_json::to_string(job)?;
        line.push('\n');
        let jobs = self.jobs.as_mut().context("the client process has ended")?;
        jobs.write_all(line.as_bytes()).context("a client process died")?;
        line.clear();
        if self.answers.read_line(&mut line).context("a client process died")? == 0 {
            bail!("a client process died during request {}", job.index);
        }
        let done: Done = serde_json::from_str(&line).context("a client process talks nonsense")?;
        if done.index != job.index {
            bail!("a client process answered request {} instead of {}", done.index, job.index);
        }
        Ok(done)
    }

    /// Lets the process end by itself.
    fn end(&mut self) -> anyhow::Result<()> {
        drop(self.jobs.take());
        let status = self.child.wait()?;
        if !status.success() {
            bail!("a client process ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
