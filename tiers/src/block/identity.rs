//! Who a block is: namespaces, their keys, and chained block keys.
//!
//! A block key is a BLAKE3 keyed hash over the parent's key and the block's tokens, under a key
//! that belongs to one namespace of one tenant. Equal keys therefore mean: same tenant, same model,
//! same layout, same salt, same tokens from position 0 on. Nothing here does I/O.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{NarrowShape, Narrowed};

/// Bytes in a tenant's secret.
pub const SECRET_BYTES: usize = 32;

/// Longest accepted string in a namespace, in bytes.
const TEXT_BYTES_MAX: usize = 1024;

const CONTEXT_NAMESPACE: &[u8] = b"kvtide namespace v1";
const CONTEXT_TOKENS: u8 = 1;
const CONTEXT_ENGINE: u8 = 2;

/// The chained identity of one full block (32 bytes).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct BlockKey(pub [u8; 32]);

impl BlockKey {
    /// The parent of every first block: not itself the key of any block.
    pub const ROOT: BlockKey = BlockKey([0; 32]);

    /// Parses 64 hexadecimal digits.
    ///
    /// # Errors
    /// `None` for anything else.
    pub fn from_hex(text: &str) -> Option<BlockKey> {
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        Some(BlockKey(bytes))
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(out, "BlockKey({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

/// A namespace's number in the store's namespace table: short, durable, never reused.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize,
)]
pub struct NamespaceId(pub u32);

/// The secret of one tenant, from which the keys of its namespaces are derived.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantSecret(pub [u8; SECRET_BYTES]);

impl fmt::Debug for TenantSecret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("TenantSecret(hidden)")
    }
}

/// How one element of the KV cache is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ElementType {
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE half, 2 bytes.
    F16,
    /// IEEE single, 4 bytes.
    F32,
    /// 8-bit float, 4 exponent and 3 mantissa bits.
    Fp8E4m3,
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    Fp8E5m2,
    /// 8-bit integer with scales kept in the block.
    Int8,
    /// Bytes whose meaning only the engine knows.
    Opaque,
    /// 16-bit floats that the daemon may keep in 8 bits each, which loses precision.
    Narrowed(Narrowed),
}

impl ElementType {
    /// The 16-bit types, whose exponent plane compresses.
    pub fn is_16_bit(self) -> bool {
        matches!(self, ElementType::Bf16 | ElementType::F16)
    }
}

/// Which ranks of a model hold a block's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum RankScope {
    /// This block belongs to one rank of `world`.
    Rank {
        /// From 0.
        rank: u32,
        /// Number of ranks.
        world: u32,
    },
    /// All ranks hold the same bytes (MLA, for example): one copy serves them all.
    SameOnAll,
}

/// The model whose KV this is. Every field that changes the bytes must be here.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Model {
    /// Digest of the weights, as the engine computes it.
    pub weights: String,
    /// Revision of the model, empty where the digest says it all.
    pub revision: String,
    /// Adapter (LoRA) name and digest, empty for none.
    pub adapter: String,
}

/// The shape of the KV cache. Tokens per block, heads and element type as they lie in memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct KvLayout {
    /// Attention layers in the block.
    pub layers: u32,
    /// KV heads of this rank.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Element type in the cache (the effective one, not the one of the weights).
    pub element: ElementType,
    /// Tokens in a full block.
    pub tokens_per_block: u32,
    /// Number of the KV cache group, for models with several (0 otherwise).
    pub kv_group: u32,
    /// Which rank this is.
    pub ranks: RankScope,
    /// The engine's version of the order of bytes inside a block.
    pub page_layout_version: u32,
}

/// Everything that must be equal before bytes may be shared, but for the tenant, which comes from
/// the socket's peer credential and lives in the secret.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Namespace {
    /// The model.
    pub model: Model,
    /// The layout.
    pub layout: KvLayout,
    /// Separates caches that would otherwise share, empty for none.
    pub salt: String,
}

/// Why a namespace is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// A string is longer than this library accepts.
    #[error("namespace field `{field}` has {bytes} bytes; at most {TEXT_BYTES_MAX} are allowed")]
    TooLong {
        /// The field.
        field: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// A count that must not be zero is.
    #[error("namespace field `{field}` is 0; it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// The rank is not below the world size.
    #[error("rank {rank} is not below the world size {world}")]
    Rank {
        /// The rank.
        rank: u32,
        /// The world size.
        world: u32,
    },
    /// Blocks that are to be kept narrower do not have the shape of KV, or are too large.
    #[error(
        "blocks that are kept in 8 bits need layers, heads, elements per head and tokens that make \
         less than 4 GiB; these have {layers}, {heads}, {head_elements} and {tokens}"
    )]
    Narrowed {
        /// Layers.
        layers: u32,
        /// Heads.
        heads: u32,
        /// Elements per head.
        head_elements: u32,
        /// Tokens per block.
        tokens: u32,
    },
    /// The weights digest is empty, so nothing says which model this is.
    #[error("namespace field `weights` is empty; give a digest of the model's weights")]
    NoWeights,
}

