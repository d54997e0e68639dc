//! What a block's slot is good for between the forgetting of the block and the end of the last
//! operation that reads or fills it. The pool's jobs are carried out by hand, when a test says so.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam::channel::{Receiver, bounded, unbounded};

use super::NodeConfig;
use super::conductor::{Ask, Conductor, Signal};
use super::gpus::{self, Landing, Landings};
use super::host::{self, Kept};
use super::node::{catalog_config, shared_by_all};
use super::pool::{Job, PoolSender, ReadContext, Shared, work};
use crate::block::{
    BlockKey, Codec, DESCRIPTOR_BYTES, Descriptor, DescriptorError, ElementType, NamespaceId,
    Place, RegionLayout, Sum128,
};
use crate::catalog::{
    Catalog, CodecChoice, Event, Forget, GpuId, Hints, LeaseId, LoadBlock, MissReason,
    NamespaceInfo, OpId, Outcome, PrefixQuery, RegionId, RejectReason, Reply, Request, SessionId,
    SlotId, StoreBlock, TenantId, Tier,
};
use crate::io::{AlignedBuf, Arena, ArenaFiles, Region, SharedMemory};
use crate::tier::device::DeviceDone;
use crate::tier::nvme::ReadBuffer;

const NAMESPACE: NamespaceId = NamespaceId(1);
const SESSION: SessionId = SessionId(1);
const REGION: RegionId = RegionId(1);
const BLOCK: u64 = 8 << 10;
const PLACES: u32 = 4;

fn key(number: u8) -> BlockKey {
    BlockKey([number; 32])
}

fn payload(number: u8) -> Vec<u8> {
    (0..BLOCK).map(|at| (at as u8).wrapping_mul(31).wrapping_add(number)).collect()
}

fn config() -> NodeConfig {
    let mut config = NodeConfig::new(1 << 20);
    config.host.slab_bytes = Some(256 << 10);
    config
}

/// A catalog and its conductor, with a client, and with nobody at the pool.
struct Desk {
    conductor: Conductor,
    shared: Arc<Shared>,
    jobs: Receiver<Job>,
    memory: SharedMemory,
    ended: Arc<Mutex<Vec<Outcome>>>,
}

