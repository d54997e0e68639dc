//! The device tier as operators configure it and see it.

use kvtide_client::protocol::GpuStatus;
use kvtide_tiers::movement::{DeviceConfig, DeviceReport, GpuChoice, NodeReport};

use crate::config::{DeviceSettings, DeviceUse, show_bytes};

/// The GPUs that the node is to use.
pub fn node_devices(settings: &DeviceSettings) -> Vec<DeviceConfig> {
    if settings.enabled == DeviceUse::Off {
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
    let why = || report.devices_off.clone();
    let none = report.devices.is_empty();
    none.then(|| why().unwrap_or_else(|| "the driver shows no GPU".to_owned()))
}

/// The tier in words.
pub fn words(settings: &DeviceSettings, report: &NodeReport) -> String {
    if let Some(why) = off(settings, report) {
        return format!("off: {why}");
    }
    let all = report.devices.len();
    let lost = report.devices.iter().filter(|device| device.off.is_some()).count();
    let gpus = if all == 1 { "1 GPU".to_owned() } else { format!("{all} GPUs") };
    let lost = if lost > 0 { format!(", {lost} of them off") } else { String::new() };
    format!("{gpus}{lost}")
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
        stuck: device.stuck,
        off: device.off.clone(),
    };
    report.devices.iter().map(status).collect()
}

/// What is wrong with GPUs now, a line for each.
pub fn troubles(devices: &[GpuStatus]) -> Vec<String> {
    let trouble = |device: &GpuStatus| match &device.off {
        Some(why) => Some(format!("{}: off: {why}", device.uuid)),
        None => device.stuck.then(|| format!("{}: {}", device.uuid, device.health)),
    };
    devices.iter().filter_map(trouble).collect()
}

#[cfg(test)]
mod tests {
    use kvtide_tiers::block::GpuUuid;

    use super::*;

    #[test]
    fn troubles_name_the_gpu() {
        let gpu = |uuid: &str, stuck: bool, off: Option<&str>| GpuStatus {
            uuid: uuid.into(),
            name: "Fake GPU 0".into(),
            driver: "13.0".into(),
            pool_bytes: 0,
            health: "1 mapping cannot be closed, the oldest for 12 s".into(),
            stuck,
            off: off.map(str::to_owned),
        };
        let devices =
            [gpu("GPU-a", false, None), gpu("GPU-b", true, None), gpu("GPU-c", true, Some("lost"))];
        let expected = [
            "GPU-b: 1 mapping cannot be closed, the oldest for 12 s".to_owned(),
            "GPU-c: off: lost".to_owned(),
        ];
        assert_eq!(troubles(&devices), expected);
    }

    #[test]
    fn all_gpus_are_used_or_those_that_are_named_or_none() {
        let mut settings = DeviceSettings { pool_bytes: 1 << 30, ..DeviceSettings::default() };
        let device = |gpu| DeviceConfig { gpu, pool_bytes: 1 << 30, library: None };
        assert_eq!(node_devices(&settings), [device(GpuChoice::All)]);
        let gpus = [GpuUuid([9; 16]), GpuUuid([2; 16])];
        settings.gpus = gpus.to_vec();
        assert_eq!(node_devices(&settings), gpus.map(|gpu| device(GpuChoice::Uuid(gpu))));
        settings.enabled = DeviceUse::Off;
        assert!(node_devices(&settings).is_empty());
    }
}
