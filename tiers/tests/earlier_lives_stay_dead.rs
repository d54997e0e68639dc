//! What an earlier life of a segment left behind, what a payload contains, and what cannot be true
//! is never taken for a block.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

mod store_support;

use kvtide_tiers::block::{BlockKey, Descriptor, NamespaceId, Place};
use kvtide_tiers::segment::ERASED_DESCRIPTOR;
use store_support::{GEOMETRY, Image, blocks, descriptor_offset, folder};

#[test]
fn descriptors_of_the_life_before_are_refused() {
    let folder = folder();
    let mut image = Image::create(&folder.path().join("store"));
    let (old, new) = (image.sequence(1), image.sequence(2));
    image.fill(0, old, 100);
    image.fill(0, new, 3);
    image.save();
    let store = image.reopen().unwrap();
    assert_eq!((blocks(&store), store.report.descriptors_stale), (3, 97));
    assert!(store.recovered.iter().all(|segment| segment.sequence == new));
}

#[test]
fn a_header_without_descriptors_of_its_own_life_gives_nothing() {
    let folder = folder();
    let mut image = Image::create(&folder.path().join("store"));
    let (old, new) = (image.sequence(1), image.sequence(2));
    image.fill(0, old, 100);
    image.begin(0, new);
    image.save();
    let store = image.reopen().unwrap();
    assert_eq!(blocks(&store), 0);
    assert_eq!(store.recovered.len(), 1);
}

#[test]
fn descriptors_planted_in_a_payload_are_not_parsed() {
    let folder = folder();
    let mut image = Image::create(&folder.path().join("store"));
    let sequence = image.sequence(1);
    image.fill(0, sequence, 4);
    // A payload full of descriptors that are valid for this very segment and life, and one that is
    // a whole header page.
    let (planted, _) = image.block(0, sequence, 50);
    let place = Place::Segment { salt: image.salt, segment: 0, sequence };
    let payload = planted.encode(place).repeat(16);
    let (carrier, _) = image.block(0, sequence, 4);
    image.write(4, &carrier, &payload);
    image.save();
    let store = image.reopen().unwrap();
    assert_eq!(blocks(&store), 5);
    assert!(store.recovered[0].descriptors.iter().all(|(_, found)| found.key != planted.key));
}

#[test]
fn a_long_run_of_erased_descriptors_does_not_hide_what_is_behind() {
    let folder = folder();
    let mut image = Image::create(&folder.path().join("store"));
    let sequence = image.sequence(1);
    image.begin(0, sequence);
    for index in 0..256 {
        image.put(descriptor_offset(0, index), &ERASED_DESCRIPTOR);
    }
    let (mut descriptor, payload) = image.block(0, sequence, 256);
    descriptor.offset = GEOMETRY.payload_start();
    image.write(256, &descriptor, &payload);
    image.save();
    let store = image.reopen().unwrap();
    assert_eq!((blocks(&store), store.report.descriptors_erased), (1, 256));
    assert_eq!(store.report.descriptors_damaged, 0);
}

#[test]
fn two_segments_with_one_sequence_are_both_refused() {
    let folder = folder();
    let mut image = Image::create(&folder.path().join("store"));
    let sequence = image.sequence(1);
    let other = image.sequence(2);
    image.fill(0, sequence, 4);
    image.fill(1, sequence, 4);
    image.fill(2, other, 4);
    image.save();
    let store = image.reopen().unwrap();
    assert_eq!((blocks(&store), store.report.segments_same_sequence), (4, 2));
}

fn one_changed(change: impl FnOnce(&mut Descriptor)) -> kvtide_tiers::segment::OpenStore {
    let folder = folder();
    let mut image = Image::create(&folder.path().join("store"));
    let sequence = image.sequence(1);
    image.fill(0, sequence, 4);
    let (mut descriptor, _) = image.block(0, sequence, 4);
    change(&mut descriptor);
    let place = Place::Segment { salt: image.salt, segment: 0, sequence };
    image.put(descriptor_offset(0, 4), &descriptor.encode(place));
    image.written.insert((0, sequence, 4), descriptor);
    image.save();
    image.reopen().unwrap()
}

#[test]
fn fields_that_cannot_be_are_refused_by_reason() {
    type Change = fn(&mut Descriptor);
    let changes: [(&str, Change); 9] = [
        ("tokens", |one| one.tokens = 0),
        ("raw", |one| one.raw_bytes = 0),
        ("stored", |one| one.stored_bytes = 0),
        ("larger than raw", |one| one.stored_bytes = 3 * one.raw_bytes),
        ("unaligned", |one| one.offset += 512),
        ("inside the descriptor area", |one| one.offset = 4096),
        ("behind the segment", |one| one.offset = GEOMETRY.segment_bytes),
        ("of another segment", |one| one.segment = 1),
        ("of another life", |one| one.segment_sequence += 1),
    ];
    for (name, change) in changes {
        let store = one_changed(change);
        assert_eq!((blocks(&store), store.report.descriptors_invalid), (4, 1), "{name}");
    }
}

#[test]
fn of_two_payloads_that_overlap_the_later_stays() {
    let store = one_changed(|one| one.offset = GEOMETRY.payload_start());
    assert_eq!((blocks(&store), store.report.descriptors_overlapping), (4, 1));
    let indices: Vec<u32> =
        store.recovered[0].descriptors.iter().map(|(index, _)| *index).collect();
    assert_eq!(indices, [1, 2, 3, 4]);
}

#[test]
fn of_two_descriptors_of_one_block_the_later_stays() {
    let mut first = [0; 32];
    (first[0], first[31]) = (1, 1);
    let store = one_changed(|one| one.key = BlockKey(first));
    assert_eq!((blocks(&store), store.report.descriptors_duplicate), (4, 1));
    assert!(store.recovered[0].descriptors.iter().all(|(index, _)| *index != 0));
}

#[test]
fn other_generations_and_unknown_namespaces_are_left_out() {
    let store = one_changed(|one| one.generation -= 1);
    assert_eq!((blocks(&store), store.report.descriptors_old_generation), (4, 1));
    let store = one_changed(|one| one.namespace = NamespaceId(9));
    assert_eq!((blocks(&store), store.report.descriptors_unknown_namespace), (4, 1));
    assert!(store.report.to_string().contains("1 blocks of unknown namespaces"));
}
