//! A small made-up trace through real daemons and client processes.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::{fmt::Write, path::Path, process::Command};

use serde_json::Value;

/// Conversations of several turns behind one of four system prompts, as kvtrace lines.
fn trace(folder: &Path) -> std::path::PathBuf {
    trace_of(folder, 400, 40)
}

/// As [`trace`], so many turns of so many conversations.
fn trace_of(folder: &Path, turns: usize, conversations: usize) -> std::path::PathBuf {
    let mut text = String::new();
    let mut last_of = vec![None; conversations];
    let (mut state, mut blocks) = (7u64, Vec::new());
    for turn in 0..turns {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let session = (state >> 33) as usize % last_of.len();
        let (of, shared): (i64, u64) = match last_of[session] {
            Some(last) => (last as i64, blocks[last]),
            None if session >= 4 && last_of[session % 4].is_some() => {
                (last_of[session % 4].unwrap() as i64, 2)
            }
            None => (-1, 0),
        };
        let new = 2 + (state >> 40) % 4;
        writeln!(text, "{turn},{},10,{session},0,{of},{shared},{new}", (shared + new) * 64)
            .unwrap();
        last_of[session] = Some(turn);
        blocks.push(shared + new);
    }
    let path = folder.join("made-up.csv");
    std::fs::write(&path, text).unwrap();
    path
}

fn bench(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_kvtide-bench")).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{arguments:?}: {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

fn number(object: &Value, field: &str) -> u64 {
    object[field].as_u64().unwrap_or_else(|| panic!("no number {field} in {object}"))
}

fn clean(object: &Value, requests: u64) {
    assert_eq!(number(object, "requests"), requests, "{object}");
    assert_eq!(number(object, "wrong_bytes"), 0, "{object}");
    assert_eq!(number(object, "client_failures"), 0, "{object}");
}

/// Runs that need a disk: a folder in the build's own, which is on one.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn a_replay_hits_what_the_simulator_hits() {
    let folder = folder();
    // In an nvme tier of a few segments, hits depend on how far the disk was when one was
    // reclaimed: with a quarter of these tiers and turns by up to 6 %, with these by 2 %.
    let trace = trace_of(folder.path(), 1600, 160);
    let trace = trace.to_str().unwrap();
    let sizes = ["--block-bytes", "64KiB", "--host-bytes", "128MiB", "--nvme-bytes", "256MiB"];
    let store = folder.path().join("d");
    let replay = ["replay", "--trace", trace, "--clients", "2", "--json", "--store"];
    let replay = bench(&[&replay[..], &[store.to_str().unwrap()], &sizes].concat());
    let sim = bench(&[&["sim", "--trace", trace, "--json"][..], &sizes].concat());
    clean(&replay, 1600);
    clean(&sim, 1600);
    let hits = |object| number(object, "blocks_hit_host") + number(object, "blocks_hit_nvme");
    assert!(hits(&sim) > 4000, "{sim}");
    assert!(number(&sim, "nvme_evicted") > 1000, "{sim}");
    assert_eq!(number(&replay, "blocks_verified"), hits(&replay));
    let (replayed, simulated) = (hits(&replay) as f64, hits(&sim) as f64);
    assert!((replayed / simulated - 1.0).abs() < 0.05, "{replayed} hits, simulated {simulated}");
}

