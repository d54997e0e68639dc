//! The life of one turn: `cargo run -p kvtide-client --example story` beside a running kvtided.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use kvtide_client::blocking::Client;
use kvtide_client::{ClientConfig, ClientError, ElementType, KvLayout, Model, Namespace};
use kvtide_client::{NamespaceSpec, Outcome, RankScope, RegionLayout};

fn main() -> Result<(), ClientError> {
    // Whose KV this is: every field that changes the bytes is part of it.
    let model = Model { weights: "sha256:0a1b".into(), revision: "1".into(), adapter: "".into() };
    let layout = KvLayout {
        layers: 2,
        kv_heads: 2,
        head_dim: 64,
        element: ElementType::Bf16,
        tokens_per_block: 16,
        kv_group: 0,
        ranks: RankScope::Rank { rank: 0, world: 1 },
        page_layout_version: 1,
    };
    let spec = NamespaceSpec::own(Namespace { model, layout, salt: String::new() });

    // The engine's pool: 64 places for blocks of 16 tokens, 2 layers, K and V, 2 heads of 64.
    let client = Client::connect(ClientConfig::default())?;
    let namespace = client.open_namespace(&spec)?;
    let pool = client.create_region(RegionLayout::opaque(64, 16 * 2 * 2 * 2 * 64 * 2))?;

    // A prompt arrives. What the cache still has of it is loaded, verified, into the pool.
    let prompt: Vec<u32> = (0..512).collect();
    let keys = namespace.chain(&prompt);
    let places: Vec<u32> = (0..64).take(keys.len()).collect();
    let second = Duration::from_secs(1);
    let loaded = client.load_prefix(&namespace, &pool, &keys, &places, second);
    println!("{} of {} blocks loaded, the rest is prefilled", loaded.blocks, keys.len());

    // What was missing is computed, and stored for whichever process the next turn comes to.
    let missing: Vec<u32> = places.into_iter().skip(loaded.blocks).collect();
    let started = Instant::now();
    for place in &missing {
        pool.write_block(*place, &[42; 16384])?;
    }
    // From how long that took the daemon learns what is better computed than loaded.
    let (computed, context) = (16 * missing.len() as u32, 16 * loaded.blocks as u32);
    client.report_prefill(&namespace, computed, context, started.elapsed(), None);
    let outcomes = client.store_prefix(&namespace, 1, &pool, &keys, &missing, second);
    println!("{} blocks stored", outcomes.iter().filter(|each| **each == Outcome::Stored).count());
    Ok(())
}
