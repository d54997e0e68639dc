//! The loop that drives every peer alike: one turn stores a set of new blocks and loads it again.
//!
//! Timed are the calls and nothing else: payloads are made in the hands' memory before, that memory
//! is overwritten between storing and loading, so that a load which does nothing is seen, and every
//! loaded byte is compared after. A store ends when all blocks are where the row says.

use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

use anyhow::{anyhow, ensure};
use kvtide_tiers::block::BlockKey;

use super::peer::{About, Block, CHAIN, Hand, Loaded, Peer};
use crate::{
    payload::Payload,
    process::{own_seconds, thread_seconds},
};

/// What lies in a place before something is loaded to it.
const SCRUBBED: u8 = 0xa5;

/// Stores or loads of one turn.
#[derive(Clone, Debug, Default)]
pub(super) struct Timed {
    pub(super) took: Duration,
    pub(super) bytes: u64,
    /// Of each block: how long the call took that moved it.
    pub(super) calls: Vec<Duration>,
    pub(super) own_cpu_s: f64,
    pub(super) server_cpu_s: f64,
}

impl Timed {
    pub(super) fn gb_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.took.as_secs_f64().max(1e-9)
    }
}

/// What one turn of one peer gave.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    pub(super) store: Timed,
    pub(super) load: Timed,
    pub(super) verified: u64,
    pub(super) missed: u64,
    /// Loads of a disk's row that memory answered.
    pub(super) from_memory: u64,
    pub(super) wrong_bytes: u64,
}

/// The blocks of a turn, in one share for each of the peer's threads. No other turn has their keys,
/// and no block their bytes.
pub(super) fn shares(about: &About, row: usize, round: u32, blocks: usize) -> Vec<Vec<Block>> {
    let share = blocks / about.threads;
    let key = |number: usize| {
        let mut bytes = [0xbf; 32];
        let words = [row as u64, u64::from(round), number as u64];
        for (out, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *out = word.to_le_bytes();
        }
        BlockKey(bytes)
    };
    let block = |first: usize, place: usize| {
        let first_of_chain = place.is_multiple_of(CHAIN);
        let before = if first_of_chain { BlockKey::ROOT } else { key(first + place - 1) };
        Block {
            key: key(first + place),
            parent: before,
            position: (place % CHAIN) as u32,
            place: place as u32,
        }
    };
    let of = |thread: usize| (0..share).map(|place| block(thread * share, place)).collect();
    (0..about.threads).map(of).collect()
}

/// One turn of one peer.
///
/// # Errors
/// The peer failed. What it does not have any more is no failure.
pub(super) fn turn(
    peer: &mut dyn Peer,
    shares: &[Vec<Block>],
    block_bytes: usize,
) -> anyhow::Result<Turn> {
    let batch = peer.about().batch;
    let payload = Payload::new();
    peer.open()?;
    ensure!(peer.hands().len() == shares.len(), "as many hands as shares");
    each(peer, shares, |hand, blocks| {
        let mut buffer = vec![0; block_bytes];
        for block in blocks {
            payload.fill(&block.key, &mut buffer);
            hand.put(block.place, &buffer)?;
        }
        Ok(())
    })?;
    let mut turn = Turn::default();
    (turn.store, _) = timed(peer, shares, true, |hand, blocks| store(hand, blocks, batch))?;
    turn.store.bytes = turn.store.calls.len() as u64 * block_bytes as u64;
    each(peer, shares, |hand, blocks| {
        let scrubbed = vec![SCRUBBED; block_bytes];
        blocks.iter().try_for_each(|block| hand.put(block.place, &scrubbed))
    })?;
    peer.cool(shares)?;
    let (load, answers) = timed(peer, shares, false, |hand, blocks| load(hand, blocks, batch))?;
    turn.load = load;
    turn.load.bytes = turn.load.calls.len() as u64 * block_bytes as u64;
    check(peer, shares, &answers, block_bytes, &mut turn)?;
    peer.close(shares)?;
    Ok(turn)
}

/// How long each call took, once for every block in it, and what the blocks were.
type Calls = (Vec<Duration>, Vec<Loaded>);

