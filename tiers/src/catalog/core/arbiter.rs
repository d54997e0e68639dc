//! Whether a load is worth it: what computing would take, what loading takes, and which tiers lose.
//!
//! How fast an engine computes is learned for each namespace from what its clients report; how fast
//! a tier loads, from loads that ended. Every load of a namespace whose speed is known is judged:
//! what its blocks would have taken to compute, less what they took to load. A tier whose loads
//! come out below zero over a window is withheld from that namespace: lookups end before its
//! blocks, which stay. A small share of lookups is offered it all the same, and when these come out
//! above zero it is offered again.
//!
//! Judged by namespace, because the same drive is worth it for a large model and not for a small
//! one, and because what one tenant reports must not take a tier from another.

use std::collections::{HashMap, VecDeque};

use super::Catalog;
use super::advice::{Advice, PrefillReport, TierWorth, Withheld};
use super::line::Line;
use super::lookup::cut_runs;
use super::request::{
    LeaseId, LookupReply, MissReason, Outcome, PrefixQuery, Reply, Run, SessionId, Tier, Timestamp,
};
use crate::block::{BlockKey, NamespaceId};

/// The tiers, fastest first.
const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Nvme];

/// Namespaces whose speed is known at most; the one that was silent for longest is forgotten.
const NAMESPACES_MAX: usize = 1024;

/// Reports of a namespace that are kept.
const REPORTS_KEPT: usize = 64;

/// Loads of a tier that are kept: few, so that a drive that changes is soon known.
const LOADS_KEPT: usize = 16;

/// How long reports and loads are kept, milliseconds.
const KEPT_MS: u64 = 600_000;

/// Fewer tokens say more about the cost of a call than about that of a token.
const TOKENS_MIN: u32 = 32;

/// What no engine computes, or has before it.
const TOKENS_MAX: u32 = 1 << 26;

/// The longest prefill that is believed, microseconds: an hour.
const TOOK_US_MAX: u64 = 3_600_000_000;

/// What no engine computes in a microsecond.
const TOKENS_PER_US_MAX: u64 = 100;

/// What no engine takes for a token, microseconds.
const US_PER_TOKEN_MAX: u64 = 10_000_000;

/// Parts of the window.
const BUCKETS: u64 = 8;

/// Probes that have to come out above zero together before a tier is offered again.
const PROBES: usize = 3;

/// Tiers of namespaces that `stats` lists.
const WITHHELD_SHOWN: usize = 256;

/// How the arbiter is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArbiterConfig {
    /// Whether tiers that lose are withheld, and splits advised. Default: true.
    pub enabled: bool,
    /// Over how long a tier is judged, milliseconds; longer while there are fewer loads than
    /// `loads_min`. Default: 30,000.
    pub window_ms: u64,
    /// Loads by which it is judged at least. Default: 4.
    pub loads_min: u32,
    /// One lookup in so many is offered a tier that is withheld. Default: 32.
    pub probe_every: u32,
}

impl Default for ArbiterConfig {
    fn default() -> ArbiterConfig {
        ArbiterConfig { enabled: true, window_ms: 30_000, loads_min: 4, probe_every: 32 }
    }
}

/// What is known and counted.
pub(super) struct Arbiter {
    config: ArbiterConfig,
    namespaces: HashMap<NamespaceId, Judged>,
    /// How long loads take, by tier: of bytes, those before them included, and for each load.
    loads: [Line; 3],
    totals: [Totals; 3],
    /// Tiers that are withheld, of all namespaces.
    outs: usize,
    reports: u64,
    reports_unused: u64,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    saved_us: u64,
    lost_us: u64,
    loads: u64,
    advised_against: u64,
    withheld: u64,
    probes: u64,
}

/// One namespace.
struct Judged {
    prefill: Line,
    tiers: [Account; 3],
}

/// What one tier is worth to one namespace.
#[derive(Default)]
struct Account {
    window: Window,
    /// Lookups since the last one that was offered what is withheld or advised against.
    unprobed: u32,
    out: Option<Out>,
}

/// A tier that is withheld.
struct Out {
    since: Timestamp,
    lost_us: u64,
    loads: u32,
    probes: VecDeque<i64>,
}

/// A sum over the latest time, in parts, and over as many loads at least as are judged by: the
/// slower a tier is, the fewer of them there are.
#[derive(Default)]
struct Window {
    parts: VecDeque<(u64, i64, u32)>,
}

