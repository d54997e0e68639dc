//! One file per block in a folder: what anyone can do without a cache.
//!
//! Nothing is checked and nothing is synced. Through the page cache, a store ends in memory, and a
//! load of a file that was just written would come from memory as well: for the disk's row the
//! files are written out and dropped from the page cache in between, which is not timed, and each
//! load asks the kernel whether it was really dropped. Past the page cache, buffers are aligned and
//! lie in the pages of the pool. Files are removed after each turn, which is not timed either.

use std::{
    fs::File,
    io::{IoSliceMut, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context;
use kvtide_tiers::block::BlockKey;
use rustix::{
    fs::{Advice, OFlags},
    io::ReadWriteFlags,
};

use super::peer::{About, Block, Carrier, Group, Hand, Loaded, Peer, Pool, hands};

/// How the files are written and read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Through {
    /// The page cache, and it alone.
    PageCache,
    /// The page cache, emptied before the files are read.
    PageCacheEmptied,
    /// Past the page cache.
    Direct,
}

/// Files as a peer.
pub(super) struct Files {
    about: About,
    folder: PathBuf,
    through: Through,
    hands: Vec<Box<dyn Hand>>,
}

struct FileHand {
    folder: PathBuf,
    flags: i32,
    through: Through,
}

/// Whether the page cache has the start of a file: a read that may not wait for a disk succeeds.
fn is_cached(file: &File) -> bool {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    rustix::io::preadv2(file, &mut parts, 0, ReadWriteFlags::NOWAIT).is_ok()
}

fn path(folder: &Path, key: &BlockKey) -> PathBuf {
    folder.join(key.to_string())
}

fn flags(through: Through) -> i32 {
    match through {
        Through::Direct => OFlags::DIRECT.bits() as i32,
        Through::PageCache | Through::PageCacheEmptied => 0,
    }
}

impl Files {
    /// # Errors
    /// The folder cannot be made, or its file system has no direct I/O.
    pub(super) fn make(
        folder: &Path,
        through: Through,
        threads: usize,
        pool: &Arc<Pool>,
        blocks: usize,
    ) -> anyhow::Result<Files> {
        let (name, group, stored_to, loaded_from) = match through {
            Through::PageCache => {
                ("files, buffered, page cache", Group::Ram, "page cache", "page cache")
            }
            Through::PageCacheEmptied => ("files, buffered", Group::Disk, "page cache", "disk"),
            Through::Direct => ("files, O_DIRECT", Group::Disk, "disk", "disk"),
        };
        let folder = folder.join(format!("files-{through:?}"));
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        let flags = flags(through);
        let probe = folder.join("probe");
        let opened = File::options().create(true).write(true).custom_flags(flags).open(&probe);
        opened.context("the file system takes no file past the page cache")?;
        std::fs::remove_file(probe)?;
        let hand = |_| FileHand { folder: folder.clone(), flags, through };
        Ok(Files {
            about: About {
                name: name.into(),
                group,
                ours: false,
                stored_to,
                loaded_from,
                verifies: false,
                threads,
                batch: 1,
            },
            hands: hands(pool, blocks / threads, (0..threads).map(hand)),
            folder,
            through,
        })
    }
}

impl Peer for Files {
    fn about(&self) -> &About {
        &self.about
    }

    fn hands(&mut self) -> &mut [Box<dyn Hand>] {
        &mut self.hands
    }

    fn cool(&mut self, blocks: &[Vec<Block>]) -> anyhow::Result<()> {
        if self.through != Through::PageCacheEmptied {
            return Ok(());
        }
        for block in blocks.iter().flatten() {
            let file = File::open(path(&self.folder, &block.key))?;
            // Only what is on the disk can be dropped.
            file.sync_data()?;
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
        }
        Ok(())
    }

    fn close(&mut self, blocks: &[Vec<Block>]) -> anyhow::Result<()> {
        for block in blocks.iter().flatten() {
            std::fs::remove_file(path(&self.folder, &block.key))?;
        }
        Ok(())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Left behind, it would only take room.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Carrier for FileHand {
    fn store(&mut self, block: &Block, bytes: &[u8]) -> anyhow::Result<()> {
        let path = path(&self.folder, &block.key);
        let mut options = File::options();
        options.write(true).create(true).truncate(true).custom_flags(self.flags);
        let file = options.open(&path).and_then(|mut file| file.write_all(bytes));
        file.with_context(|| format!("cannot write {}", path.display()))
    }

    fn load(&mut self, block: &Block, into: &mut [u8]) -> anyhow::Result<Loaded> {
        let path = path(&self.folder, &block.key);
        let file = File::options().read(true).custom_flags(self.flags).open(&path);
        let mut cached = false;
        let read = file.and_then(|mut file| {
            cached = self.through == Through::PageCacheEmptied && is_cached(&file);
            file.read_exact(into)
        });
        read.with_context(|| format!("cannot read {}", path.display()))?;
        Ok(if cached { Loaded::FromMemory } else { Loaded::Hit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::drive::{shares, turn};

    #[test]
    fn every_way_through_gives_back_what_it_was_given_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let pool = Pool::make(8, 64 << 10).unwrap();
        for through in [Through::PageCache, Through::PageCacheEmptied, Through::Direct] {
            let mut files = match Files::make(folder.path(), through, 2, &pool, 8) {
                Ok(files) => files,
                Err(error) => {
                    eprintln!("SKIPPED: no {through:?} here: {error:#}");
                    continue;
                }
            };
            for round in 0..2 {
                let blocks = shares(files.about(), 0, round, 8);
                let turn = turn(&mut files, &blocks, 64 << 10).unwrap();
                assert_eq!((turn.verified, turn.missed, turn.wrong_bytes), (8, 0, 0));
                eprintln!("{through:?}: {} of 8 still in the page cache", turn.from_memory);
            }
            drop(files);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_just_written_is_in_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let (kind, memory) = crate::process::file_system(folder.path());
        if memory {
            eprintln!("SKIPPED: {kind} has no page cache that could be asked");
            return;
        }
        let path = folder.path().join("file");
        let mut file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.write_all(&[1; 8192]).unwrap();
        assert!(is_cached(&file));
    }
}
