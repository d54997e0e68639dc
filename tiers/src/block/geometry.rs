//! How the blocks of a paged KV pool lie in a client's memory.
//!
//! A region is a pool of `blocks` places. Block `i` of the pool consists, plane by plane, of `rows`
//! runs of `row_bytes` bytes: run `r` of plane `p` starts at
//! `p.offset + i * p.block_stride + r * p.row_stride`. A block's payload is those runs one behind
//! the other, planes in the order of the list. A pool with one tensor per layer has a plane per
//! layer and per K and V; one that is block-outermost, or opaque, has a single plane.

use serde::{Deserialize, Serialize};

/// Bytes of an OS page and of the device's unit of transfer. Payloads are aligned to it.
pub const PAGE_BYTES: u64 = 4096;

/// Most planes a layout may have: 2 for each of 2,048 layers.
pub const MAX_PLANES: usize = 4096;

/// Most runs that are compared one by one when neither of the simple proofs of disjointness holds.
const EXTENTS_MAX: u64 = 1 << 22;

/// Rounds up to whole pages.
pub fn page_ceil(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES) * PAGE_BYTES
}

/// One plane: the same part of every block (K of layer 3, say).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Plane {
    /// Where the first block's first run starts, bytes from the start of the region.
    pub offset: u64,
    /// From one block to the next, bytes.
    pub block_stride: u64,
    /// Runs per block, at least 1.
    pub rows: u32,
    /// From one run to the next, bytes (of no meaning when `rows` is 1).
    pub row_stride: u64,
    /// Bytes of one run, at least 1.
    pub row_bytes: u64,
}

impl Plane {
    /// Bytes that the plane adds to a block. `None` on overflow.
    fn block_bytes(&self) -> Option<u64> {
        self.row_bytes.checked_mul(u64::from(self.rows))
    }

    /// Bytes from a block's first byte in this plane to behind its last one.
    fn span(&self) -> Option<u64> {
        self.row_stride
            .checked_mul(u64::from(self.rows).checked_sub(1)?)?
            .checked_add(self.row_bytes)
    }

    /// Behind the last byte of the last block.
    fn end(&self, blocks: u32) -> Option<u64> {
        self.block_stride
            .checked_mul(u64::from(blocks).checked_sub(1)?)?
            .checked_add(self.offset)?
            .checked_add(self.span()?)
    }

    /// The start of run `row` of block `block`; the layout was checked against overflow.
    pub fn run_offset(&self, block: u32, row: u32) -> u64 {
        self.offset + self.block_stride * u64::from(block) + self.row_stride * u64::from(row)
    }
}

/// How all blocks of a region lie in it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RegionLayout {
    /// Places for blocks in the pool.
    pub blocks: u32,
    /// The planes, in payload order.
    pub planes: Vec<Plane>,
}

/// Why a layout is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// No blocks or no planes.
    #[error("the layout has no {what}; it needs at least one")]
    Empty {
        /// What is missing.
        what: &'static str,
    },
    /// More planes than [`MAX_PLANES`].
    #[error("the layout has {planes} planes; at most {MAX_PLANES} are allowed")]
    TooManyPlanes {
        /// How many.
        planes: usize,
    },
    /// A plane with no rows or empty rows.
    #[error("plane {plane}: `{field}` is 0; it must be at least 1")]
    Zero {
        /// Which plane.
        plane: usize,
        /// Which field.
        field: &'static str,
    },
    /// Offsets do not fit in 64 bits, or a block in 32.
    #[error("plane {plane}: offsets overflow")]
    Overflow {
        /// Which plane.
        plane: usize,
    },
    /// The region ends before the layout does.
    #[error(
        "plane {plane} ends at byte {needed}, but the region has {have} bytes; \
         register a larger region or fewer blocks"
    )]
    OutOfRegion {
        /// Which plane.
        plane: usize,
        /// Where the plane ends.
        needed: u64,
        /// Bytes of the region.
        have: u64,
    },
    /// Two runs share bytes, so one block's load would overwrite another block.
    #[error("planes {first} and {second} overlap; every byte may belong to one block only")]
    Overlap {
        /// One plane.
        first: usize,
        /// The other plane (or the same one).
        second: usize,
    },
    /// Too finely interleaved to check.
    #[error("the layout has {extents} interleaved runs; at most {EXTENTS_MAX} can be checked")]
    TooFine {
        /// Number of runs.
        extents: u64,
    },
}

