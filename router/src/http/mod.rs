//! HTTP to the outside: OpenAI's endpoints, and pages for operators. Says in OpenAI's words what `generate` does.

mod answer;
mod chat;
mod completions;
mod error;
mod fields;
mod models;
mod sse;
mod tokens;

use crate::Error;
use crate::generate::Front;
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use http::StatusCode;
use http::header::CONTENT_LENGTH;
use std::future::Future;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;

pub async fn serve(front: Arc<Front>, listener: TcpListener, shutdown: CancellationToken) -> Result<(), Error> {
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps Nagle's delay");
        }
    });
    axum::serve(listener, routes(front)).with_graceful_shutdown(shutdown.cancelled_owned()).await.map_err(Error::Http)
}

fn routes(front: Arc<Front>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(|| async { "alive\n" }))
        .route("/ready", get(models::ready))
        .route("/cluster", get(models::cluster))
        .route("/metrics", get(metrics))
        .fallback(|| async { HttpError::no_such_page() })
        .method_not_allowed_fallback(|| async { HttpError::wrong_method() })
        .with_state(front)
}

async fn metrics(State(front): State<Arc<Front>>) -> Response {
    ([("content-type", "text/plain; version=0.0.4")], (front.config.metrics)()).into_response()
}

/// The JSON object of a request's body, within its limits of size and time.
async fn read(front: &Front, request: Request) -> Result<Fields, HttpError> {
    let bytes_max = front.config.limits.body_bytes_max;
    let declared = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if declared.is_some_and(|length| length > bytes_max) {
        return Err(HttpError::too_large(bytes_max));
    }
    let body = in_time(front, read_body(request.into_body(), bytes_max)).await??;
    front.off_runtime(body.len(), move || Fields::parse(&body)).await?
}

async fn in_time<T>(front: &Front, body: impl Future<Output = T>) -> Result<T, HttpError> {
    let read = tokio::time::timeout(front.config.waits.body_max, body).await;
    read.map_err(|_| HttpError::bad_request(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"))
}

async fn read_body(body: Body, bytes_max: usize) -> Result<Vec<u8>, HttpError> {
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let broken = |_| HttpError::bad_request(StatusCode::BAD_REQUEST, "the body broke off");
        let chunk = chunk.map_err(broken)?;
        if bytes.len() + chunk.len() > bytes_max {
            return Err(HttpError::too_large(bytes_max));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}
