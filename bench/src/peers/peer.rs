//! What a peer is to the bench: somewhere to store blocks and to load them from.
//!
//! A [`Peer`] has one or more [`Hand`]s, one per thread, and each hand owns memory for its share of
//! the blocks, as an engine owns its KV cache: what is stored is read from there and what is loaded
//! is written there, so every peer pays for the copies that its interface asks for, and for no
//! others. Most peers move one block a call; they implement [`Carrier`] and get their hands from
//! [`hands`], over one [`Pool`] that all of them share, in pages as large as the machine gives.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use kvtide_tiers::{block::BlockKey, catalog::SlotId, io::Arena};

/// Blocks that follow each other in one conversation: what is found with one question.
pub(super) const CHAIN: usize = 64;

/// Longest time that the pages of the pool may take to be there.
const TOUCH_MAX: Duration = Duration::from_secs(60);

/// Where the loads come from. Rows are compared within their group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Group {
    Ram,
    Disk,
}

/// What the table says about a peer.
#[derive(Clone, Debug)]
pub(super) struct About {
    /// Its name, with what tells it from its other rows.
    pub(super) name: String,
    pub(super) group: Group,
    /// Whether it is a row of kvtide's, with which the others are compared.
    pub(super) ours: bool,
    /// Where a store has put the block when its time ends.
    pub(super) stored_to: &'static str,
    /// Where a load finds it.
    pub(super) loaded_from: &'static str,
    /// Whether the peer compares a checksum before it hands bytes out.
    pub(super) verifies: bool,
    /// Threads that call it.
    pub(super) threads: usize,
    /// Blocks in one call.
    pub(super) batch: usize,
}

/// One block of a hand's share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) key: BlockKey,
    /// The block before it; [`BlockKey::ROOT`] for the first of a chain.
    pub(super) parent: BlockKey,
    /// Blocks of the chain before it.
    pub(super) position: u32,
    /// Where it lies in the hand's memory.
    pub(super) place: u32,
}

/// What became of the load of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Loaded {
    Miss,
    /// It is in its place.
    Hit,
    /// As `Hit`, from memory although the row is about a disk.
    FromMemory,
}

/// One way to keep blocks.
pub(super) trait Peer {
    fn about(&self) -> &About;

