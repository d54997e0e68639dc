//! The environment, read once. A value that cannot be read ends the process: a test with a typo
//! must not pass.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

pub(crate) struct Config {
    pub(crate) devices: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) driver_version: i32,
    pub(crate) compute_mode: i32,
    pub(crate) jitter: Duration,
    pub(crate) seed: u64,
    pub(crate) faults: String,
    pub(crate) fault_file: Option<PathBuf>,
    /// Whether waiting for an event of a process that died never ends.
    pub(crate) dead_event_hangs: bool,
}

static CONFIG: LazyLock<Config> = LazyLock::new(|| Config {
    devices: number("FAKECUDA_DEVICES", 1),
    memory_bytes: number("FAKECUDA_MEMORY", 1 << 30),
    driver_version: number("FAKECUDA_DRIVER_VERSION", 13000),
    compute_mode: number("FAKECUDA_COMPUTE_MODE", 0),
    jitter: Duration::from_micros(number("FAKECUDA_JITTER_US", 0)),
    seed: number("FAKECUDA_SEED", 1),
    faults: std::env::var("FAKECUDA_FAULTS").unwrap_or_default(),
    fault_file: std::env::var_os("FAKECUDA_FAULT_FILE").map(PathBuf::from),
    dead_event_hangs: match std::env::var("FAKECUDA_DEAD_EVENT").as_deref() {
        Ok("hang") => true,
        Ok("done") | Err(_) => false,
        Ok(other) => give_up(format!("FAKECUDA_DEAD_EVENT is {other:?}, not done or hang")),
    },
});

pub(crate) fn config() -> &'static Config {
    &CONFIG
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    match std::env::var(name) {
        Ok(text) => text
            .trim()
            .parse()
            .unwrap_or_else(|_| give_up(format!("{name} is {text:?}, not a number"))),
        Err(_) => default,
    }
}

/// Ends the process: what was asked of the fake makes no sense.
pub(crate) fn give_up(why: impl Display) -> ! {
    eprintln!("fakecuda: {why}");
    std::process::abort();
}
