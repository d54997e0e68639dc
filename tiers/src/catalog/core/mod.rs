//! The pure core: what is where, and what moves where. No I/O, no clock, no threads.
//!
//! [`Catalog::apply`] takes the time and one [`Event`] and returns the [`Action`]s to carry out, in
//! order. The daemon, the trace simulator and the fault simulation drive this same struct.
//!
//! Invariants: a slot belongs to one block; a block that is leased, pinned or read from is not
//! evicted; a client sees a block only in the namespace that stored it; every ticket ends once;
//! what may grow is limited by [`CatalogConfig`].

mod admin;
mod admission;
mod adopt;
mod arbiter;
mod clients;
mod codecs;
mod copies;
mod device;
mod dirty;
mod drain;
mod erase;
mod event;
mod exclusive;
mod flow;
mod hinted;
mod index;
mod ladder;
mod line;
mod load;
mod lookup;
mod planted;
mod policy;
mod prefill;
mod quota;
mod reclaim;
mod residency;
mod reuse;
mod segments;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod slot_tier;
mod slots;
mod spill;
mod store;
mod survival;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

pub use adopt::AdoptedSlab;
pub use arbiter::ArbiterConfig;
pub use codecs::CodecTrial;
pub use event::{
    Action, CatalogConfig, DeviceShape, Event, Limits, NamespaceInfo, NvmeShape, OpError, OpId,
    SlotPlace, WRITE_BYTES_IN_FLIGHT, slab_bytes_for,
};
pub use policy::{About, Arc, Fifo, Lru, Outlook, Policy, PolicyChoice, Pre, QUEUES, Sieve, Use};
pub use prefill::PrefillConfig;
pub use residency::Residency;
pub use slots::SlotId;

use super::advice;
use super::request;
use super::request::*;
use crate::block::{BlockKey, NamespaceId};
use crate::catalog::ladder::Step;
use arbiter::Arbiter;
use clients::{Clients, RegionShape, Session};
use codecs::NamespaceCodec;
use copies::{HostTier, NvmeTier};
use device::DeviceTier;
use drain::Drain;
use erase::Erasures;
use flow::{Flow, Op, Part, Target, Ticket, TicketKind};
use ladder::Ladder;
#[cfg(test)]
use planted::Planted;
use prefill::Prefills;
use quota::Quotas;
use residency::Journal;
use reuse::Reuse;
use store::Stored;
use table::BlockTable;

/// The state of one node's cache.
pub struct Catalog {
    config: CatalogConfig,
    now: Timestamp,
    /// Counts touches: an order that is finer than the clock.
    tick: u64,
    last_demand: Timestamp,
    /// When bytes are next allowed to be written down for their age, and how many are left.
    trickle_at: Timestamp,
    trickle_bytes: u64,
    /// Before that no segment is looked for to be reclaimed, unless somebody needs room.
    reclaim_at: Timestamp,
    /// Not even then.
    reclaim_blocked: bool,
    table: BlockTable,
    namespaces: HashMap<NamespaceId, NamespaceInfo>,
    codecs: HashMap<NamespaceId, NamespaceCodec>,
    devices: Vec<DeviceTier>,
    host: HostTier,
    nvme: Option<NvmeTier>,
    clients: Clients,
    flow: Flow,
    bad: BadKeys,
    reuse: Reuse,
    arbiter: Arbiter,
    prefills: Prefills,
    erasures: Erasures,
    quotas: Quotas,
    ladder: Ladder,
    counters: Counters,
    drain: Option<Drain>,
    journal: Journal,
    actions: Vec<Action>,
    #[cfg(test)]
    planted: Option<Planted>,
}

/// Keys reported bad, oldest forgotten first.
#[derive(Default)]
struct BadKeys {
    set: HashSet<(NamespaceId, BlockKey)>,
    order: VecDeque<(NamespaceId, BlockKey)>,
}

#[derive(Default)]
struct Counters {
    lookups: u64,
    lookup_keys: u64,
    lookup_hits: u64,
    stored: u64,
    present: u64,
    store_busy: u64,
    rejected: HashMap<RejectReason, u64>,
    missed: HashMap<MissReason, u64>,
    corrupt: u64,
    write_failures: u64,
    read_failures: u64,
    segments_reclaimed: u64,
    reinserted: u64,
    next_sequence: u64,
    pinned_bytes: u64,
    /// Bytes that were not written to nvme, and blocks dropped from RAM, on the ladder.
    not_spilled_bytes: u64,
    dropped_under_pressure: u64,
}

