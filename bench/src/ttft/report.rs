//! What was measured, as a table, as JSON and as a chart.

use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};
use smallengine::process::TurnDone;

use super::plot::{Axis, Chart, Line};
use crate::{
    report::{Summary, Table, say},
    tiers::{Loaded, median},
    units::{show_bytes, show_count, show_micros},
};

/// How a prompt's start was had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Way {
    /// Computed.
    Recompute,
    /// Reloaded from nvme.
    Nvme,
    /// Reloaded from host RAM.
    Host,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Recompute, Way::Nvme, Way::Host];

    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Recompute => "recompute",
            Way::Nvme => "nvme",
            Way::Host => "host RAM",
        }
    }
}

/// What a run was of.
#[derive(Clone, Debug, Serialize)]
pub(super) struct About {
    pub(super) model: String,
    pub(super) engine: &'static str,
    pub(super) tokens_per_block: u32,
    pub(super) block_bytes: u64,
    pub(super) new_tokens: usize,
    pub(super) rounds: u32,
    pub(super) folder: String,
    pub(super) file_system: String,
    pub(super) host_pages: String,
    pub(super) nvme_io: String,
    pub(super) raw_io: Option<String>,
}

impl About {
    /// Whether nvme was read past the page cache. What was not says nothing about a disk.
    fn is_direct(&self) -> bool {
        self.nvme_io.contains("past the page cache")
    }
}

/// One turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    first_token_us: f64,
    load_us: f64,
    computed_tokens: usize,
    bytes: u64,
    /// Blocks whose KV was compared with a recompute's.
    blocks: u64,
    /// Those of them that differ, and logits that do.
    wrong: u64,
}

impl Cell {
    /// A turn, compared with what is right.
    pub(super) fn of(done: &TurnDone, right: &TurnDone) -> Cell {
        let blocks = done.blocks.iter().zip(&right.blocks).filter(|(one, other)| one != other);
        let logits = done.logits.iter().zip(&right.logits).filter(|(one, other)| one != other);
        let lengths = u64::from(
            done.blocks.len() != right.blocks.len() || done.logits.len() != right.logits.len(),
        );
        Cell {
            first_token_us: done.turn.first_token_us as f64,
            load_us: done.turn.reuse.load_us as f64,
            computed_tokens: done.turn.recomputed_tokens,
            bytes: done.turn.reuse.bytes,
            blocks: done.blocks.len() as u64,
            wrong: blocks.count() as u64 + logits.count() as u64 + lengths,
        }
    }
}

/// All turns.
pub(super) struct Measured {
    prefixes: Vec<usize>,
    cells: Vec<(usize, Way, Cell)>,
    bandwidth: Vec<Loaded>,
    summary: Summary,
    started: Instant,
}

/// The medians of one prefix and way.
#[derive(Clone, Debug, Serialize)]
struct Row {
    prefix_tokens: usize,
    way: Way,
    computed_tokens: usize,
    bytes: u64,
    first_token_us_p50: f64,
    first_token_us_min: f64,
    first_token_us_max: f64,
    load_us_p50: f64,
    load_gb_s: f64,
    /// Bytes by bandwidth; absent where nothing is loaded or nothing was measured.
    load_arithmetic_us: Option<f64>,
    /// Tokens by the cost of a token, and the bytes.
    first_token_arithmetic_us: f64,
    /// How many times as long a recompute took: the median over the rounds.
    recompute_to_this: f64,
}

impl Measured {
    pub(super) fn new(prefixes: &[usize]) -> Measured {
        Measured {
            prefixes: prefixes.to_vec(),
            cells: Vec::new(),
            bandwidth: Vec::new(),
            summary: Summary::default(),
            started: Instant::now(),
        }
    }

    pub(super) fn add_bandwidth(&mut self, loaded: Loaded) {
        self.bandwidth.push(loaded);
    }

