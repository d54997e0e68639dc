//! One client's session: its tickets, its namespaces, and descriptors that no region uses yet.
//! Everything here is bounded, and ends with the session.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvtide_client::protocol::{TenantStats, TicketEnd};
use kvtide_tiers::block::NamespaceId;
use kvtide_tiers::catalog::{Limit, Outcome, RegionId, SessionId, TenantId, TicketId, Tier};
use tokio::sync::Notify;

use crate::config::Caller;
use crate::touches::{Touch, Touches};

/// How long a descriptor waits for its region.
const DESCRIPTOR_LIFE: Duration = Duration::from_secs(10);

/// How long an outcome is kept for its client when the session's tickets run out.
const OUTCOME_LIFE: Duration = Duration::from_secs(60);

/// Counters of one tenant since the daemon started.
#[derive(Debug, Default)]
pub struct TenantCounters {
    /// Lookups asked.
    pub lookups: AtomicU64,
    /// Keys in all lookups.
    pub lookup_keys: AtomicU64,
    /// Keys found.
    pub lookup_hits: AtomicU64,
    loaded_device: AtomicU64,
    loaded_host: AtomicU64,
    loaded_nvme: AtomicU64,
    missed: AtomicU64,
    stored: AtomicU64,
    not_stored: AtomicU64,
}

impl TenantCounters {
    fn count(&self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let counter = match outcome {
                Outcome::Loaded(Tier::Device) => &self.loaded_device,
                Outcome::Loaded(Tier::Host) => &self.loaded_host,
                Outcome::Loaded(Tier::Nvme) => &self.loaded_nvme,
                Outcome::Missed(_) => &self.missed,
                Outcome::Stored | Outcome::Present => &self.stored,
                Outcome::Busy | Outcome::Rejected(_) => &self.not_stored,
                _ => continue,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The counters as they travel.
    pub fn stats(&self, tenant: &str, sessions: u64) -> TenantStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TenantStats {
            tenant: tenant.to_owned(),
            sessions,
            lookups: read(&self.lookups),
            lookup_keys: read(&self.lookup_keys),
            lookup_hits: read(&self.lookup_hits),
            loaded_device: read(&self.loaded_device),
            loaded_host: read(&self.loaded_host),
            loaded_nvme: read(&self.loaded_nvme),
            missed: read(&self.missed),
            stored: read(&self.stored),
            not_stored: read(&self.not_stored),
        }
    }
}

/// One session.
pub struct Session {
    /// The number that the catalog and attach connections know it by.
    pub id: SessionId,
    /// What an attach connection has to show.
    pub token: [u8; 16],
    /// Who is behind it.
    pub caller: Caller,
    /// What the client calls itself.
    pub name: String,
    /// Its tickets.
    pub tickets: Arc<Tickets>,
    /// Counters of its tenant.
    pub counters: Arc<TenantCounters>,
    /// What may still copy from or to its regions.
    pub touches: Arc<Touches>,
    namespaces: Mutex<HashSet<NamespaceId>>,
    descriptors: Mutex<Descriptors>,
    regions: Mutex<Regions>,
    region_gone: Notify,
}

#[derive(Default)]
struct Regions {
    used: u64,
    known: HashMap<RegionId, KnownRegion>,
    importing: usize,
}

/// A registration of GPU memory under way, until it is dropped.
pub struct Importing(Arc<Session>);

impl Drop for Importing {
    fn drop(&mut self) {
        let mut regions = lock(&self.0.regions);
        regions.importing = regions.importing.saturating_sub(1);
        drop(regions);
        self.0.region_gone.notify_waiters();
    }
}

struct KnownRegion {
    bytes: u64,
    memory: RegionKind,
    closing: bool,
}

/// What a region is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionKind {
    /// Shared host memory.
    Host,
    /// GPU memory with a ring of so many events.
    Gpu {
        /// Events of the ring; 0 when the engine synchronizes.
        events: usize,
    },
}

/// Room for the bytes of one region; given back when it is dropped and not kept.
pub struct RegionRoom {
    session: Arc<Session>,
    bytes: u64,
}

