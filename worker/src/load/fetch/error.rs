//! Reasons why a fetch fails. Has no knowledge of streams or files.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Limit for the next message of a read.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Why the model could not be fetched to this machine.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("the coordinator does not give the model: {0}")]
    Refused(String),
    #[error("nothing came for {} s", SILENCE_MAX.as_secs())]
    Silence,
    #[error("what the coordinator says of the model cannot be meant: {0}")]
    Manifest(String),
    #[error("bytes {start} of {file} came damaged")]
    Damaged { file: String, start: u64 },
    #[error("{path} cannot be written", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("there is no room at {}: {needed} bytes are needed, {free} are free", path.display())]
    NoRoom { path: PathBuf, needed: u64, free: u64 },
    #[error("another worker of this machine has been fetching this model for too long")]
    Locked,
    #[error("what was fetched is another model: its digest differs")]
    OtherModel,
    #[error("what was fetched cannot be opened")]
    Unreadable(#[from] checkpoint::Error),
    #[error("the fetch was broken off")]
    BrokenOff,
}
