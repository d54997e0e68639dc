//! The pure core alone, at one number of blocks.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use kvtide_tiers::{
    block::{BlockKey, PAGE_BYTES},
    catalog::OwnerQuotas,
};
use serde_json::{Value, json};

use super::percentile;
use crate::{
    process::memory,
    sim::core::{Core, TierBytes},
};

/// Bytes of a block. Only their number counts: no bytes are moved.
const BLOCK_BYTES: u64 = 64 << 10;

/// Blocks of a chain: of a conversation, or what a long prompt asks for.
const CHAIN_BLOCKS: u64 = 1_000;

/// Blocks stored by one call: a turn of a conversation. A store makes the blocks before it more
/// recent as well, half a chain on average, which is most of its time.
const TURN_BLOCKS: u64 = 50;

/// Conversations that go on at the same time, so that a chain's blocks do not lie side by side.
const AT_ONCE: u64 = 250;

/// Lookups of each kind, at most.
const LOOKUPS_MAX: u64 = 2_000;

/// Arguments of this part.
#[derive(Args, Clone, Debug)]
pub(super) struct CatalogArgs {
    /// Blocks.
    #[arg(long)]
    pub(super) blocks: u64,
    /// Whether they are all in host RAM as well.
    #[arg(long)]
    pub(super) host: bool,
}

impl CatalogArgs {
    pub(super) fn args(&self) -> Vec<String> {
        let mut args = vec!["catalog".to_owned(), format!("--blocks={}", self.blocks)];
        args.extend(self.host.then(|| "--host".to_owned()));
        args
    }
}

/// The key of a block: 32 bytes that look random.
pub(super) fn key(chain: u64, position: u64) -> BlockKey {
    let mut bits = chain << 32 | position;
    let mut key = [0; 32];
    for word in key.as_chunks_mut::<8>().0 {
        bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
        *word = mix(bits).to_le_bytes();
    }
    BlockKey(key)
}

/// The finaliser of splitmix64.
pub(super) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Chains that grow by turns, some hundred at a time.
struct Conversations {
    /// Chains that are whole once all blocks are stored.
    chains: u64,
    at_once: u64,
    length: u64,
    /// Turns given so far.
    turn: u64,
}

impl Conversations {
    fn of(blocks: u64) -> Conversations {
        let length = CHAIN_BLOCKS.min(blocks.max(1));
        let chains = (blocks / length).max(1);
        let at_once = AT_ONCE.min(chains);
        Conversations { chains: chains / at_once * at_once, at_once, length, turn: 0 }
    }

    /// The next turn's blocks: of the conversations that go on, each has one turn after the other.
    fn next(&mut self) -> Vec<(BlockKey, BlockKey, u32)> {
        let turns = self.length.div_ceil(TURN_BLOCKS);
        let group = self.turn / (turns * self.at_once);
        let within = self.turn % (turns * self.at_once);
        let (chain, turn) = (group * self.at_once + within % self.at_once, within / self.at_once);
        self.turn += 1;
        let first = turn * TURN_BLOCKS;
        (first..(first + TURN_BLOCKS).min(self.length))
            .map(|at| {
                let parent = at.checked_sub(1).map_or(BlockKey::ROOT, |before| key(chain, before));
                (key(chain, at), parent, at as u32)
            })
            .collect()
    }
}

/// What the calls took.
#[derive(Default)]
struct Took {
    blocks: u64,
    store: Duration,
    write_down: Duration,
}

impl Took {
    fn store_ns(&self) -> f64 {
        self.store.as_nanos() as f64 / self.blocks.max(1) as f64
    }

    fn write_down_ns(&self) -> f64 {
        self.write_down.as_nanos() as f64 / self.blocks.max(1) as f64
    }
}

/// Stores turns until `blocks` blocks are stored; in between all is written down.
fn store(core: &mut Core, talk: &mut Conversations, blocks: u64) -> anyhow::Result<Took> {
    let mut took = Took::default();
    while took.blocks < blocks {
        for _ in 0..16 {
            let turn = talk.next();
            let started = Instant::now();
            let no_room = core.store(&turn)?;
            took.store += started.elapsed();
            ensure!(no_room == 0, "{no_room} of {} blocks found no room", turn.len());
            took.blocks += turn.len() as u64;
            if took.blocks >= blocks {
                break;
            }
        }
        let started = Instant::now();
        // Long enough for the core to find itself idle.
        core.advance(300_000);
        took.write_down += started.elapsed();
    }
    Ok(took)
}