impl RegionRoom {
    /// The region is registered.
    pub fn keep(mut self, region: RegionId, memory: RegionKind) {
        let bytes = std::mem::take(&mut self.bytes);
        let known = KnownRegion { bytes, memory, closing: false };
        lock(&self.session.regions).known.insert(region, known);
    }
}

impl Drop for RegionRoom {
    fn drop(&mut self) {
        let mut regions = lock(&self.session.regions);
        regions.used = regions.used.saturating_sub(self.bytes);
    }
}

impl Session {
    /// A session around the tickets that the node already knows.
    pub fn new(
        id: SessionId,
        token: [u8; 16],
        caller: Caller,
        name: String,
        tickets: Arc<Tickets>,
        counters: Arc<TenantCounters>,
    ) -> Session {
        Session {
            id,
            token,
            caller,
            name,
            tickets,
            counters,
            touches: Arc::default(),
            namespaces: Mutex::default(),
            descriptors: Mutex::default(),
            regions: Mutex::default(),
            region_gone: Notify::new(),
        }
    }

    /// The tenant's number, unless the caller is an operator who belongs to none.
    pub fn tenant(&self) -> Option<TenantId> {
        self.caller.tenant.as_ref().map(|tenant| tenant.id)
    }

    /// Whether the session may open one more namespace; one that it has open it may always.
    ///
    /// # Errors
    /// `max` are open already.
    pub fn check_room(&self, namespace: Option<NamespaceId>, max: u32) -> Result<(), u32> {
        let open = lock(&self.namespaces);
        let known = namespace.is_some_and(|namespace| open.contains(&namespace));
        if !known && open.len() >= usize::try_from(max).unwrap_or(usize::MAX) {
            return Err(max);
        }
        Ok(())
    }

    /// Notes that the session opened a namespace.
    pub fn open(&self, namespace: NamespaceId) {
        lock(&self.namespaces).insert(namespace);
    }

    /// Whether the session opened the namespace.
    pub fn has_open(&self, namespace: NamespaceId) -> bool {
        lock(&self.namespaces).contains(&namespace)
    }

    /// Makes room for a region.
    ///
    /// # Errors
    /// All regions together would be larger than `max` bytes; the text says so.
    pub fn region_room(self: &Arc<Self>, bytes: u64, max: u64) -> Result<RegionRoom, String> {
        let mut regions = lock(&self.regions);
        let used = regions.used.saturating_add(bytes);
        if used > max {
            return Err(format!(
                "the regions of this session would have {used} bytes together; \
                 `limits.region_bytes_per_session` allows {max}"
            ));
        }
        regions.used = used;
        drop(regions);
        Ok(RegionRoom { session: Arc::clone(self), bytes })
    }

    /// A region is registered no more.
    pub fn region_ended(&self, region: RegionId) {
        let mut regions = lock(&self.regions);
        let bytes = regions.known.remove(&region).map_or(0, |known| known.bytes);
        regions.used = regions.used.saturating_sub(bytes);
        drop(regions);
        self.region_gone.notify_waiters();
    }

    /// Marks a region as about to end. `false` when it is not there, or marked already.
    pub fn begin_end(&self, region: RegionId) -> bool {
        let mut regions = lock(&self.regions);
        let known = regions.known.get_mut(&region);
        known.is_some_and(|known| !std::mem::replace(&mut known.closing, true))
    }

    /// A registration of GPU memory begins.
    pub fn importing(self: &Arc<Self>) -> Importing {
        lock(&self.regions).importing += 1;
        Importing(Arc::clone(self))
    }

    /// The regions in GPU memory.
    pub fn gpu_regions(&self) -> Vec<RegionId> {
        let regions = lock(&self.regions);
        let on_gpu = |known: &KnownRegion| matches!(known.memory, RegionKind::Gpu { .. });
        regions.known.iter().filter(|(_, known)| on_gpu(known)).map(|(id, _)| *id).collect()
    }

    /// Whether no GPU memory of the session is imported or about to be.
    pub fn is_off_gpus(&self) -> bool {
        let importing = lock(&self.regions).importing;
        importing == 0 && self.gpu_regions().is_empty()
    }

    /// Waits until [`Session::is_off_gpus`], however long that takes.
    pub async fn off_gpus(&self) {
        loop {
            let mut gone = std::pin::pin!(self.region_gone.notified());
            gone.as_mut().enable();
            if self.is_off_gpus() {
                return;
            }
            gone.await;
        }
    }

