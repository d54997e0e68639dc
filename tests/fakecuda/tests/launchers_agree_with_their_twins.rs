//! The launchers of the kernels through the driver: the very checks that run on a real GPU.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;
#[path = "../../../kernels/tests/device/mod.rs"]
mod device;

#[test]
fn launchers_on_the_fake() {
    device::launchers_do_what_the_twins_say(&common::context());
}
