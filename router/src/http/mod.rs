//! HTTP to the outside: OpenAI's endpoints and Anthropic's, and pages for operators. Says in their words what
//! `generate` does.

mod answer;
mod chat;
mod chunks;
mod completions;
mod door;
mod embeddings;
mod error;
mod fields;
mod messages;
mod models;
mod responses;
mod server;
mod single;
mod sse;
mod tokens;

use crate::Error;
use crate::config::Limits;
use crate::generate::{Front, Room};
pub use crate::http::answer::finish_reason;
pub use crate::http::error::HttpError;
pub use crate::http::fields::Fields;
use crate::http::fields::Streaming;
use crate::refusal::Refusal;
use crate::resume::Resume;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::StatusCode;
use http::header::{CONTENT_LENGTH, HeaderValue};
use std::future::Future;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use types::TenantId;

pub async fn serve(front: Arc<Front>, listener: TcpListener, shutdown: CancellationToken) -> Result<(), Error> {
    let (limits, waits) = (front.config.limits.clone(), front.config.waits.clone());
    server::serve(routes(front), listener, &limits, &waits, shutdown).await
}

fn routes(front: Arc<Front>) -> Router {
    let keyed = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route_layer(from_fn_with_state(front.clone(), door::authorize));
    // Outermost, so that who has no key is told so in the same words.
    let anthropic = Router::new()
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route_layer(from_fn_with_state(front.clone(), door::authorize_either))
        .route_layer(from_fn(messages::in_its_words));
    // Without a key: what probes and monitoring ask.
    Router::new()
        .route("/health", get(|| async { "alive\n" }))
        .route("/ready", get(models::ready))
        .route("/cluster", get(models::cluster))
        .route("/metrics", get(metrics))
        .merge(keyed)
        .merge(anthropic)
        .fallback(|| async { HttpError::no_such_page() })
        .method_not_allowed_fallback(|| async { HttpError::wrong_method() })
        .layer(from_fn(door::unbroken))
        .layer(from_fn(door::cors))
        .with_state(front)
}

async fn metrics(State(front): State<Arc<Front>>) -> Response {
    ([("content-type", "text/plain; version=0.0.4")], (front.config.metrics)()).into_response()
}

/// What was sent to a page, and by whom.
struct Page {
    fields: Fields,
    tenant: TenantId,
    /// As the client says it; empty where it says nothing.
    last_event_id: String,
    /// Taken by the body until its text has become tokens.
    room: Room,
}

impl Page {
    /// The stream that is to be gone on with, if one is.
    fn resume(&self, streaming: Option<Streaming>, limits: &Limits) -> Result<Option<Resume>, Refusal> {
        match (self.last_event_id.as_str(), streaming) {
            ("", _) => Ok(None),
            (_, None) => Err(Refusal::invalid("Last-Event-ID", "is for streams; `stream` is not set")),
            (text, Some(_)) => Ok(Some(Resume::parse(text, limits.choices_resumed_max)?)),
        }
    }
}

/// Says which session a request belongs to, over HTTP and gRPC.
pub const SESSION: &str = "x-session-id";

/// The JSON object of a request's body, within its limits of size and time.
async fn read(front: &Front, request: Request) -> Result<Page, HttpError> {
    let tenant = request.extensions().get::<TenantId>().copied().unwrap_or_default();
    let limits = &front.config.limits;
    // What is no text is no handle: it is refused as one.
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).trim().to_owned();
    let last_event_id = request.headers().get("last-event-id").map(text).unwrap_or_default();
    let session = request.headers().get(SESSION).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let declared = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if declared.is_some_and(|length| length > limits.body_discarded_max) {
        return Err(HttpError::too_large(limits.body_bytes_max));
    }
    let (body, room) = in_time(front, read_body(front, request.into_body())).await??;
    let mut fields = front.off_runtime(body.len(), move || Fields::parse(&body)).await??;
    if let Some(session) = session {
        fields.belongs_to(session);
    }
    Ok(Page { fields, tenant, last_event_id, room })
}

async fn in_time<T>(front: &Front, body: impl Future<Output = T>) -> Result<T, HttpError> {
    let read = tokio::time::timeout(front.config.waits.body_max, body).await;
    read.map_err(|_| HttpError::bad_request(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"))
}

/// What is too large is read to its end all the same, within reason: a client that still sends reads no refusal.
/// So is one for which there is no room beside the others.
async fn read_body(front: &Front, body: Body) -> Result<(Vec<u8>, Room), HttpError> {
    let limits = &front.config.limits;
    let mut chunks = body.into_data_stream();
    let (mut bytes, mut n_bytes, mut room, mut is_room) = (Vec::new(), 0, Vec::new(), true);
    while let Some(chunk) = chunks.next().await {
        let broken = |_| HttpError::bad_request(StatusCode::BAD_REQUEST, "the body broke off");
        let chunk = chunk.map_err(broken)?;
        n_bytes += chunk.len();
        let wanted = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
        if n_bytes > limits.body_discarded_max {
            break;
        }
        if n_bytes > limits.body_bytes_max || !is_room {
            continue;
        }
        match front.bodies.clone().try_acquire_many_owned(wanted) {
            Ok(taken) => {
                room.push(taken);
                bytes.extend_from_slice(&chunk);
            }
            Err(_) => is_room = false,
        }
    }
    match n_bytes > limits.body_bytes_max {
        true => Err(HttpError::too_large(limits.body_bytes_max)),
        false if !is_room => Err(Refusal::Full { retry_after: front.config.waits.retry_after }.into()),
        false => Ok((bytes, room)),
    }
}
