//! The segments of the nvme tier: which is open, what is live in each, which to reclaim.
//!
//! Segments are written in logs. Most blocks go to the first one. A tenant that replaces its own
//! blocks, because it is at its hard quota, leaves dead bytes behind with every write: in a common
//! log they would drive out what others wrote, so it gets a log of its own, which is never longer
//! than the quota and is the first to be reclaimed when it is.
//!
//! Invariants: a segment is written only while open, from its start to its end; `live_bytes` is the
//! sum over the blocks listed; a segment becomes clean only when no block, read or write names it;
//! a log has one open segment at most.

use std::collections::VecDeque;

use super::event::NvmeShape;
use super::table::NIL;
use crate::block::page_ceil;
use crate::segment::StoreGeometry;

/// What a segment is good for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SegmentState {
    Clean,
    Open,
    Sealed,
    Reclaiming,
    Quarantined,
}

/// One segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) state: SegmentState,
    pub(crate) sequence: u64,
    /// The log that it is part of, unless it is clean.
    log: usize,
    /// The block of each descriptor, or `NIL`.
    pub(crate) blocks: Vec<u32>,
    /// Where the next payload goes.
    fill: u32,
    pub(crate) live_bytes: u64,
    /// Part of `live_bytes` that no lookup can reach.
    pub(crate) orphan_bytes: u64,
    pub(crate) readers: u32,
    pub(crate) writers: u32,
    /// Blocks in it that are leased or pinned.
    pub(crate) pinned: u32,
    /// Blocks in it that are in host RAM too, and the bytes of their slots.
    pub(crate) in_host: u32,
    pub(crate) in_host_bytes: u64,
    pub(crate) read_failures: u32,
    pub(crate) write_failed: bool,
    /// What its room promised when that was last looked at. Infinite before.
    pub(crate) promise: f32,
}

/// A place for a payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    pub(crate) segment: u32,
    pub(crate) sequence: u64,
    pub(crate) index: u32,
    pub(crate) offset: u32,
}

/// What had to happen to make space.
#[derive(Default, Debug)]
pub(crate) struct Rolled {
    pub(crate) sealed: Option<u32>,
    pub(crate) opened: Option<(u32, u64)>,
}

/// A log.
#[derive(Clone, Copy)]
struct Log {
    open: Option<u32>,
    /// Segments in it.
    segments: u32,
    /// Above this its own segments are reclaimed first.
    segments_max: u32,
}

/// Logs beside the first one, in a store of so many segments. Each of them may keep a segment open
/// that is nearly empty, so they are few; tenants share them where there are more.
pub(crate) fn own_logs(segments: u32) -> u32 {
    (segments / OWN_LOG_SEGMENTS).min(OWN_LOGS_MAX)
}

/// Segments of a store for each log of its own.
const OWN_LOG_SEGMENTS: u32 = 8;

/// Most logs beside the first one.
const OWN_LOGS_MAX: u32 = 16;

/// All segments.
pub(crate) struct Segments {
    geometry: StoreGeometry,
    segments: Vec<Segment>,
    clean: VecDeque<u32>,
    logs: Vec<Log>,
    next_sequence: u64,
    clean_target: usize,
    /// Sum over all segments.
    live_bytes: u64,
    quarantined: u64,
    /// Space was asked for in this run.
    written: bool,
    pub(crate) reclaiming: Vec<u32>,
    /// The segment that was looked at last in turn.
    turn: usize,
}

impl Segments {
    pub(crate) fn new(shape: &NvmeShape) -> Segments {
        let empty = Segment {
            state: SegmentState::Clean,
            sequence: 0,
            log: 0,
            blocks: Vec::new(),
            fill: shape.geometry.payload_start(),
            live_bytes: 0,
            orphan_bytes: 0,
            readers: 0,
            writers: 0,
            pinned: 0,
            in_host: 0,
            in_host_bytes: 0,
            read_failures: 0,
            write_failed: false,
            promise: f32::INFINITY,
        };
        let count = shape.geometry.segments;
        let log = Log { open: None, segments: 0, segments_max: u32::MAX };
        let target = shape.clean_segments.min(count / 8).max(1);
        let mut segments = Segments {
            geometry: shape.geometry,
            segments: vec![empty; count as usize],
            clean: VecDeque::new(),
            logs: vec![log; 1 + own_logs(count) as usize],
            next_sequence: (u64::from(shape.epoch) << 32) | 1,
            clean_target: target as usize,
            live_bytes: 0,
            quarantined: 0,
            written: false,
            reclaiming: Vec::new(),
            turn: 0,
        };
        for bad in &shape.quarantined {
            if let Some(segment) = segments.segments.get_mut(*bad as usize) {
                segments.quarantined += u64::from(segment.state != SegmentState::Quarantined);
                segment.state = SegmentState::Quarantined;
            }
        }
        segments.refill_clean();
        segments
    }

