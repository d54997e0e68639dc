//! The program that the tests run: the daemon, its inspector, an engine with a GPU, one with a
//! model, a client that is going to be killed, or one on a machine that systemd booted.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use rustix::process::{Signal, set_parent_process_death_signal};

fn main() -> ExitCode {
    // Nothing is left behind when a test is stopped half-way.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let mut args = std::env::args_os().skip(1);
    match args.next().as_deref().and_then(|word| word.to_str()) {
        Some("__daemon") => kvtide_daemon::run_daemon(args),
        Some("__inspector") => kvtide_daemon::cli::run(args.collect()),
        Some("__client") => kvtide_tests::churn::run(args),
        Some("__engine") => kvtide_tests::gpu::run(args),
        Some("__booted") => kvtide_tests::booted::run(),
        Some("__small-engine") => smallengine::process::run(args),
        _ => {
            eprintln!("the first argument says which program; this is one of the tests");
            ExitCode::from(2)
        }
    }
}
