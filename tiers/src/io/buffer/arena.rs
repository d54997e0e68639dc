//! The host tier's memory: one mapping cut into slabs, each slab cut into equal slots.
//!
//! Which slot holds which block is decided elsewhere; here a slot is only lent out. Borrows are
//! checked at run time, as a `RefCell` does: any number of [`SlotRead`], or one [`SlotWrite`].
//! A guard owns a share of the arena, so a slot stays mapped as long as anybody (the ring, say)
//! may still touch it.
//!
//! Invariants:
//! 1. Nobody else maps the memory, so bytes change only through a [`SlotWrite`].
//! 2. Two slots of one binding share no byte, and a slab is bound anew only while none of its
//!    slots is borrowed.
//! 3. The bytes of a slot behind the length that was asked for, up to the page's end, are zero
//!    when a writer gets it: no earlier block's bytes go to the device as padding.
//!
//! Lock order: one lock at a time, a slab's or that of the marks, and none while another is held.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use rustix::fs::MemfdFlags;

use super::kept::{self, ArenaFiles, Head, KeptSlab};
use super::mapping::Mapping;
use super::source::{PageKind, Source, memfd};
use crate::block::{DESCRIPTOR_BYTES, DISOWNED, MAGIC_BYTES, PAGE_BYTES, page_ceil};
use crate::catalog::SlotId;

/// The largest slab, so that a slab always fits into one registered buffer of the ring.
pub const SLAB_BYTES_MAX: u32 = 1 << 30;

/// How much the pre-touching thread asks of the kernel at a time.
const TOUCH_BYTES: u64 = 8 << 20;

/// The state of a slot that has a writer; smaller numbers count readers.
const WRITER: u32 = u32::MAX;

/// Why a slot or a slab was not lent or bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// Somebody holds the slot in a way that excludes this use.
    #[error("slot {0:?} is in use")]
    Busy(SlotId),
    /// Not the first page of a slot, by the binding of its slab.
    #[error("{0:?} is not the start of a slot")]
    NotASlot(SlotId),
    /// More bytes than the slot has.
    #[error("{bytes} bytes do not fit a slot of {slot_bytes}")]
    TooLong {
        /// Bytes asked for.
        bytes: u32,
        /// Bytes of the slot.
        slot_bytes: u32,
    },
    /// The arena has fewer slabs.
    #[error("the arena has no slab {0}")]
    NoSuchSlab(u32),
    /// A slot of the slab is borrowed.
    #[error("slab {0} has slots in use")]
    SlabInUse(u32),
    /// Slots must be whole pages, and at least one must fit the slab.
    #[error("{slot_bytes} bytes are no slot size: whole pages of 4 KiB, at most {slab_bytes}")]
    SlotBytes {
        /// What was asked for.
        slot_bytes: u32,
        /// Bytes of a slab.
        slab_bytes: u32,
    },
}

/// How one slab is cut at present, and who holds its slots.
#[derive(Default)]
struct Binding {
    /// 0: not bound.
    slot_bytes: u32,
    /// 0 free, [`WRITER`], or the number of readers; one per slot.
    states: Box<[AtomicU32]>,
}

impl Binding {
    fn new(slot_bytes: u32, slab_bytes: u32) -> Binding {
        let states = (0..slab_bytes / slot_bytes).map(|_| AtomicU32::new(0)).collect();
        Binding { slot_bytes, states }
    }
}

/// What the pre-touching thread shares with the arena.
struct Touch {
    mapping: Mapping,
    stop: AtomicBool,
    /// Bytes from the start whose pages are there.
    done: AtomicU64,
}

/// The host tier's memory.
pub struct Arena {
    touch: Arc<Touch>,
    slab_bytes: u32,
    slabs: Box<[RwLock<Binding>]>,
    fd: Option<OwnedFd>,
    pages: PageKind,
    pages_why: String,
    descriptor_fd: OwnedFd,
    /// The table: head, bindings, descriptors ([`kept`]).
    descriptors: Mapping,
    /// Held to look for a mark and write the magic, and to mark: a block is disowned on one thread
    /// while another one ends the filling of its slot.
    marks: Mutex<()>,
    head: Head,
}

impl Arena {
    /// Takes `bytes` (rounded down to whole slabs) from the operating system, in the largest pages
    /// it gives, and lets a thread of its own touch them; returns at once. Needs no privileges.
    ///
    /// # Errors
    /// `InvalidInput` for slabs that are no whole pages or larger than [`SLAB_BYTES_MAX`], or when
    /// not one slab fits, or more than 16 TiB are asked for; else what the operating system says.
    pub fn create(bytes: u64, slab_bytes: u32) -> io::Result<Arc<Arena>> {
        Arena::make(bytes, slab_bytes, false)
    }

