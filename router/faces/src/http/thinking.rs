//! How long a model may think, under each server's name for it. Has no knowledge of models.

use crate::http::fields::{Fields, wrong_type};
use router::refusal::Refusal;
use serde_json::Value;

/// The names of vLLM, llama.cpp and Qwen.
const NAMES: [&str; 3] = ["thinking_token_budget", "thinking_budget_tokens", "thinking_budget"];

/// Returns the most tokens of thought, for `v1::Chat::thinking_token_budget`. None for no limit. Several fields may set
/// it, if they agree.
pub fn budget(fields: &mut Fields) -> Result<Option<u32>, Refusal> {
    let mut found: Option<(&str, u32)> = None;
    for name in NAMES {
        let Some(value) = fields.take(name) else { continue };
        found = merge_budgets(found, name, tokens(name, &value)?)?;
    }
    if let Some(thinking) = fields.take("thinking") {
        found = merge_budgets(found, "thinking.budget_tokens", anthropic_budget(&thinking)?)?;
    }
    Ok(found.map(|(_, tokens_max)| tokens_max))
}

/// Returns the budget in Anthropic's object: `{"type": "enabled", "budget_tokens": 1024}`. An object that disables
/// thoughts, or leaves their length to the model, has none.
pub fn anthropic_budget(thinking: &Value) -> Result<Option<u32>, Refusal> {
    let Value::Object(object) = thinking else { return Err(wrong_type("thinking", "an object", thinking)) };
    match object.get("type").and_then(Value::as_str) {
        Some("enabled") => {
            object.get("budget_tokens").map_or(Ok(None), |value| tokens("thinking.budget_tokens", value))
        }
        Some("adaptive") => Ok(None),
        // The template has its own variable for this.
        Some("disabled") => Ok(Some(0)),
        _ => Err(Refusal::invalid("thinking.type".to_owned(), "must be `enabled`, `adaptive` or `disabled`")),
    }
}

fn tokens(name: &'static str, value: &Value) -> Result<Option<u32>, Refusal> {
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(n) => {
            u32::try_from(n).map(Some).map_err(|_| wrong_type(name, "a number of tokens, or -1 for no limit", value))
        }
        None => Err(wrong_type(name, "a number of tokens, or -1 for no limit", value)),
    }
}

fn merge_budgets<'a>(
    found: Option<(&'a str, u32)>,
    name: &'a str,
    tokens_max: Option<u32>,
) -> Result<Option<(&'a str, u32)>, Refusal> {
    match (found, tokens_max) {
        (Some((before, n)), Some(m)) if n != m => {
            Err(Refusal::invalid(name.to_owned(), format!("is {m}, but `{before}` is {n}: set only one of them")))
        }
        (unchanged, None) => Ok(unchanged),
        (_, Some(m)) => Ok(Some((name, m))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<Option<u32>, String> {
        let Value::Object(fields) = value else { unreachable!() };
        budget(&mut Fields::of(fields)).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn a_budget_has_many_names_and_one_meaning() {
        for (value, expected) in [
            (json!({}), None),
            (json!({ "thinking_token_budget": 7 }), Some(7)),
            (json!({ "thinking_budget_tokens": 0 }), Some(0)),
            (json!({ "thinking_budget": -1 }), None),
            (json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 } }), Some(1024)),
            (json!({ "thinking": { "type": "enabled" } }), None),
            (json!({ "thinking": { "type": "disabled" } }), Some(0)),
            (json!({ "thinking_budget": 5, "thinking_token_budget": 5 }), Some(5)),
        ] {
            assert_eq!(read(value.clone()), Ok(expected), "{value}");
        }
        for (value, part) in [
            (json!({ "thinking_budget": "5" }), "thinking_budget"),
            (json!({ "thinking_budget": -2 }), "no limit"),
            (json!({ "thinking": { "type": "on" } }), "thinking.type"),
            (json!({ "thinking": 5 }), "thinking"),
            (json!({ "thinking_budget": 5, "thinking_token_budget": 6 }), "set only one of them"),
        ] {
            let message = read(value.clone()).unwrap_err();
            assert!(message.contains(part), "{value}: {message}");
        }
    }
}
