//! The way of a block from a client into host RAM.

use super::Catalog;
use super::event::{Action, OpError, OpId};
use super::flow::{Op, Part, TicketKind, Waiter};
use super::request::{
    Limit, MissReason, Outcome, Refusal, RegionId, RejectReason, Reply, SessionId, StoreBlock,
};
use super::table::{HostCopy, NewBlock, NvmeCopy};
use crate::block::{NamespaceId, Sum128, page_ceil};

/// Blocks before a stored one that are made more recent at most.
const ANCESTORS_MAX: usize = 4096;

impl Catalog {
    pub(super) fn store(
        &mut self,
        session: SessionId,
        namespace: NamespaceId,
        conversation: u64,
        region: RegionId,
        blocks: &[StoreBlock],
    ) -> Reply {
        if self.drain.is_some() {
            return Reply::Busy(Limit::Draining);
        }
        let Some(shape) = self.clients.region_of(session, region) else {
            return Reply::Refused(Refusal::UnknownRegion);
        };
        if blocks.iter().any(|block| block.place >= shape.places) {
            return Reply::Refused(Refusal::PlaceOutOfRange);
        }
        let ticket = match self.open_ticket(session, TicketKind::Store, blocks.len()) {
            Ok(ticket) => ticket,
            Err(reply) => return reply,
        };
        if let Some(open) = self.flow.tickets.get_mut(&ticket) {
            open.region = Some(region);
        }
        let generation = self.namespaces.get(&namespace).map_or(0, |info| info.generation);
        // Root first, so that what finds no room is the tail; and used leaf first, so that leaves
        // are colder than roots.
        let mut full = false;
        for (at, block) in blocks.iter().enumerate() {
            let part = Part { ticket, at };
            let new = NewBlock {
                namespace,
                generation,
                key: block.key,
                parent: block.parent,
                position: block.position,
                tokens: block.tokens,
                raw_bytes: shape.block_bytes,
            };
            if full {
                self.finish(part, Outcome::Busy);
            } else {
                full = !self.store_block(&new, conversation, part, region, block.place);
            }
        }
        for block in blocks.iter().rev() {
            if let Some(index) = self.table.find(namespace, &block.key)
                && (!self.config.trace_order || !self.table.get(index).is_filling())
            {
                self.touch(index);
            }
        }
        if !self.config.trace_order
            && let Some(first) = blocks.first()
        {
            self.touch_ancestors(namespace, first);
        }
        self.end_if_complete(ticket);
        Reply::Ticket(ticket)
    }

    fn touch_ancestors(&mut self, namespace: NamespaceId, first: &StoreBlock) {
        if let Some(parent) = self.table.find(namespace, &first.parent) {
            for index in self.table.ancestors(parent).take(ANCESTORS_MAX).collect::<Vec<_>>() {
                self.touch(index);
            }
        }
    }

    /// Says whether there was room.
    fn store_block(
        &mut self,
        new: &NewBlock,
        conversation: u64,
        part: Part,
        region: RegionId,
        place: u32,
    ) -> bool {
        if self.bad.contains(new.namespace, &new.key) {
            self.finish(part, Outcome::Rejected(RejectReason::Quarantined));
            return true;
        }
        let too_large = self.nvme.as_ref().is_some_and(|nvme| {
            page_ceil(u64::from(new.raw_bytes)) > u64::from(nvme.segments.payload_bytes_max())
        });
        if too_large || !self.host.slots.fits(new.raw_bytes) {
            self.finish(part, Outcome::Rejected(RejectReason::TooLarge));
            return true;
        }
        let index = self.table.find_or_insert(new);
        let block = self.table.get(index);
        if block.is_ghost() {
            return self.store_new(index, new, conversation, part, region, place);
        }
        if block.raw_bytes != new.raw_bytes {
            self.finish(part, Outcome::Rejected(RejectReason::Mismatch));
            return true;
        }
        match (block.host, block.nvme) {
            (HostCopy::Filling { doomed: false, .. }, _) => {
                self.flow.wait(index, Waiter::Store { part, region, place });
            }
            (HostCopy::Resident { .. }, _) | (HostCopy::Absent, NvmeCopy::Resident(_)) => {
                self.start_compare(index, part, region, place);
            }
            // Its last copy is just being given up.
            _ => self.finish(part, Outcome::Busy),
        }
        true
    }

    fn store_new(
        &mut self,
        index: u32,
        new: &NewBlock,
        conversation: u64,
        part: Part,
        region: RegionId,
        place: u32,
    ) -> bool {
        let now_s = self.wall_s();
        let block = self.table.get_mut(index);
        if block.pins > 0 && block.raw_bytes != new.raw_bytes {
            self.finish(part, Outcome::Busy);
            return true;
        }
        block.raw_bytes = new.raw_bytes;
        block.generation = new.generation;
        block.position = new.position;
        block.tokens = new.tokens;
        block.conversation = conversation;
        block.created_s = now_s;
        (block.hits, block.hits_written) = (0, 0);
        self.table.learn_parent(index, new);
        // The new entry must survive the evictions that make room for it.
        self.table.get_mut(index).queued = true;
        let slot = self.take_slot(index);
        self.table.get_mut(index).queued = false;
        let Some(slot) = slot else {
            self.finish(part, Outcome::Busy);
            self.after_loss(index);
            return false;
        };
        self.begin_fill(index, slot, true);
        self.counters.next_sequence += 1;
        self.table.get_mut(index).sequence = self.counters.next_sequence;
        if let Some(ticket) = self.flow.tickets.get_mut(&part.ticket) {
            ticket.set_active(part.at);
        }
        let op = self.flow.start(self.now, Op::Gather { block: index, part });
        let descriptor = Box::new(self.descriptor(index));
        self.actions.push(Action::Gather { op, region, place, slot, descriptor });
        true
    }

    pub(super) fn gathered(&mut self, op: OpId, result: Result<Sum128, OpError>) {
        let Some(Op::Gather { block: index, part }) = self.take_op(op) else {
            return;
        };
        let HostCopy::Filling { slot, doomed, .. } = self.table.get(index).host else {
            return;
        };
        match result {
            Ok(sum) if !doomed => {
                let block = self.table.get_mut(index);
                block.raw_sum = sum;
                block.host = HostCopy::Resident { slot, users: 0 };
                self.host.bytes_in += u64::from(block.raw_bytes);
                self.become_dirty(index);
                self.finish(part, Outcome::Stored);
                self.wake(index);
            }
            _ => {
                self.abort_fill(index);
                self.finish(part, Outcome::Rejected(RejectReason::Gone));
                self.fail_waiters(index, MissReason::Absent);
                self.after_loss(index);
            }
        }
    }

    /// The key is known: the first writer wins, so the client's bytes are only compared.
    pub(super) fn start_compare(&mut self, index: u32, part: Part, region: RegionId, place: u32) {
        if let Some(ticket) = self.flow.tickets.get_mut(&part.ticket) {
            ticket.set_active(part.at);
        }
        // The entry must keep its meaning until the comparison is done.
        self.pin(index);
        let op = self.flow.start(self.now, Op::Compare { block: index, part });
        self.actions.push(Action::Compare { op, region, place });
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
