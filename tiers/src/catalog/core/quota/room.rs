//! Room within quotas: what leaves for what is admitted, and what is told of it.

use super::super::copies::slot_bytes;
use super::super::reuse::short_key;
use super::super::slot_tier::{Home, Leave};
use super::super::table::{Block, HostCopy, NIL, NvmeCopy};
use super::super::{Catalog, SessionId};
use super::{HOLES_MAX, Owner, TIERS, TURNS_MAX};
use crate::block::{BlockKey, NamespaceId, page_ceil};
use crate::catalog::quota::{ConversationUse, Dropped, KeepRule};
use crate::catalog::request::{PrefixQuery, RejectReason, Tier};

/// Blocks that one search for a victim looks at.
const SCAN_MAX: usize = 512;

/// Owners over their soft quota that are asked for a victim.
const SOFT_OWNERS_MAX: usize = 4;

/// Blocks that are looked at for one that is to be written so that it can leave soon.
const TIGHT_SCAN_MAX: usize = 64;

/// Blocks of one owner and tier that one tick brings back below a quota.
const TRIM_MAX: usize = 64;

/// Blocks of nvme that leave for a soft quota before a segment is reclaimed.
const SOFT_NVME_MAX: usize = 512;

impl Catalog {
    /// The block has a copy in the tier from now on.
    pub(in super::super) fn charge(&mut self, index: u32, tier: Tier) {
        let bytes = self.charged_bytes(index, tier);
        let block = self.table.get(index);
        let (namespace, number) = (block.namespace, block.conversation);
        self.quotas.add(index, namespace, number, tier, bytes);
    }

    /// The block is about to have, or has, no copy in the tier any more. For nvme called before.
    pub(in super::super) fn discharge(&mut self, index: u32, tier: Tier) {
        let bytes = self.charged_bytes(index, tier);
        let block = self.table.get(index);
        let (namespace, number) = (block.namespace, block.conversation);
        self.quotas.remove(index, namespace, number, tier, bytes);
    }

    fn charged_bytes(&self, index: u32, tier: Tier) -> u64 {
        match tier {
            Tier::Device | Tier::Host => slot_bytes(self.table.get(index)),
            Tier::Nvme => {
                let stored = self.table.location(index).map_or(0, |found| found.stored_bytes);
                page_ceil(u64::from(stored))
            }
        }
    }

    /// Bytes of the block begin, or end, to be written to nvme.
    pub(in super::super) fn charge_write(&mut self, index: u32, bytes: u64, begins: bool) {
        let block = self.table.get(index);
        let (namespace, number) = (block.namespace, block.conversation);
        self.quotas.writing(namespace, number, bytes, begins);
    }

    /// The log of segments that the block is written to: the first one, or that of its tenant,
    /// which gets one when it holds a quarter of its hard quota. At the quota its writes leave as
    /// many dead bytes behind, which are nobody else's concern.
    pub(in super::super) fn log_of(&mut self, index: u32) -> usize {
        if self.quotas.logs.is_empty() {
            return 0;
        }
        let at = self.quotas.account_of(self.table.get(index).namespace);
        let Some(most) = self.quotas.limit(Owner::Account(at), Tier::Nvme).hard else {
            return 0;
        };
        let own = at as usize % self.quotas.logs.len();
        if !self.quotas.account(at).own_log {
            if self.held(Owner::Account(at), Tier::Nvme) <= most / 4 {
                return 0;
            }
            self.quotas.account_mut(at).own_log = true;
            let Some(bytes) = self.quotas.logs.get_mut(own) else { return 0 };
            *bytes = bytes.saturating_add(most);
            let bytes = *bytes;
            if let Some(nvme) = &mut self.nvme {
                nvme.segments.limit_log(1 + own, bytes);
            }
        }
        1 + own
    }

    /// The block was used.
    pub(in super::super) fn touch_quota(&mut self, index: u32) {
        if !self.quotas.is_limited() {
            return;
        }
        let block = self.table.get(index);
        let (namespace, number) = (block.namespace, block.conversation);
        let (device, host) = (block.device_slot().is_some(), block.host != HostCopy::Absent);
        let nvme = block.spot().is_some();
        for (tier, there) in [(Tier::Device, device), (Tier::Host, host), (Tier::Nvme, nvme)] {
            if there {
                self.quotas.touch(index, namespace, number, tier);
            }
        }
    }

