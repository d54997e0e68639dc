//! One catalog with all that is around it, and what must hold between any two events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::clients::{Asked, Clients, Hold, Kind, Ticket};
use super::dice::Dice;
use super::edge::{Job, Pending};
use super::media::{Complaint, Media};
use super::scenario::{Id, Scenario};
use super::{Counts, Log};
use crate::block::NamespaceId;
use crate::catalog::{
    AskId, Catalog, Event, GpuId, LookupReply, MissReason, Outcome, PinId, RejectReason, Reply,
    Request, SessionId, SlotPlace, TicketId, Tier, Timestamp,
};

/// See the head of this file.
pub(super) struct World {
    pub(super) scenario: Scenario,
    pub(super) dice: Dice,
    pub(super) catalog: Catalog,
    /// Microseconds since the simulation began, and when this catalog was made.
    pub(super) now: u64,
    pub(super) started: u64,
    pub(super) epoch: u32,
    pub(super) media: Media,
    pub(super) pending: Vec<Pending>,
    /// What a lost GPU may still be doing: it never ends.
    pub(super) stuck: Vec<Pending>,
    pub(super) clients: Clients,
    /// What the bytes of a block are that is in the cache.
    pub(super) values: BTreeMap<Id, u64>,
    /// What is durable besides segments.
    pub(super) generations: BTreeMap<NamespaceId, u32>,
    pub(super) quarantined: BTreeSet<u32>,
    /// Completions of operations that could not even begin.
    pub(super) refused: VecDeque<Event>,
    pub(super) just_read: Option<SlotPlace>,
    /// Where blocks are, as those are told who follow.
    pub(super) residents: BTreeSet<(Id, Tier)>,
    pub(super) residents_cut: bool,
    pub(super) nvme_gone: bool,
    pub(super) nvme_off: bool,
    pub(super) lost: BTreeSet<GpuId>,
    /// Some descriptors may never have reached the device.
    pub(super) commit_failed: bool,
    /// Nothing goes wrong any more.
    pub(super) calm: bool,
    /// Tickets that ended before anybody was told of them, within one event.
    early: BTreeMap<TicketId, Vec<Outcome>>,
    complaint: Option<Complaint>,
    pub(super) counts: Counts,
    pub(super) log: Log,
}

impl World {
    pub(super) fn new(seed: u64, log: Log) -> World {
        let mut dice = Dice::new(seed);
        let scenario = Scenario::of(&mut dice);
        let catalog = Catalog::new(scenario.config(1, Vec::new()));
        let media = Media { slab_bytes: scenario.slab_bytes, ..Media::default() };
        let mut world = World {
            scenario,
            dice,
            catalog,
            now: 0,
            started: 0,
            epoch: 1,
            media,
            pending: Vec::new(),
            stuck: Vec::new(),
            clients: Clients::default(),
            values: BTreeMap::new(),
            generations: BTreeMap::new(),
            quarantined: BTreeSet::new(),
            refused: VecDeque::new(),
            just_read: None,
            residents: BTreeSet::new(),
            residents_cut: false,
            nvme_gone: false,
            nvme_off: false,
            lost: BTreeSet::new(),
            commit_failed: false,
            calm: false,
            early: BTreeMap::new(),
            complaint: None,
            counts: Counts::default(),
            log,
        };
        world.follow();
        world.open_namespaces();
        world
    }

    pub(super) fn complain(&mut self, complaint: Complaint) {
        self.complaint.get_or_insert(complaint);
    }

    pub(super) fn expect(&mut self, result: Result<(), Complaint>) {
        if let Err(complaint) = result {
            self.complain(complaint);
        }
    }

    pub(super) fn complaint(&self) -> Option<&Complaint> {
        self.complaint.as_ref()
    }

    /// The time as this catalog knows it.
    pub(super) fn time(&self) -> Timestamp {
        Timestamp(self.now - self.started)
    }

    pub(super) fn nvme_usable(&self) -> bool {
        self.scenario.geometry.is_some() && !self.nvme_off
    }

    pub(super) fn open_namespaces(&mut self) {
        for mut info in self.scenario.namespaces.clone() {
            info.generation = *self.generations.entry(info.id).or_insert(1);
            self.apply(Event::Namespace(info));
        }
    }

