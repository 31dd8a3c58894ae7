//! A small collector receives the spans of a request over OTLP/gRPC, as a tree, within the caller's trace; and metrics
//! and logs beside them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Collector, attribute, find, hex, text};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use std::time::Duration;
use telemetry::TokenUsage;
use telemetry::logs::LogOptions;
use telemetry::metrics::{self, ReplicaLabel};
use telemetry::spans::{self, RequestAttributes, SequenceSteps};

const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// The header of a caller that records nothing.
const UNSAMPLED: &str = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

/// Makes the spans of router, coordinator and rank for one request.
fn one_request() {
    let request = spans::request("http", CALLER, "vendor=1");
    assert!(request.is_recorded());
    let model = "toy".to_owned();
    let attributes = RequestAttributes {
        operation: "chat",
        model,
        n_choices: 2,
        temperature: Some(0.5),
        seed: Some(7),
        ..RequestAttributes::default()
    };
    request.record_request(&RequestAttributes { stops: vec!["secret".into()], ..attributes });
    drop(request.preparation_span());
    drop(request.placement_span());
    request.record_dispatch("chatcmpl-1", "chat", "toy-1");
    let carried = request.trace_headers();
    assert_eq!(carried.state, "vendor=1");
    let sequence = spans::sequence(&carried.parent, &carried.state, 7, 5, 0);
    let queue = sequence.queue_span();
    let step = spans::step(3, 1, 1, 5);
    step.link(&sequence);
    drop(queue);
    let pass = spans::pass(&step.trace_headers().parent, 3, 1);
    pass.record_wait(Duration::from_micros(9));
    drop((pass, step));
    sequence.sequence_started(Duration::from_millis(2), 4);
    sequence.sequence_ended("stop", SequenceSteps { n: 6, drafts_accepted: 3, drafts_rejected: 2 });
    drop(sequence);
    request.record_first_token(Duration::from_millis(3));
    request.log_within(|| tracing::info!(n = 4, "logged in a request"));
    request.record_end("ok", TokenUsage { n_prompt: 5, n_cached: 4, n_output: 6 }, &["stop", "length"]);
}

/// Makes a request whose caller is not sampled, which leaves no spans on either side of the wire.
fn one_unsampled() {
    let request = spans::request("http", UNSAMPLED, "");
    request.record_dispatch("chatcmpl-2", "chat", "toy-1");
    let carried = request.trace_headers();
    assert!(carried.parent.starts_with(&UNSAMPLED[..35]) && carried.parent.ends_with("-00"), "{}", carried.parent);
    let sequence = spans::sequence(&carried.parent, "", 8, 5, 0);
    let step = spans::step(99, 1, 1, 5);
    step.link(&sequence);
    drop(spans::pass(&step.trace_headers().parent, 99, 0));
}

fn check_tree(collector: &Collector) {
    let received = collector.spans();
    let named = |name: &str| received.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name}"));
    let (request, prepare, sequence) = (named("chat toy-1"), named("prepare"), named("sequence"));
    let (step, pass) = (named("step"), named("pass"));
    assert_eq!(format!("00-{}-{}-01", hex(&request.trace_id), hex(&request.parent_span_id)), CALLER);
    assert_eq!((&*request.trace_state, &*sequence.trace_state), ("vendor=1", "vendor=1"));
    let of_request = [(prepare, request), (named("place"), request), (sequence, request), (named("queue"), sequence)];
    for (child, parent) in of_request.into_iter().chain([(pass, step)]) {
        assert_eq!((&child.trace_id, &child.parent_span_id), (&parent.trace_id, &parent.span_id), "{}", child.name);
    }
    assert_eq!((step.parent_span_id.len(), &step.links[0].span_id), (0, &sequence.span_id));
    for (name, expect) in [
        ("gen_ai.operation.name", text("chat")),
        ("gen_ai.provider.name", text("lockstep")),
        ("gen_ai.request.model", text("toy")),
        ("gen_ai.response.model", text("toy-1")),
        ("gen_ai.request.temperature", Some(Value::DoubleValue(0.5))),
        ("gen_ai.request.seed", Some(Value::IntValue(7))),
        ("gen_ai.request.choice.count", Some(Value::IntValue(2))),
        ("gen_ai.request.max_tokens", None),
        // Content was not enabled.
        ("gen_ai.request.stop_sequences", None),
        ("gen_ai.usage.output_tokens", Some(Value::IntValue(6))),
        ("gen_ai.response.time_to_first_chunk", Some(Value::DoubleValue(0.003))),
    ] {
        assert_eq!(attribute(request, name), expect, "{name}");
    }
    let Some(Value::ArrayValue(reasons)) = attribute(request, "gen_ai.response.finish_reasons") else {
        panic!("no reasons")
    };
    let reasons: Vec<_> = reasons.values.into_iter().map(|reason| reason.value).collect();
    assert_eq!(reasons, [text("stop"), text("length")]);
    assert_eq!(attribute(sequence, "lockstep.id"), text("0000000000000007"));
    let drafts = ["lockstep.drafts_accepted", "lockstep.drafts_rejected"].map(|name| attribute(sequence, name));
    assert_eq!(drafts, [Some(Value::IntValue(3)), Some(Value::IntValue(2))]);
    assert_eq!(attribute(pass, "lockstep.wait_micros"), Some(Value::IntValue(9)));
    assert_eq!(attribute(pass, "lockstep.rank"), Some(Value::IntValue(1)));
    let recovery = named("recovery");
    let keys = ["lockstep.rank", "lockstep.tp", "lockstep.pp", "lockstep.replayed_tokens"];
    let values = keys.map(|name| attribute(recovery, name));
    assert_eq!(values, [3, 2, 1, 77].map(|n| Some(Value::IntValue(n))));
    assert_eq!(attribute(recovery, "lockstep.cause"), text("hung"));
    let other = received.iter().rfind(|span| span.name == "request").unwrap();
    assert_eq!((other.parent_span_id.len(), other.status.as_ref().unwrap().code), (0, 2));
    let n_of = |name: &str| received.iter().filter(|span| span.name == name).count();
    assert_eq!(["sequence", "step", "pass"].map(n_of), [1, 1, 1]);
}

