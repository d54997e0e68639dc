//! `kvtide demo`: the main job with no set-up at all.
//!
//! A daemon of its own in a temporary folder, and four client processes that hold conversations
//! with a system prompt in common. Every turn lands on another process. Half-way one client is
//! killed in the middle of its turn, and later the daemon in the middle of everybody's. Every byte
//! that comes back is compared. Nothing is left behind, whatever happens.

pub(crate) mod child;
mod content;
mod processes;
mod report;
pub(crate) mod script;
mod wire;

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use self::processes::WITH_PARENT;
use self::processes::{Daemon, Engine, Folder, Silence};
use self::report::{Summary, turn_header, turn_line};
use self::script::{CONVERSATIONS, PROCESSES};
use self::wire::{Turn, TurnDone};
use super::args::Demo;
use super::error::CliError;
use super::out::{Out, print};
use crate::units::bytes;

/// RAM of the demo's daemon: less than the conversations need, so that NVMe is really used.
const HOST_BYTES: u64 = 64 << 20;
/// NVMe of the demo's daemon.
const NVME_BYTES: u64 = 256 << 20;
/// How long a killed process may have been at work on its turn.
const INTO_THE_TURN: Duration = Duration::from_millis(4);
/// Clients come back to a new daemon within this time.
const RECONNECT_TIME: Duration = Duration::from_millis(400);
/// Longest wait for one turn.
const TURN_TIME_MAX: Duration = Duration::from_secs(60);
/// Longest wait for blocks to be written down between two turns.
const QUIET_TIME_MAX: Duration = Duration::from_secs(3);

pub(crate) fn run(args: &Demo, out: Out) -> Result<(), CliError> {
    let interrupted = watch_signals();
    let folder = Folder::create(args.dir.as_deref())?;
    let mut show = Show { out, interrupted };
    let summary = Stage::open(&folder, &mut show)?.play(args.turns as usize, &mut show)?;
    out.emit(&summary, |summary| format!("\n{}", summary.text()))?;
    if summary.good() { Ok(()) } else { Err(CliError::Found) }
}

/// Sets the flag when somebody wants the demo to stop. It then cleans up as always.
fn watch_signals() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let mut term = signal(SignalKind::terminate()).ok()?;
            let mut hangup = signal(SignalKind::hangup()).ok()?;
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = term.recv() => {}
                _ = hangup.recv() => {}
            }
            raised.store(true, Ordering::Release);
            Some(())
        })
    });
    flag
}

/// Where the story goes.
struct Show {
    out: Out,
    interrupted: Arc<AtomicBool>,
}

impl Show {
    fn text(&self, text: &str) -> Result<(), CliError> {
        if self.out.json { Ok(()) } else { print(text) }
    }

    fn check(&self) -> Result<(), CliError> {
        match self.interrupted.load(Ordering::Acquire) {
            true => Err(CliError::failed("stopped; the demo's folder is removed")),
            false => Ok(()),
        }
    }
}

/// The processes at work.
struct Stage<'a> {
    folder: &'a Folder,
    // Clients before the daemon, so that they are gone before it is.
    engines: Vec<Engine>,
    daemon: Option<Daemon>,
    summary: Summary,
    start: Instant,
}