impl Window {
    fn add(&mut self, part: u64, net_us: i64, loads_min: u32) {
        match self.parts.back_mut() {
            Some((at, sum, count)) if *at == part => {
                *sum = sum.saturating_add(net_us);
                *count = count.saturating_add(1);
            }
            _ => self.parts.push_back((part, net_us, 1)),
        }
        let (_, mut loads) = self.sum();
        while let Some((at, _, count)) = self.parts.front()
            && at + BUCKETS <= part
            && loads - count >= loads_min
        {
            loads -= count;
            self.parts.pop_front();
        }
    }

    fn sum(&self) -> (i64, u32) {
        let add = |(net, count): (i64, u32), part: &(u64, i64, u32)| {
            (net.saturating_add(part.1), count.saturating_add(part.2))
        };
        self.parts.iter().fold((0, 0), add)
    }
}

/// A load of which the worth is measured.
#[derive(Debug)]
pub(crate) struct Measured {
    namespace: NamespaceId,
    started: Timestamp,
    /// Of each block: its tier, and what computing it would take, microseconds.
    blocks: Vec<(Tier, f32)>,
    parts: [MeasuredPart; 3],
    /// The client, or what it asked for, is to blame for what went wrong.
    void: bool,
    /// The client gave up, or went away, before all had come.
    unawaited: bool,
}

/// The blocks of one tier in a load.
#[derive(Clone, Copy, Debug, Default)]
struct MeasuredPart {
    bytes: f64,
    /// Bytes that were waited for before these.
    ahead: f64,
    blocks: u32,
    loaded: u32,
    compute_us: f64,
    ended: Option<Timestamp>,
}

fn at(tier: Tier) -> usize {
    tier as usize
}

/// Tokens, and what attention has to look at for them: the sum over the tokens of what is before
/// each. Two halves of a prefill come to the same as the whole.
fn work(tokens: f64, context: f64) -> (f64, f64) {
    (tokens, tokens * (context + tokens / 2.0))
}

impl Arbiter {
    pub(super) fn new(config: ArbiterConfig) -> Arbiter {
        Arbiter {
            config,
            namespaces: HashMap::new(),
            loads: [(); 3].map(|()| Line::new(LOADS_KEPT, KEPT_MS)),
            totals: [Totals::default(); 3],
            outs: 0,
            reports: 0,
            reports_unused: 0,
        }
    }

    /// Learns from a report. Says whether it could.
    pub(super) fn report(&mut self, now: Timestamp, report: &PrefillReport) -> bool {
        let PrefillReport { namespace, tokens, context, took_us, .. } = *report;
        let count = u64::from(tokens);
        let good = (TOKENS_MIN..=TOKENS_MAX).contains(&tokens)
            && context <= TOKENS_MAX
            && (1..=TOOK_US_MAX).contains(&took_us)
            && count <= took_us.saturating_mul(TOKENS_PER_US_MAX)
            && took_us <= count.saturating_mul(US_PER_TOKEN_MAX);
        if !good {
            self.reports_unused += 1;
            return false;
        }
        self.reports += 1;
        if !self.namespaces.contains_key(&namespace) && self.namespaces.len() >= NAMESPACES_MAX {
            let silent = self.namespaces.iter().min_by_key(|(id, j)| (j.prefill.last_at(), **id));
            if let Some(id) = silent.map(|(id, _)| *id) {
                self.namespaces.remove(&id);
                self.count_outs();
            }
        }
        let new = || Judged {
            prefill: Line::new(REPORTS_KEPT, KEPT_MS),
            tiers: [(); 3].map(|()| Account::default()),
        };
        let judged = self.namespaces.entry(namespace).or_insert_with(new);
        let (x, y) = work(f64::from(tokens), f64::from(context));
        judged.prefill.note(now, x, y, took_us as f64);
        true
    }

    /// Microseconds that computing takes; `None` while it is not known.
    pub(super) fn compute_us(
        &self,
        namespace: NamespaceId,
        tokens: f64,
        context: f64,
    ) -> Option<f64> {
        let (x, y) = work(tokens, context);
        self.namespaces.get(&namespace)?.prefill.expect(x, y)
    }

    fn part(&self, now: Timestamp) -> u64 {
        now.0 / (self.config.window_ms.max(BUCKETS) * 1000 / BUCKETS)
    }

