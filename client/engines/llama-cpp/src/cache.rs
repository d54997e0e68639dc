//! The daemon's side of the adapter: keys, the region through which blocks come and go, and the
//! calls. Knows nothing of llama.cpp.
//!
//! No call here fails. A daemon that is away, slow or full makes loads miss and stores vanish, and
//! inference goes on. Never hands out bytes that the daemon did not report as loaded.

use std::ops::Range;
use std::time::{Duration, Instant};

use kvtide_client::blocking::Client;
use kvtide_client::{
    BlockKey, ClientConfig, ClientError, Hit, LoadBlock, Lookup, NamespaceHandle, NamespaceSpec,
    Outcome, RegionHandle, RegionLayout, Ticket, Tier,
};

use crate::llama::Token;

/// Places of the region. Blocks come in by halves: one is loaded while the other is imported.
const PLACES: u32 = 16;

/// How the cache is used.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// The daemon, and how long a call may take.
    pub client: ClientConfig,
    /// Longest time for all loads of one prompt; what has not come by then is computed.
    pub load_timeout: Duration,
    /// Longest time for all stores of one turn.
    pub store_timeout: Duration,
    /// Whether the daemon is told how long prefills take, and what it then says is faster computed
    /// than loaded is computed.
    pub advised: bool,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions {
            client: ClientConfig::default(),
            load_timeout: Duration::from_secs(5),
            store_timeout: Duration::from_secs(5),
            advised: true,
        }
    }
}

/// Blocks that a load brought, by the tier they came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Loaded {
    /// From GPU memory.
    pub device: usize,
    /// From host RAM.
    pub host: usize,
    /// From NVMe.
    pub nvme: usize,
    /// Blocks that the daemon said it has, and that did not come or were not good.
    pub missed: usize,
    /// Blocks that the daemon said it has, those that the engine has itself included. Fewer are
    /// loaded where it advises to compute the others.
    pub offered: usize,
}

impl Loaded {
    /// All of them.
    pub fn blocks(&self) -> usize {
        self.device + self.host + self.nvme
    }

    fn add(&mut self, tier: Tier) {
        match tier {
            Tier::Device => self.device += 1,
            Tier::Host => self.host += 1,
            Tier::Nvme => self.nvme += 1,
        }
    }
}

/// What became of the blocks of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stored {
    /// Taken by the daemon.
    pub stored: usize,
    /// There already, with the same bytes.
    pub present: usize,
    /// Refused, or not in time.
    pub refused: usize,
}

struct Attached {
    namespace: NamespaceHandle,
    region: RegionHandle,
}

/// A namespace and a region of one daemon, which may come and go.
pub struct BlockCache {
    client: Client,
    options: CacheOptions,
    spec: NamespaceSpec,
    block_bytes: u64,
    attached: Option<Attached>,
}

impl BlockCache {
    /// Connects, and keeps trying in the background when nobody is there; the error, if any, says
    /// why this first time failed.
    ///
    /// # Errors
    /// When not even a thread for the client can be started.
    pub fn open(
        options: CacheOptions,
        spec: NamespaceSpec,
        block_bytes: u64,
    ) -> Result<(BlockCache, Option<ClientError>), ClientError> {
        let (client, first) = match Client::connect(options.client.clone()) {
            Ok(client) => (client, None),
            Err(error) => (Client::connect_later(options.client.clone())?, Some(error)),
        };
        let mut cache = BlockCache { client, options, spec, block_bytes, attached: None };
        let first = first.or_else(|| cache.attach().err());
        Ok((cache, first))
    }

