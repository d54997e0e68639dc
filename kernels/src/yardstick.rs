//! Copies and kernels on memory of their own, timed: what a benchmark needs, as safe calls.
//!
//! Invariants: every range that is queued lies in memory that a [`Yardstick`] allocated, by checks
//! made here; nothing is under way when a call returns. Device memory is timed by events of the
//! driver, so that the times are the GPU's own. The daemon uses nothing of this.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::abi::{
    self, Entry, MoveEntry, NO_SUM, PlaneEntry, SumEntry, VERDICT_EQUAL, VERDICT_NONE,
};
use crate::driver::{
    Context, Copy, CudaError, DeviceBuffer, Event, HostRegistration, ImportedIpc, ImportedVmm,
    Stream, address_range,
};
use crate::launch::{Kernels, Pool, scratch_bytes};

/// Alignment of host memory: that of a huge page.
const HOST_ALIGN: usize = 2 << 20;

/// Why something was not done.
#[derive(Debug, Error)]
pub enum YardstickError {
    /// The planes describe no payload, or one of 4 GiB and more, or do not fit in 64 bits.
    #[error("the planes of the layout describe no block that can be moved")]
    Layout,
    /// More blocks than there are slots, or a number that does not divide them; or a range.
    #[error("{0} does not fit the memory that was taken")]
    Shape(&'static str),
    /// The system has not so much host memory.
    #[error("{0} bytes of host memory cannot be had")]
    NoHostMemory(u64),
    /// What the driver says.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

type Result<T> = std::result::Result<T, YardstickError>;

/// What is timed. Bytes are those of the payloads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Work {
    /// One large copy within device memory: the ceiling of gather and scatter.
    CopyOnDevice,
    /// Pool to payloads, in one launch.
    Gather,
    /// Payloads to pool, in one launch.
    Scatter,
    /// XXH3-128 of payloads.
    Sum,
    /// One large copy from registered host memory: the ceiling of what goes up.
    CopyToDevice,
    /// One large copy to registered host memory: the ceiling of what goes down.
    CopyToHost,
    /// A copy for each block, from host slots that are no neighbours.
    BlocksToDevice,
    /// A copy for each block, to host slots that are no neighbours.
    BlocksToHost,
    /// As `BlocksToDevice`, by one call of the batch-copy API where the driver has it.
    BatchToDevice,
    /// As `BlocksToHost`, by one call of the batch-copy API where the driver has it.
    BatchToHost,
    /// What a load from host RAM is: blocks up, their sums compared, scattered where equal.
    Load,
    /// What a store to host RAM is: gathered, summed, blocks down.
    Store,
}

/// Host memory that is registered with the driver.
#[derive(Debug)]
pub struct PinnedMemory {
    // Given up before the memory.
    _registration: HostRegistration,
    memory: HostMemory,
    /// How long it took to touch every page, before it was registered.
    pub populate: Duration,
    /// How long the registration took.
    pub register: Duration,
}

impl PinnedMemory {
    /// Takes `bytes`, touches every page, and registers them.
    ///
    /// # Errors
    /// When the system has not so much memory, or the driver does not register it.
    pub fn new(context: &Context, bytes: u64) -> Result<PinnedMemory> {
        let started = Instant::now();
        let mut memory = HostMemory::new(bytes)?;
        memory.bytes_mut().fill(0xa5);
        let populate = started.elapsed();
        let started = Instant::now();
        // SAFETY: the memory is mapped and writable, and is freed after the registration was
        // dropped, by the order of the fields.
        let registration =
            unsafe { HostRegistration::register(context, memory.start.as_ptr(), bytes)? };
        let register = started.elapsed();
        Ok(PinnedMemory { _registration: registration, memory, populate, register })
    }
}

#[derive(Debug)]
struct HostMemory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is this value's own.
unsafe impl Send for HostMemory {}

impl HostMemory {
    fn new(bytes: u64) -> Result<HostMemory> {
        let none = || YardstickError::NoHostMemory(bytes);
        let size = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0).ok_or_else(none)?;
        let layout = Layout::from_size_align(size, HOST_ALIGN).map_err(|_| none())?;
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        Ok(HostMemory { start: NonNull::new(start).ok_or_else(none)?, layout })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this size and zeroed, and borrowed as long as the result.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// A pool with a layout, payloads, host slots, and all tables.
pub struct Yardstick {
    // Ends what is under way before anything is freed: see `Drop`.
    stream: Stream,
    start: Event,
    end: Event,
    kernels: Kernels,
    pool: Pool,
    slots: u32,
    region: DeviceBuffer,
    payloads: DeviceBuffer,
    spare: DeviceBuffer,
    _planes: DeviceBuffer,
    moves: DeviceBuffer,
    checked: DeviceBuffer,
    sums: DeviceBuffer,
    scratch: DeviceBuffer,
    /// Slots to copy from, then slots to copy to.
    host: PinnedMemory,
}

impl Yardstick {
    /// Takes memory for `slots` blocks of the given layout: four times their bytes on the GPU, two
    /// times registered on the host. `payload_offset` of the planes is set here.
    ///
    /// # Errors
    /// A layout without a payload, slots that are no power of two, or no memory.
    pub fn new(
        context: &Context,
        kernels: &Kernels,
        planes: &[PlaneEntry],
        slots: u32,
    ) -> Result<Yardstick> {
        if !slots.is_power_of_two() {
            return Err(YardstickError::Shape("a number of slots that is no power of two"));
        }
        let mut planes = planes.to_vec();
        let payload_bytes = abi::lay_out(&mut planes).filter(|bytes| *bytes >= abi::SUM_BYTES_MIN);
        let payload_bytes = payload_bytes.ok_or(YardstickError::Layout)?;
        let region_bytes = region_bytes(&planes, slots).ok_or(YardstickError::Layout)?;
        let plane_count = u32::try_from(planes.len()).map_err(|_| YardstickError::Layout)?;
        let bytes = payload_bytes * u64::from(slots);
        let stream = Stream::new(context)?;
        let region = DeviceBuffer::alloc(context, region_bytes)?;
        let payloads = DeviceBuffer::alloc(context, bytes)?;
        let spare = DeviceBuffer::alloc(context, bytes)?;
        let scratch_each = scratch_bytes(payload_bytes);
        let scratch = DeviceBuffer::alloc(context, scratch_each * u64::from(slots))?;
        let entry = |slot: u32, sum| MoveEntry {
            payload: payloads.address() + u64::from(slot) * payload_bytes,
            place: elsewhere(slot, slots),
            sum,
        };
        let moves: Vec<MoveEntry> = (0..slots).map(|slot| entry(slot, NO_SUM)).collect();
        let checked: Vec<MoveEntry> = (0..slots).map(|slot| entry(slot, slot)).collect();
        let sum = |slot: u32| SumEntry {
            payload: payloads.address() + u64::from(slot) * payload_bytes,
            bytes: payload_bytes,
            lanes: u64::from(slot) * scratch_each / 8,
            ..SumEntry::default()
        };
        let sums: Vec<SumEntry> = (0..slots).map(sum).collect();
        let table = upload(&stream, &planes)?;
        let pool =
            Pool { region: region.address(), planes: table.address(), plane_count, payload_bytes };
        Ok(Yardstick {
            start: Event::timed(context)?,
            end: Event::timed(context)?,
            kernels: kernels.clone(),
            pool,
            slots,
            region,
            payloads,
            spare,
            _planes: table,
            moves: upload(&stream, &moves)?,
            checked: upload(&stream, &checked)?,
            sums: upload(&stream, &sums)?,
            scratch,
            host: PinnedMemory::new(context, bytes * 2)?,
            stream,
        })
    }

