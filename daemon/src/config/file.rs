//! The keys of the configuration file. Nothing is defaulted here: what the file does not say is
//! `None`.

use std::path::PathBuf;

use kvtide_tiers::catalog::{
    ArbiterConfig, CodecChoice, Limits, OwnerQuotas, PolicyChoice, PrefillConfig,
};
use kvtide_tiers::segment::SEGMENT_BYTES_RANGE;

use super::args::LogFormat;
use super::device::read_device;
use super::events::{EventSettings, read_events};
use super::quota::read_quotas;
use super::read::{Found, Reader, Section};
use super::worth::{WEIGHT_MAX, read_arbiter, read_prefill};
use super::{DeviceSettings, HostKeep, MetricsAddress, NvmeIo, ServiceLimits};

/// The smallest host tier.
pub(super) const HOST_BYTES_MIN: u64 = 4 << 20;

/// The smallest write budget of a day.
pub(super) const WRITE_BYTES_MIN: u64 = 1 << 30;

/// What any drive is rated for, and what none is.
const RATED_BYTES_MIN: u64 = 1 << 40;
const RATED_BYTES_MAX: u64 = 1 << 60;

/// The largest size of anything.
pub(super) const BYTES_MAX: u64 = 1 << 50;

/// What the file says.
#[derive(Default)]
pub(super) struct FileConfig {
    pub(super) socket: Option<Found<PathBuf>>,
    pub(super) drain_ms: Option<u64>,
    pub(super) copy_threads: Option<u64>,
    pub(super) host_bytes: Option<u64>,
    pub(super) slab_bytes: Option<u64>,
    pub(super) host_keep: Option<HostKeep>,
    pub(super) host_policy: PolicyChoice,
    pub(super) nvme_enabled: Option<bool>,
    pub(super) folder: Option<Found<PathBuf>>,
    pub(super) nvme_bytes: Option<Found<u64>>,
    pub(super) segment_bytes: Option<Found<u64>>,
    pub(super) block_bytes_min: Option<u64>,
    pub(super) queue_depth: Option<u64>,
    pub(super) writes: FileWrites,
    pub(super) io: Option<NvmeIo>,
    pub(super) device: DeviceSettings,
    pub(super) limits: ServiceLimits,
    pub(super) arbiter: ArbiterConfig,
    pub(super) prefill: PrefillConfig,
    pub(super) tenants: Vec<FileTenant>,
    pub(super) shared: Vec<FileShared>,
    pub(super) admins: Vec<u32>,
    pub(super) metrics: Option<MetricsAddress>,
    pub(super) events: Option<EventSettings>,
    pub(super) level: Option<tracing::Level>,
    pub(super) format: Option<LogFormat>,
}

/// What the file says of writes to the drive.
#[derive(Default)]
pub(super) struct FileWrites {
    pub(super) bytes_per_day: Option<Found<u64>>,
    pub(super) rated_bytes: Option<Found<u64>>,
    pub(super) life_years: Option<Found<u64>>,
}

pub(super) struct FileTenant {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) uids: Vec<u32>,
    pub(super) gids: Vec<u32>,
    pub(super) codec: CodecChoice,
    pub(super) weight: u32,
    pub(super) quotas: OwnerQuotas,
}

pub(super) struct FileShared {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) tenants: Vec<String>,
    pub(super) quotas: OwnerQuotas,
}

/// Reads all keys; problems are left in the reader.
pub(super) fn read_file(reader: &mut Reader<'_>) -> FileConfig {
    let mut file = FileConfig::default();
    let Some(table) = reader.parse() else { return file };
    let mut root = reader.root(&table);
    if let Some(section) = root.section(reader, "daemon") {
        read_daemon(reader, section, &mut file);
    }
    if let Some(section) = root.section(reader, "host") {
        read_host(reader, section, &mut file);
    }
    if let Some(section) = root.section(reader, "nvme") {
        read_nvme(reader, section, &mut file);
    }
    if let Some(section) = root.section(reader, "device") {
        file.device = read_device(reader, section);
    }
    if let Some(section) = root.section(reader, "limits") {
        read_limits(reader, section, &mut file.limits);
    }
    if let Some(section) = root.section(reader, "arbiter") {
        file.arbiter = read_arbiter(reader, section);
    }
    if let Some(section) = root.section(reader, "prefill") {
        file.prefill = read_prefill(reader, section);
    }
    for section in root.sections(reader, "tenant") {
        file.tenants.extend(read_tenant(reader, section));
    }
    for section in root.sections(reader, "shared") {
        file.shared.extend(read_shared(reader, section));
    }
    if let Some(mut section) = root.section(reader, "admin") {
        file.admins = section.ids(reader, "uids").map(|found| found.value).unwrap_or_default();
        if let Some(found) = section.text(reader, "metrics") {
            match parse_metrics(&found.value) {
                Ok(address) => file.metrics = Some(address),
                Err(allowed) => {
                    let what = format!("`admin.metrics` is \"{}\"", found.value);
                    reader.problem(found.line, what, allowed);
                }
            }
        }
        section.finish(reader);
    }
    if let Some(section) = root.section(reader, "events") {
        file.events = read_events(reader, section);
    }
    if let Some(mut section) = root.section(reader, "log") {
        let levels = [
            ("error", tracing::Level::ERROR),
            ("warn", tracing::Level::WARN),
            ("info", tracing::Level::INFO),
            ("debug", tracing::Level::DEBUG),
            ("trace", tracing::Level::TRACE),
        ];
        file.level = section.choice(reader, "level", &levels).map(|found| found.value);
        let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
        file.format = section.choice(reader, "format", &formats).map(|found| found.value);
        section.finish(reader);
    }
    root.finish(reader);
    file
}

