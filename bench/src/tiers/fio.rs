//! fio's figure for the same disk, when fio is installed: the raw ring of somebody else. It is run
//! with buffers in huge pages, fixed buffers and a registered file, because without them it is
//! several times slower, and to be faster than that proves nothing. Where that is not possible (no
//! reserved huge pages, say) it is left out, and what fio said is shown.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{
    Setup,
    measure::{Direction, Kind, Measures, Round, Work},
};

/// Transfers under way.
const DEPTH: usize = 8;

/// fio and its file.
pub(super) struct Fio {
    path: PathBuf,
    block_bytes: u64,
    bytes: u64,
    /// Its version, or why it is left out.
    state: Result<String, String>,
}

impl Fio {
    /// Looks for fio; it moves as many bytes a round as each depth of the raw ring.
    pub(super) fn find(folder: &Path, setup: &Setup) -> Fio {
        let state = match Command::new("fio").arg("--version").output() {
            Ok(output) if output.status.success() => {
                Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
            }
            Ok(output) => Err(format!("`fio --version` ended with {}", output.status)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err("not installed".to_owned())
            }
            Err(error) => Err(error.to_string()),
        };
        let blocks = (setup.nvme_blocks * setup.clients / setup.depths.len().max(1)).max(1) as u64;
        Fio {
            path: folder.join("fio.bin"),
            block_bytes: setup.block_bytes,
            bytes: blocks * setup.block_bytes,
            state,
        }
    }

    /// What was found, in words.
    pub(super) fn words(&self) -> String {
        match &self.state {
            Ok(version) => version.clone(),
            Err(why) => format!("left out: {why}"),
        }
    }

    pub(super) fn round(&mut self, round: u32, measures: &mut Measures) {
        for direction in [Direction::Store, Direction::Load] {
            if self.state.is_err() {
                return;
            }
            match self.run(direction) {
                Ok(row) => {
                    let kind = Kind { work: Work::Fio, direction, batch: 1, depth: DEPTH };
                    measures.add(kind, Round { round, ..row });
                }
                Err(error) => {
                    eprintln!("fio is left out: {error:#}");
                    self.state = Err(format!("{error:#}"));
                }
            }
        }
    }

    fn run(&self, direction: Direction) -> anyhow::Result<Round> {
        let verb = if direction == Direction::Store { "write" } else { "read" };
        let output = Command::new("fio")
            .arg("--name=kvtide-bench")
            .arg(format!("--filename={}", self.path.display()))
            .arg(format!("--rw={verb}"))
            .arg(format!("--bs={}", self.block_bytes))
            .arg(format!("--size={}", self.bytes))
            .arg(format!("--iodepth={DEPTH}"))
            // The file is laid out once, so that no first write is measured.
            .args(["--overwrite=1", "--ioengine=io_uring", "--direct=1"])
            .args(["--iomem=mmaphuge", "--fixedbufs=1", "--registerfiles=1"])
            .arg("--output-format=json")
            .output()
            .context("cannot start fio")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let said = errors.lines().next().unwrap_or("nothing");
        ensure!(output.status.success(), "fio ended with {}; it said: {said}", output.status);
        read(&output.stdout, verb)
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        // There is none when fio is not.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The figures in fio's output. What it says before the JSON (warnings) is passed over.
fn read(output: &[u8], verb: &str) -> anyhow::Result<Round> {
    let start = output.iter().position(|byte| *byte == b'{').context("fio wrote no JSON")?;
    let report: Value = serde_json::from_slice(output.get(start..).unwrap_or_default())
        .context("fio wrote something else than JSON")?;
    let job = report.pointer("/jobs/0").context("fio reports no job")?;
    let number = |path: &str| job.pointer(path).and_then(Value::as_f64);
    let bytes = job.pointer(&format!("/{verb}/io_bytes")).and_then(Value::as_u64);
    let bytes = bytes.filter(|bytes| *bytes > 0).context("fio moved nothing")?;
    let ms = number(&format!("/{verb}/runtime")).context("fio reports no time")?;
    let took = Duration::from_secs_f64(ms.max(1.0) / 1e3);
    let percent = number("/usr_cpu").unwrap_or(0.0) + number("/sys_cpu").unwrap_or(0.0);
    let client_cpu_s = percent / 100.0 * took.as_secs_f64();
    Ok(Round { bytes, took, client_cpu_s, ..Round::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_report_is_read() {
        let report = br#"note: something
            {"jobs": [{"read": {"io_bytes": 0, "runtime": 0},
                       "write": {"io_bytes": 1000000000, "runtime": 500},
                       "usr_cpu": 1.5, "sys_cpu": 2.5}]}"#;
        let row = read(report, "write").unwrap();
        assert!((row.gb_s() - 2.0).abs() < 1e-9);
        assert!((row.client_cpu_s - 0.02).abs() < 1e-9);
        assert!(read(report, "read").is_err());
        assert!(read(b"fio: error", "read").is_err());
    }
}
