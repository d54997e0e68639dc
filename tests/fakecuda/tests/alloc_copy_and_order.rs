//! Memory, copies, streams and events of one process, through `kvtide_kernels::driver`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::{Pinned, context, copy, download, fill, is_child, pattern, run_child, upload};
use kvtide_kernels::driver::{
    BATCH_COPIES_MAX, Context, Copy, DeviceBuffer, Event, HostRegistration, Stream, address_range,
    failed_drops,
};

/// Held by tests that read the free memory or inject faults, which are the whole process's.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn the_library_lies_beside_the_test_and_says_that_it_is_a_fake() {
    let _alone = alone();
    let driver = common::driver();
    assert_eq!(driver.version(), (13, 0));
    let devices = driver.devices().unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!(devices[0].name, "Fake GPU 0");
    assert_eq!(devices[0].memory_bytes, 1 << 30);
    assert_eq!(devices[0].compute, (9, 0));
    assert_eq!(devices[0].pci, "0000:00:00.0");
    assert!(driver.device(1).is_err());
}

#[test]
fn bytes_come_back_and_memory_is_given_back() {
    let _alone = alone();
    let context = context();
    let (before, total) = context.memory().unwrap();
    {
        let stream = Stream::new(&context).unwrap();
        let buffer = DeviceBuffer::alloc(&context, 3 << 20).unwrap();
        assert_eq!(context.memory().unwrap(), (before - (3 << 20), total));
        let bytes = pattern(1, 3 << 20);
        upload(&stream, buffer.address(), &bytes).unwrap();
        assert_eq!(download(&stream, buffer.address(), bytes.len()).unwrap(), bytes);
        fill(&stream, buffer.address() + 5, 9, 7).unwrap();
        let found = download(&stream, buffer.address(), 16).unwrap();
        assert_eq!((found[4], &found[5..12], found[12]), (bytes[4], &[9; 7][..], bytes[12]));
        assert_eq!(address_range_of(&context, buffer.address() + 77), (buffer.address(), 3 << 20));
    }
    assert_eq!(context.memory().unwrap().0, before);
    assert_eq!((failed_drops(), fakecuda::violations()), (0, 0));
}

fn address_range_of(context: &Context, address: u64) -> (u64, u64) {
    // The call has no context of its own; this thread has none until it binds one.
    context.bind().unwrap();
    address_range(address).unwrap()
}

#[test]
fn a_thread_without_a_context_is_refused_and_every_other_call_brings_its_own() {
    let _alone = alone();
    let context = context();
    let buffer = DeviceBuffer::alloc(&context, 4096).unwrap();
    let address = buffer.address();
    let error = std::thread::spawn(move || address_range(address).unwrap_err()).join().unwrap();
    assert_eq!(error.code, 201);
    // A buffer may be used and dropped on a thread that never bound anything, and such a thread
    // has no context after that either.
    let user = std::thread::spawn(move || {
        let stream = Stream::new(&context).unwrap();
        upload(&stream, buffer.address(), &[7; 4096]).unwrap();
        drop((stream, buffer));
        address_range(address).unwrap_err()
    });
    assert_eq!(user.join().unwrap().code, 201);
    assert_eq!(failed_drops(), 0);
}

