"""Writes a tiny checkpoint in each low-bit format that hubs have, by the format's own packer. Beside it are the results
of transformers in f32, with the numbers that the format's own unpacker reads from the written files.

Besides `requirements.txt` this requires, without their dependencies, the packages that write such files:
`pip install --no-deps compressed-tensors==0.20.0 loguru psutil bitsandbytes==0.50.2 auto-gptq==0.7.1
nvidia-modelopt==0.47.0`, and the sources of autoawq 0.2.9 on PYTHONPATH: `pip download --no-deps autoawq==0.2.9`.

    python make_few_bits.py [NAME ..]
"""

import hashlib
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import make_llama
import reference

PROMPT_LENGTHS = [3, 40]
# Heads of 32 and an inner width of 128: leaves cut groups of 64 and 128.
SHAPE = dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=128, vocab_size=264, max_position_embeddings=512, tie_word_embeddings=True,
    bos_token_id=make_llama.BEGIN, eos_token_id=make_llama.END,
)


def found(name):
    """Imports a package's folder without running its `__init__.py`, which requires packages that are missing."""
    for place in sys.path:
        folder = Path(place, *name.split("."))
        if (folder / "__init__.py").exists():
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
            return folder
    raise SystemExit(f"{name} is not on PYTHONPATH")


def groups_of(weight, size, bits, symmetric, scale_type, least_zero=0):
    """Returns digits, scales and zeros of groups of `size` columns; digits and zeros count from zero."""
    rows, k = weight.shape
    parts = weight.reshape(rows, k // size, size)
    top = 2**bits - 1
    low, high = parts.amin(2), parts.amax(2)
    if symmetric:
        largest = torch.maximum(low.abs(), high.abs())
        scale, zero = (largest / (top // 2)).to(scale_type), torch.full_like(low, (top + 1) // 2)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = ((high - low) / top).to(scale_type)
        zero = (-low / scale.float()).round().clamp(least_zero, top)
    digits = (parts / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, top)
    return digits.reshape(rows, k).to(torch.int32), scale, zero.to(torch.int32)


def linear_of(digits, scale, zero, size):
    """Returns a layer with weights that the packer turns into these digits."""
    def wide(of):
        return of.repeat_interleave(size, 1)

    linear = torch.nn.Linear(digits.shape[1], digits.shape[0], bias=False)
    linear.weight.data = wide(scale.float()) * (digits - wide(zero))
    return linear


def awq(weight, size):
    found("awq")
    sys.modules["awq.utils.utils"] = types.SimpleNamespace(get_best_device=lambda: "cpu")
    sys.modules["awq.utils.module"] = types.SimpleNamespace(try_import=lambda name: (None, ""))
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    digits, scale, zero = groups_of(weight, size, 4, False, torch.float16)
    linear = linear_of(digits, scale, zero, size)
    packed = WQLinear_GEMM.from_linear(linear, 4, size, False, scale.t().contiguous(), zero.t().contiguous())
    stored = {".qweight": packed.qweight, ".qzeros": packed.qzeros, ".scales": packed.scales}
    numbers = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, size)
    return stored, numbers.t()


def shuffled(groups):
    """The groups of columns that were quantized in another order."""
    return groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(len(groups)))]


