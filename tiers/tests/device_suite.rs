//! What every GPU must do: blocks go out of a region and into another by every way, byte for byte,
//! and nothing goes into a region that was not verified. One suite for all kinds of GPU.

#![forbid(unsafe_code)]
#![cfg(feature = "store")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod device_support;

use std::collections::BTreeMap;
use std::sync::Arc;

use device_support::memory::MemoryMaker;
use device_support::{Harness, Maker, SLOT_BYTES, eventually, layouts, noise};
use kvtide_tiers::block::{Plane, RegionLayout, Sum128};
use kvtide_tiers::catalog::{RegionId, SlotId};
use kvtide_tiers::tier::device::{DeviceDone, DeviceJob, GatherTo, GpuError, ScatterFrom};

/// A slot of the pool that starts at this MiB.
fn pool(mib: u32) -> SlotId {
    SlotId(mib << 8)
}

fn through_the_pool<M: Maker>(mut harness: Harness<M>) {
    for (seed, (name, layout)) in layouts().into_iter().enumerate() {
        let from = harness.region(&layout, seed as u64 + 1);
        let mut to = harness.region(&layout, seed as u64 + 100);
        for place in 0..layout.blocks {
            let payload = from.payload(place);
            let sum = harness.gather(&from, place, GatherTo::Pool(pool(place))).unwrap();
            assert_eq!(sum, Sum128::of(&payload), "{name}");
            let other = layout.blocks - 1 - place;
            harness.scatter(&to, other, ScatterFrom::Pool(pool(place)), sum).unwrap();
            to.expect(other, &payload);
        }
        to.assert_contents(name);
        from.assert_contents(name);
        assert_eq!(harness.compare(&to, 0).unwrap(), Sum128::of(&to.payload(0)), "{name}");
        harness.close(from.id);
        harness.close(to.id);
    }
}

fn through_host_slots<M: Maker>(mut harness: Harness<M>) {
    for (seed, (name, layout)) in layouts().into_iter().enumerate() {
        let from = harness.region(&layout, seed as u64 + 11);
        let mut to = harness.region(&layout, seed as u64 + 211);
        let bytes = from.block_bytes();
        for (place, index) in [(0, 3), (layout.blocks - 1, 4)] {
            let payload = from.payload(place);
            let slot = harness.host_write(index, bytes);
            let sum = harness.gather(&from, place, GatherTo::Host(slot)).unwrap();
            assert_eq!(sum, Sum128::of(&payload), "{name}");
            // The guard is gone by now.
            let slot = harness.host_read(index, bytes);
            assert!(*slot == *payload, "{name}: bytes of the host slot");
            let through = (place == 0).then_some(pool(2));
            harness.scatter(&to, place, ScatterFrom::Host { slot, through }, sum).unwrap();
            to.expect(place, &payload);
            // The promoted copy is the block itself.
            if place == 0 {
                harness.scatter(&to, 1, ScatterFrom::Pool(pool(2)), sum).unwrap();
                to.expect(1, &payload);
                let slot = harness.host_write(9, bytes);
                harness.demote(pool(2), slot, bytes).unwrap();
                assert!(*harness.host_read(9, bytes) == *payload, "{name}: the demoted copy");
            }
        }
        to.assert_contents(name);
        harness.close(from.id);
        harness.close(to.id);
    }
}

/// The page behind a payload goes to the drive with it, so nothing may be written there.
fn padding_stays_zero<M: Maker>(mut harness: Harness<M>) {
    let region = harness.region(&RegionLayout::opaque(3, 5000), 3);
    let mut slot = harness.host_write(0, SLOT_BYTES);
    slot.fill(0xff);
    drop(slot);
    let slot = harness.host_write(0, 5000);
    harness.gather(&region, 1, GatherTo::Host(slot)).unwrap();
    let slot = harness.host_read(0, SLOT_BYTES);
    assert!(slot[..5000] == region.payload(1));
    assert!(slot[5000..8192].iter().all(|byte| *byte == 0));
    assert!(slot[8192..].iter().all(|byte| *byte == 0xff));
}

