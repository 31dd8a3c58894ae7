"""Starts Lockstep where a peer's test starts its own server, with flags of the same meaning.

Independent of tests. A peer's flag that has no meaning here stops its test, unless a table says why it changes nothing.
"""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request

MODEL = "smollm2"
START_SECONDS = 60
STOP_SECONDS = 10


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(host, port, flags, model=MODEL):
    """Returns the command line of a server. `flags` are Lockstep's own."""
    binary = os.environ["PEER_BINARY"]
    return [binary, "serve", model, "--host", host, "--port", str(port), "--grpc", "127.0.0.1:0", *flags]


class Server:
    """A running server. Its log goes to a file, which shows why it did not start."""

    def __init__(self, flags, env=None, host="127.0.0.1", port=None, model=MODEL):
        self.host, self.port = host, port or free_port()
        self.log_path = os.path.join(os.environ["PEER_LOGS"], f"{self.port}.log")
        with open(self.log_path, "wb") as log:
            line = command(self.host, self.port, flags, model)
            self.process = subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, **(env or {})})
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self):
        until = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                with open(self.log_path, encoding="utf-8", errors="replace") as log:
                    raise RuntimeError(f"the server did not start: {log.read()[-2000:]}")
            time.sleep(0.05)

    def _is_ready(self):
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.port}/ready", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self):
        self.process.kill()
        self.process.wait(STOP_SECONDS)
