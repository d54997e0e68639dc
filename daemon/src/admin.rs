//! Metrics and health, for the machine itself: on a loopback port or a unix socket. Reads counters
//! and changes nothing; shows neither keys nor names of tenants' namespaces.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kvtide_client::protocol::{GpuStatus, OwnerRow, ServiceStats, TenantStats};
use kvtide_tiers::catalog::{CatalogStats, QuotaUse, Signal, TierUse, TierWorth};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::app::App;
use crate::config::MetricsAddress;
use crate::devices;

/// How long the catalog may take to answer before health says no.
const HEALTH_TIME: Duration = Duration::from_secs(1);

/// Starts the endpoint. An address that cannot be had is a warning: the cache is of use without.
pub async fn start(app: &Arc<App>) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .with_state(Arc::clone(app));
    match &app.config.metrics {
        MetricsAddress::Off => {}
        MetricsAddress::Tcp { address, configured } => {
            match tokio::net::TcpListener::bind(address).await {
                Ok(listener) => {
                    tracing::info!(%address, "metrics and health are served");
                    tokio::spawn(async move { axum::serve(listener, router).await });
                }
                Err(error) => tracing::warn!(
                    %address, %error, configured,
                    "metrics are not served; set --metrics to a free loopback address, or to off"
                ),
            }
        }
        MetricsAddress::Unix(path) => {
            if std::os::unix::net::UnixStream::connect(path).is_err() {
                let _ = std::fs::remove_file(path);
            }
            match tokio::net::UnixListener::bind(path) {
                Ok(listener) => {
                    tracing::info!(path = %path.display(), "metrics and health are served");
                    tokio::spawn(async move { axum::serve(listener, router).await });
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "metrics are not served");
                }
            }
        }
    }
}

async fn healthz(State(app): State<Arc<App>>) -> Response {
    let catalog = tokio::time::timeout(HEALTH_TIME, app.stats()).await;
    let (code, word) = match catalog {
        Ok(Some(stats)) if stats.draining => (StatusCode::OK, "draining"),
        Ok(Some(_)) => (StatusCode::OK, "ok"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "the catalog does not answer"),
    };
    let gpus = devices::status(&app.node().report());
    (code, health_text(word, &gpus)).into_response()
}

