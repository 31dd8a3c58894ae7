"""How the rendered objects fit together: which pod finds which, what is mounted where, how long a termination may take,
and whether the real binary accepts its arguments."""

import base64
import ipaddress
import os
import re
import shutil
import subprocess

import chart
import pytest
import yaml
from chart import CASES, GATEWAY, flag, flags, role

EACH = pytest.mark.parametrize("case", CASES)
# Seconds that a process needs after its drain for connections to close.
CLOSING_S = 5


def lasting(case):
    """Returns (pods, container) of everything that runs until it is terminated."""
    return [(found, c) for found in chart.serving(chart.rendered(case)) for c in found.lasting]


# -- which pod finds which

@EACH
def test_every_selector_selects(case):
    objects = chart.rendered(case)
    running = chart.standing(objects)
    for made in objects:
        spec = made.get("spec", {})
        if made["kind"] in ("Deployment", "StatefulSet"):
            labels = spec["template"]["metadata"]["labels"]
            assert chart.selects(spec["selector"], labels)
            others = [found.labels for found in chart.pods(objects) if found.owner is not made]
            assert not [labels for labels in others if chart.selects(spec["selector"], labels)], "not its own pods"
        elif made["kind"] in ("PodDisruptionBudget", "PodMonitor", "InferencePool"):
            assert [found for found in running if chart.selects(spec["selector"], found.labels)], made["kind"]
        elif made["kind"] == "NetworkPolicy":
            assert [found for found in running if chart.selects(spec["podSelector"], found.labels)]


@EACH
def test_budgets_cover_all_pods_once(case):
    objects = chart.rendered(case)
    budgets = chart.of_kind(objects, "PodDisruptionBudget")
    for found in chart.standing(objects):
        over = [made for made in budgets if chart.selects(made["spec"]["selector"], found.labels)]
        assert len(over) <= 1, f"{found}: the eviction API refuses pods with several budgets"
        if case not in ("bare", "laptop-cpu"):
            assert over, f"{found} has no budget"


