//! What a batch becomes: tables for the kernels, and copies between host slots and device memory.
//! Pure: addresses are numbers here.

use kvtide_kernels::abi::{MoveEntry, SumEntry, scratch_bytes};
use kvtide_kernels::driver::Copy;

use crate::block::Sum128;
use crate::catalog::SlotId;
use crate::tier::device::gpu::{BATCH_MOVES_MAX, Batch, MoveTo, ScatterFrom};

/// Payloads in staging memory start at multiples of this.
const STAGING_ALIGN: u64 = 256;

/// Staging memory of a lane whose batches have at most so many bytes.
pub(super) fn staging_alloc_bytes(staging_bytes: u64) -> u64 {
    staging_bytes + BATCH_MOVES_MAX as u64 * STAGING_ALIGN
}

/// Scratch for the checksums of any batch of so many bytes.
pub(super) fn scratch_alloc_bytes(staging_bytes: u64) -> u64 {
    // Each of the moves may end in the middle of a block of the checksum.
    scratch_bytes(staging_bytes) + BATCH_MOVES_MAX as u64 * scratch_bytes(1)
}

/// Where things lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// Device address of the pool.
    pub(super) pool: u64,
    /// Device address of the lane's staging memory.
    pub(super) staging: u64,
    /// Address of the arena.
    pub(super) host: u64,
    /// Bytes of a slab of the arena; no copy reaches over the end of one.
    pub(super) slab_bytes: u64,
}

impl Places {
    fn slot(&self, slot: SlotId) -> u64 {
        self.pool + slot.offset()
    }
}

/// A batch, planned.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// One per move, in order; empty for demotions.
    pub(super) moves: Vec<MoveEntry>,
    /// As `moves`.
    pub(super) sums: Vec<SumEntry>,
    /// Host slots to device memory, before the kernels.
    pub(super) copies_in: Vec<Copy>,
    /// Device memory to host slots, after the kernels.
    pub(super) copies_out: Vec<Copy>,
    /// Bytes of the largest payload.
    pub(super) payload_bytes_max: u64,
}

/// A move before it has a place in staging memory.
struct Piece {
    bytes: u64,
    /// `None`: in staging memory.
    device: Option<u64>,
    /// Address of the host slot, if there is one.
    host: Option<u64>,
    /// `None`: only computed.
    expected: Option<Sum128>,
    place: u32,
}

impl Plan {
    /// Plans a batch that was checked.
    pub(super) fn of(batch: &Batch, places: &Places) -> Plan {
        let pieces = pieces_of(batch, places);
        let payloads = payloads_of(&pieces, places);
        let mut plan = Plan::default();
        let mut copies = Vec::new();
        let mut lanes = 0;
        for (at, (piece, payload)) in pieces.iter().zip(payloads).enumerate() {
            let host = piece.host.map(|host| (host, payload, piece.bytes));
            copies.extend(host);
            if matches!(batch, Batch::Demote { .. }) {
                continue;
            }
            plan.payload_bytes_max = plan.payload_bytes_max.max(piece.bytes);
            plan.moves.push(MoveEntry { payload, place: piece.place, sum: at as u32 });
            plan.sums.push(SumEntry {
                payload,
                bytes: piece.bytes,
                expected: piece.expected.map_or([0; 2], halves_of),
                // Also where nothing is expected, so that a verdict proves that the sum was made.
                compare: 1,
                lanes,
                ..SumEntry::default()
            });
            lanes += scratch_bytes(piece.bytes) / 8;
        }
        let coalesced = coalesce(copies, places);
        if matches!(batch, Batch::Scatter { .. }) {
            let copy = |(host, device, bytes)| Copy { dst: device, src: host, bytes };
            plan.copies_in = coalesced.into_iter().map(copy).collect();
        } else {
            let copy = |(host, device, bytes)| Copy { dst: host, src: device, bytes };
            plan.copies_out = coalesced.into_iter().map(copy).collect();
        }
        plan
    }
}

/// A checksum as the kernels have it: low and high half.
fn halves_of(sum: Sum128) -> [u64; 2] {
    let value = u128::from_le_bytes(sum.0);
    [value as u64, (value >> 64) as u64]
}

