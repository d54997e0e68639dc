//! Clients that send garbage, lie, or ask for too much: each gets a clear answer or loses its
//! connection, and everybody else is served as before.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::time::{Duration, Instant};

use kvtide_client::hello::{
    ANSWER_BYTES, Answer, Hello, HelloKind, encode_hello, recv_answer, send_hello,
};
use kvtide_client::protocol::{
    CallError, FRAME_BYTES_MAX, KvtideRequest, NamespaceSpec, OpenedNamespace, TicketReply,
    WireForget, WireInspect, WireLoad, WirePrefix, WireStore, pack_keys,
};
use kvtide_client::{
    BlockKey, LeaseId, MissReason, NamespaceId, Outcome, PinId, Plane, RegionLayout, SharedMemory,
    Tier,
};
use kvtide_tests::{Daemon, Door, Footprint, KvPool, Peer, Setup, context, namespace, tokens};
use kvtide_tiers::catalog::{Hints, Limit, Refusal, RegionId, TicketId};
use rustix::fs::{MemfdFlags, SealFlags};
use serde::Serialize;
use tarpc::tokio_serde::Serializer;
use tarpc::tokio_serde::formats::Bincode;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const BLOCKS: u32 = 4;
const BLOCK_BYTES: u32 = 16 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon, and the well-behaved client that must not notice anything.
struct Stage {
    daemon: Daemon,
    good: KvPool,
    round: u32,
}

impl Stage {
    fn new() -> Stage {
        let daemon = Setup::new(NODE).start();
        let good = KvPool::open(daemon.client(), "good", BLOCKS, BLOCK_BYTES).unwrap();
        Stage { daemon, good, round: 0 }
    }

