//! The same suite for every block device, and what is special about each.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fault::{FaultConfig, FaultCounters, FaultDevice};
use super::memory_device::MemoryDevice;
use super::*;

const CAPACITY: u64 = 8 << 20;
const SLAB: u32 = 1 << 20;

/// A file of `CAPACITY` on a disk, opened so that transfers bypass the page cache if it can be.
fn file() -> File {
    let named = tempfile::NamedTempFile::new().unwrap();
    named.as_file().set_len(CAPACITY).unwrap();
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let open =
        |flags: i32| File::options().read(true).write(true).custom_flags(flags).open(named.path());
    open(direct).or_else(|_| open(0)).unwrap()
}

fn arena() -> Arc<Arena> {
    let arena = Arena::create(8 * u64::from(SLAB), SLAB).unwrap();
    for slab in 0..arena.slabs() {
        arena.bind_slab(slab, 128 << 10).unwrap();
    }
    arena
}

fn settle(device: &mut dyn BlockDevice, count: usize) -> Vec<IoDone> {
    let mut done = Vec::new();
    let until = Instant::now() + Duration::from_secs(20);
    while done.len() < count {
        assert!(Instant::now() < until, "{} of {count} completions", done.len());
        device.reap(Some(Duration::from_secs(1)), &mut done).unwrap();
    }
    assert_eq!(done.len(), count);
    done
}

fn pages(bytes: usize, fill: u8) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(bytes);
    buffer.fill(fill);
    buffer
}

/// What every device must do.
fn suite(device: &mut dyn BlockDevice, arena: &Arc<Arena>) {
    assert_eq!(device.capacity_bytes(), CAPACITY);
    round_trip(device, arena);
    queue_full(device);
    outside(device);
    wakes(device);
    device.sync().unwrap();
}

fn round_trip(device: &mut dyn BlockDevice, arena: &Arc<Arena>) {
    for at in 0..32u32 {
        let slot = arena.slot(at / 8, at % 8).unwrap();
        let mut guard = arena.write(slot, 4096 * (1 + at)).unwrap();
        guard.fill(at as u8 + 1);
        let buffer = IoBuffer::Drain(guard.into_read());
        let op = IoOp { user: u64::from(at), offset: u64::from(at) * (128 << 10), buffer };
        let mut op = Some(op);
        while let Some(one) = op.take() {
            if let Err(back) = device.submit(one) {
                op = Some(back);
                let mut done = Vec::new();
                device.reap(None, &mut done).unwrap();
                assert!(done.iter().all(|done| done.result == Ok(())));
            }
        }
    }
    let left = device.in_flight();
    assert!(settle(device, left).iter().all(|done| done.result == Ok(())));
    assert_eq!(device.in_flight(), 0);
    for at in 0..32u64 {
        let bytes = 4096 * (1 + at as u32);
        let offset = at * (128 << 10);
        let buffer = if at % 2 == 0 {
            let slot = arena.slot(4 + at as u32 / 8, at as u32 % 8).unwrap();
            IoBuffer::Fill(arena.write(slot, bytes).unwrap())
        } else {
            IoBuffer::FillPages(AlignedBuf::zeroed(bytes as usize))
        };
        device.submit(IoOp { user: 1000 + at, offset, buffer }).unwrap();
        let done = settle(device, 1).pop().unwrap();
        assert_eq!((done.user, done.result), (1000 + at, Ok(())));
        assert_eq!(done.buffer.bytes().len(), bytes as usize);
        assert!(done.buffer.bytes().iter().all(|byte| u64::from(*byte) == at + 1));
    }
}

fn queue_full(device: &mut dyn BlockDevice) {
    let depth = device.queue_depth();
    let op = |user: u64| IoOp { user, offset: 0, buffer: IoBuffer::FillPages(pages(4096, 0)) };
    for user in 0..depth as u64 {
        device.submit(op(user)).unwrap();
    }
    let back = device.submit(op(77)).unwrap_err();
    assert_eq!((back.user, back.buffer.bytes().len()), (77, 4096));
    let mut users: Vec<u64> = settle(device, depth).iter().map(|done| done.user).collect();
    users.sort_unstable();
    assert!(users.into_iter().eq(0..depth as u64));
}

