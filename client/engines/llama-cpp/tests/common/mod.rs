//! What the tests and the benchmark of this crate share: a daemon, weights, long texts, and other
//! people's blocks.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvtide_client::blocking::Client;
use kvtide_client::{ClientConfig, Namespace, NamespaceSpec, Outcome, RegionLayout};
use tempfile::TempDir;

/// Longest time that a daemon may take for anything, on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).unwrap().to_path_buf()
}

/// One model at a time: they take all cores, and a machine may have few.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The model: `KVTIDE_WEIGHTS`, or what `ci` has fetched. `None` says loudly that there is none.
pub(crate) fn weights() -> Option<PathBuf> {
    let named = std::env::var_os("KVTIDE_WEIGHTS").map(PathBuf::from);
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let folder = target.unwrap_or_else(|| root().join("target")).join("weights");
    let fetched = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    let found = named.unwrap_or(fetched);
    if found.is_file() {
        return Some(found);
    }
    println!(
        "SKIPPED: no weights at {}; client/engines/llama-cpp/ci fetches them, or set \
         KVTIDE_WEIGHTS to a GGUF model",
        found.display()
    );
    None
}

/// Real text, without line ends, as long as one likes.
pub(crate) fn long_text() -> String {
    let files = ["LICENSE-APACHE", "FORMAT.md", "ARCHITECTURE.md", "README.md"];
    let texts = files.map(|name| std::fs::read_to_string(root().join(name)).unwrap());
    texts.join(" ").split_whitespace().collect::<Vec<_>>().join(" ")
}

fn kvtided() -> PathBuf {
    if let Some(named) = std::env::var_os("KVTIDE_KVTIDED") {
        return PathBuf::from(named);
    }
    // Without the flags that llama.cpp is compiled with, which would compile the daemon again.
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "kvtide-daemon", "--bin", "kvtided"])
        .current_dir(root())
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR")
        .status();
    assert!(built.unwrap().success(), "kvtided does not build");
    root().join("target/debug/kvtided")
}

/// A real daemon with a store of its own.
pub(crate) struct Daemon {
    child: Child,
    program: PathBuf,
    folder: TempDir,
    options: Vec<OsString>,
}

impl Daemon {
    /// Starts one with so much host RAM (`64MiB`).
    pub(crate) fn start(host: &str) -> Daemon {
        Daemon::start_with(&["--host-bytes", host, "--nvme-bytes", "512MiB"], "", false)
    }

    /// Starts one of these sizes and with this configuration. With `slowed`, its reads from nvme
    /// are late by what [`Daemon::delay_reads`] says.
    pub(crate) fn start_with(sizes: &[&str], config: &str, slowed: bool) -> Daemon {
        let program = kvtided();
        let folder = tempfile::Builder::new().prefix("kvtide-").tempdir().unwrap();
        let mut options: Vec<OsString> = sizes.iter().map(OsString::from).collect();
        let file = folder.path().join("kvtided.toml");
        std::fs::write(&file, config).unwrap();
        options.extend(["--config".into(), file.into()]);
        if slowed {
            let file = folder.path().join("read-delay");
            options.extend(["--fault-read-delay".into(), file.into()]);
        }
        let child = spawn(&program, folder.path(), &options);
        let daemon = Daemon { child, program, folder, options };
        daemon.wait_serving();
        daemon
    }

    /// From now on, each read from nvme takes so much longer.
    pub(crate) fn delay_reads(&self, by: Duration) {
        let (file, new) = (self.path("read-delay"), self.path("read-delay.new"));
        std::fs::write(&new, by.as_millis().to_string()).unwrap();
        std::fs::rename(&new, &file).unwrap();
    }

    /// A path in its folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path("kvtide.sock")
    }

    fn wait_serving(&self) {
        let until = Instant::now() + PATIENCE;
        while Client::connect(ClientConfig::new(self.socket())).is_err() {
            let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
            assert!(Instant::now() < until, "the daemon does not serve:\n{log}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills it as a crash would.
    pub(crate) fn kill9(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again after that.
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.program, self.folder.path(), &self.options);
        self.wait_serving();
    }

    /// A client, which is an operator.
    pub(crate) fn client(&self) -> Client {
        let config = ClientConfig { call_timeout: PATIENCE, ..ClientConfig::new(self.socket()) };
        Client::connect(config).unwrap()
    }

    /// Waits until nothing is only in RAM.
    pub(crate) fn wait_written(&self) {
        let client = self.client();
        let until = Instant::now() + PATIENCE;
        while client.stats().unwrap().catalog.unwrap().dirty_blocks > 0 {
            assert!(Instant::now() < until, "blocks are not written to nvme");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Stores other people's conversations, of blocks of this size, until so many are in. Each call
    /// stores others.
    pub(crate) fn push_out(&self, block_bytes: usize, blocks: u32, like: &Namespace) {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        self.wait_written();
        let client = self.client();
        let mut other = like.clone();
        other.salt = format!("others {}", CALLS.fetch_add(1, Ordering::Relaxed));
        let space = client.open_namespace(&NamespaceSpec::own(other)).unwrap();
        let region = client.create_region(RegionLayout::opaque(1, block_bytes as u64)).unwrap();
        let tokens = like.layout.tokens_per_block;
        let until = Instant::now() + PATIENCE;
        for block in 0..blocks {
            let bytes = vec![u8::try_from(block % 251).unwrap(); block_bytes];
            region.write_block(0, &bytes).unwrap();
            let keys = space.chain(&vec![block; usize::try_from(tokens).unwrap()]);
            loop {
                let wait = Duration::from_secs(5);
                let ended = client.store_prefix(&space, 9, &region, &keys, &[0], wait);
                if matches!(ended.as_slice(), [Outcome::Stored | Outcome::Present]) {
                    break;
                }
                assert!(Instant::now() < until, "{ended:?}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        self.wait_written();
    }

    /// Flips bits behind the daemon's back wherever the store has these bytes; how often.
    pub(crate) fn alter(&mut self, bytes: &[u8]) -> usize {
        let mut altered = 0;
        for entry in std::fs::read_dir(self.path("store")).unwrap() {
            let path = entry.unwrap().path();
            let Ok(mut file) = std::fs::read(&path) else { continue };
            let mut from = 0;
            while let Some(found) = find(&file[from..], bytes) {
                file[from + found] ^= 1;
                from += found + bytes.len();
                altered += 1;
                std::fs::write(&path, &file).unwrap();
            }
        }
        altered
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    let first = *wanted.first()?;
    let mut from = 0;
    while let Some(at) = text[from..].iter().position(|byte| *byte == first) {
        let at = from + at;
        if text[at..].starts_with(wanted) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(program: &Path, folder: &Path, options: &[OsString]) -> Child {
    let log = File::create(folder.join("log")).unwrap();
    let mut command = Command::new(program);
    command.arg("--socket").arg(folder.join("kvtide.sock"));
    command.arg("--store").arg(folder.join("store"));
    command.args(options).args(["--segment-bytes", "16MiB", "--metrics", "off"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().unwrap()
}
