//! The owner thread: takes jobs, makes batches of them, settles what ended.
//!
//! Each region has a queue of its own, and so have demotions; queues take turns. A queue whose
//! first job waits for the engine's event is passed over. Calls of the driver are the only thing
//! that can hang here, so each is marked while it is under way.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, TryRecvError};

use super::answers::Ticket;
use super::gpu::{
    BATCH_MOVES_MAX, BatchDone, BatchId, Closing, DemoteMove, GatherMove, Gpu, GpuError, GpuInfo,
    GpuRegion, MoveTo, OpenRegion, RegionShape, ScatterMove, Surrendered,
};
use super::reaper::Reaper;
use super::work::{Kind, Work, batch_of};
use super::{DeviceDone, DeviceJob, DeviceOptions, GatherTo, Shared};
use crate::block::Sum128;
use crate::catalog::RegionId;

/// The first pause between two looks at what is under way; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// How long the thread sleeps with nothing to do; a job ends it.
const IDLE: Duration = Duration::from_secs(3600);

/// A checked job that waits. What it is to do is parked with its answer.
struct Waiting {
    ticket: Ticket,
    after_event: Option<u32>,
    taken: Instant,
    kind: Kind,
    bytes: u64,
}

/// A region's queue; `None` is the one of demotions.
type QueueId = Option<RegionId>;

enum RegionState {
    Open {
        gpu: GpuRegion,
        shape: RegionShape,
        /// Batches under way.
        batches: usize,
        /// The `Close` that was taken.
        closing: Option<Ticket>,
    },
    /// With the reaper thread, which answers the close.
    Reaping,
}

struct UnderWay {
    tickets: Vec<Ticket>,
    queue: QueueId,
    since: Instant,
}

struct Worker {
    /// `None` once it was given up, or dropped in an orderly stop.
    gpu: Option<Box<dyn Gpu>>,
    lost: Option<GpuError>,
    info: GpuInfo,
    reaper: Reaper,
    options: DeviceOptions,
    jobs: Receiver<(Ticket, DeviceJob)>,
    shared: Arc<Shared>,
    queues: BTreeMap<QueueId, VecDeque<Waiting>>,
    /// The queue that had the last turn.
    turn: QueueId,
    regions: HashMap<RegionId, RegionState>,
    under_way: HashMap<BatchId, UnderWay>,
    stopping: bool,
}

/// Runs until the owner lets go of the channel. Answers every job, whatever happens.
pub(super) fn run(
    gpu: Box<dyn Gpu>,
    reaper: Reaper,
    options: DeviceOptions,
    jobs: Receiver<(Ticket, DeviceJob)>,
    shared: Arc<Shared>,
) {
    let info = gpu.info().clone();
    let mut worker = Worker {
        gpu: Some(gpu),
        lost: None,
        info,
        reaper,
        options,
        jobs,
        shared,
        queues: BTreeMap::new(),
        turn: None,
        regions: HashMap::new(),
        under_way: HashMap::new(),
        stopping: false,
    };
    // After a panic the state is only used to fail what is in it. One that comes again would come
    // for ever.
    for _ in 0..2 {
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| worker.run())) else { return };
        worker.lose(&GpuError::Lost(format!("its worker panicked: {}", message_of(&*panic))));
    }
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

impl Worker {
    fn run(&mut self) {
        let mut pause = PAUSE_MIN;
        loop {
            let mut progress = self.take_jobs();
            progress |= self.start_batches();
            progress |= self.settle_batches();
            self.check_batch_time();
            self.publish();
            if self.stopping && self.under_way.is_empty() {
                return self.finish();
            }
            pause = if progress { PAUSE_MIN } else { PAUSE_MAX.min(pause * 2) };
            if !progress && self.wait(pause) {
                pause = PAUSE_MIN;
            }
        }
    }

    /// Sleeps until a job comes, a mapping is closed, or it is time to look again. Whether one of
    /// the first two happened.
    fn wait(&mut self, pause: Duration) -> bool {
        if self.stopping {
            std::thread::sleep(pause);
            return false;
        }
        let looks = !self.under_way.is_empty() || !self.queues.is_empty();
        let timeout = if looks { pause } else { IDLE };
        crossbeam::select! {
            recv(self.jobs) -> job => match job {
                Ok((ticket, job)) => self.take(ticket, job),
                Err(_) => self.begin_stop(),
            },
            recv(self.reaper.closed) -> region => match region {
                Ok(region) => drop(self.regions.remove(&region)),
                // The reaper thread is gone: its panics are caught, so this is not reached.
                Err(_) => std::thread::sleep(PAUSE_MAX),
            },
            default(timeout) => return false,
        }
        true
    }

