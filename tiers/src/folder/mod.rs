//! The store folder: who may use it, the tenants' secrets, and the namespace table.
//!
//! ```text
//! lock             held (flock) by the one daemon that uses the folder; its pid as text
//! secrets          one secret per tenant, mode 0600
//! namespaces.json  the namespaces, with the number and generation of each
//! segments.kvt     the segment store
//! ```
//!
//! Invariants: a namespace's number is never used for another one; what [`StoreFolder::namespace`],
//! [`StoreFolder::bump_generation`] and [`StoreFolder::tenant_secret`] return is durable. A damaged
//! file is never overwritten.

mod sealed;
mod table;

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::block::{Namespace, NamespaceError, NamespaceId, TenantSecret};

use sealed::{read_sealed, write_sealed};
use table::{Secrets, Table};

pub use table::NamespaceEntry;

/// Most namespaces in a store.
pub const NAMESPACES_MAX: usize = 65_536;

/// Most tenants with a secret in a store.
pub const TENANTS_MAX: usize = 4096;

/// Longest name of a tenant, bytes.
pub const TENANT_BYTES_MAX: usize = 256;

/// Version of the namespace table and of the secrets file that this code writes and reads.
pub const FOLDER_VERSION: u32 = 1;

/// Name of the store file in the folder.
pub const STORE_FILE_NAME: &str = "segments.kvt";

const LOCK: &str = "lock";
const SECRETS: &str = "secrets";
const NAMESPACES: &str = "namespaces.json";
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// Why a store folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// An operation of the operating system failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
    /// The path exists and is not a folder.
    #[error("{}: not a folder; name a folder for the store", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// The folder cannot be written to.
    #[error(
        "{}: the store folder is not writable ({source}); give it to the user the daemon runs as, \
         or name another one", path.display()
    )]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Another process uses the folder.
    #[error(
        "{}: the store folder is in use by process {}; stop that one first, or give this one a \
         folder of its own", path.display(), pid_text(*pid)
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// The process, where the lock file says which.
        pid: Option<u32>,
    },
    /// The secrets can be read by others, or belong to another user.
    #[error(
        "{}: {problem}; the secrets decide who can name whose blocks: check who had access, then \
         run `chmod 600` and `chown` on it", path.display()
    )]
    Permissions {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file's checksum or contents are wrong.
    #[error(
        "{}: damaged ({problem}) and left as it is; put back a copy, or move the file away: then \
         the blocks it was for are unreachable and are forgotten", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Written by a newer version.
    #[error(
        "{}: version {version} and this program reads up to {FOLDER_VERSION}; use the newer \
         program, or another store folder", path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// The namespace is not a valid one.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// The tenant's name is not a valid one.
    #[error(
        "tenant name {name:?}: 1 to {TENANT_BYTES_MAX} bytes without control characters are allowed"
    )]
    TenantName {
        /// The start of the name.
        name: String,
    },
    /// There is no room for another one.
    #[error("{}: {what} are limited to {max}", path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// What there are too many of.
        what: &'static str,
        /// How many there can be.
        max: usize,
    },
    /// No namespace has this number.
    #[error("no namespace has the number {0}")]
    Unknown(u32),
}

fn pid_text(pid: Option<u32>) -> String {
    pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string())
}

/// A store folder that this process holds. Dropping it lets the next one in.
#[derive(Debug)]
pub struct StoreFolder {
    path: PathBuf,
    state: Mutex<State>,
    // Held for the lock on it.
    _lock: File,
}

struct State {
    table: Table,
    index: std::collections::HashMap<(String, Namespace), usize>,
    secrets: Secrets,
}

impl std::fmt::Debug for State {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "State({} namespaces)", self.table.entries.len())
    }
}

