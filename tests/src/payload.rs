//! Namespaces, tokens and bytes of the tests. A block's bytes follow from its key, so whoever loads
//! it can tell whether they are right.

use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{
    BlockKey, ClientError, ElementType, KvLayout, Model, Namespace, NamespaceHandle, NamespaceSpec,
    Outcome, RankScope, RegionHandle, RegionLayout,
};

/// Tokens in each block.
const TOKENS_PER_BLOCK: u32 = 4;

/// A namespace that differs from others in `revision` only.
pub fn namespace(revision: &str) -> Namespace {
    Namespace {
        model: Model {
            weights: "sha256:0123".into(),
            revision: revision.into(),
            adapter: String::new(),
        },
        layout: KvLayout {
            layers: 2,
            kv_heads: 1,
            head_dim: 64,
            element: ElementType::Bf16,
            tokens_per_block: TOKENS_PER_BLOCK,
            kv_group: 0,
            ranks: RankScope::SameOnAll,
            page_layout_version: 1,
        },
        salt: String::new(),
    }
}

/// Tokens of a prompt of `blocks` full blocks; another `seed` is another prompt from its first
/// token on.
pub fn tokens(seed: u32, blocks: u32) -> Vec<u32> {
    tokens_of(seed, blocks, TOKENS_PER_BLOCK)
}

/// As [`tokens`], where a block has `per_block`.
pub(crate) fn tokens_of(seed: u32, blocks: u32, per_block: u32) -> Vec<u32> {
    (0..blocks * per_block).map(|at| seed.wrapping_mul(2_654_435_761) ^ at).collect()
}

/// The bytes of the block with this key.
pub fn payload(key: &BlockKey, bytes: usize) -> Vec<u8> {
    let seed = key.0.first_chunk::<8>().expect("a key has 32 bytes");
    let mut state = u64::from_le_bytes(*seed);
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        out.extend_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// A client with one namespace and one region: what most tests need.
pub struct KvPool {
    /// The client.
    pub client: Client,
    /// Its namespace.
    pub space: NamespaceHandle,
    /// Its region.
    pub region: RegionHandle,
    block_bytes: usize,
}

impl KvPool {
    /// Opens the namespace, and a region of `places` blocks of `block_bytes`.
    ///
    /// # Errors
    /// What the client says.
    pub fn open(
        client: Client,
        revision: &str,
        places: u32,
        block_bytes: u32,
    ) -> Result<KvPool, ClientError> {
        let space = client.open_namespace(&NamespaceSpec::own(namespace(revision)))?;
        let region = client.create_region(RegionLayout::opaque(places, block_bytes.into()))?;
        Ok(KvPool { client, space, region, block_bytes: block_bytes as usize })
    }

    /// The keys of prompt `seed`.
    pub fn keys(&self, seed: u32, blocks: u32) -> Vec<BlockKey> {
        self.space.chain(&tokens(seed, blocks))
    }

    /// Stores the last `fresh` blocks of a prefix with the right bytes; the outcomes of those.
    pub fn store(&self, keys: &[BlockKey], fresh: usize, wait: Duration) -> Vec<Outcome> {
        let first = keys.len() - fresh;
        let places: Vec<u32> = (0..).take(fresh).collect();
        for (key, place) in keys.iter().skip(first).zip(&places) {
            let bytes = payload(key, self.block_bytes);
            self.write(*place, &bytes);
        }
        self.client.store_prefix(&self.space, 1, &self.region, keys, &places, wait)
    }

    /// Writes a place. One that is in doubt stays as it is: the client library refuses to load into
    /// it or to store from it, so nothing in it can pass for anything.
    fn write(&self, place: u32, bytes: &[u8]) {
        match self.region.write_block(place, bytes) {
            Ok(()) | Err(ClientError::PlaceInDoubt { .. }) => {}
            Err(error) => panic!("cannot write place {place}: {error}"),
        }
    }

    /// Loads what is there of a prefix, from the root on, and checks it.
    ///
    /// # Panics
    /// When a byte that the daemon handed out is wrong.
    pub fn load(&self, keys: &[BlockKey], wait: Duration) -> Vec<Outcome> {
        let places: Vec<u32> = (0..).take(keys.len()).collect();
        // What is left from before must not pass for what is loaded.
        let blank = vec![0xee; self.block_bytes];
        for place in &places {
            self.write(*place, &blank);
        }
        let loaded = self.client.load_prefix(&self.space, &self.region, keys, &places, wait);
        let mut bytes = vec![0; self.block_bytes];
        for ((outcome, key), place) in loaded.outcomes.iter().zip(keys).zip(&places) {
            if matches!(outcome, Outcome::Loaded(_)) {
                self.region.read_block(*place, &mut bytes).expect("the place is in the region");
                assert!(bytes == payload(key, self.block_bytes), "WRONG BYTES for {key:?}");
            }
        }
        loaded.outcomes
    }

    /// Blocks of a prefix that a lookup finds.
    pub fn found(&self, keys: &[BlockKey]) -> usize {
        self.client.lookup(&[(&self.space, keys)], Duration::ZERO).blocks()
    }
}
