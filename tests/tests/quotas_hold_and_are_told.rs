//! A tenant and a conversation at their quotas, as their client and their operator see it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::time::Duration;

use kvtide_client::{KeepRule, Lookup, Outcome, RejectReason, Tier};
use kvtide_tests::{KvPool, Setup};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const PATIENCE: Duration = Duration::from_secs(30);
const BLOCK_BYTES: u32 = 64 << 10;

fn with_quotas(tables: &str) -> Setup {
    let uid = rustix::process::geteuid().as_raw();
    let tenant = format!("[[tenant]]\nname = \"team-a\"\nuids = [{uid}]\n");
    Setup::new(NODE).option("--nvme-bytes", "0").config(&format!("{tenant}{tables}"))
}

#[test]
fn a_conversation_over_its_quota_keeps_its_beginning_and_is_told_of_the_rest() {
    let mut daemon = with_quotas("[tenant.conversation_quota]\nhost_hard = \"1MiB\"\n").start();
    let pool = KvPool::open(daemon.client(), "quota", 32, BLOCK_BYTES).unwrap();
    let held = pool.client.keep(&pool.space, 1, KeepRule::DropTail).unwrap();
    assert_eq!(held.tiers[1].quota.hard, Some(1 << 20), "{held:?}");
    let keys = pool.keys(1, 24);
    let stored = pool.store(&keys, 24, PATIENCE);
    let refused = Outcome::Rejected(RejectReason::ConversationQuota);
    assert!(stored[..16].iter().all(|each| *each == Outcome::Stored), "{stored:?}");
    assert!(stored[16..].iter().all(|each| *each == refused), "{stored:?}");
    let Lookup::Hit(hit) = pool.client.lookup(&[(&pool.space, &keys)], Duration::ZERO) else {
        panic!("the beginning is there");
    };
    let dropped = hit.dropped.expect("the client is told");
    assert_eq!((hit.blocks, dropped.first, dropped.end, dropped.blocks), (16, 16, 24, 8));
    assert_eq!(dropped.rule, KeepRule::DropTail);
    let held = pool.client.keep(&pool.space, 1, KeepRule::DropTail).unwrap();
    assert_eq!((held.tiers[1].used_bytes, held.dropped), (1 << 20, 8));
    daemon.assert_healthy();
}

#[test]
fn a_tenant_at_its_quota_replaces_its_own_blocks_and_the_operator_sees_it() {
    let mut daemon =
        with_quotas("[tenant.quota]\nhost_soft = \"1MiB\"\nhost_hard = \"2MiB\"\n").start();
    let pool = KvPool::open(daemon.client(), "quota", 32, BLOCK_BYTES).unwrap();
    for seed in 1..=10 {
        let stored = pool.store(&pool.keys(seed, 8), 8, PATIENCE);
        assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
    }
    assert_eq!(pool.found(&pool.keys(1, 8)), 0);
    assert_eq!(pool.found(&pool.keys(10, 8)), 8);
    let loaded = pool.load(&pool.keys(10, 8), PATIENCE);
    assert_eq!(loaded, vec![Outcome::Loaded(Tier::Host); 8]);
    let stats = pool.client.stats().unwrap();
    let owner = stats.owners.iter().find(|each| each.owner == "team-a").unwrap();
    let host = owner.held.tiers.iter().find(|each| each.tier == Tier::Host).unwrap();
    assert_eq!((host.used_bytes, host.evicted), (2 << 20, 10 * 8 - 32));
    for command in ["status", "stats"] {
        let text = daemon.setup().inspector(&[command]);
        let row = text.lines().find(|line| line.starts_with("team-a") && line.contains("host"));
        let row = row.unwrap_or_else(|| panic!("{text}"));
        assert!(row.contains("1.0 MiB") && row.contains("2.0 MiB"), "{text}");
    }
    daemon.assert_healthy();
}
