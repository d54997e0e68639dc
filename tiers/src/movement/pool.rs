//! The pool that copies host bytes: gather, compare, scatter, verify, encode.
//!
//! Every byte that goes to a client passes [`scatter`], which compares the slot's descriptor and
//! checksum first. Every byte that comes from nvme passes [`verify`], and those that a client waits
//! for go on from there to [`scatter`] without being hashed again. What comes from a client is
//! checksummed in our copy, never in its memory, which it may change at any time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};

use crate::block::{
    BlockKey, Codec, Descriptor, ElementType, NamespaceId, NarrowShape, Place, Sum128,
};
use crate::catalog::{CodecTrial, Event, OpError, OpId, SlotId};
use crate::codec;
use crate::io::{AlignedBuf, Arena, Region, SlotRead, SlotWrite};
use crate::movement::RetireNamespace;
use crate::narrow::{self, NarrowError};
use crate::segment::SegmentStore;
use crate::tier::nvme::ReadBuffer;

/// One job.
pub(super) enum Job {
    Gather {
        op: OpId,
        region: Arc<Region>,
        place: u32,
        slot: SlotId,
        narrow: Option<NarrowShape>,
        descriptor: Box<Descriptor>,
    },
    Compare {
        op: OpId,
        region: Arc<Region>,
        place: u32,
    },
    Scatter {
        op: OpId,
        slot: SlotId,
        expect: Expect,
        region: Arc<Region>,
        place: u32,
    },
    Verify {
        op: OpId,
        read: ReadContext,
        buffer: ReadBuffer,
    },
    Encode {
        op: OpId,
        encode: Encode,
    },
    Quarantine {
        segment: u32,
    },
    Retire {
        namespace: NamespaceId,
    },
}

/// What is to be encoded, and how.
pub(super) struct Encode {
    pub(super) slot: SlotId,
    pub(super) raw_bytes: u32,
    pub(super) codec: Codec,
    pub(super) element: ElementType,
    /// Decode the result too.
    pub(super) trial: bool,
}

/// What a slot must hold before its bytes may leave.
pub(super) struct Expect {
    pub(super) namespace: NamespaceId,
    pub(super) key: BlockKey,
    pub(super) raw_sum: Sum128,
    pub(super) raw_bytes: u32,
    /// How it was narrowed, if at all.
    pub(super) narrow: Option<NarrowShape>,
    /// Its bytes were hashed for the completion of the read that brought them, just now.
    pub(super) verified: bool,
}

/// What a read of nvme is for.
pub(super) struct ReadContext {
    pub(super) slot: SlotId,
    pub(super) descriptor: Box<Descriptor>,
    pub(super) element: ElementType,
}

/// What the pool's threads share.
pub(super) struct Shared {
    pub(super) arena: Arc<Arena>,
    /// Salt of the host descriptors.
    pub(super) salt: u64,
    /// Encoded payloads that wait for their write.
    pub(super) encoded: Mutex<HashMap<OpId, AlignedBuf>>,
    /// The store's superblocks.
    pub(super) store: Mutex<Option<SegmentStore>>,
    /// Voids a namespace on the device.
    pub(super) retire: Option<RetireNamespace>,
}

/// The pool.
pub(super) struct Pool {
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts the threads. `done` is called on them.
    pub(super) fn start(
        threads: usize,
        jobs_max: usize,
        shared: &Arc<Shared>,
        done: impl Fn(Event) + Clone + Send + 'static,
    ) -> std::io::Result<Pool> {
        let (jobs, source) = bounded(jobs_max);
        let mut pool = Pool { jobs: Some(jobs), threads: Vec::new() };
        for number in 0..threads.max(1) {
            let (source, shared, done) = (source.clone(), Arc::clone(shared), done.clone());
            let work = move || run(&source, &shared, &done);
            let name = format!("kvtide-copy-{number}");
            pool.threads.push(std::thread::Builder::new().name(name).spawn(work)?);
        }
        Ok(pool)
    }

    pub(super) fn sender(&self) -> PoolSender {
        PoolSender(self.jobs.clone())
    }

    /// Ends the threads once what was sent is done. All senders must be gone.
    pub(super) fn stop(mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a copy thread panicked");
            }
        }
    }
}

/// Where jobs go in.
#[derive(Clone)]
pub(super) struct PoolSender(pub(super) Option<Sender<Job>>);

impl PoolSender {
    /// Takes a job, or gives it back when the queue is full or the pool is gone.
    pub(super) fn send(&self, job: Job) -> Result<(), Box<Job>> {
        let Some(jobs) = &self.0 else {
            return Err(Box::new(job));
        };
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) | TrySendError::Disconnected(job) => Box::new(job),
        })
    }
}

