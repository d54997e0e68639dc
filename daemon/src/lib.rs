//! kvtided: wiring, service and admin endpoint of the daemon that keeps KV cache blocks.
//!
//! Start reading at [`run_daemon`]. tokio serves calls and the admin endpoint here, and does
//! nothing else: what is decided about blocks is decided by the catalog, what is copied is copied
//! by the node, both in `kvtide_tiers`.

#![forbid(unsafe_code)]

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod counters;
pub mod devices;
pub mod digest;
pub mod drain;
mod drive;
pub mod events;
pub mod gpu;
mod kept;
pub mod listener;
pub mod log;
pub mod notify;
pub mod reload;
mod run;
pub mod service;
pub mod session;
pub mod status;
pub mod touches;
pub mod units;

pub use run::run_daemon;
