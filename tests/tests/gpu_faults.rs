//! A GPU whose driver fails, and engines that die in the middle of a copy: never a wrong byte (each
//! load looks at all of the engine's pool), the daemon lives, host RAM and nvme go on serving, and
//! operators see why a GPU is off.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_client::Outcome;
use kvtide_client::blocking::Client;
use kvtide_tests::gpu::{EngineSpec, Memory, Order, Shape};
use kvtide_tests::{
    Daemon, GpuEngine, KvPool, Setup, device_mapped_bytes, gpu_state, open_descriptors, poll_until,
};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(60);
/// Blocks of each prompt.
const BLOCKS: usize = 4;

fn spec(memory: Memory, order: Order) -> EngineSpec {
    let revision = "faults".to_owned();
    EngineSpec { revision, shape: Shape::HeadRows, tokens: 16, places: 12, memory, order }
}

fn setup() -> Setup {
    Setup::new(NODE).gpu("16MiB")
}

fn loaded(outcomes: &[String]) -> usize {
    outcomes.iter().filter(|outcome| outcome.starts_with("Loaded")).count()
}

/// A client without a GPU stores and loads, and gets every byte right.
fn serves_host_memory(daemon: &Daemon, seed: u32) {
    let pool = KvPool::open(daemon.client(), "host", 4, 64 << 10).unwrap();
    let keys = pool.keys(seed, 4);
    let stored = pool.store(&keys, keys.len(), PATIENCE);
    assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
    let found = pool.load(&keys, PATIENCE);
    assert_eq!(found.len(), keys.len());
    assert!(found.iter().all(|each| matches!(each, Outcome::Loaded(_))), "{found:?}");
}

fn wait_written_down(daemon: &Daemon) {
    let written = poll_until(PATIENCE, || (daemon.stats().0.dirty_blocks == 0).then_some(()));
    assert!(written.is_some(), "not written down: {:?}", daemon.stats().0);
    // Descriptors are committed at the latest 100 ms after their blocks.
    std::thread::sleep(Duration::from_millis(400));
}

/// Stores and loads with faults under way until `end`. Every byte of each load is compared.
fn use_until(
    from: &mut GpuEngine,
    to: &mut GpuEngine,
    what: &str,
    mut end: impl FnMut(&[String], &[String]) -> bool,
) {
    let mut seed = 10;
    let ended = poll_until(PATIENCE, || {
        seed += 1;
        let stored = from.store(seed, BLOCKS);
        let found = to.load(seed, BLOCKS);
        to.load(1, BLOCKS);
        from.load(seed, BLOCKS);
        end(&stored, &found).then_some(())
    });
    assert!(ended.is_some(), "{what} came to nothing in {} rounds", seed - 10);
}

#[test]
fn a_lost_gpu_is_off_and_the_rest_goes_on() {
    for (faults, code) in [
        ("cuLaunchKernel@3=launch_failed", "719"),
        ("cuLaunchKernel@6=illegal_address", "700"),
        ("cuMemcpyHtoDAsync_v2@2=ecc", "214"),
        ("cuEventRecord@3=ecc", "214"),
        ("cuEventQuery@4=launch_timeout", "702"),
    ] {
        let (setup, file) = setup().fault_file();
        let mut daemon = setup.start();
        let mut from = setup.engine(&spec(Memory::Legacy, Order::Ring), &[]);
        let mut to = setup.engine(&spec(Memory::Vmm, Order::Sync), &[]);
        assert_eq!(from.store(1, BLOCKS), ["Stored"; BLOCKS]);
        wait_written_down(&daemon);
        let operator = daemon.client();
        assert_eq!(gpu_state(&operator).0, None);

        file.set(faults);
        use_until(&mut from, &mut to, faults, |_, _| gpu_state(&operator).0.is_some());
        let (off, _, _) = gpu_state(&operator);
        let off = off.unwrap();
        println!("{faults}: {off}");
        assert!(off.contains(code), "{faults}: {off}");
        assert!(setup.inspector(&["status"]).contains(&format!("OFF: {off}")), "{faults}");
        // Engines are told at once, and go on without.
        assert_eq!(loaded(&to.load(1, BLOCKS)), 0, "{faults}");
        assert!(!from.store(2, BLOCKS).contains(&"Stored".to_owned()), "{faults}");
        let refused = setup.try_engine(&spec(Memory::Legacy, Order::Sync), &[]).err().unwrap();
        assert!(refused.contains("the device tier is off"), "{refused}");
        serves_host_memory(&daemon, 1);
        daemon.assert_healthy();

        // A restart brings it back, and what was written down is there.
        file.clear();
        assert_eq!(daemon.stop_gracefully().code(), Some(0), "{faults}: {}", daemon.log());
        daemon.restart();
        for engine in [&mut from, &mut to] {
            let found = engine.load_when_back(1, BLOCKS);
            assert_eq!(loaded(&found), BLOCKS, "{faults}: {found:?}");
        }
        daemon.assert_healthy();
    }
}

