"""Runs vLLM's and llama.cpp's own server tests against Lockstep: `run.py BINARY SOURCES [SUITE ..] [--write]`.

The suite "vLLM pooling" also needs PEER_STAND_INS, the folder that `stand_ins.py` has filled, and has its own table.

SOURCES is the folder that `sources.py` has filled. `suites.toml` lists the files to run, the tests that do not count,
and the known failures with their reasons. Prints a table by file; --write writes it to `benches/results/peer_tests.md`.
Fails in each of these cases: a test fails that is not listed; a test passes that is listed as failing; an entry of the
list matches nothing; a file that calls a server is neither run nor listed; a suite does not run to its end.
--write replaces the sections of the suites that ran, and keeps the others. Each section names its commit.
"""

import collections
import datetime
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benches"))
import quiet  # noqa: E402

TABLE = HERE.parents[1] / "benches/results/peer_tests.md"
POOLING_TABLE = TABLE.with_name("peer_tests_pooling.md")
# What the section of a suite begins with.
HEADING = "## "
# One test decodes two answers without a limit, each up to the end of the context.
TEST_SECONDS = 600
SUITE_SECONDS = 5400
# A test with the outcome `no server` calls none: it tests a part of the peer's own process.
OUTCOMES = ["passed", "failed", "skipped", "left out", "no server"]
# The kinds of tests that are left out: those outside of the set, and those of features that only the peer has.
LEFT_OUT = {"needs": "other requirements", "not_served": "not served"}
PASSED = ("passed", "")
ABOUT = """# vLLM's and llama.cpp's own server tests

`make peer-tests ARGS=--write` runs the tests that call a server over HTTP, against `lockstep serve smollm2`.
The set: tests that need one small model and no images. `tests/peers/suites.toml` lists the tests that are left out,
and those that fail, with a reason for each. A run with any other result fails. The heading's share of a suite counts
the tests of features that are not served as failures. The share after it leaves them out.

In llama.cpp's tests the counts of prompt tokens and batches are recomputed with the tokenizer of the served model.
Patterns for the words of llama.cpp's own story model match any words. Flags that are request fields here are sent in
each request. A context longer than the model's becomes the model's. Header names are case-insensitive. A flag of a
peer's server that has no meaning here fails its test, unless `tests/peers` lists why it changes nothing. Nothing else
is changed. Tests of a peer's internals do not count.
"""

ABOUT_POOLING = """# vLLM's own tests of models that embed, classify and score

`make peer-tests-pooling ARGS=--write` runs the tests that call a server over HTTP with texts. A stand-in serves for
each of their models: all-MiniLM-L6 for the embedding models, its weights with a random head for the ranker, and a
small random Qwen2 for the classifier. Their reference is sentence-transformers with the same stand-in.
`tests/peers/suites.toml` lists the tests that are left out, and those that fail, with a reason for each. A run with any
other result fails.
"""

SUITES = {
    "vLLM": ("vllm", "vllm_server", []),
    "llama.cpp": ("llama.cpp/tools/server/tests", "llama_words", ["-m", "not slow"]),
    "vLLM pooling": ("vllm", "vllm_pooling", []),
}
# The last one runs alone: it requires torch, and stand-ins for several models.
WITH_SMOLLM2 = ["vLLM", "llama.cpp"]


def folder(sources, name):
    return Path(sources, SUITES[name][0]).resolve()


