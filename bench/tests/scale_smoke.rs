//! `kvtide-bench scale` at a hundredth of its size: that all parts run, and what they say.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::process::{Command, Output};

use serde_json::Value;

fn scale(arguments: &[&str]) -> (Output, tempfile::TempDir) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_kvtide-bench"))
        .args(["scale", "--quick", "--store", folder.path().to_str().unwrap()])
        .args(arguments)
        .output()
        .unwrap();
    (output, folder)
}

/// Every row has these fields, and they are numbers.
fn check(rows: &Value, count: usize, fields: &[&str]) {
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), count);
    for row in rows {
        assert!(fields.iter().all(|field| row[field].is_number()), "{row}");
    }
}

#[test]
fn all_parts_run_and_say_what_they_measured() {
    let (output, folder) = scale(&["--json"]);
    let (out, log) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{log}");
    let report: Value = serde_json::from_slice(&out).unwrap();
    check(
        &report["catalog"],
        8,
        &[
            "blocks",
            "bytes_per_block",
            "lookup_us_p50",
            "lookup_us_p99",
            "lease_us_p50",
            "release_us_p50",
            "store_ns",
            "write_down_ns",
            "store_full_ns",
            "slowest_event_us",
        ],
    );
    let recovery =
        ["descriptors", "segments", "open_ms", "catalog_ms", "ready_ms", "descriptors_per_s"];
    check(&report["recovery"], 4, &recovery);
    check(&report["recovery"], 4, &["read_mb", "read_gb_s", "ready_at_1_gb_s_ms"]);
    let clients =
        ["clients", "blocking_calls_per_s", "blocking_us_p50", "blocking_us_p99", "raw_us_p50"];
    check(&report["clients"], 2, &clients);
    check(&report["clients"], 2, &["pipelined_calls_per_s", "pipelined_us_p50", "blocking_to_raw"]);
    for row in report["catalog"].as_array().unwrap() {
        let in_host = row["tiers"] == "host and nvme";
        assert_eq!(row["evict_ns"].is_number(), in_host, "{row}");
    }
    assert!(!folder.path().join("recovery.kvtide").exists(), "the store stays behind");
}

#[test]
fn tables_are_for_people_and_numbers_that_make_no_sense_are_refused() {
    let small = ["--blocks", "1000", "--descriptors", "100", "--clients", "1"];
    let (output, _folder) = scale(&small);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for title in ["lookup 1,000", "descriptors/s", "lookups/s"] {
        assert!(out.contains(title), "{out}");
    }
    for nothing in [["--blocks", "0"], ["--clients", "0"], ["--descriptors", "none"]] {
        let (output, _folder) = scale(&nothing);
        assert_eq!(output.status.code(), Some(2), "{nothing:?}");
        assert!(!output.stderr.is_empty());
    }
}
