//! GPT-2: learned positions added to the embedding, LayerNorm (its norms have a bias), a bias on every product, an MLP
//! without a gate. A folder stores matrices transposed, a GGUF does not.

use super::definition::{
    AttentionBias, ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, LayerPositions, TensorTables,
};
use super::llama::{GELU_TANH, HALVES, KEYS, LLAMA};
use crate::config::{Activation, DecoderForm, NormKind, PositionEncoding};
use crate::names::rows::Dim::{Context, Heads, Hidden, Inner, KvHeads, One, Vocab};
use crate::names::rows::{
    Dim, EMBEDDING, HEAD, NORM, NORM_BIAS, POSITIONS, QKV, TensorMapping, TensorSource, part, transposed, whole,
};

pub const GPT2: FamilyDefinition = FamilyDefinition {
    name: "GPT-2",
    architecture: "gpt2",
    rules: FamilyRules {
        bias: AttentionBias::Always,
        positions: LayerPositions::all(PositionEncoding::None),
        ..LLAMA.rules
    },
    config: ConfigRules {
        class: "GPT2LMHeadModel",
        model_type: "gpt2",
        keys: &ConfigKeys {
            hidden: "n_embd",
            n_layers: "n_layer",
            n_heads: "n_head",
            context: "n_positions",
            inner: "n_inner",
            eps: "layer_norm_epsilon",
            activation: "activation_function",
            ..KEYS
        },
        activations: GELU_TANH,
        eps: 1e-5,
        is_tied: true,
        ..LLAMA.config
    },
    readers: ConfigReaders {
        inner: |keys, names, hidden| Ok(keys.optional(names.inner)?.unwrap_or(4 * hidden)),
        ..LLAMA.readers
    },
    gguf: HALVES,
    tensors: TensorTables {
        outer: GPT2_OUTER,
        layers: "transformer.h",
        norms: &[LAYER],
        attention: &[],
        bias: &[],
        mlp: &[],
        ..LLAMA.tensors
    },
    form: DecoderForm {
        activation: Activation::PlainGelu,
        norm_kind: NormKind::Layer,
        learns_positions: true,
        ..LLAMA.form
    },
    ..LLAMA
};

const fn gpt2(name: &'static str, dims: [Dim; 2], folder: TensorSource, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder, gguf: TensorSource { file: gguf, is_turned: false, ..folder } }
}

const LAYER: &[TensorMapping] = &[
    gpt2("input_layernorm.weight", [One, Hidden], whole("ln_1.weight"), "attn_norm.weight"),
    gpt2("input_layernorm.bias", [One, Hidden], whole("ln_1.bias"), "attn_norm.bias"),
    gpt2(
        "self_attn.q_proj.weight",
        [Heads, Hidden],
        transposed(part("attn.c_attn.weight", &[], QKV)),
        "attn_qkv.weight",
    ),
    gpt2(
        "self_attn.k_proj.weight",
        [KvHeads, Hidden],
        transposed(part("attn.c_attn.weight", &[Heads], QKV)),
        "attn_qkv.weight",
    ),
    gpt2(
        "self_attn.v_proj.weight",
        [KvHeads, Hidden],
        transposed(part("attn.c_attn.weight", &[Heads, KvHeads], QKV)),
        "attn_qkv.weight",
    ),
    gpt2("self_attn.q_proj.bias", [One, Heads], part("attn.c_attn.bias", &[], QKV), "attn_qkv.bias"),
    gpt2("self_attn.k_proj.bias", [One, KvHeads], part("attn.c_attn.bias", &[Heads], QKV), "attn_qkv.bias"),
    gpt2("self_attn.v_proj.bias", [One, KvHeads], part("attn.c_attn.bias", &[Heads, KvHeads], QKV), "attn_qkv.bias"),
    gpt2("self_attn.o_proj.weight", [Hidden, Heads], transposed(whole("attn.c_proj.weight")), "attn_output.weight"),
    gpt2("self_attn.o_proj.bias", [One, Hidden], whole("attn.c_proj.bias"), "attn_output.bias"),
    gpt2("post_attention_layernorm.weight", [One, Hidden], whole("ln_2.weight"), "ffn_norm.weight"),
    gpt2("post_attention_layernorm.bias", [One, Hidden], whole("ln_2.bias"), "ffn_norm.bias"),
    gpt2("mlp.up_proj.weight", [Inner, Hidden], transposed(whole("mlp.c_fc.weight")), "ffn_up.weight"),
    gpt2("mlp.up_proj.bias", [One, Inner], whole("mlp.c_fc.bias"), "ffn_up.bias"),
    gpt2("mlp.down_proj.weight", [Hidden, Inner], transposed(whole("mlp.c_proj.weight")), "ffn_down.weight"),
    gpt2("mlp.down_proj.bias", [One, Hidden], whole("mlp.c_proj.bias"), "ffn_down.bias"),
];
const GPT2_OUTER: &[TensorMapping] = &[
    gpt2(EMBEDDING, [Vocab, Hidden], whole("transformer.wte.weight"), "token_embd.weight"),
    gpt2(POSITIONS, [Context, Hidden], whole("transformer.wpe.weight"), "position_embd.weight"),
    gpt2(NORM, [One, Hidden], whole("transformer.ln_f.weight"), "output_norm.weight"),
    gpt2(NORM_BIAS, [One, Hidden], whole("transformer.ln_f.bias"), "output_norm.bias"),
    gpt2(HEAD, [Vocab, Hidden], whole("lm_head.weight"), "output.weight"),
];
