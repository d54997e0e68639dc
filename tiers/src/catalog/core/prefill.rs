//! Admission of prefills: after a node is lost, or an empty one joins, everybody computes at once.
//!
//! What a prefill costs is counted in tokens, each weighted by the context that it looks at. A
//! second admits so much, and so much is under way at most; after a cold start both begin with a
//! tenth and grow. Tenants share by weight: the one that got least for its weight is next, and
//! within a tenant who asked first. Who is next and does not fit yet is waited for, so that large
//! prefills do not starve. Who asks for what somebody else is computing waits for that.
//!
//! Clients ask again until they are admitted. What was set aside for one that does not come back
//! is given to the next. With no limit configured everything is admitted and nothing is kept.
//!
//! Invariants: weighted tokens under way are those of the grants; more than the limit only when a
//! single prefill is; an ask has one place; the queues, and what leads a prefix, have limits.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::Catalog;
use super::advice::{GrantId, PrefillAnswer, PrefillAsk, PrefillStats, WaitReason};
use super::request::{Refusal, Reply, SessionId, TenantId, Timestamp};
use crate::block::{BlockKey, NamespaceId};

/// What is left unused can be made up for within so long, milliseconds.
const BURST_MS: f64 = 1000.0;

/// The part of the budget with which it begins after a cold start.
const RAMP_FROM: f64 = 0.1;

/// The shortest and the longest time after which to ask again, milliseconds.
const WAIT_MS: (u64, u64) = (10, 250);

/// How long to wait where nothing says how long it will take, milliseconds.
const WAIT_MS_UNKNOWN: u64 = 50;

/// How long who finds the queue full should stay away, milliseconds.
const WAIT_MS_FULL: u32 = 1000;

/// How much later than told a client may ask again before its place is lost, milliseconds.
const LATE_MS: u64 = 5000;

/// Grants under way at most.
const GRANTS_MAX: usize = 65_536;

/// Prefixes that somebody computes, or has computed just now, at most.
const LEADERS_MAX: usize = 65_536;

/// Parts of a token of a tenant with the largest weight, so that its time is a whole number.
const TIME_PARTS: u128 = 1 << 20;

/// How much may be computed at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefillConfig {
    /// Weighted tokens that a second admits. Default: not limited.
    pub tokens_per_second: Option<u64>,
    /// Weighted tokens under way. Default: not limited.
    pub tokens_in_flight: Option<u64>,
    /// The context with which a token costs twice as much as without. Default: 32,768.
    pub quadratic_tokens: u64,
    /// Asks of one tenant that wait at most. Default: 1,024.
    pub queue: usize,
    /// A grant whose end nobody reports ends after so long, milliseconds. Default: 120,000.
    pub grant_ms: u64,
    /// How long the budget takes to its full size after a cold start, milliseconds. Default:
    /// 30,000.
    pub ramp_ms: u64,
    /// Who would wait for longer, and can do with fewer turns, is told to, milliseconds; 0: never.
    /// Default: 10,000.
    pub degrade_ms: u64,
    /// How long after a prefill its store is waited for by those who want the same,
    /// milliseconds. Default: 2,000.
    pub store_ms: u64,
    /// The weights of tenants, above 0. Who is not named has 1.
    pub weights: Vec<(TenantId, u32)>,
}

impl Default for PrefillConfig {
    fn default() -> PrefillConfig {
        PrefillConfig {
            tokens_per_second: None,
            tokens_in_flight: None,
            quadratic_tokens: 32_768,
            queue: 1024,
            grant_ms: 120_000,
            ramp_ms: 30_000,
            degrade_ms: 10_000,
            store_ms: 2000,
            weights: Vec::new(),
        }
    }
}

/// What makes two asks the same one.
type AskKey = (SessionId, u64, Option<Prefix>);

type Prefix = (NamespaceId, BlockKey);

/// An ask that was not answered with a grant yet.
struct Waiting {
    key: AskKey,
    tenant: TenantId,
    cost: u64,
    /// When it is given up, unless it is asked again.
    until: Timestamp,
    /// Set aside for it.
    grant: Option<GrantId>,
}