#[test]
fn a_replay_with_gpu_memory_hits_what_the_simulator_hits() {
    let folder = folder();
    let trace = trace(folder.path());
    let trace = trace.to_str().unwrap();
    let library = fakecuda::library();
    let gpu = ["--device-library", library.to_str().unwrap(), "--device-share"];
    let sizes = [
        "--requests",
        "200",
        "--block-bytes",
        "64KiB",
        "--device-bytes",
        "8MiB",
        "--host-bytes",
        "16MiB",
        "--nvme-bytes",
        "64MiB",
    ];
    let sim = bench(&[&["sim", "--trace", trace, "--json"][..], &sizes].concat());
    clean(&sim, 200);
    let tiers = ["blocks_hit_device", "blocks_hit_host", "blocks_hit_nvme"];
    let hits = |object: &Value| tiers.map(|tier| number(object, tier));
    assert!(hits(&sim).into_iter().all(|hits| hits > 50), "{sim}");
    for share in ["legacy", "vmm"] {
        let store = folder.path().join(share);
        let store = ["--store", store.to_str().unwrap()];
        // With one client the order of requests is the simulator's.
        let replay = ["replay", "--trace", trace, "--clients", "1", "--json"];
        let replay = bench(&[&replay[..], &store, &gpu, &[share], &sizes].concat());
        clean(&replay, 200);
        assert!(replay["gpu"].as_str().unwrap().starts_with("Fake"), "{replay}");
        assert_eq!(number(&replay, "blocks_verified"), hits(&replay).iter().sum::<u64>());
        // In tiers this small, what is in host RAM and what only on nvme depends on when the disk
        // was done, so these two are taken together.
        let both = |[device, host, nvme]: [u64; 3]| [device, host + nvme];
        for (replayed, simulated) in both(hits(&replay)).into_iter().zip(both(hits(&sim))) {
            let ratio = replayed as f64 / simulated as f64;
            assert!((ratio - 1.0).abs() < 0.05, "{:?}, simulated {:?}", hits(&replay), hits(&sim));
        }
    }
}

#[test]
fn a_killed_daemon_finds_its_blocks_again() {
    let folder = folder();
    let trace = trace(folder.path());
    let store = folder.path().join("d");
    let replay = bench(&[
        "replay",
        "--trace",
        trace.to_str().unwrap(),
        "--clients",
        "2",
        "--json",
        "--block-bytes",
        "64KiB",
        "--host-bytes",
        "16MiB",
        "--nvme-bytes",
        "256MiB",
        "--kill-every",
        "700ms",
        "--duration",
        "4s",
        "--store",
        store.to_str().unwrap(),
    ]);
    clean(&replay, number(&replay, "requests"));
    assert!(!replay["kills"].as_array().unwrap().is_empty(), "{replay}");
    let (found, expected) = (number(&replay, "kills_found"), number(&replay, "kills_expected"));
    assert!(found * 100 >= expected * 99, "{found} of {expected}");
}

#[test]
fn device_faults_are_misses() {
    let folder = folder();
    let trace = trace(folder.path());
    let store = folder.path().join("d");
    let replay = bench(&[
        "replay",
        "--trace",
        trace.to_str().unwrap(),
        "--clients",
        "2",
        "--json",
        "--block-bytes",
        "64KiB",
        "--host-bytes",
        "16MiB",
        "--nvme-bytes",
        "64MiB",
        "--fault-rate",
        "0.02",
        "--store",
        store.to_str().unwrap(),
    ]);
    clean(&replay, 400);
}

#[test]
fn what_cannot_be_done_is_said() {
    let run = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_kvtide-bench")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let folder = folder();
    let broken = folder.path().join("broken");
    std::fs::write(&broken, "0,1,1,1,0,-1,0,3\nnonsense\n").unwrap();
    let broken = broken.to_str().unwrap();
    let error = run(&["sim", "--trace", broken]);
    assert!(error.contains("broken:2: expected `t_ms,"), "{error}");
    let error = run(&["sim", "--trace", "no such file"]);
    assert!(error.contains("no such file: cannot open the trace"), "{error}");
    let error = run(&["sim", "--trace", broken, "--block-bytes", "0"]);
    assert!(error.contains("must not be 0"), "{error}");
    let error = run(&["sim", "--trace", broken, "--policy", "best"]);
    assert!(error.contains("lru"), "{error}");
    let error = run(&["sim", "--trace", broken, "--nvme-bytes", "1MiB"]);
    assert!(error.contains("four segments"), "{error}");
}
