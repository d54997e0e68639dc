//! Seeded simulation of the core: tiers that hold tags in place of bytes, a made-up clock, and
//! clients, operators and drives that do what they should not.
//!
//! A seed decides everything: sizes, limits and policies, what is asked, when operations end and in
//! which order, what fails, who dies. So a failure is repeated by its seed. The catalog is driven
//! only by [`Catalog::apply`](super::Catalog::apply), and by what a start takes over; a model that
//! knows nothing but events and actions says what must hold after each of them:
//!
//! - a slot, a place on nvme and a segment are used by one operation or block at a time, and are
//!   free only when nobody uses them;
//! - what is read from a place is the block that was written there, and what is loaded is what was
//!   stored under its key; a slot of host RAM has the descriptor of its block until all that was
//!   begun for that block has ended, and no slot whose block was given up is taken over by the next
//!   daemon;
//! - a leased or pinned block keeps a copy, unless something went wrong with its last one;
//! - what leases and pins hold stays within the limit;
//! - every ask is answered once, every ticket ends once, with an outcome that can be true;
//! - a block with a copy is known, and found if those before it are; what was forgotten does not
//!   come back with the next start;
//! - once everybody has left, nothing is left.
//!
//! Not in the daemon: built for tests and for feature `simulation` only.

mod audit;
mod clients;
mod dice;
mod edge;
mod media;
mod restart;
mod scenario;
mod steps;
#[cfg(test)]
mod tests;
mod world;

use std::collections::VecDeque;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};

use world::World;

/// Lines of the log that a failure shows.
const LINES_SHOWN: usize = 60;

/// Steps from one look at everything to the next.
const AUDIT_STEPS: u64 = 64;

/// What a simulation counted: whether it got anywhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Steps.
    pub steps: u64,
    /// Events that the catalog took in.
    pub events: u64,
    /// Lookups that were answered.
    pub lookups: u64,
    /// Blocks that they found.
    pub hits: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Blocks loaded.
    pub loaded: u64,
    /// Tickets that ended.
    pub tickets: u64,
    /// Pins.
    pub pins: u64,
    /// Restarts.
    pub restarts: u64,
    /// Looks at everything.
    pub audits: u64,
}

impl Counts {
    /// Adds what another simulation counted.
    pub fn add(&mut self, other: &Counts) {
        self.steps += other.steps;
        self.events += other.events;
        self.lookups += other.lookups;
        self.hits += other.hits;
        self.stored += other.stored;
        self.loaded += other.loaded;
        self.tickets += other.tickets;
        self.pins += other.pins;
        self.restarts += other.restarts;
        self.audits += other.audits;
    }
}

/// Something that must hold did not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The seed that repeats it.
    pub seed: u64,
    /// The step after which it was noticed.
    pub step: u64,
    /// What is wrong.
    pub complaint: String,
    /// The last events, and the actions that they led to.
    pub last: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "seed {}, step {}: {}", self.seed, self.step, self.complaint)?;
        self.last.iter().try_for_each(|line| writeln!(out, "  {line}"))
    }
}

impl std::error::Error for Failure {}

/// The last lines of what happened, and a hash over all of them; nothing unless it is on.
#[derive(Default)]
struct Log {
    on: bool,
    keep: usize,
    last: VecDeque<String>,
    hash: DefaultHasher,
}

impl Log {
    fn line(&mut self, line: impl FnOnce() -> String) {
        if !self.on {
            return;
        }
        let line = line();
        self.hash.write(line.as_bytes());
        self.last.push_back(line);
        if self.last.len() > self.keep {
            self.last.pop_front();
        }
    }
}

/// Simulates what a seed stands for.
///
/// # Errors
/// Something that must hold did not; what was seen of it.
pub fn simulate(seed: u64) -> Result<Counts, Box<Failure>> {
    let (result, _) = run(seed, 0, |_| {});
    // Once more, with a log: the same happens.
    result.or_else(|failure| run(seed, LINES_SHOWN, |_| {}).0.and(Err(failure)))
}

/// As [`simulate`], with a log of so many lines; `spoil` is called before the first step.
fn run(seed: u64, log: usize, spoil: impl Fn(&mut World)) -> (Result<Counts, Box<Failure>>, u64) {
    let mut world = World::new(seed, Log { on: log > 0, keep: log, ..Log::default() });
    spoil(&mut world);
    let (mut step, mut panicked) = (0, None);
    let steps = world.scenario.steps;
    while step <= steps && world.complaint().is_none() && panicked.is_none() {
        let one = || match step {
            _ if step == steps => world.come_to_rest(),
            _ => {
                world.step();
                if step % AUDIT_STEPS == 0 {
                    world.audit();
                }
            }
        };
        let result = catch_unwind(AssertUnwindSafe(one));
        panicked = result.err().map(|panic| {
            let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
            text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
        });
        step += 1;
    }
    world.counts.steps = step;
    let hash = world.log.hash.finish();
    let complaint = panicked.map(|text| format!("panicked: {text}"));
    let result = match complaint.or_else(|| world.complaint().cloned()) {
        None => Ok(world.counts),
        Some(complaint) => {
            let last = std::mem::take(&mut world.log.last).into();
            Err(Box::new(Failure { seed, step, complaint, last }))
        }
    };
    (result, hash)
}