/// One field in which two namespaces differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceDifference {
    /// The field's name.
    pub field: String,
    /// Its value on the left.
    pub left: String,
    /// Its value on the right.
    pub right: String,
}

impl Namespace {
    /// Checks every field.
    ///
    /// # Errors
    /// The first field that is out of bounds.
    pub fn check(&self) -> Result<(), NamespaceError> {
        let texts = [
            ("weights", &self.model.weights),
            ("revision", &self.model.revision),
            ("adapter", &self.model.adapter),
            ("salt", &self.salt),
        ];
        for (field, text) in texts {
            if text.len() > TEXT_BYTES_MAX {
                return Err(NamespaceError::TooLong { field, bytes: text.len() });
            }
        }
        if self.model.weights.is_empty() {
            return Err(NamespaceError::NoWeights);
        }
        let counts =
            [("layers", self.layout.layers), ("tokens_per_block", self.layout.tokens_per_block)];
        for (field, count) in counts {
            if count == 0 {
                return Err(NamespaceError::Zero { field });
            }
        }
        if let RankScope::Rank { rank, world } = self.layout.ranks
            && rank >= world
        {
            return Err(NamespaceError::Rank { rank, world });
        }
        if let Some(NarrowShape { layers, heads, head_elements, tokens, .. }) =
            NarrowShape::of(&self.layout).filter(|shape| !shape.is_possible())
        {
            return Err(NamespaceError::Narrowed { layers, heads, head_elements, tokens });
        }
        Ok(())
    }

    /// The fields, by name, in the order in which they enter the key.
    pub fn fields(&self) -> Vec<(&'static str, String)> {
        let layout = &self.layout;
        let ranks = match layout.ranks {
            RankScope::Rank { rank, world } => format!("{rank}/{world}"),
            RankScope::SameOnAll => "same on all ranks".to_owned(),
        };
        vec![
            ("weights", self.model.weights.clone()),
            ("revision", self.model.revision.clone()),
            ("adapter", self.model.adapter.clone()),
            ("layers", layout.layers.to_string()),
            ("kv_heads", layout.kv_heads.to_string()),
            ("head_dim", layout.head_dim.to_string()),
            ("element", format!("{:?}", layout.element)),
            ("tokens_per_block", layout.tokens_per_block.to_string()),
            ("kv_group", layout.kv_group.to_string()),
            ("ranks", ranks),
            ("page_layout_version", layout.page_layout_version.to_string()),
            ("salt", self.salt.clone()),
        ]
    }

    /// Says, field by field, why two namespaces do not share blocks. Empty when they are equal.
    pub fn explain(&self, other: &Namespace) -> Vec<NamespaceDifference> {
        self.fields()
            .into_iter()
            .zip(other.fields())
            .filter(|(left, right)| left != right)
            .map(|((field, left), (_, right))| NamespaceDifference {
                field: field.to_owned(),
                left,
                right,
            })
            .collect()
    }
}

/// The key under which a namespace's blocks are named. Whoever has it can compute block keys, so it
/// goes only to clients that may open the namespace.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceKey([u8; 32]);

impl NamespaceKey {
    /// Derives the key from the tenant's secret. Every field is framed by name and length, so no
    /// two namespaces encode to the same bytes.
    pub fn derive(secret: &TenantSecret, namespace: &Namespace) -> NamespaceKey {
        let mut hasher = blake3::Hasher::new_keyed(&secret.0);
        hasher.update(CONTEXT_NAMESPACE);
        for (name, value) in namespace.fields() {
            for text in [name.as_bytes(), value.as_bytes()] {
                hasher.update(&(text.len() as u64).to_le_bytes());
                hasher.update(text);
            }
        }
        NamespaceKey(*hasher.finalize().as_bytes())
    }

    /// The key of a full block of tokens behind `parent` ([`BlockKey::ROOT`] for the first one).
    /// `extras` is whatever else decides the block's bytes (image hashes, prompt embeddings).
    pub fn block(&self, parent: &BlockKey, tokens: &[u32], extras: &[u8]) -> BlockKey {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[CONTEXT_TOKENS]);
        hasher.update(&parent.0);
        hasher.update(&(tokens.len() as u64).to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        hasher.update(&(extras.len() as u64).to_le_bytes());
        hasher.update(extras);
        BlockKey(*hasher.finalize().as_bytes())
    }

