//! A real systemd, in a container that is thrown away, runs the daemon from the unit that we ship:
//! what was in RAM is in RAM after `systemctl restart` and after a kill, and memory that was
//! damaged in between never reaches a client. Needs root and systemd-nspawn.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::fs::write;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvtide_tests::is_root;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");

const MIB: u64 = 1 << 20;

/// The host tier that the test wants, and the largest one that it takes.
const HOST_MIB: u64 = 64;
const HOST_MIB_MAX: u64 = 1024;

/// More RAM than there are reserved huge pages free: an arena of those could not be damaged through
/// its file, because they cannot be written to in this way.
fn host_mib() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let field = |name: &str| -> u64 {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0");
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    field("HugePages_Free:") * field("Hugepagesize:") * 1024 / MIB + HOST_MIB
}

fn config(host_mib: u64) -> String {
    let nvme_mib = host_mib + 192;
    format!(
        "[daemon]\nsocket = \"/run/kvtide/kvtide.sock\"\n\
         [host]\nbytes = \"{host_mib}MiB\"\nkeep = \"always\"\n\
         [nvme]\nfolder = \"/var/lib/kvtide\"\nbytes = \"{nvme_mib}MiB\"\n\
         segment_bytes = \"4MiB\"\nblock_bytes_min = \"4KiB\"\n"
    )
}

/// Ends the container with the driver's result.
const DRIVER: &str = "\
[Unit]
Description=what the test does
Wants=kvtided.service
After=kvtided.service
SuccessAction=exit
FailureAction=exit
SuccessActionExitStatus=0
FailureActionExitStatus=1

[Service]
Type=oneshot
ExecStart=/payload/kvtide-test-node __booted
StandardOutput=journal+console
StandardError=journal+console
";

const TARGET: &str = "\
[Unit]
Requires=driver.service basic.target
After=basic.target
AllowIsolate=yes
";

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd").join(name)
}

/// Units, users, configuration and program, as an operator would install them.
fn install(folder: &Path, host_mib: u64) {
    let [units, payload, etc] = ["units", "payload", "kvtide"].map(|name| folder.join(name));
    for each in [&units, &payload, &etc] {
        std::fs::create_dir(each).unwrap();
    }
    let unit = std::fs::read_to_string(shipped("kvtided.service")).unwrap();
    assert_eq!(unit.matches("ExecStart=/usr/bin/kvtided ").count(), 1);
    let program = "ExecStart=/payload/kvtide-test-node __daemon ";
    let unit = unit.replace("ExecStart=/usr/bin/kvtided ", program);
    write(units.join("kvtided.service"), unit).unwrap();
    write(units.join("driver.service"), DRIVER).unwrap();
    write(units.join("kvtide-test.target"), TARGET).unwrap();
    write(etc.join("kvtided.toml"), config(host_mib)).unwrap();
    std::fs::copy(NODE, payload.join("kvtide-test-node")).unwrap();
}

fn boot(folder: &Path) -> Command {
    let mut nspawn = Command::new("timeout");
    nspawn.args(["--kill-after=10", "240", "systemd-nspawn", "--quiet", "--directory=/"]);
    nspawn.args(["--volatile=yes", "--register=no", "--keep-unit", "--private-network"]);
    nspawn.args(["--console=read-only", "--boot"]);
    let bind = |from: &Path, to: &str| format!("--bind-ro={}:{to}", from.display());
    nspawn.arg(bind(&folder.join("units"), "/etc/systemd/system"));
    nspawn.arg(bind(&folder.join("payload"), "/payload"));
    nspawn.arg(bind(&folder.join("kvtide"), "/etc/kvtide"));
    nspawn.arg(bind(&shipped("sysusers.conf"), "/etc/sysusers.d/kvtide.conf"));
    nspawn.arg(bind(&shipped("tmpfiles.conf"), "/etc/tmpfiles.d/kvtide.conf"));
    nspawn.args(["--", "systemd.unit=kvtide-test.target", "systemd.log_target=console"]);
    for unit in ["firstboot", "sysctl", "binfmt"] {
        nspawn.arg(format!("systemd.mask=systemd-{unit}.service"));
    }
    nspawn.env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1");
    nspawn
}

#[test]
fn ram_hits_are_the_same_under_systemd_and_damage_never_reaches_a_client() {
    let there = Command::new("systemd-nspawn").arg("--version").output();
    if !is_root() || there.is_err() {
        eprintln!("SKIPPED: needs root and systemd-nspawn (Debian: systemd-container)");
        return;
    }
    let host_mib = host_mib();
    if host_mib > HOST_MIB_MAX {
        eprintln!("SKIPPED: more than 1 GiB of reserved huge pages is free, too much for a test");
        return;
    }
    let folder = tempfile::Builder::new().prefix("kvtide-boot-").tempdir().unwrap();
    install(folder.path(), host_mib);
    let ended = boot(folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    let errors = String::from_utf8_lossy(&ended.stderr);
    let passed: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once("PASSED "))
        .map(|(_, what)| what.trim())
        .collect();
    println!("{}", passed.join("\n"));
    assert!(ended.status.success(), "{:?}\n{text}\n{errors}", ended.status);
    for step in ["restart: ", "kill -9: ", "a second restart: ", "damage: ", "refill: "] {
        assert!(
            passed.iter().any(|line| line.starts_with(step)),
            "no {step:?} in\n{text}\n{errors}"
        );
    }
}
