#!/usr/bin/env python3
"""Measures `--kv-disk`: the time to the first token of a prompt that an earlier process computed, and agents whose
sessions do not fit into the KV memory together.

    python3 benches/kv_disk.py target/release/lockstep first-token [--tokens 8000] [--context 8192] [--rounds 3]
    python3 benches/kv_disk.py target/release/lockstep agents [--sessions 4] [--turns 30] [--kv-memory 256MiB]

`--llama PATH/llama-server` measures llama.cpp beside it, and needs a `.gguf` file as `--model`. Prompts are lists of
tokens, so both servers compute the same. The texts of Lockstep must be equal in every way; the script ends if not.
Flags behind `--` go to all Lockstep servers.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import quiet

REQUEST_S = 1800
# Fewer tokens than a block has: the first request of a server stores no page.
WARM_UP_TOKENS = 8
BLOCK_TOKENS = 16
# After a start, the worker reports the pages of its folder with a heartbeat.
REPORT_S = 2
# The folder is complete when its size stays the same for this long.
STABLE_S = 2
WRITTEN_S = 120
MIB = 1 << 20
NOUNS = "river mill wheel road harbour engine garden letter market bridge lamp field window station clock".split()
VERBS = "opened moved counted returned stored dropped checked closed".split()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("lockstep")
    parser.add_argument("measurement", choices=["first-token", "agents"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=quiet.CORES)
    parser.add_argument("--rounds", type=int, default=3, help="of first-token; agents run once")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the prompt of first-token")
    parser.add_argument("--uncached", action="store_true",
                        help="also read pages that the kernel has dropped from its page cache")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--result-tokens", type=int, default=500, help="tokens that a turn adds to its session")
    parser.add_argument("--output", type=int, default=16, help="tokens that each request generates")
    parser.add_argument("--kv-memory", help="KV memory of agents, too small for all sessions [default: 256MiB]")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between turns of agents")
    parser.add_argument("--disk", default="8GiB", help="most bytes of the folder")
    parser.add_argument("--rate", help="--kv-disk-rate")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folders of pages are made here")
    parser.add_argument("--llama", help="path of llama-server")
    parser.add_argument("--foreign-max", type=float, default=0.2,
                        help="a round of first-token is repeated if other processes use more cores than this")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("flags", nargs="*")
    return parser.parse_args()


def main():
    options = arguments()
    print(quiet.machine())
    print(f"load average {os.getloadavg()[0]:.1f} before")
    watch = quiet.Watch()
    measure = {"first-token": first_token, "agents": agents}[options.measurement]
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="kv-disk-") as place:
        figures = measure(options, Path(place))
    figures |= {"machine": quiet.machine(), "foreign_cores": round(watch.foreign_cores(), 2),
                "options": {name: str(value) for name, value in vars(options).items()}}
    print(f"other processes used {figures['foreign_cores']} cores")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


# -- servers


def lockstep(options, *flags):
    port = quiet.free_port()
    return quiet.Server([[
        options.lockstep, "serve", options.model, "--http", f"{quiet.LOOPBACK}:{port}", "--grpc",
        f"{quiet.LOOPBACK}:{quiet.free_port()}", "--threads", options.threads, "--context", options.context, *flags,
        *options.flags,
    ]], port, "/ready")


def disk_flags(options, folder):
    rate = ["--kv-disk-rate", options.rate] if options.rate else []
    return ["--kv-disk", f"{folder}:{options.disk}", *rate]


def llama(options, context, *flags):
    port = quiet.free_port()
    return quiet.Server([[
        options.llama, "-m", options.model, "--host", quiet.LOOPBACK, "--port", port, "-t", options.threads,
        "-c", context, "--no-webui", *flags,
    ]], port)


def post(server, path, body):
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=REQUEST_S)


def answer(server, prompt, n_predict):
    """Streams a completion; returns its text, seconds until the first token and in all, and its tokens."""
    body = {"prompt": prompt, "max_tokens": n_predict, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    text, first, usage = "", None, None
    began = time.perf_counter()
    with post(server, "/v1/completions", body) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
            if first is None and text:
                first = time.perf_counter() - began
    seconds = time.perf_counter() - began
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"text": text, "first_s": first, "total_s": seconds, "cached": cached,
            "computed": usage["prompt_tokens"] - cached}


def warm_up(server):
    answer(server, list(range(1000, 1000 + WARM_UP_TOKENS)), 2)


# -- prompts


def tokens(server, text):
    with post(server, "/tokenize", {"content": text, "add_special": False}) as reply:
        return json.load(reply)["tokens"]


def prose(server, n, seed):
    """Returns n tokens of sentences that depend on the seed."""
    words = random.Random(seed)
    sentences = (f"{i}: the {words.choice(NOUNS)} {words.choice(VERBS)} {words.randrange(1000)} times.\n"
                 for i in range(n // 4))
    found = tokens(server, "".join(sentences))
    assert len(found) >= n, f"{len(found)} of {n} tokens"
    return found[:n]


# -- the folder


def pages(folder):
    return [path for path in (folder / "pages").rglob("*") if path.is_file()]


def written(folder):
    """Waits until no more pages are written; returns their number and bytes."""
    deadline, before, since = time.monotonic() + WRITTEN_S, None, time.monotonic()
    while time.monotonic() < deadline:
        files = pages(folder)
        now = len(files), sum(path.stat().st_size for path in files)
        if now != before:
            before, since = now, time.monotonic()
        elif now[0] and time.monotonic() - since > STABLE_S:
            return now
        time.sleep(0.1)
    sys.exit(f"{folder}: pages are still written, or there are none")


def drop_from_page_cache(folder):
    for path in pages(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- time to the first token


def first_token(options, place):
    rounds = []
    for i in range(options.rounds):
        one, foreign = quiet.quietly(lambda: one_round(options, place), options.foreign_max)
        if one:
            rounds.append(one | {"foreign_cores": round(foreign, 2)})
            times = ", ".join(f"{way} {it['first_s']:.3f} s" for way, it in one["ways"].items())
            print(f"  round {i + 1}: {times}; other processes used {foreign:.2f} cores", file=sys.stderr, flush=True)
    if not rounds:
        sys.exit("no quiet window")
    report_first_token(options, rounds)
    return {"rounds": rounds}


def one_round(options, place):
    one = lockstep_round(options, place / "pages")
    prompt = one.pop("prompt")
    if options.llama:
        one["ways"] |= llama_round(options, place, prompt)
    return one


def lockstep_round(options, folder):
    """Returns the answers of one round by where the prompt's cache came from, and the folder's size."""
    flags, ways = disk_flags(options, folder), {}
    if options.kv_memory:
        flags += ["--kv-memory", options.kv_memory]
    with lockstep(options, *flags) as server:
        prompt = prose(server, options.tokens, 1)
        warm_up(server)
        ways["cold"] = answer(server, prompt, options.output)
        n_files, n_bytes = written(folder)
    for way in ["uncached disk", "disk"] if options.uncached else ["disk"]:
        if way == "uncached disk":
            drop_from_page_cache(folder)
        with lockstep(options, *flags) as server:
            time.sleep(REPORT_S)
            warm_up(server)
            ways[way] = answer(server, prompt, options.output)
            if way == "disk":
                ways["memory"] = answer(server, prompt, options.output)
    assert len({way["text"] for way in ways.values()}) == 1, f"the texts differ: {ways}"
    shutil.rmtree(folder)
    return {"ways": ways, "files": n_files, "bytes": n_bytes, "prompt": prompt}


def llama_round(options, place, prompt):
    """Returns llama-server's answers: cold, from a slot that an earlier process saved, and from memory."""
    slots = place / "slots"
    slots.mkdir(exist_ok=True)
    flags, ways, file = ["-np", "1", "--slot-save-path", f"{slots}/"], {}, {"filename": "slot.bin"}
    with llama(options, options.context, *flags) as server:
        warm_up(server)
        ways["llama-server cold"] = answer(server, prompt, options.output)
        post(server, "/slots/0?action=save", file).read()
    with llama(options, options.context, *flags) as server:
        warm_up(server)
        began = time.perf_counter()
        post(server, "/slots/0?action=restore", file).read()
        restored = time.perf_counter() - began
        read = answer(server, prompt, options.output)
        ways["llama-server restored"] = read | {"first_s": read["first_s"] + restored, "restore_s": restored,
                                                "bytes": (slots / "slot.bin").stat().st_size}
        ways["llama-server memory"] = answer(server, prompt, options.output)
    shutil.rmtree(slots)
    return ways


