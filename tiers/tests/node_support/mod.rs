//! A client of a node inside the test's own process: real memory, real store file, no socket.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failing helper fails the test")]
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test uses a part of it")]

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use kvtide_tiers::block::{BlockKey, ElementType, NamespaceId, RegionLayout};
use kvtide_tiers::catalog::{
    CatalogStats, CodecChoice, Drained, Hints, LoadBlock, LookupReply, NamespaceInfo, Outcome,
    PrefixQuery, RegionId, Reply, Request, SessionId, StoreBlock, TenantId, TicketId,
};
use kvtide_tiers::io::{Region, RingChoice, SharedMemory};
use kvtide_tiers::movement::{Node, NodeConfig, NodeHandle, NvmeConfig};

pub const NAMESPACE: NamespaceId = NamespaceId(1);
pub const BLOCK: u64 = 64 << 10;

/// A client inside the test's process.
pub struct Client {
    pub handle: NodeHandle,
    pub session: SessionId,
    pub region: RegionId,
    pub memory: SharedMemory,
    tickets: mpsc::Receiver<(TicketId, Vec<Outcome>)>,
}

pub fn config(folder: &Path, ring: RingChoice) -> NodeConfig {
    let mut config = NodeConfig::new(8 << 20);
    config.host.slab_bytes = Some(2 << 20);
    config.idle_ms = 50;
    let mut nvme = NvmeConfig::new(folder.join("segments.kvt"), 64 << 20);
    nvme.ring = ring;
    config.nvme = Some(nvme);
    config
}

pub fn key(number: u32) -> BlockKey {
    let mut key = [7; 32];
    key[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(key)
}

/// bf16-like bytes that follow from the number.
pub fn payload(number: u32) -> Vec<u8> {
    let mut state = u64::from(number) + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u32
    };
    (0..BLOCK / 2)
        .flat_map(|_| {
            let draw = next();
            let value = (f32::from(draw as u16) - 32768.0) / 20000.0;
            ((value.to_bits() >> 16) as u16).to_le_bytes()
        })
        .collect()
}

impl Client {
    pub fn connect(node: &Node, codec: CodecChoice) -> Client {
        let handle = node.handle();
        handle.add_namespace(NamespaceInfo {
            id: NAMESPACE,
            generation: 1,
            tenant: TenantId(1),
            codec,
            element: ElementType::Bf16,
            narrow: None,
        });
        let (send, tickets) = mpsc::channel();
        let notify = Arc::new(move |ticket, outcomes| drop(send.send((ticket, outcomes))));
        let session = handle.open_session(TenantId(1), notify).unwrap();
        let memory = SharedMemory::create("test", 64 * BLOCK).unwrap();
        let theirs = SharedMemory::from_fd(memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let region = Region::new(theirs, RegionLayout::opaque(64, BLOCK)).unwrap();
        let region = handle.register_region(session, region).unwrap();
        Client { handle, session, region, memory, tickets }
    }

    pub fn ask(&self, request: Request) -> Reply {
        let (send, answer) = mpsc::channel();
        self.handle.ask(self.session, request, move |reply| drop(send.send(reply)));
        answer.recv_timeout(Duration::from_secs(20)).unwrap()
    }

    pub fn wait(&self, reply: Reply) -> Vec<Outcome> {
        let Reply::Ticket(ticket) = reply else { panic!("{reply:?}") };
        let (ended, outcomes) = self.tickets.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(ended, ticket);
        outcomes
    }

    pub fn store(&self, numbers: std::ops::Range<u32>) -> Vec<Outcome> {
        let mut blocks = vec![];
        for (number, place) in numbers.clone().zip(0..) {
            self.memory.write_at(u64::from(place) * BLOCK, &payload(number)).unwrap();
            let first = number == numbers.start;
            let parent = if first { BlockKey::ROOT } else { key(number - 1) };
            let position = number - numbers.start;
            blocks.push(StoreBlock { key: key(number), parent, position, tokens: 16, place });
        }
        let (namespace, region) = (NAMESPACE, self.region);
        self.wait(self.ask(Request::Store {
            namespace,
            conversation: 0,
            region,
            after_event: None,
            blocks,
            hints: Hints::default(),
        }))
    }

    /// Stores until there was room for every block.
    pub fn store_all(&self, numbers: std::ops::Range<u32>) {
        for _ in 0..2000 {
            let outcomes = self.store(numbers.clone());
            if outcomes.iter().all(|o| matches!(o, Outcome::Stored | Outcome::Present)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("no room for {numbers:?} within ten seconds");
    }

    pub fn lookup(&self, numbers: std::ops::Range<u32>) -> LookupReply {
        let prefix = PrefixQuery { namespace: NAMESPACE, keys: numbers.map(key).collect() };
        match self.ask(Request::Lookup {
            prefixes: vec![prefix],
            lease_ms: 10_000,
            hints: Hints::default(),
        }) {
            Reply::Lookup(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    /// Loads what is there and compares every byte. Returns the outcomes.
    pub fn load(&self, numbers: std::ops::Range<u32>) -> Vec<Outcome> {
        let found = self.lookup(numbers.clone());
        let Some(lease) = found.lease else { return vec![] };
        let numbers: Vec<u32> = numbers.take(found.blocks as usize).collect();
        self.memory.write_at(0, &vec![0xAA; (64 * BLOCK) as usize]).unwrap();
        let blocks =
            numbers.iter().zip(0..).map(|(n, place)| LoadBlock { key: key(*n), place }).collect();
        let (namespace, region) = (NAMESPACE, self.region);
        let outcomes = self.wait(self.ask(Request::Load {
            lease,
            namespace,
            region,
            after_event: None,
            blocks,
            hints: Hints::default(),
        }));
        for ((number, outcome), place) in numbers.iter().zip(&outcomes).zip(0u64..) {
            if matches!(outcome, Outcome::Loaded(_)) {
                let mut bytes = vec![0; BLOCK as usize];
                self.memory.read_at(place * BLOCK, &mut bytes).unwrap();
                assert!(bytes == payload(*number), "wrong bytes in block {number}");
            }
        }
        self.ask(Request::Release { lease });
        outcomes
    }

    pub fn stats(&self) -> CatalogStats {
        match self.ask(Request::Stats) {
            Reply::Stats(stats) => *stats,
            other => panic!("{other:?}"),
        }
    }

    pub fn drain(&self) {
        let drained = self.ask(Request::Drain { deadline_ms: None });
        assert!(matches!(drained, Reply::Drained(Drained { blocks_lost: 0, .. })), "{drained:?}");
    }
}
