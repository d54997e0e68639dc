//! The tables `quota` and `conversation_quota` of a tenant or a shared namespace.

use kvtide_tiers::catalog::{OwnerQuotas, Quota, TierQuotas};

use super::file::BYTES_MAX;
use super::read::{Reader, Section, show_bytes};

/// The smallest quota.
const QUOTA_BYTES_MIN: u64 = 4096;

/// Reads both tables.
pub(super) fn read_quotas(reader: &mut Reader<'_>, section: &mut Section<'_, '_>) -> OwnerQuotas {
    let all = section.section(reader, "quota");
    let conversation = section.section(reader, "conversation_quota");
    let mut read = |section| read_tiers(reader, section);
    OwnerQuotas {
        all: all.map(&mut read).unwrap_or_default(),
        conversation: conversation.map(&mut read).unwrap_or_default(),
    }
}

fn read_tiers(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> TierQuotas {
    let quotas = TierQuotas {
        device: read_quota(reader, &mut section, "device_soft", "device_hard"),
        host: read_quota(reader, &mut section, "host_soft", "host_hard"),
        nvme: read_quota(reader, &mut section, "nvme_soft", "nvme_hard"),
    };
    section.finish(reader);
    quotas
}

fn read_quota(
    reader: &mut Reader<'_>,
    section: &mut Section<'_, '_>,
    soft: &'static str,
    hard: &'static str,
) -> Quota {
    let range = QUOTA_BYTES_MIN..=BYTES_MAX;
    let low = section.bytes(reader, soft, range.clone());
    let high = section.bytes(reader, hard, range);
    if let (Some(low), Some(high)) = (&low, &high)
        && low.value > high.value
    {
        let (low_bytes, high_bytes) = (show_bytes(low.value), show_bytes(high.value));
        let what = format!("`{soft}` is {low_bytes}, above `{hard}` with {high_bytes}");
        reader.problem(low.line, what, "at most as much as the hard quota is allowed");
    }
    Quota { soft: low.map(|found| found.value), hard: high.map(|found| found.value) }
}
