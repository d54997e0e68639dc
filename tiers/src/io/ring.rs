//! The block device on io_uring.
//!
//! One thread creates, drives and drops a ring (the kernel is told so, which saves it work).
//! Operations lie in a table of fixed size; a completion names its entry and the entry's
//! generation, so one that is stale, or nobody's, is counted and ignored.
//!
//! Invariants:
//! 1. An entry owns its buffer from before the kernel can know of it until the completion was
//!    taken. If the kernel does not give an operation back when the device is dropped, its buffer
//!    is leaked: lost memory is better than memory that changes under its next owner.
//! 2. No reference to a buffer is made while its entry is in the table.
//! 3. At most one entry of the submission queue exists per operation, plus one for the wake-up and
//!    one for the cancellation, and the queue has room for all of them.

#![expect(unsafe_code, reason = "one of the four homes of unsafe code: raw memory and the ring")]

use std::fmt;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{EnterFlags, IoUring, Probe, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::blocking::in_range;
use super::device::{Next, Progress, capacity_of};
use super::{
    Arena, BlockDevice, IoBuffer, IoDone, IoFailure, IoOp, RingKind, RingReport, RingStatus, Waker,
};

/// The user data of the wake-up's poll.
const WAKE: u64 = u64::MAX;

/// The user data of the cancellation when the device is dropped.
const CANCEL: u64 = u64::MAX - 1;

/// About how much of the arena one registered buffer covers; whole slabs, at most 1 GiB.
const CHUNK_BYTES: u64 = 256 << 20;

/// Most registered buffers of a ring.
const CHUNKS_MAX: u64 = 16_384;

/// How long dropping the device waits for operations to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// An operation under way.
struct InFlight {
    user: u64,
    offset: u64,
    progress: Progress,
    buffer: IoBuffer,
}

/// A place of the table. The generation tells its operations apart.
#[derive(Default)]
struct Entry {
    generation: u32,
    op: Option<InFlight>,
}

/// The arena's registration with the ring, which follows the touching of its pages.
struct Fixed {
    arena: Arc<Arena>,
    chunk_bytes: u64,
    /// Bytes from the start of the arena that are registered; whole chunks.
    registered: u64,
    /// No more will be registered.
    given_up: bool,
}

/// A file driven by a ring.
pub struct RingDevice {
    /// Dropped by hand, after the operations were drained.
    ring: ManuallyDrop<IoUring>,
    /// Leaked with the arena if operations could not be drained.
    table: ManuallyDrop<Vec<Entry>>,
    fixed: ManuallyDrop<Option<Fixed>>,
    free: Vec<u32>,
    /// Completions of what was never given to the kernel.
    finished: Vec<IoDone>,
    file: File,
    file_registered: bool,
    capacity_bytes: u64,
    wake: Arc<OwnedFd>,
    wake_armed: bool,
    status: Arc<RingStatus>,
}

impl RingDevice {
    /// Sets up a ring for the calling thread, which must be the only one to use and drop it.
    ///
    /// # Errors
    /// When the kernel refuses io_uring, or is too old for timeouts on waiting (before 5.11).
    pub fn new(
        file: File,
        arena: Option<Arc<Arena>>,
        queue_depth: u32,
        status: Arc<RingStatus>,
    ) -> io::Result<RingDevice> {
        let queue_depth = queue_depth.max(1);
        let capacity_bytes = capacity_of(&file)?;
        let (ring, setup) = build(queue_depth + 2)?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel is older than 5.11",
            ));
        }
        check_operations(&ring)?;
        let file_registered = ring.submitter().register_files(&[file.as_raw_fd()]).is_ok();
        let mut fixed_why = String::new();
        let fixed = arena.and_then(|arena| {
            let fixed = Fixed::prepare(&ring, arena);
            if let Err(error) = &fixed {
                fixed_why = error.to_string();
            }
            fixed.ok()
        });
        let wake = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        status.update(|report| {
            *report = RingReport {
                kind: RingKind::Uring,
                why: "the kernel allows it, and its probe passed".into(),
                setup: setup.into(),
                file_registered,
                fixed_why,
                ..RingReport::default()
            };
        });
        Ok(RingDevice {
            ring: ManuallyDrop::new(ring),
            table: ManuallyDrop::new((0..queue_depth).map(|_| Entry::default()).collect()),
            fixed: ManuallyDrop::new(fixed),
            free: (0..queue_depth).rev().collect(),
            finished: Vec::new(),
            file,
            file_registered,
            capacity_bytes,
            wake: Arc::new(wake),
            wake_armed: false,
            status,
        })
    }

    fn under_way(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Gives the kernel the rest of the operation at `index`.
    fn push(&mut self, index: u32) -> io::Result<()> {
        let Some(entry) = self.table.get(index as usize) else { return Ok(()) };
        let Some(op) = &entry.op else { return Ok(()) };
        let user_data = u64::from(entry.generation) << 32 | u64::from(index);
        let (start, len) = memory_of(&op.buffer);
        let done = op.progress.done();
        // Within the buffer: `done` is less than its length.
        let at = start.wrapping_add(done as usize);
        let bytes = u32::try_from(len - done).unwrap_or(u32::MAX);
        let offset = op.offset + done;
        let chunk = self.fixed.as_ref().and_then(|fixed| fixed.chunk(at, u64::from(bytes)));
        let entry = if self.file_registered {
            transfer(types::Fixed(0), op.buffer.is_read(), at, bytes, offset, chunk)
        } else {
            let fd = types::Fd(self.file.as_raw_fd());
            transfer(fd, op.buffer.is_read(), at, bytes, offset, chunk)
        };
        // SAFETY: the memory is owned by the table's entry and stays there until the completion
        // with this user data was taken (invariant 1); it is as long as `bytes` says from `at` on,
        // and writable if the device is read, because then the buffer is a `SlotWrite` or pages
        // owned by it. Nobody makes a reference to it meanwhile (invariant 2). A registered buffer
        // is named only if the range lies in it, and it stays registered as long as the ring.
        unsafe { self.push_entry(&entry.user_data(user_data)) }
    }

    /// Appends to the submission queue, making room if there is none.
    ///
    /// # Safety
    /// What the entry points to must stay valid until its completion was taken.
    unsafe fn push_entry(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        for _ in 0..2 {
            // SAFETY: passed on to the caller.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
        Err(io::Error::other("the ring's submission queue does not empty"))
    }

    /// Lets a completion come that belongs to no operation.
    #[cfg(test)]
    pub(super) fn push_foreign(&mut self, user_data: u64) {
        // SAFETY: a no-operation points to no memory.
        unsafe { self.push_entry(&opcode::Nop::new().build().user_data(user_data)).unwrap() }
    }

    /// Watches the eventfd, once.
    fn arm_wake(&mut self) -> io::Result<()> {
        if self.wake_armed {
            return Ok(());
        }
        let events = rustix::event::PollFlags::IN.bits();
        let poll = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), u32::from(events));
        // SAFETY: a poll points to no memory; the eventfd is open as long as the device.
        unsafe { self.push_entry(&poll.build().user_data(WAKE))? };
        self.wake_armed = true;
        Ok(())
    }

    /// Submits what is queued and waits for one completion at least, or the timeout.
    fn enter(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let span = timeout.map(|timeout| {
            types::Timespec::new().sec(timeout.as_secs()).nsec(timeout.subsec_nanos())
        });
        let args = types::SubmitArgs::new();
        let args = span.iter().fold(args, |args, span| args.timespec(span));
        // Waiting for a wake-up alone is not waiting for a disk: monitoring would show an idle
        // daemon as a CPU that waits for I/O.
        let idle = self.under_way() == 0 && self.ring.params().is_feature_no_iowait();
        let flags = if idle { EnterFlags::NO_IOWAIT } else { EnterFlags::empty() };
        match self.ring.submitter().submit_with_args_and_flags(1, &args, flags) {
            Ok(_) => Ok(()),
            Err(error) => match Errno::from_io_error(&error) {
                // Out of time; a signal; completions to be taken first.
                Some(Errno::TIME | Errno::INTR | Errno::BUSY) => Ok(()),
                // No memory for requests right now.
                Some(Errno::AGAIN) => {
                    std::thread::sleep(Duration::from_millis(1));
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    /// Takes all completions that are there. `true` when one of them was the wake-up.
    fn take(&mut self, done: &mut Vec<IoDone>) -> io::Result<bool> {
        let mut woken = false;
        let mut again = Vec::new();
        let mut stale = 0;
        let completions: Vec<(u64, i32)> = self
            .ring
            .completion()
            .map(|completion| (completion.user_data(), completion.result()))
            .collect();
        for (user_data, result) in completions {
            match user_data {
                WAKE => {
                    self.wake_armed = false;
                    woken = true;
                }
                CANCEL => {}
                _ => match self.settle(user_data, result) {
                    Settled::Done(one) => done.push(one),
                    Settled::Again(index) => again.push(index),
                    Settled::Stale => stale += 1,
                },
            }
        }
        if woken {
            let mut count = [0; 8];
            // Nothing to read is as good: somebody else's wake-up was read before.
            let _ = rustix::io::read(&*self.wake, &mut count);
        }
        if stale > 0 || !again.is_empty() {
            self.status.update(|report| {
                report.stale_completions += stale;
                report.retries += again.len() as u64;
            });
        }
        for index in again {
            self.push(index)?;
        }
        Ok(woken)
    }

    /// What one completion means.
    fn settle(&mut self, user_data: u64, result: i32) -> Settled {
        let index = user_data as u32;
        let Some(entry) = self.table.get_mut(index as usize) else { return Settled::Stale };
        if entry.generation != (user_data >> 32) as u32 {
            return Settled::Stale;
        }
        let Some(op) = &mut entry.op else { return Settled::Stale };
        let transferred = u64::try_from(result).map_err(|_| result.saturating_neg());
        match op.progress.after(transferred) {
            Next::Again => Settled::Again(index),
            Next::Over(result) => {
                let Some(op) = entry.op.take() else { return Settled::Stale };
                // The highest generations are kept for the ring's own user data.
                entry.generation = (entry.generation + 1) % (u32::MAX - 1);
                self.free.push(index);
                Settled::Done(IoDone { user: op.user, buffer: op.buffer, result })
            }
        }
    }

    /// Registers what the background thread has touched since; says so when that is over.
    fn register_more(&mut self) {
        let Some(fixed) = self.fixed.as_mut() else { return };
        let before = fixed.registered;
        let refused = loop {
            match fixed.register_next(&self.ring) {
                Ok(true) => {}
                Ok(false) => break None,
                Err(error) => break Some(error),
            }
        };
        let (registered, all) = (fixed.registered, fixed.arena.bytes());
        if let Some(error) = &refused {
            tracing::info!(
                fixed_bytes = registered,
                arena_bytes = all,
                %error,
                "no more of the arena is registered with the ring; the rest is transferred by \
                 plain operations (raise the memlock limit to change that)"
            );
        } else if registered == all && before != all {
            tracing::info!(fixed_bytes = registered, "the arena is registered with the ring");
        }
        if registered != before || refused.is_some() {
            let why = refused.map_or_else(String::new, |error| error.to_string());
            self.status.update(|report| {
                report.fixed_bytes = registered;
                report.fixed_why = why;
            });
        }
    }

    /// Cancels what can be cancelled and waits for the rest. `false` when some are still out.
    fn drain(&mut self) -> bool {
        let until = Instant::now() + DRAIN_TIMEOUT;
        let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any());
        // SAFETY: a cancellation points to no memory.
        let pushed = unsafe { self.push_entry(&cancel.build().user_data(CANCEL)) };
        let mut done = Vec::new();
        while self.under_way() > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.enter(Some(left)).is_err() {
                break;
            }
            for (user_data, _) in self
                .ring
                .completion()
                .map(|completion| (completion.user_data(), completion.result()))
                .collect::<Vec<_>>()
            {
                // Whatever the result: the kernel is through with it, and nothing is retried.
                self.abandon(user_data, &mut done);
            }
        }
        drop(pushed);
        self.under_way() == 0
    }

    fn abandon(&mut self, user_data: u64, done: &mut Vec<IoBuffer>) {
        let index = user_data as u32;
        let Some(entry) = self.table.get_mut(index as usize) else { return };
        if entry.generation == (user_data >> 32) as u32
            && let Some(op) = entry.op.take()
        {
            self.free.push(index);
            done.push(op.buffer);
        }
    }
}

enum Settled {
    Done(IoDone),
    Again(u32),
    Stale,
}

impl BlockDevice for RingDevice {
    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn queue_depth(&self) -> usize {
        self.table.len()
    }

    fn in_flight(&self) -> usize {
        self.under_way() + self.finished.len()
    }

    fn submit(&mut self, op: IoOp) -> Result<(), IoOp> {
        if self.in_flight() >= self.table.len() {
            return Err(op);
        }
        let IoOp { user, offset, buffer } = op;
        let wanted = buffer.bytes().len() as u64;
        if !in_range(self.capacity_bytes, offset, wanted) || u32::try_from(wanted).is_err() {
            self.finished.push(IoDone { user, buffer, result: Err(IoFailure::OutOfRange) });
            return Ok(());
        }
        let Some(index) = self.free.pop() else { return Err(IoOp { user, offset, buffer }) };
        let progress = Progress::new(wanted);
        if let Some(entry) = self.table.get_mut(index as usize) {
            entry.op = Some(InFlight { user, offset, progress, buffer });
        }
        if let Err(error) = self.push(index) {
            // The kernel never saw it.
            let op = self.table.get_mut(index as usize).and_then(|entry| entry.op.take());
            self.free.push(index);
            if let Some(InFlight { user, buffer, .. }) = op {
                let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                self.finished.push(IoDone { user, buffer, result: Err(IoFailure::Os(errno)) });
            }
        }
        Ok(())
    }

    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.register_more();
        let before = done.len();
        loop {
            self.arm_wake()?;
            done.append(&mut self.finished);
            let left = if done.len() > before {
                Some(Duration::ZERO)
            } else {
                until.map(|until| until.saturating_duration_since(Instant::now()))
            };
            self.enter(left)?;
            let woken = self.take(done)?;
            let late = left.is_some_and(|left| left.is_zero());
            if woken || late || done.len() > before {
                return Ok(());
            }
        }
    }

    fn sync(&mut self) -> io::Result<()> {
        rustix::fs::fdatasync(&self.file).map_err(io::Error::from)
    }

    fn waker(&self) -> Waker {
        let wake = Arc::clone(&self.wake);
        // A full counter wakes as well as one more would.
        Waker::new(move || {
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        })
    }
}

