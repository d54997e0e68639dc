//! Engines that run a model, as processes of their own ([`smallengine`]), and what tests of a whole
//! inference need beside them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvtide_client::Outcome;
use smallengine::process::{EngineArgs, EngineProcess, TurnDone};

use crate::daemon::{Daemon, Setup};
use crate::payload::KvPool;
use crate::proc::poll_until;

/// Longest wait on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the blocks that push others out of RAM.
const FILLER_BYTES: u32 = 256 << 10;
/// Such blocks in a chain.
const FILLER_BLOCKS: u32 = 16;
/// Such chains until RAM must have been filled several times over.
const FILLER_CHAINS: u32 = 64;

impl Setup {
    /// Starts an engine that uses the daemon.
    ///
    /// # Panics
    /// When it does not start, or does not find the daemon.
    pub fn inference(&self, args: &EngineArgs) -> EngineProcess {
        let args = EngineArgs { socket: Some(self.socket()), ..args.clone() };
        let engine = EngineProcess::start(self.program("__small-engine"), &args);
        let engine = engine.unwrap_or_else(|error| panic!("{error}"));
        assert!(engine.is_cached(), "the engine does not find the daemon");
        engine
    }

    /// Starts an engine that knows no daemon, and so computes everything.
    ///
    /// # Panics
    /// When it does not start.
    pub fn inference_alone(&self, args: &EngineArgs) -> EngineProcess {
        let args = EngineArgs { socket: None, ..args.clone() };
        let engine = EngineProcess::start(self.program("__small-engine"), &args);
        engine.unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Daemon {
    /// Waits until all that was stored lies on nvme, and is found there after a crash.
    ///
    /// # Panics
    /// When it does not within a minute.
    pub fn wait_written_down(&self) {
        self.wait_clean();
        // Descriptors are committed at the latest 100 ms after their blocks.
        std::thread::sleep(Duration::from_millis(400));
    }

    /// Waits until nothing is only in RAM.
    fn wait_clean(&self) {
        let client = self.client();
        let written = poll_until(PATIENCE, || {
            let stats = client.stats().expect("the daemon answers").catalog;
            let stats = stats.expect("the tests' user is an operator");
            (stats.dirty_blocks == 0).then_some(())
        });
        assert!(written.is_some(), "not written down");
    }

    /// Stores other prompts, of another model, until `gone` says that they have pushed what was to
    /// go out of RAM.
    ///
    /// # Panics
    /// When it never says so.
    pub fn push_out(&self, mut gone: impl FnMut() -> bool) {
        // Blocks that lie on nvme already would be left there.
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let model = format!("filler {}", CALLS.fetch_add(1, Ordering::Relaxed));
        let pool = KvPool::open(self.client(), &model, FILLER_BLOCKS, FILLER_BYTES);
        let pool = pool.expect("the daemon takes another model");
        for seed in 0..FILLER_CHAINS {
            if gone() {
                return;
            }
            let keys = pool.keys(seed, FILLER_BLOCKS);
            let stored = pool.store(&keys, keys.len(), PATIENCE);
            let good = |outcome: &Outcome| {
                matches!(outcome, Outcome::Stored | Outcome::Present | Outcome::Busy)
            };
            assert!(stored.iter().all(good), "{stored:?}");
            self.wait_clean();
        }
        panic!("not pushed out of RAM");
    }
}

/// Fails unless two turns came to the same bits: KV, logits and answer.
///
/// # Panics
/// Then.
pub fn assert_same_bits(one: &TurnDone, other: &TurnDone, what: &str) {
    assert!(!one.logits.is_empty() && one.logits.len() == other.logits.len(), "{what}: logits");
    let differ = one.logits.iter().zip(&other.logits).filter(|(one, other)| one != other).count();
    assert_eq!(differ, 0, "{what}: {differ} of {} logits differ", one.logits.len());
    let blocks = one.blocks.iter().zip(&other.blocks);
    let wrong: Vec<usize> =
        blocks.enumerate().filter(|(_, (a, b))| a != b).map(|(at, _)| at).collect();
    assert_eq!(one.blocks.len(), other.blocks.len(), "{what}: number of blocks");
    assert!(wrong.is_empty(), "{what}: KV of blocks {wrong:?} differs");
    assert_eq!(one.answer, other.answer, "{what}: answers differ");
}
