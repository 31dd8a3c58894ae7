//! A client's request to a page: the JSON object of the body, read within its limits, and the headers that matter. Has
//! no knowledge of any page's own fields.

use crate::doors::{CACHE_HINT, SESSION};
use crate::http::error::HttpError;
use crate::http::fields::{Fields, StreamOptions};
use crate::http::packed::{BodyEncoding, decompress_gzip};
use crate::http::stopwatch::Stopwatch;
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use http::StatusCode;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use router::config::RouterLimits;
use router::front::frontend::Frontend;
use router::front::parsed_request::{BodyPermit, ParsedRequest};
use router::front::recorder::{Caller, Face, Recorder};
use router::front::resume::Resume;
use router::refusal::Refusal;
use std::future::Future;
use std::sync::Arc;
use tokio_stream::StreamExt;
use types::TenantId;

/// A client's request to a page, with its tenant.
pub struct ApiRequest {
    pub fields: Fields,
    pub tenant: TenantId,
    /// The header unchanged; empty if absent.
    last_event_id: String,
    /// The memory that the body holds until its text has become tokens.
    pub body: BodyPermit,
}

impl ApiRequest {
    /// Completes a request with the fields that all pages share.
    pub fn complete_request(
        mut self,
        parsed: ParsedRequest,
        streaming: Option<StreamOptions>,
        limits: &RouterLimits,
    ) -> Result<ParsedRequest, Refusal> {
        let certificate = self.fields.boolean("certificate")?.unwrap_or(false);
        let (cache_salt, cache_hint) = (self.fields.cache_salt()?, self.fields.cache_hint()?);
        let (placement, resume) = (self.fields.placement()?, self.resume(streaming, limits)?);
        let ApiRequest { tenant, body, .. } = self;
        Ok(ParsedRequest { tenant, placement, resume, certificate, cache_salt, cache_hint, body, ..parsed })
    }

    /// The same for pages whose streams carry no positions.
    pub fn complete_unresumable_request(
        self,
        parsed: ParsedRequest,
        limits: &RouterLimits,
    ) -> Result<ParsedRequest, Refusal> {
        match self.last_event_id.as_str() {
            "" => self.complete_request(parsed, None, limits),
            _ => Err(Refusal::invalid("Last-Event-ID", "streams of this page cannot be resumed")),
        }
    }

    /// Reserves room for more bytes than the client sent, within the limit for all bodies that are being read.
    pub fn reserve_body_bytes(&mut self, front: &Frontend, n_bytes: usize) -> Result<(), Refusal> {
        reserve_body_bytes(front, &mut self.body, n_bytes)
    }

    /// Returns the stream to resume, if any.
    fn resume(&self, streaming: Option<StreamOptions>, limits: &RouterLimits) -> Result<Option<Resume>, Refusal> {
        match (self.last_event_id.as_str(), streaming) {
            ("", _) => Ok(None),
            (_, None) => Err(Refusal::invalid("Last-Event-ID", "needs `stream` to be true")),
            (text, Some(_)) => Ok(Some(Resume::parse(text, limits.choices_resumed_max)?)),
        }
    }
}

impl FromRequest<Arc<Frontend>> for ApiRequest {
    type Rejection = HttpError;

    async fn from_request(request: Request, front: &Arc<Frontend>) -> Result<ApiRequest, HttpError> {
        read(front, request).await
    }
}

/// A client's request for an answer. It counts from its arrival, also if its body is refused.
pub struct AnswerRequest {
    pub page: ApiRequest,
    pub recorder: Recorder,
    /// Runs since the arrival.
    pub watch: Stopwatch,
}

impl FromRequest<Arc<Frontend>> for AnswerRequest {
    type Rejection = HttpError;

    async fn from_request(request: Request, front: &Arc<Frontend>) -> Result<AnswerRequest, HttpError> {
        let watch = Stopwatch::start();
        let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
        let read = read(front, request).await;
        let page = record_refusal(&mut recorder, read)?;
        Ok(AnswerRequest { page, recorder, watch })
    }
}

/// Counts a refusal that occurs before the request exists.
pub fn record_refusal<T>(recorder: &mut Recorder, read: Result<T, HttpError>) -> Result<T, HttpError> {
    read.inspect_err(|error| recorder.record_refusal_as(error.label()))
}

