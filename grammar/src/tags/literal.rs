//! Fixed texts, with what may be special tokens in them named by their text.

/// A run of characters, or a text that a vocabulary may have as one special token.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LiteralPiece<'a> {
    Text(&'a str),
    Special(&'a str),
}

/// `<tool_call>`, `[TOOL_CALLS]` and their like are pieces of their own: as text they are what they were, and where
/// the vocabulary has a special token of that name, that token is as good.
pub(super) fn pieces(text: &str) -> Vec<LiteralPiece<'_>> {
    let (mut pieces, mut from, mut at) = (Vec::new(), 0, 0);
    while at < text.len() {
        match special(&text[at..]) {
            Some(n) => {
                if from < at {
                    pieces.push(LiteralPiece::Text(&text[from..at]));
                }
                pieces.push(LiteralPiece::Special(&text[at..at + n]));
                (from, at) = (at + n, at + n);
            }
            None => at += text[at..].chars().next().map_or(1, char::len_utf8),
        }
    }
    if from < text.len() {
        pieces.push(LiteralPiece::Text(&text[from..]));
    }
    pieces
}

/// How long the name is that the text begins with.
fn special(text: &str) -> Option<usize> {
    const BYTES_MAX: usize = 100;
    let (end, is_inner): (char, fn(char) -> bool) = match text.as_bytes()[0] {
        b'<' => ('>', |c| !c.is_whitespace() && !"<>=\"{}".contains(c)),
        b'[' => (']', |c| c.is_ascii_uppercase() || "_/".contains(c)),
        _ => return None,
    };
    let inner = &text[1..];
    let n = inner.find(|c| !is_inner(c))?;
    (n > 0 && n < BYTES_MAX && inner[n..].starts_with(end)).then_some(n + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_special_tokens_are_pieces() {
        use LiteralPiece::{Special, Text};
        let cases = [
            ("<tool_call>\n{", vec![Special("<tool_call>"), Text("\n{")]),
            ("a<b", vec![Text("a<b")]),
            ("<function=f>", vec![Text("<function=f>")]),
            ("[TOOL_CALLS]x", vec![Special("[TOOL_CALLS]"), Text("x")]),
            ("é<｜x▁y｜><|a|>", vec![Text("é"), Special("<｜x▁y｜>"), Special("<|a|>")]),
            ("<>", vec![Text("<>")]),
        ];
        for (text, expect) in cases {
            assert_eq!(pieces(text), expect, "{text}");
        }
    }
}
