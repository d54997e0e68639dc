//! Casts between the formats of 2 bytes and of 1 byte equal their twins for every input there is,
//! with scales that are ordinary, tiny, huge, 0, infinite and NaN.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod support;

use kvtide_kernels::abi::CastEntry;
use kvtide_kernels::twin::{self, Narrow, Shape, Wide};
use proptest::prelude::*;
use support::{Arg, Launch, Memory, noise};

const WIDES: [Wide; 2] = [Wide::Bf16, Wide::Fp16];
const NARROWS: [Narrow; 2] = [Narrow::Fp8, Narrow::Int8];

/// A scale for each head: powers of two keep ties, the others make inexact quotients.
const SCALES: [f32; 16] = [
    1.0,
    0.5,
    2.0,
    0.013_671_875,
    0.37,
    -3.3,
    1e-3,
    1e-30,
    1e30,
    f32::MIN_POSITIVE,
    1e-44,
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NAN,
    f32::MAX,
];

/// One tensor in memory, with its entry.
struct Tensor {
    wide: Memory,
    narrow: Memory,
    scales: Memory,
    entry: CastEntry,
}

fn elements(words: &[u16]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes(pair.try_into().unwrap())).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Tensor {
    fn new(
        wide: &[u16],
        narrow: &[u8],
        scales: &[f32],
        kind: Wide,
        shape: Shape,
        skew: usize,
    ) -> Tensor {
        let mut wide = Memory::of(&elements(wide), skew * 2);
        let mut narrow = Memory::of(narrow, skew);
        let mut scales = Memory::of(&floats(scales), 4);
        let entry = CastEntry {
            wide_elements: wide.address(),
            narrow_elements: narrow.address(),
            scales: scales.address(),
            rows: shape.rows as u32,
            heads: shape.heads as u32,
            head_elements: shape.head_elements as u32,
            wide: if kind == Wide::Bf16 { 0 } else { 1 },
        };
        Tensor { wide, narrow, scales, entry }
    }

    fn run(&self, name: &str, launch: Launch, limit: Option<f32>) {
        // Two entries of the same tensor would race on a GPU; one is what is meant.
        let mut table = Memory::table(&[self.entry]);
        let mut args = vec![Arg::Wide(table.address()), Arg::Word(1)];
        args.extend(limit.map(Arg::Float));
        launch.run(name, &args);
        for memory in [&self.wide, &self.narrow, &self.scales, &table] {
            memory.check_guards();
        }
    }
}

fn kernel(direction: &str, narrow: Narrow) -> String {
    let format = if narrow == Narrow::Fp8 { "fp8" } else { "int8" };
    format!("kvtide_{direction}_{format}")
}

fn check_to(source: &[u16], wide: Wide, shape: Shape, scales: &[f32], skew: usize, launch: Launch) {
    for narrow in NARROWS {
        let mut want = vec![0; source.len()];
        twin::to_narrow(source, wide, narrow, shape, scales, &mut want).unwrap();
        let tensor = Tensor::new(source, &vec![0x5a; source.len()], scales, wide, shape, skew);
        tensor.run(&kernel("to", narrow), launch, None);
        let found = tensor.narrow.bytes();
        let wrong = (0..want.len()).find(|at| found[*at] != want[*at]);
        let shown = wrong.map(|at| (source[at], found[at], want[at]));
        assert_eq!(shown, None, "{wide:?} to {narrow:?} (source, found, wanted)");
    }
}

fn check_from(
    source: &[u8],
    wide: Wide,
    shape: Shape,
    scales: &[f32],
    skew: usize,
    launch: Launch,
) {
    for narrow in NARROWS {
        let mut want = vec![0; source.len()];
        twin::from_narrow(source, narrow, wide, shape, scales, &mut want).unwrap();
        let tensor = Tensor::new(&vec![0x5a5a; source.len()], source, scales, wide, shape, skew);
        tensor.run(&kernel("from", narrow), launch, None);
        let found = words(tensor.wide.bytes());
        let wrong = (0..want.len()).find(|at| found[*at] != want[*at]);
        let shown = wrong.map(|at| (source[at], found[at], want[at]));
        assert_eq!(shown, None, "{narrow:?} to {wide:?} (source, found, wanted)");
    }
}

fn check_peaks(source: &[u16], wide: Wide, shape: Shape, skew: usize, launch: Launch) {
    for narrow in NARROWS {
        let peaks = twin::peaks(source, wide, shape).unwrap();
        let zeros = vec![0.0; shape.heads];
        let tensor = Tensor::new(source, &vec![0; source.len()], &zeros, wide, shape, skew);
        tensor.run("kvtide_peaks", launch, None);
        assert_eq!(tensor.scales.bytes(), floats(&peaks), "{wide:?}");
        tensor.run("kvtide_scales", launch, Some(narrow.limit()));
        assert_eq!(tensor.scales.bytes(), floats(&twin::scales(&peaks, narrow)), "{wide:?}");
    }
}

