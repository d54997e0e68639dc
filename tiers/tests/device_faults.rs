//! A GPU that fails, hangs, panics or is lost: every job is answered once, but for those that may
//! still be under way on a GPU that was not seen to stop; other regions go on, the worker's health
//! says what is stuck, and no call of the worker's owner ever blocks.

#![forbid(unsafe_code)]
#![cfg(feature = "store")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod device_support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use device_support::memory::MemoryMaker;
use device_support::{EngineMemory as _, Harness, Maker as _, SOON, TestRegion, eventually};
use kvtide_tiers::block::{IpcHandle, RegionLayout, Sum128};
use kvtide_tiers::catalog::{RegionId, SlotId};
use kvtide_tiers::io::SharedMemory;
use kvtide_tiers::tier::device::{
    DeviceDone, DeviceJob, DeviceOptions, DeviceWorker, GatherTo, GpuError, OpenRegion, ScatterFrom,
};

type MemoryHarness = Harness<MemoryMaker>;

fn start() -> (MemoryHarness, TestRegion) {
    start_with(DeviceOptions::default())
}

fn start_with(options: DeviceOptions) -> (MemoryHarness, TestRegion) {
    let mut harness = Harness::with(MemoryMaker::new(), options);
    let region = harness.region(&RegionLayout::opaque(8, 50_000), 1);
    (harness, region)
}

fn send_gathers(harness: &mut MemoryHarness, region: &TestRegion, count: u32) {
    for round in 0..count {
        let job = harness.gather_job(region, round % 8, GatherTo::Pool(SlotId(round % 8 * 16)));
        harness.worker.try_send(job).unwrap();
    }
}

