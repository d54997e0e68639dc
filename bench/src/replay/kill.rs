//! Kills the daemon during a replay and checks what it finds again.
//!
//! Before a kill the blocks on nvme are listed, then 150 ms pass (descriptors are committed after
//! 100 ms at the latest), then they are listed again. What both lists have in the same segment and
//! the same life of it must be there after the restart. Reclaim goes on all the while, so some
//! missing blocks are no loss and are counted apart: those that the second list no longer has,
//! those whose segment had begun another life on disk when the daemon died (its headers are read
//! between kill and restart), and those of as many of the oldest vanished segments as the daemon
//! says it reclaimed while the second list was made. Also apart, under a name of their own, are
//! vanished segments that the new daemon says it reclaimed before it could be asked.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context;
use kvtide_client::{ClientConfig, Inspect, blocking::Client};
use kvtide_tiers::{
    block::BlockKey,
    catalog::{CatalogStats, Tier},
    segment::{FsckOptions, fsck},
};
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

/// What was known before the daemon died, and what its disk said then.
#[derive(Debug, Default)]
struct Before {
    first: Listing,
    second: Listing,
    /// The sequence in the header of each segment.
    headers: HashMap<u32, u64>,
    /// Segments reclaimed from the start of the second listing to just before the kill.
    reclaimed_meanwhile: u64,
}

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
    /// Blocks whose segment was reclaimed between the first listing and the kill.
    pub reclaimed: u64,
    /// Blocks whose segment the new daemon reclaimed before it was asked what it has.
    pub reclaimed_after: u64,
    /// Damage that a check of the store found between kill and restart: writes that were cut off.
    pub problems: u64,
    /// From the start of the new process to its first answer, milliseconds.
    pub recovery_ms: u64,
    /// When the daemon was away, for the coordinator.
    #[serde(skip)]
    pub outage: (Instant, Instant),
}

/// Kills the daemon, starts it again, and compares what it had with what it has. Requests are held
/// back from the kill (at rest: from the start) until the comparison is done. Also returns the
/// daemon's counters just before it died.
///
/// # Errors
/// The daemon ended by itself, did not come back, or could not be asked.
pub(super) fn kill_once(
    daemon: &mut Daemon,
    gate: &Gate,
    started: Instant,
    at_rest: bool,
) -> anyhow::Result<(Kill, CatalogStats)> {
    if at_rest {
        gate.close();
        if !gate.wait_idle(IDLE_MAX) {
            anyhow::bail!("requests under way did not end within {} s", IDLE_MAX.as_secs());
        }
    }
    let socket = daemon.spec().socket();
    let client = connect(&socket)?;
    let mut before = Before { first: list(&client)?, ..Before::default() };
    std::thread::sleep(SETTLE);
    let reclaimed = stats(&client)?.segments_reclaimed;
    before.second = list(&client)?;
    let last = stats(&client)?;
    before.reclaimed_meanwhile = last.segments_reclaimed.saturating_sub(reclaimed);
    gate.close();
    let killed = Instant::now();
    daemon.kill()?;
    drop(client);
    let problems = read_headers(&daemon.spec().store, &mut before.headers)?;
    let recovery = daemon.start_again()?;
    let client = connect(&socket)?;
    let after = list(&client).context("after the restart")?;
    let reclaimed_after = stats(&client)?.segments_reclaimed;
    let back = Instant::now();
    gate.open();
    let counts = compare(&before, &after, reclaimed_after);
    let kill = Kill {
        at_s: killed.duration_since(started).as_secs_f64(),
        at_rest,
        expected: counts.expected,
        found: counts.found,
        reclaimed: counts.reclaimed,
        reclaimed_after: counts.reclaimed_after,
        problems,
        recovery_ms: u64::try_from(recovery.as_millis()).unwrap_or(u64::MAX),
        outage: (killed, back),
    };
    Ok((kill, last))
}

/// What became of the blocks of the first list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    found: u64,
    expected: u64,
    reclaimed: u64,
    reclaimed_after: u64,
}

fn compare(before: &Before, after: &Listing, reclaimed_after: u64) -> Counts {
    let mut counts = Counts::default();
    // Missing blocks by segment, oldest first.
    let mut missing: BTreeMap<(u64, u32), u64> = BTreeMap::new();
    for (key, place) in &before.first {
        if after.contains_key(key) {
            counts.found += 1;
            counts.expected += 1;
        } else if before.second.get(key) != Some(place)
            || before.headers.get(&place.0) != Some(&place.1)
        {
            counts.reclaimed += 1;
        } else {
            *missing.entry((place.1, place.0)).or_default() += 1;
        }
    }
    let alive: HashSet<(u32, u64)> = after.values().copied().collect();
    let (mut meanwhile, mut then) = (before.reclaimed_meanwhile, reclaimed_after);
    for ((sequence, segment), blocks) in missing {
        let vanished = !alive.contains(&(segment, sequence));
        if vanished && meanwhile > 0 {
            meanwhile -= 1;
            counts.reclaimed += blocks;
        } else if vanished && then > 0 {
            then -= 1;
            counts.reclaimed_after += blocks;
        } else {
            counts.expected += blocks;
        }
    }
    counts
}

/// The sequence of each segment as its header says. Returns the number of problems found.
fn read_headers(store: &Path, headers: &mut HashMap<u32, u64>) -> anyhow::Result<u64> {
    let options = FsckOptions { verify_payloads: false, problems_max: 0 };
    let report = fsck(store, &options, &mut |_, _| {})?;
    let sequences = report.segments.iter().filter_map(|of| Some((of.segment, of.sequence?)));
    headers.extend(sequences);
    Ok(report.problems_total)
}

fn connect(socket: &Path) -> anyhow::Result<Client> {
    let mut config = ClientConfig::new(socket);
    config.call_timeout = Duration::from_secs(20);
    Client::connect(config).context("cannot ask the daemon what it has")
}

fn stats(client: &Client) -> anyhow::Result<CatalogStats> {
    client.stats()?.catalog.context("the daemon shows its counters to its owner")
}

fn list(client: &Client) -> anyhow::Result<Listing> {
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
        let first =
            listing(&[(1, 0, 9), (2, 0, 9), (3, 1, 8), (4, 2, 7), (5, 3, 6), (6, 4, 5), (7, 5, 4)]);
        let second = listing(&[(1, 0, 9), (2, 0, 9), (4, 2, 7), (5, 3, 6), (6, 4, 5), (7, 5, 4)]);
        let headers = HashMap::from([(0, 9), (1, 8), (2, 10), (3, 6), (4, 5), (5, 4)]);
        // 1 is found, 2 is lost beside it, 3 was reclaimed early, 4's segment has another life,
        // and of the segments of 5, 6 and 7 two may have been reclaimed: the oldest ones.
        let after = listing(&[(1, 0, 9), (9, 2, 10)]);
        let mut before = Before { first, second, headers, reclaimed_meanwhile: 2 };
        let counts = |expected, reclaimed, reclaimed_after| {
            let found = 1;
            Counts { found, expected, reclaimed, reclaimed_after }
        };
        assert_eq!(compare(&before, &after, 0), counts(3, 4, 0));
        assert_eq!(compare(&before, &after, 4), counts(2, 4, 1));
        before.reclaimed_meanwhile = 0;
        assert_eq!(compare(&before, &after, 0), counts(5, 2, 0));
    }
}