/// Times of lookups of whole chains, microseconds, sorted.
#[derive(Default)]
struct Lookups {
    plain: Vec<f64>,
    leased: Vec<f64>,
    released: Vec<f64>,
}

fn look_up(core: &mut Core, talk: &Conversations) -> anyhow::Result<Lookups> {
    let micros = |took: Duration| took.as_nanos() as f64 / 1e3;
    let mut times = Lookups::default();
    for at in 0..LOOKUPS_MAX.min(talk.chains * 20) {
        let chain = mix(at) % talk.chains;
        let keys: Vec<BlockKey> = (0..talk.length).map(|at| key(chain, at)).collect();
        let lease_ms = if at % 2 == 0 { 0 } else { 60_000 };
        let (found, took) = core.timed_lookup(keys, lease_ms)?;
        let blocks = u64::from(found.blocks);
        ensure!(blocks == talk.length, "a lookup of chain {chain} found {blocks} blocks");
        match found.lease {
            None => times.plain.push(micros(took)),
            Some(lease) => {
                times.leased.push(micros(took));
                times.released.push(micros(core.timed_release(lease)?));
            }
        }
    }
    for times in [&mut times.plain, &mut times.leased, &mut times.released] {
        times.sort_by(f64::total_cmp);
    }
    Ok(times)
}

/// Measures.
///
/// # Errors
/// The core answered otherwise than it must.
pub(super) fn measure(args: &CatalogArgs) -> anyhow::Result<Value> {
    let mut talk = Conversations::of(args.blocks);
    let host_blocks = if args.host { args.blocks * 21 / 20 } else { args.blocks / 50 };
    // Segments are 256 MiB less their descriptors, a few are kept clean, and blocks are written
    // early up to seven eighths.
    let nvme = (args.blocks * BLOCK_BYTES * 5 / 4).max(64 << 20) + (2 << 30);
    let sizes = TierBytes {
        device: None,
        host: (host_blocks * BLOCK_BYTES).max(256 << 20),
        nvme: Some(nvme / PAGE_BYTES * PAGE_BYTES),
        segment: None,
        block: BLOCK_BYTES,
        write_bytes_per_day: None,
        second: OwnerQuotas::default(),
    };
    let resident = || memory(std::process::id()).context("no /proc to read memory from");
    let before = resident()?.rss_bytes;
    let mut core = Core::tiers("lru", &sizes)?;
    core.take_slowest();
    let filled = store(&mut core, &mut talk, args.blocks)?;
    let bytes = resident()?.rss_bytes.saturating_sub(before);
    let slowest_filling = core.take_slowest();
    let stats = core.stats()?;
    let (on_nvme, known) = (stats.nvme.blocks, stats.blocks);
    ensure!(on_nvme == args.blocks && known == on_nvme, "{on_nvme} of {known} are on nvme");
    let lookups = look_up(&mut core, &talk)?;
    // Every slot is taken by now, or soon: each further block takes the place of another one.
    let more = (args.blocks / 10).max(sizes.host / BLOCK_BYTES / 2);
    let rest = (sizes.host / BLOCK_BYTES).saturating_sub(stats.host.blocks);
    store(&mut core, &mut talk, rest)?;
    let evicted = core.stats()?.host.evicted;
    let full = store(&mut core, &mut talk, more)?;
    ensure!(core.stats()?.host.evicted > evicted, "no block was evicted");
    Ok(json!({
        "tiers": if args.host { "host and nvme" } else { "nvme" },
        "blocks": stats.blocks,
        "blocks_host": stats.host.blocks,
        "bytes": bytes,
        "bytes_per_block": bytes as f64 / stats.blocks as f64,
        "lookup_blocks": talk.length,
        "lookup_us_p50": percentile(&lookups.plain, 50),
        "lookup_us_p99": percentile(&lookups.plain, 99),
        "lease_us_p50": percentile(&lookups.leased, 50),
        "lease_us_p99": percentile(&lookups.leased, 99),
        "release_us_p50": percentile(&lookups.released, 50),
        "release_us_p99": percentile(&lookups.released, 99),
        "store_ns": filled.store_ns(),
        "write_down_ns": filled.write_down_ns(),
        "store_full_ns": full.store_ns(),
        // Without the blocks in host RAM every store evicts another one from there.
        "evict_ns": args.host.then(|| full.store_ns() - filled.store_ns()),
        "slowest_event_us": slowest_filling.max(core.take_slowest()).as_nanos() as f64 / 1e3,
    }))
}
