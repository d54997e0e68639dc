//! The arithmetic, all of it in f32.
//!
//! Each result is computed by operations in an order that depends on its own operands only, not on
//! how many rows are computed at once, in how many threads, or which row it is. That is what makes
//! a split prefill give the same bits; `the_same_bits_under_any_split` at the end holds the product
//! to it.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, Slice};

/// Some rows of a matrix.
pub(crate) fn rows(matrix: &Array2<f32>, range: Range<usize>) -> ArrayView2<'_, f32> {
    matrix.slice_axis(Axis(0), Slice::from(range))
}

/// Some columns of a matrix.
pub(crate) fn columns(matrix: ArrayView2<'_, f32>, range: Range<usize>) -> ArrayView2<'_, f32> {
    matrix.slice_axis_move(Axis(1), Slice::from(range))
}

/// Multiplications below which a thread costs more than it saves.
const THREAD_WORK_MIN: usize = 1 << 20;

/// Sums are taken in this many lanes, so that the compiler can vectorize them.
const LANES: usize = 8;

/// `out = x * weights`, in threads that each compute some columns.
pub(crate) fn multiply(
    x: ArrayView2<'_, f32>,
    weights: ArrayView2<'_, f32>,
    mut out: ArrayViewMut2<'_, f32>,
    threads: usize,
) {
    let small = x.nrows() * weights.len() < THREAD_WORK_MIN;
    if small || threads < 2 {
        general_mat_mul(1.0, &x, &weights, 0.0, &mut out);
        return;
    }
    let columns = weights.ncols().div_ceil(threads);
    std::thread::scope(|scope| {
        let parts = weights.axis_chunks_iter(Axis(1), columns);
        for (part, mut out) in parts.zip(out.axis_chunks_iter_mut(Axis(1), columns)) {
            scope.spawn(move || general_mat_mul(1.0, &x, &part, 0.0, &mut out));
        }
    });
}

/// The sum, in lanes.
fn sum(values: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for part in values.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(part) {
            *lane += of(*value);
        }
    }
    lanes.iter().sum()
}

/// Root-mean-square norm of `x`, times `weights`, into `out`.
pub(crate) fn rms_norm(x: &[f32], weights: &[f32], epsilon: f32, out: &mut [f32]) {
    let mean = sum(x, |x| x * x) / x.len() as f32;
    let scale = 1.0 / (mean + epsilon).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weights) {
        *out = x * scale * weight;
    }
}

/// `silu(gate) * up`, into `gate`.
pub(crate) fn silu_times(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        // e^-|x|, so that nothing overflows.
        let small = exp(-gate.abs());
        let sigmoid = if *gate >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) };
        *gate *= sigmoid * up;
    }
}

/// Turns scores into `e^((score - largest) * scale)` and answers their sum. Scores from `live` on
/// are of tokens that come later, and become 0.
pub(crate) fn soften(scores: &mut [f32], live: usize, scale: f32) -> f32 {
    let (scores, later) = scores.split_at_mut(live.min(scores.len()));
    later.fill(0.0);
    let mut largest = [f32::NEG_INFINITY; LANES];
    for part in scores.chunks(LANES) {
        for (largest, score) in largest.iter_mut().zip(part) {
            *largest = if *score > *largest { *score } else { *largest };
        }
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    for score in scores.iter_mut() {
        *score = exp((*score - largest) * scale);
    }
    sum(scores, |weight| weight)
}

/// e^x for x up to 0, to about one part in ten million. The library's is exact and many times
/// slower, because it cannot be vectorized.
#[inline]
fn exp(x: f32) -> f32 {
    // Adding this leaves no room for a fraction: the nearest whole number stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = if x > -87.0 { x } else { -87.0 };
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let whole = rounded - ROUND;
    let rest = x - whole * LN_2_HIGH - whole * LN_2_LOW;
    let mut power = 1.0 / 720.0;
    for factor in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        power = power * rest + factor;
    }
    power * f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23))
}

/// Cosines and sines by which pairs of values are turned, for positions from `start` on: one row of
/// `head_dim / 2` (cosine, sine) pairs for each.
pub(crate) fn turns(start: usize, rows: usize, head_dim: usize, base: f32) -> Vec<(f32, f32)> {
    let pairs = head_dim / 2;
    let frequencies: Vec<f64> =
        (0..pairs).map(|pair| f64::from(base).powf(-2.0 * pair as f64 / head_dim as f64)).collect();
    let turn = |at: usize, frequency: &f64| {
        let (sine, cosine) = (at as f64 * frequency).sin_cos();
        (cosine as f32, sine as f32)
    };
    (start..start + rows)
        .flat_map(|at| frequencies.iter().map(move |frequency| turn(at, frequency)))
        .collect()
}

