//! A node end to end: blocks go in through a region, spill to a real store file, and come back
//! byte for byte, also in a second life of the node.

mod node_support;

use kvtide_tiers::catalog::{CodecChoice, Outcome, Tier};
use kvtide_tiers::io::RingChoice;
use kvtide_tiers::movement::Node;
use node_support::{Client, config};

fn round_trip(ring: RingChoice, codec: CodecChoice) {
    let folder = tempfile::tempdir().expect("starts");
    let node = Node::start(config(folder.path(), ring), |_| Some(1)).expect("starts");
    let client = Client::connect(&node, codec);
    // 20 chains of 16 blocks: 20 MiB through 8 MiB of host RAM.
    for chain in 0..20 {
        client.store_all(chain * 100..chain * 100 + 16);
    }
    let mut tiers = [0, 0];
    for chain in 0..20 {
        for outcome in client.load(chain * 100..chain * 100 + 16) {
            match outcome {
                Outcome::Loaded(Tier::Host) => tiers[0] += 1,
                Outcome::Loaded(Tier::Nvme) => tiers[1] += 1,
                other => panic!("{other:?} in chain {chain}"),
            }
        }
    }
    assert_eq!(tiers[0] + tiers[1], 320);
    assert!(tiers[1] > 150, "most came from nvme: {tiers:?}");
    let stats = client.stats();
    assert_eq!((stats.corrupt, stats.read_failures, stats.write_failures), (0, 0, 0));
    if codec == CodecChoice::Lz4 {
        assert!(stats.nvme.bytes_in < 20 << 20, "lz4 made it smaller: {}", stats.nvme.bytes_in);
    }
    client.drain();
    drop(client);
    assert!(node.stop().clean);

    let node = Node::start(config(folder.path(), ring), |_| Some(1)).expect("starts");
    assert_eq!(node.handle().report().nvme.expect("starts").recovered_blocks, 320);
    let client = Client::connect(&node, codec);
    for chain in 0..20 {
        let outcomes = client.load(chain * 100..chain * 100 + 16);
        assert_eq!(outcomes, [Outcome::Loaded(Tier::Nvme); 16], "chain {chain}");
    }
    client.handle.close_session(client.session);
    node.stop();
}

#[test]
fn blocks_spill_and_come_back_over_io_uring() {
    round_trip(RingChoice::Auto, CodecChoice::Raw);
}

#[test]
fn blocks_spill_and_come_back_over_pread_and_pwrite() {
    round_trip(RingChoice::Blocking, CodecChoice::Raw);
}

#[test]
fn blocks_spill_and_come_back_compressed() {
    round_trip(RingChoice::Auto, CodecChoice::Lz4);
}
