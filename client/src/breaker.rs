//! The circuit breaker: after some failures in a row the daemon is not asked any more, and callers
//! are answered at once, until a probe succeeds. Pure: the caller brings the time.

use std::time::{Duration, Instant};

use crate::protocol::DEADLINE_MAX;

/// Closed, or open since some failure.
#[derive(Debug)]
pub(crate) struct Breaker {
    failures_max: u32,
    backoff_first: Duration,
    backoff_max: Duration,
    failures: u32,
    open: Option<Open>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    backoff: Duration,
    probe_at: Instant,
}

impl Breaker {
    pub(crate) fn new(failures_max: u32, backoff_first: Duration, backoff_max: Duration) -> Self {
        Breaker {
            failures_max: failures_max.max(1),
            backoff_first: backoff_first.clamp(Duration::from_millis(1), DEADLINE_MAX),
            backoff_max: backoff_max.max(backoff_first).min(DEADLINE_MAX),
            failures: 0,
            open: None,
        }
    }

    /// Failures in a row.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// When the next probe is due; `None` while closed.
    pub(crate) fn probe_at(&self) -> Option<Instant> {
        self.open.map(|open| open.probe_at)
    }

    /// Counts a failure. `true` when it opened the breaker just now.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.open.is_some() || self.failures < self.failures_max {
            return false;
        }
        let backoff = self.backoff_first;
        self.open = Some(Open { backoff, probe_at: now + backoff });
        true
    }

    /// A probe failed: the next one is due after twice the pause.
    pub(crate) fn probe_failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        let last = self.open.map_or(self.backoff_first, |open| open.backoff);
        let backoff = (last * 2).min(self.backoff_max);
        self.open = Some(Open { backoff, probe_at: now + backoff });
    }

    /// The daemon answered.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
        self.open = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_failures_in_a_row_and_doubles_the_pause_up_to_the_maximum() {
        let ms = Duration::from_millis;
        let mut breaker = Breaker::new(3, ms(100), ms(300));
        let now = Instant::now();
        assert!(!breaker.failed(now));
        assert!(!breaker.failed(now));
        breaker.succeeded();
        assert!(!breaker.failed(now));
        assert!(!breaker.failed(now));
        assert!(breaker.failed(now));
        assert_eq!(breaker.probe_at(), Some(now + ms(100)));
        assert!(!breaker.failed(now), "open already");
        breaker.probe_failed(now);
        assert_eq!(breaker.probe_at(), Some(now + ms(200)));
        breaker.probe_failed(now);
        assert_eq!(breaker.probe_at(), Some(now + ms(300)));
        breaker.succeeded();
        assert_eq!((breaker.probe_at(), breaker.failures()), (None, 0));
    }
}
