//! A reply in events. All events of one delta are one step: only the last carries a position. A client that was cut off
//! in between receives all of them again, with the same numbers.

use crate::http::error::HttpError;
use crate::http::responses::finalizer::ResponseFinalizer;
use crate::http::responses::output::{ItemEvents, OutputItems};
use crate::http::responses::reply::{ResponseReply, status};
use crate::http::sse::{self, EventWriter, StreamPosition};
use crate::http::stopwatch::Stopwatch;
use crate::http::timings::{add_progress, timings};
use proto::v1;
use router::front::generation::{Generation, GenerationEvent, SideOutput};
use router::front::resume::ReadMark;
use router::refusal::Refusal;
use serde_json::{Value, json};

pub struct ResponseWriter {
    reply: ResponseReply,
    /// All items, including those that the client had before.
    output: OutputItems,
    position: StreamPosition,
    n_events: u32,
    finalizer: ResponseFinalizer,
    watch: Stopwatch,
    /// The known usage of the prompt, if the client requested its progress.
    prompt: Option<v1::Usage>,
    timings_in_each: bool,
    /// Renames a refused field to its name on this page.
    error: fn(Refusal) -> HttpError,
}

impl ResponseWriter {
    pub fn new(
        reply: ResponseReply,
        output: OutputItems,
        finalizer: ResponseFinalizer,
        generation: &Generation,
        error: fn(Refusal) -> HttpError,
    ) -> ResponseWriter {
        let position = StreamPosition::of(generation);
        let (watch, timings_in_each) = (Stopwatch::start(), false);
        ResponseWriter { reply, output, position, n_events: 0, finalizer, watch, prompt: None, timings_in_each, error }
    }

    /// Adds the times since the request arrived, if each event of text includes them.
    pub fn with_timings(self, watch: Stopwatch, timings_in_each: bool) -> ResponseWriter {
        ResponseWriter { watch, timings_in_each, ..self }
    }

    fn mark(&mut self) -> &mut ReadMark {
        &mut self.position.marks.choices[0]
    }

    /// Writes the events of one step.
    fn write_events(&mut self, events: Vec<Value>, out: &mut String) {
        let n = events.len();
        for (i, mut event) in events.into_iter().enumerate() {
            event["sequence_number"] = self.n_events.into();
            self.n_events += 1;
            let name = event["type"].as_str();
            if i + 1 == n {
                self.position.marks.n_events = Some(self.n_events);
                self.position.write(out, name, &event);
            } else {
                sse::write(out, name, &event);
            }
        }
    }

    fn end(&mut self, finished: &v1::Finished, out: &mut String) {
        *self.mark() = ReadMark::Tokens { n: self.mark().n_tokens(), ended: true };
        let mut events = ItemEvents::enabled();
        self.output.end(finished, &mut events);
        let mut response = self.reply.ended_reply(&self.output, finished);
        std::mem::take(&mut self.finalizer).finish(&mut response);
        let mut events = events.into_list();
        let mut ended = json!({ "type": format!("response.{}", status(finished)), "response": response });
        if self.timings_in_each {
            let n_sent = self.mark().n_tokens();
            ended["timings"] = timings(&self.watch, finished.usage.as_ref(), n_sent);
        }
        events.push(ended);
        self.write_events(events, out);
    }
}

impl EventWriter for ResponseWriter {
    fn append_opening(&mut self, _: &Generation, out: &mut String) {
        if *self.mark() != ReadMark::Nothing {
            self.n_events = self.position.marks.n_events.unwrap_or_default();
            return;
        }
        *self.mark() = ReadMark::at(0);
        let begun = |kind: &str| json!({ "type": format!("response.{kind}"), "response": self.reply.value });
        self.write_events(vec![begun("created"), begun("in_progress")], out);
    }

    fn append_event(&mut self, _: u32, event: GenerationEvent, _: &Generation, out: &mut String) {
        match event {
            GenerationEvent::Aside(SideOutput::Replayed(delta)) => self.output.add(&delta, &mut ItemEvents::disabled()),
            GenerationEvent::Delta(delta) => {
                *self.mark() = ReadMark::at(delta.position + delta.token_ids.len() as u32);
                let mut events = ItemEvents::enabled();
                self.output.add(&delta, &mut events);
                self.watch.mark_first_token();
                let n_sent = self.mark().n_tokens();
                let mut events = events.into_list();
                if self.timings_in_each {
                    let now = timings(&self.watch, self.prompt.as_ref(), n_sent);
                    let is_text = |event: &&mut Value| event["type"] == "response.output_text.delta";
                    events.iter_mut().filter(is_text).for_each(|event| event["timings"] = now.clone());
                }
                self.write_events(events, out);
            }
            GenerationEvent::Aside(SideOutput::Progress(progress)) => {
                let mut event = json!({ "type": "response.in_progress", "response": self.reply.value });
                add_progress(&mut event, &mut self.watch, progress, self.timings_in_each);
                let (prompt_tokens, cached_tokens) = (progress.total, progress.cached);
                self.prompt = Some(v1::Usage { prompt_tokens, cached_tokens, ..v1::Usage::default() });
                self.write_events(vec![event], out);
            }
            GenerationEvent::Finished(finished) => self.end(&finished, out),
            GenerationEvent::Aside(_) => {}
        }
    }

    fn append_ending(&mut self, _: &mut String) {}

    fn append_failure(&mut self, refusal: Refusal, out: &mut String) {
        tracing::debug!(id = self.reply.id(), %refusal, "a response failed during its stream");
        let response = self.reply.failed_reply(&self.output, &(self.error)(refusal));
        let mut event = json!({ "type": "response.failed", "response": response });
        event["sequence_number"] = self.n_events.into();
        sse::write(out, Some("response.failed"), &event);
    }
}
