//! The memory of the host tier is handed from one node to the next: all that was in it is there
//! again, and nothing that was damaged, forgotten or is not this node's is ever handed out.

#![cfg(feature = "store")]

mod node_support;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use kvtide_tiers::block::DESCRIPTOR_BYTES;
use kvtide_tiers::catalog::{CodecChoice, MissReason, Outcome, Request, Tier};
use kvtide_tiers::io::{Arena, ArenaFiles, RingChoice};
use kvtide_tiers::movement::{Node, NodeConfig};
use node_support::{Client, NAMESPACE, config, key};

/// A node whose memory can be handed over.
fn shared(folder: &Path) -> NodeConfig {
    let mut config = config(folder, RingChoice::Auto);
    config.host.always_shared = true;
    config
}

fn start(config: NodeConfig) -> Node {
    Node::start(config, |_| Some(1)).expect("starts")
}

fn files(node: &Node) -> Arc<ArenaFiles> {
    let handle = node.handle();
    let (memory, table) = handle.arena_files().expect("it is shared memory");
    let clone = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().expect("can be cloned");
    Arc::new(ArenaFiles { memory: clone(memory), table: clone(table) })
}

/// A node that is gone, and its memory, with all chains in it.
fn left_behind(config: NodeConfig, drained: bool) -> Arc<ArenaFiles> {
    let node = start(config);
    let client = Client::connect(&node, CodecChoice::Raw);
    fill(&client);
    if drained {
        client.drain();
    }
    let files = files(&node);
    drop(client);
    node.stop();
    files
}

/// What the memory takes of the machine's, in units of 512 bytes.
fn pages_taken(files: &ArenaFiles) -> u64 {
    let memory = files.memory.try_clone().expect("can be cloned");
    std::fs::File::from(memory).metadata().expect("it is a file").blocks()
}

fn next(folder: &Path, files: &Arc<ArenaFiles>) -> Node {
    let mut config = shared(folder);
    config.host.handed_over = Some(Arc::clone(files));
    start(config)
}

/// Chains of 16 blocks of 64 KiB: 6 MiB of the 8 MiB.
const CHAINS: std::ops::Range<u32> = 0..6;

fn fill(client: &Client) {
    for chain in CHAINS {
        client.store_all(chain * 100..chain * 100 + 16);
    }
}

fn tiers(client: &Client) -> [usize; 3] {
    let mut counts = [0; 3];
    for outcome in CHAINS.flat_map(|chain| client.load(chain * 100..chain * 100 + 16)) {
        match outcome {
            Outcome::Loaded(Tier::Host) => counts[0] += 1,
            Outcome::Loaded(Tier::Nvme) => counts[1] += 1,
            Outcome::Missed(_) => counts[2] += 1,
            other => panic!("{other:?}"),
        }
    }
    counts
}

#[test]
fn all_that_was_in_ram_is_in_ram_again_without_a_drain_and_without_nvme() {
    for nvme in [true, false] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut first = shared(folder.path());
        // Nothing is written down: what comes back was in RAM alone.
        first.idle_ms = 0;
        first.clean_percent = 0;
        if !nvme {
            first.nvme = None;
        }
        let node = start(first.clone());
        let client = Client::connect(&node, CodecChoice::Raw);
        fill(&client);
        let before = client.stats();
        assert_eq!((before.host.blocks, before.nvme.blocks), (96, 0));
        let files = files(&node);
        drop(client);
        node.stop();

        for life in 0..3 {
            let node = start(NodeConfig {
                host: kvtide_tiers::movement::HostConfig {
                    handed_over: Some(Arc::clone(&files)),
                    ..first.host.clone()
                },
                ..first.clone()
            });
            let kept = node.handle().report().kept;
            assert_eq!((kept.blocks, kept.dropped, kept.refused), (96, 0, None), "life {life}");
            let client = Client::connect(&node, CodecChoice::Raw);
            assert_eq!(tiers(&client), [96, 0, 0], "life {life}");
            let after = client.stats();
            assert_eq!(after.dirty_blocks, before.dirty_blocks, "it is still to be written");
            drop(client);
            node.stop();
        }
    }
}

#[test]
fn a_kept_block_that_is_on_nvme_is_clean_and_makes_room_like_any_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = left_behind(shared(folder.path()), true);

    let node = next(folder.path(), &files);
    let client = Client::connect(&node, CodecChoice::Raw);
    let stats = client.stats();
    assert_eq!((stats.host.blocks, stats.nvme.blocks, stats.dirty_blocks), (96, 96, 0));
    assert_eq!(tiers(&client), [96, 0, 0]);
    // New blocks push the kept ones out; those are read from nvme, and nothing is lost.
    for chain in 10..20 {
        client.store_all(chain * 100..chain * 100 + 16);
    }
    let [host, nvme, missed] = tiers(&client);
    assert_eq!((host + nvme, missed), (96, 0));
    assert!(nvme > 0);
    assert_eq!(client.stats().corrupt, 0);
    drop(client);
    node.stop();
}

