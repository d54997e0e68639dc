//! Memory that is created, mapped and given access in steps, and shared as a file descriptor.
//!
//! An allocation lives until its handles, its mappings and every descriptor and mapping in other
//! processes are gone: here that is the memory file itself, so that freeing it early is allowed,
//! as it is with the real driver.

use std::sync::Arc;

use crate::abi::{AccessDesc, AllocationProp, In, Location, Out};
use crate::call::{Call, INVALID_DEVICE, INVALID_VALUE};
use crate::device::{self, Charge, Device};
use crate::handle::Handles;
use crate::mapping::{SharedFile, Span};
use crate::memory::{self, Kind, Range};
use crate::stream;

/// Sizes and addresses are multiples of this.
const GRANULARITY: u64 = 2 << 20;
const KIND_PINNED: u32 = 1;
const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;
const READ_WRITE: u32 = 3;
/// Name of the memory file, by which a descriptor is recognised.
const FILE_NAME: &str = "fakecuda-created";

/// Memory of a device, mapped or not.
pub(crate) struct Physical {
    file: SharedFile,
    device: &'static Device,
    exportable: bool,
    _charge: Charge,
}

static ALLOCATIONS: Handles<Physical> = Handles::new();

fn located(location: Location) -> Result<&'static Device, u32> {
    if location.kind != LOCATION_DEVICE {
        return Err(INVALID_VALUE);
    }
    device::device(location.id).map_err(|_| INVALID_DEVICE)
}

fn whole(bytes: usize) -> Result<u64, u32> {
    let bytes = bytes as u64;
    let is_whole = bytes > 0 && bytes.is_multiple_of(GRANULARITY);
    if is_whole { Ok(bytes) } else { Err(INVALID_VALUE) }
}

pub(crate) fn granularity(
    _: &Call,
    bytes: Out<usize>,
    prop: In<AllocationProp>,
    _option: u32,
) -> Result<(), u32> {
    located(prop.get()?.location)?;
    bytes.put(GRANULARITY as usize)
}

pub(crate) fn create(
    _: &Call,
    handle: Out<u64>,
    bytes: usize,
    prop: In<AllocationProp>,
    flags: u64,
) -> Result<(), u32> {
    let prop = prop.get()?;
    let device = located(prop.location)?;
    let bytes = whole(bytes)?;
    if flags != 0 || prop.kind != KIND_PINNED {
        return Err(INVALID_VALUE);
    }
    let charge = device.charge(bytes)?;
    let file = SharedFile::create(c"fakecuda-created", bytes)?;
    let exportable = prop.handle_types & DESCRIPTOR != 0;
    let physical = Physical { file, device, exportable, _charge: charge };
    handle.put(ALLOCATIONS.insert(Arc::new(physical)) as u64)
}

pub(crate) fn release(_: &Call, handle: u64) -> Result<(), u32> {
    ALLOCATIONS.remove(handle as usize).map(|_| ()).map_err(|_| INVALID_VALUE)
}

pub(crate) fn export(
    _: &Call,
    out: Out<i32>,
    handle: u64,
    kind: u32,
    flags: u64,
) -> Result<(), u32> {
    let physical = ALLOCATIONS.get(handle as usize).map_err(|_| INVALID_VALUE)?;
    if kind != DESCRIPTOR || flags != 0 || !physical.exportable || out.is_null() {
        return Err(INVALID_VALUE);
    }
    out.put(physical.file.duplicate()?)
}

pub(crate) fn import(call: &Call, handle: Out<u64>, shared: u64, kind: u32) -> Result<(), u32> {
    let fd = i32::try_from(shared).map_err(|_| INVALID_VALUE)?;
    if kind != DESCRIPTOR {
        return Err(INVALID_VALUE);
    }
    let file = SharedFile::of_descriptor(fd, FILE_NAME)?;
    // The file does not say which device it is of; the importer's context does.
    let device = call.device().or_else(|_| device::device(0))?;
    let charge = device.charge_import(file.bytes);
    let physical = Physical { file, device, exportable: true, _charge: charge };
    handle.put(ALLOCATIONS.insert(Arc::new(physical)) as u64)
}

