//! Strings and numbers of a schema as sets of texts.

use super::decimal::Decimal;
use super::facts::SchemaFacts;
use super::values::kinds;
use super::{formats, multiples};
use crate::engine::first_line;
use crate::words::{Automaton, CharSet, RegexNode, TextSet, json_chars, json_strings};
use crate::{GrammarLimits, GrammarRefused};
use serde_json::Value;
use std::collections::HashMap;

/// A string as we write it: every character in one way only, so that a text is equal to another if its value is.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Strings of so many characters.
pub(super) fn strings(min: usize, max: Option<usize>) -> TextSet {
    let max = max.map_or(String::new(), |max| max.to_string());
    TextSet::regex(format!("\"{}{{{min},{max}}}\"", json_chars(&CharSet::all())))
}

/// The sets of texts that a document names, and what is known of each.
pub(super) struct SchemaTexts<'d> {
    limits: &'d GrammarLimits,
    patterns: HashMap<String, TextSet>,
    automata: HashMap<String, Automaton>,
}

impl<'d> SchemaTexts<'d> {
    pub(super) fn new(limits: &'d GrammarLimits) -> SchemaTexts<'d> {
        SchemaTexts { limits, patterns: HashMap::new(), automata: HashMap::new() }
    }

    pub(super) fn has(&mut self, words: &TextSet, text: &str) -> Result<bool, GrammarRefused> {
        let key = words.lark();
        if !self.automata.contains_key(&key) {
            let automaton = words.automaton(self.limits.compile_fuel);
            let automaton = automaton.map_err(|why| GrammarRefused::unsupported("pattern", first_line(&why)))?;
            self.automata.insert(key.clone(), automaton);
        }
        Ok(self.automata.get_mut(&key).is_some_and(|automaton| automaton.has(text)))
    }

    pub(super) fn is_empty(&self, words: &TextSet) -> Result<bool, GrammarRefused> {
        if matches!(words, TextSet::Text(_) | TextSet::Regex(_)) {
            return Ok(false);
        }
        words.is_empty(self.limits.compile_fuel).map_err(|why| {
            GrammarRefused::unsupported("pattern", format!("such a complex set of texts ({})", first_line(&why)))
        })
    }

    /// The strings that satisfy the facts.
    pub(super) fn strings_with(&mut self, facts: &SchemaFacts) -> Result<TextSet, GrammarRefused> {
        let (min, max) = facts.length;
        let most = max.unwrap_or(0).max(min);
        if most > self.limits.repeat_max {
            return Err(GrammarRefused::too_large(format!("a length of {most}"), self.limits.repeat_max));
        }
        if max.is_some_and(|max| max < min) {
            return Ok(TextSet::Any(Vec::new()));
        }
        let mut all = Vec::new();
        if facts.length != (0, None) || facts.patterns.iter().chain(&facts.formats).all(|(_, is)| !is) {
            all.push(strings(min, max));
        }
        for (pattern, is) in &facts.patterns {
            let words = self.pattern(pattern)?;
            all.push(if *is { words } else { TextSet::not(words) });
        }
        for (format, is) in &facts.formats {
            let words = formats::strings_with_format(format).filter(|_| *is || formats::is_exact(format));
            let words = words.ok_or_else(|| GrammarRefused::unsupported("format", format!("the format {format:?}")))?;
            all.push(if *is { words } else { TextSet::not(words) });
        }
        if !facts.unlike.is_empty() {
            let texts = facts.unlike.iter().filter_map(|value| value.as_str());
            all.push(TextSet::not(TextSet::Any(texts.map(|text| TextSet::Text(quoted(text))).collect())));
        }
        Ok(if all.len() == 1 { all.remove(0) } else { TextSet::All(all) })
    }

    pub(super) fn pattern(&mut self, pattern: &str) -> Result<TextSet, GrammarRefused> {
        if let Some(words) = self.patterns.get(pattern) {
            return Ok(words.clone());
        }
        let read = RegexNode::read(pattern, self.limits.depth_max, self.limits.repeat_max);
        let words =
            read.and_then(|read| json_strings(&read)).map_err(|why| GrammarRefused::unsupported("pattern", why))?;
        self.patterns.insert(pattern.to_owned(), words.clone());
        Ok(words)
    }
}

/// The numbers that satisfy the facts.
pub(super) fn numbers_with(facts: &SchemaFacts) -> Result<TextSet, GrammarRefused> {
    // A number is not beyond what readers of JSON hold, 1.7e308: many refuse a document with a longer one.
    const WHOLE: &str = "(?:[1-9][0-9]{0,307}|1[0-6][0-9]{307})";
    let mut all = vec![TextSet::regex(match facts.kinds & kinds::NUMBER {
        kinds::INTEGER => format!("0|-?{WHOLE}"),
        kinds::FRACTION => format!("-?(?:0|{WHOLE})\\.[0-9]*[1-9][0-9]*"),
        _ => format!("(?:0|-?{WHOLE})(?:\\.[0-9]{{1,308}})?|-0\\.[0-9]{{0,307}}[1-9][0-9]{{0,308}}"),
    })];
    if let Some((bound, or_equal)) = &facts.lower {
        all.push(bound.larger_numbers(*or_equal));
    }
    if let Some((bound, or_equal)) = &facts.upper {
        all.push(TextSet::not(bound.larger_numbers(!or_equal)));
    }
    for (of, is) in &facts.multiples {
        let words = multiples::multiples_of(of).ok_or_else(|| {
            GrammarRefused::unsupported("multipleOf", format!("a step of {}", of.shortest_notation()))
        })?;
        all.push(if *is { words } else { TextSet::not(words) });
    }
    for number in facts.unlike.iter().filter_map(|value| value.as_number()) {
        let number =
            Decimal::of(number).ok_or_else(|| GrammarRefused::unsupported("enum", "a number with so many digits"))?;
        all.push(TextSet::not(number.words()));
    }
    Ok(if all.len() == 1 { all.remove(0) } else { TextSet::All(all) })
}

/// A value as it is written. Lists and objects are not, as they may be written with blanks.
pub(super) fn scalar_text(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("null".to_owned()),
        Value::Bool(is) => Some(is.to_string()),
        Value::Number(number) => Decimal::of(number).map(|number| number.shortest_notation()),
        Value::String(text) => Some(quoted(text)),
        Value::Array(_) | Value::Object(_) => None,
    }
}
