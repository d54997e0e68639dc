//! Erasing descriptors of sealed segments: read the page, zero the descriptors of that life, write
//! the page. One page at a time per segment, and a segment's next life waits for it, so that no
//! page is written over a newer one.

use std::collections::VecDeque;

use crate::block::{DESCRIPTOR_BYTES, Descriptor, Place};
use crate::segment::{DESCRIPTORS_PER_PAGE, ERASED_DESCRIPTOR};

/// Erasures of one segment that wait for the page under way.
#[derive(Default)]
pub(super) struct EraseQueue {
    waiting: VecDeque<(u64, u32)>,
}

/// Descriptors of one life on one page.
pub(super) struct EraseBatch {
    /// The life's sequence.
    pub(super) sequence: u64,
    /// Numbers of the descriptors.
    pub(super) indices: Vec<u32>,
}

impl EraseQueue {
    pub(super) fn push(&mut self, sequence: u64, index: u32) {
        self.waiting.push_back((sequence, index));
    }

    /// The oldest erasure and all others that fall on the same page of the same life.
    pub(super) fn next(&mut self) -> Option<EraseBatch> {
        let (sequence, first) = *self.waiting.front()?;
        let page = first / DESCRIPTORS_PER_PAGE;
        let mut indices = Vec::new();
        self.waiting.retain(|(other, index)| {
            let taken = *other == sequence && index / DESCRIPTORS_PER_PAGE == page;
            if taken {
                indices.push(*index);
            }
            !taken
        });
        Some(EraseBatch { sequence, indices })
    }
}

impl EraseBatch {
    /// Zeroes the batch's descriptors in their page. `false` when the page holds none of them (any
    /// more), so that it need not be written.
    pub(super) fn apply(&self, page: &mut [u8], salt: u128, segment: u32) -> bool {
        let place = Place::Segment { salt, segment, sequence: self.sequence };
        let mut changed = false;
        for index in &self.indices {
            let start = (index % DESCRIPTORS_PER_PAGE) as usize * DESCRIPTOR_BYTES;
            let found = page.get_mut(start..start + DESCRIPTOR_BYTES);
            let Some(found) = found.and_then(|bytes| <&mut [u8; _]>::try_from(bytes).ok()) else {
                continue;
            };
            if Descriptor::decode(found, place).is_ok() {
                *found = ERASED_DESCRIPTOR;
                changed = true;
            }
        }
        changed
    }
}
