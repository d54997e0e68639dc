//! A connection without the client library's manners: any user, any number, any frame.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use kvtide_client::RegionLayout;
use kvtide_client::SharedMemory;
use kvtide_client::hello::{Answer, Hello, HelloKind, Welcome, recv_answer, send_hello};
use kvtide_client::protocol::{CallError, Kvtide as _, KvtideClient};
use kvtide_client::transport::client_transport;
use kvtide_daemon::app::App;
use kvtide_daemon::config::Caller;
use kvtide_daemon::service::Service;
use kvtide_daemon::session::{Session, Tickets};
use kvtide_tiers::catalog::{RegionId, TenantId};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_gid, set_thread_uid};
use tarpc::server::{BaseChannel, Channel as _};
use tokio::net::UnixStream;

/// A call's context with this much time.
pub fn context(limit: Duration) -> tarpc::context::Context {
    let mut context = tarpc::context::current();
    context.deadline = Instant::now() + limit;
    context
}

/// How a peer got in.
pub enum Door {
    /// Over the daemon's socket, as this user (`None`: the tests' own).
    Socket {
        /// The socket.
        path: PathBuf,
        /// The user.
        user: Option<u32>,
        /// What the daemon answered to the hello.
        welcome: Welcome,
        /// The eventfd.
        event: OwnedFd,
    },
    /// Into a service of this process, as a caller that the test made up.
    Inside(Arc<Session>),
}

/// One session, with the bare protocol.
pub struct Peer {
    /// The verbs.
    pub stub: KvtideClient,
    /// How it got in.
    pub door: Door,
}

impl Peer {
    /// Connects as `user`, which takes root unless it is `None`.
    ///
    /// # Errors
    /// What the socket says; a refusal is `PermissionDenied` with the daemon's sentence.
    pub async fn connect(path: &Path, user: Option<u32>) -> io::Result<Peer> {
        let stream = connect_as(path, user)?;
        let (welcome, event) = greet(&stream, HelloKind::Session, None).await?;
        let config = tarpc::client::Config::default();
        let stub = KvtideClient::new(config, client_transport(stream)).spawn();
        let event = event.ok_or(io::ErrorKind::InvalidData)?;
        Ok(Peer { stub, door: Door::Socket { path: path.to_owned(), user, welcome, event } })
    }

    /// A session of `caller` inside this process: for when the tests cannot be several users.
    ///
    /// # Panics
    /// When the node refuses the session.
    pub fn inside(app: &Arc<App>, caller: Caller) -> Peer {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let tenant = caller.tenant.as_ref().map(|tenant| tenant.id);
        let counters = app.tenant_counters(tenant);
        let event = event.expect("an eventfd can be made");
        let tickets = Arc::new(Tickets::new(event, Arc::clone(&counters)));
        let notified = Arc::clone(&tickets);
        let notify = Arc::new(move |ticket, outcomes| notified.ended(ticket, outcomes));
        let tenant = tenant.unwrap_or(TenantId(u32::MAX));
        let id = app.node().open_session(tenant, notify).expect("there is room for a session");
        let session = Session::new(id, [0; 16], caller, "inside".into(), tickets, counters);
        let session = Arc::new(session);
        app.sessions().insert(id, Arc::clone(&session));
        let (ours, theirs) = tarpc::transport::channel::unbounded();
        let service = Service::new(Arc::clone(app), Arc::clone(&session));
        tokio::spawn(BaseChannel::with_defaults(theirs).execute(service.serve()).for_each(
            |call| async move {
                tokio::spawn(call);
            },
        ));
        let stub = KvtideClient::new(tarpc::client::Config::default(), ours).spawn();
        Peer { stub, door: Door::Inside(session) }
    }

    /// Hands a descriptor over; the number that the daemon gave it.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub async fn attach(&self, fd: BorrowedFd<'_>) -> io::Result<u64> {
        match &self.door {
            Door::Inside(session) => {
                let fd = fd.try_clone_to_owned()?;
                let number = session.attach(fd, 8, Instant::now());
                number.ok_or_else(|| io::Error::other("too many descriptors"))
            }
            Door::Socket { path, user, welcome, .. } => {
                let stream = connect_as(path, *user)?;
                let kind = HelloKind::Attach { session: welcome.session, token: welcome.token };
                Ok(greet(&stream, kind, Some(fd)).await?.0.fd)
            }
        }
    }

    /// Registers whatever the descriptor is.
    ///
    /// # Errors
    /// The daemon's answer.
    ///
    /// # Panics
    /// When the descriptor could not be handed over, or no answer came.
    pub async fn register(
        &self,
        fd: BorrowedFd<'_>,
        layout: RegionLayout,
    ) -> Result<RegionId, CallError> {
        let number = self.attach(fd).await.expect("the descriptor is taken");
        let context = context(Duration::from_secs(20));
        self.stub.register_region(context, number, layout).await.expect("an answer")
    }

    /// Makes a region of `blocks` opaque blocks of `block_bytes`.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn region(&self, blocks: u32, block_bytes: u64) -> (SharedMemory, RegionId) {
        let layout = RegionLayout::opaque(blocks, block_bytes);
        let memory = SharedMemory::create("kvtide-test", layout.region_bytes());
        let memory = memory.expect("memory can be had");
        let region = self.register(memory.fd().as_fd(), layout).await.expect("a good region");
        (memory, region)
    }
}

/// Connects with the credential of `user`.
///
/// # Errors
/// What the system says.
fn connect_as(path: &Path, user: Option<u32>) -> io::Result<UnixStream> {
    let Some(user) = user else {
        let stream = StdStream::connect(path)?;
        stream.set_nonblocking(true)?;
        return UnixStream::from_std(stream);
    };
    let path = path.to_owned();
    // The credential is that of the thread that connects, at that moment.
    let connected = std::thread::spawn(move || -> io::Result<StdStream> {
        set_thread_gid(Gid::from_raw(user))?;
        set_thread_uid(Uid::from_raw(user))?;
        StdStream::connect(path)
    });
    let stream = connected.join().map_err(|_| io::Error::other("the thread panicked"))??;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

async fn greet(
    stream: &UnixStream,
    kind: HelloKind,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<(Welcome, Option<OwnedFd>)> {
    // Who may not connect is answered, and hung up on, before the hello is read.
    let sent = send_hello(stream, &Hello::new(kind, "test"), fd).await;
    match recv_answer(stream).await.map_err(|error| sent.err().unwrap_or(error))? {
        (Answer::Welcome(welcome), event) => Ok((welcome, event)),
        (Answer::Refused { message, .. }, _) => {
            Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
        }
    }
}
