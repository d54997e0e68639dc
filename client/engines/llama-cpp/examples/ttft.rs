//! Time to first token: a prompt computed whole, and reloaded from host RAM and from NVMe.
//!
//! `cargo run --example ttft -- [ROUNDS] [PREFIX...]` starts a daemon of its own. The ways
//! alternate within each round, and the medians are printed; every reload's logits and KV bytes are
//! compared with those of the prompt that was computed whole.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark fails by a panic")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{Daemon, PATIENCE, long_text, weights};
use kvtide_llama_cpp::cache::CacheOptions;
use kvtide_llama_cpp::{ContextOptions, KvType, Model, Session, SessionOptions, Token, identity};

/// Tokens behind the prefix, which are always computed.
const TAIL: usize = 16;

/// Seconds of one way, and how much of that was loading.
#[derive(Default)]
struct Way {
    first: Vec<f64>,
    load: Vec<f64>,
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Bench {
    daemon: Daemon,
    whole: Session,
    cached: Session,
}

impl Bench {
    /// One prefill from an empty context; how long it took, and the logits.
    fn once(session: &mut Session, prompt: &[Token], way: &mut Way) -> (Vec<u32>, usize, usize) {
        session.clear();
        let start = Instant::now();
        let prefill = session.prefill(prompt).unwrap();
        let logits: Vec<u32> =
            session.context().logits().iter().map(|logit| logit.to_bits()).collect();
        way.first.push(start.elapsed().as_secs_f64());
        way.load.push(prefill.load.as_secs_f64());
        (logits, prefill.loaded.host, prefill.loaded.nvme)
    }

    fn blocks(session: &mut Session, count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|block| session.export(block)).collect()
    }

    fn prefix(&mut self, tokens: usize, text: &[Token], rounds: usize) {
        let prompt = &text[..tokens + TAIL];
        let count = tokens / 64;
        let (mut recompute, mut host, mut nvme) = (Way::default(), Way::default(), Way::default());
        self.cached.clear();
        self.cached.prefill(prompt).unwrap();
        let stored = self.cached.store(0);
        assert_eq!(stored.refused, 0);
        self.daemon.wait_written();
        for round in 0..rounds {
            let (expected, ..) = Self::once(&mut self.whole, prompt, &mut recompute);
            self.daemon.kill9();
            self.daemon.restart();
            while !self.cached.cache().unwrap().client().is_connected() {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            // A daemon that was just started has nothing in RAM; a load leaves a copy there.
            for (way, tiers) in [(&mut nvme, (0, count)), (&mut host, (count, 0))] {
                let (logits, from_host, from_nvme) = Self::once(&mut self.cached, prompt, way);
                assert_eq!((from_host, from_nvme), tiers, "not from that tier");
                assert!(logits == expected, "other logits");
                let one = Self::blocks(&mut self.whole, count);
                assert!(one == Self::blocks(&mut self.cached, count), "other KV bytes");
            }
            println!("  round {round}: {:?} {:?} {:?}", recompute.first, host.first, nvme.first);
        }
        let whole = median(&mut recompute.first);
        println!("prefix {tokens} + {TAIL} tokens, medians of {rounds}, all bits equal:");
        println!("  recompute    {whole:8.3} s to the first token");
        for (name, way) in [("host reload", &mut host), ("nvme reload", &mut nvme)] {
            let (first, load) = (median(&mut way.first), median(&mut way.load));
            println!(
                "  {name}  {first:8.3} s, of which loading {load:.3} s ({:.2} GB/s); recompute is \
                 {:.1} times that",
                (count * self.cached.block_bytes()) as f64 / load / 1e9,
                whole / first
            );
        }
    }
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<usize>().unwrap());
    let rounds = numbers.next().unwrap_or(3);
    let mut prefixes: Vec<usize> = numbers.collect();
    if prefixes.is_empty() {
        prefixes = vec![1024, 4096];
    }
    let kv = match std::env::var("KVTIDE_KV").as_deref() {
        Ok("f16") => KvType::F16,
        _ => KvType::Bf16,
    };
    let flash_attention = std::env::var_os("KVTIDE_NO_FLASH_ATTENTION").is_none();
    let Some(path) = weights() else { return };
    let daemon = Daemon::start("256MiB");
    let model = Model::load(&path).unwrap();
    let digest = identity::digest(&path).unwrap();
    let text = model.tokenize(&long_text()).unwrap();
    let longest = prefixes.iter().max().unwrap() + TAIL;
    let ctx = u32::try_from(longest.next_multiple_of(256)).unwrap();
    let context = ContextOptions { ctx, kv, flash_attention, ..ContextOptions::default() };
    println!("{context:?}");
    let options = SessionOptions { context, block_tokens: 64, cache: None };
    let (whole, _) = Session::open(&model, &digest, options.clone()).unwrap();
    let mut cache = CacheOptions { advised: false, ..CacheOptions::default() };
    cache.client.socket = daemon.socket();
    cache.load_timeout = PATIENCE;
    cache.store_timeout = PATIENCE;
    let (cached, without) =
        Session::open(&model, &digest, SessionOptions { cache: Some(cache), ..options }).unwrap();
    assert!(without.is_none(), "{without:?}");
    let status = daemon.client().status().unwrap();
    println!("{status:?}");
    let mut bench = Bench { daemon, whole, cached };
    for tokens in prefixes {
        bench.prefix(tokens, &text, rounds);
    }
}
