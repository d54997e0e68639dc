//! Wires the daemon together: store folder, node, sessions, counters. Owns no logic of its own
//! beyond who may see which namespace.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kvtide_client::protocol::{CallError, NamespaceRow, NamespaceSpec, OpenedNamespace, OwnerRow};
use kvtide_tiers::block::{NamespaceId, NamespaceKey, NarrowShape};
use kvtide_tiers::catalog::{
    CatalogStats, CodecChoice, Limits, NamespaceInfo, OwnerUse, Reply, Request, SessionId, TenantId,
};
use kvtide_tiers::folder::{FolderError, NamespaceEntry, StoreFolder};
use kvtide_tiers::io::fault::FaultConfig;
use kvtide_tiers::io::{ArenaFiles, RingChoice, RingKind};
use kvtide_tiers::movement::{
    HostConfig, Node, NodeConfig, NodeHandle, NodeReport, NvmeConfig, RetireNamespace, StartError,
};
use tokio::sync::oneshot;

use crate::config::{
    Caller, Config, FaultSettings, HostKeep, NvmeIo, ServiceLimits, Tenants, show_bytes,
};
use crate::counters::ServiceCounters;
use crate::devices;
use crate::digest::Digests;
use crate::events::{self, EventCounters};
use crate::kept;
use crate::session::{Session, TenantCounters};

/// Owners that the configuration no longer names have numbers from here on.
const TENANTS_UNKNOWN: u32 = 1 << 31;

