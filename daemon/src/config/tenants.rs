//! Which user is which tenant, and who may see all of them.

use kvtide_tiers::catalog::{CodecChoice, OwnerQuotas, TenantId};

/// Name of the only tenant where the configuration has none.
pub const DEFAULT_TENANT: &str = "default";

/// One tenant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tenant {
    /// Its number, its place in the list.
    pub id: TenantId,
    /// Its name.
    pub name: String,
    /// Users that belong to it.
    pub uids: Vec<u32>,
    /// Primary groups whose users belong to it, unless they are named by uid elsewhere.
    pub gids: Vec<u32>,
    /// How its blocks are written to nvme.
    pub codec: CodecChoice,
    /// What it, and each of its conversations, may hold. Default: no limits.
    pub quotas: OwnerQuotas,
}

/// A namespace name under which several tenants share blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedSpace {
    /// The number that its blocks are charged to, behind those of the tenants.
    pub id: TenantId,
    /// Its name.
    pub name: String,
    /// Names of the tenants that may open it.
    pub tenants: Vec<String>,
    /// What it, and each conversation in it, may hold. Default: no limits.
    pub quotas: OwnerQuotas,
}

impl SharedSpace {
    /// The name under which its secret and namespaces are kept. No tenant can have it, because
    /// tenants' names have no slash.
    pub fn owner(&self) -> String {
        format!("shared/{}", self.name)
    }
}

/// Who is behind a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    /// The tenant; `None` for an operator who belongs to none.
    pub tenant: Option<Tenant>,
    /// Whether the caller may see all tenants.
    pub operator: bool,
    /// The user.
    pub uid: u32,
}

/// All tenants, shared spaces and operators.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tenants {
    /// The tenants.
    pub list: Vec<Tenant>,
    /// The shared spaces.
    pub shared: Vec<SharedSpace>,
    /// Users beside root and the daemon's own that may see all tenants.
    pub admins: Vec<u32>,
    /// The user of the daemon.
    pub own_uid: u32,
    /// Whether the configuration names tenants.
    pub configured: bool,
}

impl Tenants {
    /// Who a user is; `None` for a user that may not connect.
    pub fn caller(&self, uid: u32, gid: u32) -> Option<Caller> {
        let by_uid = self.list.iter().find(|tenant| tenant.uids.contains(&uid));
        let by_gid = || self.list.iter().find(|tenant| tenant.gids.contains(&gid));
        let tenant = by_uid.or_else(by_gid).cloned();
        let operator = uid == 0 || uid == self.own_uid || self.admins.contains(&uid);
        (tenant.is_some() || operator).then_some(Caller { tenant, operator, uid })
    }

    /// What to tell a user that is refused.
    pub fn refusal(&self, uid: u32) -> String {
        format!(
            "user {uid} belongs to no tenant; add {uid} to `uids` of a [[tenant]] in the daemon's \
             configuration (or to `admin.uids` for an operator) and restart it"
        )
    }

    /// The owner of blocks with a tenant's number.
    pub fn owner_name(&self, id: TenantId) -> Option<String> {
        let tenant = self.list.iter().find(|tenant| tenant.id == id);
        let shared = || self.shared.iter().find(|space| space.id == id);
        tenant.map(|tenant| tenant.name.clone()).or_else(|| shared().map(SharedSpace::owner))
    }

    /// The quotas of tenants and shared spaces, by number.
    pub fn quotas(&self) -> Vec<(TenantId, OwnerQuotas)> {
        let tenants = self.list.iter().map(|tenant| (tenant.id, tenant.quotas));
        tenants.chain(self.shared.iter().map(|space| (space.id, space.quotas))).collect()
    }

    /// The number and codec for blocks that the folder's table has under `owner`.
    pub fn owner(&self, owner: &str) -> Option<(TenantId, CodecChoice)> {
        if let Some(tenant) = self.list.iter().find(|tenant| tenant.name == owner) {
            return Some((tenant.id, tenant.codec));
        }
        let space = self.shared.iter().find(|space| space.owner() == owner)?;
        Some((space.id, self.shared_codec(space)))
    }

    /// A shared space's codec is that of the first of its tenants.
    fn shared_codec(&self, space: &SharedSpace) -> CodecChoice {
        let first = space.tenants.first();
        let tenant = self.list.iter().find(|tenant| Some(&tenant.name) == first);
        tenant.map(|tenant| tenant.codec).unwrap_or_default()
    }

    /// The shared spaces that a tenant may open.
    pub fn shared_of<'a>(&'a self, tenant: &'a str) -> impl Iterator<Item = &'a SharedSpace> {
        self.shared.iter().filter(move |space| space.tenants.iter().any(|name| name == tenant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_go_before_gids_and_operators_need_no_tenant() {
        let tenant = |id, name: &str, uids: &[u32], gids: &[u32]| Tenant {
            id: TenantId(id),
            name: name.into(),
            uids: uids.into(),
            gids: gids.into(),
            codec: CodecChoice::Raw,
            quotas: OwnerQuotas::default(),
        };
        let tenants = Tenants {
            list: vec![tenant(0, "a", &[], &[100]), tenant(1, "b", &[7], &[])],
            admins: vec![50],
            own_uid: 40,
            ..Tenants::default()
        };
        let name = |uid, gid| {
            tenants.caller(uid, gid).map(|caller| caller.tenant.map(|tenant| tenant.name))
        };
        assert_eq!(name(7, 100), Some(Some("b".into())));
        assert_eq!(name(8, 100), Some(Some("a".into())));
        assert_eq!(name(8, 8), None);
        for operator in [0, 40, 50] {
            assert_eq!(name(operator, 1), Some(None));
            assert!(tenants.caller(operator, 1).expect("may connect").operator);
        }
        assert!(tenants.refusal(8).contains("user 8 ") && tenants.refusal(8).contains("uids"));
    }
}
