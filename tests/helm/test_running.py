"""The chart's pods as processes. Each layout of a group of four ranks serves and gives the same answers. It survives
the replacement of one pod and a rollout of all, and ends on SIGTERM."""

import json
import os
import pathlib
import re
import shutil
import threading
import time
import urllib.request

import chart
import h2c
import pods
import pytest
import test_watching
from chart import LWS, ROOT

# Below the ephemeral ports of the system.
PORTS = {"httpPort": 28000, "grpcPort": 28051, "coordinatorPort": 28100, "meshPort": 28200, "healthPort": 28300}
VALUES = {"model": {"source": "pvc", "path": "llama-f32-tied", "pvc": {"claim": "models"}}, "network": PORTS,
          "engine": {"threads": 1}, "router": {"replicas": 1}, "monitoring": {"serviceMonitor": {"enabled": True}},
          # The grace is far beyond what the rest needs, because this machine may be slow.
          "drain": {"preStopSeconds": 1, "drainSeconds": 5, "terminationGracePeriodSeconds": 120}}
LAYOUTS = {
    # Answers are recorded in an extra volume, by an extra flag: the chart has neither.
    "pod": ({"topology": {"tp": 2, "pp": 2}, "workers": {"antiAffinity": "hard"}, "router": {
        "replicas": 1, "extraArgs": ["--record=/var/lib/kept/answers"],
        "extraVolumes": [{"name": "kept", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "kept", "mountPath": "/var/lib/kept"}]}}, []),
    "lws": ({"topology": {"tp": 2, "pp": 2, "ranksPerPod": 2}}, [LWS]),
    # Two replicas, which routers find in an etcd of three members.
    "etcd": ({"topology": {"tp": 2}, "replicas": 2, "etcd": {"mode": "own"}}, []),
    "statefulsets": ({"topology": {"tp": 2, "pp": 2, "ranksPerPod": 2}}, []),
    # The default model, pulled by init containers into a claim that all pods share.
    "hub": ({"topology": {"tp": 2, "pp": 2}, "engine": {"threads": 1, "context": 1024},
             "model": {"source": "hub", "name": "smollm2", "hub": {"cache": {"create": {"enabled": True}}}}}, []),
}
# Changes the spec of pods with ranks, but not of a router.
ROLLED = {"engine": {"maxChunkTokens": 48}, "workers": {"podAnnotations": {"release": "second"}}}
REQUEST = {"prompt": "One two three", "max_tokens": 16, "temperature": 0}
STORY = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=LAYOUTS)
def cluster(request, tmp_path_factory):
    if request.param == "etcd" and not shutil.which("etcd"):
        pytest.skip("there is no etcd here")
    values, apis = LAYOUTS[request.param]
    objects = chart.rendered_fresh({**VALUES, **values}, apis)
    folder = tmp_path_factory.mktemp(request.param)
    shared = {"cache": claim(folder)} if request.param == "hub" else {"model": ROOT / "tests" / "reference"}
    made = pods.Cluster(objects, folder, shared)
    made.layout, made.objects = request.param, objects
    try:
        made.start()
        yield made
    finally:
        made.kill()


def claim(folder):
    """Makes a cache with the files of the model that this machine has; init containers fetch the rest."""
    made = folder / "claim"
    (made / "models").mkdir(parents=True)
    pulled = pathlib.Path(os.environ.get("LOCKSTEP_CACHE", pathlib.Path.home() / ".cache" / "lockstep"))
    if (pulled / "models" / "smollm2").is_dir():
        shutil.copytree(pulled / "models" / "smollm2", made / "models" / "smollm2")
    return made


def answer(cluster):
    status, text = pods.get(f"{cluster.door()}/v1/completions", REQUEST)
    assert status == 200, f"{text}\n{cluster.logs()}"
    return json.loads(text)["choices"][0]["text"]


class Stream:
    """A stream that has begun, read by a separate thread."""

    def __init__(self, cluster):
        data = json.dumps({**story_of(cluster), "stream": True}).encode()
        url = f"{cluster.door()}/v1/completions"
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        self.answer = urllib.request.urlopen(request, timeout=pods.PATIENCE_S)
        self.text, self.cluster = self.next(), cluster
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def next(self):
        """Returns the next piece, or None after the last."""
        for line in self.answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: "):])
                assert "error" not in event, event
                return event["choices"][0]["text"]
        return None

    def read(self):
        while (piece := self.next()) is not None:
            self.text += piece

    def rest(self):
        self.thread.join(pods.PATIENCE_S)
        assert not self.thread.is_alive(), self.cluster.logs()
        return self.text


