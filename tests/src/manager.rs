//! A stand-in for the service manager: keeps the files that a daemon gives it, and passes them to
//! the next one (`sd_pid_notify_with_fds(3)`, `sd_listen_fds_with_names(3)`).

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::daemon::Setup;

/// What it was told and given.
#[derive(Default)]
struct Kept {
    files: Vec<(String, OwnedFd)>,
    said: Vec<String>,
}

/// The stand-in; it listens until it is dropped.
#[derive(Clone)]
pub struct ServiceManager {
    socket: Arc<UnixDatagram>,
    kept: Arc<Mutex<Kept>>,
}

impl ServiceManager {
    /// Listens at a socket in the daemon's folder, and has the daemon told of it.
    ///
    /// # Panics
    /// When the socket cannot be made.
    #[must_use]
    pub fn of(setup: Setup) -> (ServiceManager, Setup) {
        let path = setup.path("notify.sock");
        let socket = UnixDatagram::bind(&path).expect("the socket can be made");
        socket.set_nonblocking(true).expect("it is a socket");
        let manager = ServiceManager { socket: Arc::new(socket), kept: Arc::default() };
        let setup = setup.env("NOTIFY_SOCKET", path).manager(manager.clone());
        (manager, setup)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what was sent since.
    fn receive(&self) {
        loop {
            let mut text = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut files = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut text)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let Ok(message) = recvmsg(&*self.socket, &mut parts, &mut files, flags) else { return };
            let text = text.get(..message.bytes).unwrap_or_default();
            let text = String::from_utf8_lossy(text).into_owned();
            let mut kept = self.kept();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
            let name = name.unwrap_or("stored").to_owned();
            if text.contains("FDSTOREREMOVE=1") {
                kept.files.retain(|(each, _)| *each != name);
            }
            for part in files.drain() {
                if let (RecvAncillaryMessage::ScmRights(fds), true) =
                    (part, text.contains("FDSTORE=1"))
                {
                    kept.files.extend(fds.map(|fd| (name.clone(), fd)));
                }
            }
            kept.said.push(text);
        }
    }

    /// The names of the files that are kept.
    pub fn names(&self) -> Vec<String> {
        self.receive();
        self.kept().files.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Lets all of them go, as a stop does.
    pub fn forget(&self) {
        self.receive();
        self.kept().files.clear();
    }

    /// Lets one of them go.
    pub fn lose(&self, name: &str) {
        self.receive();
        self.kept().files.retain(|(each, _)| each != name);
    }

    /// The command, given what is kept as descriptors 3 and following. A shell opens them, because
    /// the process itself has to be the one that `LISTEN_PID` names.
    pub(crate) fn pass_to(&self, command: &Command) -> Command {
        self.receive();
        let kept = self.kept();
        let own = std::process::id();
        let mut script = String::from("export LISTEN_PID=$$; exec \"$@\"");
        for ((_, fd), place) in kept.files.iter().zip(3..) {
            script.push_str(&format!(" {place}<>/proc/{own}/fd/{}", fd.as_raw_fd()));
        }
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(script).arg("sh").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                shell.env(name, value);
            }
        }
        let names: Vec<&str> = kept.files.iter().map(|(name, _)| &**name).collect();
        shell.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        shell
    }
}
