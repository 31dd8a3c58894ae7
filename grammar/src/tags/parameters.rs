//! An object as Qwen's coder models write it: `<parameter=name>value</parameter>` for each property.

use super::free;
use crate::rules::{GrammarRules, Symbol};
use crate::words::TextSet;
use crate::{GrammarLimits, GrammarRefused, schema};
use serde_json::Value;

const END: &str = "</parameter>";

/// Writes properties in their order, each optional one or not. A string is written as it is, everything else as JSON.
pub(super) fn write(
    document: &Value,
    at: &str,
    grammar: &mut GrammarRules,
    limits: &GrammarLimits,
) -> Result<Vec<Symbol>, GrammarRefused> {
    const KNOWN: &[&str] = &[
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$schema",
        "$defs",
        "strict",
    ];
    let object = document.as_object().ok_or_else(|| GrammarRefused::invalid(at, "it is not an object"))?;
    if let Some(word) = object.keys().find(|word| !KNOWN.contains(&word.as_str())) {
        return Err(GrammarRefused::unsupported(format!("{at}/{word}"), format!("{word:?} for parameters")));
    }
    let properties = object.get("properties").and_then(Value::as_object);
    let properties: Vec<(&String, &Value)> = properties.into_iter().flatten().collect();
    let required = object.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    if let Some(name) = required.iter().find(|name| !properties.iter().any(|(known, _)| *name == known.as_str())) {
        return Err(GrammarRefused::unsupported(format!("{at}/required"), format!("{name}, which is not a property,")));
    }
    let parts: Vec<&Value> = properties.iter().map(|(_, part)| *part).collect();
    let rules = schema::write_parts(document, &parts, grammar, limits).map_err(|why| why.prefix_path(at))?;
    let blank = Symbol::Maybe(vec![grammar.words(&TextSet::regex("[ \\n]{1,2}"))]);
    let mut symbols = Vec::new();
    for ((name, part), rule) in properties.into_iter().zip(rules) {
        if name.contains(['<', '>', '\n']) {
            return Err(GrammarRefused::unsupported(format!("{at}/properties"), format!("the name {name:?} in a tag")));
        }
        let begin = grammar.words(&TextSet::Text(format!("<parameter={name}>")));
        let end = grammar.words(&TextSet::regex(format!("\\n?{}", regex_syntax::escape(END))));
        let text = grammar.words(&free::text_up_to(END, &[END.to_owned()], &[]));
        let new_line = Symbol::Maybe(vec![grammar.words(&TextSet::Text("\n".to_owned()))]);
        let value = if is_plain_text(part) { vec![text] } else { vec![new_line, Symbol::Rule(rule), end] };
        let one = Symbol::Rule(grammar.add(vec![[vec![begin], value, vec![blank.clone()]].concat()]));
        let is_required = required.iter().any(|required| required == name.as_str());
        symbols.push(if is_required { one } else { Symbol::Maybe(vec![one]) });
    }
    Ok(symbols)
}

/// Whether a string has no constraints: then it needs no quotes. Other strings are written as JSON, so that their
/// constraints are enforced.
fn is_plain_text(schema: &Value) -> bool {
    const FOR_PEOPLE: &[&str] = &["type", "title", "description", "default", "examples"];
    let is_for_people = |word: &String| FOR_PEOPLE.contains(&word.as_str());
    schema.get("type").is_some_and(|kind| kind == "string")
        && schema.as_object().is_some_and(|object| object.keys().all(is_for_people))
}
