//! What tenants and conversations hold in each tier, in which order it is to leave, and what they
//! may hold at most.
//!
//! Invariants: what is charged is the sum over the copies that there are, at any time; every event
//! costs the same however much is held; with no limit configured nothing is kept but one sum for
//! each tenant and tier. The numbers of conversations are the clients', so those that hold nothing
//! are remembered in a bounded number.

mod chains;
mod room;

use std::collections::{BTreeSet, HashMap, VecDeque};

use self::chains::{Chain, Links};
use super::CatalogConfig;
use super::request::{RejectReason, SessionId, TenantId, Tier};
use super::segments::own_logs;
use crate::block::NamespaceId;
use crate::catalog::quota::{
    ConversationUse, Dropped, KeepRule, OwnerQuotas, OwnerUse, Quota, QuotaUse, TierQuotas,
};

/// Conversations that hold nothing and are remembered, for their rules and for what they lost.
const IDLE_MAX: usize = 65_536;

/// Turns of a conversation that are told apart.
const TURNS_MAX: u32 = 64;

/// Places at which lookups are told of what a conversation lost.
const HOLES_MAX: usize = 4;

/// One value for each tier.
#[derive(Clone, Copy, Default, Debug)]
struct PerTier<T> {
    device: T,
    host: T,
    nvme: T,
}

impl<T> PerTier<T> {
    fn of(&self, tier: Tier) -> &T {
        match tier {
            Tier::Device => &self.device,
            Tier::Host => &self.host,
            Tier::Nvme => &self.nvme,
        }
    }

    fn of_mut(&mut self, tier: Tier) -> &mut T {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
            Tier::Nvme => &mut self.nvme,
        }
    }
}

const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Nvme];

/// Who is charged: an account, or one conversation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Owner {
    Account(u32),
    Talk(u32),
}

/// What one owner holds.
#[derive(Default)]
struct Holding {
    used: PerTier<u64>,
    /// Bytes that are being written to nvme.
    writing: u64,
    chains: PerTier<Chain>,
    evicted: PerTier<u64>,
}

impl Holding {
    fn is_empty(&self) -> bool {
        TIERS.iter().all(|tier| *self.used.of(*tier) == 0)
    }

    fn uses(&self, limits: &TierQuotas) -> Vec<QuotaUse> {
        let one = |tier| QuotaUse {
            tier,
            used_bytes: *self.used.of(tier),
            quota: limits.of(tier),
            evicted: *self.evicted.of(tier),
        };
        TIERS.map(one).to_vec()
    }
}

/// A tenant, or a namespace whose tenant is not known yet.
#[derive(Default)]
struct Account {
    tenant: Option<TenantId>,
    limits: OwnerQuotas,
    holding: Holding,
    refused: u64,
    /// Conversations that hold blocks.
    talks: u64,
    /// Its blocks go to a log of segments of their own.
    own_log: bool,
}

/// One conversation.
#[derive(Default)]
struct Talk {
    name: (NamespaceId, u64),
    holding: Holding,
    rule: KeepRule,
    /// The number of the first block stored in each of the last turns.
    turns: VecDeque<u64>,
    /// The session of the last turn, and its lookups until then.
    turn: Option<(SessionId, u64)>,
    /// Stand for keys that a lookup misses first.
    holes: VecDeque<u64>,
    dropped: Dropped,
    /// Distinguishes the lives of this entry.
    life: u32,
}

/// All accounts and conversations.
pub(crate) struct Quotas {
    config: HashMap<TenantId, OwnerQuotas>,
    /// Whether anybody has a limit: only then are there orders.
    limited: bool,
    /// The same for conversations.
    talks_limited: bool,
    accounts: Vec<Account>,
    by_tenant: HashMap<TenantId, u32>,
    by_namespace: HashMap<NamespaceId, u32>,
    /// The account that was asked for last.
    last: Option<(NamespaceId, u32)>,
    links: PerTier<Links>,
    talk_links: PerTier<Links>,
    talks: Vec<Talk>,
    talks_free: Vec<u32>,
    by_name: HashMap<(NamespaceId, u64), u32>,
    /// Conversations that came to hold nothing, by entry and life, oldest first.
    idle: VecDeque<(u32, u32)>,
    holes: HashMap<u64, u32>,
    over_soft: PerTier<BTreeSet<Owner>>,
    over_hard: PerTier<BTreeSet<Owner>>,
    /// For each log of segments beside the first one: the hard quotas of the tenants who write
    /// there, bytes. Empty where nobody has a limit.
    logs: Vec<u64>,
    /// Owners that soon need room in host RAM: their blocks must be on nvme to leave.
    tight: BTreeSet<Owner>,
    /// Why the last slot that was asked for was refused, if that was for a quota.
    refusal: Option<RejectReason>,
    /// What is used from this number on belongs to the path that is being stored.
    storing_since: Option<u64>,
}

