//! Checks of a gRPC call before it is read: its key and its client's certificate must be valid, and its body must
//! arrive in time. A panic behind the gate ends only this call. Has no knowledge of methods except their paths.

use crate::doors::call::{gate_timeout, status};
use crate::doors::panics::{PanicError, catch_panic};
use crate::doors::revocable::{LastFrame, RevocableBody};
use axum::body::BodyDataStream;
use bytes::Bytes;
use http::header::{AUTHORIZATION, HeaderValue};
use http::{HeaderMap, Request, Response};
use http_body::Body as _;
use router::front::frontend::Frontend;
use router::refusal::Refusal;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Sleep, sleep, timeout};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};
use wire::ClientCertificate;

/// Paths that probes and tools may call without a key.
const OPEN: [&str; 7] = [
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
    "/vllm.grpc.engine.VllmEngine/HealthCheck",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/inference.GRPCInferenceService/ModelReady",
];
/// A stream of requests, which may stay open without a limit.
const ENDLESS: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

#[derive(Clone)]
pub struct GrpcGate(pub Arc<Frontend>);

impl<S> Layer<S> for GrpcGate {
    type Service = GatedService<S>;

    fn layer(&self, inner: S) -> GatedService<S> {
        GatedService { front: self.0.clone(), inner }
    }
}

#[derive(Clone)]
pub struct GatedService<S> {
    front: Arc<Frontend>,
    inner: S,
}

impl<S> GatedService<S> {
    /// Returns a token that is cancelled when the call's key is revoked, or never if no key is required. None: the call
    /// may not pass.
    fn authorize(&self, request: &Request<Body>) -> Option<CancellationToken> {
        let path = request.uri().path();
        let is_open = |open: &&str| if open.ends_with('/') { path.starts_with(*open) } else { path == *open };
        if OPEN.iter().any(is_open) {
            return Some(CancellationToken::new());
        }
        let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        self.front.config.keys.authorized_client(authorization).map(|admitted| admitted.revoked)
    }
}

impl<S> Service<Request<Body>> for GatedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + 'static,
    S::Error: Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let no_key = || status(Refusal::NoKey).into_http();
        let Some(revoked) = self.authorize(&request) else {
            return Box::pin(std::future::ready(Ok(no_key())));
        };
        let certificate = request.extensions().get::<Option<ClientCertificate>>().cloned().flatten();
        let certificate_ended = certificate.as_ref().map(|certificate| certificate.ended().clone());
        let no_certificate = || status(Refusal::CertificateEnded).into_http();
        if certificate_ended.as_ref().is_some_and(CancellationToken::is_cancelled) {
            return Box::pin(std::future::ready(Ok(no_certificate())));
        }
        let is_endless = request.uri().path() == ENDLESS;
        let body_max = self.front.config.timeouts.body_max;
        let request = if is_endless { request } else { request.map(|body| with_deadline(body, body_max)) };
        let wait_max = gate_timeout(request.headers());
        let answered = catch_panic(self.inner.call(request));
        Box::pin(async move {
            let in_time = async {
                match wait_max {
                    Some(wait_max) => {
                        timeout(wait_max, answered).await.unwrap_or_else(|_| Ok(Ok(deadline_status().into_http())))
                    }
                    None => answered.await,
                }
            };
            let accepted = certificate_ended.clone().unwrap_or_default();
            let answered = accepted.run_until_cancelled(revoked.run_until_cancelled(in_time)).await;
            let Some(answered) = answered else { return Ok(no_certificate()) };
            let Some(answered) = answered else { return Ok(no_key()) };
            let answered = answered.unwrap_or_else(|PanicError| Ok(panic_status().into_http()));
            answered.map(|answer| {
                let answer = map_size_limit_status(answer).map(|body| end_when(body, revoked, Refusal::NoKey));
                match certificate_ended {
                    None => answer,
                    Some(ended) => answer.map(|body| end_when(body, ended, Refusal::CertificateEnded)),
                }
            })
        })
    }
}

fn deadline_status() -> Status {
    status(Refusal::Deadline)
}

/// Reports a message beyond the limit with the code of other servers. The library's code is OUT_OF_RANGE.
fn map_size_limit_status(mut response: Response<Body>) -> Response<Body> {
    let code = response.headers_mut().get_mut("grpc-status");
    if let Some(code) = code.filter(|code| code.as_bytes() == (Code::OutOfRange as i32).to_string().as_bytes()) {
        *code = HeaderValue::from(Code::ResourceExhausted as i32);
    }
    response
}

/// Ends a call with this reason when `ended` is cancelled.
fn end_when(body: Body, ended: CancellationToken, why: Refusal) -> Body {
    let why = status(why);
    let mut trailers = HeaderMap::new();
    let last = match why.add_header(&mut trailers) {
        Ok(()) => LastFrame::Trailers(trailers),
        Err(_) => LastFrame::Break(why),
    };
    if body.is_end_stream() { body } else { Body::new(RevocableBody::new(body, ended, last)) }
}

fn panic_status() -> Status {
    status(Refusal::failed("the request caused a panic"))
}

/// Returns a body that breaks off if it does not end in time.
fn with_deadline(body: Body, body_max: Duration) -> Body {
    let chunks = axum::body::Body::new(body).into_data_stream();
    Body::new(axum::body::Body::from_stream(TimedBody { chunks, late: Box::pin(sleep(body_max)) }))
}

struct TimedBody {
    chunks: BodyDataStream,
    late: Pin<Box<Sleep>>,
}

impl Stream for TimedBody {
    type Item = Result<Bytes, Box<dyn std::error::Error + Send + Sync>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match Pin::new(&mut self.chunks).poll_next(context) {
            Poll::Ready(chunk) => Poll::Ready(chunk.map(|chunk| chunk.map_err(Into::into))),
            Poll::Pending => {
                let late = || Status::deadline_exceeded("the request did not arrive in time");
                self.late.as_mut().poll(context).map(|()| Some(Err(late().into())))
            }
        }
    }
}
