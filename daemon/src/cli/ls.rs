//! `kvtide ls`: what is in the cache, added up or block by block.

use std::collections::BTreeMap;
use std::time::Duration;

use kvtide_client::{Inspect, NamespaceRow};
use kvtide_tiers::block::NamespaceId;
use kvtide_tiers::catalog::{InspectRow, Tier};
use serde::Serialize;

use super::args::{By, Ls, Sort};
use super::error::CliError;
use super::namespaces;
use super::out::Out;
use super::remote::Remote;
use super::table::{Align, Table};
use crate::units::{bytes, count, span};

/// Sums over some of the blocks.
#[derive(Serialize, Default, Clone, Debug, PartialEq)]
struct Sum {
    blocks: u64,
    tokens: u64,
    device_blocks: u64,
    device_bytes: u64,
    host_blocks: u64,
    host_bytes: u64,
    nvme_blocks: u64,
    nvme_bytes: u64,
    hits: u64,
    pinned_blocks: u64,
    /// When the oldest of them was stored, seconds since the Unix epoch; 0 for none.
    oldest_created_s: u64,
    /// Time since one of them was last used.
    idle_us_min: Option<u64>,
}

impl Sum {
    /// Adds a block, as far as it lies in `tier` (or in any).
    fn add(&mut self, row: &InspectRow, tier: Option<Tier>) {
        let device = row.device.is_some() && tier.is_none_or(|tier| tier == Tier::Device);
        let host = row.host && tier.is_none_or(|tier| tier == Tier::Host);
        let nvme = row.nvme.filter(|_| tier.is_none_or(|tier| tier == Tier::Nvme));
        self.blocks += 1;
        self.tokens += u64::from(row.tokens);
        if device {
            self.device_blocks += 1;
            self.device_bytes += u64::from(row.raw_bytes);
        }
        if host {
            self.host_blocks += 1;
            self.host_bytes += u64::from(row.raw_bytes);
        }
        if let Some((_, _, stored_bytes)) = nvme {
            self.nvme_blocks += 1;
            self.nvme_bytes += u64::from(stored_bytes);
        }
        self.hits += u64::from(row.hits);
        self.pinned_blocks += u64::from(row.pins > 0);
        if self.oldest_created_s == 0 || row.created_s < self.oldest_created_s {
            self.oldest_created_s = row.created_s;
        }
        let idle = self.idle_us_min.map_or(row.idle_us, |least| least.min(row.idle_us));
        self.idle_us_min = Some(idle);
    }
}

#[derive(Serialize)]
struct Group {
    name: String,
    tenant: Option<String>,
    model: Option<String>,
    #[serde(flatten)]
    sum: Sum,
}

#[derive(Serialize)]
struct Groups {
    by: &'static str,
    groups: Vec<Group>,
    total: Sum,
}

#[derive(Serialize)]
struct Block {
    key: String,
    tenant: Option<String>,
    namespace: u32,
    position: u32,
    tokens: u32,
    raw_bytes: u32,
    /// In the memory of this GPU, numbered as `status` lists them.
    device: Option<u8>,
    host: bool,
    nvme: bool,
    nvme_bytes: Option<u32>,
    hits: u32,
    pins: u32,
    idle_us: u64,
    created_s: u64,
}

#[derive(Serialize)]
struct Blocks {
    blocks: Vec<Block>,
    total: Sum,
}

pub(crate) fn run(args: &Ls, remote: &Remote, out: Out) -> Result<(), CliError> {
    let known = remote.namespaces()?;
    let chosen = choose(args, &known)?;
    let query =
        Inspect { namespaces: chosen, tier: args.tier.map(Tier::from), ..Inspect::default() };
    let rows = remote.inspect_all(query, usize::MAX)?;
    let now_s = now_s();
    if args.blocks {
        let found = blocks(args, rows, &known);
        out.emit(&found, |found| blocks_text(found, now_s))
    } else {
        let found = groups(args, &rows, &known);
        out.emit(&found, |found| groups_text(found, now_s))
    }
}

