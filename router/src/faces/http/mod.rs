//! HTTP for clients: OpenAI's endpoints and Anthropic's, and pages for operators. Each page translates for `front`.
//!
//! Knows no replica, but for what lists of models show. Read `server`, `origin` and `door` (connections, browsers and
//! keys), `page`, `fields` and `known` (what a client sent; `conversation`, `tools` and `structure` read parts of it),
//! then an endpoint: OpenAI's `chat` and `completions` share `answer`, `said`, `format` and `chunks`; `responses` and
//! Anthropic's `messages` share `single`. All streams go through `sse`.

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
pub mod known;
mod messages;
mod models;
mod origin;
mod page;
mod responses;
mod said;
mod server;
mod single;
mod sse;
mod structure;
mod tokens;
mod tools;

use crate::faces::Error;
use crate::faces::http::error::HttpError;
use crate::faces::http::origin::Visitors;
use crate::front::frontend::Frontend;
use axum::Router;
use axum::extract::State;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
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
    let keyed = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/cluster", get(models::cluster))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route_layer(from_fn_with_state(front.clone(), door::authorize));
    // This layer is outermost, so that a client without a key gets its error in Anthropic's form too.
    let anthropic = Router::new()
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route_layer(from_fn_with_state(front.clone(), door::authorize_either))
        .route_layer(from_fn(messages::in_its_words));
    // Probes and monitoring ask these without a key.
    Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/health", get(models::health))
        .route("/ready", get(models::ready))
        .route("/metrics", get(metrics))
        .merge(keyed)
        .merge(anthropic)
        .fallback(|| async { HttpError::no_such_page() })
        .method_not_allowed_fallback(|| async { HttpError::wrong_method() })
        .layer(from_fn(door::unbroken))
        .layer(from_fn_with_state(visitors, origin::welcome))
        .layer(from_fn_with_state(front.clone(), door::named))
        .with_state(front)
}

async fn metrics(State(front): State<Arc<Frontend>>) -> Response {
    ([("content-type", "text/plain; version=0.0.4")], (front.config.metrics)()).into_response()
}
