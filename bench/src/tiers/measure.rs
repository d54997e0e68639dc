//! What was measured: rounds of each kind, medians, and ratios to yardsticks.
//!
//! A ratio is the median of the ratios within each round, so that a slow moment of the machine
//! counts for both sides. Where a yardstick was taken at several depths, the one with the best
//! median is used, in every round.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvtide_client::Tier;
use serde_json::{Value, json};

use crate::{
    replay::histogram,
    report::{Summary, Table},
    units::show_micros,
};

/// What is done with the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// Copies between memory of the kinds that client and daemon have.
    Memcpy,
    /// The same, with a checksum in a second pass.
    MemcpySum,
    /// Blocks of the host tier.
    Host,
    /// The raw ring.
    Raw,
    /// fio.
    Fio,
    /// Blocks of the nvme tier.
    Nvme,
}

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    /// From the client, or to the device.
    Store,
    /// To the client, or from the device.
    Load,
}

/// How a client calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct How {
    /// Blocks in a call.
    pub(super) batch: usize,
    /// Calls under way at once.
    pub(super) calls: usize,
}

impl How {
    /// How long a call waits for its end: an only one does so in the same call.
    pub(super) fn wait(self, longest: Duration) -> Duration {
        if self.calls == 1 { longest } else { Duration::ZERO }
    }

    pub(super) fn store(self, tier: Tier) -> Kind {
        self.kind(tier, Direction::Store)
    }

    pub(super) fn load(self, tier: Tier) -> Kind {
        self.kind(tier, Direction::Load)
    }

    fn kind(self, tier: Tier, direction: Direction) -> Kind {
        let work = if tier == Tier::Host { Work::Host } else { Work::Nvme };
        Kind { work, direction, batch: self.batch, depth: self.calls }
    }
}

/// One row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Kind {
    pub(super) work: Work,
    pub(super) direction: Direction,
    /// Blocks in a call.
    pub(super) batch: usize,
    /// Calls, transfers or threads at once.
    pub(super) depth: usize,
}

impl Kind {
    fn name(self) -> String {
        let (batch, depth) = (self.batch, self.depth);
        let store = self.direction == Direction::Store;
        let verb = if store { "store" } else { "load" };
        let calls = if depth == 1 { "call" } else { "calls" };
        match self.work {
            Work::Memcpy if store => format!("memcpy, region to arena, threads: {depth}"),
            Work::Memcpy => format!("memcpy, arena to region, threads: {depth}"),
            Work::MemcpySum if store => "  and XXH3-128 in a second pass".into(),
            Work::MemcpySum => "  after XXH3-128 in a first pass".into(),
            Work::Raw if store => format!("raw ring, write, depth {depth}"),
            Work::Raw => format!("raw ring, read, depth {depth}"),
            Work::Fio if store => format!("fio, write, depth {depth}"),
            Work::Fio => format!("fio, read, depth {depth}"),
            Work::Host => format!("{verb}, host, {batch} a call, {depth} {calls}"),
            Work::Nvme if store => format!("store until on nvme, {batch} a call, {depth} {calls}"),
            Work::Nvme => format!("load, nvme, {batch} a call, {depth} {calls}"),
        }
    }

    /// What it is compared with.
    fn beside(self) -> Option<Work> {
        match self.work {
            Work::Memcpy | Work::Raw => None,
            Work::MemcpySum | Work::Host => Some(Work::Memcpy),
            Work::Nvme | Work::Fio => Some(Work::Raw),
        }
    }
}

/// One round of one kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Round {
    pub(super) round: u32,
    pub(super) bytes: u64,
    pub(super) took: Duration,
    /// When the last call had ended, where more was waited for.
    pub(super) calls_took: Option<Duration>,
    /// The longest part of that wait in which nothing was done.
    pub(super) pause: Duration,
    pub(super) calls: Vec<Duration>,
    pub(super) daemon_cpu_s: f64,
    pub(super) client_cpu_s: f64,
}

impl Round {
    pub(super) fn gb_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.took.as_secs_f64().max(1e-9)
    }
}

