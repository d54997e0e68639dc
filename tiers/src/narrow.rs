//! Narrows blocks of 16-bit floats to 8 bits for each element, and widens them again.
//!
//! [`crate::block::NarrowShape`] says what lies where. Plain arithmetic in f32, rounding to nearest
//! and ties to even, the same on every machine, so that equal blocks have equal narrow forms. The
//! loops are written so that the compiler can vectorise them.
//!
//! A scale is the largest magnitude that shares it, divided by the largest one of the narrow type
//! and rounded up to bf16, so that nothing is cut off. Infinities and NaN cannot be kept: such a
//! block is refused.

use crate::block::{Narrow, NarrowShape, PlaneOrder, SCALE_BYTES, Wide};

/// Largest magnitude of [`Narrow::Int8`].
const INT8_MAX: f32 = 127.0;

/// Largest magnitude of [`Narrow::Fp8`].
const FP8_MAX: f32 = 448.0;

/// Added to a number below 2^22 and taken off again, it rounds the number to an integer, which its
/// low mantissa bits then hold (1.5 x 2^23; IEEE 754 rounds each sum to nearest, ties to even).
const ROUNDS: f32 = 12_582_912.0;

/// Why a block cannot be narrowed or widened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NarrowError {
    /// A buffer does not have the length that the shape calls for.
    #[error("{bytes} bytes given where blocks of this shape have {expected}")]
    Length {
        /// Bytes given.
        bytes: usize,
        /// Bytes of a block.
        expected: u32,
    },
    /// An element is an infinity or not a number.
    #[error("an element is infinite or not a number, which 8 bits cannot hold")]
    NotFinite,
}

/// What shares a scale.
#[derive(Clone, Copy)]
enum Sharing {
    /// A channel of a head, over all tokens.
    Channel,
    /// A token of a head.
    Token,
    /// A head.
    Head,
}

impl Sharing {
    fn of(narrow: Narrow, is_k: bool) -> Sharing {
        match (narrow, is_k) {
            (Narrow::Fp8, _) => Sharing::Head,
            (Narrow::Int8, true) => Sharing::Channel,
            (Narrow::Int8, false) => Sharing::Token,
        }
    }
}

/// The extents of one plane, and memory for its elements in f32.
struct Work {
    heads: usize,
    tokens: usize,
    head_elements: usize,
    order: PlaneOrder,
    floats: Vec<f32>,
    scales: Vec<f32>,
    /// The scale of each element of the run at hand.
    run: Vec<f32>,
}

impl Work {
    fn new(shape: &NarrowShape) -> Work {
        let [heads, tokens, head_elements] =
            [shape.heads, shape.tokens, shape.head_elements].map(|extent| extent as usize);
        let floats = vec![0.0; heads * tokens * head_elements];
        let run = vec![0.0; head_elements];
        Work {
            heads,
            tokens,
            head_elements,
            order: shape.form.order,
            floats,
            scales: run.clone(),
            run,
        }
    }

    /// Each run of a head's elements for one token: its first element, and who it is.
    fn runs(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let (heads, tokens, elements, order) =
            (self.heads, self.tokens, self.head_elements, self.order);
        (0..heads).flat_map(move |head| {
            (0..tokens).map(move |token| {
                let run = match order {
                    PlaneOrder::HeadsFirst => head * tokens + token,
                    PlaneOrder::TokensFirst => token * heads + head,
                };
                (run * elements, head, token)
            })
        })
    }

    /// Fills `scales` with the largest magnitude of what shares each.
    fn find_peaks(&mut self, sharing: Sharing, scales: usize) {
        let mut peaks = std::mem::take(&mut self.scales);
        peaks.clear();
        peaks.resize(scales, 0.0);
        let elements = self.head_elements;
        for (at, head, token) in self.runs() {
            let run = self.floats.get(at..at + elements).unwrap_or_default();
            let largest = || run.iter().fold(0.0f32, |peak, value| peak.max(value.abs()));
            match sharing {
                Sharing::Channel => {
                    let own = peaks.get_mut(head * elements..).unwrap_or_default();
                    for (peak, value) in own.iter_mut().zip(run) {
                        *peak = peak.max(value.abs());
                    }
                }
                Sharing::Token => set_max(&mut peaks, head * self.tokens + token, largest()),
                Sharing::Head => set_max(&mut peaks, head, largest()),
            }
        }
        self.scales = peaks;
    }

