//! Bugs that tests plant to see whether the simulation finds them. In builds for tests only: what
//! asks for them is constant elsewhere.

use super::Catalog;

/// A bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Planted {
    /// Leased and pinned blocks leave host RAM like all others.
    LeasedBlockEvicted,
    /// A slot of host RAM is given back although somebody still reads it.
    SlotUsedTwice,
    /// Leases may hold one block more than the limit.
    LimitOffByOne,
}

impl Catalog {
    #[cfg(test)]
    pub(super) fn plant(&mut self, bug: Planted) {
        self.planted = Some(bug);
    }

    #[cfg(test)]
    pub(super) fn has_planted(&self, bug: Planted) -> bool {
        self.planted == Some(bug)
    }

    #[cfg(not(test))]
    pub(super) fn has_planted(&self, _bug: Planted) -> bool {
        false
    }
}
