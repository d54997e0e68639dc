//! Redis and memcached over a unix socket: one connection a thread, one block a call.
//!
//! Their protocols are spoken by hand, as far as setting and getting one large value goes. Keys are
//! the same in every round, so that a store replaces an old value and the server's memory neither
//! grows nor is given back in between. A server that the bench starts keeps nothing on disk and
//! has memory for twice the blocks; one that the user names keeps its own settings, and loses the
//! bench's keys again.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};

use super::peer::{About, Block, Carrier, Group, Hand, Loaded, Peer, Pool, hands};
use crate::daemon::this_program;

/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Longest time that a server may take to listen.
const START_MAX: Duration = Duration::from_secs(10);

/// Longest line of an answer: what comes before a value, or an error in words.
const LINE_BYTES_MAX: u64 = 4096;

/// Longest path of a socket that every system takes.
const SOCKET_BYTES_MAX: usize = 100;

/// Which server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Redis,
    Memcached,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Redis => "redis",
            Kind::Memcached => "memcached",
        }
    }

    /// Adds the arguments that make it listen on `socket` and keep all in memory.
    fn arguments(self, command: &mut Command, socket: &Path, memory_bytes: u64, item_bytes: u64) {
        match self {
            Kind::Redis => command
                .args(["--port", "0", "--daemonize", "no", "--save", "", "--appendonly", "no"])
                .args(["--maxmemory-policy", "noeviction", "--maxmemory"])
                .arg(memory_bytes.to_string())
                .arg("--unixsocket")
                .arg(socket),
            Kind::Memcached => command
                .args(["-u", "root", "-U", "0", "-t", "4", "-m"])
                .arg((memory_bytes >> 20).to_string())
                .arg("-I")
                .arg(item_bytes.max(8 << 20).to_string())
                .arg("-s")
                .arg(socket),
        };
    }
}

/// A server: started here and killed when dropped, or the user's own.
pub(super) struct Server {
    kind: Kind,
    socket: PathBuf,
    child: Option<Child>,
}