    /// Bytes of one block.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.pool.payload_bytes
    }

    /// The place of the pool that payload `slot` is moved from and to; also the number of the host
    /// slot.
    #[must_use]
    pub fn place_of(&self, slot: u32) -> u32 {
        elsewhere(slot, self.slots)
    }

    /// The host slots that are copied from.
    pub fn host_mut(&mut self) -> &mut [u8] {
        let half = self.host.memory.layout.size() / 2;
        self.host.memory.bytes_mut().split_at_mut(half).0
    }

    /// The host slots that were copied to.
    #[must_use]
    pub fn host_target(&self) -> &[u8] {
        let bytes = self.host.memory.bytes();
        bytes.split_at(bytes.len() / 2).1
    }

    /// Makes the sums of the host slots those that [`Work::Load`] expects, and returns them in the
    /// order of the payloads.
    ///
    /// # Errors
    /// What the driver says.
    pub fn expect_sums(&mut self) -> Result<Vec<[u64; 2]>> {
        self.time(Work::BlocksToDevice, self.slots, 1)?;
        self.time(Work::Sum, self.slots, 1)?;
        let mut sums = self.sums()?;
        for sum in &mut sums {
            (sum.expected, sum.compare, sum.verdict) = (sum.found, 1, VERDICT_NONE);
        }
        write(&self.stream, &self.sums, &sums)?;
        Ok(sums.iter().map(|sum| sum.expected).collect())
    }