    fn refill_clean(&mut self) {
        let clean = |(_, segment): &(u32, &Segment)| segment.state == SegmentState::Clean;
        self.clean = (0..).zip(&self.segments).filter(clean).map(|(at, _)| at).collect();
    }

    pub(crate) fn get(&self, segment: u32) -> &Segment {
        self.segments.get(segment as usize).expect("segment numbers come from this table")
    }

    pub(crate) fn get_mut(&mut self, segment: u32) -> &mut Segment {
        self.segments.get_mut(segment as usize).expect("segment numbers come from this table")
    }

    pub(crate) fn count(&self) -> u32 {
        self.segments.len() as u32
    }

    /// Bytes of payload that all usable segments hold.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        let usable = self.segments.len() as u64 - self.quarantined;
        usable * u64::from(self.geometry.payload_bytes())
    }

    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Takes over a segment found at recovery, with so many places for descriptors in use.
    pub(crate) fn recover(&mut self, segment: u32, sequence: u64, places: u32) {
        if self.get(segment).state == SegmentState::Clean {
            self.join(segment, 0);
            let found = self.get_mut(segment);
            found.state = SegmentState::Sealed;
            found.sequence = sequence;
            found.blocks.reserve_exact(places as usize);
        }
        self.clean.retain(|clean| *clean != segment);
    }

    /// Lists a block at its descriptor's index.
    pub(crate) fn list(&mut self, segment: u32, index: u32, block: u32, stored_bytes: u32) {
        let bytes = page_ceil(u64::from(stored_bytes));
        self.live_bytes += bytes;
        let segment = self.get_mut(segment);
        let at = index as usize;
        if segment.blocks.len() <= at {
            segment.blocks.resize(at + 1, NIL);
        }
        if let Some(entry) = segment.blocks.get_mut(at) {
            *entry = block;
        }
        segment.live_bytes += bytes;
    }

    /// Takes a block off the list.
    pub(crate) fn unlist(&mut self, segment: u32, index: u32, stored_bytes: u32) {
        let bytes = page_ceil(u64::from(stored_bytes));
        self.live_bytes -= bytes;
        let segment = self.get_mut(segment);
        if let Some(entry) = segment.blocks.get_mut(index as usize) {
            *entry = NIL;
        }
        segment.live_bytes -= bytes;
    }

    /// The segment is part of this log from now on.
    fn join(&mut self, segment: u32, log: usize) {
        self.get_mut(segment).log = log;
        if let Some(log) = self.logs.get_mut(log) {
            log.segments += 1;
        }
    }

    /// The segment is part of no log any more.
    fn leave(&mut self, segment: u32) {
        let log = self.get(segment).log;
        if let Some(log) = self.logs.get_mut(log) {
            log.segments -= 1;
        }
    }

    fn open(&self, log: usize) -> Option<u32> {
        self.logs.get(log).and_then(|log| log.open)
    }

    fn set_open(&mut self, log: usize, segment: Option<u32>) {
        if let Some(log) = self.logs.get_mut(log) {
            log.open = segment;
        }
    }

    /// How long a log may get before its own segments are the first to be reclaimed: as many
    /// segments as hold so many bytes, the open one among them; two at least.
    pub(crate) fn limit_log(&mut self, log: usize, bytes: u64) {
        let segments = bytes.div_ceil(u64::from(self.geometry.payload_bytes()).max(1));
        if let Some(log) = self.logs.get_mut(log) {
            log.segments_max = u32::try_from(segments).unwrap_or(u32::MAX).max(2);
        }
    }

    /// Space for a payload, in the log's open segment or in a new one. `None`: no segment is clean.
    pub(crate) fn allocate(&mut self, log: usize, stored_bytes: u32) -> (Option<Space>, Rolled) {
        let bytes = page_ceil(u64::from(stored_bytes)) as u32;
        let mut rolled = Rolled::default();
        self.written = true;
        if let Some(open) = self.open(log)
            && !self.fits(open, bytes)
        {
            rolled.sealed = self.seal(open);
        }
        if self.open(log).is_none() {
            let Some(next) = self.clean.pop_front() else {
                return (None, rolled);
            };
            let sequence = self.next_sequence;
            self.next_sequence += 1;
            let fill = self.geometry.payload_start();
            let segment = self.get_mut(next);
            *segment = Segment {
                state: SegmentState::Open,
                sequence,
                fill,
                blocks: Vec::new(),
                write_failed: false,
                read_failures: 0,
                promise: f32::INFINITY,
                ..segment.clone()
            };
            self.join(next, log);
            self.set_open(log, Some(next));
            rolled.opened = Some((next, sequence));
        }
        let Some(open) = self.open(log).filter(|open| self.fits(*open, bytes)) else {
            return (None, rolled);
        };
        let segment = self.get_mut(open);
        let index = segment.blocks.len() as u32;
        let space =
            Space { segment: open, sequence: segment.sequence, index, offset: segment.fill };
        segment.fill += bytes;
        segment.blocks.push(NIL);
        (Some(space), rolled)
    }

    /// Whether [`Segments::allocate`] would find space now.
    pub(crate) fn has_space(&mut self, log: usize, stored_bytes: u32) -> bool {
        self.written = true;
        let bytes = page_ceil(u64::from(stored_bytes)) as u32;
        !self.clean.is_empty() || self.open(log).is_some_and(|open| self.fits(open, bytes))
    }

    fn fits(&self, segment: u32, bytes: u32) -> bool {
        let found = self.get(segment);
        found.fill.checked_add(bytes).is_some_and(|end| end <= self.geometry.segment_bytes)
            && (found.blocks.len() as u32) < self.geometry.descriptors_per_segment()
    }

    /// The largest payload that fits into an empty segment.
    pub(crate) fn payload_bytes_max(&self) -> u32 {
        self.geometry.payload_bytes()
    }

    /// Nothing more goes into the segment.
    pub(crate) fn seal(&mut self, segment: u32) -> Option<u32> {
        let log = self.get(segment).log;
        if self.open(log) != Some(segment) {
            return None;
        }
        self.set_open(log, None);
        let sealed = self.get_mut(segment);
        sealed.state = SegmentState::Sealed;
        sealed.blocks.shrink_to_fit();
        Some(segment)
    }

    /// Takes the segment out of use for good.
    pub(crate) fn quarantine(&mut self, segment: u32) {
        let log = self.get(segment).log;
        if self.open(log) == Some(segment) {
            self.set_open(log, None);
        }
        if !matches!(self.get(segment).state, SegmentState::Clean | SegmentState::Quarantined) {
            self.leave(segment);
        }
        self.clean.retain(|clean| *clean != segment);
        self.reclaiming.retain(|other| *other != segment);
        self.quarantined += u64::from(self.get(segment).state != SegmentState::Quarantined);
        self.get_mut(segment).state = SegmentState::Quarantined;
    }

    pub(crate) fn quarantined(&self) -> u64 {
        self.quarantined
    }

    /// Bytes of payload that are live at most: some segments are kept clean, and one is open.
    pub(crate) fn live_bytes_max(&self) -> u64 {
        let kept = (self.clean_target as u64 + 1) * u64::from(self.geometry.payload_bytes());
        self.capacity_bytes().saturating_sub(kept)
    }

    /// Whether the clean pool wants another segment.
    ///
    /// Not before the first write of a run: a restart alone must not cost what recovery found.
    pub(crate) fn wants_clean(&self) -> bool {
        self.written && self.clean.len() + self.reclaiming.len() < self.clean_target
    }

    fn sealed(&self) -> impl Iterator<Item = (u32, &Segment)> {
        let usable =
            |segment: &Segment| segment.state == SegmentState::Sealed && segment.writers == 0;
        (0u32..).zip(&self.segments).filter(move |(_, segment)| usable(segment))
    }

    /// The oldest segment of a log that is too long, if one of them gains anything.
    pub(crate) fn of_long_log(&self) -> Option<u32> {
        let too_long = |segment: &Segment| {
            self.logs.get(segment.log).is_some_and(|log| log.segments > log.segments_max)
        };
        let own = self
            .sealed()
            .filter(|(_, segment)| segment.pinned == 0 && too_long(segment) && self.gains(segment));
        own.min_by_key(|(_, segment)| segment.sequence).map(|(at, _)| at)
    }

    /// The segment with the fewest bytes that can be reached, if those are few and none is pinned.
    pub(crate) fn nearly_empty(&self, room: bool) -> Option<u32> {
        let few = self
            .sealed()
            .filter(|(at, segment)| segment.pinned == 0 && self.is_nearly_empty(*at, room));
        few.min_by_key(|(_, found)| (reachable_bytes(found), found.sequence)).map(|(at, _)| at)
    }

    /// Whether a fifth of the segment's payload or less can be reached; without `room` to write
    /// that again: nothing.
    pub(crate) fn is_nearly_empty(&self, segment: u32, room: bool) -> bool {
        let few = if room { u64::from(self.geometry.payload_bytes()) / 5 } else { 0 };
        reachable_bytes(self.get(segment)) <= few
    }

    /// Segments whose promise is to be looked at: the lowest, and some in turn.
    pub(crate) fn pick_to_look_at(&mut self, lowest: usize, in_turn: usize) -> Vec<u32> {
        let key = |(at, found): (u32, &Segment)| (found.promise, found.sequence, at);
        let old = self.sealed().filter(|(_, found)| !self.is_young(found));
        let mut all: Vec<(f32, u64, u32)> = old.map(key).collect();
        if all.len() > lowest {
            all.select_nth_unstable_by(lowest, |one, other| {
                one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))
            });
        }
        let mut chosen: Vec<u32> = all.into_iter().take(lowest).map(|(_, _, at)| at).collect();
        for _ in 0..in_turn.min(self.segments.len()) {
            self.turn = (self.turn + 1) % self.segments.len();
            let found = self.segments.get(self.turn);
            if found.is_some_and(|found| found.state == SegmentState::Sealed) {
                chosen.push(self.turn as u32);
            }
        }
        chosen
    }

    /// Whether it is among those opened last, a tenth as many as there are. What was stored last
    /// stays whole, however little it promises beside the rest.
    fn is_young(&self, segment: &Segment) -> bool {
        segment.sequence + self.segments.len() as u64 / 10 >= self.next_sequence
    }

    /// Counts on with what is looked at in turn.
    pub(crate) fn turn(&self) -> usize {
        self.turn
    }

    /// The segment that promised the least when it was last looked at; of equal ones the oldest.
    /// A young one or one with pinned blocks only where there is no other; `gains`: so for one that
    /// gains little.
    pub(crate) fn least_promising(&self, gains: bool) -> Option<u32> {
        let order = |(_, one): &(u32, &Segment), (_, other): &(u32, &Segment)| {
            let last = |found: &Segment| {
                (found.pinned > 0, self.is_young(found), gains && !self.gains(found))
            };
            let promise = one.promise.total_cmp(&other.promise);
            last(one).cmp(&last(other)).then(promise).then(one.sequence.cmp(&other.sequence))
        };
        self.sealed().min_by(order).map(|(at, _)| at)
    }

    /// What the room of a segment promises on average, as far as it was looked at.
    pub(crate) fn mean_promise(&self) -> f32 {
        let known = self.sealed().filter(|(_, found)| found.promise.is_finite());
        let (sum, count) = known.fold((0.0, 0u32), |(sum, count), (_, found)| {
            (sum + f64::from(found.promise), count + 1)
        });
        (sum / f64::from(count.max(1))) as f32
    }

    /// Whether less than half of the segment would be written again because it is in host RAM too.
    pub(crate) fn gains(&self, segment: &Segment) -> bool {
        u64::from(segment.in_host) * 2 <= u64::from(self.geometry.descriptors_per_segment())
            && segment.in_host_bytes * 2 <= u64::from(self.geometry.payload_bytes())
    }

    /// Each log has as many segments as it counts, and its open one is among them.
    #[cfg(test)]
    pub(crate) fn check_logs(&self) {
        for (at, log) in self.logs.iter().enumerate() {
            let used = |found: &&Segment| {
                !matches!(found.state, SegmentState::Clean | SegmentState::Quarantined)
            };
            let own = self.segments.iter().filter(used).filter(|found| found.log == at);
            let open = own.clone().filter(|found| found.state == SegmentState::Open).count();
            assert_eq!(own.count(), log.segments as usize, "segments of log {at}");
            assert_eq!(open, usize::from(log.open.is_some()), "open segments of log {at}");
        }
    }

    /// Starts to empty the segment.
    pub(crate) fn begin_reclaim(&mut self, victim: u32) {
        self.get_mut(victim).state = SegmentState::Reclaiming;
        self.reclaiming.push(victim);
    }

    /// Makes a segment clean when nothing names it any more. Says whether it did.
    pub(crate) fn settle(&mut self, segment: u32) -> bool {
        let found = self.get_mut(segment);
        let done = found.state == SegmentState::Reclaiming
            && found.readers == 0
            && found.writers == 0
            && found.live_bytes == 0;
        if done {
            found.state = SegmentState::Clean;
            found.blocks = Vec::new();
            self.leave(segment);
            self.reclaiming.retain(|other| *other != segment);
            self.clean.push_back(segment);
        }
        done
    }
}

/// Bytes of the segment that a lookup can reach.
fn reachable_bytes(segment: &Segment) -> u64 {
    segment.live_bytes - segment.orphan_bytes
}
