//! What `status` shows, and what is stated at start.

use std::sync::atomic::Ordering;

use kvtide_client::protocol::{PROTOCOL_VERSION, StatusReport};
use kvtide_tiers::catalog::{CatalogStats, CodecReport};

use crate::app::{App, io_words};
use crate::devices;
use crate::drive;
use crate::kept;
use crate::session::Session;

/// The report for one caller, who may see these `codecs`. `stats` are missing while the catalog is
/// too busy to say.
pub fn report(
    app: &App,
    session: &Session,
    codecs: Vec<CodecReport>,
    stats: Option<&CatalogStats>,
) -> StatusReport {
    let caller = &session.caller;
    let node = app.node().report();
    let tenant = caller.tenant.as_ref();
    let tenants = app.tenants();
    let own = tenant.map(|tenant| tenant.name.clone()).unwrap_or_default();
    let same = |each: &Session| caller.operator || each.tenant() == session.tenant();
    let sessions = app.sessions().values().filter(|each| same(each)).count() as u64;
    StatusReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: PROTOCOL_VERSION,
        pid: std::process::id(),
        uptime_s: app.started.elapsed().as_secs(),
        operator: caller.operator,
        socket: app.config.socket.display().to_string(),
        store: app.config.store.display().to_string(),
        draining: app.draining.load(Ordering::Acquire),
        host_bytes: node.host_bytes,
        host_pages: node.pages.name().to_owned(),
        host_kept: kept::words(&node),
        nvme_bytes: node.nvme.as_ref().map_or(0, |nvme| nvme.geometry.store_bytes()),
        nvme_io: io_words(&node),
        device: devices::words(&app.config.device, &node),
        devices: devices::status(&node),
        notes: app.notes.clone(),
        sessions,
        tenants: match caller.operator {
            true => tenants.list.iter().map(|tenant| tenant.name.clone()).collect(),
            false => vec![own.clone()],
        },
        shared: match caller.operator {
            true => tenants.shared.iter().map(|space| space.name.clone()).collect(),
            false => tenants.shared_of(&own).map(|space| space.name.clone()).collect(),
        },
        codec: tenant.map(|tenant| tenant.codec).unwrap_or_default(),
        codecs,
        policy: drive::policy(app, session, stats),
        tenant: own,
    }
}
