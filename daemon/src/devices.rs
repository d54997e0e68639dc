//! The device tier as operators configure it and see it.

use kvtide_client::protocol::GpuStatus;
use kvtide_tiers::movement::{DeviceConfig, DeviceReport, GpuChoice, NodeReport};

use crate::config::{DeviceSettings, DeviceUse, show_bytes};

/// Whether this build can use GPUs.
pub const HAS_CUDA: bool = cfg!(feature = "cuda");

const NOT_BUILT: &str = "this build has none (cargo feature `cuda`)";

/// The GPUs that the node is to use.
pub fn node_devices(settings: &DeviceSettings) -> Vec<DeviceConfig> {
    if settings.enabled == DeviceUse::Off || !HAS_CUDA {
        return Vec::new();
    }
    let choices = match settings.gpus.as_slice() {
        [] => vec![GpuChoice::All],
        gpus => gpus.iter().map(|gpu| GpuChoice::Uuid(*gpu)).collect(),
    };
    let device = |gpu| DeviceConfig {
        gpu,
        pool_bytes: settings.pool_bytes,
        library: settings.library.clone(),
    };
    choices.into_iter().map(device).collect()
}

/// Why the whole tier is off; `None` when it is not.
pub fn off(settings: &DeviceSettings, report: &NodeReport) -> Option<String> {
    if settings.enabled == DeviceUse::Off {
        return Some("turned off by the configuration".to_owned());
    }
    if !HAS_CUDA {
        return Some(NOT_BUILT.to_owned());
    }
    if report.devices.is_empty() {
        let why = report.devices_off.clone();
        return Some(why.unwrap_or_else(|| "the driver shows no GPU".to_owned()));
    }
    None
}

/// The tier in words.
pub fn words(settings: &DeviceSettings, report: &NodeReport) -> String {
    if let Some(why) = off(settings, report) {
        return format!("off: {why}");
    }
    let (all, on) = (report.devices.len(), report.devices.iter().filter(|d| d.off.is_none()));
    let on = on.count();
    let gpus = match all {
        1 => "1 GPU".to_owned(),
        all => format!("{all} GPUs"),
    };
    let off = if on < all { format!(", {} of them off", all - on) } else { String::new() };
    format!("{gpus}{off}")
}

/// What is stated at start.
pub fn start_notes(settings: &DeviceSettings, report: &NodeReport) -> Vec<String> {
    let mut notes = vec![format!("device tier: {}", words(settings, report))];
    notes.extend(report.devices.iter().map(|device| {
        let DeviceReport { gpu, name, driver, pool_bytes, off, .. } = device;
        let pool = match (off, pool_bytes) {
            (Some(why), _) => format!("off: {why}"),
            (None, 0) => "no pool".to_owned(),
            (None, bytes) => format!("pool {}", show_bytes(*bytes)),
        };
        format!("{gpu}: {name}, driver {driver}, {pool}")
    }));
    notes
}

/// Each GPU as it travels.
pub fn status(report: &NodeReport) -> Vec<GpuStatus> {
    let status = |device: &DeviceReport| GpuStatus {
        uuid: device.gpu.to_string(),
        name: device.name.clone(),
        driver: device.driver.clone(),
        pool_bytes: device.pool_bytes,
        health: device.health.clone(),
        off: device.off.clone(),
    };
    report.devices.iter().map(status).collect()
}

/// What is wrong with GPUs now, a line for each.
pub fn troubles(devices: &[GpuStatus]) -> Vec<String> {
    let trouble = |device: &GpuStatus| match &device.off {
        Some(why) => Some(format!("{}: off: {why}", device.uuid)),
        None if device.health == HEALTHY => None,
        None => Some(format!("{}: {}", device.uuid, device.health)),
    };
    devices.iter().filter_map(trouble).collect()
}

/// What the node says of a GPU that is well.
pub const HEALTHY: &str = "ok";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn troubles_name_the_gpu() {
        let gpu = |uuid: &str, health: &str, off: Option<&str>| GpuStatus {
            uuid: uuid.into(),
            name: "Fake GPU 0".into(),
            driver: "13.0".into(),
            pool_bytes: 0,
            health: health.into(),
            off: off.map(str::to_owned),
        };
        let devices = [
            gpu("GPU-a", HEALTHY, None),
            gpu("GPU-b", "1 import closes for 12 s", None),
            gpu("GPU-c", HEALTHY, Some("error 700")),
        ];
        let expected = ["GPU-b: 1 import closes for 12 s", "GPU-c: off: error 700"];
        assert_eq!(troubles(&devices), expected);
    }

    #[test]
    fn what_is_turned_off_is_not_asked_for() {
        let mut settings = DeviceSettings { enabled: DeviceUse::Off, ..DeviceSettings::default() };
        assert!(node_devices(&settings).is_empty());
        settings.enabled = DeviceUse::Auto;
        let all = node_devices(&settings);
        assert_eq!(all.len(), usize::from(HAS_CUDA));
        assert!(all.iter().all(|device| device.gpu == GpuChoice::All && device.pool_bytes == 0));
    }
}
