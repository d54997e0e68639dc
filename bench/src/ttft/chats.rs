//! `chats`: conversations with a system prompt in common, whose turns land on engine processes at
//! random: how many tokens are prefilled in all, beside what it would be without reuse.
//!
//! Without reuse each turn prefills its whole prompt, which grows by every turn: that number is
//! counted and needs no run. Token counts do not depend on the weights.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use smallengine::{
    process::{EngineProcess, RandomShape},
    random_tokens,
};

use super::{
    plot::{Axis, Chart, Line},
    stage::{ModelArgs, ModelFacts, Stage},
    write_plot,
};
use crate::{
    report::{Progress, Summary, Table, say, say_json},
    scratch::Scratch,
    units::show_count,
};

/// Seed of what is said, and of where turns land.
const SEED: u64 = 0x6368_6174;

/// Arguments of `chats`.
#[derive(Args, Clone, Debug)]
pub struct ChatsArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Conversations.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=1024))]
    conversations: u64,
    /// Turns of each.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1024))]
    turns: u64,
    /// Engine processes.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    processes: u64,
    /// Tokens of the system prompt that all conversations begin with.
    #[arg(long, default_value_t = 200)]
    system_tokens: u32,
    /// Tokens of a user's message.
    #[arg(long, default_value_t = 45, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    message_tokens: u32,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    answer_tokens: u32,
    /// Folder for daemon and store, on a disk; kept afterwards. Default: a temporary one.
    #[arg(long)]
    store: Option<PathBuf>,
    /// Also draw the result: an SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
}

impl ChatsArgs {
    /// Tokens of a conversation at its end.
    fn tokens_max(&self) -> usize {
        let turn = u64::from(self.message_tokens) + u64::from(self.answer_tokens);
        (u64::from(self.system_tokens) + self.turns * turn) as usize
    }
}

/// All conversations' turns of one number.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Row {
    turn: u64,
    prompt_tokens: u64,
    prefilled_tokens: u64,
    /// From the first turn on.
    prefilled_so_far: u64,
    prefilled_so_far_without_reuse: u64,
    /// The longest of them, microseconds.
    first_token_us_max: u64,
}

struct Conversation {
    tokens: Vec<u32>,
    turns: u64,
}

/// Runs `chats`.
///
/// # Errors
/// The daemon, an engine, the weights or the file system failed.
pub fn run(args: &ChatsArgs) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let facts = args.model.facts(RandomShape::Small)?;
    let scratch = Scratch::make(args.store.as_deref())?;
    let blocks =
        args.conversations * args.tokens_max() as u64 / u64::from(facts.engine.tokens_per_block);
    let bytes = blocks * facts.block_bytes();
    let mut stage = Stage::start(&scratch.path().join("daemon"), &facts, bytes)?;
    let engines = (0..args.processes).map(|_| stage.engine(args.tokens_max(), true));
    let mut engines: Vec<EngineProcess> = engines.collect::<anyhow::Result<_>>()?;
    let (rows, mut summary) = converse(args, &facts, &mut engines)?;
    summary.seconds = started.elapsed().as_secs_f64();
    drop(engines);
    stage.daemon.check_alive()?;
    stage.daemon.stop()?;
    if let Some(path) = &args.plot {
        write_plot(path, &chart(args, &rows).svg())?;
    }
    if args.json {
        let mut object = json!(summary);
        if let Some(object) = object.as_object_mut() {
            object.insert("model".into(), json!(facts.words));
            object.insert("tokens_per_block".into(), json!(facts.engine.tokens_per_block));
            object.insert("new_tokens".into(), json!(new_tokens(args)));
            object.insert("rows".into(), json!(rows));
        }
        say_json(&object)?;
    } else {
        show(args, &facts, &rows);
    }
    Ok(ExitCode::SUCCESS)
}

/// Tokens that have to be prefilled once: the system prompt, the messages, and the last token of
/// each answer that is gone on from, whose KV the decoding did not compute.
fn new_tokens(args: &ChatsArgs) -> u64 {
    let said = args.turns * u64::from(args.message_tokens) + args.turns - 1;
    u64::from(args.system_tokens) + args.conversations * said
}

