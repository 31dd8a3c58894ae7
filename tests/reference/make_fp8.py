"""Writes tiny checkpoints with eight-bit weights, as hubs have them, and beside each the results of transformers in
f32 with the exact numbers that the weights stand for.

The models are rounded versions of those in other folders here, with a scale for a matrix, for each row, or for each
block of 128 x 128. Checkpoints with one scale for a matrix also store an `input_scale` for
activations. Run `make_llama.py` and `make_families.py` before.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import make_llama
import reference

LARGEST = 448.0
PROMPT_LENGTHS = [3, 40]
# The folder of the model, the rows and columns that share a scale (0: all of them), the suffix of a matrix's name in
# its scales' name, the scales' type, and the entry of config.json.
CHECKPOINTS = {
    "fp8-tensor": dict(
        of="llama-f32-tied", block=(0, 0), suffix="_scale", dtype=torch.float32,
        config=dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"]),
    ),
    "fp8-channel": dict(
        of="mixtral", block=(1, 0), suffix="_scale", dtype=torch.bfloat16,
        config=dict(
            quant_method="compressed-tensors", format="float-quantized", quantization_status="compressed",
            kv_cache_scheme=None, ignore=["lm_head", "re:.*gate$"],
            config_groups=dict(group_0=dict(
                targets=["Linear"],
                weights=dict(num_bits=8, type="float", symmetric=True, strategy="channel", dynamic=False),
                input_activations=dict(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True),
            )),
        ),
    ),
    "fp8-block": dict(
        of="llama-f16-sharded", block=(128, 128), suffix="_scale_inv", dtype=torch.float32,
        config=dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]),
    ),
}


def main():
    reference.configure_torch()
    for name, folder in reference.folders(CHECKPOINTS):
        make(name, folder, **CHECKPOINTS[name])


def make(name, folder, of, block, suffix, dtype, config):
    source = reference.HERE / of
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    stored, numbers = {}, {}
    for key, weight in tensors.items():
        if not is_rounded(key, weight):
            stored[key] = weight.to(torch.bfloat16)
            numbers[key] = stored[key].float()
            continue
        stored[key], scale, numbers[key] = rounded(weight.float(), block, dtype)
        stored[key + suffix] = scale.reshape(()) if block == (0, 0) else scale
        if config.get("activation_scheme") == "static":
            stored[key.removesuffix("weight") + "input_scale"] = torch.tensor(0.01)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    shape = json.loads((source / "config.json").read_text())
    shape["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(shape | {"quantization_config": config}, indent=2) + "\n")
    for file in ["tokenizer.json", "tokenizer_config.json"]:
        if (source / file).exists():
            shutil.copy(source / file, folder / file)
    with tempfile.TemporaryDirectory() as wide:
        wide = Path(wide)
        save_file(numbers, wide / "model.safetensors", metadata={"format": "pt"})
        (wide / "config.json").write_text(json.dumps(shape | {"dtype": "float32"}))
        model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(len(name))
    cases = [make_llama.case(model, length, generator) for length in PROMPT_LENGTHS]
    reference.write(folder / "expected.json", {"model": name, "versions": reference.versions()}, cases)


def is_rounded(key, weight):
    others = ["embed", "lm_head", "block_sparse_moe.gate.", "norm"]
    return weight.dim() == 2 and not any(other in key for other in others)


def rounded(weight, block, dtype):
    """Returns a matrix in eight bits, its scales, and the numbers that both stand for."""
    rows, columns = weight.shape
    height, width = block[0] or rows, block[1] or columns
    n_rows, n_columns = -(-rows // height), -(-columns // width)
    scale = torch.zeros(n_rows, n_columns)
    for i in range(n_rows):
        for j in range(n_columns):
            part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
            # Here a number in each block has the largest value; not all quantizers use the whole range.
            scale[i, j] = part.abs().max() / LARGEST
    scale = scale.to(dtype)
    wide = scale.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    narrow = (weight / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return narrow, scale, narrow.float() * wide


if __name__ == "__main__":
    main()
