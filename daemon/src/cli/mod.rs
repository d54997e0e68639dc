//! `kvtide`: the inspector, and the demo. `args` says what can be asked; each other file is one or
//! a few subcommands. Every one of them ends in a value that is printed as a table or as JSON, and
//! in an exit code. Nothing here writes to a store.

mod args;
mod change;
mod config;
mod demo;
mod error;
mod fsck;
mod ls;
mod namespaces;
mod out;
mod quotas;
mod remote;
mod show;
mod stats;
mod status;
mod table;
mod worth;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;

use self::args::{Cli, Command};
use self::error::CliError;
use self::out::Out;
use self::remote::Remote;

/// Runs `kvtide` with the arguments behind the program's name.
///
/// Two first arguments are not for people: `__daemon` runs kvtided with the rest, so that the demo,
/// tests and benchmarks need no second program, and `__demo-client` is a client of the demo.
pub fn run(args: Vec<OsString>) -> ExitCode {
    let mut rest = args.iter();
    match rest.next().and_then(|first| first.to_str()) {
        Some("__daemon") => return daemon(rest.as_slice()),
        Some("__demo-client") => return demo::child::main(rest.as_slice()),
        _ => {}
    }
    let cli = match Cli::try_parse_from(std::iter::once(OsString::from("kvtide")).chain(args)) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let out = Out { json: cli.global.json };
    match dispatch(&cli, out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error, out);
            error.exit_code()
        }
    }
}

fn daemon(args: &[OsString]) -> ExitCode {
    if std::env::var_os(demo::WITH_PARENT).is_some() {
        // The demo's folder goes with the demo, and so must its daemon.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
    crate::run_daemon(args.iter().cloned())
}

fn dispatch(cli: &Cli, out: Out) -> Result<(), CliError> {
    let remote = || Remote::connect(&cli.global);
    match &cli.command {
        Command::Status => status::run(&remote()?, out),
        Command::Ls(args) => ls::run(args, &remote()?, out),
        Command::Show(args) => show::run(args, &remote()?, out),
        Command::Explain(args) => namespaces::explain(args, remote, out),
        Command::Stats(args) => stats::run(args, &remote()?, out),
        Command::Forget(args) => change::forget(args, &remote()?, out),
        Command::Pin(args) => change::pin(args, &remote()?, out),
        Command::Unpin { pin } => change::unpin(*pin, &remote()?, out),
        Command::Drain { deadline } => change::drain(*deadline, &remote()?, out),
        Command::Fsck(args) => fsck::run(args, out),
        Command::Config(args) => config::run(args.what.as_ref(), out),
        Command::Completions { shell } => completions(*shell, out),
        Command::Demo(args) => demo::run(args, out),
    }
}

#[derive(Serialize)]
struct Completions {
    shell: String,
    script: String,
}

fn completions(shell: clap_complete::Shell, out: Out) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "kvtide", &mut script);
    let script = String::from_utf8(script).map_err(CliError::failed)?;
    out.emit(&Completions { shell: shell.to_string(), script }, |made| made.script.clone())
}

#[derive(Serialize)]
struct Failure<'a> {
    error: &'a str,
}

/// Says on standard error what went wrong, once, unless it was said already.
fn report(error: &CliError, out: Out) {
    let text = error.to_string();
    if text.is_empty() {
        return;
    }
    if out.json {
        let _ = out.emit(&Failure { error: &text }, |failure| failure.error.to_owned());
    }
    eprintln!("kvtide: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_are_made_for_every_shell() {
        use clap::ValueEnum;
        for shell in clap_complete::Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "kvtide", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("explain"), "{shell}");
            assert!(!script.contains("__demo-client"), "{shell}");
        }
    }
}
