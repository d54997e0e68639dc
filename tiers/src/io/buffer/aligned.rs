//! Heap memory for the device: whole pages, page-aligned, zeroed.
//!
//! Invariant: `start` points to `bytes` initialised bytes that this value alone owns. The address
//! does not change when the value moves, so the kernel may hold it while the owner travels.

use std::alloc::Layout;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::block::{PAGE_BYTES, page_ceil};

/// Whole pages of heap memory.
pub struct AlignedBuf {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is owned by this value alone; nothing in it belongs to a thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Zeroed memory of at least `bytes`, rounded up to whole pages (one at least).
    pub fn zeroed(bytes: usize) -> AlignedBuf {
        let bytes = page_ceil(bytes.max(1) as u64) as usize;
        let layout = Self::layout(bytes);
        // SAFETY: the layout has a size of at least one page.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        AlignedBuf { start, bytes }
    }

    /// A copy of `bytes`, padded with zeroes to whole pages.
    pub fn of(bytes: &[u8]) -> AlignedBuf {
        let mut buffer = AlignedBuf::zeroed(bytes.len());
        for (to, from) in buffer.iter_mut().zip(bytes) {
            *to = *from;
        }
        buffer
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, PAGE_BYTES as usize)
            .expect("a length that was rounded up to pages without overflow")
    }

    /// The address of the first byte, for the ring and the GPU.
    #[cfg(any(feature = "uring", feature = "cuda"))]
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes of the memory, without looking at it.
    #[cfg(any(feature = "uring", feature = "cuda"))]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with the same layout, and freed only here.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), Self::layout(self.bytes)) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points to `bytes` initialised bytes owned by `self`. While the kernel
        // writes to them, the value is inside the ring's table, which never dereferences it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Clone for AlignedBuf {
    fn clone(&self) -> AlignedBuf {
        AlignedBuf::of(self)
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "AlignedBuf({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_zeroed_and_padded() {
        let buffer = AlignedBuf::of(&[7; 5000]);
        assert_eq!(buffer.len(), 8192);
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
        assert!(buffer[..5000].iter().all(|byte| *byte == 7));
        assert!(buffer[5000..].iter().all(|byte| *byte == 0));
        assert_eq!(AlignedBuf::zeroed(0).len(), 4096);
        assert_eq!(&*buffer.clone(), &*buffer);
    }
}
