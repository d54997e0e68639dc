//! Device memory that is created and mapped in steps, and that travels between processes as a
//! file descriptor. Allocators of inference engines that give memory back use this kind.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::device::Context;
use super::error::{CudaError, dropped};
use super::library::Library;
use super::memory::{invalid, opened, size};
use super::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags as Granularity,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

/// Descriptors are the only kind of shared handle that is used.
const POSIX_FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Device memory of this process that is exported as a file descriptor. Contents are undefined.
#[derive(Debug)]
pub struct VmmBuffer {
    mapping: Mapping,
}

impl VmmBuffer {
    /// Creates and maps at least `bytes` of device memory: the size is rounded up to the
    /// driver's granularity, which is 2 MiB on today's GPUs.
    ///
    /// # Errors
    /// When the GPU has not that much left, or `bytes` is 0.
    pub fn create(context: &Context, bytes: u64) -> Result<VmmBuffer, CudaError> {
        let _entered = context.enter()?;
        let prop = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: POSIX_FD,
            location: location(context),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let granularity = granularity(context, &prop)?;
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(granularity)
            .ok_or_else(|| invalid("cuMemCreate"))?;
        let mut allocation = Allocation { library: context.calls(), handle: 0 };
        // SAFETY: the call writes one handle, which `Allocation` releases once; on failure it
        // writes nothing, and 0 is not released.
        unsafe {
            context.calls().cuMemCreate(
                &raw mut allocation.handle,
                size(rounded, "cuMemCreate")?,
                &raw const prop,
                0,
            )
        }?;
        let mut mapping = Mapping::of(context, allocation, rounded);
        mapping.map(granularity)?;
        Ok(VmmBuffer { mapping })
    }

    /// Its device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.mapping.address
    }

    /// Its bytes, a multiple of the granularity.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes
    }

    /// A descriptor by which another process maps the memory. The memory lives until this buffer,
    /// every descriptor and every mapping made from one are gone.
    ///
    /// # Errors
    /// When the driver refuses, or the process has too many descriptors.
    pub fn export_fd(&self) -> Result<OwnedFd, CudaError> {
        let _entered = self.mapping.context.enter()?;
        self.mapping.allocation.export()
    }
}

/// Memory of another process, mapped from the descriptor that it exported.
///
/// Unmapping may hang in the driver: drop it on a thread made for that.
#[derive(Debug)]
pub struct ImportedVmm {
    mapping: Mapping,
}

impl ImportedVmm {
    /// Maps the allocation of `bytes` that `fd` stands for. The descriptor is not needed after.
    ///
    /// # Errors
    /// When it is no such descriptor, or `bytes` is not the size of the allocation.
    pub fn open(context: &Context, fd: OwnedFd, bytes: u64) -> Result<ImportedVmm, CudaError> {
        ImportedVmm::import(context, fd, bytes).map_err(|failed| failed.error)
    }

    /// As [`open`](Self::open), for threads that must not hang: what an import has left behind when
    /// it fails comes back, and is undone where that is dropped.
    ///
    /// # Errors
    /// As `open`.
    pub fn import(context: &Context, fd: OwnedFd, bytes: u64) -> Result<ImportedVmm, FailedImport> {
        let allocation = Allocation { library: context.calls(), handle: 0 };
        let mut mapping = Mapping::of(context, allocation, bytes);
        match mapping.import(fd) {
            Ok(()) => Ok(ImportedVmm { mapping }),
            Err(error) => Err(FailedImport { error, _parts: mapping }),
        }
    }

    /// Its device address in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.mapping.address
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes
    }
}

/// An import that failed half way. Dropping it may hang in the driver, as dropping an
/// [`ImportedVmm`] may.
#[derive(Debug)]
pub struct FailedImport {
    /// What the driver said.
    pub error: CudaError,
    _parts: Mapping,
}

/// A descriptor for the memory at `address`, which another allocator of this process made: it
/// must be created and mapped memory that allows descriptors. A context must be current on this
/// thread; see [`Context::within`].
///
/// # Errors
/// When the memory is of another kind: see [`legacy_ipc_capable`](super::legacy_ipc_capable).
pub fn export_fd_of(address: u64) -> Result<OwnedFd, CudaError> {
    let library = opened("cuMemRetainAllocationHandle")?;
    let mut allocation = Allocation { library, handle: 0 };
    let address =
        std::ptr::without_provenance_mut::<c_void>(size(address, "cuMemRetainAllocationHandle")?);
    // SAFETY: the call writes one handle, which `Allocation` releases once, and checks the address
    // without reading through it.
    unsafe { library.cuMemRetainAllocationHandle(&raw mut allocation.handle, address) }?;
    allocation.export()
}

