//! Messages about quotas.

use kvtide_tiers::block::NamespaceId;
use kvtide_tiers::catalog::{KeepRule, OwnerUse};
use serde::{Deserialize, Serialize};

/// Which blocks a conversation loses first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WireKeep {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The client's number for its conversation.
    pub conversation: u64,
    /// The rule.
    pub rule: KeepRule,
}

/// What a tenant or a shared namespace holds, and may hold.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OwnerRow {
    /// The tenant, or `shared/NAME`.
    pub owner: String,
    /// Of each tier.
    pub held: OwnerUse,
}
