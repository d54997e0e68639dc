//! Loads and stores of one session that may still copy from or to a region: from the moment their
//! call is received until their ticket has ended, whether or not anybody waits for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvtide_tiers::catalog::RegionId;
use tokio::sync::Notify;

/// What is under way on the regions of one session. Bounded by its calls and tickets.
#[derive(Default)]
pub struct Touches {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    last: u64,
    under_way: HashMap<u64, RegionId>,
}

/// One load or store, until it is dropped.
pub struct Touch {
    touches: Arc<Touches>,
    number: u64,
}

impl Touches {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A load or store of `region` was received.
    pub fn begin(self: &Arc<Self>, region: RegionId) -> Touch {
        let mut state = self.state();
        state.last += 1;
        let number = state.last;
        state.under_way.insert(number, region);
        Touch { touches: Arc::clone(self), number }
    }

    /// Waits until all that had begun on `region` before has ended. `false` when that took longer
    /// than `limit`.
    pub async fn quiesce(&self, region: RegionId, limit: Duration) -> bool {
        let newest = self.state().last;
        let until = tokio::time::Instant::now() + limit;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let busy = |(number, on): (&u64, &RegionId)| *number <= newest && *on == region;
            if !self.state().under_way.iter().any(busy) {
                return true;
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return false;
            }
        }
    }
}

impl Drop for Touch {
    fn drop(&mut self) {
        self.touches.state().under_way.remove(&self.number);
        self.touches.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_region_is_quiet_when_all_that_began_before_has_ended() {
        let touches = Arc::new(Touches::default());
        let (short, long) = (Duration::from_millis(10), Duration::from_secs(60));
        let first = touches.begin(RegionId(1));
        assert!(!touches.quiesce(RegionId(1), short).await);
        assert!(touches.quiesce(RegionId(2), short).await, "another region is quiet");
        let asked = touches.quiesce(RegionId(1), long);
        let later = async {
            tokio::task::yield_now().await;
            let second = touches.begin(RegionId(1));
            drop(first);
            second
        };
        let (quiet, second) = tokio::join!(asked, later);
        assert!(quiet, "what began after the question is not waited for");
        drop(second);
        assert!(touches.state().under_way.is_empty());
    }
}