    /// Waits until a region is registered no more. `false` when it still is at `until`.
    pub async fn region_gone(&self, region: RegionId, until: tokio::time::Instant) -> bool {
        loop {
            let mut gone = std::pin::pin!(self.region_gone.notified());
            gone.as_mut().enable();
            if self.region_kind(region).is_none() {
                return true;
            }
            if tokio::time::timeout_at(until, gone).await.is_err() {
                return self.region_kind(region).is_none();
            }
        }
    }

    /// What a region of the session is made of; `None` for one that it does not have.
    pub fn region_kind(&self, region: RegionId) -> Option<RegionKind> {
        lock(&self.regions).known.get(&region).map(|known| known.memory)
    }

    /// Keeps a descriptor for a region; answers the number under which it is found. Descriptors
    /// whose time is over are closed. `None` when `max` wait already.
    pub fn attach(&self, fd: OwnedFd, max: u32, now: Instant) -> Option<u64> {
        lock(&self.descriptors).add(fd, max, now)
    }

    /// Takes a descriptor that was attached.
    pub fn take_descriptor(&self, number: u64, now: Instant) -> Option<OwnedFd> {
        lock(&self.descriptors).take(number, now)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Descriptors {
    last: u64,
    waiting: VecDeque<(u64, OwnedFd, Instant)>,
}

impl Descriptors {
    fn expire(&mut self, now: Instant) {
        self.waiting.retain(|(_, _, since)| now.duration_since(*since) < DESCRIPTOR_LIFE);
    }

    fn add(&mut self, fd: OwnedFd, max: u32, now: Instant) -> Option<u64> {
        self.expire(now);
        if self.waiting.len() >= usize::try_from(max).unwrap_or(usize::MAX) {
            return None;
        }
        self.last += 1;
        self.waiting.push_back((self.last, fd, now));
        Some(self.last)
    }

    fn take(&mut self, number: u64, now: Instant) -> Option<OwnedFd> {
        self.expire(now);
        let at = self.waiting.iter().position(|(each, _, _)| *each == number)?;
        self.waiting.remove(at).map(|(_, fd, _)| fd)
    }
}

/// The pipe that tells a client of ended tickets: its end and ours. The flags of a pipe's end
/// belong to that end alone, so that nothing the client does to its own can make our writes block.
///
/// # Errors
/// Out of file descriptors.
pub fn notify_pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pipe::{PipeFlags, pipe_with};
    Ok(pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC)?)
}

/// The tickets of one session: under way, or ended and not waited for yet.
///
/// The node may report an end before it has answered the question that made the ticket; both
/// orders lead to one entry, which is removed when its outcome is taken.
pub struct Tickets {
    notify: OwnedFd,
    changed: Notify,
    counters: Arc<TenantCounters>,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    reserved: usize,
    entries: HashMap<TicketId, Entry>,
}

enum Entry {
    /// Nobody will wait for it when it is not `heard`: the call that made it was given up.
    UnderWay {
        heard: bool,
        _touch: Option<Arc<Touch>>,
    },
    Ended(Vec<Outcome>, Instant),
}

/// Room for one ticket, given back when dropped.
pub struct Reservation {
    tickets: Arc<Tickets>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut book = lock(&self.tickets.book);
        book.reserved = book.reserved.saturating_sub(1);
    }
}

impl Tickets {
    /// No tickets; `notify` gets a byte for each that ends, and must not block.
    pub fn new(notify: OwnedFd, counters: Arc<TenantCounters>) -> Tickets {
        Tickets { notify, changed: Notify::new(), counters, book: Mutex::default() }
    }

    /// Makes room for one more ticket.
    ///
    /// # Errors
    /// `max` tickets are there already.
    pub fn reserve(self: &Arc<Self>, max: usize) -> Result<Reservation, Limit> {
        let mut book = lock(&self.book);
        if book.entries.len() + book.reserved >= max {
            // An answer that never reached its client leaves a ticket that nobody waits for.
            book.entries.retain(|_, entry| match entry {
                Entry::Ended(_, since) => since.elapsed() < OUTCOME_LIFE,
                _ => true,
            });
        }
        if book.entries.len() + book.reserved >= max {
            return Err(Limit::Tickets);
        }
        book.reserved += 1;
        Ok(Reservation { tickets: Arc::clone(self) })
    }

