//! The lock of a fetched model's folder: ranks of one machine share it to read, and one alone has it to write.

use super::error::FetchError;
use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

/// Given back when it is dropped.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// None while somebody writes.
    pub fn shared(folder: &Path) -> Result<Option<Lock>, FetchError> {
        Lock::attempt(folder, File::try_lock_shared)
    }

    /// None while anybody else reads or writes.
    pub fn exclusive(folder: &Path) -> Result<Option<Lock>, FetchError> {
        Lock::attempt(folder, File::try_lock)
    }

    /// Opens the file anew each time: what becomes of the first lock when a file asks for a second depends on the
    /// platform.
    fn attempt(folder: &Path, lock: impl Fn(&File) -> Result<(), TryLockError>) -> Result<Option<Lock>, FetchError> {
        let path = folder.join("lock");
        let file = match OpenOptions::new().create(true).truncate(false).write(true).open(&path) {
            Ok(file) => file,
            Err(source) => return Err(FetchError::Io { path, source }),
        };
        match lock(&file) {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(source)) => Err(FetchError::Io { path, source }),
        }
    }
}
