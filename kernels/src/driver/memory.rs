//! Device memory, memory of other processes, and registered host memory.

use std::ffi::c_void;

use super::device::Context;
use super::error::{CudaError, dropped};
use super::library;
use super::sys;

/// The most bytes that one call registers: some drivers refuse 512 GiB in one call, and a chunk
/// is the unit that a failure gives back.
pub const REGISTRATION_BYTES_MAX: u64 = 64 << 30;

/// Pinned for every context of the process, not only for the current one.
const REGISTER_PORTABLE: u32 = 1;
/// The only flag that the driver takes for opening a memory handle.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// Device memory of this process, which other processes may import. Contents are undefined.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Context,
    address: u64,
    bytes: u64,
}

impl DeviceBuffer {
    /// Allocates `bytes` of device memory, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// When the GPU has not that much left, or `bytes` is 0.
    pub fn alloc(context: &Context, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let size = size(bytes, "cuMemAlloc_v2")?;
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: the call writes one address, which `Drop` frees once.
        unsafe { context.calls().cuMemAlloc_v2(&raw mut address, size) }?;
        Ok(DeviceBuffer { context: context.clone(), address, bytes })
    }

    /// Its device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The name by which another process of this machine opens the memory. It must be closed
    /// there before this buffer is dropped, or the driver's behaviour is undefined.
    ///
    /// # Errors
    /// When the driver refuses, for example in a container without shared memory.
    pub fn ipc_handle(&self) -> Result<[u8; 64], CudaError> {
        ipc_handle_of(&self.context, self.address)
    }
}

/// The handle of the allocation at `address`, which another allocator of this process made in
/// `context`: see [`DeviceBuffer::ipc_handle`].
///
/// # Errors
/// When the memory is of another kind: see [`legacy_ipc_capable`].
pub fn ipc_handle_of(context: &Context, address: u64) -> Result<[u8; 64], CudaError> {
    let _entered = context.enter()?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the call writes one handle, and checks the address that it is given.
    unsafe { context.calls().cuIpcGetMemHandle(&raw mut handle, address) }?;
    Ok(handle.reserved.map(|byte| byte.cast_unsigned()))
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        dropped(self.context.enter().and_then(|_entered| {
            // SAFETY: the address came from `cuMemAlloc_v2` and is freed once; the driver itself
            // waits for work that still uses it.
            unsafe { self.context.calls().cuMemFree_v2(self.address) }
        }));
    }
}

/// Device memory of another process, opened by its handle. Its address is that of the start of
/// the exporter's allocation.
///
/// Closing may hang in the driver: drop it on a thread made for that.
#[derive(Debug)]
pub struct ImportedIpc {
    context: Context,
    address: u64,
    open: bool,
}

impl ImportedIpc {
    /// Opens the memory that `handle` names.
    ///
    /// # Errors
    /// When the exporter is gone, when it is this very process, or when the handle is not one.
    pub fn open(context: &Context, handle: [u8; 64]) -> Result<ImportedIpc, CudaError> {
        let _entered = context.enter()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte.cast_signed() as _) };
        let mut address = 0;
        // SAFETY: the call writes one address, which `Drop` closes once, and checks the handle.
        unsafe {
            context.calls().cuIpcOpenMemHandle_v2(&raw mut address, handle, LAZY_ENABLE_PEER_ACCESS)
        }?;
        Ok(ImportedIpc { context: context.clone(), address, open: true })
    }

    /// Its device address in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Closes it, as dropping does, and says how that went.
    ///
    /// # Errors
    /// When the driver fails; it is not tried again.
    pub fn close(mut self) -> Result<(), CudaError> {
        self.close_once()
    }

    fn close_once(&mut self) -> Result<(), CudaError> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the address came from `cuIpcOpenMemHandle_v2` and is closed once.
        unsafe { self.context.calls().cuIpcCloseMemHandle(self.address) }
    }
}

impl Drop for ImportedIpc {
    fn drop(&mut self) {
        dropped(self.close_once());
    }
}

/// Host memory that the GPU copies from and to by itself. Copies of memory that is not registered
/// go through the driver's own buffers and block.
#[derive(Debug)]
pub struct HostRegistration {
    context: Context,
    /// (address, bytes) of every chunk that is registered, in order.
    chunks: Vec<(usize, u64)>,
}

