//! The offline optimum of one tier: Belady's rule, with the future known.
//!
//! The block that is used last from now leaves first; of those that the same request will use, the
//! deepest. Nobody can build this; it says how much is left to gain.

use std::collections::BinaryHeap;

use anyhow::Context;

use crate::trace::TraceRequest;

/// The next use of a block that is not used again.
const NEVER: u32 = u32::MAX;

/// All paths of a trace, in memory, with the block numbers made dense.
#[derive(Default)]
pub(super) struct Paths {
    blocks: Vec<u32>,
    /// Where each path ends.
    ends: Vec<usize>,
    unique: usize,
}

impl Paths {
    /// Adds a path. Block numbers of traces count up from 0.
    pub(super) fn add(&mut self, request: &TraceRequest) -> anyhow::Result<()> {
        for id in &request.path {
            let id = u32::try_from(*id).context("the trace has too many blocks")?;
            self.unique = self.unique.max(id as usize + 1);
            self.blocks.push(id);
        }
        self.ends.push(self.blocks.len());
        Ok(())
    }

    /// Distinct blocks.
    pub(super) fn unique(&self) -> usize {
        self.unique
    }

    fn paths(&self) -> impl DoubleEndedIterator<Item = &[u32]> {
        let starts = std::iter::once(&0).chain(&self.ends);
        let ranges: Vec<(usize, usize)> =
            starts.zip(&self.ends).map(|(start, end)| (*start, *end)).collect();
        ranges.into_iter().map(|(start, end)| self.blocks.get(start..end).unwrap_or_default())
    }

    /// For every use of every block, the request that uses it next.
    fn next_uses(&self) -> Vec<u32> {
        let mut next = vec![NEVER; self.unique];
        let mut uses = Vec::with_capacity(self.blocks.len());
        let last = self.ends.len() as u32;
        for (request, path) in (0..last).rev().zip(self.paths().rev()) {
            for block in path.iter().rev() {
                if let Some(next) = next.get_mut(*block as usize) {
                    uses.push(std::mem::replace(next, request));
                }
            }
        }
        uses.reverse();
        uses
    }

    /// Hits of the optimum with room for `capacity` blocks.
    pub(super) fn optimum(&self, capacity: usize) -> u64 {
        let uses = self.next_uses();
        let mut uses = uses.as_slice();
        // What is resident, with its next use; the heap may hold older entries beside the true one.
        let mut resident: Vec<Option<u32>> = vec![None; self.unique];
        let mut heap: BinaryHeap<(u32, u32, u32)> = BinaryHeap::new();
        let (mut count, mut hits) = (0, 0);
        for path in self.paths() {
            let (now, rest) = uses.split_at(path.len());
            uses = rest;
            let is_here = |block: &u32| resident.get(*block as usize).copied().flatten().is_some();
            hits += path.iter().take_while(|block| is_here(block)).count() as u64;
            for ((block, next), depth) in path.iter().zip(now).zip(0..path.len() as u32).rev() {
                let Some(place) = resident.get_mut(*block as usize) else { continue };
                count += usize::from(place.replace(*next).is_none());
                heap.push((*next, depth, *block));
                while count > capacity {
                    let Some((next, _, block)) = heap.pop() else { break };
                    if let Some(place) = resident.get_mut(block as usize)
                        && *place == Some(next)
                    {
                        *place = None;
                        count -= 1;
                    }
                }
            }
        }
        hits
    }
}