impl Desk {
    fn new(catalog: Catalog, arena: &Arc<Arena>) -> Desk {
        let shared = shared_by_all(arena, None);
        let (job_sender, jobs) = bounded(64);
        let (signal_sender, signals) = unbounded();
        let (gpus, _) = gpus::start(&[], &shared, &signal_sender);
        let conductor = Conductor {
            catalog,
            started: Instant::now(),
            asks: bounded(1).1,
            signals,
            refused: Vec::new(),
            pool: PoolSender(Some(job_sender)),
            shared: Arc::clone(&shared),
            device: None,
            gpus,
            answers: Default::default(),
            next_ask: 0,
            sessions: Default::default(),
            regions: Default::default(),
            backlog: Default::default(),
            follow: None,
            reaper: unbounded().0,
            last_tick: Instant::now(),
            stopping: false,
        };
        let memory = SharedMemory::create("test", u64::from(PLACES) * BLOCK).unwrap();
        let theirs = SharedMemory::from_fd(memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let region = Region::new(theirs, RegionLayout::opaque(PLACES, BLOCK)).unwrap();
        let ended: Arc<Mutex<Vec<Outcome>>> = Arc::default();
        let mut desk = Desk { conductor, shared, jobs, memory, ended: Arc::clone(&ended) };
        desk.conductor.signal(Signal::Event(Event::Namespace(NamespaceInfo {
            id: NAMESPACE,
            generation: 1,
            tenant: TenantId(1),
            codec: CodecChoice::Raw,
            element: ElementType::Bf16,
            narrow: None,
        })));
        let notify = Arc::new(move |_, outcomes| {
            ended.lock().unwrap_or_else(PoisonError::into_inner).extend(outcomes);
        });
        let (session, tenant) = (SESSION, TenantId(1));
        desk.conductor.signal(Signal::OpenSession { session, tenant, notify });
        let memory = Arc::new(region);
        desk.conductor.signal(Signal::OpenRegion { session, region: REGION, memory });
        desk
    }

    fn fresh() -> Desk {
        let config = config();
        let (bytes, slab_bytes) = (config.host.bytes, config.host.slab());
        let arena = Arena::create_shared(bytes, slab_bytes).unwrap();
        Desk::new(Catalog::new(catalog_config(&config, bytes, None)), &arena)
    }

    /// The daemon ends where it stands, and the next one takes its memory over.
    fn crash(self) -> (Desk, Kept) {
        let (memory, table) = self.shared.arena.files().unwrap();
        let clone = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        let files = ArenaFiles { memory: clone(memory), table: clone(table) };
        drop(self);
        let config = config();
        let (bytes, slab_bytes) = (config.host.bytes, config.host.slab());
        let arena = Arena::adopt(&files, bytes, slab_bytes).unwrap();
        let mut catalog = Catalog::new(catalog_config(&config, bytes, None));
        let kept = host::adopt(&mut catalog, &arena, Kept::default(), &|_| Some(1));
        (Desk::new(catalog, &arena), kept)
    }

    fn ask(&mut self, request: Request) -> Reply {
        let (send, answer) = bounded(1);
        let answers = Box::new(move |reply| drop(send.send(reply)));
        self.conductor.ask(Ask { session: SESSION, request, answer: answers });
        answer.try_recv().unwrap()
    }

    /// Carries out what the pool has to do.
    fn copy_all(&mut self) {
        while let Ok(job) = self.jobs.try_recv() {
            if let Some(event) = work(job, &self.shared, &mut Vec::new()) {
                self.conductor.signal(Signal::Event(event));
            }
        }
    }

    fn outcomes(&self) -> Vec<Outcome> {
        std::mem::take(&mut *self.ended.lock().unwrap())
    }

    /// Begins to store a block that is a chain of its own. The pool is to copy it: the job.
    fn begin_store(&mut self, number: u8) -> Job {
        self.memory.write_at(0, &payload(number)).unwrap();
        let (namespace, region, hints) = (NAMESPACE, REGION, Hints::default());
        let parent = BlockKey::ROOT;
        let blocks =
            vec![StoreBlock { key: key(number), parent, position: 0, tokens: 16, place: 0 }];
        let (conversation, after_event) = (0, None);
        self.ask(Request::Store { namespace, conversation, region, after_event, blocks, hints });
        self.jobs.try_recv().unwrap()
    }

    /// Carries a job out. Nobody hears of it yet.
    fn copy(&self, job: Job) -> Event {
        work(job, &self.shared, &mut Vec::new()).unwrap()
    }

    fn store(&mut self, number: u8) {
        let job = self.begin_store(number);
        let stored = self.copy(job);
        self.conductor.signal(Signal::Event(stored));
        assert_eq!(self.outcomes(), [Outcome::Stored]);
    }

    fn lookup(&mut self, number: u8) -> Option<LeaseId> {
        let prefixes = vec![PrefixQuery { namespace: NAMESPACE, keys: vec![key(number)] }];
        let hints = Hints::default();
        match self.ask(Request::Lookup { prefixes, lease_ms: 10_000, hints }) {
            Reply::Lookup(found) => found.lease,
            other => panic!("{other:?}"),
        }
    }

    /// Begins to load a block to a place; the pool is to copy it.
    fn begin_load(&mut self, number: u8, place: u32) {
        let lease = self.lookup(number).unwrap();
        let blocks = vec![LoadBlock { key: key(number), place }];
        let (namespace, region, hints) = (NAMESPACE, REGION, Hints::default());
        let load = Request::Load { lease, namespace, region, after_event: None, blocks, hints };
        assert!(matches!(self.ask(load), Reply::Ticket(_)));
    }

    fn forget(&mut self, number: u8) {
        let keys = vec![key(number)];
        let forgotten = self.ask(Request::Forget(Forget::Keys { namespace: NAMESPACE, keys }));
        assert!(matches!(forgotten, Reply::Count(1)), "{forgotten:?}");
    }

    fn has(&self, place: u32, number: u8) -> bool {
        let mut bytes = vec![0; BLOCK as usize];
        self.memory.read_at(u64::from(place) * BLOCK, &mut bytes).unwrap();
        bytes == payload(number)
    }

    fn described_slots(&self) -> Vec<(SlotId, [u8; DESCRIPTOR_BYTES])> {
        self.shared.arena.kept_slabs().into_iter().flat_map(|slab| slab.slots).collect()
    }

    fn corrupt(&mut self) -> u64 {
        match self.ask(Request::Stats) {
            Reply::Stats(stats) => stats.corrupt,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_block_that_is_forgotten_before_its_copy_begins_is_loaded_all_the_same() {
    let mut desk = Desk::fresh();
    desk.store(1);
    desk.begin_load(1, 2);
    desk.begin_load(1, 3);
    desk.forget(1);
    assert!(desk.lookup(1).is_none(), "nobody else finds it");
    assert_eq!(desk.outcomes(), []);
    desk.copy_all();
    assert_eq!(desk.outcomes(), [Outcome::Loaded(Tier::Host); 2]);
    assert!(desk.has(2, 1) && desk.has(3, 1));
    assert_eq!(desk.corrupt(), 0);
    assert_eq!(desk.described_slots(), [], "its readers are done");

    // Its slot is as good as any other for the next block, also for the next daemon.
    desk.store(2);
    let (mut next, kept) = desk.crash();
    assert_eq!((kept.blocks, kept.dropped), (1, 0));
    assert!(next.lookup(1).is_none());
    next.begin_load(2, 1);
    next.copy_all();
    assert_eq!(next.outcomes(), [Outcome::Loaded(Tier::Host)]);
    assert!(next.has(1, 2));
}

#[test]
fn a_block_that_is_forgotten_while_it_waits_to_be_copied_is_gone_after_a_crash() {
    let mut desk = Desk::fresh();
    desk.store(1);
    desk.store(2);
    desk.begin_load(1, 2);
    desk.forget(1);
    assert_eq!(desk.described_slots().len(), 2, "the load still needs its descriptor");
    let (mut next, kept) = desk.crash();
    // It was forgotten, not lost.
    assert_eq!((kept.blocks, kept.dropped), (1, 0));
    assert_eq!(next.described_slots().len(), 1);
    assert!(next.lookup(1).is_none());
    next.begin_load(2, 1);
    next.copy_all();
    assert_eq!(next.outcomes(), [Outcome::Loaded(Tier::Host)]);
    assert!(next.has(1, 2));
}

/// When, in the life of a store, its block is forgotten.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Forgotten {
    Never,
    /// Before the block was copied.
    Before,
    /// Once it was copied, before the catalog heard of that.
    After,
    /// Before it was copied, which the crash came before.
    NotCopied,
}

/// Nobody hears of the copy that ends after the block was forgotten: the daemon ends first. It is
/// the same for one that stops while blocks wait to be copied.
#[test]
fn a_block_that_is_forgotten_while_it_is_copied_in_is_gone_after_a_crash() {
    use Forgotten::{After, Before, Never, NotCopied};
    for (when, blocks) in [(Never, 1), (Before, 0), (After, 0), (NotCopied, 0)] {
        let mut desk = Desk::fresh();
        let mut job = Some(desk.begin_store(1));
        if when == After {
            desk.copy(job.take().unwrap());
        }
        if when != Never {
            desk.forget(1);
        }
        if when != NotCopied
            && let Some(job) = job
        {
            let copied = desk.copy(job);
            assert!(matches!(copied, Event::Gathered { result: Ok(_), .. }), "{copied:?}");
        }
        let (mut next, kept) = desk.crash();
        // What was forgotten was not lost.
        assert_eq!((kept.blocks, kept.dropped), (blocks, 0), "{when:?}");
        assert_eq!(next.described_slots().len() as u64, blocks, "{when:?}");
        assert_eq!(next.lookup(1).is_some(), blocks == 1, "{when:?}");
    }
}

#[test]
fn a_slot_whose_block_was_forgotten_while_it_was_copied_in_is_as_good_as_any_other() {
    let mut desk = Desk::fresh();
    let job = desk.begin_store(1);
    desk.forget(1);
    let copied = desk.copy(job);
    let slot_of = |desk: &Desk| desk.described_slots()[0].0;
    let slot = slot_of(&desk);
    desk.conductor.signal(Signal::Event(copied));
    assert_eq!(desk.outcomes(), [Outcome::Rejected(RejectReason::Gone)]);
    assert_eq!(desk.described_slots(), []);

    desk.store(1);
    assert_eq!(slot_of(&desk), slot);
    let (mut next, kept) = desk.crash();
    assert_eq!((kept.blocks, kept.dropped), (1, 0));
    next.begin_load(1, 2);
    next.copy_all();
    assert_eq!(next.outcomes(), [Outcome::Loaded(Tier::Host)]);
    assert!(next.has(2, 1));
}

/// A client's copy is in the tests above; these are the other ways.
#[test]
fn what_a_read_or_a_gpu_brings_stays_disowned_too() {
    let desk = Desk::fresh();
    let (arena, salt) = (&desk.shared.arena, desk.shared.salt);
    arena.bind_slab(0, BLOCK as u32).unwrap();
    let sum = Sum128::of(&payload(1));
    let descriptor = Box::new(Descriptor { raw_sum: sum, stored_sum: sum, ..described() });
    let on_gpu = |done: DeviceDone, slot: SlotId| {
        let landing = Landing { slot, descriptor: descriptor.clone() };
        let landings = Landings::new(Mutex::new([(7, landing)].into()));
        gpus::device_done(GpuId(0), done, &landings, &desk.shared, &unbounded().0);
    };
    let read = |slot: SlotId| {
        let (descriptor, element) = (descriptor.clone(), ElementType::Bf16);
        let read = ReadContext { slot, descriptor, element };
        let buffer = ReadBuffer::Pages(AlignedBuf::of(&payload(1)));
        desk.copy(Job::Verify { op: OpId(7), read, buffer });
    };
    let ways: [(&str, &dyn Fn(SlotId)); 3] = [
        ("read", &read),
        ("gather", &|slot| on_gpu(DeviceDone::Gathered { op: 7, result: Ok(sum) }, slot)),
        ("demote", &|slot| on_gpu(DeviceDone::Demoted { op: 7, result: Ok(()) }, slot)),
    ];
    for (index, (name, fill)) in (0..).zip(ways) {
        let slot = arena.slot(0, index).unwrap();
        let here = Place::Host { salt, slot: slot.0 };
        let found = || Descriptor::decode(&arena.descriptor(slot).unwrap(), here);
        arena.disown(slot).unwrap();
        fill(slot);
        assert_eq!(found(), Err(DescriptorError::Disowned), "{name}");
        let bytes = arena.descriptor(slot).unwrap();
        assert_eq!(Descriptor::decode_in_use(&bytes, here).as_ref(), Ok(&*descriptor), "{name}");
        arena.set_descriptor(slot, &[0; DESCRIPTOR_BYTES]).unwrap();
        fill(slot);
        assert_eq!(found().as_ref(), Ok(&*descriptor), "{name}");
    }
}

/// A block's descriptor in host RAM, but for its checksums.
fn described() -> Descriptor {
    Descriptor {
        codec: Codec::Raw,
        narrow: None,
        namespace: NAMESPACE,
        generation: 1,
        key: key(1),
        parent: BlockKey::ROOT,
        position: 0,
        tokens: 16,
        raw_bytes: BLOCK as u32,
        stored_bytes: BLOCK as u32,
        raw_sum: Sum128([0; 16]),
        stored_sum: Sum128([0; 16]),
        sequence: 1,
        segment: 0,
        segment_sequence: 0,
        offset: 0,
        created_s: 1,
        session: 0,
    }
}

/// What is reported bad is still compared with its checksum for those who had asked before.
#[test]
fn a_block_that_is_reported_bad_and_is_bad_is_a_miss_for_those_who_wait_for_it() {
    let mut desk = Desk::fresh();
    desk.store(1);
    let (slot, _) = desk.described_slots()[0];
    desk.shared.arena.flip_bit(slot, 100, 0).unwrap();
    desk.begin_load(1, 2);
    let keys = vec![key(1)];
    desk.ask(Request::ReportBad { namespace: NAMESPACE, keys });
    desk.copy_all();
    assert_eq!(desk.outcomes(), [Outcome::Missed(MissReason::Checksum)]);
    assert!(!desk.has(2, 1));
    assert_eq!(desk.described_slots(), []);
}
