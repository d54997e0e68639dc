//! Copies and fills.
//!
//! Host memory that is not registered is copied from before the call returns, and into before
//! the call returns; registered memory is only touched when the stream comes to it, so that who
//! changes it too early is found out. A batch is run in reverse order, because the driver
//! promises none.

use crate::abi::{CopyAttributes, Out};
use crate::call::{Call, INVALID_VALUE};
use crate::mapping;
use crate::memory::{self, Side};
use crate::{stream, violation};

/// One copy whose sides are known.
struct Planned {
    to: u64,
    from: u64,
    bytes: u64,
    to_side: Side,
    from_side: Side,
    /// What was read from pageable memory at the call.
    snapshot: Option<Vec<u8>>,
}

impl Planned {
    fn plan(to: u64, from: u64, bytes: u64) -> Result<Planned, u32> {
        let space = memory::space();
        let to_side = space.classify(to, bytes)?;
        let from_side = space.classify(from, bytes)?;
        if to < from + bytes && from < to + bytes {
            violation::record(format!(
                "a copy of {bytes} bytes from {from:#x} to {to:#x} overlaps"
            ));
        }
        Ok(Planned { to, from, bytes, to_side, from_side, snapshot: None })
    }

    fn take_snapshot(&mut self) {
        if self.from_side == Side::Pageable {
            let mut bytes = vec![0_u8; self.bytes as usize];
            let to = bytes.as_mut_ptr().expose_provenance() as u64;
            // SAFETY: the caller of the copy promises that its source is readable during the
            // call; the vector has as many bytes.
            unsafe { mapping::copy(to, self.from, bytes.len()) };
            self.snapshot = Some(bytes);
        }
    }

    fn run(&self) -> Result<(), u32> {
        let space = memory::space();
        space.recheck(self.to, self.bytes, self.to_side)?;
        let from = match &self.snapshot {
            Some(bytes) => bytes.as_ptr().expose_provenance() as u64,
            None => {
                space.recheck(self.from, self.bytes, self.from_side)?;
                self.from
            }
        };
        // SAFETY: device memory is mapped while `space` is locked; registered host memory is,
        // because unregistering waits for the streams and whoever registered it keeps it mapped
        // until then; pageable memory is a snapshot, or its caller waits in `copy`.
        unsafe { mapping::copy(self.to, from, self.bytes as usize) };
        Ok(())
    }
}

fn is_device(side: Side) -> bool {
    matches!(side, Side::Device | Side::Freed)
}

/// Queues a copy whose sides must be device memory or not, where that is given.
fn copy(
    call: &Call,
    (to, to_device): (u64, Option<bool>),
    (from, from_device): (u64, Option<bool>),
    bytes: usize,
    stream: usize,
) -> Result<(), u32> {
    let stream = stream::get(call.device()?, stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let mut planned = Planned::plan(to, from, bytes as u64)?;
    let differs = |wanted: Option<bool>, side| wanted.is_some_and(|on| on != is_device(side));
    if differs(to_device, planned.to_side) || differs(from_device, planned.from_side) {
        return Err(INVALID_VALUE);
    }
    planned.take_snapshot();
    let waits = planned.to_side == Side::Pageable;
    stream.push(call, move || planned.run())?;
    if waits { stream.synchronize() } else { Ok(()) }
}

pub(crate) fn any(call: &Call, to: u64, from: u64, bytes: usize, stream: usize) -> Result<(), u32> {
    copy(call, (to, None), (from, None), bytes, stream)
}

pub(crate) fn to_device(
    call: &Call,
    to: u64,
    from: u64,
    bytes: usize,
    stream: usize,
) -> Result<(), u32> {
    copy(call, (to, Some(true)), (from, Some(false)), bytes, stream)
}

pub(crate) fn to_host(
    call: &Call,
    to: u64,
    from: u64,
    bytes: usize,
    stream: usize,
) -> Result<(), u32> {
    copy(call, (to, Some(false)), (from, Some(true)), bytes, stream)
}

pub(crate) fn on_device(
    call: &Call,
    to: u64,
    from: u64,
    bytes: usize,
    stream: usize,
) -> Result<(), u32> {
    copy(call, (to, Some(true)), (from, Some(true)), bytes, stream)
}

pub(crate) fn fill(
    call: &Call,
    to: u64,
    value: u8,
    bytes: usize,
    stream: usize,
) -> Result<(), u32> {
    let stream = stream::get(call.device()?, stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let side = memory::space().classify(to, bytes as u64)?;
    if !is_device(side) {
        return Err(INVALID_VALUE);
    }
    stream.push(call, move || {
        let space = memory::space();
        space.recheck(to, bytes as u64, side)?;
        // SAFETY: the memory is mapped while `space` is locked.
        unsafe { mapping::fill(to, value, bytes) };
        Ok(())
    })
}

/// The arrays of a batch copy.
pub(crate) struct Batch {
    pub(crate) to: Out<u64>,
    pub(crate) from: Out<u64>,
    pub(crate) bytes: Out<usize>,
    pub(crate) count: usize,
    pub(crate) attributes: Out<CopyAttributes>,
    pub(crate) attributes_from: Out<usize>,
    pub(crate) attributes_count: usize,
}

pub(crate) fn batch(call: &Call, batch: &Batch, stream: usize) -> Result<(), u32> {
    if stream::is_default(stream) || batch.count == 0 || batch.attributes_count == 0 {
        return Err(INVALID_VALUE);
    }
    let mut before = None;
    for index in 0..batch.attributes_count {
        let from = batch.attributes_from.nth(index)?;
        let is_next = before.map_or(from == 0, |before| from > before && from < batch.count);
        if !is_next || !(1..=3).contains(&batch.attributes.nth(index)?.access_order) {
            return Err(INVALID_VALUE);
        }
        before = Some(from);
    }
    let stream = stream::get(call.device()?, stream)?;
    let mut planned = Vec::with_capacity(batch.count);
    for index in 0..batch.count {
        let bytes = batch.bytes.nth(index)? as u64;
        let copy = Planned::plan(batch.to.nth(index)?, batch.from.nth(index)?, bytes)?;
        // The driver would wait for pageable memory, or refuse it; the strict one is refused.
        if bytes == 0 || copy.to_side == Side::Pageable || copy.from_side == Side::Pageable {
            return Err(INVALID_VALUE);
        }
        planned.push(copy);
    }
    stream.push(call, move || planned.iter().rev().try_for_each(Planned::run))
}
