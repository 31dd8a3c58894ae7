//! llama.cpp's server: its own completions, and its aliases of OpenAI's pages. Its `/tokenize` and `/detokenize` have
//! the same paths as vLLM's, and are in `tokens`.
//!
//! Read `completion` (requests, also of `/infill`) and `prompts`, then `answer`.

mod answer;
mod begun;
mod completion;
mod embedding;
mod prompts;
mod server;
mod settings;

pub use begun::join_begun_answer;

use crate::http::error::with_error_body;
use crate::http::table::{Route, get, post};
use crate::http::{chat, models, ranking, responses};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;

/// Rewrites a refusal of any inner layer into llama.cpp's format.
pub async fn rewrite_errors(request: Request, next: Next) -> Response {
    with_error_body(next.run(request).await, |error| error.clone().with_llama_cpp_kind().body())
}

pub fn routes(has_slots: bool) -> Vec<Route> {
    let slots = match has_slots {
        true => get("/slots", "the slots for requests, and which are in use", server::slots),
        false => get("/slots", "refused: disabled by --no-slots", server::refuse_slots),
    };
    vec![
        post("/completion", "an answer to a text, in llama.cpp's form", completion::completion),
        post("/completions", "the same", completion::completion),
        post("/infill", "the text between two texts", completion::infill),
        post("/embedding", "a vector for each text, in llama.cpp's form", embedding::embedding),
        post("/embeddings", "the same for `content`, or OpenAI's form for `input`", embedding::either),
        post("/rerank", "documents by how well they fit a question", ranking::rerank),
        post("/reranking", "the same", ranking::rerank),
        post("/v1/reranking", "the same", ranking::rerank),
        post("/apply-template", "the rendered prompt of a chat", server::apply_template),
        get("/props", "the model, its template and its defaults", server::props),
        slots,
        get("/lora-adapters", "an empty list", server::lora_adapters),
        post("/chat/completions", "an answer to a chat", chat::llama_chat),
        post("/chat/completions/input_tokens", "how many tokens a chat has", chat::input_tokens),
        post("/responses", "an answer to a chat, as items", responses::responses),
        post("/slots/{id}", "refused: slots store nothing", server::refuse_slot_action),
        get("/models", "the served models, each with its other names", models::list_with_aliases),
    ]
}
