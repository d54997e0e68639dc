//! The driver itself, its devices, and their primary contexts.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;

use super::error::{CudaError, dropped};
use super::library::{self, Handle, Library, Unavailable};
use super::sys::{CUdevice_attribute as Attribute, CUuuid};

/// Proof that the library is there and that the driver started.
#[derive(Clone, Debug)]
pub struct Driver {
    library: &'static Library,
    version: (u32, u32),
}

/// What the driver says about a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Its number in this process; other processes may number the same GPU differently.
    pub ordinal: i32,
    /// Its name for ever and in every process.
    pub uuid: [u8; 16],
    /// The product's name.
    pub name: String,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Multiprocessors, by which grids are sized.
    pub multiprocessors: u32,
    /// Compute capability, as (major, minor).
    pub compute: (u32, u32),
    /// Where it sits on the PCI bus, as `0000:17:00.0`.
    pub pci: String,
    /// How many processes may use it.
    pub compute_mode: ComputeMode,
}

/// How many processes may use a GPU, as `nvidia-smi -c` sets it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ComputeMode {
    /// As many as like.
    Default,
    /// One; others get no context.
    Exclusive,
    /// None.
    Prohibited,
}

impl ComputeMode {
    fn of(value: u32) -> ComputeMode {
        match value {
            // 1 is one thread of one process, which today's drivers do not have any more.
            1 | 3 => ComputeMode::Exclusive,
            2 => ComputeMode::Prohibited,
            _ => ComputeMode::Default,
        }
    }
}

impl Driver {
    /// Opens the library if that was not done yet, and starts the driver.
    ///
    /// # Errors
    /// Why there is no CUDA in this process.
    pub fn open() -> Result<Driver, Unavailable> {
        let (library, version) = library::start()?;
        Ok(Driver { library, version })
    }

    /// The newest CUDA that the driver supports, as (major, minor).
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The GPUs that this process may use, by ordinal. Empty where there is none.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>, CudaError> {
        let mut count: c_int = 0;
        // SAFETY: the call writes one integer.
        unsafe { self.library.cuDeviceGetCount(&raw mut count) }?;
        (0..count).map(|ordinal| self.device(ordinal)).collect()
    }

    /// What the driver says about the GPU `ordinal`.
    ///
    /// # Errors
    /// When there is no such GPU, or the driver fails.
    pub fn device(&self, ordinal: i32) -> Result<DeviceInfo, CudaError> {
        let device = self.handle(ordinal)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        let mut memory_bytes: usize = 0;
        // SAFETY: the call writes one UUID.
        unsafe { self.library.cuDeviceGetUuid_v2(&raw mut uuid, device) }?;
        // SAFETY: the call writes one integer.
        unsafe { self.library.cuDeviceTotalMem_v2(&raw mut memory_bytes, device) }?;
        let attribute = |attribute: Attribute| {
            let mut value: c_int = 0;
            // SAFETY: the call writes one integer.
            unsafe { self.library.cuDeviceGetAttribute(&raw mut value, attribute as u32, device) }?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(DeviceInfo {
            ordinal,
            uuid: uuid.bytes.map(|byte| byte.cast_unsigned()),
            // SAFETY: the calls write a string of at most the given bytes, with its end.
            name: text(|at, bytes| unsafe { self.library.cuDeviceGetName(at, bytes, device) })?,
            memory_bytes: memory_bytes as u64,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            compute: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: as for the name.
            pci: text(|at, bytes| unsafe { self.library.cuDeviceGetPCIBusId(at, bytes, device) })?,
            compute_mode: ComputeMode::of(attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)?),
        })
    }

    fn handle(&self, ordinal: i32) -> Result<c_int, CudaError> {
        let mut device: c_int = 0;
        // SAFETY: the call writes one integer.
        unsafe { self.library.cuDeviceGet(&raw mut device, ordinal) }?;
        Ok(device)
    }
}

/// The string that a call writes.
fn text(
    call: impl FnOnce(*mut c_char, c_int) -> Result<(), CudaError>,
) -> Result<String, CudaError> {
    const BYTES: usize = 256;
    let mut bytes = [0_u8; BYTES];
    call(bytes.as_mut_ptr().cast(), BYTES as c_int)?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(BYTES);
    Ok(String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned())
}

/// The primary context of a GPU, which every user of the GPU in this process shares: frameworks
/// use the same one, so that their memory may be named by address. Given up by the last clone.
#[derive(Clone)]
pub struct Context {
    shared: Arc<Shared>,
}

struct Shared {
    driver: Driver,
    info: DeviceInfo,
    device: c_int,
    context: Handle,
}

impl Context {
    /// Retains the primary context of the GPU `ordinal`; the first one in a process takes some
    /// hundred milliseconds and some hundred MiB of its memory.
    ///
    /// # Errors
    /// When there is no such GPU, or no memory left for a context.
    pub fn new(driver: &Driver, ordinal: i32) -> Result<Context, CudaError> {
        let info = driver.device(ordinal)?;
        let device = driver.handle(ordinal)?;
        let mut context: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one handle, which `Shared` gives up once.
        unsafe { driver.library.cuDevicePrimaryCtxRetain(&raw mut context, device) }?;
        let driver = driver.clone();
        Ok(Context { shared: Arc::new(Shared { driver, info, device, context: Handle(context) }) })
    }

    /// Makes the context current on this thread, until another one is made current. Not needed
    /// before other calls of this crate, which enter the context for their own duration; a thread
    /// that calls often saves them that.
    ///
    /// # Errors
    /// When the driver is lost.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { self.calls().cuCtxSetCurrent(self.shared.context.0) }
    }

    /// Runs `call` with the context current on this thread, and makes current what was so before.
    /// For calls that take an address and no context.
    ///
    /// # Errors
    /// When the driver is lost.
    pub fn within<T>(&self, call: impl FnOnce() -> T) -> Result<T, CudaError> {
        let _entered = self.enter()?;
        Ok(call())
    }

    /// Blocks until all work queued in this context is done.
    ///
    /// # Errors
    /// When work that was queued failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        // SAFETY: the call takes nothing.
        unsafe { self.calls().cuCtxSynchronize() }
    }

    /// Bytes of device memory, as (free, total), for the whole GPU.
    ///
    /// # Errors
    /// When the driver is lost.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: the call writes two integers.
        unsafe { self.calls().cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Driver {
        &self.shared.driver
    }

    /// What the driver says about the GPU.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    pub(super) fn calls(&self) -> &'static Library {
        self.shared.driver.library
    }

    /// Makes the context current until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Entered, CudaError> {
        let library = self.calls();
        let mut current: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        unsafe { library.cuCtxGetCurrent(&raw mut current) }?;
        if current == self.shared.context.0 {
            return Ok(Entered { library: None });
        }
        // SAFETY: the context is retained, and `Entered` pops it once.
        unsafe { library.cuCtxPushCurrent_v2(self.shared.context.0) }?;
        Ok(Entered { library: Some(library) })
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Context").field("info", &self.shared.info).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the context was retained once by `Context::new`; everything that was made in it
        // holds a clone of the `Context`, and is gone.
        dropped(unsafe { self.driver.library.cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

/// The context is current on this thread while this lives.
pub(super) struct Entered {
    /// `None`: it was current already, and stays so.
    library: Option<&'static Library>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(library) = self.library {
            let mut popped: *mut c_void = std::ptr::null_mut();
            // SAFETY: the call writes one handle, and pops what `enter` pushed on this thread: the
            // guard never leaves it, because it is a local of one call.
            dropped(unsafe { library.cuCtxPopCurrent_v2(&raw mut popped) });
        }
    }
}