    /// Judges a tier by one more load, which was done or (`real` false) only thought of.
    fn judge(&mut self, now: Timestamp, namespace: NamespaceId, tier: Tier, net: i64, real: bool) {
        let (part, loads_min) = (self.part(now), self.config.loads_min);
        let Some(judged) = self.namespaces.get_mut(&namespace) else {
            return;
        };
        let Some(account) = judged.tiers.get_mut(at(tier)) else {
            return;
        };
        if let Some(out) = &mut account.out {
            if !real {
                return;
            }
            out.probes.push_back(net);
            if out.probes.len() > PROBES {
                out.probes.pop_front();
            }
            let sum = out.probes.iter().fold(0i64, |sum, net| sum.saturating_add(*net));
            if out.probes.len() == PROBES && sum > 0 {
                account.out = None;
                account.window = Window::default();
                // It is not what it was.
                if let Some(line) = self.loads.get_mut(at(tier)) {
                    line.keep_latest(PROBES);
                }
                self.count_outs();
            }
            return;
        }
        account.window.add(part, net, loads_min);
        let (net, loads) = account.window.sum();
        if self.config.enabled && loads >= loads_min && net < 0 {
            account.window = Window::default();
            account.unprobed = 0;
            let lost_us = net.unsigned_abs();
            account.out = Some(Out { since: now, lost_us, loads, probes: VecDeque::new() });
            self.count_outs();
        }
    }

    fn count_outs(&mut self) {
        let accounts = self.namespaces.values().flat_map(|judged| &judged.tiers);
        self.outs = accounts.filter(|account| account.out.is_some()).count();
    }

    /// Whether this lookup is the one in so many that is offered all there is. Counts it.
    fn is_probe(&mut self, namespace: NamespaceId, tier: Tier) -> bool {
        let every = self.config.probe_every.max(1);
        let judged = self.namespaces.get_mut(&namespace);
        let Some(account) = judged.and_then(|judged| judged.tiers.get_mut(at(tier))) else {
            return false;
        };
        account.unprobed += 1;
        let probe = account.unprobed >= every;
        if probe {
            account.unprobed = 0;
        }
        if let Some(total) = self.totals.get_mut(at(tier)).filter(|_| probe) {
            total.probes += 1;
        }
        probe
    }

    fn is_out(&self, namespace: NamespaceId, tier: Tier) -> bool {
        let judged = self.namespaces.get(&namespace);
        let account = judged.and_then(|judged| judged.tiers.get(at(tier)));
        account.is_some_and(|account| account.out.is_some())
    }

    /// What the tiers were worth, fastest first.
    pub(super) fn worth(&self) -> Vec<TierWorth> {
        let row = |((tier, total), line): ((&Tier, &Totals), &Line)| {
            let out =
                |judged: &&Judged| judged.tiers.get(at(*tier)).is_some_and(|a| a.out.is_some());
            let us_per_byte = line.factors().map(|(a, _)| a).filter(|a| *a > 0.0);
            TierWorth {
                tier: *tier,
                saved_us: total.saved_us,
                lost_us: total.lost_us,
                loads: total.loads,
                advised_against: total.advised_against,
                withheld: total.withheld,
                probes: total.probes,
                bytes_per_second: us_per_byte.map_or(0, |us| (1e6 / us) as u64),
                namespaces_withheld: self.namespaces.values().filter(out).count() as u32,
            }
        };
        TIERS.iter().zip(&self.totals).zip(&self.loads).map(row).collect()
    }

    /// The tiers that are withheld, by namespace.
    pub(super) fn withheld(&self, now: Timestamp) -> Vec<Withheld> {
        let mut list = Vec::new();
        for (namespace, judged) in &self.namespaces {
            for (tier, account) in TIERS.iter().zip(&judged.tiers) {
                let Some(out) = &account.out else { continue };
                let probes = out.probes.iter().fold(0i64, |sum, net| sum.saturating_add(*net));
                list.push(Withheld {
                    namespace: *namespace,
                    tier: *tier,
                    for_us: now.0.saturating_sub(out.since.0),
                    lost_us: out.lost_us,
                    loads: out.loads,
                    probes_net_us: (!out.probes.is_empty()).then_some(probes),
                });
            }
        }
        list.sort_unstable_by_key(|row| (row.namespace, row.tier));
        list.truncate(WITHHELD_SHOWN);
        list
    }

    /// Reports learned from, reports not, namespaces known.
    pub(super) fn counts(&self) -> (u64, u64, u32) {
        let known = self.namespaces.values().filter(|each| each.prefill.factors().is_some());
        (self.reports, self.reports_unused, known.count() as u32)
    }
}