/// All rounds of all kinds of one configuration.
#[derive(Debug)]
pub(super) struct Measures {
    rows: Vec<(Kind, Vec<Round>)>,
    pub(super) summary: Summary,
    busy: u64,
    unexpected_host: u64,
    words: Vec<String>,
    started: Instant,
}

impl Measures {
    pub(super) fn new() -> Measures {
        Measures {
            rows: Vec::new(),
            summary: Summary::default(),
            busy: 0,
            unexpected_host: 0,
            words: Vec::new(),
            started: Instant::now(),
        }
    }

    pub(super) fn add(&mut self, kind: Kind, round: Round) {
        self.summary.requests += round.calls.len() as u64;
        match self.rows.iter_mut().find(|(of, _)| *of == kind) {
            Some((_, rounds)) => rounds.push(round),
            None => self.rows.push((kind, vec![round])),
        }
    }

    /// Counts one loaded block; `wrong` bytes of it differ.
    pub(super) fn verified(&mut self, tier: Tier, wrong: u64) {
        match tier {
            Tier::Host => self.summary.blocks_hit_host += 1,
            _ => self.summary.blocks_hit_nvme += 1,
        }
        self.summary.blocks_verified += 1;
        self.summary.wrong_bytes += wrong;
    }

    pub(super) fn missed(&mut self, blocks: u64) {
        self.summary.blocks_missed += blocks;
    }

    pub(super) fn busy(&mut self, times: u64) {
        self.busy += times;
    }

    /// Loads meant for nvme that host RAM still had.
    pub(super) fn unexpected_host(&mut self, blocks: u64) {
        self.unexpected_host += blocks;
    }

    pub(super) fn failed(&mut self, words: String) {
        self.summary.client_failures += 1;
        if self.words.len() < 20 {
            eprintln!("{words}");
            self.words.push(words);
        }
    }

    /// The end: how long it all took.
    pub(super) fn end(&mut self) {
        self.summary.seconds = self.started.elapsed().as_secs_f64();
    }

    pub(super) fn rounds(&self, kind: Kind) -> &[Round] {
        let found = self.rows.iter().find(|(of, _)| *of == kind);
        found.map_or(&[], |(_, rounds)| rounds)
    }

    /// The kinds of one work and direction.
    pub(super) fn kinds(&self, work: Work, direction: Direction) -> impl Iterator<Item = Kind> {
        let all = self.rows.iter().map(|(kind, _)| *kind);
        all.filter(move |kind| kind.work == work && kind.direction == direction)
    }

    pub(super) fn gb_s(&self, kind: Kind) -> Option<f64> {
        median(self.rounds(kind).iter().map(Round::gb_s))
    }

    /// The kind with the best median.
    pub(super) fn best(&self, work: Work, direction: Direction) -> Option<Kind> {
        let speed = |kind: &Kind| self.gb_s(*kind).unwrap_or(0.0);
        self.kinds(work, direction).max_by(|one, two| speed(one).total_cmp(&speed(two)))
    }

    /// What a kind is compared with.
    pub(super) fn yardstick(&self, kind: Kind) -> Option<Kind> {
        self.best(kind.beside()?, kind.direction)
    }

    pub(super) fn ratios(&self, kind: Kind) -> Vec<f64> {
        let Some(beside) = self.yardstick(kind) else { return Vec::new() };
        let same = |round: &Round| {
            // A yardstick may be taken several times in a round, to lie beside each measure.
            let others = || self.rounds(beside).iter().filter(|other| other.round == round.round);
            let bytes: u64 = others().map(|other| other.bytes).sum();
            let took = others().map(|other| other.took).sum();
            let other = Round { bytes, took, ..Round::default() };
            (bytes > 0).then(|| round.gb_s() / other.gb_s().max(1e-9))
        };
        self.rounds(kind).iter().filter_map(same).collect()
    }

    pub(super) fn ratio(&self, kind: Kind) -> Option<f64> {
        median(self.ratios(kind))
    }

