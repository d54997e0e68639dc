//! The socket: made with a lock beside it, accepted by hand, so that each connection's peer is
//! known before a byte of it is parsed; then the hello, then the service.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use kvtide_client::hello::{
    Answer, Hello, HelloKind, HelloRefusal, SessionLimits, Welcome, encode_answer, recv_hello,
    send_answer,
};
use kvtide_client::protocol::{FRAME_BYTES_MAX, Kvtide, PROTOCOL_VERSION};
use kvtide_client::transport::server_transport;
use kvtide_tiers::catalog::SessionId;
use rustix::fs::{FlockOperation, flock};
use rustix::net::SendFlags;
use tarpc::server::{BaseChannel, Channel};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::{App, AppError};
use crate::config::Caller;
use crate::counters::ServiceCounters;
use crate::gpu;
use crate::service::Service;
use crate::session::{Session, Tickets, notify_pipe};

/// Longest time that a hello may take.
const HELLO_TIME: Duration = Duration::from_secs(2);

/// Connections whose hello is not through yet; further ones are closed.
const HELLOS_MAX: usize = 128;

/// The socket that clients connect to. Its file is removed when it is dropped.
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    file: (u64, u64),
    seats: Arc<Seats>,
    // Held for the lock on it.
    _lock: File,
}

