"""Code that all `make_*.py` share: a greedy decode that records its results, and the file format.

Independent of Lockstep: everything here is transformers and torch in f32, with eager attention.
"""

import json
import platform
import shutil
import sys
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent


def configure_torch():
    """Makes every run the same: f32 throughout, two threads, no gradients."""
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float32)


def folders(checkpoints):
    """Yields the checkpoints that the command line names, or all of them, each with its folder, which is empty."""
    for name in sys.argv[1:] or checkpoints:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield name, folder


def versions():
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }


def greedy(model, prompt, n_tokens, top_n):
    """Runs one prefill, then one token at a time through the KV cache; an end of sequence does not end it.

    Returns the tokens, the `top_n` best [id, logit] of each step, and every row of logits:
    [prompt + n_tokens - 1, vocab].
    """
    out = model(torch.tensor([prompt]), use_cache=True)
    rows = [out.logits[0]]
    tokens, top = [], []
    for step in range(n_tokens):
        last = rows[-1][-1]
        best = torch.topk(last, top_n)
        top.append([[int(i), float_of(v)] for v, i in zip(best.values, best.indices)])
        tokens.append(int(best.indices[0]))
        if step + 1 < n_tokens:
            # Without the position, Bamba would begin again at zero.
            at = torch.tensor([[len(prompt) + step]])
            out = model(
                torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, position_ids=at, use_cache=True)
            rows.append(out.logits[0])
    return tokens, top, torch.cat(rows)


def float_of(value):
    """Returns the shortest decimal that is the same f32: half the size of Python's own."""
    return float(format(float(value), ".9g")) if torch.isfinite(value) else None


def write(path, head, cases):
    """Writes one case on a line, so that a diff names the case."""
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    text = json.dumps(head, ensure_ascii=False, indent=1)[:-2] + f',\n "cases": [\n{lines}\n ]\n}}\n'
    json.loads(text)
    path.write_text(text)
    print(f"{path.relative_to(HERE)}: {len(cases)} cases, {path.stat().st_size / 1024:.0f} KiB")