    /// Tells the catalog, does what it decides, and looks at what must hold.
    pub(super) fn apply(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next {
            if self.complaint.is_some() {
                return;
            }
            self.counts.events += 1;
            self.log.line(|| format!("{} us {event:?}", self.now));
            let now = self.time();
            for action in self.catalog.apply(now, event) {
                self.log.line(|| format!("    {action:?}"));
                self.carry_out(action);
            }
            if std::mem::take(&mut self.residents_cut) {
                self.residents = self.residents_now();
            }
            if let Some(ticket) = self.early.keys().next() {
                self.complain(format!("{ticket:?} ended and nobody was ever told of it"));
            }
            self.check_promises();
            self.check_counts();
            next = self.refused.pop_front();
        }
    }

    pub(super) fn ask(&mut self, session: SessionId, request: Request, about: Asked) {
        let ask = AskId(self.clients.number());
        if let Asked::Ticket(ticket) = &about {
            let ticket = ticket.clone();
            self.clients.mark_places(&ticket, true);
        }
        self.clients.asked.insert(ask, about);
        self.apply(Event::Asked { ask, session, request });
    }

    /// A leased or pinned block is not lost unless something went wrong with it.
    fn check_promises(&mut self) {
        let promised = self.clients.promised.iter().filter(|(_, promise)| !promise.excused);
        let lost = promised.map(|(block, _)| *block).find(|block| !self.is_there(*block, true));
        if let Some(block) = lost {
            let row = self.catalog.row_of(block.namespace, &block.key());
            self.complain(format!("{block:?} is leased or pinned, and lost: {row:?}"));
        }
    }

    /// Whether the block can be loaded now or, `soon`, once what is under way has ended.
    pub(super) fn is_there(&self, block: Id, soon: bool) -> bool {
        let row = self.catalog.row_of(block.namespace, &block.key());
        let there = row.is_some_and(|row| {
            row.host || row.device.is_some() || (row.nvme.is_some() && !self.nvme_off)
        });
        there || (soon && self.is_coming(block))
    }

    fn is_coming(&self, block: Id) -> bool {
        let pending = self.pending.iter().chain(&self.stuck);
        let fills =
            |job: &Job| matches!(job, Job::Gather { .. } | Job::Demote { .. } | Job::Read { .. });
        pending.filter(|one| one.block == Some(block) && !one.forgotten).any(|one| fills(&one.job))
    }

    fn check_counts(&mut self) {
        let stats = self.catalog.stats();
        let clients = &self.clients;
        let mut pairs = vec![
            ("sessions", stats.sessions, clients.sessions.len()),
            ("regions", stats.regions, clients.regions.len()),
            ("leases", stats.leases, clients.leases.len()),
            ("tickets", stats.tickets, clients.tickets.len()),
        ];
        if !self.scenario.retains {
            pairs.push(("pins", stats.pins, clients.pins.len()));
        }
        let differs = pairs.iter().find(|(_, theirs, ours)| *theirs != *ours as u64);
        if let Some((what, theirs, ours)) = differs {
            let complaint = format!("the catalog counts {theirs} {what}; there are {ours}");
            self.complain(complaint);
        }
        if stats.host.used_bytes > stats.host.capacity_bytes {
            self.complain(format!("host RAM holds more than it has room for: {:?}", stats.host));
        }
    }

    pub(super) fn answered(&mut self, ask: AskId, reply: Reply) {
        let Some(about) = self.clients.asked.remove(&ask) else {
            return self.complain(format!("{ask:?} is answered again: {reply:?}"));
        };
        match (about, reply) {
            (Asked::Lookup { session, prefixes, lease_ms }, Reply::Lookup(found)) => {
                self.looked_up(session, &prefixes, lease_ms, &found);
            }
            (Asked::Ticket(ticket), Reply::Ticket(id)) => self.ticket_opened(id, ticket),
            (Asked::Ticket(ticket), _) => self.clients.mark_places(&ticket, false),
            (Asked::Pin { session, blocks, ttl_ms }, Reply::Pinned { pin, blocks: count }) => {
                let taken = blocks.into_iter().take(count as usize).collect();
                self.pinned(pin, session, taken, ttl_ms);
            }
            (Asked::Count(Some(expected)), Reply::Count(count)) if count != expected => {
                self.complain(format!("{ask:?} affected {count}, not {expected}"));
            }
            (Asked::Drain, Reply::Drained(drained)) => self.drained(drained.blocks_lost),
            _ => {}
        }
    }