impl Quotas {
    pub(crate) fn new(config: &CatalogConfig) -> Quotas {
        let limited = |of: fn(&OwnerQuotas) -> &TierQuotas| {
            config.quotas.iter().any(|(_, quotas)| of(quotas).is_limited())
        };
        let talks_limited = limited(|quotas| &quotas.conversation);
        let limited = talks_limited || limited(|quotas| &quotas.all);
        let logs = config.nvme.as_ref().map_or(0, |nvme| own_logs(nvme.geometry.segments));
        Quotas {
            config: config.quotas.iter().copied().collect(),
            limited,
            talks_limited,
            accounts: Vec::new(),
            by_tenant: HashMap::new(),
            by_namespace: HashMap::new(),
            last: None,
            links: PerTier::default(),
            talk_links: PerTier::default(),
            talks: Vec::new(),
            talks_free: Vec::new(),
            by_name: HashMap::new(),
            idle: VecDeque::new(),
            holes: HashMap::new(),
            over_soft: PerTier::default(),
            over_hard: PerTier::default(),
            logs: if limited { vec![0; logs as usize] } else { Vec::new() },
            tight: BTreeSet::new(),
            refusal: None,
            storing_since: None,
        }
    }

    /// Whether anybody has a limit.
    pub(super) fn is_limited(&self) -> bool {
        self.limited
    }

    /// Why the slot that was asked for last was refused, if that was for a quota.
    pub(super) fn refusal(&self) -> Option<RejectReason> {
        self.refusal
    }

    fn account(&self, at: u32) -> &Account {
        self.accounts.get(at as usize).expect("account numbers come from this table")
    }

    fn account_mut(&mut self, at: u32) -> &mut Account {
        self.accounts.get_mut(at as usize).expect("account numbers come from this table")
    }

    fn talk(&self, at: u32) -> &Talk {
        self.talks.get(at as usize).expect("numbers of conversations come from this table")
    }

    fn talk_mut(&mut self, at: u32) -> &mut Talk {
        self.talks.get_mut(at as usize).expect("numbers of conversations come from this table")
    }

    fn holding(&self, owner: Owner) -> &Holding {
        match owner {
            Owner::Account(at) => &self.account(at).holding,
            Owner::Talk(at) => &self.talk(at).holding,
        }
    }

    fn holding_mut(&mut self, owner: Owner) -> &mut Holding {
        match owner {
            Owner::Account(at) => &mut self.account_mut(at).holding,
            Owner::Talk(at) => &mut self.talk_mut(at).holding,
        }
    }

    /// The owner's holding, and the links of its chain.
    fn chain(&mut self, owner: Owner, tier: Tier) -> (&mut Chain, &mut Links) {
        let (holding, links) = match owner {
            Owner::Account(at) => {
                let account = self.accounts.get_mut(at as usize);
                (account.map(|account| &mut account.holding), &mut self.links)
            }
            Owner::Talk(at) => {
                let talk = self.talks.get_mut(at as usize);
                (talk.map(|talk| &mut talk.holding), &mut self.talk_links)
            }
        };
        let holding = holding.expect("owners come from these tables");
        (holding.chains.of_mut(tier), links.of_mut(tier))
    }

    fn new_account(&mut self, account: Account) -> u32 {
        self.accounts.push(account);
        self.accounts.len() as u32 - 1
    }

    /// The account of a namespace, made when nothing of it was seen before.
    fn account_of(&mut self, namespace: NamespaceId) -> u32 {
        if let Some((_, at)) = self.last.filter(|(last, _)| *last == namespace) {
            return at;
        }
        let at = match self.by_namespace.get(&namespace) {
            Some(at) => *at,
            None => {
                let at = self.new_account(Account::default());
                self.by_namespace.insert(namespace, at);
                at
            }
        };
        self.last = Some((namespace, at));
        at
    }

