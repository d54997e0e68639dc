//! `kvtide-bench ttft` and `chats` at tiny sizes: that they run, that reloads come from the tier
//! that they are said to come from, and what they print and draw.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn bench(arguments: &[&str]) -> (Output, TempDir) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let plot = folder.path().join("plot.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_kvtide-bench"))
        .args(arguments)
        .args(["--store", folder.path().join("store").to_str().unwrap()])
        .args(["--plot", plot.to_str().unwrap()])
        .output()
        .unwrap();
    (output, folder)
}

fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn plot_of(folder: &TempDir) -> String {
    std::fs::read_to_string(folder.path().join("plot.svg")).unwrap()
}

#[test]
fn reload_and_recompute_stand_beside_each_other() {
    let (output, folder) = bench(&["ttft", "--quick", "--json", "--rounds", "1"]);
    let report = json_of(&output);
    assert_eq!((&report["wrong_bytes"], &report["client_failures"]), (&0.into(), &0.into()));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6, "two prefixes, three ways");
    for row in rows {
        let prefix = row["prefix_tokens"].as_u64().unwrap();
        let recompute = row["way"] == "recompute";
        let computed = if recompute { prefix + 8 } else { 8 };
        assert_eq!(row["computed_tokens"], computed, "{row}");
        let bytes = if recompute { 0 } else { prefix * 3 * 2 * 2 * 64 * 2 };
        assert_eq!(row["bytes"], bytes, "{row}");
        assert!(row["first_token_us_p50"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["first_token_arithmetic_us"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(report["blocks_hit_nvme"].as_u64() > Some(0));
    assert!(report["blocks_hit_host"].as_u64() > Some(0));
    assert!(report["about"]["model"].as_str().unwrap().contains("RANDOM WEIGHTS"));
    let plot = plot_of(&folder);
    for part in ["recompute", "from nvme", "from host RAM", "seconds (log scale)", "</svg>"] {
        assert!(plot.contains(part), "{part} in {plot}");
    }
}

#[test]
fn tables_are_for_people_and_sizes_that_make_no_sense_are_refused() {
    let (output, _folder) = bench(&["ttft", "--quick", "--rounds", "1", "--prefixes", "32"]);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for part in ["RANDOM WEIGHTS", "recompute / this", "equal to the bit", "smallengine"] {
        assert!(out.contains(part), "{part} in {out}");
    }
    for bad in [["--prefixes", "33"], ["--new-tokens", "16"], ["--weights", "/nothing/there"]] {
        let (output, _folder) = bench(&["ttft", "--quick", bad[0], bad[1]]);
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(bad[1]), "{bad:?}");
    }
}

#[test]
fn conversations_prefill_little_more_than_is_new() {
    let few = ["--conversations", "3", "--turns", "6", "--processes", "2"];
    let (output, folder) = bench(&[&["chats", "--json"], &few[..]].concat());
    let report = json_of(&output);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    let last = &rows[5];
    let with = last["prefilled_so_far"].as_u64().unwrap();
    let without = last["prefilled_so_far_without_reuse"].as_u64().unwrap();
    let new = report["new_tokens"].as_u64().unwrap();
    assert!((new..=new + 3 * 6 * 17).contains(&with), "{with} were prefilled, {new} are new");
    assert!(without > 2 * with, "{without} without reuse, {with} with it");
    let plot = plot_of(&folder);
    assert!(plot.contains("no reuse") && plot.contains("tokens prefilled so far"), "{plot}");
    let (output, _folder) = bench(&[&["chats"], &few[..]].concat());
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(out.contains("without / with") && out.contains("tokens were new"), "{out}");
}
