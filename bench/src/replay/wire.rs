//! What coordinator and client processes of a replay tell each other: JSON lines over pipes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One request for a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    /// Number of the request within the whole replay.
    pub(super) index: u64,
    /// Which pass over the trace: keys of different passes have nothing in common.
    pub(super) pass: u64,
    /// The blocks, root first.
    pub(super) path: Vec<u64>,
}

/// What a worker did with a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Done {
    /// The request.
    pub(super) index: u64,
    /// Blocks of the path.
    pub(super) blocks: u64,
    /// Blocks loaded from each tier: device, host, nvme.
    pub(super) loaded: [u64; 3],
    /// Blocks that were looked up or loaded in vain, by reason.
    pub(super) missed: BTreeMap<String, u64>,
    /// Blocks whose every byte was compared.
    pub(super) verified: u64,
    /// Wrong bytes (of a block that differs, all behind and including the first difference count).
    pub(super) wrong_bytes: u64,
    /// Blocks stored, and blocks that were there already.
    pub(super) stored: [u64; 2],
    /// Blocks that could not be stored, by reason.
    pub(super) not_stored: BTreeMap<String, u64>,
    /// Times that a store was tried again because there was no room.
    pub(super) busy: u64,
    /// Calls that nobody answered, because the daemon was away.
    pub(super) away: u64,
    /// Errors that are neither misses nor an absent daemon.
    pub(super) failures: u64,
    /// The first few of them, and of the wrong blocks, in words.
    pub(super) words: Vec<String>,
    /// How long each lookup, load and store took, microseconds.
    pub(super) lookup_us: Vec<u64>,
    /// See above.
    pub(super) load_us: Vec<u64>,
    /// See above.
    pub(super) store_us: Vec<u64>,
}

impl Done {
    /// Notes something in words, at most eight times.
    pub(super) fn say(&mut self, words: String) {
        if self.words.len() < 8 {
            self.words.push(words);
        }
    }
}
