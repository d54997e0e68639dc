//! The kernels as functions on a stream, with grids sized to the device.
//!
//! Every call queues work and returns; nothing here waits. A launch of nothing (no moves, no bytes)
//! is no launch. Addresses and tables are the caller's promise: a kernel follows what a table says,
//! and a wrong address ends the context. Tables must have been built by whoever checked the
//! region's layout, stay allocated and unchanged until the stream has passed the launch, and lie in
//! memory that the device reads (device memory, or registered host memory).

use std::ffi::c_void;

use crate::abi::{SUM_BLOCK_BYTES, UNIT_BYTES};
use crate::driver::{Context, CudaError, Function, Module, Stream};
use crate::twin::Narrow;

pub use crate::abi::scratch_bytes;

/// What the driver compiles when the kernels are loaded.
const PTX: &str = include_str!("../ptx/kvtide.ptx");

/// Threads of a block that copies: with 64 bytes in flight in each, a block takes a whole unit of
/// work in one step.
const COPY_THREADS: u32 = 256;
/// Threads of a block that sums or casts.
const SUM_THREADS: u32 = 128;
/// Threads of a block of the serial chains: few, so that they spread over the multiprocessors.
const CHAIN_THREADS: u32 = 32;
/// Blocks launched for each multiprocessor at most: some waves of what fits, so that uneven work
/// evens out; every kernel loops over what is left.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 16;
/// Most blocks along y.
const GRID_Y_MAX: u32 = 65_535;

/// A registered region, as the kernels see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pool {
    /// Device address of the region's first byte.
    pub region: u64,
    /// Device address of its table of [`PlaneEntry`](crate::abi::PlaneEntry).
    pub planes: u64,
    /// Entries of that table, at least 1.
    pub plane_count: u32,
    /// Bytes of one block's payload: the sum of all planes' rows.
    pub payload_bytes: u64,
}

/// The kernels, loaded into a context.
#[derive(Clone, Debug)]
pub struct Kernels {
    gather: Function,
    scatter: Function,
    sum_stripes: Function,
    sum_fold: Function,
    sum_finish: Function,
    fill: Function,
    peaks: Function,
    scales: Function,
    to_fp8: Function,
    from_fp8: Function,
    to_int8: Function,
    from_int8: Function,
    blocks_max: u32,
}

impl Kernels {
    /// Loads the kernels from the PTX that this crate carries; the driver compiles it for the GPU,
    /// and keeps the result in its own cache.
    ///
    /// # Errors
    /// A driver that is too old for PTX 8.4 (before R550, code 222), or that has no memory left.
    pub fn load(context: &Context) -> Result<Kernels, CudaError> {
        Self::from_module(context, &Module::load(context, PTX)?)
    }

    /// The kernels of a module that was compiled from this crate's source.
    ///
    /// # Errors
    /// A module that lacks a kernel (code 500).
    pub fn from_module(context: &Context, module: &Module) -> Result<Kernels, CudaError> {
        let multiprocessors = context.info().multiprocessors.max(1);
        Ok(Kernels {
            gather: module.function("kvtide_gather")?,
            scatter: module.function("kvtide_scatter")?,
            sum_stripes: module.function("kvtide_sum_stripes")?,
            sum_fold: module.function("kvtide_sum_fold")?,
            sum_finish: module.function("kvtide_sum_finish")?,
            fill: module.function("kvtide_fill")?,
            peaks: module.function("kvtide_peaks")?,
            scales: module.function("kvtide_scales")?,
            to_fp8: module.function("kvtide_to_fp8")?,
            from_fp8: module.function("kvtide_from_fp8")?,
            to_int8: module.function("kvtide_to_int8")?,
            from_int8: module.function("kvtide_from_int8")?,
            blocks_max: multiprocessors.saturating_mul(BLOCKS_PER_MULTIPROCESSOR),
        })
    }

