//! What was measured, and the plain copies that it is compared with.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvtide_tiers::block::{BlockKey, Sum128};
use serde_json::json;

use super::Sizes;
use crate::{
    payload::Payload,
    process::own_seconds,
    replay::histogram,
    report::{Summary, Table},
    units::{show_count, show_micros},
};

/// The kinds of measures, in the order of the table, each with the one it is compared with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Memcpy,
    MemcpySum,
    StoreHost,
    LoadHost,
    StoreHostOne,
    LoadHostOne,
    RawWrite,
    StoreNvme,
    RawRead,
    LoadNvme,
    LoadNvmeOne,
}

const KINDS: [Kind; 11] = [
    Kind::Memcpy,
    Kind::MemcpySum,
    Kind::StoreHost,
    Kind::LoadHost,
    Kind::StoreHostOne,
    Kind::LoadHostOne,
    Kind::RawWrite,
    Kind::StoreNvme,
    Kind::RawRead,
    Kind::LoadNvme,
    Kind::LoadNvmeOne,
];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Memcpy => "memcpy",
            Kind::MemcpySum => "memcpy and XXH3-128",
            Kind::StoreHost => "store, host",
            Kind::LoadHost => "load, host",
            Kind::StoreHostOne => "store, host, 1 block a call",
            Kind::LoadHostOne => "load, host, 1 block a call",
            Kind::RawWrite => "raw ring write, depth 8",
            Kind::StoreNvme => "store until all is on nvme",
            Kind::RawRead => "raw ring read, depth 8",
            Kind::LoadNvme => "load, nvme",
            Kind::LoadNvmeOne => "load, nvme, 1 block a call",
        }
    }

    fn beside(self) -> Option<Kind> {
        match self {
            Kind::Memcpy | Kind::RawWrite | Kind::RawRead => None,
            Kind::MemcpySum
            | Kind::StoreHost
            | Kind::LoadHost
            | Kind::StoreHostOne
            | Kind::LoadHostOne => Some(Kind::Memcpy),
            Kind::StoreNvme => Some(Kind::RawWrite),
            Kind::LoadNvme | Kind::LoadNvmeOne => Some(Kind::RawRead),
        }
    }
}

/// One round of one kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Round {
    pub(super) bytes: u64,
    pub(super) took: Duration,
    pub(super) calls: Vec<Duration>,
    pub(super) daemon_cpu_s: f64,
    pub(super) client_cpu_s: f64,
}

impl Round {
    fn gb_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.took.as_secs_f64().max(1e-9)
    }
}

/// All rounds of all kinds.
#[derive(Debug)]
pub(super) struct Measures {
    block_bytes: u64,
    rounds: Vec<(Kind, Round)>,
    summary: Summary,
    busy: u64,
    /// Loads meant for nvme that host RAM still had.
    unexpected_host: u64,
    words: Vec<String>,
    started: Instant,
}

impl Measures {
    pub(super) fn new(block_bytes: u64) -> Measures {
        Measures {
            block_bytes,
            rounds: Vec::new(),
            summary: Summary::default(),
            busy: 0,
            unexpected_host: 0,
            words: Vec::new(),
            started: Instant::now(),
        }
    }

    pub(super) fn add(&mut self, kind: Kind, round: Round) {
        self.summary.requests += round.calls.len() as u64;
        self.rounds.push((kind, round));
    }

    /// Counts one loaded block; `wrong` bytes of it differ.
    pub(super) fn verified(&mut self, from_host: bool, wrong: u64) {
        let tier = match from_host {
            true => &mut self.summary.blocks_hit_host,
            false => &mut self.summary.blocks_hit_nvme,
        };
        *tier += 1;
        self.summary.blocks_verified += 1;
        self.summary.wrong_bytes += wrong;
    }

    pub(super) fn missed(&mut self, blocks: u64) {
        self.summary.blocks_missed += blocks;
    }