    /// A store begins; what it uses from now on is not to leave for what follows it.
    pub(in super::super) fn begin_store(
        &mut self,
        session: SessionId,
        namespace: NamespaceId,
        conversation: u64,
    ) {
        if !self.quotas.is_limited() {
            return;
        }
        self.quotas.storing_since = Some(self.tick + 1);
        let lookups = self.clients.sessions.get(&session).map_or(0, |holder| holder.lookups);
        let sequence = self.counters.next_sequence + 1;
        self.quotas.begin_turn((namespace, conversation), (session, lookups), sequence);
    }

    pub(in super::super) fn end_store(&mut self) {
        self.quotas.storing_since = None;
    }

    /// Makes room within the quotas of the block's owners for another copy of it.
    pub(in super::super) fn quota_room(&mut self, tier: Tier, index: u32) -> bool {
        self.quotas.refusal = None;
        if !self.quotas.is_limited() {
            return true;
        }
        let block = self.table.get(index);
        let bytes = slot_bytes(block);
        // What no lookup can reach takes nobody's place.
        let reached = match block.parent {
            NIL => block.position == 0 || !block.is_ghost(),
            parent => !block.orphan && !self.table.get(parent).is_ghost(),
        };
        let (talk, account) = self.quotas.owners(block.namespace, block.conversation);
        for owner in talk.into_iter().chain([account]) {
            let Some(most) = self.quotas.limit(owner, tier).hard else {
                continue;
            };
            while self.held(owner, tier) + bytes > most {
                let victim =
                    (reached && bytes <= most).then(|| self.quota_victim(owner, tier, None));
                match victim.flatten() {
                    Some(victim) => self.evict_for(owner, tier, victim),
                    None => {
                        self.refuse_for(owner, tier);
                        return false;
                    }
                }
            }
        }
        true
    }

    fn refuse_for(&mut self, owner: Owner, tier: Tier) {
        if tier == Tier::Host {
            self.quotas.tight.insert(owner);
        }
        self.quotas.refusal = Some(match owner {
            Owner::Account(_) => RejectReason::TenantQuota,
            Owner::Talk(_) => RejectReason::ConversationQuota,
        });
    }

    /// A block is not stored, or not written to nvme, because a quota of its owners is full.
    pub(in super::super) fn count_refused(&mut self, namespace: NamespaceId) {
        let account = self.quotas.account_of(namespace);
        self.quotas.account_mut(account).refused += 1;
    }

    fn count_evicted(&mut self, owner: Owner, tier: Tier) {
        *self.quotas.holding_mut(owner).evicted.of_mut(tier) += 1;
        if let Owner::Talk(at) = owner {
            let namespace = self.quotas.talk(at).name.0;
            let account = self.quotas.account_of(namespace);
            *self.quotas.account_mut(account).holding.evicted.of_mut(tier) += 1;
        }
    }

    fn held(&self, owner: Owner, tier: Tier) -> u64 {
        let holding = self.quotas.holding(owner);
        let writing = if tier == Tier::Nvme { holding.writing } else { 0 };
        *holding.used.of(tier) + writing
    }

    /// A block of the owner that may leave the tier. `slot_bytes`: only one with slots of this
    /// size.
    fn quota_victim(&mut self, owner: Owner, tier: Tier, bytes: Option<u64>) -> Option<u32> {
        let mut at = self.quotas.holding(owner).chains.of(tier).back();
        let mut second = None;
        for _ in 0..SCAN_MAX {
            let Some(index) = at else {
                // What leaves a pool is below still; elsewhere, what follows would be of no use.
                return second.filter(|_| tier == Tier::Device);
            };
            let links = match owner {
                Owner::Account(_) => &self.quotas.links,
                Owner::Talk(_) => &self.quotas.talk_links,
            };
            at = links.of(tier).before(index);
            let block = self.table.get(index);
            let fits = bytes.is_none_or(|bytes| slot_bytes(block) == bytes);
            // A path that is too long gives up its oldest turns where that is the rule.
            let by_age = matches!(owner, Owner::Talk(at) if self.quotas.talk(at).rule.is_by_age());
            let since = self.quotas.storing_since.filter(|_| !by_age);
            let stored_now = since.is_some_and(|since| block.used_tick() >= since);
            if !fits || stored_now || !self.may_leave(index, tier) {
                continue;
            }
            match self.may_lose(owner, index, block) {
                Lose::Yes => return Some(index),
                Lose::Rather => second = second.or(Some(index)),
                Lose::No => {}
                Lose::Never => {
                    // It is out of the way of the next search.
                    let (chain, links) = self.quotas.chain(owner, tier);
                    links.move_front(chain, index);
                }
            }
        }
        second
    }

