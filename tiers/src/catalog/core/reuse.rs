//! What is to be expected of blocks, learned from requests.
//!
//! A request is the lookup of a path, with the touches and stores that follow from it. It is put in
//! a class, by how many requests its path continues and by how much of the path is new, or by what
//! the engine says of it ([`Hints`]). A marker on the end of its path tells whether a later request
//! continues it, and when, whatever is cached: from these returns the curves of [`Survival`] are
//! fitted. Blocks know the number of the request that used them last.
//!
//! Invariants: no more than 8,192 requests are watched and 65,535 remembered, whatever clients do;
//! nothing here decides whether a block is found, only what leaves first.

use std::collections::HashMap;

use super::request::{Conversation, Hints, Priority};
use super::survival::{CLASSES, FINISHED, OPEN, SHORT, SOON, Survival, UNKNOWN};
use crate::block::{BlockKey, NamespaceId};

/// Requests whose return is watched for.
const WATCHED: usize = 8192;

/// Requests after which the curves are fitted again.
const FIT_EVERY: u64 = 256;

/// Requests before anything is concluded.
const WARM_UP: u64 = 512;

/// Announced requests whose stores are still to come, at most.
const COMING: usize = 4096;

/// Namespaces whose block length is remembered at most.
const NAMESPACES_MAX: usize = 65_536;

/// Tokens of a block where nothing is known yet.
const BLOCK_TOKENS: u32 = 16;

/// Lookups of the same path within this time, about a second, are one request.
const SAME_REQUEST: u32 = 16;

/// Counters of the filter in front of the markers.
const FILTER: usize = 1 << 16;

/// The number of a request, reused after 65,535 others. 0 stands for none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RequestId(pub(crate) u16);

/// What is remembered of a request.
#[derive(Clone, Copy)]
struct Remembered {
    class: u8,
    /// The class of what it shares with others.
    shared: u8,
    /// Its class without hints.
    learned: u8,
    priority: Priority,
    verdict: Option<bool>,
    /// Bytes of the write budget that are set aside for it.
    set_aside: u64,
    /// Where its marker was put.
    marker: u16,
}

const NOTHING: Remembered = Remembered {
    class: UNKNOWN,
    shared: UNKNOWN,
    learned: 0,
    priority: Priority::Normal,
    verdict: None,
    set_aside: 0,
    marker: 0,
};

/// The end of a request's path.
#[derive(Clone, Copy)]
struct Marker {
    key: u64,
    /// When the request was made.
    at: u32,
    /// Requests on the path up to here, this one included.
    turn: u32,
    class: u8,
    request: RequestId,
    /// No later request continued it so far.
    waiting: bool,
}

/// Stands for a block in markers and ghosts. Two blocks with the same number do no more harm than
/// a wrong guess.
pub(crate) fn short_key(namespace: NamespaceId, key: &BlockKey) -> u64 {
    let (first, _) = key.0.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
    let mixed = u64::from_le_bytes(*first) ^ u64::from(namespace.0).rotate_left(32);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

/// The path of a request.
pub(crate) struct Path<'a> {
    pub(crate) namespace: NamespaceId,
    pub(crate) keys: &'a [BlockKey],
    /// Blocks at its start that are known.
    pub(crate) known: usize,
    /// The last block is known to be shorter than the others: nothing can follow it.
    pub(crate) cut_short: bool,
}

/// All that is learned.
pub(crate) struct Reuse {
    requests: Vec<Remembered>,
    last: RequestId,
    count: u64,
    markers: Vec<Marker>,
    next_marker: usize,
    /// Hashed with a secret, because clients choose keys; behind the filter that costs little.
    index: HashMap<u64, u32>,
    filter: Vec<u16>,
    coming: Vec<(u64, RequestId)>,
    block_tokens: HashMap<NamespaceId, u32>,
    survival: Survival,
    /// Whether anybody asks.
    wanted: bool,
}

