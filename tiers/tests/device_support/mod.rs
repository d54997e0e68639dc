//! What the tests of the device tier share: a worker with its answers, regions, and layouts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]
#![allow(dead_code, reason = "each test file uses its part")]

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod memory;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver};
use kvtide_tiers::block::{Plane, RegionLayout, Sum128};
use kvtide_tiers::catalog::{RegionId, SlotId};
use kvtide_tiers::io::{Arena, SlotRead, SlotWrite};
use kvtide_tiers::tier::device::{
    DeviceDone, DeviceJob, DeviceOptions, DeviceWorker, GatherTo, GpuError, OpenMemory, OpenRegion,
    ScatterFrom,
};

/// How long a test waits for what must come.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Memory of an engine, as its owner sees it.
pub(crate) trait EngineMemory {
    /// Copies bytes in.
    fn write(&self, bytes: &[u8]);
    /// All bytes.
    fn read(&self) -> Vec<u8>;
    /// What a daemon opens.
    fn share(&self) -> OpenMemory;
}

/// Makes workers and engine memory of one kind of GPU.
pub(crate) trait Maker {
    /// A worker with a pool and staging buffers of these sizes.
    fn worker(
        &self,
        pool_bytes: u64,
        staging_bytes: u64,
        arena: &Arc<Arena>,
        options: DeviceOptions,
        done: Box<dyn FnMut(DeviceDone) + Send>,
    ) -> DeviceWorker;
    /// Zeroed memory.
    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory>;
    /// Regions mapped in this process that the worker does not know of any more, if it is counted.
    fn mapped(&self) -> Option<usize> {
        None
    }
    /// Checks at the end of a test what only this kind of GPU knows.
    fn check(&self) {}
}

/// A worker, its answers, and an arena of slots.
pub(crate) struct Harness<M: Maker> {
    pub(crate) maker: M,
    pub(crate) worker: DeviceWorker,
    pub(crate) answers: Receiver<DeviceDone>,
    pub(crate) arena: Arc<Arena>,
    next_region: u64,
    next_op: u64,
}

pub(crate) const ARENA_SLAB: u32 = 4 << 20;
pub(crate) const SLOT_BYTES: u32 = 1 << 20;

impl<M: Maker> Harness<M> {
    pub(crate) fn new(maker: M) -> Harness<M> {
        Harness::with(maker, DeviceOptions::default())
    }

    pub(crate) fn with(maker: M, options: DeviceOptions) -> Harness<M> {
        let arena = Arena::create(4 * u64::from(ARENA_SLAB), ARENA_SLAB).unwrap();
        for slab in 0..arena.slabs() {
            arena.bind_slab(slab, SLOT_BYTES).unwrap();
        }
        let (tell, answers) = channel::unbounded();
        let done = Box::new(move |done| tell.send(done).unwrap());
        let worker = maker.worker(16 << 20, 2 << 20, &arena, options, done);
        Harness { maker, worker, answers, arena, next_region: 0, next_op: 0 }
    }

    /// The next answer.
    pub(crate) fn answer(&self) -> DeviceDone {
        self.answers.recv_timeout(SOON).expect("every job is answered")
    }

    /// Sends a job, and gives back its answer; nothing else must be under way.
    pub(crate) fn run(&self, job: DeviceJob) -> DeviceDone {
        self.worker.try_send(job).expect("there is room for one job");
        self.answer()
    }

    pub(crate) fn op(&mut self) -> u64 {
        self.next_op += 1;
        self.next_op
    }

    /// Opens memory with a layout, and events that do not exist.
    pub(crate) fn try_open(
        &mut self,
        memory: OpenMemory,
        bytes: u64,
        layout: RegionLayout,
    ) -> Result<RegionId, GpuError> {
        self.next_region += 1;
        let region = RegionId(self.next_region);
        let open = Box::new(OpenRegion { memory, bytes, layout, events: Vec::new() });
        match self.run(DeviceJob::Open { region, open }) {
            DeviceDone::Opened { region: other, result } if other == region => {
                result.map(|()| region)
            }
            other => panic!("{other:?}"),
        }
    }

    /// A region of fresh memory with random contents.
    pub(crate) fn region(&mut self, layout: &RegionLayout, seed: u64) -> TestRegion {
        let bytes = layout.region_bytes() + 1000;
        let memory = self.maker.memory(bytes);
        let contents = noise(bytes as usize, seed);
        memory.write(&contents);
        let id = self.try_open(memory.share(), bytes, layout.clone()).unwrap();
        TestRegion { id, memory, contents, layout: layout.clone() }
    }

