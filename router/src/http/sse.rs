//! An answer in chunks as server-sent events. Dropping the stream, as hyper does when a client leaves, cancels the
//! request.
//!
//! Each event's `id` is the stream's resume handle and how much of each choice a client has that has read so far. The
//! data stands before it: who is cut off between the two reads the event again, and never misses one.

use crate::generation::{Event, Generation};
use crate::http::answer::{Envelope, Shape, Usage, choice_value, finish_reason};
use crate::http::error::HttpError;
use crate::http::fields::Streaming;
use crate::refusal::Refusal;
use crate::resume::{Mark, Marks};
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use proto::v1;
use serde_json::Value;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;

/// Events that are written at once when so many are there.
const EVENTS_AT_ONCE_MAX: usize = 64;

pub fn stream<S: Shape>(
    envelope: Envelope,
    shape: S,
    generation: Generation,
    n_choices: u32,
    streaming: Streaming,
) -> Response {
    let silence_max = envelope.front().config.waits.sse_silence_max;
    let usage = Usage::new(n_choices, envelope.wishes());
    let include_usage = streaming.include_usage;
    let (handle, marks) = (generation.handle.clone(), generation.marks.clone());
    let mut chunks = Chunks { envelope, shape, n_choices, include_usage, usage, handle, marks };
    let opening = chunks.opening(&generation);
    let silence = Box::pin(tokio::time::sleep(silence_max));
    let body = Events { chunks, generation, written: opening, ended: false, silence, silence_max };
    let headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("x-accel-buffering", "no")];
    (headers, Body::from_stream(body)).into_response()
}

struct Chunks<S> {
    envelope: Envelope,
    shape: S,
    n_choices: u32,
    include_usage: bool,
    usage: Usage,
    /// None where the stream cannot be gone on with.
    handle: Option<String>,
    /// What a client has that has read everything so far.
    marks: Marks,
}

impl<S: Shape> Chunks<S> {
    fn opening(&mut self, generation: &Generation) -> String {
        let mut out = String::new();
        for slot in 0..generation.prompts.len() as u32 * self.n_choices {
            self.add_ended(slot, generation);
            if let Some(member) = self.shape.opening() {
                self.open(slot, member, Value::Null, generation, &mut out);
            }
            // Without logprobs nothing has to be waited for.
            if !self.envelope.wishes().logprobs {
                self.echo(slot, &[], generation, &mut out);
            }
        }
        out
    }

    /// What has ended before the client went on counts as it did then.
    fn add_ended(&mut self, slot: u32, generation: &Generation) {
        let mark = *self.mark(slot);
        if mark.has_ended() {
            let prompt_tokens = generation.prompts[(slot / self.n_choices) as usize].ids.len() as u32;
            let usage = v1::Usage { prompt_tokens, cached_tokens: 0, completion_tokens: mark.n_tokens() };
            self.usage.add(slot, &v1::Finished { usage: Some(usage), ..v1::Finished::default() });
        }
    }

    fn mark(&mut self, slot: u32) -> &mut Mark {
        &mut self.marks.choices[slot as usize]
    }

