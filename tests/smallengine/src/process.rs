//! An engine in a process of its own. It takes commands as lines of JSON on its standard input and
//! answers each with a line of JSON; [`run`] is what the process does, [`EngineProcess`] the side
//! of whoever started it.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser, ValueEnum};
use kvtide_client::{ClientConfig, Tier};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, namespace};
use crate::engine::{Engine, EngineError, Turn};
use crate::pool::Pool;
use crate::weights::{Shape, Weights, WeightsError};

/// Shape of random weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum RandomShape {
    /// [`Shape::small`].
    Small,
    /// [`Shape::smollm2_135m`].
    Smollm2,
}

impl RandomShape {
    /// The shape.
    pub fn shape(self) -> Shape {
        match self {
            RandomShape::Small => Shape::small(),
            RandomShape::Smollm2 => Shape::smollm2_135m(),
        }
    }
}

/// What an engine is to be.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct EngineArgs {
    /// The daemon's socket. Without one, or without a daemon there, it computes everything.
    #[arg(long)]
    pub socket: Option<PathBuf>,
    /// Weights, a GGUF file; random ones without.
    #[arg(long)]
    pub weights: Option<PathBuf>,
    /// Shape of random weights.
    #[arg(long, value_enum, default_value = "small")]
    pub shape: RandomShape,
    /// Seed of random weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Tokens of a block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens_per_block: u32,
    /// Places of the pool.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub places: u32,
    /// Tokens that are computed at once.
    #[arg(long, default_value_t = 256)]
    pub chunk: usize,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Longest time of a load or store, and of any other call, milliseconds.
    #[arg(long, default_value_t = 20_000)]
    pub wait_ms: u64,
    /// Tell the daemon how long prefills take, so that it says what is better computed than loaded.
    #[arg(long)]
    pub report: bool,
}

impl Default for EngineArgs {
    fn default() -> EngineArgs {
        EngineArgs {
            socket: None,
            weights: None,
            shape: RandomShape::Small,
            seed: 1,
            tokens_per_block: 16,
            places: 64,
            chunk: 256,
            threads: 2,
            wait_ms: 20_000,
            report: false,
        }
    }
}

/// Why an engine cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Its weights cannot be had.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Its pool cannot be had.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The daemon refused something.
    #[error(transparent)]
    Client(#[from] kvtide_client::ClientError),
}

impl EngineArgs {
    /// The weights.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn weights(&self) -> Result<Weights, WeightsError> {
        match &self.weights {
            Some(path) => Weights::open(path),
            None => Ok(Weights::random(&self.shape.shape(), self.seed)),
        }
    }

    /// The engine. Where the daemon is not there, one without it, and a line on standard error.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self, weights: Arc<Weights>) -> Result<Engine, OpenError> {
        let wait = Duration::from_millis(self.wait_ms);
        let config = self
            .socket
            .as_ref()
            .map(|socket| ClientConfig { call_timeout: wait, ..ClientConfig::new(socket) });
        let cache = config.and_then(|config| {
            Cache::connect(config, &weights, self.tokens_per_block, wait)
                .inspect_err(|error| eprintln!("{error}; going on without kvtide"))
                .ok()
        });
        let pool = match &cache {
            Some(cache) => cache.pool(self.places)?,
            None => {
                let layout = namespace(&weights, self.tokens_per_block).layout;
                Pool::own(&layout, self.places).map_err(EngineError::from)?
            }
        };
        let engine = Engine::new(weights, pool, cache).with_chunk(self.chunk, self.threads);
        Ok(if self.report { engine.with_reports() } else { engine })
    }

    /// The command line that says it.
    fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = Vec::new();
        let mut option = |name: &str, value: OsString| line.extend([OsString::from(name), value]);
        if let Some(socket) = &self.socket {
            option("--socket", socket.into());
        }
        if let Some(weights) = &self.weights {
            option("--weights", weights.into());
        }
        let shape = self.shape.to_possible_value();
        option(
            "--shape",
            shape.map(|shape| shape.get_name().to_owned()).unwrap_or_default().into(),
        );
        option("--seed", self.seed.to_string().into());
        option("--tokens-per-block", self.tokens_per_block.to_string().into());
        option("--places", self.places.to_string().into());
        option("--chunk", self.chunk.to_string().into());
        option("--threads", self.threads.to_string().into());
        option("--wait-ms", self.wait_ms.to_string().into());
        if self.report {
            line.push("--report".into());
        }
        line
    }
}