#[test]
fn a_call_that_fails_fails_its_own_copies_only() {
    let (setup, file) = setup().fault_file();
    let mut daemon = setup.start();
    let mut from = setup.engine(&spec(Memory::Legacy, Order::Ring), &[]);
    let mut to = setup.engine(&spec(Memory::Vmm, Order::Sync), &[]);
    assert_eq!(from.store(1, BLOCKS), ["Stored"; BLOCKS]);
    let operator = daemon.client();
    for faults in [
        "cuLaunchKernel@1=oom",
        "cuLaunchKernel@2=invalid_value",
        "cuLaunchKernel@3=oom",
        "cuLaunchKernel@5=oom",
        "cuMemcpyHtoDAsync_v2@1=invalid_value",
        "cuMemcpyDtoHAsync_v2@1=oom",
        "cuEventRecord@1=invalid_handle",
        "cuEventQuery@1=invalid_handle",
    ] {
        file.set(faults);
        // A fault that has hit shows as a block that was not stored, or not loaded.
        use_until(&mut from, &mut to, faults, |stored, found| {
            let failed = loaded(found) < BLOCKS || *stored != ["Stored"; BLOCKS];
            if failed {
                println!("{faults}: {stored:?}, {found:?}");
            }
            failed
        });
        assert_eq!(gpu_state(&operator).0, None, "{faults}");
        file.clear();
        assert_eq!(loaded(&to.load(1, BLOCKS)), BLOCKS, "{faults}");
        daemon.assert_healthy();
    }
    // What no engine's pool can be imported with.
    for faults in
        ["cuIpcOpenMemHandle_v2=map_failed", "cuMemAlloc_v2=oom", "cuIpcOpenEventHandle=oom"]
    {
        file.set(faults);
        let mapped = device_mapped_bytes(daemon.pid());
        let refused = setup.try_engine(&spec(Memory::Legacy, Order::Ring), &[]).err();
        println!("{faults}: {refused:?}");
        assert!(refused.is_some(), "{faults}");
        file.clear();
        assert_eq!(gpu_state(&operator).0, None, "{faults}");
        let back =
            poll_until(PATIENCE, || (device_mapped_bytes(daemon.pid()) == mapped).then_some(()));
        assert!(back.is_some(), "{faults} leaves memory mapped");
    }
    serves_host_memory(&daemon, 1);
    from.end();
    to.end();
    daemon.assert_healthy();
}