    /// How many payloads had the sum that was expected, at the last time.
    ///
    /// # Errors
    /// What the driver says.
    pub fn sums_equal(&self) -> Result<u32> {
        let equal = self.sums()?.iter().filter(|sum| sum.verdict == VERDICT_EQUAL).count();
        Ok(u32::try_from(equal).unwrap_or(u32::MAX))
    }

    fn sums(&self) -> Result<Vec<SumEntry>> {
        let mut sums = vec![SumEntry::default(); self.slots as usize];
        read(&self.stream, &self.sums, abi::as_bytes_mut(&mut sums))?;
        Ok(sums)
    }

    /// Fills the pool with one byte.
    ///
    /// # Errors
    /// What the driver says.
    pub fn clear(&mut self, value: u8) -> Result<()> {
        // SAFETY: the range is a whole buffer; the stream is waited for.
        let queued = unsafe { self.stream.fill(self.region.address(), value, self.region.bytes()) };
        self.stream.synchronize()?;
        Ok(queued?)
    }

    /// Copies the pool out.
    ///
    /// # Errors
    /// What the driver says.
    pub fn region(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; usize::try_from(self.region.bytes()).unwrap_or(0)];
        read(&self.stream, &self.region, &mut out)?;
        Ok(out)
    }

    /// Does `work` on `blocks` blocks `repeats` times in a row, each time on the next ones, and
    /// returns how long one time took on the GPU.
    ///
    /// # Errors
    /// When `blocks` does not divide the slots, or what the driver says.
    pub fn time(&mut self, work: Work, blocks: u32, repeats: u32) -> Result<Duration> {
        if blocks == 0 || !self.slots.is_multiple_of(blocks) {
            return Err(YardstickError::Shape("this number of blocks"));
        }
        let queue = || {
            self.start.record(&self.stream)?;
            for repeat in 0..u64::from(repeats.max(1)) {
                let first = repeat * u64::from(blocks) % u64::from(self.slots);
                self.queue(work, first as u32, blocks)?;
            }
            self.end.record(&self.stream)
        };
        let queued = queue();
        self.stream.synchronize()?;
        queued?;
        Ok(self.end.since(&self.start)? / repeats.max(1))
    }

    /// Queues the work on slots `first..first + blocks`, which exist.
    fn queue(&self, work: Work, first: u32, blocks: u32) -> std::result::Result<(), CudaError> {
        let at = u64::from(first) * self.pool.payload_bytes;
        let bytes = u64::from(blocks) * self.pool.payload_bytes;
        let payloads = self.payloads.address() + at;
        let host = self.host.memory.start.as_ptr();
        let target = self.host_at(self.slots + first);
        // SAFETY: all ranges lie in the buffers, because the slots do; the buffers live until the
        // stream was waited for, by `time`, which also borrows the host memory exclusively.
        unsafe {
            match work {
                Work::CopyOnDevice => {
                    self.stream.copy_on_device(self.spare.address() + at, payloads, bytes)
                }
                Work::CopyToDevice => {
                    let from = host.wrapping_add(usize::try_from(at).unwrap_or(0));
                    self.stream.copy_to_device(payloads, from, bytes)
                }
                Work::CopyToHost => self.stream.copy_to_host(target, payloads, bytes),
                Work::Gather => self.gather(first, blocks),
                Work::Scatter => self.scatter(&self.moves, first, blocks),
                Work::Sum => self.sum(first, blocks),
                Work::BlocksToDevice => self.blocks(first, blocks, true),
                Work::BlocksToHost => self.blocks(first, blocks, false),
                Work::BatchToDevice => self.stream.copy_batch(&self.copies(first, blocks, true)),
                Work::BatchToHost => self.stream.copy_batch(&self.copies(first, blocks, false)),
                Work::Load => {
                    self.blocks(first, blocks, true)?;
                    self.sum(first, blocks)?;
                    self.scatter(&self.checked, first, blocks)
                }
                Work::Store => {
                    self.gather(first, blocks)?;
                    self.sum(first, blocks)?;
                    self.blocks(first, blocks, false)
                }
            }
        }
    }

    fn host_at(&self, slot: u32) -> *mut u8 {
        let at = u64::from(slot) * self.pool.payload_bytes;
        self.host.memory.start.as_ptr().wrapping_add(usize::try_from(at).unwrap_or(0))
    }

