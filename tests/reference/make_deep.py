"""Writes tiny random Llama GGUFs that are deep and odd enough to be cut over many ranks: five layers, heads in three
leaves (so that a cut falls within the group of a KV head, and a fourth rank gets none) or in five (so that four ranks
get some, and not as many), seven leaves of an MLP, a prime vocabulary, quantized weights of two types.

    python make_deep.py     writes llama-deep.gguf and llama-wide.gguf

There is no reference beside them: every grid must give the results of one rank.
"""

import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

HERE = pathlib.Path(__file__).parent
LAYERS, HIDDEN, KV_HEADS, HEAD_DIM, INNER, VOCAB = 5, 64, 2, 16, 224, 293


def main():
    write("deep", 6)
    write("wide", 10)


def write(name, heads):
    writer = gguf.GGUFWriter(HERE / f"llama-{name}.gguf", "llama")
    writer.add_name(name)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    add_tensors(writer, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer, heads):
    random = np.random.default_rng(5)

    def matrix(name, rows, cols, kind, scale):
        values = (scale * random.standard_normal((rows, cols))).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name):
        writer.add_tensor(name, (1 + 0.25 * random.standard_normal(HIDDEN)).astype(np.float32))

    def projection(name, rows, cols, kind):
        matrix(name, rows, cols, kind, 1.4 / cols**0.5)

    matrix("token_embd.weight", VOCAB, HIDDEN, T.Q8_0, 0.35)
    norm("output_norm.weight")
    matrix("output.weight", VOCAB, HIDDEN, T.Q4_1, 0.35)
    for i in range(LAYERS):
        kind, other = (T.Q8_0, T.Q4_1) if i % 2 == 0 else (T.Q4_1, T.Q8_0)
        norm(f"blk.{i}.attn_norm.weight")
        projection(f"blk.{i}.attn_q.weight", heads * HEAD_DIM, HIDDEN, kind)
        projection(f"blk.{i}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN, other)
        projection(f"blk.{i}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN, kind)
        projection(f"blk.{i}.attn_output.weight", HIDDEN, heads * HEAD_DIM, other)
        norm(f"blk.{i}.ffn_norm.weight")
        projection(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN, other)
        projection(f"blk.{i}.ffn_up.weight", INNER, HIDDEN, kind)
        projection(f"blk.{i}.ffn_down.weight", HIDDEN, INNER, kind)


if __name__ == "__main__":
    main()
