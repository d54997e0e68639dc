//! The drive under the store: what is written to it, beside its budget and its rating. What is
//! known of it is read from sysfs; its own counters of wear need commands that only root may send.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kvtide_client::{CatalogStats, DriveStatus, PolicyStatus};

use crate::app::App;
use crate::session::Session;

/// Bytes of a sector in sysfs, whatever the drive's own are.
const SECTOR: u64 = 512;

const DAY_S: u64 = 86_400;

/// Seconds from which on a rate means anything.
const RATE_S_MIN: u64 = 60;

/// What sysfs says of a drive.
#[derive(Default)]
struct Drive {
    name: String,
    bytes: Option<u64>,
    written: Option<u64>,
    unknown: Vec<String>,
}

/// Which policies decide, and for operators what the drive is written.
pub(crate) fn policy(app: &App, session: &Session, stats: Option<&CatalogStats>) -> PolicyStatus {
    let config = &app.config;
    let nvme = match &config.nvme {
        None => "off",
        Some(nvme) if nvme.write_bytes_per_day.is_some() => {
            "oldest segment first, blocks with hits are kept; what is likely to be read again is \
             written, within a budget"
        }
        Some(_) => "oldest segment first, blocks with hits are kept; everything is written",
    };
    let stats = stats.filter(|_| session.caller.operator);
    let drive = config.nvme.as_ref().zip(stats).map(|(nvme, stats)| {
        let said = DriveStatus {
            written_bytes: stats.nvme.bytes_in,
            seconds: app.started.elapsed().as_secs(),
            refused_blocks: stats.write_refused,
            budget_bytes_per_day: nvme.write_bytes_per_day,
            rated_bytes: nvme.rated_bytes,
            ..DriveStatus::default()
        };
        let found = find(Path::new("/sys"), &config.store);
        let up = machine_up();
        judge(said, found, up)
    });
    PolicyStatus {
        host: config.host.policy.name().to_owned(),
        device: config.device.policy.name().to_owned(),
        nvme: nvme.to_owned(),
        drive,
    }
}

/// What follows from the numbers.
fn judge(mut status: DriveStatus, drive: Drive, machine_s: Option<u64>) -> DriveStatus {
    status.name = drive.name;
    status.drive_bytes = drive.bytes;
    status.machine_written_bytes = drive.written;
    status.machine_seconds = machine_s;
    status.unknown = drive.unknown;
    let per_day = |bytes: u64, seconds: u64| {
        let day = u128::from(bytes) * u128::from(DAY_S) / u128::from(seconds.max(1));
        u64::try_from(day).unwrap_or(u64::MAX)
    };
    let own = (status.seconds >= RATE_S_MIN).then(|| per_day(status.written_bytes, status.seconds));
    let all = drive.written.zip(machine_s.filter(|seconds| *seconds >= RATE_S_MIN));
    let all = all.map(|(bytes, seconds)| per_day(bytes, seconds));
    status.bytes_per_day = own.max(all);
    let Some(rate) = status.bytes_per_day else {
        status.unknown.push("the rate of writes: the daemon has just started".to_owned());
        return status;
    };
    let milli = |bytes: u64| u128::from(rate) * 1000 / u128::from(bytes.max(1));
    status.drive_writes_per_day_milli =
        status.drive_bytes.map(|bytes| u64::try_from(milli(bytes)).unwrap_or(u64::MAX));
    match status.rated_bytes {
        None => {
            let how = "set `nvme.rated_bytes` to what the drive's data sheet says (TBW)";
            status.unknown.push(format!("how long the drive lasts: {how}"));
        }
        Some(rated) => {
            status.life_days = rated.checked_div(rate);
            let why = "only root may ask it (`nvme smart-log`)";
            status.unknown.push(format!("how much the drive was written in its life: {why}"));
        }
    }
    status
}

