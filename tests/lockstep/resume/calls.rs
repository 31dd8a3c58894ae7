//! A router that is killed in the middle of a call's arguments: another router sends its clients the rest of the call,
//! byte for byte, at every endpoint that resumes.

use super::{Events, Folder, Replica, router_of};
use crate::messages::talking_model;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use wire::JoinToken;

/// Arguments long enough to be cut.
fn schema() -> Value {
    let (digit, word) =
        (json!({"type": "integer", "minimum": 0, "maximum": 9}), json!({"enum": ["sun", "rain", "fog"]}));
    json!({
        "type": "object",
        "properties": {
            "days": {"type": "array", "items": digit, "minItems": 12, "maxItems": 12},
            "sky": {"type": "array", "items": word, "minItems": 5, "maxItems": 5},
        },
        "required": ["days", "sky"],
        "additionalProperties": false,
    })
}

/// Each endpoint, and the request to it.
fn stream_requests(model: &str) -> Vec<(&'static str, Value)> {
    let (messages, schema) = (json!([{"role": "user", "content": "How will it be?"}]), schema());
    let function = json!({"name": "forecast", "parameters": schema, "strict": true});
    let chat = |more: Value| {
        let mut body = json!({
            "messages": messages, "tools": [{"type": "function", "function": function}], "tool_choice": "required",
            "max_tokens": 1000, "stream": true, "parallel_tool_calls": false,
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("/v1/chat/completions", body)
    };
    vec![
        chat(json!({"temperature": 0})),
        chat(json!({"n": 2, "seed": 11, "temperature": 1.0, "presence_penalty": 0.7, "repetition_penalty": 1.2})),
        chat(json!({"n": 2, "seed": 12, "logprobs": true, "frequency_penalty": 0.4})),
        (
            "/v1/responses",
            json!({
                "model": model, "input": "How will it be?", "tool_choice": "required", "stream": true,
                "max_output_tokens": 1000, "temperature": 0, "parallel_tool_calls": false,
                "tools": [{"type": "function", "name": "forecast", "parameters": schema, "strict": true}],
            }),
        ),
        (
            "/v1/messages",
            json!({
                "messages": messages, "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
                "stream": true, "max_tokens": 1000, "temperature": 0,
                "tools": [{"name": "forecast", "input_schema": schema}],
            }),
        ),
    ]
}

/// The parts of a stream, joined: texts, names and arguments, ends.
#[derive(Debug, Default, PartialEq)]
struct StreamParts(BTreeMap<String, String>);

impl StreamParts {
    fn of<'a>(events: impl IntoIterator<Item = &'a String>) -> StreamParts {
        let mut parts = StreamParts::default();
        events
            .into_iter()
            .filter_map(|event| serde_json::from_str(event).ok())
            .for_each(|event| parts.read_event(&event));
        parts
    }

    fn add(&mut self, part: String, text: &Value) {
        if let Some(text) = text.as_str() {
            self.0.entry(part).or_default().push_str(text);
        }
    }

    fn read_event(&mut self, event: &Value) {
        assert!(event["error"].is_null(), "{event}");
        let none = Vec::new();
        for choice in event["choices"].as_array().unwrap_or(&none) {
            let (i, delta) = (&choice["index"], &choice["delta"]);
            self.add(format!("{i} content"), &delta["content"]);
            self.add(format!("{i} end"), &choice["finish_reason"]);
            for call in delta["tool_calls"].as_array().unwrap_or(&none) {
                let (at, function) = (&call["index"], &call["function"]);
                self.add(format!("{i} {at} name"), &function["name"]);
                self.add(format!("{i} {at} arguments"), &function["arguments"]);
            }
            for token in choice["logprobs"]["content"].as_array().unwrap_or(&none) {
                self.add(format!("{i} logprobs"), &Value::from(token.to_string()));
            }
        }
        let (kind, delta) = (event["type"].as_str().unwrap_or_default(), &event["delta"]);
        match kind {
            "response.function_call_arguments.delta" => self.add(format!("{} arguments", event["output_index"]), delta),
            "response.function_call_arguments.done" => self.add("whole arguments".into(), &event["arguments"]),
            "content_block_start" => self.add(format!("{} name", event["index"]), &event["content_block"]["name"]),
            "content_block_delta" => self.add(format!("{} arguments", event["index"]), &delta["partial_json"]),
            "message_delta" => self.add("end".into(), &delta["stop_reason"]),
            _ if kind.starts_with("response.") => self.add("kinds".into(), &Value::from(format!("{kind} "))),
            _ => {}
        }
    }

    fn arguments(&self) -> impl Iterator<Item = &String> {
        self.0
            .iter()
            .filter(|(part, _)| part.ends_with(" arguments") && *part != "whole arguments")
            .map(|(_, text)| text)
    }
}

/// Reads until a part of the arguments has arrived.
fn begin(events: &mut Events) -> Vec<(String, Option<String>)> {
    let mut read = Vec::new();
    while StreamParts::of(read.iter().map(|(data, _)| data)).arguments().all(|arguments| arguments.len() < 20) {
        read.push(events.next().expect("another event"));
    }
    read
}

#[test]
fn a_call_goes_on_at_another_router_within_its_arguments() {
    let folder = Folder::new("resume-calls");
    let token = folder.write("token", JoinToken::random().unwrap().expose());
    let (kept, template) = talking_model("resume-talking");
    let model = kept.0.to_str().unwrap();
    // The steps of these calls verify forced tokens, and repetitions.
    let replica = Replica::of(&[model, "--speculation", "4"], &token);
    let router = || router_of(&[model, "--chat-template", &template], &token, &[&replica]);
    let ((mut first, first_http), (_second, second_http)) = (router(), router());
    let open = |http: &str, (page, body): &(&str, Value), last: Option<&str>| Events::open_at(http, page, body, last);
    let requests = stream_requests(kept.0.file_name().unwrap().to_str().unwrap());
    let mut streams: Vec<Events> = requests.iter().map(|request| open(&first_http, request, None)).collect();
    let read: Vec<_> = streams.iter_mut().map(begin).collect();
    first.kill();
    for (request, read) in requests.iter().zip(read) {
        let (mut data, ids): (Vec<String>, Vec<Option<String>>) = read.into_iter().unzip();
        let last = ids.into_iter().flatten().last().unwrap();
        let n_before = data.len();
        data.extend(open(&second_http, request, Some(&last)).map(|(data, _)| data));
        let whole: Vec<String> = open(&second_http, request, None).map(|(data, _)| data).collect();
        let (resumed, whole) = (StreamParts::of(&data), StreamParts::of(&whole));
        assert_eq!(resumed, whole, "{request:?}");
        assert!(data.len() > n_before + 1, "the stream was cut before its end");
        for arguments in resumed.arguments() {
            let arguments: Value = serde_json::from_str(arguments).expect("the call is whole");
            assert_eq!(arguments["days"].as_array().map(Vec::len), Some(12));
        }
    }
}