/// Turns the pairs of every head in a row of q or k, by one row of [`turns`].
pub(crate) fn rotate(row: &mut [f32], turns: &[(f32, f32)]) {
    for head in row.chunks_exact_mut(turns.len() * 2) {
        for (pair, (cosine, sine)) in head.chunks_exact_mut(2).zip(turns) {
            if let [a, b] = pair {
                (*a, *b) = (*a * cosine - *b * sine, *a * sine + *b * cosine);
            }
        }
    }
}

/// The nearest bf16, ties to even.
pub(crate) fn to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fc0;
    }
    let bits = value.to_bits();
    let even = 0x7fff + ((bits >> 16) & 1);
    (bits.wrapping_add(even) >> 16) as u16
}

/// The value of a bf16.
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Random;

    fn random(random: &mut Random, rows: usize, columns: usize) -> Array2<f32> {
        Array2::from_shape_vec((rows, columns), random.values(rows * columns, 1.0)).unwrap()
    }

    fn bits(values: ArrayView2<'_, f32>) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn the_same_bits_under_any_split() {
        let mut source = Random::new(1);
        for (rows, outs, ins) in [(67, 33, 577), (130, 640, 576), (40, 300, 1536), (9, 5, 3)] {
            let x = random(&mut source, rows, ins);
            let weights = random(&mut source, ins, outs);
            let mut whole = Array2::zeros((rows, outs));
            multiply(x.view(), weights.view(), whole.view_mut(), 1);
            for step in [1, 2, 3, 7, 8, 16, 64] {
                for threads in [1, 2, 3] {
                    let mut parts = Array2::zeros((rows, outs));
                    for from in (0..rows).step_by(step) {
                        let to = (from + step).min(rows);
                        let out = parts.slice_axis_mut(Axis(0), Slice::from(from..to));
                        multiply(super::rows(&x, from..to), weights.view(), out, threads);
                    }
                    assert!(bits(whole.view()) == bits(parts.view()), "{rows} by {step}");
                }
            }
            // Also when more is summed, but all of it zero: the tokens behind a row's own.
            let mut longer = Array2::zeros((rows, ins + 700));
            longer.slice_axis_mut(Axis(1), Slice::from(..ins)).assign(&x);
            let mut more = random(&mut source, ins + 700, outs);
            more.slice_axis_mut(Axis(0), Slice::from(..ins)).assign(&weights);
            let mut with_zeros = Array2::zeros((rows, outs));
            multiply(longer.view(), more.view(), with_zeros.view_mut(), 2);
            assert!(bits(whole.view()) == bits(with_zeros.view()), "{rows} with zeros");
        }
    }

    #[test]
    fn the_product_is_right() {
        let mut source = Random::new(2);
        let (x, weights) = (random(&mut source, 5, 300), random(&mut source, 300, 7));
        let mut out = Array2::zeros((5, 7));
        multiply(x.view(), weights.view(), out.view_mut(), 2);
        for ((row, column), value) in out.indexed_iter() {
            let pairs = x.row(row).into_iter().zip(weights.column(column));
            let exact: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(*value) - exact).abs() < 1e-4, "{value} {exact}");
        }
    }

    #[test]
    fn powers_norms_and_bf16_are_right() {
        for at in 0..100_000 {
            let x = -(at as f32) / 1200.0;
            let exact = f64::from(x).exp();
            let off = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(off < 3e-7, "e^{x} is off by {off}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1e9) < 1e-37);
        let mut scores = [1.0, 3.0, 2.0, 9.0];
        let sum = soften(&mut scores, 3, 1.0);
        assert_eq!((scores[1], scores[3]), (1.0, 0.0));
        assert!((f64::from(sum) - (1.0 + (-1f64).exp() + (-2f64).exp())).abs() < 1e-6);
        let mut out = [0.0; 2];
        rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        assert!((out[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6 && out[1] > 2.0 * out[0]);
        let mut gate = [0.0, 50.0, -50.0];
        silu_times(&mut gate, &[1.0, 1.0, 1.0]);
        assert!(gate[0] == 0.0 && gate[1] == 50.0 && gate[2].abs() < 1e-15, "{gate:?}");
        for (value, nearest) in
            [(1.0, 1.0), (1.0 + 1.0 / 256.0, 1.0), (1.0 + 3.0 / 256.0, 1.015_625)]
        {
            assert_eq!(from_bf16(to_bf16(value)), nearest);
        }
        assert!(from_bf16(to_bf16(f32::NAN)).is_nan());
        assert_eq!(from_bf16(to_bf16(f32::NEG_INFINITY)), f32::NEG_INFINITY);
    }

    #[test]
    fn a_turn_keeps_lengths_and_depends_on_the_position() {
        let turns = turns(5, 2, 4, 10_000.0);
        assert_eq!(turns.len(), 4);
        let mut row = [1.0, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 2.0];
        rotate(&mut row, &turns[..2]);
        assert_eq!(row[..4], row[4..], "each head is turned alike");
        assert!((row[0] - 5f32.cos()).abs() < 1e-6 && (row[1] - 5f32.sin()).abs() < 1e-6);
        assert!((row[2].hypot(row[3]) - 2.0).abs() < 1e-6);
    }
}