    pub(super) fn add(&mut self, prefix: usize, way: Way, cell: Cell) {
        self.summary.requests += 1;
        self.summary.blocks_verified += cell.blocks;
        self.summary.client_failures += cell.wrong;
        match way {
            Way::Recompute => {}
            Way::Nvme => self.summary.blocks_hit_nvme += cell.blocks,
            Way::Host => self.summary.blocks_hit_host += cell.blocks,
        }
        if cell.wrong > 0 {
            eprintln!("{prefix} tokens by {}: {} things differ", way.name(), cell.wrong);
        }
        self.cells.push((prefix, way, cell));
    }

    /// Whether all bits were right.
    pub(super) fn is_clean(&self) -> bool {
        self.summary.client_failures == 0
    }

    fn of(&self, prefix: usize, way: Way) -> Vec<Cell> {
        let cells = self.cells.iter().filter(|(of, by, _)| (*of, *by) == (prefix, way));
        cells.map(|(_, _, cell)| *cell).collect()
    }

    fn median(&self, prefix: usize, way: Way, value: impl Fn(&Cell) -> f64) -> f64 {
        median(self.of(prefix, way).iter().map(value)).unwrap_or(0.0)
    }

    /// What a token costs, microseconds: of the shortest prompt, where attention is cheapest.
    fn token_us(&self) -> f64 {
        let Some(shortest) = self.prefixes.iter().min() else { return 0.0 };
        self.median(*shortest, Way::Recompute, |cell| {
            cell.first_token_us / cell.computed_tokens.max(1) as f64
        })
    }

    fn gb_s(&self, way: Way) -> Option<f64> {
        let of = |loaded: &Loaded| match way {
            Way::Recompute => None,
            Way::Nvme => Some(loaded.raw_gb_s),
            Way::Host => Some(loaded.memcpy_gb_s),
        };
        median(self.bandwidth.iter().filter_map(of)).filter(|gb_s| *gb_s > 0.0)
    }

    fn row(&self, prefix: usize, way: Way) -> Option<Row> {
        let cells = self.of(prefix, way);
        let first = *cells.first()?;
        let times = || cells.iter().map(|cell| cell.first_token_us);
        let load_us = self.median(prefix, way, |cell| cell.load_us);
        let load_arithmetic_us = self.gb_s(way).map(|gb_s| first.bytes as f64 / (gb_s * 1e9) * 1e6);
        let computed_us = first.computed_tokens as f64 * self.token_us();
        let recompute = self.of(prefix, Way::Recompute);
        let ratios = recompute.iter().zip(&cells);
        let ratios = ratios.map(|(one, other)| one.first_token_us / other.first_token_us.max(1.0));
        Some(Row {
            prefix_tokens: prefix,
            way,
            computed_tokens: first.computed_tokens,
            bytes: first.bytes,
            first_token_us_p50: median(times()).unwrap_or(0.0),
            first_token_us_min: times().fold(f64::INFINITY, f64::min),
            first_token_us_max: times().fold(0.0, f64::max),
            load_us_p50: load_us,
            load_gb_s: first.bytes as f64 / 1e3 / load_us.max(1.0),
            load_arithmetic_us,
            first_token_arithmetic_us: computed_us + load_arithmetic_us.unwrap_or(0.0),
            recompute_to_this: median(ratios).unwrap_or(0.0),
        })
    }

    fn rows(&self) -> Vec<Row> {
        let mut prefixes = self.prefixes.clone();
        prefixes.sort_unstable();
        let rows = prefixes
            .iter()
            .flat_map(|prefix| Way::ALL.into_iter().filter_map(|way| self.row(*prefix, way)));
        rows.collect()
    }

