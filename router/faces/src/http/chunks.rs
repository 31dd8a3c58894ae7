//! An answer in OpenAI's chunks. The difference between chat and completions is in an `AnswerFormat`.

use crate::http::certificate;
use crate::http::error::HttpError;
use crate::http::fields::StreamOptions;
use crate::http::format::{AnswerFormat, Envelope, UsageSum, choice_value, stop_reason};
use crate::http::sse::{self, EventWriter, StreamPosition};
use axum::response::Response;
use proto::v1;
use router::front::generation::{Generation, GenerationEvent, SideOutput};
use router::front::resume::ReadMark;
use router::refusal::Refusal;
use serde_json::{Value, json};

pub fn stream<S: AnswerFormat>(
    envelope: Envelope,
    shape: S,
    generation: Generation,
    n_choices: u32,
    streaming: StreamOptions,
) -> Response {
    let front = envelope.front().clone();
    let usage = UsageSum::new(n_choices, envelope.options());
    let (n_prompt, position) = (generation.started.prompt_tokens, StreamPosition::of(&generation));
    let chunks = ChunkWriter { envelope, shape, n_choices, streaming, usage, n_prompt, position, last: None };
    sse::stream(chunks, generation, &front)
}

struct ChunkWriter<S> {
    envelope: Envelope,
    shape: S,
    n_choices: u32,
    streaming: StreamOptions,
    usage: UsageSum,
    /// The number of tokens of all prompts.
    n_prompt: u32,
    position: StreamPosition,
    /// The last piece of a choice, whose finish reason is the next event.
    last: Option<v1::Delta>,
}

impl<S: AnswerFormat> EventWriter for ChunkWriter<S> {
    fn append_opening(&mut self, generation: &Generation, out: &mut String) {
        for slot in 0..generation.prompts.len() as u32 * self.n_choices {
            self.count_ended(slot, generation);
            if let Some(member) = self.shape.opening_member(slot, self.envelope.options()) {
                self.write_first_chunk(slot, member, Value::Null, generation, out);
            }
            // Without logprobs the echo can be sent at once.
            if !self.envelope.options().logprobs {
                self.write_echo(slot, &[], generation, out);
            }
        }
    }

    fn append_event(&mut self, slot: u32, event: GenerationEvent, generation: &Generation, out: &mut String) {
        self.envelope.record_event(&event, generation);
        match event {
            GenerationEvent::Aside(SideOutput::Prompt(prompt)) => {
                self.write_echo(slot, &prompt.logprobs, generation, out)
            }
            // It counts, because the next piece depends on it: where a token's text begins, and what a call's text is.
            GenerationEvent::Aside(SideOutput::Replayed(delta)) => drop(self.choice_with(slot, delta, None)),
            GenerationEvent::Delta(delta) => {
                *self.mark(slot) = ReadMark::at(delta.position + delta.token_ids.len() as u32);
                if !self.envelope.needs_chunk(&delta) {
                    return;
                }
                // With the usage in each chunk, clients of vLLM expect that each chunk has a token.
                if (S::TEXT_IN_CLOSING_CHUNK || self.streaming.usage_in_each) && generation.ends_next(slot) {
                    self.last = Some(delta);
                    return;
                }
                let choice = self.choice_with(slot, delta, None);
                let mut chunk = self.chunk(choice);
                self.envelope.add_timings(&mut chunk, self.n_sent());
                self.position.write(out, None, &chunk);
            }
            GenerationEvent::Aside(SideOutput::Progress(progress)) => {
                let choice = choice_value(slot, self.shape.delta_member(slot, None), Value::Null, None);
                let mut chunk = self.chunk(choice);
                self.envelope.add_progress(&mut chunk, progress);
                sse::write(out, None, &chunk);
            }
            GenerationEvent::Aside(_) => {}
            GenerationEvent::Finished(finished) => {
                self.usage.add(slot, &finished);
                *self.mark(slot) = ReadMark::Tokens { n: self.mark(slot).n_tokens(), ended: true };
                let reason =
                    if self.envelope.options().is_prompt_only { "length" } else { self.shape.finish_reason(&finished) };
                let mut choice = match self.last.take() {
                    Some(delta) => self.choice_with(slot, delta, Some(reason)),
                    None => choice_value(slot, self.shape.delta_member(slot, None), Value::Null, Some(reason)),
                };
                choice["stop_reason"] = stop_reason(&finished);
                certificate::add(&mut choice, &finished);
                let mut chunk = self.chunk(choice);
                if !self.streaming.include_usage {
                    self.envelope.add_extras(&mut chunk, &self.usage);
                }
                self.position.write(out, None, &chunk);
            }
        }
    }