/// A part of a run that is found: so many blocks of one tier.
#[derive(Clone, Copy)]
struct Piece {
    tier: Tier,
    blocks: u32,
}

/// What the blocks of a run have in common.
#[derive(Clone, Copy)]
struct Each {
    namespace: NamespaceId,
    tokens: f64,
    /// Of the block in all prefixes together.
    bytes: f64,
}

/// How much of a run to load, and what then is to be expected.
#[derive(Clone, Copy)]
struct Split {
    load: u32,
    load_us: f64,
    compute_us: f64,
}

impl Split {
    fn total(&self) -> f64 {
        self.load_us + self.compute_us
    }
}

impl Arbiter {
    /// How long loading so many bytes of each tier takes, with what waits there already.
    fn load_us(&self, bytes: &[f64; 3], ahead: &[f64; 3]) -> Option<f64> {
        let mut longest = 0f64;
        for ((line, bytes), ahead) in self.loads.iter().zip(bytes).zip(ahead) {
            if *bytes > 0.0 {
                longest = longest.max(line.expect(bytes + ahead, 1.0)?);
            }
        }
        Some(longest)
    }

    /// The split at which loading and computing the rest take least, and that which loads all.
    ///
    /// Loading is a straight line in the blocks of one tier, and what it spares grows ever faster,
    /// so the best is at the end of a piece, or where one tier's line crosses that of another.
    fn split(&self, each: Each, pieces: &[Piece], ahead: &[f64; 3]) -> Option<(Split, Split)> {
        let blocks: u32 = pieces.iter().map(|piece| piece.blocks).sum();
        let all = f64::from(blocks) * each.tokens;
        let compute = |from: u32| {
            let context = f64::from(from) * each.tokens;
            self.compute_us(each.namespace, all - context, context)
        };
        let mut best = Split { load: 0, load_us: 0.0, compute_us: compute(0)? };
        let mut whole = best;
        let mut bytes = [0f64; 3];
        let mut before = 0;
        for piece in pieces {
            let kink = self.kink(each, *piece, &bytes, ahead);
            for part in kink.into_iter().chain([piece.blocks]) {
                let mut here = bytes;
                add(&mut here, piece.tier, f64::from(part) * each.bytes);
                let load = before + part;
                let load_us = self.load_us(&here, ahead)?;
                whole = Split { load, load_us, compute_us: compute(load)? };
                // What can as well be loaded is.
                if whole.total() <= best.total() {
                    best = whole;
                }
            }
            add(&mut bytes, piece.tier, f64::from(piece.blocks) * each.bytes);
            before += piece.blocks;
        }
        Some((best, whole))
    }

    /// The number of blocks of a piece from which on its tier is the one that is waited for.
    fn kink(&self, each: Each, piece: Piece, bytes: &[f64; 3], ahead: &[f64; 3]) -> Option<u32> {
        let others = self.load_us(bytes, ahead)?;
        let (a, b) = self.loads.get(at(piece.tier))?.factors()?;
        let own = bytes.get(at(piece.tier))? + ahead.get(at(piece.tier))?;
        let blocks = (((others - b) / a - own) / each.bytes).floor();
        (blocks >= 1.0 && blocks < f64::from(piece.blocks)).then_some(blocks as u32)
    }
}

fn add(bytes: &mut [f64; 3], tier: Tier, more: f64) {
    if let Some(sum) = bytes.get_mut(at(tier)) {
        *sum += more;
    }
}

fn whole_us(us: f64) -> u64 {
    us.max(0.0).round() as u64
}

impl Catalog {
    #[cfg(test)]
    pub(super) fn arbiter_is_out(&self, namespace: NamespaceId, tier: Tier) -> bool {
        self.arbiter.is_out(namespace, tier)
    }

    /// Takes a report of a client.
    pub(super) fn report_prefill(&mut self, session: SessionId, report: &PrefillReport) -> Reply {
        let learned = self.arbiter.report(self.now, report);
        if let Some(grant) = report.grant {
            self.prefills.done(self.now, session, grant);
        }
        Reply::Count(u64::from(learned))
    }

    /// Bytes that wait for each tier, where a block has `bytes`.
    fn ahead(&self, bytes: f64) -> [f64; 3] {
        let reads = self.flow.reads + self.flow.urgent.len();
        let copies = self.flow.blocks_open.saturating_sub(reads) as f64 * bytes;
        [copies, copies, reads as f64 * bytes]
    }

