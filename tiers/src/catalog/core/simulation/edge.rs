//! Carries actions out: late, in any order, and sometimes not.
//!
//! An operation uses its places from its action to its completion. Operations on one segment keep
//! their order behind its header, as those of a drive's worker do.

use super::clients::Place;
use super::dice::mix;
use super::media::{Held, Payload};
use super::scenario::{Id, encoded, sum_of};
use super::world::World;
use crate::block::{Codec, Descriptor, NamespaceId, Sum128};
use crate::catalog::{
    Action, CodecTrial, Event, GpuId, OpError, OpId, RegionId, Residency, SlotId, SlotPlace, Tier,
};

/// What is under way.
#[derive(Clone, Debug)]
pub(super) enum Job {
    Gather { to: SlotPlace, region: RegionId, place: u32, descriptor: Descriptor },
    Compare { region: RegionId, place: u32 },
    Scatter(Scatter),
    Demote { from: SlotPlace, to: SlotId, descriptor: Descriptor },
    Read { to: SlotId, descriptor: Descriptor },
    Encode { from: SlotId, raw_bytes: u32, trial: bool },
    Write { from: Option<SlotId>, index: u32, descriptor: Descriptor },
    Open { segment: u32, sequence: u64 },
    Void { segment: u32 },
    Erase { segment: u32, sequence: u64, index: u32 },
    Retire { namespace: NamespaceId },
    Sync,
}

#[derive(Clone, Debug)]
pub(super) struct Scatter {
    from: SlotPlace,
    through: Option<SlotPlace>,
    raw_sum: Sum128,
    verified: bool,
    region: RegionId,
    place: u32,
}

/// One operation.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) op: OpId,
    pub(super) job: Job,
    /// The block, where it is about one.
    pub(super) block: Option<Id>,
    /// The GPU that carries it out.
    pub(super) gpu: Option<GpuId>,
    /// The block was forgotten meanwhile.
    pub(super) forgotten: bool,
}

impl Pending {
    /// The segment behind whose header it waits, or that it changes.
    fn segment(&self) -> Option<u32> {
        match &self.job {
            Job::Write { descriptor, .. } => Some(descriptor.segment),
            Job::Open { segment, .. } | Job::Void { segment } | Job::Erase { segment, .. } => {
                Some(*segment)
            }
            _ => None,
        }
    }

    fn is_header(&self) -> bool {
        matches!(self.job, Job::Open { .. } | Job::Void { .. })
    }
}

impl Job {
    /// The slot that it copies from, and the checksum that it was told, if any.
    fn copies_from(&self) -> Option<(SlotPlace, Option<Sum128>)> {
        match self {
            Job::Scatter(scatter) => Some((scatter.from, Some(scatter.raw_sum))),
            Job::Demote { from, descriptor, .. } => Some((*from, Some(descriptor.raw_sum))),
            Job::Encode { from, .. } => Some((SlotPlace::Host(*from), None)),
            Job::Write { from: Some(from), descriptor, .. } => {
                Some((SlotPlace::Host(*from), Some(descriptor.raw_sum)))
            }
            _ => None,
        }
    }
}

/// As it lies in a slot: whole, and nowhere else.
fn in_slot(descriptor: &Descriptor, tag: u64) -> Descriptor {
    Descriptor {
        codec: Codec::Raw,
        stored_bytes: descriptor.raw_bytes,
        raw_sum: sum_of(tag),
        stored_sum: sum_of(tag),
        segment: 0,
        segment_sequence: 0,
        offset: 0,
        ..descriptor.clone()
    }
}

