"""Helm itself: both versions lint, render, package and refuse; Kubernetes's schemas accept what they render."""

import difflib
import json
import os
import pathlib
import shutil
import warnings

import chart
import jsonschema
import kinds
import kubernetes_validate
import pytest
import yaml
from chart import CASES, CHART, HELM3, HELM4

GOLDEN = pathlib.Path(__file__).parent / "golden"
GOLDENS = ["default", "laptop-cpu", "one-node-8-gpu", "four-nodes-lws", "grid-lws", "grid-statefulsets",
           "everything-pod", "everything-lws", "everything-serve", "etcd", "etcd-external", "claim", "monitored-serve"]
BOTH = pytest.mark.parametrize("version", [HELM3, HELM4])


@BOTH
@pytest.mark.parametrize("file", [None, "laptop-cpu", "one-node-8-gpu", "four-nodes-of-8-gpu"])
def test_lint(version, file):
    values = ["--values", str(CHART / "values" / f"{file}.yaml")] if file else []
    status, out, error = chart.helm(version, "lint", "--strict", str(CHART), *values)
    assert status == 0, out + error
    assert "[WARNING]" not in out and "[ERROR]" not in out, out


@BOTH
def test_package(version, tmp_path):
    status, out, error = chart.helm(version, "package", str(CHART), "--destination", str(tmp_path))
    assert status == 0, out + error
    package = next(tmp_path.glob("lockstep-*.tgz"))
    status, out, error = chart.helm(version, "template", "probe", str(package))
    assert status == 0, error
    assert len([made for made in yaml.safe_load_all(out) if made]) == len(chart.rendered("default"))


def normal(objects):
    """Returns the objects in one order, without random data and without long files that other tests check."""
    objects = json.loads(json.dumps(objects))
    for made in objects:
        if made["kind"] == "Secret":
            made["data"] = {key: "(random)" for key in made["data"]}
        if made["kind"] == "ConfigMap":
            made["data"] = {key: "(a dashboard)" for key in made["data"]}
        if made["kind"] == "PrometheusRule":
            made["spec"] = "(files/rules.yaml)"
    return sorted(objects, key=lambda made: (made["kind"], made["metadata"]["name"]))


@pytest.mark.parametrize("case", CASES)
def test_both_helms_render_the_same(case):
    assert normal(chart.rendered(case, HELM3)) == normal(chart.rendered(case, HELM4))


@pytest.mark.parametrize("case", GOLDENS)
def test_golden(case):
    """UPDATE_GOLDENS=1 writes them."""
    path = GOLDEN / f"{case}.yaml"
    text = yaml.safe_dump_all(normal(chart.rendered(case)), sort_keys=True, width=1000)
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text)
    kept = path.read_text()
    difference = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "rendered", lineterm="")
    assert kept == text, "\n".join(difference)


def check_by_kubernetes(made, kube):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            kubernetes_validate.validate(made, kube, strict=True)
    except kubernetes_validate.SchemaNotFoundError as missing:
        assert made["kind"] in kinds.KINDS, missing.message
        jsonschema.validate(made, kinds.KINDS[made["kind"]])


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_it(case):
    for kube in chart.kubes(case):
        objects = chart.rendered(case, HELM4, kube)
        for made in objects:
            check_by_kubernetes(made, kube)
            assert made["metadata"]["namespace"] == chart.NAMESPACE
        # The template of another kind must be a valid pod, too.
        for found in chart.pods(objects):
            check_by_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": found.labels},
                                 "spec": found.spec}, kube)


def test_the_schemas_can_refuse():
    deployment = chart.named(json.loads(json.dumps(chart.rendered("default"))), "Deployment", "probe-lockstep-router")
    deployment["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["second"] = 1
    with pytest.raises(Exception, match="second"):
        check_by_kubernetes(deployment, chart.NEWEST)
    with pytest.raises(AssertionError, match="Widget"):
        check_by_kubernetes({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "w"}}, chart.NEWEST)


@pytest.mark.parametrize("case", CASES)
def test_names_are_unique(case):
    objects = chart.rendered(case)
    names = [(made["kind"], made["metadata"]["name"]) for made in objects]
    assert len(names) == len(set(names))
    for _, name in names:
        assert len(name) <= 63