def story_of(cluster):
    """A model of real size gets a shorter story."""
    return {**STORY, "max_tokens": 100} if cluster.layout == "hub" else STORY


def complete_story(cluster):
    status, text = pods.get(f"{cluster.door()}/v1/completions", story_of(cluster))
    assert status == 200, f"{text}\n{cluster.logs()}"
    return json.loads(text)["choices"][0]["text"]


# By model.
ANSWERS = {}


def test_it_serves(cluster):
    def n_ranks():
        return [len(replica["ranks"]) for replica in json.loads(pods.get(f"{cluster.door()}/cluster")[1])["replicas"]]

    pods.wait_until("four ranks are seen", lambda: sum(n_ranks()) == 4, cluster.logs)
    # The same request has the same answer, whatever the pods.
    of_model = ANSWERS.setdefault(cluster.layout == "hub", set())
    of_model.add(answer(cluster))
    assert len(of_model) == 1


def test_the_http_port_accepts_h2c(cluster):
    """Sends HTTP/2 to the port for HTTP/1.1, as a gateway in front of an InferencePool does."""
    host, port = cluster.door().removeprefix("http://").split(":")
    is_200, body = h2c.post(host, int(port), "/v1/completions", json.dumps(REQUEST).encode(), pods.PATIENCE_S)
    assert is_200 and json.loads(body)["choices"][0]["text"] == answer(cluster), body


def test_all_probes_succeed_by_grpc(cluster):
    for pod in cluster.pods:
        for container in pod.template.lasting:
            assert all(pod.passes(container, kind) for kind in ("startupProbe", "readinessProbe", "livenessProbe"))
            if page := pod.page(container):
                assert pods.get(f"{page}/ready")[0] == pods.get(f"{page}/health")[0] == 200
                port = container["livenessProbe"]["grpc"]["port"]
                assert not pods.health(f"{pod.address}:{port}", "unknown")


def scrape(cluster):
    """Reads the pages that monitors read, after the metrics that are updated once a second have appeared."""
    deadline = time.monotonic() + 60
    while "lockstep:rank_bubble_micros_total" not in (names := on_pages(cluster)) and time.monotonic() < deadline:
        time.sleep(0.2)
    SEEN.update(names)


def on_pages(cluster):
    names = set()
    for pod in cluster.pods:
        for container in pod.template.lasting:
            if page := pod.page(container):
                status, text = pods.get(f"{page}/metrics")
                assert status == 200, f"{pod.name} {container['name']}"
                names.update(re.findall(r"^(\w+:\w+)[{ ]", text, re.M))
    return names


def test_a_monitor_finds_pages(cluster):
    """A ServiceMonitor's Services lead to pages with metrics: of the router, and of each coordinator."""
    (monitor,) = chart.of_kind(cluster.objects, "ServiceMonitor")
    services = [service for service in chart.of_kind(cluster.objects, "Service")
                if chart.selects(monitor["spec"]["selector"], service["metadata"]["labels"])]
    read = []
    for service in services:
        ports = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
        for pod in cluster.pods:
            if not chart.selects({"matchLabels": service["spec"]["selector"]}, pod.template.labels):
                continue
            for page in monitor["spec"]["endpoints"]:
                if page["port"] in ports:
                    port = pod.template.ports[ports[page["port"]]]
                    status, text = pods.get(f"http://{pod.address}:{port}{page['path']}")
                    assert status == 200 and "lockstep:" in text, pod.name
                    read.append(pod.name)
    holders = [pod.name for pod in cluster.pods for container in pod.template.lasting
               if chart.role(container) == "coordinator"]
    assert sorted(read) == sorted(holders + [pod.name for pod in cluster.of("router")])


def test_an_extra_volume_is_used(cluster):
    if cluster.layout != "pod":
        return
    answer(cluster)
    (router,) = cluster.of("router")
    files = cluster.volume(router, "kept") / "answers"
    pods.wait_until("an answer is kept", lambda: any(path.stat().st_size for path in files.glob("*")), cluster.logs)


