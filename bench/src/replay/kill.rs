//! Kills the daemon during a replay and checks what it finds again.
//!
//! Before a kill the blocks on nvme are listed, then 150 ms pass (descriptors are committed after
//! 100 ms at the latest), then they are listed again. What both lists have in the same segment and
//! the same life of it must be there after the restart. What only the first list has was reclaimed
//! in the normal course of things and is counted apart.

use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context;
use kvtide_client::{ClientConfig, Inspect, blocking::Client};
use kvtide_tiers::{block::BlockKey, catalog::Tier};
use serde::Serialize;

use super::gate::Gate;
use crate::daemon::Daemon;

/// How long a block must have been acknowledged for it to count: the commit interval of 100 ms and
/// half as much again.
const SETTLE: Duration = Duration::from_millis(150);

/// Longest time that outstanding requests may take before a kill at rest.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Where each block on nvme lies: segment and its sequence.
type Listing = HashMap<BlockKey, (u32, u64)>;

/// One kill.
#[derive(Clone, Debug, Serialize)]
pub struct Kill {
    /// Seconds since the start of the replay.
    pub at_s: f64,
    /// Whether no request was under way.
    pub at_rest: bool,
    /// Blocks that had to be found again.
    pub expected: u64,
    /// Those that were.
    pub found: u64,
    /// Blocks whose segment was reclaimed between the two listings, or between the second one and
    /// the kill.
    pub reclaimed: u64,
    /// From the start of the new process to its first answer, milliseconds.
    pub recovery_ms: u64,
    /// When the daemon was away, for the coordinator.
    #[serde(skip)]
    pub outage: (Instant, Instant),
}

/// Kills the daemon, starts it again, and compares what it had with what it has. Requests are held
/// back from the kill (at rest: from the start) until the comparison is done.
///
/// # Errors
/// The daemon ended by itself, did not come back, or could not be asked.
pub(super) fn kill_once(
    daemon: &mut Daemon,
    gate: &Gate,
    started: Instant,
    at_rest: bool,
) -> anyhow::Result<Kill> {
    if at_rest {
        gate.close();
        if !gate.wait_idle(IDLE_MAX) {
            anyhow::bail!("requests under way did not end within {} s", IDLE_MAX.as_secs());
        }
    }
    let socket = daemon.spec().socket();
    let first = list(&socket).context("before the kill")?;
    std::thread::sleep(SETTLE);
    let second = list(&socket).context("before the kill")?;
    gate.close();
    let killed = Instant::now();
    daemon.kill()?;
    let recovery = daemon.start_again()?;
    let after = list(&socket).context("after the restart")?;
    let back = Instant::now();
    gate.open();
    let mut kill = compare(&first, &second, &after);
    kill.at_s = killed.duration_since(started).as_secs_f64();
    kill.at_rest = at_rest;
    kill.recovery_ms = u64::try_from(recovery.as_millis()).unwrap_or(u64::MAX);
    kill.outage = (killed, back);
    Ok(kill)
}

fn compare(first: &Listing, second: &Listing, after: &Listing) -> Kill {
    let lives: HashMap<u32, u64> = after.values().copied().collect();
    let now = Instant::now();
    let mut kill = Kill {
        at_s: 0.0,
        at_rest: false,
        expected: 0,
        found: 0,
        reclaimed: 0,
        recovery_ms: 0,
        outage: (now, now),
    };
    for (key, place) in first {
        let moved_on = lives.get(&place.0).is_some_and(|sequence| *sequence != place.1);
        if after.contains_key(key) {
            kill.expected += 1;
            kill.found += 1;
        } else if second.get(key) != Some(place) || moved_on {
            kill.reclaimed += 1;
        } else {
            kill.expected += 1;
        }
    }
    kill
}

fn list(socket: &Path) -> anyhow::Result<Listing> {
    let mut config = ClientConfig::new(socket);
    config.call_timeout = Duration::from_secs(20);
    let client = Client::connect(config)?;
    let mut listing = Listing::new();
    let mut query = Inspect { tier: Some(Tier::Nvme), limit: 4096, ..Inspect::default() };
    loop {
        let page = client.inspect(&query)?;
        for row in page.rows {
            if let Some((segment, sequence, _)) = row.nvme {
                listing.insert(row.key, (segment, sequence));
            }
        }
        match page.cursor {
            Some(cursor) => query.cursor = cursor,
            None => return Ok(listing),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(rows: &[(u8, u32, u64)]) -> Listing {
        rows.iter().map(|(key, segment, life)| (BlockKey([*key; 32]), (*segment, *life))).collect()
    }

    #[test]
    fn lost_blocks_are_told_from_reclaimed_ones() {
        let first = listing(&[(1, 0, 9), (2, 0, 9), (3, 1, 9), (4, 2, 9), (5, 3, 9)]);
        let second = listing(&[(1, 0, 9), (2, 0, 9), (3, 1, 10), (4, 2, 9)]);
        // 1 is found, 2 is lost, 3 moved and is lost, 4's segment has another life, 5 was gone.
        let after = listing(&[(1, 0, 9), (7, 2, 11)]);
        let kill = compare(&first, &second, &after);
        assert_eq!((kill.expected, kill.found, kill.reclaimed), (2, 1, 3));
    }
}
