//! `kvtide show`: everything known of one block.

use std::time::Duration;

use kvtide_client::{BlockKey, InspectRow};
use serde::Serialize;

use super::args::Show;
use super::error::CliError;
use super::ls::now_s;
use super::namespaces;
use super::out::Out;
use super::remote::Remote;
use super::table::pairs;
use crate::units::{bytes, count, span};

#[derive(Serialize)]
struct Shown {
    key: String,
    parent: Option<String>,
    tenant: Option<String>,
    model: Option<String>,
    namespace: u32,
    position: u32,
    tokens: u32,
    raw_bytes: u32,
    device: Option<u8>,
    host: bool,
    nvme: Option<OnNvme>,
    pins: u32,
    hits: u32,
    idle_us: u64,
    created_s: u64,
}

#[derive(Serialize)]
struct OnNvme {
    segment: u32,
    segment_sequence: u64,
    stored_bytes: u32,
}

pub(crate) fn run(args: &Show, remote: &Remote, out: Out) -> Result<(), CliError> {
    let row = remote.block(&args.key)?;
    let known = remote.namespaces()?;
    let namespace = known.iter().find(|known| known.id == row.namespace);
    let mut shown = shown(&row);
    shown.tenant = namespace.map(|known| known.tenant.clone());
    shown.model = namespace.map(|known| namespaces::model(&known.namespace));
    out.emit(&shown, |shown| text(shown, now_s()))
}

fn shown(row: &InspectRow) -> Shown {
    Shown {
        key: row.key.to_string(),
        parent: (row.parent != BlockKey::ROOT).then(|| row.parent.to_string()),
        tenant: None,
        model: None,
        namespace: row.namespace.0,
        position: row.position,
        tokens: row.tokens,
        raw_bytes: row.raw_bytes,
        device: row.device.map(|gpu| gpu.0),
        host: row.host,
        nvme: row.nvme.map(|(segment, segment_sequence, stored_bytes)| OnNvme {
            segment,
            segment_sequence,
            stored_bytes,
        }),
        pins: row.pins,
        hits: row.hits,
        idle_us: row.idle_us,
        created_s: row.created_s,
    }
}

fn text(shown: &Shown, now_s: u64) -> String {
    let unknown = || "-".to_owned();
    let first = u64::from(shown.position) * u64::from(shown.tokens);
    let nvme = shown.nvme.as_ref().map_or_else(
        || "no".to_owned(),
        |nvme| {
            format!(
                "segment {} (epoch {}, number {}), {} stored",
                nvme.segment,
                nvme.segment_sequence >> 32,
                nvme.segment_sequence & u64::from(u32::MAX),
                bytes(u64::from(nvme.stored_bytes))
            )
        },
    );
    pairs(&[
        ("key", shown.key.clone()),
        (
            "parent",
            shown.parent.clone().unwrap_or_else(|| "none: the first of its chain".to_owned()),
        ),
        ("tenant", shown.tenant.clone().unwrap_or_else(unknown)),
        (
            "namespace",
            format!("{} ({})", shown.namespace, shown.model.clone().unwrap_or_else(unknown)),
        ),
        (
            "position",
            format!(
                "block {} of its chain, tokens {} to {}",
                shown.position,
                first,
                (first + u64::from(shown.tokens)).saturating_sub(1)
            ),
        ),
        ("size", bytes(u64::from(shown.raw_bytes))),
        ("device", shown.device.map_or_else(|| "no".to_owned(), |gpu| format!("GPU {gpu}"))),
        ("host", if shown.host { "yes" } else { "no" }.to_owned()),
        ("nvme", nvme),
        ("leases, pins", count(u64::from(shown.pins))),
        ("hits", count(u64::from(shown.hits))),
        ("last used", format!("{} ago", span(Duration::from_micros(shown.idle_us)))),
        (
            "stored",
            format!("{} ago", span(Duration::from_secs(now_s.saturating_sub(shown.created_s)))),
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtide_client::NamespaceId;
    use kvtide_tiers::catalog::GpuId;

    #[test]
    fn a_block_is_shown_whole_in_both_forms() {
        let row = InspectRow {
            key: BlockKey([0xab; 32]),
            parent: BlockKey::ROOT,
            namespace: NamespaceId(3),
            position: 2,
            tokens: 16,
            raw_bytes: 65536,
            device: Some(GpuId(1)),
            host: false,
            nvme: Some((9, (4 << 32) | 5, 61440)),
            pins: 1,
            hits: 7,
            idle_us: 1500,
            created_s: 100,
        };
        let shown = shown(&row);
        let text = text(&shown, 160);
        for part in [
            "none: the first of its chain",
            "tokens 32 to 47",
            "segment 9 (epoch 4, number 5), 60.0 KiB stored",
            "GPU 1",
            "1.5 ms ago",
            "1 min 00 s ago",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let json = serde_json::to_value(&shown).unwrap();
        assert_eq!(json["nvme"]["segment"], 9);
        assert_eq!(json["key"].as_str().unwrap().len(), 64);
    }
}
