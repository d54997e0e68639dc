//! The thread: takes jobs, starts operations in order of urgency, settles completions.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam::channel::{Receiver, TryRecvError};

use super::erase::{EraseBatch, EraseQueue};
use super::segments::OpenSegment;
use super::{NvmeDone, NvmeError, NvmeJob, NvmeOptions, ReadBuffer, Shared, WriteBuffer};
use crate::block::{Descriptor, PAGE_BYTES, Place, page_ceil};
use crate::io::{AlignedBuf, BlockDevice, IoBuffer, IoDone, IoFailure, IoOp};
use crate::segment::{DESCRIPTORS_PER_PAGE, StoreGeometry};

/// A checked write that waits.
pub(super) struct WriteJob {
    op: u64,
    segment: u32,
    sequence: u64,
    index: u32,
    descriptor: Descriptor,
    buffer: IoBuffer,
}

/// A checked read that waits.
struct ReadJob {
    op: u64,
    offset: u64,
    stored_bytes: u32,
    buffer: IoBuffer,
}

/// A header, a descriptor page, or a page to be erased in, that waits.
struct ControlJob {
    offset: u64,
    buffer: IoBuffer,
    op: Op,
}

/// What an operation in flight is for.
enum Op {
    Header {
        segment: u32,
        sequence: u64,
    },
    Page {
        segment: u32,
        sequence: u64,
        erased: Vec<u32>,
    },
    Payload {
        op: u64,
        segment: u32,
        sequence: u64,
        index: u32,
        descriptor: Descriptor,
        /// Of the transfer, whole pages.
        bytes: u64,
    },
    Read {
        op: u64,
        stored_bytes: u32,
        bytes: u64,
    },
    EraseRead {
        segment: u32,
        batch: EraseBatch,
    },
    EraseWrite {
        segment: u32,
        batch: EraseBatch,
    },
}

struct Worker {
    /// `None` only after it was given up.
    device: Option<Box<dyn BlockDevice>>,
    geometry: StoreGeometry,
    salt: u128,
    options: NvmeOptions,
    jobs: Receiver<NvmeJob>,
    shared: Arc<Shared>,
    done: Box<dyn FnMut(NvmeDone) + Send>,
    queues: Queues,
    segments: BTreeMap<u32, OpenSegment>,
    erasing: BTreeMap<u32, EraseQueue>,
    /// Jobs for a segment's next life that came before its last one was sealed.
    parked: BTreeMap<u32, VecDeque<NvmeJob>>,
    ops: HashMap<u64, Op>,
    flying: Flying,
    next_user: u64,
    /// When the stop gives up on the device, once a stop was asked for.
    stop: Option<Instant>,
}

/// What waits for a place in the device.
#[derive(Default)]
struct Queues {
    urgent: VecDeque<ReadJob>,
    reads: VecDeque<ReadJob>,
    control: VecDeque<ControlJob>,
    writes: VecDeque<WriteJob>,
    syncs: VecDeque<u64>,
}

/// What is in flight.
#[derive(Default)]
struct Flying {
    reads: usize,
    read_bytes: u64,
    write_bytes: u64,
}

