//! Why a wish is not granted: each refusal says where and what.

use thiserror::Error;

/// A wish that cannot be kept exactly, and so is not taken. `at` is the path in what the client sent (`/properties/a`), or
/// a line and a column of its text.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    #[error("{at}: {what} is not supported")]
    Unsupported { at: String, what: String },
    #[error("{at}: {why}")]
    Invalid { at: String, why: String },
    #[error("{at}: no text can satisfy it: {why}")]
    Unsatisfiable { at: String, why: String },
    #[error("{what} is more than the limit of {limit}")]
    TooLarge { what: String, limit: u64 },
}

impl Refused {
    pub(crate) fn unsupported(at: impl Into<String>, what: impl Into<String>) -> Refused {
        Refused::Unsupported { at: root(at.into()), what: what.into() }
    }

    pub(crate) fn invalid(at: impl Into<String>, why: impl Into<String>) -> Refused {
        Refused::Invalid { at: root(at.into()), why: why.into() }
    }

    pub(crate) fn unsatisfiable(at: impl Into<String>, why: impl Into<String>) -> Refused {
        Refused::Unsatisfiable { at: root(at.into()), why: why.into() }
    }

    pub(crate) fn too_large(what: impl Into<String>, limit: usize) -> Refused {
        Refused::TooLarge { what: what.into(), limit: limit as u64 }
    }
}

/// The empty path is hard to see in a message.
fn root(at: String) -> String {
    if at.is_empty() { "/".to_owned() } else { at }
}
