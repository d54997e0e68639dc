//! What the daemon cannot run with: it says what, where and what to do, and ends with the code that
//! its help documents, having made or changed nothing that matters.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use kvtide_client::{NamespaceSpec, Outcome, Tier};
use kvtide_tests::{Ended, KvPool, Setup, is_root, namespace};
use kvtide_tiers::block::Sum128;
use kvtide_tiers::segment::SUPERBLOCK_OFFSETS;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(20);
/// Bad usage or configuration.
const USAGE: i32 = 2;
/// Store or socket cannot be used.
const STORE: i32 = 3;

fn assert_refused(what: &str, ended: &Ended, code: i32, parts: &[&str]) {
    println!("{what}: {}", ended.text.trim());
    assert_eq!(ended.code, Some(code), "{what}: {}", ended.text);
    for part in parts {
        assert!(ended.text.contains(part), "{what}: {part} is not in: {}", ended.text);
    }
    assert!(!ended.text.contains("panicked"), "{what}: {}", ended.text);
}

#[test]
fn what_the_file_says_wrongly_is_named_with_its_line() {
    let cases = [
        ("unknown key", "[host]\nbyets = \"1GiB\"", ":2: ", "did you mean `bytes`?"),
        ("unknown section", "\n[hots]\nbytes = 1", ":2: ", "hots"),
        ("size 0", "[host]\n\nbytes = 0", ":3: ", "4 MiB to"),
        ("nvme of size 0", "[nvme]\nbytes = \"0\"", ":2: ", "is allowed"),
        ("a size without sense", "[nvme]\nbytes = \"12 elephants\"", ":2: ", "\"1GiB\""),
        ("a negative number", "[limits]\nsessions = -1", ":2: ", "1 to 65536"),
        ("not TOML", "[host\n", ":1: ", "TOML"),
        ("a metrics address for all", "[admin]\nmetrics = \"0.0.0.0:1\"", ":2: ", "loopback"),
    ];
    for (what, text, line, allowed) in cases {
        let setup = Setup::new(NODE).without("--host-bytes").without("--nvme-bytes").config(text);
        let ended = setup.run_to_end();
        assert_refused(what, &ended, USAGE, &["kvtided.toml", line, allowed]);
        assert!(!setup.store().exists() && !setup.socket().exists(), "{what}: made something");
    }
    let missing = Setup::new(NODE).option("--config", "/no/such/file.toml").run_to_end();
    assert_refused("no such file", &missing, USAGE, &["/no/such/file.toml", "cannot read"]);
}

#[test]
fn what_the_command_line_says_wrongly_is_named() {
    let long = Setup::new(NODE).path(&"x".repeat(120));
    let cases = [
        ("size 0", "--host-bytes", "0".to_owned(), "4 MiB to"),
        ("too small for segments", "--nvme-bytes", "1MiB".to_owned(), "four segments"),
        ("odd segments", "--segment-bytes", "5000000".to_owned(), "whole MiB"),
        ("socket path too long", "--socket", long.display().to_string(), "at most 107"),
    ];
    for (what, option, value, allowed) in cases {
        let ended = Setup::new(NODE).option(option, value).run_to_end();
        assert_refused(what, &ended, USAGE, &[option, allowed]);
    }
}

