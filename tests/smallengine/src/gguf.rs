//! Reads GGUF files (versions 2 and 3): metadata and tensors, which are given out as f32.
//!
//! A file is outside input. Whatever is in it, reading it ends with an error and never panics, and
//! what is allocated is bounded by the file's own size: a count is believed only when as much as it
//! counts can still follow.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::math::from_bf16;

/// Longest file that is read, bytes: this engine keeps all weights as f32 in RAM.
const FILE_BYTES_MAX: u64 = 4 << 30;
/// Most dimensions of a tensor, as in the format.
const DIMENSIONS_MAX: u32 = 4;
/// Values of a block of any of the quantized types.
const QUANTIZED_VALUES: usize = 32;

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is longer than this engine reads.
    #[error("{} has {bytes} bytes; this engine reads at most {FILE_BYTES_MAX}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// It is no GGUF file of a version that is known here.
    #[error("not a GGUF file of version 2 or 3")]
    NotGguf,
    /// It ends too early, or a length in it is wrong.
    #[error("the file is cut off or damaged at byte {at}: {what}")]
    Damaged {
        /// Where.
        at: usize,
        /// What was being read.
        what: &'static str,
    },
    /// A key or tensor is not there.
    #[error("the file has no {what} `{name}`")]
    Missing {
        /// Key or tensor.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// A key's value, or a tensor's shape or type, is none that can be used.
    #[error("`{name}` is {found}; wanted: {wanted}")]
    Unfit {
        /// Its name.
        name: String,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: String,
    },
}

/// A value of the metadata, as far as this engine needs to tell them apart.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Whole(i64),
    Real(f64),
    Truth(bool),
    Text(String),
    Wholes(Vec<i64>),
    Texts(Vec<Vec<u8>>),
    /// Arrays of reals and of truths, which no model that runs here has.
    Other,
}

