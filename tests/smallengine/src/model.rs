//! The forward pass of a Llama model over a paged KV cache.

#![expect(clippy::indexing_slicing, reason = "all lengths come from the model's own shape")]

use std::ops::Range;

use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis};

use crate::math::{columns, multiply, rms_norm, rotate, rows, silu_times, soften, turns};
use crate::pool::{Part, Pool, PoolError, Spot};
use crate::weights::{Layer, Shape, Weights};

/// Why a row is a slice.
const CONTIGUOUS: &str = "rows of an array of our own lie in one piece";

/// A model at work on one sequence. Its tokens are of its vocabulary, and its places are as many as
/// its tokens need.
pub(crate) struct Model<'a> {
    pub(crate) weights: &'a Weights,
    pub(crate) pool: &'a Pool,
    /// Place of each block of the sequence.
    pub(crate) places: &'a [u32],
    pub(crate) threads: usize,
}

impl Model<'_> {
    /// Computes tokens that stand at `start..` of the sequence: their KV into the pool, and their
    /// hidden values after the last norm, a row for each. All KV before them is in the pool.
    pub(crate) fn forward(&self, start: usize, tokens: &[u32]) -> Result<Array2<f32>, PoolError> {
        let shape = self.weights.shape();
        let mut x = Array2::zeros((tokens.len(), shape.hidden));
        for (mut row, token) in x.rows_mut().into_iter().zip(tokens) {
            row.assign(&self.weights.embedding.column(*token as usize));
        }
        let turns = turns(start, tokens.len(), shape.head_dim, shape.rope_base);
        for (number, layer) in self.weights.layers.iter().enumerate() {
            x += &self.attention(number, layer, start, &turns, &x)?;
            x += &self.feed_forward(layer, &x);
        }
        Ok(normed(&x, &self.weights.output_norm, shape.epsilon))
    }

    /// The logits of hidden values.
    pub(crate) fn logits(&self, hidden: ArrayView2<'_, f32>) -> Array2<f32> {
        self.product(hidden, self.weights.output())
    }

    fn product(&self, x: ArrayView2<'_, f32>, weights: &Array2<f32>) -> Array2<f32> {
        let mut out = Array2::zeros((x.nrows(), weights.ncols()));
        multiply(x, weights.view(), out.view_mut(), self.threads);
        out
    }

    fn attention(
        &self,
        number: usize,
        layer: &Layer,
        start: usize,
        turns: &[(f32, f32)],
        x: &Array2<f32>,
    ) -> Result<Array2<f32>, PoolError> {
        let shape = self.weights.shape();
        let x = normed(x, &layer.attention_norm, shape.epsilon);
        let mut q = self.product(x.view(), &layer.q);
        let mut k = self.product(x.view(), &layer.k);
        let v = self.product(x.view(), &layer.v);
        for matrix in [&mut q, &mut k] {
            for (row, turns) in matrix.rows_mut().into_iter().zip(turns.chunks(shape.head_dim / 2))
            {
                rotate(row.into_slice().expect(CONTIGUOUS), turns);
            }
        }
        let tokens = start..start + x.nrows();
        self.write(number, Part::K, tokens.clone(), &k)?;
        self.write(number, Part::V, tokens.clone(), &v)?;
        let mut out = Array2::zeros(q.raw_dim());
        let mut heads = Vec::new();
        for head in 0..shape.kv_heads {
            let k = self.read(number, Part::K, head, tokens.end)?;
            let v = self.read(number, Part::V, head, tokens.end)?;
            heads.push((k, v));
        }
        let group = shape.heads / shape.kv_heads;
        let mut jobs: Vec<(usize, ArrayViewMut2<'_, f32>)> =
            out.axis_chunks_iter_mut(Axis(1), shape.head_dim).enumerate().collect();
        let per_thread = jobs.len().div_ceil(self.threads.max(1));
        std::thread::scope(|scope| {
            for jobs in jobs.chunks_mut(per_thread) {
                let (q, heads) = (&q, &heads);
                let work = move || {
                    for (head, out) in jobs {
                        let from = *head * shape.head_dim;
                        let q = columns(q.view(), from..from + shape.head_dim);
                        let (k, v) = &heads[*head / group];
                        attend(shape, start, q, k, v, out);
                    }
                };
                if self.threads > 1 {
                    scope.spawn(work);
                } else {
                    work();
                }
            }
        });
        Ok(self.product(out.view(), &layer.attention_out))
    }

    /// Writes the K or V of tokens, block by block and head by head.
    fn write(
        &self,
        layer: usize,
        part: Part,
        tokens: Range<usize>,
        values: &Array2<f32>,
    ) -> Result<(), PoolError> {
        let shape = self.weights.shape();
        let per_block = self.pool.tokens_per_block();
        let mut at = tokens.start;
        while at < tokens.end {
            let end = ((at / per_block + 1) * per_block).min(tokens.end);
            let new = rows(values, at - tokens.start..end - tokens.start);
            for head in 0..shape.kv_heads {
                let spot = Spot { layer, part, head, token: at % per_block };
                let from = head * shape.head_dim;
                let values = columns(new, from..from + shape.head_dim);
                let place = self.places[at / per_block];
                self.pool.write_head(place, spot, values.iter().copied())?;
            }
            at = end;
        }
        Ok(())
    }

    /// Reads the K or V of one head, of the first `tokens` tokens.
    fn read(
        &self,
        layer: usize,
        part: Part,
        head: usize,
        tokens: usize,
    ) -> Result<Array2<f32>, PoolError> {
        let mut values = Vec::with_capacity(tokens * self.weights.shape().head_dim);
        let spot = Spot { layer, part, head, token: 0 };
        self.pool.read_head(self.places, spot, tokens, &mut values)?;
        let shape = (tokens, self.weights.shape().head_dim);
        Ok(Array2::from_shape_vec(shape, values).expect("the pool gave so many values"))
    }

    fn feed_forward(&self, layer: &Layer, x: &Array2<f32>) -> Array2<f32> {
        let x = normed(x, &layer.feed_norm, self.weights.shape().epsilon);
        let mut gate = self.product(x.view(), &layer.gate);
        let up = self.product(x.view(), &layer.up);
        for (mut gate, up) in gate.rows_mut().into_iter().zip(up.rows()) {
            let gate = gate.as_slice_mut().expect(CONTIGUOUS);
            silu_times(gate, up.to_slice().expect(CONTIGUOUS));
        }
        self.product(gate.view(), &layer.down)
    }
}

