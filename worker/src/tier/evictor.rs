//! Keeps a folder of pages below its limit. The limit is the folder's, whatever number of processes write to it; the
//! process that holds the lock removes files.

use crate::tier::folder::{entries, pages_folder, unused_for};
use rustix::fs::{FlockOperation, flock};
use std::cmp::Reverse;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A file that is being written is younger than this. An older one was left by a process that ended.
const PART_AGE_MAX: Duration = Duration::from_secs(300);
/// After an eviction the folder has this part of its limit: 15 of 16.
const KEPT: (u64, u64) = (15, 16);

/// A page's file.
struct StoredPage {
    /// Whether no rank of this process can read it.
    is_foreign: bool,
    unused_for: Duration,
    n_bytes: u64,
    path: PathBuf,
}

/// Removes what is too much: remains of writes first, then pages of other policies, then those that were used longest
/// ago. Does nothing while another process does it. Returns the bytes that are left.
pub fn evict(folder: &Path, policy: &str, bytes_max: u64) -> io::Result<Option<u64>> {
    let lock = File::options().create(true).append(true).open(folder.join("evictor.lock"))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(None);
    }
    let mut files = page_files(folder, policy);
    let mut n_bytes: u64 = files.iter().map(|file| file.n_bytes).sum();
    if n_bytes <= bytes_max {
        return Ok(Some(n_bytes));
    }
    files.sort_by_key(|file| (!file.is_foreign, Reverse(file.unused_for)));
    let target = bytes_max / KEPT.1 * KEPT.0;
    for file in files {
        if n_bytes <= target {
            break;
        }
        if fs::remove_file(&file.path).is_ok() {
            n_bytes -= file.n_bytes;
        }
    }
    Ok(Some(n_bytes))
}

/// Returns the files of all pages, and removes the remains of writes.
fn page_files(folder: &Path, policy: &str) -> Vec<StoredPage> {
    let mut files = Vec::new();
    for of_policy in entries(&pages_folder(folder)) {
        let is_foreign = of_policy.file_name().is_none_or(|name| name != policy);
        let paths = entries(&of_policy).flat_map(|part| entries(&part)).flat_map(|of_byte| entries(&of_byte));
        for path in paths {
            let Ok(metadata) = path.metadata() else { continue };
            let unused_for = unused_for(&metadata);
            let is_part = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".part."));
            if is_part && unused_for > PART_AGE_MAX {
                let _ = fs::remove_file(&path);
                continue;
            }
            files.push(StoredPage { is_foreign, unused_for, n_bytes: metadata.len(), path });
        }
    }
    files
}
