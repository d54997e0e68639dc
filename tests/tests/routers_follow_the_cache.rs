//! Routers are told which blocks come and go, in which tier, without a gap; and can ask for a sum.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{BlockKey, ClientConfig, ForgetWhat, Outcome, block_hash};
use kvtide_tests::{Daemon, KvPool, Message, Setup, Subscriber, Value};

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const BLOCKS: u32 = 32;
const BLOCK_BYTES: u32 = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// A port that nobody had a moment ago.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn with_events(address: SocketAddr, layout: &str) -> Setup {
    let text = format!(
        "[events]\nendpoint = \"tcp://{address}\"\ntopic = \"kv@here\"\nlayout = \"{layout}\"\n"
    );
    Setup::new(NODE).config(&text)
}

fn pool(daemon: &Daemon) -> (KvPool, Vec<BlockKey>) {
    let config = ClientConfig { call_timeout: PATIENCE, ..daemon.client_config() };
    let client = Client::connect(config).unwrap();
    let pool = KvPool::open(client, "routers", BLOCKS, BLOCK_BYTES).unwrap();
    let keys = pool.keys(1, BLOCKS);
    (pool, keys)
}

fn store(pool: &KvPool, keys: &[BlockKey]) {
    let stored = pool.store(keys, keys.len(), PATIENCE);
    assert!(stored.iter().all(|each| *each == Outcome::Stored), "{stored:?}");
}

/// What a router knows.
#[derive(Default)]
struct Known {
    blocks: BTreeSet<(String, u64)>,
    parents: BTreeMap<u64, u64>,
    numbers: BTreeMap<String, u64>,
    cleared: u64,
}

impl Known {
    fn hear(&mut self, message: &Message) {
        let last = self.numbers.insert(message.topic.clone(), message.number);
        assert!(last.is_none_or(|last| last + 1 == message.number), "a gap after {last:?}");
        let [Value::Seconds(_), events, Value::Number(0)] = message.batch.list() else {
            panic!("{message:?}");
        };
        for event in events.list() {
            self.learn(event);
        }
    }

    fn learn(&mut self, event: &Value) {
        let hashes = |event: &Value| -> Vec<u64> {
            let list = event.get("block_hashes").unwrap().list().iter();
            list.map(|hash| if let Value::Number(hash) = hash { *hash } else { panic!() }).collect()
        };
        let medium = |event: &Value| event.get("medium").unwrap().text().unwrap().to_owned();
        match event.get("type").unwrap().text().unwrap() {
            "BlockStored" => {
                assert_eq!(event.get("token_ids"), Some(&Value::List(vec![])));
                let mut parent = event.get("parent_block_hash").cloned().unwrap();
                for hash in hashes(event) {
                    if let Value::Number(parent) = parent {
                        self.parents.insert(hash, parent);
                    }
                    parent = Value::Number(hash);
                    self.blocks.insert((medium(event), hash));
                }
            }
            "BlockRemoved" => {
                for hash in hashes(event) {
                    self.blocks.remove(&(medium(event), hash));
                }
            }
            "AllBlocksCleared" => {
                self.blocks.clear();
                self.cleared += 1;
            }
            other => panic!("{other}"),
        }
    }

    fn hear_until(&mut self, from: &mut Subscriber, enough: impl Fn(&Known) -> bool) {
        while !enough(self) {
            let message = from.receive().expect("the daemon tells what it does");
            self.hear(&message);
        }
    }

    fn has_all(&self, medium: &str, keys: &[BlockKey]) -> bool {
        keys.iter().all(|key| self.blocks.contains(&(medium.to_owned(), block_hash(key))))
    }
}

