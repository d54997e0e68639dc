//! The CUDA driver: the only code of kvtide that calls it.
//!
//! It owns the library (found at run time, kept until the process ends), the contexts, and every
//! handle that the driver gives out; each is freed by the `Drop` of its type. Nothing here panics
//! on what the driver says: a missing library, a missing symbol and a failed call are values.
//!
//! **Calls do not go through `cudarc`.** Its bindings return a Rust enum, so that an error code
//! which a newer driver has and the bindings lack is undefined behaviour; a symbol which an older
//! driver lacks is a panic there; and its search tries `libcuda.so` (which a toolkit ships as a
//! stub) before `libcuda.so.1` (which only a driver installs). The module `library` opens the
//! library itself and looks every call up once, as a pointer to a function that returns a `u32`.
//! From `cudarc` come the types of the arguments, which are generated from NVIDIA's header and so
//! cannot drift from it.
//!
//! Threads: every type is `Send` and `Sync` as the driver's handles are. A call makes its context
//! current for its own duration and then restores what was current, so that an engine's thread
//! keeps the context that it chose. A call may block for as long as the driver likes (closing an
//! imported mapping is known to hang), so that those belong on threads made for them.
//!
//! Never here: a log line, a retry, a decision. A `Drop` that fails counts in [`failed_drops`]
//! unless the driver was lost before.

mod device;
mod error;
mod library;
mod memory;
mod module;
mod stream;
mod vmm;

/// The driver's types, generated from its header; the functions in there are never called.
pub use cudarc::driver::sys;

pub use device::{ComputeMode, Context, DeviceInfo, Driver};
pub use error::{CudaError, failed_drops};
pub use library::{Unavailable, use_library};
pub use memory::{
    DeviceBuffer, HostRegistration, ImportedIpc, REGISTRATION_BYTES_MAX, address_range,
    ipc_handle_of, legacy_ipc_capable,
};
pub use module::{Function, Module};
pub use stream::{BATCH_COPIES_MAX, Copy, Event, Stream};
pub use vmm::{FailedImport, ImportedVmm, VmmBuffer, export_fd_of};
