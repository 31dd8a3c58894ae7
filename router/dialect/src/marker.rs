//! Finds markers in a text of which more may come. Knows no form.

/// Whether a text begins with one of some markers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Begins {
    /// With the marker of this index.
    With(usize),
    /// It is the beginning of a marker, as far as it goes.
    Perhaps,
    No,
}

/// `last` says that nothing comes after `text`. No marker may be the beginning of another.
pub(crate) fn begins(text: &str, markers: &[&str], last: bool) -> Begins {
    if let Some(i) = markers.iter().position(|marker| text.starts_with(marker)) {
        return Begins::With(i);
    }
    let is_begun = !last && markers.iter().any(|marker| marker.starts_with(text));
    if is_begun { Begins::Perhaps } else { Begins::No }
}

/// The first place where a marker stands, or may stand once more has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Found {
    At(usize, usize),
    Perhaps(usize),
    Nowhere,
}

/// Returns where, and which.
pub(crate) fn find(text: &str, markers: &[&str], last: bool) -> Found {
    let is_first = |byte: u8| markers.iter().any(|marker| marker.as_bytes()[0] == byte);
    for (at, byte) in text.bytes().enumerate() {
        if !is_first(byte) {
            continue;
        }
        match begins(&text[at..], markers, last) {
            Begins::With(i) => return Found::At(at, i),
            Begins::Perhaps => return Found::Perhaps(at),
            Begins::No => {}
        }
    }
    Found::Nowhere
}

/// The length of the white space at the start of a text.
pub(crate) fn blank(text: &str) -> usize {
    text.len() - text.trim_start_matches([' ', '\t', '\n', '\r']).len()
}