fn what_is_not_verified_stays_out<M: Maker>(mut harness: Harness<M>) {
    for (seed, (name, layout)) in layouts().into_iter().enumerate() {
        let from = harness.region(&layout, seed as u64 + 21);
        let to = harness.region(&layout, seed as u64 + 321);
        let bytes = from.block_bytes();
        let sum = harness.gather(&from, 0, GatherTo::Pool(pool(0))).unwrap();
        let slot = harness.host_write(5, bytes);
        harness.gather(&from, 0, GatherTo::Host(slot)).unwrap();
        // Another block's checksum.
        let wrong = Sum128::of(b"another block");
        let verdict = harness.scatter(&to, 1, ScatterFrom::Pool(pool(0)), wrong);
        assert_eq!(verdict, Err(GpuError::Checksum), "{name}");
        // A bit of the host slot, at its ends and within.
        for byte in [0, bytes / 2, bytes - 1] {
            harness.arena.flip_bit(harness.host_slot(5), byte, 3).unwrap();
            for through in [None, Some(pool(3))] {
                let from = ScatterFrom::Host { slot: harness.host_read(5, bytes), through };
                let verdict = harness.scatter(&to, 1, from, sum);
                assert_eq!(verdict, Err(GpuError::Checksum), "{name}, byte {byte}");
            }
            harness.arena.flip_bit(harness.host_slot(5), byte, 3).unwrap();
        }
        // What was promoted from a bad slot is bad as well.
        let verdict = harness.scatter(&to, 1, ScatterFrom::Pool(pool(3)), sum);
        assert_eq!(verdict, Err(GpuError::Checksum), "{name}");
        to.assert_contents(name);
        let verdict = harness.scatter(&to, 1, ScatterFrom::Pool(pool(0)), sum);
        assert_eq!(verdict, Ok(()), "{name}: the good copy");
        harness.close(from.id);
        harness.close(to.id);
    }
}

/// A byte of the pool changes under a block: here because another block is put over its end.
fn a_changed_pool_is_noticed<M: Maker>(mut harness: Harness<M>) {
    let layout = RegionLayout::opaque(4, 12_288);
    let from = harness.region(&layout, 5);
    let to = harness.region(&layout, 6);
    let sum = harness.gather(&from, 0, GatherTo::Pool(SlotId(16))).unwrap();
    harness.gather(&from, 1, GatherTo::Pool(SlotId(18))).unwrap();
    let verdict = harness.scatter(&to, 3, ScatterFrom::Pool(SlotId(16)), sum);
    assert_eq!(verdict, Err(GpuError::Checksum));
    to.assert_contents("a block of which a page was overwritten");
}

