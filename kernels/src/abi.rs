//! What the host and the kernels both read: the tables of a launch, byte for byte.
//!
//! Every struct here has a twin of the same name and layout in `cuda/kvtide.cu`. All of them are
//! plain integers without padding, so any bytes are a valid entry and an entry has no hidden bytes;
//! [`Entry`] is the promise of that, and [`as_bytes`] lives on it. Addresses are of device memory
//! and are never followed on the host.

use std::mem::size_of;

/// Bytes of one unit of work of a gather or a scatter: one thread block copies it in one go.
pub const UNIT_BYTES: u64 = 16 * 1024;

/// Fewest bytes of a payload that the sum kernels sum: XXH3 takes another path up to 240 bytes,
/// which they do not have. An entry of fewer bytes is found to differ (verdict 2, `found` 0).
pub const SUM_BYTES_MIN: u64 = 241;

/// Bytes of the payload that become one step of the sum's serial chain.
pub const SUM_BLOCK_BYTES: u64 = 1024;

/// In [`MoveEntry::sum`]: the move depends on no sum.
pub const NO_SUM: u32 = u32::MAX;

/// In [`SumEntry::verdict`]: not compared (yet).
pub const VERDICT_NONE: u32 = 0;
/// In [`SumEntry::verdict`]: the sum found equals the one expected.
pub const VERDICT_EQUAL: u32 = 1;
/// In [`SumEntry::verdict`]: the sum found is another one, or the payload is too short to be
/// summed.
pub const VERDICT_DIFFERS: u32 = 2;

/// In [`CastEntry::wide`]: the wide elements are bfloat16.
pub const WIDE_BF16: u32 = 0;
/// In [`CastEntry::wide`]: the wide elements are IEEE binary16.
pub const WIDE_FP16: u32 = 1;

/// The largest finite value of fp8 e4m3: the limit to pass to `kvtide_scales` for it.
pub const FP8_MAX: f32 = 448.0;
/// The largest magnitude of symmetric int8: the limit to pass to `kvtide_scales` for it.
pub const INT8_MAX: f32 = 127.0;

/// One plane of a region: where the same part of every block lies.
///
/// Run `r` of place `i` starts at `offset + i * block_stride + r * row_stride` from the start of
/// the region; in a payload the runs lie one behind the other from `payload_offset` on. The table
/// has the planes in payload order, without gaps, and a payload is shorter than 4 GiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct PlaneEntry {
    /// Where the first place's first run starts, bytes from the start of the region.
    pub offset: u64,
    /// From one place to the next, bytes.
    pub block_stride: u64,
    /// From one run to the next, bytes (of no meaning when `rows` is 1).
    pub row_stride: u64,
    /// Bytes of one run, at least 1.
    pub row_bytes: u64,
    /// Where the plane starts in a payload, bytes.
    pub payload_offset: u64,
    /// Runs of one place, at least 1.
    pub rows: u32,
    /// Always 0.
    pub reserved: u32,
}

/// One block to move between its place in the region and its contiguous payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct MoveEntry {
    /// Device address of the payload.
    pub payload: u64,
    /// The block's place in the region.
    pub place: u32,
    /// Index of the [`SumEntry`] that must be found equal before a scatter writes anything, or
    /// [`NO_SUM`]. A gather ignores it.
    pub sum: u32,
}

/// One payload to sum by XXH3-128 (seed 0, default secret), and to compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct SumEntry {
    /// Device address of the payload.
    pub payload: u64,
    /// Bytes of the payload, at least [`SUM_BYTES_MIN`].
    pub bytes: u64,
    /// The sum that it should have: low and high half.
    pub expected: [u64; 2],
    /// Written by the kernels: the sum that it has, low and high half.
    pub found: [u64; 2],
    /// Written by the kernels where `compare` is not 0; must be [`VERDICT_NONE`] before.
    pub verdict: u32,
    /// Whether to compare (not 0) or only to compute (0).
    pub compare: u32,
    /// Where this payload's scratch starts, in u64s from the start of the scratch; it takes
    /// [`scratch_bytes`] bytes.
    pub lanes: u64,
}

