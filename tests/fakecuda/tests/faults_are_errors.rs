//! Each fault of a schedule, each kind of missing driver, and each misuse that loses the context
//! arrives as an `Err` and never as a panic.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use common::{
    Pinned, context, copy, download, fill, fill_kernel, is_child, launch_fill, run_child, say,
    try_child, upload,
};
use kvtide_kernels::driver::{
    Context, Copy, CudaError, DeviceBuffer, Driver, Event, ImportedVmm, Stream, Unavailable,
    VmmBuffer, failed_drops, use_library,
};

/// What the steps hold on to, as a tier would.
struct Device {
    context: Context,
    stream: Stream,
    buffer: DeviceBuffer,
    pinned: Pinned,
    event: Event,
}

fn open() -> Result<Device, CudaError> {
    let context = Context::new(&common::driver(), 0)?;
    Ok(Device {
        stream: Stream::new(&context)?,
        buffer: DeviceBuffer::alloc(&context, 1 << 16)?,
        pinned: Pinned::new(&context, 1 << 16, 1 << 20)?,
        event: Event::new(&context)?,
        context,
    })
}

/// Everything that a tier does, once; each step says how it ended.
fn steps(device: &Device) {
    let Device { context, stream, buffer, pinned, event } = device;
    let step = |name: &str, result: Result<(), CudaError>| match result {
        Ok(()) => say(&format!("{name} ok")),
        Err(error) => say(&format!("{name} {} {}", error.code, error.call)),
    };
    let at = buffer.address();
    // SAFETY: buffer and host memory live until the streams are drained, in `Drop`.
    step("upload", unsafe { stream.copy_to_device(at, pinned.address(), 4096) });
    let kernel = fill_kernel(context);
    step("module", kernel.as_ref().map(|_| ()).map_err(|error| *error));
    if let Ok(kernel) = &kernel {
        step("launch", launch_fill(kernel, stream, [1, 1, 1], at, 4096, 5));
    }
    let src = at;
    // SAFETY: as above.
    step("batch", unsafe { stream.copy_batch(&[Copy { dst: at + 8192, src, bytes: 4096 }]) });
    step("record", event.record(stream));
    step("wait", stream.wait(event));
    step("event", event.synchronize());
    step("synchronize", stream.synchronize());
    step("memory", context.memory().map(|_| ()));
    step("ipc", buffer.ipc_handle().map(|_| ()));
    let created = VmmBuffer::create(context, 1);
    step("create", created.as_ref().map(|_| ()).map_err(|error| *error));
    let shared = created.and_then(|created| Ok((created.export_fd()?, created.bytes())));
    let imported = shared.and_then(|(fd, bytes)| ImportedVmm::open(context, fd, bytes));
    step("import", imported.map(|_| ()));
    step("download", download(stream, at, 4096).map(|_| ()));
}

/// A helper that ends at once when no test started it.
#[test]
fn tier() {
    if !is_child("tier") {
        return;
    }
    match Driver::open_with(&fakecuda::library()) {
        Err(unavailable) => say(&format!("unavailable: {unavailable}")),
        Ok(_) => match open() {
            Err(error) => say(&format!("open {} {}", error.code, error.call)),
            Ok(device) => steps(&device),
        },
    }
    say(&format!("failed drops {}", failed_drops()));
}

trait OpenWith {
    fn open_with(path: &Path) -> Result<Driver, Unavailable>;
}

impl OpenWith for Driver {
    fn open_with(path: &Path) -> Result<Driver, Unavailable> {
        use_library(path)?;
        Driver::open()
    }
}

/// What the steps said with this environment. The process must end well: no panic.
fn said(environment: &[(&str, &str)]) -> Vec<String> {
    let text = run_child("tier", environment);
    assert!(!text.contains("panicked"), "{text}");
    text.lines().filter_map(|line| line.split_once("> ")).map(|(_, said)| said.to_owned()).collect()
}

fn with_faults(faults: &str) -> Vec<String> {
    said(&[("FAKECUDA_FAULTS", faults)])
}