impl Job {
    /// The completion of a job that cannot be done.
    pub(super) fn failed(&self, error: OpError) -> Option<Event> {
        Some(match self {
            Job::Gather { op, .. } => Event::Gathered { op: *op, result: Err(error) },
            Job::Compare { op, .. } => Event::Compared { op: *op, result: Err(error) },
            Job::Scatter { op, .. } => Event::Scattered { op: *op, result: Err(error) },
            Job::Verify { op, .. } => Event::Read { op: *op, result: Err(error) },
            Job::Encode { op, .. } => Event::Encoded { op: *op, result: None, trial: None },
            Job::Quarantine { .. } => return None,
            Job::Retire { namespace } => {
                Event::NamespaceRetired { namespace: *namespace, generation: None }
            }
        })
    }
}

fn run(source: &Receiver<Job>, shared: &Shared, done: &impl Fn(Event)) {
    let mut wide = Vec::new();
    for job in source {
        let failed = job.failed(OpError::Device);
        // A panic on one block must not take the pool, or the operation, with it.
        let result =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(job, shared, &mut wide)));
        match result {
            Ok(event) => event.into_iter().for_each(done),
            Err(_) => failed.into_iter().for_each(done),
        }
    }
}

/// `wide` is memory for a block that is narrowed or widened.
pub(super) fn work(job: Job, shared: &Shared, wide: &mut Vec<u8>) -> Option<Event> {
    Some(match job {
        Job::Gather { op, region, place, slot, narrow, descriptor } => {
            let result = match narrow {
                None => gather(shared, &region, place, slot, *descriptor),
                Some(shape) => narrowed(shared, &region, place, slot, &shape, *descriptor, wide),
            };
            Event::Gathered { op, result }
        }
        Job::Compare { op, region, place } => {
            Event::Compared { op, result: region.hash(place).map_err(|_| OpError::Region) }
        }
        Job::Scatter { op, slot, expect, region, place } => {
            Event::Scattered { op, result: scatter(shared, slot, &expect, &region, place, wide) }
        }
        Job::Verify { op, read, buffer } => {
            Event::Read { op, result: verify(shared, &read, buffer) }
        }
        Job::Encode { op, encode } => {
            let (result, trial) = run_encode(shared, op, &encode).unwrap_or_default();
            Event::Encoded { op, result, trial }
        }
        Job::Quarantine { segment } => {
            quarantine(shared, segment);
            return None;
        }
        Job::Retire { namespace } => {
            let generation = shared.retire.as_ref().and_then(|retire| (retire.0)(namespace));
            if generation.is_none() {
                tracing::error!(
                    namespace = namespace.0,
                    "a block that was forgotten could not be erased from nvme, and its namespace \
                     could not be retired: forget the namespace, or the block may come back"
                );
            }
            Event::NamespaceRetired { namespace, generation }
        }
    })
}

fn gather(
    shared: &Shared,
    region: &Region,
    place: u32,
    slot: SlotId,
    descriptor: Descriptor,
) -> Result<Sum128, OpError> {
    let mut bytes = shared.writer(slot, descriptor.raw_bytes)?;
    let sum = region.gather(place, &mut bytes).map_err(|_| OpError::Region)?;
    seal(shared, slot, Descriptor { raw_sum: sum, stored_sum: sum, ..descriptor })?;
    Ok(sum)
}

/// As [`gather`], but what is kept, and hashed, is the block's narrow form.
fn narrowed(
    shared: &Shared,
    region: &Region,
    place: u32,
    slot: SlotId,
    shape: &NarrowShape,
    descriptor: Descriptor,
    wide: &mut Vec<u8>,
) -> Result<Sum128, OpError> {
    wide.resize(shape.raw_bytes() as usize, 0);
    region.gather(place, wide).map_err(|_| OpError::Region)?;
    let mut kept = shared.writer(slot, descriptor.raw_bytes)?;
    narrow::narrow(shape, wide, &mut kept).map_err(|error| match error {
        NarrowError::NotFinite => OpError::NotFinite,
        _ => bug("narrow form", &error),
    })?;
    let sum = Sum128::of(&kept);
    seal(shared, slot, Descriptor { raw_sum: sum, stored_sum: sum, ..descriptor })?;
    Ok(sum)
}

/// Writes the descriptor of a slot whose bytes are in place: whatever fills a slot of host RAM, a
/// client, a read of nvme or a GPU, ends here. A block that was disowned meanwhile stays so.
pub(super) fn seal(shared: &Shared, slot: SlotId, descriptor: Descriptor) -> Result<(), OpError> {
    let descriptor = Descriptor {
        codec: Codec::Raw,
        stored_bytes: descriptor.raw_bytes,
        stored_sum: descriptor.raw_sum,
        segment: 0,
        segment_sequence: 0,
        offset: 0,
        ..descriptor
    };
    let place = Place::Host { salt: shared.salt, slot: slot.0 };
    let sealed = shared.arena.seal(slot, &descriptor.encode(place));
    sealed.map_err(|error| bug("descriptor table", &error))
}

