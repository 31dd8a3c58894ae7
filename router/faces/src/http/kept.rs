//! A finished answer as a record stores it: one line of JSON in the format of `/v1/completions`, whichever page served
//! it. A replay through that page gives the same answer. Prompts are token ids, so no template or tokenizer affects a
//! replay.

use crate::http::certificate;
use crate::http::format::finish_reason;
use crate::http::vllm::params;
use grammar::ThinkingBudget;
use proto::v1;
use router::front::finished_answer::{FinishedAnswer, FinishedChoice};
use serde_json::{Map, Value, json};
use types::Hex;

/// Increases when the format of a line changes.
const VERSION: u32 = 1;

/// Members of a request that contain a client's words. They are stored only together with the prompts.
const WORDS: [&str; 6] = ["stop", "bad_words", "dry_sequence_breakers", "structured_outputs", "grammar", "ebnf"];

/// Returns the line of an answer, without its line end. `with_prompts` selects prompts and answers, or only their
/// hashes.
pub fn record_line(answer: &FinishedAnswer, with_prompts: bool) -> String {
    let digest = Hex(&answer.replica.digest.0).to_string();
    let choices = answer.choices.iter().enumerate().map(|(slot, choice)| choice_json(slot, choice, with_prompts));
    let whole = json!({
        "version": VERSION,
        "id": answer.id,
        "began_ms": answer.began,
        "tenant": format!("{:016x}", answer.base_request.tenant.0),
        "replica": answer.replica.name,
        "path": "/v1/completions",
        "request": request_json(answer, with_prompts),
        "response": {
            "model": answer.model,
            "system_fingerprint": format!("b_{digest}"),
            "seed": answer.base_request.sampling.seed,
            "choices": choices.collect::<Vec<Value>>(),
        },
    });
    whole.to_string()
}

fn request_json(answer: &FinishedAnswer, with_prompts: bool) -> Value {
    let Value::Object(mut request) = params::value(&answer.sampling, answer.n_choices) else { return Value::Null };
    request.retain(|_, value| !is_empty(value));
    request.insert("model".into(), answer.model.as_str().into());
    if with_prompts {
        request.insert("prompt".into(), json!(answer.prompts));
    } else {
        WORDS.iter().for_each(|name| drop(request.remove(*name)));
    }
    // A replay refuses this: a prompt of token ids has no thought.
    if let Some(budget) = answer.base_request.grammar.as_ref().and_then(ThinkingBudget::of) {
        request.insert("thinking_token_budget".into(), budget.tokens_max.into());
    }
    if answer.first_choice > 0 {
        request.insert("first_choice".into(), answer.first_choice.into());
    }
    Value::Object(request)
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

fn choice_json(slot: usize, choice: &FinishedChoice, with_prompts: bool) -> Value {
    let reason = finish_reason(&v1::Finished { reason: choice.certificate.reason, ..v1::Finished::default() });
    let mut value = json!({
        "index": slot,
        "finish_reason": reason,
        "certificate": certificate::value(&choice.certificate, reason),
    });
    if with_prompts {
        value["token_ids"] = json!(choice.tokens);
    }
    value
}
