//! The answer of `/completion` and `/infill`: one object, a list of them for several prompts, or events without a last
//! `[DONE]`.

use crate::http::certificate;
use crate::http::error::HttpError;
use crate::http::format::token_text;
use crate::http::llama_cpp::completion::to_http_error;
use crate::http::llama_cpp::settings::resolved_settings;
use crate::http::sse::{self, EventWriter};
use crate::http::stopwatch::Stopwatch;
use crate::http::structure::rename_field;
use crate::http::timings::{add_progress, timings};
use axum::Json;
use axum::response::{IntoResponse, Response};
use checkpoint::Tokenizer;
use proto::v1;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent, SideOutput};
use router::front::parsed_request::ParsedRequest;
use router::front::recorder::Recorder;
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio_stream::StreamExt;

/// There are no slots. In a request this means any slot.
const ANY_SLOT: i32 = -1;

/// The parts that a client requests in addition to the text.
#[derive(Default)]
pub struct CompletionOptions {
    pub is_stream: bool,
    pub tokens: bool,
    /// Each event of a stream includes the times so far.
    pub timings_in_each: bool,
    /// The members of the answer to return, each by its path. Empty: all.
    pub members: Vec<String>,
    /// `n_predict` was 0: one token is sampled and not sent.
    pub is_prompt_only: bool,
    /// The request's field that constrains the answer, for refusals.
    pub structure_field: Option<&'static str>,
    /// The sampling parameters of the request.
    pub settings: Value,
}

pub async fn answer(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    options: CompletionOptions,
    recorder: Recorder,
    watch: Stopwatch,
) -> Result<Response, HttpError> {
    let (is_stream, n_choices) = (options.is_stream, parsed.n_choices);
    let named = |refusal| to_http_error(rename_field(refusal, options.structure_field));
    let mut generation = front.generate(parsed, recorder).await.map_err(named)?;
    let mut writer = CompletionWriter::of(&generation, options, watch, n_choices);
    if is_stream {
        return Ok(sse::stream(writer, generation, front));
    }
    let n_slots = generation.prompts.len() * n_choices as usize;
    let mut values = vec![Value::Null; n_slots];
    while let Some(event) = generation.next().await {
        let (slot, event) = event.map_err(to_http_error)?;
        match event {
            GenerationEvent::Delta(delta) => writer.add_delta(slot, delta, true),
            GenerationEvent::Finished(finished) => {
                values[slot as usize] = writer.final_value(slot, &finished, &generation)
            }
            GenerationEvent::Aside(_) => {}
        }
    }
    let body = if n_slots == 1 { values.remove(0) } else { values.into() };
    Ok(certificate::with_headers(Json(body).into_response(), &generation.started))
}

struct CompletionWriter {
    options: CompletionOptions,
    text: Arc<ModelText>,
    watch: Stopwatch,
    n_choices: u32,
    choices: Vec<ChoiceOutput>,
}

/// The text and tokens of one choice so far.
#[derive(Clone, Default)]
struct ChoiceOutput {
    n_tokens: u32,
    has_new_line: bool,
    /// Collected for a whole answer.
    content: String,
    tokens: Vec<u32>,
    logprobs: Vec<v1::Logprob>,
}

impl CompletionWriter {
    fn of(generation: &Generation, options: CompletionOptions, watch: Stopwatch, n_choices: u32) -> CompletionWriter {
        let choices = vec![ChoiceOutput::default(); generation.prompts.len() * n_choices as usize];
        CompletionWriter { options, text: generation.text.clone(), watch, n_choices, choices }
    }

    fn add_delta(&mut self, slot: u32, delta: v1::Delta, keep: bool) {
        self.watch.mark_first_token();
        if self.options.is_prompt_only {
            return;
        }
        let choice = &mut self.choices[slot as usize];
        choice.n_tokens += delta.token_ids.len() as u32;
        choice.has_new_line |= delta.text.contains('\n');
        if keep {
            choice.content.push_str(&delta.text);
            choice.tokens.extend(delta.token_ids);
            choice.logprobs.extend(delta.logprobs);
        }
    }