/// Checks that a log line within a request has its trace and span, and that messages of sending itself are not sent.
fn check_logs(collector: &Collector) {
    let request = collector.spans().into_iter().find(|span| span.name == "chat toy-1").unwrap();
    let records = collector.records();
    let find_by = |body: &str| records.iter().find(|(_, log)| log.body.clone().unwrap().value == text(body));
    let (scope, within) = find_by("logged in a request").unwrap();
    assert_eq!((&within.trace_id, &within.span_id), (&request.trace_id, &request.span_id));
    assert_eq!((&**scope, &*within.severity_text, within.flags), ("otlp", "INFO", 1));
    assert_eq!(find(&within.attributes, "n"), Some(Value::IntValue(4)));
    let (_, alone) = find_by("logged alone").unwrap();
    assert_eq!((alone.trace_id.len(), &*alone.severity_text), (0, "WARN"));
    assert!(find_by("too quiet").is_none() && find_by("of sending itself").is_none());
}

/// Checks that the sent metrics equal the page.
fn check_metrics(collector: &Collector, page: &str) {
    let metrics = collector.last_metrics();
    let named = |name: &str| metrics.iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("no {name}"));
    let Some(Data::Gauge(running)) = &named("vllm:num_requests_running").data else { panic!("no gauge") };
    assert_eq!(running.data_points[0].value, Some(Number::AsDouble(3.0)));
    assert_eq!(find(&running.data_points[0].attributes, "replica"), text("one"));
    let first_token = named("gen_ai.server.time_to_first_token");
    let Some(Data::Histogram(histogram)) = &first_token.data else { panic!("no histogram") };
    assert_eq!((histogram.data_points[0].count, &*first_token.unit), (1, "s"));
    assert_eq!(find(&histogram.data_points[0].attributes, "gen_ai.operation.name"), text("chat"));
    assert!(page.contains("gen_ai_server_time_to_first_token_seconds_count"));
    let resource = collector.metrics.lock().unwrap()[0].resource_metrics[0].resource.clone().unwrap();
    assert_eq!(find(&resource.attributes, "service.name"), text("lockstep"));
    let Some(Value::StringValue(instance)) = find(&resource.attributes, "service.instance.id") else { panic!("no id") };
    assert_eq!(instance.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
}

#[test]
fn collector_gets_request_tree_metrics_and_logs() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let collector = Collector::default();
    let endpoint = collector.grpc(&runtime);
    let collector_config = telemetry::Collector { endpoint, steps: true, ..telemetry::Collector::default() };
    telemetry::logs::init(LogOptions { filter: "info", collector: Some(&collector_config), ..LogOptions::default() })
        .unwrap();
    let exporter = telemetry::exporter::install(&[("model_name", "toy")]).unwrap();
    one_request();
    one_unsampled();
    let refused = spans::request("grpc", "no traceparent at all", "");
    refused.record_end("full", TokenUsage::default(), &[]);
    drop(refused);
    let recovery = spans::recovery(4);
    recovery.record_recovery_cause("hung", Some((3, "there")));
    recovery.record_recovery_grid(2, 1, 77);
    drop(recovery);
    tracing::warn!("logged alone");
    tracing::debug!("too quiet");
    tracing::warn!(target: "telemetry", "of sending itself");
    metrics::load(&ReplicaLabel::replica("one"), 3, 2, 1, 4);
    let first_token = Some(Duration::from_millis(3));
    metrics::answered(&metrics::RequestMetrics { operation: "chat", outcome: "ok", first_token, ..Default::default() });
    telemetry::flush();
    check_tree(&collector);
    check_logs(&collector);
    check_metrics(&collector, &exporter.render());
}
