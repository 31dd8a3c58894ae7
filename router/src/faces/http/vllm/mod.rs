//! vLLM's pages beside OpenAI's: its version and load, prompts as tokens, answers to tokens in tokens, and what these
//! say.

mod derender;
mod generate;
pub mod params;
mod render;

use crate::faces::http::table::{Route, get, post};
use crate::front::frontend::Frontend;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::Arc;

pub fn routes() -> Vec<Route> {
    vec![
        post("/inference/v1/generate", "an answer to tokens, in tokens", generate::generate),
        post("/v1/chat/completions/render", "a chat as the request for tokens that it becomes", render::chat),
        post("/v1/completions/render", "texts as the requests for tokens that they become", render::completions),
        post("/v1/chat/completions/derender", "tokens as the answer to a chat", derender::chat),
        post("/v1/completions/derender", "tokens as answers to texts", derender::completions),
        get("/version", "this server's release", version),
        get("/load", "how many requests are under way here", load),
    ]
}

async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn load(State(front): State<Arc<Frontend>>) -> Json<Value> {
    Json(json!({ "server_load": front.streams.len() }))
}