    /// Queues the gather of `move_count` blocks of `pool` into their payloads. `moves` is the
    /// device address of a table of [`MoveEntry`](crate::abi::MoveEntry).
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// `pool` and `moves` are as the module says: the planes fit the region at every place that a
    /// move names, and each payload has `pool.payload_bytes` bytes, which nothing else accesses
    /// until the stream has passed; all of it stays mapped until then.
    pub unsafe fn gather(
        &self,
        stream: &Stream,
        pool: &Pool,
        moves: u64,
        move_count: u32,
    ) -> Result<(), CudaError> {
        let words = pool.words(moves, move_count);
        let grid = move_grid(pool.payload_bytes, move_count, self.blocks_max);
        // SAFETY: the six parameters of the kernel; the rest is the caller's promise.
        unsafe { queue(&self.gather, stream, grid, COPY_THREADS, words) }
    }

    /// Queues the scatter of `move_count` payloads into their places of `pool`. A move whose
    /// [`sum`](crate::abi::MoveEntry::sum) names an entry of `sums` (the device address of a table
    /// of [`SumEntry`](crate::abi::SumEntry)) that was not found equal is skipped on the device, so
    /// a [`sum`](Kernels::sum) queued before decides.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As for [`gather`](Kernels::gather), with region and payloads exchanged; no place is named
    /// twice; `sums` may be 0 only if no move names a sum.
    pub unsafe fn scatter(
        &self,
        stream: &Stream,
        pool: &Pool,
        moves: u64,
        move_count: u32,
        sums: u64,
    ) -> Result<(), CudaError> {
        let [region, planes, plane_count, moves, count, bytes] = pool.words(moves, move_count);
        let words = [region, planes, plane_count, moves, count, bytes, sums];
        let grid = move_grid(pool.payload_bytes, move_count, self.blocks_max);
        // SAFETY: the seven parameters of the kernel; the rest is the caller's promise.
        unsafe { queue(&self.scatter, stream, grid, COPY_THREADS, words) }
    }

    /// Queues XXH3-128 of `count` payloads of at most `payload_bytes_max` bytes: three launches,
    /// after which `found` and `verdict` of each entry are written. `sums` is the device address of
    /// a table of [`SumEntry`](crate::abi::SumEntry), `scratch` that of the scratch in which each
    /// entry has [`scratch_bytes`] bytes at its `lanes`.
    ///
    /// # Errors
    /// What the driver says of the launches.
    ///
    /// # Safety
    /// Every payload has the bytes that its entry says, every scratch fits and no two overlap, the
    /// scratch is aligned to 8 bytes; nothing else accesses table or scratch until the stream has
    /// passed; all of it stays mapped until then.
    pub unsafe fn sum(
        &self,
        stream: &Stream,
        sums: u64,
        count: u32,
        payload_bytes_max: u64,
        scratch: u64,
    ) -> Result<(), CudaError> {
        let words = [sums, u64::from(count), scratch];
        let items = payload_bytes_max.div_ceil(SUM_BLOCK_BYTES) * 4;
        let stripes = table_grid(items, count, SUM_THREADS, self.blocks_max);
        let fold = flat_grid(u64::from(count) * 8, CHAIN_THREADS, self.blocks_max);
        let finish = flat_grid(u64::from(count), CHAIN_THREADS, self.blocks_max);
        // SAFETY: the three parameters of each kernel; each reads what the one before it wrote,
        // which the order of the stream allows; the rest is the caller's promise.
        unsafe {
            queue(&self.sum_stripes, stream, stripes, SUM_THREADS, words)?;
            queue(&self.sum_fold, stream, fold, CHAIN_THREADS, words)?;
            queue(&self.sum_finish, stream, finish, CHAIN_THREADS, words)
        }
    }

    /// Queues the fill of `bytes` bytes with the pattern `value`, little-endian, from `address` on.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// The bytes are mapped, and nothing else accesses them, until the stream has passed.
    pub unsafe fn fill(
        &self,
        stream: &Stream,
        address: u64,
        bytes: u64,
        value: u32,
    ) -> Result<(), CudaError> {
        // A thread writes 16 bytes at a time where the address allows it.
        let grid = flat_grid(bytes.div_ceil(16), COPY_THREADS, self.blocks_max);
        let words = [address, bytes, u64::from(value)];
        // SAFETY: the three parameters of the kernel; the rest is the caller's promise.
        unsafe { queue(&self.fill, stream, grid, COPY_THREADS, words) }
    }