    fn pinned(&mut self, pin: PinId, session: SessionId, blocks: Vec<Id>, ttl_ms: u64) {
        self.check_run(&blocks);
        let tenant = self.clients.sessions.get(&session).copied().unwrap_or_default();
        let ttl_ms = ttl_ms.min(self.scenario.limits.pin_ms_max);
        let expires = self.time().plus_ms(ttl_ms);
        self.check_grant(&blocks);
        self.clients.promise(&blocks);
        self.clients.pins.insert(pin, Hold { session, tenant, expires, blocks });
        self.counts.pins += 1;
    }

    /// What leases and pins hold stays within its limit, unless it held more before.
    fn check_grant(&mut self, new: &[Id]) {
        let promised = &self.clients.promised;
        let fresh: BTreeSet<Id> =
            new.iter().copied().filter(|block| !promised.contains_key(block)).collect();
        let all = promised.keys().chain(&fresh);
        let bytes: u64 = all.map(|block| u64::from(self.scenario.bytes_of(block.namespace))).sum();
        let most = self.scenario.pinned_bytes_max(self.nvme_usable());
        if !fresh.is_empty() && bytes > most && !self.scenario.retains {
            self.complain(format!("leases and pins hold {bytes} bytes; {most} are allowed"));
        }
    }

    /// Blocks that were said to be there are, in some place.
    fn check_run(&mut self, run: &[Id]) {
        let missing =
            run.iter().find(|block| !self.media.anywhere(**block) && !self.is_coming(**block));
        if let Some(block) = missing.copied() {
            self.complain(format!("{block:?} is said to be there, and is in no place"));
        }
    }

    fn looked_up(
        &mut self,
        session: SessionId,
        prefixes: &[Vec<Id>],
        lease_ms: u32,
        found: &LookupReply,
    ) {
        let blocks = found.blocks as usize;
        let in_runs: u32 = found.runs.iter().map(|run| run.blocks).sum();
        if in_runs != found.blocks || found.lease.is_some() != (blocks > 0 && lease_ms > 0) {
            self.complain(format!("the answer does not agree with itself: {found:?}"));
        }
        let covered: Vec<Id> =
            prefixes.iter().flat_map(|prefix| prefix.iter().take(blocks)).copied().collect();
        self.check_run(&covered);
        self.counts.lookups += 1;
        self.counts.hits += covered.len() as u64;
        let next: Vec<Id> =
            prefixes.iter().filter_map(|prefix| prefix.get(blocks)).copied().collect();
        // A lease may be shorter, for the limit on what is pinned.
        let whole = !next.is_empty() && next.iter().all(|block| self.is_there(*block, false));
        if whole && lease_ms == 0 {
            self.complain(format!("{next:?} are there and were not found: {found:?}"));
        }
        let Some(lease) = found.lease else { return };
        let limits = self.scenario.limits;
        if found.lease_ms > limits.lease_ms_max {
            self.complain(format!("a lease lives too long: {found:?}"));
        }
        let tenant = self.clients.sessions.get(&session).copied().unwrap_or_default();
        let expires = self.time().plus_ms(found.lease_ms.into());
        self.check_grant(&covered);
        self.clients.promise(&covered);
        self.clients.leases.insert(lease, Hold { session, tenant, expires, blocks: covered });
        let held = self.clients.leases.values();
        let own = held.clone().filter(|hold| hold.session == session).count();
        let leased: usize = held.map(|hold| hold.blocks.len()).sum();
        if own > limits.leases_per_session || leased > limits.leased_blocks {
            self.complain(format!("{own} leases of a session, {leased} blocks leased: {limits:?}"));
        }
    }

