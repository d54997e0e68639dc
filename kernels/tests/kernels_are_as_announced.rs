//! The names and parameters that the host passes are those of the source.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use kvtide_kernels::abi::KERNELS;
use kvtide_kernels::cpu::{self, UnknownKernel};

#[test]
fn parameters_are_those_of_the_source() {
    for kernel in KERNELS {
        let parameters: Vec<usize> =
            (0..20).map_while(|at| cpu::parameter_bytes(kernel.name, at)).collect();
        assert_eq!(parameters, kernel.parameters, "{}", kernel.name);
    }
    assert_eq!(cpu::names().len(), KERNELS.len());
    assert_eq!(cpu::parameter_bytes("kvtide_gathe", 0), None);
    assert_eq!(cpu::parameters("kvtide_gathers"), None);
}

#[test]
fn the_source_has_no_other_kernel() {
    let source = include_str!("../cuda/kvtide.cu");
    let declared: Vec<&str> = source
        .lines()
        .filter_map(|line| line.strip_prefix("extern \"C\" __global__ void "))
        .map(|rest| rest.split('(').next().unwrap())
        .collect();
    let mut names = cpu::names().to_vec();
    assert!(declared.iter().all(|name| names.contains(name)), "{declared:?}");
    names.retain(|name| !declared.contains(name));
    assert!(names.is_empty(), "{names:?} are not in the source");
}

#[test]
fn an_unknown_kernel_is_refused() {
    // SAFETY: there is no such kernel, so no parameter is read.
    let result = unsafe { cpu::launch("kvtide_nothing", [1; 3], [1; 3], 0, std::ptr::null_mut()) };
    assert_eq!(result, Err(UnknownKernel("kvtide_nothing".to_owned())));
}
