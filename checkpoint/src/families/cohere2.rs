//! Cohere 2: attention and MLP side by side behind one LayerNorm without a bias; windows with a rope, and layers
//! without either.

use super::definition::{
    ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, LayerPositions, TensorTables,
    WindowUse,
};
use super::llama::{KEYS, LLAMA, NO_MULTIPLIERS, is_local_in_pattern};
use crate::config::{BlockNorms, DecoderForm, ModelMultipliers, NormKind, PositionEncoding};
use crate::names::rows::Dim::{Hidden, One};
use crate::names::rows::{TensorMapping, row};

pub const COHERE2: FamilyDefinition = FamilyDefinition {
    name: "Cohere 2",
    architecture: "cohere2",
    rules: FamilyRules {
        positions: LayerPositions { global: PositionEncoding::None, ..LLAMA.rules.positions },
        window_period: 4,
        ..LLAMA.rules
    },
    config: ConfigRules {
        class: "Cohere2ForCausalLM",
        model_type: "cohere2",
        keys: &ConfigKeys { eps: "layer_norm_eps", ..KEYS },
        eps: 1e-5,
        pairs: true,
        is_tied: true,
        window: WindowUse::Always { absent: Some(4096) },
        ..LLAMA.config
    },
    readers: ConfigReaders {
        multipliers: |keys| {
            Ok(ModelMultipliers { logits: Some(keys.float("logit_scale")?.unwrap_or(0.0625)), ..NO_MULTIPLIERS })
        },
        is_parallel: |_| Ok(true),
        is_local: is_local_in_pattern,
        ..LLAMA.readers
    },
    gguf: GgufRules {
        multipliers: |keys| Ok(ModelMultipliers { logits: keys.factor("logit_scale")?, ..NO_MULTIPLIERS }),
        is_parallel: |_| Ok(true),
        ..LLAMA.gguf
    },
    tensors: TensorTables { norms: &[ONE_NORM], ..LLAMA.tensors },
    form: DecoderForm {
        norms: BlockNorms::SideBySide { attention: "input_layernorm", mlp: None },
        norm_kind: NormKind::Layer,
        ..LLAMA.form
    },
    ..LLAMA
};

const ONE_NORM: &[TensorMapping] = &[row("input_layernorm.weight", [One, Hidden], "attn_norm.weight")];
