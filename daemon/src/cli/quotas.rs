//! What tenants hold and may hold, as a table.

use kvtide_client::{OwnerRow, QuotaUse, TierQuotas};

use super::table::{Align, Table};
use crate::units::{bytes, count};

/// The table, empty when nobody holds or may not hold anything.
pub(crate) fn table(owners: &[OwnerRow]) -> String {
    let mut table = Table::new(&[
        ("TENANT", Align::Left),
        ("TIER", Align::Left),
        ("USED", Align::Right),
        ("SOFT", Align::Right),
        ("HARD", Align::Right),
        ("EVICTED FOR IT", Align::Right),
    ]);
    let mut rows = 0;
    for owner in owners {
        for tier in owner.held.tiers.iter().filter(|tier| is_shown(tier)) {
            rows += 1;
            table.row([
                owner.owner.clone(),
                tier.tier.name().to_owned(),
                bytes(tier.used_bytes),
                limit(tier.quota.soft),
                limit(tier.quota.hard),
                count(tier.evicted),
            ]);
        }
    }
    if rows == 0 {
        return String::new();
    }
    let mut out = table.render();
    for owner in owners {
        let held = &owner.held;
        if held.refused > 0 {
            let refused = count(held.refused);
            out.push_str(&format!("{}: {refused} blocks refused for a quota\n", owner.owner));
        }
        if held.conversation != TierQuotas::default() {
            let conversations = count(held.conversations);
            out.push_str(&format!(
                "{}: {conversations} conversations with quotas of their own: {}\n",
                owner.owner,
                conversation_limits(&held.conversation)
            ));
        }
    }
    out
}

fn is_shown(tier: &QuotaUse) -> bool {
    tier.used_bytes > 0 || tier.quota != Default::default() || tier.evicted > 0
}

fn limit(bytes_max: Option<u64>) -> String {
    bytes_max.map_or_else(|| "-".to_owned(), bytes)
}

fn conversation_limits(quotas: &TierQuotas) -> String {
    let tiers = [("device", quotas.device), ("host", quotas.host), ("nvme", quotas.nvme)];
    let limited = tiers.into_iter().filter(|(_, quota)| *quota != Default::default());
    let texts: Vec<String> = limited
        .map(|(name, quota)| format!("{name} {} / {}", limit(quota.soft), limit(quota.hard)))
        .collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use kvtide_client::{OwnerUse, Quota, Tier};

    use super::*;

    #[test]
    fn each_tier_in_use_or_limited_has_its_row() {
        assert_eq!(table(&[]), "");
        let quota = Quota { soft: None, hard: Some(1 << 30) };
        let tier = |tier, used_bytes, quota| QuotaUse { tier, used_bytes, quota, evicted: 3 };
        let held = OwnerUse {
            tiers: vec![
                QuotaUse { evicted: 0, ..tier(Tier::Device, 0, Quota::default()) },
                tier(Tier::Host, 1 << 29, quota),
            ],
            conversation: TierQuotas { host: quota, ..TierQuotas::default() },
            conversations: 2,
            refused: 7,
            ..OwnerUse::default()
        };
        let text = table(&[OwnerRow { owner: "team-a".into(), held }]);
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("team-a  ")).collect();
        assert_eq!(rows.len(), 1, "{text}");
        assert!(rows[0].contains("512.0 MiB") && rows[0].contains("1.0 GiB"), "{text}");
        assert!(text.contains("team-a: 7 blocks refused for a quota\n"), "{text}");
        assert!(text.contains("2 conversations with quotas of their own: host - / 1.0 GiB"));
    }
}
