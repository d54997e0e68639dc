//! `kvtide config`: what kvtided would use, and what is wrong with a file.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use super::args::ConfigWhat;
use super::error::CliError;
use super::out::Out;
use super::table::{Align, Table};
use crate::config::{Args, Config, ConfigError, HostKeep, MetricsAddress, NvmeIo};
use crate::units::{bytes, count, span};

#[derive(Serialize)]
struct Setting {
    key: &'static str,
    value: serde_json::Value,
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct Effective {
    settings: Vec<Setting>,
    notes: Vec<String>,
}

#[derive(Serialize)]
struct Wrong {
    source: String,
    line: Option<usize>,
    what: String,
    allowed: String,
}

#[derive(Serialize)]
struct Checked {
    file: String,
    problems: Vec<Wrong>,
}

pub(crate) fn run(what: Option<&ConfigWhat>, out: Out) -> Result<(), CliError> {
    match what {
        None => show(None, out),
        Some(ConfigWhat::Show { file }) => show(file.as_deref(), out),
        Some(ConfigWhat::Check { file }) => check(file, out),
    }
}

fn load(file: Option<&Path>) -> Result<Config, ConfigError> {
    Config::load(&Args { config: file.map(Path::to_path_buf), ..Args::default() })
}

fn show(file: Option<&Path>, out: Out) -> Result<(), CliError> {
    let config = load(file).map_err(CliError::failed)?;
    let found = Effective { settings: settings(&config), notes: config.notes };
    out.emit(&found, |found| {
        let mut table = Table::new(&[("SETTING", Align::Left), ("VALUE", Align::Left)]);
        for setting in &found.settings {
            table.row([setting.key, setting.text.as_str()]);
        }
        let mut text = table.render();
        for note in &found.notes {
            text.push_str(&format!("- {note}\n"));
        }
        text
    })
}

fn check(file: &Path, out: Out) -> Result<(), CliError> {
    let problems = load(Some(file)).err().map(|error| error.problems).unwrap_or_default();
    let problems = problems.into_iter().map(|problem| Wrong {
        source: problem.source,
        line: (problem.line > 0).then_some(problem.line),
        what: problem.what,
        allowed: problem.allowed,
    });
    let found = Checked { file: file.display().to_string(), problems: problems.collect() };
    out.emit(&found, |found| {
        let mut text = String::new();
        for wrong in &found.problems {
            let line = wrong.line.map_or_else(String::new, |line| format!(":{line}"));
            let (source, what, allowed) = (&wrong.source, &wrong.what, &wrong.allowed);
            text.push_str(&format!("{source}{line}: {what}; {allowed}\n"));
        }
        match found.problems.len() {
            0 => text.push_str(&format!("{}: no problems\n", found.file)),
            number => text.push_str(&format!("{number} problems\n")),
        }
        text
    })?;
    if found.problems.is_empty() { Ok(()) } else { Err(CliError::Found) }
}

/// Every setting by the name that it has in the file.
fn settings(config: &Config) -> Vec<Setting> {
    let mut list = Settings(Vec::new());
    list.text("daemon.socket", config.socket.display());
    list.millis("daemon.drain_ms", config.drain);
    list.number("daemon.copy_threads", config.copy_threads as u64);
    list.bytes("host.bytes", config.host.bytes);
    match config.host.slab_bytes {
        Some(slab) => list.bytes("host.slab_bytes", slab.into()),
        None => list.text("host.slab_bytes", "chosen by size"),
    }
    let keep = if config.host.keep == HostKeep::Always { "always" } else { "auto" };
    list.text("host.keep", keep);
    list.text("host.policy", config.host.policy.name());
    list.text("nvme.folder", config.store.display());
    list.flag("nvme.enabled", config.nvme.is_some());
    if let Some(nvme) = &config.nvme {
        list.bytes("nvme.bytes", nvme.bytes);
        match nvme.segment_bytes {
            Some(segment) => list.bytes("nvme.segment_bytes", segment.into()),
            None => list.text("nvme.segment_bytes", "chosen by size"),
        }
        list.bytes("nvme.block_bytes_min", nvme.block_bytes_min.into());
        list.number("nvme.queue_depth", nvme.queue_depth.into());
        let io = match nvme.io {
            NvmeIo::Auto => "auto",
            NvmeIo::Uring => "uring",
            NvmeIo::Blocking => "blocking",
        };
        list.text("nvme.io", io);
        match nvme.write_bytes_per_day {
            Some(bytes) => list.bytes("nvme.write_bytes_per_day", bytes),
            None => list.text("nvme.write_bytes_per_day", "no limit"),
        }
        match nvme.rated_bytes {
            Some(bytes) => list.bytes("nvme.rated_bytes", bytes),
            None => list.text("nvme.rated_bytes", "not known"),
        }
    }
    list.text("device.enabled", config.device.enabled.name());
    list.bytes("device.pool_bytes", config.device.pool_bytes);
    list.text("device.policy", config.device.policy.name());
    let gpus: Vec<String> = config.device.gpus.iter().map(|gpu| gpu.to_string()).collect();
    list.text("device.gpus", if gpus.is_empty() { "all".to_owned() } else { gpus.join(", ") });
    for tenant in &config.tenants.list {
        let (uids, gids) = (&tenant.uids, &tenant.gids);
        let codec = tenant.codec.name();
        let weights = &config.prefill.weights;
        let weight = weights.iter().find(|(id, _)| *id == tenant.id).map_or(1, |(_, w)| *w);
        let name = &tenant.name;
        let text = format!("{name}: uids {uids:?}, gids {gids:?}, codec {codec}, weight {weight}");
        list.text("tenant", text);
    }
    for shared in &config.tenants.shared {
        list.text("shared", format!("{}: {}", shared.name, shared.tenants.join(", ")));
    }
    list.text("admin.uids", format!("{:?}", config.tenants.admins));
    match &config.metrics {
        MetricsAddress::Off => list.text("admin.metrics", "off"),
        MetricsAddress::Tcp { address, .. } => list.text("admin.metrics", address),
        MetricsAddress::Unix(path) => {
            list.text("admin.metrics", format!("unix:{}", path.display()));
        }
    }
    list.text("log.level", config.log.level.to_string().to_lowercase());
    list.text("log.format", format!("{:?}", config.log.format).to_lowercase());
    list.worth(config);
    list.limits(config);
    list.0
}

struct Settings(Vec<Setting>);

impl Settings {
    fn put(&mut self, key: &'static str, value: impl Into<serde_json::Value>, text: String) {
        self.0.push(Setting { key, value: value.into(), text });
    }

