//! What the service manager is told. Without one, nothing is sent.

use std::time::Duration;

use sd_notify::NotifyState;

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager could not be told");
    }
}

/// The daemon serves.
pub fn ready(status: &str) {
    send(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// The daemon stops.
pub fn stopping() {
    send(&[NotifyState::Stopping, NotifyState::Status("draining")]);
}

/// A line about what goes on.
pub fn status(status: &str) {
    send(&[NotifyState::Status(status)]);
}

/// The catalog's thread answered.
pub fn watchdog() {
    send(&[NotifyState::Watchdog]);
}

/// How often the service manager wants to hear of it, if it does.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled()
}
