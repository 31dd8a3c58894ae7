//! Names a fetched file and recognizes it later: the file is on disk before it gets its name, and its checksum is in a
//! hidden file beside it. Sends no request to a hub.

use crate::catalogue::entries::CATALOGUE;
use crate::catalogue::files::files_of;
use crate::catalogue::hub::{hex, sha256_of};
use crate::error::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Gives a whole file its name. A power cut leaves either a `part` or a whole file, never a named file of zeros.
pub fn finalize_part(part: &Path, path: &Path, sha256: &[u8]) -> Result<()> {
    File::open(part).and_then(|file| file.sync_all()).map_err(Error::io(part))?;
    let record = record_of(path);
    let line = format!("{}\n", hex(sha256));
    let written = File::create(&record).and_then(|mut file| {
        file.write_all(line.as_bytes())?;
        file.sync_all()
    });
    written.map_err(write_failed(&record, line.len() as u64))?;
    std::fs::rename(part, path).map_err(Error::io(path))?;
    sync_folder_of(path)
}

/// Removes a file, if there is one, and the record of its checksum.
pub fn remove_with_record(path: &Path) -> Result<()> {
    for path in [path.to_owned(), record_of(path)] {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::Io { path, source: error });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Writes the names in a file's or folder's parent to the disk.
pub fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::io(folder))
}

/// Returns the path of the record with a file's checksum.
fn record_of(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".sha256");
    path.with_file_name(name)
}

/// Returns the checksum that a file had when it was fetched, or has by the catalogue.
fn recorded_checksum(path: &Path) -> Option<String> {
    if let Ok(recorded) = std::fs::read_to_string(record_of(path)) {
        return Some(recorded.trim().to_owned());
    }
    let of_catalogue = |bytes: u64| {
        let is_it = |file: &str, n_bytes: u64| path.ends_with(file) && n_bytes == bytes;
        CATALOGUE.iter().find(|entry| is_it(entry.file, entry.bytes)).map(|entry| entry.sha256.to_owned())
    };
    std::fs::metadata(path).ok().and_then(|file| of_catalogue(file.len()))
}

/// Reads a model's files whole and compares them with their recorded checksums. Returns how many were compared: files
/// from other programs have no record.
pub fn verify_recorded(model: &Path) -> Result<usize> {
    let mut n_compared = 0;
    for path in files_of(model).into_iter().filter(|path| path.is_file()) {
        let Some(expected) = recorded_checksum(&path) else { continue };
        let found = sha256_of(std::slice::from_ref(&path))?;
        if found != expected {
            return Err(Error::Damaged { path, found, expected });
        }
        n_compared += 1;
    }
    Ok(n_compared)
}

/// Returns the free bytes for this user at the path.
pub fn free_bytes(path: &Path) -> std::io::Result<u64> {
    let of = rustix::fs::statvfs(path)?;
    Ok(of.f_bavail.saturating_mul(of.f_frsize))
}

/// Refuses a fetch that does not fit on the disk before it begins.
pub fn check_free_space(folder: &Path, needed: u64) -> Result<()> {
    let free = free_bytes(folder).map_err(Error::io(folder))?;
    match needed <= free {
        true => Ok(()),
        false => Err(Error::NoRoom { path: folder.to_owned(), needed, free }),
    }
}

/// Returns a write's error; for a full disk, with the number of missing bytes.
pub fn write_failed(path: &Path, missing: u64) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |source| match source.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            let free = path.parent().and_then(|folder| free_bytes(folder).ok()).unwrap_or(0);
            Error::NoRoom { path: path.to_owned(), needed: missing, free }
        }
        _ => Error::Io { path: path.to_owned(), source },
    }
}