impl World {
    pub(super) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Answer { ask, reply } => self.answered(ask, reply),
            Action::EndTicket { session, ticket, outcomes } => {
                self.ticket_ended(session, ticket, outcomes);
            }
            Action::BindSlab { slab, slot_bytes } => {
                let result = self.media.bind(slab, slot_bytes);
                self.expect(result);
            }
            Action::ClearSlot { slot } => {
                let result = self.media.clear(slot);
                self.expect(result);
            }
            Action::DisownSlot { slot } => {
                let result = self.media.disown(slot);
                self.expect(result);
            }
            Action::SealSegment { segment } => self.media.seal(segment),
            Action::QuarantineSegment { segment } => {
                self.quarantined.insert(segment);
            }
            Action::DropEncoded { op } => {
                if self.media.encoded.remove(&op.0).is_none() {
                    self.complain(format!("{op:?} has no encoded bytes to be dropped"));
                }
            }
            Action::Degraded { .. } => {}
            Action::TierOffline { tier, .. } => self.tier_off(tier),
            Action::Residency { changes, whole } => {
                changes.iter().for_each(|change| self.resides(change));
                self.residents_cut |= !whole;
            }
            Action::OpenSegment { segment, sequence } => {
                let result = self.media.begin_life(segment, sequence);
                self.expect(result);
                self.start(OpId(0), Job::Open { segment, sequence }, None, None);
            }
            Action::VoidSegment { segment } => {
                let result = self.media.begin_life(segment, 0);
                self.expect(result);
                self.start(OpId(0), Job::Void { segment }, None, None);
            }
            Action::EraseDescriptor { segment, sequence, index } => {
                self.start(OpId(0), Job::Erase { segment, sequence, index }, None, None);
            }
            Action::RetireNamespace { namespace } => {
                self.start(OpId(0), Job::Retire { namespace }, None, None);
            }
            Action::Sync { op } => self.start(op, Job::Sync, None, None),
            other => self.begin_copy(other),
        }
    }

    /// Those who follow are told of a change.
    fn resides(&mut self, change: &Residency) {
        let Some(block) = Id::of(change.namespace, &change.key) else {
            return self.complain(format!("nobody stored what is told: {change:?}"));
        };
        let here = (block, change.tier);
        let known = match change.there {
            true => self.residents.insert(here),
            false => self.residents.remove(&here),
        };
        if !known {
            self.complain(format!("it was so before: {change:?}"));
        }
    }

    pub(super) fn tier_off(&mut self, tier: Tier) {
        self.nvme_off |= tier == Tier::Nvme;
        // What was only there is lost.
        let promised: Vec<Id> = self.clients.promised.keys().copied().collect();
        for block in promised {
            if !self.media.stays_in_host(block) {
                self.clients.excuse(block);
            }
        }
    }

    fn begin_copy(&mut self, action: Action) {
        match action {
            Action::Gather { op, region, place, to, descriptor, .. } => {
                let result = self.media.begin_fill(to, descriptor.raw_bytes);
                self.expect(result);
                let block = self.block_of(&descriptor);
                let job = Job::Gather { to, region, place, descriptor: *descriptor };
                self.start(op, job, block, self.gpu_of(region));
            }
            Action::Compare { op, region, place, .. } => {
                self.start(op, Job::Compare { region, place }, None, self.gpu_of(region));
            }
            Action::Scatter {
                op,
                from,
                through,
                verified,
                namespace,
                key,
                raw_sum,
                region,
                place,
                raw_bytes,
                ..
            } => {
                let gpu = self.gpu_of(region);
                let Some(block) = Id::of(namespace, &key) else {
                    return self.complain(format!("{key:?} was never stored"));
                };
                let result = self.media.begin_read(from, block);
                self.expect(result);
                let right = self.values.get(&block).map(|tag| sum_of(*tag));
                if right != Some(raw_sum) {
                    self.complain(format!("{block:?} is loaded as {raw_sum:?}, not {right:?}"));
                }
                if verified && self.just_read != Some(from) {
                    self.complain(format!("{from:?} was not just read, so not verified"));
                }
                let through = through.zip(gpu).map(|(slot, gpu)| SlotPlace::Device(gpu, slot));
                if let Some(place) = through {
                    let result = self.media.begin_fill(place, raw_bytes);
                    self.expect(result);
                }
                let job = Scatter { from, through, raw_sum, verified, region, place };
                self.start(op, Job::Scatter(job), Some(block), gpu);
            }
            Action::Demote { op, gpu, from, to, descriptor } => {
                let from = SlotPlace::Device(gpu, from);
                let block = self.block_of(&descriptor);
                let result = self.media.begin_fill(SlotPlace::Host(to), descriptor.raw_bytes);
                self.expect(result);
                if let Some(block) = block {
                    let result = self.media.begin_read(from, block);
                    self.expect(result);
                }
                let job = Job::Demote { from, to, descriptor: *descriptor };
                self.start(op, job, block, Some(gpu));
            }
            other => self.begin_nvme(other),
        }
    }

    fn begin_nvme(&mut self, action: Action) {
        let Some(geometry) = self.scenario.geometry else {
            return self.complain(format!("there is no drive for {action:?}"));
        };
        match action {
            Action::Read { op, slot, descriptor, .. } => {
                let place = SlotPlace::Host(slot);
                let result = self.media.begin_fill(place, descriptor.raw_bytes);
                self.expect(result);
                let block = self.block_of(&descriptor);
                if let Some(block) = block {
                    let result = self.media.begin_load(&descriptor, block);
                    self.expect(result);
                }
                self.start(op, Job::Read { to: slot, descriptor: *descriptor }, block, None);
            }
            Action::Encode { op, slot, raw_bytes, trial, .. } => {
                let held = self.media.slot(SlotPlace::Host(slot)).held.as_ref();
                let block = held.map(|held| held.block);
                match block {
                    Some(block) => {
                        let result = self.media.begin_read(SlotPlace::Host(slot), block);
                        self.expect(result);
                    }
                    None => self.complain(format!("{slot:?} is encoded and holds nothing")),
                }
                self.start(op, Job::Encode { from: slot, raw_bytes, trial }, block, None);
            }
            Action::Write { op, slot, index, descriptor } => {
                let block = self.block_of(&descriptor);
                let result = self.media.begin_write(&geometry, index, &descriptor);
                self.expect(result);
                if let (Some(slot), Some(block)) = (slot, block) {
                    let result = self.media.begin_read(SlotPlace::Host(slot), block);
                    self.expect(result);
                }
                let job = Job::Write { from: slot, index, descriptor: *descriptor };
                self.start(op, job, block, None);
            }
            other => self.complain(format!("nobody knows how to carry out {other:?}")),
        }
    }

    fn block_of(&mut self, descriptor: &Descriptor) -> Option<Id> {
        let block = Id::of(descriptor.namespace, &descriptor.key);
        if block.is_none_or(|block| block.parent_key() != descriptor.parent) {
            self.complain(format!("no such block was stored: {descriptor:?}"));
        }
        block
    }

    fn gpu_of(&self, region: RegionId) -> Option<GpuId> {
        self.clients.regions.get(&region).and_then(|region| region.gpu)
    }

    fn start(&mut self, op: OpId, job: Job, block: Option<Id>, gpu: Option<GpuId>) {
        if op.0 > 0 && self.pending.iter().any(|other| other.op == op) {
            self.complain(format!("{op:?} begins and is under way"));
        }
        let pending = Pending { op, job, block, gpu, forgotten: false };
        if gpu.is_some_and(|gpu| self.lost.contains(&gpu)) {
            let event = self.finish(pending, Some(OpError::DeviceGone));
            return self.refused.extend(event);
        }
        self.pending.push(pending);
    }

    /// One operation ends.
    pub(super) fn complete_one(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let at = self.dice.index(self.pending.len());
        let segment = self.pending.get(at).and_then(Pending::segment);
        let before = self.pending.iter().take(at);
        let first =
            before.clone().position(|other| other.is_header() && other.segment() == segment);
        // Nothing is erased before it is written.
        let at = first.filter(|_| segment.is_some()).unwrap_or(at);
        let pending = self.pending.remove(at);
        let fault = self.fault_of(&pending);
        let event = self.finish(pending, fault);
        if let Some(event) = event {
            self.apply(event);
        }
        self.just_read = None;
    }

    fn fault_of(&mut self, pending: &Pending) -> Option<OpError> {
        let faults = self.scenario.faults;
        let (rate, errors): (u64, &[OpError]) = match &pending.job {
            Job::Gather { .. } | Job::Compare { .. } => {
                (faults.copies, &[OpError::Region, OpError::Device])
            }
            Job::Scatter(_) | Job::Demote { .. } => {
                (faults.copies, &[OpError::Region, OpError::Device, OpError::Checksum])
            }
            Job::Read { .. } => (faults.reads, &[OpError::Device, OpError::Checksum]),
            Job::Write { .. } => (faults.writes, &[OpError::Device]),
            Job::Open { .. } | Job::Erase { .. } | Job::Retire { .. } | Job::Sync => {
                (faults.control, &[OpError::Device])
            }
            Job::Encode { .. } | Job::Void { .. } => (0, &[]),
        };
        let on_nvme = pending.segment().is_some() || matches!(pending.job, Job::Read { .. });
        if on_nvme && self.nvme_gone {
            return Some(OpError::DeviceGone);
        }
        if self.calm || !self.dice.percent(rate) {
            return None;
        }
        self.dice.pick(errors)
    }

    /// What an operation came to. Its places are free for others now.
    pub(super) fn finish(&mut self, pending: Pending, fault: Option<OpError>) -> Option<Event> {
        let Pending { op, job, block, forgotten, .. } = pending;
        if let (Some(block), Some(_)) = (block, fault)
            && !matches!(job, Job::Write { .. } | Job::Encode { .. })
        {
            self.clients.excuse(block);
        }
        if let (Some(block), Some((from, sum))) = (block, job.copies_from()) {
            let result = self.media.check_slot(from, block, sum);
            self.expect(result);
        }
        match job {
            Job::Gather { to, region, place, descriptor } => {
                let result = self.gather(region, place, fault);
                let held = result.ok().zip(block).map(|(tag, block)| {
                    Held::new(block, tag, in_slot(&descriptor, tag), forgotten)
                });
                self.media.end_fill(to, held.clone());
                if let Some(held) = held.filter(|_| !forgotten) {
                    self.values.insert(held.block, held.tag);
                } else if let Some(block) = block {
                    self.clients.excuse(block);
                }
                Some(Event::Gathered { op, result: result.map(sum_of) })
            }
            Job::Compare { region, place } => {
                let result = self.gather(region, place, fault);
                if let Ok(tag) = result {
                    self.note_compared(region, place, tag);
                }
                Some(Event::Compared { op, result: result.map(sum_of) })
            }
            Job::Scatter(scatter) => {
                let result = self.scatter(&scatter, block, fault);
                Some(Event::Scattered { op, result })
            }
            Job::Demote { from, to, descriptor } => {
                let held = self.media.end_read(from);
                let good = held.filter(|held| sum_of(held.tag) == descriptor.raw_sum);
                let result = match (fault, &good) {
                    (Some(error), _) => Err(error),
                    (None, None) => Err(OpError::Checksum),
                    (None, Some(_)) => Ok(()),
                };
                let good = good.filter(|_| result.is_ok());
                if let (Err(_), Some(block)) = (result, block) {
                    self.clients.excuse(block);
                }
                let held = good.map(|held| {
                    Held::new(held.block, held.tag, in_slot(&descriptor, held.tag), forgotten)
                });
                self.media.end_fill(SlotPlace::Host(to), held);
                Some(Event::Demoted { op, result })
            }
            other => self.finish_nvme(op, other, block, forgotten, fault),
        }
    }

    /// Notes for the end of the ticket whether a place has the bytes that the cache has.
    fn note_compared(&mut self, region: RegionId, place: u32, tag: u64) {
        let tickets = self.clients.tickets.values();
        let mut parts = tickets.filter(|it| it.region == Some(region)).flat_map(|it| &it.parts);
        let block = parts.find(|part| part.place == place).map(|part| part.block);
        let same = block.and_then(|block| self.values.get(&block)).map(|right| *right == tag);
        if let Some(place) = self.clients.place(region, place) {
            place.same = same;
        }
    }

    fn gather(&self, region: RegionId, place: u32, fault: Option<OpError>) -> Result<u64, OpError> {
        let region = self.clients.regions.get(&region).ok_or(OpError::Region)?;
        let place = region.places.get(place as usize).ok_or(OpError::Region)?;
        fault.map_or(Ok(place.tag), Err)
    }

    fn scatter(
        &mut self,
        job: &Scatter,
        block: Option<Id>,
        fault: Option<OpError>,
    ) -> Result<(), OpError> {
        let held = self.media.end_read(job.from);
        let place = self.clients.place(job.region, job.place);
        let result = match (fault, &held, place) {
            (Some(error), ..) => Err(error),
            (None, Some(held), _) if sum_of(held.tag) != job.raw_sum && !job.verified => {
                Err(OpError::Checksum)
            }
            (None, Some(held), Some(place)) => {
                let (tag, loaded) = (held.tag, Some(held.block));
                *place = Place { tag, loaded, same: None, ..*place };
                Ok(())
            }
            _ => Err(OpError::Region),
        };
        if let Some(through) = job.through {
            self.media.end_fill(through, held.filter(|_| result.is_ok()));
        }
        if let (Err(OpError::Checksum), Some(block)) = (result, block) {
            self.clients.excuse(block);
        }
        result
    }

    fn finish_nvme(
        &mut self,
        op: OpId,
        job: Job,
        block: Option<Id>,
        forgotten: bool,
        fault: Option<OpError>,
    ) -> Option<Event> {
        let done = fault.map_or(Ok(()), Err);
        match job {
            Job::Read { to, descriptor } => {
                let found = self.media.segment(descriptor.segment);
                found.readers = found.readers.saturating_sub(1);
                let tag = self.media.load(&descriptor);
                let result = done.and_then(|()| tag.ok_or(OpError::Checksum));
                if let (Err(_), Some(block)) = (result, block) {
                    self.clients.excuse(block);
                }
                let held = result.ok().zip(block).map(|(tag, block)| {
                    Held::new(block, tag, in_slot(&descriptor, tag), forgotten)
                });
                self.media.end_fill(SlotPlace::Host(to), held);
                self.just_read = result.is_ok().then_some(SlotPlace::Host(to));
                Some(Event::Read { op, result: result.map(drop) })
            }
            Job::Encode { from, raw_bytes, trial } => Some(self.encode(op, from, raw_bytes, trial)),
            Job::Write { from, index, descriptor } => {
                let result = self.write(op, from, index, descriptor, block, forgotten, done);
                Some(Event::Written { op, result })
            }
            Job::Open { segment, sequence } => {
                if done.is_ok() {
                    self.media.write_header(segment, sequence);
                }
                Some(Event::SegmentOpened { segment, result: done })
            }
            Job::Void { segment } => {
                match done {
                    Ok(()) => self.media.write_header(segment, 0),
                    // Only the log hears of it.
                    Err(_) => self.excuse_segment(segment),
                }
                None
            }
            Job::Erase { segment, sequence, index } => {
                if done.is_ok() {
                    self.media.erase(segment, sequence, index);
                }
                Some(Event::Erased { segment, sequence, index, result: done })
            }
            Job::Retire { namespace } => {
                let generation = done.ok().map(|()| self.raise_generation(namespace));
                if generation.is_none() {
                    self.media.excuse(namespace);
                }
                Some(Event::NamespaceRetired { namespace, generation })
            }
            Job::Sync => Some(Event::Synced { op, result: done }),
            _ => None,
        }
    }

    fn encode(&mut self, op: OpId, from: SlotId, raw_bytes: u32, trial: bool) -> Event {
        let held = self.media.end_read(SlotPlace::Host(from));
        let shrinks = self.dice.percent(70);
        let bytes = held.filter(|_| shrinks).map(|held| encoded(held.tag));
        let stored_bytes = raw_bytes / 4 * 3;
        let result = bytes.map(|tag| (stored_bytes, sum_of(tag)));
        if let Some(tag) = bytes {
            self.media.encoded.insert(op.0, tag);
        }
        let stored_bytes = if result.is_some() { stored_bytes } else { raw_bytes };
        let trial = trial.then_some(CodecTrial { raw_bytes, stored_bytes, decode_us: 1 });
        Event::Encoded { op, result, trial }
    }

    pub(super) fn excuse_segment(&mut self, segment: u32) {
        let payloads = self.media.segment(segment).payloads.values_mut();
        payloads.for_each(|payload| payload.forgotten = false);
    }

    #[expect(clippy::too_many_arguments, reason = "they are the fields of one operation")]
    fn write(
        &mut self,
        op: OpId,
        from: Option<SlotId>,
        index: u32,
        descriptor: Descriptor,
        block: Option<Id>,
        forgotten: bool,
        done: Result<(), OpError>,
    ) -> Result<(), OpError> {
        let tag = match from {
            Some(slot) => self.media.end_read(SlotPlace::Host(slot)).map(|held| held.tag),
            None => self.media.encoded.remove(&op.0),
        };
        let (Some(tag), Some(block)) = (tag, block) else {
            self.complain(format!("{op:?} has no bytes to write"));
            self.media.end_write(&descriptor, None);
            return Err(OpError::Device);
        };
        let opened = self.media.segment(descriptor.segment).header == descriptor.segment_sequence;
        let result = if opened { done } else { done.and(Err(OpError::Device)) };
        let payload = Payload {
            block,
            index,
            tag,
            descriptor: descriptor.clone(),
            committed: false,
            forgotten,
        };
        self.media.end_write(&descriptor, result.is_ok().then_some(payload));
        result
    }

    /// A namespace gets a new generation: what has an older one is dead at the next start.
    pub(super) fn raise_generation(&mut self, namespace: NamespaceId) -> u32 {
        let generation = self.generations.entry(namespace).or_insert(1);
        *generation += 1;
        *generation
    }

    /// Some stored bytes change by themselves.
    pub(super) fn damage(&mut self) {
        let flip = mix(self.dice.next()) | 2;
        if self.dice.percent(50) {
            let idle = self.media.host.values_mut();
            let mut idle =
                idle.filter(|slot| slot.readers == 0).filter_map(|slot| slot.held.as_mut());
            let count = self.scenario.host_slabs;
            let Some(held) = idle.nth(self.dice.index(count as usize)) else { return };
            held.tag ^= flip;
            let block = held.block;
            return self.clients.excuse(block);
        }
        let segments = self.media.segments.values_mut();
        let mut all = segments.flat_map(|segment| segment.payloads.values_mut());
        let Some(payload) = all.nth(self.dice.index(16)) else { return };
        payload.tag ^= flip;
        let block = payload.block;
        self.clients.excuse(block);
    }
}