/// The namespaces that the options leave; `None` for all.
fn choose(args: &Ls, known: &[NamespaceRow]) -> Result<Option<Vec<NamespaceId>>, CliError> {
    if args.tenant.is_none() && args.namespace.is_none() {
        return Ok(None);
    }
    if let Some(tenant) = &args.tenant
        && !known.iter().any(|row| row.tenant == *tenant)
    {
        let tenants: std::collections::BTreeSet<&str> =
            known.iter().map(|row| row.tenant.as_str()).collect();
        let tenants: Vec<&str> = tenants.into_iter().collect();
        return Err(CliError::Failed(format!(
            "no namespace of tenant `{tenant}` is visible to you; there are: {}",
            if tenants.is_empty() { "none".to_owned() } else { tenants.join(", ") }
        )));
    }
    let one = args.namespace.as_deref().map(|name| namespaces::find(known, name)).transpose()?;
    let ids = known
        .iter()
        .filter(|row| args.tenant.as_ref().is_none_or(|tenant| row.tenant == *tenant))
        .filter(|row| one.is_none_or(|one| row.id == one.id))
        .map(|row| row.id)
        .collect();
    Ok(Some(ids))
}

fn groups(args: &Ls, rows: &[InspectRow], known: &[NamespaceRow]) -> Groups {
    let by_id: BTreeMap<NamespaceId, &NamespaceRow> =
        known.iter().map(|row| (row.id, row)).collect();
    let tier = args.tier.map(Tier::from);
    let mut total = Sum::default();
    let mut sums: BTreeMap<String, (Option<NamespaceId>, Sum)> = BTreeMap::new();
    for row in rows {
        total.add(row, tier);
        match args.by {
            By::Namespace => {
                // Padded, so that numbers sort as numbers.
                let name = format!("{:010}", row.namespace.0);
                sums.entry(name).or_default().1.add(row, tier);
                let name = format!("{:010}", row.namespace.0);
                sums.entry(name).or_default().0 = Some(row.namespace);
            }
            By::Tenant => {
                let tenant = by_id.get(&row.namespace).map_or("?", |known| known.tenant.as_str());
                sums.entry(tenant.to_owned()).or_default().1.add(row, tier);
            }
            By::Tier => {
                for one in [Tier::Device, Tier::Host, Tier::Nvme] {
                    let there = match one {
                        Tier::Device => row.device.is_some(),
                        Tier::Host => row.host,
                        Tier::Nvme => row.nvme.is_some(),
                    };
                    if there && tier.is_none_or(|tier| tier == one) {
                        sums.entry(one.name().to_owned()).or_default().1.add(row, Some(one));
                    }
                }
            }
        }
    }
    let groups = sums.into_iter().map(|(name, (id, sum))| {
        let row = id.and_then(|id| by_id.get(&id));
        Group {
            name: id.map_or(name, |id| id.0.to_string()),
            tenant: row.map(|row| row.tenant.clone()),
            model: row.map(|row| namespaces::model(&row.namespace)),
            sum,
        }
    });
    let by = match args.by {
        By::Namespace => "namespace",
        By::Tenant => "tenant",
        By::Tier => "tier",
    };
    Groups { by, groups: groups.collect(), total }
}

fn groups_text(found: &Groups, now_s: u64) -> String {
    if found.total.blocks == 0 {
        return "no blocks\n".to_owned();
    }
    let header = found.by.to_uppercase();
    let mut table = Table::new(&[
        (header.as_str(), Align::Left),
        ("TENANT", Align::Left),
        ("MODEL", Align::Left),
        ("BLOCKS", Align::Right),
        ("TOKENS", Align::Right),
        ("DEVICE", Align::Right),
        ("HOST", Align::Right),
        ("NVME", Align::Right),
        ("HITS", Align::Right),
        ("PINNED", Align::Right),
        ("OLDEST", Align::Right),
        ("LAST USE", Align::Right),
    ]);
    for group in &found.groups {
        let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let mut row = vec![group.name.clone(), text(&group.tenant), text(&group.model)];
        row.extend(sum_cells(&group.sum, now_s));
        table.row(row);
    }
    table.rule();
    let mut row = vec!["total".to_owned(), String::new(), String::new()];
    row.extend(sum_cells(&found.total, now_s));
    table.row(row);
    table.render()
}

