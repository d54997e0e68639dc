//! The arena, registered with the driver once for all GPUs of the process.
//!
//! The driver refuses to register memory twice, so a registration that is under way, or being
//! undone, is waited for; but only by GPUs of the same arena, and not for ever. No lock is held
//! while the driver works.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvtide_kernels::driver::{Context, HostRegistration, REGISTRATION_BYTES_MAX};

use super::error_of;
use crate::io::Arena;
use crate::tier::device::DeviceOptions;
use crate::tier::device::gpu::GpuError;

/// A registered arena. Undone by the last GPU that uses it.
pub(super) struct Registered {
    /// `None` only while it is dropped, or before it was made.
    registration: Option<HostRegistration>,
    arena: Arc<Arena>,
}

/// An arena that is registered, or about to be, or about not to be: those have no owner.
struct Entry {
    base: u64,
    owner: Weak<Registered>,
}

static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

fn entries() -> MutexGuard<'static, Vec<Entry>> {
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn base_of(arena: &Arena) -> u64 {
    arena.base().expose_provenance() as u64
}

impl Registered {
    /// The registration of `arena`, made by this call if there is none.
    pub(super) fn of(context: &Context, arena: &Arc<Arena>) -> Result<Arc<Registered>, GpuError> {
        let base = base_of(arena);
        if let Some(known) = claim(base, DeviceOptions::open_timeout_of(arena.bytes()))? {
            return Ok(known);
        }
        // From here on the entry is this value's, which takes it away when it is dropped.
        let mut registered = Registered { registration: None, arena: Arc::clone(arena) };
        // No slot may lie in two chunks, because one copy may not.
        let slab = u64::from(arena.slab_bytes());
        let chunk = (REGISTRATION_BYTES_MAX / slab).max(1) * slab;
        // SAFETY: the arena's mapping is readable, writable and lives as long as the arena, of
        // which `registered` holds a share for longer than the registration.
        let registration = unsafe {
            HostRegistration::register_in_chunks(context, arena.base(), arena.bytes(), chunk)
        };
        registered.registration = Some(registration.map_err(error_of)?);
        let registered = Arc::new(registered);
        for entry in entries().iter_mut().filter(|entry| entry.base == base) {
            entry.owner = Arc::downgrade(&registered);
        }
        CHANGED.notify_all();
        Ok(registered)
    }

    /// Address of the arena.
    pub(super) fn base(&self) -> u64 {
        base_of(&self.arena)
    }
}

/// The registration of the arena at `base`; `None` when there was none, and the caller has to make
/// it.
fn claim(base: u64, timeout: Duration) -> Result<Option<Arc<Registered>>, GpuError> {
    let until = Instant::now() + timeout;
    let mut all = entries();
    loop {
        let Some(entry) = all.iter().find(|entry| entry.base == base) else {
            all.push(Entry { base, owner: Weak::new() });
            return Ok(None);
        };
        if let Some(known) = entry.owner.upgrade() {
            return Ok(Some(known));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = timeout.as_secs();
            return Err(GpuError::Failed(format!(
                "the driver has not registered the host memory within {seconds} s, nor has it \
                 refused; restart the daemon"
            )));
        }
        all = CHANGED.wait_timeout(all, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Takes the entry of an arena away.
fn forget(base: u64) {
    entries().retain(|entry| entry.base != base);
    CHANGED.notify_all();
}

impl Drop for Registered {
    fn drop(&mut self) {
        drop(self.registration.take());
        forget(base_of(&self.arena));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_that_hangs_holds_up_only_its_own_arena() {
        // Addresses of no arena.
        let (hung, other) = (1, 2);
        assert!(claim(hung, Duration::ZERO).unwrap().is_none(), "ours to make");
        assert!(claim(other, Duration::ZERO).unwrap().is_none(), "another arena goes on");
        let waits = claim(hung, Duration::from_millis(20)).err();
        assert!(matches!(waits, Some(GpuError::Failed(why)) if why.contains("registered")));
        // It fails in the end, and whoever waits tries for itself.
        let waiter = std::thread::spawn(move || claim(hung, Duration::from_secs(20)));
        std::thread::sleep(Duration::from_millis(20));
        forget(hung);
        assert!(waiter.join().unwrap().unwrap().is_none());
        forget(hung);
        forget(other);
    }
}