const GOOD: [&str; 14] = [
    "upload ok",
    "module ok",
    "launch ok",
    "batch ok",
    "record ok",
    "wait ok",
    "event ok",
    "synchronize ok",
    "memory ok",
    "ipc ok",
    "create ok",
    "import ok",
    "download ok",
    "failed drops 0",
];

#[test]
fn without_a_fault_every_step_is_good() {
    assert_eq!(with_faults(""), GOOD);
}

#[test]
fn a_fault_that_passes_hits_its_own_call_only() {
    for (faults, step, found) in [
        ("cuMemcpyHtoDAsync_v2@1=oom", "upload", "upload 2 cuMemcpyHtoDAsync_v2"),
        ("cuLaunchKernel@1=oom", "launch", "launch 2 cuLaunchKernel"),
        ("cuMemcpyBatchAsync_v2@1=invalid_value", "batch", "batch 1 cuMemcpyBatchAsync_v2"),
        ("cuEventRecord@1=invalid_handle", "record", "record 400 cuEventRecord"),
        ("cuStreamWaitEvent@1=invalid_handle", "wait", "wait 400 cuStreamWaitEvent"),
        ("cuIpcGetMemHandle@1=not_supported", "ipc", "ipc 801 cuIpcGetMemHandle"),
        ("cuMemGetInfo_v2@1=917", "memory", "memory 917 cuMemGetInfo_v2"),
    ] {
        let mut expected = GOOD.map(str::to_owned);
        let at = GOOD.iter().position(|good| good.starts_with(step)).unwrap();
        expected[at] = found.to_owned();
        assert_eq!(with_faults(faults), expected, "{faults}");
    }
}

#[test]
fn a_module_or_created_memory_that_fails_takes_its_later_steps_with_it() {
    let found = with_faults("cuModuleLoadData@1=unsupported_ptx,cuMemMap@1=oom");
    assert!(found.contains(&"module 222 cuModuleLoadData".to_owned()), "{found:?}");
    assert!(!found.iter().any(|said| said.starts_with("launch")), "{found:?}");
    assert!(found.contains(&"create 2 cuMemMap".to_owned()), "{found:?}");
    assert!(found.contains(&"import 2 cuMemMap".to_owned()), "the same error: {found:?}");
    assert_eq!(found.last().unwrap(), "failed drops 0");
    for call in ["cuMemCreate", "cuMemAddressReserve", "cuMemSetAccess"] {
        let found = with_faults(&format!("{call}@1=oom"));
        assert!(found.contains(&format!("create 2 {call}")), "{found:?}");
        assert_eq!(found.last().unwrap(), "failed drops 0", "what was done is undone");
    }
}

#[test]
fn an_error_that_stays_shows_later_and_in_all_that_follows() {
    for (faults, code) in [
        ("cuMemcpyHtoDAsync_v2@1=ecc", "214"),
        ("cuLaunchKernel@1=launch_failed", "719"),
        ("cuMemcpyBatchAsync_v2@1=illegal_address", "700"),
    ] {
        let found = with_faults(faults);
        // The call that queued the work may have succeeded, but nothing that waits for it did.
        for step in ["event", "synchronize", "memory", "ipc", "create", "import", "download"] {
            let said = found.iter().find(|said| said.starts_with(&format!("{step} "))).unwrap();
            assert_eq!(said.split(' ').nth(1), Some(code), "{faults}: {found:?}");
        }
        assert_eq!(found.last().unwrap(), "failed drops 0", "a lost driver is no bug of a drop");
    }
}

#[test]
fn a_context_that_cannot_be_had_is_an_error() {
    assert_eq!(
        with_faults("cuDevicePrimaryCtxRetain=oom"),
        ["open 2 cuDevicePrimaryCtxRetain", "failed drops 0"]
    );
    assert_eq!(
        with_faults("cuMemHostRegister_v2@1=oom"),
        ["open 2 cuMemHostRegister_v2", "failed drops 0"]
    );
    assert_eq!(with_faults("cuStreamCreate@1=999"), ["open 999 cuStreamCreate", "failed drops 0"]);
}