/// The reverse of [`halves_of`].
pub(super) fn sum_of([low, high]: [u64; 2]) -> Sum128 {
    Sum128((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
}

fn pieces_of(batch: &Batch, places: &Places) -> Vec<Piece> {
    match batch {
        Batch::Gather { moves, .. } => moves
            .iter()
            .map(|one| {
                let (device, host) = match &one.to {
                    MoveTo::Pool(slot) => (Some(places.slot(*slot)), None),
                    MoveTo::Host(slot) => (None, Some(places.host + slot.slot().offset())),
                    MoveTo::Nowhere => (None, None),
                };
                let bytes = u64::from(one.bytes);
                Piece { bytes, device, host, expected: None, place: one.place }
            })
            .collect(),
        Batch::Scatter { moves, .. } => moves
            .iter()
            .map(|one| {
                let (device, host) = match &one.from {
                    ScatterFrom::Pool(slot) => (Some(places.slot(*slot)), None),
                    ScatterFrom::Host { slot, through } => {
                        let device = through.map(|slot| places.slot(slot));
                        (device, Some(places.host + slot.slot().offset()))
                    }
                };
                let bytes = u64::from(one.bytes);
                Piece { bytes, device, host, expected: Some(one.expected), place: one.place }
            })
            .collect(),
        Batch::Demote { moves } => moves
            .iter()
            .map(|one| Piece {
                bytes: u64::from(one.bytes),
                device: Some(places.slot(one.slot)),
                host: Some(places.host + one.to.slot().offset()),
                expected: None,
                place: 0,
            })
            .collect(),
    }
}

/// The device address of each piece's payload. Staging memory is given out in the order of the
/// host slots, so that slots which are neighbours can be copied in one go.
fn payloads_of(pieces: &[Piece], places: &Places) -> Vec<u64> {
    let mut payloads: Vec<u64> = pieces.iter().map(|piece| piece.device.unwrap_or(0)).collect();
    let mut staged: Vec<(Option<u64>, usize, u64)> = pieces
        .iter()
        .enumerate()
        .filter(|(_, piece)| piece.device.is_none())
        .map(|(at, piece)| (piece.host, at, piece.bytes))
        .collect();
    staged.sort_unstable();
    let mut next = places.staging;
    for (_, at, bytes) in staged {
        if let Some(payload) = payloads.get_mut(at) {
            *payload = next;
        }
        next += bytes.next_multiple_of(STAGING_ALIGN);
    }
    payloads
}

/// Joins copies (host address, device address, bytes) that continue each other on both sides and
/// stay within a slab.
fn coalesce(mut copies: Vec<(u64, u64, u64)>, places: &Places) -> Vec<(u64, u64, u64)> {
    copies.sort_unstable();
    let slab = |host: u64| (host - places.host) / places.slab_bytes.max(1);
    let mut joined: Vec<(u64, u64, u64)> = Vec::with_capacity(copies.len());
    for (host, device, bytes) in copies {
        match joined.last_mut() {
            Some((first_host, first_device, so_far))
                if *first_host + *so_far == host
                    && *first_device + *so_far == device
                    && slab(*first_host) == slab(host) =>
            {
                *so_far += bytes;
            }
            _ => joined.push((host, device, bytes)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Arena;
    use crate::tier::device::gpu::{DemoteMove, GatherMove, GpuRegion, ScatterMove};

    const PLACES: Places =
        Places { pool: 1 << 40, staging: 2 << 40, host: 3 << 40, slab_bytes: 64 << 10 };

    #[test]
    fn neighbours_in_host_memory_are_one_copy_within_a_slab() {
        let arena = Arena::create(4 * (64 << 10), 64 << 10).unwrap();
        (0..4).for_each(|slab| arena.bind_slab(slab, 8192).unwrap());
        // Slots 6 and 7 of slab 0, slot 0 of slab 1, in another order; slot 3 apart from them.
        let slots = [(0, 7), (1, 0), (0, 3), (0, 6)];
        let moves = slots
            .iter()
            .enumerate()
            .map(|(place, (slab, index))| ScatterMove {
                place: place as u32,
                bytes: 8192,
                from: ScatterFrom::Host {
                    slot: arena.read(arena.slot(*slab, *index).unwrap(), 8192).unwrap(),
                    through: None,
                },
                expected: Sum128([place as u8; 16]),
            })
            .collect();
        let plan = Plan::of(&Batch::Scatter { region: GpuRegion(1), moves }, &PLACES);
        let at = |slab: u64, index: u64| PLACES.host + (slab * (64 << 10) + index * 8192);
        let staged = |place: u64| PLACES.staging + place * 8192;
        assert_eq!(
            plan.copies_in,
            [
                Copy { src: at(0, 3), dst: staged(0), bytes: 8192 },
                Copy { src: at(0, 6), dst: staged(1), bytes: 16384 },
                Copy { src: at(1, 0), dst: staged(3), bytes: 8192 },
            ]
        );
        // The tables are in the order of the moves, whatever lies where.
        let payloads: Vec<u64> = plan.moves.iter().map(|one| one.payload).collect();
        assert_eq!(payloads, [staged(2), staged(3), staged(0), staged(1)]);
        for (at, (one, sum)) in plan.moves.iter().zip(&plan.sums).enumerate() {
            assert_eq!((one.place, one.sum), (at as u32, at as u32));
            assert_eq!((sum.payload, sum.bytes, sum.verdict), (one.payload, 8192, 0));
            assert_eq!(sum_of(sum.expected), Sum128([at as u8; 16]));
            assert_eq!(sum.lanes, at as u64 * scratch_bytes(8192) / 8);
        }
        assert!(plan.copies_out.is_empty());
    }

    #[test]
    fn a_block_of_odd_length_is_copied_alone_and_ends_where_it_ends() {
        let arena = Arena::create(64 << 10, 64 << 10).unwrap();
        arena.bind_slab(0, 8192).unwrap();
        let moves = (0..2)
            .map(|index| DemoteMove {
                slot: SlotId(index * 2),
                bytes: 8000,
                to: arena.write(arena.slot(0, index).unwrap(), 8000).unwrap(),
            })
            .collect();
        let plan = Plan::of(&Batch::Demote { moves }, &PLACES);
        let copies: Vec<u64> = plan.copies_out.iter().map(|copy| copy.bytes).collect();
        assert_eq!(copies, [8000, 8000]);
        assert!(plan.moves.is_empty() && plan.sums.is_empty());
    }

    #[test]
    fn a_full_batch_fits_the_memory_of_a_lane() {
        let staging = 64 * 1025u64;
        let moves = (0..BATCH_MOVES_MAX as u32)
            .map(|place| GatherMove { place, bytes: 1025, to: MoveTo::Nowhere })
            .collect();
        let plan = Plan::of(&Batch::Gather { region: GpuRegion(1), moves }, &PLACES);
        let ends = plan.sums.iter().map(|sum| sum.payload + sum.bytes - PLACES.staging);
        assert!(ends.max().unwrap() <= staging_alloc_bytes(staging));
        let scratch = plan.sums.iter().map(|sum| sum.lanes * 8 + scratch_bytes(sum.bytes));
        assert!(scratch.max().unwrap() <= scratch_alloc_bytes(staging));
    }
}