    /// Ends the run before the first block of a tier that is withheld from one of the namespaces,
    /// but for one lookup in so many. `asks`: a load is to follow. Says whether it is that one.
    pub(super) fn withhold(
        &mut self,
        prefixes: &[PrefixQuery],
        found: &mut [Vec<u32>],
        reply: &mut LookupReply,
        asks: bool,
    ) -> bool {
        if self.arbiter.outs == 0 {
            return false;
        }
        let (mut before, mut probe) = (0, false);
        for run in reply.runs.clone() {
            let arbiter = &mut self.arbiter;
            let mut spaces = prefixes.iter().map(|prefix| prefix.namespace);
            let Some(namespace) = spaces.find(|space| arbiter.is_out(*space, run.tier)) else {
                before += run.blocks;
                continue;
            };
            if probe || (asks && arbiter.is_probe(namespace, run.tier)) {
                probe = true;
                before += run.blocks;
                continue;
            }
            if let Some(total) = arbiter.totals.get_mut(at(run.tier)).filter(|_| asks) {
                total.withheld += 1;
            }
            let withheld = reply.blocks - before;
            found.iter_mut().for_each(|list| list.truncate(before as usize));
            cut_runs(reply, before);
            reply.advice.withheld = withheld;
            break;
        }
        probe
    }

    /// Adds to the answer what to load of it. `probe`: all of it.
    pub(super) fn advise(
        &mut self,
        prefixes: &[PrefixQuery],
        found: &[Vec<u32>],
        reply: &mut LookupReply,
        (asks, probe): (bool, bool),
    ) {
        let withheld = reply.advice.withheld;
        reply.advice = Advice { withheld, ..Advice::load_all(reply.blocks) };
        let (Some(prefix), false) = (prefixes.first(), self.arbiter.namespaces.is_empty()) else {
            return;
        };
        let firsts = found.iter().filter_map(|list| list.first());
        let firsts: Vec<_> = firsts.map(|index| self.table.get(*index)).collect();
        let Some(tokens) = firsts.first().map(|block| f64::from(block.tokens)) else {
            return;
        };
        let bytes: f64 = firsts.iter().map(|block| f64::from(block.raw_bytes)).sum();
        let namespace = prefix.namespace;
        let each = Each { namespace, tokens, bytes };
        let piece = |run: &Run| Piece { tier: run.tier, blocks: run.blocks };
        let pieces: Vec<Piece> = reply.runs.iter().map(piece).collect();
        let all = tokens * f64::from(reply.blocks);
        let compute_all = self.arbiter.compute_us(namespace, all, 0.0);
        reply.advice.compute_all_us = compute_all.map(whole_us);
        let Some((best, whole)) = self.arbiter.split(each, &pieces, &self.ahead(bytes)) else {
            return;
        };
        let mut said = if self.arbiter.config.enabled && !probe { best } else { whole };
        if said.load < reply.blocks && asks && self.is_advice_probe(namespace, &pieces, best, whole)
        {
            said = whole;
        }
        reply.advice.load = said.load;
        reply.advice.load_us = Some(whole_us(said.load_us));
        reply.advice.compute_us = Some(whole_us(said.compute_us));
    }

    /// What is advised against is judged by what was expected of it; and one lookup in so many is
    /// advised to load it all the same, so that it is known.
    fn is_advice_probe(
        &mut self,
        namespace: NamespaceId,
        pieces: &[Piece],
        best: Split,
        whole: Split,
    ) -> bool {
        let mut before = 0;
        let mut loaded = [false; 3];
        for piece in pieces {
            let tier = at(piece.tier);
            if before >= best.load && !loaded.get(tier).copied().unwrap_or(true) {
                let arbiter = &mut self.arbiter;
                if arbiter.is_probe(namespace, piece.tier) {
                    return true;
                }
                if let Some(total) = arbiter.totals.get_mut(tier) {
                    total.advised_against += 1;
                }
                let net = (best.total() - whole.total()) as i64;
                arbiter.judge(self.now, namespace, piece.tier, net, false);
                return false;
            }
            if let Some(loaded) = loaded.get_mut(tier) {
                *loaded = true;
            }
            before += piece.blocks;
        }
        false
    }