    pub(super) fn busy(&mut self) {
        self.busy += 1;
    }

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

    pub(super) fn wrong_bytes(&self) -> u64 {
        self.summary.wrong_bytes
    }

    pub(super) fn failures(&self) -> u64 {
        self.summary.client_failures
    }

    fn of(&self, kind: Kind) -> Vec<&Round> {
        self.rounds.iter().filter(|(of, _)| *of == kind).map(|(_, round)| round).collect()
    }

    fn median_gb_s(&self, kind: Kind) -> Option<f64> {
        median(self.of(kind).iter().map(|round| round.gb_s()).collect())
    }

    /// The median of the ratios within each round, so that a slow moment counts for both.
    fn ratio(&self, kind: Kind) -> Option<f64> {
        let beside = self.of(kind.beside()?);
        let ratios = self.of(kind).into_iter().zip(beside);
        median(ratios.map(|(round, other)| round.gb_s() / other.gb_s().max(1e-9)).collect())
    }

    fn calls(&self, kind: Kind) -> Histogram<u64> {
        let mut histogram = histogram();
        for call in self.of(kind).iter().flat_map(|round| &round.calls) {
            histogram.saturating_record(u64::try_from(call.as_micros()).unwrap_or(u64::MAX));
        }
        histogram
    }

    /// CPU seconds of daemon and client per GiB.
    fn cpu(&self, kind: Kind) -> (f64, f64) {
        let rounds = self.of(kind);
        let gib = rounds.iter().map(|round| round.bytes).sum::<u64>() as f64 / (1u64 << 30) as f64;
        let sum = |of: fn(&Round) -> f64| rounds.iter().map(|round| of(round)).sum::<f64>();
        let per_gib = |seconds: f64| if gib > 0.0 { seconds / gib } else { 0.0 };
        (per_gib(sum(|round| round.daemon_cpu_s)), per_gib(sum(|round| round.client_cpu_s)))
    }

    pub(super) fn table(&self) -> Table {
        let mut table = Table::default();
        table.row([
            "",
            "GB/s",
            "ratio",
            "beside",
            "p50 a call",
            "p99 a call",
            "daemon CPU s/GiB",
            "own CPU s/GiB",
        ]);
        for kind in KINDS {
            let Some(gb_s) = self.median_gb_s(kind) else { continue };
            let calls = self.calls(kind);
            let (daemon, client) = self.cpu(kind);
            let beside = match kind.beside() {
                None => "",
                Some(Kind::Memcpy) => "memcpy",
                Some(_) => "raw ring",
            };
            table.row([
                kind.name().to_owned(),
                format!("{gb_s:.2}"),
                self.ratio(kind).map_or(String::new(), |ratio| format!("{ratio:.2}")),
                beside.into(),
                show_micros(calls.value_at_quantile(0.5)),
                show_micros(calls.value_at_quantile(0.99)),
                format!("{daemon:.3}"),
                format!("{client:.3}"),
            ]);
        }
        table.row([""]);
        let rows = [
            ("blocks verified", self.summary.blocks_verified),
            ("wrong bytes", self.summary.wrong_bytes),
            ("client failures", self.summary.client_failures),
            ("missed", self.summary.blocks_missed),
            ("stores tried again (busy)", self.busy),
            ("blocks of nvme loads that host RAM had", self.unexpected_host),
        ];
        for (name, count) in rows {
            table.row([name.to_owned(), show_count(count)]);
        }
        table
    }

