//! What a replay adds up, and how it is printed.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use kvtide_client::{ClientConfig, blocking::Client};
use kvtide_tiers::catalog::CatalogStats;
use serde::Serialize;
use serde_json::json;

use super::{kill::Kill, wire::Done};
use crate::{
    daemon::Daemon,
    process::Memory,
    report::{Summary, Table},
    units::{show_bytes, show_count, show_micros, show_ratio},
};

/// After the daemon is back, clients may wait this long before they ask it again (the breaker's
/// longest pause), so a call that finds it away until then is no failure.
const RECONNECT_MAX: Duration = Duration::from_secs(5);

/// The row of hits in GPU memory, which only a replay with a GPU has.
const GPU_HITS: &str = "  hit in GPU memory";

/// Everything counted in one replay.
#[derive(Debug)]
pub struct Totals {
    summary: Summary,
    block_bytes: u64,
    start: Duration,
    file_system: String,
    missed: BTreeMap<String, u64>,
    not_stored: BTreeMap<String, u64>,
    stored: [u64; 2],
    busy: u64,
    /// Requests during which the daemon was away, with their times, until all kills are known.
    away: Vec<(Instant, Instant, u64)>,
    words: Vec<String>,
    lookup: Histogram<u64>,
    load: Histogram<u64>,
    store: Histogram<u64>,
    kills: Vec<Kill>,
    pub(super) client_cpu_s: f64,
    pub(super) daemon_cpu_s: f64,
    pub(super) daemon_memory: Memory,
    pub(super) stop_ms: u64,
    /// What the daemon says of its GPUs, where it uses one.
    pub(super) gpu: Option<String>,
    /// The daemon's counters at the end of each of its lives.
    lives: Vec<CatalogStats>,
    status: Vec<String>,
}

/// Counters of the daemon, over all of its lives.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct DaemonCounts {
    written: u64,
    reclaimed: u64,
    corrupt: u64,
    read_failures: u64,
    write_failures: u64,
}

/// One microsecond to an hour; what lies outside counts as the nearest.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("the bounds are in order")
}

impl Totals {
    pub(super) fn new(block_bytes: u64, start: Duration, file_system: &str) -> Totals {
        Totals {
            summary: Summary::default(),
            block_bytes,
            start,
            file_system: file_system.to_owned(),
            missed: BTreeMap::new(),
            not_stored: BTreeMap::new(),
            stored: [0; 2],
            busy: 0,
            away: Vec::new(),
            words: Vec::new(),
            lookup: histogram(),
            load: histogram(),
            store: histogram(),
            kills: Vec::new(),
            client_cpu_s: 0.0,
            daemon_cpu_s: 0.0,
            daemon_memory: Memory::default(),
            stop_ms: 0,
            gpu: None,
            lives: Vec::new(),
            status: Vec::new(),
        }
    }

    /// A kill, and the daemon's counters just before it.
    pub(super) fn add_kill(&mut self, kill: Kill, stats: CatalogStats) {
        self.kills.push(kill);
        self.lives.push(stats);
    }

    /// The agreed fields.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Blocks stored, without those that were there already.
    pub fn blocks_stored(&self) -> u64 {
        self.stored.first().copied().unwrap_or(0)
    }

    /// The kills, in order.
    pub fn kills(&self) -> &[Kill] {
        &self.kills
    }

    pub(super) fn add(&mut self, from: Instant, to: Instant, done: Done) {
        let summary = &mut self.summary;
        let [device, host, nvme] = done.loaded;
        summary.requests += 1;
        summary.blocks_hit_device += device;
        summary.blocks_hit_host += host;
        summary.blocks_hit_nvme += nvme;
        summary.blocks_missed += done.blocks.saturating_sub(device + host + nvme);
        summary.blocks_verified += done.verified;
        summary.wrong_bytes += done.wrong_bytes;
        summary.client_failures += done.failures;
        for (total, more) in self.stored.iter_mut().zip(done.stored) {
            *total += more;
        }
        self.busy += done.busy;
        for (reason, more) in done.missed {
            *self.missed.entry(reason).or_default() += more;
        }
        for (reason, more) in done.not_stored {
            *self.not_stored.entry(reason).or_default() += more;
        }
        if done.away > 0 {
            self.away.push((from, to, done.away));
        }
        for words in done.words {
            if self.words.len() < 20 {
                eprintln!("request {}: {words}", done.index);
                self.words.push(words);
            }
        }
        let each = [
            (&mut self.lookup, done.lookup_us),
            (&mut self.load, done.load_us),
            (&mut self.store, done.store_us),
        ];
        for (histogram, times) in each {
            times.into_iter().for_each(|us| histogram.saturating_record(us));
        }
    }