/// Runs until the owner lets go of the channel. Answers every job, whatever happens.
pub(super) fn run(
    device: Box<dyn BlockDevice>,
    geometry: StoreGeometry,
    salt: u128,
    options: NvmeOptions,
    jobs: Receiver<NvmeJob>,
    shared: Arc<Shared>,
    done: Box<dyn FnMut(NvmeDone) + Send>,
) {
    let mut worker = Worker {
        device: Some(device),
        geometry,
        salt,
        options,
        jobs,
        shared,
        done,
        queues: Queues::default(),
        segments: BTreeMap::new(),
        erasing: BTreeMap::new(),
        parked: BTreeMap::new(),
        ops: HashMap::new(),
        flying: Flying::default(),
        next_user: 0,
        stop: None,
    };
    // The state is only used to fail what is in it.
    let why = match catch_unwind(AssertUnwindSafe(|| worker.run())) {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("the nvme worker panicked: {}", message_of(&*panic)),
    };
    tracing::error!(why, "the nvme device is given up");
    worker.give_up(why);
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

impl Worker {
    fn run(&mut self) -> io::Result<()> {
        let mut done = Vec::new();
        loop {
            self.take_jobs();
            self.commit(Instant::now());
            self.start_ops();
            self.finish_syncs();
            if self.stop.is_some() {
                if self.is_idle() {
                    return self.finish();
                }
                if self.stop.is_some_and(|deadline| deadline <= Instant::now()) {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "the device did not end its operations before the stop's deadline",
                    ));
                }
            }
            self.wait(&mut done)?;
            for one in done.drain(..) {
                self.settle(one);
            }
        }
    }

    /// Sleeps in the device until there is something to do.
    fn wait(&mut self, done: &mut Vec<IoDone>) -> io::Result<()> {
        let now = Instant::now();
        let delay = self.options.commit_delay;
        let commits = self.segments.values().filter(|segment| segment.opened);
        let due = commits.filter_map(|segment| segment.deadline(delay)).chain(self.stop).min();
        let mut timeout = due.map(|due| due.saturating_duration_since(now));
        self.shared.sleeps.store(true, Ordering::SeqCst);
        if !self.jobs.is_empty() {
            timeout = Some(std::time::Duration::ZERO);
        }
        let result = match &mut self.device {
            Some(device) => device.reap(timeout, done),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        self.shared.sleeps.store(false, Ordering::SeqCst);
        result
    }

    fn take_jobs(&mut self) {
        loop {
            match self.jobs.try_recv() {
                Ok(job) => self.take(job),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    if self.stop.is_none() {
                        self.stop = Some(Instant::now() + self.options.stop_timeout);
                        self.fail_waiting(NvmeError::Ended);
                    }
                    return;
                }
            }
        }
    }

    fn answer(&mut self, done: NvmeDone) {
        self.shared.jobs.fetch_sub(1, Ordering::Relaxed);
        (self.done)(done);
    }

    /// The segment behind whose seal the job must wait, if it must.
    fn waits_for_seal(&self, job: &NvmeJob) -> Option<u32> {
        let (segment, opens) = match job {
            NvmeJob::Open { segment, .. } => (segment, true),
            NvmeJob::Write { segment, .. }
            | NvmeJob::Seal { segment }
            | NvmeJob::Erase { segment, .. } => (segment, false),
            NvmeJob::Read { .. } | NvmeJob::Sync { .. } => return None,
        };
        let sealing = || self.segments.get(segment).is_some_and(|open| open.sealing);
        (self.parked.contains_key(segment) || opens && sealing()).then_some(*segment)
    }

    fn take_parked(&mut self, segment: u32) {
        for job in self.parked.remove(&segment).into_iter().flatten() {
            self.take(job);
        }
    }

    fn take(&mut self, job: NvmeJob) {
        if let Some(segment) = self.waits_for_seal(&job) {
            self.parked.entry(segment).or_default().push_back(job);
            return;
        }
        match job {
            NvmeJob::Open { segment, sequence, header } => {
                if segment >= self.geometry.segments || self.segments.contains_key(&segment) {
                    let geometry = segment >= self.geometry.segments;
                    let error = if geometry { NvmeError::Geometry } else { NvmeError::Life };
                    self.answer(NvmeDone::Opened { segment, sequence, result: Err(error) });
                    return;
                }
                self.segments.insert(segment, OpenSegment::new(sequence, header));
                self.write_header(segment);
            }
            NvmeJob::Write { op, segment, sequence, index, mut descriptor, buffer } => {
                descriptor.segment = segment;
                descriptor.segment_sequence = sequence;
                let buffer = match self.check_write(segment, index, &descriptor, buffer) {
                    Ok(buffer) => buffer,
                    Err(error) => return self.answer(NvmeDone::Written { op, result: Err(error) }),
                };
                self.take_write(WriteJob { op, segment, sequence, index, descriptor, buffer });
            }
            NvmeJob::Read { op, segment, offset, stored_bytes, buffer, urgent } => {
                let place = self.check_place(segment, offset, stored_bytes);
                match place.and_then(|offset| Some((offset, fill_of(buffer, stored_bytes)?))) {
                    Some((offset, buffer)) => {
                        let queues = &mut self.queues;
                        let queue = if urgent { &mut queues.urgent } else { &mut queues.reads };
                        queue.push_back(ReadJob { op, offset, stored_bytes, buffer });
                    }
                    None => {
                        let result = Err(NvmeError::Geometry);
                        self.answer(NvmeDone::Read { op, buffer: None, result });
                    }
                }
            }
            NvmeJob::Seal { segment } => match self.segments.get_mut(&segment) {
                Some(open) if !open.sealing => {
                    open.sealing = true;
                    self.finish_seal(segment);
                }
                _ => self.answer(NvmeDone::Sealed { segment, result: Err(NvmeError::Life) }),
            },
            NvmeJob::Erase { segment, sequence, index } => {
                self.take_erase(segment, sequence, index);
            }
            NvmeJob::Sync { op } => self.queues.syncs.push_back(op),
        }
    }

    fn take_write(&mut self, job: WriteJob) {
        match self.segments.get_mut(&job.segment) {
            Some(open) if open.sequence == job.sequence && !open.sealing => {
                open.writes += 1;
                if open.opened {
                    self.queues.writes.push_back(job);
                } else {
                    open.waiting.push_back(job);
                }
            }
            _ => {
                let result = Err(NvmeError::Life);
                self.answer(NvmeDone::Written { op: job.op, result });
            }
        }
    }

    fn take_erase(&mut self, segment: u32, sequence: u64, index: u32) {
        let inside =
            segment < self.geometry.segments && index < self.geometry.descriptors_per_segment();
        if !inside {
            let result = Err(NvmeError::Geometry);
            return self.answer(NvmeDone::Erased { segment, sequence, index, result });
        }
        match self.segments.get_mut(&segment) {
            Some(open) if open.sequence == sequence => open.erase(index),
            // An earlier life: over once the header is written.
            Some(open) if !open.opened => open.erased_by_header.push((sequence, index)),
            Some(_) => self.answer(NvmeDone::Erased { segment, sequence, index, result: Ok(()) }),
            None => {
                let idle = !self.erasing.contains_key(&segment);
                self.erasing.entry(segment).or_default().push(sequence, index);
                if idle {
                    self.next_erase(segment);
                }
            }
        }
    }

    /// Offset on the device of a payload, if it fits its segment.
    fn check_place(&self, segment: u32, offset: u32, stored_bytes: u32) -> Option<u64> {
        let geometry = &self.geometry;
        let end = u64::from(offset) + page_ceil(u64::from(stored_bytes));
        let fits = segment < geometry.segments
            && stored_bytes > 0
            && offset >= geometry.payload_start()
            && u64::from(offset).is_multiple_of(PAGE_BYTES)
            && end <= u64::from(geometry.segment_bytes);
        fits.then(|| geometry.segment_offset(segment) + u64::from(offset))
    }

    fn check_write(
        &self,
        segment: u32,
        index: u32,
        descriptor: &Descriptor,
        buffer: WriteBuffer,
    ) -> Result<IoBuffer, NvmeError> {
        let place = self.check_place(segment, descriptor.offset, descriptor.stored_bytes);
        if place.is_none() || index >= self.geometry.descriptors_per_segment() {
            return Err(NvmeError::Geometry);
        }
        let whole = page_ceil(u64::from(descriptor.stored_bytes));
        match buffer {
            WriteBuffer::Slot(mut slot) => {
                let lent = slot.len() as u64 >= u64::from(descriptor.stored_bytes);
                if lent && u32::try_from(whole).is_ok_and(|whole| slot.set_len(whole)) {
                    return Ok(IoBuffer::Drain(slot));
                }
                Err(NvmeError::Geometry)
            }
            WriteBuffer::Pages(pages) if pages.len() as u64 == whole => {
                Ok(IoBuffer::DrainPages(pages))
            }
            WriteBuffer::Pages(_) => Err(NvmeError::Geometry),
        }
    }

    /// Queues the segment's header, unless an erasure in it is under way.
    fn write_header(&mut self, segment: u32) {
        if self.erasing.contains_key(&segment) {
            return;
        }
        let Some(open) = self.segments.get_mut(&segment) else { return };
        let Some(header) = open.header.take() else { return };
        self.queues.control.push_back(ControlJob {
            offset: self.geometry.segment_offset(segment),
            buffer: IoBuffer::DrainPages(AlignedBuf::of(&*header)),
            op: Op::Header { segment, sequence: open.sequence },
        });
    }

    /// Begins the next erasure in a segment, or ends the erasing there.
    fn next_erase(&mut self, segment: u32) {
        let Some(batch) = self.erasing.get_mut(&segment).and_then(EraseQueue::next) else {
            self.erasing.remove(&segment);
            return self.write_header(segment);
        };
        let first = batch.indices.first().copied().unwrap_or(0);
        self.queues.control.push_back(ControlJob {
            offset: self.geometry.descriptor_page_offset(segment, first),
            buffer: IoBuffer::FillPages(AlignedBuf::zeroed(PAGE_BYTES as usize)),
            op: Op::EraseRead { segment, batch },
        });
    }

    /// Queues descriptor pages that are due.
    fn commit(&mut self, now: Instant) {
        let all = self.stop.is_some() || !self.queues.syncs.is_empty();
        for (segment, open) in &mut self.segments {
            open.pick(now, &self.options, all);
            if let Some(ready) = open.next_pages() {
                let first = ready.first * DESCRIPTORS_PER_PAGE;
                self.queues.control.push_back(ControlJob {
                    offset: self.geometry.descriptor_page_offset(*segment, first),
                    buffer: IoBuffer::DrainPages(ready.bytes),
                    op: Op::Page {
                        segment: *segment,
                        sequence: open.sequence,
                        erased: ready.erased,
                    },
                });
            }
        }
    }

    /// Gives the device what it has room for.
    fn start_ops(&mut self) {
        let depth = self.device.as_ref().map_or(0, |device| device.queue_depth());
        let reads_max = depth.saturating_sub(1).max(1);
        while self.has_room() && self.flying.reads < reads_max {
            let queues = &mut self.queues;
            let queue =
                if queues.urgent.is_empty() { &mut queues.reads } else { &mut queues.urgent };
            let Some(job) = queue.front() else { break };
            let bytes = job.buffer.bytes().len() as u64;
            let flying = self.flying.read_bytes;
            if flying > 0 && flying + bytes > self.options.read_bytes_max {
                break;
            }
            let Some(job) = queue.pop_front() else { break };
            self.flying.reads += 1;
            self.flying.read_bytes += bytes;
            let op = Op::Read { op: job.op, stored_bytes: job.stored_bytes, bytes };
            self.start(job.offset, job.buffer, op);
        }
        while self.has_room() {
            let Some(job) = self.queues.control.pop_front() else { break };
            self.start(job.offset, job.buffer, job.op);
        }
        while self.has_room() && self.queues.syncs.is_empty() {
            let Some(job) = self.queues.writes.front() else { break };
            let open = self.segments.get(&job.segment);
            if open.is_some_and(|open| open.sequence == job.sequence && open.lags()) {
                break;
            }
            let bytes = job.buffer.bytes().len() as u64;
            let flying = self.flying.write_bytes;
            let beside_reads = self.options.write_bytes_beside_reads;
            let max = self.options.write_bytes_max;
            let max = if self.flying.reads > 0 { max.min(beside_reads) } else { max };
            if flying > 0 && flying + bytes > max {
                break;
            }
            let Some(job) = self.queues.writes.pop_front() else { break };
            let WriteJob { op, segment, sequence, index, descriptor, buffer } = job;
            self.flying.write_bytes += bytes;
            let offset = self.geometry.segment_offset(segment) + u64::from(descriptor.offset);
            let op = Op::Payload { op, segment, sequence, index, descriptor, bytes };
            self.start(offset, buffer, op);
        }
    }

    fn has_room(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.in_flight() < device.queue_depth())
    }

    fn start(&mut self, offset: u64, buffer: IoBuffer, op: Op) {
        let user = self.next_user;
        self.next_user += 1;
        self.ops.insert(user, op);
        let Some(device) = &mut self.device else { return };
        if let Err(IoOp { user, buffer, .. }) = device.submit(IoOp { user, offset, buffer }) {
            self.settle(IoDone { user, buffer, result: Err(IoFailure::Closed) });
        }
    }

    fn settle(&mut self, done: IoDone) {
        let IoDone { user, buffer, result } = done;
        let Some(op) = self.ops.remove(&user) else { return };
        let result = result.map_err(NvmeError::from);
        match op {
            Op::Read { op, stored_bytes, bytes } => {
                self.flying.reads -= 1;
                self.flying.read_bytes -= bytes;
                let buffer = read_buffer_of(buffer, stored_bytes);
                self.answer(NvmeDone::Read { op, buffer, result });
            }
            Op::Payload { op, segment, sequence, index, descriptor, bytes } => {
                // The slot is free before anybody hears of it.
                drop(buffer);
                self.flying.write_bytes -= bytes;
                if let Some(open) = self.segments.get_mut(&segment) {
                    open.writes = open.writes.saturating_sub(1);
                    if result.is_ok() && open.sequence == sequence {
                        let place = Place::Segment { salt: self.salt, segment, sequence };
                        open.add(index, &descriptor.encode(place), Instant::now());
                    }
                }
                self.answer(NvmeDone::Written { op, result });
                self.finish_seal(segment);
            }
            Op::Header { segment, sequence } => self.settle_header(segment, sequence, result),
            Op::Page { segment, sequence, erased } => {
                self.settle_page(segment, sequence, erased, result);
            }
            Op::EraseRead { segment, batch } => self.settle_erase(segment, batch, buffer, result),
            Op::EraseWrite { segment, batch } => self.end_erase(segment, batch, result),
        }
    }

    fn settle_header(&mut self, segment: u32, sequence: u64, result: Result<(), NvmeError>) {
        let Some(open) = self.segments.get_mut(&segment) else { return };
        open.opened = result.is_ok();
        let erased = std::mem::take(&mut open.erased_by_header);
        if result.is_ok() {
            self.queues.writes.append(&mut open.waiting);
        }
        self.answer(NvmeDone::Opened { segment, sequence, result });
        for (sequence, index) in erased {
            self.answer(NvmeDone::Erased { segment, sequence, index, result });
        }
        match result {
            Ok(()) => self.finish_seal(segment),
            Err(error) => {
                if let Some(open) = self.segments.remove(&segment) {
                    self.fail_segment(segment, open, error);
                }
                self.take_parked(segment);
            }
        }
    }

    /// Answers all that waits in a segment that is no more.
    fn fail_segment(&mut self, segment: u32, mut open: OpenSegment, error: NvmeError) {
        let sequence = open.sequence;
        if open.header.is_some() {
            self.answer(NvmeDone::Opened { segment, sequence, result: Err(error) });
        }
        for job in std::mem::take(&mut open.waiting) {
            let WriteJob { op, buffer, .. } = job;
            drop(buffer);
            self.answer(NvmeDone::Written { op, result: Err(error) });
        }
        let own = open.take_erasing().into_iter().map(|index| (sequence, index));
        for (sequence, index) in open.erased_by_header.drain(..).chain(own) {
            self.answer(NvmeDone::Erased { segment, sequence, index, result: Err(error) });
        }
        if open.sealing {
            self.answer(NvmeDone::Sealed { segment, result: Err(error) });
        }
    }

    fn settle_page(
        &mut self,
        segment: u32,
        sequence: u64,
        erased: Vec<u32>,
        result: Result<(), NvmeError>,
    ) {
        if let Some(open) = self.segments.get_mut(&segment) {
            open.pages_in_flight = false;
            if let Err(error) = result {
                open.failure.get_or_insert(error);
            }
        }
        for index in erased {
            self.answer(NvmeDone::Erased { segment, sequence, index, result });
        }
        if let Err(NvmeError::Device(failure)) = result {
            (self.done)(NvmeDone::CommitFailed { segment, failure });
        }
        self.finish_seal(segment);
    }

    /// Answers `Seal` once nothing of the segment is left to be written.
    fn finish_seal(&mut self, segment: u32) {
        if self.segments.get(&segment).is_some_and(OpenSegment::is_sealed)
            && let Some(open) = self.segments.remove(&segment)
        {
            let result = open.failure.map_or(Ok(()), Err);
            self.answer(NvmeDone::Sealed { segment, result });
            self.take_parked(segment);
        }
    }

    fn settle_erase(
        &mut self,
        segment: u32,
        batch: EraseBatch,
        buffer: IoBuffer,
        result: Result<(), NvmeError>,
    ) {
        let IoBuffer::FillPages(mut page) = buffer else { return };
        if result.is_err() || !batch.apply(&mut page, self.salt, segment) {
            return self.end_erase(segment, batch, result);
        }
        let first = batch.indices.first().copied().unwrap_or(0);
        self.queues.control.push_back(ControlJob {
            offset: self.geometry.descriptor_page_offset(segment, first),
            buffer: IoBuffer::DrainPages(page),
            op: Op::EraseWrite { segment, batch },
        });
    }

    fn end_erase(&mut self, segment: u32, batch: EraseBatch, result: Result<(), NvmeError>) {
        let EraseBatch { sequence, indices } = batch;
        for index in indices {
            self.answer(NvmeDone::Erased { segment, sequence, index, result });
        }
        self.next_erase(segment);
    }

    /// Nothing but reads is under way, and no descriptor waits.
    fn is_settled(&self) -> bool {
        self.queues.control.is_empty()
            && self.ops.len() == self.flying.reads
            && self.segments.values().all(OpenSegment::is_clean)
    }

    fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.is_settled()
    }

    fn finish_syncs(&mut self) {
        if self.queues.syncs.is_empty() || !self.is_settled() {
            return;
        }
        let result = self.sync();
        for op in std::mem::take(&mut self.queues.syncs) {
            self.answer(NvmeDone::Synced { op, result });
        }
        // Payload writes waited.
        self.start_ops();
    }

    fn sync(&mut self) -> Result<(), NvmeError> {
        let Some(device) = &mut self.device else { return Err(NvmeError::Ended) };
        device.sync().map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error());
            NvmeError::Device(IoFailure::Os(errno))
        })
    }

    /// The end of an orderly stop.
    fn finish(&mut self) -> io::Result<()> {
        let synced = self.sync();
        if let Err(error) = synced {
            tracing::error!(%error, "the store could not be made durable at the stop");
        }
        // Segments that wait to be sealed were committed; none can be left otherwise.
        for (segment, open) in std::mem::take(&mut self.segments) {
            self.fail_segment(segment, open, NvmeError::Ended);
        }
        self.device = None;
        Ok(())
    }

    /// Answers what the device has not begun.
    fn fail_waiting(&mut self, error: NvmeError) {
        for job in std::mem::take(&mut self.parked).into_values().flatten() {
            self.answer(refuse(job));
        }
        let queues = &mut self.queues;
        let reads: Vec<ReadJob> = queues.urgent.drain(..).chain(queues.reads.drain(..)).collect();
        let mut writes: Vec<WriteJob> = queues.writes.drain(..).collect();
        for open in self.segments.values_mut() {
            writes.extend(open.waiting.drain(..));
        }
        for job in reads {
            let buffer = read_buffer_of(job.buffer, job.stored_bytes);
            self.answer(NvmeDone::Read { op: job.op, buffer, result: Err(error) });
        }
        for job in writes {
            let WriteJob { op, segment, buffer, .. } = job;
            drop(buffer);
            if let Some(open) = self.segments.get_mut(&segment) {
                open.writes = open.writes.saturating_sub(1);
            }
            self.answer(NvmeDone::Written { op, result: Err(error) });
            self.finish_seal(segment);
        }
    }

    /// Fails everything, now and until the owner lets go. The device goes first, so that nothing
    /// is in flight in a buffer that somebody is told to be free.
    fn give_up(&mut self, why: String) {
        let device = self.device.take();
        drop(catch_unwind(AssertUnwindSafe(|| drop(device))));
        self.tell(NvmeDone::Gone { why }, false);
        let mut failed = Vec::new();
        for (_, op) in self.ops.drain() {
            fail_op(op, &mut failed);
        }
        for job in std::mem::take(&mut self.queues.control) {
            fail_op(job.op, &mut failed);
        }
        for done in failed {
            self.tell(done, true);
        }
        // A panic in an answer must not keep the others from theirs.
        drop(catch_unwind(AssertUnwindSafe(|| self.fail_waiting(NvmeError::Ended))));
        for (segment, open) in std::mem::take(&mut self.segments) {
            let fail = || self.fail_segment(segment, open, NvmeError::Ended);
            drop(catch_unwind(AssertUnwindSafe(fail)));
        }
        for (segment, mut queue) in std::mem::take(&mut self.erasing) {
            let mut failed = Vec::new();
            while let Some(batch) = queue.next() {
                fail_op(Op::EraseRead { segment, batch }, &mut failed);
            }
            for done in failed {
                self.tell(done, true);
            }
        }
        for op in std::mem::take(&mut self.queues.syncs) {
            self.tell(NvmeDone::Synced { op, result: Err(NvmeError::Ended) }, true);
        }
        while let Ok(job) = self.jobs.recv() {
            self.tell(refuse(job), true);
        }
    }

    fn tell(&mut self, done: NvmeDone, answers_job: bool) {
        if answers_job {
            self.shared.jobs.fetch_sub(1, Ordering::Relaxed);
        }
        drop(catch_unwind(AssertUnwindSafe(|| (self.done)(done))));
    }
}

