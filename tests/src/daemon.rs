//! The daemon as a process: started, killed, restarted, stopped, and its log.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{CatalogStats, ClientConfig, ServiceStats};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::manager::ServiceManager;
use crate::proc::{poll_until, threads_frozen};

/// Longest time that a daemon may take to serve, or to end, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A user that few machines give to anybody, and that containers map.
pub const UNUSED_USER: u32 = 64_201;

/// Whether the tests run as root, and so can be several users.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// How a daemon is to be started, and the temporary folder with all that it leaves.
#[derive(Clone)]
pub struct Setup {
    node: PathBuf,
    folder: Arc<TempDir>,
    options: Vec<(String, OsString)>,
    environment: Vec<(String, OsString)>,
    manager: Option<ServiceManager>,
}

/// A process that ended by itself.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code.
    pub code: Option<i32>,
    /// Its standard error.
    pub text: String,
}

impl Setup {
    /// A small daemon in a folder of its own: 32 MiB of host RAM, 128 MiB of nvme in segments of
    /// 4 MiB, no metrics. `node` is the program `kvtide-test-node`.
    ///
    /// # Panics
    /// When there is no room for temporary files.
    pub fn new(node: &str) -> Setup {
        let folder = tempfile::Builder::new().prefix("kvtide-").tempdir();
        let folder = folder.expect("a temporary folder can be made");
        // Other users' clients have to reach the socket.
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755))
            .expect("the folder is ours");
        let setup = Setup {
            node: node.into(),
            folder: Arc::new(folder),
            options: Vec::new(),
            environment: Vec::new(),
            manager: None,
        };
        let (socket, store) = (setup.socket(), setup.store());
        setup
            .option("--socket", socket)
            .option("--store", store)
            .option("--host-bytes", "32MiB")
            .option("--nvme-bytes", "128MiB")
            .option("--segment-bytes", "4MiB")
            .option("--block-bytes-min", "4KiB")
            .option("--metrics", "off")
    }

    /// Sets an option of kvtided, instead of what it was.
    pub fn option(mut self, name: &str, value: impl Into<OsString>) -> Setup {
        self.options.retain(|(each, _)| each != name);
        self.options.push((name.to_owned(), value.into()));
        self
    }

    /// Leaves an option out.
    pub fn without(mut self, name: &str) -> Setup {
        self.options.retain(|(each, _)| each != name);
        self
    }

    /// Sets a variable of the daemon's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Setup {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Gives it a configuration file with this text.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn config(self, text: &str) -> Setup {
        let path = self.path("kvtided.toml");
        std::fs::write(&path, text).expect("the configuration can be written");
        self.option("--config", path)
    }

    /// A path in the temporary folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The socket.
    pub fn socket(&self) -> PathBuf {
        self.path("kvtide.sock")
    }

    /// The store folder.
    pub fn store(&self) -> PathBuf {
        self.path("store")
    }

    /// The command that starts the daemon.
    pub fn command(&self) -> Command {
        let mut command = self.program("__daemon");
        for (name, value) in &self.options {
            command.arg(name).arg(value);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        if let Some(manager) = &self.manager {
            command = manager.pass_to(&command);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Has the daemon started by a service manager, which passes what it keeps.
    #[must_use]
    pub(crate) fn manager(mut self, manager: ServiceManager) -> Setup {
        self.manager = Some(manager);
        self
    }

    /// One of the programs that the tests run.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = Command::new(&self.node);
        command.arg(name);
        command
    }

    /// What `kvtide` says, which must succeed. `args` are its arguments without the socket.
    ///
    /// # Panics
    /// When it does not.
    pub fn inspector(&self, args: &[&str]) -> String {
        let mut command = self.program("__inspector");
        let output = command.args(args).arg("--socket").arg(self.socket()).output();
        let output = output.expect("the test's program can be started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
        text
    }

    /// The command for a client process; see [`crate::churn`].
    pub fn client(&self, args: &[&str]) -> Command {
        let mut command = self.program("__client");
        command.arg(self.socket()).args(args).stdin(Stdio::null());
        command
    }

    /// Starts the daemon and waits until it serves.
    ///
    /// # Panics
    /// When it ends instead.
    pub fn start(&self) -> Daemon {
        let mut daemon = Daemon { child: self.spawn(), setup: self.clone() };
        daemon.wait_serving();
        daemon
    }

    fn spawn(&self) -> Child {
        let log = File::create(self.log()).expect("the log can be made");
        let child = self.command().stderr(log).spawn();
        child.expect("the test's program can be started")
    }

    /// Runs a daemon that is expected to end by itself.
    ///
    /// # Panics
    /// When it does not, within a minute.
    pub fn run_to_end(&self) -> Ended {
        run_to_end(self.command(), &self.path("refused.log"))
    }

    fn log(&self) -> PathBuf {
        self.path("daemon.log")
    }
}

/// Runs a command that is expected to end by itself.
fn run_to_end(mut command: Command, log: &Path) -> Ended {
    let file = File::create(log).expect("the log can be made");
    let mut child = command.stderr(file).spawn().expect("the test's program can be started");
    let status = wait_for(&mut child, PATIENCE);
    let text = std::fs::read_to_string(log).expect("the log can be read");
    let Some(status) = status else {
        let _ = child.kill();
        let _ = child.wait();
        panic!("it should have refused to run, and did not:\n{text}");
    };
    assert_eq!(status.signal(), None, "killed by a signal:\n{text}");
    Ended { code: status.code(), text }
}

fn wait_for(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    poll_until(limit, || child.try_wait().expect("the child is ours"))
}

/// A daemon that runs, until it is dropped.
pub struct Daemon {
    child: Child,
    setup: Setup,
}

impl Daemon {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it was started.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Whether it runs.
    ///
    /// # Panics
    /// When the system says nothing about it.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("the child is ours").is_none()
    }

    /// What it logged since it was started last.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.setup.log()).unwrap_or_default()
    }

    /// Fails when a thread of the daemon panicked, or the daemon is gone, or has broken a rule of
    /// the fake driver.
    ///
    /// # Panics
    /// Then.
    pub fn assert_healthy(&mut self) {
        assert!(self.is_alive(), "the daemon is gone");
        let log = self.log();
        assert!(!log.contains("panicked") && !log.contains("in a panic"), "a panic in the log");
        assert!(!log.contains("please report this"), "the daemon says that it has a bug");
        assert!(!log.contains("fakecuda: VIOLATION"), "the driver was used against its rules");
    }

    /// Kills it as a crash would.
    ///
    /// # Panics
    /// When it is not there.
    pub fn kill9(&mut self) {
        self.child.kill().expect("the child is ours");
        self.child.wait().expect("the child is ours");
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// When it is not there.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process has a number"), signal).expect("the child is ours");
    }

    /// Stops all of its threads until [`Signal::CONT`], as a hang would.
    ///
    /// # Panics
    /// When it is not there, or does not stop.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let pid = self.pid();
        // The signal reaches each thread a moment later.
        let frozen = poll_until(PATIENCE, || threads_frozen(pid).then_some(()));
        assert!(frozen.is_some(), "the daemon does not freeze");
    }

    /// Starts it again, after it was killed or stopped.
    ///
    /// # Panics
    /// When it ends instead.
    pub fn restart(&mut self) {
        self.child = self.setup.spawn();
        self.wait_serving();
    }

    /// Tells it to stop, and waits until it has.
    ///
    /// # Panics
    /// When it does not stop within a minute.
    pub fn stop_gracefully(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        wait_for(&mut self.child, PATIENCE).expect("the daemon stops when told to")
    }

    /// A client of its own user, which is an operator.
    ///
    /// # Panics
    /// When it cannot connect.
    pub fn client(&self) -> Client {
        Client::connect(self.client_config()).expect("the daemon serves")
    }

    /// Settings for clients, patient enough for a loaded machine.
    pub fn client_config(&self) -> ClientConfig {
        ClientConfig {
            call_timeout: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(20),
            ..ClientConfig::new(self.setup.socket())
        }
    }

    /// Its counters, asked by a client that is gone afterwards.
    ///
    /// # Panics
    /// When it does not answer.
    pub fn stats(&self) -> (CatalogStats, ServiceStats) {
        stats_of(&self.client())
    }

    /// Waits until no client holds anything, but for `others` that are connected and hold nothing.
    ///
    /// # Errors
    /// What is still held after `limit`.
    pub fn wait_idle(&self, others: u64, limit: Duration) -> Result<(), String> {
        let asker = self.client();
        let mut last = String::new();
        let idle = poll_until(limit, || {
            let (stats, _) = stats_of(&asker);
            last = format!(
                "{} sessions too many, {} regions, {} leases, {} tickets",
                stats.sessions.saturating_sub(1 + others),
                stats.regions,
                stats.leases,
                stats.tickets
            );
            let held = stats.sessions.saturating_sub(1 + others)
                + stats.regions
                + stats.leases
                + stats.tickets;
            (held == 0).then_some(())
        });
        idle.ok_or(last)
    }

    fn wait_serving(&mut self) {
        let serving = poll_until(PATIENCE, || {
            assert!(self.is_alive(), "the daemon ended at its start");
            self.log().contains("serving: host").then_some(())
        });
        assert!(serving.is_some(), "the daemon does not serve");
    }
}

/// The counters, as an operator sees them.
fn stats_of(client: &Client) -> (CatalogStats, ServiceStats) {
    let stats = client.stats().expect("the daemon answers");
    let catalog = stats.catalog.expect("the tests' user is an operator");
    (catalog, stats.service.expect("the tests' user is an operator"))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines.get(lines.len().saturating_sub(40)..).unwrap_or_default();
            eprintln!("--- end of the daemon's log\n{}\n---", last.join("\n"));
        }
    }
}
