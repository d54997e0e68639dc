//! kvtided from its arguments to its exit code.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use kvtide_tiers::movement::Node;
use tokio::signal::unix::{SignalKind, signal};

use crate::app::{App, AppError};
use crate::config::{Args, Config, DeviceUse, show_bytes};
use crate::listener::Listener;
use crate::log::LogLevel;
use crate::{admin, drain, log, notify, reload};

/// Bad usage or configuration.
const EXIT_USAGE: u8 = 2;

/// The store or the socket cannot be used.
const EXIT_STORE: u8 = 3;

/// Tasks left at the end get this long.
const TASKS_TIME: Duration = Duration::from_millis(200);

/// Runs kvtided until it is told to stop. `args` are its arguments without the program's name.
///
/// The exit code is 0 after a stop as asked, 2 for bad usage or configuration, 3 when the store or
/// the socket cannot be used, and 1 for anything else.
pub fn run_daemon(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args = match Args::try_parse_from(std::iter::once(OsString::from("kvtided")).chain(args)) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { EXIT_USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    let config = match Config::load(&args) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{error}");
            return EXIT_USAGE.into();
        }
    };
    if args.check_config {
        print_config(&config);
        return ExitCode::SUCCESS;
    }
    let level = log::start(config.log);
    match run(config, &args, &level) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            match error {
                AppError::Io(_) => ExitCode::FAILURE,
                _ => EXIT_STORE.into(),
            }
        }
    }
}

/// Threads that serve calls. They only carry questions to the catalog and answers back, and each
/// more of them is one more to be woken for nothing.
fn serve_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / 4).clamp(1, 4)
}

fn run(config: Config, args: &Args, level: &LogLevel) -> Result<(), AppError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(serve_threads())
        .thread_name("kvtided-serve")
        .enable_all()
        .build()?;
    if let Some(fault) = config.nvme.and_then(|nvme| nvme.fault) {
        tracing::warn!(
            rate = fault.rate,
            seed = fault.seed,
            "FAULTS ARE MADE ON PURPOSE on the nvme tier; never use this for anything but tests"
        );
    }
    if let Some(file) = &config.read_delay_file {
        tracing::warn!(
            file = %file.display(),
            "READS OF THE DRIVE ARE DELAYED ON PURPOSE, as a file says; for tests only"
        );
    }
    let ended = runtime.block_on(async {
        // The socket is taken before the store is made or opened: the cheaper refusal first.
        let listener = Listener::bind(&config.socket, config.tenants.configured)?;
        let (app, node) = tokio::task::spawn_blocking(move || App::start(config))
            .await
            .map_err(|error| std::io::Error::other(error.to_string()))??;
        serve(app, node, listener, args, level).await
    });
    runtime.shutdown_timeout(TASKS_TIME);
    ended
}

async fn serve(
    app: Arc<App>,
    node: Node,
    listener: Listener,
    args: &Args,
    level: &LogLevel,
) -> Result<(), AppError> {
    for note in &app.notes {
        tracing::info!("{note}");
    }
    if let (DeviceUse::On, Some(why)) = (app.config.device.enabled, app.device_off()) {
        tracing::warn!("`device.enabled` is true, but the device tier is off: {why}");
    }
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    admin::start(&app).await;
    tokio::spawn(watchdog(Arc::clone(&app)));
    let nvme = app.config.nvme.map_or(0, |nvme| nvme.bytes);
    let host = show_bytes(app.config.host.bytes);
    let ready = format!("serving: host {host}, nvme {}", show_bytes(nvme));
    tracing::info!(
        socket = %app.config.socket.display(),
        store = %app.config.store.display(),
        version = env!("CARGO_PKG_VERSION"),
        "{ready}"
    );
    notify::ready(&ready);
    {
        let mut serving = std::pin::pin!(listener.serve(Arc::clone(&app)));
        loop {
            tokio::select! {
                () = &mut serving => {}
                _ = term.recv() => break tracing::info!("told to stop (SIGTERM)"),
                _ = interrupt.recv() => break tracing::info!("told to stop (SIGINT)"),
                _ = hang_up.recv() => reload::reload(&app, args, level),
            }
        }
    }
    notify::stopping();
    let stopping = drain::drain_and_stop(&app, node);
    tokio::select! {
        () = stopping => {}
        _ = interrupt.recv() => tracing::warn!("told to stop again (SIGINT): stopping at once"),
    }
    drop(listener);
    Ok(())
}

/// Tells the service manager that the catalog's thread answers; nothing else counts.
async fn watchdog(app: Arc<App>) {
    let Some(interval) = notify::watchdog_interval() else { return };
    let mut ticks = tokio::time::interval(interval / 4);
    loop {
        ticks.tick().await;
        if app.stats().await.is_some() {
            notify::watchdog();
        }
    }
}

fn print_config(config: &Config) {
    println!("the configuration is good");
    println!("socket        {}", config.socket.display());
    println!("store         {}", config.store.display());
    println!("host          {}", show_bytes(config.host.bytes));
    match config.nvme {
        Some(nvme) => println!("nvme          {}", show_bytes(nvme.bytes)),
        None => println!("nvme          off"),
    }
    println!("device        {}", config.device);
    println!("copy threads  {}", config.copy_threads);
    println!("metrics       {:?}", config.metrics);
    for tenant in &config.tenants.list {
        println!("tenant        {} uids {:?} gids {:?}", tenant.name, tenant.uids, tenant.gids);
    }
    for space in &config.tenants.shared {
        println!("shared        {} for {}", space.name, space.tenants.join(", "));
    }
    for note in &config.notes {
        println!("note          {note}");
    }
}
