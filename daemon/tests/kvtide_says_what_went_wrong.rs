//! The exit codes and the one line that `kvtide` has for each way to fail.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::os::unix::net::UnixListener;
use std::process::{Command, Output};

fn kvtide(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtide"));
    command.args(args).env_remove("KVTIDE_SOCKET").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_daemon_that_is_not_there_is_one_line_and_code_3() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent.sock");
    let dead = folder.path().join("dead.sock");
    drop(UnixListener::bind(&dead).unwrap());
    for socket in [&absent, &dead] {
        let socket = socket.to_str().unwrap();
        for command in ["status", "ls", "stats", "drain"] {
            let output = kvtide(&[command, "--socket", socket]);
            assert_eq!(output.status.code(), Some(3), "{output:?}");
            let said = text(&output.stderr);
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains(socket) && said.contains("start kvtided"), "{said}");
            assert!(output.stdout.is_empty());
        }
        let output = kvtide(&["status", "--json", "--socket", socket]);
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(value["error"].as_str().unwrap().contains(socket));
    }
}

#[test]
fn something_else_at_the_socket_ends_within_the_time_given() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("silent.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let output = kvtide(&["status", "--timeout", "200ms", "--socket", socket.to_str().unwrap()]);
    assert!([Some(1), Some(3)].contains(&output.status.code()), "{output:?}");
    assert_eq!(text(&output.stderr).lines().count(), 1, "{output:?}");
}

#[test]
fn a_wrong_line_is_code_2_and_a_missing_store_code_1() {
    for args in [&["nonsense"][..], &["ls", "--tier", "tape"], &["show", "xyz"], &[]] {
        assert_eq!(kvtide(args).status.code(), Some(2), "{args:?}");
    }
    let output = kvtide(&["fsck", "no/such/store"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stderr).contains("no/such/store"));
    let output = kvtide(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("3  the daemon cannot be reached"));
    let output = kvtide(&["completions", "bash"]);
    assert!(output.status.success() && text(&output.stdout).contains("explain"));
}
