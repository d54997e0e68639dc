//! What operators ask: the block table, the counters, forgetting.

use super::device::DeviceTier;
use super::request::{
    CatalogStats, Forget, InspectPage, InspectQuery, InspectRow, Reply, Tier, TierUse,
};
use super::table::{Block, HostCopy};
use super::{Catalog, OfflineReason};
use crate::block::{BlockKey, NamespaceId};

/// Rows in one page at most.
const ROWS_MAX: usize = 4096;

/// Table entries that one page looks at, so that it takes bounded time.
const ENTRIES_MAX: u32 = 65_536;

impl Catalog {
    pub(super) fn inspect(&self, query: &InspectQuery) -> InspectPage {
        let limit = (query.limit as usize).clamp(1, ROWS_MAX);
        let end = self.table.index_end();
        let stop = query.cursor.saturating_add(ENTRIES_MAX).min(end);
        let mut rows = Vec::new();
        let mut at = query.cursor;
        while at < stop && rows.len() < limit {
            if let Some(block) = self.table.live(at).filter(|block| wanted(block, query)) {
                rows.push(self.row(at, block));
            }
            at += 1;
        }
        InspectPage { rows, cursor: (at < end).then_some(at) }
    }

    pub(super) fn row(&self, index: u32, block: &Block) -> InspectRow {
        let parent = match block.parent {
            super::table::NIL => BlockKey::ROOT,
            parent => self.table.get(parent).key,
        };
        let nvme = self.table.location(index).zip(self.nvme.as_ref()).map(|(location, nvme)| {
            let sequence = nvme.segments.get(location.segment).sequence;
            (location.segment, sequence, location.stored_bytes)
        });
        InspectRow {
            key: block.key,
            parent,
            namespace: block.namespace,
            position: block.position,
            tokens: block.tokens,
            raw_bytes: block.raw_bytes,
            device: block.device_slot().map(|(gpu, _)| gpu),
            host: matches!(block.host, HostCopy::Resident { .. }),
            nvme,
            pins: block.pins,
            hits: u32::from(block.hits),
            idle_us: self.now.0.saturating_sub(block.used_at().0),
            created_s: block.created_s(),
        }
    }

    pub(super) fn forget(&mut self, what: &Forget) -> Reply {
        if let Forget::Keys { namespace, .. } | Forget::Conversation { namespace, .. } = what {
            self.retire_unreachable(*namespace);
        }
        let doomed: Vec<u32> = match what {
            Forget::Keys { namespace, keys } => {
                let found = keys.iter().filter_map(|key| self.table.find(*namespace, key));
                self.table.subtrees(found)
            }
            Forget::Conversation { namespace, conversation } => self.select(|block| {
                block.namespace == *namespace && block.conversation == *conversation
            }),
            Forget::Namespace { namespace } => self.select(|block| block.namespace == *namespace),
        };
        let mut count = 0;
        let references: Vec<_> = doomed.iter().map(|index| self.table.reference(*index)).collect();
        for reference in references {
            // Removing one block may already have removed a bare parent.
            if let Some(index) = self.table.resolve(reference) {
                count += u64::from(!self.table.get(index).is_ghost());
                // A new generation already voids the blocks of a whole namespace on the device.
                let erase = !matches!(what, Forget::Namespace { .. });
                self.drop_copies(index, erase);
            }
        }
        Reply::Count(count)
    }

    fn select(&self, wanted: impl Fn(&Block) -> bool) -> Vec<u32> {
        let wanted = |index: &u32| self.table.live(*index).is_some_and(&wanted);
        (0..self.table.index_end()).filter(wanted).collect()
    }

    pub(super) fn report_bad(&mut self, namespace: NamespaceId, keys: &[BlockKey]) -> Reply {
        self.retire_unreachable(namespace);
        let mut count = 0;
        for key in keys.iter().take(self.config.limits.keys_per_call) {
            self.bad.insert(namespace, *key, self.config.limits.bad_keys);
            if let Some(index) = self.table.find(namespace, key) {
                count += 1;
                self.drop_copies(index, true);
            }
        }
        Reply::Count(count)
    }

