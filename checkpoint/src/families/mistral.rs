//! Mistral, whose layers have windows; Mixtral, with experts; Ministral, and Ministral 3, whose queries grow.

use super::definition::{
    ChatForm, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, GgufVariant, TensorTables,
    WindowUse,
};
use super::experts::{n_gguf_experts, softmax_experts, unshared_gguf_experts};
use super::llama::{LLAMA, UNREAD};
use crate::config::ExpertsSpec;
use crate::config::json::keys::JsonKeys;
use crate::error::ParseError;
use crate::names::rows::Dim::{ExpertInner, Experts, Hidden};
use crate::names::rows::{TensorMapping, expert, renamed};

pub const MISTRAL: FamilyDefinition = FamilyDefinition {
    name: "Mistral",
    config: ConfigRules {
        class: "MistralForCausalLM",
        model_type: "mistral",
        window: WindowUse::Always { absent: Some(4096) },
        ..LLAMA.config
    },
    gguf: UNREAD,
    chat_form: &MISTRAL_CHAT,
    ..LLAMA
};

pub const MIXTRAL: FamilyDefinition = FamilyDefinition {
    name: "Mixtral",
    config: ConfigRules {
        class: "MixtralForCausalLM",
        model_type: "mixtral",
        eps: 1e-5,
        window: WindowUse::Always { absent: None },
        ..LLAMA.config
    },
    readers: ConfigReaders { experts: mixtral_experts, ..LLAMA.readers },
    gguf: GgufRules {
        variant: Some(GgufVariant { architecture: "llama", is_in: |keys| n_gguf_experts(keys).is_ok_and(|n| n > 0) }),
        experts: unshared_gguf_experts,
        ..LLAMA.gguf
    },
    tensors: TensorTables { experts: &[MIXTRAL_EXPERTS], ..LLAMA.tensors },
    chat_form: &MISTRAL_CHAT,
    ..LLAMA
};

pub const MINISTRAL: FamilyDefinition = FamilyDefinition {
    name: "Ministral",
    architecture: "ministral",
    config: ConfigRules { class: "MinistralForCausalLM", model_type: "ministral", ..MISTRAL.config },
    ..MISTRAL
};

pub const MINISTRAL3: FamilyDefinition = FamilyDefinition {
    name: "Ministral 3",
    architecture: "mistral3",
    rules: FamilyRules { has_temperature: true, ..LLAMA.rules },
    config: ConfigRules {
        class: "Ministral3ForCausalLM",
        model_type: "ministral3",
        eps: 1e-5,
        theta: 1_000_000.0,
        window: WindowUse::Always { absent: None },
        ..LLAMA.config
    },
    gguf: GgufRules { divides_yarn: true, ..LLAMA.gguf },
    chat_form: &MISTRAL_CHAT,
    ..LLAMA
};

/// Other families also have such a mixture.
pub fn mixtral_experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    softmax_experts(keys, keys.length("num_local_experts")?, keys.length("intermediate_size")?, true).map(Some)
}

const MIXTRAL_EXPERTS: &[TensorMapping] = &[
    renamed("mlp.gate.weight", [Experts, Hidden], "block_sparse_moe.gate.weight", "ffn_gate_inp.weight"),
    expert(
        "mlp.experts.{e}.gate_proj.weight",
        [ExpertInner, Hidden],
        "block_sparse_moe.experts.{e}.w1.weight",
        "ffn_gate_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.up_proj.weight",
        [ExpertInner, Hidden],
        "block_sparse_moe.experts.{e}.w3.weight",
        "ffn_up_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "block_sparse_moe.experts.{e}.w2.weight",
        "ffn_down_exps.weight",
    ),
];

pub const MISTRAL_CHAT: ChatForm = ChatForm {
    name: "Mistral",
    token: "[INST]",
    source: "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}\
        {{ eos_token }}{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}",
};
