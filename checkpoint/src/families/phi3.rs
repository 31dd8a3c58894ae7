//! Phi-3: files store Q, K and V together, and gate and up.

use super::definition::{ChatForm, ConfigRules, FamilyDefinition, TensorTables, WindowUse};
use super::llama::{HALVES, LLAMA};
use crate::names::rows::Dim::{Heads, Hidden, KvHeads};
use crate::names::rows::{GATE_UP_FUSED, TensorMapping, fused, row};

pub const PHI3: FamilyDefinition = FamilyDefinition {
    name: "Phi-3",
    architecture: "phi3",
    config: ConfigRules {
        class: "Phi3ForCausalLM",
        model_type: "phi3",
        eps: 1e-5,
        window: WindowUse::Always { absent: None },
        yarn_is_long: true,
        ..LLAMA.config
    },
    gguf: HALVES,
    tensors: TensorTables { attention: &[FUSED_ATTENTION], mlp: &[GATE_UP_FUSED], ..LLAMA.tensors },
    ..LLAMA
};

const FUSED_ATTENTION: &[TensorMapping] = &[
    fused("self_attn.q_proj.weight", [Heads, Hidden], QKV_FILES, &[]),
    fused("self_attn.k_proj.weight", [KvHeads, Hidden], QKV_FILES, &[Heads]),
    fused("self_attn.v_proj.weight", [KvHeads, Hidden], QKV_FILES, &[Heads, KvHeads]),
    row("self_attn.o_proj.weight", [Hidden, Heads], "attn_output.weight"),
];
const QKV_FILES: [&str; 2] = ["self_attn.qkv_proj.weight", "attn_qkv.weight"];

pub const PHI3_CHAT: ChatForm = ChatForm {
    name: "Phi-3",
    token: "<|assistant|>",
    source: "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
};