    fn text(&mut self, key: &'static str, value: impl std::fmt::Display) {
        let text = value.to_string();
        self.put(key, text.clone(), text);
    }

    fn number(&mut self, key: &'static str, value: u64) {
        self.put(key, value, count(value));
    }

    fn flag(&mut self, key: &'static str, value: bool) {
        self.put(key, value, value.to_string());
    }

    fn bytes(&mut self, key: &'static str, value: u64) {
        self.put(key, value, bytes(value));
    }

    fn millis(&mut self, key: &'static str, value: Duration) {
        let millis = u64::try_from(value.as_millis()).unwrap_or(u64::MAX);
        self.put(key, millis, span(value));
    }

    fn worth(&mut self, config: &Config) {
        let (arbiter, prefill) = (&config.arbiter, &config.prefill);
        self.flag("arbiter.enabled", arbiter.enabled);
        self.millis("arbiter.window_ms", Duration::from_millis(arbiter.window_ms));
        self.number("arbiter.loads_min", arbiter.loads_min.into());
        self.number("arbiter.probe_every", arbiter.probe_every.into());
        for (key, tokens) in [
            ("prefill.tokens_per_second", prefill.tokens_per_second),
            ("prefill.tokens_in_flight", prefill.tokens_in_flight),
        ] {
            match tokens {
                Some(tokens) => self.number(key, tokens),
                None => self.text(key, "no limit"),
            }
        }
        self.number("prefill.quadratic_tokens", prefill.quadratic_tokens);
        self.number("prefill.queue", prefill.queue as u64);
        for (key, ms) in [
            ("prefill.grant_ms", prefill.grant_ms),
            ("prefill.ramp_ms", prefill.ramp_ms),
            ("prefill.degrade_ms", prefill.degrade_ms),
            ("prefill.store_ms", prefill.store_ms),
        ] {
            self.millis(key, Duration::from_millis(ms));
        }
    }

    fn limits(&mut self, config: &Config) {
        let limits = &config.limits;
        let catalog = &limits.catalog;
        for (key, value) in [
            ("limits.sessions", catalog.sessions),
            ("limits.regions_per_session", catalog.regions_per_session),
            ("limits.tickets_per_session", catalog.tickets_per_session),
            ("limits.blocks_in_flight", catalog.blocks_in_flight),
            ("limits.leases_per_session", catalog.leases_per_session),
            ("limits.keys_per_call", catalog.keys_per_call),
            ("limits.pins", catalog.pins),
            ("limits.bad_keys", catalog.bad_keys),
        ] {
            self.number(key, value as u64);
        }
        self.millis("limits.lease_ms_max", Duration::from_millis(catalog.lease_ms_max.into()));
        self.millis("limits.pin_ms_max", Duration::from_millis(catalog.pin_ms_max));
        self.millis("limits.retain_ms_max", Duration::from_millis(catalog.retain_ms_max));
        self.millis("limits.ticket_ms", Duration::from_millis(catalog.ticket_ms));
        self.number("limits.pinned_percent", catalog.pinned_percent.into());
        self.number("limits.calls_in_flight", limits.calls_in_flight.into());
        self.number("limits.descriptors_waiting", limits.descriptors_waiting.into());
        self.number("limits.namespaces_per_session", limits.namespaces_per_session.into());
        self.number("limits.namespaces_per_tenant", limits.namespaces_per_tenant.into());
        self.bytes("limits.region_bytes_per_session", limits.region_bytes_per_session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_shown_in_both_forms() {
        let folder = tempfile::tempdir().unwrap();
        let args = Args {
            socket: Some(folder.path().join("s")),
            store: Some(folder.path().to_path_buf()),
            host_bytes: Some(64 << 20),
            nvme_bytes: Some(1 << 30),
            ..Args::default()
        };
        let settings = settings(&Config::load(&args).unwrap());
        let find = |key: &str| settings.iter().find(|setting| setting.key == key).unwrap();
        assert_eq!(find("host.bytes").text, "64.0 MiB");
        assert_eq!(find("host.bytes").value, 64 << 20);
        assert_eq!(find("nvme.enabled").value, true);
        assert_eq!(find("limits.sessions").value, 1024);
    }
}
