"""Writes models of real shapes with random weights, as GGUF: `shapes.py NAME FORMAT TOKENIZER.gguf OUT.gguf`. Speed
does not depend on the weights' values, as long as they stay finite; the tokenizer comes from another file.

Needs the packages `gguf` and `numpy`.
"""

import argparse

import gguf
import numpy

# Width, inner width, layers, heads, heads of K and V, context.
SHAPES = {
    "random-0.5B": (896, 4864, 24, 14, 2, 32768),
    "random-1.5B": (1536, 8960, 28, 12, 2, 32768),
    "random-8B": (4096, 14336, 32, 32, 8, 32768),
}
# For a block: its elements, the bytes of its scales and of its digits, and the approximate spread of the digits.
FORMATS = {
    "Q4_0": (gguf.GGMLQuantizationType.Q4_0, 32, 2, 16, 4.6),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, 32, 2, 32, 74.0),
    "Q4_K": (gguf.GGMLQuantizationType.Q4_K, 256, 16, 128, 150.0),
}
FILE_TYPES = {"Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
              "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("tokenizer")
    parser.add_argument("out")
    arguments = parser.parse_args()
    write(arguments.name, arguments.format, arguments.tokenizer, arguments.out)


def write(name, kind, tokenizer, out):
    width, inner, n_layers, n_heads, n_kv_heads, context = SHAPES[name]
    writer = gguf.GGUFWriter(out, "llama")
    n_vocab = copy_tokenizer(gguf.GGUFReader(tokenizer), writer)
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv_heads)
    writer.add_rope_dimension_count(width // n_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(n_vocab)
    kv = width // n_heads * n_kv_heads
    matrices = {"token_embd": (n_vocab, width), "output": (n_vocab, width)}
    for i in range(n_layers):
        matrices |= {f"blk.{i}.attn_q": (width, width), f"blk.{i}.attn_k": (kv, width), f"blk.{i}.attn_v": (kv, width),
                     f"blk.{i}.attn_output": (width, width), f"blk.{i}.ffn_gate": (inner, width),
                     f"blk.{i}.ffn_up": (inner, width), f"blk.{i}.ffn_down": (width, inner)}
    norms = ["output_norm", *(f"blk.{i}.{part}_norm" for i in range(n_layers) for part in ("attn", "ffn"))]
    for norm in norms:
        writer.add_tensor(f"{norm}.weight", numpy.ones(width, numpy.float32))
    random = numpy.random.default_rng(1)
    for matrix, (n_out, n_in) in matrices.items():
        writer.add_tensor(f"{matrix}.weight", packed(random, kind, n_out, n_in), raw_dtype=FORMATS[kind][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_tokenizer(reader, writer):
    """Copies every field of the tokenizer, and returns how many tokens it has."""
    n_vocab = 0
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            value = field.contents()
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, kind, sub_type=sub)
            n_vocab = len(value) if field.name == "tokenizer.ggml.tokens" else n_vocab
    return n_vocab


def packed(random, kind, n_out, n_in):
    """Returns blocks with random digits, and with scales that keep a product as large as its input."""
    _, n_elements, n_scales, n_digits, spread = FORMATS[kind]
    n_blocks = n_out * n_in // n_elements
    blocks = numpy.empty((n_blocks, n_scales + n_digits), numpy.uint8)
    scale = numpy.float16(1 / (spread * n_in ** 0.5))
    blocks[:, :2] = numpy.frombuffer(scale.tobytes(), numpy.uint8)
    if kind == "Q4_K":
        # Random sub-scales of six bits, and minimums that move the digits' middle to zero.
        blocks[:, 2:4] = numpy.frombuffer(numpy.float16(7.5 * scale).tobytes(), numpy.uint8)
        blocks[:, 4:n_scales] = random.integers(0, 256, (n_blocks, n_scales - 4), numpy.uint8)
    blocks[:, n_scales:] = random.integers(0, 256, (n_blocks, n_digits), numpy.uint8)
    return blocks.reshape(n_out, -1)


if __name__ == "__main__":
    main()
