//! Modules of PTX and the launch of their kernels, which run on the CPU from the same source.
//!
//! The text is only read for what a driver would refuse (version, target, names) and for the
//! sizes of the parameters, so that they are captured at the launch as a driver does.

use std::ffi::c_void;
use std::sync::Arc;

use kvtide_kernels::cpu;

use crate::abi::{Out, Params, Text};
use crate::call::{
    Call, INVALID_IMAGE, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND, UNSUPPORTED_PTX_VERSION,
};
use crate::config::config;
use crate::device::COMPUTE;
use crate::handle::Handles;
use crate::{memory, stream};

/// The most shared memory that a launch may ask for without asking for more first.
const SHARED_BYTES_MAX: u32 = 48 << 10;

pub(crate) struct Module {
    kernels: Vec<Kernel>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    name: String,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
}

static MODULES: Handles<Module> = Handles::new();
static FUNCTIONS: Handles<Kernel> = Handles::new();

pub(crate) fn load(call: &Call, module: Out<usize>, image: Text) -> Result<(), u32> {
    call.device()?;
    let kernels = parse(&image.get()?)?;
    module.put(MODULES.insert(Arc::new(Module { kernels })))
}

pub(crate) fn unload(_: &Call, module: usize) -> Result<(), u32> {
    MODULES.remove(module).map(|_| ())
}

pub(crate) fn function(
    call: &Call,
    function: Out<usize>,
    module: usize,
    name: Text,
) -> Result<(), u32> {
    call.device()?;
    let module = MODULES.get(module)?;
    let name = name.get()?;
    let kernel = module.kernels.iter().find(|kernel| kernel.name == name).ok_or(NOT_FOUND)?;
    if cpu::parameters(&name) != Some(kernel.parameters.as_slice()) {
        eprintln!(
            "fakecuda: the PTX and the CPU's build of {name} differ: {:?} and {:?}",
            kernel.parameters,
            cpu::parameters(&name)
        );
        return Err(NOT_FOUND);
    }
    function.put(FUNCTIONS.insert(Arc::new(kernel.clone())))
}

/// A launch but for its function and its parameters.
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) extra: usize,
}

