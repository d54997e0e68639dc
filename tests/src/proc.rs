//! What `/proc` says about a process, and waiting with an end.

use std::time::{Duration, Instant};

/// Memory of a process, KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Of its own.
    pub anon_kib: u64,
    /// Of shared memory: arena and regions.
    pub shmem_kib: u64,
    /// Open file descriptors.
    pub descriptors: usize,
    /// Mappings.
    pub mappings: usize,
}

impl Footprint {
    /// Reads it.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn of(pid: u32) -> Footprint {
        let read = |file: &str| {
            std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("the process is there")
        };
        let status = read("status");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).expect("status has the field")
        };
        Footprint {
            anon_kib: field("RssAnon:"),
            shmem_kib: field("RssShmem:"),
            descriptors: open_descriptors(pid),
            mappings: read("maps").lines().count(),
        }
    }
}

/// How many file descriptors a process has open.
///
/// # Panics
/// When the process is gone.
pub fn open_descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process is there").count()
}

/// Bytes of the fake driver's device memory that a process has mapped: of its own, and imported.
///
/// # Panics
/// When the process is gone.
pub fn device_mapped_bytes(pid: u32) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process is there");
    let bytes = |line: &str| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some(number(to)? - number(from)?)
    };
    maps.lines().filter(|line| line.contains("/memfd:fakecuda")).filter_map(bytes).sum()
}

/// Whether all threads of a process are stopped by a signal.
pub(crate) fn threads_frozen(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().all(|thread| {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:\tT"))
    })
}

/// Asks until there is an answer, at most for `limit`.
pub fn poll_until<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + limit;
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if Instant::now() >= until {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
