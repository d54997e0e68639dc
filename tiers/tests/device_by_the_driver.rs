//! What only the CUDA driver has: memory and events of another process, its errors and hangs, and
//! the one line that says why there is no device tier. Against the fake driver; each case that
//! breaks it runs in a process of its own.

#![forbid(unsafe_code)]
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod device_support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_support::cuda::{CudaMaker, choose_driver, is_real};
use device_support::{Harness, Maker as _, TestRegion, eventually, noise};
use kvtide_tiers::block::{IpcHandle, RegionLayout, Sum128};
use kvtide_tiers::catalog::{RegionId, SlotId};
use kvtide_tiers::io::Arena;
use kvtide_tiers::tier::device::cuda::{
    CudaGpu, CudaGpuOptions, EngineMemory, EngineMemoryKind, GpuChoice, use_driver_library,
};
use kvtide_tiers::tier::device::{
    DeviceDone, DeviceJob, DeviceOff, DeviceOptions, GatherTo, GpuError, OpenMemory, OpenRegion,
    ScatterFrom, probe,
};

const BLOCK: u32 = 50_000;
const BYTES: u64 = 8 * BLOCK as u64;

type CudaHarness = Harness<CudaMaker>;

fn layout() -> RegionLayout {
    RegionLayout::opaque(8, u64::from(BLOCK))
}

fn start(options: DeviceOptions) -> (CudaHarness, TestRegion) {
    let mut harness = Harness::with(CudaMaker::default(), options);
    let region = harness.region(&layout(), 1);
    (harness, region)
}

/// Runs a case in a process of its own: this binary again, with this environment.
fn in_a_process(case: &str, environment: &[(&str, &str)]) {
    if is_real() {
        println!("skipped: {case} needs the fake driver");
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["a_case_of_its_own", "--exact", "--nocapture"])
        .env("KVTIDE_TEST_CASE", case)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case}: {said}\n{log}");
    assert!(said.contains(&format!("done: {case}")), "{case} did not run: {said}\n{log}");
}

#[test]
fn a_case_of_its_own() {
    let Ok(case) = std::env::var("KVTIDE_TEST_CASE") else { return };
    match &*case {
        "engine" => return engine(),
        "off" => off(),
        "pool" => a_pool_that_does_not_fit(),
        "lost" => lost(),
        "unproved" => an_error_after_which_nobody_knows(),
        "passes" => an_error_that_passes(),
        "import" => an_import_that_fails(),
        "hang" => a_close_that_hangs(),
        "stall" => a_kernel_that_never_ends(),
        "jitter" => through_everything(),
        other => panic!("no case {other}"),
    }
    println!("done: {case}");
}

// Why there is no device tier.

#[test]
fn what_keeps_the_tier_off_is_one_line() {
    for (environment, want) in [
        (("FAKECUDA_DEVICES", "0"), "no GPU"),
        (("FAKECUDA_DRIVER_VERSION", "12000"), "too old"),
        (("FAKECUDA_FAULTS", "cuInit=stub"), "stub"),
        (("FAKECUDA_FAULTS", "cuInit=mismatch"), "kernel module"),
        // Our context would keep the engine out.
        (("FAKECUDA_COMPUTE_MODE", "3"), "compute mode EXCLUSIVE_PROCESS"),
        (("FAKECUDA_COMPUTE_MODE", "2"), "compute mode PROHIBITED"),
    ] {
        in_a_process("off", &[environment, ("KVTIDE_TEST_WANT", want)]);
    }
}

fn off() {
    let want = std::env::var("KVTIDE_TEST_WANT").unwrap();
    let off: DeviceOff = probe(Some(&fakecuda::library())).unwrap_err();
    let line = off.to_string();
    assert!(line.contains(&want), "{line}");
    assert!(!line.contains('\n') && line.len() < 300, "{line}");
    let arena = Arena::create(1 << 20, 1 << 20).unwrap();
    let options = CudaGpuOptions::default();
    let refused = CudaGpu::open(GpuChoice::Ordinal(0), 1 << 20, &arena, &options).err();
    assert!(matches!(refused, Some(GpuError::Failed(why)) if why.contains(&want)));
}

