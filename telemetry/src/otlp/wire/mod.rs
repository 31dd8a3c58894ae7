//! Sends a batch to a collector and reads its answer, over gRPC or as protobuf over HTTP. Does not trust the answer:
//! waiting and reading have limits. Has no knowledge of queues.

use super::collector::{Collector, Protocol};
use super::reach::{self, ExportHeaders, error_chain};
use crate::Error;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_client::LogsServiceClient;
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::metrics::v1::{Metric, ResourceMetrics, ScopeMetrics};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::trace::SpanData;
use prost::Message;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::time::Duration;
use tokio::time::timeout;
use tonic::Code;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;

/// The limit from a batch's sending to the last byte of its answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// An answer has only the number of rejected items and the reason.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A log record with the module that logged it.
pub struct ScopedRecord {
    pub target: &'static str,
    pub log: LogRecord,
}

#[derive(Clone, Debug)]
pub enum ExportBatch {
    Spans(ExportTraceServiceRequest),
    Metrics(ExportMetricsServiceRequest),
    Logs(ExportLogsServiceRequest),
}

impl ExportBatch {
    pub fn spans(spans: Vec<SpanData>, resource: &ResourceAttributesWithSchema) -> ExportBatch {
        let resource_spans = group_spans_by_resource_and_scope(spans, resource);
        ExportBatch::Spans(ExportTraceServiceRequest { resource_spans })
    }

    pub fn metrics(metrics: Vec<Metric>, sender: &Resource) -> ExportBatch {
        let scope = Some(scope("lockstep".into()));
        let of = ScopeMetrics { scope, metrics, ..ScopeMetrics::default() };
        let resource = Some(sender.clone());
        let all = ResourceMetrics { resource, scope_metrics: vec![of], ..ResourceMetrics::default() };
        ExportBatch::Metrics(ExportMetricsServiceRequest { resource_metrics: vec![all] })
    }

    /// A log's scope is the module that logged it.
    pub fn logs(records: Vec<ScopedRecord>, sender: &Resource) -> ExportBatch {
        let mut by_scope = BTreeMap::<&'static str, Vec<_>>::new();
        for record in records {
            by_scope.entry(record.target).or_default().push(record.log);
        }
        let of = |(target, log_records): (&str, _)| {
            let scope = Some(scope(target.into()));
            ScopeLogs { scope, log_records, ..ScopeLogs::default() }
        };
        let scope_logs = by_scope.into_iter().map(of).collect();
        let all = ResourceLogs { resource: Some(sender.clone()), scope_logs, ..ResourceLogs::default() };
        ExportBatch::Logs(ExportLogsServiceRequest { resource_logs: vec![all] })
    }

    fn path(&self) -> &'static str {
        match self {
            ExportBatch::Spans(_) => "/v1/traces",
            ExportBatch::Metrics(_) => "/v1/metrics",
            ExportBatch::Logs(_) => "/v1/logs",
        }
    }

    fn bytes(&self) -> Bytes {
        match self {
            ExportBatch::Spans(request) => request.encode_to_vec(),
            ExportBatch::Metrics(request) => request.encode_to_vec(),
            ExportBatch::Logs(request) => request.encode_to_vec(),
        }
        .into()
    }

    /// Returns how many items an answer rejects, and why.
    fn partial_success(&self, answer: &[u8]) -> Result<PartialSuccess, prost::DecodeError> {
        Ok(match self {
            ExportBatch::Spans(_) => of_spans(ExportTraceServiceResponse::decode(answer)?),
            ExportBatch::Metrics(_) => of_metrics(ExportMetricsServiceResponse::decode(answer)?),
            ExportBatch::Logs(_) => of_logs(ExportLogsServiceResponse::decode(answer)?),
        })
    }
}

fn scope(name: String) -> InstrumentationScope {
    InstrumentationScope { name, version: env!("CARGO_PKG_VERSION").into(), ..InstrumentationScope::default() }
}

/// The number of rejected items of an accepted batch, and the collector's message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartialSuccess {
    pub n: u64,
    pub why: String,
}

impl PartialSuccess {
    fn new(n: i64, why: String) -> PartialSuccess {
        PartialSuccess { n: u64::try_from(n).unwrap_or(0), why }
    }
}

fn of_spans(answer: ExportTraceServiceResponse) -> PartialSuccess {
    answer
        .partial_success
        .map_or_else(PartialSuccess::default, |of| PartialSuccess::new(of.rejected_spans, of.error_message))
}

fn of_metrics(answer: ExportMetricsServiceResponse) -> PartialSuccess {
    answer
        .partial_success
        .map_or_else(PartialSuccess::default, |of| PartialSuccess::new(of.rejected_data_points, of.error_message))
}