/// A reference to an allocation.
#[derive(Debug)]
struct Allocation {
    library: &'static Library,
    /// 0: none yet.
    handle: u64,
}

impl Allocation {
    fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut fd: RawFd = -1;
        // SAFETY: for this kind of handle the call writes one integer.
        unsafe {
            self.library.cuMemExportToShareableHandle(
                (&raw mut fd).cast::<c_void>(),
                self.handle,
                POSIX_FD.0,
                0,
            )
        }?;
        if fd < 0 {
            return Err(invalid("cuMemExportToShareableHandle"));
        }
        // SAFETY: the driver opened the descriptor for the caller, who is its only owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.handle != 0 {
            // SAFETY: the reference is given up once; the memory lives on while it is mapped.
            dropped(unsafe { self.library.cuMemRelease(self.handle) });
        }
    }
}

/// An allocation, mapped at an address range of its own with reads and writes allowed.
#[derive(Debug)]
struct Mapping {
    context: Context,
    address: u64,
    bytes: u64,
    reserved: bool,
    mapped: bool,
    // Dropped after the mapping was taken down.
    allocation: Allocation,
}

impl Mapping {
    /// An allocation that is not mapped yet.
    fn of(context: &Context, allocation: Allocation, bytes: u64) -> Mapping {
        let context = context.clone();
        Mapping { context, address: 0, bytes, reserved: false, mapped: false, allocation }
    }

    /// Takes the allocation that `fd` stands for, and maps it.
    fn import(&mut self, fd: OwnedFd) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // The driver takes the number of the descriptor in place of a pointer.
        let number = std::ptr::without_provenance_mut::<c_void>(
            usize::try_from(fd.as_raw_fd()).unwrap_or(usize::MAX),
        );
        // SAFETY: the call writes one handle, which `Allocation` releases once, and the descriptor
        // is open during it; the driver keeps a reference of its own.
        unsafe {
            self.context.calls().cuMemImportFromShareableHandle(
                &raw mut self.allocation.handle,
                number,
                POSIX_FD.0,
            )
        }?;
        drop(fd);
        self.map(0)
    }

    /// Reserves, maps and allows access. Once; what was done is undone by dropping, also when a
    /// later step fails.
    fn map(&mut self, alignment: u64) -> Result<(), CudaError> {
        let length = size(self.bytes, "cuMemAddressReserve")?;
        let alignment = size(alignment, "cuMemAddressReserve")?;
        let calls = self.context.calls();
        // SAFETY: the call writes one address, which `Drop` frees once.
        unsafe { calls.cuMemAddressReserve(&raw mut self.address, length, alignment, 0, 0) }?;
        self.reserved = true;
        // SAFETY: the range was reserved above and is mapped once; `Drop` unmaps it.
        unsafe { calls.cuMemMap(self.address, length, 0, self.allocation.handle, 0) }?;
        self.mapped = true;
        let access = CUmemAccessDesc {
            location: location(&self.context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one description is read, for the range that was mapped above.
        unsafe { calls.cuMemSetAccess(self.address, length, &raw const access, 1) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(length) = size(self.bytes, "cuMemUnmap") else { return };
        let calls = self.context.calls();
        dropped(self.context.enter().and_then(|_entered| {
            if self.mapped {
                // SAFETY: the range was mapped once as a whole, and is unmapped once.
                unsafe { calls.cuMemUnmap(self.address, length) }?;
            }
            if self.reserved {
                // SAFETY: the range was reserved once, nothing is mapped in it, freed once.
                unsafe { calls.cuMemAddressFree(self.address, length) }?;
            }
            Ok(())
        }));
    }
}

fn location(context: &Context) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: context.info().ordinal,
    }
}

fn granularity(context: &Context, prop: &CUmemAllocationProp) -> Result<u64, CudaError> {
    let mut bytes: usize = 0;
    // SAFETY: the call reads one description and writes one integer.
    unsafe {
        context.calls().cuMemGetAllocationGranularity(
            &raw mut bytes,
            std::ptr::from_ref(prop),
            Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32,
        )
    }?;
    Ok((bytes as u64).max(1))
}
