//! A drive that is slower than computing: the engine soon computes and waits for no drive, and
//! reloads again when the drive is well. Also where the engine gives up before the drive has
//! answered. Real weights, a real daemon, and every turn compared with one that was computed whole.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Daemon, PATIENCE, alone, long_text, weights};
use kvtide_client::blocking::Client;
use kvtide_client::{BlockKey, CatalogStats, Lookup, NamespaceHandle, NamespaceSpec};
use kvtide_client::{Tier, TierWorth};
use kvtide_llama_cpp::cache::CacheOptions;
use kvtide_llama_cpp::chat::Choice;
use kvtide_llama_cpp::{ContextOptions, Model, Prefill, Session, SessionOptions, Token, identity};

const BLOCK: usize = 16;
const BLOCKS: usize = 6;
/// The last tokens are no whole block.
const PROMPT: usize = BLOCKS * BLOCK + 8;
/// Tokens drawn in each turn.
const ANSWER: usize = 3;
/// Turns until something is noticed; the contract is a minute of turns.
const TURNS_MAX: usize = 12;
const PROBE_EVERY: usize = 3;
/// So many times as long as the daemon expects of computing does a read take on the slow drive.
const SLOWER: u32 = 4;
/// Other people's blocks stored at a time, to push the conversation out of RAM.
const OTHERS: u32 = 48;

/// A load is not cut short by the daemon: how long the engine waits is its own matter. What is in
/// RAM leaves by age, so that the others push the conversation out however often it is asked for.
const CONFIG: &str = "[arbiter]\nprobe_every = 3\n[limits]\nticket_ms = 600000\n\
                      [host]\npolicy = \"lru\"\n";
const SIZES: [&str; 4] = ["--host-bytes", "16MiB", "--nvme-bytes", "2GiB"];

/// What a turn came to.
struct Turn {
    logits: Vec<u32>,
    answer: Vec<Token>,
    prefill: Prefill,
    first: Duration,
    store: Duration,
}

struct Story {
    daemon: Daemon,
    /// An operator's.
    client: Client,
    space: NamespaceHandle,
    keys: Vec<BlockKey>,
    prompt: Vec<Token>,
    whole: Turn,
    turns: usize,
}

fn open(model: &Arc<Model>, digest: &str, daemon: &Daemon, load_timeout: Duration) -> Session {
    let mut cache = CacheOptions { load_timeout, ..CacheOptions::default() };
    cache.client.socket = daemon.socket();
    cache.client.call_timeout = PATIENCE;
    cache.store_timeout = PATIENCE;
    // One thread: several wait for each other where others use the cores as well.
    let context = ContextOptions { ctx: 256, threads: 1, ..ContextOptions::default() };
    let block_tokens = u32::try_from(BLOCK).unwrap();
    let options = SessionOptions { context, block_tokens, cache: Some(cache) };
    let (session, without) = Session::open(model, digest, options).unwrap();
    assert!(without.is_none(), "{without:?}");
    session
}

/// A turn of an engine that has nothing itself.
fn take_turn(session: &mut Session, prompt: &[Token]) -> Turn {
    session.clear();
    let start = Instant::now();
    let prefill = session.prefill(prompt).unwrap();
    let logits = session.context().logits().iter().map(|logit| logit.to_bits()).collect();
    let mut answer = vec![Choice::Greedy.next(session).unwrap()];
    let first = start.elapsed();
    while answer.len() < ANSWER {
        session.append(*answer.last().unwrap()).unwrap();
        answer.push(Choice::Greedy.next(session).unwrap());
    }
    let start = Instant::now();
    session.store(1);
    Turn { logits, answer, prefill, first, store: start.elapsed() }
}

impl Story {
    /// Tiers in which a lookup now finds the conversation.
    fn offered_from(&self) -> Vec<Tier> {
        match self.client.lookup(&[(&self.space, &self.keys)], Duration::ZERO) {
            Lookup::Hit(hit) => hit.runs.iter().map(|run| run.tier).collect(),
            Lookup::Miss => Vec::new(),
        }
    }