def report_first_token(options, rounds):
    def middle(way):
        return statistics.median(one["ways"][way]["first_s"] for one in rounds)

    rows = []
    for way in rounds[0]["ways"]:
        answers = [one["ways"][way] for one in rounds]
        engine = "llama-server cold" if way.startswith("llama") else "cold"
        same = all(one["ways"][way]["text"] == one["ways"][engine]["text"] for one in rounds)
        rows.append([way, quiet.spread([it["first_s"] for it in answers], 3), f"{middle(engine) / middle(way):.1f}",
                     answers[-1]["computed"], answers[-1]["cached"], "yes" if same else "no"])
    print(f"\nfirst token, {options.model}, prompt of {options.tokens} tokens, {options.threads} threads")
    table(["way", "first token, s", "cold / way", "computed", "cached", "text as cold"], rows)
    last = rounds[-1]
    print(f"folder: {last['files']} files, {last['bytes'] / MIB:.1f} MiB")
    for way in ("disk", "uncached disk"):
        if way in last["ways"]:
            seconds = middle(way) - middle("memory")
            rate = f"{last['bytes'] / MIB / seconds:.0f} MiB/s" if seconds > 0 else "too fast to measure"
            print(f"read rate, {way}: {rate} (bytes / (time from {way} - time from memory))")
    if options.llama:
        print(f"saved slot: {last['ways']['llama-server restored']['bytes'] / MIB:.1f} MiB")


