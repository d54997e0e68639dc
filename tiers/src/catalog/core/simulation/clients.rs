//! What clients hold, as they know it themselves: regions, tickets, leases and pins.

use std::collections::{BTreeMap, VecDeque};

use super::scenario::Id;
use crate::catalog::{
    AskId, GpuId, LeaseId, PinId, RegionId, SessionId, TenantId, TicketId, Timestamp,
};

/// A place of a region.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    /// What its bytes are.
    pub(super) tag: u64,
    /// A ticket uses it.
    pub(super) busy: bool,
    /// The block that was copied here last.
    pub(super) loaded: Option<Id>,
    /// Whether the bytes were those that the cache has, when they were compared last.
    pub(super) same: Option<bool>,
}

/// A region.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) session: SessionId,
    pub(super) gpu: Option<GpuId>,
    pub(super) block_bytes: u32,
    pub(super) places: Vec<Place>,
}

/// What a ticket is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Load(LeaseId),
    Store,
    Prefetch,
}

/// One block of a ticket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) block: Id,
    pub(super) place: u32,
    /// It was reported bad before it was asked for.
    pub(super) bad: bool,
    /// It may have been lost since.
    pub(super) excused: bool,
}

impl Part {
    pub(super) fn new(block: Id, place: u32) -> Part {
        Part { block, place, bad: false, excused: false }
    }
}

/// A ticket under way.
#[derive(Clone, Debug)]
pub(super) struct Ticket {
    pub(super) session: SessionId,
    pub(super) region: Option<RegionId>,
    pub(super) kind: Kind,
    pub(super) parts: Vec<Part>,
}

/// A lease or a pin.
#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) session: SessionId,
    pub(super) tenant: TenantId,
    pub(super) expires: Timestamp,
    pub(super) blocks: Vec<Id>,
}

/// What is promised of a block that is leased or pinned.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Promise {
    pub(super) holders: u32,
    /// It may be lost: something went wrong with its last copy, or somebody had it forgotten.
    pub(super) excused: bool,
}

/// What an ask was about, until it is answered.
#[derive(Clone, Debug)]
pub(super) enum Asked {
    /// Prefix by prefix.
    Lookup {
        session: SessionId,
        prefixes: Vec<Vec<Id>>,
        lease_ms: u32,
    },
    Ticket(Ticket),
    Pin {
        session: SessionId,
        blocks: Vec<Id>,
        ttl_ms: u64,
    },
    /// How many must have been affected, if that is known.
    Count(Option<u64>),
    Drain,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Clients {
    pub(super) sessions: BTreeMap<SessionId, TenantId>,
    pub(super) regions: BTreeMap<RegionId, Region>,
    pub(super) tickets: BTreeMap<TicketId, Ticket>,
    pub(super) leases: BTreeMap<LeaseId, Hold>,
    pub(super) pins: BTreeMap<PinId, Hold>,
    pub(super) promised: BTreeMap<Id, Promise>,
    pub(super) asked: BTreeMap<AskId, Asked>,
    /// Blocks reported bad, oldest first.
    pub(super) bad: VecDeque<Id>,
    pub(super) next: u64,
}

impl Clients {
    /// A number that was never used.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn promise(&mut self, blocks: &[Id]) {
        for block in blocks {
            let promise = self.promised.entry(*block).or_default();
            promise.holders += 1;
            promise.excused = false;
        }
    }

    fn release(&mut self, blocks: &[Id]) {
        for block in blocks {
            let Some(promise) = self.promised.get_mut(block) else { continue };
            promise.holders = promise.holders.saturating_sub(1);
            if promise.holders == 0 {
                self.promised.remove(block);
            }
        }
    }

    pub(super) fn end_lease(&mut self, lease: LeaseId) {
        if let Some(hold) = self.leases.remove(&lease) {
            self.release(&hold.blocks);
        }
    }

    pub(super) fn end_pin(&mut self, pin: PinId) {
        if let Some(hold) = self.pins.remove(&pin) {
            self.release(&hold.blocks);
        }
    }

    /// Leases and pins end with their time.
    pub(super) fn expire(&mut self, now: Timestamp) {
        let ended = |hold: &Hold| hold.expires <= now;
        let leases = self.leases.iter().filter(|(_, hold)| ended(hold)).map(|(id, _)| *id);
        for lease in leases.collect::<Vec<_>>() {
            self.end_lease(lease);
        }
        let pins = self.pins.iter().filter(|(_, hold)| ended(hold)).map(|(id, _)| *id);
        for pin in pins.collect::<Vec<_>>() {
            self.end_pin(pin);
        }
    }

    /// A client dies: its leases end, its pins do not.
    pub(super) fn close_session(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.regions.retain(|_, region| region.session != session);
        let leases = self.leases.iter().filter(|(_, hold)| hold.session == session);
        for lease in leases.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.end_lease(lease);
        }
    }

    /// The block may be lost from now on, although it is leased or pinned.
    pub(super) fn excuse(&mut self, block: Id) {
        if let Some(promise) = self.promised.get_mut(&block) {
            promise.excused = true;
        }
        let parts = self.tickets.values_mut().flat_map(|ticket| &mut ticket.parts);
        parts.filter(|part| part.block == block).for_each(|part| part.excused = true);
    }

    pub(super) fn is_promised(&self, block: Id) -> bool {
        self.promised.get(&block).is_some_and(|promise| !promise.excused)
    }

    pub(super) fn report_bad(&mut self, block: Id, limit: usize) {
        if !self.bad.contains(&block) {
            self.bad.push_back(block);
        }
        while self.bad.len() > limit {
            self.bad.pop_front();
        }
    }

    /// Marks the places of a ticket as used, or as free.
    pub(super) fn mark_places(&mut self, ticket: &Ticket, busy: bool) {
        let region = ticket.region.and_then(|region| self.regions.get_mut(&region));
        if let Some(region) = region {
            for part in &ticket.parts {
                if let Some(place) = region.places.get_mut(part.place as usize) {
                    place.busy = busy;
                    if busy {
                        (place.same, place.loaded) = (None, None);
                    }
                }
            }
        }
    }

    pub(super) fn place(&mut self, region: RegionId, place: u32) -> Option<&mut Place> {
        self.regions.get_mut(&region)?.places.get_mut(place as usize)
    }
}