#[test]
fn a_driver_that_does_not_start_says_why_in_one_line() {
    let line = |environment: &[(&str, &str)]| {
        let found = said(environment);
        assert_eq!(found.len(), 2, "{found:?}");
        found[0].strip_prefix("unavailable: ").unwrap().to_owned()
    };
    let of = |fault: &str| line(&[("FAKECUDA_FAULTS", fault)]);
    assert!(of("cuInit=stub").contains("is a stub from a toolkit"));
    assert!(of("cuInit=no_device").contains("sees no GPU"));
    assert!(of("cuInit=mismatch").contains("restart the machine"));
    assert!(of("cuInit=system_not_ready").contains("nvidia-fabricmanager"));
    assert!(of("cuInit=12345").contains("unknown error (12345)"));
    assert!(line(&[("FAKECUDA_DEVICES", "0")]).contains("sees no GPU"));
    let old = line(&[("FAKECUDA_DRIVER_VERSION", "11040")]);
    assert!(old.contains("supports CUDA 11.4, 12.4 is needed"), "{old}");
    assert!(of("cuInit=too_old").contains("is too old: it supports CUDA 13.0"));
}

/// No library was named here: what is found, if anything, is a real driver.
#[test]
fn without_a_library_there_is_no_driver() {
    const ME: &str = "without_a_library_there_is_no_driver";
    if !is_child(ME) {
        run_child(ME, &[]);
        return;
    }
    match Driver::open() {
        Err(Unavailable::NoLibrary) => {
            let line = Unavailable::NoLibrary.to_string();
            assert!(line.starts_with("no CUDA driver library (libcuda.so.1)"), "{line}");
            // And then the fake can still be named.
            use_library(&fakecuda::library()).unwrap();
            Driver::open().unwrap();
            let other = use_library(Path::new("/elsewhere/libcuda.so.1")).unwrap_err();
            assert_eq!(other, Unavailable::AlreadyOpen(fakecuda::library()));
        }
        Err(other) => println!("a driver that does not start: {other}"),
        Ok(driver) => {
            for device in driver.devices().unwrap() {
                assert!(!device.name.starts_with("Fake"), "the fake was found unasked");
            }
        }
    }
}

#[test]
fn an_old_driver_takes_no_new_ptx_and_a_new_one_does() {
    let module = |version: &str| {
        let found = said(&[("FAKECUDA_DRIVER_VERSION", version)]);
        found.into_iter().find(|said| said.starts_with("module")).unwrap()
    };
    assert_eq!(module("12040"), "module ok");
    assert_eq!(module("13010"), "module ok");
}

#[test]
fn using_freed_memory_loses_the_context() {
    const ME: &str = "using_freed_memory_loses_the_context";
    if !is_child(ME) {
        run_child(ME, &[]);
        return;
    }
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, 4096).unwrap();
    let other = DeviceBuffer::alloc(&context, 4096).unwrap();
    let address = buffer.address();
    drop(buffer);
    let queued = copy(&stream, other.address(), address, 4096);
    assert_eq!(queued, Ok(()), "the call only queues it");
    let error = stream.synchronize().unwrap_err();
    assert!(error.code == 700 && error.is_sticky(), "{error}");
    assert_eq!(upload(&stream, other.address(), &[1]).unwrap_err().code, 700);
    assert_eq!(DeviceBuffer::alloc(&context, 1).unwrap_err().code, 700);
    assert_eq!(Stream::new(&context).unwrap_err().code, 700);
    drop((stream, other, context));
    assert_eq!(failed_drops(), 0);
}