#[test]
fn more_than_there_is_is_out_of_memory_and_nothing_else() {
    let _alone = alone();
    let context = context();
    let error = DeviceBuffer::alloc(&context, (1 << 30) + 1).unwrap_err();
    assert!(error.is_out_of_memory() && !error.is_sticky(), "{error}");
    assert_eq!(
        error.to_string(),
        "cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    );
    DeviceBuffer::alloc(&context, 1 << 20).unwrap();
    assert_eq!(DeviceBuffer::alloc(&context, 0).unwrap_err().code, 1);
}

#[test]
fn ranges_beyond_an_allocation_are_refused_and_nothing_is_lost() {
    let _alone = alone();
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let (one, two) = (DeviceBuffer::alloc(&context, 8192), DeviceBuffer::alloc(&context, 8192));
    let (one, two) = (one.unwrap(), two.unwrap());
    let error = fill(&stream, one.address() + 8000, 1, 193).unwrap_err();
    assert_eq!((error.code, error.call), (1, "cuMemsetD8Async"));
    assert_eq!(copy(&stream, one.address() + 1, two.address(), 8192).unwrap_err().code, 1);
    assert_eq!(copy(&stream, one.address(), two.address() + 1, 8192).unwrap_err().code, 1);
    assert_eq!(upload(&stream, one.address() - 1, &[0; 8]).unwrap_err().code, 1);
    assert_eq!(download(&stream, one.address() + 8190, 3).unwrap_err().code, 1);
    copy(&stream, one.address(), two.address(), 8192).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn pageable_memory_is_read_at_the_call_and_pinned_memory_when_its_turn_comes() {
    let _alone = alone();
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, 8192).unwrap();
    let pinned = Pinned::new(&context, 4096, 1 << 20).unwrap();
    let mut pageable = vec![1_u8; 4096];
    pinned.write(&[1; 4096]);

    let fault = common::inject("cuMemsetD8Async@1=stall");
    fill(&stream, buffer.address(), 0, 1).unwrap();
    let at = buffer.address();
    // SAFETY: both sources live until the stream is synchronised below; that they are written
    // before is what this test is about.
    unsafe {
        stream.copy_to_device(at, pageable.as_ptr(), 4096).unwrap();
        stream.copy_to_device(at + 4096, pinned.address(), 4096).unwrap();
    }
    pageable.fill(2);
    pinned.write(&[2; 4096]);
    assert!(!stream.is_done().unwrap(), "the stream stalls");
    drop(fault);
    stream.synchronize().unwrap();

    let found = download(&stream, at, 8192).unwrap();
    assert_eq!(found[..4096], [1; 4096], "pageable memory is read at the call");
    assert_eq!(found[4096..], [2; 4096], "pinned memory is read later");

    // And towards the host: only pageable memory makes the call wait.
    let fault = common::inject("cuMemsetD8Async@1=stall");
    fill(&stream, at, 3, 4096).unwrap();
    pinned.write(&[0; 4096]);
    // SAFETY: the pinned memory lives until the stream is synchronised below.
    unsafe { stream.copy_to_host(pinned.address(), at, 4096) }.unwrap();
    assert_eq!(pinned.read(), [0; 4096], "not yet");
    drop(fault);
    stream.synchronize().unwrap();
    assert_eq!(pinned.read(), [3; 4096]);
}

#[test]
fn registered_memory_is_known_by_its_chunks() {
    let _alone = alone();
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, 40_000).unwrap();
    let pinned = Pinned::new(&context, 40_000, 16_384).unwrap();
    assert_eq!(pinned.registration.chunks(), 3);
    let at = pinned.address();
    // SAFETY: memory and buffer live until the end; the copies that are refused queue nothing.
    let copy_of = |from: usize, bytes: u64| unsafe {
        stream.copy_to_device(buffer.address(), at.wrapping_add(from), bytes)
    };
    copy_of(16_384, 16_384).unwrap();
    copy_of(32_768, 7_232).unwrap();
    assert_eq!(copy_of(16_000, 1_000).unwrap_err().code, 1, "crosses the end of a chunk");
    assert_eq!(copy_of(39_000, 1_001).unwrap_err().code, 1, "leaves the registered memory");
    stream.synchronize().unwrap();

    // SAFETY: the memory is mapped; registering some of it again is refused.
    let again = unsafe { HostRegistration::register(&context, at.wrapping_add(36_000), 100) };
    assert_eq!(again.unwrap_err().code, 712);
    // SAFETY: nothing is mapped there, and the call is refused.
    let unmapped =
        unsafe { HostRegistration::register(&context, std::ptr::without_provenance_mut(4096), 1) };
    assert_eq!(unmapped.unwrap_err().code, 1);
    drop(pinned);
    assert_eq!(failed_drops(), 0, "each chunk was unregistered at its own address");
    // SAFETY: `Pinned` leaks its memory, so it is still mapped.
    let again = unsafe { HostRegistration::register(&context, at, 40_000) }.unwrap();
    assert_eq!(again.chunks(), 1);
}

#[test]
fn a_registration_that_fails_midway_leaves_nothing_registered() {
    let _alone = alone();
    let context = context();
    let fault = common::inject("cuMemHostRegister_v2@3=oom");
    let error = Pinned::new(&context, 40_000, 8_192).err().unwrap();
    drop(fault);
    assert!(error.is_out_of_memory());
    assert_eq!(failed_drops(), 0);
}

#[test]
fn batches_are_cut_and_need_a_stream_and_pinned_memory() {
    let _alone = alone();
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let count = BATCH_COPIES_MAX + 100;
    let (from, to) = (
        DeviceBuffer::alloc(&context, count as u64 * 8).unwrap(),
        DeviceBuffer::alloc(&context, count as u64 * 8).unwrap(),
    );
    let bytes = pattern(3, count * 8);
    upload(&stream, from.address(), &bytes).unwrap();
    // Block i goes to the place of block count - 1 - i.
    let copies: Vec<Copy> = (0..count as u64)
        .map(|at| Copy {
            dst: to.address() + (count as u64 - 1 - at) * 8,
            src: from.address() + at * 8,
            bytes: 8,
        })
        .chain([Copy { dst: to.address(), src: from.address(), bytes: 0 }])
        .collect();
    // SAFETY: the buffers live until the stream is synchronised, and the ranges do not overlap.
    unsafe { stream.copy_batch(&copies) }.unwrap();
    let expected: Vec<u8> = bytes.chunks(8).rev().flatten().copied().collect();
    assert_eq!(download(&stream, to.address(), count * 8).unwrap(), expected);

    // SAFETY: 0 is the default stream of every context; what is refused queues nothing.
    let refused = unsafe { Stream::borrow_raw(&context, 0).copy_batch(&copies[..1]) };
    assert_eq!(refused.unwrap_err().code, 1, "the default stream");
    let pageable = [0_u8; 8];
    let src = pageable.as_ptr().expose_provenance() as u64;
    // SAFETY: what is refused queues nothing.
    let refused = unsafe { stream.copy_batch(&[Copy { dst: to.address(), src, bytes: 8 }]) };
    assert_eq!(refused.unwrap_err().code, 1, "pageable memory");
}

