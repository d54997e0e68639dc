//! The kernels that gather and scatter KV blocks on a GPU, their launchers, and their twins for the
//! CPU.
//!
//! Empty until there is a device tier: blocks in a client's host memory are gathered and scattered
//! by `tiers::io::Region`, because that memory may only be reached through checked copies of a
//! mapping that another process writes to, and a twin over slices would claim more than is true.

#![forbid(unsafe_code)]
