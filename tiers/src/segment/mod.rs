//! The segment store: what lies where on NVMe, how it is written, and how it is found again.

mod geometry;

pub use geometry::{
    BLOCK_BYTES_MIN_DEFAULT, DESCRIPTORS_PER_PAGE, SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_RANGE,
    SUPERBLOCK_AREA_BYTES, StoreGeometry,
};