    /// The node made a ticket. With `heard` false nobody will wait for it. The region that it
    /// touches is touched until it ends.
    pub fn admit(
        &self,
        ticket: TicketId,
        heard: bool,
        room: Reservation,
        touch: Option<Arc<Touch>>,
    ) {
        let mut book = lock(&self.book);
        match book.entries.get(&ticket) {
            Some(Entry::Ended(..)) if !heard => {
                book.entries.remove(&ticket);
            }
            Some(_) => {}
            None => {
                book.entries.insert(ticket, Entry::UnderWay { heard, _touch: touch });
            }
        }
        drop(book);
        drop(room);
    }

    /// The call that made the ticket was given up before its answer went out.
    pub fn abandon(&self, ticket: TicketId) {
        let mut book = lock(&self.book);
        match book.entries.get_mut(&ticket) {
            Some(Entry::UnderWay { heard, .. }) => *heard = false,
            Some(Entry::Ended(..)) => {
                book.entries.remove(&ticket);
            }
            None => {}
        }
    }

    /// A ticket ended. Called once for each, from any thread; does not block.
    pub fn ended(&self, ticket: TicketId, outcomes: Vec<Outcome>) {
        self.counters.count(&outcomes);
        let mut book = lock(&self.book);
        if matches!(book.entries.get(&ticket), Some(Entry::UnderWay { heard: false, .. })) {
            book.entries.remove(&ticket);
        } else {
            book.entries.insert(ticket, Entry::Ended(outcomes, Instant::now()));
        }
        drop(book);
        // A pipe that is full says already that tickets have ended, and one whose client closed
        // its end has nobody to tell.
        let _ = rustix::io::write(self.notify.as_fd(), &[1]);
        self.changed.notify_waiters();
    }

