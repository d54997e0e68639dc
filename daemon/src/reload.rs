//! SIGHUP: the configuration is read again. The log's level, the drain's deadline and the limits
//! that the service keeps change at once; what else differs needs a restart, and is named.

use std::sync::PoisonError;

use crate::app::App;
use crate::config::{Args, Config, ServiceLimits};
use crate::log::LogLevel;

/// Reads the configuration again and applies what can change.
pub fn reload(app: &App, args: &Args, level: &LogLevel) {
    let new = match Config::load(args) {
        Ok(new) => new,
        Err(error) => {
            for problem in &error.problems {
                tracing::error!("{problem}");
            }
            tracing::error!("the configuration stays as it was");
            return;
        }
    };
    level.set(new.log.level);
    *app.drain.lock().unwrap_or_else(PoisonError::into_inner) = new.drain;
    let (limits, held) = apply_limits(&app.config.limits, &new.limits);
    *app.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
    let mut restart = needs_restart(&app.config, &new);
    restart.extend(held);
    if restart.is_empty() {
        tracing::info!("the configuration was read again");
    } else {
        let restart = restart.join(", ");
        tracing::warn!(restart, "the configuration was read again; these need a restart");
    }
}

/// The limits to keep from now on, and the keys whose change needs a restart. What the catalog was
/// started with is the most it can be; lower values are kept by the service.
fn apply_limits(start: &ServiceLimits, new: &ServiceLimits) -> (ServiceLimits, Vec<String>) {
    let mut now = start.clone();
    let mut held = Vec::new();
    now.calls_in_flight = new.calls_in_flight;
    now.descriptors_waiting = new.descriptors_waiting;
    now.namespaces_per_session = new.namespaces_per_session;
    now.namespaces_per_tenant = new.namespaces_per_tenant;
    now.region_bytes_per_session = new.region_bytes_per_session;
    macro_rules! lower {
        ($($key:ident),*) => {$(
            now.catalog.$key = new.catalog.$key.min(start.catalog.$key);
            if new.catalog.$key > start.catalog.$key {
                held.push(concat!("limits.", stringify!($key)).to_owned());
            }
        )*};
    }
    lower!(sessions, tickets_per_session, keys_per_call, lease_ms_max, pin_ms_max);
    macro_rules! fixed {
        ($($key:ident),*) => {$(
            if new.catalog.$key != start.catalog.$key {
                held.push(concat!("limits.", stringify!($key)).to_owned());
            }
        )*};
    }
    fixed!(
        regions_per_session,
        blocks_in_flight,
        leases_per_session,
        pins,
        pinned_percent,
        ticket_ms,
        bad_keys
    );
    (now, held)
}

fn needs_restart(old: &Config, new: &Config) -> Vec<String> {
    let differs = [
        ("daemon.socket", old.socket != new.socket),
        ("daemon.copy_threads", old.copy_threads != new.copy_threads),
        ("nvme.folder", old.store != new.store),
        ("device", old.device != new.device),
        ("tenant or shared or admin.uids", old.tenants != new.tenants),
        ("arbiter", old.arbiter != new.arbiter),
        ("prefill or tenant.weight", old.prefill != new.prefill),
        ("admin.metrics", old.metrics != new.metrics),
        ("log.format", old.log.format != new.log.format),
    ];
    let names = differs.iter().filter(|(_, differs)| *differs);
    names.map(|(name, _)| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_go_down_at_once_and_up_only_to_what_the_catalog_has() {
        let start = ServiceLimits::default();
        let mut new = start.clone();
        new.calls_in_flight = 9999;
        new.catalog.sessions = 1;
        new.catalog.keys_per_call = start.catalog.keys_per_call + 1;
        new.catalog.pins = 7;
        let (now, held) = apply_limits(&start, &new);
        assert_eq!(now.calls_in_flight, 9999);
        assert_eq!(now.catalog.sessions, 1);
        assert_eq!(now.catalog.keys_per_call, start.catalog.keys_per_call);
        assert_eq!(held, ["limits.keys_per_call", "limits.pins"]);
    }
}