#[test]
fn a_library_that_is_not_there_is_one_line() {
    let missing = use_driver_library(std::path::Path::new("/nowhere/libcuda.so.1")).unwrap_err();
    assert!(!missing.to_string().contains('\n'), "{missing}");
}

#[test]
fn a_pool_larger_than_the_gpu_is_out_of_memory() {
    in_a_process("pool", &[("FAKECUDA_MEMORY", "67108864")]);
}

fn a_pool_that_does_not_fit() {
    choose_driver();
    let arena = Arena::create(1 << 20, 1 << 20).unwrap();
    let open = |choice, bytes| {
        // On a thread of its own, because the GPU's context stays current on it.
        let open = || CudaGpu::open(choice, bytes, &arena, &CudaGpuOptions::default()).map(drop);
        std::thread::scope(|scope| scope.spawn(open).join().unwrap())
    };
    assert_eq!(open(GpuChoice::Ordinal(0), 100 << 20), Err(GpuError::OutOfMemory));
    // The lanes do not fit beside this one, and all of it is given back.
    assert_eq!(open(GpuChoice::Ordinal(0), 60 << 20), Err(GpuError::OutOfMemory));
    assert_eq!(open(GpuChoice::Ordinal(0), 16 << 20), Ok(()));
    let gpu = probe(None).unwrap()[0].uuid;
    assert_eq!(open(GpuChoice::Uuid(gpu), 16 << 20), Ok(()));
    assert!(matches!(open(GpuChoice::Ordinal(7), 4096), Err(GpuError::Failed(_))));
    drop(Arc::into_inner(arena).expect("the registration is gone with the GPU"));
    assert_eq!(fakecuda::violations(), 0);
}

// Errors of the driver.

#[test]
fn sticky_errors_lose_the_gpu_and_leave_host_slots_free() {
    for faults in [
        "cuLaunchKernel@5=launch_failed",
        "cuLaunchKernel@9=illegal_address",
        "cuMemcpyDtoHAsync_v2@7=ecc",
        "cuMemcpyHtoDAsync_v2@6=ecc",
        "cuEventRecord@3=launch_timeout",
    ] {
        in_a_process("lost", &[("KVTIDE_TEST_FAULTS", faults)]);
    }
}

