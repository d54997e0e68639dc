//! The daemon's configuration: a TOML file, the command line before it, and what the machine has
//! behind it. Read once into a checked [`Config`]; bad input is refused before anything is opened,
//! with every problem's file, line and what is allowed.

mod args;
mod build;
mod device;
mod events;
mod file;
mod machine;
mod quota;
mod read;
mod tenants;
mod worth;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvtide_tiers::catalog::{ArbiterConfig, Limits, PolicyChoice, PrefillConfig};

pub use args::{Args, LogFormat};
pub use build::check_socket;
pub use device::{DeviceSettings, DeviceUse};
pub use events::{EventLayout, EventSettings};
pub use read::{ConfigError, Problem, parse_bytes, show_bytes};
pub use tenants::{Caller, DEFAULT_TENANT, SharedSpace, Tenant, Tenants};

/// Everything that the daemon is told, checked.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// The socket that clients connect to.
    pub socket: PathBuf,
    /// The store folder.
    pub store: PathBuf,
    /// How long a drain at stop may take. Default: 10 s.
    pub drain: Duration,
    /// Threads that copy blocks between arena and regions. Default: half of the cores, 1 to 8.
    pub copy_threads: usize,
    /// The host tier.
    pub host: HostSettings,
    /// The nvme tier, unless it is off.
    pub nvme: Option<NvmeSettings>,
    /// The device tier.
    pub device: DeviceSettings,
    /// Limits of the catalog and of the service.
    pub limits: ServiceLimits,
    /// Whether loads are worth it.
    pub arbiter: ArbiterConfig,
    /// How much may be computed at a time, with the weights of the tenants. Default: not limited.
    pub prefill: PrefillConfig,
    /// Who is who.
    pub tenants: Tenants,
    /// Metrics and health.
    pub metrics: MetricsAddress,
    /// Where routers are told which blocks lie here. Default: nowhere.
    pub events: Option<EventSettings>,
    /// The log.
    pub log: LogSettings,
    /// Each read of the drive is held back by as many milliseconds as this file says. For tests
    /// only. Default: none.
    pub read_delay_file: Option<PathBuf>,
    /// Facts to be stated at start: what was taken from the machine.
    pub notes: Vec<String>,
}

/// The host tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostSettings {
    /// Its size. Default: a quarter of the memory that is available at start, or as much as the
    /// daemon before had, whose memory is taken over.
    pub bytes: u64,
    /// Whether the operator chose the size.
    pub bytes_chosen: bool,
    /// Bytes of a slab. Default: chosen by size.
    pub slab_bytes: Option<u32>,
    /// Whether it outlives the daemon. Default: where that costs no speed.
    pub keep: HostKeep,
    /// Which blocks leave first. Default: by predicted reuse.
    pub policy: PolicyChoice,
}

/// Whether the host tier is made of memory that the service manager can keep for the next daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HostKeep {
    /// Where such memory comes in huge pages.
    #[default]
    Auto,
    /// Always, even in pages of 4 KiB, which make transfers slower.
    Always,
}

/// The nvme tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NvmeSettings {
    /// Its size. Default: a quarter of the free space of the store's file system, at most 1 TiB.
    pub bytes: u64,
    /// Bytes of a segment. Default: 256 MiB, less for small stores.
    pub segment_bytes: Option<u32>,
    /// Smallest block for which descriptor areas have room. Default: 64 KiB.
    pub block_bytes_min: u32,
    /// Most operations in flight. Default: 32.
    pub queue_depth: u32,
    /// Bytes that may be written in a day. Default: no limit.
    pub write_bytes_per_day: Option<u64>,
    /// Bytes that the drive may be written over its life, as its maker says. Default: not known.
    pub rated_bytes: Option<u64>,
    /// How it is read and written. Default: io_uring where the kernel allows it.
    pub io: NvmeIo,
    /// Faults made on purpose, for tests.
    pub fault: Option<FaultSettings>,
}

/// How nvme is read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NvmeIo {
    /// io_uring where the kernel allows it, otherwise pread and pwrite.
    #[default]
    Auto,
    /// io_uring, or the daemon does not start.
    Uring,
    /// pread and pwrite.
    Blocking,
}

/// Faults made on purpose.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FaultSettings {
    /// Part of the operations that fail, 0 to 1.
    pub rate: f64,
    /// Longest time for which every operation is held back, milliseconds.
    pub delay_ms: Option<u32>,
    /// Seed of their order.
    pub seed: u64,
}

/// Limits of the catalog, and those that the service keeps by itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServiceLimits {
    /// The catalog's.
    pub catalog: Limits,
    /// Calls in flight of one connection. Default: 256.
    pub calls_in_flight: u32,
    /// Descriptors of a session that no region uses yet. Default: 8.
    pub descriptors_waiting: u32,
    /// Namespaces that one session may have open. Default: 1,024.
    pub namespaces_per_session: u32,
    /// Namespaces that a tenant, or a shared name, may have in the store. Default: 4,096.
    pub namespaces_per_tenant: u32,
    /// Bytes of all regions of one session together. Default: 1 TiB.
    pub region_bytes_per_session: u64,
}

impl Default for ServiceLimits {
    fn default() -> Self {
        ServiceLimits {
            catalog: Limits::default(),
            calls_in_flight: 256,
            descriptors_waiting: 8,
            namespaces_per_session: 1024,
            namespaces_per_tenant: 4096,
            region_bytes_per_session: 1 << 40,
        }
    }
}

/// Where metrics and health are served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetricsAddress {
    /// Nowhere.
    Off,
    /// On a loopback port. `configured` is false for the default port: when that one is taken, the
    /// daemon goes without.
    Tcp {
        /// The address.
        address: SocketAddr,
        /// Whether it was asked for.
        configured: bool,
    },
    /// On a unix socket.
    Unix(PathBuf),
}

/// The log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogSettings {
    /// Least level that is logged. Default: info.
    pub level: tracing::Level,
    /// Its form. Default: text.
    pub format: LogFormat,
}

impl Config {
    /// Reads the file that `args` names, if any, and puts everything together.
    ///
    /// # Errors
    /// Every problem that was found.
    pub fn load(args: &Args) -> Result<Config, ConfigError> {
        build::load(args)
    }
}

/// A log level by its name.
///
/// # Errors
/// What is allowed.
pub fn parse_level(text: &str) -> Result<tracing::Level, String> {
    text.parse().map_err(|_| "error, warn, info, debug and trace are allowed".to_owned())
}
