//! The GPU of the CUDA driver, as the suite wants it: the fake driver, or a real one where the
//! environment has `KVTIDE_TEST_GPU=1`.

use std::sync::{Arc, OnceLock};

use kvtide_tiers::io::Arena;
use kvtide_tiers::tier::device::cuda::{
    CudaGpu, CudaGpuOptions, EngineMemory as CudaMemory, EngineMemoryKind, GpuChoice,
    use_driver_library,
};
use kvtide_tiers::tier::device::{DeviceDone, DeviceOptions, DeviceWorker, Gpu, OpenMemory, probe};

use super::{EngineMemory, Maker};

/// Whether a real GPU was asked for.
pub(crate) fn is_real() -> bool {
    std::env::var_os("KVTIDE_TEST_GPU").is_some_and(|value| value == "1")
}

/// Chooses the driver's library, once.
pub(crate) fn choose_driver() {
    static CHOSEN: OnceLock<()> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        if !is_real() {
            use_driver_library(&fakecuda::library()).unwrap();
        }
        let gpus = probe(None).unwrap();
        let fake = gpus[0].name.starts_with("Fake");
        assert_eq!(fake, !is_real(), "the wrong driver: {}", gpus[0].name);
        println!("GPU under test: {}", gpus[0].name);
    });
}

#[derive(Default)]
pub(crate) struct CudaMaker {
    pub(crate) batch_copies: bool,
}

impl Maker for CudaMaker {
    fn worker(
        &self,
        pool_bytes: u64,
        staging_bytes: u64,
        arena: &Arc<Arena>,
        options: DeviceOptions,
        done: Box<dyn FnMut(DeviceDone) + Send>,
    ) -> DeviceWorker {
        choose_driver();
        let gpu = CudaGpuOptions {
            staging_bytes: Some(staging_bytes),
            batch_copies: self.batch_copies,
            ..CudaGpuOptions::default()
        };
        let arena = Arc::clone(arena);
        let open = move || {
            let gpu = CudaGpu::open(GpuChoice::Ordinal(0), pool_bytes, &arena, &gpu)?;
            Ok(Box::new(gpu) as Box<dyn Gpu>)
        };
        DeviceWorker::start(open, options, done).unwrap()
    }

    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory> {
        choose_driver();
        let choice = GpuChoice::Ordinal(0);
        Box::new(CudaMemory::create(choice, bytes, EngineMemoryKind::Vmm, 0).unwrap())
    }

    fn check(&self) {
        if !is_real() {
            assert_eq!(fakecuda::violations(), 0, "a rule of the driver was broken");
        }
    }
}

impl EngineMemory for CudaMemory {
    fn write(&self, bytes: &[u8]) {
        self.write_at(0, bytes).unwrap();
    }

    fn read(&self) -> Vec<u8> {
        let mut out = vec![0; self.bytes() as usize];
        self.read_at(0, &mut out).unwrap();
        out
    }

    fn share(&self) -> OpenMemory {
        CudaMemory::share(self).unwrap()
    }
}
