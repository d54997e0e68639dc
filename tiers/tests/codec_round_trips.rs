//! The lz4 codec gives back the same bytes or an error, whatever it is fed.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

use proptest::prelude::*;

use kvtide_tiers::block::{Codec, ElementType};
use kvtide_tiers::codec::{CodecError, decode, encode, verify};

/// bf16 or f16 values of a gaussian whose scale differs per channel, as in real KV, with 3 %
/// outliers.
fn gaussian(seed: u64, elements: usize, element: ElementType) -> Vec<u8> {
    let mut state = seed | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let scale = |at: u32| (0.5 + uniform()) * if at % 32 == 9 { 8.0 } else { 1.0 };
    let scales: Vec<f64> = (0..128).map(scale).collect();
    (0..elements)
        .flat_map(|at| {
            let (one, two) = (uniform().max(1e-12), uniform());
            let normal = (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * two).cos();
            let value = (normal * scales[at % 128]) as f32;
            let bits = value.to_bits();
            let half = match element {
                ElementType::Bf16 => (bits >> 16) as u16,
                // Values of this size are normal numbers of f16.
                _ => {
                    let exponent = ((bits >> 23 & 0xff) as i32 - 112).clamp(1, 30) as u16;
                    (bits >> 16 & 0x8000) as u16 | exponent << 10 | (bits >> 13 & 0x3ff) as u16
                }
            };
            half.to_le_bytes()
        })
        .collect()
}

#[test]
fn kv_of_bf16_shrinks_and_comes_back() {
    let raw = gaussian(7, 1 << 20, ElementType::Bf16);
    let stored = encode(Codec::Lz4, ElementType::Bf16, &raw).unwrap();
    let ratio = raw.len() as f64 / stored.len() as f64;
    println!("bf16: {ratio:.3}");
    assert!(ratio > 1.1, "{ratio}");
    let mut out = vec![0; raw.len()];
    decode(Codec::Lz4, ElementType::Bf16, &stored, &mut out).unwrap();
    assert!(out == raw);
    assert!(verify(Codec::Lz4, &stored, raw.len()).unwrap() == raw);
}

#[test]
fn what_does_not_gain_is_kept_raw() {
    let raw = gaussian(7, 4096, ElementType::Bf16);
    assert_eq!(encode(Codec::Raw, ElementType::Bf16, &raw), None);
    for element in [ElementType::F32, ElementType::Fp8E4m3, ElementType::Int8, ElementType::Opaque]
    {
        assert_eq!(encode(Codec::Lz4, element, &[0; 4096]), None);
    }
    assert_eq!(encode(Codec::Lz4, ElementType::Bf16, &raw[1..]), None);
    assert_eq!(encode(Codec::Lz4, ElementType::Bf16, &[]), None);
}

#[test]
fn lengths_and_element_types_are_compared() {
    let stored = encode(Codec::Lz4, ElementType::F16, &[7; 4096]).unwrap();
    let mut out = vec![0; 4096];
    assert_eq!(decode(Codec::Lz4, ElementType::F16, &stored, &mut out), Ok(()));
    let wrong = decode(Codec::Lz4, ElementType::Bf16, &stored, &mut out);
    assert_eq!(wrong, Err(CodecError::Head));
    let wrong = decode(Codec::Lz4, ElementType::F16, &stored, &mut out[..4094]);
    assert_eq!(wrong, Err(CodecError::Buffer { raw: 4096, buffer: 4094 }));
    let longer = [&stored[..], &[0]].concat();
    for bad in [&stored[..stored.len() - 1], &longer, &stored[..3], &[]] {
        let wrong = decode(Codec::Lz4, ElementType::F16, bad, &mut out);
        assert!(matches!(wrong, Err(CodecError::Length { .. })));
    }
    assert_eq!(decode(Codec::Raw, ElementType::F16, &[5; 4096], &mut out), Ok(()));
    assert!(decode(Codec::Raw, ElementType::F16, &[5; 4095], &mut out).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn round_trip(seed: u64, elements in 0usize..3000, f16: bool, noise in 0usize..3000) {
        let element = if f16 { ElementType::F16 } else { ElementType::Bf16 };
        let mut raw = gaussian(seed, elements, element);
        // From all gaussian to all noise.
        for (at, byte) in raw.iter_mut().enumerate().take(noise) {
            *byte = (seed.wrapping_mul(at as u64 | 1) >> 40) as u8;
        }
        if let Some(stored) = encode(Codec::Lz4, element, &raw) {
            prop_assert!(stored.len() * 20 <= raw.len() * 19);
            let mut out = vec![0xaa; raw.len()];
            decode(Codec::Lz4, element, &stored, &mut out).unwrap();
            prop_assert_eq!(out, raw);
        }
    }

    #[test]
    fn damage_gives_an_error_or_other_bytes_but_never_a_panic(
        seed: u64,
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        cuts: bool,
    ) {
        let raw = gaussian(seed, 2048, ElementType::Bf16);
        let mut stored = encode(Codec::Lz4, ElementType::Bf16, &raw).unwrap();
        for (at, bits) in flips {
            let at = at.index(stored.len());
            stored[at] ^= bits;
        }
        if cuts {
            stored.truncate(cut.index(stored.len()));
        }
        let mut out = vec![0; raw.len()];
        let _ = decode(Codec::Lz4, ElementType::Bf16, &stored, &mut out);
        let _ = verify(Codec::Lz4, &stored, raw.len());
    }

    #[test]
    fn garbage_never_panics(
        stored in prop::collection::vec(any::<u8>(), 0..600),
        raw in 0usize..600,
    ) {
        let mut out = vec![0; raw];
        let _ = decode(Codec::Lz4, ElementType::F16, &stored, &mut out);
        let _ = verify(Codec::Lz4, &stored, raw);
    }
}
