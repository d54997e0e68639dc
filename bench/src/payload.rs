//! Block bytes that are derived from the block's key alone.
//!
//! Whoever has the key can say what every byte must be, so a reload is checked in full and without
//! keeping a copy. Three things are asked of the bytes. Every 64-byte line depends on the key and
//! on its position, so a block, line or page that lands in the wrong place is seen. They look like
//! bf16 KV to a codec (gaussian, per-channel scales, some outlier channels: exponents of about 2.9
//! bits, signs and mantissas that do not compress). And they are made at memory speed, so that what
//! is measured is the cache: a table of lines made once, entered at a place that the key decides,
//! with the sign and mantissa bits of each line flipped by 64 bits of key and position.

use std::sync::OnceLock;

use kvtide_tiers::block::BlockKey;

/// Bytes of a line: what a cache or a broken device moves at least.
const LINE_BYTES: usize = 64;

/// Lines of the table (256 KiB: it stays in a second-level cache, and its exponent plane repeats
/// only beyond the 64 KiB that LZ4 looks back).
const TABLE_LINES: usize = 4096;

/// The sign and mantissa bits of four little-endian bf16.
const FREE_BITS: u64 = 0x807f_807f_807f_807f;

/// Elements after which the channels repeat: two heads of 64, or one of 128.
const CHANNELS: usize = 128;

/// Spread of the channel scales, in powers of two.
const SCALE_SPREAD: f64 = 0.9;

type Line = [u64; LINE_BYTES / 8];

/// Makes and checks payloads.
#[derive(Clone, Copy, Debug)]
pub struct Payload {
    table: &'static [Line],
}

impl Default for Payload {
    fn default() -> Payload {
        Payload::new()
    }
}

impl Payload {
    /// The generator. The first one in a process makes the table (some milliseconds).
    pub fn new() -> Payload {
        static TABLE: OnceLock<Vec<Line>> = OnceLock::new();
        Payload { table: TABLE.get_or_init(table) }
    }

    /// Writes the bytes of block `key` over all of `out`.
    pub fn fill(&self, key: &BlockKey, out: &mut [u8]) {
        let (lines, tail) = out.as_chunks_mut::<LINE_BYTES>();
        let mut source = self.lines(key);
        for (out, line) in lines.iter_mut().zip(source.by_ref()) {
            write_line(&line, out);
        }
        if let Some(line) = source.next() {
            let mut last = [0; LINE_BYTES];
            write_line(&line, &mut last);
            tail.iter_mut().zip(last).for_each(|(out, byte)| *out = byte);
        }
    }

    /// Compares every byte of `bytes` with what block `key` must hold: the offset of the first
    /// wrong one, or `None`.
    pub fn check(&self, key: &BlockKey, bytes: &[u8]) -> Option<usize> {
        let (lines, tail) = bytes.as_chunks::<LINE_BYTES>();
        let mut source = self.lines(key);
        for (at, (found, line)) in lines.iter().zip(source.by_ref()).enumerate() {
            let (words, _) = found.as_chunks::<8>();
            let difference = words
                .iter()
                .zip(line)
                .fold(0, |sum, (word, expected)| sum | (u64::from_le_bytes(*word) ^ expected));
            if difference != 0 {
                return Some(at * LINE_BYTES + first_difference(found, &line).unwrap_or(0));
            }
        }
        let line = source.next()?;
        first_difference(tail, &line).map(|at| lines.len() * LINE_BYTES + at)
    }

