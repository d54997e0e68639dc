//! `simulate`: the seeded simulation of the core, for as many seeds or minutes as are wanted.
//!
//! CI runs a few hundred seeds as a test; this is for thousands, and for nights. The first seed
//! that fails ends the run, and is printed with the command that repeats it.

use std::{
    ops::Range,
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use clap::Args;
use kvtide_tiers::catalog::simulation::{Counts, Failure, simulate};
use serde_json::{Value, json};

use crate::{
    report::{Progress, say, say_json},
    units::show_count,
};

/// A line for a log this often, where no bar is shown.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Arguments of `simulate`.
#[derive(Args, Clone, Debug)]
pub struct SimulateArgs {
    /// The seeds: the first one, and the one behind the last.
    #[arg(long, default_value = "0..10000", value_parser = parse_seeds)]
    pub seeds: Range<u64>,
    /// Go on with further seeds until so many minutes are over.
    #[arg(long)]
    pub minutes: Option<u64>,
    /// Threads. Default: one for each processor.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Print one JSON object instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Parses `A..B`.
///
/// # Errors
/// A sentence that says what is allowed.
fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let wrong = || format!("`{text}` are no seeds; write the first and the end, such as 0..10000");
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    let seeds = first.parse().map_err(|_| wrong())?..end.parse().map_err(|_| wrong())?;
    if seeds.is_empty() { Err(wrong()) } else { Ok(seeds) }
}

/// What all threads share.
struct Work {
    next: AtomicU64,
    end: u64,
    until: Option<Instant>,
    failed: AtomicBool,
    done: AtomicU64,
    found: Mutex<(Counts, Option<Box<Failure>>)>,
}

impl Work {
    fn run(&self) {
        while !self.failed.load(Ordering::Relaxed) {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            let over = self.until.map_or(seed >= self.end, |until| Instant::now() >= until);
            if over {
                return;
            }
            let result = simulate(seed);
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            self.done.fetch_add(1, Ordering::Relaxed);
            match result {
                Ok(counts) => found.0.add(&counts),
                Err(failure) => {
                    self.failed.store(true, Ordering::Relaxed);
                    // Of several, the one that every run finds.
                    if found.1.as_ref().is_none_or(|first| first.seed > failure.seed) {
                        found.1 = Some(failure);
                    }
                }
            }
        }
    }
}

/// Runs `simulate`. Exit status 1: a seed failed.
///
/// # Errors
/// The result cannot be printed.
pub fn run(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(processors).max(1);
    let work = Work {
        next: AtomicU64::new(args.seeds.start),
        end: args.seeds.end,
        until: args.minutes.map(|minutes| started + Duration::from_secs(60 * minutes)),
        failed: AtomicBool::new(false),
        done: AtomicU64::new(0),
        found: Mutex::default(),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(|| work.run())).collect();
        watch(args, &work, started, || threads.iter().all(|thread| thread.is_finished()));
    });
    let done = work.done.load(Ordering::Relaxed);
    let (counts, failure) = work.found.into_inner().unwrap_or_else(PoisonError::into_inner);
    report(args, done, started.elapsed(), &counts, failure.as_deref())?;
    Ok(ExitCode::from(u8::from(failure.is_some())))
}

/// Shows how far it is.
fn watch(args: &SimulateArgs, work: &Work, started: Instant, is_over: impl Fn() -> bool) {
    let seeds = args.seeds.end - args.seeds.start;
    let progress = Progress::new(args.minutes.map_or(seeds, |minutes| 60 * minutes));
    let mut logged = Instant::now();
    while !is_over() {
        std::thread::sleep(Duration::from_millis(20));
        let done = work.done.load(Ordering::Relaxed);
        let seconds = started.elapsed().as_secs();
        progress.set(if args.minutes.is_some() { seconds } else { done });
        progress.note(format!("{} seeds", show_count(done)));
        if logged.elapsed() >= LOG_EVERY {
            logged = Instant::now();
            eprintln!("{seconds} s: {} seeds are clean", show_count(done));
        }
    }
    progress.end();
}

fn report(
    args: &SimulateArgs,
    done: u64,
    took: Duration,
    counts: &Counts,
    failure: Option<&Failure>,
) -> anyhow::Result<()> {
    let repeat = failure.map(|failure| {
        format!("kvtide-bench simulate --seeds {}..{}", failure.seed, failure.seed + 1)
    });
    if args.json {
        say_json(&json!({
            "seeds": done,
            "first_seed": args.seeds.start,
            "seconds": took.as_secs_f64(),
            "clean": failure.is_none(),
            "failure": failure.map(|failure| failed(failure, repeat.as_deref())),
            "steps": counts.steps,
            "events": counts.events,
            "lookups": counts.lookups,
            "blocks_found": counts.hits,
            "blocks_stored": counts.stored,
            "blocks_loaded": counts.loaded,
            "tickets": counts.tickets,
            "pins": counts.pins,
            "restarts": counts.restarts,
            "audits": counts.audits,
        }))?;
        return Ok(());
    }
    if let (Some(failure), Some(repeat)) = (failure, repeat) {
        say(&format!("{failure}again: {repeat}"));
    }
    let verdict = if failure.is_some() { "the last of them failed" } else { "all clean" };
    say(&format!("{} seeds in {:.1} s, {verdict}", show_count(done), took.as_secs_f64()));
    say(&format!(
        "{} steps, {} events, {} blocks stored, {} loaded, {} restarts",
        show_count(counts.steps),
        show_count(counts.events),
        show_count(counts.stored),
        show_count(counts.loaded),
        show_count(counts.restarts),
    ));
    Ok(())
}

fn failed(failure: &Failure, repeat: Option<&str>) -> Value {
    json!({
        "seed": failure.seed,
        "step": failure.step,
        "complaint": failure.complaint,
        "last": failure.last,
        "again": repeat,
    })
}