def outcomes(name, suite, sources, binary, model):
    """Returns how each test of a suite ended, and the reason if it did not pass. None if the suite did not end."""
    _, plugin, further = SUITES[name]
    cwd = folder(sources, name)
    with tempfile.TemporaryDirectory() as logs:
        path = Path(logs, "outcomes.jsonl")
        path.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(cwd), os.environ.get("PYTHONPATH", "")]),
            "LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"),
            "PEER_BINARY": binary, "PEER_LOGS": logs, "PEER_MODEL": model, "PEER_OUTCOMES": str(path),
            "PEER_LEFT_OUT": json.dumps([pattern for kind in LEFT_OUT for pattern in suite[kind]]),
            "PEER_TEMPLATES": str(Path(sources, "llama.cpp/models/templates").resolve()),
        }
        line = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "outcomes", "-p", plugin]
        line += ["-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull, f"--timeout={TEST_SECONDS}"]
        line += ["--continue-on-collection-errors"]
        line += [*further, *suite["files"]]
        try:
            subprocess.run(line, cwd=cwd, env=environment, check=False, timeout=SUITE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {SUITE_SECONDS} s", file=sys.stderr)
            return None
        ended = {}
        for report in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            # A test with a failure in its teardown failed.
            if ended.get(report["test"], PASSED) == PASSED:
                ended[report["test"]] = (report["outcome"], report["why"])
    return ended


def fits(patterns, test):
    """Returns the first pattern that a test's name matches. Brackets are literal: they hold a test's parameters."""
    literal = (pattern for pattern in patterns if fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")))
    return next(literal, None)


def surprises(suite, ended):
    """Returns the tests with an outcome that differs from the list."""
    unused = {pattern for kind in ["fails", *LEFT_OUT] for pattern in suite[kind]}
    found = []
    for test, (outcome, why) in sorted(ended.items()):
        listed = left_out(suite) if outcome == "left out" else suite["fails"]
        pattern = fits(listed, test)
        unused.discard(pattern)
        if outcome == "failed" and pattern is None:
            found.append(f"fails, and is not listed: {test}: {' '.join(why.split())}")
        elif outcome == "passed" and pattern is not None:
            found.append(f"passes, and is listed as failing: {test}: {listed[pattern]}")
    return found + [f"matches no test: {pattern}" for pattern in sorted(unused)]


def left_out(suite):
    return {pattern: why for kind in LEFT_OUT for pattern, why in suite[kind].items()}


def unlisted(folder, suite):
    """Returns test files that call a server and are neither run nor listed."""
    calls_server = re.compile(suite["calls_server"])
    files = sorted(Path(folder).glob(suite["among"]))
    callers = [str(file.relative_to(folder)) for file in files if calls_server.search(file.read_text(encoding="utf-8"))]
    return [file for file in callers if file not in suite["files"] and fits(suite["other_files"], file) is None]


def table(name, suite, ended):
    """Returns for each file how many tests pass, fail and are skipped; then the failures and the tests left out, and
    why."""
    files = collections.defaultdict(collections.Counter)
    for test, (outcome, _) in sorted(ended.items()):
        files[test.split("::")[0]][outcome] += 1
    sums = sum(files.values(), collections.Counter())
    by_kind = {kind: counted(suite[kind], ended, "left out") for kind in LEFT_OUT}
    n_passed, n_counted = sums["passed"], sums["passed"] + sums["failed"]
    n_with_not_served = n_counted + sum(by_kind["not_served"].values())
    rows = [f"{HEADING}{name}: {share(n_passed, n_with_not_served)}", ""]
    rows += [f"Without the tests of features that are not served: {share(n_passed, n_counted)}.", ""]
    rows += [f"Commit {quiet.commit()}, {datetime.date.today().isoformat()}.", ""]
    rows += [f"| file | {' | '.join(OUTCOMES)} |", "|---" * (1 + len(OUTCOMES)) + "|"]
    rows += [f"| {file} | {' | '.join(str(of[outcome]) for outcome in OUTCOMES)} |" for file, of in files.items()]
    rows += reasons("fails", suite["fails"], counted(suite["fails"], ended, "failed"))
    for kind, title in LEFT_OUT.items():
        rows += reasons(f"left out: {title}", suite[kind], by_kind[kind])
    rows += ["", "| files not run | because |", "|---|---|"]
    rows += [f"| `{pattern}` | {why} |" for pattern, why in suite["other_files"].items()]
    return "\n".join(rows) + "\n"


def with_sections(path, about, sections):
    """Returns the text of a table's file with these sections, by suite; a suite that has not run keeps its section."""
    _, *old = ("\n" + (path.read_text(encoding="utf-8") if path.exists() else "")).split("\n" + HEADING)
    kept = {section.split(":")[0]: HEADING + section.rstrip("\n") + "\n" for section in old}
    both = {**kept, **sections}
    return "\n".join([about, *(both[name] for name in SUITES if name in both)])


def counted(patterns, ended, counted_outcome):
    """Counts the tests with this outcome for each pattern. A test without a pattern counts as not known."""
    all_fitting = [fits(patterns, test) for test, (outcome, _) in sorted(ended.items()) if outcome == counted_outcome]
    return collections.Counter(one for one in all_fitting if one is not None or counted_outcome == "failed")


def share(n, of):
    return f"{n} of {of} pass ({100 * n / max(of, 1):.1f}%)"


def reasons(title, patterns, numbers):
    rows = ["", f"| {title} | tests | because |", "|---|---|---|"]
    return rows + [f"| `{pattern}` | {n} | {patterns.get(pattern, 'not known')} |" for pattern, n in numbers.items()]


def main(binary, sources, *arguments):
    suites = tomllib.loads((HERE / "suites.toml").read_text(encoding="utf-8"))
    names = [name for name in arguments if name != "--write"] or WITH_SMOLLM2
    binary = str(Path(binary).resolve())
    model = subprocess.run([binary, "pull", "smollm2"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    all_ended = {name: outcomes(name, suites[name], sources, binary, model) for name in names}
    if not all(all_ended.values()):
        sys.exit("a suite did not run to its end")
    about, path = (ABOUT_POOLING, POOLING_TABLE) if names == ["vLLM pooling"] else (ABOUT, TABLE)
    sections = {name: table(name, suites[name], ended) for name, ended in all_ended.items()}
    print("\n".join(sections.values()))
    if "--write" in arguments:
        path.write_text(with_sections(path, about, sections), encoding="utf-8")
    found = [line for name, ended in all_ended.items() for line in surprises(suites[name], ended)]
    for name in names:
        files = unlisted(folder(sources, name), suites[name])
        found += [f"calls a server, and is not listed: {file}" for file in files]
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