impl Drop for RingDevice {
    fn drop(&mut self) {
        let drained = self.under_way() == 0 || self.drain();
        // SAFETY: dropped once, here, and not used again. Closing the ring unregisters the arena,
        // which is let go of only after that.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
        if drained {
            // SAFETY: as above; no operation is under way, so the kernel knows none of the memory.
            unsafe {
                ManuallyDrop::drop(&mut self.table);
                ManuallyDrop::drop(&mut self.fixed);
            }
        } else {
            tracing::error!(
                operations = self.under_way(),
                "transfers did not end in time; their memory is given up, not reused"
            );
        }
        self.status.update(|report| report.kind = RingKind::Closed);
    }
}

impl fmt::Debug for RingDevice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "RingDevice({} of {} in flight)", self.in_flight(), self.table.len())
    }
}

impl Fixed {
    /// An empty table of registered buffers, one place per chunk.
    fn prepare(ring: &IoUring, arena: Arc<Arena>) -> io::Result<Fixed> {
        let slab = u64::from(arena.slab_bytes());
        let most = arena.bytes().div_ceil(CHUNKS_MAX).max(CHUNK_BYTES);
        let chunk_bytes = (most / slab).max(1) * slab;
        let chunks = arena.bytes().div_ceil(chunk_bytes);
        let chunks = u32::try_from(chunks).map_err(|_| io::ErrorKind::OutOfMemory)?;
        ring.submitter().register_buffers_sparse(chunks)?;
        Ok(Fixed { arena, chunk_bytes, registered: 0, given_up: false })
    }