    /// Queues the scales of `count` tensors for a cast to `narrow`: two launches, after which each
    /// head's scale is its largest finite magnitude divided by the largest of the format. `casts`
    /// is the device address of a table of [`CastEntry`](crate::abi::CastEntry), none of which has
    /// more than `elements_max` elements. The scales must have been filled with 0.
    ///
    /// # Errors
    /// What the driver says of the launches.
    ///
    /// # Safety
    /// Every tensor and its scales are as its entry says, scales are aligned to 4 bytes and
    /// elements to their size; no two entries share scales; all of it stays mapped, and nothing
    /// else accesses the scales, until the stream has passed.
    pub unsafe fn scales(
        &self,
        stream: &Stream,
        narrow: Narrow,
        casts: u64,
        count: u32,
        elements_max: u64,
    ) -> Result<(), CudaError> {
        let words = [casts, u64::from(count)];
        let limit = [casts, u64::from(count), u64::from(narrow.limit().to_bits())];
        let peaks = table_grid(elements_max.div_ceil(32), count, SUM_THREADS, self.blocks_max);
        let each = table_grid(1, count, CHAIN_THREADS, self.blocks_max);
        // SAFETY: two and three parameters; the second kernel reads what the first wrote; the rest
        // is the caller's promise.
        unsafe {
            queue(&self.peaks, stream, peaks, SUM_THREADS, words)?;
            queue(&self.scales, stream, each, CHAIN_THREADS, limit)
        }
    }

    /// Queues the cast of `count` tensors of at most `elements_max` elements to `narrow`, by their
    /// scales; what becomes of which value is said in [`twin`](crate::twin). `casts` is the device
    /// address of a table of [`CastEntry`](crate::abi::CastEntry).
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As for [`scales`](Kernels::scales), and nothing else accesses the narrow elements.
    pub unsafe fn to_narrow(
        &self,
        stream: &Stream,
        narrow: Narrow,
        casts: u64,
        count: u32,
        elements_max: u64,
    ) -> Result<(), CudaError> {
        let function = match narrow {
            Narrow::Fp8 => &self.to_fp8,
            Narrow::Int8 => &self.to_int8,
        };
        let grid = table_grid(elements_max.div_ceil(8), count, SUM_THREADS, self.blocks_max);
        // SAFETY: the two parameters of the kernel; the rest is the caller's promise.
        unsafe { queue(function, stream, grid, SUM_THREADS, [casts, u64::from(count)]) }
    }

    /// Queues the cast back from `narrow`; as [`to_narrow`](Kernels::to_narrow) otherwise.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As for [`scales`](Kernels::scales), and nothing else accesses the wide elements.
    pub unsafe fn from_narrow(
        &self,
        stream: &Stream,
        narrow: Narrow,
        casts: u64,
        count: u32,
        elements_max: u64,
    ) -> Result<(), CudaError> {
        let function = match narrow {
            Narrow::Fp8 => &self.from_fp8,
            Narrow::Int8 => &self.from_int8,
        };
        let grid = table_grid(elements_max.div_ceil(8), count, SUM_THREADS, self.blocks_max);
        // SAFETY: the two parameters of the kernel; the rest is the caller's promise.
        unsafe { queue(function, stream, grid, SUM_THREADS, [casts, u64::from(count)]) }
    }
}

impl Pool {
    /// The first six parameters of a gather and of a scatter.
    fn words(&self, moves: u64, move_count: u32) -> [u64; 6] {
        let planes = u64::from(self.plane_count);
        [self.region, self.planes, planes, moves, u64::from(move_count), self.payload_bytes]
    }
}

