//! Lets requests through in the order of the trace, and stops them for a restart of the daemon.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How many requests run, and whether more may start.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    running: usize,
}

/// A request under way; ends when dropped.
#[derive(Debug)]
pub(super) struct Pass<'a>(&'a Gate);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the gate is open, and counts one more request.
    pub(super) fn enter(&self) -> Pass<'_> {
        let mut state = self.state();
        while state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.running += 1;
        Pass(self)
    }

    /// No request starts from now on; those under way go on.
    pub(super) fn close(&self) {
        self.state().closed = true;
    }

    /// Waits until no request is under way, at most this long. Whether it came to that.
    pub(super) fn wait_idle(&self, most: Duration) -> bool {
        let end = Instant::now() + most;
        let mut state = self.state();
        while state.running > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Requests may start again.
    pub(super) fn open(&self) {
        self.state().closed = false;
        self.changed.notify_all();
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.state().running -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_gate_holds_requests_back_until_it_opens() {
        let gate = Gate::default();
        let first = gate.enter();
        gate.close();
        assert!(!gate.wait_idle(Duration::from_millis(5)));
        std::thread::scope(|scope| {
            let second = scope.spawn(|| drop(gate.enter()));
            drop(first);
            assert!(gate.wait_idle(Duration::from_secs(5)));
            assert!(!second.is_finished());
            gate.open();
        });
        assert!(gate.wait_idle(Duration::ZERO));
    }
}
