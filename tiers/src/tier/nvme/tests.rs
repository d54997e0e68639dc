//! The worker over a device in memory: order of writes, commits, failures, ends.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Instant;

use crossbeam::channel::Receiver;
use proptest::prelude::*;

use super::*;
use crate::block::{BlockKey, Codec, DESCRIPTOR_BYTES, NamespaceId, Place, Sum128};
use crate::io::memory_device::{LoggedWrite, MemoryDevice, MemoryImage};
use crate::io::{Arena, IoDone, IoOp};

const SALT: u128 = 0x1234_5678;
const SEGMENTS: u32 = 4;
const PAGE: usize = PAGE_BYTES as usize;

fn geometry() -> StoreGeometry {
    StoreGeometry { segment_bytes: 1 << 20, segments: SEGMENTS, descriptor_pages: 4 }
}

fn options() -> NvmeOptions {
    NvmeOptions { commit_delay: Duration::from_secs(3600), ..NvmeOptions::default() }
}

struct Rig {
    worker: NvmeWorker,
    done: Receiver<NvmeDone>,
    image: MemoryImage,
    next: u64,
}

fn rig(options: NvmeOptions) -> Rig {
    rig_on(MemoryDevice::new(geometry().store_bytes() as usize, 8).logged(), options)
}

fn rig_on(device: MemoryDevice, options: NvmeOptions) -> Rig {
    let image = device.image();
    let (sink, done) = channel::unbounded();
    let worker = NvmeWorker::start(
        move || Ok(Box::new(device)),
        geometry(),
        SALT,
        options,
        Box::new(move |done| drop(sink.send(done))),
    )
    .unwrap();
    Rig { worker, done, image, next: 0 }
}

fn header(sequence: u64) -> Box<[u8; PAGE]> {
    let mut page = Box::new([0; PAGE]);
    page[..8].copy_from_slice(b"KVTtest!");
    page[8..16].copy_from_slice(&sequence.to_le_bytes());
    page
}

fn payload(seed: u64, bytes: u32) -> Vec<u8> {
    (0..bytes).map(|at| (u64::from(at) * 7 + seed * 131 + (u64::from(at) >> 8)) as u8).collect()
}

fn descriptor(seed: u64, offset: u32, bytes: &[u8]) -> Descriptor {
    Descriptor {
        codec: Codec::Raw,
        narrow: None,
        namespace: NamespaceId(1),
        generation: 1,
        key: BlockKey([seed as u8; 32]),
        parent: BlockKey::ROOT,
        position: 0,
        tokens: 16,
        raw_bytes: bytes.len() as u32,
        stored_bytes: bytes.len() as u32,
        raw_sum: Sum128::of(bytes),
        stored_sum: Sum128::of(bytes),
        sequence: seed,
        segment: 0,
        segment_sequence: 0,
        offset,
        created_s: 1,
        session: 0,
    }
}

impl Rig {
    fn wait(&self) -> NvmeDone {
        self.done.recv_timeout(Duration::from_secs(10)).expect("an answer in time")
    }

    fn open(&self, segment: u32, sequence: u64) {
        self.worker
            .try_send(NvmeJob::Open { segment, sequence, header: header(sequence) })
            .unwrap();
    }

    fn send_write(&mut self, segment: u32, sequence: u64, index: u32, bytes: u32) -> u64 {
        self.next += 1;
        let offset = geometry().payload_start() + index * (8 << 10);
        let data = payload(self.next, bytes);
        self.worker
            .try_send(NvmeJob::Write {
                op: self.next,
                segment,
                sequence,
                index,
                descriptor: descriptor(self.next, offset, &data),
                buffer: WriteBuffer::Pages(AlignedBuf::of(&data)),
            })
            .unwrap();
        self.next
    }

