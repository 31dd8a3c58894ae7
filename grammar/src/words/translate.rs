//! Converts a pattern to a set of texts: those that match anywhere or as a whole, in plain form or in JSON's form.

use super::{CharSet, RegexNode, TextSet};

/// Texts that match as a whole.
pub(crate) fn whole_match(pattern: &RegexNode) -> Result<TextSet, String> {
    Ok(TextSet::Regex(pattern_to_regex(&remove_anchors(pattern, false)?, &|chars| chars.class())))
}

/// JSON strings, with their quotes, whose text contains a match of the pattern.
pub(crate) fn json_strings(pattern: &RegexNode) -> Result<TextSet, String> {
    let spelled = pattern_to_regex(&remove_anchors(pattern, true)?, &json_chars);
    Ok(TextSet::Regex(format!("\"(?:{spelled})\"")))
}

/// JSON's form of one of the characters, exactly one for each: unescaped if possible, otherwise the shortest escape.
pub(crate) fn json_chars(chars: &CharSet) -> String {
    let escaped = CharSet::of([(0, 0x1f), (0x22, 0x22), (0x5c, 0x5c)]);
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
    if ways.is_empty() { CharSet::default().class() } else { format!("(?:{})", ways.join("|")) }
}

fn pattern_to_regex(pattern: &RegexNode, chars: &impl Fn(&CharSet) -> String) -> String {
    match pattern {
        RegexNode::Chars(set) => chars(set),
        RegexNode::Sequence(parts) => parts.iter().map(|part| pattern_to_regex(part, chars)).collect(),
        RegexNode::Either(options) => {
            let options: Vec<String> = options.iter().map(|option| pattern_to_regex(option, chars)).collect();
            format!("(?:{})", options.join("|"))
        }
        RegexNode::Repeat { of, min, max } => {
            let max = max.map_or(String::new(), |max| max.to_string());
            format!("(?:{}){{{min},{max}}}", pattern_to_regex(of, chars))
        }
        // None is left: see `anchored`.
        RegexNode::Start | RegexNode::End => String::new(),
    }
}

/// Returns the pattern without anchors, for whole texts. With `search`, anything may surround it except where it has an
/// anchor.
fn remove_anchors(pattern: &RegexNode, search: bool) -> Result<RegexNode, String> {
    let any = || RegexNode::Repeat { of: Box::new(RegexNode::Chars(CharSet::all())), min: 0, max: None };
    let options = match pattern {
        RegexNode::Either(options) => options.as_slice(),
        other => std::slice::from_ref(other),
    };
    let mut whole = Vec::with_capacity(options.len());
    for option in options {
        let mut parts = match option {
            RegexNode::Sequence(parts) => parts.clone(),
            other => vec![other.clone()],
        };
        let (mut before, mut after) = (search, search);
        while parts.first() == Some(&RegexNode::Start) {
            parts.remove(0);
            before = false;
        }
        while parts.last() == Some(&RegexNode::End) {
            parts.pop();
            after = false;
        }
        // A group at an end that contains anchors is read as the pattern itself would be.
        if let [RegexNode::Either(_) | RegexNode::Sequence(_)] = parts.as_slice()
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
        whole.push(RegexNode::Sequence(parts));
    }
    Ok(RegexNode::Either(whole))
}

/// Returns a group that is the whole pattern, between the anchors that were found around it.
fn wrapped(group: &RegexNode, before: bool, after: bool, search: bool) -> Result<RegexNode, String> {
    let options = match group {
        RegexNode::Either(options) => options.clone(),
        other => vec![other.clone()],
    };
    let anchor = |is_open: bool, anchor: RegexNode| (search && !is_open).then_some(anchor);
    let bound = |option: RegexNode| {
        let parts = match option {
            RegexNode::Sequence(parts) => parts,
            other => vec![other],
        };
        let (first, last) = (anchor(before, RegexNode::Start), anchor(after, RegexNode::End));
        RegexNode::Sequence(first.into_iter().chain(parts).chain(last).collect())
    };
    remove_anchors(&RegexNode::Either(options.into_iter().map(bound).collect()), search)
}

fn has_anchor(pattern: &RegexNode) -> bool {
    match pattern {
        RegexNode::Start | RegexNode::End => true,
        RegexNode::Chars(_) => false,
        RegexNode::Sequence(parts) | RegexNode::Either(parts) => parts.iter().any(has_anchor),
        RegexNode::Repeat { of, .. } => has_anchor(of),
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
            let words = json_strings(&RegexNode::read(pattern, 64, 1000).unwrap()).unwrap();
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
            let error = RegexNode::read(pattern, 64, 1000).unwrap_err();
            assert!(error.contains("at character"), "{error}");
        }
        assert!(json_strings(&RegexNode::read("a^b", 64, 1000).unwrap()).is_err());
    }
}
