//! `kvtide status`.

use std::time::Duration;

use kvtide_client::{Codec, GpuStatus, PolicyStatus, StatsReply, StatusReport};
use kvtide_tiers::catalog::{
    CodecReport, CodecWhy, LadderReport, OfflineReason, Signal, Step, TierUse,
};
use serde::Serialize;

use super::error::CliError;
use super::out::Out;
use super::quotas;
use super::remote::Remote;
use super::table::{Align, Table, pairs};
use super::worth;
use crate::units::{bytes, count, percent, span};

#[derive(Serialize)]
struct Status {
    status: StatusReport,
    stats: StatsReply,
}

pub(crate) fn run(remote: &Remote, out: Out) -> Result<(), CliError> {
    let found = Status { status: remote.status()?, stats: remote.stats()? };
    out.emit(&found, |found| text(&found.status, &found.stats))
}

fn text(status: &StatusReport, stats: &StatsReply) -> String {
    let yes = |is| if is { "yes" } else { "no" };
    let mut out = pairs(&[
        ("kvtided", format!("{} (protocol {})", status.version, status.protocol)),
        ("process", format!("{}, up {}", status.pid, span(Duration::from_secs(status.uptime_s)))),
        ("socket", status.socket.clone()),
        ("store", status.store.clone()),
        ("you are", format!("tenant {}, operator: {}", status.tenant, yes(status.operator))),
        ("draining", draining(status.draining)),
        ("sessions", count(status.sessions)),
        ("tenants", list(&status.tenants)),
        ("shared", list(&status.shared)),
    ]);
    if let Some(catalog) = &stats.catalog {
        out.push_str(&ladder(&catalog.ladder));
    }
    let mut table = Table::new(&[
        ("TIER", Align::Left),
        ("CAPACITY", Align::Right),
        ("USED", Align::Right),
        ("BLOCKS", Align::Right),
        ("HITS", Align::Right),
        ("HOW", Align::Left),
    ]);
    let catalog = stats.catalog.as_ref();
    let pools = catalog.map_or(&[][..], |catalog| &catalog.device);
    match status.devices.as_slice() {
        [] => table.row(["device", "-", "-", "-", "-", &status.device]),
        gpus => {
            for (at, gpu) in gpus.iter().enumerate() {
                table.row(gpu_row(at, gpu, catalog.is_some().then(|| pools.get(at)).flatten()));
            }
        }
    }
    let host = catalog.map(|catalog| &catalog.host);
    table.row(tier_row("host", status.host_bytes, host, &status.host_pages));
    let nvme = catalog.map(|catalog| &catalog.nvme);
    table.row(tier_row("nvme", status.nvme_bytes, nvme, &status.nvme_io));
    out.push('\n');
    out.push_str(&table.render());
    out.push_str(&format!("\nRAM tier: {}\n", status.host_kept));
    out.push_str(&policy(&status.policy));
    if let Some(catalog) = catalog {
        out.push_str(&worth::short(catalog));
    }
    let held = quotas::table(&stats.owners);
    if !held.is_empty() {
        out.push('\n');
        out.push_str(&held);
    }
    if !status.codecs.is_empty() {
        out.push_str("\ncodecs on nvme:\n");
        for report in &status.codecs {
            out.push_str(&format!("- {}\n", codec(report)));
        }
    }
    if !status.notes.is_empty() {
        out.push_str("\nsaid at start:\n");
        for note in &status.notes {
            out.push_str(&format!("- {note}\n"));
        }
    }
    out
}

/// What a namespace's blocks are written as, and why.
fn codec(report: &CodecReport) -> String {
    let name = match report.codec {
        Codec::Raw => "raw",
        Codec::Lz4 => "lz4",
    };
    let why = match report.why {
        CodecWhy::Configured => "as the configuration says".to_owned(),
        CodecWhy::Element => "its elements do not shrink".to_owned(),
        CodecWhy::NoNvme => "nvme is off".to_owned(),
        CodecWhy::NoTrial => "too few blocks were encoded for trial so far".to_owned(),
        CodecWhy::NoReads => "too little was read so far to know how fast nvme is".to_owned(),
        CodecWhy::Measured { raw_bytes, saved_bytes, saved_us, cost_us } => {
            // Microseconds for bytes are seconds for megabytes.
            let each_gb = |us: u64| us as f64 * 1e3 / raw_bytes.max(1) as f64;
            format!(
                "lz4 saves {} of the bytes and {:.2} s of reading a GB, and decoding takes {:.2} s",
                percent(saved_bytes, raw_bytes),
                each_gb(saved_us),
                each_gb(cost_us),
            )
        }
    };
    format!("namespace {}: {name} ({}): {why}", report.namespace.0, report.choice.name())
}

