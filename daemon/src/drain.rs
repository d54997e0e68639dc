//! The end: no new clients, what is only in RAM written down within a deadline, then the node
//! stops.

use std::sync::Arc;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use kvtide_tiers::catalog::{Drained, Reply, Request};
use kvtide_tiers::movement::Node;

use crate::app::App;
use crate::config::show_bytes;

/// What is left for the node's own stop when the drain used up its time.
const STOP_TIME_MIN: Duration = Duration::from_secs(2);

/// How much longer than its deadline a drain may take to commit what it has written.
const COMMIT_TIME: Duration = Duration::from_secs(2);

/// Drains and stops. Clients that are connected keep being served (with what is there) until the
/// node stops.
pub async fn drain_and_stop(app: &Arc<App>, node: Node) {
    let limit = *app.drain.lock().unwrap_or_else(PoisonError::into_inner);
    let until = Instant::now() + limit;
    app.set_draining();
    app.events.say_gone().await;
    announce(app, limit).await;
    let deadline_ms = Some(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
    let drain = app.ask_self(Request::Drain { deadline_ms });
    match tokio::time::timeout(limit + COMMIT_TIME, drain).await {
        Ok(Ok(Reply::Drained(drained))) => report(&drained),
        Ok(reply) => tracing::warn!(?reply, "the drain was not done"),
        Err(_) => {
            let limit_ms = limit.as_millis();
            tracing::warn!(limit_ms, "the drain was cut short; blocks only in RAM are lost");
        }
    }
    let left = until.saturating_duration_since(Instant::now()).max(STOP_TIME_MIN);
    let stop = tokio::task::spawn_blocking(move || node.stop());
    match tokio::time::timeout(left, stop).await {
        Ok(Ok(report)) => tracing::info!(clean = report.clean, "stopped"),
        Ok(Err(error)) => tracing::error!(%error, "the node did not stop as it should"),
        Err(_) => tracing::error!("the node did not stop in time; the store will be recovered"),
    }
}

/// Says what a drain is about to write, and what would be lost without it.
async fn announce(app: &App, limit: Duration) {
    if let Some(stats) = app.stats().await {
        let (blocks, bytes) = (stats.dirty_blocks, show_bytes(stats.dirty_bytes));
        let limit_ms = limit.as_millis();
        tracing::info!(blocks, bytes, limit_ms, "draining: so much is only in RAM");
    }
}

/// Says what a drain came to.
pub fn report(drained: &Drained) {
    let Drained { blocks_before, blocks_written, blocks_lost, blocks_on_nvme, .. } = *drained;
    let bytes_written = show_bytes(drained.bytes_written);
    let bytes_lost = show_bytes(drained.bytes_lost);
    tracing::info!(
        blocks_before,
        blocks_written,
        bytes_written,
        blocks_lost,
        bytes_lost,
        blocks_on_nvme,
        "drained"
    );
    if blocks_lost > 0 {
        tracing::warn!(
            blocks_lost,
            bytes_lost,
            "the coldest blocks are only in RAM still: they are lost unless the next daemon takes \
             the RAM tier over"
        );
    }
}
