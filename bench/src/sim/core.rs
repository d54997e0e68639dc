//! The core with an edge on which everything succeeds at once.

use std::{
    collections::VecDeque,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use kvtide_tiers::{
    block::{BlockKey, ElementType, NamespaceId, Sum128},
    catalog::{
        Action, ArbiterConfig, AskId, Catalog, CatalogConfig, CatalogStats, CodecChoice,
        DeviceShape, Event, GpuId, Hints, LeaseId, Limit, Limits, LoadBlock, LookupReply,
        NamespaceInfo, NvmeShape, Outcome, OwnerQuotas, PolicyChoice, PrefillConfig, PrefixQuery,
        RegionId, RejectReason, Reply, Request, SessionId, StoreBlock, TenantId, Tier, Timestamp,
        WRITE_BYTES_IN_FLIGHT,
    },
    movement::{NodeConfig, NvmeConfig},
    segment::{OpenStore, StoreGeometry},
};

/// A connected client. Each has a namespace of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Client {
    pub(crate) tenant: TenantId,
    namespace: NamespaceId,
    session: SessionId,
    region: RegionId,
}

impl Client {
    /// The one who replays.
    pub(crate) const FIRST: Client = Client::new(0);

    /// One beside it.
    pub(crate) const SECOND: Client = Client::new(1);

    const fn new(tenant: u32) -> Client {
        Client {
            tenant: TenantId(tenant),
            namespace: NamespaceId(tenant + 1),
            session: SessionId(tenant as u64 + 1),
            region: RegionId(tenant as u64 + 1),
        }
    }
}

/// Bytes of a block where only their number counts.
const SMALL_BLOCK: u32 = 4096;

/// Blocks in one call, as in `replay`.
const PLACES: u32 = 512;

/// What a load brought.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) device: u64,
    pub(crate) host: u64,
    pub(crate) nvme: u64,
    /// For each block that the lookup found: whether it came.
    pub(crate) came: Vec<bool>,
}

impl Loaded {
    pub(crate) fn blocks(&self) -> u64 {
        self.device + self.host + self.nvme
    }
}

/// Capacities, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TierBytes {
    /// Of a GPU's pool, if there is one.
    pub(crate) device: Option<u64>,
    pub(crate) host: u64,
    pub(crate) nvme: Option<u64>,
    /// Bytes that may be written to nvme in a day.
    pub(crate) write_bytes_per_day: Option<u64>,
    /// Of a segment. Default: what the daemon chooses for the tier's size.
    pub(crate) segment: Option<u32>,
    /// Of a block.
    pub(crate) block: u64,
    /// What the second client's tenant may hold.
    pub(crate) second: OwnerQuotas,
}

/// A catalog and its made-up surroundings.
pub(crate) struct Core {
    catalog: Catalog,
    /// Who asks.
    client: Client,
    /// Of the clients' blocks, and where their memory is.
    block_bytes: u32,
    gpu: Option<GpuId>,
    now: Timestamp,
    ticked: Timestamp,
    next_ask: u64,
    /// The key that lies in each place of the region.
    places: Vec<BlockKey>,
    events: VecDeque<Event>,
    reply: Option<Reply>,
    ended: Option<Vec<Outcome>>,
    slowest: Duration,
    /// Tokens of a block and of the path under way.
    pub(crate) block_tokens: u32,
    pub(crate) path_tokens: u64,
}

impl Core {
    /// One tier: host RAM with a slot for each of `blocks` blocks.
    pub(crate) fn one_tier(policy: &str, blocks: u64, weigh_cost: bool) -> anyhow::Result<Core> {
        let mut config = config(policy, blocks * u64::from(SMALL_BLOCK), SMALL_BLOCK)?;
        config.trace_order = true;
        config.weigh_cost = weigh_cost;
        Ok(Core::start(config, SMALL_BLOCK))
    }