    /// The ratio if nothing had been waited for in vain.
    pub(super) fn ratio_without_pause(&self, kind: Kind) -> Option<f64> {
        let seconds = |round: &Round| {
            let took = round.took.as_secs_f64();
            took / (took - round.pause.as_secs_f64()).max(1e-9)
        };
        let faster = self.rounds(kind).iter().map(seconds);
        median(self.ratios(kind).into_iter().zip(faster).map(|(ratio, faster)| ratio * faster))
    }

    fn calls(&self, kind: Kind) -> Histogram<u64> {
        let mut histogram = histogram();
        for call in self.rounds(kind).iter().flat_map(|round| &round.calls) {
            histogram.saturating_record(u64::try_from(call.as_micros()).unwrap_or(u64::MAX));
        }
        histogram
    }

    /// Microseconds of a call, over all rounds.
    pub(super) fn quantile_us(&self, kind: Kind, quantile: f64) -> u64 {
        self.calls(kind).value_at_quantile(quantile)
    }

    /// CPU seconds of daemon and client per GiB.
    pub(super) fn cpu(&self, kind: Kind) -> (f64, f64) {
        let rounds = self.rounds(kind);
        let gib = rounds.iter().map(|round| round.bytes).sum::<u64>() as f64 / (1u64 << 30) as f64;
        let sum = |of: fn(&Round) -> f64| rounds.iter().map(of).sum::<f64>();
        let per_gib = |seconds: f64| if gib > 0.0 { seconds / gib } else { 0.0 };
        (per_gib(sum(|round| round.daemon_cpu_s)), per_gib(sum(|round| round.client_cpu_s)))
    }

    /// Kinds in the order of the tables: each behind its yardstick.
    fn in_order(&self) -> Vec<Kind> {
        let groups: [&[Work]; 2] =
            [&[Work::Memcpy, Work::MemcpySum, Work::Host], &[Work::Raw, Work::Fio, Work::Nvme]];
        let mut kinds = Vec::new();
        for group in groups {
            for direction in [Direction::Store, Direction::Load] {
                for work in group {
                    let mut some: Vec<Kind> = self.kinds(*work, direction).collect();
                    some.sort_by_key(|kind| (std::cmp::Reverse(kind.batch), kind.depth));
                    kinds.append(&mut some);
                }
            }
        }
        kinds
    }

    pub(super) fn table(&self) -> Table {
        let mut table = Table::default();
        table.row(["", "GB/s", "ratio", "beside", "p50", "p99", "daemon s/GiB", "own s/GiB"]);
        for kind in self.in_order() {
            let Some(gb_s) = self.gb_s(kind) else { continue };
            let (daemon, client) = self.cpu(kind);
            let beside = match self.yardstick(kind) {
                None => String::new(),
                Some(other) if other.work == Work::Raw => format!("raw, depth {}", other.depth),
                Some(_) => "memcpy".into(),
            };
            let calls = self.calls(kind);
            let time = |quantile| match calls.is_empty() {
                true => "-".to_owned(),
                false => show_micros(calls.value_at_quantile(quantile)),
            };
            table.row([
                kind.name(),
                format!("{gb_s:.2}"),
                self.ratio(kind).map_or(String::new(), |ratio| format!("{ratio:.2}")),
                beside,
                time(0.5),
                time(0.99),
                format!("{daemon:.3}"),
                format!("{client:.3}"),
            ]);
        }
        table
    }

    /// Everything, each round too.
    pub(super) fn json(&self) -> Value {
        let rows: Vec<Value> =
            self.in_order().into_iter().map(|kind| self.row_json(kind)).collect();
        let mut object = json!(self.summary);
        if let Some(object) = object.as_object_mut() {
            object.insert("busy".into(), self.busy.into());
            object.insert("unexpected_host".into(), self.unexpected_host.into());
            object.insert("words".into(), json!(self.words));
            object.insert("measures".into(), rows.into());
        }
        object
    }

