//! An answer in chunks as server-sent events. Dropping the stream, as hyper does when a client leaves, cancels the
//! request.

use crate::generate::{Event, Generation};
use crate::http::answer::{Envelope, Shape, Usage, choice_value, finish_reason};
use crate::http::error::HttpError;
use crate::http::fields::Streaming;
use crate::refusal::Refusal;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
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
    let mut chunks = Chunks { envelope, shape, include_usage: streaming.include_usage, usage: Usage::default() };
    let opening = chunks.opening(n_choices);
    let silence = Box::pin(tokio::time::sleep(silence_max));
    let body = Events { chunks, generation, written: opening, ended: false, silence, silence_max };
    let headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("x-accel-buffering", "no")];
    (headers, Body::from_stream(body)).into_response()
}

struct Chunks<S> {
    envelope: Envelope,
    shape: S,
    include_usage: bool,
    usage: Usage,
}

impl<S: Shape> Chunks<S> {
    fn opening(&mut self, n_choices: u32) -> String {
        let mut out = String::new();
        for choice in 0..n_choices {
            if let Some(member) = self.shape.opening() {
                write(&mut out, &self.chunk(choice_value(choice, member, Value::Null, None)));
            }
        }
        out
    }

    fn event(&mut self, choice: u32, event: Event, out: &mut String) {
        let chunk = match event {
            Event::Delta(delta) if !self.envelope.says(&delta) => return,
            Event::Delta(delta) => {
                let logprobs = self.envelope.logprobs_of(&mut self.shape, choice, &delta.logprobs);
                choice_value(choice, self.shape.piece(Some(&delta.text)), logprobs, None)
            }
            Event::Finished(finished) => {
                self.usage.add(&finished);
                choice_value(choice, self.shape.piece(None), Value::Null, Some(finish_reason(&finished)))
            }
        };
        write(out, &self.chunk(chunk));
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
                Poll::Ready(Some(Ok((choice, event)))) => self.chunks.event(choice, event, &mut self.written),
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