impl Server {
    /// Starts `program` on a socket in `folder`.
    ///
    /// # Errors
    /// It cannot be started, or does not listen in time; the end of its log says why.
    pub(super) fn start(
        kind: Kind,
        program: &Path,
        folder: &Path,
        memory_bytes: u64,
        item_bytes: u64,
    ) -> anyhow::Result<Server> {
        let mut socket = folder.join(format!("{}.sock", kind.name()));
        if socket.as_os_str().len() > SOCKET_BYTES_MAX {
            let name = format!("kvtide-bench-{}-{}.sock", kind.name(), std::process::id());
            socket = std::env::temp_dir().join(name);
        }
        // A path is relative to where the bench was started, a name is looked for.
        let program = match program.components().count() {
            1 => program.to_owned(),
            _ => std::path::absolute(program)?,
        };
        let log_path = folder.join(format!("{}.log", kind.name()));
        let log = File::create(&log_path)?;
        // Through this program, so that it ends with this process however that ends.
        let mut command = this_program("__exec")?;
        command.arg(&program);
        kind.arguments(&mut command, &socket, memory_bytes, item_bytes);
        command.current_dir(folder).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn()?;
        let mut server = Server { kind, socket, child: Some(child) };
        let started = Instant::now();
        while let Err(error) = server.connect() {
            let ended = server.child.as_mut().map(Child::try_wait).transpose()?.flatten();
            if ended.is_some() || started.elapsed() > START_MAX {
                let log = std::fs::read_to_string(&log_path).unwrap_or_default();
                let end: Vec<&str> = log.lines().rev().take(5).collect();
                let end: Vec<&str> = end.into_iter().rev().collect();
                bail!("{} does not listen ({error:#}):\n{}", program.display(), end.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// Uses the server that listens on `socket`.
    ///
    /// # Errors
    /// None listens.
    pub(super) fn at(kind: Kind, socket: &Path) -> anyhow::Result<Server> {
        let server = Server { kind, socket: socket.to_owned(), child: None };
        server.connect()?;
        Ok(server)
    }

    fn connect(&self) -> anyhow::Result<Connection> {
        let stream = UnixStream::connect(&self.socket)
            .with_context(|| format!("cannot connect to {}", self.socket.display()))?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        stream.set_write_timeout(Some(ANSWER_MAX))?;
        Ok(Connection { kind: self.kind, answers: BufReader::new(stream), line: Vec::new() })
    }

    /// The process that listens: where the kernel says so, also of a server of the user's.
    fn pid(&self) -> Option<u32> {
        if let Some(child) = &self.child {
            return Some(child.id());
        }
        let stream = UnixStream::connect(&self.socket).ok()?;
        let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // An error means that it has ended already.
            let _ = child.kill();
            let _ = child.wait();
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

/// One thread's connection.
struct Connection {
    kind: Kind,
    answers: BufReader<UnixStream>,
    line: Vec<u8>,
}

impl Connection {
    fn send(&mut self, parts: &[&[u8]]) -> anyhow::Result<()> {
        let stream = self.answers.get_mut();
        parts.iter().try_for_each(|part| stream.write_all(part)).context("the server hung up")
    }

    /// The next line of the answer, without its end.
    fn line(&mut self) -> anyhow::Result<&str> {
        self.line.clear();
        let read = self.answers.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut self.line);
        read.context("no answer")?;
        let line = self.line.strip_suffix(b"\r\n").context("the server hung up in an answer")?;
        std::str::from_utf8(line).context("an answer that is no text")
    }

    fn expect(&mut self, wanted: &str) -> anyhow::Result<()> {
        let line = self.line()?;
        ensure!(line == wanted, "the server answered `{line}`, not `{wanted}`");
        Ok(())
    }

    fn set(&mut self, key: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let (key_bytes, count) = (key.len(), bytes.len());
        match self.kind {
            Kind::Redis => {
                let head = format!("*3\r\n$3\r\nSET\r\n${key_bytes}\r\n{key}\r\n${count}\r\n");
                self.send(&[head.as_bytes(), bytes, b"\r\n"])?;
                self.expect("+OK")
            }
            Kind::Memcached => {
                let head = format!("set {key} 0 0 {count}\r\n");
                self.send(&[head.as_bytes(), bytes, b"\r\n"])?;
                self.expect("STORED")
            }
        }
    }

    fn get(&mut self, key: &str, into: &mut [u8]) -> anyhow::Result<Loaded> {
        let key_bytes = key.len();
        let (question, none) = match self.kind {
            Kind::Redis => (format!("*2\r\n$3\r\nGET\r\n${key_bytes}\r\n{key}\r\n"), "$-1"),
            Kind::Memcached => (format!("get {key}\r\n"), "END"),
        };
        self.send(&[question.as_bytes()])?;
        let kind = self.kind;
        let line = self.line()?;
        if line == none {
            return Ok(Loaded::Miss);
        }
        let count = match kind {
            Kind::Redis => line.strip_prefix('$'),
            Kind::Memcached => line.strip_prefix("VALUE ").and_then(|rest| rest.rsplit(' ').next()),
        };
        let count = count.and_then(|count| count.parse::<usize>().ok());
        let Some(count) = count else { bail!("the server answered `{line}`") };
        ensure!(count == into.len(), "a value of {count} bytes, not {}", into.len());
        self.answers.read_exact(into).context("the server hung up in a value")?;
        self.expect("")?;
        if kind == Kind::Memcached {
            self.expect("END")?;
        }
        Ok(Loaded::Hit)
    }

    fn delete(&mut self, key: &str) -> anyhow::Result<()> {
        let key_bytes = key.len();
        let question = match self.kind {
            Kind::Redis => format!("*2\r\n$3\r\nDEL\r\n${key_bytes}\r\n{key}\r\n"),
            Kind::Memcached => format!("delete {key}\r\n"),
        };
        self.send(&[question.as_bytes()])?;
        self.line().map(|_| ())
    }
}

/// A connection's blocks, under keys that say whose they are.
struct ServerHand {
    connection: Connection,
    number: usize,
}

fn key(number: usize, place: u32) -> String {
    format!("kvtide-bench:{}:{number}:{place}", std::process::id())
}

impl Carrier for ServerHand {
    fn store(&mut self, block: &Block, bytes: &[u8]) -> anyhow::Result<()> {
        self.connection.set(&key(self.number, block.place), bytes)
    }

    fn load(&mut self, block: &Block, into: &mut [u8]) -> anyhow::Result<Loaded> {
        self.connection.get(&key(self.number, block.place), into)
    }
}

/// A server as a peer.
pub(super) struct ServerPeer {
    about: About,
    server: Server,
    pid: Option<u32>,
    hands: Vec<Box<dyn Hand>>,
    share: usize,
}

impl ServerPeer {
    /// # Errors
    /// The server takes no more connections.
    pub(super) fn make(
        server: Server,
        threads: usize,
        pool: &Arc<Pool>,
        blocks: usize,
    ) -> anyhow::Result<ServerPeer> {
        let hand = |number| Ok(ServerHand { connection: server.connect()?, number });
        let carriers: Vec<ServerHand> = (0..threads).map(hand).collect::<anyhow::Result<_>>()?;
        let about = About {
            name: format!("{}, unix socket", server.kind.name()),
            group: Group::Ram,
            ours: false,
            stored_to: "RAM",
            loaded_from: "RAM",
            verifies: false,
            threads,
            batch: 1,
        };
        let share = blocks / threads;
        let pid = server.pid();
        Ok(ServerPeer { about, hands: hands(pool, share, carriers), pid, share, server })
    }
}

impl Peer for ServerPeer {
    fn about(&self) -> &About {
        &self.about
    }

    fn hands(&mut self) -> &mut [Box<dyn Hand>] {
        &mut self.hands
    }

    fn server(&self) -> Option<u32> {
        self.pid
    }
}

impl Drop for ServerPeer {
    fn drop(&mut self) {
        if self.server.child.is_some() {
            return;
        }
        // What cannot be removed from the user's server has the bench's name in its key.
        if let Ok(mut connection) = self.server.connect() {
            let places = (0..self.about.threads)
                .flat_map(|number| (0..self.share).map(move |place| (number, place as u32)));
            for (number, place) in places {
                let _ = connection.delete(&key(number, place));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, os::unix::net::UnixListener, thread::JoinHandle};

    use super::*;
    use crate::peers::drive::{shares, turn};

    /// A stand-in that speaks as much of either protocol as is asked of it, on one connection.
    fn serve(kind: Kind, stream: UnixStream) {
        let mut values: HashMap<String, Vec<u8>> = HashMap::new();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        let line = |reader: &mut BufReader<UnixStream>| {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            line.trim_end().to_owned()
        };
        loop {
            let first = line(&mut reader);
            if first.is_empty() {
                return;
            }
            let words: Vec<String> = match kind {
                Kind::Memcached => first.split(' ').map(Into::into).collect(),
                Kind::Redis => {
                    let parts: usize = first[1..].parse().unwrap();
                    let mut words = Vec::new();
                    for _ in 0..parts.min(2) {
                        line(&mut reader);
                        words.push(line(&mut reader).to_lowercase());
                    }
                    if parts == 3 {
                        words.push(line(&mut reader)[1..].to_owned());
                    }
                    words
                }
            };
            let key = words[1].clone();
            let answer: Vec<u8> = match words[0].as_str() {
                "set" => {
                    let mut value = vec![0; words.last().unwrap().parse::<usize>().unwrap() + 2];
                    reader.read_exact(&mut value).unwrap();
                    assert_eq!(value.split_off(value.len() - 2), b"\r\n");
                    values.insert(key, value);
                    if kind == Kind::Redis { b"+OK\r\n" } else { b"STORED\r\n".as_slice() }.to_vec()
                }
                "get" => match (values.get(&key), kind) {
                    (None, Kind::Redis) => b"$-1\r\n".to_vec(),
                    (None, Kind::Memcached) => b"END\r\n".to_vec(),
                    (Some(value), _) => {
                        let (count, redis) = (value.len(), kind == Kind::Redis);
                        let head = if redis { "$".into() } else { format!("VALUE {key} 0 ") };
                        let mut answer = format!("{head}{count}\r\n").into_bytes();
                        answer.extend(value);
                        answer.extend(if redis { b"\r\n".as_slice() } else { b"\r\nEND\r\n" });
                        answer
                    }
                },
                _ => b":1\r\n".to_vec(),
            };
            stream.write_all(&answer).unwrap();
        }
    }

    fn stand_in(kind: Kind, socket: &Path) -> JoinHandle<()> {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                std::thread::spawn(move || serve(kind, stream));
            }
        })
    }

    #[test]
    fn both_protocols_carry_blocks_and_misses() {
        let folder = tempfile::tempdir().unwrap();
        for kind in [Kind::Redis, Kind::Memcached] {
            let socket = folder.path().join(kind.name());
            let _server = stand_in(kind, &socket);
            let server = Server::at(kind, &socket).unwrap();
            let mut connection = server.connect().unwrap();
            let mut out = vec![0; 100_000];
            assert_eq!(connection.get("absent", &mut out).unwrap(), Loaded::Miss);
            // A value that looks like the protocol is only a value.
            let value: Vec<u8> =
                b"\r\nEND\r\n$-1\r\n".iter().copied().cycle().take(100_000).collect();
            connection.set("there", &value).unwrap();
            assert_eq!(connection.get("there", &mut out).unwrap(), Loaded::Hit);
            assert_eq!(out, value);
            assert!(connection.get("there", &mut [0; 10]).is_err(), "another length is no hit");

            let pool = Pool::make(8, 8192).unwrap();
            let mut peer = ServerPeer::make(server, 2, &pool, 8).unwrap();
            assert_eq!(peer.server(), Some(std::process::id()));
            for round in 0..2 {
                let blocks = shares(peer.about(), 0, round, 8);
                let turn = turn(&mut peer, &blocks, 8192).unwrap();
                assert_eq!((turn.verified, turn.missed, turn.wrong_bytes), (8, 0, 0), "{kind:?}");
            }
        }
    }

    #[test]
    fn a_server_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("absent");
        let error = Server::at(Kind::Redis, &absent).err().unwrap();
        assert!(format!("{error:#}").contains("absent"), "{error:#}");
        let error = Server::start(Kind::Redis, &absent, folder.path(), 1 << 20, 1 << 20).err();
        assert!(format!("{:#}", error.unwrap()).contains("absent"));
        // A program that ends at once is not waited for.
        let error = Server::start(Kind::Redis, Path::new("/bin/false"), folder.path(), 1, 1).err();
        assert!(format!("{:#}", error.unwrap()).contains("does not listen"));
    }
}