    fn take_jobs(&mut self) -> bool {
        let mut any = self.forget_closed();
        while !self.stopping {
            match self.jobs.try_recv() {
                Ok((ticket, job)) => {
                    self.take(ticket, job);
                    any = true;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => self.begin_stop(),
            }
        }
        any
    }

    fn forget_closed(&mut self) -> bool {
        let mut any = false;
        while let Ok(region) = self.reaper.closed.try_recv() {
            self.regions.remove(&region);
            any = true;
        }
        any
    }

    /// Whether the watch has given the GPU up without this thread. Then this thread does so, too.
    fn deposed(&mut self) -> Result<(), GpuError> {
        let lost = self.shared.state().lost.clone();
        match lost.filter(|_| self.lost.is_none()) {
            Some(error) => {
                self.lose(&error);
                Err(error)
            }
            None => Ok(()),
        }
    }

    /// One call of the driver, marked while it is under way. A GPU that panics is lost. When the
    /// watch has lost patience meanwhile, the result is of no use.
    fn call<R>(&mut self, call: impl FnOnce(&mut dyn Gpu) -> R) -> Result<R, GpuError> {
        self.deposed()?;
        let Some(gpu) = &mut self.gpu else {
            return Err(self.lost.clone().unwrap_or(GpuError::Ended));
        };
        self.shared.state().health.busy_since = Some(Instant::now());
        let result = catch_unwind(AssertUnwindSafe(|| call(gpu.as_mut())));
        self.shared.state().health.busy_since = None;
        self.deposed()?;
        result.map_err(|panic| {
            let error = GpuError::Lost(format!("its driver panicked: {}", message_of(&*panic)));
            self.lose(&error);
            error
        })
    }

    fn answer(&self, ticket: Ticket, result: Result<Sum128, GpuError>) {
        self.shared.answers.answer(ticket, result);
    }

    fn take(&mut self, ticket: Ticket, job: DeviceJob) {
        let (queue, after_event, work) = match job {
            DeviceJob::Open { region, open } => return self.open(ticket, region, *open),
            DeviceJob::Close { region } => return self.close(ticket, region),
            DeviceJob::Gather { region, place, after_event, to, bytes, .. } => {
                let to = match to {
                    GatherTo::Pool(slot) => MoveTo::Pool(slot),
                    GatherTo::Host(slot) => MoveTo::Host(slot),
                };
                let work = Work::Gather(GatherMove { place, bytes, to });
                (Some(region), after_event, work)
            }
            DeviceJob::Compare { region, place, after_event, bytes, .. } => {
                let work = Work::Gather(GatherMove { place, bytes, to: MoveTo::Nowhere });
                (Some(region), after_event, work)
            }
            DeviceJob::Scatter { region, place, after_event, from, expected, bytes, .. } => {
                let work = Work::Scatter(ScatterMove { place, bytes, from, expected });
                (Some(region), after_event, work)
            }
            DeviceJob::Demote { slot, to, bytes, .. } => {
                (None, None, Work::Demote(DemoteMove { slot, bytes, to }))
            }
        };
        let refused = self.refusal(queue, after_event, &work);
        let (kind, bytes) = (work.kind(), work.bytes());
        let waiting = Waiting { ticket, after_event, taken: Instant::now(), kind, bytes };
        // Parked first in any case: whoever answers the job lets go of its slot in front of that.
        self.shared.answers.park(ticket, work);
        match refused {
            Some(error) => self.answer(ticket, Err(error)),
            None => self.queues.entry(queue).or_default().push_back(waiting),
        }
    }

    /// Why a job cannot be done, if so.
    fn refusal(&self, queue: QueueId, event: Option<u32>, work: &Work) -> Option<GpuError> {
        if let Some(error) = &self.lost {
            return Some(error.clone());
        }
        if self.stopping {
            return Some(GpuError::Ended);
        }
        let shape = match queue.map(|region| self.regions.get(&region)) {
            Some(Some(RegionState::Open { shape, closing: None, .. })) => Some(shape),
            Some(_) => return Some(GpuError::Closed),
            None => None,
        };
        if let (Some(event), Some(shape)) = (event, shape)
            && event >= shape.events
        {
            return Some(GpuError::Event);
        }
        work.check(shape, &self.info).err()
    }

    fn open(&mut self, ticket: Ticket, region: RegionId, open: OpenRegion) {
        let result = self.try_open(region, open);
        let lost = result.as_ref().err().cloned();
        self.answer(ticket, result.map(|()| Sum128::default()));
        if let Some(error) = lost {
            self.lose_in_order(error);
        }
    }

    fn try_open(&mut self, region: RegionId, open: OpenRegion) -> Result<(), GpuError> {
        if self.stopping {
            return Err(GpuError::Ended);
        }
        self.forget_closed();
        if self.regions.contains_key(&region) {
            return Err(GpuError::Region("its number is in use".to_owned()));
        }
        if self.regions.len() >= self.options.regions_max {
            return Err(GpuError::TooManyRegions(self.regions.len()));
        }
        let shape = open.check(&self.info)?;
        let gpu = self.call(|gpu| gpu.open(open))??;
        let opened = RegionState::Open { gpu, shape, batches: 0, closing: None };
        self.regions.insert(region, opened);
        Ok(())
    }

    fn close(&mut self, ticket: Ticket, region: RegionId) {
        match self.regions.get_mut(&region) {
            Some(RegionState::Open { closing: closing @ None, .. }) => *closing = Some(ticket),
            _ => return self.answer(ticket, Ok(Sum128::default())),
        }
        self.finish_close(region);
    }

    /// Hands the mapping to the reaper once nothing uses it.
    fn finish_close(&mut self, region: RegionId) {
        let Some(RegionState::Open { gpu, batches: 0, closing: Some(ticket), .. }) =
            self.regions.get(&region)
        else {
            return;
        };
        if self.queues.contains_key(&Some(region)) {
            return;
        }
        let (gpu, ticket) = (*gpu, *ticket);
        self.reap(region, gpu, Some(ticket));
    }

    fn reap(&mut self, region: RegionId, gpu_region: GpuRegion, ticket: Option<Ticket>) {
        // Losing the GPU in this call answers what is owed for the region.
        let Ok(close) = self.call(|gpu| gpu.close(gpu_region)) else { return };
        if close.is_some_and(|close| self.reaper.close(region, close, ticket)) {
            self.regions.insert(region, RegionState::Reaping);
        } else {
            self.regions.remove(&region);
            self.answer_close(ticket);
        }
    }

    fn answer_close(&self, ticket: Option<Ticket>) {
        if let Some(ticket) = ticket {
            self.answer(ticket, Ok(Sum128::default()));
        }
    }

    fn start_batches(&mut self) -> bool {
        let most = self.options.batches_max.clamp(1, self.info.batches_max.max(1));
        let mut any = false;
        while self.under_way.len() < most && !self.stopping {
            let Some((queue, run)) = self.next_run() else { break };
            self.start_batch(queue, &run);
            any = true;
        }
        any
    }

    /// Jobs that can start now, of the first queue that has any, in turn.
    fn next_run(&mut self) -> Option<(QueueId, Vec<Waiting>)> {
        let after = (Bound::Excluded(self.turn), Bound::Unbounded);
        let upto = (Bound::Unbounded, Bound::Included(self.turn));
        let ids: Vec<QueueId> =
            self.queues.range(after).chain(self.queues.range(upto)).map(|(id, _)| *id).collect();
        for id in ids {
            let run = self.take_run(id);
            if !run.is_empty() {
                self.turn = id;
                return Some((id, run));
            }
        }
        None
    }

    /// Takes consecutive jobs of one kind off a queue, as far as they are ready and fit a batch.
    fn take_run(&mut self, queue: QueueId) -> Vec<Waiting> {
        let mut run: Vec<Waiting> = Vec::new();
        let mut bytes = 0;
        let mut ready = None;
        while let Some(first) = self.queues.get(&queue).and_then(VecDeque::front) {
            let joins = run.iter().all(|before| before.kind.joins(first.kind));
            bytes += first.bytes;
            let full = run.len() == BATCH_MOVES_MAX || bytes > self.info.staging_bytes;
            if !joins || full {
                break;
            }
            let (event, taken) = (first.after_event, first.taken);
            let state = match event {
                Some(event) if ready != Some(event) => self.is_ready(queue, event, taken),
                _ => Ok(true),
            };
            match state {
                Ok(true) => ready = event.or(ready),
                Ok(false) => break,
                Err(error) => {
                    bytes -= self.fail_first(queue, error);
                    continue;
                }
            }
            run.extend(self.pop(queue));
        }
        if run.is_empty() && self.queues.get(&queue).is_some_and(VecDeque::is_empty) {
            self.forget_queue(queue);
        }
        run
    }

    /// Whether the engine's work in front of a job is done.
    fn is_ready(&mut self, queue: QueueId, event: u32, taken: Instant) -> Result<bool, GpuError> {
        let state = queue.and_then(|region| self.regions.get(&region));
        let Some(RegionState::Open { gpu: region, closing, .. }) = state else {
            return Err(GpuError::Closed);
        };
        let (region, closing) = (*region, closing.is_some());
        let late = taken.elapsed() > self.options.event_timeout;
        match self.call(|gpu| gpu.is_ready(region, event))? {
            // A client that is gone is not waited for.
            Ok(false) if late || closing => Err(GpuError::Event),
            result => {
                if let Err(error) = &result {
                    self.lose_in_order(error.clone());
                }
                result
            }
        }
    }

    fn pop(&mut self, queue: QueueId) -> Option<Waiting> {
        self.queues.get_mut(&queue)?.pop_front()
    }

    /// Fails the first job of a queue, and says how many bytes it had.
    fn fail_first(&mut self, queue: QueueId, error: GpuError) -> u64 {
        let Some(waiting) = self.pop(queue) else { return 0 };
        self.answer(waiting.ticket, Err(error));
        waiting.bytes
    }

    fn forget_queue(&mut self, queue: QueueId) {
        self.queues.remove(&queue);
        if let Some(region) = queue {
            self.finish_close(region);
        }
    }

    fn start_batch(&mut self, queue: QueueId, run: &[Waiting]) {
        let tickets: Vec<Ticket> = run.iter().map(|waiting| waiting.ticket).collect();
        let Some(run) = self.shared.answers.begin(&tickets, queue) else {
            // The watch was first, and has answered them.
            drop(self.deposed());
            return;
        };
        let gpu_region = match queue.and_then(|region| self.regions.get_mut(&region)) {
            Some(RegionState::Open { gpu, batches, .. }) => {
                *batches += 1;
                *gpu
            }
            // Of no meaning for demotions.
            _ => GpuRegion(0),
        };
        if self.queues.get(&queue).is_some_and(VecDeque::is_empty) {
            self.queues.remove(&queue);
        }
        let batch = batch_of(gpu_region, run);
        match self.call(|gpu| gpu.start(batch)) {
            Ok(Ok(id)) => {
                self.under_way.insert(id, UnderWay { tickets, queue, since: Instant::now() });
            }
            Ok(Err((error, Some(batch)))) => {
                drop(batch);
                self.end_batch(tickets, queue, vec![Err(error)]);
            }
            Ok(Err((error, None))) => self.lose(&error),
            // The GPU was given up in the call, and may have begun.
            Err(_) => {}
        }
    }

    /// Answers a batch's jobs. One result may stand for all; a missing one is a failure.
    fn end_batch(
        &mut self,
        tickets: Vec<Ticket>,
        queue: QueueId,
        results: Vec<Result<Sum128, GpuError>>,
    ) {
        let lost = results
            .iter()
            .find_map(|result| result.as_ref().err().filter(|error| error.is_lost()).cloned());
        let all = match &*results {
            [Err(error)] => error.clone(),
            _ => GpuError::Failed("the batch ended without a result for the job".to_owned()),
        };
        let mut results = results.into_iter();
        for ticket in tickets {
            self.answer(ticket, results.next().unwrap_or_else(|| Err(all.clone())));
        }
        if let Some(region) = queue {
            if let Some(RegionState::Open { batches, .. }) = self.regions.get_mut(&region) {
                *batches = batches.saturating_sub(1);
            }
            self.finish_close(region);
        }
        if let Some(error) = lost {
            self.lose_in_order(error);
        }
    }

    fn settle_batches(&mut self) -> bool {
        if self.under_way.is_empty() {
            return false;
        }
        let mut done = Vec::new();
        let stuck = self.call(|gpu| gpu.finished(&mut done));
        let any = !done.is_empty();
        self.settle(done);
        if let Ok(Err(error)) = stuck {
            self.lose(&error);
        }
        any
    }

    fn settle(&mut self, done: Vec<BatchDone>) {
        // The slots are free before anybody hears of it; one loss answers for all batches.
        let ended = done.into_iter().map(|BatchDone { id, batch, results }| {
            drop(batch);
            (id, results)
        });
        for (id, results) in ended.collect::<Vec<_>>() {
            if let Some(UnderWay { tickets, queue, .. }) = self.under_way.remove(&id) {
                self.end_batch(tickets, queue, results);
            }
        }
    }

    fn check_batch_time(&mut self) {
        let timeout = self.options.batch_timeout;
        if self.under_way.values().any(|batch| batch.since.elapsed() > timeout) {
            let why = format!("a batch did not end within {} ms", timeout.as_millis());
            self.lose(&GpuError::Lost(why));
        }
    }

    /// What [`super::DeviceWorker::health`] reads.
    fn publish(&self) {
        let mut state = self.shared.state();
        state.health.regions = self.regions.len();
        state.health.batches = self.under_way.len();
        state.health.batch_since = self.under_way.values().map(|batch| batch.since).min();
    }

    /// The GPU has said itself that it is lost: nothing of it runs any more, so everybody is
    /// answered, and the host slots of what was under way are free again.
    fn lose_in_order(&mut self, error: GpuError) {
        if self.lost.is_some() || !error.is_lost() {
            return;
        }
        self.announce(&error);
        let Ok(Surrendered { batches, regions }) = self.call(|gpu| gpu.surrender()) else { return };
        drop(batches);
        for (_, batch) in std::mem::take(&mut self.under_way) {
            for ticket in batch.tickets {
                self.answer(ticket, Err(error.clone()));
            }
        }
        self.reap_lost(regions);
        self.give_up(&error);
    }

    /// Hands the mappings of a lost GPU to the reaper: the memory of an engine that has ended goes
    /// back only with them, as far as the driver still does it. Nobody waits for that.
    fn reap_lost(&mut self, mut mappings: Vec<(GpuRegion, Closing)>) {
        let mut closings = Vec::new();
        for (region, state) in &mut self.regions {
            let RegionState::Open { gpu, closing, .. } = state else { continue };
            let Some(at) = mappings.iter().position(|(other, _)| other == gpu) else { continue };
            let (_, close) = mappings.swap_remove(at);
            let closing = closing.take();
            if self.reaper.close(*region, close, None) {
                *state = RegionState::Reaping;
            }
            closings.push(closing);
        }
        // What the worker does not know of (an open that failed in between) is leaked.
        std::mem::forget(mappings);
        for closing in closings {
            self.answer_close(closing);
        }
    }

    /// The GPU is lost, and may still be at work. What was begun is never answered.
    fn lose(&mut self, error: &GpuError) {
        if self.lost.is_none() {
            self.announce(error);
        }
        self.shared.answers.abandon();
        self.under_way.clear();
        self.give_up(error);
    }

    fn announce(&mut self, error: &GpuError) {
        self.lost = Some(error.clone());
        let mut state = self.shared.state();
        let first = state.lost.is_none();
        state.lost.get_or_insert_with(|| error.clone());
        drop(state);
        if first {
            tracing::error!(gpu = %self.info.uuid, %error, "the device tier is off");
            self.shared.answers.tell(DeviceDone::Lost { error: error.clone() });
        }
    }

    /// Fails what was not begun. The GPU is leaked, because touching it could hang.
    fn give_up(&mut self, error: &GpuError) {
        std::mem::forget(self.gpu.take());
        self.fail_waiting(error);
        for (region, state) in std::mem::take(&mut self.regions) {
            match state {
                RegionState::Open { closing, .. } => self.answer_close(closing),
                RegionState::Reaping => {
                    self.regions.insert(region, RegionState::Reaping);
                }
            }
        }
    }

    fn fail_waiting(&mut self, error: &GpuError) {
        for waiting in std::mem::take(&mut self.queues).into_values().flatten() {
            self.answer(waiting.ticket, Err(error.clone()));
        }
    }

    fn begin_stop(&mut self) {
        self.stopping = true;
        let error = self.lost.clone().unwrap_or(GpuError::Ended);
        self.fail_waiting(&error);
        let regions: Vec<RegionId> = self.regions.keys().copied().collect();
        for region in regions {
            self.finish_close(region);
        }
    }

    /// The end of an orderly stop: nothing is under way any more.
    fn finish(&mut self) {
        let open: Vec<(RegionId, GpuRegion, Option<Ticket>)> = self
            .regions
            .iter()
            .filter_map(|(region, state)| match state {
                RegionState::Open { gpu, closing, .. } => Some((*region, *gpu, *closing)),
                RegionState::Reaping => None,
            })
            .collect();
        for (region, gpu, ticket) in open {
            self.reap(region, gpu, ticket);
        }
        self.reaper.end();
        let until = self.shared.state().stop_by.unwrap_or_else(Instant::now);
        let reaped = loop {
            match self.reaper.closed.recv_deadline(until) {
                Ok(region) => drop(self.regions.remove(&region)),
                Err(RecvTimeoutError::Disconnected) => break true,
                Err(RecvTimeoutError::Timeout) => break false,
            }
        };
        if reaped {
            drop(catch_unwind(AssertUnwindSafe(|| drop(self.gpu.take()))));
        } else {
            // Freeing the pool would most likely hang as well.
            std::mem::forget(self.gpu.take());
        }
        self.publish();
        self.shared.state().stopped = reaped;
    }
}
