//! The kernels again, in safe Rust over slices: what a launch must leave behind, to the bit.
//!
//! The twins are written for being plainly right, not for speed, and on purpose by other means than
//! the kernels where there are any: the narrow formats are rounded by exact arithmetic in f64, not
//! by bit tricks. The tests compare each kernel with its twin, and [`sum`] with another
//! implementation of XXH3. Scales are what [`scales`] makes of [`peaks`], or the caller's own.
//!
//! Casts, for all inputs:
//! - Wide to narrow divides by the head's scale in f32 (one rounding), then rounds to the nearest
//!   narrow value, ties to even. Too large, infinities included, becomes the largest of that sign
//!   (448, or 127). A scale of 0 makes every number 0.
//! - NaN becomes 0x7f in fp8 (the sign is dropped, as NVIDIA's conversion does) and 0 in int8,
//!   which has no NaN. A NaN scale is a NaN element.
//! - Narrow to wide multiplies in f32 and rounds to the nearest wide value, ties to even; too large
//!   becomes an infinity, NaN becomes 0x7fff in both wide formats.
//! - NaN and infinities do not count for a head's peak, so they never spoil their neighbours.

use crate::abi::{
    PlaneEntry, SUM_BLOCK_BYTES, SUM_BYTES_MIN, SumEntry, VERDICT_DIFFERS, VERDICT_EQUAL,
};

/// Why a twin did nothing, or stopped: a table that does not fit what it was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TwinError {
    /// A run lies outside of the region.
    #[error("plane {plane}: a run of place {place} lies outside of the region")]
    OutOfRegion {
        /// Which plane.
        plane: usize,
        /// Which place.
        place: u32,
    },
    /// The planes' runs do not add up to the payload.
    #[error("the planes have more or fewer bytes than the payload of {payload_bytes} bytes")]
    Payload {
        /// Bytes of the payload.
        payload_bytes: usize,
    },
    /// Elements, scales or results of another number than the shape says.
    #[error("the {what} are not as many as the shape says")]
    Shape {
        /// Elements, results or scales.
        what: &'static str,
    },
}

/// The run of the region that lies at `row`, as a range.
fn run(plane: &PlaneEntry, place: u32, row: u32) -> Option<std::ops::Range<usize>> {
    let start = plane
        .block_stride
        .checked_mul(u64::from(place))?
        .checked_add(plane.offset)?
        .checked_add(plane.row_stride.checked_mul(u64::from(row))?)?;
    let end = start.checked_add(plane.row_bytes)?;
    Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
}

/// `kvtide_gather` for one move: the block at `place` into its payload.
///
/// # Errors
/// A table that does not fit the region or the payload; the payload is then partly written.
pub fn gather(
    region: &[u8],
    planes: &[PlaneEntry],
    place: u32,
    payload: &mut [u8],
) -> Result<(), TwinError> {
    let payload_bytes = payload.len();
    let mut rest = payload;
    for (at, plane) in planes.iter().enumerate() {
        for row in 0..plane.rows {
            let range =
                run(plane, place, row).ok_or(TwinError::OutOfRegion { plane: at, place })?;
            let from = region.get(range).ok_or(TwinError::OutOfRegion { plane: at, place })?;
            let (to, behind) = rest
                .split_at_mut_checked(from.len())
                .ok_or(TwinError::Payload { payload_bytes })?;
            to.copy_from_slice(from);
            rest = behind;
        }
    }
    if rest.is_empty() { Ok(()) } else { Err(TwinError::Payload { payload_bytes }) }
}

