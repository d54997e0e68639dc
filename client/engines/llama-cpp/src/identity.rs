//! Whose KV it is: everything that changes the bytes of a block, and nothing that does not.
//!
//! Two processes share blocks when all of this is equal: the bytes of the model's file (weights,
//! their types, vocabulary, rope), the build of llama.cpp and the instructions it was compiled for,
//! flash attention, the types of K and V, and the tokens per block. Not in it, because the tests
//! measure that they leave the bytes alone: the size of the context, the size of the batch, and
//! the number of threads.
//!
//! Only with bfloat16 and flash attention, the default, is a block's KV a function of that alone.
//! Otherwise llama.cpp (on a CPU) computes single tokens in another way than batches, and adds in
//! another order: a block with tokens that were drawn one by one differs in the last bits from one
//! with the same tokens in a prompt. It is KV that llama.cpp computed all the same, and whoever
//! stores a block first decides. With flash attention and f16 or f32, small batches differ too, and
//! single tokens by the number of threads; there, threads and batch are part of the namespace.

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use kvtide_client::{ElementType, KvLayout, Model as ModelIdentity, Namespace, RankScope};

use crate::error::EngineError;
use crate::llama::{self, ContextOptions, KvType, Model};

/// Version of the bindings, which say which llama.cpp they bring; its own version does not change
/// with every release. A test compares it with the manifest.
const BINDINGS: &str = "0.1.161";
/// Version of the order of bytes in a block: llama.cpp's state of one sequence, in order.
const PAGE_LAYOUT: u32 = 1;
/// From this duration on, whoever waits for the digest is told how far it is.
const SILENT: Duration = Duration::from_secs(2);

/// BLAKE3 over a model's whole file, as `blake3:` and 64 digits. Says on standard error how far it
/// is when it takes longer than two seconds.
///
/// # Errors
/// When the file cannot be read.
pub fn digest(path: &Path) -> Result<String, EngineError> {
    let failed = |source| EngineError::Read { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len().max(1);
    let mut hasher = blake3::Hasher::new();
    let mut part = vec![0; 1 << 20];
    let (start, mut told, mut done) = (Instant::now(), 0, 0);
    loop {
        let read = file.read(&mut part).map_err(failed)?;
        let Some(part) = part.get(..read).filter(|part| !part.is_empty()) else { break };
        hasher.update(part);
        done += read as u64;
        let tenth = done * 10 / bytes;
        if start.elapsed() > SILENT && tenth > told {
            told = tenth;
            let end = if std::io::stderr().is_terminal() { '\r' } else { '\n' };
            eprint!("digest of {}: {} %{end}", path.display(), tenth * 10);
        }
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

/// The namespace of the blocks that a context computes, for a model whose file has this digest.
pub fn namespace(
    model: &Model,
    digest: &str,
    options: &ContextOptions,
    block_tokens: u32,
) -> Namespace {
    let flash = options.flash_attention;
    let mut revision = format!(
        "{} bindings {BINDINGS} kv {} flash-attention {}",
        llama::build(),
        options.kv.name(),
        if flash { "on" } else { "off" },
    );
    if flash && options.kv != KvType::Bf16 {
        revision.push_str(&format!(" threads {} batch {}", options.threads, options.batch));
    }
    // Some models have two sets of rope factors, of which the size of the context picks one.
    let original = model.number("rope.scaling.original_context_length");
    if original.is_some_and(|original| options.ctx > original) {
        revision.push_str(" long-rope");
    }
    let layout = KvLayout {
        layers: model.layers(),
        kv_heads: model.kv_heads(),
        head_dim: model.head_dim(),
        // The state has a head of its own, and V may lie transposed: nobody but llama.cpp knows
        // what is where in it.
        element: ElementType::Opaque,
        tokens_per_block: block_tokens,
        kv_group: 0,
        ranks: RankScope::Rank { rank: 0, world: 1 },
        page_layout_version: PAGE_LAYOUT,
    };
    let model = ModelIdentity { weights: digest.to_owned(), revision, adapter: String::new() };
    Namespace { model, layout, salt: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_the_bindings_is_the_one_of_the_manifest() {
        let manifest = include_str!("../Cargo.toml");
        assert!(manifest.contains(&format!("llama-cpp-sys-2 = {{ version = \"={BINDINGS}\"")));
    }

    #[test]
    fn a_digest_is_that_of_all_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = vec![7; (1 << 20) + 1];
        std::fs::write(file.path(), &bytes).unwrap();
        let expected = format!("blake3:{}", blake3::hash(&bytes).to_hex());
        assert_eq!(digest(file.path()).unwrap(), expected);
        assert!(digest(Path::new("no/such/file")).is_err());
    }
}
