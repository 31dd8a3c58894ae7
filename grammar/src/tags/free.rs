//! Free text up to a sign: each is a set of texts none of which begins another, so that it ends where its sign ends.

use crate::words::TextSet;

const ANY: &str = "(?s:.*)";
const SOME: &str = "(?s:.+)";

fn one_of(signs: &[String]) -> String {
    let signs: Vec<String> = signs.iter().map(|sign| regex_syntax::escape(sign)).collect();
    format!("(?:{})", signs.join("|"))
}

/// Text that has none of the signs in it, one character at least.
pub(super) fn text_without(signs: &[String]) -> TextSet {
    let some = TextSet::regex(SOME);
    match signs.is_empty() {
        true => some,
        false => TextSet::All(vec![some, TextSet::not(TextSet::regex(format!("{ANY}{}{ANY}", one_of(signs))))]),
    }
}

/// Text whose first sign is this one, at its end. `signs` are all that may not come earlier, and `excluded` those
/// that may not come at all.
pub(super) fn text_up_to(sign: &str, signs: &[String], excluded: &[String]) -> TextSet {
    let ends = TextSet::regex(format!("{ANY}{}", regex_syntax::escape(sign)));
    let mut all = vec![ends, TextSet::not(TextSet::regex(format!("{ANY}{}{SOME}", one_of(signs))))];
    if !excluded.is_empty() {
        all.push(TextSet::not(TextSet::regex(format!("{ANY}{}{ANY}", one_of(excluded)))));
    }
    TextSet::All(all)
}

/// What a set has, without the sign in it, and then the sign.
pub(super) fn text_before_sign(words: TextSet, sign: &str) -> TextSet {
    let content =
        TextSet::All(vec![words, TextSet::not(TextSet::regex(format!("{ANY}{}{ANY}", regex_syntax::escape(sign))))]);
    TextSet::Then(vec![content, TextSet::Text(sign.to_owned())])
}