    /// The client below.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    fn attach(&mut self) -> Result<(), ClientError> {
        if self.attached.as_ref().is_some_and(|attached| attached.namespace.key_changed()) {
            self.attached = None;
        }
        if self.attached.is_none() && self.client.is_connected() {
            let namespace = self.client.open_namespace(&self.spec)?;
            let layout = RegionLayout::opaque(PLACES, self.block_bytes);
            let region = self.client.create_region(layout)?;
            self.attached = Some(Attached { namespace, region });
        }
        Ok(())
    }

    fn keys(&mut self, tokens: &[Token]) -> Vec<BlockKey> {
        // What fails here is tried again at the next turn.
        let _ = self.attach();
        let tokens: Vec<u32> = tokens.iter().map(|token| token.cast_unsigned()).collect();
        self.attached.as_ref().map_or(Vec::new(), |attached| attached.namespace.chain(&tokens))
    }

    /// Brings the longest run of blocks that follows the first `own` blocks of `tokens` (which the
    /// engine has itself) and hands each to `import`, in order, until one is missing or `import`
    /// says no. Nothing is handed out when the daemon has no more than `own` blocks.
    pub fn load(
        &mut self,
        tokens: &[Token],
        own: usize,
        mut import: impl FnMut(usize, &[u8]) -> bool,
    ) -> Loaded {
        let mut loaded = Loaded::default();
        let keys = self.keys(tokens);
        let Some(attached) = self.attached.as_ref().filter(|_| keys.len() > own) else {
            return loaded;
        };
        let until = Instant::now() + self.options.load_timeout;
        let lease = self.options.load_timeout + self.options.client.call_timeout;
        let found = self.client.lookup(&[(&attached.namespace, &keys)], lease);
        let Lookup::Hit(Hit { blocks, advice, lease: Some(lease), .. }) = found else {
            return loaded;
        };
        loaded.offered = blocks;
        let advised = usize::try_from(advice.load).unwrap_or(usize::MAX);
        let blocks = if self.options.advised { blocks.min(advised) } else { blocks };
        let half = usize::try_from(PLACES / 2).unwrap_or(1);
        let start = |batch: usize, blocks: Range<usize>| {
            let first = PLACES / 2 * u32::from(batch % 2 == 1);
            let keys = keys.get(blocks).unwrap_or(&[]);
            let list: Vec<LoadBlock> = keys
                .iter()
                .zip(first..first + PLACES / 2)
                .map(|(key, place)| LoadBlock { key: *key, place })
                .collect();
            let (namespace, region) = (&attached.namespace, &attached.region);
            (self.client.load(&lease, namespace, region, &list, Duration::ZERO), list)
        };
        let mut bytes = vec![0; usize::try_from(self.block_bytes).unwrap_or(0)];
        let batches: Vec<Range<usize>> =
            (own..blocks).step_by(half).map(|first| first..blocks.min(first + half)).collect();
        let mut next = batches.first().map(|first| start(0, first.clone()));
        for (at, batch) in batches.iter().enumerate() {
            let Some((ticket, list)) = next.take() else { break };
            let outcomes = self.wait(ticket, until);
            // Behind a block that did not come, nothing is of use.
            let all = outcomes.iter().all(|outcome| matches!(outcome, Outcome::Loaded(_)));
            let following = batches.get(at + 1).filter(|_| all);
            next = following.map(|batch| start(at + 1, batch.clone()));
            for ((block, outcome), place) in batch.clone().zip(outcomes).zip(&list) {
                let good = matches!(outcome, Outcome::Loaded(_))
                    && attached.region.read_block(place.place, &mut bytes).is_ok()
                    && import(block, &bytes);
                match outcome {
                    Outcome::Loaded(tier) if good => loaded.add(tier),
                    _ => {
                        loaded.missed = blocks - block;
                        if let Some((ticket, _)) = next {
                            self.wait(ticket, until);
                        }
                        return loaded;
                    }
                }
            }
        }
        loaded
    }

    /// Tells the daemon how long computing took: so many tokens, behind so many that were there.
    pub fn report_prefill(&self, tokens: usize, context: usize, took: Duration) {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        if let Some(attached) = self.attached.as_ref().filter(|_| self.options.advised) {
            let namespace = &attached.namespace;
            self.client.report_prefill(namespace, count(tokens), count(context), took, None);
        }
    }

    /// The outcomes of a ticket; when it does not end in time, it is given up and none of its
    /// blocks counts.
    fn wait(&self, ticket: Ticket, until: Instant) -> Vec<Outcome> {
        let blocks = ticket.blocks();
        let left = until.saturating_duration_since(Instant::now());
        let late = |_| vec![Outcome::Busy; blocks];
        self.client.wait(ticket, left).unwrap_or_else(late)
    }

    /// Stores those full blocks of `tokens` that the daemon does not have. `export` writes the
    /// bytes of one block, or nothing when the engine cannot.
    pub fn store(
        &mut self,
        tokens: &[Token],
        conversation: u64,
        mut export: impl FnMut(usize, &mut Vec<u8>),
    ) -> Stored {
        let mut sum = Stored::default();
        let keys = self.keys(tokens);
        let Some(attached) = self.attached.as_ref().filter(|_| !keys.is_empty()) else {
            return sum;
        };
        let until = Instant::now() + self.options.store_timeout;
        let found = self.client.try_lookup(&[(&attached.namespace, &keys)], Duration::ZERO);
        let Ok(found) = found else {
            sum.refused = keys.len();
            return sum;
        };
        let mut bytes = Vec::new();
        let mut first = found.blocks();
        while first < keys.len() {
            let mut places = Vec::new();
            for (block, place) in (first..keys.len()).zip(0..PLACES) {
                export(block, &mut bytes);
                if attached.region.write_block(place, &bytes).is_err() {
                    break;
                }
                places.push(place);
            }
            let end = first + places.len();
            let keys_to_end = keys.get(..end).unwrap_or(&[]);
            let left = until.saturating_duration_since(Instant::now());
            let outcomes = self.client.store_prefix(
                &attached.namespace,
                conversation,
                &attached.region,
                keys_to_end,
                &places,
                left,
            );
            let count = |wanted| outcomes.iter().filter(|outcome| **outcome == wanted).count();
            sum.stored += count(Outcome::Stored);
            sum.present += count(Outcome::Present);
            let good = sum.stored + sum.present + found.blocks();
            if good < end || places.is_empty() {
                // A chain with a hole is of no use beyond it.
                sum.refused = keys.len() - good.min(keys.len());
                break;
            }
            first = end;
        }
        sum
    }
}
