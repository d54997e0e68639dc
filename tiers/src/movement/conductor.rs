//! What owns the catalog: takes requests and completions in, hands actions out.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};

use super::FollowResidency;
use super::gpus::{Closed, Gpus, Place, RegisterError, Registered};
use super::node::Notify;
use super::pool::{Encode, Expect, Job, PoolSender, ReadContext, Shared};
use crate::block::{DESCRIPTOR_BYTES, PAGE_BYTES};
use crate::catalog::{
    Action, AskId, Catalog, Event, GpuId, Limit, OpError, OpId, RegionId, Reply, Request,
    SessionId, SlotId, SlotPlace, TenantId, Timestamp,
};
use crate::io::{AlignedBuf, Region, SlotError};
use crate::segment::{StoreGeometry, header_page};
use crate::tier::device::{GpuError, OpenRegion};
use crate::tier::nvme::{NvmeJob, NvmeWorker, ReadBuffer, WriteBuffer};

/// Time passes for the catalog at this pace.
const TICK: Duration = Duration::from_millis(100);

/// The answer to a request; called once.
pub(super) type Answer = Box<dyn FnOnce(Reply) + Send>;

/// A request, with the place for its answer.
pub(super) struct Ask {
    pub(super) session: SessionId,
    pub(super) request: Request,
    pub(super) answer: Answer,
}

/// What happens besides requests. As many as there are operations, sessions and regions.
pub(super) enum Signal {
    Event(Event),
    OpenSession {
        session: SessionId,
        tenant: TenantId,
        notify: Notify,
    },
    CloseSession {
        session: SessionId,
    },
    OpenRegion {
        session: SessionId,
        region: RegionId,
        memory: Arc<Region>,
    },
    OpenGpuRegion {
        session: SessionId,
        region: RegionId,
        gpu: GpuId,
        open: Box<OpenRegion>,
        answer: Registered,
    },
    GpuOpened {
        region: RegionId,
        result: Result<(), GpuError>,
    },
    GpuClosed {
        region: RegionId,
    },
    CloseRegion {
        session: SessionId,
        region: RegionId,
        closed: Option<Closed>,
    },
    Stop,
}

/// Reads of nvme under way.
pub(super) type Reads = Arc<Mutex<HashMap<u64, ReadContext>>>;

/// The nvme tier at the edge.
pub(super) struct Device {
    pub(super) worker: NvmeWorker,
    pub(super) geometry: StoreGeometry,
    pub(super) salt: u128,
    pub(super) reads: Reads,
}

/// The catalog and all that its actions need. Used by one thread at a time (`Inbox`).
pub(super) struct Conductor {
    pub(super) catalog: Catalog,
    pub(super) started: Instant,
    pub(super) asks: Receiver<Ask>,
    pub(super) signals: Receiver<Signal>,
    /// For completions of jobs that could not even be handed out.
    pub(super) refused: Vec<Event>,
    pub(super) pool: PoolSender,
    pub(super) shared: Arc<Shared>,
    pub(super) device: Option<Device>,
    pub(super) gpus: Gpus,
    pub(super) answers: HashMap<AskId, Answer>,
    pub(super) next_ask: u64,
    pub(super) sessions: HashMap<SessionId, Notify>,
    pub(super) regions: HashMap<RegionId, (SessionId, Arc<Region>)>,
    /// Jobs that found the device's queue full, in order. Bounded by the blocks in the catalog.
    pub(super) backlog: VecDeque<NvmeJob>,
    /// Is told which copies come and go.
    pub(super) follow: Option<FollowResidency>,
    /// The thread that unmaps regions.
    pub(super) reaper: Sender<Arc<Region>>,
    pub(super) last_tick: Instant,
    /// Nothing more is taken in.
    pub(super) stopping: bool,
}

impl Conductor {
    /// Takes in what was signalled, and the time that passed. `false`: stop.
    pub(super) fn advance(&mut self) -> bool {
        if !self.take_signals() {
            return false;
        }
        if self.last_tick.elapsed() >= TICK {
            self.last_tick = Instant::now();
            self.event(Event::Tick);
        }
        true
    }

    /// Whether no request waits.
    pub(super) fn is_caught_up(&self) -> bool {
        self.asks.is_empty()
    }

    /// Takes in all that waits, requests as well. `false`: stop.
    pub(super) fn catch_up(&mut self) -> bool {
        if !self.advance() {
            return false;
        }
        for _ in 0..self.asks.len() {
            let Ok(ask) = self.asks.try_recv() else { return true };
            // What was signalled before the request was sent comes first.
            if !self.take_signals() {
                (ask.answer)(Reply::Busy(Limit::Draining));
                return false;
            }
            self.ask(ask);
        }
        true
    }

