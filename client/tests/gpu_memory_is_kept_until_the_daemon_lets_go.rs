//! GPU regions against a daemon that the test plays, over a real socket: when the memory may be
//! freed, what happens after a reconnection, and what loads carry.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use kvtide_client::hello::{Answer, HelloKind, SessionLimits, Welcome, recv_hello, send_answer};
use kvtide_client::protocol::{KvtideRequest, KvtideResponse, OpenedNamespace, TicketReply};
use kvtide_client::transport::server_transport;
use kvtide_client::{
    BlockKey, CallError, Client, ClientConfig, ClientError, ElementType, ExportedMemory, GpuExport,
    GpuOrder, GpuRegion, GpuUuid, IpcHandle, KvLayout, Model, Namespace, NamespaceId, NamespaceKey,
    NamespaceSpec, Outcome, RankScope, RegionLayout, StoreBlock,
};
use kvtide_tiers::block::{GpuMemory, TenantSecret};
use kvtide_tiers::catalog::{Limit, RegionId, TicketId};
use tarpc::server::{BaseChannel, Channel};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, oneshot};

const PATIENCE: Duration = Duration::from_secs(20);

type Call = (KvtideRequest, oneshot::Sender<KvtideResponse>);

/// A daemon whose every answer the test gives.
struct FakeDaemon {
    folder: tempfile::TempDir,
    calls: mpsc::UnboundedReceiver<Call>,
    hang_up: Arc<Notify>,
    // Kept for the writing ends of the clients' pipes.
    _pipes: Arc<Mutex<Vec<OwnedFd>>>,
}

impl FakeDaemon {
    fn start() -> FakeDaemon {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let (sender, calls) = mpsc::unbounded_channel();
        let (attached, hang_up) = (Arc::<AtomicU64>::default(), Arc::<Notify>::default());
        let pipes = Arc::<Mutex<Vec<OwnedFd>>>::default();
        let daemon =
            FakeDaemon { folder, calls, hang_up: Arc::clone(&hang_up), _pipes: Arc::clone(&pipes) };
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (sender, attached) = (sender.clone(), Arc::clone(&attached));
                let (hang_up, pipes) = (Arc::clone(&hang_up), Arc::clone(&pipes));
                tokio::spawn(async move {
                    if greet(&stream, &attached, &pipes).await {
                        tokio::select! {
                            () = serve(stream, sender) => {}
                            () = hang_up.notified() => {}
                        }
                    }
                });
            }
        });
        daemon
    }

    fn config(&self) -> ClientConfig {
        ClientConfig {
            backoff: Duration::from_millis(10),
            ..ClientConfig::new(self.folder.path().join("s"))
        }
    }

    /// The next call that comes in.
    async fn next(&mut self) -> Call {
        tokio::time::timeout(PATIENCE, self.calls.recv()).await.expect("a call comes").unwrap()
    }

    /// Answers the next call, which is a registration.
    async fn register(&mut self, answer: Result<RegionId, CallError>) -> GpuMemory {
        let (call, reply) = self.next().await;
        let KvtideRequest::RegisterGpuRegion { spec } = call else { panic!("{call:?}") };
        reply.send(KvtideResponse::RegisterGpuRegion(answer)).unwrap();
        spec.memory
    }

    async fn unregister(&mut self, id: u64) -> oneshot::Sender<KvtideResponse> {
        let (call, reply) = self.next().await;
        let KvtideRequest::UnregisterRegion { region } = call else { panic!("{call:?}") };
        assert_eq!(region, RegionId(id));
        reply
    }
}

async fn greet(stream: &UnixStream, attached: &AtomicU64, pipes: &Mutex<Vec<OwnedFd>>) -> bool {
    let (hello, fd) = recv_hello(stream).await.unwrap();
    let mut welcome =
        Welcome { session: 1, token: [2; 16], fd: 0, limits: SessionLimits::default() };
    welcome.limits.calls_in_flight = 64;
    welcome.limits.keys_per_call = 64;
    if let HelloKind::Attach { .. } = hello.kind {
        assert!(fd.is_some(), "an attach hello carries a descriptor");
        welcome.fd = 1 + attached.fetch_add(1, Ordering::SeqCst);
        send_answer(stream, &Answer::Welcome(welcome), None).await.unwrap();
        return false;
    }
    let (theirs, ours) = std::io::pipe().unwrap();
    pipes.lock().unwrap().push(ours.into());
    send_answer(stream, &Answer::Welcome(welcome), Some(theirs.as_fd())).await.unwrap();
    true
}

