//! Files of lines, such as those of keys and routes: which lines count, and the error for one that does not parse.
//! Knows nothing of a line's meaning.

/// A line that does not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct BadLine {
    pub line: usize,
    pub problem: String,
}

/// The lines that count, with their numbers counted from one: neither empty lines nor those that begin with `#`.
pub fn counted(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().map(str::trim).zip(1..);
    lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#')).map(|(line, number)| (number, line))
}
