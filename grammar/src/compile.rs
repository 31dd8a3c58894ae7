//! From a wish to a checked description. Pure: no vocabulary, no clock, nothing is fetched.

use crate::rules::Rules;
use crate::specials::Specials;
use crate::words::{Pattern, plain};
use crate::{Limits, Refused, Wanted, engine, lark, schema, specials};
use serde_json::{Value, json};
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

fn rules(wanted: &Wanted, _specials: &mut Specials, limits: &Limits) -> Result<String, Refused> {
    match wanted {
        Wanted::JsonObject => json_text(&json!({"type": "object"}), limits),
        Wanted::JsonSchema(schema) => json_text(schema, limits),
        Wanted::Regex(regex) => {
            let pattern = Pattern::read(regex, limits.depth_max, limits.repeat_max);
            let words = pattern.and_then(|pattern| plain(&pattern)).map_err(|why| Refused::invalid("regex", why))?;
            Ok(format!("start: {}", words.lark()))
        }
        Wanted::Choice(texts) if texts.is_empty() => Err(Refused::unsatisfiable("choice", "it is empty")),
        Wanted::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| lark::literal(text)).collect();
            Ok(format!("start: {}", texts.join(" | ")))
        }
        Wanted::Lark(text) => Ok(text.clone()),
        _ => Err(Refused::unsupported("", "this kind of grammar")),
    }
}

fn json_text(schema: &Value, limits: &Limits) -> Result<String, Refused> {
    let mut rules = Rules::default();
    let start = schema::write(schema, &mut rules, limits)?;
    let mut text = format!("start: r{start}\n");
    rules.write(start, "r", &mut text).ok_or_else(|| Refused::unsatisfiable("", "no value satisfies the schema"))?;
    Ok(text)
}
