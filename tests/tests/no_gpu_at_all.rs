//! On a machine without a GPU the daemon starts, says in one line why the device tier is off, and
//! serves as ever. It is linked to no library of CUDA.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvtide_client::{Outcome, Tier};
use kvtide_tests::gpu::{EngineSpec, Memory, Order, Shape};
use kvtide_tests::{Daemon, KvPool, Setup};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(60);

/// Why the tier is off, as the log and `kvtide status` say it.
fn reason(setup: &Setup, daemon: &Daemon) -> String {
    let log = daemon.log();
    let lines: Vec<&str> =
        log.lines().filter(|line| line.contains("device tier") || line.contains("CUDA")).collect();
    assert_eq!(lines.len(), 1, "one line is enough: {lines:?}");
    let (_, why) = lines[0].split_once("device tier: off: ").unwrap();
    let status = setup.inspector(&["status"]);
    let row = status.lines().find(|line| line.starts_with("device ")).unwrap();
    assert!(row.ends_with(&format!("off: {why}")), "{row}");
    why.to_owned()
}

fn serves(daemon: &Daemon) {
    let pool = KvPool::open(daemon.client(), "none", 4, 64 << 10).unwrap();
    let keys = pool.keys(1, 4);
    assert_eq!(pool.store(&keys, keys.len(), PATIENCE), [Outcome::Stored; 4]);
    assert_eq!(pool.load(&keys, PATIENCE), [Outcome::Loaded(Tier::Host); 4]);
}

#[test]
fn without_a_driver_the_daemon_says_so_in_one_line_and_serves() {
    // Also with a pool that somebody asked for.
    for pool in [None, Some("64MiB")] {
        let setup = Setup::new(NODE).option("--device-library", "/no/such/libcuda.so.1");
        let setup = match pool {
            Some(bytes) => setup.option("--device-pool-bytes", bytes),
            None => setup,
        };
        let mut daemon = setup.start();
        let why = reason(&setup, &daemon);
        println!("{why}");
        assert!(why.contains("/no/such/libcuda.so.1"), "{why}");
        serves(&daemon);
        // An engine that has a GPU hears it too.
        let revision = "none".to_owned();
        let (memory, order) = (Memory::Legacy, Order::Sync);
        let shape = Shape::HeadRows;
        let spec = EngineSpec { revision, shape, tokens: 16, places: 2, memory, order };
        let refused = setup.try_engine(&spec, &[]).err().unwrap();
        assert!(refused.contains("the device tier is off") && refused.contains(&why), "{refused}");
        daemon.assert_healthy();
        assert_eq!(daemon.stop_gracefully().code(), Some(0));
    }
}

#[test]
fn the_driver_of_this_machine_is_looked_for_and_its_absence_is_no_fault() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    match daemon.client().status().unwrap().devices.len() {
        0 => println!("{}", reason(&setup, &daemon)),
        gpus => println!("this machine has {gpus} GPUs, so nothing is shown here"),
    }
    serves(&daemon);
    daemon.assert_healthy();
}

fn number(bytes: &[u8], at: usize, len: usize) -> usize {
    bytes[at..at + len].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
}

/// The names of the libraries that a program of 64 bits is linked to (`DT_NEEDED`).
fn linked(program: &Path) -> Vec<String> {
    const LOAD: usize = 1;
    const DYNAMIC: usize = 2;
    const NEEDED: usize = 1;
    const STRINGS: usize = 5;
    let bytes = &*std::fs::read(program).unwrap();
    assert_eq!(bytes[..6], *b"\x7fELF\x02\x01", "64 bits, little-endian");
    let (table, size, count) = (number(bytes, 32, 8), number(bytes, 54, 2), number(bytes, 56, 2));
    let headers: Vec<usize> = (0..count).map(|at| table + at * size).collect();
    let of_kind = |kind| headers.iter().copied().filter(move |at| number(bytes, *at, 4) == kind);
    let in_file = |address: usize| {
        let found = of_kind(LOAD).find_map(|at| {
            let within = address.checked_sub(number(bytes, at + 16, 8))?;
            (within < number(bytes, at + 32, 8)).then(|| number(bytes, at + 8, 8) + within)
        });
        found.unwrap()
    };
    let dynamic = of_kind(DYNAMIC).next().unwrap();
    let (start, len) = (number(bytes, dynamic + 8, 8), number(bytes, dynamic + 32, 8));
    let entries: Vec<(usize, usize)> = (start..start + len)
        .step_by(16)
        .map(|at| (number(bytes, at, 8), number(bytes, at + 8, 8)))
        .collect();
    let strings = entries.iter().find(|(tag, _)| *tag == STRINGS).unwrap().1;
    let text = |at: usize| {
        let from = &bytes[in_file(strings) + at..];
        let end = from.iter().position(|byte| *byte == 0).unwrap();
        String::from_utf8(from[..end].to_vec()).unwrap()
    };
    let needed = entries.iter().filter(|(tag, _)| *tag == NEEDED);
    needed.map(|(_, name)| text(*name)).collect()
}

#[test]
fn the_daemon_is_linked_to_no_library_of_cuda() {
    // The node is all of the daemon. The daemon's own programs lie beside it where they were built.
    let node = PathBuf::from(NODE);
    let others = ["kvtided", "kvtide"].map(|name| node.with_file_name(name));
    let there = others.into_iter().filter(|program| program.exists());
    for program in std::iter::once(node).chain(there) {
        let libraries = linked(&program);
        println!("{}: {libraries:?}", program.display());
        assert!(libraries.iter().any(|name| name.starts_with("libc.so")), "{libraries:?}");
        for part in ["cuda", "nvrtc", "nvidia", "cublas"] {
            assert!(!libraries.iter().any(|name| name.contains(part)), "{libraries:?}");
        }
    }
}
