//! The yardstick of the host tier: plain copies of as many bytes, by as many threads as the
//! daemon copies with, between memory of the kinds that are copied between there. The client's
//! side is a memfd (ordinary pages unless the system gives others), the daemon's an arena.

use std::{
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use kvtide_tiers::{
    block::Sum128,
    catalog::SlotId,
    io::{Arena, SharedMemory},
};

use super::{
    Setup,
    measure::{Direction, Kind, Measures, Round, Work},
    raw::arena_with,
    set::fresh_key,
};
use crate::{payload::Payload, process::own_seconds};

/// Both sides.
pub(super) struct Copies {
    region: SharedMemory,
    arena: Arc<Arena>,
    slots: Vec<SlotId>,
    block_bytes: u32,
    threads: usize,
}

impl Copies {
    pub(super) fn new(setup: &Setup, threads: usize) -> anyhow::Result<Copies> {
        let blocks = setup.host_blocks * setup.clients;
        let block_bytes = u32::try_from(setup.block_bytes)?;
        let region =
            SharedMemory::create("kvtide-bench-copies", setup.block_bytes * blocks as u64)?;
        let (arena, slots) = arena_with(blocks, block_bytes)?;
        let copies = Copies { region, arena, slots, block_bytes, threads: threads.max(1) };
        // What is copied differs in every block, and every page is there.
        let payload = Payload::new();
        let mut buffer = vec![0; usize::try_from(block_bytes)?];
        for number in 0..blocks {
            payload.fill(&fresh_key(1, 0, 0, number), &mut buffer);
            copies.region.write_at(number as u64 * u64::from(block_bytes), &buffer)?;
        }
        copies.pass(Work::Memcpy, Direction::Store, 0)?;
        Ok(copies)
    }

    /// What the two sides are made of.
    pub(super) fn pages(&self) -> String {
        format!("a memfd of the client's kind and {}", self.arena.pages().name())
    }

    /// Copies of both directions; `sums`: also those with a checksum.
    pub(super) fn round(
        &self,
        round: u32,
        sums: bool,
        measures: &mut Measures,
    ) -> anyhow::Result<()> {
        let works: &[Work] = if sums { &[Work::Memcpy, Work::MemcpySum] } else { &[Work::Memcpy] };
        for direction in [Direction::Store, Direction::Load] {
            for work in works.iter().copied() {
                let kind = Kind { work, direction, batch: 1, depth: self.threads };
                measures.add(kind, self.pass(work, direction, round)?);
            }
        }
        Ok(())
    }

    fn pass(&self, work: Work, direction: Direction, round: u32) -> anyhow::Result<Round> {
        let share = self.slots.len().div_ceil(self.threads).max(1);
        let start = Barrier::new(self.slots.chunks(share).len() + 1);
        let (took, calls, client_cpu_s) = std::thread::scope(|scope| {
            let start = &start;
            let threads: Vec<_> = self
                .slots
                .chunks(share)
                .enumerate()
                .map(|(number, slots)| {
                    scope.spawn(move || {
                        start.wait();
                        let began = Instant::now();
                        let calls = self.copy(work, direction, number * share, slots)?;
                        anyhow::Ok((began, Instant::now(), calls))
                    })
                })
                .collect();
            let cpu = own_seconds();
            start.wait();
            let mut calls = Vec::with_capacity(self.slots.len());
            let mut span: Option<(Instant, Instant)> = None;
            for thread in threads {
                let Ok(done) = thread.join() else { bail!("a copying thread panicked") };
                let (began, ended, mut own) = done?;
                let (first, last) = span.unwrap_or((began, ended));
                span = Some((first.min(began), last.max(ended)));
                calls.append(&mut own);
            }
            let (began, ended) = span.context("there is a thread")?;
            anyhow::Ok((ended - began, calls, own_seconds() - cpu))
        })?;
        let bytes = self.slots.len() as u64 * u64::from(self.block_bytes);
        Ok(Round { round, bytes, took, calls, client_cpu_s, ..Round::default() })
    }

    fn copy(
        &self,
        work: Work,
        direction: Direction,
        first: usize,
        slots: &[SlotId],
    ) -> anyhow::Result<Vec<Duration>> {
        let mut calls = Vec::with_capacity(slots.len());
        for (slot, number) in slots.iter().zip(first as u64..) {
            let begun = Instant::now();
            let offset = number * u64::from(self.block_bytes);
            if direction == Direction::Store {
                let mut slot = self.arena.write(*slot, self.block_bytes)?;
                self.region.read_at(offset, &mut slot)?;
                if work == Work::MemcpySum {
                    std::hint::black_box(Sum128::of(&slot));
                }
            } else {
                let slot = self.arena.read(*slot, self.block_bytes)?;
                if work == Work::MemcpySum {
                    std::hint::black_box(Sum128::of(&slot));
                }
                self.region.write_at(offset, &slot)?;
            }
            calls.push(begun.elapsed());
        }
        Ok(calls)
    }
}

/// Threads with which a daemon copies: counted by their name, else (where they have another) half
/// of the cores. The second value says which.
pub(super) fn copy_threads(daemon_pid: u32) -> anyhow::Result<(usize, &'static str)> {
    let tasks = std::fs::read_dir(format!("/proc/{daemon_pid}/task"))
        .context("cannot see the daemon's threads")?;
    let named = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        name.starts_with("kvtide-copy")
    };
    match tasks.flatten().map(named).filter(|named| *named).count() {
        0 => {
            let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
            Ok(((cores / 2).clamp(1, 8), "half of the cores; the daemon's threads were not found"))
        }
        threads => Ok((threads, "as the daemon has")),
    }
}