    /// The tiers of a daemon with these capacities.
    pub(crate) fn tiers(policy: &str, sizes: &TierBytes) -> anyhow::Result<Core> {
        let TierBytes { device, host: host_bytes, nvme: nvme_bytes, block, .. } = *sizes;
        let block_bytes = u32::try_from(block).context("blocks must be below 4 GiB")?;
        // The daemon's own way from sizes to shapes.
        let node = NodeConfig::new(host_bytes);
        let slab_bytes = node.host.slab();
        let host_bytes = host_bytes / u64::from(slab_bytes) * u64::from(slab_bytes);
        ensure!(
            block_bytes <= slab_bytes && host_bytes > 0,
            "blocks of {block_bytes} bytes do not fit a host tier of {host_bytes}"
        );
        let mut config = config(policy, host_bytes, slab_bytes)?;
        (config.clean_percent, config.idle_ms) = (node.clean_percent, node.idle_ms);
        if sizes.second.all.is_limited() {
            config.quotas.push((Client::SECOND.tenant, sizes.second));
        }
        config.devices.extend(device.map(|bytes| DeviceShape::of(bytes, slab_bytes)));
        if let Some(bytes) = nvme_bytes {
            let mut nvme = NvmeConfig::new(PathBuf::new(), bytes);
            nvme.block_bytes_min = block_bytes;
            nvme.segment_bytes = sizes.segment;
            let Some(geometry) = nvme.geometry() else {
                bail!("an nvme tier of {bytes} bytes cannot be cut into four segments");
            };
            let write_bytes_per_day = sizes.write_bytes_per_day;
            config.nvme = Some(NvmeShape { write_bytes_per_day, ..nvme_shape(geometry, 1) });
        }
        Ok(Core::start(config, block_bytes))
    }

    /// How a daemon sets up its core for a store that was opened.
    pub(crate) fn recovering(open: &OpenStore) -> anyhow::Result<CatalogConfig> {
        let node = NodeConfig::new(1 << 30);
        let mut config = config("lru", node.host.bytes, node.host.slab())?;
        config.nvme = Some(nvme_shape(open.geometry, open.epoch));
        Ok(config)
    }

    /// Blocks that a core knows.
    pub(crate) fn blocks_of(catalog: &mut Catalog) -> anyhow::Result<u64> {
        let request = Request::Stats;
        let event = Event::Asked { ask: AskId(1), session: Client::FIRST.session, request };
        match catalog.apply(Timestamp(1), event).pop() {
            Some(Action::Answer { reply: Reply::Stats(stats), .. }) => Ok(stats.nvme.blocks),
            other => bail!("stats were answered with {other:?}"),
        }
    }

    fn start(config: CatalogConfig, block_bytes: u32) -> Core {
        // With a GPU, the clients' regions are on it.
        let gpu = (!config.devices.is_empty()).then_some(GpuId(0));
        let mut core = Core {
            catalog: Catalog::new(config),
            client: Client::FIRST,
            block_bytes,
            gpu,
            now: Timestamp(1),
            ticked: Timestamp(1),
            next_ask: 0,
            places: vec![BlockKey::ROOT; PLACES as usize],
            events: VecDeque::new(),
            reply: None,
            ended: None,
            slowest: Duration::ZERO,
            block_tokens: 1,
            path_tokens: u64::MAX,
        };
        core.connect(Client::FIRST);
        core
    }

    /// A client comes.
    pub(crate) fn connect(&mut self, client: Client) {
        let Client { tenant, namespace, session, region } = client;
        let (block_bytes, gpu) = (self.block_bytes, self.gpu);
        self.events.push_back(Event::Namespace(NamespaceInfo {
            id: namespace,
            generation: 1,
            tenant,
            codec: CodecChoice::Raw,
            element: ElementType::Bf16,
            narrow: None,
        }));
        self.events.push_back(Event::SessionOpened { session, tenant });
        self.events.push_back(Event::RegionOpened {
            session,
            region,
            places: PLACES,
            block_bytes,
            gpu,
        });
        self.run();
    }

    /// What follows is asked by this client.
    pub(crate) fn be(&mut self, client: Client) {
        self.client = client;
    }

    /// Lets time pass, with the ticks that the daemon would send.
    pub(crate) fn advance(&mut self, us: u64) {
        self.now = Timestamp(self.now.0 + us);
        if self.now.0 - self.ticked.0 >= 50_000 {
            self.ticked = self.now;
            self.events.push_back(Event::Tick);
            self.run();
        }
    }

    /// Lets time pass until then, from the start.
    pub(crate) fn advance_to(&mut self, us: u64) {
        self.advance((1 + us).saturating_sub(self.now.0));
    }