    /// Ends the clock, and judges the calls that found the daemon away: outside the outages that
    /// were caused on purpose they are failures.
    pub(super) fn set_seconds(&mut self, took: Duration) {
        self.summary.seconds = took.as_secs_f64();
        for (from, to, calls) in std::mem::take(&mut self.away) {
            let excused = self.kills.iter().any(|kill| {
                let (killed, back) = kill.outage;
                from <= back + RECONNECT_MAX && to >= killed
            });
            if !excused {
                self.summary.client_failures += calls;
                self.words.push(format!("{calls} calls found no daemon, though none was killed"));
            }
        }
    }

    /// The daemon's own counters, at the end.
    pub(super) fn ask_daemon(&mut self, daemon: &Daemon) {
        let Ok(client) = Client::connect(ClientConfig::new(daemon.spec().socket())) else { return };
        self.lives.extend(client.stats().ok().and_then(|stats| stats.catalog));
        if let Ok(status) = client.status() {
            self.status = vec![status.host_pages, status.nvme_io];
        }
    }

    /// A few words for the progress bar.
    pub(super) fn short(&self) -> String {
        let summary = &self.summary;
        format!(
            "hits {}, wrong bytes {}, failures {}, kills {}",
            show_ratio(summary.blocks_hit(), summary.blocks()),
            summary.wrong_bytes,
            summary.client_failures,
            self.kills.len(),
        )
    }

    fn bytes_up(&self) -> u64 {
        self.summary.blocks_hit() * self.block_bytes
    }

    fn bytes_down(&self) -> u64 {
        self.blocks_stored() * self.block_bytes
    }

    fn daemon_counts(&self) -> DaemonCounts {
        self.lives.iter().fold(DaemonCounts::default(), |sum, life| DaemonCounts {
            written: sum.written + life.nvme.bytes_in,
            reclaimed: sum.reclaimed + life.segments_reclaimed,
            corrupt: sum.corrupt + life.corrupt,
            read_failures: sum.read_failures + life.read_failures,
            write_failures: sum.write_failures + life.write_failures,
        })
    }

    /// Over all kills: blocks found again, expected, and reclaimed before and after the restart.
    fn found(&self) -> (u64, u64, u64, u64) {
        let sum = |of: fn(&Kill) -> u64| self.kills.iter().map(of).sum();
        (
            sum(|kill| kill.found),
            sum(|kill| kill.expected),
            sum(|kill| kill.reclaimed),
            sum(|kill| kill.reclaimed_after),
        )
    }

    fn per_gib(&self, seconds: f64) -> f64 {
        let gib = (self.bytes_up() + self.bytes_down()) as f64 / (1u64 << 30) as f64;
        if gib > 0.0 { seconds / gib } else { 0.0 }
    }

    /// The table for people.
    pub fn table(&self) -> Table {
        let mut table = Table::default();
        let summary = &self.summary;
        let blocks = summary.blocks();
        let count = |table: &mut Table, name: &str, count: u64, note: String| {
            table.row([name.to_owned(), show_count(count), note]);
        };
        count(&mut table, "requests", summary.requests, format!("{:.1} s", summary.seconds));
        count(&mut table, "blocks asked for", blocks, String::new());
        let hits = [
            (GPU_HITS, summary.blocks_hit_device),
            ("  hit in host RAM", summary.blocks_hit_host),
            ("  hit on nvme", summary.blocks_hit_nvme),
            ("  hit in all", summary.blocks_hit()),
            ("  missed", summary.blocks_missed),
        ];
        for (name, hit) in hits {
            if self.gpu.is_none() && name == GPU_HITS {
                continue;
            }
            count(&mut table, name, hit, show_ratio(hit, blocks));
        }
        for (reason, missed) in &self.missed {
            count(&mut table, &format!("    missed: {reason}"), *missed, String::new());
        }
        count(&mut table, "blocks verified", summary.blocks_verified, show_bytes(self.bytes_up()));
        count(&mut table, "wrong bytes", summary.wrong_bytes, String::new());
        count(&mut table, "client failures", summary.client_failures, String::new());
        let [stored, present] = self.stored;
        count(&mut table, "blocks stored", stored, show_bytes(self.bytes_down()));
        count(&mut table, "  already there", present, String::new());
        for (reason, blocks) in &self.not_stored {
            count(&mut table, &format!("  not stored: {reason}"), *blocks, String::new());
        }
        count(&mut table, "stores tried again (busy)", self.busy, String::new());
        let daemon = self.daemon_counts();
        count(&mut table, "bytes written to nvme", daemon.written, show_bytes(daemon.written));
        count(&mut table, "segments reclaimed", daemon.reclaimed, String::new());
        count(&mut table, "corrupt blocks dropped", daemon.corrupt, String::new());
        count(&mut table, "nvme reads failed", daemon.read_failures, String::new());
        count(&mut table, "nvme writes failed", daemon.write_failures, String::new());
        table.row([""]);
        table.row(["latency", "p50", "p90", "p99", "p99.9", "max", "calls"]);
        let each = [("lookup", &self.lookup), ("load", &self.load), ("store", &self.store)];
        for (name, histogram) in each {
            let at = |quantile| show_micros(histogram.value_at_quantile(quantile));
            let calls = show_count(histogram.len());
            table.row([name.into(), at(0.5), at(0.9), at(0.99), at(0.999), at(1.0), calls]);
        }
        self.machine_rows(&mut table);
        self.kill_rows(&mut table);
        table
    }