fn store(hand: &mut dyn Hand, blocks: &[Block], batch: usize) -> anyhow::Result<Calls> {
    let mut calls = Vec::with_capacity(blocks.len());
    for part in blocks.chunks(batch) {
        let started = Instant::now();
        hand.store(part)?;
        let took = started.elapsed();
        calls.extend(part.iter().map(|_| took));
    }
    Ok((calls, Vec::new()))
}

fn load(hand: &mut dyn Hand, blocks: &[Block], batch: usize) -> anyhow::Result<Calls> {
    let mut calls = Vec::with_capacity(blocks.len());
    let mut answers = Vec::with_capacity(blocks.len());
    for chain in blocks.chunks(CHAIN) {
        hand.find(chain)?;
        for part in chain.chunks(batch) {
            let before = answers.len();
            let started = Instant::now();
            hand.load(part, &mut answers)?;
            let took = started.elapsed();
            ensure!(answers.len() == before + part.len(), "as many answers as blocks");
            // A miss is quick, and no load.
            let hits = answers.iter().skip(before).filter(|answer| **answer != Loaded::Miss);
            calls.extend(hits.map(|_| took));
        }
    }
    hand.done()?;
    Ok((calls, answers))
}

/// Runs `work` on all hands at once, and measures from the start of the first to the end of the
/// last; with `settle`, until the peer has settled.
fn timed(
    peer: &mut dyn Peer,
    shares: &[Vec<Block>],
    settle: bool,
    work: impl Fn(&mut dyn Hand, &[Block]) -> anyhow::Result<Calls> + Sync,
) -> anyhow::Result<(Timed, Vec<Vec<Loaded>>)> {
    let server = peer.server();
    let server_cpu_s = || server.and_then(thread_seconds).unwrap_or(0.0);
    let ready = Barrier::new(shares.len() + 1);
    let (results, started, own_before, server_before) = std::thread::scope(|scope| {
        let (ready, work) = (&ready, &work);
        let threads: Vec<_> = peer
            .hands()
            .iter_mut()
            .zip(shares)
            .map(|(hand, blocks)| {
                scope.spawn(move || {
                    ready.wait();
                    work(&mut **hand, blocks)
                })
            })
            .collect();
        let (own, server) = (own_seconds(), server_cpu_s());
        let started = Instant::now();
        ready.wait();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        (results, started, own, server)
    });
    let mut timed = Timed::default();
    let mut answers = Vec::new();
    for result in results {
        let (calls, of_hand) = result.map_err(|_| anyhow!("a thread panicked"))??;
        timed.calls.extend(calls);
        answers.push(of_hand);
    }
    if settle {
        peer.settle()?;
    }
    timed.took = started.elapsed();
    timed.own_cpu_s = own_seconds() - own_before;
    timed.server_cpu_s = (server_cpu_s() - server_before).max(0.0);
    Ok((timed, answers))
}

/// Runs `work` on all hands at once.
fn each<T: Send>(
    peer: &mut dyn Peer,
    shares: &[Vec<Block>],
    work: impl Fn(&mut dyn Hand, &[Block]) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let hands = peer.hands().iter_mut().zip(shares);
        let threads: Vec<_> =
            hands.map(|(hand, blocks)| scope.spawn(move || work(&mut **hand, blocks))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<T>>| {
            thread.join().map_err(|_| anyhow!("a thread panicked"))?
        };
        threads.into_iter().map(join).collect()
    })
}