fn sum_cells(sum: &Sum, now_s: u64) -> Vec<String> {
    vec![
        count(sum.blocks),
        count(sum.tokens),
        bytes(sum.device_bytes),
        bytes(sum.host_bytes),
        bytes(sum.nvme_bytes),
        count(sum.hits),
        count(sum.pinned_blocks),
        span(Duration::from_secs(now_s.saturating_sub(sum.oldest_created_s))),
        sum.idle_us_min.map_or_else(String::new, |idle| span(Duration::from_micros(idle))),
    ]
}

fn blocks(args: &Ls, mut rows: Vec<InspectRow>, known: &[NamespaceRow]) -> Blocks {
    let mut total = Sum::default();
    for row in &rows {
        total.add(row, args.tier.map(Tier::from));
    }
    match args.sort {
        Sort::Chain => rows.sort_by_key(|row| (row.namespace, row.position)),
        Sort::Idle => rows.sort_by_key(|row| std::cmp::Reverse(row.idle_us)),
        Sort::Hits => rows.sort_by_key(|row| std::cmp::Reverse(row.hits)),
        Sort::Size => rows.sort_by_key(|row| std::cmp::Reverse(row.raw_bytes)),
    }
    rows.truncate(args.limit);
    let tenant = |id| known.iter().find(|row| row.id == id).map(|row| row.tenant.clone());
    let blocks = rows.iter().map(|row| Block {
        key: row.key.to_string(),
        tenant: tenant(row.namespace),
        namespace: row.namespace.0,
        position: row.position,
        tokens: row.tokens,
        raw_bytes: row.raw_bytes,
        device: row.device.map(|gpu| gpu.0),
        host: row.host,
        nvme: row.nvme.is_some(),
        nvme_bytes: row.nvme.map(|(_, _, stored)| stored),
        hits: row.hits,
        pins: row.pins,
        idle_us: row.idle_us,
        created_s: row.created_s,
    });
    Blocks { blocks: blocks.collect(), total }
}

fn blocks_text(found: &Blocks, now_s: u64) -> String {
    if found.blocks.is_empty() {
        return "no blocks\n".to_owned();
    }
    let mut table = Table::new(&[
        ("KEY", Align::Left),
        ("NS", Align::Right),
        ("TENANT", Align::Left),
        ("POS", Align::Right),
        ("TOKENS", Align::Right),
        ("SIZE", Align::Right),
        ("TIERS", Align::Left),
        ("HITS", Align::Right),
        ("PINS", Align::Right),
        ("AGE", Align::Right),
        ("LAST USE", Align::Right),
    ]);
    for block in &found.blocks {
        table.row([
            block.key.get(..16).unwrap_or(&block.key).to_owned(),
            block.namespace.to_string(),
            block.tenant.clone().unwrap_or_else(|| "-".to_owned()),
            block.position.to_string(),
            block.tokens.to_string(),
            bytes(u64::from(block.raw_bytes)),
            tiers(block),
            block.hits.to_string(),
            block.pins.to_string(),
            span(Duration::from_secs(now_s.saturating_sub(block.created_s))),
            span(Duration::from_micros(block.idle_us)),
        ]);
    }
    let total = &found.total;
    format!(
        "{}\n{} of {} blocks shown; device {}, host {}, nvme {}\n",
        table.render(),
        count(found.blocks.len() as u64),
        count(total.blocks),
        bytes(total.device_bytes),
        bytes(total.host_bytes),
        bytes(total.nvme_bytes)
    )
}

/// `device host nvme`, each in its column.
fn tiers(block: &Block) -> String {
    let name = |there: bool, tier: Tier| if there { tier.name() } else { "" };
    let device = name(block.device.is_some(), Tier::Device);
    let (host, nvme) = (name(block.host, Tier::Host), name(block.nvme, Tier::Nvme));
    match format!("{device:6} {host:4} {nvme}").trim_end() {
        "" => "-".to_owned(),
        tiers => tiers.to_owned(),
    }
}

