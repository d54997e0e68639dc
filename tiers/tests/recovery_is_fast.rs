//! How long a large store takes to open. Ignored by default, because it needs 4 GiB of disk:
//! `cargo test -p kvtide-tiers --test recovery_is_fast -- --ignored --nocapture`.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

use std::os::unix::fs::FileExt;
use std::time::Instant;

use kvtide_tiers::block::{BlockKey, Codec, Descriptor, NamespaceId, Place, Sum128};
use kvtide_tiers::segment::{SegmentStore, StoreGeometry, StoreWant};

#[test]
#[ignore = "needs 4 GiB of disk and an idle machine"]
fn a_million_descriptors() {
    let geometry = StoreGeometry::fit(4 << 30, 16 << 20, 4096).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let want = StoreWant { direct: false, ..StoreWant::new(geometry) };
    let store = SegmentStore::open(&path, &want, |_| Some(0)).unwrap();
    let per_segment = geometry.payload_bytes() / 4096;
    let mut written = 0u64;
    for segment in 0..geometry.segments {
        let sequence = u64::from(store.epoch) << 32 | u64::from(segment);
        let mut area = store.store.header_page(segment, sequence).to_vec();
        for index in 0..per_segment {
            written += 1;
            let mut key = [1; 32];
            key[..8].copy_from_slice(&written.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
            let descriptor = Descriptor {
                codec: Codec::Raw,
                narrow: None,
                namespace: NamespaceId(1),
                generation: 0,
                key: BlockKey(key),
                parent: BlockKey::ROOT,
                position: 0,
                tokens: 16,
                raw_bytes: 4096,
                stored_bytes: 4096,
                raw_sum: Sum128::default(),
                stored_sum: Sum128::default(),
                sequence: written,
                segment,
                segment_sequence: sequence,
                offset: geometry.payload_start() + index * 4096,
                created_s: 1,
                session: 0,
            };
            let place = Place::Segment { salt: store.salt, segment, sequence };
            area.extend(descriptor.encode(place));
        }
        store.file.write_all_at(&area, geometry.segment_offset(segment)).unwrap();
    }
    store.file.sync_all().unwrap();
    drop(store);
    let start = Instant::now();
    let store = SegmentStore::open(&path, &StoreWant::new(geometry), |_| Some(0)).unwrap();
    println!("{written} descriptors in {:?}, direct: {}", start.elapsed(), store.direct);
    assert_eq!(store.report.descriptors_recovered, written);
}
