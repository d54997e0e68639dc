//! Small JSON files with a version and a checksum, replaced whole: written beside, synced, renamed.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use super::{FOLDER_VERSION, FolderError};

/// Larger files are refused before memory is taken for them.
const FILE_BYTES_MAX: u64 = 512 << 20;

#[derive(Deserialize)]
struct Version {
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Sealed<T> {
    version: u32,
    checksum: String,
    table: T,
}

/// The checksum is over the table as this code writes it without white space, so that a file that
/// was only reformatted still holds.
fn checksum<T: Serialize>(table: &T) -> Result<String, serde_json::Error> {
    Ok(format!("{:032x}", XxHash3_128::oneshot(&serde_json::to_vec(table)?)))
}

/// Reads a file. `None` when there is none.
pub(super) fn read_sealed<T>(path: &Path) -> Result<Option<T>, FolderError>
where
    T: Serialize + DeserializeOwned,
{
    let failed = |action, source| FolderError::Io { path: path.to_owned(), action, source };
    let damaged = |problem: String| FolderError::Damaged { path: path.to_owned(), problem };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("open it", error)),
    };
    let mut bytes = Vec::new();
    let mut limited = file.take(FILE_BYTES_MAX + 1);
    limited.read_to_end(&mut bytes).map_err(|error| failed("read it", error))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(damaged(format!("longer than {FILE_BYTES_MAX} bytes")));
    }
    let version: Version =
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if version.version > FOLDER_VERSION {
        return Err(FolderError::Newer { path: path.to_owned(), version: version.version });
    }
    let sealed: Sealed<T> =
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    let sum = checksum(&sealed.table).map_err(|error| damaged(error.to_string()))?;
    if sum != sealed.checksum || version.version != FOLDER_VERSION {
        return Err(damaged("its checksum does not match its contents".to_owned()));
    }
    Ok(Some(sealed.table))
}

/// Replaces a file, mode 0600, durably: after a crash it is the old one or the new one.
pub(super) fn write_sealed<T: Serialize>(path: &Path, table: &T) -> Result<(), FolderError> {
    let failed = |action, source| FolderError::Io { path: path.to_owned(), action, source };
    let text = checksum(table)
        .and_then(|checksum| {
            serde_json::to_vec_pretty(&Sealed { version: FOLDER_VERSION, checksum, table })
        })
        .map_err(|error| failed("encode it", error.into()))?;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let beside = Path::new(&name);
    let write = || {
        // What a crash left here may have another mode, and the mode counts only at creation.
        match std::fs::remove_file(beside) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(beside)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(beside, path)?;
        path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    };
    write().map_err(|error| {
        let _ = std::fs::remove_file(beside);
        failed("replace it", error)
    })
}
