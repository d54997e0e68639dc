//! What the demo prints: a line for each turn, and the sums at the end.

use std::time::Duration;

use serde::Serialize;

use super::script;
use super::wire::TurnDone;
use crate::cli::table::{Align, Table, pairs};
use crate::units::{bytes, count, percent, span};

/// The speed of prefill that the last lines of the summary assume, tokens a second.
const PREFILL_TOKENS_S: u64 = 5_000;

/// Sums over a whole run. The first nine names are those that `replay` and `sim` have as well.
#[derive(Serialize, Default, Debug)]
pub(crate) struct Summary {
    pub(crate) requests: u64,
    pub(crate) blocks_hit_device: u64,
    pub(crate) blocks_hit_host: u64,
    pub(crate) blocks_hit_nvme: u64,
    pub(crate) blocks_missed: u64,
    pub(crate) blocks_verified: u64,
    pub(crate) wrong_bytes: u64,
    pub(crate) client_failures: u64,
    pub(crate) seconds: f64,
    pub(crate) blocks_stored: u64,
    pub(crate) blocks_not_stored: u64,
    pub(crate) bytes_loaded: u64,
    pub(crate) bytes_stored: u64,
    pub(crate) load_us: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) prompt_tokens_computed: u64,
    pub(crate) clients_killed: u64,
    pub(crate) daemons_killed: u64,
    pub(crate) failures: Vec<String>,
    pub(crate) turns: Vec<TurnDone>,
}

impl Summary {
    pub(crate) fn add(&mut self, done: TurnDone) {
        self.requests += 1;
        self.blocks_hit_device += done.blocks_hit_device;
        self.blocks_hit_host += done.blocks_hit_host;
        self.blocks_hit_nvme += done.blocks_hit_nvme;
        self.blocks_missed += done.blocks_missed;
        self.blocks_verified += done.blocks_verified;
        self.wrong_bytes += done.wrong_bytes;
        self.blocks_stored += done.blocks_stored;
        self.blocks_not_stored += done.blocks_not_stored;
        self.bytes_loaded += done.bytes_loaded;
        self.bytes_stored += done.bytes_stored;
        self.load_us += done.load_us;
        let block_tokens = script::BLOCK_TOKENS as u64;
        self.prompt_tokens += done.prompt_blocks * block_tokens;
        self.prompt_tokens_computed += done.blocks_missed * block_tokens;
        self.turns.push(done);
    }

    pub(crate) fn fail(&mut self, what: String) {
        self.client_failures += 1;
        self.failures.push(what);
    }

    /// Whether kvtide kept its promises.
    pub(crate) fn good(&self) -> bool {
        self.wrong_bytes == 0 && self.client_failures == 0
    }

    pub(crate) fn text(&self) -> String {
        let mut out = format!("{}\n{}", self.blocks_text(), self.facts_text());
        for failure in &self.failures {
            out.push_str(&format!("FAILED: {failure}\n"));
        }
        out.push_str(match (self.wrong_bytes, self.client_failures) {
            (0, 0) => "\nEvery block that came back was the one that was stored.\n",
            (0, _) => "\nSome clients failed. That must never happen; please report it.\n",
            _ => "\nWRONG BYTES CAME BACK. That must never happen; please report it.\n",
        });
        out
    }

    fn blocks_text(&self) -> String {
        let prompt_blocks = self.prompt_tokens / script::BLOCK_TOKENS as u64;
        let mut table = Table::new(&[
            ("PROMPT BLOCKS", Align::Left),
            ("BLOCKS", Align::Right),
            ("SHARE", Align::Right),
            ("TOKENS", Align::Right),
        ]);
        for (name, blocks) in [
            ("reused from GPU", self.blocks_hit_device),
            ("reused from RAM", self.blocks_hit_host),
            ("reused from NVMe", self.blocks_hit_nvme),
            ("computed anew", self.blocks_missed),
        ] {
            let tokens = count(blocks * script::BLOCK_TOKENS as u64);
            table.row([name.to_owned(), count(blocks), percent(blocks, prompt_blocks), tokens]);
        }
        table.rule();
        let tokens = count(self.prompt_tokens);
        table.row(["all".to_owned(), count(prompt_blocks), percent(1, 1), tokens]);
        table.render()
    }