/// Queues one launch; each parameter lies in the low bytes of its word.
///
/// # Safety
/// As many words as the kernel has parameters, and the promises of the kernel's caller.
unsafe fn queue<const N: usize>(
    function: &Function,
    stream: &Stream,
    grid: [u32; 3],
    threads: u32,
    mut words: [u64; N],
) -> Result<(), CudaError> {
    if grid.contains(&0) {
        return Ok(());
    }
    let mut parameters = words.each_mut().map(|word| std::ptr::from_mut(word).cast::<c_void>());
    // SAFETY: a pointer for each parameter, to at least its bytes: `abi` asserts that the machine
    // is little-endian, so a parameter of 4 bytes lies at the start of its word. They are read
    // before the call returns. The rest is the caller's promise.
    unsafe { function.launch(stream, grid, [threads, 1, 1], &mut parameters) }
}

/// Blocks along x for `items` items of work, one for each thread.
fn flat_grid(items: u64, threads: u32, blocks_max: u32) -> [u32; 3] {
    let blocks = items.div_ceil(u64::from(threads)).min(u64::from(blocks_max));
    [u32::try_from(blocks).unwrap_or(blocks_max), 1, 1]
}

/// One block for each unit of work of all moves.
fn move_grid(payload_bytes: u64, move_count: u32, blocks_max: u32) -> [u32; 3] {
    let units = payload_bytes.div_ceil(UNIT_BYTES).saturating_mul(u64::from(move_count));
    flat_grid(units, 1, blocks_max)
}

/// Entries of a table along y, `items` items of work of the largest one along x.
fn table_grid(items: u64, count: u32, threads: u32, blocks_max: u32) -> [u32; 3] {
    let y = count.min(GRID_Y_MAX);
    if y == 0 {
        return [0; 3];
    }
    let [x, _, _] = flat_grid(items, threads, blocks_max.div_ceil(y));
    [x, y, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_the_work_up_to_what_the_device_holds() {
        // An H200 has 132 multiprocessors; 64 blocks of 2 MiB are 8,192 units.
        assert_eq!(move_grid(2 << 20, 64, 132 * 16), [2112, 1, 1]);
        assert_eq!(move_grid(2 << 20, 1, 132 * 16), [128, 1, 1]);
        assert_eq!(move_grid(UNIT_BYTES + 1, 3, 100), [6, 1, 1]);
        assert_eq!(move_grid(1, 0, 100), [0, 1, 1]);
        assert_eq!(move_grid(u64::MAX, u32::MAX, 7), [7, 1, 1]);
        assert_eq!(table_grid(8192, 64, 128, 2112), [33, 64, 1]);
        assert_eq!(table_grid(8192, 1, 128, 2112), [64, 1, 1]);
        assert_eq!(table_grid(1, 100_000, 128, 16), [1, 65_535, 1]);
        assert_eq!(table_grid(1, 0, 128, 16), [0; 3]);
        assert_eq!(table_grid(0, 5, 128, 16), [0, 5, 1]);
    }

    /// Whether the compiler makes the same of the source is for `ptx/regenerate.py --check`; that
    /// the source is still the one is seen without it.
    #[test]
    fn the_ptx_was_made_of_this_source() {
        let source = include_bytes!("../cuda/kvtide.cu");
        let mut crc = u32::MAX;
        for byte in source {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0xedb8_8320 };
            }
        }
        let want = format!("// kvtide.cu: {} bytes, crc32 {:08x}", source.len(), !crc);
        let found = PTX.lines().next().unwrap();
        assert_eq!(found, want, "run kernels/ptx/regenerate.py");
    }

    #[test]
    fn the_ptx_has_every_kernel_with_its_parameters() {
        for kernel in crate::abi::KERNELS {
            let start = PTX.find(&format!(".visible .entry {}(", kernel.name)).unwrap();
            let end = start + PTX[start..].find(')').unwrap();
            let sizes: Vec<usize> = PTX[start..end]
                .lines()
                .filter_map(|line| line.trim().strip_prefix(".param ."))
                .map(|rest| if rest.starts_with("u64") { 8 } else { 4 })
                .collect();
            assert_eq!(sizes, kernel.parameters, "{}", kernel.name);
        }
        assert!(PTX.contains(".target sm_80"));
    }
}
