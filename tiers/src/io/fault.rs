//! A block device that breaks on purpose, to show that nothing above it serves wrong bytes.
//!
//! One seed gives one sequence of faults for one sequence of operations. The caller's memory is
//! only ever changed as a broken device could: a bit flipped on the way to the device is flipped in
//! a copy.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{AlignedBuf, BlockDevice, IoBuffer, IoDone, IoFailure, IoOp, Waker};
use crate::block::PAGE_BYTES;

/// How often what breaks. Probabilities are per operation, 0 to 1; at most one kind of fault is
/// injected into an operation, and a delay on top of it.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultConfig {
    /// Same seed, same faults.
    pub seed: u64,
    /// A read fails with EIO.
    pub read_error: f64,
    /// A write fails with EIO; nothing is written.
    pub write_error: f64,
    /// A transfer stops half-way and says so.
    pub short: f64,
    /// A completion is held back for up to `delay_ms_max`.
    pub delay: f64,
    /// Longest delay, milliseconds.
    pub delay_ms_max: u32,
    /// One bit of the data read is flipped, and the device says nothing.
    pub flip_read: f64,
    /// One bit of the data written is flipped, and the device says nothing.
    pub flip_write: f64,
    /// A write is acknowledged and never done.
    pub lost_write: f64,
    /// A read returns the bytes of another place.
    pub misdirected_read: f64,
    /// The operation with this number (from 0) fails with EIO, whatever the probabilities.
    pub fail_nth: Option<u64>,
    /// Each read is held back by as many milliseconds as this file says when the read begins; not
    /// at all while there is none. A drive that becomes slow, and well again.
    pub read_delay_file: Option<PathBuf>,
}

impl FaultConfig {
    /// A share `rate` of all operations is faulty, all kinds equally often; a like share is
    /// delayed by up to 20 ms.
    pub fn uniform(seed: u64, rate: f64) -> FaultConfig {
        // Reads and writes have four kinds each.
        let each = rate / 4.0;
        FaultConfig {
            seed,
            read_error: each,
            write_error: each,
            short: each,
            delay: rate,
            delay_ms_max: 20,
            flip_read: each,
            flip_write: each,
            lost_write: each,
            misdirected_read: each,
            fail_nth: None,
            read_delay_file: None,
        }
    }
}

