//! How GPU memory is named between processes: which GPU, which allocation, and what orders the
//! daemon's copies against the client's own work. No CUDA, and no I/O.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::RegionLayout;

/// Most events of a region's ring.
pub const GPU_EVENTS_MAX: usize = 64;

/// Bytes of an interprocess handle, of memory or of an event.
pub const IPC_HANDLE_BYTES: usize = 64;

/// The longest payload whose checksum the GPU does not compute. XXH3 treats inputs of up to 240
/// bytes in other ways than longer ones; no KV block is that small.
pub const GPU_BLOCK_BYTES_UNSUPPORTED: u64 = 240;

/// The name of a GPU that is the same in every process and container. Ordinals are not: they depend
/// on `CUDA_VISIBLE_DEVICES`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GpuUuid(pub [u8; 16]);

impl fmt::Display for GpuUuid {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("GPU-")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                out.write_str("-")?;
            }
            write!(out, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// Text that names no GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no GPU; it must read GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, in hexadecimal")]
pub struct GpuUuidError(pub String);

impl FromStr for GpuUuid {
    type Err = GpuUuidError;

    fn from_str(text: &str) -> Result<GpuUuid, GpuUuidError> {
        let refused = || GpuUuidError(text.to_owned());
        let rest = text.strip_prefix("GPU-").ok_or_else(refused)?;
        let lengths = rest.split('-').map(str::len);
        if !lengths.eq([8, 4, 4, 4, 12]) {
            return Err(refused());
        }
        let mut digits = rest.chars().filter(|digit| *digit != '-').map(|digit| digit.to_digit(16));
        let mut uuid = [0; 16];
        for byte in &mut uuid {
            let (high, low) = (digits.next().flatten(), digits.next().flatten());
            let (Some(high), Some(low)) = (high, low) else { return Err(refused()) };
            *byte = (high << 4 | low) as u8;
        }
        Ok(GpuUuid(uuid))
    }
}

/// A CUDA interprocess handle, of memory or of an event. Opaque; whoever has it may open it, so it
/// is not printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; IPC_HANDLE_BYTES]);

impl fmt::Debug for IpcHandle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("IpcHandle(..)")
    }
}

impl Serialize for IpcHandle {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for IpcHandle {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<IpcHandle, D::Error> {
        from.deserialize_bytes(HandleVisitor)
    }
}

struct HandleVisitor;

impl<'de> Visitor<'de> for HandleVisitor {
    type Value = IpcHandle;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "an interprocess handle of {IPC_HANDLE_BYTES} bytes")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<IpcHandle, E> {
        let handle = bytes.try_into().map_err(|_| E::invalid_length(bytes.len(), &self))?;
        Ok(IpcHandle(handle))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut bytes: A) -> Result<IpcHandle, A::Error> {
        let mut handle = [0; IPC_HANDLE_BYTES];
        for (at, byte) in handle.iter_mut().enumerate() {
            *byte = bytes.next_element()?.ok_or_else(|| A::Error::invalid_length(at, &self))?;
        }
        if bytes.next_element::<u8>()?.is_some() {
            return Err(A::Error::invalid_length(IPC_HANDLE_BYTES + 1, &self));
        }
        Ok(IpcHandle(handle))
    }
}

/// The allocation that a region lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum GpuMemory {
    /// An allocation of cuMemAlloc (what PyTorch's default allocator makes).
    Ipc {
        /// The handle of the whole allocation.
        handle: IpcHandle,
        /// Where the region starts in it, bytes.
        offset: u64,
    },
    /// An allocation of cuMemCreate (expandable segments, sleep mode), exported as a descriptor.
    Vmm {
        /// Number of the descriptor among those attached to the session.
        fd: u64,
        /// Bytes of the whole allocation.
        allocation_bytes: u64,
        /// Where the region starts in it, bytes.
        offset: u64,
    },
}

/// What makes sure that the daemon does not touch a block before the engine's kernels are done
/// with it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum GpuOrder {
    /// The engine has waited for its own stream before it asks for anything.
    EngineSynchronizes,
    /// A ring of interprocess events that the engine records; a request names the one to wait for.
    Events {
        /// Their handles, at most [`GPU_EVENTS_MAX`]. They must stay alive as long as the region.
        handles: Vec<IpcHandle>,
    },
}

/// GPU memory to be registered as a region.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GpuRegionSpec {
    /// Which GPU.
    pub gpu: GpuUuid,
    /// Which allocation.
    pub memory: GpuMemory,
    /// Bytes of the region, from the memory's `offset` on.
    pub bytes: u64,
    /// How blocks lie in it.
    pub layout: RegionLayout,
    /// How the daemon's copies are ordered against the engine's work.
    pub order: GpuOrder,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_as_the_driver_names_it() {
        let text = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let uuid: GpuUuid = text.parse().unwrap();
        assert_eq!(uuid.0[0], 0);
        assert_eq!(uuid.0[15], 0xff);
        assert_eq!(uuid.to_string(), text);
        for bad in [
            "",
            "GPU-",
            "00112233-4455-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeefg",
            "GPU-00112233-4455-6677-8899-aabbccddeef",
            "GPU-00112233445566778899aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeeff-",
        ] {
            assert!(bad.parse::<GpuUuid>().is_err(), "{bad}");
        }
    }

    #[cfg(feature = "store")]
    #[test]
    fn a_handle_of_another_length_is_refused() {
        let handle = IpcHandle(std::array::from_fn(|at| at as u8));
        let text = serde_json::to_string(&handle).unwrap();
        assert_eq!(serde_json::from_str::<IpcHandle>(&text).unwrap(), handle);
        for bytes in [0, 63, 65] {
            let text = serde_json::to_string(&vec![1u8; bytes]).unwrap();
            assert!(serde_json::from_str::<IpcHandle>(&text).is_err(), "{bytes} bytes");
        }
    }
}