    fn row_json(&self, kind: Kind) -> Value {
        let (daemon, client) = self.cpu(kind);
        let per_round = |round: &Round| {
            json!({
                "round": round.round,
                "gb_s": round.gb_s(),
                "seconds": round.took.as_secs_f64(),
                "pause_seconds": round.pause.as_secs_f64(),
                "calls_seconds": round.calls_took.map(|took| took.as_secs_f64()),
                "daemon_cpu_s": round.daemon_cpu_s,
                "client_cpu_s": round.client_cpu_s,
            })
        };
        json!({
            "name": kind.name().trim(),
            "work": format!("{:?}", kind.work).to_lowercase(),
            "direction": format!("{:?}", kind.direction).to_lowercase(),
            "blocks_per_call": kind.batch,
            "depth": kind.depth,
            "gb_s": self.gb_s(kind),
            "beside": self.yardstick(kind).map(Kind::name),
            "ratio": self.ratio(kind),
            "ratio_rounds": self.ratios(kind),
            "p50_us": self.quantile_us(kind, 0.5),
            "p99_us": self.quantile_us(kind, 0.99),
            "daemon_cpu_s_per_gib": daemon,
            "client_cpu_s_per_gib": client,
            "rounds": self.rounds(kind).iter().map(per_round).collect::<Vec<_>>(),
        })
    }

    /// What is said below the table.
    pub(super) fn remarks(&self) -> Vec<String> {
        let Summary { blocks_verified, wrong_bytes, client_failures, blocks_missed, .. } =
            self.summary;
        let mut remarks = vec![format!(
            "{blocks_verified} blocks verified, {wrong_bytes} wrong bytes, {client_failures} \
             failures, {blocks_missed} missed, {} stores tried again for want of room",
            self.busy
        )];
        if blocks_missed > 0 {
            remarks.push("loads MISSED blocks: their figures count only what arrived".into());
        }
        if self.unexpected_host > 0 {
            remarks.push(format!(
                "{} blocks of the nvme loads came from host RAM",
                self.unexpected_host
            ));
        }
        for kind in self.kinds(Work::Nvme, Direction::Store) {
            let rounds = self.rounds(kind);
            let calls = median(rounds.iter().filter_map(|r| Some(r.calls_took?.as_secs_f64())));
            let all = median(rounds.iter().map(|round| round.took.as_secs_f64()));
            let pause = median(rounds.iter().map(|round| round.pause.as_secs_f64()));
            if let (Some(calls), Some(all), Some(pause)) = (calls, all, pause) {
                remarks.push(format!(
                    "{}: the last call ended after {calls:.2} s; all was written after {all:.2} s, \
                     with a pause of {pause:.2} s (the daemon waits until nobody asks)",
                    kind.name()
                ));
            }
        }
        remarks
    }
}

/// The middle one; with an even number of them the mean of the two.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = *values.get(values.len().saturating_sub(1) / 2)?;
    Some(f64::midpoint(lower, upper))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios_are_per_round_and_the_best_depth_is_the_yardstick() {
        let mut measures = Measures::new();
        let row = |round, ms| Round {
            round,
            bytes: 1_000_000,
            took: Duration::from_millis(ms),
            calls: vec![Duration::from_micros(10)],
            ..Round::default()
        };
        let raw = |depth| Kind { work: Work::Raw, direction: Direction::Load, batch: 1, depth };
        let load = How { batch: 16, calls: 2 }.load(Tier::Nvme);
        for (round, fast) in [(0, 10), (1, 40), (2, 1)] {
            measures.add(raw(1), row(round, fast * 3));
            measures.add(raw(8), row(round, fast));
            measures.add(load, row(round, fast * 2));
        }
        assert_eq!(measures.yardstick(load), Some(raw(8)));
        assert!((measures.ratio(load).unwrap() - 0.5).abs() < 1e-9);
        assert!((measures.gb_s(raw(8)).unwrap() - 0.1).abs() < 1e-9);
        assert_eq!(measures.ratio(raw(8)), None);
        assert_eq!(measures.table().lines().len(), 4);
        assert_eq!(measures.json()["measures"][2]["p50_us"], 10);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([]), None);
    }
}