    /// Whether the owner's rule lets the block go.
    fn may_lose(&self, owner: Owner, index: u32, block: &Block) -> Lose {
        let leaf = self.table.child(index, |child| !child.is_ghost()).is_none();
        let Owner::Talk(at) = owner else {
            return if leaf { Lose::Yes } else { Lose::Rather };
        };
        let talk = self.quotas.talk(at);
        match talk.rule {
            KeepRule::DropTail if leaf => Lose::Yes,
            KeepRule::DropTail => Lose::No,
            KeepRule::KeepTurns { prefix_blocks, .. } if block.position < prefix_blocks => {
                Lose::Never
            }
            KeepRule::KeepTurns { turns, .. } => {
                let kept = talk.turns.len().saturating_sub(turns.clamp(1, TURNS_MAX) as usize);
                let kept = talk.turns.get(kept).copied().unwrap_or(u64::MAX);
                let shared = self.table.branches(index) && !leaf;
                if block.sequence >= kept || shared { Lose::No } else { Lose::Yes }
            }
        }
    }

    /// Whether the block's copy in the tier may be dropped without I/O and without breaking a
    /// promise. On nvme only one that is nowhere else: the others would be written again.
    fn may_leave(&self, index: u32, tier: Tier) -> bool {
        let block = self.table.get(index);
        match tier {
            Tier::Host => self.leaves(Home::Host, index) == Leave::Yes,
            Tier::Device => block
                .device_slot()
                .is_some_and(|(gpu, _)| self.leaves(Home::Device(gpu), index) == Leave::Yes),
            Tier::Nvme => {
                let only = block.host == HostCopy::Absent && block.device_slot().is_none();
                only && block.pins == 0
                    && !block.is_filling()
                    && matches!(block.nvme, NvmeCopy::Resident(_))
            }
        }
    }

    fn evict_for(&mut self, owner: Owner, tier: Tier, index: u32) {
        let block = self.table.get(index);
        let (namespace, number, key) = (block.namespace, block.conversation, block.key);
        let (parent, position) = (block.parent, block.position);
        let reached = parent == NIL || !self.table.get(parent).is_ghost();
        let reference = self.table.reference(index);
        let gpu = block.device_slot().map(|(gpu, _)| gpu);
        self.count_evicted(owner, tier);
        match (tier, gpu) {
            (Tier::Host, _) => self.evict(Home::Host, index),
            (Tier::Device, Some(gpu)) => self.evict(Home::Device(gpu), index),
            (Tier::Device, None) => {}
            (Tier::Nvme, _) => {
                if let Some(nvme) = &mut self.nvme {
                    nvme.evicted += 1;
                }
                self.drop_nvme(index, false);
                self.after_loss(index);
            }
        }
        let lost = self.table.resolve(reference).is_none_or(|at| self.table.get(at).is_ghost());
        if lost && matches!(owner, Owner::Talk(_)) {
            self.note_dropped((namespace, number), &key, position, reached);
        }
    }

    /// A block of a conversation was dropped, or is not stored, for its quota. `reached`: the block
    /// before it is there, so that a lookup misses this one first.
    pub(in super::super) fn note_dropped(
        &mut self,
        name: (NamespaceId, u64),
        key: &BlockKey,
        position: u32,
        reached: bool,
    ) {
        let Some(at) = self.quotas.talk_of(name.0, name.1, true) else {
            return;
        };
        let hole = short_key(name.0, key);
        let talk = self.quotas.talk_mut(at);
        let dropped = &mut talk.dropped;
        if dropped.end == 0 {
            dropped.first = position;
        }
        dropped.first = dropped.first.min(position);
        dropped.end = dropped.end.max(position + 1);
        dropped.blocks += 1;
        if !reached || talk.holes.contains(&hole) {
            return;
        }
        talk.holes.push_back(hole);
        let old = (talk.holes.len() > HOLES_MAX).then(|| talk.holes.pop_front()).flatten();
        self.quotas.holes.insert(hole, at);
        if let Some(old) = old {
            self.quotas.holes.remove(&old);
        }
    }

    /// What the conversation lost of which a lookup misses this key first.
    pub(in super::super) fn dropped_at(
        &self,
        prefix: &PrefixQuery,
        found: usize,
    ) -> Option<Dropped> {
        if self.quotas.holes.is_empty() {
            return None;
        }
        let hole = short_key(prefix.namespace, prefix.keys.get(found)?);
        let at = *self.quotas.holes.get(&hole)?;
        let talk = self.quotas.talk(at);
        Some(Dropped { rule: talk.rule, ..talk.dropped })
    }

