//! The pure core: what is where, and what moves where. No I/O, no clock, no threads.
//!
//! Without the feature `store` only the words of requests and answers are built, for clients.

mod request;

pub use request::*;
