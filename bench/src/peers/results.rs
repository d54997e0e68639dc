//! What the turns gave, as one table and as JSON.

use std::time::Instant;

use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    drive::{Timed, Turn},
    peer::{About, Group},
};
use crate::{
    replay::histogram,
    report::{Summary, Table},
    tiers::median,
    units::{show_count, show_micros},
};

/// A peer that was not driven.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Skipped {
    pub(super) peer: &'static str,
    /// Why, and how to have it.
    pub(super) why: String,
}

/// Stores or loads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Store,
    Load,
}

/// All turns of one peer.
#[derive(Debug)]
struct Row {
    about: About,
    turns: Vec<(u32, Turn)>,
}

/// All rows.
#[derive(Debug)]
pub(super) struct Results {
    rows: Vec<Row>,
    skipped: Vec<Skipped>,
    failures: Vec<String>,
    started: Instant,
}

impl Row {
    fn ways(&self, way: Way) -> impl Iterator<Item = (u32, &Timed)> {
        self.turns.iter().map(move |(round, turn)| match way {
            Way::Store => (*round, &turn.store),
            Way::Load => (*round, &turn.load),
        })
    }

    fn gb_s(&self, way: Way) -> Vec<f64> {
        self.ways(way).map(|(_, timed)| timed.gb_s()).collect()
    }

    fn calls(&self, way: Way) -> Histogram<u64> {
        let mut histogram = histogram();
        for call in self.ways(way).flat_map(|(_, timed)| &timed.calls) {
            histogram.saturating_record(u64::try_from(call.as_micros()).unwrap_or(u64::MAX));
        }
        histogram
    }

    /// CPU seconds of this process and of the server per GiB.
    fn cpu(&self, way: Way) -> (f64, f64) {
        let bytes: u64 = self.ways(way).map(|(_, timed)| timed.bytes).sum();
        let gib = bytes as f64 / (1u64 << 30) as f64;
        let per_gib = |seconds: f64| if gib > 0.0 { seconds / gib } else { 0.0 };
        let own: f64 = self.ways(way).map(|(_, timed)| timed.own_cpu_s).sum();
        let server: f64 = self.ways(way).map(|(_, timed)| timed.server_cpu_s).sum();
        (per_gib(own), per_gib(server))
    }

    fn sum(&self, of: impl Fn(&Turn) -> u64) -> u64 {
        self.turns.iter().map(|(_, turn)| of(turn)).sum()
    }

    /// How many times as fast `other` was: the median over the rounds that both have, so that a
    /// slow moment of the machine counts for both.
    fn ratio(&self, other: &Row, way: Way) -> Option<f64> {
        let ratios = self.ways(way).filter_map(|(round, timed)| {
            let (_, other) = other.ways(way).find(|(of, _)| *of == round)?;
            (timed.bytes > 0).then(|| other.gb_s() / timed.gb_s().max(1e-9))
        });
        median(ratios)
    }

    fn tier(&self) -> String {
        let About { stored_to, loaded_from, .. } = self.about;
        match stored_to == loaded_from {
            true => stored_to.into(),
            false => format!("{stored_to} > {loaded_from}"),
        }
    }
}

impl Results {
    pub(super) fn new(abouts: Vec<About>, skipped: Vec<Skipped>) -> Results {
        let row = |about| Row { about, turns: Vec::new() };
        Results {
            rows: abouts.into_iter().map(row).collect(),
            skipped,
            failures: Vec::new(),
            started: Instant::now(),
        }
    }

    pub(super) fn add(&mut self, row: usize, round: u32, turn: Turn) {
        if let Some(row) = self.rows.get_mut(row) {
            row.turns.push((round, turn));
        }
    }

    pub(super) fn failed(&mut self, words: String) {
        eprintln!("FAILED: {words}");
        self.failures.push(words);
    }

    /// Whether no peer failed and no byte was wrong.
    pub(super) fn clean(&self) -> bool {
        self.failures.is_empty() && self.summary().wrong_bytes == 0
    }

    /// The row of kvtide that the rows of a group are compared with.
    fn reference(&self, group: Group, one: bool) -> Option<&Row> {
        self.rows
            .iter()
            .find(|row| row.about.ours && row.about.group == group && (row.about.batch == 1) == one)
    }

    fn ratio(&self, row: &Row, way: Way, one: bool) -> Option<f64> {
        row.ratio(self.reference(row.about.group, one)?, way)
    }

    fn summary(&self) -> Summary {
        let mut summary =
            Summary { client_failures: self.failures.len() as u64, ..Summary::default() };
        for row in &self.rows {
            let hits = row.sum(|turn| turn.verified);
            let from_memory = row.sum(|turn| turn.from_memory);
            match row.about.group {
                Group::Ram => summary.blocks_hit_host += hits,
                Group::Disk => {
                    summary.blocks_hit_host += from_memory;
                    summary.blocks_hit_nvme += hits - from_memory;
                }
            }
            let calls = |turn: &Turn| (turn.store.calls.len() + turn.load.calls.len()) as u64;
            summary.requests += row.sum(calls) / row.about.batch as u64;
            summary.blocks_verified += hits;
            summary.blocks_missed += row.sum(|turn| turn.missed);
            summary.wrong_bytes += row.sum(|turn| turn.wrong_bytes);
        }
        Summary { seconds: self.started.elapsed().as_secs_f64(), ..summary }
    }

