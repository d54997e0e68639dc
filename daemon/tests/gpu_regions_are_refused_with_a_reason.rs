//! A daemon without GPUs, over its real socket: registrations of GPU memory are refused with what
//! is wrong, events of regions that have none too, and operators see why the tier is off.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvtide_client::hello::{Answer, Hello, HelloKind, Welcome, recv_answer, send_hello};
use kvtide_client::protocol::{CallError, KvtideClient, WireLoad, WireStore, pack_keys};
use kvtide_client::transport::client_transport;
use kvtide_client::{
    BlockKey, Client, ClientConfig, ClientError, ElementType, ExportedMemory, GPU_EVENTS_MAX,
    GpuExport, GpuOrder, GpuUuid, IpcHandle, KvLayout, Model, Namespace, NamespaceSpec, RankScope,
    RegionLayout, SharedMemory,
};
use kvtide_tiers::block::{GpuMemory, GpuRegionSpec};
use kvtide_tiers::catalog::{Hints, LeaseId, RegionId};
use tokio::net::UnixStream;

const SECOND: Duration = Duration::from_secs(1);

struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
}

impl Daemon {
    /// With this section `[device]`. The library is one that no machine has.
    async fn start(device: &str) -> Daemon {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvtided.toml");
        let text = format!(
            "[device]\nlibrary = \"/no/such/libcuda.so\"\n{device}\n\
             [limits]\nregion_bytes_per_session = \"1MiB\"\n"
        );
        std::fs::write(&file, text).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_kvtided"))
            .arg("--config")
            .arg(file)
            .arg("--socket")
            .arg(folder.path().join("s"))
            .arg("--store")
            .arg(folder.path().join("store"))
            .args(["--host-bytes", "16MiB", "--nvme-bytes", "32MiB", "--metrics", "off"])
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        let daemon = Daemon { child, folder };
        let until = Instant::now() + 20 * SECOND;
        while Client::connect(daemon.config()).await.is_err() {
            assert!(Instant::now() < until, "the daemon does not serve: {}", daemon.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn config(&self) -> ClientConfig {
        ClientConfig::new(self.socket())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    fn kvtide(&self, line: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvtide"));
        command.args(line.split_whitespace()).arg("--socket").arg(self.socket());
        command.output().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A session with the bare protocol, which checks nothing before it sends.
struct Peer {
    stub: KvtideClient,
    welcome: Welcome,
    socket: PathBuf,
}

impl Peer {
    async fn connect(socket: &Path) -> Peer {
        let (stream, welcome) = greet(socket, HelloKind::Session, None).await;
        let stub = KvtideClient::new(Default::default(), client_transport(stream)).spawn();
        Peer { stub, welcome, socket: socket.to_owned() }
    }

    async fn attach(&self, fd: BorrowedFd<'_>) -> u64 {
        let (session, token) = (self.welcome.session, self.welcome.token);
        greet(&self.socket, HelloKind::Attach { session, token }, Some(fd)).await.1.fd
    }

    /// The daemon's refusal.
    async fn refused(&self, spec: GpuRegionSpec) -> String {
        let answer = self.stub.register_gpu_region(soon(), spec).await.unwrap();
        let error = answer.expect_err("there is no GPU");
        assert!(matches!(error, CallError::Invalid(_) | CallError::NotFound(_)), "{error}");
        error.to_string()
    }
}

async fn greet(
    socket: &Path,
    kind: HelloKind,
    fd: Option<BorrowedFd<'_>>,
) -> (UnixStream, Welcome) {
    let stream = UnixStream::connect(socket).await.unwrap();
    send_hello(&stream, &Hello::new(kind, "peer"), fd).await.unwrap();
    match recv_answer(&stream).await.unwrap().0 {
        Answer::Welcome(welcome) => (stream, welcome),
        Answer::Refused { message, .. } => panic!("{message}"),
    }
}

fn soon() -> tarpc::context::Context {
    let mut context = tarpc::context::current();
    context.deadline = Instant::now() + 10 * SECOND;
    context
}

fn spec(memory: GpuMemory) -> GpuRegionSpec {
    GpuRegionSpec {
        gpu: GpuUuid([5; 16]),
        memory,
        bytes: 16 * 4096,
        layout: RegionLayout::opaque(16, 4096),
        order: GpuOrder::EngineSynchronizes,
    }
}

fn ipc(offset: u64) -> GpuMemory {
    GpuMemory::Ipc { handle: IpcHandle([3; 64]), offset }
}

#[tokio::test]
async fn each_mistake_is_named_and_takes_no_room() {
    let daemon = Daemon::start("").await;
    let peer = Peer::connect(&daemon.socket()).await;
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    let fd = peer.attach(file.as_fd()).await;
    let vmm = |fd, offset| GpuMemory::Vmm { fd, allocation_bytes: 16 * 4096 + 512, offset };
    let ring = |count| GpuOrder::Events { handles: vec![IpcHandle([4; 64]); count] };
    let mut large = spec(ipc(0));
    large.bytes = 2 << 20;
    let mut tiny = spec(ipc(0));
    tiny.layout = RegionLayout::opaque(16, 128);
    let mut outside = spec(ipc(0));
    outside.layout = RegionLayout::opaque(17, 4096);
    for (bad, text) in [
        (spec(ipc(u64::MAX)), "outside the allocation"),
        (spec(vmm(fd, 513)), "65536 bytes at offset 513 are outside the allocation of 66048"),
        (spec(vmm(fd + 1, 0)), "it was used, expired, or never sent"),
        (GpuRegionSpec { order: ring(GPU_EVENTS_MAX + 1), ..spec(ipc(0)) }, "1 to 64"),
        (GpuRegionSpec { order: ring(0), ..spec(ipc(0)) }, "a ring of 0 events"),
        (large, "limits.region_bytes_per_session"),
        (outside, "plane 0 ends at byte 69632, but the region has 65536 bytes"),
        (tiny, "blocks of 128 bytes"),
        (GpuRegionSpec { bytes: 0, ..spec(ipc(0)) }, "0 bytes"),
    ] {
        let said = peer.refused(bad).await;
        assert!(said.contains(text), "{said}");
    }
    // A good one, by its own descriptor, and again and again: each gives its room back.
    let said = peer.refused(spec(vmm(fd, 512))).await;
    assert!(said.contains("the device tier is off"), "{said}");
    let said = peer.refused(spec(vmm(fd, 512))).await;
    assert!(said.contains("it was used"), "{said}");
    for _ in 0..40 {
        let said = peer.refused(spec(ipc(0))).await;
        assert!(said.contains("the device tier is off"), "{said}");
    }
    let stats = peer.stub.stats(soon()).await.unwrap().unwrap();
    assert_eq!((stats.catalog.unwrap().regions, stats.service.unwrap().panics), (0, 0));
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
async fn a_region_of_host_memory_has_no_events() {
    let daemon = Daemon::start("enabled = false").await;
    let peer = Peer::connect(&daemon.socket()).await;
    let memory = SharedMemory::create("kvtide-test", 65536).unwrap();
    let fd = peer.attach(memory.fd()).await;
    let layout = RegionLayout::opaque(16, 4096);
    let region = peer.stub.register_region(soon(), fd, layout).await.unwrap().unwrap();
    let spec = NamespaceSpec::own(namespace());
    let space = peer.stub.open_namespace(soon(), spec).await.unwrap().unwrap();
    let key = BlockKey([7; 32]);
    let load = |region, after_event| WireLoad {
        lease: LeaseId(1),
        namespace: space.id,
        region,
        after_event,
        keys: pack_keys([&key]),
        places: vec![0],
        hints: Hints::default(),
    };
    let answer = peer.stub.load(soon(), load(region, Some(0)), 0).await.unwrap();
    assert!(answer.unwrap_err().to_string().contains("has no events"));
    let answer = peer.stub.load(soon(), load(RegionId(77), Some(0)), 0).await.unwrap();
    assert!(answer.unwrap_err().to_string().contains("UnknownRegion"));
    let store = WireStore {
        namespace: space.id,
        conversation: 0,
        region,
        after_event: Some(3),
        keys: pack_keys([&key]),
        parents: pack_keys([&BlockKey::ROOT]),
        blocks: vec![(0, 4, 0)],
        hints: Hints::default(),
    };
    let answer = peer.stub.store(soon(), store, 0).await.unwrap();
    assert!(answer.unwrap_err().to_string().contains("has no events"));
    // What is not there is gone already.
    peer.stub.unregister_region(soon(), RegionId(77)).await.unwrap().unwrap();
}

#[tokio::test]
async fn without_a_driver_it_serves_and_says_why_the_tier_is_off() {
    for (device, why, warns) in [
        ("", "", false),
        ("enabled = true", "", true),
        ("enabled = false", "turned off by the configuration", false),
    ] {
        let daemon = Daemon::start(device).await;
        let text = String::from_utf8(daemon.kvtide("status").stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("device")).unwrap().to_owned();
        assert!(line.contains("off: ") && line.contains(why), "{line}");
        assert!(line.split("off: ").nth(1).is_some_and(|why| why.trim().len() > 5), "{line}");
        let json: serde_json::Value =
            serde_json::from_slice(&daemon.kvtide("status --json").stdout).unwrap();
        assert_eq!(json["status"]["devices"], serde_json::json!([]));
        assert_eq!(json["status"]["protocol"], 5);
        assert_eq!(daemon.kvtide("ls --tier device").status.code(), Some(0));
        let warned = daemon.log().contains("`device.enabled` is true, but");
        assert_eq!(warned, warns, "{}", daemon.log());
        assert!(daemon.log().contains("device tier: off: "), "{}", daemon.log());

        let client = Client::connect(daemon.config()).await.unwrap();
        let memory = ExportedMemory::Ipc { handle: IpcHandle([3; 64]), offset: 0 };
        let (gpu, order) = (GpuUuid([5; 16]), GpuOrder::EngineSynchronizes);
        let export = GpuExport { gpu, memory, bytes: 65536, order };
        let layout = RegionLayout::opaque(16, 4096);
        let refused = client.register_gpu_region(export, layout, ()).await.unwrap_err();
        assert!(matches!(refused, ClientError::Call(CallError::NotFound(_))), "{refused}");
        assert!(refused.to_string().contains(&gpu.to_string()), "{refused}");
    }
}