impl Listener {
    /// Makes the socket. A socket file that nobody listens on is replaced. `open_to_all` makes it
    /// connectable for every user; the peer's credential then decides.
    ///
    /// # Errors
    /// Another daemon listens there, or the folder cannot be written.
    pub fn bind(path: &Path, open_to_all: bool) -> Result<Listener, AppError> {
        let refuse = |what: String| AppError::Socket { socket: path.to_owned(), what };
        make_folder(path, open_to_all).map_err(|error| {
            refuse(format!("its folder cannot be made ({error}); name another with --socket"))
        })?;
        let lock = take_lock(path).map_err(refuse)?;
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(refuse(IN_USE.to_owned()));
        }
        match std::fs::symlink_metadata(path) {
            Ok(meta) if !std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) => {
                return Err(refuse("the file there is not a socket; move it away".to_owned()));
            }
            Ok(_) => std::fs::remove_file(path)
                .map_err(|error| refuse(format!("the stale socket cannot be removed: {error}")))?,
            Err(_) => {}
        }
        let listener = UnixListener::bind(path).map_err(|error| {
            refuse(format!("{error}; check that the folder is writable, or name another path"))
        })?;
        let mode = if open_to_all { 0o666 } else { 0o600 };
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        let meta = std::fs::symlink_metadata(path)?;
        let file = (meta.dev(), meta.ino());
        let (path, seats) = (path.to_owned(), Arc::default());
        Ok(Listener { listener, path, file, seats, _lock: lock })
    }

    /// Accepts connections for as long as it is polled.
    pub async fn serve(&self, app: Arc<App>) {
        let hellos = Arc::new(Semaphore::new(HELLOS_MAX));
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            ServiceCounters::count(&app.counters.connections);
            let caller = match known(&app, &stream) {
                Ok(caller) => caller,
                Err(refused) => {
                    // An empty socket takes it at once; who does not get it is no loss.
                    let answer = encode_answer(&refusal(&app, refused));
                    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                    let _ = rustix::net::send(&stream, &answer, flags);
                    continue;
                }
            };
            let Ok(room) = Arc::clone(&hellos).try_acquire_owned() else {
                app.counters.hello_refused("too_many_hellos");
                continue;
            };
            let (app, seats) = (Arc::clone(&app), Arc::clone(&self.seats));
            tokio::spawn(async move {
                let task = connection(Arc::clone(&app), seats, stream, caller, room);
                let task = tokio::spawn(task);
                if task.await.is_err_and(|error| error.is_panic()) {
                    ServiceCounters::count(&app.counters.panics);
                    tracing::error!("a connection ended in a panic; the daemon goes on");
                }
            });
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let own = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == self.file);
        if own {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// How many sessions there are, those included that have ended and whose connection is held until
/// a GPU lets go of their memory: so that descriptors stay bounded while one is stuck.
#[derive(Default)]
struct Seats {
    taken: AtomicUsize,
}

/// One of them, given back when dropped.
struct Seat(Arc<Seats>);

impl Seats {
    /// `None` when `max` are taken.
    fn take(self: &Arc<Self>, max: usize) -> Option<Seat> {
        let more = |taken: usize| (taken < max).then_some(taken + 1);
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| Seat(Arc::clone(self)))
    }

    /// Why there is none, when `connected` of them are taken by clients that are there.
    fn full(&self, max: usize, connected: usize) -> Refused {
        let ended = self.taken.load(Ordering::Relaxed).saturating_sub(connected);
        let message = match ended {
            0 => format!("all {max} sessions are taken; raise `limits.sessions`"),
            ended => format!(
                "all {max} sessions are taken, {ended} of them by clients that are gone and whose \
                 memory is not let go of yet; `kvtide status` shows whether a GPU is stuck"
            ),
        };
        Refused(HelloRefusal::TooManySessions, message)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

const IN_USE: &str = "another daemon listens there; stop it first, or choose another --socket";

fn make_folder(path: &Path, open_to_all: bool) -> std::io::Result<()> {
    let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    let mode = if open_to_all { 0o755 } else { 0o700 };
    DirBuilder::new().recursive(true).mode(mode).create(folder)
}

/// Two daemons that start at once must not both take a stale socket for theirs.
fn take_lock(path: &Path) -> Result<File, String> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&name);
    let file = file.map_err(|error| {
        format!("its lock file cannot be made ({error}); name another path with --socket")
    })?;
    // The process before may take a moment to be gone.
    for _ in 0..10 {
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Ok(file);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(IN_USE.to_owned())
}

/// Why a hello is refused, and the sentence for the client.
struct Refused(HelloRefusal, String);

/// Who connects: the kernel knows it before a byte is read.
fn known(app: &App, stream: &UnixStream) -> Result<(Caller, i32), Refused> {
    let peer = stream.peer_cred().map_err(|error| {
        Refused(HelloRefusal::Other, format!("the kernel does not say who connects: {error}"))
    })?;
    match app.tenants().caller(peer.uid(), peer.gid()) {
        Some(caller) => Ok((caller, peer.pid().unwrap_or(0))),
        None => Err(Refused(HelloRefusal::UnknownUser, app.tenants().refusal(peer.uid()))),
    }
}

/// Counts a refusal and makes its answer.
fn refusal(app: &App, refused: Refused) -> Answer {
    let Refused(reason, message) = refused;
    app.counters.hello_refused(reason.label());
    tracing::info!(reason = reason.label(), message, "a connection was refused");
    Answer::Refused { version: PROTOCOL_VERSION, reason, message }
}

async fn connection(
    app: Arc<App>,
    seats: Arc<Seats>,
    stream: UnixStream,
    (caller, pid): (Caller, i32),
    room: OwnedSemaphorePermit,
) {
    let greeted = greet(&app, &seats, &stream, caller, pid);
    let answered = tokio::time::timeout(HELLO_TIME, greeted).await;
    drop(room);
    match answered {
        Ok(Ok(Some(guard))) => {
            serve(&guard, stream).await;
            // Waits for copies that are under way.
            let _ = tokio::task::spawn_blocking(move || drop(guard)).await;
        }
        Ok(Ok(None)) => {}
        Ok(Err(refused)) => {
            let answer = refusal(&app, refused);
            let _ = tokio::time::timeout(HELLO_TIME, send_answer(&stream, &answer, None)).await;
        }
        Err(_) => app.counters.hello_refused("timeout"),
    }
}

/// Reads the hello and answers it. `Some` for a new session.
async fn greet(
    app: &Arc<App>,
    seats: &Arc<Seats>,
    stream: &UnixStream,
    caller: Caller,
    pid: i32,
) -> Result<Option<SessionGuard>, Refused> {
    let malformed =
        |error: std::io::Error| Refused(HelloRefusal::Malformed, format!("bad hello: {error}"));
    let (hello, fd) = recv_hello(stream).await.map_err(malformed)?;
    if hello.version != PROTOCOL_VERSION {
        let message = format!(
            "the client speaks protocol {} and this daemon {PROTOCOL_VERSION}; use a client \
             library of version {}",
            hello.version,
            env!("CARGO_PKG_VERSION")
        );
        return Err(Refused(HelloRefusal::Version, message));
    }
    match hello.kind {
        HelloKind::Attach { session, token } => {
            let number = attach(app, &caller, session, token, fd)?;
            let welcome = Welcome { session, token, fd: number, limits: limits(app) };
            let _ = send_answer(stream, &Answer::Welcome(welcome), None).await;
            Ok(None)
        }
        HelloKind::Session => {
            if fd.is_some() {
                let message = "a session's hello carries no descriptor".to_owned();
                return Err(Refused(HelloRefusal::Descriptors, message));
            }
            let max = app.limits().catalog.sessions;
            let full = || seats.full(max, app.sessions().len());
            let seat = seats.take(max).ok_or_else(full)?;
            open_session(app, seat, stream, (caller, pid), hello).await.map(Some)
        }
    }
}

fn attach(
    app: &App,
    caller: &Caller,
    session: u64,
    token: [u8; 16],
    fd: Option<OwnedFd>,
) -> Result<u64, Refused> {
    let unknown = || {
        let message = format!("no session {session} with this token");
        Refused(HelloRefusal::UnknownSession, message)
    };
    let session = app.sessions().get(&SessionId(session)).cloned().ok_or_else(unknown)?;
    if session.token != token || session.caller.uid != caller.uid {
        return Err(unknown());
    }
    let fd = fd.ok_or_else(|| {
        Refused(HelloRefusal::Descriptors, "an attach hello carries a descriptor".to_owned())
    })?;
    let max = app.limits().descriptors_waiting;
    session.attach(fd, max, Instant::now()).ok_or_else(|| {
        let message = format!("{max} descriptors wait for their regions already");
        Refused(HelloRefusal::TooManyDescriptors, message)
    })
}

async fn open_session(
    app: &Arc<App>,
    seat: Seat,
    stream: &UnixStream,
    (caller, pid): (Caller, i32),
    hello: Hello,
) -> Result<SessionGuard, Refused> {
    let full = || seat.0.full(app.limits().catalog.sessions, app.sessions().len());
    let system = |error: std::io::Error| Refused(HelloRefusal::Other, error.to_string());
    let (theirs, notify) = notify_pipe().map_err(system)?;
    let held = stream.as_fd().try_clone_to_owned().map_err(system)?;
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| system(std::io::Error::other(error)))?;
    let tenant = caller.tenant.as_ref().map(|tenant| tenant.id);
    let counters = app.tenant_counters(tenant);
    let tickets = Arc::new(Tickets::new(notify, Arc::clone(&counters)));
    let notified = Arc::clone(&tickets);
    let notify = Arc::new(move |ticket, outcomes| notified.ended(ticket, outcomes));
    let tenant = tenant.unwrap_or(kvtide_tiers::catalog::TenantId(u32::MAX));
    let id = app.node().open_session(tenant, notify).map_err(|_| full())?;
    let session = Arc::new(Session::new(id, token, caller, hello.name, tickets, counters));
    let guard = SessionGuard {
        app: Arc::clone(app),
        session: Arc::clone(&session),
        pid,
        runtime: Handle::current(),
        connection: Some((held, seat)),
    };
    app.sessions().insert(id, session);
    let welcome = Welcome { session: id.0, token, fd: 0, limits: limits(app) };
    send_answer(stream, &Answer::Welcome(welcome), Some(theirs.as_fd())).await.map_err(system)?;
    let (client, uid) = (&guard.session.name, guard.session.caller.uid);
    tracing::info!(session = id.0, client, uid, pid, "a client connected");
    Ok(guard)
}

