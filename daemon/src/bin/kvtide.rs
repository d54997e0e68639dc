//! The inspector.
#![forbid(unsafe_code)]

fn main() {}
