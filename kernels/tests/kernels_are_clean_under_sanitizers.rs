//! The kernels' source under the address and undefined-behaviour sanitizers, and the proof that
//! these would find an access past the end.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::io::Write;
use std::process::Command;

/// Exit code of the script when the compiler has no sanitizers.
const SKIPPED: i32 = 77;

#[test]
fn kernels_are_clean_and_a_planted_overrun_is_found() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/sanitize.sh");
    let output = Command::new("bash").arg(script).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.code() == Some(SKIPPED) {
        // Past the capture of a passing test's output: this must be seen.
        let mut stderr = std::io::stderr();
        writeln!(stderr, "\n  the kernels did NOT run under the sanitizers. {said}").unwrap();
        return;
    }
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}{complaints}");
    assert!(said.contains("clean: all kernels ran"), "{said}");
    assert!(said.contains("planted: found at copy_run"), "{said}");
}