#[test]
fn a_batch_runs_in_an_order_that_nobody_expects() {
    let _alone = alone();
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, 3 * 64).unwrap();
    let at = buffer.address();
    upload(&stream, at, &[[1; 64], [2; 64], [3; 64]].concat()).unwrap();
    // The second copy reads what the first one writes: forbidden, and here found out.
    let chain = [
        Copy { dst: at + 64, src: at, bytes: 64 },
        Copy { dst: at + 128, src: at + 64, bytes: 64 },
    ];
    // SAFETY: the buffer lives until the stream is synchronised; the order is what is tested.
    unsafe { stream.copy_batch(&chain) }.unwrap();
    let found = download(&stream, at, 3 * 64).unwrap();
    assert_eq!(found, [[1; 64], [1; 64], [2; 64]].concat(), "the last one ran first");
}

#[test]
fn events_order_streams_and_say_when_they_are_reached() {
    let _alone = alone();
    let context = context();
    let (one, two) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let buffer = DeviceBuffer::alloc(&context, 1 << 20).unwrap();
    let event = Event::new(&context).unwrap();
    assert!(event.is_done().unwrap(), "before the first record");
    two.wait(&event).unwrap();
    two.synchronize().unwrap();

    let fault = common::inject("cuMemsetD8Async@1=stall");
    fill(&one, buffer.address(), 1, 1 << 20).unwrap();
    event.record(&one).unwrap();
    two.wait(&event).unwrap();
    fill(&two, buffer.address(), 2, 1 << 20).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!event.is_done().unwrap());
    assert!(!two.is_done().unwrap(), "the other stream waits");
    drop(fault);
    event.synchronize().unwrap();
    two.synchronize().unwrap();
    assert_eq!(download(&two, buffer.address(), 1 << 20).unwrap(), vec![2; 1 << 20]);

    let (start, end) = (Event::timed(&context).unwrap(), Event::timed(&context).unwrap());
    assert!(end.since(&start).is_err(), "never recorded");
    let clock = Instant::now();
    start.record(&one).unwrap();
    fill(&one, buffer.address(), 1, 1 << 20).unwrap();
    end.record(&one).unwrap();
    end.synchronize().unwrap();
    assert!(end.since(&start).unwrap() <= clock.elapsed());
    assert!(event.since(&start).is_err(), "an event without a time");
}

#[test]
fn freeing_waits_for_work_of_a_stream_that_is_gone() {
    let _alone = alone();
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, 1 << 20).unwrap();
    let fault = common::inject("cuMemsetD8Async@1=stall");
    fill(&stream, buffer.address(), 1, 1 << 20).unwrap();
    drop(stream);
    let freeing = std::thread::spawn(move || drop(buffer));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!freeing.is_finished(), "the driver waits for work that uses the memory");
    drop(fault);
    freeing.join().unwrap();
    context.synchronize().unwrap();
    assert_eq!(failed_drops(), 0);
}

/// Two streams hand a buffer to each other; each copy must see what the other stream wrote.
#[test]
fn order_holds_under_jitter() {
    const ME: &str = "order_holds_under_jitter";
    if !is_child(ME) {
        for seed in ["1", "2", "3"] {
            run_child(ME, &[("FAKECUDA_JITTER_US", "1500"), ("FAKECUDA_SEED", seed)]);
        }
        return;
    }
    let context = context();
    let streams = [Stream::new(&context).unwrap(), Stream::new(&context).unwrap()];
    let buffers: Vec<DeviceBuffer> =
        (0..2).map(|_| DeviceBuffer::alloc(&context, 4096).unwrap()).collect();
    let events: Vec<Event> = (0..2).map(|_| Event::new(&context).unwrap()).collect();
    let host = Pinned::new(&context, 50 * 4096, 1 << 30).unwrap();
    for round in 0..50_usize {
        let (me, other) = (round % 2, (round + 1) % 2);
        let stream = &streams[me];
        stream.wait(&events[other]).unwrap();
        fill(stream, buffers[me].address(), round as u8, 2048).unwrap();
        copy(stream, buffers[me].address() + 2048, buffers[other].address(), 2048).unwrap();
        let to = host.address().wrapping_add(round * 4096);
        // SAFETY: the host memory and the buffers live until the context is synchronised.
        unsafe { stream.copy_to_host(to, buffers[me].address(), 4096) }.unwrap();
        events[me].record(stream).unwrap();
    }
    context.synchronize().unwrap();
    for (round, found) in host.read().chunks(4096).enumerate().skip(1) {
        assert_eq!(found[..2048], [round as u8; 2048], "round {round}");
        assert_eq!(found[2048..], [round as u8 - 1; 2048], "round {round} saw an older one");
    }
}
