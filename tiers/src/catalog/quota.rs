//! What tenants and conversations may hold, what they hold, and what was dropped for that.
//!
//! A block is charged to the tenant that owns its namespace, and to the conversation that stored it
//! first, for as long as it has a copy there: whoever finds it present pays nothing. A namespace
//! that several tenants share is an owner of its own.

use serde::{Deserialize, Serialize};

use super::request::{TenantId, Tier};

/// Bytes that somebody may hold in one tier. Default: no limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Quota {
    /// Above this, the owner's blocks are the first to leave when the tier is full.
    pub soft: Option<u64>,
    /// Never above this: what is to be admitted takes the place of the owner's own blocks, or is
    /// refused.
    pub hard: Option<u64>,
}

/// A quota for each tier. Default: no limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TierQuotas {
    /// GPU memory, of all GPUs together.
    pub device: Quota,
    /// Host RAM.
    pub host: Quota,
    /// Segments.
    pub nvme: Quota,
}

impl TierQuotas {
    /// The quota of one tier.
    pub fn of(&self, tier: Tier) -> Quota {
        match tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
            Tier::Nvme => self.nvme,
        }
    }

    /// Whether there is any limit.
    pub fn is_limited(&self) -> bool {
        *self != TierQuotas::default()
    }
}

/// What the configuration says of one tenant, or of a shared namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerQuotas {
    /// Of the tenant.
    pub all: TierQuotas,
    /// Of each of its conversations. What is stored without a number of a conversation counts for
    /// the tenant only.
    pub conversation: TierQuotas,
}

/// Which of its own blocks a conversation loses that is over its quota.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum KeepRule {
    /// The end of its path: other paths of the conversation from their ends on, and what does not
    /// fit then is not stored.
    #[default]
    DropTail,
    /// The oldest blocks behind the system prefix, down to those of the last turns. The client goes
    /// on with a prompt made of that prefix and those turns.
    KeepTurns {
        /// Blocks of the system prefix.
        prefix_blocks: u32,
        /// Turns, 1 to 64: what was stored between one lookup of the session and the next.
        turns: u32,
    },
}

impl KeepRule {
    /// Whether the oldest blocks go first, wherever they stand.
    pub fn is_by_age(self) -> bool {
        matches!(self, KeepRule::KeepTurns { .. })
    }
}

/// What a conversation has lost to its quota, as a lookup that ends there tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Dropped {
    /// The rule in force.
    pub rule: KeepRule,
    /// The lowest position that was dropped or not stored.
    pub first: u32,
    /// The position behind the highest one.
    pub end: u32,
    /// Blocks dropped or not stored since the daemon started.
    pub blocks: u64,
}

/// Use of one tier by one owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QuotaUse {
    /// The tier.
    pub tier: Tier,
    /// Bytes charged now.
    pub used_bytes: u64,
    /// The limits.
    pub quota: Quota,
    /// Copies evicted for a quota, soft or hard, since start.
    pub evicted: u64,
}

/// What one owner of blocks holds.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OwnerUse {
    /// The tenant, or the shared namespace.
    pub owner: TenantId,
    /// Device, host, nvme.
    pub tiers: Vec<QuotaUse>,
    /// Limits of each of its conversations.
    pub conversation: TierQuotas,
    /// Conversations that hold blocks, where they have limits.
    pub conversations: u64,
    /// Blocks refused since start because a quota is full.
    pub refused: u64,
}

/// What one conversation holds.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ConversationUse {
    /// Device, host, nvme.
    pub tiers: Vec<QuotaUse>,
    /// Blocks dropped or not stored for its quota since start.
    pub dropped: u64,
}