    /// A namespace belongs to this tenant, to whom goes what was found of it before.
    pub(super) fn bind(&mut self, namespace: NamespaceId, tenant: TenantId) {
        let at = match self.by_tenant.get(&tenant) {
            Some(at) => *at,
            None => {
                let limits = self.config.get(&tenant).copied().unwrap_or_default();
                let tenant_account = Account { tenant: Some(tenant), limits, ..Account::default() };
                let at = self.new_account(tenant_account);
                self.by_tenant.insert(tenant, at);
                at
            }
        };
        let old = *self.by_namespace.entry(namespace).or_insert(at);
        if old == at || self.account(old).tenant.is_some() {
            return;
        }
        self.by_namespace.insert(namespace, at);
        self.last = None;
        let found = std::mem::take(self.account_mut(old));
        for tier in TIERS {
            let (chain, links) = self.chain(Owner::Account(at), tier);
            links.append(chain, *found.holding.chains.of(tier));
            let account = self.account_mut(at);
            *account.holding.used.of_mut(tier) += found.holding.used.of(tier);
            self.settle(Owner::Account(at), tier);
        }
        let account = self.account_mut(at);
        account.talks += found.talks;
        account.holding.writing += found.holding.writing;
    }

    fn limit(&self, owner: Owner, tier: Tier) -> Quota {
        match owner {
            Owner::Account(at) => self.account(at).limits.all.of(tier),
            Owner::Talk(at) => {
                let account = self.by_namespace.get(&self.talk(at).name.0);
                let limits = account.map(|at| self.account(*at).limits.conversation);
                limits.unwrap_or_default().of(tier)
            }
        }
    }

    /// The conversation, if conversations have limits and it has a number. `make`: also when
    /// nothing was seen of it before.
    fn talk_of(&mut self, namespace: NamespaceId, number: u64, make: bool) -> Option<u32> {
        if !self.talks_limited || number == 0 {
            return None;
        }
        let name = (namespace, number);
        if let Some(at) = self.by_name.get(&name) {
            return Some(*at);
        }
        if !make {
            return None;
        }
        let at = self.talks_free.pop().unwrap_or_else(|| {
            self.talks.push(Talk::default());
            self.talks.len() as u32 - 1
        });
        let life = self.talk(at).life.wrapping_add(1);
        *self.talk_mut(at) = Talk { name, life, ..Talk::default() };
        self.by_name.insert(name, at);
        self.let_idle(at);
        Some(at)
    }

    /// A conversation holds nothing. The one that has been so for longest may be forgotten.
    fn let_idle(&mut self, at: u32) {
        let life = self.talk(at).life;
        self.idle.push_back((at, life));
        while self.idle.len() > IDLE_MAX {
            let Some((at, life)) = self.idle.pop_front() else { return };
            let talk = self.talk(at);
            if talk.life == life && talk.holding.is_empty() {
                let (name, holes) = (talk.name, talk.holes.clone());
                self.by_name.remove(&name);
                for hole in holes {
                    self.holes.remove(&hole);
                }
                self.talk_mut(at).life = life.wrapping_add(1);
                self.talks_free.push(at);
            }
        }
    }

    fn owners(&mut self, namespace: NamespaceId, number: u64) -> (Option<Owner>, Owner) {
        let account = Owner::Account(self.account_of(namespace));
        (self.talk_of(namespace, number, true).map(Owner::Talk), account)
    }

    /// A block has a copy there from now on.
    fn add(&mut self, index: u32, namespace: NamespaceId, number: u64, tier: Tier, bytes: u64) {
        let (talk, account) = self.owners(namespace, number);
        if let Some(owner) = talk
            && self.holding(owner).is_empty()
        {
            let at = self.account_of(namespace);
            self.account_mut(at).talks += 1;
        }
        for owner in talk.into_iter().chain([account]) {
            *self.holding_mut(owner).used.of_mut(tier) += bytes;
            if self.limited {
                let (chain, links) = self.chain(owner, tier);
                links.push_front(chain, index);
                self.settle(owner, tier);
            }
        }
    }

    /// A block has no copy there any more.
    fn remove(&mut self, index: u32, namespace: NamespaceId, number: u64, tier: Tier, bytes: u64) {
        let (talk, account) = self.owners(namespace, number);
        for owner in talk.into_iter().chain([account]) {
            *self.holding_mut(owner).used.of_mut(tier) -= bytes;
            if self.limited {
                let (chain, links) = self.chain(owner, tier);
                links.remove(chain, index);
                self.settle(owner, tier);
            }
        }
        self.note_empty(talk, namespace);
    }

