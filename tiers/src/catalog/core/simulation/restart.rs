//! The end of a daemon, clean or not, and what the next one takes over.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::clients::Clients;
use super::edge::Job;
use super::media::{Entry, Media, Payload, Slot};
use super::scenario::Id;
use super::world::World;
use crate::block::{BlockKey, Descriptor, NamespaceId};
use crate::catalog::{AdoptedSlab, Catalog, SessionId, SlotId};

impl World {
    pub(super) fn restart(&mut self) {
        let clean = self.dice.percent(50);
        if clean {
            self.end_cleanly();
        }
        self.lose_what_was_under_way(clean);
        self.counts.restarts += 1;
        self.epoch += 1;
        self.started = self.now;
        (self.nvme_gone, self.nvme_off, self.commit_failed) = (false, false, false);
        self.lost.clear();
        self.media.device.clear();
        let number = self.clients.number();
        self.clients = Clients::starting_at(number);
        let quarantined = self.quarantined.iter().copied().collect();
        self.catalog = Catalog::new(self.scenario.config(self.epoch, quarantined));
        self.log.line(|| format!("restart, clean: {clean}"));
        self.values.clear();
        if self.scenario.geometry.is_some() {
            self.recover();
        }
        if self.dice.percent(70) {
            self.adopt();
        } else {
            self.media.host.clear();
            self.media.slabs.clear();
        }
        self.follow();
        self.open_namespaces();
        self.audit();
    }

    /// Sessions end, and so does all that is under way; descriptors are committed.
    fn end_cleanly(&mut self) {
        let sessions: Vec<SessionId> = self.clients.sessions.keys().copied().collect();
        for session in sessions {
            self.close_session(session);
        }
        for _ in 0..self.pending.len() * 4 {
            self.complete_one();
        }
        if !self.nvme_gone && !self.commit_failed {
            let segments: Vec<u32> = self.media.segments.keys().copied().collect();
            segments.into_iter().for_each(|segment| self.media.commit(segment, true));
        }
    }

    fn lose_what_was_under_way(&mut self, clean: bool) {
        let pending = std::mem::take(&mut self.pending);
        let mut excused = BTreeSet::new();
        for one in pending {
            let carried_out = self.dice.percent(50);
            match one.job {
                // It ended, with the slot's descriptor in place, and nobody heard of it.
                Job::Gather { .. } | Job::Demote { .. } | Job::Read { .. } if carried_out => {
                    drop(self.finish(one, None));
                }
                Job::Open { segment, sequence } if carried_out => {
                    self.media.write_header(segment, sequence);
                }
                Job::Void { segment } if carried_out => self.media.write_header(segment, 0),
                Job::Void { segment } | Job::Open { segment, .. } => self.excuse_segment(segment),
                Job::Erase { segment, sequence, index } => {
                    if carried_out {
                        self.media.erase(segment, sequence, index);
                    } else {
                        self.excuse_segment(segment);
                    }
                }
                Job::Retire { namespace } => drop(excused.insert(namespace)),
                _ => {}
            }
        }
        self.just_read = None;
        self.stuck.clear();
        self.refused.clear();
        excused.into_iter().for_each(|namespace| self.media.excuse(namespace));
        self.media.encoded.clear();
        for slot in self.media.host.values_mut() {
            let held = slot.held.take();
            *slot = Slot { held, ..Slot::default() };
        }
        let dice = &mut self.dice;
        for segment in self.media.segments.values_mut() {
            segment.payloads.retain(|_, payload| clean || payload.committed || dice.percent(50));
            let header = segment.header;
            segment.payloads.retain(|(life, _), _| *life == header);
            segment.settle();
        }
    }

    fn is_alive(&self, descriptor: &Descriptor) -> bool {
        self.generations.get(&descriptor.namespace) == Some(&descriptor.generation)
    }

