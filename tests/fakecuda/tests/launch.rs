//! Modules and launches: what the driver refuses, and kernels that run from their real source.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;

use common::{FILL_PTX, context, download, fill_kernel, launch_fill, upload};
use kvtide_kernels::driver::{DeviceBuffer, Module, Stream, failed_drops};

#[test]
fn the_fill_kernel_fills_what_it_was_told_and_nothing_else() {
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, 3 * 4096).unwrap();
    upload(&stream, buffer.address(), &[1; 3 * 4096]).unwrap();
    let kernel = fill_kernel(&context).unwrap();
    // `launch_fill` overwrites the arguments after the launch: they were captured by then.
    launch_fill(&kernel, &stream, [7, 1, 1], buffer.address() + 4096, 4096, 0x0102_0304).unwrap();
    let found = download(&stream, buffer.address(), 3 * 4096).unwrap();
    assert_eq!(found[..4096], [1; 4096]);
    assert_eq!(found[4096..8192], [4, 3, 2, 1].repeat(1024));
    assert_eq!(found[8192..], [1; 4096]);
    drop((kernel, buffer, stream));
    assert_eq!(failed_drops(), 0);
}

#[test]
fn what_is_no_ptx_or_no_kernel_is_refused() {
    let context = context();
    let load = |text: &str| Module::load(&context, text).unwrap_err().code;
    assert_eq!(load("__global__ void kvtide_fill() {}"), 200);
    assert_eq!(load(&FILL_PTX.replace(".version 8.4", ".version 9.1")), 222);
    assert_eq!(load(&FILL_PTX.replace("sm_80", "sm_100")), 209);
    assert_eq!(load("\x7fELF"), 1, "compiled code only comes in by `load_cubin`");
    assert_eq!(load("text with an end \0 inside"), 1);
    let module = Module::load(&context, FILL_PTX).unwrap();
    assert_eq!(module.function("kvtide_fil").unwrap_err().code, 500);
    let other = FILL_PTX.replace(".u32 kvtide_fill_param_2", ".u64 kvtide_fill_param_2");
    let other = Module::load(&context, &other).unwrap();
    assert_eq!(other.function("kvtide_fill").unwrap_err().code, 500, "other parameters");
}

#[test]
fn a_launch_beyond_the_limits_is_refused() {
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, 4096).unwrap();
    let kernel = fill_kernel(&context).unwrap();
    let launch = |grid| launch_fill(&kernel, &stream, grid, buffer.address(), 4096, 9);
    assert_eq!(launch([0, 1, 1]).unwrap_err().code, 1);
    assert_eq!(launch([1, 65_536, 1]).unwrap_err().code, 1);
    launch([2, 2, 1]).unwrap();
    stream.synchronize().unwrap();
}
