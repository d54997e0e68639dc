//! Which places of a region the daemon may still copy from or to, although nobody waits for it.
//!
//! Invariants: from before a load or store is sent until it is known to have ended, its places are
//! claimed or in doubt; a claim that is dropped before that leaves them in doubt; a doubt ends only
//! when the daemon says so, or when it has closed the connection, which it does after its last
//! copy. Never is a doubt ended because time has passed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtide_tiers::catalog::TicketId;

use tokio::sync::Notify;

use crate::connection::Link;
use crate::gpu::EventMark;
use crate::region::{RegionInner, RegionRef};

/// Whether the daemon is known to have closed one connection.
#[derive(Debug, Default)]
pub(crate) struct LinkEnd {
    reached: AtomicBool,
    changed: Notify,
}

impl LinkEnd {
    pub(crate) fn is_reached(&self) -> bool {
        self.reached.load(Ordering::Acquire)
    }

    pub(crate) fn reach(&self) {
        self.reached.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }

    /// Waits for the end.
    pub(crate) async fn reached(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.is_reached() {
                return;
            }
            changed.await;
        }
    }
}

/// The places of one load or store that was sent. Dropping it leaves them in doubt.
pub(crate) struct Claim {
    region: Arc<RegionInner>,
    // Taken when the claim ends.
    doubt: Option<Box<Doubt>>,
}

impl Claim {
    pub(crate) fn new(region: &RegionRef<'_>, places: Vec<u32>, link: &Link) -> Claim {
        let (generation, end) = (link.generation, Arc::clone(&link.end));
        let after = region.after.clone();
        let doubt = Doubt { number: 0, generation, end, ticket: None, places, _after: after };
        Claim { region: Arc::clone(region.inner), doubt: Some(Box::new(doubt)) }
    }

    /// The daemon made a ticket of it.
    pub(crate) fn set_ticket(&mut self, ticket: TicketId) {
        if let Some(doubt) = &mut self.doubt {
            doubt.ticket = Some(ticket);
        }
    }

    /// The daemon said that it has ended, or that it never began.
    pub(crate) fn end(mut self) {
        self.doubt = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(doubt) = self.doubt.take() {
            self.region.leave_in_doubt(*doubt);
        }
    }
}

/// Places of one load or store that was given up.
#[derive(Debug)]
pub(crate) struct Doubt {
    number: u64,
    generation: u64,
    end: Arc<LinkEnd>,
    ticket: Option<TicketId>,
    places: Vec<u32>,
    /// Not recorded again while the daemon may wait for it.
    _after: Option<EventMark>,
}

/// All doubts of one region. A place in doubt is not sent again, so that the list is bounded by
/// the places and the calls in flight.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    last: u64,
    list: Vec<Doubt>,
}

impl Doubts {
    /// Adds a doubt, unless its connection has ended. `true` when it was added.
    pub(crate) fn add(&mut self, mut doubt: Doubt) -> bool {
        if doubt.places.is_empty() || doubt.end.is_reached() {
            return false;
        }
        self.last += 1;
        doubt.number = self.last;
        self.list.push(doubt);
        true
    }

    fn prune(&mut self) {
        self.list.retain(|doubt| !doubt.end.is_reached());
    }

    /// All places in doubt, sorted.
    pub(crate) fn places(&mut self) -> Vec<u32> {
        self.prune();
        let mut places: Vec<u32> =
            self.list.iter().flat_map(|doubt| doubt.places.iter().copied()).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The first of `places` that is in doubt.
    pub(crate) fn first_of(&mut self, places: &[u32]) -> Option<u32> {
        if self.list.is_empty() {
            return None;
        }
        let in_doubt = self.places();
        places.iter().copied().find(|place| in_doubt.binary_search(place).is_ok())
    }

    /// The newest doubt of a connection, and the tickets of all of its doubts.
    pub(crate) fn on(&mut self, generation: u64) -> Option<(u64, Vec<TicketId>)> {
        self.prune();
        let here = || self.list.iter().filter(move |doubt| doubt.generation == generation);
        let newest = here().map(|doubt| doubt.number).max()?;
        Some((newest, here().filter_map(|doubt| doubt.ticket).collect()))
    }

    /// The daemon has ended everything of this connection up to the doubt `newest`.
    pub(crate) fn settle(&mut self, generation: u64, newest: u64) {
        self.list.retain(|doubt| doubt.generation != generation || doubt.number > newest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubt(generation: u64, end: &Arc<LinkEnd>, places: &[u32]) -> Doubt {
        let (end, places) = (Arc::clone(end), places.to_vec());
        let ticket = Some(TicketId(generation));
        Doubt { number: 0, generation, end, ticket, places, _after: None }
    }

    #[test]
    fn a_place_is_in_doubt_until_all_that_touch_it_have_ended() {
        let (first, second) = (Arc::new(LinkEnd::default()), Arc::new(LinkEnd::default()));
        let mut doubts = Doubts::default();
        assert!(doubts.add(doubt(1, &first, &[1, 2])));
        assert!(doubts.add(doubt(2, &second, &[2, 3])));
        assert_eq!((doubts.places(), doubts.first_of(&[7, 2])), (vec![1, 2, 3], Some(2)));
        let (newest, tickets) = doubts.on(2).unwrap();
        assert_eq!(tickets, [TicketId(2)]);
        assert!(doubts.add(doubt(2, &second, &[4])));
        doubts.settle(2, newest);
        assert_eq!(doubts.places(), [1, 2, 4], "what came after the question stays");
        first.reach();
        assert_eq!(doubts.places(), [4]);
        assert_eq!((doubts.on(1), doubts.first_of(&[1, 2, 3])), (None, None));
    }

    #[test]
    fn a_ticket_of_a_closed_connection_leaves_no_doubt() {
        let end = Arc::new(LinkEnd::default());
        end.reach();
        let mut doubts = Doubts::default();
        assert!(!doubts.add(doubt(1, &end, &[1])));
        assert!(doubts.places().is_empty());
    }
}