    /// Begins a request in the order of a trace: blocks of the resident prefix.
    pub(crate) fn begin(&mut self, keys: &[BlockKey], hints: Hints) -> anyhow::Result<usize> {
        let prefixes = vec![PrefixQuery { namespace: self.client.namespace, keys: keys.to_vec() }];
        match self.ask(Request::Lookup { prefixes, lease_ms: 1, hints })? {
            Reply::Lookup(found) => Ok(found.blocks as usize),
            other => bail!("a lookup was answered with {other:?}"),
        }
    }

    /// Blocks of the resident prefix; changes nothing.
    pub(crate) fn peek(&mut self, keys: &[BlockKey]) -> anyhow::Result<usize> {
        let prefixes = vec![PrefixQuery { namespace: self.client.namespace, keys: keys.to_vec() }];
        match self.ask(Request::Lookup { prefixes, lease_ms: 0, hints: Hints::default() })? {
            Reply::Lookup(found) => Ok(found.blocks as usize),
            other => bail!("a lookup was answered with {other:?}"),
        }
    }

    /// Looks up a prefix and says how long the core alone took; `lease_ms` 0 takes no lease.
    pub(crate) fn timed_lookup(
        &mut self,
        keys: Vec<BlockKey>,
        lease_ms: u32,
    ) -> anyhow::Result<(LookupReply, Duration)> {
        let prefixes = vec![PrefixQuery { namespace: self.client.namespace, keys }];
        match self.timed(Request::Lookup { prefixes, lease_ms, hints: Hints::default() })? {
            (Reply::Lookup(found), took) => Ok((found, took)),
            (other, _) => bail!("a lookup was answered with {other:?}"),
        }
    }

    /// Ends a lease and says how long the core alone took.
    pub(crate) fn timed_release(&mut self, lease: LeaseId) -> anyhow::Result<Duration> {
        match self.timed(Request::Release { lease })? {
            (Reply::Count(1), took) => Ok(took),
            (other, _) => bail!("a release was answered with {other:?}"),
        }
    }

    fn timed(&mut self, request: Request) -> anyhow::Result<(Reply, Duration)> {
        self.next_ask += 1;
        self.reply = None;
        let event =
            Event::Asked { ask: AskId(self.next_ask), session: self.client.session, request };
        let started = Instant::now();
        let actions = self.catalog.apply(self.now, event);
        let took = started.elapsed();
        actions.into_iter().for_each(|action| self.act(action));
        self.run();
        Ok((self.reply.take().context("a request was not answered")?, took))
    }

    /// Longest time that the core needed for one event since this was last asked.
    pub(crate) fn take_slowest(&mut self) -> Duration {
        std::mem::take(&mut self.slowest)
    }