impl<'a> Stage<'a> {
    fn open(folder: &'a Folder, show: &mut Show) -> Result<Stage<'a>, CliError> {
        let start = Instant::now();
        let daemon = Daemon::start(folder, &daemon_args(folder)?)?;
        let mut stage = Stage {
            folder,
            engines: Vec::new(),
            daemon: Some(daemon),
            summary: Summary::default(),
            start,
        };
        for _ in 0..PROCESSES {
            let engine = stage.engine(show)?;
            stage.engines.push(engine);
        }
        let pids: Vec<String> =
            stage.engines.iter().map(|engine| engine.pid().to_string()).collect();
        show.text(&format!(
            "kvtided (process {}) has {} of RAM and {} of NVMe in {}\n\
             {PROCESSES} client processes: {}\n\
             {CONVERSATIONS} conversations with one system prompt; each turn lands on another \
             process\n\n\
             {}",
            stage.daemon.as_ref().map_or(0, Daemon::pid),
            bytes(HOST_BYTES),
            bytes(NVME_BYTES),
            folder.path().display(),
            pids.join(", "),
            turn_header()
        ))?;
        Ok(stage)
    }

    /// Starts a client process and waits until it is connected.
    fn engine(&self, show: &Show) -> Result<Engine, CliError> {
        let mut engine = Engine::start(&self.folder.socket())?;
        let until = Instant::now() + TURN_TIME_MAX;
        loop {
            show.check()?;
            match engine.answer(Duration::from_millis(100)) {
                Ok(_) => return Ok(engine),
                Err(Silence::Waiting) if Instant::now() < until => {}
                Err(Silence::Waiting) => {
                    return Err(CliError::failed("a client process did not connect in time"));
                }
                Err(Silence::Ended(why)) => {
                    return Err(CliError::Failed(format!("a client process failed: {why}")));
                }
            }
        }
    }

    fn play(mut self, turns: usize, show: &mut Show) -> Result<Summary, CliError> {
        let client_dies = turns / 2 - 1;
        let daemon_dies = turns - 2;
        let conversations: Vec<usize> = (0..CONVERSATIONS).collect();
        for turn in 0..turns {
            for wave in conversations.chunks(PROCESSES) {
                let first = wave.first() == Some(&0);
                if first && turn == daemon_dies {
                    self.quiet(show)?;
                }
                for conversation in wave {
                    self.ask(Turn { conversation: *conversation, turn });
                }
                if first && turn == client_dies {
                    self.kill_client(Turn { conversation: 1, turn }, show)?;
                }
                if first && turn == daemon_dies {
                    self.kill_daemon(show)?;
                }
                self.answers(wave, turn, show)?;
                if first && turn == daemon_dies {
                    thread::sleep(RECONNECT_TIME);
                }
            }
        }
        self.summary.seconds = self.start.elapsed().as_secs_f64();
        Ok(std::mem::take(&mut self.summary))
    }

    fn answers(&mut self, wave: &[usize], turn: usize, show: &Show) -> Result<(), CliError> {
        for conversation in wave {
            let process = script::process(*conversation, turn);
            match self.answer(process, show)? {
                Ok(done) => {
                    show.text(&turn_line(&done, process))?;
                    self.summary.add(done);
                }
                Err(why) => self.failed(process, &why, show)?,
            }
        }
        Ok(())
    }

    fn ask(&mut self, turn: Turn) {
        let process = script::process(turn.conversation, turn.turn);
        if let Some(engine) = self.engines.get_mut(process) {
            // If it is gone, its answer says so.
            let _ = engine.ask(turn);
        }
    }

    /// The answer of a process, or why there is none.
    fn answer(
        &mut self,
        process: usize,
        show: &Show,
    ) -> Result<Result<TurnDone, String>, CliError> {
        let until = Instant::now() + TURN_TIME_MAX;
        let Some(engine) = self.engines.get_mut(process) else {
            return Ok(Err("there is no such process".to_owned()));
        };
        loop {
            let said = engine.answer(Duration::from_millis(100));
            show.check()?;
            match said {
                Ok(Some(done)) => return Ok(Ok(done)),
                Ok(None) => {}
                Err(Silence::Waiting) if Instant::now() < until => {}
                Err(Silence::Waiting) => {
                    return Ok(Err(format!("no answer within {} s", TURN_TIME_MAX.as_secs())));
                }
                Err(Silence::Ended(why)) => return Ok(Err(why)),
            }
        }
    }

    /// A client failed that nobody killed. It counts, and another one takes its place.
    fn failed(&mut self, process: usize, why: &str, show: &Show) -> Result<(), CliError> {
        let what = format!("client process {} failed: {why}", process + 1);
        show.text(&format!("-- {what}\n"))?;
        self.summary.fail(what);
        let engine = self.engine(show)?;
        if let Some(place) = self.engines.get_mut(process) {
            *place = engine;
        }
        Ok(())
    }

    fn kill_client(&mut self, turn: Turn, show: &Show) -> Result<(), CliError> {
        thread::sleep(INTO_THE_TURN);
        let process = script::process(turn.conversation, turn.turn);
        if process < self.engines.len() {
            let killed = self.engines.remove(process);
            let pid = killed.pid();
            killed.kill();
            self.summary.clients_killed += 1;
            let engine = self.engine(show)?;
            show.text(&format!(
                "-- client process {} ({pid}) killed with SIGKILL in the middle of its turn; a new \
                 one ({}) takes the turn\n",
                process + 1,
                engine.pid()
            ))?;
            self.engines.insert(process, engine);
            self.ask(turn);
        }
        Ok(())
    }

    /// Waits, as between two users' turns, until nothing is only in RAM, and not for long.
    fn quiet(&self, show: &Show) -> Result<(), CliError> {
        let until = Instant::now() + QUIET_TIME_MAX;
        while Instant::now() < until {
            show.check()?;
            let stats = self.daemon.as_ref().and_then(|daemon| daemon.control.stats().ok());
            let dirty = stats.and_then(|stats| stats.catalog).map(|catalog| catalog.dirty_blocks);
            if dirty == Some(0) {
                // Descriptors are committed a moment after their payloads.
                thread::sleep(Duration::from_millis(200));
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn kill_daemon(&mut self, show: &Show) -> Result<(), CliError> {
        thread::sleep(INTO_THE_TURN);
        let Some(daemon) = self.daemon.take() else { return Ok(()) };
        let pid = daemon.pid();
        daemon.kill();
        self.summary.daemons_killed += 1;
        let start = Instant::now();
        let daemon = Daemon::start(self.folder, &daemon_args(self.folder)?)?;
        let blocks = daemon.control.stats().ok().and_then(|stats| stats.catalog);
        show.text(&format!(
            "-- kvtided ({pid}) killed with SIGKILL in the middle of the turn; started again ({}) \
             in {} ms, {} blocks found on NVMe\n",
            daemon.pid(),
            start.elapsed().as_millis(),
            blocks.map_or_else(|| "?".to_owned(), |catalog| catalog.nvme.blocks.to_string()),
        ))?;
        self.daemon = Some(daemon);
        Ok(())
    }
}

/// Writes the daemon's configuration; answers the arguments that name it.
fn daemon_args(folder: &Folder) -> Result<Vec<OsString>, CliError> {
    let quoted = |path: &Path| toml::Value::from(path.display().to_string()).to_string();
    let text = format!(
        "[daemon]\nsocket = {}\n\
         [host]\nbytes = {HOST_BYTES}\n\
         [nvme]\nfolder = {}\nbytes = {NVME_BYTES}\n\
         [limits]\n# All processes at once hold half of the conversations.\npinned_percent = 80\n\
         [admin]\nmetrics = \"off\"\n",
        quoted(&folder.socket()),
        quoted(&folder.path().join("store")),
    );
    let file = folder.path().join("kvtided.toml");
    std::fs::write(&file, text)
        .map_err(|error| CliError::Failed(format!("cannot write {}: {error}", file.display())))?;
    Ok(vec!["--config".into(), file.into()])
}
