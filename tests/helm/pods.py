"""Runs rendered pods as processes of this machine: the real binary with the command and environment that the chart
gives it, each pod on a loopback address of its own. Plays the kubelet's part, as far as the tests ask: names, mounts,
probes over HTTP, the order in which containers end. Knows nothing of what is served."""

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

PATIENCE_S = 120


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


def wait_until(what, condition, explain=lambda: ""):
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"{what}\n{explain()}"
        time.sleep(0.1)


class Pod:
    """One pod of a template; a container that runs is a process."""

    def __init__(self, cluster, name, address, template, environment):
        self.cluster, self.name, self.address, self.template = cluster, name, address, template
        self.environment = {"POD_NAME": name, "POD_IP": address, **environment}
        self.processes = {}

    def command(self, container):
        """As the kubelet expands it, with names resolved and mounts where they are on this machine."""
        environment = {"PATH": os.environ["PATH"]}
        for variable in container.get("env", []):
            name = variable["name"]
            environment[name] = self.environment[name] if "valueFrom" in variable else variable["value"]
        # What only the controller sets is there too.
        known = {**self.environment, **environment}
        words = [re.sub(r"\$\((\w+)\)", lambda m: known[m.group(1)], word) for word in container["args"]]
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
        for container in self.template.lasting:
            self.start(container)

    def url(self, container, probe):
        get_of = container[probe]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        return f"http://{self.address}:{ports[get_of['port']]}{get_of['path']}"

    def is_ready(self):
        """By each container's readiness; a door's, which is gRPC, says the same as /ready."""
        for container in self.template.lasting:
            is_door = "grpc" in container["readinessProbe"]
            url = self.url(container, "livenessProbe").replace("/health", "/ready") if is_door else self.url(
                container, "readinessProbe")
            if get(url)[0] != 200:
                return False
        return True

    def end(self):
        """Kubernetes ends sidecars after the other containers, and those together; gives what each exited with."""
        sidecars = [c["name"] for c in self.template.spec.get("initContainers", []) if c["name"] in self.processes]
        statuses = {}
        for names in ([c["name"] for c in self.template.spec["containers"]], sidecars):
            for name in names:
                self.processes[name].send_signal(signal.SIGTERM)
            for name in names:
                statuses[name] = self.processes.pop(name).wait(PATIENCE_S)
        return statuses

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.wait(PATIENCE_S)
        self.processes.clear()


class Cluster:
    """All pods of a release, but for its test's."""

    def __init__(self, objects, folder, model):
        self.folder, self.model = pathlib.Path(folder), model
        self.names, self.pods = {}, []
        # Another run of the tests has another network of its own.
        self.network = f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.token = self.folder / "join"
        self.token.mkdir()
        secret = subprocess.run([str(chart.BINARY), "token"], capture_output=True, text=True, check=True, timeout=60)
        (self.token / "token").write_text(secret.stdout)
        self.programs = {"lockstep": str(chart.BINARY), "etcd": shutil.which("etcd")}
        for template in chart.standing(objects):
            self.add(template)

    def volume(self, pod, name):
        if name == "join":
            return self.token
        if name == "model":
            return self.model
        place = self.folder / f"{pod.name}-{name}"
        place.mkdir(exist_ok=True)
        return place

    def add(self, template):
        owner, kind = template.owner["metadata"]["name"], template.owner["kind"]
        for n in range(template.n):
            name = f"{owner}-{n}" if template.part != " worker" else f"{owner}-0-{n + 1}"
            address = f"{self.network}.{len(self.pods) + 1}"
            self.pods.append(Pod(self, name, address, template, self.environment(kind, owner, n)))
            service = template.owner["spec"].get("serviceName", owner)
            self.names[f"{name}.{service}.{chart.NAMESPACE}.svc"] = address

    def environment(self, kind, owner, n):
        if kind == "LeaderWorkerSet":
            return {"LWS_LEADER_ADDRESS": f"{owner}-0.{owner}.{chart.NAMESPACE}.svc"}
        return {"GROUP": str(n)}

    def of(self, component):
        return [pod for pod in self.pods if pod.template.labels["app.kubernetes.io/component"] == component]

    def logs(self):
        return "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def start(self):
        for pod in self.pods:
            pod.start_all()
        self.wait_until_ready()

    def wait_until_ready(self):
        wait_until("all pods are ready", lambda: all(pod.is_ready() for pod in self.pods), self.logs)

    def door(self):
        pod = self.of("router")[0]
        return pod.url(pod.template.lasting[0], "livenessProbe").removesuffix("/health")

    def kill(self):
        for pod in self.pods:
            pod.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