#[test]
fn what_was_forgotten_or_evicted_does_not_come_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut alone = shared(folder.path());
    alone.nvme = None;
    let node = start(alone.clone());
    let client = Client::connect(&node, CodecChoice::Raw);
    fill(&client);
    let keys: Vec<_> = (0..16).map(key).collect();
    client.ask(Request::ReportBad { namespace: NAMESPACE, keys });
    let files = files(&node);
    drop(client);
    node.stop();

    alone.host.handed_over = Some(files);
    let node = start(alone);
    let kept = node.handle().report().kept;
    assert_eq!((kept.blocks, kept.dropped), (80, 0));
    let client = Client::connect(&node, CodecChoice::Raw);
    assert_eq!(client.load(0..16), []);
    assert_eq!(client.load(100..116), [Outcome::Loaded(Tier::Host); 16]);
    drop(client);
    node.stop();
}

#[test]
fn a_namespace_that_was_forgotten_meanwhile_is_left_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = left_behind(shared(folder.path()), false);
    let mut config = shared(folder.path());
    config.host.handed_over = Some(files);
    let node = Node::start(config, |_| Some(2)).expect("starts");
    let kept = node.handle().report().kept;
    assert_eq!((kept.blocks, kept.dropped), (0, 96));
    node.stop();
}

#[test]
fn a_thousand_damaged_slots_are_misses_and_no_byte_is_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = left_behind(shared(folder.path()), true);

    let mut state = 7u64;
    let mut next_random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        (state >> 33) % below
    };
    let mut damaged = 0;
    for round in 0..20 {
        // As the memory of a node that is gone: nobody else uses it now.
        let size = config(folder.path(), RingChoice::Auto).host;
        let arena = Arena::adopt(&files, size.bytes, size.slab()).expect("it is whole");
        let slots: Vec<_> = arena.kept_slabs().into_iter().flat_map(|slab| slab.slots).collect();
        for _ in 0..50 {
            let (slot, bytes) = &slots[next_random(slots.len() as u64) as usize];
            let mut bytes = *bytes;
            match next_random(4) {
                0 => {
                    bytes[next_random(DESCRIPTOR_BYTES as u64) as usize] ^= 1 << next_random(8);
                    arena.set_descriptor(*slot, &bytes).expect("it is a slot");
                }
                // The descriptor of another slot: whole, but not here.
                1 => {
                    let other = &slots[next_random(slots.len() as u64) as usize];
                    arena.set_descriptor(*slot, &other.1).expect("it is a slot");
                }
                _ => {
                    let byte = next_random(64 << 10) as u32;
                    arena.flip_bit(*slot, byte, next_random(8) as u8).expect("it is a slot");
                }
            }
            damaged += 1;
        }
        drop(arena);
        let node = next(folder.path(), &files);
        let client = Client::connect(&node, CodecChoice::Raw);
        // Every byte that comes is compared with what was stored.
        let [_, nvme, missed] = tiers(&client);
        // A damaged block is read from nvme instead, and is in RAM for the next round.
        assert!(nvme > 0, "round {round}");
        assert_eq!(missed, 0, "round {round}");
        assert!(client.stats().corrupt > 0, "some are noticed only when they are used");
        drop(client);
        node.stop();
    }
    assert_eq!(damaged, 1000);
}

#[test]
fn memory_of_another_size_version_or_origin_is_refused_and_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let kept = left_behind(shared(folder.path()), false);

    let mut larger = shared(folder.path());
    larger.host.bytes = 12 << 20;
    larger.host.handed_over = Some(Arc::clone(&kept));
    assert!(pages_taken(&kept) > 0);
    let node = start(larger);
    assert_eq!(pages_taken(&kept), 0, "memory that is not taken over is given back");
    let report = node.handle().report();
    let why = report.kept.refused.expect("another size");
    assert!(why.contains("8388608 bytes") && why.contains("12582912"), "{why}");
    assert_eq!((report.host_bytes, report.kept.blocks), (12 << 20, 0));
    let client = Client::connect(&node, CodecChoice::Raw);
    assert!(matches!(
        client.load(0..16)[..],
        [] | [Outcome::Missed(MissReason::Absent), ..] | [Outcome::Loaded(Tier::Nvme), ..]
    ));
    drop(client);
    node.stop();

    // Two files that are something else: swapped, and a file that can be cut short.
    let clone = |fd: &std::os::fd::OwnedFd| fd.try_clone().expect("can be cloned");
    let kept = left_behind(shared(folder.path()), false);
    let swapped = ArenaFiles { memory: clone(&kept.table), table: clone(&kept.memory) };
    let kept = left_behind(shared(folder.path()), false);
    let file = tempfile::tempfile().expect("a file");
    file.set_len(64 << 20).expect("a file");
    let unsealed = ArenaFiles { memory: file.into(), table: clone(&kept.table) };
    for bad in [swapped, unsealed] {
        let mut config = shared(folder.path());
        config.host.handed_over = Some(Arc::new(bad));
        let node = start(config);
        assert!(node.handle().report().kept.refused.is_some());
        node.stop();
    }
}
