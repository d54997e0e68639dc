//! Every address that a copy may name: device memory of all kinds, and registered host memory.
//!
//! Invariants: ranges of [`Space::live`] do not overlap; a range is mapped while it is there, and
//! whoever reads or writes device memory holds the space locked for reading meanwhile, so that
//! nothing is unmapped under it. Freed ranges stay reserved for a while, so that using one is
//! told from using memory that was never there.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::abi::Out;
use crate::call::{
    Call, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, ILLEGAL_ADDRESS,
    INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY,
};
use crate::device::{Charge, Device};
use crate::ipc::Importers;
use crate::mapping::{self, PAGE, SharedFile, Span};
use crate::vmm::Physical;
use crate::{stream, violation};

/// How many freed ranges stay reserved.
const FREED_KEPT: usize = 1024;
/// Allocations up to this size start with bytes that no test takes for zeros.
const POISONED_BYTES_MAX: u64 = 4 << 20;
const POISON: u8 = 0xa5;

/// A range of device memory.
pub(crate) struct Range {
    pub(crate) bytes: u64,
    pub(crate) device: &'static Device,
    pub(crate) kind: Kind,
}

pub(crate) enum Kind {
    /// Of `cuMemAlloc`; other processes may open it.
    Alloc { file: SharedFile, importers: Importers, span: Span, _charge: Charge },
    /// Of `cuMemAllocAsync`; it has no handle.
    Ordered { span: Span, _charge: Charge },
    /// Opened by a handle, `opens` times.
    Imported { inode: u64, opens: u32, importers: Importers, span: Span, _charge: Charge },
    /// Created memory, mapped in a reservation; a process must also allow access.
    Mapped { physical: Arc<Physical>, access: bool },
}

#[derive(Default)]
pub(crate) struct Space {
    /// By base address.
    pub(crate) live: BTreeMap<u64, Range>,
    freed: VecDeque<Span>,
    /// Reserved for created memory, by base address.
    pub(crate) reserved: BTreeMap<u64, Span>,
    /// Registered host memory: bytes by base address.
    host: BTreeMap<u64, u64>,
}

/// What an address range is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Device,
    /// Device memory that was freed: work that uses it faults.
    Freed,
    /// Host memory that is registered.
    Pinned,
    /// Any other host memory.
    Pageable,
}

static SPACE: RwLock<Space> = RwLock::new(Space {
    live: BTreeMap::new(),
    freed: VecDeque::new(),
    reserved: BTreeMap::new(),
    host: BTreeMap::new(),
});

pub(crate) fn space() -> RwLockReadGuard<'static, Space> {
    SPACE.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn space_mut() -> RwLockWriteGuard<'static, Space> {
    SPACE.write().unwrap_or_else(PoisonError::into_inner)
}

/// How many ranges of a device this process holds.
pub(crate) fn live(device: &Device) -> usize {
    space().live.values().filter(|range| range.device.ordinal == device.ordinal).count()
}

impl Space {
    /// The range that `address` lies in, with its base.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, &Range)> {
        let below = (Bound::Unbounded, Bound::Included(address));
        let (&base, range) = self.live.range(below).next_back()?;
        (address - base < range.bytes).then_some((base, range))
    }

    /// What the range is. Part of an allocation, of a registration or of two of them is refused,
    /// as the driver refuses a copy that crosses the end of what it knows.
    pub(crate) fn classify(&self, address: u64, bytes: u64) -> Result<Side, u32> {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        if let Some((base, range)) = self.find(address) {
            let allowed = !matches!(range.kind, Kind::Mapped { access: false, .. });
            let within = end <= base + range.bytes;
            return if allowed && within { Ok(Side::Device) } else { Err(INVALID_VALUE) };
        }
        let is_gone = |span: &Span| address >= span.base && address < span.base + span.bytes;
        if self.freed.iter().any(is_gone) || self.reserved.values().any(is_gone) {
            return Ok(Side::Freed);
        }
        let below = (Bound::Unbounded, Bound::Excluded(end.max(address + 1)));
        match self.host.range(below).next_back() {
            Some((&base, &length)) if address < base + length => {
                let within = address >= base && end <= base + length;
                if within { Ok(Side::Pinned) } else { Err(INVALID_VALUE) }
            }
            _ if address == 0 => Err(INVALID_VALUE),
            _ => Ok(Side::Pageable),
        }
    }

    /// Whether work that runs now may use the range that was `side` when it was queued.
    pub(crate) fn recheck(&self, address: u64, bytes: u64, side: Side) -> Result<(), u32> {
        if side == Side::Freed || self.classify(address, bytes) != Ok(side) {
            return Err(ILLEGAL_ADDRESS);
        }
        Ok(())
    }

    /// Takes a range out of use. Its addresses stay reserved.
    pub(crate) fn retire(&mut self, span: Span) {
        // Where the kernel refuses, the range is merely readable for longer.
        span.hide(span.base, span.bytes).unwrap_or_default();
        self.freed.push_back(span);
        if self.freed.len() > FREED_KEPT {
            self.freed.pop_front();
        }
    }

    fn was_freed(&self, base: u64) -> bool {
        self.freed.iter().any(|span| span.base == base)
    }
}

