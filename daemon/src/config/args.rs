//! The command line of kvtided.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use super::parse_bytes;

/// kvtided, the daemon that keeps KV cache blocks in GPU memory, in host RAM and on NVMe.
///
/// Starts without any configuration. What is given here goes before what the file says.
///
/// Exit codes: 0 stopped as asked, 2 bad usage or configuration, 3 store or socket cannot be used
/// (another daemon has it, no permission, damaged or newer format), 1 anything else.
#[derive(Parser, Debug, Clone, Default)]
#[command(name = "kvtided", version, long_about, verbatim_doc_comment)]
pub struct Args {
    /// TOML configuration file. Without it, defaults are taken from the machine.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration, say what it comes to, and exit.
    #[arg(long)]
    pub check_config: bool,
    /// Path of the socket that clients connect to.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Folder of the store: segments, namespaces, secrets.
    #[arg(long, value_name = "FOLDER")]
    pub store: Option<PathBuf>,
    /// Size of the host tier, like 512MiB or 8GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub host_bytes: Option<u64>,
    /// Size of the nvme tier, like 100GiB; 0 turns it off.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub nvme_bytes: Option<u64>,
    /// Size of a segment on nvme, 1MiB to 1GiB. Fixed when the store is made.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub segment_bytes: Option<u64>,
    /// The smallest block for which descriptor areas have room. Fixed when the store is made.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub block_bytes_min: Option<u64>,
    /// GPU memory in which blocks are kept, for each GPU, like 4GiB; 0 keeps none there.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub device_pool_bytes: Option<u64>,
    /// Use this driver library instead of the machine's. For tests only.
    #[arg(long, value_name = "FILE", hide = true)]
    pub device_library: Option<PathBuf>,
    /// Metrics and health: a loopback address with port, unix:PATH, or off.
    #[arg(long, value_name = "ADDRESS|off")]
    pub metrics: Option<String>,
    /// Form of the log on standard error.
    #[arg(long, value_enum)]
    pub log_format: Option<LogFormat>,
    /// Least level that is logged: error, warn, info, debug or trace.
    #[arg(long, value_name = "LEVEL", value_parser = super::parse_level)]
    pub log_level: Option<tracing::Level>,
    /// Fail this part of all device operations on purpose (0 to 1). For tests only.
    #[arg(long, value_name = "RATE", hide = true)]
    pub fault_rate: Option<f64>,
    /// Hold every device operation back for up to so many milliseconds. For tests only.
    #[arg(long, value_name = "MS", hide = true)]
    pub fault_delay_ms: Option<u32>,
    /// Seed of the faults.
    #[arg(long, value_name = "SEED", hide = true, default_value_t = 1)]
    pub fault_seed: u64,
    /// Hold each read of the drive back by as many milliseconds as this file says. For tests only.
    #[arg(long, value_name = "FILE", hide = true)]
    pub fault_read_delay: Option<PathBuf>,
}

/// Form of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}
