"""Helpers of the measuring scripts: servers that start and end, load by `lockstep bench`, and windows without foreign
load on the machine. Independent of what is compared.

Every measured process is a child of the script, so the CPU time of the script's process tree is "ours". CPU time
beyond that is foreign. A window with too much of it is dropped and repeated.
"""

import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

TICKS = os.sysconf("SC_CLK_TCK")
CORES = os.cpu_count()
READY_S = 180
STOP_S = 20
RUN_S = 1800
LOOPBACK = "127.0.0.1"


def machine():
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    return f"{model}, {CORES} cores, kernel {platform.release()}"


def commit():
    """Returns the commit of this tree, with a plus sign if something but results differs from it."""
    def git(*words):
        here = os.path.dirname(os.path.abspath(__file__))
        return subprocess.run(["git", "-C", here, *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)benches/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def free_port():
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


class Watch:
    """Measures how many cores other processes use from now on."""

    def __init__(self):
        self.began, self.busy, self.own = time.monotonic(), busy_seconds(), own_seconds()

    def foreign_cores(self):
        took = time.monotonic() - self.began
        return max(0.0, (busy_seconds() - self.busy - (own_seconds() - self.own)) / took)


def busy_seconds():
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def own_seconds():
    """Returns the CPU time of this process and its descendants, including those that have ended."""
    parents, spent = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(name)], spent[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(spent.get(pid, 0) for pid in ours) / TICKS


class Server:
    """The processes of one server; leaving the block ends them."""

    def __init__(self, commands, port, ready="/health"):
        self.url, self.ready = f"http://{LOOPBACK}:{port}", ready
        self.log = tempfile.TemporaryFile()
        self.processes = []
        for command in commands:
            command = [str(part) for part in command]
            self.processes.append(subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True))

    def __enter__(self):
        deadline = time.monotonic() + READY_S
        while not self.answers():
            gone = [process for process in self.processes if process.poll() is not None]
            if gone or time.monotonic() > deadline:
                self.__exit__()
                self.log.seek(0)
                sys.exit(f"{gone[0].args if gone else self.url} is not ready:\n{self.log.read()[-4000:].decode()}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def answers(self):
        try:
            self.get(self.ready)
            return True
        except (OSError, urllib.error.URLError):
            return False

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=5) as response:
            return response.read().decode()


def load(lockstep, url, concurrency, requests, prompt, output, seed):
    """Runs `lockstep bench` once and returns its figures."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [lockstep, "bench", "--url", url, "--concurrency", concurrency, "--requests", requests,
                   "--warm-up", 1, "--prompt", prompt, "--output", output, "--seed", seed, "--json", file.name]
        done = subprocess.run([str(part) for part in command], capture_output=True, timeout=RUN_S)
        if done.returncode != 0:
            sys.exit(f"{command} failed:\n{done.stderr.decode()[-2000:]}")
        return json.load(file)["runs"][0]


def quietly(measure, foreign_max, tries=5):
    """Returns the result of `measure` in a quiet window and its foreign load; None and the load if none was quiet."""
    foreign = []
    for _ in range(tries):
        watch = Watch()
        figures = measure()
        foreign.append(watch.foreign_cores())
        if foreign[-1] <= foreign_max:
            return figures, foreign[-1]
        print(f"  dropped: other processes used {foreign[-1]:.2f} cores", file=sys.stderr, flush=True)
    return None, min(foreign)


def spread(values, digits=1):
    """Returns median and range as text."""
    if not values:
        return "no quiet window"
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most}, n={len(values)})"