    /// As a store is recovered: segments by their sequences, each block once, the newest of it.
    fn recover(&mut self) {
        let alive = |(number, segment): (&u32, &super::media::FakeSegment)| {
            let in_use = segment.header > 0 && !self.quarantined.contains(number);
            in_use.then_some((segment.header, *number))
        };
        let mut order: Vec<(u64, u32)> = self.media.segments.iter().filter_map(alive).collect();
        order.sort_unstable();
        let mut newest: BTreeMap<(NamespaceId, BlockKey), (u64, usize, u32)> = BTreeMap::new();
        let mut found: Vec<Vec<Payload>> = Vec::new();
        for (at, (_, number)) in order.iter().enumerate() {
            let payloads = self.media.segments.get(number).map(|segment| &segment.payloads);
            let payloads = payloads.into_iter().flat_map(BTreeMap::values);
            let mut payloads: Vec<Payload> =
                payloads.filter(|payload| self.is_alive(&payload.descriptor)).cloned().collect();
            payloads.sort_by_key(|payload| payload.index);
            for payload in &payloads {
                let there = &payload.descriptor;
                let this = (there.sequence, at, payload.index);
                let best = newest.entry((there.namespace, there.key)).or_insert(this);
                *best = this.max(*best);
            }
            found.push(payloads);
        }
        for (at, ((sequence, number), payloads)) in order.iter().zip(&found).enumerate() {
            let mut descriptors = Vec::new();
            for payload in payloads {
                let there = &payload.descriptor;
                let best = newest.get(&(there.namespace, there.key)).copied();
                if best == Some((there.sequence, at, payload.index)) {
                    descriptors.push((payload.index, there.clone()));
                    self.came_back(payload.block, payload.forgotten, there);
                }
            }
            self.catalog.recover(*number, *sequence, &descriptors);
        }
    }

    fn came_back(&mut self, block: Id, forgotten: bool, descriptor: &Descriptor) {
        self.values.insert(block, super::scenario::tag_of(&descriptor.raw_sum));
        if forgotten {
            self.complain(format!("{block:?} was forgotten and came back: {descriptor:?}"));
        }
    }

    /// The host RAM of the daemon before, as far as its descriptors are whole.
    fn adopt(&mut self) {
        let mut slabs: BTreeMap<u32, AdoptedSlab> = BTreeMap::new();
        for (slot, state) in &self.media.host {
            let whole = state.held.as_ref().filter(|held| held.entry == Entry::Whole);
            let Some(held) = whole.filter(|held| self.is_alive(&held.descriptor)) else {
                continue;
            };
            if self.dice.percent(3) {
                // Its descriptor is torn.
                continue;
            }
            let slab = (slot.offset() / u64::from(self.media.slab_bytes)) as u32;
            let slot_bytes = self.media.slabs.get(&slab).copied().unwrap_or(0);
            let found = AdoptedSlab { slab, slot_bytes, blocks: Vec::new() };
            let found = slabs.entry(slab).or_insert(found);
            found.blocks.push((*slot, held.descriptor.clone()));
        }
        let slabs: Vec<AdoptedSlab> = slabs.into_values().collect();
        let taken: BTreeSet<SlotId> = self.catalog.adopt(&slabs).into_iter().collect();
        let media = std::mem::take(&mut self.media.host);
        let (kept, left): (BTreeMap<_, _>, BTreeMap<_, _>) =
            media.into_iter().partition(|(slot, _)| taken.contains(slot));
        drop(left);
        for (slot, state) in &kept {
            if let Some(held) = &state.held {
                if held.disowned {
                    self.complain(format!("{slot:?} was disowned, and is taken over: {held:?}"));
                }
                let (block, forgotten) = (held.block, held.forgotten);
                let descriptor = held.descriptor.clone();
                self.came_back(block, forgotten, &descriptor);
            }
        }
        if kept.len() != taken.len() {
            self.complain(format!("{} slots of {} were adopted", taken.len(), kept.len()));
        }
        self.media.host = kept;
        self.media.keep_cut_slabs();
    }
}

impl Media {
    /// Slabs without a slot in use are cut anew before they are used.
    fn keep_cut_slabs(&mut self) {
        let bytes = u64::from(self.slab_bytes);
        let used: BTreeSet<u64> = self.host.keys().map(|slot| slot.offset() / bytes).collect();
        self.slabs.retain(|slab, _| used.contains(&u64::from(*slab)));
    }
}

impl Clients {
    fn starting_at(next: u64) -> Clients {
        Clients { next, bad: VecDeque::new(), ..Clients::default() }
    }
}
