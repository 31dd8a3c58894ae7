"""Starts deploy/compose.yaml and injects faults: `run.py BINARY`. Runs four ranks, a coordinator and a router in
separate containers, with etcd between them and a collector beside. While streams run, a rank is killed, stopped and cut
from its network, and the coordinator is killed. Every answer must be the same as without faults, and the spans of all
roles must reach the collector. At the end nothing is left.

Without a Docker daemon it prints a line and tests nothing.
"""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import rotel

sys.path.insert(0, str(Path(__file__).resolve().parent))
import images  # noqa: E402
import spans  # noqa: E402
from images import ROOT, docker  # noqa: E402

COMPOSE = ROOT / "deploy" / "compose.yaml"
# The program of another image takes other arguments.
COLLECTOR = ROOT / "tests" / "compose" / "collector.yaml"
SERVICES = ["etcd", "collector", "coordinator", "worker-0", "worker-1", "worker-2", "worker-3", "router"]
STREAMS = 4
N_RANKS = 4
TOKENS = 160
READY_MAX_S = 180
ANSWER_MAX_S = 180


class Cluster:
    """One project of Compose, with its own name, images and ports."""

    def __init__(self, binary):
        self.name = f"lockstep-test-{os.getpid()}"
        self.port, self.grpc = free_ports(2)
        self.images = {f"{image.upper()}_IMAGE": f"{self.name}/{image}" for image in ("lockstep", "etcd", "collector")}
        self.token = tempfile.NamedTemporaryFile("w", suffix=".token")
        self.token.write(subprocess.run([binary, "token"], capture_output=True, text=True, check=True).stdout)
        self.token.flush()
        os.chmod(self.token.name, 0o644)
        ports = {"LOCKSTEP_HTTP_PORT": str(self.port), "LOCKSTEP_GRPC_PORT": str(self.grpc)}
        self.environment = {**os.environ, **self.images, **ports, "JOIN_TOKEN_FILE": self.token.name}

    def compose(self, *arguments, seconds=READY_MAX_S):
        command = [*compose_command(), "-p", self.name, "-f", str(COMPOSE), "-f", str(COLLECTOR), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def container(self, service):
        return self.compose("ps", "-q", service).split()[0]

    def network(self):
        return docker("network", "ls", "-q", "--filter", f"name={self.name}").split()[0]

    def up(self, binary):
        images.make_lockstep_image(self.images["LOCKSTEP_IMAGE"], binary)
        etcd = shutil.which("etcd")
        images.make_program_image(self.images["ETCD_IMAGE"], etcd, ["ENV PATH=" + str(Path(etcd).parent)])
        agent = str(Path(rotel.__file__).parent / "rotel-agent")
        os.chmod(agent, 0o755)
        images.make_program_image(self.images["COLLECTOR_IMAGE"], agent, [f'ENTRYPOINT ["{agent}"]'])
        # Created first, so that no container fetches the model; Compose uses an existing volume of this name.
        volume = f"{self.name}_models"
        labels = [f"com.docker.compose.project={self.name}", "com.docker.compose.volume=models"]
        docker("volume", "create", *(word for label in labels for word in ("--label", label)), volume)
        images.fill_volume(volume, self.images["LOCKSTEP_IMAGE"], model_folder(binary), "models/smollm2")
        self.compose("up", "-d", *SERVICES)
        self.wait_until_ready()

    def wait_until_ready(self):
        give_up = time.monotonic() + READY_MAX_S
        while self.get("/ready") != 200:
            assert time.monotonic() < give_up, f"not ready within {READY_MAX_S} s\n{self.logs()}"
            time.sleep(0.2)

    def get(self, path):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return None

    def logs(self):
        return self.compose("logs", "--no-color", "--tail=40")

    def down(self):
        self.compose("down", "--volumes", "--timeout", "50")
        docker("image", "rm", *self.images.values())

    def remaining(self):
        """Returns what is left of the project."""
        found = [docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={self.name}")]
        found += [docker(kind, "ls", "-q", "--filter", f"name={self.name}") for kind in ("network", "volume")]
        return [name for names in found for name in names.split()]


class Stream(threading.Thread):
    """One answer, read as it arrives."""

    def __init__(self, port, seed):
        super().__init__(daemon=True)
        self.port, self.seed = port, seed
        self.ids, self.error, self.is_whole = [], None, False

    def run(self):
        body = {"prompt": "The story of a small machine that", "max_tokens": TOKENS, "temperature": 0.8,
                "seed": self.seed, "ignore_eos": True, "stream": True, "return_token_ids": True}
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_MAX_S)
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                self.read_line(line.decode().strip())
        except Exception as error:  # noqa: BLE001 the main thread reports it
            self.error = error

    def read_line(self, line):
        if line == "data: [DONE]":
            self.is_whole = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                self.ids += choice.get("token_ids") or []


def start_streams(cluster):
    streams = [Stream(cluster.port, seed) for seed in range(STREAMS)]
    for stream in streams:
        stream.start()
    return streams


def answers(streams):
    for stream in streams:
        stream.join(ANSWER_MAX_S)
        assert stream.is_whole and not stream.error, f"seed {stream.seed}: {len(stream.ids)} tokens, {stream.error}"
    return [stream.ids for stream in streams]


def run_with_fault(cluster, fault, expected):
    """Injects a fault while streams run, and returns the seconds from the fault to the last token."""
    streams = start_streams(cluster)
    give_up = time.monotonic() + ANSWER_MAX_S
    while min(len(stream.ids) for stream in streams) < TOKENS // 8:
        assert time.monotonic() < give_up, "streams did not begin"
        time.sleep(0.01)
    begun = time.monotonic()
    n_running = sum(len(stream.ids) < TOKENS for stream in streams)
    assert n_running == STREAMS, f"the fault hits {n_running} of {STREAMS} streams"
    fault()
    assert answers(streams) == expected
    return time.monotonic() - begun


def check_spans(cluster, expected):
    """Runs streams until the collector has the spans of every role, each in the trace of a request or of a step."""
    give_up = time.monotonic() + ANSWER_MAX_S
    while missing := spans.missing(docker("logs", cluster.container("collector")), N_RANKS):
        assert time.monotonic() < give_up, f"the collector lacks {missing}"
        assert answers(start_streams(cluster)) == expected
        time.sleep(1)


def kill(cluster, service):
    """Kills a container like the OOM killer does, and starts it again as its restart policy would."""
    container = cluster.container(service)
    docker("kill", container)
    docker("start", container)


def pause(cluster, service):
    container = cluster.container(service)
    docker("pause", container)
    time.sleep(4)
    docker("unpause", container)


def disconnect(cluster, service):
    network, container = cluster.network(), cluster.container(service)
    docker("network", "disconnect", network, container)
    time.sleep(4)
    docker("network", "connect", "--alias", service, network, container)


FAULTS = [
    ("a rank killed", kill, "worker-1"),
    ("a rank paused", pause, "worker-2"),
    ("a rank cut from its network", disconnect, "worker-0"),
    ("the coordinator killed", kill, "coordinator"),
]


def free_ports(n):
    import socket

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def model_folder(binary):
    """Returns the path of the model on this machine, and fetches it if it is missing."""
    done = subprocess.run([binary, "pull", "smollm2"], capture_output=True, text=True, check=True, timeout=READY_MAX_S)
    return Path(done.stdout.split()[-1]).parent


def compose_command():
    """Returns Compose's command: it is a plugin of Docker's, or a separate program."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if plugin else ["docker-compose"]


def main(binary):
    needed = [("a Docker daemon", images.has_daemon()), ("etcd", shutil.which("etcd")),
              ("Compose", compose_command()[0] == "docker" or shutil.which("docker-compose"))]
    missing = [what for what, is_present in needed if not is_present]
    if missing:
        print(f"NOT RUN: Compose, because there is no {' and no '.join(missing)}")
        return
    if why := images.cannot_run():
        print(f"NOT RUN: Compose, because no container runs here: {why}")
        return
    cluster = Cluster(binary)
    began = time.monotonic()
    try:
        cluster.up(binary)
        size = int(docker("image", "inspect", "--format", "{{.Size}}", cluster.images["LOCKSTEP_IMAGE"]))
        seconds = time.monotonic() - began
        print(f"ready after {seconds:.1f} s, the builds of the images included; the image has {size >> 20} MiB")
        expected = answers(start_streams(cluster))
        assert all(len(ids) == TOKENS for ids in expected) and len({tuple(ids) for ids in expected}) == STREAMS
        check_spans(cluster, expected)
        print("the collector has the spans of a router, a coordinator and four ranks")
        for name, fault, service in FAULTS:
            seconds = run_with_fault(cluster, lambda fault=fault, service=service: fault(cluster, service), expected)
            print(f"{name}: {STREAMS} of {STREAMS} streams equal, {seconds:.1f} s to the last token")
            cluster.wait_until_ready()
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        cluster.down()
    assert not cluster.remaining(), cluster.remaining()
    print("down: nothing is left")


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