#[derive(Clone, Debug)]
struct Tensor {
    /// As in the file: the fastest first.
    dimensions: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// A file.
pub struct Gguf {
    bytes: Vec<u8>,
    values: HashMap<String, Value>,
    tensors: HashMap<String, Tensor>,
    /// Where the tensors' data starts.
    data: usize,
}

impl Gguf {
    /// Reads a file.
    ///
    /// # Errors
    /// See [`GgufError`].
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let failed = |source| GgufError::Read { path: path.to_owned(), source };
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(GgufError::TooLong { path: path.to_owned(), bytes });
        }
        Gguf::parse(std::fs::read(path).map_err(failed)?)
    }

    /// Takes the bytes of a file.
    ///
    /// # Errors
    /// See [`GgufError`].
    pub fn parse(bytes: Vec<u8>) -> Result<Gguf, GgufError> {
        let mut reader = Reader { bytes: &bytes, at: 0 };
        let magic = reader.take(4, "the magic bytes").map_err(|_| GgufError::NotGguf)?;
        let version = reader.u32("the version").map_err(|_| GgufError::NotGguf)?;
        if magic != b"GGUF" || !(2..=3).contains(&version) {
            return Err(GgufError::NotGguf);
        }
        // A tensor has a name, a number of dimensions, a type and an offset; a key has a name and a
        // type.
        let tensor_count = reader.count(8 + 4 + 4 + 8, "the number of tensors")?;
        let value_count = reader.count(8 + 4, "the number of keys")?;
        let mut values = HashMap::new();
        for _ in 0..value_count {
            let name = reader.name("a key")?;
            let kind = reader.u32("a value's type")?;
            values.insert(name, reader.value(kind)?);
        }
        let mut tensors = HashMap::new();
        for _ in 0..tensor_count {
            let name = reader.name("a tensor's name")?;
            let count = reader.u32("a tensor's dimensions")?;
            if count > DIMENSIONS_MAX {
                return Err(reader.damaged("a tensor's dimensions"));
            }
            let mut dimensions = Vec::new();
            for _ in 0..count {
                dimensions.push(reader.u64("a tensor's dimensions")?);
            }
            let kind = reader.u32("a tensor's type")?;
            let offset = reader.u64("a tensor's offset")?;
            tensors.insert(name, Tensor { dimensions, kind, offset });
        }
        let alignment = match values.get("general.alignment") {
            None => 32,
            Some(Value::Whole(bytes @ 1..=0x10_0000)) => *bytes as usize,
            Some(other) => {
                return Err(unfit("general.alignment", format!("{other:?}"), "1 to 1 MiB"));
            }
        };
        let data = reader.at.next_multiple_of(alignment);
        Ok(Gguf { values, tensors, data, bytes })
    }

    /// Digest of the whole file.
    pub fn digest(&self) -> String {
        format!("blake3:{}", blake3::hash(&self.bytes).to_hex())
    }

    fn value(&self, name: &str) -> Result<&Value, GgufError> {
        let missing = || GgufError::Missing { what: "key", name: name.to_owned() };
        self.values.get(name).ok_or_else(missing)
    }

    /// Whether there is such a key.
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// Whether there is such a tensor.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A whole number from 1 to `max`.
    ///
    /// # Errors
    /// It is missing, or something else.
    pub fn count(&self, name: &str, max: usize) -> Result<usize, GgufError> {
        let value = self.value(name)?;
        let count = match value {
            Value::Whole(whole) => usize::try_from(*whole).ok(),
            _ => None,
        };
        let fits = count.filter(|count| (1..=max).contains(count));
        fits.ok_or_else(|| unfit(name, short(value), &format!("a number from 1 to {max}")))
    }

    /// A number.
    ///
    /// # Errors
    /// It is missing, or something else.
    pub fn real(&self, name: &str) -> Result<f32, GgufError> {
        match self.value(name)? {
            Value::Real(real) if real.is_finite() => Ok(*real as f32),
            other => Err(unfit(name, short(other), "a number")),
        }
    }

    /// A text.
    ///
    /// # Errors
    /// It is missing, or something else.
    pub fn text(&self, name: &str) -> Result<&str, GgufError> {
        match self.value(name)? {
            Value::Text(text) => Ok(text),
            other => Err(unfit(name, short(other), "a text")),
        }
    }

    /// A list of texts.
    ///
    /// # Errors
    /// It is missing, or something else.
    pub fn texts(&self, name: &str) -> Result<&[Vec<u8>], GgufError> {
        match self.value(name)? {
            Value::Texts(texts) => Ok(texts),
            other => Err(unfit(name, short(other), "a list of texts")),
        }
    }

    /// A list of whole numbers.
    ///
    /// # Errors
    /// It is missing, or something else.
    pub fn wholes(&self, name: &str) -> Result<&[i64], GgufError> {
        match self.value(name)? {
            Value::Wholes(wholes) => Ok(wholes),
            other => Err(unfit(name, short(other), "a list of whole numbers")),
        }
    }

    /// The first `dimensions` of a tensor must be these, the fastest first; its values.
    ///
    /// # Errors
    /// It is missing, has another shape or an unknown type, or is cut off.
    pub fn tensor(&self, name: &str, dimensions: &[usize]) -> Result<Vec<f32>, GgufError> {
        let missing = || GgufError::Missing { what: "tensor", name: name.to_owned() };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        let wanted: Vec<u64> = dimensions.iter().map(|count| *count as u64).collect();
        if tensor.dimensions != wanted {
            return Err(unfit(name, format!("{:?}", tensor.dimensions), &format!("{wanted:?}")));
        }
        let unknown = || {
            let known = "F32, F16, BF16, Q4_0, Q4_1 or Q8_0 in whole blocks";
            unfit(name, format!("of type {}", tensor.kind), known)
        };
        let kind = Kind::of(tensor.kind).ok_or_else(unknown)?;
        let count = wanted.iter().try_fold(1u64, |product, each| product.checked_mul(*each));
        let count = count.and_then(|count| usize::try_from(count).ok()).ok_or_else(unknown)?;
        if !count.is_multiple_of(kind.values()) {
            return Err(unknown());
        }
        let data = self.range(tensor.offset, count / kind.values(), kind.bytes());
        let damaged = || GgufError::Damaged { at: self.bytes.len(), what: "a tensor's values" };
        let data = data.and_then(|range| self.bytes.get(range)).ok_or_else(damaged)?;
        Ok(kind.decode(data))
    }

    fn range(&self, offset: u64, blocks: usize, block_bytes: usize) -> Option<Range<usize>> {
        let from = self.data.checked_add(usize::try_from(offset).ok()?)?;
        Some(from..from.checked_add(blocks.checked_mul(block_bytes)?)?)
    }
}