/// Compares every byte of what was loaded.
fn check(
    peer: &mut dyn Peer,
    shares: &[Vec<Block>],
    answers: &[Vec<Loaded>],
    block_bytes: usize,
    turn: &mut Turn,
) -> anyhow::Result<()> {
    let payload = Payload::new();
    let found = each(peer, shares, |hand, blocks| {
        let mut buffer = vec![0; block_bytes];
        let mut wrong = Vec::with_capacity(blocks.len());
        for block in blocks {
            hand.take(block.place, &mut buffer)?;
            let at = payload.check(&block.key, &buffer);
            wrong.push(at.map_or(0, |at| (block_bytes - at) as u64));
        }
        Ok(wrong)
    })?;
    for (answer, wrong) in answers.iter().flatten().zip(found.into_iter().flatten()) {
        match answer {
            Loaded::Miss => {
                turn.missed += 1;
                continue;
            }
            Loaded::Hit => {}
            Loaded::FromMemory => turn.from_memory += 1,
        }
        turn.verified += 1;
        turn.wrong_bytes += wrong;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::peers::peer::{Carrier, Group, Pool, hands};

    /// Keeps blocks in a map, each thread its own, and loses and breaks what it is told to.
    struct Map(HashMap<BlockKey, Vec<u8>>, fn(u32) -> Loaded);

    impl Carrier for Map {
        fn store(&mut self, block: &Block, bytes: &[u8]) -> anyhow::Result<()> {
            self.0.insert(block.key, bytes.to_vec());
            Ok(())
        }

        fn load(&mut self, block: &Block, into: &mut [u8]) -> anyhow::Result<Loaded> {
            let answer = self.1(block.place);
            if answer == Loaded::Hit {
                into.copy_from_slice(&self.0[&block.key]);
            }
            Ok(answer)
        }
    }

    struct Maps(About, Vec<Box<dyn Hand>>);

    impl Peer for Maps {
        fn about(&self) -> &About {
            &self.0
        }

        fn hands(&mut self) -> &mut [Box<dyn Hand>] {
            &mut self.1
        }
    }

    fn maps(lose: fn(u32) -> Loaded) -> Maps {
        let pool = Pool::make(140, 8192).unwrap();
        let about = About {
            name: "map".into(),
            group: Group::Ram,
            ours: false,
            stored_to: "RAM",
            loaded_from: "RAM",
            verifies: false,
            threads: 2,
            batch: 1,
        };
        Maps(about, hands(&pool, 70, [Map(HashMap::new(), lose), Map(HashMap::new(), lose)]))
    }

    #[test]
    fn shares_have_chains_and_keys_of_their_own() {
        let peer = maps(|_| Loaded::Hit);
        let mut seen = HashSet::new();
        for (row, round) in [(0, 0), (0, 1), (1, 0)] {
            let shares = shares(peer.about(), row, round, 140);
            assert_eq!(shares.iter().map(Vec::len).collect::<Vec<_>>(), [70, 70]);
            for share in &shares {
                assert_eq!((share[0].parent, share[64].parent), (BlockKey::ROOT, BlockKey::ROOT));
                assert_eq!((share[65].parent, share[65].position), (share[64].key, 1));
            }
            assert!(shares.iter().flatten().all(|block| seen.insert(block.key)));
        }
    }

    #[test]
    fn a_turn_counts_hits_misses_and_what_was_never_written() {
        let mut good = maps(|_| Loaded::Hit);
        let blocks = shares(good.about(), 0, 0, 140);
        let turn = super::turn(&mut good, &blocks, 8192).unwrap();
        assert_eq!((turn.verified, turn.missed, turn.wrong_bytes), (140, 0, 0));
        assert_eq!((turn.store.bytes, turn.load.bytes), (140 * 8192, 140 * 8192));
        assert_eq!((turn.store.calls.len(), turn.load.calls.len()), (140, 140));

        let mut lossy = maps(|place| if place < 10 { Loaded::Miss } else { Loaded::Hit });
        let turn = super::turn(&mut lossy, &blocks, 8192).unwrap();
        assert_eq!((turn.verified, turn.missed, turn.wrong_bytes), (120, 20, 0));
        assert_eq!(turn.load.bytes, 120 * 8192);

        // It says that it loaded one block of each share, and wrote nothing.
        let mut liar = maps(|place| if place == 3 { Loaded::FromMemory } else { Loaded::Hit });
        let turn = super::turn(&mut liar, &blocks, 8192).unwrap();
        assert_eq!((turn.from_memory, turn.verified), (2, 140));
        assert!(turn.wrong_bytes > 2 * 8000, "{}", turn.wrong_bytes);
    }
}
