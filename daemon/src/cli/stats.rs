//! `kvtide stats`: counters, once or as they change.

use std::thread;
use std::time::{Duration, Instant};

use kvtide_client::{CatalogStats, StatsReply, TenantStats};

use super::args::Stats;
use super::error::CliError;
use super::out::{Out, print};
use super::quotas;
use super::remote::Remote;
use super::table::{Align, Table, pairs};
use super::worth;
use crate::units::{bytes, count, percent};

pub(crate) fn run(args: &Stats, remote: &Remote, out: Out) -> Result<(), CliError> {
    let first = remote.stats()?;
    if !args.watch {
        return out.emit(&first, text);
    }
    let mut before = (Instant::now(), first);
    let mut printed = 0u64;
    while args.count.is_none_or(|count| printed < count) {
        thread::sleep(args.interval);
        let now = (Instant::now(), remote.stats()?);
        if out.json {
            out.emit(&now.1, text)?;
        } else {
            if printed.is_multiple_of(20) {
                print(&watch_header())?;
            }
            print(&watch_line(&before.1, &now.1, now.0 - before.0))?;
        }
        before = now;
        printed += 1;
    }
    Ok(())
}

fn text(stats: &StatsReply) -> String {
    let mut out = String::new();
    if let Some(catalog) = &stats.catalog {
        out.push_str(&catalog_text(catalog));
        out.push('\n');
        out.push_str(&worth::long(catalog));
        out.push('\n');
    }
    if let Some(service) = &stats.service {
        out.push_str(&pairs(&[
            ("connections accepted", count(service.connections)),
            ("hellos refused", reasons(&service.hellos_refused, Clone::clone)),
            ("bad frames", count(service.frames_bad)),
            ("panics", count(service.panics)),
            ("calls", reasons(&service.calls, Clone::clone)),
            ("calls answered busy", count(service.calls_busy)),
            ("calls refused", count(service.calls_refused)),
        ]));
        out.push('\n');
    }
    out.push_str(&tenants_text(&stats.tenants));
    let held = quotas::table(&stats.owners);
    if !held.is_empty() {
        out.push('\n');
        out.push_str(&held);
    }
    out
}

fn catalog_text(catalog: &CatalogStats) -> String {
    let mut tiers = Table::new(&[
        ("TIER", Align::Left),
        ("CAPACITY", Align::Right),
        ("USED", Align::Right),
        ("BLOCKS", Align::Right),
        ("HITS", Align::Right),
        ("MOVED IN", Align::Right),
        ("MOVED OUT", Align::Right),
        ("EVICTED", Align::Right),
    ]);
    let gpus = catalog.device.iter().enumerate().map(|(at, tier)| (format!("device {at}"), tier));
    let rest = [("host".to_owned(), &catalog.host), ("nvme".to_owned(), &catalog.nvme)];
    for (name, tier) in gpus.chain(rest) {
        tiers.row([
            name,
            bytes(tier.capacity_bytes),
            bytes(tier.used_bytes),
            count(tier.blocks),
            count(tier.hits),
            bytes(tier.bytes_in),
            bytes(tier.bytes_out),
            count(tier.evicted),
        ]);
    }
    let rest = pairs(&[
        (
            "blocks",
            format!("{} ({} only in RAM)", count(catalog.blocks), count(catalog.dirty_blocks)),
        ),
        ("sessions", count(catalog.sessions)),
        ("regions", count(catalog.regions)),
        ("leases", count(catalog.leases)),
        ("pins", count(catalog.pins)),
        ("tickets under way", count(catalog.tickets)),
        ("lookups", count(catalog.lookups)),
        (
            "keys found",
            format!(
                "{} of {} ({})",
                count(catalog.lookup_hits),
                count(catalog.lookup_keys),
                percent(catalog.lookup_hits, catalog.lookup_keys)
            ),
        ),
        ("stored", count(catalog.stored)),
        ("stored before", count(catalog.present)),
        ("stores without room", count(catalog.store_busy)),
        ("stores rejected", reasons(&catalog.rejected, |reason| format!("{reason:?}"))),
        ("loads missed", reasons(&catalog.missed, |reason| format!("{reason:?}"))),
        ("corrupt blocks dropped", count(catalog.corrupt)),
        ("write failures", count(catalog.write_failures)),
        ("read failures", count(catalog.read_failures)),
        ("segments reclaimed", count(catalog.segments_reclaimed)),
        ("segments quarantined", count(catalog.segments_quarantined)),
        ("blocks reinserted", count(catalog.reinserted)),
    ]);
    format!("{}\n{rest}", tiers.render())
}