    /// Registers the next chunk, if its pages are touched. `false` when there is none.
    fn register_next(&mut self, ring: &IoUring) -> io::Result<bool> {
        let start = self.registered;
        let end = (start + self.chunk_bytes).min(self.arena.bytes());
        if self.given_up || start == end || self.arena.touched_bytes() < end {
            return Ok(false);
        }
        let index = (start / self.chunk_bytes) as u32;
        let buffer = libc::iovec {
            iov_base: self.arena.base().wrapping_add(start as usize).cast(),
            iov_len: (end - start) as usize,
        };
        // SAFETY: the range lies in the arena's mapping, which `self.arena` keeps until the ring
        // is closed (see the device's drop).
        let result = unsafe { ring.submitter().register_buffers_update(index, &[buffer], None) };
        if let Err(error) = result {
            self.given_up = true;
            return Err(error);
        }
        self.registered = end;
        Ok(true)
    }

    /// The registered buffer that holds the range, if one does.
    fn chunk(&self, start: *mut u8, bytes: u64) -> Option<u16> {
        let offset = (start as u64).checked_sub(self.arena.base() as u64)?;
        let end = offset.checked_add(bytes)?;
        let chunk = offset / self.chunk_bytes;
        let inside = end <= self.registered && end <= (chunk + 1) * self.chunk_bytes;
        if inside { u16::try_from(chunk).ok() } else { None }
    }
}

