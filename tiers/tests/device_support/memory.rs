//! The GPU in memory, as the suite wants it.

use std::cell::RefCell;
use std::sync::Arc;

use kvtide_tiers::io::{Arena, SharedMemory};
use kvtide_tiers::tier::device::{
    DeviceDone, DeviceOptions, DeviceWorker, MemoryGpu, MemoryGpuControl, MemoryGpuOptions,
    OpenMemory,
};

use super::{EngineMemory, Maker};

pub(crate) struct MemoryMaker {
    gpu: RefCell<Option<MemoryGpu>>,
    pub(crate) control: MemoryGpuControl,
}

impl MemoryMaker {
    pub(crate) fn new() -> MemoryMaker {
        let options = MemoryGpuOptions {
            pool_bytes: 16 << 20,
            staging_bytes: 2 << 20,
            ..MemoryGpuOptions::default()
        };
        let (gpu, control) = MemoryGpu::new(options);
        MemoryMaker { gpu: RefCell::new(Some(gpu)), control }
    }
}

impl EngineMemory for SharedMemory {
    fn write(&self, bytes: &[u8]) {
        self.write_at(0, bytes).unwrap();
    }

    fn read(&self) -> Vec<u8> {
        let mut out = vec![0; self.bytes() as usize];
        self.read_at(0, &mut out).unwrap();
        out
    }

    fn share(&self) -> OpenMemory {
        let fd = self.fd().try_clone_to_owned().unwrap();
        OpenMemory::Shared(SharedMemory::from_fd(fd).unwrap())
    }
}

impl Maker for MemoryMaker {
    fn worker(
        &self,
        _: u64,
        _: u64,
        _: &Arc<Arena>,
        options: DeviceOptions,
        done: Box<dyn FnMut(DeviceDone) + Send>,
    ) -> DeviceWorker {
        let gpu = self.gpu.borrow_mut().take().unwrap();
        DeviceWorker::start(move || Ok(Box::new(gpu)), options, done).unwrap()
    }

    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory> {
        Box::new(SharedMemory::create("kvtide-test", bytes).unwrap())
    }

    fn mapped(&self) -> Option<usize> {
        Some(self.control.mapped())
    }
}