    /// Waits until nothing is under way: what an engine gave up still is.
    fn wait_idle(&self) {
        let until = Instant::now() + PATIENCE;
        while self.stats().tickets > 0 {
            assert!(Instant::now() < until, "loads do not end");
            std::thread::sleep(Duration::from_millis(50));
        }
        self.daemon.wait_written();
    }

    /// How long the daemon expects computing the conversation's blocks to take.
    fn expected_compute(&self) -> Duration {
        match self.client.lookup(&[(&self.space, &self.keys)], Duration::ZERO) {
            Lookup::Hit(hit) => Duration::from_micros(hit.advice.compute_all_us.unwrap()),
            Lookup::Miss => panic!("nothing is offered"),
        }
    }

    /// A turn of which nothing is in RAM. It comes to the same bits however it is done.
    fn turn(&mut self, session: &mut Session, what: &str) -> Turn {
        self.wait_idle();
        let mut rounds = 0;
        // What is withheld is not seen at all.
        while self.offered_from().iter().any(|tier| *tier != Tier::Nvme) {
            self.daemon.push_out(session.block_bytes(), OTHERS, session.namespace());
            rounds += 1;
            assert!(rounds < 8, "not pushed out of RAM");
        }
        self.turns += 1;
        let before = self.nvme();
        let turn = take_turn(session, &self.prompt);
        let (after, loaded) = (self.nvme(), turn.prefill.loaded);
        println!(
            "{:2} {what}: {} blocks offered, withheld {}; loaded {} from host, {} from nvme, {} \
             missed; computed {} of {PROMPT} tokens in {:.3} s; lookup and load {:.4} s; first \
             token {:.3} s; store {:.3} s",
            self.turns,
            loaded.offered,
            if after.withheld > before.withheld { "yes" } else { "no" },
            loaded.host,
            loaded.nvme,
            loaded.missed,
            turn.prefill.computed,
            turn.prefill.compute.as_secs_f64(),
            turn.prefill.load.as_secs_f64(),
            turn.first.as_secs_f64(),
            turn.store.as_secs_f64(),
        );
        assert!(turn.logits == self.whole.logits, "{what}: other logits");
        assert_eq!(turn.answer, self.whole.answer, "{what}: another answer");
        turn
    }

    fn reload(&mut self, session: &mut Session, what: &str) {
        let Prefill { loaded, computed, .. } = self.turn(session, what).prefill;
        assert_eq!((loaded.offered, loaded.nvme, loaded.host), (BLOCKS, BLOCKS, 0), "{what}");
        assert_eq!(computed, PROMPT - BLOCKS * BLOCK, "{what}");
    }

    /// Turns until the tier is withheld, or offered again.
    fn until_withheld(&mut self, session: &mut Session, wanted: bool, what: &str) {
        let mut turns = 0;
        while (self.nvme().namespaces_withheld > 0) != wanted {
            self.turn(session, what);
            turns += 1;
            assert!(turns < TURNS_MAX, "{:?} {:?}", self.nvme(), self.stats().withheld);
        }
        println!("-- after {turns} turns: {:?}", self.nvme());
    }

    fn stats(&self) -> CatalogStats {
        self.client.stats().unwrap().catalog.unwrap()
    }

    fn nvme(&self) -> TierWorth {
        *self.stats().worth.iter().find(|row| row.tier == Tier::Nvme).unwrap()
    }

