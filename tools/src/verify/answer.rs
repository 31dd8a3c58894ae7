//! The answers of a response, from any endpoint, as a whole body or as the events of a stream. Has no knowledge of the
//! server.

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use types::{Hex, Token, TokensHash};

/// The answers of one response.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponseChoices {
    /// Each seed of the response, once. Two different seeds are a contradiction.
    pub seeds: Vec<u64>,
    /// Each policy digest of the response, in hexadecimal digits: all of them, or the first ones.
    pub digests: Vec<String>,
    pub choices: Vec<AnsweredChoice>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnsweredChoice {
    pub text: String,
    pub token_ids: Option<Vec<Token>>,
    pub prompt_ids: Option<Vec<Token>>,
    pub finish_reason: Option<String>,
    /// Unchanged from the response: an object, or null.
    pub certificate: Value,
}

/// Parses a seed as a client or a server writes it, with or without a sign.
pub fn seed(value: &Value) -> Option<u64> {
    value.as_u64().or(value.as_i64().map(i64::cast_unsigned))
}

/// The limit of the number of choices. No response has more.
const CHOICES_MAX: usize = 4096;

impl ResponseChoices {
    /// Reads a whole body, or the events of a stream as one text.
    pub fn read(response: &Value) -> anyhow::Result<ResponseChoices> {
        let mut answers = ResponseChoices::default();
        match response {
            Value::String(events) => {
                for event in events.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim) {
                    if event != "[DONE]" {
                        answers.read_event(&serde_json::from_str(event).context("an event is not JSON")?)?;
                    }
                }
            }
            whole => answers.read_event(whole)?,
        }
        ensure!(!answers.choices.is_empty(), "the response has no answer");
        for (i, choice) in answers.choices.iter().enumerate() {
            ensure!(choice.finish_reason.is_some(), "the response ends before the end of choice {i}");
        }
        for choice in &answers.choices {
            let certificate = &choice.certificate;
            push_if_new(&mut answers.seeds, seed(&certificate["seed"]));
            push_if_new(&mut answers.digests, certificate["policy_digest"].as_str().map(str::to_owned));
        }
        Ok(answers)
    }

    fn read_event(&mut self, event: &Value) -> anyhow::Result<()> {
        if !event["error"].is_null() {
            bail!("the response is an error: {}", event["error"]);
        }
        push_if_new(&mut self.seeds, seed(&event["seed"]));
        let digits = event["system_fingerprint"].as_str().and_then(|print| print.split_once('_'));
        push_if_new(&mut self.digests, digits.map(|(_, digits)| digits.to_owned()));
        for choice_json in event["choices"].as_array().into_iter().flatten() {
            let choice = self.choice(choice_json["index"].as_u64().unwrap_or(0) as usize)?;
            choice.read_choice(choice_json)?;
            choice.prompt_ids = ids(&event["prompt_token_ids"])?.or(choice.prompt_ids.take());
        }
        match event["type"].as_str() {
            _ if event["object"] == "response" => self.read_response(event)?,
            Some("response.completed" | "response.incomplete") => self.read_response(&event["response"])?,
            Some("message") => self.read_message(event)?,
            Some("content_block_delta") => self.choice(0)?.text.push_str(text(&event["delta"]["text"])),
            Some("message_delta") => self.choice(0)?.end(&event["delta"]["stop_reason"], &event["certificate"]),
            _ => {}
        }
        Ok(())
    }

    /// Reads an answer of `/v1/responses`.
    fn read_response(&mut self, response: &Value) -> anyhow::Result<()> {
        push_if_new(&mut self.seeds, seed(&response["seed"]));
        let choice = self.choice(0)?;
        choice.text.clear();
        // Thoughts, texts and calls are items of their own.
        for item in response["output"].as_array().into_iter().flatten() {
            let parts = [&item["summary"], &item["content"]].into_iter().filter_map(Value::as_array).flatten();
            let of_call = [&item["call_id"], &item["name"], &item["arguments"]];
            parts.map(|part| &part["text"]).chain(of_call).for_each(|piece| choice.text.push_str(text(piece)));
        }
        choice.end(&response["status"], &response["certificate"]);
        Ok(())
    }

    /// Reads a whole answer of `/v1/messages`.
    fn read_message(&mut self, message: &Value) -> anyhow::Result<()> {
        let choice = self.choice(0)?;
        let parts = message["content"].as_array().into_iter().flatten();
        choice.text = parts.map(|part| text(&part["text"])).collect();
        choice.end(&message["stop_reason"], &message["certificate"]);
        Ok(())
    }

    fn choice(&mut self, idx: usize) -> anyhow::Result<&mut AnsweredChoice> {
        ensure!(idx < CHOICES_MAX, "choice {idx} is beyond {CHOICES_MAX}");
        if self.choices.len() <= idx {
            self.choices.resize_with(idx + 1, AnsweredChoice::default);
        }
        Ok(&mut self.choices[idx])
    }

    pub fn n_tokens(&self) -> u64 {
        let of = |choice: &AnsweredChoice| {
            let counted = choice.token_ids.as_ref().map(|ids| ids.len() as u64);
            counted.or(choice.certificate["tokens"].as_u64()).unwrap_or(0)
        };
        self.choices.iter().map(of).sum()
    }
}