@EACH
def test_services_reach_ports(case):
    objects = chart.rendered(case)
    for service in chart.of_kind(objects, "Service"):
        behind = [found for found in chart.standing(objects)
                  if chart.selects({"matchLabels": service["spec"]["selector"]}, found.labels)]
        assert behind, f"{service['metadata']['name']} has no pods"
        for port in service["spec"]["ports"]:
            for found in behind:
                assert port["targetPort"] in found.ports, f"{found} has no port {port['targetPort']}"
    for monitor in chart.of_kind(objects, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert [found for found in chart.serving(objects) if endpoint["port"] in found.ports
                    and chart.selects(monitor["spec"]["selector"], found.labels)], endpoint["port"]


def pods_of_address(objects, address):
    """Returns the pods behind a name from a headless Service."""
    match = re.fullmatch(r"([a-z0-9-]+)-(\d+|\$\(GROUP\))\.([a-z0-9-]+)\.models\.svc:(\d+)", address)
    assert match, address
    owner_name, n, service_name, port = match.groups()
    owners = chart.of_kind(objects, "StatefulSet", "LeaderWorkerSet")
    owner = next(made for made in owners if made["metadata"]["name"] == owner_name)
    if owner["kind"] == "StatefulSet":
        assert owner["spec"]["serviceName"] == service_name
        service = chart.named(objects, "Service", service_name)
        # The ranks resolve it before the pod can be ready.
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        found = next(pods for pods in chart.pods(objects) if pods.owner is owner)
        assert chart.selects({"matchLabels": service["spec"]["selector"]}, found.labels)
    else:
        # LeaderWorkerSet makes a headless Service of its own name, and leaders have the group's number.
        assert service_name == owner_name and owner["spec"]["networkConfig"]["subdomainPolicy"] == "Shared"
        found = next(pods for pods in chart.pods(objects) if pods.owner is owner and pods.part == " leader")
    return found, n, int(port)


@EACH
def test_the_router_knows_every_coordinator(case):
    objects = chart.rendered(case)
    values = CASES[case][1]
    for found, container in lasting(case):
        if role(container) != "router":
            continue
        addresses = flags(container, "coordinator")
        if flags(container, "etcd-endpoints"):
            assert not addresses, "with etcd the router gets no addresses"
            continue
        others = values.get("router", {}).get("coordinators", [])
        assert addresses[len(addresses) - len(others):] == others
        places = [pods_of_address(objects, address) for address in addresses[:len(addresses) - len(others)]]
        pods = places[0][0]
        n_groups = pods.n
        if values.get("autoscaling", {}).get("enabled"):
            assert "replicas" not in pods.owner["spec"], "the autoscaler sets the number of replicas"
            scalers = chart.of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler")
            scaler = next(made for made in scalers if made["metadata"]["name"].endswith("-replica"))
            n_groups = scaler["spec"].get("maxReplicaCount") or scaler["spec"]["maxReplicas"]
        assert [int(n) for _, n, _ in places] == list(range(n_groups))
        coordinator = next(c for c in pods.lasting if role(c) == "coordinator")
        assert {port for _, _, port in places} == {int(flag(coordinator, "listen").rsplit(":", 1)[1])}


def test_routes_are_a_file_that_the_router_reads():
    objects = chart.rendered("routes")
    container = next(c for _, c in lasting("routes") if role(c) == "router")
    assert flags(container, "text") == ["other=other.gguf"]
    folder, name = flag(container, "routes").rsplit("/", 1)
    mount = next(mount for mount in container["volumeMounts"] if mount["mountPath"] == folder)
    pods = next(found for found, of in lasting("routes") if of is container)
    volume = next(volume for volume in pods.spec["volumes"] if volume["name"] == mount["name"])
    # A file that is mounted with subPath would not change with the ConfigMap.
    assert "subPath" not in mount and mount["readOnly"]
    lines = chart.named(objects, "ConfigMap", volume["configMap"]["name"])["data"][name].splitlines()
    assert lines == ["chat = v1:90, v2@0a1b:10", "org/alias = other:Q4_K_M:1"]
    assert not chart.of_kind(chart.rendered("default"), "ConfigMap")


@EACH
def test_every_rank_has_one_coordinator(case):
    objects = chart.rendered(case)
    n_ranks = {}
    for found in chart.serving(objects):
        for container in found.lasting:
            if role(container) != "worker":
                continue
            join = flag(container, "join")
            host, port = join.rsplit(":", 1)
            if host in ("127.0.0.1", "[::1]"):
                coordinator = next(c for c in found.lasting if role(c) == "coordinator")
                place = found
            elif host == "$(LWS_LEADER_ADDRESS)":
                place = next(p for p in chart.pods(objects) if p.owner is found.owner and p.part == " leader")
                coordinator = next(c for c in place.lasting if role(c) == "coordinator")
            else:
                place, n, _ = pods_of_address(objects, join)
                assert n == "$(GROUP)"
                index = next(e for e in container["env"] if e["name"] == "GROUP")
                assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
                assert place.n == found.n, "as many groups of ranks as coordinators"
                coordinator = next(c for c in place.lasting if role(c) == "coordinator")
            assert int(port) == int(flag(coordinator, "listen").rsplit(":", 1)[1])
            # A rank that connects to loopback would not use TLS, and its coordinator, which listens on all addresses,
            # does.
            assert flag(container, "tls") == "on"
            assert flag(container, "device").split(":")[0] == flag(coordinator, "device")
            key = place.owner["metadata"]["name"]
            _, n_found, _ = n_ranks.get(key, (0, 0, 0))
            per_group = found.n // place.n if place.n else 1
            n_ranks[key] = (int(flag(coordinator, "tp")) * int(flag(coordinator, "pp")), n_found + per_group, place.n)
    for name, (n_in_grid, n_found, _) in n_ranks.items():
        assert n_found == n_in_grid, f"{name}: {n_found} ranks for a grid of {n_in_grid}"


# -- ports and probes

@EACH
def test_ports_are_distinct_and_listened_to(case):
    for found in chart.serving(chart.rendered(case)):
        ports = [(p["name"], p["containerPort"]) for c in found.lasting for p in c["ports"]]
        for part in zip(*ports):
            assert len(set(part)) == len(part), f"{found}: {ports}"
        for container in found.lasting:
            names = ("http", "grpc", "admin", "listen", "health", "mesh-listen")
            listened = {int(flag(container, name).rsplit(":", 1)[1]) for name in names if flags(container, name)}
            assert listened == {p["containerPort"] for p in container["ports"]}, f"{found} {container['name']}"
            for p in container["ports"]:
                assert len(p["name"]) <= 15


@EACH
def test_addresses_are_of_the_family(case):
    is_6 = CASES[case][1].get("network", {}).get("ipFamily") == "IPv6"
    for _, container in lasting(case):
        for name in ("http", "grpc", "admin", "listen", "health"):
            for address in flags(container, name):
                host = address.rsplit(":", 1)[0].strip("[]")
                assert ipaddress.ip_address(host).version == (6 if is_6 else 4)
        for address in flags(container, "mesh-listen"):
            # The other ranks receive this address unchanged, so it must be the pod's own.
            assert address.startswith("[$(POD_IP)]:" if is_6 else "$(POD_IP):")


@EACH
def test_probes(case):
    """Every role is probed by gRPC's own health service: readiness without a name, liveness as `live`. With a separate
    port for operators the probes use HTTP there: clients' ports may require TLS, and a kubelet has no certificate."""
    for found, container in lasting(case):
        named = {p["name"]: p["containerPort"] for p in container["ports"]}
        is_door = role(container) in ("router", "serve")
        # No probe may use a mesh port: between epochs a rank does not answer there. Nor a coordinator's port, which
        # requires TLS, unlike the kubelet's probes.
        (page,) = [port for name, port in named.items() if name == "grpc" or name.startswith("health")]
        assert ("grpc" in named) == is_door
        if "admin" in named:
            for kind, path in (("startupProbe", "/livez"), ("readinessProbe", "/ready"), ("livenessProbe", "/livez")):
                assert container[kind]["httpGet"] == {"path": path, "port": "admin"}
            continue
        assert not flags(container, "api-tls-cert"), "a probe has no certificate"
        for kind, service in (("startupProbe", "live"), ("readinessProbe", None), ("livenessProbe", "live")):
            # Liveness differs from readiness: a process that loads for an hour, or drains, must not be ended for it.
            expected = {"port": page} if service is None else {"port": page, "service": service}
            assert container[kind]["grpc"] == expected, f"{found} {container['name']} {kind}"
        ready, alive = container["readinessProbe"], container["livenessProbe"]
        assert alive["periodSeconds"] * alive["failureThreshold"] > ready["periodSeconds"] * ready["failureThreshold"]


# -- terminations

@EACH
def test_a_termination_fits_into_its_grace_period(case):
    for found in chart.serving(chart.rendered(case)):
        grace = found.spec["terminationGracePeriodSeconds"]
        drains = []
        for container in found.lasting:
            wait = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            drain = int(flag(container, "drain-seconds")) if flags(container, "drain-seconds") else 0
            assert wait + drain + CLOSING_S <= grace, f"{found} {container['name']}: {wait} + {drain} in {grace}"
            assert (wait > 0) == (role(container) in ("router", "serve") or found.part == " worker"
                                  or found.labels["app.kubernetes.io/component"] == "workers")
            drains.append((role(container), wait, drain))
        if any(kind == "coordinator" for kind, _, _ in drains):
            # Ranks beside a coordinator are sidecars: Kubernetes ends them after it.
            assert [c["name"] for c in found.spec["containers"]] == ["coordinator"]


@EACH
def test_ranks_outlive_their_coordinators_drain(case):
    objects = chart.rendered(case)
    coordinators = [c for found in chart.serving(objects) for c in found.lasting if role(c) == "coordinator"]
    for found in chart.serving(objects):
        for container in found.spec["containers"]:
            if role(container) == "worker":
                wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
                assert wait > int(flag(coordinators[0], "drain-seconds"))


@EACH
def test_rollouts_request_no_gpu_twice(case):
    for made in chart.rendered(case):
        component = made["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        if made["kind"] == "Deployment" and component == "serve":
            assert made["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        elif made["kind"] == "Deployment":
            # A router holds no GPU, so the new pod starts first.
            assert made["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        elif made["kind"] == "LeaderWorkerSet":
            rolling = made["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
            assert rolling == {"maxSurge": 0, "maxUnavailable": 1}
            assert made["spec"]["startupPolicy"] == "LeaderCreated", "a leader is ready only with its ranks"
        elif made["kind"] == "StatefulSet":
            assert made["spec"]["podManagementPolicy"] == "Parallel", "ranks of one group wait for each other"
            assert made["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


# -- the content of a pod

@EACH
def test_mounts_and_volumes_match(case):
    for found in chart.pods(chart.rendered(case)):
        claimed = found.owner["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"]: volume for volume in found.spec.get("volumes", [])}
        volumes.update({claim["metadata"]["name"]: claim for claim in claimed})
        mounted = {mount["name"] for c in found.containers for mount in c.get("volumeMounts", [])}
        assert mounted == set(volumes), f"{found}"
        for container in found.containers:
            mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", [])}
            paths = [p for argument in container["args"] for p in re.findall(r"(?<![\w:])/(?!/)[\w./-]+", argument)
                     if "://" not in argument and not argument.startswith("--etcd-prefix=")]
            for path in paths:
                assert any(path.startswith(f"{mount}/") for mount in mounts), f"{container['name']}: {path}"
            cache = next((e["value"] for e in container.get("env", []) if e["name"] == "LOCKSTEP_CACHE"), None)
            if cache:
                assert not mounts[cache].get("readOnly"), "it is written to"
            if role(container) in ("worker", "serve"):
                shm = volumes[mounts["/dev/shm"]["name"]]
                assert shm["emptyDir"]["medium"] == "Memory" and shm["emptyDir"]["sizeLimit"]
            for mount in mounts.values():
                assert mount.get("readOnly") or mount["name"] in ("cache", "shm", "data", "record", "scratch",
                                                                          "kv-disk")


@EACH
def test_the_token_is_in_every_role_and_secret(case):
    objects = chart.rendered(case)
    made = {name for secret in chart.of_kind(objects, "Secret")
            if not (name := secret["metadata"]["name"]).endswith("-etcd-tls")}
    given = CASES[case][1].get("join", {}).get("existingSecret")
    for found, container in lasting(case):
        if role(container) == "serve":
            continue
        assert flag(container, "token-file") == "/etc/lockstep/join/token"
        secret = next(v["secret"] for v in found.spec["volumes"] if v["name"] == "join")
        assert secret["items"][0]["path"] == "token" and secret["defaultMode"] == 0o440
        assert {secret["secretName"]} == (made or {given})


@EACH
def test_no_pod_is_privileged(case):
    for found in chart.pods(chart.rendered(case)):
        pod = found.spec["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] > 0 and pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert found.spec["automountServiceAccountToken"] is False
        assert not any(found.spec.get(host) for host in ("hostNetwork", "hostPID", "hostIPC"))
        for container in found.containers:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            is_rdma = case == "gpu-rdma" and container["name"].startswith("rank-")
            assert own["capabilities"].get("add", []) == (["IPC_LOCK"] if is_rdma else [])


@EACH
def test_ranks_of_a_pod_see_each_other(case):
    """Ranks open shared memory through /proc/PID/fd, so they need one PID namespace."""
    for found in chart.serving(chart.rendered(case)):
        ranks = [c for c in found.lasting if role(c) == "worker"]
        assert found.spec.get("shareProcessNamespace", False) == (len(ranks) > 1)
        for container in ranks:
            has_limits = "cpu" in (container["resources"].get("limits") or {})
            # With limits a container sees its own share. Without them a flag must set the number of ranks in the pod.
            # With GPUs each rank has its own, with memory that is not shared; then a flag sets the threads.
            is_cuda = flag(container, "device").startswith("cuda")
            expect = [] if has_limits or is_cuda or len(ranks) == 1 else [str(len(ranks))]
            assert flags(container, "local-workers") == expect
            assert has_limits or not is_cuda or len(ranks) == 1 or flags(container, "threads")


@EACH
def test_gpus_are_requested_only_with_cuda(case):
    for found in chart.pods(chart.rendered(case)):
        for container in found.containers:
            is_rank = container["name"] != "etcd" and role(container) in ("worker", "serve")
            is_cuda = is_rank and flag(container, "device").startswith("cuda")
            resources = container.get("resources", {})
            limit = resources.get("limits", {}).get("nvidia.com/gpu")
            claims = [claim["name"] for claim in resources.get("claims", [])]
            assert (limit is not None or claims == ["gpus"]) == is_cuda and not (limit and claims)
            if is_cuda:
                assert container["image"].endswith("-cuda") or "@" in container["image"]
            if limit:
                n_ranks = int(flag(container, "tp")) * int(flag(container, "pp")) if role(container) == "serve" else 1
                assert int(limit) == n_ranks and resources["requests"]["nvidia.com/gpu"] == limit


@pytest.mark.parametrize("case", ["gpu-dra", "gpu-dra-serve"])
def test_a_pods_ranks_share_its_claim(case):
    objects = chart.rendered(case)
    claim = chart.of_kind(objects, "ResourceClaimTemplate")[0]
    n_gpus = claim["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"]
    for found in chart.serving(objects):
        ranks = [c for c in found.lasting if role(c) in ("worker", "serve")]
        claims = [{"name": "gpus", "resourceClaimTemplateName": claim["metadata"]["name"]}]
        assert found.spec.get("resourceClaims", []) == (claims if ranks else [])
        if role(found.lasting[-1]) == "serve":
            assert flag(ranks[0], "device") == "cuda" and n_gpus == int(flag(ranks[0], "tp"))
        elif ranks:
            # Each takes another of the pod's GPUs.
            assert [flag(c, "device") for c in ranks] == [f"cuda:{n}" for n in range(n_gpus)]


@EACH
def test_policies_admit_only_the_roles_that_connect(case):
    objects = chart.rendered(case)
    policies = chart.of_kind(objects, "NetworkPolicy")
    if not policies:
        return
    for found in chart.standing(objects):
        over = [made for made in policies if chart.selects(made["spec"]["podSelector"], found.labels)]
        assert len(over) == 1, f"{found}"
        open_to = {}
        for rule in over[0]["spec"]["ingress"]:
            for port in rule["ports"]:
                if "port" not in port:
                    continue
                for number in range(port["port"], port.get("endPort", port["port"]) + 1):
                    open_to.setdefault(number, []).append(rule.get("from"))
        assert set(found.ports.values()) <= set(open_to), f"{found}: a port is closed to all"
        for name, number in found.ports.items():
            if not name.startswith(("mesh", "coordinator", "client", "peer")):
                continue
            for peers in open_to[number]:
                sources = [other.labels["app.kubernetes.io/component"] for other in chart.pods(objects)
                           if chart.selects(peers[0]["podSelector"], other.labels)]
                if name == "peer":
                    assert set(sources) == {"etcd"}
                else:
                    assert "router" in sources and not {"etcd", "test"} & set(sources)
                    # Ranks receive everything from their coordinator.
                    assert "workers" not in sources or name != "client"


@EACH
def test_ranks_with_gpus_reach_each_other_at_any_port(case):
    """NCCL listens on ports that the system chooses; only ranks may connect there."""
    objects = chart.rendered(case)
    for policy in chart.of_kind(objects, "NetworkPolicy"):
        of = policy["spec"]["podSelector"]
        over = [found for found in chart.standing(objects) if chart.selects(of, found.labels)]
        ranks = {repr(found): c for found in over for c in found.lasting if c["name"].startswith("rank-")}
        is_cuda = any(flag(c, "device").startswith("cuda") for c in ranks.values())
        any_port = [rule for rule in policy["spec"]["ingress"] if {"protocol": "TCP"} in rule["ports"]]
        assert len(any_port) == is_cuda
        for rule in any_port:
            (peer,) = rule["from"]
            sources = {repr(found) for found in chart.pods(objects) if chart.selects(peer["podSelector"], found.labels)}
            assert sources == set(ranks)


def test_there_is_a_policy_with_gpus():
    cases = [case for case in CASES if any(
        {"protocol": "TCP"} in rule["ports"] for made in chart.of_kind(chart.rendered(case), "NetworkPolicy")
        for rule in made["spec"]["ingress"])]
    assert {"four-nodes-lws", "four-nodes-statefulsets", "four-nodes-plugin"} <= set(cases)


@EACH
def test_nccl_does_not_look_for_gpus_that_it_cannot_see(case):
    for found, container in lasting(case):
        environment = {e["name"]: e.get("value") for e in container.get("env", [])}
        n_ranks = len([c for c in found.lasting if role(c) == "worker"])
        sees_one = "nvidia.com/gpu" in container.get("resources", {}).get("limits", {}) and role(container) == "worker"
        assert environment.get("NCCL_P2P_DISABLE") == ("1" if sees_one and n_ranks > 1 else None)


@EACH
def test_telemetry_names_the_pod(case):
    for found, container in lasting(case):
        names = [e["name"] for e in container.get("env", [])]
        attributes = [e["value"] for e in container.get("env", []) if e["name"] == "OTEL_RESOURCE_ATTRIBUTES"]
        assert len(names) == len(set(names)), f"{found}: {names}"
        if not flags(container, "otlp-endpoint"):
            assert not attributes
            continue
        assert attributes == ["k8s.namespace.name=models,k8s.pod.name=$(POD_NAME)"]
        # A kubelet resolves only variables that are defined before.
        assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")


def scaler_of(apis, **autoscaling):
    objects = chart.rendered_fresh({"autoscaling": {"enabled": True, **autoscaling}, "monitoring": {
        "podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}}, apis)
    return chart.of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler"), objects


def test_an_autoscaler_reads_existing_metrics():
    keda = ["keda.sh/v1alpha1"]
    for kind, apis, expect in (("auto", keda, "ScaledObject"), ("auto", [], "HorizontalPodAutoscaler"),
                               ("keda", [], "ScaledObject"), ("hpa", keda, "HorizontalPodAutoscaler")):
        (made,), _ = scaler_of(apis, kind=kind)
        assert made["kind"] == expect
    (keda,), _ = scaler_of(keda, cooldownSeconds=700)
    behaviour = keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behaviour == {"scaleDown": {"stabilizationWindowSeconds": 700}}
    (hpa,), objects = scaler_of([], kind="hpa")
    metric = hpa["spec"]["metrics"][0]["external"]["metric"]
    # The label that the scrape gives a release's pods; the rule keeps it and the adapter passes it on.
    assert metric["selector"]["matchLabels"] == {"app_kubernetes_io_instance": chart.RELEASE}
    monitor = chart.of_kind(objects, "PodMonitor")[0]
    assert "app.kubernetes.io/instance" in monitor["spec"]["podTargetLabels"]
    rules = yaml.safe_load((chart.CHART / "files" / "rules.yaml").read_text())["groups"]
    recorded = [rule["record"] for group in rules for rule in group["rules"]
                if "by (namespace, app_kubernetes_io_instance" in rule["expr"]]
    (scaled,), _ = scaler_of([], kind="hpa", firstTokenSeconds=2.5, kvUsage=0.8)
    targets = {each["external"]["metric"]["name"]: each["external"]["target"] for each in scaled["spec"]["metrics"]}
    assert targets["lockstep_first_token_seconds"] == {"type": "Value", "value": "2500m"}
    assert targets["lockstep_kv_usage_ratio"] == {"type": "Value", "value": "800m"}
    adapter = yaml.safe_load((chart.ROOT / "deploy" / "prometheus" / "adapter.yaml").read_text())
    (rule,) = adapter["externalRules"]
    chosen = re.fullmatch(r'\{__name__=~"(.*)",namespace!=""\}', rule["seriesQuery"]).group(1)
    assert all(re.fullmatch(chosen, name) for name in recorded)
    name = rule["name"]["as"].replace("$1", r"\1")
    # Every query that a scaler reads, the one for requests first.
    assert [re.sub(rule["name"]["matches"], name, each) for each in recorded] == list(targets)
    assert metric["name"] == list(targets)[0]
    assert rule["resources"]["overrides"] == {"namespace": {"resource": "namespace"}}


def test_keda_has_a_trigger_for_each_target():
    (made,), _ = scaler_of(["keda.sh/v1alpha1"], firstTokenSeconds=2.5, kvUsage=0.8)
    requests, first_token, kv = [(each["metricType"], each["metadata"]) for each in made["spec"]["triggers"]]
    assert (requests[0], first_token[0], kv[0]) == ("AverageValue", "Value", "Value")
    assert (first_token[1]["threshold"], kv[1]["threshold"]) == ("2.5", "0.8")
    # The time to first token is measured by routers, and the KV caches' usage by coordinators.
    pods = 'namespace="models", pod=~"probe-lockstep-'
    assert f'seconds_bucket{{{pods}(router|serve)-.*"}}' in first_token[1]["query"]
    assert f'lockstep:kv_usage_ratio{{{pods}(replica|serve)-.*"}}' in kv[1]["query"]


MONITORED = [case for case in CASES if chart.of_kind(chart.rendered(case), "PodMonitor", "ServiceMonitor")]


@pytest.mark.parametrize("case", MONITORED)
def test_monitors_find_every_page(case):
    """Each pod that serves clients and each coordinator is found once."""
    objects = chart.rendered(case)
    (monitor,) = chart.of_kind(objects, "PodMonitor", "ServiceMonitor")
    found = []
    for made in chart.serving(objects):
        labels = [made.labels]
        if monitor["kind"] == "ServiceMonitor":
            services = [service for service in chart.of_kind(objects, "Service")
                        if chart.selects(monitor["spec"]["selector"], service["metadata"]["labels"])
                        and chart.selects({"matchLabels": service["spec"]["selector"]}, made.labels)]
            ports = {port["name"]: port["targetPort"] for service in services for port in service["spec"]["ports"]}
        else:
            labels = [made.labels] if chart.selects(monitor["spec"]["selector"], made.labels) else []
            ports = {name: name for name in made.ports}
        pages = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        found += [(made.labels["app.kubernetes.io/component"], page["port"]) for page in pages
                  if labels and ports.get(page["port"]) in made.ports]
    door = "admin" if any("admin" in made.ports for made in chart.serving(objects)) else "http"
    by_component = {made.labels["app.kubernetes.io/component"] for made in chart.serving(objects)}
    expected = [(component, door if component in ("router", "serve") else "health")
                for component in by_component & {"router", "serve"} | by_component & holders(objects)]
    assert sorted(found) == sorted(expected)


def holders(objects):
    """Returns the components of pods that hold a coordinator."""
    return {made.labels["app.kubernetes.io/component"] for made in chart.serving(objects)
            for container in made.lasting if role(container) == "coordinator"}


@pytest.mark.parametrize("case", ["default", "grid-lws", "grid-statefulsets", "everything-pod", "claim", "laptop-cpu"])
def test_pods_of_a_role_are_spread(case):
    """Each kind of pod is spread by a selector that chooses pods like it, and never those of another role."""
    ranks = {"replica", "workers"}
    for made in chart.serving(chart.rendered(case)):
        component = made.labels["app.kubernetes.io/component"]
        terms = [spread["labelSelector"] for spread in made.spec["topologySpreadConstraints"]]
        apart = made.spec.get("affinity", {}).get("podAntiAffinity", {})
        terms += [term["labelSelector"] for term in apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])]
        terms += [term["podAffinityTerm"]["labelSelector"]
                  for term in apart.get("preferredDuringSchedulingIgnoredDuringExecution", [])]
        for selector in terms:
            (requirement,) = selector["matchExpressions"]
            assert component in requirement["values"] and chart.selects(selector, made.labels)
            assert set(requirement["values"]) <= (ranks if component in ranks else {component})


def test_affinity_follows_the_values():
    def of(case, component):
        return next(made.spec for made in chart.serving(chart.rendered(case))
                    if made.labels["app.kubernetes.io/component"] == component)

    hard = of("claim", "replica")["affinity"]["podAntiAffinity"]
    assert hard["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == "kubernetes.io/hostname"
    soft = of("everything-pod", "replica")["affinity"]
    assert soft["nodeAffinity"] == {}, "the given affinity stays"
    assert soft["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 100
    assert "affinity" not in of("default", "replica")
    (zones,) = of("everything-pod", "router")["topologySpreadConstraints"]
    assert (zones["topologyKey"], zones["whenUnsatisfiable"]) == ("topology.kubernetes.io/zone", "DoNotSchedule")


@pytest.mark.parametrize("case", ["everything-pod", "everything-lws", "everything-statefulsets", "everything-serve"])
def test_extra_volumes_are_mounted(case):
    """For each mount of a role's container the pod has the volume, once."""
    for made in chart.serving(chart.rendered(case)):
        names = [volume["name"] for volume in made.spec["volumes"]]
        assert len(names) == len(set(names)), made
        for container in made.lasting:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(names)
            places = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert ("/etc/roots" if role(container) == "router" else "/scratch") in places, container["name"]


def test_a_claim_for_pulled_models():
    objects = chart.rendered("claim")
    (claim,) = chart.of_kind(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["storageClassName"] == "shared" and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for made in chart.serving(objects):
        volume = next(volume for volume in made.spec["volumes"] if volume["name"] == "cache")
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}


def test_a_pool_uses_the_protocol_of_its_pods():
    pool = chart.of_kind(chart.rendered("everything-serve"), "InferencePool")[0]
    assert pool["spec"]["appProtocol"] == "kubernetes.io/h2c"
    plain = {**CASES["everything-serve"][1]["gateway"]["inferencePool"], "appProtocol": ""}
    objects = chart.rendered_with("everything-serve", {"gateway": {**GATEWAY, "inferencePool": plain}})
    assert "appProtocol" not in chart.of_kind(objects, "InferencePool")[0]["spec"]


# -- etcd

ETCD = [case for case, (_, values, _, _) in CASES.items() if "etcd" in values]
OWN_ETCD = [case for case in ETCD if CASES[case][1]["etcd"]["mode"] == "own"]


def test_there_are_cases_with_etcd():
    assert len(ETCD) >= 5 and len(OWN_ETCD) >= 3


@pytest.mark.parametrize("case", ETCD)
def test_roles_use_one_store(case):
    objects = chart.rendered(case)
    stores = set()
    for found, container in lasting(case):
        if role(container) == "worker":
            assert not any("etcd" in argument for argument in container["args"]), "a worker never sees the store"
            continue
        stores.add((flag(container, "etcd-endpoints"), flag(container, "etcd-prefix")))
        if role(container) == "coordinator":
            # The advertised address leads to its own pod.
            address = flag(container, "advertise").replace("$(POD_NAME)", f"{found.owner['metadata']['name']}-0")
            assert pods_of_address(objects, address)[0].owner is found.owner
    assert len(stores) == 1
    endpoints = stores.pop()[0].split(",")
    if case in OWN_ETCD:
        # Connections without a certificate of the authority are rejected.
        assert all(endpoint.startswith("https://") for endpoint in endpoints)
        places = [pods_of_address(objects, endpoint.removeprefix("https://")) for endpoint in endpoints]
        assert [int(n) for _, n, _ in places] == list(range(places[0][0].n))
        assert {port for _, _, port in places} == {places[0][0].ports["client"]}
    else:
        assert endpoints == CASES[case][1]["etcd"]["external"]["endpoints"]


@pytest.mark.parametrize("case", OWN_ETCD)
def test_members_have_each_others_addresses(case):
    objects = chart.rendered(case)
    found = next(pods for pods in chart.standing(objects) if pods.labels["app.kubernetes.io/component"] == "etcd")
    container = found.spec["containers"][0]
    members = dict(member.split("=", 1) for member in flag(container, "initial-cluster").split(","))
    name = found.owner["metadata"]["name"]
    assert list(members) == [f"{name}-{n}" for n in range(found.n)]
    for n in range(found.n):
        own = flag(container, "initial-advertise-peer-urls").replace("$(POD_NAME)", f"{name}-{n}")
        assert members[f"{name}-{n}"] == own, "a member that does not find itself in the list does not start"
        assert pods_of_address(objects, own.removeprefix("https://"))[0].owner is found.owner
    for kind, port in (("client", "client"), ("peer", "peer"), ("metrics", "etcd-metrics")):
        assert flag(container, f"listen-{kind}-urls").endswith(f":{found.ports[port]}")
    # A member without its majority is alive: its restart would only delay the majority's return.
    for probe, path in (("livenessProbe", "/health?serializable=true"), ("readinessProbe", "/health")):
        assert container[probe]["httpGet"] == {"path": path, "port": "etcd-metrics"}
    assert found.spec["affinity"]["podAntiAffinity"]
    budget = chart.named(objects, "PodDisruptionBudget", name)
    assert budget["spec"]["maxUnavailable"] == 1 and found.n % 2 == 1


def certificate(secret, name):
    text = subprocess.run(["openssl", "x509", "-noout", "-text"], input=base64.b64decode(secret["data"][name]),
                          capture_output=True, check=True, timeout=60)
    return text.stdout.decode()


@pytest.mark.parametrize("case", OWN_ETCD)
def test_etcd_requires_certificates_that_roles_have(case):
    objects = chart.rendered(case)
    found = next(pods for pods in chart.standing(objects) if pods.labels["app.kubernetes.io/component"] == "etcd")
    container = found.spec["containers"][0]
    assert "--client-cert-auth=true" in container["args"] and "--peer-client-cert-auth=true" in container["args"]
    name = found.owner["metadata"]["name"]
    secret = chart.named(objects, "Secret", f"{name}-tls")
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    members, role_own = certificate(secret, "tls.crt"), certificate(secret, "client.crt")
    for n in range(found.n):
        assert f"DNS:{name}-{n}.{name}.models.svc" in members
    # etcd compares names in a client's certificate with the address of the connection.
    assert "DNS:" not in role_own and "CN = lockstep" in role_own.replace("CN=lockstep", "CN = lockstep")
    for pods in chart.pods(objects):
        mounted = [volume["secret"] for volume in pods.spec.get("volumes", [])
                   if volume.get("secret", {}).get("secretName") == f"{name}-tls"]
        keys = {item["key"] for volume in mounted for item in volume["items"]}
        has_store = any(flags(c, "etcd-endpoints") for c in pods.containers)
        assert keys == ({"ca.crt", "tls.crt", "tls.key"} if pods.owner is found.owner else
                        {"ca.crt", "client.crt", "client.key"} if has_store else set()), f"{pods}"


def test_operators_have_a_separate_port_and_key():
    objects = chart.rendered("admin")
    (monitor,) = chart.of_kind(objects, "PodMonitor")
    (door,) = [end for end in monitor["spec"]["podMetricsEndpoints"] if end["port"] != "health"]
    assert door["port"] == "admin"
    assert door["authorization"]["credentials"] == {"name": "operators", "key": "key"}
    # No Service for clients leads there.
    to_admin = [made["metadata"]["name"] for made in chart.of_kind(objects, "Service")
                if any(port["name"] == "admin" for port in made["spec"]["ports"])]
    assert to_admin == ["probe-lockstep-admin"]
    router = next(pods for pods in chart.standing(objects) if pods.labels["app.kubernetes.io/component"] == "router")
    (container,) = router.spec["containers"]
    assert flag(container, "admin-keys") == "/etc/lockstep/admin/key"
    assert flag(container, "api-tls-cert") == "/etc/lockstep/tls/tls.crt"
    assert flag(container, "api-client-ca") == "/etc/lockstep/client-ca/ca"


@pytest.mark.parametrize("values, why", [
    ({"tls": {"secret": "doors"}}, "tls.secret requires admin.enabled"),
    ({"admin": {"enabled": True}, "tls": {"clientCaSecret": {"name": "ca"}}}, "tls.clientCaSecret requires tls.secret"),
    ({"admin": {"keySecret": {"name": "key"}}}, "admin.keySecret requires admin.enabled"),
    ({"admin": {"enabled": True, "port": 8000}}, "admin.port is also a port of clients"),
])
def test_invalid_admin_and_tls_values_are_refused(values, why):
    status, _, error = chart.template(chart.HELM4, values)
    assert status != 0 and why in error, error


def test_etcd_accepts_its_flags():
    """Runs only if etcd is installed; the tests of the store install it."""
    etcd = shutil.which("etcd")
    if not etcd:
        pytest.skip("there is no etcd here")
    done = subprocess.run([etcd, "--help"], capture_output=True, text=True, timeout=60)
    known = set(re.findall(r"^\s+--?([a-z-]+)", done.stdout + done.stderr, re.M))
    objects = chart.rendered("etcd")
    found = next(pods for pods in chart.standing(objects) if pods.labels["app.kubernetes.io/component"] == "etcd")
    for argument in found.spec["containers"][0]["args"]:
        assert argument.removeprefix("--").split("=")[0] in known, argument


# -- models

def test_hub_models_are_pulled_before_anything_needs_them():
    for case in ("default", "hub", "grid-lws", "grid-statefulsets", "laptop-cpu"):
        for found in chart.serving(chart.rendered(case)):
            needs = {role(c) for c in found.lasting} & {"router", "coordinator", "serve"}
            first = found.containers[0]
            assert (role(first) == "pull") == bool(needs), f"{case}: {found}"
            for container in found.lasting:
                # Ranks in separate pods receive the model from the coordinator.
                fetches = "--fetch" in container["args"]
                assert fetches == (role(container) == "worker" and not needs)


def test_a_model_is_verified_before_anything_needs_it():
    for found in chart.serving(chart.rendered("verified")):
        needs = {role(c) for c in found.lasting} & {"router", "coordinator"}
        first = found.containers[0]
        assert (role(first) == "pull") == bool(needs), found
        if needs:
            assert first["args"] == ["pull", "/model/m.gguf", f"--sha256={'0' * 64}"]
            assert "model" in {mount["name"] for mount in first["volumeMounts"]}


def test_mounted_models_are_at_one_path_everywhere():
    for case in ("everything-lws", "everything-statefulsets", "image-volume", "gpu-rdma"):
        path = "/model/model.gguf" if case == "image-volume" else "/model/m.gguf"
        for found in chart.serving(chart.rendered(case)):
            for container in found.lasting:
                assert "model" in {mount["name"] for mount in container["volumeMounts"]}
                if role(container) != "worker":
                    assert container["args"][1] == path


def test_only_pulls_get_the_hubs_token():
    for found in chart.serving(chart.rendered("hub")):
        for container in found.containers:
            has_token = "HF_TOKEN" in {e["name"] for e in container.get("env", [])}
            assert has_token == (role(container) == "pull")


# -- the binary

@pytest.fixture(scope="module")
def binary():
    assert chart.BINARY.exists(), f"{chart.BINARY} is not built: cargo build, or LOCKSTEP_BINARY"
    return str(chart.BINARY)


def run(binary, arguments, environment=None):
    environment = {"PATH": os.environ["PATH"], **(environment or {})}
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60, env=environment)


def expanded(container):
    """Returns arguments and environment as a kubelet would make them."""
    known = {"POD_NAME": "probe-0", "POD_IP": "fd00::1" if "[::]:" in " ".join(container["args"]) else "10.0.0.1",
             "GROUP": "0", "LWS_LEADER_ADDRESS": "probe-0.probe.models"}
    environment = {e["name"]: e.get("value", known.get(e["name"], "secret")) for e in container.get("env", [])}
    arguments = [re.sub(r"\$\((\w+)\)", lambda m: known[m.group(1)], a) for a in container["args"]]
    assert "$(" not in " ".join(arguments)
    for name in re.findall(r"\$\((\w+)\)", " ".join(container["args"])):
        # LeaderWorkerSet sets these variables, not the chart.
        assert name in environment or name.startswith("LWS_"), f"{name} is used and not set"
    return arguments, environment


@EACH
def test_the_binary_accepts_every_flag(case, binary):
    knows_cuda = run(binary, ["worker", "--join=a:1", "--device=cuda", "--print-config"]).returncode == 0
    knows_etcd = run(binary, ["router", "--etcd-endpoints=a:1", "--print-config"]).returncode == 0
    tried = set()
    for found in chart.pods(chart.rendered(case)):
        for container in found.containers:
            if container["name"] == "etcd":
                continue
            arguments, environment = expanded(container)
            if not knows_etcd:
                arguments = [a for a in arguments if not a.startswith(("--etcd-", "--advertise="))]
            if not knows_cuda:
                # A binary without CUDA is tested on everything else.
                arguments = [re.sub(r"^--device=cuda.*", "--device=cpu", a).replace("=bf16", "=f32") for a in arguments]
            prints = role(container) in ("serve", "router", "coordinator", "worker")
            # The last argument makes it stop before it does anything; it rejects unknown flags before that.
            call = (*arguments, "--print-config" if prints else "--help")
            if call not in tried:
                tried.add(call)
                done = run(binary, call, environment)
                assert done.returncode == 0, f"{found} {container['name']}: {' '.join(call)}\n{done.stderr}"


def test_the_binary_refuses_unknown_flags(binary):
    assert run(binary, ["worker", "--join=a:1", "--unknown", "--print-config"]).returncode == 2
    assert run(binary, ["bench", "--unknown", "--help"]).returncode == 2


def test_values_reach_the_program(binary):
    containers, printed = {}, {}
    for _, container in lasting("everything-lws"):
        # Of the ranks, the first.
        containers.setdefault(role(container), container)
    for name, container in containers.items():
        arguments, environment = expanded(container)
        printed[name] = run(binary, [*arguments, "--print-config"], environment).stdout
    for line in ("tp = 2", "pp = 2", 'activations = "f32"', 'kv-dtype = "f32"', 'kv-memory = "4GiB"', "context = 8192",
                 "max-batch-tokens = 1048576", "max-chunk-tokens = 512", "max-running = 128", "max-waiting = 64",
                 "prefix-cache = false", "zero-kv = true", 'served-model-name = ["ours"]',
                 "drain-seconds = 90", 'replica = "probe-0"',
                 'log = "router=debug,info"', 'otlp-endpoint = "http://collector:4318"', "otlp-steps = true",
                 'otlp-protocol = "http/protobuf"', "otlp-sample = 0.25", "otlp-metrics-seconds = 30",
                 'speculation = "ngram"', 'numerics = "lockstep"', 'health = "0.0.0.0:9100"',
                 'listen = "0.0.0.0:50100"'):
        assert line in printed["coordinator"].splitlines(), f"{line}\n{printed['coordinator']}"
    for line in ('http = "0.0.0.0:8000"', 'grpc = "0.0.0.0:50051"', 'api-keys = "/etc/lockstep/keys/keys"',
                 "max-running = 128", "max-waiting = 64", "drain-seconds = 90", "otlp-content = true",
                 'record = "/var/lib/lockstep/record/answers"', "record-prompts = true", 'record-bytes = "512MiB"',
                 "audit = 0.0625", "stored-responses = 100", 'stored-bytes = "32MiB"', "stored-seconds = 600"):
        assert line in printed["router"].splitlines(), f"{line}\n{printed['router']}"
    for line in ("threads = 4", 'tls = "on"', 'otlp-protocol = "http/protobuf"', "otlp-sample = 0.25",
                 'mesh-listen = "10.0.0.1:50200"', 'wire = "auto"', 'link-encryption = "on"',
                 'collective = "auto"', "scrub = 0.125", 'kv-commit = "grow"'):
        assert line in printed["worker"].splitlines(), f"{line}\n{printed['worker']}"


# Flags of the roles for which the chart has no value: they can be set in `extraArgs` of the role. The comments give the
# reason for each.
COMMON = {
    # For use at a terminal.
    "help", "print-config", "config",
    # Only during an upgrade.
    "protocol-max",
    # Certificates between roles are made from the join token.
    "tls-cert", "tls-key", "tls-ca",
    # Settings of a collector beyond its address, mostly secrets: by `extraEnv` from a Secret.
    "otlp-headers", "otlp-certificate",
    "etcd-lease-seconds",
}
IN_EXTRA_ARGS = {
    # Limits for this one model's clients, and settings that its files lack.
    "router": COMMON | {"failover-max", "request-seconds", "max-choices", "max-body-bytes", "record-files",
                        "chat-template", "default-chat-template-kwargs", "seed", "api-keys-grace",
                        "tool-call-parser", "reasoning-parser",
                         "enable-auto-tool-choice", "trust-request-chat-template", "enable-per-request-metrics",
                         "allowed-hosts", "allowed-origins", "root-path",
                         # Pages for users, and words for lists of models.
                         "no-metrics", "no-slots", "no-ui", "tags",
                        # Addresses are the chart's own; a key as a flag would be visible in the manifest.
                        "host", "port", "route", "api-key",
                        # With a token it is on between roles wherever an address is not loopback.
                        "tls"},
    "coordinator": COMMON | {"tls", "state-cache", "speculative-config", "draft-model", "draft-max", "draft-kv-memory",
                             "step-millis", "replan-seconds", "regrow-seconds", "takeover-seconds",
                             "load-seconds",
                             # The chart has kvMemory.
                             "gpu-memory-utilization"},
    # Files and hardware of the pod, which the program finds by itself.
    "worker": COMMON | {"models", "model-path", "kernel-cache", "packed-cache-max", "kv-disk-rate", "cuda-graphs",
                        "isa",
                        "memory",
                        # It gets its coordinator's address.
                        "replica", "etcd-endpoints", "etcd-prefix", "etcd-ca", "etcd-cert", "etcd-key", "etcd-user",
                        "etcd-password-file"},
}


def flags_of_role(binary, name):
    """Returns the flags of a role, from its help."""
    help_text = run(binary, [name, "--help"]).stdout
    return set(re.findall(r"^ +(?:-\w, )?--([a-z0-9-]+)", help_text, re.M))


def test_each_flag_has_a_value_or_is_listed_for_extra_args(binary):
    given = {name: set() for name in IN_EXTRA_ARGS}
    for case in chart.CASES:
        for _, container in lasting(case):
            if role(container) in given:
                given[role(container)] |= {a[2:].split("=")[0] for a in container["args"] if a.startswith("--")}
                # Variables of the environment count too.
                given[role(container)] |= {e["name"].removeprefix("LOCKSTEP_").lower().replace("_", "-")
                                           for e in container.get("env", []) if e["name"].startswith("LOCKSTEP_")}
    # A case sets it this way.
    given["router"].discard("failover-max")
    for name, none in IN_EXTRA_ARGS.items():
        known = flags_of_role(binary, name)
        assert len(known) > 10, f"{name}: {known}"
        missing = known - given[name] - none
        assert not missing, f"{name}: no value sets {sorted(missing)}, and IN_EXTRA_ARGS does not list them"
        assert not none - known, f"{name} has no {sorted(none - known)}"
        assert not none & given[name], f"{name}: values set {sorted(none & given[name])}"
