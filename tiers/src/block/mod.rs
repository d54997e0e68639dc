//! What a block is: its identity, its geometry in a client's memory, and the record that describes
//! a stored one. No I/O.

mod descriptor;
mod geometry;
mod gpu;
mod identity;
mod narrow;

pub use descriptor::{
    Codec, DESCRIPTOR_BYTES, DESCRIPTOR_VERSION, Descriptor, DescriptorError, Place, Sum128,
};
#[cfg(feature = "store")]
pub(crate) use descriptor::{DISOWNED, MAGIC_BYTES};
pub use geometry::{LayoutError, MAX_PLANES, PAGE_BYTES, Plane, RegionLayout, page_ceil};
pub use gpu::{
    GPU_BLOCK_BYTES_UNSUPPORTED, GPU_EVENTS_MAX, GpuMemory, GpuOrder, GpuRegionSpec, GpuUuid,
    GpuUuidError, IPC_HANDLE_BYTES, IpcHandle,
};
pub use identity::{
    BlockKey, ElementType, KvLayout, Model, Namespace, NamespaceDifference, NamespaceError,
    NamespaceId, NamespaceKey, RankScope, SECRET_BYTES, TenantSecret,
};
pub use narrow::{Narrow, NarrowShape, Narrowed, PlaneOrder, SCALE_BYTES, Wide};