    /// The daemon serves: a prompt is stored, found and loaded over a connection that has been
    /// there all the time, and a new client is let in.
    fn assert_serves(&mut self, after: &str) {
        self.daemon.assert_healthy();
        self.round += 1;
        let keys = self.good.keys(self.round, BLOCKS);
        let stored = self.good.store(&keys, keys.len(), PATIENCE);
        assert_eq!(stored, [Outcome::Stored; BLOCKS as usize], "after {after}");
        let loaded = self.good.load(&keys, PATIENCE);
        assert_eq!(loaded, [Outcome::Loaded(Tier::Host); BLOCKS as usize], "after {after}");
        assert_eq!(self.good.client.counters().connections, 1, "after {after}");
        drop(self.daemon.client());
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.daemon.setup().socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A connection whose hello is through.
    fn session(&self) -> UnixStream {
        let mut stream = self.connect();
        stream.write_all(&encode_hello(&Hello::new(HelloKind::Session, "hostile"))).unwrap();
        let mut answer = [0; ANSWER_BYTES];
        stream.read_exact(&mut answer).unwrap();
        stream
    }

    /// What a hello is answered.
    async fn greet(&self, hello: &Hello, fd: Option<BorrowedFd<'_>>) -> (u16, String) {
        let stream = self.connect();
        stream.set_nonblocking(true).unwrap();
        let stream = tokio::net::UnixStream::from_std(stream).unwrap();
        send_hello(&stream, hello, fd).await.unwrap();
        match recv_answer(&stream).await.unwrap().0 {
            Answer::Refused { reason, message, .. } => (reason as u16, message),
            welcome => panic!("{welcome:?} for {hello:?}"),
        }
    }

    async fn peer(&self) -> Peer {
        Peer::connect(&self.daemon.setup().socket(), None).await.unwrap()
    }
}

/// Whether the daemon closed the connection; what it said before is read and dropped.
fn is_closed(mut stream: &UnixStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// Seeded bytes.
fn garbage(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (state >> 56) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn soon() -> tarpc::context::Context {
    context(Duration::from_secs(30))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_hello_is_refused() {
    let mut stage = Stage::new();
    // Nothing, and half a hello, and then silence: thrown out after a while, see below.
    let silent = stage.connect();
    let mut slow = stage.connect();
    slow.write_all(b"kvtide\r\n").unwrap();

    for seed in 0..20 {
        let mut stream = stage.connect();
        let _ = stream.write_all(&garbage(seed, 104 + seed as usize * 50));
        assert!(is_closed(&stream), "garbage of seed {seed}");
    }
    let mut short = stage.connect();
    short.write_all(&garbage(1, 10)).unwrap();
    short.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(is_closed(&short));
    stage.assert_serves("hellos of garbage");

    let old = Hello { version: 9, ..Hello::new(HelloKind::Session, "old") };
    let (code, text) = stage.greet(&old, None).await;
    assert!(code == 1 && text.contains("protocol 9"), "{code} {text}");
    let file = File::open("/dev/null").unwrap();
    let fd = Some(file.as_fd());
    let (code, text) = stage.greet(&Hello::new(HelloKind::Session, "fd"), fd).await;
    assert!(code == 6 && text.contains("no descriptor"), "{code} {text}");
    let (session, token) = (stage.good.client.session().unwrap(), [7; 16]);
    for session in [session, session + 1000] {
        let attach = Hello::new(HelloKind::Attach { session, token }, "thief");
        let (code, text) = stage.greet(&attach, fd).await;
        assert!(code == 4 && text.contains("with this token"), "{code} {text}");
    }
    let peer = stage.peer().await;
    let Door::Socket { welcome, .. } = &peer.door else { panic!("not over the socket") };
    let kind = HelloKind::Attach { session: welcome.session, token: welcome.token };
    let (code, text) = stage.greet(&Hello::new(kind, "empty"), None).await;
    assert!(code == 6 && text.contains("carries a descriptor"), "{code} {text}");

    assert!(is_closed(&silent) && is_closed(&slow), "hellos have a time limit");
    stage.assert_serves("odd hellos");
    let refused: u64 = stage.daemon.stats().1.hellos_refused.iter().map(|(_, n)| n).sum();
    assert!(refused >= 27, "{refused} are counted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_frame_ends_the_connection() {
    let mut stage = Stage::new();
    let too_long = u32::try_from(FRAME_BYTES_MAX).unwrap() + 1;
    let mut bad: Vec<(String, Vec<u8>)> = vec![
        ("a frame of 4 GiB".into(), u32::MAX.to_le_bytes().to_vec()),
        ("a frame one byte too long".into(), too_long.to_le_bytes().to_vec()),
        ("an empty frame".into(), 0u32.to_le_bytes().to_vec()),
        ("another hello".into(), encode_hello(&Hello::new(HelloKind::Session, "x")).to_vec()),
    ];
    for seed in 0..40 {
        let bytes = garbage(seed, 1 + seed as usize * 13);
        let mut frame = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
        frame.extend(bytes);
        // An enum's number that no message has, so that no seed is a request by chance.
        frame[4] = 200;
        bad.push((format!("garbage of seed {seed}"), frame));
    }
    let before = stage.daemon.stats().1.frames_bad;
    for (what, bytes) in &bad {
        let mut stream = stage.session();
        let _ = stream.write_all(bytes);
        assert!(is_closed(&stream), "{what}");
    }
    stage.assert_serves("frames of garbage");
    let counted = stage.daemon.stats().1.frames_bad - before;
    assert_eq!(counted, bad.len() as u64);

    // Frames that are announced and never come, by many at once.
    let footprint = Footprint::of(stage.daemon.pid());
    let waiting: Vec<UnixStream> = (0..50)
        .map(|_| {
            let mut stream = stage.session();
            stream.write_all(&(too_long - 1).to_le_bytes()).unwrap();
            stream.write_all(&[0; 10]).unwrap();
            stream
        })
        .collect();
    stage.assert_serves("announced frames");
    let grown = Footprint::of(stage.daemon.pid()).anon_kib.saturating_sub(footprint.anon_kib);
    println!("50 announced frames of 4 MiB cost {grown} KiB");
    drop(waiting);
    stage.assert_serves("cut frames");
    drop(stage.good);
    stage.daemon.wait_idle(0, PATIENCE).unwrap();
}

/// The shape of a request on the wire, with any deadline.
#[derive(Serialize)]
enum WireMessage<T> {
    Request(WireRequest<T>),
}

#[derive(Serialize)]
struct WireRequest<T> {
    context: WireContext,
    id: u64,
    message: T,
}

#[derive(Serialize)]
struct WireContext {
    deadline: Duration,
    trace_context: tarpc::trace::Context,
}

fn request(id: u64, deadline: Duration) -> Vec<u8> {
    let trace_context = tarpc::trace::Context::default();
    let context = WireContext { deadline, trace_context };
    let message = KvtideRequest::Version {};
    let message = WireMessage::Request(WireRequest { context, id, message });
    let mut codec = Bincode::<(), WireMessage<KvtideRequest>>::default();
    let bytes = Pin::new(&mut codec).serialize(&message).unwrap();
    let mut frame = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
    frame.extend(bytes);
    frame
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_of_centuries_and_of_nothing_are_served_or_dropped() {
    let mut stage = Stage::new();
    let year = Duration::from_secs(365 * 86_400);
    for (id, deadline) in [3 * year, 300 * year, Duration::MAX].into_iter().enumerate() {
        let mut stream = stage.session();
        stream.write_all(&request(id as u64, deadline)).unwrap();
        let mut head = [0; 4];
        stream.read_exact(&mut head).unwrap_or_else(|error| panic!("{deadline:?}: {error}"));
        assert!(u32::from_le_bytes(head) > 0, "answered, deadline {deadline:?}");
        stage.assert_serves("a deadline of centuries");
    }
    let mut stream = stage.session();
    for id in 0..100 {
        stream.write_all(&request(id, Duration::ZERO)).unwrap();
    }
    // The same number twice, while the first may still be under way.
    for _ in 0..100 {
        let _ = stream.write_all(&request(1, year));
    }
    stage.assert_serves("deadlines that are over and numbers that repeat");
}

/// A session with a namespace and a region of its own.
struct Liar {
    peer: Peer,
    space: OpenedNamespace,
    region: RegionId,
    _memory: SharedMemory,
}

impl Liar {
    async fn new(stage: &Stage) -> Liar {
        let peer = stage.peer().await;
        let spec = NamespaceSpec::own(namespace("liar"));
        let space = peer.stub.open_namespace(soon(), spec).await.unwrap().unwrap();
        let (memory, region) = peer.region(BLOCKS, BLOCK_BYTES.into()).await;
        Liar { peer, space, region, _memory: memory }
    }

    fn keys(&self) -> Vec<BlockKey> {
        self.space.key.chain(&tokens(1, BLOCKS), 4)
    }

    async fn load(
        &self,
        lease: u64,
        region: RegionId,
        places: &[u32],
    ) -> Result<TicketReply, CallError> {
        let keys = pack_keys(self.keys().iter().take(places.len()));
        let (lease, namespace, places) = (LeaseId(lease), self.space.id, places.to_vec());
        let (after_event, hints) = (None, Hints::default());
        let load = WireLoad { lease, namespace, region, after_event, keys, places, hints };
        self.peer.stub.load(soon(), load, 10_000).await.unwrap()
    }

    async fn store(&self, blocks: &[(u32, u32, u32)]) -> Result<TicketReply, CallError> {
        let keys = self.keys();
        let store = WireStore {
            namespace: self.space.id,
            conversation: 0,
            region: self.region,
            after_event: None,
            keys: pack_keys(&keys),
            parents: pack_keys(std::iter::once(&BlockKey::ROOT).chain(&keys).take(keys.len())),
            blocks: blocks.to_vec(),
            hints: Hints::default(),
        };
        self.peer.stub.store(soon(), store, 10_000).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lies_in_good_frames_are_named() {
    let mut stage = Stage::new();
    let liar = Liar::new(&stage).await;
    fn refused<T>(why: Refusal) -> Result<T, CallError> {
        Err(CallError::Refused(why))
    }
    let lease = 1 << 40;
    for places in [[BLOCKS, 0], [0, u32::MAX]] {
        let answer = liar.load(lease, liar.region, &places).await;
        assert_eq!(answer, refused(Refusal::PlaceOutOfRange));
    }
    let answer = liar.load(lease, RegionId(1 << 40), &[0]).await;
    assert_eq!(answer, refused(Refusal::UnknownRegion));
    let answer = liar.load(lease, liar.region, &[0, 1]).await;
    let missed = vec![Outcome::Missed(MissReason::Lease); 2];
    assert_eq!(answer, Ok(TicketReply::Ended(missed)));
    let answer = liar.store(&[(0, 4, 0), (1, 4, 1), (2, 4, 2), (3, 4, BLOCKS)]).await;
    assert_eq!(answer, refused(Refusal::PlaceOutOfRange));
    let answer = liar.store(&[(0, 4, 0)]).await;
    assert!(matches!(&answer, Err(CallError::Invalid(text)) if text.contains("one parent")));
    // Positions and token counts that contradict each other.
    let max = u32::MAX;
    let answer = liar.store(&[(max, max, 0), (max, 0, 1), (0, max, 2), (7, 4, 3)]).await;
    assert!(matches!(&answer, Err(CallError::Invalid(text)) if text.contains("0 tokens")));
    let answer = liar.store(&[(max, max, 0), (max, 1, 1), (0, max, 2), (7, 4, 3)]).await;
    assert!(answer.is_ok(), "{answer:?}");
    stage.assert_serves("lies about places");

    let (stub, space, none) = (&liar.peer.stub, liar.space.id, Hints::default());
    let prefix = |keys: &[BlockKey]| WirePrefix { namespace: space, keys: pack_keys(keys) };
    let many = vec![BlockKey([9; 32]); 16_385];
    let answer = stub.lookup(soon(), vec![prefix(&many)], 1000, none).await.unwrap();
    assert_eq!(answer, refused(Refusal::TooManyKeys));
    let half = vec![prefix(&many[..10_000]), prefix(&many[..10_000])];
    assert_eq!(stub.lookup(soon(), half, 0, none).await.unwrap(), refused(Refusal::TooManyKeys));
    let unequal = vec![prefix(&many[..2]), prefix(&many[..3])];
    let answer = stub.lookup(soon(), unequal, 0, none).await.unwrap();
    assert_eq!(answer, refused(Refusal::UnequalPrefixes));
    let answer = stub.touch(soon(), prefix(&many), none).await.unwrap();
    assert_eq!(answer, refused(Refusal::TooManyKeys));
    let torn = WirePrefix { namespace: space, keys: vec![1; 33].into() };
    let answer = stub.touch(soon(), torn, none).await.unwrap();
    assert!(matches!(&answer, Err(CallError::Invalid(text)) if text.contains("multiple of 32")));
    let foreign = WirePrefix { namespace: NamespaceId(max), keys: pack_keys(&many[..1]) };
    let answer = stub.lookup(soon(), vec![foreign.clone()], 0, none).await.unwrap();
    assert!(matches!(answer, Err(CallError::NotAllowed(_))), "{answer:?}");
    let answer = stub.forget(soon(), WireForget::Keys(foreign)).await.unwrap();
    assert!(matches!(answer, Err(CallError::NotFound(_))), "{answer:?}");
    let answer = stub.unpin(soon(), PinId(1 << 40)).await.unwrap();
    assert_eq!(answer, refused(Refusal::UnknownPin));
    let answer = stub.release(soon(), (0..5000).map(LeaseId).collect()).await.unwrap();
    assert_eq!(answer, Ok(0));
    let strange = (0..256).map(|id| TicketId(1_000_000 + id)).collect();
    let ends = stub.wait(soon(), strange, 1000).await.unwrap().unwrap();
    assert!(ends.iter().all(|end| end.outcomes.is_none()));
    let query = WireInspect { key_prefix: vec![0; 33].into(), ..WireInspect::default() };
    let answer = stub.inspect(soon(), query).await.unwrap();
    assert!(matches!(answer, Err(CallError::Invalid(_))), "{answer:?}");
    let query = WireInspect { cursor: max, limit: max, ..WireInspect::default() };
    assert!(stub.inspect(soon(), query).await.unwrap().is_ok());
    stage.assert_serves("lies about keys");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_much_is_busy_and_not_queued() {
    let mut stage = Stage::new();
    let liar = Liar::new(&stage).await;
    let stub = &liar.peer.stub;
    let stored = liar.store(&[(0, 4, 0), (1, 4, 1), (2, 4, 2), (3, 4, 3)]).await;
    assert_eq!(stored, Ok(TicketReply::Ended(vec![Outcome::Stored; BLOCKS as usize])));

    let prefix = WirePrefix { namespace: liar.space.id, keys: pack_keys(&liar.keys()) };
    let mut leases = 0;
    let busy = loop {
        match stub.lookup(soon(), vec![prefix.clone()], 600_000, Hints::default()).await.unwrap() {
            Ok(reply) => leases += u32::from(reply.lease.is_some()),
            Err(error) => break error,
        }
        assert!(leases <= 1024, "more leases than the limit");
    };
    assert_eq!((leases, busy), (1024, CallError::Busy(Limit::Leases)));

    // Regions: the limit holds, whatever numbers are given back.
    let layout = RegionLayout::opaque(1, 4096);
    let memory = SharedMemory::create("kvtide-test", 4096).unwrap();
    let mut regions = 1;
    let busy = loop {
        match liar.peer.register(memory.fd(), layout.clone()).await {
            Ok(_) => regions += 1,
            Err(error) => break error,
        }
        for strange in [0, 1 << 40, u64::MAX] {
            let _ = stub.unregister_region(soon(), RegionId(strange)).await.unwrap();
        }
        assert!(regions <= 64, "more regions than the limit");
    };
    assert_eq!((regions, busy), (64, CallError::Busy(Limit::Regions)));

    // Descriptors that no region uses.
    let mut waiting = 0;
    let refused = loop {
        match liar.peer.attach(memory.fd()).await {
            Ok(_) => waiting += 1,
            Err(error) => break error.to_string(),
        }
        assert!(waiting <= 8, "more descriptors than the limit");
    };
    assert_eq!(waiting, 8);
    assert!(refused.contains("8 descriptors wait"), "{refused}");

    // Calls in flight: those beyond the limit are answered at once.
    let mut calls = tokio::task::JoinSet::new();
    let start = Instant::now();
    for _ in 0..400 {
        let stub = liar.peer.stub.clone();
        calls.spawn(async move {
            stub.prefetch(
                soon(),
                WirePrefix { namespace: NamespaceId(0), keys: Vec::new().into() },
                500,
                Hints::default(),
            )
            .await
            .is_ok()
        });
    }
    let answers = calls.join_all().await;
    println!("400 calls at once: {:?}", start.elapsed());
    assert_eq!(answers.len(), 400);
    stage.assert_serves("too much of everything");

    drop(liar);
    drop(stage.good);
    stage.daemon.wait_idle(0, PATIENCE).unwrap();
    stage.daemon.assert_healthy();
}

/// A memfd of this size with these seals.
fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("hostile", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_region_is_refused_with_the_reason() {
    let mut stage = Stage::new();
    let liar = Liar::new(&stage).await;
    let good = || RegionLayout::opaque(4, 4096);
    let plane = |offset, block_stride, row_bytes| Plane {
        offset,
        block_stride,
        rows: 1,
        row_stride: row_bytes,
        row_bytes,
    };
    let planes = |planes: Vec<Plane>| RegionLayout { blocks: 4, planes };
    let sealed = || memfd(16_384, SealFlags::SHRINK);
    let (pipe, _write_end) = rustix::pipe::pipe().unwrap();
    let mut disk = tempfile::tempfile().unwrap();
    disk.write_all(&[0; 16_384]).unwrap();
    let huge = RegionLayout::opaque(u32::MAX, u64::MAX / 2);
    let cases: Vec<(&str, OwnedFd, RegionLayout, &str)> = vec![
        ("a pipe", pipe, good(), "memfd"),
        ("a file on a disk", disk.into(), good(), "memfd"),
        ("/dev/zero", File::open("/dev/zero").unwrap().into(), good(), "memfd"),
        ("a memfd that may shrink", memfd(16_384, SealFlags::GROW), good(), "F_SEAL_SHRINK"),
        (
            "a memfd that may not be written",
            memfd(16_384, SealFlags::SHRINK | SealFlags::WRITE),
            good(),
            "cannot be mapped",
        ),
        ("an empty memfd", memfd(0, SealFlags::SHRINK), good(), "0 bytes"),
        ("a memfd one page too small", memfd(12_288, SealFlags::SHRINK), good(), "12288 bytes"),
        ("no blocks", sealed(), RegionLayout::opaque(0, 4096), "no blocks"),
        ("no planes", sealed(), planes(Vec::new()), "no planes"),
        (
            "planes that overlap",
            sealed(),
            planes(vec![plane(0, 4096, 4096), plane(0, 4096, 4096)]),
            "overlap",
        ),
        ("blocks that overlap", sealed(), planes(vec![plane(0, 2048, 4096)]), "overlap"),
        ("rows of nothing", sealed(), planes(vec![plane(0, 4096, 0)]), "row_bytes"),
        (
            "offsets that overflow",
            sealed(),
            planes(vec![plane(u64::MAX, u64::MAX, u64::MAX)]),
            "overflow",
        ),
        ("blocks beyond 64 bits", sealed(), huge, "overflow"),
        ("too many planes", sealed(), planes(vec![plane(0, 4096, 1); 5000]), "4096"),
    ];
    for (what, fd, layout, reason) in cases {
        let answer = liar.peer.register(fd.as_fd(), layout).await;
        let Err(CallError::Invalid(text)) = answer else { panic!("{what}: {answer:?}") };
        assert!(text.contains(reason), "{what}: {text}");
    }
    let answer = liar.peer.stub.register_region(soon(), 1 << 40, good()).await.unwrap();
    assert!(matches!(answer, Err(CallError::NotFound(_))), "{answer:?}");
    stage.assert_serves("regions that are none");

    // A good region is taken, also after all that, and given back at once.
    let before = Footprint::of(stage.daemon.pid());
    let (_memory, region) = liar.peer.region(4, 4096).await;
    liar.peer.stub.unregister_region(soon(), region).await.unwrap().unwrap();
    drop(liar);
    drop(stage.good);
    stage.daemon.wait_idle(0, PATIENCE).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let after = Footprint::of(stage.daemon.pid());
    assert!(after.descriptors <= before.descriptors, "{before:?} {after:?}");
    stage.daemon.assert_healthy();
}
