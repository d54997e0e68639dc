//! A lane: a stream with memory of its own, that carries one batch at a time.
//!
//! Tables travel through one page-locked buffer: `moves` and `sums` go up from its first half, the
//! sums come back into its second half, so that what is read there was written by the GPU.

use kvtide_kernels::abi::{
    MoveEntry, SumEntry, VERDICT_DIFFERS, VERDICT_EQUAL, as_bytes, as_bytes_mut,
};
use kvtide_kernels::driver::{
    Context, Copy, CudaError, DeviceBuffer, Event, HostRegistration, Stream,
};
use kvtide_kernels::launch::{Kernels, Pool};

use super::error_of;
use super::plan::{Places, Plan, scratch_alloc_bytes, staging_alloc_bytes, sum_of};
use crate::block::Sum128;
use crate::io::AlignedBuf;
use crate::tier::device::gpu::{BATCH_MOVES_MAX, Batch, BatchDone, BatchId, GpuError};

const MOVES_AT: usize = 0;
const SUMS_AT: usize = BATCH_MOVES_MAX * size_of::<MoveEntry>();
const UP_BYTES: usize = SUMS_AT + BATCH_MOVES_MAX * size_of::<SumEntry>();
/// On a page of its own.
const FOUND_AT: usize = UP_BYTES.next_multiple_of(4096);
const TABLE_BYTES: usize = FOUND_AT + BATCH_MOVES_MAX * size_of::<SumEntry>();

/// The page-locked buffer. While a batch is under way only the GPU touches it.
struct Tables {
    // Dropped before the memory.
    _registration: HostRegistration,
    buffer: AlignedBuf,
}

impl Tables {
    fn new(context: &Context) -> Result<Tables, CudaError> {
        let buffer = AlignedBuf::zeroed(TABLE_BYTES);
        // SAFETY: the buffer is readable and writable, keeps its address when it moves, and is
        // dropped after the registration, by the order of the fields.
        let registration =
            unsafe { HostRegistration::register(context, buffer.start(), buffer.bytes())? };
        Ok(Tables { _registration: registration, buffer })
    }

    fn put(&mut self, at: usize, bytes: &[u8]) -> bool {
        let to = self.buffer.get_mut(at..at + bytes.len());
        to.map(|to| to.copy_from_slice(bytes)).is_some()
    }

    fn found(&self, count: usize) -> Vec<SumEntry> {
        let mut found = vec![SumEntry::default(); count];
        let into = as_bytes_mut(&mut found);
        if let Some(bytes) = self.buffer.get(FOUND_AT..FOUND_AT + into.len()) {
            into.copy_from_slice(bytes);
        }
        found
    }

    fn address(&self, at: usize) -> *mut u8 {
        self.buffer.start().wrapping_add(at)
    }
}

struct UnderWay {
    id: BatchId,
    batch: Batch,
    /// The sums as they were sent.
    sums: Vec<SumEntry>,
}

/// One lane.
pub(super) struct Lane {
    under_way: Option<UnderWay>,
    stream: Stream,
    done: Event,
    tables: Tables,
    device_tables: DeviceBuffer,
    staging: DeviceBuffer,
    scratch: DeviceBuffer,
}

impl Lane {
    pub(super) fn new(context: &Context, staging_bytes: u64) -> Result<Lane, CudaError> {
        Ok(Lane {
            under_way: None,
            stream: Stream::new(context)?,
            done: Event::new(context)?,
            tables: Tables::new(context)?,
            device_tables: DeviceBuffer::alloc(context, TABLE_BYTES as u64)?,
            staging: DeviceBuffer::alloc(context, staging_alloc_bytes(staging_bytes))?,
            scratch: DeviceBuffer::alloc(context, scratch_alloc_bytes(staging_bytes))?,
        })
    }

    pub(super) fn is_free(&self) -> bool {
        self.under_way.is_none()
    }

    /// Device address of the staging memory.
    pub(super) fn staging(&self) -> u64 {
        self.staging.address()
    }

