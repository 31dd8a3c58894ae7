//! A past answer from a file: the request as it was sent, and its response. Has no knowledge of the server.

use super::answer::{ResponseChoices, push_if_new, seed};
use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value};
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// The size limit. No real request and response are larger together.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Fields of a request that change how or how soon an answer is sent, and not the answer.
const OF_SENDING: [&str; 4] = ["stream", "stream_options", "deadline_ms", "priority"];

#[derive(Clone, Debug)]
pub struct PastAnswer {
    /// The path of the request.
    pub path: String,
    request: Map<String, Value>,
    pub answers: ResponseChoices,
    /// Each seed of request and response, once. Two different seeds are a contradiction.
    pub seeds: Vec<u64>,
}

impl PastAnswer {
    pub fn read(file: &Path) -> anyhow::Result<PastAnswer> {
        let named = || file.display().to_string();
        let n_bytes = std::fs::metadata(file).with_context(named)?.len();
        ensure!(n_bytes <= FILE_BYTES_MAX, "{} is larger than {FILE_BYTES_MAX} bytes", named());
        let text = std::fs::read_to_string(file).with_context(named)?;
        PastAnswer::parse(&text).with_context(named)
    }

    pub fn parse(text: &str) -> anyhow::Result<PastAnswer> {
        PastAnswer::of(&serde_json::from_str(text).context("it is not JSON")?)
    }

    pub fn of(whole: &Value) -> anyhow::Result<PastAnswer> {
        let Value::Object(request) = whole["request"].clone() else { bail!("it has no `request`, an object") };
        let response = &whole["response"];
        ensure!(!response.is_null(), "it has no `response`");
        let is_record = !whole["began_ms"].is_null();
        ensure!(
            !is_record || request.contains_key("prompt"),
            "its router kept only hashes (--record-prompts keeps all)"
        );
        // Only a record of `lockstep.v1` can have it, and no HTTP endpoint accepts it.
        ensure!(!request.contains_key("first_choice"), "it is a later choice that a gRPC client requested alone");
        let answers = ResponseChoices::read(response)?;
        let path = match whole["path"].as_str() {
            Some(path @ (CHAT | COMPLETIONS | RESPONSES | MESSAGES)) => path,
            Some(other) => bail!("`path` is {other}, and not one of {CHAT}, {COMPLETIONS}, {RESPONSES}, {MESSAGES}"),
            None => api_path_of(&request, response)?,
        };
        let mut seeds = answers.seeds.clone();
        push_if_new(&mut seeds, request.get("seed").and_then(seed));
        let is_greedy = request.get("temperature").and_then(Value::as_f64) == Some(0.0);
        ensure!(is_greedy || !seeds.is_empty(), "neither the request nor the response has the seed");
        Ok(PastAnswer { path: path.to_owned(), request, answers, seeds })
    }

    /// Returns the same for a server whose only model may have another name.
    pub fn without_model(mut self) -> PastAnswer {
        self.request.remove("model");
        self
    }

    pub fn model(&self) -> Option<&Value> {
        self.request.get("model")
    }

    /// Returns the request that gives the same answer, whole and with its certificate.
    pub fn rerun_request(&self) -> Value {
        let mut request = self.request.clone();
        request.retain(|name, _| !OF_SENDING.contains(&&**name));
        if let Some(seed) = self.seeds.first() {
            request.insert("seed".into(), (*seed).into());
        }
        request.insert("certificate".into(), true.into());
        if [CHAT, COMPLETIONS].contains(&&*self.path) {
            request.insert("return_token_ids".into(), true.into());
        }
        request.into()
    }
}

/// Returns the path for a response without one, derived from its fields.
fn api_path_of(request: &Map<String, Value>, response: &Value) -> anyhow::Result<&'static str> {
    let has = |name: &str| request.contains_key(name);
    let is_anthropic = match response {
        Value::String(events) => events.contains("\"message_start\""),
        whole => whole["type"] == "message",
    };
    match (has("messages"), has("prompt"), has("input")) {
        (true, false, false) => Ok(if is_anthropic { MESSAGES } else { CHAT }),
        (false, true, false) => Ok(COMPLETIONS),
        (false, false, true) => Ok(RESPONSES),
        _ => bail!("the request needs one of `messages`, `prompt` and `input`: set the API's path in `path`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(request: &Value) -> Value {
        let choices = json!([{ "index": 0, "text": "a", "finish_reason": "stop" }]);
        json!({ "request": request, "response": { "seed": 7, "choices": choices } })
    }

    #[test]
    fn rerun_request_has_seed_and_is_not_streamed() {
        let request = json!({ "prompt": "x", "stream": true, "stream_options": {}, "deadline_ms": 5, "top_k": 3 });
        let past = PastAnswer::parse(&file(&request).to_string()).unwrap();
        let expected = json!({ "prompt": "x", "top_k": 3, "seed": 7, "certificate": true, "return_token_ids": true });
        assert_eq!((&*past.path, past.rerun_request()), (COMPLETIONS, expected));
        let both = PastAnswer::parse(&file(&json!({ "prompt": "x", "seed": -1 })).to_string()).unwrap();
        assert_eq!(both.seeds, [7, u64::MAX]);
    }

    #[test]
    fn pages_are_distinguished() {
        let check = |request: Value, expect: &str| {
            assert_eq!(PastAnswer::parse(&file(&request).to_string()).unwrap().path, expect);
        };
        check(json!({ "messages": [] }), CHAT);
        check(json!({ "input": "x" }), RESPONSES);
        let message = json!({ "type": "message", "content": [], "stop_reason": "end_turn" });
        let anthropic = json!({ "request": { "messages": [], "seed": 1 }, "response": message });
        assert_eq!(PastAnswer::parse(&anthropic.to_string()).unwrap().path, MESSAGES);
    }

    #[test]
    fn requests_that_cannot_be_rerun_are_refused() {
        let check = |whole: Value, part: &str| {
            let message = PastAnswer::parse(&whole.to_string()).map(drop).unwrap_err().to_string();
            assert!(message.contains(part), "{whole}: {message}");
        };
        check(json!({}), "`request`");
        check(json!({ "request": {} }), "`response`");
        check(file(&json!({})), "`path`");
        let mut unseeded = file(&json!({ "prompt": "x" }));
        unseeded["response"]["seed"] = Value::Null;
        check(unseeded, "the seed");
        let mut elsewhere = file(&json!({ "prompt": "x" }));
        elsewhere["path"] = "/v2".into();
        check(elsewhere, "/v2");
        let mut hashes = file(&json!({ "seed": 1 }));
        (hashes["began_ms"], hashes["path"]) = (1.into(), COMPLETIONS.into());
        check(hashes, "--record-prompts");
        check(file(&json!({ "prompt": [[1]], "first_choice": 3 })), "a gRPC client");
    }
}