impl HostRegistration {
    /// Registers `bytes` from `address`, in chunks of at most [`REGISTRATION_BYTES_MAX`]. Takes
    /// about 0.1 s per GiB, and all of it is populated and locked in memory.
    ///
    /// # Errors
    /// When some of it is registered already or cannot be locked; nothing stays registered then.
    ///
    /// # Safety
    /// The memory must be mapped and writable, and stay mapped until the value is dropped.
    pub unsafe fn register(
        context: &Context,
        address: *mut u8,
        bytes: u64,
    ) -> Result<HostRegistration, CudaError> {
        // SAFETY: the caller keeps the memory mapped.
        unsafe { Self::register_in_chunks(context, address, bytes, REGISTRATION_BYTES_MAX) }
    }

    /// As [`register`](Self::register), in chunks of at most `chunk_bytes`.
    ///
    /// # Errors
    /// As `register`, and when `chunk_bytes` is 0.
    ///
    /// # Safety
    /// As `register`.
    pub unsafe fn register_in_chunks(
        context: &Context,
        address: *mut u8,
        bytes: u64,
        chunk_bytes: u64,
    ) -> Result<HostRegistration, CudaError> {
        if chunk_bytes == 0 || bytes == 0 {
            return Err(invalid("cuMemHostRegister_v2"));
        }
        let _entered = context.enter()?;
        let mut registration = HostRegistration { context: context.clone(), chunks: Vec::new() };
        let mut done = 0;
        while done < bytes {
            let now = chunk_bytes.min(bytes - done);
            let at = address.wrapping_add(size(done, "cuMemHostRegister_v2").unwrap_or(0));
            // SAFETY: the caller keeps the memory mapped until the registration is dropped, which
            // also happens when a later chunk fails.
            unsafe {
                context.calls().cuMemHostRegister_v2(
                    at.cast::<c_void>(),
                    size(now, "cuMemHostRegister_v2")?,
                    REGISTER_PORTABLE,
                )
            }?;
            registration.chunks.push((at.expose_provenance(), now));
            done += now;
        }
        Ok(registration)
    }

    /// How many chunks there are.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        for (address, _) in self.chunks.drain(..) {
            let address = std::ptr::with_exposed_provenance_mut::<c_void>(address);
            dropped(self.context.enter().and_then(|_entered| {
                // SAFETY: the chunk was registered at this very address, and is unregistered once.
                unsafe { self.context.calls().cuMemHostUnregister(address) }
            }));
        }
    }
}

/// The allocation that `address` lies in, as (base, bytes). A context must be current on this
/// thread, as it is on the threads of an engine; see [`Context::within`].
///
/// # Errors
/// When it lies in none of this process, or no context is current.
pub fn address_range(address: u64) -> Result<(u64, u64), CudaError> {
    let library = opened("cuMemGetAddressRange_v2")?;
    let (mut base, mut bytes) = (0_u64, 0_usize);
    // SAFETY: the call writes an address and a size, and checks the address that it is given.
    unsafe { library.cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) }?;
    Ok((base, bytes as u64))
}

/// Whether the memory at `address` has a handle that other processes open with [`ImportedIpc`].
/// Memory that has none may have a descriptor: see [`export_fd_of`](super::export_fd_of).
///
/// # Errors
/// When the address is none of this process.
pub fn legacy_ipc_capable(address: u64) -> Result<bool, CudaError> {
    let library = opened("cuPointerGetAttribute")?;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    // The header says that a byte is written; a whole word is given to be on the safe side.
    let mut capable: u32 = 0;
    // SAFETY: the call writes at most four bytes for this attribute, and checks the address.
    unsafe { library.cuPointerGetAttribute((&raw mut capable).cast(), attribute as u32, address) }?;
    Ok(capable != 0)
}

/// The library, for calls that are given an address instead of a context. Where there is none, no
/// address can be good.
pub(super) fn opened(call: &'static str) -> Result<&'static library::Library, CudaError> {
    library::library().map_err(|_| CudaError { code: 3, call })
}

/// `bytes` as the driver takes it.
pub(super) fn size(bytes: u64, call: &'static str) -> Result<usize, CudaError> {
    usize::try_from(bytes).map_err(|_| invalid(call))
}

pub(super) fn invalid(call: &'static str) -> CudaError {
    CudaError { code: CudaError::INVALID_VALUE, call }
}