/// The word, and a line for each GPU that is off or stuck. The daemon serves without them, so that
/// they do not change the code.
fn health_text(word: &str, gpus: &[GpuStatus]) -> String {
    let mut text = format!("{word}\n");
    for trouble in devices::troubles(gpus) {
        text.push_str(&trouble);
        text.push('\n');
    }
    text
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let catalog = tokio::time::timeout(HEALTH_TIME, app.stats()).await.ok().flatten();
    let tenants = app.tenants().list.iter().map(|tenant| {
        let sessions = app.sessions().values().filter(|s| s.tenant() == Some(tenant.id)).count();
        app.tenant_counters(Some(tenant.id)).stats(&tenant.name, sessions as u64)
    });
    let held = catalog.as_ref().map(|stats| &stats.owners[..]).unwrap_or_default();
    let owners = app.owners(None, held);
    let snapshot = Snapshot {
        catalog: catalog.map(|stats| *stats),
        service: app.counters.stats(),
        tenants: tenants.collect(),
        owners,
        gpus: devices::status(&app.node().report()),
        uptime_s: app.started.elapsed().as_secs(),
    };
    let content = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match snapshot.render() {
        Ok(text) => ([(header::CONTENT_TYPE, content)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[derive(Clone, Debug)]
struct Snapshot {
    catalog: Option<CatalogStats>,
    service: ServiceStats,
    tenants: Vec<TenantStats>,
    owners: Vec<OwnerRow>,
    gpus: Vec<GpuStatus>,
    uptime_s: u64,
}

type Labels = Vec<(&'static str, String)>;

impl Snapshot {
    fn render(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut out = String::new();
        text::encode(&mut out, &registry)?;
        Ok(out)
    }

    /// The tiers with their labels, the device tier once for each GPU.
    fn tiers<'a>(&self, stats: &'a CatalogStats) -> Vec<(Labels, &'a TierUse)> {
        let label = |name: &str| vec![("tier", name.to_owned())];
        let mut tiers = vec![(label("host"), &stats.host), (label("nvme"), &stats.nvme)];
        for (gpu, tier) in self.gpus.iter().zip(&stats.device) {
            let mut labels = label("device");
            labels.push(("gpu", gpu.uuid.clone()));
            tiers.push((labels, tier));
        }
        tiers
    }

    fn gpus(&self, out: &mut Families<'_>) -> fmt::Result {
        let rows = |read: fn(&GpuStatus) -> bool| -> Vec<(Labels, u64)> {
            let row = |gpu: &GpuStatus| (vec![("gpu", gpu.uuid.clone())], u64::from(read(gpu)));
            self.gpus.iter().map(row).collect()
        };
        out.gauge("kvtide_gpu_off", "1 while a GPU is not used", rows(|gpu| gpu.off.is_some()))?;
        out.gauge(
            "kvtide_gpu_stuck",
            "1 while the driver is stuck on a GPU, see status",
            rows(|gpu| gpu.stuck),
        )
    }

    /// What tenants and shared namespaces hold and may hold.
    fn owners(&self, out: &mut Families<'_>) -> fmt::Result {
        let rows = |read: fn(&QuotaUse) -> Option<u64>| -> Vec<(Labels, u64)> {
            let mut rows = Vec::new();
            for each in &self.owners {
                for tier in &each.held.tiers {
                    let name = tier.tier.name().to_owned();
                    let labels = vec![("tenant", each.owner.clone()), ("tier", name)];
                    rows.extend(read(tier).map(|value| (labels, value)));
                }
            }
            rows
        };
        let used = rows(|tier| Some(tier.used_bytes));
        out.gauge("kvtide_tenant_used_bytes", "Bytes charged to a tenant", used)?;
        let (soft, hard) = (rows(|tier| tier.quota.soft), rows(|tier| tier.quota.hard));
        out.gauge("kvtide_tenant_soft_quota_bytes", "Soft quotas", soft)?;
        out.gauge("kvtide_tenant_hard_quota_bytes", "Hard quotas", hard)?;
        let evicted = rows(|tier| Some(tier.evicted));
        out.counter("kvtide_quota_evicted_blocks", "Copies evicted for a quota", evicted)?;
        let refused = self.owners.iter();
        let refused =
            refused.map(|each| (vec![("tenant", each.owner.clone())], each.held.refused)).collect();
        out.counter("kvtide_quota_refused_blocks", "Blocks refused for a quota", refused)
    }

    fn catalog(&self, out: &mut Families<'_>, stats: &CatalogStats) -> fmt::Result {
        let tiers = self.tiers(stats);
        let tier = |read: fn(&TierUse) -> u64| -> Vec<(Labels, u64)> {
            tiers.iter().map(|(labels, tier)| (labels.clone(), read(tier))).collect()
        };
        out.gauge(
            "kvtide_tier_capacity_bytes",
            "Bytes that a tier may hold",
            tier(|t| t.capacity_bytes),
        )?;
        out.gauge("kvtide_tier_used_bytes", "Bytes of live copies", tier(|t| t.used_bytes))?;
        out.gauge("kvtide_tier_copies_count", "Live copies", tier(|t| t.blocks))?;
        out.gauge(
            "kvtide_tier_offline",
            "1 while a tier is off",
            tier(|t| t.offline.is_some().into()),
        )?;
        out.counter("kvtide_tier_in_bytes", "Bytes moved into a tier", tier(|t| t.bytes_in))?;
        out.counter("kvtide_tier_out_bytes", "Bytes moved out of a tier", tier(|t| t.bytes_out))?;
        out.counter("kvtide_evicted_blocks", "Copies evicted", tier(|t| t.evicted))?;
        out.counter("kvtide_loaded_blocks", "Blocks that loads found in a tier", tier(|t| t.hits))?;
        let reason = |name: String| vec![("reason", snake(&name))];
        let rows = |list: Vec<(String, u64)>| -> Vec<(Labels, u64)> {
            list.into_iter().map(|(name, count)| (reason(name), count)).collect()
        };
        let missed = stats.missed.iter().map(|(why, n)| (format!("{why:?}"), *n)).collect();
        out.counter("kvtide_missed_blocks", "Blocks that loads missed", rows(missed))?;
        let rejected = stats.rejected.iter().map(|(why, n)| (format!("{why:?}"), *n)).collect();
        out.counter("kvtide_rejected_blocks", "Stores refused", rows(rejected))?;
        for (name, help, value) in [
            ("kvtide_lookups", "Lookups asked", stats.lookups),
            ("kvtide_lookup_keys", "Keys in lookups", stats.lookup_keys),
            ("kvtide_lookup_hit_keys", "Keys that lookups found", stats.lookup_hits),
            ("kvtide_stored_blocks", "Blocks stored", stats.stored),
            ("kvtide_present_blocks", "Stores of blocks that were there", stats.present),
            ("kvtide_store_busy_blocks", "Stores without room", stats.store_busy),
            ("kvtide_corrupt_blocks", "Blocks dropped for wrong checksums", stats.corrupt),
            ("kvtide_nvme_write_failures", "Failed writes", stats.write_failures),
            ("kvtide_nvme_read_failures", "Failed reads", stats.read_failures),
            ("kvtide_reclaimed_segments", "Segments emptied", stats.segments_reclaimed),
            ("kvtide_reinserted_blocks", "Blocks written again", stats.reinserted),
            ("kvtide_unspilled_bytes", "Not written under pressure", stats.not_spilled_bytes),
            ("kvtide_tails_dropped_blocks", "Dropped under pressure", stats.dropped_under_pressure),
            ("kvtide_degradation_raised", "Steps of the ladder entered", stats.ladder.raised),
            ("kvtide_degradation_lowered", "Steps of the ladder left", stats.ladder.lowered),
        ] {
            out.counter(name, help, vec![(Vec::new(), value)])?;
        }
        for (name, help, value) in [
            ("kvtide_known_blocks", "Blocks in any tier", stats.blocks),
            ("kvtide_dirty_blocks", "Host copies without one on nvme", stats.dirty_blocks),
            ("kvtide_regions", "Regions registered", stats.regions),
            ("kvtide_leases", "Leases alive", stats.leases),
            ("kvtide_pins", "Pins alive", stats.pins),
            ("kvtide_tickets", "Tickets under way", stats.tickets),
            ("kvtide_quarantined_segments", "Segments not used", stats.segments_quarantined),
            ("kvtide_draining", "1 while draining", stats.draining.into()),
            ("kvtide_degradation_step", "0 normal to 5 bypass", stats.ladder.step as u64),
        ] {
            out.gauge(name, help, vec![(Vec::new(), value)])?;
        }
        let pressure = |signal: Signal| {
            let labels = vec![("signal", signal.name().to_owned())];
            (labels, u64::from(stats.ladder.pressure.of(signal)))
        };
        let rows = Signal::ALL.map(pressure).to_vec();
        out.gauge("kvtide_pressure_percent", "What the ladder is climbed for", rows)?;
        worth(out, stats)
    }
}

/// What loads are worth, and how much is computed.
fn worth(out: &mut Families<'_>, stats: &CatalogStats) -> fmt::Result {
    let tier = |read: fn(&TierWorth) -> u64| -> Vec<(Labels, u64)> {
        let row = |each: &TierWorth| (vec![("tier", each.tier.name().to_owned())], read(each));
        stats.worth.iter().map(row).collect()
    };
    out.seconds("kvtide_saved_seconds", "Time that loads saved", tier(|t| t.saved_us))?;
    out.seconds("kvtide_lost_seconds", "Time that loads took more", tier(|t| t.lost_us))?;
    out.counter("kvtide_judged_loads", "Loads whose worth was measured", tier(|t| t.loads))?;
    out.counter(
        "kvtide_advised_against_lookups",
        "Lookups whose blocks in a tier were better computed",
        tier(|t| t.advised_against),
    )?;
    out.counter(
        "kvtide_withheld_lookups",
        "Lookups that ended before blocks of a tier that loses",
        tier(|t| t.withheld),
    )?;
    out.counter("kvtide_probe_lookups", "Lookups that try such a tier", tier(|t| t.probes))?;
    out.gauge(
        "kvtide_withheld_namespaces",
        "Namespaces to which a tier is not offered",
        tier(|t| t.namespaces_withheld.into()),
    )?;
    let prefill = &stats.prefill;
    for (name, help, value) in [
        ("kvtide_prefill_reports", "Prefills reported", prefill.reports),
        ("kvtide_prefills_admitted", "Prefills admitted", prefill.admitted),
        ("kvtide_prefill_admitted_tokens", "Weighted tokens admitted", prefill.admitted_tokens),
        ("kvtide_prefill_waits", "Answers to wait for a turn", prefill.told_to_wait),
        ("kvtide_prefill_coalesced", "Answers to wait for the same prefix", prefill.coalesced),
        ("kvtide_prefill_degraded", "Answers to keep fewer turns", prefill.degraded),
        ("kvtide_prefill_queue_full", "Asks without a place in the queue", prefill.queue_full),
        ("kvtide_prefill_lapsed", "Asks and grants that nobody ended", prefill.lapsed),
    ] {
        out.counter(name, help, vec![(Vec::new(), value)])?;
    }
    for (name, help, value) in [
        ("kvtide_prefills_queued", "Prefills that wait", prefill.queued.into()),
        ("kvtide_prefills", "Prefills under way", prefill.grants.into()),
        ("kvtide_prefill_tokens", "Their weighted tokens", prefill.tokens_in_flight),
    ] {
        out.gauge(name, help, vec![(Vec::new(), value)])?;
    }
    Ok(())
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Families { encoder };
        if let Some(stats) = &self.catalog {
            self.catalog(&mut out, stats)?;
        }
        self.gpus(&mut out)?;
        self.owners(&mut out)?;
        let service = &self.service;
        let rows = |label: &'static str, list: &[(String, u64)]| -> Vec<(Labels, u64)> {
            list.iter().map(|(name, count)| (vec![(label, name.clone())], *count)).collect()
        };
        out.counter("kvtide_calls", "Calls, by verb", rows("verb", &service.calls))?;
        let refused = rows("reason", &service.hellos_refused);
        out.counter("kvtide_hellos_refused", "Connections refused at the hello", refused)?;
        for (name, help, value) in [
            ("kvtide_connections", "Connections accepted", service.connections),
            ("kvtide_bad_frames", "Connections closed for a bad frame", service.frames_bad),
            ("kvtide_panics", "Connections or calls that panicked", service.panics),
            ("kvtide_busy_calls", "Calls answered busy", service.calls_busy),
            ("kvtide_refused_calls", "Calls refused", service.calls_refused),
        ] {
            out.counter(name, help, vec![(Vec::new(), value)])?;
        }
        let tenants = |read: fn(&TenantStats) -> u64| -> Vec<(Labels, u64)> {
            let row = |each: &TenantStats| (vec![("tenant", each.tenant.clone())], read(each));
            self.tenants.iter().map(row).collect()
        };
        out.gauge("kvtide_sessions", "Sessions connected", tenants(|t| t.sessions))?;
        out.counter(
            "kvtide_tenant_loaded_blocks",
            "Blocks loaded",
            tenants(|t| t.loaded_device + t.loaded_host + t.loaded_nvme),
        )?;
        out.counter("kvtide_tenant_missed_blocks", "Blocks missed", tenants(|t| t.missed))?;
        out.counter("kvtide_tenant_stored_blocks", "Blocks stored", tenants(|t| t.stored))?;
        out.gauge("kvtide_uptime_seconds", "Seconds since start", vec![(Vec::new(), self.uptime_s)])
    }
}

struct Families<'a> {
    encoder: DescriptorEncoder<'a>,
}

impl Families<'_> {
    fn counter(&mut self, name: &str, help: &str, rows: Vec<(Labels, u64)>) -> fmt::Result {
        self.family(name, help, MetricType::Counter, rows)
    }

    /// A counter of seconds, from microseconds.
    fn seconds(&mut self, name: &str, help: &str, rows: Vec<(Labels, u64)>) -> fmt::Result {
        let kind = MetricType::Counter;
        let mut family = self.encoder.encode_descriptor(name, help, None, kind)?;
        for (labels, micros) in rows {
            ConstCounter::new(micros as f64 / 1e6).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, rows: Vec<(Labels, u64)>) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, rows)
    }

    fn family(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        rows: Vec<(Labels, u64)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, None, kind)?;
        for (labels, value) in rows {
            let row = family.encode_family(&labels)?;
            match kind {
                MetricType::Counter => ConstCounter::new(value).encode(row)?,
                _ => ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(row)?,
            }
        }
        Ok(())
    }
}

