//! Opening a store file: what is refused, with which words, and what is never left behind.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

mod store_support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::{Resource, getrlimit, setrlimit};

use kvtide_tiers::segment::{
    PAGE, SUPERBLOCK_OFFSETS, SegmentStore, StoreError, StoreGeometry, StoreWant, Superblock,
};
use store_support::{GEOMETRY, Image, blocks, current, folder, open};

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_new_store_is_preallocated_private_and_counts_its_openings() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    // What an earlier try left is in nobody's way.
    std::fs::write(folder.path().join("store.new"), "half").unwrap();
    let first = open(&path).unwrap();
    assert!(first.report.created);
    assert_eq!(first.report.to_string(), "new store");
    let meta = std::fs::metadata(&path).unwrap();
    assert_eq!(meta.len(), GEOMETRY.store_bytes());
    assert!(std::os::unix::fs::MetadataExt::blocks(&meta) * 512 >= GEOMETRY.store_bytes());
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    assert_eq!(files(folder.path()), 1);
    let salt = first.salt;
    drop(first);
    let second = open(&path).unwrap();
    assert_eq!((second.epoch, second.salt), (2, salt));
    assert!(!second.report.created && !second.report.clean);
}

#[test]
fn a_clean_stop_and_quarantined_segments_persist() {
    let folder = folder();
    let path = folder.path().join("store");
    let mut image = Image::create(&path);
    let sequences = [image.sequence(1), image.sequence(2)];
    image.fill(0, sequences[0], 3);
    image.fill(1, sequences[1], 5);
    image.save();
    let mut store = open(&path).unwrap();
    store.store.set_quarantined(&[1, 1, 77]).unwrap();
    store.store.mark_clean().unwrap();
    drop(store);
    let store = open(&path).unwrap();
    assert!(store.report.clean);
    assert_eq!(store.quarantined, [1]);
    assert_eq!((blocks(&store), store.report.segments_quarantined), (3, 1));
    drop(store);
    let store = open(&path).unwrap();
    assert!(!store.report.clean);
    assert_eq!(store.quarantined, [1]);
}

#[test]
fn either_superblock_alone_is_enough_and_no_epoch_comes_twice() {
    let folder = folder();
    let path = folder.path().join("store");
    drop(open(&path).unwrap());
    for (round, offset) in SUPERBLOCK_OFFSETS.into_iter().enumerate() {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[offset as usize + 100] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let store = open(&path).unwrap();
        assert_eq!(store.report.superblocks_damaged, 1);
        assert_eq!(store.epoch, 2 + round as u32);
    }
}

#[test]
fn an_epoch_that_segments_know_is_not_given_again() {
    let folder = folder();
    let path = folder.path().join("store");
    let mut image = Image::create(&path);
    image.fill(2, 900 << 32 | 7, 1);
    image.save();
    assert_eq!(open(&path).unwrap().epoch, 901);
}

#[test]
fn two_damaged_superblocks_are_an_error_that_changes_nothing() {
    let folder = folder();
    let path = folder.path().join("store");
    drop(open(&path).unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    for offset in SUPERBLOCK_OFFSETS {
        bytes[offset as usize + 100] ^= 1;
    }
    std::fs::write(&path, &bytes).unwrap();
    let error = open(&path).unwrap_err();
    assert!(matches!(error, StoreError::Superblocks { .. }));
    let text = error.to_string();
    assert!(text.contains("kvtide fsck") && text.contains("moving the file away"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let want = StoreWant { reset_foreign: true, ..StoreWant::new(GEOMETRY) };
    let store = SegmentStore::open(&path, &want, current).unwrap();
    assert_eq!(store.epoch, 1);
}

#[test]
fn foreign_files_are_left_alone() {
    let folder = folder();
    let path = folder.path().join("store");
    for bytes in [b"x".to_vec(), b"SQLite format 3".repeat(100_000)] {
        std::fs::write(&path, &bytes).unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. } | StoreError::Superblocks { .. }));
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
    assert!(open(&path).unwrap_err().to_string().contains("not a kvtide store"));
    assert!(matches!(open(folder.path()), Err(StoreError::NotAFile { .. })));
}

#[test]
fn a_newer_format_is_refused_by_number() {
    let folder = folder();
    let path = folder.path().join("store");
    drop(open(&path).unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    // A superblock of version 2 with a right checksum, by the rule that all versions keep.
    let (body, sum) = bytes[..PAGE].split_at_mut(PAGE - 16);
    body[8..12].copy_from_slice(&2u32.to_le_bytes());
    sum.copy_from_slice(&twox_hash::XxHash3_128::oneshot(body).to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    let error = open(&path).unwrap_err();
    assert!(matches!(error, StoreError::Newer { version: 2, .. }), "{error}");
}

#[test]
fn another_shape_is_refused_with_both() {
    let folder = folder();
    let path = folder.path().join("store");
    drop(open(&path).unwrap());
    let other = StoreGeometry { segments: 5, ..GEOMETRY };
    let error = SegmentStore::open(&path, &StoreWant::new(other), current).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("4 segments") && text.contains("5 segments"), "{text}");
    let unsound = StoreGeometry { segment_bytes: 5, ..GEOMETRY };
    let error = SegmentStore::open(&path, &StoreWant::new(unsound), current).unwrap_err();
    assert!(matches!(error, StoreError::Unsound { .. }));
}

#[test]
fn a_store_that_does_not_fit_says_how_much_is_missing_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let huge = StoreGeometry { segment_bytes: 1 << 30, segments: u32::MAX, descriptor_pages: 1 };
    let error = SegmentStore::open(&path, &StoreWant::new(huge), current).unwrap_err();
    let StoreError::NoSpace { want_bytes, missing_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(want_bytes, huge.store_bytes());
    assert!(missing_bytes > 0 && missing_bytes <= want_bytes);
    assert!(error.to_string().contains("name a smaller size"));
    assert_eq!(files(folder.path()), 0);
    let nowhere = folder.path().join("missing/store");
    assert!(open(&nowhere).unwrap_err().to_string().contains("cannot make it"));
}

const LIMITED: &str = "KVTIDE_TEST_LIMITED";

/// Not a test of its own: the process that the next one starts.
#[test]
fn limited() {
    let Some(path) = std::env::var_os(LIMITED) else { return };
    let mut limit = getrlimit(Resource::Fsize);
    limit.current = Some(1 << 20);
    setrlimit(Resource::Fsize, limit).unwrap();
    let error = open(Path::new(&path)).unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains("ulimit -f"));
}

#[test]
fn a_file_size_limit_is_an_error_and_not_a_deadly_signal() {
    let folder = tempfile::tempdir().unwrap();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "limited"])
        .env(LIMITED, folder.path().join("store"))
        .status();
    assert!(status.unwrap().success());
    assert_eq!(files(folder.path()), 0);
}

#[test]
fn an_empty_file_becomes_a_store() {
    let folder = folder();
    let path = folder.path().join("store");
    std::fs::write(&path, "").unwrap();
    assert!(open(&path).unwrap().report.created);
}

#[test]
fn the_page_cache_serves_where_direct_is_not_wanted() {
    let folder = folder();
    let path = folder.path().join("store");
    let want = StoreWant { direct: false, ..StoreWant::new(GEOMETRY) };
    let store = SegmentStore::open(&path, &want, current).unwrap();
    assert!(!store.direct);
    let bytes = std::fs::read(&path).unwrap();
    let page: &[u8; PAGE] = bytes[..PAGE].try_into().unwrap();
    assert_eq!(Superblock::decode(page).as_ref(), Ok(store.store.superblock()));
}
