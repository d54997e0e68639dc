//! foyer: a hybrid cache in this process, with either of its I/O engines.
//!
//! Set up as its documents say for large values: files with direct I/O, blocks of 64 MiB, two
//! flushers, each insertion written to disk. foyer drops an insertion in silence when its buffers
//! are full, so each thread waits for the flushers before it has inserted more than they take; what
//! is dropped all the same is a miss of the load. The cache is made anew for each turn on the same
//! files, because its io_uring thread spins for as long as the cache lives and would take a core
//! from the other peers.

use std::{path::PathBuf, sync::Arc};

use anyhow::Context;
use foyer::{
    BlockEngineConfig, Code, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, HybridCacheProperties, IoEngineConfig, PsyncIoEngineConfig, RecoverMode,
    Source, UringIoEngineConfig,
};
use tokio::runtime::{Handle, Runtime};

use super::peer::{About, Block, Carrier, Group, Hand, Loaded, Peer, Pool, hands};

/// Bytes of foyer's own unit of eviction.
const ENGINE_BLOCK_BYTES: usize = 64 << 20;

/// Threads of foyer that write.
const FLUSHERS: usize = 2;

/// Bytes of the flushers' buffers, together.
const BUFFER_BYTES: usize = 128 << 20;

/// Bytes that may be inserted and not yet written: so few that they fit the buffer of one flusher,
/// should all of them go there.
const UNWRITTEN_BYTES_MAX: usize = 48 << 20;

/// Which of its I/O engines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Engine {
    Psync,
    Uring,
}

/// What foyer is given.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) folder: PathBuf,
    pub(super) memory_bytes: u64,
    pub(super) disk_bytes: u64,
    pub(super) block_bytes: u64,
    pub(super) blocks: usize,
    pub(super) threads: usize,
}

/// A block's key, as foyer stores it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Key([u8; 32]);

impl Code for Key {
    fn encode(&self, writer: &mut impl std::io::Write) -> foyer::Result<()> {
        writer.write_all(&self.0).map_err(foyer::Error::io_error)
    }

    fn decode(reader: &mut impl std::io::Read) -> foyer::Result<Key> {
        let mut bytes = [0; 32];
        reader.read_exact(&mut bytes).map_err(foyer::Error::io_error)?;
        Ok(Key(bytes))
    }

    fn estimated_size(&self) -> usize {
        self.0.len()
    }
}

type Cache = HybridCache<Key, Vec<u8>>;

/// foyer as a peer.
pub(super) struct Foyer {
    about: About,
    engine: Engine,
    setup: Setup,
    pool: Arc<Pool>,
    open: Option<(Runtime, Cache)>,
    hands: Vec<Box<dyn Hand>>,
}

struct FoyerHand {
    handle: Handle,
    cache: Cache,
    unwritten_bytes: usize,
    unwritten_bytes_max: usize,
}

impl Foyer {
    pub(super) fn make(engine: Engine, setup: Setup, pool: &Arc<Pool>) -> Foyer {
        let name = match engine {
            Engine::Psync => "foyer 0.22, psync",
            Engine::Uring => "foyer 0.22, io_uring",
        };
        let about = About {
            name: name.into(),
            group: Group::Disk,
            ours: false,
            stored_to: "disk",
            loaded_from: "disk",
            verifies: true,
            threads: setup.threads,
            batch: 1,
        };
        let setup = Setup { folder: setup.folder.join(format!("foyer-{engine:?}")), ..setup };
        Foyer { about, engine, setup, pool: Arc::clone(pool), open: None, hands: Vec::new() }
    }

    async fn build(&self) -> anyhow::Result<Cache> {
        let device = FsDeviceBuilder::new(&self.setup.folder)
            .with_capacity(usize::try_from(self.setup.disk_bytes)?)
            .with_direct(true)
            .build()?;
        let engine: BlockEngineConfig<Key, Vec<u8>, HybridCacheProperties> =
            BlockEngineConfig::new(device)
                .with_block_size(ENGINE_BLOCK_BYTES)
                .with_flushers(FLUSHERS)
                .with_buffer_pool_size(BUFFER_BYTES)
                .with_submit_queue_size_threshold(2 * BUFFER_BYTES);
        let builder = HybridCacheBuilder::new()
            .with_name("kvtide-bench")
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .with_flush_on_close(false)
            .memory(usize::try_from(self.setup.memory_bytes)?)
            .with_weighter(|_: &Key, value: &Vec<u8>| value.len())
            .storage()
            .with_recover_mode(RecoverMode::None)
            .with_engine_config(engine);
        let io_engine: Box<dyn IoEngineConfig> = match self.engine {
            Engine::Psync => Box::new(PsyncIoEngineConfig::new()),
            Engine::Uring => Box::new(UringIoEngineConfig::new()),
        };
        Ok(builder.with_io_engine_config(io_engine).build().await?)
    }
}

