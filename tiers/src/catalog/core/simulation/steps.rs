//! What clients, operators, time and bad luck do.

use std::collections::BTreeSet;

use super::clients::{Asked, Kind, Part, Place, Region, Ticket};
use super::dice::mix;
use super::edge::Job;
use super::media::Payload;
use super::scenario::Id;
use super::world::World;
use crate::block::{Descriptor, NamespaceId};
use crate::catalog::{
    Conversation, Event, Forget, Hints, InspectQuery, LoadBlock, OfflineReason, OpError,
    PrefixQuery, Priority, RegionId, Request, SessionId, StoreBlock, Tier,
};

/// Sessions at a time.
const SESSIONS_MAX: usize = 4;

/// Places of a region.
const PLACES: usize = 24;

/// Conversations that stores name.
const CONVERSATIONS: u64 = 4;

impl World {
    /// One step: something is asked or happens, and some of what is under way ends.
    pub(super) fn step(&mut self) {
        self.now += self.dice.between(1, 2_000);
        match self.dice.below(100) {
            0..=27 => self.store(),
            28..=39 => self.lookup(),
            40..=59 => self.load(),
            60..=65 => self.release(),
            66..=68 => self.touch(),
            69..=72 => self.prefetch(),
            73..=75 => self.pin(),
            76..=77 => self.forget(),
            78 => self.report_bad(),
            79..=81 => self.come_and_go(),
            82..=83 => self.misfortune(),
            84..=96 => self.tick(),
            97 => self.commit(),
            98 => self.drain_or_restart(),
            _ => self.operator_looks(),
        }
        let mut chance = self.scenario.completions;
        while self.dice.percent(chance.min(100)) {
            self.complete_one();
            chance = chance.saturating_sub(100);
        }
        if self.dice.percent(self.scenario.faults.damage) {
            self.damage();
        }
    }

    fn some_session(&mut self) -> SessionId {
        let all: Vec<SessionId> = self.clients.sessions.keys().copied().collect();
        match self.dice.pick(&all).filter(|_| all.len() >= 2 || self.dice.percent(90)) {
            Some(session) => session,
            None => self.connect(),
        }
    }

    fn connect(&mut self) -> SessionId {
        let session = SessionId(self.clients.number());
        let tenants: Vec<_> = self.scenario.namespaces.iter().map(|info| info.tenant).collect();
        let tenant = self.dice.pick(&tenants).unwrap_or_default();
        self.clients.sessions.insert(session, tenant);
        self.apply(Event::SessionOpened { session, tenant });
        self.open_region(session);
        session
    }

    fn open_region(&mut self, session: SessionId) {
        let region = RegionId(self.clients.number());
        let gpus = self.scenario.gpus();
        let gpu = if self.dice.percent(50) { self.dice.pick(&gpus) } else { None };
        let sizes = self.scenario.block_bytes.clone();
        let block_bytes = self.dice.pick(&sizes).unwrap_or(4096);
        let places = vec![Place::default(); PLACES];
        let model = Region { session, gpu, block_bytes, places };
        self.clients.regions.insert(region, model);
        let places = PLACES as u32;
        self.apply(Event::RegionOpened { session, region, places, block_bytes, gpu });
    }

    /// A namespace of the session's tenant, mostly.
    fn some_namespace(&mut self, session: SessionId) -> NamespaceId {
        let tenant = self.clients.sessions.get(&session).copied();
        let all = &self.scenario.namespaces;
        let own = all.iter().filter(|info| Some(info.tenant) == tenant).map(|info| info.id);
        let own: Vec<NamespaceId> = own.collect();
        self.dice.pick(&own).or_else(|| all.first().map(|info| info.id)).unwrap_or_default()
    }

    /// A region of the session with blocks of this size; rarely, if `odd`, with others.
    fn some_region(
        &mut self,
        session: SessionId,
        namespace: NamespaceId,
        odd: bool,
    ) -> Option<RegionId> {
        let own = self.clients.regions.iter().filter(|(_, region)| region.session == session);
        let bytes = self.scenario.bytes_of(namespace);
        let fits: Vec<RegionId> = own
            .clone()
            .filter(|(_, region)| region.block_bytes == bytes)
            .map(|(id, _)| *id)
            .collect();
        let all: Vec<RegionId> = own.map(|(id, _)| *id).collect();
        let odd = odd && self.dice.percent(3);
        self.dice.pick(if odd { &all } else { &fits })
    }

    fn free_places(&self, region: RegionId) -> Vec<u32> {
        let region = self.clients.regions.get(&region);
        let places = region.map(|region| region.places.as_slice()).unwrap_or_default();
        (0..).zip(places).filter(|(_, place)| !place.busy).map(|(at, _)| at).collect()
    }

