//! What the driver leaves undefined and a caller did all the same.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

static COUNT: AtomicU64 = AtomicU64::new(0);

/// Records a violation, and says it on stderr.
pub(crate) fn record(what: impl Display) {
    COUNT.fetch_add(1, Ordering::SeqCst);
    eprintln!("fakecuda: VIOLATION: {what}");
}

pub(crate) fn count() -> u64 {
    COUNT.load(Ordering::SeqCst)
}
