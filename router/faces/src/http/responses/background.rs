//! A response that runs without its client. Clients can read it until it ends or is cancelled; then it is stored.

use crate::http::certificate;
use crate::http::door::KeyRevoked;
use crate::http::error::HttpError;
use crate::http::responses::finalizer::{ContinuedConversation, ResponseFinalizer, RunningResponse};
use crate::http::responses::follow;
use crate::http::responses::output::{ItemEvents, OutputItems};
use crate::http::responses::reply::{ResponseReply, status};
use crate::http::sse;
use axum::Json;
use axum::response::{IntoResponse, Response};
use proto::v1;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent};
use router::front::stored::BackgroundRun;
use router::refusal::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio_stream::StreamExt;

/// A response that has not begun to run.
pub struct BackgroundResponse {
    pub reply: ResponseReply,
    pub output: OutputItems,
    pub finalizer: ResponseFinalizer,
    pub is_stream: bool,
    pub to_error: fn(Refusal) -> HttpError,
}

impl BackgroundResponse {
    /// Lets a generation run without its client, and answers with its current state.
    pub fn start(
        self,
        front: &Arc<Frontend>,
        generation: Generation,
        revoked: KeyRevoked,
    ) -> Result<Response, HttpError> {
        let BackgroundResponse { mut reply, output, finalizer, is_stream, to_error: error } = self;
        reply.value["background"] = true.into();
        reply.value["status"] = "queued".into();
        let run = Arc::new(BackgroundRun::new(is_stream));
        let full = || HttpError::from(Refusal::Full { retry_after: front.config.timeouts.retry_after });
        let ResponseFinalizer { to_store, to_conversation } = finalizer;
        let shown = to_store.and_then(|to_store| to_store.show_running(&reply.value, run.clone())).ok_or_else(full)?;
        let (queued, started) = (reply.value.clone(), generation.started.clone());
        let to_end = Some((shown, to_conversation));
        let mut writer = BackgroundWriter { reply, output, run: run.clone(), to_end, n_events: 0, error };
        let begun = |kind: &str| json!({ "type": format!("response.{kind}"), "response": queued });
        if !writer.append_events(vec![begun("created"), begun("queued")]) {
            writer.end(RunEnd::Failed(no_room()));
            return Err(full());
        }
        tokio::spawn(writer.run(generation, revoked));
        let answer = match is_stream {
            true => follow::stream_events(front, &run, 0),
            false => Json(queued).into_response(),
        };
        Ok(certificate::with_headers(answer, &started))
    }
}

struct BackgroundWriter {
    reply: ResponseReply,
    output: OutputItems,
    run: Arc<BackgroundRun>,
    /// None once it has ended.
    to_end: Option<(RunningResponse, Option<ContinuedConversation>)>,
    n_events: u32,
    error: fn(Refusal) -> HttpError,
}

/// The bytes of an event in addition to its response.
const EVENT_BYTES: usize = 128;

enum RunEnd {
    Finished(Box<v1::Finished>),
    Failed(Refusal),
    Cancelled,
}

fn no_room() -> Refusal {
    Refusal::failed("there is no room for its answer in the store of responses")
}

impl BackgroundWriter {
    async fn run(mut self, mut generation: Generation, revoked: KeyRevoked) {
        let run = self.run.clone();
        let end = loop {
            let event = tokio::select! {
                biased;
                () = run.cancelled() => break RunEnd::Cancelled,
                () = revoked.0.cancelled() => break RunEnd::Failed(Refusal::UnknownKey),
                event = generation.next() => event,
            };
            match event {
                Some(Ok((_, GenerationEvent::Finished(finished)))) => break RunEnd::Finished(Box::new(finished)),
                Some(Ok((_, event))) if self.add_event(&event) => {}
                Some(Ok(_)) => break RunEnd::Failed(no_room()),
                Some(Err(refusal)) => break RunEnd::Failed(refusal),
                None => break RunEnd::Failed(Refusal::failed("its answer ended without a final event")),
            }
        };
        self.end(end);
        // A draining server waits until no task holds a generation. By now the end of this one is visible to clients.
        drop(generation);
    }