fn converse(
    args: &ChatsArgs,
    facts: &ModelFacts,
    engines: &mut [EngineProcess],
) -> anyhow::Result<(Vec<Row>, Summary)> {
    let system = random_tokens(SEED, args.system_tokens as usize, facts.vocabulary());
    let conversation = || Conversation { tokens: system.clone(), turns: 0 };
    let mut conversations: Vec<Conversation> =
        (0..args.conversations).map(|_| conversation()).collect();
    let mut rows: Vec<Row> = (1..=args.turns).map(|turn| Row { turn, ..Row::default() }).collect();
    let mut summary = Summary::default();
    let steps = args.conversations * args.turns;
    let mut chance = random_tokens(SEED + 1, 2 * steps as usize, u32::MAX).into_iter();
    let mut pick = |below: usize| chance.next().unwrap_or(0) as usize % below.max(1);
    let progress = Progress::new(steps);
    for step in 0..steps {
        progress.set(step);
        let open = conversations.iter().enumerate().filter(|(_, each)| each.turns < args.turns);
        let open: Vec<usize> = open.map(|(number, _)| number).collect();
        let number = open.get(pick(open.len())).copied().unwrap_or(0);
        let process = pick(engines.len());
        let (Some(conversation), Some(engine)) =
            (conversations.get_mut(number), engines.get_mut(process))
        else {
            continue;
        };
        let seed = SEED + 2 + step;
        let message = random_tokens(seed, args.message_tokens as usize, facts.vocabulary());
        conversation.tokens.extend(message);
        let answer = args.answer_tokens as usize;
        let done = engine.turn(number as u64 + 1, &conversation.tokens, answer)?;
        if let Some(row) = rows.get_mut(conversation.turns as usize) {
            row.prompt_tokens += done.turn.prompt_tokens as u64;
            row.prefilled_tokens += done.turn.recomputed_tokens as u64;
            row.first_token_us_max = row.first_token_us_max.max(done.turn.first_token_us);
        }
        let per_block = u64::from(facts.engine.tokens_per_block);
        summary.requests += 1;
        summary.blocks_hit_host += done.turn.reuse.host_tokens as u64 / per_block;
        summary.blocks_hit_nvme += done.turn.reuse.nvme_tokens as u64 / per_block;
        summary.blocks_missed += done.turn.blocks_stored as u64;
        conversation.tokens.extend(done.answer);
        conversation.turns += 1;
    }
    progress.end();
    let (mut with, mut without) = (0, 0);
    for row in &mut rows {
        with += row.prefilled_tokens;
        without += row.prompt_tokens;
        (row.prefilled_so_far, row.prefilled_so_far_without_reuse) = (with, without);
    }
    Ok((rows, summary))
}

fn show(args: &ChatsArgs, facts: &ModelFacts, rows: &[Row]) {
    say(&format!(
        "{} conversations of {} turns over {} processes at random; {} tokens of system prompt, {} \
         a message, {} an answer; blocks of {} tokens\nmodel: {}",
        args.conversations,
        args.turns,
        args.processes,
        args.system_tokens,
        args.message_tokens,
        args.answer_tokens,
        facts.engine.tokens_per_block,
        facts.words
    ));
    let mut table = Table::default();
    table.row([
        "turn",
        "prompt tokens",
        "prefilled",
        "prefilled so far",
        "without reuse",
        "without / with",
    ]);
    for row in rows {
        let ratio = row.prefilled_so_far_without_reuse as f64 / row.prefilled_so_far.max(1) as f64;
        table.row([
            row.turn.to_string(),
            show_count(row.prompt_tokens),
            show_count(row.prefilled_tokens),
            show_count(row.prefilled_so_far),
            show_count(row.prefilled_so_far_without_reuse),
            format!("{ratio:.1}"),
        ]);
    }
    table.say();
    let prefilled = rows.last().map_or(0, |row| row.prefilled_so_far);
    let (new, turns) = (new_tokens(args), args.conversations * args.turns);
    say(&format!(
        "{} tokens were new; {} were prefilled: {:.1} more a turn, of blocks that were not full",
        show_count(new),
        show_count(prefilled),
        prefilled.saturating_sub(new) as f64 / turns as f64
    ));
}

fn chart(args: &ChatsArgs, rows: &[Row]) -> Chart {
    let line = |name: &str, of: fn(&Row) -> u64| Line {
        name: name.into(),
        points: rows.iter().map(|row| (row.turn as f64, of(row) as f64)).collect(),
    };
    let axis = |label: &str| Axis { label: label.into(), log: false, marks: Vec::new() };
    Chart {
        title: format!(
            "Tokens prefilled, {} conversations over {} processes",
            args.conversations, args.processes
        ),
        x: axis("turns of each conversation"),
        y: axis("tokens prefilled so far"),
        lines: vec![
            line("no reuse", |row| row.prefilled_so_far_without_reuse),
            line("kvtide", |row| row.prefilled_so_far),
        ],
    }
}
