//! The driver hangs when the daemon gives an engine's memory back, as drivers have done: everybody
//! else is served, operators see which GPU is stuck and for how long, and the daemon still stops.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvtide_client::Outcome;
use kvtide_client::blocking::Client;
use kvtide_tests::gpu::{EngineSpec, Memory, Order, Shape};
use kvtide_tests::{Daemon, KvPool, Setup, device_mapped_bytes, gpu_state, poll_until};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(60);
const BLOCKS: usize = 4;

fn spec(memory: Memory) -> EngineSpec {
    EngineSpec {
        revision: "hangs".into(),
        shape: Shape::HeadRows,
        tokens: 16,
        places: 6,
        memory,
        order: Order::Ring,
    }
}

fn serves_everybody_else(setup: &Setup, daemon: &Daemon, seed: u32) {
    let pool = KvPool::open(daemon.client(), "host", 4, 64 << 10).unwrap();
    let keys = pool.keys(seed, 4);
    assert_eq!(pool.store(&keys, keys.len(), PATIENCE), [Outcome::Stored; 4]);
    let found = pool.load(&keys, PATIENCE);
    assert!(found.iter().all(|each| matches!(each, Outcome::Loaded(_))), "{found:?}");
    // Engines with GPU memory too, old and new.
    let mut engine = setup.engine(&spec(Memory::Vmm), &[]);
    assert_eq!(engine.load(1, BLOCKS), ["Loaded(Device)"; BLOCKS]);
    assert_eq!(engine.store(seed, BLOCKS), ["Stored"; BLOCKS]);
    assert_eq!(engine.load(seed, BLOCKS).len(), BLOCKS);
    engine.kill9();
}

/// What the daemon's health page says.
fn health(path: &Path) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Waits until the GPU is said to be stuck; its health in words.
fn wait_stuck(client: &Client) -> String {
    let stuck = poll_until(PATIENCE, || {
        let (off, stuck, health) = gpu_state(client);
        assert_eq!(off, None, "a close that hangs is no reason to give the GPU up");
        stuck.then_some(health)
    });
    stuck.unwrap_or_else(|| panic!("nobody says that it is stuck: {:?}", gpu_state(client)))
}

#[test]
fn everybody_else_is_served_and_the_daemon_stops() {
    for (memory, fault) in
        [(Memory::Legacy, "cuIpcCloseMemHandle=hang"), (Memory::Vmm, "cuMemUnmap=hang")]
    {
        let (setup, file) = Setup::new(NODE).gpu("16MiB").fault_file();
        let page = setup.path("health.sock");
        let setup = setup.option("--metrics", format!("unix:{}", page.display()));
        let mut daemon = setup.start();
        let operator = daemon.client();
        let mapped = device_mapped_bytes(daemon.pid());
        let mut engine = setup.engine(&spec(memory), &[]);
        assert_eq!(engine.store(1, BLOCKS), ["Stored"; BLOCKS]);
        let uuid = operator.status().unwrap().devices[0].uuid.clone();

        file.set(fault);
        engine.kill9();
        let words = wait_stuck(&operator);
        println!("{memory:?}: {words}");
        assert!(words.contains("cannot be closed, the oldest for "), "{words}");
        let said = health(&page);
        assert!(said.starts_with("HTTP/1.1 200") && said.contains("\nok\n"), "{said}");
        let line = said.lines().find(|line| line.starts_with(&uuid)).unwrap();
        assert!(
            line.contains("cannot be closed, the oldest for ") && line.ends_with(" s"),
            "{line}"
        );
        let row = setup.inspector(&["status"]);
        assert!(row.contains(&uuid) && row.contains("STUCK: "), "{row}");
        serves_everybody_else(&setup, &daemon, 2);
        daemon.assert_healthy();

        // It may come back, and all is given back then.
        file.clear();
        let back = poll_until(PATIENCE, || {
            (gpu_state(&operator) == (None, false, "ok".to_owned())).then_some(())
        });
        assert!(back.is_some(), "{:?}", gpu_state(&operator));
        let back =
            poll_until(PATIENCE, || (device_mapped_bytes(daemon.pid()) == mapped).then_some(()));
        assert!(back.is_some(), "memory stays mapped");

        // Or it does not, and the daemon stops all the same, and loses nothing.
        let mut engine = setup.engine(&spec(memory), &[]);
        assert_eq!(engine.load(1, BLOCKS), ["Loaded(Device)"; BLOCKS]);
        file.set(fault);
        engine.kill9();
        wait_stuck(&operator);
        let status = daemon.stop_gracefully();
        let log = daemon.log();
        assert_eq!(status.code(), Some(0), "{log}");
        assert!(!log.contains("panicked") && !log.contains("VIOLATION"), "{log}");
        file.clear();
        daemon.restart();
        let mut engine = setup.engine(&spec(memory), &[]);
        assert_eq!(engine.load(1, BLOCKS), ["Loaded(Nvme)"; BLOCKS]);
        engine.end();
        daemon.assert_healthy();
    }
}
