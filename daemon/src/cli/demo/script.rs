//! Who says what in the demo: tokens that follow from a conversation's number, and who takes which
//! turn. Nothing here depends on a clock or on chance, so every run asks the same.

use kvtide_tiers::block::{
    ElementType, KvLayout, Model, Namespace, Plane, RankScope, RegionLayout,
};

/// Client processes.
pub(crate) const PROCESSES: usize = 4;
/// Conversations. Each process has one of them at a time.
pub(crate) const CONVERSATIONS: usize = 8;
/// Turns of each conversation.
pub(crate) const TURNS: usize = 6;
/// Tokens in a block.
pub(crate) const BLOCK_TOKENS: usize = 16;
/// Tokens of the system prompt, the same in every conversation.
pub(crate) const SYSTEM_TOKENS: usize = 512;
/// Tokens that a turn adds: question and answer.
pub(crate) const TURN_TOKENS: usize = 512;
/// Of these, tokens of the answer, which the model makes in any case.
pub(crate) const ANSWER_TOKENS: usize = 192;

const LAYERS: u32 = 8;
const KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 64;

/// Places in a client's pool: one conversation at its longest.
pub(crate) const POOL_BLOCKS: u32 = ((SYSTEM_TOKENS + TURNS * TURN_TOKENS) / BLOCK_TOKENS) as u32;

/// The demo's model: small, but shaped like a real one.
pub(crate) fn namespace() -> Namespace {
    Namespace {
        model: Model {
            weights: "demo-weights".to_owned(),
            revision: "1".to_owned(),
            adapter: String::new(),
        },
        layout: KvLayout {
            layers: LAYERS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            element: ElementType::Bf16,
            tokens_per_block: BLOCK_TOKENS as u32,
            kv_group: 0,
            ranks: RankScope::Rank { rank: 0, world: 1 },
            page_layout_version: 1,
        },
        salt: String::new(),
    }
}

/// A paged pool as engines have it: for each layer K and V apart, each a row of blocks.
pub(crate) fn pool_layout() -> RegionLayout {
    let row_bytes = BLOCK_TOKENS as u64 * u64::from(KV_HEADS) * u64::from(HEAD_DIM) * 2;
    let plane_bytes = row_bytes * u64::from(POOL_BLOCKS);
    let planes = (0..u64::from(2 * LAYERS))
        .map(|plane| Plane {
            offset: plane * plane_bytes,
            block_stride: row_bytes,
            rows: 1,
            row_stride: row_bytes,
            row_bytes,
        })
        .collect();
    RegionLayout { blocks: POOL_BLOCKS, planes }
}

/// The place of the pool that holds block `position`: scattered, as in a paged pool.
pub(crate) fn place(position: u32) -> u32 {
    // 101 is prime and does not divide the pool, so every place is used once.
    (position * 101 + 7) % POOL_BLOCKS
}

/// The first `count` tokens of a conversation.
pub(crate) fn tokens(conversation: usize, count: usize) -> Vec<u32> {
    (0..count)
        .map(|at| {
            let speaker = if at < SYSTEM_TOKENS { 0 } else { 1 + conversation as u32 };
            (at as u32).wrapping_mul(2_654_435_761).wrapping_add(speaker * 40_503) % 128_000
        })
        .collect()
}

/// Tokens of the prompt of turn `turn` (from 0): history and the new question.
pub(crate) fn prompt_tokens(turn: usize) -> usize {
    total_tokens(turn) - ANSWER_TOKENS
}

/// Tokens after turn `turn`: the prompt and the answer.
pub(crate) fn total_tokens(turn: usize) -> usize {
    SYSTEM_TOKENS + (turn + 1) * TURN_TOKENS
}

/// The process that takes a conversation's turn: another one each time.
pub(crate) fn process(conversation: usize, turn: usize) -> usize {
    (conversation + turn) % PROCESSES
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_pool_has_a_place_for_every_block_and_none_twice() {
        let layout = pool_layout();
        layout.check(layout.region_bytes()).expect("a sound layout");
        assert_eq!(layout.block_bytes(), 64 << 10);
        let places: BTreeSet<u32> = (0..POOL_BLOCKS).map(place).collect();
        assert_eq!(places.len(), POOL_BLOCKS as usize);
        assert_eq!(total_tokens(TURNS - 1) / BLOCK_TOKENS, POOL_BLOCKS as usize);
        namespace().check().expect("a sound namespace");
    }

    #[test]
    fn conversations_share_the_system_prompt_and_nothing_else() {
        let (a, b) = (tokens(0, total_tokens(1)), tokens(1, total_tokens(1)));
        assert_eq!(a[..SYSTEM_TOKENS], b[..SYSTEM_TOKENS]);
        assert_ne!(a[SYSTEM_TOKENS], b[SYSTEM_TOKENS]);
        assert_eq!(tokens(0, total_tokens(0))[..], a[..total_tokens(0)]);
    }

    #[test]
    fn no_two_turns_in_a_row_land_on_the_same_process() {
        for conversation in 0..CONVERSATIONS {
            for turn in 1..TURNS {
                assert_ne!(process(conversation, turn), process(conversation, turn - 1));
            }
        }
    }
}