    pub(super) fn table(&self) -> Table {
        let mut table = Table::default();
        table.row([
            "",
            "tier",
            "in flight",
            "store GB/s",
            "load GB/s",
            "kvtide/it, store",
            "load",
            "store p50 / p99",
            "load p50 / p99",
            "CPU s/GiB, store",
            "load",
            "verifies",
            "misses",
            "from memory",
            "wrong bytes",
        ]);
        for row in self.rows.iter().filter(|row| !row.turns.is_empty()) {
            let rate = |way| median(row.gb_s(way)).map_or("-".into(), |rate| format!("{rate:.2}"));
            let ratio = |way| {
                let ratio = self.ratio(row, way, false);
                ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"))
            };
            let times = |way| {
                let calls = row.calls(way);
                let at = |quantile| show_micros(calls.value_at_quantile(quantile));
                format!("{} / {}", at(0.5), at(0.99))
            };
            let cpu = |way| {
                let (own, server) = row.cpu(way);
                format!("{:.3}", own + server)
            };
            table.row([
                row.about.name.clone(),
                row.tier(),
                format!("{} x {}", row.about.threads, row.about.batch),
                rate(Way::Store),
                rate(Way::Load),
                ratio(Way::Store),
                ratio(Way::Load),
                times(Way::Store),
                times(Way::Load),
                cpu(Way::Store),
                cpu(Way::Load),
                if row.about.verifies { "yes" } else { "no" }.into(),
                show_count(row.sum(|turn| turn.missed)),
                show_count(row.sum(|turn| turn.from_memory)),
                show_count(row.sum(|turn| turn.wrong_bytes)),
            ]);
        }
        table
    }

    pub(super) fn json(&self, block_bytes: u64, machine: Value) -> Value {
        let mut object = json!(self.summary());
        let more = json!({
            "block_bytes": block_bytes,
            "machine": machine,
            "skipped": self.skipped,
            "failures": self.failures,
            "peers": self.rows.iter().map(|row| self.row_json(row)).collect::<Vec<_>>(),
        });
        if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
            object.extend(more);
        }
        object
    }

    fn row_json(&self, row: &Row) -> Value {
        let way = |way| {
            let calls = row.calls(way);
            let (own, server) = row.cpu(way);
            json!({
                "gb_s": median(row.gb_s(way)),
                "gb_s_rounds": row.gb_s(way),
                "kvtide_ratio": self.ratio(row, way, false),
                "kvtide_one_ratio": self.ratio(row, way, true),
                "p50_us": calls.value_at_quantile(0.5),
                "p99_us": calls.value_at_quantile(0.99),
                "own_cpu_s_per_gib": own,
                "server_cpu_s_per_gib": server,
            })
        };
        json!({
            "name": row.about.name,
            "tier": row.about.group,
            "stored_to": row.about.stored_to,
            "loaded_from": row.about.loaded_from,
            "threads": row.about.threads,
            "blocks_a_call": row.about.batch,
            "verifies": row.about.verifies,
            "rounds": row.turns.len(),
            "store": way(Way::Store),
            "load": way(Way::Load),
            "blocks_verified": row.sum(|turn| turn.verified),
            "misses": row.sum(|turn| turn.missed),
            "loads_from_memory": row.sum(|turn| turn.from_memory),
            "wrong_bytes": row.sum(|turn| turn.wrong_bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn about(name: &str, ours: bool, batch: usize) -> About {
        About {
            name: name.into(),
            group: Group::Disk,
            ours,
            stored_to: "page cache",
            loaded_from: "disk",
            verifies: ours,
            threads: 1,
            batch,
        }
    }

    fn turn(ms: u64) -> Turn {
        let timed = Timed {
            took: Duration::from_millis(ms),
            bytes: 1_000_000,
            calls: vec![Duration::from_micros(10)],
            own_cpu_s: 0.5,
            server_cpu_s: 0.25,
        };
        Turn { store: timed.clone(), load: timed, verified: 1, ..Turn::default() }
    }

    #[test]
    fn ratios_are_medians_over_the_rounds_that_both_have() {
        let rows = vec![about("kvtide", true, 16), about("slow", false, 1)];
        let mut results = Results::new(rows, Vec::new());
        for (round, ms) in [(0, 10), (1, 40), (2, 1), (3, 7)] {
            results.add(0, round, turn(ms));
        }
        for (round, ms) in [(0, 20), (1, 80), (2, 2)] {
            results.add(1, round, turn(ms));
        }
        let json = results.json(1, json!({}));
        let row = &json["peers"][1];
        assert_eq!(row["store"]["kvtide_ratio"].as_f64().map(|ratio| ratio.round()), Some(2.0));
        assert_eq!(row["load"]["kvtide_one_ratio"], Value::Null);
        assert_eq!((&row["tier"], &row["rounds"]), (&"disk".into(), &3.into()));
        assert_eq!((&json["blocks_verified"], &json["wrong_bytes"]), (&7.into(), &0.into()));
        let lines = results.table().lines();
        assert!(lines[2].contains("page cache > disk") && lines[2].contains("2.00"), "{lines:?}");
        assert!(results.clean());
        results.add(1, 3, Turn { wrong_bytes: 1, verified: 1, ..Turn::default() });
        assert!(!results.clean());
    }
}
