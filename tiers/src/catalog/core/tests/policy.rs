//! What leaves first, and what may be written to nvme.

use super::*;

/// A request as engines make it: lookup with a lease, release, store of what was missing.
fn request(edge: &mut Edge, keys: &[BlockKey], hints: Hints) -> u32 {
    let prefix = PrefixQuery { namespace: NAMESPACE, keys: keys.to_vec() };
    let lookup = Request::Lookup { prefixes: vec![prefix], lease_ms: 1000, hints };
    let Some(Reply::Lookup(found)) = edge.ask(lookup) else { panic!("a lookup failed") };
    if let Some(lease) = found.lease {
        edge.ask(Request::Release { lease });
    }
    let rest: Vec<BlockKey> = keys.iter().skip(found.blocks as usize).copied().collect();
    if !rest.is_empty() {
        edge.store(keys, found.blocks as usize);
    }
    found.blocks
}

fn with_policy(policy: PolicyChoice) -> CatalogConfig {
    CatalogConfig { host_policy: policy, ..config(64, false) }
}

#[test]
fn what_returns_is_kept_and_what_never_does_leaves_first() {
    let mut hits = [0, 0];
    for (policy, hits) in [PolicyChoice::Lru, PolicyChoice::Pre].into_iter().zip(&mut hits) {
        let mut edge = Edge::new(with_policy(policy));
        // Short chats come back every 30 seconds, ever with one more block; long documents, enough
        // to flush everything in between, are read once.
        for turn in 0..1500u32 {
            edge.now += 3_000_000;
            let document = chain(100_000 + turn, 40);
            request(&mut edge, &document, Hints::default());
            let (chat, turns) = (turn % 10, turn / 10 % 4);
            let number = chat + turn / 40 * 100;
            *hits += request(&mut edge, &chain(number, 2 + turns), Hints::default());
            edge.catalog.check();
        }
    }
    let [lru, pre] = hits;
    assert!(pre > 1000 && pre > 3 * lru, "LRU {lru} hits, predicted reuse {pre}");
}

/// No block is there without those before it, as long as there is only host RAM.
#[test]
fn no_block_lies_behind_a_hole() {
    for policy in [PolicyChoice::Lru, PolicyChoice::Arc, PolicyChoice::Pre] {
        let mut edge = Edge::new(with_policy(policy));
        for step in 0..3000u32 {
            edge.now += 500_000;
            let number = step.wrapping_mul(2_654_435_761) >> 27;
            let length = 1 + step.wrapping_mul(40_503) % 13;
            let path: Vec<BlockKey> = chain(number % 3, 3 + number % 2)
                .into_iter()
                .chain((0..length).map(|at| key(number, 50 + at)))
                .collect();
            request(&mut edge, &path, Hints::default());
        }
        let table = &edge.catalog.table;
        for index in 0..table.index_end() {
            if let Some(block) = table.live(index) {
                assert!(block.is_ghost() || !block.orphan, "{policy:?}: a hole before {index}");
            }
        }
    }
}

#[test]
fn a_write_budget_is_never_exceeded_in_any_hour() {
    let per_day = 24 * 64 * u64::from(BLOCK);
    let mut config = config(40, true);
    if let Some(nvme) = &mut config.nvme {
        nvme.write_bytes_per_day = Some(per_day);
    }
    let mut edge = Edge::new(config);
    let mut written = vec![0];
    for minute in 0..240u32 {
        for part in 0..4 {
            edge.now += 15_000_000;
            edge.event(Event::Tick);
            request(&mut edge, &chain(minute * 4 + part, 3), Hints::default());
            edge.catalog.check();
        }
        written.push(edge.stats().nvme.bytes_in);
    }
    for (from, to) in written.iter().zip(&written[60..]) {
        assert!(to - from <= per_day / 24, "{} bytes in an hour", to - from);
    }
    let stats = edge.stats();
    assert!(stats.nvme.bytes_in > per_day / 24 * 2, "{} bytes in four hours", stats.nvme.bytes_in);
    assert!(stats.write_refused > 0 && stats.store_busy == 0);
}
