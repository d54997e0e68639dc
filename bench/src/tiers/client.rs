//! Clients of the daemon: each with a connection, a region and a thread of its own in this process.
//!
//! What is timed is the calls alone. Payloads are made in the region before, and compared after.
//! Several calls of one client are under way at once by issuing them without waiting and then
//! waiting for the oldest, as an engine's connector does; a call's time ends when its end is seen.

use std::{
    borrow::Cow,
    collections::VecDeque,
    rc::Rc,
    sync::Barrier,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use kvtide_client::{
    ClientConfig, ForgetWhat, Hit, Lease, LoadBlock, Lookup, NamespaceHandle, Outcome,
    RegionHandle, RegionLayout, StatusReport, StoreBlock, Ticket, Tier, blocking,
};

use super::{
    Setup,
    measure::{How, Measures, Round},
    set::{Part, Set},
};
use crate::{
    daemon::Daemon,
    payload::Payload,
    process::{own_seconds, thread_seconds},
    replay::bench_namespace,
};

/// How long one call may take.
const WAIT: Duration = Duration::from_secs(20);

/// How long a lease is asked for.
const LEASE: Duration = Duration::from_secs(60);

/// How long the daemon may take to write everything down.
const SETTLE_MAX: Duration = Duration::from_secs(120);

/// Between two questions whether all is written down: each costs some 0.1 ms of CPU.
const SETTLE_STEP: Duration = Duration::from_millis(2);

/// Times that stores which find no room are tried again, one millisecond apart.
const BUSY_TRIES: u32 = 20_000;

/// What one client did in a timed part.
#[derive(Debug)]
struct Done {
    started: Instant,
    ended: Instant,
    calls: Vec<Duration>,
    blocks: u64,
    busy: u64,
    missed: u64,
    from_host: u64,
    loaded: Vec<LoadBlock>,
    words: Vec<String>,
}

impl Done {
    fn start(blocks: usize) -> Done {
        let now = Instant::now();
        Done {
            started: now,
            ended: now,
            calls: Vec::with_capacity(blocks),
            blocks: 0,
            busy: 0,
            missed: 0,
            from_host: 0,
            loaded: Vec::with_capacity(blocks),
            words: Vec::new(),
        }
    }
}

/// One client.
struct Client {
    client: blocking::Client,
    namespace: NamespaceHandle,
    region: RegionHandle,
}

impl Client {
    fn connect(daemon: &Daemon, setup: &Setup) -> anyhow::Result<Client> {
        let mut config = ClientConfig::new(daemon.spec().socket());
        config.call_timeout = WAIT;
        let client = blocking::Client::connect(config)?;
        let namespace = client.open_namespace(&bench_namespace(setup.block_bytes))?;
        let places = u32::try_from(setup.nvme_blocks)?;
        let region = client.create_region(RegionLayout::opaque(places, setup.block_bytes))?;
        Ok(Client { client, namespace, region })
    }

    /// Makes the bytes of all blocks in the places that they are stored from.
    fn fill(&self, blocks: &[StoreBlock]) -> anyhow::Result<()> {
        let payload = Payload::new();
        let mut buffer = vec![0; usize::try_from(self.region.block_bytes())?];
        for block in blocks {
            payload.fill(&block.key, &mut buffer);
            self.region.write_block(block.place, &buffer)?;
        }
        Ok(())
    }

    /// Compares every byte of what was loaded: the wrong bytes of each block.
    fn check(&self, loaded: &[LoadBlock]) -> anyhow::Result<Vec<u64>> {
        let payload = Payload::new();
        let mut buffer = vec![0; usize::try_from(self.region.block_bytes())?];
        let mut wrong = Vec::with_capacity(loaded.len());
        for block in loaded {
            self.region.read_block(block.place, &mut buffer)?;
            let from = payload.check(&block.key, &buffer);
            wrong.push(from.map_or(0, |at| (buffer.len() - at) as u64));
        }
        Ok(wrong)
    }

    fn store(&self, blocks: &[StoreBlock], how: How) -> anyhow::Result<Done> {
        let mut parts = blocks.chunks(how.batch);
        let mut again: VecDeque<(Instant, Cow<'_, [StoreBlock]>)> = VecDeque::new();
        let mut under_way = VecDeque::with_capacity(how.calls);
        let mut tries = 0;
        let mut done = Done::start(blocks.len());
        loop {
            while under_way.len() < how.calls {
                let next = again.pop_front();
                let next = next.or_else(|| Some((Instant::now(), Cow::Borrowed(parts.next()?))));
                let Some((begun, part)) = next else { break };
                let ticket =
                    self.client.store(&self.namespace, 1, &self.region, &part, how.wait(WAIT));
                under_way.push_back((begun, part, ticket));
            }
            let Some((begun, part, ticket)) = under_way.pop_front() else { break };
            let outcomes = self.end(ticket)?;
            let busy = not_stored(&part, &outcomes, &mut done.words);
            if busy.is_empty() {
                done.calls.push(begun.elapsed());
                continue;
            }
            tries += 1;
            done.busy += 1;
            if tries > BUSY_TRIES {
                bail!("stores found no room {BUSY_TRIES} times");
            }
            again.push_back((begun, Cow::Owned(busy)));
            std::thread::sleep(Duration::from_millis(1));
        }
        done.ended = Instant::now();
        done.blocks = blocks.len() as u64;
        Ok(done)
    }

    fn load(&self, part: &Part, how: How) -> anyhow::Result<Done> {
        let mut under_way = VecDeque::with_capacity(how.calls);
        let mut done = Done::start(part.blocks());
        for chain in &part.chains {
            // Asked for while the loads of the chain before are under way.
            let asked = [(&self.namespace, chain.keys.as_slice())];
            let lookup = self.client.try_lookup(&asked, LEASE)?;
            let Lookup::Hit(Hit { blocks, lease: Some(lease), .. }) = lookup else {
                done.missed += chain.keys.len() as u64;
                continue;
            };
            let lease = Rc::new(lease);
            let found = chain.loads.get(..blocks).unwrap_or(&chain.loads);
            done.missed += (chain.loads.len() - found.len()) as u64;
            for wanted in found.chunks(how.batch) {
                if under_way.len() >= how.calls {
                    self.end_load(under_way.pop_front(), &mut done)?;
                }
                let (begun, lease) = (Instant::now(), Rc::clone(&lease));
                let wait = how.wait(WAIT);
                let ticket = self.client.load(&lease, &self.namespace, &self.region, wanted, wait);
                under_way.push_back((begun, lease, wanted, ticket));
                if how.calls == 1 {
                    self.end_load(under_way.pop_front(), &mut done)?;
                }
            }
        }
        while !under_way.is_empty() {
            self.end_load(under_way.pop_front(), &mut done)?;
        }
        done.ended = Instant::now();
        done.blocks = done.loaded.len() as u64;
        Ok(done)
    }

    fn end_load(
        &self,
        oldest: Option<(Instant, Rc<Lease>, &[LoadBlock], Ticket)>,
        done: &mut Done,
    ) -> anyhow::Result<()> {
        let Some((begun, _lease, wanted, ticket)) = oldest else { return Ok(()) };
        let outcomes = self.end(ticket)?;
        done.calls.push(begun.elapsed());
        for (block, outcome) in wanted.iter().zip(outcomes) {
            let Outcome::Loaded(tier) = outcome else {
                done.missed += 1;
                continue;
            };
            done.from_host += u64::from(tier == Tier::Host);
            done.loaded.push(*block);
        }
        Ok(())
    }

    fn end(&self, ticket: Ticket) -> anyhow::Result<Vec<Outcome>> {
        if let Some(error) = ticket.failure() {
            bail!("a call failed: {error}");
        }
        match self.client.wait(ticket, WAIT) {
            Ok(outcomes) => Ok(outcomes),
            Err(_) => bail!("a call did not end within {} s", 2 * WAIT.as_secs()),
        }
    }
}

/// The blocks that found no room. Those that were refused are put into words.
fn not_stored(
    part: &[StoreBlock],
    outcomes: &[Outcome],
    words: &mut Vec<String>,
) -> Vec<StoreBlock> {
    let mut busy = Vec::new();
    for (block, outcome) in part.iter().zip(outcomes) {
        match outcome {
            Outcome::Stored | Outcome::Present => {}
            Outcome::Busy => busy.push(*block),
            other => words.push(format!("a store ended as {other:?}")),
        }
    }
    busy
}

/// All clients of one configuration.
pub(super) struct Fleet {
    clients: Vec<Client>,
    setup: Setup,
    daemon_pid: u32,
}

impl Fleet {
    pub(super) fn connect(daemon: &Daemon, setup: &Setup) -> anyhow::Result<Fleet> {
        let clients: anyhow::Result<Vec<Client>> =
            (0..setup.clients).map(|_| Client::connect(daemon, setup)).collect();
        Ok(Fleet { clients: clients?, setup: setup.clone(), daemon_pid: daemon.pid() })
    }

    fn first(&self) -> anyhow::Result<&blocking::Client> {
        Ok(&self.clients.first().context("there is a client")?.client)
    }

    pub(super) fn status(&self) -> anyhow::Result<StatusReport> {
        Ok(self.first()?.status()?)
    }

    /// Writes the whole store through once and touches all of every region from both sides: the
    /// first write of a preallocated extent and the first touch of a page are slower than all that
    /// follow, and are not what is measured.
    pub(super) fn warm(&self, progress: impl Fn(String)) -> anyhow::Result<()> {
        let set_bytes = self.setup.set_bytes();
        let passes = u32::try_from(self.setup.nvme_bytes.div_ceil(set_bytes))?.max(1);
        let how = How { batch: self.setup.batch, calls: 1 };
        for pass in 0..passes {
            progress(format!("writing the store through, {} of {passes}", pass + 1));
            let sets = self.sets(9, u32::MAX - pass, self.setup.nvme_blocks);
            self.fill(&sets)?;
            self.timed(&sets, |client, set| client.store(set.blocks(), how))?;
            self.settle()?;
            if pass + 1 == passes {
                let parts = self.parts(&sets, 0, 1, self.setup.host_blocks);
                self.timed(&parts, |client, part| client.load(part, how))?;
            }
            self.forget()?;
        }
        Ok(())
    }

    /// Stores sets within the host tier and loads them, with each way of calling. Before each
    /// measure `beside` takes its yardstick; it is told whether this is the first.
    pub(super) fn host_round(
        &self,
        round: u32,
        measures: &mut Measures,
        beside: impl Fn(bool, &mut Measures) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for (number, how) in self.setup.ways(round).into_iter().enumerate() {
            beside(number == 0, measures)?;
            let sets = self.sets(10 + number as u64, round, self.setup.host_blocks);
            self.fill(&sets)?;
            let stored = self.timed(&sets, |client, set| client.store(set.blocks(), how))?;
            let parts = self.parts(&sets, 0, 1, self.setup.host_blocks);
            let loaded = self.timed(&parts, |client, part| client.load(part, how))?;
            let row = self.round(&stored, round, measures);
            measures.add(how.store(Tier::Host), row);
            let row = self.round(&loaded, round, measures);
            measures.add(how.load(Tier::Host), row);
            self.check(&loaded, Tier::Host, measures)?;
            self.forget()?;
        }
        Ok(())
    }

    /// Stores sets that are larger than the host tier, each timed until all of it is on nvme.
    /// Returns the last one, which stays.
    pub(super) fn nvme_stores(
        &self,
        round: u32,
        measures: &mut Measures,
    ) -> anyhow::Result<Vec<Set>> {
        let mut last = Vec::new();
        for (number, how) in self.setup.ways(round).into_iter().enumerate() {
            if number > 0 {
                self.forget()?;
            }
            let sets = self.sets(20 + number as u64, round, self.setup.nvme_blocks);
            self.fill(&sets)?;
            let before = thread_seconds(self.daemon_pid).unwrap_or(0.0);
            let own = own_seconds();
            let stored = self.timed(&sets, |client, set| client.store(set.blocks(), how))?;
            let pause = self.settle()?;
            let durable = Instant::now();
            let mut row = self.round(&stored, round, measures);
            row.calls_took = Some(row.took);
            row.pause = pause;
            row.took = durable - stored.started;
            row.daemon_cpu_s = thread_seconds(self.daemon_pid).unwrap_or(before) - before;
            row.client_cpu_s = own_seconds() - own;
            measures.add(how.store(Tier::Nvme), row);
            last = sets;
        }
        Ok(last)
    }

    /// Loads what was stored last, a part with each way of calling, oldest blocks first, so that
    /// every block has left host RAM before it is asked for.
    pub(super) fn nvme_loads(
        &self,
        round: u32,
        sets: &[Set],
        measures: &mut Measures,
    ) -> anyhow::Result<()> {
        let ways = self.setup.ways(round);
        let shift = self.setup.nvme_blocks / 2;
        for (number, how) in ways.iter().enumerate() {
            let parts = self.parts(sets, number, ways.len(), shift);
            let loaded = self.timed(&parts, |client, part| client.load(part, *how))?;
            let row = self.round(&loaded, round, measures);
            measures.add(how.load(Tier::Nvme), row);
            self.check(&loaded, Tier::Nvme, measures)?;
        }
        self.forget()
    }

    fn sets(&self, what: u64, round: u32, blocks: usize) -> Vec<Set> {
        let clients = 0..self.clients.len();
        clients.map(|client| Set::new(what, round, client, blocks, self.setup.chain)).collect()
    }

    fn parts(&self, sets: &[Set], part: usize, parts: usize, shift: usize) -> Vec<Part> {
        let count = |blocks: usize| u32::try_from(blocks).unwrap_or(u32::MAX);
        let (shift, places) = (count(shift), count(self.setup.nvme_blocks));
        sets.iter().map(|set| set.part(part, parts, shift, places)).collect()
    }

    fn fill(&self, sets: &[Set]) -> anyhow::Result<()> {
        std::thread::scope(|scope| {
            let work: Vec<_> = self
                .clients
                .iter()
                .zip(sets)
                .map(|(client, set)| scope.spawn(|| client.fill(set.blocks())))
                .collect();
            work.into_iter().try_for_each(|thread| joined(thread.join()))
        })
    }

    /// Lets every client do its part at the same time.
    fn timed<T: Sync>(
        &self,
        parts: &[T],
        work: impl Fn(&Client, &T) -> anyhow::Result<Done> + Sync,
    ) -> anyhow::Result<Timed> {
        let start = Barrier::new(self.clients.len() + 1);
        std::thread::scope(|scope| {
            let (start, work) = (&start, &work);
            let threads: Vec<_> = self
                .clients
                .iter()
                .zip(parts)
                .map(|(client, part)| {
                    scope.spawn(move || {
                        start.wait();
                        work(client, part)
                    })
                })
                .collect();
            let (daemon, own) = (thread_seconds(self.daemon_pid).unwrap_or(0.0), own_seconds());
            start.wait();
            let done: anyhow::Result<Vec<Done>> =
                threads.into_iter().map(|thread| joined(thread.join())).collect();
            let client_cpu_s = own_seconds() - own;
            let daemon_cpu_s = thread_seconds(self.daemon_pid).unwrap_or(daemon) - daemon;
            let done = done?;
            let started = done.iter().map(|done| done.started).min();
            let ended = done.iter().map(|done| done.ended).max();
            let (started, ended) = started.zip(ended).context("there is a client")?;
            Ok(Timed { started, took: ended - started, done, daemon_cpu_s, client_cpu_s })
        })
    }

    /// The figures of a timed part; its failures are counted.
    fn round(&self, timed: &Timed, round: u32, measures: &mut Measures) -> Round {
        let mut row = Round {
            round,
            took: timed.took,
            daemon_cpu_s: timed.daemon_cpu_s,
            client_cpu_s: timed.client_cpu_s,
            ..Round::default()
        };
        let mut blocks = 0;
        for done in &timed.done {
            row.calls.extend(&done.calls);
            measures.busy(done.busy);
            measures.missed(done.missed);
            done.words.iter().for_each(|words| measures.failed(words.clone()));
            blocks += done.blocks;
        }
        row.bytes = blocks * self.setup.block_bytes;
        row
    }

    /// Compares what was loaded.
    fn check(&self, timed: &Timed, tier: Tier, measures: &mut Measures) -> anyhow::Result<()> {
        let wrong: anyhow::Result<Vec<Vec<u64>>> = std::thread::scope(|scope| {
            let work: Vec<_> = self
                .clients
                .iter()
                .zip(&timed.done)
                .map(|(client, done)| scope.spawn(|| client.check(&done.loaded)))
                .collect();
            work.into_iter().map(|thread| joined(thread.join())).collect()
        });
        wrong?.into_iter().flatten().for_each(|wrong| measures.verified(tier, wrong));
        let from_host: u64 = timed.done.iter().map(|done| done.from_host).sum();
        if tier == Tier::Nvme {
            measures.unexpected_host(from_host);
        }
        Ok(())
    }

    /// Waits until no block of host RAM lacks its copy on nvme. Returns the longest time in which
    /// none became durable: the daemon waits until nobody asks for anything before it writes what
    /// need not be written yet.
    pub(super) fn settle(&self) -> anyhow::Result<Duration> {
        let client = self.first()?;
        let started = Instant::now();
        let (mut changed, mut dirty, mut longest) = (started, u64::MAX, Duration::ZERO);
        while started.elapsed() < SETTLE_MAX {
            let stats = client.stats()?;
            let catalog = stats.catalog.context("the daemon shows its counters to its owner")?;
            longest = longest.max(changed.elapsed());
            if catalog.dirty_blocks == 0 {
                return Ok(longest);
            }
            if catalog.dirty_blocks != dirty {
                (changed, dirty) = (Instant::now(), catalog.dirty_blocks);
            }
            std::thread::sleep(SETTLE_STEP);
        }
        bail!("the daemon did not write everything down within {} s", SETTLE_MAX.as_secs())
    }

    /// Drops all blocks from all tiers, so that what is measured next does not wait for the reclaim
    /// of what nobody will ask for again.
    fn forget(&self) -> anyhow::Result<()> {
        let first = self.clients.first().context("there is a client")?;
        let id = first.namespace.id().context("the namespace is open")?;
        first.client.forget(&ForgetWhat::Namespace(id))?;
        self.settle().map(drop)
    }
}

/// A timed part.
struct Timed {
    started: Instant,
    took: Duration,
    done: Vec<Done>,
    daemon_cpu_s: f64,
    client_cpu_s: f64,
}

fn joined<T>(result: std::thread::Result<anyhow::Result<T>>) -> anyhow::Result<T> {
    result.unwrap_or_else(|_| bail!("a client's thread panicked"))
}
