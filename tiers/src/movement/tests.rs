//! What a block's slot is good for between the forgetting of the block and the end of the last
//! operation that reads it. The pool's jobs are carried out by hand, when a test says so.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam::channel::{Receiver, bounded, unbounded};

use super::conductor::{Ask, Conductor, Signal};
use super::host::{self, Kept};
use super::node::{catalog_config, shared_by_all};
use super::pool::{Job, PoolSender, Shared, work};
use super::{NodeConfig, gpus};
use crate::block::{BlockKey, DESCRIPTOR_BYTES, ElementType, NamespaceId, RegionLayout};
use crate::catalog::{
    Catalog, CodecChoice, Event, Forget, Hints, LeaseId, LoadBlock, MissReason, NamespaceInfo,
    Outcome, PrefixQuery, RegionId, Reply, Request, SessionId, SlotId, StoreBlock, TenantId, Tier,
};
use crate::io::{Arena, ArenaFiles, Region, SharedMemory};

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

    /// Stores a block that is a chain of its own.
    fn store(&mut self, number: u8) {
        self.memory.write_at(0, &payload(number)).unwrap();
        let (namespace, region, hints) = (NAMESPACE, REGION, Hints::default());
        let parent = BlockKey::ROOT;
        let blocks =
            vec![StoreBlock { key: key(number), parent, position: 0, tokens: 16, place: 0 }];
        let (conversation, after_event) = (0, None);
        self.ask(Request::Store { namespace, conversation, region, after_event, blocks, hints });
        self.copy_all();
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
