//! The library of the driver: where it is, and a pointer for each call.
//!
//! Invariant: a [`Library`] is never closed, so that its pointers are good until the process ends.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::error::CudaError;
use super::sys;

/// Names that a driver installs, best first: only a driver installs the first one, while the
/// second one may also be a stub that a toolkit brought for linking.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The oldest driver that loads our kernels: PTX ISA 8.4, which came with CUDA 12.4.
const NEEDED: (u32, u32) = (12, 4);

/// Why there is no CUDA in this process. One line each, with what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No library of that name is installed.
    #[error(
        "no CUDA driver library (libcuda.so.1): install the NVIDIA driver, or let the container \
         see the one of its host"
    )]
    NoLibrary,
    /// The library was found and could not be opened.
    #[error("cannot open the CUDA driver library: {0}")]
    Open(String),
    /// Another library is in use already.
    #[error("the CUDA driver library is already open from {0}; it cannot be changed")]
    AlreadyOpen(PathBuf),
    /// The library is the toolkit's stub, which is for linking only.
    #[error(
        "the CUDA driver library is a stub from a toolkit: take the toolkit's stubs folder out of \
         LD_LIBRARY_PATH, or install the NVIDIA driver"
    )]
    Stub,
    /// The driver is too old.
    #[error(
        "the CUDA driver is too old: it supports CUDA {}.{}, {}.{} is needed; update the NVIDIA \
         driver", have.0, have.1, need.0, need.1
    )]
    TooOld {
        /// The newest CUDA that the driver supports, as (major, minor).
        have: (u32, u32),
        /// What is needed, as (major, minor).
        need: (u32, u32),
    },
    /// A call that every driver we support has is missing.
    #[error("the CUDA driver library lacks {0}: update the NVIDIA driver (CUDA 12.4 or newer)")]
    MissingSymbol(&'static str),
    /// The driver works and sees no GPU.
    #[error("the CUDA driver sees no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES and cgroups")]
    NoDevice,
    /// The kernel module and the library are of different versions.
    #[error(
        "the CUDA driver library does not fit the kernel module ({0}): restart the machine after \
         an update of the driver, or let the container see the library of its host"
    )]
    Mismatch(CudaError),
    /// The system is not ready, for example because the fabric manager is not running.
    #[error("the GPUs are not ready ({0}): check nvidia-fabricmanager and the kernel log")]
    NotReady(CudaError),
    /// The driver could not be initialised for another reason.
    #[error("the CUDA driver could not start ({0}): check nvidia-smi and the kernel log")]
    Init(CudaError),
}

impl Unavailable {
    /// What a code of `cuInit` means.
    fn of_init(error: CudaError) -> Unavailable {
        match error.code {
            34 => Unavailable::Stub,
            100 | 101 => Unavailable::NoDevice,
            // The library does not say how new it is when it refuses to start for its age.
            35 | 36 => Unavailable::TooOld { have: (0, 0), need: NEEDED },
            803 | 804 => Unavailable::Mismatch(error),
            802 => Unavailable::NotReady(error),
            _ => Unavailable::Init(error),
        }
    }
}

/// A handle that the driver gave out: a context, a stream, an event, a module or a function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(pub(super) *mut c_void);

// SAFETY: a handle is a name that only the driver looks into, and the driver may be called with
// any handle from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; the driver locks what it shares between threads.
unsafe impl Sync for Handle {}

