//! The way of a block from a client into GPU memory or host RAM.

use super::Catalog;
use super::event::{Action, OpError, OpId, SlotPlace};
use super::flow::{Op, Part, Target, TicketKind, Waiter};
use super::request::{
    GpuId, Hints, Limit, MissReason, Outcome, Refusal, RejectReason, Reply, SessionId, StoreBlock,
    TicketId, Tier,
};
use super::reuse::{Path, RequestId, short_key};
use super::slot_tier::Home;
use super::table::{DeviceCopy, FillSource, HostCopy, NewBlock, NvmeCopy, step_of};
use crate::block::{BlockKey, NamespaceId, Sum128, page_ceil};
use crate::catalog::ladder::Step;

/// Blocks before a stored one that are made more recent at most.
const ANCESTORS_MAX: usize = 4096;

/// What a client stores.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) namespace: NamespaceId,
    pub(super) conversation: u64,
    pub(super) blocks: &'a [StoreBlock],
    pub(super) hints: &'a Hints,
}

impl Catalog {
    pub(super) fn store(&mut self, session: SessionId, what: &Stored<'_>, target: Target) -> Reply {
        let Stored { namespace, conversation, blocks, hints } = *what;
        if self.drain.is_some() {
            return Reply::Busy(Limit::Draining);
        }
        if self.ladder.step() >= Step::SharedOnly {
            return Reply::Busy(Limit::Pressure);
        }
        let Some(shape) = self.clients.region_of(session, target.region) else {
            return Reply::Refused(Refusal::UnknownRegion);
        };
        if blocks.iter().any(|block| block.place >= shape.places) {
            return Reply::Refused(Refusal::PlaceOutOfRange);
        }
        let kept_bytes = match self.kept_bytes(namespace, &shape) {
            Ok(bytes) => bytes,
            Err(refusal) => return Reply::Refused(refusal),
        };
        let ticket = match self.open_ticket(session, TicketKind::Store, blocks.len()) {
            Ok(ticket) => ticket,
            Err(reply) => return reply,
        };
        if let Some(open) = self.flow.tickets.get_mut(&ticket) {
            open.region = Some(target.region);
        }
        self.begin_store(session, namespace, conversation);
        let request = self.request_of_store(namespace, blocks);
        self.reuse.hint(request, hints);
        self.store_blocks(what, kept_bytes, request, ticket, target);
        for block in blocks.iter().rev() {
            if let Some(index) = self.table.find(namespace, &block.key)
                && (!self.config.trace_order || !self.table.get(index).is_filling())
            {
                self.touch_for(index, request, self.config.trace_order);
            }
        }
        if !self.config.trace_order
            && let Some(first) = blocks.first()
        {
            self.touch_ancestors(namespace, first, request);
        }
        if let Some(last) = blocks.last().filter(|_| !hints.says_nothing())
            && let Some(index) = self.table.find(namespace, &last.key)
        {
            self.retain(session, &self.path_to(index), hints);
        }
        self.end_if_complete(ticket);
        Reply::Ticket(ticket)
    }

    /// Root first, so that what finds no room is the tail; and used leaf first, so that leaves are
    /// colder than roots.
    fn store_blocks(
        &mut self,
        what: &Stored<'_>,
        kept_bytes: Option<u32>,
        request: RequestId,
        ticket: TicketId,
        target: Target,
    ) {
        let Stored { namespace, conversation, blocks, .. } = *what;
        let generation = self.namespaces.get(&namespace).map_or(0, |info| info.generation);
        if self.quotas.is_limited()
            && let Some(first) = blocks.first()
        {
            self.touch_ancestors(namespace, first, request);
        }
        let mut full = None;
        for (at, block) in blocks.iter().enumerate() {
            let part = Part { ticket, at };
            let new = NewBlock {
                namespace,
                generation,
                key: block.key,
                parent: block.parent,
                position: block.position,
                tokens: block.tokens,
                raw_bytes: kept_bytes.unwrap_or_default(),
            };
            if kept_bytes.is_none() {
                self.finish(part, Outcome::Rejected(RejectReason::Mismatch));
                continue;
            }
            if full.is_none() {
                let origin = (conversation, request);
                full = self.store_block(&new, origin, part, target, block.place).err();
            }
            if let Some(outcome) = full {
                self.finish(part, outcome);
                self.note_not_stored((namespace, conversation), block, outcome);
            }
        }
        self.end_store();
    }

    /// There was no room for a block: the quotas' owners are told of it, if it is for them.
    fn note_not_stored(
        &mut self,
        (namespace, conversation): (NamespaceId, u64),
        block: &StoreBlock,
        outcome: Outcome,
    ) {
        if matches!(outcome, Outcome::Rejected(_)) {
            self.count_refused(namespace);
        }
        if outcome == Outcome::Rejected(RejectReason::ConversationQuota) {
            let before = self.table.find(namespace, &block.parent);
            let reached = block.parent == BlockKey::ROOT
                || before.is_some_and(|at| !self.table.get(at).is_ghost());
            self.note_dropped((namespace, conversation), &block.key, block.position, reached);
        }
    }

