//! GPU memory as an engine has it: of one of the two kinds that can be shared, with a ring of
//! events. For Rust engines, and for tests; the daemon itself makes none.

use kvtide_kernels::driver::{Context, CudaError, DeviceBuffer, Driver, Event, Stream, VmmBuffer};

use super::{GpuChoice, error_of};
use crate::block::{GPU_EVENTS_MAX, GpuUuid, IpcHandle};
use crate::tier::device::gpu::{GpuError, OpenMemory};

/// How the memory is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineMemoryKind {
    /// By cuMemAlloc; shared by an interprocess handle, with other processes only.
    Ipc,
    /// By cuMemCreate; shared by a file descriptor.
    Vmm,
}

enum Allocation {
    Ipc(DeviceBuffer),
    Vmm(VmmBuffer),
}

/// Memory of an engine, zeroed at first. It must outlive the daemon's use of it: unregister the
/// region before it is dropped.
pub struct EngineMemory {
    allocation: Allocation,
    bytes: u64,
    stream: Stream,
    events: Vec<Event>,
}

impl EngineMemory {
    /// Allocates memory on a GPU, and as many events.
    ///
    /// # Errors
    /// When there is no such GPU, it has no memory left, or more than [`GPU_EVENTS_MAX`] events
    /// are asked for.
    pub fn create(
        choice: GpuChoice,
        bytes: u64,
        kind: EngineMemoryKind,
        events: usize,
    ) -> Result<EngineMemory, GpuError> {
        let failed = |why: String| GpuError::Failed(why);
        if events > GPU_EVENTS_MAX {
            return Err(failed(format!("{events} events; at most {GPU_EVENTS_MAX} are allowed")));
        }
        let driver = Driver::open().map_err(|why| failed(why.to_string()))?;
        let devices = driver.devices().map_err(error_of)?;
        let device = devices.iter().find(|device| match choice {
            GpuChoice::Uuid(uuid) => device.uuid == uuid.0,
            GpuChoice::Ordinal(ordinal) => device.ordinal == ordinal,
        });
        let device = device.ok_or_else(|| failed(format!("there is no GPU {choice:?}")))?;
        let context = Context::new(&driver, device.ordinal).map_err(error_of)?;
        let make = || {
            let allocation = match kind {
                EngineMemoryKind::Ipc => Allocation::Ipc(DeviceBuffer::alloc(&context, bytes)?),
                EngineMemoryKind::Vmm => Allocation::Vmm(VmmBuffer::create(&context, bytes)?),
            };
            let stream = Stream::new(&context)?;
            let events = (0..events).map(|_| Event::interprocess(&context));
            let events = events.collect::<Result<Vec<Event>, CudaError>>()?;
            Ok(EngineMemory { allocation, bytes, stream, events })
        };
        let memory: EngineMemory = make().map_err(error_of)?;
        // SAFETY: the range is the whole allocation, and the stream is waited for at once.
        unsafe { memory.stream.fill(memory.address(), 0, bytes) }.map_err(error_of)?;
        memory.stream.synchronize().map_err(error_of)?;
        Ok(memory)
    }

    /// Which GPU.
    pub fn gpu(&self) -> GpuUuid {
        GpuUuid(self.stream.context().info().uuid)
    }

    /// Its device address in this process.
    pub fn address(&self) -> u64 {
        match &self.allocation {
            Allocation::Ipc(buffer) => buffer.address(),
            Allocation::Vmm(buffer) => buffer.address(),
        }
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies bytes in, and waits for it.
    ///
    /// # Errors
    /// [`GpuError::Place`] when they do not fit; else what the GPU says.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), GpuError> {
        let at = self.place(offset, bytes.len())?;
        // SAFETY: the device range lies in the allocation (checked above); the stream is waited
        // for before the borrow of `bytes` ends.
        let queued = unsafe { self.stream.copy_to_device(at, bytes.as_ptr(), bytes.len() as u64) };
        self.stream.synchronize().map_err(error_of)?;
        queued.map_err(error_of)
    }

    /// Copies bytes out, behind what was recorded so far.
    ///
    /// # Errors
    /// As [`EngineMemory::write_at`].
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), GpuError> {
        let at = self.place(offset, out.len())?;
        // SAFETY: as for `write_at`; `out` is borrowed exclusively until the stream was waited for.
        let queued = unsafe { self.stream.copy_to_host(out.as_mut_ptr(), at, out.len() as u64) };
        self.stream.synchronize().map_err(error_of)?;
        queued.map_err(error_of)
    }

    /// What a daemon opens: a handle, or a descriptor of the whole allocation.
    ///
    /// # Errors
    /// What the driver says.
    pub fn share(&self) -> Result<OpenMemory, GpuError> {
        match &self.allocation {
            Allocation::Ipc(buffer) => {
                let handle = IpcHandle(buffer.ipc_handle().map_err(error_of)?);
                Ok(OpenMemory::Ipc { handle, offset: 0 })
            }
            Allocation::Vmm(buffer) => {
                let fd = buffer.export_fd().map_err(error_of)?;
                Ok(OpenMemory::Vmm { fd, allocation_bytes: buffer.bytes(), offset: 0 })
            }
        }
    }

    /// The handles of the ring of events.
    ///
    /// # Errors
    /// What the driver says.
    pub fn event_handles(&self) -> Result<Vec<IpcHandle>, GpuError> {
        let handles = self.events.iter().map(|event| event.ipc_handle().map(IpcHandle));
        handles.collect::<Result<Vec<IpcHandle>, CudaError>>().map_err(error_of)
    }

    /// Records an event behind what this memory's stream has queued.
    ///
    /// # Errors
    /// [`GpuError::Event`] when there is no such event; else what the driver says.
    pub fn record(&self, event: u32) -> Result<(), GpuError> {
        let event = self.events.get(event as usize).ok_or(GpuError::Event)?;
        event.record(&self.stream).map_err(error_of)
    }

    fn place(&self, offset: u64, len: usize) -> Result<u64, GpuError> {
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(GpuError::Place);
        }
        Ok(self.address() + offset)
    }
}
