//! The signs between values, with the whitespace that may surround them.

use crate::words::TextSet;

/// A space, or an indented new line. The length is bounded, so that an answer cannot consist of endless whitespace.
const BLANK: &str = "(?: |\\n {0,32}|\\n\\t{0,8})?";

pub(super) fn open(sign: char) -> TextSet {
    TextSet::regex(format!("\\{sign}{BLANK}"))
}

pub(super) fn close(sign: char) -> TextSet {
    TextSet::regex(format!("{BLANK}\\{sign}"))
}

pub(super) fn comma() -> TextSet {
    TextSet::regex(format!(",{BLANK}"))
}

pub(super) fn colon() -> TextSet {
    TextSet::regex(": ?")
}
