//! Ollama's names for models and fields, and its format of errors. Has no knowledge of pages.

use crate::faces::http::error::{HttpError, reworded};
use crate::front::frontend::Frontend;
use crate::front::structure::FIELD;
use crate::refusal::Refusal;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use serde_json::{Value, json};

/// The tag of a name without one.
pub const LATEST: &str = ":latest";

/// Rewrites a refusal of any inner layer into Ollama's format.
pub async fn in_its_words(request: Request, next: Next) -> Response {
    reworded(next.run(request).await, error_value)
}

pub fn error_value(error: &HttpError) -> Value {
    json!({ "error": error.message() })
}

/// Renames refused fields to the names of these pages.
pub fn said(refusal: Refusal) -> HttpError {
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
pub fn served(front: &Frontend, asked: Option<String>) -> String {
    let asked = asked.unwrap_or_default();
    match asked.strip_suffix(LATEST) {
        Some(bare) if matches!(front.text(&asked), Err(Refusal::NoModel { .. })) => bare.to_owned(),
        _ => asked,
    }
}
