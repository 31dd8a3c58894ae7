"""The end point of telemetry: receives OTLP over HTTP, and keeps spans, logs and metrics as plain values. Independent
of the senders."""

import gzip
import http.server
import threading

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def value(of):
    kind = of.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in of.array_value.values]
    return getattr(of, kind) if kind else None


def attributes(of):
    return {item.key: value(item.value) for item in of.attributes}


class Span:
    def __init__(self, span, sender):
        self.name, self.sender, self.attributes = span.name, sender, attributes(span)
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.links = {(link.trace_id.hex(), link.span_id.hex()) for link in span.links}
        self.failed, self.state = span.status.code == 2, span.trace_state

    def __repr__(self):
        return f"{self.name} {self.attributes}"


class Sink:
    def __init__(self):
        self.spans, self.logs, self.metrics = [], [], {}
        sink = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                {"/v1/traces": sink.traces, "/v1/logs": sink.records, "/v1/metrics": sink.points}[self.path](body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def traces(self, body):
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            sender = attributes(of.resource)
            self.spans.extend(Span(span, sender) for scope in of.scope_spans for span in scope.spans)

    def records(self, body):
        for of in ExportLogsServiceRequest.FromString(body).resource_logs:
            for scope in of.scope_logs:
                for log in scope.log_records:
                    record = {"body": value(log.body), "trace": log.trace_id.hex(), "span": log.span_id.hex()}
                    self.logs.append(record | {"sender": attributes(of.resource), "scope": scope.scope.name})

    def points(self, body):
        for of in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            sender = attributes(of.resource)["process.pid"]
            for metric in (metric for scope in of.scope_metrics for metric in scope.metrics):
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    series = (metric.name, sender, frozenset(attributes(point).items()))
                    self.metrics[series] = point.count if hasattr(point, "bucket_counts") else point.as_double

    def total(self, name, **labels):
        """Returns the sum of the last values of a metric, over all senders and series that have the labels."""
        chosen = {(label.replace("__", "."), of) for label, of in labels.items()}
        return sum(n for (metric, _, of), n in list(self.metrics.items()) if metric == name and chosen <= set(of))
