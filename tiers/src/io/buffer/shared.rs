//! Memory that two processes see: a memfd sealed against shrinking and growing, mapped whole.
//!
//! The other process may write at any time, so nothing here gives out references: bytes are copied
//! in and out, and only the copy is ever trusted. A file that could shrink under the mapping would
//! turn an access into SIGBUS; such files are refused.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use super::mapping::Mapping;
use crate::io::RegionError;

/// `f_type` of tmpfs, where memfds live unless they are made of reserved huge pages.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A sealed memfd and its mapping.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    mapping: Mapping,
}

impl SharedMemory {
    /// Makes new zeroed memory of `bytes`. `name` shows up in `/proc/PID/maps`.
    ///
    /// # Errors
    /// What the operating system says, and `InvalidInput` for 0 bytes.
    pub fn create(name: &str, bytes: u64) -> io::Result<SharedMemory> {
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "shared memory of 0 bytes"));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&fd, bytes)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Mapping::of_file(fd.as_fd(), bytes)?;
        mapping.advise_huge();
        Ok(SharedMemory { fd, mapping })
    }

    /// Maps what another process made.
    ///
    /// # Errors
    /// When it is not a memfd of ordinary pages, is not sealed against shrinking, is empty, or
    /// cannot be mapped for reading and writing.
    pub fn from_fd(fd: OwnedFd) -> Result<SharedMemory, RegionError> {
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| RegionError::NotMemfd)?;
        let kind = rustix::fs::fstatfs(&fd).map_err(|errno| RegionError::Map(errno.into()))?;
        // Reserved huge pages can be taken away by punching a hole; touching it is then SIGBUS.
        if kind.f_type as i64 != TMPFS_MAGIC {
            return Err(RegionError::NotMemfd);
        }
        if !seals.contains(SealFlags::SHRINK) {
            return Err(RegionError::NotSealed);
        }
        let stat = rustix::fs::fstat(&fd).map_err(|errno| RegionError::Map(errno.into()))?;
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if bytes == 0 {
            return Err(RegionError::Empty);
        }
        let mapping = Mapping::of_file(fd.as_fd(), bytes).map_err(RegionError::Map)?;
        Ok(SharedMemory { fd, mapping })
    }

    /// The memfd, to be passed to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`], and then nothing was written.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        if self.mapping.copy_in(offset, bytes) {
            return Ok(());
        }
        Err(self.out_of_range(offset, bytes.len()))
    }

    /// Copies `bytes` to `offset`, past the caches: for what this process does not read again.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`], and then nothing was written.
    pub fn stream_at(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        if self.mapping.stream_in(offset, bytes) {
            return Ok(());
        }
        Err(self.out_of_range(offset, bytes.len()))
    }

    /// Asks for bytes that are read soon; only a hint.
    pub fn prefetch(&self, offset: u64, len: usize) {
        self.mapping.prefetch(offset, len);
    }

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`], and then `out` is as it was.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        if self.mapping.copy_out(offset, out) {
            return Ok(());
        }
        Err(self.out_of_range(offset, out.len()))
    }

    fn out_of_range(&self, offset: u64, len: usize) -> RegionError {
        RegionError::OutOfRange { offset, len: len as u64, have: self.bytes() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let one = SharedMemory::create("kvtide-test", 10_000).unwrap();
        let two = SharedMemory::from_fd(one.fd().try_clone_to_owned().unwrap()).unwrap();
        one.write_at(5000, b"tide").unwrap();
        let mut out = [0; 4];
        two.read_at(5000, &mut out).unwrap();
        assert_eq!(&out, b"tide");
        assert_eq!(two.bytes(), 10_000);
        assert!(matches!(one.write_at(9_998, b"tide"), Err(RegionError::OutOfRange { .. })));
        assert!(matches!(two.read_at(u64::MAX, &mut out), Err(RegionError::OutOfRange { .. })));
    }

    #[test]
    fn what_could_shrink_or_is_no_memfd_is_refused() {
        let fd = rustix::fs::memfd_create("kvtide-test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let unsealed = SharedMemory::from_fd(fd.try_clone().unwrap());
        assert!(matches!(unsealed, Err(RegionError::NotSealed)));
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(SharedMemory::from_fd(fd).is_ok());
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        assert!(matches!(SharedMemory::from_fd(file.into()), Err(RegionError::NotMemfd)));
        let (read, _write) = std::io::pipe().unwrap();
        assert!(matches!(SharedMemory::from_fd(read.into()), Err(RegionError::NotMemfd)));
        let empty = rustix::fs::memfd_create("kvtide-test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK).unwrap();
        assert!(matches!(SharedMemory::from_fd(empty), Err(RegionError::Empty)));
    }

    #[test]
    fn a_memfd_that_may_not_be_written_is_refused() {
        let fd = rustix::fs::memfd_create("kvtide-test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
        assert!(matches!(SharedMemory::from_fd(fd), Err(RegionError::Map(_))));
    }
}