/// One bad block in a batch of many is skipped, and only it.
fn a_batch_is_judged_block_by_block<M: Maker>(mut harness: Harness<M>) {
    let layout = RegionLayout::opaque(40, 3000);
    let from = harness.region(&layout, 7);
    let mut to = harness.region(&layout, 8);
    let mut sums = Vec::new();
    for place in 0..40 {
        sums.push(harness.gather(&from, place, GatherTo::Pool(SlotId(place))).unwrap());
    }
    for place in 0..40 {
        let op = harness.op();
        let bad = place % 7 == 3;
        let expected = if bad { sums[(place as usize + 1) % 40] } else { sums[place as usize] };
        let from = ScatterFrom::Pool(SlotId(place));
        let region = to.id;
        let after_event = None;
        let bytes = 3000;
        let job = DeviceJob::Scatter { op, region, place, after_event, from, expected, bytes };
        harness.worker.try_send(job).unwrap();
    }
    let mut bad = 0;
    for _ in 0..40 {
        match harness.answer() {
            DeviceDone::Scattered { result: Ok(()), .. } => {}
            DeviceDone::Scattered { result: Err(GpuError::Checksum), .. } => bad += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(bad, 6);
    for place in (0..40).filter(|place| place % 7 != 3) {
        to.expect(place, &from.payload(place));
    }
    to.assert_contents("a batch with bad blocks");
}

fn every_job_is_answered_once<M: Maker>(mut harness: Harness<M>) {
    let (one, two) = (RegionLayout::opaque(50, 5000), RegionLayout::opaque(30, 100_000));
    let regions = [harness.region(&one, 31), harness.region(&two, 32)];
    let mut open = BTreeMap::new();
    for round in 0..600u32 {
        let which = (round / 3) as usize % 2;
        let region = &regions[which];
        let place = round * 7 % region.layout.blocks;
        // No two jobs under way have the same slot.
        let job = if which == 0 {
            harness.gather_job(region, place, GatherTo::Pool(SlotId(round * 2)))
        } else {
            let (op, bytes) = (harness.op(), region.block_bytes());
            DeviceJob::Compare { op, region: region.id, place, after_event: None, bytes }
        };
        let (DeviceJob::Gather { op, .. } | DeviceJob::Compare { op, .. }) = &job else {
            unreachable!()
        };
        open.insert(*op, (which, Sum128::of(&region.payload(place))));
        harness.worker.try_send(job).unwrap();
    }
    for _ in 0..600 {
        let (which, op, result) = match harness.answer() {
            DeviceDone::Gathered { op, result } => (0, op, result),
            DeviceDone::Compared { op, result } => (1, op, result),
            other => panic!("{other:?}"),
        };
        let want = open.remove(&op);
        assert_eq!(want, Some((which, result.unwrap())), "the answer to op {op}");
    }
    assert_eq!(harness.worker.jobs(), 0);
    assert!(harness.answers.is_empty());
}

fn what_does_not_fit_is_refused<M: Maker>(mut harness: Harness<M>) {
    let layout = RegionLayout::opaque(4, 4096);
    let region = harness.region(&layout, 9);
    let bytes = 4096;
    let place = |result| assert_eq!(result, Err(GpuError::Place));
    place(harness.gather(&region, 4, GatherTo::Pool(pool(0))));
    place(harness.gather(&region, u32::MAX, GatherTo::Pool(pool(0))));
    // The pool has 16 MiB.
    place(harness.gather(&region, 0, GatherTo::Pool(pool(16))));
    place(harness.gather(&region, 0, GatherTo::Pool(SlotId(u32::MAX))));
    place(harness.compare(&region, 4));
    let slot = harness.host_write(0, bytes);
    let demoted = harness.demote(pool(16), slot, bytes);
    assert_eq!(demoted, Err(GpuError::Place));
    let slot = harness.host_write(0, bytes - 1);
    let short = harness.gather(&region, 0, GatherTo::Host(slot));
    assert!(matches!(short, Err(GpuError::Length { .. })));
    let slot = harness.host_write(0, bytes + 1);
    assert!(matches!(harness.demote(pool(0), slot, bytes), Err(GpuError::Length { .. })));
    let (op, region) = (harness.op(), region.id);
    let job = DeviceJob::Compare { op, region, place: 0, after_event: None, bytes: 4095 };
    let DeviceDone::Compared { result, .. } = harness.run(job) else { panic!() };
    assert!(matches!(result, Err(GpuError::Length { .. })));
    // The region has no events.
    let job = DeviceJob::Compare { op, region, place: 0, after_event: Some(0), bytes };
    let DeviceDone::Compared { result, .. } = harness.run(job) else { panic!() };
    assert_eq!(result, Err(GpuError::Event));
    let job = DeviceJob::Compare { op, region: RegionId(99), place: 0, after_event: None, bytes };
    let DeviceDone::Compared { result, .. } = harness.run(job) else { panic!() };
    assert_eq!(result, Err(GpuError::Closed));
}

fn regions_that_cannot_work_are_refused<M: Maker>(mut harness: Harness<M>) {
    let memory = harness.maker.memory(8 << 20);
    let overlap = Plane { offset: 0, block_stride: 10, rows: 1, row_stride: 1, row_bytes: 4096 };
    for (why, bytes, layout) in [
        ("blocks of 240 bytes", 4800, RegionLayout::opaque(20, 240)),
        ("a block larger than staging", 3 << 20, RegionLayout::opaque(1, (2 << 20) + 1)),
        ("a layout that ends behind the region", 8191, RegionLayout::opaque(2, 4096)),
        ("overlaps", 1 << 20, RegionLayout { blocks: 2, planes: vec![overlap] }),
        ("more than the allocation", (8 << 20) + 4096, RegionLayout::opaque(2, 4096)),
    ] {
        let refused = harness.try_open(memory.share(), bytes, layout);
        assert!(matches!(refused, Err(GpuError::Region(_))), "{why}: {refused:?}");
    }
    assert_eq!(harness.maker.mapped().unwrap_or(0), 0);
    // And the same memory works with a layout that fits.
    let region = harness.try_open(memory.share(), 8 << 20, RegionLayout::opaque(2, 4096)).unwrap();
    harness.close(region);
}

fn a_region_closes_behind_its_jobs<M: Maker>(mut harness: Harness<M>) {
    let layout = RegionLayout::opaque(8, 200_000);
    let region = harness.region(&layout, 12);
    for round in 0..200 {
        let job = harness.gather_job(&region, round % 8, GatherTo::Pool(pool(round % 8)));
        harness.worker.try_send(job).unwrap();
    }
    harness.worker.try_send(DeviceJob::Close { region: region.id }).unwrap();
    let late = harness.gather_job(&region, 0, GatherTo::Pool(pool(9)));
    let DeviceJob::Gather { op: late_op, .. } = late else { unreachable!() };
    harness.worker.try_send(late).unwrap();
    let (mut done, mut closed) = (0, false);
    for _ in 0..202 {
        match harness.answer() {
            DeviceDone::Gathered { op, result: Err(GpuError::Closed) } => assert_eq!(op, late_op),
            DeviceDone::Gathered { result: Ok(_), .. } => {
                assert!(!closed, "a job ended after its region was closed");
                done += 1;
            }
            DeviceDone::Closed { region: other } => {
                assert_eq!(other, region.id);
                closed = true;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((done, closed), (200, true));
    eventually("a closed mapping", || harness.maker.mapped().unwrap_or(0) == 0);
    // What is not open is closed.
    harness.close(region.id);
    harness.close(RegionId(4711));
    assert!(harness.worker.stop(device_support::SOON));
}

fn a_stop_ends_what_is_under_way<M: Maker>(mut harness: Harness<M>) {
    let layout = RegionLayout::opaque(8, 100_000);
    let region = harness.region(&layout, 13);
    for round in 0..300 {
        let job = harness.gather_job(&region, round % 8, GatherTo::Pool(pool(round % 8)));
        harness.worker.try_send(job).unwrap();
    }
    let Harness { worker, answers, maker, arena, .. } = harness;
    assert!(worker.stop(device_support::SOON));
    let answers: Vec<DeviceDone> = answers.iter().collect();
    assert_eq!(answers.len(), 300);
    for answer in answers {
        let DeviceDone::Gathered { result, .. } = answer else { panic!("{answer:?}") };
        assert!(matches!(result, Ok(_) | Err(GpuError::Ended)));
    }
    assert_eq!(maker.mapped().unwrap_or(0), 0);
    // Nothing holds the arena any more.
    drop(Arc::into_inner(arena).expect("the worker's share of the arena is gone"));
}

macro_rules! suite {
    ($kind:ident, $make:expr, $($test:ident),* $(,)?) => {
        mod $kind {
            use super::*;

            $(
                #[test]
                fn $test() {
                    super::$test(Harness::new($make));
                    $make.check();
                }
            )*
        }
    };
}

macro_rules! every_gpu {
    ($kind:ident, $make:expr) => {
        suite!(
            $kind,
            $make,
            through_the_pool,
            through_host_slots,
            padding_stays_zero,
            what_is_not_verified_stays_out,
            a_changed_pool_is_noticed,
            a_batch_is_judged_block_by_block,
            every_job_is_answered_once,
            what_does_not_fit_is_refused,
            regions_that_cannot_work_are_refused,
            a_region_closes_behind_its_jobs,
            a_stop_ends_what_is_under_way,
        );
    };
}

every_gpu!(in_memory, MemoryMaker::new());

#[cfg(feature = "cuda")]
every_gpu!(by_the_driver, device_support::cuda::CudaMaker::default());

#[cfg(feature = "cuda")]
suite!(
    by_the_driver_with_batch_copies,
    device_support::cuda::CudaMaker { batch_copies: true },
    through_the_pool,
    through_host_slots,
    padding_stays_zero,
    what_is_not_verified_stays_out,
);

#[test]
fn the_noise_of_two_seeds_differs() {
    assert_ne!(noise(64, 1), noise(64, 2));
}
