//! An answer in OpenAI's shapes, whole or in chunks. What differs between chat and completions is a `Shape`.

use crate::generate::{Ask, Event, Front, Generation};
use crate::http::error::HttpError;
use crate::http::fields::Streaming;
use crate::http::sse;
use crate::measure::Face;
use crate::refusal::Refusal;
use axum::Json;
use axum::response::{IntoResponse, Response};
use checkpoint::Tokenizer;
use proto::v1;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio_stream::StreamExt;

/// How one endpoint says it. All values are members of a choice.
pub trait Shape: Send + Unpin + 'static {
    const ID_PREFIX: &'static str;
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;

    /// The member that opens a choice's stream, if there is one.
    fn opening(&self) -> Option<(&'static str, Value)>;
    /// The member that carries a piece of text; no text at the end.
    fn piece(&self, text: Option<&str>) -> (&'static str, Value);
    /// The member that carries the whole text.
    fn whole(&self, text: &str) -> (&'static str, Value);
    fn logprobs(&mut self, tokenizer: &Tokenizer, choice: u32, logprobs: &[v1::Logprob]) -> Value;
}

/// What every chunk of an answer says again.
pub struct Envelope {
    front: Arc<Front>,
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    seed: u64,
    logprobs: bool,
}

/// A request as an endpoint has read it.
pub struct Asked {
    pub request: v1::GenerateRequest,
    pub n_choices: u32,
    pub streaming: Option<Streaming>,
}

pub async fn answer<S: Shape>(front: Arc<Front>, asked: Asked, shape: S) -> Result<Response, HttpError> {
    let Asked { request, n_choices, streaming } = asked;
    let logprobs = request.sampling.as_ref().is_some_and(|sampling| sampling.logprobs.is_some());
    let ask = Ask { request, n_choices, deadline: None, face: Face::Http };
    let mut generation = front.generate(ask).await?;
    generation.answered(front.config.waits.first_answer_max).await?;
    let envelope = Envelope::new(front, &generation, S::ID_PREFIX, logprobs);
    match streaming {
        Some(streaming) => Ok(sse::stream(envelope, shape, generation, n_choices, streaming)),
        None => Ok(whole(envelope, shape, generation, n_choices).await?),
    }
}

async fn whole<S: Shape>(
    envelope: Envelope,
    mut shape: S,
    mut generation: Generation,
    n_choices: u32,
) -> Result<Response, Refusal> {
    let mut choices: Vec<Whole> = (0..n_choices).map(|_| Whole::default()).collect();
    while let Some(event) = generation.next().await {
        let (choice, event) = event?;
        let choice = &mut choices[choice as usize];
        match event {
            Event::Delta(delta) => {
                choice.text.push_str(&delta.text);
                choice.logprobs.extend(delta.logprobs);
            }
            Event::Finished(finished) => choice.finished = Some(finished),
        }
    }
    let mut usage = Usage::default();
    choices.iter().flat_map(|choice| &choice.finished).for_each(|finished| usage.add(finished));
    let choices = choices.iter().enumerate().map(|(i, choice)| {
        let reason = choice.finished.as_ref().map(finish_reason);
        let logprobs = envelope.logprobs_of(&mut shape, i as u32, &choice.logprobs);
        choice_value(i as u32, shape.whole(&choice.text), logprobs, reason)
    });
    let choices = choices.collect();
    let mut answer = envelope.value(S::OBJECT, choices);
    answer["usage"] = usage.value();
    Ok(Json(answer).into_response())
}

#[derive(Default)]
struct Whole {
    text: String,
    logprobs: Vec<v1::Logprob>,
    finished: Option<v1::Finished>,
}

impl Envelope {
    fn new(front: Arc<Front>, generation: &Generation, id_prefix: &str, logprobs: bool) -> Envelope {
        let started = &generation.started;
        Envelope {
            front,
            id: format!("{id_prefix}{}", started.id),
            created: unix_seconds(),
            model: started.model.clone(),
            fingerprint: format!("fp_{}", generation.replica.digest),
            seed: started.seed,
            logprobs,
        }
    }

    pub fn front(&self) -> &Front {
        &self.front
    }

    pub fn value(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "seed": self.seed,
            "choices": choices,
        })
    }

    /// Null unless they were asked for.
    pub fn logprobs_of<S: Shape>(&self, shape: &mut S, choice: u32, logprobs: &[v1::Logprob]) -> Value {
        if self.logprobs { shape.logprobs(&self.front.text.tokenizer, choice, logprobs) } else { Value::Null }
    }

    /// Whether a delta has something to say to this client.
    pub fn says(&self, delta: &v1::Delta) -> bool {
        !delta.text.is_empty() || (self.logprobs && !delta.logprobs.is_empty())
    }
}

pub fn choice_value(index: u32, member: (&'static str, Value), logprobs: Value, reason: Option<&str>) -> Value {
    let (name, value) = member;
    json!({ "index": index, name: value, "logprobs": logprobs, "finish_reason": reason })
}

pub fn finish_reason(finished: &v1::Finished) -> &'static str {
    match finished.reason() {
        v1::finished::Reason::Length => "length",
        v1::finished::Reason::Stop | v1::finished::Reason::Unspecified => "stop",
    }
}

/// Of all choices together; they share one prompt.
#[derive(Default)]
pub struct Usage {
    prompt: u32,
    cached: u32,
    completion: u32,
}

impl Usage {
    pub fn add(&mut self, finished: &v1::Finished) {
        let usage = finished.usage.unwrap_or_default();
        self.prompt = usage.prompt_tokens;
        self.cached = self.cached.max(usage.cached_tokens);
        self.completion += usage.completion_tokens;
    }

    pub fn value(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": { "cached_tokens": self.cached },
        })
    }
}

/// A token's own text: a character's part shows as a replacement character, and its bytes tell which part.
pub fn token_text(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned()
}

pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
