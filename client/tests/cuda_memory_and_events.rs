//! What the client does with the CUDA driver, against the fake one.

#![cfg(feature = "cuda")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::sync::Mutex;

use kvtide_client::cuda::driver::{
    Context, DeviceBuffer, Driver, VmmBuffer, address_range, use_library,
};
use kvtide_client::cuda::{CudaPool, PoolKind};

/// Faults and contexts are those of the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn context() -> Context {
    use_library(&fakecuda::library()).unwrap();
    let driver = Driver::open().unwrap();
    assert!(driver.device(0).unwrap().name.starts_with("Fake"));
    Context::new(&driver, 0).unwrap()
}

#[test]
fn adopting_memory_leaves_no_context_current_on_the_callers_thread() {
    let _alone = ONE_AT_A_TIME.lock();
    let context = context();
    let (legacy, vmm) = (
        DeviceBuffer::alloc(&context, 1 << 16).unwrap(),
        VmmBuffer::create(&context, 2 << 20).unwrap(),
    );
    for address in [legacy.address(), vmm.address()] {
        assert_eq!(address_range(address).unwrap_err().code, 201, "no context is current before");
        let pool = CudaPool::adopt(&context, address + 4096, 8192).unwrap();
        assert_eq!((pool.address(), pool.bytes()), (address + 4096, 8192));
        assert_eq!(address_range(address).unwrap_err().code, 201, "none is current afterwards");
        let outside = CudaPool::adopt(&context, address + 4096, 4 << 20).unwrap_err();
        assert!(outside.to_string().contains("outside"), "{outside}");
        assert_eq!(address_range(address).unwrap_err().code, 201, "nor after an error");
    }
    drop(CudaPool::allocate(&context, 4096, PoolKind::Legacy).unwrap());
    assert_eq!(fakecuda::violations(), 0);
}
