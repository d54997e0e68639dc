//! Blocks go from the paged GPU pool of one engine process into the paged GPU pool of another one,
//! to other places and in another order: through the daemon's GPU memory, and through host RAM and
//! nvme across a stop and a crash. Every byte of the pool is looked at after each load.
//!
//! The driver is the fake one: device memory of processes, interprocess handles, streams and events
//! are as on a real one, and the kernels are the real source.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_tests::gpu::{EngineSpec, Memory, Order, Shape};
use kvtide_tests::{Daemon, GpuEngine, Setup, poll_until};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(60);
/// Blocks of each prompt.
const BLOCKS: usize = 2;

/// A pair of engines: who stores and who loads.
type Pair = (EngineSpec, EngineSpec);

/// Pairs of a shape, one for each size of a block.
fn pairs(shape: Shape) -> Vec<Pair> {
    let spec = |tokens: u32, memory, order| {
        let revision = format!("{shape:?} {tokens}");
        EngineSpec { revision, shape, tokens, places: 4, memory, order }
    };
    vec![
        (spec(16, Memory::Legacy, Order::Sync), spec(16, Memory::Vmm, Order::Ring)),
        (spec(64, Memory::Vmm, Order::Ring), spec(64, Memory::Adopted, Order::Sync)),
        (spec(256, Memory::Adopted, Order::Ring), spec(256, Memory::Legacy, Order::Ring)),
    ]
}

fn wait_written_down(daemon: &Daemon, blocks: usize) {
    let written = poll_until(PATIENCE, || {
        let (stats, _) = daemon.stats();
        (stats.nvme.blocks >= blocks as u64 && stats.dirty_blocks == 0).then_some(())
    });
    assert!(written.is_some(), "not written down: {:?}", daemon.stats().0);
    // Descriptors are committed at the latest 100 ms after their blocks.
    std::thread::sleep(Duration::from_millis(400));
}

/// Through all tiers. `environment` is that of the driver of every process.
fn through_all_tiers(setup: Setup, pairs: &[Pair], environment: &[(&str, &str)]) {
    let setup = environment.iter().fold(setup, |setup, (name, value)| setup.env(name, *value));
    let start = |spec: &EngineSpec| setup.engine(spec, environment);
    let mut daemon = setup.start();
    let mut first: Vec<GpuEngine> = pairs.iter().map(|(from, _)| start(from)).collect();
    let mut second: Vec<GpuEngine> = pairs.iter().map(|(_, to)| start(to)).collect();
    for ((from, to), pair) in first.iter_mut().zip(&mut second).zip(pairs) {
        assert_eq!(from.store(1, BLOCKS), ["Stored"; BLOCKS], "{pair:?}");
        assert_eq!(to.load(1, BLOCKS), ["Loaded(Device)"; BLOCKS], "{pair:?}");
        assert_eq!(from.store(1, BLOCKS), ["Present"; BLOCKS], "compared: {pair:?}");
    }
    daemon.assert_healthy();
    let status = daemon.stop_gracefully();
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
    assert!(!daemon.log().contains("fakecuda: VIOLATION"), "{}", daemon.log());

    daemon.restart();
    for ((from, to), pair) in first.iter_mut().zip(&mut second).zip(pairs) {
        assert_eq!(to.load_when_back(1, BLOCKS), ["Loaded(Nvme)"; BLOCKS], "{pair:?}");
        assert_eq!(from.load_when_back(1, BLOCKS).len(), BLOCKS, "{pair:?}");
        assert_eq!(from.store(2, BLOCKS), ["Stored"; BLOCKS], "{pair:?}");
    }
    wait_written_down(&daemon, 2 * BLOCKS * pairs.len());
    daemon.assert_healthy();
    daemon.kill9();
    first.into_iter().chain(second).for_each(GpuEngine::kill9);

    daemon.restart();
    for pair in pairs {
        // A new engine has nothing in its pool, and another address.
        let mut third = start(&pair.0);
        for prompt in [2, 1] {
            assert_eq!(third.load(prompt, BLOCKS), ["Loaded(Nvme)"; BLOCKS], "{pair:?}");
        }
        // What is asked for again is kept in GPU memory.
        let promoted = poll_until(PATIENCE, || {
            (third.load(2, BLOCKS) == ["Loaded(Device)"; BLOCKS]).then_some(())
        });
        assert!(promoted.is_some(), "{pair:?} is not promoted");
        third.end();
    }
    daemon.wait_idle(0, PATIENCE).unwrap_or_else(|held| panic!("still held: {held}"));
    daemon.assert_healthy();
}

/// `large` is for blocks of up to 32 MiB.
fn setup(large: bool) -> Setup {
    let sizes = if large { ["384MiB", "768MiB", "128MiB"] } else { ["64MiB", "320MiB", "64MiB"] };
    let [host, nvme, segment] = sizes;
    let slab = if large { "64MiB" } else { "8MiB" };
    let text = format!("[host]\nbytes = \"{host}\"\nslab_bytes = \"{slab}\"\n");
    Setup::new(NODE)
        .without("--host-bytes")
        .config(&text)
        .option("--nvme-bytes", nvme)
        .option("--segment-bytes", segment)
        .gpu(if large { "256MiB" } else { "64MiB" })
}

#[test]
fn grouped_query_attention() {
    through_all_tiers(setup(true), &pairs(Shape::Gqa), &[]);
}

#[test]
fn multi_query_attention() {
    through_all_tiers(setup(false), &pairs(Shape::Mqa), &[]);
}

#[test]
fn latent_attention() {
    through_all_tiers(setup(false), &pairs(Shape::Mla), &[]);
}

#[test]
fn blocks_in_one_piece() {
    through_all_tiers(setup(true), &pairs(Shape::BlockOutermost), &[]);
}

#[test]
fn streams_that_are_late_in_any_order_and_kind_of_memory() {
    let mut pairs = Vec::new();
    for (at, memory) in [Memory::Legacy, Memory::Vmm, Memory::Adopted].into_iter().enumerate() {
        for first in [Order::Sync, Order::Ring] {
            let spec = |memory, order| EngineSpec {
                revision: format!("late {at} {first:?}"),
                shape: Shape::HeadRows,
                tokens: 16,
                places: 5,
                memory,
                order,
            };
            pairs.push((spec(memory, first), spec(Memory::Legacy, Order::Ring)));
        }
    }
    for seed in ["1", "2"] {
        let late = [("FAKECUDA_JITTER_US", "5000"), ("FAKECUDA_SEED", seed)];
        through_all_tiers(setup(false), &pairs, &late);
    }
}