pub(crate) fn retain(_: &Call, handle: Out<u64>, address: u64) -> Result<(), u32> {
    let space = memory::space();
    let (_, range) = space.find(address).ok_or(INVALID_VALUE)?;
    let Kind::Mapped { physical, .. } = &range.kind else { return Err(INVALID_VALUE) };
    handle.put(ALLOCATIONS.insert(Arc::clone(physical)) as u64)
}

pub(crate) fn reserve(
    _: &Call,
    address: Out<u64>,
    bytes: usize,
    alignment: usize,
    _wish: u64,
    flags: u64,
) -> Result<(), u32> {
    let bytes = whole(bytes)?;
    let alignment = (alignment as u64).max(GRANULARITY);
    if flags != 0 || !alignment.is_power_of_two() {
        return Err(INVALID_VALUE);
    }
    let span = Span::reserve(bytes, alignment)?;
    let base = span.base;
    memory::space_mut().reserved.insert(base, span);
    address.put(base)
}

pub(crate) fn unreserve(_: &Call, address: u64, bytes: usize) -> Result<(), u32> {
    let mut space = memory::space_mut();
    let end = address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
    let is_same = space.reserved.get(&address).is_some_and(|span| span.bytes == bytes as u64);
    if !is_same || space.live.range(address..end).next().is_some() {
        return Err(INVALID_VALUE);
    }
    if let Some(span) = space.reserved.remove(&address) {
        space.retire(span);
    }
    Ok(())
}

pub(crate) fn map(
    _: &Call,
    address: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> Result<(), u32> {
    let physical = ALLOCATIONS.get(handle as usize).map_err(|_| INVALID_VALUE)?;
    let bytes = whole(bytes)?;
    if offset != 0 || flags != 0 || bytes > physical.file.bytes {
        return Err(INVALID_VALUE);
    }
    let mut space = memory::space_mut();
    let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
    let reserved = space.reserved.range(..=address).next_back();
    let is_inside = reserved.is_some_and(|(base, span)| end <= base + span.bytes);
    let before = space.find(address).is_some();
    if !is_inside || before || space.live.range(address..end).next().is_some() {
        return Err(INVALID_VALUE);
    }
    let device = physical.device;
    let kind = Kind::Mapped { physical, access: false };
    space.live.insert(address, Range { bytes, device, kind });
    Ok(())
}

pub(crate) fn set_access(
    _: &Call,
    address: u64,
    bytes: usize,
    access: In<AccessDesc>,
    count: usize,
) -> Result<(), u32> {
    let mut space = memory::space_mut();
    let memory::Space { live, reserved, .. } = &mut *space;
    let range = live.get_mut(&address).filter(|range| range.bytes == bytes as u64);
    let range = range.ok_or(INVALID_VALUE)?;
    let (_, span) = reserved.range(..=address).next_back().ok_or(INVALID_VALUE)?;
    let Kind::Mapped { physical, access: allowed } = &mut range.kind else {
        return Err(INVALID_VALUE);
    };
    for index in 0..count {
        let access = access.nth(index)?;
        let device = located(access.location)?;
        if access.flags != READ_WRITE || device.ordinal != range.device.ordinal {
            return Err(INVALID_VALUE);
        }
    }
    if count == 0 {
        return Err(INVALID_VALUE);
    }
    span.show(address, &physical.file, 0, bytes as u64)?;
    *allowed = true;
    Ok(())
}

pub(crate) fn unmap(_: &Call, address: u64, bytes: usize) -> Result<(), u32> {
    let device = {
        let space = memory::space();
        let range = space.live.get(&address).filter(|range| range.bytes == bytes as u64);
        let range = range.filter(|range| matches!(range.kind, Kind::Mapped { .. }));
        range.ok_or(INVALID_VALUE)?.device
    };
    stream::drain(device);
    let mut space = memory::space_mut();
    space.live.remove(&address);
    if let Some((_, span)) = space.reserved.range(..=address).next_back() {
        span.hide(address, bytes as u64)?;
    }
    Ok(())
}