    /// Makes it ready for a turn. Not timed.
    fn open(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// One for each of its threads.
    fn hands(&mut self) -> &mut [Box<dyn Hand>];

    /// Returns when all that was stored is where the row says. Its time counts as storing.
    fn settle(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Takes the blocks out of memory that the row is not about, before they are loaded. Not
    /// timed.
    fn cool(&mut self, _blocks: &[Vec<Block>]) -> anyhow::Result<()> {
        Ok(())
    }

    /// Ends a turn, so that nothing goes on in another peer's. Not timed.
    fn close(&mut self, _blocks: &[Vec<Block>]) -> anyhow::Result<()> {
        Ok(())
    }

    /// The process that does the work, when it is not this one.
    fn server(&self) -> Option<u32> {
        None
    }
}

/// What one thread does with a peer, and its memory.
pub(super) trait Hand: Send {
    /// Writes to a place of the hand's memory. Not timed.
    fn put(&mut self, place: u32, bytes: &[u8]) -> anyhow::Result<()>;

    /// Reads a place of the hand's memory. Not timed.
    fn take(&mut self, place: u32, out: &mut [u8]) -> anyhow::Result<()>;

    /// Stores blocks from their places: one call.
    fn store(&mut self, blocks: &[Block]) -> anyhow::Result<()>;

    /// What is to be done once before the blocks of a chain are loaded. Timed.
    fn find(&mut self, _chain: &[Block]) -> anyhow::Result<()> {
        Ok(())
    }

    /// Loads blocks to their places: one call. As many answers as blocks.
    fn load(&mut self, blocks: &[Block], answers: &mut Vec<Loaded>) -> anyhow::Result<()>;

    /// What is to be done after the last load. Timed.
    fn done(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Stores and loads one block a call, from and to memory of the caller.
pub(super) trait Carrier: Send {
    fn store(&mut self, block: &Block, bytes: &[u8]) -> anyhow::Result<()>;

    fn load(&mut self, block: &Block, into: &mut [u8]) -> anyhow::Result<Loaded>;
}

/// Memory for the blocks of all peers that have none of their own.
pub(super) struct Pool {
    arena: Arc<Arena>,
    slots: Vec<SlotId>,
    block_bytes: u32,
}

impl Pool {
    pub(super) fn make(blocks: usize, block_bytes: u64) -> anyhow::Result<Arc<Pool>> {
        let block_bytes = u32::try_from(block_bytes)?;
        let slab_bytes = block_bytes.next_multiple_of(2 << 20);
        let per_slab = slab_bytes / block_bytes;
        let slabs = u32::try_from(blocks)?.div_ceil(per_slab);
        let arena = Arena::create(u64::from(slab_bytes) * u64::from(slabs), slab_bytes)
            .context("no memory for the blocks to be stored; make --set-bytes smaller")?;
        let mut slots = Vec::with_capacity(blocks);
        for slab in 0..slabs {
            arena.bind_slab(slab, block_bytes)?;
            slots.extend((0..per_slab).filter_map(|index| arena.slot(slab, index)));
        }
        let started = Instant::now();
        while arena.touched_bytes() < arena.bytes() && started.elapsed() < TOUCH_MAX {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Arc::new(Pool { arena, slots, block_bytes }))
    }

    /// What it is made of.
    pub(super) fn pages(&self) -> String {
        format!("{} ({})", self.arena.pages().name(), self.arena.pages_why())
    }

    fn slot(&self, place: usize) -> anyhow::Result<SlotId> {
        self.slots.get(place).copied().context("a place beyond the pool")
    }
}

/// A hand over a part of the pool.
struct PoolHand<C> {
    pool: Arc<Pool>,
    first: usize,
    carrier: C,
}

/// Hands over the pool for `carriers`, each with its part of it.
pub(super) fn hands<C: Carrier + 'static>(
    pool: &Arc<Pool>,
    share: usize,
    carriers: impl IntoIterator<Item = C>,
) -> Vec<Box<dyn Hand>> {
    let hand = |(carrier, number): (C, usize)| -> Box<dyn Hand> {
        Box::new(PoolHand { pool: Arc::clone(pool), first: number * share, carrier })
    };
    carriers.into_iter().zip(0..).map(hand).collect()
}

impl<C: Carrier> Hand for PoolHand<C> {
    fn put(&mut self, place: u32, bytes: &[u8]) -> anyhow::Result<()> {
        let slot = self.pool.slot(self.first + place as usize)?;
        let mut to = self.pool.arena.write(slot, self.pool.block_bytes)?;
        ensure!(to.len() == bytes.len(), "a block of {} bytes", bytes.len());
        to.copy_from_slice(bytes);
        Ok(())
    }

    fn take(&mut self, place: u32, out: &mut [u8]) -> anyhow::Result<()> {
        let slot = self.pool.slot(self.first + place as usize)?;
        let from = self.pool.arena.read(slot, self.pool.block_bytes)?;
        ensure!(from.len() == out.len(), "a block of {} bytes", out.len());
        out.copy_from_slice(&from);
        Ok(())
    }

    fn store(&mut self, blocks: &[Block]) -> anyhow::Result<()> {
        for block in blocks {
            let slot = self.pool.slot(self.first + block.place as usize)?;
            let from = self.pool.arena.read(slot, self.pool.block_bytes)?;
            self.carrier.store(block, &from)?;
        }
        Ok(())
    }

    fn load(&mut self, blocks: &[Block], answers: &mut Vec<Loaded>) -> anyhow::Result<()> {
        for block in blocks {
            let slot = self.pool.slot(self.first + block.place as usize)?;
            let mut to = self.pool.arena.write(slot, self.pool.block_bytes)?;
            answers.push(self.carrier.load(block, &mut to)?);
        }
        Ok(())
    }
}
