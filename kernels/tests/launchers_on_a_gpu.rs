//! The launchers on a real GPU, compiled by its driver from the PTX that is checked in. Without
//! one, the test says so; the same checks run on the fake driver in its own tests.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod device;

use std::io::Write;

use kvtide_kernels::driver::{Context, Driver};

#[test]
fn launchers_on_a_real_gpu() {
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(reason) => {
            // Past the capture of a passing test's output: this must be seen.
            let mut stderr = std::io::stderr();
            writeln!(stderr, "\n  SKIPPED, no kernel ran on a GPU: {reason}").unwrap();
            return;
        }
    };
    let context = Context::new(&driver, 0).unwrap();
    assert!(!context.info().name.starts_with("Fake"), "the fake driver has tests of its own");
    device::launchers_do_what_the_twins_say(&context);
    println!("all launchers agree with their twins on {}", context.info().name);
}
