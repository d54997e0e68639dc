//! A CUDA driver without a GPU: the part of the driver's API that kvtide calls, for tests.
//!
//! Built as `libfakecuda.so` (SONAME `libcuda.so`) and opened by its absolute path; nothing else
//! ever finds it, and every device name starts with "Fake". Device memory is a shared memory file
//! and a device address is the address of its mapping, so that memory and events are shared
//! between processes as the real ones are. Kernels run from their real source, compiled for the
//! CPU. Each stream is a thread with a queue.
//!
//! It is stricter than it has to be where the real driver leaves behaviour open, because a test
//! that passes here must not depend on luck there: see `copy` (pageable memory, batches in
//! reverse order, NULL stream), `memory` (bounds, use after free), `ipc` (who may open what, and
//! when memory may be freed), `stream` (jitter, errors that stay). What the driver leaves
//! undefined is recorded as a violation: a line on stderr that starts with `fakecuda: VIOLATION`,
//! counted by [`violations`].
//!
//! It says nothing about speed, about alignment, or about races between threads of a kernel. A
//! kernel that touches memory which is not mapped ends the process with SIGSEGV.
//!
//! Environment, read at the first call:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FAKECUDA_DEVICES` | devices; with 0 `cuInit` fails as a driver without a GPU does | 1 |
//! | `FAKECUDA_MEMORY` | bytes of memory of each device, for each process | 1 GiB |
//! | `FAKECUDA_DRIVER_VERSION` | what `cuDriverGetVersion` says | 13000 |
//! | `FAKECUDA_COMPUTE_MODE` | compute mode of each device: 2 prohibited, 3 one process | 0 |
//! | `FAKECUDA_JITTER_US` | longest pause before each operation of a stream, in microseconds | 0 |
//! | `FAKECUDA_SEED` | seed of the pauses | 1 |
//! | `FAKECUDA_FAULTS` | faults by schedule, see `fault` | none |
//! | `FAKECUDA_FAULT_FILE` | a file of faults, read again at each call while it exists | none |
//! | `FAKECUDA_DEAD_EVENT` | `hang`: waiting for an event whose process died never ends | `done` |

mod abi;
mod call;
mod config;
mod copies;
mod copy;
mod device;
mod entry;
mod event;
mod fault;
mod handle;
mod ipc;
mod kernel;
mod mapping;
mod memory;
mod stream;
mod violation;
mod vmm;

use std::ffi::CString;
use std::path::PathBuf;

pub use copies::Copies;

/// The absolute path of `libfakecuda.so`, beside the binary that runs.
///
/// # Panics
/// When it is not there: the crate of the binary must depend on this one.
#[must_use]
pub fn library() -> PathBuf {
    let binary = std::env::current_exe().expect("the path of the running binary is known");
    let folder = binary.parent().expect("a binary lies in a folder");
    // Tests lie in target/<profile>/deps, as the library does; binaries one folder up.
    let places =
        [Some(folder.to_path_buf()), Some(folder.join("deps")), folder.parent().map(Into::into)];
    for place in places.iter().flatten() {
        let path = place.join("libfakecuda.so");
        if path.is_file() {
            return path;
        }
    }
    panic!(
        "libfakecuda.so is not beside {}: build it with `cargo build -p kvtide-fakecuda`, or make \
         kvtide-fakecuda a dependency of the crate under test",
        binary.display()
    );
}

/// How many violations the library at [`library`] has recorded in this process.
///
/// # Panics
/// When the library cannot be opened.
#[must_use]
pub fn violations() -> u64 {
    let library = open();
    // SAFETY: the symbol is the function of this name and type in `entry`.
    let call = unsafe { library.get::<unsafe extern "C" fn() -> u64>("fakecuda_violations") };
    let call = call.expect("our own library has the symbol");
    // SAFETY: the call has no arguments and no conditions.
    unsafe { call() }
}

/// Replaces the faults that were injected into the library at [`library`] in this process by
/// `faults`, in the form of `FAKECUDA_FAULTS`. Calls that hang by an injected fault go on.
///
/// # Panics
/// When the library cannot be opened, or `faults` is not of that form.
pub fn inject(faults: &str) {
    let faults = CString::new(faults).expect("a schedule is text without an end");
    let library = open();
    // SAFETY: the symbol is the function of this name and type in `entry`.
    let call = unsafe {
        library.get::<unsafe extern "C" fn(*const std::ffi::c_char) -> u32>("fakecuda_inject")
    };
    let call = call.expect("our own library has the symbol");
    // SAFETY: the argument is a string with its end.
    let code = unsafe { call(faults.as_ptr()) };
    assert_eq!(code, 0, "fakecuda cannot read the schedule {faults:?}");
}

fn open() -> libloading::Library {
    // SAFETY: opening our own library runs no constructors; it is opened already as a rule.
    unsafe { libloading::Library::new(library()) }.expect("libfakecuda.so can be opened")
}
