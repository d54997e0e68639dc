//! What two processes need of each other, tried with a child: memory by a legacy handle, memory by
//! a descriptor, an event. And the start of the driver in a process that has done nothing yet.

use std::{
    io::Read,
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use kvtide_kernels::{
    driver::{Context, Driver, Event, use_library},
    launch::Kernels,
    yardstick::Imported,
};
use kvtide_tiers::{
    block::{BlockKey, IpcHandle},
    tier::device::{
        OpenMemory,
        cuda::{EngineMemory, EngineMemoryKind, GpuChoice},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{DeviceArgs, measure::rounded};
use crate::{daemon::this_program, payload::Payload, report::say_json};

/// Longest time that a child may take: closing a mapping is known to hang.
const CHILD_MAX: Duration = Duration::from_secs(30);

/// What a child does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum PeerTask {
    /// Start the driver and load the kernels.
    Load,
    /// Import memory of cuMemAlloc.
    Legacy,
    /// Import memory of cuMemCreate, whose descriptor is standard input.
    Vmm,
}

/// Arguments of a child.
#[derive(Args, Clone, Debug)]
pub struct PeerArgs {
    #[arg(value_enum)]
    task: PeerTask,
    #[arg(long)]
    library: Option<PathBuf>,
    #[arg(long)]
    gpu: i32,
    /// The handle of the memory, in hexadecimal.
    #[arg(long)]
    memory: Option<String>,
    /// The handle of an event, in hexadecimal.
    #[arg(long)]
    event: Option<String>,
    #[arg(long, default_value_t = 0)]
    bytes: u64,
}

/// What a child says of memory that it imported.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Import {
    open_us: f64,
    close_us: f64,
    /// Whether the exporter's bytes were read.
    read: bool,
    /// How the exporter's event was waited for.
    event: String,
}

/// How one kind of sharing went.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Shared {
    kind: &'static str,
    bytes: u64,
    works: bool,
    /// Why it does not.
    why: Option<String>,
    export_us: f64,
    import: Import,
}

impl Shared {
    pub(super) fn words(&self) -> String {
        let Import { open_us, close_us, event, .. } = &self.import;
        match &self.why {
            Some(why) => format!("sharing by {}: DOES NOT WORK: {why}", self.kind),
            None => format!(
                "sharing by {}: works; export {:.0} us, open {open_us:.0} us, close {close_us:.0} \
                 us, event: {event}",
                self.kind, self.export_us
            ),
        }
    }
}

/// Tries both kinds of sharing.
pub(super) fn try_all(args: &DeviceArgs) -> anyhow::Result<Vec<Shared>> {
    let each = [
        ("legacy handle", EngineMemoryKind::Ipc, PeerTask::Legacy),
        ("descriptor", EngineMemoryKind::Vmm, PeerTask::Vmm),
    ];
    let each = each.map(|(kind, how, task)| {
        let bytes = if args.quick { 4 << 20 } else { 64 << 20 };
        let none = Shared {
            kind,
            bytes,
            works: false,
            why: None,
            export_us: 0.0,
            import: Import::default(),
        };
        let mut shared = none.clone();
        match try_one(args, how, task, &mut shared) {
            Ok(()) => shared.works = true,
            Err(error) => shared.why = Some(format!("{error:#}")),
        }
        shared
    });
    Ok(each.into())
}

/// Exports memory, lets a child read it and write to it, and reads what the child wrote.
fn try_one(
    args: &DeviceArgs,
    how: EngineMemoryKind,
    task: PeerTask,
    shared: &mut Shared,
) -> anyhow::Result<()> {
    let memory = EngineMemory::create(GpuChoice::Ordinal(args.gpu), shared.bytes, how, 1)?;
    let mut bytes = vec![0; usize::try_from(shared.bytes)?];
    Payload::new().fill(&OURS, &mut bytes);
    memory.write_at(0, &bytes)?;
    let event = memory.event_handles();
    if event.is_ok() {
        memory.record(0)?;
    }
    let started = Instant::now();
    let open = memory.share()?;
    shared.export_us = rounded(started.elapsed().as_secs_f64() * 1e6);
    let mut command = peer(args, task)?;
    if let Some(event) = event.ok().and_then(|events| events.first().copied()) {
        command.args(["--event", &hex(&event)]);
    }
    match open {
        OpenMemory::Ipc { handle, .. } => {
            command.args(["--memory", &hex(&handle), "--bytes", &shared.bytes.to_string()]);
        }
        OpenMemory::Vmm { fd, allocation_bytes, .. } => {
            command.args(["--bytes", &allocation_bytes.to_string()]).stdin(Stdio::from(fd));
        }
        OpenMemory::Shared(_) => bail!("GPU memory turned out to be host memory"),
    }
    let text = output(command)?;
    shared.import = serde_json::from_str(&text).context("the child talks nonsense")?;
    if !shared.import.read {
        bail!("the other process reads other bytes");
    }
    memory.read_at(0, &mut bytes)?;
    if Payload::new().check(&THEIRS, &bytes).is_some() {
        bail!("what the other process wrote is not there");
    }
    Ok(())
}