/// Reads the JSON object of a request's body, within its limits of size and time.
pub async fn read(front: &Frontend, request: Request) -> Result<ApiRequest, HttpError> {
    let tenant = request.extensions().get::<TenantId>().copied().unwrap_or_default();
    let limits = &front.config.limits;
    // A header that is not text is not a valid handle either, and is refused like one.
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).trim().to_owned();
    let last_event_id = request.headers().get("last-event-id").map(text).unwrap_or_default();
    let (session, cache_hint) = (plain_header(request.headers(), SESSION), plain_header(request.headers(), CACHE_HINT));
    let declared = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if declared.is_some_and(|length| length > limits.body_discarded_max) {
        return Err(HttpError::too_large(limits.body_bytes_max));
    }
    let packing = json_body_encoding(request.uri().path(), request.headers());
    let (mut bytes, mut body) = with_body_timeout(front, read_body(front, request.into_body())).await??;
    if packing? == BodyEncoding::Gzip {
        let bytes_max = limits.body_bytes_max;
        bytes = front.texts.on_thread(move || decompress_gzip(&bytes, bytes_max)).await??;
        reserve_body_bytes(front, &mut body, bytes.len())?;
    }
    let mut fields = front.texts.off_runtime(bytes.len(), move || Fields::parse(&bytes)).await??;
    if let Some(session) = session {
        fields.set_default_session(session);
    }
    if let Some(hint) = cache_hint {
        fields.set_default_cache_hint(hint);
    }
    Ok(ApiRequest { fields, tenant, last_event_id, body })
}

fn plain_header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Returns the compression of a JSON body. Refuses other compressions and content types. Ollama's and llama.cpp's pages
/// also accept the content type that curl sends with `-d`, as their servers do: the check of origins keeps forms of
/// foreign web pages out.
fn json_body_encoding(path: &str, headers: &HeaderMap) -> Result<BodyEncoding, HttpError> {
    const OF_CURL: &str = "application/x-www-form-urlencoded";
    let text =
        |name: HeaderName| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).to_lowercase());
    let refused = |message: &str| Err(HttpError::bad_request(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    let Some(packing) = BodyEncoding::parse(&text(CONTENT_ENCODING).unwrap_or_default()) else {
        return refused("this content-encoding is not supported: send the body uncompressed or with gzip");
    };
    let Some(kind) = text(CONTENT_TYPE) else { return Ok(packing) };
    let essence = kind.split(';').next().unwrap_or_default().trim();
    let is_json = essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
    match is_json || (essence == OF_CURL && !path.starts_with("/v1/")) {
        true => Ok(packing),
        false => refused("the body must be JSON: set `content-type: application/json`"),
    }
}

async fn with_body_timeout<T>(front: &Frontend, body: impl Future<Output = T>) -> Result<T, HttpError> {
    let read = tokio::time::timeout(front.config.timeouts.body_max, body).await;
    read.map_err(|_| HttpError::bad_request(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"))
}

/// Reserves more bytes for a request. Refuses if all bodies together exceed their limit.
pub fn reserve_body_bytes(front: &Frontend, room: &mut BodyPermit, n_bytes: usize) -> Result<(), Refusal> {
    let full = Refusal::Full { retry_after: front.config.timeouts.retry_after };
    let n_permits = u32::try_from(n_bytes).unwrap_or(u32::MAX);
    let taken = front.bodies.clone().try_acquire_many_owned(n_permits).map_err(|_| full)?;
    match room {
        Some(room) => room.merge(taken),
        None => *room = Some(taken),
    }
    Ok(())
}

/// Reads the body. A body that is too large, or has no room beside the others, is still read to its end, within reason:
/// a client that is still sending does not read a refusal.
async fn read_body(front: &Frontend, body: Body) -> Result<(Vec<u8>, BodyPermit), HttpError> {
    let limits = &front.config.limits;
    let mut chunks = body.into_data_stream();
    let (mut bytes, mut n_bytes, mut room, mut is_room) = (Vec::new(), 0, BodyPermit::None, true);
    while let Some(chunk) = chunks.next().await {
        let broken = |_| HttpError::bad_request(StatusCode::BAD_REQUEST, "the body ended early");
        let chunk = chunk.map_err(broken)?;
        n_bytes += chunk.len();
        if n_bytes > limits.body_discarded_max {
            break;
        }
        if n_bytes > limits.body_bytes_max || !is_room {
            continue;
        }
        match reserve_body_bytes(front, &mut room, chunk.len()) {
            Ok(()) => bytes.extend_from_slice(&chunk),
            Err(_) => is_room = false,
        }
    }
    match n_bytes > limits.body_bytes_max {
        true => Err(HttpError::too_large(limits.body_bytes_max)),
        false if !is_room => Err(Refusal::Full { retry_after: front.config.timeouts.retry_after }.into()),
        false => Ok((bytes, room)),
    }
}
