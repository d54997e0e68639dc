//! A fixed number of seeds, and bugs planted to be found.

use super::super::Planted;
use super::*;

/// Seeds of an ordinary test run.
const SEEDS: u64 = 300;

/// Seeds within which each planted bug must be found.
const SEEDS_FOR_BUGS: u64 = 100;

#[test]
fn seeds_are_clean() {
    let mut all = Counts::default();
    for seed in 0..SEEDS {
        match simulate(seed) {
            Ok(counts) => all.add(&counts),
            Err(failure) => panic!("{failure}"),
        }
    }
    // What never happens proves nothing.
    assert!(all.steps > 100 * SEEDS && all.loaded > SEEDS && all.stored > SEEDS, "{all:?}");
    assert!(all.hits > SEEDS && all.restarts > SEEDS && all.pins > SEEDS, "{all:?}");
}

#[test]
fn the_same_seed_does_the_same() {
    for seed in 0..10 {
        let (first, hash) = run(seed, 1, |_| {});
        let (second, again) = run(seed, 1, |_| {});
        assert_eq!((first, hash), (second, again), "seed {seed}");
    }
}

/// The first complaint about a catalog with this bug.
fn found(planted: Planted) -> String {
    let spoil = |world: &mut World| world.catalog.plant(planted);
    let mut seeds = 0..SEEDS_FOR_BUGS;
    let failure = seeds.find_map(|seed| run(seed, 0, spoil).0.err());
    failure
        .unwrap_or_else(|| panic!("{planted:?} is not found in {SEEDS_FOR_BUGS} seeds"))
        .complaint
}

#[test]
fn a_leased_block_that_is_evicted_is_found() {
    let complaint = found(Planted::LeasedBlockEvicted);
    assert!(complaint.contains("leased or pinned, and lost"), "{complaint}");
}

#[test]
fn a_slot_that_is_used_twice_is_found() {
    let complaint = found(Planted::SlotUsedTwice);
    assert!(complaint.contains("while it is in use"), "{complaint}");
}

#[test]
fn a_limit_that_is_off_by_one_is_found() {
    let complaint = found(Planted::LimitOffByOne);
    assert!(complaint.contains("are allowed"), "{complaint}");
}

#[test]
#[ignore]
fn survey() {
    let count = std::env::var("SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    let first = std::env::var("FIRST").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let full = std::env::var("FULL").is_ok();
    let mut bad = 0;
    for seed in first..first + count {
        if let Err(failure) = run(seed, if full { 1 << 20 } else { 0 }, |_| {}).0 {
            bad += 1;
            if full {
                println!("{failure}");
            } else if bad < 40 {
                let text: String = failure.complaint.chars().take(260).collect();
                println!("seed {} step {}: {text}", failure.seed, failure.step);
            }
        }
    }
    println!("{bad} of {count} bad");
}
