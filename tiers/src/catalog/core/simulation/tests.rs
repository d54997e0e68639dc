//! A fixed number of seeds, and bugs planted to be found.

use super::super::Planted;
use super::media::Disowning;
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

/// Each of these found something once: a forgotten block whose slot was still written from came
/// back from kept RAM; a segment was reclaimed with the last good copy of a pinned block, whose
/// slot of bad bytes was still read; an idle node that had once found no room reclaimed for ever;
/// a block that was forgotten while its slot was still filled came back from kept RAM; a block had
/// a copy of one conversation on nvme and of another one in kept RAM, which was forgotten in vain.
#[test]
fn seeds_that_found_something_are_clean() {
    for seed in [21, 31, 279, 345, 770, 1491, 2158, 2493, 3400, 4268, 4431] {
        simulate(seed).unwrap_or_else(|failure| panic!("{failure}"));
    }
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
    complaint_of(planted, |world| world.catalog.plant(planted))
}

/// The first complaint about an edge that disowns blocks like this.
fn found_in_edge(disowning: Disowning) -> String {
    complaint_of(disowning, |world| world.media.disowning = disowning)
}

fn complaint_of(bug: impl fmt::Debug, spoil: impl Fn(&mut World)) -> String {
    let mut seeds = 0..SEEDS_FOR_BUGS;
    let failure = seeds.find_map(|seed| run(seed, 0, &spoil).0.err());
    let failure =
        failure.unwrap_or_else(|| panic!("{bug:?} is not found in {SEEDS_FOR_BUGS} seeds"));
    println!("{bug:?}: seed {}, step {}: {}", failure.seed, failure.step, failure.complaint);
    failure.complaint
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

/// Once the descriptor of a block that was forgotten went at once, and those whose turn to copy it
/// came later took it for damaged.
#[test]
fn a_descriptor_that_goes_before_its_readers_is_found() {
    let complaint = found_in_edge(Disowning::Voids);
    assert!(complaint.contains("lacks its descriptor"), "{complaint}");
}

#[test]
fn a_block_that_was_given_up_and_is_taken_over_is_found() {
    let complaint = found_in_edge(Disowning::Skips);
    assert!(complaint.contains("was disowned, and is taken over"), "{complaint}");
}

#[test]
fn a_block_that_was_given_up_while_it_was_copied_and_is_taken_over_is_found() {
    let complaint = found_in_edge(Disowning::SkipsFills);
    assert!(complaint.contains("was disowned, and is taken over"), "{complaint}");
}

/// Takes a minute; `bench/src/simulate.rs` is for more.
#[test]
#[ignore = "takes a minute"]
fn many_seeds_are_clean() {
    for seed in SEEDS..2_000 {
        simulate(seed).unwrap_or_else(|failure| panic!("{failure}"));
    }
}
