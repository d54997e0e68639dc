//! A drive that is slower than computing: lookups soon end before its blocks, turns are computed,
//! and when it is well again it is offered again.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kvtide_client::{CatalogStats, Tier, TierWorth};
use kvtide_tests::inference::assert_same_bits;
use kvtide_tests::{Daemon, Setup};
use smallengine::process::{EngineArgs, EngineProcess, TurnDone};
use smallengine::random_tokens;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const VOCABULARY: u32 = 512;
const PROMPT_TOKENS: usize = 801;
const TOKENS_PER_BLOCK: u32 = 16;
const BLOCKS: u32 = 50;
/// Longest time until something is noticed: a minute by the contract, twice that on a machine with
/// much else to do. The turns are counted as well, which no machine makes slower.
const PATIENCE: Duration = Duration::from_secs(120);
const PROBE_EVERY: usize = 3;

/// Each namespace is judged by its last two seconds.
const CONFIG: &str = "[arbiter]\nwindow_ms = 2000\nprobe_every = 3\n";

struct Story {
    daemon: Daemon,
    engine: EngineProcess,
    alone: TurnDone,
    prompt: Vec<u32>,
}

impl Story {
    /// A turn whose blocks lie on nvme. It comes to the right bits however it is done.
    fn turn(&mut self) -> TurnDone {
        let prompt = self.prompt.clone();
        let (engine, daemon) = (&mut self.engine, &self.daemon);
        // Nothing of it is in RAM. What is withheld is not seen at all.
        daemon.push_out(|| engine.find(&prompt).unwrap().iter().all(|run| run.tier == Tier::Nvme));
        let done = engine.turn(1, &prompt, 1).unwrap();
        assert_same_bits(&done, &self.alone, "a turn");
        done
    }

    fn stats(&self) -> CatalogStats {
        self.daemon.stats().0
    }

    fn nvme(&self) -> TierWorth {
        *self.stats().worth.iter().find(|row| row.tier == Tier::Nvme).unwrap()
    }
}

fn set_delay(file: &Path, ms: u64) {
    let new = file.with_extension("new");
    fs::write(&new, ms.to_string()).unwrap();
    fs::rename(&new, file).unwrap();
}

#[test]
fn a_slow_drive_is_soon_not_offered_and_offered_again_when_it_is_well() {
    let setup = Setup::new(NODE).config(CONFIG);
    let delay = setup.path("read-delay");
    // Room for all that is pushed through, so that nothing is reclaimed.
    let setup = setup.option("--fault-read-delay", &delay).option("--nvme-bytes", "2GiB");
    let daemon = setup.start();
    let args = EngineArgs {
        tokens_per_block: TOKENS_PER_BLOCK,
        places: BLOCKS + 8,
        seed: 51,
        report: true,
        ..EngineArgs::default()
    };
    let prompt = random_tokens(9, PROMPT_TOKENS, VOCABULARY);
    let alone = setup.inference_alone(&args).turn(1, &prompt, 1).unwrap();
    let mut engine = setup.inference(&args);
    // It reports how fast it computes: prompts of several lengths.
    for (seed, tokens) in (100..).zip([200, 400, 600, 801]) {
        engine.turn(2, &random_tokens(seed, tokens, VOCABULARY), 1).unwrap();
    }
    engine.turn(1, &prompt, 1).unwrap();
    daemon.wait_written_down();
    let mut story = Story { daemon, engine, alone, prompt };
    assert!(story.stats().prefill.namespaces_known == 1, "{:?}", story.stats().prefill);

    // While the drive is well, turns reload from it, and that is worth it.
    for _ in 0..3 {
        let turn = story.turn().turn;
        assert_eq!(turn.reuse.nvme_tokens, (BLOCKS * TOKENS_PER_BLOCK) as usize);
    }
    let well = story.nvme();
    println!("well: {well:?}");
    assert!(well.saved_us > well.lost_us && well.namespaces_withheld == 0, "{well:?}");

    // Each read takes two seconds more: far more than computing.
    set_delay(&delay, 2000);
    let (began, mut turns) = (Instant::now(), 0);
    while story.nvme().namespaces_withheld == 0 {
        story.turn();
        turns += 1;
        assert!(began.elapsed() < PATIENCE && turns < 20, "{:?}", story.nvme());
    }
    println!("not offered after {turns} turns and {:?}: {:?}", began.elapsed(), story.nvme());
    let stats = story.stats();
    assert_eq!((stats.withheld.len(), stats.withheld[0].tier), (1, Tier::Nvme));
    let text = setup.inspector(&["status"]);
    assert!(text.contains("- nvme for namespace"), "{text}");
    let json = setup.inspector(&["stats", "--json"]);
    assert!(json.contains("\"namespaces_withheld\":1"), "{json}");

    // From now on turns are computed, but for one in so many; nothing is lost by the others.
    let lost = story.nvme().lost_us;
    let (mut probes, mut computed) = (0, 0);
    for _ in 0..2 * PROBE_EVERY {
        let before = story.nvme().lost_us;
        let turn = story.turn().turn;
        if turn.reuse.nvme_tokens > 0 {
            probes += 1;
        } else {
            computed += 1;
            assert_eq!(story.nvme().lost_us, before, "a turn that is computed waits for no drive");
            assert_eq!(turn.recomputed_tokens, PROMPT_TOKENS);
        }
    }
    println!("{probes} turns tried it, {computed} were computed; lost {lost} us before");
    assert_eq!((probes, computed), (2, 2 * PROBE_EVERY - 2));

    set_delay(&delay, 0);
    let (began, mut turns) = (Instant::now(), 0);
    while story.nvme().namespaces_withheld > 0 {
        story.turn();
        turns += 1;
        assert!(began.elapsed() < PATIENCE && turns < 20, "{:?}", story.stats().withheld);
    }
    println!("offered again after {turns} turns and {:?}: {:?}", began.elapsed(), story.nvme());
    for _ in 0..3 {
        let turn = story.turn().turn;
        assert_eq!(turn.reuse.nvme_tokens, (BLOCKS * TOKENS_PER_BLOCK) as usize);
    }
    assert_eq!(story.stats().withheld, []);
    story.daemon.assert_healthy();
}