/// Declares the calls: a pointer for each, and a method of the same name that names the call in
/// its error. Those after `optional` may be missing in a driver that is good enough otherwise.
macro_rules! calls {
    (
        required { $($name:ident($($arg:ident: $ty:ty),*);)* }
        optional { $($extra:ident($($extra_arg:ident: $extra_ty:ty),*);)* }
    ) => {
        /// Every call that is made, looked up once. Names and arguments are those of `cuda.h`.
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub(super) struct Calls {
            // SAFETY: each pointer is that of the symbol with the name of its field, whose
            // arguments are declared below as `cuda.h` does.
            $($name: unsafe extern "C" fn($($ty),*) -> u32,)*
            $($extra: Option<unsafe extern "C" fn($($extra_ty),*) -> u32>,)*
        }

        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the driver's own calls")]
        impl Calls {
            fn load(library: &libloading::Library) -> Result<Calls, Unavailable> {
                Ok(Calls {
                    $($name: symbol(library, stringify!($name))?,)*
                    $($extra: symbol(library, stringify!($extra)).ok(),)*
                })
            }

            $(
                /// # Safety
                /// As the driver says: pointers are good for what the call reads and writes, and
                /// handles are alive.
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), CudaError> {
                    // SAFETY: the caller keeps the contract of the call.
                    let code = unsafe { (self.$name)($($arg),*) };
                    check(stringify!($name), code)
                }
            )*

            $(
                /// `None` where the driver lacks the call.
                ///
                /// # Safety
                /// As the driver says: pointers are good for what the call reads and writes, and
                /// handles are alive.
                pub(super) unsafe fn $extra(
                    &self,
                    $($extra_arg: $extra_ty),*
                ) -> Option<Result<(), CudaError>> {
                    let call = self.$extra?;
                    // SAFETY: the caller keeps the contract of the call.
                    let code = unsafe { call($($extra_arg),*) };
                    Some(check(stringify!($extra), code))
                }
            )*
        }
    };
}

calls! {
    required {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuGetErrorName(code: u32, name: *mut *const c_char);
        cuGetErrorString(code: u32, text: *mut *const c_char);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut c_int, ordinal: c_int);
        cuDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int);
        cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: c_int);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
        cuDeviceGetAttribute(value: *mut c_int, attribute: u32, device: c_int);
        cuDeviceGetPCIBusId(pci: *mut c_char, bytes: c_int, device: c_int);
        cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
        cuDevicePrimaryCtxRelease_v2(device: c_int);
        cuCtxGetCurrent(context: *mut *mut c_void);
        cuCtxSetCurrent(context: *mut c_void);
        cuCtxPushCurrent_v2(context: *mut c_void);
        cuCtxPopCurrent_v2(context: *mut *mut c_void);
        cuCtxSynchronize();
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemAlloc_v2(address: *mut u64, bytes: usize);
        cuMemFree_v2(address: u64);
        cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64);
        cuPointerGetAttribute(data: *mut c_void, attribute: u32, address: u64);
        cuIpcGetMemHandle(handle: *mut sys::CUipcMemHandle, address: u64);
        cuIpcOpenMemHandle_v2(address: *mut u64, handle: sys::CUipcMemHandle, flags: c_uint);
        cuIpcCloseMemHandle(address: u64);
        cuIpcGetEventHandle(handle: *mut sys::CUipcEventHandle, event: *mut c_void);
        cuIpcOpenEventHandle(event: *mut *mut c_void, handle: sys::CUipcEventHandle);
        cuMemGetAllocationGranularity(
            bytes: *mut usize, prop: *const sys::CUmemAllocationProp, option: u32
        );
        cuMemCreate(
            handle: *mut u64, bytes: usize, prop: *const sys::CUmemAllocationProp, flags: u64
        );
        cuMemRelease(handle: u64);
        cuMemAddressReserve(
            address: *mut u64, bytes: usize, alignment: usize, wish: u64, flags: u64
        );
        cuMemAddressFree(address: u64, bytes: usize);
        cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
        cuMemUnmap(address: u64, bytes: usize);
        cuMemSetAccess(address: u64, bytes: usize, desc: *const sys::CUmemAccessDesc, count: usize);
        cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: u32, flags: u64);
        cuMemImportFromShareableHandle(handle: *mut u64, shared: *mut c_void, kind: u32);
        cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void);
        cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
        cuMemHostUnregister(address: *mut c_void);
        cuStreamCreate(stream: *mut *mut c_void, flags: c_uint);
        cuStreamDestroy_v2(stream: *mut c_void);
        cuStreamQuery(stream: *mut c_void);
        cuStreamIsCapturing(stream: *mut c_void, status: *mut u32);
        cuStreamSynchronize(stream: *mut c_void);
        cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint);
        cuEventCreate(event: *mut *mut c_void, flags: c_uint);
        cuEventDestroy_v2(event: *mut c_void);
        cuEventRecord(event: *mut c_void, stream: *mut c_void);
        cuEventQuery(event: *mut c_void);
        cuEventSynchronize(event: *mut c_void);
        cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: *mut c_void);
        cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void);
        cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void);
        cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut c_void);
        cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: *mut c_void);
        cuModuleLoadData(module: *mut *mut c_void, image: *const c_void);
        cuModuleUnload(module: *mut c_void);
        cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char);
        cuLaunchKernel(
            function: *mut c_void,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: *mut c_void,
            params: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
    optional {
        // The older form of a call that drivers since CUDA 12.8 have twice; for benchmarks only.
        cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void);
        cuMemcpyBatchAsync_v2(
            to: *mut u64, from: *mut u64, bytes: *mut usize, count: usize,
            attrs: *mut sys::CUmemcpyAttributes, attrs_from: *mut usize, attrs_count: usize,
            stream: *mut c_void
        );
    }
}

