//! The fields of a response's request other than its input and tools, and their copies in the reply. Has no knowledge
//! of answers.

use crate::http::fields::{Fields, wrong_type};
use proto::v1::structure::Form;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};

/// Values of `include` for parts that are always included, or that belong to tools that the server would run.
const INCLUDED: [&str; 8] = [
    // A thought's item has its text, so no encrypted copy is necessary.
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "shell_call.outputs",
    "web_search_call.action.sources",
    "web_search_call.results",
];

/// The constraint on the text.
pub struct TextSettings {
    pub form: Option<Form>,
    pub shown: Value,
}

pub fn text(fields: &mut Fields) -> Result<TextSettings, Refusal> {
    let plain = || json!({ "type": "text" });
    let (mut form, mut format, mut verbosity) = (None, plain(), "medium".to_owned());
    if let Some(mut text_fields) = fields.object("text")? {
        match text_fields
            .string("verbosity")
            .map_err(|_| Refusal::invalid("text.verbosity", "must be a string"))?
            .as_deref()
        {
            None => {}
            // Accepted, although no model here reads it.
            Some(level @ ("low" | "medium" | "high")) => level.clone_into(&mut verbosity),
            Some(_) => return Err(Refusal::invalid("text.verbosity", "must be low, medium or high")),
        }
        match text_fields.take("format") {
            None => {}
            Some(Value::Object(of)) => (form, format) = format_of(Fields::of(of))?,
            Some(other) => return Err(wrong_type("text.format", "an object", &other)),
        }
    }
    Ok(TextSettings { form, shown: json!({ "format": format, "verbosity": verbosity }) })
}

fn format_of(mut format: Fields) -> Result<(Option<Form>, Value), Refusal> {
    match format.take("type").as_ref().and_then(Value::as_str) {
        Some("text") => Ok((None, json!({ "type": "text" }))),
        Some("json_object") => Ok((Some(Form::JsonObject(true)), json!({ "type": "json_object" }))),
        Some("json_schema") => {
            let schema = match format.take("schema") {
                Some(schema @ (Value::Object(_) | Value::Bool(_))) => schema,
                Some(other) => return Err(wrong_type("text.format.schema", "a JSON schema", &other)),
                None => return Err(Refusal::invalid("text.format.schema", "is missing")),
            };
            let strict = format
                .boolean("strict")
                .map_err(|_| Refusal::invalid("text.format.strict", "must be true or false"))?;
            let shown = json!({
                "type": "json_schema",
                "name": format.take("name").filter(Value::is_string).unwrap_or_else(|| "".into()),
                "description": format.take("description").filter(Value::is_string),
                "schema": schema,
                "strict": strict.unwrap_or(false),
            });
            Ok((Some(Form::JsonSchema(schema.to_string())), shown))
        }
        _ => Err(Refusal::invalid("text.format.type", "must be text, json_object or json_schema")),
    }
}

/// How much the model thinks, and the format of its thoughts.
pub struct ReasoningSettings {
    pub effort: String,
    /// As a summary, which is the whole thought: the server has no model to shorten it.
    pub in_summary: bool,
    pub shown: Value,
}

pub fn reasoning(fields: &mut Fields) -> Result<ReasoningSettings, Refusal> {
    let mut members = fields.object("reasoning")?.unwrap_or_else(|| Fields::of(Map::new()));
    let mut string = |name: &'static str| match members.take(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(wrong_type(format!("reasoning.{name}"), "a string", &other)),
    };
    let (effort, newer, older) = (string("effort")?, string("summary")?, string("generate_summary")?);
    let summary = newer.or(older);
    match summary.as_deref() {
        None | Some("auto" | "detailed") => {}
        Some(_) => {
            let why = "must be auto or detailed: the reasoning is returned whole, without a summary";
            return Err(Refusal::invalid("reasoning.summary", why));
        }
    }
    let shown = json!({ "effort": effort, "summary": summary });
    Ok(ReasoningSettings { effort: effort.unwrap_or_default(), in_summary: summary.is_some(), shown })
}

const LOGPROBS: &str = "message.output_text.logprobs";

/// Refuses values that the server cannot include. Returns the number of likely tokens if the client requests logprobs.
pub fn include(fields: &mut Fields) -> Result<Option<u32>, Refusal> {
    let n_top = fields.unsigned("top_logprobs")?;
    let mut all = match fields.take("include") {
        None => Vec::new(),
        Some(Value::Array(all)) => all,
        Some(other) => return Err(wrong_type("include", "a list of names", &other)),
    };
    let n_all = all.len();
    all.retain(|name| name != LOGPROBS);
    let needs_logprobs = all.len() < n_all || n_top.is_some_and(|n| n > 0);
    match all.iter().enumerate().find(|(_, name)| !name.as_str().is_some_and(|name| INCLUDED.contains(&name))) {
        None => Ok(needs_logprobs.then_some(n_top.unwrap_or(0))),
        Some((i, Value::String(_))) => Err(Refusal::invalid(format!("include[{i}]"), "is not supported yet")),
        Some((i, other)) => Err(wrong_type(format!("include[{i}]"), "a name", other)),
    }
}

/// Fields that change no answer, as the reply repeats them; null for a value that the field cannot have.
pub fn repeated_settings(fields: &Fields) -> Value {
    let valid_field = |name: &str, is_right: fn(&Value) -> bool| fields.get(name).filter(|value| is_right(value));
    let is_metadata = |value: &Value| value.as_object().is_some_and(|all| all.values().all(Value::is_string));
    json!({
        "metadata": valid_field("metadata", is_metadata).cloned().unwrap_or_else(|| json!({})),
        "max_tool_calls": valid_field("max_tool_calls", Value::is_u64),
        "user": valid_field("user", Value::is_string),
        "safety_identifier": valid_field("safety_identifier", Value::is_string),
        "prompt_cache_key": valid_field("prompt_cache_key", Value::is_string),
    })
}