#[test]
fn a_router_knows_what_is_stored_written_down_forgotten_and_drained() {
    let address = free_address();
    let mut daemon = with_events(address, "maps").start();
    let mut early = Subscriber::connect(address, "kv@here@").unwrap();
    let (pool, keys) = pool(&daemon);
    store(&pool, &keys);
    let mut known = Known::default();
    // A daemon that nobody asks anything writes down what is in RAM.
    known.hear_until(&mut early, |known| {
        known.has_all("CPU", &keys) && known.has_all("STORAGE", &keys)
    });
    for pair in keys.windows(2) {
        assert_eq!(known.parents.get(&block_hash(&pair[1])), Some(&block_hash(&pair[0])));
    }
    // Whoever comes later is told what is there.
    let mut late = Subscriber::connect(address, "").unwrap();
    let mut others = Known::default();
    others.hear_until(&mut late, |known| {
        known.has_all("CPU", &keys) && known.has_all("STORAGE", &keys)
    });
    let row = pool.client.namespaces().unwrap().remove(0);
    let print: String = row.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(others.numbers.keys().collect::<Vec<_>>(), [&format!("kv@here@{print}")]);
    let digest = pool.client.digest(row.id, 64 << 10).unwrap();
    assert_eq!((digest.fingerprint, digest.draining), (row.fingerprint, false));
    assert_eq!(digest.prefix(&keys), keys.len());
    assert!(digest.version >= 2 * u64::from(BLOCKS) && !digest.tiers.is_empty());
    // Forgotten are the second half and what follows it.
    let half = keys.len() / 2;
    pool.client.forget(&ForgetWhat::Keys(row.id, vec![keys[half]])).unwrap();
    let left = 2 * half;
    known.hear_until(&mut early, |known| known.blocks.len() == left);
    assert!(known.has_all("CPU", &keys[..half]) && known.has_all("STORAGE", &keys[..half]));
    assert_eq!(known.cleared, 0);
    assert!(daemon.stop_gracefully().success());
    known.hear_until(&mut early, |known| known.cleared > 0);
    assert!(known.blocks.is_empty(), "a node that drains has nothing");
}

#[test]
fn arrays_have_the_type_first() {
    let address = free_address();
    let daemon = with_events(address, "arrays").start();
    let mut subscriber = Subscriber::connect(address, "kv@here").unwrap();
    let (pool, keys) = pool(&daemon);
    store(&pool, &keys[..1]);
    let message = subscriber.receive().unwrap();
    let event = message.batch.list()[1].list()[0].list().to_vec();
    assert_eq!(event[0], Value::Text("BlockStored".to_owned()));
    assert_eq!(event[1], Value::List(vec![Value::Number(block_hash(&keys[0]))]));
    assert_eq!((&event[2], event.len()), (&Value::Nil, 8));
}

#[test]
fn a_digest_is_for_those_who_may_see_the_namespace_and_stays_small() {
    let daemon = Setup::new(NODE).start();
    let (pool, keys) = pool(&daemon);
    store(&pool, &keys);
    let row = pool.client.namespaces().unwrap().remove(0);
    let digest = pool.client.digest(row.id, 64).unwrap();
    let bytes: usize = digest.tiers.iter().map(|tier| tier.filter.len()).sum();
    assert!(bytes <= 64, "{bytes} bytes");
    assert_eq!(digest.prefix(&keys), keys.len());
    assert!(pool.client.digest(kvtide_client::NamespaceId(77), 64).is_err());
}

/// The real thing, where it is installed.
#[test]
fn a_subscriber_of_libzmq_understands() {
    let has_zmq = Command::new("python3").args(["-c", "import zmq, msgpack"]).output();
    if !has_zmq.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: python3 with pyzmq and msgpack is not installed");
        return;
    }
    let address = free_address();
    let daemon = with_events(address, "maps").start();
    let script = "
import sys, zmq, msgpack
sub = zmq.Context().socket(zmq.SUB)
sub.connect(sys.argv[1])
sub.setsockopt(zmq.SUBSCRIBE, b'kv@here@')
sub.setsockopt(zmq.RCVTIMEO, 30000)
seen, expected = set(), None
while len(seen) < int(sys.argv[2]):
    topic, number, batch = sub.recv_multipart()
    number = int.from_bytes(number, 'big')
    assert expected in (None, number), (expected, number)
    expected = number + 1
    ts, events, rank = msgpack.unpackb(batch)
    for event in events:
        if event['type'] == 'BlockStored' and event['medium'] == 'CPU':
            seen.update(event['block_hashes'])
print(' '.join(str(each) for each in sorted(seen)))
";
    let child = Command::new("python3")
        .args(["-c", script, &format!("tcp://{address}"), &BLOCKS.to_string()])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let (pool, keys) = pool(&daemon);
    store(&pool, &keys);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let mut expected: Vec<u64> = keys.iter().map(block_hash).collect();
    expected.sort_unstable();
    let expected: Vec<String> = expected.iter().map(u64::to_string).collect();
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), expected.join(" "));
}
