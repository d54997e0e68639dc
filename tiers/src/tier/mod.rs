//! The tiers' workers: each carries out what was decided, and decides nothing.

pub mod device;
pub mod nvme;
