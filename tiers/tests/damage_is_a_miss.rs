//! Whatever happens to the bytes under a node, its clients get what they stored or a miss.
//!
//! Flipped bits in the store file and in slots of host RAM, the file cut off at any page, segments
//! swapped, and the image of the store after every prefix of its writes, with writes lost in
//! between: the node opens (or refuses the file), serves, and never hands out wrong bytes.
//! `Client::load` compares every byte it is given.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failing helper fails the test")]

mod node_support;

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvtide_tiers::catalog::{CodecChoice, Outcome};
use kvtide_tiers::io::memory_device::LoggedWrite;
use kvtide_tiers::io::{BlockDevice, IoDone, IoOp, RingChoice, Waker};
use kvtide_tiers::movement::{DeviceWrap, Node, NodeConfig};
use node_support::{Client, config};
use proptest::prelude::*;

/// 12 chains of 16 blocks.
const CHAINS: u32 = 12;

fn small(folder: &Path) -> NodeConfig {
    let mut config = config(folder, RingChoice::Blocking);
    if let Some(nvme) = &mut config.nvme {
        nvme.bytes = 33 << 20;
        nvme.segment_bytes = Some(4 << 20);
    }
    config
}

/// A store with all chains in it, closed cleanly.
fn filled(folder: &Path, codec: CodecChoice, wrap: Option<DeviceWrap>) {
    let mut config = small(folder);
    if let Some(nvme) = &mut config.nvme {
        nvme.wrap = wrap;
    }
    let node = Node::start(config, |_| Some(1)).unwrap();
    let client = Client::connect(&node, codec);
    for chain in 0..CHAINS {
        client.store_all(chain * 100..chain * 100 + 16);
    }
    client.drain();
    node.stop();
}

/// Opens what is in the folder, loads every chain, stores one, loads again. Returns blocks loaded.
fn survey(folder: &Path, codec: CodecChoice) -> usize {
    let Ok(node) = Node::start(small(folder), |_| Some(1)) else {
        return 0;
    };
    let client = Client::connect(&node, codec);
    let mut loaded = 0;
    for _ in 0..2 {
        for chain in 0..CHAINS {
            let outcomes = client.load(chain * 100..chain * 100 + 16);
            loaded += outcomes.iter().filter(|o| matches!(o, Outcome::Loaded(_))).count();
        }
        client.store_all(5000..5016);
    }
    assert_eq!(client.load(5000..5016).len(), 16, "the node goes on working");
    drop(client);
    node.stop();
    loaded
}

#[derive(Clone, Debug)]
enum Damage {
    Flip { at: u64, bit: u8 },
    ZeroPage { at: u64 },
    Cut { at: u64 },
    SwapSegments { first: u64, second: u64 },
}

const FILE_BYTES: u64 = 33 << 20;
const SEGMENT: u64 = 4 << 20;

fn damage() -> impl Strategy<Value = Damage> {
    // Half of the flips hit headers and descriptor areas.
    let meta = (0u64..8, 0u64..40_000).prop_map(|(s, at)| (1 << 20) + s * SEGMENT + at);
    let place = prop_oneof![meta, 0..FILE_BYTES];
    prop_oneof![
        6 => (place.clone(), 0u8..8).prop_map(|(at, bit)| Damage::Flip { at, bit }),
        1 => place.prop_map(|at| Damage::ZeroPage { at: at / 4096 * 4096 }),
        1 => (0..FILE_BYTES / 4096).prop_map(|page| Damage::Cut { at: page * 4096 }),
        1 => (0u64..8, 0u64..8).prop_map(|(first, second)| Damage::SwapSegments { first, second }),
    ]
}

