//! What is under way: tickets, operations, and who waits for which block.
//!
//! Invariants: a ticket ends exactly once, when every one of its blocks has an outcome and none is
//! being copied; an operation is known from its action to its completion; a waiter belongs to a
//! block that is on its way into host RAM.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::arbiter::Measured;
use super::event::OpId;
use super::event::SlotPlace;
use super::request::{GpuId, LeaseId, Outcome, RegionId, SessionId, TicketId, Tier, Timestamp};
use super::table::{BlockRef, Location};

/// State of one block of a ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// Nothing touches the client's memory for it now.
    Waiting,
    /// A copy from or to the client's memory is under way.
    Active,
    /// Decided.
    Done(Outcome),
}

/// What a ticket is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TicketKind {
    Load,
    Store,
    Prefetch,
}

/// A load, store or prefetch under way.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) session: SessionId,
    pub(crate) kind: TicketKind,
    pub(crate) region: Option<RegionId>,
    pub(crate) lease: Option<LeaseId>,
    pub(crate) expires: Timestamp,
    pub(crate) blocks: Vec<Progress>,
    /// What a load is worth, where that is measured.
    pub(crate) measured: Option<Box<Measured>>,
    open: usize,
}

impl Ticket {
    pub(crate) fn new(
        session: SessionId,
        kind: TicketKind,
        blocks: usize,
        expires: Timestamp,
    ) -> Ticket {
        let waiting = vec![Progress::Waiting; blocks];
        let (region, lease, measured) = (None, None, None);
        Ticket { session, kind, region, lease, expires, blocks: waiting, measured, open: blocks }
    }

    /// Records an outcome. Says whether it is the first one for this block.
    pub(crate) fn finish(&mut self, at: usize, outcome: Outcome) -> bool {
        match self.blocks.get_mut(at) {
            None | Some(Progress::Done(_)) => false,
            Some(progress) => {
                *progress = Progress::Done(outcome);
                self.open -= 1;
                true
            }
        }
    }

    pub(crate) fn is_waiting(&self, at: usize) -> bool {
        self.blocks.get(at) == Some(&Progress::Waiting)
    }

    pub(crate) fn set_active(&mut self, at: usize) {
        if let Some(progress) = self.blocks.get_mut(at) {
            *progress = Progress::Active;
        }
    }

    pub(crate) fn set_waiting(&mut self, at: usize) {
        if let Some(progress) = self.blocks.get_mut(at) {
            *progress = Progress::Waiting;
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.open == 0
    }

    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        let done = |progress: &Progress| match progress {
            Progress::Done(outcome) => Some(*outcome),
            _ => None,
        };
        self.blocks.iter().filter_map(done).collect()
    }
}

/// One block of one ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) ticket: TicketId,
    pub(crate) at: usize,
}

/// The client's memory that a load or store is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Target {
    pub(crate) region: RegionId,
    /// The event of the region's ring that is waited for first.
    pub(crate) after_event: Option<u32>,
}

/// Who waits for a block to arrive in host RAM, and what then.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waiter {
    /// Scatter it to the region.
    Load { part: Part, target: Target, place: u32, tier: Tier },
    /// Compare the region's bytes with it.
    Store { part: Part, target: Target, place: u32 },
    /// Nothing more.
    Prefetch { part: Part },
}

impl Waiter {
    pub(crate) fn part(&self) -> Part {
        match self {
            Waiter::Load { part, .. } | Waiter::Store { part, .. } | Waiter::Prefetch { part } => {
                *part
            }
        }
    }
}

/// An operation at the edge.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// `gpu`: the one that carries it out, if it is not the copy pool that does.
    Gather {
        block: u32,
        part: Part,
        to: SlotPlace,
        gpu: Option<GpuId>,
    },
    Compare {
        block: u32,
        part: Part,
    },
    Scatter {
        block: u32,
        from: SlotPlace,
        part: Part,
        to: Scatter,
    },
    Demote {
        block: u32,
        gpu: GpuId,
    },
    Read {
        block: u32,
        segment: u32,
        retry: bool,
    },
    Encode {
        block: u32,
        bytes: u64,
    },
    Write {
        block: u32,
        location: Location,
        bytes: u64,
    },
    /// Descriptors of what was written are being committed.
    Sync,
}

