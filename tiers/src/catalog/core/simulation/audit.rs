//! What is looked at now and then, because it takes a look at everything.

use std::collections::{BTreeMap, BTreeSet};

use super::scenario::Id;
use super::world::World;
use crate::block::Descriptor;
use crate::block::{BlockKey, NamespaceId};
use crate::catalog::{
    AskId, Catalog, Event, GpuId, InspectQuery, InspectRow, Request, SessionId, TenantId, Tier,
};

use super::clients::Asked;
use super::edge::{Job, Pending};

impl World {
    /// The catalog's table, and the places as they are, agree.
    pub(super) fn audit(&mut self) {
        if self.complaint().is_some() {
            return;
        }
        self.counts.audits += 1;
        let rows = self.rows();
        let in_host: BTreeSet<Id> =
            rows.iter().filter(|(_, row)| row.host).map(|(id, _)| *id).collect();
        let mut held: BTreeMap<Id, u32> = BTreeMap::new();
        let mut used = 0;
        let mut lost = None;
        for (slot, state) in &self.media.host {
            used += u64::from(state.in_use());
            let Some(there) = state.held.as_ref() else { continue };
            *held.entry(there.block).or_default() += 1;
            // Between its encoding and the end of its write, nobody reads a slot.
            let writes = |one: &Pending| matches!(one.job, Job::Write { .. });
            let idle = state.readers == 0
                && !self.pending.iter().any(|one| one.block == Some(there.block) && writes(one));
            if !in_host.contains(&there.block) && idle {
                lost = Some(format!("{slot:?} holds {:?}, and nobody knows", there.block));
            }
        }
        if let Some(block) = self.catalog.stuck_under_reclaim() {
            self.complain(format!("a segment under reclaim waits for block {block} for ever"));
        }
        let stats = self.catalog.stats();
        if stats.host.blocks != used {
            let complaint =
                format!("{} slots of host RAM are counted as used, {used} are", stats.host.blocks);
            self.complain(complaint);
        }
        lost.into_iter().for_each(|complaint| self.complain(complaint));
        if let Some(block) = in_host.iter().find(|block| held.get(block) != Some(&1)) {
            let complaint = format!("{block:?} lies in {:?} slots of host RAM", held.get(block));
            self.complain(complaint);
        }
        let residents = residents_of(&rows);
        if residents != self.residents {
            let wrong = residents.symmetric_difference(&self.residents).next();
            self.complain(format!("those who follow were not told of {wrong:?}"));
        }
        for (block, row) in &rows {
            if let Some(complaint) = self.audit_row(*block, row) {
                self.complain(complaint);
            }
        }
    }

    /// Begins to follow what comes and goes.
    pub(super) fn follow(&mut self) {
        self.catalog.follow_residency(self.scenario.follows);
        self.residents = self.residents_now();
    }

    pub(super) fn residents_now(&mut self) -> BTreeSet<(Id, Tier)> {
        residents_of(&self.rows())
    }

    fn audit_row(&self, block: Id, row: &InspectRow) -> Option<String> {
        if let Some((segment, sequence, _)) = row.nvme {
            let found = self.media.segments.get(&segment);
            let there = found.is_some_and(|found| {
                let alive = found.payloads.range((sequence, 0)..=(sequence, u32::MAX));
                found.sequence == sequence
                    && alive.into_iter().any(|(_, payload)| payload.block == block)
            });
            if !there {
                return Some(format!("{block:?} is not on nvme: {row:?}"));
            }
        }
        let pool = |gpu: GpuId| {
            let slots = self.media.device.iter().filter(|((on, _), _)| *on == gpu);
            let mut held = slots.filter_map(|(_, slot)| slot.held.as_ref());
            held.any(|held| held.block == block)
        };
        let on_gpu = row.device.is_some_and(|gpu| !pool(gpu) || self.lost.contains(&gpu));
        on_gpu.then(|| format!("{block:?} is in no pool: {row:?}"))
    }