    /// Prepares to measure a load of these blocks; `None` where nobody reports what computing
    /// takes.
    pub(super) fn measure(
        &self,
        namespace: NamespaceId,
        keys: impl Iterator<Item = BlockKey>,
    ) -> Option<Box<Measured>> {
        let judged = self.arbiter.namespaces.get(&namespace)?;
        judged.prefill.factors()?;
        let (blocks, parts) = (Vec::with_capacity(keys.size_hint().0), Default::default());
        let started = self.now;
        let (void, unawaited) = (false, false);
        let mut measured = Measured { namespace, started, blocks, parts, void, unawaited };
        let mut bytes = 0;
        for key in keys {
            let index = self.table.find(namespace, &key);
            let there =
                index.and_then(|index| self.available(index).map(|(tier, _)| (index, tier)));
            let Some((index, tier)) = there else {
                measured.blocks.push((Tier::Host, 0.0));
                continue;
            };
            let block = self.table.get(index);
            let tokens = f64::from(block.tokens);
            let (x, y) = work(tokens, tokens * f64::from(block.position));
            let us = judged.prefill.expect(x, y).unwrap_or_default();
            bytes = block.raw_bytes;
            measured.blocks.push((tier, us as f32));
            if let Some(part) = measured.parts.get_mut(at(tier)) {
                part.blocks += 1;
                part.bytes += f64::from(block.raw_bytes);
            }
        }
        for (part, ahead) in measured.parts.iter_mut().zip(self.ahead(f64::from(bytes))) {
            part.ahead = ahead;
        }
        Some(Box::new(measured))
    }

    /// A load that was measured has ended: it took so long from its start, or from the end of the
    /// one before of the same lookup, and is set against what computing would have taken.
    pub(super) fn judge_load(&mut self, measured: &Measured, lease: Option<LeaseId>) {
        let lease = lease.and_then(|lease| self.clients.leases.get_mut(&lease));
        let mut before = measured.started;
        if let Some(lease) = lease {
            before = before.max(lease.charged);
            lease.charged = self.now;
        }
        if measured.void {
            return;
        }
        let mut ended: Vec<(Timestamp, Tier, &MeasuredPart)> = TIERS
            .iter()
            .zip(&measured.parts)
            .filter_map(|(tier, part)| part.ended.map(|ended| (ended, *tier, part)))
            .filter(|(.., part)| part.blocks > 0)
            .collect();
        ended.sort_unstable_by_key(|(ended, tier, _)| (*ended, *tier));
        for (end, tier, part) in ended {
            // Each tier is charged with what came to wait for it alone.
            let charged = end.0.saturating_sub(before.0);
            before = before.max(end);
            let net = part.compute_us - charged as f64;
            // Who gave up had lost by then or would have by waiting, or it says nothing of the
            // tier.
            let counts = !measured.unawaited || net < 0.0;
            let took_us = end.0.saturating_sub(measured.started.0).max(1) as f64;
            let arbiter = &mut self.arbiter;
            if let Some(line) = arbiter.loads.get_mut(at(tier)).filter(|_| part.is_whole()) {
                line.note(self.now, part.bytes + part.ahead, 1.0, took_us);
            }
            if !counts {
                continue;
            }
            if let Some(total) = arbiter.totals.get_mut(at(tier)) {
                total.loads += 1;
                total.saved_us += whole_us(net);
                total.lost_us += whole_us(-net);
            }
            arbiter.judge(self.now, measured.namespace, tier, net as i64, true);
        }
    }
}

impl Measured {
    /// One block has its outcome.
    pub(super) fn note(&mut self, now: Timestamp, block: usize, outcome: Outcome) {
        let Some((tier, us)) = self.blocks.get(block).copied() else {
            return;
        };
        let Some(part) = self.parts.get_mut(at(tier)) else {
            return;
        };
        part.ended = Some(now);
        match outcome {
            Outcome::Loaded(_) => {
                part.loaded += 1;
                part.compute_us += f64::from(us);
            }
            // With the lease it would have been loaded: what that took is known.
            Outcome::Missed(MissReason::LeaseExpired) => {
                part.loaded += 1;
                part.compute_us += f64::from(us);
                self.unawaited = true;
            }
            // It had not come by now.
            Outcome::Missed(MissReason::Gone) => {
                part.compute_us += f64::from(us);
                self.unawaited = true;
            }
            // Not the tier's fault.
            Outcome::Missed(MissReason::Lease | MissReason::Layout) => self.void = true,
            _ => {}
        }
    }
}

impl MeasuredPart {
    /// Whether every block came, so that the time says how long loading takes.
    fn is_whole(&self) -> bool {
        self.loaded == self.blocks && self.bytes > 0.0
    }
}
