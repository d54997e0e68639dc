//! Streams, the events that order them, and copies.

use std::ffi::c_void;
use std::fmt;
use std::time::Duration;

use super::device::Context;
use super::error::{CudaError, dropped};
use super::library::Handle;
use super::memory::size;
use super::sys;

/// The most copies that one call of the batch copy takes: drivers have crashed on some ten
/// thousands.
pub const BATCH_COPIES_MAX: usize = 4096;

/// `CU_STREAM_NON_BLOCKING`: no implicit order with the legacy default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: u32 = 4;

/// A queue of work for a GPU, run in order.
pub struct Stream {
    context: Context,
    stream: Handle,
    /// Whether `Drop` gives it up.
    owned: bool,
}

/// One copy of a batch. Either side may be device memory or registered host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    /// Where to, as an address.
    pub dst: u64,
    /// Where from, as an address.
    pub src: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl Stream {
    /// A stream of its own, without order against any other.
    ///
    /// # Errors
    /// When the driver is lost or out of memory.
    pub fn new(context: &Context) -> Result<Stream, CudaError> {
        let _entered = context.enter()?;
        let mut stream: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one handle, which `Drop` destroys once.
        unsafe { context.calls().cuStreamCreate(&raw mut stream, NON_BLOCKING) }?;
        Ok(Stream { context: context.clone(), stream: Handle(stream), owned: true })
    }

    /// A stream that another part of the process made (`CUstream`), such as an engine's own.
    ///
    /// # Safety
    /// It must be a stream of `context` and outlive the value. 0 is the legacy default stream.
    #[must_use]
    pub unsafe fn borrow_raw(context: &Context, raw: u64) -> Stream {
        let stream = std::ptr::with_exposed_provenance_mut(usize::try_from(raw).unwrap_or(0));
        Stream { context: context.clone(), stream: Handle(stream), owned: false }
    }

    /// The context that it was made in.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Blocks until all that was queued is done.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive.
        unsafe { self.context.calls().cuStreamSynchronize(self.stream.0) }
    }

    /// Whether all that was queued is done. Does not block.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive.
        done(unsafe { self.context.calls().cuStreamQuery(self.stream.0) })
    }

    /// Whether what is queued now goes into a graph that is being captured (or whose capture was
    /// broken and is not ended yet) in place of the GPU: an event that is recorded then orders
    /// nothing, and [`synchronize`](Self::synchronize) breaks the capture. Does not block.
    ///
    /// # Errors
    /// When the driver is lost, or this is the legacy default stream while another stream of the
    /// context captures.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        let _entered = self.context.enter()?;
        // `CU_STREAM_CAPTURE_STATUS_NONE`
        let mut status = 0;
        // SAFETY: the stream is alive, and the call writes one enumeration of the size of `u32`.
        unsafe { self.context.calls().cuStreamIsCapturing(self.stream.0, &raw mut status) }?;
        Ok(status != 0)
    }

    /// Queues a wait for what `event` stands for at this moment: its newest record. An event that
    /// was never recorded is not waited for.
    ///
    /// # Errors
    /// When the driver is lost.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: stream and event are alive.
        unsafe { self.context.calls().cuStreamWaitEvent(self.stream.0, event.event.0, 0) }
    }

    /// Queues a copy from host memory to device memory. Memory that is not registered is read
    /// before the call returns, which then blocks.
    ///
    /// # Errors
    /// When the driver refuses the range or is lost.
    ///
    /// # Safety
    /// Both ranges stay allocated until the stream has run the copy; nobody writes the source,
    /// and nobody reads or writes the destination, until then.
    pub unsafe fn copy_to_device(
        &self,
        dst: u64,
        src: *const u8,
        bytes: u64,
    ) -> Result<(), CudaError> {
        let bytes = size(bytes, "cuMemcpyHtoDAsync_v2")?;
        let _entered = self.context.enter()?;
        let src = src.cast::<c_void>();
        // SAFETY: the stream is alive, and the caller vouches for the ranges.
        unsafe { self.context.calls().cuMemcpyHtoDAsync_v2(dst, src, bytes, self.stream.0) }
    }

    /// Queues a copy from device memory to host memory. Into memory that is not registered, the
    /// call blocks until the copy is done.
    ///
    /// # Errors
    /// When the driver refuses the range or is lost.
    ///
    /// # Safety
    /// As [`copy_to_device`](Self::copy_to_device).
    pub unsafe fn copy_to_host(&self, dst: *mut u8, src: u64, bytes: u64) -> Result<(), CudaError> {
        let bytes = size(bytes, "cuMemcpyDtoHAsync_v2")?;
        let _entered = self.context.enter()?;
        let dst = dst.cast::<c_void>();
        // SAFETY: the stream is alive, and the caller vouches for the ranges.
        unsafe { self.context.calls().cuMemcpyDtoHAsync_v2(dst, src, bytes, self.stream.0) }
    }

    /// Queues a copy within device memory. The ranges must not overlap.
    ///
    /// # Errors
    /// When the driver refuses a range or is lost.
    ///
    /// # Safety
    /// As [`copy_to_device`](Self::copy_to_device).
    pub unsafe fn copy_on_device(&self, dst: u64, src: u64, bytes: u64) -> Result<(), CudaError> {
        let bytes = size(bytes, "cuMemcpyDtoDAsync_v2")?;
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive, and the caller vouches for the ranges.
        unsafe { self.context.calls().cuMemcpyDtoDAsync_v2(dst, src, bytes, self.stream.0) }
    }

    /// Queues a fill of device memory with one byte.
    ///
    /// # Errors
    /// When the driver refuses the range or is lost.
    ///
    /// # Safety
    /// As [`copy_to_device`](Self::copy_to_device), for the destination.
    pub unsafe fn fill(&self, dst: u64, value: u8, bytes: u64) -> Result<(), CudaError> {
        let bytes = size(bytes, "cuMemsetD8Async")?;
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive, and the caller vouches for the range.
        unsafe { self.context.calls().cuMemsetD8Async(dst, value, bytes, self.stream.0) }
    }

    /// Queues many copies, in no order among themselves, with one call for each
    /// [`BATCH_COPIES_MAX`] of them; where the driver has no such call (before CUDA 13), with one
    /// call for each copy. When it fails, some of them may be queued.
    ///
    /// # Errors
    /// When the driver refuses a range or is lost.
    ///
    /// # Safety
    /// As [`copy_to_device`](Self::copy_to_device), for each copy; and no destination overlaps
    /// another range of the batch.
    pub unsafe fn copy_batch(&self, copies: &[Copy]) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        for chunk in copies.chunks(BATCH_COPIES_MAX) {
            // SAFETY: the caller vouches for each copy.
            match unsafe { self.copy_chunk(chunk) } {
                Some(result) => result?,
                None => chunk.iter().try_for_each(|copy| {
                    let bytes = size(copy.bytes, "cuMemcpyAsync")?;
                    // SAFETY: the stream is alive, and the caller vouches for the ranges.
                    unsafe {
                        let calls = self.context.calls();
                        calls.cuMemcpyAsync(copy.dst, copy.src, bytes, self.stream.0)
                    }
                })?,
            }
        }
        Ok(())
    }

    /// One call of the batch copy; `None` where the driver has none.
    ///
    /// # Safety
    /// As `copy_batch`.
    unsafe fn copy_chunk(&self, copies: &[Copy]) -> Option<Result<(), CudaError>> {
        // The driver refuses copies of nothing.
        let copies = copies.iter().filter(|copy| copy.bytes > 0);
        let mut to: Vec<u64> = copies.clone().map(|copy| copy.dst).collect();
        let mut from: Vec<u64> = copies.clone().map(|copy| copy.src).collect();
        let mut bytes: Vec<usize> =
            copies.map(|copy| usize::try_from(copy.bytes).unwrap_or(usize::MAX)).collect();
        if to.is_empty() {
            return Some(Ok(()));
        }
        let anywhere = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let mut attributes = [sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: anywhere,
            dstLocHint: anywhere,
            flags: 0,
        }];
        let mut from_copy = [0_usize];
        // SAFETY: the three arrays have one entry for each copy, the last two have one entry; the
        // stream is alive, and the caller vouches for the ranges.
        unsafe {
            self.context.calls().cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                to.len(),
                attributes.as_mut_ptr(),
                from_copy.as_mut_ptr(),
                attributes.len(),
                self.stream.0,
            )
        }
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.stream.0
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Stream").field("owned", &self.owned).finish_non_exhaustive()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            dropped(self.context.enter().and_then(|_entered| {
                // SAFETY: the stream was created once and is destroyed once; the driver runs what
                // is queued to its end.
                unsafe { self.context.calls().cuStreamDestroy_v2(self.stream.0) }
            }));
        }
    }
}

