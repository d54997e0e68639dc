//! The sections `[arbiter]` (whether loads are worth it) and `[prefill]` (how much may be computed
//! at a time).

use kvtide_tiers::catalog::{ArbiterConfig, PrefillConfig};

use super::read::{Reader, Section};

/// The most weighted tokens of a budget.
const TOKENS_MAX: u64 = 1 << 40;

/// The largest weight of a tenant.
pub(super) const WEIGHT_MAX: u64 = 1000;

pub(super) fn read_arbiter(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> ArbiterConfig {
    let mut out = ArbiterConfig::default();
    if let Some(found) = section.flag(reader, "enabled") {
        out.enabled = found.value;
    }
    if let Some(found) = section.number(reader, "window_ms", 100..=3_600_000) {
        out.window_ms = found.value;
    }
    let mut small = |key, range, place: &mut u32| {
        if let Some(found) = section.number(reader, key, range) {
            *place = u32::try_from(found.value).unwrap_or(u32::MAX);
        }
    };
    small("loads_min", 1..=100_000, &mut out.loads_min);
    small("probe_every", 1..=100_000, &mut out.probe_every);
    section.finish(reader);
    out
}

pub(super) fn read_prefill(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> PrefillConfig {
    let mut out = PrefillConfig::default();
    let tokens = section.number(reader, "tokens_per_second", 1..=TOKENS_MAX);
    out.tokens_per_second = tokens.map(|found| found.value);
    let tokens = section.number(reader, "tokens_in_flight", 1..=TOKENS_MAX);
    out.tokens_in_flight = tokens.map(|found| found.value);
    if let Some(found) = section.number(reader, "queue", 1..=65_536) {
        out.queue = usize::try_from(found.value).unwrap_or(usize::MAX);
    }
    let mut number = |key, range, place: &mut u64| {
        if let Some(found) = section.number(reader, key, range) {
            *place = found.value;
        }
    };
    number("quadratic_tokens", 1..=TOKENS_MAX, &mut out.quadratic_tokens);
    number("grant_ms", 1000..=86_400_000, &mut out.grant_ms);
    number("ramp_ms", 0..=86_400_000, &mut out.ramp_ms);
    number("degrade_ms", 0..=86_400_000, &mut out.degrade_ms);
    number("store_ms", 0..=3_600_000, &mut out.store_ms);
    section.finish(reader);
    out
}
