//! `kvtide fsck`: checks a store at rest. Opens files for reading only.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvtide_tiers::segment::{FsckOptions, FsckReport, Problem, SegmentState, fsck};

use super::args::Fsck;
use super::error::CliError;
use super::out::Out;
use super::table::{Align, Table, pairs};
use crate::units::{bytes, count};

pub(crate) fn run(args: &Fsck, out: Out) -> Result<(), CliError> {
    let options = FsckOptions { verify_payloads: args.payloads, ..FsckOptions::default() };
    let bar = progress_bar(out);
    let report = fsck(&args.dir, &options, &mut |done, all| {
        bar.set_length(all);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let report = report.map_err(CliError::failed)?;
    out.emit(&report, |report| text(report, args.payloads))?;
    if report.problems_total > 0 { Err(CliError::Found) } else { Ok(()) }
}

fn progress_bar(out: Out) -> ProgressBar {
    if out.json || !stderr().is_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} segments, {eta} left");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn text(report: &FsckReport, payloads: bool) -> String {
    let mut out = String::new();
    if let Some(pid) = report.locked_by {
        let who = if pid == 0 { "a daemon".to_owned() } else { format!("process {pid}") };
        out.push_str(&format!(
            "NOTE: {who} uses this store; what it is writing may look like damage here\n\n"
        ));
    }
    out.push_str(&facts(report, payloads));
    out.push('\n');
    if report.problems_total == 0 {
        out.push_str("no problems found\n");
        return out;
    }
    out.push_str(&problems(&report.problems));
    let left_out = report.problems_total - report.problems.len() as u64;
    if left_out > 0 {
        out.push_str(&format!("and {} more\n", count(left_out)));
    }
    out.push_str(&format!(
        "\n{} problems found. The daemon leaves such blocks out and serves the rest; nothing needs \
         to be repaired.\n",
        count(report.problems_total)
    ));
    out
}

fn facts(report: &FsckReport, payloads: bool) -> String {
    let unknown = || "unknown".to_owned();
    pairs(&[
        ("store", format!("{}, {}", report.store_file.display(), bytes(report.file_bytes))),
        (
            "shape",
            report.geometry.map_or_else(unknown, |geometry| {
                format!(
                    "{} segments of {}{}",
                    count(u64::from(geometry.segments)),
                    bytes(u64::from(geometry.segment_bytes)),
                    if report.geometry_guessed { " (guessed from segment headers)" } else { "" }
                )
            }),
        ),
        ("epoch", report.epoch.map_or_else(unknown, |epoch| epoch.to_string())),
        (
            "last stop",
            match report.clean {
                Some(true) => "clean".to_owned(),
                Some(false) => "not clean, which does no harm".to_owned(),
                None => unknown(),
            },
        ),
        ("namespaces", report.namespaces.map_or_else(unknown, |number| count(number as u64))),
        ("segments", segments(report)),
        (
            "descriptors",
            format!(
                "{} valid ({} of namespaces that are gone), {} damaged, {} of earlier lives",
                count(report.descriptors_valid),
                count(report.descriptors_dead),
                count(report.descriptors_damaged),
                count(report.descriptors_stale)
            ),
        ),
        (
            "payloads",
            match payloads {
                true => format!(
                    "{} verified, {} damaged",
                    count(report.payloads_verified),
                    count(report.payloads_damaged)
                ),
                false => "not read (--payloads reads them)".to_owned(),
            },
        ),
    ])
}

fn segments(report: &FsckReport) -> String {
    let mut counts: Vec<(SegmentState, u64)> = Vec::new();
    for segment in &report.segments {
        match counts.iter_mut().find(|(state, _)| *state == segment.state) {
            Some((_, number)) => *number += 1,
            None => counts.push((segment.state, 1)),
        }
    }
    let parts: Vec<String> = counts
        .iter()
        .map(|(state, number)| format!("{} {}", count(*number), name(state)))
        .collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

/// The name under which JSON has it, with spaces.
fn name<T: serde::Serialize>(value: &T) -> String {
    let value = serde_json::to_value(value).ok();
    let name = value.as_ref().and_then(|value| value.as_str()).unwrap_or("unknown");
    name.replace('_', " ")
}

fn problems(problems: &[Problem]) -> String {
    let mut table = Table::new(&[
        ("PROBLEM", Align::Left),
        ("SEGMENT", Align::Right),
        ("INDEX", Align::Right),
        ("OFFSET", Align::Right),
        ("WHAT", Align::Left),
    ]);
    let cell = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |n| n.to_string());
    for problem in problems {
        table.row([
            name(&problem.kind),
            cell(problem.segment.map(u64::from)),
            cell(problem.index.map(u64::from)),
            cell(problem.offset),
            problem.text.clone(),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtide_tiers::segment::ProblemKind;

    #[test]
    fn every_problem_is_named_with_its_place() {
        let mut report = FsckReport { problems_total: 3, ..FsckReport::default() };
        for (kind, segment) in
            [(ProblemKind::SwappedSegment, Some(3)), (ProblemKind::Superblock, None)]
        {
            let text = "what it means".to_owned();
            report.problems.push(Problem { kind, segment, index: None, offset: Some(4096), text });
        }
        let text = text(&report, true);
        assert!(text.contains("swapped segment        3      -    4096  what it means"), "{text}");
        assert!(text.contains("superblock"), "{text}");
        assert!(text.contains("and 1 more"), "{text}");
        assert!(text.contains("3 problems found"), "{text}");
    }

    #[test]
    fn a_sound_store_says_so() {
        let text = text(&FsckReport::default(), false);
        assert!(text.ends_with("no problems found\n"), "{text}");
        assert!(text.contains("--payloads reads them"), "{text}");
    }
}
