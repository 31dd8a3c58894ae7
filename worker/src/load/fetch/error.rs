//! Reasons why a fetch fails. Has no knowledge of streams or files.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Limit for the next message of a read.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Why the model could not be fetched to this machine.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("the coordinator does not send the model: {0}")]
    Refused(String),
    #[error("the coordinator sent nothing for {} s", SILENCE_MAX.as_secs())]
    Silence,
    #[error("the coordinator's manifest of the model is invalid: {0}")]
    Manifest(String),
    #[error("{file} arrived damaged at byte {start}")]
    Damaged { file: String, start: u64 },
    #[error("{path} cannot be written", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("the disk of {} has {free} bytes free, but {needed} bytes are needed", path.display())]
    NoRoom { path: PathBuf, needed: u64, free: u64 },
    #[error("another worker of this machine has been fetching this model for too long")]
    Locked,
    #[error("the fetched files are another model: their digest differs")]
    OtherModel,
    #[error("the fetched model cannot be opened")]
    Unreadable(#[from] checkpoint::Error),
    #[error("the fetch was cancelled")]
    BrokenOff,
}