fn outside(device: &mut dyn BlockDevice) {
    for offset in [CAPACITY, CAPACITY - 4096, u64::MAX - 4095, u64::MAX / 4096 * 4096] {
        for write in [false, true] {
            let memory = pages(8192, 9);
            let buffer =
                if write { IoBuffer::DrainPages(memory) } else { IoBuffer::FillPages(memory) };
            device.submit(IoOp { user: 5, offset, buffer }).unwrap();
            let done = settle(device, 1).pop().unwrap();
            assert_eq!(done.result, Err(IoFailure::OutOfRange), "offset {offset}");
        }
    }
    // The page before the end was not touched by the write that overlapped the end.
    let buffer = IoBuffer::FillPages(pages(4096, 1));
    device.submit(IoOp { user: 5, offset: CAPACITY - 4096, buffer }).unwrap();
    assert!(settle(device, 1)[0].buffer.bytes().iter().all(|byte| *byte == 0));
}

fn wakes(device: &mut dyn BlockDevice) {
    let mut done = Vec::new();
    let start = Instant::now();
    device.reap(Some(Duration::from_millis(20)), &mut done).unwrap();
    assert!(done.is_empty() && start.elapsed() >= Duration::from_millis(15));
    // One that comes before the wait counts for it, and any number count as one at least.
    let waker = device.waker();
    waker.wake();
    waker.wake();
    device.reap(None, &mut done).unwrap();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        waker.wake();
    });
    while start.elapsed() < Duration::from_millis(40) {
        device.reap(Some(Duration::from_millis(10)), &mut done).unwrap();
    }
    device.reap(None, &mut done).unwrap();
    late.join().unwrap();
    assert!(done.is_empty());
}

#[test]
fn the_blocking_device_passes_the_suite() {
    for depth in [1, 3, 64] {
        suite(&mut BlockingDevice::new(file(), depth).unwrap(), &arena());
    }
}

#[test]
fn the_memory_device_passes_the_suite() {
    suite(&mut MemoryDevice::new(CAPACITY as usize, 4), &arena());
}

#[test]
fn a_fault_device_without_faults_passes_the_suite() {
    let inner = Box::new(MemoryDevice::new(CAPACITY as usize, 4));
    suite(&mut FaultDevice::new(inner, FaultConfig::default(), Arc::default()), &arena());
    let config = FaultConfig { delay: 0.5, delay_ms_max: 3, ..FaultConfig::default() };
    let inner = Box::new(BlockingDevice::new(file(), 8).unwrap());
    suite(&mut FaultDevice::new(inner, config, Arc::default()), &arena());
}

#[test]
fn the_chosen_device_is_opened_and_said() {
    for choice in [RingChoice::Auto, RingChoice::Blocking] {
        let status = RingStatus::new();
        let arena = arena();
        let open =
            OpenDevice { file: file(), arena: Some(Arc::clone(&arena)), choice, queue_depth: 8 };
        let mut device = open_device(open, &status).unwrap();
        suite(device.as_mut(), &arena);
        let report = status.report();
        println!("{choice:?}: {report:?}");
        assert!(!report.why.is_empty());
        assert_eq!(report.stale_completions, 0);
        if choice == RingChoice::Blocking {
            assert_eq!(report.kind, RingKind::Blocking);
        }
    }
    let read_only = File::open(tempfile::NamedTempFile::new().unwrap().path()).unwrap();
    let open = OpenDevice {
        file: read_only,
        arena: None,
        choice: RingChoice::Auto,
        queue_depth: u32::MAX,
    };
    // An empty file has no page to probe with.
    assert_eq!(open_device(open, &RingStatus::new()).unwrap().capacity_bytes(), 0);
}

