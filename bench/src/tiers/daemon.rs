//! Store and load through the daemon, from a region of this process.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use kvtide_client::{
    BlockKey, ClientConfig, Hit, Lease, LoadBlock, Lookup, NamespaceHandle, Outcome, RegionHandle,
    RegionLayout, StatusReport, StoreBlock, Ticket, Tier, blocking,
};

use super::{
    Sizes,
    measure::{Kind, Measures, Round, fresh_key},
};
use crate::{
    daemon::Daemon,
    payload::Payload,
    process::{own_seconds, thread_seconds},
    replay::bench_namespace,
};

/// Blocks of one chain: what one lease covers.
const CHAIN: usize = 64;

/// How long one call may take.
const WAIT: Duration = Duration::from_secs(20);

/// How long the daemon may take to write everything down.
const SETTLE_MAX: Duration = Duration::from_secs(120);

/// Times that a store which finds no room is tried again, two milliseconds apart.
const BUSY_TRIES: u32 = 5_000;

/// This process as a client.
pub(super) struct Client {
    client: blocking::Client,
    namespace: NamespaceHandle,
    region: RegionHandle,
    status: StatusReport,
    payload: Payload,
    buffer: Vec<u8>,
    daemon_pid: u32,
    sizes: Sizes,
}

/// Time and CPU of the calls of one round, without what lies between them.
struct Clock {
    round: Round,
    daemon_pid: u32,
    daemon_before: f64,
}

impl Clock {
    fn start(daemon_pid: u32) -> Clock {
        let daemon_before = thread_seconds(daemon_pid).unwrap_or(0.0);
        Clock { round: Round::default(), daemon_pid, daemon_before }
    }

    /// Times one call.
    fn call<T>(&mut self, bytes: u64, call: impl FnOnce() -> T) -> T {
        let (started, cpu) = (Instant::now(), own_seconds());
        let result = call();
        let took = started.elapsed();
        self.round.client_cpu_s += own_seconds() - cpu;
        self.round.took += took;
        self.round.calls.push(took);
        self.round.bytes += bytes;
        result
    }

    fn stop(mut self) -> Round {
        let after = thread_seconds(self.daemon_pid).unwrap_or(0.0);
        self.round.daemon_cpu_s = (after - self.daemon_before).max(0.0);
        self.round
    }
}

impl Client {
    pub(super) fn connect(daemon: &Daemon, sizes: &Sizes) -> anyhow::Result<Client> {
        let mut config = ClientConfig::new(daemon.spec().socket());
        config.call_timeout = WAIT;
        let client = blocking::Client::connect(config)?;
        let namespace = client.open_namespace(&bench_namespace(sizes.block_bytes))?;
        let layout = RegionLayout::opaque(u32::try_from(sizes.batch)?, sizes.block_bytes);
        let region = client.create_region(layout)?;
        let status = client.status()?;
        Ok(Client {
            client,
            namespace,
            region,
            status,
            payload: Payload::new(),
            buffer: vec![0; usize::try_from(sizes.block_bytes)?],
            daemon_pid: daemon.pid(),
            sizes: *sizes,
        })
    }

    pub(super) fn status(&self) -> &StatusReport {
        &self.status
    }

    /// One round: a set for nvme is stored (timed until all is on the device), then a set within
    /// the host tier is stored and loaded, then the first set is loaded from nvme.
    pub(super) fn round(&mut self, round: u32, measures: &mut Measures) -> anyhow::Result<()> {
        let batch = self.sizes.batch;
        let nvme = keys(2, round, self.sizes.nvme_blocks);
        let started = Instant::now();
        let mut stored = self.store(&nvme, batch, measures)?;
        self.settle()?;
        // The write-down goes on between and behind the calls, so the whole time counts; making
        // the payloads, at memory speed, is within it.
        stored.took = started.elapsed();
        measures.add(Kind::StoreNvme, stored);

        for (what, kind_store, kind_load, batch) in [
            (3, Kind::StoreHost, Kind::LoadHost, batch),
            (4, Kind::StoreHostOne, Kind::LoadHostOne, 1),
        ] {
            let host = keys(what, round, self.sizes.host_blocks);
            let stored = self.store(&host, batch, measures)?;
            measures.add(kind_store, stored);
            self.settle()?;
            let loaded = self.load(&host, batch, Tier::Host, measures)?;
            measures.add(kind_load, loaded);
        }

        let (first, second) = nvme.split_at(nvme.len() / 2);
        let loaded = self.load(first, batch, Tier::Nvme, measures)?;
        measures.add(Kind::LoadNvme, loaded);
        let loaded = self.load(second, 1, Tier::Nvme, measures)?;
        measures.add(Kind::LoadNvmeOne, loaded);
        Ok(())
    }

