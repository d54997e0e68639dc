//! The entry points: one for each call that a user may make, with the arguments of the driver's
//! header, what the call needs, and the function that does it.

use std::ffi::c_char;

use crate::abi::{AccessDesc, AllocationProp, CopyAttributes, In, IpcHandle, Out, Params, Text};
use crate::call::{Call, Needs, call};
use crate::copy::Batch;
use crate::kernel::Shape;
use crate::{copy, device, event, fault, ipc, kernel, memory, stream, violation, vmm};

macro_rules! entries {
    ($($needs:ident: $name:ident($($arg:ident: $ty:ty),* $(,)?) => $run:expr;)*) => {
        /// The names of all calls, for schedules of faults.
        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];

        $(
            /// # Safety
            /// As the driver's header says for this call: every pointer is null, or good for what
            /// the call reads and writes through it, until the call returns.
            #[allow(non_snake_case, reason = "the driver's own name")]
            #[allow(clippy::too_many_arguments, reason = "the driver's own arguments")]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
                call(stringify!($name), Needs::$needs, |call| $run(call, $($arg),*))
            }
        )*
    };
}

entries! {
    Nothing: cuInit(flags: u32) => device::init;
    Nothing: cuDriverGetVersion(version: Out<i32>) => device::driver_version;
    Nothing: cuGetErrorName(code: u32, name: Out<*const c_char>) => device::error_name;
    Nothing: cuGetErrorString(code: u32, text: Out<*const c_char>) => device::error_text;
    Init: cuDeviceGetCount(count: Out<i32>) => device::count;
    Init: cuDeviceGet(device: Out<i32>, ordinal: i32) => device::get;
    Init: cuDeviceGetName(name: Out<c_char>, bytes: i32, device: i32) => device::name;
    Init: cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) => device::uuid;
    Init: cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) => device::total_memory;
    Init: cuDeviceGetAttribute(value: Out<i32>, attribute: u32, device: i32) => device::attribute;
    Init: cuDeviceGetPCIBusId(pci: Out<c_char>, bytes: i32, device: i32) => device::pci;
    Init: cuDevicePrimaryCtxRetain(context: Out<usize>, device: i32) => device::retain;
    Init: cuDevicePrimaryCtxRelease_v2(device: i32) => device::release;
    Init: cuCtxGetCurrent(context: Out<usize>) => device::get_current;
    Init: cuCtxSetCurrent(context: usize) => device::set_current;
    Init: cuCtxPushCurrent_v2(context: usize) => device::push_current;
    Init: cuCtxPopCurrent_v2(context: Out<usize>) => device::pop_current;
    Context: cuCtxSynchronize() => device::synchronize;

    Context: cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) => device::memory_info;
    Context: cuMemAlloc_v2(address: Out<u64>, bytes: usize) => memory::alloc;
    Context: cuMemFree_v2(address: u64) => memory::free;
    Context: cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: usize)
        => memory::alloc_async;
    Stream: cuMemFreeAsync(address: u64, stream: usize) => memory::free_async;
    Context: cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64)
        => memory::address_range;
    NoError: cuPointerGetAttribute(data: Out<u64>, attribute: u32, address: u64)
        => memory::pointer_attribute;
    Context: cuMemHostRegister_v2(address: u64, bytes: usize, flags: u32) => memory::register;
    Context: cuMemHostUnregister(address: u64) => memory::unregister;

    Context: cuIpcGetMemHandle(handle: Out<IpcHandle>, address: u64) => ipc::get_handle;
    Context: cuIpcOpenMemHandle_v2(address: Out<u64>, handle: IpcHandle, flags: u32) => ipc::open;
    Context: cuIpcCloseMemHandle(address: u64) => ipc::close;
    Context: cuIpcGetEventHandle(handle: Out<IpcHandle>, event: usize) => event::get_handle;
    Context: cuIpcOpenEventHandle(event: Out<usize>, handle: IpcHandle) => event::open;

    NoError: cuMemGetAllocationGranularity(
        bytes: Out<usize>, prop: In<AllocationProp>, option: u32
    ) => vmm::granularity;
    NoError: cuMemCreate(
        handle: Out<u64>, bytes: usize, prop: In<AllocationProp>, flags: u64
    ) => vmm::create;
    NoError: cuMemRelease(handle: u64) => vmm::release;
    NoError: cuMemAddressReserve(
        address: Out<u64>, bytes: usize, alignment: usize, wish: u64, flags: u64
    ) => vmm::reserve;
    NoError: cuMemAddressFree(address: u64, bytes: usize) => vmm::unreserve;
    NoError: cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64)
        => vmm::map;
    NoError: cuMemUnmap(address: u64, bytes: usize) => vmm::unmap;
    NoError: cuMemSetAccess(address: u64, bytes: usize, access: In<AccessDesc>, count: usize)
        => vmm::set_access;
    NoError: cuMemExportToShareableHandle(out: Out<i32>, handle: u64, kind: u32, flags: u64)
        => vmm::export;
    NoError: cuMemImportFromShareableHandle(handle: Out<u64>, shared: u64, kind: u32)
        => vmm::import;
    NoError: cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) => vmm::retain;

    Context: cuStreamCreate(stream: Out<usize>, flags: u32) => stream::create;
    Context: cuStreamDestroy_v2(stream: usize) => stream::destroy;
    Context: cuStreamQuery(stream: usize) => stream::query;
    Context: cuStreamIsCapturing(stream: usize, status: Out<u32>) => stream::is_capturing;
    Context: cuStreamSynchronize(stream: usize) => stream::synchronize;
    Stream: cuStreamWaitEvent(stream: usize, event: usize, flags: u32) => event::stream_wait;
    Context: cuEventCreate(event: Out<usize>, flags: u32) => event::create;
    Context: cuEventDestroy_v2(event: usize) => event::destroy;
    Stream: cuEventRecord(event: usize, stream: usize) => event::record;
    Context: cuEventQuery(event: usize) => event::query;
    Context: cuEventSynchronize(event: usize) => event::synchronize;
    Context: cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize)
        => event::elapsed;

    Stream: cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) => copy::any;
    Stream: cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize)
        => copy::to_device;
    Stream: cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: usize)
        => copy::to_host;
    Stream: cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize)
        => copy::on_device;
    Stream: cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: usize) => copy::fill;
    Stream: cuMemcpyBatchAsync_v2(
        to: Out<u64>, from: Out<u64>, bytes: Out<usize>, count: usize,
        attributes: Out<CopyAttributes>, attributes_from: Out<usize>, attributes_count: usize,
        stream: usize,
    ) => batch;

    Context: cuModuleLoadData(module: Out<usize>, image: Text) => kernel::load;
    Context: cuModuleUnload(module: usize) => kernel::unload;
    Context: cuModuleGetFunction(function: Out<usize>, module: usize, name: Text)
        => kernel::function;
    Stream: cuLaunchKernel(
        function: usize,
        grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: usize, params: Params, extra: usize,
    ) => launch;
}

