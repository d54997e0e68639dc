//! A client process that stores and loads without a pause until somebody kills it.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use kvtide_client::blocking::Client;
use kvtide_client::{ClientConfig, ClientError, Hit, LoadBlock, Lookup, StoreBlock, Ticket};

use crate::payload::KvPool;

/// Tickets that are under way at any time.
const TICKETS: usize = 3;

/// What the process does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Work {
    /// Loads one prompt over and over.
    Load,
    /// Stores ever new prompts.
    Store,
}

/// The arguments behind `__client`.
#[derive(Parser, Debug)]
#[command(name = "__client")]
struct Args {
    /// The daemon's socket.
    socket: std::path::PathBuf,
    /// What to do.
    #[arg(value_enum)]
    work: Work,
    /// First prompt.
    seed: u32,
    /// Blocks of each prompt.
    blocks: u32,
    /// Bytes of each block.
    block_bytes: u32,
}

/// Runs until killed. Says `busy` on standard output once several tickets are under way.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args = match Args::try_parse_from(std::iter::once(OsString::from("__client")).chain(args)) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(2);
        }
    };
    match churn(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn churn(args: &Args) -> Result<(), ClientError> {
    let patient = Duration::from_secs(20);
    let config = ClientConfig {
        call_timeout: patient,
        connect_timeout: patient,
        ..ClientConfig::new(&args.socket)
    };
    let client = Client::connect(config)?;
    let places = args.blocks * u32::try_from(TICKETS).unwrap_or(1);
    let pool = KvPool::open(client, "churn", places, args.block_bytes)?;
    let mut tickets: Vec<Ticket> = Vec::new();
    let mut told = false;
    for round in 0u32.. {
        let ticket = match args.work {
            Work::Load => load(&pool, args, round),
            Work::Store => Some(store(&pool, args, round)),
        };
        tickets.extend(ticket);
        if tickets.len() >= TICKETS {
            if !told {
                println!("busy");
                told = true;
            }
            let oldest = tickets.remove(0);
            let _ = pool.client.wait(oldest, patient);
        }
    }
    Ok(())
}

/// The places of one round.
fn places(args: &Args, round: u32) -> impl Iterator<Item = u32> + use<> {
    let first = round % u32::try_from(TICKETS).unwrap_or(1) * args.blocks;
    first..first + args.blocks
}

fn load(pool: &KvPool, args: &Args, round: u32) -> Option<Ticket> {
    let keys = pool.keys(args.seed, args.blocks);
    let found = pool.client.lookup(&[(&pool.space, &keys)], Duration::from_secs(30));
    let Lookup::Hit(Hit { lease: Some(lease), blocks, .. }) = found else {
        std::thread::sleep(Duration::from_millis(1));
        return None;
    };
    let wanted: Vec<LoadBlock> = keys
        .iter()
        .zip(places(args, round))
        .take(blocks)
        .map(|(key, place)| LoadBlock { key: *key, place })
        .collect();
    let ticket = pool.client.load(&lease, &pool.space, &pool.region, &wanted, Duration::ZERO);
    // Its end comes with the process's end.
    std::mem::forget(lease);
    Some(ticket)
}

fn store(pool: &KvPool, args: &Args, round: u32) -> Ticket {
    let keys = pool.keys(args.seed.wrapping_add(round), args.blocks);
    let parents = std::iter::once(&kvtide_client::BlockKey::ROOT).chain(&keys);
    let wanted: Vec<StoreBlock> = keys
        .iter()
        .zip(parents)
        .zip(0..)
        .zip(places(args, round))
        .map(|(((key, parent), position), place)| StoreBlock {
            key: *key,
            parent: *parent,
            position,
            tokens: 4,
            place,
        })
        .collect();
    pool.client.store(&pool.space, 1, &pool.region, &wanted, Duration::ZERO)
}
