//! What can be wrong with a model on disk or while it is fetched.

use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} cannot be used", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The file differs from when it was opened: cut short, written to or replaced while it was read.
    #[error("{} has changed while it was read: {what}", path.display())]
    Changed { path: PathBuf, what: String },
    /// The bytes contradict their own format, or each other.
    #[error("{}: {what}", path.display())]
    Malformed { path: PathBuf, what: String },
    /// Sound, but not supported here.
    #[error("{}: {what} is not supported", path.display())]
    Unsupported { path: PathBuf, what: String },
    #[error("{}: there is no tensor {name}", path.display())]
    NoTensor { path: PathBuf, name: String },
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    #[error("the chat template failed: {0}")]
    Template(String),
    #[error("there is no model {model}: {why}")]
    NotFound { model: String, why: String },
    #[error("{what} could not be fetched: {why}")]
    Fetch { what: String, why: String },
    /// A file is not what it was when it was fetched.
    #[error(
        "{} is damaged: its sha256 is {found}, and was {expected} when it was fetched; delete the file, and \
        `lockstep pull` fetches it again", path.display()
    )]
    Damaged { path: PathBuf, found: String, expected: String },
    #[error("there is not enough space at {}: {needed} bytes are needed, {free} are free", path.display())]
    NoRoom { path: PathBuf, needed: u64, free: u64 },
    #[error("{what} has the sha256 {found}, but {expected} was expected")]
    Checksum { what: String, found: String, expected: String },
}

impl Error {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        |source| Error::Io { path: path.to_owned(), source }
    }

    pub(crate) fn with_path(path: &Path) -> impl FnOnce(ParseError) -> Error + '_ {
        |fault| match fault {
            ParseError::Malformed(what) => Error::Malformed { path: path.to_owned(), what },
            ParseError::Unsupported(what) => Error::Unsupported { path: path.to_owned(), what },
        }
    }
}

/// A parser's error, before the file's name is added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParseError {
    Malformed(String),
    Unsupported(String),
}

impl ParseError {
    pub(crate) fn malformed<T>(what: impl Into<String>) -> std::result::Result<T, ParseError> {
        Err(ParseError::Malformed(what.into()))
    }

    pub(crate) fn unsupported<T>(what: impl Into<String>) -> std::result::Result<T, ParseError> {
        Err(ParseError::Unsupported(what.into()))
    }
}