impl AnsweredChoice {
    /// Reads a choice in OpenAI's shapes.
    fn read_choice(&mut self, choice_json: &Value) -> anyhow::Result<()> {
        self.text.push_str(text(&choice_json["text"]));
        for part in [&choice_json["message"], &choice_json["delta"]] {
            // Thoughts, text and calls come in this order, whole and in chunks.
            self.text.push_str(text(&part["reasoning_content"]));
            self.text.push_str(text(&part["content"]));
            for call in part["tool_calls"].as_array().into_iter().flatten() {
                let function = &call["function"];
                for piece in [&call["id"], &function["name"], &function["arguments"]] {
                    self.text.push_str(text(piece));
                }
            }
        }
        if let Some(more) = ids(&choice_json["token_ids"])? {
            self.token_ids.get_or_insert_default().extend(more);
        }
        self.prompt_ids = ids(&choice_json["prompt_token_ids"])?.or(self.prompt_ids.take());
        self.end(&choice_json["finish_reason"], &choice_json["certificate"]);
        Ok(())
    }

    fn end(&mut self, reason: &Value, certificate: &Value) {
        if let Some(reason) = reason.as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        if certificate.is_object() {
            self.certificate = certificate.clone();
        }
    }

    /// Returns the hash of the prompt's ids, if the response has it or the ids.
    pub fn prompt_hash(&self) -> Option<String> {
        let certified = self.certificate["prompt_hash"].as_str().map(str::to_owned);
        certified.or_else(|| self.prompt_ids.as_ref().map(|ids| Hex(&TokensHash::of(ids).0).to_string()))
    }
}