fn limits(app: &App) -> SessionLimits {
    let limits = app.limits();
    let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    SessionLimits {
        frame_bytes: u32::try_from(FRAME_BYTES_MAX).unwrap_or(u32::MAX),
        keys_per_call: count(limits.catalog.keys_per_call),
        calls_in_flight: limits.calls_in_flight,
        lease_ms_max: limits.catalog.lease_ms_max,
        tickets: count(limits.catalog.tickets_per_session),
        regions: count(limits.catalog.regions_per_session),
    }
}

/// A session that is in the list and known to the node; neither after it is dropped.
///
/// It keeps the connection open: however the connection ends here, the client sees the end of the
/// stream only after the node has closed the session, when nothing copies from or to its regions
/// any more, and has let go of its GPU memory. Clients use the memory again, or free it, as soon as
/// they see it. Should a GPU be stuck, nothing is held for its client but the open connection and
/// its seat.
struct SessionGuard {
    app: Arc<App>,
    session: Arc<Session>,
    pid: i32,
    runtime: Handle,
    // Taken when it is dropped.
    connection: Option<(OwnedFd, Seat)>,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        let id = self.session.id;
        self.app.sessions().remove(&id);
        gpu::end_session(&self.app, &self.session);
        self.app.node().close_session(id);
        if let Some(held) = self.connection.take().filter(|_| !self.session.is_off_gpus()) {
            let session = Arc::clone(&self.session);
            self.runtime.spawn(async move {
                session.off_gpus().await;
                drop(held);
            });
        }
        let client = &self.session.name;
        tracing::info!(session = id.0, client, pid = self.pid, "a client is gone");
    }
}

