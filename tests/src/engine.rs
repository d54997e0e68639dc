//! The tests' side of an engine process ([`crate::gpu`]), and daemons that use the fake driver.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use clap::ValueEnum;
use kvtide_client::blocking::Client;

use crate::daemon::Setup;
use crate::gpu::EngineSpec;
use crate::proc::poll_until;

/// Longest time until an engine has come back, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A schedule of faults of the daemon's driver that can be changed while it runs.
pub struct FaultFile(PathBuf);

impl FaultFile {
    /// Fails calls from now on, counted from now; see `fakecuda`.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn set(&self, faults: &str) {
        let new = self.0.with_extension("new");
        std::fs::write(&new, faults).expect("the file can be written");
        // The driver must not see half of it.
        std::fs::rename(&new, &self.0).expect("the file can be put in place");
    }

    /// No more faults; what hangs goes on.
    ///
    /// # Panics
    /// When the file cannot be removed.
    pub fn clear(&self) {
        std::fs::remove_file(&self.0).expect("the file is there");
    }
}

impl Setup {
    /// A daemon on the fake driver, with one GPU and a pool of this size.
    #[must_use]
    pub fn gpu(self, pool_bytes: &str) -> Setup {
        self.option("--device-library", fakecuda::library())
            .option("--device-pool-bytes", pool_bytes)
    }

    /// Faults of the daemon's driver, to be set later.
    #[must_use]
    pub fn fault_file(self) -> (Setup, FaultFile) {
        let path = self.path("faults");
        (self.env("FAKECUDA_FAULT_FILE", &path), FaultFile(path))
    }

    /// Starts an engine, whose driver has this environment, and waits until its pool is registered.
    ///
    /// # Panics
    /// When it is refused.
    pub fn engine(&self, spec: &EngineSpec, env: &[(&str, &str)]) -> GpuEngine {
        self.try_engine(spec, env).unwrap_or_else(|why| panic!("{spec:?}: {why}"))
    }

    /// As [`Setup::engine`].
    ///
    /// # Errors
    /// Why the daemon refused its pool.
    ///
    /// # Panics
    /// When it cannot be started at all.
    pub fn try_engine(&self, spec: &EngineSpec, env: &[(&str, &str)]) -> Result<GpuEngine, String> {
        let word = |value: Option<clap::builder::PossibleValue>| {
            value.expect("no value is hidden").get_name().to_owned()
        };
        let options = [
            ("--revision", spec.revision.clone()),
            ("--shape", word(spec.shape.to_possible_value())),
            ("--tokens", spec.tokens.to_string()),
            ("--places", spec.places.to_string()),
            ("--memory", word(spec.memory.to_possible_value())),
            ("--order", word(spec.order.to_possible_value())),
        ];
        let mut command = self.program("__engine");
        command.arg(self.socket()).envs(env.iter().copied());
        command.args(options.iter().flat_map(|(name, value)| [*name, value.as_str()]));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("the test's program can be started");
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("it was piped"));
        let mut engine = GpuEngine { process, input, output };
        match engine.hear().split_once(' ') {
            None => Ok(engine),
            Some((_, why)) => Err(why.to_owned()),
        }
    }
}

/// An engine process. Killed when dropped.
pub struct GpuEngine {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl GpuEngine {
    /// Gives a command and does not wait for its answer.
    ///
    /// # Panics
    /// When the engine has ended.
    pub fn tell(&mut self, command: &str) {
        let input = self.input.as_mut().expect("taken at the end only");
        writeln!(input, "{command}").expect("the engine is there");
    }

    /// The next answer.
    ///
    /// # Panics
    /// When the engine has ended, or was given a wrong byte.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the engine speaks UTF-8");
        assert!(!line.is_empty(), "the engine has ended");
        assert!(!line.starts_with("WRONG"), "{line}");
        line.trim_end().to_owned()
    }

    /// Gives a command and waits for its answer.
    ///
    /// # Panics
    /// As [`GpuEngine::hear`].
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.hear()
    }

    /// Stores a prompt; the outcomes.
    ///
    /// # Panics
    /// As [`GpuEngine::hear`].
    pub fn store(&mut self, seed: u32, blocks: usize) -> Vec<String> {
        words(&self.ask(&format!("store {seed} {blocks}")))
    }

    /// Loads what is there of a prompt, and has every byte looked at; the outcomes.
    ///
    /// # Panics
    /// When a byte is wrong.
    pub fn load(&mut self, seed: u32, blocks: usize) -> Vec<String> {
        match self.ask(&format!("load {seed} {blocks}")).as_str() {
            "nothing" => Vec::new(),
            answer => words(answer),
        }
    }

    /// As [`GpuEngine::load`], after the daemon came back: waits until the engine is connected and
    /// its pool is imported again, which takes a moment in which it misses.
    ///
    /// # Panics
    /// When a byte is wrong, or it does not come back.
    pub fn load_when_back(&mut self, seed: u32, blocks: usize) -> Vec<String> {
        assert_eq!(self.ask("connected"), "ok");
        let outcomes = poll_until(PATIENCE, || {
            let outcomes = self.load(seed, blocks);
            (!outcomes.iter().any(|outcome| outcome == "Missed(Gone)")).then_some(outcomes)
        });
        outcomes.expect("its pool is imported again")
    }

    /// Whether it runs.
    ///
    /// # Panics
    /// When the system says nothing about it.
    pub fn is_alive(&mut self) -> bool {
        self.process.try_wait().expect("the child is ours").is_none()
    }

    /// Kills it, and waits until it is gone.
    ///
    /// # Panics
    /// When it is not there.
    pub fn kill9(mut self) {
        self.process.kill().expect("the child is ours");
        self.process.wait().expect("the child is ours");
    }

    /// Ends it in order.
    ///
    /// # Panics
    /// When it broke a rule of the driver, or does not end well.
    pub fn end(mut self) {
        assert_eq!(self.ask("violations"), "0", "the engine broke the driver's rules");
        drop(self.input.take());
        let status = self.process.wait().expect("the child is ours");
        assert!(status.success(), "{status}");
    }
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        // One that ended already cannot be killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// What is the matter with the daemon's only GPU: why it is off; whether it is stuck, and its
/// health in words.
///
/// # Panics
/// When the daemon does not answer, or has another number of GPUs.
pub fn gpu_state(client: &Client) -> (Option<String>, bool, String) {
    let status = client.status().expect("the daemon answers");
    match status.devices.as_slice() {
        [gpu] => (gpu.off.clone(), gpu.stuck, gpu.health.clone()),
        gpus => panic!("{} GPUs; the tier: {}", gpus.len(), status.device),
    }
}
