//! A real daemon as a child process: this program run again with `__daemon`, in a folder of its
//! own. It can be stopped, killed and started anew on the same store.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use kvtide_client::{ClientConfig, blocking::Client};
use kvtide_tiers::block::Sum128;

/// Longest time that a start may take: a store of some gigabytes is preallocated and read.
const START_MAX: Duration = Duration::from_secs(60);

/// Longest path of a socket that every system takes.
const SOCKET_BYTES_MAX: usize = 100;

/// Longest time that a clean stop may take.
const STOP_MAX: Duration = Duration::from_secs(30);

/// How a daemon is set up.
#[derive(Clone, Debug)]
pub struct DaemonSpec {
    /// Holds socket and log.
    pub folder: PathBuf,
    /// The store folder.
    pub store: PathBuf,
    /// Bytes of the host tier.
    pub host_bytes: u64,
    /// Bytes of the nvme tier.
    pub nvme_bytes: u64,
    /// The smallest block that will be stored.
    pub block_bytes_min: u64,
    /// GPU memory as a tier: the pool's bytes, and the driver's library where it is not the
    /// machine's.
    pub device: Option<(u64, Option<PathBuf>)>,
    /// Injected device faults: rate and seed.
    pub fault: Option<(f64, u64)>,
}

impl DaemonSpec {
    /// Where the daemon listens: in its folder, unless that makes the path too long for a socket.
    pub fn socket(&self) -> PathBuf {
        let socket = self.folder.join("kvtide.sock");
        if socket.as_os_str().len() <= SOCKET_BYTES_MAX {
            return socket;
        }
        let sum = Sum128::of(self.folder.as_os_str().as_encoded_bytes());
        let name = format!("kvtide-bench-{:016x}", u128::from_le_bytes(sum.0) as u64);
        std::env::temp_dir().join(name).join("kvtide.sock")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("daemon.log")
    }

    /// The command line that gives the daemon this set-up.
    fn args(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = Vec::new();
        let mut option = |name: &str, value: OsString| args.extend([OsString::from(name), value]);
        option("--socket", self.socket().into());
        option("--store", self.store.clone().into());
        option("--host-bytes", self.host_bytes.to_string().into());
        option("--nvme-bytes", self.nvme_bytes.to_string().into());
        option("--block-bytes-min", self.block_bytes_min.to_string().into());
        option("--metrics", "off".into());
        if let Some((bytes, library)) = &self.device {
            option("--device-pool-bytes", bytes.to_string().into());
            if let Some(library) = library {
                option("--device-library", library.clone().into());
            }
        }
        if let Some((rate, seed)) = self.fault {
            option("--fault-rate", rate.to_string().into());
            option("--fault-seed", seed.to_string().into());
        }
        args
    }
}

/// A running daemon. Killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    spec: DaemonSpec,
    child: Child,
    /// CPU seconds of the lives before this one.
    cpu_before: f64,
}

impl Daemon {
    /// Starts a daemon and waits until it answers. Returns how long that took.
    ///
    /// # Errors
    /// It did not start, or did not answer in time; the end of its log says why.
    pub fn start(spec: DaemonSpec) -> anyhow::Result<(Daemon, Duration)> {
        std::fs::create_dir_all(&spec.folder)
            .with_context(|| format!("cannot make the folder {}", spec.folder.display()))?;
        if let Some(folder) = spec.socket().parent() {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        }
        let child = spawn(&spec)?;
        let mut daemon = Daemon { spec, child, cpu_before: 0.0 };
        let took = daemon.wait_until_it_answers()?;
        Ok((daemon, took))
    }

    /// How it is set up.
    pub fn spec(&self) -> &DaemonSpec {
        &self.spec
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// CPU seconds used so far, over all lives.
    pub fn cpu_seconds(&self) -> f64 {
        self.cpu_before + crate::process::cpu_seconds(self.pid()).unwrap_or(0.0)
    }

    /// Kills it with SIGKILL.
    ///
    /// # Errors
    /// It had ended by itself before, which it never should.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon ended by itself ({status}){}", self.log_end());
        }
        self.cpu_before = self.cpu_seconds();
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts it again after a kill. Returns the time until it answered.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn start_again(&mut self) -> anyhow::Result<Duration> {
        self.child = spawn(&self.spec)?;
        self.wait_until_it_answers()
    }

    /// Asks it to stop and waits until it has.
    ///
    /// # Errors
    /// It had ended before, did not end in time, or not with success.
    pub fn stop(&mut self) -> anyhow::Result<Duration> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon ended by itself ({status}){}", self.log_end());
        }
        self.cpu_before = self.cpu_seconds();
        let started = Instant::now();
        if let Some(pid) = i32::try_from(self.pid()).ok().and_then(rustix::process::Pid::from_raw) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        }
        while started.elapsed() < STOP_MAX {
            if let Some(status) = self.child.try_wait()? {
                if !status.success() {
                    bail!("the daemon ended with {status}{}", self.log_end());
                }
                return Ok(started.elapsed());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        bail!("the daemon did not stop within {} s{}", STOP_MAX.as_secs(), self.log_end())
    }

    /// Fails when the daemon has ended by itself.
    ///
    /// # Errors
    /// It has; the end of its log says why.
    pub fn check_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the daemon ended by itself ({status}){}", self.log_end()),
        }
    }

    fn wait_until_it_answers(&mut self) -> anyhow::Result<Duration> {
        let started = Instant::now();
        loop {
            let config = ClientConfig::new(self.spec.socket());
            let error = match Client::connect(config) {
                Ok(_) => return Ok(started.elapsed()),
                Err(error) => error,
            };
            self.check_alive()?;
            if started.elapsed() > START_MAX {
                let waited = START_MAX.as_secs();
                bail!("no answer within {waited} s: {error}{}", self.log_end());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The last lines of the log, for an error.
    fn log_end(&self) -> String {
        let text = std::fs::read_to_string(self.spec.log()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(12).collect();
        let lines: Vec<&str> = lines.into_iter().rev().collect();
        format!("\nthe end of {}:\n{}", self.spec.log().display(), lines.join("\n"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Only when it is not within the daemon's folder.
        let socket = self.spec.socket();
        if let Some(folder) = socket.parent().filter(|folder| *folder != self.spec.folder) {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

fn spawn(spec: &DaemonSpec) -> anyhow::Result<Child> {
    let log = File::options().create(true).append(true).open(spec.log());
    let log = log.with_context(|| format!("cannot write {}", spec.log().display()))?;
    let mut command = this_program("__daemon")?;
    command.args(spec.args()).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().context("cannot start the daemon")
}

/// This program, to be run again with a first argument.
///
/// # Errors
/// The system does not say where this program is.
pub fn this_program(first: &str) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(first);
    Ok(command)
}

/// Becomes another program, which ends with the parent: for a child that was started as
/// `this_program("__exec")` with that program and its arguments.
///
/// Returns only why it could not.
pub fn become_program(mut args: impl Iterator<Item = OsString>) -> anyhow::Error {
    end_with_parent();
    let Some(program) = args.next() else { return anyhow::anyhow!("no program is named") };
    let error = Command::new(&program).args(args).exec();
    anyhow::Error::new(error).context(format!("cannot start {}", program.display()))
}

/// For the first act of such a child: it is killed when the thread that started it ends, so that
/// nothing is left behind by a coordinator that was killed.
pub fn end_with_parent() {
    // Only an invalid signal number could fail.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}
