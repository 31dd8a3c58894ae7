//! HTTP for clients: the APIs of OpenAI, Anthropic, Ollama, llama.cpp and vLLM, and pages for operators. Each page
//! translates for `front`.
//!
//! Knows no replica, but for what lists of models show. Read `server`, `origin` and `door` (connections, browsers and
//! keys), `page`, `fields` and `known` (what a client sent; `conversation`, `tools` and `structure` read parts of it),
//! then an endpoint: OpenAI's `chat` and `completions` share `answer`, `said`, `format` and `chunks`; `responses`,
//! Anthropic's `messages` and other APIs have a folder each. All streams go through `sse`. Which pages there are is one
//! table, `apis`.

mod answer;
mod certificate;
mod chat;
mod chunks;
mod completions;
mod conversation;
mod door;
mod embeddings;
mod error;
pub mod fields;
pub mod format;
mod infill;
pub mod known;
mod llama_cpp;
mod llama_words;
mod messages;
mod models;
mod ollama;
mod openapi;
mod origin;
mod page;
mod responses;
mod said;
mod server;
mod single;
mod sse;
mod stopwatch;
mod structure;
mod table;
mod tokens;
mod tools;
mod vllm;

use crate::faces::Error;
use crate::faces::http::error::HttpError;
use crate::faces::http::origin::Visitors;
use crate::faces::http::table::{Api, Keys, Route, delete, get, head, post};
use crate::front::frontend::Frontend;
use axum::Router;
use axum::extract::State;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub async fn serve(front: Arc<Frontend>, listener: TcpListener, shutdown: CancellationToken) -> Result<(), Error> {
    let (limits, timeouts) = (front.config.limits.clone(), front.config.timeouts.clone());
    let visitors = Visitors::new(&front.config, listener.local_addr().map_err(Error::Http)?);
    let incoming = server::Incoming::of(listener, front.config.tls.clone());
    server::serve(routes(front, visitors), incoming, &limits, &timeouts, shutdown).await
}

fn routes(front: Arc<Frontend>, visitors: Arc<Visitors>) -> Router {
    let mut all = Router::new();
    for api in apis() {
        let rows = api.routes.into_iter();
        let pages: Router<Arc<Frontend>> = rows.fold(Router::new(), |pages, row| pages.route(row.path, row.serve));
        let pages = match api.keys {
            Keys::Unasked => pages,
            Keys::Bearer => pages.route_layer(from_fn_with_state(front.clone(), door::authorize)),
            Keys::BearerOrBare => pages.route_layer(from_fn_with_state(front.clone(), door::authorize_either)),
        };
        // This layer is outermost, so that a client without a key gets its error in its API's form too.
        all = all.merge(match api.name {
            ANTHROPIC => pages.route_layer(from_fn(messages::in_its_words)),
            OLLAMA => pages.route_layer(from_fn(ollama::in_its_words)),
            _ => pages,
        });
    }
    all.fallback(|| async { HttpError::no_such_page() })
        .method_not_allowed_fallback(|| async { HttpError::wrong_method() })
        .layer(from_fn(door::unbroken))
        .layer(from_fn_with_state(visitors, origin::welcome))
        .layer(from_fn_with_state(front.clone(), door::named))
        .with_state(front)
}

const ANTHROPIC: &str = "Anthropic";
const OLLAMA: &str = "Ollama";

/// The table of all pages. A row has its API's layers by standing in it.
fn apis() -> Vec<Api> {
    let bearer = |name, routes| Api { name, keys: Keys::Bearer, routes };
    vec![
        Api { name: "Lockstep", keys: Keys::Unasked, routes: probes() },
        bearer("Lockstep", vec![get("/cluster", "replicas, ranks and models", models::cluster)]),
        bearer("OpenAI", openai()),
        Api { name: ANTHROPIC, keys: Keys::BearerOrBare, routes: anthropic() },
        bearer(OLLAMA, ollama::routes()),
        bearer("llama.cpp", llama_cpp::routes()),
        bearer("vLLM", vllm::routes()),
    ]
}

/// Probes and monitoring ask these without a key.
fn probes() -> Vec<Route> {
    vec![
        get("/livez", "whether the process lives", || async { "alive\n" }),
        get("/health", "whether a replica can serve", models::health),
        get("/ready", "whether a request sent now is served", models::ready),
        get("/metrics", "metrics for Prometheus", metrics),
        get("/ping", "the same, as vLLM's clients ask", models::health),
        post("/ping", "the same", models::health),
        head("/", "whether somebody listens, as clients of Ollama ask", || async {}),
        get("/openapi.json", "this description", openapi::document),
    ]
}

fn openai() -> Vec<Route> {
    vec![
        post("/v1/chat/completions", "an answer to a chat", chat::chat),
        post("/v1/completions", "an answer to a text", completions::completions),
        post("/v1/responses", "an answer to a chat, in items", responses::responses),
        post("/v1/responses/compact", "refused: conversations are not compacted", responses::stored::compact),
        get("/v1/responses/{id}", "a response that is stored", responses::stored::one),
        delete("/v1/responses/{id}", "forgets a response", responses::stored::forget),
        get("/v1/responses/{id}/input_items", "what a response answered", responses::stored::input_items),
        post("/v1/responses/{id}/cancel", "refused: nothing runs in the background", responses::stored::cancel),
        post("/v1/embeddings", "a vector for each text", embeddings::embeddings),
        get("/v1/models", "the models that are served", models::list),
        get("/v1/models/{*id}", "one model", models::one),
        post("/tokenize", "the tokens of a text or of a chat", tokens::tokenize),
        post("/detokenize", "the text of tokens", tokens::detokenize),
    ]
}

fn anthropic() -> Vec<Route> {
    vec![
        post("/v1/messages", "an answer to a chat", messages::messages),
        post("/v1/messages/count_tokens", "the number of a chat's tokens", messages::count_tokens),
    ]
}

async fn metrics(State(front): State<Arc<Frontend>>) -> Response {
    ([("content-type", "text/plain; version=0.0.4")], (front.config.metrics)()).into_response()
}
