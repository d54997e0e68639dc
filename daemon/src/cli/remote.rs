//! The running daemon, as the inspector sees it: calls of the client library whose errors name the
//! socket and carry an exit code.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvtide_client::{
    BlockKey, ClientConfig, Drained, ForgetWhat, Inspect, InspectRow, NamespaceId, NamespaceRow,
    PinId, Pinned, StatsReply, StatusReport, blocking, default_socket,
};

use super::args::{Global, KeyPrefix};
use super::error::CliError;

/// Where the daemon of the service manager listens.
const SYSTEM_SOCKET: &str = "/run/kvtide/kvtide.sock";

/// A connection to the daemon.
pub(crate) struct Remote {
    socket: PathBuf,
    client: blocking::Client,
}

impl Remote {
    /// Connects to the daemon that the options name, or to the user's own, or to the system's.
    pub(crate) fn connect(global: &Global) -> Result<Remote, CliError> {
        let socket = global.socket.clone().unwrap_or_else(|| {
            let own = default_socket();
            let system = Path::new(SYSTEM_SOCKET);
            let named = std::env::var_os("KVTIDE_SOCKET").is_some();
            if !named && !own.exists() && system.exists() { system.to_path_buf() } else { own }
        });
        let config = ClientConfig {
            name: "kvtide".to_owned(),
            call_timeout: global.timeout,
            connect_timeout: global.timeout,
            ..ClientConfig::new(&socket)
        };
        match blocking::Client::connect(config) {
            Ok(client) => Ok(Remote { socket, client }),
            Err(error) => Err(CliError::client(&socket, error)),
        }
    }

    pub(crate) fn status(&self) -> Result<StatusReport, CliError> {
        self.client.status().map_err(|error| CliError::client(&self.socket, error))
    }

    pub(crate) fn stats(&self) -> Result<StatsReply, CliError> {
        self.client.stats().map_err(|error| CliError::client(&self.socket, error))
    }

    pub(crate) fn namespaces(&self) -> Result<Vec<NamespaceRow>, CliError> {
        self.client.namespaces().map_err(|error| CliError::client(&self.socket, error))
    }

    pub(crate) fn forget(&self, what: &ForgetWhat) -> Result<u64, CliError> {
        self.client.forget(what).map_err(|error| CliError::client(&self.socket, error))
    }

    pub(crate) fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
        time: Duration,
    ) -> Result<Pinned, CliError> {
        self.client
            .pin(namespace, keys, time)
            .map_err(|error| CliError::client(&self.socket, error))
    }

    pub(crate) fn unpin(&self, pin: PinId) -> Result<u64, CliError> {
        self.client.unpin(pin).map_err(|error| CliError::client(&self.socket, error))
    }

    pub(crate) fn drain(&self, deadline: Duration) -> Result<Drained, CliError> {
        self.client.drain(deadline).map_err(|error| CliError::client(&self.socket, error))
    }

    /// All rows of a query, page by page, at most `rows_max`.
    pub(crate) fn inspect_all(
        &self,
        mut query: Inspect,
        rows_max: usize,
    ) -> Result<Vec<InspectRow>, CliError> {
        let mut rows = Vec::new();
        loop {
            let page = self
                .client
                .inspect(&query)
                .map_err(|error| CliError::client(&self.socket, error))?;
            rows.extend(page.rows);
            match page.cursor {
                // A cursor that does not move would never end.
                Some(cursor) if cursor > query.cursor && rows.len() < rows_max => {
                    query.cursor = cursor;
                }
                _ => break,
            }
        }
        rows.truncate(rows_max);
        Ok(rows)
    }

    /// The one block whose key starts with `key`.
    pub(crate) fn block(&self, key: &KeyPrefix) -> Result<InspectRow, CliError> {
        const SHOWN: usize = 10;
        let query = Inspect { key_prefix: key.bytes(), ..Inspect::default() };
        let mut rows = self.inspect_all(query, 4096)?;
        rows.retain(|row| key.fits(&row.key.to_string()));
        match rows.len() {
            0 => Err(CliError::Failed(format!(
                "no block whose key starts with `{}` that you may see; \
                 `kvtide ls --blocks` lists keys",
                key.as_str()
            ))),
            1 => rows.pop().ok_or(CliError::Found),
            many => {
                let keys: BTreeSet<String> =
                    rows.iter().take(SHOWN).map(|row| row.key.to_string()).collect();
                let keys: Vec<String> = keys.into_iter().collect();
                let more = if many > SHOWN { "\n  .." } else { "" };
                Err(CliError::Failed(format!(
                    "`{}` is the beginning of {many} keys; give more digits:\n  {}{more}",
                    key.as_str(),
                    keys.join("\n  ")
                )))
            }
        }
    }

    /// The keys from the root to `last`, root first.
    pub(crate) fn chain(&self, last: &InspectRow) -> Result<Vec<BlockKey>, CliError> {
        let mut keys = vec![last.key];
        let mut parent = last.parent;
        while parent != BlockKey::ROOT {
            let query = Inspect {
                namespaces: Some(vec![last.namespace]),
                key_prefix: parent.0.to_vec(),
                limit: 1,
                ..Inspect::default()
            };
            let Some(row) = self.inspect_all(query, 1)?.pop() else {
                return Err(CliError::Failed(format!(
                    "block {} of the chain is not in the cache any more, so what follows it \
                     cannot be reached or kept",
                    (last.position as usize).saturating_sub(keys.len())
                )));
            };
            keys.push(row.key);
            parent = row.parent;
            if keys.len() > last.position as usize + 1 {
                return Err(CliError::failed("the chain of parents does not end; report this"));
            }
        }
        keys.reverse();
        Ok(keys)
    }
}
