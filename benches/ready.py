"""Measures the time and the processor time until a build is ready to serve a model, beside another build.

Runs interleaved rounds, and reports median and range. The first build runs twice in a round, as the control.

    python ready.py LOCKSTEP OTHER MODEL [--rounds N]

MODEL may be `synthetic:MIB`: random bf16 weights of that size, written once to a folder of their own.
"""

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import quiet

SHAPES = Path(__file__).parent / "../tests/reference/llama-bf16-odd"
POLL_S = 0.002
TIMEOUT_S = 60


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lockstep", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    builds = {"this": arguments.lockstep, "this again": arguments.lockstep, "other": arguments.other}
    figures = {name: [] for name in builds}
    with tempfile.TemporaryDirectory() as folder:
        model = synthetic(Path(folder), arguments.model) or arguments.model
        for build in builds.values():
            once(build, model)
        for i in range(arguments.rounds):
            for name in list(builds) if i % 2 == 0 else list(builds)[::-1]:
                figures[name].append(once(builds[name], model))
    print("| build | ready, ms | processor until then, ms |\n|---|---|---|")
    for name, rounds in figures.items():
        print(f"| {name} | {spread([ready for ready, _ in rounds])} | {spread([busy for _, busy in rounds])} |")


def spread(millis):
    return f"{statistics.median(millis):.0f} ({min(millis):.0f}-{max(millis):.0f})"


def once(build, model):
    """Returns the milliseconds from the start to the first `/ready`, and the CPU time, that of polling included."""
    http, grpc = quiet.free_port(), quiet.free_port()
    command = [build, "serve", model, "--http", f"{quiet.LOOPBACK}:{http}", "--grpc", f"{quiet.LOOPBACK}:{grpc}"]
    began, computed = time.monotonic(), quiet.own_seconds()
    process = subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL)
    try:
        while not is_ready(http):
            if time.monotonic() - began > TIMEOUT_S or process.poll() is not None:
                raise SystemExit(f"{build} did not become ready")
            time.sleep(POLL_S)
        return (time.monotonic() - began) * 1e3, (quiet.own_seconds() - computed) * 1e3
    finally:
        process.terminate()
        process.wait()


def is_ready(http):
    try:
        return urllib.request.urlopen(f"http://{quiet.LOOPBACK}:{http}/ready", timeout=1).status == 200
    except (urllib.error.URLError, OSError):
        return False


def synthetic(folder, name):
    if not name.startswith("synthetic:"):
        return None
    config = json.loads((SHAPES / "config.json").read_text())
    hidden, inner, heads, vocab = 1024, 4096, 16, config["vocab_size"]
    layer = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, hidden),
             "self_attn.v_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden),
             "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
             "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    n_layers = max(1, (int(name.split(":")[1]) << 20) // (2 * (4 * hidden * hidden + 3 * hidden * inner)))
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "head_dim": 64,
               "num_key_value_heads": heads, "num_hidden_layers": n_layers, "tie_word_embeddings": False}
    weights = {f"model.layers.{i}.{part}.weight": shape for i in range(n_layers) for part, shape in layer.items()}
    weights |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden),
                "model.norm.weight": (hidden,)}
    for file in SHAPES.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", weights)
    return folder


def write(path, weights):
    header, at = {}, 0
    for name, shape in weights.items():
        n_bytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        # Small numbers: the sign and a part of the fraction are random.
        block = bytes(byte if i % 2 == 0 else 0x3C | byte & 0x80 for i, byte in enumerate(os.urandom(1 << 20)))
        while at > 0:
            file.write(block[:at])
            at -= len(block)


if __name__ == "__main__":
    main()