    fn facts_text(&self) -> String {
        let reused = self.prompt_tokens - self.prompt_tokens_computed;
        let prefill = Duration::from_millis(reused * 1000 / PREFILL_TOKENS_S);
        let moved = |bytes_out, bytes_in| {
            format!("{} out of the cache, {} into it", bytes(bytes_out), bytes(bytes_in))
        };
        let all = count(self.prompt_tokens);
        pairs(&[
            ("turns", count(self.requests)),
            (
                "killed with SIGKILL",
                format!("{} client, {} daemon", self.clients_killed, self.daemons_killed),
            ),
            ("moved", moved(self.bytes_loaded, self.bytes_stored)),
            ("blocks compared", format!("{}, every byte", count(self.blocks_verified))),
            ("wrong bytes", count(self.wrong_bytes)),
            ("client failures", count(self.client_failures)),
            (
                "with kvtide",
                format!("{} of {all} prompt tokens computed", count(self.prompt_tokens_computed)),
            ),
            ("without", format!("all {all} computed, since every turn lands on another process")),
            (
                "saved",
                format!(
                    "{} of prefill at {} tokens/s, for {} of loading",
                    span(prefill),
                    count(PREFILL_TOKENS_S),
                    span(Duration::from_micros(self.load_us))
                ),
            ),
            ("took", format!("{:.1} s", self.seconds)),
        ])
    }
}

const COLUMNS: [(&str, usize); 9] = [
    ("TURN", 4),
    ("CONV", 5),
    ("PROCESS", 8),
    ("PROMPT", 7),
    ("RAM", 5),
    ("NVME", 5),
    ("MISSED", 7),
    ("LOADED", 10),
    ("TIME", 9),
];

fn line(cells: &[String; COLUMNS.len()]) -> String {
    let mut out = String::new();
    for (cell, (_, width)) in cells.iter().zip(COLUMNS) {
        out.push_str(&format!("{cell:>width$} "));
    }
    format!("{}\n", out.trim_end())
}

/// The names of the columns of [`turn_line`].
pub(crate) fn turn_header() -> String {
    line(&COLUMNS.map(|(name, _)| name.to_owned()))
}

/// One turn, as taken by process number `process`.
pub(crate) fn turn_line(done: &TurnDone, process: usize) -> String {
    line(&[
        (done.turn + 1).to_string(),
        char::from(b'A' + (done.conversation % 26) as u8).to_string(),
        (process + 1).to_string(),
        count(done.prompt_blocks),
        count(done.blocks_hit_host),
        count(done.blocks_hit_nvme),
        count(done.blocks_missed),
        bytes(done.bytes_loaded),
        span(Duration::from_micros(done.load_us)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_adds_up_and_is_honest_about_failures() {
        let mut summary = Summary::default();
        let done = TurnDone {
            prompt_blocks: 10,
            blocks_hit_host: 4,
            blocks_hit_nvme: 3,
            blocks_missed: 3,
            blocks_verified: 7,
            ..TurnDone::default()
        };
        summary.add(done.clone());
        assert!(summary.good());
        assert_eq!(summary.prompt_tokens, 160);
        assert!(summary.text().contains("48 of 160 prompt tokens computed"), "{}", summary.text());
        assert!(turn_line(&done, 1).contains("A"), "{}", turn_line(&done, 1));
        summary.add(TurnDone { wrong_bytes: 1, ..done });
        assert!(!summary.good());
        assert!(summary.text().contains("WRONG BYTES"));
    }

    #[test]
    fn the_json_has_the_names_that_all_runs_share() {
        let value = serde_json::to_value(Summary::default()).unwrap();
        for name in [
            "requests",
            "blocks_hit_device",
            "blocks_hit_host",
            "blocks_hit_nvme",
            "blocks_missed",
            "blocks_verified",
            "wrong_bytes",
            "client_failures",
            "seconds",
        ] {
            assert!(value.get(name).is_some_and(serde_json::Value::is_number), "{name}");
        }
    }
}