    /// Queues a batch that was checked, on a free lane. On failure the batch comes back unless it
    /// may still be under way.
    pub(super) fn start(
        &mut self,
        id: BatchId,
        batch: Batch,
        places: &Places,
        region: Option<Pool>,
        kernels: &Kernels,
        batch_copies: bool,
    ) -> Result<(), (GpuError, Option<Batch>)> {
        let plan = Plan::of(&batch, places);
        let scatters = matches!(batch, Batch::Scatter { .. });
        // From here on the lane owns the guards, whatever becomes of what is queued.
        self.under_way = Some(UnderWay { id, batch, sums: plan.sums.clone() });
        let queued = self.queue(&plan, scatters, region, kernels, batch_copies);
        let Err(error) = queued else { return Ok(()) };
        // Some of it may be under way.
        let error = self.stop().map(|lost| lost.unwrap_or_else(|| error_of(error)));
        match error {
            Ok(error) => Err((error, self.surrender())),
            Err(stuck) => Err((stuck, None)),
        }
    }

    /// Waits until nothing of this lane runs. `Ok` is the proof of that: the stream is done, or the
    /// driver has torn the context down, and says why. After any other error the GPU may still
    /// write to the host slots.
    fn stop(&self) -> Result<Option<GpuError>, GpuError> {
        match self.stream.synchronize() {
            Ok(()) => Ok(None),
            Err(error) if error.is_sticky() => Ok(Some(error_of(error))),
            Err(error) => Err(GpuError::Lost(error.to_string())),
        }
    }

    /// The batch, whether it has ended or not. Only with proof that nothing of it runs.
    pub(super) fn surrender(&mut self) -> Option<Batch> {
        self.under_way.take().map(|under_way| under_way.batch)
    }

    fn queue(
        &mut self,
        plan: &Plan,
        scatters: bool,
        region: Option<Pool>,
        kernels: &Kernels,
        batch_copies: bool,
    ) -> Result<(), CudaError> {
        self.copy(&plan.copies_in, true, batch_copies)?;
        if let (Some(region), false) = (region, plan.moves.is_empty()) {
            self.upload(plan)?;
            self.launch(plan, scatters, &region, kernels)?;
            self.download(plan)?;
        }
        self.copy(&plan.copies_out, false, batch_copies)?;
        self.done.record(&self.stream)
    }

    /// Queues copies between host slots and device memory.
    fn copy(&self, copies: &[Copy], up: bool, batch_copies: bool) -> Result<(), CudaError> {
        if batch_copies {
            // SAFETY: as below; the plan gives each payload a range of its own.
            return unsafe { self.stream.copy_batch(copies) };
        }
        for copy in copies {
            // SAFETY: the host side lies in slots whose guards `under_way` owns until the stream is
            // done, and within the bytes that they lend; the device side lies in the pool or in the
            // staging memory, which outlive the stream's work.
            unsafe {
                if up {
                    let from = std::ptr::with_exposed_provenance(copy.src as usize);
                    self.stream.copy_to_device(copy.dst, from, copy.bytes)?;
                } else {
                    let to = std::ptr::with_exposed_provenance_mut(copy.dst as usize);
                    self.stream.copy_to_host(to, copy.src, copy.bytes)?;
                }
            }
        }
        Ok(())
    }

    fn upload(&mut self, plan: &Plan) -> Result<(), CudaError> {
        let sums = as_bytes(&plan.sums);
        let fits = self.tables.put(MOVES_AT, as_bytes(&plan.moves))
            && self.tables.put(SUMS_AT, sums)
            // A copy that does not come back is then seen as no verdict.
            && self.tables.put(FOUND_AT, &vec![0; sums.len()]);
        if !fits {
            let call = "a batch larger than the tables";
            return Err(CudaError { code: CudaError::INVALID_VALUE, call });
        }
        let bytes = (SUMS_AT + sums.len()) as u64;
        let from = self.tables.address(MOVES_AT);
        // SAFETY: both ranges are at least `bytes` long, belong to this lane, and are not touched
        // until the batch has ended.
        unsafe { self.stream.copy_to_device(self.device_tables.address(), from, bytes) }
    }

