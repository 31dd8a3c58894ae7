//! `/inference/v1/generate`: tokens in, tokens out. Neither side contains text, even if a request has stop strings.

use crate::http::certificate;
use crate::http::error::HttpError;
use crate::http::format::{TokenNames, finish_reason, stop_reason, token_logprob_values};
use crate::http::known::Endpoint;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::sse::{self, EventWriter};
use crate::http::vllm::params;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use proto::v1;
use proto::v1::generate_request::Input;
use router::config::RouterLimits;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent};
use router::front::parsed_request::{ParsedRequest, Purpose};
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio_stream::StreamExt;

pub async fn generate(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let result = parse_request(page, &front.config.limits).map_err(to_http_error);
    let (parsed, options) = record_refusal(&mut recorder, result)?;
    let n_choices = parsed.n_choices;
    let mut generation = front.generate(parsed, recorder).await.map_err(to_http_error)?;
    let mut writer =
        TokenWriter { id: options.id, logprobs: options.logprobs, text: generation.text.clone(), last: None };
    if writer.id.is_empty() {
        writer.id.clone_from(&generation.started.id);
    }
    if options.is_stream {
        return Ok(sse::stream(writer, generation, &front));
    }
    let mut choices = vec![(v1::Delta::default(), v1::Finished::default()); n_choices as usize];
    while let Some(event) = generation.next().await {
        let (slot, event) = event.map_err(to_http_error)?;
        let (output, end) = &mut choices[slot as usize];
        match event {
            GenerationEvent::Delta(delta) => {
                output.token_ids.extend(delta.token_ids);
                output.logprobs.extend(delta.logprobs);
            }
            GenerationEvent::Finished(finished) => *end = finished,
            GenerationEvent::Aside(_) => {}
        }
    }
    let values = choices
        .iter()
        .enumerate()
        .map(|(slot, (choice_output, end))| writer.choice(slot as u32, choice_output, Some(end)));
    let mut reply = writer.value(values.collect());
    reply["usage"] = usage(choices.iter().map(|(_, finished)| finished));
    Ok(certificate::with_headers(Json(reply).into_response(), &generation.started))
}

struct GenerateOptions {
    /// The client's own name for the request; empty if it has none.
    id: String,
    is_stream: bool,
    logprobs: bool,
}

fn to_http_error(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[("text", "token_ids")]))
}

fn parse_request(mut page: ApiRequest, limits: &RouterLimits) -> Result<(ParsedRequest, GenerateOptions), Refusal> {
    let fields = &mut page.fields;
    let (mut sampling, n_choices) = params::read(fields)?;
    // Only OpenAI's pages return scores of the prompt.
    if sampling.prompt_logprobs.take().is_some() {
        return Err(Refusal::invalid("prompt_logprobs", "is not supported here"));
    }
    let is_stream = fields.boolean("stream")?.unwrap_or(false);
    let options = GenerateOptions {
        id: fields.string("request_id")?.unwrap_or_default(),
        is_stream,
        logprobs: sampling.logprobs.is_some(),
    };
    let ids = fields.token_ids("token_ids")?.ok_or_else(|| Refusal::invalid("token_ids", "is missing"))?;
    if fields.take("features").is_some() {
        return Err(Refusal::invalid("features", "is not supported; only tokens are"));
    }
    let parsed = ParsedRequest {
        model: fields.string("model")?.unwrap_or_default(),
        prompts: vec![Input::TokenIds(v1::TokenIds { ids })],
        n_choices,
        purpose: Purpose::Generate(Box::new(sampling)),
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        ..ParsedRequest::default()
    };
    fields.check(Endpoint::Completions)?;
    fields.refuse(&["suffix", "truncate_prompt_tokens"])?;
    Ok((page.complete_unresumable_request(parsed, limits)?, options))
}

fn usage<'a>(all: impl Iterator<Item = &'a v1::Finished>) -> Value {
    let (mut prompt, mut cached, mut completion) = (0, 0, 0);
    for usage in all.filter_map(|finished| finished.usage) {
        // All choices have one prompt.
        (prompt, cached) = (usage.prompt_tokens, usage.cached_tokens);
        completion += usage.completion_tokens;
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

struct TokenWriter {
    id: String,
    logprobs: bool,
    text: Arc<ModelText>,
    /// The last tokens of a choice, whose finish reason is the next event: each event has tokens.
    last: Option<v1::Delta>,
}

impl TokenWriter {
    fn value(&self, choices: Vec<Value>) -> Value {
        json!({ "request_id": self.id, "choices": choices, "prompt_logprobs": null, "kv_transfer_params": null })
    }

    /// Returns logprobs in the format of OpenAI's pages, with token ids as names. Without requested alternatives, the
    /// token itself is the only likely one.
    fn logprob_values(&self, logprobs: &[v1::Logprob]) -> Vec<Value> {
        let mut values = token_logprob_values(TokenNames::texts(&self.text.tokenizer), logprobs);
        for (value, logprob) in values.iter_mut().zip(logprobs) {
            value["token_id"] = logprob.token_id.into();
            let likely = logprob.top.iter().map(|top| json!({ "token_id": top.token_id, "logprob": top.logprob }));
            let own = || json!({ "token_id": logprob.token_id, "logprob": logprob.logprob });
            let likely: Vec<Value> = likely.collect();
            value["top_logprobs"] = if likely.is_empty() { vec![own()] } else { likely }.into();
        }
        values
    }

    fn choice(&self, index: u32, output: &v1::Delta, end: Option<&v1::Finished>) -> Value {
        let logprobs = self.logprobs.then(|| json!({ "content": self.logprob_values(&output.logprobs) }));
        let reason = end.map(finish_reason);
        let mut choice =
            json!({ "index": index, "token_ids": output.token_ids, "logprobs": logprobs, "finish_reason": reason });
        choice["stop_reason"] = end.map_or(Value::Null, stop_reason);
        end.iter().for_each(|finished| certificate::add(&mut choice, finished));
        choice
    }
}

impl EventWriter for TokenWriter {
    fn append_opening(&mut self, _: &Generation, _: &mut String) {}

    fn append_event(&mut self, slot: u32, event: GenerationEvent, generation: &Generation, out: &mut String) {
        let choice = match event {
            GenerationEvent::Delta(delta) if generation.ends_next(slot) => {
                self.last = Some(delta);
                return;
            }
            GenerationEvent::Delta(delta) => self.choice(slot, &delta, None),
            GenerationEvent::Finished(finished) => {
                let last = self.last.take().unwrap_or_default();
                self.choice(slot, &last, Some(&finished))
            }
            GenerationEvent::Aside(_) => return,
        };
        sse::write(out, None, &self.value(vec![choice]));
    }

    fn append_ending(&mut self, out: &mut String) {
        out.push_str("data: [DONE]\n\n");
    }

    fn append_failure(&mut self, refusal: Refusal, out: &mut String) {
        sse::write(out, None, &to_http_error(refusal).body());
    }
}
