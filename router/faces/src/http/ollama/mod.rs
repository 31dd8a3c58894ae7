//! Ollama's API for the served models. No request can fetch, create or remove a model.
//!
//! Read `options` (sampling parameters), `chat` and `generate`, and the answer of both: `reply`. Its errors have one
//! member, `error`.

mod chat;
mod embed;
mod generate;
mod models;
mod options;
mod reply;
mod shape;
mod words;

pub use words::rewrite_errors;

use crate::http::error::HttpError;
use crate::http::table::{Route, delete, get, post};
use axum::Json;
use http::StatusCode;
use serde_json::{Value, json};

/// The release of Ollama whose API this is. Clients check whether a server is new enough.
const VERSION: &str = "0.12.11";

pub fn routes() -> Vec<Route> {
    vec![
        post("/api/chat", "an answer to a chat, streamed as lines unless `stream` is false", chat::chat),
        post("/api/generate", "an answer to a prompt, streamed as lines unless `stream` is false", generate::generate),
        post("/api/embed", "a vector for each text", embed::embed),
        post("/api/embeddings", "a vector for one text, in the older form", embed::embeddings),
        get("/api/tags", "the served models", models::tags),
        get("/api/ps", "the models that can answer now", models::ps),
        post("/api/show", "one model", models::show),
        post("/api/pull", "whether the server has a model; downloads nothing", models::pull),
        get("/api/version", "the version of Ollama's API", version),
        post("/api/create", "refused: the operator manages models", refuse_management),
        post("/api/copy", "refused: the operator manages models", refuse_management),
        post("/api/push", "refused: the operator manages models", refuse_management),
        delete("/api/delete", "refused: the operator manages models", refuse_management),
    ]
}

async fn version() -> Json<Value> {
    Json(json!({ "version": VERSION }))
}

async fn refuse_management() -> HttpError {
    let message = "clients cannot create, copy or remove models: use `lockstep pull` and `serve` on the server";
    HttpError::bad_request(StatusCode::FORBIDDEN, message)
}
