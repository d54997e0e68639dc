//! All that this engine does to reload its KV from kvtide instead of computing it again.

use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{
    ClientConfig, ClientError, ElementType, KvLayout, LoadedPrefix, Lookup, Model, Namespace,
    NamespaceHandle, NamespaceSpec, Outcome, RankScope, RegionHandle, RegionLayout, Run,
};

use crate::pool::{Pool, block_bytes};
use crate::weights::Weights;

/// Raised whenever other bytes come to stand in a block for the same weights and tokens: when their
/// order changes, or the arithmetic.
const PAGE_LAYOUT_VERSION: u32 = 1;

/// Whose KV this is: all that changes the bytes of a block, and nothing else.
pub fn namespace(weights: &Weights, tokens_per_block: u32) -> Namespace {
    let shape = weights.shape();
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    Namespace {
        model: Model {
            weights: weights.digest().to_owned(),
            revision: "smallengine".to_owned(),
            adapter: String::new(),
        },
        layout: KvLayout {
            layers: count(shape.layers),
            kv_heads: count(shape.kv_heads),
            head_dim: count(shape.head_dim),
            element: ElementType::Bf16,
            tokens_per_block,
            kv_group: 0,
            ranks: RankScope::Rank { rank: 0, world: 1 },
            page_layout_version: PAGE_LAYOUT_VERSION,
        },
        salt: String::new(),
    }
}

/// A connection to kvtide, for one model.
pub struct Cache {
    client: Client,
    namespace: NamespaceHandle,
    wait: Duration,
}

impl Cache {
    /// Connects to the daemon. `wait` is the longest time that a load or a store may take.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn connect(
        config: ClientConfig,
        weights: &Weights,
        tokens_per_block: u32,
        wait: Duration,
    ) -> Result<Cache, ClientError> {
        Cache::open(config, namespace(weights, tokens_per_block), wait)
    }

    /// As [`Cache::connect`], with a namespace of the caller's.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn open(
        config: ClientConfig,
        namespace: Namespace,
        wait: Duration,
    ) -> Result<Cache, ClientError> {
        let client = Client::connect(config)?;
        let namespace = client.open_namespace(&NamespaceSpec::own(namespace))?;
        Ok(Cache { client, namespace, wait })
    }

    /// A pool that the daemon copies blocks from and to.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn pool(&self, places: u32) -> Result<Pool, ClientError> {
        let layout = &self.namespace.spec().namespace.layout;
        let region = RegionLayout::opaque(places, block_bytes(layout) as u64);
        Ok(Pool::region(layout, self.client.create_region(region)?))
    }

    /// Loads what kvtide has of a prompt and advises to load: its block i into place i of `places`.
    pub(crate) fn load(
        &self,
        region: &RegionHandle,
        prompt: &[u32],
        places: &[u32],
    ) -> LoadedPrefix {
        let keys = self.namespace.chain(all_but_last(prompt));
        self.client.load_prefix(&self.namespace, region, &keys, places, self.wait)
    }

    /// Stores the full blocks of a sequence behind the first `known`, which kvtide has already.
    pub(crate) fn store(
        &self,
        region: &RegionHandle,
        conversation: u64,
        sequence: &[u32],
        places: &[u32],
        known: usize,
    ) -> Vec<Outcome> {
        let keys = self.namespace.chain(sequence);
        let new = places.get(known..keys.len()).unwrap_or_default();
        self.client.store_prefix(&self.namespace, conversation, region, &keys, new, self.wait)
    }

    /// Tells kvtide how long computing took: so many tokens, behind so many that were there.
    pub(crate) fn report_prefill(&self, tokens: usize, context: usize, took: Duration) {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        self.client.report_prefill(&self.namespace, count(tokens), count(context), took, None);
    }

    /// Where the blocks of a prompt lie that a turn would load now.
    pub fn find(&self, prompt: &[u32]) -> Vec<Run> {
        let keys = self.namespace.chain(all_but_last(prompt));
        match self.client.lookup(&[(&self.namespace, &keys)], Duration::ZERO) {
            Lookup::Hit(hit) => hit.runs,
            Lookup::Miss => Vec::new(),
        }
    }

    /// The client.
    pub fn client(&self) -> &Client {
        &self.client
    }
}

/// The last token is always computed, because its logits are wanted.
fn all_but_last(prompt: &[u32]) -> &[u32] {
    prompt.split_last().map_or(&[], |(_, before)| before)
}
