//! The block device for kernels and containers that refuse io_uring: pread and pwrite on a few
//! threads. The same accounting as the ring: lengths compared, retries counted, buffers owned by
//! their operation.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use rustix::io::Errno;

use super::device::{Next, Progress, capacity_of};
use super::{BlockDevice, IoBuffer, IoDone, IoFailure, IoOp, Waker};

/// Most threads; more do not help a drive that takes large transfers.
const THREADS_MAX: usize = 8;

enum Message {
    Done(IoDone),
    Wake,
}

/// A file driven by pread and pwrite.
#[derive(Debug)]
pub struct BlockingDevice {
    file: Arc<File>,
    capacity_bytes: u64,
    queue_depth: usize,
    in_flight: usize,
    /// `None` only while dropping.
    jobs: Option<Sender<IoOp>>,
    messages: Receiver<Message>,
    threads: Vec<JoinHandle<()>>,
    waker: Waker,
}

impl BlockingDevice {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the file's size cannot be found or a thread not be started.
    pub fn new(file: File, queue_depth: u32) -> io::Result<BlockingDevice> {
        let capacity_bytes = capacity_of(&file)?;
        let file = Arc::new(file);
        let queue_depth = queue_depth.max(1) as usize;
        let (jobs, job_source) = channel::bounded::<IoOp>(queue_depth);
        // Room for every completion and one wake-up, so that a thread never blocks here.
        let (message_sink, messages) = channel::bounded(queue_depth + 1);
        let threads = (0..queue_depth.min(THREADS_MAX))
            .map(|at| {
                let (jobs, sink, file) =
                    (job_source.clone(), message_sink.clone(), Arc::clone(&file));
                let work = move || {
                    for op in jobs {
                        let done = transfer(&file, capacity_bytes, op);
                        if sink.send(Message::Done(done)).is_err() {
                            return;
                        }
                    }
                };
                std::thread::Builder::new().name(format!("kvtide-pio-{at}")).spawn(work)
            })
            .collect::<io::Result<Vec<_>>>()?;
        // A full queue wakes as well as a message does.
        let waker = Waker::new(move || drop(message_sink.try_send(Message::Wake)));
        let jobs = Some(jobs);
        let in_flight = 0;
        Ok(BlockingDevice {
            file,
            capacity_bytes,
            queue_depth,
            in_flight,
            jobs,
            messages,
            threads,
            waker,
        })
    }
}

impl BlockDevice for BlockingDevice {
    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, op: IoOp) -> Result<(), IoOp> {
        if self.in_flight == self.queue_depth {
            return Err(op);
        }
        let Some(jobs) = &self.jobs else { return Err(op) };
        jobs.try_send(op).map_err(channel::TrySendError::into_inner)?;
        self.in_flight += 1;
        Ok(())
    }

    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let first = match until {
            Some(until) => self.messages.recv_deadline(until),
            None => self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let first = match first {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
        };
        for message in std::iter::once(first).chain(self.messages.try_iter()) {
            if let Message::Done(one) = message {
                self.in_flight = self.in_flight.saturating_sub(1);
                done.push(one);
            }
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        rustix::fs::fdatasync(&*self.file).map_err(io::Error::from)
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }
}

impl Drop for BlockingDevice {
    /// Ends what is under way; what waits is not started.
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported by its own hook; there is nothing to add.
            drop(thread.join());
        }
    }
}

fn transfer(file: &File, capacity_bytes: u64, op: IoOp) -> IoDone {
    let IoOp { user, offset, mut buffer } = op;
    let result = transfer_all(file, capacity_bytes, offset, &mut buffer);
    IoDone { user, buffer, result }
}

fn transfer_all(
    file: &File,
    capacity_bytes: u64,
    offset: u64,
    buffer: &mut IoBuffer,
) -> Result<(), IoFailure> {
    let wanted = buffer.bytes().len() as u64;
    if !in_range(capacity_bytes, offset, wanted) {
        return Err(IoFailure::OutOfRange);
    }
    let mut progress = Progress::new(wanted);
    loop {
        let done = progress.done() as usize;
        let at = offset + done as u64;
        let result = match buffer.fill() {
            Some(bytes) => match bytes.get_mut(done..) {
                Some(rest) => rustix::io::pread(file, rest, at),
                None => Err(Errno::INVAL),
            },
            None => match buffer.bytes().get(done..) {
                Some(rest) => rustix::io::pwrite(file, rest, at),
                None => Err(Errno::INVAL),
            },
        };
        let result = result.map(|bytes| bytes as u64).map_err(Errno::raw_os_error);
        if let Next::Over(result) = progress.after(result) {
            return result;
        }
    }
}

/// Whether a transfer of `bytes` at `offset` lies on a device of `capacity_bytes`.
pub(super) fn in_range(capacity_bytes: u64, offset: u64, bytes: u64) -> bool {
    bytes != 0 && offset.checked_add(bytes).is_some_and(|end| end <= capacity_bytes)
}