    fn ticket_opened(&mut self, id: TicketId, ticket: Ticket) {
        let session = ticket.session;
        if self.clients.tickets.insert(id, ticket).is_some() {
            self.complain(format!("{id:?} is given twice"));
        }
        if let Some(outcomes) = self.early.remove(&id) {
            return self.ticket_ended(session, id, outcomes);
        }
        let tickets = self.clients.tickets.values();
        let own = tickets.filter(|ticket| ticket.session == session).count();
        if own > self.scenario.limits.tickets_per_session {
            self.complain(format!("{own} tickets of {session:?} are under way"));
        }
    }

    pub(super) fn ticket_ended(&mut self, session: SessionId, id: TicketId, ended: Vec<Outcome>) {
        let Some(ticket) = self.clients.tickets.remove(&id) else {
            if self.early.insert(id, ended).is_some() {
                self.complain(format!("{id:?} ends twice"));
            }
            return;
        };
        self.counts.tickets += 1;
        self.clients.mark_places(&ticket, false);
        if ticket.session != session || ticket.parts.len() != ended.len() {
            return self.complain(format!("{id:?} ends as {ended:?} of {session:?}: {ticket:?}"));
        }
        for at in 0..ended.len() {
            if let Some(outcome) = ended.get(at)
                && let Some(wrong) = self.check_outcome(&ticket, at, *outcome)
            {
                self.complain(format!("{id:?}, block {at}: {outcome:?}, but {wrong}: {ticket:?}"));
            }
        }
    }

    /// What speaks against an outcome.
    fn check_outcome(&mut self, ticket: &Ticket, at: usize, outcome: Outcome) -> Option<String> {
        let part = ticket.parts.get(at).copied()?;
        let region = ticket.region.and_then(|region| self.clients.regions.get(&region));
        let place = region.and_then(|region| region.places.get(part.place as usize));
        let wrong_size =
            region.map(|region| region.block_bytes != self.scenario.bytes_of(part.block.namespace));
        let lease = match ticket.kind {
            Kind::Load(lease) => self.clients.leases.get(&lease),
            Kind::Store | Kind::Prefetch => None,
        };
        let covered = lease.is_some_and(|hold| hold.blocks.contains(&part.block));
        let promised = covered && !part.excused;
        let loads = matches!(ticket.kind, Kind::Load(_));
        let stores = ticket.kind == Kind::Store;
        match outcome {
            Outcome::Loaded(_) => self.counts.loaded += 1,
            Outcome::Stored => self.counts.stored += 1,
            _ => {}
        }
        let wrong = match outcome {
            Outcome::Loaded(_) if !loads => "it is no load",
            Outcome::Loaded(_) if place.is_some_and(|it| it.loaded != Some(part.block)) => {
                "the place holds something else"
            }
            Outcome::Missed(MissReason::LeaseExpired) if lease.is_some() => "the lease lives",
            Outcome::Missed(MissReason::Lease) if covered => "the lease covers it",
            Outcome::Missed(MissReason::Absent | MissReason::NoRoom) if promised => {
                "it was promised"
            }
            Outcome::Missed(MissReason::Layout) if wrong_size == Some(false) => "the size is right",
            Outcome::Stored | Outcome::Present | Outcome::Busy if !stores => "it is no store",
            Outcome::Stored | Outcome::Present if part.bad => "it was reported bad",
            Outcome::Stored | Outcome::Present if wrong_size == Some(true) => "the size is wrong",
            Outcome::Present if place.is_some_and(|it| it.same == Some(false)) => "bytes differ",
            Outcome::Rejected(RejectReason::Mismatch)
                if wrong_size == Some(false) && place.is_some_and(|it| it.same == Some(true)) =>
            {
                "the bytes are the same"
            }
            Outcome::Fetched if ticket.kind != Kind::Prefetch => "it is no prefetch",
            _ => return None,
        };
        Some(wrong.to_owned())
    }

    fn drained(&mut self, lost: u64) {
        let all: Vec<Id> = self.scenario.all().collect();
        let only = |block: &&Id| {
            let row = self.catalog.row_of(block.namespace, &block.key());
            row.is_some_and(|row| (row.host || row.device.is_some()) && row.nvme.is_none())
        };
        let only = all.iter().find(only).copied();
        if let Some(block) = only
            && lost == 0
            && self.nvme_usable()
            && self.scenario.write_budget.is_none()
            && self.lost.is_empty()
        {
            self.complain(format!("{block:?} is not on nvme after a drain that lost nothing"));
        }
    }
}