def gptq(weight, size, bits, symmetric, version, act_order=False):
    path = found("auto_gptq") / "nn_modules/qlinear/qlinear_cuda.py"
    spec = importlib.util.spec_from_file_location("qlinear_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    size = weight.shape[1] if size == -1 else size
    # The first version of the format cannot store a zero point of zero.
    order = torch.arange(weight.shape[1], dtype=torch.int32) // size
    order = shuffled(order) if act_order else order
    columns = torch.argsort(order, stable=True)
    digits, scale, zero = groups_of(weight[:, columns], size, bits, symmetric, torch.float16, least_zero=1)
    linear = linear_of(digits, scale, zero, size)
    linear.weight.data = linear.weight.data[:, torch.argsort(columns)]
    packed = module.QuantLinear(bits, size, weight.shape[1], weight.shape[0], False, weight_dtype=torch.float16)
    packed.pack(linear, scale.float(), zero.clone(), order)
    packed.scales = packed.scales.half() if act_order else packed.scales.half().float()
    assert torch.equal(packed.scales.t().float(), scale.float())
    # In act-order the unpacker's own type counts, which rounds.
    numbers = packed(torch.eye(weight.shape[1], dtype=torch.float16)) if act_order else packed.float()(
        torch.eye(weight.shape[1]))
    qzeros = packed.qzeros
    if version == 2:
        # Converts the version as GPTQModel does.
        qzeros = qzeros + {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]
    stored = {".qweight": packed.qweight, ".qzeros": qzeros, ".scales": scale.t().contiguous(), ".g_idx": packed.g_idx}
    return stored, numbers.t()


def compressed(weight, format, weights, scale_type):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    size = args.group_size or weight.shape[1]
    digits, scale, zero = groups_of(weight, size, args.num_bits, args.symmetric, scale_type)
    middle = 2 ** (args.num_bits - 1)
    linear = linear_of(digits, scale, zero, size)
    state = {"weight": linear.weight.data, "weight_scale": scale.float()}
    if not args.symmetric:
        state["weight_zero_point"] = (zero - middle).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(state, scheme)
    numbers = compressor.decompress(packed, scheme)["weight"].float()
    packed["weight_scale"] = scale
    return {f".{name}": tensor for name, tensor in packed.items() if tensor is not None}, numbers


def packed_nvfp4(weight):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    factor = generate_gparam(weight.min(), weight.max())
    parts = weight.reshape(len(weight), -1, 16)
    scale, _ = calculate_qparams(parts.amin(2), parts.amax(2), scheme.weights, factor)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": factor}
    packed = compressor.compress(state, scheme)
    numbers = compressor.decompress(dict(packed), scheme)["weight"]
    return {f".{name}": tensor for name, tensor in packed.items()}, numbers


def modelopt():
    """The tensor of modelopt, without its packages for training."""
    packages = ["modelopt"] + [f"modelopt.torch{rest}" for rest in [
        "", ".quantization", ".quantization.qtensor", ".quantization.backends", ".quantization.utils"]]
    for name in packages:
        found(name)
    unused = types.SimpleNamespace(get_unwrapped_name=None, print_rank_0=None, temporarily_remove_accelerate_hook=None)
    for name in ["modelopt.torch.utils", "modelopt.torch.utils.network"]:
        sys.modules[name] = unused
    sys.modules["modelopt.torch.quantization.config"] = types.SimpleNamespace(QuantizerCfgEntry=None)
    from modelopt.torch.quantization.utils import core_utils

    vars(sys.modules["modelopt.torch.quantization.utils"]).update(vars(core_utils))
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    return NVFP4QTensor


def modelopt_nvfp4(weight):
    packed, scale, factor = modelopt().quantize(weight.bfloat16(), 16)
    numbers = packed.dequantize(torch.bfloat16, scale=scale, double_scale=factor, block_sizes={-1: 16})
    stored = {".weight": packed._quantized_data, ".weight_scale": scale, ".weight_scale_2": factor.reshape([])}
    return stored | {".input_scale": torch.tensor(0.01)}, numbers


def int8(weight):
    import bitsandbytes.functional as bnb

    digits, scale, _ = bnb.int8_vectorwise_quant(weight.half())
    stored = {".weight": digits, ".SCB": scale, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, bnb.int8_vectorwise_dequant(digits, scale).float()


def four_bits(weight, kind, dtype, nested):
    import bitsandbytes.functional as bnb

    digits, state = bnb.quantize_4bit(weight.to(dtype), blocksize=64, quant_type=kind, compress_statistics=nested)
    stored = {".weight": digits} | {f".weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return stored, bnb.dequantize_4bit(digits, state).float()


def of_groups(format, weights, **more):
    group = dict(targets=["Linear"], weights=weights | dict(type="int", dynamic=False), input_activations=None)
    return dict(
        quant_method="compressed-tensors", format=format, quantization_status="compressed", ignore=["lm_head"],
        kv_cache_scheme=None, config_groups=dict(group_0=group | more),
    )


INT4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
INT4_ZEROS = dict(num_bits=4, type="int", symmetric=False, strategy="group", group_size=128)
INT8 = dict(num_bits=8, type="int", symmetric=False, strategy="group", group_size=64)
W8A8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
PER_TOKEN = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)

NVFP4 = dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, dynamic=False)
MODELOPT = dict(
    producer=dict(name="modelopt", version="0.47.0"),
    quantization=dict(quant_algo="NVFP4", kv_cache_quant_algo=None, group_size=16, exclude_modules=["lm_head"]),
)

# The seed, how a matrix is stored and read back, and the entry of config.json.
CHECKPOINTS = {
    "awq": (41, lambda w: awq(w, 128), dict(
        quant_method="awq", bits=4, group_size=128, version="gemm", zero_point=True)),
    "gptq-4": (42, lambda w: gptq(w, 64, 4, False, 1), dict(
        quant_method="gptq", bits=4, group_size=64, desc_act=False, sym=False, checkpoint_format="gptq")),
    "gptq-4-sym": (43, lambda w: gptq(w, 128, 4, True, 1), dict(
        quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True)),
    "gptq-8": (44, lambda w: gptq(w, -1, 8, False, 2), dict(
        quant_method="gptq", bits=8, group_size=-1, desc_act=True, sym=False, checkpoint_format="gptq_v2")),
    "gptq-3": (52, lambda w: gptq(w, 32, 3, False, 1), dict(
        quant_method="gptq", bits=3, group_size=32, desc_act=False, sym=False, checkpoint_format="gptq")),
    "gptq-2": (53, lambda w: gptq(w, 64, 2, False, 2), dict(
        quant_method="gptq", bits=2, group_size=64, desc_act=False, sym=False, checkpoint_format="gptq_v2")),
    "gptq-act-order": (54, lambda w: gptq(w, 32, 4, False, 1, act_order=True), dict(
        quant_method="gptq", bits=4, group_size=32, desc_act=True, sym=False, checkpoint_format="gptq")),
    "nvfp4": (55, packed_nvfp4, dict(
        quant_method="compressed-tensors", format="nvfp4-pack-quantized", quantization_status="compressed",
        ignore=["lm_head"], kv_cache_scheme=None,
        config_groups=dict(group_0=dict(targets=["Linear"], weights=NVFP4, input_activations=None)))),
    # Without an entry: `hf_quant_config.json` has it.
    "nvfp4-modelopt": (56, modelopt_nvfp4, None),
    "packed-4": (45, lambda w: compressed(w, "pack-quantized", INT4, torch.bfloat16), of_groups(
        "pack-quantized", INT4)),
    "packed-4-zeros": (46, lambda w: compressed(w, "pack-quantized", INT4_ZEROS, torch.bfloat16), of_groups(
        "pack-quantized", INT4_ZEROS)),
    "packed-8": (47, lambda w: compressed(w, "pack-quantized", INT8, torch.float32), of_groups(
        "pack-quantized", INT8)),
    "w8a8": (48, lambda w: compressed(w, "int-quantized", W8A8, torch.bfloat16), of_groups(
        "int-quantized", W8A8, input_activations=PER_TOKEN)),
    "llm-int8": (49, int8, dict(
        quant_method="bitsandbytes", load_in_8bit=True, load_in_4bit=False, llm_int8_threshold=6.0)),
    "nf4": (50, lambda w: four_bits(w, "nf4", torch.bfloat16, True), dict(
        quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)),
    "fp4": (51, lambda w: four_bits(w, "fp4", torch.float32, False), dict(
        quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False)),
}


def hash_of(numbers):
    """The SHA-256 of numbers in their own type, row by row; zeros have no sign."""
    return hashlib.sha256((numbers + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main():
    reference.configure_torch()
    for name, folder in reference.folders(CHECKPOINTS):
        make(name, folder, *CHECKPOINTS[name])


def make(name, folder, seed, quantize, config):
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    make_llama.randomize(model, generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    make_llama.write_tokenizer(folder, SHAPE["vocab_size"])
    stored, numbers, hashes = {}, {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        numbers[key] = weight.float()
        if not key.endswith("_proj.weight"):
            stored[key] = weight
            continue
        parts, of_key = quantize(weight.float())
        # Two bits have four numbers.
        assert (of_key - weight.float()).abs().max() < 0.5 * weight.float().abs().max(), key
        hashes[key], numbers[key] = hash_of(of_key), of_key.float()
        stored |= {key.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
        numbers[key] = numbers[key].contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    shape = json.loads((folder / "config.json").read_text())
    entry = {"quantization_config": config} if config else {}
    (folder / "config.json").write_text(json.dumps(shape | entry, indent=2) + "\n")
    if not config:
        (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as wide:
        wide = Path(wide)
        save_file(numbers, wide / "model.safetensors", metadata={"format": "pt"})
        (wide / "config.json").write_text(json.dumps(shape | {"dtype": "float32"}))
        exact = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32, attn_implementation="eager").eval()
    about = {"model": name, "versions": reference.versions(), "numbers": hashes}
    cases = [make_llama.case(exact, length, generator) for length in PROMPT_LENGTHS]
    reference.write(folder / "expected.json", about, cases)


if __name__ == "__main__":
    main()