    /// A choice's first chunk tells its prompt, where that is wanted and new.
    fn open(
        &mut self,
        slot: u32,
        member: (&'static str, Value),
        logprobs: Value,
        generation: &Generation,
        out: &mut String,
    ) {
        if *self.mark(slot) != Mark::Nothing {
            return;
        }
        *self.mark(slot) = Mark::at(0);
        let prompt = &generation.prompts[(slot / self.n_choices) as usize];
        let mut choice = choice_value(slot, member, logprobs, None);
        if S::PROMPT_IN_CHOICE {
            self.envelope.tell_prompt(&mut choice, prompt, &[]);
        }
        let mut chunk = self.chunk(choice);
        if !S::PROMPT_IN_CHOICE {
            self.envelope.tell_prompt(&mut chunk, prompt, &[]);
        }
        self.write(out, &chunk);
    }

    fn write(&self, out: &mut String, chunk: &Value) {
        write(out, chunk);
        if let Some(handle) = &self.handle {
            // Behind the data, before the empty line that ends the event.
            out.truncate(out.len() - 1);
            out.push_str(&format!("id: {handle}:{}\n\n", self.marks));
        }
    }

    fn echo(&mut self, slot: u32, scored: &[v1::Logprob], generation: &Generation, out: &mut String) {
        let prompt = &generation.prompts[(slot / self.n_choices) as usize];
        if let Some(echo) = self.envelope.echo(&mut self.shape, slot, prompt, scored) {
            self.open(slot, self.shape.piece(Some(&echo.text)), echo.logprobs, generation, out);
        }
    }

    fn event(&mut self, slot: u32, event: Event, generation: &Generation, out: &mut String) {
        match event {
            Event::Prompt(prompt) => self.echo(slot, &prompt.logprobs, generation, out),
            // Its logprobs say where the next one's text begins.
            Event::Told(delta) => drop(self.envelope.logprobs_of(&mut self.shape, slot, &delta.logprobs)),
            Event::Delta(delta) => {
                *self.mark(slot) = Mark::at(delta.position + delta.token_ids.len() as u32);
                if !self.envelope.says(&delta) {
                    return;
                }
                let logprobs = self.envelope.logprobs_of(&mut self.shape, slot, &delta.logprobs);
                let mut choice = choice_value(slot, self.shape.piece(Some(&delta.text)), logprobs, None);
                if self.envelope.wishes().token_ids {
                    choice["token_ids"] = delta.token_ids.into();
                }
                self.write(out, &self.chunk(choice));
            }
            Event::Pooled(_) => {}
            Event::Finished(finished) => {
                self.usage.add(slot, &finished);
                *self.mark(slot) = Mark::Tokens { n: self.mark(slot).n_tokens(), ended: true };
                let reason = if self.envelope.wishes().nothing_new { "length" } else { finish_reason(&finished) };
                let chunk = self.chunk(choice_value(slot, self.shape.piece(None), Value::Null, Some(reason)));
                self.write(out, &chunk);
            }
        }
    }

    fn ending(&mut self, out: &mut String) {
        if self.include_usage && !self.marks.usage {
            self.marks.usage = true;
            let mut chunk = self.envelope.value(S::CHUNK_OBJECT, Vec::new());
            chunk["usage"] = self.usage.value();
            self.write(out, &chunk);
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.envelope.value(S::CHUNK_OBJECT, vec![choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

fn write(out: &mut String, chunk: &Value) {
    out.push_str("data: ");
    out.push_str(&chunk.to_string());
    out.push_str("\n\n");
}

struct Events<S> {
    chunks: Chunks<S>,
    generation: Generation,
    /// Not yet handed to the connection.
    written: String,
    ended: bool,
    silence: Pin<Box<Sleep>>,
    silence_max: Duration,
}

impl<S: Shape> Events<S> {
    /// Writes what is there.
    fn gather(&mut self, context: &mut Context<'_>) {
        for _ in 0..EVENTS_AT_ONCE_MAX {
            match Pin::new(&mut self.generation).poll_next(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok((slot, event)))) => {
                    self.chunks.event(slot, event, &self.generation, &mut self.written);
                }
                Poll::Ready(Some(Err(refusal))) => return self.fail(refusal),
                Poll::Ready(None) => {
                    self.ended = true;
                    return self.chunks.ending(&mut self.written);
                }
            }
        }
        // There may be more, and nothing else would wake this task.
        context.waker().wake_by_ref();
    }

    /// Too late for a status: the error is the last event.
    fn fail(&mut self, refusal: Refusal) {
        self.ended = true;
        write(&mut self.written, &HttpError::from(refusal).body());
    }
}

impl<S: Shape> Stream for Events<S> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if !this.ended {
            this.gather(context);
        }
        if this.written.is_empty() && !this.ended && this.silence.as_mut().poll(context).is_ready() {
            this.written.push_str(": still here\n\n");
        }
        if !this.written.is_empty() {
            this.silence.as_mut().reset(Instant::now() + this.silence_max);
            return Poll::Ready(Some(Ok(std::mem::take(&mut this.written).into())));
        }
        if this.ended { Poll::Ready(None) } else { Poll::Pending }
    }
}