async fn serve(stream: UnixStream, sender: mpsc::UnboundedSender<Call>) {
    let channel = BaseChannel::with_defaults(server_transport(stream));
    let mut requests = std::pin::pin!(channel.requests());
    while let Some(Ok(request)) = requests.next().await {
        let sender = sender.clone();
        let answer = tarpc::server::serve(move |_, call| async move {
            let (reply, answered) = oneshot::channel();
            drop(sender.send((call, reply)));
            // A call that the test does not answer is open for as long as its client waits.
            match answered.await {
                Ok(answer) => Ok(answer),
                Err(_) => std::future::pending().await,
            }
        });
        tokio::spawn(request.execute(answer));
    }
}

/// Says when it is dropped: what frees the memory, in place of the driver.
struct Keeper(Arc<AtomicU64>);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn keeper() -> (Keeper, Arc<AtomicU64>) {
    let freed = Arc::<AtomicU64>::default();
    (Keeper(Arc::clone(&freed)), freed)
}

async fn wait_until(what: &str, is: impl Fn() -> bool) {
    let until = tokio::time::Instant::now() + PATIENCE;
    while !is() {
        assert!(tokio::time::Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn ipc() -> ExportedMemory {
    ExportedMemory::Ipc { handle: IpcHandle([3; 64]), offset: 4096 }
}

fn vmm() -> ExportedMemory {
    let fd = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
    ExportedMemory::Vmm { fd, allocation_bytes: 2 << 20, offset: 4096 }
}

fn export(memory: ExportedMemory, events: usize) -> GpuExport {
    let order = match events {
        0 => GpuOrder::EngineSynchronizes,
        count => GpuOrder::Events { handles: vec![IpcHandle([4; 64]); count] },
    };
    GpuExport { gpu: GpuUuid([5; 16]), memory, bytes: 16 * 4096, order }
}

async fn registered(
    client: &Client,
    daemon: &mut FakeDaemon,
    export: GpuExport,
    keep: Keeper,
) -> GpuRegion {
    let layout = RegionLayout::opaque(16, 4096);
    let register = client.register_gpu_region(export, layout, keep);
    let (region, _) = tokio::join!(register, daemon.register(Ok(RegionId(5))));
    region.unwrap()
}

#[tokio::test]
async fn it_is_freed_when_the_daemon_has_let_go_and_not_before() {
    let mut daemon = FakeDaemon::start();
    let client = Client::connect(daemon.config()).await.unwrap();
    let (keep, freed) = keeper();
    let region = registered(&client, &mut daemon, export(ipc(), 0), keep).await;
    let other = region.clone();
    drop(region);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(daemon.calls.try_recv().is_err(), "a clone keeps it registered");
    drop(other);
    let reply = daemon.unregister(5).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(freed.load(Ordering::SeqCst), 0, "the daemon still has it imported");
    reply.send(KvtideResponse::UnregisterRegion(Ok(()))).unwrap();
    wait_until("the memory is freed", || freed.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn time_alone_does_not_free_it_and_the_end_of_the_connection_does() {
    let mut daemon = FakeDaemon::start();
    let config = ClientConfig { call_timeout: Duration::from_millis(200), ..daemon.config() };
    let client = Client::connect(config).await.unwrap();
    let (keep, freed) = keeper();
    let region = registered(&client, &mut daemon, export(ipc(), 0), keep).await;
    let start = std::time::Instant::now();
    drop(region);
    let silent = daemon.unregister(5).await;
    // A daemon that is silent, or that says that the GPU is stuck, is asked again.
    let stuck = daemon.unregister(5).await;
    assert!(start.elapsed() >= Duration::from_millis(200), "after {:?}", start.elapsed());
    let error = CallError::Internal("the GPU has not let go".into());
    drop(stuck.send(KvtideResponse::UnregisterRegion(Err(error))));
    let _asked = daemon.unregister(5).await;
    assert_eq!(freed.load(Ordering::SeqCst), 0, "the daemon may have it imported");
    drop(silent);
    daemon.hang_up.notify_waiters();
    wait_until("the memory is freed", || freed.load(Ordering::SeqCst) == 1).await;
}

#[test]
fn what_nobody_can_wait_for_any_more_is_leaked_and_not_freed() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (freed, _others) = runtime.block_on(async {
        let mut daemon = FakeDaemon::start();
        let client = Client::connect(daemon.config()).await.unwrap();
        let (keep, freed) = keeper();
        drop(registered(&client, &mut daemon, export(ipc(), 0), keep).await);
        let unanswered = daemon.unregister(5).await;
        (freed, (daemon, client, unanswered))
    });
    drop(runtime);
    assert_eq!(freed.load(Ordering::SeqCst), 0);
    assert_eq!(Arc::strong_count(&freed), 2, "what frees it was not dropped");
}

#[tokio::test]
async fn what_is_refused_is_freed_at_once() {
    let mut daemon = FakeDaemon::start();
    let client = Client::connect(daemon.config()).await.unwrap();
    let (keep, freed) = keeper();
    let layout = RegionLayout::opaque(16, 4096);
    let register = client.register_gpu_region(export(vmm(), 0), layout, keep);
    let refusal = Err(CallError::NotFound("GPU-x is none of the daemon's GPUs".into()));
    let (refused, memory) = tokio::join!(register, daemon.register(refusal));
    assert!(matches!(refused, Err(ClientError::Call(CallError::NotFound(_)))), "{refused:?}");
    let sent = GpuMemory::Vmm { fd: 1, allocation_bytes: 2 << 20, offset: 4096 };
    assert_eq!(memory, sent, "by the number that the daemon gave the descriptor");
    assert_eq!(freed.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn unregistering_waits_and_says_whether_the_daemon_let_go() {
    let mut daemon = FakeDaemon::start();
    let config = ClientConfig { call_timeout: Duration::from_millis(400), ..daemon.config() };
    let client = Client::connect(config).await.unwrap();
    let (keep, freed) = keeper();
    let region = registered(&client, &mut daemon, export(ipc(), 0), keep).await;
    let let_go = async {
        let reply = daemon.unregister(5).await;
        reply.send(KvtideResponse::UnregisterRegion(Ok(()))).unwrap();
    };
    let (ended, ()) = tokio::join!(client.unregister_gpu_region(&region), let_go);
    ended.unwrap();
    drop(region);
    assert_eq!(freed.load(Ordering::SeqCst), 1, "nobody has to be waited for any more");

    let (keep, _) = keeper();
    let region = registered(&client, &mut daemon, export(ipc(), 0), keep).await;
    let stuck = async {
        let reply = daemon.unregister(5).await;
        let error = CallError::Internal("the GPU has not let go".into());
        reply.send(KvtideResponse::UnregisterRegion(Err(error))).unwrap();
    };
    let (ended, ()) = tokio::join!(client.unregister_gpu_region(&region), stuck);
    assert!(matches!(ended, Err(ClientError::Deadline { after_ms: 400 })), "{ended:?}");
    // The daemon is asked on, and who waits again hears of its answer.
    let answers = async {
        loop {
            let reply = daemon.unregister(5).await;
            drop(reply.send(KvtideResponse::UnregisterRegion(Ok(()))));
        }
    };
    tokio::select! {
        ended = client.unregister_gpu_region(&region) => ended.unwrap(),
        () = answers => unreachable!("it answers for ever"),
    }
}

#[tokio::test]
async fn unregistering_waits_for_an_import_that_is_under_way() {
    let mut daemon = FakeDaemon::start();
    let client = Client::connect(daemon.config()).await.unwrap();
    let (keep, freed) = keeper();
    let region = registered(&client, &mut daemon, export(vmm(), 0), keep).await;
    daemon.hang_up.notify_waiters();
    let (call, import) = daemon.next().await;
    assert!(matches!(call, KvtideRequest::RegisterGpuRegion { .. }), "{call:?}");
    let ended = std::sync::atomic::AtomicBool::new(false);
    let unregister = async {
        let result = client.unregister_gpu_region(&region).await;
        ended.store(true, Ordering::SeqCst);
        result
    };
    let rest = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!ended.load(Ordering::SeqCst), "the daemon may import it at any moment");
        import.send(KvtideResponse::RegisterGpuRegion(Ok(RegionId(9)))).unwrap();
        let reply = daemon.unregister(9).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!ended.load(Ordering::SeqCst), "the daemon has it imported");
        reply.send(KvtideResponse::UnregisterRegion(Ok(()))).unwrap();
    };
    let (result, ()) = tokio::join!(unregister, rest);
    result.unwrap();
    drop(region);
    assert_eq!(freed.load(Ordering::SeqCst), 1, "nobody has to be waited for any more");
}

#[tokio::test]
async fn a_refusal_after_a_reconnection_is_not_the_last_word() {
    let mut daemon = FakeDaemon::start();
    let client = Client::connect(daemon.config()).await.unwrap();
    let (keep, _) = keeper();
    let region = registered(&client, &mut daemon, export(ipc(), 0), keep).await;
    daemon.hang_up.notify_waiters();
    for refusal in [
        CallError::Busy(Limit::Regions),
        CallError::Invalid("the GPU has no memory left".into()),
        CallError::NotFound("descriptor 2; it was used, expired, or never sent".into()),
    ] {
        daemon.register(Err(refusal)).await;
    }
    daemon.register(Ok(RegionId(9))).await;
    // What was refused is not waited for.
    let let_go = async {
        let reply = daemon.unregister(9).await;
        reply.send(KvtideResponse::UnregisterRegion(Ok(()))).unwrap();
    };
    let (ended, ()) = tokio::join!(client.unregister_gpu_region(&region), let_go);
    ended.unwrap();
}

#[tokio::test]
async fn it_is_registered_again_and_a_stuck_gpu_holds_up_nothing_else() {
    let mut daemon = FakeDaemon::start();
    let client = Client::connect(daemon.config()).await.unwrap();
    let (keep, freed) = keeper();
    let region = registered(&client, &mut daemon, export(vmm(), 0), keep).await;
    daemon.hang_up.notify_waiters();
    let (call, again) = daemon.next().await;
    let KvtideRequest::RegisterGpuRegion { spec } = call else { panic!("{call:?}") };
    let sent = GpuMemory::Vmm { fd: 2, allocation_bytes: 2 << 20, offset: 4096 };
    assert_eq!(spec.memory, sent, "the descriptor was sent again");
    // The import takes its time; the connection is there for everything else.
    wait_until("the client is connected", || client.is_connected()).await;
    let answer = async {
        let (call, reply) = daemon.next().await;
        assert!(matches!(call, KvtideRequest::Version { .. }), "{call:?}");
        let version = kvtide_client::VersionInfo { daemon: "fake".into(), protocol: 2, session: 1 };
        reply.send(KvtideResponse::Version(version)).unwrap();
    };
    let (version, ()) = tokio::join!(client.version(), answer);
    version.unwrap();
    // A GPU that is not ready is asked again.
    let busy = CallError::Internal("the GPU has not imported the memory in time".into());
    again.send(KvtideResponse::RegisterGpuRegion(Err(busy))).unwrap();
    daemon.register(Ok(RegionId(9))).await;
    drop(region);
    let reply = daemon.unregister(9).await;
    assert_eq!(freed.load(Ordering::SeqCst), 0);
    reply.send(KvtideResponse::UnregisterRegion(Ok(()))).unwrap();
    // What became of the import that took too long, only the end of the connection tells.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(freed.load(Ordering::SeqCst), 0, "the first import may be there yet");
    daemon.hang_up.notify_waiters();
    wait_until("the memory is freed", || freed.load(Ordering::SeqCst) == 1).await;
}

fn namespace() -> Namespace {
    Namespace {
        model: Model { weights: "w".into(), revision: String::new(), adapter: String::new() },
        layout: KvLayout {
            layers: 1,
            kv_heads: 1,
            head_dim: 1,
            element: ElementType::Bf16,
            tokens_per_block: 4,
            kv_group: 0,
            ranks: RankScope::SameOnAll,
            page_layout_version: 1,
        },
        salt: String::new(),
    }
}

#[tokio::test]
async fn stores_name_their_event_which_is_taken_until_they_have_ended() {
    let mut daemon = FakeDaemon::start();
    let client = Client::connect(daemon.config()).await.unwrap();
    let spec = NamespaceSpec::own(namespace());
    let open = async {
        let (_, reply) = daemon.next().await;
        let key = NamespaceKey::derive(&TenantSecret([1; 32]), &namespace());
        let opened = OpenedNamespace { id: NamespaceId(1), key };
        reply.send(KvtideResponse::OpenNamespace(Ok(opened))).unwrap();
    };
    let (space, ()) = tokio::join!(client.open_namespace(&spec), open);
    let space = space.unwrap();
    let (keep, _) = keeper();
    let region = registered(&client, &mut daemon, export(ipc(), 2), keep).await;
    let block = StoreBlock {
        key: BlockKey([7; 32]),
        parent: BlockKey::ROOT,
        position: 0,
        tokens: 4,
        place: 3,
    };
    let event = region.next_event().unwrap();
    assert_eq!(event.number(), 0);
    let (behind, blocks) = (region.after(event), [block]);
    let store = client.store(&space, 0, &behind, &blocks, Duration::ZERO);
    let take = async {
        let (call, reply) = daemon.next().await;
        let KvtideRequest::Store { store, .. } = call else { panic!("{call:?}") };
        assert_eq!((store.after_event, store.region), (Some(0), RegionId(5)));
        reply.send(KvtideResponse::Store(Ok(TicketReply::Pending(TicketId(1))))).unwrap();
    };
    let (ticket, ()) = tokio::join!(store, take);
    drop(behind);
    let other = region.next_event().unwrap();
    assert_eq!(other.number(), 1);
    assert_eq!(region.next_event(), None, "0 may be waited for");
    let wait = client.wait(ticket, PATIENCE);
    let end = async {
        let (call, reply) = daemon.next().await;
        assert!(matches!(call, KvtideRequest::Wait { .. }), "{call:?}");
        let end = kvtide_client::protocol::TicketEnd {
            ticket: TicketId(1),
            outcomes: Some(vec![Outcome::Stored]),
        };
        reply.send(KvtideResponse::Wait(Ok(vec![end]))).unwrap();
    };
    let (outcomes, ()) = tokio::join!(wait, end);
    assert_eq!(outcomes.unwrap(), [Outcome::Stored]);
    assert_eq!(region.next_event().map(|event| event.number()), Some(0));
    assert!(region.places_in_doubt().is_empty());
}