    fn hints(&mut self) -> Hints {
        let states = [
            Conversation::Unknown,
            Conversation::Open,
            Conversation::WaitingForTool,
            Conversation::Finished,
        ];
        let worth = [Priority::Normal, Priority::Low, Priority::High];
        Hints {
            conversation: self.dice.pick(&states).unwrap_or_default(),
            returns_in_ms: self.dice.percent(20).then(|| self.dice.below(10_000) as u32),
            priority: self.dice.pick(&worth).unwrap_or_default(),
            retain_ms: (self.scenario.retains && self.dice.percent(10))
                .then(|| self.dice.below(10_000)),
        }
    }

    fn store(&mut self) {
        let session = self.some_session();
        let namespace = self.some_namespace(session);
        let Some(region) = self.some_region(session, namespace, false) else {
            return self.open_region(session);
        };
        let path = self.scenario.path(namespace, &mut self.dice);
        // Engines store what a lookup did not find, or simply all.
        let known = path.iter().take_while(|block| self.is_there(**block, false)).count();
        let from = if self.dice.percent(70) { known } else { 0 };
        let places = self.free_places(region);
        let (mut blocks, mut parts) = (Vec::new(), Vec::new());
        for (block, place) in path.iter().skip(from).zip(places) {
            let lies = self.dice.percent(2);
            let tag = if lies { mix(block.tag() ^ self.dice.next()) | 1 } else { block.tag() };
            if let Some(place) = self.clients.place(region, place) {
                place.tag = tag;
            }
            blocks.push(StoreBlock {
                key: block.key(),
                parent: block.parent_key(),
                position: block.position(),
                tokens: 16,
                place,
            });
            let bad = self.clients.bad.contains(block);
            parts.push(Part { bad, ..Part::new(*block, place) });
        }
        let (conversation, hints) = (self.dice.below(CONVERSATIONS), self.hints());
        let request =
            Request::Store { namespace, conversation, region, after_event: None, blocks, hints };
        let ticket = Ticket { session, region: Some(region), kind: Kind::Store, parts };
        self.ask(session, request, Asked::Ticket(ticket));
    }

    fn lookup(&mut self) {
        let session = self.some_session();
        let namespace = self.some_namespace(session);
        let path = self.scenario.path(namespace, &mut self.dice);
        let mut prefixes = vec![path];
        let other = self.some_namespace(session);
        if other != namespace && self.dice.percent(20) {
            // Another rank of the same model: as many keys.
            let rank = |block: &Id| block.of_rank(other);
            prefixes.extend(prefixes.first().map(|path| path.iter().map(rank).collect()));
        }
        let lease_ms = match self.dice.percent(70) {
            true => self.dice.between(1, 2 * u64::from(self.scenario.limits.lease_ms_max)) as u32,
            false => 0,
        };
        let query = |path: &Vec<Id>| PrefixQuery {
            namespace: path.first().map_or(namespace, |block| block.namespace),
            keys: path.iter().map(|block| block.key()).collect(),
        };
        let hints = self.hints();
        let request =
            Request::Lookup { prefixes: prefixes.iter().map(query).collect(), lease_ms, hints };
        self.ask(session, request, Asked::Lookup { session, prefixes, lease_ms });
    }

    fn load(&mut self) {
        let leases: Vec<_> =
            self.clients.leases.iter().map(|(id, hold)| (*id, hold.session)).collect();
        let Some((lease, session)) = self.dice.pick(&leases) else { return self.lookup() };
        let Some(hold) = self.clients.leases.get(&lease).cloned() else { return };
        let namespace = hold.blocks.first().map_or(NamespaceId(1), |block| block.namespace);
        let Some(region) = self.some_region(session, namespace, true) else { return };
        let mut wanted: Vec<Id> =
            hold.blocks.iter().filter(|block| block.namespace == namespace).copied().collect();
        if self.dice.percent(5) {
            wanted.extend(self.scenario.path(namespace, &mut self.dice));
        }
        let places = self.free_places(region);
        let pairs: Vec<(Id, u32)> = wanted.into_iter().zip(places).collect();
        let block = |(block, place): &(Id, u32)| LoadBlock { key: block.key(), place: *place };
        let blocks = pairs.iter().map(block).collect();
        let part = |(block, place): &(Id, u32)| {
            let excused = !self.clients.is_promised(*block);
            Part { excused, ..Part::new(*block, *place) }
        };
        let parts = pairs.iter().map(part).collect();
        let (after_event, hints) = (None, self.hints());
        let request = Request::Load { lease, namespace, region, after_event, blocks, hints };
        let kind = Kind::Load(lease);
        let ticket = Ticket { session, region: Some(region), kind, parts };
        self.ask(session, request, Asked::Ticket(ticket));
    }

