//! The yardstick of the nvme tier: a file with direct I/O, fixed buffers in huge pages where there
//! are any, a number of transfers under way. What a storage engine could do with this disk if it
//! did nothing else: the buffers are filled before, and nothing is compared while it is timed.

use std::{
    collections::VecDeque,
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
    Setup,
    measure::{Direction, Kind, Measures, Round, Work},
    set::fresh_key,
};
use crate::{payload::Payload, process::own_seconds};

/// Longest wait for one completion.
const REAP_MAX: Duration = Duration::from_secs(30);

/// Memory that the transfers cycle through, so that it is not the caches that they come from.
const BUFFER_BYTES: u64 = 256 << 20;

/// The file and its ring.
pub(super) struct Raw {
    device: Box<dyn BlockDevice>,
    arena: Arc<Arena>,
    status: Arc<RingStatus>,
    /// Each with the number of the payload that is in it.
    slots: VecDeque<(SlotId, u64)>,
    /// For each block of the file, the number of the payload that was written last.
    written: Vec<u64>,
    payloads: u64,
    block_bytes: u32,
    depths: Vec<u32>,
    path: PathBuf,
    direct: bool,
}

/// An arena all of whose pages are there, cut into slots of one block.
pub(super) fn arena_with(
    blocks: usize,
    block_bytes: u32,
) -> anyhow::Result<(Arc<Arena>, Vec<SlotId>)> {
    let slab_bytes = block_bytes.next_multiple_of(2 << 20);
    let per_slab = slab_bytes / block_bytes;
    let slabs = u32::try_from(blocks)?.div_ceil(per_slab);
    let arena = Arena::create(u64::from(slab_bytes) * u64::from(slabs), slab_bytes)?;
    // Registration with a ring follows the touching of the pages; wait for all of it.
    let until = Instant::now() + Duration::from_secs(30);
    while arena.touched_bytes() < arena.bytes() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut slots = Vec::with_capacity(blocks);
    for slab in 0..slabs {
        arena.bind_slab(slab, block_bytes)?;
        for index in 0..per_slab {
            slots.push(arena.slot(slab, index).context("a bound slab has its slots")?);
        }
    }
    slots.truncate(blocks);
    Ok((arena, slots))
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
    /// Makes the file, as large as the sets of all clients, and writes it through once: blocks of
    /// a file that were never written are slower to write, and the store's were written before.
    pub(super) fn prepare(folder: &Path, setup: &Setup) -> anyhow::Result<Raw> {
        let path = folder.join("raw-ring.bin");
        let blocks = setup.nvme_blocks * setup.clients;
        let bytes = setup.block_bytes * blocks as u64;
        let block_bytes = u32::try_from(setup.block_bytes)?;
        let (file, direct) = open_direct(&path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
            .with_context(|| format!("no room for {bytes} bytes in {}", path.display()))?;
        let depth_max = setup.depths.iter().copied().max().unwrap_or(1);
        let buffers = usize::try_from(BUFFER_BYTES / setup.block_bytes)?.min(blocks);
        let (arena, slots) = arena_with(buffers.max(depth_max as usize), block_bytes)?;
        let status = RingStatus::new();
        let open = OpenDevice {
            file,
            arena: Some(Arc::clone(&arena)),
            choice: RingChoice::Auto,
            queue_depth: depth_max,
        };
        let device = open_device(open, &status)?;
        let mut raw = Raw {
            device,
            arena,
            status,
            slots: slots.into_iter().map(|slot| (slot, 0)).collect(),
            written: vec![0; blocks],
            payloads: 0,
            block_bytes,
            depths: setup.depths.clone(),
            path,
            direct,
        };
        raw.fill()?;
        raw.transfer(0, blocks, Direction::Store, depth_max)?;
        Ok(raw)
    }

    pub(super) fn pages(&self) -> String {
        format!("{} ({})", self.arena.pages().name(), self.arena.pages_why())
    }

    /// How transfers go, and whether all of the memory is registered.
    pub(super) fn ring(&self) -> String {
        let report = self.status.report();
        let how = if self.direct { "past the page cache" } else { "THROUGH THE PAGE CACHE" };
        let fixed = match report.fixed_bytes >= self.arena.bytes() {
            true => "all buffers fixed".to_owned(),
            false => format!(
                "ONLY {} OF {} BYTES OF BUFFERS FIXED ({})",
                report.fixed_bytes,
                self.arena.bytes(),
                report.fixed_why
            ),
        };
        format!("{:?} {how}, {fixed}", report.kind)
    }

    /// Each depth writes a part of the file, or reads what was written there in the same round. The
    /// parts move around the file from round to round.
    pub(super) fn round(
        &mut self,
        round: u32,
        direction: Direction,
        measures: &mut Measures,
    ) -> anyhow::Result<()> {
        if direction == Direction::Store {
            self.fill()?;
        }
        let depths = self.depths.clone();
        let part = self.written.len() / depths.len().max(1);
        for number in 0..depths.len() {
            let number = (number + round as usize) % depths.len();
            let Some(depth) = depths.get(number).copied() else { continue };
            let first = (number + round as usize) % depths.len() * part;
            let mut row = self.transfer(first, part, direction, depth)?;
            row.round = round;
            let kind = Kind { work: Work::Raw, direction, batch: 1, depth: depth as usize };
            measures.add(kind, row);
            if direction == Direction::Load {
                self.check(measures)?;
            }
        }
        Ok(())
    }

    /// Fills every buffer with a new payload.
    fn fill(&mut self) -> anyhow::Result<()> {
        let payload = Payload::new();
        for (slot, number) in &mut self.slots {
            self.payloads += 1;
            *number = self.payloads;
            let mut buffer = self.arena.write(*slot, self.block_bytes)?;
            payload.fill(&fresh_key(2, 0, 0, usize::try_from(*number)?), &mut buffer);
        }
        Ok(())
    }

    /// Compares what is in every buffer now with what should have been read into it last.
    fn check(&self, measures: &mut Measures) -> anyhow::Result<()> {
        let payload = Payload::new();
        for (slot, number) in &self.slots {
            let buffer = self.arena.read(*slot, self.block_bytes)?;
            if let Some(at) = payload.check(&fresh_key(2, 0, 0, usize::try_from(*number)?), &buffer)
            {
                measures.failed(format!("a block of the raw ring differs from byte {at} on"));
            }
        }
        Ok(())
    }

    /// Writes or reads blocks of the file, `depth` at a time.
    fn transfer(
        &mut self,
        first: usize,
        blocks: usize,
        direction: Direction,
        depth: u32,
    ) -> anyhow::Result<Round> {
        let store = direction == Direction::Store;
        let mut begun: Vec<Option<Instant>> = vec![None; self.written.len()];
        let mut calls = Vec::with_capacity(blocks);
        let mut done = Vec::<IoDone>::with_capacity(depth as usize);
        let (mut next, end) = (first, first + blocks);
        let (started, cpu) = (Instant::now(), own_seconds());
        while calls.len() < blocks {
            while next < end && next - first - calls.len() < depth as usize {
                let (slot, payload) = self.slots.pop_front().context("more depth than buffers")?;
                let buffer = if store {
                    IoBuffer::Drain(self.arena.read(slot, self.block_bytes)?)
                } else {
                    IoBuffer::Fill(self.arena.write(slot, self.block_bytes)?)
                };
                if let (true, Some(written)) = (store, self.written.get_mut(next)) {
                    *written = payload;
                }
                if let Some(begun) = begun.get_mut(next) {
                    *begun = Some(Instant::now());
                }
                let offset = next as u64 * u64::from(self.block_bytes);
                if self.device.submit(IoOp { user: next as u64, offset, buffer }).is_err() {
                    bail!("the ring is full with fewer than {depth} operations");
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
                let slot = match done.buffer {
                    IoBuffer::Fill(slot) => slot.slot(),
                    IoBuffer::Drain(slot) => slot.slot(),
                    _ => bail!("the ring gave back another buffer"),
                };
                let payload = self.written.get(number).copied().unwrap_or(0);
                self.slots.push_back((slot, payload));
            }
        }
        Ok(Round {
            bytes: blocks as u64 * u64::from(self.block_bytes),
            took: started.elapsed(),
            calls,
            client_cpu_s: own_seconds() - cpu,
            ..Round::default()
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
        let setup = Setup {
            block_bytes: 64 << 10,
            nvme_blocks: 50,
            depths: vec![1, 4],
            ..Setup::default()
        };
        let mut raw = match Raw::prepare(folder.path(), &setup) {
            Ok(raw) => raw,
            Err(error) => {
                eprintln!("SKIPPED: no direct I/O in {}: {error:#}", folder.path().display());
                return;
            }
        };
        let mut measures = Measures::new();
        for round in 0..2 {
            raw.round(round, Direction::Store, &mut measures).unwrap();
            raw.round(round, Direction::Load, &mut measures).unwrap();
        }
        assert_eq!(measures.summary.client_failures, 0);
        // The check is one: what is expected of other blocks is not what was read.
        raw.slots.iter_mut().for_each(|(_, payload)| *payload += 1);
        raw.check(&mut measures).unwrap();
        assert_eq!(measures.summary.client_failures, raw.slots.len() as u64);
    }
}
