//! A client process of the demo: stands for an inference engine. It has a paged pool, asks kvtide
//! for the prompt of each turn, "computes" what is missing (the bytes follow from the key), and
//! stores what is new. It compares every byte that it is given.

use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvtide_client::{
    BlockKey, ClientConfig, ClientError, NamespaceHandle, NamespaceSpec, Outcome, RegionHandle,
    StoreBlock, Tier, blocking,
};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::wire::{Said, Turn, TurnDone};
use super::{content, script};

/// Longest time for the loads, and for the stores, of one turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// What lies in a place before a load, so that an earlier turn's bytes do not pass for loaded ones.
const SCRUB: u8 = 0xee;

/// Runs until standard input ends. The argument is the daemon's socket.
pub(crate) fn main(args: &[std::ffi::OsString]) -> ExitCode {
    // Without its parent nobody would end this process.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let Some(socket) = args.first().map(PathBuf::from) else {
        return ExitCode::from(2);
    };
    match serve(&socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = say(&Said::Failed(error));
            ExitCode::from(1)
        }
    }
}

fn serve(socket: &Path) -> Result<(), String> {
    let mut engine = Engine::start(socket).map_err(|error| error.to_string())?;
    say(&Said::Ready)?;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let turn: Turn = serde_json::from_str(&line).map_err(|error| error.to_string())?;
        let done = engine.take(turn).map_err(|error| error.to_string())?;
        say(&Said::Done(done))?;
    }
    Ok(())
}

fn say(said: &Said) -> Result<(), String> {
    let mut line = serde_json::to_string(said).map_err(|error| error.to_string())?;
    line.push('\n');
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(line.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| error.to_string())
}

struct Engine {
    client: blocking::Client,
    namespace: NamespaceHandle,
    pool: RegionHandle,
    block: Vec<u8>,
}

impl Engine {
    fn start(socket: &Path) -> Result<Engine, ClientError> {
        let config = ClientConfig {
            name: "kvtide-demo".to_owned(),
            backoff: Duration::from_millis(20),
            backoff_max: Duration::from_millis(200),
            ..ClientConfig::new(socket)
        };
        let client = blocking::Client::connect(config)?;
        let namespace = client.open_namespace(&NamespaceSpec::own(script::namespace()))?;
        let pool = client.create_region(script::pool_layout())?;
        let block = vec![0; usize::try_from(pool.block_bytes()).unwrap_or(0)];
        Ok(Engine { client, namespace, pool, block })
    }

    /// Takes one turn of a conversation. A cache that is slow, gone or empty costs time, not an
    /// error.
    fn take(&mut self, turn: Turn) -> Result<TurnDone, ClientError> {
        if self.namespace.key_changed() {
            return Err(ClientError::KeyChanged);
        }
        let tokens = script::tokens(turn.conversation, script::total_tokens(turn.turn));
        let keys = self.namespace.chain(&tokens);
        let places: Vec<u32> = (0..).take(keys.len()).map(script::place).collect();
        let prompt_blocks = script::prompt_tokens(turn.turn) / script::BLOCK_TOKENS;
        let mut done = TurnDone {
            conversation: turn.conversation,
            turn: turn.turn,
            prompt_blocks: prompt_blocks as u64,
            ..TurnDone::default()
        };
        self.scrub(&places)?;
        let prompt = keys.get(..prompt_blocks).unwrap_or(&keys);
        let reused = self.load(prompt, &places, &mut done)?;
        self.compute(&keys, &places, reused)?;
        self.store(turn.conversation, &keys, &places, reused, &mut done);
        Ok(done)
    }

    fn scrub(&mut self, places: &[u32]) -> Result<(), ClientError> {
        self.block.fill(SCRUB);
        places.iter().try_for_each(|place| self.pool.write_block(*place, &self.block))
    }

    /// Loads what kvtide has of the prompt, and compares it. Answers the number of blocks, from the
    /// first one on, that need not be computed.
    fn load(
        &mut self,
        prompt: &[BlockKey],
        places: &[u32],
        done: &mut TurnDone,
    ) -> Result<usize, ClientError> {
        let start = Instant::now();
        let pool = self.pool.clone();
        let loaded = self.client.load_prefix(&self.namespace, &pool, prompt, places, TURN_TIMEOUT);
        done.load_us = micros(start);
        for (at, ((outcome, key), place)) in
            loaded.outcomes.iter().zip(prompt).zip(places).enumerate()
        {
            let tier = match outcome {
                Outcome::Loaded(tier) => tier,
                Outcome::Missed(reason) => {
                    *done.missed_in_load.entry(format!("{reason:?}")).or_default() += 1;
                    continue;
                }
                _ => continue,
            };
            self.pool.read_block(*place, &mut self.block)?;
            done.wrong_bytes += content::wrong_bytes(key, &self.block);
            done.blocks_verified += 1;
            done.bytes_loaded += self.block.len() as u64;
            if at < loaded.blocks {
                match tier {
                    Tier::Device => done.blocks_hit_device += 1,
                    Tier::Host => done.blocks_hit_host += 1,
                    Tier::Nvme => done.blocks_hit_nvme += 1,
                }
            }
        }
        done.blocks_missed = (prompt.len() - loaded.blocks.min(prompt.len())) as u64;
        if !loaded.late.is_empty() && self.renew_pool() {
            return Ok(0);
        }
        Ok(loaded.blocks)
    }

    /// Makes what kvtide did not have, and the answer.
    fn compute(
        &mut self,
        keys: &[BlockKey],
        places: &[u32],
        from: usize,
    ) -> Result<(), ClientError> {
        for (key, place) in keys.iter().zip(places).skip(from) {
            content::fill(key, &mut self.block);
            self.pool.write_block(*place, &self.block)?;
        }
        Ok(())
    }

    /// Gives what is new to kvtide. Whatever it does not take is only a later miss.
    fn store(
        &mut self,
        conversation: usize,
        keys: &[BlockKey],
        places: &[u32],
        from: usize,
        done: &mut TurnDone,
    ) {
        let parents = std::iter::once(&BlockKey::ROOT).chain(keys);
        let blocks: Vec<StoreBlock> = keys
            .iter()
            .zip(parents)
            .zip(places)
            .zip(0..)
            .skip(from)
            .map(|(((key, parent), place), position)| StoreBlock {
                key: *key,
                parent: *parent,
                position,
                tokens: script::BLOCK_TOKENS as u32,
                place: *place,
            })
            .collect();
        let start = Instant::now();
        let number = 1 + conversation as u64;
        let ticket = self.client.store(&self.namespace, number, &self.pool, &blocks, TURN_TIMEOUT);
        let ended = self.client.wait(ticket, TURN_TIMEOUT);
        done.store_us = micros(start);
        let block_bytes = self.pool.block_bytes();
        // The daemon may still read a pool whose store was given up.
        let outcomes = ended.unwrap_or_else(|late| {
            self.renew_pool();
            vec![Outcome::Busy; late.blocks()]
        });
        for outcome in outcomes {
            match outcome {
                Outcome::Stored => {
                    done.blocks_stored += 1;
                    done.bytes_stored += block_bytes;
                }
                Outcome::Present => done.blocks_stored += 1,
                _ => done.blocks_not_stored += 1,
            }
        }
    }

    /// Takes another pool, because a load or store that was given up may still use the old one.
    /// Answers whether there is one; without a daemon there is none, and nothing can be stored.
    fn renew_pool(&mut self) -> bool {
        match self.client.create_region(script::pool_layout()) {
            Ok(pool) => {
                self.pool = pool;
                true
            }
            Err(_) => false,
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