/// A command to an engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Ask {
    Turn { conversation: u64, prompt: Vec<u32>, answer: usize },
    Find { prompt: Vec<u32> },
    Connection,
}

/// What an engine says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Say {
    Ready { cached: bool },
    Turn(TurnDone),
    Found(Vec<Found>),
    Connection(Connection),
    Failed(String),
}

/// A turn, and all that its bits can be compared by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnDone {
    /// What became of it.
    pub turn: Turn,
    /// Bits of the logits of the answer's first token.
    pub logits: Vec<u32>,
    /// The answer.
    pub answer: Vec<u32>,
    /// Digest of each full block of the sequence, as it lies in the pool.
    pub blocks: Vec<String>,
}

/// A run of blocks that a lookup found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Where they lie.
    pub tier: Tier,
    /// How many.
    pub blocks: u32,
}

/// How an engine's connection to the daemon is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Whether there is one.
    pub connected: bool,
    /// Calls that the daemon answered.
    pub calls_answered: u64,
    /// Calls that were answered at once because the circuit breaker was open.
    pub calls_skipped: u64,
    /// Calls that failed because there was no connection.
    pub calls_disconnected: u64,
    /// Times that the circuit breaker opened.
    pub breaker_opened: u64,
}

#[derive(Parser, Debug)]
#[command(name = "engine")]
struct Line {
    #[command(flatten)]
    args: EngineArgs,
}

/// What the process does: runs an engine until its standard input ends. `args` are
/// [`EngineArgs`] without the program's name.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let line = match Line::try_parse_from(std::iter::once(OsString::from("engine")).chain(args)) {
        Ok(line) => line,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(2);
        }
    };
    match serve(&line.args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("engine: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &EngineArgs) -> io::Result<()> {
    let opened = args.weights().map_err(OpenError::from);
    let mut engine = match opened.and_then(|weights| args.open(Arc::new(weights))) {
        Ok(engine) => engine,
        Err(error) => return say(&Say::Failed(error.to_string())),
    };
    say(&Say::Ready { cached: engine.cache().is_some() })?;
    for line in io::stdin().lines() {
        let ask: Ask = serde_json::from_str(&line?)?;
        say(&answer(&mut engine, ask).unwrap_or_else(|error| Say::Failed(error.to_string())))?;
    }
    Ok(())
}

fn say(what: &Say) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    out.flush()
}

fn answer(engine: &mut Engine, ask: Ask) -> Result<Say, EngineError> {
    Ok(match ask {
        Ask::Turn { conversation, prompt, answer } => {
            let (turn, logits, answer) = engine.turn(conversation, &prompt, answer)?;
            let full = prompt.len() / engine.pool().tokens_per_block();
            let mut blocks = Vec::new();
            for place in engine.places().iter().take(full) {
                let block = engine.pool().block(*place)?;
                blocks.push(blake3::hash(&block).to_hex().to_string());
            }
            let logits = logits.iter().map(|logit| logit.to_bits()).collect();
            Say::Turn(TurnDone { turn, logits, answer, blocks })
        }
        Ask::Find { prompt } => {
            let runs = engine.cache().map(|cache| cache.find(&prompt)).unwrap_or_default();
            let found = runs.iter().map(|run| Found { tier: run.tier, blocks: run.blocks });
            Say::Found(found.collect())
        }
        Ask::Connection => {
            let client = engine.cache().map(|cache| cache.client());
            let counters = client.map(|client| client.counters()).unwrap_or_default();
            Say::Connection(Connection {
                connected: client.is_some_and(|client| client.is_connected()),
                calls_answered: counters.calls_answered,
                calls_skipped: counters.calls_skipped,
                calls_disconnected: counters.calls_disconnected,
                breaker_opened: counters.breaker_opened,
            })
        }
    })
}