    /// Touches blocks that are there, the last one first.
    pub(crate) fn touch(&mut self, keys: &[BlockKey]) -> anyhow::Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let prefix = PrefixQuery { namespace: self.client.namespace, keys: keys.to_vec() };
        match self.ask(Request::Touch { prefix, hints: Hints::default() })? {
            Reply::Count(blocks) if blocks == keys.len() as u64 => Ok(()),
            other => bail!("a touch of {} blocks was answered with {other:?}", keys.len()),
        }
    }

    /// Stores one block; false when there was no room.
    pub(crate) fn store_one(
        &mut self,
        key: &BlockKey,
        parent: &BlockKey,
        position: usize,
    ) -> anyhow::Result<bool> {
        Ok(self.store(&[(*key, *parent, u32::try_from(position)?)])? == 0)
    }

    /// Looks up a path with a lease and loads what is there.
    pub(crate) fn load(&mut self, keys: &[BlockKey], hints: Hints) -> anyhow::Result<Loaded> {
        // As in `replay`: a path that is too long for one lease is looked up in part.
        let mut asked = keys;
        let found = loop {
            let prefixes =
                vec![PrefixQuery { namespace: self.client.namespace, keys: asked.to_vec() }];
            match self.answer(Request::Lookup { prefixes, lease_ms: 60_000, hints })? {
                Reply::Lookup(found) => break found,
                Reply::Busy(Limit::Pins) if asked.len() > 1 => {
                    asked = asked.split_at(asked.len() / 2).0;
                }
                other => bail!("a lookup was answered with {other:?}"),
            }
        };
        let mut loaded = Loaded::default();
        let Some(lease) = found.lease else { return Ok(loaded) };
        let hits = keys.get(..found.blocks as usize).context("a lookup found more than asked")?;
        for part in hits.chunks(PLACES as usize) {
            self.load_part(lease, part, &mut loaded)?;
        }
        self.ask(Request::Release { lease })?;
        Ok(loaded)
    }

    fn load_part(
        &mut self,
        lease: LeaseId,
        keys: &[BlockKey],
        loaded: &mut Loaded,
    ) -> anyhow::Result<()> {
        let place = |(key, place): (&BlockKey, u32)| LoadBlock { key: *key, place };
        let blocks = keys.iter().zip(0..).map(place).collect();
        self.ask(Request::Load {
            lease,
            namespace: self.client.namespace,
            region: self.client.region,
            after_event: None,
            blocks,
            hints: Hints::default(),
        })?;
        let outcomes = self.ended.take().context("a load did not end")?;
        ensure!(outcomes.len() == keys.len(), "a load of {} ended oddly", keys.len());
        for outcome in outcomes {
            match outcome {
                Outcome::Loaded(Tier::Device) => loaded.device += 1,
                Outcome::Loaded(Tier::Host) => loaded.host += 1,
                Outcome::Loaded(Tier::Nvme) => loaded.nvme += 1,
                Outcome::Missed(_) => {}
                other => bail!("a load ended as {other:?}"),
            }
            loaded.came.push(matches!(outcome, Outcome::Loaded(_)));
        }
        Ok(())
    }

    /// Stores what did not come; returns how many found no room.
    pub(crate) fn store_rest(&mut self, keys: &[BlockKey], came: &[bool]) -> anyhow::Result<u64> {
        let parents = std::iter::once(&BlockKey::ROOT).chain(keys);
        let rest: Vec<_> = keys
            .iter()
            .zip(parents)
            .zip(0u32..)
            .zip(came.iter().copied().chain(std::iter::repeat(false)))
            .filter(|(_, came)| !came)
            .map(|(((key, parent), position), _)| (*key, *parent, position))
            .collect();
        let mut no_room = 0;
        for part in rest.chunks(PLACES as usize) {
            no_room += self.store(part)?;
        }
        Ok(no_room)
    }

    /// Stores blocks, each with its key, its parent's key and its position; returns how many found
    /// no room.
    pub(crate) fn store(&mut self, blocks: &[(BlockKey, BlockKey, u32)]) -> anyhow::Result<u64> {
        for ((key, _, _), place) in blocks.iter().zip(&mut self.places) {
            *place = *key;
        }
        let (tokens, path_tokens) = (self.block_tokens, self.path_tokens);
        let block = |((key, parent, position), place): (&(BlockKey, BlockKey, u32), u32)| {
            let (key, parent, position) = (*key, *parent, *position);
            let before = u64::from(position) * u64::from(tokens);
            let left = path_tokens.saturating_sub(before).max(1);
            let tokens = u32::try_from(left).unwrap_or(tokens).min(tokens);
            StoreBlock { key, parent, position, tokens, place }
        };
        let blocks = blocks.iter().zip(0..).map(block).collect();
        let request = Request::Store {
            namespace: self.client.namespace,
            conversation: 1,
            region: self.client.region,
            after_event: None,
            blocks,
            hints: Hints::default(),
        };
        self.ask(request)?;
        let mut no_room = 0;
        for outcome in self.ended.take().context("a store did not end")? {
            match outcome {
                Outcome::Stored | Outcome::Present => {}
                Outcome::Busy | Outcome::Rejected(RejectReason::TenantQuota) => no_room += 1,
                other => bail!("a store ended as {other:?}"),
            }
        }
        Ok(no_room)
    }

    /// The core's counters.
    pub(crate) fn stats(&mut self) -> anyhow::Result<CatalogStats> {
        match self.ask(Request::Stats)? {
            Reply::Stats(stats) => Ok(*stats),
            other => bail!("stats were answered with {other:?}"),
        }
    }

    fn ask(&mut self, request: Request) -> anyhow::Result<Reply> {
        match self.answer(request)? {
            Reply::Busy(limit) => bail!("the core is busy: {limit:?}"),
            Reply::Refused(refusal) => bail!("the core refused: {refusal:?}"),
            reply => Ok(reply),
        }
    }

    fn answer(&mut self, request: Request) -> anyhow::Result<Reply> {
        self.next_ask += 1;
        self.reply = None;
        let ask = AskId(self.next_ask);
        self.events.push_back(Event::Asked { ask, session: self.client.session, request });
        self.run();
        self.reply.take().context("a request was not answered")
    }

    fn run(&mut self) {
        while let Some(event) = self.events.pop_front() {
            let started = Instant::now();
            let actions = self.catalog.apply(self.now, event);
            self.slowest = self.slowest.max(started.elapsed());
            actions.into_iter().for_each(|action| self.act(action));
        }
    }

    /// Carries an action out: it succeeds. A block's checksum is made up from its key.
    fn act(&mut self, action: Action) {
        let done = match action {
            Action::Answer { reply, .. } => {
                self.reply = Some(reply);
                return;
            }
            Action::EndTicket { outcomes, .. } => {
                self.ended = Some(outcomes);
                return;
            }
            Action::Gather { op, descriptor, .. } => {
                Event::Gathered { op, result: Ok(sum_of(&descriptor.key)) }
            }
            Action::Compare { op, place, .. } => {
                let key = self.places.get(place as usize).copied().unwrap_or_default();
                Event::Compared { op, result: Ok(sum_of(&key)) }
            }
            Action::Scatter { op, .. } => Event::Scattered { op, result: Ok(()) },
            Action::Demote { op, .. } => Event::Demoted { op, result: Ok(()) },
            Action::Read { op, .. } => Event::Read { op, result: Ok(()) },
            Action::Encode { op, .. } => Event::Encoded { op, result: None, trial: None },
            Action::Write { op, .. } => Event::Written { op, result: Ok(()) },
            Action::Sync { op } => Event::Synced { op, result: Ok(()) },
            Action::OpenSegment { segment, .. } => Event::SegmentOpened { segment, result: Ok(()) },
            Action::EraseDescriptor { segment, sequence, index } => {
                Event::Erased { segment, sequence, index, result: Ok(()) }
            }
            Action::BindSlab { .. }
            | Action::ClearSlot { .. }
            | Action::DisownSlot { .. }
            | Action::DropEncoded { .. }
            | Action::SealSegment { .. }
            | Action::VoidSegment { .. }
            | Action::RetireNamespace { .. }
            | Action::QuarantineSegment { .. }
            | Action::Residency { .. }
            | Action::Degraded { .. }
            | Action::TierOffline { .. } => return,
        };
        self.events.push_back(done);
    }
}

