"""Writes a tiny random Qwen3-VL MoE as its repositories have it: the text model within another, with each expert's
matrix transposed. Beside it are the results of transformers for text, in f32.

    python make_wrapped.py
"""

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

import make_families
import make_llama
import reference

NAME, SEED, LENGTHS = "qwen3-vl-moe", 49, [1, 40, 270]


def config():
    text = make_families.TINY | dict(
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
        rope_parameters=make_families.rope(rope_type="default", mrope_section=[4, 2, 2]),
        bos_token_id=make_llama.BEGIN, eos_token_id=make_llama.END)
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=text["hidden_size"],
        deepstack_visual_indexes=[0], num_position_embeddings=16)
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision)


def main():
    reference.configure_torch()
    model = AutoModelForImageTextToText.from_config(config(), attn_implementation="eager").eval()
    make_families.randomize(model, torch.Generator().manual_seed(SEED))
    model.to(torch.bfloat16)
    folder = reference.HERE / NAME
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    # transformers writes the form that it computes with; repositories have the one before.
    turn = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in load_file(path).items()}
    save_file(turn, path, metadata={"format": "pt"})
    make_llama.write_tokenizer(folder, config().text_config.vocab_size)
    stored = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    for (name, before), after in zip(model.named_parameters(), stored.parameters()):
        assert torch.equal(before.float(), after), f"transformers reads another {name}"
    stored.config.vocab_size = stored.config.text_config.vocab_size
    generator = torch.Generator().manual_seed(100 + SEED)
    cases = [make_families.case(stored, length, generator) for length in LENGTHS]
    reference.write(folder / "expected.json", {"model": NAME, "versions": reference.versions()}, cases)


if __name__ == "__main__":
    main()
