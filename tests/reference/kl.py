"""Measures the error of int8 activations and an f16 KV in the default model: mean KL(f32 || engine) over every position
of a text, for Lockstep and for llama.cpp.

    python kl.py MODEL.gguf LOGITS [--positions N] [--window N] [--threads N] [--transformers N] [--parts] [--out FILE]

LOGITS is the binary of `cargo build -p model --example logits`. The reference is Lockstep's own f32 path, which is
checked here against transformers on the dequantized weights, over the first `--transformers` positions. Everything runs
in step over pipes, so that no more than a few hundred rows of logits exist at any time. The text is `kl.txt`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import peer

TEXT = Path(__file__).resolve().parent / "kl.txt"
CHUNK = 512
LIMIT = 1.05
# The default configuration of each engine.
OURS, THEIRS = "Lockstep, int8 and f16", "llama.cpp, f16 and flash attention"


def main():
    arguments = parse()
    peer.start_llama_cpp()
    flash = {THEIRS: peer.FLASH_AUTO} | ({"llama.cpp, flash attention off": peer.FLASH_OFF} if arguments.parts else {})
    models = {
        name: peer.Model(arguments.model, arguments.window, peer.F16, flash, arguments.threads, CHUNK)
        for name, flash in flash.items()
    }
    any_model = next(iter(models.values()))
    ids = any_model.tokenize(TEXT.read_text())[:arguments.positions]
    assert len(ids) == arguments.positions, f"the text has {len(ids)} tokens"
    with tempfile.NamedTemporaryFile("w", suffix=".ids") as file:
        file.write(" ".join(map(str, ids)))
        file.flush()
        divergences = compare(arguments, ids, models, file.name)
        check = against_transformers(arguments, ids, file.name) if arguments.transformers else None
    text = report(arguments, divergences, check)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    ours, theirs = divergences[OURS], divergences[THEIRS]
    sys.exit(0 if ours.mean <= LIMIT * theirs.mean else 1)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("logits", type=Path)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--transformers", type=int, default=512)
    parser.add_argument("--parts", action="store_true", help="also measure each half of the change, and other settings")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class LockstepLogits:
    """The example `logits` in a separate process; rows come through a pipe."""

    def __init__(self, arguments, ids, activations, kv, n_vocab):
        self.n_vocab = n_vocab
        command = [arguments.logits, arguments.model, ids, arguments.window, activations, kv, arguments.threads]
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE)

    def rows(self, n):
        """[n, n_vocab]"""
        data = self.process.stdout.read(4 * n * self.n_vocab)
        assert len(data) == 4 * n * self.n_vocab, f"the engine ended early: {self.process.poll()}"
        return np.frombuffer(data, dtype="<f4").reshape(n, self.n_vocab)

    def close(self):
        self.process.stdout.close()
        self.process.wait(timeout=60)


class Divergence:
    """The results of one engine compared with the reference."""

    def __init__(self):
        self.kls, self.same_best = [], []

    def add(self, reference, rows):
        """sum p (x - y) - (log-sum-exp x - log-sum-exp y), where p is the softmax of x."""
        difference = np.einsum("ij,ij->i", reference.exp, reference.rows - rows) / reference.sum
        self.kls.append(difference - (reference.log_sum - Distribution(rows).log_sum))
        self.same_best.append(reference.rows.argmax(axis=1) == rows.argmax(axis=1))

    def all(self):
        return np.concatenate(self.kls)

    @property
    def mean(self):
        return float(self.all().mean())


class Distribution:
    """The softmax of rows of logits: exponentials in f32, sums in f64."""

    def __init__(self, rows):
        self.rows = rows
        largest = rows.max(axis=1, keepdims=True)
        self.exp = np.exp(rows - largest)
        self.sum = self.exp.sum(axis=1, dtype=np.float64)
        self.log_sum = np.log(self.sum) + largest[:, 0]


def compare(arguments, ids, models, file):
    n_vocab = next(iter(models.values())).n_vocab
    reference = LockstepLogits(arguments, file, "f32", "f32", n_vocab)
    engines = {OURS: LockstepLogits(arguments, file, "int8", "f16", n_vocab)}
    if arguments.parts:
        engines["Lockstep, f32 and f16"] = LockstepLogits(arguments, file, "f32", "f16", n_vocab)
        engines["Lockstep, int8 and f32"] = LockstepLogits(arguments, file, "int8", "f32", n_vocab)
    divergences = {name: Divergence() for name in [*engines, *models]}
    for start in range(0, len(ids), arguments.window):
        window = ids[start:start + arguments.window]
        theirs = {name: model.rows(window) for name, model in models.items()}
        for at in range(0, len(window), CHUNK):
            n = min(CHUNK, len(window) - at)
            expected = Distribution(reference.rows(n))
            for name, engine in engines.items():
                divergences[name].add(expected, engine.rows(n))
            for name, rows in theirs.items():
                divergences[name].add(expected, next(rows))
            print(f"{start + at + n} of {len(ids)}: "
                  + ", ".join(f"{name} {seen.mean:.6f}" for name, seen in divergences.items()),
                  file=sys.stderr, flush=True)
    for engine in [reference, *engines.values()]:
        engine.close()
    return divergences


def against_transformers(arguments, ids, file):
    """Returns the largest difference of a logit between the f32 path and transformers, relative to the largest
    logit."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    n = min(arguments.transformers, arguments.window)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model.parent, gguf_file=arguments.model.name, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([ids[:n]])).logits[0].numpy()
    ours = LockstepLogits(arguments, file, "f32", "f32", expected.shape[1])
    rows = ours.rows(n)
    ours.process.kill()
    ours.close()
    seen = Divergence()
    seen.add(Distribution(expected), rows)
    return n, float(np.abs(rows - expected).max() / np.abs(expected).max()), seen.mean


def report(arguments, divergences, check):
    kls = {name: seen.all() for name, seen in divergences.items()}
    ours, theirs = kls[OURS], kls[THEIRS]
    low, high = interval(ours, theirs)
    lines = [
        "| engine | mean KL | median | p99 | largest | same best token |",
        "|---|---|---|---|---|---|",
    ]
    for name, seen in divergences.items():
        kl = kls[name]
        best = 100 * np.concatenate(seen.same_best).mean()
        lines.append(f"| {name} | {kl.mean():.6f} | {np.median(kl):.6f} | {np.quantile(kl, 0.99):.5f} "
                     f"| {kl.max():.4f} | {best:.2f}% |")
    lines.append("")
    lines.append(f"{arguments.positions} positions in windows of {arguments.window}. Lockstep's mean is "
                 f"{ours.mean() / theirs.mean():.3f} of llama.cpp's (95% of resamples: {low:.3f} to {high:.3f}); "
                 f"the limit is {LIMIT}.")
    if check:
        n, distance, kl = check
        lines.append("")
        lines.append(f"The reference beside transformers over the first {n} positions: logits at most {distance:.1e} "
                     f"of the largest apart, mean KL {kl:.1e}.")
    return "\n".join(lines) + "\n"


def interval(ours, theirs, block=64, n_draws=2000):
    """Returns the interval of the ratio of the means. Resamples blocks of positions, because neighbours are similar."""
    n = len(ours) // block
    sums = np.stack([x[:n * block].reshape(n, block).sum(axis=1) for x in (ours, theirs)])
    drawn = sums[:, np.random.default_rng(1).integers(0, n, (n_draws, n))].sum(axis=2)
    return np.quantile(drawn[0] / drawn[1], [0.025, 0.975])


if __name__ == "__main__":
    main()
