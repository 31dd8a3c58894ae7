//! API keys, client certificates, limits and request ids of the HTTP pages. Has no knowledge of pages.

use crate::doors::panics::{PanicError, catch_panic};
use crate::doors::revocable::{LastFrame, RevocableBody};
use crate::http::error::HttpError;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, StatusCode};
use router::front::frontend::Frontend;
use router::limits::keys::{AdmittedClient, Role};
use router::limits::tenants::{LimitState, TenantLimits};
use router::refusal::Refusal;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use types::TenantId;
use wire::ClientCertificate;

/// The header in which a client or its proxy names a request.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID_CHARS_MAX: usize = 128;

/// A request's name, for APIs that return it in another form.
#[derive(Clone)]
pub struct RequestIdHeader(pub HeaderValue);

/// Adds the client's request id to every answer, or else one of this router: 32 hexadecimal digits, like vLLM's.
pub async fn set_request_id(State(front): State<Arc<Frontend>>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| is_plain(id.as_bytes())).cloned();
    let own = || HeaderValue::from_str(&format!("{:08x}{:024x}", front.ids.nonce(), front.ids.next_request()));
    let Some(id) = given.or_else(|| own().ok()) else { return next.run(request).await };
    request.extensions_mut().insert(RequestIdHeader(id.clone()));
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Whether an id needs no escaping in a log.
fn is_plain(id: &[u8]) -> bool {
    let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(byte);
    !id.is_empty() && id.len() <= REQUEST_ID_CHARS_MAX && id.iter().all(is_letter)
}

/// The key's owner and role, for pages that show operators more.
#[derive(Clone, Copy, Debug)]
pub struct Viewer {
    pub tenant: TenantId,
    pub role: Role,
    pub sees_cluster: bool,
}

impl Viewer {
    /// Returns the tenant whose requests this viewer sees. None: all requests.
    pub fn tenant_filter(self) -> Option<TenantId> {
        (self.role == Role::Tenant).then_some(self.tenant)
    }
}

/// Cancelled when a request's key is revoked, for work that continues without its client.
#[derive(Clone, Default)]
pub struct KeyRevoked(pub CancellationToken);

/// Admits keys that may see the cluster: those of operators, or every key if no key is an operator's.
pub async fn authorize_cluster(State(front): State<Arc<Frontend>>, request: Request, next: Next) -> Response {
    let admitted = admitted_client(&front, request.headers());
    match &admitted {
        Some(AdmittedClient { role, .. }) if !front.shows_cluster_to(*role) => {
            let message = "this key may see only its own requests; the cluster needs a key with `role=operator`";
            HttpError::bad_request(StatusCode::FORBIDDEN, message).into_response()
        }
        _ => run_if_admitted(&front, admitted, request, next).await,
    }
}

/// Admits requests with a valid key, and passes the tenant to the page.
pub async fn authorize(State(front): State<Arc<Frontend>>, request: Request, next: Next) -> Response {
    let admitted = admitted_client(&front, request.headers());
    run_if_admitted(&front, admitted, request, next).await
}

/// Admits operators by their own keys, on their own port.
pub async fn authorize_operator(State(front): State<Arc<Frontend>>, mut request: Request, next: Next) -> Response {
    let authorization = header_text(request.headers(), AUTHORIZATION.as_str());
    match &front.config.operators {
        Some(keys) if keys.authorized(authorization).is_none() => no_key(request.headers()).into_response(),
        _ => {
            let (tenant, role) = (TenantId::default(), Role::Operator);
            request.extensions_mut().insert(Viewer { tenant, role, sees_cluster: true });
            next.run(request).await
        }
    }
}

/// The same for pages whose clients may also send the key as `x-api-key`.
pub async fn authorize_bearer_or_bare(State(front): State<Arc<Frontend>>, request: Request, next: Next) -> Response {
    let bare = || front.config.keys.client_of_key(header_text(request.headers(), "x-api-key")?.trim());
    let admitted = admitted_client(&front, request.headers()).or_else(bare);
    run_if_admitted(&front, admitted, request, next).await
}

