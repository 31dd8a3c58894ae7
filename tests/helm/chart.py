"""The chart for the tests: rendered by a real Helm for a matrix of values, and functions over its objects that many
tests use. Contains no expectations."""

import functools
import json
import os
import pathlib
import subprocess

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "lockstep"
TOOLS = pathlib.Path(os.environ.get("HELM_TOOLS", ROOT / "target" / "helm-tools"))
BINARY = pathlib.Path(os.environ.get("LOCKSTEP_BINARY", ROOT / "target" / "debug" / "lockstep"))
HELM3, HELM4 = "3.17.2", "4.3.1"
# Versions of Kubernetes: the chart's kubeVersion, and the newest with schemas in the tests.
OLDEST, NEWEST = "1.30.0", "1.37.0"
RELEASE, NAMESPACE = "probe", "models"
# PyYAML's parser in C, if it has one: the other takes ten times as long.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

LWS = "leaderworkerset.x-k8s.io/v1"
ALL_APIS = [LWS, "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1", "inference.networking.k8s.io/v1",
            "keda.sh/v1alpha1"]

PVC = {"source": "pvc", "path": "m.gguf", "pvc": {"claim": "models"}}
GRID = {"topology": {"tp": 2, "pp": 2, "ranksPerPod": 2}}
EVERYTHING = {
    "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "pull"}]},
    "model": {**PVC, "servedName": "ours", "pvc": {"claim": "models", "subPath": "llama"}},
    "engine": {"threads": 4, "activations": "f32", "kvDtype": "f32", "kvMemory": "4GiB", "context": 8192,
               "maxBatchTokens": 1048576, "maxChunkTokens": 512, "maxRunning": 128, "maxWaiting": 64,
               "prefixCache": False, "zeroKv": True, "wire": "auto", "linkEncryption": True,
               "collective": "auto", "numerics": "lockstep", "speculation": "ngram", "scrub": 0.125,
               "kvCommit": "grow"},
    "answers": {"audit": 0.0625, "record": {"enabled": True, "prompts": True, "bytes": "512MiB"},
                "stored": {"responses": 100, "bytes": "32MiB", "seconds": 600}},
    "join": {"existingSecret": "joined", "key": "secret"},
    "apiKeys": {"existingSecret": "clients"},
    "drain": {"preStopSeconds": 10, "drainSeconds": 90, "terminationGracePeriodSeconds": 200},
    "log": {"format": "text", "filter": "router=debug,info"},
    "telemetry": {"otlpEndpoint": "http://collector:4318", "otlpProtocol": "http/protobuf", "sample": 0.25,
                  "metricsSeconds": 30, "steps": True, "content": True},
    "router": {"policy": "least-work", "autoscaling": {"enabled": True}, "nodeSelector": {"pool": "cpu"},
               "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone",
                                              "whenUnsatisfiable": "DoNotSchedule"}],
               "extraVolumes": [{"name": "roots", "configMap": {"name": "roots"}}],
               "extraVolumeMounts": [{"name": "roots", "mountPath": "/etc/roots", "readOnly": True}],
               "podLabels": {"team": "a"},
               "podAnnotations": {"note": "b"}, "priorityClassName": "high", "extraArgs": ["--failover-max=90"],
               "extraEnv": [{"name": "RUST_BACKTRACE", "value": "1"}],
               "tolerations": [{"key": "cpu", "operator": "Exists"}],
               "service": {"type": "LoadBalancer", "annotations": {"lb": "internal"}}},
    "workers": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "8Gi"}},
                "affinity": {"nodeAffinity": {}}, "antiAffinity": "soft", "podLabels": {"team": "b"},
                "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]},
    "coordinator": {"extraVolumes": [{"name": "scratch", "emptyDir": {}}],
                    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]},
    "monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prom"}},
                   "prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}},
    "networkPolicy": {"enabled": True, "clients": [{"namespaceSelector": {}}],
                      "monitors": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "tests": {"apiKey": {"existingSecret": "probe-key"}},
}
SCALED = {"enabled": True, "firstTokenSeconds": 2.5, "kvUsage": 0.8}
GATEWAY = {"httpRoute": {"enabled": "auto", "parentRefs": [{"name": "front", "namespace": "gateways"}],
                         "hostnames": ["models.example.com"]}}