/// What the thread has used of a CPU so far.
fn thread_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanos = text.split_ascii_whitespace().next().unwrap().parse().unwrap();
    Duration::from_nanos(nanos)
}

#[test]
fn an_idle_device_uses_no_cpu() {
    let open = OpenDevice { file: file(), arena: None, choice: RingChoice::Auto, queue_depth: 8 };
    let mut device = open_device(open, &RingStatus::new()).unwrap();
    let before = thread_cpu();
    device.reap(Some(Duration::from_millis(500)), &mut Vec::new()).unwrap();
    let used = thread_cpu() - before;
    assert!(used < Duration::from_millis(25), "used {used:?}");
}

/// Reads of random bytes under a device with faults: what was injected, and the results.
fn faulty_run(seed: u64) -> (super::fault::FaultCounts, Vec<(u64, bool, Vec<u8>)>) {
    let bytes: Vec<u8> = (0..CAPACITY).map(|at| (at / 4096 % 251) as u8).collect();
    let inner = Box::new(MemoryDevice::with_bytes(bytes, 4));
    let counters: Arc<FaultCounters> = Arc::default();
    let config = FaultConfig { delay_ms_max: 1, ..FaultConfig::uniform(seed, 0.5) };
    let mut device = FaultDevice::new(inner, config, Arc::clone(&counters));
    let mut results = Vec::new();
    for user in 0..400u64 {
        let memory = pages(8192, user as u8);
        let read = user % 2 == 0;
        let buffer = if read { IoBuffer::FillPages(memory) } else { IoBuffer::DrainPages(memory) };
        device.submit(IoOp { user, offset: user * 8192 % CAPACITY, buffer }).unwrap();
        let done = settle(&mut device, 1).pop().unwrap();
        if !read {
            // Whatever befell the write, the caller's memory is as it was.
            assert!(done.buffer.bytes().iter().all(|byte| *byte == user as u8));
        }
        results.push((done.user, done.result.is_ok(), done.buffer.bytes().to_vec()));
    }
    (counters.counts(), results)
}

#[test]
fn faults_follow_from_the_seed() {
    let (counts, results) = faulty_run(7);
    assert_eq!(faulty_run(7), (counts, results.clone()));
    assert_ne!(faulty_run(8).1, results);
    println!("{counts:?}");
    for count in [
        counts.read_errors,
        counts.write_errors,
        counts.shorts,
        counts.delays,
        counts.flipped_reads,
        counts.flipped_writes,
        counts.lost_writes,
        counts.misdirected_reads,
    ] {
        assert!(count > 5, "{counts:?}");
    }
}

#[test]
fn the_nth_operation_fails() {
    let config = FaultConfig { fail_nth: Some(3), ..FaultConfig::default() };
    let inner = Box::new(MemoryDevice::new(CAPACITY as usize, 4));
    let mut device = FaultDevice::new(inner, config, Arc::default());
    for user in 0..6 {
        let buffer = IoBuffer::FillPages(pages(4096, 0));
        device.submit(IoOp { user, offset: 0, buffer }).unwrap();
        assert_eq!(settle(&mut device, 1)[0].result.is_err(), user == 3);
    }
}

#[cfg(feature = "uring")]
mod ring {
    use super::*;
    use crate::catalog::SlotId;

    /// A ring, or nothing where the kernel refuses it.
    fn ring(
        file: File,
        arena: Option<Arc<Arena>>,
        depth: u32,
    ) -> Option<(RingDevice, Arc<RingStatus>)> {
        let status = RingStatus::new();
        match RingDevice::new(file, arena, depth, Arc::clone(&status)) {
            Ok(device) => Some((device, status)),
            Err(error) => {
                println!("skipped: io_uring is refused here: {error}");
                None
            }
        }
    }

    #[test]
    fn the_ring_passes_the_suite() {
        for depth in [1, 3, 64] {
            let arena = arena();
            let Some((mut device, _)) = ring(file(), Some(Arc::clone(&arena)), depth) else {
                return;
            };
            suite(&mut device, &arena);
            let Some((mut device, _)) = ring(file(), None, depth) else { return };
            suite(&mut device, &arena);
        }
    }

