//! A small collector: receives OTLP over gRPC or HTTP, and sends scripted answers.
#![allow(dead_code, reason = "each test binary uses a part")]

use opentelemetry_proto::tonic::collector::logs::v1::logs_service_server::{LogsService, LogsServiceServer};
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
pub struct Collector {
    pub traces: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    pub metrics: Arc<Mutex<Vec<ExportMetricsServiceRequest>>>,
    pub logs: Arc<Mutex<Vec<ExportLogsServiceRequest>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.traces.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Collector {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.metrics.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl LogsService for Collector {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        self.logs.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportLogsServiceResponse::default()))
    }
}

impl Collector {
    /// Listens over gRPC; returns the address.
    pub fn grpc(&self, runtime: &tokio::runtime::Runtime) -> String {
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(self.clone()))
            .add_service(MetricsServiceServer::new(self.clone()))
            .add_service(LogsServiceServer::new(self.clone()));
        runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    /// Listens over HTTP. `answer` gets the path and the number of earlier requests to it.
    pub fn http(&self, answer: fn(&str, usize) -> Answer) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let collector = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let connection_collector = collector.clone();
                std::thread::spawn(move || connection_collector.connection(stream, answer));
            }
        });
        address
    }

    fn connection(&self, stream: TcpStream, answer: fn(&str, usize) -> Answer) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        while let Some((path, body)) = read(&mut reader) {
            let n_before = self.take(&path, &body);
            let Answer { status, body } = answer(&path, n_before);
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
            if stream.write_all(&[head.as_bytes(), &body].concat()).is_err() {
                return;
            }
        }
    }

    fn take(&self, path: &str, body: &[u8]) -> usize {
        fn push<T: Message + Default>(to: &Mutex<Vec<T>>, body: &[u8]) -> usize {
            let mut to = to.lock().unwrap();
            to.push(T::decode(body).unwrap());
            to.len() - 1
        }
        match path {
            "/v1/traces" => push(&self.traces, body),
            "/v1/metrics" => push(&self.metrics, body),
            "/v1/logs" => push(&self.logs, body),
            other => panic!("{other}"),
        }
    }

    pub fn spans(&self) -> Vec<Span> {
        let traces = self.traces.lock().unwrap();
        let scopes = traces.iter().flat_map(|request| &request.resource_spans).flat_map(|of| &of.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// Returns the log records with their scopes.
    pub fn records(&self) -> Vec<(String, LogRecord)> {
        let logs = self.logs.lock().unwrap();
        let scopes = logs.iter().flat_map(|request| &request.resource_logs).flat_map(|of| &of.scope_logs);
        let named =
            scopes.flat_map(|of| of.log_records.iter().map(|log| (of.scope.clone().unwrap().name, log.clone())));
        named.collect()
    }

    /// Returns the metrics of the last page that was sent.
    pub fn last_metrics(&self) -> Vec<Metric> {
        let metrics = self.metrics.lock().unwrap();
        let last = metrics.last().unwrap().resource_metrics.iter().flat_map(|of| &of.scope_metrics);
        last.flat_map(|scope| scope.metrics.clone()).collect()
    }
}

/// An answer of a collector over HTTP.
pub struct Answer {
    pub status: &'static str,
    pub body: Vec<u8>,
}

pub fn taken(_: &str, _: usize) -> Answer {
    Answer { status: "200 OK", body: Vec::new() }
}

/// An answer that refuses one span of a batch.
pub fn partly(why: &str) -> Vec<u8> {
    let partial = ExportTracePartialSuccess { rejected_spans: 1, error_message: why.into() };
    ExportTraceServiceResponse { partial_success: Some(partial) }.encode_to_vec()
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, body))
}

pub fn find(attributes: &[KeyValue], name: &str) -> Option<Value> {
    let found = attributes.iter().find(|attribute| attribute.key == name)?;
    found.value.clone()?.value
}

pub fn attribute(span: &Span, name: &str) -> Option<Value> {
    find(&span.attributes, name)
}

pub fn text(of: &str) -> Option<Value> {
    Some(Value::StringValue(of.into()))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
