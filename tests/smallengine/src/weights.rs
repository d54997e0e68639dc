//! Weights of a Llama model: from a GGUF file, or made from a seed.

use std::path::{Path, PathBuf};

use ndarray::{Array2, ArrayView2, Axis};

use crate::gguf::{Gguf, GgufError};

/// Most layers, heads, and so on that are believed; above the largest that anybody has.
const COUNT_MAX: usize = 1 << 20;

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Layers.
    pub layers: usize,
    /// Values of a token between layers.
    pub hidden: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Values of a head, an even number.
    pub head_dim: usize,
    /// Values between the two halves of a feed-forward.
    pub feed_forward: usize,
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Epsilon of the norms.
    pub epsilon: f32,
    /// Whether the embedding is the output matrix as well.
    pub tied: bool,
}

impl Shape {
    /// A model that computes 1,000 tokens in well under a second: 1,536 bytes of KV per token.
    pub fn small() -> Shape {
        Shape {
            layers: 3,
            hidden: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            feed_forward: 512,
            vocabulary: 512,
            rope_base: 10_000.0,
            epsilon: 1e-5,
            tied: false,
        }
    }

    /// The shape of SmolLM2-135M: 23,040 bytes of KV per token.
    pub fn smollm2_135m() -> Shape {
        Shape {
            layers: 30,
            hidden: 576,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            feed_forward: 1536,
            vocabulary: 49_152,
            rope_base: 100_000.0,
            epsilon: 1e-5,
            tied: true,
        }
    }

    fn of(file: &Gguf) -> Result<Shape, WeightsError> {
        let architecture = file.text("general.architecture")?;
        if architecture != "llama" {
            let what = format!("a model of architecture `{architecture}`, and not `llama`");
            return Err(WeightsError::NotThisModel(what));
        }
        if let Ok(scaling) = file.text("llama.rope.scaling.type")
            && scaling != "none"
        {
            return Err(WeightsError::NotThisModel(format!("a model with rope scaling {scaling}")));
        }
        let count = |name: &str| file.count(&format!("llama.{name}"), COUNT_MAX);
        let hidden = count("embedding_length")?;
        let heads = count("attention.head_count")?;
        let kv_heads = match file.has("llama.attention.head_count_kv") {
            true => count("attention.head_count_kv")?,
            false => heads,
        };
        let head_dim = match file.has("llama.attention.key_length") {
            true => count("attention.key_length")?,
            false => hidden / heads,
        };
        let turned = match file.has("llama.rope.dimension_count") {
            true => count("rope.dimension_count")?,
            false => head_dim,
        };
        if head_dim == 0 || !head_dim.is_multiple_of(2) || turned != head_dim {
            let what = format!("a model with {head_dim} values a head, {turned} of them turned");
            return Err(WeightsError::NotThisModel(what));
        }
        if !heads.is_multiple_of(kv_heads) {
            let what = format!("a model with {heads} heads and {kv_heads} kv heads");
            return Err(WeightsError::NotThisModel(what));
        }
        Ok(Shape {
            layers: count("block_count")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            feed_forward: count("feed_forward_length")?,
            vocabulary: file.texts("tokenizer.ggml.tokens")?.len().max(1),
            rope_base: match file.has("llama.rope.freq_base") {
                true => file.real("llama.rope.freq_base")?,
                false => 10_000.0,
            },
            epsilon: file.real("llama.attention.layer_norm_rms_epsilon")?,
            tied: !file.has_tensor("output.weight"),
        })
    }
}

/// Why weights cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The file holds a model that this engine does not run.
    #[error("the file holds {0}; this engine runs plain Llama models only")]
    NotThisModel(String),
}

/// One layer. A matrix has a column for each value that comes out of it: products are faster so.
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) q: Array2<f32>,
    pub(crate) k: Array2<f32>,
    pub(crate) v: Array2<f32>,
    pub(crate) attention_out: Array2<f32>,
    pub(crate) feed_norm: Vec<f32>,
    pub(crate) gate: Array2<f32>,
    pub(crate) up: Array2<f32>,
    pub(crate) down: Array2<f32>,
}

/// A model.
pub struct Weights {
    shape: Shape,
    digest: String,
    pub(crate) embedding: Array2<f32>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    output: Option<Array2<f32>>,
}

impl Weights {
    /// Reads them from a GGUF file.
    ///
    /// # Errors
    /// See [`WeightsError`].
    pub fn open(path: &Path) -> Result<Weights, WeightsError> {
        Weights::from_gguf(&Gguf::open(path)?)
    }

