//! Tells routers which blocks lie here: KV events over ZeroMQ, as inference engines publish them.
//!
//! The catalog says what comes and goes; a thread of its own makes messages of it and sends them.
//! Nothing waits for it: what does not fit its queue is dropped, and then subscribers are told that
//! all is gone and what is there (as anew). Each namespace has a topic, the configured beginning,
//! `@` and its fingerprint, and messages of a topic are numbered without a gap. Whoever subscribes
//! makes all that is there be told once more. A node that drains says that all is gone, and nothing
//! after that: routers then send nothing more there.
//!
//! A block is known by the last 8 bytes of its key; see `Digest` in the client library.

mod batch;
mod zmtp;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvtide_client::protocol::NamespaceRow;
use kvtide_tiers::block::NamespaceId;
use kvtide_tiers::catalog::{InspectQuery, Reply, Request, Residency, Tier};
use kvtide_tiers::movement::FollowResidency;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};

use crate::app::App;
use crate::config::EventSettings;
use batch::{KvEvent, Writer, events_of};
use zmtp::Publisher;

/// Events of the catalog that wait to be told.
const QUEUE: usize = 4096;

/// What happens within this time is told in one message.
const GATHER: Duration = Duration::from_millis(5);

/// How often is looked whether the node drains.
const LOOK: Duration = Duration::from_millis(100);

/// How long the end waits for the last message.
const GONE_TIME: Duration = Duration::from_millis(500);

/// Rows of the block table told at a time.
const PAGE_ROWS: u32 = 1024;

/// Between two pages, so that the catalog has other things to do.
const PAUSE: Duration = Duration::from_millis(2);

/// What was published, for metrics.
#[derive(Default)]
pub struct EventCounters {
    /// Messages.
    pub messages: AtomicU64,
    /// Changes that did not fit the queue.
    pub overflows: AtomicU64,
    publisher: Arc<Publisher>,
    /// Events are published.
    on: AtomicBool,
    leaving: Notify,
    gone: Notify,
}

impl EventCounters {
    /// Has subscribers told that all is gone, and waits a moment for that.
    pub async fn say_gone(&self) {
        if self.on.load(Ordering::Acquire) {
            self.leaving.notify_one();
            // Whether or not: the daemon ends.
            let _ = tokio::time::timeout(GONE_TIME, self.gone.notified()).await;
        }
    }

    /// Subscribers now.
    pub fn subscribers(&self) -> u64 {
        self.publisher.subscribers() as u64
    }

    /// Messages that subscribers were too slow for.
    pub fn dropped(&self) -> u64 {
        self.publisher.dropped.load(Ordering::Relaxed)
    }
}

/// The end of the queue at which changes are taken out.
pub struct Changes {
    changes: mpsc::Receiver<Vec<Residency>>,
    cut: Arc<AtomicBool>,
}

/// The queue between catalog and publisher: what the node is to call, and what it then says.
pub fn queue(counters: &Arc<EventCounters>) -> (FollowResidency, Changes) {
    let (sender, changes) = mpsc::channel(QUEUE);
    let cut = Arc::new(AtomicBool::new(false));
    let (counters, cut_short) = (Arc::clone(counters), Arc::clone(&cut));
    let tell = move |told: Vec<Residency>, whole: bool| {
        if !whole || sender.try_send(told).is_err() {
            counters.overflows.fetch_add(1, Ordering::Relaxed);
            cut_short.store(true, Ordering::Release);
        }
    };
    (FollowResidency(Arc::new(tell)), Changes { changes, cut })
}