    /// As [`Arena::create`], but only of memory that can be handed to a next daemon, even if its
    /// pages are small.
    ///
    /// # Errors
    /// As [`Arena::create`].
    pub fn create_shared(bytes: u64, slab_bytes: u32) -> io::Result<Arc<Arena>> {
        Arena::make(bytes, slab_bytes, true)
    }

    fn make(bytes: u64, slab_bytes: u32, shared: bool) -> io::Result<Arc<Arena>> {
        let bytes = check_size(bytes, slab_bytes)?;
        let source = Source::best(bytes, shared)?;
        let head = Head::new(bytes, slab_bytes)?;
        let table = memfd("kvtide-descriptors", head.table_bytes(), MemfdFlags::empty())?;
        let arena = Arena::of(source, table, head)?;
        arena.descriptors.copy_in(0, &head.encode());
        Arena::start(arena)
    }

    /// Takes over the memory of an earlier daemon. What lies in it is told by
    /// [`Arena::kept_slabs`], and is to be trusted as far as its checksums go.
    ///
    /// # Errors
    /// Files that no daemon of this version made for an arena of this size, or that could be cut
    /// short; `bytes` and `slab_bytes` that are not possible.
    pub fn adopt(files: &ArenaFiles, bytes: u64, slab_bytes: u32) -> io::Result<Arc<Arena>> {
        let bytes = check_size(bytes, slab_bytes)?;
        let head = files.check(bytes, slab_bytes)?;
        let memory = files.memory.try_clone()?;
        let arena = Arena::of(Source::of_memfd(memory, bytes)?, files.table.try_clone()?, head)?;
        for (slab, lock) in (0..).zip(&arena.slabs) {
            let slot_bytes = kept::read_binding(&arena.descriptors, slab);
            if head.is_slot_size(slot_bytes) {
                let mut binding = lock.write().unwrap_or_else(PoisonError::into_inner);
                *binding = Binding::new(slot_bytes, slab_bytes);
            }
        }
        Arena::start(arena)
    }

    fn of(source: Source, descriptor_fd: OwnedFd, head: Head) -> io::Result<Arena> {
        let bytes = source.mapping.bytes();
        tracing::info!(bytes, pages = source.pages.name(), why = source.why, "host arena");
        let descriptors = Mapping::of_file(descriptor_fd.as_fd(), head.table_bytes())?;
        let touch = Arc::new(Touch {
            mapping: source.mapping,
            stop: AtomicBool::new(false),
            done: AtomicU64::new(0),
        });
        Ok(Arena {
            touch,
            slab_bytes: head.slab_bytes(),
            slabs: (0..head.slabs()).map(|_| RwLock::default()).collect(),
            fd: source.fd,
            pages: source.pages,
            pages_why: source.why,
            descriptor_fd,
            descriptors,
            marks: Mutex::new(()),
            head,
        })
    }

    fn start(arena: Arena) -> io::Result<Arc<Arena>> {
        let toucher = Arc::clone(&arena.touch);
        std::thread::Builder::new().name("kvtide-touch".into()).spawn(move || toucher.run())?;
        Ok(Arc::new(arena))
    }

    /// What seeds the checksums of the descriptors here ([`crate::block::Place::Host`]).
    pub fn salt(&self) -> u64 {
        self.head.salt()
    }

    /// The slabs that are cut into slots, each with the slots whose descriptors are not empty.
    pub fn kept_slabs(&self) -> Vec<KeptSlab> {
        let slabs = (0..self.slabs()).filter_map(|slab| {
            let slot_bytes = self.slot_bytes(slab)?;
            let slots = (0..self.slab_bytes / slot_bytes).filter_map(|index| {
                let slot = self.slot(slab, index)?;
                let descriptor = self.descriptor(slot)?;
                descriptor.iter().any(|byte| *byte != 0).then_some((slot, descriptor))
            });
            let slots: Vec<_> = slots.collect();
            (!slots.is_empty()).then_some(KeptSlab { slab, slot_bytes, slots })
        });
        slabs.collect()
    }

    /// Bytes of all slabs.
    pub fn bytes(&self) -> u64 {
        self.touch.mapping.bytes()
    }

    /// Bytes of one slab.
    pub fn slab_bytes(&self) -> u32 {
        self.slab_bytes
    }

    /// Number of slabs.
    pub fn slabs(&self) -> u32 {
        self.slabs.len() as u32
    }

    /// What the memory is made of.
    pub fn pages(&self) -> PageKind {
        self.pages
    }

    /// Why it is made of that, for the log and for `status`.
    pub fn pages_why(&self) -> &str {
        &self.pages_why
    }

    /// Bytes, from the start on, whose pages the background thread has already fetched.
    pub fn touched_bytes(&self) -> u64 {
        self.touch.done.load(Ordering::Acquire)
    }