@pytest.mark.parametrize("case", ["default", "laptop-cpu", "grid-lws", "grid-statefulsets", "etcd"])
def test_long_names_are_cut(case):
    long = chart.rendered_with(case, {"fullnameOverride": "a" * 63})
    for made in chart.of_kind(long, "StatefulSet", "LeaderWorkerSet", "Deployment"):
        # Kubernetes appends a revision's hash, in a label of at most 63 characters.
        assert len(made["metadata"]["name"]) <= 52


REFUSED = {
    "an unknown name": ({"replica": 2}, "replica"),
    "an unknown name within": ({"engine": {"maxBatchToken": 1}}, "maxBatchToken"),
    "a wrong type": ({"replicas": "two"}, "replicas"),
    "no replica": ({"replicas": 0}, "replicas"),
    "a route of no weight": ({"router": {"routes": {"chat": [{"version": "v1", "weight": 0}]}}}, "weight 0"),
    "a route to no version": ({"router": {"routes": {"chat": []}}}, "chat"),
    "a route's name in two words": ({"router": {"routes": {"a b": [{"version": "v1", "weight": 1}]}}}, "a b"),
    "a version of no digest": ({"router": {"routes": {"a": [{"version": "v1@blue", "weight": 1}]}}}, "version"),
    "routes without routers": (
        {"mode": "serve", "router": {"routes": {"chat": [{"version": "v1", "weight": 1}]}}}, "mode=serve"),
    "coordinators beside etcd": ({"etcd": {"mode": "own"}, "router": {"coordinators": ["a:1"]}}, "etcd.prefix"),
    "a KV disk without a device": ({"device": "sim", "kvDisk": {"size": "1Gi"}}, "device=cpu"),
    "host memory of CPUs": ({"kvHost": {"size": "1Gi"}}, "device=cuda"),
    "host memory without prefixes": ({"device": "cuda", "kvHost": {"size": "1Gi"}, "engine": {"prefixCache": False}},
                                     "prefix cache"),
    "a KV disk without a size": ({"kvDisk": {"claim": "pages"}}, "kvDisk.size"),
    "a KV disk of no bytes": ({"kvDisk": {"size": "0Gi"}}, "size"),
    "a KV disk without prefixes": ({"kvDisk": {"size": "1Gi"}, "engine": {"zeroKv": True}}, "prefix cache"),
    "an unknown mode": ({"mode": "local"}, "mode"),
    "an unknown device": ({"device": "tpu"}, "device"),
    "no such port": ({"network": {"httpPort": 70000}}, "httpPort"),
    "root": ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
    "a short margin": ({"drain": {"marginSeconds": 1}}, "marginSeconds"),
    "a hub without a name": ({"model": {"name": ""}}, "name"),
    "a claim without a name": ({"model": {"source": "pvc", "path": "a"}}, "claim"),
    "an image without a reference": ({"model": {"source": "image", "path": "a"}}, "reference"),
    "an absolute path in a volume": ({"model": {"source": "pvc", "path": "/a", "pvc": {"claim": "b"}}}, "path"),
    "an invalid digest": ({"image": {"digest": "sha256:12"}}, "digest"),
    "an invalid switch": ({"monitoring": {"podMonitor": {"enabled": "yes"}}}, "enabled"),
    "two ways to count a pod": (
        {"monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": "auto"}}}, "choose one"),
    "scaling by metrics that nothing reads": ({"autoscaling": {"enabled": True}}, "scrapedElsewhere"),
    "scaling by rules that nothing records": (
        {"autoscaling": {"enabled": True, "kind": "hpa"}, "monitoring": {"podMonitor": {"enabled": True}}},
        "prometheusRule"),
    "more replicas than the maximum": (
        {"replicas": 5, "autoscaling": {"enabled": True}, "monitoring": {"scrapedElsewhere": True}},
        "autoscaling.maxReplicas"),
    "more routers than the maximum": (
        {"router": {"replicas": 9, "autoscaling": {"enabled": True}}}, "router.autoscaling.maxReplicas"),
    "a flag that the chart gives": ({"router": {"extraArgs": ["--drain-seconds=9"]}}, "--drain-seconds"),
    "a flag of ranks that the chart gives": ({"workers": {"extraArgs": ["--tls"]}}, "workers.extraArgs"),
    "a flag twice": ({"coordinator": {"extraArgs": ["--regrow-seconds=1", "--regrow-seconds=2"]}}, "--regrow-seconds"),
    "two rules for one node": ({"workers": {"antiAffinity": "hard", "affinity": {"podAntiAffinity": {}}}},
                               "choose one"),
    "a claim that exists and is made": ({"model": {"hub": {"cache": {"claim": "a", "create": {"enabled": True}}}}},
                                       "choose one"),
    "a claim that nothing fills": ({"model": {"source": "pvc", "path": "m", "pvc": {"claim": "a"}, "hub": {
        "cache": {"create": {"enabled": True}}}}}, "model.source=hub"),
    "a volume without a place": ({"workers": {"extraVolumeMounts": [{"name": "a"}]}}, "mountPath"),
    "a KV usage above 1": ({"autoscaling": {"kvUsage": 1.5}}, "kvUsage"),
    "an argument that is no flag": ({"workers": {"extraArgs": ["evil"]}}, "extraArgs"),
    "variables that are not NCCL's": ({"rdma": {"env": {"LD_PRELOAD": "x"}}}, "LD_PRELOAD"),
    "an invalid quantity": ({"workers": {"resources": {"requests": {"cpu": "much"}}}}, "cpu"),
    "a grace that is too short": ({"drain": {"terminationGracePeriodSeconds": 44}}, "need 45"),
    "liveness before readiness": ({"probes": {"liveness": {"periodSeconds": 5, "failureThreshold": 2}}}, "liveness"),
    "ranks that do not fill pods": ({"topology": {"tp": 8, "ranksPerPod": 3}}, "does not divide"),
    "too many ranks": ({"topology": {"tp": 64, "pp": 64, "ranksPerPod": 64}}, "1024"),
    "a pod of too many ranks": ({"topology": {"tp": 128}}, "ranksPerPod"),
    "serve over pods": ({"mode": "serve", "topology": {"tp": 4, "ranksPerPod": 2}}, "mode=serve"),
    "half a limit": ({"workers": {"resources": {"limits": {"cpu": "1"}}}}, "both"),
    "two ports in one": ({"network": {"httpPort": 50051}}, "same"),
    "a mesh over health": ({"network": {"meshPort": 9101}}, "same"),
    "scaling several StatefulSets": (
        {"topology": {"tp": 2, "ranksPerPod": 1}, "autoscaling": {"enabled": True}}, "LeaderWorkerSet"),
    "a maximum below the minimum": ({"autoscaling": {"minReplicas": 5}}, "maxReplicas"),
    "a router's maximum below its minimum": ({"router": {"autoscaling": {"minReplicas": 9}}}, "maxReplicas"),
    "a topology of no LeaderWorkerSet": ({"topology": {"exclusiveTopology": "rack"}}, "exclusiveTopology"),
    "a pool of routers": (
        {"gateway": {"inferencePool": {"enabled": True, "endpointPicker": {"name": "a"}}}}, "mode=serve"),
    "a pool without a picker": ({"mode": "serve", "gateway": {"inferencePool": {"enabled": "true"}}}, "endpointPicker"),
    "a route to nowhere": ({"gateway": {"httpRoute": {"enabled": "true"}}}, "parentRefs"),
    "etcd without roles that use it": ({"mode": "serve", "etcd": {"mode": "own"}}, "mode=serve"),
    "members without a volume": ({"etcd": {"mode": "own", "own": {"storage": {"size": ""}}}}, "storage.size"),
    "a name that is no label": ({"fullnameOverride": "a.b"}, "fullnameOverride"),
    "a name that begins with a digit": ({"fullnameOverride": "1a"}, "fullnameOverride"),
    "a name that no label can have": ({"fullnameOverride": "a" * 64}, "fullnameOverride"),
    "a label that selects": ({"workers": {"podLabels": {"app.kubernetes.io/component": "a"}}}, "io/component"),
    "a group's label": ({"workers": {"podLabels": {"lockstep/node": "7"}}}, "lockstep/node"),
    "metrics behind the clients' policy": ({"networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]},
                                            "monitoring": {"podMonitor": {"enabled": "auto"}}}, "monitors"),
    "an invalid checksum": ({"model": {"sha256": "12"}}, "sha256"),
    "a window longer than an autoscaler's": ({"autoscaling": {"cooldownSeconds": 3601}}, "cooldownSeconds"),
    "two members": ({"etcd": {"own": {"members": 2}}}, "members"),
    "an etcd of nowhere": ({"etcd": {"mode": "external"}}, "endpoints"),
    "an endpoint without a port": ({"etcd": {"external": {"endpoints": ["etcd"]}}}, "endpoints"),
    "a certificate without an authority": ({"etcd": {"mode": "external", "external": {
        "endpoints": ["a:1"], "tls": {"clientSecret": "b"}}}}, "caSecret"),
    "a user without a password": ({"etcd": {"mode": "external", "external": {
        "endpoints": ["a:1"], "user": "b"}}}, "passwordSecret"),
    "ranks that take all cores": ({"device": "cuda", "topology": {"tp": 2}}, "engine.threads"),
    "f32 on a GPU": ({"device": "cuda", "engine": {"kvDtype": "f32"}}, "bf16"),
    "bf16 on a CPU": ({"engine": {"activations": "bf16"}}, "bf16"),
    "NCCL between CPUs": ({"engine": {"collective": "nccl"}}, "NCCL"),
    "CUDA IPC between CPUs": ({"engine": {"collective": "ipc"}}, "CUDA IPC"),
    "fast on a CPU": ({"engine": {"numerics": "fast"}}, "fast"),
    "more at once than in a step": ({"engine": {"maxRunning": 600}}, "maxRunning"),
}


