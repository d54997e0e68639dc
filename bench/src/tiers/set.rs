//! Sets of fresh blocks: their keys, and the places of a client's region that they come from and
//! go to. A key is never used twice in a run, and decides every byte of its block.

use kvtide_client::{LoadBlock, StoreBlock};
use kvtide_tiers::block::BlockKey;

/// Tokens of a block, as the benchmark's namespace says.
pub(super) const TOKENS: u32 = 512;

/// Blocks of one client, in chains of equal length (the last one may be shorter).
#[derive(Clone, Debug)]
pub(super) struct Set {
    blocks: Vec<StoreBlock>,
    chain: usize,
}

impl Set {
    /// `blocks` new ones, stored from the places 0, 1, 2, ... of the region.
    pub(super) fn new(what: u64, round: u32, client: usize, blocks: usize, chain: usize) -> Set {
        let chain = chain.max(1);
        let keys: Vec<BlockKey> =
            (0..blocks).map(|number| fresh_key(what, round, client, number)).collect();
        let mut all = Vec::with_capacity(blocks);
        let mut place = 0;
        for chain in keys.chunks(chain) {
            let parents = std::iter::once(&BlockKey::ROOT).chain(chain);
            for ((key, parent), position) in chain.iter().zip(parents).zip(0..) {
                let (key, parent) = (*key, *parent);
                all.push(StoreBlock { key, parent, position, tokens: TOKENS, place });
                place += 1;
            }
        }
        Set { blocks: all, chain }
    }

    /// The blocks.
    pub(super) fn blocks(&self) -> &[StoreBlock] {
        &self.blocks
    }

    /// Part `part` of `parts`, in whole chains, to be loaded `shift` places behind where its blocks
    /// were stored from, around a region of `places`. Such a place holds another block's bytes, so
    /// a load that does nothing is seen.
    pub(super) fn part(&self, part: usize, parts: usize, shift: u32, places: u32) -> Part {
        let chains: Vec<&[StoreBlock]> = self.blocks.chunks(self.chain).collect();
        let cut = |part: usize| chains.len() * part / parts.max(1);
        let chosen = chains.get(cut(part)..cut(part + 1)).unwrap_or_default();
        let moved = |block: &StoreBlock| LoadBlock {
            key: block.key,
            place: (block.place + shift) % places.max(1),
        };
        Part {
            chains: chosen
                .iter()
                .map(|chain| Chain {
                    keys: chain.iter().map(|block| block.key).collect(),
                    loads: chain.iter().map(moved).collect(),
                })
                .collect(),
        }
    }
}

/// What one measure loads: chains, each looked up as a whole.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    pub(super) chains: Vec<Chain>,
}

/// One prefix.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    pub(super) keys: Vec<BlockKey>,
    pub(super) loads: Vec<LoadBlock>,
}

impl Part {
    /// Blocks in it.
    pub(super) fn blocks(&self) -> usize {
        self.chains.iter().map(|chain| chain.loads.len()).sum()
    }
}

/// A key that no other block of the run has.
pub(super) fn fresh_key(what: u64, round: u32, client: usize, number: usize) -> BlockKey {
    let mut bytes = [0xbe; 32];
    let words = [what, u64::from(round), client as u64, number as u64];
    for (out, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *out = word.to_le_bytes();
    }
    BlockKey(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn parts_cover_the_set_in_whole_chains_and_go_to_other_places() {
        let set = Set::new(1, 2, 3, 50, 8);
        let parts: Vec<Part> = (0..4).map(|part| set.part(part, 4, 25, 50)).collect();
        assert_eq!(parts.iter().map(Part::blocks).sum::<usize>(), 50);
        let loads = || parts.iter().flat_map(|part| &part.chains).flat_map(|chain| &chain.loads);
        for (load, block) in loads().zip(set.blocks()) {
            assert_eq!(load.key, block.key);
            assert_ne!(load.place, block.place);
        }
        assert_eq!(loads().map(|load| load.place).collect::<HashSet<_>>().len(), 50);
        assert_eq!(set.blocks()[8].parent, BlockKey::ROOT);
        assert_eq!(set.blocks()[9].parent, set.blocks()[8].key);
        assert_eq!(set.blocks()[9].position, 1);
    }
}
