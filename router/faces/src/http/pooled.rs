//! Reads the inputs that become vectors or scores: texts, tokens or a conversation, with the fields that all pages of
//! vectors share.

use crate::http::completions::inputs;
use crate::http::conversation::conversation;
use crate::http::fields::Fields;
use crate::http::known::Endpoint;
use proto::v1::generate_request::Input;
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use router::replicas::models::truncation::CutSide;
use serde_json::Value;

const GENERATION_PROMPT: &str = "add_generation_prompt";

/// Reads a request for vectors or scores, without its tenant.
pub fn pooled_request(fields: &mut Fields) -> Result<ParsedRequest, Refusal> {
    fields.check(Endpoint::Embeddings)?;
    Ok(ParsedRequest {
        model: fields.string("model")?.unwrap_or_default(),
        prompts: prompts(fields)?,
        adds_special: fields.boolean("add_special_tokens")?,
        // The default of vLLM's encoders.
        truncation: fields.truncation(CutSide::Right)?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        cache_salt: fields.cache_salt()?,
        ..ParsedRequest::default()
    })
}

/// Whether the client requests what the model's layers return, without an activation or a length of one.
pub fn is_raw(fields: &mut Fields) -> Result<bool, Refusal> {
    Ok(fields.boolean("use_activation")? == Some(false))
}

fn prompts(fields: &mut Fields) -> Result<Vec<Input>, Refusal> {
    if fields.has("messages") {
        return chat(fields);
    }
    match fields.take("input") {
        Some(Value::Array(all)) if matches!(all.first(), Some(Value::Object(_))) => {
            fields.put("messages", all.into());
            chat(fields)
        }
        Some(input) => inputs("input", input),
        None => Err(Refusal::invalid("input", "is missing")),
    }
}

/// Puts what the model expects before texts of this use in front of each.
pub fn with_prompts(text: &ModelText, input_type: Option<&str>, prompts: &mut [Input]) -> Result<(), Refusal> {
    let prompt = input_type.filter(|name| !name.is_empty()).map_or(Ok(""), |name| text.prompt_for(name))?;
    for input in prompts {
        if let Input::Text(text) = input {
            text.insert_str(0, prompt);
        }
    }
    Ok(())
}

/// Reads one conversation, which is not to be answered.
fn chat(fields: &mut Fields) -> Result<Vec<Input>, Refusal> {
    if fields.get(GENERATION_PROMPT).is_none_or(Value::is_null) {
        fields.put(GENERATION_PROMPT, false.into());
    }
    Ok(vec![Input::Chat(conversation(fields)?)])
}
