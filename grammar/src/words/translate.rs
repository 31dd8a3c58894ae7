//! Converts a pattern to a set of texts: those that match anywhere or as a whole, in plain form or in JSON's form.

use super::{Chars, Pattern, Words};

/// Texts that match as a whole.
pub(crate) fn plain(pattern: &Pattern) -> Result<Words, String> {
    Ok(Words::Regex(spell(&anchored(pattern, false)?, &|chars| chars.class())))
}

/// JSON strings, with their quotes, whose text contains a match of the pattern.
pub(crate) fn json_text(pattern: &Pattern) -> Result<Words, String> {
    let spelled = spell(&anchored(pattern, true)?, &json_chars);
    Ok(Words::Regex(format!("\"(?:{spelled})\"")))
}

/// JSON's form of one of the characters, exactly one for each: unescaped if possible, otherwise the shortest escape.
pub(crate) fn json_chars(chars: &Chars) -> String {
    let escaped = Chars::of([(0, 0x1f), (0x22, 0x22), (0x5c, 0x5c)]);
    let raw = chars.minus(&escaped);
    let mut ways: Vec<String> = if raw.is_empty() { Vec::new() } else { vec![raw.class()] };
    for code in (0..0x20).chain([0x22, 0x5c]) {
        let c = char::from(code);
        if chars.has(c) {
            ways.push(match c {
                '"' | '\\' => format!("\\\\\\x{{{:X}}}", c as u32),
                '\n' => "\\\\n".to_owned(),
                '\r' => "\\\\r".to_owned(),
                '\t' => "\\\\t".to_owned(),
                '\u{8}' => "\\\\b".to_owned(),
                '\u{c}' => "\\\\f".to_owned(),
                c => format!("\\\\u{:04x}", c as u32),
            });
        }
    }
    if ways.is_empty() { Chars::default().class() } else { format!("(?:{})", ways.join("|")) }
}

fn spell(pattern: &Pattern, chars: &impl Fn(&Chars) -> String) -> String {
    match pattern {
        Pattern::Chars(set) => chars(set),
        Pattern::Sequence(parts) => parts.iter().map(|part| spell(part, chars)).collect(),
        Pattern::Either(options) => {
            let options: Vec<String> = options.iter().map(|option| spell(option, chars)).collect();
            format!("(?:{})", options.join("|"))
        }
        Pattern::Repeat { of, min, max } => {
            let max = max.map_or(String::new(), |max| max.to_string());
            format!("(?:{}){{{min},{max}}}", spell(of, chars))
        }
        // None is left: see `anchored`.
        Pattern::Start | Pattern::End => String::new(),
    }
}

/// Returns the pattern without anchors, for whole texts. With `search`, anything may surround it except where it has an
/// anchor.
fn anchored(pattern: &Pattern, search: bool) -> Result<Pattern, String> {
    let any = || Pattern::Repeat { of: Box::new(Pattern::Chars(Chars::all())), min: 0, max: None };
    let options = match pattern {
        Pattern::Either(options) => options.as_slice(),
        other => std::slice::from_ref(other),
    };
    let mut whole = Vec::with_capacity(options.len());
    for option in options {
        let mut parts = match option {
            Pattern::Sequence(parts) => parts.clone(),
            other => vec![other.clone()],
        };
        let (mut before, mut after) = (search, search);
        while parts.first() == Some(&Pattern::Start) {
            parts.remove(0);
            before = false;
        }
        while parts.last() == Some(&Pattern::End) {
            parts.pop();
            after = false;
        }
        // A group at an end that contains anchors is read as the pattern itself would be.
        if let [Pattern::Either(_) | Pattern::Sequence(_)] = parts.as_slice()
            && has_anchor(&parts[0])
        {
            let inner = wrapped(&parts[0], before, after, search)?;
            whole.push(inner);
            continue;
        }
        if parts.iter().any(has_anchor) {
            return Err("an anchor inside of a pattern is not supported".to_owned());
        }
        if before {
            parts.insert(0, any());
        }
        if after {
            parts.push(any());
        }
        whole.push(Pattern::Sequence(parts));
    }
    Ok(Pattern::Either(whole))
}

/// Returns a group that is the whole pattern, between the anchors that were found around it.
fn wrapped(group: &Pattern, before: bool, after: bool, search: bool) -> Result<Pattern, String> {
    let options = match group {
        Pattern::Either(options) => options.clone(),
        other => vec![other.clone()],
    };
    let anchor = |is_open: bool, anchor: Pattern| (search && !is_open).then_some(anchor);
    let bound = |option: Pattern| {
        let parts = match option {
            Pattern::Sequence(parts) => parts,
            other => vec![other],
        };
        let (first, last) = (anchor(before, Pattern::Start), anchor(after, Pattern::End));
        Pattern::Sequence(first.into_iter().chain(parts).chain(last).collect())
    };
    anchored(&Pattern::Either(options.into_iter().map(bound).collect()), search)
}

fn has_anchor(pattern: &Pattern) -> bool {
    match pattern {
        Pattern::Start | Pattern::End => true,
        Pattern::Chars(_) => false,
        Pattern::Sequence(parts) | Pattern::Either(parts) => parts.iter().any(has_anchor),
        Pattern::Repeat { of, .. } => has_anchor(of),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_they_would_in_a_browser() {
        let cases: &[(&str, &[&str], &[&str])] = &[
            ("^a*$", &["", "aaa"], &["b", "ab"]),
            ("a+", &["xaay"], &["", "x"]),
            ("^a|b$", &["ax", "xb", "a"], &["xa", "bx"]),
            ("^(a|b)$", &["a", "b"], &["ab", ""]),
            ("(^a$|^b)", &["a", "bx"], &["ax", "xb"]),
            ("^\\S(|(.|\\n)*\\S)\\Z".trim_end_matches("\\Z"), &["a", "a b"], &[" a"]),
            ("^\\d{2,3}$", &["12", "123"], &["1", "1234", "\u{0967}\u{0967}"]),
            ("^\\p{Letter}+$", &["é", "ж"], &["1", ""]),
            ("^[\\w.-]+@[^\\s@]+$", &["a.b-c@d"], &["a@", "@b"]),
            ("^\\ud83d\\udc32$", &["\u{1f432}"], &["x"]),
            ("^\"\\\\\\n\\cA$", &["\"\\\n\u{1}"], &["\"\\n"]),
        ];
        for (pattern, yes, no) in cases {
            let words = json_text(&Pattern::read(pattern, 64, 1000).unwrap()).unwrap();
            for (text, expect) in yes.iter().map(|t| (t, true)).chain(no.iter().map(|t| (t, false))) {
                let quoted = serde_json::to_string(text).unwrap();
                assert_eq!(words.has(&quoted, 100_000).unwrap(), expect, "{pattern} and {text:?}");
            }
        }
    }

    #[test]
    fn what_is_no_regular_expression_is_refused_with_its_place() {
        let cases =
            ["(", "a)", "[a", "a{2", "*a", "(?=a)", "(?<!a)", "\\1", "\\bx", "a**", "[z-a]", "\\p{Nope}", "a{3,2}"];
        for pattern in cases {
            let error = Pattern::read(pattern, 64, 1000).unwrap_err();
            assert!(error.contains("at character"), "{error}");
        }
        assert!(json_text(&Pattern::read("a^b", 64, 1000).unwrap()).is_err());
    }
}