fn of_logs(answer: ExportLogsServiceResponse) -> PartialSuccess {
    answer
        .partial_success
        .map_or_else(PartialSuccess::default, |of| PartialSuccess::new(of.rejected_log_records, of.error_message))
}

/// Why a collector did not accept a batch.
#[derive(Debug)]
pub struct ExportFailure {
    pub why: String,
    /// Whether another try may succeed.
    pub is_passing: bool,
}

impl ExportFailure {
    fn transient(why: impl std::fmt::Display) -> ExportFailure {
        ExportFailure { why: why.to_string(), is_passing: true }
    }
}

#[derive(Clone, Debug)]
pub struct CollectorClient {
    way: ExportTransport,
    headers: ExportHeaders,
}

#[derive(Clone, Debug)]
enum ExportTransport {
    Grpc(Channel),
    Http { client: Box<HttpClient>, base: String },
}

type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

impl CollectorClient {
    /// Makes the client. Requires a runtime, and dials nothing yet.
    pub fn to(collector: &Collector) -> Result<CollectorClient, Error> {
        let Collector { endpoint, authority, .. } = collector;
        let authority = authority.as_deref();
        let way = match collector.protocol {
            Protocol::Grpc => ExportTransport::Grpc(reach::channel(endpoint, authority, ANSWER_MAX)?),
            Protocol::Http => {
                let client = Client::builder(TokioExecutor::new()).build(reach::connector(endpoint, authority)?);
                let base = reach::address(endpoint, authority)?.0.trim_end_matches('/').to_owned();
                ExportTransport::Http { client: Box::new(client), base }
            }
        };
        Ok(CollectorClient { way, headers: collector.headers.clone() })
    }

    pub async fn send(&self, batch: &ExportBatch) -> Result<PartialSuccess, ExportFailure> {
        let headers = self.headers.map();
        let sent = async {
            match &self.way {
                ExportTransport::Grpc(channel) => by_grpc(channel.clone(), batch.clone(), headers).await,
                ExportTransport::Http { client, base } => by_http(client, base, batch, headers).await,
            }
        };
        timeout(ANSWER_MAX, sent).await.unwrap_or_else(|_| Err(ExportFailure::transient("no answer in time")))
    }
}

fn with<T>(headers: &HeaderMap, message: T) -> tonic::Request<T> {
    tonic::Request::from_parts(MetadataMap::from_headers(headers.clone()), tonic::Extensions::default(), message)
}

async fn by_grpc(channel: Channel, batch: ExportBatch, headers: &HeaderMap) -> Result<PartialSuccess, ExportFailure> {
    let answer = match batch {
        ExportBatch::Spans(request) => {
            let grpc_request = with(headers, request);
            TraceServiceClient::new(channel).export(grpc_request).await.map(|answer| of_spans(answer.into_inner()))
        }
        ExportBatch::Metrics(request) => {
            let grpc_request = with(headers, request);
            MetricsServiceClient::new(channel).export(grpc_request).await.map(|answer| of_metrics(answer.into_inner()))
        }
        ExportBatch::Logs(request) => {
            let grpc_request = with(headers, request);
            LogsServiceClient::new(channel).export(grpc_request).await.map(|answer| of_logs(answer.into_inner()))
        }
    };
    // The division into temporary and final failures follows OTLP's specification.
    answer.map_err(|status| ExportFailure {
        why: format!("{:?}: {}", status.code(), status.source().map_or(status.message().into(), error_chain)),
        is_passing: matches!(
            status.code(),
            Code::Cancelled
                | Code::DeadlineExceeded
                | Code::ResourceExhausted
                | Code::Aborted
                | Code::OutOfRange
                | Code::Unavailable
                | Code::DataLoss
        ),
    })
}

async fn by_http(
    client: &HttpClient,
    base: &str,
    batch: &ExportBatch,
    headers: &HeaderMap,
) -> Result<PartialSuccess, ExportFailure> {
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(format!("{base}{}", batch.path()))
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .body(Full::new(batch.bytes()))
        .map_err(|error| ExportFailure { why: error.to_string(), is_passing: false })?;
    request.headers_mut().extend(headers.clone());
    let answer = client.request(request).await.map_err(|error| ExportFailure::transient(error_chain(&error)))?;
    let status = answer.status();
    let read = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = read.map_err(|error| ExportFailure { why: error.to_string(), is_passing: false })?.to_bytes();
    if !status.is_success() {
        let is_passing = matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
        );
        return Err(ExportFailure { why: status.to_string(), is_passing });
    }
    batch
        .partial_success(&body)
        .map_err(|error| ExportFailure { why: format!("malformed answer: {error}"), is_passing: false })
}

#[cfg(test)]
mod tests;
