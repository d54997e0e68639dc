//! What can go wrong for somebody at a terminal, and the exit code that says so.

use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use kvtide_client::ClientError;

/// Why a subcommand did not end well. The text is one sentence or a few: what, where, what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// It failed. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// A problem was found and already printed. Exit code 1.
    #[error("")]
    Found,
    /// Whoever read the output has seen enough. Exit code 0.
    #[error("")]
    Closed,
    /// The command line makes no sense. Exit code 2, as for what clap refuses.
    #[error("{0}")]
    Usage(String),
    /// The daemon cannot be reached. Exit code 3.
    #[error("{0}")]
    Unreachable(String),
}

impl CliError {
    pub(crate) fn failed(what: impl fmt::Display) -> CliError {
        CliError::Failed(what.to_string())
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            CliError::Closed => ExitCode::SUCCESS,
            CliError::Failed(_) | CliError::Found => ExitCode::from(1),
            CliError::Usage(_) => ExitCode::from(2),
            CliError::Unreachable(_) => ExitCode::from(3),
        }
    }

    /// An error of the client library, for a daemon expected at `socket`.
    pub(crate) fn client(socket: &Path, error: ClientError) -> CliError {
        match error {
            ClientError::Connect { source, .. } => {
                let advice = match source.kind() {
                    std::io::ErrorKind::NotFound => {
                        "no daemon has made it; start kvtided, or name its socket with --socket"
                    }
                    std::io::ErrorKind::ConnectionRefused => {
                        "the daemon that made it is gone; start kvtided again"
                    }
                    std::io::ErrorKind::PermissionDenied => {
                        "your user may not use it; join the group that owns the socket"
                    }
                    _ => "check the path, and that kvtided runs",
                };
                CliError::Unreachable(format!(
                    "cannot reach kvtided at {}: {source} ({advice})",
                    socket.display()
                ))
            }
            error @ (ClientError::Deadline { .. }
            | ClientError::BreakerOpen { .. }
            | ClientError::Disconnected) => {
                CliError::Unreachable(format!("kvtided at {}: {error}", socket.display()))
            }
            error => CliError::Failed(error.to_string()),
        }
    }
}
