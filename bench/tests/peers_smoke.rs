//! `kvtide-bench peers`, small: that its rows are all there, that what it loads is compared, and
//! that peers which are not there are named. No figure is judged.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::process::{Command, Output};

use serde_json::Value;

fn peers(arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    Command::new(env!("CARGO_BIN_EXE_kvtide-bench"))
        .args(["peers", "--quick", "--store"])
        .arg(folder.path())
        .args(arguments)
        .output()
        .unwrap()
}

fn said(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn kvtide_and_files_store_and_load_the_same_blocks() {
    let output = peers(&["--json", "--files", "--rounds", "2"]);
    let (out, log) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{out}\n{log}");
    let report: Value = serde_json::from_str(out).unwrap();
    assert_eq!((&report["wrong_bytes"], &report["client_failures"]), (&0.into(), &0.into()));
    assert_eq!(report["blocks_missed"], 0, "{out}");
    let names = |peer: &Value| peer["name"].as_str().unwrap().to_owned();
    let rows = report["peers"].as_array().unwrap();
    let direct = rows.iter().any(|row| row["name"] == "files, O_DIRECT");
    assert!(direct || log.contains("SKIPPED: files: Direct"), "{log}");
    let expected = [
        "kvtide, 16 blocks a call",
        "kvtide, 1 block a call",
        "files, buffered, page cache",
        "kvtide, 16 blocks a call",
        "kvtide, 1 block a call",
        "files, buffered",
    ];
    assert_eq!(rows.iter().map(names).collect::<Vec<_>>()[..6], expected, "{out}");
    for row in rows {
        let blocks = if row["tier"] == "ram" { 64 } else { 256 };
        assert_eq!((&row["rounds"], &row["blocks_verified"]), (&2.into(), &(2 * blocks).into()));
        assert!(row["verifies"].is_boolean() && row["loads_from_memory"].is_u64(), "{row}");
        assert!(row["threads"].as_u64().unwrap() * row["blocks_a_call"].as_u64().unwrap() >= 4);
        for way in [&row["store"], &row["load"]] {
            assert_eq!(way["gb_s_rounds"].as_array().unwrap().len(), 2, "{row}");
            for figure in ["gb_s", "kvtide_ratio", "kvtide_one_ratio", "p50_us", "p99_us"] {
                assert!(way[figure].as_f64().unwrap() > 0.0, "{figure} of {row}");
            }
            for figure in ["own_cpu_s_per_gib", "server_cpu_s_per_gib"] {
                assert!(way[figure].as_f64().unwrap() >= 0.0, "{figure} of {row}");
            }
        }
    }
    let machine = &report["machine"];
    assert!(machine["cpus"].as_u64().unwrap() > 0 && machine["kvtide_io"].is_string(), "{machine}");
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().any(|peer| peer["peer"] == "redis"), "{out}");
}

#[test]
fn a_peer_that_is_not_there_is_skipped_aloud_and_the_table_has_the_rest() {
    let output =
        peers(&["--redis-socket", "/nowhere/redis.sock", "--memcached-server", "/nowhere"]);
    let (out, log) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{out}\n{log}");
    for words in [
        "SKIPPED: redis: cannot connect to /nowhere/redis.sock",
        "SKIPPED: memcached: /nowhere does not listen",
        "cannot start /nowhere",
        "SKIPPED: files: not asked for; name it with --files",
        "SKIPPED: foyer: ",
    ] {
        assert!(log.contains(words), "`{words}` in {log}");
    }
    assert_eq!(out.lines().filter(|line| line.starts_with("kvtide, ")).count(), 4, "{out}");
    assert!(out.contains("wrong bytes") && out.contains("in flight"), "{out}");
}