    /// Fills `run` with the scale of each element of one run.
    fn spread(&mut self, sharing: Sharing, head: usize, token: usize) {
        let one = |at: usize| self.scales.get(at).copied().unwrap_or(0.0);
        match sharing {
            Sharing::Channel => {
                let own = self.scales.get(head * self.head_elements..).unwrap_or_default();
                self.run.iter_mut().zip(own).for_each(|(to, from)| *to = *from);
            }
            Sharing::Token => self.run.fill(one(head * self.tokens + token)),
            Sharing::Head => self.run.fill(one(head)),
        }
    }
}

fn set_max(peaks: &mut [f32], at: usize, value: f32) {
    if let Some(peak) = peaks.get_mut(at) {
        *peak = peak.max(value);
    }
}

/// Where the scales and the elements of each plane are in a block's two forms.
struct Cuts {
    /// Elements of a plane.
    elements: usize,
    /// Scales of a K plane and of a V plane.
    scales: [usize; 2],
    planes: usize,
    scale_bytes: usize,
}

impl Cuts {
    fn of(shape: &NarrowShape, raw: usize, kept: usize) -> Result<Cuts, NarrowError> {
        for (bytes, expected) in [(raw, shape.raw_bytes()), (kept, shape.kept_bytes())] {
            if bytes != expected as usize || bytes == 0 {
                return Err(NarrowError::Length { bytes, expected });
            }
        }
        let planes = shape.layers as usize * 2;
        Ok(Cuts {
            elements: raw / 2 / planes,
            scales: shape.scales().map(|count| count as usize),
            planes,
            scale_bytes: (shape.scales_in_block() * SCALE_BYTES) as usize,
        })
    }

    /// Plane by plane: whether it is K, its scales' bytes, and its first element.
    fn planes(&self) -> impl Iterator<Item = (bool, std::ops::Range<usize>, usize)> + use<> {
        let (elements, [k, v], planes) = (self.elements, self.scales, self.planes);
        let mut at = 0;
        (0..planes).map(move |plane| {
            let is_k = plane.is_multiple_of(2);
            let bytes = if is_k { k } else { v } * SCALE_BYTES as usize;
            at += bytes;
            (is_k, at - bytes..at, plane * elements)
        })
    }
}

/// Writes the narrow form of the block `raw` into `kept`.
///
/// # Errors
/// Buffers of other lengths than the shape's, and elements that are not finite.
pub fn narrow(shape: &NarrowShape, raw: &[u8], kept: &mut [u8]) -> Result<(), NarrowError> {
    let cuts = Cuts::of(shape, raw.len(), kept.len())?;
    let (all_scales, all_elements) = kept.split_at_mut(cuts.scale_bytes);
    let mut work = Work::new(shape);
    for (is_k, scales, first) in cuts.planes() {
        let plane = raw.get(2 * first..2 * (first + cuts.elements)).unwrap_or_default();
        let out = all_elements.get_mut(first..first + cuts.elements).unwrap_or_default();
        read_wide(shape.form.wide, plane, &mut work.floats)?;
        let sharing = Sharing::of(shape.form.narrow, is_k);
        work.find_peaks(sharing, scales.len() / SCALE_BYTES as usize);
        let limit = match shape.form.narrow {
            Narrow::Int8 => INT8_MAX,
            Narrow::Fp8 => FP8_MAX,
        };
        let stored = all_scales.get_mut(scales).unwrap_or_default();
        for (scale, to) in work.scales.iter_mut().zip(stored.as_chunks_mut().0) {
            let code = bf16_above(*scale / limit);
            *scale = bf16_to_f32(code);
            *to = code.to_le_bytes();
        }
        for (at, head, token) in work.runs() {
            work.spread(sharing, head, token);
            let run = work.floats.get(at..at + work.head_elements).unwrap_or_default();
            let to = out.get_mut(at..at + work.head_elements).unwrap_or_default();
            write_narrow(shape.form.narrow, run, &work.run, to);
        }
    }
    Ok(())
}

