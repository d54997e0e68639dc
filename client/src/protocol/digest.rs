//! What of a namespace lies in a node, small enough to be asked for now and then: for routers that
//! choose the node that has most of a prefix.
//!
//! One Bloom filter for each tier. A router computes a prompt's block keys (it needs the
//! namespace's key for that, which whoever may open the namespace gets; the fingerprint says which
//! one it is) and asks the filters for one key after the other: the first that is in none ends the
//! prefix. A filter may say yes to about one key in 300 that is not there, never no to one that
//! was; so its answers are hints, and only a lookup at the node gives a promise.
//!
//! Layout of a filter of `bits` bits (a multiple of 64): bit `i` is bit `i % 8` of byte `i / 8`.
//! A key is in it when these `hashes` bits are set: `h` is the key's last 8 bytes as a big-endian
//! number (what [`block_hash`] returns and events carry), `a` its lower and `b` its upper 32 bits
//! with the lowest one set; bit `n`, from 0, is `(a + n * b) % bits`, computed in 64 bits.

use kvtide_tiers::block::BlockKey;
use kvtide_tiers::catalog::Tier;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// Bytes of all filters of one digest at most.
pub const DIGEST_BYTES_MAX: u32 = 2 << 20;

/// Bits for each block where there is room: one key in 300 that is not there seems to be.
const BITS_PER_BLOCK: u64 = 12;

/// Bits of a key that are looked at, at most.
const HASHES_MAX: u32 = 8;

/// The number that stands for a block in digests and events: the last 8 bytes of its key, as a
/// big-endian number.
pub fn block_hash(key: &BlockKey) -> u64 {
    key.0.last_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// What of one namespace lies here.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Digest {
    /// Grows with every copy that comes or goes, in any namespace, since the daemon started: as
    /// long as it is the same, so is the digest.
    pub version: u64,
    /// When the daemon started, seconds since the Unix epoch: versions of another start are
    /// unrelated.
    pub started_s: u64,
    /// The node takes nothing new and will stop: send no more requests there.
    pub draining: bool,
    /// A public name for the namespace's key.
    pub fingerprint: [u8; 16],
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// The tiers in which something of it lies.
    pub tiers: Vec<TierDigest>,
}

/// What of one namespace lies in one tier.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TierDigest {
    /// Which.
    pub tier: Tier,
    /// Blocks.
    pub blocks: u64,
    /// Bits of the filter; a multiple of 64.
    pub bits: u64,
    /// Bits that stand for one key.
    pub hashes: u32,
    /// The filter.
    pub filter: ByteBuf,
}

impl TierDigest {
    /// A filter for these blocks, in `bytes_max` bytes at most (at least 8 are used).
    pub fn of(tier: Tier, blocks: &[u64], bytes_max: u64) -> TierDigest {
        let count = blocks.len() as u64;
        let most = (bytes_max / 8 * 64).max(64);
        let bits = (count * BITS_PER_BLOCK).next_multiple_of(64).clamp(64, most);
        // 0.69 times the bits for each block lets the fewest through.
        let best = (bits * 69 / 100 / count.max(1)).clamp(1, u64::from(HASHES_MAX));
        let mut digest = TierDigest {
            tier,
            blocks: count,
            bits,
            hashes: u32::try_from(best).unwrap_or(1),
            filter: ByteBuf::from(vec![0; usize::try_from(bits / 8).unwrap_or(8)]),
        };
        for hash in blocks {
            for bit in places(*hash, digest.bits, digest.hashes) {
                if let Some(byte) = digest.filter.get_mut(usize::try_from(bit / 8).unwrap_or(0)) {
                    *byte |= 1 << (bit % 8);
                }
            }
        }
        digest
    }

    /// Whether the block may be in the tier.
    pub fn may_have(&self, key: &BlockKey) -> bool {
        // What a daemon sent may be anything.
        self.bits > 0
            && self.hashes <= 64
            && places(block_hash(key), self.bits, self.hashes).all(|bit| {
                let byte = self.filter.get(usize::try_from(bit / 8).unwrap_or(usize::MAX));
                byte.is_some_and(|byte| byte & (1 << (bit % 8)) != 0)
            })
    }
}

impl Digest {
    /// How many of the keys, root first, may lie here in any tier.
    pub fn prefix(&self, keys: &[BlockKey]) -> usize {
        let here = |key: &&BlockKey| self.tiers.iter().any(|tier| tier.may_have(key));
        keys.iter().take_while(here).count()
    }
}

fn places(hash: u64, bits: u64, hashes: u32) -> impl Iterator<Item = u64> {
    let (a, b) = (hash & u64::from(u32::MAX), hash >> 32 | 1);
    (0..u64::from(hashes)).map(move |n| (a + n * b) % bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> BlockKey {
        // Spread like the hash that a key is.
        let mut bytes = [0; 32];
        let mut bits = number;
        for word in bytes.as_chunks_mut::<8>().0 {
            bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            *word = (mixed ^ (mixed >> 31)).to_le_bytes();
        }
        BlockKey(bytes)
    }

    #[test]
    fn what_is_there_is_found_and_little_else() {
        for (count, bytes_max, wrong_max) in [(0, 4096, 0), (1, 4096, 40), (10_000, 1 << 20, 60)] {
            let hashes: Vec<u64> = (0..count).map(|at| block_hash(&key(at))).collect();
            let digest = TierDigest::of(Tier::Host, &hashes, bytes_max);
            assert!((0..count).all(|at| digest.may_have(&key(at))));
            let wrong = (0..10_000).filter(|at| digest.may_have(&key(1_000_000 + at))).count();
            assert!(wrong <= wrong_max, "{count} blocks: {wrong} of 10,000 seem to be there");
        }
    }

    #[test]
    fn a_filter_stays_within_its_bytes_and_says_too_much_rather_than_too_little() {
        let hashes: Vec<u64> = (0..10_000).map(|at| block_hash(&key(at))).collect();
        let digest = TierDigest::of(Tier::Nvme, &hashes, 1024);
        assert_eq!((digest.filter.len(), digest.bits, digest.hashes), (1024, 8192, 1));
        assert!((0..10_000).all(|at| digest.may_have(&key(at))));
    }

    #[test]
    fn a_prefix_ends_at_the_first_block_that_is_nowhere() {
        let hashes = |range: std::ops::Range<u64>| -> Vec<u64> {
            range.map(|at| block_hash(&key(at))).collect()
        };
        let tiers = vec![
            TierDigest::of(Tier::Host, &hashes(0..5), 4096),
            TierDigest::of(Tier::Nvme, &hashes(4..8), 4096),
        ];
        let digest = Digest { tiers, ..Digest::default() };
        let keys: Vec<BlockKey> = (0..20).map(key).collect();
        assert_eq!(digest.prefix(&keys), 8);
        assert_eq!(digest.prefix(&keys[8..]), 0);
    }

    #[test]
    fn a_filter_that_makes_no_sense_has_nothing() {
        let bad = TierDigest {
            tier: Tier::Host,
            blocks: 1,
            bits: 1 << 40,
            hashes: 3,
            filter: ByteBuf::from(vec![255; 8]),
        };
        assert!(!bad.may_have(&BlockKey([255; 32])));
        assert!(!TierDigest { bits: 0, ..bad }.may_have(&key(1)));
    }
}