/// The session under which the daemon itself asks.
const OWN_TENANT: TenantId = TenantId(u32::MAX);

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppError {
    /// The store folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A tier cannot be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The socket cannot be used.
    #[error("cannot listen on {}: {what}", socket.display())]
    Socket {
        /// The socket.
        socket: PathBuf,
        /// Why, and what to do.
        what: String,
    },
    /// Something else of the operating system.
    #[error("cannot start: {0}")]
    Io(#[from] std::io::Error),
}

/// The running daemon, as all of its tasks see it.
pub struct App {
    /// What it was told at start.
    pub config: Config,
    /// Limits that can change while it runs.
    pub limits: RwLock<ServiceLimits>,
    /// How long a drain may take; can change.
    pub drain: Mutex<Duration>,
    /// Counters of connections and calls.
    pub counters: ServiceCounters,
    /// When it started.
    pub started: Instant,
    /// Facts stated at start.
    pub notes: Vec<String>,
    /// Whether a drain is under way or done.
    pub draining: AtomicBool,
    /// What routers were told.
    pub events: Arc<EventCounters>,
    /// What was summed up for routers lately.
    pub digests: Digests,
    /// Held while a namespace is opened, so that limits are kept by those who open at once.
    pub opening: Arc<tokio::sync::Mutex<()>>,
    folder: Arc<StoreFolder>,
    // What the folder's table has, so that nobody waits for its disk to look something up.
    namespaces: RwLock<BTreeMap<NamespaceId, NamespaceEntry>>,
    node: NodeHandle,
    own_session: SessionId,
    sessions: Mutex<HashMap<SessionId, Arc<Session>>>,
    tenant_counters: Vec<(TenantId, Arc<TenantCounters>)>,
}

impl App {
    /// Opens the store and starts the node.
    ///
    /// # Errors
    /// A store that is in use, damaged, newer, or cannot be written; no memory.
    pub fn start(mut config: Config) -> Result<(Arc<App>, Node), AppError> {
        let folder = Arc::new(StoreFolder::open(&config.store)?);
        let taken = kept::take();
        let found = taken.files.as_ref().and_then(|files| files.arena_bytes());
        if let Some(bytes) = found.filter(|_| !config.host.bytes_chosen) {
            // Memory that is kept is no longer available, so the default would have shrunk.
            config.host.bytes = bytes;
        }
        let mut node_config = node_config(&config, &folder, taken.files.clone());
        let events = Arc::default();
        let (follow, changes) = events::queue(&events);
        node_config.follow = config.events.is_some().then_some(follow);
        let node = Node::start(node_config, |id| folder.generation(id))?;
        kept::keep(&node, &taken);
        let handle = node.handle();
        let mut notes = config.notes.clone();
        notes.extend(start_notes(&handle.report()));
        notes.extend(kept::note(&handle.report()));
        notes.extend(devices::start_notes(&config.device, &handle.report()));
        let own_session = handle
            .open_session(OWN_TENANT, Arc::new(|_, _| {}))
            .map_err(|_| std::io::Error::other("the catalog refuses its first session"))?;
        let tenants = &config.tenants;
        let ids = tenants.list.iter().map(|tenant| tenant.id);
        let tenant_counters = ids.map(|id| (id, Arc::default())).collect();
        let app = App {
            limits: RwLock::new(config.limits.clone()),
            drain: Mutex::new(config.drain),
            counters: ServiceCounters::default(),
            started: Instant::now(),
            notes,
            draining: AtomicBool::new(false),
            events,
            digests: Digests::default(),
            opening: Arc::default(),
            folder,
            namespaces: RwLock::default(),
            node: handle,
            own_session,
            sessions: Mutex::default(),
            tenant_counters,
            config,
        };
        for entry in app.folder.entries() {
            app.learn(entry);
        }
        let app = Arc::new(app);
        if let Some(settings) = &app.config.events
            && let Err(error) = events::start(&app, settings, &app.events, changes)
        {
            let address = settings.address;
            tracing::warn!(
                %address, %error,
                "events are not published; set `events.endpoint` to a free address of this machine"
            );
        }
        Ok((app, node))
    }

    /// Who is who.
    pub fn tenants(&self) -> &Tenants {
        &self.config.tenants
    }

    /// The node.
    pub fn node(&self) -> &NodeHandle {
        &self.node
    }

    /// The limits in force now.
    pub fn limits(&self) -> ServiceLimits {
        self.limits.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The sessions that are connected.
    pub fn sessions(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counters of a tenant; those of an operator without tenant are counted nowhere.
    pub fn tenant_counters(&self, id: Option<TenantId>) -> Arc<TenantCounters> {
        let found = self.tenant_counters.iter().find(|(each, _)| Some(*each) == id);
        found.map(|(_, counters)| Arc::clone(counters)).unwrap_or_default()
    }

    /// Asks the catalog as a session.
    ///
    /// # Errors
    /// When the node is stopping.
    pub async fn ask(&self, session: SessionId, request: Request) -> Result<Reply, CallError> {
        let (answer, answered) = oneshot::channel();
        self.node.ask(session, request, move |reply| {
            // The caller may have gone away meanwhile.
            let _ = answer.send(reply);
        });
        answered.await.map_err(|_| CallError::Internal("the daemon is stopping".to_owned()))
    }

    /// Asks the catalog as the daemon itself.
    ///
    /// # Errors
    /// When the node is stopping.
    pub async fn ask_self(&self, request: Request) -> Result<Reply, CallError> {
        self.ask(self.own_session, request).await
    }

    /// The catalog's counters; `None` when its inbox is full or it is stopping.
    pub async fn stats(&self) -> Option<Box<CatalogStats>> {
        match self.ask_self(Request::Stats).await {
            Ok(Reply::Stats(mut stats)) => {
                // The daemon's own session is none of a client's.
                stats.sessions = stats.sessions.saturating_sub(1);
                Some(stats)
            }
            _ => None,
        }
    }

    /// Opens a namespace for a session. Blocks on the disk when it is a new one; what is refused
    /// leaves nothing there. Called by one at a time, see [`App::opening`].
    ///
    /// # Errors
    /// A namespace that the caller may not open, or that is not valid, or a limit that is reached.
    pub fn open_namespace(
        &self,
        session: &Session,
        spec: &NamespaceSpec,
    ) -> Result<OpenedNamespace, CallError> {
        let owner = self.owner(&session.caller, spec)?;
        let limits = self.limits();
        let known = self.check_namespaces(&owner, spec, limits.namespaces_per_tenant)?;
        session.check_room(known, limits.namespaces_per_session).map_err(|max| {
            CallError::Invalid(format!(
                "this session has {max} namespaces open, which is all that \
                 `limits.namespaces_per_session` allows"
            ))
        })?;
        let entry = self.folder.namespace(&owner, &spec.namespace).map_err(folder_error)?;
        let secret = self.folder.tenant_secret(&owner).map_err(folder_error)?;
        let id = entry.id;
        self.learn(entry);
        session.open(id);
        Ok(OpenedNamespace { id, key: NamespaceKey::derive(&secret, &spec.namespace) })
    }

    /// The number of a namespace that is there; `None` for a new one, for which there is room.
    fn check_namespaces(
        &self,
        owner: &str,
        spec: &NamespaceSpec,
        max: u32,
    ) -> Result<Option<NamespaceId>, CallError> {
        let namespaces = self.namespaces();
        let owned = || namespaces.values().filter(|entry| entry.tenant == owner);
        let known = owned().find(|entry| entry.namespace == spec.namespace).map(|entry| entry.id);
        if known.is_none() && owned().count() >= usize::try_from(max).unwrap_or(usize::MAX) {
            let text = format!(
                "\"{owner}\" has {max} namespaces, which is all that \
                 `limits.namespaces_per_tenant` allows; open one of them, or raise the limit"
            );
            return Err(CallError::Invalid(text));
        }
        Ok(known)
    }

    fn namespaces(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<NamespaceId, NamespaceEntry>> {
        self.namespaces.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn owner(&self, caller: &Caller, spec: &NamespaceSpec) -> Result<String, CallError> {
        let Some(tenant) = &caller.tenant else {
            let uid = caller.uid;
            let text = format!(
                "user {uid} is an operator and belongs to no tenant; add {uid} to `uids` of a \
                 [[tenant]] to open namespaces"
            );
            return Err(CallError::NotAllowed(text));
        };
        let Some(name) = &spec.shared else { return Ok(tenant.name.clone()) };
        match self.tenants().shared_of(&tenant.name).find(|space| space.name == *name) {
            Some(space) => Ok(space.owner()),
            None => {
                let text = format!(
                    "no [[shared]] namespace \"{name}\" names tenant \"{}\"; the operator has to \
                     declare it in the daemon's configuration",
                    tenant.name
                );
                Err(CallError::NotAllowed(text))
            }
        }
    }

    /// Makes all blocks of a namespace dead, durably, and tells the node. Blocks on the disk.
    ///
    /// # Errors
    /// No such namespace, or the table could not be written.
    pub fn retire_namespace(&self, id: NamespaceId) -> Result<(), CallError> {
        let generation = self.folder.bump_generation(id).map_err(folder_error)?;
        let entry = self.namespaces().get(&id).cloned();
        if let Some(entry) = entry {
            self.learn(NamespaceEntry { generation, ..entry });
        }
        Ok(())
    }

    /// The namespaces that a caller may see.
    pub fn visible(&self, caller: &Caller) -> Vec<NamespaceRow> {
        let namespaces = self.namespaces();
        let seen = namespaces.values().filter(|entry| self.may_see(caller, &entry.tenant));
        seen.cloned().map(row).collect()
    }

    /// A namespace by its number.
    pub fn namespace_row(&self, id: NamespaceId) -> Option<NamespaceRow> {
        self.namespaces().get(&id).cloned().map(row)
    }

    /// Who owns a namespace, if the caller may see it.
    pub fn owner_seen(&self, caller: &Caller, id: NamespaceId) -> Option<String> {
        let namespaces = self.namespaces();
        let owner = &namespaces.get(&id)?.tenant;
        self.may_see(caller, owner).then(|| owner.clone())
    }

    /// The owners among these that a caller may see, by name; all of them without a caller.
    pub fn owners(&self, caller: Option<&Caller>, held: &[OwnerUse]) -> Vec<OwnerRow> {
        let named = held.iter().filter_map(|held| {
            let owner = self.tenants().owner_name(held.owner)?;
            let seen = caller.is_none_or(|caller| self.may_see(caller, &owner));
            seen.then(|| OwnerRow { owner, held: held.clone() })
        });
        named.collect()
    }

    fn may_see(&self, caller: &Caller, owner: &str) -> bool {
        let own = caller.tenant.as_ref().is_some_and(|tenant| {
            tenant.name == owner
                || self.tenants().shared_of(&tenant.name).any(|space| space.owner() == owner)
        });
        caller.operator || own
    }

    /// Takes an entry of the folder's table over, and tells the node.
    fn learn(&self, entry: NamespaceEntry) {
        self.node.add_namespace(namespace_info(self.tenants(), &entry));
        let mut namespaces = self.namespaces.write().unwrap_or_else(PoisonError::into_inner);
        namespaces.insert(entry.id, entry);
    }

    /// Why there is no device tier, in one line.
    pub fn device_off(&self) -> Option<String> {
        devices::off(&self.config.device, &self.node.report())
    }

    /// Marks the drain as under way.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }
}

fn namespace_info(tenants: &Tenants, entry: &NamespaceEntry) -> NamespaceInfo {
    // Blocks of an owner that is no longer configured stay, in case it comes back.
    let unknown = (TenantId(TENANTS_UNKNOWN.saturating_add(entry.id.0)), CodecChoice::Raw);
    let (tenant, codec) = tenants.owner(&entry.tenant).unwrap_or(unknown);
    NamespaceInfo {
        id: entry.id,
        generation: entry.generation,
        tenant,
        codec,
        element: entry.namespace.layout.element,
        narrow: NarrowShape::of(&entry.namespace.layout),
    }
}

fn row(entry: NamespaceEntry) -> NamespaceRow {
    NamespaceRow {
        id: entry.id,
        tenant: entry.tenant,
        namespace: entry.namespace,
        generation: entry.generation,
        fingerprint: entry.fingerprint,
    }
}

fn folder_error(error: FolderError) -> CallError {
    match error {
        FolderError::Namespace(error) => CallError::Invalid(error.to_string()),
        FolderError::Unknown(_) => CallError::NotFound(error.to_string()),
        other => {
            tracing::error!(error = %other, "the store folder failed");
            CallError::Internal(other.to_string())
        }
    }
}

fn node_config(
    config: &Config,
    folder: &Arc<StoreFolder>,
    handed_over: Option<Arc<ArenaFiles>>,
) -> NodeConfig {
    let nvme = config.nvme.map(|nvme| NvmeConfig {
        segment_bytes: nvme.segment_bytes,
        block_bytes_min: nvme.block_bytes_min,
        queue_depth: nvme.queue_depth,
        write_bytes_per_day: nvme.write_bytes_per_day,
        ring: match nvme.io {
            NvmeIo::Auto => RingChoice::Auto,
            NvmeIo::Uring => RingChoice::Uring,
            NvmeIo::Blocking => RingChoice::Blocking,
        },
        fault: fault_config(nvme.fault, config.read_delay_file.clone()),
        ..NvmeConfig::new(folder.store_file(), nvme.bytes)
    });
    // One session is the daemon's own.
    let sessions = config.limits.catalog.sessions.saturating_add(1);
    NodeConfig {
        host: HostConfig {
            slab_bytes: config.host.slab_bytes,
            always_shared: config.host.keep == HostKeep::Always,
            handed_over,
            policy: config.host.policy,
            ..HostConfig::new(config.host.bytes)
        },
        device_policy: config.device.policy,
        nvme,
        devices: devices::node_devices(&config.device),
        copy_threads: config.copy_threads,
        quotas: config.tenants.quotas(),
        limits: Limits { sessions, ..config.limits.catalog },
        arbiter: config.arbiter,
        prefill: config.prefill.clone(),
        retire: Some(retire_in(folder)),
        ..NodeConfig::new(config.host.bytes)
    }
}

/// Faults made on purpose, if any.
fn fault_config(
    fault: Option<FaultSettings>,
    read_delay_file: Option<PathBuf>,
) -> Option<FaultConfig> {
    let uniform = fault.map(|fault| {
        let config = FaultConfig::uniform(fault.seed, fault.rate);
        match fault.delay_ms {
            Some(delay_ms_max) => FaultConfig { delay: 1.0, delay_ms_max, ..config },
            None => config,
        }
    });
    if read_delay_file.is_none() {
        return uniform;
    }
    Some(FaultConfig { read_delay_file, ..uniform.unwrap_or_default() })
}

/// How the node voids what it cannot erase.
fn retire_in(folder: &Arc<StoreFolder>) -> RetireNamespace {
    let folder = Arc::clone(folder);
    RetireNamespace(Arc::new(move |id| {
        let raised = folder.bump_generation(id);
        if let Err(error) = &raised {
            tracing::error!(namespace = id.0, %error, "cannot raise a namespace's generation");
        }
        raised.ok()
    }))
}

/// What the machine gave and the store had, in sentences.
fn start_notes(report: &NodeReport) -> Vec<String> {
    let pages = report.pages.name();
    let mut notes = vec![format!("host tier: {pages}{}", because(&report.pages_why))];
    if let Some(nvme) = &report.nvme {
        notes.push(format!("nvme tier: {}", io_words(report)));
        notes.push(format!(
            "store: {} blocks found in {} ms; {}",
            nvme.recovered_blocks, nvme.recovery_ms, nvme.recovery
        ));
    } else {
        notes.push("nvme tier: off".to_owned());
    }
    notes
}

/// How nvme is read and written, in words; empty when it is off.
pub fn io_words(report: &NodeReport) -> String {
    let Some(nvme) = &report.nvme else { return String::new() };
    let kind = match nvme.ring.kind {
        RingKind::Uring => "io_uring",
        RingKind::Blocking => "pread and pwrite",
        RingKind::Closed => "closed",
    };
    let direct = if nvme.direct { "past the page cache" } else { "through the page cache" };
    let fixed = match nvme.ring.fixed_bytes {
        0 => String::new(),
        bytes => format!(", {} registered", show_bytes(bytes)),
    };
    format!("{kind} {direct}{fixed}{}", because(&nvme.ring.why))
}

fn because(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(" ({why})") }
}
