//! The three launches of a sum leave behind what the twin says in every step, and the sum is
//! XXH3-128 as another implementation computes it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod support;

use kvtide_kernels::abi::{SUM_BYTES_MIN, SumEntry, scratch_bytes};
use kvtide_kernels::twin;
use support::{Arg, Launch, Memory, noise};
use twox_hash::XxHash3_128;

/// The payloads, summed by a launch of each kernel; gives the entries and the scratch of each.
fn summed(
    payloads: &mut [Memory],
    compare: impl Fn(usize, &[u8]) -> ([u64; 2], u32),
    launch: Launch,
) -> (Vec<SumEntry>, Vec<Vec<u64>>) {
    let mut entries = Vec::new();
    let mut lanes = 0;
    for (number, payload) in payloads.iter_mut().enumerate() {
        let bytes = payload.bytes().len() as u64;
        let (expected, compare) = compare(number, payload.bytes());
        let payload = payload.address();
        entries.push(SumEntry { payload, bytes, expected, compare, lanes, ..Default::default() });
        lanes += scratch_bytes(bytes) / 8;
    }
    let mut sums = Memory::table(&entries);
    let mut scratch = Memory::new(lanes as usize * 8, 0);
    let count = payloads.len() as u32;
    let args = [Arg::Wide(sums.address()), Arg::Word(count), Arg::Wide(scratch.address())];
    for name in ["kvtide_sum_stripes", "kvtide_sum_fold", "kvtide_sum_finish"] {
        launch.run(name, &args);
    }
    scratch.check_guards();
    sums.check_guards();
    let words: Vec<u64> = scratch
        .bytes()
        .chunks_exact(8)
        .map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    let entries: Vec<SumEntry> = sums.entries();
    let scratches = entries
        .iter()
        .map(|entry| {
            let start = entry.lanes as usize;
            words[start..start + scratch_bytes(entry.bytes) as usize / 8].to_vec()
        })
        .collect();
    (entries, scratches)
}

fn check(payloads: &mut [Memory], launch: Launch) {
    let (entries, scratches) = summed(payloads, |_, _| ([0; 2], 0), launch);
    for ((entry, scratch), payload) in entries.iter().zip(scratches).zip(payloads.iter()) {
        let bytes = payload.bytes();
        if entry.bytes < SUM_BYTES_MIN {
            assert_eq!(entry.found, [0; 2]);
            continue;
        }
        assert!(scratch == twin::sum_scratch(bytes), "{} bytes, {launch:?}", entry.bytes);
        let found = u128::from(entry.found[0]) | u128::from(entry.found[1]) << 64;
        assert_eq!(found, XxHash3_128::oneshot(bytes), "{} bytes, {launch:?}", entry.bytes);
        assert_eq!(entry.verdict, 0, "only computed");
    }
}

#[test]
fn every_length_aligned_or_not() {
    let data = noise(6000, 7);
    for skew in [0, 1, 4, 8] {
        let mut payloads: Vec<Memory> = (230..=1300)
            .chain(2040..=2060)
            .chain(4090..=4100)
            .chain([5119, 5120, 5121, 5999])
            .map(|bytes| Memory::of(&data[..bytes], skew))
            .collect();
        check(&mut payloads, Launch::of(3, 5, 32));
        check(&mut payloads, Launch::of(1, 1, 7));
        check(&mut payloads, Launch::of(2, 65, 4).folded());
    }
}

#[test]
fn blocks_of_megabytes() {
    let data = noise((4 << 20) + 64, 8);
    // Around the eight blocks that the fold loads ahead, and whole blocks as engines have them.
    let lengths = [8 << 10, (8 << 10) + 1, (16 << 10) + 1, (24 << 10) + 1025, 1 << 20, 2 << 20];
    let mut payloads: Vec<Memory> =
        lengths.iter().map(|bytes| Memory::of(&data[..*bytes], 0)).collect();
    payloads.push(Memory::of(&data, 0));
    payloads.push(Memory::of(&data[1..], 1));
    for launch in [Launch::of(64, 8, 128), Launch::of(5, 3, 64), Launch::of(1, 1, 1)] {
        check(&mut payloads, launch);
        check(&mut payloads, launch.folded());
    }
}

#[test]
fn one_bit_makes_the_verdict() {
    let mut payloads: Vec<Memory> =
        (0..130).map(|number| Memory::of(&noise(2000 + 37 * number, number as u64), 0)).collect();
    let expected = |number: usize, bytes: &[u8]| {
        let sum = XxHash3_128::oneshot(bytes);
        let mut halves = [sum as u64, (sum >> 64) as u64];
        // Every third is right; of the others one bit of 128 is not.
        if !number.is_multiple_of(3) {
            halves[number % 2] ^= 1 << (number % 64);
        }
        (halves, 1 + number as u32)
    };
    for launch in [Launch::of(1, 1, 32), Launch::of(9, 4, 96), Launch::of(2, 2, 64).folded()] {
        let (entries, _) = summed(&mut payloads, expected, launch);
        for (number, entry) in entries.iter().enumerate() {
            assert_eq!(entry.verdict, if number % 3 == 0 { 1 } else { 2 }, "payload {number}");
            let mut asked = *entry;
            (asked.found, asked.verdict) = ([0; 2], 0);
            assert_eq!(twin::sum_entry(asked, payloads[number].bytes()), *entry);
        }
    }
}

/// The path of XXH3 for short inputs is not there, so nothing may be taken for equal on it.
#[test]
fn short_payloads_never_pass() {
    let mut payloads: Vec<Memory> =
        (0..SUM_BYTES_MIN as usize).map(|bytes| Memory::of(&noise(bytes, 5), 0)).collect();
    for expected in [[0; 2], [u64::MAX; 2]] {
        let (entries, _) = summed(&mut payloads, |_, _| (expected, 1), Launch::of(2, 2, 32));
        assert!(entries.iter().all(|entry| entry.verdict == 2 && entry.found == [0; 2]));
    }
    let right = |_: usize, bytes: &[u8]| {
        let sum = XxHash3_128::oneshot(bytes);
        ([sum as u64, (sum >> 64) as u64], 1)
    };
    let (entries, _) = summed(&mut payloads, right, Launch::of(2, 2, 32));
    assert!(entries.iter().all(|entry| entry.verdict == 2));
}
