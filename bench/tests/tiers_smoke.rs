//! `kvtide-bench tiers` in small: everything is moved, checked and shown. No figure is judged here.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::{
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

/// Runs it in a folder on a disk: the system's temporary one may be memory.
fn tiers(arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir_in(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    Command::new(env!("CARGO_BIN_EXE_kvtide-bench"))
        .args(["tiers", "--quick", "--store", folder.path().to_str().unwrap()])
        .args(arguments)
        .output()
        .unwrap()
}

fn said(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn every_measure_has_its_yardstick_and_no_byte_is_wrong() {
    let output = tiers(&["--rounds", "2", "--clients", "1,2", "--json"]);
    let (out, log) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{out}\n{log}");
    let report: Value = serde_json::from_str(out).unwrap();
    for count in ["wrong_bytes", "client_failures", "blocks_missed"] {
        assert_eq!(report[count], 0, "{count}: {out}");
    }
    assert!(report["blocks_verified"].as_u64().unwrap() > 0, "{out}");
    let configurations = report["configurations"].as_array().unwrap();
    assert_eq!(configurations.len(), 2, "{out}");
    for (configuration, clients) in configurations.iter().zip(1..) {
        assert_eq!(configuration["clients"], clients);
        assert!(configuration["machine"]["raw_io"].is_string(), "{configuration}");
        let measures = configuration["moved"]["measures"].as_array().unwrap();
        for work in ["memcpy", "memcpysum", "host", "raw", "nvme"] {
            for direction in ["store", "load"] {
                let same = |row: &&Value| row["work"] == work && row["direction"] == direction;
                let rows: Vec<&Value> = measures.iter().filter(same).collect();
                assert!(!rows.is_empty(), "{work} {direction}: {configuration}");
                rows.into_iter().for_each(complete);
            }
        }
        called(&configuration["called"]);
        assert!(!configuration["targets"].as_array().unwrap().is_empty(), "{configuration}");
    }
}

fn complete(row: &Value) {
    for number in
        ["gb_s", "p50_us", "p99_us", "daemon_cpu_s_per_gib", "client_cpu_s_per_gib", "depth"]
    {
        assert!(row[number].is_number(), "{number}: {row}");
    }
    // Copies are repeated beside each way of calling.
    assert!(row["rounds"].as_array().unwrap().len() >= 2, "{row}");
    let yardstick = row["work"] == "memcpy" || row["work"] == "raw";
    assert_eq!(row["ratio"].is_number(), !yardstick, "{row}");
    assert_eq!(row["beside"].is_string(), !yardstick, "{row}");
}

fn called(called: &Value) {
    let calls = called["calls"].as_array().unwrap();
    assert_eq!(calls.len(), 4, "{called}");
    for call in calls {
        assert!(call["p50_us"].is_number() && call["p99_us"].is_number(), "{call}");
        assert!(call["ratio"].is_number(), "{call}");
    }
    for rate in called["rates"].as_array().unwrap() {
        assert_eq!(rate["clients"], 8, "{rate}");
        assert!(rate["per_s"].is_number(), "{rate}");
    }
    assert!(called["idle_daemon_percent"].is_number(), "{called}");
}

#[test]
fn tables_end_with_the_verdicts() {
    let output = tiers(&["--rounds", "1", "--calls", "1", "--depths", "4"]);
    let out = said(&output.stdout);
    assert!(output.status.success(), "{out}\n{}", said(&output.stderr));
    for words in ["raw ring, read, depth 4", "load, nvme, 16 a call, 1 call", "idle daemon", "met"]
    {
        assert!(out.contains(words), "{words}: {out}");
    }
}