/// The nvme tier as the daemon sets it up.
fn nvme_shape(geometry: StoreGeometry, epoch: u32) -> NvmeShape {
    NvmeShape {
        geometry,
        epoch,
        quarantined: Vec::new(),
        write_bytes_in_flight: WRITE_BYTES_IN_FLIGHT,
        reads_in_flight: 64,
        clean_segments: 4,
        reinsert_percent: 25,
        write_bytes_per_day: None,
    }
}

fn sum_of(key: &BlockKey) -> Sum128 {
    Sum128::of(&key.0)
}

fn config(policy: &str, host_bytes: u64, slab_bytes: u32) -> anyhow::Result<CatalogConfig> {
    let host_policy =
        PolicyChoice::by_name(policy).with_context(|| format!("no policy is called {policy}"))?;
    Ok(CatalogConfig {
        host_bytes,
        slab_bytes,
        host_policy,
        device_policy: host_policy,
        weigh_cost: false,
        devices: Vec::new(),
        nvme: None,
        quotas: Vec::new(),
        // Paths may be longer than what a client may ask at once.
        limits: Limits { keys_per_call: 1 << 20, ..Limits::default() },
        arbiter: ArbiterConfig::default(),
        prefill: PrefillConfig::default(),
        copy_threads: 1,
        clean_percent: 25,
        idle_ms: 200,
        trace_order: false,
        epoch_s: 0,
        hash_seed: 1,
    })
}
