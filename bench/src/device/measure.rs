//! Checks of one layout, and then its times.

use std::time::Duration;

use kvtide_kernels::{
    driver::Context,
    launch::Kernels,
    yardstick::{Work, Yardstick},
};
use kvtide_tiers::block::{BlockKey, Sum128};
use serde::Serialize;

use super::{
    BLOCKS_MOST,
    layouts::{BLOCK_BYTES, Layout, payload},
};
use crate::payload::Payload;

/// How much is measured.
pub(super) struct Plan {
    /// Places of the pool, and payloads, and host slots: more than a second-level cache holds.
    pub(super) slots: u32,
    /// Blocks of one launch.
    pub(super) blocks: Vec<u32>,
    pub(super) rounds: u32,
    /// Blocks that one timed span moves at least.
    span: u32,
}

impl Plan {
    pub(super) fn new(quick: bool, rounds: u32) -> Plan {
        match quick {
            true => Plan { slots: 8, blocks: vec![1, 8], rounds: 1, span: 1 },
            false => {
                let blocks = vec![1, 8, BLOCKS_MOST];
                Plan { slots: 2 * BLOCKS_MOST, blocks, rounds, span: 4 * BLOCKS_MOST }
            }
        }
    }

    fn repeats(&self, blocks: u32) -> u32 {
        (self.span / blocks).max(1)
    }
}

/// The time of one work.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measure {
    pub(super) layout: &'static str,
    pub(super) work: &'static str,
    pub(super) blocks: u32,
    pub(super) median_us: f64,
    pub(super) least_us: f64,
    /// Payload bytes, in 10^9 a second.
    pub(super) gb_s: f64,
    /// The time of the ceiling divided by this one's.
    pub(super) ratio: Option<f64>,
}

/// What was found out about a layout.
pub(super) struct Part {
    pub(super) measures: Vec<Measure>,
    pub(super) wrong_bytes: u64,
    pub(super) wrong_sums: u64,
}

