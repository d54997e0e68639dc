//! What the demo and its client processes say to each other: one JSON value a line, questions on
//! the process's standard input, answers on its standard output.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A turn to take.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub(crate) struct Turn {
    pub(crate) conversation: usize,
    /// From 0.
    pub(crate) turn: usize,
}

/// What a client process says.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(crate) enum Said {
    /// It is connected, once after start.
    Ready,
    /// A turn is done.
    Done(TurnDone),
    /// It cannot go on, for this reason.
    Failed(String),
}

/// How a turn went.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub(crate) struct TurnDone {
    pub(crate) conversation: usize,
    /// From 0.
    pub(crate) turn: usize,
    /// Blocks of the prompt.
    pub(crate) prompt_blocks: u64,
    /// Of these, taken from GPU memory.
    pub(crate) blocks_hit_device: u64,
    /// Of these, taken from host RAM.
    pub(crate) blocks_hit_host: u64,
    /// Of these, taken from NVMe.
    pub(crate) blocks_hit_nvme: u64,
    /// Of these, computed anew.
    pub(crate) blocks_missed: u64,
    /// Blocks that the lookup found and the load did not bring, by reason.
    pub(crate) missed_in_load: BTreeMap<String, u64>,
    /// Blocks whose every byte was compared.
    pub(crate) blocks_verified: u64,
    /// Bytes that were not what they should be.
    pub(crate) wrong_bytes: u64,
    /// Blocks given to the cache.
    pub(crate) blocks_stored: u64,
    /// Blocks that the cache did not take.
    pub(crate) blocks_not_stored: u64,
    /// Bytes that came from the cache.
    pub(crate) bytes_loaded: u64,
    /// Bytes that went to it.
    pub(crate) bytes_stored: u64,
    /// Microseconds from the lookup to the last byte.
    pub(crate) load_us: u64,
    /// Microseconds to store.
    pub(crate) store_us: u64,
}
