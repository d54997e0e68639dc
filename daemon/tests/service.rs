//! The real daemon over its real socket: hellos, hostile clients, signals, and what a client sees
//! when the daemon goes away and comes back.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests may panic like tests")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvtide_client::blocking::Client;
use kvtide_client::hello::{Hello, HelloKind, HelloRefusal, encode_hello};
use kvtide_client::{
    BlockKey, ClientConfig, ClientError, ElementType, ForgetWhat, Inspect, KvLayout, LoadBlock,
    Lookup, Model, Namespace, NamespaceSpec, Outcome, RankScope, RegionHandle, RegionLayout,
    StoreBlock, Tier,
};

const BLOCK: usize = 64 << 10;
const SECOND: Duration = Duration::from_secs(1);

struct Daemon {
    child: Option<Child>,
    folder: tempfile::TempDir,
    extra: Vec<String>,
}

impl Daemon {
    fn start(extra: &[&str]) -> Daemon {
        let folder = tempfile::tempdir().unwrap();
        let extra = extra.iter().map(|arg| (*arg).to_owned()).collect();
        let mut daemon = Daemon { child: None, folder, extra };
        daemon.restart();
        daemon
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvtided"));
        command
            .arg("--socket")
            .arg(self.socket())
            .arg("--store")
            .arg(self.folder.path().join("store"))
            .args(["--host-bytes", "16MiB", "--nvme-bytes", "32MiB", "--metrics", "off"])
            .args(&self.extra)
            .stderr(Stdio::null());
        command
    }

