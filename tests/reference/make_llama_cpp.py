"""Adds the results of llama.cpp to each `gguf-*/`.

    python make_llama_cpp.py [NAME ..]

`llama-cpp.f32` holds the logits of every position of every case (prompt, then greedy tokens but the last), row after
row, as little-endian f32. They come from a twin of the file, with weights that llama.cpp itself has dequantized to F32,
with an F32 KV cache and no flash attention. So llama.cpp's arithmetic is f32 throughout, and another engine must agree
to rounding. `llama_cpp` in `expected.json` is the deviation of llama.cpp when it serves the file unchanged, with
activations quantized and an f16 KV cache: the root mean square of the differences, relative to that of the logits.
"""

import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

import peer
import reference

# The size of the context selects LongRoPE's factors: it is on the same side of the original context as in the tests.
N_CTX = 512
# Relative to the largest logit. llama.cpp computes GELU with a table of f16.
DIFFERENCE_MAX, DIFFERENCE_MAX_WITH_GELU = 1e-4, 1e-3


def main():
    peer.start_llama_cpp()
    for folder in map(reference.HERE.joinpath, sys.argv[1:]) if sys.argv[1:] else sorted(reference.HERE.glob("gguf-*")):
        make(folder)


def make(folder):
    expected = json.loads((folder / "expected.json").read_text())
    logs = [case["prompt"] + case["greedy"][:-1] for case in expected["cases"]]
    with tempfile.TemporaryDirectory() as scratch:
        twin = Path(scratch) / "f32.gguf"
        dequantize(folder / "model.gguf", twin)
        exact = rows_of(twin, logs, peer.F32, peer.FLASH_OFF)
    stored = rows_of(folder / "model.gguf", logs, peer.F16, peer.FLASH_AUTO)
    check(folder.name, expected["cases"], exact)
    exact, stored = np.concatenate(exact), np.concatenate(stored)
    exact.astype("<f4").tofile(folder / "llama-cpp.f32")
    off = float(np.sqrt(((stored - exact) ** 2).mean() / (exact ** 2).mean()))
    expected["versions"] |= peer.version()
    head = {key: value for key, value in expected.items() if key != "cases"}
    head["llama_cpp"] = {"stored_off_by": float(f"{off:.4g}")}
    reference.write(folder / "expected.json", head, expected["cases"])
    print(f"{folder.name}: the unchanged file is off by {off:.1e}")


def dequantize(source, to):
    peer.quantize(source, to, llama_cpp.LLAMA_FTYPE_ALL_F32)


def rows_of(path, logs, kv, flash):
    """Returns for each log: [positions, vocab]."""
    model = peer.Model(path, N_CTX, kv, flash)
    rows = [np.concatenate(list(model.rows(log))) for log in logs]
    model.close()
    return rows


def check(name, cases, rows):
    """Checks that llama.cpp and transformers compute the same model, before either becomes a reference."""
    largest = 0.0
    allowed = DIFFERENCE_MAX_WITH_GELU if any(family in name for family in ("gemma", "gpt")) else DIFFERENCE_MAX
    for case, rows in zip(cases, rows):
        for spot in case["logits"]:
            values = np.array(spot["values"])
            largest = max(largest, float(np.abs(rows[spot["position"]] - values).max() / np.abs(values).max()))
    print(f"{name}: llama.cpp and transformers at most {largest:.1e} of the largest logit apart")
    assert largest < allowed, f"{name}: {largest}"


if __name__ == "__main__":
    main()
