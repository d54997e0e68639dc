//! Blocks that are kept narrower than the engine's cache has them: 8 bits for each 16-bit element.
//!
//! This loses precision, so it happens only in namespaces that ask for it by their element type,
//! [`ElementType::Narrowed`]: nothing is shared with a namespace that asks for exact bytes, because
//! their keys differ. A block is narrowed once, on its way out of the engine's memory, and widened
//! once, on its way back; in between, in host RAM and on nvme, it is the narrow form that is
//! checksummed, copied and kept, so that it cannot be narrowed twice.
//!
//! Narrow form: first the scales, as bf16, little-endian, plane by plane in payload order; then one
//! byte per element in payload order. What shares a scale:
//!
//! | | K | V |
//! |---|---|---|
//! | [`Narrow::Int8`] | a channel of a head, over the block's tokens | a token of a head |
//! | [`Narrow::Fp8`] | a head | a head |
//!
//! K per channel and V per token is what KIVI found to lose least (Liu et al., 2024,
//! arXiv:2402.02750): K has outliers in few channels, V has none.

use serde::{Deserialize, Serialize};

use super::{ElementType, KvLayout};

/// Bytes of one scale.
pub const SCALE_BYTES: u64 = 2;

/// The 16-bit element type that the engine has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Wide {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

/// The 8-bit element type that the daemon keeps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[repr(u8)]
pub enum Narrow {
    /// Integers from -127 to 127.
    Int8 = 1,
    /// Floats with 4 bits of exponent and 3 of mantissa (E4M3 of the OCP 8-bit specification),
    /// without infinities, up to 448.
    Fp8 = 2,
}

/// How the elements of a plane (K or V of one layer) follow one another in the payload. The planes
/// themselves follow one another by layer, K before V.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PlaneOrder {
    /// `[head][token][element]`.
    HeadsFirst,
    /// `[token][head][element]`.
    TokensFirst,
}

/// What a namespace asks for whose blocks may be kept narrower than the engine has them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Narrowed {
    /// As the engine has them.
    pub wide: Wide,
    /// As the daemon keeps them.
    pub narrow: Narrow,
    /// In which order they lie.
    pub order: PlaneOrder,
}

/// Everything that narrowing and widening a block must know.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct NarrowShape {
    /// From what, to what, in which order.
    pub form: Narrowed,
    /// Layers in the block.
    pub layers: u32,
    /// Heads of a layer.
    pub heads: u32,
    /// Elements of a head.
    pub head_elements: u32,
    /// Tokens of the block.
    pub tokens: u32,
}

impl NarrowShape {
    /// The shape of the blocks of a layout that asks for narrowing; `None` for all others.
    pub fn of(layout: &KvLayout) -> Option<NarrowShape> {
        let ElementType::Narrowed(form) = layout.element else { return None };
        Some(NarrowShape {
            form,
            layers: layout.layers,
            heads: layout.kv_heads,
            head_elements: layout.head_dim,
            tokens: layout.tokens_per_block,
        })
    }

    /// Elements of a plane. `None` when a block would have 4 GiB or more.
    fn plane_elements(&self) -> Option<u64> {
        let head = u64::from(self.head_elements).checked_mul(self.tokens.into())?;
        let plane = head.checked_mul(self.heads.into())?;
        let block = plane.checked_mul(u64::from(self.layers))?.checked_mul(4)?;
        (block > 0 && u32::try_from(block).is_ok()).then_some(plane)
    }

    /// Scales of a K plane and of a V plane.
    pub fn scales(&self) -> [u64; 2] {
        let heads = u64::from(self.heads);
        match self.form.narrow {
            Narrow::Int8 => [heads * u64::from(self.head_elements), heads * u64::from(self.tokens)],
            Narrow::Fp8 => [heads; 2],
        }
    }

    /// Scales of the whole block.
    pub fn scales_in_block(&self) -> u64 {
        self.scales().iter().sum::<u64>() * u64::from(self.layers)
    }

    /// Whether a block of this shape has elements, and less than 4 GiB in either form.
    pub fn is_possible(&self) -> bool {
        self.plane_elements().is_some() && self.kept_bytes_in_full().is_some()
    }

    fn kept_bytes_in_full(&self) -> Option<u32> {
        let elements = self.plane_elements()?.checked_mul(2)?.checked_mul(self.layers.into())?;
        let scales = self.scales_in_block().checked_mul(SCALE_BYTES)?;
        u32::try_from(elements.checked_add(scales)?).ok()
    }

    /// Bytes of a block as the engine has it; 0 for an impossible shape.
    pub fn raw_bytes(&self) -> u32 {
        let elements = self.plane_elements().map_or(0, |plane| plane * u64::from(self.layers));
        u32::try_from(elements * 4).unwrap_or(0)
    }

    /// Bytes of a block as the daemon keeps it; 0 for an impossible shape.
    pub fn kept_bytes(&self) -> u32 {
        self.kept_bytes_in_full().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(narrow: Narrow) -> NarrowShape {
        let form = Narrowed { wide: Wide::Bf16, narrow, order: PlaneOrder::HeadsFirst };
        NarrowShape { form, layers: 30, heads: 3, head_elements: 64, tokens: 64 }
    }

    #[test]
    fn a_block_of_a_small_model_is_half_as_large_and_its_scales() {
        let elements = 30 * 2 * 3 * 64 * 64;
        assert_eq!(shape(Narrow::Int8).raw_bytes(), 2 * elements);
        assert_eq!(shape(Narrow::Int8).kept_bytes(), elements + 2 * 30 * 2 * 3 * 64);
        assert_eq!(shape(Narrow::Fp8).kept_bytes(), elements + 2 * 30 * 2 * 3);
    }

    #[test]
    fn shapes_without_elements_or_with_too_many_are_not_possible() {
        for bad in [
            NarrowShape { layers: 0, ..shape(Narrow::Int8) },
            NarrowShape { heads: 0, ..shape(Narrow::Int8) },
            NarrowShape { head_elements: 0, ..shape(Narrow::Fp8) },
            NarrowShape { tokens: u32::MAX, ..shape(Narrow::Int8) },
            NarrowShape { layers: u32::MAX, heads: u32::MAX, ..shape(Narrow::Int8) },
        ] {
            assert!(!bad.is_possible(), "{bad:?}");
            assert_eq!(bad.raw_bytes(), 0);
        }
        assert!(shape(Narrow::Fp8).is_possible());
    }
}
