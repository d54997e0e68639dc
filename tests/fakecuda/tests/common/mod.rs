//! What the tests of the fake driver share: a context, copies that wait, and processes.
//!
//! A test that needs an environment of its own, or another process, runs its own binary again
//! with the name of a test: the driver reads its environment once, and an error that stays does so
//! for the whole process.
#![allow(dead_code, reason = "no test uses all of it")]

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};

use kvtide_kernels::driver::{
    Context, CudaError, Driver, Function, HostRegistration, Module, Stream, use_library,
};

/// Set in a process that a test started.
const CHILD: &str = "FAKECUDA_TEST_CHILD";

/// The driver, from the fake.
pub(crate) fn driver() -> Driver {
    use_library(&fakecuda::library()).unwrap();
    Driver::open().unwrap()
}

/// The context of device 0 of the fake.
pub(crate) fn context() -> Context {
    Context::new(&driver(), 0).unwrap()
}

/// Faults of this process while it lives; what hangs or stalls goes on after.
pub(crate) struct Injected;

pub(crate) fn inject(faults: &str) -> Injected {
    fakecuda::inject(faults);
    Injected
}

impl Drop for Injected {
    fn drop(&mut self) {
        fakecuda::inject("");
    }
}

/// Bytes that tell where they stand.
pub(crate) fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| seed ^ (at % 251) as u8).collect()
}

/// Copies to device memory and waits for it.
pub(crate) fn upload(stream: &Stream, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
    // SAFETY: the bytes live until the wait below; tests name device memory that they allocated,
    // and the fake refuses any other.
    unsafe { stream.copy_to_device(to, bytes.as_ptr(), bytes.len() as u64) }?;
    stream.synchronize()
}

/// Copies from device memory and waits for it.
pub(crate) fn download(stream: &Stream, from: u64, bytes: usize) -> Result<Vec<u8>, CudaError> {
    let mut found = vec![0; bytes];
    // SAFETY: as for `upload`.
    unsafe { stream.copy_to_host(found.as_mut_ptr(), from, bytes as u64) }?;
    stream.synchronize()?;
    Ok(found)
}

/// Queues a copy within device memory.
pub(crate) fn copy(stream: &Stream, to: u64, from: u64, bytes: u64) -> Result<(), CudaError> {
    // SAFETY: the fake refuses ranges that are not of device memory, and the tests order the rest.
    unsafe { stream.copy_on_device(to, from, bytes) }
}

/// Queues a fill.
pub(crate) fn fill(stream: &Stream, to: u64, value: u8, bytes: u64) -> Result<(), CudaError> {
    // SAFETY: as for `copy`.
    unsafe { stream.fill(to, value, bytes) }
}

/// Host memory that is registered.
pub(crate) struct Pinned {
    // Unregistered before the memory goes.
    pub(crate) registration: HostRegistration,
    memory: *mut [u8],
}

impl Pinned {
    pub(crate) fn new(
        context: &Context,
        bytes: usize,
        chunk_bytes: u64,
    ) -> Result<Pinned, CudaError> {
        // A page more, so that the start can lie on a page.
        let memory = Box::into_raw(vec![0_u8; bytes].into_boxed_slice());
        // SAFETY: the memory is leaked, so it stays mapped.
        let registration = unsafe {
            HostRegistration::register_in_chunks(context, memory.cast(), bytes as u64, chunk_bytes)
        }?;
        Ok(Pinned { registration, memory })
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.memory.cast()
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.memory.len());
        // SAFETY: the memory is as long, and the streams that touch it are the test's own.
        unsafe { self.address().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        // SAFETY: as for `write`.
        unsafe { (*self.memory).to_vec() }
    }
}

/// What the driver takes for the kernel `kvtide_fill(u64 address, u64 bytes, u32 value)`: only
/// names and parameters matter, the code that runs is the CPU's.
pub(crate) const FILL_PTX: &str = ".version 8.4\n.target sm_80\n.address_size 64\n\
    .visible .entry kvtide_fill(\n\t.param .u64 kvtide_fill_param_0,\n\
    \t.param .u64 kvtide_fill_param_1,\n\t.param .u32 kvtide_fill_param_2\n)\n{\n\tret;\n}\n";

/// The kernel that fills memory.
pub(crate) fn fill_kernel(context: &Context) -> Result<Function, CudaError> {
    Module::load(context, FILL_PTX)?.function("kvtide_fill")
}

/// Launches it.
pub(crate) fn launch_fill(
    kernel: &Function,
    stream: &Stream,
    grid: [u32; 3],
    to: u64,
    bytes: u64,
    value: u32,
) -> Result<(), CudaError> {
    let (mut to, mut bytes, mut value) = (to, bytes, value);
    let mut params = [(&raw mut to).cast(), (&raw mut bytes).cast(), (&raw mut value).cast()];
    // SAFETY: the parameters are those of `kvtide_fill`; the tests give it device memory.
    let launched = unsafe { kernel.launch(stream, grid, [128, 1, 1], &mut params) };
    // What was given is captured by then.
    (to, bytes, value) = (0, 0, 0);
    std::hint::black_box((to, bytes, value));
    launched
}

/// Whether this process was started by a test, for the test of this name.
pub(crate) fn is_child(test: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|name| name == test)
}

fn command(test: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(CHILD, test).envs(environment.iter().copied());
    command
}

/// Runs the test `test` in a process of its own, which must pass.
pub(crate) fn run_child(test: &str, environment: &[(&str, &str)]) -> String {
    let output = try_child(test, environment);
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test} with {environment:?}: {}\n{text}", output.status);
    assert!(text.contains("1 passed"), "no test is called {test}:\n{text}");
    text.into_owned()
}

pub(crate) fn try_child(test: &str, environment: &[(&str, &str)]) -> Output {
    command(test, environment).stdin(Stdio::null()).output().unwrap()
}

/// A process that runs the test `test` and speaks with this one in lines.
pub(crate) struct Peer {
    pub(crate) process: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    pub(crate) fn start(test: &str, environment: &[(&str, &str)]) -> Peer {
        Self::start_with(test, environment, Stdio::piped())
    }

    pub(crate) fn start_with(test: &str, environment: &[(&str, &str)], input: Stdio) -> Peer {
        let mut command = command(test, environment);
        let mut process = command.stdin(input).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap()).lines();
        Peer { input: process.stdin.take(), output, process }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next line that starts with `> `, without that: the harness writes lines too.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let line = self.output.next().expect("the peer goes on").unwrap();
            if let Some((_, said)) = line.split_once("> ") {
                return said.to_owned();
            }
        }
    }

    /// Closes its input and waits until it passed.
    pub(crate) fn end(mut self) {
        drop(self.input.take());
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // One that ended already cannot be killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Says a line to who started this process.
pub(crate) fn say(line: &str) {
    println!("> {line}");
}

/// Waits for a line from who started this process; `None` at the end.
pub(crate) fn listen() -> Option<String> {
    std::io::stdin().lines().next().map(Result::unwrap)
}

/// A handle as text, and back.
pub(crate) fn hex(handle: &[u8; 64]) -> String {
    handle.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> [u8; 64] {
    let mut handle = [0; 64];
    for (at, byte) in handle.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    }
    handle
}