impl Catalog {
    /// An empty catalog.
    pub fn new(config: CatalogConfig) -> Catalog {
        let host = HostTier::new(&config);
        let devices = config.devices.iter();
        let devices = devices.map(|shape| DeviceTier::new(shape, config.device_policy)).collect();
        let nvme = config.nvme.as_ref().map(NvmeTier::new);
        let on_gpu = !config.devices.is_empty() && config.device_policy.learns();
        let rationed = nvme.as_ref().is_some_and(|nvme| nvme.admission.is_some());
        let learns = on_gpu || rationed || config.host_policy.learns();
        Catalog {
            quotas: Quotas::new(&config),
            table: BlockTable::new(config.hash_seed),
            arbiter: Arbiter::new(config.arbiter),
            prefills: Prefills::new(config.prefill.clone()),
            config,
            now: Timestamp(0),
            tick: 0,
            last_demand: Timestamp(0),
            trickle_at: Timestamp(0),
            trickle_bytes: 0,
            reclaim_at: Timestamp(0),
            reclaim_blocked: false,
            namespaces: HashMap::new(),
            codecs: HashMap::new(),
            devices,
            host,
            nvme,
            clients: Clients::default(),
            flow: Flow::default(),
            bad: BadKeys::default(),
            reuse: Reuse::new(learns),
            erasures: Erasures::default(),
            ladder: Ladder::default(),
            counters: Counters::default(),
            drain: None,
            journal: Journal::default(),
            actions: Vec::new(),
            #[cfg(test)]
            planted: None,
        }
    }

    /// Takes in what happened and decides what is to be done. `now` must not go backwards.
    pub fn apply(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        match event {
            Event::Namespace(info) => {
                // Two openings may cross; a generation never goes back.
                let known = self.namespaces.entry(info.id).or_insert(info);
                *known =
                    NamespaceInfo { generation: known.generation.max(info.generation), ..info };
                self.quotas.bind(info.id, info.tenant);
            }
            Event::SessionOpened { session, tenant } => self.open_session(session, tenant),
            Event::SessionClosed { session } => self.close_session(session),
            Event::RegionOpened { session, region, places, block_bytes, gpu } => {
                if let Some(holder) = self.clients.sessions.get_mut(&session) {
                    holder.regions.insert(region);
                    let shape = RegionShape { session, places, block_bytes, gpu };
                    self.clients.regions.insert(region, shape);
                }
            }
            Event::RegionClosed { session, region } => self.close_region(session, region),
            Event::Asked { ask, session, request } => self.ask(ask, session, request),
            Event::Gathered { op, result } => self.gathered(op, result),
            Event::Compared { op, result } => self.compared(op, result),
            Event::Scattered { op, result } => self.scattered(op, result),
            Event::Demoted { op, result } => self.demoted(op, result),
            Event::DeviceLost { gpu, reason } => self.take_device_offline(gpu, reason),
            Event::Read { op, result } => self.read_done(op, result),
            Event::Encoded { op, result, trial } => self.encoded(op, result, trial),
            Event::Written { op, result } => self.written(op, result),
            Event::SegmentOpened { segment, result } => {
                if let Err(error) = result {
                    self.segment_failed(segment, error);
                }
            }
            Event::Synced { op, result } => self.synced(op, result),
            Event::CommitFailed { segment, error } => self.segment_failed(segment, error),
            Event::Erased { segment, sequence, index, result } => {
                self.erased(segment, sequence, index, result);
            }
            Event::NamespaceRetired { namespace, generation } => {
                self.namespace_retired(namespace, generation);
            }
            Event::Tick => self.expire(),
        }
        self.pump_demotes();
        self.pump_fetches();
        self.pump_reclaim();
        self.pump_writes();
        if !self.config.trace_order {
            self.drop_surplus_ghosts();
        }
        self.answer_drain();
        self.tell_residency();
        std::mem::take(&mut self.actions)
    }

