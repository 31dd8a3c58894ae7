"""Writes a tiny random gpt-oss whose experts are stored as in the published model: MXFP4, blocks and scales apart. The
reference beside it has the results of transformers in f32 with the numbers that they stand for. A second folder has the
same numbers in bf16, with each expert's matrix as transformers multiplies it: transposed.

    python make_gpt_oss.py
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

import make_families
import make_llama
import reference

NAME, SEED, LENGTHS = "gpt-oss", 37, [1, 40, 270]
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def config():
    return GptOssConfig(
        **make_families.TINY | dict(num_attention_heads=6, intermediate_size=32), num_local_experts=5,
        num_experts_per_tok=2, sliding_window=18,
        rope_parameters=make_families.rope(
            rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
            truncate=False),
        bos_token_id=make_llama.BEGIN, eos_token_id=make_llama.END)


def main():
    reference.configure_torch()
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="eager").eval()
    make_families.randomize(model, torch.Generator().manual_seed(SEED))
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.copy_(torch.linspace(-2.0, 3.0, len(weight)))
        if name.endswith("gate_up_proj"):
            # So large that the gates' clamps apply.
            weight.mul_(4.0)
    experts = quantize_experts(model)
    for name, weight in model.named_parameters():
        if name not in experts:
            weight.copy_(weight.to(torch.bfloat16).float())
    generator = torch.Generator().manual_seed(100 + SEED)
    cases = [make_families.case(model, length, generator) for length in LENGTHS]
    for name, quantized in [(NAME, experts), (f"{NAME}-bf16", {})]:
        folder = reference.HERE / name
        for path in folder.glob("*.json"):
            path.unlink()
        folder.mkdir(exist_ok=True)
        write_folder(model, folder, quantized)
        reference.write(folder / "expected.json", {"model": name, "versions": reference.versions()}, cases)


def quantize_experts(model):
    """Rounds the experts' matrices to numbers of MXFP4. Returns the two tensors of each, by its name."""
    made = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # [experts, in, out]: a block runs along the dimension that a product sums over.
            nibbles, exponents = quantize(weight.transpose(1, 2).contiguous())
            weight.copy_(numbers(nibbles, exponents).transpose(1, 2))
            made[name] = (nibbles[..., ::2] | nibbles[..., 1::2] << 4, exponents)
    return made


def quantize(rows):
    """[.., n] -> nibbles [.., n / 32, 32], exponents [.., n / 32]"""
    blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(dim=-1))) - 2
    scaled = blocks / torch.exp2(exponents)[..., None]
    nearest = (scaled.abs()[..., None] - torch.tensor(NUMBERS)).abs().argmin(dim=-1)
    return (nearest + 8 * (scaled < 0)).to(torch.uint8), (exponents + 127).to(torch.uint8)


def numbers(nibbles, exponents):
    values = torch.tensor(NUMBERS + [-number for number in NUMBERS])[nibbles.long()]
    blocks = values * torch.exp2(exponents.float() - 127)[..., None]
    return blocks.reshape(*blocks.shape[:-2], -1)


def write_folder(model, folder, experts):
    model.save_pretrained(folder)
    make_llama.write_tokenizer(folder, model.config.vocab_size)
    tensors = {name: weight.to(torch.bfloat16) for name, weight in load_file(folder / "model.safetensors").items()}
    for name, (blocks, scales) in experts.items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    written = json.loads(path.read_text()) | {"dtype": "bfloat16"}
    if experts:
        written["quantization_config"] = {"quant_method": "mxfp4"}
    path.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
