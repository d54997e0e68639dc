//! What runs inside a machine booted by systemd: stores blocks with the daemon that systemd runs
//! from our own unit, has systemd restart it and kills it, and says what became of the RAM tier.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use kvtide_client::blocking::Client;
use kvtide_client::{BlockKey, ClientConfig, Outcome, StatusReport, Tier};

use crate::payload::KvPool;
use crate::proc::poll_until;

const SOCKET: &str = "/run/kvtide/kvtide.sock";
const BLOCKS: u32 = 2_000;
const BLOCK_BYTES: u32 = 16 << 10;
const DAMAGED: usize = 1_000;
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the random places begin; another number is another test.
const SEED: u64 = 0x6b76_7469_6465;

/// The whole course of it. Every line that begins with `PASSED` is one that the test outside waits
/// for.
pub fn run() -> ExitCode {
    let daemon = Booted::open();
    let all = BLOCKS as usize;
    let before = daemon.hits();
    assert_eq!(before, [all, 0], "not all blocks are in RAM to begin with");
    for (how, arguments) in [
        ("restart", &["restart", "kvtided"][..]),
        ("kill -9", &["kill", "--signal=KILL", "kvtided"]),
        ("a second restart", &["restart", "kvtided"]),
    ] {
        let after = daemon.disturbed(|| systemctl(arguments));
        assert_eq!(after, before, "RAM and nvme hits after {how}");
        println!("PASSED {how}: {} of {all} blocks loaded from RAM before and after", after[0]);
    }

    let damaged = || {
        systemctl(&["kill", "--signal=KILL", "kvtided"]);
        damage_arena();
    };
    let [host, nvme] = daemon.disturbed(damaged);
    assert_eq!([host, nvme], [all - DAMAGED, DAMAGED], "from RAM and nvme after damage to RAM");
    println!("PASSED damage: {host} blocks from RAM, {nvme} from nvme, 0 wrong bytes");
    assert_eq!(daemon.hits(), before, "RAM does not fill up again");
    println!("PASSED refill: {all} blocks from RAM");
    ExitCode::SUCCESS
}

/// The daemon that systemd runs.
struct Booted {
    pool: KvPool,
    keys: Vec<BlockKey>,
}

impl Booted {
    /// Waits for it, and stores the blocks.
    fn open() -> Booted {
        let config = ClientConfig { call_timeout: PATIENCE, ..ClientConfig::new(SOCKET) };
        let client = poll_until(PATIENCE, || Client::connect(config.clone()).ok());
        let client = client.expect("kvtided listens");
        let pool = KvPool::open(client, "systemd", BLOCKS, BLOCK_BYTES).expect("it serves");
        let keys = pool.keys(1, BLOCKS);
        let stored = pool.store(&keys, keys.len(), PATIENCE);
        assert!(stored.iter().all(|each| *each == Outcome::Stored), "not all blocks are stored");
        Booted { pool, keys }
    }

    fn status(&self) -> StatusReport {
        let status = poll_until(PATIENCE, || self.pool.client.status().ok());
        status.expect("the client finds its way back to the daemon")
    }

    /// Does something to the daemon, waits for the next one, and loads all that it has.
    fn disturbed(&self, by: impl Fn()) -> [usize; 2] {
        let pid = self.status().pid;
        by();
        let next = poll_until(PATIENCE, || (self.status().pid != pid).then_some(()));
        next.expect("systemd starts it again");
        let status = self.status();
        for line in status.notes.iter().chain([&status.host_kept]) {
            println!("  {line}");
        }
        self.hits()
    }

    /// Blocks that come from RAM and from nvme. Panics at the first wrong byte.
    fn hits(&self) -> [usize; 2] {
        let outcomes = self.pool.load(&self.keys, PATIENCE);
        [Tier::Host, Tier::Nvme]
            .map(|tier| outcomes.iter().filter(|each| **each == Outcome::Loaded(tier)).count())
    }
}

fn systemctl(arguments: &[&str]) {
    let done = Command::new("systemctl").args(arguments).status();
    assert!(done.expect("systemctl can be run").success(), "systemctl {arguments:?} failed");
}

/// The arena's memory, which systemd (the first process) holds while no daemon runs.
fn arena() -> File {
    let path = |entry: std::io::Result<std::fs::DirEntry>| -> Option<PathBuf> {
        let path = entry.ok()?.path();
        let target = std::fs::read_link(&path).ok()?;
        target.to_string_lossy().starts_with("/memfd:kvtide-arena").then_some(path)
    };
    let found = std::fs::read_dir("/proc/1/fd").expect("this is root").find_map(path);
    let found = found.expect("systemd keeps the arena");
    OpenOptions::new().read(true).write(true).open(found).expect("this is root")
}

/// Flips one bit in each of 1,000 slots that hold something, at random.
fn damage_arena() {
    let arena = arena();
    let slots = arena.metadata().expect("it is a file").len() / u64::from(BLOCK_BYTES);
    let mut state = SEED;
    let mut random = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut damaged = std::collections::HashSet::new();
    while damaged.len() < DAMAGED {
        let slot = random(slots);
        let at = slot * u64::from(BLOCK_BYTES) + random(BLOCK_BYTES.into());
        let mut byte = [0];
        arena.read_exact_at(&mut byte, at).expect("it lies within");
        if byte != [0] && damaged.insert(slot) {
            arena.write_all_at(&[byte[0] ^ 1 << random(8)], at).expect("it lies within");
        }
    }
}
