//! Devices, their memory as a number, their primary contexts, and the driver itself.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use crate::abi::Out;
use crate::call::{
    self, CONTEXT_IS_DESTROYED, Call, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE,
    OUT_OF_MEMORY, Sticky,
};
use crate::config::config;
use crate::stream::Stream;
use crate::{memory, stream, violation};

/// Handles of contexts are this and the device's number: below every other handle.
const FIRST_CONTEXT: usize = 0x100;

/// Multiprocessors of a fake device; few, because each block of a kernel is run by one thread.
const MULTIPROCESSORS: i32 = 4;
/// Compute capability: that of the GPUs that kvtide is built for first.
pub(crate) const COMPUTE: (i32, i32) = (9, 0);

pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) sticky: Sticky,
    /// Bytes that this process allocated, and bytes that it imported.
    own: AtomicU64,
    imported: AtomicU64,
    retained: Mutex<u32>,
    pub(crate) default_stream: OnceLock<Arc<Stream>>,
}

static DEVICES: LazyLock<Vec<Device>> = LazyLock::new(|| {
    (0..config().devices as usize)
        .map(|ordinal| Device {
            ordinal,
            sticky: Sticky::default(),
            own: AtomicU64::new(0),
            imported: AtomicU64::new(0),
            retained: Mutex::new(0),
            default_stream: OnceLock::new(),
        })
        .collect()
});

/// The device with this number.
pub(crate) fn device(ordinal: i32) -> Result<&'static Device, u32> {
    usize::try_from(ordinal).ok().and_then(|at| DEVICES.get(at)).ok_or(INVALID_DEVICE)
}

/// The device of a context that is retained.
pub(crate) fn of_context(context: usize) -> Result<&'static Device, u32> {
    let ordinal = context.checked_sub(FIRST_CONTEXT).ok_or(INVALID_CONTEXT)?;
    let device = DEVICES.get(ordinal).ok_or(INVALID_CONTEXT)?;
    if *device.retained() == 0 {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(device)
}

impl Device {
    fn retained(&self) -> std::sync::MutexGuard<'_, u32> {
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of memory, as (free, total). What other processes exported and this one imported
    /// counts too: it would keep their memory in use after they are gone.
    fn memory(&self) -> (u64, u64) {
        let used = self.own.load(Ordering::SeqCst) + self.imported.load(Ordering::SeqCst);
        (config().memory_bytes.saturating_sub(used), config().memory_bytes)
    }

    /// Takes `bytes` of the device's memory until the charge is dropped.
    pub(crate) fn charge(&'static self, bytes: u64) -> Result<Charge, u32> {
        let own = self.own.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |own| {
            own.checked_add(bytes).filter(|own| *own <= config().memory_bytes)
        });
        own.map_err(|_| OUT_OF_MEMORY)?;
        Ok(Charge { device: self, bytes, imported: false })
    }

    /// Counts `bytes` of another process; that never fails.
    pub(crate) fn charge_import(&'static self, bytes: u64) -> Charge {
        self.imported.fetch_add(bytes, Ordering::SeqCst);
        Charge { device: self, bytes, imported: true }
    }
}

