//! `device`: the kernels and copies of the device tier on this machine's GPU, beside the largest
//! copies that the same card makes in the same run.
//!
//! Times are the GPU's own (events of the driver), medians of rounds in which all works take turns.
//! Before anything is timed, blocks go through a load and a store, and every byte and sum is
//! compared. What two processes need of each other (memory by a legacy handle and by a descriptor,
//! an event) is tried with a child process.

mod layouts;
mod measure;
mod share;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, bail};
use clap::Args;
use kvtide_kernels::{
    driver::{Context, DeviceInfo, Driver, use_library},
    launch::Kernels,
    yardstick::PinnedMemory,
};
use kvtide_tiers::block::GpuUuid;
use serde::Serialize;
use serde_json::json;

use self::{
    layouts::BLOCK_BYTES,
    measure::{Measure, Plan, rounded},
};
pub use share::{PeerArgs, PeerTask, run_peer};

use crate::{
    report::{Table, say, say_json},
    units::{show_bytes, show_micros},
};

/// Least rounds whose median is worth something.
const ROUNDS_MIN: u32 = 7;

/// The most blocks of one launch that are timed, on which the thresholds stand.
const BLOCKS_MOST: u32 = 64;

/// Gather and scatter, as a part of what a copy on the device does.
const NEED_ON_DEVICE: f64 = 0.80;
/// Copies of blocks up and down, as a part of one plain copy of registered memory.
const NEED_TO_HOST: f64 = 0.90;

/// Arguments of `device`.
#[derive(Args, Clone, Debug)]
pub struct DeviceArgs {
    /// The CUDA driver's library. Default: the machine's.
    #[arg(long)]
    pub library: Option<PathBuf>,
    /// The GPU, by its number in this process.
    #[arg(long, default_value_t = 0)]
    pub gpu: i32,
    /// Fail where there is no GPU, instead of saying so.
    #[arg(long)]
    pub require: bool,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(i64::from(ROUNDS_MIN)..=99))]
    pub rounds: u32,
    /// Everything once and in small: to see that it runs, not how fast.
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// A figure that has to be reached.
#[derive(Clone, Debug, Serialize)]
struct Threshold {
    what: String,
    need: f64,
    have: f64,
    met: bool,
}

/// Runs `device`.
///
/// # Errors
/// No GPU where one is required, or a call of the driver failed.
pub fn run(args: &DeviceArgs) -> anyhow::Result<ExitCode> {
    if let Some(library) = &args.library {
        use_library(library).context("the driver's library cannot be used")?;
    }
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(why) if args.require => bail!("no GPU: {why}"),
        Err(why) => {
            match args.json {
                true => say_json(&json!({ "skipped": why.to_string() }))?,
                false => say(&format!("skipped, there is no GPU: {why}")),
            }
            return Ok(ExitCode::SUCCESS);
        }
    };
    let info = driver.device(args.gpu)?;
    let fake = info.name.starts_with("Fake");
    if fake {
        eprintln!(
            "kvtide-bench: {} IS NO GPU: the driver is the fake one, and the times mean nothing",
            info.name
        );
    }
    let report = Report::make(args, &driver, &info)?;
    match args.json {
        true => say_json(&report.json(fake))?,
        false => report.say(fake),
    }
    let clean = report.wrong_bytes == 0 && report.wrong_sums == 0;
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Everything that was found out.
struct Report {
    info: DeviceInfo,
    driver: (u32, u32),
    plan: Plan,
    loads: serde_json::Value,
    registration: serde_json::Value,
    measures: Vec<Measure>,
    wrong_bytes: u64,
    wrong_sums: u64,
    sharing: Vec<share::Shared>,
    thresholds: Vec<Threshold>,
}

impl Report {
    fn make(args: &DeviceArgs, driver: &Driver, info: &DeviceInfo) -> anyhow::Result<Report> {
        let plan = Plan::new(args.quick, args.rounds);
        // Before this process has a context, so that a child is the first there as well.
        let loads = json!({
            "uncached": share::load_in_a_child(args, false),
            "cached": share::load_in_a_child(args, true),
        });
        let context = Context::new(driver, args.gpu)?;
        let kernels = Kernels::load(&context)?;
        let registration = registration(&context, args.quick)?;
        let (mut measures, mut wrong_bytes, mut wrong_sums) = (Vec::new(), 0, 0);
        for (at, layout) in layouts::all(plan.slots).iter().enumerate() {
            let part = measure::layout(&context, &kernels, layout, &plan, at == 0)
                .with_context(|| format!("the layout `{}`", layout.name))?;
            measures.extend(part.measures);
            wrong_bytes += part.wrong_bytes;
            wrong_sums += part.wrong_sums;
        }
        let sharing = share::try_all(args)?;
        let thresholds = thresholds(&measures);
        let (info, driver) = (info.clone(), driver.version());
        Ok(Report {
            info,
            driver,
            plan,
            loads,
            registration,
            measures,
            wrong_bytes,
            wrong_sums,
            sharing,
            thresholds,
        })
    }