fn lost() {
    let (mut harness, region) = start(DeviceOptions::default());
    fakecuda::inject(&std::env::var("KVTIDE_TEST_FAULTS").unwrap());
    for round in 0..12 {
        let slot = harness.host_write(round, BLOCK);
        let job = harness.gather_job(&region, round % 8, GatherTo::Host(slot));
        harness.worker.try_send(job).unwrap();
        // So that each has a batch of its own.
        std::thread::sleep(Duration::from_millis(5));
    }
    let (mut good, mut bad, mut losses) = (0, 0, 0);
    for _ in 0..13 {
        match harness.answer() {
            DeviceDone::Gathered { op, result: Ok(sum) } => {
                let place = (op as u32 - 1) % 8;
                assert_eq!(sum, Sum128::of(&region.payload(place)));
                good += 1;
            }
            DeviceDone::Gathered { result: Err(GpuError::Lost(_)), .. } => bad += 1,
            DeviceDone::Lost { error: GpuError::Lost(_) } => losses += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(bad > 0 && losses == 1, "{good} good, {bad} bad, {losses} losses");
    assert!(harness.worker.health().lost.unwrap().contains("failed with"));
    // The driver has said that the context is dead, so the host tier has its slots again.
    for index in 0..12 {
        drop(harness.host_write(index, BLOCK));
    }
    let late = harness.compare(&region, 0);
    assert!(matches!(late, Err(GpuError::Lost(_))));
    harness.close(region.id);
    assert!(harness.worker.stop(Duration::from_secs(5)));
}

/// The driver fails, and then says neither that the stream is done nor that the context is dead.
#[test]
fn a_loss_without_proof_is_not_answered_and_keeps_its_slot() {
    for faults in [
        "cuEventQuery=unknown,cuStreamSynchronize=unknown",
        "cuEventRecord=unknown,cuStreamSynchronize=unknown",
    ] {
        in_a_process("unproved", &[("KVTIDE_TEST_FAULTS", faults)]);
    }
}

fn an_error_after_which_nobody_knows() {
    let (mut harness, region) = start(DeviceOptions::default());
    let idle = harness.region(&layout(), 2);
    fakecuda::inject(&std::env::var("KVTIDE_TEST_FAULTS").unwrap());
    let slot = harness.host_write(0, BLOCK);
    let job = harness.gather_job(&region, 0, GatherTo::Host(slot));
    harness.worker.try_send(job).unwrap();
    assert!(matches!(harness.answer(), DeviceDone::Lost { .. }));
    fakecuda::inject("");
    harness.worker.try_send(DeviceJob::Close { region: region.id }).unwrap();
    harness.close(idle.id);
    std::thread::sleep(Duration::from_millis(50));
    assert!(harness.answers.is_empty());
    assert!(harness.arena.write(harness.host_slot(0), 1).is_err());
    assert_eq!(harness.worker.jobs(), 0);
}

#[test]
fn an_error_that_passes_fails_one_batch() {
    for faults in [
        "cuLaunchKernel@1=oom",
        "cuLaunchKernel@3=invalid_value",
        "cuMemcpyHtoDAsync_v2@1=invalid_value",
        "cuMemcpyDtoHAsync_v2@1=unknown",
        "cuMemcpyDtoHAsync_v2@2=unknown",
        "cuEventRecord@1=oom",
    ] {
        in_a_process("passes", &[("KVTIDE_TEST_FAULTS", faults)]);
    }
}

fn an_error_that_passes() {
    let (mut harness, region) = start(DeviceOptions::default());
    let faults = std::env::var("KVTIDE_TEST_FAULTS").unwrap();
    fakecuda::inject(&faults);
    let slot = harness.host_write(0, BLOCK);
    let failed = harness.gather(&region, 0, GatherTo::Host(slot));
    let expected = matches!(failed, Err(GpuError::OutOfMemory | GpuError::Failed(_)));
    assert!(expected, "{faults}: {failed:?}");
    let slot = harness.host_write(0, BLOCK);
    let sum = harness.gather(&region, 0, GatherTo::Host(slot)).unwrap();
    assert_eq!(sum, Sum128::of(&region.payload(0)));
    assert_eq!(harness.worker.health().lost, None);
    harness.close(region.id);
    assert!(harness.worker.stop(device_support::SOON));
    assert_eq!(fakecuda::violations(), 0);
}

#[test]
fn an_import_that_fails_leaves_nothing_behind() {
    in_a_process("import", &[]);
}

fn an_import_that_fails() {
    let (mut harness, first) = start(DeviceOptions::default());
    let memory = harness.maker.memory(BYTES);
    for (faults, want) in [
        ("cuMemImportFromShareableHandle=invalid_value", "refused"),
        ("cuMemAddressReserve=oom", "out of GPU memory"),
        ("cuMemSetAccess=invalid_value", "refused"),
        ("cuMemMap=invalid_value", "refused"),
        ("cuMemAlloc_v2=oom", "out of GPU memory"),
    ] {
        fakecuda::inject(faults);
        let refused = harness.try_open(memory.share(), BYTES, layout()).unwrap_err();
        assert!(refused.to_string().contains(want), "{faults}: {refused}");
        fakecuda::inject("");
    }
    // Undoing what was done hangs: nobody waits for that.
    for undo in ["cuMemRelease=hang", "cuMemAddressFree=hang", "cuMemFree_v2=hang"] {
        fakecuda::inject(&format!("cuMemMap=invalid_value,{undo}"));
        let refused = harness.try_open(memory.share(), BYTES, layout()).unwrap_err();
        assert!(refused.to_string().contains("refused"), "{undo}: {refused}");
        assert_eq!(harness.compare(&first, 0), Ok(Sum128::of(&first.payload(0))), "{undo}");
        assert_eq!(harness.worker.health().busy_since, None, "{undo}");
        fakecuda::inject("");
    }
    let OpenMemory::Vmm { fd, .. } = memory.share() else { panic!() };
    // A size that is not the allocation's.
    let wrong = OpenMemory::Vmm { fd, allocation_bytes: 64 << 20, offset: 0 };
    assert!(harness.try_open(wrong, BYTES, layout()).is_err());
    let junk = OpenMemory::Ipc { handle: IpcHandle([7; 64]), offset: 0 };
    assert!(matches!(harness.try_open(junk, BYTES, layout()), Err(GpuError::Region(_))));
    let file = std::fs::File::open("/dev/null").unwrap();
    let junk = OpenMemory::Vmm { fd: file.into(), allocation_bytes: BYTES, offset: 0 };
    assert!(matches!(harness.try_open(junk, BYTES, layout()), Err(GpuError::Region(_))));
    let region = harness.try_open(memory.share(), BYTES, layout()).unwrap();
    harness.close(region);
    harness.close(first.id);
    assert!(harness.worker.stop(device_support::SOON));
    assert_eq!(fakecuda::violations(), 0);
}

#[test]
fn a_close_that_hangs_in_the_driver_stops_nobody_else() {
    in_a_process("hang", &[]);
}

fn a_close_that_hangs() {
    let (mut harness, stuck) = start(DeviceOptions::default());
    let other = harness.region(&layout(), 2);
    fakecuda::inject("cuMemUnmap=hang");
    harness.worker.try_send(DeviceJob::Close { region: stuck.id }).unwrap();
    eventually("a close under way", || harness.worker.health().closing == 1);
    for round in 0..20 {
        let sum = harness.gather(&other, round % 8, GatherTo::Pool(SlotId(0))).unwrap();
        harness.scatter(&other, 0, ScatterFrom::Pool(SlotId(0)), sum).unwrap();
    }
    let health = harness.worker.health();
    assert_eq!((health.closing, health.busy_since), (1, None));
    assert!(harness.answers.is_empty());
    fakecuda::inject("");
    assert!(matches!(harness.answer(), DeviceDone::Closed { .. }));
    assert_eq!(harness.worker.health().closing, 0);
}

#[test]
fn a_kernel_that_never_ends_is_a_loss() {
    in_a_process("stall", &[]);
}

fn a_kernel_that_never_ends() {
    let options =
        DeviceOptions { batch_timeout: Duration::from_millis(200), ..DeviceOptions::default() };
    let (mut harness, region) = start(options);
    fakecuda::inject("cuLaunchKernel@1=stall");
    let slot = harness.host_write(0, BLOCK);
    let job = harness.gather_job(&region, 0, GatherTo::Host(slot));
    harness.worker.try_send(job).unwrap();
    let began = Instant::now();
    assert!(matches!(harness.answer(), DeviceDone::Lost { .. }));
    assert!(began.elapsed() < Duration::from_secs(10));
    // The GPU may still write there: nobody gets the slot.
    assert!(harness.arena.write(harness.host_slot(0), 1).is_err());
    fakecuda::inject("");
    // Also when it has done so in the end.
    std::thread::sleep(Duration::from_millis(100));
    assert!(harness.answers.is_empty());
    assert!(harness.arena.write(harness.host_slot(0), 1).is_err());
}

#[test]
fn streams_may_be_as_late_as_they_like() {
    for seed in ["1", "2", "3"] {
        in_a_process("jitter", &[("FAKECUDA_JITTER_US", "2000"), ("FAKECUDA_SEED", seed)]);
    }
}

fn through_everything() {
    let (mut harness, from) = start(DeviceOptions::default());
    let mut to = harness.region(&layout(), 9);
    let mut sums = Vec::new();
    for place in 0..8 {
        let slot = harness.host_write(place, BLOCK);
        let job = harness.gather_job(&from, place, GatherTo::Host(slot));
        harness.worker.try_send(job).unwrap();
    }
    for _ in 0..8 {
        let DeviceDone::Gathered { op, result } = harness.answer() else { panic!() };
        let place = (op - 1) as u32;
        sums.push((place, result.unwrap()));
    }
    for (place, expected) in sums {
        assert_eq!(expected, Sum128::of(&from.payload(place)));
        let slot = harness.host_read(place, BLOCK);
        assert!(*slot == *from.payload(place), "the bytes were there when the answer came");
        let through = (place % 2 == 0).then_some(SlotId(place * 16));
        let job = DeviceJob::Scatter {
            op: 100 + u64::from(place),
            region: to.id,
            place: 7 - place,
            after_event: None,
            from: ScatterFrom::Host { slot, through },
            expected,
            bytes: BLOCK,
        };
        harness.worker.try_send(job).unwrap();
        to.expect(7 - place, &from.payload(place));
    }
    for _ in 0..8 {
        let done = harness.answer();
        assert!(matches!(done, DeviceDone::Scattered { result: Ok(()), .. }), "{done:?}");
    }
    to.assert_contents("with jitter");
    harness.close(from.id);
    harness.close(to.id);
    assert!(harness.worker.stop(device_support::SOON));
    assert_eq!(fakecuda::violations(), 0);
}

// Memory of another process.

/// An engine in a process of its own, which does what it is told by lines.
struct Engine {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

const NOISE: u64 = 42;

/// The engine's side.
fn engine() {
    choose_driver();
    let memory =
        EngineMemory::create(GpuChoice::Ordinal(0), BYTES, EngineMemoryKind::Ipc, 2).unwrap();
    memory.write_at(0, &noise(BYTES as usize, NOISE)).unwrap();
    let OpenMemory::Ipc { handle, .. } = memory.share().unwrap() else { panic!() };
    let events = memory.event_handles().unwrap();
    for handle in [handle].iter().chain(&events) {
        println!("handle {}", hex(&handle.0));
    }
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split_once(' ') {
            Some(("record", event)) => memory.record(event.parse().unwrap()).unwrap(),
            Some(("write", seed)) => {
                memory.write_at(0, &noise(BYTES as usize, seed.parse().unwrap())).unwrap();
            }
            _ => {
                let mut out = vec![0; BYTES as usize];
                memory.read_at(0, &mut out).unwrap();
                println!("sum {}", hex(&Sum128::of(&out).0));
                continue;
            }
        }
        println!("ok");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Engine {
    fn start() -> (Engine, Vec<IpcHandle>) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["a_case_of_its_own", "--exact", "--nocapture"])
            .env("KVTIDE_TEST_CASE", "engine")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut engine = Engine { child, input, output };
        let handles = (0..3).map(|_| {
            let text = engine.wait_for("handle ");
            let byte = |at: usize| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap();
            IpcHandle(std::array::from_fn(byte))
        });
        let handles = handles.collect();
        (engine, handles)
    }

    /// What follows `start` in the next line that has it.
    fn wait_for(&mut self, start: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the engine has ended");
            if let Some((_, rest)) = line.split_once(start) {
                return rest.trim().to_owned();
            }
        }
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
        self.wait_for("ok");
    }

    fn assert_contents(&mut self, contents: &[u8]) {
        writeln!(self.input, "sum").unwrap();
        assert_eq!(self.wait_for("sum "), hex(&Sum128::of(contents).0));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn open_engine(harness: &CudaHarness, number: u64, handles: &[IpcHandle]) -> RegionId {
    let region = RegionId(number);
    let open = OpenRegion {
        memory: OpenMemory::Ipc { handle: handles[0], offset: 0 },
        bytes: BYTES,
        layout: layout(),
        events: handles[1..].to_vec(),
    };
    let opened = harness.run(DeviceJob::Open { region, open: Box::new(open) });
    assert!(matches!(opened, DeviceDone::Opened { result: Ok(()), .. }), "{opened:?}");
    region
}

#[test]
fn memory_and_events_of_another_process() {
    let (harness, _own) = start(DeviceOptions::default());
    let (mut engine, handles) = Engine::start();
    let region = open_engine(&harness, 100, &handles);
    // The same allocation once more, from its middle on.
    let open = |offset, bytes, blocks| OpenRegion {
        memory: OpenMemory::Ipc { handle: handles[0], offset },
        bytes,
        layout: RegionLayout::opaque(blocks, u64::from(BLOCK)),
        events: Vec::new(),
    };
    let second = RegionId(101);
    let job = DeviceJob::Open { region: second, open: Box::new(open(BYTES / 2, BYTES / 2, 4)) };
    assert!(matches!(harness.run(job), DeviceDone::Opened { result: Ok(()), .. }));
    let beyond = DeviceJob::Open {
        region: RegionId(102),
        open: Box::new(open(BYTES - u64::from(BLOCK), 64 << 20, 1)),
    };
    let refused = harness.run(beyond);
    assert!(
        matches!(refused, DeviceDone::Opened { result: Err(GpuError::Region(_)), .. }),
        "{refused:?}"
    );
    let mut contents = noise(BYTES as usize, NOISE);
    let block = |contents: &[u8], place: usize| {
        contents[place * BLOCK as usize..(place + 1) * BLOCK as usize].to_vec()
    };
    engine.tell("record 1");
    let gather = |region, place, after_event, slot| {
        let to = GatherTo::Pool(SlotId(slot));
        let job = DeviceJob::Gather { op: 1, region, place, after_event, to, bytes: BLOCK };
        let DeviceDone::Gathered { result, .. } = harness.run(job) else { panic!() };
        result
    };
    let sum = gather(region, 2, Some(1), 0).unwrap();
    assert_eq!(sum, Sum128::of(&block(&contents, 2)));
    assert_eq!(gather(region, 2, Some(2), 0), Err(GpuError::Event));
    let other = gather(second, 1, None, 100).unwrap();
    assert_eq!(other, Sum128::of(&block(&contents, 5)));
    let job = DeviceJob::Scatter {
        op: 2,
        region,
        place: 7,
        after_event: Some(0),
        from: ScatterFrom::Pool(SlotId(0)),
        expected: sum,
        bytes: BLOCK,
    };
    let DeviceDone::Scattered { result, .. } = harness.run(job) else { panic!() };
    assert_eq!(result, Ok(()));
    let moved = block(&contents, 2);
    contents[7 * BLOCK as usize..].copy_from_slice(&moved);
    engine.assert_contents(&contents);
    harness.close(second);
    harness.close(region);
    drop(engine);
    harness.maker.check();
}

#[test]
fn an_engine_that_is_killed_takes_only_its_region() {
    let (mut harness, own) = start(DeviceOptions::default());
    for round in 0..10u64 {
        let (mut engine, handles) = Engine::start();
        let region = open_engine(&harness, 200 + round, &handles);
        let from = noise(BYTES as usize, NOISE);
        let sums: Vec<Sum128> = from.chunks(BLOCK as usize).map(Sum128::of).collect();
        for place in 0..100u32 {
            let job = DeviceJob::Compare {
                op: u64::from(place),
                region,
                place: place % 8,
                after_event: None,
                bytes: BLOCK,
            };
            harness.worker.try_send(job).unwrap();
            if u64::from(place) == round * 10 {
                engine.child.kill().unwrap();
            }
        }
        harness.worker.try_send(DeviceJob::Close { region }).unwrap();
        let mut closed = false;
        for _ in 0..101 {
            match harness.answer() {
                DeviceDone::Compared { op, result } => {
                    assert_eq!(result, Ok(sums[op as usize % 8]));
                }
                DeviceDone::Closed { .. } => closed = true,
                other => panic!("{other:?}"),
            }
        }
        assert!(closed);
        drop(engine);
        // A handle of a process that is gone is refused.
        let memory = OpenMemory::Ipc { handle: handles[0], offset: 0 };
        assert!(harness.try_open(memory, BYTES, layout()).is_err());
    }
    assert!(harness.compare(&own, 3).is_ok());
    assert_eq!(harness.worker.health().closing, 0);
    harness.close(own.id);
    assert!(harness.worker.stop(device_support::SOON));
}
