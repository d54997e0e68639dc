//! The simulator against published figures, to the block.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::path::PathBuf;

use kvtide_bench::{sim, trace::trace_folder};

/// The trace, or `None` with a loud word when the public traces are not on this machine.
fn trace(name: &str) -> Option<PathBuf> {
    let path = trace_folder().join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: no {}; set KVTIDE_TRACES to the folder of public traces", path.display());
    None
}

fn args(trace: PathBuf, policy: &str, capacity_blocks: Option<u64>) -> sim::SimArgs {
    sim::SimArgs {
        trace,
        policy: policy.to_owned(),
        capacity_blocks,
        block_bytes: 64 << 10,
        host_bytes: 1 << 30,
        device_bytes: None,
        nvme_bytes: None,
        nvme_segment_bytes: None,
        nvme_write_bytes_per_day: None,
        clients: 1,
        hints: sim::SimHints::None,
        trace_time: false,
        weigh_cost: false,
        compare: false,
        block_tokens: None,
        requests: None,
        flood: sim::FloodArgs::default(),
        json: false,
    }
}

/// The hits that `golden.json` beside the traces names for a policy, by capacity.
fn golden(trace: &str, policy: &str) -> Vec<(u64, u64)> {
    let text = std::fs::read_to_string(trace_folder().join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let rows = golden[trace]["policies"][policy].as_object().unwrap();
    rows.iter()
        .map(|(blocks, row)| (blocks.parse().unwrap(), row["hit_blocks"].as_u64().unwrap()))
        .collect()
}

fn check(file: &str, name: &str, policy: &str, smallest: usize) {
    let Some(path) = trace(file) else { return };
    let mut golden = golden(name, policy);
    golden.sort_unstable();
    for (blocks, hits) in golden.into_iter().skip(smallest) {
        let result = sim::simulate(&args(path.clone(), policy, Some(blocks))).unwrap();
        assert_eq!(result.summary.blocks_hit_host, hits, "{name}, {policy}, {blocks} blocks");
        assert_eq!(result.not_stored, 0);
    }
}

const CONVERSATION: &str = "mooncake_conversation.jsonl.zst";

#[test]
fn leaf_first_lru_on_conversations() {
    check(CONVERSATION, "mooncake_conversation", "lru", 0);
}

#[test]
fn fifo_on_conversations() {
    check(CONVERSATION, "mooncake_conversation", "fifo", 0);
}

#[test]
fn sieve_on_conversations() {
    check(CONVERSATION, "mooncake_conversation", "sieve", 0);
}

/// At least as many hits as were reached, at each capacity.
fn reaches(file: &str, policy: &str, goals: &[(u64, u64)]) {
    let Some(path) = trace(file) else { return };
    for (blocks, least) in goals {
        let result = sim::simulate(&args(path.clone(), policy, Some(*blocks))).unwrap();
        let hits = result.summary.blocks_hit_host;
        assert!(hits >= *least, "{file}, {policy}, {blocks} blocks: {hits} hits");
        assert_eq!(result.not_stored, 0);
    }
}

#[test]
fn predicted_reuse_on_conversations() {
    let goals = [(1_828, 25_000), (5_484, 48_000), (18_279, 81_500), (54_837, 102_700)];
    reaches(CONVERSATION, "pre", &goals);
}

#[test]
fn arc_on_conversations() {
    reaches(CONVERSATION, "arc", &[(18_279, 81_000)]);
}

#[test]
fn a_perfect_hint_on_conversations() {
    let Some(path) = trace(CONVERSATION) else { return };
    let args = sim::SimArgs { hints: sim::SimHints::Perfect, ..args(path, "pre", Some(5_484)) };
    let hits = sim::simulate(&args).unwrap().summary.blocks_hit_host;
    assert!(hits >= 78_000, "{hits} hits");
}

#[test]
fn the_optimum_on_conversations() {
    let Some(path) = trace(CONVERSATION) else { return };
    for (blocks, hits) in golden("mooncake_conversation", "belady") {
        assert_eq!(sim::optimum(&path, blocks as usize).unwrap(), hits, "{blocks} blocks");
    }
}

#[test]
fn leaf_first_lru_on_coding_agents() {
    // The two smaller capacities agree as well, but take a minute.
    check("cc_small64_64.kvtrace.csv.zst", "cc_small64_64", "lru", 2);
}

/// As many hits of coding agents as were set as a goal, where the cache is smallest. Takes minutes,
/// so it is run on request (`--ignored`).
#[test]
#[ignore = "takes minutes"]
fn predicted_reuse_on_coding_agents() {
    reaches("cc_node_256.kvtrace.csv.zst", "pre", &[(7_709, 16_800_000)]);
}

/// The same for leaf-first LRU, to the block.
#[test]
#[ignore = "takes minutes"]
fn leaf_first_lru_on_a_node_of_coding_agents() {
    let file = "cc_node_256.kvtrace.csv.zst";
    let Some(path) = trace(file) else { return };
    let golden = golden("cc_node_256", "lru");
    let (blocks, hits) = golden.into_iter().min().unwrap();
    let result = sim::simulate(&args(path, "lru", Some(blocks))).unwrap();
    assert_eq!(result.summary.blocks_hit_host, hits, "{blocks} blocks");
}

/// The reader agrees with the published totals of every trace.
#[test]
fn totals_of_the_traces() {
    for (file, requests, blocks) in [
        (CONVERSATION, 12_031, 288_500),
        ("cc_small64_64.kvtrace.csv.zst", 4_117, 7_593_512),
        ("cc_node_256.kvtrace.csv.zst", 46_218, 21_333_979),
    ] {
        let Some(path) = trace(file) else { continue };
        let reader = kvtide_bench::trace::TraceReader::open(&path).unwrap();
        let mut counts = (0, 0);
        for request in reader {
            counts.0 += 1;
            counts.1 += request.unwrap().path.len();
        }
        assert_eq!(counts, (requests, blocks), "{file}");
    }
}