impl Shape {
    fn check(&self) -> Result<(), u32> {
        let [x, y, z] = self.block.map(u64::from);
        let block = x <= 1024 && y <= 1024 && z <= 64 && (1..=1024).contains(&(x * y * z));
        let [x, y, z] = self.grid;
        let grid = (1..=i32::MAX.cast_unsigned()).contains(&x)
            && (1..=65535).contains(&y)
            && (1..=65535).contains(&z);
        let rest = self.shared_bytes <= SHARED_BYTES_MAX && self.extra == 0;
        if block && grid && rest { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

pub(crate) fn launch(
    call: &Call,
    function: usize,
    shape: Shape,
    stream: usize,
    params: Params,
) -> Result<(), u32> {
    let kernel = FUNCTIONS.get(function)?;
    let stream = stream::get(call.device()?, stream)?;
    shape.check()?;
    let mut values = params.capture(&kernel.parameters)?;
    stream.push(call, move || {
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        // So that no memory is unmapped under the kernel.
        let _space = memory::space();
        // SAFETY: one value of the size of each parameter, as the PTX and the CPU's build agree;
        // whoever launched it promised that the memory it reaches is allocated.
        let launched = unsafe {
            cpu::launch(
                &kernel.name,
                shape.grid,
                shape.block,
                shape.shared_bytes,
                pointers.as_mut_ptr(),
            )
        };
        launched.map_err(|_| INVALID_IMAGE)
    })
}

/// The kernels of a text of PTX, or what a driver would refuse it with.
fn parse(text: &str) -> Result<Vec<Kernel>, u32> {
    let code: String = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .fold(String::new(), |code, line| code + line + "\n");
    let after = |directive: &str| {
        let at = code.find(directive)? + directive.len();
        code.get(at..)?.split_whitespace().next()
    };
    let version = after(".version ").and_then(|version| version.split_once('.'));
    let (major, minor) = version.ok_or(INVALID_IMAGE)?;
    let version = major.parse().ok().zip(minor.parse().ok()).ok_or(INVALID_IMAGE)?;
    if version > newest_ptx() {
        return Err(UNSUPPORTED_PTX_VERSION);
    }
    let target = after(".target sm_").ok_or(INVALID_IMAGE)?;
    let digits = target.trim_end_matches(|end: char| !end.is_ascii_digit());
    let target: i32 = digits.parse().map_err(|_| INVALID_IMAGE)?;
    if target > COMPUTE.0 * 10 + COMPUTE.1 {
        return Err(NO_BINARY_FOR_GPU);
    }
    let kernels: Option<Vec<Kernel>> = code.split(".entry ").skip(1).map(kernel).collect();
    kernels.filter(|kernels| !kernels.is_empty()).ok_or(INVALID_IMAGE)
}

/// The newest PTX that a driver of this version takes: 8.4 came with CUDA 12.4, 9.0 with 13.0.
fn newest_ptx() -> (i32, i32) {
    let version = config().driver_version;
    (version / 1000 - 4, version % 1000 / 10)
}

/// Reads what follows `.entry`: the name, and the parameters in brackets.
fn kernel(text: &str) -> Option<Kernel> {
    let (name, rest) = text.split_once('(')?;
    let (parameters, _) = rest.split_once(')')?;
    let parameters: Option<Vec<usize>> =
        parameters.split(',').filter(|text| text.contains(".param")).map(parameter).collect();
    Some(Kernel { name: name.trim().to_owned(), parameters: parameters? })
}

/// `.param .u64 name`, or `.param .align 8 .b8 name[48]`.
fn parameter(text: &str) -> Option<usize> {
    let kinds = text.split_whitespace().filter_map(|word| word.strip_prefix('.'));
    let mut bits = kinds.filter_map(|kind| {
        kind.strip_prefix(['u', 's', 'b', 'f']).and_then(|bits| bits.parse::<usize>().ok())
    });
    let bytes = bits.next_back()? / 8;
    let count = match text.split_once('[') {
        Some((_, count)) => count.split(']').next()?.trim().parse().ok()?,
        None => 1,
    };
    Some(bytes * count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "// made by hand\n.version 8.4\n.target sm_80\n.address_size 64\n\
        .visible .entry one(\n\t.param .u64 one_0,\n\t.param .u32 one_1\n)\n{ ret; }\n\
        .visible .entry two(.param .align 8 .b8 two_0[48])\n{ ret; }";

    #[test]
    fn names_and_sizes_are_read() {
        let kernels = parse(TEXT).unwrap();
        let found: Vec<_> =
            kernels.iter().map(|kernel| (kernel.name.as_str(), &*kernel.parameters)).collect();
        assert_eq!(found, [("one", &[8, 4][..]), ("two", &[48][..])]);
    }

    #[test]
    fn what_a_driver_refuses_is_refused() {
        assert_eq!(parse("int main() {}").unwrap_err(), INVALID_IMAGE);
        assert_eq!(parse(&TEXT.replace("8.4", "12.0")).unwrap_err(), UNSUPPORTED_PTX_VERSION);
        assert_eq!(parse(&TEXT.replace("sm_80", "sm_100a")).unwrap_err(), NO_BINARY_FOR_GPU);
        let none = TEXT.split(".visible").next().unwrap();
        assert_eq!(parse(none).unwrap_err(), INVALID_IMAGE);
    }

    #[test]
    fn launches_have_limits() {
        let shape = |grid, block| Shape { grid, block, shared_bytes: 0, extra: 0 }.check();
        assert!(shape([1, 1, 1], [1024, 1, 1]).is_ok());
        assert!(shape([i32::MAX.cast_unsigned(), 65535, 65535], [1, 1, 64]).is_ok());
        assert!(shape([1, 1, 1], [1024, 2, 1]).is_err());
        assert!(shape([0, 1, 1], [1, 1, 1]).is_err());
        assert!(shape([1, 65536, 1], [1, 1, 1]).is_err());
        assert!(shape([1, 1, 1], [1, 1, 65]).is_err());
    }
}