async fn run_if_admitted(
    front: &Frontend,
    admitted: Option<AdmittedClient>,
    mut request: Request,
    next: Next,
) -> Response {
    let no_key = no_key(request.headers());
    let Some(AdmittedClient { tenant, role, revoked }) = admitted else { return no_key.into_response() };
    request.extensions_mut().insert(tenant);
    request.extensions_mut().insert(KeyRevoked(revoked.clone()));
    request.extensions_mut().insert(Viewer { tenant, role, sees_cluster: front.shows_cluster_to(role) });
    let Some(mut response) = revoked.run_until_cancelled(next.run(request)).await else {
        return no_key.into_response();
    };
    add_limit_headers(&front.config.keys.tenant_limits(tenant), response.headers_mut());
    end_when(response, revoked, || Refusal::UnknownKey)
}

/// Ends the requests of a connection when its client's certificate ends.
pub async fn end_with_certificate(request: Request, next: Next) -> Response {
    let Some(certificate) = request.extensions().get::<ClientCertificate>().cloned() else {
        return next.run(request).await;
    };
    let (ended, why) = (certificate.ended(), || Refusal::CertificateEnded);
    let answered = if ended.is_cancelled() { None } else { ended.run_until_cancelled(next.run(request)).await };
    match answered {
        None => HttpError::from(why()).into_response(),
        Some(response) => end_when(response, ended.clone(), why),
    }
}

/// Returns the error for a missing key, or for an unknown one.
fn no_key(headers: &HeaderMap) -> HttpError {
    let is_given = headers.contains_key(AUTHORIZATION) || headers.contains_key("x-api-key");
    HttpError::from(if is_given { Refusal::UnknownKey } else { Refusal::NoKey })
}

/// Ends a stream with this reason when `ended` is cancelled. Anthropic's clients recognise an error by the event's
/// name, OpenAI's by its content.
fn end_when(response: Response, ended: CancellationToken, why: fn() -> Refusal) -> Response {
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    let error = HttpError::from(why()).body()["error"].take();
    let is_events = response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == "text/event-stream");
    let last = match is_events {
        true => {
            LastFrame::Event(format!("event: error\ndata: {}\n\n", json!({ "type": "error", "error": error })).into())
        }
        false => LastFrame::Break(axum::Error::new(why())),
    };
    response.map(|body| Body::new(RevocableBody::new(body, ended, last)))
}

/// Writes the remaining part of a tenant's limits into OpenAI's headers.
fn add_limit_headers(tenant: &TenantLimits, headers: &mut HeaderMap) {
    const REQUESTS: [&str; 3] =
        ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
    const TOKENS: [&str; 3] = ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];
    for (names, standing) in [REQUESTS, TOKENS].into_iter().zip(tenant.limit_states()) {
        let Some(LimitState { max, left, full_in }) = standing else { continue };
        let [limit, remaining, reset] = names.map(HeaderName::from_static);
        headers.insert(limit, max.into());
        headers.insert(remaining, left.into());
        let text = HeaderValue::from_str(&format_duration(full_in));
        headers.insert(reset, text.unwrap_or(HeaderValue::from_static("0s")));
    }
}

/// Formats a duration as `6m0s`, `1.5s` or `20ms`.
fn format_duration(time: Duration) -> String {
    let (minutes, millis) = (time.as_secs() / 60, time.as_millis() % 60_000);
    match (minutes, millis) {
        (0, 0) => "0s".into(),
        (0, millis) if millis < 1000 => format!("{millis}ms"),
        (0, millis) => format!("{}s", millis as f64 / 1000.0),
        (minutes, millis) => format!("{minutes}m{}s", millis as f64 / 1000.0),
    }
}

fn admitted_client(front: &Frontend, headers: &HeaderMap) -> Option<AdmittedClient> {
    front.config.keys.authorized_client(header_text(headers, AUTHORIZATION.as_str()))
}

fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Confines a panic to its request.
pub async fn catch_panics(request: Request, next: Next) -> Response {
    let answered = catch_panic(next.run(request)).await;
    answered.unwrap_or_else(|PanicError| HttpError::from(Refusal::failed("the request caused a panic")).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_use_openai_format() {
        let check = |millis, text: &str| assert_eq!(format_duration(Duration::from_millis(millis)), text);
        check(0, "0s");
        check(20, "20ms");
        check(1000, "1s");
        check(1500, "1.5s");
        check(360_000, "6m0s");
        check(61_250, "1m1.25s");
    }
}
