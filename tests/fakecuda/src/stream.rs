//! Streams: a thread with a queue each.
//!
//! An operation that fails with a code sets the error that stays on its device; what is queued
//! behind it, on any stream of the device, is then dropped instead of run. So an event that was to
//! be recorded never is, and whoever waits for it in another process waits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::abi::Out;
use crate::call::{Call, INVALID_VALUE, NOT_READY, OPERATING_SYSTEM};
use crate::config::config;
use crate::device::Device;
use crate::fault::{self, Fault};
use crate::handle::Handles;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// Handles of the legacy default stream and of the one of each thread, which is the same here.
const DEFAULT: [usize; 3] = [0, 1, 2];

type Operation = Box<dyn FnOnce() -> Result<(), u32> + Send>;

pub(crate) struct Stream {
    pub(crate) device: &'static Device,
    /// Ordered against the default stream.
    blocking: bool,
    is_default: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    operations: VecDeque<Operation>,
    running: bool,
    closed: bool,
}

static STREAMS: Handles<Stream> = Handles::new();
/// Streams whose thread runs, also those that were destroyed with work in their queue.
static RUNNING: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());
/// Streams made so far; gives each a seed of its own.
static MADE: AtomicU64 = AtomicU64::new(0);

impl Stream {
    fn start(
        device: &'static Device,
        blocking: bool,
        is_default: bool,
    ) -> Result<Arc<Stream>, u32> {
        let queue = Mutex::new(Queue::default());
        let stream =
            Arc::new(Stream { device, blocking, is_default, queue, changed: Condvar::new() });
        let worker = Arc::clone(&stream);
        let mut jitter = Jitter::new(MADE.fetch_add(1, Ordering::SeqCst));
        std::thread::Builder::new()
            .name("fakecuda-stream".to_owned())
            .spawn(move || worker.run(&mut jitter))
            .map_err(|_| OPERATING_SYSTEM)?;
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|stream| stream.strong_count() > 0);
        running.push(Arc::downgrade(&stream));
        Ok(stream)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, jitter: &mut Jitter) {
        loop {
            let operation = {
                let mut queue = self.lock();
                queue.running = false;
                self.changed.notify_all();
                loop {
                    if let Some(operation) = queue.operations.pop_front() {
                        queue.running = true;
                        break operation;
                    }
                    if queue.closed {
                        return;
                    }
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            jitter.pause();
            if self.device.sticky.check().is_ok()
                && let Err(code) = operation()
            {
                self.device.sticky.set(code);
            }
        }
    }

    /// Queues an operation, or what `call` is to fail with in its place.
    pub(crate) fn push(
        &self,
        call: &Call,
        operation: impl FnOnce() -> Result<(), u32> + Send + 'static,
    ) -> Result<(), u32> {
        // The default stream and the blocking ones wait for each other; more than they must.
        if self.is_default {
            for other in STREAMS.all().iter().filter(|other| other.blocking) {
                other.wait_until_idle();
            }
        } else if self.blocking
            && let Some(default) = self.device.default_stream.get()
        {
            default.wait_until_idle();
        }
        let operation: Operation = match call.fault {
            Some(Fault::Code(code)) => Box::new(move || Err(code)),
            Some(Fault::Hang(source) | Fault::Stall(source)) => Box::new(move || {
                fault::hang(source);
                operation()
            }),
            None => Box::new(operation),
        };
        let mut queue = self.lock();
        if queue.closed {
            return Err(INVALID_VALUE);
        }
        queue.operations.push_back(operation);
        self.changed.notify_all();
        Ok(())
    }

    fn is_idle(&self) -> bool {
        let queue = self.lock();
        queue.operations.is_empty() && !queue.running
    }

    fn wait_until_idle(&self) {
        let mut queue = self.lock();
        while !queue.operations.is_empty() || queue.running {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Blocks until all that was queued is done, and says whether some of it failed.
    pub(crate) fn synchronize(&self) -> Result<(), u32> {
        self.wait_until_idle();
        self.device.sticky.check()
    }
}

/// The stream with this handle.
pub(crate) fn get(device: &'static Device, handle: usize) -> Result<Arc<Stream>, u32> {
    if !DEFAULT.contains(&handle) {
        return STREAMS.get(handle);
    }
    if let Some(stream) = device.default_stream.get() {
        return Ok(Arc::clone(stream));
    }
    let started = Stream::start(device, true, true)?;
    Ok(Arc::clone(device.default_stream.get_or_init(|| started)))
}

/// Whether the handle is that of a default stream.
pub(crate) fn is_default(handle: usize) -> bool {
    DEFAULT.contains(&handle)
}

/// Waits until every stream of the device is idle.
pub(crate) fn drain(device: &'static Device) {
    let streams: Vec<Arc<Stream>> = {
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().filter_map(Weak::upgrade).collect()
    };
    let own = streams.iter().filter(|stream| stream.device.ordinal == device.ordinal);
    own.for_each(|stream| stream.wait_until_idle());
}

/// How many streams of the device there are.
pub(crate) fn live(device: &Device) -> usize {
    STREAMS.all().iter().filter(|stream| stream.device.ordinal == device.ordinal).count()
}

pub(crate) fn create(call: &Call, stream: Out<usize>, flags: u32) -> Result<(), u32> {
    if flags & !NON_BLOCKING != 0 || stream.is_null() {
        return Err(INVALID_VALUE);
    }
    let started = Stream::start(call.device()?, flags & NON_BLOCKING == 0, false)?;
    stream.put(STREAMS.insert(started))
}

/// What is queued still runs.
pub(crate) fn destroy(_: &Call, stream: usize) -> Result<(), u32> {
    let stream = STREAMS.remove(stream)?;
    stream.lock().closed = true;
    stream.changed.notify_all();
    Ok(())
}

pub(crate) fn query(call: &Call, stream: usize) -> Result<(), u32> {
    let stream = get(call.device()?, stream)?;
    if stream.is_idle() { stream.device.sticky.check() } else { Err(NOT_READY) }
}

/// There are no graphs here, so that nothing is ever captured.
pub(crate) fn is_capturing(call: &Call, stream: usize, status: Out<u32>) -> Result<(), u32> {
    get(call.device()?, stream)?;
    status.put(0)
}

pub(crate) fn synchronize(call: &Call, stream: usize) -> Result<(), u32> {
    get(call.device()?, stream)?.synchronize()
}

/// Pauses of a random length, the same ones for the same seed.
struct Jitter {
    state: u64,
    most: Duration,
}

impl Jitter {
    fn new(stream: u64) -> Jitter {
        let state = (config().seed ^ (stream << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Jitter { state, most: config().jitter }
    }

    fn pause(&mut self) {
        if self.most.is_zero() {
            return;
        }
        // xorshift64.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let share = (self.state >> 40) as f64 / (1_u64 << 24) as f64;
        std::thread::sleep(self.most.mul_f64(share));
    }
}
