//! Spans over the whole path: the built binary serves a grid of processes, and a collector receives one request from
//! the router to each rank's passes, within the caller's trace.

use crate::common::node::{Node, PATIENCE};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::process::Command;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        // Ranks are separate processes, which must have the setting too.
        if request.metadata().get("x-key").is_none_or(|key| key != "a key") {
            return Err(Status::unauthenticated("who are you?"));
        }
        let scopes = request.into_inner().resource_spans.into_iter().flat_map(|of| of.scope_spans);
        self.0.lock().unwrap().extend(scopes.flat_map(|scope| scope.spans));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn collector() -> (Runtime, Collector, String) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let (collector, address) = (Collector::default(), listener.local_addr().unwrap().to_string());
    let service = TraceServiceServer::new(collector.clone());
    let server = tonic::transport::Server::builder().add_service(service);
    runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (runtime, collector, format!("http://{address}"))
}

fn number(span: &Span, name: &str) -> i64 {
    let found = span.attributes.iter().find(|attribute| attribute.key == name);
    match found.and_then(|attribute| attribute.value.clone()?.value) {
        Some(Value::IntValue(number)) => number,
        other => panic!("{name} of {}: {other:?}", span.name),
    }
}

const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const TRACE: u128 = 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c;

fn send_request(http: &str) {
    let body = json!({ "prompt": "hello", "max_tokens": 6, "ignore_eos": true, "n": 2, "seed": 1 });
    let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build().into();
    let request = agent.post(format!("{http}/v1/completions")).header("content-type", "application/json");
    request.header("traceparent", CALLER).send(body.to_string()).unwrap();
}

#[test]
fn one_request_is_traced_from_the_door_to_every_rank() {
    let (_runtime, collector, endpoint) = collector();
    let model = ["serve", "tests/reference/llama-f32-tied", "--threads", "1", "--tp", "2", "--grpc", "127.0.0.1:0"];
    let traced = ["--http", "127.0.0.1:0", "--otlp", &endpoint, "--otlp-steps", "--otlp-headers", "x-key=a%20key"];
    let mut node = Node::start(&[&model[..], &traced].concat());
    let http = node.http();
    node.until_ready(&http);
    send_request(&http);
    // A process that ends sends its remaining spans.
    kill_process(Pid::from_raw(node.pid().cast_signed()).unwrap(), Signal::TERM).unwrap();
    assert!(node.ended().success(), "{}", node.log());
    let received = collector.0.lock().unwrap();
    let named = |name: &str| received.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let (requests, sequences) = (named("text_completion llama-f32-tied"), named("sequence"));
    let (steps, passes) = (named("step"), named("pass"));
    assert_eq!((requests.len(), named("prepare").len(), sequences.len(), named("queue").len()), (1, 1, 2, 2));
    let request = requests[0];
    assert!(
        [&requests[..], &sequences, &named("prepare")].concat().iter().all(|span| span.trace_id == TRACE.to_be_bytes())
    );
    assert!(sequences.iter().all(|sequence| sequence.parent_span_id == request.span_id));
    assert_eq!(number(request, "gen_ai.usage.output_tokens"), 12);
    for sequence in &sequences {
        let n_steps = number(sequence, "lockstep.steps");
        let linked = |step: &&&Span| step.links.iter().any(|link| link.span_id == sequence.span_id);
        assert!(n_steps >= 6 && steps.iter().filter(linked).count() as i64 == n_steps);
    }
    for step in &steps {
        let of_step = passes.iter().filter(|pass| pass.parent_span_id == step.span_id);
        let mut ranks: Vec<i64> = of_step.map(|pass| number(pass, "lockstep.rank")).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1]);
    }
}

#[test]
fn collector_headers_are_printed_nowhere() {
    for role in [&["serve"][..], &["coordinator"], &["router", "--coordinator", "a:1"], &["worker", "--join", "a:1"]] {
        for flag in ["--print-config", "--help"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
            command.args(role).arg(flag).env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hidden");
            // An empty variable, as Compose sets it without a value.
            let output = command.env("OTEL_EXPORTER_OTLP_CERTIFICATE", "").output().unwrap();
            assert!(output.status.success(), "{role:?} {flag}");
            let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
            assert!(!printed.is_empty() && !printed.contains("hidden"), "{role:?} {flag}: {printed}");
        }
    }
}
