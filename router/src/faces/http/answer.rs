//! An answer in OpenAI's shapes: whole, or passed to `chunks`.

use crate::faces::http::error::HttpError;
use crate::faces::http::fields::Wishes;
use crate::faces::http::format::{AnswerFormat, Envelope, UsageSum, choice_value, stop_reason};
use crate::faces::http::said::SaidAnswer;
use crate::faces::http::stopwatch::Stopwatch;
use crate::faces::http::structure::renamed;
use crate::faces::http::{certificate, chunks};
use crate::front::ask::Ask;
use crate::front::frontend::Frontend;
use crate::front::generation::{Aside, Generation, GenerationEvent, Prompt};
use crate::front::recorder::Recorder;
use crate::refusal::Refusal;
use axum::Json;
use axum::response::{IntoResponse, Response};
use proto::v1;
use serde_json::Value;
use std::sync::Arc;
use tokio_stream::StreamExt;

pub async fn answer<F: AnswerFormat>(
    front: Arc<Frontend>,
    ask: Ask,
    wishes: Wishes,
    recorder: Recorder,
    format: F,
) -> Result<Response, HttpError> {
    let (n_choices, watch) = (ask.n_choices, Stopwatch::start());
    let generation = front.generate(ask, recorder).await;
    let generation = generation.map_err(|refusal| renamed(refusal, wishes.structure_field))?;
    let envelope = Envelope::new::<F>(front, &generation, wishes, watch);
    match wishes.streaming {
        Some(streaming) => Ok(chunks::stream(envelope, format, generation, n_choices, streaming)),
        None => Ok(whole(envelope, format, generation, n_choices).await?),
    }
}

async fn whole<S: AnswerFormat>(
    mut envelope: Envelope,
    mut shape: S,
    mut generation: Generation,
    n_choices: u32,
) -> Result<Response, Refusal> {
    let n_slots = generation.prompts.len() * n_choices as usize;
    let mut choices: Vec<Whole> = (0..n_slots).map(|_| Whole::default()).collect();
    while let Some(event) = generation.next().await {
        let (slot, event) = event?;
        envelope.hear(&event, &generation);
        choices[slot as usize].hear(event);
    }
    let mut usage = UsageSum::new(n_choices, envelope.wishes());
    for (slot, choice) in choices.iter().enumerate() {
        choice.finished.iter().for_each(|finished| usage.add(slot as u32, finished));
    }
    let prompt_in_choice = S::PROMPT_IN_CHOICE || generation.prompts.len() > 1;
    let mut values = Vec::with_capacity(n_slots);
    for (slot, choice) in choices.iter_mut().enumerate() {
        let prompt = &generation.prompts[slot / n_choices as usize];
        values.push(choice.value(&envelope, &mut shape, slot as u32, prompt, prompt_in_choice));
    }
    let mut answer = envelope.value(S::OBJECT, values);
    answer["usage"] = usage.value();
    envelope.tell_aside(&mut answer, &usage);
    envelope.tell_metrics(&mut answer, n_slots, &usage);
    if !prompt_in_choice && let (Some(first), Some(prompt)) = (choices.first(), generation.prompts.first()) {
        envelope.tell_whole_prompt(&mut answer, prompt, &first.scored);
    }
    Ok(certificate::with_headers(Json(answer).into_response(), &generation.started))
}

/// One choice, collected until it has ended.
#[derive(Default)]
struct Whole {
    scored: Vec<v1::Logprob>,
    said: SaidAnswer,
    token_ids: Vec<u32>,
    logprobs: Vec<v1::Logprob>,
    finished: Option<v1::Finished>,
}

impl Whole {
    fn hear(&mut self, event: GenerationEvent) {
        match event {
            GenerationEvent::Aside(Aside::Prompt(prompt)) => self.scored = prompt.logprobs,
            GenerationEvent::Delta(delta) => {
                self.said.add(&delta);
                self.token_ids.extend(delta.token_ids);
                self.logprobs.extend(delta.logprobs);
            }
            GenerationEvent::Finished(finished) => self.finished = Some(finished),
            GenerationEvent::Aside(_) => {}
        }
    }

    fn value<S: AnswerFormat>(
        &mut self,
        envelope: &Envelope,
        shape: &mut S,
        slot: u32,
        prompt: &Prompt,
        prompt_in_choice: bool,
    ) -> Value {
        let echo = envelope.echo(shape, slot, prompt, &self.scored);
        let (text, mut logprobs) = echo.map_or((String::new(), Value::Null), |echo| (echo.text, echo.logprobs));
        let mut reason = self.finished.as_ref().map(|finished| shape.finish_reason(finished));
        if envelope.wishes().nothing_new {
            reason = Some("length");
            self.said = SaidAnswer::of_text(text);
        } else {
            self.said.text.insert_str(0, &text);
            logprobs = joined(logprobs, envelope.logprobs_of(shape, slot, &self.logprobs));
        }
        let mut choice = choice_value(slot, shape.whole(&self.said), logprobs, reason);
        choice["stop_reason"] = self.finished.as_ref().map_or(Value::Null, stop_reason);
        choice["token_ids"] = Value::Null;
        if envelope.wishes().token_ids {
            let told = if envelope.wishes().nothing_new { &[][..] } else { &self.token_ids };
            choice["token_ids"] = told.into();
        }
        if prompt_in_choice {
            envelope.tell_whole_prompt(&mut choice, prompt, &self.scored);
        }
        self.finished.iter().for_each(|finished| certificate::add(&mut choice, finished));
        choice
    }
}

/// Joins two parts of one answer's logprobs: their lists, one after the other.
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
