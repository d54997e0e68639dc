//! A namespace that asks for 8 bits an element: half the room, small errors, and the same bytes
//! whichever tier they come from, however often they were stored, loaded and moved. One that asks
//! for exact bytes never sees them.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{
    ElementType, KvLayout, Model, Namespace, NamespaceHandle, NamespaceSpec, Narrow, Narrowed,
    Outcome, PlaneOrder, RankScope, RegionHandle, RegionLayout, RejectReason, Tier, Wide,
};
use kvtide_tests::{Daemon, Setup, poll_until};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(30);
const LAYERS: u32 = 4;
const HEADS: u32 = 2;
const HEAD: u32 = 64;
const TOKENS: u32 = 32;
/// As the engine has them: 128 KiB.
const BLOCK_BYTES: usize = (LAYERS * 2 * HEADS * HEAD * TOKENS * 2) as usize;
const BLOCKS: u32 = 24;

fn namespace(element: ElementType) -> Namespace {
    Namespace {
        model: Model { weights: "sha256:0123".into(), revision: "".into(), adapter: "".into() },
        layout: KvLayout {
            layers: LAYERS,
            kv_heads: HEADS,
            head_dim: HEAD,
            element,
            tokens_per_block: TOKENS,
            kv_group: 0,
            ranks: RankScope::SameOnAll,
            page_layout_version: 1,
        },
        salt: String::new(),
    }
}

fn narrowed(narrow: Narrow) -> ElementType {
    let order = PlaneOrder::HeadsFirst;
    ElementType::Narrowed(Narrowed { wide: Wide::Bf16, narrow, order })
}

struct Engine {
    client: Client,
    space: NamespaceHandle,
    pool: RegionHandle,
}

impl Engine {
    fn open(daemon: &Daemon, element: ElementType) -> Engine {
        let client = Client::connect(daemon.client_config()).unwrap();
        let space = client.open_namespace(&NamespaceSpec::own(namespace(element))).unwrap();
        let layout = RegionLayout::opaque(BLOCKS, BLOCK_BYTES as u64);
        let pool = client.create_region(layout).unwrap();
        Engine { client, space, pool }
    }

    fn keys(&self, seed: u32) -> Vec<kvtide_client::BlockKey> {
        let tokens: Vec<u32> = (0..BLOCKS * TOKENS).map(|at| at ^ (seed << 20)).collect();
        self.space.chain(&tokens)
    }

    fn store(&self, seed: u32) -> Vec<Outcome> {
        let places: Vec<u32> = (0..BLOCKS).collect();
        let keys = self.keys(seed);
        self.client.store_prefix(&self.space, 1, &self.pool, &keys, &places, PATIENCE)
    }

    /// What comes back of a prompt, with the tier that its first block came from.
    fn load(&self, seed: u32) -> (Vec<Vec<u8>>, Option<Tier>) {
        let places: Vec<u32> = (0..BLOCKS).collect();
        for place in &places {
            self.pool.write_block(*place, &vec![0xAA; BLOCK_BYTES]).unwrap();
        }
        let keys = self.keys(seed);
        let loaded = self.client.load_prefix(&self.space, &self.pool, &keys, &places, PATIENCE);
        let tier = match loaded.outcomes.first() {
            Some(Outcome::Loaded(tier)) => Some(*tier),
            _ => None,
        };
        let blocks = (0..loaded.blocks as u32).map(|place| {
            let mut bytes = vec![0; BLOCK_BYTES];
            self.pool.read_block(place, &mut bytes).unwrap();
            bytes
        });
        (blocks.collect(), tier)
    }
}

/// bf16 values about as KV has them, with a few channels that are much larger than the others.
fn block(seed: u32, number: u32) -> Vec<u8> {
    let mut state = (u64::from(seed) << 32 | u64::from(number)) * 2 + 1;
    let mut out = Vec::with_capacity(BLOCK_BYTES);
    for element in 0..BLOCK_BYTES / 2 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        let value = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let value = if element % 64 == 3 { value * 30.0 } else { value };
        out.extend_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
    }
    out
}

fn values(bytes: &[u8]) -> impl Iterator<Item = f32> {
    let codes = bytes.as_chunks::<2>().0.iter();
    codes.map(|code| f32::from_bits(u32::from(u16::from_le_bytes(*code)) << 16))
}

/// Root of the mean square of the differences, over that of the values.
fn relative_error(was: &[u8], is: &[u8]) -> f64 {
    let square = |value: f32| f64::from(value) * f64::from(value);
    let differences: f64 = values(was).zip(values(is)).map(|(a, b)| square(a - b)).sum();
    (differences / values(was).map(square).sum::<f64>()).sqrt()
}

fn write_prompt(engine: &Engine, seed: u32) {
    for number in 0..BLOCKS {
        engine.pool.write_block(number, &block(seed, number)).unwrap();
    }
}

fn all(outcome: Outcome) -> Vec<Outcome> {
    vec![outcome; BLOCKS as usize]
}

