//! Why a call of the client library failed.

use std::io;
use std::path::PathBuf;

use kvtide_tiers::block::LayoutError;

use crate::protocol::CallError;

/// Why a call failed. Lookups and loads do not fail: what goes wrong there is a miss.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens there, or the file may not be opened.
    #[error("cannot connect to kvtided at {}: {source}; is the daemon running?", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The daemon refused the hello; its sentence says why and what to do.
    #[error("kvtided refused the connection: {message}")]
    Refused {
        /// The machine-readable reason.
        reason: crate::hello::HelloRefusal,
        /// The daemon's sentence.
        message: String,
    },
    /// What answered does not speak the protocol.
    #[error("the peer at the socket does not speak kvtide's protocol: {what}")]
    NotKvtide {
        /// What was odd.
        what: &'static str,
    },
    /// The deadline passed.
    #[error("the daemon did not answer within {after_ms} ms")]
    Deadline {
        /// The deadline, milliseconds.
        after_ms: u64,
    },
    /// The circuit breaker is open: the daemon failed repeatedly, and is not asked for now.
    #[error("the daemon failed {failures} times in a row; not asked again for {retry_ms} ms")]
    BreakerOpen {
        /// Failures in a row.
        failures: u32,
        /// Milliseconds until the next try.
        retry_ms: u64,
    },
    /// There is no connection just now; the library is reconnecting.
    #[error("not connected to kvtided; reconnecting")]
    Disconnected,
    /// The daemon answered, and the answer is no.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The layout does not fit its memory.
    #[error("bad region layout: {0}")]
    Layout(#[from] LayoutError),
    /// Shared memory could not be made or used.
    #[error("shared memory: {0}")]
    Memory(String),
    /// GPU memory could not be exported or used, or its registration breaks a rule.
    #[error("GPU memory: {0}")]
    Gpu(String),
    /// A range outside a region.
    #[error("bytes {offset}..{end} are outside the region of {bytes} bytes")]
    OutOfRegion {
        /// First byte.
        offset: u64,
        /// Behind the last byte.
        end: u64,
        /// Bytes of the region.
        bytes: u64,
    },
    /// A load or store of this place was given up, and the daemon may still be copying.
    #[error(
        "place {place} is in doubt: a load or store of it was given up before it had ended; use \
         another place until `places_in_doubt` no longer names it"
    )]
    PlaceInDoubt {
        /// The place.
        place: u32,
    },
    /// The tenant's secret changed while the client was away, and with it the keys of all blocks.
    #[error("the namespace's key changed; open the namespace anew and compute its keys again")]
    KeyChanged,
    /// The client's own runtime could not be started.
    #[error("cannot start the client's runtime: {0}")]
    Runtime(io::Error),
}
