//! Sets of texts: regular expressions, and what is made of them. Knows nothing of JSON's values.

mod chars;
mod expr;
mod pattern;
mod translate;

pub(crate) use chars::CharSet;
pub(crate) use expr::{Automaton, TextSet};
pub(crate) use pattern::RegexNode;
pub(crate) use translate::{json_chars, json_strings, whole_match};