/// `NoRoom` becomes `no_room`.
fn snake(name: &str) -> String {
    let mut out = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}

#[cfg(test)]
mod tests {
    use kvtide_tiers::catalog::{MissReason, OwnerUse, Quota, Tier};

    use super::*;

    fn gpu(uuid: &str, stuck: bool) -> GpuStatus {
        GpuStatus {
            uuid: uuid.into(),
            name: "Fake GPU 0".into(),
            driver: "13.0".into(),
            pool_bytes: 1 << 20,
            health: "a copy has been under way for 9 s".into(),
            stuck,
            off: None,
        }
    }

    #[test]
    fn health_names_the_gpu_that_is_stuck() {
        let gpus = [gpu("GPU-a", false), gpu("GPU-b", true)];
        let stuck = "ok\nGPU-b: a copy has been under way for 9 s\n";
        assert_eq!(health_text("ok", &gpus), stuck);
        assert_eq!(health_text("draining", &gpus[..1]), "draining\n");
    }

    #[test]
    fn metrics_have_units_labels_and_totals() {
        let mut catalog = CatalogStats::default();
        catalog.host.bytes_in = 7;
        catalog.missed = vec![(MissReason::NoRoom, 3)];
        catalog.device = vec![TierUse { used_bytes: 9, ..TierUse::default() }];
        let gpus = vec![gpu("GPU-a", true)];
        let service = ServiceStats { calls: vec![("load".into(), 2)], ..Default::default() };
        let tenants = vec![TenantStats { tenant: "a".into(), sessions: 4, ..Default::default() }];
        let held = OwnerUse {
            tiers: vec![QuotaUse {
                tier: Tier::Host,
                used_bytes: 11,
                quota: Quota { soft: None, hard: Some(12) },
                evicted: 13,
            }],
            refused: 14,
            ..OwnerUse::default()
        };
        let owner = OwnerRow { owner: "a".into(), held };
        let snapshot = Snapshot {
            catalog: Some(catalog),
            service,
            tenants,
            owners: vec![owner],
            gpus,
            uptime_s: 5,
        };
        let text = snapshot.render().unwrap();
        for line in [
            "kvtide_tier_in_bytes_total{tier=\"host\"} 7",
            "kvtide_tier_used_bytes{tier=\"device\",gpu=\"GPU-a\"} 9",
            "kvtide_gpu_stuck{gpu=\"GPU-a\"} 1",
            "kvtide_gpu_off{gpu=\"GPU-a\"} 0",
            "kvtide_missed_blocks_total{reason=\"no_room\"} 3",
            "kvtide_calls_total{verb=\"load\"} 2",
            "kvtide_sessions{tenant=\"a\"} 4",
            "kvtide_tenant_used_bytes{tenant=\"a\",tier=\"host\"} 11",
            "kvtide_tenant_hard_quota_bytes{tenant=\"a\",tier=\"host\"} 12",
            "kvtide_quota_evicted_blocks_total{tenant=\"a\",tier=\"host\"} 13",
            "kvtide_quota_refused_blocks_total{tenant=\"a\"} 14",
            "kvtide_uptime_seconds 5",
            "kvtide_lookups_total 0",
        ] {
            assert!(text.lines().any(|each| each == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
