//! An answer in OpenAI's shapes: whole, or passed to `chunks`.

use crate::http::answer_content::AnswerContent;
use crate::http::error::HttpError;
use crate::http::fields::RequestOptions;
use crate::http::format::{AnswerFormat, Envelope, UsageSum, choice_value, stop_reason};
use crate::http::stopwatch::Stopwatch;
use crate::http::structure::rename_field;
use crate::http::{certificate, chunks};
use axum::Json;
use axum::response::{IntoResponse, Response};
use proto::v1;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent, Prompt, SideOutput};
use router::front::parsed_request::ParsedRequest;
use router::front::recorder::Recorder;
use router::refusal::Refusal;
use serde_json::Value;
use std::sync::Arc;
use tokio_stream::StreamExt;

pub async fn answer<F: AnswerFormat>(
    front: Arc<Frontend>,
    parsed: ParsedRequest,
    options: RequestOptions,
    recorder: Recorder,
    format: F,
) -> Result<Response, HttpError> {
    let (n_choices, watch) = (parsed.n_choices, Stopwatch::start());
    let generation = front.generate(parsed, recorder).await;
    let generation = generation.map_err(|refusal| rename_field(refusal, options.structure_field))?;
    let envelope = Envelope::new::<F>(front, &generation, options, watch);
    match options.streaming {
        Some(streaming) => Ok(chunks::stream(envelope, format, generation, n_choices, streaming)),
        None => Ok(collect_response(envelope, format, generation, n_choices).await?),
    }
}

async fn collect_response<S: AnswerFormat>(
    mut envelope: Envelope,
    mut shape: S,
    mut generation: Generation,
    n_choices: u32,
) -> Result<Response, Refusal> {
    let n_slots = generation.prompts.len() * n_choices as usize;
    let mut choices: Vec<ChoiceCollector> = (0..n_slots).map(|_| ChoiceCollector::default()).collect();
    while let Some(event) = generation.next().await {
        let (slot, event) = event?;
        envelope.record_event(&event, &generation);
        choices[slot as usize].add_event(event);
    }
    let mut usage = UsageSum::new(n_choices, envelope.options());
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
    envelope.add_extras(&mut answer, &usage);
    envelope.add_metrics(&mut answer, n_slots, &usage);
    if !prompt_in_choice && let (Some(first), Some(prompt)) = (choices.first(), generation.prompts.first()) {
        envelope.add_full_prompt(&mut answer, prompt, &first.scored);
    }
    Ok(certificate::with_headers(Json(answer).into_response(), &generation.started))
}

/// One choice, collected until it has ended.
#[derive(Default)]
struct ChoiceCollector {
    scored: Vec<v1::Logprob>,
    content: AnswerContent,
    token_ids: Vec<u32>,
    logprobs: Vec<v1::Logprob>,
    finished: Option<v1::Finished>,
}

impl ChoiceCollector {
    fn add_event(&mut self, event: GenerationEvent) {
        match event {
            GenerationEvent::Aside(SideOutput::Prompt(prompt)) => self.scored = prompt.logprobs,
            GenerationEvent::Delta(delta) => {
                self.content.add(&delta);
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
        if envelope.options().is_prompt_only {
            reason = Some("length");
            self.content = AnswerContent::of_text(text);
        } else {
            self.content.text.insert_str(0, &text);
            logprobs = join_logprobs(logprobs, envelope.logprobs_of(shape, slot, &self.logprobs));
        }
        let mut choice = choice_value(slot, shape.whole_member(&self.content), logprobs, reason);
        choice["stop_reason"] = self.finished.as_ref().map_or(Value::Null, stop_reason);
        choice["token_ids"] = Value::Null;
        if envelope.options().token_ids {
            let token_ids = if envelope.options().is_prompt_only { &[][..] } else { &self.token_ids };
            choice["token_ids"] = token_ids.into();
        }
        if prompt_in_choice {
            envelope.add_full_prompt(&mut choice, prompt, &self.scored);
        }
        self.finished.iter().for_each(|finished| certificate::add(&mut choice, finished));
        choice
    }
}

/// Joins two parts of one answer's logprobs: their lists, one after the other.
fn join_logprobs(first: Value, second: Value) -> Value {
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
