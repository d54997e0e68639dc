//! The pure core: what is where, and what moves where. No I/O, no clock, no threads.

mod request;

pub use request::*;
