//! How payloads are encoded on NVMe.
//!
//! KV of 16-bit floats does not compress as it lies: the mantissas are noise. Its exponents do. The
//! `lz4` codec therefore splits the elements into two byte planes, compresses the one with the
//! exponents and stores the other as it is. Encoded bytes are decoded only after their checksum
//! held; decoding is checked all the same, and no input makes it panic.
//!
//! Encoded form: 16 bytes of head (split, three zero bytes, raw bytes, bytes of the compressed
//! plane, zero; all little-endian u32), the low plane, the compressed high plane.

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};

use crate::block::{Codec, ElementType};

/// Bytes in front of the planes.
pub const HEAD_BYTES: usize = 16;

/// Why stored bytes cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The stored bytes do not have the length that their head or their codec calls for.
    #[error("{stored} stored bytes where {expected} are expected")]
    Length {
        /// Bytes given.
        stored: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// The receiving buffer does not have the block's length.
    #[error("the block has {raw} bytes and the buffer {buffer}")]
    Buffer {
        /// The block's own length.
        raw: usize,
        /// The buffer's.
        buffer: usize,
    },
    /// The head is not one that this codec writes for such elements.
    #[error("the head of the encoded bytes is not that of this codec and element type")]
    Head,
    /// The compressed plane is damaged.
    #[error("the compressed plane is damaged")]
    Plane,
}

/// How an element is split into a plane with its exponent and one without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Split {
    /// Rotated left by one bit, so that the 8 exponent bits of bf16 fill the high byte.
    Rotated = 1,
    /// The high byte as it is: sign, 5 exponent bits and 2 mantissa bits of f16.
    HighByte = 2,
}

impl Split {
    fn of(element: ElementType) -> Option<Split> {
        match element {
            ElementType::Bf16 => Some(Split::Rotated),
            ElementType::F16 => Some(Split::HighByte),
            _ => None,
        }
    }

    fn from_number(number: u8) -> Option<Split> {
        match number {
            1 => Some(Split::Rotated),
            2 => Some(Split::HighByte),
            _ => None,
        }
    }
}

/// Encodes a block. `None` when the block is better kept raw: [`Codec::Raw`], an element type that
/// has no exponent plane, or a gain of less than 5 %.
pub fn encode(codec: Codec, element: ElementType, raw: &[u8]) -> Option<Vec<u8>> {
    let Codec::Lz4 = codec else { return None };
    let split = Split::of(element)?;
    let raw_bytes = u32::try_from(raw.len()).ok()?;
    if raw.is_empty() || !raw.len().is_multiple_of(2) {
        return None;
    }
    let elements = raw.len() / 2;
    let mut high = vec![0; elements];
    let mut out = vec![0; HEAD_BYTES + elements + get_maximum_output_size(elements)];
    let (head, planes) = out.split_at_mut(HEAD_BYTES);
    let (low, compressed) = planes.split_at_mut(elements);
    let rotate = u32::from(split == Split::Rotated);
    for ((pair, low), high) in raw.as_chunks::<2>().0.iter().zip(low).zip(&mut high) {
        [*low, *high] = u16::from_le_bytes(*pair).rotate_left(rotate).to_le_bytes();
    }
    let plane_bytes = compress_into(&high, compressed).ok()?;
    let stored = HEAD_BYTES + elements + plane_bytes;
    if stored.saturating_mul(20) > raw.len().saturating_mul(19) {
        return None;
    }
    let fields = [split as u32, raw_bytes, u32::try_from(plane_bytes).ok()?, 0];
    for (place, field) in head.as_chunks_mut::<4>().0.iter_mut().zip(fields) {
        *place = field.to_le_bytes();
    }
    out.truncate(stored);
    Some(out)
}

/// Decodes a block into `out`, whose length is the block's own. `stored` is exactly the stored
/// bytes, without padding. On an error the contents of `out` are of no meaning.
///
/// # Errors
/// Stored bytes that [`encode`] did not make for this element type and length.
pub fn decode(
    codec: Codec,
    element: ElementType,
    stored: &[u8],
    out: &mut [u8],
) -> Result<(), CodecError> {
    match codec {
        Codec::Raw if stored.len() == out.len() => {
            out.copy_from_slice(stored);
            Ok(())
        }
        Codec::Raw => Err(CodecError::Length { stored: stored.len(), expected: out.len() }),
        Codec::Lz4 => {
            let split = Split::of(element).ok_or(CodecError::Head)?;
            let head = Head::read(stored)?;
            if head.split != split { Err(CodecError::Head) } else { head.decode(stored, out) }
        }
    }
}

/// Checks that stored bytes decode to a block of `raw_bytes`, whatever its element type.
///
/// # Errors
/// As [`decode`].
pub fn verify(codec: Codec, stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>, CodecError> {
    match codec {
        Codec::Raw if stored.len() == raw_bytes => Ok(stored.to_vec()),
        Codec::Raw => Err(CodecError::Length { stored: stored.len(), expected: raw_bytes }),
        Codec::Lz4 => {
            let head = Head::read(stored)?;
            // Lengths are checked before memory is taken for them.
            head.planes(stored, raw_bytes)?;
            let mut out = vec![0; raw_bytes];
            head.decode(stored, &mut out)?;
            Ok(out)
        }
    }
}

struct Head {
    split: Split,
    raw_bytes: usize,
    plane_bytes: usize,
}

impl Head {
    fn read(stored: &[u8]) -> Result<Head, CodecError> {
        let short = CodecError::Length { stored: stored.len(), expected: HEAD_BYTES };
        let head: &[u8; HEAD_BYTES] = stored.first_chunk().ok_or(short)?;
        let [split, raw_bytes, plane_bytes, zero] =
            [0, 4, 8, 12].map(|at| head.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()));
        let number = |bytes: Option<[u8; 4]>| bytes.map_or(0, u32::from_le_bytes);
        let split = u8::try_from(number(split)).ok().and_then(Split::from_number);
        let (Some(split), 0) = (split, number(zero)) else { return Err(CodecError::Head) };
        Ok(Head {
            split,
            raw_bytes: number(raw_bytes) as usize,
            plane_bytes: number(plane_bytes) as usize,
        })
    }

    /// The low plane and the compressed high plane, of the lengths that the head and the block's
    /// own length call for.
    fn planes<'a>(
        &self,
        stored: &'a [u8],
        raw_bytes: usize,
    ) -> Result<(&'a [u8], &'a [u8]), CodecError> {
        if self.raw_bytes != raw_bytes || !raw_bytes.is_multiple_of(2) {
            return Err(CodecError::Buffer { raw: self.raw_bytes, buffer: raw_bytes });
        }
        let elements = raw_bytes / 2;
        let expected = HEAD_BYTES + elements + self.plane_bytes;
        let length = CodecError::Length { stored: stored.len(), expected };
        if stored.len() != expected {
            return Err(length);
        }
        let planes = stored.get(HEAD_BYTES..).ok_or(length)?;
        planes.split_at_checked(elements).ok_or(length)
    }

    fn decode(&self, stored: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let (low, compressed) = self.planes(stored, out.len())?;
        let elements = low.len();
        let mut high = vec![0; elements];
        if decompress_into(compressed, &mut high).ok() != Some(elements) {
            return Err(CodecError::Plane);
        }
        let rotate = u32::from(self.split == Split::Rotated);
        for ((pair, low), high) in out.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(&high) {
            *pair = u16::from_le_bytes([*low, *high]).rotate_right(rotate).to_le_bytes();
        }
        Ok(())
    }
}
