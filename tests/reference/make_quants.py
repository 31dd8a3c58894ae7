"""Blocks of every quantized type with random contents, and the numbers that the `gguf` package reads in them.

    python make_quants.py     writes quants.bin: for each type its blocks, then their 512 numbers as f32
"""
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

TYPES = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.MXFP4,
         T.IQ4_XS, T.TQ1_0, T.TQ2_0]
# Where a block has numbers of 16 bits: random bits there would be infinities.
HALVES = {T.Q4_1: [0, 2], T.Q5_1: [0, 2], T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2],
          T.Q6_K: [208], T.MXFP4: [], T.TQ1_0: [52], T.TQ2_0: [64]}
N = 512

random = np.random.default_rng(1)
with open("quants.bin", "wb") as out:
    for kind in TYPES:
        elements, n_bytes = GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (N // elements, n_bytes), dtype=np.uint8)
        for at in HALVES.get(kind, [0]):
            halves = (random.standard_normal(len(blocks)) * 10.0 ** random.uniform(-8, 1,
                len(blocks))).astype(np.float16)
            blocks[:, at:at + 2] = halves.view(np.uint8).reshape(-1, 2)
        if kind == T.MXFP4:
            blocks[:4, 0] = [0, 1, 2, 250]
        numbers = quants.dequantize(blocks.reshape(-1), kind).astype(np.float32)
        assert numbers.shape == (N,) and np.isfinite(numbers).all(), kind
        out.write(blocks.tobytes() + numbers.tobytes())
