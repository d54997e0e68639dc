//! Which copies come and go, for those who follow: routers that send a request to where its prefix
//! lies.
//!
//! Off unless somebody follows. Bounded: what one event does beyond the bound is left out, and said
//! to be, so that whoever follows looks at everything anew.

use super::Catalog;
use super::event::Action;
use super::request::Tier;
use crate::block::{BlockKey, NamespaceId};

/// A copy came or went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Residency {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The block.
    pub key: BlockKey,
    /// The block before it, [`BlockKey::ROOT`] where there is none or it is not known.
    pub parent: BlockKey,
    /// Its tokens.
    pub tokens: u32,
    /// Where.
    pub tier: Tier,
    /// Whether it came.
    pub there: bool,
}

/// What came and went during one event.
#[derive(Default)]
pub(crate) struct Journal {
    /// Most changes of one event that are told; 0: nobody follows.
    max: usize,
    changes: Vec<Residency>,
    cut: bool,
    /// Counts all changes, told or not.
    pub(crate) version: u64,
}

impl Catalog {
    /// From now on, [`Action::Residency`] tells of copies that come and go: of `max` of one event
    /// at most. What is there already is not told.
    pub fn follow_residency(&mut self, max: usize) {
        self.journal.max = max;
    }

    /// A copy of the block came into the tier, or leaves it.
    pub(super) fn note_copy(&mut self, index: u32, tier: Tier, there: bool) {
        self.journal.version += 1;
        if self.journal.max == 0 {
            return;
        }
        if self.journal.changes.len() >= self.journal.max {
            self.journal.cut = true;
            return;
        }
        let block = self.table.get(index);
        let parent = match block.parent {
            super::table::NIL => BlockKey::ROOT,
            parent => self.table.get(parent).key,
        };
        let (namespace, key, tokens) = (block.namespace, block.key, block.tokens);
        let change = Residency { namespace, key, parent, tokens, tier, there };
        self.journal.changes.push(change);
    }

    /// Tells of the changes of this event.
    pub(super) fn tell_residency(&mut self) {
        let whole = !std::mem::take(&mut self.journal.cut);
        if self.journal.max > 0 && (!whole || !self.journal.changes.is_empty()) {
            let changes = std::mem::take(&mut self.journal.changes);
            self.actions.push(Action::Residency { changes, whole });
        }
    }
}