    /// The request that a store belongs to: the one whose lookup found that these blocks were
    /// missing, or the one that used the block before them, or one of its own.
    fn request_of_store(&mut self, namespace: NamespaceId, blocks: &[StoreBlock]) -> RequestId {
        let Some(first) = blocks.first().filter(|_| self.reuse.is_wanted()) else {
            return RequestId::default();
        };
        for block in blocks {
            if self.reuse.note_tokens(namespace, block.tokens) {
                let from = short_key(namespace, &block.key);
                self.reuse.move_marker(from, short_key(namespace, &block.parent));
            }
        }
        if self.config.trace_order {
            return self.reuse.last();
        }
        if let Some(request) = self.reuse.coming(short_key(namespace, &first.key)) {
            return request;
        }
        let parent = self.table.find(namespace, &first.parent).map(|at| self.table.get(at));
        if let Some(parent) = parent.filter(|parent| parent.request() != RequestId::default()) {
            return parent.request();
        }
        let keys: Vec<BlockKey> = blocks.iter().map(|block| block.key).collect();
        let path = Path { namespace, keys: &keys, known: 0, cut_short: false };
        self.reuse.announce(&path, &Hints::default(), step_of(self.now))
    }

    fn touch_ancestors(&mut self, namespace: NamespaceId, first: &StoreBlock, request: RequestId) {
        if let Some(parent) = self.table.find(namespace, &first.parent) {
            for index in self.table.ancestors(parent).take(ANCESTORS_MAX).collect::<Vec<_>>() {
                self.touch_for(index, request, false);
            }
        }
    }

    /// When there is no room: what this block, and those behind it, end with.
    fn store_block(
        &mut self,
        new: &NewBlock,
        origin: (u64, RequestId),
        part: Part,
        target: Target,
        place: u32,
    ) -> Result<(), Outcome> {
        if self.bad.contains(new.namespace, &new.key) {
            self.finish(part, Outcome::Rejected(RejectReason::Quarantined));
            return Ok(());
        }
        let too_large = self.nvme.as_ref().is_some_and(|nvme| {
            page_ceil(u64::from(new.raw_bytes)) > u64::from(nvme.segments.payload_bytes_max())
        });
        if too_large || !self.host.tier.slots.fits(new.raw_bytes) {
            self.finish(part, Outcome::Rejected(RejectReason::TooLarge));
            return Ok(());
        }
        let index = self.table.find_or_insert(new);
        let block = self.table.get(index);
        if block.is_ghost() {
            return self.store_new(index, new, origin, part, target, place);
        }
        if block.raw_bytes != new.raw_bytes {
            self.finish(part, Outcome::Rejected(RejectReason::Mismatch));
            return Ok(());
        }
        match (block.device, block.host, block.nvme) {
            (DeviceCopy::Resident { .. }, ..)
            | (_, HostCopy::Resident { .. }, _)
            | (_, HostCopy::Absent, NvmeCopy::Resident(_)) => {
                self.start_compare(index, part, target, place);
            }
            (DeviceCopy::Filling { doomed: false, .. }, ..)
            | (_, HostCopy::Filling { doomed: false, .. }, _) => {
                self.flow.wait(index, Waiter::Store { part, target, place });
            }
            // Its last copy is just being given up.
            _ => self.finish(part, Outcome::Busy),
        }
        Ok(())
    }

    fn store_new(
        &mut self,
        index: u32,
        new: &NewBlock,
        (conversation, request): (u64, RequestId),
        part: Part,
        target: Target,
        place: u32,
    ) -> Result<(), Outcome> {
        let now_s = self.wall_s();
        self.tick += 1;
        let (now, tick) = (self.now, self.tick);
        let short = self.reuse.note_tokens(new.namespace, new.tokens);
        let block = self.table.get_mut(index);
        block.use_at(now, tick);
        if block.pins > 0 && block.raw_bytes != new.raw_bytes {
            self.finish(part, Outcome::Busy);
            return Ok(());
        }
        block.raw_bytes = new.raw_bytes;
        block.generation = new.generation;
        block.position = new.position;
        block.tokens = new.tokens;
        block.conversation = conversation;
        block.set_request(request);
        block.set_short(short);
        block.set_offered(false);
        block.set_created_s(now_s);
        block.hits = 0;
        self.table.learn_parent(index, new);
        // The new entry must survive the evictions that make room for it.
        self.table.get_mut(index).set_queued(true);
        let gpu = self.gpu_of(target.region);
        let to = self.take_place(gpu, index);
        self.table.get_mut(index).set_queued(false);
        let Some(to) = to else {
            let refusal = self.quotas.refusal();
            self.after_loss(index);
            return Err(refusal.map_or(Outcome::Busy, Outcome::Rejected));
        };
        self.begin_fill(index, to, FillSource::Client);
        self.counters.next_sequence += 1;
        self.table.get_mut(index).sequence = self.counters.next_sequence;
        if let Some(ticket) = self.flow.tickets.get_mut(&part.ticket) {
            ticket.set_active(part.at);
        }
        let op = self.flow.start(self.now, Op::Gather { block: index, part, to, gpu });
        let descriptor = Box::new(self.descriptor(index));
        let Target { region, after_event } = target;
        let narrow = self.narrow_shape(new.namespace);
        let gather = Action::Gather { op, region, place, after_event, to, narrow, descriptor };
        self.actions.push(gather);
        Ok(())
    }

