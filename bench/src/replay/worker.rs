//! A client process of a replay: does what an engine does with each request, and compares every
//! byte that it gets.

use std::{
    io::{BufRead, Write},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Args;
use kvtide_client::{
    BlockKey, CallError, ClientConfig, ClientError, ElementType, KvLayout, LoadBlock, Lookup,
    Model, Namespace, NamespaceHandle, NamespaceSpec, Outcome, RankScope, RegionLayout,
    RejectReason, StoreBlock, Ticket, Tier, blocking::Client,
};
use kvtide_tiers::catalog::Limit;

use super::{
    region::{Region, Share, choose_driver},
    wire::{Done, Job},
};
use crate::payload::Payload;

/// Places in a worker's region; a longer path is moved in parts.
const PLACES: u32 = 512;

/// Longest region, whatever the block size.
const REGION_BYTES_MAX: u64 = 256 << 20;

/// How long a lease is asked for.
const LEASE: Duration = Duration::from_secs(60);

/// How long one call waits for its ticket, and how long the ticket is waited for after that.
const WAIT: Duration = Duration::from_secs(15);

/// How often a store that found no room is tried again, and after which pauses.
const BUSY_TRIES: u32 = 40;
const BUSY_PAUSE: Duration = Duration::from_millis(2);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(50);

/// Arguments of a worker.
#[derive(Args, Clone, Debug)]
pub struct WorkerArgs {
    /// The daemon's socket.
    #[arg(long)]
    socket: PathBuf,
    /// Bytes of a block.
    #[arg(long)]
    block_bytes: u64,
    /// Number of the worker.
    #[arg(long)]
    number: u32,
    /// The region lies in GPU memory that is shared in this way.
    #[arg(long, value_enum)]
    gpu: Option<Share>,
    /// The driver's library.
    #[arg(long)]
    device_library: Option<PathBuf>,
}

/// The namespace of all bench blocks of this size.
pub(crate) fn bench_namespace(block_bytes: u64) -> NamespaceSpec {
    NamespaceSpec::own(Namespace {
        model: Model {
            weights: "kvtide-bench generated payload".into(),
            revision: "1".into(),
            adapter: String::new(),
        },
        layout: KvLayout {
            layers: 1,
            kv_heads: 1,
            head_dim: 128,
            element: ElementType::Bf16,
            tokens_per_block: 512,
            kv_group: 0,
            ranks: RankScope::Rank { rank: 0, world: 1 },
            page_layout_version: u32::try_from(block_bytes).unwrap_or(u32::MAX),
        },
        salt: String::new(),
    })
}

/// Runs a worker until its input ends.
///
/// # Errors
/// It cannot connect at first, or its pipes break.
pub fn run_worker(args: &WorkerArgs) -> anyhow::Result<ExitCode> {
    crate::daemon::end_with_parent();
    let mut worker = Worker::connect(args)?;
    let (input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    for line in input.lines() {
        let job: Job = serde_json::from_str(&line?).context("the coordinator talks nonsense")?;
        let mut answer = serde_json::to_string(&worker.run(&job))?;
        answer.push('\n');
        output.write_all(answer.as_bytes())?;
        output.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

struct Worker {
    client: Client,
    namespace: NamespaceHandle,
    region: Region,
    /// Where the region lies, when not in host memory.
    share: Option<Share>,
    layout: RegionLayout,
    payload: Payload,
    /// One block.
    buffer: Vec<u8>,
    conversation: u64,
}

/// One block of the request under way.
#[derive(Clone, Copy)]
struct Block {
    key: BlockKey,
    parent: BlockKey,
    position: u32,
}

impl Worker {
    fn connect(args: &WorkerArgs) -> anyhow::Result<Worker> {
        let mut config = ClientConfig::new(&args.socket);
        config.name = format!("kvtide-bench worker {}", args.number);
        // A replay measures a loaded machine; a slow answer is to show in the percentiles.
        config.call_timeout = Duration::from_secs(10);
        let client = Client::connect(config)?;
        let namespace = client.open_namespace(&bench_namespace(args.block_bytes))?;
        let places = (REGION_BYTES_MAX / args.block_bytes).clamp(1, u64::from(PLACES));
        let layout = RegionLayout::opaque(u32::try_from(places)?, args.block_bytes);
        choose_driver(args.device_library.as_deref())?;
        let share = args.gpu;
        let region = Region::make(&client, &layout, share)?;
        let buffer = vec![0; usize::try_from(args.block_bytes)?];
        let conversation = u64::from(args.number) + 1;
        let payload = Payload::new();
        Ok(Worker { client, namespace, region, share, layout, payload, buffer, conversation })
    }

    fn run(&mut self, job: &Job) -> Done {
        let mut done = Done { index: job.index, blocks: job.path.len() as u64, ..Done::default() };
        let blocks = self.blocks(job);
        if !self.settled() {
            done.failures += 1;
            done.say("places of the region stay in doubt".to_owned());
            return done;
        }
        let loaded = self.load(&blocks, &mut done);
        let rest: Vec<Block> = blocks
            .iter()
            .zip(loaded.into_iter().chain(std::iter::repeat(false)))
            .filter_map(|(block, loaded)| (!loaded).then_some(*block))
            .collect();
        for part in rest.chunks(self.layout.blocks as usize) {
            self.store(part, &mut done);
        }
        done
    }

    /// The keys of a path. Each number of a trace stands for a whole prefix already; the chain
    /// makes the key depend on it in kvtide's own way, and the pass keeps repetitions apart.
    fn blocks(&self, job: &Job) -> Vec<Block> {
        let extras = if job.pass == 0 { Vec::new() } else { job.pass.to_le_bytes().to_vec() };
        let mut parent = BlockKey::ROOT;
        let chain = job.path.iter().zip(0u32..).map(|(id, position)| {
            let tokens = [*id as u32, (*id >> 32) as u32];
            let key = self.namespace.key().block(&parent, &tokens, &extras);
            let block = Block { key, parent, position };
            parent = key;
            block
        });
        chain.collect()
    }

    /// Looks up the path and loads what is there; says for each block found whether it came.
    fn load(&mut self, blocks: &[Block], done: &mut Done) -> Vec<bool> {
        let keys: Vec<BlockKey> = blocks.iter().map(|block| block.key).collect();
        // A path that is too long for one lease is looked up in part.
        let mut asked = keys.len();
        let found = loop {
            let started = Instant::now();
            let keys = keys.get(..asked).unwrap_or(&keys);
            let found = self.client.try_lookup(&[(&self.namespace, keys)], LEASE);
            done.lookup_us.push(micros(started));
            match found {
                Err(ClientError::Call(CallError::Busy(Limit::Pins))) if asked > 1 => asked /= 2,
                found => break found,
            }
        };
        let hit = match found {
            Ok(Lookup::Hit(hit)) => hit,
            Ok(Lookup::Miss) => {
                missed(done, "not found", blocks.len());
                return Vec::new();
            }
            Err(error) => {
                self.failed(&error, "lookup", done);
                missed(done, "not asked", blocks.len());
                return Vec::new();
            }
        };
        missed(done, "not found", asked.saturating_sub(hit.blocks));
        missed(done, "too many for one lease", blocks.len().saturating_sub(asked));
        let Some(lease) = hit.lease else {
            missed(done, "no lease", hit.blocks);
            return Vec::new();
        };
        let mut loaded = Vec::with_capacity(hit.blocks);
        let found = blocks.get(..hit.blocks).unwrap_or(blocks);
        for part in found.chunks(self.layout.blocks as usize) {
            let wanted: Vec<LoadBlock> = part
                .iter()
                .zip(0..)
                .map(|(block, place)| LoadBlock { key: block.key, place })
                .collect();
            let started = Instant::now();
            let ticket = self.client.load(&lease, &self.namespace, &self.region, &wanted, WAIT);
            let outcomes = self.wait(ticket, "load", done);
            done.load_us.push(micros(started));
            match outcomes {
                Some(outcomes) => {
                    for ((block, outcome), place) in part.iter().zip(outcomes).zip(0..) {
                        loaded.push(self.receive(block, place, outcome, done));
                    }
                }
                None => loaded.extend(part.iter().map(|_| false)),
            }
        }
        if let Err(error) = self.client.release(lease) {
            self.failed(&error, "release", done);
        }
        loaded
    }

    /// Compares one loaded block; true when it came, right or wrong.
    fn receive(&mut self, block: &Block, place: u32, outcome: Outcome, done: &mut Done) -> bool {
        let tier = match outcome {
            Outcome::Loaded(tier) => tier,
            Outcome::Missed(reason) => {
                missed(done, &format!("{reason:?}"), 1);
                return false;
            }
            other => {
                done.failures += 1;
                done.say(format!("a load ended as {other:?}"));
                return false;
            }
        };
        if let Err(error) = self.region.read_block(place, &mut self.buffer) {
            done.failures += 1;
            done.say(format!("cannot read a region: {error}"));
            return false;
        }
        let [device, host, nvme] = &mut done.loaded;
        *match tier {
            Tier::Device => device,
            Tier::Host => host,
            Tier::Nvme => nvme,
        } += 1;
        done.verified += 1;
        if let Some(at) = self.payload.check(&block.key, &self.buffer) {
            done.wrong_bytes += (self.buffer.len() - at) as u64;
            done.say(format!(
                "WRONG BYTES: block {} (position {}) from {} differs from byte {at} on",
                block.key,
                block.position,
                tier.name(),
            ));
        }
        true
    }

    /// Stores blocks; those that find no room are tried again for a while.
    fn store(&mut self, blocks: &[Block], done: &mut Done) {
        let mut left: Vec<(Block, u32)> = blocks.iter().copied().zip(0..).collect();
        for (block, place) in &left {
            self.payload.fill(&block.key, &mut self.buffer);
            if let Err(error) = self.region.write_block(*place, &self.buffer) {
                done.failures += 1;
                done.say(format!("cannot write a region: {error}"));
                return;
            }
        }
        let mut pause = BUSY_PAUSE;
        for attempt in 0..=BUSY_TRIES {
            let wanted: Vec<StoreBlock> = left
                .iter()
                .map(|(block, place)| StoreBlock {
                    key: block.key,
                    parent: block.parent,
                    position: block.position,
                    tokens: 512,
                    place: *place,
                })
                .collect();
            let started = Instant::now();
            let ticket =
                self.client.store(&self.namespace, self.conversation, &self.region, &wanted, WAIT);
            let outcomes = self.wait(ticket, "store", done);
            done.store_us.push(micros(started));
            let Some(outcomes) = outcomes else {
                not_stored(done, "not ended in time", left.len());
                return;
            };
            let last = attempt == BUSY_TRIES;
            left = left
                .iter()
                .zip(outcomes)
                .filter_map(|(block, outcome)| stored(outcome, last, done).then_some(*block))
                .collect();
            if left.is_empty() {
                return;
            }
            done.busy += 1;
            std::thread::sleep(pause);
            pause = (pause * 2).min(BUSY_PAUSE_MAX);
        }
    }

    /// Waits for a ticket. `None` when it did not end: then the daemon may still use the region, so
    /// the worker takes another one.
    fn wait(&mut self, ticket: Ticket, what: &str, done: &mut Done) -> Option<Vec<Outcome>> {
        if let Some(error) = ticket.failure() {
            self.failed(error, what, done);
        }
        match self.client.wait(ticket, WAIT) {
            Ok(outcomes) if self.settled() => Some(outcomes),
            Ok(_) | Err(_) => {
                done.failures += 1;
                done.say(format!("a {what} did not end within {} s", 2 * WAIT.as_secs()));
                match Region::make(&self.client, &self.layout, self.share) {
                    Ok(region) => self.region = region,
                    Err(error) => match error.downcast_ref() {
                        Some(error) => self.failed(error, "new region", done),
                        None => {
                            done.failures += 1;
                            done.say(format!("new region: {error:#}"));
                        }
                    },
                }
                None
            }
        }
    }

    /// Waits until no place of the region is in doubt. A lost connection leaves places in doubt
    /// until the daemon's end of the stream was read, with a killed daemon a matter of moments.
    fn settled(&self) -> bool {
        let until = Instant::now() + WAIT;
        while self.region.in_doubt() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    /// Sorts an error of a call: nobody there, or something that must not happen.
    fn failed(&self, error: &ClientError, what: &str, done: &mut Done) {
        match error {
            ClientError::Connect { .. }
            | ClientError::Deadline { .. }
            | ClientError::BreakerOpen { .. }
            | ClientError::Disconnected => done.away += 1,
            ClientError::Call(CallError::Busy(_)) => {}
            other => {
                done.failures += 1;
                done.say(format!("{what}: {other}"));
            }
        }
    }
}

/// Counts the outcome of a store; true when it is to be tried again.
fn stored(outcome: Outcome, last: bool, done: &mut Done) -> bool {
    let [new, present] = &mut done.stored;
    match outcome {
        Outcome::Stored => *new += 1,
        Outcome::Present => *present += 1,
        Outcome::Busy if !last => return true,
        Outcome::Busy => not_stored(done, "no room", 1),
        Outcome::Rejected(reason) => {
            not_stored(done, &format!("{reason:?}"), 1);
            // The payload of a key is always the same, so another one means that somebody lied.
            if matches!(reason, RejectReason::Mismatch | RejectReason::TooLarge) {
                done.failures += 1;
                done.say(format!("a store was rejected: {reason:?}"));
            }
        }
        other => {
            done.failures += 1;
            done.say(format!("a store ended as {other:?}"));
        }
    }
    false
}

fn missed(done: &mut Done, reason: &str, blocks: usize) {
    if blocks > 0 {
        *done.missed.entry(reason.to_owned()).or_default() += blocks as u64;
    }
}

fn not_stored(done: &mut Done, reason: &str, blocks: usize) {
    if blocks > 0 {
        *done.not_stored.entry(reason.to_owned()).or_default() += blocks as u64;
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
