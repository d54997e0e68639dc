//! Copies that came and went, as the KV events that vLLM publishes: `[time, events, rank]` in
//! MessagePack, `BlockStored` and `BlockRemoved` with the medium, `AllBlocksCleared`.

use std::io;

use kvtide_client::protocol::block_hash;
use kvtide_tiers::block::BlockKey;
use kvtide_tiers::catalog::{Residency, Tier};
use rmp::encode::{
    write_array_len, write_f64, write_map_len, write_nil, write_str, write_u64, write_uint,
};

use crate::config::EventLayout;

/// Blocks of one event at most.
const BLOCKS_MAX: usize = 512;

/// One event of one namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum KvEvent {
    Stored { hashes: Vec<u64>, parent: Option<u64>, tokens: u32, tier: Tier },
    Removed { hashes: Vec<u64>, tier: Tier },
    Cleared,
}

/// What subscribers know a tier as.
fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "GPU",
        Tier::Host => "CPU",
        Tier::Nvme => "STORAGE",
    }
}

/// The events for changes of one namespace, in order. Blocks that follow one another in a chain
/// make one event.
pub(super) fn events_of(changes: &[Residency]) -> Vec<KvEvent> {
    let mut events: Vec<KvEvent> = Vec::new();
    let mut last: Option<BlockKey> = None;
    for change in changes {
        let hash = block_hash(&change.key);
        let follows = last == Some(change.parent);
        match (events.last_mut(), change.there) {
            (Some(KvEvent::Stored { hashes, tokens, tier, .. }), true)
                if follows
                    && (*tokens, *tier) == (change.tokens, change.tier)
                    && hashes.len() < BLOCKS_MAX =>
            {
                hashes.push(hash);
            }
            (Some(KvEvent::Removed { hashes, tier }), false)
                if *tier == change.tier && hashes.len() < BLOCKS_MAX =>
            {
                hashes.push(hash);
            }
            (_, true) => {
                let parent = (change.parent != BlockKey::ROOT).then(|| block_hash(&change.parent));
                let (hashes, tokens, tier) = (vec![hash], change.tokens, change.tier);
                events.push(KvEvent::Stored { hashes, parent, tokens, tier });
            }
            (_, false) => {
                events.push(KvEvent::Removed { hashes: vec![hash], tier: change.tier });
            }
        }
        last = change.there.then_some(change.key);
    }
    events
}

/// How one namespace's events are written.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    pub(super) layout: EventLayout,
    /// The adapter's name, if there is one.
    pub(super) adapter: Option<String>,
}

impl Writer {
    /// A batch. `time_s`: seconds since the Unix epoch.
    pub(super) fn batch(&self, time_s: f64, events: &[KvEvent]) -> Vec<u8> {
        let mut out = Vec::new();
        // Only memory that cannot be had makes writing into it fail.
        self.write(&mut out, time_s, events).unwrap_or_default();
        out
    }

    fn write(&self, out: &mut Vec<u8>, time_s: f64, events: &[KvEvent]) -> io::Result<()> {
        write_array_len(out, 3)?;
        write_f64(out, time_s)?;
        write_array_len(out, u32::try_from(events.len()).unwrap_or(u32::MAX))?;
        events.iter().try_for_each(|event| self.event(out, event))?;
        // The rank of a data-parallel engine: one daemon is one.
        write_uint(out, 0)?;
        Ok(())
    }

