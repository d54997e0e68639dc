//! The segment store: what lies where on NVMe, how it is written, and how it is found again.
//!
//! [`SegmentStore::open`] makes or opens the store file and recovers what it holds; [`fsck`]
//! looks at one without changing it. Payload bytes are never parsed as structure.

mod format;
mod fsck;
mod geometry;
mod pages;
mod recover;
mod store;

pub use format::{
    ERASED_DESCRIPTOR, FORMAT_VERSION, FormatError, PAGE, QUARANTINED_MAX, SUPERBLOCK_OFFSETS,
    SegmentHeader, Superblock, geometry_is_sound,
};
pub use fsck::{
    FsckError, FsckOptions, FsckReport, Problem, ProblemKind, SegmentState, SegmentSummary, fsck,
};
pub use geometry::{
    BLOCK_BYTES_MIN_DEFAULT, DESCRIPTORS_PER_PAGE, SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_RANGE,
    SUPERBLOCK_AREA_BYTES, StoreGeometry,
};
pub use recover::{RecoveredSegment, RecoveryReport};
pub use store::{OpenStore, SegmentStore, StoreError, StoreWant, header_page};
