//! A reply as an object: the members that are known when it begins, and those that its end adds. Has no knowledge of
//! streams.

use crate::http::certificate;
use crate::http::error::HttpError;
use crate::http::format::{add_reuse, signed_seed};
use crate::http::responses::output::OutputItems;
use proto::v1;
use router::front::frontend::unix_seconds;
use router::front::generation::Generation;
use serde_json::{Value, json};

/// The members of a reply that stay the same while it grows.
pub struct ResponseReply {
    pub value: Value,
}

impl ResponseReply {
    /// `settings` are the parts of the request that the reply repeats.
    pub fn of(generation: &Generation, settings: Value) -> ResponseReply {
        let started = &generation.started;
        let mut value = json!({
            "id": id_of(&started.id),
            "object": "response",
            "created_at": generation.created,
            "completed_at": null,
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": started.model,
            "output": [],
            "seed": signed_seed(started.seed),
            "service_tier": "default",
            "truncation": "disabled",
            "usage": null,
        });
        if let (Value::Object(all), Value::Object(settings)) = (&mut value, settings) {
            all.extend(settings);
        }
        let defaults = &generation.text.defaults;
        for (name, default) in [("temperature", defaults.temperature), ("top_p", defaults.top_p)] {
            if value[name].is_null() {
                value[name] = default.unwrap_or(1.0).into();
            }
        }
        ResponseReply { value }
    }

    pub fn id(&self) -> &str {
        self.value["id"].as_str().unwrap_or_default()
    }

    pub fn ended_reply(&self, output: &OutputItems, finished: &v1::Finished) -> Value {
        let mut value = self.value.clone();
        match status(finished) {
            "incomplete" => value["incomplete_details"] = json!({ "reason": "max_output_tokens" }),
            _ => value["completed_at"] = unix_seconds().into(),
        }
        value["status"] = status(finished).into();
        value["output"] = output.values();
        value["usage"] = usage_value(&finished.usage.unwrap_or_default(), output.n_thought_tokens());
        output.add_raw(&mut value);
        certificate::add(&mut value, finished);
        value
    }

    pub fn cancelled_reply(&self, output: &OutputItems) -> Value {
        let mut value = self.value.clone();
        value["status"] = "cancelled".into();
        value["output"] = output.values();
        value
    }

    pub fn failed_reply(&self, output: &OutputItems, error: &HttpError) -> Value {
        let mut value = self.value.clone();
        value["status"] = "failed".into();
        value["output"] = output.values();
        value["error"] = json!({ "code": "server_error", "message": error.message() });
        value
    }
}

/// The prefix of the ids of responses.
pub const PREFIX: &str = "resp_";

/// Returns a reply's id, made of the answer's.
pub fn id_of(answer: &str) -> String {
    format!("{PREFIX}{answer}")
}

pub fn status(finished: &v1::Finished) -> &'static str {
    match finished.reason() {
        v1::finished::Reason::Length => "incomplete",
        _ => "completed",
    }
}

fn usage_value(usage: &v1::Usage, n_thought_tokens: u32) -> Value {
    let mut of_prompt = json!({ "cached_tokens": usage.cached_tokens });
    add_reuse(&mut of_prompt, usage.reuse());
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": of_prompt,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": n_thought_tokens },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}
