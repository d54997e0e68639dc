//! Gather, scatter and fill leave behind what their twins do, to the byte, for any layout, any
//! alignment and any size of launch; and a block whose sum did not hold is not scattered.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod support;

use kvtide_kernels::abi::{self, MoveEntry, NO_SUM, PlaneEntry, SumEntry};
use kvtide_kernels::twin;
use proptest::prelude::*;
use support::{Arg, Launch, Memory, noise};

/// A pool and the blocks to move, with the tables that a launch needs.
#[derive(Clone, Debug)]
struct Pool {
    planes: Vec<PlaneEntry>,
    payload_bytes: u64,
    region_bytes: usize,
}

/// What a plane is made of, in multiples of its granularity.
#[derive(Clone, Copy, Debug)]
struct PlaneShape {
    granularity: u64,
    rows: u32,
    row: u64,
    row_gap: u64,
    block_gap: u64,
    plane_gap: u64,
}

impl Pool {
    /// Planes one behind the other, each with its blocks.
    fn new(shapes: &[PlaneShape], places: u32) -> Pool {
        let mut at: u64 = 0;
        let mut planes = Vec::new();
        for shape in shapes {
            let granularity = shape.granularity;
            at = at.next_multiple_of(granularity);
            let row_stride = (shape.row + shape.row_gap) * granularity;
            let row_bytes = shape.row * granularity;
            let span = row_stride * u64::from(shape.rows - 1) + row_bytes;
            let block_stride = span + shape.block_gap * granularity;
            planes.push(PlaneEntry {
                offset: at,
                block_stride,
                row_stride,
                row_bytes,
                payload_offset: 0,
                rows: shape.rows,
                reserved: 0,
            });
            at += block_stride * u64::from(places) + shape.plane_gap * granularity;
        }
        let payload_bytes = abi::lay_out(&mut planes).unwrap();
        Pool { planes, payload_bytes, region_bytes: at as usize }
    }

    fn args(&self, region: u64, planes: u64, moves: u64, move_count: usize) -> Vec<Arg> {
        vec![
            Arg::Wide(region),
            Arg::Wide(planes),
            Arg::Word(self.planes.len() as u32),
            Arg::Wide(moves),
            Arg::Word(move_count as u32),
            Arg::Wide(self.payload_bytes),
        ]
    }
}

/// Payloads one behind the other, each at a multiple of 64 plus `skew`.
fn payload_step(pool: &Pool) -> u64 {
    pool.payload_bytes.next_multiple_of(64)
}

fn moves_of(places: &[u32], pool: &Pool, base: u64) -> Vec<MoveEntry> {
    let at = |number: usize| base + number as u64 * payload_step(pool);
    places
        .iter()
        .enumerate()
        .map(|(number, place)| MoveEntry { payload: at(number), place: *place, sum: NO_SUM })
        .collect()
}

fn payload<'a>(pool: &Pool, all: &'a mut [u8], number: usize) -> &'a mut [u8] {
    let start = number * payload_step(pool) as usize;
    &mut all[start..start + pool.payload_bytes as usize]
}

fn check_gather(pool: &Pool, places: &[u32], skews: (usize, usize), launch: Launch) {
    let content = noise(pool.region_bytes, 1);
    let mut region = Memory::of(&content, skews.0);
    let mut planes = Memory::table(&pool.planes);
    let all = places.len() * payload_step(pool) as usize;
    let mut payloads = Memory::new(all, skews.1);
    let mut want = payloads.bytes().to_vec();
    let mut moves = Memory::table(&moves_of(places, pool, payloads.address()));
    for (number, place) in places.iter().enumerate() {
        twin::gather(&content, &pool.planes, *place, payload(pool, &mut want, number)).unwrap();
    }
    let args = pool.args(region.address(), planes.address(), moves.address(), places.len());
    launch.run("kvtide_gather", &args);
    assert!(payloads.bytes() == want, "gather with {launch:?}");
    assert!(region.bytes() == content, "a gather writes no region");
    payloads.check_guards();
    region.check_guards();
}

/// Every second move depends on a sum: none, equal and differing ones in turn.
fn check_scatter(pool: &Pool, places: &[u32], skews: (usize, usize), launch: Launch) {
    let all = places.len() * payload_step(pool) as usize;
    let mut payloads = Memory::of(&noise(all, 2), skews.1);
    let mut want = noise(pool.region_bytes, 3);
    let mut region = Memory::of(&want, skews.0);
    let mut planes = Memory::table(&pool.planes);
    let sums: Vec<SumEntry> =
        (0..3).map(|verdict| SumEntry { verdict, ..Default::default() }).collect();
    let mut sums = Memory::table(&sums);
    let mut moves = moves_of(places, pool, payloads.address());
    for (number, entry) in moves.iter_mut().enumerate() {
        entry.sum = if number % 2 == 0 { NO_SUM } else { (number / 2 + 1) as u32 % 3 };
        if entry.sum == NO_SUM || entry.sum == 1 {
            let mut from = payloads.bytes().to_vec();
            let from = payload(pool, &mut from, number);
            twin::scatter(&mut want, &pool.planes, entry.place, from).unwrap();
        }
    }
    let mut moves = Memory::table(&moves);
    let mut args = pool.args(region.address(), planes.address(), moves.address(), places.len());
    args.push(Arg::Wide(sums.address()));
    launch.run("kvtide_scatter", &args);
    assert!(region.bytes() == want, "scatter with {launch:?}");
    region.check_guards();
    payloads.check_guards();
}

fn check_both(pool: &Pool, places: &[u32], skews: (usize, usize), launch: Launch) {
    for launch in [launch, launch.folded()] {
        check_gather(pool, places, skews, launch);
        check_scatter(pool, places, skews, launch);
    }
}