    pub(super) fn json(&self, machine: serde_json::Value) -> serde_json::Value {
        let row = |kind: &Kind| {
            let calls = self.calls(*kind);
            let (daemon, client) = self.cpu(*kind);
            json!({
                "name": kind.name(),
                "gb_s": self.median_gb_s(*kind),
                "gb_s_rounds": self.of(*kind).iter().map(|r| r.gb_s()).collect::<Vec<_>>(),
                "beside": kind.beside().map(Kind::name),
                "ratio": self.ratio(*kind),
                "p50_us": calls.value_at_quantile(0.5),
                "p99_us": calls.value_at_quantile(0.99),
                "daemon_cpu_s_per_gib": daemon,
                "client_cpu_s_per_gib": client,
            })
        };
        let mut object = json!(Summary {
            seconds: self.started.elapsed().as_secs_f64(),
            ..self.summary.clone()
        });
        let more = json!({
            "block_bytes": self.block_bytes,
            "busy": self.busy,
            "unexpected_host": self.unexpected_host,
            "words": self.words,
            "machine": machine,
            "measures": KINDS.iter().map(row).collect::<Vec<_>>(),
        });
        if let (Some(object), serde_json::Value::Object(more)) = (object.as_object_mut(), more) {
            object.extend(more);
        }
        object
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// A key that no other block of the run has.
pub(super) fn fresh_key(what: u64, round: u32, number: usize) -> BlockKey {
    let mut bytes = [0xbe; 32];
    let words = [what, u64::from(round), number as u64];
    for (out, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *out = word.to_le_bytes();
    }
    BlockKey(bytes)
}

/// Copies from one call's worth of blocks into as much memory as the host measures fill.
#[derive(Debug)]
pub(super) struct Copies {
    from: Vec<u8>,
    to: Vec<u8>,
    block_bytes: usize,
}

impl Copies {
    pub(super) fn new(sizes: &Sizes) -> anyhow::Result<Copies> {
        let block_bytes = usize::try_from(sizes.block_bytes)?;
        // Written, so that its pages are there.
        let to = vec![1; block_bytes * sizes.host_blocks];
        Ok(Copies { from: vec![1; block_bytes * sizes.batch], to, block_bytes })
    }

    pub(super) fn round(&mut self, round: u32, measures: &mut Measures) {
        let payload = Payload::new();
        for (block, number) in self.from.chunks_mut(self.block_bytes).zip(0..) {
            payload.fill(&fresh_key(1, round, number), block);
        }
        for kind in [Kind::Memcpy, Kind::MemcpySum] {
            let (started, cpu) = (Instant::now(), own_seconds());
            let mut calls = Vec::new();
            for to in self.to.chunks_mut(self.from.len()) {
                let call = Instant::now();
                let blocks = to.chunks_mut(self.block_bytes);
                for (to, from) in blocks.zip(self.from.chunks(self.block_bytes)) {
                    to.copy_from_slice(from);
                    if kind == Kind::MemcpySum {
                        std::hint::black_box(Sum128::of(to));
                    }
                }
                calls.push(call.elapsed());
            }
            std::hint::black_box(&self.to);
            let took = started.elapsed();
            let client_cpu_s = own_seconds() - cpu;
            let bytes = self.to.len() as u64;
            measures.add(kind, Round { bytes, took, calls, daemon_cpu_s: 0.0, client_cpu_s });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios_are_per_round() {
        let mut measures = Measures::new(4096);
        let round = |bytes, ms| Round {
            bytes,
            took: Duration::from_millis(ms),
            calls: vec![Duration::from_micros(10)],
            ..Round::default()
        };
        for (memcpy, store) in [(10, 20), (40, 80), (1, 2)] {
            measures.add(Kind::Memcpy, round(1_000_000, memcpy));
            measures.add(Kind::StoreHost, round(1_000_000, store));
        }
        assert!((measures.ratio(Kind::StoreHost).unwrap() - 0.5).abs() < 1e-9);
        assert!((measures.median_gb_s(Kind::Memcpy).unwrap() - 0.1).abs() < 1e-9);
        assert_eq!(measures.ratio(Kind::Memcpy), None);
        assert!(measures.table().lines().len() > 3);
        assert_eq!(measures.json(json!({}))["measures"][2]["p50_us"], 10);
    }
}