/// Writes the block whose narrow form is `kept` into `raw`.
///
/// # Errors
/// Buffers of other lengths than the shape's.
pub fn widen(shape: &NarrowShape, kept: &[u8], raw: &mut [u8]) -> Result<(), NarrowError> {
    let cuts = Cuts::of(shape, raw.len(), kept.len())?;
    let (all_scales, all_elements) = kept.split_at(cuts.scale_bytes);
    let mut work = Work::new(shape);
    for (is_k, scales, first) in cuts.planes() {
        let stored = all_scales.get(scales).unwrap_or_default().as_chunks().0;
        work.scales.clear();
        work.scales.extend(stored.iter().map(|code| bf16_to_f32(u16::from_le_bytes(*code))));
        let sharing = Sharing::of(shape.form.narrow, is_k);
        let codes = all_elements.get(first..first + cuts.elements).unwrap_or_default();
        for (at, head, token) in work.runs() {
            work.spread(sharing, head, token);
            let run = codes.get(at..at + work.head_elements).unwrap_or_default();
            let to = work.floats.get_mut(at..at + work.head_elements).unwrap_or_default();
            read_narrow(shape.form.narrow, run, &work.run, to);
        }
        let plane = raw.get_mut(2 * first..2 * (first + cuts.elements)).unwrap_or_default();
        write_wide(shape.form.wide, &work.floats, plane);
    }
    Ok(())
}

fn read_wide(wide: Wide, bytes: &[u8], floats: &mut [f32]) -> Result<(), NarrowError> {
    let codes = bytes.as_chunks::<2>().0;
    let mut exponents = 0;
    match wide {
        Wide::Bf16 => {
            for (code, to) in codes.iter().zip(floats) {
                let code = u16::from_le_bytes(*code);
                exponents |= u32::from(code & 0x7f80 == 0x7f80);
                *to = bf16_to_f32(code);
            }
        }
        Wide::F16 => {
            for (code, to) in codes.iter().zip(floats) {
                let code = u16::from_le_bytes(*code);
                exponents |= u32::from(code & 0x7c00 == 0x7c00);
                *to = f16_to_f32(code);
            }
        }
    }
    if exponents == 0 { Ok(()) } else { Err(NarrowError::NotFinite) }
}

fn write_wide(wide: Wide, floats: &[f32], bytes: &mut [u8]) {
    let codes = bytes.as_chunks_mut::<2>().0;
    match wide {
        Wide::Bf16 => {
            for (to, value) in codes.iter_mut().zip(floats) {
                *to = f32_to_bf16(*value).to_le_bytes();
            }
        }
        Wide::F16 => {
            for (to, value) in codes.iter_mut().zip(floats) {
                *to = f32_to_f16(*value).to_le_bytes();
            }
        }
    }
}

fn write_narrow(narrow: Narrow, values: &[f32], scales: &[f32], out: &mut [u8]) {
    let pairs = values.iter().zip(scales).zip(out);
    match narrow {
        Narrow::Int8 => {
            for ((value, scale), to) in pairs {
                *to = to_int8(ratio(*value, *scale));
            }
        }
        Narrow::Fp8 => {
            for ((value, scale), to) in pairs {
                *to = to_fp8(ratio(*value, *scale));
            }
        }
    }
}

fn read_narrow(narrow: Narrow, codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let pairs = codes.iter().zip(scales).zip(out);
    match narrow {
        Narrow::Int8 => {
            for ((code, scale), to) in pairs {
                *to = f32::from(*code as i8) * scale;
            }
        }
        Narrow::Fp8 => {
            for ((code, scale), to) in pairs {
                *to = fp8_to_f32(*code) * scale;
            }
        }
    }
}

/// 0 where everything that shares the scale is too small for it.
fn ratio(value: f32, scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { value / scale }
}

fn to_int8(ratio: f32) -> u8 {
    (ratio.clamp(-INT8_MAX, INT8_MAX) + ROUNDS).to_bits() as u8
}

fn to_fp8(ratio: f32) -> u8 {
    let magnitude = ratio.abs().min(FP8_MAX);
    let bits = magnitude.to_bits();
    // 3 of the 23 mantissa bits stay, and the exponent's bias changes from 127 to 7.
    let normal = bits.wrapping_add(0x7_ffff + ((bits >> 20) & 1)) >> 20;
    let normal = normal.wrapping_sub((127 - 7) << 3);
    // Below 2^-6 there are multiples of 2^-9.
    let small = (magnitude * 512.0 + ROUNDS).to_bits() & 0xff;
    let code = if magnitude < 0.015_625 { small } else { normal };
    code as u8 | if ratio.is_sign_negative() { 0x80 } else { 0 }
}

fn fp8_to_f32(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // As the bits of an f32 it is 2^120 too small, for numbers of all sizes alike.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((127 + 120) << 23);
    if code & 0x80 == 0 { value } else { -value }
}

fn bf16_to_f32(code: u16) -> f32 {
    f32::from_bits(u32::from(code) << 16)
}