    /// A slot for a block that comes from a region on `gpu`: in the GPU's pool if there is room,
    /// otherwise in host RAM.
    fn take_place(&mut self, gpu: Option<GpuId>, index: u32) -> Option<SlotPlace> {
        if let Some(gpu) = gpu {
            if !self.device_usable(gpu) {
                return None;
            }
            if let Some(slot) = self.take_device_slot(gpu, index) {
                return Some(SlotPlace::Device(gpu, slot));
            }
        }
        self.take_slot(Home::Host, index).map(SlotPlace::Host)
    }

    pub(super) fn gathered(&mut self, op: OpId, result: Result<Sum128, OpError>) {
        let Some(Op::Gather { block: index, part, to, .. }) = self.take_op(op) else {
            return;
        };
        let block = self.table.get(index);
        let doomed = match (to, block.host, block.device) {
            (SlotPlace::Host(_), HostCopy::Filling { doomed, .. }, _) => doomed,
            (SlotPlace::Device(..), _, DeviceCopy::Filling { doomed, .. }) => doomed,
            _ => return,
        };
        match (result, to) {
            (Ok(sum), SlotPlace::Host(slot)) if !doomed => {
                let block = self.table.get_mut(index);
                block.raw_sum = sum;
                block.host = HostCopy::Resident { slot, users: 0 };
                self.host.bytes_in += u64::from(block.raw_bytes);
                self.note_copy(index, Tier::Host, true);
                self.count_in_host(index, true);
                self.become_dirty(index);
                self.finish(part, Outcome::Stored);
                self.wake(index, false);
            }
            (Ok(sum), SlotPlace::Device(gpu, _)) if !doomed && self.device_usable(gpu) => {
                self.table.get_mut(index).raw_sum = sum;
                self.device_filled(index);
                self.finish(part, Outcome::Stored);
                self.wake(index, false);
            }
            _ => {
                match to {
                    SlotPlace::Host(_) => self.abort_fill(index),
                    SlotPlace::Device(..) => self.abort_device_fill(index),
                }
                let reason = match result {
                    Err(OpError::NotFinite) => RejectReason::NotFinite,
                    _ => RejectReason::Gone,
                };
                self.finish(part, Outcome::Rejected(reason));
                self.fail_waiters(index, MissReason::Absent);
                self.after_loss(index);
            }
        }
    }

    /// The key is known: the first writer wins, so the client's bytes are only compared. Not where
    /// blocks are kept narrower: an engine that goes on from what it loaded computes other bytes.
    pub(super) fn start_compare(&mut self, index: u32, part: Part, target: Target, place: u32) {
        if self.narrow_shape(self.table.get(index).namespace).is_some() {
            return self.finish(part, Outcome::Present);
        }
        let gpu = self.gpu_of(target.region);
        if gpu.is_some_and(|gpu| !self.device_usable(gpu)) {
            return self.finish(part, Outcome::Busy);
        }
        if let Some(ticket) = self.flow.tickets.get_mut(&part.ticket) {
            ticket.set_active(part.at);
        }
        // The entry must keep its meaning until the comparison is done.
        self.pin(index);
        let op = self.flow.start(self.now, Op::Compare { block: index, part });
        let raw_bytes = self.table.get(index).raw_bytes;
        let Target { region, after_event } = target;
        self.actions.push(Action::Compare { op, region, place, after_event, raw_bytes });
    }

    pub(super) fn compared(&mut self, op: OpId, result: Result<Sum128, OpError>) {
        let Some(Op::Compare { block: index, part }) = self.take_op(op) else {
            return;
        };
        let block = self.table.get(index);
        let outcome = match result {
            Err(_) => Outcome::Rejected(RejectReason::Gone),
            Ok(_) if block.is_ghost() => Outcome::Busy,
            Ok(sum) if sum == block.raw_sum => Outcome::Present,
            Ok(_) => Outcome::Rejected(RejectReason::Mismatch),
        };
        let reference = self.table.reference(index);
        self.unpin_block(reference);
        self.finish(part, outcome);
    }
}
