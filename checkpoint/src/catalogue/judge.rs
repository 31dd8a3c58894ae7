//! Checks a GGUF during its download by its header, which comes first: an unsupported model is refused before its
//! weights arrive. Knows no hub.

use crate::catalogue::hub::HubFile;
use crate::catalogue::model::CheckStart;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The first look, in bytes. Most vocabularies take a few megabytes.
const FIRST_LOOK: u64 = 64 << 10;
/// Each further look comes at this many times the bytes of the one before.
const GROWTH: u64 = 4;

pub struct GgufHeaderChecker {
    url: String,
    n_bytes: Option<u64>,
    check_start: CheckStart,
    /// The bytes at which it looks next; None once the check is done.
    next_look: Option<u64>,
}

impl GgufHeaderChecker {
    /// The first `n_kept` bytes were already checked when that part was begun. The checksum shows whether they were
    /// damaged since.
    pub fn of(file: &HubFile, n_kept: u64, check_start: CheckStart) -> GgufHeaderChecker {
        let is_due = file.is_judged && n_kept == 0 && file.name.ends_with(".gguf");
        let next_look = is_due.then_some(FIRST_LOOK);
        GgufHeaderChecker { url: file.url.clone(), n_bytes: file.bytes, check_start, next_look }
    }

    /// Looks at the first bytes of the file, which `part` holds.
    pub fn check_part(&mut self, part: &Path, n_done: u64) -> Result<()> {
        let is_whole = self.n_bytes == Some(n_done);
        let Some(_due) = self.next_look.filter(|next| n_done >= *next || is_whole) else { return Ok(()) };
        // Without an announced length every tensor may still arrive.
        let n_bytes = self.n_bytes.unwrap_or(u64::MAX);
        let is_judged = (self.check_start)(part, n_bytes).map_err(|error| self.with_url(error))?;
        self.next_look = (!is_judged).then_some(n_done.saturating_mul(GROWTH));
        Ok(())
    }

    /// Returns the error with the file's address in place of the part's path.
    fn with_url(&self, error: Error) -> Error {
        let path = PathBuf::from(&self.url);
        match error {
            Error::Malformed { what, .. } => Error::Malformed { path, what },
            Error::Unsupported { what, .. } => Error::Unsupported { path, what },
            Error::NoTensor { name, .. } => Error::NoTensor { path, name },
            other => other,
        }
    }
}