    fn restart(&mut self) {
        self.child = Some(self.command().spawn().unwrap());
        let until = Instant::now() + 20 * SECOND;
        while Client::connect(self.config()).is_err() {
            assert!(Instant::now() < until, "the daemon does not serve");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&mut self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(self.child.as_ref().unwrap());
        rustix::process::kill_process(pid, signal).unwrap();
        // Threads stop one by one; until the last one has, calls may be answered.
        while signal == rustix::process::Signal::STOP && !stopped(pid.as_raw_nonzero().get()) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait(&mut self) -> Option<i32> {
        self.child.take().unwrap().wait().unwrap().code()
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("k.sock")
    }

    fn config(&self) -> ClientConfig {
        ClientConfig { name: "test".into(), ..ClientConfig::new(self.socket()) }
    }

    fn client(&self) -> Client {
        Client::connect(self.config()).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn stopped(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.flatten().all(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        status.contains("State:\tT")
    })
}

fn spec(weights: &str) -> NamespaceSpec {
    NamespaceSpec::own(Namespace {
        model: Model { weights: weights.into(), revision: String::new(), adapter: String::new() },
        layout: KvLayout {
            layers: 1,
            kv_heads: 1,
            head_dim: 1,
            element: ElementType::Opaque,
            tokens_per_block: 4,
            kv_group: 0,
            ranks: RankScope::Rank { rank: 0, world: 1 },
            page_layout_version: 1,
        },
        salt: String::new(),
    })
}

fn bytes(place: u32) -> Vec<u8> {
    (0..BLOCK).map(|at| (at as u32).wrapping_mul(place + 7).to_le_bytes()[1]).collect()
}

/// A raw session: its hello is answered, frames can follow.
fn raw_session(daemon: &Daemon) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.set_read_timeout(Some(5 * SECOND)).unwrap();
    stream.write_all(&encode_hello(&Hello::new(HelloKind::Session, "raw"))).unwrap();
    let mut answer = [0; 80];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[10..12], [0, 0], "welcome");
    stream
}

fn closed(stream: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn bad_frames(client: &Client) -> u64 {
    client.stats().unwrap().service.expect("an operator").frames_bad
}

#[test]
fn blocks_survive_a_kill_and_handles_stay_valid() {
    let mut daemon = Daemon::start(&[]);
    let client = daemon.client();
    let namespace = client.open_namespace(&spec("a")).unwrap();
    let region = client.create_region(RegionLayout::opaque(16, BLOCK as u64)).unwrap();
    let keys = namespace.chain(&(0..32).collect::<Vec<u32>>());
    assert_eq!(client.lookup(&[(&namespace, &keys)], SECOND).blocks(), 0);
    let places: Vec<u32> = (0..8).collect();
    for place in &places {
        region.write_block(*place, &bytes(*place)).unwrap();
    }
    let stored = client.store_prefix(&namespace, 5, &region, &keys, &places, 5 * SECOND);
    assert_eq!(stored, vec![Outcome::Stored; 8]);
    let again = client.store_prefix(&namespace, 5, &region, &keys, &places, 5 * SECOND);
    assert_eq!(again, vec![Outcome::Present; 8]);
    let other: Vec<u32> = (8..16).collect();
    let loaded = client.load_prefix(&namespace, &region, &keys, &other, 5 * SECOND);
    assert_eq!(loaded.outcomes, vec![Outcome::Loaded(Tier::Host); 8]);
    let drained = client.drain(10 * SECOND).unwrap();
    assert_eq!(drained.blocks_lost, 0);
    std::thread::sleep(Duration::from_millis(300));

    daemon.signal(rustix::process::Signal::KILL);
    daemon.wait();
    let start = Instant::now();
    assert!(matches!(client.lookup(&[(&namespace, &keys)], SECOND), Lookup::Miss));
    assert!(start.elapsed() < SECOND, "a miss without a daemon takes {:?}", start.elapsed());

    daemon.restart();
    let until = Instant::now() + 10 * SECOND;
    while !client.is_connected() {
        assert!(Instant::now() < until, "the client does not reconnect");
        std::thread::sleep(Duration::from_millis(20));
    }
    for place in &other {
        region.write_block(*place, &vec![0; BLOCK]).unwrap();
    }
    let loaded = client.load_prefix(&namespace, &region, &keys, &other, 5 * SECOND);
    assert_eq!(loaded.outcomes, vec![Outcome::Loaded(Tier::Nvme); 8]);
    let mut got = vec![0; BLOCK];
    for (from, to) in places.iter().zip(&other) {
        region.read_block(*to, &mut got).unwrap();
        assert!(got == bytes(*from), "place {to}");
    }
    let loaded = client.load_prefix(&namespace, &region, &keys, &other, Duration::MAX);
    assert_eq!(loaded.blocks, 8, "a deadline beyond all clocks is shortened");
    assert_eq!(client.inspect(&Inspect::default()).unwrap().rows.len(), 8);
    let id = namespace.id().unwrap();
    assert_eq!(client.namespaces().unwrap()[0].id, id);
    assert_eq!(client.forget(&ForgetWhat::Namespace(id)).unwrap(), 8);
    assert_eq!(client.lookup(&[(&namespace, &keys)], SECOND).blocks(), 0);
}

#[test]
fn hostile_clients_lose_their_connection_and_nothing_else() {
    let daemon = Daemon::start(&[]);
    let client = daemon.client();
    let limit = 4 << 20;
    let frames: [(&str, Vec<u8>); 3] = [
        ("garbage", [&8u32.to_le_bytes()[..], &[0xFF; 8]].concat()),
        ("oversized", u32::to_le_bytes(limit + 1).to_vec()),
        ("empty", vec![0; 4]),
    ];
    for (number, (name, frame)) in frames.iter().enumerate() {
        let mut stream = raw_session(&daemon);
        stream.write_all(frame).unwrap();
        assert!(closed(&mut stream), "{name}");
        let until = Instant::now() + 5 * SECOND;
        while bad_frames(&client) < number as u64 + 1 {
            assert!(Instant::now() < until, "{name} is not counted");
        }
    }
    // A request whose deadline is 2^60 seconds away: answered, and nobody panics.
    let mut stream = raw_session(&daemon);
    let varint = |value: u64| [&[253u8][..], &value.to_le_bytes()].concat();
    let mut message = vec![0u8]; // a request
    message.extend(varint(1 << 60)); // deadline: seconds
    message.push(0); // and nanoseconds
    message.extend([0; 16]); // trace id
    message.extend([0, 1]); // span id, sampling decision
    message.extend([7, 0]); // request id 7, verb 0: version
    let frame = [&(message.len() as u32).to_le_bytes()[..], &message].concat();
    stream.write_all(&frame).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("the request is answered");
    assert_eq!(bad_frames(&client), 3);

    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.write_all(&[b'x'; 104]).unwrap();
    assert!(closed(&mut stream), "not a hello");
    let service = client.stats().unwrap().service.unwrap();
    assert_eq!(service.panics, 0);
    assert!(service.hellos_refused.contains(&("malformed".into(), 1)), "{service:?}");
    let stats = client.stats().unwrap().catalog.unwrap();
    assert_eq!((stats.leases, stats.regions, stats.tickets), (0, 0, 0));
}

#[test]
fn another_version_is_refused_with_a_sentence() {
    let daemon = Daemon::start(&[]);
    let mut hello = Hello::new(HelloKind::Session, "old");
    hello.version = 99;
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.write_all(&encode_hello(&hello)).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer[10], HelloRefusal::Version as u8);
    let text = String::from_utf8_lossy(&answer[80..]).into_owned();
    assert!(text.contains("protocol 99") && text.contains("daemon 5"), "{text}");
}

#[test]
fn limits_refuse_and_do_not_queue() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvtided.toml");
    std::fs::write(
        &file,
        "[limits]\nsessions = 2\nkeys_per_call = 4\n\
                 namespaces_per_session = 2\nnamespaces_per_tenant = 2\n\
                 region_bytes_per_session = \"1MiB\"\n",
    )
    .unwrap();
    let daemon = Daemon::start(&["--config", file.to_str().unwrap()]);
    // The session that saw the daemon start ends when the daemon sees that it has.
    let until = Instant::now() + 5 * SECOND;
    let connect = || {
        loop {
            match Client::connect(daemon.config()) {
                Ok(client) => break client,
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
        }
    };
    let (client, second) = (connect(), connect());
    let error = Client::connect(daemon.config()).unwrap_err();
    let ClientError::Refused { reason, message } = error else { panic!("{error}") };
    assert_eq!(reason, HelloRefusal::TooManySessions);
    assert!(message.contains("limits.sessions"), "{message}");
    let namespace = client.open_namespace(&spec("a")).unwrap();
    let keys = namespace.chain(&(0..20).collect::<Vec<u32>>());
    let error = client.touch(&namespace, &keys).unwrap_err().to_string();
    assert!(error.contains("TooManyKeys"), "{error}");
    assert_eq!(client.touch(&namespace, &keys[..4]).unwrap(), 0);
    let error = client.pin(namespace.id().unwrap(), &[], SECOND).unwrap_err().to_string();
    assert!(error.contains("no keys"), "{error}");
    let region = client.create_region(RegionLayout::opaque(8, BLOCK as u64)).unwrap();
    let error = client.create_region(RegionLayout::opaque(9, BLOCK as u64)).unwrap_err();
    assert!(error.to_string().contains("limits.region_bytes_per_session"), "{error}");
    let empty =
        StoreBlock { key: keys[0], parent: BlockKey::ROOT, position: 0, tokens: 0, place: 0 };
    let ticket = client.store(&namespace, 0, &region, &[empty], SECOND);
    let error = ticket.failure().unwrap().to_string();
    assert!(error.contains("0 tokens"), "{error}");
    assert!(region.places_in_doubt().is_empty(), "a refusal leaves no doubt");
    drop(region);
    let until = Instant::now() + 5 * SECOND;
    while client.create_region(RegionLayout::opaque(16, BLOCK as u64)).is_err() {
        assert!(Instant::now() < until, "the room of a region is not given back");
    }
    client.open_namespace(&spec("b")).unwrap();
    client.open_namespace(&spec("a")).expect("it is open already");
    for client in [&client, &second] {
        let error = client.open_namespace(&spec("c")).unwrap_err().to_string();
        assert!(error.contains("limits.namespaces_per_tenant"), "{error}");
    }
    assert_eq!(client.namespaces().unwrap().len(), 2, "what is refused leaves no entry");
}

#[test]
fn a_stopped_daemon_costs_microseconds_once_the_breaker_is_open() {
    let mut daemon = Daemon::start(&[]);
    let config = ClientConfig { call_timeout: Duration::from_millis(50), ..daemon.config() };
    let client = Client::connect(config).unwrap();
    let namespace = client.open_namespace(&spec("a")).unwrap();
    let keys = namespace.chain(&[1, 2, 3, 4]);
    daemon.signal(rustix::process::Signal::STOP);
    for _ in 0..3 {
        let start = Instant::now();
        assert_eq!(client.lookup(&[(&namespace, &keys)], SECOND).blocks(), 0);
        assert!(start.elapsed() < SECOND);
    }
    assert_eq!(client.counters().breaker_opened, 1);
    let start = Instant::now();
    for _ in 0..1000 {
        let _ = client.lookup(&[(&namespace, &keys)], SECOND);
    }
    assert!(start.elapsed() < SECOND, "1,000 misses took {:?}", start.elapsed());
    daemon.signal(rustix::process::Signal::CONT);
    let until = Instant::now() + 10 * SECOND;
    while client.version().is_err() {
        assert!(Instant::now() < until, "the breaker does not close");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the daemon has settled what was given up.
fn settled(region: &RegionHandle) {
    let until = Instant::now() + 10 * SECOND;
    while !region.places_in_doubt().is_empty() {
        assert!(Instant::now() < until, "{:?} stay in doubt", region.places_in_doubt());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_store_that_is_given_up_does_not_poison_its_key() {
    let mut daemon = Daemon::start(&[]);
    let config = ClientConfig { call_timeout: Duration::from_millis(200), ..daemon.config() };
    let client = Client::connect(config).unwrap();
    let namespace = client.open_namespace(&spec("a")).unwrap();
    let region = client.create_region(RegionLayout::opaque(4, BLOCK as u64)).unwrap();
    let keys = namespace.chain(&(0..12).collect::<Vec<u32>>());
    let block = |at: usize, place| StoreBlock {
        key: keys[at],
        parent: if at == 0 { BlockKey::ROOT } else { keys[at - 1] },
        position: at as u32,
        tokens: 4,
        place,
    };
    region.write_block(0, &bytes(0)).unwrap();

    // Its deadline passes.
    daemon.signal(rustix::process::Signal::STOP);
    let ticket = client.store(&namespace, 0, &region, &[block(0, 0)], Duration::ZERO);
    assert!(matches!(ticket.failure(), Some(ClientError::Deadline { .. })), "{ticket:?}");
    assert_eq!(region.places_in_doubt(), [0]);
    let refused = region.write_block(0, &bytes(1)).unwrap_err();
    assert!(matches!(refused, ClientError::PlaceInDoubt { place: 0 }), "{refused}");
    let ticket = client.store(&namespace, 0, &region, &[block(1, 0)], Duration::ZERO);
    assert!(matches!(ticket.failure(), Some(ClientError::PlaceInDoubt { place: 0 })));
    region.write_block(1, &bytes(1)).expect("another place is of use");
    daemon.signal(rustix::process::Signal::CONT);
    settled(&region);
    region.write_block(0, &bytes(2)).unwrap();
    let other = client.store_prefix(&namespace, 0, &region, &keys[..1], &[0], 5 * SECOND);
    let mut got = vec![0; BLOCK];
    let loaded = client.load_prefix(&namespace, &region, &keys[..1], &[3], 5 * SECOND);
    assert_eq!(loaded.blocks, 1);
    region.read_block(3, &mut got).unwrap();
    let first = other != [Outcome::Stored];
    assert!(got == bytes(if first { 0 } else { 2 }), "{other:?}");

    // Its future is dropped, and so is that of a load; then a ticket.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let Lookup::Hit(hit) = client.lookup(&[(&namespace, &keys[..1])], 5 * SECOND) else {
        panic!("stored above")
    };
    let lease = hit.lease.unwrap();
    let load = [LoadBlock { key: keys[0], place: 2 }];
    daemon.signal(rustix::process::Signal::STOP);
    runtime.block_on(async {
        let client = client.as_async();
        let store = [block(1, 1)];
        let store = client.store(&namespace, 0, &region, &store, SECOND);
        let load = client.load(&lease, &namespace, &region, &load, SECOND);
        let both = async { tokio::join!(store, load) };
        assert!(tokio::time::timeout(Duration::from_millis(20), both).await.is_err());
    });
    assert_eq!(region.places_in_doubt(), [1, 2]);
    daemon.signal(rustix::process::Signal::CONT);
    settled(&region);
    drop(client.store(&namespace, 0, &region, &[block(2, 0)], Duration::ZERO));
    settled(&region);

    // The daemon dies: it copies no more.
    daemon.signal(rustix::process::Signal::STOP);
    drop(client.store(&namespace, 0, &region, &[block(2, 0)], Duration::ZERO));
    assert_eq!(region.places_in_doubt(), [0]);
    daemon.signal(rustix::process::Signal::KILL);
    daemon.wait();
    settled(&region);
    assert!(!client.is_connected());
}

#[test]
fn a_second_daemon_is_refused_and_a_stale_socket_is_not_in_the_way() {
    let mut daemon = Daemon::start(&[]);
    let mut command = daemon.command();
    let output = command.stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("another daemon listens there"), "{text}");
    let other = daemon.folder.path().join("other.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtided"));
    command.arg("--socket").arg(&other).arg("--store").arg(daemon.folder.path().join("store"));
    command.args(["--host-bytes", "16MiB", "--nvme-bytes", "32MiB", "--metrics", "off"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("is in use by process"), "{text}");

    daemon.signal(rustix::process::Signal::KILL);
    daemon.wait();
    assert!(daemon.socket().exists(), "a killed daemon leaves its socket");
    daemon.restart();
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(), Some(0));
    assert!(!daemon.socket().exists(), "a stopped one does not");
}

#[test]
fn bad_usage_and_bad_configuration_exit_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, "[host]\nbytes = 0\nbites = 1\n").unwrap();
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvtided")).args(args).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = run(&["--check-config", "--config", file.to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(text.contains("bad.toml:2: `host.bytes` is 0"), "{text}");
    assert!(text.contains("bad.toml:3: unknown key `host.bites`; did you mean `bytes`?"), "{text}");
    assert_eq!(run(&["--no-such-option"]).0, Some(2));
    assert_eq!(run(&["--host-bytes", "1GB"]).0, Some(2));
    let (code, _) = run(&["--check-config", "--store", folder.path().to_str().unwrap()]);
    assert_eq!(code, Some(0));
}
