//! What the machine has: memory that may be taken, and space on the store's file system.

use std::path::Path;

/// Bytes of memory that could be taken now, and in words where the number is from. The smaller of
/// the kernel's estimate and what is left below the control group's limit.
pub(super) fn memory_available() -> (u64, &'static str) {
    let available = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| mem_available(&text))
        .unwrap_or(1 << 30);
    match cgroup_left() {
        Some(left) if left < available => (left, "memory.max of the control group"),
        _ => (available, "MemAvailable"),
    }
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What is left below the tightest `memory.max` from the process's control group up (version 2).
fn cgroup_left() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let mut folder = root.join(own);
    let mut left: Option<u64> = None;
    loop {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let max = read("memory.max").and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(max) = max {
            let used = read("memory.current").and_then(|text| text.trim().parse().ok());
            let here = max.saturating_sub(used.unwrap_or(0));
            left = Some(left.map_or(here, |least| least.min(here)));
        }
        if folder == root || !folder.pop() {
            return left;
        }
    }
}

/// Free bytes of the file system that holds `path` or the nearest folder above it that exists.
pub(super) fn space_free(path: &Path) -> Option<u64> {
    path.ancestors().find_map(|folder| {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let stat = rustix::fs::statvfs(folder).ok()?;
        stat.f_bavail.checked_mul(stat.f_frsize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal: 10 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(mem_available(text), Some(2 << 20));
        assert_eq!(mem_available("MemTotal: 1 kB"), None);
        assert!(memory_available().0 > 0);
        assert!(space_free(Path::new("/no/such/folder")).is_some());
    }
}