    /// The lines of a block, without end.
    fn lines(&self, key: &BlockKey) -> impl Iterator<Item = Line> + use<> {
        let (words, _) = key.0.as_chunks::<8>();
        let seed = words.iter().fold(0x6b76_7469_6465, |seed: u64, word| {
            mix(seed.rotate_left(17) ^ u64::from_le_bytes(*word))
        });
        let start = (mix(seed) % TABLE_LINES as u64) as usize;
        let (behind, from) = self.table.split_at(start);
        let around = from.iter().chain(behind).cycle();
        around.zip(0u64..).map(move |(line, at)| {
            // Both steps are one-to-one, so no two lines of a block get the same bits.
            let bits = mix(seed.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            let [a, b, c, d, e, f, g, h] = *line;
            let flip = |word: u64, turn: u32| word ^ (bits.rotate_left(turn) & FREE_BITS);
            [
                flip(a, 0),
                flip(b, 8),
                flip(c, 16),
                flip(d, 24),
                flip(e, 32),
                flip(f, 40),
                flip(g, 48),
                flip(h, 56),
            ]
        })
    }
}

fn write_line(line: &Line, out: &mut [u8; LINE_BYTES]) {
    let (words, _) = out.as_chunks_mut::<8>();
    words.iter_mut().zip(line).for_each(|(out, word)| *out = word.to_le_bytes());
}

fn first_difference(found: &[u8], line: &Line) -> Option<usize> {
    let mut expected = [0; LINE_BYTES];
    write_line(line, &mut expected);
    found.iter().zip(expected).position(|(found, expected)| *found != expected)
}

/// The finaliser of splitmix64: one-to-one, every input bit reaches every output bit.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Gaussian bf16 in channels of different scale, one in 32 of them an outlier.
fn table() -> Vec<Line> {
    let mut counter = 0u64;
    let mut uniform = move || {
        counter += 1;
        let bits = mix(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut gauss = move || {
        let (radius, angle) = (uniform(), uniform());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    };
    let scales: Vec<f64> = (0..CHANNELS)
        .map(|channel| {
            let outlier = if channel % 32 == 7 { 3.0 } else { 0.0 };
            (gauss() * SCALE_SPREAD - 1.0 + outlier).exp2()
        })
        .collect();
    let mut channels = scales.iter().cycle();
    (0..TABLE_LINES)
        .map(|_| {
            let mut line = [0; LINE_BYTES / 8];
            for word in &mut line {
                for half in 0..4 {
                    let scale = channels.next().copied().unwrap_or(1.0);
                    let bf16 = ((gauss() * scale) as f32).to_bits() >> 16;
                    *word |= u64::from(bf16) << (16 * half);
                }
            }
            line
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(number: u8) -> BlockKey {
        BlockKey([number; 32])
    }

    fn block(number: u8, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        Payload::new().fill(&key(number), &mut out);
        out
    }

    fn entropy(symbols: impl Iterator<Item = u8>) -> f64 {
        let mut counts = [0u64; 256];
        symbols.for_each(|symbol| counts[symbol as usize] += 1);
        let total = counts.iter().sum::<u64>() as f64;
        let bits = |count: &u64| -(*count as f64 / total) * (*count as f64 / total).log2();
        counts.iter().filter(|count| **count > 0).map(bits).sum()
    }

    #[test]
    fn the_key_alone_decides_the_bytes() {
        for bytes in [0, 1, 63, 64, 65, 4096, 65_536, 100_001] {
            let one = block(1, bytes);
            assert_eq!(one, block(1, bytes));
            assert_eq!(Payload::new().check(&key(1), &one), None);
            if bytes > 8 {
                assert!(Payload::new().check(&key(2), &one).is_some());
                assert_eq!(one[..8], block(1, 8)[..8]);
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_found_at_its_offset() {
        let good = block(3, 1000);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            assert_eq!(Payload::new().check(&key(3), &bad), Some(at));
        }
    }

    #[test]
    fn no_line_occurs_twice_in_any_block() {
        let mut seen = HashSet::new();
        for number in 0..16 {
            for line in block(number, 1 << 20).chunks(LINE_BYTES) {
                assert!(seen.insert(kvtide_tiers::block::Sum128::of(line)), "block {number}");
            }
        }
    }

    #[test]
    fn the_bytes_have_the_statistics_of_bf16_kv() {
        let bytes = block(5, 2 << 20);
        let elements = || bytes.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let exponent = entropy(elements().map(|bits| (bits >> 7) as u8));
        let rest = entropy(elements().map(|bits| (bits as u8 & 0x7f) | ((bits >> 8) as u8 & 0x80)));
        println!("exponent {exponent:.3} bits, sign and mantissa {rest:.3} bits");
        assert!((2.7..3.1).contains(&exponent), "{exponent}");
        assert!(rest > 7.9, "{rest}");
    }
}