struct Grant {
    session: SessionId,
    prefix: Option<Prefix>,
    cost: u64,
    /// Its client knows of it. Until then it is set aside.
    taken: bool,
    /// When it ends at the latest, once it is taken.
    until: Timestamp,
}

/// The asks of one tenant, in their order.
struct Queue {
    weight: u32,
    /// What it got, by its weight.
    time: u128,
    waiting: BTreeSet<u64>,
    cost: u64,
}

/// Who computes a prefix.
struct Leader {
    key: AskKey,
    state: Leading,
}

#[derive(Clone, Copy)]
enum Leading {
    Queued,
    UnderWay { ends: Timestamp },
    Computed { until: Timestamp },
}

#[derive(Default)]
struct Counts {
    admitted: u64,
    admitted_tokens: u64,
    told_to_wait: u64,
    coalesced: u64,
    degraded: u64,
    queue_full: u64,
    lapsed: u64,
}

/// All prefills that are asked for or under way.
pub(super) struct Prefills {
    config: PrefillConfig,
    queues: BTreeMap<TenantId, Queue>,
    waiting: BTreeMap<u64, Waiting>,
    places: HashMap<AskKey, u64>,
    grants: BTreeMap<GrantId, Grant>,
    leaders: HashMap<Prefix, Leader>,
    /// Prefixes that were computed, with the time up to which their store is waited for.
    computed: VecDeque<(Timestamp, Prefix)>,
    in_flight: u64,
    /// Weighted tokens that may be admitted at once; below zero after one that was larger.
    level: f64,
    level_at: Timestamp,
    ramp_from: Option<Timestamp>,
    /// What the tenant got that was served last.
    time: u128,
    next: u64,
    counts: Counts,
}