#[test]
fn a_store_folder_that_cannot_be_used_is_named() {
    let setup = Setup::new(NODE);
    let file = setup.path("file");
    fs::write(&file, "not a folder").unwrap();
    let below = file.join("store");
    let ended = setup.clone().option("--store", &below).run_to_end();
    assert_refused("below a file", &ended, USAGE, &["cannot be written", "another folder"]);
    // A folder that nobody can write to, not even root.
    let ended = setup.clone().option("--store", "/proc/kvtide").run_to_end();
    println!("in /proc: {}", ended.text.trim());
    assert!(matches!(ended.code, Some(USAGE | STORE)), "{}", ended.text);
    assert!(ended.text.contains("/proc/kvtide"), "{}", ended.text);
    if is_root() {
        println!("SKIPPED IN PART: root may write to a folder of mode 0500");
        return;
    }
    let locked = setup.path("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, std::os::unix::fs::PermissionsExt::from_mode(0o500)).unwrap();
    let ended = setup.option("--store", locked.join("store")).run_to_end();
    assert_refused("mode 0500", &ended, USAGE, &["cannot be written", "another folder"]);
}

#[test]
fn a_socket_that_cannot_be_made_is_named() {
    let setup = Setup::new(NODE);
    fs::write(setup.socket(), "a file of somebody").unwrap();
    let ended = setup.run_to_end();
    let socket = setup.socket().display().to_string();
    assert_refused("a file there", &ended, STORE, &[&socket, "not a socket", "move it away"]);
    assert_eq!(fs::read_to_string(setup.socket()).unwrap(), "a file of somebody");
}

/// A store with one prompt in it, and the file that holds it.
fn filled_store() -> (Setup, PathBuf) {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let pool = KvPool::open(daemon.client(), "kept", 4, 16 << 10).unwrap();
    let keys = pool.keys(1, 4);
    assert_eq!(pool.store(&keys, 4, PATIENCE), [Outcome::Stored; 4]);
    assert_eq!(daemon.stop_gracefully().code(), Some(0));
    let file = setup.store().join(kvtide_tiers::folder::STORE_FILE_NAME);
    assert!(file.is_file());
    (setup, file)
}

#[test]
fn a_foreign_newer_or_reshaped_store_is_left_as_it_is() {
    let (setup, file) = filled_store();
    let name = file.display().to_string();
    let whole = fs::File::options().read(true).write(true).open(&file).unwrap();
    let mut head = vec![0; 1 << 20];
    whole.read_exact_at(&mut head, 0).unwrap();

    let reshaped = setup.clone().option("--segment-bytes", "8MiB").run_to_end();
    assert_refused("another shape", &reshaped, STORE, &[&name, "fixed when", "4194304"]);

    whole.write_all_at(&vec![0x55; 1 << 20], 0).unwrap();
    let foreign = setup.run_to_end();
    assert_refused("foreign", &foreign, STORE, &[&name, "not a kvtide store", "move it away"]);
    let mut now = vec![0; 1 << 20];
    whole.read_exact_at(&mut now, 0).unwrap();
    assert!(now.iter().all(|byte| *byte == 0x55), "a foreign file was written to");

    // Version 2 with right checksums, by the rule that all versions keep.
    let mut newer = head.clone();
    for at in SUPERBLOCK_OFFSETS {
        let page = &mut newer[usize::try_from(at).unwrap()..][..4096];
        page[8..12].copy_from_slice(&2u32.to_le_bytes());
        let sum = Sum128::of(&page[..4080]);
        page[4080..].copy_from_slice(&sum.0);
    }
    whole.write_all_at(&newer, 0).unwrap();
    let refused = setup.run_to_end();
    assert_refused(
        "newer",
        &refused,
        STORE,
        &[&name, "format 2", "reads up to 1", "move the file"],
    );

    whole.write_all_at(&head, 0).unwrap();
    let mut daemon = setup.start();
    let pool = KvPool::open(daemon.client(), "kept", 4, 16 << 10).unwrap();
    let loaded = pool.load(&pool.keys(1, 4), PATIENCE);
    assert_eq!(loaded, [Outcome::Loaded(Tier::Nvme); 4], "all refusals changed nothing");
    daemon.assert_healthy();
}

#[test]
fn a_disk_without_room_is_named_and_nothing_is_left_on_it() {
    let setup = Setup::new(NODE).option("--segment-bytes", "1GiB").option("--nvme-bytes", "900TiB");
    let ended = setup.run_to_end();
    let store = setup.store().display().to_string();
    println!("900 TiB: {}", ended.text.trim());
    assert_eq!(ended.code, Some(STORE), "{}", ended.text);
    assert!(ended.text.contains(&store) && ended.text.contains("smaller size"), "{}", ended.text);
    let file = setup.store().join(kvtide_tiers::folder::STORE_FILE_NAME);
    let left = fs::metadata(file).map_or(0, |meta| std::os::unix::fs::MetadataExt::blocks(&meta));
    assert!(left < 4096, "{left} sectors are left");

    // And with a limit on the size of files, which needs no large disk. Not `ulimit` as a builtin
    // of the test: limits cannot be raised again.
    let setup = Setup::new(NODE);
    let daemon = setup.command();
    let mut command = Command::new("sh");
    command.arg("-c").arg("ulimit -f 65536; exec \"$0\" \"$@\"").arg(daemon.get_program());
    command.args(daemon.get_args());
    let output = command.output().unwrap();
    let ended =
        Ended { code: output.status.code(), text: String::from_utf8(output.stderr).unwrap() };
    assert_refused("ulimit -f", &ended, STORE, &["ulimit -f", "smaller size"]);
}

/// A small file system, for as long as it is not dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(setup: &Setup, bytes: u64) -> Option<SmallDisk> {
        let path = setup.path("disk");
        fs::create_dir(&path).unwrap();
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        let mounted = mount("tmpfs", &path, "tmpfs", MountFlags::empty(), Some(options.as_c_str()));
        match mounted {
            Ok(()) => Some(SmallDisk(path)),
            Err(error) => {
                println!("SKIPPED: no file system can be mounted here ({error})");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn a_disk_that_fills_up_under_the_daemon_costs_no_block() {
    let setup = Setup::new(NODE);
    let Some(disk) = SmallDisk::mount(&setup, 64 << 20) else { return };
    let full = setup.clone().option("--store", disk.0.join("store")).run_to_end();
    assert_refused("128 MiB on 64", &full, STORE, &["more than the file system", "smaller size"]);

    let setup = setup.option("--store", disk.0.join("store")).option("--nvme-bytes", "32MiB");
    let mut daemon = setup.start();
    let pool = KvPool::open(daemon.client(), "full", 8, 64 << 10).unwrap();
    let mut filler = fs::File::create(disk.0.join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    // The namespace table cannot grow: a clear error, for that client.
    let refused = pool.client.open_namespace(&NamespaceSpec::own(namespace("one more")));
    let text = refused.err().map(|error| error.to_string()).unwrap_or_default();
    println!("a namespace on a full disk: {text}");
    assert!(text.contains("No space left"), "{text}");
    // Blocks go on: the store has its room since it was made. More than host RAM holds.
    for seed in 0..70 {
        let keys = pool.keys(seed, 8);
        let stored = pool.store(&keys, 8, PATIENCE);
        assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
        assert_eq!(pool.load(&keys, PATIENCE).len(), 8);
    }
    let (stats, _) = daemon.stats();
    assert_eq!((stats.write_failures, stats.nvme.offline), (0, None));
    daemon.assert_healthy();
    drop(filler);
    fs::remove_file(disk.0.join("filler")).unwrap();
    pool.client.open_namespace(&NamespaceSpec::own(namespace("one more"))).unwrap();
    assert_eq!(daemon.stop_gracefully().code(), Some(0));
}
