//! A reply in events. All events of one delta are one step: only the last carries a position. A client that was cut off
//! in between receives all of them again, with the same numbers.

use crate::faces::http::error::HttpError;
use crate::faces::http::responses::afterwards::Afterwards;
use crate::faces::http::responses::output::{ItemEvents, OutputItems};
use crate::faces::http::responses::reply::{ResponseReply, status};
use crate::faces::http::sse::{self, Position, Voice};
use crate::faces::http::stopwatch::Stopwatch;
use crate::faces::http::timings::{tell_progress, timings};
use crate::front::generation::{Aside, Generation, GenerationEvent};
use crate::front::resume::ReadMark;
use crate::refusal::Refusal;
use proto::v1;
use serde_json::{Value, json};

pub struct ResponseVoice {
    reply: ResponseReply,
    /// All items, including those that the client had before.
    output: OutputItems,
    position: Position,
    n_events: u32,
    afterwards: Afterwards,
    watch: Stopwatch,
    /// The known usage of the prompt, if the client requested its progress.
    prompt: Option<v1::Usage>,
    tells_times: bool,
    /// Renames a refused field to its name on this page.
    error: fn(Refusal) -> HttpError,
}

impl ResponseVoice {
    pub fn new(
        reply: ResponseReply,
        output: OutputItems,
        afterwards: Afterwards,
        generation: &Generation,
        error: fn(Refusal) -> HttpError,
    ) -> ResponseVoice {
        let position = Position::of(generation);
        let (watch, tells_times) = (Stopwatch::start(), false);
        ResponseVoice { reply, output, position, n_events: 0, afterwards, watch, prompt: None, tells_times, error }
    }

    /// Adds the times since the request arrived, if each event of text includes them.
    pub fn timed(self, watch: Stopwatch, tells_times: bool) -> ResponseVoice {
        ResponseVoice { watch, tells_times, ..self }
    }

    fn mark(&mut self) -> &mut ReadMark {
        &mut self.position.marks.choices[0]
    }

    /// Writes the events of one step.
    fn tell(&mut self, events: Vec<Value>, out: &mut String) {
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
        let mut events = ItemEvents::told();
        self.output.end(finished, &mut events);
        let mut response = self.reply.ended(&self.output, finished);
        std::mem::take(&mut self.afterwards).keep(&mut response);
        let mut events = events.into_list();
        let mut ended = json!({ "type": format!("response.{}", status(finished)), "response": response });
        if self.tells_times {
            let n_told = self.mark().n_tokens();
            ended["timings"] = timings(&self.watch, finished.usage.as_ref(), n_told);
        }
        events.push(ended);
        self.tell(events, out);
    }
}

impl Voice for ResponseVoice {
    fn opening(&mut self, _: &Generation, out: &mut String) {
        if *self.mark() != ReadMark::Nothing {
            self.n_events = self.position.marks.n_events.unwrap_or_default();
            return;
        }
        *self.mark() = ReadMark::at(0);
        let begun = |kind: &str| json!({ "type": format!("response.{kind}"), "response": self.reply.value });
        self.tell(vec![begun("created"), begun("in_progress")], out);
    }

    fn event(&mut self, _: u32, event: GenerationEvent, _: &Generation, out: &mut String) {
        match event {
            GenerationEvent::Aside(Aside::Replayed(delta)) => self.output.add(&delta, &mut ItemEvents::untold()),
            GenerationEvent::Delta(delta) => {
                *self.mark() = ReadMark::at(delta.position + delta.token_ids.len() as u32);
                let mut events = ItemEvents::told();
                self.output.add(&delta, &mut events);
                self.watch.heard();
                let n_told = self.mark().n_tokens();
                let mut events = events.into_list();
                if self.tells_times {
                    let now = timings(&self.watch, self.prompt.as_ref(), n_told);
                    let is_text = |event: &&mut Value| event["type"] == "response.output_text.delta";
                    events.iter_mut().filter(is_text).for_each(|event| event["timings"] = now.clone());
                }
                self.tell(events, out);
            }
            GenerationEvent::Aside(Aside::Progress(progress)) => {
                let mut event = json!({ "type": "response.in_progress", "response": self.reply.value });
                tell_progress(&mut event, &mut self.watch, progress, self.tells_times);
                let (prompt_tokens, cached_tokens) = (progress.total, progress.cached);
                self.prompt = Some(v1::Usage { prompt_tokens, cached_tokens, ..v1::Usage::default() });
                self.tell(vec![event], out);
            }
            GenerationEvent::Finished(finished) => self.end(&finished, out),
            GenerationEvent::Aside(_) => {}
        }
    }

    fn ending(&mut self, _: &mut String) {}

    fn fail(&mut self, refusal: Refusal, out: &mut String) {
        tracing::debug!(id = self.reply.id(), %refusal, "a response failed while it was told");
        let response = self.reply.failed(&self.output, &(self.error)(refusal));
        let mut event = json!({ "type": "response.failed", "response": response });
        event["sequence_number"] = self.n_events.into();
        sse::write(out, Some("response.failed"), &event);
    }
}