impl Prefills {
    pub(super) fn new(config: PrefillConfig) -> Prefills {
        Prefills {
            config,
            queues: BTreeMap::new(),
            waiting: BTreeMap::new(),
            places: HashMap::new(),
            grants: BTreeMap::new(),
            leaders: HashMap::new(),
            computed: VecDeque::new(),
            in_flight: 0,
            level: 0.0,
            level_at: Timestamp(0),
            ramp_from: None,
            time: 0,
            next: 0,
            counts: Counts::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
            && self.places.is_empty()
            && self.leaders.is_empty()
            && self.computed.is_empty()
    }

    fn is_on(&self) -> bool {
        self.config.tokens_per_second.is_some() || self.config.tokens_in_flight.is_some()
    }

    /// The daemon has begun to serve: a cold start, unless it has begun before.
    pub(super) fn begin(&mut self, now: Timestamp) {
        if self.ramp_from.is_none() {
            self.ramp(now);
            self.level = self.capacity(now);
        }
    }

    /// Much of what was stored is lost: the budget begins small again.
    pub(super) fn ramp(&mut self, now: Timestamp) {
        self.refill(now);
        self.ramp_from = Some(now);
        self.level = self.level.min(self.capacity(now));
    }

    /// The part of the budget that there is at a time.
    fn part(&self, at: Timestamp) -> f64 {
        let ramp_us = self.config.ramp_ms.saturating_mul(1000);
        let Some(from) = self.ramp_from.filter(|_| ramp_us > 0) else {
            return 1.0;
        };
        let gone = at.0.saturating_sub(from.0).min(ramp_us) as f64 / ramp_us as f64;
        RAMP_FROM + (1.0 - RAMP_FROM) * gone
    }

    fn per_second(&self, now: Timestamp) -> Option<f64> {
        self.config.tokens_per_second.map(|tokens| tokens as f64 * self.part(now))
    }

    fn capacity(&self, now: Timestamp) -> f64 {
        self.per_second(now).map_or(f64::INFINITY, |tokens| tokens * BURST_MS / 1000.0)
    }

    /// Takes in the time that has gone by.
    fn refill(&mut self, now: Timestamp) {
        let from = self.level_at;
        self.level_at = from.max(now);
        let Some(tokens) = self.config.tokens_per_second else {
            return;
        };
        let ramp_us = self.config.ramp_ms.saturating_mul(1000);
        let ramped = Timestamp(self.ramp_from.map_or(0, |ramp| ramp.0.saturating_add(ramp_us)));
        // A straight line up to the end of the ramp, and another one behind it.
        let bend = ramped.clamp(from, self.level_at);
        let seconds = |from: Timestamp, to: Timestamp| to.0.saturating_sub(from.0) as f64 / 1e6;
        let parts = seconds(from, bend) * (self.part(from) + self.part(bend)) / 2.0
            + seconds(bend, self.level_at);
        self.level += tokens as f64 * parts;
        self.level = self.level.min(self.capacity(now));
    }

    /// Tokens, each weighted by the context that it looks at.
    fn cost(&self, ask: &PrefillAsk) -> u64 {
        let tokens = u128::from(ask.tokens.max(1));
        let looks_at = u128::from(ask.context) + tokens / 2;
        let scale = u128::from(self.config.quadratic_tokens.max(1));
        u64::try_from(tokens + tokens * looks_at / scale).unwrap_or(u64::MAX)
    }

    fn affords(&self, cost: u64) -> bool {
        let limit = self.config.tokens_in_flight;
        let limit = limit.map_or(f64::INFINITY, |limit| limit as f64 * self.part(self.level_at));
        let fits = self.in_flight == 0 || self.in_flight.saturating_add(cost) as f64 <= limit;
        let paid = self.config.tokens_per_second.is_none()
            || self.level >= (cost as f64).min(self.capacity(self.level_at));
        fits && paid && self.grants.len() < GRANTS_MAX
    }

    /// Sets budget aside for those whose turn it is, as far as there is some.
    fn promote(&mut self) {
        loop {
            let waiting = self.queues.iter().filter(|(_, queue)| !queue.waiting.is_empty());
            let next = waiting.min_by_key(|(tenant, queue)| (queue.time, **tenant));
            let Some((tenant, place)) =
                next.and_then(|(tenant, queue)| Some((*tenant, *queue.waiting.first()?)))
            else {
                return;
            };
            let Some(cost) = self.waiting.get(&place).map(|ask| ask.cost) else {
                return;
            };
            if !self.affords(cost) {
                return;
            }
            self.leave_queue(tenant, place, cost);
            if let Some(queue) = self.queues.get_mut(&tenant) {
                self.time = self.time.max(queue.time);
                queue.time += time_of(cost, queue.weight);
            }
            self.next += 1;
            let id = GrantId(self.next);
            self.in_flight = self.in_flight.saturating_add(cost);
            self.level -= cost as f64;
            if let Some(ask) = self.waiting.get_mut(&place) {
                ask.grant = Some(id);
                let (session, _, prefix) = ask.key;
                let until = ask.until;
                self.grants.insert(id, Grant { session, prefix, cost, taken: false, until });
            }
        }
    }

    fn leave_queue(&mut self, tenant: TenantId, place: u64, cost: u64) {
        if let Some(queue) = self.queues.get_mut(&tenant)
            && queue.waiting.remove(&place)
        {
            queue.cost = queue.cost.saturating_sub(cost);
        }
    }

    fn enter_queue(&mut self, tenant: TenantId, place: u64, cost: u64) {
        let time = self.time;
        let queue = self.queue_of(tenant);
        if queue.waiting.is_empty() {
            queue.time = queue.time.max(time);
        }
        queue.waiting.insert(place);
        queue.cost = queue.cost.saturating_add(cost);
    }

    fn queue_of(&mut self, tenant: TenantId) -> &mut Queue {
        let weight = self.config.weights.iter().find(|(id, _)| *id == tenant);
        let weight = weight.map_or(1, |(_, weight)| (*weight).max(1));
        let new = || Queue { weight, time: 0, waiting: BTreeSet::new(), cost: 0 };
        self.queues.entry(tenant).or_insert_with(new)
    }

    /// How long all that waits of a tenant will have to, milliseconds.
    fn wait_ms(&self, tenant: TenantId) -> u64 {
        let (Some(queue), Some(tokens)) =
            (self.queues.get(&tenant), self.per_second(self.level_at))
        else {
            return WAIT_MS_UNKNOWN;
        };
        let busy = self.queues.values().filter(|queue| !queue.waiting.is_empty());
        let weights: f64 = busy.map(|queue| f64::from(queue.weight)).sum();
        let share = f64::from(queue.weight) / weights.max(f64::from(queue.weight));
        let missing = queue.cost as f64 / share - self.level;
        (missing.max(0.0) / tokens.max(1e-3) * 1000.0) as u64
    }

    /// Answers whether a prefill may begin. `took_us`: how long it is expected to take; `stored`:
    /// whether its last block is there.
    fn ask(
        &mut self,
        now: Timestamp,
        (session, tenant): (SessionId, TenantId),
        ask: &PrefillAsk,
        (took_us, stored): (Option<f64>, bool),
    ) -> PrefillAnswer {
        if !self.is_on() {
            self.counts.admitted += 1;
            return PrefillAnswer::Admit { grant: None };
        }
        self.refill(now);
        let key = (session, ask.conversation, ask.prefix);
        let cost = self.cost(ask);
        let place = match self.places.get(&key).copied() {
            Some(place) => {
                self.price(place, cost);
                place
            }
            None => {
                if let Some(ms) = self.same_prefix(now, &key, stored) {
                    self.counts.coalesced += 1;
                    return PrefillAnswer::Wait { ms, why: WaitReason::SamePrefix };
                }
                let limit = self.config.queue;
                if self.queue_of(tenant).waiting.len() >= limit {
                    self.counts.queue_full += 1;
                    return PrefillAnswer::Wait { ms: WAIT_MS_FULL, why: WaitReason::QueueFull };
                }
                self.add(now, key, tenant, cost)
            }
        };
        self.promote();
        self.answer(now, place, ask, took_us)
    }

    /// A new ask gets its place.
    fn add(&mut self, now: Timestamp, key: AskKey, tenant: TenantId, cost: u64) -> u64 {
        self.next += 1;
        let place = self.next;
        let until = now.plus_ms(WAIT_MS.1 + LATE_MS);
        self.waiting.insert(place, Waiting { key, tenant, cost, until, grant: None });
        self.places.insert(key, place);
        self.enter_queue(tenant, place, cost);
        if let Some(prefix) = key.2.filter(|_| self.leaders.len() < LEADERS_MAX) {
            self.leaders.insert(prefix, Leader { key, state: Leading::Queued });
        }
        place
    }

    /// The ask is for another number of tokens than before. It keeps its place, but what was set
    /// aside for fewer is given back.
    fn price(&mut self, place: u64, cost: u64) {
        let Some(ask) = self.waiting.get_mut(&place).filter(|ask| ask.cost != cost) else {
            return;
        };
        let (tenant, before, grant) = (ask.tenant, ask.cost, ask.grant);
        if grant.is_some() && cost <= before {
            return;
        }
        ask.cost = cost;
        ask.grant = None;
        match grant {
            Some(grant) => self.give_back(grant, tenant),
            None => self.leave_queue(tenant, place, before),
        }
        self.enter_queue(tenant, place, cost);
    }

    /// A grant that was never used ends.
    fn give_back(&mut self, grant: GrantId, tenant: TenantId) {
        let Some(grant) = self.grants.remove(&grant) else {
            return;
        };
        self.in_flight = self.in_flight.saturating_sub(grant.cost);
        self.level = (self.level + grant.cost as f64).min(self.capacity(self.level_at));
        if let Some(queue) = self.queues.get_mut(&tenant) {
            queue.time = queue.time.saturating_sub(time_of(grant.cost, queue.weight));
        }
    }

    fn answer(
        &mut self,
        now: Timestamp,
        place: u64,
        ask: &PrefillAsk,
        took_us: Option<f64>,
    ) -> PrefillAnswer {
        let Some(waiting) = self.waiting.get(&place) else {
            return PrefillAnswer::Admit { grant: None };
        };
        let (key, tenant) = (waiting.key, waiting.tenant);
        if let Some(id) = waiting.grant {
            self.waiting.remove(&place);
            self.places.remove(&key);
            self.counts.admitted += 1;
            if let Some(grant) = self.grants.get_mut(&id) {
                grant.taken = true;
                grant.until = now.plus_ms(self.config.grant_ms);
                self.counts.admitted_tokens =
                    self.counts.admitted_tokens.saturating_add(grant.cost);
            }
            let took_us = took_us.map_or(WAIT_MS_UNKNOWN * 1000, |us| us as u64);
            let ends = Timestamp(now.0.saturating_add(took_us));
            self.lead(&key, Leading::UnderWay { ends });
            return PrefillAnswer::Admit { grant: Some(id) };
        }
        let ms = self.wait_ms(tenant);
        if let Some(keep_turns) = self.fewer_turns(ask, ms) {
            self.drop_waiting(place);
            self.counts.degraded += 1;
            return PrefillAnswer::Degrade { keep_turns };
        }
        self.counts.told_to_wait += 1;
        let ms = ms.clamp(WAIT_MS.0, WAIT_MS.1);
        if let Some(waiting) = self.waiting.get_mut(&place) {
            waiting.until = now.plus_ms(ms + LATE_MS);
        }
        PrefillAnswer::Wait { ms: ms as u32, why: WaitReason::Turn }
    }

    /// The turns with which the prefill would not wait for too long, at least one; `None` when it
    /// does not wait for too long, or cannot leave any out.
    fn fewer_turns(&self, ask: &PrefillAsk, ms: u64) -> Option<u32> {
        let turns = ask.turns.filter(|turns| *turns > 1)?;
        let limit = self.config.degrade_ms;
        if limit == 0 || ms <= limit {
            return None;
        }
        let keep = u128::from(turns) * u128::from(limit) / u128::from(ms);
        Some((keep as u32).clamp(1, turns - 1))
    }

    /// Notes how far the prefix is, if this ask leads it.
    fn lead(&mut self, key: &AskKey, state: Leading) {
        let leader = key.2.and_then(|prefix| self.leaders.get_mut(&prefix));
        if let Some(leader) = leader.filter(|leader| leader.key == *key) {
            leader.state = state;
        }
    }

    fn end_lead(&mut self, key: &AskKey) {
        if let Some(prefix) = key.2
            && self.leaders.get(&prefix).is_some_and(|leader| leader.key == *key)
        {
            self.leaders.remove(&prefix);
        }
    }

    /// How long to wait for somebody else who computes the same prefix, milliseconds.
    fn same_prefix(&self, now: Timestamp, key: &AskKey, stored: bool) -> Option<u32> {
        let leader = self.leaders.get(&key.2?).filter(|leader| leader.key != *key)?;
        let ms = match leader.state {
            Leading::Queued => WAIT_MS.1,
            Leading::UnderWay { ends } => ends.0.saturating_sub(now.0).div_ceil(1000),
            Leading::Computed { until } if until <= now => return None,
            // It was stored after this client looked it up.
            Leading::Computed { .. } if stored => 1,
            Leading::Computed { .. } => WAIT_MS_UNKNOWN,
        };
        let least = if stored { 1 } else { WAIT_MS.0 };
        Some(ms.clamp(least, WAIT_MS.1) as u32)
    }

    /// A prefill of the session ended. Says whether it was under way.
    pub(super) fn done(&mut self, now: Timestamp, session: SessionId, id: GrantId) -> bool {
        let own = |grant: &&Grant| grant.session == session && grant.taken;
        let Some(grant) = self.grants.get(&id).filter(own) else {
            return false;
        };
        let (prefix, cost) = (grant.prefix, grant.cost);
        self.grants.remove(&id);
        self.in_flight = self.in_flight.saturating_sub(cost);
        if let Some(prefix) = prefix
            && let Some(leader) = self.leaders.get_mut(&prefix)
            && leader.key.0 == session
            && matches!(leader.state, Leading::UnderWay { .. })
        {
            let until = now.plus_ms(self.config.store_ms);
            leader.state = Leading::Computed { until };
            self.computed.push_back((until, prefix));
            if self.computed.len() > LEADERS_MAX
                && let Some((until, oldest)) = self.computed.pop_front()
            {
                self.forget_computed(oldest, until);
            }
        }
        self.refill(now);
        self.promote();
        true
    }

    /// The store of a prefix is not waited for any longer, unless it was computed again since.
    fn forget_computed(&mut self, prefix: Prefix, by: Timestamp) {
        let state = self.leaders.get(&prefix).map(|leader| leader.state);
        if matches!(state, Some(Leading::Computed { until }) if until <= by) {
            self.leaders.remove(&prefix);
        }
    }

    /// An ask is given up.
    fn drop_waiting(&mut self, place: u64) {
        let Some(ask) = self.waiting.remove(&place) else {
            return;
        };
        self.places.remove(&ask.key);
        self.end_lead(&ask.key);
        match ask.grant {
            Some(grant) => self.give_back(grant, ask.tenant),
            None => self.leave_queue(ask.tenant, place, ask.cost),
        }
    }

    /// A grant ends although nobody said that the prefill has.
    fn end_grant(&mut self, id: GrantId) {
        let Some(grant) = self.grants.remove(&id) else {
            return;
        };
        self.in_flight = self.in_flight.saturating_sub(grant.cost);
        if let Some(prefix) = grant.prefix
            && let Some(leader) = self.leaders.get(&prefix)
            && leader.key.0 == grant.session
            && matches!(leader.state, Leading::UnderWay { .. })
        {
            self.leaders.remove(&prefix);
        }
    }

    /// A session is gone, with all that it asked for and was given.
    pub(super) fn close_session(&mut self, now: Timestamp, session: SessionId) {
        if self.waiting.is_empty() && self.grants.is_empty() {
            return;
        }
        let asked = self.waiting.iter().filter(|(_, ask)| ask.key.0 == session);
        for place in asked.map(|(place, _)| *place).collect::<Vec<_>>() {
            self.drop_waiting(place);
        }
        let given = self.grants.iter().filter(|(_, grant)| grant.session == session);
        for id in given.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.end_grant(id);
        }
        self.refill(now);
        self.promote();
    }

