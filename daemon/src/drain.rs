//! The end: no new clients, dirty blocks written down within a deadline, then the node stops.

use std::sync::Arc;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use kvtide_tiers::catalog::{Reply, Request};
use kvtide_tiers::movement::Node;

use crate::app::App;

/// What is left for the node's own stop when the drain used up its time.
const STOP_TIME_MIN: Duration = Duration::from_secs(1);

/// Drains and stops. Clients that are connected keep being served (with what is there) until the
/// node stops.
pub async fn drain_and_stop(app: &Arc<App>, node: Node) {
    let limit = *app.drain.lock().unwrap_or_else(PoisonError::into_inner);
    let until = Instant::now() + limit;
    app.set_draining();
    match tokio::time::timeout(limit, app.ask_self(Request::Drain)).await {
        Ok(Ok(Reply::Drained { blocks_written, blocks_lost })) => {
            tracing::info!(blocks_written, blocks_lost, "drained");
        }
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
