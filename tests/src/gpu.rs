//! An engine with a paged KV pool in GPU memory, in a process of its own: what the process does, on
//! the fake driver. It takes commands as lines on its standard input and answers each with a line.
//!
//! | command | does | answers |
//! |---|---|---|
//! | `connected` | waits until it is connected to the daemon | `ok` |
//! | `store SEED COUNT` | stores a prompt of so many blocks | the outcomes |
//! | `begin store\|load SEED COUNT` | the same, and does not wait for the end | `begun` |
//! | `load SEED COUNT` | loads what is there, looks at every byte of its pool | outcomes |
//! | `flood store\|load SEED COUNT` | goes on until it is killed | `busy` once under way |
//! | `violations` | | what it did against the driver's rules |
//!
//! A load that brought a wrong byte, or touched one outside its places, is answered by a line that
//! starts with `WRONG`.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, ValueEnum};
use fakecuda::Copies;
use kvtide_client::blocking::Client;
use kvtide_client::cuda::driver::{Context, Driver, use_library};
use kvtide_client::cuda::{CudaOrder, CudaPool, CudaRegion, PoolKind};
use kvtide_client::{
    AsRegion, BlockKey, ClientConfig, ElementType, Hit, KvLayout, Lease, LoadBlock, Lookup,
    Namespace, NamespaceHandle, NamespaceSpec, Outcome, Plane, RegionLayout, RegionRef, StoreBlock,
    Ticket,
};

use crate::payload::{namespace, payload, tokens_of};
use crate::proc::poll_until;

/// Longest time of a call on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Tickets of a flood that are under way at any time.
const TICKETS: u32 = 3;
/// Events of a ring.
const EVENTS: u32 = 4;
/// What a pool holds where nothing was loaded.
const BLANK: u8 = 0xee;

/// How an engine lays its blocks out: a model's shape, and an order of its parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Shape {
    /// 32 layers of K and V planes, 8 heads of 128 values.
    Gqa,
    /// As `Gqa` with one head.
    Mqa,
    /// 27 layers with one opaque plane each, 576 values a token.
    Mla,
    /// As `Gqa`, with all of a block in one piece.
    BlockOutermost,
    /// One layer whose 8 heads are rows, with a row of scales between them.
    HeadRows,
}

impl Shape {
    /// A pool of so many places for blocks of so many tokens.
    pub fn layout(self, places: u32, tokens: u32) -> RegionLayout {
        let tokens = u64::from(tokens);
        let head = tokens * 128 * 2;
        match self {
            Shape::Gqa => RegionLayout::layered(places, 64, 8 * head),
            Shape::Mqa => RegionLayout::layered(places, 64, head),
            Shape::Mla => RegionLayout::layered(places, 27, tokens * 576 * 2),
            Shape::BlockOutermost => RegionLayout::opaque(places, 64 * 8 * head),
            Shape::HeadRows => {
                let row_stride = head + 512;
                let plane = |at: u64| Plane {
                    offset: at * u64::from(places) * 8 * row_stride,
                    block_stride: 8 * row_stride,
                    rows: 8,
                    row_stride,
                    row_bytes: head,
                };
                RegionLayout { blocks: places, planes: vec![plane(0), plane(1)] }
            }
        }
    }

    fn kv(self, tokens_per_block: u32) -> KvLayout {
        let (layers, kv_heads, head_dim) = match self {
            Shape::Gqa | Shape::BlockOutermost => (32, 8, 128),
            Shape::Mqa => (32, 1, 128),
            Shape::Mla => (27, 1, 576),
            Shape::HeadRows => (1, 8, 128),
        };
        let element = ElementType::Bf16;
        KvLayout { layers, kv_heads, head_dim, element, tokens_per_block, ..namespace("").layout }
    }
}

/// How a pool is allocated, and so shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Memory {
    /// By `cuMemAlloc`.
    Legacy,
    /// By `cuMemCreate`.
    Vmm,
    /// By `cuMemAlloc`, elsewhere in the engine: only its address is known.
    Adopted,
}