/// One tensor to cast: `rows` rows of `heads` heads of `head_elements` elements, all contiguous,
/// with one scale for each head over all rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct CastEntry {
    /// Device address of the elements of 2 bytes, in the format that `wide` names.
    pub wide_elements: u64,
    /// Device address of the elements of 1 byte, fp8 or int8 by the kernel.
    pub narrow_elements: u64,
    /// Device address of `heads` values of f32: wide = narrow * scale.
    pub scales: u64,
    /// Rows (tokens).
    pub rows: u32,
    /// Heads in a row.
    pub heads: u32,
    /// Elements of a head.
    pub head_elements: u32,
    /// [`WIDE_BF16`] or [`WIDE_FP16`].
    pub wide: u32,
}

/// A kernel, as a launch names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// Its name in the module.
    pub name: &'static str,
    /// Bytes of each of its parameters, in order.
    pub parameters: &'static [usize],
}

/// Every kernel of the module.
pub const KERNELS: [Kernel; 12] = [
    Kernel { name: "kvtide_gather", parameters: &[8, 8, 4, 8, 4, 8] },
    Kernel { name: "kvtide_scatter", parameters: &[8, 8, 4, 8, 4, 8, 8] },
    Kernel { name: "kvtide_sum_stripes", parameters: &[8, 4, 8] },
    Kernel { name: "kvtide_sum_fold", parameters: &[8, 4, 8] },
    Kernel { name: "kvtide_sum_finish", parameters: &[8, 4, 8] },
    Kernel { name: "kvtide_fill", parameters: &[8, 8, 4] },
    Kernel { name: "kvtide_peaks", parameters: &[8, 4] },
    Kernel { name: "kvtide_scales", parameters: &[8, 4, 4] },
    Kernel { name: "kvtide_to_fp8", parameters: &[8, 4] },
    Kernel { name: "kvtide_from_fp8", parameters: &[8, 4] },
    Kernel { name: "kvtide_to_int8", parameters: &[8, 4] },
    Kernel { name: "kvtide_from_int8", parameters: &[8, 4] },
];

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::PlaneEntry {}
    impl Sealed for super::MoveEntry {}
    impl Sealed for super::SumEntry {}
    impl Sealed for super::CastEntry {}
}

/// An entry of a table: `repr(C)`, integers only, no padding. Implemented here and nowhere else.
pub trait Entry: sealed::Sealed + Copy {}

impl Entry for PlaneEntry {}
impl Entry for MoveEntry {}
impl Entry for SumEntry {}
impl Entry for CastEntry {}

// The kernels have the same four assertions.
const _: () = assert!(size_of::<PlaneEntry>() == 48);
const _: () = assert!(size_of::<MoveEntry>() == 16);
const _: () = assert!(size_of::<SumEntry>() == 64);
const _: () = assert!(size_of::<CastEntry>() == 40);
const _: () = assert!(cfg!(target_endian = "little"), "the device reads little-endian tables");

/// A table as the bytes to copy to the device.
pub fn as_bytes<E: Entry>(table: &[E]) -> &[u8] {
    let bytes = size_of_val(table);
    // SAFETY: the memory is `bytes` long, initialised (an `Entry` has no padding, asserted above by
    // the sizes), borrowed for as long as the result, and u8 has no alignment.
    unsafe { std::slice::from_raw_parts(table.as_ptr().cast::<u8>(), bytes) }
}

/// A table as the bytes to copy back from the device into it.
pub fn as_bytes_mut<E: Entry>(table: &mut [E]) -> &mut [u8] {
    let bytes = size_of_val(table);
    // SAFETY: as in `as_bytes`; and whatever is written is a valid `Entry`, because its fields are
    // integers only.
    unsafe { std::slice::from_raw_parts_mut(table.as_mut_ptr().cast::<u8>(), bytes) }
}

/// Sets every plane's `payload_offset` and gives the bytes of a payload. `None` if a payload would
/// have 4 GiB or more; the kernels count its bytes in 32 bits.
pub fn lay_out(planes: &mut [PlaneEntry]) -> Option<u64> {
    let mut at: u64 = 0;
    for plane in planes {
        plane.payload_offset = at;
        at = at.checked_add(plane.row_bytes.checked_mul(u64::from(plane.rows))?)?;
        if at > u64::from(u32::MAX) {
            return None;
        }
    }
    Some(at)
}

/// Scratch that the sum of a payload of so many bytes takes: 64 bytes for each 1,024-byte block,
/// the last one counted whole, and 64 more.
pub fn scratch_bytes(payload_bytes: u64) -> u64 {
    (payload_bytes.div_ceil(SUM_BLOCK_BYTES) + 1) * 64
}