/// Starts publishing, on a thread of its own.
///
/// # Errors
/// The address cannot be had, or the thread.
pub fn start(
    app: &Arc<App>,
    settings: &EventSettings,
    counters: &Arc<EventCounters>,
    changes: Changes,
) -> std::io::Result<()> {
    let listener = std::net::TcpListener::bind(settings.address)?;
    listener.set_nonblocking(true)?;
    tracing::info!(address = %settings.address, topic = settings.topic, "events are published");
    let teller = Teller {
        app: Arc::clone(app),
        settings: settings.clone(),
        counters: Arc::clone(counters),
        publisher: Arc::clone(&counters.publisher),
        topics: HashMap::new(),
        gone: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let run = move || {
        runtime.block_on(async move {
            match TcpListener::from_std(listener) {
                Ok(listener) => {
                    tokio::spawn(Arc::clone(&teller.publisher).serve(listener));
                    teller.run(changes).await;
                }
                Err(error) => tracing::error!(%error, "events are not published"),
            }
        });
    };
    std::thread::Builder::new().name("kvtided-events".into()).spawn(run)?;
    counters.on.store(true, Ordering::Release);
    Ok(())
}

struct Topic {
    name: Vec<u8>,
    next: u64,
    writer: Writer,
}

/// Makes messages of changes.
struct Teller {
    app: Arc<App>,
    settings: EventSettings,
    counters: Arc<EventCounters>,
    publisher: Arc<Publisher>,
    topics: HashMap<NamespaceId, Topic>,
    /// The node drains, and everybody was told that all is gone.
    gone: bool,
}

impl Teller {
    async fn run(mut self, mut changes: Changes) {
        let (publisher, counters) = (Arc::clone(&self.publisher), Arc::clone(&self.counters));
        let mut looks = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                first = changes.changes.recv() => {
                    let Some(mut told) = first else { return };
                    tokio::time::sleep(GATHER).await;
                    while let Ok(more) = changes.changes.try_recv() {
                        told.extend(more);
                    }
                    self.tell(&told);
                }
                () = publisher.subscribed.notified() => self.tell_all().await,
                () = counters.leaving.notified() => {}
                _ = looks.tick() => {}
            }
            if self.app.draining.load(Ordering::Acquire) && !self.gone {
                self.tell_gone();
                self.gone = true;
                counters.gone.notify_one();
            }
            if changes.cut.swap(false, Ordering::AcqRel) && !self.gone {
                tracing::warn!("too much came and went at once: subscribers are told all anew");
                while changes.changes.try_recv().is_ok() {}
                self.tell_gone();
                self.tell_all().await;
            }
        }
    }

    /// Tells of changes, namespace by namespace.
    fn tell(&mut self, changes: &[Residency]) {
        if self.gone {
            return;
        }
        let mut by_namespace: BTreeMap<NamespaceId, Vec<Residency>> = BTreeMap::new();
        for change in changes {
            by_namespace.entry(change.namespace).or_default().push(*change);
        }
        for (namespace, changes) in by_namespace {
            self.send(namespace, &events_of(&changes));
        }
    }

    fn tell_gone(&mut self) {
        let known: Vec<NamespaceId> = self.topics.keys().copied().collect();
        for namespace in known {
            self.send(namespace, &[KvEvent::Cleared]);
        }
    }

    /// Tells of all that is there. Changes meanwhile wait, and are told afterwards.
    async fn tell_all(&mut self) {
        if self.gone {
            return self.tell_gone();
        }
        let mut cursor = Some(0);
        while let Some(at) = cursor {
            let query = InspectQuery { cursor: at, limit: PAGE_ROWS, ..InspectQuery::default() };
            let reply = self.app.ask_self(Request::Inspect(query)).await;
            let page = match reply {
                Ok(Reply::Inspect(page)) => page,
                // It has too much to do: a little later.
                Ok(Reply::Busy(_)) if !self.app.draining.load(Ordering::Acquire) => {
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
                _ => return,
            };
            let mut there = Vec::new();
            for tier in [Tier::Device, Tier::Host, Tier::Nvme] {
                for row in &page.rows {
                    let here = match tier {
                        Tier::Device => row.device.is_some(),
                        Tier::Host => row.host,
                        Tier::Nvme => row.nvme.is_some(),
                    };
                    there.extend(here.then_some(Residency {
                        namespace: row.namespace,
                        key: row.key,
                        parent: row.parent,
                        tokens: row.tokens,
                        tier,
                        there: true,
                    }));
                }
            }
            self.tell(&there);
            cursor = page.cursor;
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn send(&mut self, namespace: NamespaceId, events: &[KvEvent]) {
        if !self.topics.contains_key(&namespace) {
            let Some(row) = self.app.namespace_row(namespace) else { return };
            self.topics.insert(namespace, topic_of(&self.settings, &row));
        }
        let Some(topic) = self.topics.get_mut(&namespace) else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let batch = topic.writer.batch(now.as_secs_f64(), events);
        self.publisher.publish(&topic.name, &[&topic.next.to_be_bytes(), &batch]);
        topic.next += 1;
        self.counters.messages.fetch_add(1, Ordering::Relaxed);
    }
}

fn topic_of(settings: &EventSettings, row: &NamespaceRow) -> Topic {
    let print: String = row.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
    let adapter = &row.namespace.model.adapter;
    Topic {
        name: format!("{}@{print}", settings.topic).into_bytes(),
        next: 0,
        writer: Writer {
            layout: settings.layout,
            adapter: (!adapter.is_empty()).then(|| adapter.clone()),
        },
    }
}
