//! Why a constraint is refused: each error names the place and the reason.

use thiserror::Error;

/// A constraint that cannot be enforced exactly, and so is refused. `at` is the path in the client's input
/// (`/properties/a`), or a line and a column of its text.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarRefused {
    #[error("{at}: {what} is not supported")]
    Unsupported { at: String, what: String },
    #[error("{at}: {why}")]
    Invalid { at: String, why: String },
    #[error("{at}: no text can satisfy it: {why}")]
    Unsatisfiable { at: String, why: String },
    #[error("{what} is more than the limit of {limit}")]
    TooLarge { what: String, limit: u64 },
}

impl GrammarRefused {
    pub(crate) fn unsupported(at: impl Into<String>, what: impl Into<String>) -> GrammarRefused {
        GrammarRefused::Unsupported { at: slash_if_empty(at.into()), what: what.into() }
    }

    pub(crate) fn invalid(at: impl Into<String>, why: impl Into<String>) -> GrammarRefused {
        GrammarRefused::Invalid { at: slash_if_empty(at.into()), why: why.into() }
    }

    pub(crate) fn unsatisfiable(at: impl Into<String>, why: impl Into<String>) -> GrammarRefused {
        GrammarRefused::Unsatisfiable { at: slash_if_empty(at.into()), why: why.into() }
    }

    /// The same refusal at a path below one part of the input.
    pub(crate) fn prefix_path(self, path: &str) -> GrammarRefused {
        self.map_path(|at| if at.starts_with('/') { path.to_owned() + at.trim_end_matches('/') } else { at })
    }

    /// Adds the path of the schema to a refusal that names only a keyword.
    pub(crate) fn add_schema_path(self, path: &str) -> GrammarRefused {
        self.map_path(|at| if at.starts_with('/') { at } else { format!("{path}/{at}") })
    }

    fn map_path(self, under: impl Fn(String) -> String) -> GrammarRefused {
        match self {
            GrammarRefused::Unsupported { at, what } => GrammarRefused::Unsupported { at: under(at), what },
            GrammarRefused::Invalid { at, why } => GrammarRefused::Invalid { at: under(at), why },
            GrammarRefused::Unsatisfiable { at, why } => GrammarRefused::Unsatisfiable { at: under(at), why },
            large => large,
        }
    }

    pub(crate) fn too_large(what: impl Into<String>, limit: usize) -> GrammarRefused {
        GrammarRefused::TooLarge { what: what.into(), limit: limit as u64 }
    }
}

/// Names the root, as the empty path is hard to see in a message.
fn slash_if_empty(at: String) -> String {
    if at.is_empty() { "/".to_owned() } else { at }
}
