//! A message, whole or in events. Has no knowledge of requests.

use crate::http::certificate;
use crate::http::format::add_reuse;
use crate::http::messages::blocks::{BlockAssembler, ContentBlockEvent, ContentBlockSplitter};
use crate::http::messages::{error_value, to_http_error};
use crate::http::sse::{self, EventWriter, StreamPosition};
use proto::v1;
use router::front::generation::{Generation, GenerationEvent, SideOutput};
use router::front::resume::ReadMark;
use router::refusal::Refusal;
use serde_json::{Value, json};
use tokio_stream::StreamExt;

pub async fn collect_message(generation: &mut Generation, shows_thoughts: bool) -> Result<Value, Refusal> {
    let (mut blocks, mut content) = (ContentBlockSplitter::new(shows_thoughts), BlockAssembler::default());
    let mut last = v1::Finished::default();
    while let Some(event) = generation.next().await {
        match event?.1 {
            GenerationEvent::Delta(delta) => {
                blocks.add_delta(&delta).into_iter().for_each(|event| content.apply(event))
            }
            GenerationEvent::Finished(finished) => last = finished,
            GenerationEvent::Aside(_) => {}
        }
    }
    blocks.end().into_iter().for_each(|event| content.apply(event));
    let mut message = MessageStart::of(generation).value();
    message["content"] = content.into_blocks().into();
    message["stop_reason"] = stop_reason(&last).into();
    message["stop_sequence"] = stop_sequence(&last).into();
    message["usage"] = usage_value(&last.usage.unwrap_or_default());
    certificate::add(&mut message, &last);
    Ok(message)
}

/// The members of an answer that are known when it begins.
struct MessageStart {
    id: String,
    model: String,
    n_prompt: u32,
}

impl MessageStart {
    fn of(generation: &Generation) -> MessageStart {
        let v1::Started { id, model, prompt_tokens, .. } = &generation.started;
        MessageStart { id: format!("msg_{id}"), model: model.clone(), n_prompt: *prompt_tokens }
    }

    /// Returns the message before any content.
    fn value(&self) -> Value {
        let usage = v1::Usage { prompt_tokens: self.n_prompt, ..v1::Usage::default() };
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "stop_details": null,
            "container": null,
            "usage": usage_value(&usage),
        })
    }
}

fn stop_reason(finished: &v1::Finished) -> &'static str {
    match finished.reason() {
        v1::finished::Reason::Length => "max_tokens",
        _ if finished.tool_calls > 0 => "tool_use",
        _ if !finished.stop.is_empty() => "stop_sequence",
        _ => "end_turn",
    }
}

fn stop_sequence(finished: &v1::Finished) -> Option<&str> {
    Some(finished.stop.as_str()).filter(|_| stop_reason(finished) == "stop_sequence")
}

/// Returns the usage at the beginning and end of a message, in Anthropic's format: cached prompt tokens are counted
/// apart from the others.
fn usage_so_far(usage: &v1::Usage) -> Value {
    let mut value = json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        // All prompts are cached without a charge, so there is nothing to count.
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "thinking_tokens": usage.reasoning_tokens },
        "server_tool_use": null,
    });
    add_reuse(&mut value, usage.reuse());
    value
}

fn usage_value(usage: &v1::Usage) -> Value {
    let mut value = usage_so_far(usage);
    value["cache_creation"] = json!({ "ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0 });
    value["service_tier"] = "standard".into();
    value["inference_geo"] = Value::Null;
    value
}

/// A streamed answer. Only events that advance the client carry a position.
pub struct MessageWriter {
    message: MessageStart,
    blocks: ContentBlockSplitter,
    position: StreamPosition,
}

impl MessageWriter {
    pub fn new(generation: &Generation, shows_thoughts: bool) -> MessageWriter {
        let (message, position) = (MessageStart::of(generation), StreamPosition::of(generation));
        MessageWriter { message, blocks: ContentBlockSplitter::new(shows_thoughts), position }
    }

    fn mark(&mut self) -> &mut ReadMark {
        &mut self.position.marks.choices[0]
    }

    fn write_event(&self, out: &mut String, data: &Value) {
        sse::write(out, data["type"].as_str(), data);
    }

    fn write_event_with_position(&self, out: &mut String, data: &Value) {
        self.position.write(out, data["type"].as_str(), data);
    }

    /// Only the last event of a delta carries the position: a client that was cut off before it receives all of them
    /// again.
    fn write_events(&self, out: &mut String, events: &[ContentBlockEvent]) {
        let Some((last, before)) = events.split_last() else { return };
        before.iter().for_each(|event| self.write_event(out, &event.value()));
        self.write_event_with_position(out, &last.value());
    }

    fn end(&mut self, finished: &v1::Finished, out: &mut String) {
        *self.mark() = ReadMark::Tokens { n: self.mark().n_tokens(), ended: true };
        self.blocks.end().iter().for_each(|event| self.write_event(out, &event.value()));
        let delta = json!({
            "stop_reason": stop_reason(finished),
            "stop_sequence": stop_sequence(finished),
            "stop_details": null,
            "container": null,
        });
        let usage = usage_so_far(&finished.usage.unwrap_or_default());
        let mut data = json!({ "type": "message_delta", "delta": delta, "usage": usage });
        certificate::add(&mut data, finished);
        self.write_event(out, &data);
        self.write_event_with_position(out, &json!({ "type": "message_stop" }));
    }
}

impl EventWriter for MessageWriter {
    fn append_opening(&mut self, _: &Generation, out: &mut String) {
        if *self.mark() != ReadMark::Nothing {
            return;
        }
        *self.mark() = ReadMark::at(0);
        self.write_event_with_position(out, &json!({ "type": "message_start", "message": self.message.value() }));
        out.push_str(self.keep_alive());
    }

    fn append_event(&mut self, _: u32, event: GenerationEvent, _: &Generation, out: &mut String) {
        match event {
            // Block numbers continue after the blocks that the client has.
            GenerationEvent::Aside(SideOutput::Replayed(delta)) => drop(self.blocks.add_delta(&delta)),
            GenerationEvent::Delta(delta) => {
                *self.mark() = ReadMark::at(delta.position + delta.token_ids.len() as u32);
                let events = self.blocks.add_delta(&delta);
                self.write_events(out, &events);
            }
            GenerationEvent::Finished(finished) => self.end(&finished, out),
            GenerationEvent::Aside(_) => {}
        }
    }

    fn append_ending(&mut self, _: &mut String) {}

    fn append_failure(&mut self, refusal: Refusal, out: &mut String) {
        self.write_event(out, &error_value(&to_http_error(refusal)));
    }

    fn keep_alive(&self) -> &'static str {
        "event: ping\ndata: {\"type\":\"ping\"}\n\n"
    }
}
