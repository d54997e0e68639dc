//! Who is owed an answer. Every job taken has an entry here until it was answered, by whichever
//! thread comes first: the owner thread, or the watch when the owner thread is stuck.
//!
//! Lock order: the table's lock is never held while the listener is called.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::gpu::GpuError;
use super::{DeviceDone, DeviceJob};
use crate::block::Sum128;
use crate::catalog::RegionId;

/// The number of a job that was taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Ticket(u64);

/// What answer a job gets.
#[derive(Clone, Copy, Debug)]
enum Owed {
    Open(RegionId),
    Close(RegionId),
    Gather(u64),
    Compare(u64),
    Scatter { op: u64, expected: Sum128 },
    Demote(u64),
}

impl Owed {
    fn of(job: &DeviceJob) -> Owed {
        match job {
            DeviceJob::Open { region, .. } => Owed::Open(*region),
            DeviceJob::Close { region } => Owed::Close(*region),
            DeviceJob::Gather { op, .. } => Owed::Gather(*op),
            DeviceJob::Compare { op, .. } => Owed::Compare(*op),
            DeviceJob::Scatter { op, expected, .. } => {
                Owed::Scatter { op: *op, expected: *expected }
            }
            DeviceJob::Demote { op, .. } => Owed::Demote(*op),
        }
    }

    fn done(self, result: Result<Sum128, GpuError>) -> DeviceDone {
        match self {
            Owed::Open(region) => DeviceDone::Opened { region, result: result.map(drop) },
            Owed::Close(region) => DeviceDone::Closed { region },
            Owed::Gather(op) => DeviceDone::Gathered { op, result },
            Owed::Compare(op) => DeviceDone::Compared { op, result },
            Owed::Scatter { op, expected } => {
                let same = |found| if found == expected { Ok(()) } else { Err(GpuError::Checksum) };
                DeviceDone::Scattered { op, result: result.and_then(same) }
            }
            Owed::Demote(op) => DeviceDone::Demoted { op, result: result.map(drop) },
        }
    }
}

#[derive(Default)]
struct Table {
    next: u64,
    /// Whether the job counts against the limit.
    owed: BTreeMap<Ticket, (Owed, bool)>,
    counted: usize,
}

/// The table, and who listens.
pub(super) struct Answers {
    table: Mutex<Table>,
    listener: Mutex<Box<dyn FnMut(DeviceDone) + Send>>,
}

impl fmt::Debug for Answers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Answers({} owed)", self.counted())
    }
}

impl Answers {
    pub(super) fn new(listener: Box<dyn FnMut(DeviceDone) + Send>) -> Answers {
        Answers { table: Mutex::default(), listener: Mutex::new(listener) }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Jobs owed an answer, closes at the reaper excluded.
    pub(super) fn counted(&self) -> usize {
        self.table().counted
    }

    /// Takes a job down, unless `most` count already.
    pub(super) fn owe(&self, job: &DeviceJob, most: usize) -> Option<Ticket> {
        let mut table = self.table();
        if table.counted >= most {
            return None;
        }
        let ticket = Ticket(table.next);
        table.next += 1;
        table.counted += 1;
        table.owed.insert(ticket, (Owed::of(job), true));
        Some(ticket)
    }

    fn take(&self, ticket: Ticket) -> Option<Owed> {
        let mut table = self.table();
        let (owed, counts) = table.owed.remove(&ticket)?;
        table.counted -= usize::from(counts);
        Some(owed)
    }

    /// A job that was not taken after all. Whether it was still owed an answer.
    pub(super) fn forget(&self, ticket: Ticket) -> bool {
        self.take(ticket).is_some()
    }

    /// A close that may hang must not take a job's place for ever.
    pub(super) fn uncount(&self, ticket: Ticket) {
        let mut table = self.table();
        if let Some((_, counts)) = table.owed.get_mut(&ticket)
            && std::mem::take(counts)
        {
            table.counted -= 1;
        }
    }

    /// Answers a job, unless it was answered before. The result of an open has any checksum; that
    /// of a close is of no meaning.
    pub(super) fn answer(&self, ticket: Ticket, result: Result<Sum128, GpuError>) {
        if let Some(owed) = self.take(ticket) {
            self.tell(owed.done(result));
        }
    }

    /// Answers all that is owed.
    pub(super) fn fail_all(&self, error: &GpuError) {
        let tickets: Vec<Ticket> = self.table().owed.keys().copied().collect();
        for ticket in tickets {
            self.answer(ticket, Err(error.clone()));
        }
    }

    /// A panic of the listener must not keep the others from their answers.
    pub(super) fn tell(&self, done: DeviceDone) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if catch_unwind(AssertUnwindSafe(|| listener(done))).is_err() {
            tracing::error!("whoever was told of a GPU's answer panicked");
        }
    }
}