/// Memory of a device that is in use.
pub(crate) struct Charge {
    pub(crate) device: &'static Device,
    bytes: u64,
    imported: bool,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let count = if self.imported { &self.device.imported } else { &self.device.own };
        count.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

pub(crate) fn init(_: &Call, flags: u32) -> Result<(), u32> {
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    if config().devices == 0 {
        return Err(NO_DEVICE);
    }
    call::initialize();
    Ok(())
}

pub(crate) fn driver_version(_: &Call, version: Out<i32>) -> Result<(), u32> {
    version.put(config().driver_version)
}

pub(crate) fn error_name(_: &Call, code: u32, name: Out<*const c_char>) -> Result<(), u32> {
    name.put_if_wanted(std::ptr::null());
    name.put(describe(code)?.0.as_ptr())
}

pub(crate) fn error_text(_: &Call, code: u32, text: Out<*const c_char>) -> Result<(), u32> {
    text.put_if_wanted(std::ptr::null());
    text.put(describe(code)?.1.as_ptr())
}

fn describe(code: u32) -> Result<(&'static CStr, &'static CStr), u32> {
    Ok(match code {
        0 => (c"CUDA_SUCCESS", c"no error"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        3 => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        34 => (c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library"),
        100 => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        200 => (c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
        201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        205 => (c"CUDA_ERROR_MAP_FAILED", c"mapping of buffer object failed"),
        209 => (c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution"),
        214 => (c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered"),
        222 => (c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the provided PTX is too new"),
        304 => (c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported"),
        400 => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        500 => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        600 => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        702 => (c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
        709 => (c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
        712 => (c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"memory is already pinned"),
        713 => (c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"memory is not pinned"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        802 => (c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
        803 => (c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"driver and library versions differ"),
        999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
        _ => return Err(INVALID_VALUE),
    })
}

pub(crate) fn count(_: &Call, count: Out<i32>) -> Result<(), u32> {
    count.put(i32::try_from(DEVICES.len()).unwrap_or(i32::MAX))
}

pub(crate) fn get(_: &Call, found: Out<i32>, ordinal: i32) -> Result<(), u32> {
    device(ordinal)?;
    found.put(ordinal)
}

pub(crate) fn name(_: &Call, name: Out<c_char>, bytes: i32, ordinal: i32) -> Result<(), u32> {
    device(ordinal)?;
    name.put_text(&format!("Fake GPU {ordinal}"), bytes)
}

pub(crate) fn uuid(_: &Call, uuid: Out<[u8; 16]>, ordinal: i32) -> Result<(), u32> {
    let device = device(ordinal)?;
    let mut bytes = *b"FAKECUDA\0\0\0\0\0\0\0\0";
    bytes[15] = u8::try_from(device.ordinal).map_err(|_| INVALID_DEVICE)?;
    uuid.put(bytes)
}

pub(crate) fn total_memory(_: &Call, bytes: Out<usize>, ordinal: i32) -> Result<(), u32> {
    bytes.put(usize::try_from(device(ordinal)?.memory().1).unwrap_or(usize::MAX))
}

pub(crate) fn attribute(
    _: &Call,
    value: Out<i32>,
    attribute: u32,
    ordinal: i32,
) -> Result<(), u32> {
    device(ordinal)?;
    value.put(match attribute {
        // Threads of a block, its three sides, and those of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        10 => 32,
        16 => MULTIPROCESSORS,
        20 => crate::config::config().compute_mode,
        // Unified addressing, memory pools, mapped memory, descriptors as handles.
        41 | 102 | 103 | 115 => 1,
        75 => COMPUTE.0,
        76 => COMPUTE.1,
        _ => 0,
    })
}

pub(crate) fn pci(_: &Call, pci: Out<c_char>, bytes: i32, ordinal: i32) -> Result<(), u32> {
    device(ordinal)?;
    pci.put_text(&format!("0000:{ordinal:02x}:00.0"), bytes)
}

pub(crate) fn retain(_: &Call, context: Out<usize>, ordinal: i32) -> Result<(), u32> {
    let device = device(ordinal)?;
    *device.retained() += 1;
    context.put(FIRST_CONTEXT + device.ordinal)
}

pub(crate) fn release(_: &Call, ordinal: i32) -> Result<(), u32> {
    let device = device(ordinal)?;
    let mut retained = device.retained();
    *retained = retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
    if *retained == 0 {
        let (memory, streams) = (memory::live(device), stream::live(device));
        if memory + streams > 0 {
            violation::record(format!(
                "the last reference to the context of device {ordinal} was given up with {memory} \
                 allocations and {streams} streams alive"
            ));
        }
    }
    Ok(())
}

pub(crate) fn get_current(_: &Call, context: Out<usize>) -> Result<(), u32> {
    context.put(call::current())
}

pub(crate) fn set_current(_: &Call, context: usize) -> Result<(), u32> {
    if context != 0 {
        of_context(context)?;
    }
    call::set_current(context);
    Ok(())
}

pub(crate) fn push_current(_: &Call, context: usize) -> Result<(), u32> {
    of_context(context)?;
    call::push_current(context);
    Ok(())
}

pub(crate) fn pop_current(_: &Call, context: Out<usize>) -> Result<(), u32> {
    let popped = call::pop_current().ok_or(INVALID_CONTEXT)?;
    context.put_if_wanted(popped);
    Ok(())
}

pub(crate) fn synchronize(call: &Call) -> Result<(), u32> {
    let device = call.device()?;
    stream::drain(device);
    device.sticky.check()
}

pub(crate) fn memory_info(call: &Call, free: Out<usize>, total: Out<usize>) -> Result<(), u32> {
    let (free_bytes, total_bytes) = call.device()?.memory();
    free.put(usize::try_from(free_bytes).unwrap_or(usize::MAX))?;
    total.put(usize::try_from(total_bytes).unwrap_or(usize::MAX))
}