    pub(super) fn stats(&self) -> CatalogStats {
        let counters = &self.counters;
        let host = TierUse {
            capacity_bytes: self.host.tier.slots.capacity_bytes(),
            used_bytes: self.host.tier.slots.used_bytes(),
            blocks: self.host.tier.slots.used_slots(),
            bytes_in: self.host.bytes_in,
            bytes_out: self.host.bytes_out,
            evicted: self.host.evicted,
            hits: self.host.hits,
            offline: None,
        };
        let nvme = self.nvme.as_ref().map(|nvme| TierUse {
            capacity_bytes: nvme.segments.capacity_bytes(),
            used_bytes: nvme.segments.live_bytes(),
            blocks: nvme.blocks,
            bytes_in: nvme.bytes_in,
            bytes_out: nvme.bytes_out,
            evicted: nvme.evicted,
            hits: nvme.hits,
            offline: nvme.offline,
        });
        let device = self.devices.iter().map(device_use).collect();
        let device_only: usize = self.devices.iter().map(|found| found.dirty.len()).sum();
        let off = TierUse { offline: Some(OfflineReason::Configured), ..TierUse::default() };
        let mut rejected: Vec<_> = counters.rejected.iter().map(|(k, v)| (*k, *v)).collect();
        let mut missed: Vec<_> = counters.missed.iter().map(|(k, v)| (*k, *v)).collect();
        rejected.sort_by_key(|(reason, _)| *reason as u8);
        missed.sort_by_key(|(reason, _)| *reason as u8);
        CatalogStats {
            device,
            host,
            nvme: nvme.unwrap_or(off),
            blocks: self.table.len() as u64,
            dirty_blocks: (self.host.dirty.len() + device_only) as u64,
            dirty_bytes: self.host.dirty_bytes,
            sessions: self.clients.sessions.len() as u64,
            regions: self.clients.regions.len() as u64,
            leases: self.clients.leases.len() as u64,
            pins: self.clients.pins.len() as u64,
            tickets: self.flow.tickets.len() as u64,
            lookups: counters.lookups,
            lookup_keys: counters.lookup_keys,
            lookup_hits: counters.lookup_hits,
            stored: counters.stored,
            present: counters.present,
            store_busy: counters.store_busy,
            rejected,
            missed,
            corrupt: counters.corrupt,
            write_failures: counters.write_failures,
            read_failures: counters.read_failures,
            segments_reclaimed: counters.segments_reclaimed,
            segments_quarantined: self.nvme.as_ref().map_or(0, |n| n.segments.quarantined()),
            reinserted: counters.reinserted,
            write_refused: self
                .nvme
                .as_ref()
                .map_or(0, |nvme| nvme.admission.as_ref().map_or(0, |admission| admission.refused)),
            draining: self.drain.is_some(),
            worth: self.arbiter.worth(),
            withheld: self.arbiter.withheld(self.now),
            prefill: self.prefill_stats(),
            owners: self.quotas.uses(),
            ladder: self.ladder.report(self.now),
            not_spilled_bytes: counters.not_spilled_bytes,
            dropped_under_pressure: counters.dropped_under_pressure,
            residency_version: self.journal.version,
        }
    }
}

fn device_use(found: &DeviceTier) -> TierUse {
    TierUse {
        capacity_bytes: found.tier.slots.capacity_bytes(),
        used_bytes: found.tier.slots.used_bytes(),
        blocks: found.tier.slots.used_slots(),
        bytes_in: found.bytes_in,
        bytes_out: found.bytes_out,
        evicted: found.evicted,
        hits: found.hits,
        offline: found.offline,
    }
}

fn wanted(block: &Block, query: &InspectQuery) -> bool {
    let in_device = block.device_slot().is_some();
    let in_host = matches!(block.host, HostCopy::Resident { .. });
    let in_nvme = block.spot().is_some();
    let tier = match query.tier {
        None => in_device || in_host || in_nvme,
        Some(Tier::Host) => in_host,
        Some(Tier::Nvme) => in_nvme,
        Some(Tier::Device) => in_device,
    };
    let namespace =
        query.namespaces.as_ref().is_none_or(|namespaces| namespaces.contains(&block.namespace));
    tier && namespace && block.key.0.starts_with(&query.key_prefix)
}
