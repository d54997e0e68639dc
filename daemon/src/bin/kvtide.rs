//! The inspector. See `kvtide_daemon::cli`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvtide_daemon::cli::run(std::env::args_os().skip(1).collect())
}
