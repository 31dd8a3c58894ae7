//! The constraint on an answer: a description that has been checked. Knows nothing of the language that it is written
//! in.

use alloc::sync::Arc;
use core::fmt;

/// A grammar in the one text form in which it is stored, sent and compiled. The side that makes one has checked it. The
/// side that reads one from a stream compiles it, and refuses a text that does not compile.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Grammar(Arc<str>);

impl Grammar {
    pub fn new(text: impl Into<Arc<str>>) -> Grammar {
        Grammar(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// How many bytes the text has, for limits on what is sent.
    pub fn n_bytes(&self) -> usize {
        self.0.len()
    }
}

/// Its size alone: the text may be long, and a schema is its sender's business.
impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammar({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn debug_output_of_a_grammar_is_only_its_size() {
        let grammar = Grammar::new("start: \"secret\"");
        assert_eq!((grammar.as_str(), grammar.n_bytes()), ("start: \"secret\"", 15));
        assert_eq!(format!("{grammar:?}"), "Grammar(15 bytes)");
        assert_eq!(grammar.clone(), grammar);
    }
}
