//! Counters of connections and calls.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvtide_client::protocol::ServiceStats;

/// Counters of connections and calls since the daemon started.
#[derive(Debug, Default)]
pub struct ServiceCounters {
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Connections closed because of a frame that could not be read.
    pub frames_bad: AtomicU64,
    /// Connections or calls that ended in a panic.
    pub panics: AtomicU64,
    /// Calls answered busy.
    pub calls_busy: AtomicU64,
    /// Calls refused as invalid or not allowed.
    pub calls_refused: AtomicU64,
    hellos_refused: Mutex<BTreeMap<&'static str, u64>>,
    calls: Mutex<BTreeMap<&'static str, u64>>,
}

impl ServiceCounters {
    /// Counts a connection refused at its hello.
    pub fn hello_refused(&self, reason: &'static str) {
        let mut refused = self.hellos_refused.lock().unwrap_or_else(PoisonError::into_inner);
        *refused.entry(reason).or_default() += 1;
    }

    /// Counts a call.
    pub fn called(&self, verb: &'static str) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        *calls.entry(verb).or_default() += 1;
    }

    /// Counts one of the other events.
    pub fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The counters as they travel.
    pub fn stats(&self) -> ServiceStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let list = |map: &Mutex<BTreeMap<&'static str, u64>>| {
            let map = map.lock().unwrap_or_else(PoisonError::into_inner);
            map.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
        };
        ServiceStats {
            connections: read(&self.connections),
            hellos_refused: list(&self.hellos_refused),
            frames_bad: read(&self.frames_bad),
            panics: read(&self.panics),
            calls: list(&self.calls),
            calls_busy: read(&self.calls_busy),
            calls_refused: read(&self.calls_refused),
        }
    }
}