@BOTH
@pytest.mark.parametrize("why", REFUSED)
def test_refused(version, why):
    values, message = REFUSED[why]
    status, _, error = chart.template(version, values)
    assert status != 0, f"{why} is accepted"
    assert message in error, error


@BOTH
def test_an_older_kubernetes_is_refused(version):
    status, _, error = chart.template(version, {}, kube="1.29.4")
    assert status != 0 and "1.30" in error
    image = {"model": {"source": "image", "path": "a", "image": {"reference": "b"}}}
    status, _, error = chart.template(version, image, kube="1.32.0")
    assert status != 0 and "1.33" in error
    status, _, error = chart.template(version, {"device": "cuda", "gpu": {"dra": {"enabled": True}}}, kube="1.33.0")
    assert status != 0 and "1.34" in error


def test_every_value_has_a_schema_and_every_schema_a_value():
    def compare(values, schema, at):
        schema = DEFINITIONS[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
        if "properties" not in schema:
            return
        assert schema.get("additionalProperties") is False, f"{at} is open"
        if isinstance(values, dict) and at not in FREE:
            assert set(values) == set(schema["properties"]) - {"global"}, at
            for name, value in values.items():
                compare(value, schema["properties"][name], f"{at}.{name}")

    schema = json.loads((CHART / "values.schema.json").read_text())
    DEFINITIONS = schema["definitions"]
    # These are empty by default, and may be set.
    FREE = {f".{part}.affinity" for part in ("router", "coordinator", "workers")}
    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_only_requested_apis_are_rendered():
    apis = {made["apiVersion"] for made in chart.rendered("default")}
    assert apis == {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}


def test_the_token_is_long_and_kept():
    secret = chart.named(chart.rendered("default"), "Secret", "probe-lockstep-join")
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert len(secret["data"]["token"]) == 88, "64 characters, as base64"
    assert chart.of_kind(chart.rendered("everything-pod"), "Secret") == []
    assert chart.of_kind(chart.rendered("laptop-cpu"), "Secret") == []
    assert 'lookup "v1" "Secret"' in (CHART / "templates" / "secret.yaml").read_text()


def test_notes_show_the_next_command(tmp_path):
    """Helm prints notes only of what it installs, so a copy of the chart has them as an object."""
    copy = shutil.copytree(CHART, tmp_path / "lockstep")
    text = (copy / "templates" / "NOTES.txt").read_text()
    (copy / "templates" / "_notes.tpl").write_text('{{ define "notes" }}' + text + "{{ end }}")
    (copy / "templates" / "notes.yaml").write_text('kind: Notes\ntext: {{ include "notes" . | toJson }}\n')
    for case in ("default", "laptop-cpu", "grid-lws", "grid-statefulsets", "everything-pod"):
        objects = chart.rendered(case, HELM4, chart.NEWEST, str(copy))
        notes = chart.of_kind(objects, "Notes")[0]["text"]
        deployment = chart.of_kind(objects, "Deployment")[0]["metadata"]["name"]
        assert f"rollout status deployment/{deployment}" in notes
        assert "kubectl -n models port-forward service/probe-lockstep 8000:8000" in notes
        assert "helm -n models test probe" in notes
        assert ("The API requires no key" in notes) == (case != "everything-pod")
