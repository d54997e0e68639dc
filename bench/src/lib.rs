//! Trace replay, simulation and yardsticks of kvtide.
//!
//! [`trace`] reads recorded requests, [`payload`] makes bytes that can be checked, `sim` drives the
//! pure core with them and [`simulate`] with seeds, [`replay`] a real daemon, [`tiers`] sets the
//! daemon beside `memcpy` and beside a raw ring, [`peers`] beside what else keeps blocks, [`scale`]
//! measures the catalog, recovery and calls as their number grows, [`ttft`] reload beside recompute
//! in an engine, and [`device`] the GPU's kernels beside its copies.
//! Everything here measures or checks; nothing here is part of the product.

#![forbid(unsafe_code)]

pub mod daemon;
pub mod device;
pub mod payload;
pub mod peers;
pub mod process;
pub mod quality;
pub mod replay;
pub mod report;
pub mod scale;
pub mod scratch;
pub mod sim;
pub mod simulate;
pub mod tiers;
pub mod trace;
pub mod ttft;
pub mod units;