    /// While the tier is withheld, one turn in so many tries it, and the others are computed.
    fn withheld_turns(&mut self, session: &mut Session) {
        let (mut probes, mut computed) = (0, 0);
        for _ in 0..PROBE_EVERY {
            let before = self.nvme();
            let turn = self.turn(session, "slow, withheld").prefill;
            let after = self.nvme();
            if turn.loaded.offered > 0 {
                probes += 1;
                assert_eq!(after.probes, before.probes + 1);
                assert!(after.lost_us > before.lost_us, "{after:?}");
            } else {
                computed += 1;
                assert_eq!((turn.loaded.nvme, turn.loaded.missed), (0, 0));
                assert_eq!(turn.computed, PROMPT);
                assert_eq!(after.withheld, before.withheld + 1);
                assert_eq!(
                    (after.loads, after.lost_us, after.probes),
                    (before.loads, before.lost_us, before.probes),
                    "a turn that is computed waits for no drive"
                );
            }
        }
        assert_eq!((probes, computed), (1, PROBE_EVERY - 1));
    }
}

fn begin(daemon: Daemon, session: &mut Session, text: &[Token]) -> Story {
    // It reports how fast it computes: prompts of several lengths, which nobody stores.
    for (from, tokens) in [(0, 40), (60, 64), (150, 90)] {
        session.clear();
        let prefill = session.prefill(&text[200 + from..][..tokens]).unwrap();
        let took = prefill.compute.as_secs_f64();
        println!("{tokens} tokens: {took:.3} s, {:.0} tokens/s", tokens as f64 / took);
    }
    let prompt = text[..PROMPT].to_vec();
    let whole = take_turn(session, &prompt);
    assert_eq!((whole.prefill.computed, whole.prefill.loaded.offered), (PROMPT, 0));
    println!("computed whole: first token {:.3} s", whole.first.as_secs_f64());
    daemon.wait_written();
    let client = daemon.client();
    let space = client.open_namespace(&NamespaceSpec::own(session.namespace().clone())).unwrap();
    let tokens: Vec<u32> = prompt[..BLOCKS * BLOCK].iter().map(|t| t.cast_unsigned()).collect();
    let keys = space.chain(&tokens);
    Story { daemon, client, space, keys, prompt, whole, turns: 0 }
}

#[test]
fn a_drive_slower_than_computing_is_not_waited_for_and_is_used_again_when_it_is_well() {
    let Some(path) = weights() else { return };
    let _alone = alone();
    let daemon = Daemon::start_with(&SIZES, CONFIG, true);
    let model = Model::load(&path).unwrap();
    let digest = identity::digest(&path).unwrap();
    let text = model.tokenize(&long_text()).unwrap();
    let patient = &mut open(&model, &digest, &daemon, Duration::from_secs(600));
    let mut story = begin(daemon, patient, &text);
    let prefill = story.stats().prefill;
    assert_eq!((prefill.reports, prefill.reports_unused, prefill.namespaces_known), (4, 0, 1));
    for _ in 0..2 {
        story.reload(patient, "well");
    }
    let well = story.nvme();
    assert!(well.saved_us > well.lost_us && well.namespaces_withheld == 0, "{well:?}");

    let expected = story.expected_compute();
    let slow = expected * SLOWER;
    story.daemon.delay_reads(slow);
    println!(
        "-- computing {} tokens is expected to take {:.3} s; each read now takes {:.3} s more",
        BLOCKS * BLOCK,
        expected.as_secs_f64(),
        slow.as_secs_f64()
    );
    story.until_withheld(patient, true, "slow");
    let withheld = story.stats().withheld;
    assert_eq!((withheld.len(), withheld[0].tier), (1, Tier::Nvme), "{withheld:?}");
    story.withheld_turns(patient);

    story.daemon.delay_reads(Duration::ZERO);
    println!("-- well again");
    story.until_withheld(patient, false, "well again, withheld");
    for _ in 0..2 {
        story.reload(patient, "well again");
    }
    assert_eq!(story.stats().withheld, []);

    // Who waits for half as long as computing takes sees no load end, and the daemon does.
    let hasty = &mut open(&model, &digest, &story.daemon, expected / 2);
    story.daemon.delay_reads(slow);
    println!("-- slow once more, and the engine gives up before");
    story.until_withheld(hasty, true, "slow, hasty");
    let turn = story.turn(hasty, "slow, hasty, withheld").prefill;
    assert_eq!((turn.loaded.offered, turn.computed), (0, PROMPT));
}
