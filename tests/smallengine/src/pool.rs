//! The KV cache: places for blocks of `[layer][k or v][kv head][token][value]` in bf16, exactly as
//! kvtide stores them. The memory is the engine's region with a daemon, or its own without.

use kvtide_client::{KvLayout, RegionHandle, SharedMemory};

use crate::math::{from_bf16, to_bf16};

/// Bytes of a value.
const VALUE_BYTES: usize = 2;

/// Why a place could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// It is not in the pool, or the bytes are not those of one block.
    #[error(
        "place {place} with {bytes} bytes: the pool has {places} places of {block_bytes} bytes"
    )]
    NoSuchBlock {
        /// The place.
        place: u32,
        /// Bytes that were given.
        bytes: usize,
        /// Places of the pool.
        places: u32,
        /// Bytes of each.
        block_bytes: usize,
    },
    /// The system gives no memory.
    #[error("no memory for a pool of {places} places of {block_bytes} bytes: {message}")]
    NoMemory {
        /// Places that were wanted.
        places: u32,
        /// Bytes of each.
        block_bytes: usize,
        /// What the system said.
        message: String,
    },
}

enum Memory {
    Own(SharedMemory),
    Region(RegionHandle),
}

/// K or V.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    K,
    V,
}

/// Where a token's values lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    pub(crate) layer: usize,
    pub(crate) part: Part,
    pub(crate) head: usize,
    /// From the start of its block.
    pub(crate) token: usize,
}

/// Places for blocks.
pub struct Pool {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens_per_block: usize,
    places: u32,
    memory: Memory,
}

impl Pool {
    /// A pool in memory of its own, for an engine without a daemon.
    ///
    /// # Errors
    /// [`PoolError::NoMemory`], also for no places at all.
    pub fn own(layout: &KvLayout, places: u32) -> Result<Pool, PoolError> {
        let block_bytes = block_bytes(layout);
        let bytes = (block_bytes as u64).saturating_mul(u64::from(places));
        let memory = SharedMemory::create("smallengine-pool", bytes);
        let failed = |error: std::io::Error| PoolError::NoMemory {
            places,
            block_bytes,
            message: error.to_string(),
        };
        Ok(Pool::new(layout, places, Memory::Own(memory.map_err(failed)?)))
    }

    /// A pool in a region, whose blocks must have the bytes of this layout ([`block_bytes`]).
    pub(crate) fn region(layout: &KvLayout, region: RegionHandle) -> Pool {
        Pool::new(layout, region.places(), Memory::Region(region))
    }

    fn new(layout: &KvLayout, places: u32, memory: Memory) -> Pool {
        Pool {
            layers: layout.layers as usize,
            kv_heads: layout.kv_heads as usize,
            head_dim: layout.head_dim as usize,
            tokens_per_block: layout.tokens_per_block as usize,
            places,
            memory,
        }
    }

    /// Tokens of a block.
    pub fn tokens_per_block(&self) -> usize {
        self.tokens_per_block
    }