    /// How long time may stand still for the catalog.
    pub(super) fn until_tick(&self) -> Duration {
        TICK.saturating_sub(self.last_tick.elapsed())
    }

    /// Answers all that waits, and gives the devices back, so that they can be stopped in order.
    pub(super) fn end(mut self) -> (Option<Device>, Gpus) {
        for (_, answer) in self.answers.drain() {
            answer(Reply::Busy(Limit::Draining));
        }
        while let Ok(ask) = self.asks.try_recv() {
            (ask.answer)(Reply::Busy(Limit::Draining));
        }
        (self.device, self.gpus)
    }

    /// Takes all that has been signalled up to now. `false`: stop.
    fn take_signals(&mut self) -> bool {
        self.flush_backlog();
        self.gpus.flush();
        for _ in 0..self.signals.len() {
            match self.signals.try_recv() {
                Ok(signal) => self.signal(signal),
                Err(_) => break,
            }
        }
        !self.stopping
    }

    pub(super) fn signal(&mut self, signal: Signal) {
        match signal {
            Signal::Event(event) => {
                if let Event::Gathered { op, .. }
                | Event::Compared { op, .. }
                | Event::Scattered { op, .. }
                | Event::Demoted { op, .. } = &event
                {
                    self.gpus.ended(*op);
                }
                self.event(event);
            }
            Signal::OpenSession { session, tenant, notify } => {
                self.sessions.insert(session, notify);
                self.event(Event::SessionOpened { session, tenant });
            }
            Signal::CloseSession { session } => {
                self.event(Event::SessionClosed { session });
                self.sessions.remove(&session);
                self.bury(|_, owner| owner == session);
                self.gpus.close_all(session);
            }
            Signal::OpenRegion { session, region, memory } => {
                if !self.sessions.contains_key(&session) {
                    return;
                }
                let places = memory.places();
                let block_bytes = u32::try_from(memory.block_bytes()).unwrap_or(u32::MAX);
                self.regions.insert(region, (session, memory));
                let gpu = None;
                self.event(Event::RegionOpened { session, region, places, block_bytes, gpu });
            }
            Signal::OpenGpuRegion { session, region, gpu, open, answer } => {
                if self.sessions.contains_key(&session) {
                    self.gpus.open(session, region, gpu, open, answer);
                } else {
                    answer(Err(RegisterError::Limit(Limit::Sessions)));
                }
            }
            Signal::GpuOpened { region, result } => {
                if let Some(event) = self.gpus.opened(region, result) {
                    self.event(event);
                }
            }
            Signal::GpuClosed { region } => self.gpus.closed(region),
            Signal::CloseRegion { session, region, closed } => {
                self.event(Event::RegionClosed { session, region });
                self.bury(|id, owner| id == region && owner == session);
                self.gpus.close(session, region, closed);
            }
            Signal::Stop => self.stopping = true,
        }
    }

