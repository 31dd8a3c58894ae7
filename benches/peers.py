"""Lockstep and llama.cpp serve the same file to the same load, in turns: tokens a second, time to the first token, time
between tokens, and the ratio. Each round also runs Lockstep a second time, as a control: what two runs of the same
server differ by is what a ratio may be off by.

    python peers.py LOCKSTEP MODEL.gguf [--llama-server PROGRAM] [--rounds N] [--out FILE]

Without `--llama-server` the peer is the server of `llama-cpp-python[server]`, which answers one request after another;
llama.cpp's own server batches, with as many slots as the load has requests.
"""

import argparse
import statistics
import sys
from pathlib import Path

import quiet

CONCURRENCIES = [1, 8, 32]
LOCKSTEP, CONTROL, PEER = "Lockstep", "Lockstep again (control)", "llama.cpp"


def main():
    arguments = parse()
    figures = {}
    for i in range(arguments.rounds):
        # Each goes first in some round.
        kinds = [LOCKSTEP, PEER, CONTROL]
        for kind in kinds[i % 3:] + kinds[:i % 3]:
            for concurrency in arguments.concurrency:
                run(arguments, figures, kind, concurrency, i)
    text = report(arguments, figures)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lockstep", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=quiet.CORES)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=CONCURRENCIES)
    parser.add_argument("--requests", type=int, default=4, help="for each that is under way at once")
    parser.add_argument("--prompt", default="128")
    parser.add_argument("--output", default="64")
    parser.add_argument("--foreign-max", type=float, default=0.1, help="cores that others may use in a window")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def server(arguments, kind, concurrency):
    port = quiet.free_port()
    if kind != PEER:
        return quiet.Server([[
            arguments.lockstep, "serve", arguments.model, "--http", f"{quiet.LOOPBACK}:{port}",
            "--grpc", f"{quiet.LOOPBACK}:{quiet.free_port()}", "--threads", arguments.threads,
        ]], port, "/ready")
    # Room for the longest prompt and answer of this load, in each slot.
    context = 1024
    if arguments.llama_server:
        return quiet.Server([[
            arguments.llama_server, "-m", arguments.model, "--host", quiet.LOOPBACK, "--port", port,
            "-t", arguments.threads, "-np", concurrency, "-c", context * concurrency, "--no-webui",
        ]], port)
    return quiet.Server([[
        sys.executable, "-m", "llama_cpp.server", "--model", arguments.model, "--host", quiet.LOOPBACK, "--port", port,
        "--n_threads", arguments.threads, "--n_threads_batch", arguments.threads, "--n_ctx", context,
        "--interrupt_requests", "false",
    ]], port, "/v1/models")


def run(arguments, figures, kind, concurrency, seed):
    with server(arguments, kind, concurrency) as one:
        def measure():
            requests = arguments.requests * concurrency
            return quiet.load(arguments.lockstep, one.url, concurrency, requests, arguments.prompt, arguments.output,
                              seed)
        measured, foreign = quiet.quietly(measure, arguments.foreign_max)
    print(f"round {seed}, {kind}, {concurrency} at once: "
          + (f"{measured['output_tokens_per_s']:.1f} tokens/s" if measured else "no quiet window")
          + f", others {foreign:.2f} cores", file=sys.stderr, flush=True)
    seen = figures.setdefault((kind, concurrency), [])
    if measured:
        seen.append(measured)


def report(arguments, figures):
    lines = [
        f"{quiet.machine()}. {arguments.model.name}, prompts of {arguments.prompt} words, answers of "
        f"{arguments.output} tokens, {arguments.threads} threads, {arguments.rounds} interleaved rounds; median "
        f"(range). Windows in which others used more than {arguments.foreign_max} cores are dropped.",
        "",
        "| at once | server | tokens/s | first token ms | between tokens ms | of llama.cpp |",
        "|---|---|---|---|---|---|",
    ]
    for concurrency in arguments.concurrency:
        def speeds(kind):
            return [run["output_tokens_per_s"] for run in figures[kind, concurrency]]
        for kind in [LOCKSTEP, CONTROL, PEER]:
            def middle(what):
                return quiet.spread([run[what]["p50"] for run in figures[kind, concurrency]])
            ratio = "-"
            if speeds(kind) and speeds(PEER):
                ratio = f"{statistics.median(speeds(kind)) / statistics.median(speeds(PEER)):.2f}"
            lines.append(f"| {concurrency} | {kind} | {quiet.spread(speeds(kind))} | {middle('ttft_ms')} "
                         f"| {middle('itl_ms')} | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