    /// Number of places.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.layers * 2 * self.kv_heads * self.head_bytes()
    }

    /// The region, if it is in one.
    pub fn as_region(&self) -> Option<&RegionHandle> {
        match &self.memory {
            Memory::Own(_) => None,
            Memory::Region(region) => Some(region),
        }
    }

    /// The bytes of the block at a place.
    ///
    /// # Errors
    /// [`PoolError::NoSuchBlock`].
    pub fn block(&self, place: u32) -> Result<Vec<u8>, PoolError> {
        let mut bytes = vec![0; self.block_bytes()];
        self.read(place, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Puts a block at a place.
    ///
    /// # Errors
    /// [`PoolError::NoSuchBlock`].
    pub fn write_block(&self, place: u32, bytes: &[u8]) -> Result<(), PoolError> {
        if bytes.len() != self.block_bytes() {
            return Err(self.no_such_block(place, bytes.len()));
        }
        self.write(place, 0, bytes)
    }

    /// Writes the values of one head, of as many tokens as there are values for, from a token on.
    pub(crate) fn write_head(
        &self,
        place: u32,
        spot: Spot,
        values: impl Iterator<Item = f32>,
    ) -> Result<(), PoolError> {
        let bytes: Vec<u8> = values.flat_map(|value| to_bf16(value).to_le_bytes()).collect();
        self.write(place, self.offset(spot), &bytes)
    }

    /// Reads the values of one head, of the first `tokens` tokens of the blocks at `places`.
    pub(crate) fn read_head(
        &self,
        places: &[u32],
        spot: Spot,
        tokens: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), PoolError> {
        out.clear();
        let mut bytes = vec![0; self.head_bytes()];
        let mut left = tokens;
        for place in places.iter().take(tokens.div_ceil(self.tokens_per_block)) {
            let here = left.min(self.tokens_per_block);
            bytes.truncate(here * self.head_dim * VALUE_BYTES);
            self.read(*place, self.offset(spot), &mut bytes)?;
            let (pairs, _) = bytes.as_chunks::<VALUE_BYTES>();
            out.extend(pairs.iter().map(|pair| from_bf16(u16::from_le_bytes(*pair))));
            left -= here;
        }
        Ok(())
    }

    fn head_bytes(&self) -> usize {
        self.tokens_per_block * self.head_dim * VALUE_BYTES
    }

    fn offset(&self, spot: Spot) -> usize {
        let part = spot.layer * 2 + usize::from(spot.part == Part::V);
        let head = part * self.kv_heads + spot.head;
        head * self.head_bytes() + spot.token * self.head_dim * VALUE_BYTES
    }

    fn read(&self, place: u32, offset: usize, out: &mut [u8]) -> Result<(), PoolError> {
        let at = self.at(place, offset, out.len())?;
        let read = self.memory().read_at(at, out);
        read.map_err(|_| self.no_such_block(place, out.len()))
    }

    fn write(&self, place: u32, offset: usize, bytes: &[u8]) -> Result<(), PoolError> {
        let at = self.at(place, offset, bytes.len())?;
        let written = self.memory().write_at(at, bytes);
        written.map_err(|_| self.no_such_block(place, bytes.len()))
    }

    fn at(&self, place: u32, offset: usize, bytes: usize) -> Result<u64, PoolError> {
        if place >= self.places || offset + bytes > self.block_bytes() {
            return Err(self.no_such_block(place, bytes));
        }
        Ok(u64::from(place) * self.block_bytes() as u64 + offset as u64)
    }

    fn memory(&self) -> &SharedMemory {
        match &self.memory {
            Memory::Own(memory) => memory,
            Memory::Region(region) => region.memory(),
        }
    }

    fn no_such_block(&self, place: u32, bytes: usize) -> PoolError {
        let (places, block_bytes) = (self.places, self.block_bytes());
        PoolError::NoSuchBlock { place, bytes, places, block_bytes }
    }
}

/// Bytes of a block of this layout, in bf16.
pub(crate) fn block_bytes(layout: &KvLayout) -> usize {
    let values = [layout.layers, 2, layout.kv_heads, layout.tokens_per_block, layout.head_dim];
    values.iter().fold(VALUE_BYTES, |bytes, count| bytes.saturating_mul(*count as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{Shape, Weights};

    #[test]
    fn heads_lie_in_the_block_as_documented_and_strangers_are_refused() {
        let weights = Weights::random(&Shape::small(), 1);
        let layout = crate::cache::namespace(&weights, 4).layout;
        let pool = Pool::own(&layout, 2).unwrap();
        assert_eq!(pool.block_bytes(), 3 * 2 * 2 * 4 * 64 * 2);
        let spot = Spot { layer: 1, part: Part::V, head: 1, token: 2 };
        pool.write_head(1, spot, (0..64).map(|at| at as f32)).unwrap();
        let block = pool.block(1).unwrap();
        // [layer][k or v][head][token]
        let at = (((2 + 1) * 2 + 1) * 4 + 2) * 64 * 2;
        assert_eq!(block[at + 2..at + 4], 0x3f80u16.to_le_bytes());
        assert_eq!(block.iter().filter(|byte| **byte != 0).count(), {
            let part = &block[at..at + 128];
            part.iter().filter(|byte| **byte != 0).count()
        });
        let mut values = Vec::new();
        pool.read_head(&[0, 1], Spot { token: 0, ..spot }, 7, &mut values).unwrap();
        assert_eq!(values.len(), 7 * 64);
        assert_eq!(values[6 * 64 + 63], 63.0);
        pool.write_block(0, &block).unwrap();
        assert_eq!(pool.block(0).unwrap(), block);
        assert!(pool.write_block(2, &block).is_err());
        assert!(pool.write_block(0, &block[1..]).is_err());
        assert!(pool.block(9).is_err());
        assert!(Pool::own(&layout, 0).is_err());
    }
}
