//! What a failed call looks like.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::library;

/// Calls made by a `Drop` that failed although the driver was not lost.
static FAILED_DROPS: AtomicU64 = AtomicU64::new(0);

/// A call of the driver that failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CudaError {
    /// The driver's code (`CUresult`), which may be one that these bindings do not know.
    pub code: u32,
    /// The name of the call.
    pub call: &'static str,
}

impl CudaError {
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_NOT_SUPPORTED`: this driver or GPU cannot do it.
    pub const NOT_SUPPORTED: u32 = 801;
    /// `CUDA_ERROR_NOT_READY`: asked whether work is done, and it is not.
    pub const NOT_READY: u32 = 600;

    /// Whether the context is lost: every later call of this process on this GPU fails too, and
    /// only a new process helps.
    ///
    /// These are the codes for which NVIDIA's header says that the process must be ended, the
    /// uncorrectable memory and link errors, and a context that is gone.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        matches!(self.code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
    }

    /// Whether the GPU has no memory left for this call; later calls are not affected.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == Self::OUT_OF_MEMORY
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, text) = library::describe(self.code);
        let name = name.as_deref().unwrap_or("unknown error");
        write!(out, "{} failed with {name} ({})", self.call, self.code)?;
        match text {
            Some(text) => write!(out, ": {text}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for CudaError {}

/// How many calls made by a `Drop` have failed in this process although the driver was not lost.
/// Anything but 0 is a bug in the caller: for example memory that was freed twice.
#[must_use]
pub fn failed_drops() -> u64 {
    FAILED_DROPS.load(Ordering::Relaxed)
}

/// Ends a call made by a `Drop`.
pub(super) fn dropped(result: Result<(), CudaError>) {
    if result.is_err_and(|error| !error.is_sticky()) {
        FAILED_DROPS.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_lose_the_context_are_sticky() {
        let sticky = |code| CudaError { code, call: "cuCtxSynchronize" }.is_sticky();
        for code in [214, 220, 226, 700, 714, 715, 716, 717, 718, 719] {
            assert!(sticky(code), "{code}");
        }
        for code in [1, 2, 3, 100, 201, 600, 701, 712, 713, 801, 917] {
            assert!(!sticky(code), "{code}");
        }
    }

    #[test]
    fn a_code_without_a_library_is_still_readable() {
        let error = CudaError { code: 4711, call: "cuInit" };
        assert_eq!(error.to_string(), "cuInit failed with unknown error (4711)");
    }
}