/// Seconds since the Unix epoch.
pub(crate) fn now_s() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtide_tiers::block::BlockKey;
    use kvtide_tiers::catalog::GpuId;

    fn row(namespace: u32, position: u32, host: bool, nvme: bool) -> InspectRow {
        InspectRow {
            key: BlockKey([position as u8 + 1; 32]),
            parent: BlockKey::ROOT,
            namespace: NamespaceId(namespace),
            position,
            tokens: 16,
            raw_bytes: 65536,
            device: (position == 1).then_some(GpuId(0)),
            host,
            nvme: nvme.then_some((3, 1 << 32, 61440)),
            pins: position % 2,
            hits: position,
            idle_us: 1000 * (1 + u64::from(position)),
            created_s: 1000 + u64::from(position),
        }
    }

    fn known(id: u32, tenant: &str) -> NamespaceRow {
        NamespaceRow {
            id: NamespaceId(id),
            tenant: tenant.into(),
            namespace: super::super::demo::script::namespace(),
            generation: 0,
            fingerprint: [id as u8; 16],
        }
    }

    fn args(line: &str) -> Ls {
        use clap::Parser;
        let line = format!("kvtide ls {line}");
        match super::super::args::Cli::try_parse_from(line.split_whitespace()).unwrap().command {
            super::super::args::Command::Ls(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn totals_add_up_by_whatever_is_asked() {
        let rows = [row(1, 0, true, true), row(1, 1, false, true), row(12, 0, true, false)];
        let known = [known(1, "a"), known(12, "b")];
        let by_namespace = groups(&args(""), &rows, &known);
        let names: Vec<&str> =
            by_namespace.groups.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(names, ["1", "12"]);
        assert_eq!(by_namespace.groups[0].sum.blocks, 2);
        assert_eq!(by_namespace.groups[0].sum.host_bytes, 65536);
        assert_eq!(by_namespace.groups[0].sum.nvme_bytes, 2 * 61440);
        assert_eq!(by_namespace.total.blocks, 3);
        assert_eq!(by_namespace.total.oldest_created_s, 1000);
        let by_tier = groups(&args("--by tier"), &rows, &known);
        let blocks: Vec<u64> = by_tier.groups.iter().map(|group| group.sum.blocks).collect();
        assert_eq!(blocks, [1, 2, 2], "device, host, nvme");
        let only = groups(&args("--by tier --tier device"), &rows, &known);
        assert_eq!((only.groups.len(), only.groups[0].sum.device_bytes), (1, 65536));
        assert_eq!(only.groups[0].sum.host_bytes, 0);
        let by_tenant = groups(&args("--by tenant"), &rows, &known);
        assert_eq!(by_tenant.groups.len(), 2);
        let text = groups_text(&by_tenant, 1060);
        assert!(text.contains("64.0 KiB") && text.contains("1 min 00 s"), "{text}");
    }

    #[test]
    fn a_list_is_sorted_cut_and_says_what_it_left_out() {
        let rows = vec![row(1, 1, true, false), row(1, 0, true, true), row(1, 2, false, true)];
        let found = blocks(&args("--blocks --limit 2 --sort hits"), rows, &[known(1, "a")]);
        let positions: Vec<u32> = found.blocks.iter().map(|block| block.position).collect();
        assert_eq!(positions, [2, 1]);
        let text = blocks_text(&found, 2000);
        assert!(text.contains("2 of 3 blocks shown; device 64.0 KiB, host 128.0 KiB"), "{text}");
        assert!(text.contains("device host "), "{text}");
        assert!(serde_json::to_value(&found).unwrap()["total"]["blocks"] == 3);
    }

    #[test]
    fn an_unknown_tenant_is_said_with_those_that_there_are() {
        let error = choose(&args("--tenant z"), &[known(1, "a"), known(2, "b")]).unwrap_err();
        assert!(error.to_string().contains("there are: a, b"), "{error}");
        let chosen = choose(&args("--tenant b --namespace 2"), &[known(1, "a"), known(2, "b")]);
        assert_eq!(chosen.unwrap(), Some(vec![NamespaceId(2)]));
    }
}