    /// Waits until no block of host RAM lacks its copy on nvme.
    fn settle(&self) -> anyhow::Result<()> {
        let started = Instant::now();
        while started.elapsed() < SETTLE_MAX {
            let stats = self.client.stats()?;
            let catalog = stats.catalog.context("the daemon shows its counters to its owner")?;
            if catalog.dirty_blocks == 0 {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        bail!("the daemon did not write everything down within {} s", SETTLE_MAX.as_secs())
    }

    fn store(
        &mut self,
        keys: &[Vec<BlockKey>],
        batch: usize,
        measures: &mut Measures,
    ) -> anyhow::Result<Round> {
        let mut clock = Clock::start(self.daemon_pid);
        for chain in keys {
            let parents = std::iter::once(&BlockKey::ROOT).chain(chain);
            let blocks: Vec<_> = chain.iter().zip(parents).zip(0u32..).collect();
            for part in blocks.chunks(batch) {
                let mut wanted = Vec::with_capacity(batch);
                for (((key, parent), position), place) in part.iter().zip(0u32..) {
                    self.payload.fill(key, &mut self.buffer);
                    self.region.write_block(place, &self.buffer)?;
                    let (key, parent, position) = (**key, **parent, *position);
                    wanted.push(StoreBlock { key, parent, position, tokens: 512, place });
                }
                self.store_part(wanted, &mut clock, measures)?;
            }
        }
        Ok(clock.stop())
    }

    fn store_part(
        &self,
        mut wanted: Vec<StoreBlock>,
        clock: &mut Clock,
        measures: &mut Measures,
    ) -> anyhow::Result<()> {
        let bytes = wanted.len() as u64 * self.sizes.block_bytes;
        clock.call(bytes, || {
            for _ in 0..BUSY_TRIES {
                let ticket = self.client.store(&self.namespace, 1, &self.region, &wanted, WAIT);
                let outcomes = self.end(ticket)?;
                let mut outcomes = outcomes.into_iter();
                wanted.retain(|_| match outcomes.next() {
                    Some(Outcome::Stored | Outcome::Present) => false,
                    Some(Outcome::Busy) | None => true,
                    Some(other) => {
                        measures.failed(format!("a store ended as {other:?}"));
                        false
                    }
                });
                if wanted.is_empty() {
                    return Ok(());
                }
                measures.busy();
                std::thread::sleep(Duration::from_millis(2));
            }
            bail!("{} blocks found no room for {} ms", wanted.len(), 2 * BUSY_TRIES)
        })
    }

    fn load(
        &mut self,
        keys: &[Vec<BlockKey>],
        batch: usize,
        expected: Tier,
        measures: &mut Measures,
    ) -> anyhow::Result<Round> {
        let mut clock = Clock::start(self.daemon_pid);
        for chain in keys {
            let asked: &[BlockKey] = chain;
            let lookup = self.client.try_lookup(&[(&self.namespace, asked)], WAIT * 3)?;
            let Lookup::Hit(Hit { blocks, lease: Some(lease), .. }) = lookup else {
                measures.missed(chain.len() as u64);
                continue;
            };
            measures.missed((chain.len() - blocks) as u64);
            for part in chain.get(..blocks).unwrap_or(chain).chunks(batch) {
                self.load_part(&lease, part, expected, &mut clock, measures)?;
            }
            self.client.release(lease)?;
        }
        Ok(clock.stop())
    }

    fn load_part(
        &mut self,
        lease: &Lease,
        keys: &[BlockKey],
        expected: Tier,
        clock: &mut Clock,
        measures: &mut Measures,
    ) -> anyhow::Result<()> {
        let place = |(key, place): (&BlockKey, u32)| LoadBlock { key: *key, place };
        let wanted: Vec<LoadBlock> = keys.iter().zip(0..).map(place).collect();
        let bytes = keys.len() as u64 * self.sizes.block_bytes;
        let outcomes = clock.call(bytes, || {
            let ticket = self.client.load(lease, &self.namespace, &self.region, &wanted, WAIT);
            self.end(ticket)
        })?;
        for ((key, outcome), place) in keys.iter().zip(outcomes).zip(0..) {
            let Outcome::Loaded(tier) = outcome else {
                measures.missed(1);
                continue;
            };
            if tier != expected && tier == Tier::Host {
                measures.unexpected_host(1);
            }
            self.region.read_block(place, &mut self.buffer)?;
            let wrong = self.payload.check(key, &self.buffer);
            let wrong = wrong.map_or(0, |at| self.buffer.len() - at);
            measures.verified(tier == Tier::Host, wrong as u64);
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

/// Fresh keys in chains.
fn keys(what: u64, round: u32, blocks: usize) -> Vec<Vec<BlockKey>> {
    let all: Vec<BlockKey> = (0..blocks).map(|number| fresh_key(what, round, number)).collect();
    all.chunks(CHAIN).map(<[BlockKey]>::to_vec).collect()
}
