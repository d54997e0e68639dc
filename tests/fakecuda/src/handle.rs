//! Handles: numbers that stand for an object, so that a wrong one is an error and not a crash.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::call::INVALID_HANDLE;

/// All numbers come from one counter: a handle of one kind is never taken for another kind's, and
/// none comes back. They start where no mapping is, so that one used as an address faults.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

pub(crate) struct Handles<T> {
    live: Mutex<Option<HashMap<usize, Arc<T>>>>,
}

impl<T> Handles<T> {
    pub(crate) const fn new() -> Handles<T> {
        Handles { live: Mutex::new(None) }
    }

    pub(crate) fn insert(&self, object: Arc<T>) -> usize {
        let handle = NEXT.fetch_add(0x10, Ordering::Relaxed);
        self.with(|live| live.insert(handle, object));
        handle
    }

    pub(crate) fn get(&self, handle: usize) -> Result<Arc<T>, u32> {
        self.with(|live| live.get(&handle).cloned()).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: usize) -> Result<Arc<T>, u32> {
        self.with(|live| live.remove(&handle)).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.with(|live| live.values().cloned().collect())
    }

    fn with<R>(&self, run: impl FnOnce(&mut HashMap<usize, Arc<T>>) -> R) -> R {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        run(live.get_or_insert_default())
    }
}
