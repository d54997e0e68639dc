//! The processes of the demo: the daemon and its clients, all of them this same program, and the
//! folder in which they work. All of it goes away with the value that holds it.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use kvtide_client::{ClientConfig, blocking};

use super::wire::{Said, Turn, TurnDone};
use crate::cli::error::CliError;

/// Longest path of a unix socket, with room for the terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Tells a daemon that it is the demo's, and goes when the demo goes.
pub(crate) const WITH_PARENT: &str = "KVTIDE_DEMO";

/// A folder of the demo's own, removed with everything in it.
pub(crate) struct Folder {
    path: PathBuf,
}

impl Folder {
    pub(crate) fn create(parent: Option<&Path>) -> Result<Folder, CliError> {
        let name = format!("kvtide-demo-{}", std::process::id());
        let mut parent = parent.map_or_else(std::env::temp_dir, Path::to_path_buf);
        if parent.join(&name).join("kvtide.sock").as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            parent = PathBuf::from("/tmp");
        }
        let path = parent.join(name);
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            CliError::Failed(format!(
                "cannot make the folder {}: {error}; name another place with --dir",
                path.display()
            ))
        })?;
        Ok(Folder { path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path.join("kvtide.sock")
    }

    fn log(&self) -> PathBuf {
        self.path.join("kvtided.log")
    }

    /// The last lines of the daemon's log.
    fn log_end(&self) -> String {
        let text = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines.get(lines.len().saturating_sub(8)..).unwrap_or_default().join("\n  ")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// This program again. Not by its path, which is of no use when the file was replaced meanwhile.
fn again(first: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("kvtide").arg(first);
    command
}

/// A running daemon. Killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) control: blocking::Client,
}

impl Daemon {
    /// Starts the daemon in `folder` and waits until it answers.
    pub(crate) fn start(folder: &Folder, args: &[OsString]) -> Result<Daemon, CliError> {
        let log =
            File::options().create(true).append(true).open(folder.log()).map_err(|error| {
                CliError::Failed(format!("cannot write the daemon's log: {error}"))
            })?;
        let log_too = log.try_clone().map_err(CliError::failed)?;
        let mut child = again("__daemon")
            .args(args)
            .env(WITH_PARENT, "1")
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("LISTEN_FDS")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(log_too)
            .spawn()
            .map_err(|error| CliError::Failed(format!("cannot start the daemon: {error}")))?;
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let config = ClientConfig {
                name: "kvtide-demo-control".to_owned(),
                ..ClientConfig::new(folder.socket())
            };
            let error = match blocking::Client::connect(config) {
                Ok(control) => return Ok(Daemon { child, control }),
                Err(error) => error,
            };
            let ended = child.try_wait().ok().flatten();
            if ended.is_some() || Instant::now() > until {
                let _ = child.kill();
                let _ = child.wait();
                let how =
                    ended.map_or_else(|| format!("it says: {error}"), |code| code.to_string());
                return Err(CliError::Failed(format!(
                    "the demo's daemon did not come up ({how}); the end of its log:\n  {}",
                    folder.log_end()
                )));
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, now.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Why no answer came from a client process.
pub(crate) enum Silence {
    /// Nothing yet.
    Waiting,
    /// The process ended, or said why it cannot go on.
    Ended(String),
}

/// A running client process. Killed when dropped.
pub(crate) struct Engine {
    child: Child,
    stdin: Option<ChildStdin>,
    said: Receiver<Said>,
}

impl Engine {
    pub(crate) fn start(socket: &Path) -> Result<Engine, CliError> {
        let mut child = again("__demo-client")
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| CliError::Failed(format!("cannot start a client: {error}")))?;
        let stdin = child.stdin.take();
        let (sender, said) = channel();
        if let Some(stdout) = child.stdout.take() {
            // Ends with the process's standard output.
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    let said = serde_json::from_str(&line)
                        .unwrap_or_else(|error| Said::Failed(format!("{error} in `{line}`")));
                    if sender.send(said).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Engine { child, stdin, said })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn ask(&mut self, turn: Turn) -> Result<(), String> {
        let mut line = serde_json::to_string(&turn).map_err(|error| error.to_string())?;
        line.push('\n');
        let stdin = self.stdin.as_mut().ok_or("its standard input is closed")?;
        stdin.write_all(line.as_bytes()).map_err(|error| error.to_string())
    }

    /// The next answer; `None` for the word that it is ready.
    pub(crate) fn answer(&mut self, wait: Duration) -> Result<Option<TurnDone>, Silence> {
        match self.said.recv_timeout(wait) {
            Ok(Said::Ready) => Ok(None),
            Ok(Said::Done(done)) => Ok(Some(done)),
            Ok(Said::Failed(why)) => Err(Silence::Ended(why)),
            Err(RecvTimeoutError::Timeout) => Err(Silence::Waiting),
            Err(RecvTimeoutError::Disconnected) => {
                let how = self.child.wait().map_or_else(|e| e.to_string(), |code| code.to_string());
                Err(Silence::Ended(format!("the process ended: {how}")))
            }
        }
    }

    /// SIGKILL, now.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
