//! `kvtide-bench device` on the fake driver: that it checks what it moves, and says what is wrong.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::process::{Command, Output};

use serde_json::Value;

fn device(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let library = fakecuda::library();
    Command::new(env!("CARGO_BIN_EXE_kvtide-bench"))
        .args(["device", "--quick", "--library", library.to_str().unwrap()])
        .args(arguments)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn said(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn everything_is_moved_checked_and_shared() {
    let output = device(&["--json", "--require"], &[]);
    let (out, log) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{out}\n{log}");
    assert!(log.contains("IS NO GPU"), "{log}");
    assert!(!log.contains("VIOLATION"), "{log}");
    let report: Value = serde_json::from_str(out).unwrap();
    assert_eq!(report["fake"], true);
    assert_eq!((&report["wrong_bytes"], &report["wrong_sums"]), (&0.into(), &0.into()), "{out}");
    let sharing = report["sharing"].as_array().unwrap();
    assert_eq!(sharing.len(), 2, "{out}");
    for shared in sharing {
        assert_eq!(shared["works"], true, "{shared}");
        assert_eq!(shared["import"]["event"], "works", "{shared}");
    }
    // Three works on the device for each layout and number of blocks, nine others for one layout.
    assert_eq!(report["measures"].as_array().unwrap().len(), 2 * (3 * 3 + 9), "{out}");
    for measure in report["measures"].as_array().unwrap() {
        assert!(measure["gb_s"].as_f64().unwrap() > 0.0, "{measure}");
    }
    assert!(report["ptx_load"]["uncached"]["kernels_ms"].is_number(), "{out}");
    assert!(report["registration"]["register_ms_per_gib"].is_number(), "{out}");
}

#[test]
fn no_gpu_is_one_line_and_no_failure_unless_one_is_required() {
    let none = [("FAKECUDA_DEVICES", "0")];
    let skipped = device(&[], &none);
    assert_eq!(skipped.status.code(), Some(0));
    let line = said(&skipped.stdout);
    assert!(line.starts_with("skipped, there is no GPU: ") && line.lines().count() == 1, "{line}");
    let skipped = device(&["--json"], &none);
    let report: Value = serde_json::from_str(said(&skipped.stdout)).unwrap();
    assert!(report["skipped"].is_string(), "{report}");
    let required = device(&["--require"], &none);
    assert_eq!(required.status.code(), Some(2));
    assert!(said(&required.stderr).contains("no GPU: "), "{}", said(&required.stderr));
}

#[test]
fn what_the_driver_refuses_is_said() {
    let failed = device(&[], &[("FAKECUDA_FAULTS", "cuLaunchKernel@3=launch_failed")]);
    assert_eq!(failed.status.code(), Some(2));
    let log = said(&failed.stderr);
    assert!(log.contains("CUDA_ERROR_LAUNCH_FAILED"), "{log}");
    let unshared = device(&["--json"], &[("FAKECUDA_FAULTS", "cuIpcGetMemHandle@1=1")]);
    let report: Value = serde_json::from_str(said(&unshared.stdout)).unwrap();
    let (legacy, other) = (&report["sharing"][0], &report["sharing"][1]);
    assert_eq!((&legacy["works"], &other["works"]), (&false.into(), &true.into()), "{report}");
    assert!(legacy["why"].as_str().unwrap().contains("cuIpcGetMemHandle"), "{legacy}");
}
