//! Puts file, command line and machine together, and checks what belongs together.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvtide_tiers::catalog::{CodecChoice, OwnerQuotas, PolicyChoice, PrefillConfig, TenantId};
use kvtide_tiers::segment::{BLOCK_BYTES_MIN_DEFAULT, SEGMENT_BYTES_RANGE, StoreGeometry};

use super::device::{DeviceSettings, POOL_BYTES_ALLOWED, pool_bytes_allowed};
use super::file::{
    BYTES_MAX, FileConfig, FileWrites, HOST_BYTES_MIN, WRITE_BYTES_MIN, parse_metrics, read_file,
};
use super::machine;
use super::read::{ConfigError, Found, Problem, Reader, bytes_allowed, show_bytes};
use super::tenants::{DEFAULT_TENANT, SharedSpace, Tenant, Tenants};
use super::{
    Args, Config, FaultSettings, HostKeep, HostSettings, LogSettings, MetricsAddress, NvmeSettings,
};

/// Longest path of a unix socket: `sun_path` has 108 bytes, the last one is 0.
pub(super) const SOCKET_BYTES_MAX: usize = 107;

const METRICS_PORT: u16 = 9464;
const NVME_BYTES_DEFAULT_MAX: u64 = 1 << 40;
const QUEUE_DEPTH_DEFAULT: u32 = 32;

pub(super) fn load(args: &Args) -> Result<Config, ConfigError> {
    let (text, path) = match &args.config {
        None => (String::new(), PathBuf::new()),
        Some(path) => (read_text(path)?, path.clone()),
    };
    let mut reader = Reader::new(&path, &text);
    let file = read_file(&mut reader);
    let mut build = Build { args, reader, notes: Vec::new() };
    let config = build.config(file);
    let mut problems = build.reader.problems;
    if problems.is_empty() {
        return Ok(config);
    }
    problems.sort_by_key(|problem| problem.line);
    Err(ConfigError { problems })
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| {
        let what = format!("cannot read the configuration: {error}");
        let allowed = "name a readable TOML file, or leave --config out".to_owned();
        let source = path.display().to_string();
        ConfigError { problems: vec![Problem { source, line: 0, what, allowed }] }
    })
}

/// Checks a socket's path.
///
/// # Errors
/// What is wrong, and what is allowed.
pub fn check_socket(path: &Path) -> Result<(), (String, String)> {
    let bytes = path.as_os_str().as_bytes().len();
    if bytes > SOCKET_BYTES_MAX {
        let what = format!("the socket's path has {bytes} bytes");
        let allowed = format!("at most {SOCKET_BYTES_MAX} are allowed; choose a shorter folder");
        return Err((what, allowed));
    }
    Ok(())
}

struct Build<'a> {
    args: &'a Args,
    reader: Reader<'a>,
    notes: Vec<String>,
}

