//! A whole node with a GPU in memory: blocks of one engine's paged pool, in every layout that
//! engines use, are kept in GPU memory, copied down to host RAM and nvme, and come back into the
//! pool of another engine after a restart, byte for byte.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failing helper fails the test")]

use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use kvtide_tiers::block::{
    BlockKey, ElementType, GpuOrder, GpuUuid, NamespaceId, Plane, RegionLayout,
};
use kvtide_tiers::catalog::{
    CatalogStats, CodecChoice, Drained, Hints, LoadBlock, NamespaceInfo, Outcome, PrefixQuery,
    RegionId, Reply, Request, SessionId, StoreBlock, TenantId, TicketId, Tier,
};
use kvtide_tiers::io::{RingChoice, SharedMemory};
use kvtide_tiers::movement::{
    DeviceConfig, GpuChoice, GpuMaker, GpuRegion, Node, NodeConfig, NodeHandle, NvmeConfig,
    RegisterError,
};
use kvtide_tiers::tier::device::{MemoryGpu, MemoryGpuControl, MemoryGpuOptions, OpenMemory};

const GPU: GpuUuid = GpuUuid([0xfa; 16]);
const NAMESPACE: NamespaceId = NamespaceId(1);
const PLACES: u32 = 6;

/// A pool of 32 layers, 8 KV heads of 128 bf16 values, and the like, in the orders of engines.
fn layouts(tokens: u64) -> Vec<(&'static str, RegionLayout)> {
    let token = 128 * 2;
    // Heads outermost within a block, with room for a row of scales behind each.
    let rows = |at: u64| Plane {
        offset: at * u64::from(PLACES) * 8 * (tokens * token + 512),
        block_stride: 8 * (tokens * token + 512),
        rows: 8,
        row_stride: tokens * token + 512,
        row_bytes: tokens * token,
    };
    vec![
        ("gqa, K and V planes of 32 layers", RegionLayout::layered(PLACES, 64, tokens * 8 * token)),
        ("mqa, one head", RegionLayout::layered(PLACES, 64, tokens * token)),
        ("mla, one opaque plane a layer", RegionLayout::layered(PLACES, 27, tokens * 576 * 2)),
        ("block-outermost", RegionLayout::opaque(PLACES, 64 * tokens * 8 * token)),
        ("heads as rows", RegionLayout { blocks: PLACES, planes: (0..8).map(rows).collect() }),
    ]
}

fn config(folder: &Path, pool_bytes: u64) -> (NodeConfig, Arc<Mutex<Option<MemoryGpuControl>>>) {
    let mut config = NodeConfig::new(384 << 20);
    config.host.slab_bytes = Some(64 << 20);
    config.idle_ms = 20;
    let mut nvme = NvmeConfig::new(folder.join("segments.kvt"), 768 << 20);
    nvme.segment_bytes = Some(128 << 20);
    nvme.ring = RingChoice::Blocking;
    config.nvme = Some(nvme);
    let control = Arc::new(Mutex::new(None));
    let theirs = Arc::clone(&control);
    let maker = GpuMaker(Arc::new(move |pool_bytes, _| {
        let options =
            MemoryGpuOptions { pool_bytes, staging_bytes: 64 << 20, ..MemoryGpuOptions::default() };
        let (gpu, control) = MemoryGpu::new(options);
        *theirs.lock().unwrap() = Some(control);
        Ok(Box::new(gpu))
    }));
    config.devices.push(DeviceConfig { gpu: GpuChoice::Made(maker), pool_bytes, library: None });
    (config, control)
}

/// An engine with a paged pool in GPU memory.
struct Engine {
    handle: NodeHandle,
    session: SessionId,
    region: RegionId,
    memory: SharedMemory,
    layout: RegionLayout,
    tickets: mpsc::Receiver<(TicketId, Vec<Outcome>)>,
}

