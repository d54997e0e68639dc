//! Where the arena's memory comes from: the largest pages that the operating system gives.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use super::mapping::{HUGE_PAGE_BYTES, Mapping};

/// `HUGETLBFS_MAGIC` of linux/magic.h.
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x958458f6;

/// What the arena's memory is made of, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PageKind {
    /// Reserved huge pages of 2 MiB in a memfd.
    ReservedHuge,
    /// A memfd for which the kernel gives transparent huge pages.
    SharedTransparentHuge,
    /// Private memory with transparent huge pages. It cannot be handed to a next daemon.
    PrivateTransparentHuge,
    /// A memfd of ordinary pages of 4 KiB.
    Plain,
}

impl PageKind {
    /// The kind as operators see it.
    pub fn name(self) -> &'static str {
        match self {
            PageKind::ReservedHuge => "reserved huge pages",
            PageKind::SharedTransparentHuge => "transparent huge pages, shared memory",
            PageKind::PrivateTransparentHuge => "transparent huge pages, private memory",
            PageKind::Plain => "4 KiB pages",
        }
    }
}

/// Memory for an arena.
pub(super) struct Source {
    pub(super) mapping: Mapping,
    /// `None` for private memory.
    pub(super) fd: Option<OwnedFd>,
    pub(super) pages: PageKind,
    pub(super) why: String,
}

impl Source {
    /// The best pages there are; `shared`: only such as can be handed to a next daemon.
    pub(super) fn best(bytes: u64, shared: bool) -> io::Result<Source> {
        let reserved = match reserved_huge(bytes) {
            Ok(source) => return Ok(source),
            Err(error) => error,
        };
        let shmem = setting("shmem_enabled");
        let private = setting("enabled");
        let why = format!(
            "no reserved huge pages for it ({reserved}); transparent huge pages: \
             shmem_enabled={shmem}, enabled={private}"
        );
        let shared_huge = gives_huge_pages(&shmem);
        if !shared && !shared_huge && matches!(&*private, "always" | "madvise") {
            let mapping = Mapping::anonymous(bytes)?;
            if mapping.advise_huge() {
                let pages = PageKind::PrivateTransparentHuge;
                return Ok(Source { mapping, fd: None, pages, why });
            }
        }
        let fd = memfd("kvtide-arena", bytes, MemfdFlags::empty())?;
        let mapping = Mapping::of_file(fd.as_fd(), bytes)?;
        let pages = shared_pages(&mapping, shared_huge);
        Ok(Source { mapping, fd: Some(fd), pages, why })
    }

    /// Memory that an earlier daemon made, which has `bytes` at least.
    pub(super) fn of_memfd(fd: OwnedFd, bytes: u64) -> io::Result<Source> {
        let mapping = Mapping::of_file(fd.as_fd(), bytes)?;
        // statfs(2) tells hugetlbfs by its magic number.
        let pages = match rustix::fs::fstatfs(&fd)?.f_type {
            HUGETLBFS_MAGIC => PageKind::ReservedHuge,
            _ => shared_pages(&mapping, gives_huge_pages(&setting("shmem_enabled"))),
        };
        let why = "an earlier daemon made it".to_owned();
        Ok(Source { mapping, fd: Some(fd), pages, why })
    }
}

/// Whether memfds get transparent huge pages where they are asked for.
fn gives_huge_pages(shmem_enabled: &str) -> bool {
    matches!(shmem_enabled, "always" | "within_size" | "advise" | "force")
}

fn shared_pages(mapping: &Mapping, shared_huge: bool) -> PageKind {
    let huge = mapping.advise_huge() && shared_huge;
    if huge { PageKind::SharedTransparentHuge } else { PageKind::Plain }
}

/// Mapping reserves the pages, so that none can be missing later (which would be SIGBUS).
fn reserved_huge(bytes: u64) -> io::Result<Source> {
    let whole = bytes.next_multiple_of(HUGE_PAGE_BYTES);
    let fd = memfd("kvtide-arena", whole, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
    let mapping = Mapping::of_file(fd.as_fd(), bytes)?;
    let why = "reserved huge pages were there".to_owned();
    Ok(Source { mapping, fd: Some(fd), pages: PageKind::ReservedHuge, why })
}

/// A memfd of a fixed size.
pub(super) fn memfd(name: &str, bytes: u64, flags: MemfdFlags) -> io::Result<OwnedFd> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// The chosen word of a transparent-huge-page setting (`always [madvise] never`).
fn setting(name: &str) -> String {
    let path = format!("/sys/kernel/mm/transparent_hugepage/{name}");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or_else(|| "unknown".to_owned(), |(word, _)| word.to_owned())
}
