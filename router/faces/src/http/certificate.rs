//! Certificates as JSON, and as headers the parts that are known before an answer. Has no knowledge of pages.

use crate::http::format::finish_reason;
use axum::response::Response;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use proto::v1;
use serde_json::{Value, json};
use types::Hex;

const POLICY_DIGEST: HeaderName = HeaderName::from_static("x-lockstep-policy-digest");
const SEED: HeaderName = HeaderName::from_static("x-lockstep-seed");
const PROMPT_HASH: HeaderName = HeaderName::from_static("x-lockstep-prompt-hash");

/// Adds headers with the parts that are known before the first token.
pub fn with_headers(mut response: Response, started: &v1::Started) -> Response {
    let headers = response.headers_mut();
    headers.insert(SEED, started.seed.into());
    if let Some(handle) = &started.resume {
        insert(headers, POLICY_DIGEST, &handle.policy_digest);
    }
    if !started.prompt_hash.is_empty() {
        insert(headers, PROMPT_HASH, &started.prompt_hash);
    }
    response
}

fn insert(headers: &mut HeaderMap, name: HeaderName, bytes: &[u8]) {
    if let Ok(value) = HeaderValue::from_str(&Hex(bytes).to_string()) {
        headers.insert(name, value);
    }
}

/// Adds a choice's certificate to its last value, if the client requested one.
pub fn add(to: &mut Value, finished: &v1::Finished) {
    if let Some(certificate) = &finished.certificate {
        to["certificate"] = value(certificate, finish_reason(finished));
    }
}

pub fn value(certificate: &v1::Certificate, reason: &str) -> Value {
    let mut value = json!({
        "version": certificate.version,
        "policy_digest": Hex(&certificate.policy_digest).to_string(),
        "seed": certificate.seed,
        "choice": certificate.choice,
        "prompt_hash": Hex(&certificate.prompt_hash).to_string(),
        "answer_hash": Hex(&certificate.answer_hash).to_string(),
        "tokens": certificate.tokens,
        "finish_reason": reason,
    });
    if !certificate.grammar_hash.is_empty() {
        value["grammar_hash"] = Hex(&certificate.grammar_hash).to_string().into();
    }
    value
}
