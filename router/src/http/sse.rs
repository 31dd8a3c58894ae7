//! An answer in chunks as server-sent events. Dropping the stream, as hyper does when a client leaves, cancels the
//! request.

use crate::generation::{Event, Generation};
use crate::http::answer::{Envelope, Shape, Usage, choice_value, finish_reason};
use crate::http::error::HttpError;
use crate::http::fields::Streaming;
use crate::refusal::Refusal;
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
    let mut chunks = Chunks { envelope, shape, n_choices, include_usage: streaming.include_usage, usage };
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
}

impl<S: Shape> Chunks<S> {
    fn opening(&mut self, generation: &Generation) -> String {
        let mut out = String::new();
        for slot in 0..generation.prompts.len() as u32 * self.n_choices {
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

    /// A choice's first chunk tells its prompt, where that is wanted.
    fn open(
        &self,
        slot: u32,
        member: (&'static str, Value),
        logprobs: Value,
        generation: &Generation,
        out: &mut String,
    ) {
        let prompt = &generation.prompts[(slot / self.n_choices) as usize];
        let mut choice = choice_value(slot, member, logprobs, None);
        if S::PROMPT_IN_CHOICE {
            self.envelope.tell_prompt(&mut choice, prompt, &[]);
        }
        let mut chunk = self.chunk(choice);
        if !S::PROMPT_IN_CHOICE {
            self.envelope.tell_prompt(&mut chunk, prompt, &[]);
        }
        write(out, &chunk);
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
            Event::Delta(delta) if self.envelope.says(&delta) => {
                let logprobs = self.envelope.logprobs_of(&mut self.shape, slot, &delta.logprobs);
                let mut choice = choice_value(slot, self.shape.piece(Some(&delta.text)), logprobs, None);
                if self.envelope.wishes().token_ids {
                    choice["token_ids"] = delta.token_ids.into();
                }
                write(out, &self.chunk(choice));
            }
            Event::Delta(_) | Event::Pooled(_) => {}
            Event::Finished(finished) => {
                self.usage.add(slot, &finished);
                let reason = if self.envelope.wishes().nothing_new { "length" } else { finish_reason(&finished) };
                write(out, &self.chunk(choice_value(slot, self.shape.piece(None), Value::Null, Some(reason))));
            }
        }
    }

    fn ending(&mut self, out: &mut String) {
        if self.include_usage {
            let mut chunk = self.envelope.value(S::CHUNK_OBJECT, Vec::new());
            chunk["usage"] = self.usage.value();
            write(out, &chunk);
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