    fn ask(&mut self, ask: AskId, session: SessionId, request: Request) {
        let demand = !matches!(
            request,
            Request::Inspect(_)
                | Request::Stats
                | Request::Codecs
                | Request::Drain { .. }
                | Request::ReportPrefill(_)
                | Request::AdmitPrefill(_)
                | Request::PrefillDone { .. }
        );
        if demand {
            self.last_demand = self.now;
        }
        let reply = match request {
            Request::Lookup { prefixes, lease_ms, hints } => {
                self.lookup(session, &prefixes, lease_ms, &hints)
            }
            Request::Load { lease, namespace, region, after_event, blocks, hints } => {
                let target = Target { region, after_event };
                self.load(session, lease, namespace, target, &blocks, &hints)
            }
            Request::Store { namespace, conversation, region, after_event, blocks, hints } => {
                let what = Stored { namespace, conversation, blocks: &blocks, hints: &hints };
                self.store(session, &what, Target { region, after_event })
            }
            Request::Touch { prefix, hints } => self.touch_prefix(session, &prefix, &hints),
            Request::Prefetch { .. } if self.ladder.step() >= Step::NoPrefetch => {
                Reply::Busy(Limit::Pressure)
            }
            Request::Prefetch { prefix, hints } => self.prefetch(session, &prefix, &hints),
            Request::Pin { prefix, ttl_ms } => self.pin_prefix(session, &prefix, ttl_ms),
            Request::Unpin { pin } => self.unpin(session, pin),
            Request::Release { lease } => self.release(session, lease),
            Request::Forget(what) => self.forget(&what),
            Request::ReportBad { namespace, keys } => self.report_bad(namespace, &keys),
            Request::Inspect(query) => Reply::Inspect(self.inspect(&query)),
            Request::Keep { namespace, conversation, rule } => {
                Reply::Conversation(self.keep(namespace, conversation, rule))
            }
            Request::Stats => Reply::Stats(Box::new(self.stats())),
            Request::Codecs => Reply::Codecs(self.codec_reports()),
            Request::Drain { deadline_ms } => return self.begin_drain(ask, deadline_ms),
            Request::ReportPrefill(report) => self.report_prefill(session, &report),
            Request::AdmitPrefill(wanted) => self.admit_prefill(session, &wanted),
            Request::PrefillDone { grant } => {
                Reply::Count(u64::from(self.prefills.done(self.now, session, grant)))
            }
        };
        self.actions.push(Action::Answer { ask, reply });
    }

    fn open_session(&mut self, session: SessionId, tenant: TenantId) {
        let holder = Session {
            tenant,
            regions: BTreeSet::new(),
            leases: BTreeSet::new(),
            lookups: 0,
            tickets: 0,
        };
        self.clients.sessions.insert(session, holder);
        self.prefills.begin(self.now);
    }

