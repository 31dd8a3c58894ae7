//! From a wish to a checked description. Pure: no vocabulary, no clock, nothing is fetched.

use crate::specials::Specials;
use crate::{Limits, Refused, Wanted, engine, lark, specials};
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

fn rules(wanted: &Wanted, _specials: &mut Specials, _limits: &Limits) -> Result<String, Refused> {
    match wanted {
        Wanted::JsonObject => schema(&json!({"type": "object"})),
        Wanted::JsonSchema(wanted) => schema(wanted),
        Wanted::Regex(regex) => Ok(format!("start: /{}/", regex.replace('/', "\\/"))),
        Wanted::Choice(texts) if texts.is_empty() => Err(Refused::unsatisfiable("choice", "it is empty")),
        Wanted::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| lark::literal(text)).collect();
            Ok(format!("start: {}", texts.join(" | ")))
        }
        Wanted::Lark(text) => Ok(text.clone()),
        _ => Err(Refused::unsupported("", "this kind of grammar")),
    }
}

/// Keywords that the engine enforces, and those that are for people.
const ENFORCED: &[&str] = &[
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "anyOf",
    "allOf",
    "$ref",
    "$defs",
    "definitions",
];
const FOR_PEOPLE: &[&str] = &[
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$schema",
    "$id",
    "deprecated",
    "readOnly",
    "writeOnly",
];

fn schema(schema: &Value) -> Result<String, Refused> {
    known(schema, "")?;
    let mut schema = schema.clone();
    if let Some(object) = schema.as_object_mut() {
        let space = r"[ ]|\n[ ]{0,16}";
        let options = json!({"whitespace_pattern": space, "json_allowed_escapes": "nrbtf\\\""});
        object.insert("x-guidance".to_owned(), options);
    }
    Ok(format!("start: %json {schema}"))
}

fn known(schema: &Value, at: &str) -> Result<(), Refused> {
    let Some(object) = schema.as_object() else { return Ok(()) };
    for (key, value) in object {
        let here = format!("{at}/{key}");
        match key.as_str() {
            "properties" | "$defs" | "definitions" => {
                let all = value.as_object().ok_or_else(|| Refused::invalid(&here, "it is not an object"))?;
                all.iter().try_for_each(|(name, schema)| known(schema, &format!("{here}/{name}")))?;
            }
            "items" | "additionalProperties" => known(value, &here)?,
            "anyOf" | "allOf" | "prefixItems" => {
                let all = value.as_array().ok_or_else(|| Refused::invalid(&here, "it is not an array"))?;
                all.iter().enumerate().try_for_each(|(i, schema)| known(schema, &format!("{here}/{i}")))?;
            }
            key if ENFORCED.contains(&key) || FOR_PEOPLE.contains(&key) => {}
            _ => return Err(Refused::unsupported(&here, format!("the keyword {key}"))),
        }
    }
    Ok(())
}