fn key(number: u32) -> BlockKey {
    let mut key = [9; 32];
    key[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(key)
}

fn payload(number: u32, bytes: usize) -> Vec<u8> {
    let mut state = u64::from(number) * 2 + 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        out.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    out.truncate(bytes);
    out
}

impl Engine {
    fn connect(node: &Node, layout: &RegionLayout) -> Engine {
        let handle = node.handle();
        handle.add_namespace(NamespaceInfo {
            id: NAMESPACE,
            generation: 1,
            tenant: TenantId(1),
            codec: CodecChoice::Raw,
            element: ElementType::Bf16,
            narrow: None,
        });
        let (send, tickets) = mpsc::channel();
        let notify = Arc::new(move |ticket, outcomes| drop(send.send((ticket, outcomes))));
        let session = handle.open_session(TenantId(1), notify).unwrap();
        let memory = SharedMemory::create("engine", layout.region_bytes()).unwrap();
        let region = register(&handle, session, &memory, layout).unwrap();
        Engine { handle, session, region, memory, layout: layout.clone(), tickets }
    }

    fn block_bytes(&self) -> usize {
        self.layout.block_bytes() as usize
    }

    /// The runs of a place: offset in the pool, and bytes.
    fn runs(&self, place: u32) -> Vec<(u64, usize)> {
        let run = |plane: &Plane, row| (plane.run_offset(place, row), plane.row_bytes as usize);
        let runs = |plane: &Plane| (0..plane.rows).map(|row| run(plane, row)).collect::<Vec<_>>();
        self.layout.planes.iter().flat_map(runs).collect()
    }

    fn write(&self, place: u32, bytes: &[u8]) {
        let mut at = 0;
        for (offset, len) in self.runs(place) {
            self.memory.write_at(offset, &bytes[at..at + len]).unwrap();
            at += len;
        }
    }

    fn read(&self, place: u32) -> Vec<u8> {
        let mut out = vec![0; self.block_bytes()];
        let mut at = 0;
        for (offset, len) in self.runs(place) {
            self.memory.read_at(offset, &mut out[at..at + len]).unwrap();
            at += len;
        }
        out
    }

    fn ask(&self, request: Request) -> Reply {
        let (send, answer) = mpsc::channel();
        self.handle.ask(self.session, request, move |reply| drop(send.send(reply)));
        answer.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    fn wait(&self, reply: Reply) -> Vec<Outcome> {
        let Reply::Ticket(ticket) = reply else { panic!("{reply:?}") };
        let (ended, outcomes) = self.tickets.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(ended, ticket);
        outcomes
    }

    /// Stores blocks, block `n` from place `5 - n` (a paged pool is in no order).
    fn store(&self, numbers: std::ops::Range<u32>) -> Vec<Outcome> {
        let mut blocks = vec![];
        for (number, position) in numbers.zip(0..) {
            let place = PLACES - 1 - position;
            self.write(place, &payload(number, self.block_bytes()));
            let parent = if position == 0 { BlockKey::ROOT } else { key(number - 1) };
            blocks.push(StoreBlock { key: key(number), parent, position, tokens: 16, place });
        }
        let (namespace, region, conversation) = (NAMESPACE, self.region, 0);
        let (after_event, hints) = (None, Hints::default());
        self.wait(self.ask(Request::Store {
            namespace,
            conversation,
            region,
            after_event,
            blocks,
            hints,
        }))
    }

    /// Loads what is there, block `n` to place `n`, and compares every byte.
    fn load(&self, numbers: std::ops::Range<u32>) -> Vec<Outcome> {
        let prefix = PrefixQuery { namespace: NAMESPACE, keys: numbers.clone().map(key).collect() };
        let found = self.ask(Request::Lookup {
            prefixes: vec![prefix],
            lease_ms: 60_000,
            hints: Hints::default(),
        });
        let Reply::Lookup(found) = found else { panic!("{found:?}") };
        let Some(lease) = found.lease else { return vec![] };
        let numbers: Vec<u32> = numbers.take(found.blocks as usize).collect();
        for place in 0..PLACES {
            self.write(place, &vec![0xAA; self.block_bytes()]);
        }
        let blocks = numbers.iter().zip(0..);
        let blocks = blocks.map(|(n, place)| LoadBlock { key: key(*n), place }).collect();
        let (namespace, region, after_event) = (NAMESPACE, self.region, None);
        let hints = Hints::default();
        let load = Request::Load { lease, namespace, region, after_event, blocks, hints };
        let outcomes = self.wait(self.ask(load));
        for ((number, outcome), place) in numbers.iter().zip(&outcomes).zip(0..) {
            let whole = self.read(place) == payload(*number, self.block_bytes());
            assert_eq!(whole, matches!(outcome, Outcome::Loaded(_)), "block {number}: {outcome:?}");
        }
        self.ask(Request::Release { lease });
        outcomes
    }

    fn stats(&self) -> CatalogStats {
        match self.ask(Request::Stats) {
            Reply::Stats(stats) => *stats,
            other => panic!("{other:?}"),
        }
    }

    fn drain(&self) {
        let drained = self.ask(Request::Drain { deadline_ms: None });
        assert!(matches!(drained, Reply::Drained(Drained { blocks_lost: 0, .. })), "{drained:?}");
    }
}

fn register(
    handle: &NodeHandle,
    session: SessionId,
    memory: &SharedMemory,
    layout: &RegionLayout,
) -> Result<RegionId, RegisterError> {
    let shared = SharedMemory::from_fd(memory.fd().try_clone_to_owned().unwrap()).unwrap();
    let region = GpuRegion {
        gpu: GPU,
        bytes: memory.bytes(),
        memory: OpenMemory::Shared(shared),
        layout: layout.clone(),
        order: GpuOrder::EngineSynchronizes,
    };
    let (send, answer) = mpsc::channel();
    handle.register_gpu_region(session, region, move |result| drop(send.send(result)));
    answer.recv_timeout(Duration::from_secs(20)).unwrap()
}

#[test]
fn every_layout_survives_the_way_down_a_restart_and_the_way_up() {
    for tokens in [16, 64, 256] {
        for (name, layout) in layouts(tokens) {
            let folder = tempfile::tempdir().unwrap();
            let (cfg, _) = config(folder.path(), 128 << 20);
            let node = Node::start(cfg, |_| Some(1)).unwrap();
            let first = Engine::connect(&node, &layout);
            let stored = first.store(0..4);
            assert_eq!(stored, [Outcome::Stored; 4], "{name}, {tokens} tokens");
            let other = Engine::connect(&node, &layout);
            let loaded = other.load(0..4);
            assert!(loaded.contains(&Outcome::Loaded(Tier::Device)), "{name}: {loaded:?}");
            first.drain();
            node.stop();

            let (cfg, _) = config(folder.path(), 128 << 20);
            let node = Node::start(cfg, |_| Some(1)).unwrap();
            let second = Engine::connect(&node, &layout);
            let loaded = second.load(0..4);
            assert_eq!(loaded, [Outcome::Loaded(Tier::Nvme); 4], "{name}, {tokens} tokens");
            // Hit twice: on their way up they are kept in the pool, and then come from there.
            second.load(0..4);
            let loaded = second.load(0..4);
            assert_eq!(loaded, [Outcome::Loaded(Tier::Device); 4], "{name}, {tokens} tokens");
            node.stop();
        }
    }
}

#[test]
fn a_pool_of_no_bytes_passes_blocks_through() {
    let folder = tempfile::tempdir().unwrap();
    let (cfg, _) = config(folder.path(), 0);
    let node = Node::start(cfg, |_| Some(1)).unwrap();
    let layout = RegionLayout::layered(PLACES, 8, 4096);
    let engine = Engine::connect(&node, &layout);
    assert_eq!(engine.store(0..4), [Outcome::Stored; 4]);
    for _ in 0..3 {
        assert_eq!(engine.load(0..4), [Outcome::Loaded(Tier::Host); 4]);
    }
    assert_eq!(engine.stats().device[0].blocks, 0);
    assert_eq!(engine.store(0..4), [Outcome::Present; 4]);
    node.stop();
}

#[test]
fn a_lost_gpu_takes_its_regions_and_leaves_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let (cfg, control) = config(folder.path(), 64 << 20);
    let node = Node::start(cfg, |_| Some(1)).unwrap();
    let layout = RegionLayout::layered(PLACES, 8, 4096);
    let engine = Engine::connect(&node, &layout);
    assert_eq!(engine.store(0..4), [Outcome::Stored; 4]);
    while engine.stats().host.blocks < 4 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let lost = kvtide_tiers::tier::device::GpuError::Lost("error 719".into());
    control.lock().unwrap().as_ref().unwrap().fail_end(0, lost);
    assert!(engine.load(0..4).iter().all(|o| matches!(o, Outcome::Missed(_))));
    assert!(engine.stats().device[0].offline.is_some());
    let report = node.handle().report();
    assert!(report.devices[0].off.as_ref().unwrap().contains("719"), "{report:?}");
    let refused = register(&engine.handle, engine.session, &engine.memory, &layout);
    assert!(matches!(refused, Err(RegisterError::TierOff(_))), "{refused:?}");
    engine.drain();
    node.stop();
}

#[test]
fn a_close_that_hangs_holds_up_nobody_and_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let (cfg, control) = config(folder.path(), 64 << 20);
    let node = Node::start(cfg, |_| Some(1)).unwrap();
    let layout = RegionLayout::layered(PLACES, 8, 4096);
    let (dead, alive) = (Engine::connect(&node, &layout), Engine::connect(&node, &layout));
    control.lock().unwrap().as_ref().unwrap().set_closes_hang(true);
    let (send, closed) = mpsc::channel();
    let closing = move || send.send(()).unwrap();
    dead.handle.unregister_gpu_region(dead.session, dead.region, closing);
    assert!(closed.recv_timeout(Duration::from_millis(300)).is_err());
    dead.handle.close_session(dead.session);
    for number in 0..20 {
        assert_eq!(alive.store(number * 10..number * 10 + 4), [Outcome::Stored; 4]);
        assert_eq!(alive.load(number * 10..number * 10 + 4).len(), 4);
    }
    control.lock().unwrap().as_ref().unwrap().set_closes_hang(false);
    closed.recv_timeout(Duration::from_secs(20)).unwrap();
    node.stop();
}