/// Why an engine process did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// It cannot be started, or cannot be heard.
    #[error("the engine process: {0}")]
    Io(#[from] io::Error),
    /// It has ended.
    #[error("the engine process has ended")]
    Ended,
    /// It says something else than what was asked for.
    #[error("the engine process says {0}")]
    Unexpected(String),
}

/// An engine process. Killed when dropped.
pub struct EngineProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    cached: bool,
}

impl EngineProcess {
    /// Starts it. `command` is a program that does [`run`] with the arguments that are added here.
    ///
    /// # Errors
    /// It did not start; it says why.
    pub fn start(mut command: Command, args: &EngineArgs) -> Result<EngineProcess, ProcessError> {
        command.args(args.command_line()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { return Err(ProcessError::Ended) };
        let output = BufReader::new(output);
        let mut process = EngineProcess { child, input, output, cached: false };
        match process.hear()? {
            Say::Ready { cached } => process.cached = cached,
            other => return Err(unexpected(&other)),
        }
        Ok(process)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it found the daemon when it started.
    pub fn is_cached(&self) -> bool {
        self.cached
    }

    /// One turn, with so many tokens of answer.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn turn(
        &mut self,
        conversation: u64,
        prompt: &[u32],
        answer: usize,
    ) -> Result<TurnDone, ProcessError> {
        self.begin(conversation, prompt, answer)?;
        self.end()
    }

    /// Begins a turn, whose answer is [`EngineProcess::end`]'s.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn begin(
        &mut self,
        conversation: u64,
        prompt: &[u32],
        answer: usize,
    ) -> Result<(), ProcessError> {
        self.tell(&Ask::Turn { conversation, prompt: prompt.to_vec(), answer })
    }

    /// Waits for the turn that was begun.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn end(&mut self) -> Result<TurnDone, ProcessError> {
        match self.hear()? {
            Say::Turn(done) => Ok(done),
            other => Err(unexpected(&other)),
        }
    }

    /// Where the blocks of a prompt lie that a turn would load now, root first.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn find(&mut self, prompt: &[u32]) -> Result<Vec<Found>, ProcessError> {
        self.tell(&Ask::Find { prompt: prompt.to_vec() })?;
        match self.hear()? {
            Say::Found(found) => Ok(found),
            other => Err(unexpected(&other)),
        }
    }

    /// How its connection is.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn connection(&mut self) -> Result<Connection, ProcessError> {
        self.tell(&Ask::Connection)?;
        match self.hear()? {
            Say::Connection(connection) => Ok(connection),
            other => Err(unexpected(&other)),
        }
    }

    fn tell(&mut self, ask: &Ask) -> Result<(), ProcessError> {
        let line = serde_json::to_string(ask).map_err(io::Error::from)?;
        writeln!(self.input, "{line}")?;
        Ok(())
    }

    fn hear(&mut self) -> Result<Say, ProcessError> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() {
            return Err(ProcessError::Ended);
        }
        Ok(serde_json::from_str(&line).map_err(io::Error::from)?)
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        // One that ended already cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn unexpected(say: &Say) -> ProcessError {
    ProcessError::Unexpected(match say {
        Say::Failed(why) => why.clone(),
        Say::Ready { .. } => "that it is ready".to_owned(),
        Say::Turn(_) | Say::Found(_) | Say::Connection(_) => "another answer".to_owned(),
    })
}