    /// Time has gone by: what nobody came back for is given to the next.
    pub(super) fn expire(&mut self, now: Timestamp) {
        if !self.is_on() {
            return;
        }
        self.refill(now);
        let late = self.waiting.iter().filter(|(_, ask)| ask.until <= now);
        for place in late.map(|(place, _)| *place).collect::<Vec<_>>() {
            self.counts.lapsed += 1;
            self.drop_waiting(place);
        }
        // Those that are set aside go with their asks.
        let over = self.grants.iter().filter(|(_, grant)| grant.taken && grant.until <= now);
        for id in over.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.counts.lapsed += 1;
            self.end_grant(id);
        }
        while let Some((until, prefix)) = self.computed.front().copied()
            && until <= now
        {
            self.computed.pop_front();
            self.forget_computed(prefix, until);
        }
        self.promote();
    }

    fn stats(&self, now: Timestamp) -> PrefillStats {
        let Counts { admitted, admitted_tokens, told_to_wait, coalesced, .. } = self.counts;
        let Counts { degraded, queue_full, lapsed, .. } = self.counts;
        let queued = self.queues.values().map(|queue| queue.waiting.len()).sum::<usize>();
        PrefillStats {
            rationed: self.is_on(),
            admitted,
            admitted_tokens,
            told_to_wait,
            coalesced,
            degraded,
            queue_full,
            lapsed,
            queued: queued as u32,
            grants: self.grants.len() as u32,
            tokens_in_flight: self.in_flight,
            tokens_per_second: self.per_second(now).map_or(0, |tokens| tokens as u64),
            ..PrefillStats::default()
        }
    }
}

/// What so many tokens are of the share of a tenant.
fn time_of(cost: u64, weight: u32) -> u128 {
    u128::from(cost) * TIME_PARTS / u128::from(weight)
}

impl Catalog {
    pub(super) fn admit_prefill(&mut self, session: SessionId, ask: &PrefillAsk) -> Reply {
        let Some(tenant) = self.tenant_of(session) else {
            return Reply::Refused(Refusal::UnknownSession);
        };
        let (tokens, context) = (f64::from(ask.tokens), f64::from(ask.context));
        let took_us =
            ask.prefix.and_then(|(space, _)| self.arbiter.compute_us(space, tokens, context));
        let found = ask.prefix.and_then(|(space, key)| self.table.find(space, &key));
        let stored = found.is_some_and(|index| self.available(index).is_some());
        let who = (session, tenant);
        Reply::Prefill(self.prefills.ask(self.now, who, ask, (took_us, stored)))
    }

    pub(super) fn prefill_stats(&self) -> PrefillStats {
        let (reports, reports_unused, namespaces_known) = self.arbiter.counts();
        let stats = self.prefills.stats(self.now);
        PrefillStats { reports, reports_unused, namespaces_known, ..stats }
    }
}