    fn json(&self, fake: bool) -> serde_json::Value {
        let DeviceInfo { uuid, name, memory_bytes, multiprocessors, compute, pci, .. } = &self.info;
        json!({
            "fake": fake,
            "gpu": {
                "name": name,
                "uuid": GpuUuid(*uuid).to_string(),
                "driver": format!("{}.{}", self.driver.0, self.driver.1),
                "memory_bytes": memory_bytes,
                "multiprocessors": multiprocessors,
                "compute": format!("{}.{}", compute.0, compute.1),
                "pci": pci,
            },
            "rounds": self.plan.rounds,
            "block_bytes": BLOCK_BYTES,
            "wrong_bytes": self.wrong_bytes,
            "wrong_sums": self.wrong_sums,
            "ptx_load": self.loads,
            "registration": self.registration,
            "sharing": self.sharing,
            "measures": self.measures,
            "thresholds": self.thresholds,
        })
    }

    fn say(&self, fake: bool) {
        let DeviceInfo { name, memory_bytes, multiprocessors, .. } = &self.info;
        say(&format!(
            "{name}, {}, {multiprocessors} multiprocessors, driver {}.{}",
            show_bytes(*memory_bytes),
            self.driver.0,
            self.driver.1
        ));
        if fake {
            say("THE DRIVER IS THE FAKE ONE: the times mean nothing");
        }
        say(&format!("PTX load: {}", self.loads));
        say(&format!("registration of host memory: {}", self.registration));
        for shared in &self.sharing {
            say(&shared.words());
        }
        say(&format!("wrong bytes {}, wrong sums {}", self.wrong_bytes, self.wrong_sums));
        say(&format!(
            "\nmedians of {} rounds, blocks of {}",
            self.plan.rounds,
            show_bytes(BLOCK_BYTES)
        ));
        let mut table = Table::default();
        table.row(["layout, work", "blocks", "median", "GB/s", "of the ceiling", "least"]);
        for measure in &self.measures {
            table.row([
                format!("{}, {}", measure.layout, measure.work),
                measure.blocks.to_string(),
                show_micros(measure.median_us.round() as u64),
                format!("{:.1}", measure.gb_s),
                measure.ratio.map_or(String::new(), |ratio| format!("{:.1} %", ratio * 100.0)),
                show_micros(measure.least_us.round() as u64),
            ]);
        }
        table.say();
        say("");
        for threshold in &self.thresholds {
            let met = if threshold.met { "met" } else { "NOT MET" };
            let (have, need) = (threshold.have * 100.0, threshold.need * 100.0);
            say(&format!(
                "{}: {have:.1} % of the ceiling, {need:.0} % needed: {met}",
                threshold.what
            ));
        }
    }
}

/// What it costs to register host memory.
fn registration(context: &Context, quick: bool) -> anyhow::Result<serde_json::Value> {
    let bytes: u64 = if quick { 16 << 20 } else { 1 << 30 };
    let memory = PinnedMemory::new(context, bytes)?;
    let (populate, register) = (memory.populate, memory.register);
    let started = std::time::Instant::now();
    drop(memory);
    let unregister = started.elapsed();
    let per_gib = (1u64 << 30) as f64 / bytes as f64 * 1e3;
    Ok(json!({
        "bytes": bytes,
        "populate_ms_per_gib": rounded(populate.as_secs_f64() * per_gib),
        "register_ms_per_gib": rounded(register.as_secs_f64() * per_gib),
        "unregister_and_free_ms_per_gib": rounded(unregister.as_secs_f64() * per_gib),
    }))
}

/// The figures that have to be reached, at the most blocks of one launch.
fn thresholds(measures: &[Measure]) -> Vec<Threshold> {
    let each = measures.iter().filter(|measure| measure.blocks == BLOCKS_MOST);
    let each = each.filter_map(|measure| {
        let need = match measure.work {
            "gather" | "scatter" => NEED_ON_DEVICE,
            "blocks up" | "blocks down" => NEED_TO_HOST,
            _ => return None,
        };
        let have = measure.ratio?;
        let what = format!("{}, {}", measure.layout, measure.work);
        Some(Threshold { what, need, have, met: have >= need })
    });
    each.collect()
}
