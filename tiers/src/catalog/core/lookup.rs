//! Lookups, leases, pins and touches.

use super::Catalog;
use super::planted::Planted;
use super::request::{
    Conversation, Hints, LeaseId, Limit, LookupReply, PinId, PrefixQuery, Refusal, Reply, Run,
    RunState, SessionId, Tier,
};
use super::reuse::{Path, RequestId, short_key};
use super::table::{BATCH, BlockRef, DeviceCopy, FillSource, HostCopy, NvmeCopy, step_of};
use crate::block::{BlockKey, NamespaceId};
use crate::catalog::ladder::Step;

/// Keys of a lookup that are searched first.
const BATCH_FIRST: usize = 16;

impl Catalog {
    /// Where a block can be loaded from.
    pub(super) fn available(&self, index: u32) -> Option<(Tier, RunState)> {
        let block = self.table.get(index);
        match (block.device, block.host, block.nvme) {
            (DeviceCopy::Resident { .. }, ..) => Some((Tier::Device, RunState::Ready)),
            (_, HostCopy::Resident { .. }, _) => Some((Tier::Host, RunState::Ready)),
            (_, HostCopy::Filling { doomed: false, source: FillSource::Client, .. }, _) => {
                Some((Tier::Host, RunState::Pending))
            }
            (_, _, NvmeCopy::Resident(_)) if self.nvme_usable() => {
                Some((Tier::Nvme, RunState::Ready))
            }
            (DeviceCopy::Filling { doomed: false, .. }, HostCopy::Absent, _) => {
                Some((Tier::Device, RunState::Pending))
            }
            _ => None,
        }
    }

    pub(super) fn is_available(&self, index: u32) -> bool {
        self.available(index).is_some()
    }

    /// The block of a key, if it can be loaded. The answer for a key of another namespace is found
    /// by the same steps as for one that does not exist.
    pub(super) fn find_available(&self, namespace: NamespaceId, key: &BlockKey) -> Option<u32> {
        let index = self.table.find(namespace, key)?;
        self.available(index).map(|_| index)
    }

    /// The blocks of one prefix, as far as it is there.
    fn resident_run(&self, prefix: &PrefixQuery) -> Vec<u32> {
        self.common_run(std::slice::from_ref(prefix), |_, _| {}).pop().unwrap_or_default()
    }

    /// The blocks that all prefixes, which have as many keys each, start with; calls `each` with
    /// where one after the other can be loaded from.
    fn common_run(
        &self,
        prefixes: &[PrefixQuery],
        mut each: impl FnMut(Tier, RunState),
    ) -> Vec<Vec<u32>> {
        let keys = prefixes.first().map_or(0, |prefix| prefix.keys.len());
        let mut found: Vec<Vec<u32>> = vec![Vec::new(); prefixes.len()];
        let mut at = 0;
        while at < keys {
            // Many lookups end at their first key.
            let end = keys.min(at + if at == 0 { BATCH_FIRST } else { BATCH });
            let batches: Vec<_> = prefixes
                .iter()
                .map(|prefix| {
                    let part = prefix.keys.get(at..end).unwrap_or_default();
                    self.table.find_batch(prefix.namespace, part)
                })
                .collect();
            for within in 0..end - at {
                let (mut tier, mut state) = (None, RunState::Ready);
                for batch in &batches {
                    let index = batch.get(within).copied().flatten();
                    let Some((one, ready)) = index.and_then(|index| self.available(index)) else {
                        return found;
                    };
                    tier = tier.max(Some(one));
                    if ready == RunState::Pending {
                        state = RunState::Pending;
                    }
                }
                each(tier.unwrap_or(Tier::Host), state);
                for (list, batch) in found.iter_mut().zip(&batches) {
                    list.extend(batch.get(within).copied().flatten());
                }
            }
            at = end;
        }
        found
    }