fn unfit(name: &str, found: String, wanted: &str) -> GgufError {
    GgufError::Unfit { name: name.to_owned(), found, wanted: wanted.to_owned() }
}

/// A value in an error.
fn short(value: &Value) -> String {
    match value {
        Value::Whole(whole) => whole.to_string(),
        Value::Real(real) => real.to_string(),
        Value::Truth(truth) => truth.to_string(),
        Value::Text(text) => format!("`{}`", text.chars().take(40).collect::<String>()),
        Value::Wholes(_) | Value::Texts(_) | Value::Other => "a list".to_owned(),
    }
}

/// Goes over the head of a file.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn damaged(&self, what: &'static str) -> GgufError {
        GgufError::Damaged { at: self.at, what }
    }

    fn take(&mut self, count: usize, what: &'static str) -> Result<&'a [u8], GgufError> {
        let end = self.at.checked_add(count);
        let found = end.and_then(|end| self.bytes.get(self.at..end));
        let found = found.ok_or_else(|| self.damaged(what))?;
        self.at += count;
        Ok(found)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let found = self.take(N, what)?;
        found.try_into().map_err(|_| self.damaged(what))
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things of which each takes at least `bytes`.
    fn count(&mut self, bytes: usize, what: &'static str) -> Result<usize, GgufError> {
        let count = self.u64(what)?;
        let left = (self.bytes.len() - self.at) / bytes;
        let count = usize::try_from(count).ok().filter(|count| *count <= left);
        count.ok_or_else(|| self.damaged(what))
    }

    fn text(&mut self, what: &'static str) -> Result<&'a [u8], GgufError> {
        let count = self.count(1, what)?;
        self.take(count, what)
    }

    fn name(&mut self, what: &'static str) -> Result<String, GgufError> {
        self.text(what).map(|name| String::from_utf8_lossy(name).into_owned())
    }

    fn whole(&mut self, kind: u32) -> Result<Option<i64>, GgufError> {
        let what = "a number";
        Ok(Some(match kind {
            0 => i64::from(u8::from_le_bytes(self.array(what)?)),
            1 => i64::from(i8::from_le_bytes(self.array(what)?)),
            2 => i64::from(u16::from_le_bytes(self.array(what)?)),
            3 => i64::from(i16::from_le_bytes(self.array(what)?)),
            4 => i64::from(u32::from_le_bytes(self.array(what)?)),
            5 => i64::from(i32::from_le_bytes(self.array(what)?)),
            10 => i64::try_from(self.u64(what)?).map_err(|_| self.damaged(what))?,
            11 => i64::from_le_bytes(self.array(what)?),
            _ => return Ok(None),
        }))
    }

    fn value(&mut self, kind: u32) -> Result<Value, GgufError> {
        let what = "a value";
        if let Some(whole) = self.whole(kind)? {
            return Ok(Value::Whole(whole));
        }
        Ok(match kind {
            6 => Value::Real(f64::from(f32::from_le_bytes(self.array(what)?))),
            7 => Value::Truth(self.array::<1>(what)? != [0]),
            8 => Value::Text(String::from_utf8_lossy(self.text(what)?).into_owned()),
            9 => self.list()?,
            12 => Value::Real(f64::from_le_bytes(self.array(what)?)),
            _ => return Err(self.damaged("a value's type")),
        })
    }

    fn list(&mut self) -> Result<Value, GgufError> {
        let what = "a list";
        let kind = self.u32(what)?;
        let bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            // Also lists of lists, which would have no bound on how deep they go.
            _ => return Err(self.damaged("a list's type")),
        };
        let count = self.count(bytes, what)?;
        match kind {
            6 | 7 | 12 => self.take(count * bytes, what).map(|_| Value::Other),
            8 => (0..count)
                .map(|_| self.text(what).map(<[u8]>::to_vec))
                .collect::<Result<_, _>>()
                .map(Value::Texts),
            _ => (0..count)
                .map(|_| self.whole(kind).map(Option::unwrap_or_default))
                .collect::<Result<_, _>>()
                .map(Value::Wholes),
        }
    }
}

/// How a tensor's values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q8_0,
}

impl Kind {
    fn of(number: u32) -> Option<Kind> {
        Some(match number {
            0 => Kind::F32,
            1 => Kind::F16,
            2 => Kind::Q4_0,
            3 => Kind::Q4_1,
            8 => Kind::Q8_0,
            30 => Kind::Bf16,
            _ => return None,
        })
    }