/// Adds an item to a list if it is new.
pub fn push_if_new<T: PartialEq>(to: &mut Vec<T>, value: Option<T>) {
    if let Some(new_value) = value.filter(|item| !to.contains(item)) {
        to.push(new_value);
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn ids(value: &Value) -> anyhow::Result<Option<Vec<Token>>> {
    let Some(all) = value.as_array() else { return Ok(None) };
    let id = |value: &Value| value.as_u64().and_then(|id| Token::try_from(id).ok());
    let ids = all.iter().map(|value| id(value).with_context(|| format!("{value} is not a token id")));
    ids.collect::<anyhow::Result<_>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn certificate(seed: u64) -> Value {
        json!({ "policy_digest": "0707", "seed": seed, "tokens": 2, "prompt_hash": "aa" })
    }

    fn read(response: Value) -> anyhow::Result<ResponseChoices> {
        ResponseChoices::read(&response)
    }

    fn sent(events: &[Value]) -> Value {
        events.iter().map(|event| format!("id: y\nevent: x\ndata: {event}\n\n")).collect::<String>().into()
    }

    #[test]
    fn stream_reads_like_the_whole_answer() {
        let choice = |member: &str, value: Value, ids: &[u32], end: Value| {
            let certificate = if end.is_null() { Value::Null } else { certificate(7) };
            json!({ "system_fingerprint": "b_07", "seed": 7, "choices": [{ "index": 0, member: value,
                "token_ids": ids, "finish_reason": end, "certificate": certificate }] })
        };
        let whole = read(choice("message", json!({ "content": "ab" }), &[1, 2], "stop".into())).unwrap();
        assert_eq!((&whole.seeds[..], &whole.digests.join(" ")[..], whole.n_tokens()), (&[7][..], "07 0707", 2));
        let streamed = [
            choice("delta", json!({ "role": "assistant", "content": "" }), &[], Value::Null),
            choice("delta", json!({ "content": "a" }), &[1], Value::Null),
            choice("delta", json!({ "content": "b" }), &[2], Value::Null),
            choice("delta", json!({}), &[], "stop".into()),
        ];
        assert_eq!(read(sent(&streamed)).unwrap(), whole);
        assert!(read(sent(&streamed[..3])).unwrap_err().to_string().contains("ends before"));
        let call = |function: Value| json!({ "tool_calls": [{ "index": 0, "id": "i", "function": function }] });
        let called =
            read(choice("message", call(json!({ "name": "f", "arguments": "{}" })), &[1], "stop".into())).unwrap();
        assert_eq!(called.choices[0].text, "if{}");
        let completion = read(choice("text", "ab".into(), &[1, 2], "stop".into())).unwrap();
        assert_eq!(completion, whole);
    }

    #[test]
    fn responses_and_messages_are_read_too() {
        let response = json!({ "object": "response", "seed": 7, "status": "completed", "certificate": certificate(7),
            "output": [{ "content": [{ "text": "ab" }] }] });
        let whole = read(response.clone()).unwrap();
        assert_eq!((&*whole.choices[0].text, &whole.seeds[..]), ("ab", &[7][..]));
        let streamed = [
            json!({ "type": "response.created", "response": { "object": "response", "status": "in_progress" } }),
            json!({ "type": "response.output_text.delta", "delta": "ab" }),
            json!({ "type": "response.completed", "response": response }),
        ];
        assert_eq!(read(sent(&streamed)).unwrap(), whole);
        let mut called = response.clone();
        called["output"] = json!([{ "summary": [], "content": [{ "text": "hm" }] }, { "content": [{ "text": "ab" }] },
            { "call_id": "i", "name": "f", "arguments": "{}" }]);
        assert_eq!(read(called).unwrap().choices[0].text, "hmabif{}");
        let message = json!({ "type": "message", "content": [{ "type": "text", "text": "ab" }],
            "stop_reason": "end_turn", "certificate": certificate(7) });
        let streamed = [
            json!({ "type": "message_start", "message": { "type": "message", "content": [] } }),
            json!({ "type": "content_block_delta", "delta": { "type": "text_delta", "text": "a" } }),
            json!({ "type": "content_block_delta", "delta": { "type": "text_delta", "text": "b" } }),
            json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn" }, "certificate": certificate(7) }),
        ];
        assert_eq!(read(sent(&streamed)).unwrap(), read(message).unwrap());
    }

    #[test]
    fn invalid_answers_are_refused() {
        let check = |response: Value, part: &str| {
            let message = read(response.clone()).map(drop).unwrap_err().to_string();
            assert!(message.contains(part), "{response}: {message}");
        };
        check(json!({}), "no answer");
        check(json!("data: {\n\n"), "not JSON");
        check(json!({ "error": { "message": "full" } }), "full");
        check(json!({ "choices": [{ "index": 5000 }] }), "beyond");
        check(json!({ "choices": [{ "text": "a", "token_ids": [-1] }] }), "not a token id");
    }
}
