//! One mapping of memory, and nothing else: where it came from and what may be read from it is the
//! business of its owner.
//!
//! Invariant: `base..base + bytes` stays mapped, readable and writable until the value is dropped.

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::fd::BorrowedFd;

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::stream::{prefetch, stream};

/// Bytes of a huge page.
#[cfg(feature = "store")]
pub(crate) const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// A mapping. Reading and writing go through raw pointers, because another process or the kernel
/// may write at the same time.
#[derive(Debug)]
pub(crate) struct Mapping {
    map: MmapRaw,
    /// Bytes in front of the first one that is used, for alignment.
    skip: usize,
    bytes: usize,
}

fn length(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
}

impl Mapping {
    /// Maps `bytes` of a file, shared. The file must be at least as long and must never shrink.
    pub(crate) fn of_file(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<Mapping> {
        let bytes = length(bytes)?;
        let map = MmapOptions::new().len(bytes).map_raw(fd.as_raw_fd())?;
        Ok(Mapping { map, skip: 0, bytes })
    }

    /// Maps `bytes` of fresh private memory whose first byte lies on a huge page's boundary.
    #[cfg(feature = "store")]
    pub(crate) fn anonymous(bytes: u64) -> io::Result<Mapping> {
        let wanted = length(bytes)?;
        let all = length(bytes.saturating_add(HUGE_PAGE_BYTES))?;
        let map = MmapRaw::from(MmapOptions::new().len(all).no_reserve_swap().map_anon()?);
        let huge = HUGE_PAGE_BYTES as usize;
        let skip = (map.as_ptr() as usize).wrapping_neg() % huge;
        Ok(Mapping { map, skip, bytes: wanted })
    }

    /// Bytes of the mapping.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The first byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.skip)
    }

    /// Whether `len` bytes from `offset` on lie in the mapping.
    pub(crate) fn holds(&self, offset: u64, len: usize) -> bool {
        offset.checked_add(len as u64).is_some_and(|end| end <= self.bytes())
    }

    /// Asks for transparent huge pages. That they are refused is no error.
    pub(crate) fn advise_huge(&self) -> bool {
        self.map.advise(Advice::HugePage).is_ok()
    }

    /// Lets the kernel provide the pages of a range, without changing what is in them. `false`
    /// where the kernel cannot, or has no memory left.
    #[cfg(feature = "store")]
    pub(crate) fn populate(&self, offset: u64, len: u64) -> bool {
        let (Ok(start), Ok(len)) = (usize::try_from(offset), usize::try_from(len)) else {
            return false;
        };
        if !self.holds(offset, len) {
            return false;
        }
        self.map.advise_range(Advice::PopulateWrite, self.skip + start, len).is_ok()
    }

    /// Copies bytes out. `false` when the range is not in the mapping.
    pub(crate) fn copy_out(&self, offset: u64, out: &mut [u8]) -> bool {
        if !self.holds(offset, out.len()) {
            return false;
        }
        // SAFETY: the range lies in the mapping (checked above), which is readable and lives as
        // long as `self`; `out` is ours alone and cannot overlap memory that is only reachable
        // through this mapping. Another process may write while we read: the bytes are then any
        // mix, which callers expect, and no reference to them is ever made.
        unsafe {
            let from = self.base().add(offset as usize).cast_const();
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
        }
        true
    }

    /// Asks for a range to be brought into the nearest cache, if it is in the mapping.
    pub(crate) fn prefetch(&self, offset: u64, len: usize) {
        if self.holds(offset, len) {
            prefetch(self.base().wrapping_add(offset as usize), len);
        }
    }

    /// Copies bytes in, past the caches. `false` when the range is not in the mapping.
    pub(crate) fn stream_in(&self, offset: u64, bytes: &[u8]) -> bool {
        if !self.holds(offset, bytes.len()) {
            return false;
        }
        // SAFETY: as in `copy_in`.
        unsafe { stream(bytes.as_ptr(), self.base().add(offset as usize), bytes.len()) };
        true
    }

    /// Copies bytes in. `false` when the range is not in the mapping.
    pub(crate) fn copy_in(&self, offset: u64, bytes: &[u8]) -> bool {
        if !self.holds(offset, bytes.len()) {
            return false;
        }
        // SAFETY: the range lies in the mapping (checked above), which is writable and lives as
        // long as `self`; `bytes` cannot overlap it, because no reference into a mapping that is
        // written through here is ever made. Another process may read or write at the same time
        // and sees any mix.
        unsafe {
            let to = self.base().add(offset as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        true
    }
}