#[test]
fn the_same_bytes_come_back_from_every_tier_and_after_every_way_through_it() {
    let setup = Setup::new(NODE).option("--host-bytes", "8MiB");
    let mut daemon = setup.start();
    for (narrow, most) in [(Narrow::Int8, 0.02), (Narrow::Fp8, 0.05)] {
        let engine = Engine::open(&daemon, narrowed(narrow));
        write_prompt(&engine, 1);
        let before = daemon.stats().0.host.bytes_in;
        assert_eq!(engine.store(1), all(Outcome::Stored));
        let kept = daemon.stats().0.host.bytes_in - before;
        let whole = u64::from(BLOCKS) * BLOCK_BYTES as u64;
        assert!(kept < whole * 56 / 100, "{kept} of {whole} bytes");

        let (first, tier) = engine.load(1);
        assert_eq!((first.len() as u32, tier), (BLOCKS, Some(Tier::Host)));
        for (number, bytes) in (0..).zip(&first) {
            let error = relative_error(&block(1, number), bytes);
            assert!(error > 0.0 && error < most, "{narrow:?}: block {number} is off by {error}");
        }
        // What was loaded, and what was computed anew, are stored again: nothing changes.
        assert_eq!(engine.store(1), all(Outcome::Present));
        write_prompt(&engine, 1);
        assert_eq!(engine.store(1), all(Outcome::Present));

        // Other prompts push it out of RAM.
        for seed in 2..12 {
            write_prompt(&engine, seed);
            let stored = poll_until(PATIENCE, || {
                let stored = engine.store(seed);
                stored.iter().all(|each| *each != Outcome::Busy).then_some(())
            });
            assert!(stored.is_some(), "no room for prompt {seed}");
        }
        let (second, tier) = engine.load(1);
        assert_eq!(tier, Some(Tier::Nvme));
        assert!(second == first, "{narrow:?}: nvme gives other bytes than RAM did");
        let (third, tier) = engine.load(1);
        assert_eq!(tier, Some(Tier::Host), "it came back into RAM");
        assert!(third == first, "{narrow:?}: other bytes after the way through nvme");
    }
    let drained = Client::connect(daemon.client_config()).unwrap().drain(PATIENCE).unwrap();
    assert_eq!(drained.blocks_lost, 0);
    let engine = Engine::open(&daemon, narrowed(Narrow::Int8));
    let (before, _) = engine.load(1);
    drop(engine);
    daemon.kill9();
    daemon.restart();
    let engine = Engine::open(&daemon, narrowed(Narrow::Int8));
    let (after, tier) = engine.load(1);
    assert_eq!((after.len() as u32, tier), (BLOCKS, Some(Tier::Nvme)));
    assert!(after == before, "other bytes after a restart");
    daemon.assert_healthy();
}

#[test]
fn an_exact_namespace_and_another_narrow_one_never_see_them() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let int8 = Engine::open(&daemon, narrowed(Narrow::Int8));
    write_prompt(&int8, 1);
    assert_eq!(int8.store(1), all(Outcome::Stored));
    for element in [ElementType::Bf16, narrowed(Narrow::Fp8)] {
        let other = Engine::open(&daemon, element);
        assert_ne!(other.keys(1)[0], int8.keys(1)[0]);
        assert_eq!(other.load(1), (vec![], None));
        // Nor when it names the blocks by the keys of the other one.
        let found = other.client.lookup(&[(&other.space, &int8.keys(1))], PATIENCE);
        assert_eq!(found.blocks(), 0);
    }
    let exact = Engine::open(&daemon, ElementType::Bf16);
    write_prompt(&exact, 1);
    assert_eq!(exact.store(1), all(Outcome::Stored));
    let (loaded, _) = exact.load(1);
    assert!((0..).zip(&loaded).all(|(number, bytes)| *bytes == block(1, number)));
    daemon.assert_healthy();
}

#[test]
fn what_cannot_be_narrowed_is_refused_and_counted() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let engine = Engine::open(&daemon, narrowed(Narrow::Int8));
    write_prompt(&engine, 1);
    let mut bad = block(1, 3);
    bad[1000..1002].copy_from_slice(&0x7fc0u16.to_le_bytes());
    engine.pool.write_block(3, &bad).unwrap();
    let outcomes = engine.store(1);
    assert_eq!(outcomes[..3], [Outcome::Stored; 3]);
    assert_eq!(outcomes[3], Outcome::Rejected(RejectReason::NotFinite));
    let (loaded, _) = engine.load(1);
    assert_eq!(loaded.len(), 3);

    // A region whose blocks are not those that the namespace describes.
    let layout = RegionLayout::opaque(BLOCKS, BLOCK_BYTES as u64 / 2);
    let small = engine.client.create_region(layout).unwrap();
    let (keys, places) = (engine.keys(2), (0..BLOCKS).collect::<Vec<_>>());
    let outcomes = engine.client.store_prefix(&engine.space, 1, &small, &keys, &places, PATIENCE);
    assert_eq!(outcomes, all(Outcome::Rejected(RejectReason::Mismatch)));
    let loaded =
        engine.client.load_prefix(&engine.space, &small, &engine.keys(1), &places, PATIENCE);
    assert_eq!(loaded.blocks, 0);

    let mut shapeless = namespace(narrowed(Narrow::Fp8));
    shapeless.layout.kv_heads = 0;
    let refused = engine.client.open_namespace(&NamespaceSpec::own(shapeless)).unwrap_err();
    assert!(refused.to_string().contains("8 bits"), "{refused}");
    daemon.assert_healthy();
}