    /// Lets go of regions. Unmapping the last of a dead client's memory can take long, so that a
    /// thread of its own does it.
    fn bury(&mut self, dead: impl Fn(RegionId, SessionId) -> bool) {
        let ids: Vec<RegionId> = self
            .regions
            .iter()
            .filter(|(id, (owner, _))| dead(**id, *owner))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            if let Some((_, memory)) = self.regions.remove(&id) {
                drop(self.reaper.send(memory));
            }
        }
    }

    pub(super) fn ask(&mut self, ask: Ask) {
        self.next_ask += 1;
        let id = AskId(self.next_ask);
        self.answers.insert(id, ask.answer);
        self.event(Event::Asked { ask: id, session: ask.session, request: ask.request });
    }

    fn event(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next {
            let now = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
            for action in self.catalog.apply(Timestamp(now), event) {
                self.carry_out(action);
            }
            next = self.refused.pop();
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Answer { ask, reply } => {
                if let Some(answer) = self.answers.remove(&ask) {
                    answer(reply);
                }
            }
            Action::EndTicket { session, ticket, outcomes } => {
                if let Some(notify) = self.sessions.get(&session) {
                    notify(ticket, outcomes);
                }
            }
            Action::BindSlab { slab, slot_bytes } => {
                if let Err(error) = self.shared.arena.bind_slab(slab, slot_bytes) {
                    tracing::error!(slab, %error, "a slab is not free as the catalog thinks");
                }
            }
            Action::ClearSlot { slot } => {
                let empty = [0; DESCRIPTOR_BYTES];
                Self::expect_slot(slot, self.shared.arena.set_descriptor(slot, &empty));
            }
            Action::DisownSlot { slot } => Self::expect_slot(slot, self.shared.arena.disown(slot)),
            Action::Gather { op, .. } => {
                let ended = |error| Event::Gathered { op, result: Err(error) };
                self.copy_block(action, ended);
            }
            Action::Compare { op, .. } => {
                let ended = |error| Event::Compared { op, result: Err(error) };
                self.copy_block(action, ended);
            }
            Action::Scatter { op, .. } => {
                let ended = |error| Event::Scattered { op, result: Err(error) };
                self.copy_block(action, ended);
            }
            Action::Demote { op, .. } => {
                let ended = |error| Event::Demoted { op, result: Err(error) };
                self.copy_block(action, ended);
            }
            Action::Encode { op, slot, raw_bytes, codec, element, trial } => {
                let encode = Encode { slot, raw_bytes, codec, element, trial };
                self.copy(Job::Encode { op, encode });
            }
            Action::DropEncoded { op } => {
                self.take_encoded(op);
            }
            Action::QuarantineSegment { segment } => self.copy(Job::Quarantine { segment }),
            Action::RetireNamespace { namespace } => self.copy(Job::Retire { namespace }),
            Action::Degraded { from, to, why, pressure } => {
                let (from, to, percent) = (from.name(), to.name(), pressure.of(why));
                tracing::warn!(from, to, why = why.name(), percent, "a step of the ladder");
            }
            Action::Residency { changes, whole } => {
                if let Some(follow) = &self.follow {
                    (follow.0)(changes, whole);
                }
            }
            Action::TierOffline { tier, gpu, reason } => {
                let (tier, gpu) = (tier.name(), gpu.map(|gpu| gpu.0));
                tracing::error!(tier, gpu, ?reason, "a tier is off until the next start");
            }
            other => self.send_to_device(other),
        }
    }

    fn expect_slot(slot: SlotId, done: Result<(), SlotError>) {
        if let Err(error) = done {
            tracing::error!(?slot, %error, "a slot is not as the catalog thinks");
        }
    }

    /// Begins the copy of a block between a region and a tier, or from a GPU down to host RAM.
    /// One that cannot be begun has ended.
    fn copy_block(&mut self, action: Action, ended: impl FnOnce(OpError) -> Event) {
        if let Err(error) = self.begin_copy(action) {
            self.refused.push(ended(error));
        }
    }

    fn begin_copy(&mut self, action: Action) -> Result<(), OpError> {
        let on = |gpus: &Gpus, region, place, after_event| {
            let gpu = gpus.gpu_of(region)?;
            Some(Place { gpu, region, place, after_event })
        };
        match action {
            Action::Gather { op, region, place, after_event, to, narrow, descriptor } => {
                match (on(&self.gpus, region, place, after_event), to) {
                    (Some(from), to) => self.gpus.gather(op, from, to, descriptor)?,
                    (None, SlotPlace::Host(slot)) => {
                        let region = self.region(region)?;
                        self.copy(Job::Gather { op, region, place, slot, narrow, descriptor });
                    }
                    (None, SlotPlace::Device(..)) => return Err(OpError::Region),
                }
            }
            Action::Compare { op, region, place, after_event, raw_bytes } => {
                match on(&self.gpus, region, place, after_event) {
                    Some(at) => self.gpus.compare(op, at, raw_bytes)?,
                    None => {
                        let region = self.region(region)?;
                        self.copy(Job::Compare { op, region, place });
                    }
                }
            }
            Action::Scatter {
                op,
                from,
                through,
                verified,
                namespace,
                key,
                raw_sum,
                raw_bytes,
                narrow,
                region,
                place,
                after_event,
            } => {
                let expect = Expect { namespace, key, raw_sum, raw_bytes, narrow, verified };
                match (on(&self.gpus, region, place, after_event), from) {
                    (Some(to), from) => self.gpus.scatter(op, from, through, &expect, to)?,
                    (None, SlotPlace::Host(slot)) => {
                        let region = self.region(region)?;
                        self.copy(Job::Scatter { op, slot, expect, region, place });
                    }
                    (None, SlotPlace::Device(..)) => return Err(OpError::Region),
                }
            }
            Action::Demote { op, gpu, from, to, descriptor } => {
                self.gpus.demote(op, gpu, from, to, descriptor)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn region(&self, region: RegionId) -> Result<Arc<Region>, OpError> {
        let found = self.regions.get(&region).ok_or(OpError::Region)?;
        Ok(Arc::clone(&found.1))
    }

    fn take_encoded(&self, op: OpId) -> Option<AlignedBuf> {
        self.shared.encoded.lock().unwrap_or_else(PoisonError::into_inner).remove(&op)
    }

    fn copy(&mut self, job: Job) {
        if let Err(job) = self.pool.send(job) {
            tracing::error!("the copy queue is full beyond its computed limit");
            self.refused.extend(job.failed(OpError::Device));
        }
    }

    fn send_to_device(&mut self, action: Action) {
        let failed = failure_of(&action);
        if let Action::VoidSegment { segment } = action {
            let header = Box::new([0; PAGE_BYTES as usize]);
            self.backlog.push_back(NvmeJob::Open { segment, sequence: 0, header });
            self.backlog.push_back(NvmeJob::Seal { segment });
            return self.flush_backlog();
        }
        let job = match self.device_job(action) {
            Ok(job) => job,
            Err(()) => return self.refused.extend(failed),
        };
        self.backlog.push_back(job);
        self.flush_backlog();
    }

    /// Hands the device what its queue takes, in order.
    fn flush_backlog(&mut self) {
        let Some(device) = &self.device else {
            return;
        };
        while let Some(job) = self.backlog.pop_front() {
            if let Err(job) = device.worker.try_send(job) {
                self.backlog.push_front(job);
                return;
            }
        }
    }

    fn device_job(&mut self, action: Action) -> Result<NvmeJob, ()> {
        let device = self.device.as_ref().ok_or(())?;
        Ok(match action {
            Action::Read { op, slot, descriptor, element, urgent } => {
                let (segment, offset) = (descriptor.segment, descriptor.offset);
                let stored_bytes = descriptor.stored_bytes;
                let buffer = if descriptor.stored_bytes == descriptor.raw_bytes {
                    let slot = self.shared.arena.write(slot, stored_bytes).map_err(drop)?;
                    ReadBuffer::Slot(slot)
                } else {
                    let pages = crate::block::page_ceil(u64::from(stored_bytes));
                    ReadBuffer::Pages(AlignedBuf::zeroed(usize::try_from(pages).map_err(drop)?))
                };
                let context = ReadContext { slot, descriptor, element };
                let mut reads = device.reads.lock().unwrap_or_else(PoisonError::into_inner);
                reads.insert(op.0, context);
                NvmeJob::Read { op: op.0, segment, offset, stored_bytes, buffer, urgent }
            }
            Action::Write { op, slot, index, descriptor } => {
                let buffer = match slot {
                    Some(slot) => {
                        let bytes = descriptor.stored_bytes;
                        WriteBuffer::Slot(self.shared.arena.read(slot, bytes).map_err(drop)?)
                    }
                    None => WriteBuffer::Pages(self.take_encoded(op).ok_or(())?),
                };
                let (segment, sequence) = (descriptor.segment, descriptor.segment_sequence);
                let descriptor = *descriptor;
                NvmeJob::Write { op: op.0, segment, sequence, index, descriptor, buffer }
            }
            Action::OpenSegment { segment, sequence } => {
                let header = header_page(&device.geometry, device.salt, segment, sequence);
                NvmeJob::Open { segment, sequence, header }
            }
            Action::SealSegment { segment } => NvmeJob::Seal { segment },
            Action::Sync { op } => NvmeJob::Sync { op: op.0 },
            Action::EraseDescriptor { segment, sequence, index } => {
                NvmeJob::Erase { segment, sequence, index }
            }
            _ => return Err(()),
        })
    }
}

/// The completion of a device action that cannot be carried out.
fn failure_of(action: &Action) -> Option<Event> {
    let error = OpError::Device;
    match action {
        Action::Read { op, .. } => Some(Event::Read { op: *op, result: Err(error) }),
        Action::Write { op, .. } => Some(Event::Written { op: *op, result: Err(error) }),
        Action::OpenSegment { segment, .. } => {
            Some(Event::SegmentOpened { segment: *segment, result: Err(error) })
        }
        Action::Sync { op } => Some(Event::Synced { op: *op, result: Err(error) }),
        Action::SealSegment { segment } => Some(Event::CommitFailed { segment: *segment, error }),
        Action::EraseDescriptor { segment, sequence, index } => Some(Event::Erased {
            segment: *segment,
            sequence: *sequence,
            index: *index,
            result: Err(error),
        }),
        _ => None,
    }
}