fn read_daemon(reader: &mut Reader<'_>, mut section: Section<'_, '_>, file: &mut FileConfig) {
    file.socket = section.path(reader, "socket");
    file.drain_ms = section.number(reader, "drain_ms", 0..=3_600_000).map(|found| found.value);
    file.copy_threads = section.number(reader, "copy_threads", 1..=256).map(|found| found.value);
    section.finish(reader);
}

fn read_host(reader: &mut Reader<'_>, mut section: Section<'_, '_>, file: &mut FileConfig) {
    let bytes = section.bytes(reader, "bytes", HOST_BYTES_MIN..=BYTES_MAX);
    file.host_bytes = bytes.map(|found| found.value);
    if let Some(slab) = section.bytes(reader, "slab_bytes", (2 << 20)..=(1 << 30)) {
        if slab.value.is_multiple_of(2 << 20) {
            file.slab_bytes = Some(slab.value);
        } else {
            let what = format!("`host.slab_bytes` is {}", slab.value);
            reader.problem(slab.line, what, "a multiple of 2 MiB, up to 1 GiB, is allowed");
        }
    }
    let choices = [("auto", HostKeep::Auto), ("always", HostKeep::Always)];
    file.host_keep = section.choice(reader, "keep", &choices).map(|found| found.value);
    file.host_policy = read_policy(reader, &mut section);
    section.finish(reader);
}

/// The key `policy` of a tier in memory.
pub(super) fn read_policy(reader: &mut Reader<'_>, section: &mut Section<'_, '_>) -> PolicyChoice {
    let choices = PolicyChoice::ALL.map(|choice| (choice.name(), choice));
    section.choice(reader, "policy", &choices).map(|found| found.value).unwrap_or_default()
}

fn read_nvme(reader: &mut Reader<'_>, mut section: Section<'_, '_>, file: &mut FileConfig) {
    file.nvme_enabled = section.flag(reader, "enabled").map(|found| found.value);
    file.folder = section.path(reader, "folder");
    file.nvme_bytes = section.bytes(reader, "bytes", (1 << 20)..=BYTES_MAX);
    let (least, most) = SEGMENT_BYTES_RANGE.into_inner();
    file.segment_bytes = section.bytes(reader, "segment_bytes", u64::from(least)..=u64::from(most));
    let block = section.bytes(reader, "block_bytes_min", 4096..=(1 << 30));
    file.block_bytes_min = block.map(|found| found.value);
    file.queue_depth = section.number(reader, "queue_depth", 1..=1024).map(|found| found.value);
    file.writes = FileWrites {
        bytes_per_day: section.bytes(reader, "write_bytes_per_day", WRITE_BYTES_MIN..=BYTES_MAX),
        rated_bytes: section.bytes(reader, "rated_bytes", RATED_BYTES_MIN..=RATED_BYTES_MAX),
        life_years: section.number(reader, "life_years", 1..=30),
    };
    let choices =
        [("auto", NvmeIo::Auto), ("uring", NvmeIo::Uring), ("blocking", NvmeIo::Blocking)];
    file.io = section.choice(reader, "io", &choices).map(|found| found.value);
    section.finish(reader);
}