/// `kvtide_scatter` for one move: a payload into the block's place. Whether a sum allows it is the
/// caller's business, as it is the launch's.
///
/// # Errors
/// A table that does not fit the region or the payload; the region is then partly written.
pub fn scatter(
    region: &mut [u8],
    planes: &[PlaneEntry],
    place: u32,
    payload: &[u8],
) -> Result<(), TwinError> {
    let payload_bytes = payload.len();
    let mut rest = payload;
    for (at, plane) in planes.iter().enumerate() {
        for row in 0..plane.rows {
            let range =
                run(plane, place, row).ok_or(TwinError::OutOfRegion { plane: at, place })?;
            let to = region.get_mut(range).ok_or(TwinError::OutOfRegion { plane: at, place })?;
            let (from, behind) =
                rest.split_at_checked(to.len()).ok_or(TwinError::Payload { payload_bytes })?;
            to.copy_from_slice(from);
            rest = behind;
        }
    }
    if rest.is_empty() { Ok(()) } else { Err(TwinError::Payload { payload_bytes }) }
}

/// `kvtide_fill`: byte `k` becomes byte `k % 4` of `value`, little-endian.
pub fn fill(target: &mut [u8], value: u32) {
    for (byte, pattern) in target.iter_mut().zip(value.to_le_bytes().iter().cycle()) {
        *byte = *pattern;
    }
}

/// The default secret of XXH3, as little-endian words.
const SECRET: [u64; 24] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
    0x3f34_9ce3_3f76_faa8,
    0x1d4f_0bc7_c7bb_dcf9,
    0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8,
    0xc3eb_d334_83ac_c5ea,
    0xeb63_13fa_ffa0_81c5,
    0x49da_f0b7_51dd_0d17,
    0x9e68_d429_2655_16d3,
    0xfca1_477d_58be_162b,
    0xce31_d07a_d1b8_f88f,
    0x2804_1695_8f3a_cb45,
    0x7e40_4bbb_cafb_d7af,
];

const PRIME32_1: u64 = 0x9e37_79b1;
const PRIME32_2: u64 = 0x85eb_ca77;
const PRIME32_3: u64 = 0xc2b2_ae3d;
const PRIME64_1: u64 = 0x9e37_79b1_85eb_ca87;
const PRIME64_2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const PRIME64_3: u64 = 0x1656_67b1_9e37_79f9;
const PRIME64_4: u64 = 0x85eb_ca77_c2b2_ae63;
const PRIME64_5: u64 = 0x27d4_eb2f_1656_67c5;