    /// Writes and waits for it.
    fn write(&mut self, segment: u32, sequence: u64, index: u32) -> Result<(), NvmeError> {
        let wanted = self.send_write(segment, sequence, index, 5000);
        loop {
            match self.wait() {
                NvmeDone::Written { op, result } if op == wanted => return result,
                NvmeDone::Opened { result: Ok(()), .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn read(&mut self, segment: u32, offset: u32, stored_bytes: u32, urgent: bool) -> u64 {
        self.next += 1;
        let buffer = ReadBuffer::Pages(AlignedBuf::zeroed(stored_bytes as usize));
        let op = self.next;
        self.worker
            .try_send(NvmeJob::Read { op, segment, offset, stored_bytes, buffer, urgent })
            .unwrap();
        op
    }

    /// Descriptor pages written so far.
    fn commits(&self) -> usize {
        let log = self.image.log();
        let pages = log.iter().filter(|write| is_descriptor_page(write.offset));
        pages.map(|write| write.bytes.len() / PAGE).sum()
    }

    fn stop(self) -> (Vec<NvmeDone>, MemoryImage) {
        self.worker.stop();
        (self.done.try_iter().collect(), self.image)
    }
}

fn is_descriptor_page(offset: u64) -> bool {
    let geometry = geometry();
    let within = (offset - geometry.segment_offset(0)) % u64::from(geometry.segment_bytes);
    within >= PAGE_BYTES && within < u64::from(geometry.payload_start())
}

/// What recovery would accept: for each segment the life its header names, and its descriptors.
fn recover(image: &[u8]) -> Vec<(u32, u64, u32, Descriptor)> {
    let geometry = geometry();
    let mut found = Vec::new();
    for segment in 0..SEGMENTS {
        let start = geometry.segment_offset(segment) as usize;
        if &image[start..start + 8] != b"KVTtest!" {
            continue;
        }
        let sequence = u64::from_le_bytes(image[start + 8..start + 16].try_into().unwrap());
        for index in 0..geometry.descriptors_per_segment() {
            let at = start + PAGE + index as usize * DESCRIPTOR_BYTES;
            let bytes: &[u8; DESCRIPTOR_BYTES] =
                image[at..at + DESCRIPTOR_BYTES].try_into().unwrap();
            let place = Place::Segment { salt: SALT, segment, sequence };
            if let Ok(descriptor) = Descriptor::decode(bytes, place) {
                found.push((segment, sequence, index, descriptor));
            }
        }
    }
    found
}

/// Every descriptor that recovery accepts describes the bytes that are there.
fn check_payloads(image: &[u8]) -> usize {
    let found = recover(image);
    for (segment, sequence, index, descriptor) in &found {
        let start = geometry().segment_offset(*segment) as usize + descriptor.offset as usize;
        let bytes = &image[start..start + descriptor.stored_bytes as usize];
        assert_eq!(Sum128::of(bytes), descriptor.stored_sum, "segment {segment} index {index}");
        assert_eq!((descriptor.segment, descriptor.segment_sequence), (*segment, *sequence));
    }
    found.len()
}

fn check_every_prefix(log: &[LoggedWrite]) {
    let mut image = vec![0; geometry().store_bytes() as usize];
    for write in log {
        let start = write.offset as usize;
        image[start..start + write.bytes.len()].copy_from_slice(&write.bytes);
        check_payloads(&image);
    }
}

#[test]
fn what_is_written_is_read_back_into_slots_and_pages() {
    let mut rig = rig(options());
    let arena = Arena::create(4 << 20, 1 << 20).unwrap();
    arena.bind_slab(0, 64 << 10).unwrap();
    let (from, to) = (arena.slot(0, 0).unwrap(), arena.slot(0, 1).unwrap());
    let data = payload(9, 5000);
    let mut guard = arena.write(from, 5000).unwrap();
    guard.copy_from_slice(&data);
    let offset = geometry().payload_start();
    rig.open(2, 7);
    rig.worker
        .try_send(NvmeJob::Write {
            op: 1,
            segment: 2,
            sequence: 7,
            index: 0,
            descriptor: descriptor(9, offset, &data),
            buffer: WriteBuffer::Slot(guard.into_read()),
        })
        .unwrap();
    assert!(matches!(rig.wait(), NvmeDone::Opened { segment: 2, sequence: 7, result: Ok(()) }));
    assert!(matches!(rig.wait(), NvmeDone::Written { op: 1, result: Ok(()) }));
    // The slot is free by the time of the answer.
    drop(arena.write(from, 1).unwrap());
    let buffer = ReadBuffer::Slot(arena.write(to, 5000).unwrap());
    let read =
        NvmeJob::Read { op: 2, segment: 2, offset, stored_bytes: 5000, buffer, urgent: true };
    rig.worker.try_send(read).unwrap();
    let NvmeDone::Read { op: 2, buffer: Some(buffer), result: Ok(()) } = rig.wait() else {
        panic!("no read");
    };
    assert_eq!(buffer.bytes(), &data[..]);
    rig.read(2, offset, 5000, false);
    let NvmeDone::Read { buffer: Some(buffer), result: Ok(()), .. } = rig.wait() else {
        panic!("no read");
    };
    assert_eq!(&buffer.bytes()[..5000], &data[..]);
    assert!(buffer.bytes()[5000..].iter().all(|byte| *byte == 0));
    assert_eq!(rig.worker.jobs(), 0);
    let (_, image) = rig.stop();
    assert_eq!(check_payloads(&image.bytes()), 1);
    assert_eq!(image.counts().2, 1, "one sync at the stop");
}

#[test]
fn descriptors_are_committed_at_32() {
    let mut rig = rig(options());
    rig.open(0, 1);
    for index in 0..31 {
        rig.write(0, 1, index).unwrap();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(rig.commits(), 0);
    rig.write(0, 1, 31).unwrap();
    wait_until(|| rig.commits() == 2);
    assert_eq!(check_payloads(&rig.image.bytes()), 32);
    rig.write(0, 1, 32).unwrap();
    assert_eq!(check_payloads(&rig.image.bytes()), 32);
    let (_, image) = rig.stop();
    assert_eq!(check_payloads(&image.bytes()), 33);
    check_every_prefix(&image.log());
}

fn wait_until(mut check: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !check() {
        assert!(Instant::now() < until, "not in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn descriptors_are_committed_after_their_delay() {
    let mut rig = rig(NvmeOptions::default());
    rig.open(0, 1);
    let start = Instant::now();
    rig.write(0, 1, 0).unwrap();
    wait_until(|| check_payloads(&rig.image.bytes()) == 1);
    let after = start.elapsed();
    assert!(after >= Duration::from_millis(95), "after {after:?}");
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(rig.commits(), 1, "and only once");
}

#[test]
fn descriptors_are_committed_at_the_seal_and_the_segment_is_forgotten() {
    let mut rig = rig(options());
    rig.open(0, 1);
    for index in 0..20 {
        rig.send_write(0, 1, index, 4096);
    }
    rig.worker.try_send(NvmeJob::Seal { segment: 0 }).unwrap();
    loop {
        match rig.wait() {
            NvmeDone::Sealed { segment: 0, result } => break result.unwrap(),
            NvmeDone::Opened { result, .. } | NvmeDone::Written { result, .. } => result.unwrap(),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(check_payloads(&rig.image.bytes()), 20);
    assert_eq!(rig.write(0, 1, 20), Err(NvmeError::Life));
    rig.worker.try_send(NvmeJob::Seal { segment: 0 }).unwrap();
    assert!(matches!(rig.wait(), NvmeDone::Sealed { result: Err(NvmeError::Life), .. }));
    // Its next life leaves nothing of this one.
    rig.open(0, 2);
    rig.write(0, 2, 0).unwrap();
    let (_, image) = rig.stop();
    assert_eq!(check_payloads(&image.bytes()), 1);
    check_every_prefix(&image.log());
}

#[test]
fn a_next_life_waits_for_the_seal_of_the_last_one() {
    let mut rig = rig(options());
    rig.image.hold(true);
    for life in 1..4 {
        rig.open(0, life);
        rig.send_write(0, life, 0, 4096);
        rig.send_write(0, life, 1, 4096);
        rig.worker.try_send(NvmeJob::Erase { segment: 0, sequence: life, index: 1 }).unwrap();
        if life < 3 {
            rig.worker.try_send(NvmeJob::Seal { segment: 0 }).unwrap();
        }
    }
    rig.image.hold(false);
    wait_until(|| rig.worker.jobs() == 0);
    let (done, image) = rig.stop();
    assert_eq!(done.len(), 14);
    for one in done {
        match one {
            NvmeDone::Opened { result, .. }
            | NvmeDone::Written { result, .. }
            | NvmeDone::Sealed { result, .. }
            | NvmeDone::Erased { result, .. } => result.unwrap(),
            other => panic!("{other:?}"),
        }
    }
    check_every_prefix(&image.log());
    let found = recover(&image.bytes());
    assert!(found.len() == 1 && found[0].1 == 3 && found[0].2 == 0);
}

#[test]
fn nothing_of_a_segment_is_written_before_its_header() {
    let mut rig = rig(options());
    rig.image.hold(true);
    rig.open(1, 1);
    for index in 0..4 {
        rig.send_write(1, 1, index, 4096);
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(rig.done.is_empty());
    rig.image.hold(false);
    let (_, image) = rig.stop();
    let log = image.log();
    assert_eq!(log[0].offset, geometry().segment_offset(1));
    check_every_prefix(&log);
}

#[test]
fn a_failed_header_fails_what_waits_behind_it() {
    let mut rig = rig(options());
    rig.image.hold(true);
    rig.open(1, 1);
    rig.send_write(1, 1, 0, 4096);
    rig.worker.try_send(NvmeJob::Seal { segment: 1 }).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    rig.image.fail(Some(5));
    rig.image.hold(false);
    let failed = Err(NvmeError::Device(IoFailure::Os(5)));
    assert!(matches!(rig.wait(), NvmeDone::Opened { result, .. } if result == failed));
    assert!(matches!(rig.wait(), NvmeDone::Written { result, .. } if result == failed));
    assert!(matches!(rig.wait(), NvmeDone::Sealed { result, .. } if result == failed));
    rig.image.fail(None);
    rig.open(1, 2);
    rig.write(1, 2, 0).unwrap();
}

#[test]
fn a_failed_payload_leaves_no_descriptor_and_a_failed_commit_is_said() {
    let mut rig = rig(options());
    rig.open(0, 1);
    rig.write(0, 1, 0).unwrap();
    rig.image.fail(Some(5));
    assert!(rig.write(0, 1, 1).is_err());
    rig.worker.try_send(NvmeJob::Seal { segment: 0 }).unwrap();
    let failure = IoFailure::Os(5);
    match rig.wait() {
        NvmeDone::CommitFailed { segment: 0, failure: said } => assert_eq!(said, failure),
        other => panic!("{other:?}"),
    }
    match rig.wait() {
        NvmeDone::Sealed { result, .. } => assert_eq!(result, Err(NvmeError::Device(failure))),
        other => panic!("{other:?}"),
    }
    assert_eq!(check_payloads(&rig.image.bytes()), 0);
}

#[test]
fn descriptors_are_erased_in_open_and_sealed_segments() {
    let mut rig = rig(options());
    let erase = |rig: &Rig, sequence, index| {
        let job = NvmeJob::Erase { segment: 0, sequence, index };
        rig.worker.try_send(job).unwrap();
    };
    let erased = |rig: &Rig, wanted: u32| match rig.wait() {
        NvmeDone::Erased { index, result, .. } => {
            result.unwrap();
            assert_eq!(index, wanted);
        }
        other => panic!("{other:?}"),
    };
    rig.open(0, 1);
    for index in 0..40 {
        rig.write(0, 1, index).unwrap();
    }
    erase(&rig, 1, 3);
    erased(&rig, 3);
    let indices =
        |rig: &Rig| recover(&rig.image.bytes()).iter().map(|found| found.2).collect::<Vec<_>>();
    assert!(!indices(&rig).contains(&3));
    rig.worker.try_send(NvmeJob::Seal { segment: 0 }).unwrap();
    assert!(matches!(rig.wait(), NvmeDone::Sealed { result: Ok(()), .. }));
    assert_eq!(indices(&rig).len(), 39);
    // Of another life: left alone. The others of one page are erased together.
    rig.image.hold(true);
    for (sequence, index) in [(9, 5), (1, 5), (1, 20), (1, 6), (1, 5)] {
        erase(&rig, sequence, index);
    }
    // A next life waits until the page is through.
    rig.open(0, 2);
    erase(&rig, 1, 7);
    rig.image.hold(false);
    let mut order = Vec::new();
    for _ in 0..7 {
        match rig.wait() {
            NvmeDone::Erased { sequence, index, result: Ok(()), .. } => {
                order.push((sequence, index));
            }
            NvmeDone::Opened { sequence, result: Ok(()), .. } => order.push((sequence, 999)),
            other => panic!("{other:?}"),
        }
    }
    // What comes while its page is under way goes with the next pass over it, so the order within a
    // life depends on when the worker looked.
    order[1..5].sort_unstable();
    assert_eq!(order, [(9, 5), (1, 5), (1, 5), (1, 6), (1, 20), (2, 999), (1, 7)]);
    rig.write(0, 2, 0).unwrap();
    let (_, image) = rig.stop();
    assert_eq!(check_payloads(&image.bytes()), 1);
    check_every_prefix(&image.log());
}

#[test]
fn an_erased_write_never_gets_a_descriptor() {
    let mut rig = rig(options());
    rig.open(0, 1);
    rig.write(0, 1, 0).unwrap();
    rig.image.hold(true);
    rig.send_write(0, 1, 1, 4096);
    rig.worker.try_send(NvmeJob::Erase { segment: 0, sequence: 1, index: 1 }).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    rig.image.hold(false);
    let (done, image) = rig.stop();
    assert_eq!(done.len(), 2, "{done:?}");
    assert_eq!(recover(&image.bytes()).iter().map(|found| found.2).collect::<Vec<_>>(), [0]);
}

#[test]
fn a_sync_commits_first_and_holds_writes_back() {
    let mut rig = rig(options());
    rig.open(0, 1);
    rig.write(0, 1, 0).unwrap();
    rig.worker.try_send(NvmeJob::Sync { op: 77 }).unwrap();
    let late = rig.send_write(0, 1, 1, 4096);
    assert!(matches!(rig.wait(), NvmeDone::Synced { op: 77, result: Ok(()) }));
    assert_eq!(recover(&rig.image.bytes()).len(), 1);
    assert!(matches!(rig.wait(), NvmeDone::Written { op, result: Ok(()) } if op == late));
    rig.image.fail(Some(5));
    rig.worker.try_send(NvmeJob::Sync { op: 78 }).unwrap();
    loop {
        match rig.wait() {
            NvmeDone::Synced { op, result } => break assert!(op == 78 && result.is_err()),
            NvmeDone::CommitFailed { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn urgent_reads_overtake_and_the_jobs_are_bounded() {
    let device = MemoryDevice::new(geometry().store_bytes() as usize, 2);
    let mut rig = rig_on(device, NvmeOptions { jobs_max: 5, ..options() });
    rig.image.hold(true);
    let offset = geometry().payload_start();
    let first = rig.read(0, offset, 4096, false);
    std::thread::sleep(Duration::from_millis(20));
    let rest: Vec<u64> = (0..3).map(|_| rig.read(0, offset, 4096, false)).collect();
    let urgent = rig.read(0, offset, 4096, true);
    let buffer = ReadBuffer::Pages(AlignedBuf::zeroed(4096));
    let job =
        NvmeJob::Read { op: 99, segment: 0, offset, stored_bytes: 4096, buffer, urgent: true };
    assert!(matches!(rig.worker.try_send(job), Err(NvmeJob::Read { op: 99, .. })));
    rig.image.hold(false);
    let order: Vec<u64> = (0..5)
        .map(|_| match rig.wait() {
            NvmeDone::Read { op, result: Ok(()), .. } => op,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(order, [vec![first, urgent], rest].concat());
}

#[test]
fn what_does_not_fit_the_geometry_is_refused() {
    let mut rig = rig(options());
    rig.open(SEGMENTS, 1);
    assert!(matches!(rig.wait(), NvmeDone::Opened { result: Err(NvmeError::Geometry), .. }));
    rig.open(0, 1);
    assert!(matches!(rig.wait(), NvmeDone::Opened { result: Ok(()), .. }));
    rig.open(0, 2);
    assert!(matches!(rig.wait(), NvmeDone::Opened { result: Err(NvmeError::Life), .. }));
    assert_eq!(rig.write(0, 2, 0), Err(NvmeError::Life));
    assert_eq!(rig.write(0, 1, 64), Err(NvmeError::Geometry));
    assert_eq!(rig.write(0, 1, 1000), Err(NvmeError::Geometry));
    let start = geometry().payload_start();
    for (segment, offset, bytes) in [
        (SEGMENTS, start, 4096),
        (0, start - 4096, 4096),
        (0, start + 1, 4096),
        (0, (1 << 20) - 4096, 4097),
        (0, u32::MAX / 4096 * 4096, 4096),
        (0, start, 0),
    ] {
        rig.read(segment, offset, bytes, true);
        let NvmeDone::Read { result, .. } = rig.wait() else { panic!("no read") };
        assert_eq!(result, Err(NvmeError::Geometry), "{segment} {offset} {bytes}");
    }
    let job = NvmeJob::Erase { segment: 0, sequence: 1, index: 64 };
    rig.worker.try_send(job).unwrap();
    assert!(matches!(rig.wait(), NvmeDone::Erased { result: Err(NvmeError::Geometry), .. }));
}

#[test]
fn a_device_that_vanishes_in_mid_flight_answers_everything() {
    let mut rig = rig(options());
    rig.open(0, 1);
    rig.write(0, 1, 0).unwrap();
    rig.image.hold(true);
    for index in 1..30 {
        rig.send_write(0, 1, index, 4096);
        rig.read(0, geometry().payload_start(), 4096, index % 2 == 0);
    }
    rig.image.fail(Some(rustix::io::Errno::NODEV.raw_os_error()));
    rig.image.hold(false);
    for _ in 0..58 {
        match rig.wait() {
            NvmeDone::Written { result: Err(error), .. }
            | NvmeDone::Read { buffer: Some(_), result: Err(error), .. } => {
                assert!(error.is_device_gone());
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rig.worker.jobs(), 0);
    rig.stop();
}

/// A device whose `reap` fails or panics, with operations in flight.
struct Broken {
    inner: MemoryDevice,
    panics: bool,
}

impl BlockDevice for Broken {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }
    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
    fn submit(&mut self, op: IoOp) -> Result<(), IoOp> {
        self.inner.submit(op)
    }
    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        if self.in_flight() > 0 {
            assert!(!self.panics, "the test's device panics");
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.inner.reap(timeout, done)
    }
    fn sync(&mut self) -> io::Result<()> {
        self.inner.sync()
    }
    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

/// A device on which a descriptor page takes as long as 64 payloads.
struct SlowPages {
    inner: MemoryDevice,
    geometry: StoreGeometry,
    payloads: u32,
    held: VecDeque<(u32, IoOp)>,
}

impl SlowPages {
    /// Whether something of the descriptor area lies there.
    fn is_page(geometry: &StoreGeometry, offset: u64) -> bool {
        let within = offset.wrapping_sub(geometry.segment_offset(0));
        let within = within % u64::from(geometry.segment_bytes);
        within >= PAGE_BYTES && within < u64::from(geometry.payload_start())
    }
}

impl BlockDevice for SlowPages {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }
    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }
    fn submit(&mut self, op: IoOp) -> Result<(), IoOp> {
        if Self::is_page(&self.geometry, op.offset) {
            self.held.push_back((self.payloads, op));
            return Ok(());
        }
        self.payloads += 1;
        self.inner.submit(op)
    }
    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        let due =
            |since: u32, this: &Self| this.payloads - since >= 64 || this.inner.in_flight() == 0;
        while self.held.front().is_some_and(|(since, _)| due(*since, self)) {
            if let Some((_, op)) = self.held.pop_front() {
                assert!(self.inner.submit(op).is_ok(), "the queue has room");
            }
        }
        self.inner.reap(timeout, done)
    }
    fn sync(&mut self) -> io::Result<()> {
        self.inner.sync()
    }
    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

/// One page went out at a time, however many waited: on a busy disk the descriptors of a whole
/// segment were still to be written when its last payload was, and a crash lost all of it.
#[test]
fn descriptors_keep_up_with_payloads_on_a_device_that_is_slow_with_pages() {
    let geometry = StoreGeometry { segment_bytes: 8 << 20, segments: 1, descriptor_pages: 64 };
    let inner = MemoryDevice::new(geometry.store_bytes() as usize, 8).logged();
    let image = inner.image();
    let device = SlowPages { inner, geometry, payloads: 0, held: VecDeque::new() };
    let (sink, done) = channel::unbounded();
    let answer = Box::new(move |one| drop(sink.send(one)));
    let open = move || Ok(Box::new(device) as Box<dyn BlockDevice>);
    let worker = NvmeWorker::start(open, geometry, SALT, options(), answer).unwrap();
    let mut rig = Rig { worker, done, image, next: 0 };
    rig.open(0, 7);
    const WRITES: u32 = 1000;
    for index in 0..WRITES {
        rig.next += 1;
        let data = payload(rig.next, 4096);
        let offset = geometry.payload_start() + index * 4096;
        let (op, descriptor) = (rig.next, descriptor(rig.next, offset, &data));
        let buffer = WriteBuffer::Pages(AlignedBuf::of(&data));
        let job = NvmeJob::Write { op, segment: 0, sequence: 7, index, descriptor, buffer };
        rig.worker.try_send(job).unwrap();
    }
    for _ in 0..=WRITES {
        rig.wait();
    }
    let (_, image) = rig.stop();
    let (mut payloads, mut lag_max) = (0usize, 0usize);
    let mut described: HashMap<u64, usize> = HashMap::new();
    for write in image.log() {
        if SlowPages::is_page(&geometry, write.offset) {
            for (at, page) in write.bytes.chunks(PAGE).enumerate() {
                let count = page.chunks(DESCRIPTOR_BYTES).filter(|one| one[0] != 0).count();
                described.insert(write.offset + (at * PAGE) as u64, count);
            }
        } else if write.offset > geometry.segment_offset(0) {
            payloads += 1;
        }
        lag_max = lag_max.max(payloads - described.values().sum::<usize>().min(payloads));
    }
    assert_eq!(payloads, WRITES as usize);
    assert_eq!(described.values().sum::<usize>(), payloads, "all are described in the end");
    assert!(lag_max <= 300, "{lag_max} payloads on the device without a descriptor");
}

#[test]
fn a_worker_that_dies_answers_what_it_has_and_all_that_comes() {
    for panics in [false, true] {
        let inner = MemoryDevice::new(geometry().store_bytes() as usize, 2);
        let (sink, done) = channel::unbounded();
        let worker = NvmeWorker::start(
            move || Ok(Box::new(Broken { inner, panics })),
            geometry(),
            SALT,
            options(),
            Box::new(move |done| drop(sink.send(done))),
        )
        .unwrap();
        let arena = Arena::create(1 << 20, 1 << 20).unwrap();
        arena.bind_slab(0, 64 << 10).unwrap();
        let slot = arena.slot(0, 0).unwrap();
        let send = |buffer| {
            let offset = geometry().payload_start();
            let job = NvmeJob::Read {
                op: 1,
                segment: 0,
                offset,
                stored_bytes: 4096,
                buffer,
                urgent: true,
            };
            worker.try_send(job).unwrap();
        };
        send(ReadBuffer::Slot(arena.write(slot, 4096).unwrap()));
        let wait = || done.recv_timeout(Duration::from_secs(10)).expect("an answer in time");
        assert!(matches!(wait(), NvmeDone::Gone { .. }));
        let NvmeDone::Read { buffer: None, result: Err(error), .. } = wait() else {
            panic!("no read");
        };
        assert!(error.is_device_gone());
        // The device is gone, and with it the hold on the slot.
        send(ReadBuffer::Slot(arena.write(slot, 4096).unwrap()));
        assert!(matches!(wait(), NvmeDone::Read { result: Err(NvmeError::Ended), .. }));
        for job in [
            NvmeJob::Open { segment: 0, sequence: 1, header: header(1) },
            NvmeJob::Sync { op: 1 },
            NvmeJob::Seal { segment: 0 },
        ] {
            worker.try_send(job).unwrap();
            wait();
        }
        assert_eq!(worker.jobs(), 0);
        worker.stop();
    }
}

#[test]
fn an_open_that_fails_or_panics_is_an_error_of_start() {
    let start = |open: Box<dyn FnOnce() -> io::Result<Box<dyn BlockDevice>> + Send>| {
        NvmeWorker::start(open, geometry(), SALT, options(), Box::new(drop)).unwrap_err()
    };
    assert_eq!(
        start(Box::new(|| Err(io::ErrorKind::NotFound.into()))).kind(),
        io::ErrorKind::NotFound
    );
    start(Box::new(|| panic!("the test's open panics")));
}

#[test]
fn a_stop_does_not_wait_for_a_stuck_device_for_ever() {
    let mut rig = rig(NvmeOptions { stop_timeout: Duration::from_millis(50), ..options() });
    rig.image.hold(true);
    rig.read(0, geometry().payload_start(), 4096, true);
    std::thread::sleep(Duration::from_millis(20));
    rig.read(0, geometry().payload_start(), 4096, true);
    let (done, _) = rig.stop();
    let reads = done.iter().filter(|done| matches!(done, NvmeDone::Read { .. })).count();
    assert_eq!(reads, 2, "{done:?}");
}

#[test]
fn an_idle_worker_uses_no_cpu() {
    let place: &'static Mutex<Option<std::path::PathBuf>> = Box::leak(Box::default());
    let inner = MemoryDevice::new(geometry().store_bytes() as usize, 2);
    let worker = NvmeWorker::start(
        move || {
            let link = std::fs::read_link("/proc/thread-self")?;
            *place.lock().unwrap() = Some(std::path::Path::new("/proc").join(link));
            Ok(Box::new(inner))
        },
        geometry(),
        SALT,
        NvmeOptions::default(),
        Box::new(drop),
    )
    .unwrap();
    let path = place.lock().unwrap().clone().unwrap().join("schedstat");
    let cpu = || {
        let text = std::fs::read_to_string(&path).unwrap();
        text.split_ascii_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    std::thread::sleep(Duration::from_millis(50));
    let before = cpu();
    std::thread::sleep(Duration::from_millis(500));
    assert!(cpu() - before < 5_000_000, "{} ns in half a second", cpu() - before);
    worker.stop();
}

#[derive(Clone, Debug)]
enum Act {
    Write,
    Seal,
    Erase(usize),
    Pause,
    Sync,
}

fn acts() -> impl Strategy<Value = Vec<(u32, Act)>> {
    let act = prop_oneof![
        12 => Just(Act::Write),
        1 => Just(Act::Seal),
        3 => any::<usize>().prop_map(Act::Erase),
        1 => Just(Act::Pause),
        1 => Just(Act::Sync),
    ];
    prop::collection::vec((0..SEGMENTS, act), 1..150)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever is asked, in whatever order: after every prefix of the device's writes, recovery
    /// finds only descriptors whose payload is there; every job is answered; and after the stop it
    /// finds exactly what was written and not erased.
    #[test]
    fn every_prefix_of_the_writes_is_sound(acts in acts()) {
        let few = NvmeOptions { commit_descriptors: 3, ..options() };
        let mut rig = rig(few);
        let mut lives: HashMap<u32, (u64, u32)> = HashMap::new();
        let mut alive: Vec<(u32, u64, u32)> = Vec::new();
        let mut sequence = 0;
        let mut jobs = 0;
        for (segment, act) in acts {
            jobs += 1;
            match act {
                Act::Write => {
                    let life = lives.entry(segment).or_insert_with(|| {
                        sequence += 1;
                        rig.open(segment, sequence);
                        jobs += 1;
                        (sequence, 0)
                    });
                    let (life, index) = (life.0, { life.1 += 1; life.1 - 1 });
                    if index < 64 {
                        alive.retain(|old| old.0 != segment || old.1 == life);
                        alive.push((segment, life, index));
                        rig.send_write(segment, life, index, 3000 + index * 50);
                    } else {
                        jobs -= 1;
                    }
                }
                Act::Seal => match lives.remove(&segment) {
                    Some(_) => rig.worker.try_send(NvmeJob::Seal { segment }).unwrap(),
                    None => jobs -= 1,
                },
                Act::Erase(at) if !alive.is_empty() => {
                    let (segment, sequence, index) = alive.swap_remove(at % alive.len());
                    let job = NvmeJob::Erase { segment, sequence, index };
                    rig.worker.try_send(job).unwrap();
                }
                Act::Sync => rig.worker.try_send(NvmeJob::Sync { op: 0 }).unwrap(),
                Act::Pause => {
                    jobs -= 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                Act::Erase(_) => jobs -= 1,
            }
        }
        wait_until(|| rig.worker.jobs() == 0);
        let (done, image) = rig.stop();
        prop_assert_eq!(done.len(), jobs);
        check_every_prefix(&image.log());
        let mut found: Vec<_> =
            recover(&image.bytes()).iter().map(|found| (found.0, found.1, found.2)).collect();
        found.sort_unstable();
        alive.sort_unstable();
        prop_assert_eq!(found, alive);
    }
}
