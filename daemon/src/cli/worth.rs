//! What `status` and `stats` say of whether loads are worth it, and of prefills.

use std::time::Duration;

use kvtide_client::{CatalogStats, PrefillStats, Withheld};

use super::table::{Align, Table, pairs};
use crate::units::{bytes, count, span};

/// A line for each tier that is not offered, and one for prefills that are rationed. Empty when
/// there is nothing of the kind.
pub(super) fn short(catalog: &CatalogStats) -> String {
    let mut out = String::new();
    if !catalog.withheld.is_empty() {
        out.push_str("\nnot offered, because loading took longer than computing:\n");
        for row in &catalog.withheld {
            out.push_str(&format!("- {}\n", withheld(row)));
        }
    }
    let prefill = &catalog.prefill;
    if prefill.rationed {
        let rate = match prefill.tokens_per_second {
            0 => String::new(),
            tokens => format!(", {} a second now", count(tokens)),
        };
        out.push_str(&format!(
            "\nprefills: {} under way with {} weighted tokens{rate}, {} waiting\n",
            count(prefill.grants.into()),
            count(prefill.tokens_in_flight),
            count(prefill.queued.into()),
        ));
    }
    out
}

fn withheld(row: &Withheld) -> String {
    let probes = match row.probes_net_us {
        None => "not tried again yet".to_owned(),
        Some(net) if net > 0 => format!("the latest tries saved {}", seconds(net.unsigned_abs())),
        Some(net) => format!("the latest tries lost {}", seconds(net.unsigned_abs())),
    };
    format!(
        "{} for namespace {}: lost {} by {} loads, for {} now; {probes}",
        row.tier.name(),
        row.namespace.0,
        seconds(row.lost_us),
        count(row.loads.into()),
        span(Duration::from_micros(row.for_us)),
    )
}

/// The whole of it.
pub(super) fn long(catalog: &CatalogStats) -> String {
    let mut table = Table::new(&[
        ("TIER", Align::Left),
        ("LOADS", Align::Right),
        ("SAVED", Align::Right),
        ("LOST", Align::Right),
        ("A SECOND", Align::Right),
        ("ADVISED AGAINST", Align::Right),
        ("NOT OFFERED", Align::Right),
        ("TRIED", Align::Right),
        ("OFFERED", Align::Left),
    ]);
    for row in &catalog.worth {
        table.row([
            row.tier.name().to_owned(),
            count(row.loads),
            seconds(row.saved_us),
            seconds(row.lost_us),
            if row.bytes_per_second > 0 { bytes(row.bytes_per_second) } else { "?".to_owned() },
            count(row.advised_against),
            count(row.withheld),
            count(row.probes),
            match row.namespaces_withheld {
                0 => "yes".to_owned(),
                out => format!("not to {}", count(out.into())),
            },
        ]);
    }
    let PrefillStats { reports, reports_unused, namespaces_known, .. } = catalog.prefill;
    let prefill = &catalog.prefill;
    let rest = pairs(&[
        (
            "prefills reported",
            format!(
                "{} ({} more not used), {} namespaces known",
                count(reports),
                count(reports_unused),
                count(namespaces_known.into())
            ),
        ),
        (
            "prefills admitted",
            format!("{}, {} tokens", count(prefill.admitted), count(prefill.admitted_tokens)),
        ),
        ("told to wait", count(prefill.told_to_wait)),
        ("told to wait for the same", count(prefill.coalesced)),
        ("told to keep fewer turns", count(prefill.degraded)),
        ("found the queue full", count(prefill.queue_full)),
        ("prefills lapsed", count(prefill.lapsed)),
    ]);
    format!("{}\n{rest}{}", table.render(), short(catalog))
}

fn seconds(us: u64) -> String {
    format!("{:.3} s", us as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use kvtide_client::{NamespaceId, Tier, TierWorth};

    use super::*;

    #[test]
    fn a_tier_that_is_not_offered_is_named_with_the_reason() {
        let row = Withheld {
            namespace: NamespaceId(3),
            tier: Tier::Nvme,
            for_us: 61_000_000,
            lost_us: 2_500_000,
            loads: 4,
            probes_net_us: Some(-90_000),
        };
        let worth = TierWorth {
            tier: Tier::Nvme,
            saved_us: 1_000,
            lost_us: 2_500_000,
            loads: 9,
            advised_against: 0,
            withheld: 5,
            probes: 1,
            bytes_per_second: 1 << 30,
            namespaces_withheld: 1,
        };
        let prefill = PrefillStats { rationed: true, queued: 7, ..PrefillStats::default() };
        let (withheld, worth) = (vec![row], vec![worth]);
        let catalog = CatalogStats { withheld, worth, prefill, ..CatalogStats::default() };
        let text = long(&catalog);
        let wanted = "- nvme for namespace 3: lost 2.500 s by 4 loads, for 1 min 01 s now; the \
                      latest tries lost 0.090 s\n";
        assert!(text.contains(wanted), "{text}");
        let row = text.lines().find(|line| line.starts_with("nvme ")).unwrap();
        assert!(row.contains("2.500 s") && row.ends_with("not to 1"), "{text}");
        assert!(text.contains("with 0 weighted tokens, 7 waiting"), "{text}");
        assert_eq!(short(&CatalogStats::default()), "");
    }
}
