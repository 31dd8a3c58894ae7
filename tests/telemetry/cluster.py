"""A cluster of processes with a collector between it and a sink, and Prometheus beside: etcd, a coordinator, three
workers for two ranks, a router. Contains command lines and addresses."""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

import grpc
import rotel
from sink import Sink

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("LOCKSTEP", ROOT / "target" / "debug" / "lockstep"))
TOOLS = ROOT / "target" / "helm-tools"
MODEL = ROOT / "tests" / "reference" / "llama-f32-rope3"
# The limit of every wait: far beyond the usual time on a busy machine.
WAIT_MAX_S = 120


def addresses(n):
    """Returns different addresses: no port is released before the last is taken."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    found = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return found


def wait_until(what, condition, explain=lambda: ""):
    give_up = time.monotonic() + WAIT_MAX_S
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}\n{explain()}"
        time.sleep(0.1)
    return found


def get(url):
    """Returns (status, text); the status is None if no process listens."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_MAX_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError:
        return None, ""


class Cluster:
    def __init__(self, folder):
        self.folder, self.processes, self.sink = folder, {}, Sink()
        self.grpc, self.over_http, self.etcd, self.peer, self.coordinator, *more = addresses(12)
        self.http, self.router_grpc, self.prometheus_at, *self.health = more

    def start(self, name, *command):
        log = open(self.folder / f"{name}.log", "wb")
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder),
                       "OTEL_RESOURCE_ATTRIBUTES": f"k8s.namespace.name=models,k8s.pod.name={name}"}
        with log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def logs(self):
        return "\n".join(f"== {path.stem}\n{path.read_text(errors='replace')[-3000:]}"
                         for path in sorted(self.folder.glob("*.log")))

    def pid(self, name):
        return self.processes[name].pid

    def start_all(self):
        agent = pathlib.Path(rotel.__file__).parent / "rotel-agent"
        self.start("collector", agent, "start", "--otlp-grpc-endpoint", self.grpc,
                   "--otlp-http-endpoint", self.over_http, "--otlp-exporter-endpoint", self.sink.url,
                   "--otlp-exporter-protocol", "http", "--batch-timeout", "200ms",
                   "--log-file", self.folder / "rotel.log")
        etcd = f"http://{self.etcd}"
        peer = f"http://{self.peer}"
        self.start("etcd", shutil.which("etcd"), "--data-dir", self.folder / "etcd", "--listen-client-urls", etcd,
                   "--advertise-client-urls", etcd, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                   "--initial-cluster", f"default={peer}")
        (self.folder / "join").write_bytes(subprocess.run([BINARY, "token"], capture_output=True, check=True).stdout)
        # One role over HTTP, the others over gRPC.
        common = ["--token-file", self.folder / "join", "--otlp-metrics-seconds", "1", "--log", "router=debug,info"]
        by_grpc = [*common, "--otlp", f"http://{self.grpc}"]
        by_http = [*common, "--otlp", f"http://{self.over_http}", "--otlp-protocol", "http/protobuf"]
        etcd_flags = ["--etcd-endpoints", self.etcd]
        self.start("coordinator", BINARY, "coordinator", MODEL, "--tp", "2", "--listen", self.coordinator,
                   "--advertise", self.coordinator, "--health", self.health[0], "--max-running", "4",
                   "--max-waiting", "4", "--otlp-steps", *etcd_flags, *by_grpc)
        self.by_grpc = by_grpc
        for n in range(3):
            self.start_worker(n, "--health", self.health[n + 1])
        # The router reads this file again although it has no routes.
        routes = self.folder / "routes"
        routes.write_text("# none\n")
        self.start("router", BINARY, "router", MODEL, "--http", self.http, "--grpc", self.router_grpc, "--routes",
                   routes, *etcd_flags, *by_http)
        self.prometheus()
        wait_until("the router does not become ready", lambda: get(f"http://{self.http}/ready")[0] == 200, self.logs)

    def start_worker(self, n, *more):
        self.start(f"worker-{n}", BINARY, "worker", "--join", self.coordinator, "--model-path", MODEL,
                   "--threads", "1", "--mesh-listen", "127.0.0.1:0", *more, *self.by_grpc)

    def workers(self):
        """Returns all workers by pid, including those that have ended."""
        return {process.pid: process for name, process in self.processes.items() if name.startswith("worker-")}

    def prometheus(self):
        target = {"targets": [self.http, *self.health]}
        config = {"global": {"scrape_interval": "1s"},
                  "scrape_configs": [{"job_name": "lockstep", "static_configs": [target]}]}
        # JSON is YAML.
        (self.folder / "prometheus.yaml").write_text(json.dumps(config))
        self.start("prometheus", TOOLS / "prometheus", f"--config.file={self.folder / 'prometheus.yaml'}",
                   f"--storage.tsdb.path={self.folder / 'prometheus'}", f"--web.listen-address={self.prometheus_at}")

    def query(self, expression):
        """Returns Prometheus's result of an expression: (status, its series)."""
        query = urllib.parse.urlencode({"query": expression})
        status, text = get(f"http://{self.prometheus_at}/api/v1/query?{query}")
        if status is None:
            return None, []
        reply = json.loads(text)
        return reply["status"], reply.get("data", {}).get("result", [])

    @contextlib.contextmanager
    def post(self, path, body, trace=None, sampled=True):
        """Yields an answer after its head; the caller reads the body or closes it early."""
        connection = http.client.HTTPConnection(*self.http.split(":"), timeout=WAIT_MAX_S)
        headers = {"content-type": "application/json"}
        if trace:
            headers |= {"traceparent": f"00-{trace}-b7ad6b7169203331-{int(sampled):02x}", "tracestate": "vendor=1"}
        connection.request("POST", path, json.dumps(body), headers)
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def generate_by_grpc(self, request, trace):
        """Returns the replies to a request of `lockstep.v1`, in bytes; the caller's context travels in gRPC's
        metadata."""
        metadata = [("traceparent", f"00-{trace}-b7ad6b7169203331-01"), ("tracestate", "vendor=1")]
        with grpc.insecure_channel(self.router_grpc, options=[("grpc.enable_http_proxy", 0)]) as channel:
            generate = channel.unary_stream("/lockstep.v1.Inference/Generate")
            return list(generate(request, metadata=metadata, timeout=WAIT_MAX_S))

    def spans(self, trace=None, name=None, **expected):
        chosen = list(self.sink.spans)
        if trace:
            chosen = [span for span in chosen if span.trace == trace]
        if name:
            chosen = [span for span in chosen if span.name == name]
        return [span for span in chosen
                if all(span.attributes.get(key.replace("__", ".")) == of for key, of in expected.items())]

    def end(self):
        # Ends the program first, so that its last telemetry still arrives.
        for name in sorted(self.processes, key=lambda name: name in ("collector", "etcd", "prometheus")):
            process = self.processes[name]
            process.terminate()
            try:
                process.wait(WAIT_MAX_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.sink.server.shutdown()


@contextlib.contextmanager
def running():
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(pathlib.Path(folder))
        try:
            cluster.start_all()
            yield cluster
        finally:
            cluster.end()
