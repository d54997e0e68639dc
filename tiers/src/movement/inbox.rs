//! The way to the catalog, which one thread uses at a time.
//!
//! Requests and completions are queued for the catalog's thread. But whoever brings one while
//! nobody is at the catalog takes it in at once: waking another thread for a few microseconds of
//! work, and being woken by it, takes ten times as long as the work. Requests that may walk the
//! whole table are left to the catalog's thread, so that none that serves or copies is held up.
//!
//! Order: what was signalled before a request was made is taken in before it, and requests are
//! taken in the order in which they were made: none is taken in at once while others wait, and the
//! catalog's thread takes nothing out of the queues before it is at the catalog.
//!
//! Lock order: nobody who holds another lock of this crate or of a caller may call [`Inbox::ask`]
//! or [`Inbox::completed`], because answers are given in them. [`Inbox::signal`] only queues.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use crossbeam::channel::{Receiver, Select, Sender, TrySendError};

use super::conductor::{Ask, Conductor, Device, Signal};
use super::gpus::Gpus;
use crate::catalog::{Event, Limit, Reply, Request};

/// The catalog's place, and the queues in front of it.
pub(super) struct Inbox {
    /// Nobody before the start and after the end.
    conductor: Mutex<Option<Conductor>>,
    asks: Sender<Ask>,
    signals: Sender<Signal>,
    /// The catalog's thread lives.
    alive: Arc<AtomicBool>,
}

/// Says that the catalog's thread has ended, however it ends.
struct Alive(Arc<AtomicBool>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Who may be at the catalog now.
enum Place<'a> {
    Free(MutexGuard<'a, Option<Conductor>>),
    Taken,
    /// Somebody panicked there.
    Lost,
}

/// Whether a request takes time by the keys that it names, and not by the blocks there are.
fn is_brief(request: &Request) -> bool {
    !matches!(
        request,
        Request::Forget(_)
            | Request::ReportBad { .. }
            | Request::Inspect(_)
            | Request::Stats
            | Request::Codecs
            | Request::Drain { .. }
    )
}

impl Inbox {
    pub(super) fn new(asks: Sender<Ask>, signals: Sender<Signal>) -> Inbox {
        let alive = Arc::new(AtomicBool::new(true));
        Inbox { conductor: Mutex::new(None), asks, signals, alive }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Asks the catalog: at once, or in turn. Answers `Busy` when too many wait.
    pub(super) fn ask(&self, ask: Ask) {
        if !self.is_alive() {
            return (ask.answer)(Reply::Busy(Limit::Draining));
        }
        match self.place() {
            Place::Free(mut place) => {
                if let Some(conductor) = place.as_mut()
                    && is_brief(&ask.request)
                    && conductor.is_caught_up()
                {
                    if conductor.advance() {
                        return conductor.ask(ask);
                    }
                    return (ask.answer)(Reply::Busy(Limit::Draining));
                }
            }
            Place::Taken => {}
            Place::Lost => return (ask.answer)(Reply::Busy(Limit::Draining)),
        }
        match self.asks.try_send(ask) {
            Ok(()) => {}
            Err(TrySendError::Full(ask)) => (ask.answer)(Reply::Busy(Limit::Requests)),
            Err(TrySendError::Disconnected(ask)) => (ask.answer)(Reply::Busy(Limit::Draining)),
        }
    }

    /// Tells the catalog of a completion: at once, or in turn.
    pub(super) fn completed(&self, event: Event) {
        if let Place::Free(mut place) = self.place()
            && let Some(conductor) = place.as_mut()
        {
            if conductor.advance() {
                conductor.signal(Signal::Event(event));
            }
            return;
        }
        self.signal(Signal::Event(event));
    }

    /// Tells the catalog of something, in turn.
    pub(super) fn signal(&self, signal: Signal) {
        if self.signals.send(signal).is_err() {
            tracing::debug!("the node has stopped");
        }
    }

    fn place(&self) -> Place<'_> {
        match self.conductor.try_lock() {
            Ok(place) => Place::Free(place),
            Err(TryLockError::WouldBlock) => Place::Taken,
            Err(TryLockError::Poisoned(_)) => Place::Lost,
        }
    }

    /// The catalog's thread: takes in what others only queued, and lets time pass. Ends when told
    /// to stop, with the devices; with nothing when somebody panicked at the catalog.
    pub(super) fn run(
        &self,
        conductor: Conductor,
        asks: &Receiver<Ask>,
        signals: &Receiver<Signal>,
    ) -> Option<(Option<Device>, Gpus)> {
        let alive = Alive(Arc::clone(&self.alive));
        self.conductor.lock().ok()?.replace(conductor);
        let mut wait = Duration::ZERO;
        loop {
            let mut select = Select::new();
            select.recv(signals);
            select.recv(asks);
            // Nothing is taken out here: whoever is at the catalog must find it.
            let _ = select.ready_timeout(wait);
            let mut place = self.conductor.lock().ok()?;
            let conductor = place.as_mut()?;
            if !conductor.catch_up() {
                drop(alive);
                let conductor = place.take()?;
                drop(place);
                return Some(conductor.end());
            }
            wait = conductor.until_tick();
        }
    }
}