/// The results of so many gathers.
fn gathered(harness: &MemoryHarness, count: usize) -> Vec<Result<Sum128, GpuError>> {
    let mut results = Vec::new();
    while results.len() < count {
        match harness.answer() {
            DeviceDone::Gathered { result, .. } => results.push(result),
            DeviceDone::Lost { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    results
}

fn lost() -> GpuError {
    GpuError::Lost("a planned loss".to_owned())
}

#[test]
fn a_batch_that_fails_takes_no_other_with_it() {
    let (mut harness, region) = start();
    for error in [GpuError::OutOfMemory, GpuError::Checksum, GpuError::Failed("a".to_owned())] {
        harness.maker.control.fail_end(0, error.clone());
        let slot = harness.host_write(0, region.block_bytes());
        assert_eq!(harness.gather(&region, 0, GatherTo::Host(slot)), Err(error.clone()));
        harness.maker.control.fail_start(0, error.clone());
        // The slot of the batch before is free again.
        let slot = harness.host_write(0, region.block_bytes());
        assert_eq!(harness.gather(&region, 0, GatherTo::Host(slot)), Err(error));
        assert!(harness.gather(&region, 0, GatherTo::Pool(SlotId(0))).is_ok());
    }
    assert_eq!(harness.worker.health().lost, None);
    harness.maker.control.fail_open(GpuError::OutOfMemory);
    let memory = harness.maker.memory(8192);
    let refused = harness.try_open(memory.share(), 8192, RegionLayout::opaque(2, 4096));
    assert_eq!(refused, Err(GpuError::OutOfMemory));
    harness.close(region.id);
}

#[test]
fn a_lost_gpu_answers_everything_at_once() {
    let (mut harness, region) = start();
    harness.maker.control.set_delay(Duration::from_millis(30));
    harness.maker.control.fail_end(1, lost());
    send_gathers(&mut harness, &region, 1500);
    harness.worker.try_send(DeviceJob::Close { region: region.id }).unwrap();
    let (mut good, mut bad, mut losses, mut closed) = (0, 0, 0, 0);
    for _ in 0..1502 {
        match harness.answer() {
            DeviceDone::Gathered { result: Ok(_), .. } => good += 1,
            DeviceDone::Gathered { result: Err(error), .. } => {
                assert_eq!(error, lost());
                bad += 1;
            }
            DeviceDone::Lost { error } => {
                assert_eq!(error, lost());
                losses += 1;
            }
            DeviceDone::Closed { .. } => closed += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((good + bad, losses, closed), (1500, 1, 1));
    assert!(good > 0, "the batch before the loss was good");
    assert!(harness.worker.health().lost.unwrap().contains("a planned loss"));
    // Later jobs fail without touching the GPU.
    let batches = harness.maker.control.batches();
    assert_eq!(harness.gather(&region, 0, GatherTo::Pool(SlotId(0))), Err(lost()));
    let memory = harness.maker.memory(8192);
    let refused = harness.try_open(memory.share(), 8192, RegionLayout::opaque(2, 4096));
    assert_eq!(refused, Err(lost()));
    harness.close(RegionId(77));
    assert_eq!(harness.maker.control.batches(), batches);
    assert_eq!(harness.worker.jobs(), 0);
    assert!(harness.answers.is_empty());
}

#[test]
fn a_loss_gives_back_the_slots_and_the_memory_of_engines() {
    let (mut harness, region) = start();
    let _idle = harness.region(&RegionLayout::opaque(8, 50_000), 2);
    harness.maker.control.set_closes_hang(true);
    harness.maker.control.set_delay(Duration::from_secs(2));
    harness.maker.control.fail_end(0, lost());
    for index in 0..4 {
        let slot = harness.host_write(index, 50_000);
        let job = harness.gather_job(&region, index, GatherTo::Host(slot));
        harness.worker.try_send(job).unwrap();
        // So that there are several batches, and the loss finds some under way.
        eventually("a batch", || harness.worker.health().batches == index as usize + 1);
    }
    let mut answered = 0;
    while answered < 4 {
        match harness.answer() {
            DeviceDone::Lost { .. } => {}
            DeviceDone::Gathered { op, result } => {
                assert_eq!(result, Err(lost()));
                // Free when the answer comes, and not some time after.
                drop(harness.host_write(op as u32 - 1, 50_000));
                answered += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    // The driver may hang in closing; nobody waits for it.
    harness.close(region.id);
    assert_eq!(harness.maker.control.mapped(), 2);
    eventually("closes under way", || harness.worker.health().closing == 2);
    harness.maker.control.set_closes_hang(false);
    eventually("the memory of the engines is free", || harness.maker.control.mapped() == 0);
    assert!(harness.worker.stop(SOON));
}

/// Has the owner thread stuck in starting a batch: a gather of place 0 to host slot 0.
fn stick(harness: &mut MemoryHarness, region: &TestRegion) {
    harness.maker.control.set_stalled(true);
    let slot = harness.host_write(0, region.block_bytes());
    let job = harness.gather_job(region, 0, GatherTo::Host(slot));
    harness.worker.try_send(job).unwrap();
    eventually("a stuck call", || harness.worker.health().busy_since.is_some());
}

/// Nothing comes any more, and nothing waits.
fn silent(harness: &MemoryHarness) {
    eventually("nothing waits", || harness.worker.jobs() == 0);
    std::thread::sleep(Duration::from_millis(50));
    let answers: Vec<DeviceDone> = harness.answers.try_iter().collect();
    assert!(answers.is_empty(), "{answers:?}");
}

#[test]
fn a_panic_of_the_driver_is_a_loss() {
    let (mut harness, region) = start();
    stick(&mut harness, &region);
    harness.maker.control.panic_at_start();
    send_gathers(&mut harness, &region, 200);
    harness.maker.control.set_stalled(false);
    for result in gathered(&harness, 200) {
        assert!(matches!(result, Err(GpuError::Lost(_))), "{result:?}");
    }
    assert!(harness.worker.health().lost.unwrap().contains("a planned panic"));
    let late = harness.gather(&region, 0, GatherTo::Pool(SlotId(0)));
    assert!(matches!(late, Err(GpuError::Lost(_))));
    // Nobody knows how far the batch got.
    silent(&harness);
}

#[test]
fn a_batch_that_never_ends_is_a_loss_and_its_slot_stays_taken() {
    let options =
        DeviceOptions { batch_timeout: Duration::from_millis(50), ..DeviceOptions::default() };
    let (mut harness, region) = start_with(options);
    harness.maker.control.set_delay(Duration::from_secs(3600));
    let slot = harness.host_write(0, region.block_bytes());
    let job = harness.gather_job(&region, 0, GatherTo::Host(slot));
    harness.worker.try_send(job).unwrap();
    eventually("a batch under way", || harness.worker.health().batch_since.is_some());
    assert!(matches!(harness.answer(), DeviceDone::Lost { .. }));
    // The GPU could still write to it.
    assert!(harness.arena.read(harness.host_slot(0), 1).is_err());
    silent(&harness);
}

/// A scatter that is answered as failed while its kernel still waits would overwrite what the
/// client puts into the place next.
#[test]
fn what_may_still_run_is_never_answered() {
    let options =
        DeviceOptions { batch_timeout: Duration::from_millis(100), ..DeviceOptions::default() };
    let (mut harness, target) = start_with(options);
    let layout = RegionLayout::opaque(8, 50_000);
    let (source, idle) = (harness.region(&layout, 2), harness.region(&layout, 3));
    let sum = harness.gather(&source, 0, GatherTo::Pool(SlotId(0))).unwrap();
    harness.maker.control.set_delay(Duration::from_secs(3600));
    let scatter = DeviceJob::Scatter {
        op: 1000,
        region: target.id,
        place: 3,
        after_event: None,
        from: ScatterFrom::Pool(SlotId(0)),
        expected: sum,
        bytes: 50_000,
    };
    harness.worker.try_send(scatter).unwrap();
    let slot = harness.host_write(5, 50_000);
    let demote = DeviceJob::Demote { op: 1001, slot: SlotId(0), to: slot, bytes: 50_000 };
    harness.worker.try_send(demote).unwrap();
    eventually("two batches", || harness.worker.health().batches == 2);
    harness.worker.try_send(DeviceJob::Close { region: target.id }).unwrap();
    assert!(matches!(harness.answer(), DeviceDone::Lost { .. }));
    silent(&harness);
    // Not in front of the loss, not behind it, and not by asking again.
    harness.worker.try_send(DeviceJob::Close { region: target.id }).unwrap();
    silent(&harness);
    assert!(harness.arena.write(harness.host_slot(5), 1).is_err());
    // No batch of these is under way.
    harness.close(idle.id);
    harness.close(source.id);
    let late = harness.compare(&target, 0);
    assert!(matches!(late, Err(GpuError::Lost(_))), "{late:?}");
    assert!(harness.worker.stop(SOON));
    assert!(harness.answers.try_iter().next().is_none());
}

/// The owner thread is stuck with jobs in its queues, and stays so.
#[test]
fn what_was_not_begun_gives_its_slot_back_while_the_driver_is_stuck() {
    let options =
        DeviceOptions { call_timeout: Duration::from_millis(100), ..DeviceOptions::default() };
    let (mut harness, region) = start_with(options);
    let (waits, _memory) = with_events(&mut harness, 100);
    harness.maker.control.set_never_ready(true);
    let slot = harness.host_write(7, 50_000);
    let to = GatherTo::Host(slot);
    let after_event = Some(0);
    let job =
        DeviceJob::Gather { op: 900, region: waits, place: 0, after_event, to, bytes: 50_000 };
    harness.worker.try_send(job).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    stick(&mut harness, &region);
    assert!(matches!(harness.answer(), DeviceDone::Lost { .. }));
    let DeviceDone::Gathered { op: 900, result: Err(GpuError::Lost(_)) } = harness.answer() else {
        panic!("the job that waits for its event is answered");
    };
    // At once, and with the thread still stuck.
    drop(harness.host_write(7, 50_000));
    assert!(harness.worker.health().busy_since.is_some());
    assert!(harness.arena.write(harness.host_slot(0), 1).is_err());
    harness.close(waits);
    harness.maker.control.set_stalled(false);
    eventually("the end of the call", || harness.worker.health().busy_since.is_none());
    silent(&harness);
}

#[test]
fn a_stuck_driver_blocks_no_call_of_the_owner() {
    let options = DeviceOptions { jobs_max: 50, ..DeviceOptions::default() };
    let (mut harness, region) = start_with(options);
    assert_eq!(harness.worker.health().busy_since, None);
    harness.maker.control.set_stalled(true);
    send_gathers(&mut harness, &region, 1);
    eventually("a stuck call", || harness.worker.health().busy_since.is_some());
    let stuck = harness.worker.health().busy_since.unwrap();
    let began = Instant::now();
    send_gathers(&mut harness, &region, 49);
    let job = harness.gather_job(&region, 0, GatherTo::Pool(SlotId(0)));
    let DeviceJob::Gather { op, .. } = &job else { unreachable!() };
    let op = *op;
    let Err(DeviceJob::Gather { op: back, .. }) = harness.worker.try_send(job) else {
        panic!("a full queue takes no job");
    };
    assert_eq!(back, op);
    assert_eq!(harness.worker.jobs(), 50);
    assert!(harness.answers.is_empty());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(harness.worker.health().busy_since, Some(stuck), "still in the same call");
    assert!(began.elapsed() < Duration::from_secs(5));
    harness.maker.control.set_stalled(false);
    assert!(gathered(&harness, 50).iter().all(Result::is_ok));
    eventually("an idle worker", || harness.worker.health().busy_since.is_none());
    assert_eq!(harness.worker.jobs(), 0);
}

#[test]
fn a_driver_that_is_stuck_for_too_long_is_given_up() {
    let options = DeviceOptions {
        call_timeout: Duration::from_millis(100),
        jobs_max: 100,
        ..DeviceOptions::default()
    };
    let (mut harness, region) = start_with(options);
    let other = harness.region(&RegionLayout::opaque(8, 50_000), 2);
    stick(&mut harness, &region);
    let slot = harness.host_write(1, region.block_bytes());
    let job = harness.gather_job(&region, 1, GatherTo::Host(slot));
    harness.worker.try_send(job).unwrap();
    send_gathers(&mut harness, &region, 50);
    for region in [region.id, other.id] {
        harness.worker.try_send(DeviceJob::Close { region }).unwrap();
    }
    let done = harness.answer();
    assert!(matches!(done, DeviceDone::Lost { error: GpuError::Lost(_) }), "{done:?}");
    let (mut failed, mut closed) = (BTreeSet::new(), 0);
    for _ in 0..52 {
        match harness.answer() {
            DeviceDone::Gathered { op, result: Err(GpuError::Lost(_)) } => {
                assert!(failed.insert(op), "answered twice");
            }
            DeviceDone::Closed { region } if region == other.id => closed += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((failed.len(), closed), (51, 1));
    assert!(harness.worker.health().busy_since.is_some(), "it is still stuck");
    assert!(harness.worker.health().lost.unwrap().contains("took over 100 ms"));
    // What was not begun has given its slot back; the GPU may still write to the other one.
    drop(harness.host_write(1, 1));
    assert!(harness.arena.write(harness.host_slot(0), 1).is_err());
    // Whoever comes now is answered as well, more often than the queue is long.
    for _ in 0..3 {
        send_gathers(&mut harness, &region, 90);
        for result in gathered(&harness, 90) {
            assert!(matches!(result, Err(GpuError::Lost(_))));
        }
    }
    // The driver lets go of the thread, which finds itself deposed.
    harness.maker.control.set_stalled(false);
    eventually("the end of the call", || harness.worker.health().busy_since.is_none());
    let late = harness.compare(&region, 0);
    assert!(matches!(late, Err(GpuError::Lost(_))));
    assert!(harness.arena.write(harness.host_slot(0), 1).is_err(), "still not known to be free");
    silent(&harness);
    assert!(harness.worker.stop(SOON));
}

#[test]
fn a_stop_leaves_a_stuck_driver_behind_and_answers_what_was_not_begun() {
    let (mut harness, region) = start();
    stick(&mut harness, &region);
    send_gathers(&mut harness, &region, 5);
    harness.worker.try_send(DeviceJob::Close { region: region.id }).unwrap();
    let began = Instant::now();
    let Harness { worker, answers, maker, .. } = harness;
    assert!(!worker.stop(Duration::from_millis(100)));
    assert!(began.elapsed() < Duration::from_secs(5));
    // The watch answers on its own thread.
    let told: Vec<DeviceDone> = (0..6).map(|_| answers.recv_timeout(SOON).unwrap()).collect();
    let failed = |done: &&DeviceDone| {
        matches!(done, DeviceDone::Gathered { result: Err(GpuError::Lost(_)), .. })
    };
    assert_eq!(told.iter().filter(failed).count(), 5, "{told:?}");
    assert!(matches!(told.first(), Some(DeviceDone::Lost { .. })), "one loss: {told:?}");
    maker.control.set_stalled(false);
    // The thread ends, and with it the last who could answer.
    assert!(answers.iter().next().is_none());
}

#[test]
fn a_close_that_hangs_stops_nobody_else() {
    let options = DeviceOptions { regions_max: 3, ..DeviceOptions::default() };
    let (mut harness, other) = start_with(options);
    let layout = RegionLayout::opaque(8, 50_000);
    let stuck = harness.region(&layout, 2);
    harness.maker.control.set_closes_hang(true);
    harness.worker.try_send(DeviceJob::Close { region: stuck.id }).unwrap();
    eventually("a close under way", || harness.worker.health().closing == 1);
    let since = harness.worker.health().closing_since.unwrap();
    // The region is gone for its client, and the other one works as before.
    assert_eq!(harness.compare(&stuck, 0), Err(GpuError::Closed));
    let sum = harness.gather(&other, 0, GatherTo::Pool(SlotId(0))).unwrap();
    harness.scatter(&other, 1, ScatterFrom::Pool(SlotId(0)), sum).unwrap();
    assert_eq!(harness.worker.jobs(), 0, "a hanging close takes no job's place");
    // Regions that hang count, so that they cannot pile up.
    let third = harness.region(&layout, 3);
    let memory = harness.maker.memory(400_000);
    let refused = harness.try_open(memory.share(), 400_000, layout.clone());
    assert_eq!(refused, Err(GpuError::TooManyRegions(3)));
    harness.worker.try_send(DeviceJob::Close { region: third.id }).unwrap();
    eventually("two closes under way", || harness.worker.health().closing == 2);
    assert_eq!(harness.worker.health().closing_since, Some(since));
    assert_eq!(harness.worker.health().busy_since, None);
    assert!(harness.answers.is_empty(), "what hangs is not closed");
    assert_eq!(harness.maker.control.mapped(), 3);
    harness.maker.control.set_closes_hang(false);
    for region in [stuck.id, third.id] {
        assert!(
            matches!(harness.answer(), DeviceDone::Closed { region: other } if other == region)
        );
    }
    assert_eq!(harness.maker.control.mapped(), 1);
    assert_eq!(harness.worker.health().closing_since, None);
}

#[test]
fn a_stop_leaves_a_hanging_close_behind() {
    let (harness, region) = start();
    harness.maker.control.set_closes_hang(true);
    harness.worker.try_send(DeviceJob::Close { region: region.id }).unwrap();
    let began = Instant::now();
    let Harness { worker, answers, maker, .. } = harness;
    assert!(!worker.stop(Duration::from_millis(100)));
    assert!(began.elapsed() < Duration::from_secs(5));
    let answers: Vec<DeviceDone> = answers.try_iter().collect();
    assert!(matches!(*answers, [DeviceDone::Closed { .. }]), "{answers:?}");
    maker.control.set_closes_hang(false);
}

/// A region whose engine records events.
fn with_events(harness: &mut MemoryHarness, number: u64) -> (RegionId, SharedMemory) {
    let memory = SharedMemory::create("kvtide-test", 400_000).unwrap();
    let open = OpenRegion {
        memory: memory.share(),
        bytes: 400_000,
        layout: RegionLayout::opaque(8, 50_000),
        events: vec![IpcHandle([1; 64]); 2],
    };
    let region = RegionId(number);
    let opened = harness.run(DeviceJob::Open { region, open: Box::new(open) });
    assert!(matches!(opened, DeviceDone::Opened { result: Ok(()), .. }));
    (region, memory)
}

fn compare_after(op: u64, region: RegionId, after_event: Option<u32>) -> DeviceJob {
    DeviceJob::Compare { op, region, place: 0, after_event, bytes: 50_000 }
}

#[test]
fn a_job_waits_for_the_engines_event_and_others_do_not() {
    let (mut harness, other) = start();
    let (region, memory) = with_events(&mut harness, 100);
    harness.maker.control.set_never_ready(true);
    harness.worker.try_send(compare_after(1, region, Some(1))).unwrap();
    // Behind it in the same region: order is kept.
    harness.worker.try_send(compare_after(2, region, None)).unwrap();
    assert!(harness.compare(&other, 0).is_ok(), "another region goes on");
    std::thread::sleep(Duration::from_millis(30));
    assert!(harness.answers.is_empty());
    let late = device_support::noise(50_000, 77);
    memory.write_at(0, &late).unwrap();
    harness.maker.control.set_never_ready(false);
    for want in [1, 2] {
        let DeviceDone::Compared { op, result } = harness.answer() else { panic!() };
        assert_eq!((op, result), (want, Ok(Sum128::of(&late))));
    }
    harness.close(region);
}

#[test]
fn an_event_that_never_comes_fails_its_job_only() {
    let options =
        DeviceOptions { event_timeout: Duration::from_millis(50), ..DeviceOptions::default() };
    let (mut harness, _other) = start_with(options);
    let (region, _memory) = with_events(&mut harness, 100);
    harness.maker.control.set_never_ready(true);
    harness.worker.try_send(compare_after(1, region, Some(0))).unwrap();
    harness.worker.try_send(compare_after(2, region, None)).unwrap();
    let DeviceDone::Compared { op: 1, result } = harness.answer() else { panic!() };
    assert_eq!(result, Err(GpuError::Event));
    let DeviceDone::Compared { op: 2, result } = harness.answer() else { panic!() };
    assert!(result.is_ok());
    harness.close(region);
}

#[test]
fn a_client_that_goes_away_is_not_waited_for() {
    let (mut harness, _other) = start();
    let (region, _memory) = with_events(&mut harness, 100);
    harness.maker.control.set_never_ready(true);
    let began = Instant::now();
    harness.worker.try_send(compare_after(3, region, Some(0))).unwrap();
    harness.worker.try_send(DeviceJob::Close { region }).unwrap();
    let DeviceDone::Compared { op: 3, result } = harness.answer() else { panic!() };
    assert_eq!(result, Err(GpuError::Event));
    assert!(matches!(harness.answer(), DeviceDone::Closed { .. }));
    assert!(began.elapsed() < DeviceOptions::default().event_timeout / 2);
}

#[test]
fn jobs_of_one_region_share_batches_and_regions_take_turns() {
    let (mut harness, busy) = start();
    let other = harness.region(&RegionLayout::opaque(8, 50_000), 5);
    harness.maker.control.set_stalled(true);
    send_gathers(&mut harness, &busy, 400);
    let job = harness.gather_job(&other, 0, GatherTo::Pool(SlotId(200)));
    let DeviceJob::Gather { op: late, .. } = &job else { unreachable!() };
    let late = *late;
    harness.worker.try_send(job).unwrap();
    harness.maker.control.set_stalled(false);
    let mut before = 0;
    let mut seen = false;
    for _ in 0..401 {
        let DeviceDone::Gathered { op, result } = harness.answer() else { panic!() };
        assert!(result.is_ok());
        seen |= op == late;
        before += usize::from(!seen);
    }
    assert!(seen && before <= 4 * 64, "the late region waited behind {before} jobs");
    // Blocks of 50,000 bytes, and 2 MiB of staging: at most 41 a batch.
    let batches = harness.maker.control.batches();
    assert!((11..=40).contains(&batches), "{batches} batches for 401 jobs");
}

#[test]
fn a_gpu_that_does_not_open_is_an_error_and_not_a_wait() {
    let refused = DeviceWorker::start(
        || Err(GpuError::OutOfMemory),
        DeviceOptions::default(),
        |_| panic!("there is no job"),
    );
    assert_eq!(refused.unwrap_err(), GpuError::OutOfMemory);
    let options =
        DeviceOptions { open_timeout: Duration::from_millis(50), ..DeviceOptions::default() };
    let began = Instant::now();
    let open = || {
        std::thread::sleep(Duration::from_secs(30));
        Err(GpuError::Closed)
    };
    let refused = DeviceWorker::start(open, options, |_| panic!("there is no job")).unwrap_err();
    assert!(matches!(&refused, GpuError::Failed(why) if why.contains("within")), "{refused}");
    assert!(began.elapsed() < SOON / 2);
}
