"""Runs vLLM's and llama.cpp's own server tests against Lockstep: `run.py BINARY SOURCES [SUITE ..] [--write]`.

SOURCES is what `sources.py` has fetched. Which files are run, which of their tests do not count, and which fail for a
known reason stands in `suites.toml`. Prints a table by file; --write writes it to `benches/results/peer_tests.md`.
Fails where a test fails that is not listed, where one passes that is listed as failing, where nothing fits an entry of
the list, and where a suite has not run to its end.
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
ABOUT = """# vLLM's and llama.cpp's own server tests

`make peer-tests ARGS=--write`: the tests that ask a server over HTTP, against `lockstep serve smollm2`.
In llama.cpp's tables numbers of prompt tokens are counted anew by the tokenizer of that model, and the words of
llama.cpp's own model of stories are taken to be any words. Nothing else is changed.
Tests of a peer's insides are not counted. What fails is listed with its reason in `tests/peers/suites.toml`; a run
that ends otherwise than listed fails.
"""

SUITES = {
    "vLLM": ("vllm", "vllm_server", []),
    "llama.cpp": ("llama.cpp/tools/server/tests", "llama_words", ["-m", "not slow"]),
}


def outcomes(name, suite, sources, binary, model):
    """How each test of a suite ended, and why so if it did not pass. None if the suite did not end."""
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
            "PEER_LEFT_OUT": json.dumps(list(suite["left_out"])),
            "PEER_TEMPLATES": str(Path(sources, "llama.cpp/models/templates").resolve()),
        }
        line = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", plugin, "-p", "outcomes"]
        line += ["-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull, f"--timeout={TEST_SECONDS}"]
        line += ["--continue-on-collection-errors"]
        line += [*further, *suite["files"]]
        try:
            subprocess.run(line, cwd=folder, env=environment, check=False, timeout=SUITE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {SUITE_SECONDS} s", file=sys.stderr)
            return None
        ended = {}
        for report in map(json.loads, told.read_text(encoding="utf-8").splitlines()):
            # A test that failed at its end failed.
            if ended.get(report["test"], PASSED) == PASSED:
                ended[report["test"]] = (report["outcome"], report["why"])
    return ended


def fits(patterns, test):
    """The first pattern that a test's name fits. Brackets stand for themselves: they hold a test's parameters."""
    literal = (pattern for pattern in patterns if fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")))
    return next(literal, None)


def surprises(suite, ended):
    """What did not end as the list says."""
    listed = suite["fails"]
    unused, all_told = set(listed), []
    for test, (outcome, why) in sorted(ended.items()):
        pattern = fits(listed, test)
        unused.discard(pattern)
        if outcome == "failed" and pattern is None:
            all_told.append(f"fails, and is not listed: {test}: {' '.join(why.split())}")
        elif outcome == "passed" and pattern is not None:
            all_told.append(f"passes, and is listed as failing: {test}: {listed[pattern]}")
    return all_told + [f"fits no test: {pattern}" for pattern in sorted(unused)]


def table(name, suite, ended):
    """Of each file how many tests pass, fail and are skipped; then what fails and what does not count, and why."""
    files, failing = collections.defaultdict(collections.Counter), collections.Counter()
    for test, (outcome, _) in sorted(ended.items()):
        files[test.split("::")[0]][outcome] += 1
        if outcome == "failed":
            failing[fits(suite["fails"], test)] += 1
    sums = sum(files.values(), collections.Counter())
    n_counted = sums["passed"] + sums["failed"]
    share = f"{100 * sums['passed'] / max(n_counted, 1):.1f}%"
    rows = [f"## {name}: {sums['passed']} of {n_counted} pass ({share})", ""]
    rows += ["| file | passed | failed | skipped |", "|---|---|---|---|"]
    rows += [f"| {file} | {' | '.join(str(of[outcome]) for outcome in OUTCOMES)} |" for file, of in files.items()]
    rows += ["", "| fails | tests | because |", "|---|---|---|"]
    rows += [f"| `{pattern}` | {n} | {suite['fails'].get(pattern, 'not known')} |" for pattern, n in failing.items()]
    rows += ["", "| does not count | because |", "|---|---|"]
    rows += [f"| `{pattern}` | {why} |" for pattern, why in suite["left_out"].items()]
    return "\n".join(rows) + "\n"


def main(binary, sources, *asked):
    suites = tomllib.loads((HERE / "suites.toml").read_text(encoding="utf-8"))
    names = [name for name in asked if name != "--write"] or list(SUITES)
    binary = str(Path(binary).resolve())
    model = subprocess.run([binary, "pull", "smollm2"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    all_ended = {name: outcomes(name, suites[name], sources, binary, model) for name in names}
    if not all(all_ended.values()):
        sys.exit("a suite has not run to its end")
    text = "\n".join([ABOUT, *(table(name, suites[name], ended) for name, ended in all_ended.items())])
    print(text)
    if "--write" in asked:
        TABLE.write_text(text, encoding="utf-8")
    told = [line for name, ended in all_ended.items() for line in surprises(suites[name], ended)]
    print("\n".join(told), file=sys.stderr)
    sys.exit(1 if told else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
