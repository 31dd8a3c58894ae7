"""A separate `lockstep serve` for each module of tests: its process, its two addresses and its pages."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

READY_MAX_S = 120
STOP_MAX_S = 60


class Server:
    """Starts on free ports of the loopback. Its log is kept, and printed after a failure."""

    def __init__(self, *flags, binary=None, model="smollm2"):
        binary = binary or os.environ["LOCKSTEP_BINARY"]
        self.http, self.grpc = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.log = tempfile.NamedTemporaryFile(prefix="lockstep-", suffix=".log")
        command = [binary, "serve", model, "--http", self.http, "--grpc", self.grpc, *flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        try:
            self.wait_until(self.is_ready, READY_MAX_S, "ready")
        except BaseException:
            self.process.kill()
            self.process.wait()
            self.print_log()
            raise

    @property
    def url(self):
        return f"http://{self.http}"

    def is_ready(self):
        assert self.process.poll() is None, f"the server ended with {self.process.returncode} before it was ready"
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def get(self, path):
        """Returns (status, text). A refused connection is an OSError, a refusal by the server is a status."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name):
        """Returns the sum of a metric over all labels; fails if the page has no line of it."""
        status, page = self.get("/metrics")
        assert status == 200, f"/metrics returned {status}"
        lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, f"/metrics has no {name}:\n{page}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def is_idle(self):
        """Returns whether no request runs or waits, and none holds a KV block."""
        gauges = ["lockstep:requests_running", "lockstep:requests_waiting", "lockstep:kv_usage_ratio"]
        return all(self.metric(name) == 0 for name in gauges)

    def wait_until(self, condition, seconds, what):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not {what} within {seconds} s")
            time.sleep(0.05)

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def exit_status(self):
        """Returns the exit status after the process has ended."""
        return self.process.wait(timeout=STOP_MAX_S)

    def stop(self):
        """Stops the server as an operator would, and fails if its exit status is not 0."""
        if self.process.poll() is None:
            self.terminate()
        try:
            status = self.exit_status()
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status != 0:
            self.print_log()
        self.log.close()
        assert status == 0, f"the server ended with {status}"

    def print_log(self):
        with open(self.log.name, errors="replace") as log:
            lines = log.read().splitlines()[-200:]
        print(f"--- the log of pid {self.process.pid}", *lines, "---", sep="\n", flush=True)


def free_ports(n):
    """Returns ports that were free a moment ago, all of them different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def post(url, body, timeout=60):
    """Returns (status, headers, parsed JSON) of a POST that may be refused."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, reply.headers, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)