/// Where a block is scattered to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scatter {
    pub(crate) target: Target,
    pub(crate) place: u32,
    /// The tier it comes from, as the client is told.
    pub(crate) tier: Tier,
    /// It is kept in the GPU's pool on its way.
    pub(crate) promotes: bool,
}

/// All that is under way.
#[derive(Default)]
pub(crate) struct Flow {
    pub(crate) tickets: BTreeMap<TicketId, Ticket>,
    pub(crate) ops: HashMap<OpId, Op>,
    /// When the operations of nvme began.
    nvme: BTreeMap<OpId, Timestamp>,
    pub(crate) gathers: usize,
    /// Blocks in GPU memory that somebody waits for in host RAM.
    pub(crate) demote_first: VecDeque<BlockRef>,
    pub(crate) waiters: HashMap<u32, Vec<Waiter>>,
    /// Blocks to read for waiting clients, then for prefetch and reclaim.
    pub(crate) urgent: VecDeque<u32>,
    pub(crate) lazy: VecDeque<u32>,
    pub(crate) reads: usize,
    pub(crate) write_bytes: u64,
    /// Blocks of all tickets that have no outcome yet.
    pub(crate) blocks_open: usize,
    next_ticket: u64,
    next_op: u64,
}

impl Flow {
    pub(crate) fn add_ticket(&mut self, ticket: Ticket) -> TicketId {
        self.next_ticket += 1;
        self.blocks_open += ticket.blocks.len();
        let id = TicketId(self.next_ticket);
        self.tickets.insert(id, ticket);
        id
    }

    pub(crate) fn start(&mut self, now: Timestamp, op: Op) -> OpId {
        self.next_op += 1;
        let id = OpId(self.next_op);
        self.start_as(now, id, op);
        id
    }

    /// Starts an operation that continues another one under the same number.
    pub(crate) fn start_as(&mut self, now: Timestamp, id: OpId, op: Op) {
        if matches!(op, Op::Read { .. } | Op::Write { .. } | Op::Sync) {
            self.nvme.insert(id, now);
        }
        self.gathers += usize::from(matches!(op, Op::Gather { .. }));
        self.ops.insert(id, op);
    }

    /// Whether a ticket still waits for the block.
    pub(crate) fn is_awaited(&self, block: u32) -> bool {
        let waiters = self.waiters.get(&block);
        waiters.into_iter().flatten().any(|waiter| self.is_waiting(waiter.part()))
    }

    fn is_waiting(&self, part: Part) -> bool {
        self.tickets.get(&part.ticket).is_some_and(|ticket| ticket.is_waiting(part.at))
    }

    /// Forgets who waited on behalf of tickets that have ended.
    pub(crate) fn purge_waiters(&mut self) {
        let mut waiters = std::mem::take(&mut self.waiters);
        waiters.retain(|_, list| {
            list.retain(|waiter| self.is_waiting(waiter.part()));
            !list.is_empty()
        });
        self.waiters = waiters;
    }

    /// Takes the operation that ended.
    pub(crate) fn end(&mut self, op: OpId) -> Option<Op> {
        let ended = self.ops.remove(&op)?;
        self.nvme.remove(&op);
        self.gathers -= usize::from(matches!(ended, Op::Gather { .. }));
        Some(ended)
    }

    /// When the oldest operation of nvme under way began.
    pub(crate) fn oldest_on_nvme(&self) -> Option<Timestamp> {
        self.nvme.values().next().copied()
    }

    /// Those who wait to load the block get it from another tier than they thought.
    pub(crate) fn will_come_from(&mut self, block: u32, source: Tier) {
        for waiter in self.waiters.get_mut(&block).into_iter().flatten() {
            if let Waiter::Load { tier, .. } = waiter {
                *tier = source;
            }
        }
    }

    /// Those who wait for the block to be in host RAM and want nothing else wait no longer.
    pub(crate) fn take_prefetches(&mut self, block: u32) -> Vec<Part> {
        let Some(waiters) = self.waiters.get_mut(&block) else {
            return Vec::new();
        };
        let prefetches = |waiter: &mut Waiter| matches!(waiter, Waiter::Prefetch { .. });
        let parts = waiters.extract_if(.., prefetches).map(|waiter| waiter.part()).collect();
        if waiters.is_empty() {
            self.waiters.remove(&block);
        }
        parts
    }

    pub(crate) fn wait(&mut self, block: u32, waiter: Waiter) {
        self.waiters.entry(block).or_default().push(waiter);
    }
}