    /// Takes them from a file that was read.
    ///
    /// # Errors
    /// See [`WeightsError`].
    pub fn from_gguf(file: &Gguf) -> Result<Weights, WeightsError> {
        let shape = Shape::of(file)?;
        let wide = |heads: usize| heads.saturating_mul(shape.head_dim);
        let (hidden, q, kv) = (shape.hidden, wide(shape.heads), wide(shape.kv_heads));
        let list = |name: &str| file.tensor(name, &[hidden]);
        let matrix = |name: &str, outs: usize, ins: usize| {
            file.tensor(name, &[ins, outs]).map(|rows| transposed(&rows, outs, ins))
        };
        let layer = |at: usize| -> Result<Layer, GgufError> {
            let name = |part: &str| format!("blk.{at}.{part}.weight");
            Ok(Layer {
                attention_norm: list(&name("attn_norm"))?,
                q: matrix(&name("attn_q"), q, hidden)?,
                k: matrix(&name("attn_k"), kv, hidden)?,
                v: matrix(&name("attn_v"), kv, hidden)?,
                attention_out: matrix(&name("attn_output"), hidden, q)?,
                feed_norm: list(&name("ffn_norm"))?,
                gate: matrix(&name("ffn_gate"), shape.feed_forward, hidden)?,
                up: matrix(&name("ffn_up"), shape.feed_forward, hidden)?,
                down: matrix(&name("ffn_down"), hidden, shape.feed_forward)?,
            })
        };
        let output = || matrix("output.weight", shape.vocabulary, hidden);
        Ok(Weights {
            digest: file.digest(),
            embedding: matrix("token_embd.weight", shape.vocabulary, hidden)?,
            layers: (0..shape.layers).map(layer).collect::<Result<_, _>>()?,
            output_norm: list("output_norm.weight")?,
            output: (!shape.tied).then(output).transpose()?,
            shape,
        })
    }

    /// Makes them from a seed: the same for the same shape and seed, everywhere.
    pub fn random(shape: &Shape, seed: u64) -> Weights {
        let mut random = Random::new(seed);
        let mut matrix = |outs: usize, ins: usize| {
            // Keeps values as large as they come in.
            let values = random.values(outs * ins, (3.0 / ins as f32).sqrt());
            Array2::from_shape_vec((ins, outs), values).expect("as many as were asked for")
        };
        let (hidden, feed_forward) = (shape.hidden, shape.feed_forward);
        let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let ones = || vec![1.0; hidden];
        let layers = (0..shape.layers).map(|_| Layer {
            attention_norm: ones(),
            q: matrix(q, hidden),
            k: matrix(kv, hidden),
            v: matrix(kv, hidden),
            attention_out: matrix(hidden, q),
            feed_norm: ones(),
            gate: matrix(feed_forward, hidden),
            up: matrix(feed_forward, hidden),
            down: matrix(hidden, feed_forward),
        });
        let layers = layers.collect();
        Weights {
            embedding: matrix(shape.vocabulary, hidden),
            output: (!shape.tied).then(|| matrix(shape.vocabulary, hidden)),
            layers,
            output_norm: ones(),
            digest: format!("seed {seed} of {shape:?}"),
            shape: shape.clone(),
        }
    }

    /// Their shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// What tells them from others: of a file its digest, else seed and shape.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The output matrix.
    pub(crate) fn output(&self) -> &Array2<f32> {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

/// A matrix whose columns are these rows. In tiles, because a stride through memory for each value
/// would take seconds.
fn transposed(rows: &[f32], outs: usize, ins: usize) -> Array2<f32> {
    const TILE: usize = 32;
    let rows = ArrayView2::from_shape((outs, ins), rows).expect("a tensor has its shape");
    let mut out = Array2::zeros((ins, outs));
    for (rows, mut columns) in
        rows.axis_chunks_iter(Axis(0), TILE).zip(out.axis_chunks_iter_mut(Axis(1), TILE))
    {
        let parts = columns.axis_chunks_iter_mut(Axis(0), TILE);
        for (part, mut out) in rows.axis_chunks_iter(Axis(1), TILE).zip(parts) {
            out.assign(&part.t());
        }
    }
    out
}

/// Seeded numbers (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// So many numbers, evenly between `-size` and `size`.
    pub(crate) fn values(&mut self, count: usize, size: f32) -> Vec<f32> {
        let unit = |bits: u64| (bits >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        (0..count).map(|_| unit(self.next()) * size).collect()
    }
}

/// So many tokens of a vocabulary of so many: the same for the same seed, everywhere.
pub fn random_tokens(seed: u64, count: usize, vocabulary: u32) -> Vec<u32> {
    let mut random = Random::new(seed);
    let below = |bits: u64| (bits >> 32) as u32 % vocabulary.max(1);
    (0..count).map(|_| below(random.next())).collect()
}

/// The weights that `tests/smallengine/fetch_weights` fetched: `KVTIDE_WEIGHTS`, else the first
/// `.gguf` in `target/weights`. `None` where there are none.
pub fn find_weights() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("KVTIDE_WEIGHTS").filter(|value| !value.is_empty()) {
        return Some(path.into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2)?;
    let files = std::fs::read_dir(root.join("target").join("weights")).ok()?;
    let paths = files.flatten().map(|file| file.path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "gguf")).min()
}
