//! Copies between host and device memory for tests that may not be `unsafe`.

use kvtide_kernels::driver::{Context, CudaError, Stream};

/// A stream that writes and reads device memory by its address. Safe because this driver looks at
/// each range before it touches it, and takes host memory that is not registered at the call; on
/// no other driver.
pub struct Copies(Stream);

impl Copies {
    /// Makes a stream.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the driver is a real one.
    pub fn new(context: &Context) -> Result<Copies, CudaError> {
        let name = &context.info().name;
        assert!(name.starts_with("Fake GPU "), "{name} is no GPU of this driver");
        Stream::new(context).map(Copies)
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.0
    }

    /// Queues a copy to a device address, and does not wait for it.
    ///
    /// # Errors
    /// A range that is not of device memory.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: this driver (see `new`) refuses a range that is not of live device memory, and
        // has taken the bytes when the call returns.
        unsafe { self.0.copy_to_device(to, bytes.as_ptr(), bytes.len() as u64) }
    }

    /// Copies from a device address, behind all that was queued.
    ///
    /// # Errors
    /// A range that is not of device memory, or work that failed.
    pub fn read(&self, from: u64, out: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: as for `write`; `out` is borrowed exclusively until the stream was waited for.
        unsafe { self.0.copy_to_host(out.as_mut_ptr(), from, out.len() as u64) }?;
        self.0.synchronize()
    }
}