# -- agents


def agents(options, place):
    memory = ["--kv-memory", options.kv_memory or "256MiB"]
    ways = {"memory for all": [], "without disk": memory,
            "with disk": [*memory, *disk_flags(options, place / "pages")]}
    runs, n_positions = {}, 0
    for name, flags in ways.items():
        with lockstep(options, *flags) as server:
            n_positions = kv_positions(server)
            runs[name] = session_turns(options, server, name)
    n_files, n_bytes = written(place / "pages")
    texts = [[turn["text"] for turn in turns] for turns in runs.values()]
    assert texts[0] == texts[1] == texts[2], "the texts differ with the disk or the memory"
    if options.llama:
        runs |= llama_agents(options, n_positions)
    report_agents(options, runs, n_positions)
    print(f"folder: {n_files} files, {n_bytes / MIB:.1f} MiB")
    return {"runs": runs, "positions": n_positions, "files": n_files, "bytes": n_bytes}


def llama_agents(options, n_positions):
    """Slots share a cache of the same size. llama-server keeps what leaves it in memory, unless `-cram` is 0."""
    flags = ["-np", options.sessions, "--kv-unified", "--cache-reuse", 256]
    runs = {}
    for name, more in {"llama-server": [], "llama-server -cram 0": ["-cram", "0"]}.items():
        with llama(options, n_positions, *flags, *more) as server:
            runs[name] = session_turns(options, server, name)
    return runs


def kv_positions(server):
    """Returns the tokens that the KV memory holds."""
    lines = server.get("/metrics").splitlines()
    blocks = next(line for line in lines if line.startswith("lockstep:kv_blocks{"))
    return int(float(blocks.split()[-1])) * BLOCK_TOKENS


def session_turns(options, server, name):
    """Runs the sessions in turn with each other; returns every turn."""
    warm_up(server)
    watch, prompts, turns = quiet.Watch(), [[] for _ in range(options.sessions)], []
    for turn in range(options.turns):
        for i, prompt in enumerate(prompts):
            prompt += prose(server, options.result_tokens, f"{i}/{turn}")
            one = answer(server, prompt, options.output)
            prompt += tokens(server, one["text"])
            turns.append(one)
            time.sleep(options.pause)
    print(f"  {name}: {sum(one['total_s'] for one in turns):.1f} s in {len(turns)} turns; other processes used "
          f"{watch.foreign_cores():.2f} cores", file=sys.stderr, flush=True)
    return turns


def report_agents(options, runs, n_positions):
    rows = []
    for name, turns in runs.items():
        first, total = ([one[key] for one in turns] for key in ("first_s", "total_s"))
        computed, cached = (sum(one[key] for one in turns) for key in ("computed", "cached"))
        rows.append([name, f"{statistics.median(total):.2f}", f"{percentile_90(total):.2f}",
                     f"{statistics.median(first):.2f}", f"{percentile_90(first):.2f}", f"{sum(total):.0f}", computed,
                     cached])
    longest = max(one["computed"] + one["cached"] for one in runs["with disk"])
    print(f"\nagents, {options.model}, {options.sessions} sessions of {options.turns} turns, which grow to {longest} "
          f"tokens each; KV memory for {n_positions} tokens; {options.threads} threads")
    table(["way", "turn p50, s", "turn p90, s", "first p50, s", "first p90, s", "all turns, s", "computed", "cached"],
          rows)


def percentile_90(values):
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def table(header, rows):
    lines = [[str(cell) for cell in line] for line in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")


if __name__ == "__main__":
    main()