fn tenants_text(tenants: &[TenantStats]) -> String {
    let mut table = Table::new(&[
        ("TENANT", Align::Left),
        ("SESSIONS", Align::Right),
        ("LOOKUPS", Align::Right),
        ("KEYS", Align::Right),
        ("FOUND", Align::Right),
        ("FROM DEVICE", Align::Right),
        ("FROM HOST", Align::Right),
        ("FROM NVME", Align::Right),
        ("MISSED", Align::Right),
        ("STORED", Align::Right),
        ("NOT STORED", Align::Right),
    ]);
    for tenant in tenants {
        table.row([
            tenant.tenant.clone(),
            count(tenant.sessions),
            count(tenant.lookups),
            count(tenant.lookup_keys),
            percent(tenant.lookup_hits, tenant.lookup_keys),
            count(tenant.loaded_device),
            count(tenant.loaded_host),
            count(tenant.loaded_nvme),
            count(tenant.missed),
            count(tenant.stored),
            count(tenant.not_stored),
        ]);
    }
    table.render()
}

/// `absent 12, lease 3`, and the sum in front.
fn reasons<R>(counted: &[(R, u64)], name: impl Fn(&R) -> String) -> String {
    let sum: u64 = counted.iter().map(|(_, number)| number).sum();
    let parts: Vec<String> = counted
        .iter()
        .filter(|(_, number)| *number > 0)
        .map(|(reason, number)| format!("{} {}", name(reason), count(*number)))
        .collect();
    match parts.is_empty() {
        true => count(sum),
        false => format!("{} ({})", count(sum), parts.join(", ")),
    }
}

const WATCHED: [(&str, usize); 9] = [
    ("LOOKUPS/s", 10),
    ("FOUND", 8),
    ("DEVICE/s", 9),
    ("HOST/s", 9),
    ("NVME/s", 9),
    ("MISSED/s", 9),
    ("STORED/s", 9),
    ("HOST", 11),
    ("NVME", 11),
];

fn watch_header() -> String {
    watch_cells(&WATCHED.map(|(name, _)| name.to_owned()))
}

fn watch_cells(cells: &[String; WATCHED.len()]) -> String {
    let mut line = String::new();
    for (cell, (_, width)) in cells.iter().zip(WATCHED) {
        line.push_str(&format!("{cell:>width$} "));
    }
    format!("{}\n", line.trim_end())
}

/// What happened between two readings, as rates a second. Counters that went backwards (the daemon
/// was restarted) count as nothing.
fn watch_line(before: &StatsReply, now: &StatsReply, time: Duration) -> String {
    let sum = |stats: &StatsReply, field: fn(&TenantStats) -> u64| -> u64 {
        stats.tenants.iter().map(field).sum()
    };
    let grown = |field: fn(&TenantStats) -> u64| sum(now, field).saturating_sub(sum(before, field));
    let rate = |field| format!("{:.0}", grown(field) as f64 / time.as_secs_f64().max(1e-3));
    let used = |tier: fn(&CatalogStats) -> u64| match &now.catalog {
        Some(catalog) => bytes(tier(catalog)),
        None => "?".to_owned(),
    };
    watch_cells(&[
        rate(|tenant| tenant.lookups),
        percent(grown(|tenant| tenant.lookup_hits), grown(|tenant| tenant.lookup_keys)),
        rate(|tenant| tenant.loaded_device),
        rate(|tenant| tenant.loaded_host),
        rate(|tenant| tenant.loaded_nvme),
        rate(|tenant| tenant.missed),
        rate(|tenant| tenant.stored),
        used(|catalog| catalog.host.used_bytes),
        used(|catalog| catalog.nvme.used_bytes),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtide_client::{MissReason, TierUse};

    fn stats(lookups: u64) -> StatsReply {
        let tenant = TenantStats {
            tenant: "a".into(),
            lookups,
            lookup_keys: 4 * lookups,
            lookup_hits: lookups,
            ..TenantStats::default()
        };
        let catalog = CatalogStats {
            device: vec![TierUse { blocks: 77, ..TierUse::default() }],
            missed: vec![(MissReason::Absent, 3), (MissReason::Checksum, 0)],
            ..CatalogStats::default()
        };
        StatsReply { catalog: Some(catalog), tenants: vec![tenant], ..StatsReply::default() }
    }

    #[test]
    fn counters_are_shown_with_their_reasons() {
        let text = text(&stats(1200));
        assert!(text.contains("loads missed            3 (Absent 3)"), "{text}");
        assert!(text.contains("1,200"), "{text}");
        assert!(text.contains("25.0 %"), "{text}");
        let device = text.lines().find(|line| line.starts_with("device 0")).unwrap();
        assert!(device.contains(" 77 "), "{text}");
    }

    #[test]
    fn watching_shows_rates_and_survives_a_restart_of_the_daemon() {
        let line = watch_line(&stats(100), &stats(300), Duration::from_secs(2));
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells[..3], ["100", "25.0", "%"], "{line}");
        let line = watch_line(&stats(100), &stats(1), Duration::from_secs(1));
        assert!(line.trim_start().starts_with("0 "), "{line}");
        assert_eq!(watch_header().lines().count(), 1);
    }
}
