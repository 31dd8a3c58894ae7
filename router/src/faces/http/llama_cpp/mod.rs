//! llama.cpp's server: its own completions, and its aliases of OpenAI's pages. Its `/tokenize` and `/detokenize` are
//! vLLM's paths too, and stand in `tokens`.
//!
//! Read `completion` (what is asked, also by `/infill`) and `prompts`, then `answer`.

mod answer;
mod completion;
mod embedding;
mod prompts;
mod server;
mod settings;

use crate::faces::http::table::{Route, get, post};
use crate::faces::http::{chat, models};

pub fn routes() -> Vec<Route> {
    vec![
        post("/completion", "an answer to a text, in llama.cpp's form", completion::completion),
        post("/completions", "the same", completion::completion),
        post("/infill", "what stands between two texts", completion::infill),
        post("/embedding", "a vector for each text, in llama.cpp's form", embedding::embedding),
        post("/embeddings", "the same for `content`, and OpenAI's form for `input`", embedding::either),
        post("/apply-template", "the prompt that a chat becomes", server::apply_template),
        get("/props", "the model, its template and its defaults", server::props),
        get("/slots", "the requests under way", server::slots),
        get("/lora-adapters", "none", server::lora_adapters),
        post("/chat/completions", "an answer to a chat", chat::llama_chat),
        get("/models", "the models that are served", models::list),
    ]
}
