//! Memory that other processes open by a handle of 64 bytes.
//!
//! A handle is {magic, process, descriptor, bytes, inode, device}; it is opened through `/proc`,
//! so that it works while the exporter lives and needs no server. Behind the data of each
//! allocation lies a page that lists who has it open, so that the exporter knows at
//! `cuMemFree` whether it is too early.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::{IpcHandle, Out};
use crate::call::{Call, INVALID_CONTEXT, INVALID_VALUE, MAP_FAILED, OUT_OF_MEMORY};
use crate::mapping::{self, PAGE, SharedFile, Span};
use crate::memory::{self, Kind, Range};
use crate::stream;

const MEMORY_MAGIC: u64 = u64::from_le_bytes(*b"fakemem1");
/// The only flag that opening takes, and it must be given.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// What a handle says. Shared with the handles of events.
pub(crate) struct Name {
    pub(crate) magic: u64,
    pub(crate) pid: u32,
    pub(crate) fd: i32,
    pub(crate) bytes: u64,
    pub(crate) inode: u64,
    pub(crate) device: u64,
}

impl Name {
    pub(crate) fn of(magic: u64, file: &SharedFile, bytes: u64, device: u64) -> Name {
        Name { magic, pid: std::process::id(), fd: file.fd(), bytes, inode: file.inode, device }
    }

    pub(crate) fn handle(&self) -> IpcHandle {
        let mut bytes = [0; 64];
        let place = (u64::from(self.pid) << 32) | u64::from(self.fd.cast_unsigned());
        let words = [self.magic, place, self.bytes, self.inode, self.device];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        IpcHandle(bytes)
    }

    /// Reads a handle with this magic.
    pub(crate) fn read(handle: IpcHandle, magic: u64) -> Result<Name, u32> {
        let mut words = handle
            .0
            .chunks_exact(8)
            .map(|word| word.try_into().map(u64::from_le_bytes).unwrap_or_default());
        let mut next = || words.next().unwrap_or_default();
        let (found, place, bytes, inode, device) = (next(), next(), next(), next(), next());
        if found != magic {
            return Err(INVALID_VALUE);
        }
        let (pid, fd) = ((place >> 32) as u32, (place as u32).cast_signed());
        Ok(Name { magic, pid, fd, bytes, inode, device })
    }

    /// Opens the file in the exporter, which must be another process and alive.
    pub(crate) fn open(&self) -> Result<SharedFile, u32> {
        if self.pid == std::process::id() {
            return Err(INVALID_CONTEXT);
        }
        let file = SharedFile::of_process(self.pid, self.fd)?;
        // The descriptor may be another file's by now.
        if file.inode == self.inode { Ok(file) } else { Err(MAP_FAILED) }
    }
}

/// The page that lists the processes that have an allocation open.
pub(crate) struct Importers {
    page: Span,
}

impl Importers {
    /// Maps the page of `file` that starts at `from`.
    pub(crate) fn map(file: &SharedFile, from: u64) -> Result<Importers, u32> {
        Ok(Importers { page: Span::of_file(file, from, PAGE)? })
    }

    fn entries(&self) -> &[AtomicU64] {
        let at = std::ptr::with_exposed_provenance::<AtomicU64>(self.page.base as usize);
        // SAFETY: the span is one page, mapped for as long as `self` lives, and every process
        // uses it as atomic words only.
        unsafe { std::slice::from_raw_parts(at, PAGE as usize / 8) }
    }

    fn enter(&self, identity: u64) -> Result<(), u32> {
        let free = |entry: &&AtomicU64| {
            entry.compare_exchange(0, identity, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        self.entries().iter().find(free).map(|_| ()).ok_or(OUT_OF_MEMORY)
    }

    fn leave(&self, identity: u64) {
        for entry in self.entries() {
            let _ = entry.compare_exchange(identity, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// The processes that have it open and live.
    pub(crate) fn alive(&self) -> Vec<String> {
        let entries = self.entries().iter().map(|entry| entry.load(Ordering::SeqCst));
        let alive = entries.filter(|identity| *identity != 0 && mapping::is_alive(*identity));
        alive.map(|identity| format!("process {}", identity >> 32)).collect()
    }
}

pub(crate) fn get_handle(call: &Call, handle: Out<IpcHandle>, address: u64) -> Result<(), u32> {
    call.device()?;
    let space = memory::space();
    let (_, range) = space.find(address).ok_or(INVALID_VALUE)?;
    // Memory that was created, ordered by a stream, or imported has none.
    let Kind::Alloc { file, .. } = &range.kind else { return Err(INVALID_VALUE) };
    let device = range.device.ordinal as u64;
    handle.put(Name::of(MEMORY_MAGIC, file, range.bytes, device).handle())
}

pub(crate) fn open(
    call: &Call,
    address: Out<u64>,
    handle: IpcHandle,
    flags: u32,
) -> Result<(), u32> {
    let device = call.device()?;
    let name = Name::read(handle, MEMORY_MAGIC)?;
    if flags != LAZY_ENABLE_PEER_ACCESS || name.device != device.ordinal as u64 {
        return Err(INVALID_VALUE);
    }
    let mut space = memory::space_mut();
    for (base, range) in &mut space.live {
        if let Kind::Imported { inode, opens, .. } = &mut range.kind
            && *inode == name.inode
        {
            *opens += 1;
            return address.put(*base);
        }
    }
    let file = name.open()?;
    let data = name.bytes.next_multiple_of(PAGE);
    if file.bytes != data + PAGE {
        return Err(INVALID_VALUE);
    }
    let span = Span::of_file(&file, 0, data)?;
    let importers = Importers::map(&file, data)?;
    importers.enter(mapping::own_identity())?;
    let base = span.base;
    let charge = device.charge_import(name.bytes);
    let kind = Kind::Imported { inode: name.inode, opens: 1, importers, span, _charge: charge };
    space.live.insert(base, Range { bytes: name.bytes, device, kind });
    address.put(base)
}

pub(crate) fn close(call: &Call, address: u64) -> Result<(), u32> {
    stream::drain(call.device()?);
    let mut space = memory::space_mut();
    let range = space.live.get_mut(&address).ok_or(INVALID_VALUE)?;
    let Kind::Imported { opens, .. } = &mut range.kind else { return Err(INVALID_VALUE) };
    *opens -= 1;
    if *opens == 0
        && let Some(Range { kind: Kind::Imported { importers, span, .. }, .. }) =
            space.live.remove(&address)
    {
        importers.leave(mapping::own_identity());
        space.retire(span);
    }
    Ok(())
}
