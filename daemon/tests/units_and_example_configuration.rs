//! What an operator installs from `systemd/` works as it is.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvtide_daemon::config::{Args, Config};
use kvtide_tiers::catalog::PrefillConfig;

fn systemd() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("systemd")
}

/// The example with its folders moved to where anybody may write.
fn example(folder: &Path) -> String {
    let text = fs::read_to_string(systemd().join("kvtided.toml")).unwrap();
    let folder = folder.to_str().unwrap();
    let moved = text.replace("/run/kvtide", folder).replace("/var/lib/kvtide", folder);
    assert!(moved.contains(folder));
    moved
}

/// Takes the `#` from every key that shows its default.
fn with_all_keys(example: &str) -> String {
    let shown = |line: &&str| {
        let key = line.split(" = ").next().unwrap();
        line.starts_with('[')
            || (line.contains(" = ") && key.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    };
    let lines = example.lines().map(|line| line.strip_prefix('#').filter(shown).unwrap_or(line));
    lines.map(|line| format!("{line}\n")).collect()
}

fn check(file: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtided"));
    command.arg("--config").arg(file).arg("--check-config").output().unwrap()
}

#[test]
fn the_example_passes_its_check_as_it_is_and_with_every_key() {
    let folder = tempfile::tempdir().unwrap();
    let plain = example(folder.path());
    let full = with_all_keys(&plain);
    assert!(full.lines().filter(|line| line.contains(" = ")).count() > 30, "{full}");
    for (name, text) in [("plain.toml", &plain), ("full.toml", &full)] {
        let file = folder.path().join(name);
        fs::write(&file, text).unwrap();
        let output = check(&file);
        assert!(output.status.success(), "{name}: {output:?}");
    }
}

#[test]
fn the_defaults_that_the_example_shows_are_the_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let plain = example(folder.path());
    let load = |name: &str, text: &str| {
        let file = folder.path().join(name);
        fs::write(&file, text).unwrap();
        // What depends on the machine is given, and the same for both.
        let args = Args {
            config: Some(file),
            host_bytes: Some(64 << 20),
            nvme_bytes: Some(1 << 40),
            ..Args::default()
        };
        Config::load(&args).unwrap()
    };
    let (plain, full) = (load("a.toml", &plain), load("b.toml", &with_all_keys(&plain)));
    assert_eq!(plain.limits, full.limits);
    assert_eq!(plain.drain, full.drain);
    assert_eq!(plain.log, full.log);
    assert_eq!(plain.arbiter, full.arbiter);
    // The budget itself has no default; the example shows one.
    let tokens_per_second = full.prefill.tokens_per_second;
    let tokens_in_flight = full.prefill.tokens_in_flight;
    let weights = full.prefill.weights.clone();
    let budget = PrefillConfig { tokens_per_second, tokens_in_flight, weights, ..plain.prefill };
    assert_eq!(budget, full.prefill);
    let (plain, full) = (plain.nvme.unwrap(), full.nvme.unwrap());
    assert_eq!(plain.queue_depth, full.queue_depth);
    assert_eq!(plain.block_bytes_min, full.block_bytes_min);
    assert_eq!(plain.io, full.io);
}

#[test]
fn an_unknown_key_is_refused_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.toml");
    fs::write(&file, "[daemon]\n\n[host]\nbites = \"1GiB\"\n").unwrap();
    let output = check(&file);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("wrong.toml:4") && said.contains("bites"), "{said}");
}

#[test]
fn the_unit_passes_systemds_own_verification() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        eprintln!(
            "SKIPPED: systemd-analyze is not installed; systemd/kvtided.service not verified"
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let unit = fs::read_to_string(systemd().join("kvtided.service")).unwrap();
    // The unit names the installed binary, which need not be on this machine.
    assert!(unit.contains("ExecStart=/usr/bin/kvtided "), "{unit}");
    let start = format!("ExecStart={} ", env!("CARGO_BIN_EXE_kvtided"));
    let copy = folder.path().join("kvtided.service");
    fs::write(&copy, unit.replace("ExecStart=/usr/bin/kvtided ", &start)).unwrap();
    let output =
        Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // Other units of the machine are none of our business.
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("kvtided")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
}