#[test]
fn a_gpu_that_cannot_be_had_at_start_is_off_with_the_reason() {
    for (name, value, reason) in [
        ("FAKECUDA_FAULTS", "cuDevicePrimaryCtxRetain=oom", "memory"),
        ("FAKECUDA_FAULTS", "cuModuleLoadData=unsupported_ptx", "222"),
        ("FAKECUDA_FAULTS", "cuMemHostRegister_v2=oom", "memory"),
        ("FAKECUDA_FAULTS", "cuStreamCreate=999", "999"),
        ("FAKECUDA_FAULTS", "cuInit=system_not_ready", "802"),
        ("FAKECUDA_MEMORY", "8388608", "memory"),
        ("FAKECUDA_DEVICES", "0", "no GPU"),
        ("FAKECUDA_DRIVER_VERSION", "12000", "too old"),
    ] {
        let setup = setup().env(name, value);
        let mut daemon = setup.start();
        let status = daemon.client().status().unwrap();
        let off = status.devices.first().and_then(|gpu| gpu.off.clone());
        let off = off.unwrap_or_else(|| status.device.clone());
        println!("{name}={value}: {off}");
        assert!(off.contains(reason), "{name}={value}: {off}");
        assert!(!off.contains('\n'), "{off}");
        assert!(setup.inspector(&["status"]).contains(&off), "{off}");
        assert!(daemon.log().contains(&off), "{off} is not in {}", daemon.log());
        serves_host_memory(&daemon, 1);
        daemon.assert_healthy();
        assert_eq!(daemon.stop_gracefully().code(), Some(0), "{name}={value}: {}", daemon.log());
    }
}

/// Waits until the daemon holds nothing of any client but the witness and the asker.
fn settle(daemon: &Daemon, asker: &Client, mapped: u64) {
    let mut last = String::new();
    let settled = poll_until(PATIENCE, || {
        let stats = asker.stats().unwrap().catalog.unwrap();
        let now = device_mapped_bytes(daemon.pid());
        last = format!("{now} bytes mapped of {mapped}; {stats:?}");
        let held = stats.sessions - 2 + stats.regions - 1 + stats.leases + stats.tickets;
        (held == 0 && now == mapped).then_some(())
    });
    assert!(settled.is_some(), "still held: {last}");
}

/// Engines that are killed together.
const AT_ONCE: u32 = 4;

/// Groups that load take turns with groups that store.
fn flood(group: u32) -> &'static str {
    if group.is_multiple_of(2) { "load" } else { "store" }
}

fn seed_of(group: u32, at: u32) -> u32 {
    if flood(group) == "load" { 1 } else { 10_000 + 1000 * (group * AT_ONCE + at) }
}

/// Kills engines in the middle of what they do; the tickets under way before the last one's end.
fn kill_engines(setup: &Setup, asker: &Client, group: u32) -> u64 {
    let kinds = [Memory::Legacy, Memory::Vmm];
    let orders = [Order::Ring, Order::Ring, Order::Sync];
    let mut engines: Vec<GpuEngine> = (0..AT_ONCE)
        .map(|at| {
            let number = (group * AT_ONCE + at) as usize;
            // The engine's own stream is late, so that it dies in front of its events as well.
            let late = [("FAKECUDA_JITTER_US", "2000")];
            setup.engine(&spec(kinds[number % 2], orders[number % 3]), &late)
        })
        .collect();
    for (engine, at) in engines.iter_mut().zip(0..) {
        engine.tell(&format!("flood {} {} {BLOCKS}", flood(group), seed_of(group, at)));
    }
    engines.iter_mut().for_each(|engine| assert_eq!(engine.hear(), "busy"));
    let mut under_way = 0;
    for (at, mut engine) in engines.into_iter().enumerate() {
        // Another moment each time, without any randomness.
        let us = (u64::from(group) * 131 + at as u64 * 977) % 4000;
        std::thread::sleep(Duration::from_micros(us));
        assert!(engine.is_alive(), "the engine ended before it was killed");
        under_way = asker.stats().unwrap().catalog.unwrap().tickets;
        engine.kill9();
    }
    under_way
}