    /// # Safety
    /// The slots exist, and the stream is waited for before anything is freed.
    unsafe fn gather(&self, first: u32, blocks: u32) -> std::result::Result<(), CudaError> {
        let moves = entry_address::<MoveEntry>(&self.moves, first);
        // SAFETY: the pool and the tables were made for each other by `new`, and all of it lives;
        // the rest is the caller's promise.
        unsafe { self.kernels.gather(&self.stream, &self.pool, moves, blocks) }
    }

    /// # Safety
    /// As for `gather`.
    unsafe fn scatter(
        &self,
        moves: &DeviceBuffer,
        first: u32,
        blocks: u32,
    ) -> std::result::Result<(), CudaError> {
        let moves = entry_address::<MoveEntry>(moves, first);
        let sums = self.sums.address();
        // SAFETY: as for `gather`; the places of the slots are all different.
        unsafe { self.kernels.scatter(&self.stream, &self.pool, moves, blocks, sums) }
    }

    /// # Safety
    /// As for `gather`.
    unsafe fn sum(&self, first: u32, blocks: u32) -> std::result::Result<(), CudaError> {
        let sums = entry_address::<SumEntry>(&self.sums, first);
        let (bytes, scratch) = (self.pool.payload_bytes, self.scratch.address());
        // SAFETY: as for `gather`; each entry has its own part of the scratch.
        unsafe { self.kernels.sum(&self.stream, sums, blocks, bytes, scratch) }
    }