fn scatter(
    shared: &Shared,
    slot: SlotId,
    expect: &Expect,
    region: &Region,
    place: u32,
    wide: &mut Vec<u8>,
) -> Result<(), OpError> {
    check_slot(shared, slot, expect)?;
    let bytes = shared.reader(slot, expect.raw_bytes)?;
    if !expect.verified && Sum128::of(&bytes) != expect.raw_sum {
        return Err(OpError::Checksum);
    }
    match &expect.narrow {
        None => region.scatter(place, &bytes).map_err(|_| OpError::Region),
        Some(shape) => {
            wide.resize(shape.raw_bytes() as usize, 0);
            narrow::widen(shape, &bytes, wide).map_err(|error| bug("narrow form", &error))?;
            region.scatter(place, wide).map_err(|_| OpError::Region)
        }
    }
}

/// Whether the slot's descriptor is that of the block that is expected there. The block may have
/// been disowned since the operation was ordered: the slot is kept for it all the same.
pub(super) fn check_slot(shared: &Shared, slot: SlotId, expect: &Expect) -> Result<(), OpError> {
    let found = shared.arena.descriptor(slot).ok_or(OpError::Checksum)?;
    let here = Place::Host { salt: shared.salt, slot: slot.0 };
    let descriptor = Descriptor::decode_in_use(&found, here).map_err(|_| OpError::Checksum)?;
    let same = descriptor.namespace == expect.namespace
        && descriptor.key == expect.key
        && descriptor.narrow == expect.narrow.map(|shape| shape.form.narrow)
        && descriptor.raw_bytes == expect.raw_bytes
        && descriptor.stored_bytes == expect.raw_bytes
        && descriptor.stored_sum == expect.raw_sum;
    if same { Ok(()) } else { Err(OpError::Checksum) }
}

/// Checks what was read from nvme and makes the slot ready: decoded, with its descriptor.
fn verify(shared: &Shared, read: &ReadContext, buffer: ReadBuffer) -> Result<(), OpError> {
    let descriptor = &read.descriptor;
    let stored = buffer
        .bytes()
        .get(..descriptor.stored_bytes as usize)
        .filter(|stored| Sum128::of(stored) == descriptor.stored_sum)
        .ok_or(OpError::Checksum)?;
    match descriptor.codec {
        Codec::Raw => {
            if descriptor.stored_bytes != descriptor.raw_bytes
                || descriptor.stored_sum != descriptor.raw_sum
            {
                return Err(OpError::Checksum);
            }
        }
        codec @ Codec::Lz4 => {
            let mut raw = shared.writer(read.slot, descriptor.raw_bytes)?;
            codec::decode(codec, read.element, stored, &mut raw).map_err(|_| OpError::Checksum)?;
            if Sum128::of(&raw) != descriptor.raw_sum {
                return Err(OpError::Checksum);
            }
        }
    }
    drop(buffer);
    seal(shared, read.slot, (**descriptor).clone())
}

/// The stored bytes and their checksum, if the block shrinks enough, and what a trial came to.
type Encoded = (Option<(u32, Sum128)>, Option<CodecTrial>);

fn run_encode(shared: &Shared, op: OpId, what: &Encode) -> Option<Encoded> {
    let Encode { slot, raw_bytes, codec, element, trial } = *what;
    let raw = shared.reader(slot, raw_bytes).ok()?;
    let Some(stored) = codec::encode(codec, element, &raw) else {
        let none = CodecTrial { raw_bytes, stored_bytes: raw_bytes, decode_us: 0 };
        return Some((None, trial.then_some(none)));
    };
    let stored_bytes = u32::try_from(stored.len()).ok()?;
    let trial = if trial {
        let mut again = vec![0; raw.len()];
        let started = Instant::now();
        codec::decode(codec, element, &stored, &mut again).ok()?;
        let decode_us = u64::try_from(started.elapsed().as_micros()).ok()?;
        Some(CodecTrial { raw_bytes, stored_bytes, decode_us })
    } else {
        None
    };
    let sum = Sum128::of(&stored);
    let mut encoded = shared.encoded.lock().unwrap_or_else(PoisonError::into_inner);
    encoded.insert(op, AlignedBuf::of(&stored));
    Some((Some((stored_bytes, sum)), trial))
}

fn quarantine(shared: &Shared, segment: u32) {
    let mut store = shared.store.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(store) = store.as_mut() {
        let mut all = store.superblock().quarantined.clone();
        all.push(segment);
        match store.set_quarantined(&all) {
            Ok(()) => tracing::warn!(segment, "three reads failed: the segment is out of use"),
            Err(error) => tracing::error!(segment, %error, "cannot note a failed segment"),
        }
    }
}

impl Shared {
    /// A slot, to be filled.
    pub(super) fn writer(&self, slot: SlotId, bytes: u32) -> Result<SlotWrite, OpError> {
        self.arena.write(slot, bytes).map_err(|error| bug("arena", &error))
    }

    /// A slot, to be read.
    pub(super) fn reader(&self, slot: SlotId, bytes: u32) -> Result<SlotRead, OpError> {
        self.arena.read(slot, bytes).map_err(|error| bug("arena", &error))
    }
}

/// The arena refuses what the catalog ordered. That is a bug; the block is not handed out.
fn bug(what: &'static str, error: &dyn std::error::Error) -> OpError {
    tracing::error!(what, %error, "a slot is not as the catalog thinks; please report this");
    OpError::Device
}
