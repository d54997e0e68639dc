//! What the subcommands print: tables for people, one JSON object for programs.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// The fields that the last object of every `--json` output has. What does not apply is 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests done.
    pub requests: u64,
    /// Blocks that came from GPU memory.
    pub blocks_hit_device: u64,
    /// Blocks that came from host RAM.
    pub blocks_hit_host: u64,
    /// Blocks that came from nvme.
    pub blocks_hit_nvme: u64,
    /// Blocks that were not in the cache, or could not be given.
    pub blocks_missed: u64,
    /// Blocks whose every byte was compared.
    pub blocks_verified: u64,
    /// Bytes of them that were wrong.
    pub wrong_bytes: u64,
    /// Errors that a client saw, other than misses.
    pub client_failures: u64,
    /// How long it took.
    pub seconds: f64,
}

impl Summary {
    /// Blocks that hit, in any tier.
    pub fn blocks_hit(&self) -> u64 {
        self.blocks_hit_device + self.blocks_hit_host + self.blocks_hit_nvme
    }

    /// Blocks that were asked for.
    pub fn blocks(&self) -> u64 {
        self.blocks_hit() + self.blocks_missed
    }
}

/// Writes a line to standard output; a reader that went away ends the output silently.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Prints `value` as one line of JSON.
///
/// # Errors
/// The value has a form that JSON cannot express.
pub fn say_json<T: Serialize>(value: &T) -> Result<(), serde_json::Error> {
    say(&serde_json::to_string(value)?);
    Ok(())
}

/// Rows of cells, printed with aligned columns: the first one to the left, the others to the right.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Adds a row.
    pub fn row<I: IntoIterator<Item = S>, S: Into<String>>(&mut self, cells: I) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// The lines.
    pub fn lines(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, width))| match at {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }

    /// Prints it.
    pub fn say(&self) {
        self.lines().iter().for_each(|line| say(line));
    }
}

/// A progress bar on standard error that shows itself only when the work takes longer than two
/// seconds, and never when standard error is not a terminal.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
}

impl Progress {
    /// A bar of `total` steps.
    pub fn new(total: u64) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(
            "{elapsed_precise} {wide_bar} {human_pos}/{human_len} {per_sec} eta {eta} {msg}",
        ) {
            bar.set_style(style);
        }
        Progress { bar, started: Instant::now() }
    }

    /// `done` steps are done.
    pub fn set(&self, done: u64) {
        if self.bar.is_hidden() && self.started.elapsed() > Duration::from_secs(2) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_position(done);
    }

    /// Shows a few words behind the bar.
    pub fn note(&self, words: String) {
        self.bar.set_message(words);
    }

    /// Takes the bar away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::default();
        table.row(["name", "count"]);
        table.row(["a", "1,234,567"]);
        table.row(["longer"]);
        assert_eq!(table.lines(), ["name        count", "a       1,234,567", "longer"]);
    }

    #[test]
    fn the_summary_has_the_agreed_fields() {
        let json = serde_json::to_value(Summary::default()).unwrap();
        let fields = [
            "requests",
            "blocks_hit_device",
            "blocks_hit_host",
            "blocks_hit_nvme",
            "blocks_missed",
            "blocks_verified",
            "wrong_bytes",
            "client_failures",
            "seconds",
        ];
        assert!(fields.iter().all(|field| json[field].is_number()), "{json}");
    }
}
