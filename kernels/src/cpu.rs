//! The kernels run on the CPU, from the very source that the GPU's are made of.
//!
//! For tests, and for a driver that is only a fake. The threads of a launch run one after the
//! other, which the kernels allow (they have no barriers); what a data race or the memory order of
//! a GPU would do is not seen here.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

use crate::abi::KERNELS;

// SAFETY: as cuda/host_launch.cpp declares them, which build.rs compiles and links.
unsafe extern "C" {
    fn kvtide_cpu_launch(
        name: *const c_char,
        name_bytes: c_ulong,
        grid: *const c_uint,
        block: *const c_uint,
        parameters: *mut *mut c_void,
    ) -> c_int;
    fn kvtide_cpu_parameter_bytes(name: *const c_char, name_bytes: c_ulong, index: c_uint)
    -> c_int;
}

/// A launch of a kernel that the source does not have.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no kernel named {0:?}")]
pub struct UnknownKernel(pub String);

/// Names of all kernels.
pub fn names() -> &'static [&'static str] {
    #[expect(clippy::indexing_slicing, reason = "evaluated by the compiler, within the length")]
    const NAMES: [&str; KERNELS.len()] = {
        let mut names = [""; KERNELS.len()];
        let mut at = 0;
        while at < KERNELS.len() {
            names[at] = KERNELS[at].name;
            at += 1;
        }
        names
    };
    &NAMES
}

/// Bytes of each of a kernel's parameters, in order; for whoever has to copy them at the launch.
pub fn parameters(name: &str) -> Option<&'static [usize]> {
    KERNELS.iter().find(|kernel| kernel.name == name).map(|kernel| kernel.parameters)
}

/// Bytes of a kernel's parameter as the compiler has it; `None` behind the last one.
pub fn parameter_bytes(name: &str, index: u32) -> Option<usize> {
    // SAFETY: the name is passed with its length and only read.
    let bytes =
        unsafe { kvtide_cpu_parameter_bytes(name.as_ptr().cast(), name.len() as c_ulong, index) };
    usize::try_from(bytes).ok()
}

/// Runs a kernel on this thread and returns when it has ended: the whole launch folded into a
/// single thread, which does all of the work, because every loop of a kernel strides by what was
/// launched. That is the order that suits a CPU; gigabytes go through here. A launch of nothing
/// does nothing. `shared_bytes` is not used by any kernel.
///
/// # Errors
/// A name that no kernel has.
///
/// # Safety
/// `params` has a pointer to each parameter of the kernel, of the type that `cuda/kvtide.cu` says
/// (see [`parameters`]); and every address in them, and in the tables that they lead to, is of
/// memory that this process may access for the whole extent that the tables say, and that nothing
/// else accesses meanwhile.
pub unsafe fn launch(
    name: &str,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    params: *mut *mut c_void,
) -> Result<(), UnknownKernel> {
    let threads = if grid.contains(&0) || block.contains(&0) { [0; 3] } else { [1; 3] };
    // SAFETY: the caller's promise.
    unsafe { launch_threads(name, threads, threads, shared_bytes, params) }
}

/// As [`launch`], but with every thread of every block by itself, as a GPU has them.
///
/// # Errors
/// A name that no kernel has.
///
/// # Safety
/// As for [`launch`].
pub unsafe fn launch_threads(
    name: &str,
    grid: [u32; 3],
    block: [u32; 3],
    _shared_bytes: u32,
    params: *mut *mut c_void,
) -> Result<(), UnknownKernel> {
    // SAFETY: name with its length, two arrays of three; the rest is the caller's promise.
    let code = unsafe {
        kvtide_cpu_launch(
            name.as_ptr().cast(),
            name.len() as c_ulong,
            grid.as_ptr(),
            block.as_ptr(),
            params,
        )
    };
    if code == 0 { Ok(()) } else { Err(UnknownKernel(name.to_owned())) }
}