    /// Bytes that the kernel really backs with huge pages now, as it says itself; `None` where it
    /// does not say. Reads `/proc/self/smaps`, so not for a hot path.
    pub fn huge_bytes(&self) -> Option<u64> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        Some(huge_bytes_in(&smaps, self.touch.mapping.base() as u64, self.bytes()))
    }

    /// What a next daemon needs to take the memory over: the memory and its table. `None` for
    /// private memory.
    pub fn files(&self) -> Option<(BorrowedFd<'_>, BorrowedFd<'_>)> {
        Some((self.fd.as_ref()?.as_fd(), self.descriptor_fd.as_fd()))
    }

    /// Cuts a slab into slots of `slot_bytes`, and forgets the descriptors of the slots it had.
    ///
    /// # Errors
    /// When a slot of the slab is borrowed, and for what is no slab or no slot size.
    pub fn bind_slab(&self, slab: u32, slot_bytes: u32) -> Result<(), SlotError> {
        let lock = self.slabs.get(slab as usize).ok_or(SlotError::NoSuchSlab(slab))?;
        let whole = slot_bytes != 0 && u64::from(slot_bytes).is_multiple_of(PAGE_BYTES);
        if !whole || slot_bytes > self.slab_bytes {
            return Err(SlotError::SlotBytes { slot_bytes, slab_bytes: self.slab_bytes });
        }
        let mut binding = lock.write().unwrap_or_else(PoisonError::into_inner);
        if binding.states.iter().any(|state| state.load(Ordering::Acquire) != 0) {
            return Err(SlotError::SlabInUse(slab));
        }
        let first = self.descriptor_offset(slab, 0);
        for index in 0..binding.states.len() as u64 {
            let at = first + index * DESCRIPTOR_BYTES as u64;
            self.descriptors.copy_in(at, &[0; DESCRIPTOR_BYTES]);
        }
        // No descriptor is there by which a next daemon could take bytes of the old cut for slots.
        kept::write_binding(&self.descriptors, slab, slot_bytes);
        *binding = Binding::new(slot_bytes, self.slab_bytes);
        Ok(())
    }

    /// The size of a slab's slots, bytes. `None` for a slab that was never bound.
    pub fn slot_bytes(&self, slab: u32) -> Option<u32> {
        let binding = self.binding(slab)?;
        (binding.slot_bytes != 0).then_some(binding.slot_bytes)
    }

    /// The name of slot `index` of a slab, by its present binding.
    pub fn slot(&self, slab: u32, index: u32) -> Option<SlotId> {
        let binding = self.binding(slab)?;
        binding.states.get(index as usize)?;
        let offset = u64::from(slab) * u64::from(self.slab_bytes)
            + u64::from(index) * u64::from(binding.slot_bytes);
        u32::try_from(offset / PAGE_BYTES).ok().map(SlotId)
    }

    /// Lends the first `bytes` of a slot for writing. Bytes behind them, up to the next page, are
    /// zeroed.
    ///
    /// # Errors
    /// When the slot is borrowed at all, is no slot, or is too small.
    pub fn write(self: &Arc<Self>, slot: SlotId, bytes: u32) -> Result<SlotWrite, SlotError> {
        let borrow = self.borrow(slot, bytes, |state| {
            state.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        let mut guard = SlotWrite { borrow };
        guard.zero_padding();
        Ok(guard)
    }

    /// Lends the first `bytes` of a slot for reading.
    ///
    /// # Errors
    /// When the slot has a writer, is no slot, or is too small.
    pub fn read(self: &Arc<Self>, slot: SlotId, bytes: u32) -> Result<SlotRead, SlotError> {
        let borrow = self.borrow(slot, bytes, |state| {
            let more = |count: u32| (count < WRITER - 1).then(|| count + 1);
            state.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
        })?;
        Ok(SlotRead { borrow })
    }

    /// The descriptor of a slot, as it was last set (zeroes at first). `None` for what is no slot.
    pub fn descriptor(&self, slot: SlotId) -> Option<[u8; DESCRIPTOR_BYTES]> {
        let (slab, index, _) = self.place(slot).ok()?;
        let mut out = [0; DESCRIPTOR_BYTES];
        self.descriptors.copy_out(self.descriptor_offset(slab, index), &mut out).then_some(out)
    }

    /// Sets the descriptor of a slot whose bytes are in place: its magic last, so that it is whole
    /// or is none, whenever the daemon ends. If the block was disowned while it was copied here, it
    /// stays disowned.
    ///
    /// # Errors
    /// For what is no slot.
    pub fn seal(&self, slot: SlotId, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Result<(), SlotError> {
        self.write_descriptor(slot, descriptor, true)
    }

    /// Sets the descriptor of a slot, its magic last, whatever it has been: a mark ends.
    ///
    /// # Errors
    /// For what is no slot.
    pub fn set_descriptor(
        &self,
        slot: SlotId,
        descriptor: &[u8; DESCRIPTOR_BYTES],
    ) -> Result<(), SlotError> {
        self.write_descriptor(slot, descriptor, false)
    }

    fn write_descriptor(
        &self,
        slot: SlotId,
        descriptor: &[u8; DESCRIPTOR_BYTES],
        mark_stays: bool,
    ) -> Result<(), SlotError> {
        let (slab, index, _) = self.place(slot)?;
        let at = self.descriptor_offset(slab, index);
        let (magic, rest) = descriptor.split_at(MAGIC_BYTES);
        self.descriptors.copy_in(at + MAGIC_BYTES as u64, rest);
        fence(Ordering::Release);
        let _marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = [0; MAGIC_BYTES];
        let marked = self.descriptors.copy_out(at, &mut found) && found == DISOWNED;
        if !(marked && mark_stays) {
            self.descriptors.copy_in(at, magic);
        }
        Ok(())
    }

    /// Marks the descriptor of a slot, so that no next daemon takes its block over; operations that
    /// read the slot go on ([`crate::block::Descriptor::decode_in_use`]). In a whole descriptor one
    /// byte changes: the mark is there or is not, whenever the daemon ends. A slot that is still
    /// being filled has the mark before it has the rest. [`Arena::set_descriptor`] ends it, and so
    /// does a new binding.
    ///
    /// # Errors
    /// For what is no slot.
    pub fn disown(&self, slot: SlotId) -> Result<(), SlotError> {
        let (slab, index, _) = self.place(slot)?;
        let _marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        self.descriptors.copy_in(self.descriptor_offset(slab, index), &DISOWNED);
        Ok(())
    }

    /// For tests only: flips a bit of a slot's memory, as a bad RAM cell would.
    ///
    /// # Errors
    /// When the slot is borrowed, is no slot, or ends before `byte`.
    #[doc(hidden)]
    pub fn flip_bit(self: &Arc<Self>, slot: SlotId, byte: u32, bit: u8) -> Result<(), SlotError> {
        let mut borrow = self.borrow(slot, byte.saturating_add(1), |state| {
            state.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        borrow.len = byte.saturating_add(1);
        let mut guard = SlotWrite { borrow };
        if let Some(last) = guard.last_mut() {
            *last ^= 1 << (bit % 8);
        }
        Ok(())
    }

    /// The memory as the ring and the GPU see it: its first byte.
    #[cfg(any(feature = "uring", feature = "cuda"))]
    pub(crate) fn base(&self) -> *mut u8 {
        self.touch.mapping.base()
    }

    fn binding(&self, slab: u32) -> Option<RwLockReadGuard<'_, Binding>> {
        let lock = self.slabs.get(slab as usize)?;
        Some(lock.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// A table as long as if all slots were single pages, dense within each slab.
    fn descriptor_offset(&self, slab: u32, index: u32) -> u64 {
        self.head.descriptor_offset(slab, index)
    }

    /// Slab, index and slot size of a slot.
    fn place(&self, slot: SlotId) -> Result<(u32, u32, u32), SlotError> {
        let not_a_slot = SlotError::NotASlot(slot);
        let slab_bytes = u64::from(self.slab_bytes);
        let slab = u32::try_from(slot.offset() / slab_bytes).map_err(|_| not_a_slot)?;
        let binding = self.binding(slab).ok_or(not_a_slot)?;
        let within = (slot.offset() % slab_bytes) as u32;
        let index = within.checked_div(binding.slot_bytes).ok_or(not_a_slot)?;
        let starts = within.is_multiple_of(binding.slot_bytes);
        if !starts || binding.states.len() <= index as usize {
            return Err(not_a_slot);
        }
        Ok((slab, index, binding.slot_bytes))
    }

    fn borrow(
        self: &Arc<Self>,
        slot: SlotId,
        bytes: u32,
        take: impl FnOnce(&AtomicU32) -> bool,
    ) -> Result<Borrow, SlotError> {
        let (slab, index, slot_bytes) = self.place(slot)?;
        if bytes > slot_bytes {
            return Err(SlotError::TooLong { bytes, slot_bytes });
        }
        let binding = self.binding(slab).ok_or(SlotError::NotASlot(slot))?;
        // Between `place` and here the slab may have been bound anew.
        if binding.slot_bytes != slot_bytes {
            return Err(SlotError::NotASlot(slot));
        }
        let state = binding.states.get(index as usize).ok_or(SlotError::NotASlot(slot))?;
        if !take(state) {
            return Err(SlotError::Busy(slot));
        }
        drop(binding);
        Ok(Borrow { arena: Arc::clone(self), slot, slab, index, slot_bytes, len: bytes })
    }
}

/// The bytes of all whole slabs.
fn check_size(bytes: u64, slab_bytes: u32) -> io::Result<u64> {
    let bad = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why.to_owned()));
    if slab_bytes == 0 || !u64::from(slab_bytes).is_multiple_of(PAGE_BYTES) {
        return bad("slabs must be whole pages of 4 KiB");
    }
    if slab_bytes > SLAB_BYTES_MAX {
        return bad("slabs must be at most 1 GiB");
    }
    let bytes = bytes / u64::from(slab_bytes) * u64::from(slab_bytes);
    if bytes == 0 {
        return bad("not one slab fits into the arena");
    }
    if bytes / PAGE_BYTES > u64::from(u32::MAX) {
        return bad("the arena is larger than 16 TiB");
    }
    Ok(bytes)
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.touch.stop.store(true, Ordering::Relaxed);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Arena({} bytes, {})", self.bytes(), self.pages.name())
    }
}

impl Touch {
    fn run(&self) {
        let bytes = self.mapping.bytes();
        let mut at = 0;
        while at < bytes && !self.stop.load(Ordering::Relaxed) {
            let step = TOUCH_BYTES.min(bytes - at);
            if !self.mapping.populate(at, step) {
                // Too old a kernel, or no memory: pages then come at first use.
                tracing::info!(
                    touched_bytes = at,
                    arena_bytes = bytes,
                    "the kernel does not provide the arena's pages ahead; they come at first use"
                );
                return;
            }
            at += step;
            self.done.store(at, Ordering::Release);
        }
    }
}

/// Adds up what the kernel says of huge pages in the mappings that overlap the range.
fn huge_bytes_in(smaps: &str, base: u64, bytes: u64) -> u64 {
    let fields = ["AnonHugePages:", "ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"];
    let mut inside = false;
    let mut kib = 0;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some((start, end)) = first.split_once('-') {
            let ends = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16));
            if let (Ok(start), Ok(end)) = ends {
                inside = start < base + bytes && base < end;
            }
        } else if inside && fields.contains(&first) {
            kib += words.next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    (kib * 1024).min(bytes)
}

/// One borrow of a slot; its drop ends it.
struct Borrow {
    arena: Arc<Arena>,
    slot: SlotId,
    slab: u32,
    index: u32,
    slot_bytes: u32,
    len: u32,
}

impl Borrow {
    fn start(&self) -> *mut u8 {
        self.arena.touch.mapping.base().wrapping_add(self.slot.offset() as usize)
    }

    /// Runs `f` on the state; the slab cannot be bound anew while this borrow lives.
    fn state<R>(&self, f: impl FnOnce(&AtomicU32) -> R) -> Option<R> {
        let binding = self.arena.binding(self.slab)?;
        binding.states.get(self.index as usize).map(f)
    }

    fn set_len(&mut self, bytes: u32) -> bool {
        let fits = bytes <= self.slot_bytes;
        if fits {
            self.len = bytes;
        }
        fits
    }
}

impl Drop for Borrow {
    fn drop(&mut self) {
        self.state(|state| {
            if state.load(Ordering::Relaxed) == WRITER {
                state.store(0, Ordering::Release);
            } else {
                state.fetch_sub(1, Ordering::Release);
            }
        });
    }
}

/// A slot lent for writing: nobody else reads or writes it.
pub struct SlotWrite {
    borrow: Borrow,
}

impl SlotWrite {
    /// Which slot.
    pub fn slot(&self) -> SlotId {
        self.borrow.slot
    }

    /// Bytes of the whole slot.
    pub fn slot_bytes(&self) -> u32 {
        self.borrow.slot_bytes
    }

    /// Changes how many bytes are lent. `false` (and no change) when the slot has fewer.
    pub fn set_len(&mut self, bytes: u32) -> bool {
        self.borrow.set_len(bytes)
    }

    /// The same slot, lent for reading: what was written is final.
    pub fn into_read(self) -> SlotRead {
        self.borrow.state(|state| state.store(1, Ordering::Release));
        SlotRead { borrow: self.borrow }
    }

    fn zero_padding(&mut self) {
        let len = self.borrow.len;
        let whole = page_ceil(u64::from(len)) as u32;
        if self.set_len(whole) {
            self.iter_mut().skip(len as usize).for_each(|byte| *byte = 0);
            self.borrow.len = len;
        }
    }

    /// The address of the first byte, for the ring.
    #[cfg(feature = "uring")]
    pub(crate) fn start(&self) -> *mut u8 {
        self.borrow.start()
    }

    /// Bytes lent, without looking at them.
    #[cfg(feature = "uring")]
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.borrow.len)
    }
}