    fn append_ending(&mut self, out: &mut String) {
        if self.streaming.include_usage && !self.position.marks.usage {
            self.position.marks.usage = true;
            let mut chunk = self.envelope.value(S::CHUNK_OBJECT, Vec::new());
            chunk["usage"] = self.usage.value();
            self.envelope.add_extras(&mut chunk, &self.usage);
            self.envelope.add_metrics(&mut chunk, self.position.marks.choices.len(), &self.usage);
            self.position.write(out, None, &chunk);
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn append_failure(&mut self, refusal: Refusal, out: &mut String) {
        sse::write(out, None, &HttpError::from(refusal).body());
    }
}

impl<S: AnswerFormat> ChunkWriter<S> {
    fn choice_with(&mut self, slot: u32, delta: v1::Delta, reason: Option<&str>) -> Value {
        let logprobs = self.envelope.logprobs_of(&mut self.shape, slot, &delta.logprobs);
        let mut choice = choice_value(slot, self.shape.delta_member(slot, Some(&delta)), logprobs, reason);
        if self.envelope.options().token_ids {
            choice["token_ids"] = delta.token_ids.into();
        }
        choice
    }

    /// Counts a choice that had ended before the client resumed.
    fn count_ended(&mut self, slot: u32, generation: &Generation) {
        let mark = *self.mark(slot);
        if mark.has_ended() {
            let prompt_tokens = generation.prompts[(slot / self.n_choices) as usize].ids.len() as u32;
            let usage = v1::Usage { prompt_tokens, completion_tokens: mark.n_tokens(), ..v1::Usage::default() };
            self.usage.add(slot, &v1::Finished { usage: Some(usage), ..v1::Finished::default() });
        }
    }

    fn mark(&mut self, slot: u32) -> &mut ReadMark {
        &mut self.position.marks.choices[slot as usize]
    }

    /// Writes a choice's first chunk. It carries the prompt if the client requested it and has not received it.
    fn write_first_chunk(
        &mut self,
        slot: u32,
        member: (&'static str, Value),
        logprobs: Value,
        generation: &Generation,
        out: &mut String,
    ) {
        if *self.mark(slot) != ReadMark::Nothing {
            return;
        }
        *self.mark(slot) = ReadMark::at(0);
        let prompt = &generation.prompts[(slot / self.n_choices) as usize];
        let mut choice = choice_value(slot, member, logprobs, None);
        if S::PROMPT_IN_CHOICE {
            self.envelope.add_prompt(&mut choice, prompt, &[]);
        }
        let mut chunk = self.chunk(choice);
        if !S::PROMPT_IN_CHOICE {
            self.envelope.add_prompt(&mut chunk, prompt, &[]);
        }
        self.position.write(out, None, &chunk);
    }

    fn write_echo(&mut self, slot: u32, scored: &[v1::Logprob], generation: &Generation, out: &mut String) {
        let prompt = &generation.prompts[(slot / self.n_choices) as usize];
        if let Some(echo) = self.envelope.echo(&mut self.shape, slot, prompt, scored) {
            let delta = v1::Delta { text: echo.text, ..v1::Delta::default() };
            let member = self.shape.delta_member(slot, Some(&delta));
            self.write_first_chunk(slot, member, echo.logprobs, generation, out);
        }
    }

    /// Returns the usage of the tokens that the client has received, so that a resumed stream repeats the same numbers.
    fn usage_so_far(&self) -> Value {
        let n_completion = if self.envelope.options().is_prompt_only { 0 } else { self.n_sent() };
        let n_all = self.n_prompt + n_completion;
        json!({ "prompt_tokens": self.n_prompt, "completion_tokens": n_completion, "total_tokens": n_all })
    }

    fn n_sent(&self) -> u32 {
        self.position.marks.choices.iter().map(|mark| mark.n_tokens()).sum()
    }

    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.envelope.value(S::CHUNK_OBJECT, vec![choice]);
        if self.streaming.include_usage {
            chunk["usage"] = if self.streaming.usage_in_each { self.usage_so_far() } else { Value::Null };
        }
        chunk
    }
}