/// Attention of one head: each row of `q` to the tokens up to its own.
fn attend(
    shape: &Shape,
    start: usize,
    q: ArrayView2<'_, f32>,
    k: &Array2<f32>,
    v: &Array2<f32>,
    out: &mut ArrayViewMut2<'_, f32>,
) {
    let scale = 1.0 / (shape.head_dim as f32).sqrt();
    let mut scores = Array2::zeros((q.nrows(), k.nrows()));
    multiply(q, k.t(), scores.view_mut(), 1);
    let mut sums = Vec::with_capacity(q.nrows());
    for (row, mut scores) in scores.rows_mut().into_iter().enumerate() {
        let scores = scores.as_slice_mut().expect(CONTIGUOUS);
        sums.push(soften(scores, start + row + 1, scale));
    }
    multiply(scores.view(), v.view(), out.view_mut(), 1);
    for (mut row, sum) in out.rows_mut().into_iter().zip(sums) {
        row.mapv_inplace(|value| value / sum);
    }
}

fn normed(x: &Array2<f32>, weights: &[f32], epsilon: f32) -> Array2<f32> {
    let mut out = Array2::zeros(x.raw_dim());
    for (mut out, x) in out.rows_mut().into_iter().zip(x.rows()) {
        let out = out.as_slice_mut().expect(CONTIGUOUS);
        rms_norm(x.to_slice().expect(CONTIGUOUS), weights, epsilon, out);
    }
    out
}
