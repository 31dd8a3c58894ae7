"""The engines that the benchmark compares: how to build and start each, and the speed that it reports for a test. All
serve the same file with the same number of threads. Independent of rounds.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import quiet

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "peers"))
import sources  # noqa: E402

# The name, the package with the engine's source, its version, and options of its server.
LLAMA = ("llama.cpp", "llama-cpp-python", "0.3.36", ["--no-webui"])
IK_LLAMA = ("ik_llama.cpp", "ik-llama-cpp-python", "0.1.5", [])
# Building the second takes an hour on two cores: its kernels are templates.
LLAMAS = [LLAMA, IK_LLAMA]
OPENVINO = "OpenVINO GenAI"
# The second package has the library that the first links to.
OPENVINO_PACKAGES = ["openvino-genai==2026.4.0.0", "openvino==2026.4.0"]
# It cannot unpack other formats, nor the tensors of five bits that `Q4_K_M` has here.
OPENVINO_FORMATS = ["Q4_0", "Q4_1", "Q8_0"]
# It unpacks the file into memory, beside two Lockstep servers.
OPENVINO_BYTES_MAX = 3e9
PEERS = [*(name for name, *_ in LLAMAS), OPENVINO]
LLAMA_OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
                 "-DBUILD_SHARED_LIBS=OFF", "-DGGML_CCACHE=OFF"]
LLAMA_PROGRAMS = ["llama-bench", "llama-server", "llama-quantize"]
PACKAGES = ["cmake", "ninja", "gguf", "numpy"]
REQUEST_S = 1800
# The context of the smallest model that is measured.
CONTEXT = 8192
# The token ids of all prompts: every tokenizer here has them, and none ends a sequence.
FIRST_TOKEN, N_TOKENS = 1000, 20000


def packages(folder):
    """Installs the packages that build engines and write models into a folder, and makes it importable."""
    place = installed(folder / "packages", PACKAGES)
    sys.path.insert(0, str(place))
    return place


def installed(place, packages):
    if not place.is_dir():
        part = place.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        run([sys.executable, "-m", "pip", "install", "--quiet", "--target", part, *packages])
        part.rename(place)
    return place


def llama_programs(folder, name, package, version):
    """Builds llama.cpp or a fork for this machine from the source in the package of its Python binding."""
    source = folder / name
    programs = source / "build" / "bin"
    if not all((programs / program).exists() for program in LLAMA_PROGRAMS):
        shutil.rmtree(source, ignore_errors=True)
        archive = sources.fetched(package, version, folder)
        sources.unpack(archive, {f"vendor/{name}": name}, folder)
        archive.unlink()
        place = packages(folder)
        environment = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(place)}
        run(["cmake", "-B", "build", "-G", "Ninja", *LLAMA_OPTIONS], cwd=source, env=environment)
        run(["ninja", "-C", "build", *LLAMA_PROGRAMS], cwd=source, env=environment)
    return programs


def run(command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def tokens(n, seed):
    """Returns a prompt of n tokens that shares no prefix with one of another seed."""
    return [FIRST_TOKEN + (seed * 7919 + i * 31) % N_TOKENS for i in range(n)]


def peer(name, folder, threads):
    """Returns the engine of this name, and installs or builds it if it is missing."""
    if name == OPENVINO:
        return OpenVino(folder, threads)
    return LlamaCpp(folder, threads, *next(one for one in LLAMAS if one[0] == name))


class Lockstep:
    """A server that runs while its model is measured; each test is a request or a load."""

    serves = True

    def __init__(self, name, binary, threads):
        self.name, self.binary, self.threads = name, binary, threads
        version = run([binary, "--version"]).split()[-1]
        self.version, self.commit, self.n_prompts = version, commit(), 0

    def open_alone(self, model, context):
        return self.open(model, context, 1)

    def open(self, model, context, _clients):
        port = quiet.free_port()
        return quiet.Server([[
            self.binary, "serve", model, "--http", f"{quiet.LOOPBACK}:{port}", "--grpc",
            f"{quiet.LOOPBACK}:{quiet.free_port()}", "--threads", self.threads, "--context", context,
        ]], port, "/ready")

    def supports(self, _model, _kind, _test):
        return True

    def complete(self, server, prompt, n_predict, cached):
        body = {"prompt": prompt, "n_predict": n_predict, "cache_prompt": cached, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(f"{server.url}/completion", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            return json.load(answer)["timings"]

    def speed(self, server, test):
        """Returns the tokens per second of a test, as `/completion` reports them."""
        kind, n, depth = parsed(test)
        self.n_prompts += 1
        before = tokens(depth, self.n_prompts)
        if depth:
            self.complete(server, before, 1, True)
        if kind == "decode":
            return self.complete(server, before or tokens(8, self.n_prompts), n, True)["predicted_per_second"]
        timings = self.complete(server, before + tokens(n, self.n_prompts + 5000), 1, True)
        if not n <= timings["prompt_n"] <= n + 64:
            sys.exit(f"{test}: {timings['prompt_n']} tokens were computed")
        return timings["prompt_per_second"]

    def load(self, server, clients, requests, seed):
        return quiet.load(self.binary, server.url, clients, requests, "128", "64", seed)


class LlamaCpp:
    """llama.cpp or a fork: `llama-bench` for single tests, `llama-server` for loads."""

    serves = True

    def __init__(self, folder, threads, name, package, version, options):
        self.name, self.threads, self.options = name, threads, options
        self.programs = llama_programs(folder, name, package, version)
        # The source of a package does not name its commit.
        self.version, self.commit = f"({package} {version})", ""
        self.has_depth = "--n-depth" in run([self.programs / "llama-bench", "--help"])

    def open_alone(self, model, _context):
        return contextlib.nullcontext(model)

    def open(self, model, context, clients):
        port = quiet.free_port()
        return quiet.Server([[
            self.programs / "llama-server", "-m", model, "--host", quiet.LOOPBACK, "--port", port, "-t", self.threads,
            "-np", clients, "-c", context * clients, *self.options,
        ]], port)

    def supports(self, _model, _kind, test):
        return self.has_depth or parsed(test)[2] == 0

    def speed(self, model, test):
        """Returns the tokens per second of a test."""
        kind, n, depth = parsed(test)
        counts = ["-p", n, "-n", 0] if kind == "prefill" else ["-p", 0, "-n", n]
        depth_flags = ["-d", depth] if depth else []
        out = run([self.programs / "llama-bench", "-m", model, "-t", self.threads, *counts, *depth_flags, "-r", 1, "-o",
                   "json"])
        return json.loads(out)[0]["avg_ts"]


class OpenVino:
    """OpenVINO GenAI with its defaults. Its package has no server, and no prefill after a context."""

    serves = False

    def __init__(self, folder, threads):
        self.name, self.threads, self.n_prompts = OPENVINO, threads, 0
        self.packages = installed(folder / "openvino", OPENVINO_PACKAGES)
        self.version, self.commit = OPENVINO_PACKAGES[0].partition("==")[2], ""

    @contextlib.contextmanager
    def open_alone(self, model, _context):
        command = [sys.executable, ROOT / "benches" / "openvino_steps.py", model, self.threads]
        environment = {**os.environ, "PYTHONPATH": str(self.packages)}
        with subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              env=environment) as process:
            try:
                answer(process)
                yield process
            finally:
                process.stdin.close()

    def supports(self, model, kind, test):
        what, _, depth = parsed(test)
        is_small = Path(model).stat().st_size <= OPENVINO_BYTES_MAX
        return kind in OPENVINO_FORMATS and is_small and (what == "decode" or depth == 0)

    def speed(self, process, test):
        """Returns the tokens per second of a test."""
        kind, n, depth = parsed(test)
        self.n_prompts += 1
        prompt, n_predict = (n, 1) if kind == "prefill" else (depth or 8, n + 1)
        print(json.dumps({"tokens": tokens(prompt, self.n_prompts), "n_predict": n_predict}), file=process.stdin,
              flush=True)
        times = answer(process)
        return 1000 * n / times["ttft_ms"] if kind == "prefill" else 1000 / times["tpot_ms"]


def answer(process):
    line = process.stdout.readline()
    return json.loads(line) if line else sys.exit(f"{process.args} ended with {process.wait()}")


def parsed(test):
    """Returns (kind, tokens, positions before them): `decode-128`, `prefill-at-4096`, `decode-32-at-0`."""
    kind, _, rest = test.partition("-")
    if rest.startswith("at-"):
        depth = int(rest.removeprefix("at-"))
        return kind, min(512, CONTEXT - depth - 64) if kind == "prefill" else 64, depth
    return kind, int(rest), 0


def commit():
    """Returns the last commit that changed code, with a plus if code has changed since."""
    code = ["--", "*.rs", "*.toml", "*.lock", "*.cu", "*.cuh"]

    def git(*words):
        done = subprocess.run(["git", *words, *code], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""
    last = git("log", "-1", "--format=%h", "--abbrev=8")
    return last + ("+" if git("status", "--porcelain") else "") if last else "unknown"
