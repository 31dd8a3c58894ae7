//! The lock of a fetched model's folder: ranks of one machine share it to read, and one holds it alone to write.

use super::error::FetchError;
use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

/// Released on drop.
pub(super) struct FolderLock {
    _file: File,
}

impl FolderLock {
    /// Returns None while another process writes.
    pub fn shared(folder: &Path) -> Result<Option<FolderLock>, FetchError> {
        FolderLock::attempt(folder, File::try_lock_shared)
    }

    /// Returns None while another process reads or writes.
    pub fn exclusive(folder: &Path) -> Result<Option<FolderLock>, FetchError> {
        FolderLock::attempt(folder, File::try_lock)
    }

    /// Opens the file anew each time: if one open file locks twice, the effect on its first lock depends on the
    /// platform.
    fn attempt(
        folder: &Path,
        lock: impl Fn(&File) -> Result<(), TryLockError>,
    ) -> Result<Option<FolderLock>, FetchError> {
        let path = folder.join("lock");
        let file = match OpenOptions::new().create(true).truncate(false).write(true).open(&path) {
            Ok(file) => file,
            Err(source) => return Err(FetchError::Io { path, source }),
        };
        match lock(&file) {
            Ok(()) => Ok(Some(FolderLock { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(source)) => Err(FetchError::Io { path, source }),
        }
    }
}
