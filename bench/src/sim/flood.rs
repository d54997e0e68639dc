//! A second tenant that floods the cache beside the one whose trace is replayed: after each request
//! it looks up a path that nobody has asked for before, and stores it.

use std::collections::BTreeMap;

use anyhow::Context;
use clap::Args;
use kvtide_tiers::{
    block::BlockKey,
    catalog::{CatalogStats, Hints, OwnerQuotas, OwnerUse, Quota, TierQuotas},
};
use serde_json::{Value, json};

use super::core::{Client, Core};
use crate::{
    report::Table,
    units::{parse_bytes, show_bytes, show_count, show_ratio},
};

/// What the second tenant does, and what it may hold.
#[derive(Args, Clone, Debug, Default)]
pub struct FloodArgs {
    /// New blocks that a second tenant stores after each request of the trace, and never asks for
    /// again. Default: there is no second tenant.
    #[arg(long, conflicts_with_all = ["capacity_blocks", "compare"],
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub flood: Option<u32>,
    /// Hard quota of the second tenant in GPU memory. Default: no limit.
    #[arg(long, requires = "flood", value_parser = parse_bytes)]
    pub flood_device_hard: Option<u64>,
    /// The same in host RAM.
    #[arg(long, requires = "flood", value_parser = parse_bytes)]
    pub flood_host_hard: Option<u64>,
    /// The same on nvme.
    #[arg(long, requires = "flood", value_parser = parse_bytes)]
    pub flood_nvme_hard: Option<u64>,
}

impl FloodArgs {
    /// What the second tenant may hold.
    pub(super) fn quotas(&self) -> OwnerQuotas {
        let hard = |hard| Quota { soft: None, hard };
        let all = TierQuotas {
            device: hard(self.flood_device_hard),
            host: hard(self.flood_host_hard),
            nvme: hard(self.flood_nvme_hard),
        };
        OwnerQuotas { all, ..OwnerQuotas::default() }
    }
}

/// What the second tenant did and holds.
#[derive(Clone, Debug, Default)]
pub struct Flood {
    /// Blocks that it offered.
    pub offered: u64,
    /// Blocks of them that were not taken: its quota was full of blocks that could not leave, or
    /// there was no room.
    pub not_stored: u64,
    /// The most bytes that it held after any request in GPU memory, in host RAM and on nvme.
    pub most_bytes: [u64; 3],
    /// What it holds at the end.
    pub held: OwnerUse,
}

/// The flood under way.
pub(super) struct Flooding {
    blocks: u32,
    /// Number of the next block.
    next: u64,
    pub(super) flood: Flood,
}

impl Flooding {
    /// The second tenant comes, if there is to be one.
    pub(super) fn start(args: &FloodArgs, core: &mut Core) -> Option<Flooding> {
        let blocks = args.flood?;
        core.connect(Client::SECOND);
        Some(Flooding { blocks, next: 0, flood: Flood::default() })
    }

    /// The second tenant's turn.
    pub(super) fn store(&mut self, core: &mut Core) -> anyhow::Result<()> {
        let keys: Vec<BlockKey> = (self.next..).take(self.blocks as usize).map(key).collect();
        self.next += u64::from(self.blocks);
        core.be(Client::SECOND);
        let path_tokens = std::mem::replace(&mut core.path_tokens, u64::MAX);
        let came = core.load(&keys, Hints::default())?.came;
        self.flood.offered += keys.len() as u64;
        self.flood.not_stored += core.store_rest(&keys, &came)?;
        core.path_tokens = path_tokens;
        core.be(Client::FIRST);
        self.note(&core.stats()?)
    }

    /// Remembers what the second tenant holds now.
    fn note(&mut self, stats: &CatalogStats) -> anyhow::Result<()> {
        let found = stats.owners.iter().find(|owner| owner.owner == Client::SECOND.tenant);
        let held = found.context("the second tenant has no account")?;
        for (most, found) in self.flood.most_bytes.iter_mut().zip(&held.tiers) {
            *most = found.used_bytes.max(*most);
        }
        self.flood.held = held.clone();
        Ok(())
    }
}

/// A key that no trace has: its last byte is set.
fn key(number: u64) -> BlockKey {
    let mut bytes = [0xff; 32];
    let spread = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes.iter_mut().zip(spread.to_le_bytes()).for_each(|(to, from)| *to = from);
    bytes.iter_mut().skip(8).zip(number.to_le_bytes()).for_each(|(to, from)| *to = from);
    BlockKey(bytes)
}

const TIERS: [&str; 3] = ["device", "host", "nvme"];

/// Rows for people.
pub(super) fn rows(flood: &Flood, table: &mut Table) {
    let stored = flood.offered - flood.not_stored;
    table.row([
        "second tenant: blocks stored".to_owned(),
        show_count(stored),
        format!("{} of those offered", show_ratio(stored, flood.offered)),
    ]);
    let names = ["GPU memory", "host RAM", "nvme"];
    for ((name, most), held) in names.iter().zip(flood.most_bytes).zip(&flood.held.tiers) {
        let quota = held.quota.hard.map_or("no quota".to_owned(), |hard| {
            format!("quota {}, never above {}", show_bytes(hard), show_bytes(most))
        });
        table.row([format!("  bytes in {name}"), show_bytes(held.used_bytes), quota]);
    }
}

/// The same as JSON.
pub(super) fn json(flood: &Flood) -> Value {
    let mut tiers: BTreeMap<&str, Value> = BTreeMap::new();
    for ((name, most), held) in TIERS.iter().zip(flood.most_bytes).zip(&flood.held.tiers) {
        let tier = json!({
            "used_bytes": held.used_bytes,
            "used_bytes_max": most,
            "quota_bytes": held.quota.hard,
            "evicted": held.evicted,
        });
        tiers.insert(name, tier);
    }
    json!({
        "blocks_offered": flood.offered,
        "not_stored": flood.not_stored,
        "refused": flood.held.refused,
        "tiers": tiers,
    })
}
