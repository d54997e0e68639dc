//! How the blocks of a model lie in the pool of an engine.

use kvtide_kernels::abi::PlaneEntry;

/// Bytes of every block here: 16 tokens of a model with 32 layers, K and V, 8 KV heads of 128
/// elements of 2 bytes.
pub(super) const BLOCK_BYTES: u64 = 2 << 20;

/// K and V of 32 layers.
const PLANES: u64 = 64;

/// Bytes of one of them in a block.
const PLANE_BYTES: u64 = BLOCK_BYTES / PLANES;

/// A layout, with its name in the report.
pub(super) struct Layout {
    pub(super) name: &'static str,
    pub(super) planes: Vec<PlaneEntry>,
}

/// All layouts, for a pool of so many places.
pub(super) fn all(places: u32) -> Vec<Layout> {
    let plane = |offset, block_stride, row_bytes| PlaneEntry {
        offset,
        block_stride,
        row_stride: row_bytes,
        row_bytes,
        rows: 1,
        ..PlaneEntry::default()
    };
    let apart = |at| plane(at * u64::from(places) * PLANE_BYTES, PLANE_BYTES, PLANE_BYTES);
    let outermost = |at| plane(at * PLANE_BYTES, BLOCK_BYTES, PLANE_BYTES);
    vec![
        Layout { name: "planes of layers", planes: (0..PLANES).map(apart).collect() },
        Layout { name: "block outermost", planes: (0..PLANES).map(outermost).collect() },
        Layout { name: "opaque", planes: vec![plane(0, BLOCK_BYTES, BLOCK_BYTES)] },
    ]
}

/// The payload of the block at `place`, from a copy of the pool.
pub(super) fn payload(layout: &Layout, pool: &[u8], place: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(BLOCK_BYTES as usize);
    for plane in &layout.planes {
        let start = (plane.offset + u64::from(place) * plane.block_stride) as usize;
        let run = pool.get(start..start + plane.row_bytes as usize);
        out.extend_from_slice(run.unwrap_or_default());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_covers_the_pool_once() {
        for layout in all(4) {
            let pool: Vec<u8> = (0..4 * BLOCK_BYTES).map(|at| (at / PLANE_BYTES) as u8).collect();
            let mut runs: Vec<u8> = (0..4)
                .flat_map(|place| {
                    let payload = payload(&layout, &pool, place);
                    assert_eq!(payload.len() as u64, BLOCK_BYTES, "{}", layout.name);
                    payload.into_iter().step_by(PLANE_BYTES as usize)
                })
                .collect();
            runs.sort_unstable();
            assert_eq!(runs, (0..=255).collect::<Vec<u8>>(), "{}", layout.name);
        }
    }
}