    /// The key of a block that the engine already names by a chained hash of its own (as vLLM and
    /// SGLang do). The hash is mixed with the namespace key, never used bare.
    pub fn engine_block(&self, chained_hash: &[u8]) -> BlockKey {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[CONTEXT_ENGINE]);
        hasher.update(&(chained_hash.len() as u64).to_le_bytes());
        hasher.update(chained_hash);
        BlockKey(*hasher.finalize().as_bytes())
    }

    /// The keys of all full blocks of `tokens`, root first.
    pub fn chain(&self, tokens: &[u32], tokens_per_block: usize) -> Vec<BlockKey> {
        let mut parent = BlockKey::ROOT;
        tokens
            .chunks_exact(tokens_per_block.max(1))
            .map(|block| {
                parent = self.block(&parent, block, &[]);
                parent
            })
            .collect()
    }

    /// A public name for the key: proves which key the daemon derived without showing it.
    pub fn fingerprint(&self) -> [u8; 16] {
        let hash = blake3::keyed_hash(&self.0, b"kvtide namespace fingerprint v1");
        let mut print = [0; 16];
        print.copy_from_slice(hash.as_bytes().split_at(16).0);
        print
    }
}

impl fmt::Debug for NamespaceKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("NamespaceKey(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace() -> Namespace {
        Namespace {
            model: Model { weights: "w".into(), revision: "r".into(), adapter: String::new() },
            layout: KvLayout {
                layers: 32,
                kv_heads: 8,
                head_dim: 128,
                element: ElementType::Bf16,
                tokens_per_block: 16,
                kv_group: 0,
                ranks: RankScope::Rank { rank: 0, world: 1 },
                page_layout_version: 1,
            },
            salt: String::new(),
        }
    }

    fn key(namespace: &Namespace) -> NamespaceKey {
        NamespaceKey::derive(&TenantSecret([7; 32]), namespace)
    }

    #[test]
    fn every_field_changes_the_key_and_is_explained() {
        let base = namespace();
        let mut variants = vec![base.clone(); 12];
        variants[0].model.weights = "x".into();
        variants[1].model.revision = "x".into();
        variants[2].model.adapter = "x".into();
        variants[3].layout.layers = 33;
        variants[4].layout.kv_heads = 9;
        variants[5].layout.head_dim = 64;
        variants[6].layout.element = ElementType::F16;
        variants[7].layout.tokens_per_block = 32;
        variants[8].layout.kv_group = 1;
        variants[9].layout.ranks = RankScope::SameOnAll;
        variants[10].layout.page_layout_version = 2;
        variants[11].salt = "x".into();
        for ((variant, (field, _)), at) in variants.iter().zip(base.fields()).zip(0..) {
            assert_ne!(key(&base), key(variant), "field {at}");
            let differences = base.explain(variant);
            assert_eq!(differences.len(), 1);
            assert_eq!(differences[0].field, field);
        }
        assert!(base.explain(&base).is_empty());
    }

    #[test]
    fn two_tenants_have_unrelated_keys_for_the_same_tokens() {
        let base = namespace();
        let other = NamespaceKey::derive(&TenantSecret([8; 32]), &base);
        assert_ne!(key(&base).chain(&[1; 32], 16), other.chain(&[1; 32], 16));
    }

    #[test]
    fn chain_covers_full_blocks_only_and_depends_on_all_that_came_before() {
        let key = key(&namespace());
        let tokens: Vec<u32> = (0..70).collect();
        let chain = key.chain(&tokens, 16);
        assert_eq!(chain.len(), 4);
        let mut changed = tokens.clone();
        changed[0] = 99;
        let other = key.chain(&changed, 16);
        assert!(chain.iter().zip(&other).all(|(a, b)| a != b));
        changed = tokens;
        changed[17] = 99;
        assert_eq!(chain[0], key.chain(&changed, 16)[0]);
        assert_ne!(chain[1], key.chain(&changed, 16)[1]);
    }

    #[test]
    fn framing_keeps_tokens_and_extras_apart() {
        let key = key(&namespace());
        let root = BlockKey::ROOT;
        assert_ne!(key.block(&root, &[1, 2], &[]), key.block(&root, &[1], &2u32.to_le_bytes()));
        assert_ne!(key.engine_block(&[0; 32]), key.block(&root, &[], &[]));
    }

    #[test]
    fn hex_round_trips_and_refuses_what_is_not_a_key() {
        let block = key(&namespace()).block(&BlockKey::ROOT, &[1], &[]);
        assert_eq!(BlockKey::from_hex(&block.to_string()), Some(block));
        for bad in ["", "00", &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(BlockKey::from_hex(bad), None);
        }
    }

    #[test]
    fn check_names_the_field() {
        let mut bad = namespace();
        bad.layout.ranks = RankScope::Rank { rank: 2, world: 2 };
        assert_eq!(bad.check(), Err(NamespaceError::Rank { rank: 2, world: 2 }));
        bad = namespace();
        bad.salt = "x".repeat(2000);
        assert_eq!(bad.check(), Err(NamespaceError::TooLong { field: "salt", bytes: 2000 }));
        assert_eq!(namespace().check(), Ok(()));
    }
}