impl Build<'_> {
    fn config(&mut self, file: FileConfig) -> Config {
        let socket = self.socket(file.socket);
        let (store, store_line) = self.store(file.folder);
        let host = self.host(file.host_bytes, file.slab_bytes, file.host_keep);
        let host = HostSettings { policy: file.host_policy, ..host };
        let off = file.nvme_enabled == Some(false) && self.args.nvme_bytes.is_none();
        let nvme = match off || self.args.nvme_bytes == Some(0) {
            true => None,
            false => self.nvme(
                &store,
                file.nvme_bytes,
                file.segment_bytes,
                file.block_bytes_min,
                file.queue_depth,
            ),
        };
        let io = file.io.unwrap_or_default();
        let (write_bytes_per_day, rated_bytes) = self.writes(file.writes);
        let nvme = nvme.map(|nvme| NvmeSettings { io, write_bytes_per_day, rated_bytes, ..nvme });
        self.writable(&store, store_line);
        let metrics = self.metrics(file.metrics);
        let weights = (0..).zip(&file.tenants).map(|(id, tenant)| (TenantId(id), tenant.weight));
        let weights = weights.collect();
        let tenants = self.tenants(file.tenants, file.shared, file.admins);
        let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get());
        Config {
            socket,
            store,
            drain: Duration::from_millis(file.drain_ms.unwrap_or(10_000)),
            copy_threads: file
                .copy_threads
                .and_then(|threads| usize::try_from(threads).ok())
                .unwrap_or((cores / 2).clamp(1, 8)),
            host,
            nvme,
            device: self.device(file.device),
            limits: file.limits,
            arbiter: file.arbiter,
            prefill: PrefillConfig { weights, ..file.prefill },
            tenants,
            metrics,
            events: file.events,
            log: LogSettings {
                level: self.args.log_level.or(file.level).unwrap_or(tracing::Level::INFO),
                format: self.args.log_format.or(file.format).unwrap_or_default(),
            },
            read_delay_file: self.args.fault_read_delay.clone(),
            notes: std::mem::take(&mut self.notes),
        }
    }

    /// A problem of the command line.
    fn option(&mut self, option: &str, what: String, allowed: impl Into<String>) {
        let (source, allowed) = (option.to_owned(), allowed.into());
        self.reader.problems.push(Problem { source, line: 0, what, allowed });
    }

    fn socket(&mut self, file: Option<Found<PathBuf>>) -> PathBuf {
        let line = file.as_ref().map_or(0, |found| found.line);
        let from_file = file.map(|found| found.value);
        let path = match (&self.args.socket, from_file) {
            (Some(path), _) => path.clone(),
            (None, Some(path)) => path,
            (None, None) => kvtide_client::runtime_folder().join("kvtide.sock"),
        };
        if let Err((what, allowed)) = check_socket(&path) {
            match line > 0 && self.args.socket.is_none() {
                true => self.reader.problem(line, what, allowed),
                false => self.option("--socket", what, allowed),
            }
        }
        path
    }

    fn store(&mut self, file: Option<Found<PathBuf>>) -> (PathBuf, usize) {
        if let Some(path) = &self.args.store {
            return (path.clone(), 0);
        }
        match file {
            Some(found) => (found.value, found.line),
            None => (default_store(), 0),
        }
    }

    fn host(
        &mut self,
        file: Option<u64>,
        slab: Option<u64>,
        keep: Option<HostKeep>,
    ) -> HostSettings {
        let range = HOST_BYTES_MIN..=BYTES_MAX;
        if let Some(bytes) = self.args.host_bytes
            && !range.contains(&bytes)
        {
            self.option("--host-bytes", format!("the size is {bytes}"), bytes_allowed(&range));
        }
        let chosen = self.args.host_bytes.or(file);
        let bytes = chosen.unwrap_or_else(|| {
            let (available, source) = machine::memory_available();
            let bytes = ((available / 4) >> 20 << 20).clamp(64 << 20, BYTES_MAX);
            let (size, all) = (show_bytes(bytes), show_bytes(available));
            self.notes.push(format!("host tier: {size}, a quarter of {all} ({source})"));
            bytes
        });
        if let Some(slab) = slab.filter(|slab| *slab > bytes) {
            let what = format!("slabs of {} in {}", show_bytes(slab), show_bytes(bytes));
            self.option("host", what, "at least one slab has to fit into `host.bytes`");
        }
        HostSettings {
            bytes,
            bytes_chosen: chosen.is_some(),
            slab_bytes: slab.and_then(|slab| u32::try_from(slab).ok()),
            keep: keep.unwrap_or_default(),
            policy: PolicyChoice::default(),
        }
    }

    fn nvme(
        &mut self,
        store: &Path,
        bytes: Option<Found<u64>>,
        segment: Option<Found<u64>>,
        block: Option<u64>,
        depth: Option<u64>,
    ) -> Option<NvmeSettings> {
        let line = bytes.as_ref().or(segment.as_ref()).map_or(0, |found| found.line);
        let from_file = bytes.map(|found| found.value);
        let bytes = match self.args.nvme_bytes.or(from_file) {
            Some(bytes) => bytes,
            None => self.nvme_default(store)?,
        };
        let segment = self.args.segment_bytes.or(segment.map(|found| found.value));
        let block = self.args.block_bytes_min.or(block).unwrap_or(BLOCK_BYTES_MIN_DEFAULT.into());
        let block = u32::try_from(block).unwrap_or(u32::MAX);
        let chosen = segment.unwrap_or_else(|| StoreGeometry::segment_bytes_for(bytes).into());
        let chosen = u32::try_from(chosen).unwrap_or(u32::MAX);
        if !SEGMENT_BYTES_RANGE.contains(&chosen) || !chosen.is_multiple_of(1 << 20) {
            let what = format!("the segment size is {chosen} bytes");
            self.problem_at(line, "--segment-bytes", what, "whole MiB, 1MiB to 1GiB, are allowed");
        } else if StoreGeometry::fit(bytes, chosen, block).is_none() {
            let least = 4 * u64::from(chosen) + (1 << 20);
            let what = format!("the nvme tier has {}", show_bytes(bytes));
            let allowed = format!(
                "at least {} (four segments of {} and 1 MiB) is allowed, or 0 on the command line \
                 for none",
                show_bytes(least),
                show_bytes(chosen.into())
            );
            self.problem_at(line, "--nvme-bytes", what, allowed);
        }
        let (rate, delay_ms) = (self.args.fault_rate, self.args.fault_delay_ms);
        let fault = (rate.is_some() || delay_ms.is_some()).then(|| FaultSettings {
            rate: rate.unwrap_or(0.0).clamp(0.0, 1.0),
            delay_ms,
            seed: self.args.fault_seed,
        });
        let queue_depth = depth.and_then(|depth| u32::try_from(depth).ok());
        Some(NvmeSettings {
            bytes,
            segment_bytes: segment.is_some().then_some(chosen),
            block_bytes_min: block,
            queue_depth: queue_depth.unwrap_or(QUEUE_DEPTH_DEFAULT),
            write_bytes_per_day: None,
            rated_bytes: None,
            io: super::NvmeIo::Auto,
            fault,
        })
    }

    /// The budget of a day and the drive's rating, each if there is one.
    fn writes(&mut self, file: FileWrites) -> (Option<u64>, Option<u64>) {
        let rated = file.rated_bytes.map(|found| found.value);
        let budget = match (file.bytes_per_day, file.life_years, rated) {
            (budget, None, _) => budget.map(|found| found.value),
            (Some(_), Some(years), _) => {
                let what = "both `nvme.write_bytes_per_day` and `nvme.life_years` are there";
                self.reader.problem(years.line, what, "each gives a budget of writes; keep one");
                None
            }
            (None, Some(years), None) => {
                let what = "`nvme.life_years` without `nvme.rated_bytes`";
                self.reader.problem(years.line, what, "say what the drive is rated for as well");
                None
            }
            (None, Some(years), Some(rated)) => {
                let budget = rated / (years.value * 365).max(1);
                if budget < WRITE_BYTES_MIN {
                    let what = format!("{} in {} years", show_bytes(rated), years.value);
                    let least = "so many years that at least 1 GiB a day is left, are allowed";
                    self.reader.problem(years.line, what, least);
                }
                let (day, all, years) = (show_bytes(budget), show_bytes(rated), years.value);
                self.notes.push(format!(
                    "nvme writes: {day} a day, so that a drive rated for {all} lasts {years} years"
                ));
                Some(budget)
            }
        };
        (budget, rated)
    }

    fn device(&mut self, mut device: DeviceSettings) -> DeviceSettings {
        if let Some(bytes) = self.args.device_pool_bytes {
            if !pool_bytes_allowed(bytes) {
                let what = format!("the size is {}", show_bytes(bytes));
                self.option("--device-pool-bytes", what, POOL_BYTES_ALLOWED);
            }
            device.pool_bytes = bytes;
        }
        if let Some(library) = &self.args.device_library {
            device.library = Some(library.clone());
        }
        device
    }

    fn problem_at(&mut self, line: usize, option: &str, what: String, allowed: impl Into<String>) {
        match line > 0 {
            true => self.reader.problem(line, what, allowed),
            false => self.option(option, what, allowed),
        }
    }

    /// A store that exists keeps its size; a new one gets a part of what is free.
    fn nvme_default(&mut self, store: &Path) -> Option<u64> {
        let file = store.join(kvtide_tiers::folder::STORE_FILE_NAME);
        if let Ok(meta) = std::fs::metadata(&file)
            && meta.len() > 0
        {
            let size = show_bytes(meta.len());
            self.notes.push(format!("nvme tier: {size}, as the store at {} has", store.display()));
            return Some(meta.len());
        }
        let free = machine::space_free(store).unwrap_or(0);
        let bytes = ((free / 4) >> 20 << 20).min(NVME_BYTES_DEFAULT_MAX);
        if bytes < 64 << 20 {
            let free = show_bytes(free);
            self.notes.push(format!(
                "nvme tier: off, because only {free} are free at {}",
                store.display()
            ));
            return None;
        }
        let (size, free) = (show_bytes(bytes), show_bytes(free));
        let store = store.display();
        self.notes.push(format!("nvme tier: {size}, a quarter of {free} free at {store}"));
        Some(bytes)
    }

    /// Whether the store folder can be written, or made in the nearest folder that exists.
    fn writable(&mut self, store: &Path, line: usize) {
        let exists =
            store.ancestors().find(|folder| folder.as_os_str().is_empty() || folder.exists());
        let folder = exists.filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
        let refused = if folder.is_dir() {
            rustix::fs::access(folder, access).err().map(|error| error.to_string())
        } else {
            Some("not a folder".to_owned())
        };
        if let Some(refused) = refused {
            let what = format!(
                "the store folder {} cannot be written ({}: {refused})",
                store.display(),
                folder.display()
            );
            let allowed = "give it to the user that the daemon runs as, or name another folder";
            self.problem_at(line, "--store", what, allowed);
        }
    }

    fn metrics(&mut self, file: Option<MetricsAddress>) -> MetricsAddress {
        let default = SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT));
        let default = MetricsAddress::Tcp { address: default, configured: false };
        let Some(text) = &self.args.metrics else { return file.unwrap_or(default) };
        parse_metrics(text).unwrap_or_else(|allowed| {
            self.option("--metrics", format!("the address is \"{text}\""), allowed);
            default
        })
    }

    fn tenants(
        &mut self,
        tenants: Vec<super::file::FileTenant>,
        shared: Vec<super::file::FileShared>,
        admins: Vec<u32>,
    ) -> Tenants {
        let own_uid = rustix::process::geteuid().as_raw();
        let configured = !tenants.is_empty();
        let mut names: HashMap<String, usize> = HashMap::new();
        let mut uids: HashMap<(char, u32), String> = HashMap::new();
        let mut list = Vec::new();
        for (tenant, id) in tenants.into_iter().zip(0..) {
            if let Some(first) = names.insert(tenant.name.clone(), tenant.line) {
                let what = format!("tenant \"{}\" is there twice", tenant.name);
                let allowed = format!("the first one is in line {first}; give each its own name");
                self.reader.problem(tenant.line, what, allowed);
            }
            let users = tenant.uids.iter().map(|uid| ('u', *uid));
            for user in users.chain(tenant.gids.iter().map(|gid| ('g', *gid))) {
                if let Some(other) = uids.insert(user, tenant.name.clone()) {
                    let (kind, id) = user;
                    let what = format!("{kind}id {id} is in tenant \"{}\" as well", tenant.name);
                    let allowed = format!("it belongs to \"{other}\" already; each may be in one");
                    self.reader.problem(tenant.line, what, allowed);
                }
            }
            let (uids, gids) = (tenant.uids, tenant.gids);
            let (name, codec, quotas) = (tenant.name, tenant.codec, tenant.quotas);
            list.push(Tenant { id: TenantId(id), name, uids, gids, codec, quotas });
        }
        if !configured {
            let (uids, gids) = (vec![0, own_uid], Vec::new());
            let name = DEFAULT_TENANT.to_owned();
            let (codec, quotas) = (CodecChoice::Raw, OwnerQuotas::default());
            list.push(Tenant { id: TenantId(0), name, uids, gids, codec, quotas });
        }
        let mut spaces: Vec<SharedSpace> = Vec::new();
        for (space, id) in shared.into_iter().zip(u32::try_from(list.len()).unwrap_or(0)..) {
            for name in &space.tenants {
                if !list.iter().any(|tenant| tenant.name == *name) {
                    let what = format!("shared \"{}\" names tenant \"{name}\"", space.name);
                    let known: Vec<&str> = list.iter().map(|each| each.name.as_str()).collect();
                    let allowed = format!("the tenants are {}", known.join(", "));
                    self.reader.problem(space.line, what, allowed);
                }
            }
            if spaces.iter().any(|each| each.name == space.name) {
                let what = format!("shared \"{}\" is there twice", space.name);
                self.reader.problem(space.line, what, "give each its own name");
            }
            let (name, tenants, quotas) = (space.name, space.tenants, space.quotas);
            spaces.push(SharedSpace { id: TenantId(id), name, tenants, quotas });
        }
        Tenants { list, shared: spaces, admins, own_uid, configured }
    }
}

/// `/var/lib/kvtide` for root, else `kvtide` under `XDG_STATE_HOME` or `~/.local/state`.
fn default_store() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/kvtide");
    }
    let state = variable("XDG_STATE_HOME").map(PathBuf::from);
    let home = || variable("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    state.or_else(home).map_or_else(|| PathBuf::from("/var/lib/kvtide"), |dir| dir.join("kvtide"))
}

#[cfg(test)]
mod tests;