/// The contents that the exporter writes, and those that the importer writes.
const OURS: BlockKey = BlockKey([1; 32]);
const THEIRS: BlockKey = BlockKey([2; 32]);

/// Starts the driver in a child and loads the kernels there, from the driver's cache of compiled
/// kernels or without it.
pub(super) fn load_in_a_child(args: &DeviceArgs, cached: bool) -> serde_json::Value {
    let run = || -> anyhow::Result<serde_json::Value> {
        let mut command = peer(args, PeerTask::Load)?;
        if !cached {
            command.env("CUDA_CACHE_DISABLE", "1");
        }
        if cached {
            // Once to fill the cache.
            output(peer(args, PeerTask::Load)?)?;
        }
        Ok(serde_json::from_str(&output(command)?)?)
    };
    run().unwrap_or_else(|error| json!({ "failed": format!("{error:#}") }))
}

fn peer(args: &DeviceArgs, task: PeerTask) -> anyhow::Result<Command> {
    let mut command = this_program("__gpu-peer")?;
    let name = task.to_possible_value().context("every task has a name")?;
    command.arg(name.get_name()).args(["--gpu", &args.gpu.to_string()]).stdin(Stdio::null());
    if let Some(library) = &args.library {
        command.arg("--library").arg(library);
    }
    Ok(command)
}

/// The last line that a child prints; it is killed when it takes too long.
fn output(mut command: Command) -> anyhow::Result<String> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > CHILD_MAX {
            child.kill()?;
            child.wait()?;
            bail!("the other process did not end within {} s", CHILD_MAX.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (mut out, mut err) = (String::new(), String::new());
    if let (Some(mut stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) {
        stdout.read_to_string(&mut out)?;
        stderr.read_to_string(&mut err)?;
    }
    if !status.success() {
        bail!("the other process ended with {status}: {}", err.trim());
    }
    Ok(out.lines().last().unwrap_or_default().to_owned())
}

/// Runs a child.
///
/// # Errors
/// What it was to do did not work.
pub fn run_peer(args: &PeerArgs) -> anyhow::Result<ExitCode> {
    crate::daemon::end_with_parent();
    if let Some(library) = &args.library {
        use_library(library)?;
    }
    let started = Instant::now();
    let ms = |since: Instant| rounded(since.elapsed().as_secs_f64() * 1e3);
    let driver = Driver::open()?;
    let open_ms = ms(started);
    let started = Instant::now();
    let context = Context::new(&driver, args.gpu)?;
    let context_ms = ms(started);
    if args.task == PeerTask::Load {
        let started = Instant::now();
        let _kernels = Kernels::load(&context)?;
        let load_ms = ms(started);
        let all = json!({
            "driver_ms": open_ms, "context_ms": context_ms, "kernels_ms": load_ms,
        });
        say_json(&all)?;
    } else {
        say_json(&import(args, &context)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn import(args: &PeerArgs, context: &Context) -> anyhow::Result<Import> {
    let started = Instant::now();
    let memory = match args.task {
        PeerTask::Vmm => {
            let fd = rustix::io::dup(std::io::stdin())?;
            Imported::vmm(context, fd, args.bytes)?
        }
        _ => Imported::legacy(context, unhex(args.memory.as_deref().unwrap_or_default())?)?,
    };
    let open_us = rounded(started.elapsed().as_secs_f64() * 1e6);
    let event = match &args.event {
        None => "cannot be shared".to_owned(),
        Some(handle) => {
            let opened = Event::open(context, unhex(handle)?);
            match opened.and_then(|event| event.synchronize()) {
                Ok(()) => "works".to_owned(),
                Err(error) => error.to_string(),
            }
        }
    };
    let mut bytes = vec![0; usize::try_from(args.bytes)?];
    memory.read_at(0, &mut bytes)?;
    let read = Payload::new().check(&OURS, &bytes).is_none();
    Payload::new().fill(&THEIRS, &mut bytes);
    memory.write_at(0, &bytes)?;
    let started = Instant::now();
    memory.close()?;
    let close_us = rounded(started.elapsed().as_secs_f64() * 1e6);
    Ok(Import { open_us, close_us, read, event })
}

fn hex(handle: &IpcHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> anyhow::Result<[u8; 64]> {
    let byte = |at: usize| {
        let digits = text.get(2 * at..2 * at + 2).context("a handle has 128 digits")?;
        Ok(u8::from_str_radix(digits, 16)?)
    };
    let bytes: Vec<u8> = (0..64).map(byte).collect::<anyhow::Result<_>>()?;
    bytes.try_into().ok().context("a handle has 64 bytes")
}