/// Serves calls until the client hangs up or sends what cannot be read.
async fn serve(guard: &SessionGuard, stream: UnixStream) {
    let app = &guard.app;
    let service = Service::new(Arc::clone(app), Arc::clone(&guard.session));
    let calls_max = usize::try_from(app.limits().calls_in_flight).unwrap_or(usize::MAX);
    let channel = BaseChannel::with_defaults(server_transport(stream));
    let mut requests = std::pin::pin!(channel.max_concurrent_requests(calls_max).requests());
    // On this task, which writes the answers as well: a task for each would only be handed about.
    let mut calls = FuturesUnordered::new();
    loop {
        tokio::select! {
            request = requests.next() => match request {
                Some(Ok(request)) => {
                    let service = service.for_call(&request.get().message);
                    let call = AssertUnwindSafe(request.execute(service.serve()));
                    calls.push(call.catch_unwind());
                }
                Some(Err(error)) => {
                    if !hung_up(&error) {
                        ServiceCounters::count(&app.counters.frames_bad);
                        let (session, client) = (guard.session.id.0, &guard.session.name);
                        tracing::warn!(
                            session, client, %error,
                            "a client sent what cannot be read; its connection is closed"
                        );
                    }
                    return;
                }
                None => return,
            },
            Some(ended) = calls.next(), if !calls.is_empty() => {
                if ended.is_err() {
                    ServiceCounters::count(&app.counters.panics);
                    tracing::error!("a call ended in a panic; the daemon goes on");
                }
            }
        }
    }
}

/// Whether the error is nothing but the end of the connection.
fn hung_up(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            if matches!(io.kind(), UnexpectedEof | BrokenPipe | ConnectionReset) {
                return true;
            }
            if let Some(inner) = io.get_ref()
                && hung_up(inner)
            {
                return true;
            }
        }
        // tarpc shares its errors.
        if let Some(shared) = error.downcast_ref::<Arc<std::io::Error>>() {
            return hung_up(shared.as_ref());
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_is_gone_keeps_its_seat_while_a_gpu_is_stuck() {
        let seats = Arc::<Seats>::default();
        let (stuck, there) = (seats.take(2).unwrap(), seats.take(2).unwrap());
        assert!(seats.take(2).is_none());
        let Refused(reason, full) = seats.full(2, 2);
        assert_eq!(reason, HelloRefusal::TooManySessions);
        assert!(full.contains("all 2 sessions") && full.contains("limits.sessions"), "{full}");
        drop(there);
        let there = seats.take(2).unwrap();
        let Refused(_, full) = seats.full(2, 1);
        assert!(full.contains("1 of them") && full.contains("stuck"), "{full}");
        assert!(seats.take(1).is_none(), "a limit that was lowered");
        drop((there, stuck));
        assert!(seats.take(1).is_some());
    }
}
