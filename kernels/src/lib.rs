//! The kernels that move KV blocks on a GPU: gather from a paged pool into contiguous payloads,
//! scatter back, XXH3-128 of payloads in device memory, and casts to formats of one byte.
//!
//! One source, `cuda/kvtide.cu`, is everything. NVRTC made `ptx/kvtide.ptx` of it, which is checked
//! in and compiled by the GPU's driver when it is loaded, so neither building nor running needs a
//! CUDA toolkit. An ordinary C++ compiler makes of the same source what feature `cpu` runs; and
//! each kernel has a twin in safe Rust that says what it must do, to the bit.
//!
//! - [`abi`]: the tables that the kernels read, and the kernels' names.
//! - [`twin`]: the kernels in safe Rust over slices.
//! - `cpu` (feature `cpu`): the kernels' source, run on the CPU.
//! - `driver` (feature `cuda`): the only calls of the CUDA driver.
//! - `launch` (feature `cuda`): the kernels as functions, with grids sized to the device.
//! - `nvrtc` (feature `nvrtc`): the same kernels, compiled at run time for the GPU at hand.
//! - `yardstick` (feature `cuda`): both of them timed on memory of their own, for benchmarks.
//!
//! Blocks in a client's host memory are not gathered here: that memory may only be reached through
//! checked copies of a mapping that another process writes to (`tiers::io::Region`).

pub mod abi;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod driver;
#[cfg(feature = "cuda")]
pub mod launch;
#[cfg(feature = "nvrtc")]
pub mod nvrtc;
pub mod twin;
#[cfg(feature = "cuda")]
pub mod yardstick;
