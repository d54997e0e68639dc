//! Where a subcommand's result goes: text for people, one JSON value for programs.

use std::io::{self, Write};

use serde::Serialize;

use super::error::CliError;

/// How results are printed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out {
    pub(crate) json: bool,
}

impl Out {
    /// Prints `value` as JSON, or what `text` makes of it.
    pub(crate) fn emit<T: Serialize>(
        &self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), CliError> {
        if !self.json {
            return print(&text(value));
        }
        let mut line = serde_json::to_string(value).map_err(CliError::failed)?;
        line.push('\n');
        print(&line)
    }
}

/// Writes to standard output. Whoever reads it may stop at any time (`kvtide ls | head`).
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| {
        match error.kind() {
            io::ErrorKind::BrokenPipe => CliError::Closed,
            _ => CliError::Failed(format!("cannot write to standard output: {error}")),
        }
    })
}
