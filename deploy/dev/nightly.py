"""Runs what takes too long for each change, part by part, and writes benches/results/nightly.md.

    nightly.py [--continue] [PART ..]    all parts without a name

Each part is a target of the Makefile with a time limit. A part that takes longer is ended and has failed. Its output is
in target/nightly/PART.log. The table keeps the last run of each part with its commit, so parts may run at different
times; with --continue, parts that passed at this commit are not run again. Fails if a part of this run failed.
"""

import dataclasses
import datetime
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches"))
import quiet  # noqa: E402

LOGS = ROOT / "target/nightly"
TABLE = ROOT / "benches/results/nightly.md"
SERVER = ROOT / "target/release/lockstep"
TESTS = r"test result: .*?(\d+ passed; \d+ failed)"
PYTHON_TESTS = r"(\d+ passed, \d+ failed)"


@dataclasses.dataclass(frozen=True)
class Part:
    """One target: its limit in minutes, and a pattern for its figure, of which the last match counts."""

    name: str
    minutes: int
    figure: str
    arguments: tuple = ()
    # Flags of a server that runs meanwhile; the target gets its ADDRESS. None for a target without one.
    server: tuple | None = None

    def command(self, address):
        words = ["make", self.name, *self.arguments]
        return words if address is None else [*words, f"ADDRESS={address}"]


PARTS = [
    Part("clients-more", 40, PYTHON_TESTS),
    Part("page", 30, PYTHON_TESTS),
    Part("peer-tests", 60, r"## (.+: .+ pass .*)", ("ARGS=--write",)),
    Part("peer-tests-pooling", 40, r"## (.+: .+ pass .*)", ("ARGS=--write",)),
    Part("hosts", 20, TESTS),
    Part("trees", 30, TESTS),
    Part("flips", 60, TESTS),
    Part("grids", 90, r"(\d+ runs, \d+ tokens)"),
    Part("fuzz", 40, r"(.+: \d+ rounds)"),
    Part("soak", 240, r"(\d+ seeds from 0 on)", ("SEEDS=100000",)),
    Part("grammar-suite", 30, r"(\d+ of \d+.*|.*\d+ cases.*)"),
    Part("grammar-schemas", 20, r"(of \d+: .*)", server=()),
    Part("grammar-speed", 20, r"(median .*)", server=()),
    Part("bfcl", 90, r"(parallel_multiple: .*)", server=()),
    Part("hostile-tools", 20, r"(p99 of gaps .*)"),
    Part("hostile", 30, r"it is (.* times as long)"),
    Part("overload", 15, r"(it is \d+%, .*?impatient clients\. Refusals .*?impatient clients)"),
    Part("bench-tenants", 15, r"(\| beside a tenant at 50 .*)"),
    Part("chaos", 60, TESTS),
    Part("soak-hour", 90, r"(\d+ false alarms)"),
]


COLUMNS = ["outcome", "seconds", "limit", "commit", "date", "processor", "figure"]


class Run:
    """The rows of the table by target, written after each part."""

    def __init__(self):
        text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
        found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
                 if line.startswith("| `")]
        self.rows = {cells[0].strip("`"): dict(zip(COLUMNS, cells[1:])) for cells in found if cells[1] != "not run"}

    def has_passed(self, part, at):
        row = self.rows.get(part.name, {})
        return row.get("outcome") == "passed" and row.get("commit") == at

    def add(self, part, row):
        self.rows[part.name] = row
        TABLE.write_text(table(self.rows), encoding="utf-8")


def table(rows):
    lines = [
        "# What runs each night",
        "",
        "`make nightly` runs each of these targets within its limit, and writes this table. A part with a result file",
        "in this folder writes it too.",
        "",
        "| target | outcome | seconds | limit | commit | date | processor | figure |",
        "|---|---|---:|---:|---|---|---|---|",
    ]
    for part in PARTS:
        row = rows.get(part.name, {"outcome": "not run", "limit": str(60 * part.minutes)})
        lines.append(f"| `{part.name}` | {' | '.join(row.get(column, '') for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if pathlib.Path("/proc/cpuinfo").exists() else []
    values = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line}
    family = f"family {values['cpu family']}, model {values['model']}" if "cpu family" in values else ""
    return f"{os.cpu_count()} x {values.get('model name', platform.machine())} ({family})"


def run_target(part, address):
    """Returns whether the target ended in time and with success."""
    with open(LOGS / f"{part.name}.log", "w", encoding="utf-8") as log:
        command = part.command(address)
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            return "passed" if process.wait(60 * part.minutes) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "too long"


def figure(part):
    text = (LOGS / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
    found = re.findall(part.figure, text)
    return " ".join(found[-1].replace("|", ",").split()).strip(" ,") if found else ""


def run_part(part, run):
    began, at = time.monotonic(), quiet.commit()
    if part.server is None:
        outcome = run_target(part, None)
    else:
        port, grpc = quiet.free_port(), quiet.free_port()
        http = f"{quiet.LOOPBACK}:{port}"
        command = [SERVER, "serve", "smollm2", "--http", http, "--grpc", f"{quiet.LOOPBACK}:{grpc}", *part.server]
        with quiet.Server([command], port, "/ready"):
            outcome = run_target(part, http)
    shown = figure(part)
    # A target that shows no figure has not done its work.
    if outcome == "passed" and not shown:
        outcome = "without its figure"
    seconds = round(time.monotonic() - began)
    run.add(part, {
        "outcome": outcome, "seconds": str(seconds), "limit": str(60 * part.minutes), "commit": at,
        "date": datetime.date.today().isoformat(), "processor": processor(), "figure": shown,
    })
    print(f"{part.name}: {outcome}, {seconds} s: {shown}", flush=True)
    return outcome == "passed"


def selected(names):
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or part.name in names]


def main(*arguments):
    parts = selected([name for name in arguments if not name.startswith("--")])
    LOGS.mkdir(parents=True, exist_ok=True)
    run = Run()
    if "--continue" in arguments:
        parts = [part for part in parts if not run.has_passed(part, quiet.commit())]
    outcomes = [run_part(part, run) for part in parts]
    sys.exit(0 if all(outcomes) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