SEEN = set()
# These series begin with events that these clusters do not have, because a pod hands its rank over before it ends.
# These clusters have neither files of keys and routes nor certificates.
RARE = {"lockstep:requests_refused_total", "lockstep:rank_slow", "lockstep:ranks_lost_total",
        "lockstep:config_reload_ok", "lockstep:certificate_expiry_timestamp_seconds"}


def test_a_pod_is_replaced(cluster):
    """As in the drain of a node: the old pod ends first, then the new one starts; routers keep serving."""
    scrape(cluster)
    before, story = answer(cluster), complete_story(cluster)
    open_stream = Stream(cluster)
    pod = [pod for pod in cluster.pods if pod not in cluster.of("router") + cluster.of("etcd")][-1]
    cluster.end([pod])
    pod.start_all()
    cluster.wait_until_ready()
    pods.wait_until("the group has its ranks", lambda: pods.get(f"{cluster.door()}/ready")[0] == 200, cluster.logs)
    assert answer(cluster) == before
    # A stream that was open meanwhile is complete.
    assert open_stream.rest() == story
    scrape(cluster)


def test_a_rollout_loses_nothing(cluster):
    """After a change of a value every pod that holds a part of the model is replaced, and open streams are complete."""
    values, apis = LAYOUTS[cluster.layout]
    rolled = {**VALUES, **values, "workers": {**values.get("workers", {}), **ROLLED["workers"]}}
    rolled["engine"] = {**rolled["engine"], **ROLLED["engine"]}
    before, story = answer(cluster), complete_story(cluster)
    open_stream = Stream(cluster)
    replaced = cluster.roll_out(chart.rendered_fresh(rolled, apis))
    holders = [pod.name for pod in cluster.pods if pod not in cluster.of("router") + cluster.of("etcd")]
    assert replaced == holders and replaced
    assert open_stream.rest() == story
    assert answer(cluster) == before, "other chunks, the same bits"


def test_it_ends_in_order(cluster):
    """Last test of a layout: the router drains, then the groups."""
    doors, stores = cluster.of("router"), cluster.of("etcd")
    cluster.end(doors)
    cluster.end([pod for pod in cluster.pods if pod not in doors + stores])


def test_a_rollout_of_routers_closes_no_stream(tmp_path):
    """A router drains for as long as its streams last, while the new ones serve."""
    values = {**VALUES, "router": {"replicas": 2}, "drain": {
        "preStopSeconds": 1, "drainSeconds": 200, "terminationGracePeriodSeconds": 240}}
    cluster = pods.Cluster(chart.rendered_fresh(values, []), tmp_path, {"model": ROOT / "tests" / "reference"})
    cluster.layout = "routers"
    try:
        cluster.start()
        story, open_stream = complete_story(cluster), Stream(cluster)
        values["router"] = {"replicas": 2, "podAnnotations": {"release": "second"}}
        assert len(cluster.roll_out(chart.rendered_fresh(values, []))) == 2
        assert open_stream.rest() == story == complete_story(cluster)
    finally:
        cluster.kill()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    """Tests the runner itself: it reports a process that ignores SIGTERM until the end of its grace period."""
    made = pods.Cluster(chart.rendered_fresh(VALUES, []), tmp_path, {"model": ROOT})
    (pod,) = made.of("router")
    pod.template.spec = {**pod.template.spec, "terminationGracePeriodSeconds": 2}
    command = ["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"]
    pod.command = lambda _: (command, {"PATH": os.environ["PATH"]})
    pod.start_all()
    pods.wait_until("it ignores SIGTERM", lambda: "deaf" in made.logs())
    with pytest.raises(AssertionError, match="killed"):
        made.end([pod])


def test_every_panel_has_its_series():
    """Runs after all layouts: every metric in dashboards and rules is on the pages of real roles."""
    required = {name for _, expression in test_watching.expressions()
                for name in test_watching.SERIES.findall(expression)}
    assert SEEN, "no cluster ran"
    without_etcd = set() if shutil.which("etcd") else {"lockstep:store_connected"}
    assert required - SEEN <= RARE | without_etcd
