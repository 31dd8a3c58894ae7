//! Llama and the families of its form: pre-norm decoder layers, grouped-query attention, a gated MLP.
//!
//! Mistral looks back over a window, Qwen2 has a bias on Q, K and V, Qwen3 norms its heads, SmolLM3 leaves positions
//! out of some layers, Phi-3 stores its matrices fused; Mixtral and Qwen3-MoE have experts for an MLP. All of that is
//! in `Attention`, `Mlp` and the spec: the form is the same.

use crate::decoder::{BlockNorms, DecoderVariant, Norms};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const FORM: DecoderVariant = DecoderVariant {
    activation: Activation::Silu,
    norms: BlockNorms::InTurn {
        attention: Norms::Before("input_layernorm"),
        mlp: Norms::Before("post_attention_layernorm"),
    },
    norm_kind: NormKind::Rms,
    learns_positions: false,
};
