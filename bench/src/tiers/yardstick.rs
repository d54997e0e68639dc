//! `memcpy` and the raw ring for other subcommands: how fast this machine loads blocks of a size
//! where nothing else is done.

use std::path::Path;

use super::{
    Setup,
    measure::{Direction, Measures, Work},
    memcpy::{Copies, copy_threads},
    raw::Raw,
};

/// Transfers that the ring has under way at once.
const DEPTH: u32 = 8;

/// Both yardsticks.
pub(crate) struct Yardsticks {
    copies: Copies,
    raw: Raw,
}

/// What they loaded, GB/s.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded {
    /// By `memcpy`.
    pub(crate) memcpy_gb_s: f64,
    /// From the disk, past the page cache.
    pub(crate) raw_gb_s: f64,
}

impl Yardsticks {
    /// Memory and a file in `folder` for so many blocks; `daemon_pid` is that of a daemon with as
    /// many copying threads as `memcpy` is to have. Blocks are a multiple of 4 KiB.
    pub(crate) fn prepare(
        folder: &Path,
        daemon_pid: u32,
        block_bytes: u64,
        blocks: usize,
    ) -> anyhow::Result<Yardsticks> {
        let setup = Setup {
            block_bytes,
            clients: 1,
            host_blocks: blocks,
            nvme_blocks: blocks,
            depths: vec![DEPTH],
            ..Setup::default()
        };
        let (threads, _) = copy_threads(daemon_pid)?;
        Ok(Yardsticks { copies: Copies::new(&setup, threads)?, raw: Raw::prepare(folder, &setup)? })
    }

    /// How the raw ring reads.
    pub(crate) fn ring(&self) -> String {
        self.raw.ring()
    }

    /// All blocks once, and compared.
    pub(crate) fn round(&mut self, round: u32) -> anyhow::Result<Loaded> {
        let mut measures = Measures::new();
        self.copies.round(round, false, &mut measures)?;
        self.raw.round(round, Direction::Store, &mut measures)?;
        self.raw.round(round, Direction::Load, &mut measures)?;
        anyhow::ensure!(measures.summary.client_failures == 0, "the raw ring read wrong bytes");
        let gb_s = |work| {
            let kind = measures.best(work, Direction::Load);
            let rounds = kind.map(|kind| measures.rounds(kind)).unwrap_or_default();
            rounds.first().map_or(0.0, |round| round.gb_s())
        };
        Ok(Loaded { memcpy_gb_s: gb_s(Work::Memcpy), raw_gb_s: gb_s(Work::Raw) })
    }
}
