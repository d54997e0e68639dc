//! Host RAM and the pools of the GPUs hold different blocks, so that both together hold more.
//!
//! What is on nvme and in a pool needs no slot of host RAM: such slots are given up first. When the
//! block leaves the pool it is copied down again. What is in host RAM and not on nvme keeps its
//! copy there. What is in a pool only, because host RAM is full, goes with the GPU or the daemon.

use super::Catalog;
use super::slot_tier::{Home, Leave};
use super::slots::ClassId;
use super::table::{DeviceCopy, HostCopy, NvmeCopy};

/// Copies from one pool to host RAM under way at most for blocks that leave the pool. Their slots
/// are free only when that is done.
const LEAVING_MAX: usize = 32;

/// Blocks listed as doubled that one search for a slot looks at.
const LOOKS_MAX: usize = 64;

impl Catalog {
    /// Whether the block is in a GPU's pool, in host RAM and on nvme.
    fn is_doubled(&self, index: u32) -> bool {
        self.table.live(index).is_some_and(|block| {
            matches!(block.host, HostCopy::Resident { .. })
                && matches!(block.device, DeviceCopy::Resident { .. })
                && matches!(block.nvme, NvmeCopy::Resident(_))
        })
    }

    /// The block has a copy more.
    pub(super) fn note_doubled(&mut self, index: u32) {
        if self.is_doubled(index) && !self.host.doubled.contains(index) {
            self.host.doubled.push_front(index);
        }
    }

    /// A block whose slot of host RAM is not needed as long as it is in a pool.
    pub(super) fn doubled_victim(&mut self, home: Home, class: ClassId) -> Option<u32> {
        if home != Home::Host {
            return None;
        }
        for _ in 0..LOOKS_MAX.min(self.host.doubled.len()) {
            let index = self.host.doubled.back()?;
            if !self.is_doubled(index) {
                self.host.doubled.remove(index);
                continue;
            }
            let bytes = self.table.get(index).raw_bytes;
            let fits = self.host.tier.class_of(bytes) == Some(class);
            if fits && self.leaves(Home::Host, index) == Leave::Yes {
                return Some(index);
            }
            self.host.doubled.move_front(index);
        }
        None
    }

    /// Whether a block that is to leave a pool for another one has to be in host RAM first. If it
    /// can be, the copy is under way now, and the pool's slot is free when that is done.
    pub(super) fn must_go_down(&mut self, home: Home, index: u32) -> GoesDown {
        let block = self.table.get(index);
        let below = block.host != HostCopy::Absent || !matches!(block.nvme, NvmeCopy::Resident(_));
        let needs = !below && self.drain.is_none();
        let Some(found) = home.gpu().filter(|_| needs).and_then(|gpu| self.device_mut(gpu)) else {
            return GoesDown::NeedNot;
        };
        // A search that finds nothing is long, and is not repeated at once.
        if found.demotes >= LEAVING_MAX || self.host.no_slot == Some(self.now) {
            return GoesDown::Cannot;
        }
        let Some(to) = self.take_slot(Home::Host, index) else {
            return GoesDown::Cannot;
        };
        self.start_demote(index, to);
        self.drop_device(index);
        GoesDown::Begun
    }
}

/// What becomes of a block that is to leave a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GoesDown {
    /// Its copy there is of no more use.
    NeedNot,
    /// It is on its way down.
    Begun,
    /// Too many are, or host RAM has no slot.
    Cannot,
}