/// The step of the degradation ladder, and what led to it.
fn ladder(report: &LadderReport) -> String {
    let LadderReport { step, for_ms, why, pressure, .. } = *report;
    let signals = Signal::ALL.map(|signal| format!("{} {} %", signal.name(), pressure.of(signal)));
    let state = match step {
        Step::Normal => "none".to_owned(),
        step => {
            let span = span(Duration::from_millis(for_ms));
            format!("{} for {span}, because of {}", step.name(), why.name())
        }
    };
    pairs(&[("degradation", format!("{state} (pressure: {})", signals.join(", ")))])
}

fn draining(is: bool) -> String {
    match is {
        true => "yes: nothing new is stored; send new conversations to other nodes".to_owned(),
        false => "no".to_owned(),
    }
}

/// Which blocks leave first, and what the drive is written.
fn policy(policy: &PolicyStatus) -> String {
    let PolicyStatus { host, device, nvme, drive } = policy;
    let mut out = format!("eviction: host {host}, device {device}; nvme {nvme}\n");
    let Some(drive) = drive else { return out };
    let over = span(Duration::from_secs(drive.seconds));
    out.push_str(&format!("drive: {}", drive.name));
    if let Some(size) = drive.drive_bytes {
        out.push_str(&format!(", {}", bytes(size)));
    }
    out.push_str(&format!("; {} written in {over}", bytes(drive.written_bytes)));
    if let (Some(all), Some(seconds)) = (drive.machine_written_bytes, drive.machine_seconds) {
        let since = span(Duration::from_secs(seconds));
        out.push_str(&format!(", by all programs {} in {since}", bytes(all)));
    }
    if let Some(day) = drive.bytes_per_day {
        out.push_str(&format!("; {} a day", bytes(day)));
    }
    if let Some(milli) = drive.drive_writes_per_day_milli {
        out.push_str(&format!(", {:.2} drive writes a day", milli as f64 / 1000.0));
    }
    match drive.budget_bytes_per_day {
        Some(day) => {
            let refused = count(drive.refused_blocks);
            let day = bytes(day);
            out.push_str(&format!("\nwrite budget: {day} a day; {refused} blocks refused\n"));
        }
        None => out.push_str("\nwrite budget: none\n"),
    }
    if let (Some(days), Some(rated)) = (drive.life_days, drive.rated_bytes) {
        let years = days as f64 / 365.0;
        let rated = bytes(rated);
        out.push_str(&format!("drive life: {years:.1} years of {rated} at this rate, when new\n"));
    }
    for unknown in &drive.unknown {
        out.push_str(&format!("not known: {unknown}\n"));
    }
    out
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// One GPU: its pool, and how it is.
fn gpu_row(at: usize, gpu: &GpuStatus, pool: Option<&TierUse>) -> Vec<String> {
    let GpuStatus { uuid, name, driver, health, .. } = gpu;
    let state = match &gpu.off {
        Some(why) => format!("OFF: {why}"),
        None if gpu.stuck => format!("STUCK: {health}"),
        None => health.clone(),
    };
    // The reasons of `tier_row` are those of a drive.
    let pool = pool.map(|pool| TierUse { offline: None, ..*pool });
    let how = format!("{uuid}, {name}, driver {driver}, {state}");
    tier_row(&format!("device {at}"), gpu.pool_bytes, pool.as_ref(), &how)
}

fn tier_row(name: &str, capacity: u64, used: Option<&TierUse>, how: &str) -> Vec<String> {
    let mut how = how.to_owned();
    let Some(used) = used else {
        let unknown = || "?".to_owned();
        return vec![name.to_owned(), bytes(capacity), unknown(), unknown(), unknown(), how];
    };
    if let Some(reason) = used.offline {
        how = format!("OFFLINE: {}", offline(reason));
    }
    vec![
        name.to_owned(),
        bytes(capacity),
        format!("{} ({})", bytes(used.used_bytes), percent(used.used_bytes, capacity)),
        count(used.blocks),
        count(used.hits),
        how,
    ]
}

fn offline(reason: OfflineReason) -> &'static str {
    match reason {
        OfflineReason::Configured => "turned off by the configuration",
        OfflineReason::TooManyFailures => "two segments failed; check the drive, then restart",
        OfflineReason::DeviceGone => "the drive vanished or is read-only; check it, then restart",
        _ => "for a reason that this program is too old to name",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtide_client::{DriveStatus, NamespaceId};
    use kvtide_tiers::catalog::{CatalogStats, CodecChoice};

    #[test]
    fn a_tier_that_is_off_says_why_and_what_to_do() {
        let status = StatusReport {
            version: "0.1.0".into(),
            pid: 7,
            uptime_s: 61,
            host_bytes: 1 << 30,
            notes: vec!["nvme: recovered 3 segments".into()],
            ..StatusReport::default()
        };
        let mut catalog = CatalogStats::default();
        catalog.nvme.offline = Some(OfflineReason::DeviceGone);
        catalog.host.used_bytes = 1 << 29;
        let stats = StatsReply { catalog: Some(catalog), ..StatsReply::default() };
        let text = text(&status, &stats);
        assert!(text.contains("OFFLINE: the drive vanished"), "{text}");
        assert!(text.contains("50.0 %"), "{text}");
        assert!(text.contains("7, up 1 min 01 s"), "{text}");
        assert!(text.contains("- nvme: recovered 3 segments"), "{text}");
    }

    #[test]
    fn a_step_of_the_ladder_says_why_and_for_how_long() {
        let report = LadderReport {
            step: Step::NoColdSpill,
            for_ms: 12_000,
            why: Signal::Nvme,
            pressure: kvtide_tiers::catalog::Pressure { nvme: 83, ..Default::default() },
            ..LadderReport::default()
        };
        let text = ladder(&report);
        assert!(text.contains("no spill of cold blocks for 12.0 s, because of nvme"), "{text}");
        assert!(text.contains("nvme 83 %"), "{text}");
        assert!(ladder(&LadderReport::default()).contains("none (pressure"), "{text}");
    }

    #[test]
    fn a_codec_says_what_it_saves_and_what_it_costs() {
        let why = CodecWhy::Measured {
            raw_bytes: 100_000_000,
            saved_bytes: 16_000_000,
            saved_us: 11_000,
            cost_us: 40_000,
        };
        let report = CodecReport {
            namespace: NamespaceId(3),
            choice: CodecChoice::Auto,
            codec: Codec::Raw,
            why,
        };
        let status = StatusReport { codecs: vec![report], ..StatusReport::default() };
        let text = text(&status, &StatsReply::default());
        let wanted = "- namespace 3: raw (auto): lz4 saves 16.0 % of the bytes and 0.11 s of \
                      reading a GB, and decoding takes 0.40 s\n";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn each_gpu_has_its_row_and_a_stuck_one_is_named() {
        let gpu = |uuid: &str, stuck: bool, off: Option<&str>| GpuStatus {
            uuid: uuid.into(),
            name: "NVIDIA H200".into(),
            driver: "13.0".into(),
            pool_bytes: 1 << 30,
            health: if stuck { "a copy has been under way for 12 s" } else { "ok" }.into(),
            stuck,
            off: off.map(str::to_owned),
        };
        let devices = vec![
            gpu("GPU-a", false, None),
            gpu("GPU-b", true, None),
            gpu("GPU-c", false, Some("error 700 of cuLaunchKernel")),
        ];
        let status = StatusReport { devices, ..StatusReport::default() };
        let used = TierUse { used_bytes: 1 << 29, blocks: 7, ..TierUse::default() };
        let catalog = CatalogStats { device: vec![used; 3], ..CatalogStats::default() };
        let stats = StatsReply { catalog: Some(catalog), ..StatsReply::default() };
        let text = text(&status, &stats);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line("device 0").contains("512.0 MiB (50.0 %)"), "{text}");
        assert!(line("device 0").ends_with("GPU-a, NVIDIA H200, driver 13.0, ok"), "{text}");
        assert!(line("device 1").ends_with("STUCK: a copy has been under way for 12 s"), "{text}");
        assert!(line("device 2").ends_with("OFF: error 700 of cuLaunchKernel"), "{text}");
    }

    #[test]
    fn writes_are_shown_beside_budget_and_rating() {
        let drive = DriveStatus {
            name: "nvme0n1".into(),
            drive_bytes: Some(1 << 40),
            written_bytes: 1 << 30,
            seconds: 3600,
            refused_blocks: 1234,
            budget_bytes_per_day: Some(48 << 30),
            rated_bytes: Some(1 << 50),
            bytes_per_day: Some(24 << 30),
            drive_writes_per_day_milli: Some(23),
            life_days: Some(43_690),
            unknown: vec!["a thing: for a reason".into()],
            ..DriveStatus::default()
        };
        let host = "pre".to_owned();
        let policy = PolicyStatus { host, drive: Some(drive), ..PolicyStatus::default() };
        let status = StatusReport { policy, ..StatusReport::default() };
        let text = text(&status, &StatsReply::default());
        for wanted in [
            "eviction: host pre",
            "drive: nvme0n1, 1.0 TiB; 1.0 GiB written in 1 h 00 min; 24.0 GiB a day, 0.02 drive",
            "write budget: 48.0 GiB a day; 1,234 blocks refused",
            "drive life: 119.7 years of 1.0 PiB",
            "not known: a thing: for a reason",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
    }

    #[test]
    fn who_is_no_operator_sees_capacities_but_no_use() {
        let text = text(&StatusReport::default(), &StatsReply::default());
        assert!(text.contains("host         0 B     ?"), "{text}");
    }
}
