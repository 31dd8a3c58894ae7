//! A collector of a few lines hears the spans of a request over OTLP, as a tree, within the caller's trace.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use telemetry::logs::Telling;
use telemetry::spans::{self, Usage};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    fn spans(&self) -> Vec<Span> {
        let heard = self.0.lock().unwrap();
        let scopes = heard.iter().flat_map(|request| &request.resource_spans).flat_map(|of| &of.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }
}

fn attribute(span: &Span, name: &str) -> Option<Value> {
    let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
    found.value.clone()?.value
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// What router, coordinator and rank do with one request.
fn one_request() {
    let request = spans::request("http", CALLER, "vendor=1");
    assert!(request.is_recorded());
    drop(request.prepare());
    request.begun("chatcmpl-1", "toy", 2);
    let sequence = spans::sequence(&request.traceparent(), 7, 5, 0);
    let step = spans::step(3, 1, 1, 5);
    step.link(&sequence);
    let pass = spans::pass(&step.traceparent(), 3, 1);
    pass.waited(Duration::from_micros(9));
    drop((pass, step));
    sequence.sequence_started(Duration::from_millis(2), 4);
    sequence.sequence_ended("stop", 6);
    drop(sequence);
    request.first_token(Duration::from_millis(3));
    request.ended("ok", Usage { n_prompt: 5, n_cached: 4, n_output: 6 });
}

#[test]
fn a_collector_hears_a_request_as_a_tree() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let collector = Collector::default();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let service = TraceServiceServer::new(collector.clone());
    runtime.spawn(
        tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)),
    );
    telemetry::logs::init(Telling { filter: "info", collector: Some(&address), steps: true, ..Telling::default() })
        .unwrap();
    one_request();
    let refused = spans::request("grpc", "no traceparent at all", "");
    refused.ended("full", Usage::default());
    drop(refused);
    let recovery = spans::recovery(4);
    recovery.recovered_from("hung", Some((3, "there")));
    recovery.recovered_on(2, 1, 77);
    drop(recovery);
    telemetry::flush();
    let heard = collector.spans();
    let named = |name: &str| heard.iter().find(|span| span.name == name).unwrap();
    let (request, prepare, sequence) = (named("request"), named("prepare"), named("sequence"));
    let (step, pass) = (named("step"), named("pass"));
    assert_eq!(format!("00-{}-{}-01", hex(&request.trace_id), hex(&request.parent_span_id)), CALLER);
    assert_eq!(request.trace_state, "vendor=1");
    for (child, parent) in [(prepare, request), (sequence, request), (pass, step)] {
        assert_eq!((&child.trace_id, &child.parent_span_id), (&parent.trace_id, &parent.span_id), "{}", child.name);
    }
    assert_eq!((step.parent_span_id.len(), &step.links[0].span_id), (0, &sequence.span_id));
    assert_eq!(attribute(request, "gen_ai.usage.output_tokens"), Some(Value::IntValue(6)));
    assert_eq!(attribute(request, "gen_ai.response.time_to_first_chunk"), Some(Value::DoubleValue(0.003)));
    assert_eq!(attribute(sequence, "lockstep.id"), Some(Value::StringValue("0000000000000007".into())));
    assert_eq!(attribute(pass, "lockstep.wait_micros"), Some(Value::IntValue(9)));
    assert_eq!(attribute(pass, "lockstep.rank"), Some(Value::IntValue(1)));
    let recovery = named("recovery");
    let told = ["lockstep.rank", "lockstep.tp", "lockstep.pp", "lockstep.replayed_tokens"];
    let told = told.map(|name| attribute(recovery, name));
    assert_eq!(told, [3, 2, 1, 77].map(|n| Some(Value::IntValue(n))));
    assert_eq!(attribute(recovery, "lockstep.cause"), Some(Value::StringValue("hung".into())));
    let other = heard.iter().rfind(|span| span.name == "request").unwrap();
    assert_eq!((other.parent_span_id.len(), other.status.as_ref().unwrap().code), (0, 2));
    let resource = collector.0.lock().unwrap()[0].resource_spans[0].resource.clone().unwrap();
    let service = resource.attributes.iter().find(|attribute| attribute.key == "service.name").unwrap();
    assert_eq!(service.value.clone().unwrap().value, Some(Value::StringValue("lockstep".into())));
}
