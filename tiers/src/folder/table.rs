//! What the folder's two tables hold, and what must be true of them.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::{NAMESPACES_MAX, TENANT_BYTES_MAX, TENANTS_MAX};
use crate::block::{Namespace, NamespaceId, SECRET_BYTES, TenantSecret};

/// One namespace of the store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamespaceEntry {
    /// Its number. Never used for another namespace.
    pub id: NamespaceId,
    /// Its generation: blocks of an older one are dead.
    pub generation: u32,
    /// The tenant that it belongs to.
    pub tenant: String,
    /// The namespace.
    pub namespace: Namespace,
    /// Public name of its key ([`NamespaceKey::fingerprint`](crate::block::NamespaceKey)).
    pub fingerprint: [u8; 16],
}

/// The namespace table. Entries are in order of their numbers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Table {
    /// The number of the next namespace.
    pub(super) next_id: u32,
    /// The generation of new namespaces. Random per table, so that blocks numbered by a table that
    /// was lost are dead in the next one.
    pub(super) first_generation: u32,
    pub(super) entries: Vec<NamespaceEntry>,
}

impl Table {
    pub(super) fn check(&self) -> Result<(), String> {
        if self.entries.len() > NAMESPACES_MAX {
            return Err(format!("more than {NAMESPACES_MAX} namespaces"));
        }
        let mut ids = HashSet::new();
        for entry in &self.entries {
            if entry.id.0 >= self.next_id || !ids.insert(entry.id) {
                return Err(format!("namespace number {} is used twice", entry.id.0));
            }
            tenant_name_is_valid(&entry.tenant)
                .then_some(())
                .ok_or_else(|| format!("namespace {}: the tenant's name", entry.id.0))?;
            entry
                .namespace
                .check()
                .map_err(|error| format!("namespace {}: {error}", entry.id.0))?;
        }
        Ok(())
    }

    pub(super) fn index(&self) -> HashMap<(String, Namespace), usize> {
        let keys = self.entries.iter().map(|entry| (entry.tenant.clone(), entry.namespace.clone()));
        keys.zip(0..).collect()
    }
}

/// The tenants' secrets, in hexadecimal.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Secrets(pub(super) BTreeMap<String, String>);

impl Secrets {
    pub(super) fn get(&self, tenant: &str) -> Option<TenantSecret> {
        self.0.get(tenant).and_then(|text| secret_from_hex(text))
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if self.0.len() > TENANTS_MAX {
            return Err(format!("more than {TENANTS_MAX} tenants"));
        }
        for (tenant, text) in &self.0 {
            if !tenant_name_is_valid(tenant) || secret_from_hex(text).is_none() {
                return Err(format!("the entry of tenant {tenant:?}"));
            }
        }
        Ok(())
    }
}

pub(super) fn tenant_name_is_valid(name: &str) -> bool {
    (1..=TENANT_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control)
}

pub(super) fn secret_to_hex(secret: &TenantSecret) -> String {
    secret.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn secret_from_hex(text: &str) -> Option<TenantSecret> {
    if text.len() != 2 * SECRET_BYTES || !text.is_ascii() {
        return None;
    }
    let mut secret = [0; SECRET_BYTES];
    for (at, byte) in secret.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(TenantSecret(secret))
}