    /// Waits until at least one of the tickets has ended or is unknown, or the time is over, and
    /// takes all outcomes that are there.
    pub async fn wait(&self, tickets: &[TicketId], limit: Duration) -> Vec<TicketEnd> {
        let until = tokio::time::Instant::now() + limit;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let ends = self.take(tickets);
            if !ends.is_empty() || tickets.is_empty() {
                return ends;
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return self.take(tickets);
            }
        }
    }

    fn take(&self, tickets: &[TicketId]) -> Vec<TicketEnd> {
        let mut book = lock(&self.book);
        let mut ends = Vec::new();
        for ticket in tickets {
            let outcomes = match book.entries.get(ticket) {
                Some(Entry::UnderWay { .. }) => continue,
                None => None,
                Some(Entry::Ended(..)) => match book.entries.remove(ticket) {
                    Some(Entry::Ended(outcomes, _)) => Some(outcomes),
                    _ => None,
                },
            };
            ends.push(TicketEnd { ticket: *ticket, outcomes });
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use kvtide_tiers::catalog::MissReason;

    use super::*;

    fn tickets_and_pipe() -> (Arc<Tickets>, OwnedFd) {
        let (theirs, notify) = notify_pipe().unwrap();
        (Arc::new(Tickets::new(notify, Arc::default())), theirs)
    }

    fn tickets() -> Arc<Tickets> {
        tickets_and_pipe().0
    }

    #[test]
    fn a_client_that_makes_its_end_block_does_not_block_the_daemon() {
        let (tickets, theirs) = tickets_and_pipe();
        rustix::fs::fcntl_setfl(&theirs, rustix::fs::OFlags::empty()).unwrap();
        for id in 0..100_000 {
            tickets.ended(TicketId(id), Vec::new());
        }
        drop(theirs);
        tickets.ended(TicketId(0), Vec::new());
    }

    #[tokio::test]
    async fn a_ticket_ends_once_in_whatever_order_the_node_reports() {
        let (tickets, theirs) = tickets_and_pipe();
        let outcomes = vec![Outcome::Loaded(Tier::Host), Outcome::Missed(MissReason::Absent)];
        for (id, end_first) in [(TicketId(1), false), (TicketId(2), true)] {
            let room = tickets.reserve(1).unwrap();
            if end_first {
                tickets.ended(id, outcomes.clone());
                tickets.admit(id, true, room, None);
            } else {
                tickets.admit(id, true, room, None);
                assert!(tickets.wait(&[id], Duration::ZERO).await.is_empty());
                tickets.ended(id, outcomes.clone());
            }
            let ends = tickets.wait(&[id], Duration::ZERO).await;
            assert_eq!(ends, [TicketEnd { ticket: id, outcomes: Some(outcomes.clone()) }]);
            let again = tickets.wait(&[id], Duration::ZERO).await;
            assert_eq!(again, [TicketEnd { ticket: id, outcomes: None }]);
        }
        assert_eq!(rustix::io::read(&theirs, &mut [0; 8]), Ok(2), "a byte for each");
    }

    #[tokio::test]
    async fn tickets_are_bounded_and_abandoned_ones_take_no_room_after_their_end() {
        let tickets = tickets();
        let room = tickets.reserve(2).unwrap();
        let other = tickets.reserve(2).unwrap();
        assert_eq!(tickets.reserve(2).err(), Some(Limit::Tickets));
        drop(other);
        tickets.admit(TicketId(1), false, room, None);
        let room = tickets.reserve(2).unwrap();
        tickets.admit(TicketId(2), true, room, None);
        assert!(tickets.reserve(2).is_err());
        tickets.abandon(TicketId(2));
        for id in [TicketId(1), TicketId(2)] {
            tickets.ended(id, vec![Outcome::Stored]);
        }
        assert!(lock(&tickets.book).entries.is_empty());
        assert!(tickets.reserve(1).is_ok());
    }

    #[tokio::test]
    async fn a_wait_wakes_when_a_ticket_ends() {
        let tickets = tickets();
        let room = tickets.reserve(1).unwrap();
        tickets.admit(TicketId(1), true, room, None);
        let waiter = Arc::clone(&tickets);
        let wait =
            tokio::spawn(async move { waiter.wait(&[TicketId(1)], Duration::from_secs(60)).await });
        tokio::task::yield_now().await;
        tickets.ended(TicketId(1), vec![Outcome::Stored]);
        assert_eq!(wait.await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_region_that_takes_long_to_end_keeps_its_room_and_ends_once() {
        let caller = Caller { uid: 1, operator: false, tenant: None };
        let (tickets, counters) = (tickets(), Arc::default());
        let session = Session::new(SessionId(1), [0; 16], caller, "a".into(), tickets, counters);
        let session = Arc::new(session);
        let (region, now) = (RegionId(4), tokio::time::Instant::now());
        drop(session.region_room(10, 10).unwrap());
        session.region_room(10, 10).unwrap().keep(region, RegionKind::Gpu { events: 2 });
        assert!(session.begin_end(region));
        assert!(!session.begin_end(region), "it is ended once");
        assert!(!session.region_gone(region, now).await);
        assert!(session.region_room(1, 10).is_err(), "it may still be imported");
        assert!(!session.is_off_gpus());
        let until = now + Duration::from_secs(20);
        let waits = session.region_gone(region, until);
        let ends = async {
            tokio::task::yield_now().await;
            session.region_ended(region);
        };
        assert!(tokio::join!(waits, ends).0);
        assert!(!session.begin_end(region));
        assert!(session.region_room(10, 10).is_ok());
        assert!(session.is_off_gpus());
        let import = session.importing();
        assert!(!session.is_off_gpus());
        let imported = async {
            tokio::task::yield_now().await;
            drop(import);
        };
        tokio::join!(session.off_gpus(), imported);
    }

    #[test]
    fn descriptors_are_bounded_and_expire() {
        let mut descriptors = Descriptors::default();
        let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let now = Instant::now();
        let first = descriptors.add(fd(), 1, now).unwrap();
        assert!(descriptors.add(fd(), 1, now).is_none());
        assert!(descriptors.take(first, now).is_some());
        assert!(descriptors.take(first, now).is_none());
        let second = descriptors.add(fd(), 1, now).unwrap();
        assert!(descriptors.take(second, now + DESCRIPTOR_LIFE).is_none());
    }
}
