"""Measures how much of its speed a model keeps when it is split over processes.

Compares tensor and pipeline parallelism, over shared memory and TCP, with one process with as many threads. Runs
interleaved rounds, and reports median, range, and the parts of a step's time.

    python grids.py LOCKSTEP MODEL [--rounds N] [--out FILE]
"""

import argparse
import json
import statistics
import sys
import threading
from pathlib import Path

import quiet

ONE, TP, PP, TP_TCP, PP_TCP = "1 process x 2 threads", "tp=2 shm", "pp=2 shm", "tp=2 tcp", "pp=2 tcp"
GRIDS = {ONE: (1, 1, "shm"), TP: (2, 1, "shm"), PP: (1, 2, "shm"), TP_TCP: (2, 1, "tcp"), PP_TCP: (1, 2, "tcp")}
# The requests for each: grid, number of concurrent requests.
RUNS = [(ONE, 1), (TP, 1), (TP_TCP, 1), (PP, 1), (PP_TCP, 1), (ONE, 8), (TP, 8), (PP, 16)]
KEPT = [("tp=2 over shm, batch 1", (TP, 1), (ONE, 1)), ("tp=2 over shm, batch 8", (TP, 8), (ONE, 8)),
        ("pp=2 over shm, 16 sequences, against batch 8", (PP, 16), (ONE, 8))]
KEPT_MIN, TCP_MAX_MICROS = 0.90, 45
CORES = 2
# The coordinator samples the timings of its ranks once a second.
SAMPLE_S = 1.0


def main():
    arguments = parse()
    figures = {}
    for i in range(arguments.rounds):
        runs = [key for key in RUNS if key[1] == 1 or not arguments.only_alone]
        for grid, n_at_once in runs if i % 2 == 0 else runs[::-1]:
            run(arguments, figures, grid, n_at_once, i)
    text = report(arguments, figures)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lockstep", type=Path)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30, help="the model's layers: a step has two sums in each")
    parser.add_argument("--requests", type=int, default=2, help="requests for each concurrent client")
    parser.add_argument("--output", default="128")
    parser.add_argument("--only-alone", action="store_true", help="measure single sequences only, no batches")
    parser.add_argument("--foreign-max", type=float, default=0.1, help="cores that other processes may use in a window")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def server(arguments, grid):
    tp, pp, wire = GRIDS[grid]
    http, grpc = quiet.free_port(), quiet.free_port()
    outside = ["--http", f"{quiet.LOOPBACK}:{http}", "--grpc", f"{quiet.LOOPBACK}:{grpc}"]
    cut = ["--tp", tp, "--pp", pp, "--wire", wire, "--threads", CORES // (tp * pp)]
    return quiet.Server([[arguments.lockstep, "serve", arguments.model, *cut, *outside]], http, "/ready")


def run(arguments, figures, grid, n_at_once, seed):
    with server(arguments, grid) as one:
        def measure():
            with StepSamples(one) as samples:
                measured = quiet.load(arguments.lockstep, one.url, n_at_once, arguments.requests * n_at_once, "16",
                                      arguments.output, seed)
            # Each concurrent request makes a token in the time that one request waits for its next token.
            speed = n_at_once * 1000 / measured["per_token_ms"]["mean"]
            return {"tokens_per_s": speed, "parts": samples.parts()}
        measured, foreign = quiet.quietly(measure, arguments.foreign_max)
    print(f"round {seed}, {grid}, {n_at_once} at once: "
          + (f"{measured['tokens_per_s']:.1f} tokens/s" if measured else "no quiet window")
          + f", other processes {foreign:.2f} cores", file=sys.stderr, flush=True)
    if measured:
        figures.setdefault((grid, n_at_once), {})[seed] = measured


class StepSamples:
    """Reads the ranks' steps from `/cluster` once a second while the block runs."""

    def __init__(self, one):
        self.one, self.seen, self.stopped = one, [], threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()

    def sample(self):
        while not self.stopped.wait(SAMPLE_S):
            for replica in json.loads(self.one.get("/cluster"))["replicas"]:
                self.seen += [rank["step_micros"] for rank in replica["ranks"]]

    def parts(self):
        """Returns for each part on the page the microseconds of a rank in a step: the mean over steps and ranks."""
        n_steps = sum(step["steps"] for step in self.seen)
        names = {name for step in self.seen for name in step if name != "steps"}
        if n_steps == 0:
            return {}
        return {name: sum(step.get(name, 0) * step["steps"] for step in self.seen) / n_steps for name in names}


def report(arguments, figures):
    def speeds(key):
        return [one["tokens_per_s"] for one in figures.get(key, {}).values()]

    def kept(mine, base):
        mine, base = figures.get(mine, {}), figures.get(base, {})
        return [mine[i]["tokens_per_s"] / base[i]["tokens_per_s"] for i in mine if i in base]

    lines = [f"{quiet.machine()}. {arguments.model}, {arguments.rounds} interleaved rounds, answers of "
             f"{arguments.output} tokens; median (range). Windows in which other processes used more than "
             f"{arguments.foreign_max} cores are dropped.", "",
             "| grid | at once | decode tokens/s | microseconds of a step |", "|---|---|---|---|"]
    for key in RUNS:
        step = statistics.median(1e6 * key[1] / speed for speed in speeds(key)) if speeds(key) else float("nan")
        lines.append(f"| {key[0]} | {key[1]} | {quiet.spread(speeds(key))} | {step:.0f} |")
    lines += ["", "| comparison, by round | share of the speed | required |", "|---|---|---|"]
    for name, mine, base in KEPT:
        lines.append(f"| {name} | {quiet.spread(kept(mine, base), 3)} | {KEPT_MIN:.2f} |")
    lines += ["", *tcp(arguments, figures), "", *parts_table(figures)]
    return "\n".join(lines) + "\n"


def tcp(arguments, figures):
    lines = ["| what TCP adds at batch 1 | microseconds | limit |", "|---|---|---|"]
    # Two sums in each layer, the embedding's rows, the logits' columns; a hop of rows and one of tokens.
    n_sums = 2 * arguments.layers
    for name, over_tcp, over_shm, n in [("a collective", TP_TCP, TP, n_sums + 2), ("a hop", PP_TCP, PP, 2)]:
        there, here = figures.get((over_tcp, 1), {}), figures.get((over_shm, 1), {})
        added = [(1e6 / there[i]["tokens_per_s"] - 1e6 / here[i]["tokens_per_s"]) / n for i in there if i in here]
        lines.append(f"| {name} ({n} in a step) | {quiet.spread(added)} | {TCP_MAX_MICROS} |")
    return lines


def parts_table(figures):
    """Lists every part of a rank's step that the page has, so that a new part appears without a change here."""
    names = sorted({part for runs in figures.values() for one in runs.values() for part in one["parts"]})
    lines = ["Microseconds of a rank in a step, as `/cluster` reports them:", "",
             "| grid | at once | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for key in RUNS:
        runs = figures.get(key, {}).values()
        if runs:
            cells = [f"{statistics.median(one['parts'].get(name, 0.0) for one in runs):.0f}" for name in names]
            lines.append(f"| {key[0]} | {key[1]} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
