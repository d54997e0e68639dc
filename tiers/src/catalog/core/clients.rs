//! What clients hold: sessions, regions, leases and pins. Every count has a limit.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::request::{GpuId, LeaseId, PinId, RegionId, SessionId, TenantId, Timestamp};
use super::table::BlockRef;

/// One connected client.
pub(crate) struct Session {
    pub(crate) tenant: TenantId,
    pub(crate) regions: BTreeSet<RegionId>,
    pub(crate) leases: BTreeSet<LeaseId>,
    /// Lookups with a lease so far.
    pub(crate) lookups: u64,
    pub(crate) tickets: usize,
}

/// Registered memory.
#[derive(Clone, Copy)]
pub(crate) struct RegionShape {
    pub(crate) session: SessionId,
    pub(crate) places: u32,
    pub(crate) block_bytes: u32,
    /// The GPU in whose memory it is.
    pub(crate) gpu: Option<GpuId>,
}

/// A client's expiring pin.
pub(crate) struct Lease {
    pub(crate) session: SessionId,
    pub(crate) tenant: TenantId,
    pub(crate) expires: Timestamp,
    /// The blocks, prefix by prefix, root first.
    pub(crate) blocks: Vec<BlockRef>,
    /// The same, sorted.
    covered: Vec<BlockRef>,
    /// Until when the time of its loads has been charged to tiers.
    pub(crate) charged: Timestamp,
}

impl Lease {
    /// Whether the block, in this life of its table entry, is under the lease.
    pub(crate) fn covers(&self, block: BlockRef) -> bool {
        self.covered.binary_search(&block).is_ok()
    }
}

/// A pin that outlives its session.
pub(crate) struct Pin {
    pub(crate) tenant: TenantId,
    pub(crate) expires: Timestamp,
    pub(crate) blocks: Vec<BlockRef>,
    /// The last block of the path, if a hint asked for the pin.
    retains: Option<BlockRef>,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Clients {
    pub(crate) sessions: HashMap<SessionId, Session>,
    pub(crate) regions: HashMap<RegionId, RegionShape>,
    pub(crate) leases: HashMap<LeaseId, Lease>,
    pub(crate) pins: BTreeMap<PinId, Pin>,
    /// The pins that hints asked for, by the last block of the path.
    pub(crate) retained: BTreeMap<BlockRef, PinId>,
    lease_ends: BTreeSet<(Timestamp, LeaseId)>,
    /// Entries of all leases.
    pub(crate) leased_blocks: usize,
    next_lease: u64,
    next_pin: u64,
}

impl Clients {
    /// The region, if it belongs to the session.
    pub(crate) fn region_of(&self, session: SessionId, region: RegionId) -> Option<RegionShape> {
        self.regions.get(&region).copied().filter(|shape| shape.session == session)
    }

    pub(crate) fn add_lease(
        &mut self,
        session: SessionId,
        expires: Timestamp,
        blocks: Vec<BlockRef>,
    ) -> Option<LeaseId> {
        let holder = self.sessions.get_mut(&session)?;
        self.next_lease += 1;
        let id = LeaseId(self.next_lease);
        holder.leases.insert(id);
        self.lease_ends.insert((expires, id));
        self.leased_blocks += blocks.len();
        let mut covered = blocks.clone();
        covered.sort_unstable();
        let tenant = holder.tenant;
        let charged = Timestamp(0);
        self.leases.insert(id, Lease { session, tenant, expires, blocks, charged, covered });
        Some(id)
    }

    pub(crate) fn take_lease(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.leases.remove(&id)?;
        self.leased_blocks -= lease.blocks.len();
        self.lease_ends.remove(&(lease.expires, id));
        if let Some(session) = self.sessions.get_mut(&lease.session) {
            session.leases.remove(&id);
        }
        Some(lease)
    }

    /// A lease that has ended by `now`.
    pub(crate) fn expired_lease(&self, now: Timestamp) -> Option<LeaseId> {
        self.lease_ends.first().filter(|(end, _)| *end <= now).map(|(_, id)| *id)
    }

    pub(crate) fn add_pin(
        &mut self,
        tenant: TenantId,
        expires: Timestamp,
        blocks: Vec<BlockRef>,
    ) -> PinId {
        self.next_pin += 1;
        let id = PinId(self.next_pin);
        self.pins.insert(id, Pin { tenant, expires, blocks, retains: None });
        id
    }

    /// The pin was asked for by a hint, on the path that ends with this block.
    pub(crate) fn set_retained(&mut self, end: BlockRef, id: PinId) {
        if let Some(pin) = self.pins.get_mut(&id) {
            pin.retains = Some(end);
            self.retained.insert(end, id);
        }
    }

    pub(crate) fn take_pin(&mut self, id: PinId) -> Option<Pin> {
        let pin = self.pins.remove(&id)?;
        if let Some(end) = pin.retains.filter(|end| self.retained.get(end) == Some(&id)) {
            self.retained.remove(&end);
        }
        Some(pin)
    }

    /// Pins that have ended by `now`.
    pub(crate) fn expired_pins(&self, now: Timestamp) -> Vec<PinId> {
        self.pins.iter().filter(|(_, pin)| pin.expires <= now).map(|(id, _)| *id).collect()
    }
}
