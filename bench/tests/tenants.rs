//! A tenant that floods the cache beside one whose requests were recorded: at its hard quota it
//! does not lower the other one's hits, whatever it stores.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::path::PathBuf;

use kvtide_bench::{
    sim::{FloodArgs, SimArgs, SimHints, SimResult, simulate},
    trace::trace_folder,
};

const GIB: u64 = 1 << 30;

/// The trace, or `None` with a loud word when the public traces are not on this machine.
fn trace() -> Option<PathBuf> {
    let path = trace_folder().join("mooncake_conversation.jsonl.zst");
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: no {}; set KVTIDE_TRACES to the folder of public traces", path.display());
    None
}

/// Capacities of host RAM and nvme.
type Sizes = (u64, Option<u64>);

fn replay(trace: PathBuf, policy: &str, sizes: Sizes, flood: FloodArgs) -> SimResult {
    let result = simulate(&SimArgs {
        trace,
        policy: policy.to_owned(),
        capacity_blocks: None,
        block_bytes: 1 << 20,
        host_bytes: sizes.0,
        device_bytes: None,
        nvme_bytes: sizes.1,
        nvme_segment_bytes: None,
        nvme_write_bytes_per_day: None,
        clients: 1,
        hints: SimHints::None,
        trace_time: true,
        weigh_cost: false,
        compare: false,
        block_tokens: Some(512),
        requests: Some(4_000),
        flood,
        json: false,
    });
    result.unwrap()
}

/// The first tenant alone in the capacity less the second one's quota; beside that one at its
/// quota; and beside it without a quota.
fn hits(trace: PathBuf, policy: &str, sizes: Sizes, quota: Sizes) -> (u64, u64, u64) {
    let less = (sizes.0 - quota.0, sizes.1.map(|bytes| bytes - quota.1.unwrap()));
    let flood = FloodArgs { flood: Some(16), ..FloodArgs::default() };
    let limited =
        FloodArgs { flood_host_hard: Some(quota.0), flood_nvme_hard: quota.1, ..flood.clone() };
    let alone = replay(trace.clone(), policy, less, FloodArgs::default());
    let beside = replay(trace.clone(), policy, sizes, limited);
    let unlimited = replay(trace, policy, sizes, flood);
    let found = beside.flood.unwrap();
    assert_eq!(found.offered, 64_000);
    assert!(found.most_bytes[1] <= quota.0, "host RAM: {found:?}");
    // The flood is at its quota where its blocks are kept longest.
    match quota.1 {
        Some(most) => {
            let used = found.most_bytes[2];
            assert!(used <= most && used > most - most / 10, "nvme: {found:?}");
        }
        None => assert_eq!(found.most_bytes[1], quota.0, "host RAM: {found:?}"),
    }
    let hits = |result: &SimResult| result.summary.blocks_hit();
    (hits(&alone), beside.summary.blocks_hit(), hits(&unlimited))
}

fn check(policy: &str, sizes: Sizes, quota: Sizes) -> Option<(u64, u64)> {
    let (alone, beside, unlimited) = hits(trace()?, policy, sizes, quota);
    println!("{policy}: {alone} hits alone, {beside} beside a flood, {unlimited} without a quota");
    assert!(alone > 6_000, "there is something to lose: {alone}");
    assert!(beside * 100 >= alone * 99, "{policy}: alone {alone}, beside a flood {beside}");
    Some((alone, unlimited))
}

#[test]
fn a_flood_at_its_quota_of_host_ram_lowers_nobody_elses_hits() {
    for policy in ["pre", "lru"] {
        let found = check(policy, (4 * GIB, None), (GIB, None));
        if let Some((alone, unlimited)) = found.filter(|_| policy == "lru") {
            assert!(unlimited * 100 < alone * 95, "without a quota it would: {unlimited}");
        }
    }
}

#[test]
fn a_flood_at_its_quotas_of_host_ram_and_nvme_lowers_nobody_elses_hits() {
    for policy in ["pre", "lru"] {
        // Prediction keeps what is used again beside a flood even without a quota, by little.
        let found = check(policy, (GIB, Some(12 * GIB)), (GIB / 4, Some(3 * GIB)));
        if let Some((alone, unlimited)) = found.filter(|_| policy == "lru") {
            assert!(unlimited * 100 < alone * 97, "without a quota it would: {unlimited}");
        }
    }
}