    fn machine_rows(&self, table: &mut Table) {
        let memory = &self.daemon_memory;
        table.row([""]);
        table.row([
            "daemon memory".to_owned(),
            show_bytes(memory.rss_bytes),
            format!("of it shared {}", show_bytes(memory.shared_bytes)),
        ]);
        for (name, seconds) in [("daemon", self.daemon_cpu_s), ("clients", self.client_cpu_s)] {
            table.row([
                format!("{name} CPU"),
                format!("{seconds:.1} s"),
                format!("{:.3} s per GiB moved", self.per_gib(seconds)),
            ]);
        }
        table.row(["daemon start".to_owned(), format!("{} ms", self.start.as_millis())]);
        table.row(["daemon stop".to_owned(), format!("{} ms", self.stop_ms)]);
    }

    fn kill_rows(&self, table: &mut Table) {
        if self.kills.is_empty() {
            return;
        }
        table.row([""]);
        table.row([
            "kill",
            "at",
            "found again",
            "of",
            "part",
            "reclaimed",
            "and after",
            "recovery",
        ]);
        for (kill, number) in self.kills.iter().zip(1..) {
            let how = if kill.at_rest { "at rest" } else { "in mid-flight" };
            table.row([
                format!("{number} {how}"),
                format!("{:.0} s", kill.at_s),
                show_count(kill.found),
                show_count(kill.expected),
                show_ratio(kill.found, kill.expected),
                show_count(kill.reclaimed),
                show_count(kill.reclaimed_after),
                format!("{} ms", kill.recovery_ms),
            ]);
        }
        let (found, expected, reclaimed, after) = self.found();
        table.row([
            "all kills".into(),
            String::new(),
            show_count(found),
            show_count(expected),
            show_ratio(found, expected),
            show_count(reclaimed),
            show_count(after),
        ]);
    }

    /// The object for programs: the agreed fields and the rest.
    pub fn json(&self) -> serde_json::Value {
        let times = |histogram: &Histogram<u64>| {
            json!({
                "p50_us": histogram.value_at_quantile(0.5),
                "p90_us": histogram.value_at_quantile(0.9),
                "p99_us": histogram.value_at_quantile(0.99),
                "p999_us": histogram.value_at_quantile(0.999),
                "max_us": histogram.max(),
                "calls": histogram.len(),
            })
        };
        let (found, expected, reclaimed, reclaimed_after) = self.found();
        let [stored, present] = self.stored;
        let blocks = self.summary.blocks().max(1) as f64;
        let mut object = json!(self.summary);
        let more = json!({
            "hit_ratio": self.summary.blocks_hit() as f64 / blocks,
            "bytes_up": self.bytes_up(),
            "bytes_down": self.bytes_down(),
            "blocks_stored": stored,
            "blocks_present": present,
            "missed": self.missed,
            "not_stored": self.not_stored,
            "busy": self.busy,
            "lookup": times(&self.lookup),
            "load": times(&self.load),
            "store": times(&self.store),
            "daemon_memory": self.daemon_memory,
            "daemon_cpu_s": self.daemon_cpu_s,
            "client_cpu_s": self.client_cpu_s,
            "daemon_cpu_s_per_gib": self.per_gib(self.daemon_cpu_s),
            "client_cpu_s_per_gib": self.per_gib(self.client_cpu_s),
            "daemon_start_ms": self.start.as_millis() as u64,
            "daemon_stop_ms": self.stop_ms,
            "file_system": self.file_system,
            "daemon_io": self.status,
            "gpu": self.gpu,
            "daemon": self.daemon_counts(),
            "catalog": self.lives.last(),
            "kills": self.kills,
            "kills_found": found,
            "kills_expected": expected,
            "kills_reclaimed": reclaimed,
            "kills_reclaimed_after": reclaimed_after,
            "words": self.words,
        });
        if let (Some(object), serde_json::Value::Object(more)) = (object.as_object_mut(), more) {
            object.extend(more);
        }
        object
    }
}