impl Deref for SlotWrite {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot lies in the arena's mapping, which the borrow's `Arc` keeps; its state
        // says that this guard is the only one; `len` is at most the slot's size. While the kernel
        // writes to it, the guard is inside the ring's table, which never dereferences it.
        unsafe { std::slice::from_raw_parts(self.borrow.start(), self.borrow.len as usize) }
    }
}

impl DerefMut for SlotWrite {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.borrow.start(), self.borrow.len as usize) }
    }
}

impl fmt::Debug for SlotWrite {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "SlotWrite({:?}, {} bytes)", self.borrow.slot, self.borrow.len)
    }
}

/// A slot lent for reading: nobody writes it.
pub struct SlotRead {
    borrow: Borrow,
}

impl SlotRead {
    /// Which slot.
    pub fn slot(&self) -> SlotId {
        self.borrow.slot
    }

    /// Bytes of the whole slot.
    pub fn slot_bytes(&self) -> u32 {
        self.borrow.slot_bytes
    }

    /// Changes how many bytes are lent. `false` (and no change) when the slot has fewer.
    pub fn set_len(&mut self, bytes: u32) -> bool {
        self.borrow.set_len(bytes)
    }

    /// The address of the first byte, for the ring.
    #[cfg(feature = "uring")]
    pub(crate) fn start(&self) -> *mut u8 {
        self.borrow.start()
    }

