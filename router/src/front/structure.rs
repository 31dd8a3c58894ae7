//! What an answer must be, in the terms of `lockstep.v1`: parsed, and joined with the form of a chat's calls. Knows no
//! token and no request.

use crate::refusal::Refusal;
use crate::replicas::models::talk::Talk;
use dialect::ToolChoice;
use grammar::WantedGrammar;
use proto::v1;
use proto::v1::structure::{Choices, Form};
use serde_json::{Value, json};

/// The field that a refusal names; a face has its own name for it.
pub const FIELD: &str = "structure";

/// Returns what the answer must be, or None if every text is allowed.
pub fn wanted(structure: Option<v1::Structure>, talk: Option<&Talk>) -> Result<Option<WantedGrammar>, Refusal> {
    let structure = structure.and_then(|structure| structure.form).map(form).transpose()?.flatten();
    let Some(talk) = talk else { return Ok(structure) };
    match (structure, &talk.choice) {
        // The answer is a call: it has no content to which a structure could apply.
        (None, _) | (Some(_), ToolChoice::Required | ToolChoice::Named(_)) => calls(talk),
        (Some(structure), ToolChoice::Auto) if !talk.tools.is_empty() => {
            let calls = talk.calls_format().ok_or_else(no_form)?;
            let either = json!({ "type": "or", "elements": [format_of(&structure)?, calls] });
            Ok(Some(WantedGrammar::StructuralTag(talk.behind_thought(either))))
        }
        (Some(structure), _) if talk.may_think() => {
            Ok(Some(WantedGrammar::StructuralTag(talk.behind_thought(format_of(&structure)?))))
        }
        (structure, _) => Ok(structure),
    }
}

/// Returns the calls that an answer must have, or may have in one form alone.
fn calls(talk: &Talk) -> Result<Option<WantedGrammar>, Refusal> {
    let enforced = talk.enforced(&talk.choice);
    let must = match &talk.choice {
        ToolChoice::None => false,
        ToolChoice::Auto => talk.tools.iter().any(|tool| tool.strict),
        ToolChoice::Required | ToolChoice::Named(_) => true,
    };
    if must && enforced.is_none() { Err(no_form()) } else { Ok(enforced.map(WantedGrammar::StructuralTag)) }
}

fn no_form() -> Refusal {
    let why = "cannot be enforced: the form in which this model calls tools is unknown (--tool-call-parser names it)";
    Refusal::invalid("tools", why)
}

fn both(why: &str) -> Refusal {
    Refusal::invalid(FIELD, format!("is not supported here: {why}"))
}

fn form(form: Form) -> Result<Option<WantedGrammar>, Refusal> {
    Ok(Some(match form {
        Form::JsonObject(false) => return Ok(None),
        Form::JsonObject(true) => WantedGrammar::JsonObject,
        Form::JsonSchema(schema) => WantedGrammar::JsonSchema(json_of(&schema)?),
        Form::Regex(regex) => WantedGrammar::Regex(regex),
        Form::Choice(choices) => WantedGrammar::Choice(choices.texts),
        Form::Lark(text) => WantedGrammar::Lark(text),
        Form::Ebnf(text) => WantedGrammar::Ebnf(text),
        Form::Gbnf(text) => WantedGrammar::Gbnf(text),
        Form::StructuralTag(tag) => WantedGrammar::StructuralTag(json_of(&tag)?),
    }))
}

/// Converts it back to the client's form.
pub fn said(wanted: &WantedGrammar) -> v1::Structure {
    let form = match wanted.clone() {
        WantedGrammar::JsonObject => Form::JsonObject(true),
        WantedGrammar::JsonSchema(schema) => Form::JsonSchema(schema.to_string()),
        WantedGrammar::Regex(regex) => Form::Regex(regex),
        WantedGrammar::Choice(texts) => Form::Choice(Choices { texts }),
        WantedGrammar::Lark(text) => Form::Lark(text),
        WantedGrammar::Ebnf(text) => Form::Ebnf(text),
        WantedGrammar::Gbnf(text) => Form::Gbnf(text),
        WantedGrammar::StructuralTag(tag) => Form::StructuralTag(tag.to_string()),
    };
    v1::Structure { form: Some(form) }
}

fn json_of(text: &str) -> Result<Value, Refusal> {
    serde_json::from_str(text).map_err(|error| Refusal::invalid(FIELD, format!("is not JSON: {error}")))
}

/// Returns the same as a part of a structural tag, which may stand beside others.
fn format_of(wanted: &WantedGrammar) -> Result<Value, Refusal> {
    Ok(match wanted {
        WantedGrammar::JsonObject => json!({ "type": "json_schema", "json_schema": { "type": "object" } }),
        WantedGrammar::JsonSchema(schema) => json!({ "type": "json_schema", "json_schema": schema }),
        WantedGrammar::Regex(regex) => json!({ "type": "regex", "pattern": regex }),
        WantedGrammar::Choice(texts) => {
            let texts = texts.iter().map(|text| json!({ "type": "const_string", "value": text }));
            json!({ "type": "or", "elements": texts.collect::<Vec<_>>() })
        }
        WantedGrammar::Ebnf(text) => json!({ "type": "grammar", "grammar": text }),
        WantedGrammar::StructuralTag(tag) if tag["format"].is_object() => tag["format"].clone(),
        WantedGrammar::Lark(_) | WantedGrammar::Gbnf(_) | WantedGrammar::StructuralTag(_) => {
            return Err(both("in this form it cannot stand beside thoughts or tools; a JSON schema can"));
        }
    })
}

/// vLLM takes two languages in one field, and distinguishes them by how rules are defined: `name ::= ..` is EBNF.
pub fn vllm_grammar(text: String) -> Form {
    let is_ebnf = text.lines().any(|line| !line.trim_start().starts_with(['#', '/']) && line.contains("::="));
    if is_ebnf { Form::Ebnf(text) } else { Form::Lark(text) }
}

/// Returns the length of a structure's text, in bytes.
pub fn n_bytes(structure: &v1::Structure) -> usize {
    match &structure.form {
        None | Some(Form::JsonObject(_)) => 0,
        Some(Form::Choice(choices)) => choices.texts.iter().map(String::len).sum(),
        Some(
            Form::JsonSchema(text)
            | Form::Regex(text)
            | Form::Lark(text)
            | Form::Ebnf(text)
            | Form::Gbnf(text)
            | Form::StructuralTag(text),
        ) => text.len(),
    }
}