/// A work, its name, and the work that is its ceiling.
type Named = (Work, &'static str, Option<Work>);

/// What depends on the layout.
const ON_DEVICE: [Named; 3] = [
    (Work::CopyOnDevice, "copy on the device", None),
    (Work::Gather, "gather", Some(Work::CopyOnDevice)),
    (Work::Scatter, "scatter", Some(Work::CopyOnDevice)),
];

/// The rest, which is measured once.
const OTHERS: [Named; 9] = [
    (Work::Sum, "checksum", None),
    (Work::CopyToDevice, "copy up", None),
    (Work::BlocksToDevice, "blocks up", Some(Work::CopyToDevice)),
    (Work::BatchToDevice, "blocks up, one call", Some(Work::CopyToDevice)),
    (Work::Load, "up, checksum, scatter", Some(Work::CopyToDevice)),
    (Work::CopyToHost, "copy down", None),
    (Work::BlocksToHost, "blocks down", Some(Work::CopyToHost)),
    (Work::BatchToHost, "blocks down, one call", Some(Work::CopyToHost)),
    (Work::Store, "gather, checksum, down", Some(Work::CopyToHost)),
];

/// Checks a layout, then times it; with `others`, also the works that no layout matters to.
pub(super) fn layout(
    context: &Context,
    kernels: &Kernels,
    layout: &Layout,
    plan: &Plan,
    others: bool,
) -> anyhow::Result<Part> {
    let mut yardstick = Yardstick::new(context, kernels, &layout.planes, plan.slots)?;
    let (wrong_bytes, mut wrong_sums) = check(&mut yardstick, layout, plan.slots)?;
    let mut measures = Vec::new();
    for blocks in &plan.blocks {
        measures.extend(times(&mut yardstick, layout.name, &ON_DEVICE, *blocks, plan)?);
    }
    if others {
        for blocks in &plan.blocks {
            measures.extend(times(&mut yardstick, layout.name, &OTHERS, *blocks, plan)?);
        }
        // A load whose sums had differed would have scattered nothing, and been fast.
        yardstick.time(Work::Load, plan.slots, 1)?;
        wrong_sums += u64::from(plan.slots - yardstick.sums_equal()?);
    }
    Ok(Part { measures, wrong_bytes, wrong_sums })
}

fn key(place: u32) -> BlockKey {
    let mut key = [7; 32];
    key.iter_mut().zip(place.to_le_bytes()).for_each(|(to, from)| *to = from);
    BlockKey(key)
}

/// Sends every block up, into the pool, out of it and down again, and compares all bytes and sums.
/// Returns how many of each were wrong.
fn check(yardstick: &mut Yardstick, layout: &Layout, slots: u32) -> anyhow::Result<(u64, u64)> {
    let generator = Payload::new();
    let block = BLOCK_BYTES as usize;
    let fill = |(slot, place): (&mut [u8], u32)| generator.fill(&key(place), slot);
    yardstick.host_mut().chunks_mut(block).zip(0..).for_each(fill);
    yardstick.clear(0xee)?;
    let sums = yardstick.expect_sums()?;
    let expected: Vec<u128> = {
        let host = yardstick.host_mut();
        host.chunks(block).map(|slot| u128::from_le_bytes(Sum128::of(slot).0)).collect()
    };
    let wrong_sum = |(sum, slot): &(&[u64; 2], u32)| {
        let [low, high] = **sum;
        let found = u128::from(high) << 64 | u128::from(low);
        expected.get(yardstick.place_of(*slot) as usize) != Some(&found)
    };
    let mut wrong_sums = sums.iter().zip(0u32..).filter(wrong_sum).count() as u64;
    yardstick.time(Work::Load, slots, 1)?;
    wrong_sums += u64::from(slots - yardstick.sums_equal()?);
    let wrong = |place: u32, bytes: &[u8]| {
        let short = block.saturating_sub(bytes.len());
        let from = generator.check(&key(place), bytes).unwrap_or(bytes.len());
        (bytes.len() - from + short) as u64
    };
    let pool = yardstick.region()?;
    let mut wrong_bytes: u64 =
        (0..slots).map(|place| wrong(place, &payload(layout, &pool, place))).sum();
    yardstick.time(Work::Store, slots, 1)?;
    let down = yardstick.host_target().chunks(block).zip(0..);
    wrong_bytes += down.map(|(slot, place)| wrong(place, slot)).sum::<u64>();
    Ok((wrong_bytes, wrong_sums))
}

/// Times works that take turns.
fn times(
    yardstick: &mut Yardstick,
    layout: &'static str,
    works: &[Named],
    blocks: u32,
    plan: &Plan,
) -> anyhow::Result<Vec<Measure>> {
    let repeats = plan.repeats(blocks);
    let mut rounds: Vec<Vec<Duration>> = vec![Vec::new(); works.len()];
    // The first round warms up.
    for round in 0..=plan.rounds {
        for ((work, _, _), times) in works.iter().zip(&mut rounds) {
            let time = yardstick.time(*work, blocks, repeats)?;
            if round > 0 {
                times.push(time);
            }
        }
    }
    for times in &mut rounds {
        times.sort_unstable();
    }
    let median = |times: &Vec<Duration>| {
        times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
    };
    let median_of = |ceiling: Work| {
        let at = works.iter().position(|(work, _, _)| *work == ceiling)?;
        rounds.get(at).map(median)
    };
    let measure = |(&(_, work, ceiling), times): (&Named, &Vec<Duration>)| {
        let median_us = median(times).max(1e-3);
        let bytes = (u64::from(blocks) * BLOCK_BYTES) as f64;
        Measure {
            layout,
            work,
            blocks,
            median_us: rounded(median_us),
            least_us: rounded(times.first().map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)),
            gb_s: rounded(bytes / median_us / 1e3),
            ratio: ceiling.and_then(median_of).map(|ceiling| rounded(ceiling / median_us)),
        }
    };
    Ok(works.iter().zip(&rounds).map(measure).collect())
}

/// To three digits behind the point, which is more than is known.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
