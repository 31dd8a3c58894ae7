"""Runs vLLM's and llama.cpp's own server tests against Lockstep: `run.py BINARY SOURCES [SUITE ..] [--write]`.

SOURCES is what `sources.py` has fetched. Which files are run, and which of their tests do not count, stands in
`suites.toml`. Prints a table by file with what does not pass; --write writes it to `benches/results/peer_tests.md`.
Fails where a suite has not run at all.
"""

import collections
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "benches/results/peer_tests.md"
TEST_SECONDS = 90
SUITE_SECONDS = 1800
OUTCOMES = ["passed", "failed", "skipped"]
PASSED = ("passed", "")
WHY_CHARS = 160
ABOUT = """# vLLM's and llama.cpp's own server tests

`make peer-tests ARGS=--write`: the tests that ask a server over HTTP, against `lockstep serve smollm2`.
In llama.cpp's tables numbers of prompt tokens are counted anew by the tokenizer of that model, and the words of
llama.cpp's own model of stories are taken to be any words. Nothing else is changed.
Tests of a peer's insides are not counted.
"""

SUITES = {
    "vLLM": ("vllm", "vllm_server", []),
    "llama.cpp": ("llama.cpp/tools/server/tests", "llama_words", ["-m", "not slow"]),
}


def outcomes(name, files, sources, binary, model):
    """How each test of a suite ended, and why so if it did not pass."""
    folder, plugin, further = SUITES[name]
    folder = Path(sources, folder).resolve()
    with tempfile.TemporaryDirectory() as logs:
        told = Path(logs, "outcomes.jsonl")
        told.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(folder), os.environ.get("PYTHONPATH", "")]),
            "LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"),
            "PEER_BINARY": binary, "PEER_LOGS": logs, "PEER_MODEL": model, "PEER_OUTCOMES": str(told),
        }
        line = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", plugin, "-p", "outcomes"]
        line += ["-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull, f"--timeout={TEST_SECONDS}"]
        try:
            subprocess.run([*line, *further, *files], cwd=folder, env=environment, check=False, timeout=SUITE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {SUITE_SECONDS} s; what had ended is told", file=sys.stderr)
        ended = {}
        for report in map(json.loads, told.read_text(encoding="utf-8").splitlines()):
            # A test that failed at its end failed.
            if ended.get(report["test"], PASSED) == PASSED:
                ended[report["test"]] = (report["outcome"], report["why"])
    return ended


def left_out(suite, test):
    """Why a test does not count, if it does not."""
    fits = (why for pattern, why in suite["left_out"].items() if fnmatch.fnmatchcase(test, pattern))
    return next(fits, None)


def table(name, suite, ended):
    """Of each file how many tests pass, fail and are skipped; then what does not pass, and what the test says of it."""
    files, others = collections.defaultdict(collections.Counter), []
    for test, (outcome, why) in sorted(ended.items()):
        if left_out(suite, test):
            continue
        files[test.split("::")[0]][outcome] += 1
        if outcome != "passed":
            why = " ".join(why.split())[:WHY_CHARS].replace("|", "/").replace("`", "'")
            others.append((test.replace("|", "/"), outcome, why))
    sums = sum(files.values(), collections.Counter())
    heading = ", ".join(f"{sums[outcome]} {outcome}" for outcome in OUTCOMES)
    rows = [f"## {name}: {heading}", "", "| file | passed | failed | skipped |", "|---|---|---|---|"]
    rows += [f"| {file} | {' | '.join(str(of[outcome]) for outcome in OUTCOMES)} |" for file, of in files.items()]
    rows += ["", "| does not pass | how | because |", "|---|---|---|"]
    rows += [f"| `{test}` | {outcome} | {why} |" for test, outcome, why in others]
    rows += ["", "| does not count | because |", "|---|---|"]
    rows += [f"| `{pattern}` | {why} |" for pattern, why in suite["left_out"].items()]
    return "\n".join(rows) + "\n"


def main(binary, sources, *asked):
    suites = tomllib.loads((HERE / "suites.toml").read_text(encoding="utf-8"))
    names = [name for name in asked if name != "--write"] or list(SUITES)
    binary = str(Path(binary).resolve())
    model = subprocess.run([binary, "pull", "smollm2"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    all_ended = {name: outcomes(name, suites[name]["files"], sources, binary, model) for name in names}
    text = "\n".join([ABOUT, *(table(name, suites[name], ended) for name, ended in all_ended.items())])
    print(text)
    if "--write" in asked:
        TABLE.write_text(text, encoding="utf-8")
    sys.exit(0 if all(all_ended.values()) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