    fn note_empty(&mut self, talk: Option<Owner>, namespace: NamespaceId) {
        if let Some(Owner::Talk(at)) = talk
            && self.talk(at).holding.is_empty()
        {
            let account = self.account_of(namespace);
            self.account_mut(account).talks -= 1;
            self.let_idle(at);
        }
    }

    /// Bytes begin or end to be written to nvme, where they are charged once they are there.
    fn writing(&mut self, namespace: NamespaceId, number: u64, bytes: u64, begins: bool) {
        let (talk, account) = self.owners(namespace, number);
        for owner in talk.into_iter().chain([account]) {
            let holding = self.holding_mut(owner);
            holding.writing =
                if begins { holding.writing + bytes } else { holding.writing - bytes };
        }
    }

    /// Sorts the owner in by what it holds now.
    fn settle(&mut self, owner: Owner, tier: Tier) {
        let quota = self.limit(owner, tier);
        if quota == Quota::default() {
            return;
        }
        let used = *self.holding(owner).used.of(tier);
        put(self.over_soft.of_mut(tier), owner, quota.soft.is_some_and(|most| used > most));
        put(self.over_hard.of_mut(tier), owner, quota.hard.is_some_and(|most| used > most));
        if tier == Tier::Host && quota.hard.is_some_and(|most| used > most - most / 4) {
            self.tight.insert(owner);
        }
    }

    /// The block was used.
    fn touch(&mut self, index: u32, namespace: NamespaceId, number: u64, tier: Tier) {
        let account = Owner::Account(self.account_of(namespace));
        let talk = self.talk_of(namespace, number, false);
        // What is dropped by age stays in the order in which it came.
        let talk = talk.filter(|at| !self.talk(*at).rule.is_by_age()).map(Owner::Talk);
        for owner in talk.into_iter().chain([account]) {
            let (chain, links) = self.chain(owner, tier);
            links.move_front(chain, index);
        }
    }

    /// A client stores blocks of a conversation: in the turn that is under way, or in a new one.
    fn begin_turn(&mut self, name: (NamespaceId, u64), turn: (SessionId, u64), sequence: u64) {
        let Some(at) = self.talk_of(name.0, name.1, true) else {
            return;
        };
        let talk = self.talk_mut(at);
        if talk.turn.replace(turn) != Some(turn) {
            talk.turns.push_back(sequence);
            if talk.turns.len() > TURNS_MAX as usize {
                talk.turns.pop_front();
            }
        }
    }

    /// What tenants and shared namespaces hold, by number.
    pub(super) fn uses(&self) -> Vec<OwnerUse> {
        let of = |account: &Account| {
            account.tenant.map(|owner| OwnerUse {
                owner,
                tiers: account.holding.uses(&account.limits.all),
                conversation: account.limits.conversation,
                conversations: account.talks,
                refused: account.refused,
            })
        };
        let mut uses: Vec<OwnerUse> = self.accounts.iter().filter_map(of).collect();
        uses.sort_by_key(|each| each.owner);
        uses
    }

    fn conversation_use(&self, at: u32) -> ConversationUse {
        let talk = self.talk(at);
        let account = self.by_namespace.get(&talk.name.0);
        let limits = account.map(|at| self.account(*at).limits.conversation).unwrap_or_default();
        ConversationUse { tiers: talk.holding.uses(&limits), dropped: talk.dropped.blocks }
    }

    #[cfg(test)]
    pub(super) fn owners_over_hard(&self) -> usize {
        TIERS.iter().map(|tier| self.over_hard.of(*tier).len()).sum()
    }

    #[cfg(test)]
    pub(super) fn talks_known(&self) -> usize {
        self.by_name.len()
    }

    /// Bytes that an owner holds, for tests.
    #[cfg(test)]
    pub(super) fn used(&self, namespace: NamespaceId, number: Option<u64>, tier: Tier) -> u64 {
        match number {
            None => {
                let at = self.by_namespace.get(&namespace);
                at.map_or(0, |at| *self.account(*at).holding.used.of(tier))
            }
            Some(number) => {
                let at = self.by_name.get(&(namespace, number));
                at.map_or(0, |at| *self.talk(*at).holding.used.of(tier))
            }
        }
    }
}

fn put(set: &mut BTreeSet<Owner>, owner: Owner, there: bool) {
    if there {
        set.insert(owner);
    } else {
        set.remove(&owner);
    }
}
