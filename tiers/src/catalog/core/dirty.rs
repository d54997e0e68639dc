//! Blocks in host RAM that are still to be written to nvme, and in which order.
//!
//! What will leave host RAM next is written first, so that it can leave. So where the host tier
//! predicts reuse, its dirty blocks stand in the same kind of queues once more.

use super::policy::{OrderList, Outlook, Policy, PolicyChoice, Pre, Use};

/// See the head of this file.
pub(crate) struct Dirty {
    used: OrderList,
    predicted: Option<Pre>,
}

impl Dirty {
    pub(crate) fn new(host_policy: PolicyChoice) -> Dirty {
        let predicted = host_policy.learns().then(Pre::default);
        Dirty { used: OrderList::default(), predicted }
    }

    pub(crate) fn len(&self) -> usize {
        self.used.len()
    }

    /// A block becomes dirty. Blocks of one path do so from the root on; they are to be written
    /// from the other end, as they leave: so it goes behind `before`, the block that precedes it.
    /// One that was used before the coldest one (`is_older`) becomes the coldest.
    pub(crate) fn push(
        &mut self,
        before: u32,
        block: u32,
        how: Use,
        is_older: impl Fn(u32) -> bool,
    ) {
        let behind = |coldest: Option<u32>| coldest.filter(|at| is_older(*at)).unwrap_or(before);
        self.used.push_behind(behind(self.used.back()), block);
        if let Some(predicted) = &mut self.predicted {
            predicted.insert_behind(behind(predicted.coldest(how.queue)), block, how);
        }
    }

    pub(crate) fn touch(&mut self, block: u32, how: Use) {
        self.used.move_front(block);
        if let Some(predicted) = &mut self.predicted {
            predicted.touch(block, how);
        }
    }

    pub(crate) fn remove(&mut self, block: u32) {
        self.used.remove(block);
        if let Some(predicted) = &mut self.predicted {
            predicted.remove(block);
        }
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.used.contains(block)
    }

    /// The block that was used last.
    pub(crate) fn hottest(&self) -> Option<u32> {
        self.used.front()
    }

    /// The block that will leave host RAM first.
    pub(crate) fn next(&mut self, outlook: &dyn Outlook) -> Option<u32> {
        match &mut self.predicted {
            Some(predicted) => predicted.victim(outlook, &mut |_| true),
            None => self.used.back(),
        }
    }
}
