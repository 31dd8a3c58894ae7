"""Writes tiny random checkpoints with a layer that predicts one token further (multi-token prediction, MTP), and beside
each the tokens that the layer proposes and their logits in f32.

transformers ignores these layers of Qwen3.5, and its names for GLM-4.5's differ from those of published files. So the
layer is written down here: a product of the normed embedding of a token and the normed hidden state of the position
before it, a usual decoder layer, a norm, the head. A proposal's hidden state behind that norm stands for the model's
when the next token is proposed.

    python make_mtp.py [NAME ..]
"""

import safetensors.torch
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

import make_families
import make_llama
import reference
from make_families import DELTA, TINY, rope

N_PROPOSALS = 4
HYBRID = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
ROPE = rope(rope_type="default", partial_rotary_factor=0.5)
NO_INNER = {key: value for key, value in TINY.items() if key != "intermediate_size"}

# Name, seed, config, the classes of a decoder layer and a norm, lengths of the prompts.
CHECKPOINTS = {
    "qwen3.5-mtp": (
        91, lambda: Qwen3_5TextConfig(**TINY | HYBRID, **DELTA, linear_value_head_dim=16, rope_parameters=ROPE),
        Qwen3_5DecoderLayer, Qwen3_5RMSNorm, [1, 2, 40, 270]),
    # The head is the embedding. The experts of the layer are in one tensor, those of the model are not.
    "qwen3.5-moe-mtp": (
        92, lambda: Qwen3_5MoeTextConfig(
            **NO_INNER | HYBRID, **DELTA, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32, shared_expert_intermediate_size=32, tie_word_embeddings=True,
            rope_parameters=ROPE),
        Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, [1, 40]),
    # The layer has an embedding and a head of its own.
    "glm4-moe-mtp": (
        93, lambda: Glm4MoeConfig(
            **TINY, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
            n_shared_experts=1, norm_topk_prob=True, use_qk_norm=True, attention_bias=True, num_mtp_layers=1,
            rope_parameters=ROPE),
        Glm4MoeDecoderLayer, Glm4MoeRMSNorm, [1, 40]),
}


class Mtp(nn.Module):
    """The names are those of Qwen's files."""

    def __init__(self, config, layer, norm, has_ends):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(width, eps=config.rms_norm_eps)
        # The last layer of each config has attention, and experts if any layer has some.
        self.layers = nn.ModuleList([layer(config, config.num_hidden_layers - 1)])
        self.norm = norm(width, eps=config.rms_norm_eps)
        if has_ends:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, embeddings, hidden, rotary):
        """[n, width] each -> [n, width]"""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1))
        n = len(x)
        positions = torch.arange(n)[None]
        later = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        out = self.layers[0](
            x[None], attention_mask=later, position_ids=positions, position_embeddings=rotary(x[None], positions))
        out = out[0] if isinstance(out, tuple) else out
        return self.norm(out[0])


def main():
    reference.configure_torch()
    for name, folder in reference.folders(CHECKPOINTS):
        make(name, folder, *CHECKPOINTS[name])


def make(name, folder, seed, config, layer, norm, lengths):
    config = config()
    config.bos_token_id, config.eos_token_id = make_llama.BEGIN, make_llama.END
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    mtp = Mtp(config, layer, norm, has_ends=name.startswith("glm4")).eval()
    generator = torch.Generator().manual_seed(seed)
    for part in (model, mtp):
        make_families.randomize(part, generator)
        part.to(torch.bfloat16)
    model.save_pretrained(folder, save_original_format=True)
    add_tensors(folder, name, config, mtp)
    make_llama.write_tokenizer(folder, config.vocab_size)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    mtp.to(torch.float32)
    generator = torch.Generator().manual_seed(100 + seed)
    cases = [case(stored, mtp, length, generator) for length in lengths]
    reference.write(folder / "expected.json", {"model": name, "versions": reference.versions()}, cases)
    n_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    print(f"{name}: {n_bytes // 1024} KiB")
    assert n_bytes < 400 * 1024, f"{name}: {n_bytes} bytes of weights are too many for a repository"


def add_tensors(folder, name, config, mtp):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for key, tensor in mtp.state_dict().items():
        if name.startswith("glm4"):
            tensors |= tensors_of_glm(config.num_hidden_layers, key, tensor)
        else:
            tensors[f"mtp.{key}"] = tensor
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def tensors_of_glm(n_layers, key, tensor):
    """The layer stands behind the others, and each expert apart."""
    at = f"model.layers.{n_layers}"
    others = {
        "fc.weight": "eh_proj.weight", "pre_fc_norm_embedding.weight": "enorm.weight",
        "pre_fc_norm_hidden.weight": "hnorm.weight", "norm.weight": "shared_head.norm.weight",
        "lm_head.weight": "shared_head.head.weight", "embed_tokens.weight": "embed_tokens.weight"}
    if key in others:
        return {f"{at}.{others[key]}": tensor}
    key = key.removeprefix("layers.0.")
    if key == "mlp.experts.down_proj":
        return {f"{at}.mlp.experts.{e}.down_proj.weight": matrix for e, matrix in enumerate(tensor)}
    if key == "mlp.experts.gate_up_proj":
        halves = [(e, part, half) for e, both in enumerate(tensor) for part, half in zip(("gate", "up"), both.chunk(2))]
        return {f"{at}.mlp.experts.{e}.{part}_proj.weight": half for e, part, half in halves}
    return {f"{at}.{key}": tensor}


def case(model, mtp, length, generator):
    prompt = torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    drawn = int(model.lm_head(hidden[-1]).argmax())
    embed = getattr(mtp, "embed_tokens", model.get_input_embeddings())
    head = getattr(mtp, "lm_head", model.lm_head)
    tokens, proposals, logits = prompt[1:] + [drawn], [], []
    for _ in range(N_PROPOSALS):
        out = mtp(embed(torch.tensor(tokens)), hidden, model.model.rotary_emb)
        logits.append(head(out[-1]))
        proposals.append(int(logits[-1].argmax()))
        # The next position has no hidden state of the model yet.
        tokens, hidden = tokens + proposals[-1:], torch.cat([hidden, out[-1:]])
    return {
        "name": f"prompt of {length}",
        "prompt": prompt,
        "drawn": drawn,
        "proposals": proposals,
        "logits": [[reference.float_of(v) for v in row] for row in logits],
    }


if __name__ == "__main__":
    main()