pub(crate) fn alloc(call: &Call, address: Out<u64>, bytes: usize) -> Result<(), u32> {
    let device = call.device()?;
    let bytes = allocation_bytes(bytes)?;
    let charge = device.charge(bytes)?;
    let data = bytes.next_multiple_of(PAGE);
    let file = SharedFile::create(c"fakecuda", data + PAGE)?;
    let span = Span::of_file(&file, 0, data)?;
    let importers = Importers::map(&file, data)?;
    poison(&span, bytes);
    let base = span.base;
    let kind = Kind::Alloc { file, importers, span, _charge: charge };
    space_mut().live.insert(base, Range { bytes, device, kind });
    address.put(base)
}

/// Memory in the order of a stream: at once here, which no caller can tell from later.
pub(crate) fn alloc_async(
    call: &Call,
    address: Out<u64>,
    bytes: usize,
    stream: usize,
) -> Result<(), u32> {
    let device = call.device()?;
    stream::get(device, stream)?;
    let bytes = allocation_bytes(bytes)?;
    let charge = device.charge(bytes)?;
    let file = SharedFile::create(c"fakecuda-ordered", bytes.next_multiple_of(PAGE))?;
    let span = Span::of_file(&file, 0, bytes)?;
    poison(&span, bytes);
    let base = span.base;
    let kind = Kind::Ordered { span, _charge: charge };
    space_mut().live.insert(base, Range { bytes, device, kind });
    address.put(base)
}

fn allocation_bytes(bytes: usize) -> Result<u64, u32> {
    match bytes as u64 {
        0 => Err(INVALID_VALUE),
        bytes if bytes > 1 << 46 => Err(OUT_OF_MEMORY),
        bytes => Ok(bytes),
    }
}

fn poison(span: &Span, bytes: u64) {
    if bytes <= POISONED_BYTES_MAX {
        // SAFETY: the range was just mapped for writing, and nobody else knows of it.
        unsafe { mapping::fill(span.base, POISON, bytes as usize) };
    }
}

pub(crate) fn free(call: &Call, address: u64) -> Result<(), u32> {
    // The driver waits for work that may use the memory.
    stream::drain(call.device()?);
    free_now(address)
}

pub(crate) fn free_async(call: &Call, address: u64, stream: usize) -> Result<(), u32> {
    let stream = stream::get(call.device()?, stream)?;
    if space().find(address).is_none_or(|(base, _)| base != address) {
        return free_now(address);
    }
    stream.push(call, move || free_now(address))
}

fn free_now(address: u64) -> Result<(), u32> {
    let mut space = space_mut();
    match space.live.get(&address).map(|range| &range.kind) {
        Some(Kind::Alloc { importers, .. }) => {
            let others = importers.alive();
            if !others.is_empty() {
                violation::record(format!(
                    "memory at {address:#x} was freed while it is open in {others:?}"
                ));
            }
        }
        Some(Kind::Ordered { .. }) => {}
        Some(Kind::Imported { .. } | Kind::Mapped { .. }) => {
            violation::record(format!(
                "memory at {address:#x} was freed by who did not allocate it"
            ));
            return Err(INVALID_VALUE);
        }
        None => {
            if space.was_freed(address) {
                violation::record(format!("memory at {address:#x} was freed twice"));
            }
            return Err(INVALID_VALUE);
        }
    }
    if let Some(Range { kind: Kind::Alloc { span, .. } | Kind::Ordered { span, .. }, .. }) =
        space.live.remove(&address)
    {
        space.retire(span);
    }
    Ok(())
}

pub(crate) fn address_range(
    _: &Call,
    base: Out<u64>,
    bytes: Out<usize>,
    address: u64,
) -> Result<(), u32> {
    let space = space();
    let (found, range) = space.find(address).ok_or(NOT_FOUND)?;
    base.put_if_wanted(found);
    bytes.put_if_wanted(range.bytes as usize);
    Ok(())
}

pub(crate) fn pointer_attribute(
    _: &Call,
    data: Out<u64>,
    attribute: u32,
    address: u64,
) -> Result<(), u32> {
    let space = space();
    let (base, range) = space.find(address).ok_or(INVALID_VALUE)?;
    let is_mapped = matches!(range.kind, Kind::Mapped { .. });
    match attribute {
        // Kind of memory (2 is device), and the device.
        2 => data.cast::<u32>().put(2),
        9 => data.cast::<u32>().put(range.device.ordinal as u32),
        // Whether it has a handle for `cuIpcOpenMemHandle`: a byte.
        10 => data.cast::<u8>().put(u8::from(matches!(range.kind, Kind::Alloc { .. }))),
        11 => data.put(base),
        12 => data.cast::<usize>().put(range.bytes as usize),
        // Kinds of handles that created memory allows: 1 is a descriptor.
        14 => data.put(u64::from(is_mapped)),
        _ => Err(INVALID_VALUE),
    }
}

pub(crate) fn register(call: &Call, address: u64, bytes: usize, flags: u32) -> Result<(), u32> {
    call.device()?;
    let bytes = bytes as u64;
    let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
    if address == 0 || bytes == 0 || flags > 0xf || !mapping::is_mapped(address, bytes) {
        return Err(INVALID_VALUE);
    }
    let mut space = space_mut();
    let below = (Bound::Unbounded, Bound::Excluded(end));
    if space.host.range(below).next_back().is_some_and(|(base, length)| address < base + length) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    if space.find(address).is_some() {
        return Err(INVALID_VALUE);
    }
    space.host.insert(address, bytes);
    Ok(())
}

pub(crate) fn unregister(call: &Call, address: u64) -> Result<(), u32> {
    stream::drain(call.device()?);
    match space_mut().host.remove(&address) {
        Some(_) => Ok(()),
        None => Err(HOST_MEMORY_NOT_REGISTERED),
    }
}
