//! The raw ring: a file with direct I/O, fixed buffers in huge pages where there are any, eight
//! transfers under way. What a storage engine could do with this disk if it did nothing else.

use std::{
    fs::File,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use kvtide_tiers::catalog::SlotId;
use kvtide_tiers::io::{
    Arena, BlockDevice, IoBuffer, IoDone, IoOp, OpenDevice, RingChoice, RingStatus, open_device,
};

use super::{
    Sizes,
    measure::{Kind, Measures, Round, fresh_key},
};
use crate::{payload::Payload, process::own_seconds};

/// Transfers under way.
const DEPTH: u32 = 8;

/// Longest wait for one completion.
const REAP_MAX: Duration = Duration::from_secs(30);

/// The file and its ring.
pub(super) struct Raw {
    device: Box<dyn BlockDevice>,
    arena: Arc<Arena>,
    status: Arc<RingStatus>,
    slots: Vec<SlotId>,
    blocks: usize,
    block_bytes: u32,
    path: PathBuf,
    direct: bool,
}

/// Past the page cache where the file system can; says whether.
fn open_direct(path: &Path) -> anyhow::Result<(File, bool)> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits())?;
    match options.clone().custom_flags(direct).open(path) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
            let file = options.open(path);
            Ok((file.with_context(|| format!("cannot open {}", path.display()))?, false))
        }
        Err(error) => Err(error).with_context(|| format!("cannot open {}", path.display())),
    }
}

impl Raw {
    pub(super) fn prepare(folder: &Path, sizes: &Sizes) -> anyhow::Result<Raw> {
        let path = folder.join("raw-ring.bin");
        let bytes = sizes.block_bytes * sizes.nvme_blocks as u64;
        let block_bytes = u32::try_from(sizes.block_bytes)?;
        let (file, direct) = open_direct(&path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
            .with_context(|| format!("no room for {bytes} bytes in {}", path.display()))?;
        let slab_bytes = block_bytes.next_multiple_of(2 << 20);
        let arena = Arena::create(u64::from(slab_bytes) * u64::from(DEPTH), slab_bytes)?;
        // Registration follows the touching of the pages; wait for all of it.
        let until = Instant::now() + Duration::from_secs(10);
        while arena.touched_bytes() < arena.bytes() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut slots = Vec::new();
        for slab in 0..DEPTH {
            arena.bind_slab(slab, block_bytes)?;
            slots.push(arena.slot(slab, 0).context("a bound slab has a slot")?);
        }
        let status = RingStatus::new();
        let open = OpenDevice {
            file,
            arena: Some(Arc::clone(&arena)),
            choice: RingChoice::Auto,
            queue_depth: DEPTH,
        };
        let device = open_device(open, &status)?;
        let blocks = sizes.nvme_blocks;
        let mut raw = Raw { device, arena, status, slots, blocks, block_bytes, path, direct };
        // Blocks of a file that were never written are slower to write, and the store's are not.
        raw.transfer(u32::MAX, true, &mut Measures::new(sizes.block_bytes))?;
        Ok(raw)
    }

    pub(super) fn pages(&self) -> String {
        format!("{} ({})", self.arena.pages().name(), self.arena.pages_why())
    }

    pub(super) fn ring(&self) -> String {
        let report = self.status.report();
        let how = if self.direct { "past the page cache" } else { "THROUGH THE PAGE CACHE" };
        format!("{:?} {how}, {} bytes of fixed buffers", report.kind, report.fixed_bytes)
    }

    pub(super) fn round(&mut self, round: u32, measures: &mut Measures) -> anyhow::Result<()> {
        let written = self.transfer(round, true, measures)?;
        measures.add(Kind::RawWrite, written);
        let read = self.transfer(round, false, measures)?;
        measures.add(Kind::RawRead, read);
        Ok(())
    }

    /// Writes or reads the whole file, eight blocks at a time. Each payload is made just before its
    /// write and compared just after its read, while the other transfers go on.
    fn transfer(
        &mut self,
        round: u32,
        write: bool,
        measures: &mut Measures,
    ) -> anyhow::Result<Round> {
        let payload = Payload::new();
        let (started, cpu) = (Instant::now(), own_seconds());
        let mut begun: Vec<Option<Instant>> = vec![None; self.blocks];
        let mut calls = Vec::with_capacity(self.blocks);
        let mut free = self.slots.clone();
        let (mut next, mut done) = (0, Vec::<IoDone>::new());
        while calls.len() < self.blocks {
            while next < self.blocks
                && let Some(slot) = free.pop()
            {
                let mut buffer = self.arena.write(slot, self.block_bytes)?;
                let buffer = if write {
                    payload.fill(&fresh_key(9, round, next), &mut buffer);
                    IoBuffer::Drain(buffer.into_read())
                } else {
                    IoBuffer::Fill(buffer)
                };
                let offset = next as u64 * u64::from(self.block_bytes);
                if let Some(begun) = begun.get_mut(next) {
                    *begun = Some(Instant::now());
                }
                if self.device.submit(IoOp { user: next as u64, offset, buffer }).is_err() {
                    bail!("the ring is full with fewer than {DEPTH} operations");
                }
                next += 1;
            }
            self.device.reap(Some(REAP_MAX), &mut done)?;
            ensure!(!done.is_empty(), "no transfer ended within {} s", REAP_MAX.as_secs());
            for done in done.drain(..) {
                if let Err(failure) = done.result {
                    bail!("a transfer of {} failed: {failure:?}", self.path.display());
                }
                let number = usize::try_from(done.user)?;
                let since =
                    begun.get(number).copied().flatten().context("an unknown completion")?;
                calls.push(since.elapsed());
                free.push(match done.buffer {
                    IoBuffer::Fill(slot) => {
                        let key = fresh_key(9, round, number);
                        if let Some(at) = payload.check(&key, &slot) {
                            measures
                                .failed(format!("raw block {number} differs from byte {at} on"));
                        }
                        slot.slot()
                    }
                    IoBuffer::Drain(slot) => slot.slot(),
                    _ => bail!("the ring gave back another buffer"),
                });
            }
        }
        Ok(Round {
            bytes: self.blocks as u64 * u64::from(self.block_bytes),
            took: started.elapsed(),
            calls,
            daemon_cpu_s: 0.0,
            client_cpu_s: own_seconds() - cpu,
        })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Left behind, it would only take room.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_raw_ring_writes_and_reads_what_it_was_given() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = Sizes {
            block_bytes: 64 << 10,
            host_bytes: 0,
            nvme_bytes: 0,
            batch: 1,
            host_blocks: 0,
            nvme_blocks: 50,
            rounds: 1,
        };
        let mut raw = match Raw::prepare(folder.path(), &sizes) {
            Ok(raw) => raw,
            Err(error) => {
                eprintln!("SKIPPED: no direct I/O in {}: {error:#}", folder.path().display());
                return;
            }
        };
        let mut measures = Measures::new(sizes.block_bytes);
        raw.round(0, &mut measures).unwrap();
        raw.round(1, &mut measures).unwrap();
        assert_eq!(measures.failures(), 0);
        // The check is one: what was written last is not what is expected of another round.
        raw.transfer(0, false, &mut measures).unwrap();
        assert_eq!(measures.failures(), 50);
    }
}
