//! What a block's bytes look like from outside: llama.cpp's state of one sequence.
//!
//! The parser of llama.cpp believes what it reads. Before it sees a block, this checks that the
//! block says of itself what it should: so many tokens, at those positions, one behind the other,
//! in one sequence. The same check, at a store, finds blocks whose cells lie out of order in the
//! cache, whose bytes would not be those that another process computes. Reads only.

/// Number of 32-bit words before the cells: magic, sequence, number of streams, number of cells.
const WORDS_BEFORE: usize = 4;
/// Words of one cell: position, number of sequences, sequence; some models have three more.
const WORDS_PER_CELL: [usize; 2] = [3, 6];

/// Whether `bytes` say that they are the KV of `tokens` tokens from position `first` on, in order.
pub(crate) fn is_block(bytes: &[u8], first: usize, tokens: usize) -> bool {
    WORDS_PER_CELL.iter().any(|words| is_block_of(bytes, first, tokens, *words).unwrap_or(false))
}

fn is_block_of(bytes: &[u8], first: usize, tokens: usize, cell_words: usize) -> Option<bool> {
    let word = |at: usize| {
        let bytes = bytes.get(4 * at..4 * at + 4)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    if word(2)? != 1 || word(3)? != tokens {
        return Some(false);
    }
    for cell in 0..tokens {
        let at = WORDS_BEFORE + cell * cell_words;
        if word(at)? != first + cell || word(at + 1)? != 1 {
            return Some(false);
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(first: u32, tokens: u32, more: usize) -> Vec<u8> {
        let mut words = vec![7, 1, 1, tokens];
        for cell in 0..tokens {
            words.extend([first + cell, 1]);
            words.extend(vec![0; more]);
            words.push(1);
        }
        words.iter().flat_map(|word: &u32| word.to_le_bytes()).collect()
    }

    #[test]
    fn whole_blocks_in_order_pass_and_nothing_else_does() {
        for more in [0, 3] {
            let bytes = block(64, 16, more);
            assert!(is_block(&bytes, 64, 16));
            assert!(!is_block(&bytes, 0, 16), "another position");
            assert!(!is_block(&bytes, 64, 32), "another length");
            assert!(!is_block(&bytes[..bytes.len() / 2], 64, 16), "cut short");
            let mut swapped = bytes.clone();
            swapped.swap(16, 16 + 4 * (3 + more));
            assert!(!is_block(&swapped, 64, 16), "out of order");
        }
        assert!(!is_block(&[], 0, 1));
    }
}