/// One kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Error,
    Short,
    Flip,
    Lost,
    Misdirected,
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// How many faults were injected so far.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
        pub struct FaultCounts { $($(#[$doc])* pub $name: u64),+ }

        /// Live [`FaultCounts`], shared with the device.
        #[derive(Debug, Default)]
        pub struct FaultCounters { $($name: AtomicU64),+ }

        impl FaultCounters {
            /// The counts now.
            pub fn counts(&self) -> FaultCounts {
                FaultCounts { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }
    };
}

counts!(
    /// Operations taken.
    operations,
    /// Reads that failed.
    read_errors,
    /// Writes that failed.
    write_errors,
    /// Transfers cut short.
    shorts,
    /// Completions held back.
    delays,
    /// Reads with a flipped bit.
    flipped_reads,
    /// Writes with a flipped bit.
    flipped_writes,
    /// Writes acknowledged and not done.
    lost_writes,
    /// Reads from another place.
    misdirected_reads,
);

/// What is done to an operation that was passed on.
struct Passed {
    user: u64,
    /// The caller's buffer, when another one was passed on in its place.
    original: Option<IoBuffer>,
    /// Byte and bit to flip in what was read.
    flip: Option<(u64, u8)>,
    /// Reported although the device says otherwise.
    result: Option<Result<(), IoFailure>>,
    delay: Option<Duration>,
}

/// A completion that is ready, or will be.
struct Held {
    due: Instant,
    done: IoDone,
}

/// A device with faults injected.
pub struct FaultDevice {
    inner: Box<dyn BlockDevice>,
    config: FaultConfig,
    random: SplitMix,
    counters: Arc<FaultCounters>,
    /// By the number under which the inner device knows them; `None` is free.
    passed: Vec<Option<Passed>>,
    held: Vec<Held>,
}

impl FaultDevice {
    /// Wraps `inner`.
    pub fn new(
        inner: Box<dyn BlockDevice>,
        config: FaultConfig,
        counters: Arc<FaultCounters>,
    ) -> FaultDevice {
        let random = SplitMix(config.seed);
        FaultDevice { inner, config, random, counters, passed: Vec::new(), held: Vec::new() }
    }

    /// Which fault befalls this operation. Draws the same amount of randomness for every one.
    fn draw(&mut self, is_read: bool, number: u64) -> (Option<Fault>, Option<Duration>, u64) {
        let dice = self.random.unit();
        let late = self.random.unit();
        let wait = self.random.unit();
        let detail = self.random.next();
        let config = &self.config;
        let delay = (late < config.delay)
            .then(|| Duration::from_millis(u64::from(config.delay_ms_max)).mul_f64(wait));
        if config.fail_nth == Some(number) {
            return (Some(Fault::Error), delay, detail);
        }
        let kinds = if is_read {
            [
                (Fault::Error, config.read_error),
                (Fault::Short, config.short),
                (Fault::Flip, config.flip_read),
                (Fault::Misdirected, config.misdirected_read),
            ]
        } else {
            [
                (Fault::Error, config.write_error),
                (Fault::Short, config.short),
                (Fault::Flip, config.flip_write),
                (Fault::Lost, config.lost_write),
            ]
        };
        let mut below = 0.0;
        let fault = kinds.into_iter().find_map(|(fault, probability)| {
            below += probability;
            (dice < below).then_some(fault)
        });
        (fault, delay, detail)
    }

    /// How slow reads are now, by the file that says it.
    fn slowness(&self) -> Option<Duration> {
        let text = std::fs::read_to_string(self.config.read_delay_file.as_ref()?).ok()?;
        text.trim().parse().ok().map(Duration::from_millis)
    }

    fn count(&self, is_read: bool, fault: Option<Fault>, delay: Option<Duration>) {
        let counters = &*self.counters;
        let counter = match (fault, is_read) {
            (Some(Fault::Error), true) => Some(&counters.read_errors),
            (Some(Fault::Error), false) => Some(&counters.write_errors),
            (Some(Fault::Short), _) => Some(&counters.shorts),
            (Some(Fault::Flip), true) => Some(&counters.flipped_reads),
            (Some(Fault::Flip), false) => Some(&counters.flipped_writes),
            (Some(Fault::Lost), _) => Some(&counters.lost_writes),
            (Some(Fault::Misdirected), _) => Some(&counters.misdirected_reads),
            (None, _) => None,
        };
        for counter in counter.into_iter().chain(delay.map(|_| &counters.delays)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn hold(&mut self, delay: Option<Duration>, done: IoDone) {
        let due = Instant::now() + delay.unwrap_or_default();
        self.held.push(Held { due, done });
    }

    fn pass_on(&mut self, passed: Passed, offset: u64, buffer: IoBuffer) {
        let free = self.passed.iter().position(Option::is_none);
        let at = free.unwrap_or(self.passed.len());
        if let Err(op) = self.inner.submit(IoOp { user: at as u64, offset, buffer }) {
            // Cannot be: the inner queue is as deep as ours and holds no more than we do.
            let buffer = passed.original.unwrap_or(op.buffer);
            let result = Err(IoFailure::Closed);
            self.hold(None, IoDone { user: passed.user, buffer, result });
            return;
        }
        match self.passed.get_mut(at) {
            Some(place) => *place = Some(passed),
            None => self.passed.push(Some(passed)),
        }
    }

    /// Passes on a write of other bytes: all of them, with one bit flipped, or only a part.
    fn pass_copy(&mut self, op: IoOp, flip: Option<u64>, passed: Passed) {
        let mut copy = AlignedBuf::of(op.buffer.bytes());
        if let Some(detail) = flip {
            flip_bit(&mut copy, detail);
        } else {
            let half = copy.len() as u64 / 2 / PAGE_BYTES * PAGE_BYTES;
            if half == 0 {
                let result = passed.result.unwrap_or(Ok(()));
                self.hold(passed.delay, IoDone { user: op.user, buffer: op.buffer, result });
                return;
            }
            copy = AlignedBuf::of(copy.get(..half as usize).unwrap_or(&[]));
        }
        let passed = Passed { original: Some(op.buffer), ..passed };
        self.pass_on(passed, op.offset, IoBuffer::DrainPages(copy));
    }

    fn complete(&mut self, done: IoDone) {
        let passed = usize::try_from(done.user).ok();
        let passed = passed.and_then(|at| self.passed.get_mut(at)).and_then(Option::take);
        let Some(passed) = passed else { return };
        let IoDone { mut buffer, result, .. } = done;
        if let (Some((byte, bit)), Some(bytes)) = (passed.flip, buffer.fill())
            && let Some(byte) = bytes.get_mut(byte as usize)
        {
            *byte ^= 1 << bit;
        }
        let result = match (result, passed.result) {
            (Ok(()), Some(told)) => told,
            (result, _) => result,
        };
        let buffer = passed.original.unwrap_or(buffer);
        self.hold(passed.delay, IoDone { user: passed.user, buffer, result });
    }

    fn hand_out(&mut self, done: &mut Vec<IoDone>) {
        let now = Instant::now();
        let (due, later) =
            std::mem::take(&mut self.held).into_iter().partition(|held| held.due <= now);
        self.held = later;
        let due: Vec<Held> = due;
        done.extend(due.into_iter().map(|held| held.done));
    }
}

fn flip_bit(bytes: &mut [u8], detail: u64) {
    let len = bytes.len().max(1) as u64;
    if let Some(byte) = bytes.get_mut((detail / 8 % len) as usize) {
        *byte ^= 1 << (detail % 8);
    }
}

impl BlockDevice for FaultDevice {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    fn submit(&mut self, op: IoOp) -> Result<(), IoOp> {
        if self.in_flight() >= self.queue_depth() {
            return Err(op);
        }
        let number = self.counters.operations.fetch_add(1, Ordering::Relaxed);
        let is_read = op.buffer.is_read();
        let (fault, delay, detail) = self.draw(is_read, number);
        let delay = self.slowness().filter(|_| is_read).or(delay);
        self.count(is_read, fault, delay);
        let wanted = op.buffer.bytes().len() as u64;
        let half = wanted / 2 / PAGE_BYTES * PAGE_BYTES;
        let short = Err(IoFailure::Short { done: half, wanted });
        let user = op.user;
        let plain = Passed { user, original: None, flip: None, result: None, delay };
        match fault {
            Some(Fault::Error) => {
                let result = Err(IoFailure::Os(rustix::io::Errno::IO.raw_os_error()));
                self.hold(delay, IoDone { user, buffer: op.buffer, result });
            }
            Some(Fault::Lost) => {
                self.hold(delay, IoDone { user, buffer: op.buffer, result: Ok(()) });
            }
            Some(Fault::Short) if is_read => {
                let passed = Passed { result: Some(short), ..plain };
                self.pass_on(passed, op.offset, op.buffer);
            }
            Some(Fault::Short) => {
                self.pass_copy(op, None, Passed { result: Some(short), ..plain });
            }
            Some(Fault::Flip) if is_read => {
                let flip = Some((detail / 8 % wanted.max(1), (detail % 8) as u8));
                self.pass_on(Passed { flip, ..plain }, op.offset, op.buffer);
            }
            Some(Fault::Flip) => self.pass_copy(op, Some(detail), plain),
            Some(Fault::Misdirected) => {
                let room = self.capacity_bytes().saturating_sub(wanted) / PAGE_BYTES;
                let offset = detail % room.max(1) * PAGE_BYTES;
                self.pass_on(plain, offset, op.buffer);
            }
            None => self.pass_on(plain, op.offset, op.buffer),
        }
        Ok(())
    }

    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        let next = self.held.iter().map(|held| held.due).min();
        let next = next.map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = match (timeout, next) {
            (Some(timeout), Some(next)) => Some(timeout.min(next)),
            (timeout, next) => timeout.or(next),
        };
        let mut inner = Vec::new();
        self.inner.reap(timeout, &mut inner)?;
        for one in inner {
            self.complete(one);
        }
        self.hand_out(done);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.inner.sync()
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

impl fmt::Debug for FaultDevice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "FaultDevice({:?}, {:?})", self.config, self.counters.counts())
    }
}

/// The splitmix64 generator: small, seeded, good enough for dice.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In 0 .. 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
