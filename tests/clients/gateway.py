"""The gateway `smg`, unmodified, in front of a server's gRPC address: its process and its two addresses."""

import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from server import free_ports, post

READY_MAX_S = 120
STOP_MAX_S = 60


class Gateway:
    """Gets model, context and tokenizer from the server alone."""

    def __init__(self, server, *flags):
        port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.log = tempfile.NamedTemporaryFile(prefix="smg-", suffix=".log")
        command = [sys.executable, "-m", "smg.launch_router", "--worker-urls", f"grpc://{server.grpc}"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), *flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            self.print_log()
            raise

    def wait_until_ready(self):
        """Waits for an answer: the gateway reports itself ready before it has the tokenizer."""
        deadline = time.monotonic() + READY_MAX_S
        while not self.answers():
            assert self.process.poll() is None, f"the gateway ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"the gateway was not ready within {READY_MAX_S} s"
            time.sleep(0.2)

    def answers(self):
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        try:
            return post(f"{self.url}/v1/chat/completions", body)[0] == 200
        except (OSError, ValueError):
            return False

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return reply.status, reply.read().decode()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=STOP_MAX_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.log.close()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def print_log(self):
        with open(self.log.name, errors="replace") as log:
            lines = log.read().splitlines()[-200:]
        print(f"--- the log of the gateway, pid {self.process.pid}", *lines, "---", sep="\n", flush=True)
