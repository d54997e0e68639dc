//! Whether to load or to compute, and when to compute: what clients report and ask, and what they
//! are told.

use serde::{Deserialize, Serialize};

use super::request::Tier;
use crate::block::{BlockKey, NamespaceId};

/// A prefill that was admitted and is under way.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct GrantId(pub u64);

/// What a lookup advises: so that the first token comes soonest. While nothing is known of how fast
/// the engine computes, to load everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Advice {
    /// Load so many of the blocks found, from the root on, and compute the others.
    pub load: u32,
    /// How long loading these is expected to take, microseconds; `None`: not known.
    pub load_us: Option<u64>,
    /// How long computing the other blocks found is expected to take, microseconds.
    pub compute_us: Option<u64>,
    /// How long computing all of the blocks found is expected to take, microseconds.
    pub compute_all_us: Option<u64>,
    /// Blocks behind those found that are there as well and not offered, because loading from
    /// their tier took longer than computing.
    pub withheld: u32,
}

impl Advice {
    /// To load all of the blocks, of which nothing else is known.
    pub fn load_all(blocks: u32) -> Advice {
        Advice { load: blocks, ..Advice::default() }
    }
}

/// A prefill that a client did: the arbiter learns from it, and its grant ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PrefillReport {
    /// The namespace.
    pub namespace: NamespaceId,
    /// Tokens computed in one go.
    pub tokens: u32,
    /// Tokens before them whose KV was there.
    pub context: u32,
    /// How long it took, microseconds.
    pub took_us: u64,
    /// The grant under which it was done, if any.
    pub grant: Option<GrantId>,
}

/// A client asks whether it may compute now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PrefillAsk {
    /// Tokens to compute.
    pub tokens: u32,
    /// Tokens before them whose KV is there.
    pub context: u32,
    /// The client's number of the conversation, 0 for none. Asking again with the same number, or
    /// the same `prefix`, is the same ask.
    pub conversation: u64,
    /// Turns of the conversation that these tokens are; with more than one the client can be told
    /// to keep only the last of them. `None`: it cannot leave any out.
    pub turns: Option<u32>,
    /// The last block that will be computed. Who asks for the same one while it is being computed
    /// is told to wait for it.
    pub prefix: Option<(NamespaceId, BlockKey)>,
}

/// Whether a prefill may begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum PrefillAnswer {
    /// Now. The grant ends with the report of the prefill; `None` where nothing is rationed.
    Admit {
        /// The grant.
        grant: Option<GrantId>,
    },
    /// Not yet: look up and ask again after so long.
    Wait {
        /// Milliseconds.
        ms: u32,
        /// What is waited for.
        why: WaitReason,
    },
    /// It would wait too long: compute only the last turns, or ask again as one that cannot.
    Degrade {
        /// How many turns to keep, at least 1.
        keep_turns: u32,
    },
}

/// What a prefill waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WaitReason {
    /// Its turn, in the queue of its tenant.
    Turn,
    /// The same prefix is being computed and will be stored.
    SamePrefix,
    /// The queue of its tenant is full. It has no place in it.
    QueueFull,
}

/// What a tier has been worth since start, by what clients report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TierWorth {
    /// Which.
    pub tier: Tier,
    /// Time that loads took less than computing would have taken, microseconds.
    pub saved_us: u64,
    /// Time that loads took more, microseconds.
    pub lost_us: u64,
    /// Loads that were measured.
    pub loads: u64,
    /// Lookups whose blocks in this tier were advised against.
    pub advised_against: u64,
    /// Lookups whose blocks in this tier were not offered.
    pub withheld: u64,
    /// Lookups whose blocks were offered all the same, to see whether the tier is well again.
    pub probes: u64,
    /// Bytes that it loads in a second, by measurement; 0 when not known.
    pub bytes_per_second: u64,
    /// Namespaces for which it is not offered now.
    pub namespaces_withheld: u32,
}

/// A tier that is not offered for a namespace, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Withheld {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The tier.
    pub tier: Tier,
    /// For how long by now, microseconds.
    pub for_us: u64,
    /// What its loads took more than computing, in the window that decided, microseconds.
    pub lost_us: u64,
    /// Loads in that window, done or advised against.
    pub loads: u32,
    /// What the latest probes saved, microseconds; `None` before the first.
    pub probes_net_us: Option<i64>,
}

/// Prefills reported and asked for, since start, and what is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PrefillStats {
    /// Reports that were learned from.
    pub reports: u64,
    /// Reports too small, or too odd, to learn from.
    pub reports_unused: u64,
    /// Namespaces whose speed is known.
    pub namespaces_known: u32,
    /// Whether admission is on.
    pub rationed: bool,
    /// Prefills admitted.
    pub admitted: u64,
    /// Their tokens, each weighted by its cost.
    pub admitted_tokens: u64,
    /// Answers to wait for a turn.
    pub told_to_wait: u64,
    /// Answers to wait for the same prefix.
    pub coalesced: u64,
    /// Answers to keep fewer turns.
    pub degraded: u64,
    /// Asks that found their tenant's queue full.
    pub queue_full: u64,
    /// Grants that ended because nobody reported their end in time.
    pub lapsed: u64,
    /// Asks in the queues now.
    pub queued: u32,
    /// Grants under way.
    pub grants: u32,
    /// Their tokens, weighted.
    pub tokens_in_flight: u64,
    /// Weighted tokens that a second admits now; 0: not limited. Less than configured after a cold
    /// start.
    pub tokens_per_second: u64,
}
