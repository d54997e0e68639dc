//! A folder for the run's own daemon, on a disk.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// A folder that is removed when dropped, unless it was named by the user.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    ours: bool,
    kind: String,
}

impl Scratch {
    /// Takes `wanted`, else makes a folder under `TMPDIR` or the current folder's `target`. A
    /// folder in memory would measure memory: one that the user did not name is refused.
    ///
    /// # Errors
    /// The folder cannot be made, or only memory is offered.
    pub fn make(wanted: Option<&Path>) -> anyhow::Result<Scratch> {
        let path = match wanted {
            Some(path) => path.to_owned(),
            None => base().join(format!("kvtide-bench-{}", std::process::id())),
        };
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot make the folder {}", path.display()))?;
        let path = path.canonicalize()?;
        let (kind, memory) = crate::process::file_system(&path);
        let scratch = Scratch { path, ours: wanted.is_none(), kind };
        if memory && scratch.ours {
            bail!(
                "{} is on {}, which is memory and no disk; name a folder on a disk with --store",
                scratch.path.display(),
                scratch.kind
            );
        }
        Ok(scratch)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of file system that it is on.
    pub fn kind(&self) -> &str {
        &self.kind
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.ours {
            // What cannot be removed now lies under a name that says whose it was.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

fn base() -> PathBuf {
    if let Some(folder) = std::env::var_os("TMPDIR").filter(|value| !value.is_empty()) {
        return folder.into();
    }
    std::env::current_dir().map_or_else(|_| std::env::temp_dir(), |here| here.join("target"))
}