    fn launch(
        &self,
        plan: &Plan,
        scatters: bool,
        region: &Pool,
        kernels: &Kernels,
    ) -> Result<(), CudaError> {
        let moves = self.device_tables.address() + MOVES_AT as u64;
        let sums = self.device_tables.address() + SUMS_AT as u64;
        let (count, scratch) = (plan.moves.len() as u32, self.scratch.address());
        // SAFETY: the tables were uploaded in front of this; they name payloads of the region's
        // block size in the pool or in this lane's staging memory, places of the region, and
        // scratch that fits (the batch was checked, and the plan's test shows that a full one
        // fits); the region's layout lies in its mapping, which outlives its batches.
        unsafe {
            if scatters {
                kernels.sum(&self.stream, sums, count, plan.payload_bytes_max, scratch)?;
                kernels.scatter(&self.stream, region, moves, count, sums)
            } else {
                kernels.gather(&self.stream, region, moves, count)?;
                kernels.sum(&self.stream, sums, count, plan.payload_bytes_max, scratch)
            }
        }
    }

    fn download(&self, plan: &Plan) -> Result<(), CudaError> {
        let bytes = size_of_val(plan.sums.as_slice()) as u64;
        let from = self.device_tables.address() + SUMS_AT as u64;
        // SAFETY: as for `upload`; the part of the buffer that is written is nobody else's.
        unsafe { self.stream.copy_to_host(self.tables.address(FOUND_AT), from, bytes) }
    }

    /// The batch, if it has ended, and what went wrong with the lane, if anything did. The batch
    /// stays here when nobody knows.
    pub(super) fn finished(&mut self) -> Result<Option<(BatchDone, Option<GpuError>)>, GpuError> {
        if self.under_way.is_none() {
            return Ok(None);
        }
        let failed = match self.done.is_done() {
            Ok(false) => return Ok(None),
            Ok(true) => None,
            Err(error) => Some(self.stop()?.unwrap_or_else(|| error_of(error))),
        };
        let Some(UnderWay { id, batch, sums }) = self.under_way.take() else { return Ok(None) };
        let results = match &failed {
            None => self.results(&batch, &sums),
            Some(error) => vec![Err(error.clone()); batch.len()],
        };
        Ok(Some((BatchDone { id, batch, results }, failed)))
    }

    fn results(&self, batch: &Batch, sent: &[SumEntry]) -> Vec<Result<Sum128, GpuError>> {
        if matches!(batch, Batch::Demote { .. }) {
            return vec![Ok(Sum128::default()); batch.len()];
        }
        let scatters = matches!(batch, Batch::Scatter { .. });
        let found = self.tables.found(sent.len());
        sent.iter().zip(found).map(|(sent, found)| verdict_of(sent, &found, scatters)).collect()
    }
}

/// What the kernels say of one payload.
fn verdict_of(sent: &SumEntry, found: &SumEntry, scatters: bool) -> Result<Sum128, GpuError> {
    let same = (sent.payload, sent.bytes, sent.expected, sent.lanes)
        == (found.payload, found.bytes, found.expected, found.lanes);
    if !same {
        return Err(GpuError::Failed("the GPU gave back a table of another batch".to_owned()));
    }
    match found.verdict {
        VERDICT_EQUAL if found.found == sent.expected => Ok(sum_of(found.found)),
        VERDICT_DIFFERS if scatters => Err(GpuError::Checksum),
        VERDICT_DIFFERS => Ok(sum_of(found.found)),
        _ => Err(GpuError::Failed("the GPU computed no checksum".to_owned())),
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.under_way.is_some() && self.stop().is_err() {
            std::mem::forget(self.under_way.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_verdict_of_this_batch_counts() {
        let sent = SumEntry { payload: 5, bytes: 300, expected: [1, 2], ..SumEntry::default() };
        let with = |verdict, found| SumEntry { verdict, found, ..sent };
        let equal = with(VERDICT_EQUAL, [1, 2]);
        assert_eq!(verdict_of(&sent, &equal, true), Ok(sum_of([1, 2])));
        let differs = with(VERDICT_DIFFERS, [3, 4]);
        assert_eq!(verdict_of(&sent, &differs, true), Err(GpuError::Checksum));
        assert_eq!(verdict_of(&sent, &differs, false), Ok(sum_of([3, 4])));
        let failed =
            |found: &SumEntry| matches!(verdict_of(&sent, found, true), Err(GpuError::Failed(_)));
        assert!(failed(&with(0, [1, 2])), "no verdict");
        assert!(failed(&with(VERDICT_EQUAL, [1, 3])), "equal to what?");
        assert!(failed(&SumEntry { payload: 6, ..equal }), "another payload");
        assert!(failed(&SumEntry { bytes: 301, ..equal }), "another length");
        assert!(failed(&SumEntry::default()), "nothing came back");
    }
}
