//! The watch: a thread that looks whether the owner thread is stuck in a call of the driver. When
//! it has been for too long, the GPU is taken for lost, and the owner thread finds itself deposed
//! when the driver lets it go, if ever.
//!
//! Jobs that were not begun give their host slots back and are answered. Those of batches under way
//! are not answered, and their slots stay with the owner thread: the GPU may still write to them.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError};

use super::answers::Ticket;
use super::gpu::GpuError;
use super::{DeviceDone, DeviceJob, Shared};

/// How the watch ends.
pub(super) enum Farewell {
    /// The owner thread has ended: what is left are closes that hang.
    Ended,
    /// The owner thread did not stop in time.
    Stuck,
}

pub(super) struct Watch {
    pub(super) shared: Arc<Shared>,
    pub(super) jobs: Receiver<(Ticket, DeviceJob)>,
    pub(super) call_timeout: Duration,
}

impl Watch {
    /// Looks now and then, until it is told to end or nobody can tell it any more.
    pub(super) fn run(self, farewell: &Receiver<Farewell>) {
        let pause = (self.call_timeout / 4).clamp(Duration::from_millis(5), Duration::from_secs(1));
        loop {
            match farewell.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => self.look(),
                Ok(Farewell::Stuck) => return self.depose("it did not stop in time"),
                Ok(Farewell::Ended) => return self.answer_rest(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look(&self) {
        let busy = self.shared.state().health.busy_since;
        if busy.is_some_and(|since| since.elapsed() > self.call_timeout) {
            let ms = self.call_timeout.as_millis();
            self.depose(&format!("a call of the driver took over {ms} ms"));
        }
    }

    /// Answers in the owner thread's place. Should its call have ended just now, it finds out at
    /// its next one, and begins nothing before.
    fn depose(&self, why: &str) {
        let mut state = self.shared.state();
        let first = state.lost.is_none();
        let error = state.lost.get_or_insert_with(|| GpuError::Lost(why.to_owned())).clone();
        drop(state);
        self.shared.answers.abandon();
        if first {
            tracing::error!(%error, "the device tier is off");
            self.shared.answers.tell(DeviceDone::Lost { error: error.clone() });
        }
        self.fail_queued(&error);
        self.shared.answers.fail_waiting(&error);
    }

    /// There is no owner thread any more.
    fn answer_rest(&self) {
        self.fail_queued(&GpuError::Ended);
        self.shared.answers.fail_rest(&GpuError::Ended);
    }

    /// Answers what the owner thread has not taken out of the channel; the guards go first.
    fn fail_queued(&self, error: &GpuError) {
        while let Ok((ticket, job)) = self.jobs.try_recv() {
            drop(job);
            self.shared.answers.answer(ticket, Err(error.clone()));
        }
    }
}
