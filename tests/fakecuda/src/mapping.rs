//! Shared memory files, address ranges, and who is alive: what the fake asks of the kernel.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::call::{INVALID_VALUE, MAP_FAILED, OPERATING_SYSTEM};

/// Size of a page, and the alignment of everything that is mapped here.
pub(crate) const PAGE: u64 = 4096;

/// A file in memory, shared with whoever opens it.
pub(crate) struct SharedFile {
    file: File,
    pub(crate) bytes: u64,
    pub(crate) inode: u64,
}

impl SharedFile {
    pub(crate) fn create(name: &std::ffi::CStr, bytes: u64) -> Result<SharedFile, u32> {
        // SAFETY: the name is a string with its end.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(OPERATING_SYSTEM);
        }
        // SAFETY: the descriptor was just opened, and has no other owner.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(bytes).map_err(|_| OPERATING_SYSTEM)?;
        Self::of(file)
    }

    /// The file behind descriptor `fd` of the process `pid`.
    pub(crate) fn of_process(pid: u32, fd: i32) -> Result<SharedFile, u32> {
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = File::options().read(true).write(true).open(path).map_err(|_| MAP_FAILED)?;
        Self::of(file)
    }

    /// The file behind a descriptor of this process, whose name must start with `name`.
    pub(crate) fn of_descriptor(fd: i32, name: &str) -> Result<SharedFile, u32> {
        let target =
            std::fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| INVALID_VALUE)?;
        if !target.to_string_lossy().starts_with(&format!("/memfd:{name}")) {
            return Err(INVALID_VALUE);
        }
        Self::of_process(std::process::id(), fd)
    }

    fn of(file: File) -> Result<SharedFile, u32> {
        let metadata = file.metadata().map_err(|_| OPERATING_SYSTEM)?;
        Ok(SharedFile { file, bytes: metadata.len(), inode: metadata.ino() })
    }

    pub(crate) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Another descriptor of the same file, which the caller owns.
    pub(crate) fn duplicate(&self) -> Result<i32, u32> {
        // SAFETY: the call takes numbers only.
        let fd = unsafe { libc::fcntl(self.fd(), libc::F_DUPFD_CLOEXEC, 3) };
        if fd < 0 { Err(OPERATING_SYSTEM) } else { Ok(fd) }
    }
}

/// A range of addresses that nothing else of the process uses, unmapped on `Drop`. A page that
/// faults stands behind it.
pub(crate) struct Span {
    pub(crate) base: u64,
    /// Without the page behind it.
    pub(crate) bytes: u64,
}

impl Span {
    /// Reserves `bytes` (rounded up to pages) at a multiple of `alignment`, a power of two.
    pub(crate) fn reserve(bytes: u64, alignment: u64) -> Result<Span, u32> {
        let bytes = bytes.checked_next_multiple_of(PAGE).ok_or(INVALID_VALUE)?;
        let alignment = alignment.max(PAGE);
        let wanted = bytes.checked_add(PAGE + alignment).ok_or(INVALID_VALUE)?;
        let start = map(0, wanted, libc::PROT_NONE, libc::MAP_PRIVATE | ANONYMOUS, None)?;
        let base = start.next_multiple_of(alignment);
        let end = base + bytes + PAGE;
        unmap(start, base - start);
        unmap(end, start + wanted - end);
        Ok(Span { base, bytes })
    }

    /// Reserves a range and maps the first `bytes` of `file` there.
    pub(crate) fn of_file(file: &SharedFile, from: u64, bytes: u64) -> Result<Span, u32> {
        let span = Span::reserve(bytes, PAGE)?;
        span.show(span.base, file, from, span.bytes)?;
        Ok(span)
    }

    /// Maps `file` at `address` within the range.
    pub(crate) fn show(
        &self,
        address: u64,
        file: &SharedFile,
        from: u64,
        bytes: u64,
    ) -> Result<(), u32> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        map(address, bytes, rights, libc::MAP_SHARED | libc::MAP_FIXED, Some((file.fd(), from)))?;
        Ok(())
    }

    /// Takes a part of the range out of use: it faults from then on.
    pub(crate) fn hide(&self, address: u64, bytes: u64) -> Result<(), u32> {
        let flags = libc::MAP_PRIVATE | ANONYMOUS | libc::MAP_FIXED;
        map(address, bytes, libc::PROT_NONE, flags, None)?;
        Ok(())
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        unmap(self.base, self.bytes + PAGE);
    }
}

const ANONYMOUS: i32 = libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

fn map(
    address: u64,
    bytes: u64,
    rights: i32,
    flags: i32,
    file: Option<(i32, u64)>,
) -> Result<u64, u32> {
    let length = usize::try_from(bytes).map_err(|_| INVALID_VALUE)?;
    let (fd, from) = file.unwrap_or((-1, 0));
    let from = i64::try_from(from).map_err(|_| INVALID_VALUE)?;
    let at = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: either the kernel chooses a free range, or the range lies in a `Span`, which owns
    // it; the caller of the driver's interface keeps no reference into it.
    let mapped = unsafe { libc::mmap(at, length, rights, flags, fd, from) };
    if mapped == libc::MAP_FAILED {
        return Err(OPERATING_SYSTEM);
    }
    Ok(mapped.expose_provenance() as u64)
}

fn unmap(address: u64, bytes: u64) {
    if bytes > 0 {
        let at = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the range belongs to a `Span` that ends here, or was reserved for one.
        unsafe { libc::munmap(at, bytes as usize) };
    }
}

/// Whether every page of the range is mapped in this process.
pub(crate) fn is_mapped(address: u64, bytes: u64) -> bool {
    let start = address / PAGE * PAGE;
    let at = std::ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: the call only looks at the mappings; for memory of this kind it writes nothing.
    unsafe { libc::msync(at, (address - start + bytes) as usize, libc::MS_ASYNC) == 0 }
}

/// Copies `bytes` from `from` to `to`.
///
/// # Safety
/// Both ranges are mapped, and stay so during the call. Others may write them at the same time:
/// the bytes are then whatever the hardware makes of it, as they are on a GPU.
pub(crate) unsafe fn copy(to: u64, from: u64, bytes: usize) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
    let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
    // SAFETY: the caller keeps the ranges mapped; `copy` allows that they overlap.
    unsafe { std::ptr::copy(from, to, bytes) };
}

/// Fills `bytes` at `to` with `value`.
///
/// # Safety
/// As [`copy`], for the one range.
pub(crate) unsafe fn fill(to: u64, value: u8, bytes: usize) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: the caller keeps the range mapped.
    unsafe { std::ptr::write_bytes(to, value, bytes) };
}

/// What names a process for its whole life and never again: its number and its start time.
/// `None` once it is dead, also before its parent took note of it.
pub(crate) fn identity(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, which may hold anything, ends at the last bracket.
    let mut fields = stat.get(stat.rfind(')')? + 2..)?.split(' ');
    let state = fields.next()?;
    let started: u64 = fields.nth(18)?.parse().ok()?;
    (state != "Z" && state != "X").then_some((u64::from(pid) << 32) | (started & 0xffff_ffff))
}

/// The identity of this process.
pub(crate) fn own_identity() -> u64 {
    identity(std::process::id()).unwrap_or(u64::from(std::process::id()) << 32)
}

/// Whether the process with this identity lives.
pub(crate) fn is_alive(of: u64) -> bool {
    identity((of >> 32) as u32) == Some(of)
}