/// How the daemon's copies come behind the engine's own work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Order {
    /// The engine waits for its stream.
    Sync,
    /// By a ring of events.
    Ring,
}

/// What an engine is. Engines with the same revision, shape and tokens share blocks, whatever their
/// memory and order.
#[derive(Clone, PartialEq, Eq, Debug, ClapArgs)]
pub struct EngineSpec {
    /// Its model, as far as it matters.
    #[arg(long)]
    pub revision: String,
    /// Shape of its blocks.
    #[arg(long, value_enum)]
    pub shape: Shape,
    /// Tokens of a block.
    #[arg(long)]
    pub tokens: u32,
    /// Blocks that its pool has room for.
    #[arg(long)]
    pub places: u32,
    /// Its pool's memory.
    #[arg(long, value_enum)]
    pub memory: Memory,
    /// Its order.
    #[arg(long, value_enum)]
    pub order: Order,
}

#[derive(Parser, Debug)]
#[command(name = "__engine")]
struct Args {
    /// The daemon's socket.
    socket: PathBuf,
    #[command(flatten)]
    spec: EngineSpec,
}

/// What the process does.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args = match Args::try_parse_from(std::iter::once(OsString::from("__engine")).chain(args)) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(2);
        }
    };
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the engine fails: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &Args) -> Result<(), Box<dyn Error>> {
    use_library(&fakecuda::library())?;
    let context = Context::new(&Driver::open()?, 0)?;
    let config = ClientConfig {
        call_timeout: Duration::from_secs(20),
        connect_timeout: Duration::from_secs(20),
        ..ClientConfig::new(&args.socket)
    };
    let mut engine = match Engine::open(Client::connect(config)?, &context, &args.spec) {
        Ok(engine) => engine,
        Err(error) => {
            println!("refused {error}");
            return Ok(());
        }
    };
    println!("ready");
    for line in std::io::stdin().lines() {
        println!("{}", engine.answer(&line?)?);
    }
    // Before memory that is only named by its address goes.
    engine.client.unregister_cuda_region(&engine.region)?;
    Ok(())
}

/// What is under way, and what keeps the blocks of a load.
type Begun = (Option<Lease>, Ticket);

struct Engine {
    client: Client,
    space: NamespaceHandle,
    region: CudaRegion,
    layout: RegionLayout,
    order: Order,
    copies: Copies,
    // Begun and not waited for.
    begun: Vec<Begun>,
    // Memory that the pool only names.
    _adopted: Option<CudaPool>,
}

impl Engine {
    fn open(
        client: Client,
        context: &Context,
        spec: &EngineSpec,
    ) -> Result<Engine, Box<dyn Error>> {
        let layout = spec.shape.layout(spec.places, spec.tokens);
        let named = namespace(&spec.revision);
        let named = Namespace { layout: spec.shape.kv(spec.tokens), ..named };
        let space = client.open_namespace(&NamespaceSpec::own(named))?;
        let bytes = layout.region_bytes();
        let (pool, adopted) = match spec.memory {
            Memory::Legacy => (CudaPool::allocate(context, bytes, PoolKind::Legacy)?, None),
            Memory::Vmm => (CudaPool::allocate(context, bytes, PoolKind::Vmm)?, None),
            Memory::Adopted => {
                // The pool is a part of the allocation.
                let whole = CudaPool::allocate(context, bytes + 4096, PoolKind::Legacy)?;
                (CudaPool::adopt(context, whole.address() + 4096, bytes)?, Some(whole))
            }
        };
        let order = match spec.order {
            Order::Sync => CudaOrder::EngineSynchronizes,
            Order::Ring => CudaOrder::Events(EVENTS),
        };
        Ok(Engine {
            region: client.register_cuda_region(pool, layout.clone(), order)?,
            client,
            space,
            layout,
            order: spec.order,
            copies: Copies::new(context)?,
            begun: Vec::new(),
            _adopted: adopted,
        })
    }