    /// Values of a block.
    fn values(self) -> usize {
        match self {
            Kind::F32 | Kind::F16 | Kind::Bf16 => 1,
            Kind::Q4_0 | Kind::Q4_1 | Kind::Q8_0 => QUANTIZED_VALUES,
        }
    }

    /// Bytes of a block.
    fn bytes(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::F16 | Kind::Bf16 => 2,
            Kind::Q4_0 => 2 + QUANTIZED_VALUES / 2,
            Kind::Q4_1 => 4 + QUANTIZED_VALUES / 2,
            Kind::Q8_0 => 2 + QUANTIZED_VALUES,
        }
    }

    /// The values of whole blocks.
    fn decode(self, data: &[u8]) -> Vec<f32> {
        let mut out = Vec::with_capacity(data.len() / self.bytes() * self.values());
        for block in data.chunks_exact(self.bytes()) {
            self.decode_block(block, &mut out);
        }
        out
    }

    fn decode_block(self, block: &[u8], out: &mut Vec<f32>) {
        match (self, block) {
            (Kind::F32, [a, b, c, d]) => out.push(f32::from_le_bytes([*a, *b, *c, *d])),
            (Kind::F16, [a, b]) => out.push(from_f16(u16::from_le_bytes([*a, *b]))),
            (Kind::Bf16, [a, b]) => out.push(from_bf16(u16::from_le_bytes([*a, *b]))),
            (Kind::Q8_0, [a, b, values @ ..]) => {
                let scale = from_f16(u16::from_le_bytes([*a, *b]));
                out.extend(values.iter().map(|value| f32::from(*value as i8) * scale));
            }
            (Kind::Q4_0, [a, b, values @ ..]) => {
                let scale = from_f16(u16::from_le_bytes([*a, *b]));
                let value = |nibble: u8| (f32::from(nibble) - 8.0) * scale;
                out.extend(values.iter().map(|both| value(both & 15)));
                out.extend(values.iter().map(|both| value(both >> 4)));
            }
            (Kind::Q4_1, [a, b, c, d, values @ ..]) => {
                let scale = from_f16(u16::from_le_bytes([*a, *b]));
                let least = from_f16(u16::from_le_bytes([*c, *d]));
                let value = |nibble: u8| f32::from(nibble) * scale + least;
                out.extend(values.iter().map(|both| value(both & 15)));
                out.extend(values.iter().map(|both| value(both >> 4)));
            }
            // `decode` cuts blocks of the right length.
            _ => {}
        }
    }
}

/// The value of an IEEE half.
fn from_f16(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f32::from(bits & 0x3ff));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        0x1f if fraction == 0.0 => f32::INFINITY,
        0x1f => f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    sign * size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_and_quantized_blocks_are_decoded() {
        for (bits, value) in
            [(0x3c00, 1.0), (0xc000, -2.0), (0x0001, 5.960_464_5e-8), (0x7bff, 65504.0), (0, 0.0)]
        {
            assert_eq!(from_f16(bits), value);
        }
        assert!(from_f16(0x7c01).is_nan() && from_f16(0xfc00) == f32::NEG_INFINITY);
        // Scale 2, and for Q4_1 a least of -1; the first byte holds the values 0 and 16.
        let nibbles = [0x31u8, 0xf0].into_iter().chain([0x88; 14]);
        let q4_0: Vec<u8> = [0x00, 0x40].into_iter().chain(nibbles.clone()).collect();
        let values = Kind::Q4_0.decode(&q4_0);
        assert_eq!((values[0], values[16], values[1], values[17]), (-14.0, -10.0, -16.0, 14.0));
        let q4_1: Vec<u8> = [0x00, 0x40, 0x00, 0xbc].into_iter().chain(nibbles).collect();
        let values = Kind::Q4_1.decode(&q4_1);
        assert_eq!((values[0], values[16], values[1], values[17]), (1.0, 5.0, -1.0, 29.0));
        let q8_0: Vec<u8> = [0x00, 0x40, 0xff].into_iter().chain([3; 31]).collect();
        let values = Kind::Q8_0.decode(&q8_0);
        assert_eq!((values.len(), values[0], values[31]), (32, -2.0, 6.0));
    }
}
