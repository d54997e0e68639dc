//! Random damage to a store's metadata: recovery never panics, and gives only descriptors that were
//! written at that place in that life.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

mod store_support;

use std::sync::OnceLock;

use proptest::prelude::*;

use kvtide_tiers::segment::{FsckOptions, PAGE, SUPERBLOCK_OFFSETS, StoreError, fsck};
use store_support::{GEOMETRY, Image, blocks, descriptor_offset, folder};

#[derive(Clone, Debug)]
enum Damage {
    FlipSuperblock(u64, u32),
    FlipSegment(u32, u32),
    Truncate(u64),
    Swap(u32, u32),
    ZeroPage(u64),
    CopyPage(u64, u64),
}

fn damage() -> impl Strategy<Value = Damage> {
    let pages = GEOMETRY.store_bytes() / PAGE as u64;
    let area_bits = GEOMETRY.payload_start() * 8;
    let segment_page =
        |segment: u32, page: u32| GEOMETRY.segment_offset(segment) / PAGE as u64 + u64::from(page);
    let metadata = (0..GEOMETRY.segments, 0..=GEOMETRY.descriptor_pages)
        .prop_map(move |(segment, page)| segment_page(segment, page));
    let (segments, page_bits) = (GEOMETRY.segments, PAGE as u32 * 8);
    prop_oneof![
        1 => (0..2u64, 0..page_bits).prop_map(|(copy, bit)| Damage::FlipSuperblock(copy, bit)),
        4 => (0..segments, 0..area_bits).prop_map(|(at, bit)| Damage::FlipSegment(at, bit)),
        1 => (0..segments, 0..page_bits).prop_map(|(at, bit)| Damage::FlipSegment(at, bit)),
        1 => (0..pages).prop_map(Damage::Truncate),
        1 => (0..segments, 0..segments).prop_map(|(a, b)| Damage::Swap(a, b)),
        1 => metadata.clone().prop_map(Damage::ZeroPage),
        1 => (metadata.clone(), metadata).prop_map(|(from, to)| Damage::CopyPage(from, to)),
    ]
}

fn flip(image: &mut Image, offset: u64, bit: u32) {
    if let Some(byte) = image.bytes.get_mut(offset as usize + bit as usize / 8) {
        *byte ^= 1 << (bit % 8);
    }
}

fn inflict(image: &mut Image, damage: &Damage) {
    match *damage {
        Damage::FlipSuperblock(copy, bit) => {
            flip(image, SUPERBLOCK_OFFSETS[copy as usize], bit);
        }
        Damage::FlipSegment(segment, bit) => flip(image, GEOMETRY.segment_offset(segment), bit),
        Damage::Truncate(page) => image.bytes.truncate(page as usize * PAGE),
        Damage::Swap(a, b) => {
            let bytes = GEOMETRY.segment_bytes as usize;
            let (a, b) = (a.min(b), a.max(b));
            let (a, b) = (GEOMETRY.segment_offset(a), GEOMETRY.segment_offset(b));
            if a != b && b as usize + bytes <= image.bytes.len() {
                let (left, right) = image.bytes.split_at_mut(b as usize);
                left[a as usize..a as usize + bytes].swap_with_slice(&mut right[..bytes]);
            }
        }
        Damage::ZeroPage(page) => {
            if let Some(bytes) = image.bytes.chunks_mut(PAGE).nth(page as usize) {
                bytes.fill(0);
            }
        }
        Damage::CopyPage(from, to) => {
            let (from, to) = (from as usize * PAGE, to as usize * PAGE);
            if from.max(to) + PAGE <= image.bytes.len() {
                image.bytes.copy_within(from..from + PAGE, to);
            }
        }
    }
}