    fn close_session(&mut self, session: SessionId) {
        let Some(holder) = self.clients.sessions.get(&session) else {
            return;
        };
        let leases: Vec<LeaseId> = holder.leases.iter().copied().collect();
        let regions: Vec<RegionId> = holder.regions.iter().copied().collect();
        for lease in leases {
            self.end_lease(lease);
        }
        for region in regions {
            self.close_region(session, region);
        }
        let tickets = self.flow.tickets.iter().filter(|(_, ticket)| ticket.session == session);
        for id in tickets.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.cut_ticket(id, MissReason::Gone);
        }
        self.clients.sessions.remove(&session);
        self.prefills.close_session(self.now, session);
    }

    fn close_region(&mut self, session: SessionId, region: RegionId) {
        if self.clients.region_of(session, region).is_none() {
            return;
        }
        self.clients.regions.remove(&region);
        if let Some(holder) = self.clients.sessions.get_mut(&session) {
            holder.regions.remove(&region);
        }
        let tickets = self.flow.tickets.iter().filter(|(_, ticket)| ticket.region == Some(region));
        for id in tickets.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.cut_ticket(id, MissReason::Gone);
        }
    }

    fn expire(&mut self) {
        self.refill_trickle();
        self.prefills.expire(self.now);
        self.trim_quotas();
        self.climb();
        while let Some(lease) = self.clients.expired_lease(self.now) {
            self.end_lease(lease);
        }
        for pin in self.clients.expired_pins(self.now) {
            self.end_pin(pin);
        }
        let late = self.flow.tickets.iter().take_while(|(_, ticket)| ticket.expires <= self.now);
        let late: Vec<TicketId> = late.map(|(id, _)| *id).collect();
        for id in &late {
            self.cut_ticket(*id, MissReason::Deadline);
        }
        if !late.is_empty() {
            self.flow.purge_waiters();
        }
        let (now, limit) = (self.now, self.config.limits.device_ms);
        let stuck = |since: Timestamp| since.plus_ms(limit) < now;
        if self.flow.oldest_on_nvme().is_some_and(stuck) {
            self.take_nvme_offline(OfflineReason::DeviceStuck);
        }
    }

    /// Opens a ticket, or says which limit is reached.
    fn open_ticket(
        &mut self,
        session: SessionId,
        kind: TicketKind,
        blocks: usize,
    ) -> Result<TicketId, Reply> {
        if blocks > self.config.limits.keys_per_call {
            return Err(Reply::Refused(Refusal::TooManyKeys));
        }
        let Some(holder) = self.clients.sessions.get_mut(&session) else {
            return Err(Reply::Refused(Refusal::UnknownSession));
        };
        if holder.tickets >= self.config.limits.tickets_per_session
            || self.flow.blocks_open + blocks > self.config.limits.blocks_in_flight
        {
            return Err(Reply::Busy(Limit::Tickets));
        }
        holder.tickets += 1;
        let expires = self.now.plus_ms(self.config.limits.ticket_ms);
        Ok(self.flow.add_ticket(Ticket::new(session, kind, blocks, expires)))
    }

    /// Gives every block of the ticket that nothing touches now an outcome. Blocks being copied
    /// keep the ticket open, because the client's memory is still in use.
    fn cut_ticket(&mut self, id: TicketId, reason: MissReason) {
        let Some(ticket) = self.flow.tickets.get(&id) else {
            return;
        };
        let outcome = match ticket.kind {
            TicketKind::Store => Outcome::Busy,
            TicketKind::Load | TicketKind::Prefetch => Outcome::Missed(reason),
        };
        let waiting = (0..ticket.blocks.len()).filter(|at| ticket.is_waiting(*at));
        for at in waiting.collect::<Vec<_>>() {
            self.finish(Part { ticket: id, at }, outcome);
        }
    }

    /// Records one block's outcome, and ends the ticket with its last one.
    fn finish(&mut self, part: Part, mut outcome: Outcome) {
        let Some(ticket) = self.flow.tickets.get_mut(&part.ticket) else {
            return;
        };
        let lease_ended =
            ticket.lease.is_some_and(|lease| !self.clients.leases.contains_key(&lease));
        if lease_ended && matches!(outcome, Outcome::Loaded(_)) {
            outcome = Outcome::Missed(MissReason::LeaseExpired);
        }
        if !ticket.finish(part.at, outcome) {
            return;
        }
        if let Some(measured) = &mut ticket.measured {
            measured.note(self.now, part.at, outcome);
        }
        self.flow.blocks_open -= 1;
        self.counters.count(outcome);
        if let Outcome::Loaded(tier) = outcome {
            match (tier, &mut self.nvme) {
                (Tier::Nvme, Some(nvme)) => nvme.hits += 1,
                // Counted where it is known which GPU it was.
                (Tier::Device, _) => {}
                _ => self.host.hits += 1,
            }
        }
        self.end_if_complete(part.ticket);
    }

    fn end_if_complete(&mut self, id: TicketId) {
        if !self.flow.tickets.get(&id).is_some_and(Ticket::is_complete) {
            return;
        }
        if let Some(ticket) = self.flow.tickets.remove(&id) {
            if let Some(measured) = &ticket.measured {
                self.judge_load(measured, ticket.lease);
            }
            if let Some(holder) = self.clients.sessions.get_mut(&ticket.session) {
                holder.tickets -= 1;
            }
            let outcomes = ticket.outcomes();
            self.actions.push(Action::EndTicket { session: ticket.session, ticket: id, outcomes });
        }
    }

    /// The block of an operation that ended, with the operation.
    fn take_op(&mut self, op: OpId) -> Option<Op> {
        self.flow.end(op)
    }

    fn wall_s(&self) -> u64 {
        self.config.epoch_s + self.now.0 / 1_000_000
    }
}

impl Counters {
    fn count(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Stored => self.stored += 1,
            Outcome::Present => self.present += 1,
            Outcome::Busy => self.store_busy += 1,
            Outcome::Rejected(reason) => *self.rejected.entry(reason).or_default() += 1,
            Outcome::Missed(reason) => *self.missed.entry(reason).or_default() += 1,
            Outcome::Loaded(_) | Outcome::Fetched => {}
        }
    }
}

impl BadKeys {
    fn contains(&self, namespace: NamespaceId, key: &BlockKey) -> bool {
        self.set.contains(&(namespace, *key))
    }

    fn insert(&mut self, namespace: NamespaceId, key: BlockKey, limit: usize) {
        if self.set.insert((namespace, key)) {
            self.order.push_back((namespace, key));
        }
        while self.order.len() > limit {
            if let Some(oldest) = self.order.pop_front() {
                self.set.remove(&oldest);
            }
        }
    }
}
