//! Who is owed an answer. Every job taken has an entry here until it was answered, by whichever
//! thread comes first: the owner thread, the reaper, or the watch when the owner thread is stuck.
//!
//! Invariants:
//! 1. What a job does to memory is kept here until the job is begun. So whoever answers a job that
//!    was not begun also lets go of its host slot, in front of the answer, and no answer is given
//!    whose host slot is still lent.
//! 2. A job that was begun is answered only by who has seen its end. Beginning and abandoning take
//!    the same lock, so that no job is begun whose failure was told, nor the other way round.
//! 3. When the GPU is lost without proof that it has stopped, jobs begun are dropped from here
//!    without an answer, and so is the `Close` of their region, then and later.
//!
//! Lock order: the table's lock is never held while the listener is called or a slot is let go of.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::gpu::GpuError;
use super::work::Work;
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

/// How far a job is.
enum Stage {
    /// In the channel, or in the owner thread's hands.
    Taken,
    /// Checked. What it is to do, with the guard of its host slot.
    Waiting(Work),
    /// The GPU may be carrying it out. Of this region, if of any.
    Begun(Option<RegionId>),
    /// A close whose mapping is with the reaper. It may hang, and takes no job's place.
    Reaping,
}

struct Entry {
    owed: Owed,
    stage: Stage,
}

#[derive(Default)]
struct Table {
    next: u64,
    owed: BTreeMap<Ticket, Entry>,
    /// Of `owed`, those that are not `Reaping`.
    counted: usize,
    /// The GPU is lost without proof: nothing is begun any more.
    abandoned: bool,
    /// Regions of which a batch was under way then. A batch is of one region, so there are few.
    regions: BTreeSet<RegionId>,
}

impl Table {
    /// Ends an entry. `None` when nobody is owed anything, or must not be told.
    fn take(&mut self, ticket: Ticket) -> Option<Entry> {
        let entry = self.owed.remove(&ticket)?;
        self.counted -= usize::from(!matches!(entry.stage, Stage::Reaping));
        match entry.owed {
            Owed::Close(region) if self.regions.contains(&region) => None,
            _ => Some(entry),
        }
    }

    fn tickets(&self, which: impl Fn(&Entry) -> bool) -> Vec<Ticket> {
        self.owed.iter().filter(|(_, entry)| which(entry)).map(|(ticket, _)| *ticket).collect()
    }
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
        table.owed.insert(ticket, Entry { owed: Owed::of(job), stage: Stage::Taken });
        Some(ticket)
    }

    /// A job that was not taken after all. Whether it was still owed an answer.
    pub(super) fn forget(&self, ticket: Ticket) -> bool {
        let entry = self.table().take(ticket);
        entry.is_some()
    }

    /// Keeps what a job is to do until it is begun or answered.
    pub(super) fn park(&self, ticket: Ticket, work: Work) {
        let mut work = Some(work);
        if let Some(entry) = self.table().owed.get_mut(&ticket) {
            entry.stage = work.take().map_or(Stage::Taken, Stage::Waiting);
        }
    }

    /// Hands out what parked jobs of one batch are to do. From here on they are answered only by
    /// who has seen the batch end. `None`, and nothing is begun, once the GPU was abandoned.
    pub(super) fn begin(&self, tickets: &[Ticket], region: Option<RegionId>) -> Option<Vec<Work>> {
        let mut table = self.table();
        if table.abandoned {
            return None;
        }
        let begin = |ticket: &Ticket| {
            let stage = &mut table.owed.get_mut(ticket)?.stage;
            match std::mem::replace(stage, Stage::Begun(region)) {
                Stage::Waiting(work) => Some(work),
                other => {
                    *stage = other;
                    None
                }
            }
        };
        Some(tickets.iter().filter_map(begin).collect())
    }

    /// A close that may hang must not take a job's place for ever.
    pub(super) fn reaping(&self, ticket: Ticket) {
        let mut table = self.table();
        if let Some(entry) = table.owed.get_mut(&ticket)
            && !matches!(std::mem::replace(&mut entry.stage, Stage::Reaping), Stage::Reaping)
        {
            table.counted -= 1;
        }
    }

    /// Answers a job, unless it was answered or abandoned before. The result of an open has any
    /// checksum; that of a close is of no meaning.
    pub(super) fn answer(&self, ticket: Ticket, result: Result<Sum128, GpuError>) {
        let entry = self.table().take(ticket);
        if let Some(Entry { owed, stage }) = entry {
            drop(stage);
            self.tell(owed.done(result));
        }
    }

    /// The GPU is lost, and it was not seen to have stopped. Nothing is begun from here on, and
    /// what was begun is never answered: only this keeps its slots and places from being reused
    /// while the GPU still writes to them.
    pub(super) fn abandon(&self) {
        let mut table = self.table();
        table.abandoned = true;
        let begun = table.tickets(|entry| matches!(entry.stage, Stage::Begun(_)));
        for ticket in &begun {
            if let Some(Entry { stage: Stage::Begun(Some(region)), .. }) = table.take(*ticket) {
                table.regions.insert(region);
            }
        }
        drop(table);
        if !begun.is_empty() {
            let jobs = begun.len();
            tracing::error!(jobs, "what the GPU was doing may go on; its memory stays taken");
        }
    }

    /// Answers what was not begun. Left out are moves in the hands of the owner thread, which has
    /// their guards, and closes at the reaper, which answers them.
    pub(super) fn fail_waiting(&self, error: &GpuError) {
        let tickets = self.table().tickets(|entry| match entry.stage {
            Stage::Waiting(_) => true,
            Stage::Taken => matches!(entry.owed, Owed::Open(_) | Owed::Close(_)),
            Stage::Begun(_) | Stage::Reaping => false,
        });
        self.fail(tickets, error);
    }

    /// Answers all that is owed and was not begun, once there is no owner thread any more.
    pub(super) fn fail_rest(&self, error: &GpuError) {
        let tickets = self.table().tickets(|entry| !matches!(entry.stage, Stage::Begun(_)));
        self.fail(tickets, error);
    }

    fn fail(&self, tickets: Vec<Ticket>, error: &GpuError) {
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
