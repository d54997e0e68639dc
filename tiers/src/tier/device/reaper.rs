//! The reaper thread: closes mappings, one behind the other, and answers the jobs that asked for
//! it. A close can hang in the driver for ever; then this thread is all that hangs with it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::{self, Receiver, Sender};

use super::Shared;
use super::answers::Ticket;
use super::gpu::Closing;
use crate::block::Sum128;
use crate::catalog::RegionId;

/// A mapping to be closed, and who waits for it.
type Order = (RegionId, Closing, Option<Ticket>);

/// The owner thread's end.
pub(super) struct Reaper {
    /// `None` once the reaper was told to end.
    orders: Option<Sender<Order>>,
    /// Regions whose mapping is closed. Disconnected when the thread has ended.
    pub(super) closed: Receiver<RegionId>,
    shared: Arc<Shared>,
}

impl Reaper {
    /// Starts the thread. At most `regions_max` closes are ever under way.
    pub(super) fn start(shared: &Arc<Shared>, regions_max: usize) -> io::Result<Reaper> {
        let (orders, order_source) = channel::bounded::<Order>(regions_max.max(1));
        let (closed_sink, closed) = channel::bounded(regions_max.max(1));
        let theirs = Arc::clone(shared);
        let work = move || {
            while let Ok((region, close, ticket)) = order_source.recv() {
                if catch_unwind(AssertUnwindSafe(close)).is_err() {
                    tracing::error!(?region, "closing a GPU mapping panicked; it stays mapped");
                }
                theirs.state().closing.pop_front();
                // Without an owner thread nobody asks; mappings are closed all the same. In front
                // of the answer, so that the region takes no place when its client hears it.
                let _ = closed_sink.try_send(region);
                if let Some(ticket) = ticket {
                    theirs.answers.answer(ticket, Ok(Sum128::default()));
                }
            }
        };
        std::thread::Builder::new().name("kvtide-gpu-reap".into()).spawn(work)?;
        Ok(Reaper { orders: Some(orders), closed, shared: Arc::clone(shared) })
    }

    /// Hands a mapping over. Never blocks: there are at most as many closes under way as regions.
    /// The job is answered once the mapping is closed. `false`, and the mapping stays, and the job
    /// is not answered, when the thread is gone.
    pub(super) fn close(&self, region: RegionId, close: Closing, ticket: Option<Ticket>) -> bool {
        self.shared.state().closing.push_back(Instant::now());
        if let Some(ticket) = ticket {
            self.shared.answers.reaping(ticket);
        }
        let sent = match &self.orders {
            Some(orders) => orders.try_send((region, close, ticket)).map_err(|refused| {
                // Running it here could hang the owner thread.
                std::mem::forget(refused);
            }),
            None => {
                std::mem::forget(close);
                Err(())
            }
        };
        if sent.is_err() {
            self.shared.state().closing.pop_back();
        }
        sent.is_ok()
    }

    /// Tells the thread to end after the closes it has.
    pub(super) fn end(&mut self) {
        self.orders = None;
    }
}