    /// # Safety
    /// As for `gather`.
    unsafe fn blocks(
        &self,
        first: u32,
        blocks: u32,
        up: bool,
    ) -> std::result::Result<(), CudaError> {
        let bytes = self.pool.payload_bytes;
        for slot in first..first + blocks {
            let payload = self.payloads.address() + u64::from(slot) * bytes;
            let place = elsewhere(slot, self.slots);
            // SAFETY: both ranges are of one slot each; the rest is the caller's promise.
            unsafe {
                match up {
                    true => self.stream.copy_to_device(payload, self.host_at(place), bytes)?,
                    false => {
                        let to = self.host_at(self.slots + place);
                        self.stream.copy_to_host(to, payload, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn copies(&self, first: u32, blocks: u32, up: bool) -> Vec<Copy> {
        let bytes = self.pool.payload_bytes;
        let copy = |slot: u32| {
            let payload = self.payloads.address() + u64::from(slot) * bytes;
            let place = elsewhere(slot, self.slots);
            let host = |slot| self.host_at(slot).expose_provenance() as u64;
            match up {
                true => Copy { dst: payload, src: host(place), bytes },
                false => Copy { dst: host(self.slots + place), src: payload, bytes },
            }
        };
        (first..first + blocks).map(copy).collect()
    }
}

impl Drop for Yardstick {
    fn drop(&mut self) {
        // Everything was waited for already unless the driver is lost, and then it does nothing.
        let _ = self.stream.synchronize();
    }
}

/// A permutation of the slots in which neighbours are far apart.
fn elsewhere(slot: u32, slots: u32) -> u32 {
    slot.wrapping_mul(37).wrapping_add(11) & (slots - 1)
}

/// The bytes that `slots` places of these planes reach to.
fn region_bytes(planes: &[PlaneEntry], slots: u32) -> Option<u64> {
    let ends = planes.iter().map(|plane| {
        let rows = u64::from(plane.rows.checked_sub(1)?).checked_mul(plane.row_stride)?;
        let places = u64::from(slots.checked_sub(1)?).checked_mul(plane.block_stride)?;
        let start = plane.offset.checked_add(places)?.checked_add(rows)?;
        start.checked_add(plane.row_bytes)
    });
    ends.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

fn entry_address<E: Entry>(table: &DeviceBuffer, at: u32) -> u64 {
    table.address() + u64::from(at) * size_of::<E>() as u64
}

fn upload<E: Entry>(stream: &Stream, table: &[E]) -> Result<DeviceBuffer> {
    let bytes = size_of_val(table) as u64;
    let buffer = DeviceBuffer::alloc(stream.context(), bytes)?;
    write(stream, &buffer, table)?;
    Ok(buffer)
}

fn write<E: Entry>(stream: &Stream, buffer: &DeviceBuffer, table: &[E]) -> Result<()> {
    let bytes = abi::as_bytes(table);
    if bytes.len() as u64 > buffer.bytes() {
        return Err(YardstickError::Shape("a table"));
    }
    // SAFETY: both ranges have these bytes; the stream is waited for before the borrows end.
    let queued =
        unsafe { stream.copy_to_device(buffer.address(), bytes.as_ptr(), bytes.len() as u64) };
    stream.synchronize()?;
    Ok(queued?)
}

fn read(stream: &Stream, buffer: &DeviceBuffer, out: &mut [u8]) -> Result<()> {
    if out.len() as u64 > buffer.bytes() {
        return Err(YardstickError::Shape("what is to be read"));
    }
    // SAFETY: as for `write`, the other way round.
    let queued =
        unsafe { stream.copy_to_host(out.as_mut_ptr(), buffer.address(), out.len() as u64) };
    stream.synchronize()?;
    Ok(queued?)
}

/// Memory of another process, to be read and written by copies.
pub struct Imported {
    mapping: Mapping,
    address: u64,
    bytes: u64,
    stream: Stream,
}

enum Mapping {
    Legacy(ImportedIpc),
    Vmm(ImportedVmm),
}

impl Imported {
    /// Opens memory of cuMemAlloc by its handle.
    ///
    /// # Errors
    /// What the driver says.
    pub fn legacy(context: &Context, handle: [u8; 64]) -> Result<Imported> {
        // For the question about the address, which is answered in the current context.
        context.bind()?;
        let import = ImportedIpc::open(context, handle)?;
        let (address, (base, bytes)) = (import.address(), address_range(import.address())?);
        let bytes = (base + bytes).saturating_sub(address);
        let stream = Stream::new(context)?;
        Ok(Imported { mapping: Mapping::Legacy(import), address, bytes, stream })
    }

    /// Maps memory of cuMemCreate from its descriptor.
    ///
    /// # Errors
    /// What the driver says.
    pub fn vmm(context: &Context, fd: OwnedFd, bytes: u64) -> Result<Imported> {
        let import = ImportedVmm::open(context, fd, bytes)?;
        let (address, bytes) = (import.address(), import.bytes());
        let stream = Stream::new(context)?;
        Ok(Imported { mapping: Mapping::Vmm(import), address, bytes, stream })
    }

    fn check(&self, offset: u64, bytes: usize) -> Result<u64> {
        let end = offset.checked_add(bytes as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(YardstickError::Shape("a range of the import"));
        }
        Ok(self.address + offset)
    }

    /// Copies bytes out, and waits for it.
    ///
    /// # Errors
    /// A range beyond the memory, or what the driver says.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let at = self.check(offset, out.len())?;
        // SAFETY: the range lies in the mapping; the stream is waited for before the borrow ends.
        let queued = unsafe { self.stream.copy_to_host(out.as_mut_ptr(), at, out.len() as u64) };
        self.stream.synchronize()?;
        Ok(queued?)
    }

    /// Copies bytes in, and waits for it.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.check(offset, bytes.len())?;
        // SAFETY: as in `read_at`.
        let queued = unsafe { self.stream.copy_to_device(at, bytes.as_ptr(), bytes.len() as u64) };
        self.stream.synchronize()?;
        Ok(queued?)
    }

    /// Closes it, which may hang in the driver.
    ///
    /// # Errors
    /// What the driver says of a legacy mapping; one of a descriptor is dropped.
    pub fn close(self) -> Result<()> {
        match self.mapping {
            Mapping::Legacy(import) => Ok(import.close()?),
            Mapping::Vmm(import) => {
                drop(import);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_has_a_place_of_its_own_and_neighbours_are_apart() {
        for slots in [1, 2, 8, 128] {
            let mut places: Vec<u32> = (0..slots).map(|slot| elsewhere(slot, slots)).collect();
            if slots > 2 {
                assert!(places.windows(2).all(|two| two[0].abs_diff(two[1]) > 1), "{places:?}");
            }
            places.sort_unstable();
            assert_eq!(places, (0..slots).collect::<Vec<u32>>());
        }
    }

    #[test]
    fn a_region_reaches_to_the_end_of_its_last_run() {
        let plane = PlaneEntry {
            offset: 100,
            block_stride: 1000,
            row_stride: 50,
            row_bytes: 20,
            rows: 3,
            ..PlaneEntry::default()
        };
        assert_eq!(region_bytes(&[plane], 4), Some(100 + 3 * 1000 + 2 * 50 + 20));
        let far = PlaneEntry { block_stride: u64::MAX / 2, ..plane };
        assert_eq!(region_bytes(&[plane, far], 4), None);
        assert_eq!(region_bytes(&[plane, PlaneEntry { rows: 0, ..plane }], 4), None);
        assert_eq!(region_bytes(&[], 4), None);
    }
}
