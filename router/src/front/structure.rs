//! What an answer must be, in the terms of `lockstep.v1`: parsed, and joined with the form of a chat's calls. Knows no
//! token and no request.

use crate::refusal::Refusal;
use crate::replicas::models::talk::AnswerParseContext;
use dialect::ToolChoice;
use grammar::GrammarSpec;
use proto::v1;
use proto::v1::structure::{Choices, Form};
use serde_json::{Value, json};

/// The field that a refusal names; a face has its own name for it.
pub const FIELD: &str = "structure";

/// Returns what the answer must be, or None if every text is allowed.
pub fn grammar_spec(
    structure: Option<v1::Structure>,
    talk: Option<&AnswerParseContext>,
) -> Result<Option<GrammarSpec>, Refusal> {
    let structure = structure.and_then(|structure| structure.form).map(form).transpose()?.flatten();
    let Some(talk) = talk else { return Ok(structure) };
    match (structure, &talk.choice) {
        // The answer is a call: it has no content to which a structure could apply.
        (None, _) | (Some(_), ToolChoice::Required | ToolChoice::Named(_)) => calls(talk),
        (Some(structure), ToolChoice::Auto) if !talk.tools.is_empty() => {
            let calls = talk.calls_format().ok_or_else(no_form)?;
            let either = json!({ "type": "or", "elements": [format_of(&structure)?, calls] });
            Ok(Some(GrammarSpec::StructuralTag(talk.put_after_thought(either))))
        }
        (Some(structure), _) if talk.may_think() => {
            Ok(Some(GrammarSpec::StructuralTag(talk.put_after_thought(format_of(&structure)?))))
        }
        (structure, _) => Ok(structure),
    }
}

/// Returns the calls that an answer must have, or may have in one form alone.
fn calls(talk: &AnswerParseContext) -> Result<Option<GrammarSpec>, Refusal> {
    let enforced = talk.structural_tag(&talk.choice);
    let must = match &talk.choice {
        ToolChoice::None => false,
        ToolChoice::Auto => talk.tools.iter().any(|tool| tool.strict),
        ToolChoice::Required | ToolChoice::Named(_) => true,
    };
    if must && enforced.is_none() { Err(no_form()) } else { Ok(enforced.map(GrammarSpec::StructuralTag)) }
}

fn no_form() -> Refusal {
    let why = "cannot be enforced: the model's tool call format is unknown (set --tool-call-parser)";
    Refusal::invalid("tools", why)
}

fn unsupported(why: &str) -> Refusal {
    Refusal::invalid(FIELD, format!("is not supported here: {why}"))
}

fn form(form: Form) -> Result<Option<GrammarSpec>, Refusal> {
    Ok(Some(match form {
        Form::JsonObject(false) => return Ok(None),
        Form::JsonObject(true) => GrammarSpec::JsonObject,
        Form::JsonSchema(schema) => GrammarSpec::JsonSchema(json_of(&schema)?),
        Form::Regex(regex) => GrammarSpec::Regex(regex),
        Form::Choice(choices) => GrammarSpec::Choice(choices.texts),
        Form::Lark(text) => GrammarSpec::Lark(text),
        Form::Ebnf(text) => GrammarSpec::Ebnf(text),
        Form::Gbnf(text) => GrammarSpec::Gbnf(text),
        Form::StructuralTag(tag) => GrammarSpec::StructuralTag(json_of(&tag)?),
    }))
}

/// Converts it back to the client's form.
pub fn to_structure(spec: &GrammarSpec) -> v1::Structure {
    let form = match spec.clone() {
        GrammarSpec::JsonObject => Form::JsonObject(true),
        GrammarSpec::JsonSchema(schema) => Form::JsonSchema(schema.to_string()),
        GrammarSpec::Regex(regex) => Form::Regex(regex),
        GrammarSpec::Choice(texts) => Form::Choice(Choices { texts }),
        GrammarSpec::Lark(text) => Form::Lark(text),
        GrammarSpec::Ebnf(text) => Form::Ebnf(text),
        GrammarSpec::Gbnf(text) => Form::Gbnf(text),
        GrammarSpec::StructuralTag(tag) => Form::StructuralTag(tag.to_string()),
    };
    v1::Structure { form: Some(form) }
}

fn json_of(text: &str) -> Result<Value, Refusal> {
    serde_json::from_str(text).map_err(|error| Refusal::invalid(FIELD, format!("is not JSON: {error}")))
}

/// Converts a grammar to one element of a structural tag.
fn format_of(spec: &GrammarSpec) -> Result<Value, Refusal> {
    Ok(match spec {
        GrammarSpec::JsonObject => json!({ "type": "json_schema", "json_schema": { "type": "object" } }),
        GrammarSpec::JsonSchema(schema) => json!({ "type": "json_schema", "json_schema": schema }),
        GrammarSpec::Regex(regex) => json!({ "type": "regex", "pattern": regex }),
        GrammarSpec::Choice(texts) => {
            let texts = texts.iter().map(|text| json!({ "type": "const_string", "value": text }));
            json!({ "type": "or", "elements": texts.collect::<Vec<_>>() })
        }
        GrammarSpec::Ebnf(text) => json!({ "type": "grammar", "grammar": text }),
        GrammarSpec::StructuralTag(tag) if tag["format"].is_object() => tag["format"].clone(),
        GrammarSpec::Lark(_) | GrammarSpec::Gbnf(_) | GrammarSpec::StructuralTag(_) => {
            return Err(unsupported("this form cannot be combined with reasoning or tools; use a JSON schema"));
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
