//! kvtide itself, as its clients have it: a daemon, regions, and the blocking client.
//!
//! The memory of a hand is its region, so the daemon copies from and to it. Loads count the lookup
//! of each chain and the release of its lease. Two rows share a daemon: calls of many blocks from
//! two threads, and calls of one block from as many threads as the other peers have.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use kvtide_client::{
    BlockKey, ClientConfig, Hit, Lease, LoadBlock, Lookup, NamespaceHandle, Outcome, RegionHandle,
    RegionLayout, StatusReport, StoreBlock, Ticket, Tier, blocking,
};

use super::peer::{About, Block, Group, Hand, Loaded, Peer};
use crate::{
    daemon::{Daemon, DaemonSpec},
    replay::bench_namespace,
};

/// How long one call may take.
const WAIT: Duration = Duration::from_secs(20);

/// How long the daemon may take to write everything down.
const SETTLE_MAX: Duration = Duration::from_secs(120);

/// Times that a store which finds no room is tried again.
const BUSY_TRIES: u32 = 10_000;

/// How long such a store waits before it is tried again: about what the write of a block takes, so
/// that asking again does not take the CPU from it.
const BUSY_WAIT: Duration = Duration::from_millis(2);

/// A daemon that several rows share. It ends with the last of them.
pub(super) struct Shared {
    daemon: Mutex<Daemon>,
    control: blocking::Client,
    group: Group,
    status: StatusReport,
    block_bytes: u64,
}

impl Shared {
    /// Starts a daemon. Without an nvme tier (`nvme_bytes` 0) it is what the RAM rows measure.
    pub(super) fn start(
        folder: &Path,
        host_bytes: u64,
        nvme_bytes: u64,
        block_bytes: u64,
    ) -> anyhow::Result<Arc<Shared>> {
        let group = if nvme_bytes == 0 { Group::Ram } else { Group::Disk };
        let folder = folder.join(format!("kvtide-{group:?}"));
        let spec = DaemonSpec {
            store: folder.join("store"),
            folder,
            host_bytes,
            nvme_bytes,
            block_bytes_min: block_bytes,
            device: None,
            fault: None,
        };
        let (daemon, _) = Daemon::start(spec)?;
        let control = connect(&daemon)?;
        let status = control.status()?;
        Ok(Arc::new(Shared { daemon: Mutex::new(daemon), control, group, status, block_bytes }))
    }

    pub(super) fn status(&self) -> &StatusReport {
        &self.status
    }

