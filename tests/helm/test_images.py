"""Images and compose, as far as they can be tested without an image builder: the file system of the small image is
made, entered, and serves; compose's services agree with the binary and with each other."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import chart
import pytest
import yaml
from chart import BINARY, ROOT

DEPLOY = ROOT / "deploy"
# Of the debug binary, which is a third larger than a release.
SIZE_MAX = 68 << 20
PATIENCE_S = 60


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory):
    """Makes the files that the Dockerfile's last stage copies, around the debug binary without its debug
    information."""
    folder = tmp_path_factory.mktemp("image")
    program, root = str(folder / "lockstep"), str(folder / "root")
    subprocess.run(["strip", "--strip-all", "-o", program, str(BINARY)], check=True, timeout=PATIENCE_S)
    subprocess.run([str(DEPLOY / "rootfs.sh"), program, root], check=True, timeout=PATIENCE_S)
    return folder / "root"


def test_the_small_image_is_small_and_has_no_shell(rootfs):
    files = [path for path in rootfs.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < SIZE_MAX
    programs = [path.name for path in files if os.access(path, os.X_OK) and ".so" not in path.name]
    assert programs == ["lockstep"]
    assert not [path for path in rootfs.rglob("*") if path.is_symlink()]


def inside(rootfs, *arguments):
    """Returns a command that runs in the image as its user: as root by chroot alone, or else in a separate
    namespace."""
    chroot = shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if os.geteuid() == 0:
        return [chroot, "--userspec=65532:65532", str(rootfs), "/lockstep", *arguments]
    return [shutil.which("unshare"), "--user", "--map-root-user", chroot, str(rootfs), "/lockstep", *arguments]


def test_the_binary_finds_all_it_needs(rootfs):
    done = subprocess.run(inside(rootfs, "token"), capture_output=True, text=True, timeout=PATIENCE_S, env={})
    assert done.returncode == 0 and re.fullmatch(r"[0-9a-f]{64}\n", done.stdout), done.stderr


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


@contextlib.contextmanager
def running(command, log):
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={"LOCKSTEP_CACHE": "/cache"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def page(port, path, body=None):
    """Returns the status, or None if no process listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return None


def wait_until(what, condition):
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.1)


def test_it_serves_from_within_and_drains(rootfs, tmp_path):
    shutil.copytree(ROOT / "tests" / "reference" / "llama-f32-tied", rootfs / "model")
    http, grpc = free_port(), free_port()
    command = inside(rootfs, "serve", "/model", "--threads=1", f"--http=127.0.0.1:{http}",
                     f"--grpc=127.0.0.1:{grpc}")
    log = tmp_path / "log"
    with running(command, log) as process:
        ended = lambda: process.poll() is not None  # noqa: E731
        wait_until("it is ready", lambda: ended() or page(http, "/ready") == 200)
        assert not ended(), log.read_text()
        assert page(http, "/health") == 200 and page(http, "/metrics") == 200
        assert page(http, "/v1/completions", {"prompt": "One", "max_tokens": 4}) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()