/// The smallest bf16 that is not below a finite value that is not negative.
fn bf16_above(value: f32) -> u16 {
    ((value.to_bits() + 0xffff) >> 16) as u16
}

/// To nearest, ties to even, at most the largest finite one.
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let code = (magnitude.wrapping_add(0x7fff + ((magnitude >> 16) & 1)) >> 16).min(0x7f7f);
    code as u16 | ((bits >> 16) & 0x8000) as u16
}

fn f16_to_f32(code: u16) -> f32 {
    // As the bits of an f32 it is 2^112 too small, for numbers of all sizes alike.
    let value = f32::from_bits(u32::from(code & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    if code & 0x8000 == 0 { value } else { -value }
}

/// To nearest, ties to even, at most the largest finite one.
fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // 10 of the 23 mantissa bits stay, and the exponent's bias changes from 127 to 15.
    let normal = magnitude.wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    let normal = normal.wrapping_sub((127 - 15) << 10);
    // Below 2^-14 there are multiples of 2^-24.
    let small = (f32::from_bits(magnitude) * 16_777_216.0 + ROUNDS).to_bits() & 0x7fff;
    let code = if magnitude < (127 - 14) << 23 { small } else { normal.min(0x7bff) };
    code as u16 | ((bits >> 16) & 0x8000) as u16
}

#[cfg(test)]
mod tests {
    use kvtide_kernels::twin;
    use proptest::prelude::*;

    use super::*;
    use crate::block::Narrowed;

    #[test]
    fn every_16_bit_float_is_read_as_the_kernels_twin_reads_it() {
        for code in 0..=u16::MAX {
            if code & 0x7f80 != 0x7f80 {
                assert_eq!(bf16_to_f32(code), twin::Wide::Bf16.to_f32(code));
                assert_eq!(f32_to_bf16(bf16_to_f32(code)), code);
            }
            if code & 0x7c00 != 0x7c00 {
                assert_eq!(f16_to_f32(code), twin::Wide::Fp16.to_f32(code), "{code:#x}");
                assert_eq!(f32_to_f16(f16_to_f32(code)), code, "{code:#x}");
            }
        }
        for code in (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(fp8_to_f32(code), twin::Narrow::Fp8.to_f32(code), "{code:#x}");
            assert_eq!(to_fp8(fp8_to_f32(code)), code, "{code:#x}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        /// Rounding is that of the kernels' twin, which is written in another way.
        #[test]
        fn rounding_is_the_kernels_twins(bits in any::<u32>(), near in -500f32..500.0) {
            for value in [f32::from_bits(bits), near, near / 1e4, near / 3e7] {
                prop_assume!(value.is_finite());
                prop_assert_eq!(to_fp8(value), twin::Narrow::Fp8.from_f32(value));
                prop_assert_eq!(to_int8(value), twin::Narrow::Int8.from_f32(value));
                let bf16 = twin::Wide::Bf16.from_f32(value);
                prop_assert_eq!(f32_to_bf16(value), bf16.min(bf16 & 0x8000 | 0x7f7f));
                let f16 = twin::Wide::Fp16.from_f32(value);
                prop_assert_eq!(f32_to_f16(value), f16.min(f16 & 0x8000 | 0x7bff));
            }
        }
    }

    fn shapes() -> impl Strategy<Value = NarrowShape> {
        let form =
            (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(wide, narrow, order)| {
                Narrowed {
                    wide: if wide { Wide::Bf16 } else { Wide::F16 },
                    narrow: if narrow { Narrow::Int8 } else { Narrow::Fp8 },
                    order: if order { PlaneOrder::HeadsFirst } else { PlaneOrder::TokensFirst },
                }
            });
        (form, 1u32..4, 1u32..4, 1u32..20, 1u32..20).prop_map(
            |(form, layers, heads, head_elements, tokens)| NarrowShape {
                form,
                layers,
                heads,
                head_elements,
                tokens,
            },
        )
    }

    /// Which element is which, written out index by index.
    fn element(shape: &NarrowShape, layer: u32, v: u32, token: u32, head: u32, at: u32) -> usize {
        let plane = layer * 2 + v;
        let in_plane = match shape.form.order {
            PlaneOrder::HeadsFirst => head * shape.tokens + token,
            PlaneOrder::TokensFirst => token * shape.heads + head,
        };
        ((plane * shape.heads * shape.tokens + in_plane) * shape.head_elements + at) as usize
    }

    fn everybody(shape: &NarrowShape) -> impl Iterator<Item = [u32; 5]> + use<> {
        let NarrowShape { layers, heads, head_elements, tokens, .. } = *shape;
        let count = layers * 2 * tokens * heads * head_elements;
        (0..count).map(move |number| {
            let (rest, at) = (number / head_elements, number % head_elements);
            let (rest, head) = (rest / heads, rest % heads);
            let (rest, token) = (rest / tokens, rest % tokens);
            [rest / 2, rest % 2, token, head, at]
        })
    }

    fn value(wide: Wide, raw: &[u8], element: usize) -> f32 {
        let code = u16::from_le_bytes([raw[2 * element], raw[2 * element + 1]]);
        match wide {
            Wide::Bf16 => bf16_to_f32(code),
            Wide::F16 => f16_to_f32(code),
        }
    }

    /// The elements that share a scale with this one.
    fn sharers(shape: &NarrowShape, [layer, v, token, head, at]: [u32; 5]) -> Vec<usize> {
        let tokens = 0..shape.tokens;
        let elements = 0..shape.head_elements;
        match (shape.form.narrow, v) {
            (Narrow::Int8, 0) => {
                tokens.map(|token| element(shape, layer, v, token, head, at)).collect()
            }
            (Narrow::Int8, _) => {
                elements.map(|at| element(shape, layer, v, token, head, at)).collect()
            }
            (Narrow::Fp8, _) => tokens
                .flat_map(|token| elements.clone().map(move |at| (token, at)))
                .map(|(token, at)| element(shape, layer, v, token, head, at))
                .collect(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        /// No element moves by more than a step of its own scale, wherever it lies.
        #[test]
        fn elements_stay_within_a_step_of_their_scale(shape in shapes(), seed in any::<u64>()) {
            let mut state = seed | 1;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            };
            let mut raw = vec![0; shape.raw_bytes() as usize];
            for pair in raw.as_chunks_mut::<2>().0 {
                let value = next() * if next() > 0.8 { 40.0 } else { 1.0 };
                *pair = match shape.form.wide {
                    Wide::Bf16 => f32_to_bf16(value),
                    Wide::F16 => f32_to_f16(value),
                }.to_le_bytes();
            }
            let mut kept = vec![0; shape.kept_bytes() as usize];
            narrow(&shape, &raw, &mut kept).unwrap();
            let mut again = vec![0; raw.len()];
            widen(&shape, &kept, &mut again).unwrap();
            for who in everybody(&shape) {
                let [layer, v, token, head, at] = who;
                let own = element(&shape, layer, v, token, head, at);
                let read = |bytes: &[u8], at| value(shape.form.wide, bytes, at);
                let (was, is) = (read(&raw, own), read(&again, own));
                let all = sharers(&shape, who).into_iter();
                let peak = all.map(|at| read(&raw, at).abs()).fold(0.0, f32::max);
                // Half a step, and what a scale and the result lose by rounding.
                let step = match shape.form.narrow {
                    Narrow::Int8 => peak / 127.0 * 0.51 + was.abs() / 100.0,
                    Narrow::Fp8 => (was.abs() / 16.0).max(peak / 448.0 / 512.0) * 1.1,
                };
                prop_assert!((was - is).abs() <= step, "{was} became {is} ({peak})");
            }
        }
    }

    #[test]
    fn what_is_not_finite_or_not_a_block_is_refused() {
        let form =
            Narrowed { wide: Wide::Bf16, narrow: Narrow::Int8, order: PlaneOrder::HeadsFirst };
        let shape = NarrowShape { form, layers: 1, heads: 1, head_elements: 4, tokens: 2 };
        let (mut raw, mut kept) = ([0; 32], [0; 28]);
        assert_eq!(narrow(&shape, &raw, &mut kept), Ok(()));
        for bad in [0x7f80u16, 0xff80, 0x7fc0] {
            raw[6..8].copy_from_slice(&bad.to_le_bytes());
            assert_eq!(narrow(&shape, &raw, &mut kept), Err(NarrowError::NotFinite));
        }
        let short = narrow(&shape, &raw[2..], &mut kept);
        assert_eq!(short, Err(NarrowError::Length { bytes: 30, expected: 32 }));
        let short = widen(&shape, &kept[1..], &mut raw);
        assert_eq!(short, Err(NarrowError::Length { bytes: 27, expected: 28 }));
        let nothing = NarrowShape { layers: 0, ..shape };
        assert!(narrow(&nothing, &[], &mut []).is_err());
    }
}
