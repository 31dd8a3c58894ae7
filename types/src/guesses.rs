//! How the tokens behind a log are guessed from the log itself. Knows no log.

/// How many of a log's last tokens must have stood in it before, for what followed them to be a guess: at least
/// `least`, and no more than `most` are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramLimits {
    pub least: u16,
    pub most: u16,
}

impl Default for NgramLimits {
    fn default() -> NgramLimits {
        NgramLimits { least: 2, most: 16 }
    }
}
