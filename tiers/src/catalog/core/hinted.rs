//! What follows from hints beyond the class of a request: paths that are retained for a time, and
//! paths that are dropped.
//!
//! Invariants: a path has one retention at most, which the next one of the same conversation
//! replaces; retentions are no more than half of all pins, each no longer than
//! [`Limits::retain_ms_max`](super::Limits), and pin no more than half of what may be pinned; where
//! they do not fit they are left out, because a hint is no promise.

use super::Catalog;
use super::request::{Hints, SessionId};
use super::table::BlockRef;
use crate::block::{BlockKey, NamespaceId};

/// Blocks of a path that are retained at most.
const RETAINED_MAX: usize = 16_384;

impl Catalog {
    /// Takes account of what an engine says of the conversation that ends with these blocks, root
    /// first; they are there.
    pub(super) fn take_hints(&mut self, session: SessionId, path: &[u32], hints: &Hints) {
        let Some(last) = path.last().filter(|_| !hints.says_nothing()) else {
            return;
        };
        self.reuse.hint(self.table.get(*last).request(), hints);
        self.retain(session, path, hints);
    }

    /// The same for blocks of which only the keys are known: what follows is of the path that ends
    /// with the last one that is there.
    pub(super) fn take_hints_of_keys<'a>(
        &mut self,
        session: SessionId,
        namespace: NamespaceId,
        keys: impl DoubleEndedIterator<Item = &'a BlockKey>,
        hints: &Hints,
    ) {
        if hints.says_nothing() {
            return;
        }
        let last = keys.rev().find_map(|key| self.find_available(namespace, key));
        if let Some(last) = last {
            self.take_hints(session, &self.path_to(last), hints);
        }
    }

    /// Pins a path for as long as the engine asks and the limits allow.
    pub(super) fn retain(&mut self, session: SessionId, path: &[u32], hints: &Hints) {
        let (over, asked) = (hints.conversation.is_over(), hints.retain_ms);
        let Some(tenant) = self.tenant_of(session).filter(|_| over || asked.is_some()) else {
            return;
        };
        // What the conversation has retained so far ends at one of its blocks.
        let ends = path.iter().map(|index| self.table.reference(*index));
        let old: Vec<_> = ends.filter_map(|end| self.clients.retained.get(&end).copied()).collect();
        let limits = self.config.limits;
        let retain_ms = asked.filter(|_| !over).unwrap_or(0).min(limits.retain_ms_max);
        let room = self.clients.retained.len() < old.len() + limits.pins.div_ceil(2);
        if let Some(last) = path.last().filter(|_| retain_ms > 0)
            && path.len() <= RETAINED_MAX
            && room
            && self.clients.pins.len() < limits.pins
            && self.may_retain(path)
        {
            let end = self.table.reference(*last);
            let blocks: Vec<BlockRef> = path.iter().map(|index| self.pin(*index)).collect();
            let held = old.iter().filter_map(|pin| self.clients.pins.get(pin));
            let until = held.map(|pin| pin.expires).max();
            let expires = self.now.plus_ms(retain_ms).max(until.unwrap_or_default());
            let pin = self.clients.add_pin(tenant, expires, blocks);
            // One that ends at the same block must not be taken for the new one.
            for pin in old {
                self.end_pin(pin);
            }
            self.clients.set_retained(end, pin);
        } else if over || asked == Some(0) {
            for pin in old {
                self.end_pin(pin);
            }
        }
    }

    fn may_retain(&self, path: &[u32]) -> bool {
        let blocks = path.iter().map(|index| self.table.get(*index));
        let new = blocks.filter(|block| block.pins == 0).map(|block| u64::from(block.raw_bytes));
        self.counters.pinned_bytes + new.sum::<u64>() <= self.pinned_bytes_max() / 2
    }

    /// The path that ends with this block, root first, as far as it can be loaded.
    pub(super) fn path_to(&self, last: u32) -> Vec<u32> {
        let path = self.table.ancestors(last).take(RETAINED_MAX);
        let mut path: Vec<u32> = path.collect();
        path.reverse();
        let there = path.iter().take_while(|index| self.is_available(**index)).count();
        path.truncate(there);
        path
    }

    /// A conversation is over: the blocks at its end that no other path goes through, that nobody
    /// holds and that nothing is done with leave all tiers. Returns how many.
    pub(super) fn drop_tail(&mut self, found: &[u32]) -> u64 {
        let mut dropped = 0;
        for index in found.iter().rev() {
            let Some(block) = self.table.live(*index) else {
                continue;
            };
            let used = block.pins > 0 || block.is_filling() || block.is_queued();
            if used || block.is_reinserted() || self.table.has_children(*index) {
                break;
            }
            self.drop_copies(*index, false);
            dropped += 1;
        }
        dropped
    }

    /// Whether a touch with these hints makes blocks more recent.
    pub(super) fn touches(&self, hints: &Hints) -> bool {
        // Where nothing is learned, whatever is touched stays longest.
        !hints.conversation.is_over() || self.reuse.is_wanted()
    }
}
