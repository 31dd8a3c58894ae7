//! Files of lines, such as those of keys and routes: which lines count, the error for a line that does not parse, and
//! which known word an unknown word resembles. Knows nothing of a line's meaning.

/// Words are alike from this value on, of 0 to 1: `smollm-2` and `smollm2` reach it, `v1` and `v2` do not.
const LIKENESS_MIN: f64 = 0.7;

/// A line that does not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct BadLine {
    pub line: usize,
    pub problem: String,
}

/// Returns the lines that count, with their numbers counted from one: neither empty lines nor those that begin with
/// `#`.
pub fn counted(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().map(str::trim).zip(1..);
    lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#')).map(|(line, number)| (number, line))
}

/// Returns the known word that an unknown one resembles most, for "did you mean".
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let alike = known.into_iter().map(|known| (strsim::jaro(word, known), known));
    let alike = alike.filter(|(likeness, _)| *likeness > LIKENESS_MIN);
    alike.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_slip_is_like_its_word_and_another_word_is_not() {
        let check = |word, expect| assert_eq!(nearest(word, ["v1", "v2", "smollm2", "smollm3"]), expect, "{word}");
        check("smollm-2", Some("smollm2"));
        check("SMOLLM2", None);
        check("smolm3", Some("smollm3"));
        check("v3", None);
        check("llama", None);
    }
}