/// The answers of an operation whose device is gone.
fn fail_op(op: Op, failed: &mut Vec<NvmeDone>) {
    let result = Err(NvmeError::Ended);
    match op {
        Op::Header { segment, sequence } => {
            failed.push(NvmeDone::Opened { segment, sequence, result });
        }
        Op::Payload { op, .. } => failed.push(NvmeDone::Written { op, result }),
        Op::Read { op, .. } => failed.push(NvmeDone::Read { op, buffer: None, result }),
        Op::Page { segment, sequence, erased } => {
            let done = |index| NvmeDone::Erased { segment, sequence, index, result };
            failed.extend(erased.into_iter().map(done));
        }
        Op::EraseRead { segment, batch } | Op::EraseWrite { segment, batch } => {
            let EraseBatch { sequence, indices } = batch;
            let done = |index| NvmeDone::Erased { segment, sequence, index, result };
            failed.extend(indices.into_iter().map(done));
        }
    }
}

/// The answer to a job that comes too late.
fn refuse(job: NvmeJob) -> NvmeDone {
    let result = Err(NvmeError::Ended);
    match job {
        NvmeJob::Open { segment, sequence, .. } => NvmeDone::Opened { segment, sequence, result },
        NvmeJob::Write { op, .. } => NvmeDone::Written { op, result },
        NvmeJob::Read { op, buffer, .. } => NvmeDone::Read { op, buffer: Some(buffer), result },
        NvmeJob::Seal { segment } => NvmeDone::Sealed { segment, result },
        NvmeJob::Erase { segment, sequence, index } => {
            NvmeDone::Erased { segment, sequence, index, result }
        }
        NvmeJob::Sync { op } => NvmeDone::Synced { op, result },
    }
}

/// The device's view of a read's memory: whole pages. `None` if they do not fit.
fn fill_of(buffer: ReadBuffer, stored_bytes: u32) -> Option<IoBuffer> {
    let whole = u32::try_from(page_ceil(u64::from(stored_bytes))).ok()?;
    match buffer {
        ReadBuffer::Slot(mut slot) => slot.set_len(whole).then_some(IoBuffer::Fill(slot)),
        ReadBuffer::Pages(pages) => {
            (pages.len() == whole as usize).then_some(IoBuffer::FillPages(pages))
        }
    }
}

/// The caller's view of it again.
fn read_buffer_of(buffer: IoBuffer, stored_bytes: u32) -> Option<ReadBuffer> {
    match buffer {
        IoBuffer::Fill(mut slot) => {
            slot.set_len(stored_bytes);
            Some(ReadBuffer::Slot(slot))
        }
        IoBuffer::FillPages(pages) => Some(ReadBuffer::Pages(pages)),
        IoBuffer::Drain(_) | IoBuffer::DrainPages(_) => None,
    }
}