/// A moment in a stream.
pub struct Event {
    context: Context,
    event: Handle,
}

impl Event {
    /// An event for this process, without a time.
    ///
    /// # Errors
    /// When the driver is lost or out of memory.
    pub fn new(context: &Context) -> Result<Event, CudaError> {
        Self::with_flags(context, DISABLE_TIMING)
    }

    /// An event for this process that keeps the time at which it was reached, for benchmarks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn timed(context: &Context) -> Result<Event, CudaError> {
        Self::with_flags(context, 0)
    }

    /// An event that other processes may open. It must outlive their use of it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn interprocess(context: &Context) -> Result<Event, CudaError> {
        Self::with_flags(context, DISABLE_TIMING | INTERPROCESS)
    }

    fn with_flags(context: &Context, flags: u32) -> Result<Event, CudaError> {
        let _entered = context.enter()?;
        let mut event: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one handle, which `Drop` destroys once.
        unsafe { context.calls().cuEventCreate(&raw mut event, flags) }?;
        Ok(Event { context: context.clone(), event: Handle(event) })
    }

    /// Opens the event of another process.
    ///
    /// # Errors
    /// When its process is gone, or the handle is not one.
    pub fn open(context: &Context, handle: [u8; 64]) -> Result<Event, CudaError> {
        let _entered = context.enter()?;
        let handle = sys::CUipcEventHandle { reserved: handle.map(|byte| byte.cast_signed() as _) };
        let mut event: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one handle, which `Drop` destroys once, and checks its input.
        unsafe { context.calls().cuIpcOpenEventHandle(&raw mut event, handle) }?;
        Ok(Event { context: context.clone(), event: Handle(event) })
    }

    /// The name by which another process of this machine opens the event.
    ///
    /// # Errors
    /// When it is not an [`interprocess`](Self::interprocess) event.
    pub fn ipc_handle(&self) -> Result<[u8; 64], CudaError> {
        let _entered = self.context.enter()?;
        let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: the call writes one handle, and the event is alive.
        unsafe { self.context.calls().cuIpcGetEventHandle(&raw mut handle, self.event.0) }?;
        Ok(handle.reserved.map(|byte| byte.cast_unsigned()))
    }

    /// Makes it stand for all that is queued in `stream` now, in place of what it stood for.
    ///
    /// # Errors
    /// When the driver is lost, or the stream is of another context.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: stream and event are alive.
        unsafe { self.context.calls().cuEventRecord(self.event.0, stream.stream.0) }
    }

    /// Whether what it stands for is done. Does not block. True before the first record.
    ///
    /// # Errors
    /// When work before it failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is alive.
        done(unsafe { self.context.calls().cuEventQuery(self.event.0) })
    }

    /// Blocks until what it stands for is done.
    ///
    /// # Errors
    /// When work before it failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is alive.
        unsafe { self.context.calls().cuEventSynchronize(self.event.0) }
    }

    /// The time from `start` to this event, to about half a microsecond. Both must be
    /// [`timed`](Self::timed) and done.
    ///
    /// # Errors
    /// When one of them is not done or not timed.
    pub fn since(&self, start: &Event) -> Result<Duration, CudaError> {
        let _entered = self.context.enter()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: the call writes one number, and both events are alive.
        let asked = unsafe {
            self.context.calls().cuEventElapsedTime(
                &raw mut milliseconds,
                start.event.0,
                self.event.0,
            )
        };
        let missing = CudaError { code: CudaError::NOT_SUPPORTED, call: "cuEventElapsedTime" };
        asked.unwrap_or(Err(missing))?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1000.0).unwrap_or_default())
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Event").finish_non_exhaustive()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        dropped(self.context.enter().and_then(|_entered| {
            // SAFETY: the event was created or opened once and is destroyed once; work that waits
            // for it keeps it in the driver.
            unsafe { self.context.calls().cuEventDestroy_v2(self.event.0) }
        }));
    }
}

/// "Not ready" is an answer, not an error.
fn done(result: Result<(), CudaError>) -> Result<bool, CudaError> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.code == CudaError::NOT_READY => Ok(false),
        Err(error) => Err(error),
    }
}
