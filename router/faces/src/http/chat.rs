//! `/v1/chat/completions`, and vLLM's and llama.cpp's variants of it. Has no knowledge of replicas.

use crate::http::answer::answer;
use crate::http::answer_content::AnswerContent;
use crate::http::conversation::{conversation, conversations};
use crate::http::custom::{CUSTOM, CustomCalls};
use crate::http::error::HttpError;
use crate::http::fields::{Fields, RequestOptions};
use crate::http::format::{AnswerFormat, PromptEcho, TokenNames, token_logprob_values};
use crate::http::known::Endpoint;
use crate::http::llama_cpp::join_begun_answer;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::prediction::prediction;
use crate::http::structure::structure;
use crate::http::{tokens, tools};
use axum::Json;
use axum::extract::State;
use axum::response::Response;
use proto::v1;
use proto::v1::generate_request::Input;
use router::config::RouterLimits;
use router::front::frontend::Frontend;
use router::front::generation::Prompt;
use router::front::parsed_request::{ParsedRequest, Purpose};
use router::front::recorder::Recorder;
use router::refusal::Refusal;
use router::replicas::models::truncation::CutSide;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub async fn chat(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    answer_page(front, request.page, request.recorder, false).await
}

/// llama.cpp's variant, which also returns how long the answer took.
pub async fn llama_chat(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    answer_page(front, request.page, request.recorder, true).await
}

/// vLLM's batch of several conversations, each with its own answers.
pub async fn batch(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let result = parse_request(page, &front.config.limits, conversations).and_then(|(parsed, options, format)| {
        match options.streaming {
            Some(_) => Err(Refusal::invalid("stream", "is not supported with several conversations")),
            None => Ok((parsed, options, format)),
        }
    });
    let (parsed, options, format) = record_refusal(&mut recorder, result.map_err(HttpError::from))?;
    answer(front, parsed, options, recorder, format).await
}

/// Counts the tokens of a chat's prompt.
pub async fn input_tokens(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let (parsed, ..) = parse_request(page, &front.config.limits, single_conversation)?;
    Ok(tokens::count_prompt_tokens(&front, parsed).await?)
}

pub async fn answer_page(
    front: Arc<Frontend>,
    page: ApiRequest,
    mut recorder: Recorder,
    of_llama_cpp: bool,
) -> Result<Response, HttpError> {
    let prompts = if of_llama_cpp { llama_cpp_conversation } else { single_conversation };
    let result = parse_request(page, &front.config.limits, prompts).map_err(HttpError::from);
    let (parsed, mut options, format) = record_refusal(&mut recorder, result)?;
    options.timings |= of_llama_cpp;
    answer(front, parsed, options, recorder, format).await
}

fn parse_request(
    mut page: ApiRequest,
    limits: &RouterLimits,
    prompts: fn(&mut Fields) -> Result<Vec<v1::Chat>, Refusal>,
) -> Result<(ParsedRequest, RequestOptions, ChatAnswerFormat), Refusal> {
    let fields = &mut page.fields;
    fields.check(Endpoint::Chat)?;
    let (is_older, custom) = (tools::uses_functions(fields), CustomCalls::new(tools::custom_names(fields)));
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let mut sampling = fields.sampling()?;
    sampling.logprobs = logprobs(fields, limits.logprobs_max)?;
    sampling.prediction = prediction(fields)?;
    let chats = prompts(fields)?;
    let n_choices = fields.n_choices()?;
    let echoed = chats.iter().map(last_assistant_text).collect();
    let format = ChatAnswerFormat { is_older, custom, echoed, n_choices };
    let parsed = ParsedRequest {
        model: fields.string("model")?.unwrap_or_default(),
        prompts: chats.into_iter().map(Input::Chat).collect(),
        n_choices,
        truncation: fields.truncation(CutSide::Left)?,
        adds_special: fields.boolean("add_special_tokens")?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        ..ParsedRequest::default()
    };
    let structure = structure(fields)?;
    let mut options = fields.request_options(&sampling)?;
    options.echo = echo;
    options.verbose = fields.boolean("verbose")?.unwrap_or(false);
    options.structure_field = structure.as_ref().map(|requested| requested.field);
    sampling.structure = structure.map(|requested| requested.structure);
    options.streaming = fields.stream_options(&sampling)?;
    let needs_progress = fields.needs_progress(options.streaming.is_some())?;
    let parsed = ParsedRequest {
        purpose: Purpose::Generate(Box::new(sampling)),
        echo: options.verbose,
        needs_progress,
        ..parsed
    };
    Ok((page.complete_request(parsed, options.streaming, limits)?, options, format))
}

/// Returns the text that an echo repeats: the assistant's last message, which the answer continues.
fn last_assistant_text(chat: &v1::Chat) -> String {
    chat.messages.last().filter(|last| last.role == "assistant").map_or_else(String::new, |last| last.content.clone())
}

fn single_conversation(fields: &mut Fields) -> Result<Vec<v1::Chat>, Refusal> {
    Ok(vec![conversation(fields)?])
}

/// Applies llama.cpp's default: its server continues a final assistant message unless a field forbids it.
fn llama_cpp_conversation(fields: &mut Fields) -> Result<Vec<v1::Chat>, Refusal> {
    let is_explicit = fields.has("continue_final_message") || fields.has("add_generation_prompt");
    if !is_explicit && join_begun_answer(fields)? {
        fields.put("continue_final_message", true.into());
        fields.put("add_generation_prompt", false.into());
    }
    single_conversation(fields)
}

