//! fsck finds each kind of damage, says where it is, and changes nothing.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

mod store_support;

use kvtide_tiers::block::{Codec, ElementType, Sum128};
use kvtide_tiers::codec;
use kvtide_tiers::folder::{STORE_FILE_NAME, StoreFolder};
use kvtide_tiers::segment::{
    FsckError, FsckOptions, FsckReport, ProblemKind, SUPERBLOCK_OFFSETS, SegmentState, fsck,
};
use store_support::{GEOMETRY, Image, descriptor_offset, folder};

fn check(image: &Image) -> FsckReport {
    image.save();
    let report = fsck(&image.path, &FsckOptions::default(), &mut |_, _| {}).unwrap();
    assert_eq!(std::fs::read(&image.path).unwrap(), image.bytes);
    report
}

fn base(path: &std::path::Path) -> Image {
    let mut image = Image::create(path);
    for segment in 0..3 {
        let sequence = image.sequence(1 + segment);
        image.fill(segment, sequence, 20);
    }
    image
}

fn flip(image: &mut Image, offset: u64) {
    image.bytes[offset as usize] ^= 0x10;
}

#[test]
fn a_sound_store_has_no_problems() {
    let folder = folder();
    let image = base(&folder.path().join("store"));
    let mut steps = Vec::new();
    image.save();
    let report =
        fsck(&image.path, &FsckOptions::default(), &mut |done, total| steps.push((done, total)));
    let report = report.unwrap();
    assert_eq!((report.problems_total, &report.problems), (0, &Vec::new()));
    assert_eq!((report.descriptors_valid, report.payloads_verified), (60, 60));
    assert_eq!(
        (report.geometry, report.epoch, report.clean),
        (Some(GEOMETRY), Some(1), Some(false))
    );
    assert_eq!(report.segments[3].state, SegmentState::Empty);
    assert_eq!(steps.last(), Some(&(4, 4)));
    assert!(serde_json::to_string(&report).unwrap().contains("\"problems_total\":0"));
}

#[test]
fn a_superblock_a_descriptor_and_a_payload_are_each_named_with_their_place() {
    let folder = folder();
    let mut image = base(&folder.path().join("store"));
    let descriptor = descriptor_offset(1, 17) + 100;
    let payload = GEOMETRY.segment_offset(2) + u64::from(GEOMETRY.payload_start()) + 3 * 4096;
    for offset in [SUPERBLOCK_OFFSETS[1] + 40, descriptor, payload + 5] {
        flip(&mut image, offset);
    }
    let report = check(&image);
    let found: Vec<_> = report
        .problems
        .iter()
        .map(|problem| (problem.kind, problem.segment, problem.index, problem.offset))
        .collect();
    assert_eq!(
        found,
        [
            (ProblemKind::Superblock, None, None, Some(SUPERBLOCK_OFFSETS[1])),
            (ProblemKind::Descriptor, Some(1), Some(17), Some(descriptor - 100)),
            (ProblemKind::Payload, Some(2), Some(3), Some(payload)),
        ]
    );
    assert_eq!((report.descriptors_valid, report.descriptors_damaged), (59, 1));
    assert_eq!((report.payloads_verified, report.payloads_damaged), (58, 1));
}

#[test]
fn damaged_headers_swapped_segments_and_truncation_are_named() {
    let folder = folder();
    let mut image = base(&folder.path().join("store"));
    flip(&mut image, GEOMETRY.segment_offset(0) + 300);
    let whole = GEOMETRY.segment_bytes as usize;
    let second = GEOMETRY.segment_offset(1) as usize;
    let (left, right) = image.bytes.split_at_mut(second + whole);
    left[second..].swap_with_slice(&mut right[..whole]);
    image.bytes.truncate(image.bytes.len() - whole - 8192);
    let report = check(&image);
    let kinds: Vec<_> =
        report.problems.iter().map(|problem| (problem.kind, problem.segment)).collect();
    assert_eq!(
        kinds,
        [
            (ProblemKind::Truncation, None),
            (ProblemKind::SegmentHeader, Some(0)),
            (ProblemKind::SwappedSegment, Some(1)),
            (ProblemKind::SwappedSegment, Some(2)),
        ]
    );
    assert_eq!(report.segments[0].orphaned, 20);
    assert_eq!(report.segments.len(), 3);
}

#[test]
fn without_superblocks_the_shape_is_found_from_the_segments() {
    let folder = folder();
    let mut image = base(&folder.path().join("store"));
    // A payload that claims to be a header is not believed.
    let planted = image.bytes[GEOMETRY.segment_offset(0) as usize..][..4096].to_vec();
    image.put(GEOMETRY.segment_offset(3), &planted);
    image.bytes[..1 << 20].fill(0);
    let report = check(&image);
    assert!(report.geometry_guessed);
    assert_eq!((report.geometry, report.epoch), (Some(GEOMETRY), None));
    assert_eq!(report.descriptors_valid, 60);
    let superblocks = report.problems.iter().filter(|one| one.kind == ProblemKind::Superblock);
    assert_eq!(superblocks.count(), 2);
}

#[test]
fn an_encoded_payload_is_decoded_and_compared() {
    let folder = folder();
    let mut image = Image::create(&folder.path().join("store"));
    let sequence = image.sequence(1);
    image.begin(0, sequence);
    let raw = vec![3; 8192];
    let stored = codec::encode(Codec::Lz4, ElementType::Bf16, &raw).unwrap();
    for (index, sum) in [(0, Sum128::of(&raw)), (1, Sum128::of(b"other"))] {
        let (mut descriptor, _) = image.block(0, sequence, 2 * index);
        descriptor.codec = Codec::Lz4;
        descriptor.raw_bytes = 8192;
        descriptor.stored_bytes = stored.len() as u32;
        descriptor.raw_sum = sum;
        descriptor.stored_sum = Sum128::of(&stored);
        image.write(index, &descriptor, &stored);
    }
    let report = check(&image);
    assert_eq!((report.payloads_verified, report.payloads_damaged), (1, 1));
    assert!(report.problems[0].text.contains("decoded"));
}

#[test]
fn the_folder_is_checked_too_and_problems_listed_are_bounded() {
    let folder = folder();
    let store = StoreFolder::open(folder.path()).unwrap();
    store.tenant_secret("alice").unwrap();
    drop(store);
    let mut image = base(&folder.path().join(STORE_FILE_NAME));
    for index in 0..20 {
        flip(&mut image, descriptor_offset(0, index) + 9);
    }
    image.save();
    std::fs::write(folder.path().join("namespaces.json"), "{").unwrap();
    let options = FsckOptions { verify_payloads: false, problems_max: 5 };
    let report = fsck(folder.path(), &options, &mut |_, _| {}).unwrap();
    assert_eq!(report.problems[0].kind, ProblemKind::NamespaceTable);
    assert_eq!((report.problems.len(), report.problems_total), (5, 21));
    assert_eq!(report.payloads_verified, 0);
}

#[test]
fn what_is_no_store_is_said_to_be_none() {
    let folder = folder();
    let empty = folder.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let options = FsckOptions::default();
    let error = fsck(&empty, &options, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, FsckError::NotAStore { .. }));
    assert!(fsck(&folder.path().join("absent"), &options, &mut |_, _| {}).is_err());
    let text = folder.path().join("text");
    std::fs::write(&text, "hello").unwrap();
    let report = fsck(&text, &options, &mut |_, _| {}).unwrap();
    assert_eq!((report.geometry, report.problems_total), (None, 2));
}