    fn release(&mut self) {
        let leases: Vec<_> =
            self.clients.leases.iter().map(|(id, hold)| (*id, hold.session)).collect();
        let Some((lease, session)) = self.dice.pick(&leases) else { return };
        self.clients.end_lease(lease);
        self.ask(session, Request::Release { lease }, Asked::Count(Some(1)));
    }

    fn some_prefix(&mut self, session: SessionId) -> (Vec<Id>, PrefixQuery) {
        let namespace = self.some_namespace(session);
        let path = self.scenario.path(namespace, &mut self.dice);
        let keys = path.iter().map(|block| block.key()).collect();
        (path, PrefixQuery { namespace, keys })
    }

    fn touch(&mut self) {
        let session = self.some_session();
        let (_, prefix) = self.some_prefix(session);
        let hints = self.hints();
        self.ask(session, Request::Touch { prefix, hints }, Asked::Count(None));
    }

    fn prefetch(&mut self) {
        let session = self.some_session();
        let (path, prefix) = self.some_prefix(session);
        let parts = path.iter().map(|block| Part::new(*block, 0)).collect();
        let ticket = Ticket { session, region: None, kind: Kind::Prefetch, parts };
        let hints = self.hints();
        self.ask(session, Request::Prefetch { prefix, hints }, Asked::Ticket(ticket));
    }

    fn pin(&mut self) {
        let session = self.some_session();
        let pins: Vec<_> = self.clients.pins.iter().map(|(id, hold)| (*id, hold.tenant)).collect();
        if let Some((pin, tenant)) = self.dice.pick(&pins).filter(|_| self.dice.percent(40)) {
            if self.clients.sessions.get(&session) == Some(&tenant) {
                self.clients.end_pin(pin);
            }
            return self.ask(session, Request::Unpin { pin }, Asked::Count(None));
        }
        let (blocks, prefix) = self.some_prefix(session);
        let ttl_ms = self.dice.below(2 * self.scenario.limits.pin_ms_max);
        let about = Asked::Pin { session, blocks, ttl_ms };
        self.ask(session, Request::Pin { prefix, ttl_ms }, about);
    }

    fn forget(&mut self) {
        let session = self.some_session();
        let (path, prefix) = self.some_prefix(session);
        let namespace = prefix.namespace;
        let what = match self.dice.below(10) {
            0..=5 => {
                let root = self.dice.pick(&path).unwrap_or(Id::new(namespace, 0, 0));
                let linked = self.linked_to(root);
                self.note_forgotten(|block, _| linked.contains(&block));
                Forget::Keys { namespace, keys: vec![root.key()] }
            }
            6..=8 => {
                let conversation = self.dice.below(CONVERSATIONS);
                self.note_forgotten(|block, descriptor| {
                    block.namespace == namespace && descriptor.session == conversation
                });
                Forget::Conversation { namespace, conversation }
            }
            _ => return self.forget_namespace(namespace),
        };
        self.ask(session, Request::Forget(what), Asked::Count(None));
    }

    /// The blocks that come after one, as far as the catalog can know: those whose parents were all
    /// stored or named since the last start.
    fn linked_to(&self, root: Id) -> BTreeSet<Id> {
        let link = |block: &Id| {
            let row = self.catalog.row_of(block.namespace, &block.key())?;
            (row.parent == block.parent_key()).then(|| block.parent()).flatten()
        };
        let is_linked = |block: &Id| {
            self.catalog.row_of(block.namespace, &block.key()).is_some()
                && std::iter::successors(Some(*block), link).any(|at| at == root)
        };
        self.scenario
            .all()
            .filter(|block| block.namespace == root.namespace)
            .filter(is_linked)
            .collect()
    }

    /// As an operator has it done: the new generation is durable first.
    pub(super) fn forget_namespace(&mut self, namespace: NamespaceId) {
        let session = self.some_session();
        self.note_forgotten(|block, _| block.namespace == namespace);
        self.raise_generation(namespace);
        self.open_namespaces();
        let request = Request::Forget(Forget::Namespace { namespace });
        self.ask(session, request, Asked::Count(None));
    }

    /// These blocks may be lost from now on, and must not come back at a restart.
    fn note_forgotten(&mut self, chosen: impl Fn(Id, &Descriptor) -> bool) {
        let catalog = &self.catalog;
        let known = |payload: &Payload| {
            let (block, there) = (payload.block, &payload.descriptor);
            let row = catalog.row_of(block.namespace, &block.key());
            let at = row.and_then(|row| row.nvme).map(|(segment, life, _)| (segment, life));
            at == Some((there.segment, there.segment_sequence))
        };
        self.media.mark_forgotten(&chosen, known);
        for one in &mut self.pending {
            let descriptor = match &one.job {
                Job::Gather { descriptor, .. }
                | Job::Demote { descriptor, .. }
                | Job::Read { descriptor, .. }
                | Job::Write { descriptor, .. } => descriptor,
                _ => continue,
            };
            one.forgotten |= one.block.is_some_and(|block| chosen(block, descriptor));
        }
        // Which conversation stored a block is known where it lies.
        let promised: Vec<Id> = self.clients.promised.keys().copied().collect();
        for block in promised {
            let row = self.catalog.descriptor_of(block.namespace, &block.key());
            if row.is_none_or(|descriptor| chosen(block, &descriptor)) {
                self.clients.excuse(block);
            }
        }
    }

