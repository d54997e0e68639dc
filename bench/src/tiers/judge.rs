//! The targets that this benchmark can judge, set against what one configuration came to.

use serde_json::{Value, json};

use super::{
    Setup,
    calls::Calls,
    measure::{Direction, How, Kind, Measures, Work},
};
use kvtide_client::Tier;

/// What the calls of one block may cost beside their copy and two ping-pongs, microseconds.
const CALL_EXTRA_US: f64 = 150.0;

/// One target.
#[derive(Debug)]
pub(super) struct Target {
    what: String,
    wanted: String,
    measured: String,
    met: bool,
}

impl Target {
    fn new(what: impl Into<String>, wanted: String, measured: String, met: bool) -> Target {
        Target { what: what.into(), wanted, measured, met }
    }
}

/// All targets that apply to the configuration and were measured.
pub(super) fn judge(setup: &Setup, measures: &Measures, calls: Option<&Calls>) -> Vec<Target> {
    let mut targets = Vec::new();
    // The targets are for blocks of this size; other sizes are shown without a verdict.
    if setup.block_bytes == 2 << 20 {
        targets.extend(nvme(measures));
        targets.extend(nvme_p99(measures, setup.clients));
        if setup.clients == 1 {
            targets.extend(host(measures, setup.batch));
            targets.extend(calls.map(|calls| one_block(measures, calls)).unwrap_or_default());
        }
    }
    if let Some(calls) = calls {
        targets.extend(control(calls));
    }
    targets
}

fn nvme(measures: &Measures) -> Vec<Target> {
    let mut targets = Vec::new();
    for direction in [Direction::Load, Direction::Store] {
        let best = measures.best(Work::Nvme, direction);
        let Some(((kind, ratio), beside)) = best
            .and_then(|kind| Some((kind, measures.ratio(kind)?)))
            .zip(best.and_then(|kind| measures.yardstick(kind)))
        else {
            continue;
        };
        let (gb_s, raw) = (measures.gb_s(kind), measures.gb_s(beside));
        let what = match direction {
            Direction::Load => "nvme load, best depth, to raw read",
            Direction::Store => "nvme store until in a segment, to raw write",
        };
        let net = match measures.ratio_without_pause(kind).filter(|_| direction == Direction::Store)
        {
            Some(net) => format!("; {net:.2} without the wait for idleness"),
            None => String::new(),
        };
        targets.push(Target::new(
            what,
            ">= 0.90".into(),
            format!(
                "{ratio:.2} ({:.2} GB/s with {} x {}; raw {:.2} GB/s at depth {}{net})",
                gb_s.unwrap_or(0.0),
                kind.depth,
                kind.batch,
                raw.unwrap_or(0.0),
                beside.depth
            ),
            ratio >= 0.90,
        ));
        targets.extend(nvme_more(measures, kind));
    }
    targets
}

fn nvme_more(measures: &Measures, kind: Kind) -> Option<Target> {
    let daemon = measures.cpu(kind).0;
    if kind.direction == Direction::Store {
        let host = measures.best(Work::Host, Direction::Store)?;
        let below = daemon - measures.cpu(host).0;
        return Some(Target::new(
            "nvme store below the copy, daemon CPU",
            "<= 0.20 s/GiB".into(),
            format!("{below:.3} s/GiB ({daemon:.3} less {:.3} of the host store)", daemon - below),
            below <= 0.20,
        ));
    }
    Some(Target::new(
        "nvme load, daemon CPU",
        "<= 0.35 s/GiB".into(),
        format!("{daemon:.3} s/GiB"),
        daemon <= 0.35,
    ))
}

/// A call of 16 blocks has 16 transfers under way, and ends with the last: it is set beside single
/// transfers of a raw ring that has about as many under way.
fn nvme_p99(measures: &Measures, clients: usize) -> Option<Target> {
    let kind = measures.best(Work::Nvme, Direction::Load)?;
    let depth = kind.batch * kind.depth * clients;
    let raw =
        measures.kinds(Work::Raw, Direction::Load).min_by_key(|raw| raw.depth.abs_diff(depth))?;
    let (p99, raw_p99) = (measures.quantile_us(kind, 0.99), measures.quantile_us(raw, 0.99));
    let ratio = p99 as f64 / raw_p99.max(1) as f64;
    Some(Target::new(
        "nvme load, best depth, p99 of a call to p99 of a raw transfer",
        "<= 1.5".into(),
        format!(
            "{ratio:.2} ({:.1} ms with {} x {}; raw {:.1} ms at depth {})",
            p99 as f64 / 1e3,
            kind.depth,
            kind.batch,
            raw_p99 as f64 / 1e3,
            raw.depth
        ),
        ratio <= 1.5,
    ))
}

