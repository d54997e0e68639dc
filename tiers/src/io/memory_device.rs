//! A block device in memory, for tests: what was written, in which order, and what a crash would
//! have left of it.
//!
//! Operations complete in the order in which they were submitted, at the next `reap`, unless the
//! test holds them back. A write takes effect when it completes.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::blocking::in_range;
use super::{BlockDevice, IoBuffer, IoDone, IoFailure, IoOp, Waker};

/// One write, as it reached the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedWrite {
    /// Where.
    pub offset: u64,
    /// What.
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    log: Option<Vec<LoggedWrite>>,
    writes: u64,
    reads: u64,
    syncs: u64,
    /// Length of the log at each sync, if it is logged.
    synced: Vec<usize>,
    /// Completions are held back.
    held: bool,
    /// Every operation fails with this error number from now on.
    fails: Option<i32>,
    woken: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }
}

/// The test's view of a [`MemoryDevice`], valid also after the device is gone.
#[derive(Clone, Debug)]
pub struct MemoryImage(Arc<Shared>);

impl MemoryImage {
    /// The present bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.state().bytes.clone()
    }

    /// Changes the bytes under the device's feet.
    pub fn edit(&self, edit: impl FnOnce(&mut Vec<u8>)) {
        self.0.change(|state| edit(&mut state.bytes));
    }

    /// The writes so far, if they are logged.
    pub fn log(&self) -> Vec<LoggedWrite> {
        self.0.state().log.clone().unwrap_or_default()
    }

    /// For each sync so far, how many logged writes came before it: what a power cut cannot take.
    pub fn syncs(&self) -> Vec<usize> {
        self.0.state().synced.clone()
    }

    /// Number of writes, reads and syncs so far.
    pub fn counts(&self) -> (u64, u64, u64) {
        let state = self.0.state();
        (state.writes, state.reads, state.syncs)
    }

    /// Holds completions back, or lets them go.
    pub fn hold(&self, held: bool) {
        self.0.change(|state| state.held = held);
    }

    /// Lets every operation and sync fail from now on, or no more (`None`).
    pub fn fail(&self, errno: Option<i32>) {
        self.0.change(|state| state.fails = errno);
    }
}

/// A block device in memory.
#[derive(Debug)]
pub struct MemoryDevice {
    shared: Arc<Shared>,
    capacity_bytes: u64,
    queue_depth: usize,
    queue: VecDeque<IoOp>,
}

impl MemoryDevice {
    /// A zeroed device of `bytes`.
    pub fn new(bytes: usize, queue_depth: usize) -> MemoryDevice {
        MemoryDevice::with_bytes(vec![0; bytes], queue_depth)
    }

    /// A device that holds these bytes.
    pub fn with_bytes(bytes: Vec<u8>, queue_depth: usize) -> MemoryDevice {
        let capacity_bytes = bytes.len() as u64;
        let state = Mutex::new(State { bytes, ..State::default() });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        MemoryDevice {
            shared,
            capacity_bytes,
            queue_depth: queue_depth.max(1),
            queue: VecDeque::new(),
        }
    }

    /// Logs every write with its bytes from now on.
    pub fn logged(self) -> MemoryDevice {
        self.shared.change(|state| state.log = Some(Vec::new()));
        self
    }

    /// The test's view.
    pub fn image(&self) -> MemoryImage {
        MemoryImage(Arc::clone(&self.shared))
    }
}

impl BlockDevice for MemoryDevice {
    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }

    fn submit(&mut self, op: IoOp) -> Result<(), IoOp> {
        if self.queue.len() == self.queue_depth {
            return Err(op);
        }
        self.queue.push_back(op);
        Ok(())
    }

    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.shared.state();
        while !state.woken && (self.queue.is_empty() || state.held) {
            let changed = &self.shared.changed;
            state = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                Some(left) if left.is_zero() => return Ok(()),
                Some(left) => {
                    let waited = changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state.woken = false;
        if state.held {
            return Ok(());
        }
        for op in self.queue.drain(..) {
            done.push(state.carry_out(op));
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.shared.state();
        state.syncs += 1;
        if let Some(errno) = state.fails {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if let Some(writes) = state.log.as_ref().map(Vec::len) {
            state.synced.push(writes);
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        let shared = Arc::clone(&self.shared);
        Waker::new(move || shared.change(|state| state.woken = true))
    }
}

impl State {
    fn carry_out(&mut self, op: IoOp) -> IoDone {
        let IoOp { user, offset, mut buffer } = op;
        let result = self.transfer(offset, &mut buffer);
        IoDone { user, buffer, result }
    }

    fn transfer(&mut self, offset: u64, buffer: &mut IoBuffer) -> Result<(), IoFailure> {
        if let Some(errno) = self.fails {
            return Err(IoFailure::Os(errno));
        }
        let len = buffer.bytes().len() as u64;
        if !in_range(self.bytes.len() as u64, offset, len) {
            return Err(IoFailure::OutOfRange);
        }
        let range = offset as usize..(offset + len) as usize;
        let place = self.bytes.get_mut(range).ok_or(IoFailure::OutOfRange)?;
        if let Some(fill) = buffer.fill() {
            fill.copy_from_slice(place);
            self.reads += 1;
        } else {
            place.copy_from_slice(buffer.bytes());
            self.writes += 1;
            if let Some(log) = &mut self.log {
                log.push(LoggedWrite { offset, bytes: buffer.bytes().to_vec() });
            }
        }
        Ok(())
    }
}