    pub(crate) fn close(&self, region: RegionId) {
        match self.run(DeviceJob::Close { region }) {
            DeviceDone::Closed { region: other } => assert_eq!(other, region),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn gather_job(
        &mut self,
        region: &TestRegion,
        place: u32,
        to: GatherTo,
    ) -> DeviceJob {
        let (op, bytes) = (self.op(), region.block_bytes());
        DeviceJob::Gather { op, region: region.id, place, after_event: None, to, bytes }
    }

    pub(crate) fn gather(
        &mut self,
        region: &TestRegion,
        place: u32,
        to: GatherTo,
    ) -> Result<Sum128, GpuError> {
        let job = self.gather_job(region, place, to);
        match self.run(job) {
            DeviceDone::Gathered { op, result } if op == self.next_op => result,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn compare(&mut self, region: &TestRegion, place: u32) -> Result<Sum128, GpuError> {
        let (op, bytes) = (self.op(), region.block_bytes());
        let job = DeviceJob::Compare { op, region: region.id, place, after_event: None, bytes };
        match self.run(job) {
            DeviceDone::Compared { op: other, result } if op == other => result,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn scatter(
        &mut self,
        region: &TestRegion,
        place: u32,
        from: ScatterFrom,
        expected: Sum128,
    ) -> Result<(), GpuError> {
        let (op, bytes) = (self.op(), region.block_bytes());
        let region = region.id;
        let after_event = None;
        let job = DeviceJob::Scatter { op, region, place, after_event, from, expected, bytes };
        match self.run(job) {
            DeviceDone::Scattered { op: other, result } if op == other => result,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn demote(
        &mut self,
        slot: SlotId,
        to: SlotWrite,
        bytes: u32,
    ) -> Result<(), GpuError> {
        let op = self.op();
        match self.run(DeviceJob::Demote { op, slot, to, bytes }) {
            DeviceDone::Demoted { op: other, result } if op == other => result,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn host_write(&self, index: u32, bytes: u32) -> SlotWrite {
        self.arena.write(self.host_slot(index), bytes).unwrap()
    }

    pub(crate) fn host_read(&self, index: u32, bytes: u32) -> SlotRead {
        self.arena.read(self.host_slot(index), bytes).unwrap()
    }

    pub(crate) fn host_slot(&self, index: u32) -> SlotId {
        let per_slab = ARENA_SLAB / SLOT_BYTES;
        self.arena.slot(index / per_slab, index % per_slab).unwrap()
    }
}

/// A region, and what its memory should hold.
pub(crate) struct TestRegion {
    pub(crate) id: RegionId,
    pub(crate) memory: Box<dyn EngineMemory>,
    pub(crate) contents: Vec<u8>,
    pub(crate) layout: RegionLayout,
}

impl TestRegion {
    pub(crate) fn block_bytes(&self) -> u32 {
        self.layout.block_bytes() as u32
    }

    /// The payload of a place, byte by byte.
    pub(crate) fn payload(&self, place: u32) -> Vec<u8> {
        let mut out = Vec::new();
        for run in runs(&self.layout, place) {
            out.extend_from_slice(&self.contents[run]);
        }
        out
    }

    /// Says that a place should now hold these bytes.
    pub(crate) fn expect(&mut self, place: u32, payload: &[u8]) {
        let mut rest = payload;
        for run in runs(&self.layout, place) {
            let (part, behind) = rest.split_at(run.len());
            self.contents[run].copy_from_slice(part);
            rest = behind;
        }
        assert!(rest.is_empty());
    }

    /// Every byte of the memory is as it should be, those of no block included.
    pub(crate) fn assert_contents(&self, what: &str) {
        let found = self.memory.read();
        assert_eq!(found.len(), self.contents.len());
        let wrong = found.iter().zip(&self.contents).position(|(found, want)| found != want);
        assert_eq!(wrong, None, "{what}: the first wrong byte");
    }
}

fn runs(layout: &RegionLayout, place: u32) -> Vec<std::ops::Range<usize>> {
    let mut runs = Vec::new();
    for plane in &layout.planes {
        for row in 0..plane.rows {
            let start = plane.run_offset(place, row) as usize;
            runs.push(start..start + plane.row_bytes as usize);
        }
    }
    runs
}

/// Random bytes of a seed.
pub(crate) fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Planes one behind the other: K and V of each layer.
fn layered(layers: u64, blocks: u32, plane: impl Fn(u64) -> Plane, pad: u64) -> RegionLayout {
    let one = plane(0);
    let span = one.block_stride * u64::from(blocks) + pad;
    RegionLayout { blocks, planes: (0..layers * 2).map(|at| plane(at * span)).collect() }
}

/// The layouts that engines have, small; and some that only a test has.
pub(crate) fn layouts() -> Vec<(&'static str, RegionLayout)> {
    let dense = |bytes: u64| {
        move |offset| Plane {
            offset,
            block_stride: bytes,
            rows: 1,
            row_stride: bytes,
            row_bytes: bytes,
        }
    };
    // Heads outside of the pool's tokens: a row per head, far apart.
    let heads = |offset| Plane {
        offset,
        block_stride: 16 * 64 * 2 * 4,
        rows: 4,
        row_stride: 16 * 64 * 2,
        row_bytes: 16 * 64 * 2,
    };
    let gaps =
        |offset| Plane { offset, block_stride: 5 * 700, rows: 4, row_stride: 700, row_bytes: 618 };
    let outermost = |layers: u64, bytes: u64, blocks: u32| RegionLayout {
        blocks,
        planes: (0..layers)
            .map(|layer| Plane {
                offset: layer * bytes,
                block_stride: layers * bytes + 512,
                rows: 1,
                row_stride: bytes,
                row_bytes: bytes,
            })
            .collect(),
    };
    vec![
        ("GQA, 16 tokens", layered(8, 7, dense(16 * 8 * 128 * 2), 0)),
        ("GQA, 64 tokens, rows", layered(3, 5, heads, 4096)),
        ("MQA, 256 tokens", layered(2, 3, dense(256 * 128 * 2), 256)),
        ("MLA, opaque", RegionLayout::opaque(6, 64 * 576 * 2)),
        ("block-outermost", outermost(6, 16 * 2 * 128 * 2, 9)),
        ("odd rows with gaps", layered(2, 4, gaps, 13)),
        ("one odd byte run", RegionLayout::opaque(5, 1027)),
    ]
}

/// Waits until something holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < until, "{what} did not come to be");
        std::thread::sleep(Duration::from_millis(2));
    }
}
