//! Blocks that must not come back at a restart: their descriptors are erased on the device, and
//! where that cannot be done, their whole namespace gets a new generation, which voids them.

use std::collections::{HashMap, HashSet};

use super::Catalog;
use super::event::{Action, OpError};
use crate::block::NamespaceId;

/// What is being erased.
#[derive(Default)]
pub(crate) struct Erasures {
    /// By segment, sequence and index of the descriptor. As many as jobs of the device.
    under_way: HashMap<(u32, u64, u32), NamespaceId>,
    /// Namespaces whose blocks on the device are void since the tier is off.
    retired: HashSet<NamespaceId>,
}

impl Catalog {
    /// Voids one descriptor on the device.
    pub(super) fn erase(
        &mut self,
        namespace: NamespaceId,
        segment: u32,
        sequence: u64,
        index: u32,
    ) {
        self.erasures.under_way.insert((segment, sequence, index), namespace);
        self.actions.push(Action::EraseDescriptor { segment, sequence, index });
    }

    pub(super) fn erased(
        &mut self,
        segment: u32,
        sequence: u64,
        index: u32,
        result: Result<(), OpError>,
    ) {
        let namespace = self.erasures.under_way.remove(&(segment, sequence, index));
        if let (Some(namespace), Err(_)) = (namespace, result) {
            self.actions.push(Action::RetireNamespace { namespace });
        }
    }

    /// Blocks of the namespace are being forgotten, or are bad. While the tier is off nobody knows
    /// which of them lie on the device, and none can be erased there. Once is enough: nothing is
    /// written until the next start.
    pub(super) fn retire_unreachable(&mut self, namespace: NamespaceId) {
        let unreachable = self.nvme.is_some() && !self.nvme_usable();
        if unreachable && self.erasures.retired.insert(namespace) {
            self.actions.push(Action::RetireNamespace { namespace });
        }
    }

    pub(super) fn namespace_retired(&mut self, namespace: NamespaceId, generation: Option<u32>) {
        match (generation, self.namespaces.get_mut(&namespace)) {
            (Some(generation), Some(info)) => info.generation = info.generation.max(generation),
            (Some(_), None) => {}
            // It is tried again with the next block that is to be forgotten.
            (None, _) => drop(self.erasures.retired.remove(&namespace)),
        }
    }
}
