//! The log on standard error, as text or JSON, with a level that can change while it runs.

use tracing::Level;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use crate::config::{LogFormat, LogSettings};

/// Changes the log's level.
pub struct LogLevel(Option<reload::Handle<EnvFilter, Registry>>);

impl LogLevel {
    /// From now on, `level` is the least that is logged.
    pub fn set(&self, level: Level) {
        if let Some(handle) = &self.0 {
            let _ = handle.reload(filter(level));
        }
    }
}

/// Starts the log. Where the process has one already (in tests), that one stays.
pub fn start(settings: LogSettings) -> LogLevel {
    let (filter, handle) = reload::Layer::new(filter(settings.level));
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let layer = match settings.format {
        LogFormat::Text => {
            layer.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).boxed()
        }
        LogFormat::Json => {
            layer.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
        }
    };
    // The filter is the outermost layer, so that the handle's type names the registry.
    let started = Registry::default().with(filter).with(layer).try_init();
    LogLevel(started.is_ok().then_some(handle))
}

/// The daemon's own crates at `level`; of the libraries below only warnings.
fn filter(level: Level) -> EnvFilter {
    EnvFilter::new(format!(
        "warn,kvtide_daemon={level},kvtide_tiers={level},kvtide_client={level},kvtided={level}"
    ))
}