impl StoreFolder {
    /// Opens a store folder, making it (mode 0700) where there is none. Blocks for up to 0.5 s
    /// while another process holds it.
    ///
    /// # Errors
    /// [`FolderError`]; nothing damaged is overwritten.
    pub fn open(path: &Path) -> Result<StoreFolder, FolderError> {
        make_folder(path)?;
        let lock = take_lock(path)?;
        let secrets_path = path.join(SECRETS);
        check_secrets_owner(&secrets_path)?;
        let secrets: Secrets = read_sealed(&secrets_path)?.unwrap_or_default();
        secrets.check().map_err(|problem| FolderError::Damaged { path: secrets_path, problem })?;
        let table_path = path.join(NAMESPACES);
        let table = match read_table(&table_path)? {
            Some(table) => table,
            None => {
                let first_generation = u32::from_le_bytes(random(&table_path)?) >> 1;
                Table { next_id: 1, first_generation, entries: Vec::new() }
            }
        };
        let index = table.index();
        let state = Mutex::new(State { table, index, secrets });
        Ok(StoreFolder { path: path.to_owned(), state, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the store file lies.
    pub fn store_file(&self) -> PathBuf {
        self.path.join(STORE_FILE_NAME)
    }

    /// The tenant's secret, made and durable before it is returned where there was none.
    ///
    /// # Errors
    /// An invalid name, too many tenants, or the file could not be written.
    pub fn tenant_secret(&self, tenant: &str) -> Result<TenantSecret, FolderError> {
        self.secret(&mut self.state(), tenant)
    }

    /// The tenant's namespace, added and durable before it is returned where there was none. When
    /// the tenant's secret is no longer the one the namespace was made with, its generation moves
    /// on, because the blocks of the old one cannot be named any more.
    ///
    /// # Errors
    /// An invalid namespace or name, too many namespaces, or the file could not be written.
    pub fn namespace(
        &self,
        tenant: &str,
        namespace: &Namespace,
    ) -> Result<NamespaceEntry, FolderError> {
        namespace.check()?;
        let mut state = self.state();
        let secret = self.secret(&mut state, tenant)?;
        let fingerprint = crate::block::NamespaceKey::derive(&secret, namespace).fingerprint();
        let key = (tenant.to_owned(), namespace.clone());
        let known = state.index.get(&key).copied();
        let known = known.and_then(|at| Some((at, state.table.entries.get(at)?.clone())));
        if let Some((at, mut entry)) = known {
            if entry.fingerprint != fingerprint {
                entry.fingerprint = fingerprint;
                entry.generation = entry.generation.wrapping_add(1);
                self.replace(&mut state, at, entry.clone())?;
            }
            return Ok(entry);
        }
        self.add(&mut state, key, fingerprint)
    }

    /// All namespaces, by number.
    pub fn entries(&self) -> Vec<NamespaceEntry> {
        self.state().table.entries.clone()
    }

    /// The generation of a namespace, `None` for an unknown one: what recovery asks.
    pub fn generation(&self, id: NamespaceId) -> Option<u32> {
        let state = self.state();
        let at = state.table.entries.binary_search_by_key(&id, |entry| entry.id).ok()?;
        state.table.entries.get(at).map(|entry| entry.generation)
    }

    /// Makes all blocks of a namespace dead, durably. Returns the new generation.
    ///
    /// # Errors
    /// No such namespace, or the table could not be written.
    pub fn bump_generation(&self, id: NamespaceId) -> Result<u32, FolderError> {
        let mut state = self.state();
        let at = state.table.entries.binary_search_by_key(&id, |entry| entry.id);
        let at = at.map_err(|_| FolderError::Unknown(id.0))?;
        let mut entry = state.table.entries.get(at).cloned().ok_or(FolderError::Unknown(id.0))?;
        entry.generation = entry.generation.wrapping_add(1);
        let generation = entry.generation;
        self.replace(&mut state, at, entry)?;
        Ok(generation)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change replaces a whole value after it was written, so a panic leaves no half one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn secret(&self, state: &mut State, tenant: &str) -> Result<TenantSecret, FolderError> {
        if !table::tenant_name_is_valid(tenant) {
            return Err(FolderError::TenantName { name: tenant.chars().take(64).collect() });
        }
        if let Some(secret) = state.secrets.get(tenant) {
            return Ok(secret);
        }
        let path = self.path.join(SECRETS);
        if state.secrets.0.len() >= TENANTS_MAX {
            return Err(FolderError::Full { path, what: "tenants", max: TENANTS_MAX });
        }
        let secret = TenantSecret(random(&path)?);
        state.secrets.0.insert(tenant.to_owned(), table::secret_to_hex(&secret));
        if let Err(error) = write_sealed(&path, &state.secrets) {
            state.secrets.0.remove(tenant);
            return Err(error);
        }
        Ok(secret)
    }

    fn replace(
        &self,
        state: &mut State,
        at: usize,
        entry: NamespaceEntry,
    ) -> Result<(), FolderError> {
        let mut table = state.table.clone();
        if let Some(place) = table.entries.get_mut(at) {
            *place = entry;
        }
        write_sealed(&self.path.join(NAMESPACES), &table)?;
        state.table = table;
        Ok(())
    }

    fn add(
        &self,
        state: &mut State,
        key: (String, Namespace),
        fingerprint: [u8; 16],
    ) -> Result<NamespaceEntry, FolderError> {
        let path = self.path.join(NAMESPACES);
        let next = state.table.next_id.checked_add(1);
        let (Some(next), true) = (next, state.table.entries.len() < NAMESPACES_MAX) else {
            return Err(FolderError::Full { path, what: "namespaces", max: NAMESPACES_MAX });
        };
        let entry = NamespaceEntry {
            id: NamespaceId(state.table.next_id),
            generation: state.table.first_generation,
            tenant: key.0.clone(),
            namespace: key.1.clone(),
            fingerprint,
        };
        let mut table = state.table.clone();
        table.next_id = next;
        table.entries.push(entry.clone());
        write_sealed(&path, &table)?;
        state.index.insert(key, table.entries.len() - 1);
        state.table = table;
        Ok(entry)
    }
}

/// What can be seen of a store folder without using it.
#[derive(Debug)]
pub struct FolderView {
    /// The store file, where there is one.
    pub store_file: Option<PathBuf>,
    /// The namespaces, or why they cannot be read. Empty where there is no table.
    pub namespaces: Result<Vec<NamespaceEntry>, FolderError>,
    /// Names of the tenants with a secret, or why they cannot be read. `None` without a file.
    pub tenants: Result<Option<Vec<String>>, FolderError>,
    /// The process that holds the folder, where one does; 0 when it is not known which.
    pub locked_by: Option<u32>,
}

/// Looks at a store folder, also while a daemon uses it. Changes nothing.
///
/// # Errors
/// Only when there is no folder to look at; damage is in the view.
pub fn inspect(path: &Path) -> Result<FolderView, FolderError> {
    let meta = std::fs::metadata(path).map_err(|source| FolderError::Io {
        path: path.to_owned(),
        action: "open the folder",
        source,
    })?;
    if !meta.is_dir() {
        return Err(FolderError::NotAFolder { path: path.to_owned() });
    }
    let secrets_path = path.join(SECRETS);
    let tenants = check_secrets_owner(&secrets_path).and_then(|()| {
        let Some(secrets) = read_sealed::<Secrets>(&secrets_path)? else { return Ok(None) };
        let damaged = |problem| FolderError::Damaged { path: secrets_path.clone(), problem };
        secrets.check().map_err(damaged)?;
        Ok(Some(secrets.0.into_keys().collect()))
    });
    let namespaces = read_table(&path.join(NAMESPACES))
        .map(|table| table.map_or_else(Vec::new, |table| table.entries));
    let store_file = path.join(STORE_FILE_NAME);
    Ok(FolderView {
        store_file: store_file.is_file().then_some(store_file),
        namespaces,
        tenants,
        locked_by: holder(&path.join(LOCK)),
    })
}

fn make_folder(path: &Path) -> Result<(), FolderError> {
    let failed = |action, source| FolderError::Io { path: path.to_owned(), action, source };
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(FolderError::NotAFolder { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
            made.map_err(|source| match source.kind() {
                kind if refuses(kind) => FolderError::NotWritable { path: path.to_owned(), source },
                _ => failed("make the folder", source),
            })?;
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let sync = File::open(parent.unwrap_or(Path::new("."))).and_then(|dir| dir.sync_all());
            sync.map_err(|source| failed("sync the folder above", source))
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            Err(FolderError::NotAFolder { path: path.to_owned() })
        }
        Err(error) => Err(failed("open the folder", error)),
    }
}

fn refuses(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// An io_uring can outlive its process by a moment and the lock with it, hence the retries.
fn take_lock(folder: &Path) -> Result<File, FolderError> {
    let path = folder.join(LOCK);
    let failed = |action, source| FolderError::Io { path: path.clone(), action, source };
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path);
    let mut lock = opened.map_err(|source| match source.kind() {
        kind if refuses(kind) => FolderError::NotWritable { path: folder.to_owned(), source },
        _ => failed("open it", source),
    })?;
    for attempt in 1.. {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) if attempt < LOCK_TRIES => {
                std::thread::sleep(LOCK_PAUSE);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let pid = read_pid(&mut lock);
                return Err(FolderError::Locked { path: folder.to_owned(), pid });
            }
            Err(errno) => return Err(failed("lock it", errno.into())),
        }
    }
    let write = |lock: &mut File| {
        lock.set_len(0)?;
        lock.rewind()?;
        writeln!(lock, "{}", std::process::id())
    };
    match write(&mut lock) {
        Ok(()) => Ok(lock),
        Err(source) if refuses(source.kind()) => {
            Err(FolderError::NotWritable { path: folder.to_owned(), source })
        }
        Err(source) => Err(failed("write the process's number to it", source)),
    }
}

fn read_pid(lock: &mut File) -> Option<u32> {
    let mut text = String::new();
    lock.rewind().ok()?;
    lock.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn holder(lock: &Path) -> Option<u32> {
    let mut file = File::open(lock).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Some(read_pid(&mut file).unwrap_or(0)),
        _ => None,
    }
}

fn check_secrets_owner(path: &Path) -> Result<(), FolderError> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(FolderError::Io { path: path.to_owned(), action: "look at it", source });
        }
    };
    let wrong = |problem| Err(FolderError::Permissions { path: path.to_owned(), problem });
    let user = rustix::process::geteuid().as_raw();
    if !meta.is_file() {
        return wrong("not a regular file".to_owned());
    }
    if meta.mode() & 0o077 != 0 {
        return wrong(format!("mode {:04o} lets others at it", meta.mode() & 0o7777));
    }
    if meta.uid() != user {
        return wrong(format!("it belongs to user {} and not to user {user}", meta.uid()));
    }
    Ok(())
}

fn read_table(path: &Path) -> Result<Option<Table>, FolderError> {
    let Some(mut table) = read_sealed::<Table>(path)? else { return Ok(None) };
    table.check().map_err(|problem| FolderError::Damaged { path: path.to_owned(), problem })?;
    table.entries.sort_by_key(|entry| entry.id);
    Ok(Some(table))
}

fn random<const N: usize>(path: &Path) -> Result<[u8; N], FolderError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| FolderError::Io {
        path: path.to_owned(),
        action: "draw random bytes for it",
        source: io::Error::other(error),
    })?;
    Ok(bytes)
}
