//! What a checked job is to do, before it becomes a part of a batch.

use super::gpu::{
    Batch, DemoteMove, GatherMove, GpuError, GpuInfo, GpuRegion, RegionShape, ScatterMove,
};

/// One move.
pub(super) enum Work {
    Gather(GatherMove),
    Scatter(ScatterMove),
    Demote(DemoteMove),
}

/// What the queue must know of a move to make batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Gather,
    /// Into this place.
    Scatter(u32),
    Demote,
}

impl Kind {
    /// Whether both can be in one batch: a batch is of one kind, and writes no place twice.
    pub(super) fn joins(self, other: Kind) -> bool {
        match (self, other) {
            (Kind::Scatter(one), Kind::Scatter(other)) => one != other,
            _ => self == other,
        }
    }
}

impl Work {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Work::Gather(_) => Kind::Gather,
            Work::Scatter(one) => Kind::Scatter(one.place),
            Work::Demote(_) => Kind::Demote,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(match self {
            Work::Gather(one) => one.bytes,
            Work::Scatter(one) => one.bytes,
            Work::Demote(one) => one.bytes,
        })
    }

    pub(super) fn check(
        &self,
        shape: Option<&RegionShape>,
        info: &GpuInfo,
    ) -> Result<(), GpuError> {
        match self {
            Work::Gather(one) => one.check(shape.ok_or(GpuError::Closed)?, info),
            Work::Scatter(one) => one.check(shape.ok_or(GpuError::Closed)?, info),
            Work::Demote(one) => one.check(info),
        }
    }
}

/// Moves of one kind as a batch. The region is of no meaning for demotions.
pub(super) fn batch_of(region: GpuRegion, run: Vec<Work>) -> Batch {
    let (mut gathers, mut scatters, mut demotes) = (Vec::new(), Vec::new(), Vec::new());
    for work in run {
        match work {
            Work::Gather(one) => gathers.push(one),
            Work::Scatter(one) => scatters.push(one),
            Work::Demote(one) => demotes.push(one),
        }
    }
    if !gathers.is_empty() {
        Batch::Gather { region, moves: gathers }
    } else if !scatters.is_empty() {
        Batch::Scatter { region, moves: scatters }
    } else {
        Batch::Demote { moves: demotes }
    }
}