fn logprobs(fields: &mut Fields, top_max: u32) -> Result<Option<u32>, Refusal> {
    let needs_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    match (needs_logprobs, fields.unsigned("top_logprobs")?) {
        (true, Some(top_n)) if top_n > top_max => {
            Err(Refusal::invalid("top_logprobs", format!("must be at most {top_max}, got {top_n}")))
        }
        (true, top_n) => Ok(Some(top_n.unwrap_or(0))),
        (false, Some(1..)) => Err(Refusal::invalid("top_logprobs", "needs `logprobs` to be true")),
        (false, _) => Ok(None),
    }
}

pub struct ChatAnswerFormat {
    /// The client uses the older fields for functions: an answer has one call at most.
    is_older: bool,
    custom: CustomCalls,
    /// The text that an echo repeats, for each conversation.
    echoed: Vec<String>,
    n_choices: u32,
}

impl ChatAnswerFormat {
    /// Returns the format for clients that use `tools`.
    pub fn tools_format() -> ChatAnswerFormat {
        ChatAnswerFormat { is_older: false, custom: CustomCalls::default(), echoed: Vec::new(), n_choices: 1 }
    }

    fn echo_text(&self, choice: u32) -> &str {
        self.echoed.get((choice / self.n_choices.max(1)) as usize).map_or("", String::as_str)
    }

    /// Returns a part of a call. The first part has only the name, unless more arrived with it.
    fn call_part(&mut self, choice: u32, part: &v1::ToolCallDelta) -> Value {
        let (kind, member, text) = call_members(self.custom.next_input(choice, part), &part.arguments);
        if part.name.is_empty() {
            return json!({ "index": part.index, kind: { member: text } });
        }
        json!({ "index": part.index, "id": part.id, "type": kind, kind: { "name": part.name, member: text } })
    }

    fn call(&self, call: &v1::ToolCall) -> Value {
        let (kind, member, text) = call_members(self.custom.whole_input(call), &call.arguments);
        json!({ "id": call.id, "type": kind, kind: { "name": call.name, member: text } })
    }

    fn add_calls(&self, message: &mut Map<String, Value>, mut calls: Vec<Value>) {
        match calls.first_mut() {
            Some(first) if self.is_older => drop(message.insert("function_call".to_owned(), first["function"].take())),
            Some(_) => drop(message.insert("tool_calls".to_owned(), calls.into())),
            None => {}
        }
    }
}

/// Adds a thought under both of vLLM's names, because clients read one or the other.
fn add_reasoning(message: &mut Map<String, Value>, reasoning: &str) {
    if !reasoning.is_empty() {
        message.insert("reasoning_content".to_owned(), reasoning.into());
        message.insert("reasoning".to_owned(), reasoning.into());
    }
}

/// Returns the kind of a call, and the member with its text: the input of a custom tool, or a function's arguments.
fn call_members(input: Option<String>, arguments: &str) -> (&'static str, &'static str, String) {
    match input {
        Some(input) => (CUSTOM, "input", input),
        None => ("function", "arguments", arguments.to_owned()),
    }
}

impl AnswerFormat for ChatAnswerFormat {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const SERVICE_TIER: Option<&'static str> = Some("default");
    const PROMPT_IN_CHOICE: bool = false;
    /// As in OpenAI's API. Clients of llama.cpp depend on it.
    const TEXT_IN_CLOSING_CHUNK: bool = false;

    /// Includes the echo, so that a client that resumes has it too.
    fn opening_member(&self, choice: u32, options: &RequestOptions) -> Option<(&'static str, Value)> {
        let echoed = Some(self.echo_text(choice)).filter(|words| options.echo && !words.is_empty());
        Some(("delta", json!({ "role": "assistant", "content": echoed, "refusal": null })))
    }

    fn delta_member(&mut self, choice: u32, delta: Option<&v1::Delta>) -> (&'static str, Value) {
        let mut message = Map::new();
        if let Some(delta) = delta {
            add_reasoning(&mut message, &delta.reasoning);
            // A delta without content still carries logprobs of tokens that have no text yet.
            if !delta.text.is_empty() || (delta.tool_calls.is_empty() && message.is_empty()) {
                message.insert("content".to_owned(), delta.text.as_str().into());
            }
            let parts = delta.tool_calls.iter().map(|part| self.call_part(choice, part)).collect();
            self.add_calls(&mut message, parts);
        }
        ("delta", Value::Object(message))
    }

    fn whole_member(&self, answer: &AnswerContent) -> (&'static str, Value) {
        let is_silent = answer.text.is_empty() && !(answer.calls.is_empty() && answer.reasoning.is_empty());
        let content = if is_silent { Value::Null } else { answer.text.as_str().into() };
        let mut message = Map::from_iter([("role".to_owned(), "assistant".into()), ("content".to_owned(), content)]);
        message.insert("refusal".to_owned(), Value::Null);
        message.insert("annotations".to_owned(), json!([]));
        add_reasoning(&mut message, &answer.reasoning);
        self.add_calls(&mut message, answer.calls.iter().map(|call| self.call(call)).collect());
        ("message", Value::Object(message))
    }

    fn tool_calls_reason(&self) -> &'static str {
        if self.is_older { "function_call" } else { "tool_calls" }
    }

    fn logprobs(&mut self, names: TokenNames<'_>, _: u32, logprobs: &[v1::Logprob]) -> Value {
        json!({ "content": token_logprob_values(names, logprobs), "refusal": null })
    }

    fn echo(&mut self, _: TokenNames<'_>, choice: u32, _: &Prompt, _: &[v1::Logprob]) -> Option<PromptEcho> {
        Some(PromptEcho { text: self.echo_text(choice).to_owned(), logprobs: Value::Null })
    }
}