    /// Returns a piece of an answer, or the whole answer.
    fn content_value(
        &self,
        slot: u32,
        content: &str,
        tokens: &[u32],
        logprobs: &[v1::Logprob],
        n_prompt: usize,
    ) -> Value {
        let mut value = json!({
            "index": slot,
            "content": content,
            "tokens": tokens,
            "id_slot": ANY_SLOT,
            "stop": false,
            "tokens_predicted": self.choices[slot as usize].n_tokens,
            "tokens_evaluated": n_prompt,
        });
        if !logprobs.is_empty() {
            value["completion_probabilities"] =
                logprobs.iter().map(|logprob| probability(&self.text.tokenizer, logprob)).collect();
        }
        value
    }

    fn final_value(&self, slot: u32, finished: &v1::Finished, generation: &Generation) -> Value {
        let (choice, prompt) = (&self.choices[slot as usize], &generation.prompts[(slot / self.n_choices) as usize]);
        let tokens = if self.options.tokens { choice.tokens.as_slice() } else { &[] };
        let mut value = self.content_value(slot, &choice.content, tokens, &choice.logprobs, prompt.ids.len());
        let usage = finished.usage.unwrap_or_default();
        let (context, seed) = (generation.replica.context, generation.started.seed);
        value["stop"] = true.into();
        value["model"] = generation.started.model.as_str().into();
        value["generation_settings"] = resolved_settings(&self.options.settings, &self.text, context, seed);
        value["prompt"] = prompt.text.as_deref().unwrap_or_default().into();
        value["has_new_line"] = choice.has_new_line.into();
        value["truncated"] = false.into();
        value["stop_type"] = stop_type(finished, self.options.is_prompt_only).into();
        value["stopping_word"] = if self.options.is_prompt_only { "" } else { finished.stop.as_str() }.into();
        value["tokens_cached"] = usage.cached_tokens.into();
        value["timings"] = timings(&self.watch, Some(&usage), choice.n_tokens);
        certificate::add(&mut value, finished);
        if self.options.members.is_empty() { value } else { select_paths(&self.options.members, &value) }
    }
}

/// Returns the members that the client requested, under their paths.
fn select_paths(paths: &[String], value: &Value) -> Value {
    let member = |path: &String| {
        let found = path.split('/').try_fold(value, |at, name| at.get(name))?;
        Some((path.clone(), found.clone()))
    };
    Value::Object(paths.iter().filter_map(member).collect())
}

fn stop_type(finished: &v1::Finished, is_prompt_only: bool) -> &'static str {
    match finished.reason() {
        _ if is_prompt_only => "limit",
        v1::finished::Reason::Length => "limit",
        _ if !finished.stop.is_empty() => "word",
        _ => "eos",
    }
}

fn probability(tokenizer: &Tokenizer, logprob: &v1::Logprob) -> Value {
    let one = |logprob: &v1::Logprob| {
        let (id, bytes) = (logprob.token_id, tokenizer.token_bytes(logprob.token_id));
        json!({ "id": id, "token": token_text(tokenizer, id), "bytes": bytes, "logprob": logprob.logprob })
    };
    let mut value = one(logprob);
    value["top_logprobs"] = logprob.top.iter().map(one).collect();
    value
}

impl EventWriter for CompletionWriter {
    fn append_opening(&mut self, _: &Generation, _: &mut String) {}

    fn append_event(&mut self, slot: u32, event: GenerationEvent, generation: &Generation, out: &mut String) {
        match event {
            GenerationEvent::Delta(delta) => {
                let n_prompt = generation.prompts[(slot / self.n_choices) as usize].ids.len();
                self.add_delta(slot, v1::Delta { logprobs: Vec::new(), ..delta.clone() }, false);
                if !self.options.is_prompt_only {
                    let mut piece = self.content_value(slot, &delta.text, &delta.token_ids, &delta.logprobs, n_prompt);
                    if self.options.timings_in_each {
                        piece["timings"] = timings(&self.watch, None, self.choices[slot as usize].n_tokens);
                    }
                    sse::write(out, None, &piece);
                }
            }
            GenerationEvent::Aside(SideOutput::Progress(progress)) => {
                let mut piece = self.content_value(slot, "", &[], &[], progress.total as usize);
                add_progress(&mut piece, &mut self.watch, progress, self.options.timings_in_each);
                sse::write(out, None, &piece);
            }
            GenerationEvent::Finished(finished) => {
                sse::write(out, None, &self.final_value(slot, &finished, generation))
            }
            GenerationEvent::Aside(_) => {}
        }
    }

    fn append_ending(&mut self, _: &mut String) {}

    fn append_failure(&mut self, refusal: Refusal, out: &mut String) {
        sse::write(out, None, &to_http_error(refusal).body());
    }
}
