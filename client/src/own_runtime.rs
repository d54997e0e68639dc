//! The runtime of a blocking client. Whoever waits for an answer drives it on its own thread, so
//! that an answer reaches its caller without passing through another thread; while nobody calls, a
//! thread made for it (the keeper) does, for reconnections and for what was dropped.
//!
//! Somebody drives at any time, but for up to [`IDLE`] after the last call. Callers inside another
//! runtime must not drive this one; for them the keeper stays.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::{Handle, Runtime};
use tokio::sync::Notify;

use crate::error::ClientError;

/// How long nobody has called when the keeper takes over: longer than between two calls in a row.
const IDLE: Duration = Duration::from_millis(2);

/// A runtime that ends with its last owner.
#[derive(Debug)]
pub(crate) struct OwnRuntime {
    driven: Arc<Driven>,
}

/// What callers and the keeper share.
#[derive(Debug)]
struct Driven {
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
    /// Callers that may drive.
    callers: AtomicUsize,
    /// Counts calls, so that the keeper sees whether there was one.
    calls: AtomicUsize,
    /// Callers that may not, because they are inside another runtime.
    guests: AtomicUsize,
    /// The keeper drives, or is about to.
    kept: AtomicBool,
    /// Makes the keeper let go.
    step_aside: Notify,
    closed: Mutex<bool>,
    changed: Condvar,
}

impl OwnRuntime {
    /// Starts the runtime and its keeper.
    ///
    /// # Errors
    /// Out of threads or file descriptors.
    pub(crate) fn start() -> Result<OwnRuntime, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let driven = Arc::new(Driven {
            runtime: Some(runtime.map_err(ClientError::Runtime)?),
            callers: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            guests: AtomicUsize::new(0),
            kept: AtomicBool::new(false),
            step_aside: Notify::new(),
            closed: Mutex::new(false),
            changed: Condvar::new(),
        });
        let keeper = Arc::clone(&driven);
        std::thread::Builder::new()
            .name("kvtide-client".into())
            .spawn(move || keeper.keep())
            .map_err(ClientError::Runtime)?;
        Ok(OwnRuntime { driven })
    }

    /// Runs a future to its end on this thread.
    pub(crate) fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let driven = &self.driven;
        let runtime = driven.runtime();
        if Handle::try_current().is_ok() {
            let _guest = Count::more(&driven.guests);
            // Under the lock, so that a keeper that is about to sleep does not miss it.
            drop(driven.closed.lock().unwrap_or_else(PoisonError::into_inner));
            driven.changed.notify_one();
            let _inside = runtime.enter();
            // Such a caller has a budget of polls that only its own runtime renews: once it is used
            // up, everything here would be pending and awake at once, for good.
            return futures::executor::block_on(tokio::task::unconstrained(future));
        }
        let _caller = Count::more(&driven.callers);
        driven.calls.fetch_add(1, Ordering::Relaxed);
        if driven.kept.load(Ordering::SeqCst) && driven.guests.load(Ordering::SeqCst) == 0 {
            driven.step_aside.notify_one();
        }
        runtime.block_on(future)
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        *self.driven.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.driven.changed.notify_one();
        self.driven.step_aside.notify_one();
    }
}

impl Driven {
    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the runtime is taken only when dropped")
    }

    /// The keeper's life.
    fn keep(&self) {
        while self.wait_until_needed() {
            self.kept.store(true, Ordering::SeqCst);
            // Whoever came in between did not see it, and drives.
            if self.callers.load(Ordering::SeqCst) == 0 || self.guests.load(Ordering::SeqCst) > 0 {
                self.runtime().block_on(self.step_aside.notified());
            }
            self.kept.store(false, Ordering::SeqCst);
        }
    }

    /// Sleeps while callers come and go. `false`: the owners are gone.
    fn wait_until_needed(&self) -> bool {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = self.calls.load(Ordering::Relaxed);
        loop {
            if *closed {
                return false;
            }
            if self.guests.load(Ordering::SeqCst) > 0 {
                return true;
            }
            let waited = self.changed.wait_timeout(closed, IDLE);
            let timeout;
            (closed, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            let calls = self.calls.load(Ordering::Relaxed);
            let idle = calls == seen && self.callers.load(Ordering::SeqCst) == 0;
            if timeout.timed_out() && idle && !*closed {
                return true;
            }
            seen = calls;
        }
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        // A runtime that waits for its threads may not be dropped inside another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// One more for as long as it lives.
struct Count<'a>(&'a AtomicUsize);

impl Count<'_> {
    fn more(count: &AtomicUsize) -> Count<'_> {
        count.fetch_add(1, Ordering::SeqCst);
        Count(count)
    }
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A task that answers, as the connection's does.
    fn echo(runtime: &OwnRuntime) -> tokio::sync::mpsc::UnboundedSender<(u64, mpsc::Sender<u64>)> {
        let (send, mut receive) = tokio::sync::mpsc::unbounded_channel::<(u64, mpsc::Sender<_>)>();
        runtime.run(async {
            tokio::spawn(async move {
                while let Some((number, answer)) = receive.recv().await {
                    tokio::task::yield_now().await;
                    let _ = answer.send(number + 1);
                }
            });
        });
        send
    }

    #[test]
    fn tasks_go_on_while_nobody_calls() {
        let runtime = OwnRuntime::start().unwrap();
        let ask = echo(&runtime);
        let (send, receive) = mpsc::channel();
        for number in 0..50 {
            ask.send((number, send.clone())).unwrap();
            assert_eq!(receive.recv_timeout(Duration::from_secs(20)), Ok(number + 1));
            if number % 2 == 0 {
                runtime.run(tokio::task::yield_now());
            }
        }
    }

    #[test]
    fn callers_of_all_kinds_get_their_answers_at_once() {
        let runtime = Arc::new(OwnRuntime::start().unwrap());
        let ask = echo(&runtime);
        let work = |own: &OwnRuntime, rounds: u64| {
            for number in 0..rounds {
                let (send, receive) = tokio::sync::oneshot::channel();
                let (back, answer) = mpsc::channel();
                ask.send((number, back)).unwrap();
                let got = own.run(async move {
                    tokio::spawn(async move {
                        tokio::time::sleep(Duration::from_micros(100)).await;
                        let _ = send.send(());
                    });
                    receive.await
                });
                got.unwrap();
                assert_eq!(answer.recv_timeout(Duration::from_secs(20)), Ok(number + 1));
            }
        };
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| work(&runtime, 200));
            }
            scope.spawn(|| other.block_on(async { work(&runtime, 200) }));
        });
    }

    #[test]
    fn the_last_owner_may_be_inside_another_runtime() {
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (runtime, (send, receive)) = (OwnRuntime::start().unwrap(), mpsc::channel::<()>());
        runtime.run(async move {
            tokio::spawn(async move {
                let _held = send;
                std::future::pending::<()>().await;
            });
        });
        other.block_on(async move { drop(runtime) });
        // Its tasks are dropped with it.
        let ended = receive.recv_timeout(Duration::from_secs(20));
        assert_eq!(ended, Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
