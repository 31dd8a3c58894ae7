//! Ollama's names for models and fields, and its format of errors. Has no knowledge of pages.

use crate::http::error::{HttpError, with_error_body};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use router::front::frontend::Frontend;
use router::front::structure::FIELD;
use router::refusal::Refusal;
use serde_json::{Value, json};

/// The tag of a name without one.
pub const LATEST: &str = ":latest";

/// Rewrites a refusal of any inner layer into Ollama's format.
pub async fn rewrite_errors(request: Request, next: Next) -> Response {
    with_error_body(next.run(request).await, error_value)
}

pub fn error_value(error: &HttpError) -> Value {
    json!({ "error": error.message() })
}

/// Renames refused fields to the names of these pages.
pub fn to_http_error(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[
        ("chat", "messages"),
        (FIELD, "format"),
        ("chat_template_kwargs", "think"),
        ("reasoning_effort", "think"),
        ("text", "prompt"),
        ("token_ids", "context"),
        ("max_tokens", "num_predict"),
        ("repetition_penalty", "repeat_penalty"),
    ]))
}

/// Returns the name under which the model is served: Ollama's clients add the tag `latest` to names without one.
pub fn served_name(front: &Frontend, requested: Option<String>) -> String {
    let name = requested.unwrap_or_default();
    match name.strip_suffix(LATEST) {
        Some(bare) if matches!(front.text(&name), Err(Refusal::NoModel { .. })) => bare.to_owned(),
        _ => name,
    }
}
