//! The RAM tier outlives the daemon: the service manager keeps its memory (systemd's file
//! descriptor store, see `sd_pid_notify_with_fds(3)`) while one daemon ends and the next one
//! starts. What is found in it is checked by the node.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvtide_tiers::io::ArenaFiles;
use kvtide_tiers::movement::{Node, NodeReport};
use rustix::fs::{Mode, OFlags};
use sd_notify::NotifyState;

/// The names under which the service manager knows the arena's memory and its table.
const NAMES: [&str; 2] = ["kvtide-arena", "kvtide-table"];

/// What the service manager kept of the daemon before.
#[derive(Default)]
pub(crate) struct Taken {
    /// Both files, if both are there.
    pub(crate) files: Option<Arc<ArenaFiles>>,
    /// Whether it keeps anything under these names.
    any: bool,
}

/// Takes what the service manager kept.
pub(crate) fn take() -> Taken {
    let passed: Vec<_> = match sd_notify::listen_fds_with_names() {
        Ok(passed) => passed.collect(),
        Err(error) => {
            tracing::warn!(%error, "cannot read what the service manager passes (LISTEN_FDS)");
            return Taken::default();
        }
    };
    let any = passed.iter().any(|(_, found)| NAMES.contains(&&**found));
    let [memory, table] = NAMES.map(|name| {
        let (fd, _) = passed.iter().find(|(_, found)| found == name)?;
        open(*fd)
    });
    let files = memory.zip(table).map(|(memory, table)| Arc::new(ArenaFiles { memory, table }));
    Taken { files, any }
}

/// Another descriptor of a file that was passed, which this process owns.
fn open(fd: i32) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{fd}");
    let opened = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    opened.inspect_err(|error| tracing::warn!(path, %error, "cannot open what was passed")).ok()
}

/// Gives the arena's memory to the service manager, unless it has it already.
pub(crate) fn keep(node: &Node, taken: &Taken) {
    let handle = node.handle();
    let adopted = taken.files.is_some() && handle.report().kept.refused.is_none();
    if adopted || std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    if taken.any {
        for name in NAMES {
            let old = [NotifyState::FdStoreRemove, NotifyState::FdName(name)];
            if let Err(error) = sd_notify::notify(&old) {
                tracing::warn!(%error, "the service manager cannot be told to let old memory go");
            }
        }
    }
    let Some((memory, table)) = handle.arena_files() else { return };
    for (name, fd) in NAMES.into_iter().zip([memory, table]) {
        let new = [NotifyState::FdStore, NotifyState::FdName(name)];
        if let Err(error) = sd_notify::notify_with_fds(&new, &[fd]) {
            tracing::warn!(%error, "the service manager does not take the RAM tier's memory");
        }
    }
}

/// Whether the RAM tier outlives the daemon, in words.
pub(crate) fn words(report: &NodeReport) -> String {
    if !report.can_be_kept {
        return "lost at a restart: it is private memory; reserve huge pages (vm.nr_hugepages), or \
                set `host.keep` to \"always\""
            .to_owned();
    }
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(_) => "kept for the next daemon by the service manager".to_owned(),
        None => "lost at a restart: no service manager to keep it".to_owned(),
    }
}

/// What was taken over, in a sentence; `None` when there was nothing.
pub(crate) fn note(report: &NodeReport) -> Option<String> {
    let kept = &report.kept;
    if let Some(why) = &kept.refused {
        return Some(format!("host tier: the memory of the daemon before is not used: {why}"));
    }
    let (blocks, dropped) = (kept.blocks, kept.dropped);
    let bytes = crate::config::show_bytes(kept.bytes);
    (blocks + dropped > 0).then(|| {
        format!("host tier: {blocks} blocks ({bytes}) taken over, {dropped} slots dropped")
    })
}