/// All 65,536 elements, by every scale, by the wide path and the element by element one.
#[test]
fn every_wide_element() {
    let every: Vec<u16> = (0..=u16::MAX).collect();
    for wide in WIDES {
        for (at, scale) in SCALES.iter().enumerate() {
            let shape = Shape { rows: 512, heads: 1, head_elements: 128 };
            let launch = Launch::of(7, 1, 128);
            check_to(&every, wide, shape, &[*scale], 0, launch);
            check_to(&every, wide, shape, &[*scale], 1, launch.folded());
            check_to(&every, wide, shape, &[SCALES[(at + 1) % 16]], 3, launch);
        }
        // Heads of 16 scales; and heads whose length is no multiple of eight.
        let shape = Shape { rows: 32, heads: 16, head_elements: 128 };
        check_to(&every, wide, shape, &SCALES, 0, Launch::of(3, 1, 64));
        let shape = Shape { rows: 1024, heads: 16, head_elements: 4 };
        check_to(&every, wide, shape, &SCALES, 0, Launch::of(3, 1, 64));
        for heads in [1, 16] {
            let shape = Shape { rows: 512 / heads, heads, head_elements: 128 };
            check_peaks(&every, wide, shape, 0, Launch::of(5, 1, 32));
            check_peaks(&every, wide, shape, 1, Launch::of(5, 1, 32).folded());
        }
    }
}

#[test]
fn every_narrow_element() {
    let every: Vec<u8> = (0..=u8::MAX).cycle().take(4096).collect();
    for wide in WIDES {
        for (heads, head_elements) in [(16, 16), (16, 256), (2, 64)] {
            let shape = Shape { rows: 4096 / heads / head_elements, heads, head_elements };
            for start in 0..16usize {
                let scales: Vec<f32> =
                    (0..heads).map(|head| SCALES[(start + head) % SCALES.len()]).collect();
                check_from(&every, wide, shape, &scales, 0, Launch::of(2, 1, 64));
                check_from(&every, wide, shape, &scales, 5, Launch::of(2, 1, 64).folded());
            }
        }
    }
}

/// A tensor that goes there and back differs by at most half a step of its head's scale.
#[test]
fn there_and_back_is_near() {
    let shape = Shape { rows: 16, heads: 8, head_elements: 128 };
    let raw = noise(16 * 8 * 128, 11);
    let source: Vec<u16> = raw
        .iter()
        .enumerate()
        .map(|(at, byte)| {
            Wide::Bf16.from_f32((f32::from(*byte) - 127.5) * (1 + at / 128 % 8) as f32)
        })
        .collect();
    let launch = Launch::of(4, 1, 128);
    let tensor = Tensor::new(&source, &vec![0; source.len()], &[0.0; 8], Wide::Bf16, shape, 0);
    tensor.run("kvtide_peaks", launch, None);
    tensor.run("kvtide_scales", launch, Some(Narrow::Int8.limit()));
    tensor.run("kvtide_to_int8", launch, None);
    let narrow = tensor.narrow.bytes().to_vec();
    tensor.run("kvtide_from_int8", launch, None);
    let back = words(tensor.wide.bytes());
    assert!(narrow.contains(&127) || narrow.contains(&129), "the peak takes the whole range");
    for (at, (element, again)) in source.iter().zip(&back).enumerate() {
        let scale = 127.5 * (1 + at / 128 % 8) as f32 / 127.0;
        let (value, again) = (Wide::Bf16.to_f32(*element), Wide::Bf16.to_f32(*again));
        // Half a step, and the rounding of the result to eight bits of mantissa.
        let most = scale * 0.5 + value.abs() / 256.0 + scale * 0.01;
        assert!((value - again).abs() <= most, "{value} came back as {again}");
    }
}

/// Several tensors of other shapes in one launch.
#[test]
fn many_tensors_in_one_launch() {
    let mut tensors: Vec<(Tensor, Vec<u8>)> = Vec::new();
    for number in 0..9usize {
        let shape = Shape { rows: 1 + number, heads: 3, head_elements: 8 + 4 * (number % 3) };
        let source = words(&noise(shape.rows * 3 * shape.head_elements * 2, number as u64));
        let (wide, scales) = (WIDES[number % 2], [0.5, 1.5, 0.01]);
        let mut want = vec![0; source.len()];
        twin::to_narrow(&source, wide, Narrow::Fp8, shape, &scales, &mut want).unwrap();
        tensors.push((Tensor::new(&source, &vec![0; want.len()], &scales, wide, shape, 0), want));
    }
    let entries: Vec<CastEntry> = tensors.iter().map(|(tensor, _)| tensor.entry).collect();
    let mut table = Memory::table(&entries);
    for launch in [Launch::of(2, 9, 32), Launch::of(1, 2, 1), Launch::of(3, 4, 32).folded()] {
        launch.run("kvtide_to_fp8", &[Arg::Wide(table.address()), Arg::Word(9)]);
        for (tensor, want) in &tensors {
            assert_eq!(tensor.narrow.bytes(), want);
        }
        for (tensor, _) in &mut tensors {
            tensor.narrow.bytes_mut().fill(0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_shape_and_scale(
        rows in 1usize..70,
        heads in 1usize..6,
        head_elements in prop_oneof![1usize..40, (1usize..5).prop_map(|eights| eights * 8)],
        scale_bits in prop::collection::vec(any::<u32>(), 6),
        seed: u64,
        skew in 0usize..9,
        block in prop::sample::select(vec![1u32, 5, 32, 256]),
        x in 1u32..9,
    ) {
        let shape = Shape { rows, heads, head_elements };
        let count = rows * heads * head_elements;
        let scales: Vec<f32> =
            scale_bits[..heads].iter().map(|bits| f32::from_bits(*bits)).collect();
        let source = words(&noise(count * 2, seed));
        let launch = Launch::of(x, 1, block);
        for wide in WIDES {
            check_to(&source, wide, shape, &scales, skew, launch);
            check_from(&noise(count, seed), wide, shape, &scales, skew, launch.folded());
            check_peaks(&source, wide, shape, skew, launch);
        }
    }
}