fn host(measures: &Measures, batch: usize) -> Vec<Target> {
    let mut targets = Vec::new();
    for (direction, least) in [(Direction::Load, 0.90), (Direction::Store, 0.85)] {
        let of_batch = |kind: &Kind| kind.batch == batch;
        let speed = |kind: &Kind| measures.ratio(*kind).unwrap_or(0.0);
        let best = measures
            .kinds(Work::Host, direction)
            .filter(of_batch)
            .max_by(|one, two| speed(one).total_cmp(&speed(two)));
        let Some((kind, ratio)) = best.zip(best.and_then(|kind| measures.ratio(kind))) else {
            continue;
        };
        let verb = if direction == Direction::Load { "load" } else { "store" };
        let beside = measures.yardstick(kind).and_then(|kind| measures.gb_s(kind));
        targets.push(Target::new(
            format!("host {verb}, {batch} blocks a call, to memcpy"),
            format!(">= {least:.2}"),
            format!(
                "{ratio:.2} ({:.2} GB/s with {} calls; memcpy {:.2} GB/s)",
                measures.gb_s(kind).unwrap_or(0.0),
                kind.depth,
                beside.unwrap_or(0.0)
            ),
            ratio >= least,
        ));
        if direction == Direction::Store {
            let (daemon, client) = measures.cpu(kind);
            let per_gb = (daemon + client) * 1e9 / (1u64 << 30) as f64;
            targets.push(Target::new(
                "host store, CPU of client and daemon",
                "<= 0.32 s/GB".into(),
                format!("{per_gb:.3} s/GB"),
                per_gb <= 0.32,
            ));
        }
    }
    targets
}

fn one_block(measures: &Measures, calls: &Calls) -> Vec<Target> {
    let how = How { batch: 1, calls: 1 };
    let Some(ping) = calls.ping_pong_us() else { return Vec::new() };
    let mut targets = Vec::new();
    for (name, kind) in [("load", how.load(Tier::Host)), ("store", how.store(Tier::Host))] {
        let Some(memcpy) = measures.yardstick(kind) else { continue };
        let (p50, copy) = (measures.quantile_us(kind, 0.5), measures.quantile_us(memcpy, 0.5));
        let budget = copy as f64 + 2.0 * ping + CALL_EXTRA_US;
        let spare = budget - p50 as f64;
        targets.push(Target::new(
            format!("one block a call, {name}, p50"),
            format!("<= {budget:.0} us"),
            format!(
                "{p50} us, {} us {} (memcpy {copy} us, 2 x ping-pong {:.0} us, and 150 us)",
                spare.abs().round(),
                if spare >= 0.0 { "to spare" } else { "too slow" },
                2.0 * ping
            ),
            spare >= 0.0,
        ));
    }
    targets
}

fn control(calls: &Calls) -> Vec<Target> {
    let mut targets = Vec::new();
    if let Some(idle) = calls.idle_percent() {
        let measured = format!("{idle:.2} %");
        targets.push(Target::new("idle daemon", "< 0.5 % of a core".into(), measured, idle < 0.5));
    }
    if let Some((us, ratio)) = calls.lookup() {
        targets.push(Target::new(
            "lookup of 256 keys, p50, to ping-pong",
            "<= 5".into(),
            format!("{ratio:.1} ({us:.0} us)"),
            ratio <= 5.0,
        ));
    }
    if let Some((per_s, threads)) = calls.lookups_per_s() {
        targets.push(Target::new(
            "lookups of 256 keys with 8 clients",
            ">= 20,000 a second".into(),
            format!("{per_s:.0} a second, clients in {threads} threads"),
            per_s >= 20_000.0,
        ));
    }
    targets
}

/// The verdicts, for people: a line each.
pub(super) fn lines(targets: &[Target]) -> Vec<String> {
    let line = |target: &Target| {
        let Target { what, wanted, measured, met } = target;
        format!("{:<6}  {what} {wanted}: {measured}", if *met { "met" } else { "MISSED" })
    };
    targets.iter().map(line).collect()
}

/// The verdicts, for programs.
pub(super) fn json(targets: &[Target]) -> Vec<Value> {
    let one = |target: &Target| {
        let Target { what, wanted, measured, met } = target;
        json!({ "what": what, "wanted": wanted, "measured": measured, "met": met })
    };
    targets.iter().map(one).collect()
}
