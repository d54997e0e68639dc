//! `kvtide-bench quality` at a tiny size: that it runs, and that what it says of each way of
//! keeping KV can be true.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may panic, also in its helpers"
)]

use std::process::Command;

use serde_json::Value;

#[test]
fn exact_reloads_are_exact_and_narrow_ones_are_smaller_and_close() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_kvtide-bench"))
        .args(["quality", "--quick", "--json", "--store"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["kept_as"].as_str().unwrap()).collect();
    assert_eq!(names, ["raw", "lz4", "int8", "fp8"]);
    for (row, (least, most)) in rows.iter().zip([(1.0, 1.0), (0.7, 1.0), (0.5, 0.6), (0.5, 0.52)]) {
        let ratio = row["bytes_to_raw"].as_f64().unwrap();
        assert!((least..=most).contains(&ratio), "{row}");
    }
    assert_eq!(rows[0]["equal_bits"], true);
    assert_eq!(rows[0]["kl_mean"], 0.0);
    for row in &rows[2..] {
        assert_eq!(row["equal_bits"], false, "a narrow reload changed nothing: {row}");
        let kl = row["kl_mean"].as_f64().unwrap();
        assert!(kl > 0.0 && kl < 0.1, "{row}");
    }
}
