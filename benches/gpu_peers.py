"""Measures Hugging Face transformers with a static cache and torch.compile: `make gpu-peers`.

Uses the shape, batches and prompts of `gpu_check`, and prints the ratio to its result on the same device and in the
same run. Random weights; no network.

    python gpu_peers.py CHECK.json [--shape llama|tiny] [--device cuda|cpu] [--eager] [--out FILE]

`--device cpu` is for trying this script without a GPU: its times are not comparable.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

# As in worker/examples/gpu_check/parts/bench.
SHAPES = {
    "llama": {"n_layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256,
              "prompt": 512, "tokens": 165, "batches": [1, 8, 32]},
    "tiny": {"n_layers": 1, "hidden": 64, "inner": 96, "heads": 2, "kv_heads": 1, "vocab": 160, "prompt": 6,
             "tokens": 15, "batches": [1, 3]},
}
ROUNDS = 5
# Warm-up steps: torch.compile makes its graphs during them.
WARM = 4


def main():
    arguments = parse()
    torch, transformers = libraries(arguments.device)
    ours = lockstep_rates(arguments.check)
    torch.manual_seed(1)
    shape = SHAPES[arguments.shape]
    model = build(torch, transformers, shape, arguments.device)
    rows = [measure(torch, transformers, model, shape, batch, arguments) for batch in shape["batches"]]
    for row in rows:
        row["ratio"] = {pace: ours[pace, row["sequences"]] / row["tokens_per_second"]
                        for pace in ("lockstep", "fast") if (pace, row["sequences"]) in ours}
    page = {"peer": f"transformers {transformers.__version__}, torch {torch.__version__}, static cache, "
                    + ("eager" if arguments.eager else "torch.compile"),
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu", "rows": rows}
    arguments.out.write_text(json.dumps(page, indent=2) + "\n")
    for row in rows:
        ratios = ", ".join(f"{pace} {ratio:.2f}x" for pace, ratio in row["ratio"].items()) or "no result to compare"
        print(f"{row['sequences']:>3} sequences: {row['tokens_per_second']:.1f} tokens/s, prefill "
              f"{row['prefill_tokens_per_second']:.0f} tokens/s; ours: {ratios}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("check", type=Path, help="the JSON of gpu_check's part bench")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, default=Path("target/gpu-peers.json"))
    return parser.parse_args()


def libraries(device):
    try:
        import torch
        import transformers
    except ImportError as missing:
        sys.exit(f"gpu-peers: {missing.name} is missing: install torch and transformers")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu-peers: torch finds no CUDA device")
    return torch, transformers


def lockstep_rates(path):
    """Returns tokens per second by pace and batch, from the findings of gpu_check."""
    try:
        findings = json.loads(path.read_text())["findings"]
    except (OSError, ValueError, KeyError) as why:
        sys.exit(f"gpu-peers: {path} is no JSON of gpu_check: {why}")
    ours = {}
    for finding in findings:
        pace, _, rest = finding["name"].partition(": ")
        if rest.endswith(" sequences decode") and "tokens_per_second" in finding["details"]:
            ours[pace, int(rest.split()[0])] = finding["details"]["tokens_per_second"]["median"]
    return ours


def build(torch, transformers, shape, device):
    config = transformers.LlamaConfig(
        hidden_size=shape["hidden"], intermediate_size=shape["inner"], num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"], vocab_size=shape["vocab"],
        max_position_embeddings=2048, tie_word_embeddings=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).eval()


def measure(torch, transformers, model, shape, batch, arguments):
    def synchronized():
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(tokens, position, cache):
        logits = model(tokens, past_key_values=cache, position_ids=position, cache_position=position[0]).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    prompt, n_tokens = shape["prompt"], shape["tokens"]
    decode = step if arguments.eager else torch.compile(step, mode="reduce-overhead", fullgraph=True)
    cache = transformers.StaticCache(config=model.config, max_cache_len=prompt + n_tokens + WARM + 1)
    rows = torch.arange(batch, device=arguments.device)[:, None]
    tokens = (torch.arange(prompt, device=arguments.device)[None] * 37 + rows * 101) % shape["vocab"]
    times = []
    with torch.inference_mode():
        # The first pass of a shape is slow, because it includes work that is done once.
        for _ in range(2):
            cache.reset()
            begun = synchronized()
            last = step(tokens, torch.arange(prompt, device=arguments.device)[None].expand(batch, -1), cache)
            prefill = synchronized() - begun
        for at in range(prompt, prompt + n_tokens + WARM):
            begun = synchronized()
            last = decode(last, torch.full((batch, 1), at, device=arguments.device), cache).clone()
            times.append(synchronized() - begun)
    times = times[WARM:]
    each = len(times) // ROUNDS
    rounds = sorted(statistics.median(times[i * each:(i + 1) * each]) for i in range(ROUNDS))
    median = rounds[ROUNDS // 2]
    return {"sequences": batch, "tokens_per_second": batch / median, "step_millis": median * 1e3,
            "step_millis_least_and_most": [rounds[0] * 1e3, rounds[-1] * 1e3],
            "prefill_tokens_per_second": batch * prompt / prefill}


if __name__ == "__main__":
    main()
