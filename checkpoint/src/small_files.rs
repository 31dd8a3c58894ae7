//! Files beside the weights, read whole: JSON and text. And which names of files are believed. Knows no key.

use crate::error::{Error, Result};
use crate::file::SourceFile;
use serde_json::Value;
use std::path::Path;

/// A model's JSON files are small; a larger one is refused.
const JSON_BYTES_MAX: u64 = 256 << 20;

pub(crate) fn read_json(path: &Path) -> Result<Value> {
    parse_json(&read_text(path)?)
        .map_err(|error| Error::Malformed { path: path.to_owned(), what: format!("not JSON: {error}") })
}

/// Python writes infinities and NaN as bare words, which JSON does not have: configs of Nemotron-H have
/// `"time_step_limit": [0.0, Infinity]`. Each becomes the object that newer versions of transformers write.
fn parse_json(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).or_else(|error| match with_float_objects(text) {
        Some(text) => serde_json::from_str(&text).map_err(|_| error),
        None => Err(error),
    })
}

/// Returns the text with an object in place of each bare float, or None without any.
fn with_float_objects(text: &str) -> Option<String> {
    const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let mut result = String::with_capacity(text.len());
    let (mut rest, mut in_string, mut has_words) = (text, false, false);
    while let Some(first) = rest.chars().next() {
        let word = WORDS.into_iter().find(|word| !in_string && rest.starts_with(word));
        let n_bytes = match (word, first) {
            (Some(word), _) => word.len(),
            // An escaped quote does not end a string.
            (None, '\\') => first.len_utf8() + rest.chars().nth(1).map_or(0, char::len_utf8),
            (None, _) => first.len_utf8(),
        };
        let (taken, others) = rest.split_at(n_bytes);
        match word {
            Some(word) => result.extend([r#"{"__float__":""#, word, r#""}"#]),
            None => result.push_str(taken),
        }
        has_words |= word.is_some();
        in_string ^= first == '"';
        rest = others;
    }
    has_words.then_some(result)
}

/// Null if there is no such file.
pub(crate) fn read_json_if_there(path: &Path) -> Result<Value> {
    if path.exists() { read_json(path) } else { Ok(Value::Null) }
}

pub(crate) fn read_text(path: &Path) -> Result<String> {
    let malformed = |_| Error::Malformed { path: path.to_owned(), what: "not text".into() };
    String::from_utf8(read_bytes(path)?).map_err(malformed)
}

pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let file = SourceFile::open(path)?;
    if file.n_bytes() > JSON_BYTES_MAX {
        let what = format!("the file exceeds the limit of {JSON_BYTES_MAX} bytes");
        return Err(Error::Malformed { path: path.to_owned(), what });
    }
    let mut bytes = vec![0; file.n_bytes() as usize];
    file.read_at(0, &mut bytes)?;
    file.check_unchanged()?;
    Ok(bytes)
}

/// Whether a file name stays in its folder: no separators, no parents, nothing hidden.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0', ':'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_that_json_lacks_become_objects() {
        let check = |text: &str, expect: &str| {
            let expect: Value = serde_json::from_str(expect).unwrap();
            assert_eq!(parse_json(text).ok(), Some(expect), "{text}");
        };
        check("[0.0, Infinity]", r#"[0.0, {"__float__": "Infinity"}]"#);
        check("[-Infinity,NaN]", r#"[{"__float__": "-Infinity"}, {"__float__": "NaN"}]"#);
        check(r#"{"NaN": NaN, "a": "\"Infinity"}"#, r#"{"NaN": {"__float__": "NaN"}, "a": "\"Infinity"}"#);
        check(r#""NaN é""#, r#""NaN é""#);
        for broken in ["[Infinite]", "[Infinityx]", "[NaN", "{NaN}", "\"NaN", "\"\\", "Infinity é"] {
            assert!(parse_json(broken).is_err(), "{broken}");
        }
        // The error names the place in the file.
        let error = parse_json("[NaN,\n x]").unwrap_err();
        assert_eq!((error.line(), error.column()), (1, 2));
    }
}
