//! How a client finds and treats its daemon.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The daemon's socket. Default: [`default_socket`].
    pub socket: PathBuf,
    /// What the client calls itself in the daemon's logs, up to 64 bytes. Default: the name of the
    /// program.
    pub name: String,
    /// Longest time that any call may take, unless it says otherwise. Default: 2 s.
    pub call_timeout: Duration,
    /// Longest time for connecting and for the hello. Default: 1 s.
    pub connect_timeout: Duration,
    /// Failures in a row that open the circuit breaker. Default: 3. Minimum: 1.
    pub breaker_failures: u32,
    /// How long the breaker stays open before the first probe, and the pause before the first
    /// try to reconnect; doubled after each failure. Default: 100 ms.
    pub backoff: Duration,
    /// Longest such pause. Default: 2 s.
    pub backoff_max: Duration,
}

impl ClientConfig {
    /// The defaults, for the daemon at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> ClientConfig {
        ClientConfig {
            socket: socket.into(),
            name: program_name(),
            call_timeout: Duration::from_secs(2),
            connect_timeout: Duration::from_secs(1),
            breaker_failures: 3,
            backoff: Duration::from_millis(100),
            backoff_max: Duration::from_secs(2),
        }
    }
}

impl Default for ClientConfig {
    fn default() -> Self {
        ClientConfig::new(default_socket())
    }
}

/// Where kvtided listens unless told otherwise: `KVTIDE_SOCKET` when set, else
/// `kvtide/kvtide.sock` under `XDG_RUNTIME_DIR`, else (and for root) under `/run`.
pub fn default_socket() -> PathBuf {
    if let Some(socket) = std::env::var_os("KVTIDE_SOCKET").filter(|value| !value.is_empty()) {
        return PathBuf::from(socket);
    }
    runtime_folder().join("kvtide.sock")
}

/// The folder of the socket: `/run/kvtide` for root and without `XDG_RUNTIME_DIR`.
pub fn runtime_folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
    match own {
        Some(folder) if !rustix::process::geteuid().is_root() => {
            PathBuf::from(folder).join("kvtide")
        }
        _ => PathBuf::from("/run/kvtide"),
    }
}

fn program_name() -> String {
    let path = std::env::current_exe().ok();
    let name = path.as_deref().and_then(|path| path.file_name());
    name.map_or_else(|| "client".to_owned(), |name| name.to_string_lossy().into_owned())
}
