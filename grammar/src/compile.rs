//! From a wish to a checked description. Pure: no vocabulary, no clock, nothing is fetched.

use crate::ebnf::Form;
use crate::rules::{Rule, Rules};
use crate::specials::Specials;
use crate::words::{Pattern, Words, plain};
use crate::{Limits, Refused, Wanted, ebnf, engine, schema, specials, tags};
use serde_json::json;
use types::Grammar;

/// The description of what is wanted, checked: it compiles within the limits, and says nothing that is not enforced.
pub fn compile(wanted: &Wanted, limits: &Limits) -> Result<Grammar, Refused> {
    let mut specials = Specials::default();
    let rules = rules(wanted, &mut specials, limits)?;
    let text = specials.describe(&rules);
    if text.len() > limits.bytes_max {
        return Err(Refused::too_large(format!("a grammar of {} bytes", text.len()), limits.bytes_max));
    }
    let lark = specials::resolve(&text, None).ok_or_else(|| Refused::invalid("grammar", "it has no rules"))?;
    engine::check(&lark, limits)?;
    Ok(Grammar::new(text))
}

fn rules(wanted: &Wanted, specials: &mut Specials, limits: &Limits) -> Result<String, Refused> {
    let mut rules = Rules::default();
    let start = match wanted {
        Wanted::JsonObject => schema::write(&json!({"type": "object"}), &mut rules, limits)?,
        Wanted::JsonSchema(schema) => schema::write(schema, &mut rules, limits)?,
        Wanted::StructuralTag(value) => tags::write(value, &mut rules, specials, limits)?,
        Wanted::Ebnf(text) => ebnf::write(text, Form::Ebnf, &mut rules, limits)?,
        Wanted::Gbnf(text) => ebnf::write(text, Form::Gbnf, &mut rules, limits)?,
        Wanted::Regex(regex) => {
            let pattern = Pattern::read(regex, limits.depth_max, limits.repeat_max);
            let words = pattern.and_then(|pattern| plain(&pattern)).map_err(|why| Refused::invalid("regex", why))?;
            one_of(&mut rules, words)
        }
        Wanted::Choice(texts) => {
            let texts = texts.iter().map(|text| Words::Text(text.clone())).collect::<Vec<_>>();
            if texts.is_empty() {
                return Err(Refused::unsatisfiable("choice", "it is empty"));
            }
            one_of(&mut rules, Words::Any(texts))
        }
        Wanted::Lark(text) => return user_lark(text, limits),
    };
    let mut text = format!("start: r{start}\n");
    let unsatisfiable = || Refused::unsatisfiable("", "no text is left that would satisfy it");
    rules.write(start, "r", &mut text).ok_or_else(unsatisfiable)?;
    Ok(text)
}

fn one_of(rules: &mut Rules, words: Words) -> Rule {
    let words = rules.words(&words);
    rules.add(vec![vec![words]])
}

/// Lark as it is, if it cannot be deeper than the engine's stack is. What the engine reads in it beside rules is limited
/// to what this crate enforces elsewhere: its own JSON schemas ignore some keywords.
fn user_lark(text: &str, limits: &Limits) -> Result<String, Refused> {
    let mut depth = 0usize;
    for (i, line) in text.lines().enumerate() {
        for word in ["%json", "%lark", "%llguidance"] {
            if line.split("//").next().is_some_and(|code| code.contains(word)) {
                return Err(Refused::unsupported(format!("line {}", i + 1), word));
            }
        }
        for c in line.chars() {
            depth = if "([{~".contains(c) { depth + 1 } else { depth.saturating_sub(usize::from(")]}".contains(c))) };
            if depth > limits.depth_max * 4 {
                return Err(Refused::too_large("the depth of groups", limits.depth_max * 4));
            }
        }
    }
    Ok(text.to_owned())
}
