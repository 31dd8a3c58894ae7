"""Runs rendered pods as processes of this machine: the real binary with the command and environment that the chart
gives it, each pod on a loopback address of its own. Plays the kubelet's and the controllers' part, as far as the tests
ask: names, mounts, probes, init containers and sidecars in their order, preStop, the grace of an end, rollouts. Knows
nothing of what is served."""

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
# Of a container that fetches a model.
FETCH_S = 900
SERVING = b"\x08\x01"
CLUSTERS = itertools.count()


def get(url, body=None):
    """(status, text); none while nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError:
        return None, ""


def health(target, service=""):
    """gRPC's health service, as the kubelet asks it: whether it says SERVING."""
    asked = b"" if not service else b"\x0a" + bytes([len(service)]) + service.encode()
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return channel.unary_unary("/grpc.health.v1.Health/Check")(asked, timeout=PATIENCE_S) == SERVING
        except grpc.RpcError:
            return False


def wait_until(what, condition, explain=lambda: ""):
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"{what}\n{explain()}"
        time.sleep(0.1)


def at_once(pods, do):
    """What is done to several pods at the same time; gives each one's result."""
    with concurrent.futures.ThreadPoolExecutor(len(pods) or 1) as pool:
        return list(pool.map(do, pods))


class Pod:
    """One pod of a template; a container that runs is a process."""

    def __init__(self, cluster, name, n, address, template, environment):
        self.cluster, self.name, self.n, self.address, self.template = cluster, name, n, address, template
        self.environment = {"POD_NAME": name, "POD_IP": address, **environment}
        self.processes = {}

    def command(self, container):
        """As the kubelet expands it, with names resolved and mounts where they are on this machine."""
        # What the controller sets is known to arguments too.
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
        # On loopback roles ask for no TLS by themselves; in a cluster they do.
        environment["LOCKSTEP_TLS"] = "on"
        log = self.cluster.folder / f"{self.name}.{container['name']}.log"
        with open(log, "ab") as out:
            self.processes[container["name"]] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def start_all(self):
        """Init containers one after the other: one that ends must end well, a sidecar must have started. Then the
        others."""
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
        """Whether a probe succeeds now."""
        probe = container[kind]
        if "grpc" in probe:
            return health(f"{self.address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        asked = probe["httpGet"]
        return get(f"http://{self.address}:{ports[asked['port']]}{asked['path']}")[0] == 200

    def page(self, container):
        """Where a role's metrics are, or none of what has no such page."""
        found = [port["containerPort"] for port in container["ports"] if port["name"].startswith(("http", "health"))]
        return f"http://{self.address}:{found[0]}" if found else None

    def is_ready(self):
        return all(self.passes(container, "startupProbe") and self.passes(container, "readinessProbe")
                   for container in self.template.lasting)

    def end(self):
        """preStop, SIGTERM, and for sidecars that after all others, the last one first; all of it within the grace
        period, at whose end who is still there is killed. What each exited with."""
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
    """All pods of a release, but for its test's."""

    def __init__(self, objects, folder, volumes):
        """`volumes`: folders of this machine that all pods have, by the volume's name."""
        self.folder, self.volumes = pathlib.Path(folder), volumes
        self.names, self.pods = {}, []
        # Another cluster, of another run of the tests too, has another network of its own.
        self.network = f"127.{64 + os.getpid() % 64}.{(os.getpid() // 64 + next(CLUSTERS)) % 256}"
        token = self.folder / "join"
        token.mkdir()
        secret = subprocess.run([str(chart.BINARY), "token"], capture_output=True, text=True, check=True, timeout=60)
        (token / "token").write_text(secret.stdout)
        self.volumes = {"join": token, **self.certificates(objects), **volumes}
        self.programs = {"lockstep": str(chart.BINARY), "etcd": shutil.which("etcd")}
        # How this machine reaches a registry of packages, for who pulls.
        self.environment_of_all = {name: value for name, value in os.environ.items()
                                   if name in ("PATH", "SSL_CERT_FILE") or name.startswith("PIP_")}
        self.n_addresses = 0
        for template in chart.standing(objects):
            for n in range(template.n):
                self.pods.append(self.made(template, n))

    def certificates(self, objects):
        """The volumes of the chart's own etcd, where it asks for certificates: the chart's are of names that this
        machine has not, so others are made, of addresses."""
        if not any(made["kind"] == "Secret" and made["metadata"]["name"].endswith("-etcd-tls") for made in objects):
            return {}
        folder = self.folder / "etcd-certificates"
        folder.mkdir()
        # Members look at where a peer calls from: whatever its address, a call comes from the first one here.
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
        """A pod that does not run yet."""
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
        """Those pods, at once; each must end by itself and well."""
        for pod, statuses in zip(pods, at_once(pods, Pod.end), strict=True):
            assert set(statuses.values()) == {0}, f"{pod.name}: {statuses}\n{self.logs()}"

    def roll_out(self, objects):
        """What controllers do with pods whose template has changed. The names of those that were replaced."""
        templates = {repr(template): template for template in chart.standing(objects)}
        changed = [pod for pod in self.pods if templates[repr(pod.template)].spec != pod.template.spec
                   or templates[repr(pod.template)].annotations != pod.template.annotations]
        surging = [pod for pod in changed if surges(pod.template.owner)]
        for pod in surging:
            self.replace_behind_new(pod, templates)
        self.replace_by_number([pod for pod in changed if pod not in surging], templates)
        return [pod.name for pod in changed]

    def replace_behind_new(self, pod, templates):
        """The new one first. The old one is out of service when it hears of its end."""
        new = self.made(templates[repr(pod.template)], self.n_addresses)
        new.start_all()
        self.pods[self.pods.index(pod)] = new
        self.wait_until_ready()
        self.end([pod])

    def replace_by_number(self, changed, templates):
        """Group by group, the highest number first, old pods before new ones, and on when all is ready again."""
        # A LeaderWorkerSet of one group: its pods go together.
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
