//! Flags with a closed set of words that another crate defines: how to parse them.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// Returns a parser that accepts these words and no others.
pub fn parser<T>(all: &'static [T], name: fn(T) -> &'static str) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync,
{
    explained(all, name, |_| "")
}

/// Does the same as `parser`, with a help text for each word.
pub fn explained<T>(
    all: &'static [T],
    name: fn(T) -> &'static str,
    meaning: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync,
{
    let possible = all.iter().map(move |member| {
        let value = PossibleValue::new(name(*member));
        if meaning(*member).is_empty() { value } else { value.help(meaning(*member)) }
    });
    let of_all = move |word: String| all.iter().copied().find(|member| name(*member) == word);
    PossibleValuesParser::new(possible).try_map(move |word| of_all(word).ok_or("unknown word"))
}