    pub(super) fn lookup(
        &mut self,
        session: SessionId,
        prefixes: &[PrefixQuery],
        lease_ms: u32,
        hints: &Hints,
    ) -> Reply {
        let keys = prefixes.first().map_or(0, |prefix| prefix.keys.len());
        if prefixes.iter().any(|prefix| prefix.keys.len() != keys) {
            return Reply::Refused(Refusal::UnequalPrefixes);
        }
        if keys.saturating_mul(prefixes.len()) > self.config.limits.keys_per_call {
            return Reply::Refused(Refusal::TooManyKeys);
        }
        self.counters.lookups += 1;
        self.counters.lookup_keys += keys as u64;
        let mut reply = LookupReply::default();
        if self.ladder.step() == Step::Bypass {
            return Reply::Lookup(reply);
        }
        let mut found = self.common_run(prefixes, |tier, state| {
            push_run(&mut reply.runs, tier, state);
            reply.blocks += 1;
        });
        let known = found.first().map_or(0, Vec::len);
        let path = found.first().and_then(|run| run.last()).copied();
        let probe = self.withhold(prefixes, &mut found, &mut reply, lease_ms > 0);
        self.counters.lookup_hits += u64::from(reply.blocks);
        if let Some(prefix) = prefixes.first() {
            reply.dropped = self.dropped_at(prefix, known).map(Box::new);
        }
        if lease_ms == 0 || self.config.trace_order {
            self.advise(prefixes, &found, &mut reply, (false, false));
            if lease_ms > 0 {
                self.begin_request(prefixes, (known, path), hints);
            }
            return Reply::Lookup(reply);
        }
        if reply.blocks > 0
            && let Err(busy) = self.may_lease(session, &mut found, &mut reply)
        {
            return busy;
        }
        self.advise(prefixes, &found, &mut reply, (true, probe));
        let request = self.begin_request(prefixes, (known, path), hints);
        if let Some(holder) = self.clients.sessions.get_mut(&session) {
            holder.lookups += 1;
        }
        if reply.blocks > 0 {
            self.grant_lease(session, &found, request, lease_ms, &mut reply);
        }
        for run in &found {
            self.retain(session, run, hints);
        }
        Reply::Lookup(reply)
    }

    /// Tells what learns that a request begins: how many blocks are there, and the last of them.
    fn begin_request(
        &mut self,
        prefixes: &[PrefixQuery],
        (known, last): (usize, Option<u32>),
        hints: &Hints,
    ) -> RequestId {
        let Some(prefix) = prefixes.first() else {
            return RequestId::default();
        };
        let namespace = prefix.namespace;
        let last = last.filter(|_| known == prefix.keys.len());
        let cut_short = last.is_some_and(|index| self.table.get(index).is_short());
        let path = Path { namespace, keys: &prefix.keys, known, cut_short };
        let request = self.reuse.announce(&path, hints, step_of(self.now));
        // The other ranks' blocks are stored for the same request.
        for other in prefixes.iter().skip(1) {
            if let Some(first) = other.keys.get(known) {
                self.reuse.expect_store(short_key(other.namespace, first), request);
            }
        }
        request
    }

    /// Cuts the run to what may be leased, or says why none may be.
    fn may_lease(
        &self,
        session: SessionId,
        found: &mut [Vec<u32>],
        reply: &mut LookupReply,
    ) -> Result<(), Reply> {
        let limits = self.config.limits;
        let holder = self.clients.sessions.get(&session);
        let Some(holder) = holder else {
            return Err(Reply::Refused(Refusal::UnknownSession));
        };
        let entries: usize = found.iter().map(Vec::len).sum();
        if holder.leases.len() >= limits.leases_per_session
            || self.clients.leased_blocks + entries > limits.leased_blocks
        {
            return Err(Reply::Busy(Limit::Leases));
        }
        let fits = self.pinnable(found);
        if fits == 0 {
            return Err(Reply::Busy(Limit::Pins));
        }
        if fits < reply.blocks as usize {
            found.iter_mut().for_each(|list| list.truncate(fits));
            cut_runs(reply, fits as u32);
        }
        Ok(())
    }

    fn grant_lease(
        &mut self,
        session: SessionId,
        found: &[Vec<u32>],
        request: RequestId,
        lease_ms: u32,
        reply: &mut LookupReply,
    ) {
        let mut blocks = Vec::with_capacity(found.iter().map(Vec::len).sum());
        for index in found.iter().flatten() {
            blocks.push(self.pin(*index));
            self.table.get_mut(*index).count_hit();
        }
        for index in found.iter().flatten().rev() {
            self.touch_for(*index, request, true);
        }
        reply.lease_ms = lease_ms.min(self.config.limits.lease_ms_max);
        let expires = self.now.plus_ms(u64::from(reply.lease_ms));
        reply.lease = self.clients.add_lease(session, expires, blocks);
    }

    /// Whether pinning these blocks too would stay within the part of a tier that may be pinned.
    fn may_pin(&self, blocks: impl Iterator<Item = u32>) -> bool {
        let new: u64 = blocks
            .map(|index| self.table.get(index))
            .filter(|block| block.pins == 0)
            .map(|block| u64::from(block.raw_bytes))
            .sum();
        self.counters.pinned_bytes + new <= self.pinned_bytes_max()
    }

    /// What is pinned must stay in the slowest tier that there is.
    pub(super) fn pinned_bytes_max(&self) -> u64 {
        let percent = u64::from(self.config.limits.pinned_percent);
        let bytes = match &self.nvme {
            // With a write budget, what is pinned may have to stay in host RAM.
            Some(nvme) if nvme.offline.is_none() && nvme.admission.is_none() => {
                let geometry = nvme.shape.geometry;
                u64::from(geometry.payload_bytes()) * u64::from(geometry.segments)
            }
            _ => self.config.host_bytes,
        };
        bytes.saturating_mul(percent) / 100
    }

