//! What of a namespace lies here, summed up for routers.
//!
//! Made from pages of the block table, so that the catalog is never held up for long, and made once
//! for all who ask at the same time or soon after.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvtide_client::protocol::{
    CallError, DIGEST_BYTES_MAX, Digest, NamespaceRow, TierDigest, block_hash,
};
use kvtide_tiers::block::NamespaceId;
use kvtide_tiers::catalog::{InspectQuery, Reply, Request, Tier};
use tokio::sync::Mutex;

use crate::app::App;

/// A digest is given out again for so long, also when something has changed since.
const KEPT: Duration = Duration::from_secs(2);

/// Digests that are kept.
const KEPT_MAX: usize = 64;

/// Rows of the block table looked at in one go.
const PAGE_ROWS: u32 = 4096;

/// Digests made lately.
#[derive(Default)]
pub struct Digests(Mutex<HashMap<(NamespaceId, u32), (Instant, Digest)>>);

impl Digests {
    /// The digest of a namespace, with filters of `bytes_max` bytes together at most. One is made
    /// at a time.
    ///
    /// # Errors
    /// When the node is stopping or too busy.
    pub async fn digest(
        &self,
        app: &App,
        row: &NamespaceRow,
        bytes_max: u32,
    ) -> Result<Digest, CallError> {
        let bytes_max = bytes_max.clamp(64, DIGEST_BYTES_MAX);
        let mut kept = self.0.lock().await;
        let stats = app.stats().await.ok_or_else(stopping)?;
        kept.retain(|_, (made, _)| made.elapsed() < KEPT);
        if let Some((_, digest)) = kept.get(&(row.id, bytes_max)) {
            return Ok(Digest { draining: stats.draining, ..digest.clone() });
        }
        let hashes = hashes(app, row.id).await?;
        let tiers = hashes.iter().filter(|(_, blocks)| !blocks.is_empty()).count().max(1);
        let each = u64::from(bytes_max) / tiers as u64;
        let digest = Digest {
            version: stats.residency_version,
            started_s: started_s(app),
            draining: stats.draining,
            fingerprint: row.fingerprint,
            block_tokens: row.namespace.layout.tokens_per_block,
            tiers: hashes
                .iter()
                .filter(|(_, blocks)| !blocks.is_empty())
                .map(|(tier, blocks)| TierDigest::of(*tier, blocks, each))
                .collect(),
        };
        if kept.len() < KEPT_MAX {
            kept.insert((row.id, bytes_max), (Instant::now(), digest.clone()));
        }
        Ok(digest)
    }
}

fn stopping() -> CallError {
    CallError::Internal("the daemon is stopping, or too busy".to_owned())
}

fn started_s(app: &App) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(app.started.elapsed()).as_secs()
}

/// The blocks of a namespace, by tier.
async fn hashes(app: &App, namespace: NamespaceId) -> Result<[(Tier, Vec<u64>); 3], CallError> {
    let mut found = [Tier::Device, Tier::Host, Tier::Nvme].map(|tier| (tier, Vec::new()));
    let mut cursor = Some(0);
    while let Some(at) = cursor {
        let query = InspectQuery {
            namespaces: Some(vec![namespace]),
            cursor: at,
            limit: PAGE_ROWS,
            ..InspectQuery::default()
        };
        let Reply::Inspect(page) = app.ask_self(Request::Inspect(query)).await? else {
            return Err(stopping());
        };
        for row in page.rows {
            let [(_, device), (_, host), (_, nvme)] = &mut found;
            let here = [row.device.is_some(), row.host, row.nvme.is_some()];
            let lists = [device, host, nvme].into_iter().zip(here);
            lists.filter(|(_, there)| *there).for_each(|(list, _)| list.push(block_hash(&row.key)));
        }
        cursor = page.cursor;
    }
    Ok(found)
}