#[expect(clippy::too_many_arguments, reason = "the driver's own arguments")]
fn batch(
    call: &Call,
    to: Out<u64>,
    from: Out<u64>,
    bytes: Out<usize>,
    count: usize,
    attributes: Out<CopyAttributes>,
    attributes_from: Out<usize>,
    attributes_count: usize,
    stream: usize,
) -> Result<(), u32> {
    let batch = Batch { to, from, bytes, count, attributes, attributes_from, attributes_count };
    copy::batch(call, &batch, stream)
}

#[expect(clippy::too_many_arguments, reason = "the driver's own arguments")]
fn launch(
    call: &Call,
    function: usize,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared_bytes: u32,
    stream: usize,
    params: Params,
    extra: usize,
) -> Result<(), u32> {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let shape = Shape { grid, block, shared_bytes, extra };
    kernel::launch(call, function, shape, stream, params)
}

/// How many violations were recorded in this process.
///
/// # Safety
/// There is nothing to promise.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_violations() -> u64 {
    violation::count()
}

/// Replaces the faults that were injected; an empty schedule ends calls that hang by one. 1 when
/// the schedule cannot be read.
///
/// # Safety
/// `schedule` is null or a string with its end.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_inject(schedule: Text) -> u32 {
    match schedule.get() {
        Ok(text) if fault::inject(&text) => 0,
        _ => 1,
    }
}