/// The drive that holds `folder`, as sysfs under `sys` shows it.
fn find(sys: &Path, folder: &Path) -> Drive {
    let unknown = |why: String| Drive {
        name: "not known".to_owned(),
        unknown: vec![format!("the drive: {why}")],
        ..Drive::default()
    };
    let device = match std::fs::metadata(folder) {
        Ok(meta) => meta.dev(),
        Err(error) => return unknown(format!("cannot look at {}: {error}", folder.display())),
    };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = sys.join(format!("dev/block/{major}:{minor}"));
    let Ok(mut path) = std::fs::canonicalize(&path) else {
        let folder = folder.display();
        return unknown(format!("the file system of {folder} is on no single block device"));
    };
    // A partition lies in the folder of its drive.
    if path.join("partition").exists()
        && let Some(whole) = path.parent().map(PathBuf::from)
    {
        path = whole;
    }
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let text = |name: &str| std::fs::read_to_string(path.join(name)).ok();
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let mut name = name.unwrap_or_default();
    if let Some(model) = text("device/model").filter(|model| !model.trim().is_empty()) {
        name = format!("{name} ({})", model.trim());
    }
    let bytes = text("size").and_then(|size| number(&size)).filter(|size| *size > 0);
    // The seventh number counts sectors written.
    let written = text("stat");
    let written = written.as_deref().and_then(|stat| stat.split_whitespace().nth(6));
    let mut unknown = Vec::new();
    if bytes.is_none() {
        unknown.push(format!("the drive's capacity: {} does not say", path.display()));
    }
    Drive {
        name,
        bytes: bytes.map(|sectors| sectors.saturating_mul(SECTOR)),
        written: written.and_then(number).map(|sectors| sectors.saturating_mul(SECTOR)),
        unknown,
    }
}

/// Seconds since the machine was started.
fn machine_up() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/uptime").ok()?;
    text.split('.').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(bytes: u64, written: Option<u64>) -> Drive {
        Drive { name: "nvme0n1".into(), bytes: Some(bytes), written, unknown: Vec::new() }
    }

    #[test]
    fn a_rate_becomes_drive_writes_and_years() {
        let tb = 1_000_000_000_000;
        let said = DriveStatus {
            written_bytes: tb,
            seconds: DAY_S / 2,
            rated_bytes: Some(7000 * tb),
            ..DriveStatus::default()
        };
        let status = judge(said.clone(), drive(4 * tb, Some(3 * tb)), Some(2 * DAY_S));
        assert_eq!(status.bytes_per_day, Some(2 * tb));
        assert_eq!(status.drive_writes_per_day_milli, Some(500));
        assert_eq!(status.life_days, Some(3500));
        // Others write more to it.
        let status = judge(said, drive(4 * tb, Some(8 * tb)), Some(2 * DAY_S));
        assert_eq!((status.bytes_per_day, status.life_days), (Some(4 * tb), Some(1750)));
    }

    #[test]
    fn what_is_not_known_is_said() {
        let nothing = DriveStatus::default();
        let status = judge(nothing.clone(), drive(1, None), None);
        assert_eq!((status.bytes_per_day, status.life_days), (None, None));
        assert!(status.unknown[0].contains("just started"), "{:?}", status.unknown);
        let later = DriveStatus { seconds: 1000, ..nothing };
        let status = judge(later, drive(1, None), None);
        assert_eq!((status.bytes_per_day, status.life_days), (Some(0), None));
        assert!(status.unknown[0].contains("nvme.rated_bytes"), "{:?}", status.unknown);
        let found = find(Path::new("/nowhere"), Path::new("/"));
        assert!(found.unknown[0].contains("no single block device"), "{:?}", found.unknown);
    }

    #[test]
    fn a_drive_is_found_through_its_partition() {
        let sys = tempfile::tempdir().unwrap();
        let device = std::fs::metadata(sys.path()).unwrap().dev();
        let disk = sys.path().join("block/nvme9n1");
        let partition = disk.join("nvme9n1p1");
        std::fs::create_dir_all(&partition).unwrap();
        std::fs::create_dir_all(disk.join("device")).unwrap();
        std::fs::create_dir_all(sys.path().join("dev/block")).unwrap();
        std::fs::write(partition.join("partition"), "1\n").unwrap();
        std::fs::write(disk.join("size"), "2000\n").unwrap();
        std::fs::write(disk.join("stat"), "  1 2 3 4 5 6 70 8 9 10 11\n").unwrap();
        std::fs::write(disk.join("device/model"), "Fast Drive  \n").unwrap();
        let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let link = sys.path().join("dev/block").join(number);
        std::os::unix::fs::symlink(&partition, link).unwrap();
        let found = find(sys.path(), sys.path());
        assert_eq!(found.name, "nvme9n1 (Fast Drive)");
        assert_eq!((found.bytes, found.written), (Some(1_024_000), Some(35_840)));
    }
}
