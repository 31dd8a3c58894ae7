//! Where the tokens of a text stand in it.

use crate::tokenizer::Tokenizer;
use types::Token;

/// How far a token is looked for behind the one before it, in bytes: tokenizers drop blanks and rewrite characters.
const SKIPPED_MAX: usize = 64;

impl Tokenizer {
    /// For each token of a text the characters `start..end` that it stands for. A token that is part of a character has
    /// all of it, and one that stands for nothing in the text, such as one before all texts, has `(0, 0)`.
    pub fn char_spans(&self, text: &str, ids: &[Token]) -> Vec<(usize, usize)> {
        let mut cursor = TextCursor { text, at: 0, n_counted: 0 };
        let place = |id: &Token| cursor.next_span(self.token_bytes(*id), self.is_special(*id)).unwrap_or_default();
        ids.iter().map(place).collect()
    }
}

/// How far a text was read, and how many of its characters begin before that.
struct TextCursor<'a> {
    text: &'a str,
    at: usize,
    n_counted: usize,
}

impl TextCursor<'_> {
    fn next_span(&mut self, token: &[u8], is_special: bool) -> Option<(usize, usize)> {
        let (n_skipped, n) = self.find(token, is_special)?;
        self.advance(n_skipped);
        let is_whole = self.text.is_char_boundary(self.at);
        let start = self.n_counted - usize::from(!is_whole);
        self.advance(n);
        Some((start, self.n_counted))
    }

    /// How many bytes on it begins, and its length. Some vocabularies write a space before a text that has none.
    fn find(&self, token: &[u8], is_special: bool) -> Option<(usize, usize)> {
        let rest = &self.text.as_bytes()[self.at..];
        let of = |bytes: &[u8]| (!bytes.is_empty() && rest.starts_with(bytes)).then_some((0, bytes.len()));
        let found = of(token).or_else(|| of(token.strip_prefix(b" ")?));
        if found.is_some() || token.is_empty() {
            return found;
        }
        let n_blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let n_max = if is_special { n_blank } else { SKIPPED_MAX };
        let window = &rest[..rest.len().min(n_max + token.len())];
        let skipped = window.windows(token.len()).position(|bytes| bytes == token)?;
        Some((skipped, token.len()))
    }

    fn advance(&mut self, n: usize) {
        let begins = |byte: &&u8| **byte & 0b1100_0000 != 0b1000_0000;
        self.n_counted += self.text.as_bytes()[self.at..self.at + n].iter().filter(begins).count();
        self.at += n;
    }
}

#[cfg(test)]
mod tests {
    use super::TextCursor;

    #[test]
    fn tokens_stand_where_their_text_does() {
        let places = |text: &str, tokens: &[(&[u8], bool)]| {
            let mut cursor = TextCursor { text, at: 0, n_counted: 0 };
            tokens
                .iter()
                .map(|(token, special)| cursor.next_span(token, *special).unwrap_or_default())
                .collect::<Vec<_>>()
        };
        let word = |text: &'static str| (text.as_bytes(), false);
        assert_eq!(places("naïve one", &[word("na"), word("ïve"), word(" one")]), [(0, 2), (2, 5), (5, 9)]);
        // Both tokens of a character have all of it.
        assert_eq!(places("aïb", &[word("a"), (&[0xc3], false), (&[0xaf, b'b'], false)]), [(0, 1), (1, 2), (1, 3)]);
        let special = |text: &'static str| (text.as_bytes(), true);
        assert_eq!(places("Hi", &[special("<s>"), word(" Hi"), special("</s>")]), [(0, 0), (0, 2), (0, 0)]);
        assert_eq!(places("Hi  <e>yo", &[word("Hi"), special("<e>"), word("yo")]), [(0, 2), (4, 7), (7, 9)]);
        assert_eq!(places("a\u{301}bc", &[word("á"), word("bc")]), [(0, 0), (2, 4)]);
    }
}
