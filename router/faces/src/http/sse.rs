//! An answer as server-sent events, in the format of a page's `EventWriter`. If the client leaves, hyper drops the
//! stream, and that cancels the request.
//!
//! Each event's `id` is the stream's resume handle, and how much of each choice a client has after that event. It
//! counts once the empty line has arrived that ends the event, as the standard requires. A client that was cut off
//! before it receives the event again, and never misses one.

use crate::http::certificate;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent};
use router::front::reader_watch::ReadTimeout;
use router::front::resume::ReadMarks;
use router::refusal::Refusal;
use serde_json::Value;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;

/// The most events that are written at once.
const EVENTS_AT_ONCE_MAX: usize = 64;

/// How a page formats events. All functions append to the output.
pub trait EventWriter: Send + Unpin + 'static {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    /// Writes the events that can be written before the first delta.
    fn append_opening(&mut self, generation: &Generation, out: &mut String);
    fn append_event(&mut self, slot: u32, event: GenerationEvent, generation: &Generation, out: &mut String);
    /// Writes the end, after all choices have ended.
    fn append_ending(&mut self, out: &mut String);
    /// Writes a refusal as the last event, because it is too late for a status.
    fn append_failure(&mut self, refusal: Refusal, out: &mut String);
    /// Returns a comment for silent periods, so that proxies keep the stream open. No empty line follows: some clients
    /// would treat one as an event without data, once they have read an `id`.
    fn keep_alive(&self) -> &'static str {
        ": still here\n"
    }
}

pub fn stream<V: EventWriter>(mut writer: V, generation: Generation, front: &Frontend) -> Response {
    let silence_max = front.config.timeouts.sse_silence_max;
    let mut written = String::new();
    writer.append_opening(&generation, &mut written);
    let silence = Box::pin(tokio::time::sleep(silence_max));
    let headers = [("content-type", V::CONTENT_TYPE), ("cache-control", "no-cache"), ("x-accel-buffering", "no")];
    let head = certificate::with_headers(headers.into_response(), &generation.started);
    let body = EventStream { writer, generation, written, ended: false, silence, silence_max };
    head.map(|_| Body::from_stream(front.reader_watch.watched(body)))
}

/// How much a client has once it has read everything so far.
pub struct StreamPosition {
    /// None if the stream cannot be resumed.
    handle: Option<String>,
    pub marks: ReadMarks,
}

impl StreamPosition {
    pub fn of(generation: &Generation) -> StreamPosition {
        StreamPosition { handle: generation.handle.clone(), marks: generation.marks.clone() }
    }

    /// Writes an event that advances the client to this position.
    pub fn write(&self, out: &mut String, name: Option<&str>, data: &Value) {
        if let Some(handle) = &self.handle {
            // The data comes last: simple clients consider an event complete when they have the data.
            out.push_str(&format!("id: {handle}:{}\n", self.marks));
        }
        write(out, name, data);
    }
}

/// Writes an event without a position.
pub fn write(out: &mut String, name: Option<&str>, data: &Value) {
    if let Some(name) = name {
        out.push_str(&format!("event: {name}\n"));
    }
    out.push_str("data: ");
    out.push_str(&data.to_string());
    out.push_str("\n\n");
}

struct EventStream<V> {
    writer: V,
    generation: Generation,
    /// Output that the connection has not taken yet.
    written: String,
    ended: bool,
    silence: Pin<Box<Sleep>>,
    silence_max: Duration,
}

impl<V: EventWriter> EventStream<V> {
    /// Writes the events that are available.
    fn write_available(&mut self, context: &mut Context<'_>) {
        for _ in 0..EVENTS_AT_ONCE_MAX {
            match Pin::new(&mut self.generation).poll_next(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok((slot, event)))) => {
                    self.writer.append_event(slot, event, &self.generation, &mut self.written);
                }
                Poll::Ready(Some(Err(refusal))) => {
                    self.ended = true;
                    return self.writer.append_failure(refusal, &mut self.written);
                }
                Poll::Ready(None) => {
                    self.ended = true;
                    return self.writer.append_ending(&mut self.written);
                }
            }
        }
        // There may be more events, and nothing else would wake this task.
        context.waker().wake_by_ref();
    }
}

impl<V: EventWriter> Stream for EventStream<V> {
    type Item = Result<Bytes, ReadTimeout>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if !this.ended {
            this.write_available(context);
        }
        if this.written.is_empty() && !this.ended && this.silence.as_mut().poll(context).is_ready() {
            this.written.push_str(this.writer.keep_alive());
        }
        if !this.written.is_empty() {
            this.silence.as_mut().reset(Instant::now() + this.silence_max);
            return Poll::Ready(Some(Ok(std::mem::take(&mut this.written).into())));
        }
        if this.ended { Poll::Ready(None) } else { Poll::Pending }
    }
}
