//! Taking no more stores, and writing down what is only in memory, hottest first, within a
//! deadline.
//!
//! Invariants: no write is begun that is not expected to end before the deadline, as fast as the
//! drive was so far; the answer is given once all that was begun has ended and its descriptors are
//! on the device, so that what it says a restart finds is found.

use super::Catalog;
use super::copies::slot_bytes;
use super::event::{Action, OpError, OpId};
use super::flow::Op;
use super::request::{AskId, Drained, Reply, Timestamp};
use super::slot_tier::use_of;
use super::table::{Block, DeviceCopy, HostCopy, NvmeCopy};

/// Bytes of writes under way before the first one has ended, when nobody knows how fast the drive
/// is.
const FIRST_BYTES: u64 = 2 << 20;

/// A drain under way or done.
pub(super) struct Drain {
    asks: Vec<AskId>,
    since: Timestamp,
    until: Option<Timestamp>,
    blocks_before: u64,
    bytes_before: u64,
    /// Blocks and bytes that had been written to nvme when it began.
    written_before: (u64, u64),
    commit: Commit,
}

/// Whether the descriptors of what was written are on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Commit {
    Needed,
    UnderWay,
    Done,
}

/// Whether the block has a copy in memory and none on nvme.
fn is_only_in_memory(block: &Block) -> bool {
    let above = matches!(block.host, HostCopy::Resident { .. })
        || matches!(block.device, DeviceCopy::Resident { .. });
    above && !matches!(block.nvme, NvmeCopy::Resident(_))
}

impl Catalog {
    /// Somebody wants all to be written down, within a time or however long it takes.
    pub(super) fn begin_drain(&mut self, ask: AskId, deadline_ms: Option<u64>) {
        if let Some(drain) = self.drain.as_mut().filter(|drain| !drain.asks.is_empty()) {
            // It is one drain, with the earlier deadline.
            let until = deadline_ms.map(|ms| self.now.plus_ms(ms));
            drain.until = [drain.until, until].into_iter().flatten().min();
            drain.asks.push(ask);
            return;
        }
        self.sort_dirty();
        let (blocks_before, bytes_before) = self.only_in_memory();
        self.drain = Some(Drain {
            asks: vec![ask],
            since: self.now,
            until: deadline_ms.map(|ms| self.now.plus_ms(ms)),
            blocks_before,
            bytes_before,
            written_before: self.written_to_nvme(),
            commit: Commit::Needed,
        });
    }

    /// Blocks that lie in memory and nowhere else, and their bytes. Walks the table.
    fn only_in_memory(&self) -> (u64, u64) {
        let live = (0..self.table.index_end()).filter_map(|index| self.table.live(index));
        live.filter(|block| is_only_in_memory(block))
            .fold((0, 0), |(blocks, bytes), block| (blocks + 1, bytes + slot_bytes(block)))
    }

    fn written_to_nvme(&self) -> (u64, u64) {
        self.nvme.as_ref().map_or((0, 0), |nvme| (nvme.blocks_written, nvme.bytes_in))
    }

    /// Puts the dirty blocks in the order of their last use, those too that were not worth a write
    /// before.
    fn sort_dirty(&mut self) {
        let mut dirty = Vec::new();
        for index in 0..self.table.index_end() {
            let host = |block: &&Block| matches!(block.host, HostCopy::Resident { .. });
            let found = self.table.live(index).filter(host);
            if let Some(block) = found.filter(|block| is_only_in_memory(block)) {
                dirty.push((block.used_tick(), index));
            }
        }
        dirty.sort_unstable();
        for (_, index) in dirty {
            self.offer_again(index);
            let how = use_of(&self.table, &self.reuse, index, false);
            self.host.dirty.touch(index, how);
        }
    }

    /// Whether a drain lets another block be written now.
    pub(super) fn drain_allows(&self, bytes: u64) -> bool {
        let Some(drain) = &self.drain else {
            return true;
        };
        let Some(until) = drain.until else {
            return true;
        };
        if self.now >= until {
            return false;
        }
        let (_, written) = self.written_to_nvme();
        let done = written - drain.written_before.1;
        let coming = self.flow.write_bytes + bytes;
        if done == 0 {
            return self.flow.write_bytes == 0 || coming <= FIRST_BYTES;
        }
        let took_us = u128::from(self.now.0 - drain.since.0).max(1);
        let takes_us = u128::from(coming) * took_us / u128::from(done);
        u128::from(self.now.0) + takes_us <= u128::from(until.0)
    }

    /// Answers a drain once nothing is left to write, or no more can be written.
    pub(super) fn answer_drain(&mut self) {
        let Some(drain) = self.drain.as_ref().filter(|drain| !drain.asks.is_empty()) else {
            return;
        };
        let commit = drain.commit;
        let until = drain.until;
        if self.nvme_usable() {
            let nothing_left = self.host.dirty.len() == 0 && !self.is_coming_down();
            let next = self.host.dirty.hottest().map(|index| slot_bytes(self.table.get(index)));
            let late = until.is_some_and(|until| self.now >= until)
                || next.is_some_and(|bytes| !self.drain_allows(bytes));
            if self.flow.write_bytes > 0 || !(nothing_left || late) {
                return;
            }
            match commit {
                Commit::Needed => return self.sync_nvme(),
                Commit::UnderWay => return,
                Commit::Done => {}
            }
        }
        let (written, written_bytes) = self.written_to_nvme();
        let (blocks_lost, bytes_lost) = self.only_in_memory();
        let on_nvme = self.nvme.as_ref().filter(|nvme| nvme.offline.is_none());
        let (blocks_on_nvme, bytes_on_nvme) =
            on_nvme.map_or((0, 0), |nvme| (nvme.blocks, nvme.segments.live_bytes()));
        let Some(drain) = &mut self.drain else {
            return;
        };
        let drained = Drained {
            blocks_before: drain.blocks_before,
            bytes_before: drain.bytes_before,
            blocks_written: written - drain.written_before.0,
            bytes_written: written_bytes - drain.written_before.1,
            blocks_lost,
            bytes_lost,
            blocks_on_nvme,
            bytes_on_nvme,
        };
        for ask in std::mem::take(&mut drain.asks) {
            self.actions.push(Action::Answer { ask, reply: Reply::Drained(drained) });
        }
    }

    fn sync_nvme(&mut self) {
        let op = self.flow.start(self.now, Op::Sync);
        self.actions.push(Action::Sync { op });
        if let Some(drain) = &mut self.drain {
            drain.commit = Commit::UnderWay;
        }
    }

    /// [`Action::Sync`] ended. What could not be made durable was reported segment by segment.
    pub(super) fn synced(&mut self, op: OpId, result: Result<(), OpError>) {
        if self.take_op(op).is_none() {
            return;
        }
        if let Err(OpError::DeviceGone) = result {
            self.take_nvme_offline(super::OfflineReason::DeviceGone);
        }
        if let Some(drain) = &mut self.drain {
            drain.commit = Commit::Done;
        }
    }
}