impl Peer for Foyer {
    fn about(&self) -> &About {
        &self.about
    }

    fn open(&mut self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_name("foyer")
            .enable_all()
            .build()
            .context("cannot start foyer's threads")?;
        let cache = runtime.block_on(self.build()).context("cannot open foyer")?;
        let threads = self.setup.threads;
        let block_bytes = usize::try_from(self.setup.block_bytes)?;
        let carriers = (0..threads).map(|_| FoyerHand {
            handle: runtime.handle().clone(),
            cache: cache.clone(),
            unwritten_bytes: 0,
            unwritten_bytes_max: (UNWRITTEN_BYTES_MAX / threads).max(block_bytes),
        });
        self.hands = hands(&self.pool, self.setup.blocks / threads, carriers);
        self.open = Some((runtime, cache));
        Ok(())
    }

    fn hands(&mut self) -> &mut [Box<dyn Hand>] {
        &mut self.hands
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        if let Some((runtime, cache)) = &self.open {
            runtime.block_on(cache.storage().wait());
        }
        Ok(())
    }

    fn close(&mut self, _blocks: &[Vec<Block>]) -> anyhow::Result<()> {
        self.hands.clear();
        if let Some((runtime, cache)) = self.open.take() {
            runtime.block_on(cache.close())?;
            drop(cache);
            runtime.shutdown_timeout(std::time::Duration::from_secs(5));
        }
        Ok(())
    }
}

impl Drop for Foyer {
    fn drop(&mut self) {
        // A turn that failed has left it open.
        self.hands.clear();
        self.open = None;
        // Left behind, it would only take room.
        let _ = std::fs::remove_dir_all(&self.setup.folder);
    }
}

impl Carrier for FoyerHand {
    fn store(&mut self, block: &Block, bytes: &[u8]) -> anyhow::Result<()> {
        if self.unwritten_bytes + bytes.len() > self.unwritten_bytes_max {
            self.handle.block_on(self.cache.storage().wait());
            self.unwritten_bytes = 0;
        }
        self.unwritten_bytes += bytes.len();
        self.cache.insert(Key(block.key.0), bytes.to_vec());
        Ok(())
    }

    fn load(&mut self, block: &Block, into: &mut [u8]) -> anyhow::Result<Loaded> {
        let entry = self.handle.block_on(async { self.cache.get(&Key(block.key.0)).await })?;
        let Some(entry) = entry else { return Ok(Loaded::Miss) };
        anyhow::ensure!(entry.value().len() == into.len(), "a value of another length");
        into.copy_from_slice(entry.value());
        Ok(match entry.source() {
            Source::Disk => Loaded::Hit,
            Source::Memory | Source::Outer => Loaded::FromMemory,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::drive::{shares, turn};

    #[test]
    fn both_engines_give_back_what_they_were_given() {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup {
            folder: folder.path().to_owned(),
            memory_bytes: 1 << 20,
            disk_bytes: 512 << 20,
            block_bytes: 64 << 10,
            blocks: 64,
            threads: 2,
        };
        let pool = Pool::make(setup.blocks, setup.block_bytes).unwrap();
        for engine in [Engine::Psync, Engine::Uring] {
            let mut peer = Foyer::make(engine, setup.clone(), &pool);
            if let Err(error) = peer.open() {
                eprintln!("SKIPPED: no foyer with {engine:?} here: {error:#}");
                continue;
            }
            for round in 0..2 {
                let blocks = shares(peer.about(), 0, round, setup.blocks);
                let turn = turn(&mut peer, &blocks, 64 << 10).unwrap();
                assert_eq!((turn.verified, turn.missed, turn.wrong_bytes), (64, 0, 0));
                assert!(turn.from_memory < 64, "{engine:?}: some must come from the disk");
            }
        }
    }
}
