//! A client's memory with a layout: blocks are gathered out of it and scattered into it.
//!
//! The client may write its memory at any time. So a block is first copied, and only our copy is
//! hashed: what the checksum says is true of the bytes we keep, whatever the client does meanwhile.

use std::io;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use twox_hash::XxHash3_128;

use super::SharedMemory;
use super::buffer::stream_copy;
use crate::block::{LayoutError, Plane, RegionLayout, Sum128};

/// Bytes that are copied and then hashed while they are still in the nearest cache, with room there
/// for those that are fetched meanwhile.
const CHUNK_BYTES: usize = 4 << 10;

/// Blocks from this size on are copied past the caches: a call has many of them, and all are larger
/// than a core's share of the caches.
const STREAM_BYTES_MIN: u64 = 128 << 10;

/// Memory on the stack that is aligned as the copies like it.
#[repr(align(64))]
struct Chunk([u8; CHUNK_BYTES]);

/// Why a region is refused, or a copy was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// Files on a disk, pipes, reserved huge pages: none of them can be relied on.
    #[error("the region is not a memfd of ordinary pages; make it with memfd_create(2)")]
    NotMemfd,
    /// The file could be cut short under us.
    #[error("the region's memfd is not sealed against shrinking; add F_SEAL_SHRINK")]
    NotSealed,
    /// A file of 0 bytes.
    #[error("the region's memfd has 0 bytes; set its size with ftruncate(2) before passing it")]
    Empty,
    /// The operating system does not map it.
    #[error("the region cannot be mapped for reading and writing: {0}")]
    Map(#[source] io::Error),
    /// The layout breaks a rule.
    #[error("the region's layout is refused: {0}")]
    Layout(#[from] LayoutError),
    /// Its owner is gone or has unregistered it.
    #[error("the region is closed")]
    Closed,
    /// A place behind the last one.
    #[error("place {place} is outside the region, which has {places}")]
    Place {
        /// The place.
        place: u32,
        /// How many there are.
        places: u32,
    },
    /// The buffer is not one block long.
    #[error("{bytes} bytes given for a block of {block_bytes}")]
    Length {
        /// Bytes given.
        bytes: u64,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// Bytes outside the memory.
    #[error("{len} bytes at {offset} are outside the memory of {have} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
        /// Bytes of the memory.
        have: u64,
    },
}

/// Registered memory of a client.
#[derive(Debug)]
pub struct Region {
    memory: SharedMemory,
    layout: RegionLayout,
    block_bytes: u64,
    /// Held for reading by each copy, so that closing waits for it.
    open: RwLock<bool>,
}

impl Region {
    /// Checks the layout against the memory.
    ///
    /// # Errors
    /// [`RegionError::Layout`].
    pub fn new(memory: SharedMemory, layout: RegionLayout) -> Result<Region, RegionError> {
        layout.check(memory.bytes())?;
        let block_bytes = layout.block_bytes();
        Ok(Region { memory, layout, block_bytes, open: RwLock::new(true) })
    }

    /// The memory.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// The layout.
    pub fn layout(&self) -> &RegionLayout {
        &self.layout
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Number of places.
    pub fn places(&self) -> u32 {
        self.layout.blocks
    }

    /// Refuses every copy that begins from now on, and waits for those under way (a block each).
    pub fn close(&self) {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Keeps the region open for as long as the guard lives.
    fn enter(&self) -> Result<RwLockReadGuard<'_, bool>, RegionError> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        if *open { Ok(open) } else { Err(RegionError::Closed) }
    }

    /// Copies the block at `place` into `out`, and returns the checksum of what is now in `out`.
    ///
    /// # Errors
    /// For a place outside the region, and when `out` is not one block long.
    pub fn gather(&self, place: u32, out: &mut [u8]) -> Result<Sum128, RegionError> {
        let _open = self.enter()?;
        self.check(place, out.len())?;
        let streams = self.streams();
        let mut sum = XxHash3_128::new();
        let mut near = Chunk([0; CHUNK_BYTES]);
        let mut rest = out;
        for (offset, len) in self.runs(place) {
            let (run, behind) = std::mem::take(&mut rest)
                .split_at_mut_checked(len)
                .ok_or(self.wrong_length(len))?;
            let mut at = offset;
            for chunk in run.chunks_mut(CHUNK_BYTES) {
                // What is hashed is our copy, and what is kept is a copy of that.
                if streams && let Some(near) = near.0.get_mut(..chunk.len()) {
                    self.memory.read_at(at, near)?;
                    // It comes while this one is hashed.
                    let left = offset + len as u64 - at - near.len() as u64;
                    self.memory.prefetch(at + near.len() as u64, CHUNK_BYTES.min(left as usize));
                    sum.write(near);
                    stream_copy(near, chunk);
                } else {
                    self.memory.read_at(at, chunk)?;
                    sum.write(chunk);
                }
                at += chunk.len() as u64;
            }
            rest = behind;
        }
        Ok(Sum128(sum.finish_128().to_le_bytes()))
    }

    /// Copies a block's bytes to `place`.
    ///
    /// # Errors
    /// For a place outside the region, and when `bytes` is not one block long.
    pub fn scatter(&self, place: u32, bytes: &[u8]) -> Result<(), RegionError> {
        let _open = self.enter()?;
        self.check(place, bytes.len())?;
        let mut rest = bytes;
        for (offset, len) in self.runs(place) {
            let (run, behind) = rest.split_at_checked(len).ok_or(self.wrong_length(len))?;
            if self.streams() {
                self.memory.stream_at(offset, run)?;
            } else {
                self.memory.write_at(offset, run)?;
            }
            rest = behind;
        }
        Ok(())
    }

    /// The checksum of the block at `place` as it is now, without keeping a copy. The client may
    /// change the bytes right after: good for a comparison, not for vouching.
    ///
    /// # Errors
    /// For a place outside the region.
    pub fn hash(&self, place: u32) -> Result<Sum128, RegionError> {
        let _open = self.enter()?;
        self.check(place, self.block_bytes as usize)?;
        let mut sum = XxHash3_128::new();
        let mut chunk = [0; CHUNK_BYTES];
        for (offset, len) in self.runs(place) {
            let mut done = 0;
            while done < len {
                let step = CHUNK_BYTES.min(len - done);
                let part = chunk.get_mut(..step).ok_or(self.wrong_length(step))?;
                self.memory.read_at(offset + done as u64, part)?;
                sum.write(part);
                done += step;
            }
        }
        Ok(Sum128(sum.finish_128().to_le_bytes()))
    }

    /// Whether blocks are copied past the caches.
    fn streams(&self) -> bool {
        self.block_bytes >= STREAM_BYTES_MIN
    }

    /// The block's runs in payload order: offset in the memory, and bytes. Rows that touch are
    /// one run, so that a pool whose rows are dense is copied in long pieces.
    fn runs(&self, place: u32) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.layout.planes.iter().flat_map(move |plane: &Plane| {
            let dense = plane.rows > 1 && plane.row_stride == plane.row_bytes;
            let (rows, bytes) = if dense {
                (1, plane.row_bytes * u64::from(plane.rows))
            } else {
                (plane.rows, plane.row_bytes)
            };
            (0..rows).map(move |row| (plane.run_offset(place, row), bytes as usize))
        })
    }

    fn check(&self, place: u32, bytes: usize) -> Result<(), RegionError> {
        if place >= self.layout.blocks {
            return Err(RegionError::Place { place, places: self.layout.blocks });
        }
        if bytes as u64 != self.block_bytes {
            return Err(self.wrong_length(bytes));
        }
        Ok(())
    }

    fn wrong_length(&self, bytes: usize) -> RegionError {
        RegionError::Length { bytes: bytes as u64, block_bytes: self.block_bytes }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(layout: &RegionLayout, memory: &[u8], place: u32) -> Vec<u8> {
        let mut out = Vec::new();
        for plane in &layout.planes {
            for row in 0..plane.rows {
                for byte in 0..plane.row_bytes {
                    out.push(memory[(plane.run_offset(place, row) + byte) as usize]);
                }
            }
        }
        out
    }

    #[test]
    fn a_region_refuses_foreign_places_and_lengths() {
        let memory = SharedMemory::create("kvtide-test", 8192).unwrap();
        let region = Region::new(memory, RegionLayout::opaque(2, 4096)).unwrap();
        let mut out = vec![0; 4096];
        assert!(matches!(region.gather(2, &mut out), Err(RegionError::Place { .. })));
        assert!(matches!(region.gather(0, &mut out[1..]), Err(RegionError::Length { .. })));
        assert!(matches!(region.scatter(1, &out[1..]), Err(RegionError::Length { .. })));
        assert!(matches!(region.hash(9), Err(RegionError::Place { .. })));
        let small = SharedMemory::create("kvtide-test", 8191).unwrap();
        let refused = Region::new(small, RegionLayout::opaque(2, 4096));
        assert!(matches!(refused, Err(RegionError::Layout(LayoutError::OutOfRegion { .. }))));
    }

    fn layouts() -> impl Strategy<Value = RegionLayout> {
        // Planes one behind the other, with gaps; or all planes within a block's stride.
        // Blocks on both sides of the size from which they are streamed.
        let plane = (1u32..5, 1u64..40_000, 0u64..100, 0u64..50);
        (1u32..4, any::<bool>(), prop::collection::vec(plane, 1..5)).prop_map(
            |(blocks, block_outermost, parts)| {
                let span = |rows: u32, bytes: u64, gap: u64| (bytes + gap) * u64::from(rows);
                let stride: u64 = parts.iter().map(|(r, b, g, pad)| span(*r, *b, *g) + pad).sum();
                let mut offset = 0;
                let planes = parts.iter().map(|(rows, row_bytes, gap, pad)| {
                    let own = span(*rows, *row_bytes, *gap) + pad;
                    let plane = Plane {
                        offset,
                        block_stride: if block_outermost { stride } else { own },
                        rows: *rows,
                        row_stride: row_bytes + gap,
                        row_bytes: *row_bytes,
                    };
                    offset += if block_outermost { own } else { own * u64::from(blocks) };
                    plane
                });
                RegionLayout { planes: planes.collect(), blocks }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Gather, hash and scatter agree with copying byte by byte.
        #[test]
        fn copies_follow_the_layout(layout in layouts(), seed in any::<u8>()) {
            let bytes = layout.region_bytes();
            let memory = SharedMemory::create("kvtide-test", bytes).unwrap();
            let mut plain: Vec<u8> =
                (0..bytes).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect();
            memory.write_at(0, &plain).unwrap();
            let region = Region::new(memory, layout.clone()).unwrap();
            let mut out = vec![0; region.block_bytes() as usize];
            for place in 0..layout.blocks {
                let sum = region.gather(place, &mut out).unwrap();
                prop_assert_eq!(&out, &naive(&layout, &plain, place));
                prop_assert_eq!(sum, Sum128::of(&out));
                prop_assert_eq!(region.hash(place).unwrap(), sum);
            }
            out.reverse();
            region.scatter(layout.blocks - 1, &out).unwrap();
            let mut from = out.iter();
            for plane in &layout.planes {
                for row in 0..plane.rows {
                    for byte in 0..plane.row_bytes {
                        let at = plane.run_offset(layout.blocks - 1, row) + byte;
                        plain[at as usize] = *from.next().unwrap();
                    }
                }
            }
            let mut all = vec![0; bytes as usize];
            region.memory().read_at(0, &mut all).unwrap();
            prop_assert!(all == plain, "scatter wrote outside its runs, or not all of them");
        }
    }
}