def dockerfile():
    """Returns the instructions of each stage, by its name."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    given = dict(re.findall(r"^ARG (\w+)=(\S+)", text, re.M))
    stages, now = {}, None
    for line in text.splitlines():
        if match := re.match(r"FROM (\S+) AS (\w+)", line):
            base = re.sub(r"\$\{(\w+)\}", lambda name: given[name.group(1)], match.group(1))
            now = stages.setdefault(match.group(2), [("FROM", base)])
        elif now is None:
            continue
        elif match := re.match(r"([A-Z]+) (.*)", line):
            now.append((match.group(1), match.group(2)))
    return stages


def test_the_dockerfile_makes_what_the_chart_runs():
    stages = dockerfile()
    assert list(stages) == ["build", "cuda", "cpu"], "a build without a target makes the last"
    assert stages["cpu"][0] == ("FROM", "scratch") and "-runtime-" in stages["cuda"][0][1]
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    for name in ("cpu", "cuda"):
        instructions = dict(stages[name])
        security = values["podSecurity"]
        assert instructions["USER"] == f"{security['runAsUser']}:{security['runAsGroup']}"
        # The chart sets arguments alone.
        assert instructions["ENTRYPOINT"] == '["/lockstep"]'
        assert any("LOCKSTEP_CACHE=/cache" in of for what, of in stages[name] if what == "ENV")
    version = re.search(r'^channel = "([\d.]+)"', (ROOT / "rust-toolchain.toml").read_text(), re.M).group(1)
    assert dict(stages["build"])["FROM"] == f"rust:{version}-bookworm"
    assert "--profile dist" in dict(stages["build"])["RUN"] or any("--profile dist" in of for _, of in stages["build"])


def test_the_build_has_what_crates_are_built_with():
    """etcd's client compiles protos that import Google's: the base image must have both."""
    lock = (ROOT / "Cargo.lock").read_text()
    before = []
    for kind, what in dockerfile()["build"]:
        if "cargo build" in what:
            break
        before.append(what)
    else:
        pytest.fail("nothing is built")
    installed = {word for what in before if "apt-get install" in what for word in what.split()}
    if 'name = "etcd-client"' in lock:
        assert {"protobuf-compiler", "libprotobuf-dev"} <= installed


def test_the_build_gets_every_crate():
    taken = {line[1:].split("/")[0] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
             if line.startswith("!")}
    members = re.search(r"members = \[(.*?)\]", (ROOT / "Cargo.toml").read_text(), re.S).group(1)
    assert {name.split("/")[0] for name in re.findall(r'"([^"]+)"', members)} <= taken
    for path in taken:
        assert (ROOT / path).exists(), path


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_is_a_cluster_of_four_ranks():
    services = compose()["services"]
    ranks = [name for name, service in services.items() if service.get("command", [""])[0] == "worker"]
    coordinator, router = services["coordinator"]["command"], services["router"]["command"]
    assert "--tp=2" in coordinator and "--pp=2" in coordinator and len(ranks) == 4
    for name in ranks:
        assert {"--join=coordinator:50100", "--local-workers=4"} <= set(services[name]["command"])
    assert "--listen=0.0.0.0:50100" in coordinator and "--advertise=coordinator:50100" in coordinator
    assert "--etcd-endpoints=etcd:2379" in coordinator and "--etcd-endpoints=etcd:2379" in router
    assert "--advertise-client-urls=http://etcd:2379" in services["etcd"]["command"]
    for service in services.values():
        for other in service.get("depends_on", {}):
            assert other in services
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in compose()["volumes"] or (DEPLOY / source).exists(), source
    # Loopback unless a variable sets another address.
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    # The grace period is as long as the drain may take.
    for name in ("coordinator", "router"):
        drain = next(int(a.split("=")[1]) for a in services[name]["command"] if a.startswith("--drain-seconds"))
        assert int(services[name]["stop_grace_period"].removesuffix("s")) >= drain + 5


def test_composes_secrets_can_be_mounted():
    """A secret from the environment is copied into the container, which fails in a read-only one."""
    made = compose()
    of_files = {name for name, secret in made["secrets"].items() if "file" in secret}
    n_given = 0
    for name, service in made["services"].items():
        for secret in service.get("secrets", []):
            n_given += 1
            assert secret in made["secrets"] and (not service.get("read_only") or secret in of_files), name
    assert n_given >= 6
    # The mounted files are those that the commands at the head of the file make, and none of the repository.
    path = re.fullmatch(r"\$\{JOIN_TOKEN_FILE:-\./(.+)\}", made["secrets"]["join"]["file"]).group(1)
    text = (DEPLOY / "compose.yaml").read_text()
    assert f"token > deploy/{path} && chmod 644 deploy/{path}" in text
    assert f"/deploy/{path}" in (ROOT / ".gitignore").read_text().splitlines()


def test_prometheus_finds_composes_pages():
    services = compose()["services"]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    targets = [target for job in jobs for of in job["static_configs"] for target in of["targets"]]
    assert len(targets) == 2
    for target in targets:
        name, port = target.split(":")
        assert any(re.fullmatch(rf"--(http|health)=0\.0\.0\.0:{port}", a) for a in services[name]["command"]), target
    assert services["grafana"]["volumes"][1].endswith(":/var/lib/grafana/dashboards:ro")
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/lockstep.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"


def test_the_binary_accepts_composes_commands():
    for name, service in compose()["services"].items():
        command = service.get("command")
        if "lockstep" not in service["image"]:
            continue
        assert not command[0].startswith("-")
        model = [re.sub(r"\$\{LOCKSTEP_MODEL:-(\w+)\}", r"\1", word) for word in command]
        model.append("--help" if model[0] == "pull" else "--print-config")
        environment = {key: str(value) for key, value in service["environment"].items()}
        command = [str(BINARY), *model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_the_collectors_parts_are_defined():
    made = yaml.safe_load((DEPLOY / "collector" / "collector.yaml").read_text())
    for pipeline in made["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert names and set(names) <= set(made[kind]), kind
        assert pipeline["processors"][0] == "memory_limiter" and pipeline["processors"][-1] == "batch"
    port = made["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rsplit(":", 1)[1]
    endpoint = compose()["services"]["router"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert endpoint == f"http://collector:{port}"


def test_links_in_deploy_have_targets():
    links = [path for path in pathlib.Path(DEPLOY).rglob("*") if path.is_symlink()]
    assert len(links) == 2 and all(path.resolve().exists() for path in links)
