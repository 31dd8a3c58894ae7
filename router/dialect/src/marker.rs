//! Finds markers in a text that may continue. Has no knowledge of forms.

/// Whether a text begins with one of some markers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MarkerPrefix {
    /// With the marker of this index.
    With(usize),
    /// The whole text is the beginning of a marker.
    Perhaps,
    No,
}

/// If `last` is set, nothing comes after `text`. No marker may be the beginning of another.
pub(crate) fn match_prefix(text: &str, markers: &[&str], last: bool) -> MarkerPrefix {
    if let Some(i) = markers.iter().position(|marker| text.starts_with(marker)) {
        return MarkerPrefix::With(i);
    }
    let is_begun = !last && markers.iter().any(|marker| marker.starts_with(text));
    if is_begun { MarkerPrefix::Perhaps } else { MarkerPrefix::No }
}

/// The first place with a marker, or with a text that may become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MarkerMatch {
    At(usize, usize),
    Perhaps(usize),
    Nowhere,
}

/// Returns the place, and the marker's index.
pub(crate) fn find(text: &str, markers: &[&str], last: bool) -> MarkerMatch {
    let is_first = |byte: u8| markers.iter().any(|marker| marker.as_bytes()[0] == byte);
    for (at, byte) in text.bytes().enumerate() {
        if !is_first(byte) {
            continue;
        }
        match match_prefix(&text[at..], markers, last) {
            MarkerPrefix::With(i) => return MarkerMatch::At(at, i),
            MarkerPrefix::Perhaps => return MarkerMatch::Perhaps(at),
            MarkerPrefix::No => {}
        }
    }
    MarkerMatch::Nowhere
}

/// Returns the length of the white space at the start of a text.
pub(crate) fn blank(text: &str) -> usize {
    text.len() - text.trim_start_matches([' ', '\t', '\n', '\r']).len()
}