fn plane_shape(rows: u32, row: u64) -> impl Strategy<Value = PlaneShape> {
    // Gaps are often 0: rows that lie one behind the other take another path.
    let gap = || prop_oneof![Just(0u64), 0u64..5];
    (granularity(), 1..=rows, 1..=row, gap(), gap(), gap()).prop_map(
        |(granularity, rows, row, row_gap, block_gap, plane_gap)| PlaneShape {
            granularity,
            rows,
            row,
            row_gap,
            block_gap,
            plane_gap,
        },
    )
}

/// The bytes that sizes and strides of a plane are multiples of.
fn granularity() -> impl Strategy<Value = u64> {
    prop::sample::select(vec![1u64, 2, 4, 8, 16])
}

fn launches() -> impl Strategy<Value = Launch> {
    (1u32..40, prop::sample::select(vec![1u32, 3, 32, 64, 256])).prop_map(|(x, block)| Launch {
        grid: [x, 1, 1],
        block,
        threads: true,
    })
}

/// All planes of one granularity, or each of its own.
fn cases(rows: u32, row: u64) -> impl Strategy<Value = (Pool, Vec<u32>, (usize, usize))> {
    let shapes = prop::collection::vec(plane_shape(rows, row), 1..7);
    let common = prop::option::of(granularity());
    let skew = || prop::sample::select(vec![0usize, 0, 1, 2, 4, 8, 16, 20]);
    (common, shapes, 1u32..8, skew(), skew()).prop_flat_map(
        |(common, mut shapes, places, region_skew, payload_skew)| {
            for shape in &mut shapes {
                shape.granularity = common.unwrap_or(shape.granularity);
            }
            let pool = Pool::new(&shapes, places);
            let order = Just((0..places).collect::<Vec<u32>>()).prop_shuffle();
            (Just(pool), order, 1..=places, Just((region_skew, payload_skew))).prop_map(
                |(pool, mut order, count, skews)| {
                    order.truncate(count as usize);
                    (pool, order, skews)
                },
            )
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn small_blocks((pool, places, skews) in cases(9, 40), launch in launches()) {
        check_both(&pool, &places, skews, launch);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Payloads of several units, whose borders fall anywhere in planes and rows.
    #[test]
    fn blocks_of_many_units((pool, places, skews) in cases(64, 300), launch in launches()) {
        check_both(&pool, &places, skews, launch);
    }

    #[test]
    fn fills(bytes in 0usize..3000, skew in 0usize..20, value: u32, launch in launches()) {
        for launch in [launch, launch.folded()] {
            let mut memory = Memory::new(bytes, skew);
            let mut want = vec![0; bytes];
            twin::fill(&mut want, value);
            let args = [Arg::Wide(memory.address()), Arg::Wide(bytes as u64), Arg::Word(value)];
            launch.run("kvtide_fill", &args);
            prop_assert!(memory.bytes() == want, "{launch:?}");
            memory.check_guards();
        }
    }
}

/// Pools as engines have them, in blocks of megabytes.
#[test]
fn pools_of_engines() {
    let plane = |rows, row, row_gap| PlaneShape {
        granularity: 1,
        rows,
        row,
        row_gap,
        block_gap: 0,
        plane_gap: 0,
    };
    // K and V of 32 layers apart, 16 tokens of 8 heads of 128 elements of 2 bytes.
    let grouped = Pool::new(&[plane(1, 32768, 0); 64], 3);
    assert_eq!(grouped.payload_bytes, 2 << 20);
    // One opaque plane: 61 layers of latent attention, 16 tokens of 576 elements.
    let latent = Pool::new(&[plane(1, 61 * 16 * 576 * 2, 0)], 3);
    // Tokens outermost: each row is one token of one layer, layers a whole pool apart.
    let tokens = Pool::new(&[plane(256, 256, 256); 8], 3);
    // Block-outermost: all planes within one stride of the block.
    let mut outermost = Pool::new(&[plane(64, 256, 0); 16], 1);
    for plane in &mut outermost.planes {
        plane.block_stride = outermost.payload_bytes;
    }
    outermost.region_bytes *= 3;
    for pool in [grouped, latent, tokens, outermost] {
        check_gather(&pool, &[2, 0, 1], (0, 0), Launch::of(132, 1, 256).folded());
        check_scatter(&pool, &[1, 2, 0], (0, 0), Launch::of(132, 1, 256).folded());
        check_both(&pool, &[2], (0, 0), Launch::of(700, 1, 256));
    }
}

#[test]
fn nothing_to_move_is_nothing_moved() {
    let shape =
        PlaneShape { granularity: 1, rows: 1, row: 64, row_gap: 0, block_gap: 0, plane_gap: 0 };
    check_both(&Pool::new(&[shape], 1), &[], (0, 0), Launch::of(4, 1, 32));
}

/// A plane of odd bytes puts the next one, whose rows are multiples of 16, across the border of a
/// unit: from there on the payload is aligned, and the place in the row is not.
#[test]
fn rows_that_a_unit_cuts_between_alignments() {
    let plane = |granularity, rows, row| PlaneShape {
        granularity,
        rows,
        row,
        row_gap: 1,
        block_gap: 0,
        plane_gap: 0,
    };
    for odd in [1, 4, 7, 8, 12] {
        let shapes = [plane(odd, 1, 1), plane(16, 200, 15), plane(16, 100, 16)];
        let pool = Pool::new(&shapes, 3);
        check_both(&pool, &[1, 2], (0, 0), Launch::of(5, 1, 96));
        // And the other way: aligned until the border, which is not.
        check_both(&pool, &[1, 2], (0, 16 - odd as usize), Launch::of(5, 1, 96));
    }
}