# Each case: a file of values or none, values over it, the cluster's APIs, and the first Kubernetes that supports it.
CASES = {
    "default": (None, {}, [], OLDEST),
    "laptop-cpu": ("laptop-cpu", {}, [], OLDEST),
    "one-node-8-gpu": ("one-node-8-gpu", {}, ALL_APIS, OLDEST),
    "four-nodes-lws": ("four-nodes-of-8-gpu", {}, ALL_APIS, "1.34.0"),
    "four-nodes-statefulsets": ("four-nodes-of-8-gpu", {}, [], "1.34.0"),
    "four-nodes-plugin": ("four-nodes-of-8-gpu", {"gpu": {"dra": {"enabled": False}}}, ALL_APIS, OLDEST),
    "grid-lws": (None, {**GRID, "replicas": 2}, [LWS], OLDEST),
    "grid-statefulsets": (None, {**GRID, "replicas": 2}, [], OLDEST),
    "grid-statefulsets-by-choice": (None, {**GRID, "topology": {**GRID["topology"], "groups": "StatefulSet"}}, [LWS],
                                    OLDEST),
    "grid-in-a-pod": (None, {"topology": {"tp": 2, "pp": 2}, "replicas": 3, "model": PVC}, [], OLDEST),
    "gpu-pod": (None, {"device": "cuda", "topology": {"tp": 2}, "gpu": {"runtimeClassName": "nvidia"},
                       "engine": {"activations": "bf16", "threads": 2, "collective": "nccl", "numerics": "fast"},
                       "model": PVC}, [], OLDEST),
    "gpu-rdma": (None, {**GRID, "device": "cuda", "model": PVC, "engine": {"threads": 2},
                        "rdma": {"enabled": True, "env": {"NCCL_IB_HCA": "mlx5"}},
                        "topology": {**GRID["topology"], "exclusiveTopology": "rack"}}, [LWS], OLDEST),
    "gpu-dra": (None, {**GRID, "device": "cuda", "model": PVC, "engine": {"threads": 2},
                       "gpu": {"dra": {"enabled": True}}}, [LWS], "1.34.0"),
    "gpu-dra-serve": ("one-node-8-gpu", {"gpu": {"dra": {"enabled": True}, "runtimeClassName": "nvidia"}}, [],
                      "1.34.0"),
    "kv-host": (None, {**GRID, "device": "cuda", "model": PVC, "engine": {"threads": 2}, "kvHost": {"size": "64Gi"},
                       "kvDisk": {"size": "1Ti"}}, [LWS], OLDEST),
    "kv-disk": (None, {**GRID, "kvDisk": {"size": "10Gi"}}, [LWS], OLDEST),
    "kv-disk-serve": (None, {"mode": "serve", "kvDisk": {"size": "1Ti", "claim": "pages"}}, [], OLDEST),
    "sim": (None, {"device": "sim", "replicas": 20}, [], OLDEST),
    "image-volume": (None, {"model": {"source": "image", "path": "model.gguf",
                                      "image": {"reference": "registry.example.com/models/llama:1"}}}, [], "1.33.0"),
    "routes": (None, {"replicas": 2, "router": {
        "coordinators": ["other-lockstep-replica-0.models.svc:50100"], "texts": {"other": "other.gguf"},
        "routes": {"chat": [{"version": "v1", "weight": 90}, {"version": "v2@0a1b", "weight": 10}],
                   "org/alias": [{"version": "other:Q4_K_M", "weight": 1}]}}}, [], OLDEST),
    "hub": (None, {"model": {"name": "org/name:Q4_K_M", "hub": {
        "endpoint": "https://hub.example.com", "tokenSecret": {"name": "hub"}, "cache": {"claim": "cache"}}}}, [],
        OLDEST),
    "verified": (None, {**GRID, "model": {**PVC, "sha256": "0" * 64}}, [], OLDEST),
    "ipv6": (None, {**GRID, "network": {"ipFamily": "IPv6"}}, [LWS], OLDEST),
    "ipv6-pod": (None, {"network": {"ipFamily": "IPv6"}, "topology": {"tp": 2}}, [], OLDEST),
    "everything-pod": (None, {**EVERYTHING, "autoscaling": SCALED}, ALL_APIS, OLDEST),
    "everything-lws": (None, {**EVERYTHING, **GRID, "autoscaling": {**SCALED, "kind": "hpa"}}, ALL_APIS, OLDEST),
    "everything-statefulsets": (None, {**EVERYTHING, **GRID}, ALL_APIS[1:], OLDEST),
    "everything-serve": (None, {**EVERYTHING, "mode": "serve", "autoscaling": {"enabled": True}, "gateway": {
        **GATEWAY, "inferencePool": {"enabled": "auto", "endpointPicker": {"name": "picker"}}}}, ALL_APIS, OLDEST),
    "route": (None, {"gateway": GATEWAY, "fullnameOverride": "front"}, ALL_APIS, OLDEST),
    "etcd": (None, {"etcd": {"mode": "own"}, "replicas": 2, "autoscaling": {"enabled": True},
                    "monitoring": {"serviceMonitor": {"enabled": True}}}, ALL_APIS, OLDEST),
    "claim": (None, {**GRID, "model": {"hub": {"cache": {"create": {"enabled": True, "className": "shared"}}}},
                     "workers": {"antiAffinity": "hard"}, "monitoring": {"serviceMonitor": {"enabled": True}}},
              ALL_APIS, OLDEST),
    "monitored-serve": (None, {"mode": "serve", "monitoring": {"serviceMonitor": {"enabled": "auto"}},
                               "admin": {"enabled": True, "keySecret": {"name": "operators"}}}, ALL_APIS, OLDEST),
    "etcd-lws": (None, {**GRID, "etcd": {"mode": "own", "prefix": "/ours", "own": {
        "members": 1, "antiAffinity": "soft", "storage": {"size": ""}, "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}]}},
        "networkPolicy": {"enabled": True}, "image": {"pullSecrets": [{"name": "pull"}]}}, [LWS], OLDEST),
    "etcd-statefulsets": (None, {**GRID, "etcd": {"mode": "own", "own": {
        "members": 5, "storage": {"className": "fast"}}}, "network": {"ipFamily": "IPv6"}}, [], OLDEST),
    "etcd-external": (None, {"etcd": {"mode": "external", "external": {
        "endpoints": ["https://etcd-a.example.com:2379", "https://etcd-b.example.com:2379"],
        "tls": {"caSecret": {"name": "etcd-ca"}, "clientSecret": "etcd-client"},
        "user": "lockstep", "passwordSecret": {"name": "etcd-user"}}}}, [], OLDEST),
    "etcd-external-statefulsets": (None, {**GRID, "etcd": {"mode": "external", "external": {
        "endpoints": ["etcd:2379"], "tls": {"caSecret": {"name": "etcd-ca"}}}}}, [], OLDEST),
    "admin": (None, {"admin": {"enabled": True, "keySecret": {"name": "operators"}},
                     "tls": {"secret": "doors", "clientCaSecret": {"name": "clients"}},
                     "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
                     "monitoring": {"podMonitor": {"enabled": "true"}}}, ALL_APIS, OLDEST),
    "admin-serve": (None, {"mode": "serve", "admin": {"enabled": True}, "tls": {"secret": "doors"}}, [], OLDEST),
    "bare": (None, {"serviceAccount": {"create": False}, "tests": {"enabled": False}, "router": {
        "pdb": {"enabled": False}}, "workers": {"pdb": {"enabled": False}}}, [], OLDEST),
}


def helm(version, *arguments, stdin=None):
    """Returns (exit status, output, messages)."""
    command = [str(TOOLS / f"helm-{version}"), *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(TOOLS)}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stdout, done.stderr


def template(version, values, apis=(), kube=NEWEST, file=None, folder=CHART):
    arguments = ["template", RELEASE, str(folder), "--namespace", NAMESPACE, "--kube-version", kube]
    if file:
        arguments += ["--values", str(CHART / "values" / f"{file}.yaml")]
    for api in apis:
        arguments += ["--api-versions", api]
    return helm(version, *arguments, "--values", "-", stdin=json.dumps(values))


@functools.lru_cache(maxsize=None)
def rendered(case, version=HELM4, kube=NEWEST, folder=CHART):
    """Returns the objects of a case."""
    file, values, apis, _ = CASES[case]
    status, out, error = template(version, values, apis, kube, file, folder)
    assert status == 0, error
    return [made for made in yaml.load_all(out, Loader=LOADER) if made]


def rendered_fresh(values, apis):
    """Returns the objects of values that belong to no case."""
    status, out, error = template(HELM4, values, apis)
    assert status == 0, error
    return [made for made in yaml.load_all(out, Loader=LOADER) if made]


def rendered_with(case, more):
    """Returns the objects of a case with values over it."""
    file, values, apis, _ = CASES[case]
    status, out, error = template(HELM4, {**values, **more}, apis, NEWEST, file)
    assert status == 0, error
    return [made for made in yaml.load_all(out, Loader=LOADER) if made]


def kubes(case):
    return [CASES[case][3], NEWEST]


def of_kind(objects, *kinds):
    return [made for made in objects if made["kind"] in kinds]


def named(objects, kind, name):
    found = [made for made in of_kind(objects, kind) if made["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)}"
    return found[0]


class Pods:
    """A template of pods: the object that makes it, the number of pods, its labels and its spec."""

    def __init__(self, owner, n, made, part=""):
        self.owner, self.n, self.part = owner, n, part
        self.labels = made["metadata"].get("labels", {})
        self.annotations = made["metadata"].get("annotations", {})
        self.spec = made["spec"]

    def __repr__(self):
        return f"{self.owner['kind']} {self.owner['metadata']['name']}{self.part}"

    @property
    def containers(self):
        """Returns all containers; an init container that restarts is a sidecar."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def lasting(self):
        sidecars = [c for c in self.spec.get("initContainers", []) if c.get("restartPolicy") == "Always"]
        return [*sidecars, *self.spec["containers"]]

    @property
    def ports(self):
        return {p["name"]: p["containerPort"] for c in self.lasting for p in c.get("ports", [])}


def pods(objects):
    """Returns every template of pods in these objects."""
    found = []
    for made in objects:
        spec = made.get("spec", {})
        if made["kind"] in ("Deployment", "StatefulSet"):
            found.append(Pods(made, spec.get("replicas", 1), spec["template"]))
        elif made["kind"] == "LeaderWorkerSet":
            group, n = spec["leaderWorkerTemplate"], spec.get("replicas", 1)
            found.append(Pods(made, n, group["leaderTemplate"], " leader"))
            found.append(Pods(made, n * (group["size"] - 1), group["workerTemplate"], " worker"))
        elif made["kind"] == "Pod":
            found.append(Pods(made, 1, made))
    return found


def standing(objects):
    """Returns all templates but the pod of `helm test`."""
    return [made for made in pods(objects) if made.owner["kind"] != "Pod"]


def serving(objects):
    """Returns the templates of Lockstep's roles."""
    return [made for made in standing(objects) if made.labels["app.kubernetes.io/component"] != "etcd"]


def selects(selector, labels):
    """Returns whether a label selector fits, as of a Deployment; a Service's is `matchLabels` alone."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for requirement in selector.get("matchExpressions", []):
        assert requirement["operator"] == "In", requirement
        if labels.get(requirement["key"]) not in requirement["values"]:
            return False
    return True


def flags(container, name):
    """Returns the values of a flag, in order."""
    return [a.split("=", 1)[1] for a in container.get("args", []) if a.startswith(f"--{name}=")]


def flag(container, name):
    values = flags(container, name)
    assert len(values) == 1, f"{container['name']}: --{name} is given {len(values)} times"
    return values[0]


def role(container):
    return container["args"][0]
