//! Events: how often one was recorded, and up to which record its streams have come.
//!
//! An interprocess event keeps that in a page of a shared memory file; its handle is opened as a
//! handle of memory is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::abi::{IpcHandle, Out};
use crate::call::{Call, INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use crate::config::config;
use crate::device::Device;
use crate::handle::Handles;
use crate::ipc::Name;
use crate::mapping::{self, PAGE, SharedFile, Span};
use crate::stream;

const MAGIC: u64 = u64::from_le_bytes(*b"fakeevt1");
const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
/// How often a wait looks at the event, and how often it looks whether the other process lives.
const POLL: Duration = Duration::from_micros(50);
const ALIVE_POLL: Duration = Duration::from_millis(20);

/// What an event is, for all its processes.
#[derive(Default)]
#[repr(C)]
struct Cell {
    recorded: AtomicU64,
    done: AtomicU64,
    /// Nanoseconds since this process began to count, at the newest record that is done.
    time_ns: AtomicU64,
    /// The process that recorded it last.
    recorder: AtomicU64,
}

enum Place {
    Own(Box<Cell>),
    Shared { page: Span, file: SharedFile },
}

pub(crate) struct Event {
    device: &'static Device,
    timed: bool,
    /// Whether this process made it for others.
    exportable: bool,
    place: Place,
}

static EVENTS: Handles<Event> = Handles::new();

impl Event {
    fn cell(&self) -> &Cell {
        match &self.place {
            Place::Own(cell) => cell,
            Place::Shared { page, .. } => {
                let at = std::ptr::with_exposed_provenance::<Cell>(page.base as usize);
                // SAFETY: the page is mapped while `self` lives, starts as zeros, and every process
                // uses it as atomic words only.
                unsafe { &*at }
            }
        }
    }

    fn is_done(&self, record: u64) -> bool {
        self.cell().done.load(Ordering::SeqCst) >= record
    }

    fn recorded(&self) -> u64 {
        self.cell().recorded.load(Ordering::SeqCst)
    }

    fn reach(&self, record: u64) {
        let now = started().elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
        self.cell().time_ns.store(now, Ordering::SeqCst);
        self.cell().done.fetch_max(record, Ordering::SeqCst);
    }

    /// Waits until the record is done, this device is lost, or who recorded it died.
    fn wait(&self, record: u64, device: &Device) -> Result<(), u32> {
        let mut looked = Instant::now();
        while !self.is_done(record) {
            device.sticky.check()?;
            if looked.elapsed() > ALIVE_POLL {
                looked = Instant::now();
                let recorder = self.cell().recorder.load(Ordering::SeqCst);
                if !config().dead_event_hangs && !mapping::is_alive(recorder) {
                    return Ok(());
                }
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// When this process began to count time.
fn started() -> Instant {
    static STARTED: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    *STARTED.get_or_init(Instant::now)
}

pub(crate) fn create(call: &Call, event: Out<usize>, flags: u32) -> Result<(), u32> {
    let device = call.device()?;
    let timed = flags & DISABLE_TIMING == 0;
    let exportable = flags & INTERPROCESS != 0;
    let known = BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS;
    if flags & !known != 0 || (exportable && timed) || event.is_null() {
        return Err(INVALID_VALUE);
    }
    started();
    let place = if exportable {
        let file = SharedFile::create(c"fakecuda-event", PAGE)?;
        Place::Shared { page: Span::of_file(&file, 0, PAGE)?, file }
    } else {
        Place::Own(Box::default())
    };
    event.put(EVENTS.insert(Arc::new(Event { device, timed, exportable, place })))
}

pub(crate) fn destroy(_: &Call, event: usize) -> Result<(), u32> {
    EVENTS.remove(event).map(|_| ())
}

pub(crate) fn record(call: &Call, event: usize, stream: usize) -> Result<(), u32> {
    let event = EVENTS.get(event)?;
    let stream = stream::get(call.device()?, stream)?;
    if stream.device.ordinal != event.device.ordinal {
        return Err(INVALID_HANDLE);
    }
    event.cell().recorder.store(mapping::own_identity(), Ordering::SeqCst);
    let record = event.cell().recorded.fetch_add(1, Ordering::SeqCst) + 1;
    stream.push(call, move || {
        event.reach(record);
        Ok(())
    })
}

pub(crate) fn stream_wait(call: &Call, stream: usize, event: usize, flags: u32) -> Result<(), u32> {
    let event = EVENTS.get(event)?;
    let stream = stream::get(call.device()?, stream)?;
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    let record = event.recorded();
    let device = stream.device;
    stream.push(call, move || event.wait(record, device))
}

pub(crate) fn query(call: &Call, event: usize) -> Result<(), u32> {
    call.device()?;
    let event = EVENTS.get(event)?;
    if event.is_done(event.recorded()) { Ok(()) } else { Err(NOT_READY) }
}

pub(crate) fn synchronize(call: &Call, event: usize) -> Result<(), u32> {
    let device = call.device()?;
    let event = EVENTS.get(event)?;
    event.wait(event.recorded(), device)
}

pub(crate) fn elapsed(
    _: &Call,
    milliseconds: Out<f32>,
    start: usize,
    end: usize,
) -> Result<(), u32> {
    let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
    if !start.timed || !end.timed || start.recorded() == 0 || end.recorded() == 0 {
        return Err(INVALID_HANDLE);
    }
    if !start.is_done(start.recorded()) || !end.is_done(end.recorded()) {
        return Err(NOT_READY);
    }
    let at = |event: &Event| event.cell().time_ns.load(Ordering::SeqCst);
    milliseconds.put((at(&end) as f64 - at(&start) as f64) as f32 / 1e6)
}

pub(crate) fn get_handle(call: &Call, handle: Out<IpcHandle>, event: usize) -> Result<(), u32> {
    call.device()?;
    let event = EVENTS.get(event)?;
    match &event.place {
        Place::Shared { file, .. } if event.exportable => {
            let device = event.device.ordinal as u64;
            handle.put(Name::of(MAGIC, file, PAGE, device).handle())
        }
        _ => Err(INVALID_HANDLE),
    }
}

pub(crate) fn open(call: &Call, event: Out<usize>, handle: IpcHandle) -> Result<(), u32> {
    let device = call.device()?;
    let name = Name::read(handle, MAGIC)?;
    if name.device != device.ordinal as u64 {
        return Err(INVALID_VALUE);
    }
    let file = name.open()?;
    if file.bytes != PAGE {
        return Err(INVALID_VALUE);
    }
    let place = Place::Shared { page: Span::of_file(&file, 0, PAGE)?, file };
    event.put(EVENTS.insert(Arc::new(Event { device, timed: false, exportable: false, place })))
}
