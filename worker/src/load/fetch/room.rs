//! Whether the disk has room for a fetch. Has no knowledge of chunks.

use crate::load::fetch::error::FetchError;
use checkpoint::catalogue::free_bytes;
use std::io;
use std::path::Path;

/// Rejects a fetch for which the disk has no room, before it begins.
pub(super) fn has_room(folder: &Path, needed: u64) -> Result<(), FetchError> {
    let free = free_bytes(folder).map_err(|source| FetchError::Io { path: folder.to_owned(), source })?;
    match needed <= free {
        true => Ok(()),
        false => Err(FetchError::NoRoom { path: folder.to_owned(), needed, free }),
    }
}

/// Maps a write's error. Other processes write to this disk too, so it may become full; `missing` bytes were still to
/// come.
pub(super) fn write_failed(path: &Path, missing: u64) -> impl FnOnce(io::Error) -> FetchError + '_ {
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            FetchError::NoRoom { path: path.to_owned(), needed: missing, free: free_bytes(path).unwrap_or(0) }
        }
        _ => FetchError::Io { path: path.to_owned(), source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_is_distinct_from_other_errors() {
        let folder = std::env::temp_dir();
        has_room(&folder, 0).unwrap();
        let refused = has_room(&folder, u64::MAX).unwrap_err();
        assert!(matches!(refused, FetchError::NoRoom { needed: u64::MAX, .. }), "{refused}");
        let full = write_failed(&folder, 7)(io::Error::from(io::ErrorKind::StorageFull));
        assert!(full.to_string().contains("7 bytes are needed"), "{full}");
        let other = write_failed(&folder, 7)(io::Error::from(io::ErrorKind::PermissionDenied));
        assert!(matches!(other, FetchError::Io { .. }), "{other}");
    }
}