fn check(call: &'static str, code: u32) -> Result<(), CudaError> {
    if code == 0 { Ok(()) } else { Err(CudaError { code, call }) }
}

fn symbol<T: std::marker::Copy>(
    library: &libloading::Library,
    name: &'static str,
) -> Result<T, Unavailable> {
    // SAFETY: only `calls!` asks, with the types that `cuda.h` declares for the name; the library
    // is kept open for ever (see `open`).
    let found = unsafe { library.get::<T>(name) };
    found.map(|symbol| *symbol).map_err(|_| Unavailable::MissingSymbol(name))
}

/// The open library.
pub(super) struct Library {
    calls: Calls,
    path: PathBuf,
    _open: libloading::Library,
}

impl fmt::Debug for Library {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Library").field("path", &self.path).finish_non_exhaustive()
    }
}

impl std::ops::Deref for Library {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
}

/// The library of this process, set once.
static LIBRARY: OnceLock<Library> = OnceLock::new();
/// Held while the library is opened.
static OPENING: Mutex<()> = Mutex::new(());

/// Takes the driver's library from the absolute path `path` and keeps it for the process. To be
/// called before the first [`Driver::open`](super::Driver::open).
///
/// # Errors
/// When it cannot be opened or lacks a call, or when another library is in use already.
pub fn use_library(path: &Path) -> Result<(), Unavailable> {
    let _held = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    match LIBRARY.get() {
        Some(library) if library.path == path => Ok(()),
        Some(library) => Err(Unavailable::AlreadyOpen(library.path.clone())),
        None => {
            let library = open(path.as_os_str()).map_err(Unavailable::Open)?;
            keep(library, path.to_path_buf()).map(|_| ())
        }
    }
}

/// The library of this process, opened now if it was not yet.
pub(super) fn library() -> Result<&'static Library, Unavailable> {
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let _held = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let mut broken = None;
    for name in NAMES {
        match open(OsStr::new(name)) {
            Ok(library) => return keep(library, PathBuf::from(name)),
            Err(reason) if is_absence(&reason) => {}
            Err(reason) => broken = Some(reason),
        }
    }
    Err(broken.map_or(Unavailable::NoLibrary, Unavailable::Open))
}

/// Whether the loader's message says that there is no such file. Any other message is about a
/// file that is there and cannot be used, or needs another that is not there, which the operator
/// wants to read.
fn is_absence(reason: &str) -> bool {
    reason.contains("No such file") && NAMES.iter().any(|name| reason.contains(name))
}

fn open(name: &OsStr) -> Result<libloading::Library, String> {
    // SAFETY: loading runs the constructors of the library: those of NVIDIA's driver, which every
    // CUDA program runs, or of what the operator of this process named.
    let library = unsafe { libloading::Library::new(name) };
    library.map_err(|error| match std::error::Error::source(&error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    })
}

/// Looks the calls up and stores the library; called with [`OPENING`] held. A library that lacks
/// a call stays open: the driver's threads may run in it.
fn keep(open: libloading::Library, path: PathBuf) -> Result<&'static Library, Unavailable> {
    match Calls::load(&open) {
        Ok(calls) => Ok(LIBRARY.get_or_init(|| Library { calls, path, _open: open })),
        Err(error) => {
            std::mem::forget(open);
            Err(error)
        }
    }
}