    /// How many blocks of a run, from the root on, can be pinned in all of the lists.
    fn pinnable(&self, lists: &[Vec<u32>]) -> usize {
        let mut bytes = self.counters.pinned_bytes;
        let one_more = self.has_planted(Planted::LimitOffByOne);
        let length = lists.first().map_or(0, Vec::len);
        (0..length)
            .take_while(|at| {
                let each = lists.iter().filter_map(|list| list.get(*at));
                let new = each.map(|index| self.table.get(*index)).filter(|block| block.pins == 0);
                let new = new.map(|block| u64::from(block.raw_bytes)).sum::<u64>();
                bytes += new;
                bytes <= self.pinned_bytes_max() + if one_more { new } else { 0 }
            })
            .count()
    }

    /// Ends a lease; its blocks count as used now, leaves first.
    pub(super) fn end_lease(&mut self, lease: LeaseId) -> bool {
        let Some(lease) = self.clients.take_lease(lease) else {
            return false;
        };
        self.touch_and_unpin(&lease.blocks);
        true
    }

    fn touch_and_unpin(&mut self, blocks: &[BlockRef]) {
        for block in blocks.iter().rev() {
            if let Some(index) = self.table.resolve(*block) {
                self.touch(index);
            }
            self.unpin_block(*block);
        }
    }

    pub(super) fn release(&mut self, session: SessionId, lease: LeaseId) -> Reply {
        let tenant = self.tenant_of(session);
        let held = self.clients.leases.get(&lease).is_some_and(|held| Some(held.tenant) == tenant);
        Reply::Count(u64::from(held && self.end_lease(lease)))
    }

    pub(super) fn touch_prefix(
        &mut self,
        session: SessionId,
        prefix: &PrefixQuery,
        hints: &Hints,
    ) -> Reply {
        if prefix.keys.len() > self.config.limits.keys_per_call {
            return Reply::Refused(Refusal::TooManyKeys);
        }
        let found = prefix.keys.iter();
        let found = found.filter_map(|key| self.find_available(prefix.namespace, key));
        let found: Vec<u32> = found.collect();
        self.take_hints(session, &found, hints);
        if hints.conversation == Conversation::Drop {
            return Reply::Count(self.drop_tail(&found));
        }
        let over = hints.conversation.is_over();
        let touches = self.touches(hints);
        for index in found.iter().rev().take_while(|_| touches) {
            // What others go through too stays as it is.
            if over && self.table.branches(*index) {
                break;
            }
            match self.config.trace_order {
                true => self.touch_for(*index, self.reuse.last(), true),
                false => self.touch(*index),
            }
        }
        Reply::Count(found.len() as u64)
    }

    pub(super) fn pin_prefix(
        &mut self,
        session: SessionId,
        prefix: &PrefixQuery,
        ttl_ms: u64,
    ) -> Reply {
        let limits = self.config.limits;
        if prefix.keys.len() > limits.keys_per_call {
            return Reply::Refused(Refusal::TooManyKeys);
        }
        let Some(tenant) = self.tenant_of(session) else {
            return Reply::Refused(Refusal::UnknownSession);
        };
        let run = self.resident_run(prefix);
        if self.clients.pins.len() >= limits.pins || !self.may_pin(run.iter().copied()) {
            return Reply::Busy(Limit::Pins);
        }
        let blocks: Vec<BlockRef> = run.iter().map(|index| self.pin(*index)).collect();
        // What was not worth a write may be now.
        run.iter().for_each(|index| self.offer_again(*index));
        let count = blocks.len() as u32;
        let expires = self.now.plus_ms(ttl_ms.min(limits.pin_ms_max));
        Reply::Pinned { pin: self.clients.add_pin(tenant, expires, blocks), blocks: count }
    }

    pub(super) fn unpin(&mut self, session: SessionId, pin: PinId) -> Reply {
        let tenant = self.tenant_of(session);
        match self.clients.pins.get(&pin) {
            Some(held) if Some(held.tenant) == tenant => Reply::Count(self.end_pin(pin)),
            _ => Reply::Refused(Refusal::UnknownPin),
        }
    }

    pub(super) fn end_pin(&mut self, pin: PinId) -> u64 {
        let Some(pin) = self.clients.take_pin(pin) else {
            return 0;
        };
        self.touch_and_unpin(&pin.blocks);
        pin.blocks.len() as u64
    }
}

/// Shortens the answer to the first `blocks` blocks.
pub(super) fn cut_runs(reply: &mut LookupReply, blocks: u32) {
    let mut left = blocks;
    for run in &mut reply.runs {
        run.blocks = run.blocks.min(left);
        left -= run.blocks;
    }
    reply.runs.retain(|run| run.blocks > 0);
    reply.blocks = blocks;
}

/// Appends one block to a list of runs.
fn push_run(runs: &mut Vec<Run>, tier: Tier, state: RunState) {
    match runs.last_mut() {
        Some(run) if run.tier == tier && run.state == state => run.blocks += 1,
        _ => runs.push(Run { blocks: 1, tier, state }),
    }
}
