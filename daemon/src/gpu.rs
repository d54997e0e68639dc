//! Regions in GPU memory: what of a registration can be checked without a GPU, and the wait for the
//! import, which may take long or for ever.
//!
//! Invariants: nobody here waits for a GPU beyond the call's deadline, nor on a thread; a region
//! whose registration nobody heard of any more is unregistered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtide_client::protocol::CallError;
use kvtide_tiers::block::{
    GPU_BLOCK_BYTES_UNSUPPORTED, GPU_EVENTS_MAX, GpuMemory, GpuOrder, GpuRegionSpec, GpuUuid,
    RegionLayout,
};
use kvtide_tiers::catalog::{Limit, RegionId};
use kvtide_tiers::movement::{GpuRegion, RegisterError};
use kvtide_tiers::tier::device::OpenMemory;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::app::App;
use crate::session::{Importing, RegionKind, RegionRoom, Session};

/// What is left of a call's time for its answer to travel.
const ANSWER_TIME: Duration = Duration::from_millis(50);

/// Registers GPU memory of a session.
///
/// # Errors
/// What is wrong with it, a GPU that is not there, or an import that has not ended by `deadline`.
pub async fn register(
    app: &Arc<App>,
    session: &Arc<Session>,
    spec: GpuRegionSpec,
    deadline: Instant,
) -> Result<RegionId, CallError> {
    let events = check(&spec)?;
    let max = app.limits().region_bytes_per_session;
    let room = session.region_room(spec.bytes, max).map_err(CallError::Invalid)?;
    let gpu = spec.gpu;
    let region = region(session, spec)?;
    let (answer, answered) = oneshot::channel();
    let registering = Registering {
        app: Arc::clone(app),
        session: Arc::clone(session),
        room,
        kind: RegionKind::Gpu { events },
        _import: session.importing(),
    };
    let runtime = Handle::current();
    // A layout that is finely interleaved takes up to a second, here and in the node.
    let begun = tokio::task::spawn_blocking(move || {
        check_layout(&region.layout, region.bytes)?;
        let Registering { app, session, .. } = &registering;
        let (app, session) = (Arc::clone(app), session.id);
        app.node().register_gpu_region(session, region, move |result| {
            // Whoever asked may be gone, also while this is on its way: then it is undone.
            drop(answer.send(result.map(|id| registering.registered(id, runtime))));
        });
        Ok(())
    });
    begun.await.map_err(|_| CallError::Internal("the daemon is stopping".to_owned()))??;
    match tokio::time::timeout_at(before(deadline), answered).await {
        Ok(answer) => match answer.map_err(|_| CallError::Internal(NOT_ANSWERED.to_owned()))? {
            Ok(registered) => Ok(registered.heard()),
            Err(error) => Err(refused(error, gpu, app.device_off().as_deref())),
        },
        Err(_) => Err(CallError::Internal(format!(
            "{gpu} has not imported the memory in time; `kvtide status` shows whether it is stuck"
        ))),
    }
}

const NOT_ANSWERED: &str = "the device tier has ended";

/// Ends a registration, and waits until the memory is imported no more.
///
/// # Errors
/// When that has not come by `deadline`; it goes on.
pub async fn unregister(
    app: &Arc<App>,
    session: &Arc<Session>,
    region: RegionId,
    deadline: Instant,
) -> Result<(), CallError> {
    begin_unregister(app, session, region);
    if session.region_gone(region, before(deadline)).await {
        return Ok(());
    }
    let text = "the GPU has not let go of the memory in time; `kvtide status` shows whether it is \
                stuck";
    Err(CallError::Internal(text.to_owned()))
}

/// Asks the node to let go of all GPU memory of a session that ends.
pub fn end_session(app: &App, session: &Arc<Session>) {
    for region in session.gpu_regions() {
        begin_unregister(app, session, region);
    }
}

/// Asks the node to let go of the memory, unless that was asked before.
fn begin_unregister(app: &App, session: &Arc<Session>, region: RegionId) {
    if session.begin_end(region) {
        let ending = Arc::clone(session);
        let ended = move || ending.region_ended(region);
        app.node().unregister_gpu_region(session.id, region, ended);
    }
}