    pub(super) fn json(&self, about: &About) -> Value {
        let summary =
            Summary { seconds: self.started.elapsed().as_secs_f64(), ..self.summary.clone() };
        let mut object = json!(summary);
        if let Some(object) = object.as_object_mut() {
            object.insert("about".into(), json!(about));
            object.insert("nvme_past_the_page_cache".into(), about.is_direct().into());
            object.insert("token_us".into(), self.token_us().into());
            object.insert("memcpy_gb_s".into(), json!(self.gb_s(Way::Host)));
            object.insert("raw_gb_s".into(), json!(self.gb_s(Way::Nvme)));
            object.insert("rows".into(), json!(self.rows()));
        }
        object
    }

    pub(super) fn say(&self, about: &About) {
        let gb_s = |way| {
            self.gb_s(way)
                .map_or_else(|| "not measured".to_owned(), |gb_s| format!("{gb_s:.2} GB/s"))
        };
        say(&format!(
            "engine: {}; blocks of {} tokens, {}; {} rounds; {} tokens of each prompt are new",
            about.engine,
            about.tokens_per_block,
            show_bytes(about.block_bytes),
            about.rounds,
            about.new_tokens
        ));
        say(&format!(
            "nvme: {} on {}; host: {}\nin the same rounds: memcpy {}, raw ring {}, a token {}",
            about.nvme_io,
            about.file_system,
            about.host_pages,
            gb_s(Way::Host),
            gb_s(Way::Nvme),
            show_micros(self.token_us() as u64)
        ));
        if !about.is_direct() {
            say("nvme was read THROUGH THE PAGE CACHE: its figures say nothing about the disk");
        }
        self.table().say();
        say("\"arithmetic\" is bytes by the bandwidth above, and with it the computed tokens by \
             the cost of one in the shortest prompt; attention makes later tokens cost more.");
        let verified = show_count(self.summary.blocks_verified);
        match self.summary.client_failures {
            0 => say(&format!("KV of {verified} blocks and all logits: equal to the bit")),
            wrong => say(&format!("{wrong} BLOCKS OR LOGITS DIFFER from a recompute's")),
        }
    }

    fn table(&self) -> Table {
        let mut table = Table::default();
        table.row([
            "prefix from",
            "tokens",
            "computed",
            "loaded",
            "first token",
            "min",
            "max",
            "arithmetic",
            "of it load",
            "arithmetic",
            "load GB/s",
            "recompute / this",
        ]);
        for row in self.rows() {
            let micros = |us: f64| show_micros(us as u64);
            let loads = row.way != Way::Recompute;
            let loaded = |text: String| if loads { text } else { "-".to_owned() };
            table.row([
                row.way.name().to_owned(),
                show_count(row.prefix_tokens as u64),
                show_count(row.computed_tokens as u64),
                loaded(show_bytes(row.bytes)),
                micros(row.first_token_us_p50),
                micros(row.first_token_us_min),
                micros(row.first_token_us_max),
                micros(row.first_token_arithmetic_us),
                loaded(micros(row.load_us_p50)),
                row.load_arithmetic_us.map_or_else(|| "-".to_owned(), micros),
                loaded(format!("{:.2}", row.load_gb_s)),
                loaded(format!("{:.1}", row.recompute_to_this)),
            ]);
        }
        table
    }

    pub(super) fn chart(&self, about: &About) -> Chart {
        let rows = self.rows();
        let line = |way: Way| Line {
            name: match way {
                Way::Recompute => "recompute".to_owned(),
                way => format!("from {}", way.name()),
            },
            points: rows
                .iter()
                .filter(|row| row.way == way)
                .map(|row| (row.prefix_tokens as f64, row.first_token_us_p50 / 1e6))
                .collect(),
        };
        let mut marks: Vec<f64> = self.prefixes.iter().map(|prefix| *prefix as f64).collect();
        marks.sort_by(f64::total_cmp);
        marks.dedup();
        Chart {
            title: format!("Time to first token ({})", about.engine),
            x: Axis { label: "tokens of the prefix (log scale)".into(), log: true, marks },
            y: Axis { label: "seconds (log scale)".into(), log: true, marks: Vec::new() },
            lines: Way::ALL.map(line).to_vec(),
        }
    }
}
