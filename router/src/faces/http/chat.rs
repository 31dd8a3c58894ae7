//! `/v1/chat/completions`.

use crate::config::RouterLimits;
use crate::faces::http::answer::answer;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::{Fields, Wishes, wrong};
use crate::faces::http::format::{AnswerFormat, Echo, token_text};
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, counted, read};
use crate::front::ask::{Ask, Purpose};
use crate::front::frontend::Frontend;
use crate::front::generation::Prompt;
use crate::front::recorder::{Caller, Face, Recorder};
use crate::refusal::Refusal;
use axum::extract::{Request, State};
use axum::response::Response;
use checkpoint::Tokenizer;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub async fn chat(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let read = read(&front, request).await;
    let page = counted(&mut recorder, read)?;
    let (ask, wishes) = counted(&mut recorder, ask(page, &front.config.limits).map_err(HttpError::from))?;
    answer(front, ask, wishes, recorder, Chat).await
}

fn ask(mut page: Page, limits: &RouterLimits) -> Result<(Ask, Wishes), Refusal> {
    let fields = &mut page.fields;
    fields.check(Endpoint::Chat)?;
    let mut sampling = fields.sampling()?;
    sampling.logprobs = logprobs(fields, limits.logprobs_max)?;
    let ask = Ask {
        model: fields.string("model")?.unwrap_or_default(),
        prompts: vec![Input::Chat(conversation(fields)?)],
        n_choices: fields.n_choices()?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        ..Ask::default()
    };
    let mut wishes = fields.wishes(&sampling)?;
    wishes.streaming = fields.stream(&sampling)?;
    let ask = Ask { purpose: Purpose::Generate(Box::new(sampling)), ..ask };
    Ok((page.finished(ask, wishes.streaming, limits)?, wishes))
}

fn logprobs(fields: &mut Fields, top_max: u32) -> Result<Option<u32>, Refusal> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    match (wanted, fields.unsigned("top_logprobs")?) {
        (true, Some(top_n)) if top_n > top_max => {
            Err(Refusal::invalid("top_logprobs", format!("must be at most {top_max}, and is {top_n}")))
        }
        (true, top_n) => Ok(Some(top_n.unwrap_or(0))),
        (false, Some(1..)) => Err(Refusal::invalid("top_logprobs", "needs `logprobs` to be true")),
        (false, _) => Ok(None),
    }
}

pub fn conversation(fields: &mut Fields) -> Result<v1::Chat, Refusal> {
    let messages = match fields.take("messages") {
        Some(Value::Array(messages)) => messages,
        Some(other) => return Err(wrong("messages", "a list of messages", &other)),
        None => return Err(Refusal::invalid("messages", "is missing")),
    };
    if messages.is_empty() {
        return Err(Refusal::invalid("messages", "there are none"));
    }
    let messages = messages.into_iter().enumerate().map(|(i, value)| message(i, value)).collect::<Result<_, _>>()?;
    Ok(v1::Chat { messages, add_generation_prompt: fields.boolean("add_generation_prompt")? })
}

fn message(i: usize, value: Value) -> Result<v1::ChatMessage, Refusal> {
    let Value::Object(mut message) = value else {
        return Err(wrong(format!("messages[{i}]"), "an object", &value));
    };
    for field in ["tool_calls", "function_call", "audio", "tool_call_id"] {
        if message
            .get(field)
            .is_some_and(|value| !value.is_null() && value.as_array().is_none_or(|all| !all.is_empty()))
        {
            return Err(invalid(format!("messages[{i}].{field}"), "is not supported yet"));
        }
    }
    let role = role(i, &mut message)?;
    let content = match message.remove("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => text_of(i, parts)?,
        // A reply without text, as a client sends it back.
        None | Some(Value::Null) if role == "assistant" => String::new(),
        other => return Err(wrong(format!("messages[{i}].content"), "a string or a list of parts", &other.into())),
    };
    Ok(v1::ChatMessage { role, content })
}

fn role(i: usize, message: &mut Map<String, Value>) -> Result<String, Refusal> {
    let role = message.remove("role").unwrap_or_default();
    match role.as_str() {
        Some(role @ ("system" | "user" | "assistant")) => Ok(role.to_owned()),
        // The newer name of the same role.
        Some("developer") => Ok("system".to_owned()),
        Some("tool" | "function") => Err(invalid(format!("messages[{i}].role"), "tools are not supported yet")),
        _ => Err(invalid(format!("messages[{i}].role"), "must be system, developer, user or assistant")),
    }
}

/// Joins parts of text as lines of one text, as other servers do for templates that take only strings.
fn text_of(i: usize, parts: Vec<Value>) -> Result<String, Refusal> {
    let text = |(j, part): (usize, &Value)| match (part.get("type").and_then(Value::as_str), part.get("text")) {
        (Some("text"), Some(Value::String(text))) => Ok(text.clone()),
        (Some("text"), _) => Err(invalid(format!("messages[{i}].content[{j}].text"), "must be a string")),
        _ => Err(invalid(format!("messages[{i}].content[{j}].type"), "is not supported yet; only `text` is")),
    };
    let lines: Vec<String> = parts.iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(lines.join("\n"))
}

fn invalid(field: String, message: &str) -> Refusal {
    Refusal::Invalid { field: field.into(), message: message.to_owned() }
}

struct Chat;

impl AnswerFormat for Chat {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const PROMPT_IN_CHOICE: bool = false;

    fn opening(&self) -> Option<(&'static str, Value)> {
        Some(("delta", json!({ "role": "assistant", "content": "" })))
    }

    fn piece(&self, text: Option<&str>) -> (&'static str, Value) {
        ("delta", text.map_or_else(|| json!({}), |text| json!({ "content": text })))
    }

    fn whole(&self, text: &str) -> (&'static str, Value) {
        ("message", json!({ "role": "assistant", "content": text, "refusal": null }))
    }

    fn logprobs(&mut self, tokenizer: &Tokenizer, _: u32, logprobs: &[v1::Logprob]) -> Value {
        let one = |logprob: &v1::Logprob| {
            let bytes = tokenizer.token_bytes(logprob.token_id);
            json!({ "token": token_text(tokenizer, logprob.token_id), "logprob": logprob.logprob, "bytes": bytes })
        };
        let content = logprobs.iter().map(|logprob| {
            let mut content = one(logprob);
            content["top_logprobs"] = logprob.top.iter().map(one).collect();
            content
        });
        json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
    }

    /// Chat has no echo.
    fn echo(&mut self, _: &Tokenizer, _: u32, _: &Prompt, _: &[v1::Logprob]) -> Option<Echo> {
        None
    }
}