    /// Waits until no block of host RAM lacks its copy on nvme.
    fn settle(&self) -> anyhow::Result<()> {
        let started = Instant::now();
        while started.elapsed() < SETTLE_MAX {
            let stats = self.control.stats()?;
            let catalog = stats.catalog.context("the daemon shows its counters to its owner")?;
            if catalog.dirty_blocks == 0 {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        bail!("the daemon did not write everything down within {} s", SETTLE_MAX.as_secs())
    }
}

fn connect(daemon: &Daemon) -> anyhow::Result<blocking::Client> {
    let mut config = ClientConfig::new(daemon.spec().socket());
    config.call_timeout = WAIT;
    Ok(blocking::Client::connect(config)?)
}

/// One row of kvtide.
pub(super) struct Kvtide {
    about: About,
    shared: Arc<Shared>,
    hands: Vec<Box<dyn Hand>>,
}

struct KvtideHand {
    client: blocking::Client,
    namespace: NamespaceHandle,
    region: RegionHandle,
    group: Group,
    lease: Option<Lease>,
    /// The first of the blocks that were looked up and are not there.
    found: u32,
}

impl Kvtide {
    pub(super) fn make(
        shared: &Arc<Shared>,
        threads: usize,
        batch: usize,
        blocks: usize,
    ) -> anyhow::Result<Kvtide> {
        let (tier, calls) = match (shared.group, batch) {
            (Group::Ram, 1) => ("RAM", "1 block a call".to_owned()),
            (Group::Ram, _) => ("RAM", format!("{batch} blocks a call")),
            (Group::Disk, 1) => ("disk", "1 block a call".to_owned()),
            (Group::Disk, _) => ("disk", format!("{batch} blocks a call")),
        };
        let layout = RegionLayout::opaque(u32::try_from(blocks / threads)?, shared.block_bytes);
        let mut hands: Vec<Box<dyn Hand>> = Vec::new();
        for _ in 0..threads {
            let client = connect(&shared.daemon.lock().unwrap_or_else(PoisonError::into_inner))?;
            let namespace = client.open_namespace(&bench_namespace(shared.block_bytes))?;
            let region = client.create_region(layout.clone())?;
            let group = shared.group;
            hands.push(Box::new(KvtideHand {
                client,
                namespace,
                region,
                group,
                lease: None,
                found: 0,
            }));
        }
        let about = About {
            name: format!("kvtide, {calls}"),
            group: shared.group,
            ours: true,
            stored_to: tier,
            loaded_from: tier,
            verifies: true,
            threads,
            batch,
        };
        Ok(Kvtide { about, shared: Arc::clone(shared), hands })
    }
}

impl Peer for Kvtide {
    fn about(&self) -> &About {
        &self.about
    }

    fn open(&mut self) -> anyhow::Result<()> {
        self.shared.daemon.lock().unwrap_or_else(PoisonError::into_inner).check_alive()
    }

    fn hands(&mut self) -> &mut [Box<dyn Hand>] {
        &mut self.hands
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        match self.about.group {
            Group::Disk => self.shared.settle(),
            Group::Ram => Ok(()),
        }
    }

    fn server(&self) -> Option<u32> {
        Some(self.shared.daemon.lock().unwrap_or_else(PoisonError::into_inner).pid())
    }
}

impl KvtideHand {
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

impl Hand for KvtideHand {
    fn put(&mut self, place: u32, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.region.write_block(place, bytes)?)
    }

    fn take(&mut self, place: u32, out: &mut [u8]) -> anyhow::Result<()> {
        Ok(self.region.read_block(place, out)?)
    }

    fn store(&mut self, blocks: &[Block]) -> anyhow::Result<()> {
        let wanted = |block: &Block| StoreBlock {
            key: block.key,
            parent: block.parent,
            position: block.position,
            tokens: 512,
            place: block.place,
        };
        let mut wanted: Vec<StoreBlock> = blocks.iter().map(wanted).collect();
        for _ in 0..BUSY_TRIES {
            let ticket = self.client.store(&self.namespace, 1, &self.region, &wanted, WAIT);
            let mut outcomes = self.end(ticket)?.into_iter();
            let mut refused = None;
            wanted.retain(|_| match outcomes.next() {
                Some(Outcome::Stored | Outcome::Present) => false,
                Some(Outcome::Busy) | None => true,
                Some(other) => {
                    refused = Some(other);
                    false
                }
            });
            if let Some(outcome) = refused {
                bail!("a store ended as {outcome:?}");
            }
            if wanted.is_empty() {
                return Ok(());
            }
            std::thread::sleep(BUSY_WAIT);
        }
        bail!("{} blocks found no room", wanted.len())
    }

    fn find(&mut self, chain: &[Block]) -> anyhow::Result<()> {
        self.done()?;
        let keys: Vec<BlockKey> = chain.iter().map(|block| block.key).collect();
        let lookup = self.client.try_lookup(&[(&self.namespace, &keys)], WAIT * 3)?;
        let mut found = 0;
        if let Lookup::Hit(Hit { blocks, lease: Some(lease), .. }) = lookup {
            let first = chain.first().map_or(0, |block| block.place);
            found = blocks;
            self.found = first + u32::try_from(blocks)?;
            self.lease = Some(lease);
        }
        if found < chain.len() {
            eprintln!("kvtide: {found} of {} blocks are found that were just stored", chain.len());
        }
        Ok(())
    }

    fn load(&mut self, blocks: &[Block], answers: &mut Vec<Loaded>) -> anyhow::Result<()> {
        let there = |block: &&Block| block.place < self.found;
        let wanted: Vec<LoadBlock> = blocks
            .iter()
            .filter(there)
            .map(|block| LoadBlock { key: block.key, place: block.place })
            .collect();
        let answered = answers.len();
        if let (Some(lease), false) = (&self.lease, wanted.is_empty()) {
            let ticket = self.client.load(lease, &self.namespace, &self.region, &wanted, WAIT);
            answers.extend(self.end(ticket)?.into_iter().map(|outcome| match outcome {
                Outcome::Loaded(Tier::Host) if self.group == Group::Disk => Loaded::FromMemory,
                Outcome::Loaded(_) => Loaded::Hit,
                _ => Loaded::Miss,
            }));
        }
        answers.resize(answered + blocks.len(), Loaded::Miss);
        Ok(())
    }

    fn done(&mut self) -> anyhow::Result<()> {
        self.found = 0;
        match self.lease.take() {
            Some(lease) => Ok(self.client.release(lease)?),
            None => Ok(()),
        }
    }
}