    /// Bytes lent, without looking at them.
    #[cfg(feature = "uring")]
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.borrow.len)
    }
}

impl Deref for SlotRead {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot lies in the arena's mapping, which the borrow's `Arc` keeps; its state
        // counts this reader, so there is no writer; `len` is at most the slot's size.
        unsafe { std::slice::from_raw_parts(self.borrow.start(), self.borrow.len as usize) }
    }
}

impl fmt::Debug for SlotRead {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "SlotRead({:?}, {} bytes)", self.borrow.slot, self.borrow.len)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const SLAB: u32 = 64 << 10;

    #[test]
    fn borrows_are_checked_like_a_ref_cell() {
        let arena = Arena::create(4 * u64::from(SLAB), SLAB).unwrap();
        arena.bind_slab(1, 8192).unwrap();
        let slot = arena.slot(1, 3).unwrap();
        assert_eq!(slot, SlotId((SLAB + 3 * 8192) / 4096));
        let mut writer = arena.write(slot, 5000).unwrap();
        writer.fill(7);
        assert_eq!(arena.read(slot, 1).unwrap_err(), SlotError::Busy(slot));
        assert_eq!(arena.write(slot, 1).unwrap_err(), SlotError::Busy(slot));
        assert_eq!(arena.bind_slab(1, 4096), Err(SlotError::SlabInUse(1)));
        let one = writer.into_read();
        let mut two = arena.read(slot, 5000).unwrap();
        assert_eq!(&one[..], &two[..]);
        assert_eq!(arena.write(slot, 1).unwrap_err(), SlotError::Busy(slot));
        drop(one);
        assert_eq!(arena.write(slot, 1).unwrap_err(), SlotError::Busy(slot));
        // The rest of the page is zeroes: padding for the device.
        assert!(two.set_len(8192));
        assert!(!two.set_len(8193));
        assert!(two[5000..].iter().all(|byte| *byte == 0));
        drop(two);
        drop(arena.write(slot, 1).unwrap());
        arena.bind_slab(1, 4096).unwrap();
        assert_eq!(arena.slot_bytes(1), Some(4096));
    }

    #[test]
    fn what_is_no_slot_or_no_size_is_refused() {
        let arena = Arena::create(2 * u64::from(SLAB), SLAB).unwrap();
        let unbound = SlotId(0);
        assert_eq!(arena.read(unbound, 1).unwrap_err(), SlotError::NotASlot(unbound));
        arena.bind_slab(0, 12288).unwrap();
        // Five slots of three pages; the sixteenth page is nobody's.
        for (slot, fine) in [(0, true), (1, false), (3, true), (12, true), (15, false)] {
            assert_eq!(arena.read(SlotId(slot), 1).is_ok(), fine, "slot {slot}");
        }
        let far = SlotId(u32::MAX);
        assert_eq!(arena.read(far, 1).unwrap_err(), SlotError::NotASlot(far));
        assert!(matches!(arena.read(SlotId(0), 12289), Err(SlotError::TooLong { .. })));
        assert_eq!(arena.bind_slab(2, 4096), Err(SlotError::NoSuchSlab(2)));
        for bad in [0, 100, SLAB + 4096] {
            assert!(matches!(arena.bind_slab(1, bad), Err(SlotError::SlotBytes { .. })));
        }
        for (bytes, slab) in [(SLAB, 0), (SLAB, 5000), (100, SLAB), (SLAB, 2 << 30)] {
            assert!(Arena::create(u64::from(bytes), slab).is_err());
        }
    }

    #[test]
    fn descriptors_belong_to_slots_and_end_with_the_binding() {
        let arena = Arena::create(2 * u64::from(SLAB), SLAB).unwrap();
        arena.bind_slab(0, 4096).unwrap();
        arena.bind_slab(1, 4096).unwrap();
        for index in 0..16 {
            for slab in 0..2 {
                let slot = arena.slot(slab, index).unwrap();
                arena.set_descriptor(slot, &[(slab * 16 + index + 1) as u8; 256]).unwrap();
            }
        }
        arena.bind_slab(0, 8192).unwrap();
        assert_eq!(arena.descriptor(arena.slot(0, 3).unwrap()), Some([0; 256]));
        assert_eq!(arena.descriptor(arena.slot(1, 3).unwrap()), Some([20; 256]));
        assert_eq!(arena.descriptor(SlotId(1)), None);
        assert!(arena.set_descriptor(SlotId(1), &[0; 256]).is_err());
    }

    #[test]
    fn a_mark_stays_when_the_slot_is_sealed_and_ends_when_it_is_voided() {
        let arena = Arena::create(u64::from(SLAB), SLAB).unwrap();
        arena.bind_slab(0, 4096).unwrap();
        let (first, second) = (arena.slot(0, 1).unwrap(), arena.slot(0, 2).unwrap());
        let mut whole = [7; DESCRIPTOR_BYTES];
        whole[..MAGIC_BYTES].copy_from_slice(b"KVTd");
        let mut marked = whole;
        marked[..MAGIC_BYTES].copy_from_slice(&DISOWNED);
        // Before it is sealed, and after.
        arena.disown(first).unwrap();
        arena.seal(first, &whole).unwrap();
        arena.seal(second, &whole).unwrap();
        assert_eq!(arena.descriptor(second), Some(whole));
        arena.disown(second).unwrap();
        for slot in [first, second] {
            assert_eq!(arena.descriptor(slot), Some(marked));
            arena.set_descriptor(slot, &[0; DESCRIPTOR_BYTES]).unwrap();
            arena.seal(slot, &whole).unwrap();
            assert_eq!(arena.descriptor(slot), Some(whole));
        }
        assert!(arena.seal(SlotId(SLAB), &whole).is_err());
    }

    /// Whichever comes first, in each of many slots.
    #[test]
    fn a_mark_is_not_lost_to_a_thread_that_seals_meanwhile() {
        let arena = Arena::create(u64::from(SLAB), SLAB).unwrap();
        arena.bind_slab(0, 4096).unwrap();
        let slots: Vec<SlotId> = (0..16).map(|index| arena.slot(0, index).unwrap()).collect();
        let mut whole = [7; DESCRIPTOR_BYTES];
        whole[..MAGIC_BYTES].copy_from_slice(b"KVTd");
        for _ in 0..100 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    slots.iter().for_each(|slot| arena.seal(*slot, &whole).unwrap());
                });
                slots.iter().for_each(|slot| arena.disown(*slot).unwrap());
            });
            for slot in &slots {
                assert_eq!(arena.descriptor(*slot).unwrap()[..MAGIC_BYTES], DISOWNED);
                arena.set_descriptor(*slot, &[0; DESCRIPTOR_BYTES]).unwrap();
            }
        }
    }

    #[test]
    fn a_bad_cell_flips_one_bit() {
        let arena = Arena::create(u64::from(SLAB), SLAB).unwrap();
        arena.bind_slab(0, 4096).unwrap();
        let slot = arena.slot(0, 1).unwrap();
        arena.write(slot, 4096).unwrap().fill(0);
        arena.flip_bit(slot, 17, 3).unwrap();
        let read = arena.read(slot, 4096).unwrap();
        assert_eq!(read.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
        assert_eq!(read[17], 8);
        assert!(arena.flip_bit(slot, 4096, 0).is_err());
    }

    #[test]
    fn pages_are_touched_ahead_and_what_was_got_is_said() {
        let arena = Arena::create(32 << 20, 4 << 20).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while arena.touched_bytes() < arena.bytes() && std::time::Instant::now() < until {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(arena.touched_bytes(), arena.bytes());
        println!(
            "{}: {}; {:?} of {} bytes in huge pages",
            arena.pages().name(),
            arena.pages_why(),
            arena.huge_bytes(),
            arena.bytes()
        );
        if arena.pages() == PageKind::Plain {
            assert_eq!(arena.huge_bytes(), Some(0));
        }
    }

    #[test]
    fn an_arena_that_is_dropped_at_once_does_not_wait_for_its_pages() {
        let start = std::time::Instant::now();
        drop(Arena::create(4 << 30, 64 << 20).unwrap());
        assert!(start.elapsed() < std::time::Duration::from_millis(500));
    }

    #[test]
    fn huge_pages_are_counted_from_smaps() {
        let smaps = "7f00000000-7f00400000 rw-p 00000000 00:00 0\nRss: 4096 kB\n\
                     AnonHugePages: 2048 kB\n7f00400000-7f00500000 rw-p 0 00:00 0\n\
                     AnonHugePages: 1024 kB\n";
        assert_eq!(huge_bytes_in(smaps, 0x7f_0000_0000, 4 << 20), 2 << 20);
        assert_eq!(huge_bytes_in(smaps, 0x7f_0020_0000, 4 << 20), 3 << 20);
        assert_eq!(huge_bytes_in(smaps, 0x7f_0050_0000, 4 << 20), 0);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Bind(u32, u32),
        Write(u32, u8),
        Read(u32),
        HoldWrite(u32),
        HoldRead(u32),
        Release(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let slot = 0u32..32;
        prop::collection::vec(
            prop_oneof![
                (0u32..2, 1u32..5).prop_map(|(slab, pages)| Step::Bind(slab, pages)),
                (slot.clone(), any::<u8>()).prop_map(|(slot, byte)| Step::Write(slot, byte)),
                slot.clone().prop_map(Step::Read),
                slot.clone().prop_map(Step::HoldWrite),
                slot.prop_map(Step::HoldRead),
                any::<usize>().prop_map(Step::Release),
            ],
            1..120,
        )
    }

    enum Held {
        Write(SlotWrite),
        Read(SlotRead),
    }

    impl Held {
        fn slot(&self) -> SlotId {
            match self {
                Held::Write(guard) => guard.slot(),
                Held::Read(guard) => guard.slot(),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Borrows, bindings and bytes agree with a plain model.
        #[test]
        fn the_arena_agrees_with_a_model(steps in steps()) {
            let arena = Arena::create(2 * u64::from(SLAB), SLAB).unwrap();
            let mut pages: [u32; 2] = [0, 0];
            let mut bytes: HashMap<SlotId, u8> = HashMap::new();
            let mut held: Vec<Held> = Vec::new();
            for step in steps {
                let holders = |held: &[Held], slot: SlotId| {
                    let mut count = (0, 0);
                    for one in held.iter().filter(|one| one.slot() == slot) {
                        match one {
                            Held::Write(_) => count.0 += 1,
                            Held::Read(_) => count.1 += 1,
                        }
                    }
                    count
                };
                let is_slot = |slot: u32| {
                    let size = pages[slot as usize / 16];
                    size != 0 && (slot % 16).is_multiple_of(size) && slot % 16 / size < 16 / size
                };
                match step {
                    Step::Bind(slab, size) => {
                        let used = held.iter().any(|one| one.slot().0 / 16 == slab);
                        let bound = arena.bind_slab(slab, size * 4096);
                        prop_assert_eq!(bound.is_ok(), !used);
                        if !used {
                            pages[slab as usize] = size;
                            bytes.retain(|slot, _| slot.0 / 16 != slab);
                        }
                    }
                    Step::Write(slot, byte) => {
                        let id = SlotId(slot);
                        let may = is_slot(slot) && holders(&held, id) == (0, 0);
                        let size = pages[slot as usize / 16] * 4096;
                        let got = arena.write(id, if may { size } else { 1 });
                        prop_assert_eq!(got.is_ok(), may);
                        if let Ok(mut guard) = got {
                            guard.fill(byte);
                            bytes.insert(id, byte);
                        }
                    }
                    Step::Read(slot) => {
                        let id = SlotId(slot);
                        let may = is_slot(slot) && holders(&held, id).0 == 0;
                        let size = pages[slot as usize / 16] * 4096;
                        let got = arena.read(id, if may { size } else { 1 });
                        prop_assert_eq!(got.is_ok(), may);
                        if let (Ok(guard), Some(byte)) = (got, bytes.get(&id)) {
                            prop_assert!(guard.iter().all(|one| one == byte));
                        }
                    }
                    Step::HoldWrite(slot) => {
                        let id = SlotId(slot);
                        let may = is_slot(slot) && holders(&held, id) == (0, 0);
                        let got = arena.write(id, 0);
                        prop_assert_eq!(got.is_ok(), may);
                        held.extend(got.ok().map(Held::Write));
                    }
                    Step::HoldRead(slot) => {
                        let id = SlotId(slot);
                        let may = is_slot(slot) && holders(&held, id).0 == 0;
                        let got = arena.read(id, 0);
                        prop_assert_eq!(got.is_ok(), may);
                        held.extend(got.ok().map(Held::Read));
                    }
                    Step::Release(at) => {
                        if !held.is_empty() {
                            held.swap_remove(at % held.len());
                        }
                    }
                }
            }
        }
    }
}