    /// The client declares which blocks its conversation loses first.
    pub(in super::super) fn keep(
        &mut self,
        namespace: NamespaceId,
        conversation: u64,
        rule: KeepRule,
    ) -> ConversationUse {
        let Some(at) = self.quotas.talk_of(namespace, conversation, true) else {
            return ConversationUse::default();
        };
        self.quotas.talk_mut(at).rule = rule;
        self.quotas.conversation_use(at)
    }

    /// The block that leaves a full tier before any other, because its owner has more than its
    /// soft quota.
    pub(in super::super) fn soft_victim(&mut self, home: Home, bytes: u64) -> Option<u32> {
        let tier = home.tier();
        if self.quotas.over_soft.of(tier).is_empty() {
            return None;
        }
        for owner in self.soft_owners(tier) {
            let victim = self.quota_victim(owner, tier, Some(bytes)).filter(|index| match home {
                Home::Host => true,
                Home::Device(gpu) => {
                    let on = self.table.get(*index).device_slot();
                    on.is_some_and(|(on, _)| on == gpu)
                }
            });
            if victim.is_some() {
                self.count_evicted(owner, tier);
                return victim;
            }
        }
        None
    }

    /// Those over their soft quota: tenants by how much, then some conversations.
    fn soft_owners(&self, tier: Tier) -> Vec<Owner> {
        let over = self.quotas.over_soft.of(tier);
        let tenants = over.range(..Owner::Talk(0));
        let excess = |owner: &Owner| {
            let soft = self.quotas.limit(*owner, tier).soft.unwrap_or(0);
            (self.held(*owner, tier).saturating_sub(soft), *owner)
        };
        let mut tenants: Vec<(u64, Owner)> = tenants.map(excess).collect();
        tenants.sort_unstable_by(|left, right| right.cmp(left));
        tenants.truncate(SOFT_OWNERS_MAX);
        let talks = over.range(Owner::Talk(0)..).take(SOFT_OWNERS_MAX).copied();
        tenants.into_iter().map(|(_, owner)| owner).chain(talks).collect()
    }

    /// Before a segment is reclaimed: blocks of those over their soft quota leave nvme.
    pub(in super::super) fn drop_over_soft(&mut self) {
        for owner in self.soft_owners(Tier::Nvme) {
            let soft = self.quotas.limit(owner, Tier::Nvme).soft.unwrap_or(u64::MAX);
            for _ in 0..SOFT_NVME_MAX {
                if *self.quotas.holding(owner).used.of(Tier::Nvme) <= soft {
                    break;
                }
                match self.quota_victim(owner, Tier::Nvme, None) {
                    Some(victim) => self.evict_for(owner, Tier::Nvme, victim),
                    None => break,
                }
            }
        }
    }

    /// Brings owners back below their quotas who are above: after a restart, for instance, with
    /// lower ones. A bounded number of blocks each time.
    pub(in super::super) fn trim_quotas(&mut self) {
        for tier in TIERS {
            let over: Vec<Owner> =
                self.quotas.over_hard.of(tier).iter().take(TRIM_MAX).copied().collect();
            for owner in over {
                let most = self.quotas.limit(owner, tier).hard.unwrap_or(u64::MAX);
                for _ in 0..TRIM_MAX {
                    if *self.quotas.holding(owner).used.of(tier) <= most {
                        break;
                    }
                    match self.quota_victim(owner, tier, None) {
                        Some(victim) => self.evict_for(owner, tier, victim),
                        None => break,
                    }
                }
            }
        }
    }

    /// A dirty block that will have to leave host RAM soon because its owner is near its quota.
    pub(in super::super) fn next_tight(&mut self) -> Option<u32> {
        while let Some(owner) = self.quotas.tight.first().copied() {
            let mut at = self.quotas.holding(owner).chains.of(Tier::Host).back();
            for _ in 0..TIGHT_SCAN_MAX {
                let Some(index) = at else { break };
                if self.host.dirty.contains(index) {
                    return Some(index);
                }
                let links = match owner {
                    Owner::Account(_) => &self.quotas.links,
                    Owner::Talk(_) => &self.quotas.talk_links,
                };
                at = links.of(Tier::Host).before(index);
            }
            self.quotas.tight.remove(&owner);
        }
        None
    }
}

/// Whether an owner may lose a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lose {
    Yes,
    /// If there is no other.
    Rather,
    No,
    /// Not now and not later.
    Never,
}