    fn answer(&mut self, line: &str) -> Result<String, Box<dyn Error>> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| -> Result<u32, Box<dyn Error>> {
            Ok(words.get(at).ok_or("a number is missing")?.parse()?)
        };
        match words.as_slice() {
            ["connected"] => {
                let connected = || self.client.is_connected().then_some(());
                poll_until(PATIENCE, connected).ok_or("it does not connect")?;
                Ok("ok".to_owned())
            }
            ["violations"] => Ok(fakecuda::violations().to_string()),
            ["store", ..] => {
                let ticket = self.begin_store(number(1)?, number(2)?, 0)?;
                self.outcomes(ticket)
            }
            ["load", ..] => self.load(number(1)?, number(2)?),
            ["begin", what, ..] => {
                let begun = self.begin(what, number(2)?, number(3)?, 0)?;
                self.begun.extend(begun);
                Ok("begun".to_owned())
            }
            ["flood", what, ..] => self.flood(what, number(2)?, number(3)?),
            _ => Err(format!("no such command: {line}").into()),
        }
    }

    fn outcomes(&self, ticket: Ticket) -> Result<String, Box<dyn Error>> {
        match self.client.wait(ticket, PATIENCE) {
            Ok(outcomes) => Ok(words(&outcomes)),
            Err(late) => Err(format!("not ended in time: {late:?}").into()),
        }
    }

    fn begin(
        &self,
        what: &str,
        seed: u32,
        count: u32,
        first: u32,
    ) -> Result<Option<Begun>, Box<dyn Error>> {
        if what == "store" {
            return Ok(Some((None, self.begin_store(seed, count, first)?)));
        }
        let places: Vec<u32> = (first..first + count).collect();
        let begun = self.begin_load(&self.keys(seed, count), &places)?;
        Ok(begun.map(|(lease, ticket)| (Some(lease), ticket)))
    }

    /// Goes on until the process is killed.
    fn flood(&mut self, what: &str, seed: u32, count: u32) -> Result<String, Box<dyn Error>> {
        let mut told = false;
        for round in 0u32.. {
            let seed = if what == "store" { seed + round } else { seed };
            let begun = self.begin(what, seed, count, round % TICKETS * count)?;
            if begun.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.begun.extend(begun);
            if self.begun.len() >= TICKETS as usize {
                if !told {
                    println!("busy");
                    told = true;
                }
                let (lease, oldest) = self.begun.remove(0);
                self.outcomes(oldest)?;
                drop(lease);
            }
        }
        Err("a flood does not end".into())
    }

    fn keys(&self, seed: u32, count: u32) -> Vec<BlockKey> {
        let spec = self.space.spec();
        self.space.chain(&tokens_of(seed, count, spec.namespace.layout.tokens_per_block))
    }

    fn block_bytes(&self) -> usize {
        usize::try_from(self.layout.block_bytes()).unwrap_or(usize::MAX)
    }

    /// The region behind what was queued.
    fn behind(&self) -> Result<RegionRef<'_>, Box<dyn Error>> {
        match self.order {
            Order::Ring => Ok(self.region.behind(self.copies.stream())?),
            Order::Sync => {
                self.copies.stream().synchronize()?;
                Ok(self.region.as_region())
            }
        }
    }

    /// Stores a prompt, its first block from the last of the places from `first` on. What the
    /// places hold is written by this process's own stream, which is not waited for where there is
    /// a ring.
    fn begin_store(&self, seed: u32, count: u32, first: u32) -> Result<Ticket, Box<dyn Error>> {
        let keys = self.keys(seed, count);
        let places: Vec<u32> = (first..first + count).rev().collect();
        for (key, place) in keys.iter().zip(&places) {
            let bytes = payload(key, self.block_bytes());
            for (offset, run, from) in runs(&self.layout, *place) {
                let part = bytes.get(from..from + run).ok_or("a block is too short")?;
                self.copies.write(self.region.pool().address() + offset, part)?;
            }
        }
        let parents = std::iter::once(&BlockKey::ROOT).chain(&keys);
        let tokens = self.space.spec().namespace.layout.tokens_per_block;
        let blocks: Vec<StoreBlock> = keys
            .iter()
            .zip(parents)
            .zip(0..)
            .zip(&places)
            .map(|(((key, parent), position), place)| StoreBlock {
                key: *key,
                parent: *parent,
                position,
                tokens,
                place: *place,
            })
            .collect();
        Ok(self.client.store(&self.space, 1, &self.behind()?, &blocks, Duration::ZERO))
    }

    /// Loads what is there of a prompt; `None` when that is nothing.
    fn begin_load(
        &self,
        keys: &[BlockKey],
        places: &[u32],
    ) -> Result<Option<(Lease, Ticket)>, Box<dyn Error>> {
        let found = self.client.lookup(&[(&self.space, keys)], 2 * PATIENCE);
        let Lookup::Hit(Hit { blocks, lease: Some(lease), .. }) = found else { return Ok(None) };
        let wanted: Vec<LoadBlock> = keys
            .iter()
            .zip(places)
            .take(blocks)
            .map(|(key, place)| LoadBlock { key: *key, place: *place })
            .collect();
        let behind = self.behind()?;
        let ticket = self.client.load(&lease, &self.space, &behind, &wanted, Duration::ZERO);
        Ok(Some((lease, ticket)))
    }

    /// Loads what is there of a prompt, from the second place on, every other block to the end of
    /// the pool. All of the pool is looked at then.
    fn load(&self, seed: u32, count: u32) -> Result<String, Box<dyn Error>> {
        let keys = self.keys(seed, count);
        let last = self.layout.blocks.saturating_sub(1);
        let place =
            |at: u32| if at.is_multiple_of(2) { (1 + at / 2).min(last) } else { last - at / 2 };
        let places: Vec<u32> = (0..count).map(place).collect();
        let pool = self.region.pool();
        let blank = vec![BLANK; usize::try_from(pool.bytes())?];
        self.copies.write(pool.address(), &blank)?;
        let Some((_lease, ticket)) = self.begin_load(&keys, &places)? else {
            return Ok("nothing".to_owned());
        };
        let outcomes = match self.client.wait(ticket, PATIENCE) {
            Ok(outcomes) => outcomes,
            Err(late) => return Err(format!("not ended in time: {late:?}").into()),
        };
        let mut found = vec![0; blank.len()];
        self.copies.read(pool.address(), &mut found)?;
        let mut expected = blank;
        for ((key, place), outcome) in keys.iter().zip(&places).zip(&outcomes) {
            let bytes = payload(key, self.block_bytes());
            for (offset, run, from) in runs(&self.layout, *place) {
                let at = usize::try_from(offset)?;
                let to = expected.get_mut(at..at + run).ok_or("a run is outside")?;
                // A place of a miss holds nothing of use.
                let good = matches!(outcome, Outcome::Loaded(_));
                let (from, at) = if good { (bytes.get(from..), 0) } else { (found.get(at..), 0) };
                let from = from.and_then(|from| from.get(at..run)).ok_or("a run is outside")?;
                to.copy_from_slice(from);
            }
        }
        match found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            None => Ok(words(&outcomes)),
            Some(at) => Ok(format!("WRONG byte {at} of the pool, prompt {seed}: {outcomes:?}")),
        }
    }
}

fn words(outcomes: &[Outcome]) -> String {
    let words: Vec<String> = outcomes.iter().map(|outcome| format!("{outcome:?}")).collect();
    words.join(" ")
}

/// The runs of a place: offset in the pool, bytes, and where they are in the payload.
fn runs(layout: &RegionLayout, place: u32) -> Vec<(u64, usize, usize)> {
    let mut from = 0;
    let mut runs = Vec::new();
    for plane in &layout.planes {
        for row in 0..plane.rows {
            let bytes = usize::try_from(plane.row_bytes).unwrap_or(usize::MAX);
            runs.push((plane.run_offset(place, row), bytes, from));
            from += bytes;
        }
    }
    runs
}