impl Reuse {
    pub(crate) fn new(wanted: bool) -> Reuse {
        Reuse {
            requests: vec![NOTHING],
            last: RequestId(0),
            count: 0,
            markers: Vec::new(),
            next_marker: 0,
            index: HashMap::new(),
            filter: if wanted { vec![0; FILTER] } else { Vec::new() },
            coming: if wanted { vec![(0, RequestId(0)); COMING] } else { Vec::new() },
            block_tokens: HashMap::new(),
            survival: Survival::new(),
            wanted,
        }
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// The request that was announced last.
    pub(crate) fn last(&self) -> RequestId {
        self.last
    }

    /// Whether enough was seen to predict anything.
    pub(crate) fn has_learned(&self) -> bool {
        self.count >= WARM_UP
    }

    /// A request begins.
    pub(crate) fn announce(&mut self, path: &Path<'_>, hints: &Hints, now: u32) -> RequestId {
        if !self.wanted || path.keys.is_empty() {
            return RequestId(0);
        }
        let end = path.keys.len() - usize::from(path.cut_short && path.keys.len() > 1);
        let end = path.keys.get(end - 1).map_or(0, |key| short_key(path.namespace, key));
        // Every rank of a model may ask the same.
        if let Some(same) = self.marker(end)
            && same.waiting
            && now.saturating_sub(same.at) < SAME_REQUEST
        {
            return same.request;
        }
        let (mut known, mut turn) = (path.known, 0);
        for (at, key) in path.keys.iter().enumerate() {
            let key = short_key(path.namespace, key);
            let Some(marker) = self.marker(key) else {
                continue;
            };
            (known, turn) = (known.max(at + 1), marker.turn);
            if std::mem::replace(&mut marker.waiting, false) {
                let (class, age) = (marker.class, now.saturating_sub(marker.at));
                self.survival.returned(class, age);
            }
        }
        let tokens = self.block_tokens.get(&path.namespace).copied().unwrap_or(BLOCK_TOKENS);
        let new_tokens = path.keys.len().saturating_sub(known) as u64 * u64::from(tokens);
        let learned = class_of(turn, new_tokens);
        let class = class_of_hints(hints, learned).unwrap_or(learned);
        let shared = if class == FINISHED { learned } else { class };
        let id = self.remember(Remembered {
            class,
            shared,
            learned,
            priority: hints.priority,
            verdict: None,
            set_aside: 0,
            marker: self.next_marker as u16,
        });
        let (turn, waiting) = (turn + 1, true);
        self.watch(Marker { key: end, at: now, turn, class, request: id, waiting }, now);
        if let Some(first) = path.keys.get(path.known) {
            self.expect_store(short_key(path.namespace, first), id);
        }
        self.count += 1;
        if self.count.is_multiple_of(FIT_EVERY) {
            let waiting = self.markers.iter().filter(|marker| marker.waiting);
            let ages = waiting.map(|marker| (marker.class, now.saturating_sub(marker.at)));
            self.survival.fit(ages);
        }
        id
    }

    fn remember(&mut self, what: Remembered) -> RequestId {
        let next = self.last.0.checked_add(1).unwrap_or(1);
        match self.requests.get_mut(usize::from(next)) {
            Some(old) => *old = what,
            None => self.requests.push(what),
        }
        self.last = RequestId(next);
        self.last
    }

    fn marker(&mut self, key: u64) -> Option<&mut Marker> {
        if self.filter.get(key as usize % FILTER).is_none_or(|count| *count == 0) {
            return None;
        }
        let at = *self.index.get(&key)?;
        self.markers.get_mut(at as usize)
    }

    /// Watches for the return of a request, and no more for the oldest one.
    fn watch(&mut self, marker: Marker, now: u32) {
        let at = self.next_marker;
        self.next_marker = (at + 1) % WATCHED;
        match self.markers.get_mut(at) {
            Some(place) => {
                let old = std::mem::replace(place, marker);
                if old.waiting {
                    self.survival.ended(old.class, now.saturating_sub(old.at));
                }
                self.forget_marker(old.key, at);
            }
            None => self.markers.push(marker),
        }
        self.list_marker(marker.key, at);
    }

    fn list_marker(&mut self, key: u64, at: usize) {
        if self.index.insert(key, at as u32).is_none()
            && let Some(count) = self.filter.get_mut(key as usize % FILTER)
        {
            *count += 1;
        }
    }

    fn forget_marker(&mut self, key: u64, at: usize) {
        if self.index.get(&key) == Some(&(at as u32)) {
            self.index.remove(&key);
            if let Some(count) = self.filter.get_mut(key as usize % FILTER) {
                *count -= 1;
            }
        }
    }

    /// The store that begins with this block belongs to the request.
    pub(crate) fn expect_store(&mut self, key: u64, request: RequestId) {
        if let Some(place) = self.coming.get_mut(key as usize % COMING) {
            *place = (key, request);
        }
    }

    /// The request that a store which begins with this block belongs to.
    pub(crate) fn coming(&self, key: u64) -> Option<RequestId> {
        let (found, request) = *self.coming.get(key as usize % COMING)?;
        (found == key && request != RequestId(0)).then_some(request)
    }

    /// A block has so many tokens. Says whether others of the namespace have more: then it is the
    /// last one of a path, which nothing will follow.
    pub(crate) fn note_tokens(&mut self, namespace: NamespaceId, tokens: u32) -> bool {
        let full = self.block_tokens.len() >= NAMESPACES_MAX;
        if !self.wanted || (full && !self.block_tokens.contains_key(&namespace)) {
            return false;
        }
        let most = self.block_tokens.entry(namespace).or_insert(tokens);
        *most = tokens.max(*most);
        tokens < *most
    }

    /// The end of a path proves to be cut short: it is watched for at the block before.
    pub(crate) fn move_marker(&mut self, from: u64, to: u64) {
        let Some(at) = self.index.get(&from).map(|at| *at as usize) else {
            return;
        };
        self.forget_marker(from, at);
        if let Some(marker) = self.markers.get_mut(at) {
            marker.key = to;
            self.list_marker(to, at);
        }
    }

    /// The engine says more of a request.
    pub(crate) fn hint(&mut self, request: RequestId, hints: &Hints) {
        if hints.says_nothing() || !self.wanted || request == RequestId(0) {
            return;
        }
        let Some(found) = self.requests.get_mut(usize::from(request.0)) else {
            return;
        };
        found.priority = hints.priority;
        if let Some(class) = class_of_hints(hints, found.learned) {
            found.class = class;
            if class != FINISHED {
                found.shared = class;
            }
            let marker = self.markers.get_mut(usize::from(found.marker));
            if let Some(marker) = marker.filter(|marker| marker.request == request) {
                marker.class = class;
            }
        }
    }

    fn remembered(&self, request: RequestId) -> Remembered {
        self.requests.get(usize::from(request.0)).copied().unwrap_or(NOTHING)
    }

    /// The queue of a block that the request used last; `shared`: other paths go through it.
    pub(crate) fn queue(&self, request: RequestId, shared: impl Fn() -> bool) -> u8 {
        let found = self.remembered(request);
        let own = found.class == found.shared || !shared();
        let class = if own { found.class } else { found.shared };
        class + found.priority as u8 * CLASSES as u8
    }

    /// Expected hits for each unit of time that a block of this queue is kept.
    pub(crate) fn score(&self, queue: u8, age: u32) -> f32 {
        let (class, worth) = class_and_worth(queue);
        self.survival.rate(class, age) * worth
    }

    /// The same as long as nothing is learned: the longer ago the less, and as engines say.
    pub(crate) fn score_of_hints(&self, queue: u8, age: u32) -> f32 {
        let (class, worth) = class_and_worth(queue);
        let hinted = match class {
            FINISHED => 0.0,
            SOON..SHORT => 16.0,
            OPEN..SOON => 4.0,
            _ => 1.0,
        };
        hinted * worth / (age as f32 + 1.0)
    }

    /// The chance that a request is ever continued.
    pub(crate) fn chance(&self, request: RequestId, age: u32) -> f32 {
        self.survival.chance(self.remembered(request).class, age)
    }

    /// Whether blocks of the request may be written to nvme, if that was decided.
    pub(crate) fn verdict(&self, request: RequestId) -> Option<bool> {
        self.remembered(request).verdict
    }

    /// Decides whether blocks of the request may be written to nvme; for `set_aside` bytes of them
    /// the budget is taken already.
    pub(crate) fn set_verdict(&mut self, request: RequestId, admitted: bool, set_aside: u64) {
        if let Some(found) = self.requests.get_mut(usize::from(request.0)) {
            found.verdict = Some(admitted);
            found.set_aside = if admitted { set_aside } else { 0 };
        }
    }

    /// Takes from what is set aside for the request, if it is enough.
    pub(crate) fn spend(&mut self, request: RequestId, bytes: u64) -> bool {
        let found = self.requests.get_mut(usize::from(request.0));
        let enough = found.filter(|found| found.set_aside >= bytes);
        enough.map(|found| found.set_aside -= bytes).is_some()
    }
}

/// What a queue stands for: a class, and what its blocks are worth beside others'.
fn class_and_worth(queue: u8) -> (u8, f32) {
    let (priority, class) = (usize::from(queue) / CLASSES, usize::from(queue) % CLASSES);
    let worth = match priority {
        0 => 1.0,
        1 => 1.0 / 16.0,
        _ => 16.0,
    };
    (class as u8, worth)
}

/// The class of a request by the number of those before it on its path and its new tokens.
fn class_of(turn: u32, new_tokens: u64) -> u8 {
    let turn = match turn {
        0..=2 => turn as u8,
        3..=6 => 3,
        _ => 4,
    };
    let length = match new_tokens {
        0..=1024 => 0,
        1025..=2048 => 1,
        2049..=4096 => 2,
        4097..=8192 => 3,
        8193..=16_384 => 4,
        16_385..=32_768 => 5,
        _ => 6,
    };
    turn * 7 + length
}

/// The class of a request of which the engine knows more than can be learned.
fn class_of_hints(hints: &Hints, learned: u8) -> Option<u8> {
    match (hints.conversation, hints.returns_in_ms) {
        (Conversation::Finished | Conversation::Drop, _) => Some(FINISHED),
        (_, Some(..=10_000)) => Some(SOON + 1),
        (_, Some(..=60_000)) => Some(SOON + 2),
        (_, Some(..=600_000)) => Some(SOON + 3),
        (_, Some(_)) => Some(SOON + 4),
        (Conversation::WaitingForTool, None) => Some(SOON),
        (Conversation::Open, None) => Some(OPEN + learned),
        (Conversation::Unknown, None) => None,
    }
}

const _: () = assert!(SHORT as usize + 1 == CLASSES && CLASSES * 3 == super::policy::QUEUES);
