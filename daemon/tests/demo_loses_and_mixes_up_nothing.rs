//! `kvtide demo`, shortened: kills included, every byte compared, nothing left behind.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::fs;
use std::process::Command;

#[test]
fn the_demo_verifies_every_byte_and_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_kvtide"))
        .args(["demo", "--json", "--turns", "5", "--dir"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    let sums: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    let number = |name: &str| sums[name].as_u64().unwrap_or_else(|| panic!("no {name} in {sums}"));
    assert_eq!(number("requests"), 40);
    assert_eq!(number("wrong_bytes"), 0);
    assert_eq!(number("client_failures"), 0);
    assert_eq!(number("blocks_hit_device"), 0);
    assert!(number("blocks_hit_host") > 0, "{sums}");
    assert!(number("blocks_hit_nvme") > 0, "{sums}");
    assert!(number("blocks_verified") > 0, "{sums}");
    assert!(sums["seconds"].as_f64().unwrap() > 0.0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "something was left behind");
}