    fn event(&self, out: &mut Vec<u8>, event: &KvEvent) -> io::Result<()> {
        let fields = match event {
            KvEvent::Stored { .. } => 7,
            KvEvent::Removed { .. } => 2,
            KvEvent::Cleared => 0,
        };
        match self.layout {
            EventLayout::Maps => write_map_len(out, fields + 1),
            EventLayout::Arrays => write_array_len(out, fields + 1),
        }?;
        self.name(out, "type")?;
        match event {
            KvEvent::Stored { hashes, parent, tokens, tier } => {
                write_str(out, "BlockStored")?;
                self.hashes(out, hashes)?;
                self.name(out, "parent_block_hash")?;
                match parent {
                    Some(hash) => write_u64(out, *hash)?,
                    None => write_nil(out)?,
                }
                self.name(out, "token_ids")?;
                write_array_len(out, 0)?;
                self.name(out, "block_size")?;
                write_uint(out, (*tokens).into())?;
                self.name(out, "lora_id")?;
                write_nil(out)?;
                self.name(out, "medium")?;
                write_str(out, medium(*tier))?;
                self.name(out, "lora_name")?;
                match &self.adapter {
                    Some(adapter) => write_str(out, adapter)?,
                    None => write_nil(out)?,
                }
            }
            KvEvent::Removed { hashes, tier } => {
                write_str(out, "BlockRemoved")?;
                self.hashes(out, hashes)?;
                self.name(out, "medium")?;
                write_str(out, medium(*tier))?;
            }
            KvEvent::Cleared => write_str(out, "AllBlocksCleared")?,
        }
        Ok(())
    }

    /// The name of the next field, where fields have names.
    fn name(&self, out: &mut Vec<u8>, name: &str) -> io::Result<()> {
        if self.layout == EventLayout::Maps {
            write_str(out, name)?;
        }
        Ok(())
    }

    fn hashes(&self, out: &mut Vec<u8>, hashes: &[u64]) -> io::Result<()> {
        self.name(out, "block_hashes")?;
        write_array_len(out, u32::try_from(hashes.len()).unwrap_or(u32::MAX))?;
        hashes.iter().try_for_each(|hash| write_u64(out, *hash).map_err(io::Error::from))
    }
}

#[cfg(test)]
mod tests {
    use kvtide_tiers::block::NamespaceId;

    use super::*;

    fn change(key: u8, parent: u8, tier: Tier, there: bool) -> Residency {
        let (key, parent) = (BlockKey([key; 32]), BlockKey([parent; 32]));
        Residency { namespace: NamespaceId(1), key, parent, tokens: 16, tier, there }
    }

    fn hash(key: u8) -> u64 {
        u64::from_be_bytes([key; 8])
    }

    #[test]
    fn a_chain_is_one_event_and_a_fork_begins_another() {
        let changes = [
            change(1, 0, Tier::Host, true),
            change(2, 1, Tier::Host, true),
            change(3, 1, Tier::Host, true),
            change(3, 1, Tier::Nvme, true),
            change(2, 1, Tier::Host, false),
            change(1, 0, Tier::Host, false),
        ];
        let stored = |keys: &[u8], parent, tier| KvEvent::Stored {
            hashes: keys.iter().map(|key| hash(*key)).collect(),
            parent,
            tokens: 16,
            tier,
        };
        let expected = [
            stored(&[1, 2], None, Tier::Host),
            stored(&[3], Some(hash(1)), Tier::Host),
            stored(&[3], Some(hash(1)), Tier::Nvme),
            KvEvent::Removed { hashes: vec![hash(2), hash(1)], tier: Tier::Host },
        ];
        assert_eq!(events_of(&changes), expected);
    }

    #[test]
    fn a_batch_has_the_bytes_that_msgpack_gives_it() {
        let events = [KvEvent::Removed { hashes: vec![5], tier: Tier::Nvme }, KvEvent::Cleared];
        let arrays = Writer { layout: EventLayout::Arrays, adapter: None };
        let mut expected = vec![0x93, 0xcb];
        expected.extend(1.5f64.to_be_bytes());
        expected.push(0x92);
        expected.extend(b"\x93\xacBlockRemoved\x91\xcf\0\0\0\0\0\0\0\x05\xa7STORAGE");
        expected.extend(b"\x91\xb0AllBlocksCleared\x00");
        assert_eq!(arrays.batch(1.5, &events), expected);
        let maps = Writer { layout: EventLayout::Maps, adapter: Some("a".to_owned()) };
        let batch = maps.batch(0.0, &[KvEvent::Cleared]);
        assert!(batch.ends_with(b"\x91\x81\xa4type\xb0AllBlocksCleared\x00"), "{batch:?}");
    }
}