    #[test]
    fn the_arena_is_registered_once_it_was_touched() {
        let arena = arena();
        let until = Instant::now() + Duration::from_secs(20);
        while arena.touched_bytes() < arena.bytes() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        let Some((mut device, status)) = ring(file(), Some(Arc::clone(&arena)), 8) else { return };
        device.reap(Some(Duration::ZERO), &mut Vec::new()).unwrap();
        let report = status.report();
        println!("{report:?}");
        // Registered, or there is a reason (a low memlock limit).
        assert!(report.fixed_bytes == arena.bytes() || !report.fixed_why.is_empty());
        suite(&mut device, &arena);
    }

    #[test]
    fn a_completion_that_is_nobodys_is_counted_and_ignored() {
        let Some((mut device, status)) = ring(file(), None, 4) else { return };
        for user_data in [9 << 32 | 3, 99, 7 << 32, u64::MAX - 2] {
            device.push_foreign(user_data);
        }
        suite(&mut device, &arena());
        assert_eq!(status.report().stale_completions, 4);
    }

    #[test]
    fn a_length_that_the_device_cannot_do_fails_and_the_ring_goes_on() {
        let Some((mut device, _)) = ring(file(), None, 4) else { return };
        let arena = arena();
        let slot = arena.slot(0, 0).unwrap();
        let buffer = IoBuffer::Fill(arena.write(slot, 100).unwrap());
        device.submit(IoOp { user: 1, offset: 0, buffer }).unwrap();
        let done = settle(&mut device, 1);
        println!("{:?}", done[0].result);
        drop(done);
        suite(&mut device, &arena);
    }

    /// Reads are abandoned at random moments by dropping the device; the slots are the device's
    /// until its drop is over, and nothing outside them changes, then or later.
    #[test]
    fn ten_thousand_abandoned_reads_stay_in_their_slots() {
        let arena = arena();
        let neighbour = arena.slot(0, 1).unwrap();
        let slots: Vec<SlotId> = (1..8)
            .flat_map(|slab| (0..8).map(move |index| (slab, index)))
            .filter_map(|(slab, index)| arena.slot(slab, index))
            .collect();
        arena.write(neighbour, 4096).unwrap().fill(0xA5);
        for slot in &slots {
            arena.write(*slot, 128 << 10).unwrap().fill(0x5A);
        }
        let mut random = 12345u64;
        let mut reads = 0;
        let source = file();
        while reads < 10_000 {
            let copy = source.try_clone().unwrap();
            let Some((mut device, _)) = ring(copy, Some(Arc::clone(&arena)), 64) else { return };
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let mut done = Vec::new();
            for (at, slot) in slots.iter().enumerate() {
                let memory = arena.write(*slot, 64 << 10).unwrap();
                let op = IoOp { user: at as u64, offset: 0, buffer: IoBuffer::Fill(memory) };
                device.submit(op).unwrap();
                reads += 1;
                assert_eq!(arena.read(*slot, 1).unwrap_err(), SlotError::Busy(*slot));
                if at as u64 % 7 == random >> 60 {
                    device.reap(Some(Duration::ZERO), &mut done).unwrap();
                }
            }
            drop(device);
            drop(done);
            for slot in &slots {
                let mut guard = arena.write(*slot, 128 << 10).unwrap();
                // The half that was not lent is as it was.
                assert!(guard[64 << 10..].iter().all(|byte| *byte == 0x5A));
                guard.fill(0x5A);
            }
            std::thread::yield_now();
            for slot in &slots {
                let guard = arena.read(*slot, 128 << 10).unwrap();
                assert!(guard.iter().all(|byte| *byte == 0x5A), "written after the drop");
            }
        }
        assert!(arena.read(neighbour, 4096).unwrap().iter().all(|byte| *byte == 0xA5));
    }
}
