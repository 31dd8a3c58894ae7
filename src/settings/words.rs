//! Settings with a closed set of words that another crate defines: how to parse them from flags and files.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Deserializer, Serializer, de};
use std::fmt::Display;
use std::str::FromStr;

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

pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

pub fn deserialize<'a, T: FromStr<Err: Display>, D: Deserializer<'a>>(from: D) -> Result<T, D::Error> {
    String::deserialize(from)?.parse().map_err(de::Error::custom)
}

/// For a setting without a default.
pub mod open {
    use serde::{Deserialize, Deserializer, Serializer, de};
    use std::fmt::Display;
    use std::str::FromStr;

    pub fn serialize<T: Display, S: Serializer>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_none(),
        }
    }

    pub fn deserialize<'a, T: FromStr<Err: Display>, D: Deserializer<'a>>(from: D) -> Result<Option<T>, D::Error> {
        let word = Option::<String>::deserialize(from)?;
        word.map(|word| word.parse().map_err(de::Error::custom)).transpose()
    }
}