    fn report_bad(&mut self) {
        let session = self.some_session();
        let (path, prefix) = self.some_prefix(session);
        let namespace = prefix.namespace;
        let Some(bad) = self.dice.pick(&path) else { return };
        self.note_forgotten(|block, _| block == bad);
        self.clients.report_bad(bad, self.scenario.limits.bad_keys);
        let request = Request::ReportBad { namespace, keys: vec![bad.key()] };
        self.ask(session, request, Asked::Count(None));
    }

    fn come_and_go(&mut self) {
        let sessions: Vec<SessionId> = self.clients.sessions.keys().copied().collect();
        let regions: Vec<_> =
            self.clients.regions.iter().map(|(id, region)| (*id, region.session)).collect();
        let known = self.dice.pick(&sessions);
        match (self.dice.below(6), known, self.dice.pick(&regions)) {
            (0, Some(session), _) => self.close_session(session),
            (1, _, Some((region, session))) => {
                self.clients.regions.remove(&region);
                self.apply(Event::RegionClosed { session, region });
            }
            (2..=3, Some(session), _) if regions.len() < 2 * SESSIONS_MAX => {
                self.open_region(session);
            }
            _ if sessions.len() < SESSIONS_MAX => drop(self.connect()),
            _ => {}
        }
    }

    pub(super) fn close_session(&mut self, session: SessionId) {
        self.clients.close_session(session);
        self.apply(Event::SessionClosed { session });
    }

    /// Something breaks for good, or until the next restart.
    fn misfortune(&mut self) {
        if !self.scenario.losses || !self.dice.percent(10) {
            return;
        }
        let gpus = self.scenario.gpus();
        match self.dice.pick(&gpus).filter(|gpu| !self.lost.contains(gpu)) {
            Some(gpu) if self.dice.percent(60) => {
                self.lost.insert(gpu);
                self.tier_off(Tier::Device);
                // Some of what it was doing is answered, and the rest may go on for ever.
                let pending = std::mem::take(&mut self.pending);
                let (theirs, others) = pending.into_iter().partition(|one| one.gpu == Some(gpu));
                self.pending = others;
                self.apply(Event::DeviceLost { gpu, reason: OfflineReason::DeviceGone });
                for one in theirs {
                    if self.dice.percent(50) {
                        let event = self.finish(one, Some(OpError::DeviceGone));
                        event.into_iter().for_each(|event| self.apply(event));
                    } else {
                        self.stuck.push(one);
                    }
                }
            }
            _ => self.nvme_gone = true,
        }
    }

    pub(super) fn tick(&mut self) {
        let us = match self.dice.below(100) {
            0..=69 => self.dice.between(50_000, 100_000),
            70..=97 => self.dice.between(100_000, 3_000_000),
            _ => self.dice.between(5_000_000, 40_000_000),
        };
        self.now += us;
        self.clients.expire(self.time());
        self.apply(Event::Tick);
    }

    /// Descriptors are written, or cannot be.
    fn commit(&mut self) {
        let segments: Vec<u32> = self.media.segments.keys().copied().collect();
        let Some(segment) = self.dice.pick(&segments) else { return };
        let failed = self.dice.percent(self.scenario.faults.control) && !self.calm;
        if !failed && !self.nvme_gone {
            return self.media.commit(segment, true);
        }
        self.commit_failed = true;
        let error = if self.nvme_gone { OpError::DeviceGone } else { OpError::Device };
        self.apply(Event::CommitFailed { segment, error });
    }

    fn drain_or_restart(&mut self) {
        match self.dice.below(10) {
            0..=1 => {
                let session = self.some_session();
                self.ask(session, Request::Drain { deadline_ms: None }, Asked::Drain);
            }
            2..=4 => self.restart(),
            _ => {}
        }
    }

    fn operator_looks(&mut self) {
        let session = self.some_session();
        let request = match self.dice.below(3) {
            0 => Request::Stats,
            1 => Request::Codecs,
            _ => Request::Inspect(InspectQuery { limit: 16, ..InspectQuery::default() }),
        };
        self.ask(session, request, Asked::Count(None));
        self.audit();
    }
}