#[test]
fn an_error_that_stays_is_of_one_gpu() {
    const ME: &str = "an_error_that_stays_is_of_one_gpu";
    if !is_child(ME) {
        run_child(ME, &[("FAKECUDA_DEVICES", "2"), ("FAKECUDA_MEMORY", "1048576")]);
        return;
    }
    let driver = common::driver();
    let names: Vec<String> =
        driver.devices().unwrap().into_iter().map(|device| device.name).collect();
    assert_eq!(names, ["Fake GPU 0", "Fake GPU 1"]);
    let one = Context::new(&driver, 0).unwrap();
    let two = Context::new(&driver, 1).unwrap();
    assert_ne!(one.info().uuid, two.info().uuid);
    let (good, bad) = (Stream::new(&one).unwrap(), Stream::new(&two).unwrap());
    let (kept, lost) =
        (DeviceBuffer::alloc(&one, 1 << 20).unwrap(), DeviceBuffer::alloc(&two, 1 << 20).unwrap());
    assert!(DeviceBuffer::alloc(&one, 1).unwrap_err().is_out_of_memory());
    assert_eq!(Event::new(&one).unwrap().record(&bad).unwrap_err().code, 400, "another GPU's");
    let fault = common::inject("cuMemsetD8Async@1=ecc");
    assert_eq!(fill(&bad, lost.address(), 1, 4096), Ok(()), "it is only queued");
    drop(fault);
    assert_eq!(bad.synchronize().unwrap_err().code, 214);
    assert_eq!(two.memory().unwrap_err().code, 214);
    upload(&good, kept.address(), &[6; 4096]).unwrap();
    assert_eq!(download(&good, kept.address(), 4096).unwrap(), [6; 4096]);
}

#[test]
fn a_call_that_hangs_blocks_its_own_thread_only() {
    const ME: &str = "a_call_that_hangs_blocks_its_own_thread_only";
    if !is_child(ME) {
        run_child(ME, &[]);
        return;
    }
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let (hanging, other) = (
        DeviceBuffer::alloc(&context, 4096).unwrap(),
        DeviceBuffer::alloc(&context, 4096).unwrap(),
    );
    let fault = common::inject("cuMemFree_v2@1=hang");
    let (done, is_done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        drop(hanging);
        done.send(()).unwrap();
    });
    assert!(is_done.recv_timeout(Duration::from_millis(100)).is_err(), "it hangs");
    fill(&stream, other.address(), 4, 4096).unwrap();
    assert_eq!(download(&stream, other.address(), 4096).unwrap(), [4; 4096]);
    drop(other);
    drop(fault);
    is_done.recv_timeout(Duration::from_secs(10)).unwrap();
    thread.join().unwrap();
}

#[test]
fn a_file_of_faults_breaks_and_mends_a_process_that_runs() {
    const ME: &str = "a_file_of_faults_breaks_and_mends_a_process_that_runs";
    if !is_child(ME) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("faults");
        run_child(ME, &[("FAKECUDA_FAULT_FILE", path.to_str().unwrap())]);
        return;
    }
    let path = std::env::var("FAKECUDA_FAULT_FILE").unwrap();
    let context = context();
    let alloc = || DeviceBuffer::alloc(&context, 4096).map(|_| ()).map_err(|error| error.code);
    assert_eq!([alloc(), alloc()], [Ok(()), Ok(())]);
    std::fs::write(&path, "cuMemAlloc_v2@2+=oom\n").unwrap();
    assert_eq!([alloc(), alloc(), alloc()], [Ok(()), Err(2), Err(2)]);
    std::fs::write(&path, "cuMemAlloc_v2=hang").unwrap();
    let (done, is_done) = mpsc::channel();
    let thread = {
        let context = context.clone();
        std::thread::spawn(move || {
            let buffer = DeviceBuffer::alloc(&context, 4096);
            done.send(()).unwrap();
            buffer.map(|_| ())
        })
    };
    assert!(is_done.recv_timeout(Duration::from_millis(100)).is_err(), "it hangs");
    std::fs::remove_file(&path).unwrap();
    is_done.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(thread.join().unwrap(), Ok(()));
    assert_eq!(alloc(), Ok(()));
}

#[test]
fn a_schedule_with_a_typo_ends_the_process() {
    let output = try_child("tier", &[("FAKECUDA_FAULTS", "cuMemAloc_v2@1=oom")]);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("names no call of the fake"), "{text}");
}