/// Whether a load or store may wait for this event of its region.
///
/// # Errors
/// An event that the region does not have.
pub fn check_event(
    session: &Session,
    region: RegionId,
    event: Option<u32>,
) -> Result<(), CallError> {
    let Some(event) = event else { return Ok(()) };
    let text = match session.region_kind(region) {
        // The catalog says so.
        None => return Ok(()),
        Some(RegionKind::Host) => "a region of host memory has no events".to_owned(),
        Some(RegionKind::Gpu { events: 0 }) => {
            "the region was registered without a ring of events".to_owned()
        }
        Some(RegionKind::Gpu { events }) => {
            if usize::try_from(event).is_ok_and(|event| event < events) {
                return Ok(());
            }
            format!("event {event} of a ring of {events}; 0 to {} are allowed", events - 1)
        }
    };
    Err(CallError::Invalid(text))
}

/// When to give up, so that the answer is there by `deadline`.
fn before(deadline: Instant) -> tokio::time::Instant {
    deadline.checked_sub(ANSWER_TIME).unwrap_or(deadline).into()
}

/// Checks what does not need the layout; answers the number of events.
fn check(spec: &GpuRegionSpec) -> Result<usize, CallError> {
    let GpuRegionSpec { bytes, .. } = *spec;
    if bytes == 0 {
        return Err(CallError::Invalid("a region of 0 bytes; at least 1 is allowed".to_owned()));
    }
    let (offset, have) = match spec.memory {
        GpuMemory::Ipc { offset, .. } => (offset, u64::MAX),
        GpuMemory::Vmm { offset, allocation_bytes, .. } => (offset, allocation_bytes),
    };
    if offset.checked_add(bytes).is_none_or(|end| end > have) {
        return Err(CallError::Invalid(format!(
            "{bytes} bytes at offset {offset} are outside the allocation of {have} bytes"
        )));
    }
    match &spec.order {
        GpuOrder::EngineSynchronizes => Ok(0),
        GpuOrder::Events { handles } if (1..=GPU_EVENTS_MAX).contains(&handles.len()) => {
            Ok(handles.len())
        }
        GpuOrder::Events { handles } => Err(CallError::Invalid(format!(
            "a ring of {} events; 1 to {GPU_EVENTS_MAX} are allowed",
            handles.len()
        ))),
    }
}

fn check_layout(layout: &RegionLayout, bytes: u64) -> Result<(), CallError> {
    layout
        .check(bytes)
        .map_err(|error| CallError::Invalid(format!("the region's layout is refused: {error}")))?;
    let block_bytes = layout.block_bytes();
    if block_bytes <= GPU_BLOCK_BYTES_UNSUPPORTED {
        return Err(CallError::Invalid(format!(
            "blocks of {block_bytes} bytes; in GPU memory more than {GPU_BLOCK_BYTES_UNSUPPORTED} \
             are allowed"
        )));
    }
    Ok(())
}

/// The region as the node takes it, with the descriptor that was sent for it.
fn region(session: &Session, spec: GpuRegionSpec) -> Result<GpuRegion, CallError> {
    let memory = match spec.memory {
        GpuMemory::Ipc { handle, offset } => OpenMemory::Ipc { handle, offset },
        GpuMemory::Vmm { fd, allocation_bytes, offset } => {
            let fd = session.take_descriptor(fd, Instant::now()).ok_or_else(|| {
                CallError::NotFound(format!("descriptor {fd}; it was used, expired, or never sent"))
            })?;
            OpenMemory::Vmm { fd, allocation_bytes, offset }
        }
    };
    let GpuRegionSpec { gpu, bytes, layout, order, .. } = spec;
    Ok(GpuRegion { gpu, memory, bytes, layout, order })
}

