//! Where things lie in a store: superblocks, segments, descriptor areas and payloads.

use serde::{Deserialize, Serialize};

use crate::block::{DESCRIPTOR_BYTES, PAGE_BYTES};

/// Bytes in front of the first segment: the two superblocks and room to grow.
pub const SUPERBLOCK_AREA_BYTES: u64 = 1 << 20;

/// Descriptors in one page of the descriptor area.
pub const DESCRIPTORS_PER_PAGE: u32 = (PAGE_BYTES / DESCRIPTOR_BYTES as u64) as u32;

/// The smallest block for which a segment's descriptor area has room, unless the store was made
/// otherwise. Blocks smaller than this fill the descriptor area before the payload area.
pub const BLOCK_BYTES_MIN_DEFAULT: u32 = 64 << 10;

/// The default size of a segment (256 MiB), for stores of at least 64 of them.
pub const SEGMENT_BYTES_DEFAULT: u32 = 256 << 20;

/// The smallest and largest segment.
pub const SEGMENT_BYTES_RANGE: std::ops::RangeInclusive<u32> = (1 << 20)..=(1 << 30);

/// The shape of a store. Fixed when the store is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoreGeometry {
    /// Bytes of a segment: header page, descriptor area, payloads. A multiple of 1 MiB.
    pub segment_bytes: u32,
    /// Number of segments.
    pub segments: u32,
    /// Pages of each segment's descriptor area.
    pub descriptor_pages: u32,
}

impl StoreGeometry {
    /// The shape of a store of at most `bytes`, for blocks of `block_bytes_min` and more. `None`
    /// when fewer than four segments fit.
    pub fn fit(bytes: u64, segment_bytes: u32, block_bytes_min: u32) -> Option<StoreGeometry> {
        if !SEGMENT_BYTES_RANGE.contains(&segment_bytes) || !segment_bytes.is_multiple_of(1 << 20) {
            return None;
        }
        let block = block_bytes_min.max(PAGE_BYTES as u32);
        let descriptors = segment_bytes.div_ceil(block);
        let segments = bytes.checked_sub(SUPERBLOCK_AREA_BYTES)? / u64::from(segment_bytes);
        let geometry = StoreGeometry {
            segment_bytes,
            segments: u32::try_from(segments).ok()?,
            descriptor_pages: descriptors.div_ceil(DESCRIPTORS_PER_PAGE),
        };
        (geometry.segments >= 4).then_some(geometry)
    }

    /// The segment size for a store of `bytes` when the operator names none: 256 MiB, halved down
    /// to 4 MiB until the store has at least 64 segments, so that reclaim stays fine-grained.
    pub fn segment_bytes_for(bytes: u64) -> u32 {
        let mut segment = SEGMENT_BYTES_DEFAULT;
        while segment > 4 << 20 && bytes / u64::from(segment) < 64 {
            segment /= 2;
        }
        segment
    }

    /// Bytes of the file or device that the store uses.
    pub fn store_bytes(&self) -> u64 {
        SUPERBLOCK_AREA_BYTES + u64::from(self.segments) * u64::from(self.segment_bytes)
    }

    /// Most descriptors of one segment.
    pub fn descriptors_per_segment(&self) -> u32 {
        self.descriptor_pages * DESCRIPTORS_PER_PAGE
    }

    /// Offset in the segment at which payloads start.
    pub fn payload_start(&self) -> u32 {
        (1 + self.descriptor_pages) * PAGE_BYTES as u32
    }

    /// Bytes of payload that one segment holds.
    pub fn payload_bytes(&self) -> u32 {
        self.segment_bytes - self.payload_start()
    }

    /// Offset in the store of a segment's header page.
    pub fn segment_offset(&self, segment: u32) -> u64 {
        SUPERBLOCK_AREA_BYTES + u64::from(segment) * u64::from(self.segment_bytes)
    }

    /// Offset in the store of the page that holds descriptor `index` of `segment`.
    pub fn descriptor_page_offset(&self, segment: u32, index: u32) -> u64 {
        let page = 1 + u64::from(index / DESCRIPTORS_PER_PAGE);
        self.segment_offset(segment) + page * PAGE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_of_256_mib_has_room_for_its_blocks_of_64_kib() {
        let geometry =
            StoreGeometry::fit(6 << 30, 256 << 20, BLOCK_BYTES_MIN_DEFAULT).expect("fits");
        assert_eq!(geometry.segments, 23);
        assert_eq!(geometry.descriptors_per_segment(), 4096);
        assert!(geometry.payload_bytes() / (64 << 10) < geometry.descriptors_per_segment());
        assert_eq!(StoreGeometry::fit(1 << 30, 256 << 20, 65536), None);
    }

    #[test]
    fn small_stores_get_small_segments() {
        assert_eq!(StoreGeometry::segment_bytes_for(1 << 40), 256 << 20);
        assert_eq!(StoreGeometry::segment_bytes_for(6 << 30), 64 << 20);
        assert_eq!(StoreGeometry::segment_bytes_for(64 << 20), 4 << 20);
    }
}