/// Three segments in use; segment 0 is in its second life, with the first one's descriptors behind
/// the second one's; segment 2 reaches into the second chunk.
fn base(path: &std::path::Path) -> Image {
    let mut image = Image::create(path);
    let first = image.sequence(1);
    image.fill(0, first, 40);
    let others =
        [(0, image.sequence(4), 10), (1, image.sequence(2), 20), (2, image.sequence(3), 230)];
    for (segment, sequence, blocks) in others {
        image.fill(segment, sequence, blocks);
    }
    image
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn only_what_was_written_comes_back(damages in prop::collection::vec(damage(), 1..6)) {
        let folder = folder();
        // Made once: only the bytes matter here.
        static BASE: OnceLock<Image> = OnceLock::new();
        let mut image = BASE.get_or_init(|| base(&folder.path().join("base"))).clone();
        image.path = folder.path().join("store");
        for damage in &damages {
            inflict(&mut image, damage);
        }
        image.save();
        let seen = fsck(&image.path, &FsckOptions::default(), &mut |_, _| {});
        prop_assert!(seen.is_ok());
        let misplaced = damages.iter().any(|damage| matches!(damage, Damage::CopyPage(..)));
        match image.reopen_after(misplaced) {
            Ok(store) => {
                prop_assert!(blocks(&store) <= 260);
                drop(store);
                let again = image.reopen_after(misplaced).unwrap();
                prop_assert_eq!(again.report.truncated_bytes, 0);
                prop_assert_eq!(again.report.superblocks_damaged, 0);
            }
            // Only the superblocks can make a store unusable, and then nothing was changed.
            Err(StoreError::Superblocks { .. } | StoreError::Foreign { .. }) => {
                prop_assert_eq!(std::fs::read(&image.path).unwrap(), image.bytes);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn an_undamaged_store_is_found_whole() {
    let folder = folder();
    let image = base(&folder.path().join("store"));
    image.save();
    let store = image.reopen().unwrap();
    assert_eq!(blocks(&store), 260);
    assert_eq!(store.report.descriptors_recovered, 260);
    assert_eq!(store.report.descriptors_stale, 30);
    assert_eq!(store.report.segments_empty, 1);
    let order: Vec<u32> = store.recovered.iter().map(|segment| segment.segment).collect();
    assert_eq!(order, [1, 2, 0]);
}

#[test]
fn a_flipped_bit_of_a_descriptor_costs_that_block_alone() {
    let folder = folder();
    let mut image = base(&folder.path().join("store"));
    for bit in (0..2048).step_by(97) {
        flip(&mut image, descriptor_offset(2, 200), bit);
        image.save();
        let store = image.reopen().unwrap();
        assert_eq!(blocks(&store), 259, "bit {bit}");
        flip(&mut image, descriptor_offset(2, 200), bit);
    }
}

#[test]
fn swapped_segments_are_refused_and_the_rest_is_found() {
    let folder = folder();
    let mut image = base(&folder.path().join("store"));
    inflict(&mut image, &Damage::Swap(0, 1));
    image.save();
    let store = image.reopen().unwrap();
    assert_eq!((blocks(&store), store.report.segments_swapped), (230, 2));
}

#[test]
fn a_file_cut_at_any_page_gives_what_is_inside_and_is_whole_again() {
    let folder = folder();
    let mut image = base(&folder.path().join("store"));
    let whole = image.bytes.clone();
    // Behind the second superblock, in steps that do not divide a segment.
    for page in (129..whole.len() / PAGE).step_by(37) {
        image.bytes = whole[..page * PAGE].to_vec();
        image.save();
        let store = image.reopen().unwrap();
        assert_eq!(store.report.truncated_bytes, (whole.len() - page * PAGE) as u64);
        for segment in &store.recovered {
            for (_, found) in &segment.descriptors {
                let at = GEOMETRY.segment_offset(segment.segment) + u64::from(found.offset);
                assert!(at + PAGE as u64 <= (page * PAGE) as u64);
            }
        }
        assert_eq!(std::fs::metadata(&image.path).unwrap().len(), whole.len() as u64);
    }
}
