//! An answer in OpenAI's shapes, whole or in chunks. What differs between chat and completions is a `Shape`.

use crate::Text;
use crate::generate::{Ask, Front, Purpose, Room};
use crate::generation::{Event, Generation, Prompt};
use crate::http::chunks;
use crate::http::error::HttpError;
use crate::http::fields::Streaming;
use crate::measure::Clock;
use crate::refusal::Refusal;
use crate::resume::Resume;
use axum::Json;
use axum::response::{IntoResponse, Response};
use checkpoint::Tokenizer;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use types::TenantId;

/// How one endpoint says it. All values are members of a choice.
pub trait Shape: Send + Unpin + 'static {
    const ID_PREFIX: &'static str;
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;
    /// Where `prompt_token_ids` stand: beside each choice, which may have a prompt of its own, or once.
    const PROMPT_IN_CHOICE: bool;

    /// The member that opens a choice's stream, if there is one.
    fn opening(&self) -> Option<(&'static str, Value)>;
    /// The member that carries a piece of text; no text at the end.
    fn piece(&self, text: Option<&str>) -> (&'static str, Value);
    /// The member that carries the whole text.
    fn whole(&self, text: &str) -> (&'static str, Value);
    fn logprobs(&mut self, tokenizer: &Tokenizer, choice: u32, logprobs: &[v1::Logprob]) -> Value;
    /// The prompt at the head of an answer, as a member and its logprobs, where the endpoint repeats it.
    fn echo(&mut self, tokenizer: &Tokenizer, choice: u32, prompt: &Prompt, scored: &[v1::Logprob]) -> Option<Echo>;
}

/// A prompt that is said again.
pub struct Echo {
    pub text: String,
    /// Null unless they were asked for.
    pub logprobs: Value,
}

/// What every chunk of an answer says again.
pub struct Envelope {
    front: Arc<Front>,
    text: Arc<Text>,
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    seed: u64,
    wishes: Wishes,
}

/// What a client wants to be told besides the text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wishes {
    pub logprobs: bool,
    pub prompt_logprobs: bool,
    pub token_ids: bool,
    pub echo: bool,
    /// Of the session that it belongs to.
    pub session: Option<u64>,
    /// Nothing but the prompt is wanted: `max_tokens` was 0. A token is drawn all the same, and not told.
    pub nothing_new: bool,
}

/// A request as an endpoint has read it.
pub struct Asked {
    pub model: String,
    pub prompts: Vec<Input>,
    pub sampling: v1::Sampling,
    pub n_choices: u32,
    pub priority: i32,
    pub deadline: Option<Instant>,
    pub tenant: TenantId,
    pub streaming: Option<Streaming>,
    pub room: Room,
    pub resume: Option<Resume>,
    pub wishes: Wishes,
}

pub async fn answer<S: Shape>(front: Arc<Front>, asked: Asked, clock: Clock, shape: S) -> Result<Response, HttpError> {
    let Asked { model, prompts, sampling, n_choices, priority, deadline, tenant, streaming, room, resume, mut wishes } =
        asked;
    wishes.logprobs = sampling.logprobs.is_some();
    let ask = Ask {
        model,
        prompts,
        n_choices,
        first_choice: 0,
        purpose: Purpose::Generate(Box::new(sampling)),
        echo: wishes.echo,
        priority,
        deadline,
        tenant,
        session: wishes.session,
        resume,
        trace: clock.trace(),
        room,
        clock: Some(clock),
    };
    let mut generation = front.generate(ask).await?;
    generation.answered(front.config.waits.first_answer_max).await?;
    let envelope = Envelope::new(front, &generation, S::ID_PREFIX, wishes);
    match streaming {
        Some(streaming) => Ok(chunks::stream(envelope, shape, generation, n_choices, streaming)),
        None => Ok(whole(envelope, shape, generation, n_choices).await?),
    }
}

async fn whole<S: Shape>(
    envelope: Envelope,
    mut shape: S,
    mut generation: Generation,
    n_choices: u32,
) -> Result<Response, Refusal> {
    let n_slots = generation.prompts.len() * n_choices as usize;
    let mut choices: Vec<Whole> = (0..n_slots).map(|_| Whole::default()).collect();
    while let Some(event) = generation.next().await {
        let (slot, event) = event?;
        choices[slot as usize].hear(event);
    }
    let mut usage = Usage::new(n_choices, &envelope.wishes);
    for (slot, choice) in choices.iter().enumerate() {
        choice.finished.iter().for_each(|finished| usage.add(slot as u32, finished));
    }
    let mut values = Vec::with_capacity(n_slots);
    for (slot, choice) in choices.iter().enumerate() {
        let prompt = &generation.prompts[slot / n_choices as usize];
        values.push(choice.value(&envelope, &mut shape, slot as u32, prompt));
    }
    let mut answer = envelope.value(S::OBJECT, values);
    answer["usage"] = usage.value();
    if !S::PROMPT_IN_CHOICE
        && let (Some(first), Some(prompt)) = (choices.first(), generation.prompts.first())
    {
        envelope.tell_prompt(&mut answer, prompt, &first.scored);
    }
    Ok(Json(answer).into_response())
}

/// One choice, gathered.
#[derive(Default)]
struct Whole {
    scored: Vec<v1::Logprob>,
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<v1::Logprob>,
    finished: Option<v1::Finished>,
}

impl Whole {
    fn hear(&mut self, event: Event) {
        match event {
            Event::Prompt(prompt) => self.scored = prompt.logprobs,
            Event::Delta(delta) => {
                self.text.push_str(&delta.text);
                self.token_ids.extend(delta.token_ids);
                self.logprobs.extend(delta.logprobs);
            }
            Event::Finished(finished) => self.finished = Some(finished),
            Event::Told(_) | Event::Pooled(_) => {}
        }
    }

    fn value<S: Shape>(&self, envelope: &Envelope, shape: &mut S, slot: u32, prompt: &Prompt) -> Value {
        let echo = envelope.echo(shape, slot, prompt, &self.scored);
        let (mut text, mut logprobs) = echo.map_or((String::new(), Value::Null), |echo| (echo.text, echo.logprobs));
        let mut reason = self.finished.as_ref().map(finish_reason);
        if envelope.wishes.nothing_new {
            reason = Some("length");
        } else {
            text.push_str(&self.text);
            logprobs = joined(logprobs, envelope.logprobs_of(shape, slot, &self.logprobs));
        }
        let mut choice = choice_value(slot, shape.whole(&text), logprobs, reason);
        if envelope.wishes.token_ids {
            let told = if envelope.wishes.nothing_new { &[][..] } else { &self.token_ids };
            choice["token_ids"] = told.into();
        }
        if S::PROMPT_IN_CHOICE {
            envelope.tell_prompt(&mut choice, prompt, &self.scored);
        }
        choice
    }
}

/// Two parts of one answer's logprobs: their lists, one after the other.
fn joined(first: Value, second: Value) -> Value {
    let (Value::Object(mut first), Value::Object(second)) = (first.clone(), second.clone()) else {
        return if first.is_null() { second } else { first };
    };
    for (name, value) in second {
        match (first.get_mut(&name), value) {
            (Some(Value::Array(list)), Value::Array(more)) => list.extend(more),
            (_, value) => drop(first.insert(name, value)),
        }
    }
    Value::Object(first)
}

impl Envelope {
    fn new(front: Arc<Front>, generation: &Generation, id_prefix: &str, wishes: Wishes) -> Envelope {
        let started = &generation.started;
        Envelope {
            front,
            text: generation.text.clone(),
            id: format!("{id_prefix}{}", started.id),
            created: generation.created,
            model: started.model.clone(),
            fingerprint: format!("fp_{}", generation.replica.digest),
            seed: started.seed,
            wishes,
        }
    }

    pub fn front(&self) -> &Arc<Front> {
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

    pub fn wishes(&self) -> &Wishes {
        &self.wishes
    }

    /// Null unless they were asked for.
    pub fn logprobs_of<S: Shape>(&self, shape: &mut S, choice: u32, logprobs: &[v1::Logprob]) -> Value {
        if self.wishes.logprobs { shape.logprobs(&self.text.tokenizer, choice, logprobs) } else { Value::Null }
    }

    pub fn echo<S: Shape>(&self, shape: &mut S, choice: u32, prompt: &Prompt, scored: &[v1::Logprob]) -> Option<Echo> {
        let tokenizer = &self.text.tokenizer;
        let echo = if self.wishes.echo { shape.echo(tokenizer, choice, prompt, scored)? } else { return None };
        // Without being asked for they are computed for nobody.
        let logprobs = if self.wishes.logprobs { echo.logprobs } else { Value::Null };
        Some(Echo { logprobs, ..echo })
    }

    /// What vLLM calls `prompt_token_ids` and `prompt_logprobs`.
    pub fn tell_prompt(&self, to: &mut Value, prompt: &Prompt, scored: &[v1::Logprob]) {
        if self.wishes.token_ids {
            to["prompt_token_ids"] = prompt.ids.as_slice().into();
        }
        if self.wishes.prompt_logprobs {
            to["prompt_logprobs"] = prompt_logprobs(&self.text.tokenizer, scored);
        }
    }

    /// Whether a delta has something to say to this client.
    pub fn says(&self, delta: &v1::Delta) -> bool {
        let Wishes { logprobs, token_ids, nothing_new, .. } = self.wishes;
        let told = !delta.text.is_empty()
            || (logprobs && !delta.logprobs.is_empty())
            || (token_ids && !delta.token_ids.is_empty());
        told && !nothing_new
    }
}

/// By token, with null for the first token, which nothing predicts. A rank is known for those that were among the most
/// likely.
fn prompt_logprobs(tokenizer: &Tokenizer, scored: &[v1::Logprob]) -> Value {
    let one = |logprob: &v1::Logprob, rank: Option<usize>| {
        let text = token_text(tokenizer, logprob.token_id);
        json!({ "logprob": logprob.logprob, "rank": rank, "decoded_token": text })
    };
    let position = |scored: &v1::Logprob| {
        let mut tokens = Map::new();
        tokens.insert(scored.token_id.to_string(), one(scored, None));
        for (i, top) in scored.top.iter().enumerate() {
            tokens.insert(top.token_id.to_string(), one(top, Some(i + 1)));
        }
        Value::Object(tokens)
    };
    [Value::Null].into_iter().chain(scored.iter().map(position)).collect()
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

/// Of all choices together; the choices of one prompt share it.
pub struct Usage {
    n_choices: u32,
    nothing_new: bool,
    prompt: u32,
    cached: u32,
    completion: u32,
}

impl Usage {
    pub fn new(n_choices: u32, wishes: &Wishes) -> Usage {
        Usage { n_choices, nothing_new: wishes.nothing_new, prompt: 0, cached: 0, completion: 0 }
    }

    pub fn add(&mut self, slot: u32, finished: &v1::Finished) {
        let usage = finished.usage.unwrap_or_default();
        if slot.is_multiple_of(self.n_choices) {
            self.prompt += usage.prompt_tokens;
            self.cached += usage.cached_tokens;
        }
        if !self.nothing_new {
            self.completion += usage.completion_tokens;
        }
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
