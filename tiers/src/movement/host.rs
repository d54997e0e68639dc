//! The host tier's memory at start: taken over from an earlier daemon, or made anew.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::HostConfig;
use super::node::StartError;
use crate::block::{DESCRIPTOR_BYTES, Descriptor, DescriptorError, NamespaceId, Place};
use crate::catalog::{AdoptedSlab, Catalog, SlotId};
use crate::io::{Arena, KeptSlab};

/// What became of the memory of an earlier daemon.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Kept {
    /// Why it was not taken over, if there was any.
    pub refused: Option<String>,
    /// Blocks that were taken over.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Slots that were not: a damaged descriptor, a namespace that is gone, other bytes on nvme.
    /// Not those whose blocks the daemon before had given up.
    pub dropped: u64,
}

/// The arena, and what became of the one that was handed over.
pub(super) fn open_arena(config: &mut HostConfig) -> Result<(Arc<Arena>, Kept), StartError> {
    let slab_bytes = config.slab();
    let failed = |source| StartError::Arena { bytes: config.bytes, source };
    let mut kept = Kept::default();
    if let Some(files) = config.handed_over.take() {
        match Arena::adopt(&files, config.bytes, slab_bytes) {
            Ok(arena) => return Ok((arena, kept)),
            Err(error) => {
                tracing::warn!(%error, "the memory of the daemon before is not taken over");
                kept.refused = Some(error.to_string());
                if let Err(error) = files.release() {
                    tracing::warn!(%error, "the memory of the daemon before cannot be given back");
                }
            }
        }
    }
    let create = if config.always_shared { Arena::create_shared } else { Arena::create };
    Ok((create(config.bytes, slab_bytes).map_err(failed)?, kept))
}

/// Tells the catalog what lies in the arena, and voids the descriptors of all that it leaves out.
/// `generation`: which generation of a namespace is alive.
pub(super) fn adopt(
    catalog: &mut Catalog,
    arena: &Arena,
    mut kept: Kept,
    generation: &impl Fn(NamespaceId) -> Option<u32>,
) -> Kept {
    let slabs = arena.kept_slabs();
    let found: Vec<AdoptedSlab> =
        slabs.iter().map(|slab| whole(slab, arena.salt(), generation)).collect();
    let mut adopted = catalog.adopt(&found);
    adopted.sort_unstable();
    for (slot, bytes) in slabs.iter().flat_map(|slab| &slab.slots) {
        if adopted.binary_search(slot).is_err() {
            // What the daemon before had given up is nobody's loss.
            let place = Place::Host { salt: arena.salt(), slot: slot.0 };
            let disowned = Descriptor::decode(bytes, place) == Err(DescriptorError::Disowned);
            kept.dropped += u64::from(!disowned);
            if let Err(error) = arena.set_descriptor(*slot, &[0; DESCRIPTOR_BYTES]) {
                tracing::error!(?slot, %error, "a slot that was just read cannot be voided");
            }
        }
    }
    let blocks = found.iter().flat_map(|slab| &slab.blocks);
    let bytes = blocks.filter(|(slot, _)| adopted.binary_search(slot).is_ok());
    kept.bytes = bytes.map(|(_, descriptor)| u64::from(descriptor.raw_bytes)).sum();
    kept.blocks = adopted.len() as u64;
    if kept.blocks + kept.dropped > 0 {
        let Kept { blocks, bytes, dropped, .. } = kept;
        tracing::info!(blocks, bytes, dropped, "took over the RAM tier of the daemon before");
    }
    kept
}

/// The blocks of a slab whose descriptors are whole, and whose namespaces are alive.
fn whole(
    slab: &KeptSlab,
    salt: u64,
    generation: &impl Fn(NamespaceId) -> Option<u32>,
) -> AdoptedSlab {
    let read = |(slot, bytes): &(SlotId, [u8; DESCRIPTOR_BYTES])| {
        let descriptor = Descriptor::decode(bytes, Place::Host { salt, slot: slot.0 }).ok()?;
        let alive = generation(descriptor.namespace) == Some(descriptor.generation);
        alive.then_some((*slot, descriptor))
    };
    let blocks = slab.slots.iter().filter_map(read).collect();
    AdoptedSlab { slab: slab.slab, slot_bytes: slab.slot_bytes, blocks }
}
