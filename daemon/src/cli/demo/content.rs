//! What the demo's blocks hold: bytes that follow from the block's key, so that whoever knows the
//! key can check every byte, in any process and after any restart.

use kvtide_tiers::block::BlockKey;

/// Fills `out` with the bytes that belong to `key`.
pub(crate) fn fill(key: &BlockKey, out: &mut [u8]) {
    let mut state = seed(key);
    for chunk in out.chunks_mut(8) {
        let word = next(&mut state).to_le_bytes();
        chunk.copy_from_slice(word.split_at(chunk.len()).0);
    }
}

/// How many bytes of `found` are not those that belong to `key`.
pub(crate) fn wrong_bytes(key: &BlockKey, found: &[u8]) -> u64 {
    let mut state = seed(key);
    let mut wrong = 0;
    for chunk in found.chunks(8) {
        let word = next(&mut state).to_le_bytes();
        let expected = word.split_at(chunk.len()).0;
        if chunk != expected {
            wrong += chunk.iter().zip(expected).filter(|(a, b)| a != b).count() as u64;
        }
    }
    wrong
}

fn seed(key: &BlockKey) -> u64 {
    key.0.iter().fold(0x9e37_79b9_7f4a_7c15, |state, byte| {
        (state ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_from_the_key_and_every_wrong_one_is_counted() {
        let (a, b) = (BlockKey([1; 32]), BlockKey([2; 32]));
        let mut bytes = vec![0; 1003];
        fill(&a, &mut bytes);
        assert_eq!(wrong_bytes(&a, &bytes), 0);
        assert!(wrong_bytes(&b, &bytes) > 900);
        bytes[0] ^= 1;
        bytes[1002] ^= 128;
        assert_eq!(wrong_bytes(&a, &bytes), 2);
    }
}
