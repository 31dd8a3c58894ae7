"""The chart's pods as processes: each way to make a group of four ranks serves, answers the same, survives that a pod
of it is replaced, and ends when it is told to."""

import json
import re
import shutil
import threading
import time
import urllib.request

import chart
import pods
import pytest
import test_watching
from chart import LWS, ROOT

# Below those that a system hands out by itself.
PORTS = {"httpPort": 28000, "grpcPort": 28051, "coordinatorPort": 28100, "meshPort": 28200, "healthPort": 28300}
VALUES = {"model": {"source": "pvc", "path": "llama-f32-tied", "pvc": {"claim": "models"}}, "network": PORTS,
          "engine": {"threads": 1}, "drain": {"drainSeconds": 5}, "router": {"replicas": 1}}
LAYOUTS = {
    "pod": ({"topology": {"tp": 2, "pp": 2}}, []),
    "lws": ({"topology": {"tp": 2, "pp": 2, "ranksPerPod": 2}}, [LWS]),
    # Two replicas that are found by an etcd of three members.
    "etcd": ({"topology": {"tp": 2}, "replicas": 2, "etcd": {"mode": "own"}}, []),
    "statefulsets": ({"topology": {"tp": 2, "pp": 2, "ranksPerPod": 2}}, []),
}
ASKED = {"prompt": "One two three", "max_tokens": 16, "temperature": 0}
STORY = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=LAYOUTS)
def cluster(request, tmp_path_factory):
    if request.param == "etcd" and not shutil.which("etcd"):
        pytest.skip("there is no etcd here")
    values, apis = LAYOUTS[request.param]
    objects = chart.rendered_fresh({**VALUES, **values}, apis)
    made = pods.Cluster(objects, tmp_path_factory.mktemp(request.param), ROOT / "tests" / "reference")
    try:
        made.start()
        yield made
    finally:
        made.kill()


def answer(cluster):
    status, text = pods.get(f"{cluster.door()}/v1/completions", ASKED)
    assert status == 200, f"{text}\n{cluster.logs()}"
    return json.loads(text)["choices"][0]["text"]


class Stream:
    """A stream that has begun, read by a thread of its own."""

    def __init__(self, cluster):
        data = json.dumps({**STORY, "stream": True}).encode()
        url = f"{cluster.door()}/v1/completions"
        asked = urllib.request.Request(url, data, {"content-type": "application/json"})
        self.answer = urllib.request.urlopen(asked, timeout=pods.PATIENCE_S)
        self.text, self.cluster = self.next(), cluster
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def next(self):
        """The next piece, or none after the last."""
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


def told(cluster):
    status, text = pods.get(f"{cluster.door()}/v1/completions", STORY)
    assert status == 200, f"{text}\n{cluster.logs()}"
    return json.loads(text)["choices"][0]["text"]


ANSWERS = set()


def test_it_serves(cluster):
    def n_ranks():
        return [len(replica["ranks"]) for replica in json.loads(pods.get(f"{cluster.door()}/cluster")[1])["replicas"]]

    pods.wait_until("four ranks are seen", lambda: sum(n_ranks()) == 4, cluster.logs)
    # Whatever the pods, the same request has the same answer.
    ANSWERS.add(answer(cluster))
    assert len(ANSWERS) == 1


def scrape(cluster):
    """What is on the pages where monitors look, once what is counted by the second is there."""
    deadline = time.monotonic() + 60
    while "lockstep:rank_bubble_micros_total" not in (names := on_pages(cluster)) and time.monotonic() < deadline:
        time.sleep(0.2)
    SEEN.update(names)


def on_pages(cluster):
    names = set()
    for pod in cluster.pods:
        for container in pod.template.lasting:
            status, page = pods.get(pod.url(container, "livenessProbe").split("/health")[0] + "/metrics")
            assert status == 200, f"{pod.name} {container['name']}"
            names.update(re.findall(r"^(\w+:\w+)[{ ]", page, re.M))
    return names


SEEN = set()
# They begin when something happens that these clusters are spared.
RARE = {"lockstep:requests_refused_total", "lockstep:rank_slow"}


def test_a_pod_is_replaced(cluster):
    """As in a rollout: the old one ends first, then the new one comes; the door stays open."""
    scrape(cluster)
    before, story = answer(cluster), told(cluster)
    open_stream = Stream(cluster)
    pod = [pod for pod in cluster.pods if pod not in cluster.of("router") + cluster.of("etcd")][-1]
    statuses = pod.end()
    assert set(statuses.values()) == {0}, f"{pod.name}: {statuses}\n{cluster.logs()}"
    pod.start_all()
    cluster.wait_until_ready()
    pods.wait_until("the group has its ranks", lambda: pods.get(f"{cluster.door()}/ready")[0] == 200, cluster.logs)
    assert answer(cluster) == before
    # Who was listening meanwhile has missed nothing.
    assert open_stream.rest() == story
    scrape(cluster)


def test_it_ends_in_order(cluster):
    """Last of this layout: the router drains, then the groups."""
    doors, stores = cluster.of("router"), cluster.of("etcd")
    for pod in [*doors, *(pod for pod in cluster.pods if pod not in doors + stores)]:
        statuses = pod.end()
        assert set(statuses.values()) == {0}, f"{pod.name}: {statuses}\n{cluster.logs()}"


def test_every_panel_has_its_series():
    """After all layouts have run: what dashboards and rules ask for is on the pages of real roles."""
    asked = {name for _, expression in test_watching.expressions() for name in test_watching.SERIES.findall(expression)}
    assert SEEN, "no cluster ran"
    without_etcd = set() if shutil.which("etcd") else {"lockstep:store_connected"}
    assert asked - SEEN <= RARE | without_etcd