/// `off` says why the daemon uses no GPU at all.
fn refused(error: RegisterError, gpu: GpuUuid, off: Option<&str>) -> CallError {
    match (error, off) {
        (RegisterError::Limit(limit), _) => CallError::Busy(limit),
        (RegisterError::NoSuchGpu { .. }, Some(why)) => {
            CallError::NotFound(format!("{gpu}: the device tier is off: {why}"))
        }
        (RegisterError::Refused(why), _) => CallError::Invalid(format!("{gpu}: {why}")),
        (error @ (RegisterError::NoSuchGpu { .. } | RegisterError::TierOff(_)), _) => {
            CallError::NotFound(format!("{gpu}: {error}"))
        }
        // What passes: the client may ask again. The answer has no room for the text.
        (other, _) => {
            tracing::warn!(%gpu, reason = %other, "GPU memory is not imported now");
            CallError::Busy(Limit::Regions)
        }
    }
}

/// A registration under way.
struct Registering {
    app: Arc<App>,
    session: Arc<Session>,
    room: RegionRoom,
    kind: RegionKind,
    _import: Importing,
}

impl Registering {
    fn registered(self, region: RegionId, runtime: Handle) -> Registered {
        self.room.keep(region, self.kind);
        let Registering { app, session, .. } = self;
        Registered { app, session, runtime, region: Some(region) }
    }
}

/// A region that is registered, and unregistered again unless somebody hears of it.
struct Registered {
    app: Arc<App>,
    session: Arc<Session>,
    runtime: Handle,
    // Taken when it was heard.
    region: Option<RegionId>,
}

impl Registered {
    fn heard(mut self) -> RegionId {
        self.region.take().expect("it is taken only here, and this takes the whole")
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let Some(region) = self.region else { return };
        let (app, session) = (Arc::clone(&self.app), Arc::clone(&self.session));
        tracing::info!(
            session = session.id.0,
            region = region.0,
            "GPU memory was imported after its client had given up; it is let go of"
        );
        // Not from here: this may be the node's own thread, in the middle of its answer.
        self.runtime.spawn(async move { begin_unregister(&app, &session, region) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtide_tiers::block::IpcHandle;

    fn spec(memory: GpuMemory, order: GpuOrder) -> GpuRegionSpec {
        let layout = RegionLayout::opaque(4, 4096);
        GpuRegionSpec { gpu: GpuUuid([9; 16]), memory, bytes: 16384, layout, order }
    }

    #[test]
    fn memory_outside_its_allocation_and_odd_rings_are_refused() {
        let ipc = |offset| GpuMemory::Ipc { handle: IpcHandle([3; 64]), offset };
        let vmm = |offset| GpuMemory::Vmm { fd: 1, allocation_bytes: 20480, offset };
        let ring = |count| GpuOrder::Events { handles: vec![IpcHandle([4; 64]); count] };
        let synchronizes = GpuOrder::EngineSynchronizes;
        assert_eq!(check(&spec(ipc(1 << 40), synchronizes.clone())), Ok(0));
        assert_eq!(check(&spec(vmm(4096), ring(64))), Ok(64));
        for (bad, text) in [
            (spec(ipc(u64::MAX), synchronizes.clone()), "outside the allocation"),
            (spec(vmm(4097), synchronizes.clone()), "16384 bytes at offset 4097"),
            (spec(vmm(u64::MAX - 1), synchronizes.clone()), "outside the allocation"),
            (spec(ipc(0), ring(0)), "a ring of 0 events; 1 to 64"),
            (spec(ipc(0), ring(65)), "a ring of 65 events; 1 to 64"),
            (GpuRegionSpec { bytes: 0, ..spec(ipc(0), synchronizes) }, "a region of 0 bytes"),
        ] {
            let error = check(&bad).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn refusals_name_the_gpus_that_there_are_and_why_the_tier_is_off() {
        let (asked, there) = (GpuUuid([1; 16]), GpuUuid([2; 16]));
        let known = vec![there];
        let text = refused(RegisterError::NoSuchGpu { known }, asked, None).to_string();
        assert!(text.contains(&asked.to_string()) && text.contains(&there.to_string()), "{text}");
        for off in [
            RegisterError::TierOff("no CUDA driver".to_owned()),
            RegisterError::NoSuchGpu { known: Vec::new() },
        ] {
            let text = refused(off, asked, Some("no CUDA driver")).to_string();
            assert!(text.contains("off: no CUDA driver"), "{text}");
        }
    }
}