impl RegionLayout {
    /// A pool of `blocks` opaque blocks of `block_bytes`, one behind the other.
    pub fn opaque(blocks: u32, block_bytes: u64) -> RegionLayout {
        let plane = Plane {
            offset: 0,
            block_stride: block_bytes,
            rows: 1,
            row_stride: block_bytes,
            row_bytes: block_bytes,
        };
        RegionLayout { blocks, planes: vec![plane] }
    }

    /// A pool with a tensor of its own per layer, and per K and V where they are apart: `planes`
    /// tensors one behind the other, each with `plane_bytes` per block.
    pub fn layered(blocks: u32, planes: u32, plane_bytes: u64) -> RegionLayout {
        let plane = |at: u32| Plane {
            offset: u64::from(at) * u64::from(blocks) * plane_bytes,
            block_stride: plane_bytes,
            rows: 1,
            row_stride: plane_bytes,
            row_bytes: plane_bytes,
        };
        RegionLayout { blocks, planes: (0..planes).map(plane).collect() }
    }

    /// Bytes of one block's payload. The layout must have been checked.
    pub fn block_bytes(&self) -> u64 {
        self.planes.iter().map(|plane| plane.block_bytes().unwrap_or(0)).sum()
    }

    /// Bytes a region must have to hold the layout. The layout must have been checked.
    pub fn region_bytes(&self) -> u64 {
        self.planes.iter().filter_map(|plane| plane.end(self.blocks)).max().unwrap_or(0)
    }

    /// Checks the layout against a region of `region_bytes`: no overflow, nothing outside, no byte
    /// in two runs.
    ///
    /// # Errors
    /// The first plane that breaks a rule.
    pub fn check(&self, region_bytes: u64) -> Result<(), LayoutError> {
        if self.blocks == 0 {
            return Err(LayoutError::Empty { what: "blocks" });
        }
        if self.planes.is_empty() {
            return Err(LayoutError::Empty { what: "planes" });
        }
        if self.planes.len() > MAX_PLANES {
            return Err(LayoutError::TooManyPlanes { planes: self.planes.len() });
        }
        let mut block_bytes: u64 = 0;
        for (at, plane) in self.planes.iter().enumerate() {
            if plane.rows == 0 {
                return Err(LayoutError::Zero { plane: at, field: "rows" });
            }
            if plane.row_bytes == 0 {
                return Err(LayoutError::Zero { plane: at, field: "row_bytes" });
            }
            let overflow = LayoutError::Overflow { plane: at };
            let end = plane.end(self.blocks).ok_or(overflow.clone())?;
            let bytes = plane.block_bytes().ok_or(overflow.clone())?;
            block_bytes = block_bytes.checked_add(bytes).ok_or(overflow.clone())?;
            if block_bytes > u64::from(u32::MAX) {
                return Err(overflow);
            }
            if end > region_bytes {
                return Err(LayoutError::OutOfRegion {
                    plane: at,
                    needed: end,
                    have: region_bytes,
                });
            }
        }
        self.check_disjoint()
    }

    /// Most pools are layer-outermost (planes one behind the other) or block-outermost (all planes
    /// within one stride); both are proved without looking at every run.
    fn check_disjoint(&self) -> Result<(), LayoutError> {
        if self.layer_outermost() || self.block_outermost() {
            return Ok(());
        }
        let extents = self.planes.iter().map(|plane| u64::from(plane.rows)).sum::<u64>()
            * u64::from(self.blocks);
        if extents > EXTENTS_MAX {
            return Err(LayoutError::TooFine { extents });
        }
        let mut runs = Vec::with_capacity(usize::try_from(extents).unwrap_or(0));
        for (at, plane) in self.planes.iter().enumerate() {
            for block in 0..self.blocks {
                for row in 0..plane.rows {
                    let start = plane.run_offset(block, row);
                    runs.push((start, start + plane.row_bytes, at));
                }
            }
        }
        disjoint(runs)
    }

    fn rows_disjoint(plane: &Plane) -> bool {
        plane.rows == 1 || plane.row_stride >= plane.row_bytes
    }

    fn layer_outermost(&self) -> bool {
        let each = self.planes.iter().all(|plane| {
            Self::rows_disjoint(plane)
                && (self.blocks == 1 || plane.span().is_some_and(|span| plane.block_stride >= span))
        });
        let ranges = self
            .planes
            .iter()
            .enumerate()
            .map(|(at, plane)| (plane.offset, plane.end(self.blocks).unwrap_or(u64::MAX), at));
        each && disjoint(ranges.collect()).is_ok()
    }