/// The accumulators before the first byte.
const START: [u64; 8] =
    [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

/// The word of the secret at a byte offset; 0 behind its end, which no caller reaches.
fn secret(byte: usize) -> u64 {
    let word = |at: usize| SECRET.get(at).copied().unwrap_or(0);
    let shift = (byte % 8) * 8;
    if shift == 0 {
        return word(byte / 8);
    }
    (word(byte / 8) >> shift) | (word(byte / 8 + 1) << (64 - shift))
}

/// What a stripe of 64 bytes adds to the eight accumulators.
fn stripe(data: &[u8], secret_byte: usize, sums: &mut [u64; 8]) {
    for (lane, bytes) in data.chunks_exact(8).enumerate() {
        let value = bytes.iter().rev().fold(0u64, |all, byte| (all << 8) | u64::from(*byte));
        let keyed = value ^ secret(secret_byte + 8 * lane);
        let product = (keyed & 0xffff_ffff).wrapping_mul(keyed >> 32);
        for (at, sum) in sums.iter_mut().enumerate() {
            if at == lane {
                *sum = sum.wrapping_add(product);
            } else if at == lane ^ 1 {
                *sum = sum.wrapping_add(value);
            }
        }
    }
}

/// `kvtide_sum_stripes`: for each 1,024-byte block of the payload, what its stripes add to the
/// eight accumulators. The last entry is the last block's, which has at most 15 stripes here: the
/// stripe that ends the payload belongs to [`sum_finish`]. Payloads are at least [`SUM_BYTES_MIN`]
/// long.
pub fn sum_stripes(payload: &[u8]) -> Vec<[u64; 8]> {
    let mut all = Vec::new();
    let whole = payload.len().saturating_sub(1) / SUM_BLOCK_BYTES as usize;
    for (at, block) in payload.chunks(SUM_BLOCK_BYTES as usize).enumerate() {
        let stripes = if at < whole { 16 } else { block.len().saturating_sub(1) / 64 };
        let mut sums = [0; 8];
        for (number, data) in block.chunks_exact(64).take(stripes).enumerate() {
            stripe(data, 8 * number, &mut sums);
        }
        all.push(sums);
    }
    all
}

/// `kvtide_sum_fold`: the serial chain over what [`sum_stripes`] found.
pub fn sum_fold(increments: &[[u64; 8]]) -> [u64; 8] {
    let mut sums = START;
    for (at, block) in increments.iter().enumerate() {
        let whole = at + 1 < increments.len();
        for (lane, (sum, increment)) in sums.iter_mut().zip(block).enumerate() {
            *sum = sum.wrapping_add(*increment);
            if whole {
                let mixed = (*sum ^ (*sum >> 47)) ^ secret(128 + 8 * lane);
                *sum = mixed.wrapping_mul(PRIME32_1);
            }
        }
    }
    sums
}

fn merge(sums: &[u64; 8], secret_byte: usize, start: u64) -> u64 {
    let mut all = start;
    for (at, pair) in sums.chunks_exact(2).enumerate() {
        if let [left, right] = pair {
            let left = left ^ secret(secret_byte + 16 * at);
            let right = right ^ secret(secret_byte + 16 * at + 8);
            let product = u128::from(left) * u128::from(right);
            all = all.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
    }
    all ^= all >> 37;
    all = all.wrapping_mul(0x1656_6791_9e37_79f9);
    all ^ (all >> 32)
}

/// `kvtide_sum_finish`: the stripe that ends the payload, and the merge. Low and high half.
pub fn sum_finish(folded: &[u64; 8], payload: &[u8]) -> [u64; 2] {
    let mut sums = *folded;
    let bytes = payload.len() as u64;
    if let Some(last) = payload.last_chunk::<64>() {
        stripe(last, 121, &mut sums);
    }
    [
        merge(&sums, 11, bytes.wrapping_mul(PRIME64_1)),
        merge(&sums, 117, !bytes.wrapping_mul(PRIME64_2)),
    ]
}

/// XXH3-128 of a payload, low and high half; `None` for one shorter than [`SUM_BYTES_MIN`].
pub fn sum(payload: &[u8]) -> Option<[u64; 2]> {
    if (payload.len() as u64) < SUM_BYTES_MIN {
        return None;
    }
    Some(sum_finish(&sum_fold(&sum_stripes(payload)), payload))
}

/// What the three sum kernels leave in a payload's scratch: the increments of every block, then the
/// folded accumulators.
pub fn sum_scratch(payload: &[u8]) -> Vec<u64> {
    let increments = sum_stripes(payload);
    let folded = sum_fold(&increments);
    increments.iter().chain([&folded]).flatten().copied().collect()
}

/// What the three sum kernels make of an entry whose payload has these bytes.
pub fn sum_entry(mut entry: SumEntry, payload: &[u8]) -> SumEntry {
    let found = sum(payload);
    entry.found = found.unwrap_or([0; 2]);
    if entry.compare != 0 {
        let equal = found == Some(entry.expected);
        entry.verdict = if equal { VERDICT_EQUAL } else { VERDICT_DIFFERS };
    }
    entry
}

/// The formats of 2 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wide {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    Fp16,
}

/// The formats of 1 byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Narrow {
    /// fp8 e4m3 without infinities: 1 sign, 4 exponent, 3 mantissa bits, largest value 448.
    Fp8,
    /// Symmetric int8: -127 to 127.
    Int8,
}

/// `rows` rows of `heads` heads of `head_elements` elements, contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Rows (tokens).
    pub rows: usize,
    /// Heads in a row.
    pub heads: usize,
    /// Elements of a head.
    pub head_elements: usize,
}

impl Shape {
    fn elements(&self) -> usize {
        self.rows * self.heads * self.head_elements
    }