/// The memory of a buffer as the kernel sees it. Makes no reference to it.
fn memory_of(buffer: &IoBuffer) -> (*mut u8, u64) {
    match buffer {
        IoBuffer::Fill(slot) => (slot.start(), slot.bytes()),
        IoBuffer::Drain(slot) => (slot.start(), slot.bytes()),
        IoBuffer::FillPages(pages) | IoBuffer::DrainPages(pages) => (pages.start(), pages.bytes()),
    }
}

/// The submission entry of one transfer.
fn transfer(
    target: impl types_target::Target,
    is_read: bool,
    at: *mut u8,
    bytes: u32,
    offset: u64,
    chunk: Option<u16>,
) -> squeue::Entry {
    target.transfer(is_read, at, bytes, offset, chunk)
}

mod types_target {
    //! The two ways to name the file; the opcodes' builders take either, but share no trait.

    use io_uring::{opcode, squeue, types};

    pub(super) trait Target {
        fn transfer(
            self,
            is_read: bool,
            at: *mut u8,
            bytes: u32,
            offset: u64,
            chunk: Option<u16>,
        ) -> squeue::Entry;
    }

    macro_rules! target {
        ($kind:ty) => {
            impl Target for $kind {
                fn transfer(
                    self,
                    is_read: bool,
                    at: *mut u8,
                    bytes: u32,
                    offset: u64,
                    chunk: Option<u16>,
                ) -> squeue::Entry {
                    match (is_read, chunk) {
                        (true, None) => opcode::Read::new(self, at, bytes).offset(offset).build(),
                        (false, None) => opcode::Write::new(self, at, bytes).offset(offset).build(),
                        (true, Some(chunk)) => {
                            opcode::ReadFixed::new(self, at, bytes, chunk).offset(offset).build()
                        }
                        (false, Some(chunk)) => {
                            opcode::WriteFixed::new(self, at, bytes, chunk).offset(offset).build()
                        }
                    }
                }
            }
        };
    }

    target!(types::Fd);
    target!(types::Fixed);
}

/// A ring with the cheapest way of completing that the kernel knows.
fn build(entries: u32) -> io::Result<(IoUring, &'static str)> {
    let best = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_submit_all()
        .setup_clamp()
        .dontfork()
        .build(entries);
    if let Ok(ring) = best {
        return Ok((ring, "single issuer, deferred task work"));
    }
    let good =
        IoUring::builder().setup_coop_taskrun().setup_submit_all().setup_clamp().build(entries);
    if let Ok(ring) = good {
        return Ok((ring, "cooperative task work"));
    }
    Ok((IoUring::new(entries)?, "no flags"))
}

/// Whether the kernel has the operations used here.
fn check_operations(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::PollAdd::CODE,
        opcode::AsyncCancel2::CODE,
    ];
    if needed.into_iter().all(|code| probe.is_supported(code)) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring lacks operations"))
}