    fn block_outermost(&self) -> bool {
        let Some(stride) = self.planes.first().map(|plane| plane.block_stride) else {
            return false;
        };
        let low = self.planes.iter().map(|plane| plane.offset).min().unwrap_or(0);
        let within = self.planes.iter().all(|plane| {
            plane.block_stride == stride
                && Self::rows_disjoint(plane)
                && plane.span().is_some_and(|span| plane.offset - low + span <= stride)
        });
        let ranges =
            self.planes.iter().enumerate().map(|(at, plane)| {
                (plane.offset, plane.offset + plane.span().unwrap_or(u64::MAX), at)
            });
        within && disjoint(ranges.collect()).is_ok()
    }
}

/// Whether no two of the half-open ranges share a byte; the third field names the plane.
fn disjoint(mut ranges: Vec<(u64, u64, usize)>) -> Result<(), LayoutError> {
    ranges.sort_unstable();
    for (left, right) in ranges.iter().zip(ranges.iter().skip(1)) {
        if left.1 > right.0 {
            return Err(LayoutError::Overlap { first: left.2, second: right.2 });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plane(offset: u64, block_stride: u64, rows: u32, row_stride: u64, row_bytes: u64) -> Plane {
        Plane { offset, block_stride, rows, row_stride, row_bytes }
    }

    #[test]
    fn usual_pools_pass() {
        // 4 layers, K and V apart, layer-outermost; one opaque plane; rows inside blocks.
        let layered = RegionLayout::layered(10, 8, 100);
        assert_eq!(layered.check(8000), Ok(()));
        assert_eq!(layered.block_bytes(), 800);
        assert_eq!(layered.region_bytes(), 8000);
        assert_eq!(RegionLayout::opaque(4, 4096).check(16384), Ok(()));
        let rows = RegionLayout { blocks: 2, planes: vec![plane(0, 400, 4, 100, 100)] };
        assert_eq!(rows.check(800), Ok(()));
    }

    #[test]
    fn a_region_smaller_than_its_layout_is_named() {
        let error = RegionLayout::opaque(4, 4096).check(16383);
        assert_eq!(error, Err(LayoutError::OutOfRegion { plane: 0, needed: 16384, have: 16383 }));
    }

    #[test]
    fn overlaps_overflows_and_zeros_are_named() {
        let two = |a, b| RegionLayout { blocks: 2, planes: vec![a, b] };
        let overlap = two(plane(0, 100, 1, 0, 100), plane(150, 100, 1, 0, 100));
        assert!(matches!(overlap.check(1000), Err(LayoutError::Overlap { .. })));
        let itself = RegionLayout { blocks: 3, planes: vec![plane(0, 10, 1, 0, 100)] };
        assert_eq!(itself.check(1000), Err(LayoutError::Overlap { first: 0, second: 0 }));
        let huge = RegionLayout { blocks: 3, planes: vec![plane(0, u64::MAX / 2, 1, 0, 100)] };
        assert_eq!(huge.check(u64::MAX), Err(LayoutError::Overflow { plane: 0 }));
        let zero = RegionLayout { blocks: 1, planes: vec![plane(0, 1, 0, 1, 1)] };
        assert_eq!(zero.check(10), Err(LayoutError::Zero { plane: 0, field: "rows" }));
    }

    proptest! {
        /// The verdict agrees with marking every byte.
        #[test]
        fn overlap_is_found_exactly(
            blocks in 1u32..5,
            planes in prop::collection::vec(
                (0u64..60, 0u64..40, 1u32..4, 0u64..20, 1u64..10),
                1..4,
            ),
        ) {
            let planes: Vec<Plane> =
                planes.into_iter().map(|(a, b, c, d, e)| plane(a, b, c, d, e)).collect();
            let layout = RegionLayout { blocks, planes };
            let mut used = vec![0u8; 400];
            for plane in &layout.planes {
                for block in 0..blocks {
                    for row in 0..plane.rows {
                        let start = plane.run_offset(block, row) as usize;
                        for byte in &mut used[start..start + plane.row_bytes as usize] {
                            *byte += 1;
                        }
                    }
                }
            }
            let clean = used.iter().all(|count| *count <= 1);
            prop_assert_eq!(layout.check(400).is_ok(), clean);
        }
    }
}
