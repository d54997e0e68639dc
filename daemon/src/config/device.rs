//! The section `[device]`: GPU memory as a tier.

use std::fmt;
use std::path::PathBuf;

use kvtide_tiers::block::GpuUuid;
use kvtide_tiers::catalog::PolicyChoice;

use super::file::{BYTES_MAX, read_policy};
use super::read::{Found, Reader, Section, show_bytes};

/// The smallest pool; 0 is none.
const POOL_BYTES_MIN: u64 = 4 << 20;

/// What sizes a pool may have.
pub(super) const POOL_BYTES_ALLOWED: &str = "0 for none, or 4 MiB to 1024 TiB, is allowed";

/// The device tier: GPU memory of this machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceSettings {
    /// Whether GPUs are used. Default: [`DeviceUse::Auto`].
    pub enabled: DeviceUse,
    /// Bytes of each GPU's memory in which blocks are kept. With 0, engines can still register
    /// GPU memory, and blocks are copied between it and host RAM. Default: 0, because engines take
    /// what is free of a GPU when they start. Minimum: 0, or 4 MiB.
    pub pool_bytes: u64,
    /// The GPUs to use; all that the driver shows when empty. Default: empty.
    pub gpus: Vec<GpuUuid>,
    /// Which blocks leave a pool first. Default: by predicted reuse.
    pub policy: PolicyChoice,
    /// The driver library, by its absolute path. For tests only. Default: the machine's.
    pub library: Option<PathBuf>,
}

/// Whether GPUs are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceUse {
    /// Where there is a driver with GPUs; otherwise it is said why not.
    #[default]
    Auto,
    /// As `Auto`, but it is a warning when there is none.
    On,
    /// Never.
    Off,
}

impl DeviceUse {
    /// As the file says it.
    pub fn name(self) -> &'static str {
        match self {
            DeviceUse::Auto => "auto",
            DeviceUse::On => "true",
            DeviceUse::Off => "false",
        }
    }
}

impl fmt::Display for DeviceSettings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.enabled == DeviceUse::Off {
            return out.write_str("off");
        }
        out.write_str(self.enabled.name())?;
        match self.gpus.len() {
            0 => out.write_str(", all GPUs")?,
            count => write!(out, ", {count} of the GPUs")?,
        }
        match self.pool_bytes {
            0 => out.write_str(", no pool"),
            bytes => write!(out, ", a pool of {} each", show_bytes(bytes)),
        }
    }
}

pub(super) fn pool_bytes_allowed(bytes: u64) -> bool {
    bytes == 0 || (POOL_BYTES_MIN..=BYTES_MAX).contains(&bytes)
}

pub(super) fn read_device(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> DeviceSettings {
    let policy = read_policy(reader, &mut section);
    let mut device = DeviceSettings { policy, ..DeviceSettings::default() };
    if let Some(found) = section.flag_or_auto(reader, "enabled") {
        device.enabled = match found.value {
            None => DeviceUse::Auto,
            Some(true) => DeviceUse::On,
            Some(false) => DeviceUse::Off,
        };
    }
    if let Some(found) = section.bytes(reader, "pool_bytes", 0..=BYTES_MAX) {
        if !pool_bytes_allowed(found.value) {
            let what = format!("`device.pool_bytes` is {}", show_bytes(found.value));
            reader.problem(found.line, what, POOL_BYTES_ALLOWED);
        }
        device.pool_bytes = found.value;
    }
    if let Some(found) = section.texts(reader, "gpus") {
        device.gpus = read_gpus(reader, &found);
    }
    if let Some(found) = section.path(reader, "library") {
        if !found.value.is_absolute() {
            let what = format!("`device.library` is {}", found.value.display());
            reader.problem(found.line, what, "an absolute path is allowed; it is for tests only");
        }
        device.library = Some(found.value);
    }
    section.finish(reader);
    device
}

fn read_gpus(reader: &mut Reader<'_>, found: &Found<Vec<String>>) -> Vec<GpuUuid> {
    const ALLOWED: &str = "write UUIDs as `nvidia-smi -L` shows them, each once, like \
                           [\"GPU-2f1c0b5e-0d6a-4c3b-9a51-3c8f7f0c1d2e\"]; leave the key out for \
                           all GPUs";
    let mut gpus = Vec::new();
    for text in &found.value {
        match text.parse() {
            Ok(gpu) if !gpus.contains(&gpu) => gpus.push(gpu),
            Ok(_) => {
                let what = format!("`device.gpus` names \"{text}\" twice");
                reader.problem(found.line, what, ALLOWED);
            }
            Err(_) => {
                let what = format!("`device.gpus` names \"{text}\", which is no UUID of a GPU");
                reader.problem(found.line, what, ALLOWED);
            }
        }
    }
    if found.value.is_empty() {
        reader.problem(found.line, "`device.gpus` is empty", ALLOWED);
    }
    gpus
}
