//! Who comes in, and what browsers may do: API keys and CORS. Knows no page.

use crate::generate::Front;
use crate::http::error::HttpError;
use crate::refusal::Refusal;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, AUTHORIZATION, HeaderValue,
};
use http::{HeaderMap, Method, StatusCode};
use std::sync::Arc;
use types::TenantId;

/// Lets in who has a key, and notes whose it is for the page.
pub async fn authorize(State(front): State<Arc<Front>>, request: Request, next: Next) -> Response {
    let tenant = tenant(&front, request.headers());
    enter(tenant, request, next).await
}

/// The same for pages whose clients call it `x-api-key`.
pub async fn authorize_either(State(front): State<Arc<Front>>, request: Request, next: Next) -> Response {
    let bare = || front.config.keys.tenant(text(request.headers(), "x-api-key")?.trim());
    let tenant = tenant(&front, request.headers()).or_else(bare);
    enter(tenant, request, next).await
}

async fn enter(tenant: Option<TenantId>, mut request: Request, next: Next) -> Response {
    match tenant {
        Some(tenant) => {
            request.extensions_mut().insert(tenant);
            next.run(request).await
        }
        None => HttpError::from(Refusal::NoKey).into_response(),
    }
}

fn tenant(front: &Front, headers: &HeaderMap) -> Option<TenantId> {
    front.config.keys.authorized(text(headers, AUTHORIZATION.as_str()))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Pages of any origin may ask: a key is what keeps others out, and cookies are none.
pub async fn cors(request: Request, next: Next) -> Response {
    const ANY: HeaderValue = HeaderValue::from_static("*");
    let is_preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match is_preflight {
        true => preflight(request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS).cloned()),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("retry-after"));
    response
}

fn preflight(wanted: Option<HeaderValue>) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    // Said back as it came: `*` does not stand for `authorization`.
    let allowed = wanted.unwrap_or(HeaderValue::from_static("authorization, content-type"));
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
    response
}