/// Starts the driver, and says which CUDA it supports.
pub(super) fn start() -> Result<(&'static Library, (u32, u32)), Unavailable> {
    let library = library()?;
    let mut version: c_int = 0;
    // SAFETY: the call writes one integer, and is allowed before `cuInit`.
    let known = unsafe { library.cuDriverGetVersion(&raw mut version) };
    let have = version_of(version);
    // SAFETY: the call takes a reserved 0, and may be made any number of times.
    let started = unsafe { library.cuInit(0) };
    started.map_err(|error| match Unavailable::of_init(error) {
        Unavailable::TooOld { need, .. } => Unavailable::TooOld { have, need },
        other => other,
    })?;
    known.map_err(Unavailable::of_init)?;
    if have < NEEDED {
        return Err(Unavailable::TooOld { have, need: NEEDED });
    }
    Ok((library, have))
}

/// 12040 is 12.4.
fn version_of(version: c_int) -> (u32, u32) {
    let version = u32::try_from(version).unwrap_or(0);
    (version / 1000, version % 1000 / 10)
}

/// The driver's name and text for `code`, where the library is open and knows it.
pub(super) fn describe(code: u32) -> (Option<String>, Option<String>) {
    let Some(library) = LIBRARY.get() else { return (None, None) };
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: each call writes one pointer, and takes any code.
    let named = unsafe { library.cuGetErrorName(code, &raw mut name) };
    // SAFETY: as above.
    let told = unsafe { library.cuGetErrorString(code, &raw mut text) };
    let read = |pointer: *const c_char| {
        // SAFETY: where the call succeeded, the pointer is null or a string that the library
        // keeps for ever.
        (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
    };
    let owned = |text: &CStr| text.to_string_lossy().into_owned();
    (
        named.ok().and_then(|()| read(name)).map(owned),
        told.ok().and_then(|()| read(text)).map(owned),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_of_cu_init_name_what_is_wrong() {
        let of = |code| Unavailable::of_init(CudaError { code, call: "cuInit" });
        assert_eq!(of(34), Unavailable::Stub);
        assert_eq!(of(100), Unavailable::NoDevice);
        assert!(matches!(of(35), Unavailable::TooOld { need: (12, 4), .. }));
        assert!(matches!(of(803), Unavailable::Mismatch(_)));
        assert!(matches!(of(802), Unavailable::NotReady(_)));
        assert!(matches!(of(3), Unavailable::Init(_)));
        assert!(matches!(of(12345), Unavailable::Init(_)), "a code that nobody knows");
        for code in [3, 34, 35, 100, 802, 803, 999, 12345] {
            assert!(!of(code).to_string().contains('\n'), "one line: {}", of(code));
        }
    }

    #[test]
    fn a_library_that_is_there_and_broken_is_not_called_absent() {
        let absent = "cannot open shared object file: No such file or directory";
        assert!(is_absence(&format!("libcuda.so.1: {absent}")));
        assert!(!is_absence(&format!("libnvidia-rm.so.550: {absent}")), "one that it needs");
        assert!(!is_absence("libcuda.so.1: wrong ELF class: ELFCLASS32"));
    }

    #[test]
    fn versions_are_read_as_the_driver_writes_them() {
        assert_eq!(version_of(12040), (12, 4));
        assert_eq!(version_of(13000), (13, 0));
        assert_eq!(version_of(-1), (0, 0));
    }

    #[test]
    fn a_library_that_is_no_driver_names_the_missing_call() {
        // The C library is in every Linux process and has no `cuInit`.
        let error = use_library(Path::new("libc.so.6")).unwrap_err();
        assert_eq!(error, Unavailable::MissingSymbol("cuInit"));
        let error = use_library(Path::new("/nonexistent/libcuda.so")).unwrap_err();
        assert!(matches!(&error, Unavailable::Open(reason) if reason.contains("nonexistent")));
    }
}
