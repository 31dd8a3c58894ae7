"""Blocks of every quantized type with random contents, and the numbers that the `gguf` package reads in them.

    python make_quants.py     writes quants.bin: for each type its blocks, then their 512 numbers as f32; and the grids
                              of IQ1 to IQ3 as worker/backend/src/cpu/grids.bin, two numbers in a byte, each as an index
                              among the sizes of its type
"""
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

TYPES = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.MXFP4,
         T.IQ4_XS, T.TQ1_0, T.TQ2_0, T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S]
# Where a block has numbers of 16 bits: random bits there would be infinities.
HALVES = {T.Q4_1: [0, 2], T.Q5_1: [0, 2], T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2],
          T.Q6_K: [208], T.MXFP4: [], T.TQ1_0: [52], T.TQ2_0: [64], T.IQ1_M: []}
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
        if kind == T.IQ1_M:
            # The upper four bits of four words are an f16, from the lowest to the highest.
            words = blocks[:, 48:].view(np.uint16)
            d = (random.standard_normal(len(blocks)) * 10.0 ** random.uniform(-5, 1, len(blocks))).astype(np.float16)
            parts = (d.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], dtype=np.uint16)) & 15
            words[:] = words & 0x0fff | parts << 12
        numbers = quants.dequantize(blocks.reshape(-1), kind).astype(np.float32)
        assert numbers.shape == (N,) and np.isfinite(numbers).all(), kind
        out.write(blocks.tobytes() + numbers.tobytes())

GRIDS = [quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ1_S, quants.IQ3_XXS, quants.IQ3_S]
with open(Path(__file__).parent / "../../worker/backend/src/cpu/grids.bin", "wb") as out:
    for kind in GRIDS:
        kind.init_grid()
        indices = np.searchsorted(kind.grid_map, kind.grid.reshape(-1)).astype(np.uint8)
        assert (np.array(kind.grid_map)[indices] == kind.grid.reshape(-1)).all(), kind
        out.write((indices[0::2] | indices[1::2] << 4).tobytes())