    fn head(&self, element: usize) -> usize {
        element / self.head_elements.max(1) % self.heads.max(1)
    }

    fn check(&self, have: usize, what: &'static str, want: usize) -> Result<(), TwinError> {
        if have == want { Ok(()) } else { Err(TwinError::Shape { what }) }
    }
}

/// A binary floating-point format of at most 16 bits.
struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// Whether the largest exponent is for infinities and NaN, as IEEE has it.
    ieee: bool,
}

const BF16: Format = Format { exponent_bits: 8, mantissa_bits: 7, ieee: true };
const FP16: Format = Format { exponent_bits: 5, mantissa_bits: 10, ieee: true };
const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, ieee: false };

impl Format {
    fn bias(&self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// The value of a code without its sign; exact.
    fn decode(&self, code: u32) -> f64 {
        let mantissa = code & ((1 << self.mantissa_bits) - 1);
        let exponent = code >> self.mantissa_bits;
        let last = (1 << self.exponent_bits) - 1;
        if self.ieee && exponent == last {
            return if mantissa == 0 { f64::INFINITY } else { f64::NAN };
        }
        if !self.ieee && exponent == last && mantissa == (1 << self.mantissa_bits) - 1 {
            return f64::NAN;
        }
        let fraction = f64::from(mantissa) / f64::from(1 << self.mantissa_bits);
        if exponent == 0 {
            return fraction * 2f64.powi(1 - self.bias());
        }
        (1.0 + fraction) * 2f64.powi(exponent as i32 - self.bias())
    }

    /// The code, without a sign, of the value nearest to `value`, which is finite and not
    /// negative; ties go to the even code. May be one above the largest finite code, or far above.
    fn encode(&self, value: f64) -> u32 {
        if value == 0.0 {
            return 0;
        }
        // f64 holds every f32 as a normal number, so its exponent field is the exponent.
        let exponent = (((value.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(1 - self.bias());
        let quantum = 2f64.powi(exponent - self.mantissa_bits as i32);
        let steps = (value / quantum).round_ties_even() as u32;
        let base = (exponent + self.bias() - 1) as u32;
        (base << self.mantissa_bits) + steps
    }
}

impl Wide {
    fn format(self) -> Format {
        match self {
            Wide::Bf16 => BF16,
            Wide::Fp16 => FP16,
        }
    }

    /// The value of an element; exact.
    pub fn to_f32(self, element: u16) -> f32 {
        let magnitude = self.format().decode(u32::from(element & 0x7fff)) as f32;
        if element & 0x8000 == 0 { magnitude } else { -magnitude }
    }

    /// The element nearest to a value: see the module's rules.
    pub fn from_f32(self, value: f32) -> u16 {
        let format = self.format();
        if value.is_nan() {
            return 0x7fff;
        }
        let infinity = ((1 << format.exponent_bits) - 1) << format.mantissa_bits;
        let magnitude = f64::from(value.abs());
        let code = if value.is_infinite() { infinity } else { format.encode(magnitude) };
        code.min(infinity) as u16 | if value.is_sign_negative() { 0x8000 } else { 0 }
    }
}

impl Narrow {
    /// The largest magnitude, by which a peak is divided to give a scale.
    pub fn limit(self) -> f32 {
        match self {
            Narrow::Fp8 => crate::abi::FP8_MAX,
            Narrow::Int8 => crate::abi::INT8_MAX,
        }
    }

    /// The value of an element; exact.
    pub fn to_f32(self, element: u8) -> f32 {
        match self {
            Narrow::Fp8 => {
                let magnitude = E4M3.decode(u32::from(element & 0x7f)) as f32;
                if element & 0x80 == 0 { magnitude } else { -magnitude }
            }
            Narrow::Int8 => f32::from(element as i8),
        }
    }

    /// The element nearest to a value: see the module's rules.
    pub fn from_f32(self, value: f32) -> u8 {
        match self {
            Narrow::Fp8 if value.is_nan() => 0x7f,
            Narrow::Fp8 => {
                let magnitude = f64::from(value.abs()).min(f64::from(crate::abi::FP8_MAX));
                E4M3.encode(magnitude) as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
            }
            // NaN becomes 0 by the cast.
            Narrow::Int8 => value.clamp(-127.0, 127.0).round_ties_even() as i8 as u8,
        }
    }
}

/// `kvtide_peaks`: the largest finite magnitude of each head over all rows.
///
/// # Errors
/// Elements of another number than the shape says.
pub fn peaks(source: &[u16], wide: Wide, shape: Shape) -> Result<Vec<f32>, TwinError> {
    shape.check(source.len(), "elements", shape.elements())?;
    let mut peaks = vec![0f32; shape.heads];
    for (at, element) in source.iter().enumerate() {
        let magnitude = wide.to_f32(*element).abs();
        if let Some(peak) = peaks.get_mut(shape.head(at)).filter(|_| magnitude.is_finite()) {
            *peak = peak.max(magnitude);
        }
    }
    Ok(peaks)
}

/// `kvtide_scales`: each peak divided by the largest magnitude of the narrow format, in f32.
pub fn scales(peaks: &[f32], narrow: Narrow) -> Vec<f32> {
    peaks.iter().map(|peak| peak / narrow.limit()).collect()
}

/// `kvtide_to_fp8` and `kvtide_to_int8`.
///
/// # Errors
/// Elements, results or scales of another number than the shape says.
pub fn to_narrow(
    source: &[u16],
    wide: Wide,
    narrow: Narrow,
    shape: Shape,
    scales: &[f32],
    target: &mut [u8],
) -> Result<(), TwinError> {
    shape.check(source.len(), "elements", shape.elements())?;
    shape.check(target.len(), "results", shape.elements())?;
    shape.check(scales.len(), "scales", shape.heads)?;
    for (at, (from, to)) in source.iter().zip(target).enumerate() {
        let scale = scales.get(shape.head(at)).copied().unwrap_or(0.0);
        let value = wide.to_f32(*from);
        let ratio = if scale == 0.0 && !value.is_nan() { 0.0 } else { value / scale };
        *to = narrow.from_f32(ratio);
    }
    Ok(())
}

/// `kvtide_from_fp8` and `kvtide_from_int8`.
///
/// # Errors
/// Elements, results or scales of another number than the shape says.
pub fn from_narrow(
    source: &[u8],
    narrow: Narrow,
    wide: Wide,
    shape: Shape,
    scales: &[f32],
    target: &mut [u16],
) -> Result<(), TwinError> {
    shape.check(source.len(), "elements", shape.elements())?;
    shape.check(target.len(), "results", shape.elements())?;
    shape.check(scales.len(), "scales", shape.heads)?;
    for (at, (from, to)) in source.iter().zip(target).enumerate() {
        let scale = scales.get(shape.head(at)).copied().unwrap_or(0.0);
        *to = wide.from_f32(narrow.to_f32(*from) * scale);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(count: usize) -> Vec<u8> {
        let mut state = 0x1234_5678_9abc_def0u64;
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect()
    }

    fn agrees(payload: &[u8]) {
        let [low, high] = sum(payload).unwrap();
        let found = u128::from(low) | (u128::from(high) << 64);
        assert_eq!(found, twox_hash::XxHash3_128::oneshot(payload), "{} bytes", payload.len());
    }

    #[test]
    fn sums_are_those_of_another_implementation() {
        let data = bytes(3 * 1024 * 1024 + 4097);
        (241..=5000).for_each(|length| agrees(&data[..length]));
        for blocks in [5usize, 8, 16, 17, 64, 255, 256, 1024] {
            for edge in (-65isize..=65).filter(|edge| edge.abs() < 3 || edge.abs() > 62) {
                agrees(&data[..(blocks * 1024).checked_add_signed(edge).unwrap()]);
            }
        }
        agrees(&data[..1 << 20]);
        agrees(&data[..2 << 20]);
        agrees(&data);
        agrees(&data[1..]);
        assert_eq!(sum(&data[..240]), None);
    }

    #[test]
    fn scratch_is_as_large_as_announced() {
        for length in [241, 1023, 1024, 1025, 2047, 2048, 2049, 100_000] {
            let words = sum_scratch(&bytes(length)).len() as u64;
            assert_eq!(words * 8, crate::abi::scratch_bytes(length as u64), "{length} bytes");
        }
    }

    #[test]
    fn narrow_values_come_back_as_themselves() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(Narrow::Fp8.from_f32(Narrow::Fp8.to_f32(code)), code);
        }
        for code in (0..=255u8).filter(|code| *code != 0x80) {
            assert_eq!(Narrow::Int8.from_f32(Narrow::Int8.to_f32(code)), code);
        }
        for code in 0..=0xffffu16 {
            for wide in [Wide::Bf16, Wide::Fp16] {
                let value = wide.to_f32(code);
                let want = if value.is_nan() { 0x7fff } else { code };
                assert_eq!(wide.from_f32(value), want);
            }
        }
    }

    #[test]
    fn known_values() {
        for (value, code) in [
            (448.0f32, 0x7e),
            (449.0, 0x7e),
            (464.0, 0x7e),
            (f32::INFINITY, 0x7e),
            (f32::NEG_INFINITY, 0xfe),
            (1.0, 0x38),
            (-1.0, 0xb8),
            // Between 1 and 1.125 lies a tie: down to the even code. Between 1.125 and 1.25: up.
            (1.0625, 0x38),
            (1.1875, 0x3a),
            (2f32.powi(-9), 0x01),
            // Half of the smallest value is a tie with 0; a bit more is not.
            (2f32.powi(-10), 0x00),
            (2f32.powi(-10) * 1.001, 0x01),
            (-0.0, 0x80),
        ] {
            assert_eq!(Narrow::Fp8.from_f32(value), code, "{value}");
        }
        assert_eq!(Narrow::Fp8.from_f32(f32::NAN), 0x7f);
        assert_eq!(Narrow::Fp8.from_f32(-f32::NAN), 0x7f);
        for (value, code) in [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (127.5, 127)] {
            assert_eq!(Narrow::Int8.from_f32(value) as i8, code, "{value}");
        }
        assert_eq!(Narrow::Int8.from_f32(f32::NAN), 0);
        assert_eq!(Narrow::Int8.from_f32(f32::NEG_INFINITY) as i8, -127);
        assert_eq!(Wide::Fp16.from_f32(65519.9), 0x7bff);
        assert_eq!(Wide::Fp16.from_f32(65520.0), 0x7c00);
        assert_eq!(Wide::Fp16.from_f32(2f32.powi(-25)), 0);
        assert_eq!(Wide::Bf16.from_f32(f32::MAX), 0x7f80);
        assert_eq!(Wide::Bf16.to_f32(0x3f80), 1.0);
        assert_eq!(Wide::Fp16.to_f32(0x3c00), 1.0);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let plane = PlaneEntry {
            row_bytes: 4,
            row_stride: 8,
            rows: 2,
            block_stride: 16,
            ..Default::default()
        };
        let region = [7; 32];
        let mut payload = [0; 8];
        assert_eq!(gather(&region, &[plane], 1, &mut payload), Ok(()));
        let outside = TwinError::OutOfRegion { plane: 0, place: 2 };
        assert_eq!(gather(&region, &[plane], 2, &mut payload), Err(outside));
        let short = TwinError::Payload { payload_bytes: 7 };
        assert_eq!(gather(&region, &[plane], 0, &mut payload[..7]), Err(short));
        let long = TwinError::Payload { payload_bytes: 9 };
        assert_eq!(scatter(&mut [0; 32], &[plane], 0, &[0; 9]), Err(long));
    }
}