fn read_limits(reader: &mut Reader<'_>, mut section: Section<'_, '_>, out: &mut ServiceLimits) {
    let mut count = |key, range, place: &mut usize| {
        if let Some(found) = section.number(reader, key, range) {
            *place = usize::try_from(found.value).unwrap_or(usize::MAX);
        }
    };
    let Limits {
        sessions,
        regions_per_session,
        tickets_per_session,
        blocks_in_flight,
        leases_per_session,
        keys_per_call,
        pins,
        bad_keys,
        ..
    } = &mut out.catalog;
    count("sessions", 1..=65_536, sessions);
    count("regions_per_session", 1..=65_536, regions_per_session);
    count("tickets_per_session", 1..=65_536, tickets_per_session);
    count("blocks_in_flight", 1..=16_777_216, blocks_in_flight);
    count("leases_per_session", 1..=1_048_576, leases_per_session);
    // A store of this many keys still fits in one frame.
    count("keys_per_call", 1..=32_768, keys_per_call);
    count("pins", 1..=1_048_576, pins);
    count("bad_keys", 1..=16_777_216, bad_keys);
    let mut small = |key, range, place: &mut u32| {
        if let Some(found) = section.number(reader, key, range) {
            *place = u32::try_from(found.value).unwrap_or(u32::MAX);
        }
    };
    small("lease_ms_max", 1..=86_400_000, &mut out.catalog.lease_ms_max);
    small("pinned_percent", 1..=100, &mut out.catalog.pinned_percent);
    small("calls_in_flight", 1..=65_536, &mut out.calls_in_flight);
    small("descriptors_waiting", 1..=1024, &mut out.descriptors_waiting);
    small("namespaces_per_session", 1..=65_536, &mut out.namespaces_per_session);
    small("namespaces_per_tenant", 1..=65_536, &mut out.namespaces_per_tenant);
    if let Some(found) = section.number(reader, "pin_ms_max", 1..=31_536_000_000) {
        out.catalog.pin_ms_max = found.value;
    }
    if let Some(found) = section.number(reader, "retain_ms_max", 0..=31_536_000_000) {
        out.catalog.retain_ms_max = found.value;
    }
    if let Some(found) = section.bytes(reader, "region_bytes_per_session", 4096..=BYTES_MAX) {
        out.region_bytes_per_session = found.value;
    }
    if let Some(found) = section.number(reader, "ticket_ms", 10..=3_600_000) {
        out.catalog.ticket_ms = found.value;
    }
    section.finish(reader);
}

fn read_tenant(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> Option<FileTenant> {
    let line = section.line;
    let name = read_name(reader, &mut section);
    let uids = section.ids(reader, "uids").map(|found| found.value).unwrap_or_default();
    let gids = section.ids(reader, "gids").map(|found| found.value).unwrap_or_default();
    let codecs = [CodecChoice::Raw, CodecChoice::Lz4, CodecChoice::Auto];
    let codecs = codecs.map(|choice| (choice.name(), choice));
    let codec = section.choice(reader, "codec", &codecs).map(|found| found.value);
    let weight = section.number(reader, "weight", 1..=WEIGHT_MAX);
    let weight = weight.and_then(|found| u32::try_from(found.value).ok()).unwrap_or(1);
    let quotas = read_quotas(reader, &mut section);
    section.finish(reader);
    let name = name?;
    if uids.is_empty() && gids.is_empty() {
        let what = format!("tenant \"{name}\" has no users");
        reader.problem(line, what, "give it `uids` or `gids`");
    }
    let codec = codec.unwrap_or_default();
    Some(FileTenant { line, name, uids, gids, codec, weight, quotas })
}

fn read_shared(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> Option<FileShared> {
    let line = section.line;
    let name = read_name(reader, &mut section);
    let tenants = section.texts(reader, "tenants").map(|found| found.value).unwrap_or_default();
    let quotas = read_quotas(reader, &mut section);
    section.finish(reader);
    let name = name?;
    if tenants.is_empty() {
        let what = format!("shared namespace \"{name}\" has no tenants");
        reader.problem(line, what, "name the tenants that may open it in `tenants`");
    }
    Some(FileShared { line, name, tenants, quotas })
}

fn read_name(reader: &mut Reader<'_>, section: &mut Section<'_, '_>) -> Option<String> {
    const ALLOWED: &str = "1 to 64 letters, digits, `-`, `_` and `.` are allowed";
    let line = section.line;
    let Some(found) = section.text(reader, "name") else {
        reader.problem(line, "`name` is missing", ALLOWED);
        return None;
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if found.value.is_empty() || found.value.len() > 64 || !found.value.chars().all(plain) {
        reader.problem(found.line, format!("the name is \"{}\"", found.value), ALLOWED);
        return None;
    }
    Some(found.value)
}

/// Where metrics are to be served.
///
/// # Errors
/// What is allowed.
pub(super) fn parse_metrics(text: &str) -> Result<MetricsAddress, String> {
    const ALLOWED: &str = "\"off\", a loopback address with port like \"127.0.0.1:9464\", and \
                           \"unix:/path\" are allowed";
    if text == "off" {
        return Ok(MetricsAddress::Off);
    }
    if let Some(path) = text.strip_prefix("unix:") {
        return match path.is_empty() || path.len() > super::build::SOCKET_BYTES_MAX {
            true => Err(ALLOWED.to_owned()),
            false => Ok(MetricsAddress::Unix(PathBuf::from(path))),
        };
    }
    let address: std::net::SocketAddr = text.parse().map_err(|_| ALLOWED.to_owned())?;
    if !address.ip().is_loopback() {
        return Err(format!("{ALLOWED}; put a proxy in front to serve other hosts"));
    }
    Ok(MetricsAddress::Tcp { address, configured: true })
}
