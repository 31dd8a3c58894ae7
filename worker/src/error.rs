//! Why a worker gives up.

use crate::assignment::LoadError;
use std::io;
use std::time::Duration;

/// Errors that another attempt to join would only repeat.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the model cannot be served here")]
    Load(#[source] LoadError),
    #[error("the coordinator refused this worker: {0}")]
    Refused(String),
    #[error("a thread cannot be started")]
    Thread(#[from] io::Error),
    #[error("the computing thread is gone")]
    ThreadGone,
    #[error("the computing thread hangs: it has been busy for {} s", .0.as_secs())]
    Hung(Duration),
}