fn inflict(file: &Path, damage: &Damage) {
    let file = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let segment = |number: u64| {
        let mut bytes = vec![0; SEGMENT as usize];
        file.read_exact_at(&mut bytes, (1 << 20) + number * SEGMENT).map(|()| bytes)
    };
    match *damage {
        Damage::Flip { at, bit } => {
            let mut byte = [0];
            if file.read_exact_at(&mut byte, at).is_ok() {
                file.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();
            }
        }
        Damage::ZeroPage { at } => {
            if at + 4096 <= file.metadata().unwrap().len() {
                file.write_all_at(&[0; 4096], at).unwrap();
            }
        }
        Damage::Cut { at } => file.set_len(at).unwrap(),
        Damage::SwapSegments { first, second } => {
            if let (Ok(a), Ok(b)) = (segment(first), segment(second)) {
                file.write_all_at(&b, (1 << 20) + first * SEGMENT).unwrap();
                file.write_all_at(&a, (1 << 20) + second * SEGMENT).unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_damaged_store_gives_right_bytes_or_misses(
        damages in prop::collection::vec(damage(), 1..12),
        lz4 in any::<bool>(),
    ) {
        let codec = if lz4 { CodecChoice::Lz4 } else { CodecChoice::Raw };
        let folder = tempfile::tempdir().unwrap();
        filled(folder.path(), codec, None);
        for damage in &damages {
            inflict(&folder.path().join("segments.kvt"), damage);
        }
        survey(folder.path(), codec);
    }
}

#[test]
fn an_undamaged_store_gives_everything_back() {
    let folder = tempfile::tempdir().unwrap();
    filled(folder.path(), CodecChoice::Raw, None);
    assert_eq!(survey(folder.path(), CodecChoice::Raw), 2 * 16 * CHAINS as usize);
}

#[test]
fn every_damaged_slot_of_host_ram_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = small(folder.path());
    config.nvme = None;
    let node = Node::start(config, |_| Some(1)).unwrap();
    let client = Client::connect(&node, CodecChoice::Raw);
    client.store_all(0..16);
    let arena = node.handle().arena_for_tests().clone();
    let slots: Vec<_> = (0..arena.slabs())
        .flat_map(|slab| (0..32).map(move |index| (slab, index)))
        .filter_map(|(slab, index)| arena.slot(slab, index))
        .take(16)
        .collect();
    assert_eq!(slots.len(), 16);
    // A third gets a bit flipped in the payload, a third in the descriptor; the rest stays.
    for (at, slot) in slots.iter().enumerate() {
        match at % 3 {
            0 => arena.flip_bit(*slot, (at * 4001) as u32, (at % 8) as u8).unwrap(),
            1 => {
                let mut descriptor = arena.descriptor(*slot).unwrap();
                descriptor[at * 13 % 256] ^= 1 << (at % 8);
                arena.set_descriptor(*slot, &descriptor).unwrap();
            }
            _ => {}
        }
    }
    let outcomes = client.load(0..16);
    let missed = outcomes.iter().filter(|o| matches!(o, Outcome::Missed(_))).count();
    assert_eq!(missed, 11, "{outcomes:?}");
    assert_eq!(client.stats().corrupt, 11);
    node.stop();
}

/// Logs every write before it goes to the real device.
struct Logging {
    inner: Box<dyn BlockDevice>,
    log: Arc<Mutex<Vec<LoggedWrite>>>,
}

impl BlockDevice for Logging {
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
        if !op.buffer.is_read() {
            let bytes = op.buffer.bytes().to_vec();
            self.log.lock().unwrap().push(LoggedWrite { offset: op.offset, bytes });
        }
        self.inner.submit(op)
    }

    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        self.inner.reap(timeout, done)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.inner.sync()
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

/// Every prefix of the write sequence, and the same with every seventh write lost (as after a power
/// cut) or torn in half.
#[test]
fn every_prefix_of_the_writes_leaves_a_store_that_never_lies() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("segments.kvt");
    // An empty store as it is made, before any write of the worker.
    Node::start(small(folder.path()), |_| Some(1)).unwrap().stop();
    let empty = std::fs::read(&file).unwrap();
    let log = Arc::new(Mutex::new(Vec::new()));
    let theirs = Arc::clone(&log);
    let wrap =
        DeviceWrap(Arc::new(move |inner| Box::new(Logging { inner, log: Arc::clone(&theirs) })));
    filled(folder.path(), CodecChoice::Raw, Some(wrap));
    let log = log.lock().unwrap();
    assert!(log.len() > 190, "{} writes", log.len());
    let mut image = empty.clone();
    let mut most = 0;
    for (number, write) in log.iter().enumerate() {
        let at = write.offset as usize;
        let whole = match number % 7 {
            5 => 0,
            6 => write.bytes.len() / 8192 * 4096,
            _ => write.bytes.len(),
        };
        image[at..at + whole].copy_from_slice(&write.bytes[..whole]);
        std::fs::write(&file, &image).unwrap();
        most = most.max(survey(folder.path(), CodecChoice::Raw));
    }
    assert!(most > 0, "some of the images hold blocks");
}
