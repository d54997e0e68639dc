//! kvtided, the node daemon.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvtide_daemon::run_daemon(std::env::args_os().skip(1))
}