    fn rows(&mut self) -> Vec<(Id, InspectRow)> {
        let mut all = Vec::new();
        let mut cursor = Some(0);
        while let Some(at) = cursor {
            let query = InspectQuery { cursor: at, limit: 4096, ..InspectQuery::default() };
            let page = self.catalog.inspect(&query);
            all.extend(page.rows);
            cursor = page.cursor;
        }
        let mut rows = Vec::new();
        for row in all {
            match Id::of(row.namespace, &row.key) {
                Some(block) => rows.push((block, row)),
                None => self.complain(format!("nobody stored {row:?}")),
            }
        }
        rows
    }

    /// Everybody leaves, all that is under way ends, and everything is forgotten: then nothing is
    /// left, but for what a lost GPU may still be doing.
    pub(super) fn come_to_rest(&mut self) {
        self.calm = true;
        let sessions: Vec<SessionId> = self.clients.sessions.keys().copied().collect();
        for session in sessions {
            self.close_session(session);
        }
        for _ in 0..3 {
            self.now += 100_000_000;
            self.clients.expire(self.time());
            self.apply(Event::Tick);
            self.complete_all();
        }
        self.audit();
        let names: Vec<NamespaceId> = self.scenario.namespaces.iter().map(|info| info.id).collect();
        for namespace in names {
            self.raise_generation(namespace);
            let (ask, session) = (AskId(self.clients.number()), SessionId(self.clients.number()));
            self.clients.sessions.insert(session, TenantId(0));
            self.apply(Event::SessionOpened { session, tenant: TenantId(0) });
            self.clients.asked.insert(ask, Asked::Count(None));
            let request = Request::Forget(crate::catalog::Forget::Namespace { namespace });
            self.apply(Event::Asked { ask, session, request });
            self.close_session(session);
        }
        self.complete_all();
        self.apply(Event::Tick);
        self.complete_all();
        self.check_rest();
    }

    fn complete_all(&mut self) {
        // Every completion may begin something new, but not for ever.
        for _ in 0..100_000 {
            if self.pending.is_empty() || self.complaint().is_some() {
                return;
            }
            self.complete_one();
        }
        let left: Vec<String> = self.pending.iter().take(4).map(|one| format!("{one:?}")).collect();
        self.complain(format!("operations never cease: {left:?}"));
    }

    fn check_rest(&mut self) {
        let stats = self.catalog.stats();
        let stuck = self.stuck.len() as u64;
        let of_gpus: u64 = stats.device.iter().map(|pool| pool.blocks).sum();
        let counts = [
            ("slots of host RAM", stats.host.blocks, stuck),
            ("slots of pools", of_gpus, 2 * stuck),
            ("blocks on nvme", stats.nvme.blocks, 0),
            ("blocks in the table", stats.blocks, 4 * stuck * super::scenario::CHAIN_BLOCKS),
            ("dirty blocks", stats.dirty_blocks, 0),
            ("tickets", stats.tickets, stuck),
            ("leases", stats.leases, 0),
            ("pins", stats.pins, 0),
            ("asks", self.clients.asked.len() as u64, 0),
            ("encoded blocks", self.media.encoded.len() as u64, 0),
            ("operations", self.catalog.under_way() as u64, stuck),
        ];
        if let Some((what, left, most)) = counts.iter().find(|(_, left, most)| left > most) {
            self.complain(format!("{left} {what} are left at the end; {most} may be: {stats:?}"));
        }
    }
}

fn residents_of(rows: &[(Id, InspectRow)]) -> BTreeSet<(Id, Tier)> {
    let mut found = BTreeSet::new();
    for (block, row) in rows {
        found.extend(row.device.map(|_| (*block, Tier::Device)));
        found.extend(row.host.then_some((*block, Tier::Host)));
        found.extend(row.nvme.map(|_| (*block, Tier::Nvme)));
    }
    found
}

/// What the simulation sees of the catalog, besides its answers and actions.
impl Catalog {
    /// What is known of a block, whether it has copies or not.
    pub(super) fn row_of(&self, namespace: NamespaceId, key: &BlockKey) -> Option<InspectRow> {
        let index = self.table.find(namespace, key)?;
        Some(self.row(index, self.table.get(index)))
    }

    pub(super) fn descriptor_of(
        &self,
        namespace: NamespaceId,
        key: &BlockKey,
    ) -> Option<Descriptor> {
        self.table.find(namespace, key).map(|index| self.descriptor(index))
    }

    fn under_way(&self) -> usize {
        self.flow.ops.len()
    }
}
