//! Facts about running processes and file systems, from `/proc` and `statfs`.

use std::{fs, path::Path};

/// Seconds of CPU that a process has used, user and system. `None` when it is gone.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in the second field may hold spaces and parentheses; what follows may not.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((user + system) as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// As [`cpu_seconds`], of the threads alive now, to the microsecond instead of the clock tick.
pub fn thread_seconds(pid: u32) -> Option<f64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let ran_ns = |task: fs::DirEntry| -> Option<u64> {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_ascii_whitespace().next()?.parse().ok()
    };
    let ns: u64 = tasks.filter_map(|task| ran_ns(task.ok()?)).sum();
    Some(ns as f64 / 1e9)
}

/// Seconds of CPU that this process has used, all threads.
pub fn own_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Memory of a process, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// Resident now.
    pub rss_bytes: u64,
    /// Of it shared memory: arena and regions.
    pub shared_bytes: u64,
    /// Most that was ever resident.
    pub rss_max_bytes: u64,
}

/// Memory of a process. `None` when it is gone.
pub fn memory(pid: u32) -> Option<Memory> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    };
    Some(Memory {
        rss_bytes: field("VmRSS:")?,
        shared_bytes: field("RssShmem:").unwrap_or(0),
        rss_max_bytes: field("VmHWM:").unwrap_or(0),
    })
}

/// The kind of file system that `path` is on, and whether it is memory and not a disk.
pub fn file_system(path: &Path) -> (String, bool) {
    let Ok(statfs) = rustix::fs::statfs(path) else { return ("unknown".into(), false) };
    let name = match statfs.f_type as u32 {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x794c_7630 => "overlayfs",
        0x2fc1_2fc1 => "zfs",
        0xf2f5_2010 => "f2fs",
        0x6969 => "nfs",
        0x0102_1994 => "tmpfs",
        0x8584_58f6 => "ramfs",
        other => return (format!("file system {other:#x}"), false),
    };
    (name.into(), matches!(name, "tmpfs" | "ramfs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_time() {
        let pid = std::process::id();
        assert!(cpu_seconds(pid).is_some_and(|seconds| (0.0..3600.0).contains(&seconds)));
        assert!(memory(pid).is_some_and(|memory| memory.rss_max_bytes >= memory.rss_bytes / 2));
        assert!(own_seconds() > 0.0);
        assert!(thread_seconds(pid).is_some());
        assert_eq!(cpu_seconds(u32::MAX), None);
        assert_ne!(file_system(Path::new("/")).0, "unknown");
    }
}