    /// Adds an event. False if there is no room for it.
    fn add_event(&mut self, event: &GenerationEvent) -> bool {
        if !self.begin() {
            return false;
        }
        let GenerationEvent::Delta(delta) = event else { return true };
        let mut events = self.events();
        self.output.add(delta, &mut events);
        self.append_events(events.into_list())
    }

    /// The first event marks the response as running.
    fn begin(&mut self) -> bool {
        if self.reply.value["status"] != "queued" {
            return true;
        }
        self.reply.value["status"] = "in_progress".into();
        if let Some((shown, _)) = &self.to_end {
            shown.update_reply(&self.reply.value);
        }
        let event = json!({ "type": "response.in_progress", "response": self.reply.value });
        self.append_events(vec![event])
    }

    fn events(&self) -> ItemEvents {
        if self.run.is_streamed() { ItemEvents::enabled() } else { ItemEvents::disabled() }
    }

    /// Numbers events and stores them. False if there is no room for them.
    fn append_events(&mut self, events: Vec<Value>) -> bool {
        if !self.run.is_streamed() {
            return true;
        }
        let mut number = |mut event: Value| {
            event["sequence_number"] = self.n_events.into();
            self.n_events += 1;
            let mut text = String::new();
            sse::write(&mut text, event["type"].as_str(), &event);
            text
        };
        let texts: Vec<String> = events.into_iter().map(&mut number).collect();
        let n_bytes = texts.iter().map(String::len).sum();
        let is_room = self.to_end.as_mut().is_none_or(|(shown, _)| shown.try_reserve(n_bytes));
        if is_room {
            self.run.append(texts);
        } else {
            self.n_events -= texts.len() as u32;
        }
        is_room
    }

    /// Stores the response before its last event is sent, so that a client that has read the event finds it.
    fn end(&mut self, end: RunEnd) {
        if let RunEnd::Finished(_) = &end {
            self.begin();
        }
        let mut events = self.events();
        let mut value = match &end {
            RunEnd::Finished(finished) => {
                self.output.end(finished, &mut events);
                self.reply.ended_reply(&self.output, finished)
            }
            RunEnd::Failed(refusal) => self.reply.failed_reply(&self.output, &(self.error)(refusal.clone())),
            RunEnd::Cancelled => {
                self.output.end_incomplete(&mut events);
                self.reply.cancelled_reply(&self.output)
            }
        };
        let mut failed = self.reply.value.clone();
        failed["status"] = "failed".into();
        failed["error"] = json!({ "code": "server_error", "message": no_room().to_string() });
        let end = match &end {
            RunEnd::Finished(finished) => status(finished),
            RunEnd::Failed(_) => "failed",
            RunEnd::Cancelled => "cancelled",
        };
        if !self.append_events(events.into_list()) {
            value = failed.clone();
        }
        let Some((mut shown, to_conversation)) = self.to_end.take() else { return };
        if self.run.is_streamed() && !shown.try_reserve(value.to_string().len() + EVENT_BYTES) {
            value = failed.clone();
        }
        ResponseFinalizer { to_store: None, to_conversation }.finish(&mut value);
        // The last event is sent in any case. Without room for the reply it reports that.
        if !shown.finish(&value, &failed) {
            value = failed;
        }
        let end = if value["status"] == end { end } else { "failed" };
        self.append_events(vec![json!({ "type": format!("response.{end}"), "response": value })]);
        self.run.finish(end);
    }
}

/// Ends a response whose task panicked.
impl Drop for BackgroundWriter {
    fn drop(&mut self) {
        if self.to_end.is_some() {
            self.end(RunEnd::Failed(Refusal::failed("the request caused a panic")));
        }
    }
}