#[test]
fn engines_killed_in_mid_gather_and_mid_scatter_leave_nothing() {
    let kills: u32 = std::env::var("KVTIDE_KILLS").map_or(100, |text| text.parse().unwrap());
    let setup = setup().env("FAKECUDA_JITTER_US", "500").option("--nvme-bytes", "256MiB");
    let mut daemon = setup.start();
    let asker = daemon.client();
    let mut witness = setup.engine(&spec(Memory::Vmm, Order::Ring), &[]);
    assert_eq!(witness.store(1, BLOCKS), ["Stored"; BLOCKS]);
    assert_eq!(loaded(&witness.load(1, BLOCKS)), BLOCKS);
    let mapped = device_mapped_bytes(daemon.pid());
    assert!(mapped > 16 << 20, "the pool and the witness are seen: {mapped}");
    let (mut cut, mut found_later, mut missed) = (0, 0, 0);
    let mut descriptors = 0;
    for group in 0..kills.div_ceil(AT_ONCE) {
        cut += u32::from(kill_engines(&setup, &asker, group) > 0);
        // While the daemon still closes what is left of them, and of what they stored.
        if loaded(&witness.load(1, BLOCKS)) < BLOCKS {
            missed += 1;
            witness.store(1, BLOCKS);
        }
        for at in 0..AT_ONCE {
            for round in 0..3 {
                found_later += loaded(&witness.load(seed_of(group, at) + round, BLOCKS));
            }
        }
        settle(&daemon, &asker, mapped);
        if group == 4 {
            descriptors = open_descriptors(daemon.pid());
        }
    }
    println!("{cut} groups with tickets under way; blocks of theirs that were good: {found_later}");
    println!("the witness's prompt was gone {missed} times");
    assert!(cut > kills / AT_ONCE / 4, "too few kills were in mid-transfer");
    assert!(found_later > 0, "nothing that they stored was seen");
    let flat =
        poll_until(PATIENCE, || (open_descriptors(daemon.pid()) <= descriptors + 2).then_some(()));
    assert!(flat.is_some(), "{} descriptors, {descriptors} before", open_descriptors(daemon.pid()));
    assert_eq!(gpu_state(&asker).0, None, "the GPU is in use");
    witness.end();
    serves_host_memory(&daemon, 1);
    daemon.assert_healthy();
}

#[test]
fn an_exporter_killed_while_the_daemon_copies() {
    for (what, memory) in [
        ("store", Memory::Legacy),
        ("store", Memory::Vmm),
        ("load", Memory::Legacy),
        ("load", Memory::Vmm),
    ] {
        let (setup, file) = setup().fault_file();
        let mut daemon = setup.start();
        let asker = daemon.client();
        let mut witness = setup.engine(&spec(Memory::Legacy, Order::Sync), &[]);
        assert_eq!(witness.store(1, BLOCKS), ["Stored"; BLOCKS]);
        assert_eq!(loaded(&witness.load(1, BLOCKS)), BLOCKS);
        let mapped = device_mapped_bytes(daemon.pid());
        let mut engine = setup.engine(&spec(memory, Order::Ring), &[]);
        let prompt = if what == "store" { 2 } else { 1 };
        file.set("cuLaunchKernel@1=stall");
        assert_eq!(engine.ask(&format!("begin {what} {prompt} {BLOCKS}")), "begun");
        // Seen from 5 s on; a batch may take 30 s.
        let stuck = poll_until(PATIENCE, || {
            let (off, stuck, health) = gpu_state(&asker);
            assert_eq!(off, None);
            (stuck && health.contains("a copy has been under way")).then_some(())
        });
        assert!(stuck.is_some(), "the copy does not stall: {:?}", gpu_state(&asker));
        engine.kill9();
        assert!(device_mapped_bytes(daemon.pid()) > mapped, "its memory is in use");
        file.clear();
        settle(&daemon, &asker, mapped);
        assert_eq!(gpu_state(&asker), (None, false, "ok".to_owned()));
        // What was stored by then is right, or not there.
        let found = loaded(&witness.load(prompt, BLOCKS));
        println!("{what}, {memory:?}: {found} blocks of the dead engine");
        assert_eq!(loaded(&witness.load(1, BLOCKS)), BLOCKS);
        witness.end();
        daemon.assert_healthy();
    }
}
